"""The command line of benchmarks that measure named cells and keep what they have."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

import report


def parser(doc: str | None, cells: Iterable[str], name: str) -> argparse.ArgumentParser:
    """The options that all of them have.

    Args:
        doc: the script's; its first line is the description.
        cells: that there are.
        name: of the file of results.
    """
    found = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else "")
    add = found.add_argument
    add("--only", default="", help=f"some of {', '.join(cells)}, with commas between")
    add("--redo", action="store_true", help="measure again what the file holds already")
    add("--quick", action="store_true", help="a smoke run on 2 hosts; writes no file")
    add("--check", action="store_true", help="measure nothing; 1 if a bar is missed")
    add("--out", type=Path, default=report.RESULTS / f"{name}.json")
    return found


def chosen(options: argparse.ArgumentParser, only: str, cells: Iterable[str]) -> list[str]:
    """The names in ``--only``, or all; an unknown one ends the program."""
    known = list(cells)
    names = [name.strip() for name in only.split(",") if name.strip()] or known
    if unknown := sorted(set(names) - set(known)):
        options.error(f"no {', '.join(unknown)}: there are {', '.join(known)}")
    return names


def complete(
    measure: Callable[[], None] | None,
    tell: Callable[[], None],
    missed: Callable[[], list[str]],
    check: bool,
) -> int:
    """Measure what is to be measured, tell what there is, and compare it with the bars.

    Returns:
        The program's exit status: 130 after Ctrl-C, 1 if bars are to be checked and one is missed.
    """
    try:
        if measure is not None and not check:
            measure()
    except KeyboardInterrupt:
        print("stopped; what was measured is kept")
        return 130
    finally:
        tell()
    problems = missed()
    for problem in problems:
        print(f"bar missed: {problem}")
    return int(check and bool(problems))
