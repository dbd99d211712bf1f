"""The few operations on 16 elements that numba cannot express, written as LLVM IR.

Everything else in this folder is plain numba. These are here because plain numba was measured and is too slow
(decision 0015 has the tables):

* Stores past the caches (`stream_line`, `add_line`, `move_line`) and requests for a line ahead of its use (`fetch`):
  numba has neither.
* The lowest bit of a mask (`trailing_zeros`): one instruction, which numba has no function for.
* The energy of a line with a fixed order of additions (`add_line`): LLVM leaves a tree of additions scalar.
* The optimizers' arithmetic on one line: LLVM turns a plain loop over 16 elements of three arrays into vector code only
  behind a check at run time that the arrays do not overlap, and that check costs more than the line does.

All arithmetic is IEEE's, in the order that the numpy versions in `tests/support/kernel_oracle.py` write down, so the
results are the same to the last bit on every processor. Arrays are numba's. Offsets are in elements and multiples
of 16, unless a function says otherwise.

An intrinsic is a function that numba calls twice: for its types, where it gets types, and for its code, where it gets
LLVM's values. The first argument of each is numba's typing context, which a caller does not pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from shade._lazy import load_numba
from shade.gradient._kernels.lines import LINE

numba = load_numba()
intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = numba.extending.intrinsic

_BYTE, _INT = ir.IntType(8), ir.IntType(32)
_FLOATS = ir.VectorType(ir.FloatType(), LINE)
_UNDEFINED = ir.Constant(_FLOATS, ir.Undefined)
_ZEROS = ir.Constant(_FLOATS, [0.0] * LINE)
_OFFSET, _SCALAR = numba.types.uint64, numba.types.float32


class _LineBuilder:
    """Writes IR for whole lines of 16 elements, on top of llvmlite's builder.

    Args:
        context: numba's target context.
        builder: llvmlite's builder, at the place to write to.
        signature: The intrinsic's types.
        arguments: The values of its arguments.
    """

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self._context, self._signature = context, signature
        self.builder, self.arguments = builder, arguments

    def address(self, array: int, offset: int) -> Any:
        """Returns where a line begins; takes the positions of the array and of its offset among the arguments."""
        make = self._context.make_array(self._signature.args[array])
        data = make(self._context, self.builder, self.arguments[array]).data
        return self.builder.bitcast(self.builder.gep(data, [self.arguments[offset]]), _FLOATS.as_pointer())

    def load(self, address: Any) -> Any:
        """Reads a line."""
        # A gradient may begin anywhere, and a wrong promise is a crash.
        return self.builder.load(address, align=4)

    def store(self, value: Any, address: Any) -> None:
        """Writes a line to wherever it begins."""
        self.builder.store(value, address, align=4)

    def stream(self, value: Any, address: Any) -> None:
        """Writes a line past the caches; the line must begin at a multiple of 64 bytes (`aligned_zeros`)."""
        # Without the alignment LLVM ignores the metadata and writes a plain store.
        stored = self.builder.store(value, address, align=4 * LINE)
        stored.set_metadata("nontemporal", self.builder.module.add_metadata([_INT(1)]))

    def spread(self, scalar: Any) -> Any:
        """Returns a line with the value in every lane."""
        first = self.builder.insert_element(_UNDEFINED, scalar, _INT(0))
        return self.builder.shuffle_vector(first, _UNDEFINED, ir.Constant(ir.VectorType(_INT, LINE), [0] * LINE))

    def scalars(self, first: int) -> list[Any]:
        """Returns all arguments from a position on, each spread over a line."""
        return [self.spread(argument) for argument in self.arguments[first:]]

    def root(self, value: Any) -> Any:
        """Returns the square roots."""
        return self._call("llvm.sqrt", value)

    def absolute(self, value: Any) -> Any:
        """Returns the absolute values."""
        return self._call("llvm.fabs", value)

    def _call(self, name: str, value: Any) -> Any:
        # By its full name: llvmlite 0.50 does not derive the suffix of a vector type.
        kind = ir.FunctionType(_FLOATS, [_FLOATS])
        function = self.builder.module.declare_intrinsic(f"{name}.v{LINE}f32", (), kind)
        return self.builder.call(function, [value])

    def energy(self, value: Any) -> Any:
        """Returns the sum of squares."""
        # Halves are added, not neighbours: `loops.line_energy` rounds in that order.
        total, width = self.builder.fmul(value, value), LINE // 2
        while width:
            rest = ir.Constant(total.type, ir.Undefined)
            lanes = ir.VectorType(_INT, width)
            lower, upper = (
                self.builder.shuffle_vector(total, rest, ir.Constant(lanes, list(range(start, start + width))))
                for start in (0, width)
            )
            total, width = self.builder.fadd(lower, upper), width // 2
        return self.builder.extract_element(total, _INT(0))

    def nothing(self) -> Any:
        """Returns what an intrinsic without a result returns."""
        return self._context.get_dummy_value()


def _declare(write: Callable[[_LineBuilder], Any], kinds: Sequence[Any], num_scalars: int, returned: Any) -> Any:
    """Returns an intrinsic's signature and code: arguments of some kinds, then scalars."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return write(_LineBuilder(context, builder, signature, arguments))

    return returned(*kinds, *[_SCALAR] * num_scalars), generate


