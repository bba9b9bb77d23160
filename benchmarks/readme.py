"""The figures in README.md, from the JSON files under results/.

python benchmarks/readme.py            # rewrites README's section of results
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- results: begin (made by benchmarks/readme.py) -->", "<!-- results: end -->"


def load(name: str) -> dict[str, Any]:
    """One benchmark's figures."""
    figures: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return figures


def source(name: str, figures: dict[str, Any]) -> str:
    """Which command made them, where and when."""
    return f"{_command(name, figures)}, {report.place(figures['machine'])}."


def _command(name: str, figures: dict[str, Any]) -> str:
    return f"`python benchmarks/{name}.py`, {figures['machine']['date']}"


def table(heading: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def kernels() -> str:
    """Every compressor's pass, error tables and multi-level compression, in copies of the tensor."""
    figures = load("kernels")
    parts = [
        f"Kernels on one layer of {figures['numel']:,} float32, one thread; a copy is `memcpy` of the "
        f"layer in the same run. {source('kernels', figures)}",
        _value_formats(figures),
        f"A layer of 4,096 elements takes {figures['small_layers_us']['compress']:.1f} µs in a bucket "
        f"of 300 (`torch.topk` and what belongs to it: {figures['small_layers_us']['torch']:.0f} µs).",
        _rules(figures["rules"]),
        _quantizers(figures["quantizers"]),
        _multi_level(figures["multi_level"]),
        _missed(figures),
    ]
    return "\n\n".join(parts)


def _value_formats(figures: dict[str, Any]) -> str:
    heading = [
        "top-k at density",
        "values",
        "add, select, encode, keep the rest: copies",
        "times faster than residual + `torch.topk` + scatter",
        "bits a value sent",
        "entropy of position + value width",
        "decoding, ns a value",
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
        for density, formats in figures["large"].items()
        for values, row in formats.items()
        if values not in ("memcpy", "torch")
    ]
    return table(heading, rows)


def _columns(
    title: str, figures: dict[str, dict[str, float]], columns: dict[str, tuple[str, str]]
) -> str:
    """A row a contestant; ``columns`` give each heading its figure and format."""
    rows = [
        [name, *(format(row[key], form) for key, form in columns.values())]
        for name, row in figures.items()
    ]
    return table([title, *columns], rows)


def _rules(figures: dict[str, dict[str, float]]) -> str:
    columns = {
        "add, select, encode, keep the rest: copies": ("copies", ".1f"),
        "errors of 100 levels, in such passes": ("table_passes", ".2f"),
        "times faster than compressing at each level": ("table_speedup", ".0f"),
    }
    return _columns("1 %", figures, columns)


def _quantizers(figures: dict[str, dict[str, float]]) -> str:
    columns = {
        "add, round, pack, keep the rest: copies": ("compress", ".1f"),
        "unpack and add: copies": ("decompress", ".1f"),
        "bits a value": ("bits", ".2f"),
    }
    return _columns("quantizer", {f"`{name}`": row for name, row in figures.items()}, columns)


def _multi_level(figures: dict[str, dict[str, float]]) -> str:
    columns = {
        "from the payload: times faster than twice from the tensor": ("speedup", ".2f"),
        "the second alone": ("speedup of the second", ".2f"),
        "both errors from one summary: times faster": ("speedup of gains", ".2f"),
    }
    return (
        f"{_columns('factor 10, then 1,000', figures, columns)}\n\n"
        "GraVAC's paper gives 1.1 to 1.83 for multi-level compression. Both errors of random-k are "
        "known from the tensor's energy."
    )


def _missed(figures: dict[str, Any]) -> str:
    """What the benchmark itself calls missed."""
    found = figures["missed"]
    return "Bars missed in this run: " + ("; ".join(found) if found else "none") + "."


def wire() -> str:
    """Positions, variance of learnt levels, Huffman codes."""
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
    bits = figures["bits"]
    return "\n\n".join(
        [
            f"Wire: {source('wire', figures)}",
            table(["top-k at density", "bits a position", "entropy", "ratio"], positions),
            f"Variance that rounding adds, over the gradient's energy: {bits} bits, blocks of "
            f"{figures['block']}, real gradients, levels learnt on an earlier gradient. `alq` is "
            '"ALQ, max" with Huffman coding and "ALQ without 0, max" with `coding=fixed`; `amq` is '
            '"AMQ, max"; the others are options or for comparison.',
            table(["levels", *models], variance),
            table(["with Huffman codes", "bits a value", "fixed width", "entropy", "variance"], coded),
            _missed(figures),
        ]
    )


def overhead() -> str:
    """A step against stock Horovod's where compression cannot help."""
    from overhead import call_rows, step_rows

    figures = load("overhead")
    return (
        f"The step where compression cannot help: {figures['ranks']} ranks on one machine, without a "
        f"network, in turn. {source('overhead', figures)}\n\n{_of_rows(step_rows(figures))}\n\n"
        "Our own cost without a network, in µs, and what of it each part of a step of 300 layers takes:"
        f"\n\n{_of_rows(call_rows(figures))}"
    )


def priority() -> str:
    """Steps with Horovod's thread behind computing, and without."""
    from priority import rows

    figures = load("priority")
    return (
        "Where there is no core to spare: the LSTM on hosts that share 2 cores, links of 1 Gbit/s; the "
        "median launch's step, and those of the fastest and the slowest one. "
        f"{source('priority', figures)}\n\n{_of_rows(rows(figures['cases']))}"
    )


def accuracy() -> str:
    """Every compressor's training against dense training."""
    from accuracy import SETTINGS, rows_of

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
    setting, seeds = run["setting"], rows_of(figures["runs"])[0]["seeds"]
    usual = SETTINGS["topk"].warmup_steps
    longer = {name: row.warmup_steps for name, row in SETTINGS.items() if row.warmup_steps > usual}
    others = "".join(f" (of {name}: {steps})" for name, steps in longer.items())
    return (
        f"Accuracy: the small ResNet on Fashion-MNIST, {setting['epochs']:g} epoch on "
        f"{setting['ranks']} ranks, mean of {seeds} seeds, the same data in the same order; the first "
        f"{usual} steps{others} dense where something is compressed. Payloads include "
        f"all that travels dense (biases, norms, small layers, and those first steps). "
        f"{source('accuracy', figures)}\n\n{table(heading, rows)}"
    )


def planner() -> str:
    """The knapsacks' time and distance from the optimum."""
    figures = load("planner")
    rows = [
        [
            name,
            *(f"{1e3 * row[f'{which} s']:.0f} ms" for which in ("min_cost", "min_error")),
            *(f"{100 * row[f'{which} gap']:.4f} %" for which in ("min_cost", "min_error")),
        ]
        for name, row in figures["knapsacks"].items()
    ]
    heading = [
        "layers and levels",
        "least bytes: time",
        "least error: time",
        "bytes above the optimum, at most",
        "error above the optimum, at most",
    ]
    return (
        "Planning on one core, against the bound that a mixed-integer solver proves. "
        f"{source('planner', figures)}\n\n{table(heading, rows)}"
    )


def allocation() -> str:
    """L-GreCo's bytes on real gradients, beside the optimum and the paper's."""
    from allocation import SETTINGS

    figures = load("allocation")
    papers = {setting.compression: setting.paper for setting in SETTINGS}
    rows = [
        [
            model,
            f"`{compression}`",
            *(f"{row[key]:.2f}" for key in ("fewer", "at best", "really fewer", "accumulated")),
            f"{row['error']:.3f}",
            papers[compression],
        ]
        for model, settings in figures["models"].items()
        for compression, row in settings.items()
    ]
    heading = [
        "model",
        "default of all layers",
        "times fewer bytes, planned",
        "exact optimum",
        "really compressed",
        "by accumulated gradients",
        "error, of the default's",
        "L-GreCo's tables",
    ]
    return (
        "L-GreCo against one level for all layers, at no more error, on gradients of three moments "
        "of a training. Where a model has few layers, or one that holds most of its bytes, there is "
        f"little to shift; the plans are at the optimum all the same. {source('allocation', figures)}"
        f"\n\n{table(heading, rows)}"
    )


def bucket_costs() -> str:
    """How well bytes explain time."""
    figures = load("bucket_costs")
    prices = ", ".join(
        f"{row['seconds a MB'] * 1e3:.0f}" for row in figures["buckets"] if "seconds a MB" in row
    )
    return (
        f"Bucket costs on {figures['hosts']} hosts at {figures['rate']}: R² {figures['r2']:.2f} of the "
        f"synchronisation time of {len(figures['plans'])} random plans is explained by their bytes "
        f"({prices} ms a MB of each bucket). {source('bucket_costs', figures)}"
    )


def planning_cost() -> str:
    """What planning costs a step."""
    figures = load("planning_cost")
    rows = [
        [
            name,
            f"{row['step ms']:.0f} ms",
            *(
                f"{100 * row[key]:+.2f} %"
                for key in ("measuring", "changing", "planning", "other steps", "two without")
            ),
        ]
        for name, row in figures["cases"].items()
    ]
    heading = [
        "`lgreco:period=200` against none",
        "step",
        "measuring",
        "changes of plan",
        "both",
        "other steps",
        "two runs without",
    ]
    return (
        "What a planner adds to a training, in turn within one run; other steps differ by the plan's "
        "levels and by noise, which two runs without a planner show. "
        f"{source('planning_cost', figures)}\n\n{table(heading, rows)}"
    )


def bandwidth() -> str:
    """Kimad under a changing rate."""
    from bandwidth_trace import monitor_rows, rows_of, seconds_ratio

    figures = load("bandwidth_trace")
    cells = figures["cells"]
    compared = (
        f" Kimad's mean step is {seconds_ratio(cells):.2f} of EF21's "
        f"(Kimad's paper: {figures['paper']['seconds']:.2f})."
        if {"kimad", "ef21"} <= set(cells)
        else ""
    )
    return (
        f"Kimad with {figures['settings']['seconds']:g} s for a step, {figures['settings']['hosts']} "
        f"hosts, rates `{figures['settings']['trace']}`; `ef21` at a fixed density sends as many bytes."
        f"{compared} {source('bandwidth_trace', figures)}\n\n{_of_rows(rows_of(cells))}\n\n"
        "The estimate of the bandwidth against what TCP gets of the slowest link, from the start and "
        "after changes of rate (`uneven`: three links have 200 Mbit/s):\n\n"
        f"{_of_rows(monitor_rows(cells))}"
    )


def adaptive() -> str:
    """GraVAC and L-GreCo in real training."""
    figures = load("adaptive")
    rows = [
        [
            f"`{name}`",
            f"{100 * row['accuracy']:.2f} %",
            *(
                "" if row[key] is None else format(row[key] * scale, form)
                for key, scale, form in (
                    ("difference", 100, "+.2f"),
                    ("samples_per_second", 1, ".0f"),
                    ("seconds", 1, ".0f"),
                    ("payload", 1e-3, ",.0f"),
                )
            ),
        ]
        for name, row in figures["summary"].items()
    ]
    heading = [
        "",
        "accuracy",
        "less dense, points",
        "samples a second at the end",
        "seconds in all",
        "payload, kB a step",
    ]
    settings = figures["settings"]
    return (
        f"Searching while training: `{settings['model']}`, {settings['hosts']} hosts at "
        f"{settings['rate']}, {settings['steps']} steps. {source('adaptive', figures)}"
        f"\n\n{table(heading, rows)}\n\nBeside the papers' numbers: {'; '.join(figures['compared'])}."
    )


def training() -> str:
    """Step time and time to accuracy on shaped networks."""
    from training_tables import missed, places_rows

    figures = load("training")
    cells = figures["cells"]
    tables = [_of_rows(places_rows(cells)), *_training_tables(cells)]
    return (
        f"Step time on {figures['hosts']} hosts with shaped links; `alone`: no communication at all; "
        "stock Horovod with ring allreduce and started by `hva.init()`, its best settings here; of "
        "quick steps the fastest of two launches or more. Seconds to the target (what stock fp32 ends "
        "with, less half a point, or plus 1 % of perplexity): steps to the target, times the median "
        "step at that rate; where the first steps are dense they cost what those of `none` do. A "
        "planner's steps are counted as the settled ones are, but `gravac` goes up and down, at times "
        "to dense gradients: its step is that of the course's mean payload, between those of `topk` "
        "and of `none`. Kimad's seconds are its own clock's. `-`: not known. "
        f"{_command('training', figures)}, on these machines:\n\n"
        + "\n\n".join(tables)
        + "\n\n![What a step consists of](benchmarks/results/training_steps.png)\n\n"
        + "![What training reaches, and when](benchmarks/results/training_accuracy.png)\n\n"
        + _missed({"missed": missed(cells)})
    )


def elsewhere() -> str:
    """Some of the steps on another machine, and what they make of the courses."""
    from training_tables import missed, names

    figures = load("training_elsewhere")
    place = report.place(figures["machine"])
    cells = {
        key: each
        for key, each in load("training")["cells"].items()
        # a course with a rate is told by its own clock, which is that of its machine
        if each["place"] == place or (key.startswith("course/") and key.count("/") == 3)
    }
    cells |= figures["cells"]
    models = names(figures["cells"], 1)
    shown = {key: each for key, each in cells.items() if key.split("/")[1] in models}
    return (
        "Some of these steps on another machine, and the same courses with its steps. "
        f"{_command('training', figures)}, with `--out benchmarks/results/training_elsewhere.json` and "
        f"the cells of these tables as `--only`, {place}.\n\n"
        + "\n\n".join(_training_tables(shown))
        + "\n\n"
        + _missed({"missed": missed(cells)})
    )


def _training_tables(cells: dict[str, Any]) -> list[str]:
    """Steps at the rate of the bars and at all rates, and courses, of the models with steps."""
    from training_tables import BARS_RATE, courses_rows, names, rates_rows, steps_rows

    models = names(cells, 1, "steps")
    steps = [steps_rows(cells, model, BARS_RATE) for model in models]
    courses = [courses_rows(cells, model) for model in models]
    return [_of_rows(rows) for rows in [*steps, rates_rows(cells), *courses] if len(rows) > 1]


def _of_rows(rows: list[list[object]]) -> str:
    """A table of a heading and rows as benchmarks print them."""
    heading, *lines = [[str(cell) for cell in row] for row in rows]
    return table(heading, lines)


def scaling() -> str:
    """The model of the collectives, and what it says of 1,024 ranks."""
    from scaling import to_build_next

    figures = load("scaling")
    fits = [
        [
            scheme,
            network,
            f"{1e3 * row['fixed']:.1f} ms",
            f"{1e6 * row['alpha']:.0f} µs",
            f"{row['rate']:.0%}",
            f"{row['held out']:.0f}, up to {row['most ranks held out']:.0f} ranks",
            f"{row['mean error']:.1%}",
            f"{row['worst error']:.1%}",
        ]
        for scheme, networks in figures["fits"].items()
        for network, row in networks.items()
    ]
    heading = ["scheme", "links", "fixed", "a message", "of TCP's rate", "held out", "error", "worst"]
    stated = figures["stated"]
    parts = [
        "Scaling: every collective at 1 to 16 ranks on slow links, a model of latency and bandwidth "
        "fitted to at most 4 ranks and tried on points it has not seen. Points where this machine's "
        "cores and not the links are the limit are left out, by a rule that sees no residual. "
        f"{source('scaling', figures)}",
        table(heading, fits),
        "Carried on to 1,024 ranks: milliseconds of a step on the network + of one core that "
        f"compresses and decompresses ({1e3 * stated['fixed']:.1f} ms a collective as measured, "
        f"{1e6 * stated['alpha']:.0f} µs a message as stated, nothing hidden behind computing). "
        "`two-shot` and `hierarchical` do not exist yet; they compress twice.",
        *(_far(model, rates) for model, rates in figures["many ranks"].items()),
        to_build_next(figures["many ranks"]),
        _missed(figures),
    ]
    return "\n\n".join(parts)


def _far(model: str, rates: dict[str, Any]) -> str:
    def row(name: str, cell: Callable[[dict[str, Any]], str]) -> list[str]:
        return [name, *(cell(each) for each in rates.values())]

    def took(name: str) -> Callable[[dict[str, Any]], str]:
        return lambda each: "{network ms:,.0f} + {one core ms:,.0f}".format(**each["ms"][name])

    def lost(name: str) -> Callable[[dict[str, Any]], str]:
        keys = ("in all", "network alone")
        return lambda each: "{} ({})".format(*(_ranks(each["loses from"][name][key]) for key in keys))

    first = next(iter(rates.values()))
    rows = [row(name, took(name)) for name in first["ms"]]
    title = "slower than fp16 from so many ranks (network alone)"
    rows += [row(f"{name}: {title}", lost(name)) for name in first["loses from"]]
    return table([f"{model} parameters", *rates], rows)


def _ranks(number: int | None) -> str:
    return "never" if number is None else f"{number:,}"


def soak() -> str:
    """A long run's memory, agreement and leavings."""
    figures = load("soak")
    settings = figures["settings"]
    rows = [
        [
            str(rank),
            f"{row['mean MB']:.0f} MB",
            f"{row['MB an hour']:+.1f} ± {row['standard error']:.1f} MB",
            *("{} to {}".format(*row[key]) for key in ("open files", "threads")),
        ]
        for rank, row in enumerate(figures["ranks"])
    ]
    equal = figures["comparisons"] - len(figures["differing at"])
    parts = [
        f"Soak: {figures['seconds'] / 60:.0f} minutes, {figures['steps']:,} steps of "
        f"`{settings['preset']}` on {settings['ranks']} ranks, links between {settings['low']} and "
        f"{settings['high']}, planner `{settings['planner']}`, {figures['switches']} switches; "
        f"parameters equal bit for bit on all ranks in {equal} of "
        f"{figures['comparisons']} comparisons. {source('soak', figures)}",
        table(["rank", "memory", "growth an hour, ± standard error", "open files", "threads"], rows),
        _missed(figures),
    ]
    return "\n\n".join(parts)


PARTS: dict[str, Callable[[], str]] = {
    "kernels": kernels,
    "wire": wire,
    "accuracy": accuracy,
    "planner": planner,
    "allocation": allocation,
    "bucket_costs": bucket_costs,
    "planning_cost": planning_cost,
    "bandwidth_trace": bandwidth,
    "adaptive": adaptive,
    "training": training,
    "training_elsewhere": elsewhere,
    "overhead": overhead,
    "priority": priority,
    "scaling": scaling,
    "soak": soak,
}
"""By the file that each needs."""


def render() -> str:
    """The whole section: what has been measured."""
    parts = [part() for name, part in PARTS.items() if (RESULTS / f"{name}.json").exists()]
    return "\n\n".join([BEGIN, *parts, END])


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
