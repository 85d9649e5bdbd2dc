"""Decode attention on the CPU, straight from paged KV.

One new token a request attends to its whole history. K and V are read where they lie, row by row through the request's
list of slots, and never copied first: so what decides the speed is where those rows come from. A block of positions at
a time, requests are worked on in the order of the batch; on a GPU, too, the requests of a batch move through their
histories side by side. A row that the request before has just read is still in a cache; the kernel does nothing to
bring such requests together, that is what scheduling is for.

Needs numba and numpy alone. The arithmetic is fp32 whatever the KV is stored in.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

#: Tokens whose logits are held at once: their K rows are read, then their V rows.
TILE = 64
#: Tokens of a request before the next one's turn: K and V of one head, 1 MB at 128 numbers in fp32, stay in a core's
#: private cache for the requests that share them.
BLOCK = 1024
#: Numbers in a vector.
_LANES = 16
#: Below this many multiplications of queries with keys, one thread does it all.
_SMALL = 1 << 18
#: More than there are functions here, each of which may fail to be cached.
_ATTEMPTS = 20

Array = np.ndarray[Any, Any]
#: Of each thread, at its stretch's begin and end: owner, sums, tops, weights, as in ``_left_overs``.
LeftOvers = tuple[Array, Array, Array, Array]

_FAST = ("fast",)
#: Below every logit; finite, since fast arithmetic knows no infinity.
_LOWEST = np.float32(-3e38)
_ZERO = np.float32(0)


def _compiled(function: Any) -> Any:
    """To machine code, at the first call; kept on disk if there is a place for it."""
    try:
        return njit(function, fastmath=True, error_model="numpy", cache=True)
    except RuntimeError:  # nowhere to write
        return njit(function, fastmath=True, error_model="numpy")


def decode_attention(
    query: Array,
    keys: Array,
    values: Array,
    slots: Array,
    rows: Array,
    lengths: Array,
    out: Array,
    scale: float,
    soft_cap: float = 0.0,
    threads: int = 1,
) -> None:
    """Attention of one query token a request to all its KV; fills ``out``.

    Args:
        query: ``[requests, query_heads, head_dim]``, float32.
        keys: ``[pool slots, kv_heads, head_dim]``: float32, or uint16 holding bfloat16, or int16 holding float16.
        values: ``[pool slots, kv_heads, v_head_dim]``, the same type.
        slots: ``[request rows, context]``, int32: the pool slot of each token of each request.
        rows: ``[requests]``, int64: which row of ``slots`` belongs to each request of the batch.
        lengths: ``[requests]``, int64: tokens of each request, at least 1.
        out: ``[requests, query_heads, v_head_dim]``, float32.
        scale: factor on the logits.
        soft_cap: logits become ``soft_cap * tanh(logit / soft_cap)``; 0 for none.
        threads: how many to use at most.

    All arrays are C-contiguous; ``query_heads`` is a multiple of ``kv_heads``, and consecutive query heads share a KV
    head. None of this is checked, and a slot outside the pool is undefined behaviour.

    O(sum of lengths x query_heads x head_dim) time; each K and V row is read once for each KV head and request. Memory
    besides the arrays: another ``out`` a thread, at most.
    """
    arguments = (query, keys, values, slots, rows, lengths, out, np.float32(scale), np.float32(soft_cap))
    work = int(lengths.sum()) * query.shape[1] * query.shape[2]
    if threads == 1 or work < _SMALL:
        _decode_alone(*arguments)
    else:
        _decode_together(arguments, threads)


def warm_up(kv_type: Any) -> None:
    """Compile for this type of KV (float32, uint16 or int16), or load what was compiled before.

    Takes about 10 s the first time and less than one after that: numba keeps the machine code in ``__pycache__``, or
    in the user's cache folder where that can't be written.
    """
    arguments = (
        np.ones((1, 1, 1), np.float32),
        np.zeros((1, 1, 1), kv_type),
        np.zeros((1, 1, 1), kv_type),
        np.zeros((1, 1), np.int32),
        np.zeros(1, np.int64),
        np.ones(1, np.int64),
        np.empty((1, 1, 1), np.float32),
        np.float32(1),
        np.float32(0),
    )
    for attempt in range(_ATTEMPTS):
        try:
            _decode_alone(*arguments)
            _decode_together(arguments, 1)
            return
        except OSError:
            # Code could not be written to the cache, on a full disk, say. By now it is compiled in this process.
            if attempt == _ATTEMPTS - 1:
                raise


# ------------------------------------------------------------------- numbers


def _byte_address(context: Any, builder: Any, array: Any, value: Any, index: Any) -> Any:
    """LLVM: pointer to the first element of row ``index[0], index[1], ...`` of a C-contiguous array."""
    view = context.make_array(array)(context, builder, value)
    strides = cgutils.unpack_tuple(builder, view.strides, array.ndim)
    offset = ir.Constant(ir.IntType(64), 0)
    for each, stride in zip(index, strides[: len(index)], strict=True):
        offset = builder.add(offset, builder.mul(each, stride))
    return builder.gep(builder.bitcast(view.data, ir.IntType(8).as_pointer()), [offset])


def _extents(context: Any, builder: Any, array: Any, value: Any) -> Any:
    """LLVM: the array's shape."""
    return cgutils.unpack_tuple(builder, context.make_array(array)(context, builder, value).shape, array.ndim)


