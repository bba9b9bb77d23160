"""Figures in README.md and docs/: tables and sentences made from the JSON files under results/."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.network import training_tables as tables
from benchmarks.network.training_tables import COMPUTE_ONLY, FP16, TARGET_RATE, TOPK
from benchmarks.report import auto_fragments
from benchmarks.report.old_defaults import note, of_cells
from benchmarks.report.plots import best
from benchmarks.report.results_markdown import load, span, table
from benchmarks.report.results_sections import loses

MODELS = {"lstm": "LSTM", "mlp": "MLP", "resnet": "ResNet", "transformer": "transformer"}
SPECS = {
    "qsgd": "qsgd:bits=4",
    "powersgd": "powersgd:rank=4",
    TOPK: "topk:density=0.01,values=int8",
    "topk-sign": "topk:density=0.01,values=sign",
}


def _points() -> dict[str, Any]:
    points: dict[str, Any] = load("training")["cells"]
    return points


def _step(points: dict[str, Any], model: str, method: str) -> str:
    step = tables.step_of(points, model, method, TARGET_RATE)
    return "-" if step is None else f"{1e3 * step['median']:,.0f} ms"


def difference(points: dict[str, Any], model: str, method: str) -> str:
    """A method's score, compared with dense training: "-0.38 pp", "perplexity -4.4 %"."""
    found = tables.outcome(points, model, method) or tables.outcome(points, model, method, TARGET_RATE)
    if found is None:
        return "-"
    run = next(iter(tables.runs_of(points, model, tables.DENSE).values()))
    percent = 100 * found.loss
    return f"{-percent:+.2f} pp" if tables.metric(run) == "accuracy" else f"perplexity {percent:+.1f} %"


def _step_and_score(points: dict[str, Any], model: str, method: str) -> str:
    return f"{_step(points, model, method)}, {difference(points, model, method)}"


def pays() -> str:
    """Does it pay: one row per model at the rate of the targets."""
    points = _points()
    known = all(tables.step_of(points, model, tables.AUTO, TARGET_RATE) for model in MODELS)
    shown = ("qsgd", tables.AUTO) if known else ("qsgd",)
    rows = []
    for model, title in MODELS.items():
        winner = best(points, model)
        sent = tables.step_of(points, model, "none", TARGET_RATE)
        assert sent is not None
        rows.append(
            [
                f"{title}, {sent['dense_bytes'] / 1e6:.1f} MB",
                *(_step(points, model, method) for method in (COMPUTE_ONLY, FP16)),
                *(_step_and_score(points, model, method) for method in shown),
                f"`{SPECS.get(winner, winner)}`: {_step_and_score(points, model, winner)}",
            ]
        )
    heading = [
        "model, gradients",
        "compute-only",
        "stock fp16",
        *(f"`{SPECS.get(method, method)}`: step, score" for method in shown),
        "first to reach the target score",
    ]
    return table(heading, rows)


def _measured(points: dict[str, Any], method: str) -> str:
    models = [each for each in MODELS if tables.runs_of(points, each, method)]
    return ", ".join(f"{MODELS[each]} {difference(points, each, method)}" for each in models)


def _epoch(name: str) -> str:
    from benchmarks.accuracy.accuracy import rows_of

    row = next(row for row in rows_of(load("accuracy")["runs"]) if row["name"] == name)
    return f"ResNet, one epoch on 2 ranks {100 * row['difference']:+.2f} pp"


def compressors() -> str:
    """Which compressor when: six rows."""
    points = _points()
    few = _least("1 Gbit/s", "quantizer 4 bit") - 1
    rows = [
        ["`fp16`", "fast links, many ranks, or as the thing to beat", _epoch("fp16")],
        [
            f"`{SPECS['qsgd']}`",
            f"up to {few} ranks, any model, short runs too: the first to try",
            _measured(points, "qsgd"),
        ],
        ["`alq:bits=3`", "as `qsgd`, with fewer bytes and more computing", _epoch("alq")],
        [
            f"`{SPECS['powersgd']}`",
            "many ranks (payloads are summed), layers that are matrices",
            _measured(points, "powersgd"),
        ],
        [f"`{SPECS[TOPK]}`", "slow links, large layers, long runs", _measured(points, TOPK)],
        [
            "`randomk:density=0.5,unbiased=true`",
            "many ranks, nothing kept between steps",
            _epoch("randomk"),
        ],
    ]
    return table(["`compression=`", "use when", "score, compared with dense training"], rows)


def _far(rate: str, *names: str) -> str:
    each = load("scaling")["many ranks"]["25 M"][rate]["ms"]
    return " against ".join(
        f"{each[name]['network ms'] + each[name]['one core ms']:,.0f} ms" for name in names
    )


def _least(rate: str, name: str) -> int:
    return int(
        load("scaling")["many ranks"]["25 M"][rate]["loses from"][f"{name}, allgather"]["in all"]
    )


