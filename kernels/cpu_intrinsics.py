"""What numba lacks and the compiled kernels need: pointers, vectors, half precision, atomics, calls by address.

Each is a few instructions of LLVM's language, put where it is called. They check nothing.
"""

from __future__ import annotations

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, overload, register_model

_features = llvmlite.binding.get_host_cpu_features()
LANES = 16 if _features.get("avx512f") else 8 if _features.get("avx2") else 4  # float32 in a vector register


@intrinsic
def pointer(typing, address, dtype):
    """`(dtype*) address`."""
    signature = types.CPointer(dtype.instance_type)(types.int64, dtype)

    def emit(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, emit


@intrinsic
def address(typing, pointer):
    """`(int64) pointer`."""

    def emit(context, builder, signature, arguments):
        return builder.ptrtoint(arguments[0], ir.IntType(64))

    return types.int64(pointer), emit


@intrinsic
def offset(typing, pointer, count):
    """`pointer + count`."""
    signature = pointer(pointer, types.int64)

    def emit(context, builder, signature, arguments):
        element = context.get_data_type(signature.return_type.dtype)
        return builder.gep(arguments[0], [arguments[1]], source_etype=element)

    return signature, emit


@intrinsic
def copy(typing, destination, source, count):
    """`memcpy` between two addresses."""

    def emit(context, builder, signature, arguments):
        byte = ir.IntType(8).as_pointer()
        target, origin = (builder.inttoptr(x, byte) for x in arguments[:2])
        cgutils.raw_memcpy(builder, target, origin, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


@intrinsic
def add_atomically(typing, pointer, amount):
    """Add to an int64 that threads share; returns what was there before."""

    def emit(context, builder, signature, arguments):
        return builder.atomic_rmw("add", arguments[0], arguments[1], "seq_cst")

    return types.int64(types.CPointer(types.int64), types.int64), emit


@intrinsic
def bits_to_float(typing, bits):
    """The float32 that has the given int32 for its bits."""

    def emit(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), emit


@intrinsic
def float_to_bits(typing, value):
    def emit(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), emit


@intrinsic
def half_to_float(typing, bits):
    def emit(context, builder, signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.int16), emit


@intrinsic
def float_to_half(typing, value):
    def emit(context, builder, signature, arguments):
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.int16(types.float32), emit


class _Vector(types.Type):
    """`LANES` float32 in one register."""

    def __init__(self) -> None:
        super().__init__(name="Vector")


_vector = _Vector()


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager, kind) -> None:
        super().__init__(manager, kind, ir.VectorType(ir.FloatType(), LANES))


@intrinsic
def load(typing, pointer):
    """The `LANES` elements at a pointer, widened."""

    def emit(context, builder, signature, arguments):
        element = pointer.dtype
        raw = {"float32": ir.FloatType(), "uint16": ir.IntType(16), "int16": ir.HalfType()}[element.name]
        origin = builder.bitcast(arguments[0], ir.VectorType(raw, LANES).as_pointer())
        loaded = builder.load(origin, align=element.bitwidth // 8, typ=ir.VectorType(raw, LANES))
        if element == types.uint16:
            words = ir.VectorType(ir.IntType(32), LANES)
            shifted = builder.shl(builder.zext(loaded, words), ir.Constant(words, [16] * LANES))
            return builder.bitcast(shifted, ir.VectorType(ir.FloatType(), LANES))
        if element == types.int16:
            return builder.fpext(loaded, ir.VectorType(ir.FloatType(), LANES))
        return loaded

    return _vector(pointer), emit


@intrinsic
def store(typing, pointer, vector):
    def emit(context, builder, signature, arguments):
        kind = ir.VectorType(ir.FloatType(), LANES)
        builder.store(arguments[1], builder.bitcast(arguments[0], kind.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(pointer, vector), emit


@intrinsic
def fill(typing, value):
    """A vector with one value in all lanes."""

    def emit(context, builder, signature, arguments):
        kind = ir.VectorType(ir.FloatType(), LANES)
        first = builder.insert_element(ir.Constant(kind, ir.Undefined), arguments[0], ir.Constant(ir.IntType(32), 0))
        lanes = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
        return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), lanes)

    return _vector(types.float32), emit


@intrinsic
def fma(typing, a, b, c):
    """`a * b + c`, lane by lane."""

    def emit(context, builder, signature, arguments):
        product = builder.fmul(arguments[0], arguments[1], flags=["contract"])
        return builder.fadd(product, arguments[2], flags=["contract"])

    return _vector(_vector, _vector, _vector), emit


def _emit_larger(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@intrinsic
def larger(typing, a, b):
    """The larger of two values, lane by lane."""

    def emit(context, builder, signature, arguments):
        return _emit_larger(builder, *arguments)

    return _vector(_vector, _vector), emit


@intrinsic
def largest_lane(typing, vector):
    """The largest of the lanes."""

    def emit(context, builder, signature, arguments):
        result, n = arguments[0], LANES
        while n > 1:
            n //= 2
            halves = (
                builder.shuffle_vector(result, result, ir.Constant(ir.VectorType(ir.IntType(32), n), list(lanes)))
                for lanes in (range(n), range(n, 2 * n))
            )
            result = _emit_larger(builder, *halves)
        return builder.extract_element(result, ir.Constant(ir.IntType(32), 0))

    return types.float32(_vector), emit


@intrinsic
def store_sums(typing, pointer, a, b, c, d):
    """Store the four sums over the lanes of four vectors; pairwise adds share the shuffles that a sum alone needs."""

    def emit(context, builder, signature, arguments):
        def pick(x, y, lanes):
            return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes))

        def fold(x, y, low, high):
            return builder.fadd(pick(x, y, low), pick(x, y, high))

        n = LANES
        # within each 4 lanes: [x0 y0 x1 y1] + [x2 y2 x3 y3]
        low = [i for q in range(0, n, 4) for i in (q, n + q, q + 1, n + q + 1)]
        high = [i for q in range(0, n, 4) for i in (q + 2, n + q + 2, q + 3, n + q + 3)]
        ab, cd = fold(arguments[1], arguments[2], low, high), fold(arguments[3], arguments[4], low, high)
        low = [i for q in range(0, n, 4) for i in (q, q + 1, n + q, n + q + 1)]
        high = [i for q in range(0, n, 4) for i in (q + 2, q + 3, n + q + 2, n + q + 3)]
        total = fold(ab, cd, low, high)
        while n > 4:
            n //= 2
            total = fold(total, total, list(range(n)), list(range(n, 2 * n)))
        kind = ir.VectorType(ir.FloatType(), 4)
        builder.store(total, builder.bitcast(arguments[0], kind.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(pointer, _vector, _vector, _vector, _vector), emit


@intrinsic
def call(typing, function, data):
    """Call the C function `void function(void *data)` at an address."""

    def emit(context, builder, signature, arguments):
        pointer = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [builder.inttoptr(arguments[1], pointer)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def call_fork(typing, fork, function, data, threads):
    """Call `fork(function, data, threads, 0)`, see `_find_fork`."""

    def emit(context, builder, signature, arguments):
        pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, pointer, number, number])
        fork, function, data, threads = arguments
        builder.call(
            builder.inttoptr(fork, kind.as_pointer()),
            [
                builder.inttoptr(function, pointer),
                builder.inttoptr(data, pointer),
                builder.trunc(threads, number),
                ir.Constant(number, 0),
            ],
        )
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), emit


def converts_half() -> bool:
    if not any(arch in llvmlite.binding.get_default_triple() for arch in ("x86_64", "i686")):
        return True
    return bool(_features.get("f16c"))


# Elements: in compiled code float32 is itself, bfloat16 has the type uint16 and float16 the type int16 --------------


def widen(element):
    raise NotImplementedError


def narrow(value, like):
    raise NotImplementedError


def typed(address, element):
    raise NotImplementedError


@overload(widen, inline="always")
def _widen_overload(element):
    if element == types.float32:
        return lambda element: element
    if element == types.int16:
        return lambda element: half_to_float(element)
    return lambda element: bits_to_float(np.int32(np.uint32(element) << np.uint32(16)))


@overload(narrow)
def _narrow_overload(value, like):
    if like == types.float32:
        return lambda value, like: value
    if like == types.int16:
        return lambda value, like: float_to_half(value)

    def round_to_even(value, like):
        if value != value:
            return np.uint16(0x7FC0)
        bits = np.uint32(float_to_bits(value))
        return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))

    return round_to_even


@overload(typed, inline="always")
def _typed_overload(address, element):
    dtype = element
    return lambda address, element: pointer(address, dtype)
