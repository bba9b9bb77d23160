"""Stored figures of planners whose defaults have changed since: pages say so, and nothing is deleted.

A measurement holds its ``date`` and its ``setting``; those from before the first change hold no date.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["CHANGES", "Change", "Measured", "note", "of_cells", "planner_of"]

Measured: TypeAlias = tuple[str, str, Mapping[str, Any]]
"""Name of a row, its planner as text, and what is stored of one of its measurements."""


@dataclass(frozen=True)
class Change:
    """A change of what planners do by default.

    Args:
        day: what was measured on this day, or before, was measured without it.
        planners: by name.
        what: they do since.
        option: that decides it, if there is one; a setting which has it was not changed.
    """

    day: str
    planners: tuple[str, ...]
    what: str
    option: str = ""

    def is_after(self, planner: str, date: str) -> bool:
        """Whether a measurement of that planner, as text, on that day is from before.

        Example:
            >>> gain = CHANGES[0]
            >>> gain.is_after("gravac:window=40", "2026-11-24"), gain.is_after("gravac", "2027-01-01")
            (True, False)
            >>> gain.is_after("gravac:gain=feedback", "2026-11-24"), gain.is_after("lgreco", "")
            (False, False)
        """
        name, _, options = planner.partition(":")
        pinned = self.option in [each.partition("=")[0] for each in options.split(",") if each]
        return name in self.planners and not pinned and date <= self.day


CHANGES = (
    Change(
        "2026-11-25",
        ("gravac", "gravac+lgreco"),
        "gains are relative to the raw gradient, and the search keeps the best factor",
        "gain",
    ),
    Change(
        "2026-11-25",
        ("accordion", "accordion+lgreco"),
        "norms are those of a period's accumulated gradient",
    ),
    Change(
        "2026-11-25",
        ("lgreco", "lgreco-time", "accordion+lgreco", "gravac+lgreco"),
        "errors are L2 norms, not squared",
        "metric",
    ),
    Change(
        "2026-11-25",
        ("lgreco", "lgreco-time", "accordion+lgreco"),
        "errors are measured on accumulated gradients",
        "accumulate",
    ),
    Change("2026-11-25", ("lgreco-time",), "eight trial plans come first", "trials"),
    Change(
        "2026-11-27", ("auto",), "limits are tighter: these were those of `accuracy=fast`", "accuracy"
    ),
    Change(
        "2026-11-28",
        ("auto",),
        "quantizers are `correlated=true`, which takes as long and adds half of the noise",
    ),
    Change("2026-11-28", ("auto",), "plans come less often, for the sake of what they cost"),
)


def planner_of(measured: Mapping[str, Any]) -> str:
    """The planner of a measurement, as text, or the compressor ``auto``; empty where there is none.

    Args:
        measured: its ``setting`` is the arguments of launch/train.py, or these as text.

    Example:
        >>> planner_of({"setting": "--planner gravac:window=40 --seed 0"})
        'gravac:window=40'
        >>> planner_of({"setting": "--compression auto --seed 0"}), planner_of({})
        ('auto', '')
    """
    setting: str | Sequence[str] = measured.get("setting", ())
    words = setting.split() if isinstance(setting, str) else list(setting)
    named = dict(itertools.pairwise(words))
    compression = named.get("--compression", "")
    plans_itself = compression.partition(":")[0] == "auto"
    return named.get("--planner", compression if plans_itself else "")


def of_cells(cells: Mapping[str, Mapping[str, Any]], part: int) -> Iterator[Measured]:
    """Of measurements that are stored by names with slashes.

    Args:
        cells: by such names.
        part: of a name that is the row's.
    """
    for key, each in cells.items():
        yield key.split("/")[part], planner_of(each), each


def note(measured: Iterable[Measured]) -> str:
    """A sentence on which rows are of defaults that have changed since; empty where none is.

    Example:
        >>> note([("slow", "accordion:period=25", {"date": "2026-11-24"})]).partition(": ")[2]
        "`slow` (since then norms are those of a period's accumulated gradient)."
    """
    known = [(name, planner, str(each.get("date", ""))) for name, planner, each in measured]
    found = []
    for change in CHANGES:
        rows = dict.fromkeys(name for name, *when in known if change.is_after(*when))
        if rows:
            names = ", ".join(f"`{name}`" for name in rows)
            found.append((change.day, f"{names} (since then {change.what})"))
    days = dict.fromkeys(day for day, _ in found)
    texts = {day: "; ".join(text for at, text in found if at == day) for day in days}
    return " ".join(f"Measured before defaults changed on {day}: {texts[day]}." for day in days)
