"""The kernels in plain torch: any device, one layer at a time, and what every other kernel must equal.

Written to be read, not to be fast: a sort instead of a threshold, an array element for every bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.wire import (
    MAX_NUMEL,
    MAX_SCALE,
    MAX_VARINT_BYTES,
    RICE_BITS,
    RICE_BLOCK,
    VALUE_BLOCK,
    Damage,
    ValueFormat,
    damaged,
    write_varint,
)

BINS = 1 << 15
"""Bins of the spectrum: one for each exponent and upper 7 bits of the mantissa."""
MAGNITUDE = 0x7FFFFFFF
INF = 0x7F800000


# --- checks that all kernels share ---------------------------------------------------------------


def check_layers(
    x: Tensor,
    offsets: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    grads: Sequence[Tensor] | None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """``offsets`` and ``counts`` as contiguous int64; ValueError where the input does not fit."""
    offsets = np.ascontiguousarray(offsets, dtype=np.int64)
    counts = np.ascontiguousarray(counts, dtype=np.int64)
    if x.dtype != torch.float32 or x.dim() != 1 or not x.is_contiguous():
        raise ValueError(f"x is 1-D contiguous float32, got {_describe(x)}")
    if offsets.ndim != 1 or len(offsets) != len(counts) + 1:
        raise ValueError(
            f"L layers have L + 1 offsets and L counts, got {offsets.shape} and {counts.shape}"
        )
    sizes = offsets[1:] - offsets[:-1]
    if offsets[0] < 0 or offsets[-1] > x.numel() or (len(sizes) and sizes.min() < 0):
        raise ValueError(f"offsets must rise from 0 to at most the {x.numel()} elements of x")
    if len(counts) and (counts.min() < 0 or sizes.max() > MAX_NUMEL):
        raise ValueError(f"counts must be 0 or more, layers at most {MAX_NUMEL} elements")
    if grads is not None:
        if len(grads) != len(counts):
            raise ValueError(f"got {len(grads)} gradients for {len(counts)} layers")
        for layer, (grad, numel) in enumerate(zip(grads, sizes.tolist(), strict=True)):
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
    return offsets, counts


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


def check_outs(body: Tensor, outs: Sequence[Tensor]) -> list[int]:
    """The numbers of elements of the tensors that a body is added to; ValueError where one is unfit."""
    if body.dtype != torch.uint8 or body.dim() != 1 or not body.is_contiguous():
        raise ValueError(f"a body is 1-D contiguous uint8, got {_describe(body)}")
    for out in outs:
        if out.dtype != torch.float32 or not out.is_contiguous() or out.is_cpu != body.is_cpu:
            raise ValueError(
                f"values are added to contiguous float32 tensors on {body.device}, got {_describe(out)}"
            )
    return [out.numel() for out in outs]


def check_spectrum(x: Tensor) -> None:
    """ValueError unless ``x`` is contiguous float32."""
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"the spectrum is that of a contiguous float32 tensor, got {_describe(x)}")


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


def _rice_parameters(gaps: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """The parameter and the bits of each row of gaps: the cheapest of three around log2(mean)."""
    middle = (_bit_length(gaps.sum(1) // sizes) - 1).clamp(min=1)
    candidates = torch.stack([middle - 1, middle, middle + 1], dim=1)
    quotients = (gaps.unsqueeze(1) >> candidates.unsqueeze(2)).sum(2)
    cost = quotients + sizes.unsqueeze(1) * (candidates + 1)
    best = cost.cpu().numpy().argmin(1)  # the first of equals, which torch does not promise
    chosen = torch.from_numpy(best).to(gaps.device).unsqueeze(1)
    return candidates.gather(1, chosen).squeeze(1), cost.gather(1, chosen).squeeze(1) + RICE_BITS


def _index_stream(indices: Tensor) -> Tensor:
    """The Rice-coded gaps of rising int64 indices, as bytes."""
    device = indices.device
    gaps = torch.diff(indices, prepend=torch.full((1,), -1, device=device)) - 1
    rows = _blocks(gaps, RICE_BLOCK)
    sizes = torch.full((len(rows),), RICE_BLOCK, device=device)
    sizes[-1] -= rows.numel() - gaps.numel()
    parameters, lengths = _rice_parameters(rows, sizes)
    starts = torch.cumsum(lengths, 0) - lengths
    bits = torch.zeros(-(-int(lengths.sum()) // 8) * 8, dtype=torch.uint8, device=device)
    for bit in range(RICE_BITS):
        bits[starts + bit] = ((parameters >> bit) & 1).to(torch.uint8)

    r = parameters.repeat_interleave(sizes)
    code_lengths = (gaps >> r) + 1 + r
    ends = torch.cumsum(code_lengths, 0) + RICE_BITS * (
        torch.arange(len(gaps), device=device) // RICE_BLOCK + 1
    )
    ones = ends - r - 1
    bits[ones] = 1
    for bit in range(int(parameters.max())):
        has = r > bit
        bits[(ones + 1 + bit)[has]] = ((gaps[has] >> bit) & 1).to(torch.uint8)
    weights = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)
    return (bits.view(-1, 8) * weights).sum(1, dtype=torch.uint8)


def _encode_values(values: Tensor, how: ValueFormat) -> tuple[Tensor, Tensor]:
    """The bytes of float32 values, and the float32 values that they decode to."""
    if how is ValueFormat.int8:
        return _encode_int8(values)
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


def _compress_layer_(x: Tensor, k: int, how: ValueFormat) -> tuple[list[Tensor], float, int]:
    """Encode the k largest of a finite ``x``, leave the remainder; (parts, energy sent, count)."""
    magnitudes = _magnitudes(x)
    k = min(k, int((magnitudes > 0).sum()))
    header = write_varint(k << 3 | (how << 1 if k else 0))
    if k == 0:
        return [_to_tensor(header, x.device)], 0.0, 0
    order = torch.sort(magnitudes, descending=True, stable=True).indices
    indices = order[:k].sort().values
    taken = x[indices]
    stream = _index_stream(indices)
    data, decoded = _encode_values(taken, how)
    x[indices] = taken - decoded
    header += write_varint(stream.numel())
    return [_to_tensor(header, x.device), stream, data], _energy(decoded), k


def _to_tensor(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)


def _energy(x: Tensor) -> float:
    return float(x.double().square().sum())


def topk_compress_(
    x: Tensor,
    offsets: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
    values: ValueFormat,
    grads: Sequence[Tensor] | None = None,
    reserve: int = 0,
    spectra: npt.NDArray[np.int64] | None = None,
) -> tuple[Tensor, npt.NDArray[np.float64]]:
    """Add the gradients, take the largest elements of each layer out of ``x``, and encode them.

    Exactly ``k`` elements of a layer are sent, ties broken by the lowest index, but never a zero: the
    count sent is ``min(k, nonzeros)``. What is not sent stays in ``x``: 0 where a value travelled
    exactly, its rounding error otherwise, so that payload + remainder is what ``x`` was. Biased.

    A layer whose sum ``x + grad`` has a NaN or an Inf keeps its ``x`` bit for bit and sends a mark.

    Source: exact selection by a histogram of float bits, in the place of the sort of Aji and
    Heafield, "Sparse Communication for Distributed Gradient Descent" (EMNLP 2017), section 3.

    Args:
        x: float32, 1-D, contiguous; layer ``l`` is ``x[offsets[l]:offsets[l + 1]]``.
        offsets: ``int64[L + 1]``, rising; a layer may be empty and holds at most 2^31 - 1 elements.
        counts: ``int64[L]``: how many elements to send of each layer, 0 or more.
        values: how values travel.
        grads: one contiguous float32 tensor a layer, of any shape with as many elements, on the
            device of ``x``; None adds nothing.
        reserve: bytes to leave free, with whatever they hold, in front of the body (for
            :func:`hvd_adaptive.wire.write_header`).
        spectra: ``int64[L, 32768]``: the :func:`spectrum` of each finite layer, gradient included, is
            added to its row in the same pass; None counts nothing.

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
        >>> body, stats = topk_compress_(x, offsets, counts, ValueFormat.fp32, grads)
        >>> x.tolist(), stats[:, 2].tolist()
        ([2.0, 0.0, 3.0, 0.0, 0.0], [1.0, 2.0])
    """
    offsets, counts = check_layers(x, offsets, counts, grads)
    check_spectra(spectra, len(counts))
    parts = [torch.zeros(reserve, dtype=torch.uint8, device=x.device)]
    stats = np.zeros((len(counts), 4))
    for layer, k in enumerate(counts.tolist()):
        part = x[offsets[layer] : offsets[layer + 1]]
        total = part if grads is None else part + grads[layer].view(-1)
        if not bool(total.isfinite().all()):
            stats[layer] = (0, 0, 0, 1)
            parts.append(_to_tensor(write_varint(1), x.device))
            continue
        energy = _energy(total)
        part.copy_(total)
        if spectra is not None:
            spectra[layer] += spectrum(part)
        encoded, sent, count = _compress_layer_(part, k, values)
        stats[layer] = (energy, sent, count, 0)
        parts += encoded
    return torch.cat(parts), stats


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
    size, bit, index, r = 8 * len(stream), 0, -1, 0
    indices = []
    for i in range(count):
        if i % RICE_BLOCK == 0:
            r = _window(stream, bit) & ((1 << RICE_BITS) - 1)
            bit += RICE_BITS
            if r > numel.bit_length():
                raise _FoundError(Damage.rice, start + (bit >> 3))
        window = _window(stream, bit)
        quotient = 0
        while not window & ((1 << 26) - 1):
            bit, quotient = bit + 25, quotient + 25
            if bit >= size:
                raise _FoundError(Damage.truncated, start + (bit >> 3))
            if quotient > numel >> r:
                raise _FoundError(Damage.run, start + (bit >> 3))
            window = _window(stream, bit)
        zeros = (window & -window).bit_length() - 1
        index += 1 + (((quotient + zeros) << r) | ((window >> (zeros + 1)) & ((1 << r) - 1)))
        bit += zeros + 1 + r
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
    dtype = {
        ValueFormat.fp32: torch.float32,
        ValueFormat.fp16: torch.float16,
        ValueFormat.bf16: torch.bfloat16,
    }[how]
    return data.clone().view(dtype).float()  # a clone is aligned


def _decode_layer(
    body: Tensor, data: bytes, position: int, numel: int, expected: ValueFormat | None
) -> tuple[list[int], Tensor, bool, int]:
    """(indices, values, nonfinite, next position) of the layer at ``position``."""
    header, after = _read_varint(data, position)
    count, how, nonfinite = header >> 3, ValueFormat((header >> 1) & 3), bool(header & 1)
    if count == 0:
        if how:
            raise _FoundError(Damage.format, position)
        return [], body[:0].float(), nonfinite, after
    if count > numel or nonfinite:
        raise _FoundError(Damage.count, position)
    if expected is not None and how != expected:
        raise _FoundError(Damage.format, position)
    index_bytes, position = _read_varint(data, after)
    after = position + index_bytes
    end = after + how.nbytes(count)
    if end > len(data):
        raise _FoundError(Damage.truncated, len(data))
    indices = _read_indices(data[position:after], position, numel, count)
    values = _decode_values(body[after:end], count, how)
    if not bool(values.isfinite().all()):
        raise _FoundError(Damage.value, after)
    return indices, values, False, end


def sparse_decompress_add_(
    body: Tensor, outs: Sequence[Tensor], scale: float, values: ValueFormat | None = None
) -> npt.NDArray[np.uint8]:
    """Add ``scale`` times every value of a body at its index; a layer marked nonfinite becomes NaN.

    A layer is decoded and checked as a whole before anything is added to its output: when a
    WireError is raised, the layers before the damaged one have been added, the others not touched.

    Args:
        body: uint8, 1-D, contiguous: the layers of one bucket, no header.
        outs: one contiguous float32 tensor a layer, of any shape, on the device of ``body``.
        scale: what to multiply with, as float32.
        values: the format that all layers must have; None takes each layer's own.

    Returns:
        ``uint8[L]``: 1 where a layer was marked nonfinite.

    Raises:
        WireError: the body is damaged or does not belong to these layers; says what was found where.
        ValueError: the tensors are not as described.

    Example:
        >>> import numpy as np, torch
        >>> from hvd_adaptive.wire import ValueFormat
        >>> x, out = torch.tensor([1.0, -5.0, 2.0]), torch.zeros(3)
        >>> body, _ = topk_compress_(x, np.array([0, 3]), np.array([1]), ValueFormat.fp16)
        >>> sparse_decompress_add_(body, [out], scale=0.5).tolist(), out.tolist()
        ([0], [0.0, -2.5, 0.0])
    """
    numels = check_outs(body, outs)
    data = body.cpu().numpy().tobytes()
    marks = np.zeros(len(outs), np.uint8)
    layer, position = 0, 0
    try:
        for layer, out in enumerate(outs):
            found = _decode_layer(body, data, position, numels[layer], values)
            indices, decoded, nonfinite, position = found
            flat = out.view(-1)
            if nonfinite:
                flat.fill_(float("nan"))
                marks[layer] = 1
            where = torch.tensor(indices, dtype=torch.int64, device=out.device)
            flat[where] += decoded * torch.tensor(scale, dtype=torch.float32, device=out.device)
        if position != len(data):
            raise _FoundError(Damage.trailing, position)
    except _FoundError as found_error:
        numel = numels[layer] if outs else 0
        at = min(found_error.position, len(data))
        raise damaged(found_error.damage, layer, numel, at, len(data)) from None
    return marks


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
