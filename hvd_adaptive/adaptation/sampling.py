"""What is measured of the layers that a planner decides on, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from hvd_adaptive.adaptation.base import Assignment, Chain
from hvd_adaptive.adaptation.candidates import sent_energies_of
from hvd_adaptive.adaptation.layer_samples import SIGNALS, LayerSamples
from hvd_adaptive.adaptation.preconditioning import SecondMoment, no_second_moment
from hvd_adaptive.adaptation.schedule import SAMPLES, Schedule
from hvd_adaptive.adaptation.sketch import Gradient
from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.compressors import format_spec
from hvd_adaptive.compressors.base import CodecState, Compressor, Level
from hvd_adaptive.layers import Layer
from hvd_adaptive.planning import (
    DENSE,
    CandidateTable,
    Measurement,
    PlanningInput,
    Recipe,
    StepMeasurements,
)
from hvd_adaptive.planning.gradient_signals import GradientSignals

NEW_FACTORS, GAINS_EVERY = 10, 10
"""Gains are measured on the first steps of new factors, and then on every tenth step: they take a pass
over all gradients, and change slowly."""


class Sampler:
    """Measures the layers as far as the planner asks for it.

    Args:
        recipe: of the planner.
        needs: what the planner asks for.
        factors: compression factors whose gains it wants.
        ranks: how many take part.
        states: what compressors have learned, by their ``state_key``.
    """

    def __init__(
        self,
        recipe: Recipe,
        needs: frozenset[Measurement],
        factors: tuple[float, ...],
        ranks: int,
        states: Mapping[Compressor, CodecState],
    ) -> None:
        self._recipe = recipe
        self._needs = needs
        self._ranks = ranks
        self._states = states
        self.rows: dict[str, LayerSamples] = {}
        """The layers, by name."""
        self.second_moment: Callable[[Layer], SecondMoment | None] = no_second_moment
        """The optimizer's second moment of a layer."""
        self.factors = factors
        """Compression factors whose gains are measured."""
        self.factors_since = 0
        """The first step of these factors."""
        self.schedule = Schedule()
        """The steps whose gradients count for the errors."""
        # asked for once a layer
        self.exact = Measurement.GAINS_BEFORE_SEND in needs
        """Whether the planner decides on a step's gradients before they are sent."""
        self.signals = Measurement.SIGNALS in needs
        """Whether the planner asks for signals."""
        # this step's sums over the layers: what each factor sends, and of what
        self._sent: Float64s = np.zeros(len(factors))
        self._whole = 0.0

    def assignments(self, levels: Mapping[str, int]) -> dict[str, Assignment]:
        """Compressor and level of the layers whose candidates are given by their index."""
        given: dict[str, Assignment] = {}
        for name, index in levels.items():
            chosen = self.rows[name].candidates[index]
            given[name] = (None, 0) if index == DENSE else (chosen.compressor, chosen.level)
        return given

    def sum_levels(self, sums: Sequence[int]) -> dict[str, Level]:
        """Levels of sums, whose candidates are given by their index, in the layers' order."""
        given = self.assignments(dict(zip(self.rows, sums, strict=False)))
        return {name: level for name, (compressor, level) in given.items() if compressor is not None}

    # --- when -------------------------------------------------------------------------------------

    @property
    def sees_feedback(self) -> bool:
        """Whether it must see what feedback adds to the gradients."""
        asking = {
            Measurement.GAINS,
            Measurement.GAINS_BEFORE_SEND,
            Measurement.SIGNALS,
        }
        varies = any(row.varying for row in self.rows.values()) or self._measures_what_is_sent
        return varies or bool(self._needs & asking)

    @property
    def measures_beyond(self) -> tuple[bool, bool]:
        """Whether layers are measured for signals, and on preconditioned gradients."""
        return self.signals, preconditions(self._recipe)

    def samples(self, step: int) -> bool:
        """Whether this step's gradients count for the errors."""
        if Measurement.ERRORS not in self._needs or self._recipe.accumulate:
            return Measurement.ERRORS in self._needs
        return self._is_sampled(step)

    def _is_sampled(self, step: int) -> bool:
        """Whether this step is one of the few of a period on which single gradients are measured."""
        return self.schedule.due(step, self._period)

    @property
    def _period(self) -> int:
        """Steps from one plan to the next."""
        return self._recipe.period or 10 * SAMPLES

    def measures_gains(self, step: int) -> bool:
        """Whether gains are measured in this step; the same on all ranks."""
        if self.exact:
            return True
        new = step < self.factors_since + NEW_FACTORS
        return Measurement.GAINS in self._needs and (new or step % GAINS_EVERY == 0)

    def averages(self, step: int) -> bool:
        """Whether all ranks average :meth:`step_vector` at the end of this step."""
        return not self.exact and self.measures_gains(step)

    def observes(self, step: int) -> bool:
        """Whether :meth:`observe` wants to see the layers of this step."""
        return self._sums_periods or self.measures_gains(step) or self.samples(step)

    @property
    def _sums_periods(self) -> bool:
        """Whether the norm of the sum of a period's gradients is wanted."""
        return Measurement.PERIOD_ENERGY in self._needs

    @property
    def _shares_sum(self) -> bool:
        """Whether that is the sum by which errors are measured, too, which is kept once.

        Not where errors are of what is compressed: its sum is another, because what feedback adds
        counts again in every step.
        """
        return (
            self._sums_periods
            and self._recipe.accumulate
            and Measurement.ERRORS in self._needs
            and not self._measures_what_is_sent
        )

    # --- measuring --------------------------------------------------------------------------------

    def chain(self, layers: Sequence[Layer]) -> Chain | None:
        """The levels of some layers at each factor whose gain is measured, from the smallest on.

        None where it decides on steps that have been sent, not on all of these layers, or between
        several compressors.
        """
        rows = [self.rows[layer.name] for layer in layers if layer.name in self.rows]
        if not self.exact or len(rows) < len(layers):
            return None
        chosen = [[row.candidates[index] for index in self._at_factors(row)] for row in rows]
        compressors = {each.compressor for row in chosen for each in row}
        levels = list(zip(*[[each.level for each in row] for row in chosen], strict=True))
        if len(compressors) != 1 or len(set(levels)) < len(levels):
            return None
        return compressors.pop(), levels

    def observe(
        self, layer: Layer, grad: Tensor, x: Tensor, step: int, sent: Float64s | None = None
    ) -> None:
        """Measure one layer.

        Args:
            layer: which.
            grad: this rank's gradient, 1-D float32.
            x: what is compressed: the gradient, with what feedback adds.
            step: number of the step.
            sent: ``float64[F]``: squared L2 norm of what it sends at each factor, where it was
                compressed as :meth:`chain` says; else that is estimated.
        """
        row = self.rows.get(layer.name)
        if row is None:
            return
        samples, seen = self.samples(step), None
        if samples and self.signals:
            seen = Gradient.seen(grad, x, layer.index, step)
        energy = float(grad @ grad) if seen is None else seen.energy
        if not np.isfinite(energy):
            return
        if samples:
            self._measure(row, (grad, energy), x, step, seen)
        if self._sums_periods and not self._shares_sum:
            row.add_to_period(grad)
        if self.factors and self.measures_gains(step):
            self._measure_gains(row, energy, x, sent)

    @property
    def _measures_what_is_sent(self) -> bool:
        """Whether errors are of what is compressed, with what feedback adds, and not of gradients."""
        return self._recipe.error_metric.residual or Measurement.ERRORS_OF_SENT in self._needs

    def _measure(
        self,
        row: LayerSamples,
        measured: tuple[Tensor, float],
        x: Tensor,
        step: int,
        seen: Gradient | None,
    ) -> None:
        """Measure errors and signals of a layer; ``measured`` is its gradient, with its energy."""
        tensor, energy = measured
        if self._measures_what_is_sent:
            tensor, energy = x, float(x @ x)
            if not np.isfinite(energy):
                return
        if not self._recipe.accumulate:
            row.forget_old_shares(step, self._period)
            row.sample(tensor, energy, x, self._states, self._moment_of(row))
            if seen is not None:
                row.sample_signals(seen, self.schedule.sampled % SAMPLES)
            return
        row.accumulate(tensor)
        if row.varying and self._is_sampled(step):  # the bytes of a mean are not the mean of the bytes
            row.sample_sizes(x, self._states)

    def _moment_of(self, row: LayerSamples) -> SecondMoment | None:
        return self.second_moment(row.layer) if preconditions(self._recipe) else None

    def _measure_gains(
        self, row: LayerSamples, energy: float, x: Tensor, sent: Float64s | None
    ) -> None:
        """Add what the layer sends at each factor: norms, or energies (``FEEDBACK_GAINS``)."""
        whole = float(x @ x)
        if not np.isfinite(whole):
            return
        if sent is None:
            chosen = [row.candidates[index] for index in self._at_factors(row)]
            sent = sent_energies_of(x, row.layer, chosen, self._states)
        if Measurement.FEEDBACK_GAINS in self._needs:
            self._sent += sent
            self._whole += whole
        else:
            self._sent += np.sqrt(sent)
            self._whole += energy**0.5

    def _at_factors(self, row: LayerSamples) -> list[int]:
        """The candidate at each factor; looked up once for the same factors."""
        if row.at_factors is None or row.at_factors[0] != self.factors:
            static = table_of_layers([row], [np.zeros(len(row.candidates))], [row.link_bytes])
            places = [int(static.at_factor(factor)[0]) for factor in self.factors]
            row.at_factors = (self.factors, places)
        return row.at_factors[1]

    def set_factors(self, factors: tuple[float, ...], step: int) -> None:
        """Measure gains at these factors from the step after this one on."""
        if factors != self.factors:
            self.factors_since = step + 1
        self.factors = factors
        self._sent = np.zeros(len(factors))

    # --- what was measured ------------------------------------------------------------------------

    def step_vector(self, step: int) -> Float64s:
        """Gain at each factor in this step, which is forgotten."""
        gains = self._sent / self._whole if self._whole else np.ones(len(self.factors))
        if not self.measures_gains(step):
            gains = np.full(len(self.factors), np.nan)
        self._sent, self._whole = np.zeros(len(self.factors)), 0.0
        return gains

    def take(self) -> Float64s:
        """What :meth:`LayerSamples.take` returns for all layers, one after the other.

        After that :meth:`LayerSamples.take_period` of all, if the planner asks for it.
        """
        rows = self.rows.values()
        # first of all: what errors are measured of is gone after that
        periods = [row.take_period(self._shares_sum) for row in rows] if self._sums_periods else []
        found = [row.take(self._states, self._moment_of(row)) for row in rows]
        return np.concatenate([np.zeros(0), *found, *periods])

    def period(self, measured: Float64s) -> tuple[Float64s, int]:
        """Squared norms of the layers' mean gradients of the period, and of how many steps.

        Args:
            measured: mean over the ranks of :meth:`take`, of a planner that asks for it.
        """
        rows = list(self.rows.values())
        sketches = measured[sum(len(row.sums) for row in rows) :]
        ends = np.cumsum([row.sketch_size + 1 for row in rows], dtype=np.int64)
        parts = np.split(sketches, ends)[: len(rows)]
        energies = np.array([part[:-1] @ part[:-1] for part in parts])
        return energies, round(max((part[-1] for part in parts), default=0.0))

    def planning_input(
        self, step: int, measured: Float64s, buckets: Int64s, other_bytes: float
    ) -> PlanningInput:
        """What a planner is given.

        Args:
            step: after which it plans.
            measured: mean over the ranks of :meth:`take`, or that of each as ``float64[ranks, n]``.
            buckets: ``int64[L]``: bucket of each layer.
            other_bytes: that other layers send.
        """
        everyone = np.atleast_2d(measured)
        mean = everyone.mean(axis=0)
        table = self.table(mean)
        # of as many ranks as there are now: a run may have been resumed with others
        own = everyone if len(everyone) == self._ranks > 1 else everyone[:0]
        return PlanningInput(
            step,
            table,
            buckets,
            other_bytes,
            tuple(self.table(each) for each in own),
            self.signals_of(mean),
            preconditioned=self.preconditioned(mean, table),
        )

    def table(self, measured: Float64s) -> CandidateTable:
        """The candidates' squared errors and bytes as a table, with the layers' energies.

        Args:
            measured: as of :meth:`take`, of this rank, of another one, or their mean.
        """
        errors, energies, sizes = [], [], []
        for row, part in self._parts(measured):
            count = len(row.candidates)
            errors.append(part[:count])
            energies.append(part[count])
            payloads = part[count + 1 : count + 1 + len(row.varying)]
            sizes.append(row.measured_link_bytes(payloads, self._ranks))
        return table_of_layers([*self.rows.values()], errors, sizes, energies)

    def preconditioned(self, measured: Float64s, table: CandidateTable) -> CandidateTable | None:
        """The table with what was measured on preconditioned gradients; None if a layer lacks that.

        Args:
            measured: as of :meth:`take`.
            table: what :meth:`table` makes of it.
        """
        if not preconditions(self._recipe):
            return None
        rows = [part[-len(row.candidates) - 1 :] for row, part in self._parts(measured)]
        energies = np.array([row[-1] for row in rows])
        if (energies[table.energies > 0] <= 0).any():
            return None
        return replace(table, errors=tuple(row[:-1] for row in rows), energies=energies)

    def _parts(self, measured: Float64s) -> Iterator[tuple[LayerSamples, Float64s]]:
        """Each layer's share of what :meth:`take` returns."""
        rows = list(self.rows.values())
        ends = np.cumsum([len(row.sums) for row in rows], dtype=np.int64)
        return zip(rows, np.split(measured, ends)[: len(rows)], strict=True)

    def signals_of(self, measured: Float64s) -> GradientSignals | None:
        """What else a planner asks for; None where it does not.

        Args:
            measured: mean over the ranks of :meth:`take`.
        """
        rows = list(self.rows.values())
        if not self.signals or not rows:
            return None
        ends = np.cumsum([len(row.sums) for row in rows], dtype=np.int64)
        parts = np.split(measured, ends[:-1])
        pairs = list(zip(rows, parts, strict=True))
        sketched = np.array([row.sketched(part) for row, part in pairs])
        return GradientSignals(
            energy=np.array([part[len(row.candidates)] for row, part in pairs]),
            mean_energy=sketched[:, 0],
            residual=sketched[:, 1],
            nonzero=np.array([part[-SAMPLES * SIGNALS - 1] for _, part in pairs]),
            numel=np.array([row.layer.numel for row in rows], dtype=np.int64),
            specs=tuple(row.traits.specs for row in rows),
            payloads=tuple(row.payloads(part) for row, part in pairs),
            unbiased=tuple(row.traits.unbiased for row in rows),
            densities=tuple(row.traits.densities for row in rows),
            projected=tuple(row.traits.projected for row in rows),
        )

    # --- state ------------------------------------------------------------------------------------

    def measured(self) -> dict[str, list[Any]]:
        """What was measured of each layer, and is in no plan yet."""
        return {
            name: [
                row.sums.tolist(),
                row.samples,
                row.sized,
                _copy(row.total),
                _copy(row.period),
                row.period_steps,
            ]
            for name, row in self.rows.items()
        }

    def shares(self) -> dict[str, list[Any]]:
        """The step in which errors of layers were measured, and their shares of the energy."""
        return {
            name: [row.shares_step, row.shares.tolist()]
            for name, row in self.rows.items()
            if row.shares is not None
        }

    def restore(
        self, measured: Mapping[str, Sequence[Any]], shares: Mapping[str, Sequence[Any]]
    ) -> None:
        """Continue from :meth:`measured` and :meth:`shares`."""
        for name, row in self.rows.items():
            sums, row.samples, row.sized, total, period, row.period_steps = measured[name]
            row.sums, row.total, row.period = np.array(sums), _copy(total), _copy(period)
            if name in shares:
                row.shares_step, row.shares = int(shares[name][0]), np.array(shares[name][1])
            if self._shares_sum:  # before, the same sum was kept twice
                row.period, row.period_steps = None, 0

    def restore_factors(self, factors: tuple[float, ...], since: int) -> None:
        """Measure gains at these factors, as since that step."""
        self.factors, self.factors_since = factors, since
        self._sent = np.zeros(len(factors))


