"""What the kernels cost, in memcpys of the tensor and against torch.topk, on one thread.

Seven questions:

1. One layer of 25 million float32: how long do accumulate + select + encode + remainder take, how
   long does decoding take, and how many bits does a value need against the entropy?
2. 300 layers of 4,096: how many microseconds does a layer cost in one call?
3. How long does the summary for planning take (the spectrum, and 100 errors from it)?
4. What do the other selection rules cost, and the error tables of 100 levels?
5. How much faster is compressing a payload further than compressing the tensor again?
6. What do the quantizers cost, and how many bits does a value need?
7. What does the owner of a shard pay to sum all ranks' payloads and to compress the sum again, in one
   pass and in two?

Contestants take turns within one run, and ratios are of their fastest turns: the machine may be busy.

    python -m benchmarks.micro.kernels          # prints tables, writes results/kernels.json
    python -m benchmarks.micro.kernels --check  # 1 if a stored target is missed
    python -m benchmarks.micro.kernels --quick  # small and few, for the tests; no targets, no file
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import command_line
from benchmarks.harness.in_turn import take_turns
from benchmarks.micro import multi_level as multi_levels
from benchmarks.report import report
from hvd_adaptive.commands import precompile
from hvd_adaptive.compressors import parse
from hvd_adaptive.compressors.base import Compressor, GatheredCompressor, LayerBatch
from hvd_adaptive.compressors.sparse import DGC, GlobalTopK, RedSync, Threshold, TopK
from hvd_adaptive.kernels.cpu import sparse as cpu
from hvd_adaptive.kernels.selection import errors_from_spectrum
from hvd_adaptive.wire import ValueFormat
from hvd_adaptive.wire.sparse import count_of

CONTESTANTS: dict[str, tuple[Compressor, float]] = {
    "topk": (TopK(density=0.01), 8.0),
    "dgc": (DGC(density=0.01), 6.0),
    "redsync": (RedSync(density=0.01), 6.0),
    "redsync, signs": (RedSync(density=0.01, values="sign"), 6.0),
    "threshold": (Threshold(threshold=3.643), math.inf),  # 1 % of the sum of two normals
    "globaltopk": (GlobalTopK(density=0.01), math.inf),
}
"""Accumulate, compress and keep the remainder: the most memcpys of the tensor that this may take."""
TABLE_TARGETS = {"topk", "dgc", "redsync"}
"""Contestants whose error table must be cheap (that of one threshold more or less has no target)."""
TABLE_LEVELS = 100
TABLE_PASSES_TARGET = 1.5  # of the compress pass
TABLE_SPEEDUP_TARGET = 100.0  # over compressing at each level
MULTI_LEVEL_TARGET = 1.0
QUANTIZERS = (
    "qsgd",
    "qsgd:bits=8",
    "qsgdinf",
    "natural",
    "terngrad",
    "signsgd",
    "onebit",
    "alq",
    "amq",
)
QUANTIZE_TARGETS = {
    "qsgd": {"compress": 15.0, "decompress": 8.0},
    "alq": {"compress": 8.0, "decompress": 4.0},
    "amq": {"compress": 8.0, "decompress": 4.0},
}
"""Most memcpys of the tensor that a quantizer may take."""
OWNERS = ("qsgd:bits=4", "alq:bits=3", "topk:density=0.01", "topk:density=0.001")
"""What is summed and compressed again by the owner of a shard."""
OWNER_RANKS = (4, 16)
COPIES_TARGET = 8.0
SPEEDUP_TARGET = 15.0
BITS_TARGETS = {ValueFormat.int8: 17.0, ValueFormat.fp16: 25.0, ValueFormat.bf16: 25.0}
SMALL_LAYER_TARGET = 15.0  # microseconds
RANKS = 4
DENSITIES = (0.001, 0.01, 0.1)


@dataclass(frozen=True)
class Setup:
    """One bucket: what training would hand to the kernels."""

    start: Tensor
    x: Tensor
    grads: list[Tensor]
    offsets: np.ndarray
    counts: np.ndarray
    outs: list[Tensor]

    def refill(self) -> None:
        """The residual as it was: each turn compresses the same numbers."""
        self.x.copy_(self.start)


def setup(layers: int, numel: int, density: float) -> Setup:
    """Layers of equal size, normal residuals and gradients."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(layers * numel, generator=generator)
    return Setup(
        start=start,
        x=start.clone(),
        grads=[torch.randn(numel, generator=generator) for _ in range(layers)],
        offsets=np.arange(layers + 1) * numel,
        counts=np.full(layers, count_of(numel, density)),
        outs=[torch.zeros(numel) for _ in range(layers)],
    )


