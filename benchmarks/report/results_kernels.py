"""The sections of RESULTS.md on kernels and on bits on the wire."""

from __future__ import annotations

from typing import Any, TypeAlias

from benchmarks.report.results_markdown import load, missed, section, source, span, table

Part: TypeAlias = tuple[str, str, str, str]
"""A table with its heading, its question and its answer."""


def kernels() -> str:
    """Every compressor's pass, error tables and multi-level compression, in memcpys of the layer."""
    figures = load("kernels")
    return section(
        "Kernels",
        f"One layer of {figures['numel']:,} float32 on one thread; a memcpy is that of the layer in "
        f"the same run. {source('kernels', figures)}",
        _top_k(figures),
        _selection_rules(figures["rules"]),
        _quantizers(figures["quantizers"]),
        _levels(figures["multi_level"]),
        end=missed(figures),
    )


def gpu_kernels() -> str:
    """The roofline of the kernels for GPUs."""
    from benchmarks.micro.gpu_kernels import TARGETS

    figures = load("gpu_kernels")
    sizes = {f"{int(numel):,}": rows for numel, rows in figures["sizes"].items()}
    largest, rows = list(sizes.items())[-1]
    met = [name for name, most in TARGETS.items() if rows[name]["memcpys"] <= most]
    heading = ["", *(f"{numel}: memcpys" for numel in sizes), "words moved per element"]
    heading += [f"{largest}: share of a copy's bandwidth", "TB/s of gradient"]
    lines = [
        [
            name,
            *(f"{found[name]['memcpys']:.1f}" for found in sizes.values()),
            *(f"{row[key]:.2f}" for key in ("words", "share", "gradient_tb_per_s")),
        ]
        for name, row in rows.items()
    ]
    return section(
        "Kernels for GPUs",
        f"One layer of float32 on an {figures['gpu']}; times are those of whole calls, the host's part "
        "included. They are of the kernels of that day: what has changed since, and was not measured, "
        f"says docs/gpu.md. {source('gpu_kernels', figures)}",
        (
            "Roofline",
            "How near do the kernels come to what a GPU's memory moves?",
            f"Of {len(TARGETS)} targets {len(met)} are met; a call moves "
            f"{span((rows[name]['share'] for name in TARGETS), '.2f')} of what a copy of the gradient "
            "moves in the same time.",
            table(heading, lines),
        ),
        end=missed(figures),
    )


def _top_k(figures: dict[str, Any]) -> Part:
    small, large = figures["small_layers_us"], figures["large"]
    one = [
        row for name, row in large["0.01"].items() if name not in ("memcpy", "torch") and "bits" in row
    ]
    excess = max(row["bits"] / row["entropy"] for row in one) - 1
    return (
        "Top-k",
        "What does it cost to add the gradient, select, encode and keep the remainder?",
        f"At 1 % {span(row['copies'] for row in one)} memcpys of the layer: "
        f"{span((row['speedup'] for row in one), '.0f')} times faster than a residual, `torch.topk` "
        f"and a scatter. Positions and values take at most {100 * excess:.1f} % more bits than their "
        f"entropy. A layer of 4,096 elements takes {small['compress']:.1f} µs in a bucket of 300 "
        f"(the same work with `torch.topk`: {small['torch']:.0f} µs).",
        _value_formats(large),
    )


def _selection_rules(rules: dict[str, Any]) -> Part:
    slowest = min(rules, key=lambda name: rules[name]["table_speedup"])
    quickest = max(rules, key=lambda name: rules[name]["table_speedup"])
    return (
        "Sparse compressors and their error tables",
        "What do the other selection rules cost, and the errors of 100 levels that planners need?",
        f"At 1 % {span(row['copies'] for row in rules.values())} memcpys. The errors of 100 levels are "
        f"{rules[slowest]['table_speedup']:.0f} ({slowest}) to {rules[quickest]['table_speedup']:.0f} "
        f"({quickest}) times cheaper than compressing at each of them.",
        _columns(
            "at 1 %",
            rules,
            {
                "add, select, encode, keep the remainder: memcpys": ("copies", ".1f"),
                "errors of 100 levels, in such passes": ("table_passes", ".2f"),
                "times faster than compressing at each level": ("table_speedup", ".0f"),
            },
        ),
    )


def _quantizers(quantizers: dict[str, Any]) -> Part:
    fast = {name: row["compress"] for name, row in quantizers.items() if name not in ("alq", "amq")}
    learned = [quantizers[name]["compress"] for name in ("alq", "amq")]
    return (
        "Quantizers",
        "What do the quantizers cost?",
        f"Compressing takes {span(fast.values())} memcpys of the layer, and "
        f"{span(learned)} with learned levels and Huffman coding (`alq`, `amq`).",
        _columns(
            "quantizer",
            {f"`{name}`": row for name, row in quantizers.items()},
            {
                "add, round, pack, keep the remainder: memcpys": ("compress", ".1f"),
                "unpack and add: memcpys": ("decompress", ".1f"),
                "bits per value": ("bits", ".2f"),
            },
        ),
    )


