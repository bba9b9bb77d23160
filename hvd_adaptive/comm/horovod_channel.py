"""The decision path's messages beside Horovod, or over it.

Over MPI it is a communicator of its own, so that nothing here waits for Horovod's cycle or takes a
place in its order; where Horovod runs on Gloo, or mpi4py is missing on some rank, Horovod carries it.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import horovod.torch as hvd
import numpy as np
import torch
from horovod.common.exceptions import HorovodInternalError

from hvd_adaptive.arrays import Float64s
from hvd_adaptive.comm.agreement import Control
from hvd_adaptive.comm.control_channel import Channel, Pending
from hvd_adaptive.comm.horovod_exit import leave_together
from hvd_adaptive.comm.horovod_tensors import tensors_held
from hvd_adaptive.comm.horovod_transport import leftovers_dropped
from hvd_adaptive.comm.process_set_control import ProcessSetControl

T = TypeVar("T")

NAP: Final = 50e-6
"""Seconds between two looks at whether a request is done."""
SECONDS_TO_CLOSE: Final = 0.5
"""For what is under way when MPI ends; where a rank has failed, it never comes."""


class MpiChannel(Channel):
    """mpi4py, on a duplicate of the ranks' communicator.

    Args:
        process_set: whose ranks take part; all of them make one, at the same time.
    """

    name = "mpi4py"

    def __init__(self, process_set: hvd.ProcessSet = hvd.global_process_set) -> None:
        mpi = _mpi()
        self._calls = _calls()
        world = mpi.COMM_WORLD
        ranks = process_set.ranks
        if ranks is None or len(ranks) == world.size:
            self._comm = self._calls.make(world.Dup)
        else:
            group = self._calls.make(lambda: world.group.Incl(list(ranks)))
            self._comm = self._calls.make(lambda: world.Create_group(group))
        self._size, self._rank = self._comm.size, self._comm.rank
        self._sum, self._min = mpi.SUM, mpi.MIN

    def mean(self, values: Float64s) -> Pending:
        """A sum that continues while others compute."""
        pending = self._reduce(values, self._sum)
        return lambda: pending() / self._size

    def least(self, values: Float64s) -> Pending:
        """A minimum that continues while others compute."""
        return self._reduce(values, self._min)

    def gather(self, values: Float64s) -> Pending:
        """An allgather that continues while others compute."""
        mine = np.ascontiguousarray(values, np.float64)
        out = np.empty((self._size, len(mine)))
        return self._pending(lambda: self._comm.Iallgather(mine, out), mine, out)

    def broadcast(self, message: str) -> str:
        """Blocks until rank 0 has called."""
        data = np.frombuffer(message.encode(), np.uint8)
        length = np.array([len(data)], np.int64)
        self._calls.finish(self._calls.start(lambda: self._comm.Ibcast(length, root=0), length))
        if self._rank:
            data = np.empty(int(length[0]), np.uint8)
        self._calls.finish(self._calls.start(lambda: self._comm.Ibcast(data, root=0), data))
        return data.tobytes().decode()

    def exchange(self, message: str) -> list[str]:
        """Blocks until all ranks have called: their lengths, then what they say."""
        mine = np.frombuffer(message.encode(), np.uint8)
        length, lengths = np.array([len(mine)], np.int64), np.empty(self._size, np.int64)
        self._finish(lambda: self._comm.Iallgather(length, lengths), length, lengths)
        everyone = np.empty(int(lengths.sum()), np.uint8)
        counts = lengths.tolist()
        self._finish(lambda: self._comm.Iallgatherv(mine, [everyone, counts]), mine, everyone)
        ends = np.cumsum(lengths)[:-1]
        return [part.tobytes().decode() for part in np.split(everyone, ends)]

    def _finish(self, begin: Callable[[], Any], *buffers: Any) -> None:
        self._calls.finish(self._calls.start(begin, *buffers))

    def _reduce(self, values: Float64s, operation: Any) -> Pending:
        mine, out = np.ascontiguousarray(values, np.float64), np.empty(values.shape)
        return self._pending(lambda: self._comm.Iallreduce(mine, out, operation), mine, out)

    def _pending(self, begin: Callable[[], Any], mine: Float64s, out: Float64s) -> Pending:
        request = self._calls.start(begin, mine, out)

        def wait() -> Float64s:
            self._calls.finish(request)
            return out

        return wait


class _Calls:
    """What is asked of mpi4py: one call at a time, and none after MPI's end.

    Horovod ends MPI in a thread of its own as soon as any rank ends, whatever this one does at that
    moment; a call into what is gone would be a segmentation fault. Before anything is gone, MPI deletes
    what is attached to COMM_SELF, and waits for it: that closes this, after what is under way. A rank
    that ends may have its part of a result that another one still waits for.
    """

    def __init__(self, mpi: Any) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._under_way: dict[int, tuple[Any, ...]] = {}
        """Requests with their buffers: MPI may write into those until it has ended."""
        key = mpi.Comm.Create_keyval(delete_fn=self._close)
        mpi.COMM_SELF.Set_attr(key, self)

    def make(self, call: Callable[[], T]) -> T:
        """What the call returns."""
        with self._lock:
            if self._closed:
                raise HorovodInternalError("Horovod has been shut down, and MPI with it.")
            return call()

    def start(self, begin: Callable[[], Any], *buffers: Float64s | Any) -> Any:
        """A request; its buffers are kept alive until it is finished, which mpi4py does not do."""
        request = self.make(begin)
        self._under_way[id(request)] = (request, *buffers)
        return request

    def finish(self, request: Any) -> None:
        """Waits for a request by looking at it again and again.

        A thread that waits inside Open MPI while Horovod's does so, too, sleeps until that one wakes
        it. After `hvd_adaptive.init()` Horovod's is the last to get a core: 13 ms were seen for 600
        bytes.
        """
        while request and not self.make(request.Test):  # a request that is done is false
            time.sleep(NAP)
        self._under_way.pop(id(request), None)

    def _close(self, *attribute: Any) -> None:
        """By MPI, in the thread that ends it."""
        last = time.monotonic() + SECONDS_TO_CLOSE
        with self._lock:
            for request, *_ in [*self._under_way.values()]:
                while request and not request.Test() and time.monotonic() < last:
                    time.sleep(NAP)
            self._closed = True


class HorovodChannel(Channel):
    """Horovod's own operations.

    Args:
        name: of the operations, the same on all ranks and used by nobody else.
        process_set: whose ranks take part.
    """

    name = "horovod"

    def __init__(self, name: str, process_set: hvd.ProcessSet = hvd.global_process_set) -> None:
        self._name = name
        self._process_set = process_set
        self._count = 0

    def mean(self, values: Float64s) -> Pending:
        """An average."""
        return self._reduce(values, hvd.Average)

    def least(self, values: Float64s) -> Pending:
        """A minimum."""
        return self._reduce(values, hvd.Min)

    def gather(self, values: Float64s) -> Pending:
        """An allgather."""
        with leftovers_dropped(), tensors_held():
            handle = hvd.allgather_async(
                torch.from_numpy(np.ascontiguousarray(values, np.float64)).view(1, -1),
                name=self._next_name(),
                process_set=self._process_set,
            )
        return lambda: hvd.synchronize(handle).numpy()

    def broadcast(self, message: str) -> str:
        """The first of what all ranks gather."""
        control = ProcessSetControl(f"{self._name}.plan", self._process_set)
        mine = message if control.rank == 0 else None
        return str(control.allgather(mine)[0])

    def exchange(self, message: str) -> list[str]:
        """As small objects are gathered."""
        control = ProcessSetControl(f"{self._name}.exchange", self._process_set)
        return [*map(str, control.allgather(message))]

    def _reduce(self, values: Float64s, operation: Any) -> Pending:
        with leftovers_dropped(), tensors_held():
            handle = hvd.allreduce_async(
                torch.from_numpy(np.ascontiguousarray(values, np.float64)),
                op=operation,
                name=self._next_name(),
                process_set=self._process_set,
            )
        return lambda: hvd.synchronize(handle).numpy()

    def _next_name(self) -> str:
        self._count += 1
        return f"{self._name}.{self._count}"


def open_channel(
    name: str, control: Control, process_set: hvd.ProcessSet = hvd.global_process_set
) -> Channel:
    """The best that all ranks have; all of them call it."""
    if all(control.allgather(_has_mpi())):
        leave_together()
        return MpiChannel(process_set)
    return HorovodChannel(name, process_set)


def _has_mpi() -> bool:
    """Whether Horovod runs on an MPI that several threads may call, and mpi4py sees it."""
    if not (hvd.mpi_enabled() and hvd.mpi_threads_supported()):
        return False
    try:
        mpi = _mpi()
    except ImportError:
        return False
    # one that was built for another MPI would see a world of one rank
    return bool(mpi.Is_initialized()) and mpi.COMM_WORLD.size == hvd.size()


@functools.cache
def _calls() -> _Calls:
    """One a process, as MPI is."""
    return _Calls(_mpi())


def _mpi() -> Any:
    """mpi4py's MPI, which leaves beginning and end to Horovod."""
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    return MPI
