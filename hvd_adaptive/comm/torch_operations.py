"""Collectives of torch.distributed on payloads of different sizes; each waits for its result."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from hvd_adaptive.comm.failure import LostRankError

SECONDS_TO_END: Final = 1.0
"""For an operation that is under way when what it is sent by is no longer needed."""


@contextmanager
def losses_named() -> Iterator[None]:
    """Raise :class:`LostRankError` where torch.distributed reports that a rank is gone."""
    try:
        yield
    except RuntimeError as error:  # gloo has no class of its own for it
        raise LostRankError(f"a rank is gone: {' '.join(str(error).split())}") from error


class Groups:
    """What some ranks are connected by, until nobody needs it or Python ends.

    Args:
        size: number of ranks.
        host: group for tensors in main memory: a backend of torch's, whose methods have no types.
        device: group for those on a GPU; None sends them by way of main memory.
    """

    def __init__(self, size: int, host: Any, device: Any = None) -> None:
        self.size = size
        self._open = [host, device]
        weakref.finalize(self, _close, self._open)

    @property
    def host(self) -> Any:
        """Group for tensors in main memory."""
        return self._open[0]

    def sum_(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Add up in place, in the tensor's dtype."""
        if tensor.numel() == 0:
            return
        group, sent = self._of(tensor)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = operation
        _finish(lambda: group.allreduce([sent], options))
        if sent is not tensor:
            tensor.copy_(sent)

    def begin_maximum(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to find the largest elements; the call that is returned waits for them."""
        largest = tensor.clone()
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        with losses_named():
            work = self.host.allreduce([largest], options)

        def finish() -> Tensor:
            _finish(lambda: work)
            return largest

        return finish

    def gather(self, tensor: Tensor) -> Tensor:
        """All ranks' elements, 1-D, one rank after the other.

        Costs a small operation more than the payload: ranks first tell each other their sizes, and
        shorter payloads are filled up to the longest.
        """
        sizes = self._table(torch.tensor([tensor.numel()]))[:, 0].tolist()
        longest = max(sizes)
        if longest == 0:
            return tensor.new_empty(0)
        group, sent = self._of(tensor.reshape(-1))
        padded = sent
        if len(sent) < longest:
            padded = torch.cat([sent, sent.new_zeros(longest - len(sent))])
        rows = sent.new_empty(self.size, longest)
        _gather_equal(group, _bytes(rows), _bytes(padded))
        if min(sizes) < longest:
            rows = torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])
        return rows.view(-1).to(tensor.device)

    def exchange(self, tensor: Tensor, splits: Sequence[int] | None) -> Tensor:
        """To each rank its slice of every rank's tensor, 1-D; slices are equal without ``splits``."""
        if splits is None:
            given = [tensor.numel() // self.size] * self.size
            taken = given
        else:
            given = list(splits)
            counts, own = torch.tensor(given), torch.empty(self.size, dtype=torch.int64)
            _finish(lambda: self.host.alltoall_base(own, counts, [], []))
            taken = own.tolist()
        group, sent = self._of(tensor.reshape(-1))
        received = sent.new_empty(sum(taken))
        width = tensor.element_size()
        sizes = [[width * count for count in counts] for counts in (taken, given)]
        out, mine = _bytes(received), _bytes(sent)
        _finish(lambda: group.alltoall_base(out, mine, *sizes))
        return received.to(tensor.device)

    def _table(self, row: Tensor) -> Tensor:
        """A row of numbers of every rank."""
        rows = torch.empty(self.size, len(row), dtype=row.dtype)
        _gather_equal(self.host, rows.view(-1), row)
        return rows

    def _of(self, tensor: Tensor) -> tuple[Any, Tensor]:
        """What sends a tensor, and the tensor where that can reach it."""
        device = self._open[1]
        if tensor.is_cuda and device is not None:
            return device, tensor.contiguous()
        return self.host, tensor.contiguous().cpu()


def _close(groups: list[Any]) -> None:
    """End their threads: one that still lets go of a tensor while Python ends would crash there.

    They end when their operations have; a thread waits for that, which nobody needs to wait for.
    """
    thread = threading.Thread(target=groups.clear, daemon=True)
    thread.start()
    thread.join(SECONDS_TO_END)


def _bytes(tensor: Tensor) -> Tensor:
    """The same memory: not every dtype can be sent."""
    return tensor.view(-1).view(torch.uint8)


def _gather_equal(group: Any, out: Tensor, mine: Tensor) -> None:
    _finish(lambda: group._allgather_base(out, mine))


def _finish(start: Callable[[], dist.Work]) -> None:
    with losses_named():
        start().wait()
