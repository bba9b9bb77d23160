"""How many bytes L-GreCo saves beyond the uniform default, on real gradients, at no more error.

Models of launch/train.py train without compression in one process. At several moments of the training
the error tables of some steps are averaged, as during training with a planner, and planned with:

1. predicted: bytes and error of the plan against those of the uniform default, and the exact optimum.
2. real: the gradients of these steps, and those of the steps that follow, are compressed by both.
3. accumulated: the same from the errors of these steps' mean gradient, as L-GreCo's paper measures.

    python -m benchmarks.accuracy.allocation          # prints tables, writes results/allocation.json
    python -m benchmarks.accuracy.allocation --check  # 1 if a stored target is missed
    python -m benchmarks.accuracy.allocation --only ResNet --fresh
    python -m benchmarks.accuracy.allocation --quick  # small and few, for the tests; no file

Models that the file already holds are not repeated, so an interrupted benchmark continues where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import command_line
from benchmarks.micro.planner import beyond
from benchmarks.report import report
from benchmarks.workers.presets import Preset, prepare
from hvd_adaptive.adaptation.candidates import Candidate, candidates_of, errors_of
from hvd_adaptive.adaptation.schedule import SAMPLES
from hvd_adaptive.arrays import Int64s
from hvd_adaptive.compressors import CastCompressor
from hvd_adaptive.compressors.base import LayerContext
from hvd_adaptive.compressors.sparse import DensityCompressor
from hvd_adaptive.config import CompressionConfig
from hvd_adaptive.layers import Layer
from hvd_adaptive.planning import CandidateTable, PlanningInput, parse

Gradients = list[Tensor]

STEPS = 500
SPACING = 5
"""Steps from one that is sampled to the next."""
MOMENTS = {"early": 0.1, "middle": 0.45, "late": 0.85}
"""Where in the training the first sample is taken; the rate has warmed up after 5 %."""

MODELS: dict[str, tuple[str, ...]] = {
    "ResNet": ("--preset", "resnet-fashion"),
    "LSTM": ("--preset", "lstm-sotu"),
    "transformer": ("--preset", "transformer-sotu"),
    "ResNet, 3 blocks a stage": ("--preset", "resnet-fashion", "--layers", "3"),
}
WITH_TARGET = ("ResNet", "LSTM", "transformer")
QUICK: dict[str, tuple[str, ...]] = {"MLP": ("--preset", "mlp-digits", "--width", "64")}


@dataclass(frozen=True)
class AllocationCase:
    """A uniform default, which the plan is compared with.

    Args:
        compression: the default.
        target: how many times fewer bytes the plan must send; None without a target.
        paper: the same in L-GreCo's tables 2 and 3.
    """

    compression: str
    target: float | None
    paper: str


SETTINGS = (
    AllocationCase("qsgd:bits=4", 1.1, "1.10-1.41"),
    AllocationCase("topk:density=0.01", 1.5, "2.67-3.78 (images)"),
    AllocationCase("topk:density=0.1", None, "2.61-5.2 (text)"),
    AllocationCase("powersgd:rank=4", 1.3, "1.44-1.85 (images)"),
)
"""The paper's defaults; its rank 32 for text needs wider layers than these models have."""


# --- real gradients -----------------------------------------------------------------------------------


def gradients_of(preset: Preset, steps: int) -> Iterator[Gradients]:
    """The gradients of each step, before clipping, which comes after the exchange."""
    for step, batch in zip(range(steps), preset.forever(), strict=False):
        preset.set_rate(step, steps)
        preset.rule.zero_grad()
        preset.backward(batch)
        yield [p.grad for p in preset.model.parameters() if p.grad is not None]
        preset.clip()
        preset.rule.step()


@dataclass(frozen=True)
class Moment:
    """Gradients of some steps.

    Args:
        name: of the moment.
        sampled: what the plan is made of.
        fresh: of the steps that follow, which the plan has not seen.
    """

    name: str
    sampled: list[Gradients]
    fresh: list[Gradients]

    def accumulated(self) -> Gradients:
        """The mean of the gradients that were sampled."""
        return [torch.stack(same).mean(0) for same in zip(*self.sampled, strict=True)]