def _tuple_of(indices: Any) -> Any:
    return types.UniTuple(types.intp, len(indices))


def _splat(builder: Any, scalar: Any, kind: Any) -> Any:
    """LLVM: a vector that holds the number in every lane."""
    nothing = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(nothing, scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(
        first, nothing, ir.Constant(ir.VectorType(ir.IntType(32), kind.count), [0] * kind.count)
    )


def _vector(builder: Any, array: Any, address: Any, column: Any, lanes: int) -> Any:
    """LLVM: ``lanes`` stored numbers from ``column`` on, as float32; the types are those of ``decode_attention``."""
    stored = {types.float32: ir.FloatType(), types.int16: ir.HalfType(), types.uint16: ir.IntType(16)}[array.dtype]
    wide = ir.VectorType(ir.FloatType(), lanes)
    row = builder.bitcast(address, stored.as_pointer())
    place = builder.bitcast(builder.gep(row, [column]), ir.VectorType(stored, lanes).as_pointer())
    found = builder.load(place, align=array.dtype.bitwidth // 8)
    if array.dtype == types.float32:
        return found
    if array.dtype == types.int16:
        return builder.fpext(found, wide)
    bits = ir.VectorType(ir.IntType(32), lanes)  # a bfloat16 is the upper half of a float32
    return builder.bitcast(builder.shl(builder.zext(found, bits), ir.Constant(bits, [16] * lanes)), wide)


def _in_vectors(builder: Any, length: Any, body: Callable[[Any, int], None]) -> None:
    """LLVM: ``body(column, lanes)`` over a row of ``length`` numbers, ``_LANES`` at a time, then one by one."""
    size = length.type
    lanes = ir.Constant(size, _LANES)
    whole = builder.sub(length, builder.urem(length, lanes))
    with cgutils.for_range_slice(builder, ir.Constant(size, 0), whole, lanes, size) as (column, _):
        body(column, _LANES)
    with cgutils.for_range_slice(builder, whole, length, ir.Constant(size, 1), size) as (column, _):
        body(column, 1)


@intrinsic
def _dots(_typing: Any, queries: Any, heads: Any, keys: Any, rows: Any, head: Any) -> Any:
    """``queries[g] . keys[row, head]`` for each ``g`` of the tuple ``heads`` and each of ``rows``, as one tuple."""
    result = types.UniTuple(types.float32, len(heads) * len(rows))

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        query, groups, stored, places, which = arguments
        asked = [
            _byte_address(context, builder, queries, query, [g])
            for g in cgutils.unpack_tuple(builder, groups, len(heads))
        ]
        found = [
            _byte_address(context, builder, keys, stored, [row, which])
            for row in cgutils.unpack_tuple(builder, places, len(rows))
        ]
        sums = {}
        for lanes in (_LANES, 1):
            zero = ir.Constant(ir.VectorType(ir.FloatType(), lanes), [0.0] * lanes)
            sums[lanes] = [cgutils.alloca_once_value(builder, zero) for _ in range(result.count)]

        def body(column: Any, lanes: int) -> None:
            factors = [_vector(builder, queries, address, column, lanes) for address in asked]
            others = [_vector(builder, keys, address, column, lanes) for address in found]
            for (factor, other), total in zip(itertools.product(factors, others), sums[lanes], strict=True):
                product = builder.fmul(factor, other, flags=_FAST)
                builder.store(builder.fadd(builder.load(total), product, flags=_FAST), total)

        _in_vectors(builder, _extents(context, builder, queries, query)[1], body)
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType(), ir.VectorType(ir.FloatType(), _LANES)])
        add = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{_LANES}f32")
        dots = []
        for vector, rest in zip(sums[_LANES], sums[1], strict=True):
            one = builder.extract_element(builder.load(rest), ir.Constant(ir.IntType(32), 0))
            dots.append(builder.call(add, [one, builder.load(vector)], fastmath=_FAST))
        return context.make_tuple(builder, result, dots)

    return result(queries, _tuple_of(heads), keys, _tuple_of(rows), types.intp), generate


