"""Quantization on a GPU, in one pass that adds, measures, rounds and packs.

:class:`hvd_adaptive.kernels.base.QuantizedKernels` says what each function does. Memory traffic, in
words of 4 bytes per element: compression reads ``x`` and the gradients and writes ``x`` once, which is
3: that a layer is not finite is found on the way, and then what was taken of it is given back. Codes of
three levels, and those of blocks that are no power of two, go through memory as a byte each on their
way to their true width, 0.5 more. Decoding one body reads and writes the output, and its codes twice,
the first time to check them; a sum of several writes the output once, and checks the codes as it adds
them.

Damage is only found here; what it is, and where, the reference then says. Huffman streams are decoded
on the host, where they are also made.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.checks import (
    check_bits,
    check_bodies,
    check_bytes,
    check_keys,
    check_layers,
    check_outs,
    check_spectrum,
)
from hvd_adaptive.kernels.huffman import Code
from hvd_adaptive.kernels.quantization import WEIGHT_BINS, ReceivedBody, sum_one_by_one
from hvd_adaptive.kernels.reference import quantized as reference
from hvd_adaptive.kernels.triton import recording
from hvd_adaptive.kernels.triton.jit import dequantization
from hvd_adaptive.kernels.triton.jit import quantized as jit
from hvd_adaptive.kernels.triton.launching import (
    COPIES,
    Table,
    gradient_code,
    kept,
    key_words,
    launch,
    levels_of,
    read_back,
    scale_bits,
    sums_between,
    tiles_of,
)
from hvd_adaptive.rng import mix
from hvd_adaptive.wire import WireError
from hvd_adaptive.wire.quantized import NONFINITE, QuantizationRule, Rounding, Tables, layer_bytes

__all__ = [
    "compress_",
    "decompress_add_",
    "decompress_sum_",
    "expected_error_at",
    "norm_histogram",
    "round_at_random_",
]

expected_error_at = reference.expected_error_at
"""Of a histogram in host memory."""

Int64s = npt.NDArray[np.int64]

_TILE = 512
"""Elements of a program, unless a block has more."""
_PER_THREAD = 16
"""Elements of a thread: with many there are too few threads to hide the memory's latency."""
_DECODED = 1024
"""Elements of a program that decodes."""
_PROGRAMS = 1024
"""That look for layers whose bodies are not alike."""
PACKED = 1024
"""Bytes of a program that packs."""
_WHOLE_BYTES = 8
"""Codes of any width that end with a byte."""
_TERNARY = 3
"""Levels of codes that are packed in base 3."""


def tile_shape(rule: QuantizationRule) -> dict[str, int]:
    """Blocks of a tile, the padded size of each as a power of two, and the warps for them."""
    log = (rule.block - 1).bit_length()
    rows = max(1, _TILE >> log)
    warps = (rows << log) // (32 * _PER_THREAD)
    return {"BLOCK": rule.block, "ROWS": rows, "LOG": log, "num_warps": min(32, max(1, warps))}


def _halves(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint32]:
    """A row of two for each word, the lower half first."""
    return words.view(np.uint32).reshape(-1, 2)


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
    """See :meth:`hvd_adaptive.kernels.base.QuantizedKernels.compress_`."""
    offsets, bits = check_layers(x, offsets, bits, grads, halves=True)
    check_bits(bits, tables)
    keys = None if keys is None else check_keys(keys, len(bits))
    dithers = None if dithers is None else check_keys(dithers, len(bits))
    if not len(bits):
        return torch.zeros(reserve, dtype=torch.uint8, device=x.device), np.zeros((0, 3))
    layout = _layout_of(offsets, bits, tables.alphabets[bits], rule, x.device)
    body = torch.empty(reserve + layout.size, dtype=torch.uint8, device=x.device)
    given = layout.given(x, body.data_ptr() + reserve, grads, keys, dithers, tables)
    gradients = gradient_code(grads)
    (energies, told) = recording.run(
        (layout, gradients), given, x.device, functools.partial(layout.quantize, gradients)
    )
    stats = np.zeros((len(bits), 3))
    stats[:, :2] = told
    finite = np.isfinite(told[:, 0])
    if np.count_nonzero(finite) < len(bits):
        wrong = ~finite
        stats[wrong] = (0, 0, 1)
        tiles = energies[:, 0].isfinite()  # a copy: the next call may use the energies' memory
        body = _give_back(layout, wrong, tiles, x, grads, body, reserve, tables)
    return body, stats


