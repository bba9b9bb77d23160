"""Quantization in plain torch: any device, one layer at a time, and what ``quantize`` must equal.

Written to be read, not to be fast: an array element for every bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hvd_adaptive.kernels.reference import (
    INF,
    MAGNITUDE,
    check_layers,
    check_outs,
    check_spectra,
    check_spectrum,
    spectrum,
)
from hvd_adaptive.rng import mix
from hvd_adaptive.wire.quantized import (
    LEVELS,
    MAX_BITS,
    NONFINITE,
    TRIT_BYTES,
    TRITS,
    Damage,
    Norm,
    QuantizationRule,
    Rounding,
    Tables,
    damaged,
    packed_bytes,
)

LARGEST_NORM = 2.0**127
"""What is above it saturates: a value and a level of the other sign may be twice the norm apart."""

WEIGHT_SHIFT = 13
"""Shares are weighed by their float's exponent and 10 bits of the mantissa."""
WEIGHT_BINS = (0x3F800000 >> WEIGHT_SHIFT) + 1
"""Bins of the shares in [0, 1]; the last one holds those that are 1."""

LARGEST_BF16 = 0x7F7F0000
"""Bits of the largest float32 that is a finite bfloat16."""
NAN_BF16 = 0x7FC0

_WORD = 0xFFFFFFFF


# --- checks that all kernels share ---------------------------------------------------------------


def check_bits(bits: npt.NDArray[np.int64], tables: Tables) -> None:
    """ValueError unless there is a table for every layer's bits."""
    for width in np.unique(bits).tolist():
        if not 1 <= width <= MAX_BITS or not tables.alphabets[width]:
            known = ", ".join(str(bits) for bits in tables.magnitudes)
            raise ValueError(f"there are no levels for {width} bits a value, but for {known}")


def check_keys(keys: npt.NDArray[np.uint64] | None, layers: int) -> npt.NDArray[np.uint64]:
    """The keys as contiguous uint64, 0 where there are none; ValueError unless there is one a layer."""
    if keys is None:
        return np.zeros(layers, np.uint64)
    if keys.shape != (layers,) or keys.dtype != np.uint64:
        raise ValueError(f"{layers} layers have as many uint64 keys, got {keys.dtype}{keys.shape}")
    return np.ascontiguousarray(keys)


# --- measuring -----------------------------------------------------------------------------------


