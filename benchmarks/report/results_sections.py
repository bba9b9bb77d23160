"""The sections of RESULTS.md: each benchmark's tables, from its JSON file under results/.

Above each table stands one paragraph: the question that it answers, and the answer. All figures in it
come from the same JSON file as the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from benchmarks.report import report
from benchmarks.report.old_defaults import note, of_cells
from benchmarks.report.results_forecasts import (
    auto_against_all,
    auto_grid,
    automatic,
    prediction,
    whole_runs,
)
from benchmarks.report.results_kernels import gpu_kernels, kernels, wire
from benchmarks.report.results_long_runs import long_runs
from benchmarks.report.results_markdown import (
    command,
    load,
    missed,
    of_rows,
    section,
    source,
    span,
    table,
)
from benchmarks.report.results_planners import (
    bucket_times,
    calibrated,
    calibration,
    gravac_search,
    kimad_tables,
    multi_level,
    static_factors,
    three_bits,
)

# --- accuracy and planners ----------------------------------------------------------------------------


def accuracy() -> str:
    """Every compressor's training run against dense training."""
    from benchmarks.accuracy.accuracy import SETTINGS, TARGET, rows_of

    figures = load("accuracy")
    found = rows_of(figures["runs"])
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
        for row in found
    ]
    heading = [
        "",
        "compression",
        "feedback, where it is not the compressor's own",
        "accuracy",
        "range over seeds (pp)",
        "accuracy difference (pp)",
        "compression ratio",
    ]
    (run, *_) = figures["runs"].values()
    setting, seeds = run["setting"], found[0]["seeds"]
    usual = SETTINGS["topk"].dense_steps
    longer = {name: row.dense_steps for name, row in SETTINGS.items() if row.dense_steps > usual}
    others = "".join(f" ({name}: {steps})" for name, steps in longer.items())
    compressed = [row for row in found if row["name"] != "none"]
    worst = min(compressed, key=lambda row: row["difference"])
    return section(
        "Accuracy of every compressor",
        f"The small ResNet on Fashion-MNIST, {setting['epochs']:g} epoch on "
        f"{setting['ranks']} ranks, mean of {seeds} seeds, the same data in the same order; the first "
        f"{usual} steps{others} dense where something is compressed. Payloads include "
        "all that is sent dense (biases, norms, small layers, and those first steps). "
        f"{source('accuracy', figures)}",
        (
            "One epoch with each compressor",
            "How much accuracy does each compressor cost at settings that suit it?",
            f"All {len(compressed)} end within {100 * TARGET:g} pp of dense training, the furthest is "
            f"`{worst['setting'].compression}` with {100 * worst['difference']:+.2f} pp. Over its "
            "seeds "
            f"dense training itself ranges over {100 * found[0]['spread']:.2f} pp.",
            table(heading, rows),
        ),
    )


def planner() -> str:
    """The knapsacks' time and distance from the optimum."""
    figures = load("planner")
    found = figures["knapsacks"]
    rows = [
        [
            name,
            *(f"{1e3 * row[f'{which} s']:.0f} ms" for which in ("min_cost", "min_error")),
            *(f"{100 * row[f'{which} gap']:.4f} %" for which in ("min_cost", "min_error")),
        ]
        for name, row in found.items()
    ]
    heading = [
        "layers and levels",
        "least bytes: time",
        "least error: time",
        "bytes above the optimum, at most",
        "error above the optimum, at most",
    ]
    times = [row[f"{which} s"] for row in found.values() for which in ("min_cost", "min_error")]
    gaps = [row[f"{which} gap"] for row in found.values() for which in ("min_cost", "min_error")]
    return section(
        "Time and quality of a plan",
        f"One core, against the bound that a mixed-integer solver proves. {source('planner', figures)}",
        (
            "Knapsacks",
            "How long does a plan take, and how far is it from the optimum?",
            f"{span((1e3 * each for each in times), '.0f')} ms, and at most {100 * max(gaps):.4f} %.",
            table(heading, rows),
        ),
    )