class _Layout:
    """How the layers of a bucket are quantized, which is the same at every step.

    Args:
        offsets: of the layers.
        bits: of their codes.
        alphabets: levels of each layer.
        rule: of all.
        device: where the tables are.
    """

    def __init__(
        self,
        offsets: Int64s,
        bits: Int64s,
        alphabets: Int64s,
        rule: QuantizationRule,
        device: torch.device,
    ) -> None:
        self.rule, self._shape, numels = rule, tile_shape(rule), np.diff(offsets)
        self.offsets = offsets
        self.tile = self._shape["ROWS"] * rule.block
        self.tiles = tiles_of(numels, self.tile, device, least=1)
        rows = zip(numels.tolist(), bits.tolist(), alphabets.tolist(), strict=True)
        sizes = np.array([layer_bytes(*row, rule) for row in rows], np.int64)
        norms = np.array([rule.norm_bytes(numel) for numel in numels.tolist()], np.int64)
        self.ends = np.cumsum(sizes)
        """Where each layer's bytes end."""
        self.size = int(sizes.sum())
        """Bytes of all layers."""
        self._packs = rule.block == 1 << self._shape["LOG"] and rule.block >= _WHOLE_BYTES
        unpacked = (alphabets == _TERNARY) | (not self._packs)
        self._room = int(offsets[-1] - offsets[0]) if unpacked.any() else 0
        self._packed = tiles_of(np.where(unpacked, sizes - 1 - norms, 0), PACKED, device)
        zeros, unkeyed = np.zeros_like(bits), _halves(np.full(len(bits), mix(0), np.uint64))
        columns = [
            *(4 * offsets[:-1], numels, zeros, *unkeyed.T, zeros, zeros, bits, alphabets),
            *(self.tiles.firsts, self.ends - sizes, offsets[:-1] - offsets[0]),
            *(4 * int(jit.LEVELS.value) * bits, norms),
        ]
        self._rows: Int64s = np.stack(columns, axis=1)

    def given(
        self,
        x: Tensor,
        body: int,
        grads: Sequence[Tensor] | None,
        keys: npt.NDArray[np.uint64] | None,
        dithers: npt.NDArray[np.uint64] | None,
        tables: Tables,
    ) -> Int64s:
        """Rows of layers.

        Elements, their number, gradient, halves of the key and of the dither, bits, levels, first tile,
        bytes, place of codes that are packed later, levels' table, bytes of norms. The elements, the
        gradient, the bytes and the table are addresses; no keys or dithers are the same as zeros.
        """
        levels, _ = levels_of(tables, x.device).addresses
        rows = self._rows + np.array([x.data_ptr(), *[0] * 9, body, 0, levels, 0], np.int64)
        if grads is not None:
            rows[:, 2] = [grad.data_ptr() for grad in grads]
        if keys is not None:
            rows[:, 3:5] = _halves(np.array([mix(key) for key in keys.tolist()], np.uint64))
        if dithers is not None:
            rows[:, 5:7] = _halves(dithers)
        return rows.ravel()

    def quantize(self, gradients: int, table: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize and pack: energies of tiles and of layers, and what is sent of them."""
        device, tiles, rule = table.device, self.tiles, self.rule
        codes = torch.empty(self._room, dtype=torch.uint8, device=device)
        energies = torch.empty((tiles.count, 2), dtype=torch.float64, device=device)
        launch(
            *(jit.quantize, (tiles.count,), device, table, tiles.layers, codes, energies),
            float(rule.clip),
            GRADS=gradients,
            NORM=int(rule.norm),
            ROUNDING=int(rule.rounding),
            PACKS=self._packs,
            **self._shape,
        )
        packed = self._packed
        launch(
            *(jit.pack, (packed.count,), device, table, packed.layers, packed.first, codes),
            SIZE=PACKED,
        )
        return energies, sums_between(energies, tiles.ranges)


_layout_of = kept(_Layout)


def _give_back(
    layout: _Layout,
    wrong: npt.NDArray[np.bool_],
    taken: Tensor,
    x: Tensor,
    grads: Sequence[Tensor] | None,
    body: Tensor,
    reserve: int,
    tables: Tables,
) -> Tensor:
    """Undo what was taken of layers that are not finite; the body with their marks.

    Args:
        layout: of the layers.
        wrong: which of them.
        taken: whether something was, of each tile.
        x: what is left.
        grads: that were added.
        body: with bytes of all layers.
        reserve: bytes in front.
        tables: of the levels.
    """
    ends, edges = [reserve, *(reserve + layout.ends).tolist()], layout.offsets.tolist()
    firsts = [*layout.tiles.firsts.tolist(), layout.tiles.count]
    mark = torch.full((1,), NONFINITE, dtype=torch.uint8, device=x.device)
    parts = [body[:reserve]]
    for layer, bad in enumerate(wrong.tolist()):
        part = body[ends[layer] : ends[layer + 1]]
        parts.append(mark if bad else part)
        if not bad:
            continue
        rest = x[edges[layer] : edges[layer + 1]]
        decompress_add_(part.clone(), 0, [rest], 1.0, layout.rule, tables)
        if grads is not None:
            tiles = taken[firsts[layer] : firsts[layer + 1]]
            added = tiles.repeat_interleave(layout.tile)[: rest.numel()]
            rest -= grads[layer].view(-1).float().where(added, 0.0)
    return torch.cat(parts)


class _Received:
    """Where the layers of some bodies lie, on the device; which is the same but for addresses.

    Args:
        numels: elements of each layer.
        count: bodies, of packed codes.
        rule: of all bodies.
        device: of all tensors.
    """

    def __init__(
        self, numels: tuple[int, ...], count: int, rule: QuantizationRule, device: torch.device
    ) -> None:
        self._device, self._count, self._layers = device, count, len(numels)
        sizes = np.array(numels, np.int64)
        self._shape = {"NORM": int(rule.norm), "BLOCK": rule.block, "TILE": _DECODED}
        self._groups = rule.block % _WHOLE_BYTES == 0
        self._even = rule.rounding is Rounding.uniform
        self._tiles = tiles_of(sizes, _DECODED, device)
        norms = np.array([rule.norm_bytes(numel) for numel in sizes.tolist()], np.int64)
        rows = np.zeros(count * int(dequantization.BODY_FIELDS.value), np.int64)
        outs, scale = np.zeros_like(sizes), np.zeros(1, np.int64)
        self._table = Table(rows, sizes, norms, outs, scale)
        """Rows of bodies; of layers elements, bytes of norms, and outputs; the scale's bits."""
        self._bodies, self._outs = self._table.column(0), self._table.column(3)

    def given(self, bodies: Sequence[ReceivedBody], outs: Sequence[Tensor], scale: float) -> Int64s:
        """What :meth:`decode` is told."""
        distinct = {body.tables for body in bodies}
        levels = {tables: levels_of(tables, self._device).addresses for tables in distinct}
        rows = [
            (body.data.data_ptr(), body.start, body.data.numel(), *levels[body.tables])
            for body in bodies
        ]
        numbers = self._table.copy()
        numbers[self._bodies] = [*itertools.chain.from_iterable(rows)]
        numbers[self._outs] = [out.data_ptr() for out in outs]
        numbers[-1] = scale_bits(scale)
        return numbers

    def decode(self, use: Use, sent: Tensor) -> tuple[None, Tensor]:
        """``int64[L + 2]``: marks of layers, whether anything is damaged, the first damaged layer."""
        layers = self._layers
        bodies, numels, norms, outs, scale = self._table.split(sent)
        places = torch.zeros(
            (self._count * (layers + 1), dequantization.PLACES.value),
            dtype=torch.int64,
            device=self._device,
        )
        launch(
            *(dequantization.walk, (self._count,), self._device, bodies, numels, norms, places, layers)
        )
        placed, found = (numels, self._tiles.layers, self._tiles.first, places), None
        if use is not Use.sum:
            self._launch(dequantization.find_damage, (self._tiles.count, self._count), *placed, layers)
            found = self._concluded(places)
        alike = torch.zeros(layers + 1, dtype=torch.int64, device=self._device)
        alike[-1:] = int(not self._groups)
        programs = self._tiles.count
        if use is Use.sum and self._groups:
            programs = min(programs, _PROGRAMS)  # hardly any layer is left
            looked_at = (places, alike, layers, self._count)
            launch(*(dequantization.find_alike, (layers,), self._device, *looked_at), EVEN=self._even)
            self._launch(
                *(dequantization.add_alike, (self._tiles.count,), *placed, outs, alike),
                *(layers, self._count, scale),
                EVEN=self._even,
            )
        if use is not Use.check:
            first_wrong = numels if found is None else found[-1:]  # where it sums it is not looked at
            self._launch(
                *(dequantization.add_decoded, (programs,), *placed, outs, alike, first_wrong),
                *(self._tiles.count, layers, self._count, scale),
                ADDS=use is Use.add,
            )
        return None, self._concluded(places) if found is None else found

    def _launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **meta: Any) -> None:
        """A kernel that decodes."""
        warps = _DECODED // (32 * _PER_THREAD)
        launch(kernel, grid, self._device, *arguments, **meta, **self._shape, num_warps=warps)

    def _concluded(self, places: Tensor) -> Tensor:
        found = torch.empty(self._layers + 2, dtype=torch.int64, device=self._device)
        launch(
            *(dequantization.conclude, (1,), self._device, places, found, self._layers, self._count),
            SIZE=256,
        )
        return found


