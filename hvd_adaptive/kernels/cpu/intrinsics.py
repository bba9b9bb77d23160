"""What Numba lacks: raw addresses, unaligned words, bit scans, lanes.

Kernels get a tensor as its ``data_ptr()``: an int64 costs nothing to pass, and 300 of them fit in one
array. Nothing here checks bounds; the callers do.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from hvd_adaptive.kernels.cpu.enums import FAR, NEAR
from hvd_adaptive.kernels.floats import INF
from hvd_adaptive.kernels.selection import SAMPLE

Codegen = Callable[..., Any]


_I1, _I8, _I32, _I64 = (ir.IntType(bits) for bits in (1, 8, 32, 64))
_EIGHT_F32 = ir.VectorType(ir.FloatType(), 8)
_EIGHT_F64 = ir.VectorType(ir.DoubleType(), 8)
LANES = 64
ROTATED = 16
"""Values that :func:`butterflies_within` and :func:`butterflies_across` load at once."""
_SIXTEEN_F32 = ir.VectorType(ir.FloatType(), ROTATED)


def _pointer(element: Any) -> Any:
    """An intrinsic that turns an address into a pointer that ``numba.carray`` takes."""

    @intrinsic
    def convert(typingctx, address):
        del typingctx, address

        def codegen(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), codegen

    return convert


def _load(element: Any) -> Any:
    """An intrinsic that reads one element at any address, aligned or not."""

    @intrinsic
    def load(typingctx, address):
        del typingctx, address

        def codegen(context, builder, signature, args):
            kind = context.get_value_type(signature.return_type)
            return builder.load(builder.inttoptr(args[0], kind.as_pointer()), align=1)

        return element(types.int64), codegen

    return load


def _store(element: Any) -> Any:
    """An intrinsic that writes one element at any address, aligned or not."""

    @intrinsic
    def store(typingctx, address, value):
        del typingctx, address, value

        def codegen(context, builder, signature, args):
            kind = context.get_value_type(signature.args[1])
            builder.store(args[1], builder.inttoptr(args[0], kind.as_pointer()), align=1)
            return context.get_dummy_value()

        return types.void(types.int64, element), codegen

    return store


def _reinterpret(source: Any, target: Any) -> Any:
    """An intrinsic that gives a value's bits another type of the same width."""

    @intrinsic
    def reinterpret(typingctx, value):
        del typingctx, value

        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], context.get_value_type(signature.return_type))

        return target(source), codegen

    return reinterpret


float32_pointer = _pointer(types.float32)
uint8_pointer = _pointer(types.uint8)
uint32_pointer = _pointer(types.uint32)
int64_pointer = _pointer(types.int64)
uint64_pointer = _pointer(types.uint64)

load_u64, store_u64 = _load(types.uint64), _store(types.uint64)
load_u32, store_u32 = _load(types.uint32), _store(types.uint32)
load_u16, store_u16 = _load(types.uint16), _store(types.uint16)
load_f32, store_f32 = _load(types.float32), _store(types.float32)
load_u8, store_u8 = _load(types.uint8), _store(types.uint8)

float_bits = _reinterpret(types.float32, types.uint32)
bits_float = _reinterpret(types.uint32, types.float32)


def _trailing_zeros(typingctx, value):
    """Index of the lowest set bit of a uint64; 64 where there is none."""
    del typingctx, value

    def codegen(context, builder, signature, args):
        del context, signature
        return builder.cttz(args[0], ir.Constant(_I1, 0))

    return types.uint64(types.uint64), codegen


def _whole_log2(typingctx, value):
    """The whole part of log2 of a uint64 that is not 0."""
    del typingctx, value

    def codegen(context, builder, signature, args):
        del context, signature
        return builder.sub(ir.Constant(_I64, 63), builder.ctlz(args[0], ir.Constant(_I1, 1)))

    return types.int64(types.uint64), codegen


def _spread(builder: Any, scalar: Any, lanes: Any) -> Any:
    """A vector that holds a scalar in each lane."""
    undefined = ir.Constant(lanes, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(_I32, lanes.count), None))


