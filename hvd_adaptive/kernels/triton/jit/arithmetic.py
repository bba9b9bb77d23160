"""Random numbers, fixed-order sums, packing and small integer functions that several kernels share."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import inspect

import triton
import triton.language as tl

INF = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)


def entry(function):
    """A kernel that is not compiled again for other sizes, or addresses that are multiples of 16."""
    given = inspect.signature(function).parameters.values()
    names = [each.name for each in given if each.annotation is not tl.constexpr]
    return triton.jit(do_not_specialize=names, do_not_specialize_on_alignment=names)(function)


FP16_GRADIENT = tl.constexpr(2)
BF16_GRADIENT = tl.constexpr(3)


@triton.jit
def load_gradient(address, first, i, mask, GRADS: tl.constexpr):
    """Elements ``first + i`` of a gradient, as float32, which holds all narrower types; 0 elsewhere."""
    if GRADS == FP16_GRADIENT:
        place = address.to(tl.pointer_type(tl.float16)) + first
        grad = tl.load(place + i, mask=mask, other=0.0).to(tl.float32)
    elif GRADS == BF16_GRADIENT:
        place = address.to(tl.pointer_type(tl.int16)) + first
        word = tl.load(place + i, mask=mask, other=0).to(tl.int32) << 16
        grad = word.to(tl.float32, bitcast=True)
    else:
        place = address.to(tl.pointer_type(tl.float32)) + first
        grad = tl.load(place + i, mask=mask, other=0.0)
    return grad


@triton.jit
def magnitude_bits(x):
    """The bits of |x|, which order as the magnitudes do."""
    return x.to(tl.int32, bitcast=True) & MAGNITUDE


@triton.jit
def random_words(i, low, high):
    """32 random bits for each number: ``lowbias32`` with the halves of a mixed key.

    See :func:`hvd_adaptive.kernels.reference.quantized.words`.
    """
    h = i.to(tl.uint32) ^ low.to(tl.uint32)
    h = h ^ (h >> 16)
    h = h * 0x7FEB352D
    h = h ^ high.to(tl.uint32)
    h = h ^ (h >> 15)
    h = h * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def halved_totals(rows, ROWS: tl.constexpr, LOG: tl.constexpr):
    """The sum of each row of 2^LOG: the upper half is added to the lower again and again."""
    for step in tl.static_range(LOG):
        pairs = tl.reshape(rows, (ROWS, 2, 1 << (LOG - 1 - step)))
        lower, upper = tl.split(tl.permute(pairs, (0, 2, 1)))
        rows = lower + upper
    return tl.reshape(rows, (ROWS,))


@triton.jit
def bit_length(x):
    """Bits of numbers from 0 to 2^31 - 1, by comparison: a conversion to float would round up."""
    length = x * 0  # of numbers and of tiles
    for step in tl.static_range(5):
        large = (x >> (16 >> step)) > 0
        length = tl.where(large, length + (16 >> step), length)
        x = tl.where(large, x >> (16 >> step), x)
    return length + (x > 0).to(length.dtype)


@triton.jit
def load_word(data, mask):
    """Little-endian uint32 at any byte."""
    word = tl.load(data, mask=mask, other=0).to(tl.uint32)
    for byte in tl.static_range(1, 4):
        word = word | (tl.load(data + byte, mask=mask, other=0).to(tl.uint32) << (8 * byte))
    return word


@triton.jit
def load_scale(scale):
    """The float32 whose bits are in a table of whole numbers."""
    return tl.load(scale).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def load_float(data, mask):
    """Little-endian float32 at any byte."""
    return load_word(data, mask).to(tl.float32, bitcast=True)


@triton.jit
def store_float(data, value, mask):
    """Little-endian float32 at any byte."""
    word = value.to(tl.uint32, bitcast=True)
    for byte in tl.static_range(4):
        tl.store(data + byte, ((word >> (8 * byte)) & 255).to(tl.uint8), mask=mask)


@triton.jit
def power_of_three(digit):
    return tl.where(
        digit == 0, 1, tl.where(digit == 1, 3, tl.where(digit == 2, 9, tl.where(digit == 3, 27, 81)))
    )


@triton.jit
def load_digits(address, first, i, mask):
    """Codes ``first + i`` that are packed in base 3, five to a byte; 255 where a byte holds no digits.

    Args:
        address: of the codes of a layer.
        first: a number, of a tile's first code.
        i: from there on, int32.
        mask: which codes there are.
    """
    i += (first % 5).to(tl.int32)
    data = (address + first // 5).to(tl.pointer_type(tl.uint8))
    byte = tl.load(data + i // 5, mask=mask, other=0).to(tl.int32)
    digits = byte // power_of_three(i % 5) % 3
    return tl.where(byte < 243, digits, 255)


@entry
def sum_parts(parts, edges, sums, COLUMNS: tl.constexpr, SIZE: tl.constexpr):
    """Sums of the rows from one edge to the next, in an order that is always the same."""
    owner, column = tl.program_id(0), tl.program_id(1)
    first, last = tl.load(edges + owner), tl.load(edges + owner + 1)
    total = tl.zeros((SIZE,), tl.float64)
    for start in range(first, last, SIZE):
        row = start + tl.arange(0, SIZE)
        total += tl.load(parts + row * COLUMNS + column, mask=row < last, other=0.0)
    tl.store(sums + owner * COLUMNS + column, tl.sum(total, 0))
