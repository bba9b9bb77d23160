"""The decision path's messages over torch.distributed: on a gloo group of their own."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hvd_adaptive.arrays import Float64s
from hvd_adaptive.comm.control_channel import Channel, Pending
from hvd_adaptive.comm.torch_operations import Groups, losses_named
from hvd_adaptive.comm.torch_ranks import TorchRanks


class TorchChannel(Channel):
    """See :class:`~hvd_adaptive.comm.control_channel.Channel`.

    Args:
        name: the same on all ranks, and used by nobody else.
        ranks: who takes part; all of them make one, at the same time.
    """

    name = "gloo"

    def __init__(self, name: str, ranks: TorchRanks) -> None:
        self._groups = Groups(ranks.size(), ranks.group(f"{name}/channel"))
        self._is_first = ranks.rank() == 0

    def mean(self, values: Float64s) -> Pending:
        """A sum that continues while others compute."""
        pending = self._reduce(values, dist.ReduceOp.SUM)
        return lambda: pending() / self._groups.size

    def least(self, values: Float64s) -> Pending:
        """A minimum that continues while others compute."""
        return self._reduce(values, dist.ReduceOp.MIN)

    def gather(self, values: Float64s) -> Pending:
        """An allgather that continues while others compute."""
        mine = _tensor_of(values)
        rows = torch.empty(self._groups.size, mine.numel(), dtype=mine.dtype)
        if mine.numel() == 0:
            return rows.numpy
        with losses_named():
            work = self._groups.host._allgather_base(rows.view(-1), mine)
        return _Pending(work, rows, mine)

    def broadcast(self, message: str) -> str:
        """The first of what all ranks gather."""
        return self.exchange(message if self._is_first else "")[0]

    def exchange(self, message: str) -> list[str]:
        """Blocks until all ranks have called; sent as JSON in ASCII, one line per rank."""
        mine = np.frombuffer(json.dumps(message).encode("ascii") + b"\n", np.uint8).copy()
        everyone = self._groups.gather(torch.from_numpy(mine)).numpy().tobytes()
        return [str(json.loads(line)) for line in everyone.splitlines()]

    def _reduce(self, values: Float64s, operation: dist.ReduceOp.RedOpType) -> Pending:
        mine = _tensor_of(values)
        if mine.numel() == 0:
            return mine.numpy
        options: Any = dist.AllreduceOptions()
        options.reduceOp = operation
        with losses_named():
            work = self._groups.host.allreduce([mine], options)
        return _Pending(work, mine)


class _Pending:
    """Waits for an operation, and keeps its buffers alive until then."""

    def __init__(self, work: dist.Work, out: Tensor, *buffers: Tensor) -> None:
        self._work = work
        self._out = out
        self._buffers = buffers

    def __call__(self) -> Float64s:
        with losses_named():
            self._work.wait()
        result: Float64s = self._out.numpy()
        return result


def _tensor_of(values: Float64s) -> Tensor:
    """A copy: what is under way does not follow the original."""
    return torch.from_numpy(np.array(values, np.float64))
