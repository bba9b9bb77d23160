"""Random subsets: a program draws ``SIZE`` runs; :mod:`hvd_adaptive.kernels.orders` describes them.

A table has the order: elements, where the first run begins, bits of the halves, and the rounds' keys.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from hvd_adaptive.kernels.triton.jit.arithmetic import entry


@triton.jit
def permuted(numbers, order, ROUNDS: tl.constexpr):
    """The image of each number; see :func:`hvd_adaptive.kernels.reference.subset._permute`."""
    low, high = tl.load(order + 2).to(tl.uint32), tl.load(order + 3).to(tl.uint32)
    one = low * 0 + 1
    for step in tl.static_range(ROUNDS):
        key = tl.load(order + 4 + step).to(tl.uint32)
        right = numbers & ((one << low) - 1)
        mixed = (right + key) * 0x9E3779B1
        mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA77
        left = (numbers >> low) ^ (mixed >> (one * 32 - high))
        numbers = (right << high) | left
        low, high = high, low
    return numbers


@triton.jit
def runs_of(first, order, ROUNDS: tl.constexpr, RUN: tl.constexpr, SIZE: tl.constexpr):
    """(where the runs from number ``first`` on begin, how many elements each has: 0 if left out)."""
    numbers = first + tl.arange(0, SIZE).to(tl.int64)
    starts = permuted(numbers.to(tl.uint32), order, ROUNDS).to(tl.int64) * RUN
    return starts, tl.minimum(tl.maximum(tl.load(order) - starts, 0), RUN)


@entry
def count_elements(order, found, ROUNDS: tl.constexpr, RUN: tl.constexpr, SIZE: tl.constexpr):
    """How many elements the runs of each program have."""
    program = tl.program_id(0).to(tl.int64)
    _, lengths = runs_of(program * SIZE, order, ROUNDS, RUN, SIZE)
    tl.store(found + program, tl.sum(lengths, 0))


@entry
def visit(
    x,
    values,
    order,
    before,
    count,
    skip,
    scale,
    ADDS: tl.constexpr,
    ROUNDS: tl.constexpr,
    RUN: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Take the first ``count`` elements into ``values`` and clear them, or add values to them.

    The last program draws on until there are as many: the others' runs are so many that there hardly
    ever is more to draw, but whether it is enough only the device knows.
    """
    program = tl.program_id(0).to(tl.int64)
    numel, offset = tl.load(order), tl.load(order + 1)
    done, first = tl.load(before + program), program * SIZE
    j = tl.arange(0, RUN)
    more = done < count
    while more:
        starts, lengths = runs_of(first, order, ROUNDS, RUN, SIZE)
        rank = done + tl.cumsum(lengths, 0) - lengths
        place = rank[:, None] + j[None, :]
        mask = (j[None, :] < lengths[:, None]) & (place < count)
        index = starts[:, None] + j[None, :] + offset
        index = tl.where(index >= numel, index - numel, index)  # goes round
        held = tl.load(x + index, mask=mask, other=0.0)
        if ADDS:
            mask = mask & (place >= skip)
            value = tl.load(values + place, mask=mask, other=0.0)
            tl.store(x + index, held + value * scale, mask=mask)
        else:
            tl.store(values + place, held, mask=mask)
            tl.store(x + index, tl.zeros((SIZE, RUN), tl.float32), mask=mask)
        done = done + tl.sum(lengths, 0)
        first = first + SIZE
        more = (done < count) & (program == tl.num_programs(0) - 1)
