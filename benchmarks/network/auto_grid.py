"""Is what ``auto`` chooses ever slower than dense, anywhere on a grid of simulated clusters?

    python -m benchmarks.network.auto_grid          # a minute; results/auto_grid.json
    python -m benchmarks.network.auto_grid --quick  # one model on few clusters; no file
    python -m benchmarks.network.auto_grid --check  # 1 if a stored target is missed

Nothing is timed. Four presets train some steps with the gradients of virtual ranks, which gives their
layers, errors and noise; then clusters are assumed: a network of so much a message and so much a byte,
so many cores for each rank's compressors, and so many ranks. What a step takes there is what
:class:`~hvd_adaptive.planning.step_time.StepModel` says. ``auto`` plans 1,000 steps into training, by
costs that are right, and once more by measurements that are off by half: network and compressors
in opposite directions, dense steps as they are.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.harness import command_line
from benchmarks.report import report
from hvd_adaptive.adaptation import automatic
from hvd_adaptive.adaptation.candidates import short_spec
from hvd_adaptive.adaptation.prediction import AutoForecast, Predictor
from hvd_adaptive.adaptation.step_trace import StepTrace
from hvd_adaptive.arrays import Int64s
from hvd_adaptive.collectives.costs import CodecCosts
from hvd_adaptive.collectives.measured_costs import MeasuredCosts, SumCosts, SummandCosts
from hvd_adaptive.comm.link_costs import CYCLE, LinkCosts, seconds_of_byte
from hvd_adaptive.compressors import parse
from hvd_adaptive.planning.dense_steps import DenseSteps
from hvd_adaptive.planning.least_time import TimeLimits

COMPUTE = {
    "mlp-fashion": 0.0733,
    "resnet-fashion": 0.0159,
    "lstm-sotu": 0.0544,
    "transformer-sotu": 0.134,
}
"""Seconds of forward and backward pass on one core, as training.py has measured them."""
NETWORKS = {
    "100 Mbit/s": (2e-4, 1e8),
    "1 Gbit/s": (1e-4, 1e9),
    "10 Gbit/s": (5e-5, 1e10),
    "25 Gbit/s": (2e-5, 2.5e10),
    "100 Gbit/s": (5e-6, 1e11),
}
"""Seconds of a message, and bits per second."""
CORES = (1, 4)
RANKS = (4, 16, 64, 256, 1024)
TOPK, QUANTIZER = (short_spec(parse(each)) for each in (automatic.OWN, *automatic.FAMILIES))
"""What ``auto`` chooses from, besides dense, as traces name it."""
CODECS: dict[str, CodecCosts | SummandCosts] = {
    TOPK: CodecCosts(2.7e-10, 2.0e-10, 1.2e-9, 1.9e-8),
    QUANTIZER: CodecCosts(2.5e-9, 1.4e-10, 6.7e-10),
    "fp16": SummandCosts("fp16", 6.4e-9, 7e-11, "float16", dense=True),
    "none": SummandCosts("none", 0.0, 0.0, "float32", dense=True),
}
"""Seconds on one core, as ``auto`` measures them on this project's machine."""
TRACED = 4
"""Virtual ranks whose gradients are traced."""
STEPS, TIMED = 40, 30
AT_STEP = 1000
SLOWER = 0.02
WRONG = 1.5
"""Factor by which measurements are off."""


@dataclass(frozen=True)
class Cluster:
    """One place of the grid.

    Args:
        network: a key of :data:`NETWORKS`.
        cores: for each rank's compressors.
        ranks: how many, on a host each.
    """

    network: str
    cores: int
    ranks: int

    def measured(self, network: float = 1.0, codec: float = 1.0) -> MeasuredCosts:
        """What would be measured there, among :data:`TRACED` ranks.

        Args:
            network: factor by which that is off.
            codec: likewise of the compressors.
        """
        message, rate = NETWORKS[self.network]
        small, byte = network * (CYCLE + 2 * message), network * seconds_of_byte(rate)
        sums = {dtype: SumCosts(2 * small, byte) for dtype in ("float16", "float32")}
        link = LinkCosts(small, small, byte, byte)
        found = MeasuredCosts(TRACED, link, sums, CODECS, ("auto",), 25.0 * (1 << 20))
        return found.with_slower_codecs(codec / self.cores)


def record(preset_name: str) -> StepTrace:
    """Train some dense steps with virtual ranks, and take what ``auto`` would plan with."""
    from benchmarks.accuracy.virtual_training import one_step
    from benchmarks.workers.presets import prepare
    from hvd_adaptive import VirtualRanks

    preset = prepare(["--preset", preset_name])
    virtual = VirtualRanks(
        TRACED,
        preset.model.named_parameters(),
        f"auto:timed_steps={TIMED},period={STEPS}",
        param_groups=lambda: preset.rule.param_groups,
    )
    batches = preset.forever_of_all(TRACED)
    trace = None
    while trace is None:
        preset.set_rate(0, STEPS, TRACED)
        one_step(preset, virtual, next(batches))
        trace = virtual.trace()
    return replace(trace, hosts=TRACED)