def allocation() -> str:
    """L-GreCo's bytes on real gradients, compared with the optimum and the paper's."""
    from benchmarks.accuracy.allocation import SETTINGS

    figures = load("allocation")
    papers = {setting.compression: setting.paper for setting in SETTINGS}
    found = {
        (model, compression): row
        for model, settings in figures["models"].items()
        for compression, row in settings.items()
    }
    rows = [
        [
            model,
            f"`{compression}`",
            *(f"{row[key]:.2f}" for key in ("fewer", "at best", "really fewer", "accumulated")),
            f"{row['error']:.3f}",
            papers[compression],
        ]
        for (model, compression), row in found.items()
    ]
    heading = [
        "model",
        "default of all layers",
        "times fewer bytes, planned",
        "exact optimum",
        "measured payload",
        "by accumulated gradients",
        "error, relative to the default's",
        "L-GreCo's tables",
    ]
    by_model = {
        model: span((row["fewer"] for (name, _), row in found.items() if name == model), ".2f")
        for model in figures["models"]
    }
    return section(
        "L-GreCo's plans",
        f"Gradients of three moments of a training run. {source('allocation', figures)}",
        (
            "Bytes at no more error",
            "How many times fewer bytes does L-GreCo send than one level for all layers, at no more "
            "error?",
            "; ".join(f"{model}: {values}" for model, values in by_model.items())
            + ". Where a model has few layers, or one that holds most of its bytes, there is little to "
            "shift; "
            "the plans are at the optimum all the same.",
            table(heading, rows),
        ),
    )


def sensitivity() -> str:
    """Correlations of each metric of L-GreCo with what compression does to the loss."""
    from benchmarks.accuracy.sensitivity import layer_rows, level_rows, mean_of
    from hvd_adaptive.planning.metrics import METRICS

    figures = load("sensitivity")
    models = figures["models"]
    overall = {
        metric: [mean_of(found["correlations"][metric]["at levels"]) for found in models.values()]
        for metric in METRICS
    }
    always = [f"`{m}`" for m, found in overall.items() if all((each or 0.0) > 0 for each in found)]
    stops = ", ".join(map(str, figures["after steps"]))
    return section(
        "Sensitivity of the loss",
        f"{figures['repeats']} short runs of {figures['steps']} steps from checkpoints after {stops} "
        "steps, in which one layer's gradients alone are compressed with `topk`, at some densities; "
        "Pearson's correlation of the rise of the loss with each metric of planner `lgreco`, mean of "
        "the checkpoints. SGD has no second moments: there those count that Adam would have. "
        f"{source('sensitivity', figures)}",
        (
            "Over the layers",
            "Does a metric rank the layers as the loss does, at equal density?",
            "Mean correlation: "
            + "; ".join(
                f"`{metric}` {span((each for each in found if each is not None), '+.2f')}"
                for metric, found in overall.items()
            )
            + f", over {len(models)} models (L-GreCo's section 5.4 finds a high one for its metric). "
            f"Above 0 in all of them: {', '.join(always) or 'none'}.",
            of_rows([[*row] for row in level_rows(models, figures["levels"])], ("model",)),
        ),
        (
            "Layer by layer",
            "Does a layer's metric rise with the loss as its density falls?",
            "Within a layer `relative` is `squared` in another unit. The loss is that of a density of "
            f"{figures['levels'][-1]:g}, less that without compression.",
            of_rows([[*row] for row in layer_rows(models)], ("model",)),
        ),
    )


