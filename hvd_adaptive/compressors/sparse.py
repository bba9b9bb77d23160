"""Compressors that send a few elements: their positions and values.

All of them send the largest elements; what differs is the rule for how many (see
:class:`hvd_adaptive.kernels.SelectionRule`).
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import ClassVar, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive import kernels
from hvd_adaptive.arrays import Float64s, Int64s
from hvd_adaptive.compressors.base import (
    NO_CONTEXT,
    GatheredCompressor,
    LayerBatch,
    LayerContext,
    LayerStats,
    Level,
    MultiLevel,
    Payload,
    Reduced,
    Shape,
    check_density_bounds,
    densities,
)
from hvd_adaptive.compressors.checks import check_input
from hvd_adaptive.kernels import SelectionRule
from hvd_adaptive.kernels.floats import INF
from hvd_adaptive.kernels.selection import (
    counts_from_above,
    dgc_count,
    errors_from_spectrum,
    redsync_count,
)
from hvd_adaptive.layers import Layer
from hvd_adaptive.wire import ValueFormat, WireError
from hvd_adaptive.wire import sparse as wire_sparse


class SparseCompressor(GatheredCompressor, MultiLevel):
    """What the compressors that send a few elements share: all but the rule and what a level means.

    Biased: use them with error feedback. Cost: one pass over the tensor and no sort. Wire: gaps
    in the shorter of two codes (8.1 bits per element at density 1 % where elements are scattered, 4 to
    7 where they crowd) and values of ``values`` bits; the rounding error of the values stays in the
    remainder. Zeros are never sent.
    """

    rule: ClassVar[SelectionRule]
    values: str

    selects = True
    biased = True
    draws = False

    @property
    @final
    def format(self) -> ValueFormat:
        """How values are sent."""
        return ValueFormat[self.values]

    @abstractmethod
    def count(self, numel: int, level: Level) -> int:
        """The rule's ``k`` for a layer of so many elements."""

    @abstractmethod
    def thresholds(self, levels: Sequence[Level]) -> npt.NDArray[np.float32] | None:
        """The thresholds that ``levels`` stand for; None where the rule takes none."""

    @final
    def _check_values(self) -> None:
        if self.values not in ValueFormat.__members__:
            known = ", ".join(ValueFormat.__members__)
            raise ValueError(f"{self.name}: values={self.values!r} is not one of {known}")

    @final
    def _selection(
        self, offsets: Int64s, levels: Sequence[Level]
    ) -> tuple[Int64s, npt.NDArray[np.float32] | None]:
        """Counts and thresholds of all that is selected from together."""
        offsets = np.asarray(offsets)
        if self.whole_model:
            if len(set(levels)) > 1:
                raise ValueError(
                    f"{self.name} selects from all layers together, at one level: got "
                    f"{sorted(set(levels))}"
                )
            offsets, levels = offsets[[0, -1]], list(levels)[:1] or [self.level]
        return _counts_of(self, offsets.astype(np.int64, copy=False).tobytes(), tuple(levels))

    @final
    def compress_layers_(self, batch: LayerBatch) -> tuple[Tensor, LayerStats]:
        """All layers in one kernel call: add the gradient, find the threshold, extract, encode."""
        counts, thresholds = self._selection(batch.offsets, batch.levels)
        body, stats = kernels.for_device(batch.x.device).sparse.compress_(
            batch.x,
            batch.offsets,
            counts,
            self.format,
            batch.grads,
            batch.reserve,
            rule=self.rule,
            thresholds=thresholds,
            whole=self.whole_model,
        )
        return body, _layer_stats(stats)

    @final
    def compress_shards_(
        self, batch: LayerBatch, shards: Sequence[Int64s]
    ) -> tuple[list[Tensor], LayerStats]:
        """One selection from each layer, whoever receives it; see :class:`GatheredCompressor`."""
        counts, thresholds = self._selection(batch.offsets, batch.levels)
        # a model that is one vector has one body a receiver, with no cuts at the ends of layers
        edges = [each[[0, -1]] if self.whole_model and len(each) > 1 else each for each in shards]
        cuts = np.unique(np.concatenate([np.asarray(batch.offsets)[[0, -1]], *edges]))
        data, stats, ends = kernels.for_device(batch.x.device).sparse.compress_cut_(
            batch.x,
            batch.offsets,
            counts,
            self.format,
            cuts,
            batch.grads,
            rule=self.rule,
            thresholds=thresholds,
            whole=self.whole_model,
        )
        stops = np.concatenate([[0], ends])[np.cumsum([max(0, len(each) - 1) for each in edges])]
        starts = [0, *stops.tolist()]
        return [data[a:b] for a, b in itertools.pairwise(starts)], _layer_stats(stats)

    @final
    def decompress_layers_add_(
        self, body: Tensor, outs: Sequence[Tensor], scale: float
    ) -> npt.NDArray[np.bool_]:
        """Scatter-add; every index and length is checked first."""
        kernel = kernels.for_device(body.device).sparse
        marks = kernel.decompress_add_(body, outs, scale, self.format, self.whole_model)
        return marks.astype(np.bool_)

    @final
    def decompress_layers_sum_(
        self, bodies: Sequence[Tensor], outs: Sequence[Tensor], scale: float
    ) -> npt.NDArray[np.bool_]:
        """Sum by blocks that stay in the cache, and write each element once."""
        kernel = kernels.for_device(bodies[0].device).sparse
        marks = kernel.decompress_sum_(bodies, outs, scale, self.format, self.whole_model)
        return marks.astype(np.bool_)

    @final
    def reduce_layers_(self, bodies: Sequence[Tensor], batch: LayerBatch, keeps: bool) -> Reduced:
        """Sum and select tile by tile, where a backend does so: the sums are never written to memory.

        To take back what was kept, the bodies are summed again.
        """
        counts, thresholds = self._selection(batch.offsets, batch.levels)
        body, marks = kernels.for_device(batch.x.device).sparse.reduce_(
            bodies,
            batch.x,
            batch.offsets,
            counts,
            self.format,
            keeps,
            batch.reserve,
            self.rule,
            thresholds,
            self.whole_model,
        )

        def totals() -> Sequence[Tensor]:
            sums, edges = torch.empty_like(batch.x), np.asarray(batch.offsets).tolist()
            views = [sums[start:end] for start, end in itertools.pairwise(edges)]
            self.decompress_layers_sum_(bodies, views, 1.0)
            return views

        return Reduced(body, marks != 0, self._undoing(body, batch, totals))

    @final
    def clear_layers_(self, body: Tensor, outs: Sequence[Tensor]) -> None:
        """Set ``outs`` to 0 wherever ``body`` holds an element: momentum factor masking.

        Source: Lin et al., "Deep Gradient Compression" (ICLR 2018), section 3.2.

        Args:
            body: uint8, 1-D: of one bucket, without a header.
            outs: float32, contiguous, one per layer.

        Raises:
            WireError: as from :meth:`decompress_layers_add_`.
        """
        kernels.for_device(body.device).sparse.clear_(body, outs, self.format, self.whole_model)

    @final
    def recompress_layers_(
        self, body: Tensor, x: Tensor, offsets: Int64s, levels: Sequence[Level], reserve: int = 0
    ) -> tuple[Tensor, LayerStats]:
        """Compress what :meth:`compress_layers_` sent further: see :meth:`recompress_`.

        Args:
            body: uint8, 1-D: of one bucket, without a header.
            x: float32, 1-D: the remainder that was left; what is dropped now is added to it.
            offsets: ``int64[L + 1]``, those of the compression.
            levels: one per layer, of the whole layer.
            reserve: bytes to leave free at the front of the result.

        Returns:
            As :meth:`compress_layers_`; ``energy`` is that of the values in ``body``.

        Raises:
            WireError: the body is damaged or belongs to other layers.
        """
        counts, thresholds = self._selection(offsets, levels)
        less, stats = kernels.for_device(x.device).sparse.recompress_(
            body, x, offsets, counts, self.format, reserve, self.rule, thresholds, self.whole_model
        )
        return less, _layer_stats(stats)

    @final
    def recompress_(self, payload: Payload, x: Tensor, level: Level) -> Payload:
        """Apply the rule to the values in ``payload``, of which the new one holds some."""
        check_input(x)
        if payload.numel != x.numel():
            raise WireError(
                f"{self.name}: a payload of {payload.numel} elements is not that of a tensor of "
                f"{x.numel()}"
            )
        data, _ = self.recompress_layers_(payload.data, x, np.array([0, x.numel()]), [level])
        return Payload(data, x.numel(), level, payload.key, payload.shape)

    @final
    def errors(
        self,
        x: Tensor,
        levels: Sequence[Level],
        context: LayerContext = NO_CONTEXT,
    ) -> Float64s:
        """From one histogram of ``x`` for all levels; within 1 % of compressing at each.

        The rounding of the values is not counted, because it is far below what selection leaves out;
        but for ``sign``, where a second pass measures it.
        """
        del context
        spectrum = _Spectrum(x)
        if not spectrum.finite:
            return np.full(len(levels), np.nan)
        return spectrum.errors(self._counts(spectrum, levels), self.format)

    @property
    @final
    def size_varies(self) -> bool:
        """True if the rule takes as many elements as the data have it take, or values are signs.

        Next to a value of one bit, what a bound on the positions for any data adds is not small.
        """
        return self._count_varies or self.format is ValueFormat.sign

    @property
    @final
    def _count_varies(self) -> bool:
        return self.rule in (SelectionRule.redsync, SelectionRule.threshold)

    @final
    def sizes(
        self,
        x: Tensor,
        levels: Sequence[Level],
        context: LayerContext = NO_CONTEXT,
    ) -> Int64s:
        """For as many elements as the rule takes of ``x``, from one histogram: upper bounds.

        For ``sign`` the positions are measured on ``x``, for counts of which none is a tenth more than
        another; lines between them give the others. Cost: some ns for every position measured.
        """
        if not self.size_varies:
            return super().sizes(x, levels, context)
        numel = x.numel()
        if self._count_varies:
            spectrum = _Spectrum(x)
            counts = self._counts(spectrum, levels) if spectrum.finite else [0] * len(levels)
        else:
            counts = [self.count(numel, level) for level in levels]
        if self.format is ValueFormat.sign:
            found, bits = _positions(x, counts)
            rows = zip(found.tolist(), bits.tolist(), strict=True)
            return np.array(
                [wire_sparse.sparse_bytes(count, stream, self.format) for count, stream in rows]
            )
        return np.array([wire_sparse.max_sparse_bytes(numel, count, self.format) for count in counts])

    @final
    def _counts(self, spectrum: _Spectrum, levels: Sequence[Level]) -> list[int]:
        """How many elements the rule takes at each level."""
        thresholds = self.thresholds(levels)
        if thresholds is not None:
            return spectrum.threshold_counts(thresholds)
        wanted = [self.count(spectrum.numel, level) for level in levels]
        if self.rule is SelectionRule.dgc:
            return spectrum.dgc_counts(wanted)
        if self.rule is SelectionRule.redsync:
            return spectrum.redsync_counts(wanted)
        return wanted

    @final
    def wire_bytes(self, numel: int, level: Level, *, shape: Shape | None = None) -> int:
        """Upper bound, for the most that the rule may send; close to it if scattered."""
        del shape
        most = min(numel, self.rule.most(self.count(numel, level)))
        return wire_sparse.max_sparse_bytes(numel, most, self.format)


