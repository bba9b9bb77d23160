"""One job of scaling.py: times collectives among the ranks of an MPI job.

mpirun -np 2 python -m benchmarks.workers.scaling_rank --seconds 1 "ring fp32:65536" allgather:4096
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

import horovod.torch as hvd
import numpy as np
import torch

MOST, FEWEST = 30, 5
"""Repeats of an operation."""


def allreduce(dtype: torch.dtype, operations: int, nbytes: int) -> Callable[[], object]:
    """So many sums, one after the other, of ``nbytes`` together."""
    numel = max(1, nbytes // operations // dtype.itemsize)
    tensors = [torch.ones(numel, dtype=dtype) for _ in range(operations)]
    names = [f"scaling.{dtype}.{nbytes}.{operations}.{number}" for number in range(operations)]

    def run() -> None:
        for tensor, name in zip(tensors, names, strict=True):
            hvd.allreduce_(tensor, op=hvd.Average, name=name)

    return run


def allgather(nbytes: int) -> Callable[[], object]:
    """A payload of ``nbytes`` bytes from every rank to every rank."""
    payload = torch.ones(nbytes, dtype=torch.uint8)
    return lambda: hvd.allgather(payload, name=f"scaling.allgather.{nbytes}")


def two_shot(nbytes: int) -> Callable[[], object]:
    """A shard of ``nbytes`` bytes to every rank, then one from every rank to every rank."""
    payload = torch.ones(nbytes, dtype=torch.uint8)
    shard = nbytes // hvd.size()
    splits = torch.full((hvd.size(),), shard, dtype=torch.int32)

    def run() -> None:
        name = f"scaling.two_shot.{nbytes}"
        hvd.alltoall(payload[: shard * hvd.size()], splits, name=f"{name}.first")
        hvd.allgather(payload[:shard], name=f"{name}.second")

    return run


SCHEMES: dict[str, Callable[[int], Callable[[], object]]] = {
    "ring fp32": partial(allreduce, torch.float32, 1),
    "ring fp16": partial(allreduce, torch.float16, 1),
    "powersgd": partial(allreduce, torch.float32, 2),
    "allgather": allgather,
    "two-shot": two_shot,
}


def times(run: Callable[[], object], seconds: float) -> list[float]:
    """Seconds from the end of one operation to the end of the next, back to back as in training.

    Args:
        run: the operation, on all ranks.
        seconds: to spend on it, as far as the numbers of repeats allow.
    """
    run()
    started = perf_counter()
    run()
    once = torch.tensor(perf_counter() - started)
    slowest = float(hvd.allreduce(once, op=hvd.Max, name="scaling.once"))
    ends = [perf_counter()]
    for _ in range(max(FEWEST, min(MOST, int(seconds / slowest)))):
        run()
        ends.append(perf_counter())
    return [float(each) for each in np.diff(ends)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Time what the command line names, in its order."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="for each point (%(default)s)")
    parser.add_argument("points", nargs="+", metavar="SCHEME:BYTES")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    hvd.init()
    for point in options.points:
        scheme, _, nbytes = point.partition(":")
        taken = times(SCHEMES[scheme](int(nbytes)), options.seconds)
        if hvd.rank() == 0:
            found = {"scheme": scheme, "bytes": int(nbytes), "seconds": float(np.median(taken))}
            print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
