"""Multi-level compression beside GraVAC's table 3: a payload further, instead of the gradient again.

    python -m benchmarks.micro.multi_level          # prints the table, writes results/multi_level.json
    python -m benchmarks.micro.multi_level --check  # 1 if a stored target is missed
    python -m benchmarks.micro.multi_level --quick  # small models, for the tests; no targets, no file

Layers of the shapes of the paper's three models, with random numbers in the place of gradients, on one
thread. To factor 10, and to factor 1000: *direct* from the gradient both times, *multi-level* from the
payload of factor 10, and as training does it by default: both gains from one summary of the gradient,
and only one of the two payloads. Contestants take turns, and the fastest turn of each counts.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import command_line
from benchmarks.harness.in_turn import take_turns
from benchmarks.report import report
from hvd_adaptive.commands import precompile
from hvd_adaptive.compressors.base import Compressor, LayerBatch, MultiLevel, Payload
from hvd_adaptive.compressors.randomk import RandomK
from hvd_adaptive.compressors.sparse import DGC, RedSync, SparseCompressor, TopK

COMPRESSORS: dict[str, Compressor] = {
    "topk": TopK(density=0.1),
    "dgc": DGC(density=0.1),
    "redsync": RedSync(density=0.1),
    "randomk": RandomK(density=0.1),
}
"""Those that are MultiLevel."""
MILD, STRONG = 0.1, 0.001
"""Densities: factors 10 and 1000."""
PAPER: dict[str, dict[str, tuple[float, float]]] = {
    "ResNet101": {
        "topk": (606, 332), "dgc": (90, 59), "redsync": (33, 29.8), "randomk": (23, 14),
    },
    "VGG16": {
        "topk": (181, 121), "dgc": (122, 95.5), "redsync": (101.4, 87.7), "randomk": (41.6, 31),
    },
    "LSTM": {
        "topk": (200, 126), "dgc": (88, 63), "redsync": (69.4, 46.4), "randomk": (56.4, 37.4),
    },
}  # fmt: skip
"""Table 3: milliseconds, direct and multi-level, on a GPU."""
TARGET = 1.1
"""Least speedup of the table: what the faster of the two ways must reach here."""


def resnet101() -> list[int]:
    """Elements of each layer of ResNet-101 with 1000 classes: 44.5 million."""
    layers, before = [7 * 7 * 3 * 64, 64, 64], 64
    for blocks, width in ((3, 64), (4, 128), (23, 256), (3, 512)):
        for block in range(blocks):
            convolutions = [before * width, 9 * width * width, 4 * width * width]
            convolutions += [4 * before * width] if not block else []
            outputs = [width, width, 4 * width, 4 * width]
            for elements, channels in zip(convolutions, outputs, strict=False):
                layers += [elements, channels, channels]
            before = 4 * width
    return [*layers, 1000 * before, 1000]


def vgg16() -> list[int]:
    """Elements of each layer of VGG-16 with 1000 classes: 138 million."""
    widths = (64, 64, 128, 128, 256, 256, 256, *[512] * 6)
    convolutions = [9 * a * b for a, b in zip((3, *widths), widths, strict=False)]
    sizes = (7 * 7 * 512, 4096, 4096, 1000)
    linear = [a * b for a, b in itertools.pairwise(sizes)]
    pairs = zip((*convolutions, *linear), (*widths, *sizes[1:]), strict=True)
    return [elements for pair in pairs for elements in pair]


def lstm() -> list[int]:
    """Elements of each layer of the paper's LSTM: 1500 units in 2 layers, 10,000 words; 66 million."""
    units, words = 1500, 10_000
    recurrent = [4 * units * units] * 2 + [4 * units] * 2
    return [words * units, *recurrent, *recurrent, words * units, words]


MODELS: dict[str, Callable[[], list[int]]] = {"ResNet101": resnet101, "VGG16": vgg16, "LSTM": lstm}


def papers_span(method: str) -> tuple[float, float]:
    """The least and the most of a method's speedups in the paper.

    Example:
        >>> [round(each, 2) for each in papers_span("topk")]
        [1.5, 1.83]
    """
    found = [direct / multi for direct, multi in (methods[method] for methods in PAPER.values())]
    return min(found), max(found)


