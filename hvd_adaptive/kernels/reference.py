"""The kernels in plain torch: any device, one layer at a time, and what every other kernel must equal.

Written to be read, not to be fast: a sort instead of a threshold, an array element for every bit.
"""

from __future__ import annotations

import bisect
import enum
import functools
import itertools
import math
import operator
import struct
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.wire import ValueFormat
from hvd_adaptive.wire.sparse import (
    CODE_BLOCK,
    HEAD_BITS,
    HEAD_PARAMETER,
    HEAD_TEUHOLA,
    MAX_NUMEL,
    MAX_SCALE,
    VALUE_BLOCK,
    Damage,
    damaged,
)
from hvd_adaptive.wire.varint import MAX_VARINT_BYTES, write_varint

BINS = 1 << 15
"""Bins of the spectrum: one for each exponent and upper 7 bits of the mantissa."""
MAGNITUDE = 0x7FFFFFFF
INF = 0x7F800000
LARGEST = float(torch.finfo(torch.float32).max)

SMALL = 1 << 16
"""Elements up to which DGC's sample is the layer itself."""
LARGE = 1 << 21
"""Elements from which on the sample is thinner."""
SAMPLE = 16
"""Elements that stand together in a sample: a cache line. What is large often stands together, too, so
that more at once would tell less."""
STRIDES = (13, 61)
"""One group of so many is in the sample, below and from :data:`LARGE` on; odd, because weights have
periods of powers of two."""

CANCELLED = 2.0**-22
"""Up to this share of a gradient that was added and taken away again, what is left is rounding."""


# --- the rules -----------------------------------------------------------------------------------


class SelectionRule(enum.IntEnum):
    """How a layer's elements are selected: always the largest; what differs is how many of them.

    * ``topk``: exactly ``k``.
    * ``threshold``: all that reach a threshold, but at most ``k``. (Sahu et al., "Rethinking gradient
      sparsification as total error minimization", NeurIPS 2021, section 4.)
    * ``dgc``: all that reach a threshold that was estimated from a sample; of more than ``k`` exactly
      ``k``, selected among them, and where fewer than 0.7 ``k`` reach it exactly ``k`` as well. (Lin et
      al., "Deep Gradient Compression", ICLR 2018, section 5.)
    * ``redsync``: all that reach a threshold of 8 significant bits that bisection between the mean and
      the largest magnitude finds; between ``k`` and 2 ``k``. (Fang et al., "RedSync", JPDC 2019,
      section 5.)

    Zeros are never sent, and ties go to the lowest index where a rule sends exactly ``k``.
    """

    topk = 0
    threshold = 1
    dgc = 2
    redsync = 3

    def most(self, count: int) -> int:
        """The most elements that are sent where ``count`` were asked for.

        Example:
            >>> [rule.most(100) for rule in SelectionRule]
            [100, 100, 100, 200]
        """
        return 2 * count if self is SelectionRule.redsync else count


def dgc_floor(sampled: npt.NDArray[np.int64], numel: int, k: int) -> int:
    """The bits of a magnitude that DGC guesses somewhat more than ``k`` elements to reach.

    Inside the bin of the sample's k-th largest, bits are taken to be spread evenly. The sample is asked
    for more by two deviations of what it holds of the largest, so that fewer than ``k`` are seldom, and
    by so much more where it holds few that fewer than 0.7 ``k`` are unlikely.

    Args:
        sampled: ``int64[32768]``: how many of the sample (:func:`sample_spectrum`) are in a bin or in
            a higher one.
        numel: elements of the layer, at least one.
        k: elements to send.
    """
    expected = k * int(sampled[0]) / numel
    deviation = math.sqrt(expected)
    wanted = int(max(expected + 2 * deviation, 0.7 * expected + 4 * deviation + 2))
    b = bisect.bisect_right(sampled, -wanted, key=operator.neg) - 1  # the last that so many reach
    if b <= 0:
        return 1
    inside = int(sampled[b] - sampled[b + 1])  # there is a next bin: those of Inf and NaN are empty
    return (b << 16) + ((int(sampled[b]) - wanted) << 16) // inside


def dgc_count(
    sampled: npt.NDArray[np.int64], numel: int, k: int, reaching: Callable[[int], int]
) -> int:
    """How many of the largest DGC sends, where so many are not zero.

    Args:
        sampled: as for :func:`dgc_floor`; not used for small layers.
        numel: elements of the layer.
        k: elements to send.
        reaching: how many elements' magnitudes have at least the bits that it is called with.
    """
    if k == 0 or numel <= SMALL or k >= numel // 3:
        return k
    count = reaching(dgc_floor(sampled, numel, k))
    return count if 7 * k <= 10 * count < 10 * k else k


