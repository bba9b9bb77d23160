"""How near payloads come to what they must cost, and how much variance learned levels save.

Three questions:

1. Positions of top-k: how many bits per element sent, against the entropy of a random
   subset of that density?
2. At 3 bits and equal blocks, on real gradients: what variance does each scheme of levels add, in
   units of the gradient's energy? Levels are learned on one gradient of each model and judged on later
   ones, from the tables, in float64, without drawing a random number.
3. Learned levels at 3 bits with Huffman coding: bits per element, against the fixed width and the
   entropy, and the variance that goes with them?

    python -m benchmarks.micro.wire            # prints tables, writes results/wire.json
    python -m benchmarks.micro.wire --check    # 1 if a stored target is missed
    python -m benchmarks.micro.wire --quick    # small and few, for the tests; no targets, no file
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import command_line
from benchmarks.report import report
from hvd_adaptive.compressors import parse
from hvd_adaptive.compressors.base import LayerBatch
from hvd_adaptive.compressors.distributions import Norm
from hvd_adaptive.compressors.learned import ALQ, AMQ
from hvd_adaptive.compressors.level_fitting import LearnedLevels
from hvd_adaptive.wire.sparse import count_of

LEARNED = {
    "AMQ": "amq:norm=l2",
    "AMQ, max": "amq",
    "ALQ": "alq:norm=l2,zero=true",
    "ALQ, max": "alq:zero=true",
    "ALQ without 0": "alq:norm=l2,coding=fixed",
    "ALQ without 0, max": "alq:coding=fixed",
}
"""Schemes of learned levels."""
FIXED = "ALQ without 0, max"
"""The scheme with a target: that is about equal widths, so about what is best at a fixed width."""
HUFFMAN = {
    "alq, l2": "alq:norm=l2",
    "alq": "alq",
    "alq without 0": "alq:zero=false",
    "amq": "amq",
}
"""Members with Huffman coding; of ``alq`` as it is there is a target."""
POSITION_TARGET = 1.03
HUFFMAN_TARGET = 1.02
DENSITIES = (0.1, 0.01, 0.001)
BITS = 3
BLOCK = 512
SMALLEST_LAYER = 1024  # what is smaller is sent dense


# --- positions ----------------------------------------------------------------------------------------


def positions(numel: int, density: float) -> dict[str, float]:
    """Bits a position of top-k on normal numbers; the entropy is that of independent positions."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0))
    topk = parse(f"topk:density={density},values=fp32")
    payload = topk.compress_(x, topk.level)
    count = count_of(numel, density)
    bits = 8 * (payload.nbytes - 4 * count) / count
    share = count / numel
    entropy = -math.log2(share) - (1 - share) / share * math.log2(1 - share)
    return {"bits": bits, "entropy": entropy, "ratio": bits / entropy}


# --- real gradients -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class GradientSource:
    """A model of launch/ and how it is trained, as the presets there do."""

    data: str
    model: str
    sizes: dict[str, Any]
    text: dict[str, Any]
    batch: int
    lr: float
    momentum: float
    clip: float


RECIPES = {
    "ResNet, Fashion-MNIST": GradientSource(
        "fashion", "resnet", {"width": 16, "layers": 1}, {}, 32, 0.05, 0.9, math.inf
    ),
    "LSTM, words": GradientSource(
        "sotu",
        "lstm",
        {"width": 276, "layers": 2, "dropout": 0.1},
        {"tokens": "word", "vocabulary": 10_000, "length": 16},
        4,
        10.0,
        0.0,
        1.0,
    ),
}


def gradients(recipe: GradientSource, steps: int, count: int) -> list[list[Tensor]]:
    """Train for some steps; the gradients of ``count`` more, layer by layer, as they are exchanged."""
    from launch.training import data, models

    task = data.load(recipe.data, data.data_root(None), **recipe.text)
    torch.manual_seed(0)
    model = models.build(recipe.model, task.shape, task.classes, models.Sizes(**recipe.sizes))
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=recipe.momentum)
    found = []
    for step in range(steps + count):
        inputs, targets = task.train[torch.randint(len(task.train), (recipe.batch,)).tolist()]
        optimizer.zero_grad()
        F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).backward()
        if step >= steps:
            found.append(_layers(model))
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
    return found