def moments(gradients: Iterator[Gradients], steps: int, samples: int) -> Iterator[Moment]:
    """What is seen at each moment of a training."""
    starts = {round(share * steps): name for name, share in MOMENTS.items()}
    moment: Moment | None = None
    start = 0
    for step, grads in enumerate(gradients):
        if step in starts:
            moment, start = Moment(starts[step], [], []), step
        if moment is None:
            continue
        copies = [grad.detach().reshape(-1).clone() for grad in grads]
        if len(moment.sampled) < samples:
            if (step - start) % SPACING == 0:
                moment.sampled.append(copies)
            continue
        moment.fresh.append(copies)
        if len(moment.fresh) == samples:
            yield moment
            moment = None


# --- plans --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A layer that is planned."""

    layer: Layer
    candidates: tuple[Candidate, ...]
    default: int


def rows_of(layers: Sequence[Layer], compression: str) -> list[Row]:
    """The layers that a planner decides on: not those that are too small to be compressed."""
    choice, rows = CompressionConfig.of(compression, None, None), []
    for layer in layers:
        own = choice.compressor_of(layer)
        if not isinstance(own, CastCompressor):
            candidates = candidates_of(layer, [own])
            distances = [abs(candidate.level - own.level) for candidate in candidates]
            rows.append(Row(layer, candidates, int(np.argmin(distances))))
    return rows


def table_for(rows: Sequence[Row], sampled: Sequence[Gradients]) -> CandidateTable:
    """Mean errors of some steps, and bytes, of every candidate."""
    errors = [
        np.mean([errors_of(g[row.layer.index], row.layer, row.candidates) for g in sampled], axis=0)
        for row in rows
    ]
    return CandidateTable.of(
        [row.layer.name for row in rows],
        errors,
        [bytes_of(row, sampled) for row in rows],
        [[each.label for each in row.candidates] for row in rows],
        [row.default for row in rows],
        [row.layer.nbytes for row in rows],
        factors=[[each.nominal_factor(row.layer) for each in row.candidates] for row in rows],
    )


def bytes_of(row: Row, sampled: Sequence[Gradients]) -> list[float]:
    """Of every candidate. Zeros are never sent, and most of an embedding's gradient is zeros."""
    nonzero = float(np.mean([int(grads[row.layer.index].count_nonzero()) for grads in sampled]))
    density = max(nonzero, 1.0) / row.layer.numel
    sizes = []
    for each in row.candidates:
        sparse = isinstance(each.compressor, DensityCompressor)
        level = min(each.level, density) if sparse else each.level
        sizes.append(
            Candidate(each.compressor, level).link_bytes(row.layer, ranks=1, encoded="allgather")
        )
    return sizes


def planned(table: CandidateTable) -> Int64s:
    """What ``planner="lgreco:metric=squared"`` chooses."""
    return parse("lgreco:metric=squared").planner().plan(PlanningInput(0, table)).levels


def compress(
    rows: Sequence[Row], levels: Sequence[int], moment: Moment
) -> dict[str, tuple[float, float]]:
    """Bytes and squared error of what is really sent, without feedback: a mean step of each kind."""
    found = {"sampled": np.zeros(2), "fresh": np.zeros(2)}
    for row, index in zip(rows, levels, strict=True):
        compressor, level = row.candidates[index].compressor, row.candidates[index].level
        state = compressor.new_state()  # of this layer alone: low rank starts from its last step
        for kind, steps in (("sampled", moment.sampled), ("fresh", moment.fresh)):
            for key, grads in enumerate(steps):
                x = grads[row.layer.index].clone()
                shape = row.layer.shape
                payload = compressor.compress_(
                    x, level, LayerContext(key=key, shape=shape, state=state)
                )
                found[kind] += (payload.nbytes, float(x.double().square().sum()))
    count = {"sampled": len(moment.sampled), "fresh": len(moment.fresh)}
    return {kind: tuple((sums / count[kind]).tolist()) for kind, sums in found.items()}