def aggregate_error() -> str:
    """What shared random numbers and rotation take off the error of the mean."""
    figures = load("aggregate_error")
    heading = ["vNMSE", "error, relative to the mean", "correlated", "rotated", "both"]
    shots, lines = [], []
    for model, found in figures["models"].items():
        for ranks, parts in found["ranks"].items():
            place = [model, ranks]
            lines += _by_variant(place, parts["one shot"], ("family", "bits"))
            shots += _by_variant(place, parts["two shots"], ("first", "second"))
    both = [float(line[-1]) for line in lines if line[2] == "qsgdinf"]
    return section(
        "Error of the mean",
        f"Gradients of {figures['training steps']} steps into a training run, one minibatch per rank. "
        "vNMSE is the squared error of the decoded mean over the mean squared norm of the ranks' "
        f"gradients. {source('aggregate_error', figures)}",
        (
            "Correlated rounding and rotation",
            "How many times less error has the mean with `correlated=true`, with `rotate=hadamard`, "
            "and with both, at equal bytes?",
            f"`qsgdinf` with both has {span(both)} times less. Where levels are fractions of the L2 "
            "norm (`qsgd`), rotation costs.",
            table(["model", "ranks", "compressor", "bits", *heading], lines),
        ),
        (
            "Two shots",
            "What is left of that if the owners of slices quantize the mean again, with `qsgdinf`?",
            "The second shot has no other ranks to cancel its errors: with as many bits as the first "
            "it dominates.",
            table(["model", "ranks", "first bits", "second bits", *heading], shots),
        ),
        end=missed(figures),
    )


def _by_variant(
    place: list[str], rows: list[dict[str, Any]], names: tuple[str, str]
) -> list[list[str]]:
    """A line for each row without options: its errors, and how many times less others have."""
    lines = []
    for base in (row for row in rows if row["variant"] == "plain"):
        labels = [str(base[name]) for name in names]
        same = [row for row in rows if [str(row[name]) for name in names] == labels]
        ratios = [f"{base['vnmse'] / row['vnmse']:.2f}" for row in same if row is not base]
        lines.append([*place, *labels, f"{base['vnmse']:.2g}", f"{base['relative']:.2g}", *ratios])
    return lines


def bucket_costs() -> str:
    """How well bytes explain time."""
    figures = load("bucket_costs")
    found = [row for row in figures["buckets"] if "seconds a MB" in row]
    rows = [[str(number), f"{1e3 * row['seconds a MB']:.0f} ms"] for number, row in enumerate(found)]
    return section(
        "Costs of buckets",
        f"{figures['hosts']} hosts at {figures['rate']}, {len(figures['plans'])} random plans. "
        f"{source('bucket_costs', figures)}",
        (
            "Time per megabyte",
            "Do the bytes of each bucket explain the time of communication?",
            f"R² is {figures['r2']:.2f} over {len(figures['plans'])} random plans, at "
            f"{span((1e3 * row['seconds a MB'] for row in found), '.0f')} ms per MB.",
            table(["bucket", "per MB"], rows),
        ),
    )


def planning_cost() -> str:
    """What planning costs per step."""
    from benchmarks.micro.planning_cost import CASES

    figures = load("planning_cost")
    cases = figures["cases"]
    rows = [
        [
            name,
            f"{row['step ms']:.0f} ms",
            *(
                f"{100 * row[key]:+.2f} %"
                for key in ("measuring", "changing", "planning", "other steps", "two without")
            ),
            f"{100 * row['counted']:.2f} %" if "counted" in row else "-",
        ]
        for name, row in cases.items()
    ]
    heading = [
        "`lgreco:period=200`, or `auto`, against none",
        "step",
        "measuring",
        "changes of plan",
        "both",
        "other steps",
        "two runs without",
        "by its own clock",
    ]
    return section(
        "Overhead of planning",
        f"With and without a planner, in turn within one run. {source('planning_cost', figures)}",
        (
            "What a planner adds",
            "How much longer does a training run take with a planner?",
            f"{span((100 * row['planning'] for row in cases.values()), '.2f')} % for measuring and for "
            "changes "
            "of plan; other steps differ by the plan's levels and by noise, which two runs without a "
            "planner "
            "show.",
            table(heading, rows),
        ),
        end=note(
            (name, CASES[name].with_planner.get("planner", ""), row) for name, row in cases.items()
        ),
    )