class DensityCompressor(SparseCompressor):
    """A sparse compressor whose level is a density: the share of the elements that it is to send."""

    density: float

    def __post_init__(self) -> None:
        if not 0.0 < self.density <= 1.0:
            raise ValueError(
                f"{self.name}: density is the share of elements to send and must lie in (0, 1], got "
                f"{self.density}: write {self.name}:density=0.01 for 1 %"
            )
        self._check_values()
        check_density_bounds(self.name, self.level_bounds)
        super().__post_init__()

    @property
    @final
    def level(self) -> Level:
        """The density."""
        return self.density

    @final
    def levels(self, layer: Layer) -> tuple[Level, ...]:
        """See :func:`~hvd_adaptive.compressors.base.densities`."""
        del layer
        return densities(self.density, self.level_bounds)

    @final
    def level_of_factor(self, factor: float) -> Level | None:
        """One over the factor."""
        return 1.0 / factor

    @final
    def count(self, numel: int, level: Level) -> int:
        """The nearest number, but at least one."""
        return wire_sparse.count_of(numel, level)

    @final
    def nominal_factor(self, level: Level, layer: Layer) -> float:
        """One over the density."""
        del layer
        return 1.0 / float(level)

    @final
    def thresholds(self, levels: Sequence[Level]) -> None:
        """None: these rules find theirs by themselves."""


