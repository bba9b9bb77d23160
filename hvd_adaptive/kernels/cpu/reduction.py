"""Sums of quantized layers that are quantized again, in one pass: what the owner of a shard does.

Chunk by chunk, what all bodies hold is summed in the cache; block by block, the sums are measured,
rounded and packed there. So sums are neither written to memory nor read from it, and a damaged body or
a sum that is not finite may be found after blocks before it have been rounded: ``before`` then gives
back what was kept. Bytes and remainders are those of :mod:`~hvd_adaptive.kernels.cpu.quantized`, whose
functions do the work on a block.
"""

# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import carray, int64, uint8, uint64
from torch import Tensor

from hvd_adaptive.kernels.checks import check_bits, check_keys, check_layers, check_received
from hvd_adaptive.kernels.cpu.compiling import kernel
from hvd_adaptive.kernels.cpu.intrinsics import (
    fence,
    float32_pointer,
    load_u8,
    load_u32,
    store_u8,
    stream,
)
from hvd_adaptive.kernels.cpu.packing import bytes_of_codes, group_size, pack_codes, unpack_codes
from hvd_adaptive.kernels.cpu.quantized import (
    add_block,
    bad_codes,
    bad_norm,
    buffers_of_thread,
    decompress_add_,
    form,
    numbers_of,
    put_norms,
    squares,
)
from hvd_adaptive.kernels.cpu.rounding import (
    CLIPPED,
    L2,
    SIDES,
    TABLE,
    block_levels,
    choose_codes,
    decode_codes,
    stream_of,
)
from hvd_adaptive.kernels.cpu.streams import SLACK
from hvd_adaptive.kernels.cpu.symbols import (
    OVERSHOOT,
    Decoder,
    decode_until,
    decoder_addresses,
    is_whole,
    move_down,
    tables_at,
)
from hvd_adaptive.kernels.cpu.tables import FEW, find_intervals, round_to_few
from hvd_adaptive.kernels.floats import INF
from hvd_adaptive.kernels.quantization import ReceivedBody
from hvd_adaptive.wire.quantized import (
    HUFFMAN,
    MAX_BITS,
    NONFINITE,
    QuantizationRule,
    Tables,
    layer_bytes,
)

CHUNK = 4096
"""Elements that are summed at once, about: 16 KiB. What is done once per body is then done seldom."""


