"""The decision path: measures, lets the first rank plan, and has all ranks switch at the same step.

::

    steps ... | trigger: the planner is due | averages of what was measured | thread on rank 0 | switch

Measurements are averaged over the ranks while the next step goes on. A plan takes effect :data:`LAG`
steps after its trigger; a planner that needs longer delays the switch, and never a step. Whether to
average now and whether a plan is ready are votes that travel with the gradients.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from hvd_adaptive.channel import Channel, Pending
from hvd_adaptive.compressors import Compressor, format_spec
from hvd_adaptive.compressors.base import CodecState, Level
from hvd_adaptive.compressors.candidates import Candidate, candidates_of, table_of
from hvd_adaptive.exchange import Trip
from hvd_adaptive.layers import Collective, Layer
from hvd_adaptive.planning import DENSE, Decision, Facts, Need, Recipe, StepFacts, Table, Transfer
from hvd_adaptive.planning.facts import Float64s
from hvd_adaptive.telemetry import Meter

LAG = 5
"""Steps from the trigger of a plan to the switch."""
SAMPLES = 8
"""Steps of a period on which errors are measured; the first is soon after the last plan."""


@dataclass(slots=True)
class _Row:
    """A layer that a planner decides on, and what was measured of it since the last plan."""

    layer: Layer
    own: Compressor
    candidates: tuple[Candidate, ...]
    default: int
    link_bytes: Float64s
    dense_link_bytes: float
    errors: Float64s
    samples: int = 0
    at_factors: tuple[tuple[float, ...], list[int]] | None = None

    def measured(self) -> Float64s:
        """Mean squared error of every candidate; zeros where nothing finite was seen."""
        return self.errors / max(1, self.samples)


Assignment: TypeAlias = tuple[Compressor | None, Level]
"""What a plan gives to one layer; no compressor means that it travels dense."""


class Pilot:
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
        self._first = rank == 0
        self._ranks = ranks
        self._alternatives = tuple(alternatives)
        self._states = {} if states is None else states
        self._rows: dict[str, _Row] = {}
        self._buckets: dict[str, int] = {}
        self._factors: tuple[float, ...] = self._planner.factors
        self._factor = 1.0
        self._decided = False
        self._levels: dict[str, int] = {}
        # this step's sums: energy of each layer, error at each factor, energy of what is compressed
        self._energy: dict[str, float] = {}
        self._lost: Float64s = np.zeros(len(self._factors))
        self._whole = 0.0
        self._ended: float | None = None
        self._sampled = 0
        self.idle = True
        """In the dense warm-up: nothing is decided."""
        self._loaded: Mapping[str, Any] | None = None
        # of the last step, whose averages are under way, and the factors whose gains they hold
        self._facts: tuple[StepFacts, Pending | None, tuple[float, ...]] | None = None
        self._backlog: list[StepFacts] = []
        self._trigger: int | None = None
        self._averages: Pending | None = None
        self._table: Float64s | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._future: Future[Decision] | None = None
        self._message: str | None = None

    # --- what there is to decide ------------------------------------------------------------------

    def attach(
        self, layers: Sequence[tuple[Layer, Compressor]], buckets: Mapping[str, int], dense_only: bool
    ) -> None:
        """Plan for these layers and their own compressors; ``buckets`` are their buckets' indices."""
        self._buckets = dict(buckets)
        self.idle = dense_only
        if [(row.layer, row.own) for row in self._rows.values()] == list(layers):
            return
        if self._averages is not None:
            self._averages()
        if self._future is not None:
            self._future.exception()  # waits: the planner must not plan and observe at once
        self._rows = {layer.name: self._row(layer, own) for layer, own in layers}
        self._levels = {name: row.default for name, row in self._rows.items()}
        # a plan of other layers is of no use
        self._averages = self._table = self._trigger = self._message = self._future = None
        self._sampled = 0
        self._go_on()

    def _row(self, layer: Layer, own: Compressor) -> _Row:
        candidates = candidates_of(layer, tuple(dict.fromkeys([own, *self._alternatives])))
        mine = [index for index, row in enumerate(candidates) if row.compressor == own]
        default = min(mine, key=lambda index: abs(candidates[index].level - own.level))
        sizes = np.array([link_bytes(row, layer, self._ranks) for row in candidates])
        dense = layer.nbytes * (2 * (self._ranks - 1) / self._ranks if self._ranks > 1 else 1)
        return _Row(layer, own, candidates, default, sizes, dense, np.zeros(len(candidates)))

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
        """Whether errors are measured in this step."""
        period = self.recipe.period or 10 * SAMPLES
        return Need.ERRORS in self._needs and step % max(1, period // SAMPLES) == 0

    @property
    def exact(self) -> bool:
        """Whether it decides on a step's gradients before they are sent."""
        return Need.GAINS_FIRST in self._needs

    @property
    def sees_feedback(self) -> bool:
        """Whether it must see what feedback adds to the gradients."""
        return bool(self._needs & {Need.GAINS, Need.GAINS_FIRST})

    def watches(self, step: int) -> bool:
        """Whether :meth:`measure` wants to see the layers of this step."""
        return bool(self._needs & {Need.ENERGY, Need.GAINS, Need.GAINS_FIRST}) or self.samples(step)

    def measure(self, layer: Layer, grad: Tensor, x: Tensor, step: int) -> None:
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
        if self.samples(step):
            row.errors += table_of(grad, layer, row.candidates, self._states)[0]
            row.samples += 1
        self._energy[layer.name] = energy
        if self._factors:
            self._measure_gains(row, x)

    def _measure_gains(self, row: _Row, x: Tensor) -> None:
        whole = float(x @ x)
        if not np.isfinite(whole):
            return
        indices = self._at_factors(row)
        chosen = [row.candidates[max(0, index)] for index in indices]
        errors = table_of(x, row.layer, chosen, self._states)[0]
        self._lost += np.where(np.array(indices) == DENSE, 0.0, errors)
        self._whole += whole

    def _at_factors(self, row: _Row) -> list[int]:
        """The candidate at each factor; looked up once for the same factors."""
        if row.at_factors is None or row.at_factors[0] != self._factors:
            static = self._make_table([row], [np.zeros(len(row.candidates))])
            places = [int(static.at_factor(factor)[0]) for factor in self._factors]
            row.at_factors = (self._factors, places)
        return row.at_factors[1]

    def _make_table(self, rows: Sequence[_Row], errors: Sequence[Float64s]) -> Table:
        return Table.of(
            [row.layer.name for row in rows],
            errors,
            [row.link_bytes for row in rows],
            [[label(candidate) for candidate in row.candidates] for row in rows],
            [row.default for row in rows],
            [row.dense_link_bytes for row in rows],
            factors=[
                [nominal_factor(candidate, row.layer) for candidate in row.candidates] for row in rows
            ],
        )

    # --- a step's end -----------------------------------------------------------------------------

    def end_step(self, step: int, learning_rate: float | None, trips: Sequence[Trip]) -> None:
        """A step's gradients have all been reduced; all ranks call it."""
        now = perf_counter()
        self._sampled += self.samples(step)
        seconds = None if self._ended is None else now - self._ended
        self._ended = now
        self._tell_last()
        facts = _facts_of(step, seconds, learning_rate, trips, self._needs)
        averages = None
        if not self.exact and self._needs & {Need.GAINS, Need.ENERGY}:
            averages = self._channel.mean(self._step_vector())
        if self._needs & {Need.GAINS, Need.GAINS_FIRST} and not self._decided:
            facts = replace(facts, seconds=None)  # of a factor that nobody chose
        self._facts = (replace(facts, factor=self._factor), averages, self._factors)
        if self._averages is not None and self._trigger is not None and step > self._trigger:
            self._table, self._averages = self._averages(), None
        if self._first:
            self._guard(lambda: self._think(step))

    def _step_vector(self) -> Float64s:
        """Gain at each factor and energy of each layer in this step, which is forgotten."""
        gains = 1.0 - self._lost / self._whole if self._whole else np.ones(len(self._factors))
        energy = [self._energy.get(name, 0.0) for name in self._rows]
        self._lost, self._whole, self._energy = np.zeros(len(self._factors)), 0.0, {}
        return np.concatenate([gains, energy])

    def _tell_last(self) -> None:
        """Complete what is known of the step before this one; all ranks wait for its averages."""
        if self._facts is None:
            return
        facts, averages, factors = self._facts
        self._facts = None
        if averages is not None:
            facts = _with_averages(facts, factors, averages())
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
            facts_now = Facts(step, self._table_of(self._table), self._bucket_array())
            self._table = None
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix="hva-planner")
            self._future = self._pool.submit(self._timed_plan, facts_now)

    def _timed_plan(self, facts: Facts) -> Decision:
        start = perf_counter()
        decision = self._planner.plan(facts)
        return replace(decision, report={**decision.report, "planner_seconds": perf_counter() - start})

    def _conclude(self) -> None:
        """Make a message of what the planner decided."""
        assert self._future is not None
        decision, self._future = self._future.result(), None
        self._message = self._to_message(decision)

    def _to_message(self, decision: Decision) -> str:
        # here and not when it is sent, because what fails here is told to all ranks
        return json.dumps(
            {
                "levels": decision.levels.tolist(),
                "factor": decision.factor,
                "factors": list(self._planner.factors),
                "report": decision.report,
                "reasons": list(decision.reasons),
            }
        )

    def _guard(self, work: Callable[[], None]) -> None:
        """What fails on the first rank must reach the others, who would wait for it."""
        try:
            work()
        except Exception as error:
            self._future = None
            self._message = json.dumps({"error": f"{type(error).__name__}: {error}"})
            self._trigger = self._trigger or 0

    # --- the protocol -----------------------------------------------------------------------------

    def wants(self, step: int) -> tuple[bool, bool]:
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

    def collect(self, step: int) -> None:
        """Start to average the tables of all ranks; all of them call it."""
        if Need.ERRORS in self._needs and not self._sampled:
            return  # asked again until something was measured
        self._trigger, self._sampled = step, 0
        rows = self._rows.values()
        self._averages = self._channel.mean(self._measured())
        for row in rows:
            row.errors, row.samples = np.zeros(len(row.candidates)), 0

    def adopt(self, step: int) -> dict[str, Assignment]:
        """Take over the first rank's decision; all ranks call it.

        Raises:
            RuntimeError: the planner failed, on all ranks.
        """
        decided = self._share()
        self._trigger = None
        return self._use(decided, step)

    def decide_now(self, step: int) -> dict[str, Assignment] | None:
        """With all of this step's gains measured and nothing sent: plan at once, if that is due.

        Returns:
            What every layer does from this step on; None where nothing changes.
        """
        vector = self._channel.mean(self._step_vector())()
        table = self._channel.mean(self._measured())()
        if self._first:
            self._guard(lambda: self._decide(step, vector, table))
        decided = self._share()
        return None if decided is None else self._use(decided, step)

    def _decide(self, step: int, vector: Float64s, table: Float64s) -> None:
        self._observe_backlog()
        self._planner.observe(
            _with_averages(StepFacts(step, factor=self._factor), self._factors, vector)
        )
        if not self.idle and self._planner.due(step):
            decision = self._timed_plan(Facts(step, self._table_of(table), self._bucket_array()))
            self._message = self._to_message(decision)

    def _share(self) -> Any:
        """The first rank's message, on all ranks; None where it has none."""
        message, self._message = self._channel.broadcast(self._message or ""), None
        return json.loads(message) if message else None

    def _use(self, decided: dict[str, Any], step: int) -> dict[str, Assignment]:
        if "error" in decided:
            raise RuntimeError(f"the planner failed on the first rank: {decided['error']}")
        self._levels = dict(zip(self._rows, decided["levels"], strict=True))
        self._factor, self._factors = decided["factor"], tuple(decided["factors"])
        self._decided = True
        self._lost = np.zeros(len(self._factors))
        for key, value in decided["report"].items():
            if np.isfinite(value):
                self._meter.scalar(f"plan/{key}", value, step)
        if decided["reasons"]:
            self._meter.text("plan/reasons", "; ".join(decided["reasons"]), step)
        return self.assignments()

    def _measured(self) -> Float64s:
        """The errors of all layers' candidates, one after the other."""
        return np.concatenate([np.zeros(0), *(row.measured() for row in self._rows.values())])

    def _table_of(self, flat: Float64s) -> Table:
        rows = list(self._rows.values())
        cuts = np.cumsum([len(row.candidates) for row in rows])[:-1]
        return self._make_table(rows, np.split(flat, cuts))

    def _bucket_array(self) -> Any:
        return np.array([self._buckets[name] for name in self._rows], dtype=np.int64)

    # --- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything between two steps; what is under way is waited for. All ranks call it."""
        self._tell_last()
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
            "factor": self._factor,
            "decided": self._decided,
            "factors": list(self._factors),
            "trigger": self._trigger,
            "message": self._message,
            "table": None if self._table is None else self._table.tolist(),
            "sampled": self._sampled,
            "measured": {name: [row.errors.tolist(), row.samples] for name, row in self._rows.items()},
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
        self._lost = np.zeros(len(self._factors))
        self._loaded = state
        if self._rows:
            self._go_on()

    def _go_on(self) -> None:
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
        for name, row in self._rows.items():
            errors, row.samples = state["measured"][name]
            row.errors = np.array(errors)


