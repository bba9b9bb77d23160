"""Values in each of the formats, and what rounding leaves of them."""

# mypy: disable-error-code="attr-defined, no-untyped-def, untyped-decorator"

from __future__ import annotations

import numpy as np
from numba import carray, int32, int64, uint8, uint16, uint32

from hvd_adaptive.kernels.cpu.compiling import fused, kernel
from hvd_adaptive.kernels.cpu.enums import FP16, FP32, INT8, PADDING, SIGN, VALUE
from hvd_adaptive.kernels.cpu.intrinsics import (
    below_zero,
    bits_float,
    float32_pointer,
    float_bits,
    load_f32,
    load_u8,
    load_u16,
    load_u32,
    put_chosen,
    store_f32,
    store_u8,
    store_u16,
    subtract_chosen,
)
from hvd_adaptive.kernels.floats import INF, MAGNITUDE
from hvd_adaptive.wire.sparse import MAX_SCALE, VALUE_BLOCK


@kernel
def _half_bits(value):
    """IEEE half of a finite float32, round to nearest even, saturated at 65504."""
    word = int64(float_bits(value))
    magnitude = word & MAGNITUDE
    sign = (word >> 16) & 0x8000
    if magnitude >= 0x477FE000:
        return sign | 0x7BFF
    if magnitude < 0x38800000:
        # Below 2^-14 halves are multiples of 2^-24, the spacing of floats in [0.5, 1): let the
        # addition round.
        shifted = bits_float(uint32(magnitude)) + np.float32(0.5)
        return sign | (int64(float_bits(shifted)) - 0x3F000000)
    return sign | ((magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13)


@kernel
def _half_value(half):
    """The float32 of a half; the codes of Inf and NaN give Inf."""
    if half & 0x7C00 == 0x7C00:
        return bits_float(uint32(INF))
    scaled = bits_float(uint32((half & 0x7FFF) << 13)) * np.float32(2.0**112)
    return bits_float(float_bits(scaled) | uint32((half & 0x8000) << 16))


@kernel
def _brain_bits(value):
    """bfloat16 of a finite float32, round to nearest even, saturated at the largest finite."""
    word = int64(float_bits(value))
    rounded = (word + 0x7FFF + ((word >> 16) & 1)) >> 16
    if rounded & 0x7FFF >= INF >> 16:
        rounded -= 1
    return rounded


@kernel
def bytes_of_values(count, value_format):
    if value_format == INT8:
        return count + 4 * ((count + VALUE_BLOCK - 1) // VALUE_BLOCK)
    if value_format == SIGN:
        return 8 + (count + 7) // 8
    return count * (4 if value_format == FP32 else 2)


@kernel
def _put_int8(out, values, start, size):
    """One block of int8 codes after its scale; values becomes the remainder. Returns the energy."""
    largest = np.float32(0)
    for i in range(start, start + size):
        largest = max(largest, abs(values[i]))
    # the division of a denormal may underflow to 0, and 127 times the quotient may overflow
    scale = max(largest / np.float32(127), bits_float(uint32(1)))
    scale = min(scale, np.float32(MAX_SCALE))
    store_f32(out, scale)
    energy = 0.0
    for i in range(size):
        code = np.rint(values[start + i] / scale)
        code = min(max(code, np.float32(-127)), np.float32(127))
        store_u8(out + 4 + i, uint8(int32(code)))
        decoded = code * scale
        values[start + i] -= decoded
        energy += np.float64(decoded) * np.float64(decoded)
    return energy


@kernel
def _put_signs(out, values, count):
    """Two means and a sign bit per value; values becomes the remainder. Returns the energy."""
    plus, minus, negatives = 0.0, 0.0, int64(0)
    for i in range(count):
        # No branch: nobody could foresee it.
        value = np.float64(values[i])
        plus += max(value, 0.0)
        minus -= min(value, 0.0)
        negatives += int64(values[i] < 0)
    positives = count - negatives
    up = np.float32(plus / positives) if positives else np.float32(0)
    down = np.float32(minus / negatives) if negatives else np.float32(0)
    store_f32(out, up)
    store_f32(out + 4, down)
    address, whole = int64(values.ctypes.data), count & ~7
    for start in range(0, whole, 8):
        byte = below_zero(address + 4 * start)
        store_u8(out + 8 + (start >> 3), byte)
        subtract_chosen(address + 4 * start, byte, -down, up)
    last = int64(0)
    for i in range(whole, count):
        negative = values[i] < 0
        last |= int64(negative) << (i - whole)
        values[i] -= -down if negative else up
    if count > whole:
        store_u8(out + 8 + (whole >> 3), uint8(last))
    squares = positives * np.float64(up) ** 2
    return squares + negatives * np.float64(down) ** 2


@kernel
def put_values(out, values, count, value_format):
    """Write the values and leave in them what rounding left out. Returns (energy, next address)."""
    energy = 0.0
    if value_format == INT8:
        for start in range(0, count, VALUE_BLOCK):
            size = min(VALUE_BLOCK, count - start)
            energy += _put_int8(out, values, start, size)
            out += 4 + size
        return energy, out
    if value_format == SIGN:
        return _put_signs(out, values, count), out + bytes_of_values(count, value_format)
    for i in range(count):
        value = values[i]
        decoded = value
        if value_format == FP32:
            store_f32(out + 4 * i, value)
        elif value_format == FP16:
            half = _half_bits(value)
            store_u16(out + 2 * i, uint16(half))
            decoded = _half_value(half)
        else:
            brain = _brain_bits(value)
            store_u16(out + 2 * i, uint16(brain))
            decoded = bits_float(uint32(brain << 16))
        values[i] = value - decoded
        energy += np.float64(decoded) * np.float64(decoded)
    return energy, out + bytes_of_values(count, value_format)


@kernel
def get_values(position, values, count, value_format):
    """Decode count values; the caller has checked that their bytes are there."""
    if value_format == INT8:
        for start in range(0, count, VALUE_BLOCK):
            size = min(VALUE_BLOCK, count - start)
            scale = load_f32(position)
            for i in range(size):
                # two conversions: a byte is signed only once it is an int8
                code = (int64(load_u8(position + 4 + i)) ^ 0x80) - 0x80
                values[start + i] = np.float32(code) * scale
            position += 4 + size
        return
    if value_format == SIGN:
        up, down = load_f32(position), load_f32(position + 4)
        address, whole = int64(values.ctypes.data), count & ~7
        for start in range(0, whole, 8):
            put_chosen(address + 4 * start, load_u8(position + 8 + (start >> 3)), -down, up)
        for i in range(whole, count):
            negative = (int64(load_u8(position + 8 + (i >> 3))) >> (i & 7)) & 1
            values[i] = -down if negative else up
        return
    for i in range(count):
        if value_format == FP32:
            values[i] = load_f32(position + 4 * i)
        elif value_format == FP16:
            values[i] = _half_value(int64(load_u16(position + 2 * i)))
        else:
            values[i] = bits_float(uint32(load_u16(position + 2 * i)) << uint32(16))


@kernel
def _check_signs(position, count):
    """(damage, address) of the two means and the bits after the last sign."""
    for mean in range(2):
        if (int64(load_u32(position + 4 * mean)) & MAGNITUDE) >= INF:
            return VALUE, position
    last = position + 7 + (count + 7) // 8
    if count & 7 and int64(load_u8(last)) >> (count & 7):
        return PADDING, last
    return 0, position


@fused
def measure_block(x, n):
    """Energy and largest magnitude (as bits) of n elements."""
    a = carray(float32_pointer(x), n)
    energy = 0.0
    top = int32(0)
    for i in range(n):
        energy += np.float64(a[i]) * np.float64(a[i])
        top = max(top, int32(float_bits(a[i]) & uint32(MAGNITUDE)))
    return energy, int64(top)


@kernel
def read_values(position, values, count, value_format):
    """Decode and check count values, whose bytes are there: (damage, next address or that of it)."""
    if value_format == SIGN:
        damage, position = _check_signs(position, count)
        if damage:
            return damage, position
    get_values(position, values, count, value_format)
    if measure_block(int64(values.ctypes.data), count)[1] >= INF:
        return VALUE, position
    return 0, position + bytes_of_values(count, value_format)
