"""What ranks report to each other about plans.

Rank 0 of the process set sends two things to the others: votes, with the gradients of every step, and
one message as JSON when a plan is ready or the planner has failed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeAlias


class Votes(NamedTuple):
    """What rank 0 of the process set asks all ranks to do at the end of a step."""

    collect: bool = False
    """Whether to average what was measured."""
    ready: bool = False
    """Whether to take over a plan."""


@dataclass(frozen=True)
class DecisionMessage:
    """A decision for all ranks, and what it is expected to do.

    Args:
        levels: indices of the candidates, in the layers' order: one row for all ranks, or one for each.
        changed: whether layers do something else than before.
        factor: nominal compression factor, where the budget goes by factors; else 1.
        factors: compression factors whose gains are wanted from now on.
        report: figures that explain the decision.
        reasons: the same in words.
        errors: expected squared error of each layer, one row per row of ``levels``.
        energies: squared norms of the layers' gradients, likewise; empty rows where none were measured.
        sums: indices of the candidates at whose levels sums are compressed again, ``DENSE`` where that
            is the level of ``levels``; empty where it is everywhere.
    """

    levels: tuple[tuple[int, ...], ...]
    changed: bool
    factor: float
    factors: tuple[float, ...]
    report: Mapping[str, float]
    reasons: tuple[str, ...]
    errors: tuple[tuple[float, ...], ...]
    energies: tuple[tuple[float, ...], ...]
    sums: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.levels) == len(self.errors) == len(self.energies) > 0:
            raise ValueError(
                "a decision needs as many rows of levels, errors and energies, at least one: got "
                f"{len(self.levels)}, {len(self.errors)} and {len(self.energies)}"
            )
        for levels, errors in zip(self.levels, self.errors, strict=True):
            if len(errors) != len(levels):
                raise ValueError(f"a decision on {len(levels)} layers has {len(errors)} errors")
            if self.sums and len(self.sums) != len(levels):
                raise ValueError(f"a decision on {len(levels)} layers has {len(self.sums)} sums")

    @classmethod
    def from_mapping(cls, fields: Mapping[str, Any]) -> DecisionMessage:
        """Read what :meth:`to_json` wrote; ValueError names what is missing, unknown or malformed."""
        known = set(cls.__dataclass_fields__)
        if set(fields) != known:
            wrong = ", ".join(sorted(known ^ set(fields)))
            raise ValueError(f"a decision has the fields {', '.join(sorted(known))}: check {wrong}")
        try:
            return cls(
                levels=_rows(fields["levels"]),
                changed=fields["changed"],
                factor=fields["factor"],
                factors=tuple(fields["factors"]),
                report=dict(fields["report"]),
                reasons=tuple(fields["reasons"]),
                errors=_rows(fields["errors"]),
                energies=_rows(fields["energies"]),
                sums=tuple(fields["sums"]),
            )
        except TypeError as error:
            raise ValueError(f"a decision has a field of another type: {error}") from None

    def to_json(self) -> str:
        """Text of which :func:`from_json` makes an equal message."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class FailureMessage:
    """The planner has failed; all ranks raise.

    Args:
        error: type and message of its exception.
    """

    error: str

    def to_json(self) -> str:
        """Text of which :func:`from_json` makes an equal message."""
        return json.dumps(asdict(self))


Message: TypeAlias = DecisionMessage | FailureMessage


def from_json(text: str) -> Message:
    """Read a message.

    Raises:
        ValueError: it is none; says what is wrong.

    Example:
        >>> from_json('{"error": "ValueError: no layers"}')
        FailureMessage(error='ValueError: no layers')
        >>> from_json('{"levels": [[0]]}')  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: a decision has the fields changed, energies, ...: check changed, energies, ...
    """
    fields = json.loads(text)
    if not isinstance(fields, dict):
        raise ValueError(f"a message is an object, got {fields!r}")
    if isinstance(fields.get("error"), str):
        return FailureMessage(fields["error"])
    return DecisionMessage.from_mapping(fields)


def _rows(rows: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(row) for row in rows)
