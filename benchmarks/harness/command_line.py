"""Command lines of benchmarks: of those that measure named grid points, and those of tables."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.report import report

CHECK = "measure nothing; exit with 1 if what the file holds misses a target"


def quick_or_check(
    options: argparse.ArgumentParser,
    quick: str = "small and few; no targets, no file",
    check: str = CHECK,
) -> None:
    """Add ``--quick`` and ``--check``, not both: a small run is not compared with anything.

    Args:
        options: of a program.
        quick: what it says of ``--quick``.
        check: what it says of ``--check``.
    """
    either = options.add_mutually_exclusive_group()
    either.add_argument("--check", action="store_true", help=check)
    either.add_argument("--quick", action="store_true", help=quick)


def parser(doc: str | None, points: Iterable[str], name: str) -> argparse.ArgumentParser:
    """The options that all of them have.

    Args:
        doc: the script's; its first line is the description.
        grid points: that there are.
        name: of the file of results.
    """
    found = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else "")
    add = found.add_argument
    names = ", ".join(points).replace("%", "%%")  # which argparse else takes for its own
    add("--only", default="", help=f"some of {names}, with commas between")
    add("--redo", action="store_true", help="measure again what the file holds already")
    quick_or_check(found, "a smoke run on 2 hosts; writes no file")
    add("--out", type=Path, default=report.RESULTS / f"{name}.json")
    return found


def chosen(options: argparse.ArgumentParser, only: str, points: Iterable[str]) -> list[str]:
    """The names in ``--only``, or all; an unknown one ends the program."""
    known = list(points)
    names = [name.strip() for name in only.split(",") if name.strip()] or known
    if unknown := sorted(set(names) - set(known)):
        options.error(f"no {', '.join(unknown)}: there are {', '.join(known)}")
    return names


def tables(
    doc: str | None,
    name: str,
    measure: Callable[[bool], dict[str, Any]],
    missed: Callable[[dict[str, Any]], list[str]],
    others: Mapping[str, str] | None = None,
) -> int:
    """The program of a benchmark that measures all that it has, and then writes one file.

    Args:
        doc: the script's; its first line is the description.
        name: of the file of results.
        measure: gives the figures, of little if told so; prints each table as soon as it is there.
        missed: the targets that the figures do not meet.
        others: options that the caller has looked at, and what ``--help`` says of each.

    Returns:
        The exit status: 130 after Ctrl-C, 1 if a stored file is to be checked and misses a target.
    """
    found = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else "")
    quick_or_check(found)
    for option, text in (others or {}).items():
        found.add_argument(option, action="store_true", help=text)
    options = found.parse_args()
    if options.check:
        return check(name, missed)
    try:
        figures = measure(options.quick)
    except KeyboardInterrupt:
        print("\nstopped; the tables above are what was measured, and no file has changed")
        return 130
    if options.quick:
        return 0
    problems = missed(figures)
    tell(problems)
    print(f"written: {report.write(name, {**figures, 'missed': problems})}")
    return 0


def check(
    name: str, missed: Callable[[dict[str, Any]], list[str]], folder: Path = report.RESULTS
) -> int:
    """Compare a file of results with its targets; exit status 1 if one is missed, or without a file."""
    path = folder / f"{name}.json"
    if not path.exists():
        print(f"nothing to check: {path} is not there; without --check it is measured")
        return 1
    return tell(missed(json.loads(path.read_text())))


def tell(problems: list[str]) -> int:
    """Print the targets that are missed; the exit status of a program that checks them."""
    print("\n".join(problems) or "all targets met")
    return int(bool(problems))


def complete(
    measure: Callable[[], None] | None,
    tell: Callable[[], None],
    missed: Callable[[], list[str]],
    check: bool,
) -> int:
    """Measure what is to be measured, show what there is, and compare it with the targets.

    Returns:
        The program's exit status: 130 after Ctrl-C, 1 if targets are to be checked and one is missed.
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
        print(f"target missed: {problem}")
    return int(check and bool(problems))


def keep(
    cases: dict[str, Any],
    title: str,
    found: Any,
    rows: Callable[[dict[str, Any]], Sequence[Sequence[object]]],
    missed: Callable[[dict[str, Any]], list[str]],
    out: Path | None,
    **others: Any,
) -> None:
    """Add a case to those there are, show its table, and store all of them.

    Args:
        cases: by name.
        title: of the case.
        found: its figures.
        rows: the table of some cases.
        missed: the targets that are missed.
        out: the file of results; None stores nothing.
        others: what the file holds besides.
    """
    cases[title] = found
    print(report.table(rows({title: found})), flush=True)
    if out is not None:
        report.write(out.stem, {**others, "cases": cases, "missed": missed(cases)}, out.parent)


def side_by_side(
    work: Callable[[str], Any], titles: Sequence[str], at_once: int
) -> Iterator[tuple[str, Any]]:
    """What ``work`` finds of each title, as they end; what has not begun is left out after an error.

    Args:
        work: starts a program, and waits for it.
        titles: of what there is to do.
        at_once: how many of them.

    Example:
        >>> sorted(side_by_side(len, ["a", "bbb", "cc"], at_once=2))
        [('a', 1), ('bbb', 3), ('cc', 2)]
    """
    pool = ThreadPoolExecutor(at_once)
    try:
        running = {pool.submit(work, title): title for title in titles}
        for done in as_completed(running):
            yield running[done], done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def left_out(points: Sized, found: Sized, words: str) -> list[str]:
    """That some of the cases are not there, as one more target that is missed; empty if all are.

    Example:
        >>> left_out("abc", "a", "runs are missing"), left_out("abc", "abc", "runs are missing")
        (['2 of 3 runs are missing'], [])
    """
    left = len(points) - len(found)
    return [f"{left} of {len(points)} {words}"] if left > 0 else []


def cases(
    doc: str | None,
    name: str,
    points: Iterable[str],
    measure: Callable[[list[str], dict[str, Any], Path | None, bool], None],
    rows: Callable[[dict[str, Any]], Sequence[Sequence[object]]],
    missed: Callable[[dict[str, Any]], list[str]],
) -> int:
    """The program of a benchmark whose file holds ``cases`` by name; it continues where it stopped.

    Args:
        doc: the script's.
        name: of the file of results.
        points: the cases that there are.
        measure: adds the named ones to those there are and stores them, with little effort if told so.
        rows: the table.
        missed: the targets that are missed; of a quick run none is looked at.
    """
    options = parser(doc, points, name)
    args = options.parse_args()
    wanted = chosen(options, args.only, points)
    out = None if args.quick else args.out
    found: dict[str, Any] = {}
    if out is not None and out.exists():
        found = json.loads(out.read_text())["cases"]
    if args.quick:
        wanted = wanted[:1]
    elif not args.redo:
        wanted = [title for title in wanted if title not in found]
    return complete(
        (lambda: measure(wanted, found, out, args.quick)) if wanted else None,
        lambda: print(report.table(rows(found))),
        lambda: [] if args.quick else missed(found),
        args.check,
    )
