"""The protocol between ranks: measure, let rank 0 plan, and have all ranks switch at the same step.

::

    steps ... | trigger: the planner is due | averages of what was measured | thread on rank 0 | switch

Measurements are averaged over the ranks while the next step runs. A plan takes effect :data:`LAG` steps
after its trigger; a planner that needs longer delays the switch, and never a step. Whether to average
now and whether a plan is ready are votes that are sent with the gradients.

Ranks are those of the process set here.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter, thread_time
from typing import Any

import numpy as np
from torch import Tensor

from hvd_adaptive.adaptation.base import Assignment, Chain
from hvd_adaptive.adaptation.forecast import Forecast
from hvd_adaptive.adaptation.layer_samples import LayerSamples
from hvd_adaptive.adaptation.messages import (
    DecisionMessage,
    FailureMessage,
    Message,
    Votes,
    from_json,
)
from hvd_adaptive.adaptation.outlook import MeasureCosts, Outlook
from hvd_adaptive.adaptation.preconditioning import SecondMoment
from hvd_adaptive.adaptation.sampling import Sampler, check_ranges, with_averages
from hvd_adaptive.adaptation.schedule import Schedule
from hvd_adaptive.adaptation.step_report import StepReport
from hvd_adaptive.adaptation.timing import CollectiveTiming, local_measurements
from hvd_adaptive.adaptation.worker import PlannerWorker
from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.comm.control_channel import Channel, Pending
from hvd_adaptive.comm.failure import told_by, told_here
from hvd_adaptive.compressors.base import CodecState, Compressor, Level
from hvd_adaptive.layers import Layer
from hvd_adaptive.planning import (
    DENSE,
    CandidateTable,
    Decision,
    Measurement,
    Recipe,
    StepMeasurements,
)
from hvd_adaptive.planning.explanation import LastChoice
from hvd_adaptive.planning.plan import Expected
from hvd_adaptive.telemetry import Meter
from hvd_adaptive.telemetry.tags import in_milliseconds

LAG = 5
"""Steps from the trigger of a plan to the switch."""
_PLANNING_RANK = "rank 0 of the process set"
_LOGGER = logging.getLogger("hvd_adaptive")


class AdaptationController:
    """One optimizer's planner and what belongs to it; every rank has one.

    Args:
        recipe: of the planner.
        channel: carries averages and plans.
        meter: records what was decided.
        rank: of this process among those that take part.
        ranks: how many take part.
        alternatives: compressors whose levels are candidates in addition to those of a layer's own.
        states: what compressors have learned, by their ``state_key``.
        ranks_per_node: how many ranks share a node.
        measure_costs: measures compressors and network, for planners that foresee seconds.
    """

    plans = True

    def __init__(
        self,
        recipe: Recipe,
        channel: Channel,
        meter: Meter,
        rank: int,
        ranks: int,
        alternatives: Sequence[Compressor] = (),
        states: Mapping[Compressor, CodecState] | None = None,
        ranks_per_node: int = 1,
        measure_costs: MeasureCosts | None = None,
    ) -> None:
        self.recipe = recipe
        planner = recipe.planner(ranks)
        self._worker = PlannerWorker(planner)
        self._needs = planner.needs
        self._channel = channel
        self._meter = meter
        self._rank, self._first = rank, rank == 0
        self._ranks, self._ranks_per_node = ranks, ranks_per_node
        self._alternatives = tuple(alternatives)
        self._sampler = Sampler(
            recipe, planner.needs, planner.factors, ranks, {} if states is None else states
        )
        self.outlook = Outlook(measure_costs if Measurement.SIGNALS in planner.needs else None, planner)
        self.reasons: tuple[str, ...] = ()
        self._buckets: dict[str, int] = {}
        self._other_bytes = 0.0
        self._factor = 1.0
        self._decided = False
        self._levels: dict[str, int] = {}
        self._last_decision: tuple[tuple[int, ...], ...] = ()
        """The last decision's levels: a row that counts for all ranks, or a row for each."""
        self._sums: tuple[int, ...] = ()  # of sums that are compressed again, likewise
        self.expected: dict[str, Expected] = {}
        """What the last plan expects of every layer, where errors were measured."""
        self._forecast, self._last_choice = Forecast(meter), LastChoice()
        self._ended: float | None = None
        self.idle = True
        """Whether this is the dense warm-up, in which nothing is decided."""
        self._loaded: Mapping[str, Any] | None = None
        self._step = StepReport(planner.needs, channel, self._sampler, self._first)
        self._trigger: int | None = None
        self._averages: Pending | None = None
        self._table: Float64s | None = None

    # --- what there is to decide ------------------------------------------------------------------

    def attach(
        self,
        layers: Sequence[tuple[Layer, Compressor, str]],
        buckets: Mapping[str, int],
        other_bytes: float,
        dense_only: bool,
    ) -> None:
        """Plan for these layers.

        Args:
            layers: with their own compressors, and the scheme of what is encoded.
            buckets: their buckets' indices.
            other_bytes: that the layers which nobody plans for put on this rank's link in a step.
            dense_only: in the warm-up.

        Raises:
            ValueError: the planner asks for levels that no layer has; on all ranks.
        """
        self._buckets, self._other_bytes = dict(buckets), other_bytes
        self.idle = dense_only
        known = self._sampler.rows.values()
        if [(row.layer, row.own) for row in known] == [(layer, own) for layer, own, _ in layers]:
            for row, (_, _, scheme) in zip(known, layers, strict=True):
                row.use_scheme(scheme, self._ranks)
            return
        self.outlook.price([*(own for _, own, _ in layers), *self._alternatives])
        if self._averages is not None:
            self._averages()
        self._worker.wait()  # the planner must not plan and observe at once
        if self._sampler.rows:  # which were others
            self._worker.planner.renew()
        asked, twice = self.recipe.candidate_factors(), self._sampler.measures_beyond
        rows = [
            LayerSamples.of(*row, self._alternatives, self._ranks, self._ranks_per_node, asked, *twice)
            for row in layers
        ]
        check_ranges(self.recipe, rows)
        self._sampler.rows = {row.layer.name: row for row in rows}
        self._levels = {name: row.default for name, row in self._sampler.rows.items()}
        self._last_decision, self._sums, self.expected = (), (), {}
        # a plan of other layers is of no use
        self._averages = self._table = self._trigger = None
        self._worker.forget()
        self.outlook.plans = self._worker.planner.budget.plans
        self._sampler.schedule.sampled = 0
        self._restore()

    def invalidate(self) -> None:
        """Layers no longer do what the last plan gives them."""
        self._decided = False

    def assignments(self) -> dict[str, Assignment]:
        """What the last plan gives to every layer."""
        return self._sampler.assignments(self._levels)

    def sum_levels(self) -> dict[str, Level]:
        """Levels of sums that are compressed again, where they are not those of their layers."""
        return self._sampler.sum_levels(self._sums)

    # --- measuring --------------------------------------------------------------------------------

    def use_second_moments(self, of: Callable[[Layer], SecondMoment | None]) -> None:
        """Look the optimizer's second moment of a layer up by this."""
        self._sampler.second_moment = of

    @property
    def exact(self) -> bool:
        """Whether it decides on a step's gradients before they are sent."""
        return self._sampler.exact

    @property
    def per_rank_levels(self) -> bool:
        """Whether every rank has levels of its own."""
        return Measurement.PER_RANK_ERRORS in self._needs

    @property
    def sees_feedback(self) -> bool:
        """Whether it must see what feedback adds to the gradients."""
        return self._sampler.sees_feedback

    def observes(self, step: int) -> bool:
        """Whether :meth:`observe` wants to see the layers of this step."""
        return self._sampler.observes(step)

    def chain(self, layers: Sequence[Layer]) -> Chain | None:
        """See :meth:`Sampler.chain`."""
        return self._sampler.chain(layers)

    def observe(
        self, layer: Layer, grad: Tensor, x: Tensor, step: int, sent: Float64s | None = None
    ) -> None:
        """Measure one layer; arguments as of :meth:`Sampler.observe`."""
        started = perf_counter()
        self._sampler.observe(layer, grad, x, step, sent)
        self.outlook.spent += perf_counter() - started

    def learn(self) -> None:
        """Have the planner learn from the step before: its rank would only wait meanwhile."""
        last = self._step.complete()  # once all ranks have reported theirs
        if self._first:
            if last is not None:
                self._worker.add(last)
            self._guard(self._worker.learn)

    def end_step(
        self, step: int, learning_rate: float | None, timings: Sequence[CollectiveTiming]
    ) -> None:
        """A step's gradients have all been reduced; all ranks call it."""
        now = self._meter.now()
        self._sampler.schedule.sampled += self._sampler.samples(step)
        seconds = None if self._ended is None else now - self._ended
        self._ended = now
        self._forecast.step(step, seconds, timings)
        if self._step.wanted:
            self._report(step, seconds, learning_rate, timings)
        if self._averages is not None and self._trigger is not None and step > self._trigger:
            self._table, self._averages = self._averages(), None
        if self._first and self._table is not None:
            self._guard(partial(self._begin_plan, step, self._table))

    def _report(
        self,
        step: int,
        seconds: float | None,
        learning_rate: float | None,
        timings: Sequence[CollectiveTiming],
    ) -> None:
        """Have this step looked at."""
        known = {"factor": self._factor, **self.outlook.of_step()}
        if math.isfinite(samples := self._meter.samples_per_step):
            known["samples"] = samples
        times = tuple(timings)  # whose list is that of the next step soon
        facts = partial(local_measurements, step, seconds, learning_rate, times, self._needs, **known)
        self._step.begin(step, facts, times, self._decided)

    def report_loss(self, loss: float) -> None:
        """The training loss of this step; that of the rank that plans counts."""
        self.outlook.loss = loss

    def set_horizon(self, steps: int) -> None:
        """How many steps the whole training run has; what the rank that plans says counts."""
        self.outlook.horizon = steps

    # --- planning, on rank 0 ----------------------------------------------------------------------

    def _begin_plan(self, step: int, measured: Float64s) -> None:
        """Plan with this table, unless a plan is under way or has yet to be told."""
        if not self._worker.planning and self._worker.message is None:
            self._table = None
            self._worker.start(partial(self._plan, step, measured))

    def _plan(self, step: int, measured: Float64s) -> DecisionMessage:
        """The decision for all ranks, and what is expected of it."""
        start = thread_time()  # while this thread waits for a core, training has it
        if Measurement.PERIOD_ENERGY in self._needs:
            energy, steps = self._sampler.period(np.atleast_2d(measured).mean(axis=0))
            period = StepMeasurements(step, period_energy=energy, period_steps=steps)
            self._worker.planner.observe(period)
        buckets = np.array([self._buckets[name] for name in self._sampler.rows], dtype=np.int64)
        planner = self._worker.planner
        facts = self._sampler.planning_input(step, measured, buckets, self._other_bytes)
        decision = planner.plan(replace(facts, costs=self.outlook.costs))
        tables = facts.own if decision.own else (facts.table,)
        choices = decision.own or (decision.levels,)
        measured_errors = Measurement.ERRORS in self._needs
        seen = [(table, table.energies if measured_errors else np.zeros(0)) for table in tables]
        message = _message(decision, seen, choices, planner.factors, thread_time() - start)
        told = (self._last_decision, self._sums) if self._decided else ()
        return replace(message, changed=(message.levels, message.sums) != told)

    def _guard(self, work: Callable[[], None]) -> None:
        """Do some work on rank 0; its failure is reported to all ranks."""
        if not self._worker.guard(work):
            self._trigger = self._trigger or 0

    # --- the protocol -----------------------------------------------------------------------------

    def votes(self, step: int) -> Votes:
        """At the start of a step, what rank 0 asks all ranks to do at its end."""
        if not self._first or self.exact:
            return Votes()
        if self._worker.planned:
            self._guard(self._worker.conclude)
        in_time = self._trigger is not None and step >= self._trigger + LAG
        ready = self._worker.message is not None and (self._worker.failed or in_time)
        busy = self._trigger is not None or self.idle
        return Votes(not busy and self._worker.planner.due(step - 1), ready)

    def start_collection(self, step: int) -> None:
        """Start to average, or to gather, what was measured; all ranks call it."""
        schedule = self._sampler.schedule
        schedule.hurries = Measurement.ERRORS in self._needs and not schedule.sampled
        if schedule.hurries:
            return  # asked again when something was measured
        self._trigger, schedule.sampled = step, 0
        join = self._channel.gather if self.per_rank_levels else self._channel.mean
        self._averages = join(self._sampler.take())

    def apply_decision(self, step: int) -> dict[str, Assignment] | None:
        """Take over rank 0's decision; all ranks call it.

        Returns:
            What every layer does from the next step on; None where nothing changes.

        Raises:
            RuntimeError: the planner failed, on all ranks.
        """
        message = self._share()
        self._trigger = None
        assert message is not None, "rank 0 has voted for a plan, and has none"
        return self._use(message, step)

    def decide_before_launch(self, step: int) -> dict[str, Assignment] | None:
        """With all of this step's gains measured and nothing sent: plan at once, if that is due.

        Returns:
            What every layer does from this step on; None where nothing changes.
        """
        factors = self._sampler.factors
        averages = self._channel.mean(self._sampler.step_vector(step))
        gains = with_averages(StepMeasurements(step, factor=self._factor), factors, averages())
        table = self._channel.mean(self._sampler.take())()
        if self._first:
            self._guard(lambda: self._decide(step, gains, table))
        message = self._share()
        return None if message is None else self._use(message, step)

    def _decide(self, step: int, gains: StepMeasurements, table: Float64s) -> None:
        self._worker.observe_backlog()
        self._worker.planner.observe(gains)
        if not self.idle and self._worker.planner.due(step):
            self._worker.message = self._plan(step, table)

    def _share(self) -> Message | None:
        """Rank 0's message, on all ranks; None where it has none."""
        message = self._worker.take()
        text = self._channel.broadcast("" if message is None else message.to_json())
        return from_json(text) if text else None

    def _use(self, message: Message, step: int) -> dict[str, Assignment] | None:
        if isinstance(message, FailureMessage):
            failure = RuntimeError(f"the planner failed on {_PLANNING_RANK}: {message.error}")
            marked = told_here(failure) if self._first else told_by(_PLANNING_RANK, failure)
            raise marked from self._worker.failure
        self._last_decision, self._sums = message.levels, message.sums
        # a decision for other ranks, in a resumed run, has a row that all can use: the first
        mine = self._rank if len(message.levels) == self._ranks else 0
        names = list(self._sampler.rows)
        self._levels = dict(zip(names, message.levels[mine], strict=True))
        self.expected = _foreseen(names, message.errors[mine], message.energies[mine])
        self._factor = message.factor
        self._sampler.set_factors(message.factors, step)
        self._sampler.schedule.keep(int(message.report.get("patience", 1)), step)
        self._decided = True
        self.outlook.plans, self.outlook.decided = self.outlook.plans + 1, step
        self.outlook.spent += message.report.get("planner_seconds", 0.0)
        self.reasons = message.reasons
        if message.report.get("measure_again"):
            self.outlook.price_again()
        self._forecast.begin(message.report, step)
        _write_report(self._meter, message, step)
        if self._first and (news := self._last_choice.news(message.reasons)):
            _LOGGER.info("step %d: auto: %s", step, news)
        return self.assignments() if message.changed else None

    # --- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything between two steps; what is under way is waited for. All ranks call it."""
        if self._loaded is not None:
            return copy.deepcopy(dict(self._loaded))  # nothing has happened since
        self._worker.wait()
        self.learn()
        if self._averages is not None:
            self._table, self._averages = self._averages(), None
        message = self._worker.message
        return {
            "recipe": type(self.recipe).__name__,
            "planner": self._worker.planner.state_dict(),
            "levels": dict(self._levels),
            "told": [list(row) for row in self._last_decision],
            "sums": list(self._sums),
            "expected": dict(self.expected),
            "factor": self._factor,
            "decided": self._decided,
            "factors": list(self._sampler.factors),
            "factors_since": self._sampler.factors_since,
            "trigger": self._trigger,
            "message": None if message is None else message.to_json(),
            "table": None if self._table is None else self._table.tolist(),
            **self._sampler.schedule.to_dict(),
            "measured": self._sampler.measured(),
            "shares": self._sampler.shares(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`; layers that it does not know keep their default.

        Raises:
            ValueError: it is another planner's.
        """
        if state["recipe"] != type(self.recipe).__name__:
            raise ValueError(
                f"compression state is of the planner {state['recipe']}, this run has "
                f"{type(self.recipe).__name__}"
            )
        self._worker.planner.load_state_dict(state["planner"])
        self._factor = state["factor"]
        self._sampler.restore_factors(tuple(state["factors"]), int(state["factors_since"]))
        self.outlook.plans = self._worker.planner.budget.plans - (state["message"] is not None)
        self._loaded = state
        if self._sampler.rows:
            self._restore()

    def _restore(self) -> None:
        """Take what was loaded for the layers that there are."""
        state, self._loaded = self._loaded, None
        if state is None:
            return
        self._decided = bool(state["decided"])
        self._sampler.schedule = Schedule.from_dict(state)
        if list(state["levels"]) != list(self._sampler.rows):
            return  # of other layers: a table or plan of them is of no use
        self._trigger = state["trigger"]
        self._worker.message = None if state["message"] is None else from_json(state["message"])
        self._table = None if state["table"] is None else np.array(state["table"])
        self._levels = dict(state["levels"])
        self._last_decision, self._sums = tuple(map(tuple, state["told"])), tuple(state["sums"])
        self.expected = {name: tuple(pair) for name, pair in state["expected"].items()}
        self._sampler.restore(state["measured"], state.get("shares") or {})


def _write_report(meter: Meter, message: DecisionMessage, step: int) -> None:
    """Write a decision's figures and reasons."""
    for key, value in in_milliseconds(message.report).items():
        if np.isfinite(value):
            meter.scalar(f"plan/{key}", value, step)
    if message.reasons:
        meter.text("plan/reasons", "; ".join(message.reasons), step)


def _foreseen(
    names: Sequence[str], errors: Sequence[float], energies: Sequence[float]
) -> dict[str, Expected]:
    """Error and energy of the layers of which something was seen; no energies where none are known."""
    rows = zip(names, errors, energies, strict=False)
    return {name: (error, energy) for name, error, energy in rows if energy > 0}


def _message(
    decision: Decision,
    seen: Sequence[tuple[CandidateTable, Float64s]],
    choices: Sequence[Int64s],
    factors: Sequence[float],
    seconds: float,
) -> DecisionMessage:
    """What all ranks are to know of a decision.

    Args:
        decision: the planner's.
        seen: the table and the energies that each of the choices was made by.
        choices: of all ranks, or of each.
        factors: at which gains are measured from now on.
        seconds: of a core that the planner took.
    """
    message = DecisionMessage(
        levels=tuple(tuple(choice.tolist()) for choice in choices),
        changed=True,
        factor=decision.factor,
        factors=tuple(factors),
        report={**decision.report, "planner_seconds": seconds},
        reasons=tuple(decision.reasons),
        errors=tuple(
            _errors_at(table, choice) for (table, _), choice in zip(seen, choices, strict=True)
        ),
        energies=tuple(tuple(each.tolist()) for _, each in seen),
        sums=() if decision.sums is None else tuple(decision.sums.tolist()),
    )
    message.to_json()  # what cannot be sent must fail here, where it is reported to all ranks
    return message


def _errors_at(table: CandidateTable, choice: Int64s) -> tuple[float, ...]:
    """Squared error of every layer; a dense one has none."""
    return tuple(
        0.0 if index == DENSE else float(row[index])
        for row, index in zip(table.errors, choice, strict=True)
    )
