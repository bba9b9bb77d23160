"""``hva report RUN [RUN...]``: one HTML page about one or several runs, from what they recorded.

Also ``python -m hvd_adaptive.commands.report``. It reads `telemetry.jsonl`, of a run that goes on, too.
The page needs no server and loads nothing from a network.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hvd_adaptive.commands.report.figures import Run
from hvd_adaptive.commands.report.page import render
from hvd_adaptive.telemetry.recorded import load

__all__ = ["add_arguments", "main", "run", "write"]

_PAGE = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.description = "Write one HTML page about one or several training runs."
    parser.epilog = "example:\n  hva report runs/first runs/second --out comparison.html"
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="folder that holds a telemetry.jsonl (logdir)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"the page ({_PAGE} in the first run's folder)"
    )


def run(args: argparse.Namespace) -> int:
    """Carry the command out; returns the exit status."""
    try:
        page = write(args.runs, args.out)
    except FileNotFoundError as error:
        hint = "write the folder of a run that had telemetry= (--logdir), with jsonl=True"
        print(f"hva report: nothing recorded: there is no {error.filename}; {hint}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        print(f"hva report: {error}", file=sys.stderr)
        return 1
    print(page)
    return 0


def write(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write the page of these runs.

    Args:
        runs: their folders.
        out: the file; None writes `report.html` into the first run's folder.

    Returns:
        The file.

    Raises:
        OSError: a run cannot be read, or the page cannot be written.
        ValueError: what a run recorded is damaged, or holds nothing yet.
    """
    named = []
    for path, name in zip(runs, names(runs), strict=True):
        try:
            recorded = load(path)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if not (recorded.scalars or recorded.plans):
            raise ValueError(f"{path} holds nothing that could be shown yet")
        named.append(Run(name, recorded))
    first = runs[0] if runs[0].is_dir() else runs[0].parent
    page = out or first / _PAGE
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(render(named), encoding="utf-8")
    return page


def names(runs: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell the runs apart.

    Example:
        >>> names([Path("runs/a/logs"), Path("runs/b/logs")]), names([Path("runs/first")])
        (['a/logs', 'b/logs'], ['first'])
    """
    parts = [Path(os.path.abspath(each)).parts for each in runs]
    for depth in range(1, max(map(len, parts)) + 1):
        found = ["/".join(each[-depth:]) for each in parts]
        if len(set(found)) == len(set(parts)):
            return found
    return [str(each) for each in runs]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="hva report", description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    return run(parser.parse_args())
