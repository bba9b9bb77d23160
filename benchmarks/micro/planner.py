"""How long planning takes, and how near its plans come to the optimum.

1. Both knapsacks on models of some layers and candidates: seconds on one core (the least of several
   runs), and how far the result is above what MILP proves that nothing can beat.
2. The other parts of planning: seconds.

    python -m benchmarks.micro.planner          # prints tables, writes results/planner.json
    python -m benchmarks.micro.planner --check  # 1 if a stored target is missed
    python -m benchmarks.micro.planner --quick  # small and few, for the tests; no targets, no file
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.harness import command_line
from benchmarks.report import report
from hvd_adaptive.planning.allocators import KMeans, Uniform
from hvd_adaptive.planning.costs import BandwidthMonitor, OnlineCosts
from hvd_adaptive.planning.knapsack import equal_slopes, min_cost, min_error, total
from hvd_adaptive.planning.table import CandidateTable, Limits

SECONDS_TARGET = 0.3
GAP_TARGET = 0.005
WITH_TARGET = ("ResNet-50, top-k", "161 x 100, random")
"""161 layers of 100 candidates: what the target on the seconds is for."""

Rows = list[np.ndarray]


@dataclass(frozen=True)
class SyntheticModel:
    """A model's candidates.

    Args:
        layers: how many.
        kind: ``top-k`` (100 densities), ``quantizer`` (7 bit widths, with noise on the errors), or
            ``random`` (100 candidates without structure, which take longest: none can be left out).
        default: index of the default.
    """

    layers: int
    kind: str
    default: int

    def rows(self, seed: int) -> tuple[Rows, Rows]:
        """Errors and bytes: layers of 1e3 to 3e6 elements, energies over ten powers of ten."""
        rng = np.random.default_rng(seed)
        errors, sizes = [], []
        for _ in range(self.layers):
            if self.kind == "random":
                errors.append(np.sort(rng.random(100)))
                sizes.append(np.round(np.sort(rng.random(100))[::-1] * 1e6))
                continue
            numel, energy = 10 ** rng.uniform(3, 6.5), 10 ** rng.uniform(-8, 2)
            if self.kind == "top-k":
                density = 0.1 * np.arange(100, 0, -1) / 100
                tail = np.sort(np.abs(rng.standard_normal(4096)) ** rng.uniform(0.5, 3))[::-1] ** 2
                sent = np.append(0.0, np.cumsum(tail)) / tail.sum()
                errors.append(energy * (1 - np.interp(density, np.linspace(0, 1, 4097), sent)))
                sizes.append(np.round(density * numel) * 5 + 8)
            else:
                bits = np.arange(8, 1, -1.0)
                errors.append(energy * 4.0**-bits * rng.uniform(0.7, 1.4, len(bits)))
                sizes.append(np.round(numel * bits / 8) + 32)
        return errors, sizes


MODELS = {
    WITH_TARGET[0]: SyntheticModel(161, "top-k", 90),
    WITH_TARGET[1]: SyntheticModel(161, "random", 50),
    "ResNet-50, quantizer": SyntheticModel(161, "quantizer", 4),
    "ResNet-18, top-k": SyntheticModel(62, "top-k", 90),
    "Transformer, top-k": SyntheticModel(300, "top-k", 90),
}


def seconds(function: Callable[[], Any], runs: int) -> float:
    """Least processor time of some runs, after one that compiles."""
    function()
    found = []
    for _ in range(runs):
        start = time.process_time()
        function()
        found.append(time.process_time() - start)
    return min(found)


def beyond(values: Rows, weights: Rows, bound: float, choice: np.ndarray) -> float:
    """How far a choice is above what no choice within the bound can beat, relative."""
    from scipy import sparse
    from scipy.optimize import Bounds, LinearConstraint, milp

    owner = np.repeat(np.arange(len(values)), [len(row) for row in values])
    one_each = sparse.csr_matrix((np.ones(len(owner)), (owner, np.arange(len(owner)))))
    reached = sum_of(values, choice)  # the unit: the solver's tolerances are absolute
    found = milp(
        np.concatenate(values) / reached,
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint((np.concatenate(weights) / bound)[None], -np.inf, 1),
        ],
        integrality=np.ones(len(owner)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-5, "time_limit": 20},
    )
    return float(1 / found.mip_dual_bound - 1)


def sum_of(rows: Rows, choice: np.ndarray) -> float:
    """Of the chosen candidates."""
    return total([row[index] for row, index in zip(rows, choice, strict=True)])


def knapsacks(model: SyntheticModel, seeds: int, runs: int) -> dict[str, float]:
    """Seconds and the largest gap of both readings, with the defaults' error and bytes as bounds."""
    gaps: list[tuple[float, float]] = []
    for seed in range(seeds - 1, -1, -1):  # the first one's numbers are timed
        errors, sizes = model.rows(seed)
        default = np.full(model.layers, model.default)
        max_error, max_bytes = sum_of(errors, default), sum_of(sizes, default)
        cheap, near = min_cost(errors, sizes, max_error), min_error(errors, sizes, max_bytes)
        gaps.append((beyond(sizes, errors, max_error, cheap), beyond(errors, sizes, max_bytes, near)))
    return {
        "min_cost s": seconds(lambda: min_cost(errors, sizes, max_error), runs),
        "min_error s": seconds(lambda: min_error(errors, sizes, max_bytes), runs),
        "min_cost gap": max(gap for gap, _ in gaps),
        "min_error gap": max(gap for _, gap in gaps),
        "bytes, of the default's": sum_of(sizes, cheap) / max_bytes,
    }