# --- one place of the grid ----------------------------------------------------------------------------


def predictor_of(
    trace: StepTrace, compute: float, true: MeasuredCosts, told: MeasuredCosts
) -> Predictor:
    """Who has seen dense steps of a cluster, and knows costs of it that may be off."""
    right = replace(trace, measured=replace(true, assumed=True, compute_seconds=compute))
    parts = Predictor(right).seconds(Predictor(right).methods[0].choice, TRACED)
    dense = DenseSteps.empty()
    dense.seconds.append(parts.seconds)
    dense.computing.append(parts.seconds - parts.exposed)
    return Predictor(replace(trace, measured=told, dense=dense))


def judge(trace: StepTrace, compute: float, cluster: Cluster) -> dict[str, Any]:
    """What auto's plan takes, over the best dense step and over the best static choice."""
    true = cluster.measured()
    right = predictor_of(trace, compute, true, true)
    found = right.auto(cluster.ranks, AT_STEP)
    model, limits = right.model(cluster.ranks), found.limits
    dense = min(model.seconds(each.choice).total for each in right.methods if each.dense)
    static, name = min((model.seconds(choice).total, name) for name, choice in statics(trace, limits))
    seconds = model.seconds(found.choice).total
    misled = [
        model.seconds(each.choice).total / dense
        for each in (
            _misled(trace, compute, cluster, WRONG, 1 / WRONG),
            _misled(trace, compute, cluster, 1 / WRONG, WRONG),
        )
    ]
    return {
        "dense ms": 1e3 * dense,
        "of dense": seconds / dense,
        "of static": seconds / min(static, dense),
        "static": name if static < dense else "dense",
        "compresses": found.compresses,
        "misled, of dense": max(misled),
    }


def _misled(
    trace: StepTrace, compute: float, cluster: Cluster, network: float, codec: float
) -> AutoForecast:
    told = cluster.measured(network, codec)
    return predictor_of(trace, compute, cluster.measured(), told).auto(cluster.ranks, AT_STEP)


def statics(trace: StepTrace, limits: TimeLimits) -> Iterator[tuple[str, Int64s]]:
    """Every level of every compressor, the same for all layers, that keeps the limits; and dense."""
    labels = dict.fromkeys(itertools.chain.from_iterable(trace.table.labels))
    for label in labels:
        rows = trace.table.labels
        if not all(label in row for row in rows):
            continue
        choice = np.array([row.index(label) for row in rows], np.int64)
        delay, noise = limits.weighed(choice)
        if delay <= limits.max_delay and noise <= limits.max_noise:
            yield label, choice


# --- the grid -----------------------------------------------------------------------------------------


def measure(quick: bool) -> dict[str, Any]:
    """Every preset on every cluster."""
    import hvd_adaptive as hva

    hva.init()
    presets = {"mlp-digits": 0.01} if quick else COMPUTE
    networks = list(NETWORKS)[:2] if quick else list(NETWORKS)
    ranks = RANKS[:2] if quick else RANKS
    cells: dict[str, dict[str, Any]] = {}
    for preset, compute in presets.items():
        trace = record(preset)
        for place in itertools.product(networks, CORES, ranks):
            found = judge(trace, compute, Cluster(*place))
            key = "{}, {}, {} cores, {} ranks".format(preset, *place)
            cells[key] = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in found.items()}
    print(report.table(rows(cells)), flush=True)
    return {"cells": cells}


def groups(cells: dict[str, Any]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Grid points by preset and network."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for key, cell in cells.items():
        preset, network, *_ = key.split(", ")
        found.setdefault((preset, network), []).append(cell)
    return found


def rows(cells: dict[str, Any]) -> list[list[object]]:
    """A table: one row a preset and network."""
    heading = ["preset", "network", "grid points", "compresses", "of dense", "slower than dense",
               "of the best static", "misled, slower than dense"]  # fmt: skip
    found: list[list[object]] = [list(heading)]
    for (preset, network), points in groups(cells).items():
        ratios = [point["of dense"] for point in points]
        regrets = [point["of static"] for point in points]
        found.append(
            [
                preset,
                network,
                len(points),
                sum(point["compresses"] for point in points),
                f"{min(ratios):.3f} to {max(ratios):.3f}",
                slower(points, "of dense"),
                f"{np.median(regrets):.3f}, worst {max(regrets):.3f}",
                slower(points, "misled, of dense"),
            ]
        )
    return found


def slower(points: Sequence[dict[str, Any]], key: str) -> int:
    """How many take longer than the best dense step by more than the target allows."""
    return sum(point[key] > 1 + SLOWER for point in points)


def missed(figures: dict[str, Any]) -> list[str]:
    """The targets that are missed."""
    return [
        f"{key}: auto takes {cell['of dense']:.3f} x the best dense step"
        for key, cell in figures["cells"].items()
        if cell["of dense"] > 1 + SLOWER
    ]


def main() -> int:
    """Command line."""
    return command_line.tables(__doc__, "auto_grid", measure, missed)


if __name__ == "__main__":
    sys.exit(main())