def bandwidth() -> str:
    """Kimad under a changing rate."""
    from benchmarks.network.bandwidth_trace import kept, monitor_rows, rows_of, seconds_ratio

    figures = load("bandwidth_trace")
    points, settings = figures["cells"], figures["settings"]
    monitor = monitor_rows(points)
    worst = max(
        (str(row[-1]) for row in monitor[1:] if row[-1] != "-"), key=lambda each: abs(float(each[:-1]))
    )
    return section(
        "Kimad on a network whose rate varies",
        f"{settings['hosts']} hosts, {settings['seconds']:g} s per step, rates `{settings['trace']}`; "
        "`ef21` at "
        f"a fixed density sends as many bytes. {source('bandwidth_trace', figures)}",
        (
            "Steps within their time",
            "Does Kimad keep the step time that it is given?",
            f"In {kept(points['kimad']):.1%} of the steps (EF21 at a fixed density: "
            f"{kept(points['ef21']):.1%}); "
            f"its mean step is {seconds_ratio(points):.2f} of EF21's (Kimad's paper: "
            f"{figures['paper']['seconds']:.2f}).",
            of_rows(
                rows_of(points),
                (
                    "",
                    f"steps within {settings['seconds']:g} s",
                    "mean step",
                    "median step",
                    "MB per step",
                ),
            ),
        ),
        (
            "Estimates of the bandwidth",
            "How good is the estimate of the bandwidth, and how soon does it follow a change?",
            f"At worst {worst} off the rate that TCP gets on the slowest link, from the start and "
            "after changes "
            "of the rate (`uneven`: three links have 200 Mbit/s).",
            of_rows(monitor),
        ),
    )


def adaptive() -> str:
    """GraVAC and L-GreCo in real training."""
    figures = load("adaptive")
    summary, settings = figures["summary"], figures["settings"]
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
        for name, row in summary.items()
    ]
    heading = [
        "",
        "accuracy",
        "accuracy difference (pp)",
        "samples per second at the end",
        "seconds in all",
        "payload, kB per step",
    ]
    planned = {name: row for name, row in summary.items() if name in ("gravac", "accordion", "lgreco")}
    times = ", ".join(
        f"`{name}` {row['seconds']:.0f} s at {100 * row['difference']:+.2f} pp"
        for name, row in planned.items()
    )
    return section(
        "Planners that search during training",
        f"`{settings['model']}`, {settings['hosts']} hosts at {settings['rate']}, {settings['steps']} "
        "steps. "
        f"{source('adaptive', figures)}",
        (
            "Time and accuracy of a short run",
            "What do planners gain over a fixed density and over dense gradients?",
            f"Dense gradients take {summary['dense']['seconds']:.0f} s, {times}. Compared with the "
            "papers: "
            f"{'; '.join(figures['compared'])}.",
            table(heading, rows),
        ),
        end=note(of_cells(figures["cells"], 0)),
    )


# --- whole training runs ------------------------------------------------------------------------------