def _layers(model: nn.Module) -> list[Tensor]:
    grads = [parameter.grad for parameter in model.parameters()]
    return [
        grad.detach().flatten().clone()
        for grad in grads
        if grad is not None and grad.dim() > 1 and grad.numel() >= SMALLEST_LAYER
    ]


def learn(learned: LearnedLevels, layers: list[Tensor]) -> LearnedLevels:
    """Adopt what one gradient teaches."""
    learned.collecting = True
    learned.observe(torch.cat(layers), np.cumsum([0, *(layer.numel() for layer in layers)]))
    learned.adopt(learned.fit([learned.statistics()]))
    learned.collecting = False
    return learned


# --- variance -----------------------------------------------------------------------------------------


def schemes(layers: list[Tensor]) -> dict[str, tuple[np.ndarray, Norm]]:
    """Magnitudes and norm of every scheme; the learned ones from this gradient."""
    uniform = LearnedLevels("alq", BLOCK, "max", start="uniform").table(BITS)
    halved = LearnedLevels("alq", BLOCK, "max", start="exponential").table(BITS)
    found: dict[str, tuple[np.ndarray, Norm]] = {
        "QSGD": (uniform, "l2"),
        "QSGDinf": (uniform, "max"),
        "NUQSGD": (halved, "l2"),
        "NUQSGD, max": (halved, "max"),
    }
    for name, spec in LEARNED.items():
        member = learner(spec)
        found[name] = (learn(member.new_state(), layers).table(BITS), cast(Norm, member.norm))
    return found


def learner(spec: str) -> ALQ | AMQ:
    """A member that learns its levels, at this benchmark's bits and block."""
    name, _, options = spec.partition(":")
    member = parse(f"{name}:{','.join(filter(None, [options, f'bits={BITS}', f'block={BLOCK}']))}")
    assert isinstance(member, ALQ | AMQ)
    return member


def variance(layers: list[Tensor], table: np.ndarray, norm: Norm) -> float:
    """Expected squared error of rounding all layers, over their squared norm."""
    levels, error, energy = table.astype(np.float64), 0.0, 0.0
    for layer in layers:
        for part in _blocks(layer):
            lengths = part.norm(dim=1) if norm == "l2" else part.amax(dim=1)
            used = lengths > 0
            r = (part[used] / lengths[used, None]).numpy()
            above = np.clip(np.searchsorted(levels, r), 1, len(levels) - 1)
            rounding = (levels[above] - r) * (r - levels[above - 1])
            # below the lowest level the sign is random
            rounding = np.where(r < levels[0], levels[0] ** 2 - r**2, rounding)
            error += float((rounding.sum(axis=1) * lengths[used].numpy() ** 2).sum())
        energy += float(layer.double().square().sum())
    return error / energy


def _blocks(layer: Tensor) -> list[Tensor]:
    """Rows of one block each: the whole ones, and the short one at the end if there is one."""
    magnitudes = layer.abs().double()
    whole = layer.numel() // BLOCK * BLOCK
    parts = [magnitudes[:whole].view(-1, BLOCK), magnitudes[whole:].view(1, -1)]
    return [part for part in parts if part.numel()]


def variances(taken: list[list[Tensor]]) -> dict[str, float]:
    """Of each scheme, learned on the first gradient, mean over the others."""
    return {
        name: float(np.mean([variance(layers, table, norm) for layers in taken[1:]]))
        for name, (table, norm) in schemes(taken[0]).items()
    }


# --- Huffman ------------------------------------------------------------------------------------------