def _in_bin(typingctx, address, number):
    """A uint64 whose bit ``i`` says whether float32 ``i`` of the 64 at an address is in a bin."""
    del typingctx, address, number

    def codegen(context, builder, signature, args):
        del context, signature
        lanes = ir.VectorType(_I32, LANES)
        words = builder.load(builder.inttoptr(args[0], lanes.as_pointer()), align=4)
        upper = builder.and_(words, ir.Constant(lanes, [0x7FFF0000] * LANES))
        hits = builder.icmp_signed("==", upper, _spread(builder, args[1], lanes))
        return builder.bitcast(hits, _I64)

    return types.uint64(types.int64, types.int32), codegen


def _in_groups(pitch: int, size: int) -> Any:
    """An intrinsic: which uint32 of the 64 at an address are among the first ``size`` of ``pitch``."""

    def look(typingctx, address):
        del typingctx, address

        def codegen(context, builder, signature, args):
            del context, signature
            lanes = ir.VectorType(_I32, LANES)
            words = builder.load(builder.inttoptr(args[0], lanes.as_pointer()), align=4)
            places = builder.urem(words, ir.Constant(lanes, [pitch] * LANES))
            hits = builder.icmp_unsigned("<", places, ir.Constant(lanes, [size] * LANES))
            return builder.bitcast(hits, _I64)

        return types.uint64(types.int64), codegen

    return look


def _lanes(builder: Any, vector: Any, start: int, stop: int) -> Any:
    """Some lanes of a vector."""
    chosen = ir.Constant(ir.VectorType(_I32, stop - start), list(range(start, stop)))
    return builder.shuffle_vector(vector, vector, chosen)


def _energy(builder: Any, values: Any) -> Any:
    """The sum of the squares of a vector of 64 float32, as a double."""
    squares = None
    for start in range(0, LANES, 8):
        eight = builder.fpext(_lanes(builder, values, start, start + 8), _EIGHT_F64)
        product = builder.fmul(eight, eight, flags=["contract"])
        squares = builder.fadd(squares, product, flags=["contract"]) if squares else product
    for half in (4, 2, 1):
        upper = _lanes(builder, squares, half, 2 * half)
        squares = builder.fadd(_lanes(builder, squares, 0, half), upper)
    return builder.extract_element(squares, ir.Constant(_I32, 0))


def _summed(builder: Any, args: Any, add: bool) -> tuple[Any, Any, Any]:
    """A pointer to the 64 float32 at an address, and these; as ``add``, also after adding 64 others."""
    floats = ir.VectorType(ir.FloatType(), LANES)
    pointer = builder.inttoptr(args[0], floats.as_pointer())
    before = values = builder.load(pointer, align=4)
    if add:
        others = builder.inttoptr(args[1], floats.as_pointer())
        values = builder.fadd(values, builder.load(others, align=4))
    return pointer, before, values


def _reaching(builder: Any, values: Any, number: Any) -> Any:
    """A word whose bit ``i`` says whether magnitude ``i`` of 64 float32 has at least these bits."""
    words = ir.VectorType(_I32, LANES)
    bits = builder.bitcast(values, words)
    magnitudes = builder.and_(bits, ir.Constant(words, [0x7FFFFFFF] * LANES))
    return builder.bitcast(builder.icmp_signed(">=", magnitudes, _spread(builder, number, words)), _I64)


def _observe_all(add: bool) -> Any:
    """An intrinsic that looks at the 64 float32 at an address; as ``add``, after adding 64 others.

    It returns which magnitudes have bits of at least a number, as a uint64, and the energy. Sums are
    stored if all of them are finite: if the energy is, for the square of a float32 fits in a double.
    """

    def look(typingctx, address, other, number):
        del typingctx, address, other, number

        def codegen(context, builder, signature, args):
            pointer, _, values = _summed(builder, args, add)
            energy = _energy(builder, values)
            if add:
                limit = ir.Constant(ir.DoubleType(), float("inf"))
                with builder.if_then(builder.fcmp_ordered("<", energy, limit), likely=True):
                    builder.store(values, pointer, align=4)
            found = _reaching(builder, values, args[2])
            return context.make_tuple(builder, signature.return_type, [found, energy])

        returned = types.Tuple((types.uint64, types.float64))
        return returned(types.int64, types.int64, types.int32), codegen

    return look