def counts_from_above(hist: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many are in a bin or in a higher one.

    Example:
        >>> counts_from_above(np.array([5, 0, 2])).tolist()
        [7, 2, 2]
    """
    return np.cumsum(hist[::-1])[::-1]


def redsync_count(k: int, mean: float, largest: float, reaching: Callable[[int], int]) -> int:
    """How many of the largest RedSync sends of a tensor that has more than ``k`` that are not zero.

    The first threshold is the mean; then the interval that is left, of 0 to the largest magnitude, is
    halved until the count is right. Thresholds are rounded down to the edge of a bin, so that a
    :func:`spectrum` says all that bisection asks; where no edge has the right count, ``k`` are sent.

    Args:
        k: elements to send at least.
        mean: of the magnitudes, as float32.
        largest: magnitude.
        reaching: how many elements are in the bin that it is called with or in a higher one.
    """
    low, high, middle = 0.0, largest, mean
    low_bin, high_bin = 0, bin_of(largest) + 1
    while high_bin - low_bin > 1:
        middle_bin = max(1, bin_of(middle))
        count = reaching(middle_bin)
        if k <= count <= 2 * k:
            return count
        if count < k:
            high, high_bin = middle, middle_bin
        else:
            low, low_bin = middle, middle_bin
        middle = low + (high - low) / 2
    return k


def bin_of(magnitude: float) -> int:
    """The bin of a magnitude, once rounded to float32.

    Example:
        >>> bin_of(1.0) == 127 << 7
        True
    """
    [bits] = struct.unpack("i", struct.pack("f", magnitude))
    return int(bits) >> 16


# --- checks that all kernels share ---------------------------------------------------------------


def check_layers(
    x: Tensor,
    offsets: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    grads: Sequence[Tensor] | None,
    whole: bool = False,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """``offsets`` and ``counts`` as contiguous int64; ValueError where the input does not fit."""
    offsets = np.ascontiguousarray(offsets, dtype=np.int64)
    counts = np.ascontiguousarray(counts, dtype=np.int64)
    if x.dtype != torch.float32 or x.dim() != 1 or not x.is_contiguous():
        raise ValueError(f"x is 1-D contiguous float32, got {_describe(x)}")
    if offsets.ndim != 1 or len(offsets) == 0 or len(counts) != (1 if whole else len(offsets) - 1):
        raise ValueError(
            f"L layers have L + 1 offsets and L counts (one if they are one vector), got "
            f"{offsets.shape} and {counts.shape}"
        )
    sizes = _checked_sizes(offsets.tobytes(), counts.tobytes(), whole, x.numel())
    if grads is not None:
        _check_grads(x, sizes, grads)
    return offsets, counts


@functools.lru_cache(maxsize=256)
def _checked_sizes(offsets: bytes, counts: bytes, whole: bool, numel: int) -> tuple[int, ...]:
    """The sizes of the layers of a tensor; ValueError if they do not fit it.

    Kept, because a bucket has the same ones at every step.
    """
    edges, wanted = (np.frombuffer(each, np.int64) for each in (offsets, counts))
    sizes = np.diff(edges)
    if edges[0] < 0 or edges[-1] > numel or sizes.min(initial=0) < 0:
        raise ValueError(f"offsets must rise from 0 to at most the {numel} elements of x")
    check_numel(int(edges[-1] - edges[0]) if whole else int(sizes.max(initial=0)))
    if wanted.min(initial=0) < 0:
        raise ValueError(f"counts must be 0 or more, got {wanted.min()}")
    return tuple(sizes.tolist())


def check_numel(numel: int) -> None:
    """ValueError if so many elements are too many to be one vector."""
    if numel > MAX_NUMEL:
        raise ValueError(
            f"a layer, or a model that is compressed as one vector, has at most {MAX_NUMEL} elements, "
            f"got {numel}: indices are 32-bit"
        )


def _check_grads(x: Tensor, sizes: Sequence[int], grads: Sequence[Tensor]) -> None:
    if len(grads) != len(sizes):
        raise ValueError(f"got {len(grads)} gradients for {len(sizes)} layers")
    for layer, (grad, numel) in enumerate(zip(grads, sizes, strict=True)):
        if (
            grad.numel() != numel
            or grad.dtype != torch.float32
            or not grad.is_contiguous()
            or grad.is_cpu != x.is_cpu
        ):
            raise ValueError(
                f"the gradient of layer {layer} must be {numel} contiguous float32 on {x.device}, "
                f"got {_describe(grad)}"
            )


def check_thresholds(
    rule: SelectionRule, thresholds: npt.NDArray[np.float32] | None, layers: int
) -> npt.NDArray[np.int64]:
    """The thresholds as bits, at least 1 so that no zero reaches them."""
    if (thresholds is not None) != (rule == SelectionRule.threshold):
        raise ValueError(f"thresholds belong to SelectionRule.threshold and to no other, got {rule!r}")
    if thresholds is None:
        return np.ones(layers, np.int64)
    thresholds = np.ascontiguousarray(thresholds, dtype=np.float32)
    if thresholds.shape != (layers,) or not (thresholds >= 0).all():
        raise ValueError(f"expected {layers} thresholds of 0 or more, got {thresholds}")
    bits: npt.NDArray[np.int64] = np.maximum(np.abs(thresholds).view(np.int32), 1).astype(np.int64)
    return bits


def check_spectra(spectra: npt.NDArray[np.int64] | None, layers: int) -> None:
    """Raise ValueError unless there is a row of int64 counts for each layer, or nothing at all."""
    if spectra is None:
        return
    shape = (layers, BINS)
    if spectra.shape != shape or spectra.dtype != np.int64 or not spectra.flags.c_contiguous:
        raise ValueError(
            f"spectra must be a C-contiguous int64 array of shape {shape}, got {spectra.dtype} of "
            f"shape {spectra.shape}"
        )


def check_outs(body: Tensor, outs: Sequence[Tensor], whole: bool = False) -> list[int]:
    """The numbers of elements of the tensors that a body is added to; ValueError where one is unfit."""
    _check_bytes(body)
    for out in outs:
        if out.dtype != torch.float32 or not out.is_contiguous() or out.is_cpu != body.is_cpu:
            raise ValueError(
                f"values are added to contiguous float32 tensors on {body.device}, got {_describe(out)}"
            )
    numels = [out.numel() for out in outs]
    check_numel(sum(numels) if whole else max(numels, default=0))
    return numels


def check_bodies(bodies: Sequence[Tensor]) -> Sequence[Tensor]:
    """ValueError where there is nothing to sum."""
    if not bodies:
        raise ValueError("there is no body to sum: each rank sends one")
    return bodies


def check_body(body: Tensor, x: Tensor) -> None:
    """ValueError unless ``body`` is bytes on the device of ``x``."""
    _check_bytes(body)
    if body.is_cpu != x.is_cpu:
        raise ValueError(f"a body must be on the device of x, {x.device}, got {_describe(body)}")


def _check_bytes(body: Tensor) -> None:
    if body.dtype != torch.uint8 or body.dim() != 1 or not body.is_contiguous():
        raise ValueError(f"a body is 1-D contiguous uint8, got {_describe(body)}")


def check_bins(bins: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """``bins`` as int64; ValueError unless they are different bins of a spectrum."""
    bins = np.ascontiguousarray(bins, dtype=np.int64)
    if bins.ndim != 1 or len(np.unique(bins)) != len(bins) or ((bins < 0) | (bins >= BINS)).any():
        raise ValueError(f"expected different bins from 0 to {BINS - 1}, got {bins}")
    return bins


def check_spectrum(x: Tensor) -> None:
    """ValueError unless ``x`` is contiguous float32."""
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"the spectrum is that of a contiguous float32 tensor, got {_describe(x)}")


def check_counts(x: Tensor, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """``counts`` as int64; ValueError unless each is 0 or more and ``x`` is contiguous float32."""
    check_spectrum(x)
    counts = np.ascontiguousarray(counts, dtype=np.int64)
    if counts.ndim != 1 or counts.min(initial=0) < 0:
        raise ValueError(f"expected a row of counts, each 0 or more, got {counts}")
    return counts


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}, stride {tensor.stride()} on {tensor.device}"


# --- encoding ------------------------------------------------------------------------------------


def _magnitudes(x: Tensor) -> Tensor:
    """The bits of |x| as int32: they order as the magnitudes do, NaN and Inf above everything."""
    return x.view(torch.int32) & MAGNITUDE


def _blocks(x: Tensor, size: int) -> Tensor:
    """``x`` in rows of ``size``, the last one filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % size)).view(-1, size)


