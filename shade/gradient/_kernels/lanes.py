"""What the optimizers do to one line of 16 elements, as vector code, in LLVM's words.

A plain loop over 16 elements of three arrays is vectorised only after a check at run time that they do not overlap,
which costs more than the line. All arithmetic is IEEE's, in the order of `_optim.arrays`, so that the
results are the same to the last bit on every processor. Arrays are numba's; offsets are in elements, multiples of 16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numba
from llvmlite import ir
from numba.extending import intrinsic

LINE = 16
_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_FLOATS = ir.VectorType(_FLOAT, LINE)
_NOTHING = ir.Constant(_FLOATS, ir.Undefined)
_ZEROS = ir.Constant(_FLOATS, [0.0] * LINE)
_OFFSET, _SCALAR = numba.types.uint64, numba.types.float32


class _Lanes:
    """Writes vector code: the words that a builder lacks."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self._context, self.builder, self._signature, self.arguments = context, builder, signature, arguments

    def place(self, array: int, offset: int) -> Any:
        """Address of a line: the numbers of the arguments that hold the array and the offset."""
        view = self._context.make_array(self._signature.args[array])(self._context, self.builder, self.arguments[array])
        return self.builder.bitcast(self.builder.gep(view.data, [self.arguments[offset]]), _FLOATS.as_pointer())

    def load(self, place: Any) -> Any:
        return self.builder.load(place, align=4)

    def store(self, value: Any, place: Any) -> None:
        self.builder.store(value, place, align=4)

    def scalars(self, first: int) -> list[Any]:
        """All arguments from that number on, each in every lane."""
        mask = ir.Constant(ir.VectorType(_INT, LINE), [0] * LINE)
        single = [self.builder.insert_element(_NOTHING, each, _INT(0)) for each in self.arguments[first:]]
        return [self.builder.shuffle_vector(each, _NOTHING, mask) for each in single]

    def root(self, value: Any) -> Any:
        name, module = "llvm.sqrt.v16f32", self.builder.module
        function = module.globals.get(name) or ir.Function(module, ir.FunctionType(_FLOATS, [_FLOATS]), name)
        return self.builder.call(function, [value])

    def nothing(self) -> Any:
        return self._context.get_dummy_value()


