"""What the mean over many ranks loses: correlated rounding and rotation, on real gradients.

Models of launch/train.py's presets train for some steps; then every rank computes the gradient of a
minibatch of its own, all at the same parameters. Each row quantizes them as the ranks of a run do, with
the same random numbers, decodes and averages; the error of that mean is averaged over steps' draws and
published twice:

* ``vNMSE``, as papers on mean estimation define it: ``E |decoded mean - mean|^2`` over the mean of the
  ranks' ``|gradient|^2``;
* ``relative``: the same error over ``|mean|^2``, the noise that the update sees.

A second table has both shots of a two-shot allreduce: owners sum what they received, and quantize the
mean again, each with random numbers of its own.

    python -m benchmarks.accuracy.aggregate_error          # prints tables, writes results
    python -m benchmarks.accuracy.aggregate_error --check  # 1 if a stored target is missed
    python -m benchmarks.accuracy.aggregate_error --quick  # small and few, for the tests; no file

Of layers above 2^18 elements every so many-th run of 4096 is taken, so that all take minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import horovod.torch as hvd
import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import command_line
from benchmarks.report import report
from benchmarks.workers.presets import prepare
from hvd_adaptive import rng
from hvd_adaptive.compressors import parse
from hvd_adaptive.compressors.base import CodecState, LayerBatch, Learner
from hvd_adaptive.compressors.quantized import Quantizer

MODELS: dict[str, tuple[str, ...]] = {
    "ResNet": ("--preset", "resnet-fashion"),
    "LSTM": ("--preset", "lstm-sotu"),
    "transformer": ("--preset", "transformer-sotu"),
}
QUICK: dict[str, tuple[str, ...]] = {"MLP": ("--preset", "mlp-digits", "--width", "64")}
TRAINING_STEPS = 60
RANKS = (8, 64)
DRAWS = {8: 12, 64: 3}
LARGEST_LAYER, RUN = 1 << 18, 4096

FAMILIES = ("qsgd", "qsgdinf", "alq:coding=fixed")
BITS = (2, 3, 4, 5)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "correlated": {"correlated": True},
    "rotated": {"rotate": "hadamard"},
    "both": {"correlated": True, "rotate": "hadamard"},
}
SHOTS = ((2, 4), (3, 4), (4, 4), (4, 6), (4, 8))
"""Bits of the first and the second shot."""
SHOTS_FAMILY = "qsgdinf"
NOT_WORSE = 1.05
"""Correlated rounding may have this much more error than independent rounding, by chance."""


# --- gradients ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gradients:
    """What all ranks would send.

    Args:
        ranks: a flat gradient each.
        offsets: where layers begin.
    """

    ranks: Tensor
    offsets: np.ndarray[Any, np.dtype[np.int64]]

    def of(self, ranks: int) -> Gradients:
        """Those of the first ranks."""
        return replace(self, ranks=self.ranks[:ranks])


def sampled(grad: Tensor) -> Tensor:
    """A layer, or evenly spaced runs of it."""
    flat = grad.detach().reshape(-1)
    stride = -(-flat.numel() // LARGEST_LAYER)
    return flat if stride == 1 else torch.cat(flat.split(RUN)[::stride])


def gradients_of(arguments: Sequence[str], steps: int, ranks: int) -> Gradients:
    """Train, then compute the ranks' gradients at one model."""
    preset = prepare(arguments)
    parameters = [p for p in preset.model.parameters() if p.requires_grad]
    rows = []
    for step, batch in zip(range(steps + ranks), preset.forever(), strict=False):
        preset.rule.zero_grad()
        preset.backward(batch)
        if step < steps:
            preset.set_rate(step, 10 * steps)
            preset.clip()
            preset.rule.step()
            continue
        rows.append([sampled(p.grad) for p in parameters if p.grad is not None])
    offsets = np.cumsum([0, *(layer.numel() for layer in rows[0])], dtype=np.int64)
    return Gradients(torch.stack([torch.cat(row) for row in rows]), offsets)


# --- one exchange -------------------------------------------------------------------------------------