def check_ranges(recipe: Recipe, rows: Iterable[LayerSamples]) -> None:
    """ValueError if the recipe asks for levels that no layer has.

    A small layer may have few: of the layers with the same compressors, the one counts whose
    compression factors span the most.
    """
    widest: dict[str, tuple[float, Float64s, float]] = {}
    for row in rows:
        factors = np.array(row.factors)
        span = float(factors.max() / factors.min())
        compressors = " or ".join(sorted({format_spec(each.compressor) for each in row.candidates}))
        if compressors not in widest or span > widest[compressors][0]:
            widest[compressors] = span, factors, float(factors[row.default])
    for compressors, (_, factors, default) in widest.items():
        recipe.check_range(compressors, factors, default)


def table_of_layers(
    rows: Sequence[LayerSamples],
    errors: Sequence[Float64s],
    sizes: Sequence[Float64s],
    energies: Sequence[float] | None = None,
) -> CandidateTable:
    """The candidates of some layers, with these errors, bytes and energies, as a table."""
    return CandidateTable.of(
        [row.layer.name for row in rows],
        errors,
        sizes,
        [row.labels for row in rows],
        [row.default for row in rows],
        [row.dense_link_bytes for row in rows],
        factors=[row.factors for row in rows],
        energies=energies,
        returned=[row.returned for row in rows],
    )


def preconditions(recipe: Recipe) -> bool:
    """Whether errors of preconditioned gradients are measured, too."""
    return recipe.error_metric.metric == "preconditioned"


def with_averages(
    facts: StepMeasurements, factors: Sequence[float], vector: Float64s
) -> StepMeasurements:
    """The step with the gains at these factors.

    Args:
        facts: the step.
        factors: at which gains were measured.
        vector: mean over the ranks of :meth:`Sampler.step_vector`.
    """
    return replace(facts, gains=dict(zip(factors, vector.tolist(), strict=True)))


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()
