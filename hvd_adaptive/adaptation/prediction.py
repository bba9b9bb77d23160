"""Seconds of a step with other compressors, ranks and networks, from a trace of dense steps.

Nothing here is a model of its own: costs are those of
:class:`~hvd_adaptive.collectives.measured_costs.MeasuredCosts` among other ranks, and steps are played
through, and ``auto`` decides, as in training.

What is measured is uncertain, and what is carried on to other ranks more so. Each prediction has a
range, from two other worlds that are predicted with: one with the times of the fastest quarter of
steps, in which a small operation takes as long among any number of ranks, and one with those of the
slowest quarter, in which all of it grows. Beyond the steps that were seen, the factor of the network
that explains these (see :func:`~hvd_adaptive.planning.step_time.calibrated`) is off by half of its own
logarithm.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hvd_adaptive.adaptation.step_trace import StepTrace
from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.comm.link_costs import CYCLE
from hvd_adaptive.planning import PlanningInput, StepMeasurements, parse
from hvd_adaptive.planning.budgets import Accuracy
from hvd_adaptive.planning.budgets.auto import AutoBudget
from hvd_adaptive.planning.least_time import LEAST_GAIN, TimeLimits
from hvd_adaptive.planning.step_time import StepCosts, StepModel, arrival_order, calibrated

__all__ = ["AutoForecast", "Method", "Predicted", "Predictor"]

FACTORS = (8.0, 32.0, 128.0)
"""Compression ratios near which levels are shown."""
MOST_RANKS = 1024


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds of a step.

    Args:
        seconds: predicted.
        low: the least that they may well be.
        high: the most.
        exposed: seconds of communication that training waits for.
    """

    seconds: float
    low: float
    high: float
    exposed: float


@dataclass(frozen=True, eq=False)
class Method:
    """One compressor at one level for all layers, or dense.

    Args:
        name: as it is shown.
        choice: ``int64[L]``: the candidate of each layer.
        dense: whether nothing is compressed.
        schemes: that can reduce it.
    """

    name: str
    choice: Int64s
    dense: bool
    schemes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class AutoForecast:
    """What ``auto`` would do.

    Args:
        predicted: of a step.
        choice: ``int64[L]``.
        compresses: whether it would.
        reasons: why, as in training.
        limits: on delay and noise, by which it decides.
    """

    predicted: Predicted
    choice: Int64s
    compresses: bool
    reasons: tuple[str, ...]
    limits: TimeLimits


@dataclass(frozen=True, slots=True)
class _World:
    """One opinion on what is not known.

    Args:
        share: of the steps that are at most as slow.
        cycle: seconds of a small operation that do not grow with the ranks.
        doubt: power of the network factor's own uncertainty.
    """

    share: float = 0.5
    cycle: float = CYCLE
    doubt: float = 0.0


_CENTRAL, _LOW, _HIGH = _World(), _World(0.25, math.inf, -0.5), _World(0.75, 0.0, 0.5)


