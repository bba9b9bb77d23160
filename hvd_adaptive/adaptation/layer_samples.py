"""What is measured of one layer that a planner decides on."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hvd_adaptive.adaptation.candidates import (
    Candidate,
    candidates_of,
    errors_of,
    short_spec,
    sizes_of,
)
from hvd_adaptive.adaptation.preconditioning import SecondMoment
from hvd_adaptive.adaptation.schedule import SAMPLES
from hvd_adaptive.adaptation.sketch import NUMBERS, SKETCH, Gradient, sketch
from hvd_adaptive.arrays import Float64s
from hvd_adaptive.collectives import AUTO, planned_link_bytes, scheme_for, scheme_named
from hvd_adaptive.compressors.base import CodecState, Compressor, GatheredCompressor
from hvd_adaptive.layers import Layer, PayloadKind

SIGNALS = 1 + 2 * NUMBERS
"""What is kept of a sample for a planner that asks for signals: a mark, and sketches of the gradient
and of what waits."""


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
