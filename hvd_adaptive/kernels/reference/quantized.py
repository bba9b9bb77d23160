"""Quantization in plain torch, one layer at a time: an array element for every bit.

:class:`hvd_adaptive.kernels.base.QuantizedKernels` says what each function does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.checks import check_bits, check_keys, check_layers, check_outs, check_spectrum
from hvd_adaptive.kernels.floats import INF, MAGNITUDE
from hvd_adaptive.kernels.huffman import Code, ReceivedLayer, layers_of
from hvd_adaptive.kernels.quantization import (
    LARGEST_BF16,
    LARGEST_NORM,
    NAN_BF16,
    WEIGHT_BINS,
    WEIGHT_SHIFT,
    ReceivedBody,
    expected_from_weights,
    sum_one_by_one,
)
from hvd_adaptive.kernels.reference import entropy
from hvd_adaptive.kernels.reference.packing import in_rows, pack, unpack
from hvd_adaptive.rng import mix
from hvd_adaptive.wire import WireError
from hvd_adaptive.wire.quantized import (
    LEVELS,
    MAX_BITS,
    NONFINITE,
    Damage,
    Norm,
    QuantizationRule,
    Rounding,
    Tables,
    damaged,
    packed_bytes,
)

_WORD = 0xFFFFFFFF


def block_sizes(numel: int, block: int, device: torch.device) -> Tensor:
    """Elements of each block."""
    starts = torch.arange(0, numel, block, device=device)
    return (numel - starts).clamp(max=block)


def _totals(rows: Tensor) -> Tensor:
    """The sum of each row: the upper half is added to the lower again and again."""
    width = 1 << (rows.shape[1] - 1).bit_length()
    rows = torch.nn.functional.pad(rows, (0, width - rows.shape[1]))
    while width > 1:
        width //= 2
        rows = rows[:, :width] + rows[:, width:]
    return rows[:, 0]


def block_norms(rows: Tensor, sizes: Tensor, rule: QuantizationRule) -> Tensor:
    """float32 of shape (blocks, norms of a block)."""
    wide = rows.double()
    top = rows.abs().amax(1)
    root = torch.sqrt(_totals(wide.square()) / (sizes if rule.norm is Norm.clipped else 1))
    match rule.norm:
        case Norm.l2:
            norms = root.clamp(max=LARGEST_NORM).float()
        case Norm.max:
            norms = top
        case Norm.power:
            word = (top.view(torch.int32).long() + 0x7FFFFF) & INF
            norms = word.to(torch.int32).view(torch.float32)
        case Norm.clipped:
            norms = torch.minimum(top, (rule.clip * root).clamp(max=LARGEST_NORM).float())
        case Norm.mean:
            norms = (_totals(wide.abs()) / sizes).float()
        case Norm.sides:
            below = (rows < 0).sum(1)
            counts = torch.stack([below, sizes - below], 1).clamp(min=1)
            totals = torch.stack([_totals((-wide).clamp(min=0)), _totals(wide.clamp(min=0))], 1)
            return (totals / counts).float().abs()  # no -0
    return norms.clamp(max=LARGEST_NORM).unsqueeze(1)


def uniforms(numel: int, key: int, device: torch.device | None = None, dither: int = 0) -> Tensor:
    """The random numbers of a stream: multiples of 2^-24 in [0, 1), float32.

    Number ``i`` is a hash of ``i`` and ``key``: the 32-bit mixer "lowbias32" (Wellons, "Prospecting
    for Hash Functions", 2018), with the lower half of the mixed key before it and the upper half
    inside. Without :func:`hvd_adaptive.rng.mix`, keys of neighboring upper halves would be related.

    Args:
        numel: how many, from the first on.
        key: 64 bits.
        device: where.
        dither: what this rank makes of them: see :func:`hvd_adaptive.rng.dithers`.

    Example:
        >>> uniforms(3, key=1).tolist()
        [0.8843241930007935, 0.660982608795166, 0.4252762794494629]
    """
    word = ((words(numel, key, device) ^ (dither >> 32)) + (dither & _WORD)) & _WORD
    return (word >> 8).float() * 2.0**-24


def words(numel: int, key: int, device: torch.device | None) -> Tensor:
    """32 random bits each, int64: see :func:`uniforms`."""
    key = mix(key)
    h = torch.arange(numel, device=device) ^ (key & _WORD)
    h = h ^ (h >> 16)
    h = (h * 0x7FEB352D) & _WORD
    h = h ^ (key >> 32)
    h = h ^ (h >> 15)
    h = (h * 0x846CA68B) & _WORD  # an overflow wraps, and the lower half is right
    return h ^ (h >> 16)


def decompress_sum_(
    bodies: Sequence[ReceivedBody], outs: Sequence[Tensor], scale: float, rule: QuantizationRule
) -> npt.NDArray[np.uint8]:
    """See :meth:`hvd_adaptive.kernels.base.QuantizedKernels.decompress_sum_`."""
    return sum_one_by_one(decompress_add_, bodies, outs, scale, rule)


def round_at_random_(out: Tensor, x: Tensor, key: int) -> None:
    """See :meth:`hvd_adaptive.kernels.base.QuantizedKernels.round_at_random_`.

    Example:
        >>> out = torch.empty(10_000, dtype=torch.bfloat16)
        >>> round_at_random_(out, torch.full((10_000,), 1.001), key=1)
        >>> sorted(set(out.tolist())), round(out.double().mean().item(), 3)
        ([1.0, 1.0078125], 1.001)
    """
    bits = x.view(torch.int32)
    magnitudes = bits & MAGNITUDE
    noise = (words(x.numel(), key, x.device) >> 16).int()
    rounded = (magnitudes.clamp(max=LARGEST_BF16) + noise) >> 16
    rounded = torch.where(magnitudes > INF, NAN_BF16, rounded)
    out.view(torch.int16).copy_(rounded | ((bits >> 16) & -0x8000))


def _shares(rows: Tensor, norms: Tensor) -> Tensor:
    """What is left to round, in [-1, 1]: each block divided by its norm."""
    return (rows / torch.where(norms > 0, norms, 1.0)).clamp(-1, 1)


def _round(shares: Tensor, random: Tensor, rule: QuantizationRule, levels: Tensor) -> Tensor:
    """The codes: one of the two levels around a share, so that the expectation is the share."""
    top = (len(levels) - 1) // 2
    if rule.rounding is Rounding.sign:
        return (shares >= 0).long()
    if rule.rounding is Rounding.uniform and top:
        scaled = shares * torch.tensor(float(top), device=shares.device)
        below = scaled.floor()
        return (below + top + (random < scaled - below)).long()
    lower = torch.searchsorted(levels, shares, right=True) - 1
    lower = lower.clamp(0, len(levels) - 2)
    part = (shares - levels[lower]) / (levels[lower + 1] - levels[lower])
    return lower + (random < part)


def _decoded(codes: Tensor, norms: Tensor, rule: QuantizationRule, levels: Tensor) -> Tensor:
    """What codes, in rows of a block, decode to."""
    if rule.norm is Norm.sides:
        return torch.where(codes > 0, norms[:, 1:], -norms[:, :1])
    return levels[codes] * norms


def _compress_layer_(
    x: Tensor, bits: int, rule: QuantizationRule, tables: Tables, random: Tensor
) -> tuple[list[Tensor], float, float]:
    """Code a finite ``x``, leave the remainder: (parts, its energy, energy sent)."""
    levels = torch.from_numpy(tables.signed(bits)).to(x.device)
    rows, sizes = in_rows(x, rule.block), block_sizes(x.numel(), rule.block, x.device)
    energy = float(_totals(rows.double().square()).sum())
    norms = block_norms(rows, sizes, rule)
    codes = _round(_shares(rows, norms[:, :1]), in_rows(random, rule.block), rule, levels)
    if rule.rounding is Rounding.sign:
        codes = (rows >= 0).long()
    decoded = _decoded(codes, norms, rule, levels).view(-1)[: x.numel()]
    x.sub_(decoded)
    packed = pack(codes.view(-1)[: x.numel()], bits, len(levels))
    parts = [_bytes(bits, x.device), norms.contiguous().view(-1).view(torch.uint8), packed]
    return parts, energy, float(decoded.double().square().sum())


def _bytes(value: int, device: torch.device) -> Tensor:
    return torch.full((1,), value, dtype=torch.uint8, device=device)


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
    """See :meth:`hvd_adaptive.kernels.base.QuantizedKernels.compress_`.

    Example:
        >>> rule = QuantizationRule(Norm.max, Rounding.uniform, block=4)
        >>> x, out = torch.tensor([1.0, -4.0, 0.0, 3.0]), torch.zeros(4)
        >>> one_layer, bits = np.array([0, 4]), np.array([2])
        >>> body, stats = compress_(x, one_layer, bits, rule, rule.tables)
        >>> body.numel(), stats[0, 0]
        (6, np.float64(26.0))
        >>> marks = decompress_add_(body, 0, [out], 1.0, rule, rule.tables)
        >>> (out + x).tolist(), out[1:3].tolist()
        ([1.0, -4.0, 0.0, 3.0], [-4.0, 0.0])
    """
    offsets, bits = check_layers(x, offsets, bits, grads, halves=True)
    check_bits(bits, tables)
    keys, dithers = check_keys(keys, len(bits)), check_keys(dithers, len(bits))
    parts = [torch.zeros(reserve, dtype=torch.uint8, device=x.device)]
    stats = np.zeros((len(bits), 3))
    for layer, width in enumerate(bits.tolist()):
        part = x[offsets[layer] : offsets[layer + 1]]
        total = part if grads is None else part + grads[layer].view(-1)
        if not bool(total.isfinite().all()):
            stats[layer] = (0, 0, 1)
            parts.append(_bytes(NONFINITE, x.device))
            continue
        part.copy_(total)
        random = uniforms(part.numel(), int(keys[layer]), x.device, int(dithers[layer]))
        encoded, energy, sent = _compress_layer_(part, width, rule, tables, random)
        stats[layer] = (energy, sent, 0)
        parts += encoded
    return torch.cat(parts), stats


class _FoundError(Exception):
    """What is wrong at which byte; :func:`decompress_add_` adds the layer."""

    def __init__(self, damage: Damage, position: int) -> None:
        super().__init__(damage, position)
        self.damage, self.position = damage, position


def _checked_codes(
    data: Tensor, numel: int, bits: int, rule: QuantizationRule, tables: Tables, at: int
) -> Tensor:
    """The codes of a layer whose packed bytes are ``data``, at byte ``at`` of the body."""
    alphabet = int(tables.alphabets[bits])
    codes = unpack(data, bits, alphabet)
    if alphabet != 3 and int(data.numel() * 8 % bits):
        codes = torch.cat([codes, (data[-1:].long() >> (8 - data.numel() * 8 % bits))])
    wrong = codes >= alphabet
    wrong[numel:] = codes[numel:] > 0
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        block = min(first, numel - 1) // rule.block * rule.block
        # the padding is looked at after the last block's codes
        damage = Damage.code if first < numel else Damage.padding
        raise _FoundError(damage, at + packed_bytes(block, bits, alphabet))
    return codes[:numel]


def _decode_layer(
    body: Tensor, position: int, numel: int, rule: QuantizationRule, tables: Tables
) -> tuple[Tensor | None, int]:
    """(decoded values, or None where the layer was not finite; next position)."""
    if position >= body.numel():
        raise _FoundError(Damage.truncated, body.numel())
    bits = int(body[position])
    if bits == NONFINITE:
        return None, position + 1
    if bits > MAX_BITS or not tables.alphabets[bits]:
        raise _FoundError(Damage.header, position)
    start = position + 1 + rule.norm_bytes(numel)
    end = start + packed_bytes(numel, bits, int(tables.alphabets[bits]))
    if end > body.numel():
        raise _FoundError(Damage.truncated, body.numel())
    norms = body[position + 1 : start].clone().view(torch.float32)  # a clone is aligned
    bad = (norms.view(torch.int32) < 0) | ~norms.isfinite()
    if bool(bad.any()):
        raise _FoundError(Damage.norm, position + 1 + 4 * int(bad.nonzero()[0]))
    if numel == 0:
        return norms, end
    codes = _checked_codes(body[start:end], numel, bits, rule, tables, start)
    levels = torch.from_numpy(tables.signed(bits)).to(body.device)
    decoded = _decoded(in_rows(codes, rule.block), norms.view(-1, rule.norms), rule, levels)
    return decoded.view(-1)[:numel], end


def _decode_stream(
    body: Tensor,
    layer: ReceivedLayer,
    rule: QuantizationRule,
    tables: Tables,
    codes: Mapping[int, Code],
) -> Tensor | None:
    """The values of a layer that is Huffman-coded; its norms are looked at first."""
    first = layer.start + 1
    norms = body[first : first + rule.norm_bytes(layer.numel)].clone().view(torch.float32)
    bad = (norms.view(torch.int32) < 0) | ~norms.isfinite()
    if bool(bad.any()):
        raise _FoundError(Damage.norm, first + 4 * int(bad.nonzero()[0]))
    alone = body[layer.start : layer.end].cpu()
    try:
        packed = entropy.decode(alone, 0, [layer.numel], rule, tables, codes)
    except WireError:
        raise _FoundError(Damage.stream, layer.stream) from None
    decoded, _ = _decode_layer(packed.to(body.device), 0, layer.numel, rule, tables)
    return decoded


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
    coded = [*layers_of(body.cpu().numpy(), start, numels, rule, tables, codes)] if codes else []
    marks = np.zeros(len(outs), np.uint8)
    layer, position = 0, start
    try:
        for layer, out in enumerate(outs):
            if coded and coded[layer].stream:
                assert codes is not None
                decoded = _decode_stream(body, coded[layer], rule, tables, codes)
                position = coded[layer].end
            else:
                decoded, position = _decode_layer(body, position, numels[layer], rule, tables)
            if decoded is None:
                out.fill_(float("nan"))
                marks[layer] = 1
            else:
                factor = torch.tensor(scale, dtype=torch.float32, device=out.device)
                out.view(-1).add_(factor * decoded)
        if position != body.numel():
            layer = len(outs) - 1
            raise _FoundError(Damage.trailing, position)
    except _FoundError as found:
        numel = numels[layer] if outs else 0
        raise damaged(found.damage, layer, numel, found.position, body.numel()) from None
    return marks


def norm_histogram(
    x: Tensor, rule: QuantizationRule, *, squared: bool
) -> tuple[npt.NDArray[np.float64], float]:
    """See :meth:`hvd_adaptive.kernels.base.QuantizedKernels.norm_histogram`.

    Example:
        >>> rule = QuantizationRule(Norm.max, Rounding.uniform)
        >>> weights, _ = norm_histogram(torch.tensor([2.0, 1.0]), rule, squared=True)
        >>> weights[-1], weights.sum()
        (np.float64(4.0), np.float64(8.0))
    """
    check_spectrum(x)
    if not bool(x.isfinite().all()):
        return np.zeros(WEIGHT_BINS), float("nan")
    rows, sizes = in_rows(x.view(-1), rule.block), block_sizes(x.numel(), rule.block, x.device)
    norms = block_norms(rows, sizes, rule)
    shares = _shares(rows, norms).abs().view(-1)[: x.numel()]
    beyond = (rows.abs().double() - norms.double()).clamp(min=0).square().sum()
    worth = norms.double().square() if squared else torch.ones_like(norms, dtype=torch.float64)
    weights = torch.bincount(
        shares.view(torch.int32) >> WEIGHT_SHIFT,
        weights=worth.view(-1).repeat_interleave(sizes),
        minlength=WEIGHT_BINS,
    )
    return weights.cpu().numpy(), float(beyond)


def expected_error_at(
    weights: npt.NDArray[np.float64], tables: Tables, bits: Sequence[int]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """See :meth:`hvd_adaptive.kernels.base.QuantizedKernels.expected_error_at`."""
    errors, counts = np.zeros(len(bits)), np.zeros((len(bits), LEVELS))
    for row, width in enumerate(bits):
        signed = tables.signed(width)
        errors[row], counts[row, : signed.size] = expected_from_weights(weights, signed)
    return errors, counts