def _check_all(add: bool) -> Any:
    """As :func:`_observe_all`, without the energy: whether all are finite is in its place.

    Sums are stored only where one differs from what was there: of sparse ones most memory is not.
    """

    def look(typingctx, address, other, number):
        del typingctx, address, other, number

        def codegen(context, builder, signature, args):
            pointer, before, values = _summed(builder, args, add)
            wrong = _reaching(builder, values, ir.Constant(_I32, INF))
            finite = builder.icmp_unsigned("==", wrong, ir.Constant(_I64, 0))
            if add:
                words = ir.VectorType(_I32, LANES)
                bits = [builder.bitcast(each, words) for each in (values, before)]
                changed = builder.icmp_unsigned("!=", *bits)
                some = builder.icmp_unsigned("!=", builder.bitcast(changed, _I64), ir.Constant(_I64, 0))
                with builder.if_then(builder.and_(finite, some)):
                    builder.store(values, pointer, align=4)
            found = _reaching(builder, values, args[2])
            return context.make_tuple(builder, signature.return_type, [found, finite])

        returned = types.Tuple((types.uint64, types.boolean))
        return returned(types.int64, types.int64, types.int32), codegen

    return look


def _below_zero(typingctx, address):
    """A byte whose bit ``i`` says whether float32 ``i`` of the 8 at an address is below 0."""
    del typingctx, address

    def codegen(context, builder, signature, args):
        del context, signature
        values = builder.load(builder.inttoptr(args[0], _EIGHT_F32.as_pointer()), align=4)
        below = builder.fcmp_ordered("<", values, ir.Constant(_EIGHT_F32, None))
        return builder.bitcast(below, _I8)

    return types.uint8(types.int64), codegen


def _put_chosen(remainder: bool) -> Any:
    """An intrinsic that chooses for each bit of a byte one of two float32, for 1 and for 0, and stores
    these 8 at an address; or, as ``remainder``, subtracts them from what is there."""

    def put(typingctx, address, byte, one, zero):
        del typingctx, address, byte, one, zero

        def codegen(context, builder, signature, args):
            del signature
            pointer = builder.inttoptr(args[0], _EIGHT_F32.as_pointer())
            bits = builder.bitcast(args[1], ir.VectorType(_I1, 8))
            choices = [_spread(builder, choice, _EIGHT_F32) for choice in args[2:]]
            chosen = builder.select(bits, *choices)
            if remainder:
                chosen = builder.fsub(builder.load(pointer, align=4), chosen)
            builder.store(chosen, pointer, align=4)
            return context.get_dummy_value()

        return types.void(types.int64, types.uint8, types.float32, types.float32), codegen

    return put


