"""A planner is a budget times an allocator.

How a planner is driven, on the rank that plans, between steps::

    planner = parse("lgreco:period=200").planner(ranks=16)
    for step in ...:
        planner.observe(StepMeasurements(step, ...))        # what planner.needs asks for
        if planner.due(step):
            decision = planner.plan(PlanningInput(step, table))
            ...                                      # all ranks switch to decision.levels together

* ``planner.needs`` says what must be measured (see :class:`Measurement`) and
  ``planner.factors`` the compression factors whose gains are wanted now.
* A :class:`~hvd_adaptive.planning.table.CandidateTable` holds the candidates of the layers that may be
  compressed; ``Decision.levels`` has one index for each of them, or ``DENSE``.
* Until the first decision all layers are sent dense, or at their default: as the caller likes.
* :meth:`Planner.plan` may run during training: it holds no lock and gives up the GIL in its long
  loops. Only ``plan`` and ``observe`` must not run at the same time.
* Nothing here depends on clocks or on chance: the same facts give the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np

from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.planning.allocators import Allocator
from hvd_adaptive.planning.budgets import Budget
from hvd_adaptive.planning.costs import BucketCosts, OnlineCosts, random_plans, random_prices
from hvd_adaptive.planning.knapsack import Infeasible
from hvd_adaptive.planning.measurements import (
    CheckedOptions,
    Measurement,
    PlanningInput,
    StepMeasurements,
)
from hvd_adaptive.planning.metrics import SQUARED, ErrorMetric
from hvd_adaptive.planning.table import DENSE, CandidateTable, Limits

__all__ = ["Decision", "Planner", "Pricing"]


@dataclass(frozen=True, slots=True, eq=False)
class Decision:
    """What the layers do from now on.

    Args:
        levels: ``int64[L]``: the index of each layer's candidate, or ``DENSE``.
        factor: nominal compression factor, where the budget goes by factors; else 1.
        report: figures: bytes, error and its bound in the planner's metric, and the budget's own.
        reasons: why, in words.
        own: each rank's levels, where they are not the same on all.
        sums: ``int64[L]``: the index of the candidate at whose level sums are compressed again, or
            ``DENSE`` where that is the level of ``levels``; None where it is everywhere.
    """

    levels: Int64s
    factor: float = 1.0
    report: dict[str, float] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    own: tuple[Int64s, ...] = ()
    sums: Int64s | None = None


@dataclass(frozen=True)
class Pricing(CheckedOptions):
    """What a byte costs in each layer.

    Args:
        prices: ``bytes`` (all cost the same), ``time`` (seconds per byte of the layer's bucket, as
            learned from all steps so far), or ``linear`` (the number of its bucket, from 1).
        trials: plans that are tried first, so that the bytes of buckets vary.
        trial_steps: steps of each; the first five are not counted.
        trial_plans: ``prices`` (the least cost at random prices, within the allowed error or a share of
            it) or ``levels`` (random levels, as L-GreCo's authors try them: more variation, and no
            bound on the error).
    """

    prices: str = "bytes"
    trials: int = 0
    trial_steps: int = 55
    trial_plans: str = "prices"

    def __post_init__(self) -> None:
        if self.prices not in ("bytes", "time", "linear"):
            raise ValueError(f"prices={self.prices!r} is not one of bytes, time, linear")
        if self.trial_plans not in ("prices", "levels"):
            raise ValueError(f"trial_plans={self.trial_plans!r} is not one of prices, levels")
        if self.trials < 0 or self.trial_steps <= _SETTLING:
            raise ValueError(
                f"trials={self.trials} must be at least 0 and trial_steps={self.trial_steps} above "
                f"{_SETTLING}"
            )
        super().__post_init__()


_SETTLING = 5
"""Steps after a switch whose times are not used."""
_NEW_LAYERS = 20
"""Steps after a change of the layers that train before they are planned for: it may be undone soon."""


@final
class Planner:
    """Budget x allocator: one decision every ``period`` steps, and whenever the budget is urgent.

    Args:
        budget: how much.
        allocator: shared out how.
        period: steps between decisions, times the budget's patience; 0 decides only when the budget is
            urgent.
        pricing: of bytes.
        metric: in which errors are added up; as they are measured by default.

    Raises:
        ValueError: a negative period.

    Example:
        >>> errors, sizes, labels = [[0, 9], [0, 1]], [[8, 4]] * 2, [["8", "4"]] * 2
        >>> table = CandidateTable.of("ab", errors, sizes, labels, [0, 1], [32] * 2)
        >>> from hvd_adaptive.planning import parse
        >>> planner = parse("lgreco:period=200").planner()
        >>> planner.due(0), sorted(need.value for need in planner.needs)
        (True, ['errors'])
        >>> decision = planner.plan(PlanningInput(0, table))
        >>> decision.levels.tolist(), decision.report["bytes"], planner.due(199), planner.due(200)
        ([0, 1], 12.0, False, True)
    """

    def __init__(
        self,
        budget: Budget,
        allocator: Allocator,
        *,
        period: int = 500,
        pricing: Pricing | None = None,
        metric: ErrorMetric = SQUARED,
    ) -> None:
        if period < 0:
            raise ValueError(f"period={period}: write a number of steps, or 0")
        self.budget = budget
        self.allocator = allocator
        self._period = period
        self._pricing = pricing or Pricing()
        self._metric = metric
        self._costs = OnlineCosts()
        self.facts: PlanningInput | None = None
        """What the last decision was made from."""
        self._last: int | None = None
        self._seen = 0
        self._next = 0
        self._trial = 0

    @property
    def needs(self) -> frozenset[Measurement]:
        """What must be measured."""
        buckets = (
            {Measurement.BUCKETS} if self._pricing.prices != "bytes" or self._pricing.trials else set()
        )
        return self.budget.needs | self.allocator.allocator_needs | buckets

    @property
    def factors(self) -> tuple[float, ...]:
        """Compression factors whose gains are wanted now."""
        return self.budget.factors

    def observe(self, facts: StepMeasurements) -> None:
        """Learn from a step. Cost: O(layers + buckets^2)."""
        self._seen = facts.step
        self.budget.observe(facts)
        if facts.bucket_bytes is None or facts.sync_seconds is None:
            return
        if self._last is None or facts.step > self._last + _SETTLING:
            self._costs.observe(facts.bucket_bytes, facts.sync_seconds)

    def due(self, step: int) -> bool:
        """Whether to plan after this step."""
        if self._trial < self._pricing.trials:
            return step >= self._next
        regular = self._period > 0 and step >= self._next
        return (regular or self.budget.urgent) and self.budget.ready

    def renew(self) -> None:
        """Other layers train from now on: a regular plan is due soon."""
        self._next = self._seen + min(self._period, _NEW_LAYERS)

    def plan(self, facts: PlanningInput) -> Decision:
        """Decide. Cost: that of the allocator; some 30 ms for 161 layers of 100 candidates.

        Raises:
            ValueError: facts that are missing or do not fit the layers.
        """
        self._last, self.facts = facts.step, facts
        self._costs.settle()
        tries = self._trial < self._pricing.trials
        if tries and self._pricing.trial_plans == "levels":
            return self._random_levels(facts)
        squared = facts.table
        facts, reasons = self._in_metric(facts)
        if tries:
            table, share, why = self._next_trial(facts)
        else:
            share = 1.0
            table, why = self._priced(facts)
        others = facts.other_bytes
        self.budget.inform(replace(facts, period=self._period))
        allowed = self.budget.allow(table)
        if allowed.reference is None:  # a bound on all that a step sends
            allowed = replace(allowed, max_bytes=max(0.0, allowed.max_bytes - others))
        admitted = self._metric.admitted(table, squared, allowed.reference)
        within = allowed
        if share < 1:  # from the least error that there can be to all that is allowed
            least = sum(float(row.min()) for row in admitted.errors)
            within = replace(allowed, max_error=least + share * (allowed.max_error - least))
        sums: Int64s | None = None
        apart = len(table.returning) > 0 and bool(self.budget.prices.by_direction)
        if apart and not facts.own and allowed.reference is None:
            levels, sums, shortfall, found = self._allocate_directions(admitted, within)
        else:
            levels, shortfall, found = self._allocate(admitted, within)
        own = self._own(facts, levels, allowed)
        why += self.budget.chosen(levels)
        if not tries:
            self._next = facts.step + self._period * self.budget.patience
        report = {
            "error": table.error(levels),
            "squared_error": squared.error(levels),
            "dense_bytes": table.bytes(table.all_dense()) + others,
            "max_error": allowed.max_error,
            "max_bytes": allowed.max_bytes + others,
            "shortfall": shortfall,
            **self._predict(facts, levels, own, sums),
            **self.budget.report(),
        }
        if own:
            report["error_of_one_plan"] = report["error"]
            report["error"] = _mean(CandidateTable.error, facts.own, own)
        if sums is not None:
            report["error_of_sums"] = table.error(sums)
        return Decision(levels, self.budget.factor, report, (*reasons, *why, *found), own, sums)

    def _in_metric(self, facts: PlanningInput) -> tuple[PlanningInput, tuple[str, ...]]:
        """The same with errors in the planner's metric, and what must be said about that."""
        # of each rank there are no preconditioned errors
        preconditioned = None if facts.own else facts.preconditioned
        table, why = self._metric.applied(facts.table, preconditioned)
        own = tuple(self._metric.applied(each)[0] for each in facts.own)
        return replace(facts, table=table, own=own), why

    def _own(self, facts: PlanningInput, levels: Int64s, allowed: Limits) -> tuple[Int64s, ...]:
        """Each rank's levels, by its own errors; none where a layer is sent dense, and so summed.

        A rank that has seen nothing does as the others do on average.
        """
        if (levels == DENSE).any():
            return ()
        return tuple(
            self._allocate(each, allowed)[0] if any(row.any() for row in each.errors) else levels
            for each in facts.own
        )

    def _predict(
        self,
        facts: PlanningInput,
        levels: Int64s,
        own: tuple[Int64s, ...] = (),
        sums: Int64s | None = None,
    ) -> dict[str, float]:
        """What a step will cost."""
        nbytes = _mean(CandidateTable.bytes, facts.own, own) if own else facts.table.bytes(levels)
        priced = nbytes
        if sums is not None:
            nbytes = facts.table.bytes_of_both(levels, sums)
            priced = facts.table.bytes_of_both(levels, sums, self.budget.prices)
        found = {"bytes": nbytes + facts.other_bytes}
        seconds = self.budget.seconds(priced + facts.other_bytes)
        if seconds is not None:
            found["seconds"] = seconds
        costs = self._costs.fit() if Measurement.BUCKETS in self.needs else None
        if costs is None:
            return found
        found |= {"bucket_costs_r2": costs.r2, "bucket_costs_intercept": costs.intercept}
        for bucket, pair in enumerate(zip(costs.coefficients, costs.errors, strict=True)):
            found[f"bucket_cost_{bucket}"], found[f"bucket_cost_error_{bucket}"] = map(float, pair)
        buckets = _buckets_of(facts)
        if len(costs.coefficients) > buckets.max(initial=0):
            each = costs.coefficients[buckets]
            found["sync_seconds"] = costs.intercept + replace(facts.table, weights=each).cost(levels)
        return found

    def _allocate(
        self, table: CandidateTable, allowed: Limits
    ) -> tuple[Int64s, float, tuple[str, ...]]:
        """Levels, by how much the bound is missed, and why."""
        dense = table.all_dense()
        reference = allowed.reference
        if reference is not None and (reference == DENSE).all():
            return dense, 0.0, ("the budget asks for dense",)
        if reference is None and table.bytes(dense) <= allowed.max_bytes:
            return dense, 0.0, ("dense fits",)
        try:
            return self.allocator.allocate(table, allowed), 0.0, ()
        except Infeasible as reason:
            if reference is not None:
                return reference, 0.0, (f"the reference stays: {reason}",)
            cheapest = table.cheapest()
            missing = table.bytes(cheapest) - allowed.max_bytes
            return cheapest, max(0.0, missing), (f"as compressed as can be: {reason}",)

    def _allocate_directions(
        self, table: CandidateTable, allowed: Limits
    ) -> tuple[Int64s, Int64s | None, float, tuple[str, ...]]:
        """As :meth:`_allocate`, with levels of their own for the sums that come back, in one budget."""
        up, down = table.by_direction(self.budget.prices)
        dense, sums = table.all_dense(), table.all_dense()
        why: tuple[str, ...] = ()
        if up.bytes(dense) <= allowed.max_bytes:
            return dense, None, 0.0, ("dense fits",)
        try:
            levels, back = self.allocator.allocate_directions(up, down, allowed)
            shortfall = 0.0
        except Infeasible as reason:
            levels, back = up.cheapest(), down.cheapest()
            shortfall = max(0.0, up.bytes(levels) + down.bytes(back) - allowed.max_bytes)
            why = (f"as compressed as can be: {reason}",)
        sums[table.returning] = back
        return levels, sums, shortfall, why

    def _priced(self, facts: PlanningInput) -> tuple[CandidateTable, tuple[str, ...]]:
        prices = self._pricing.prices
        if prices == "bytes":
            return facts.table, ()
        buckets = _buckets_of(facts)
        if prices == "linear":
            return replace(facts.table, weights=(buckets + 1).astype(np.float64)), ()
        costs = self._costs.fit()
        if costs is None or len(costs.coefficients) <= buckets.max(initial=0):
            return facts.table, ("bytes count: no times of these buckets yet",)
        weights: Float64s = costs.prices()[buckets]
        if not weights.any():
            return facts.table, ("bytes count: the times do not depend on them",)
        return replace(facts.table, weights=weights), (_account_of(costs),)

    def _next_trial(self, facts: PlanningInput) -> tuple[CandidateTable, float, tuple[str, ...]]:
        """One plan of the experiment: random prices, and the share of the error that it may make."""
        buckets = _buckets_of(facts)
        prices, share = random_prices(int(buckets.max(initial=-1)) + 1, self._trial)
        table = replace(facts.table, weights=prices[buckets])
        return table, share, (self._count_trial(facts, "prices are random"),)

    def _random_levels(self, facts: PlanningInput) -> Decision:
        """One plan of the experiment with random levels."""
        counts = [len(row) for row in facts.table.sizes]
        levels = next(random_plans(counts, _buckets_of(facts).tolist(), start=self._trial))
        reason = self._count_trial(facts, "levels are random")
        return Decision(levels, report=self._predict(facts, levels), reasons=(reason,))

    def _count_trial(self, facts: PlanningInput, how: str) -> str:
        """What is said of the trial that begins."""
        self._trial += 1
        self._next = facts.step + self._pricing.trial_steps
        return f"trial {self._trial} of {self._pricing.trials}, to learn what buckets cost: {how}"

    def state_dict(self) -> dict[str, Any]:
        """Everything that the steps taught, as JSON."""
        return {
            "budget": self.budget.state_dict(),
            "costs": self._costs.state_dict(),
            "last": self._last,
            "next": self._next,
            "trial": self._trial,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict` of a planner with the same options."""
        self.budget.load_state_dict(state["budget"])
        self._costs.load_state_dict(state["costs"])
        self._last = None if state["last"] is None else int(state["last"])
        self._next, self._trial = int(state["next"]), int(state["trial"])


def _mean(
    what: Callable[[CandidateTable, Int64s], float],
    tables: Sequence[CandidateTable],
    choices: Sequence[Int64s],
) -> float:
    """Of every rank's choice in its own table."""
    return float(np.mean([what(*each) for each in zip(tables, choices, strict=True)]))


def _account_of(costs: BucketCosts) -> str:
    """What is known of the times, in words."""
    pairs = zip(1e6 * costs.coefficients, 1e6 * costs.errors, strict=True)
    each = ", ".join(f"{cost:.3g}±{error:.2g}" for cost, error in pairs)
    return f"times of buckets explain {costs.r2:.3f}: seconds per MB {each}"


def _buckets_of(facts: PlanningInput) -> Int64s:
    if facts.buckets is None or len(facts.buckets) != len(facts.table.names):
        raise ValueError(
            "this planner needs the bucket of every layer: PlanningInput(step, table, buckets)"
        )
    return np.asarray(facts.buckets, dtype=np.int64)
