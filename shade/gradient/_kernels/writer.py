"""The words that a builder of LLVM's code lacks, for walks along a bucket sixteen elements at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir

from shade.gradient._kernels.arrays import LINE

INT, WORD, FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
FLOATS, INTS = (ir.VectorType(kind, LINE) for kind in (FLOAT, INT))
NOTHING = ir.VoidType()
_AHEAD_BYTES: Final = 4096
_OCTET = ir.IntType(8)


class Writer:
    """Writes the body of a walk: words that a builder lacks."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def call(self, name: str, returned: Any, *arguments: Any) -> Any:
        """Calls one of LLVM's own functions."""
        module = self.builder.module
        kind = ir.FunctionType(returned, [argument.type for argument in arguments])
        function = module.globals.get(name) or ir.Function(module, kind, name)
        return self.builder.call(function, arguments)

    def at(self, address: Any, offset: Any, kind: Any, width_bytes: int = 4) -> Any:
        """A pointer to the ``offset``-th of things of a width."""
        moved = self.builder.add(address, self.builder.mul(offset, WORD(width_bytes)))
        return self.builder.inttoptr(moved, kind.as_pointer())

    def all_lanes(self, value: Any) -> Any:
        """A vector with the value in each lane."""
        kind = ir.VectorType(value.type, LINE)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, INT(0))
        return self.builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), ir.Constant(INTS, [0] * LINE))

    def load(self, address: Any, position: Any) -> Any:
        """Sixteen elements, and a word to the memory about what will be needed soon."""
        pointer = self.at(address, position, FLOATS)
        ahead = self.builder.inttoptr(
            self.builder.add(self.builder.ptrtoint(pointer, WORD), WORD(_AHEAD_BYTES)), _OCTET.as_pointer()
        )
        self.call("llvm.prefetch", NOTHING, ahead, INT(0), INT(3), INT(1))
        return self.builder.load(pointer, align=4)

    def load_sum(self, gradient: Any, residual: Any, position: Any) -> Any:
        """Sixteen sums."""
        return self.builder.fadd(self.load(gradient, position), self.load(residual, position))

    def store_rest(self, rest: Any, position: Any, value: Any) -> None:
        """Sixteen elements past the caches."""
        stored = self.builder.store(value, self.at(rest, position, FLOATS), align=4 * LINE)
        stored.set_metadata("nontemporal", self.builder.module.add_metadata([INT(1)]))

    def energy(self, vector: Any) -> Any:
        """The sum of squares, in halves."""
        total, width = self.builder.fmul(vector, vector), LINE // 2
        while width:
            nothing = ir.Constant(total.type, ir.Undefined)
            lower, upper = (
                self.builder.shuffle_vector(
                    total, nothing, ir.Constant(ir.VectorType(INT, width), list(range(start, start + width)))
                )
                for start in (0, width)
            )
            total, width = self.builder.fadd(lower, upper), width // 2
        return self.builder.extract_element(total, INT(0))

    def loop(self, start: Any, stop: Any, count: Any, body: Callable[[Any, Any], Any]) -> Any:
        """Calls ``body(position, count) -> count`` to write what happens every sixteen elements; at least once."""
        builder, before = self.builder, self.builder.block
        inside, after = builder.append_basic_block("line"), builder.append_basic_block("end")
        builder.branch(inside)
        builder.position_at_end(inside)
        position, counted = builder.phi(WORD), builder.phi(WORD)
        position.add_incoming(start, before)
        counted.add_incoming(count, before)
        new_count = body(position, counted)
        following = builder.add(position, WORD(LINE))
        position.add_incoming(following, builder.block)
        counted.add_incoming(new_count, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, stop), inside, after)
        builder.position_at_end(after)
        return new_count