@intrinsic
def _add_rows(_typing: Any, sums: Any, heads: Any, factors: Any, values: Any, rows: Any, head: Any) -> Any:
    """``sums[g] += factor * values[row, head]`` for each ``g`` of ``heads`` and each of ``rows``, one factor each."""
    signature = types.void(
        sums,
        _tuple_of(heads),
        types.UniTuple(types.float32, len(heads) * len(rows)),
        values,
        _tuple_of(rows),
        types.intp,
    )

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        total, groups, weights, stored, places, which = arguments
        targets = [
            _byte_address(context, builder, sums, total, [g]) for g in cgutils.unpack_tuple(builder, groups, len(heads))
        ]
        found = [
            _byte_address(context, builder, values, stored, [row, which])
            for row in cgutils.unpack_tuple(builder, places, len(rows))
        ]
        scalars = cgutils.unpack_tuple(builder, weights, len(heads) * len(rows))

        def body(column: Any, lanes: int) -> None:
            kind = ir.VectorType(ir.FloatType(), lanes)
            others = [_vector(builder, values, address, column, lanes) for address in found]
            results = []
            for number, target in enumerate(targets):
                sum_ = _vector(builder, sums, target, column, lanes)
                mine = scalars[number * len(found) : (number + 1) * len(found)]
                for scalar, other in zip(mine, others, strict=True):
                    product = builder.fmul(_splat(builder, scalar, kind), other, flags=_FAST)
                    sum_ = builder.fadd(sum_, product, flags=_FAST)
                results.append(sum_)
            for target, sum_ in zip(targets, results, strict=True):
                row = builder.bitcast(target, ir.FloatType().as_pointer())
                builder.store(sum_, builder.bitcast(builder.gep(row, [column]), kind.as_pointer()), align=4)

        _in_vectors(builder, _extents(context, builder, sums, total)[1], body)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def _pointer(_typing: Any, address: Any) -> Any:
    """An address as a pointer."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), generate


@intrinsic
def _take(_typing: Any, counters: Any) -> Any:
    """Add one to ``counters[0]``; returns what it was. Safe among threads."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        counter = context.make_array(counters)(context, builder, arguments[0]).data
        return builder.atomic_rmw("add", counter, ir.Constant(ir.IntType(64), 1), "seq_cst")

    return types.int64(counters), generate


