"""How well each metric of a layer's error foretells what its compression does to the loss.

After L-GreCo's section 5.4. A model trains without compression to a checkpoint. From there short runs
take the same batches: one as before, and one for each layer and level in which the gradients of that
layer alone are compressed, with error feedback. How much the training loss rises by that, on average
over the steps, is the layer's *sensitivity* at this level. It is correlated with each metric of planner
``lgreco``, measured on the mean gradient of the run without compression:

* over the layers, at one level: whether a metric ranks the layers as the loss does;
* over the levels, in one layer.

The metric ``preconditioned`` takes the optimizer's second moments with AdamW. SGD has none: there it
takes those that Adam would have.

    python -m benchmarks.accuracy.sensitivity          # prints tables, writes results/sensitivity.json
    python -m benchmarks.accuracy.sensitivity --quick  # small and few, for the tests; no file
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import horovod.torch as hvd
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from benchmarks.accuracy.allocation import Row, rows_of
from benchmarks.harness import command_line
from benchmarks.report import report
from benchmarks.workers.presets import Batch, Preset, prepare
from hvd_adaptive.adaptation.candidates import Candidate, errors_of
from hvd_adaptive.adaptation.preconditioning import SecondMoment
from hvd_adaptive.compressors import parse
from hvd_adaptive.compressors.base import Compressor, Level
from hvd_adaptive.layers import Layer
from hvd_adaptive.planning import CandidateTable
from hvd_adaptive.planning.metrics import METRICS, ErrorMetric

MLP = ("--preset", "mlp-fashion", "--layers", "6", "--width", "256")
RESNET = ("--preset", "resnet-fashion")
ADAMW = ("--optimizer", "adamw", "--lr", "0.001")
MODELS: dict[str, tuple[str, ...]] = {
    "MLP, SGD": MLP,
    "MLP, AdamW": (*MLP, *ADAMW),
    "ResNet, SGD": RESNET,
    "ResNet, AdamW": (*RESNET, *ADAMW),
}
QUICK: dict[str, tuple[str, ...]] = {"MLP": ("--preset", "mlp-digits", "--width", "64")}
COMPRESSION = "topk:density=0.01"
LEVELS: tuple[Level, ...] = (0.1, 0.03, 0.01, 0.003)
TRAINING = 500
"""Steps of the training, whose learning rate warms up and falls along a cosine."""
CHECKPOINTS = (25, 100, 300)
"""Steps of it before the short runs."""
STEPS, REPEATS = 25, 2
"""Of a short run, the paper having up to 50; and how many there are, each with batches of its own."""
BETA2, EPS = 0.99, 1e-8
"""Of the second moments that SGD is given."""


# --- short runs ---------------------------------------------------------------------------------------


@dataclass
class Checkpoint:
    """A model in training, to which short runs return.

    Args:
        preset: the model, its optimizer and data.
        streams: batches of each repetition, the same for all layers and levels.
        moments: second moments by layer, as Adam would keep them.
    """

    preset: Preset
    streams: list[list[Batch]]
    moments: list[SecondMoment]

    def __post_init__(self) -> None:
        self._saved = copy.deepcopy(
            (self.preset.model.state_dict(), self.preset.rule.state_dict(), torch.get_rng_state())
        )

    def run(
        self, compressed: tuple[int, Compressor, Level] | None = None
    ) -> tuple[float, list[Tensor]]:
        """Train from here; the mean loss, and the mean gradient of each layer.

        Args:
            compressed: index of a layer, and how its gradients are compressed.
        """
        sums = [torch.zeros(p.numel()) for p in self.preset.model.parameters()]
        losses = [self._run(batches, compressed, sums) for batches in self.streams]
        steps = len(self.streams) * len(self.streams[0])
        return float(np.mean(losses)), [total / steps for total in sums]

    def _run(
        self,
        batches: Sequence[Batch],
        compressed: tuple[int, Compressor, Level] | None,
        sums: Sequence[Tensor],
    ) -> float:
        """One repetition; adds its gradients to ``sums``."""
        model, rule, generator = copy.deepcopy(self._saved)
        self.preset.model.load_state_dict(model)
        self.preset.rule.load_state_dict(rule)
        torch.set_rng_state(generator)
        parameters = list(self.preset.model.parameters())
        residual: Tensor | None = None
        losses = []
        for batch in batches:
            self.preset.rule.zero_grad()
            losses.append(self.preset.backward(batch))
            for total, parameter in zip(sums, parameters, strict=True):
                total.add_(gradient_of(parameter))
            if compressed is not None:
                index, compressor, level = compressed
                residual = compress(parameters[index], compressor, level, residual)
            self.preset.clip()
            self.preset.rule.step()
        return float(np.mean(losses))


def gradient_of(parameter: Parameter) -> Tensor:
    """Flat; a layer takes part in every step."""
    assert parameter.grad is not None
    return parameter.grad.detach().reshape(-1)


def compress(
    parameter: Parameter, compressor: Compressor, level: Level, residual: Tensor | None
) -> Tensor:
    """Leave in a gradient what would be sent of it; what is left for the next step."""
    grad = gradient_of(parameter)
    x = grad.clone() if residual is None else grad + residual
    left = x.clone()
    compressor.compress_(left, level)
    grad.copy_(x - left)
    return left


def checkpoints_of(preset: Preset, at: Sequence[int], steps: int, repeats: int) -> Iterator[Checkpoint]:
    """Train, and stop at some steps for short runs; the training goes on as if there were none."""
    parameters = list(preset.model.parameters())
    averages = [torch.zeros(p.numel()) for p in parameters]
    batches = preset.forever()
    for step in range(at[-1]):
        preset.set_rate(step, TRAINING)
        preset.rule.zero_grad()
        preset.backward(next(batches))
        for average, parameter in zip(averages, parameters, strict=True):
            grad = gradient_of(parameter)
            average.mul_(BETA2).addcmul_(grad, grad, value=1 - BETA2)
        preset.clip()
        preset.rule.step()
        if step + 1 not in at:
            continue
        states = [preset.rule.state[p].get("exp_avg_sq") for p in parameters]
        moments = [
            SecondMoment(mean.clone(), BETA2, EPS)
            if state is None
            else SecondMoment(state.reshape(-1).clone(), 0.999, EPS)
            for mean, state in zip(averages, states, strict=True)
        ]
        streams = [[next(batches) for _ in range(steps)] for _ in range(repeats)]
        checkpoint = Checkpoint(preset, streams, moments)
        yield checkpoint
        checkpoint.run()  # back to the training


# --- sensitivities and metrics ------------------------------------------------------------------------


def measure_checkpoint(
    rows: Sequence[Row], checkpoint: Checkpoint, levels: Sequence[Level]
) -> dict[str, Any]:
    """Sensitivities ``[layers][levels]``, and each metric likewise."""
    compressor = parse(COMPRESSION)
    plain, means = checkpoint.run()
    sensitivities = [
        [checkpoint.run((row.layer.index, compressor, level))[0] - plain for level in levels]
        for row in rows
    ]
    return {
        "loss": plain,
        "sensitivity": sensitivities,
        **metrics_of([row.layer for row in rows], means, checkpoint.moments, levels),
    }


def metrics_of(
    layers: Sequence[Layer],
    grads: Sequence[Tensor],
    moments: Sequence[SecondMoment],
    levels: Sequence[Level],
) -> dict[str, list[list[float]]]:
    """Every metric of every layer at every level, as a planner sees it."""
    scaled = [moment.precondition(grad) for moment, grad in zip(moments, grads, strict=True)]
    squared, preconditioned = (table_of(layers, each, levels) for each in (grads, scaled))
    return {
        metric: [row.tolist() for row in ErrorMetric(metric).applied(squared, preconditioned)[0].errors]
        for metric in METRICS
    }


def table_of(
    layers: Sequence[Layer], tensors: Sequence[Tensor], levels: Sequence[Level]
) -> CandidateTable:
    """Errors and energies; bytes do not count here."""
    candidates = [Candidate(parse(COMPRESSION), level) for level in levels]
    mine = [tensors[layer.index] for layer in layers]
    return CandidateTable.of(
        [layer.name for layer in layers],
        [errors_of(x, layer, candidates) for x, layer in zip(mine, layers, strict=True)],
        [[each.payload_bytes(layer) for each in candidates] for layer in layers],
        [[each.label for each in candidates]] * len(layers),
        [0] * len(layers),
        [layer.nbytes for layer in layers],
        energies=[float(x @ x) for x in mine],
    )


NumberRow: TypeAlias = Sequence[float] | NDArray[Any]


def correlation(one: NumberRow, other: NumberRow) -> float | None:
    """Pearson's; None where something does not vary."""
    if np.size(one) < 2 or not np.std(one) or not np.std(other):
        return None
    return float(np.corrcoef(one, other)[0, 1])