def _levels(levels: dict[str, Any]) -> Part:
    columns = {
        "from the payload: times faster than twice from the tensor": ("speedup", ".2f"),
        "the second alone": ("speedup of the second", ".2f"),
        "both errors from one summary: times faster": ("speedup of gains", ".2f"),
    }
    if all("speedup of histogram" in row for row in levels.values()):
        columns |= {
            "both gains from one summary, and compressing once": ("speedup of histogram", ".2f"),
            "paper, from": ("paper from", ".2f"),
            "to": ("paper to", ".2f"),
        }
    return (
        "Multi-level compression",
        "What does it save to compress the payload further, instead of the tensor again (GraVAC)?",
        f"Both levels together are {span((row['speedup'] for row in levels.values()), '.2f')} times as "
        "fast (GraVAC's paper: 1.1 to 1.83), and both errors from one summary are "
        f"{span(row['speedup of gains'] for row in levels.values())} times as fast as from two passes. "
        "Both errors of random-k are known from the tensor's energy.",
        _columns(
            "factor 10, then 1,000",
            levels,
            columns,
        ),
    )


def _value_formats(large: dict[str, Any]) -> str:
    heading = [
        "top-k at density",
        "values",
        "add, select, encode, keep the remainder: memcpys",
        "times faster than residual + `torch.topk` + scatter",
        "bits per value sent",
        "entropy of position + value width",
        "decoding, ns per value",
    ]
    rows = [
        [
            f"{float(density):.1%}",
            values,
            f"{row['copies']:.1f}",
            f"{row['speedup']:.0f}",
            *(f"{row[key]:.2f}" if key in row else "" for key in ("bits", "entropy")),
            f"{row['decode_ns']:.1f}" if "decode_ns" in row else "",
        ]
        for density, formats in large.items()
        for values, row in formats.items()
        if values not in ("memcpy", "torch")
    ]
    return table(heading, rows)


def _columns(
    title: str, figures: dict[str, dict[str, float]], columns: dict[str, tuple[str, str]]
) -> str:
    """A row per contestant; ``columns`` give each heading its figure and format."""
    rows = [
        [name, *(format(row[key], form) for key, form in columns.values())]
        for name, row in figures.items()
    ]
    return table([title, *columns], rows)


def wire() -> str:
    """Positions, variance of learned levels, Huffman codes."""
    figures = load("wire")
    positions = [
        [f"{float(density):.1%}", *(f"{row[key]:.3f}" for key in ("bits", "entropy", "ratio"))]
        for density, row in figures["positions"].items()
    ]
    models = list(figures["variance"])
    variance = [
        [scheme, *(f"{figures['variance'][model][scheme]:.3f}" for model in models)]
        for scheme in figures["variance"][models[0]]
    ]
    coded = [
        [name, *(f"{row[key]:.3f}" for key in ("bits", "fixed", "entropy", "variance"))]
        for name, row in figures["huffman"].items()
    ]
    excess = max(row["ratio"] for row in figures["positions"].values()) - 1
    best = [min(figures["variance"][model].items(), key=lambda each: each[1]) for model in models]
    lowest = ", ".join(
        f"{level} on the {model} ({value:.3f})"
        for model, (level, value) in zip(models, best, strict=True)
    )
    saved = [1 - row["bits"] / row["fixed"] for row in figures["huffman"].values()]
    return section(
        "Bits on the wire",
        source("wire", figures),
        (
            "Positions of sparse payloads",
            "How close is the coding of positions to its entropy?",
            f"At most {100 * excess:.1f} % above it.",
            table(["top-k at density", "bits per position", "entropy", "ratio"], positions),
        ),
        (
            "Variance of quantization levels",
            "Which levels add the least variance?",
            f"The lowest are {lowest}: {figures['bits']} bits, blocks of {figures['block']}, real "
            "gradients, levels "
            "learned on an earlier gradient, variance over the gradient's energy. `alq` is "
            '"ALQ, max" with Huffman coding and "ALQ without 0, max" with `coding=fixed`; `amq` is '
            '"AMQ, max"; the others are options or for comparison.',
            table(["levels", *models], variance),
        ),
        (
            "Huffman coding",
            "What does Huffman coding save at 3 bits?",
            f"{span((100 * each for each in saved), '.0f')} % of the bytes of fixed-width codes.",
            table(
                ["with Huffman codes", "bits per value", "fixed width", "entropy", "variance"], coded
            ),
        ),
        end=missed(figures),
    )