@intrinsic
def _float_of_bits(_typing: Any, bits: Any) -> Any:
    """The float32 that has these 32 bits."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_SMALLEST_EXPONENT = np.float32(-87)
_HALF = np.float32(0.5)
_ONE = np.float32(1)
# The Cephes library's polynomial for exp on [-ln(2)/2, ln(2)/2].
_P0 = np.float32(1.9875691500e-4)
_P1 = np.float32(1.3981999507e-3)
_P2 = np.float32(8.3334519073e-3)
_P3 = np.float32(4.1665795894e-2)
_P4 = np.float32(1.6666665459e-1)
_P5 = np.float32(5.0000001201e-1)


@njit(fastmath=True, inline="always")
def _exp(x: Any) -> Any:
    """exp of a number not above 0, without a branch or a call, so that a loop over it becomes vector code."""
    x = max(x, _SMALLEST_EXPONENT)
    whole = np.floor(x * _LOG2_E + _HALF)
    x = x - whole * _LN2_HIGH - whole * _LN2_LOW
    y = ((((_P0 * x + _P1) * x + _P2) * x + _P3) * x + _P4) * x + _P5
    y = y * x * x + x + _ONE
    return y * _float_of_bits((np.int32(whole) + np.int32(127)) << np.int32(23))


# ----------------------------------------------------------- sharing the work
#
# All KV heads times all tokens of the batch make one line, a head after the other and in a head the requests in batch
# order. Each thread takes an equal stretch of it. So a thread stays with one head's slice of a prefix, which fits a
# cache more easily than all heads', and where two threads meet in the middle of a request, their parts are merged.


@_compiled
def _decode_alone(
    query: Array,
    keys: Array,
    values: Array,
    slots: Array,
    rows: Array,
    lengths: Array,
    out: Array,
    scale: float,
    soft_cap: float,
) -> None:
    """``decode_attention`` on the calling thread."""
    left = _left_overs(1, query, keys, out)
    _stretch(0, 1, query, keys, values, slots, rows, lengths, out, scale, soft_cap, left)


def _decode_together(arguments: Any, parts: int) -> None:
    """``decode_attention`` on ``parts`` threads of the process's OpenMP.

    numba's own ``prange`` brings a second pool of threads beside torch's. The threads of both spin for some
    milliseconds after each piece of work, and then keep each other from running.
    """
    openmp = _openmp()
    if openmp is None:
        _decode_alone(*arguments)
        return
    query, keys, _, _, _, _, out, scale, soft_cap = arguments
    left = _left_overs(parts, query, keys, out)
    numbers = np.array((scale, soft_cap))  # a name, since the job has addresses alone
    job = _job(*arguments[:7], numbers, left, parts)
    openmp(_thread(keys.dtype.type).address, job.ctypes.data, parts, 0)
    _merge(left, out)


@functools.cache
def _openmp() -> Any:
    """``GOMP_parallel(function, data, threads, flags)`` of the OpenMP that is loaded, torch's, or the system's."""
    for library in (None, "libgomp.so.1"):
        try:
            function = ctypes.CDLL(library).GOMP_parallel
        except (OSError, AttributeError):
            continue
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        function.restype = None
        return function
    return None


@_compiled
def _job(
    query: Array,
    keys: Array,
    values: Array,
    slots: Array,
    rows: Array,
    lengths: Array,
    out: Array,
    numbers: Array,
    left: LeftOvers,
    parts: int,
) -> Array:
    """What ``_thread`` needs, as numbers: the next part to take, how many there are, then shapes and addresses."""
    owner, sums, tops, weights = left
    return np.array(
        [
            0,
            parts,
            query.shape[0],
            query.shape[1],
            query.shape[2],
            keys.shape[0],
            keys.shape[1],
            values.shape[2],
            slots.shape[0],
            slots.shape[1],
            query.ctypes.data,
            keys.ctypes.data,
            values.ctypes.data,
            slots.ctypes.data,
            rows.ctypes.data,
            lengths.ctypes.data,
            out.ctypes.data,
            numbers.ctypes.data,
            owner.ctypes.data,
            sums.ctypes.data,
            tops.ctypes.data,
            weights.ctypes.data,
        ],
        np.int64,
    )


@functools.cache
def _thread(kv_type: Any) -> Any:
    """The C function that each thread runs on a job, for this type of KV."""

    def thread(pointer: Any) -> None:
        job = carray(pointer, (22,), np.int64)
        parts, requests, query_heads, head_dim, pool, kv_heads, v_dim, listed, context = job[1:10]
        group = query_heads // kv_heads
        query = carray(_pointer(job[10]), (requests, query_heads, head_dim), np.float32)
        keys = carray(_pointer(job[11]), (pool, kv_heads, head_dim), kv_type)
        values = carray(_pointer(job[12]), (pool, kv_heads, v_dim), kv_type)
        slots = carray(_pointer(job[13]), (listed, context), np.int32)
        rows = carray(_pointer(job[14]), (requests,), np.int64)
        lengths = carray(_pointer(job[15]), (requests,), np.int64)
        out = carray(_pointer(job[16]), (requests, query_heads, v_dim), np.float32)
        scale, soft_cap = carray(_pointer(job[17]), (2,), np.float32)
        left = (
            carray(_pointer(job[18]), (parts, 2, 2), np.int64),
            carray(_pointer(job[19]), (parts, 2, group, v_dim), np.float32),
            carray(_pointer(job[20]), (parts, 2, group), np.float32),
            carray(_pointer(job[21]), (parts, 2, group), np.float32),
        )
        while True:  # OpenMP may have fewer threads for us than we asked for
            part = _take(job)
            if part >= parts:
                return
            _stretch(part, parts, query, keys, values, slots, rows, lengths, out, scale, soft_cap, left)

    signature = types.void(types.voidptr)
    try:
        return cfunc(signature, cache=True)(thread)
    except (RuntimeError, OSError):  # nowhere to write
        return cfunc(signature)(thread)


@_compiled
def _left_overs(parts: int, query: Array, keys: Array, out: Array) -> LeftOvers:
    """Room for what a thread has of requests that it does not work on alone: at its stretch's begin and end.

    Returns ``(owner, sums, tops, weights)``: the KV head and request ``[parts, 2, 2]``, head -1 for none, and for each
    query head of the group what ``_attend`` leaves.
    """
    group = query.shape[1] // keys.shape[1]
    return (
        np.full((parts, 2, 2), -1, np.int64),
        np.empty((parts, 2, group, out.shape[2]), np.float32),
        np.empty((parts, 2, group), np.float32),
        np.empty((parts, 2, group), np.float32),
    )


@_compiled
def _stretch(
    part: int,
    parts: int,
    query: Array,
    keys: Array,
    values: Array,
    slots: Array,
    rows: Array,
    lengths: Array,
    out: Array,
    scale: float,
    soft_cap: float,
    left: LeftOvers,
) -> None:
    """Do the ``part``-th of ``parts`` equal stretches of the line."""
    owner, all_sums, all_tops, all_weights = left
    kv_heads = keys.shape[1]
    group = query.shape[1] // kv_heads
    tokens = lengths.sum()
    begin = kv_heads * tokens * part // parts
    end = kv_heads * tokens * (part + 1) // parts
    requests = lengths.shape[0]
    logits = np.empty((group, TILE), np.float32)
    sums = np.empty((requests, group, out.shape[2]), np.float32)
    tops = np.empty((requests, group), np.float32)
    weights = np.empty((requests, group), np.float32)
    starts = np.empty(requests, np.int64)
    stops = np.empty(requests, np.int64)
    for head in range(begin // max(tokens, 1), kv_heads):
        at, longest = head * tokens, 0
        for request in range(requests):
            starts[request] = max(begin - at, 0)
            stops[request] = min(end - at, lengths[request])
            at += lengths[request]
            if starts[request] < stops[request]:
                longest = max(longest, stops[request])
        sums[:] = _ZERO
        tops[:] = _LOWEST
        weights[:] = _ZERO
        mine = slice(head * group, (head + 1) * group)
        for first in range(0, longest, BLOCK):
            for request in range(requests):
                start, stop = max(starts[request], first), min(stops[request], first + BLOCK)
                if start < stop:
                    asked, listed = query[request, mine], slots[rows[request]]
                    state = sums[request], tops[request], weights[request]
                    _attend(asked, keys, values, listed, head, start, stop, scale, soft_cap, logits, *state)
        for request in range(requests):
            if starts[request] >= stops[request]:
                continue
            if starts[request] == 0 and stops[request] == lengths[request]:
                _finish(sums[request], weights[request], out[request, mine])
                continue
            side = 0 if starts[request] > 0 else 1
            owner[part, side, 0] = head
            owner[part, side, 1] = request
            all_sums[part, side] = sums[request]
            all_tops[part, side] = tops[request]
            all_weights[part, side] = weights[request]


@_compiled
def _merge(left: LeftOvers, out: Array) -> None:
    """Put together the requests that several threads worked on; their parts follow each other."""
    owner, all_sums, all_tops, all_weights = left
    group, v_dim = all_sums.shape[2:]
    head, request = np.int64(-1), np.int64(-1)
    sums = np.empty((group, v_dim), np.float32)
    tops = np.empty(group, np.float32)
    weights = np.empty(group, np.float32)
    for part in range(owner.shape[0]):
        for side in range(2):
            if owner[part, side, 0] < 0:
                continue
            if owner[part, side, 0] != head or owner[part, side, 1] != request:
                if head >= 0:
                    _finish(sums, weights, out[request, head * group : (head + 1) * group])
                head, request = owner[part, side]
                sums[:] = all_sums[part, side]
                tops[:] = all_tops[part, side]
                weights[:] = all_weights[part, side]
                continue
            for g in range(group):
                top = max(tops[g], all_tops[part, side, g])
                mine = _exp(tops[g] - top)
                other = _exp(all_tops[part, side, g] - top)
                weights[g] = weights[g] * mine + all_weights[part, side, g] * other
                for d in range(v_dim):
                    sums[g, d] = sums[g, d] * mine + all_sums[part, side, g, d] * other
                tops[g] = top
    if head >= 0:
        _finish(sums, weights, out[request, head * group : (head + 1) * group])


@_compiled
def _finish(sums: Array, weights: Array, out: Array) -> None:
    """The weighted sum becomes a mean; all ``[group, ...]``."""
    for g in range(sums.shape[0]):
        share = _ONE / weights[g]
        for d in range(sums.shape[1]):
            out[g, d] = sums[g, d] * share


# ------------------------------------------------------- one head of a request


@_compiled
def _attend(
    query: Array,
    keys: Array,
    values: Array,
    slots: Array,
    head: int,
    start: int,
    stop: int,
    scale: float,
    soft_cap: float,
    logits: Array,
    sums: Array,
    tops: Array,
    weights: Array,
) -> None:
    """One KV head, one request's tokens ``start`` to ``stop``: online softmax, a tile of tokens at a time.

    ``query`` is ``[group, head_dim]``; ``slots`` the request's list. Goes on from, and updates, the
    unnormalised sum over V in ``sums`` ``[group, v_head_dim]``, the largest logit in ``tops`` and the sum of weights in
    ``weights``, both ``[group]``.
    """
    group = query.shape[0]
    v_dim = values.shape[2]
    for first in range(start, stop, TILE):
        count = min(TILE, stop - first)
        _logits(query, keys, slots, head, first, count, stop - 1, scale, logits)
        for g in range(group):
            row = logits[g]
            if soft_cap > _ZERO:
                for t in range(count):
                    row[t] = soft_cap * np.tanh(row[t] / soft_cap)
            top = tops[g]
            for t in range(count):
                top = max(top, row[t])
            weight = _ZERO
            for t in range(count):
                row[t] = _exp(row[t] - top)
                weight += row[t]
            for t in range(count, TILE):  # the last rows of a short tile weigh nothing
                row[t] = _ZERO
            fade = _exp(tops[g] - top)
            weights[g] = weights[g] * fade + weight
            tops[g] = top
            for d in range(v_dim):
                sums[g, d] *= fade
        _add_values(logits, values, slots, head, first, count, stop - 1, sums)


@njit(inline="always")
def _four(slots: Array, at: int, last: int) -> tuple[Any, Any, Any, Any]:
    """Slots of the tokens ``at`` to ``at + 3``; past ``last`` its slot again, for rows whose result is not used."""
    return (
        np.intp(slots[at]),
        np.intp(slots[min(at + 1, last)]),
        np.intp(slots[min(at + 2, last)]),
        np.intp(slots[min(at + 3, last)]),
    )


@_compiled
def _logits(
    query: Array, keys: Array, slots: Array, head: int, first: int, count: int, last: int, scale: float, logits: Array
) -> None:
    """``logits[g, t] = scale * query[g] . keys[slot of token first + t]``."""
    group = query.shape[0]
    for t in range(0, count, 4):
        rows = _four(slots, first + t, last)
        for g in range(0, group - 1, 2):
            dots = _dots(query, (g, g + 1), keys, rows, head)
            for r in range(4):
                logits[g, t + r] = dots[r] * scale
                logits[g + 1, t + r] = dots[4 + r] * scale
        if group % 2:
            alone = _dots(query, (group - 1,), keys, rows, head)
            for r in range(4):
                logits[group - 1, t + r] = alone[r] * scale


@_compiled
def _add_values(
    logits: Array, values: Array, slots: Array, head: int, first: int, count: int, last: int, sums: Array
) -> None:
    """``sums[g] += sum over t of logits[g, t] * values[slot of token first + t]``."""
    group = sums.shape[0]
    for t in range(0, count, 4):
        rows = _four(slots, first + t, last)
        for g in range(0, group - 1, 2):
            _add_rows(sums, (g, g + 1), _weights(logits, g, t) + _weights(logits, g + 1, t), values, rows, head)
        if group % 2:
            _add_rows(sums, (group - 1,), _weights(logits, group - 1, t), values, rows, head)


@njit(inline="always")
def _weights(logits: Array, g: int, t: int) -> tuple[Any, Any, Any, Any]:
    return (logits[g, t], logits[g, t + 1], logits[g, t + 2], logits[g, t + 3])
