"""The page of a report: one HTML file that loads nothing."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from hvd_adaptive.commands.report import charts
from hvd_adaptive.commands.report.charts import number
from hvd_adaptive.commands.report.figures import PARTS, Decision, Run, decisions, pairs
from hvd_adaptive.commands.report.style import CSS, SCRIPT

_SHOWN_DECISIONS = 30
"""Rows before the others fold away."""
_FIGURES = {
    "max_bytes": "bytes allowed",
    "error": "error",
    "max_error": "error allowed",
    "theta": "factor",
    "planner_ms": "planner ms",
}
"""Of what planners report, what stands in the table of decisions."""


def render(runs: Sequence[Run]) -> str:
    """The page: the runs compared, where there are several, and each of them."""
    title = "hva report: " + ", ".join(run.name for run in runs)
    body = [f"<h1>{html.escape(title)}</h1>"]
    body.append('<p class="soft">Means leave out the first record, in which kernels compile.</p>')
    if len(runs) > 1:
        body += _comparison(runs)
    for run in runs:
        body += _run(run)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + f"\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


# --- several runs -------------------------------------------------------------------------------------


def _comparison(runs: Sequence[Run]) -> list[str]:
    heading = [
        "run",
        "samples/s",
        "ms/step",
        "exposed",
        "payload",
        "ratio",
        "loss",
        "held out",
        "verdict",
    ]
    rows = [
        [
            run.name,
            number(run.mean("throughput/samples_per_sec")),
            number(run.mean("time/step_ms")),
            _percent(run.exposed_share),
            number(run.mean("bytes/payload")),
            number(run.mean("bytes/dense") / (run.mean("bytes/payload") or math.nan)),
            number(run.last("train/loss", "loss/rank_0")),
            _score(run),
            run.verdict,
        ]
        for run in runs
    ]

    def of(tag: str) -> dict[str, list[tuple[float, float]]]:
        return {run.name: run.over_steps(tag) for run in runs}

    by_step = {run.name: run.loss_over(seconds=False) for run in runs}
    by_time = {run.name: run.loss_over(seconds=True) for run in runs}
    return [
        "<h2>Runs compared</h2>",
        _table(heading, rows, words=(8,)),
        "<h3>Settings that differ</h3>",
        _differences(runs),
        "<h3>Loss</h3>",
        _row(
            charts.lines(by_step, "step", "training loss", from_zero=False),
            charts.lines(by_time, "seconds", "training loss", from_zero=False),
        ),
        "<h3>Time and bytes</h3>",
        _row(
            charts.lines(of("time/step_ms"), "step", "ms per step"),
            charts.lines(of("bytes/payload"), "step", "payload bytes per step", logarithmic=True),
        ),
    ]


def _differences(runs: Sequence[Run]) -> str:
    settings = {run.name: run.recorded.configuration for run in runs}
    keys = dict.fromkeys(key for each in settings.values() for key in each)
    rows = [
        [key, *(settings[run.name].get(key, "-") or "-" for run in runs)]
        for key in keys
        if len({each.get(key) for each in settings.values()}) > 1
    ]
    if not rows:
        return "<p>Nothing that is recorded: they have the same settings.</p>"
    return _table(["setting", *(run.name for run in runs)], rows, words=range(1, len(runs) + 1))


# --- one run ------------------------------------------------------------------------------------------


def _run(run: Run) -> list[str]:
    body = [f"<h2>{html.escape(run.name)}</h2>"]
    if run.verdict:
        body.append(f'<p class="verdict">{html.escape(run.verdict)}</p>')
    return [
        *body,
        _cards(run),
        *_time(run),
        *_bytes(run),
        *_plan(run),
        *_forecast(run),
        *_decisions(run),
        *_learning(run),
        *_buckets(run),
        *_settings(run),
    ]


def _cards(run: Run) -> str:
    score, value = run.score
    figures = {
        "steps": f"{run.recorded.last_step:,}",
        "samples per second": number(run.mean("throughput/samples_per_sec")),
        "ms per step": number(run.mean("time/step_ms")),
        "exposed": _percent(run.exposed_share),
        "compression ratio": number(run.mean("bytes/dense") / (run.mean("bytes/payload") or math.nan)),
        "gain": number(run.mean("compression/gain")),
        "last loss": number(run.last("train/loss", "loss/rank_0")),
        f"held-out {score}": _percent(value) if score == "accuracy" else number(value),
    }
    cards = [
        f'<div class="card"><b>{text}</b><span class="soft">{html.escape(label)}</span></div>'
        for label, text in figures.items()
        if text != "-"
    ]
    return f'<div class="cards">{"".join(cards)}</div>'


def _time(run: Run) -> list[str]:
    series = {part: run.over_steps(f"time/{part}_ms") for part in PARTS}
    heading = "<h3>Where the step's time went</h3>"
    if not all(series.values()):
        return [heading, "<p>No step is recorded yet.</p>"]
    throughput = {
        "samples": run.over_steps("throughput/samples_per_sec"),
        "steps": run.over_steps("throughput/steps_per_sec"),
    }
    unit = "samples" if throughput["samples"] else "steps"
    return [
        heading,
        charts.shares(run.parts),
        _row(
            charts.areas(series, "step", "ms per step"),
            charts.lines({f"{unit} per second": throughput[unit]}, "step", f"{unit} per second"),
        ),
    ]


def _bytes(run: Run) -> list[str]:
    names = {"dense": "dense gradients", "payload": "payload", "traffic": "traffic on the link"}
    series = {label: run.over_steps(f"bytes/{name}") for name, label in names.items()}
    if not any(series.values()):
        return []
    chart = charts.lines(series, "step", "bytes per step and rank", logarithmic=True)
    gain = charts.lines(
        {"gain": run.over_steps("compression/gain")},
        "step",
        "energy sent / of the gradient",
    )
    rows = [
        [label, f"{run.mean(f'bytes/{name}'):,.0f}"] for name, label in names.items() if series[label]
    ]
    return [
        "<h3>Bytes</h3>",
        _table(["per step and rank", "bytes, mean"], rows),
        _row(chart, gain),
    ]


def _plan(run: Run) -> list[str]:
    if not run.recorded.plans:
        return []
    plan = run.recorded.plans[-1][1]
    heading = ["layer", "shape", "compressor", "scheme", "level", "bytes", "ratio", "gain", "of error"]
    rows = [
        [
            row["layer"],
            "x".join(map(str, row.get("shape", ()))) or "scalar",
            row.get("compressor", ""),
            row.get("scheme", ""),
            f"{row.get('level', 0):g}",
            f"{row['wire_bytes']:,}",
            number(row["dense_bytes"] / max(1, row["wire_bytes"])),
            _percent(row.get("gain")),
            _percent(row.get("error_share")),
        ]
        for row in plan["layers"]
    ]
    table = _table(heading, rows, words=(1, 2, 3))
    return [
        "<h3>The plan over time</h3>",
        charts.plan_map(run.recorded.plans, run.recorded.last_step),
        f"<details><summary>The last plan, layer by layer</summary>{table}</details>",
    ]


def _forecast(run: Run) -> list[str]:
    measured = run.recorded.under("forecast/measured_")
    figures, rows = [], []
    for name, series in measured.items():
        foreseen = run.recorded.series(f"forecast/predicted_{name}")
        label = {"ms": "ms per step", "sync_ms": "ms from first launch to last result"}.get(name, name)
        known = {point.step: point.value for point in foreseen}
        errors = [
            abs(known[point.step] / point.value - 1)
            for point in series
            if point.step in known and point.value
        ]
        if errors:
            rows.append(
                [label, str(len(errors)), _percent(sum(errors) / len(errors)), _percent(max(errors))]
            )
        both = {"predicted": pairs(foreseen), "measured": pairs(series)}
        figures.append(charts.lines(both, "step", label))
    if not figures:
        return []
    heading = ["quantity", "reports", "mean error", "largest error"]
    return ["<h3>Forecast against measured</h3>", _table(heading, rows) if rows else "", _row(*figures)]


def _decisions(run: Run) -> list[str]:
    made = decisions(run.recorded)
    if not made:
        return []
    figures = [name for name in _FIGURES if any(name in each.figures for each in made)]
    heading = [
        "step",
        "plan",
        "layers changed",
        "bytes",
        "ratio",
        *map(_FIGURES.__getitem__, figures),
        "why",
    ]
    planner = run.recorded.configuration.get("planner", "")
    said = [each for each in made if each.changed or each.figures]
    rows = [_decision(each, figures) for each in said]
    words = (len(heading) - 1,)
    shown = _table(heading, rows[:_SHOWN_DECISIONS], words)
    if len(rows) > _SHOWN_DECISIONS:
        more = _table(heading, rows[_SHOWN_DECISIONS:], words)
        count = len(rows) - _SHOWN_DECISIONS
        shown += f"<details><summary>{count} more</summary>{more}</details>"
    same = sum(not each.changed for each in made)
    note = "one plan" if len(made) == 1 else f"{len(made)} plans"
    note += f", {same} of which changed nothing" if same else ""
    note += f"; planner: {planner}" if planner not in ("", "None") else "; no planner decides"
    return ["<h3>Decisions and reasons</h3>", f'<p class="soft">{html.escape(note)}</p>', shown]


def _decision(made: Decision, figures: Iterable[str]) -> list[str]:
    return [
        f"{made.step:,}",
        str(made.version),
        f"{made.changed} of {made.layers}",
        f"{made.wire_bytes:,}",
        number(made.ratio),
        *(number(made.figures.get(name, math.nan)) for name in figures),
        "; ".join(made.reasons) or "-",
    ]


def _learning(run: Run) -> list[str]:
    loss = run.loss_over(seconds=False)
    held_out = {
        name: pairs(series)
        for name, series in run.recorded.under("held_out/").items()
        if len(series) > 1
    }
    figures = [charts.lines({"training loss": loss}, "step", "training loss", from_zero=False)]
    figures += [
        charts.lines({name: series}, "step", f"held-out {name}", from_zero=False)
        for name, series in held_out.items()
    ]
    if not any(figures):
        return []
    return ["<h3>Loss and scores</h3>", _row(*figures)]


def _buckets(run: Run) -> list[str]:
    numbers = sorted({int(name.split("/")[0]) for name in run.recorded.under("bucket/")})
    if not numbers:
        return []
    kinds = ("communicate_ms", "compress_ms", "payload_bytes")
    rows = [
        [str(bucket), *(number(run.mean(f"bucket/{bucket}/{kind}")) for kind in kinds)]
        for bucket in numbers
    ]
    table = _table(["bucket", "ms in flight", "ms compressing", "payload bytes"], rows)
    return [f"<details><summary>Buckets ({len(numbers)}), per step</summary>{table}</details>"]


def _settings(run: Run) -> list[str]:
    settings = run.recorded.configuration
    if not settings:
        return []
    table = _table(["setting", "value"], [[key, value or "-"] for key, value in settings.items()], (1,))
    return [f"<details><summary>Settings</summary>{table}</details>"]


# --- pieces -------------------------------------------------------------------------------------------


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]], words: Iterable[int] = ()) -> str:
    """A table; the columns numbered in ``words`` hold text, and so does the first."""
    left, style = set(words), ("", ' class="words"')

    def cells(row: Sequence[str], kind: str) -> str:
        return "".join(
            f"<{kind}{style[place in left]}>{html.escape(str(cell))}</{kind}>"
            for place, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    head = f"<thead><tr>{cells(heading, 'th')}</tr></thead>"
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'


def _row(*figures: str) -> str:
    shown = "".join(figure for figure in figures if figure)
    return f'<div class="row">{shown}</div>' if shown else ""


def _percent(share: float | None) -> str:
    return "-" if share is None or math.isnan(share) else f"{100 * share:.1f} %"


def _score(run: Run) -> str:
    name, value = run.score
    return f"{name} {_percent(value) if name == 'accuracy' else number(value)}" if name else "-"