def training() -> str:
    """Step time and time to accuracy on shaped networks."""
    from benchmarks.network.training import METHODS
    from benchmarks.network.training_tables import TOPK, places_rows
    from benchmarks.network.training_tables import missed as targets_missed

    figures = load("training")
    points = figures["cells"]
    dense = {name: f"{100 * METHODS[name].warmup:g} %" for name in (TOPK, "powersgd", "qsgd")}
    return section(
        "Training on slow networks",
        f"{figures['hosts']} hosts with shaped links. `compute-only`: nothing is communicated or "
        "compressed. "
        "Stock Horovod uses ring allreduce and is started by `hva.init()`, its best settings here; of "
        "quick steps the fastest of two launches or more counts. Compressed training runs start with "
        "dense steps: "
        f"{dense[TOPK]} of them (`powersgd`: {dense['powersgd']}, `qsgd`: {dense['qsgd']}). The target "
        "is what stock fp32 ends with, less 0.5 pp of accuracy, "
        "or plus 1 % of perplexity. Seconds to target: steps to the target, times the median "
        "step at that rate; dense steps at the start cost what those of `none` do. A "
        "planner's steps are counted as the settled ones are, but `gravac` varies, at times "
        "to dense gradients: its step is that of the run's mean payload, between those of `topk` "
        "and of `none`. Seconds of Kimad and `auto` are their own clock's. `-`: not known. The machine "
        "has slow phases of "
        "seconds to hours, up to 1.5 times, and some grid points had more launches than others: small "
        "differences are within that. "
        f"Made by {command('training', figures)}.",
        (
            "Machines",
            "Which figures are of which machine?",
            "Steps of two machines are never compared with each other.",
            of_rows(places_rows(points)),
        ),
        *_training_tables(points),
        end=f"{note(of_cells(points, 2))}\n\n"
        "![Parts of a step](results/training_steps.png)\n\n"
        "![Score over the seconds of training](results/training_accuracy.png)\n\n"
        "![Score over bytes and over time, of every method](results/training_choice.png)\n\n"
        + missed({"missed": targets_missed(points)}),
    )


def elsewhere() -> str:
    """Some of the steps on another machine, and what they make of the training runs."""
    from benchmarks.network.training_tables import missed as targets_missed
    from benchmarks.network.training_tables import names

    figures = load("training_elsewhere")
    place = report.place(figures["machine"])
    points = {
        key: each
        for key, each in load("training")["cells"].items()
        # a training run with a rate has a clock of its own, which is that of its machine
        if each["place"] == place or (key.startswith("course/") and key.count("/") == 3)
    }
    points |= figures["cells"]
    models = names(figures["cells"], 1)
    shown = {key: each for key, each in points.items() if key.split("/")[1] in models}
    return section(
        "Training on slow networks: another machine",
        "Some of these steps on another machine, and the same training runs with its steps. Made by "
        f"{command('training', figures)}, with `--out benchmarks/results/training_elsewhere.json` and "
        f"the grid points of these tables as `--only`, {place}.",
        *_training_tables(shown, " (another machine)"),
        end=f"{note(of_cells(shown, 2))}\n\n" + missed({"missed": targets_missed(points)}),
    )


def _training_tables(points: dict[str, Any], where: str = "") -> list[tuple[str, str, str, str]]:
    """Steps at the rate of the targets and at all rates, and training runs, where there are steps."""
    from benchmarks.network.training_tables import (
        TARGET_RATE,
        names,
        rates_rows,
        runs_rows,
        steps_rows,
    )

    models = names(points, 1, "steps")
    found = []
    for model in models:
        rows = steps_rows(points, model, TARGET_RATE)
        question = f"Where does a step of the {model} spend its time at {TARGET_RATE}?"
        found.append(
            (f"Steps: {model}{where}", question, _steps_answer(points, model, TARGET_RATE), rows)
        )
    question = "How does a step depend on the rate of the links?"
    found.append(
        (f"Steps at every rate{where}", question, _rates_answer(points, models), rates_rows(points))
    )
    for model in models:
        question = f"Which methods reach the target with the {model}, and when?"
        rows = runs_rows(points, model)
        found.append((f"Training runs: {model}{where}", question, _runs_answer(points, model), rows))
    if not where:
        found.append(auto_against_all(points))
    return [
        (heading, question, answer, of_rows(rows))
        for heading, question, answer, rows in found
        if len(rows) > 1
    ]


