"""Quantization on a GPU: a pass that looks for what is not finite, and one that rounds and packs.

:class:`hvd_adaptive.kernels.base.QuantizedKernels` says what each function does. Memory traffic, in
words of 4 bytes per element: compression reads ``x`` and the gradients twice and writes ``x`` once,
which is 5. Codes of three levels, and those of blocks that are no power of two, go through memory as a
byte each on their way to their true width, 0.5 more. Decoding one body reads and writes the output,
and its codes twice, the first time to check them; a sum of several writes the output once, and checks
the codes as it adds them.

Damage is only found here; what it is, and where, the reference then says. Huffman streams are decoded
on the host, where they are also made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.checks import check_bits, check_keys, check_layers, check_outs, check_spectrum
from hvd_adaptive.kernels.huffman import Code
from hvd_adaptive.kernels.quantization import WEIGHT_BINS, ReceivedBody, sum_one_by_one
from hvd_adaptive.kernels.reference import quantized as reference
from hvd_adaptive.kernels.triton.jit import quantized as jit
from hvd_adaptive.kernels.triton.launching import (
    COPIES,
    gradient_code,
    key_words,
    launch,
    levels_of,
    pointers,
    read_back,
    sums_between,
    tiles_of,
    upload,
)
from hvd_adaptive.rng import mix
from hvd_adaptive.wire import WireError
from hvd_adaptive.wire.quantized import QuantizationRule, Tables, layer_bytes

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

_LOW = np.uint64(0xFFFFFFFF)
_HIGH = np.uint64(32)
_TILE = 512
"""Elements of a program, unless a block has more."""
_PER_THREAD = 16
"""Elements of a thread: with many there are too few threads to hide the memory's latency."""
_DECODED = 2048
"""Elements of a program that decodes."""
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