def unequal_bits(table: CandidateTable) -> float:
    """Bits per value that layers' unequal errors are worth, were bits no whole numbers.

    A bit quarters a quantizer's error, so least bits at equal total error make the error an element
    equal in all layers: half the logarithm of its arithmetic over its geometric mean is saved.
    """
    errors = np.array([row[index] for row, index in zip(table.errors, table.defaults, strict=True)])
    if not errors.all():
        return math.nan
    share = table.dense / table.dense.sum()
    density = errors / table.dense
    return float(0.5 * (np.log2(share @ density) - share @ np.log2(density)))


def compare(layers: Sequence[Layer], setting: AllocationCase, moment: Moment) -> dict[str, Any]:
    """The plan against the uniform default, predicted and real."""
    rows = rows_of(layers, setting.compression)
    table = table_for(rows, moment.sampled)
    levels = planned(table)
    together = table_for(rows, [moment.accumulated()])
    default, plan = table.bytes(table.defaults), table.bytes(levels)
    gap = beyond(list(table.sizes), list(table.errors), table.error(table.defaults), levels)
    whole = sum(layer.nbytes for layer in layers)
    uniform, chosen = (compress(rows, each.tolist(), moment) for each in (table.defaults, levels))
    return {
        "moment": moment.name,
        "layers": len(rows),
        "default bytes": default,
        "plan bytes": plan,
        "least bytes": plan / (1 + gap),
        "accumulated": together.bytes(planned(together)),
        "always dense bytes": whole - float(table.dense.sum()),
        "dense bytes": whole,
        "largest layer": float(table.dense.max() / table.dense.sum()),
        "error": table.error(levels) / table.error(table.defaults),
        "unequal bits": unequal_bits(table),
        "real": {
            kind: {
                "default bytes": uniform[kind][0],
                "plan bytes": chosen[kind][0],
                "error": chosen[kind][1] / uniform[kind][1],
            }
            for kind in uniform
        },
        "levels": {
            row.layer.name: row.candidates[index].level for row, index in zip(rows, levels, strict=True)
        },
    }


# --- figures ------------------------------------------------------------------------------------------


def measure(name: str, arguments: Sequence[str], steps: int, samples: int) -> dict[str, Any]:
    """One model: for each default, the figures over the moments and those of each moment."""
    preset = prepare(arguments)
    parameters = enumerate(preset.model.named_parameters())
    layers = [Layer(index, each, tuple(p.shape)) for index, (each, p) in parameters]
    found: dict[str, list[dict[str, Any]]] = {each.compression: [] for each in SETTINGS}
    for moment in moments(gradients_of(preset, steps), steps, samples):
        print(f"{name}, {moment.name} in the training", file=sys.stderr, flush=True)
        for setting in SETTINGS:
            found[setting.compression].append(compare(layers, setting, moment))
    return {key: {**summary(rows), "moments": rows} for key, rows in found.items()}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Over the moments: how many times fewer bytes, and the largest error, of the default's."""

    def ratio(kind: str | None, which: str, plus: str | None = None) -> float:
        parts = [row["real"][kind] if kind else row for row in rows]
        extra = sum(row[plus] for row in rows) if plus else 0.0
        sent = sum(part["default bytes"] for part in parts) + extra
        return float(sent / (sum(part[which] for part in parts) + extra))

    return {
        "fewer": ratio(None, "plan bytes"),
        "at best": ratio(None, "least bytes"),
        "accumulated": ratio(None, "accumulated"),
        "with dense layers": ratio(None, "plan bytes", plus="always dense bytes"),
        "really fewer": ratio("fresh", "plan bytes"),
        "error": max(row["error"] for row in rows),
        "real error": max(row["real"]["sampled"]["error"] for row in rows),
        "error of later steps": max(row["real"]["fresh"]["error"] for row in rows),
    }


