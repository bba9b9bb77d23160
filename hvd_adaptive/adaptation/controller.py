"""The decision path: measures, lets the first rank plan, and has all ranks switch at the same step.

::

    steps ... | trigger: the planner is due | averages of what was measured | thread on rank 0 | switch

Measurements are averaged over the ranks while the next step goes on. A plan takes effect :data:`LAG`
steps after its trigger; a planner that needs longer delays the switch, and never a step. Whether to
average now and whether a plan is ready are votes that travel with the gradients.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from hvd_adaptive.adaptation.candidates import Candidate, candidates_of, errors_of, sizes_of
from hvd_adaptive.comm.control_channel import Channel, Pending
from hvd_adaptive.comm.excepthook import told_by
from hvd_adaptive.compressors import CastCompressor, Compressor, format_spec
from hvd_adaptive.compressors.base import CodecState, GatheredCompressor, Level
from hvd_adaptive.engine.exchange import CollectiveTiming
from hvd_adaptive.engine.routing import CompressionConfig, Expected
from hvd_adaptive.layers import Collective, Layer
from hvd_adaptive.planning import (
    DENSE,
    Measurement,
    PlanningInput,
    Recipe,
    StepMeasurements,
    Table,
    Transfer,
)
from hvd_adaptive.planning.measurements import Float64s, Int64s
from hvd_adaptive.planning.recipes import format_recipe
from hvd_adaptive.telemetry import Meter

LAG = 5
"""Steps from the trigger of a plan to the switch."""
SAMPLES = 4
"""Steps of a period on which errors are measured; the first is soon after the last plan."""
NEW, RARE = 10, 10
"""Gains are measured on the first so many steps of new factors, then on every so manieth: they take a
pass over all gradients, and change slowly."""
APART = 4
"""Steps from one of them to the next at least: a short period would measure every step."""


@dataclass(slots=True)
class _Row:
    """A layer that a planner decides on, and what was measured of it since the last plan."""

    layer: Layer
    own: Compressor
    candidates: tuple[Candidate, ...]
    default: int
    link_bytes: Float64s
    dense_link_bytes: float
    varying: tuple[int, ...]
    """The candidates whose bytes depend on the data."""
    sums: Float64s
    """Of the samples: the candidates' squared errors, the energy, and the bytes of those that vary."""
    samples: int = 0
    total: Tensor | None = None
    """Sum of the gradients, where they are accumulated; then nothing is in ``sums``."""
    at_factors: tuple[tuple[float, ...], list[int]] | None = None

    def sample(
        self, grad: Tensor, x: Tensor, energy: float, states: Mapping[Compressor, CodecState]
    ) -> None:
        """Measure the errors of one gradient, and the bytes of what is compressed."""
        errors = errors_of(grad, self.layer, self.candidates, states)
        varying = [self.candidates[index] for index in self.varying]
        sizes = sizes_of(x, self.layer, varying, states)
        self.sums += np.concatenate([errors, [energy], sizes])
        self.samples += 1

    def accumulate(self, grad: Tensor) -> None:
        """Add a gradient to those that are measured together."""
        self.total = grad.clone() if self.total is None else self.total.add_(grad)
        self.samples += 1

    def take(self, states: Mapping[Compressor, CodecState]) -> Float64s:
        """The means of what is in ``sums``; zeros where nothing finite was seen."""
        if self.total is not None:
            mean = self.total.div_(self.samples)
            self.forget()
            self.sample(mean, mean, float(mean @ mean), states)
        measured = self.sums / max(1, self.samples)
        self.forget()
        return measured

    def forget(self) -> None:
        """Begin anew."""
        self.sums, self.samples, self.total = np.zeros_like(self.sums), 0, None


Assignment: TypeAlias = tuple[Compressor | None, Level]
"""What a plan gives to one layer; no compressor means that it travels dense."""