def _steps_answer(points: dict[str, Any], model: str, rate: str) -> str:
    from benchmarks.network.training_tables import COMPUTE_ONLY, FP16, label_of, names, ratio

    times = {name: ratio(points, model, rate, name, COMPUTE_ONLY) for name in names(points, 2, "steps")}
    ours = {name: each for name, each in times.items() if each > 1 and not name.startswith("stock")}
    best = min(ours, key=lambda name: ours[name])
    return (
        f"Stock Horovod's fp16 takes {times[FP16]:.2f} x {label_of(COMPUTE_ONLY)} and spends "
        f"{1 - 1 / times[FP16]:.0%} of "
        "its step on exposed communication; "
        f"the fastest method, `{best}`, takes {ours[best]:.2f} x. Whether it also reaches the target "
        "is in "
        "another table."
    )


def _rates_answer(points: dict[str, Any], models: list[str]) -> str:
    from benchmarks.network.training_tables import FP16, RATES, TOPK, ratio

    faster = {model: [ratio(points, model, rate, FP16, TOPK) for rate in RATES] for model in models}
    shown = "; ".join(
        f"{model} " + ", ".join("-" if math.isnan(each) else f"{each:.2f}" for each in several)
        for model, several in faster.items()
    )
    return f"Stock fp16's step over that of `topk` at {', '.join(RATES)}: {shown}."


def _runs_answer(points: dict[str, Any], model: str) -> str:
    from benchmarks.network.training_tables import (
        FP16,
        SAME,
        TARGET_RATE,
        names,
        outcome,
        seconds_to_target,
    )

    runs = {
        name: outcome(points, model, name) or outcome(points, model, name, TARGET_RATE)
        for name in names(points, 2, "course")
        if not name.startswith("stock")
    }
    reached = {name: each for name, each in runs.items() if each and not math.isnan(each.steps)}
    times = {name: seconds_to_target(points, model, name, TARGET_RATE) for name in (*reached, *SAME)}
    known = {name: each for name, each in times.items() if not math.isnan(each) and name not in SAME}
    if not known:
        return f"Reached by {', '.join(f'`{name}`' for name in reached)}."
    best = min(known, key=lambda name: known[name])
    return (
        f"Reached by {', '.join(f'`{name}`' for name in reached)}, of {len(runs)} methods. The fastest "
        "at "
        f"{TARGET_RATE} is `{best}` with {known[best]:,.0f} s; stock fp16 takes {times[FP16]:,.0f} s."
    )


# --- overhead, scaling, soak --------------------------------------------------------------------------


def overhead() -> str:
    """A step against stock Horovod's without a network."""
    from benchmarks.micro.overhead import call_rows, step_rows

    figures = load("overhead")
    steps, calls = figures["steps"], figures["calls"]
    none, topk = ([row["ratio"][name] for row in steps.values()] for name in ("none", "topk 1 %"))
    return section(
        "Overhead without a network",
        f"{figures['ranks']} ranks on one machine, in turn. {source('overhead', figures)}",
        (
            "Steps",
            "What does this library cost where no network is slow?",
            f"A step without compression takes {span(none, '.2f')} of stock Horovod's, one with `topk` "
            f"{span(topk, '.2f')}.",
            of_rows(step_rows(figures)),
        ),
        (
            "Calls",
            "What do our own calls cost per layer and per bucket, and which part of a step spends it?",
            f"{span(row['layer'] for row in calls.values())} µs per layer and "
            f"{span((row['bucket'] for row in calls.values()), '.0f')} µs per bucket.",
            of_rows(call_rows(figures), ("our own, µs", "per layer", "per bucket")),
        ),
    )