@dataclass(frozen=True)
class TopK(DensityCompressor):
    """The ``density * numel`` elements of largest magnitude; ties go to the lowest index.

    Biased: use it with error feedback. Cost: one pass over the tensor and no sort (two copies of the
    tensor at density 1 %). Wire: gaps in the shorter of two codes (8.1 bits per element at density 1 %
    where elements are scattered, 4 to 7 where they crowd) and values of ``values`` bits; the rounding
    error of the values stays in the remainder. Zeros are never sent. Source: Aji and Heafield, "Sparse
    Communication for Distributed Gradient Descent" (EMNLP 2017), with exact selection.

    Args:
        density: share of the elements to send, in (0, 1].
        values: ``fp32``, ``fp16``, ``bf16``, ``int8`` (a scale for every 256 values), or ``sign`` (one
            mean for each sign).

    Raises:
        ValueError: density outside (0, 1], or an unknown value format.

    Example:
        >>> import torch
        >>> x = torch.tensor([0.5, -3.0, 0.25, 2.0])
        >>> topk = TopK(density=0.5, values="fp32")
        >>> payload, out = topk.compress_(x, topk.level), torch.zeros(4)
        >>> topk.decompress_add_(payload, out)
        >>> out.tolist(), x.tolist()
        ([0.0, -3.0, 0.0, 2.0], [0.5, 0.0, 0.25, 0.0])
    """

    density: float = 0.01
    values: str = "bf16"

    name = "topk"
    rule = SelectionRule.topk


