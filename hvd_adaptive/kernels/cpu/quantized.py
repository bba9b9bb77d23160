"""Quantization for host memory, in Numba: one call does all layers of a bucket, without the GIL.

Two passes over a layer, block by block. The first forms ``x + gradient`` in cache, measures it and
writes the blocks' norms; a NaN or an Inf ends it with nothing changed. The second forms the sum again,
chooses codes, packs them, and leaves in ``x`` what they do not hold. Sums are pairwise, which is an
order too, so the bytes are those of the reference.
"""

# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import carray, int32, int64, uint8, uint16, uint32
from torch import Tensor

from hvd_adaptive.kernels.checks import check_bits, check_keys, check_layers, check_outs
from hvd_adaptive.kernels.cpu.compiling import kernel, reordered
from hvd_adaptive.kernels.cpu.intrinsics import (
    bits_float,
    float32_pointer,
    float_bits,
    load_f32,
    load_u8,
    load_u32,
    store_f32,
    store_u8,
)
from hvd_adaptive.kernels.cpu.packing import bytes_of_codes, group_size, pack_codes, unpack_codes
from hvd_adaptive.kernels.cpu.rounding import (
    CLIPPED,
    EXPONENT,
    L2,
    MEAN,
    POWER,
    POWERS,
    SIDES,
    TABLE,
    UNIFORM,
    block_levels,
    choose_codes,
    decode_codes,
    key_halves,
    leave_remainder,
    random_word,
    saturated_share,
    stream_of,
)
from hvd_adaptive.kernels.cpu.streams import SLACK
from hvd_adaptive.kernels.cpu.symbols import OVERSHOOT, Decoder, decode_until, is_whole, move_down
from hvd_adaptive.kernels.cpu.tables import (
    FEW,
    FEW_TO_DECODE,
    add_few,
    find_intervals,
    round_to_few,
)
from hvd_adaptive.kernels.floats import INF, MAGNITUDE
from hvd_adaptive.kernels.huffman import Code, layers_of
from hvd_adaptive.kernels.quantization import (
    EDGES,
    LARGEST_BF16,
    LARGEST_NORM,
    NAN_BF16,
    WEIGHT_BINS,
    WEIGHT_SHIFT,
    ReceivedBody,
    sum_one_by_one,
)
from hvd_adaptive.wire.quantized import (
    LEVELS,
    MAX_BITS,
    NONFINITE,
    Damage,
    QuantizationRule,
    Tables,
    damaged,
    layer_bytes,
)

TRUNCATED, HEADER, NORM, CODE, PADDING, TRAILING, STREAM = (
    int(Damage[name])
    for name in ("truncated", "header", "norm", "code", "padding", "trailing", "stream")
)


@kernel
def form(x, g, n, sums):
    """(address of n values of x + g, their largest magnitude as bits): x's own without a gradient."""
    a = carray(float32_pointer(x), n)
    top = int32(0)
    if g == 0:
        for i in range(n):
            top = max(top, int32(float_bits(a[i]) & uint32(MAGNITUDE)))
        return x, int64(top)
    b = carray(float32_pointer(g), n)
    c = carray(float32_pointer(sums), n)
    for i in range(n):
        value = a[i] + b[i]
        c[i] = value
        top = max(top, int32(float_bits(value) & uint32(MAGNITUDE)))
    return sums, int64(top)


@kernel
def _total(terms, n):
    """The sum of n terms, the upper half added to the lower again and again; overwrites them."""
    while n > 1:
        half = 1
        while 2 * half < n:
            half *= 2
        lower, upper = terms[:half], terms[half:n]
        for i in range(n - half):
            lower[i] += upper[i]
        n = half
    return terms[0]


@kernel
def squares(address, n, terms):
    """The energy of n values."""
    a = carray(float32_pointer(address), n)
    for i in range(n):
        terms[i] = np.float64(a[i]) * np.float64(a[i])
    return _total(terms, n)


@kernel
def _mean_of_side(address, n, sign, terms):
    """Mean magnitude of the values that are negative (sign -1) or are not (1); 0 of none."""
    a = carray(float32_pointer(address), n)
    negative = 0
    for i in range(n):
        negative += int64(a[i] < 0)
        terms[i] = np.float64(max(sign * a[i], np.float32(0)))
    count = negative if sign < 0 else n - negative
    return abs(np.float32(_total(terms, n) / max(1, count)))  # no -0