class AdaptationController:
    """One optimizer's planner and what belongs to it; every rank has one.

    Args:
        recipe: of the planner.
        channel: carries averages and plans.
        meter: told what was decided.
        rank: of this process among those that take part.
        ranks: how many take part.
        alternatives: compressors whose levels are candidates beside those of a layer's own.
        states: what compressors have learnt, by their ``state_key``.
    """

    def __init__(
        self,
        recipe: Recipe,
        channel: Channel,
        meter: Meter,
        rank: int,
        ranks: int,
        alternatives: Sequence[Compressor] = (),
        states: Mapping[Compressor, CodecState] | None = None,
    ) -> None:
        self.recipe = recipe
        self._planner = recipe.planner(ranks)
        self._needs = self._planner.needs
        self._channel = channel
        self._meter = meter
        self._rank, self._first = rank, rank == 0
        self._ranks = ranks
        self._alternatives = tuple(alternatives)
        self._states = {} if states is None else states
        self._rows: dict[str, _Row] = {}
        self._buckets: dict[str, int] = {}
        self._other_bytes = 0.0
        self._factors: tuple[float, ...] = self._planner.factors
        self._factor = 1.0
        self._factors_since = 0
        self._decided = False
        self._levels: dict[str, int] = {}
        self._last_decision: list[list[int]] = []
        """The last decision's levels: a row that counts for all ranks, or a row for each."""
        self.expected: dict[str, Expected] = {}
        """Of every layer under the last plan, where errors were measured."""
        self._forecast = Forecast(meter)
        # this step's sums: energy of each layer, error at each factor, energy of what is compressed
        self._energy: dict[str, float] = {}
        self._lost: Float64s = np.zeros(len(self._factors))
        self._whole = 0.0
        self._ended: float | None = None
        self._sampled = 0
        self.idle = True
        """In the dense warm-up: nothing is decided."""
        self._loaded: Mapping[str, Any] | None = None
        # of the last step, and what completes it once all ranks have told theirs
        self._facts: (
            tuple[StepMeasurements, list[Callable[[StepMeasurements], StepMeasurements]]] | None
        ) = None
        self._backlog: list[StepMeasurements] = []
        self._trigger: int | None = None
        self._averages: Pending | None = None
        self._table: Float64s | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._future: Future[str] | None = None
        self._message: str | None = None
        self._failure: Exception | None = None

    # --- what there is to decide ------------------------------------------------------------------

    def attach(
        self,
        layers: Sequence[tuple[Layer, Compressor]],
        buckets: Mapping[str, int],
        other_bytes: float,
        dense_only: bool,
    ) -> None:
        """Plan for these layers.

        Args:
            layers: with their own compressors.
            buckets: their buckets' indices.
            other_bytes: that the layers which nobody plans for put on this rank's link in a step.
            dense_only: in the warm-up.
        """
        self._buckets, self._other_bytes = dict(buckets), other_bytes
        self.idle = dense_only
        if [(row.layer, row.own) for row in self._rows.values()] == list(layers):
            return
        if self._averages is not None:
            self._averages()
        if self._future is not None:
            self._future.exception()  # waits: the planner must not plan and observe at once
        self._rows = {layer.name: self._row(layer, own) for layer, own in layers}
        self._levels = {name: row.default for name, row in self._rows.items()}
        self._last_decision, self.expected = [], {}
        # a plan of other layers is of no use
        self._averages = self._table = self._trigger = self._message = self._future = None
        self._sampled = 0
        self._restore()

    def _row(self, layer: Layer, own: Compressor) -> _Row:
        candidates = candidates_of(layer, tuple(dict.fromkeys([own, *self._alternatives])))
        mine = [index for index, row in enumerate(candidates) if row.compressor == own]
        default = min(mine, key=lambda index: abs(candidates[index].level - own.level))
        sizes = np.array([link_bytes(row, layer, self._ranks) for row in candidates])
        dense = on_link(layer.nbytes, Collective.REDUCE, self._ranks)
        varying = tuple(i for i, each in enumerate(candidates) if each.compressor.size_varies)
        sums = np.zeros(len(candidates) + 1 + len(varying))
        return _Row(layer, own, candidates, default, sizes, dense, varying, sums)

    def invalidate(self) -> None:
        """Layers no longer do what the last plan gives them."""
        self._decided = False

    def assignments(self) -> dict[str, Assignment]:
        """What the last plan gives to every layer."""
        given: dict[str, Assignment] = {}
        for name, row in self._rows.items():
            index = self._levels[name]
            chosen = row.candidates[index]
            given[name] = (None, 0) if index == DENSE else (chosen.compressor, chosen.level)
        return given

    # --- measuring --------------------------------------------------------------------------------

    def samples(self, step: int) -> bool:
        """Whether this step's gradients count for the errors."""
        if Measurement.ERRORS not in self._needs or self.recipe.accumulate:
            return Measurement.ERRORS in self._needs
        period = self.recipe.period or 10 * SAMPLES
        return step % max(APART, period // SAMPLES) == 0

    @property
    def exact(self) -> bool:
        """Whether it decides on a step's gradients before they are sent."""
        return Measurement.GAINS_BEFORE_SEND in self._needs

    @property
    def per_rank_levels(self) -> bool:
        """Whether every rank has levels of its own."""
        return Measurement.PER_RANK_ERRORS in self._needs

    @property
    def sees_feedback(self) -> bool:
        """Whether it must see what feedback adds to the gradients."""
        varies = any(row.varying for row in self._rows.values())
        return varies or bool(self._needs & {Measurement.GAINS, Measurement.GAINS_BEFORE_SEND})

    def observes(self, step: int) -> bool:
        """Whether :meth:`observe` wants to see the layers of this step."""
        return Measurement.ENERGY in self._needs or self._measures_gains(step) or self.samples(step)

    def _measures_gains(self, step: int) -> bool:
        """Whether gains are measured in this step; the same on all ranks."""
        if self.exact:
            return True
        new = step < self._factors_since + NEW
        return Measurement.GAINS in self._needs and (new or step % RARE == 0)

    def observe(self, layer: Layer, grad: Tensor, x: Tensor, step: int) -> None:
        """Look at one layer.

        Args:
            layer: which.
            grad: this rank's gradient, 1-D float32.
            x: what is compressed: the gradient, with what feedback adds.
            step: number of the step.
        """
        row = self._rows.get(layer.name)
        if row is None:
            return
        energy = float(grad @ grad)
        if not np.isfinite(energy):
            return
        if self.samples(step) and self.recipe.accumulate:
            row.accumulate(grad)
        elif self.samples(step):
            row.sample(grad, x, energy, self._states)
        self._energy[layer.name] = energy
        if self._factors and self._measures_gains(step):
            self._measure_gains(row, x)

    def _measure_gains(self, row: _Row, x: Tensor) -> None:
        whole = float(x @ x)
        if not np.isfinite(whole):
            return
        indices = self._at_factors(row)
        chosen = [row.candidates[max(0, index)] for index in indices]
        errors = errors_of(x, row.layer, chosen, self._states)
        self._lost += np.where(np.array(indices) == DENSE, 0.0, errors)
        self._whole += whole

    def _at_factors(self, row: _Row) -> list[int]:
        """The candidate at each factor; looked up once for the same factors."""
        if row.at_factors is None or row.at_factors[0] != self._factors:
            static = self._make_table([row], [np.zeros(len(row.candidates))], [row.link_bytes])
            places = [int(static.at_factor(factor)[0]) for factor in self._factors]
            row.at_factors = (self._factors, places)
        return row.at_factors[1]

    def _make_table(
        self, rows: Sequence[_Row], errors: Sequence[Float64s], sizes: Sequence[Float64s]
    ) -> Table:
        return Table.of(
            [row.layer.name for row in rows],
            errors,
            sizes,
            [[label(candidate) for candidate in row.candidates] for row in rows],
            [row.default for row in rows],
            [row.dense_link_bytes for row in rows],
            factors=[
                [each.compressor.nominal_factor(each.level, row.layer) for each in row.candidates]
                for row in rows
            ],
        )

    # --- a step's end -----------------------------------------------------------------------------

    def end_step(
        self, step: int, learning_rate: float | None, timings: Sequence[CollectiveTiming]
    ) -> None:
        """A step's gradients have all been reduced; all ranks call it."""
        now = self._meter.now()
        self._sampled += self.samples(step)
        seconds = None if self._ended is None else now - self._ended
        self._ended = now
        self._forecast.step(step, seconds, timings)
        self._finish_previous_step()
        facts = _facts_of(step, seconds, learning_rate, timings, self._needs)
        if np.isfinite(samples := self._meter.samples_per_step):
            facts = replace(facts, samples=samples)
        completions: list[Callable[[StepMeasurements], StepMeasurements]] = []
        if not self.exact and (Measurement.ENERGY in self._needs or self._measures_gains(step)):
            averages = self._channel.mean(self._step_vector(step))
            completions.append(partial(_with_averages, factors=self._factors, averages=averages))
        if Measurement.TRANSFERS in self._needs:
            least = self._channel.least(_own_times(facts.compute_seconds, timings))
            traffic = [timing.traffic for timing in timings]
            completions.append(partial(_with_times, traffic=traffic, least=least))
        if self._needs & {Measurement.GAINS, Measurement.GAINS_BEFORE_SEND} and not self._decided:
            facts = replace(facts, seconds=None)  # of a factor that nobody chose
        self._facts = (replace(facts, factor=self._factor), completions)
        if self._averages is not None and self._trigger is not None and step > self._trigger:
            self._table, self._averages = self._averages(), None
        if self._first:
            self._guard(lambda: self._think(step))

    def _step_vector(self, step: int) -> Float64s:
        """Gain at each factor and energy of each layer in this step, which is forgotten."""
        gains = 1.0 - self._lost / self._whole if self._whole else np.ones(len(self._factors))
        if not self._measures_gains(step):
            gains = np.full(len(self._factors), np.nan)
        energy = [self._energy.get(name, 0.0) for name in self._rows]
        self._lost, self._whole, self._energy = np.zeros(len(self._factors)), 0.0, {}
        return np.concatenate([gains, energy])

    def _finish_previous_step(self) -> None:
        """Complete what is known of the step before this one; all ranks wait for each other's."""
        if self._facts is None:
            return
        facts, completions = self._facts
        self._facts = None
        for complete in completions:
            facts = complete(facts)
        if self._first:
            self._backlog.append(facts)

    def _think(self, step: int) -> None:
        """On the first rank: learn, and begin a plan once its table is there."""
        if self._future is not None:
            if not self._future.done():
                return  # the planner is at work: what is observed meanwhile waits
            self._conclude()
        self._observe_backlog()
        if self._table is not None and self._future is None and self._message is None:
            measured, self._table = self._table, None
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="hva-planner")
            self._future = self._pool.submit(self._plan, step, measured)

    def _plan(self, step: int, measured: Float64s) -> str:
        """What all ranks are told: the decision, and what is expected of it."""
        start = perf_counter()
        everyone = np.atleast_2d(measured)
        mean = self._table_of(everyone.mean(axis=0))
        # of as many ranks as there are now: a run may have been resumed with others
        own = [self._table_of(each) for each in everyone] if len(everyone) == self._ranks > 1 else []
        facts = PlanningInput(
            step, mean[0], self._bucket_array(), self._other_bytes, tuple(t for t, _ in own)
        )
        decision = self._planner.plan(facts)
        seen, choices = (own, decision.own) if decision.own else ([mean], (decision.levels,))
        levels = [choice.tolist() for choice in choices]
        # made here and not when it is sent, because what fails here is told to all ranks
        return json.dumps(
            {
                "levels": levels,
                "changed": not self._decided or levels != self._last_decision,
                "factor": decision.factor,
                "factors": list(self._planner.factors),
                "report": {**decision.report, "planner_seconds": perf_counter() - start},
                "reasons": list(decision.reasons),
                "errors": [
                    _errors_at(table, choice) for (table, _), choice in zip(seen, choices, strict=True)
                ],
                "energies": [
                    energies.tolist() if Measurement.ERRORS in self._needs else []
                    for _, energies in seen
                ],
            }
        )

    def _conclude(self) -> None:
        """Take what the planner decided."""
        assert self._future is not None
        self._message, self._future = self._future.result(), None

    def _guard(self, work: Callable[[], None]) -> None:
        """What fails on the first rank must reach the others, who would wait for it."""
        try:
            work()
        except Exception as error:
            self._future, self._failure = None, error
            self._message = json.dumps({"error": f"{type(error).__name__}: {error}"})
            self._trigger = self._trigger or 0

    # --- the protocol -----------------------------------------------------------------------------

    def votes(self, step: int) -> tuple[bool, bool]:
        """At the start of a step, what the first rank asks all to do at its end.

        Returns:
            Whether to average what was measured, and whether a plan is ready.
        """
        if not self._first or self.exact:
            return False, False
        if self._future is not None and self._future.done():
            self._guard(self._conclude)
        failed = self._message is not None and "error" in json.loads(self._message)
        in_time = self._trigger is not None and step >= self._trigger + LAG
        ready = self._message is not None and (failed or in_time)
        busy = self._trigger is not None or self.idle
        return not busy and self._planner.due(step - 1), ready

    def start_collection(self, step: int) -> None:
        """Start to average, or to gather, the tables of all ranks; all of them call it."""
        if Measurement.ERRORS in self._needs and not self._sampled:
            return  # asked again until something was measured
        self._trigger, self._sampled = step, 0
        join = self._channel.gather if self.per_rank_levels else self._channel.mean
        self._averages = join(self._take_measured())

    def apply_decision(self, step: int) -> dict[str, Assignment] | None:
        """Take over the first rank's decision; all ranks call it.

        Returns:
            What every layer does from the next step on; None where nothing changes.

        Raises:
            RuntimeError: the planner failed, on all ranks.
        """
        decided = self._share()
        self._trigger = None
        return self._use(decided, step)

    def decide_before_launch(self, step: int) -> dict[str, Assignment] | None:
        """With all of this step's gains measured and nothing sent: plan at once, if that is due.

        Returns:
            What every layer does from this step on; None where nothing changes.
        """
        averages = self._channel.mean(self._step_vector(step))
        gains = _with_averages(StepMeasurements(step, factor=self._factor), self._factors, averages)
        table = self._channel.mean(self._take_measured())()
        if self._first:
            self._guard(lambda: self._decide(step, gains, table))
        decided = self._share()
        return None if decided is None else self._use(decided, step)

    def _decide(self, step: int, gains: StepMeasurements, table: Float64s) -> None:
        self._observe_backlog()
        self._planner.observe(gains)
        if not self.idle and self._planner.due(step):
            self._message = self._plan(step, table)

    def _share(self) -> Any:
        """The first rank's message, on all ranks; None where it has none."""
        message, self._message = self._channel.broadcast(self._message or ""), None
        return json.loads(message) if message else None

    def _use(self, decided: dict[str, Any], step: int) -> dict[str, Assignment] | None:
        if "error" in decided:
            failure = RuntimeError(f"the planner failed on the first rank: {decided['error']}")
            raise (failure if self._first else told_by("the first rank", failure)) from self._failure
        self._last_decision = decided["levels"]
        # a decision for other ranks, in a resumed run, has a row that all can use: the first
        mine = self._rank if len(self._last_decision) == self._ranks else 0
        self._levels = dict(zip(self._rows, self._last_decision[mine], strict=True))
        foreseen = zip(decided["errors"][mine], decided["energies"][mine], strict=False)
        self.expected = {
            name: (error, energy)
            for name, (error, energy) in zip(self._rows, foreseen, strict=False)
            if energy > 0  # else nothing was seen of it
        }
        if tuple(decided["factors"]) != self._factors:
            self._factors_since = step + 1
        self._factor, self._factors = decided["factor"], tuple(decided["factors"])
        self._decided = True
        self._lost = np.zeros(len(self._factors))
        self._forecast.begin(decided["report"], step)
        for key, value in decided["report"].items():
            if np.isfinite(value):
                self._meter.scalar(f"plan/{key}", value, step)
        if decided["reasons"]:
            self._meter.text("plan/reasons", "; ".join(decided["reasons"]), step)
        return self.assignments() if decided["changed"] else None

    def _take_measured(self) -> Float64s:
        """Of all layers, one after the other: what :meth:`_Row.take` gives."""
        return np.concatenate([np.zeros(0), *(row.take(self._states) for row in self._rows.values())])

    def _table_of(self, measured: Float64s) -> tuple[Table, Float64s]:
        """The candidates' errors and bytes as a table, and the layers' energies."""
        rows = list(self._rows.values())
        ends = np.cumsum([len(row.sums) for row in rows], dtype=np.int64)
        parts = np.split(measured, ends[:-1])[: len(rows)]
        errors, energies, sizes = [], np.zeros(len(rows)), []
        for index, (row, part) in enumerate(zip(rows, parts, strict=True)):
            count = len(row.candidates)
            errors.append(part[:count])
            energies[index] = part[count]
            sizes.append(self._link_bytes(row, part[count + 1 :]))
        return self._make_table(rows, errors, sizes), energies

    def _link_bytes(self, row: _Row, measured: Float64s) -> Float64s:
        """Of a layer's candidates: those that vary as they were measured, where they were."""
        sizes = row.link_bytes.copy()
        for index, payload in zip(row.varying, measured, strict=True):
            if payload > 0:
                collective = row.candidates[index].compressor.collective
                sizes[index] = on_link(payload, collective, self._ranks)
        return sizes

    def _bucket_array(self) -> Any:
        return np.array([self._buckets[name] for name in self._rows], dtype=np.int64)

    # --- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything between two steps; what is under way is waited for. All ranks call it."""
        if self._loaded is not None:
            return copy.deepcopy(dict(self._loaded))  # nothing has happened since
        self._finish_previous_step()
        if self._averages is not None:
            self._table, self._averages = self._averages(), None
        if self._first and self._future is not None:
            self._guard(self._conclude)
        if self._first and self._future is None:
            self._guard(self._observe_backlog)
        return {
            "recipe": type(self.recipe).__name__,
            "planner": self._planner.state_dict(),
            "levels": dict(self._levels),
            "told": [list(row) for row in self._last_decision],
            "expected": dict(self.expected),
            "factor": self._factor,
            "decided": self._decided,
            "factors": list(self._factors),
            "factors_since": self._factors_since,
            "trigger": self._trigger,
            "message": self._message,
            "table": None if self._table is None else self._table.tolist(),
            "sampled": self._sampled,
            "measured": {
                name: [row.sums.tolist(), row.samples, _copy(row.total)]
                for name, row in self._rows.items()
            },
        }

    def _observe_backlog(self) -> None:
        for facts in self._backlog:
            self._planner.observe(facts)
        self._backlog.clear()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`; layers that it does not know keep their default.

        Raises:
            ValueError: it is another planner's.
        """
        if state["recipe"] != type(self.recipe).__name__:
            raise ValueError(
                f"compression state is of the planner {state['recipe']}, this run has "
                f"{type(self.recipe).__name__}"
            )
        self._planner.load_state_dict(state["planner"])
        self._factor, self._factors = state["factor"], tuple(state["factors"])
        self._factors_since = int(state["factors_since"])
        self._lost = np.zeros(len(self._factors))
        self._loaded = state
        if self._rows:
            self._restore()

    def _restore(self) -> None:
        """Take what was loaded for the layers that there are."""
        state, self._loaded = self._loaded, None
        if state is None:
            return
        self._sampled, self._decided = int(state["sampled"]), bool(state["decided"])
        if list(state["levels"]) != list(self._rows):
            return  # of other layers: a table or plan of them is of no use
        self._trigger, self._message = state["trigger"], state["message"]
        self._table = None if state["table"] is None else np.array(state["table"])
        self._levels = dict(state["levels"])
        self._last_decision = [list(row) for row in state["told"]]
        self.expected = {name: tuple(pair) for name, pair in state["expected"].items()}
        for name, row in self._rows.items():
            sums, row.samples, total = state["measured"][name]
            row.sums, row.total = np.array(sums), _copy(total)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


class Forecast:
    """What a plan was expected to cost, against what its steps cost.

    Both are written every :data:`TELL` steps, and when the plan ends.
    """

    TELL = 50

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._report: Mapping[str, float] = {}
        self._sums: dict[str, float] = {}
        self._steps = 0

    def begin(self, report: Mapping[str, float], step: int) -> None:
        """A plan takes effect after this step."""
        self._tell(step)
        self._report = report
        self._forget()

    def step(self, step: int, seconds: float | None, timings: Sequence[CollectiveTiming]) -> None:
        """One step under the plan."""
        if not self._report or seconds is None or not timings:
            return
        self._steps += 1
        costs = {
            "bytes": sum(timing.traffic for timing in timings),
            "seconds": seconds,
            "sync_seconds": span_of(timings),
        }
        for key, value in costs.items():
            self._sums[key] = self._sums.get(key, 0.0) + value
        if self._steps == self.TELL:
            self._tell(step)
            self._forget()

    def _tell(self, step: int) -> None:
        """The means since the last time, beside what was predicted of them."""
        for key, measured in self._sums.items():
            if key in self._report:
                self._meter.scalar(f"forecast/predicted_{key}", self._report[key], step)
                self._meter.scalar(f"forecast/measured_{key}", measured / self._steps, step)

    def _forget(self) -> None:
        self._sums, self._steps = {}, 0


def link_bytes(candidate: Candidate, layer: Layer, ranks: int) -> float:
    """Bytes that one rank's link carries in one direction for a layer (ring algorithms)."""
    compressor = candidate.compressor
    payload = compressor.wire_bytes(layer.numel, candidate.level, shape=layer.shape)
    return on_link(payload, compressor.collective, ranks)


def on_link(payload: float, collective: Collective, ranks: int) -> float:
    """Bytes that a link carries in one direction for a payload of one rank (ring algorithms)."""
    if ranks == 1:
        return float(payload)
    if collective is Collective.GATHER:
        return float(payload) * (ranks - 1)
    return payload * 2 * (ranks - 1) / ranks


def check_per_rank_levels(
    recipe: Recipe, choice: CompressionConfig, alternatives: Sequence[object] = ()
) -> None:
    """ValueError if ranks are to have levels of their own, which these compressors do not allow.

    A sum needs the same of all ranks; of what is gathered, each rank tells its levels with it, but not
    its compressors.
    """
    if Measurement.PER_RANK_ERRORS not in recipe.planner().needs:
        return
    summed = [
        each.name
        for each in choice.compressors
        if not isinstance(each, GatheredCompressor | CastCompressor)
    ]
    if summed or alternatives:
        raise ValueError(
            f"planner={format_recipe(recipe)!r} gives each rank levels of its own, which works with "
            "one compressor a layer whose payloads are gathered, such as topk or qsgd: "
            + (f"{summed[0]!r} is summed" if summed else "there are candidates")
            + "; write per_worker=false, or another compressor"
        )


def _errors_at(table: Table, choice: Int64s) -> list[float]:
    """Of every layer; a dense one has none."""
    return [
        0.0 if index == DENSE else float(row[index])
        for row, index in zip(table.errors, choice, strict=True)
    ]


def label(candidate: Candidate) -> str:
    """The same for the same setting in different layers."""
    return f"{format_spec(candidate.compressor)} at {candidate.level:g}"


def _with_averages(
    facts: StepMeasurements, factors: Sequence[float], averages: Pending
) -> StepMeasurements:
    """The step with the gains at these factors and the energies of all layers."""
    vector = averages()
    gains = dict(zip(factors, vector[: len(factors)].tolist(), strict=True))
    return replace(facts, gains=gains, energy=vector[len(factors) :])


def _facts_of(
    step: int,
    seconds: float | None,
    learning_rate: float | None,
    timings: Sequence[CollectiveTiming],
    needs: frozenset[Measurement],
) -> StepMeasurements:
    facts = StepMeasurements(step, seconds=seconds, learning_rate=learning_rate)
    if seconds is None or not timings:
        return facts
    exposed = sum(timing.exposed for timing in timings)
    facts = replace(facts, compute_seconds=max(0.0, seconds - exposed))
    if Measurement.BUCKETS in needs:
        nbytes = np.zeros(1 + max(timing.bucket for timing in timings))
        for timing in timings:
            nbytes[timing.bucket] += timing.traffic
        facts = replace(facts, bucket_bytes=nbytes, sync_seconds=span_of(timings))
    return facts


def span_of(timings: Sequence[CollectiveTiming]) -> float:
    """Seconds from the start of the first collective to the end of the last."""
    return max(timing.done for timing in timings) - min(timing.launched for timing in timings)


def _own_times(compute_seconds: float | None, timings: Sequence[CollectiveTiming]) -> Float64s:
    """Less this rank's computing time; then of all collectives together, and of each: seconds, twice.

    The second time they are infinite where this rank mostly did something else meanwhile. A rank's
    seconds hold those for which it waited until the last of the others joined, and until it saw the
    end. The rank that joins last computes longest and waits for nobody: so the least of these numbers
    over the ranks are what computing and collectives take.
    """
    times = [np.inf if compute_seconds is None else -compute_seconds]
    spans = [(span_of(timings), sum(timing.exposed for timing in timings))] if timings else []
    free = -np.inf
    for timing in timings:
        # collectives go one after the other, so one begins when the one before has ended
        spans.append((timing.done - max(timing.launched, free), timing.exposed))
        free = timing.done
    for seconds, exposed in spans:
        times += [seconds, seconds if exposed >= 0.5 * seconds > 0 else np.inf]
    return np.array(times)


def _with_times(facts: StepMeasurements, traffic: Sequence[int], least: Pending) -> StepMeasurements:
    """The step with its transfers and computing time, from the least of :func:`_own_times`."""
    computing, *times = least().tolist()
    known = [_known(*pair) for pair in zip(times[::2], times[1::2], strict=True)]
    transfers: list[Transfer] = []
    if known:
        together, *each = known
        # together, because the end of one is seen late where cores are busy, which shortens the next
        spans = [(sum(traffic), together)] if together < np.inf else zip(traffic, each, strict=True)
        transfers = [
            Transfer(nbytes, seconds) for nbytes, seconds in spans if nbytes > 0 and seconds < np.inf
        ]
    compute_seconds = None if computing == np.inf else max(0.0, -computing)
    nbytes = float(sum(traffic))
    return replace(facts, nbytes=nbytes, transfers=transfers, compute_seconds=compute_seconds)


def _known(seconds: float, waited: float) -> float:
    """The least seconds of all ranks, if a rank that took hardly longer did nothing but wait.

    Else the rank that joined last was busy, and those that waited did so for it, not for the network.
    """
    return waited if waited <= 1.25 * seconds else np.inf