@kernel
def _open_layer(position, end, n, rule, alphabets, decoders, place):
    """Find out where a layer's norms and codes are; returns the address after it, 0 where damaged.

    ``place``: addresses of the norms, of the codes, of their end, bits (0 where the layer was not
    finite), group of a Huffman code (0: packed), bit of the stream, codes that are ready, codes left.
    """
    block, norm, _, _ = rule
    if position >= end:
        return 0
    header = int64(load_u8(position))
    place[:] = 0
    if header == NONFINITE:
        return position + 1
    width = header & ~HUFFMAN
    if width > MAX_BITS or alphabets[width] == 0:
        return 0
    group = decoders[width, 0] if header & HUFFMAN else 0
    count = ((n + block - 1) // block) * (2 if norm == SIDES else 1)
    codes = position + 1 + 4 * count
    after = codes + bytes_of_codes(n, width, alphabets[width])
    if header & HUFFMAN:
        if group == 0 or codes + 4 > end:
            return 0
        after = codes + 4 + int64(load_u32(codes))
        codes += 4
    if after > end or bad_norm(position + 1, count) >= 0:
        return 0
    place[0], place[1], place[2], place[3] = position + 1, codes, after, width
    place[4], place[7] = group, n
    return after


@kernel
def _unpack_block(place, first, size, n, alphabet, decoders, codes):
    """Unpack the next codes of a layer into a row; returns where they begin in it, -1 if damaged."""
    address = int64(codes.ctypes.data)
    start, end, width, group = place[1], place[2], place[3], place[4]
    if group == 0:
        skip = unpack_codes(start, end, first, size, width, alphabet, address)
        return -1 if bad_codes(codes, skip, size, first + size == n, alphabet) else skip
    before = place[6]
    bit, ready = decode_until(
        start, end, place[5], before, size, place[7], group, tables_at(decoders[width]), address
    )
    if bit < 0 or (first + size == n and not is_whole(start, end, bit)):
        return -1
    place[5], place[6] = bit, ready
    place[7] -= ready - before
    return 0


@kernel
def _add_body(place, address, first, size, n, rule, levels, alphabet, decoders, row, pair, decoded):
    """Add whole blocks of a layer, ``size`` elements, to sums; returns whether the body is sound."""
    block, norm, _, _ = rule
    one, width = np.float32(1), 8 if norm == SIDES else 4
    for start in range(first, first + size, block):
        count = min(block, n - start)
        skip = _unpack_block(place, start, count, n, alphabet, decoders, row)
        if skip < 0:
            return False
        at = address + 4 * (start - first)
        add_block(at, count, one, place[0], row[skip:], rule, levels, alphabet, pair, decoded)
        place[0] += width
        if place[4]:
            place[6] = move_down(row, place[6], count)
    return True


@kernel
def _sum_chunk(places, first, size, n, rule, tables, decoders, room, work):
    """Set the chunk of sums to what all bodies hold of it; returns whether all are sound."""
    which, levels, alphabets = tables
    totals, rows, pair = room
    totals[:size] = np.float32(0)
    address = int64(totals.ctypes.data)
    for body in range(len(places)):
        place, one = places[body], which[body]
        width = place[3]
        if width and not _add_body(
            place, address, first, size, n, rule, levels[one, width], alphabets[one, width],
            decoders[body], rows[body], pair, work[3],
        ):  # fmt: skip
            return False
    return True


@kernel
def _copy(source, target, n):
    """n float32."""
    a, b = carray(float32_pointer(source), n), carray(float32_pointer(target), n)
    for i in range(n):
        b[i] = a[i]


@kernel
def _keep(x, before, n):
    """before = x, past the cache: it is seldom read. A fence must follow."""
    head = min(n, (-before & 31) >> 2)
    _copy(x, before, head)
    whole = head + ((n - head) & ~7)
    for i in range(head, whole, 8):
        stream(x + 4 * i, before + 4 * i)
    _copy(x + 4 * whole, before + 4 * whole, n - whole)


@kernel
def _leave(values, n, decoded, x):
    """x = values - decoded."""
    a, b = carray(float32_pointer(values), n), carray(float32_pointer(x), n)
    for i in range(n):
        b[i] = a[i] - decoded[i]


@kernel
def _encode_block(values, n, first, norms, encoding, rule, chosen, work):
    """Choose the codes of one block, whose norms are written, and decode them into ``work[3]``."""
    bits, levels, alphabet, stream, pair = encoding
    _, norm, rounding, _ = rule
    scale, table = block_levels(norms, norm == SIDES, levels, pair)
    if rounding == TABLE and alphabet <= FEW:
        round_to_few(values, n, scale, work[6], work[7], alphabet, stream, first, chosen, work[3])
        return
    choose_codes(values, n, scale, rounding, bits, levels, alphabet, stream, first, chosen, work)
    decode_codes(chosen, n, scale, rounding, table, alphabet, work[3])


@kernel
def _encode_chunk(x, before, totals, first, size, encoding, rule, norms, packed, ready, work):
    """Encode the sums of a chunk: (addresses after norms and codes, codes that wait, elements done).

    The elements are fewer than the chunk's where a sum is not finite. Codes wait for a whole group.
    """
    block, norm, _, clip = rule
    bits, _, alphabet, _, _ = encoding
    sums, terms, codes, decoded, _, _, _, _ = work
    sums_address, codes_address = int64(sums.ctypes.data), int64(codes.ctypes.data)
    group = group_size(alphabet)
    for start in range(0, size, block):
        count, here = min(block, size - start), totals + 4 * start
        at = first + start
        mine = x + 4 * at
        values, top = form(mine, here, count, sums_address) if x else form(here, 0, count, 0)
        if top >= INF:
            return norms, packed, ready, start
        energy = squares(values, count, terms) if norm in (L2, CLIPPED) else 0.0
        after = put_norms(norms, values, count, energy, top, norm, clip, terms)
        _encode_block(values, count, at, norms, encoding, rule, codes[ready:], work)
        norms = after
        if x:
            _keep(mine, before + 4 * at, count)
            _leave(values, count, decoded, mine)
        ready += count
        packed = pack_codes(codes_address, ready // group, bits, alphabet, packed)
        ready = move_down(codes, ready, ready // group * group)
    return norms, packed, ready, size


@kernel
def _reduce_layer(places, x, before, n, encoding, rule, tables, decoders, out, room, work):
    """One layer, from the bodies to the payload: (address after it, whether it was finite).

    The address is 0 where a body is damaged. ``x`` then, and where the layer is not finite, is as it
    was; 0 is in the place of an ``x`` that there is not.
    """
    block, norm, rounding, _ = rule
    bits, levels, alphabet, _, _ = encoding
    codes, totals = work[2], int64(room[0].ctypes.data)
    norms, count = out + 1, ((n + block - 1) // block) * (2 if norm == SIDES else 1)
    packed = norms + 4 * count
    end = packed + bytes_of_codes(n, bits, alphabet)
    finite, sound, ready, done = places[:, 3].all(), True, 0, 0
    if rounding == TABLE and alphabet <= FEW:
        find_intervals(levels, alphabet, work[6], work[7])
    chunk = max(1, CHUNK // block) * block
    for start in range(0, n, chunk):
        size = min(chunk, n - start)
        sound = _sum_chunk(places, start, size, n, rule, tables, decoders, room, work)
        if not sound:
            break
        if finite:  # else what the bodies hold of it is still to be looked at
            norms, packed, ready, coded = _encode_chunk(
                x, before, totals, start, size, encoding, rule, norms, packed, ready, work
            )
            done, finite = start + coded, coded == size
    if x:
        fence()
        if not (sound and finite):
            _copy(before, x, done)
        _copy(x + 4 * done, before + 4 * done, n - done)
    if not sound:
        return 0, False
    if not finite:
        store_u8(out, uint8(NONFINITE))
        return out + 1, False
    store_u8(out, uint8(bits))
    group = group_size(alphabet)
    codes[ready : ready + group] = 0
    pack_codes(int64(codes.ctypes.data), (ready + group - 1) // group, bits, alphabet, packed)
    return end, True


@kernel
def _reduce_layers(
    edges,
    offsets,
    bits,
    keys,
    rule,
    levels,
    alphabets,
    x,
    before,
    tables,
    decoders,
    out,
    marks,
    room,
    work,
):
    """All layers; returns the bytes written, or -1 - l where a body of layer l is damaged."""
    which, _, their_alphabets = tables
    places, start, pair = np.empty((len(edges), 8), np.int64), out, np.empty(2, np.float32)
    for layer in range(len(bits)):
        first, width = offsets[layer], bits[layer]
        n = offsets[layer + 1] - first
        for body in range(len(edges)):
            edges[body, 0] = _open_layer(
                edges[body, 0], edges[body, 1], n, rule, their_alphabets[which[body]], decoders[body],
                places[body],
            )  # fmt: skip
            if edges[body, 0] == 0:
                return -1 - layer
        stream = stream_of(keys[layer], uint64(0))
        encoding = width, levels[width], alphabets[width], stream, pair
        mine, held = (x + 4 * first, before + 4 * first) if x else (0, 0)
        out, finite = _reduce_layer(
            places, mine, held, n, encoding, rule, tables, decoders, out, room, work
        )
        if out == 0:
            return -1 - layer
        marks[layer] = not finite
    for body in range(len(edges)):
        if edges[body, 0] != edges[body, 1]:
            return -1 - len(bits)
    return out - start


class _Rooms(threading.local):
    """Buffers of one thread: the sums of a chunk, and a row of codes for each body."""

    def __init__(self) -> None:
        self.totals, self.rows = np.empty(0, np.float32), np.empty((0, 0), np.uint8)

    def arrays(self, bodies: int, block: int) -> tuple[npt.NDArray[Any], ...]:
        """Both, and room for two levels."""
        stride = -(-(block + 2 * OVERSHOOT) // 8) * 8
        if self.totals.size < max(CHUNK, block):
            self.totals = np.empty(max(CHUNK, block), np.float32)
        if self.rows.shape[0] < bodies or self.rows.shape[1] < stride:
            self.rows = np.empty((bodies, stride), np.uint8)
        return self.totals, self.rows, np.empty(2, np.float32)


_rooms = _Rooms()


def _received_tables(
    bodies: Sequence[ReceivedBody],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Which table each body has, and the levels and alphabets of all tables."""
    different = {id(body.tables): body.tables for body in bodies}
    numbers = {key: number for number, key in enumerate(different)}
    which = np.array([numbers[id(body.tables)] for body in bodies], np.int64)
    if len(different) == 1:
        (one,) = different.values()
        return which, one.levels[np.newaxis], one.alphabets[np.newaxis]
    return (
        which,
        np.stack([each.levels for each in different.values()]),
        np.stack([each.alphabets for each in different.values()]),
    )


def reduce_(
    bodies: Sequence[ReceivedBody],
    offsets: npt.NDArray[np.int64],
    bits: npt.NDArray[np.int64],
    rule: QuantizationRule,
    tables: Tables,
    x: Tensor | None = None,
    before: Tensor | None = None,
    keys: npt.NDArray[np.uint64] | None = None,
    reserve: int = 0,
) -> tuple[Tensor, npt.NDArray[np.uint8]]:
    """See :meth:`hvd_adaptive.kernels.base.ReductionKernels.reduce_`: in one pass. Releases the GIL.

    Block by block: what the bodies hold is summed in the cache, measured, rounded and packed there.
    Cost: what adding the bodies and compressing once takes, less writing and reading sums. Memory: a
    byte per body and element of one block.
    """
    check_received(bodies, offsets, x, before)
    offsets, bits = np.ascontiguousarray(offsets, np.int64), np.ascontiguousarray(bits, np.int64)
    check_layers(torch.empty(int(offsets[-1])) if x is None else x, offsets, bits, None)
    check_bits(bits, tables)
    sizes = np.diff(offsets).tolist()
    room = sum(
        layer_bytes(numel, width, int(tables.alphabets[width]), rule)
        for numel, width in zip(sizes, bits.tolist(), strict=True)
    )
    buffer = torch.empty(reserve + room + SLACK, dtype=torch.uint8)
    marks = np.zeros(len(bits), np.uint8)
    starts = [body.data.data_ptr() for body in bodies]
    edges = [
        (start + body.start, start + body.data.numel())
        for start, body in zip(starts, bodies, strict=True)
    ]
    made = [
        {width: Decoder(code, body.data.numel()) for width, code in body.codes.items()}
        for body in bodies
    ]
    size = _reduce_layers(
        np.array(edges, np.int64),
        offsets,
        bits,
        check_keys(keys, len(bits)),
        numbers_of(rule),
        tables.levels,
        tables.alphabets,
        0 if x is None else x.data_ptr(),
        0 if before is None else before.data_ptr(),
        _received_tables(bodies),
        np.stack([decoder_addresses(each) for each in made]),
        buffer.data_ptr() + reserve,
        marks,
        _rooms.arrays(len(bodies), rule.block),
        buffers_of_thread.arrays(rule.block),
    )
    if size < 0:
        if x is not None and before is not None:  # of the layers that were sound
            done = slice(int(offsets[0]), int(offsets[-1 - size]))
            x[done] = before[done]
        _name_damage(bodies, sizes, rule)
    return buffer[: reserve + size], marks


def _name_damage(bodies: Sequence[ReceivedBody], sizes: Sequence[int], rule: QuantizationRule) -> None:
    """Raise the WireError that adding the bodies one by one finds."""
    outs = [torch.zeros(numel) for numel in sizes]
    for body in bodies:
        decompress_add_(body.data, body.start, outs, 1.0, rule, body.tables, body.codes)
    raise AssertionError("damage was found that adding the bodies does not find")