def mean_of(found: Sequence[float | None]) -> float | None:
    """Of those that are known."""
    known = [each for each in found if each is not None]
    return float(np.mean(known)) if known else None


def correlations(checkpoints: Sequence[dict[str, Any]], metric: str) -> dict[str, Any]:
    """Over the layers at each level, and over the levels in each layer; means of the checkpoints."""
    layers, levels = np.shape(checkpoints[0]["sensitivity"])
    pairs = [(np.array(each["sensitivity"]), np.array(each[metric])) for each in checkpoints]
    return {
        "at levels": [
            mean_of([correlation(loss[:, level], error[:, level]) for loss, error in pairs])
            for level in range(levels)
        ],
        "in layers": [
            mean_of([correlation(loss[layer], error[layer]) for loss, error in pairs])
            for layer in range(layers)
        ],
        "all": mean_of([correlation(loss.ravel(), error.ravel()) for loss, error in pairs]),
    }


def measure_model(
    arguments: Sequence[str], at: Sequence[int], steps: int, repeats: int, levels: Sequence[Level]
) -> dict[str, Any]:
    """One model: the measurements of each checkpoint, and their correlations."""
    preset = prepare(arguments)
    named = enumerate(preset.model.named_parameters())
    layers = [Layer(index, name, tuple(p.shape)) for index, (name, p) in named]
    rows = rows_of(layers, COMPRESSION)
    found = [
        measure_checkpoint(rows, each, levels) for each in checkpoints_of(preset, at, steps, repeats)
    ]
    return {
        "layers": [row.layer.name for row in rows],
        "checkpoints": found,
        "correlations": {metric: correlations(found, metric) for metric in METRICS},
    }