def priority() -> str:
    """Steps with and without a lower priority of Horovod's thread."""
    from benchmarks.network.priority import gain, rows

    figures = load("priority")
    gains = [gain(starts) for methods in figures["cases"].values() for starts in methods.values()]
    return section(
        "Horovod's thread at a lower priority",
        "The LSTM on hosts that share 2 cores, links of 1 Gbit/s; the median launch's step, and those "
        "of the "
        f"fastest and the slowest. {source('priority', figures)}",
        (
            "hva.init() and hvd.init()",
            "What does `hva.init()` gain where there is no core to spare?",
            f"The median step is {span(gains, '.2f')} times faster.",
            of_rows(rows(figures["cases"])),
        ),
    )


def schemes() -> str:
    """Steps by allgather, in two shots and as auto chooses."""
    from benchmarks.harness.turns import step
    from benchmarks.network.schemes import (
        AUTO,
        COMPRESSORS,
        HALF_AT,
        STOCK,
        auto_share,
        rows,
    )

    figures = load("schemes")
    cases = figures["cases"]
    shares = [auto_share(title, case, each) for title, case in cases.items() for each in COMPRESSORS]
    near = sum(each <= AUTO for each in shares)
    quantized = {
        name: step(cases[HALF_AT], f"qsgd:bits=4 {name}") for name in ("allgather", "two_shot")
    }
    stock = step(cases[HALF_AT], STOCK)
    return section(
        "Schemes of encoded payloads",
        "The LSTM on hosts with slow links, one rank on each, all on 2 cores; methods in turn in one "
        "job, the slowest rank's median step, and bytes that the hosts' interfaces counted. "
        f"{source('schemes', figures)}",
        (
            "allgather, two_shot and auto",
            "From how many ranks on are two shots faster, and does `auto` choose the better scheme?",
            f"On {HALF_AT} links a step of 4-bit `qsgd` takes {quantized['two_shot'] / stock:.2f} of "
            f"stock fp16's in two shots, {quantized['allgather'] / stock:.2f} by allgather. `auto` "
            f"takes at most {AUTO} of the faster scheme's step in {near} of {len(shares)} cases, at "
            f"worst {max(shares):.2f}.",
            of_rows(rows(cases)),
        ),
        end=missed(figures),
    )


def many_ranks() -> str:
    """Scores by allgather and in two shots."""
    from benchmarks.accuracy.many_ranks import RANKS, lost, rows

    figures = load("many_ranks")
    shares = {
        unit: [
            100 * share
            for (preset, _), share in lost(figures["cases"]).items()
            if preset.startswith("lstm") == (unit == "%")
        ]
        for unit in ("pp", "%")
    }
    return section(
        "Accuracy in two shots",
        f"Presets trained with the gradients of {RANKS} virtual ranks, from the same seeds by both "
        f"schemes, at equal levels of the first shot. {source('many_ranks', figures)}",
        (
            "allgather and two_shot",
            "Does it cost accuracy that sums are compressed again?",
            f"Two shots lose {span(shares['pp'], '+.2f')} pp of accuracy (ResNet) and raise perplexity "
            f"by {span(shares['%'], '+.2f')} % (LSTM), means over the seeds. The mean over the ranks "
            "makes the first compression's noise smaller, not the second's: sums at a higher level "
            "lose less.",
            of_rows(rows(figures["cases"])),
        ),
        end=missed(figures),
    )