class Layers:
    """What a compressor does to all layers of a model, which stand side by side.

    Args:
        compressor: of all of them.
        numels: elements of each.
    """

    def __init__(self, compressor: Compressor, numels: Sequence[int]) -> None:
        self._compressor = compressor
        self._offsets = np.cumsum([0, *numels], dtype=np.int64)
        self._count = len(numels)

    def _of(self, x: Tensor) -> Iterable[Tensor]:
        edges = self._offsets.tolist()
        return (x[start:end] for start, end in itertools.pairwise(edges))

    def compress(self, x: Tensor, density: float) -> Tensor | list[Payload]:
        """All payloads; in ``x`` stays the remainder."""
        if isinstance(self._compressor, SparseCompressor):  # as training does it, in one call
            batch = LayerBatch(x, self._offsets, [density] * self._count)
            return self._compressor.compress_layers_(batch)[0]
        return [self._compressor.compress_(layer, density) for layer in self._of(x)]

    def recompress(self, payloads: Tensor | list[Payload], x: Tensor, density: float) -> None:
        """Compress all payloads further."""
        if isinstance(self._compressor, SparseCompressor):
            assert isinstance(payloads, Tensor)
            levels = [density] * self._count
            self._compressor.recompress_layers_(payloads, x, self._offsets, levels)
            return
        assert isinstance(self._compressor, MultiLevel)
        for payload, layer in zip(payloads, self._of(x), strict=True):
            assert isinstance(payload, Payload)
            self._compressor.recompress_(payload, layer, density)

    def gains(self, x: Tensor) -> None:
        """What both levels would send, without compressing."""
        for layer in self._of(x):
            self._compressor.sent_energies(layer, [MILD, STRONG])


def turns(
    compressor: Compressor, numels: Sequence[int], x: Tensor, spare: Tensor
) -> dict[str, Callable[[], object]]:
    """The contestants; compressing consumes a tensor, so that doing it twice takes a copy."""
    layers = Layers(compressor, numels)

    def direct() -> None:
        spare.copy_(x)
        layers.compress(spare, MILD)
        layers.compress(x, STRONG)

    def summary() -> None:
        layers.gains(x)
        layers.compress(x, STRONG)

    return {
        "direct": direct,
        "multi-level": lambda: layers.recompress(layers.compress(x, MILD), x, STRONG),
        "summary": summary,
    }


def measure(quick: bool) -> dict[str, Any]:
    """Milliseconds of each model and compressor."""
    torch.set_num_threads(1)
    precompile.precompile()
    models = {}
    for model, layers_of in MODELS.items():
        numels = [math.ceil(each / 100) for each in layers_of()] if quick else layers_of()
        models[model] = measured(numels, 1 if quick else 7)
        report.show(rows({model: models[model]}))
    return {"models": models}


def measured(numels: Sequence[int], repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each compressor with layers of so many elements."""
    start = torch.randn(sum(numels), generator=torch.Generator().manual_seed(2))
    x, spare = start.clone(), torch.empty_like(start)
    found = {}
    for name, compressor in COMPRESSORS.items():
        contestants = turns(compressor, numels, x, spare)
        seconds = take_turns(contestants, repeats, lambda: x.copy_(start))
        found[name] = {key: float(f"{1e3 * each:.4g}") for key, each in seconds.items()}
    return found


def speedups(row: dict[str, float]) -> tuple[float, float]:
    """Of multi-level compression, and of the summary, over direct compression."""
    return row["direct"] / row["multi-level"], row["direct"] / row["summary"]


def rows(models: dict[str, dict[str, dict[str, float]]]) -> list[list[object]]:
    """The paper's table, with its own figures at the end."""
    heading = ("model", "method", "direct", "multi-level", "speedup", "one summary", "speedup")
    table: list[list[object]] = [[*heading, "paper: direct", "multi-level", "speedup"]]
    for model, methods in models.items():
        for method, row in methods.items():
            further, summary = speedups(row)
            direct, multi = PAPER[model][method]
            table.append(
                [
                    *(model, f"`{method}`", f"{row['direct']:.0f} ms"),
                    *(f"{row['multi-level']:.0f} ms", f"{further:.2f}"),
                    *(f"{row['summary']:.0f} ms", f"{summary:.2f}"),
                    *(f"{direct:g} ms", f"{multi:g} ms", f"{direct / multi:.2f}"),
                ]
            )
    return table


def missed(figures: dict[str, Any]) -> list[str]:
    """The targets that are missed."""
    return [
        f"{model}, {method}: the faster way is {max(speedups(row)):.2f} x as fast, target {TARGET}"
        for model, methods in figures["models"].items()
        for method, row in methods.items()
        if max(speedups(row)) < TARGET
    ]


if __name__ == "__main__":
    sys.exit(command_line.tables(__doc__, "multi_level", measure, missed))