def torch_topk(bucket: Setup) -> None:
    """What it takes with torch: residual, topk, gather, and a scatter that clears what was sent."""
    for layer, grad in enumerate(bucket.grads):
        x = bucket.x[bucket.offsets[layer] : bucket.offsets[layer + 1]]
        x.add_(grad)
        indices = torch.topk(x.abs(), int(bucket.counts[layer]), sorted=False).indices
        x.gather(0, indices)
        x.scatter_(0, indices, 0.0)


def compress(bucket: Setup, values: ValueFormat) -> Tensor:
    """The kernel's way; returns the body."""
    body, _ = cpu.compress_(bucket.x, bucket.offsets, bucket.counts, values, bucket.grads)
    return body


def decompress(bucket: Setup, body: Tensor) -> None:
    """Add what all ranks sent (the same body from each)."""
    for _ in range(RANKS):
        cpu.decompress_add_(body, bucket.outs, 1.0 / RANKS)


def entropy(density: float, values: ValueFormat) -> float:
    """Bits per value: the position's entropy and the width of the value."""
    position = -math.log2(density) - (1 - density) / density * math.log2(1 - density)
    return position + values.bits


def large_layer(numel: int, density: float, repeats: int) -> dict[str, dict[str, float]]:
    """All value formats, memcpy and torch.topk in turn on one large layer."""
    bucket = setup(1, numel, density)
    copy = torch.empty_like(bucket.start)
    contestants: dict[str, Callable[[], object]] = {
        "memcpy": lambda: copy.copy_(bucket.start),
        "torch": lambda: torch_topk(bucket),
    }
    for values in ValueFormat:
        contestants[values.name] = partial(compress, bucket, values)
    seconds = take_turns(contestants, repeats, bucket.refill)
    memcpy, count = seconds["memcpy"], int(bucket.counts[0])
    figures = {
        name: {"ms": 1e3 * seconds[name], "copies": seconds[name] / memcpy}
        for name in ("memcpy", "torch")
    }
    wanted = bucket.start + bucket.grads[0]
    for values in ValueFormat:
        bucket.refill()
        foreseen = TopK(values=values.name).sizes(wanted, [density])
        body = compress(bucket, values)
        decoding = take_turns({"": partial(decompress, bucket, body)}, repeats, lambda: None)
        took = seconds[values.name]
        figures[values.name] = {
            "ms": 1e3 * took,
            "copies": took / memcpy,
            "speedup": seconds["torch"] / took,
            "bits": 8 * body.numel() / count,
            "entropy": entropy(density, values),
            "bound": float(foreseen[0]) / body.numel(),
            "decode_ns": 1e9 * decoding[""] / (RANKS * count),
        }
    return figures


def small_layers(layers: int, numel: int, repeats: int) -> dict[str, float]:
    """Microseconds per layer of one call for all of them, against torch.topk layer by layer."""
    bucket = setup(layers, numel, 0.01)
    contestants: dict[str, Callable[[], object]] = {
        "compress": lambda: compress(bucket, ValueFormat.bf16),
        "torch": lambda: torch_topk(bucket),
    }
    seconds = take_turns(contestants, repeats, bucket.refill)
    body = compress(bucket, ValueFormat.bf16)
    decoding = take_turns({"": lambda: decompress(bucket, body)}, repeats, lambda: None)
    seconds["decompress"] = decoding[""] / RANKS
    return {name: 1e6 * took / layers for name, took in seconds.items()}


