"""Eight float32 lanes as a value in compiled code, and loads that decode stored formats into them.

Loops over floats whose result is a sum cannot be vectorised without changing the order of the sum, so the order is
written down here: a dot product keeps eight partial sums, one a lane, and adds them as a fixed tree at the end. The
same bits come out on every machine; LLVM maps the lanes to whatever vector unit there is.

Decoding is bit placing: the few bits of a code are put where a half float keeps its exponent and mantissa, and the
conversion half -> float32 (one instruction for eight values, exact for subnormals too) does the rest:

| format | bits placed                      | value of the half   |
|--------|----------------------------------|---------------------|
| E2M1   | eem -> exponent and mantissa msb | value * 2^-14       |
| E4M3   | eeeemmm, one place to the left   | value * 2^-8        |

The powers of two are folded into a scale by the caller. E4M3's NaN comes out as 480, so whoever reads a checkpoint has
to refuse it.

Addresses are plain integers (`address_of`, or an array's own); nothing here checks bounds, launchers do.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

E2M1_UNIT = 2.0**14  # undoes the placing
E4M3_UNIT = 2.0**8

_F32, _HALF, _I8, _I16, _I32, _I64 = ir.FloatType(), ir.HalfType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64))
_LANES = ir.VectorType(_F32, 8)


class Lanes(types.Type):
    """Eight float32 values; lives in registers, never in an array."""

    def __init__(self):
        super().__init__(name="Float32x8")


lanes = Lanes()
_four_lanes = types.UniTuple(lanes, 4)


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager, type_):
        super().__init__(manager, type_, _LANES)


def _constant(element, value, count: int):
    return ir.Constant(ir.VectorType(element, count), [value] * count)


def _load(builder, address, element, count: int):
    """`count` neighbouring elements at an address that need not be aligned."""
    shape = ir.VectorType(element, count)
    loaded = builder.load(builder.inttoptr(address, ir.PointerType(shape)))
    loaded.align = 1
    return loaded


def _pick(builder, vector, places: list[int]):
    mask = ir.Constant(ir.VectorType(_I32, len(places)), places)
    return builder.shuffle_vector(vector, vector, mask)


def _place(builder, words, magnitude: int, left: int, sign: int, sign_left: int):
    """Move the bits under `magnitude` and `sign` of 16-bit words to where a half float has them."""
    count = words.type.count

    def shifted(mask, by):
        kept = builder.and_(words, _constant(_I16, mask, count))
        move = builder.shl if by >= 0 else builder.lshr
        return move(kept, _constant(_I16, abs(by), count)) if by else kept

    bits = builder.or_(shifted(magnitude, left), shifted(sign, sign_left))
    return builder.bitcast(bits, ir.VectorType(_HALF, count))


def _widen(builder, halves):
    return builder.fpext(halves, ir.VectorType(_F32, halves.type.count))


def _bytes_as_words(builder, address, count: int):
    return builder.zext(_load(builder, address, _I8, count), ir.VectorType(_I16, count))


@intrinsic
def address_of(typing, array):
    """Where an array's first element lies."""

    def build(context, builder, signature, args):
        data = context.make_array(array)(context, builder, args[0]).data
        return builder.ptrtoint(data, _I64)

    return types.int64(array), build


def array_address(array) -> int:
    """The same outside compiled code."""
    return array.__array_interface__["data"][0]


@intrinsic
def zeros(typing):
    """Eight zeros."""
    return lanes(), lambda context, builder, signature, args: _constant(_F32, 0.0, 8)


@intrinsic
def splat(typing, value):
    """The same float32 in all lanes."""

    def build(context, builder, signature, args):
        first = builder.insert_element(ir.Constant(_LANES, ir.Undefined), args[0], ir.Constant(_I32, 0))
        return _pick(builder, first, [0] * 8)

    return lanes(types.float32), build


@intrinsic
def add(typing, a, b):
    """a + b, lane by lane."""
    return lanes(lanes, lanes), lambda context, builder, signature, args: builder.fadd(*args)


@intrinsic
def mul(typing, a, b):
    """a * b, lane by lane."""
    return lanes(lanes, lanes), lambda context, builder, signature, args: builder.fmul(*args)


@intrinsic
def fma(typing, a, b, c):
    """a * b + c with one rounding, lane by lane."""

    def build(context, builder, signature, args):
        kind = ir.FunctionType(_LANES, [_LANES] * 3)
        return builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v8f32"), args)

    return lanes(lanes, lanes, lanes), build


@intrinsic
def total(typing, a):
    """The sum of the lanes: ((0+4)+(2+6)) + ((1+5)+(3+7))."""

    def build(context, builder, signature, args):
        left, width = args[0], 8
        while width > 1:
            width //= 2
            low = _pick(builder, left, list(range(width)))
            left = builder.fadd(low, _pick(builder, left, list(range(width, 2 * width))))
        return builder.extract_element(left, ir.Constant(_I32, 0))

    return types.float32(lanes), build


@intrinsic
def load_f32(typing, address):
    """Eight float32."""
    return lanes(types.int64), lambda context, builder, signature, args: _load(builder, args[0], _F32, 8)


@intrinsic
def store_f32(typing, address, a):
    """Write eight float32."""

    def build(context, builder, signature, args):
        builder.store(args[1], builder.inttoptr(args[0], ir.PointerType(_LANES))).align = 1
        return context.get_dummy_value()

    return types.void(types.int64, lanes), build