def learned(member: Quantizer, gradients: Gradients) -> CodecState | None:
    """What a member with levels to learn has learned from all of these ranks."""
    state = member.new_state()
    if isinstance(state, Learner):
        everyone = []
        state.collecting = True
        for rank in gradients.ranks:
            member.compress_layers_(batch_of(member, rank, gradients, state))
            everyone.append(state.statistics())
        state.collecting = False
        state.adopt(state.fit(everyone))
    return state


def batch_of(
    member: Quantizer, x: Tensor, gradients: Gradients, state: CodecState | None, **random: Any
) -> LayerBatch:
    """A rank's layers, which compression may overwrite."""
    levels = [member.level] * (len(gradients.offsets) - 1)
    return LayerBatch(x.clone(), gradients.offsets, levels, state=state, **random)


def mean_of_decoded(
    member: Quantizer, gradients: Gradients, state: CodecState | None, step: int
) -> tuple[Tensor, int]:
    """What an allgather of the ranks' codes ends with, and the bytes of the last rank's."""
    layers, ranks = range(len(gradients.offsets) - 1), len(gradients.ranks)
    bodies = []
    for rank, x in enumerate(gradients.ranks):
        keys = rng.layer_keys(0, rng.SHARED if member.correlated else rank, step, layers)
        dithers = rng.dithers(keys, rank, ranks) if member.correlated else None
        random = {"keys": keys, "dithers": dithers, "rotation": rng.rotation_key(0, step)}
        bodies.append(member.compress_layers_(batch_of(member, x, gradients, state, **random))[0])
    return decoded_sum(member, bodies, gradients, 1 / ranks), bodies[-1].numel()


def decoded_sum(member: Quantizer, bodies: list[Tensor], gradients: Gradients, scale: float) -> Tensor:
    """The flat sum of all bodies."""
    out = torch.empty(int(gradients.offsets[-1]))
    sizes = np.diff(gradients.offsets).tolist()
    member.decompress_layers_sum_(bodies, list(out.split(sizes)), scale)
    return out


def second_shot(
    member: Quantizer, mean: Tensor, gradients: Gradients, state: CodecState | None, step: int
) -> Tensor:
    """The mean, quantized again by those who own a slice each."""
    keys = rng.layer_keys(1, 0, step, range(len(gradients.offsets) - 1))
    random = {"keys": keys, "rotation": rng.rotation_key(1, step)}
    body, _ = member.compress_layers_(batch_of(member, mean, gradients, state, **random))
    return decoded_sum(member, [body], gradients, 1.0)


# --- errors -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Truth:
    """The exact mean, and what errors are compared with."""

    mean: Tensor
    energy: float

    @staticmethod
    def of(gradients: Gradients) -> Truth:
        """In double precision."""
        total, energy = torch.zeros(gradients.ranks.shape[1], dtype=torch.float64), 0.0
        for rank in gradients.ranks:
            wide = rank.double()
            total += wide
            energy += float(wide.square().sum())
        return Truth(total / len(gradients.ranks), energy / len(gradients.ranks))

    def errors(self, found: Sequence[Tensor]) -> dict[str, float]:
        """Of some draws: their means."""
        squared = np.mean([float((mean - self.mean).square().sum()) for mean in found])
        return {
            "vnmse": float(squared) / self.energy,
            "relative": float(squared / float(self.mean.square().sum())),
        }


def member_of(family: str, bits: int, options: Mapping[str, Any]) -> Quantizer:
    member = parse(family)
    assert isinstance(member, Quantizer)
    return cast(Quantizer, replace(cast(Any, member), bits=bits, **options))


def one_shot(
    gradients: Gradients, truth: Truth, bits: Sequence[int], draws: int
) -> list[dict[str, Any]]:
    """A row for each family, number of bits, and variant."""
    rows = []
    for family in FAMILIES:
        for width in bits:
            for variant, options in VARIANTS.items():
                member = member_of(family, width, options)
                state = learned(member, gradients.of(8))
                found, size = [], 0
                for step in range(draws):
                    mean, size = mean_of_decoded(member, gradients, state, step)
                    found.append(mean)
                rows.append(
                    {
                        "family": family,
                        "bits": width,
                        "variant": variant,
                        "bits per value": 8 * size / int(gradients.offsets[-1]),
                        **truth.errors(found),
                    }
                )
    return rows