class Use(enum.Enum):
    """What is decoded for: a check, a sum with what the outputs hold, or the outputs' sum."""

    check = enum.auto()
    add = enum.auto()
    sum = enum.auto()


_received_of = kept(_Received)


def decode(
    bodies: Sequence[ReceivedBody],
    numels: Sequence[int],
    rule: QuantizationRule,
    use: Use,
    outs: Sequence[Tensor] = (),
    scale: float = 1.0,
) -> tuple[bool, npt.NDArray[np.uint8]]:
    """Whether some of these packed bodies is damaged, and the marks of the layers."""
    device = bodies[0].data.device
    received = _received_of(tuple(numels), len(bodies), rule, device)
    outs = outs or [bodies[0].data] * len(numels)
    given = received.given(bodies, outs, scale)
    _, told = recording.run((received, use), given, device, functools.partial(received.decode, use))
    return bool(told[-2]), told[:-2].astype(np.uint8)


def unpacked_codes(body: ReceivedBody, numels: Sequence[int], rule: QuantizationRule) -> ReceivedBody:
    """A body without Huffman streams; WireError where one is damaged."""
    if not body.codes:
        return body
    from hvd_adaptive.kernels.base import for_device

    host = body.data.cpu()
    entropy = for_device(host.device).entropy
    data = entropy.decode(host, body.start, numels, rule, body.tables, body.codes)
    return ReceivedBody(data.to(body.data.device), 0, body.tables)