@dataclass(frozen=True)
class GlobalTopK(DensityCompressor):
    """The largest elements of the whole model: one threshold for all layers.

    A layer of small gradients may send nothing, one of large gradients much. If one layer holds a NaN
    or an Inf, nothing is sent: all layers decode to NaN, and every layer keeps what it had.

    Biased: use it with error feedback. Cost: two passes over the model. Wire: as :class:`TopK`, for
    the model as one vector, which has at most 2^31 - 1 elements. Source: the same selection as top-k;
    Sahu et al., "Rethinking gradient sparsification as total error minimization" (NeurIPS 2021),
    section 5, compares it with one threshold per layer.

    Args:
        density: share of the model's elements to send, in (0, 1].
        values: ``fp32``, ``fp16``, ``bf16``, ``int8``, or ``sign``: see :class:`TopK`.

    Raises:
        ValueError: density outside (0, 1], or an unknown value format.

    Example:
        >>> import numpy as np, torch
        >>> x, offsets = torch.tensor([0.5, 3.0, 2.0, -0.25, 0.125, 0.0]), np.array([0, 3, 6])
        >>> from hvd_adaptive.compressors.base import LayerBatch
        >>> half = GlobalTopK(density=0.5, values="fp32")
        >>> body, _ = half.compress_layers_(LayerBatch(x, offsets, [0.5, 0.5]))
        >>> outs = [torch.zeros(3), torch.zeros(3)]
        >>> half.decompress_layers_add_(body, outs, 1.0).tolist(), [out.tolist() for out in outs]
        ([False, False], [[0.5, 3.0, 2.0], [0.0, 0.0, 0.0]])
    """

    density: float = 0.01
    values: str = "bf16"

    name = "globaltopk"
    rule = SelectionRule.topk
    whole_model = True