def link_bytes(candidate: Candidate, layer: Layer, ranks: int) -> float:
    """Bytes that one rank's link carries in one direction for a layer (ring algorithms)."""
    compressor = candidate.compressor
    payload = compressor.wire_bytes(layer.numel, candidate.level, shape=layer.shape)
    if ranks == 1:
        return float(payload)
    if compressor.collective is Collective.GATHER:
        return float(payload) * (ranks - 1)
    return payload * 2 * (ranks - 1) / ranks


def nominal_factor(candidate: Candidate, layer: Layer) -> float:
    """Compression factor as the papers count it: 100 for a density of 1 %, 8 for 4 bits."""
    if hasattr(candidate.compressor, "density"):
        return 1.0 / float(candidate.level)
    payload = candidate.compressor.wire_bytes(layer.numel, candidate.level, shape=layer.shape)
    return layer.nbytes / max(1, payload)


def label(candidate: Candidate) -> str:
    """The same for the same setting in different layers."""
    return f"{format_spec(candidate.compressor)} at {candidate.level:g}"


def _with_averages(facts: StepFacts, factors: Sequence[float], vector: Float64s) -> StepFacts:
    """The step with the gains at these factors and the energies of all layers."""
    gains = dict(zip(factors, vector[: len(factors)].tolist(), strict=True))
    return replace(facts, gains=gains, energy=vector[len(factors) :])