def scaling() -> str:
    """The model of the collectives, and what it predicts for 1,024 ranks."""
    from benchmarks.network.scaling import fastest_schemes

    figures = load("scaling")
    fits = [
        [
            scheme,
            network,
            f"{row['rate']:.0%}",
            f"{row['held out']:.0f}, up to {row['most ranks held out']:.0f} ranks",
            f"{row['mean error']:.1%}",
            f"{row['worst error']:.1%}",
        ]
        for scheme, networks in figures["fits"].items()
        for network, row in networks.items()
    ]
    heading = ["scheme", "links", "of TCP's rate", "held out", "error", "worst"]
    errors = [row["mean error"] for networks in figures["fits"].values() for row in networks.values()]
    stated = figures["stated"]
    return section(
        "Many ranks",
        "Every collective at 1 to 16 ranks on slow links, and a model of their bandwidth, "
        "fitted to at most 4 ranks and tried on points that it has not seen. All ranks share this "
        "machine: what it alone needs for a collective, measured on links without a limit, and the "
        "wire's time make up the square root of their squares' sum. Carried on to 1,024 ranks: "
        "milliseconds of a step on the network + of one core that compresses and decompresses "
        f"({1e3 * stated['fixed']:.1f} ms per collective as measured, "
        f"{1e6 * stated['alpha']:.0f} µs per message as stated, nothing hidden behind computing). "
        f"{source('scaling', figures)}",
        (
            "The model's errors",
            "How well does the model predict points that it was not fitted to?",
            f"Mean errors are {span((100 * each for each in errors), '.0f')} %.",
            table(heading, fits),
        ),
        *(
            (
                f"1,024 ranks, {model} parameters",
                "From how many ranks on does a gathered payload lose to fp16, compression included?",
                f"{loses(rates)}.",
                _far(model, rates),
            )
            for model, rates in figures["many ranks"].items()
        ),
        end=fastest_schemes(figures["many ranks"]) + "\n\n" + missed(figures),
    )


def loses(rates: dict[str, Any]) -> str:
    """From how many ranks gathered payloads lose to fp16, over the rates."""
    names = next(iter(rates.values()))["loses from"]
    found = {name: [each["loses from"][name]["in all"] for each in rates.values()] for name in names}
    return "; ".join(
        f"{name.removesuffix(', allgather')} from {span(several, ',.0f')}"
        for name, several in found.items()
        if name.endswith(", allgather")
    )


def _far(model: str, rates: dict[str, Any]) -> str:
    def row(name: str, point: Callable[[dict[str, Any]], str]) -> list[str]:
        return [name, *(point(each) for each in rates.values())]

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
    """A long run's memory, agreement and remains."""
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
    heading = ["rank", "memory", "growth per hour, ± standard error", "open files", "threads"]
    return section(
        "Soak",
        f"{figures['seconds'] / 60:.0f} minutes, {figures['steps']:,} steps of "
        f"`{settings['preset']}` on {settings['ranks']} ranks, links between {settings['low']} and "
        f"{settings['high']}, planner `{settings['planner']}`, {figures['switches']} switches. "
        f"{source('soak', figures)}",
        (
            "Memory",
            "Does anything grow, and do the ranks stay equal?",
            f"Memory grows by {span((row['MB an hour'] for row in figures['ranks']), '+.1f')} MB per "
            "hour; "
            f"parameters were equal bit for bit on all ranks in {equal} of {figures['comparisons']} "
            "comparisons.",
            table(heading, rows),
        ),
        end=missed(figures),
    )


PARTS: dict[str, Callable[[], str]] = {
    "training": training,
    "training_elsewhere": elsewhere,
    "accuracy": accuracy,
    "scaling": scaling,
    "schemes": schemes,
    "automatic": automatic,
    "whole_runs": whole_runs,
    "auto_grid": auto_grid,
    "prediction": prediction,
    "many_ranks": many_ranks,
    "long_runs": long_runs,
    "calibration": calibration,
    "calibrated": calibrated,
    "three_bits": three_bits,
    "static_factors": static_factors,
    "overhead": overhead,
    "priority": priority,
    "kernels": kernels,
    "gpu_kernels": gpu_kernels,
    "multi_level": multi_level,
    "wire": wire,
    "planner": planner,
    "allocation": allocation,
    "sensitivity": sensitivity,
    "aggregate_error": aggregate_error,
    "gravac_search": gravac_search,
    "bucket_costs": bucket_costs,
    "bucket_times": bucket_times,
    "planning_cost": planning_cost,
    "bandwidth_trace": bandwidth,
    "kimad_tables": kimad_tables,
    "adaptive": adaptive,
    "soak": soak,
}
"""By the file that each needs."""
