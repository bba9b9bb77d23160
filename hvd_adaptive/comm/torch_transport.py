"""The transport over torch.distributed: gloo for main memory, NCCL for GPUs where it was initialized.

Horovod negotiates which operation is next; torch.distributed runs them in the order in which each rank
starts them, which must be the same. First operations of buckets start in the buckets' order, from
backward hooks; second ones in that order as well, but nobody knows between which first ones; votes
and all else when the step ends. So each of the three is a lane: a group of its own, with a thread that
does one operation after the other. Tensors on GPUs share one lane, and no second operation of theirs
starts before the first ones of all buckets.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import ClassVar, Final, TypeAlias

import torch
from torch import Tensor

from hvd_adaptive.comm.network import NetworkTransport
from hvd_adaptive.comm.request import AVERAGE, Group, Request
from hvd_adaptive.comm.topology import Topology
from hvd_adaptive.comm.torch_operations import SECONDS_TO_END, Groups, losses_named
from hvd_adaptive.comm.torch_ranks import TorchRanks, backend_of
from hvd_adaptive.comm.transport import assembled, scaled

_Result: TypeAlias = tuple[Tensor, "torch.cuda.Event | None"]
_LANES: Final = {"0": "first", "1": "second"}
"""By the ending of an operation's name; all others are in the lane ``later``."""
_ON_GPU: Final = "gpu"


class TorchTransport(NetworkTransport):
    """See :class:`~hvd_adaptive.comm.transport.Transport`.

    All ranks make one at the same time. Cost: some threads and, between each two ranks, connections
    for each lane.

    Args:
        name: the same on all ranks, and used by no other transport.
        op, ranks, gradient_predivide_factor, topology, groups, obstacle: see :class:`Transport`.
    """

    in_order: ClassVar[bool] = True

    def __init__(
        self,
        name: str,
        op: int,
        ranks: TorchRanks,
        gradient_predivide_factor: float = 1.0,
        topology: Topology | None = None,
        groups: Mapping[Group, TorchRanks] | None = None,
        obstacle: str = "",
    ) -> None:
        super().__init__(op, ranks, gradient_predivide_factor, topology, groups, obstacle)
        self._ranks = ranks
        members: dict[Group, TorchRanks] = {"all": ranks, **(groups or {})}
        self._lanes = {
            (group, lane): _Lane(f"{name}/{group}/{lane}", some, lane == _ON_GPU)
            for group, some in members.items()
            if some.included()
            for lane in (*_LANES.values(), "later", *_gpu_lanes())
        }

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._ranks.size()

    def submit(self, request: Request, name: str, step: int) -> Future[_Result]:
        """Start a collective, which waits for those before it in its lane."""
        del step
        ending = _LANES.get(name.rpartition(".")[2], "later")
        lane = _ON_GPU if request.tensor.is_cuda and _gpu_lanes() else ending
        return self._lanes[request.group, lane].submit(
            request.tensor, lambda groups: self._done(request, groups)
        )

    def wait(self, handle: Future[_Result]) -> Tensor:
        """The result; LostRankError if a rank is gone."""
        result, event = handle.result()
        if event is not None:
            stream = torch.cuda.current_stream(result.device)
            stream.wait_event(event)
            result.record_stream(stream)
        return result

    def has_ended(self, handle: Future[_Result]) -> bool:
        """Not where it would let a rank start operations in another order than others do."""
        ended = handle.done() and handle.exception() is None
        return ended and not self.topology.is_layered and handle.result()[1] is None

    def _done(self, request: Request, groups: Groups) -> Tensor:
        """Do it."""
        tensor = request.tensor
        match request.operation:
            case "allreduce":
                total = scaled(tensor, self._prescale)
                groups.sum_(total)
                return tensor.copy_(scaled(total, self._after_sum))
            case "allgather":
                return groups.gather(tensor)
            case "alltoall":
                return groups.exchange(tensor, request.splits)
            case "sparse":
                return self._sparse(tensor, groups)

    def _sparse(self, tensor: Tensor, groups: Groups) -> Tensor:
        """All ranks' indices and values, one after the other."""
        dimensions, row = tensor._indices().shape[0], tensor._values().shape[1:]
        indices = groups.gather(tensor._indices().t()).view(-1, dimensions).t()
        values = groups.gather(tensor._values()).view(-1, *row)
        divisor = self.size if self._op == AVERAGE else 1
        return assembled(indices, values, tensor.shape, divisor)


def _gpu_lanes() -> tuple[str, ...]:
    """The lane of GPUs, where torch.distributed was initialized for them."""
    if torch.cuda.is_available() and backend_of(torch.device("cuda")) == "nccl":
        return (_ON_GPU,)
    return ()


class _Lane:
    """A group, and a thread that does its operations in the order in which they were given to it."""

    def __init__(self, name: str, ranks: TorchRanks, on_gpu: bool) -> None:
        device = ranks.group(f"{name}/nccl", "nccl") if on_gpu else None
        self._groups = Groups(ranks.size(), ranks.group(name), device)
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # a daemon: at the end of a process, an operation that never ends must not hold it up
        thread = threading.Thread(target=_work, args=(self._queue,), name=f"hva-{name}", daemon=True)
        thread.start()
        weakref.finalize(self, _end, thread, self._queue)

    def submit(self, tensor: Tensor, do: Callable[[Groups], Tensor]) -> Future[_Result]:
        """Do it after all that was submitted before."""
        future: Future[_Result] = Future()
        groups = self._groups
        ready = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

        def run() -> None:
            try:
                with losses_named():
                    result = (do(groups), None) if ready is None else _on_gpu(tensor, ready, groups, do)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._queue.put(run)
        return future


def _on_gpu(
    tensor: Tensor, ready: torch.cuda.Event, groups: Groups, do: Callable[[Groups], Tensor]
) -> _Result:
    """On this thread's own stream, after what makes the tensor."""
    with torch.cuda.device(tensor.device), torch.cuda.stream(torch.cuda.Stream()) as _:
        stream = torch.cuda.current_stream()
        stream.wait_event(ready)
        tensor.record_stream(stream)
        result = do(groups)
        return result, stream.record_event()


def _work(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := queue.get()) is not None:
        task()
        del task  # it holds groups, which must not outlive their lane


def _end(thread: threading.Thread, queue: SimpleQueue[Callable[[], None] | None]) -> None:
    """With its lane, or before Python ends: a thread that goes on then would end with a crash."""
    queue.put(None)
    if thread is not threading.current_thread():
        thread.join(SECONDS_TO_END)