def coded(taken: list[list[Tensor]], spec: str) -> dict[str, float]:
    """Bits per element of a payload, and its variance, on a gradient that was not learned from."""
    member, layers = learner(spec), taken[-1]
    norm = cast(Norm, member.norm)
    state = learn(member.new_state(), taken[0])
    x = torch.cat(layers)
    offsets = np.cumsum([0, *(layer.numel() for layer in layers)])
    rest, bits = x.clone(), [BITS] * len(layers)
    body, _ = member.compress_layers_(LayerBatch(rest, offsets, bits, state=state))
    outs = [torch.zeros(layer.numel()) for layer in layers]
    member.decompress_layers_add_(body, outs, 1.0)
    entropy = _entropy(layers, outs, state.table(BITS), norm)
    return {
        "bits": 8 * body.numel() / x.numel(),
        "fixed": BITS + 32 / BLOCK,
        "entropy": entropy,
        "bar": HUFFMAN_TARGET * entropy + 32 / BLOCK,
        "variance": variance(layers, state.table(BITS), norm),
    }


def _entropy(layers: list[Tensor], outs: list[Tensor], table: np.ndarray, norm: Norm) -> float:
    """Bits a code, from how often each decoded level occurs."""
    first = 0 if table[0] == 0.0 else 1  # without a level at 0, the lowest has two signs
    counts = np.zeros(2 * (len(table) + first) - 1, np.int64)
    middles = (table[1:] + table[:-1]).astype(np.float64) / 2
    for layer, out in zip(layers, outs, strict=True):
        signs = out.sign().split(BLOCK)
        for block, decoded, sign in zip(layer.split(BLOCK), out.split(BLOCK), signs, strict=True):
            length = float(block.double().norm() if norm == "l2" else block.abs().max())
            # a block of zeros is all level 0
            r = decoded.abs().double().numpy() / (length or 1.0)
            code = (np.searchsorted(middles, r) + first) * sign.numpy().astype(np.int64)
            counts += np.bincount(code + len(table) - 1 + first, minlength=len(counts))
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


# --- all of it ----------------------------------------------------------------------------------------


def missed(figures: dict[str, Any]) -> list[str]:
    """The targets that were not met."""
    found = []
    for density, row in figures["positions"].items():
        if row["ratio"] > POSITION_TARGET:
            found.append(
                f"positions at {density}: {row['ratio']:.3f} of the entropy, target {POSITION_TARGET}"
            )
    for model, row in figures["variance"].items():
        for other in ("QSGD", "QSGDinf", "NUQSGD", "AMQ", "AMQ, max"):
            if row[FIXED] >= row[other]:
                found.append(
                    f"{model}: alq:coding=fixed {row[FIXED]:.3f} is not below {other} {row[other]:.3f}"
                )
    for name, row in figures["huffman"].items():
        if row["bits"] > min(row["bar"], row["fixed"]):
            found.append(f"{name}: {row['bits']:.3f} bits per element, target {row['bar']:.3f}")
    return found


def measure(quick: bool) -> dict[str, Any]:
    """All three tables; each is printed when it is there."""
    torch.set_num_threads(1)
    numel, steps, count = (300_000, 2, 2) if quick else (25_000_000, 100, 6)
    densities = DENSITIES[1:2] if quick else DENSITIES
    recipes = dict(list(RECIPES.items())[:1]) if quick else RECIPES
    taken = {name: gradients(recipe, steps, count) for name, recipe in recipes.items()}
    spread = {name: variances(found) for name, found in taken.items()}
    show(f"variance over energy, {BITS} bits, blocks of {BLOCK}", spread, turned=True)
    bits = {f"{density:g}": positions(numel, density) for density in densities}
    show(f"top-k of {numel:,}: bits a position at density", bits)
    huffman = {
        f"{name}, {row}": coded(found, spec)
        for name, found in taken.items()
        for row, spec in HUFFMAN.items()
    }
    show(f"Huffman, {BITS} bits: bits per element, variance over energy", huffman)
    sizes = {"numel": numel, "bits": BITS, "block": BLOCK}
    return {**sizes, "positions": bits, "variance": spread, "huffman": huffman}


def show(title: str, rows: dict[str, Any], turned: bool = False) -> None:
    """Print a table; where there are many columns and few rows, the other way round."""
    columns = list(next(iter(rows.values())))
    table = [[title, *columns], *([name, *row.values()] for name, row in rows.items())]
    if turned:
        table = [list(line) for line in zip(*table, strict=True)]
    report.show(table)


if __name__ == "__main__":
    sys.exit(command_line.tables(__doc__, "wire", measure, missed))