def _halves(words: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    return (words & _LOW).astype(np.int64), (words >> _HIGH).astype(np.int64)


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
    keys, dithers = check_keys(keys, len(bits)), check_keys(dithers, len(bits))
    if not len(bits):
        return torch.zeros(reserve, dtype=torch.uint8, device=x.device), np.zeros((0, 3))
    device, shape, numels = x.device, tile_shape(rule), np.diff(offsets)
    tiles = tiles_of(numels, shape["ROWS"] * rule.block, device, least=1)
    alphabets = tables.alphabets[bits]
    rows = zip(numels.tolist(), bits.tolist(), alphabets.tolist(), strict=True)
    sizes = np.array([layer_bytes(*row, rule) for row in rows], np.int64)
    mixed = np.array([mix(key) for key in keys.tolist()], np.uint64)
    columns = [
        *(offsets[:-1], numels, pointers(grads, len(bits)), *_halves(mixed), *_halves(dithers)),
        *(bits, alphabets, tiles.firsts),
    ]
    sent = upload(np.concatenate([np.stack(columns, axis=1).ravel(), sizes]), device)
    layers, most = sent.split([len(columns) * len(bits), len(bits)])
    bad = torch.zeros(len(bits), dtype=torch.int64, device=device)
    placed = (x, layers, tiles.layers, bad)
    common: dict[str, Any] = {"GRADS": gradient_code(grads), **shape}
    launch(jit.find_nonfinite, (tiles.count,), device, *placed, **common)
    found = torch.where(bad == 0, most, 1)
    starts = torch.cumsum(found, 0) - found + reserve
    body = torch.empty(reserve + int(sizes.sum()), dtype=torch.uint8, device=device)
    packs = rule.block == 1 << shape["LOG"] and rule.block >= _WHOLE_BYTES
    unpacked = (alphabets == _TERNARY) | (not packs)
    room = int(offsets[-1] - offsets[0]) if unpacked.any() else 0
    codes = torch.empty(room, dtype=torch.uint8, device=device)
    energies = torch.zeros((tiles.count, 2), dtype=torch.float64, device=device)
    launch(
        *(jit.quantize, (tiles.count,), device, *placed, starts, levels_of(tables, device)[0], body),
        *(codes, energies, int(offsets[0]), float(rule.clip)),
        **common,
        NORM=int(rule.norm),
        ROUNDING=int(rule.rounding),
        PACKS=packs,
    )
    if unpacked.any():
        norms = np.array([rule.norm_bytes(numel) for numel in numels.tolist()], np.int64)
        packed = tiles_of(np.where(unpacked, sizes - 1 - norms, 0), PACKED, device)
        launch(
            *(jit.pack, (packed.count,), device, layers, packed.layers, packed.first, bad, starts),
            *(body, codes, upload(norms, device), int(offsets[0])),
            SIZE=PACKED,
        )
    stats = read_back(torch.cat([sums_between(energies, tiles.ranges), bad.double().unsqueeze(1)], 1))
    end = reserve + int(np.where(stats[:, 2] == 0, sizes, 1).sum())
    return body[:end], stats


class Received:
    """Bodies of the same layers on a device, and where their layers lie.

    Args:
        bodies: of packed codes.
        numels: elements of each layer.
        rule: of all bodies.
    """

    def __init__(
        self, bodies: Sequence[ReceivedBody], numels: npt.NDArray[np.int64], rule: QuantizationRule
    ) -> None:
        device = bodies[0].data.device
        self._device, self._count, self._layers = device, len(bodies), len(numels)
        self._kept = [(body.data, levels_of(body.tables, device)) for body in bodies]
        """The table has their addresses only."""
        self._shape = {"NORM": int(rule.norm), "BLOCK": rule.block, "TILE": _DECODED}
        self._tiles = tiles_of(numels, _DECODED, device)
        rows = [
            (data.data_ptr(), body.start, data.numel(), levels.data_ptr(), alphabets.data_ptr())
            for body, (data, (levels, alphabets)) in zip(bodies, self._kept, strict=True)
        ]
        norms = [rule.norm_bytes(numel) for numel in numels.tolist()]
        given = [np.array(rows, np.int64).ravel(), numels, np.array(norms, np.int64)]
        sent = upload(np.concatenate(given), device)
        table, self._numels, sizes = sent.split([each.size for each in given])
        self._places = torch.zeros(
            (self._count * (self._layers + 1), jit.PLACES.value), dtype=torch.int64, device=device
        )
        launch(
            *(jit.walk, (self._count,), device, table, self._numels, sizes, self._places, self._layers)
        )
        self._checked = False

    def check(self) -> Tensor:
        """Look for damage; then as :meth:`_concluded`."""
        self._launch(jit.find_damage, (self._tiles.count, self._count), self._layers)
        return self._concluded()

    def _launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **meta: Any) -> None:
        """A kernel that decodes, and so checks."""
        tiles = self._tiles
        launch(
            *(kernel, grid, self._device, self._numels, tiles.layers, tiles.first, self._places),
            *arguments,
            **meta,
            **self._shape,
            num_warps=_DECODED // (32 * _PER_THREAD),
        )
        self._checked = True

    def _concluded(self) -> Tensor:
        """``int64[L + 2]``: marks of layers, whether anything is damaged, the first damaged layer."""
        found = torch.empty(self._layers + 2, dtype=torch.int64, device=self._device)
        launch(
            *(jit.conclude, (1,), self._device, self._places, found, self._layers, self._count),
            SIZE=256,
        )
        return found

    def add_to(self, outs: Sequence[Tensor], scale: float, *, adds: bool) -> None:
        """Add ``scale`` times the bodies, up to the first damage, or set the outputs to their sum."""
        first_wrong = self.check()[-1:] if adds else self._numels  # which is not looked at
        self._launch(
            *(jit.add_decoded, (self._tiles.count,)),
            *(upload(pointers(outs, self._layers), self._device), first_wrong),
            *(self._layers, self._count, float(np.float32(scale))),
            ADDS=adds,
        )

    def findings(self) -> tuple[bool, npt.NDArray[np.int64]]:
        """Whether something is damaged, and the marks; waits for the device."""
        found = read_back(self._concluded() if self._checked else self.check())
        return bool(found[-2]), found[:-2]


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
    received = Received([whole], np.array(numels, np.int64), rule)
    received.add_to(outs, scale, adds=True)
    damaged, marks = received.findings()
    if damaged:
        raise_damage([ReceivedBody(body, start, tables, codes or {})], numels, rule)
    return marks.astype(np.uint8)


def decompress_sum_(
    bodies: Sequence[ReceivedBody], outs: Sequence[Tensor], scale: float, rule: QuantizationRule
) -> npt.NDArray[np.uint8]:
    """See :meth:`hvd_adaptive.kernels.base.QuantizedKernels.decompress_sum_`: in one pass."""
    for body in bodies:
        numels = check_outs(body.data, outs)
    if not outs:
        return sum_one_by_one(reference.decompress_add_, bodies, outs, scale, rule)
    try:
        whole = [unpacked_codes(body, numels, rule) for body in bodies]
    except WireError:
        raise_damage(bodies, numels, rule)
    received = Received(whole, np.array(numels, np.int64), rule)
    received.add_to(outs, scale, adds=False)
    damaged, marks = received.findings()
    if damaged:
        raise_damage(bodies, numels, rule)
    return marks.astype(np.uint8)


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
    return Received([whole], np.array(numels, np.int64), rule).findings()[0]


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
