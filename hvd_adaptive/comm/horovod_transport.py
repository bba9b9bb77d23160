"""The transport over Horovod's public operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from torch import Tensor

from hvd_adaptive.comm import launcher
from hvd_adaptive.comm.horovod_tensors import tensors_held
from hvd_adaptive.comm.network import NetworkTransport
from hvd_adaptive.comm.request import Group, Request
from hvd_adaptive.comm.transport import JoinedRankError, assembled

_Handle: TypeAlias = int | Callable[[], Tensor]


@contextmanager
def joins_named() -> Iterator[None]:
    """Raise :class:`JoinedRankError` where Horovod refuses an operation because of ``hvd.join()``."""
    try:
        yield
    except HorovodInternalError as error:
        if "not supported with Join" not in str(error):
            raise
        raise JoinedRankError("payloads that are gathered, nor when layers change") from error


_NAME_TAKEN = "same name as another tensor that is currently being processed"


@contextmanager
def leftovers_dropped() -> Iterator[None]:
    """Begin an elastic run again where an operation is left over from before Horovod's restart.

    Horovod's thread ends when a rank has gone, and refuses what is under way. What is handed over at
    that very moment it neither refuses nor runs: after ``hvd.init()`` the operation is still there, so
    that its name is taken. ``hvd.shutdown()`` drops it, which an elastic run calls on this error.

    Raises:
        HorovodInternalError: in the place of Horovod's ValueError, in elastic runs only.
    """
    try:
        yield
    except ValueError as error:
        if _NAME_TAKEN not in str(error) or not launcher.is_elastic():
            raise
        raise HorovodInternalError(f"left over from before Horovod's restart: {error}") from error


class HorovodTransport(NetworkTransport):
    """See :class:`~hvd_adaptive.comm.transport.Transport`.

    Horovod finds operations by their names, and runs all of them in the order in which its first rank
    has heard of them from all: ranks may start them in different orders.
    """

    def submit(self, request: Request, name: str, step: int) -> _Handle:
        """Start a collective; HorovodInternalError if a rank has gone."""
        with leftovers_dropped(), tensors_held():
            return self._start(request, name, step)

    def _start(self, request: Request, name: str, step: int) -> _Handle:
        tensor, common = request.tensor, {"name": name, "process_set": self._groups[request.group]}
        handle: _Handle
        match request.operation:
            case "allreduce":
                handle = hvd.allreduce_async_(
                    tensor,
                    op=self._op,
                    prescale_factor=self._prescale,
                    postscale_factor=self._postscale,
                    **common,
                )
            case "allgather":
                handle = partial(_flat, hvd.allgather_async(_uncached(tensor, step), **common))
            case "alltoall":
                splits = None if request.splits is None else torch.IntTensor(request.splits)
                handle = partial(
                    _flat, hvd.alltoall_async(_uncached(tensor, step), splits=splits, **common)
                )
            case "sparse":
                handle = self._gather_sparse(tensor, name, request.group)
        return handle

    def _gather_sparse(self, tensor: Tensor, name: str, group: Group) -> _Handle:
        """As ``hvd.sparse_allreduce_async`` does, with a look at what is held between its two."""
        process_set = self._groups[group]
        places = tensor._indices().t().contiguous()
        with tensors_held():
            indices = hvd.allgather_async(places, name=f"{name}.indices", process_set=process_set)
        values = hvd.allgather_async(tensor._values(), name=f"{name}.values", process_set=process_set)
        divisor = self.size if self.averages else 1

        def finish() -> Tensor:
            gathered = hvd.synchronize(values)
            return assembled(hvd.synchronize(indices).t(), gathered, tensor.shape, divisor)

        return finish

    def wait(self, handle: _Handle) -> Tensor:
        """The result of a collective; raises what Horovod raises when a rank has gone."""
        with joins_named():
            result: Tensor = handle() if callable(handle) else hvd.synchronize(handle)
        return result

    def has_ended(self, handle: _Handle) -> bool:
        """Whether :meth:`wait` would return at once, as far as that can be told."""
        number = handle.args[0] if isinstance(handle, partial) else handle
        return isinstance(number, int) and bool(hvd.poll(number))


def _uncached(tensor: Tensor, step: int) -> Tensor:
    """The bytes in a shape that Horovod did not see in the step before.

    An operation of the same name and shape is answered from Horovod's cache. A rank that has called
    ``hvd.join()`` says that it is ready for all that is in its cache: what is no allreduce then hangs.
    Without the cache Horovod refuses it. Cost: none that was seen, as most payloads differ in size.
    """
    return tensor.view(-1, 1) if step % 2 else tensor


def _flat(handle: int) -> Tensor:
    """Wait for one of those."""
    result = hvd.synchronize(handle)
    # alltoall also tells how many rows came from whom
    gathered: Tensor = result[0] if isinstance(result, tuple) else result
    return gathered.view(-1)
