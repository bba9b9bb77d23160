"""The figures in README.md, from the JSON files under results/.

python benchmarks/readme.py            # rewrites README's section of results
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- results: begin (made by benchmarks/readme.py) -->", "<!-- results: end -->"


def load(name: str) -> dict[str, Any]:
    """One benchmark's figures."""
    figures: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return figures


def source(name: str, figures: dict[str, Any]) -> str:
    """Which command made them, where and when."""
    machine = figures["machine"]
    return (
        f"`python benchmarks/{name}.py`, {machine['date']}, {machine['cores']} cores {machine['cpu']}, "
        f"torch {machine['torch']}."
    )


def table(heading: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def kernels() -> str:
    """Top-k against a copy of the tensor and torch.topk."""
    figures = load("kernels")
    rows = [
        [
            f"{float(density):.1%}",
            values,
            f"{row['copies']:.1f}",
            f"{row['speedup']:.0f}",
            *(f"{row[key]:.2f}" if key in row else "" for key in ("bits", "entropy")),
            f"{row['decode_ns']:.1f}" if "decode_ns" in row else "",
        ]
        for density, formats in figures["large"].items()
        for values, row in formats.items()
        if values not in ("memcpy", "torch")
    ]
    heading = [
        "density",
        "values",
        "time, in copies of the tensor",
        "times faster than residual + `torch.topk` + scatter",
        "bits a value sent",
        "entropy of position + value width",
        "decoding, ns a value",
    ]
    small = figures["small_layers_us"]
    return (
        f"Top-k of {figures['numel']:,} float32 on one thread: add the gradient, select, encode, "
        f"keep the remainder; `+ spectrum` also counts the histogram of magnitudes from which the "
        f"error of every density follows. {source('kernels', figures)}\n\n{table(heading, rows)}\n\n"
        f"A layer of 4,096 elements takes {small['compress']:.1f} µs in a bucket of 300 "
        f"(`torch.topk` and what belongs to it: {small['torch']:.0f} µs)."
    )


def overhead() -> str:
    """A step against stock Horovod's where compression cannot help."""
    figures = load("overhead")
    steps, calls = figures["steps"], figures["calls"]
    rows = [
        [
            title,
            f"{steps[title]['milliseconds']['stock']:.1f} ms",
            *(f"{steps[title]['ratio'][name]:.3f}" for name in ("none", "topk 1 %")),
        ]
        for title in steps
        if title != "ranks"
    ]
    heading = ["model", "stock Horovod's step", "`none` / stock", "`topk` 1 % / stock"]
    costs = "; ".join(
        f"`{name}` {cost['layer']:.1f} µs a layer and {cost['bucket']:.0f} µs a bucket, "
        f"{100 * cost['share']:.1f} % of the step of the 300 layers"
        for name, cost in calls.items()
    )
    return (
        f"The step where compression cannot help: {steps['ranks']} ranks on one machine, without a "
        f"network, in turn. {source('overhead', figures)}\n\n{table(heading, rows)}\n\n"
        f"Our own cost (hooks, buckets, kernels' calls): {costs}."
    )


def accuracy() -> str:
    """Every compressor's training against dense training."""
    from accuracy import rows_of

    figures = load("accuracy")
    rows = [
        [
            row["name"],
            f"`{row['setting'].compression}`",
            f"`{row['setting'].feedback}`" if row["setting"].feedback else "",
            f"{100 * row['accuracy']:.2f} %",
            f"{100 * row['spread']:.2f}",
            f"{100 * row['difference']:+.2f}",
            f"{row['ratio']:.1f}x",
        ]
        for row in rows_of(figures["runs"])
    ]
    heading = [
        "",
        "compression",
        "feedback, where it is not the compressor's own",
        "accuracy",
        "largest less smallest",
        "less dense, points",
        "payload smaller by",
    ]
    (run, *_) = figures["runs"].values()
    setting = run["setting"]
    return (
        f"Accuracy: the small ResNet on Fashion-MNIST, {setting['epochs']:g} epochs on {setting['ranks']} "
        f"ranks, mean of {rows_of(figures['runs'])[0]['seeds']} seeds, the same data in the same order; the "
        f"first 50 steps dense. Payloads include all that travels dense (biases, norms, small layers, and "
        f"those first steps). {source('accuracy', figures)}\n\n{table(heading, rows)}"
    )


def render() -> str:
    """The whole section."""
    parts = [BEGIN, kernels(), wire(), accuracy(), overhead(), END]
    return "\n\n".join(parts)


def section(text: str) -> str:
    """README's section of results, as it is."""
    return BEGIN + text.split(BEGIN, 1)[1].split(END, 1)[0] + END


def main() -> int:
    """Command line."""
    text = README.read_text()
    README.write_text(text.replace(section(text), render()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