def show(figures: dict[str, Any]) -> None:
    """Print both tables."""
    lines: list[list[object]] = []
    for name, settings in figures["models"].items():
        for setting in SETTINGS:
            found = settings[setting.compression]
            lines.append(
                [
                    f"{name}, {setting.compression}",
                    found["moments"][0]["layers"],
                    *(
                        f"{found[key]:.2f}"
                        for key in ("fewer", "at best", "accumulated", "really fewer")
                    ),
                    f"{found['with dense layers']:.2f}",
                    *(f"{found[key]:.3f}" for key in ("error", "real error", "error of later steps")),
                    f"{setting.target:.1f}"
                    if name in WITH_TARGET and setting.target is not None
                    else "",
                    setting.paper,
                ]
            )
    heading = [
        "times fewer bytes than the uniform default",
        "layers",
        *("plan", "optimum", "accumulated", "compressed", "with dense layers"),
        *("error, of the default's", "compressed", "later steps"),
        *("bar", "L-GreCo's tables"),
    ]
    report.show([heading, *lines])
    report.show([_WHY, *(_why(*each) for each in figures["models"].items())])
    lines = [
        [f"{name}, {compression}", *(f"{_fewer(row):.2f}" for row in found["moments"])]
        for name, settings in figures["models"].items()
        for compression, found in settings.items()
    ]
    report.show([["times fewer bytes, by moment", *MOMENTS], *lines])


def _fewer(row: dict[str, Any]) -> float:
    return float(row["default bytes"] / row["plan bytes"])


_WHY = [
    "why",
    "bytes that are compressed",
    "largest layer",
    "bits that qsgd could save, were they no whole",
]


def _why(name: str, settings: dict[str, Any]) -> list[object]:
    rows = settings[SETTINGS[0].compression]["moments"]
    return [
        name,
        f"{1 - rows[0]['always dense bytes'] / rows[0]['dense bytes']:.1%}",
        f"{rows[0]['largest layer']:.0%} of them",
        " to ".join(f"{pick(row['unequal bits'] for row in rows):.2f}" for pick in (min, max)),
    ]


def load() -> dict[str, Any]:
    """The models that the file holds."""
    path = report.RESULTS / "allocation.json"
    models: dict[str, Any] = json.loads(path.read_text())["models"] if path.exists() else {}
    return {name: models[name] for name in MODELS if name in models}


def missed(figures: dict[str, Any]) -> list[str]:
    """The targets that were not met."""
    found = []
    for name, settings in figures["models"].items():
        for setting in SETTINGS:
            row = settings[setting.compression]
            title = f"{name}, {setting.compression}"
            if (
                name in WITH_TARGET
                and setting.target is not None
                and row["really fewer"] < setting.target
            ):
                found.append(
                    f"{title}: {row['really fewer']:.2f} times fewer bytes, target {setting.target}; "
                    f"the optimum is {row['at best']:.2f}"
                )
            if row["error"] > 1:
                found.append(f"{title}: the plan's error is {row['error']:.4f} of the default's")
    return found


def main() -> int:
    """Run all, print, write; the exit code says whether a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--fresh", action="store_true", help="repeat what the file holds already")
    command_line.quick_or_check(parser)
    options = parser.parse_args()
    if options.only and options.only not in MODELS:
        parser.error(f"no model {options.only}: there are {', '.join(MODELS)}")
    torch.set_num_threads(1)
    hvd.init()
    if options.quick:
        show({"models": {name: measure(name, arguments, 80, 2) for name, arguments in QUICK.items()}})
        return 0
    figures: dict[str, Any] = {"steps": STEPS, "samples": SAMPLES, "models": load()}

    def measure_all() -> None:
        for name in [options.only] if options.only else MODELS:
            if options.fresh or name not in figures["models"]:
                figures["models"][name] = measure(name, MODELS[name], STEPS, SAMPLES)
                report.write("allocation", figures)

    return command_line.complete(
        measure_all, lambda: show(figures), lambda: missed(figures), options.check
    )


if __name__ == "__main__":
    sys.exit(main())