@kernel
def _mean(address, n, terms):
    a = carray(float32_pointer(address), n)
    for i in range(n):
        terms[i] = np.float64(abs(a[i]))
    return np.float32(_total(terms, n) / n)


@kernel
def put_norms(out, address, n, energy, top, norm, clip, terms):
    """Write the norms of one block; returns the address after them."""
    if norm == SIDES:
        store_f32(out, _mean_of_side(address, n, np.float32(-1), terms))
        store_f32(out + 4, _mean_of_side(address, n, np.float32(1), terms))
        return out + 8
    if norm == L2:
        value = np.float32(min(np.sqrt(energy), LARGEST_NORM))
    elif norm == MEAN:
        value = _mean(address, n, terms)
    elif norm == POWER:
        value = bits_float(uint32((top + 0x7FFFFF) & EXPONENT))
    else:
        value = bits_float(uint32(top))
        if norm == CLIPPED:
            value = min(value, np.float32(min(clip * np.sqrt(energy / n), LARGEST_NORM)))
    value = min(value, np.float32(LARGEST_NORM))
    store_f32(out, value)
    return out + 4


@kernel
def _measure(x, g, n, block, norm, clip, out, work):
    """The first pass: write the norms. Returns (energy; -1 where not finite, address after them)."""
    sums, terms, _, _, _, _, _, _ = work
    sums_address = int64(sums.ctypes.data)
    energy = 0.0
    for start in range(0, n, block):
        size = min(block, n - start)
        values, top = form(x + 4 * start, g + 4 * start if g else 0, size, sums_address)
        if top >= INF:
            return -1.0, out
        block_energy = squares(values, size, terms)
        energy += block_energy
        out = put_norms(out, values, size, block_energy, top, norm, clip, terms)
    return energy, out