@intrinsic
def stream_line(typing: Any, source: Any, first: Any, target: Any, offset: Any) -> Any:
    """Copies the 16 elements from ``source[first]`` on to ``target[offset]``, past the caches."""

    def write(lines: _LineBuilder) -> Any:
        lines.stream(lines.load(lines.address(0, 1)), lines.address(2, 3))
        return lines.nothing()

    return _declare(write, (source, _OFFSET, target, _OFFSET), 0, numba.types.void)


@intrinsic
def add_line(typing: Any, gradient: Any, residual: Any, rest: Any, offset: Any, scale: Any) -> Any:
    """Writes ``gradient + residual`` of a line to ``rest``, past the caches; returns the scaled sum's energy."""

    def write(lines: _LineBuilder) -> Any:
        total = lines.builder.fadd(lines.load(lines.address(0, 3)), lines.load(lines.address(1, 3)))
        lines.stream(total, lines.address(2, 3))
        (scale,) = lines.scalars(4)
        return lines.energy(lines.builder.fmul(total, scale))

    return _declare(write, (gradient, residual, rest, _OFFSET), 1, _SCALAR)


@intrinsic
def move_line(typing: Any, gradient: Any, residual: Any, rest: Any, offset: Any, limit: Any) -> Any:
    """Writes ``gradient + residual`` of a line to ``rest``, past the caches, with 0 where it is picked.

    An element is picked unless its magnitude is below the limit. Returns the picked ones as a mask, the first as the
    lowest bit.
    """

    def write(lines: _LineBuilder) -> Any:
        builder = lines.builder
        total = builder.fadd(lines.load(lines.address(0, 3)), lines.load(lines.address(1, 3)))
        (limit,) = lines.scalars(4)
        is_picked = builder.fcmp_unordered(">=", lines.absolute(total), limit)
        lines.stream(builder.select(is_picked, _ZEROS, total), lines.address(2, 3))
        return builder.zext(builder.bitcast(is_picked, ir.IntType(LINE)), ir.IntType(64))

    return _declare(write, (gradient, residual, rest, _OFFSET), 1, _OFFSET)


@intrinsic
def wait_for_streams(typing: Any) -> Any:
    """Waits for the stores past the caches."""

    def write(lines: _LineBuilder) -> Any:
        # Stores past the caches reach other threads in no order until such a fence.
        lines.builder.fence("seq_cst")
        return lines.nothing()

    return _declare(write, (), 0, numba.types.void)


@intrinsic
def fetch(typing: Any, array: Any, offset: Any) -> Any:
    """Requests the cache line of ``array[offset]``, any offset, which will be written to soon."""

    def write(lines: _LineBuilder) -> Any:
        place = lines.builder.bitcast(lines.address(0, 1), _BYTE.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [place.type, _INT, _INT, _INT])
        function = lines.builder.module.declare_intrinsic("llvm.prefetch", (place.type,), kind)
        # To write, into all caches, data.
        lines.builder.call(function, [place, _INT(1), _INT(3), _INT(1)])
        return lines.nothing()

    return _declare(write, (array, _OFFSET), 0, numba.types.void)


@intrinsic
def trailing_zeros(typing: Any, mask: Any) -> Any:
    """Returns the position of the lowest bit that is set; the mask must not be 0."""

    def write(lines: _LineBuilder) -> Any:
        return lines.builder.cttz(lines.arguments[0], ir.Constant(ir.IntType(1), 1))

    return _declare(write, (numba.types.uint64,), 0, numba.types.uint64)


@intrinsic
def advance_linear(typing: Any, x: Any, b: Any, offset: Any, xx: Any, xb: Any, bx: Any, bb: Any) -> Any:
    """Sets ``x += xx·x + xb·b`` and ``b = bx·x + bb·b`` of a line, both from the old x."""

    def write(lines: _LineBuilder) -> Any:
        add, times = lines.builder.fadd, lines.builder.fmul
        at_x, at_b = lines.address(0, 2), lines.address(1, 2)
        old_x, old_b = lines.load(at_x), lines.load(at_b)
        xx, xb, bx, bb = lines.scalars(3)
        lines.store(add(old_x, add(times(xx, old_x), times(xb, old_b))), at_x)
        lines.store(add(times(bx, old_x), times(bb, old_b)), at_b)
        return lines.nothing()

    return _declare(write, (x, b, _OFFSET), 4, numba.types.void)


