"""Positions and values as bytes, in plain torch: an array element for every bit."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hvd_adaptive.wire import ValueFormat
from hvd_adaptive.wire.sparse import (
    CODE_BLOCK,
    GROUP,
    HEAD_BITS,
    HEAD_PARAMETER,
    HEAD_TEUHOLA,
    MAX_SCALE,
    VALUE_BLOCK,
)
from hvd_adaptive.wire.varint import write_varint


def in_blocks(x: Tensor, size: int) -> Tensor:
    """``x`` in rows of ``size``, the last one filled up with zeros."""
    return torch.nn.functional.pad(x, (0, -x.numel() % size)).view(-1, size)


def _bit_length(x: Tensor) -> Tensor:
    """Bits of the numbers in an int64 tensor (below 2^31); 0 for 0."""
    powers = torch.tensor([1 << bit for bit in range(32)], device=x.device)
    return torch.bucketize(x, powers, right=True)


def block_heads(gaps: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
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


def gap_blocks(indices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gaps between rising int64 indices: all, in one row a block, and how many are in each row."""
    device = indices.device
    gaps = torch.diff(indices, prepend=torch.full((1,), -1, device=device)) - 1
    rows = in_blocks(gaps, CODE_BLOCK)
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


def _ends(lengths: Tensor, starts: Tensor) -> Tensor:
    """Where each of some parts ends that lie side by side in blocks, each of which has a start."""
    ends = in_blocks(lengths, CODE_BLOCK).cumsum(1) + starts.unsqueeze(1)
    return ends.view(-1)[: lengths.numel()]


def _index_stream(indices: Tensor) -> tuple[Tensor, Tensor]:
    """The bits of each group but the last as u32, and the coded gaps of rising int64 indices: bytes."""
    device = indices.device
    gaps, rows, sizes = gap_blocks(indices)
    heads, lengths = block_heads(rows, sizes)
    starts = torch.cumsum(lengths, 0) - lengths
    bits = torch.zeros(-(-int(lengths.sum()) // 8) * 8, dtype=torch.uint8, device=device)
    for bit in range(HEAD_BITS):
        bits[starts + bit] = ((heads >> bit) & 1).to(torch.uint8)

    zeros, widths, lows = _codes(gaps, heads.repeat_interleave(sizes))
    ones = starts + HEAD_BITS
    bits[_ends(zeros + 1, ones) - 1] = 1
    low_starts = _ends(widths, ones + in_blocks(zeros + 1, CODE_BLOCK).sum(1)) - widths
    for bit in range(int(widths.max())):
        has = widths > bit
        bits[(low_starts + bit)[has]] = ((lows[has] >> bit) & 1).to(torch.uint8)
    group_starts = starts[:: GROUP // CODE_BLOCK]
    return torch.diff(group_starts).to(torch.int32).view(torch.uint8), _pack(bits)


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
    rows = in_blocks(values, VALUE_BLOCK)
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
    return (in_blocks(bits.to(torch.uint8), 8) * weights).sum(1, dtype=torch.uint8)


def unpack_bits(data: Tensor) -> Tensor:
    """The bits that :func:`_pack` packed, and its padding."""
    shifts = torch.arange(8, dtype=torch.uint8, device=data.device)
    return ((data.unsqueeze(1) >> shifts) & 1).view(-1)


def encode_layer(indices: Tensor, values: Tensor, how: ValueFormat) -> tuple[list[Tensor], Tensor]:
    """The bytes of values at rising indices, and the values that they decode to."""
    count = len(indices)
    header = write_varint(count << 4 | (how << 1 if count else 0))
    if count == 0:
        return [bytes_tensor(header, values.device)], values
    table, stream = _index_stream(indices)
    data, decoded = _encode_values(values, how)
    header += write_varint(stream.numel())
    return [bytes_tensor(header, values.device), table, stream, data], decoded


def bytes_tensor(data: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
