"""The walks as vector code, in LLVM's words, compiled by numba for the processor that it runs on.

A walk reads two streams and writes one; so does a step of momentum. Three things keep it near what the memory gives:

* The rest is written with non-temporal stores, which do not first fetch the line that they overwrite. So a third buffer
  costs no more traffic than adding in place.
* Both inputs are fetched 4 KiB ahead. The processor's own look-ahead ends at a page.
* What is picked is written without a branch: AVX-512 stores the chosen lanes of 16 side by side in one instruction
  (``compressed``). Where that is missing or slow (it is microcoded on some), a branch for the few vectors that have a
  lane over the threshold takes out one after the other (``branching``). Lines are
  copied behind a branch, which is taken for one in a hundred: a copy that is overwritten costs a store all the same.

Comparisons are true for NaN, so that NaN is picked, and found among the picked. All arithmetic is IEEE's, in the order
of `_kernels.arrays`: the results are the same to the last bit.

Only whole lines of 16 come here; numpy does what is left over.

Price: the compiler takes a second or two, once a machine: the builds are cached where numba caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import extending

from shade.gradient._kernels import arrays
from shade.gradient._kernels.arrays import LINE, OVERFLOW, TILE, Places
from shade.gradient._kernels.writer import FLOAT, FLOATS, INT, INTS, NOTHING, WORD, Writer
from shade.types import Floats

_BIT, _MASK = ir.IntType(1), ir.IntType(LINE)
_ZEROS = ir.Constant(FLOATS, [0.0] * LINE)
_INT64, _ADDRESS, _FLOAT32 = numba.types.int64, numba.types.uintp, numba.types.float32
_TILE_ARGUMENTS = (_ADDRESS, _ADDRESS, _ADDRESS, _INT64, _INT64)
_ELEMENT_WALK = _INT64(*_TILE_ARGUMENTS, _FLOAT32, _ADDRESS, _ADDRESS, _INT64)
_LINE_WALK = _INT64(*_TILE_ARGUMENTS, _FLOAT32, _FLOAT32, _ADDRESS, _ADDRESS, _INT64)
_ELEMENTS = "int64(uintp, uintp, uintp, int64, float32, uintp, uintp, int64)"
_LINES = "int64(uintp, uintp, uintp, int64, float32, float32, uintp, uintp, int64)"
_MOMENTUM = "void(uintp, uintp, uintp, int64, float32)"
_MOMENTUM_WALK = numba.types.void(_ADDRESS, _ADDRESS, _ADDRESS, _INT64, _FLOAT32)
Take = Callable[..., Any]


def _generate_elements(take: Take) -> Callable[..., Any]:
    """The code of a walk for single elements; ``take`` writes what is picked and returns the new count."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        gradient, residual, rest, start, stop, threshold, indices, values, count = arguments
        writer = Writer(builder)
        limit = writer.all_lanes(threshold)

        def body(position: Any, count: Any) -> Any:
            total = writer.load_sum(gradient, residual, position)
            picked = builder.fcmp_unordered(">=", writer.call("llvm.fabs.v16f32", FLOATS, total), limit)
            writer.store_rest(rest, position, builder.select(picked, _ZEROS, total))
            return take(writer, total, picked, position, indices, values, count)

        return writer.loop(start, stop, count, body)

    return generate


def _take_compressed(
    writer: Writer, total: Any, picked: Any, position: Any, indices: Any, values: Any, count: Any
) -> Any:
    """All picked lanes at once, side by side."""
    builder = writer.builder
    places = builder.add(writer.all_lanes(builder.trunc(position, INT)), ir.Constant(INTS, list(range(LINE))))
    store = "llvm.masked.compressstore.v16"
    writer.call(f"{store}f32", NOTHING, total, writer.at(values, count, FLOAT), picked)
    writer.call(f"{store}i32", NOTHING, places, writer.at(indices, count, INT), picked)
    num_picked = writer.call("llvm.ctpop.i16", _MASK, builder.bitcast(picked, _MASK))
    return builder.add(count, builder.zext(num_picked, WORD))