@intrinsic
def store_one_f32(typing, address, value):
    """Write one float32."""

    def build(context, builder, signature, args):
        builder.store(args[1], builder.inttoptr(args[0], ir.PointerType(_F32))).align = 1
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), build


@intrinsic
def store_pairs(typing, address, even, odd):
    """Write sixteen float32: even[0], odd[0], even[1], odd[1] ..."""

    def build(context, builder, signature, args):
        address, even, odd = args
        mask = ir.Constant(ir.VectorType(_I32, 16), [place for i in range(8) for place in (i, 8 + i)])
        both = builder.shuffle_vector(even, odd, mask)
        builder.store(both, builder.inttoptr(address, ir.PointerType(both.type))).align = 1
        return context.get_dummy_value()

    return types.void(types.int64, lanes, lanes), build


@intrinsic
def prefetch(typing, address):
    """Ask for the cache line of an address that will be read soon."""

    def build(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], ir.PointerType(_I8))
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(function, [pointer, *(ir.Constant(_I32, value) for value in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(types.int64), build


@intrinsic
def count_trailing_zeros(typing, bits):
    """Place of the lowest set bit."""
    return types.uint32(types.uint32), lambda context, builder, signature, args: builder.cttz(
        args[0], ir.Constant(ir.IntType(1), 1)
    )


@intrinsic
def load_bf16(typing, address):
    """Eight BF16 values: the upper halves of float32."""

    def build(context, builder, signature, args):
        wide = builder.zext(_load(builder, args[0], _I16, 8), ir.VectorType(_I32, 8))
        return builder.bitcast(builder.shl(wide, _constant(_I32, 16, 8)), _LANES)

    return lanes(types.int64), build


@intrinsic
def load_f16(typing, address):
    """Eight half floats."""
    return lanes(types.int64), lambda context, builder, signature, args: _widen(
        builder, _load(builder, args[0], _HALF, 8)
    )


@intrinsic
def load_e4m3(typing, address):
    """Eight E4M3 bytes, as value * 2^-8."""

    def build(context, builder, signature, args):
        return _widen(builder, _place(builder, _bytes_as_words(builder, args[0], 8), 0x7F, 7, 0x80, 8))

    return lanes(types.int64), build


@intrinsic
def load_e4m3_pairs(typing, address):
    """Sixteen E4M3 bytes, as value * 2^-8: (those at even places, those at odd places)."""
    pair = types.UniTuple(lanes, 2)

    def build(context, builder, signature, args):
        words = _load(builder, args[0], _I16, 8)  # the even place is the low byte
        even = _widen(builder, _place(builder, words, 0x7F, 7, 0x80, 8))
        odd = _widen(builder, _place(builder, words, 0x7F00, -1, 0x8000, 0))
        return context.make_tuple(builder, pair, [even, odd])

    return pair(types.int64), build


@intrinsic
def load_e2m1(typing, address):
    """Eight bytes of E2M1 codes, as value * 2^-14: (low nibbles, high nibbles)."""
    pair = types.UniTuple(lanes, 2)

    def build(context, builder, signature, args):
        words = _bytes_as_words(builder, args[0], 8)
        low = _widen(builder, _place(builder, words, 0x07, 9, 0x08, 12))
        high = _widen(builder, _place(builder, words, 0x70, 5, 0x80, 8))
        return context.make_tuple(builder, pair, [low, high])

    return pair(types.int64), build


@intrinsic
def load_e2m1_twice(typing, address):
    """Sixteen bytes of E2M1 codes, as value * 2^-14: (low, high of the first eight bytes, low, high of the others)."""

    def build(context, builder, signature, args):
        words = _bytes_as_words(builder, args[0], 16)
        low = _place(builder, words, 0x07, 9, 0x08, 12)
        high = _place(builder, words, 0x70, 5, 0x80, 8)
        halves = [
            _widen(builder, _pick(builder, nibbles, list(range(first, first + 8))))
            for first in (0, 8)
            for nibbles in (low, high)
        ]
        return context.make_tuple(builder, _four_lanes, halves)

    return _four_lanes(types.int64), build


def _scalar_load(element, result, convert=None):
    """An intrinsic that reads one element at an address, converted."""

    def typed(typing, address):
        def build(context, builder, signature, args):
            value = builder.load(builder.inttoptr(args[0], ir.PointerType(element)), align=1)
            return convert(builder, value) if convert else value

        return result(types.int64), build

    return intrinsic(typed)


load_byte = _scalar_load(_I8, types.uint8)
load_word64 = _scalar_load(_I64, types.uint64)
load_one_f32 = _scalar_load(_F32, types.float32)
load_one_f16 = _scalar_load(_HALF, types.float32, lambda builder, value: builder.fpext(value, _F32))
load_one_bf16 = _scalar_load(
    _I16,
    types.float32,
    lambda builder, value: builder.bitcast(builder.shl(builder.zext(value, _I32), ir.Constant(_I32, 16)), _F32),
)


def _widen_one_e4m3(builder, value):
    word = builder.insert_element(_constant(_I16, 0, 1), builder.zext(value, _I16), ir.Constant(_I32, 0))
    half = _place(builder, word, 0x7F, 7, 0x80, 8)
    return builder.extract_element(_widen(builder, half), ir.Constant(_I32, 0))


load_one_e4m3 = _scalar_load(_I8, types.float32, _widen_one_e4m3)
