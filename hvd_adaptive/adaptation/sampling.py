"""What is measured of the layers that a planner decides on, and when."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hvd_adaptive.adaptation.base import Assignment, Chain
from hvd_adaptive.adaptation.candidates import (
    Candidate,
    candidates_of,
    errors_of,
    sent_energies_of,
    short_spec,
    sizes_of,
)
from hvd_adaptive.adaptation.preconditioning import SecondMoment, no_second_moment
from hvd_adaptive.adaptation.schedule import SAMPLES, Schedule
from hvd_adaptive.adaptation.sketch import NUMBERS, SKETCH, Gradient, sketch
from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.collectives import AUTO, planned_link_bytes, scheme_for, scheme_named
from hvd_adaptive.compressors import format_spec
from hvd_adaptive.compressors.base import CodecState, Compressor, GatheredCompressor, Level
from hvd_adaptive.layers import Layer, PayloadKind
from hvd_adaptive.planning import (
    DENSE,
    CandidateTable,
    Measurement,
    PlanningInput,
    Recipe,
    StepMeasurements,
)
from hvd_adaptive.planning.gradient_signals import GradientSignals

SIGNALS = 1 + 2 * NUMBERS
"""What is kept of a sample for a planner that asks for signals: a mark, and sketches of the gradient
and of what waits."""
NEW_FACTORS, GAINS_EVERY = 10, 10
"""Gains are measured on the first steps of new factors, and then on every tenth step: they take a pass
over all gradients, and change slowly."""


@dataclass(frozen=True, slots=True, eq=False)
class Traits:
    """What is fixed of a layer's candidates, for planners that ask for signals.

    Args:
        specs: their compressors, as text.
        payloads: ``float64[C]``: bytes that one rank sends.
        unbiased: ``bool[C]``.
        densities: ``float64[C]``: share of the elements, or of the dimensions, that is sent; 1 where
            all are, if rounded, and where chance selects them.
        projected: ``bool[C]``: whether it is a share of the dimensions.
    """

    specs: tuple[str, ...]
    payloads: Float64s
    unbiased: npt.NDArray[np.bool_]
    densities: Float64s
    projected: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, layer: Layer, candidates: Sequence[Candidate]) -> Traits:
        """Of these candidates."""
        specs = {each: short_spec(each) for each in {row.compressor for row in candidates}}
        densities = [
            min(1.0, 1 / row.nominal_factor(layer))
            if row.compressor.selects or row.compressor.projects
            else 1.0
            for row in candidates
        ]
        return cls(
            tuple(specs[row.compressor] for row in candidates),
            np.array([float(row.payload_bytes(layer)) for row in candidates]),
            np.array([not row.compressor.biased for row in candidates]),
            np.array(densities),
            np.array([row.compressor.projects for row in candidates]),
        )


@dataclass
class LayerSamples:
    """A layer that a planner decides on, and what was measured of it since the last plan.

    Args:
        layer: the layer.
        own: its own compressor.
        candidates: levels of this compressor and of the alternatives.
        default: index of the candidate that the user has chosen.
        link_bytes: ``float64[C]``: bytes of each candidate on this rank's link.
        dense_link_bytes: the same of the dense gradient.
        varying: indices of the candidates whose bytes depend on the data.
        sums: over the samples: squared errors of the candidates, energy, bytes of those that vary;
            where the planner asks for signals then the share of elements that are not 0, and
            :data:`SIGNALS` numbers for each of the last :data:`SAMPLES` samples; where it asks for
            preconditioned gradients, squared errors and energy of these.
        samples: how many gradients have been measured, or added up in ``total``.
        sized: how many have been measured for their bytes.
        total: sum of the gradients, where they are accumulated; then no errors are in ``sums``.
        period: sum of all gradients since the last plan, where the planner asks for its norm and
            ``total`` is not that sum.
        period_steps: how many these are.
        at_factors: compression factors, and the index of the candidate at each.
        ranks_per_node: how many ranks share a node.
        signals: whether the planner asks for signals.
        shares: ``float64[C]``: the candidates' squared errors as shares of the gradient's energy; with
            signals alone.
        shares_step: the step in which they were measured.
    """

    layer: Layer
    own: Compressor
    scheme: str
    candidates: tuple[Candidate, ...]
    default: int
    link_bytes: Float64s
    dense_link_bytes: float
    varying: tuple[int, ...]
    sums: Float64s
    samples: int = 0
    sized: int = 0
    total: Tensor | None = None
    period: Tensor | None = None
    period_steps: int = 0
    at_factors: tuple[tuple[float, ...], list[int]] | None = None
    ranks_per_node: int = 1
    signals: bool = False
    shares: Float64s | None = None
    shares_step: int = 0

    @classmethod
    def of(
        cls,
        layer: Layer,
        own: Compressor,
        scheme: str,
        alternatives: Sequence[Compressor],
        ranks: int,
        ranks_per_node: int = 1,
        factors: Sequence[float] = (),
        signals: bool = False,
        preconditions: bool = False,
    ) -> LayerSamples:
        """Nothing has been measured yet; ``factors`` as of :func:`candidates_of`."""
        candidates = candidates_of(layer, tuple(dict.fromkeys([own, *alternatives])), factors)
        mine = [index for index, row in enumerate(candidates) if row.compressor == own]
        default = min(mine, key=lambda index: abs(candidates[index].level - own.level))
        sizes = np.array([row.link_bytes(layer, ranks, scheme, ranks_per_node) for row in candidates])
        dense = planned_link_bytes(layer.nbytes, scheme_for(PayloadKind.SUMMABLE), ranks)
        varying = tuple(i for i, each in enumerate(candidates) if each.compressor.size_varies)
        sums = np.zeros(measured_numbers(candidates, signals, preconditions))
        return cls(
            layer, own, scheme, candidates, default, sizes, dense, varying, sums,
            ranks_per_node=ranks_per_node, signals=signals,
        )  # fmt: skip

    def use_scheme(self, scheme: str, ranks: int) -> None:
        """Count with another scheme of what is encoded from now on."""
        if scheme != self.scheme:
            self.scheme = scheme
            self.link_bytes = np.array(
                [
                    row.link_bytes(self.layer, ranks, scheme, self.ranks_per_node)
                    for row in self.candidates
                ]
            )

    @property
    def returned(self) -> float:
        """Share of the layer's bytes that are sums, which may be compressed at a level of their own.

        0 unless all candidates are levels of one compressor, whose payloads the scheme recompresses at
        the level of the layer.
        """
        if self.scheme == AUTO:
            return 0.0
        scheme, families = scheme_named(self.scheme), {each.compressor for each in self.candidates}
        one = len(families) == 1 and isinstance(self.own, GatheredCompressor)
        return scheme.returned if one and not scheme.level else 0.0

    def sample(
        self,
        tensor: Tensor,
        energy: float,
        x: Tensor,
        states: Mapping[Compressor, CodecState],
        moment: SecondMoment | None = None,
    ) -> None:
        """Measure the errors of one tensor, and the bytes of what is compressed.

        With signals the errors are those of ``shares``, where these are known: to measure them takes
        longer than all else together, and they change slowly.

        Args:
            tensor: the gradient, or ``x``.
            energy: its squared norm.
            x: what is compressed.
            states: what compressors have learned, by their ``state_key``.
            moment: the layer's second moment, where preconditioned gradients are measured, too.
        """
        if self.signals and moment is None and energy > 0:
            if self.shares is None:
                self.shares = errors_of(tensor, self.layer, self.candidates, states) / energy
            self.sums[: len(self.candidates) + 1] += [*(energy * self.shares), energy]
        else:
            self._measure_errors(tensor, energy, states, moment)
        self.samples += 1
        self.sample_sizes(x, states)

    def forget_old_shares(self, step: int, age: int) -> None:
        """Have the errors measured in this step, if that was last done so many steps ago or more."""
        if self.shares is None or step >= self.shares_step + age:
            self.shares, self.shares_step = None, step

    def _measure_errors(
        self,
        x: Tensor,
        energy: float,
        states: Mapping[Compressor, CodecState],
        moment: SecondMoment | None,
    ) -> None:
        count = len(self.candidates)
        errors = errors_of(x, self.layer, self.candidates, states)
        self.sums[: count + 1] += [*errors, energy]
        if moment is not None:
            scaled = moment.precondition(x)
            errors = errors_of(scaled, self.layer, self.candidates, states)
            self.sums[-count - 1 :] += [*errors, float(scaled @ scaled)]

    def sample_sizes(self, x: Tensor, states: Mapping[Compressor, CodecState]) -> None:
        """Measure the bytes of what is compressed, where the data decide them."""
        start = len(self.candidates) + 1
        varying = [self.candidates[index] for index in self.varying]
        self.sums[start : start + len(varying)] += sizes_of(x, self.layer, varying, states)
        self.sized += 1

    def sample_signals(self, seen: Gradient, slot: int) -> None:
        """Add to what a planner that asks for signals is given.

        Args:
            seen: the gradient.
            slot: where its sketches are kept, the same on all ranks.
        """
        end = len(self.candidates) + 1 + len(self.varying)
        self.sums[end] += seen.nonzero / max(1, self.layer.numel)
        start = end + 1 + slot * SIGNALS
        self.sums[start : start + SIGNALS] = np.concatenate([[1.0], seen.numbers, seen.waits])

    def accumulate(self, tensor: Tensor) -> None:
        """Add a tensor to those that are measured together."""
        self.total = tensor.clone() if self.total is None else self.total.add_(tensor)
        self.samples += 1

    def take(
        self, states: Mapping[Compressor, CodecState], moment: SecondMoment | None = None
    ) -> Float64s:
        """The means of what is in ``sums``; zeros where nothing finite was seen.

        Args:
            states: what compressors have learned.
            moment: as of :meth:`sample`, for what was accumulated.
        """
        samples = max(1, self.samples)
        if self.total is not None:
            mean, samples = self.total.div_(samples), 1
            energy = float(mean @ mean)
            if np.isfinite(energy):
                self._measure_errors(mean, energy, states, moment)
        measured = self.sums / samples
        start = len(self.candidates) + 1
        sizes = slice(start, start + len(self.varying))
        measured[sizes] = self.sums[sizes] / max(1, self.sized)
        if self.signals:  # of each slot's sample by itself, not of their sum
            sketches = len(self.sums) - SAMPLES * SIGNALS
            measured[sketches:] = self.sums[sketches:]
        self.forget()
        return measured

    def add_to_period(self, grad: Tensor) -> None:
        """Add a gradient to those of the period."""
        self.period = grad.clone() if self.period is None else self.period.add_(grad)
        self.period_steps += 1

    def take_period(self, shared: bool = False) -> Float64s:
        """A sketch of the mean gradient of the period, and how many it is of; zeros if there is none.

        Means over ranks of sketches are the sketches of the means.

        Args:
            shared: whether ``total`` is the sum of the period; then call it before :meth:`take`.
        """
        steps, total = (self.samples, self.total) if shared else (self.period_steps, self.period)
        self.period, self.period_steps = None, 0
        if total is None:
            return np.zeros(self.sketch_size + 1)
        return np.append(sketch(total, self.layer.index) / steps, steps)

    @property
    def sketch_size(self) -> int:
        """Numbers of a sketch of this layer."""
        return min(self.layer.numel, SKETCH)

    def forget(self) -> None:
        """Begin again."""
        self.sums, self.samples, self.sized, self.total = np.zeros_like(self.sums), 0, 0, None

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """The candidates as text; written once."""
        return tuple(each.label for each in self.candidates)

    @functools.cached_property
    def factors(self) -> tuple[float, ...]:
        """The candidates' nominal compression factors; looked up once."""
        return tuple(each.nominal_factor(self.layer) for each in self.candidates)

    @functools.cached_property
    def traits(self) -> Traits:
        """What is fixed of the candidates; looked up once."""
        return Traits.of(self.layer, self.candidates)

    def payloads(self, measured: Float64s) -> Float64s:
        """Bytes that one rank sends with each candidate, as measured where they vary."""
        found = self.traits.payloads.copy()
        start = len(self.candidates) + 1
        for index, payload in zip(self.varying, measured[start:], strict=False):
            found[index] = payload or found[index]
        return found

    def sketched(self, measured: Float64s) -> tuple[float, float]:
        """Squared norms of the mean gradient and of the mean residual, from means over the ranks.

        Args:
            measured: of all ranks, as of :meth:`take`.
        """
        slots = measured[-SAMPLES * SIGNALS :].reshape(SAMPLES, SIGNALS)
        # a rank whose gradient was not finite in a sample has no mark there, and no share in its mean
        found = [row[1:] / row[0] for row in slots if row[0] > 0]
        if not found:
            return 0.0, 0.0
        gradient, waits = np.array(found)[:, :NUMBERS], np.array(found)[:, NUMBERS:]
        return float((gradient**2).sum(1).mean()), float((waits**2).sum(1).mean())

    def measured_link_bytes(self, payloads: Float64s, ranks: int) -> Float64s:
        """``link_bytes``, with those that vary as they were measured, where they were."""
        sizes = self.link_bytes.copy()
        for index, payload in zip(self.varying, payloads, strict=True):
            if payload > 0:
                kind = self.candidates[index].compressor.payload_kind
                scheme = scheme_for(kind, self.scheme)
                sizes[index] = planned_link_bytes(payload, scheme, ranks, self.ranks_per_node)
        return sizes


def measured_numbers(
    candidates: Sequence[Candidate], signals: bool, preconditioned: bool = False
) -> int:
    """How many numbers are measured of a layer: see :attr:`LayerSamples.sums`.

    Args:
        candidates: of the layer.
        signals: whether the planner asks for signals.
        preconditioned: whether it asks for errors of preconditioned gradients.
    """
    varying = sum(each.compressor.size_varies for each in candidates)
    beyond = 1 + SAMPLES * SIGNALS if signals else 0
    return (2 if preconditioned else 1) * (len(candidates) + 1) + varying + beyond


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