def _facts_of(
    step: int,
    seconds: float | None,
    learning_rate: float | None,
    trips: Sequence[Trip],
    needs: frozenset[Need],
) -> StepFacts:
    facts = StepFacts(step, seconds=seconds, learning_rate=learning_rate)
    if seconds is None or not trips:
        return facts
    exposed = sum(trip.exposed for trip in trips)
    facts = replace(facts, compute_seconds=max(0.0, seconds - exposed))
    if Need.TRANSFERS in needs:
        facts = replace(facts, transfers=_transfers(trips))
    if Need.BUCKETS in needs:
        nbytes = np.zeros(1 + max(trip.bucket for trip in trips))
        for trip in trips:
            nbytes[trip.bucket] += trip.traffic
        span = max(trip.done for trip in trips) - min(trip.launched for trip in trips)
        facts = replace(facts, bucket_bytes=nbytes, sync_seconds=span)
    return facts


def _transfers(trips: Sequence[Trip]) -> list[Transfer]:
    """Collectives whose own time is known: those that training mostly waited for.

    Collectives go one after the other, so one begins when the one before has ended.
    """
    found, free = [], -np.inf
    for trip in sorted(trips, key=lambda trip: trip.done):
        seconds = trip.done - max(trip.launched, free)
        free = trip.done
        if trip.traffic > 0 and seconds > 0 and trip.exposed >= 0.5 * seconds:
            found.append(Transfer(trip.traffic, seconds))
    return found