def two_shot(gradients: Gradients, truth: Truth, draws: int) -> list[dict[str, Any]]:
    """A row for each pair of bits and variant."""
    rows = []
    for first, second in SHOTS:
        for variant, options in VARIANTS.items():
            members = [member_of(SHOTS_FAMILY, bits, options) for bits in (first, second)]
            found = []
            for step in range(draws):
                mean, _ = mean_of_decoded(members[0], gradients, None, step)
                found.append(second_shot(members[1], mean, gradients, None, step))
            rows.append({"first": first, "second": second, "variant": variant, **truth.errors(found)})
    return rows


# --- tables -------------------------------------------------------------------------------------------


def by_variant(
    rows: Sequence[dict[str, Any]], key: str, names: Sequence[str]
) -> Iterator[list[object]]:
    """One line for each group of variants: the value without options, and what it is divided by."""
    plain = [row for row in rows if row["variant"] == "plain"]
    for base in plain:
        same = [row for row in rows if all(row[name] == base[name] for name in names)]
        ratios = [base[key] / row[key] for row in same[1:]]
        label = " ".join(str(base[name]) for name in names)
        yield [label, base["vnmse"], base["relative"], *(f"{ratio:.2f}" for ratio in ratios)]


def show(name: str, ranks: int, found: dict[str, list[dict[str, Any]]]) -> None:
    """Both tables of one model and number of ranks."""
    columns = ["vNMSE", "relative", *(f"{each}: times less" for each in list(VARIANTS)[1:])]
    lines = by_variant(found["one shot"], "vnmse", ("family", "bits"))
    report.show([[f"{name}, {ranks} ranks, one shot", *columns], *lines])
    lines = by_variant(found["two shots"], "vnmse", ("first", "second"))
    report.show([[f"{name}, {ranks} ranks, two shots of {SHOTS_FAMILY}", *columns], *lines])


def measure(quick: bool) -> dict[str, Any]:
    """All models and numbers of ranks."""
    torch.set_num_threads(1)
    hvd.init()
    models: dict[str, Any] = {}
    for name, arguments in (QUICK if quick else MODELS).items():
        everyone = gradients_of(arguments, 5 if quick else TRAINING_STEPS, 8 if quick else max(RANKS))
        models[name] = {"values": int(everyone.offsets[-1]), "ranks": {}}
        for ranks in (8,) if quick else RANKS:
            gradients = everyone.of(ranks)
            truth, draws = Truth.of(gradients), 2 if quick else DRAWS[ranks]
            found = {
                "one shot": one_shot(gradients, truth, BITS[:1] if quick else BITS, draws),
                "two shots": two_shot(gradients, truth, draws),
            }
            show(name, ranks, found)
            models[name]["ranks"][str(ranks)] = found
    return {"training steps": TRAINING_STEPS, "draws": DRAWS, "models": models}


def missed(figures: dict[str, Any]) -> list[str]:
    """Where sharing random numbers makes the mean worse, beyond chance."""
    problems = []
    for name, model in figures["models"].items():
        for ranks, found in model["ranks"].items():
            rows = {(row["family"], row["bits"], row["variant"]): row for row in found["one shot"]}
            for (family, bits, variant), row in rows.items():
                other = {"correlated": "plain", "both": "rotated"}.get(variant)
                if other and row["vnmse"] > NOT_WORSE * rows[family, bits, other]["vnmse"]:
                    problems.append(
                        f"{name}, {ranks} ranks, {family} {bits} bits: {variant} has an error of "
                        f"{row['vnmse']:.3g}, more than {other}"
                    )
    return problems


def main() -> int:
    """Command line."""
    return command_line.tables(__doc__, "aggregate_error", measure, missed)


if __name__ == "__main__":
    sys.exit(main())