class Predictor:
    """Predicts steps of the training run of a trace.

    Args:
        trace: of dense steps.
        rate: bits per second of the hosts' links, where that is another one.
        traced_rate: the same of those of the trace, where it is known: what operations made of these,
            they make of the others, too.

    Raises:
        ValueError: the trace is not of the planner ``auto``, has no timed steps, or is of one host
            and ``traced_rate`` of links between hosts.
    """

    def __init__(
        self, trace: StepTrace, rate: float | None = None, traced_rate: float | None = None
    ) -> None:
        recipe = parse(trace.recipe)
        if not isinstance(recipe, Accuracy):
            raise ValueError(f"a trace of {trace.recipe}: only auto's can be predicted from")
        if not trace.dense.seconds and not trace.measured.assumed:
            raise ValueError("the trace has no timed steps")
        if traced_rate is not None and trace.hosts == 1:
            raise ValueError(
                "the trace is of one host, without links between hosts: leave --traced-rate out"
            )
        self.trace, self.rate, self.traced_rate = trace, rate, traced_rate
        self._recipe = recipe
        self._start = np.array(
            [_first(specs, ("fp16", "none")) for specs in trace.signals.specs], np.int64
        )
        """What the dense steps sent."""
        self._fitted = functools.cache(self._fit)
        self._model = functools.cache(self.model)
        self._fastest_dense = functools.cache(self._dense_seconds)

    # --- what there is to predict -----------------------------------------------------------------

    @functools.cached_property
    def _costs(self) -> StepCosts:
        return self.trace.measured.step_costs()

    @functools.cached_property
    def methods(self) -> tuple[Method, ...]:
        """Dense ones, and each compressor at some levels."""
        found = []
        for spec, row in self._costs.compressors.items():
            schemes = tuple(each.name for each in row.schemes)
            if row.dense:
                choice = np.array([_first(specs, (spec, "none")) for specs in self.trace.signals.specs])
                found.append(Method(f"{spec} (dense)", choice.astype(np.int64), True, schemes))
                continue
            found += [Method(label, choice, False, schemes) for label, choice in self._levels(spec)]
        return tuple(sorted(found, key=lambda each: not each.dense))

    def _levels(self, spec: str) -> Iterator[tuple[str, Int64s]]:
        """Levels of a compressor near :data:`FACTORS`, as names and choices."""
        rows, ratios = self._of_largest(spec)
        if not rows:
            return
        near = [rows[int(np.abs(np.log(ratios / factor)).argmin())] for factor in FACTORS]
        for index in dict.fromkeys(near):
            level = _level(self.trace.table.labels[self._largest][index])
            yield f"{spec.partition(':')[0]} at {level:g}", self.uniform(spec, level)

    def uniform(self, spec: str, level: float) -> Int64s:
        """A choice: one level of a compressor for all layers, or the nearest that a layer has.

        Args:
            spec: of the compressor, as the trace has it.
            level: of the largest layer; others have the same, or one of about the same ratio.

        Raises:
            ValueError: the trace has no such compressor.
        """
        rows, ratios = self._of_largest(spec)
        if not rows:
            raise ValueError(f"no {spec!r}: there are {', '.join(self._costs.compressors)}")
        labels = self.trace.table.labels[self._largest]
        place = min(range(len(rows)), key=lambda each: abs(_level(labels[rows[each]]) - level))
        label, ratio = labels[rows[place]], float(ratios[place])
        choice = [self._at(layer, spec, label, ratio) for layer in range(len(self.trace.table.names))]
        return np.array(choice, np.int64)

    @functools.cached_property
    def _largest(self) -> int:
        """The layer with most elements."""
        return int(self.trace.signals.numel.argmax())

    def _of_largest(self, spec: str) -> tuple[list[int], Float64s]:
        """The largest layer's candidates of a compressor, and their compression ratios."""
        return self._candidates(self._largest, spec)

    def _candidates(self, layer: int, spec: str) -> tuple[list[int], Float64s]:
        signals = self.trace.signals
        rows = [index for index, each in enumerate(signals.specs[layer]) if each == spec]
        return rows, 4.0 * float(signals.numel[layer]) / np.maximum(1.0, signals.payloads[layer][rows])

    def _at(self, layer: int, spec: str, label: str, ratio: float) -> int:
        """A layer's candidate of this label, or of the nearest ratio; dense where it has none."""
        rows, ratios = self._candidates(layer, spec)
        same = [index for index in rows if self.trace.table.labels[layer][index] == label]
        if same or not rows:
            return same[0] if same else int(self._start[layer])
        return rows[int(np.abs(np.log(ratios / ratio)).argmin())]

    # --- seconds ----------------------------------------------------------------------------------

    def _fit(self, world: _World) -> StepModel:
        """The model that explains the dense steps, among the ranks that there were."""
        trace, signals = self.trace, self.trace.signals
        order = arrival_order(trace.buckets)
        assumed = trace.measured.compute_seconds if trace.measured.assumed else None
        seconds, computing = trace.dense.quantiles(world.share)
        compute = computing if assumed is None else assumed
        ready = trace.dense.ready(trace.buckets, signals.numel, order, compute)
        model = StepModel(
            self._costs, compute, ready, order, signals.numel, signals.specs, signals.payloads
        )
        return model if assumed is not None else calibrated(model, self._start, seconds, computing)

    def model(self, ranks: int, world: _World = _CENTRAL) -> StepModel:
        """Of a step with so many ranks, as many on each host as in the trace."""
        fitted = self._fitted(world)
        measured = self.trace.measured.at(ranks, world.cycle)
        if self.rate is not None:
            measured = measured.with_rate(self.rate, self.trace.ranks_per_host, self.traced_rate)
        doubt = max(fitted.network, 1 / fitted.network) ** world.doubt
        return replace(fitted, costs=measured.step_costs(), network=fitted.network * doubt)

    @property
    def network_factor(self) -> float:
        """By which the network is slower in dense steps than its operations are by themselves."""
        return self._fitted(_CENTRAL).network

    def seconds(self, choice: Int64s, ranks: int, scheme: str | None = None) -> Predicted:
        """Of a step in which every layer does what the choice says.

        Args:
            choice: ``int64[L]``.
            ranks: how many.
            scheme: of encoded payloads; None takes the fastest for each bucket.
        """
        seen = ranks == self.trace.ranks and self.rate is None and np.array_equal(choice, self._start)
        found = []
        for world in (_CENTRAL, _LOW, _HIGH):
            model = self.model(ranks, replace(world, doubt=0.0) if seen else world)
            if scheme is not None:
                model = replace(model, costs=_only(model.costs, scheme))
            found.append(model.seconds(choice))
        totals = [each.total for each in found]
        return Predicted(totals[0], min(totals), max(totals), found[0].exposed)

    def _dense_seconds(self, ranks: int) -> float:
        """Of the fastest dense step."""
        model = self._model(ranks)
        return min(model.seconds(each.choice).total for each in self.methods if each.dense)

    # --- what auto would do -----------------------------------------------------------------------

    def auto(self, ranks: int, step: int, horizon: int = 0) -> AutoForecast:
        """What ``auto`` would plan after so many dense steps among so many ranks.

        Args:
            ranks: how many.
            step: of the training run.
            horizon: steps of the whole run, where that is known.
        """
        budget, trace = self._recipe.budget(ranks), self.trace
        assert isinstance(budget, AutoBudget), budget
        model = self.model(ranks)
        parts = model.seconds(self._start)
        launches = _launches(model, trace.buckets)
        for _ in range(_SYNTHETIC):
            budget.observe(
                StepMeasurements(
                    step,
                    seconds=parts.total,
                    compute_seconds=parts.total - parts.exposed,
                    launches=launches,
                    horizon=horizon or None,
                )
            )
        signals = trace.signals.at(trace.ranks, ranks)
        facts = PlanningInput(step, trace.table, trace.buckets, signals=signals, costs=model.costs)
        budget.inform(facts)
        limits = budget.allow(trace.table)
        assert isinstance(limits, TimeLimits), limits
        best = limits.best
        reasons = budget.chosen(best.choice)
        return AutoForecast(
            self.seconds(best.choice, ranks), best.choice, not best.dense, reasons, limits
        )

    # --- from how many ranks on -------------------------------------------------------------------

    def hosts(self, most: int = MOST_RANKS) -> list[int]:
        """Numbers of hosts up to so many ranks, in steps of about a fifth."""
        found, most = [1], max(1, most // self.trace.ranks_per_host)
        while found[-1] < most:
            found.append(min(most, max(found[-1] + 1, round(1.2 * found[-1]))))
        return found

    def pays(
        self, method: Method, scheme: str | None = None, most: int = MOST_RANKS
    ) -> list[tuple[int, int]]:
        """From how many ranks to how many a method takes 2 % less than the fastest dense step.

        Args:
            method: one of :attr:`methods`.
            scheme: of encoded payloads; None takes the fastest for each bucket.
            most: ranks that are looked at.
        """
        each = self.trace.ranks_per_host
        ranks = [hosts * each for hosts in self.hosts(most) if hosts * each > 1]
        return spans(ranks, lambda number: self._pays(method, scheme, number))

    def _pays(self, method: Method, scheme: str | None, ranks: int) -> bool:
        model = self._model(ranks)
        costs = model.costs if scheme is None else _only(model.costs, scheme)
        seconds = replace(model, costs=costs).seconds(method.choice).total
        return seconds < (1 - LEAST_GAIN) * self._fastest_dense(ranks)


_SYNTHETIC = 16
"""Steps that a budget is shown: those after a switch do not count, and one would do."""


def spans(numbers: Sequence[int], holds: Callable[[int], bool]) -> list[tuple[int, int]]:
    """First and last number of each stretch in which something holds.

    Example:
        >>> spans([1, 2, 4, 8], lambda number: number != 2)
        [(1, 1), (4, 8)]
    """
    found: list[tuple[int, int]] = []
    running = False
    for number in numbers:
        now = holds(number)
        if now:
            found = [*found[:-1], (found[-1][0], number)] if running else [*found, (number, number)]
        running = now
    return found


def _launches(model: StepModel, buckets: Int64s) -> list[float]:
    """Seconds from each bucket's launch, when its last gradient is there, to the end of the pass."""
    found = np.full(int(buckets.max(initial=0)) + 1, np.inf)
    np.minimum.at(found, buckets, -model.ready)
    seconds: list[float] = np.where(np.isfinite(found), found, 0.0).tolist()
    return seconds


def _level(label: str) -> float:
    """Of a candidate, from its label."""
    return float(label.rpartition(" at ")[2])


def _first(specs: Sequence[str], wanted: Sequence[str]) -> int:
    """The place of the first of some compressors that a layer has."""
    found = [specs.index(each) for each in wanted if each in specs]
    if not found:
        raise ValueError(f"a layer has none of {', '.join(wanted)} among its candidates")
    return found[0]


def _only(costs: StepCosts, scheme: str) -> StepCosts:
    """Costs with one scheme of what is encoded."""
    rows = {
        spec: replace(
            row, schemes=tuple(each for each in row.schemes if each.name == scheme) or row.schemes
        )
        for spec, row in costs.compressors.items()
    }
    return replace(costs, compressors=rows)