def planning(numel: int, repeats: int) -> dict[str, float]:
    """Milliseconds of the spectrum and of the errors of 100 densities from it, and their accuracy."""
    x = torch.randn(numel, generator=torch.Generator().manual_seed(1))
    energy = float(x.double().square().sum())
    hist = cpu.spectrum(x)
    counts = np.array([count_of(numel, step / 1000) for step in range(1, 101)])
    copy = torch.empty_like(x)
    seconds = take_turns(
        {
            "memcpy": lambda: copy.copy_(x),
            "spectrum": lambda: cpu.spectrum(x),
            "errors": lambda: errors_from_spectrum(hist, energy, numel, counts),
        },
        repeats,
        lambda: None,
    )
    squares = x.double().square().sort(descending=True).values.cumsum(0)
    truth = energy - squares[torch.from_numpy(counts) - 1].numpy()
    estimated = errors_from_spectrum(hist, energy, numel, counts)
    return {
        "spectrum_ms": 1e3 * seconds["spectrum"],
        "spectrum_copies": seconds["spectrum"] / seconds["memcpy"],
        "errors_ms": 1e3 * seconds["errors"],
        "worst_relative_error": float(np.abs(estimated / truth - 1).max()),
    }


def accumulate_and_compress(compressor: Compressor, bucket: Setup) -> None:
    """What a step does with one bucket, whatever the compressor's kind."""
    if isinstance(compressor, GatheredCompressor):
        levels = [compressor.level] * len(bucket.grads)
        compressor.compress_layers_(LayerBatch(bucket.x, bucket.offsets, levels, bucket.grads))
        return
    for layer, grad in enumerate(bucket.grads):
        x = bucket.x[bucket.offsets[layer] : bucket.offsets[layer + 1]]
        compressor.compress_(x.add_(grad), compressor.level)


def table_levels(compressor: Compressor) -> list[float]:
    """100 levels around the default, evenly spread by their logarithm."""
    spread = np.geomspace(0.1, 10, TABLE_LEVELS)
    return [compressor.level * float(factor) for factor in spread]


def compressing(compressor: Compressor, bucket: Setup, levels: list[float]) -> float:
    """Mean seconds of compressing the tensor as it is at some levels."""
    turns = {str(at): partial(compressor.compress_, bucket.x, at) for at in levels}
    return math.fsum(take_turns(turns, 2, bucket.refill).values()) / len(levels)


def rules(numel: int, repeats: int) -> dict[str, dict[str, float]]:
    """Every contestant's pass over one large layer, and its error table, in memcpys of the layer."""
    bucket = setup(1, numel, 0.01)
    copy, total = torch.empty_like(bucket.start), bucket.start + bucket.grads[0]
    turns: dict[str, Callable[[], object]] = {"memcpy": lambda: copy.copy_(bucket.start)}
    for name, (compressor, _) in CONTESTANTS.items():
        turns[name] = partial(accumulate_and_compress, compressor, bucket)
        turns[name + " table"] = partial(compressor.errors, total, table_levels(compressor))
    seconds = take_turns(turns, repeats, bucket.refill)
    figures = {}
    for name, (compressor, _) in CONTESTANTS.items():
        each = compressing(compressor, bucket, table_levels(compressor)[::10])
        took, table = seconds[name], seconds[name + " table"]
        figures[name] = {
            "ms": 1e3 * took,
            "copies": took / seconds["memcpy"],
            "table_ms": 1e3 * table,
            "table_passes": table / took,
            "table_speedup": TABLE_LEVELS * each / table,
        }
    return figures


def quantized(numel: int, repeats: int) -> dict[str, dict[str, float]]:
    """Memcpys of the tensor that compressing and adding take, and bits per value, of each quantizer."""
    bucket, copy = setup(1, numel, 0.01), torch.empty(numel)
    members = {spec: cast(GatheredCompressor, parse(spec)) for spec in QUANTIZERS}

    def compress_with(member: GatheredCompressor) -> Tensor:
        body, _ = member.compress_layers_(
            LayerBatch(bucket.x, bucket.offsets, [member.level], bucket.grads)
        )
        return body

    bodies = {spec: compress_with(member) for spec, member in members.items()}
    contestants: dict[str, Callable[[], object]] = {"memcpy": lambda: copy.copy_(bucket.start)}
    for spec, member in members.items():
        contestants[f"{spec} compress"] = partial(compress_with, member)
        contestants[f"{spec} decompress"] = partial(
            member.decompress_layers_add_, bodies[spec], bucket.outs, 1.0
        )
    seconds = take_turns(contestants, repeats, bucket.refill)
    return {
        spec: {
            "compress": seconds[f"{spec} compress"] / seconds["memcpy"],
            "decompress": seconds[f"{spec} decompress"] / seconds["memcpy"],
            "bits": 8 * bodies[spec].numel() / numel,
        }
        for spec in QUANTIZERS
    }