def others(runs: int) -> dict[str, float]:
    """Seconds of what else a plan may take, for the first model."""
    model, rng = MODELS[WITH_TARGET[0]], np.random.default_rng(0)
    errors, sizes = model.rows(0)
    names = [f"layer{index}" for index in range(model.layers)]
    labels = [[str(index) for index in range(len(row))] for row in errors]
    dense = [row[0] * 8 for row in sizes]
    table = CandidateTable.of(names, errors, sizes, labels, [model.default] * model.layers, dense)
    allowed = Limits.like(table, table.defaults)
    monitor, costs = BandwidthMonitor(), OnlineCosts()
    for _ in range(60):
        nbytes = rng.uniform(1e3, 1e7, 20)
        monitor.observe(nbytes[0], 1e-4 + nbytes[0] / 1e9)
        costs.observe(nbytes, float(nbytes.sum()) / 1e9)
    return {
        "uniform": seconds(lambda: Uniform().allocate(table, allowed), runs),
        "global threshold": seconds(
            lambda: equal_slopes(errors, sizes, max_error=allowed.max_error), runs
        ),
        "k-means": seconds(lambda: KMeans().allocate(table, allowed), runs),
        "bandwidth": seconds(monitor.estimate, runs),
        "costs of 20 buckets": seconds(costs.fit, runs),
    }


def measure(quick: bool) -> dict[str, Any]:
    """Both tables; each is printed when it is there."""
    models = {"quick": SyntheticModel(12, "quantizer", 4)} if quick else MODELS
    seeds, runs = (1, 1) if quick else (3, 5)
    found = {name: knapsacks(model, seeds, runs) for name, model in models.items()}
    lines = [[name, *row.values()] for name, row in found.items()]
    report.show([["knapsacks", *next(iter(found.values()))], *lines])
    rest = others(runs)
    report.show([["others", "seconds"], *map(list, rest.items())])
    return {"knapsacks": found, "others": rest}


def missed(figures: dict[str, Any]) -> list[str]:
    """The targets that were not met."""
    found = []
    for name, row in figures["knapsacks"].items():
        for which in ("min_cost", "min_error"):
            if name in WITH_TARGET and row[f"{which} s"] > SECONDS_TARGET:
                found.append(
                    f"{name}: {which} takes {row[f'{which} s']:.2f} s, target {SECONDS_TARGET}"
                )
            if row[f"{which} gap"] > GAP_TARGET:
                found.append(
                    f"{name}: {which} is {row[f'{which} gap']:.2%} off, target {GAP_TARGET:.1%}"
                )
    return found


if __name__ == "__main__":
    sys.exit(command_line.tables(__doc__, "planner", measure, missed))