def decisions() -> str:
    """Network x ranks x model: what to write."""
    points = _points()
    slow, fast = "1 Gbit/s", "10 Gbit/s"
    codes, sparse = _least(slow, "quantizer 4 bit"), _least(slow, "top-k 1 %")
    times = [tables.ratio(points, each, TARGET_RATE, FP16, "qsgd") for each in MODELS]
    faster = [tables.ratio(points, each, TARGET_RATE, FP16, TOPK) for each in MODELS]
    ranks = ("PowerSGD rank 4, allreduce", "fp16, allreduce")
    rows = [
        [
            "little communication is exposed",
            "any",
            "any",
            "`none`",
            "nothing to gain",
        ],
        [
            f"at most {slow}",
            f"2 to {codes - 1}",
            "any",
            f"`{SPECS['qsgd']}`",
            f"{span(times, '.1f')} x faster steps than fp16 at {TARGET_RATE}, 4 ranks",
        ],
        [
            f"at most {slow}",
            f"2 to {sparse - 1}",
            "large layers, thousands of steps",
            f"`{SPECS[TOPK]}`",
            f"{span(faster, '.1f')} x there; use `dense_steps`, check the score",
        ],
        [
            f"at most {slow}",
            f"{codes} or more",
            "any",
            f'`{SPECS["qsgd"]}`, `scheme="auto"`',
            _two_shots(),
        ],
        [
            f"at most {slow}",
            f"{codes} or more",
            "matrices",
            f"`{SPECS['powersgd']}`",
            f"1,024 ranks, 25 M parameters: {_far(slow, *ranks)} with fp16; check the score",
        ],
        [
            f"{fast} or more",
            f"{codes} or more",
            "any",
            f'`{SPECS["qsgd"]}`, `scheme="auto"`',
            f"the same, predicted: {_far(fast, 'quantizer 4 bit, two-shot', ranks[1])} with `fp16`",
        ],
    ]
    return table(["links", "ranks", "model", "write", "because"], rows)


def _two_shots() -> str:
    """What two shots gain where an allgather loses."""
    from benchmarks.harness.turns import step
    from benchmarks.network.schemes import HALF_AT, STOCK

    methods = load("schemes")["cases"][HALF_AT]
    stock = step(methods, STOCK)
    gain, loss = (stock / step(methods, f"qsgd:bits=4 {name}") for name in ("auto", "allgather"))
    return f"{gain:.1f} x faster LSTM steps than fp16 on {HALF_AT} links; {loss:.1f} x by allgather"


def ranks() -> str:
    """From how many ranks on gathered payloads lose."""
    found = {loses(rates) for rates in load("scaling")["many ranks"].values()}
    assert len(found) == 1, found
    return (
        "Gathered payloads grow with the number of ranks, summed ones (`none`, `fp16`, `powersgd`, "
        "`randomk`) do not. "
        f"Ranks from which they are slower than fp16, at 1 to 100 Gbit/s: {found.pop()} "
        "([predicted](PAGE#many-ranks))."
    )


def ranks_in_readme() -> str:
    """The same, with README's link."""
    return ranks().replace("PAGE", "benchmarks/RESULTS.md")


def ranks_in_docs() -> str:
    """The same, with the link of a page in docs/."""
    return ranks().replace("PAGE", "../benchmarks/RESULTS.md")


def overhead() -> str:
    """What compression costs without a network."""
    steps = load("overhead")["steps"]
    return (
        "Without a network at all, on 2 ranks of one machine, a step without compression took "
        f"{span((row['ratio']['none'] for row in steps.values()), '.2f')} of stock Horovod's, one of "
        "top-k 1 % "
        f"{span((row['ratio']['topk 1 %'] for row in steps.values()), '.2f')}."
    )


def fast_links() -> str:
    """Where there was nothing to gain."""
    points = _points()
    rows = [
        [
            MODELS[model],
            *(
                f"{tables.ratio(points, model, rate, method, FP16):.2f}"
                for method in ("qsgd", TOPK, "powersgd")
            ),
            rate,
        ]
        for model in MODELS
        for rate in ("1gbit", "unshaped")
    ]
    return table(
        ["model", "`qsgd`: step, x stock fp16", "`topk`", "`powersgd`", "links"],
        rows,
    )


def lost() -> str:
    """The score of every method on every model."""
    points = _points()
    rows = [
        [f"`{method}`", *(difference(points, model, method) for model in MODELS)]
        for method in tables.names(points, 2, "course")
        if not method.startswith("stock")
    ]
    courses = {key: each for key, each in points.items() if key.startswith("course/")}
    return f"{table(['', *MODELS.values()], rows)}\n\n{note(of_cells(courses, 2))}".rstrip()


def aggregate() -> str:
    """How many times less error the mean of gradients has, by option."""
    titles = {"correlated": "`correlated=true`", "rotated": "`rotate=hadamard`", "both": "both"}
    rows = []
    for family in ("qsgd", "qsgdinf"):
        for bits in (2, 4):
            ratios: dict[str, list[float]] = {variant: [] for variant in titles}
            for model in load("aggregate_error")["models"].values():
                for parts in model["ranks"].values():
                    errors = {
                        row["variant"]: row["vnmse"]
                        for row in parts["one shot"]
                        if (row["family"], row["bits"]) == (family, bits)
                    }
                    for variant, found in ratios.items():
                        found.append(errors["plain"] / errors[variant])
            rows.append([f"`{family}:bits={bits}`", *(span(found) for found in ratios.values())])
    return table(["times less error in the mean", *titles.values()], rows)


FRAGMENTS: dict[str, Callable[[], str]] = {
    "pays": pays,
    "compressors": compressors,
    "decisions": decisions,
    "ranks": ranks_in_readme,
    "ranks_in_docs": ranks_in_docs,
    "overhead": overhead,
    "fast_links": fast_links,
    "lost": lost,
    "aggregate": aggregate,
    "auto": auto_fragments.in_readme,
    "auto_accuracy": auto_fragments.accuracy,
    "auto_steps": auto_fragments.steps,
    "auto_whole": auto_fragments.whole,
}
"""By the name between a page's markers."""