def owners(numel: int, repeats: int) -> dict[str, dict[str, float]]:
    """Memcpys of a shard that its owner takes to sum, encode and keep the remainder: in two passes."""
    bucket, copy = setup(1, numel, 0.01), torch.empty(numel)
    figures = {}
    for spec, ranks in itertools.product(OWNERS, OWNER_RANKS):
        member = cast(GatheredCompressor, parse(spec))
        batch = LayerBatch(bucket.x, bucket.offsets, [member.level])
        bodies = []
        for rank in range(ranks):
            x = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
            keys = np.array([rank], np.uint64)
            body, _ = member.compress_layers_(LayerBatch(x, bucket.offsets, [member.level], keys=keys))
            bodies.append(body)
        turns: dict[str, Callable[[], object]] = {
            "memcpy": lambda: copy.copy_(bucket.start),
            "two passes": partial(GatheredCompressor.reduce_layers_, member, bodies, batch, keeps=True),
            "as it is": partial(member.reduce_layers_, bodies, batch, keeps=True),
        }
        seconds = take_turns(turns, repeats, bucket.refill)
        figures[f"{spec}, {ranks} ranks"] = {
            name: seconds[name] / seconds["memcpy"] for name in ("two passes", "as it is")
        }
    return figures


def multi_level_turns(
    compressor: Compressor, x: Tensor, spare: Tensor
) -> dict[str, Callable[[], object]]:
    """To factor 10, to factor 10 and factor 1000 in two ways, and to what both would gain.

    GraVAC's exact form compresses ``further``; its default estimates gains from a ``histogram`` and
    compresses to the factor that is sent.
    """
    both = multi_levels.turns(compressor, [x.numel()], x, spare)
    return {
        "copy": lambda: spare.copy_(x),
        "once": lambda: compressor.compress_(x, multi_levels.MILD),
        "twice": both["direct"],
        "further": both["multi-level"],
        "gains": lambda: compressor.errors(x, [multi_levels.MILD, multi_levels.STRONG]),
        "histogram": both["summary"],
    }


def multi_level(numel: int, repeats: int) -> dict[str, dict[str, float]]:
    """Factor 10 and then 1000: from the payload, from the tensor again, and only the two gains.

    Compressing consumes a tensor, so that doing it twice takes a copy.
    """
    start = torch.randn(numel, generator=torch.Generator().manual_seed(2))
    x, spare = start.clone(), torch.empty_like(start)
    figures = {}
    for name, compressor in multi_levels.COMPRESSORS.items():
        seconds = take_turns(multi_level_turns(compressor, x, spare), repeats, lambda: x.copy_(start))
        figures[name] = {f"{key} ms": 1e3 * took for key, took in seconds.items()}
        figures[name]["speedup"] = seconds["twice"] / seconds["further"]
        steps = [seconds[way] - seconds["once"] for way in ("twice", "further")]
        figures[name]["speedup of the second"] = steps[0] / steps[1]
        figures[name]["speedup of gains"] = seconds["twice"] / seconds["gains"]
        figures[name]["speedup of histogram"] = seconds["twice"] / seconds["histogram"]
        figures[name]["paper from"], figures[name]["paper to"] = multi_levels.papers_span(name)
    return figures


def print_rows(title: str, figures: dict[str, dict[str, float]]) -> None:
    """One row a contestant, the names of the figures as the heading."""
    columns = list(next(iter(figures.values())))
    rows: list[list[object]] = [[title, *columns]]
    rows += [[name, *(f"{row[column]:.2f}" for column in columns)] for name, row in figures.items()]
    print("\n" + report.table(rows))


def print_large(numel: int, density: float, figures: dict[str, dict[str, float]]) -> None:
    """One table for one density."""
    columns = ("ms", "copies", "speedup", "bits", "entropy", "bound", "decode_ns")
    heading = (
        f"{numel:,} at {density:.1%}",
        "ms",
        "x memcpy",
        "x faster than torch.topk",
        "bits/value",
        "entropy",
        "bound/actual",
        "decode ns/value",
    )
    rows: list[list[object]] = [list(heading)]
    for name, row in figures.items():
        rows.append([name, *(f"{row[c]:.2f}" if c in row else "" for c in columns)])
    report.show(rows)