@intrinsic
def add_linear(typing: Any, x: Any, b: Any, offset: Any, values: Any, first: Any, gain_x: Any, gain_b: Any) -> Any:
    """Sets ``x -= gain_x·values`` and ``b += gain_b·values`` of a line, with the 16 values from ``first`` on."""

    def write(lines: _LineBuilder) -> Any:
        at_x, at_b, added = lines.address(0, 2), lines.address(1, 2), lines.load(lines.address(3, 4))
        old_x, old_b = lines.load(at_x), lines.load(at_b)
        gain_x, gain_b = lines.scalars(5)
        lines.store(lines.builder.fsub(old_x, lines.builder.fmul(gain_x, added)), at_x)
        lines.store(lines.builder.fadd(old_b, lines.builder.fmul(gain_b, added)), at_b)
        return lines.nothing()

    return _declare(write, (x, b, _OFFSET, values, _OFFSET), 2, numba.types.void)


@intrinsic
def advance_adam(
    typing: Any, x: Any, m: Any, v: Any, offset: Any, keep_m: Any, keep_v: Any, decay: Any, size: Any, floor: Any
) -> Any:
    """Sets ``x += decay·x - size·m / (√v + floor)``, ``m *= keep_m`` and ``v *= keep_v``, x from the old m and v."""

    def write(lines: _LineBuilder) -> Any:
        add, less, times = lines.builder.fadd, lines.builder.fsub, lines.builder.fmul
        at_x, at_m, at_v = (lines.address(number, 3) for number in range(3))
        old_x, old_m, old_v = lines.load(at_x), lines.load(at_m), lines.load(at_v)
        keep_m, keep_v, decay, size, floor = lines.scalars(4)
        moved = lines.builder.fdiv(times(size, old_m), add(lines.root(old_v), floor))
        lines.store(add(old_x, less(times(decay, old_x), moved)), at_x)
        lines.store(times(keep_m, old_m), at_m)
        lines.store(times(keep_v, old_v), at_v)
        return lines.nothing()

    return _declare(write, (x, m, v, _OFFSET), 5, numba.types.void)


@intrinsic
def is_any_small(typing: Any, m: Any, v: Any, offset: Any, least: Any) -> Any:
    """Returns whether a lane of the line has ``m ≠ 0`` and not ``v ≥ least``."""

    def write(lines: _LineBuilder) -> Any:
        m, v = lines.load(lines.address(0, 2)), lines.load(lines.address(1, 2))
        (least,) = lines.scalars(3)
        builder = lines.builder
        small = builder.and_(builder.fcmp_unordered("!=", m, _ZEROS), builder.fcmp_unordered("<", v, least))
        return builder.icmp_unsigned("!=", builder.bitcast(small, ir.IntType(LINE)), ir.Constant(ir.IntType(LINE), 0))

    return _declare(write, (m, v, _OFFSET), 1, numba.types.boolean)


@intrinsic
def step_adam(
    typing: Any,
    x: Any,
    m: Any,
    v: Any,
    offset: Any,
    g: Any,
    first: Any,
    b1: Any,
    a1: Any,
    b2: Any,
    a2: Any,
    decay: Any,
    lr: Any,
    scale: Any,
    eps: Any,
    coupled: Any,
) -> Any:
    """Takes one step of Adam on a line; the gradient is the 16 elements of ``g`` from ``first`` on, any offset."""

    def write(lines: _LineBuilder) -> Any:
        add, less, times = lines.builder.fadd, lines.builder.fsub, lines.builder.fmul
        at_x, at_m, at_v = (lines.address(number, 3) for number in range(3))
        old_x, old_m, old_v = lines.load(at_x), lines.load(at_m), lines.load(at_v)
        b1, a1, b2, a2, decay, lr, scale, eps, coupled = lines.scalars(6)
        g = add(lines.load(lines.address(4, 5)), times(coupled, old_x))
        m = add(times(b1, old_m), times(a1, g))
        v = add(times(b2, old_v), times(a2, times(g, g)))
        moved = lines.builder.fdiv(times(lr, m), add(times(lines.root(v), scale), eps))
        lines.store(less(add(old_x, times(decay, old_x)), moved), at_x)
        lines.store(m, at_m)
        lines.store(v, at_v)
        return lines.nothing()

    return _declare(write, (x, m, v, _OFFSET, g, _OFFSET), 9, numba.types.void)
