"""One job of schemes.py: steps of one model with several optimizers in turn, among all ranks.

    mpirun -np 4 python -m benchmarks.workers.schemes_rank --preset lstm-sotu --blocks 2 --steps 6 \\
        --result FILE "stock fp16" "qsgd:bits=4 allgather"

A method is ``stock fp16``, or a compressor and a scheme. Each builds its optimizer anew in every block.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import hvd_adaptive as hva
from benchmarks.workers.presets import Batch, Preset, prepare
from launch.training import loop

SETTLE = 3
"""Steps of a block that are not counted: the first learns the order, the others warm up."""


def received_bytes() -> int:
    """What this host's interfaces have received, for all its ranks, without the loopback's."""
    return sum(
        int((interface / "statistics/rx_bytes").read_text())
        for interface in Path("/sys/class/net").iterdir()
        if interface.name != "lo"
    )


def build(method: str, rule: torch.optim.Optimizer, model: nn.Module) -> Any:
    """The optimizer of a method."""
    named = list(model.named_parameters())
    compression, _, scheme = method.partition(" ")
    if compression == "stock":
        chosen = getattr(hvd.Compression, scheme)
        return hvd.DistributedOptimizer(rule, named_parameters=named, compression=chosen)
    return hva.DistributedOptimizer(
        rule, named_parameters=named, compression=compression, scheme=scheme
    )


def block(method: str, preset: Preset, batches: Sequence[Batch]) -> dict[str, Any]:
    """Seconds of each step after the first ones, and what this host received in a step."""
    model = copy.deepcopy(preset.model)
    optimizer = build(method, loop.make_update_rule(preset.options, model), model)
    ends, bytes_then = [], 0
    for number, batch in enumerate(batches):
        if number == SETTLE:
            bytes_then = received_bytes()
            ends.append(perf_counter())
        loop.train_step(model, optimizer, [batch], preset.options.clip)
        if number >= SETTLE:
            ends.append(perf_counter())
    seconds = [now - then for then, now in itertools.pairwise(ends)]
    received = (received_bytes() - bytes_then) / len(seconds)
    plan = getattr(optimizer, "plan", None)
    schemes = [] if plan is None else sorted({row.scheme for row in plan})
    return {"seconds": seconds, "received": received, "schemes": schemes}


def main(arguments: Sequence[str] | None = None) -> int:
    """Time what the command line names, in its order, block after block."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", required=True, help="of launch/train.py")
    parser.add_argument("--blocks", type=int, default=2, help="turns of each method (%(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="counted in each (%(default)s)")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("methods", nargs="+")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    hva.init(hierarchical=True)
    preset = prepare(["--preset", options.preset])
    batches = list(itertools.islice(preset.forever(), SETTLE + options.steps))
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in options.methods}
    for number in range(options.blocks):
        # what comes first in a block, and what after what, must not matter
        for method in options.methods[:: -1 if number % 2 else 1]:
            found[method].append(block(method, preset, batches))
            gc.collect()
    everyone = hvd.allgather_object(found)
    if hvd.rank() == 0:
        options.result.write_text(json.dumps(everyone))
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