def _butterflies_within(typingctx, address):
    """Butterflies of the distances 1, 2, 4 and 8 of the 16 float32 at an address, in this order."""
    del typingctx, address

    def codegen(context, builder, signature, args):
        del signature
        pointer = builder.inttoptr(args[0], _SIXTEEN_F32.as_pointer())
        values = builder.load(pointer, align=4)
        for distance in (1, 2, 4, 8):
            places = [lane ^ distance for lane in range(ROTATED)]
            signs = [-1.0 if lane & distance else 1.0 for lane in range(ROTATED)]
            order = ir.Constant(ir.VectorType(_I32, ROTATED), places)
            partners = builder.shuffle_vector(values, values, order)
            # the upper of two gets partner - value
            signed = builder.fmul(values, ir.Constant(_SIXTEEN_F32, signs))
            values = builder.fadd(partners, signed)
        builder.store(values, pointer, align=4)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _butterflies_across(typingctx, address, step):
    """Butterflies between the 16 float32 at ``address`` and those 1, 2 and 3 steps (bytes) further.

    First those of a distance of one step, then those of two.
    """
    del typingctx, address, step

    def codegen(context, builder, signature, args):
        del signature
        places = [args[0]]
        for _ in range(3):
            places.append(builder.add(places[-1], args[1]))
        pointers = [builder.inttoptr(place, _SIXTEEN_F32.as_pointer()) for place in places]
        a, b, c, d = (builder.load(pointer, align=4) for pointer in pointers)
        a, b, c, d = builder.fadd(a, b), builder.fsub(a, b), builder.fadd(c, d), builder.fsub(c, d)
        results = builder.fadd(a, c), builder.fadd(b, d), builder.fsub(a, c), builder.fsub(b, d)
        for result, pointer in zip(results, pointers, strict=True):
            builder.store(result, pointer, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _stream(typingctx, source, target):
    """Copy 8 float32 to a multiple of 32 bytes, past the cache; a fence must follow."""
    del typingctx, source, target

    def codegen(context, builder, signature, args):
        del signature
        here, there = (builder.inttoptr(each, _EIGHT_F32.as_pointer()) for each in args)
        store = builder.store(builder.load(here, align=4), there, align=32)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(_I32, 1)]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _fence(typingctx):
    """All that was stored before is seen by all before what is stored after."""
    del typingctx

    def codegen(context, builder, signature, args):
        del signature, args
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


def _prefetch(typingctx, address):
    """Start loading the cache line at ``address``; any address will do, nothing is ever raised."""
    del typingctx, address

    def codegen(context, builder, signature, args):
        del signature
        byte_pointer = ir.IntType(8).as_pointer()
        function = builder.module.declare_intrinsic(
            "llvm.prefetch",
            (byte_pointer,),
            ir.FunctionType(ir.VoidType(), [byte_pointer, _I32, _I32, _I32]),
        )
        read, keep, data = 0, 3, 1
        flags = [ir.Constant(_I32, flag) for flag in (read, keep, data)]
        builder.call(function, [builder.inttoptr(args[0], byte_pointer), *flags])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


# Annotated because what Numba's decorator returns is called with one argument less than it declares.
trailing_zeros: Any = intrinsic(_trailing_zeros)
whole_log2: Any = intrinsic(_whole_log2)
survey: Any = intrinsic(_observe_all(add=False))
"""Which of 64 float32 have magnitudes whose bits are at least a number, and their energy."""
add_and_survey: Any = intrinsic(_observe_all(add=True))
"""The same of 64 float32 to which others are added first."""
check: Any = intrinsic(_check_all(add=False))
"""Which of 64 float32 have magnitudes whose bits are at least a number, and whether all are finite."""
add_and_check: Any = intrinsic(_check_all(add=True))
"""The same of 64 float32 to which others are added first."""
in_bin: Any = intrinsic(_in_bin)
"""Which of 64 float32 have magnitudes whose upper 16 bits are those of a number."""
in_near_sample: Any = intrinsic(_in_groups(SAMPLE * NEAR, SAMPLE))
"""Which of 64 indices are in the sample of a layer of less than LARGE elements."""
in_far_sample: Any = intrinsic(_in_groups(SAMPLE * FAR, SAMPLE))
"""The same of a larger one."""
prefetch: Any = intrinsic(_prefetch)
butterflies_within: Any = intrinsic(_butterflies_within)
butterflies_across: Any = intrinsic(_butterflies_across)
stream: Any = intrinsic(_stream)
fence: Any = intrinsic(_fence)
below_zero: Any = intrinsic(_below_zero)
"""Which of 8 float32 are below 0, as a byte."""
put_chosen: Any = intrinsic(_put_chosen(remainder=False))
"""Store 8 float32, chosen from two by the bits of a byte."""
subtract_chosen: Any = intrinsic(_put_chosen(remainder=True))
"""Subtract 8 float32, chosen from two by the bits of a byte."""
