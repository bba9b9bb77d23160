"""One job of a benchmark: steps of one model with several optimizers in turn, among all ranks.

    mpirun -np 4 python -m benchmarks.workers.turns_rank --preset lstm-sotu --blocks 2 --steps 6 \\
        --result FILE "stock fp16" "qsgd:bits=4 two_shot" auto

A method is ``stock`` with Horovod's ``fp16`` or ``none``, or a compressor, with a scheme or without,
and with a planner after the scheme or without. All of them live to the end, and train on where their
last turn ended.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import hvd_adaptive as hva
from benchmarks.workers.presets import Batch, Preset, prepare
from benchmarks.workers.slow_backward import wait_for_device
from hvd_adaptive.comm.startup import NICENESS
from launch.training import loop

SETTLE = 3
"""Steps before a method's first turn: the first learns the order, the others warm up."""
TRIED_AFTER = 26
"""The same where a scheme is chosen: three are tried in these."""
AGAIN = 1
"""Steps of every other turn that are not counted."""


def received_bytes() -> int:
    """What this host's interfaces have received, for all its ranks, without the loopback's."""
    return sum(
        int((interface / "statistics/rx_bytes").read_text())
        for interface in Path("/sys/class/net").iterdir()
        if interface.name != "lo"
    )


def settle_steps(method: str, planned: int) -> int:
    """Steps before a method's first turn, in which nothing may be planned or tried any more.

    Args:
        method: its name.
        planned: how many they are where a planner decides; the most otherwise.

    Example:
        >>> names = ("auto:noise=0.1", "qsgd auto", "qsgd two_shot", "qsgd two_shot lgreco")
        >>> [settle_steps(name, 120) for name in names]
        [120, 26, 3, 120]
    """
    words = method.split()
    if words[0].partition(":")[0] == "auto" or len(words) > 2:
        return planned
    return min(TRIED_AFTER, planned) if "auto" in words else SETTLE


def build(
    method: str, rule: torch.optim.Optimizer, model: nn.Module, bucket_cap_mb: float | None
) -> Any:
    """The optimizer of a method; without a size its buckets are as large as by default."""
    named = list(model.named_parameters())
    compression, *others = method.split()
    if compression == "stock":
        chosen = getattr(hvd.Compression, *others)
        return hvd.DistributedOptimizer(rule, named_parameters=named, compression=chosen)
    own: dict[str, Any] = dict(zip(("scheme", "planner"), others, strict=False))
    if bucket_cap_mb is not None:
        own["bucket_cap_mb"] = bucket_cap_mb
    return hva.DistributedOptimizer(rule, named_parameters=named, compression=compression, **own)


class Contestant:
    """One method, with a model of its own.

    Args:
        method: its name.
        preset: what it trains.
        batches: the same for all methods, again and again.
        settle: steps before its first turn.
        bucket_cap_mb: as of :func:`build`.
        device: seconds of a backward pass in which the core waits for a device.
    """

    def __init__(
        self,
        method: str,
        preset: Preset,
        batches: Sequence[Batch],
        settle: int,
        bucket_cap_mb: float | None,
        device: float,
    ) -> None:
        self._preset, self._settle = preset, settle
        self._model = copy.deepcopy(preset.model)
        if device:
            wait_for_device(self._model, device)
        rule = loop.make_update_rule(preset.options, self._model)
        self._optimizer = build(method, rule, self._model, bucket_cap_mb)
        self._batches: Iterator[Batch] = itertools.cycle(batches)

    def turn(self, steps: int) -> dict[str, Any]:
        """Seconds of so many steps, and what this host received in one of them."""
        for _ in range(self._settle):
            self._step()
        self._settle = AGAIN
        bytes_then, ends = received_bytes(), [perf_counter()]
        for _ in range(steps):
            self._step()
            ends.append(perf_counter())
        seconds = [now - then for then, now in itertools.pairwise(ends)]
        plan = getattr(self._optimizer, "plan", None)
        return {
            "seconds": seconds,
            "received": (received_bytes() - bytes_then) / steps,
            "schemes": [] if plan is None else sorted({row.scheme for row in plan}),
            "reasons": [] if plan is None else list(plan.reasons),
        }

    def _step(self) -> None:
        loop.train_step(self._model, self._optimizer, [next(self._batches)], self._preset.options.clip)


def main(arguments: Sequence[str] | None = None) -> int:
    """Time what the command line names, in its order and in reverse, block after block."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", required=True, help="of launch/train.py")
    parser.add_argument("--blocks", type=int, default=2, help="turns of each method (%(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="counted in each (%(default)s)")
    parser.add_argument(
        "--plans-after", type=int, default=120,
        help="steps before the first turn of a method that plans (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--training",
        default="",
        metavar="WORDS",
        help="further options of launch/train.py, in one word",
    )
    parser.add_argument("--bucket-cap-mb", type=float, help="of this package's optimizers")
    parser.add_argument(
        "--device", type=float, default=0.0, metavar="SECONDS",
        help="in which a backward pass waits, as for an accelerator (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--niceness", type=int, default=NICENESS, help="of init() (%(default)s)")
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("methods", nargs="+")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    hva.init(niceness=options.niceness, hierarchical=True)
    preset = prepare(["--preset", options.preset, *shlex.split(options.training)])
    settle = {each: settle_steps(each, options.plans_after) for each in options.methods}
    # a planner must not see a few batches that have been learned by heart
    batches = list(itertools.islice(preset.forever(), max(settle.values()) + options.steps))
    contestants = {
        method: Contestant(method, preset, batches, steps, options.bucket_cap_mb, options.device)
        for method, steps in settle.items()
    }
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in contestants}
    for number in range(options.blocks):
        # what comes first in a block, and what after what, must not matter
        for method in options.methods[:: -1 if number % 2 else 1]:
            found[method].append(contestants[method].turn(options.steps))
    everyone = hvd.allgather_object(found)
    if hvd.rank() == 0:
        options.result.write_text(json.dumps(everyone))
    hvd.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