def _declare(write: Callable[[_Lanes], Any], places: Sequence[Any], num_scalars: int, returned: Any) -> Any:
    """An intrinsic's signature and body: arrays and offsets, then scalars."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return write(_Lanes(context, builder, signature, arguments))

    return returned(*places, *[_SCALAR] * num_scalars), generate


@intrinsic
def advance_linear(typing: Any, x: Any, b: Any, offset: Any, xx: Any, xb: Any, bx: Any, bb: Any) -> Any:
    """``x += xx·x + xb·b`` and ``b = bx·x + bb·b``, of the old x."""

    def write(lanes: _Lanes) -> Any:
        add, times = lanes.builder.fadd, lanes.builder.fmul
        at_x, at_b = lanes.place(0, 2), lanes.place(1, 2)
        old_x, old_b = lanes.load(at_x), lanes.load(at_b)
        xx, xb, bx, bb = lanes.scalars(3)
        lanes.store(add(old_x, add(times(xx, old_x), times(xb, old_b))), at_x)
        lanes.store(add(times(bx, old_x), times(bb, old_b)), at_b)
        return lanes.nothing()

    return _declare(write, (x, b, _OFFSET), 4, numba.types.void)


@intrinsic
def add_linear(typing: Any, x: Any, b: Any, offset: Any, values: Any, first: Any, gain_x: Any, gain_b: Any) -> Any:
    """``x -= gain_x·values`` and ``b += gain_b·values``, of the 16 values from ``first`` on."""

    def write(lanes: _Lanes) -> Any:
        at_x, at_b, given = lanes.place(0, 2), lanes.place(1, 2), lanes.load(lanes.place(3, 4))
        old_x, old_b = lanes.load(at_x), lanes.load(at_b)
        gain_x, gain_b = lanes.scalars(5)
        lanes.store(lanes.builder.fsub(old_x, lanes.builder.fmul(gain_x, given)), at_x)
        lanes.store(lanes.builder.fadd(old_b, lanes.builder.fmul(gain_b, given)), at_b)
        return lanes.nothing()

    return _declare(write, (x, b, _OFFSET, values, _OFFSET), 2, numba.types.void)


@intrinsic
def advance_adam(
    typing: Any, x: Any, m: Any, v: Any, offset: Any, keep_m: Any, keep_v: Any, decay: Any, size: Any, floor: Any
) -> Any:
    """``x += decay·x - size·m / (√v + floor)``, ``m = keep_m·m`` and ``v = keep_v·v``, of the old m and v."""

    def write(lanes: _Lanes) -> Any:
        add, less, times = lanes.builder.fadd, lanes.builder.fsub, lanes.builder.fmul
        at_x, at_m, at_v = (lanes.place(number, 3) for number in range(3))
        old_x, old_m, old_v = lanes.load(at_x), lanes.load(at_m), lanes.load(at_v)
        keep_m, keep_v, decay, size, floor = lanes.scalars(4)
        moved = lanes.builder.fdiv(times(size, old_m), add(lanes.root(old_v), floor))
        lanes.store(add(old_x, less(times(decay, old_x), moved)), at_x)
        lanes.store(times(keep_m, old_m), at_m)
        lanes.store(times(keep_v, old_v), at_v)
        return lanes.nothing()

    return _declare(write, (x, m, v, _OFFSET), 5, numba.types.void)


@intrinsic
def is_any_small(typing: Any, m: Any, v: Any, offset: Any, least: Any) -> Any:
    """Whether there is a lane with ``m ≠ 0`` and not ``v ≥ least``."""

    def write(lanes: _Lanes) -> Any:
        m, v = lanes.load(lanes.place(0, 2)), lanes.load(lanes.place(1, 2))
        (least,) = lanes.scalars(3)
        builder = lanes.builder
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
    """One whole step of a line; its gradient are the 16 elements of ``g`` from ``first`` on."""

    def write(lanes: _Lanes) -> Any:
        add, less, times = lanes.builder.fadd, lanes.builder.fsub, lanes.builder.fmul
        at_x, at_m, at_v = (lanes.place(number, 3) for number in range(3))
        old_x, old_m, old_v = lanes.load(at_x), lanes.load(at_m), lanes.load(at_v)
        b1, a1, b2, a2, decay, lr, scale, eps, coupled = lanes.scalars(6)
        g = add(lanes.load(lanes.place(4, 5)), times(coupled, old_x))
        m = add(times(b1, old_m), times(a1, g))
        v = add(times(b2, old_v), times(a2, times(g, g)))
        moved = lanes.builder.fdiv(times(lr, m), add(times(lanes.root(v), scale), eps))
        lanes.store(less(add(old_x, times(decay, old_x)), moved), at_x)
        lanes.store(m, at_m)
        lanes.store(v, at_v)
        return lanes.nothing()

    return _declare(write, (x, m, v, _OFFSET, g, _OFFSET), 9, numba.types.void)


@intrinsic
def fetch(typing: Any, array: Any, offset: Any) -> Any:
    """Asks for a line that will be written to soon."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        octets = ir.IntType(8).as_pointer()
        view = context.make_array(signature.args[0])(context, builder, arguments[0])
        kind = ir.FunctionType(ir.VoidType(), [octets, _INT, _INT, _INT])
        function = builder.module.declare_intrinsic("llvm.prefetch", (octets,), kind)
        place = builder.bitcast(builder.gep(view.data, [arguments[1]]), octets)
        builder.call(function, [place, _INT(1), _INT(3), _INT(1)])
        return context.get_dummy_value()

    return numba.types.void(array, _OFFSET), generate