def decompress_add_(
    body: Tensor,
    start: int,
    outs: Sequence[Tensor],
    scale: float,
    rule: QuantizationRule,
    tables: Tables,
    codes: Mapping[int, Code] | None = None,
) -> npt.NDArray[np.uint8]:
    """See :meth:`hvd_adaptive.kernels.base.QuantizedKernels.decompress_add_`."""
    numels = check_outs(body, outs)
    plain = (body, start, outs, scale, rule, tables, codes)
    if not outs:
        return reference.decompress_add_(*plain)
    try:
        whole = unpacked_codes(ReceivedBody(body, start, tables, codes or {}), numels, rule)
    except WireError:
        return reference.decompress_add_(*plain)  # raises, after the layers before the damage
    damaged, marks = decode([whole], numels, rule, Use.add, outs, scale)
    if damaged:
        raise_damage([ReceivedBody(body, start, tables, codes or {})], numels, rule)
    return marks


def decompress_sum_(
    bodies: Sequence[ReceivedBody], outs: Sequence[Tensor], scale: float, rule: QuantizationRule
) -> npt.NDArray[np.uint8]:
    """See :meth:`hvd_adaptive.kernels.base.QuantizedKernels.decompress_sum_`: in one pass."""
    if not outs:
        return sum_one_by_one(reference.decompress_add_, bodies, outs, scale, rule)
    first, *others = check_bodies([body.data for body in bodies])
    numels = check_outs(first, outs)
    for other in others:
        check_bytes(other)
        if other.is_cpu != first.is_cpu:
            check_outs(other, outs)  # which says what does not fit
    try:
        whole = [unpacked_codes(body, numels, rule) for body in bodies]
    except WireError:
        raise_damage(bodies, numels, rule)
    damaged, marks = decode(whole, numels, rule, Use.sum, outs, scale)
    if damaged:
        raise_damage(bodies, numels, rule)
    return marks