@kernel
def _encode(x, g, n, bits, stream, rule, levels, alphabet, norms, out, work):
    """The second pass over a layer whose norms are written: (energy sent, address after the codes)."""
    block, norm, rounding, _ = rule
    sums, _, codes, decoded, _, _, lows, highs = work
    few = rounding == TABLE and alphabet <= FEW
    if few:
        find_intervals(levels, alphabet, lows, highs)
    sums_address, codes_address = int64(sums.ctypes.data), int64(codes.ctypes.data)
    pair = np.empty(2, np.float32)
    group = group_size(alphabet)
    end = out + bytes_of_codes(n, bits, alphabet)
    sent, ready = 0.0, 0
    for start in range(0, n, block):
        size = min(block, n - start)
        values, _ = form(x + 4 * start, g + 4 * start if g else 0, size, sums_address)
        scale, table = block_levels(norms, norm == SIDES, levels, pair)
        norms += 8 if norm == SIDES else 4
        chosen = codes[ready:]
        if few:
            round_to_few(values, size, scale, lows, highs, alphabet, stream, start, chosen, decoded)
        else:
            choose_codes(
                values, size, scale, rounding, bits, levels, alphabet, stream, start, chosen, work
            )
            decode_codes(chosen, size, scale, rounding, table, alphabet, decoded)
        sent += leave_remainder(x + 4 * start, values, size, decoded)
        ready += size
        out = pack_codes(codes_address, ready // group, bits, alphabet, out)
        done = ready // group * group
        for i in range(ready - done):
            codes[i] = codes[done + i]
        ready -= done
    codes[ready : ready + group] = 0
    pack_codes(codes_address, (ready + group - 1) // group, bits, alphabet, out)
    return sent, end


@kernel
def _compress_layer(x, g, n, bits, stream, rule, levels, alphabet, out, stats, work):
    """One layer, from the gradient to the payload; returns the address after it."""
    block, norm, _, clip = rule
    norms = out + 1
    energy, codes = _measure(x, g, n, block, norm, clip, norms, work)
    stats[:] = 0.0
    if energy < 0.0:
        stats[2] = 1.0
        store_u8(out, uint8(NONFINITE))
        return norms
    store_u8(out, uint8(bits))
    sent, out = _encode(x, g, n, bits, stream, rule, levels, alphabet, norms, codes, work)
    stats[0], stats[1] = energy, sent
    return out


@kernel
def _compress_layers(x, offsets, bits, keys, dithers, grads, rule, levels, alphabets, out, stats, work):
    """All layers of a bucket; returns the bytes written."""
    start = out
    for layer in range(len(bits)):
        first, width = offsets[layer], bits[layer]
        out = _compress_layer(
            x + 4 * first,
            grads[layer],
            offsets[layer + 1] - first,
            width,
            stream_of(keys[layer], dithers[layer]),
            rule,
            levels[width],
            alphabets[width],
            out,
            stats[layer],
            work,
        )
    return out - start


class _Work(threading.local):
    """Buffers of one thread, for the largest block seen."""

    def __init__(self) -> None:
        self.search, self.gaps = np.empty(LEVELS, np.float32), np.empty(LEVELS, np.float32)
        self.grow(512)

    def grow(self, block: int) -> None:
        self.block = block
        self.sums = np.empty(block, np.float32)
        self.terms = np.empty(block, np.float64)
        self.codes = np.empty(block + 2 * OVERSHOOT, np.uint8)
        self.shares, self.below, self.gap = (np.empty(block, np.float32) for _ in range(3))

    def arrays(self, block: int) -> tuple[npt.NDArray[Any], ...]:
        if block > self.block:
            self.grow(block)
        return (
            self.sums,
            self.terms,
            self.codes,
            self.shares,  # in the place of which later come the decoded values
            self.below,
            self.gap,
            self.search,
            self.gaps,
        )


buffers_of_thread = _Work()


def numbers_of(rule: QuantizationRule) -> tuple[int, int, int, float]:
    return rule.block, int(rule.norm), int(rule.rounding), float(rule.clip)


def compress_(
    x: Tensor,
    offsets: npt.NDArray[np.int64],
    bits: npt.NDArray[np.int64],
    rule: QuantizationRule,
    tables: Tables,
    grads: Sequence[Tensor] | None = None,
    keys: npt.NDArray[np.uint64] | None = None,
    reserve: int = 0,
    dithers: npt.NDArray[np.uint64] | None = None,
) -> tuple[Tensor, npt.NDArray[np.float64]]:
    """See :meth:`hvd_adaptive.kernels.base.QuantizedKernels.compress_`: the same bytes, faster.

    Releases the GIL. Cost: about five memcpys of the tensor, up to twenty-five with many levels of a
    table. Memory: 13 bytes per element of one block, kept for each thread.
    """
    offsets, bits = check_layers(x, offsets, bits, grads)
    check_bits(bits, tables)
    keys, dithers = check_keys(keys, len(bits)), check_keys(dithers, len(bits))
    addresses = np.zeros(len(bits), np.int64)
    if grads is not None:
        addresses[:] = [grad.data_ptr() for grad in grads]
    room = sum(
        layer_bytes(numel, width, int(tables.alphabets[width]), rule)
        for numel, width in zip(np.diff(offsets).tolist(), bits.tolist(), strict=True)
    )
    buffer = torch.empty(reserve + room + SLACK, dtype=torch.uint8)
    stats = np.empty((len(bits), 3))
    size = _compress_layers(
        x.data_ptr(),
        offsets,
        bits,
        keys,
        dithers,
        addresses,
        numbers_of(rule),
        tables.levels,
        tables.alphabets,
        buffer.data_ptr() + reserve,
        stats,
        buffers_of_thread.arrays(rule.block),
    )
    return buffer[: reserve + size], stats


@kernel
def bad_norm(norms, count):
    """Index of the first of count norms that is negative (or -0), NaN or Inf; -1 where all are good."""
    for i in range(count):
        if load_u32(norms + 4 * i) >= uint32(INF):
            return i
    return -1


@kernel
def bad_codes(codes, skip, count, last, alphabet):
    """What is wrong with count codes after the first ``skip``, and with the padding if ``last``."""
    largest = int32(0)
    chosen = codes[skip : skip + count]
    for i in range(count):
        largest = max(largest, int32(chosen[i]))
    if largest >= alphabet:
        return CODE
    group = group_size(alphabet)
    if last:
        for i in range(skip + count, (skip + count + group - 1) // group * group):
            if codes[i] != 0:
                return PADDING
    return 0


@kernel
def _add(out, n, scale, decoded):
    """out += scale * decoded, for n elements."""
    a = carray(float32_pointer(out), n)
    for i in range(n):
        a[i] += scale * decoded[i]


@kernel
def _add_even(out, codes, n, norm, scale, alphabet):
    """out += scale * (norm * the codes' levels), which are evenly spaced: as ``decode_codes``."""
    total = carray(float32_pointer(out), n)
    top = np.float32((alphabet - 1) >> 1)
    for i in range(n):
        total[i] += scale * (norm * ((np.float32(int32(codes[i])) - top) / top))


@kernel
def add_block(out, n, scale, norms, codes, rule, levels, alphabet, pair, decoded):
    """Decode the codes of one block, whose norms are at ``norms``, and add them."""
    _, norm, rounding, _ = rule
    value, table = block_levels(norms, norm == SIDES, levels, pair)
    if rounding in (TABLE, POWERS) and alphabet <= FEW_TO_DECODE:
        add_few(out, codes, n, value, scale, levels, alphabet)
    elif rounding == UNIFORM and alphabet > 2:
        _add_even(out, codes, n, value, scale, alphabet)
    else:
        decode_codes(codes, n, value, rounding, table, alphabet, decoded)
        _add(out, n, scale, decoded)


@kernel
def _add_layer(position, end, out, n, scale, rule, levels, alphabets, work):
    """Decode one layer: (damage, address after it or of the damage, whether it was finite)."""
    block, norm, _, _ = rule
    if position >= end:
        return TRUNCATED, end, True
    header = int64(load_u8(position))
    if header == NONFINITE:
        a = carray(float32_pointer(out), n)
        a[:] = np.float32(np.nan)
        return 0, position + 1, False
    if header > MAX_BITS or alphabets[header] == 0:
        return HEADER, position, True
    alphabet, sides = alphabets[header], norm == SIDES
    count = ((n + block - 1) // block) * (2 if sides else 1)
    norms = position + 1
    start = norms + 4 * count
    after = start + bytes_of_codes(n, header, alphabet)
    if after > end:
        return TRUNCATED, end, True
    bad = bad_norm(norms, count)
    if bad >= 0:
        return NORM, norms + 4 * bad, True
    codes, decoded, pair = work[2], work[3], np.empty(2, np.float32)
    codes_address = int64(codes.ctypes.data)
    for first in range(0, n, block):
        size = min(block, n - first)
        skip = unpack_codes(start, after, first, size, header, alphabet, codes_address)
        damage = bad_codes(codes, skip, size, first + size == n, alphabet)
        if damage:
            return damage, start + bytes_of_codes(first, header, alphabet), True
        part, row = codes[skip:], levels[header]
        add_block(out + 4 * first, size, scale, norms, part, rule, row, alphabet, pair, decoded)
        norms += 8 if sides else 4
    return 0, after, True


@kernel
def _add_layers(body, start, size, outs, numels, scale, rule, levels, alphabets, marks, work):
    """Decode all layers; returns (damage, layer, byte position)."""
    position, end = body + start, body + size
    for layer in range(len(outs)):
        damage, position, finite = _add_layer(
            position, end, outs[layer], numels[layer], scale, rule, levels, alphabets, work
        )
        if damage:
            return damage, layer, position - body
        marks[layer] = not finite
    if position != end:
        return TRAILING, len(outs) - 1, position - body
    return 0, 0, 0


@kernel
def _add_stream(norms, stream, end, out, n, scale, rule, levels, alphabet, group, tables, work):
    """Decode a Huffman-coded layer: (damage, address of the damage)."""
    block, norm, _, _ = rule
    sides = norm == SIDES
    bad = bad_norm(norms, ((n + block - 1) // block) * (2 if sides else 1))
    if bad >= 0:
        return NORM, norms + 4 * bad
    codes, decoded, pair = work[2], work[3], np.empty(2, np.float32)
    codes_address = int64(codes.ctypes.data)
    bit, ready, left = 0, 0, n
    for first in range(0, n, block):
        size = min(block, n - first)
        before = ready
        bit, ready = decode_until(stream, end, bit, ready, size, left, group, tables, codes_address)
        if bit < 0:
            return STREAM, stream
        left -= ready - before
        add_block(out + 4 * first, size, scale, norms, codes, rule, levels, alphabet, pair, decoded)
        norms += 8 if sides else 4
        ready = move_down(codes, ready, size)
    return (0, end) if is_whole(stream, end, bit) else (STREAM, stream)


def _add_coded(
    body: Tensor,
    start: int,
    outs: Sequence[Tensor],
    scale: float,
    rule: QuantizationRule,
    tables: Tables,
    codes: Mapping[int, Code],
) -> npt.NDArray[np.uint8]:
    """:func:`decompress_add_` of a body that has Huffman codes, layer by layer."""
    numels = check_outs(body, outs)
    data, marks = body.numpy(), np.zeros(len(outs), np.uint8)
    decoders = {bits: Decoder(code, data.size) for bits, code in codes.items()}
    address, factor, numbers = body.data_ptr(), np.float32(scale), numbers_of(rule)
    work = buffers_of_thread.arrays(rule.block)
    for layer in [*layers_of(data, start, numels, rule, tables, codes)]:
        out, bits = outs[layer.index].data_ptr(), layer.bits
        if layer.stream:
            decoder = decoders[bits]
            damage, position = _add_stream(
                address + layer.start + 1,
                address + layer.stream,
                address + layer.end,
                out,
                layer.numel,
                factor,
                numbers,
                tables.levels[bits],
                tables.alphabets[bits],
                decoder.group,
                decoder.tables,
                work,
            )
        else:
            levels, alphabets = tables.levels, tables.alphabets
            position, end = address + layer.start, address + layer.end
            damage, position, finite = _add_layer(
                position, end, out, layer.numel, factor, numbers, levels, alphabets, work
            )
            marks[layer.index] = not finite
        if damage:
            raise damaged(damage, layer.index, layer.numel, position - address, data.size)
    return marks


def decompress_add_(
    body: Tensor,
    start: int,
    outs: Sequence[Tensor],
    scale: float,
    rule: QuantizationRule,
    tables: Tables,
    codes: Mapping[int, Code] | None = None,
) -> npt.NDArray[np.uint8]:
    """See :meth:`hvd_adaptive.kernels.base.QuantizedKernels.decompress_add_`; without the GIL."""
    if codes:
        return _add_coded(body, start, outs, scale, rule, tables, codes)
    numels = np.array(check_outs(body, outs), np.int64)
    addresses = np.array([out.data_ptr() for out in outs], np.int64)
    marks = np.zeros(len(outs), np.uint8)
    damage, layer, position = _add_layers(
        body.data_ptr(),
        start,
        body.numel(),
        addresses,
        numels,
        np.float32(scale),
        numbers_of(rule),
        tables.levels,
        tables.alphabets,
        marks,
        buffers_of_thread.arrays(rule.block),
    )
    if damage:
        raise damaged(damage, layer, int(numels[layer]) if outs else 0, position, body.numel())
    return marks


@kernel
def _round_at_random(x, n, key, out):
    """See :func:`round_at_random_`; ``out`` holds the bfloat16s' bits."""
    low, high = key_halves(key)
    a = carray(float32_pointer(x), n)
    for i in range(n):
        word = float_bits(a[i])
        magnitude = uint32(word & uint32(MAGNITUDE))
        noise = uint32(random_word(uint32(i), low, high) >> uint32(16))
        total = uint32(min(magnitude, uint32(LARGEST_BF16)) + noise)
        rounded = uint32(NAN_BF16) if magnitude > uint32(INF) else uint32(total >> uint32(16))
        out[i] = uint16(rounded | (uint32(word >> uint32(16)) & uint32(0x8000)))


def decompress_sum_(
    bodies: Sequence[ReceivedBody], outs: Sequence[Tensor], scale: float, rule: QuantizationRule
) -> npt.NDArray[np.uint8]:
    """See :meth:`hvd_adaptive.kernels.base.QuantizedKernels.decompress_sum_`."""
    return sum_one_by_one(decompress_add_, bodies, outs, scale, rule)


def round_at_random_(out: Tensor, x: Tensor, key: int) -> None:
    """See :meth:`hvd_adaptive.kernels.base.QuantizedKernels.round_at_random_`. Releases the GIL."""
    bits = out.view(torch.int16).numpy().view(np.uint16)
    _round_at_random(x.data_ptr(), x.numel(), np.uint64(key), bits)


@reordered
def _find_bins(address, n, norm, bins):
    """The bin of each share; returns the squared error of what saturates."""
    a = carray(float32_pointer(address), n)
    divisor = norm if norm > 0 else np.float32(1)
    beyond = 0.0
    for i in range(n):
        excess = max(np.float64(abs(a[i])) - np.float64(norm), 0.0)
        beyond += excess * excess
        bins[i] = float_bits(abs(saturated_share(a[i], divisor))) >> uint32(WEIGHT_SHIFT)
    return beyond


@kernel
def _norm_histogram(x, n, rule, squared, norms, weights, bins, work):
    """See :func:`norm_histogram`; (what saturates; -1 if non-finite). ``norms`` holds all of them.

    Bins are found block by block, by vector operations, before anything is added to them.
    """
    block, norm, _, clip = rule
    energy, _ = _measure(x, 0, n, block, norm, clip, norms, work)
    if energy < 0.0:
        return -1.0
    beyond = 0.0
    for start in range(0, n, block):
        size, largest = min(block, n - start), load_f32(norms)
        beyond += _find_bins(x + 4 * start, size, largest, bins)
        weight = np.float64(largest) * np.float64(largest) if squared else 1.0
        for i in range(size):
            weights[bins[i]] += weight
        norms += 4
    return beyond


def norm_histogram(
    x: Tensor, rule: QuantizationRule, *, squared: bool
) -> tuple[npt.NDArray[np.float64], float]:
    """See :meth:`hvd_adaptive.kernels.base.QuantizedKernels.norm_histogram`. Releases the GIL."""
    weights, bins = np.zeros(WEIGHT_BINS), np.empty(rule.block, np.uint32)
    norms = np.empty(rule.norm_bytes(x.numel()) + SLACK, np.uint8)
    work = buffers_of_thread.arrays(rule.block)
    address, blocks = x.data_ptr(), norms.ctypes.data
    beyond = _norm_histogram(address, x.numel(), numbers_of(rule), squared, blocks, weights, bins, work)
    return weights, beyond if beyond >= 0 else float("nan")


@kernel
def _expected_at(weights, edges, levels, alphabets, errors, counts):
    """See :func:`expected_error_at`. Reads the bins once, by rising shares, for all widths together."""
    places = np.empty(alphabets.size, np.int64)
    for k in range(alphabets.size):
        places[k] = np.searchsorted(levels[k, : alphabets[k]], np.float32(0), side="right") - 1
    for i in range(weights.size):
        if weights[i] == 0.0:
            continue
        width = edges[i + 1] - edges[i]
        for k in range(alphabets.size):
            j, last, start = places[k], alphabets[k] - 2, edges[i]
            while True:  # the pieces of the bin, cut at the levels
                while j < last and levels[k, j + 1] <= start:
                    j += 1
                end = min(edges[i + 1], np.float64(levels[k, j + 1])) if j < last else edges[i + 1]
                length, middle = end - start, (start + end) / 2
                mass = weights[i] * (length / width) if width > 0 else weights[i]
                below, above = middle - levels[k, j], levels[k, j + 1] - middle
                errors[k] += max(mass * (above * below - length * length / 12), 0.0)
                up = mass * (below / (above + below))
                counts[k, j] += mass - up
                counts[k, j + 1] += up
                start = end
                if start >= edges[i + 1]:
                    break
            places[k] = j


def expected_error_at(
    weights: npt.NDArray[np.float64], tables: Tables, bits: Sequence[int]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """See :meth:`hvd_adaptive.kernels.base.QuantizedKernels.expected_error_at`. Releases the GIL."""
    errors, counts = np.zeros(len(bits)), np.zeros((len(bits), LEVELS))
    widths = np.asarray(bits, np.int64)
    _expected_at(weights, EDGES, tables.levels[widths], tables.alphabets[widths], errors, counts)
    return errors, counts