def _bit_length(x: Tensor) -> Tensor:
    """Bits of the numbers in an int64 tensor (below 2^31); 0 for 0."""
    powers = torch.tensor([1 << bit for bit in range(32)], device=x.device)
    return torch.bucketize(x, powers, right=True)


def _heads(gaps: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """What each row of gaps begins with, and its bits: the cheapest of four codes."""
    middle = (_bit_length(gaps.sum(1) // sizes) - 1).clamp(min=1)
    candidates = torch.stack([middle - 1, middle, middle + 1], dim=1)
    quotients = (gaps.unsqueeze(1) >> candidates.unsqueeze(2)).sum(2)
    cost = quotients + sizes.unsqueeze(1) * (candidates + 1)
    r = (_bit_length(gaps + 1) - 1).sum(1) // sizes
    lengths = (_bit_length(gaps + (1 << r).unsqueeze(1)) - 1 - r.unsqueeze(1)).sum(1)
    candidates = torch.cat([candidates, (r | HEAD_TEUHOLA).unsqueeze(1)], dim=1)
    cost = torch.cat([cost, (2 * lengths + sizes * (1 + r)).unsqueeze(1)], dim=1)
    best = cost.cpu().numpy().argmin(1)  # the first of equals, which torch does not promise
    chosen = torch.from_numpy(best).to(gaps.device).unsqueeze(1)
    return candidates.gather(1, chosen).squeeze(1), cost.gather(1, chosen).squeeze(1) + HEAD_BITS


def _gap_blocks(indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gaps between rising int64 indices: all, in one row a block, and how many are in each row."""
    device = indices.device
    gaps = torch.diff(indices, prepend=torch.full((1,), -1, device=device)) - 1
    rows = _blocks(gaps, CODE_BLOCK)
    starts = CODE_BLOCK * torch.arange(len(rows), device=device)
    return gaps, rows, (gaps.numel() - starts).clamp(max=CODE_BLOCK)


def _codes(gaps: Tensor, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each gap: the zeros before the one, how many low bits come after it, and these bits."""
    r = heads & HEAD_PARAMETER
    more = gaps + (1 << r)
    widths = torch.where(heads >= HEAD_TEUHOLA, _bit_length(more) - 1, r)
    zeros = torch.where(heads >= HEAD_TEUHOLA, widths - r, gaps >> r)
    lows = torch.where(heads >= HEAD_TEUHOLA, more, gaps) & ((1 << widths) - 1)
    return zeros, widths, lows


def _index_stream(indices: Tensor) -> Tensor:
    """The coded gaps of rising int64 indices, as bytes."""
    device = indices.device
    gaps, rows, sizes = _gap_blocks(indices)
    heads, lengths = _heads(rows, sizes)
    starts = torch.cumsum(lengths, 0) - lengths
    bits = torch.zeros(-(-int(lengths.sum()) // 8) * 8, dtype=torch.uint8, device=device)
    for bit in range(HEAD_BITS):
        bits[starts + bit] = ((heads >> bit) & 1).to(torch.uint8)

    zeros, widths, lows = _codes(gaps, heads.repeat_interleave(sizes))
    ends = torch.cumsum(zeros + 1 + widths, 0) + HEAD_BITS * (
        torch.arange(len(gaps), device=device) // CODE_BLOCK + 1
    )
    ones = ends - widths - 1
    bits[ones] = 1
    for bit in range(int(widths.max())):
        has = widths > bit
        bits[(ones + 1 + bit)[has]] = ((lows[has] >> bit) & 1).to(torch.uint8)
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)
    return (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def _encode_values(values: Tensor, how: ValueFormat) -> tuple[Tensor, Tensor]:
    """The bytes of float32 values, and the float32 values that they decode to."""
    if how is ValueFormat.int8:
        return _encode_int8(values)
    if how is ValueFormat.sign:
        return _encode_signs(values)
    if how is ValueFormat.fp32:
        return values.view(torch.uint8), values
    dtype = torch.float16 if how is ValueFormat.fp16 else torch.bfloat16
    limit = torch.finfo(dtype).max
    rounded = values.clamp(-limit, limit).to(dtype)
    return rounded.view(torch.uint8), rounded.float()


def _encode_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 scale and signed bytes for every 256 values."""
    rows = _blocks(values, VALUE_BLOCK)
    least = torch.ones(1, dtype=torch.int32, device=values.device).view(torch.float32)
    # by a tensor of 127, since torch would multiply by 1 / 127
    scales = rows.abs().amax(1, keepdim=True) / torch.full_like(rows[:, :1], 127.0)
    # the division of a denormal may underflow to 0, and 127 times the quotient may overflow
    scales = torch.maximum(scales, least).clamp(max=MAX_SCALE)
    codes = (rows / scales).round().clamp(-127, 127)
    data = torch.cat([scales.view(torch.uint8), codes.to(torch.int8).view(torch.uint8)], dim=1)
    padding = rows.numel() - values.numel()
    flat = data.reshape(-1)
    return flat[: flat.numel() - padding], (codes * scales).reshape(-1)[: values.numel()]


def _encode_signs(values: Tensor) -> tuple[Tensor, Tensor]:
    """The mean magnitudes of the positive and the negative values, and a bit for every sign."""
    negative = values < 0
    means = torch.stack([_mean_magnitude(values[~negative]), _mean_magnitude(values[negative])])
    data = torch.cat([means.view(torch.uint8), _pack(negative)])
    return data, torch.where(negative, -means[1], means[0])


def _mean_magnitude(values: Tensor) -> Tensor:
    """The mean of |values| as float32; 0 if there are none. The sum's order is part of the result."""
    total = np.cumsum(values.double().abs().cpu().numpy())[-1] if len(values) else 0.0
    return torch.tensor(total / max(1, len(values)), dtype=torch.float32, device=values.device)


def _pack(bits: Tensor) -> Tensor:
    """Eight bits a byte, the first the least significant."""
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=bits.device)
    return (_blocks(bits.to(torch.uint8), 8) * weights).sum(1, dtype=torch.uint8)


def _unpack(data: Tensor) -> Tensor:
    """The bits that :func:`_pack` packed, and its padding."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data.unsqueeze(1) >> shifts) & 1).view(-1)


def _select(x: Tensor, k: int, rule: SelectionRule, floor: int) -> Tensor:
    """The rising indices of what a rule sends of a finite vector; ``floor``: the threshold's bits."""
    magnitudes = _magnitudes(x)
    nonzeros = int((magnitudes > 0).sum())
    k = min(k, x.numel())

    def reaching(bits: int) -> int:
        return int((magnitudes >= bits).sum())

    count = k
    if rule == SelectionRule.threshold:
        count = min(k, reaching(floor))
    elif rule == SelectionRule.dgc:
        count = dgc_count(counts_from_above(sample_spectrum(x)), x.numel(), k, reaching)
    elif rule == SelectionRule.redsync and 0 < k < nonzeros:
        mean = float(np.float32(float(x.double().abs().sum()) / x.numel()))
        count = redsync_count(k, mean, float(x.abs().max()), lambda b: reaching(b << 16))
    order = torch.sort(magnitudes, descending=True, stable=True).indices
    return order[: min(count, nonzeros)].sort().values


def _encode_layer(indices: Tensor, values: Tensor, how: ValueFormat) -> tuple[list[Tensor], Tensor]:
    """The bytes of values at rising indices, and the values that they decode to."""
    count = len(indices)
    header = write_varint(count << 4 | (how << 1 if count else 0))
    if count == 0:
        return [_to_tensor(header, values.device)], values
    stream = _index_stream(indices)
    data, decoded = _encode_values(values, how)
    header += write_varint(stream.numel())
    return [_to_tensor(header, values.device), stream, data], decoded


def _to_tensor(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _energy(x: Tensor) -> float:
    return float(x.double().square().sum())


def sparse_compress_(
    x: Tensor,
    offsets: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    values: ValueFormat,
    grads: Sequence[Tensor] | None = None,
    reserve: int = 0,
    spectra: npt.NDArray[np.int64] | None = None,
    rule: SelectionRule = SelectionRule.topk,
    thresholds: npt.NDArray[np.float32] | None = None,
    whole: bool = False,
) -> tuple[Tensor, npt.NDArray[np.float64]]:
    """Add the gradients, take the largest elements of each layer out of ``x``, and encode them.

    How many are sent is up to the :class:`SelectionRule`, but never a zero. What is not sent stays in
    ``x``: 0 where a value travelled exactly, its rounding error otherwise, so that payload + remainder
    is what ``x`` was. Biased.

    A layer whose sum ``x + grad`` has a NaN or an Inf keeps its ``x`` and sends a mark; of a model that
    is one vector, the other layers then keep their sums and nothing is sent but the mark. A module may
    find out after it has added: ``x`` is then within ``2^-21 (|x| + |grad|)`` of what it was. Reading
    all of it first would cost every step a third of the time for the sake of those that are skipped.

    Source: exact selection by a histogram of float bits, in the place of the sort of Aji and
    Heafield, "Sparse Communication for Distributed Gradient Descent" (EMNLP 2017), section 3; those of
    the other rules stand with :class:`SelectionRule`.

    Args:
        x: float32, 1-D, contiguous; layer ``l`` is ``x[offsets[l]:offsets[l + 1]]``.
        offsets: ``int64[L + 1]``, rising; a layer may be empty and holds at most 2^31 - 1 elements.
        counts: ``int64[L]``: how many elements to send of each layer, 0 or more: the rule's ``k``.
        values: how values travel.
        grads: one contiguous float32 tensor a layer, of any shape with as many elements, on the
            device of ``x``; None adds nothing.
        reserve: bytes to leave free, with whatever they hold, in front of the body (for
            :func:`hvd_adaptive.wire.frame.write_header`).
        spectra: ``int64[L, 32768]``: the :func:`spectrum` of each finite layer, gradient included, is
            added to its row in the same pass; None counts nothing.
        rule: how many to send, given ``counts``.
        thresholds: ``float32[L]``, 0 or more: for ``SelectionRule.threshold``, None for all others.
        whole: the layers are one vector, and the body is one layer over all of them; ``counts`` and
            ``thresholds`` then have one entry.

    Returns:
        ``(data, stats)``: uint8, 1-D, on the device of ``x``: ``reserve`` bytes and the body as
        :mod:`hvd_adaptive.wire` describes it; and ``float64[L, 4]``: energy (squared L2 norm) of
        ``x + grad``, energy of the values as they will be decoded, number of values sent, and 1 where
        the layer was not finite (the others are then 0).

    Raises:
        ValueError: the arguments do not fit together.

    Example:
        >>> import numpy as np, torch
        >>> from hvd_adaptive.wire import ValueFormat
        >>> x = torch.tensor([1.0, -5.0, 2.0, 0.0, 3.0])
        >>> offsets, counts = np.array([0, 3, 5]), np.array([1, 2])
        >>> grads = [torch.ones(3), torch.ones(2)]
        >>> body, stats = sparse_compress_(x, offsets, counts, ValueFormat.fp32, grads)
        >>> x.tolist(), stats[:, 2].tolist()
        ([2.0, 0.0, 3.0, 0.0, 0.0], [1.0, 2.0])
    """
    offsets, counts = check_layers(x, offsets, counts, grads, whole)
    floors = check_thresholds(rule, thresholds, len(counts)).tolist()
    layers = len(offsets) - 1
    check_spectra(spectra, layers)
    stats = np.zeros((layers, 4))
    for layer in range(layers):
        part = x[offsets[layer] : offsets[layer + 1]]
        total = part if grads is None else part + grads[layer].view(-1)
        stats[layer, 3] = not bool(total.isfinite().all())
        if not stats[layer, 3]:
            part.copy_(total)
            stats[layer, 0] = _energy(total)
            if spectra is not None:
                spectra[layer] += spectrum(part)
    parts = [torch.zeros(reserve, dtype=torch.uint8, device=x.device)]
    for span, (first, last) in enumerate(_spans(layers, whole)):
        if stats[first:last, 3].any():
            parts.append(_to_tensor(write_varint(1), x.device))
            continue
        part = x[offsets[first] : offsets[last]]
        indices = _select(part, int(counts[span]), rule, floors[span])
        taken = part[indices]
        encoded, decoded = _encode_layer(indices, taken, values)
        part[indices] = taken - decoded
        parts += encoded
        _note_sent(stats[first:last], offsets[first : last + 1], indices, decoded)
    return torch.cat(parts), stats


def _spans(layers: int, whole: bool) -> list[tuple[int, int]]:
    """First and last layer + 1 of everything that is selected from together."""
    return [(0, layers)] if whole else [(layer, layer + 1) for layer in range(layers)]


def _by_layer(offsets: npt.NDArray[np.int64], indices: Tensor, values: Tensor) -> list[Tensor]:
    """The values of each layer, of indices that count from the first layer on."""
    edges = torch.from_numpy(offsets - offsets[0]).to(indices.device)
    cuts = torch.searchsorted(indices, edges).tolist()
    return [values[start:end] for start, end in itertools.pairwise(cuts)]


def _note_sent(
    stats: npt.NDArray[np.float64], offsets: npt.NDArray[np.int64], indices: Tensor, decoded: Tensor
) -> None:
    """Energy and number of what the layers send, into their rows."""
    for row, values in zip(stats, _by_layer(offsets, indices, decoded), strict=True):
        row[1:3] = _energy(values), len(values)


# --- decoding ------------------------------------------------------------------------------------


class _FoundError(Exception):
    """What is wrong at which byte; :func:`sparse_decompress_add_` adds the layer."""

    def __init__(self, damage: Damage, position: int) -> None:
        super().__init__(damage, position)
        self.damage, self.position = damage, position


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at ``position`` and the position after it."""
    value = 0
    for length in range(MAX_VARINT_BYTES):
        if position + length >= len(data):
            raise _FoundError(Damage.truncated, len(data))
        byte = data[position + length]
        value |= (byte & 0x7F) << (7 * length)
        if byte < 0x80:
            if byte == 0 and length > 0:
                break
            return value, position + length + 1
    raise _FoundError(Damage.overlong, position)


def _window(stream: bytes, bit: int) -> int:
    """At least 64 bits of the stream from ``bit`` on, zeros past its end."""
    return int.from_bytes(stream[bit >> 3 : (bit >> 3) + 9], "little") >> (bit & 7)


def _read_indices(stream: bytes, start: int, numel: int, count: int) -> list[int]:
    """Decode ``count`` indices; ``start`` is where the stream lies in the body, for messages."""
    size, bit, index, r, grows, most = 8 * len(stream), 0, -1, 0, False, 0
    indices = []
    for i in range(count):
        if i % CODE_BLOCK == 0:
            head = _window(stream, bit)
            r, grows = head & HEAD_PARAMETER, bool(head & HEAD_TEUHOLA)
            bit += HEAD_BITS
            if r > numel.bit_length():
                raise _FoundError(Damage.parameter, start + (bit >> 3))
            most = (numel + (1 << r)).bit_length() - 1 - r if grows else numel >> r
        window = _window(stream, bit)
        quotient = 0
        while not window & ((1 << 26) - 1):
            bit, quotient = bit + 25, quotient + 25
            if bit >= size:
                raise _FoundError(Damage.truncated, start + (bit >> 3))
            if quotient > most:
                raise _FoundError(Damage.run, start + (bit >> 3))
            window = _window(stream, bit)
        zeros = (window & -window).bit_length() - 1
        quotient += zeros
        if grows and quotient > most:
            raise _FoundError(Damage.run, start + (bit >> 3))
        width = r + quotient if grows else r
        gap = (1 << width) - (1 << r) if grows else quotient << r
        index += 1 + gap + ((window >> (zeros + 1)) & ((1 << width) - 1))
        bit += zeros + 1 + width
        if index >= numel:
            raise _FoundError(Damage.index, start + (bit >> 3))
        indices.append(index)
    if bit > size:
        raise _FoundError(Damage.truncated, start + len(stream))
    if (bit + 7) >> 3 != len(stream):
        raise _FoundError(Damage.length, start + (bit >> 3))
    if _window(stream, bit):
        raise _FoundError(Damage.padding, start + len(stream) - 1)
    return indices


def _decode_values(data: Tensor, count: int, how: ValueFormat) -> Tensor:
    """The float32 values in ``data``, which has the right size."""
    if how is ValueFormat.int8:
        row = 4 + VALUE_BLOCK
        rows = _blocks(data, row)
        scales = rows[:, :4].contiguous().view(torch.float32)
        codes = rows[:, 4:].contiguous().view(torch.int8)
        return (codes.float() * scales).reshape(-1)[:count]
    if how is ValueFormat.sign:
        means = data[:8].clone().view(torch.float32)
        return torch.where(_unpack(data[8:])[:count].bool(), -means[1], means[0])
    dtype = {
        ValueFormat.fp32: torch.float32,
        ValueFormat.fp16: torch.float16,
        ValueFormat.bf16: torch.bfloat16,
    }[how]
    return data.clone().view(dtype).float()  # a clone is aligned


def _check_signs(data: Tensor, start: int, count: int) -> None:
    """Raise if a mean is not finite or a bit is set after the last sign."""
    if not bool(data[:8].clone().view(torch.float32).isfinite().all()):
        raise _FoundError(Damage.value, start)
    if bool(_unpack(data[8:])[count:].any()):
        raise _FoundError(Damage.padding, start + len(data) - 1)


def _decode_layer(
    body: Tensor, data: bytes, position: int, numel: int, expected: ValueFormat | None
) -> tuple[list[int], Tensor, bool, int]:
    """(indices, values, nonfinite, next position) of the layer at ``position``."""
    header, after = _read_varint(data, position)
    count, code, nonfinite = header >> 4, (header >> 1) & 7, bool(header & 1)
    if count == 0:
        if code:
            raise _FoundError(Damage.format, position)
        return [], body[:0].float(), nonfinite, after
    if count > numel or nonfinite:
        raise _FoundError(Damage.count, position)
    if code > max(ValueFormat) or (expected is not None and code != expected):
        raise _FoundError(Damage.format, position)
    how = ValueFormat(code)
    index_bytes, position = _read_varint(data, after)
    after = position + index_bytes
    end = after + how.nbytes(count)
    if end > len(data):
        raise _FoundError(Damage.truncated, len(data))
    indices = _read_indices(data[position:after], position, numel, count)
    if how is ValueFormat.sign:
        _check_signs(body[after:end], after, count)
    values = _decode_values(body[after:end], count, how)
    if not bool(values.isfinite().all()):
        raise _FoundError(Damage.value, after)
    return indices, values, False, end


def _decode(
    body: Tensor, data: bytes, numels: Sequence[int], expected: ValueFormat | None
) -> Iterator[tuple[list[int], Tensor, bool]]:
    """(indices, values, nonfinite) of one layer after the other; WireError at the first damage."""
    layer, position = 0, 0
    try:
        for layer in range(len(numels)):
            found = _decode_layer(body, data, position, numels[layer], expected)
            indices, values, nonfinite, position = found
            yield indices, values, nonfinite
        layer = max(0, len(numels) - 1)
        if position != len(data):
            raise _FoundError(Damage.trailing, position)
    except _FoundError as found_error:
        numel = numels[layer] if numels else 0
        at = min(found_error.position, len(data))
        raise damaged(found_error.damage, layer, numel, at, len(data)) from None


def _pieces(
    body: Tensor, outs: Sequence[Tensor], values: ValueFormat | None, whole: bool
) -> Iterator[tuple[int, Tensor, Tensor, Tensor, bool]]:
    """(number, the output as 1-D, indices into it, values, nonfinite) of one layer after the other."""
    numels = check_outs(body, outs, whole)
    edges = np.cumsum([0, *numels])
    spans = _spans(len(outs), whole)
    totals = [int(edges[last] - edges[first]) for first, last in spans]
    decoded = _decode(body, body.cpu().numpy().tobytes(), totals, values)
    for (first, last), (found, taken, nonfinite) in zip(spans, decoded, strict=True):
        indices = torch.tensor(found, dtype=torch.int64, device=body.device)
        offsets = edges[first : last + 1] - edges[first]
        parts = zip(
            _by_layer(offsets, indices, indices), _by_layer(offsets, indices, taken), strict=True
        )
        for layer, (where, part) in enumerate(parts, first):
            yield layer, outs[layer].view(-1), where - int(offsets[layer - first]), part, nonfinite


def sparse_decompress_add_(
    body: Tensor,
    outs: Sequence[Tensor],
    scale: float,
    values: ValueFormat | None = None,
    whole: bool = False,
) -> npt.NDArray[np.uint8]:
    """Add ``scale`` times every value of a body at its index; a layer marked nonfinite becomes NaN.

    A layer is added as a whole or not at all: when a WireError is raised, the layers before the damaged
    one have been added, and the outputs of the others are as they were.

    Args:
        body: uint8, 1-D, contiguous: the layers of one bucket, no header.
        outs: one contiguous float32 tensor a layer, of any shape, on the device of ``body``.
        scale: what to multiply with, as float32.
        values: the format that all layers must have; None takes each layer's own.
        whole: the body is one layer over all outputs.

    Returns:
        ``uint8[L]``: 1 where a layer was marked nonfinite.

    Raises:
        WireError: the body is damaged or does not belong to these layers; says what was found where.
        ValueError: the tensors are not as described.

    Example:
        >>> import numpy as np, torch
        >>> from hvd_adaptive.wire import ValueFormat
        >>> x, out = torch.tensor([1.0, -5.0, 2.0]), torch.zeros(3)
        >>> body, _ = sparse_compress_(x, np.array([0, 3]), np.array([1]), ValueFormat.fp16)
        >>> sparse_decompress_add_(body, [out], scale=0.5).tolist(), out.tolist()
        ([0], [0.0, -2.5, 0.0])
    """
    marks = np.zeros(len(outs), np.uint8)
    for layer, out, where, taken, nonfinite in _pieces(body, outs, values, whole):
        marks[layer] = nonfinite
        if nonfinite:
            out.fill_(float("nan"))
        out[where] += taken * torch.tensor(scale, dtype=torch.float32, device=out.device)
    return marks


def sparse_decompress_sum_(
    bodies: Sequence[Tensor],
    outs: Sequence[Tensor],
    scale: float,
    values: ValueFormat | None = None,
    whole: bool = False,
) -> npt.NDArray[np.uint8]:
    """Set the outputs to ``scale`` times the sum of all bodies.

    It is what :func:`sparse_decompress_add_` of one after the other makes of zeros, bit for bit. When a
    WireError is raised, what the outputs hold means nothing.

    Args:
        bodies: one a rank, of at least one.
        outs: as for :func:`sparse_decompress_add_`, like all that follows, the marks and the errors.
        scale: what to multiply with.
        values: the format of the values.
        whole: each body is one layer over all outputs.

    Example:
        >>> import numpy as np, torch
        >>> from hvd_adaptive.wire import ValueFormat
        >>> x, out = torch.tensor([1.0, -5.0, 2.0]), torch.ones(3)
        >>> body, _ = sparse_compress_(x, np.array([0, 3]), np.array([1]), ValueFormat.fp16)
        >>> sparse_decompress_sum_([body, body], [out], scale=0.5).tolist(), out.tolist()
        ([0], [0.0, -5.0, 0.0])
    """
    for out in outs:
        out.zero_()
    marks = np.zeros(len(outs), np.uint8)
    for body in check_bodies(bodies):
        marks |= sparse_decompress_add_(body, outs, scale, values, whole)
    return marks


def sparse_clear_(
    body: Tensor, outs: Sequence[Tensor], values: ValueFormat | None = None, whole: bool = False
) -> None:
    """Set the outputs to 0 at every index that a body holds; layers marked nonfinite hold none.

    What DGC's momentum factor masking needs (Lin et al. 2018, section 3.2). Bodies are checked as by
    :func:`sparse_decompress_add_`, with the same arguments and errors.

    Example:
        >>> import numpy as np, torch
        >>> from hvd_adaptive.wire import ValueFormat
        >>> x, momentum = torch.tensor([1.0, -5.0, 2.0]), torch.ones(3)
        >>> body, _ = sparse_compress_(x, np.array([0, 3]), np.array([1]), ValueFormat.fp16)
        >>> sparse_clear_(body, [momentum])
        >>> momentum.tolist()
        [1.0, 0.0, 1.0]
    """
    for _, out, where, _, _ in _pieces(body, outs, values, whole):
        out[where] = 0


def sparse_recompress_(
    body: Tensor,
    x: Tensor,
    offsets: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    values: ValueFormat,
    reserve: int = 0,
    rule: SelectionRule = SelectionRule.topk,
    thresholds: npt.NDArray[np.float32] | None = None,
    whole: bool = False,
) -> tuple[Tensor, npt.NDArray[np.float64]]:
    """Compress a body further: send some of its values, add the others back to the remainder.

    The rule is applied to the values that a layer's body decodes to, as if they were the layer. What
    it drops, and what encoding again rounds off, is added to ``x``: the new body + the new ``x`` are
    what the old body + the old ``x`` were, up to one float32 rounding. Biased. A mark is passed on.

    Cost: that of the values in ``body``, whatever the size of the layers. Source: multi-level
    compression of Tyagi and Swany, "GraVAC" (IEEE CLOUD 2023), section III.

    Args:
        body: uint8, 1-D, contiguous, no header: what :func:`sparse_compress_` returned for ``x``.
        x: float32, 1-D, contiguous: the remainder that it left; overwritten by the new one.
        offsets: ``int64[L + 1]``: those of the compression.
        counts: ``int64[L]``: the rule's ``k``, of the whole layer.
        values: how values travel, in the old body and the new.
        reserve: bytes to leave free in front of the new body.
        rule: how many to send, given ``counts``.
        thresholds: ``float32[L]``, 0 or more: for ``SelectionRule.threshold``, None for all others.
        whole: the body is one layer over all of ``x``'s; ``counts`` has one entry.

    Returns:
        ``(data, stats)`` as from :func:`sparse_compress_`, but the energy in the first column is that
        of the values in the old body.

    Raises:
        WireError: the body is damaged or does not belong to these layers; those before the damaged one
            have been shrunk already.
        ValueError: the arguments do not fit together.

    Example:
        >>> import numpy as np, torch
        >>> from hvd_adaptive.wire import ValueFormat
        >>> x, offsets = torch.tensor([1.0, -5.0, 2.0]), np.array([0, 3])
        >>> body, _ = sparse_compress_(x, offsets, np.array([2]), ValueFormat.fp32)
        >>> less, _ = sparse_recompress_(body, x, offsets, np.array([1]), ValueFormat.fp32)
        >>> body.numel(), less.numel(), x.tolist()
        (12, 7, [1.0, 0.0, 2.0])
    """
    offsets, counts = check_layers(x, offsets, counts, None, whole)
    floors = check_thresholds(rule, thresholds, len(counts)).tolist()
    check_body(body, x)
    layers = len(offsets) - 1
    spans = _spans(layers, whole)
    numels = [int(offsets[last] - offsets[first]) for first, last in spans]
    parts = [torch.zeros(reserve, dtype=torch.uint8, device=x.device)]
    stats = np.zeros((layers, 4))
    decoded = _decode(body, body.cpu().numpy().tobytes(), numels, values)
    for span, (found, old, nonfinite) in enumerate(decoded):
        first, last = spans[span]
        if nonfinite:
            stats[first:last, 3] = 1
            parts.append(_to_tensor(write_varint(1), x.device))
            continue
        part, edges = x[offsets[first] : offsets[last]], offsets[first : last + 1]
        indices = torch.tensor(found, dtype=torch.int64, device=x.device)
        stats[first:last, 0] = [_energy(values) for values in _by_layer(edges, indices, old)]
        kept = _select(old, int(counts[span]), rule, floors[span])
        encoded, new = _encode_layer(indices[kept], old[kept], values)
        left = old.clone()
        left[kept] -= new
        # rounding up the largest of all magnitudes would give Inf
        part[indices] = (part[indices] + left).clamp(-LARGEST, LARGEST)
        parts += encoded
        _note_sent(stats[first:last], edges, indices[kept], new)
    return torch.cat(parts), stats


# --- the spectrum --------------------------------------------------------------------------------


def spectrum(x: Tensor) -> npt.NDArray[np.int64]:
    """Histogram of magnitudes: how many elements share exponent and upper 7 bits of the mantissa.

    Args:
        x: float32, contiguous, of any shape.

    Returns:
        ``int64[32768]``, from the smallest magnitude (bin 0: zeros and the least denormals) to the
        largest; bins from 32,640 on count Inf and NaN.

    Raises:
        ValueError: the tensor is not as described.

    Example:
        >>> import torch
        >>> hist = spectrum(torch.tensor([0.0, 1.0, -1.0, float("inf")]))
        >>> hist[0], hist[127 << 7], hist[0x7F80:].sum()
        (np.int64(1), np.int64(2), np.int64(1))
    """
    check_spectrum(x)
    bins = torch.bincount(_magnitudes(x.view(-1)) >> 16, minlength=BINS)
    return bins.cpu().numpy()


def _bin_energies() -> npt.NDArray[np.float64]:
    """Mean square of each bin, of magnitudes spread evenly over it; 0 for Inf and NaN."""
    finite = INF >> 16
    starts = (np.arange(finite, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    edges = np.append(starts.astype(np.float64), 2.0**128)
    low, high = edges[:-1], edges[1:]
    energies = np.zeros(BINS)
    energies[:finite] = (low * low + low * high + high * high) / 3
    energies[0] = 0  # almost always zeros; the denormals that share the bin have no energy to speak of
    return energies


BIN_ENERGIES = _bin_energies()


def errors_from_spectrum(
    hist: npt.NDArray[np.int64], energy: float, numel: int, counts: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Squared L2 error of top-k for many k from one histogram: within 1 % of the truth.

    The energy of a bin is its count times its mean square, scaled so that all bins together have the
    exact energy; inside the bin of the k-th largest, energy is taken to be proportional to the count.
    The rounding of values is not counted. Cost: one pass over 32,768 bins.

    Args:
        hist: ``int64[32768]`` from :func:`spectrum`.
        energy: squared L2 norm of the tensor.
        numel: its number of elements.
        counts: ``int64[C]``: how many elements would be sent, each 0 or more.

    Returns:
        ``float64[C]``; NaN throughout where the tensor was not finite.

    Raises:
        ValueError: the histogram is not one of ``numel`` elements.

    Example:
        >>> import numpy as np, torch
        >>> x = torch.tensor([4.0, 3.0, 2.0, 1.0])
        >>> errors_from_spectrum(spectrum(x), 30.0, 4, np.array([0, 1, 4])).round(1).tolist()
        [30.0, 14.0, 0.0]
    """
    if hist.shape != (BINS,) or int(hist.sum()) != numel:
        raise ValueError(
            f"expected a histogram of {BINS} bins that counts {numel} elements, got shape "
            f"{hist.shape} counting {int(hist.sum())}"
        )
    counts = np.asarray(counts, dtype=np.int64)
    if hist[INF >> 16 :].any():
        return np.full(len(counts), np.nan)
    used = np.flatnonzero(hist)  # some thousands of the bins at most
    energies = hist[used] * BIN_ENERGIES[used]
    total = energies.sum()
    if total == 0.0:
        return np.zeros(len(counts))
    left = np.concatenate([[0.0], np.cumsum(energies)]) * (energy / total)
    kept = np.concatenate([[0], np.cumsum(hist[used])])
    errors: npt.NDArray[np.float64] = np.interp(numel - np.minimum(counts, numel), kept, left)
    return errors


# --- what the other error tables are made of -----------------------------------------------------


def sample_spectrum(x: Tensor) -> npt.NDArray[np.int64]:
    """The :func:`spectrum` of DGC's sample: one group of 16 in 13, from 2^21 elements on one in 61.

    Args:
        x: float32, contiguous, of any shape.

    Returns:
        ``int64[32768]``; empty where ``x`` has no more than one group.

    Example:
        >>> import torch
        >>> int(sample_spectrum(torch.ones(1000)).sum())
        80
    """
    check_spectrum(x)
    stride = SAMPLE * STRIDES[x.numel() >= LARGE]
    starts = torch.arange(0, max(0, x.numel() - SAMPLE), stride, device=x.device)
    places = starts.unsqueeze(1) + torch.arange(SAMPLE, device=x.device)
    return spectrum(x.view(-1)[places])


def refined_spectrum(x: Tensor, bins: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """How the elements inside some bins of the :func:`spectrum` are spread: exact magnitudes.

    Args:
        x: float32, contiguous, of any shape, fewer than 2^31 elements.
        bins: ``int64[B]``, all different.

    Returns:
        ``int32[B, 65536]``: counts by the lower 16 bits of the magnitude.

    Raises:
        ValueError: the arguments are not as described.

    Example:
        >>> import numpy as np, torch
        >>> fine = refined_spectrum(torch.tensor([1.0, -1.0, 1.0 + 2**-23, 2.0]), np.array([127 << 7]))
        >>> fine.shape, fine[0, :2].tolist()
        ((1, 65536), [2, 1])
    """
    check_spectrum(x)
    magnitudes = _magnitudes(x.view(-1))
    fine = np.zeros((len(bins), 1 << 16), np.int32)
    for row, b in enumerate(check_bins(bins).tolist()):
        inside = magnitudes[magnitudes >> 16 == b] & 0xFFFF
        fine[row] = torch.bincount(inside, minlength=1 << 16).cpu().numpy()
    return fine


def summary(x: Tensor) -> tuple[npt.NDArray[np.int64], float, float, float]:
    """What the errors of all levels are estimated from, in one read of ``x``.

    Args:
        x: float32, contiguous, of any shape.

    Returns:
        The :func:`spectrum`, the sum of the magnitudes, the energy (squared L2 norm), and the largest
        magnitude; sums in float64.

    Example:
        >>> import torch
        >>> hist, *norms = summary(torch.tensor([3.0, -4.0]))
        >>> int(hist.sum()), norms
        (2, [7.0, 25.0, 4.0])
    """
    largest = float(x.abs().max()) if x.numel() else 0.0
    return spectrum(x), float(x.double().abs().sum()), _energy(x), largest


def moments(x: Tensor) -> npt.NDArray[np.float64]:
    """The :func:`spectrum` of either sign with sums: what the error of signs and means is made of.

    Args:
        x: float32, contiguous, of any shape.

    Returns:
        ``float64[2, 32768, 3]``: of the elements with a plus and of those with a minus, for each bin
        their number, the sum of their magnitudes, and that of their squares.

    Example:
        >>> import torch
        >>> moments(torch.tensor([1.0, -1.0, -1.0]))[:, 127 << 7].tolist()
        [[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]]
    """
    check_spectrum(x)
    flat = x.view(-1)
    rows = (_magnitudes(flat) >> 16).long() + BINS * (flat.view(torch.int32) < 0)
    magnitudes = flat.double().abs()
    columns = [
        torch.bincount(rows, weights=weights, minlength=2 * BINS)
        for weights in (torch.ones_like(magnitudes), magnitudes, magnitudes.square())
    ]
    sums: npt.NDArray[np.float64] = torch.stack(columns, dim=1).view(2, BINS, 3).cpu().numpy()
    return sums


def position_bits(x: Tensor, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Bits that the positions of the largest elements take on the wire, exactly, for many counts.

    Args:
        x: float32, contiguous, of any shape, fewer than 2^31 elements.
        counts: ``int64[C]``: how many of the largest are sent, each 0 or more; of equals those of
            lowest index, and never a zero.

    Returns:
        ``int64[C, 2]``: how many there are to send, and the bits of their index stream; 0 where
        ``x`` holds a NaN or an Inf.

    Raises:
        ValueError: the arguments are not as described.

    Example:
        >>> import numpy as np, torch
        >>> position_bits(torch.tensor([0.0, 3.0, 2.0, 1.0]), np.array([0, 1, 4])).tolist()
        [[0, 0], [1, 8], [3, 10]]
    """
    counts = check_counts(x, counts)
    table = np.zeros((len(counts), 2), np.int64)
    if not bool(x.isfinite().all()):
        return table
    for row, count in zip(table, counts.tolist(), strict=True):
        indices = _select(x.view(-1), count, SelectionRule.topk, 1)
        _, blocks, sizes = _gap_blocks(indices)
        row[:] = len(indices), int(_heads(blocks, sizes)[1].sum())
    return table