def raise_damage(
    bodies: Sequence[ReceivedBody], numels: Sequence[int], rule: QuantizationRule
) -> NoReturn:
    """The reference's WireError for bodies of which one was found damaged."""
    for body in bodies:
        if _is_damaged(body, numels, rule):
            outs = [torch.zeros(numel) for numel in numels]
            host = body.data.cpu()  # where the reference's many small steps take less time
            reference.decompress_add_(host, body.start, outs, 1.0, rule, body.tables, body.codes)
    raise RuntimeError("a body that decodes was found damaged: please report this with the body")


def _is_damaged(body: ReceivedBody, numels: Sequence[int], rule: QuantizationRule) -> bool:
    """Whether one body is; the reference would take long to decode those that are not."""
    try:
        whole = unpacked_codes(body, numels, rule)
    except WireError:
        return True
    return decode([whole], numels, rule, Use.check)[0]


def round_at_random_(out: Tensor, x: Tensor, key: int) -> None:
    """See :meth:`hvd_adaptive.kernels.base.QuantizedKernels.round_at_random_`."""
    numel, size, words = x.numel(), 1024, key_words(key, x.device)
    launch(
        *(jit.round_to_bf16, (-(-numel // size),), x.device, out.view(torch.int16), x, numel, words),
        SIZE=size,
    )


def norm_histogram(
    x: Tensor, rule: QuantizationRule, *, squared: bool
) -> tuple[npt.NDArray[np.float64], float]:
    """See :meth:`hvd_adaptive.kernels.base.QuantizedKernels.norm_histogram`."""
    check_spectrum(x)
    if not bool(x.isfinite().all()):
        return np.zeros(WEIGHT_BINS), float("nan")
    shape = tile_shape(rule)
    count = -(-x.numel() // (shape["ROWS"] * rule.block))
    weights = torch.zeros((COPIES, WEIGHT_BINS + 1), dtype=torch.float64, device=x.device)
    beyond = torch.zeros(count, dtype=torch.float64, device=x.device)
    launch(
        *(jit.weigh_shares, (count,), x.device, x, x.numel(), weights, beyond, float(rule.clip)),
        SQUARED=squared,
        COPIES=COPIES,
        BINS=WEIGHT_BINS + 1,
        NORM=int(rule.norm),
        **shape,
    )
    weights[0, -1] = beyond.sum()
    found = read_back(weights.sum(0))
    return found[:-1], float(found[-1])