def _rows(x: Tensor, size: int) -> Tensor:
    """``x`` in rows of ``size``, the last one filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % size)).view(-1, size)


def _sizes(numel: int, block: int, device: torch.device) -> Tensor:
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


def _norms(rows: Tensor, sizes: Tensor, rule: QuantizationRule) -> Tensor:
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


# --- rounding ------------------------------------------------------------------------------------


def uniforms(numel: int, key: int, device: torch.device | None = None) -> Tensor:
    """The random numbers of a stream: multiples of 2^-24 in [0, 1), float32.

    Number ``i`` is a hash of ``i`` and ``key``: the 32-bit mixer "lowbias32" (Wellons, "Prospecting
    for Hash Functions", 2018), with the lower half of the mixed key before it and the upper half
    inside. Without :func:`hvd_adaptive.rng.mix`, keys of neighbouring upper halves would be related.

    Args:
        numel: how many, from the first on.
        key: 64 bits.
        device: where.

    Example:
        >>> uniforms(3, key=1).tolist()
        [0.8843241930007935, 0.660982608795166, 0.4252762794494629]
    """
    return (_words(numel, key, device) >> 8).float() * 2.0**-24


def _words(numel: int, key: int, device: torch.device | None) -> Tensor:
    """32 random bits each, int64: see :func:`uniforms`."""
    key = mix(key)
    h = torch.arange(numel, device=device) ^ (key & _WORD)
    h = h ^ (h >> 16)
    h = (h * 0x7FEB352D) & _WORD
    h = h ^ (key >> 32)
    h = h ^ (h >> 15)
    h = (h * 0x846CA68B) & _WORD  # an overflow wraps, and the lower half is right
    return h ^ (h >> 16)


def round_at_random_(out: Tensor, x: Tensor, key: int) -> None:
    """Round float32 ``x`` to bfloat16 ``out`` so that the expectation is ``x``.

    The upper half of a float32 is the bfloat16 towards zero; 16 random bits, added to the lower half,
    carry into it as often as that half says. Unbiased, but beyond bfloat16's range, where it saturates.

    Args:
        out: bfloat16[n].
        x: float32[n]; a NaN stays one.
        key: of the random numbers.

    Example:
        >>> out = torch.empty(10_000, dtype=torch.bfloat16)
        >>> round_at_random_(out, torch.full((10_000,), 1.001), key=1)
        >>> sorted(set(out.tolist())), round(out.double().mean().item(), 3)
        ([1.0, 1.0078125], 1.001)
    """
    bits = x.view(torch.int32)
    magnitudes = bits & MAGNITUDE
    noise = (_words(x.numel(), key, x.device) >> 16).int()
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


# --- packing -------------------------------------------------------------------------------------


def pack(codes: Tensor, bits: int, alphabet: int) -> Tensor:
    """The bytes of a layer's codes, int64 (see :mod:`hvd_adaptive.wire.quantized`).

    Example:
        >>> pack(torch.tensor([1, 2, 3]), bits=4, alphabet=16).tolist()
        [33, 3]
        >>> pack(torch.tensor([2, 1, 0, 0, 1, 2]), bits=2, alphabet=3).tolist()
        [86, 2]
    """
    if alphabet == 3:
        digits, weights = _rows(codes, TRITS), [3**digit for digit in range(TRITS)]
    else:
        fields = (codes.unsqueeze(1) >> torch.arange(bits, device=codes.device)) & 1
        digits, weights = _rows(fields.view(-1), 8), [1 << bit for bit in range(8)]
    return (digits * torch.tensor(weights, device=codes.device)).sum(1).to(torch.uint8)


def unpack(data: Tensor, bits: int, alphabet: int) -> Tensor:
    """All codes that fit into the bytes, int64; ``alphabet`` or more where there is none."""
    wide = data.long().unsqueeze(1)
    if alphabet == 3:
        digits = wide // torch.tensor([3**digit for digit in range(TRITS)], device=data.device) % 3
        return torch.where(wide < TRIT_BYTES, digits, 255).view(-1)
    stream = ((wide >> torch.arange(8, device=data.device)) & 1).view(-1)
    rows = stream[: stream.numel() // bits * bits].view(-1, bits)
    return (rows << torch.arange(bits, device=data.device)).sum(1)


# --- compression ---------------------------------------------------------------------------------


def _compress_layer_(
    x: Tensor, bits: int, rule: QuantizationRule, tables: Tables, key: int
) -> tuple[list[Tensor], float, float]:
    """Code a finite ``x``, leave the remainder: (parts, its energy, energy sent)."""
    levels = torch.from_numpy(tables.signed(bits)).to(x.device)
    rows, sizes = _rows(x, rule.block), _sizes(x.numel(), rule.block, x.device)
    energy = float(_totals(rows.double().square()).sum())
    norms = _norms(rows, sizes, rule)
    random = _rows(uniforms(x.numel(), key, x.device), rule.block)
    codes = _round(_shares(rows, norms[:, :1]), random, rule, levels)
    if rule.rounding is Rounding.sign:
        codes = (rows >= 0).long()
    decoded = _decoded(codes, norms, rule, levels).view(-1)[: x.numel()]
    x.sub_(decoded)
    packed = pack(codes.view(-1)[: x.numel()], bits, len(levels))
    parts = [_bytes(bits, x.device), norms.contiguous().view(-1).view(torch.uint8), packed]
    return parts, energy, float(decoded.double().square().sum())


def _bytes(value: int, device: torch.device) -> Tensor:
    return torch.full((1,), value, dtype=torch.uint8, device=device)


def quantize_compress_(
    x: Tensor,
    offsets: npt.NDArray[np.int64],
    bits: npt.NDArray[np.int64],
    rule: QuantizationRule,
    tables: Tables,
    grads: Sequence[Tensor] | None = None,
    keys: npt.NDArray[np.uint64] | None = None,
    reserve: int = 0,
    spectra: npt.NDArray[np.int64] | None = None,
) -> tuple[Tensor, npt.NDArray[np.float64]]:
    """Add the gradients, round each layer to the levels of its bits, and encode that.

    Each block is divided by its norm, and what results is rounded to one of the two signed levels
    around it, at random so that the expectation is the value itself. It is so but for the resolution
    of the random numbers (2^-24 of the distance of two levels), for values above the norm, which
    saturate (:attr:`Norm.clipped`, and magnitudes above 2^127), and for :attr:`Rounding.sign`, which
    is not random. The remainder stays in ``x``: payload + remainder is what ``x`` was, up to one
    rounding.

    A layer whose sum ``x + grad`` has a NaN or an Inf keeps its ``x`` bit for bit and sends a mark.

    Source: Alistarh et al., "QSGD" (NeurIPS 2017), section 3.1, for any levels as in Faghri et al.,
    "Adaptive Gradient Quantization for Data-Parallel SGD" (NeurIPS 2020), section 2.

    Args:
        x: float32, 1-D, contiguous; layer ``l`` is ``x[offsets[l]:offsets[l + 1]]``.
        offsets: ``int64[L + 1]``, rising; a layer may be empty and holds at most 2^31 - 1 elements.
        bits: ``int64[L]``, each 1 to 8 and one that ``tables`` has levels for.
        rule: what a block is divided by, and where the levels are.
        tables: the levels; those of ``rule`` unless they travel.
        grads: one contiguous float32 tensor a layer, of any shape with as many elements, on the
            device of ``x``; None adds nothing.
        keys: ``uint64[L]``, of the layers' random numbers; None draws with key 0.
        reserve: bytes to leave free, with whatever they hold, in front.
        spectra: ``int64[L, 32768]``: the :func:`hvd_adaptive.kernels.reference.spectrum` of each
            finite layer, gradient included, is added to its row; None counts nothing.

    Returns:
        ``(data, stats)``: uint8, 1-D, on the device of ``x``: ``reserve`` bytes and the layers as
        :mod:`hvd_adaptive.wire.quantized` describes them, without books; and ``float64[L, 3]``: energy
        (squared L2 norm) of ``x + grad``, energy of what was sent, and 1 where the layer was not
        finite (the others are then 0).

    Raises:
        ValueError: the arguments do not fit together.

    Example:
        >>> rule = QuantizationRule(Norm.max, Rounding.uniform, block=4)
        >>> x, out = torch.tensor([1.0, -4.0, 0.0, 3.0]), torch.zeros(4)
        >>> one_layer, bits = np.array([0, 4]), np.array([2])
        >>> body, stats = quantize_compress_(x, one_layer, bits, rule, rule.tables)
        >>> body.numel(), stats[0, 0]
        (6, np.float64(26.0))
        >>> marks = quantize_decompress_add_(body, 0, [out], 1.0, rule, rule.tables)
        >>> (out + x).tolist(), out[1:3].tolist()
        ([1.0, -4.0, 0.0, 3.0], [-4.0, 0.0])
    """
    offsets, bits = check_layers(x, offsets, bits, grads)
    check_bits(bits, tables)
    keys = check_keys(keys, len(bits))
    check_spectra(spectra, len(bits))
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
        if spectra is not None:
            spectra[layer] += spectrum(part)
        encoded, energy, sent = _compress_layer_(part, width, rule, tables, int(keys[layer]))
        stats[layer] = (energy, sent, 0)
        parts += encoded
    return torch.cat(parts), stats


# --- decompression -------------------------------------------------------------------------------


class _FoundError(Exception):
    """What is wrong at which byte; :func:`quantize_decompress_add_` adds the layer."""

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
    decoded = _decoded(_rows(codes, rule.block), norms.view(-1, rule.norms), rule, levels)
    return decoded.view(-1)[:numel], end


def quantize_decompress_add_(
    body: Tensor,
    start: int,
    outs: Sequence[Tensor],
    scale: float,
    rule: QuantizationRule,
    tables: Tables,
) -> npt.NDArray[np.uint8]:
    """Add ``scale`` times every decoded value; a layer marked nonfinite becomes NaN.

    When a WireError is raised, the layers before the damaged one have been added, the blocks of the
    damaged one that stand before the damage may have been, and nothing else has.

    Args:
        body: uint8, 1-D, contiguous.
        start: byte of it at which the layers begin.
        outs: one contiguous float32 tensor a layer, of any shape, on the device of ``body``.
        scale: what to multiply with, as float32.
        rule: that of compression.
        tables: levels for all numbers of bits that a layer may have.

    Returns:
        ``uint8[L]``: 1 where a layer was marked nonfinite.

    Raises:
        WireError: the body is damaged or does not belong to these layers; says what was found where.
        ValueError: the tensors are not as described.
    """
    numels = check_outs(body, outs)
    marks = np.zeros(len(outs), np.uint8)
    layer, position = 0, start
    try:
        for layer, out in enumerate(outs):
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


# --- expectations --------------------------------------------------------------------------------


def norm_histogram(
    x: Tensor, rule: QuantizationRule, *, squared: bool
) -> tuple[npt.NDArray[np.float64], float]:
    """A histogram of ``|x| / norm``, from which :func:`expected_error_at` takes errors.

    Args:
        x: float32, contiguous.
        rule: what a block is divided by: one norm a block.
        squared: whether an element counts by its block's squared norm, as its share of the error
            does; or as 1, as its code does.

    Returns:
        ``float64[WEIGHT_BINS]``, by exponent and 10 bits of the mantissa, and the squared error of
        what is above its norm; that is NaN where ``x`` is not finite.

    Example:
        >>> rule = QuantizationRule(Norm.max, Rounding.uniform)
        >>> weights, _ = norm_histogram(torch.tensor([2.0, 1.0]), rule, squared=True)
        >>> weights[-1], weights.sum()
        (np.float64(4.0), np.float64(8.0))
    """
    check_spectrum(x)
    if not bool(x.isfinite().all()):
        return np.zeros(WEIGHT_BINS), float("nan")
    rows, sizes = _rows(x.view(-1), rule.block), _sizes(x.numel(), rule.block, x.device)
    norms = _norms(rows, sizes, rule)
    shares = _shares(rows, norms).abs().view(-1)[: x.numel()]
    beyond = (rows.abs().double() - norms.double()).clamp(min=0).square().sum()
    worth = norms.double().square() if squared else torch.ones_like(norms, dtype=torch.float64)
    weights = torch.bincount(
        shares.view(torch.int32) >> WEIGHT_SHIFT,
        weights=worth.view(-1).repeat_interleave(sizes),
        minlength=WEIGHT_BINS,
    )
    return weights.cpu().numpy(), float(beyond)


def _weight_edges() -> npt.NDArray[np.float64]:
    """The shares at which bins begin, and the end of the last, which holds 1 only."""
    words = np.arange(WEIGHT_BINS, dtype=np.uint32) << np.uint32(WEIGHT_SHIFT)
    return np.append(words.view(np.float32).astype(np.float64), 1.0)


EDGES = _weight_edges()


def expected_from_weights(
    weights: npt.NDArray[np.float64], signed: npt.NDArray[np.float32]
) -> tuple[float, npt.NDArray[np.float64]]:
    """What rounding at random to ``signed`` levels does, in expectation, from :func:`norm_histogram`.

    A share ``r`` between levels ``a`` and ``b`` becomes ``b`` with probability ``(r - a) / (b - a)``,
    which has the variance ``(b - r)(r - a)`` (Faghri et al. 2020, equation 2). Weight is taken to be
    spread evenly over a bin, which is within 1 % of the truth for scattered values. Cost: the bins in
    use.

    Args:
        weights: ``float64[WEIGHT_BINS]``.
        signed: the levels, rising, symmetric, from -1 to 1.

    Returns:
        The squared error, and the weight that each level gets of magnitudes: ``float64[levels]``.

    Example:
        >>> signed, rule = np.array([-1, 0, 1], np.float32), QuantizationRule(Norm.l2, Rounding.uniform)
        >>> weights, _ = norm_histogram(torch.ones(100) / 2, rule, squared=True)
        >>> round(expected_from_weights(weights, signed)[0], 1)
        225.0
        >>> weights, _ = norm_histogram(torch.ones(100) / 2, rule, squared=False)
        >>> expected_from_weights(weights, signed)[1].round(1).tolist()
        [0.0, 90.0, 10.0]
    """
    used = np.flatnonzero(weights)
    low, high, weight = EDGES[used], EDGES[used + 1], weights[used]
    levels = signed.astype(np.float64)
    # Pieces: the bins, cut at the levels. A piece lies between two neighbouring levels.
    cuts = np.searchsorted(high, levels[(levels > 0) & (levels < 1)])
    inside = levels[(levels > 0) & (levels < 1)]
    valid = cuts < used.size
    cuts, inside = cuts[valid], inside[valid]
    hit = (low[cuts] < inside) & (inside < high[cuts])
    cuts, inside = cuts[hit], inside[hit]
    density = weight / np.where(high > low, high - low, 1.0)
    starts = np.insert(low, cuts + 1, inside)
    ends = np.insert(high, cuts, inside)
    owner = np.insert(np.arange(used.size), cuts, cuts)
    length = ends - starts
    mass = np.where(length > 0, density[owner] * length, weight[owner])
    middle = (starts + ends) / 2
    below = np.clip(np.searchsorted(levels, middle, side="right") - 1, 0, levels.size - 2)
    inside, gap = middle - levels[below], np.diff(levels)[below]
    variance = (gap - inside) * inside - length * length / 12
    up = mass * (inside / gap)
    counts = np.zeros(levels.size)
    np.add.at(counts, below, mass - up)
    np.add.at(counts, below + 1, up)
    return float(np.maximum(mass * variance, 0.0).sum()), counts


def expected_error_at(
    weights: npt.NDArray[np.float64], tables: Tables, bits: Sequence[int]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """:func:`expected_from_weights` for several numbers of bits.

    Returns:
        The errors, ``float64[W]``, and each code's weight, ``float64[W, LEVELS]``, 0 where there is
        no level.
    """
    errors, counts = np.zeros(len(bits)), np.zeros((len(bits), LEVELS))
    for row, width in enumerate(bits):
        signed = tables.signed(width)
        errors[row], counts[row, : signed.size] = expected_from_weights(weights, signed)
    return errors, counts