def missed_of_sparse(large: dict[str, dict[str, float]], small: dict[str, float]) -> list[str]:
    """Targets of one layer in all value formats, and of small layers."""
    found = []
    for name in ValueFormat.__members__:
        row = large[name]
        if row["copies"] > COPIES_TARGET:
            found.append(f"{name}: {row['copies']:.1f} memcpys, target {COPIES_TARGET}")
        if row["speedup"] < SPEEDUP_TARGET:
            found.append(f"{name}: {row['speedup']:.1f} x torch.topk, target {SPEEDUP_TARGET}")
    for values in ValueFormat:
        row = large[values.name]
        if row["bits"] > BITS_TARGETS.get(values, math.inf):
            found.append(
                f"{values.name}: {row['bits']:.2f} bits per value, target {BITS_TARGETS[values]}"
            )
        if not 1.0 <= row["bound"] <= 1.03:
            found.append(f"{values.name}: planners see {row['bound']:.3f} of the bytes sent")
    if small["compress"] > SMALL_LAYER_TARGET:
        found.append(f"small layers: {small['compress']:.1f} us each, target {SMALL_LAYER_TARGET}")
    return found


def missed_of_rules(
    ruled: dict[str, dict[str, float]],
    levels: dict[str, dict[str, float]],
    quantizers: dict[str, dict[str, float]],
) -> list[str]:
    """Targets of the passes, the error tables, multi-level compression and quantizers."""
    found = []
    for name, (_, target) in CONTESTANTS.items():
        if ruled[name]["copies"] > target:
            found.append(f"{name}: {ruled[name]['copies']:.1f} memcpys, target {target}")
    for name in sorted(TABLE_TARGETS):
        passes, speedup = ruled[name]["table_passes"], ruled[name]["table_speedup"]
        if passes > TABLE_PASSES_TARGET:
            found.append(f"{name}: an error table is {passes:.2f} passes, target {TABLE_PASSES_TARGET}")
        if speedup < TABLE_SPEEDUP_TARGET:
            found.append(
                f"{name}: an error table is {speedup:.0f} x faster, target {TABLE_SPEEDUP_TARGET}"
            )
    for name, row in levels.items():
        if row["speedup"] <= MULTI_LEVEL_TARGET:
            speedup = row["speedup"]
            found.append(f"{name}: multi-level is {speedup:.2f} x as fast, target {MULTI_LEVEL_TARGET}")
    for name, targets in QUANTIZE_TARGETS.items():
        for key, target in targets.items():
            took = quantizers[name][key]
            if took > target:
                found.append(f"{name}: {key} takes {took:.1f} memcpys, target {target}")
    return found


def measure(quick: bool) -> dict[str, Any]:
    """All tables; each is printed when it is there."""
    torch.set_num_threads(1)
    precompile.precompile()
    numel, layers, repeats = (300_000, 20, 2) if quick else (25_000_000, 300, 7)

    large = {}
    for density in (0.01,) if quick else DENSITIES:
        large[density] = large_layer(numel, density, repeats)
        print_large(numel, density, large[density])
    small = small_layers(layers, 4096, 5 * repeats)
    report.show([[f"{layers} layers of 4,096, us each", *small], ["", *small.values()]])
    plan = planning(numel, repeats)
    report.show([["planning", *plan], ["", *plan.values()]])

    ruled = rules(numel, repeats)
    print_rows(f"{numel:,} at 1.0%", ruled)
    levels = multi_level(numel, repeats)
    print_rows("factor 10, then 1000", levels)

    quantizers = quantized(numel, repeats)
    print_rows("memcpys of the tensor, and bits", quantizers)
    owned = owners(numel // 12, repeats)
    print_rows(f"memcpys of a shard of {numel // 12:,}, to sum and compress again", owned)
    return {
        "numel": numel,
        "large": {f"{density:g}": rows for density, rows in large.items()},
        "small_layers_us": small,
        "planning": plan,
        "rules": ruled,
        "multi_level": levels,
        "quantizers": quantizers,
        "owners": owned,
    }


def missed(figures: dict[str, Any]) -> list[str]:
    """The targets that were not met."""
    found = missed_of_sparse(figures["large"]["0.01"], figures["small_layers_us"])
    return found + missed_of_rules(figures["rules"], figures["multi_level"], figures["quantizers"])


if __name__ == "__main__":
    sys.exit(command_line.tables(__doc__, "kernels", measure, missed))
