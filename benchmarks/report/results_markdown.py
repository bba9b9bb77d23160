"""What the sections of RESULTS.md are made of: Markdown tables, and figures as text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from benchmarks.report import report
from benchmarks.report.report import RESULTS


def load(name: str) -> dict[str, Any]:
    """One benchmark's figures."""
    figures: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return figures


def table(heading: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def of_rows(rows: list[list[object]], titles: tuple[str, ...] = ()) -> str:
    """A table of a heading and rows as benchmarks print them; ``titles`` replace the first headings."""
    heading, *lines = [[str(cell) for cell in row] for row in rows]
    return table([*titles, *heading[len(titles) :]], lines)


def source(name: str, figures: dict[str, Any]) -> str:
    """Which command made the figures, when and where."""
    return f"Made by {command(name, figures)}, {report.place(figures['machine'])}."


def command(name: str, figures: dict[str, Any]) -> str:
    """Which command made the figures, and when."""
    [file] = RESULTS.parent.glob(f"*/{name}.py")
    return f"`python -m benchmarks.{file.parent.name}.{name}` on {figures['machine']['date']}"


def section(title: str, about: str, *tables: tuple[str, str, str, str], end: str = "") -> str:
    """A section: what was measured, and of each table its title, question, answer and rows."""
    parts = [f"## {title}", about]
    for heading, question, answer, rows in tables:
        parts += [f"### {heading}", f"*{question}* {answer}", rows]
    return "\n\n".join([*parts, end] if end else parts)


def missed(figures: dict[str, Any]) -> str:
    """What the benchmark itself calls missed."""
    found = [each.replace(", bar ", ", target ") for each in figures["missed"]]
    return "Targets missed in this run: " + ("; ".join(found) if found else "none") + "."


def span(values: Iterable[float], form: str = ".1f") -> str:
    """The least and the most of some figures, as "1.3 to 2.6"."""
    found = sorted(values)
    least, most = (format(each, form) for each in (found[0], found[-1]))
    return least if least == most else f"{least} to {most}"