def _take_branching(
    writer: Writer, total: Any, picked: Any, position: Any, indices: Any, values: Any, count: Any
) -> Any:
    """One picked lane after the other, from the lowest; usually there is none."""
    builder, before = writer.builder, writer.builder.block
    mask, first = builder.bitcast(picked, _MASK), builder.trunc(position, INT)
    lane_block, after = builder.append_basic_block("lane"), builder.append_basic_block("taken")
    builder.cbranch(builder.icmp_unsigned("!=", mask, _MASK(0)), lane_block, after)
    builder.position_at_end(lane_block)
    left, taken = builder.phi(_MASK), builder.phi(WORD)
    lane = builder.zext(writer.call("llvm.cttz.i16", _MASK, left, _BIT(1)), INT)
    builder.store(builder.extract_element(total, lane), writer.at(values, taken, FLOAT))
    builder.store(builder.add(first, lane), writer.at(indices, taken, INT))
    still_left, now_taken = builder.and_(left, builder.sub(left, _MASK(1))), builder.add(taken, WORD(1))
    for phi, entering, following in ((left, mask, still_left), (taken, count, now_taken)):
        phi.add_incoming(entering, before)
        phi.add_incoming(following, lane_block)
    builder.cbranch(builder.icmp_unsigned("!=", still_left, _MASK(0)), lane_block, after)
    builder.position_at_end(after)
    new_count = builder.phi(WORD)
    new_count.add_incoming(count, before)
    new_count.add_incoming(now_taken, lane_block)
    return new_count


