"""Puts the results of a sweep (array.sbatch) into one table.

    python launch/slurm/collect.py runs/slurm/JOB
    python launch/slurm/collect.py runs/slurm/JOB --json results.json

The exit status is 0 if all tasks are done, and 3 if some are missing or failed: the table names them.
Needs Python's standard library and nothing else, so that it runs on a login node.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

INCOMPLETE = 3

# What train.py prints at its end: a label, and the first number after it.
FIGURES = {
    "samples_per_second": "samples per second",
    "step_ms": "step time: total",
    "waiting_ms": "  + exposed communication",
    "payload_bytes": "  payload sent",
    "train_loss": "train loss, last",
    "held_out_loss": "held-out loss",
    "perplexity": "held-out perplexity",
    "accuracy_percent": "held-out accuracy",
}
HEADINGS = {
    "samples_per_second": ("samples/s", "{:,.1f}"),
    "step_ms": ("ms per step", "{:,.1f}"),
    "waiting_ms": ("exposed", "{:,.1f}"),
    "payload_bytes": ("bytes per step", "{:,.0f}"),
    "held_out_loss": ("held-out loss", "{:.4f}"),
    "perplexity": ("perplexity", "{:.2f}"),
    "accuracy_percent": ("accuracy", "{:.2f}%"),
}
# horovodrun puts the rank before each line, and at times behind it.
_TAG = re.compile(r"\[[0-9,]+\]<std\w+>:")


@dataclass(frozen=True)
class SweepTask:
    """One line of the list, and what became of it."""

    number: int
    options: str
    state: str
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.state == "done"


def read_figures(log: str) -> dict[str, float]:
    """The figures of the last table in a log; a job that was requeued may have begun several logs."""
    text = _TAG.sub("", log)
    start = text.rfind("\n" + FIGURES["samples_per_second"])
    if start < 0:
        return {}
    found = {}
    for name, label in FIGURES.items():
        match = re.search(rf"^{re.escape(label)}\s+([\d.,]+)", text[start:], re.MULTILINE)
        if match:
            found[name] = float(match[1].replace(",", ""))
    return found


def active_tasks(job: str) -> set[int] | None:
    """The numbers of the tasks that Slurm still has; None where it cannot be asked."""
    command = ["squeue", "--noheader", "--array", f"--jobs={job}", "--format=%K"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode and "Invalid job id" not in done.stderr:
        return None
    return {int(word) for word in done.stdout.split() if word.isdigit()}


def read_task(folder: Path, number: int, options: str, active: set[int] | None) -> SweepTask:
    place = folder / f"task-{number}"
    try:
        status = int((place / "status").read_text())
    except (FileNotFoundError, ValueError):
        return SweepTask(number, options, _without_status(place, number, active))
    if status:
        return SweepTask(number, options, f"failed ({status})")
    log = place / "log"
    figures = read_figures(log.read_text(errors="replace")) if log.exists() else {}
    return SweepTask(number, options, "done" if figures else "done, but no table in its log", figures)


def _without_status(place: Path, number: int, active: set[int] | None) -> str:
    """A task that was killed had no time to leave its status."""
    begun = (place / "log").exists()
    if active is None:
        return "unfinished" if begun else "not started"
    if number in active:
        return "running" if begun else "waiting"
    return "killed" if begun else "not started"


def read_sweep(folder: Path, active: set[int] | None) -> list[SweepTask]:
    lines = (folder / "list").read_text().splitlines()
    return [read_task(folder, number, line, active) for number, line in enumerate(lines)]


def table(tasks: Sequence[SweepTask]) -> str:
    """Aligned columns; those that no task has figures for are left out."""
    names = [name for name in HEADINGS if any(name in task.figures for task in tasks)]
    rows = [["task", "options", "state", *(HEADINGS[name][0] for name in names)]]
    for task in tasks:
        cells = [
            HEADINGS[name][1].format(task.figures[name]) if name in task.figures else "-"
            for name in names
        ]
        rows.append([str(task.number), task.options, task.state, *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        texts = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
        numbers = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
        lines.append("  ".join(texts + numbers).rstrip())
    return "\n".join([*lines, summary(tasks)])


def summary(tasks: Sequence[SweepTask]) -> str:
    missing = [f"task {task.number} {task.state}" for task in tasks if not task.done]
    if not missing:
        return f"complete: {len(tasks)} of {len(tasks)} done"
    return f"PARTIAL: {len(tasks) - len(missing)} of {len(tasks)} done; " + ", ".join(missing)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the sweep's folder, named after its job")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    parser.add_argument(
        "--if-last", type=int, metavar="TASK",
        help="say nothing, unless TASK is the last to end; write the table into the folder, too",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    folder: Path = options.folder
    if not (folder / "list").exists():
        parser.error(f"{folder} is no folder of a sweep: it has no file 'list'")

    active = active_tasks(folder.name) if folder.name.isdigit() else None
    last: int | None = options.if_last
    if last is not None and active is not None:
        active -= {last}
    tasks = read_sweep(folder, active)
    # Of two that end together, the one that looks later sees the other's status.
    if last is not None and active != set() and any(_continues(task) for task in tasks):
        return 0
    text = table(tasks)
    print(text)
    if last is not None:
        (folder / "table").write_text(text + "\n")
    if options.json is not None:
        rows = [asdict(task) for task in tasks]
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if all(task.done for task in tasks) else INCOMPLETE


def _continues(task: SweepTask) -> bool:
    return task.state in ("running", "waiting", "unfinished")


if __name__ == "__main__":
    sys.exit(main())
