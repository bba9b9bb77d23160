"""What dense steps have shown of a training run: all that a prediction needs, as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.collectives.measured_costs import MeasuredCosts
from hvd_adaptive.planning import CandidateTable, PlanningInput
from hvd_adaptive.planning.dense_steps import DenseSteps
from hvd_adaptive.planning.gradient_signals import GradientSignals

__all__ = ["StepTrace"]

VERSION = 2
_TEXTS = ("labels", "specs")
"""Rows of text, which are the same for many layers."""


@dataclass(frozen=True, eq=False)
class StepTrace:
    """Dense steps of a training run on some ranks.

    Args:
        recipe: of the planner, with its options, as text.
        dense: times of the steps.
        measured: costs of compressors and network.
        table: candidates of all layers, with their errors.
        signals: norms of gradients, and the candidates' payloads.
        buckets: ``int64[L]``: bucket of each layer, in launch order.
        hosts: on which the ranks are.
    """

    recipe: str
    dense: DenseSteps
    measured: MeasuredCosts
    table: CandidateTable
    signals: GradientSignals
    buckets: Int64s
    hosts: int = 1

    @classmethod
    def of(
        cls, recipe: str, dense: DenseSteps, measured: MeasuredCosts, facts: PlanningInput
    ) -> StepTrace:
        """From what a plan was made with; ValueError where that has no signals or no buckets."""
        if facts.signals is None or facts.buckets is None:
            raise ValueError("only a planner that foresees seconds, such as auto, can be traced")
        return cls(recipe, dense, measured, facts.table, facts.signals, facts.buckets)

    @property
    def ranks(self) -> int:
        """How many there were."""
        return self.measured.ranks

    @property
    def ranks_per_host(self) -> int:
        """How many shared a host."""
        return max(1, self.ranks // self.hosts)

    def to_dict(self) -> dict[str, Any]:
        """JSON: arrays as lists, and texts by their number."""
        return {
            "version": VERSION,
            "recipe": self.recipe,
            "hosts": self.hosts,
            "dense": self.dense.to_dict(),
            "measured": self.measured.to_dict(),
            "table": _written(self.table),
            "signals": _written(self.signals),
            "buckets": self.buckets.tolist(),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> StepTrace:
        """From :meth:`to_dict`.

        Raises:
            ValueError: it is of another version, or lacks something.
        """
        try:
            if state["version"] != VERSION:
                raise ValueError(f"version {state['version']}, this package reads {VERSION}")
            return cls(
                str(state["recipe"]),
                DenseSteps.from_dict(state["dense"]),
                MeasuredCosts.from_dict(state["measured"]),
                CandidateTable.of(**_read(state["table"])),
                _signals(_read(state["signals"])),
                np.array(state["buckets"], np.int64),
                int(state["hosts"]),
            )
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"no trace of dense steps: {type(error).__name__}: {error}") from error


def _written(found: CandidateTable | GradientSignals) -> dict[str, Any]:
    rows = {each.name: getattr(found, each.name) for each in fields(found)}
    return {key: _numbered(value) if key in _TEXTS else _lists(value) for key, value in rows.items()}


def _lists(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [_lists(each) for each in value] if isinstance(value, tuple) else value


def _numbered(rows: Sequence[Sequence[str]]) -> dict[str, Any]:
    numbers = {
        text: number for number, text in enumerate(dict.fromkeys(t for row in rows for t in row))
    }
    return {"texts": list(numbers), "rows": [[numbers[text] for text in row] for row in rows]}


def _read(state: Mapping[str, Any]) -> dict[str, Any]:
    texts = {
        key: tuple(tuple(state[key]["texts"][number] for number in row) for row in state[key]["rows"])
        for key in _TEXTS
        if key in state
    }
    return {**state, **texts}


def _signals(state: Mapping[str, Any]) -> GradientSignals:
    def floats(key: str) -> Float64s:
        return np.array(state[key], np.float64)

    def rows(key: str) -> tuple[Float64s, ...]:
        return tuple(np.array(row, np.float64) for row in state[key])

    return GradientSignals(
        floats("energy"),
        floats("mean_energy"),
        floats("residual"),
        floats("nonzero"),
        np.array(state["numel"], np.int64),
        state["specs"],
        rows("payloads"),
        tuple(np.array(row, np.bool_) for row in state["unbiased"]),
        rows("densities"),
        tuple(np.array(row, np.bool_) for row in state["projected"]),
    )