@dataclass(frozen=True)
class DGC(DensityCompressor):
    """The elements above a threshold that a sample suggests, at most ``density * numel`` of them.

    The sample is one group of 16 elements in 13, from 2^21 elements on one in 61; a layer of up to
    65,536 elements is its own sample. The threshold aims a little low: of too many elements the largest
    are selected. Where too few reach it, these are sent if they are 0.7 times the wanted number, which
    saves selecting again. This is the selection; momentum correction, gradient clipping and factor
    masking are feedback rules.

    Biased: use it with momentum correction or error feedback. Cost: one pass over the tensor, a little
    less than :class:`TopK`. Wire: as :class:`TopK`, seldom less. Source: Lin et al., "Deep
    Gradient Compression" (ICLR 2018), sections 3 and 5.

    Args:
        density: share of the elements to send, in (0, 1].
        values: ``fp32``, ``fp16``, ``bf16``, ``int8``, or ``sign``: see :class:`TopK`.
        ramp: steps of each stage of the density's warm-up: 25 %, 6.25 %, 1.5625 %, 0.4 % and so on
            until ``density``; 0 for none. (The paper takes an epoch.)

    Raises:
        ValueError: density outside (0, 1], an unknown value format, or a negative ramp.

    Example:
        >>> dgc = DGC(density=0.001, ramp=100)
        >>> [dgc.level_at(step) for step in (0, 99, 100, 200, 300, 400)]
        [0.25, 0.25, 0.0625, 0.015625, 0.00390625, 0.001]
    """

    density: float = 0.001
    values: str = "bf16"
    ramp: int = 0

    name = "dgc"
    rule = SelectionRule.dgc

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ramp < 0:
            raise ValueError(f"dgc: ramp is the number of steps of a stage, 0 or more, got {self.ramp}")

    def level_at(self, step: int) -> Level:
        """The density of the warm-up's stage."""
        if self.ramp == 0:
            return self.density
        return max(self.density, 0.25 * 4.0 ** -(step // self.ramp))


@dataclass(frozen=True)
class RedSync(DensityCompressor):
    """The elements above a threshold found by bisection: between one and two ``density * numel``.

    The threshold is searched between the mean and the largest magnitude, in steps of a float's upper 16
    bits. Where ties leave no threshold for such a number, exactly ``density * numel`` are sent, the
    largest of lowest index.

    Biased: use it with error feedback. Cost: one pass over the tensor. Wire: as :class:`TopK`, for up
    to twice as many elements: how many depends on where bisection comes by. ``wire_bytes`` is that of
    the most, ``sizes`` tells it for a tensor. Source: Fang et al., "RedSync" (JPDC 2019), section 5.

    Args:
        density: least share of the elements to send, in (0, 1].
        values: ``fp32``, ``fp16``, ``bf16``, ``int8``, or ``sign``: see :class:`TopK`. The paper's
            quantized form is ``sign``.

    Raises:
        ValueError: density outside (0, 1], or an unknown value format.

    Example:
        >>> import torch
        >>> x = torch.tensor([0.5, -3.0, 0.25, 2.5, 0.125, 0.25])
        >>> redsync = RedSync(density=0.3, values="sign")
        >>> payload, out = redsync.compress_(x, redsync.level), torch.zeros(6)
        >>> redsync.decompress_add_(payload, out)
        >>> out.tolist()
        [0.0, -3.0, 0.0, 2.5, 0.0, 0.0]
    """

    density: float = 0.01
    values: str = "bf16"

    name = "redsync"
    rule = SelectionRule.redsync


@dataclass(frozen=True)
class Threshold(SparseCompressor):
    """All elements whose magnitude reaches a threshold, however many these are.

    Biased: use it with error feedback, which it is derived for: of all sparsifiers that send as much
    in total, the one with a constant threshold has the least total error. Cost: one pass over the
    tensor. Wire: as :class:`TopK`; how much is not known beforehand: ``wire_bytes`` is that of all
    elements, ``sizes`` tells it for a tensor. Source: Sahu et al., "Rethinking gradient sparsification
    as total error minimization" (NeurIPS 2021), section 4.

    Args:
        threshold: least magnitude that is sent, in the units of the gradients; 0 or more.
        values: ``fp32``, ``fp16``, ``bf16``, ``int8``, or ``sign``: see :class:`TopK`.

    Raises:
        ValueError: a threshold below 0 or infinite, or an unknown value format.

    Example:
        >>> import torch
        >>> x = torch.tensor([0.5, -3.0, 0.25, 2.0])
        >>> above = Threshold(threshold=0.5, values="fp32")
        >>> above.compress_(x, above.level).nbytes, x.tolist()
        (16, [0.0, 0.0, 0.25, 0.0])
    """

    threshold: float = 1e-3
    values: str = "bf16"

    name = "threshold"
    rule = SelectionRule.threshold

    def __post_init__(self) -> None:
        if not 0.0 <= self.threshold < float("inf"):
            raise ValueError(
                f"threshold: threshold is the least magnitude to send, 0 or more, got {self.threshold}"
            )
        self._check_values()
        super().__post_init__()

    @property
    def level(self) -> Level:
        """The threshold."""
        return self.threshold

    def levels(self, layer: Layer) -> tuple[Level, ...]:
        """41 thresholds from a tenth of the default to ten times as much, in equal ratios.

        Of an explicit range 41 in equal ratios (from a millionth of its end, if it begins at 0), and
        the default.
        """
        del layer
        if self.level_bounds is not None:
            low, high = self.level_bounds
            grid = np.geomspace(max(low, 1e-6 * high), high, 41).tolist() if high else []
            return tuple(sorted({low, *grid[1:-1], high, self.threshold}))
        return tuple(dict.fromkeys(self.threshold * 10 ** (step / 20) for step in range(-20, 21)))

    def count(self, numel: int, level: Level) -> int:
        """No limit: all elements."""
        del level
        return numel

    def thresholds(self, levels: Sequence[Level]) -> npt.NDArray[np.float32]:
        """The levels themselves."""
        return np.array(levels, dtype=np.float32)


@lru_cache(maxsize=256)
def _counts_of(
    compressor: SparseCompressor, offsets: bytes, levels: tuple[Level, ...]
) -> tuple[Int64s, npt.NDArray[np.float32] | None]:
    """Counts and thresholds of layers; kept, because a bucket has the same ones at every step."""
    sizes = np.diff(np.frombuffer(offsets, np.int64)).tolist()
    counts = [compressor.count(numel, level) for numel, level in zip(sizes, levels, strict=True)]
    return np.array(counts, dtype=np.int64), compressor.thresholds(levels)


def _layer_stats(stats: Float64s) -> LayerStats:
    return LayerStats(stats[:, 0], stats[:, 1], stats[:, 3] != 0)


# --- the errors of all levels at once ------------------------------------------------------------


class _Spectrum:
    """How many elements of a tensor reach a magnitude, and the error of sending only the largest."""

    def __init__(self, x: Tensor) -> None:
        self._x, self._kernel = x, kernels.for_device(x.device).sparse
        self.numel = x.numel()
        self._hist, self._total, self._energy, self._largest = self._kernel.summary(x)
        self.finite = not self._hist[INF >> 16 :].any()

    @cached_property
    def _reached(self) -> list[int]:
        """How many elements are in a bin or a higher one."""
        counts: list[int] = [*counts_from_above(self._hist).tolist(), 0]
        return counts

    def errors(self, counts: Sequence[int], values: ValueFormat) -> Float64s:
        """The squared error of sending so many of the largest elements."""
        sent = np.array(counts, dtype=np.int64)
        errors: Float64s = errors_from_spectrum(self._hist, self._energy, self.numel, sent)
        if values is ValueFormat.sign:
            errors = errors + _sign_errors(self._kernel.moments(self._x), sent)
        return errors

    def threshold_counts(self, thresholds: npt.NDArray[np.float32]) -> list[int]:
        """How many elements reach each threshold: their bins are counted exactly, in another pass."""
        bits = [max(1, int(abs(threshold).view(np.int32))) for threshold in thresholds]
        bins = sorted({b >> 16 for b in bits})
        fine = self._kernel.refined_spectrum(self._x, np.array(bins, dtype=np.int64))
        inside = dict(zip(bins, fine, strict=True))
        return [self._reached[(b >> 16) + 1] + int(inside[b >> 16][b & 0xFFFF :].sum()) for b in bits]

    def dgc_counts(self, counts: Sequence[int]) -> list[int]:
        """How many DGC sends where so many are wanted; bins count as spread evenly."""
        sampled = counts_from_above(self._kernel.sample_spectrum(self._x))
        return [dgc_count(sampled, self.numel, k, self._estimate) for k in counts]

    def redsync_counts(self, counts: Sequence[int]) -> list[int]:
        """How many RedSync sends: its bisection, on counts."""
        nonzeros = self.numel - int(self._hist[0])
        if nonzeros == 0:
            return list(counts)
        mean = float(np.float32(self._total / self.numel))
        return [
            redsync_count(k, mean, self._largest, self._reached.__getitem__) if 0 < k < nonzeros else k
            for k in counts
        ]

    def _estimate(self, bits: int) -> int:
        """How many elements reach a magnitude, those of a bin spread evenly."""
        b = bits >> 16
        least, most = self._reached[b + 1], self._reached[b]
        return least + (most - least) * (0x10000 - (bits & 0xFFFF)) // 0x10000


def _sign_errors(moments: Float64s, counts: Int64s) -> Float64s:
    """What one mean for each sign adds to the squared error: sum of squares - sum^2 / count.

    The elements of the last bin that are sent are taken to be like all of that bin, of either sign.
    """
    sums = np.cumsum(moments[:, :0:-1], axis=1)  # from the largest down, without zeros
    sums = np.concatenate([np.zeros((2, 1, 3)), sums], axis=1)
    reached = sums[:, :, 0].sum(0)
    counts = np.minimum(counts, reached[-1])
    last = np.searchsorted(reached, counts)
    before = np.maximum(last - 1, 0)
    share = (counts - reached[before]) / np.maximum(reached[last] - reached[before], 1)
    number, total, squares = np.moveaxis(
        sums[:, before] + share[None, :, None] * (sums[:, last] - sums[:, before]), 2, 0
    )
    errors: Float64s = np.maximum(squares - total**2 / np.maximum(number, 1e-9), 0).sum(0)
    return errors


# --- the bytes of positions ----------------------------------------------------------------------


def _positions(x: Tensor, counts: Sequence[int]) -> tuple[Int64s, Int64s]:
    """How many of so many of the largest elements are sent, and the bits of their positions."""
    measured: list[int] = []
    for count in sorted(set(counts), reverse=True):
        if not measured or measured[-1] >= 1.1 * count:
            measured.append(count)
    measured = sorted({*measured, min(counts, default=0)})
    table = kernels.for_device(x.device).sparse.position_bits(x, np.array(measured, dtype=np.int64))
    found, bits = (np.ceil(np.interp(counts, measured, column)) for column in table.T)
    return found.astype(np.int64), bits.astype(np.int64)