# --- tables -------------------------------------------------------------------------------------------


def shown(number: float | None) -> str:
    return "-" if number is None else f"{number:+.2f}"


def level_rows(models: dict[str, Any], levels: Sequence[Level]) -> list[list[str]]:
    """A line for each model and metric: correlations over the layers, at each level and on average."""
    lines = []
    for name, found in models.items():
        for metric in METRICS:
            numbers = found["correlations"][metric]
            cells = [*numbers["at levels"], mean_of(numbers["at levels"]), numbers["all"]]
            lines.append([name, metric, *map(shown, cells)])
    return [["", "metric", *(f"{level:g}" for level in levels), "mean", "all together"], *lines]


def layer_rows(models: dict[str, Any]) -> list[list[str]]:
    """A line for each model and layer: its sensitivity at the last level, and the correlations."""
    lines = []
    for name, found in models.items():
        for index, layer in enumerate(found["layers"]):
            rise = np.mean([each["sensitivity"][index][-1] for each in found["checkpoints"]])
            numbers = [found["correlations"][metric]["in layers"][index] for metric in METRICS]
            lines.append([name, layer, f"{rise:+.4f}", *map(shown, numbers)])
    return [["", "layer", "loss at the last level", *METRICS], *lines]


def measure(quick: bool) -> dict[str, Any]:
    """All models."""
    torch.set_num_threads(1)
    hvd.init()
    steps, repeats, at = (3, 1, (4, 8)) if quick else (STEPS, REPEATS, CHECKPOINTS)
    levels = LEVELS[::2] if quick else LEVELS
    models = {}
    for name, arguments in (QUICK if quick else MODELS).items():
        print(name, file=sys.stderr, flush=True)
        models[name] = measure_model(arguments, at, steps, repeats, levels)
    report.show(level_rows(models, levels))
    report.show(layer_rows(models))
    return {
        "compression": COMPRESSION,
        "levels": levels,
        "steps": steps,
        "repeats": repeats,
        "after steps": at,
        "models": models,
    }


def missed(figures: dict[str, Any]) -> list[str]:
    """There is no target: the paper's question is which metric to choose."""
    del figures
    return []


if __name__ == "__main__":
    sys.exit(command_line.tables(__doc__, "sensitivity", measure, missed))