def _generate_lines(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """The code of a walk for lines."""
    gradient, residual, rest, start, stop, scale, threshold, lines, values, count = arguments
    writer = Writer(builder)
    scales = writer.all_lanes(scale)

    def body(position: Any, count: Any) -> Any:
        total = writer.load_sum(gradient, residual, position)
        is_picked = builder.fcmp_unordered(">=", writer.energy(builder.fmul(total, scales)), threshold)
        writer.store_rest(rest, position, builder.select(is_picked, _ZEROS, total))
        before, taking, after = builder.block, *map(builder.append_basic_block, ("take", "taken"))
        builder.cbranch(is_picked, taking, after)
        builder.position_at_end(taking)
        builder.store(total, writer.at(values, count, FLOATS, 4 * LINE), align=4)
        line = builder.trunc(builder.lshr(position, WORD(4)), INT)
        builder.store(line, writer.at(lines, count, INT))
        one_more = builder.add(count, WORD(1))
        builder.branch(after)
        builder.position_at_end(after)
        counted = builder.phi(WORD)
        counted.add_incoming(count, before)
        counted.add_incoming(one_more, taking)
        return counted

    return writer.loop(start, stop, count, body)


def _generate_momentum(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """The code of a step of momentum."""
    velocity, gradient, gained, stop, momentum = arguments
    writer = Writer(builder)
    factors = writer.all_lanes(momentum)

    def body(position: Any, count: Any) -> Any:
        kept = builder.fmul(writer.load(velocity, position), factors)
        writer.store_rest(gained, position, builder.fadd(kept, writer.load(gradient, position)))
        return count

    writer.loop(WORD(0), stop, WORD(0), body)
    builder.fence("seq_cst")
    return context.get_dummy_value()


def _intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """numba's decorator, which is typed in some versions only."""
    decorate: Any = extending.intrinsic
    decorated: Callable[..., Any] = decorate(function)
    return decorated


@_intrinsic
def walk_compressed(
    typing: Any,
    gradient: Any,
    residual: Any,
    rest: Any,
    start: Any,
    stop: Any,
    threshold: Any,
    indices: Any,
    values: Any,
    count: Any,
) -> Any:
    """Elements of a tile, for numba."""
    return _ELEMENT_WALK, _generate_elements(_take_compressed)


@_intrinsic
def walk_branching(
    typing: Any,
    gradient: Any,
    residual: Any,
    rest: Any,
    start: Any,
    stop: Any,
    threshold: Any,
    indices: Any,
    values: Any,
    count: Any,
) -> Any:
    """Elements of a tile, for numba."""
    return _ELEMENT_WALK, _generate_elements(_take_branching)


@_intrinsic
def walk_lines(
    typing: Any,
    gradient: Any,
    residual: Any,
    rest: Any,
    start: Any,
    stop: Any,
    scale: Any,
    threshold: Any,
    lines: Any,
    values: Any,
    count: Any,
) -> Any:
    """Lines of a tile, for numba."""
    return _LINE_WALK, _generate_lines


@_intrinsic
def walk_momentum(typing: Any, velocity: Any, gradient: Any, gained: Any, stop: Any, momentum: Any) -> Any:
    """A step of momentum, for numba."""
    return _MOMENTUM_WALK, _generate_momentum


@_intrinsic
def finish(typing: Any) -> Any:
    """Waits for the stores past the caches, for numba: they are in no order until told so."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return numba.types.void(), generate


def _elements_compressed(
    gradient: int, residual: int, rest: int, size: int, threshold: float, indices: int, values: int, room: int
) -> int:
    count: int = 0
    for start in range(0, size, TILE):
        stop = min(start + TILE, size)
        if count + stop - start > room:
            return OVERFLOW
        count = walk_compressed(gradient, residual, rest, start, stop, threshold, indices, values, count)
    finish()
    return count


def _elements_branching(
    gradient: int, residual: int, rest: int, size: int, threshold: float, indices: int, values: int, room: int
) -> int:
    count: int = 0
    for start in range(0, size, TILE):
        stop = min(start + TILE, size)
        if count + stop - start > room:
            return OVERFLOW
        count = walk_branching(gradient, residual, rest, start, stop, threshold, indices, values, count)
    finish()
    return count


def _lines(
    gradient: int,
    residual: int,
    rest: int,
    size: int,
    scale: float,
    threshold: float,
    lines: int,
    values: int,
    room: int,
) -> int:
    count: int = 0
    for start in range(0, size, TILE):
        stop = min(start + TILE, size)
        if count + (stop - start) // LINE > room:
            return OVERFLOW
        count = walk_lines(gradient, residual, rest, start, stop, scale, threshold, lines, values, count)
    finish()
    return count


def _momentum(velocity: int, gradient: int, gained: int, size: int, momentum: float) -> None:
    walk_momentum(velocity, gradient, gained, size, momentum)


def _compile(signature: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles, and keeps the build if there is a folder to keep it in."""
    try:
        built = numba.njit(signature, nogil=True, cache=True)(function)
    except (RuntimeError, OSError):
        built = numba.njit(signature, nogil=True)(function)
    compiled: Callable[..., Any] = built
    return compiled


def _element_picker(walk: Callable[..., int]) -> Callable[..., int]:
    """The compiled walk over whole lines, and numpy's over the rest, behind one face."""

    def pick_elements(
        gradient_D: Floats, residual_D: Floats, rest_D: Floats, threshold: float, indices: Places, values: Floats
    ) -> int:
        """See `arrays.pick_elements`."""
        whole, count = gradient_D.size // LINE * LINE, 0
        if whole:
            inputs = (gradient_D.ctypes.data, residual_D.ctypes.data, rest_D.ctypes.data, whole, threshold)
            count = walk(*inputs, indices.ctypes.data, values.ctypes.data, min(len(indices), len(values)))
        if whole == gradient_D.size or count == OVERFLOW:
            return count
        tails = gradient_D[whole:], residual_D[whole:], rest_D[whole:]
        more = arrays.pick_elements(*tails, threshold, indices[count:], values[count:])
        if more == OVERFLOW:
            return OVERFLOW
        indices[count : count + more] += np.uint32(whole)
        return count + more

    return pick_elements


def _line_picker(walk: Callable[..., int]) -> Callable[..., int]:
    """As `_element_picker`, for lines."""

    def pick_lines(
        gradient_D: Floats,
        residual_D: Floats,
        rest_D: Floats,
        scale: float,
        threshold: float,
        lines: Places,
        values: Floats,
    ) -> int:
        """See `arrays.pick_lines`."""
        whole, count = gradient_D.size // LINE * LINE, 0
        if whole:
            inputs = (gradient_D.ctypes.data, residual_D.ctypes.data, rest_D.ctypes.data, whole, scale, threshold)
            count = walk(*inputs, lines.ctypes.data, values.ctypes.data, min(len(lines), len(values) // LINE))
        if whole == gradient_D.size or count == OVERFLOW:
            return count
        tails = gradient_D[whole:], residual_D[whole:], rest_D[whole:]
        more = arrays.pick_lines(*tails, scale, threshold, lines[count:], values[count * LINE :])
        if more == OVERFLOW:
            return OVERFLOW
        lines[count : count + more] += np.uint32(whole // LINE)
        return count + more

    return pick_lines


def _momentum_gainer(walk: Callable[..., None]) -> Callable[..., None]:
    """As `_element_picker`, for a step of momentum."""

    def gain_momentum(velocity_D: Floats, gradient_D: Floats, momentum: float, gained_D: Floats) -> None:
        """See `arrays.gain_momentum`."""
        whole = gradient_D.size // LINE * LINE
        if whole:
            walk(velocity_D.ctypes.data, gradient_D.ctypes.data, gained_D.ctypes.data, whole, momentum)
        arrays.gain_momentum(velocity_D[whole:], gradient_D[whole:], momentum, gained_D[whole:])

    return gain_momentum


def variants() -> Iterator[tuple[str, Callable[..., int], Callable[..., int], Callable[..., None]]]:
    """Name, `pick_elements`, `pick_lines` and `gain_momentum` of each way, compiled."""
    pick_lines = _line_picker(_compile(_LINES, _lines))
    gain_momentum = _momentum_gainer(_compile(_MOMENTUM, _momentum))
    for name, walk in (("compressed", _elements_compressed), ("branching", _elements_branching)):
        yield name, _element_picker(_compile(_ELEMENTS, walk)), pick_lines, gain_momentum
