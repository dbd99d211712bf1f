"""Loops over memory that several threads share: one copies ranges, one compares ranges with their copies.

A state is hundreds of tensors. Copied or compared one by one from Python, each costs a return to the interpreter, and
each return waits while another thread computes in it: 5 ms, where the copy itself takes 0.2 ms. A helper with a fixed
share of the tensors is waited for, even where it has no core. So all ranges go into one table, and one compiled call
without the interpreter's lock goes through it; a second thread may join with the same call. Each takes the next row
until none is left, so a thread without a core does little and delays the others by one row at most.

Rows are copied past the caches: an ordinary store first fetches the line that it overwrites, so a copy moves every byte
three times. The C library avoids that only for copies larger than the cache, so the loop has 64-byte non-temporal
stores of its own. No probe decides whether to use them: a probe on a busy machine errs, and did for a whole run.
`prepare` compiles both loops with numba, in some seconds of a background thread. Before that, and where there is no
compiler, the C library does the work, row by row. Decisions 0008 and 0047 have the measurements. Invariant: when all
threads have returned, each row was done once.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from typing_extensions import override

LEAST_BYTES: Final = 2**18
"""Shorter copies use the C library: caches help them."""
STRIDE_BYTES: Final = 2**15
"""Distance of the words that are compared in long ranges; shorter ranges are compared in full."""
PIECE_BYTES: Final = 64 * STRIDE_BYTES
"""Longest range that a thread copies at a time, in 0.2 ms."""
END_BYTES: Final = 64
"""Length of what is compared at both ends of a long range."""
_WORD_BYTES: Final = 8
_LINE: Final = 64
_PAGE: Final = 2**12
_BLOCK: Final = 4 * _PAGE
"""Pages whose lines are copied in turn, as the C library does: a processor fetches ahead within a page only."""

logger = logging.getLogger("shade.checkpoint")
_Loop = Callable[..., None]
"""Goes through a table of rows; takes the address of the number of rows taken; the second, that of its findings."""
_lock = threading.Lock()
_loops: tuple[_Loop, _Loop] | None = None
"""The compiled loops: copy, compare."""
_is_prepared = False
_libc = ctypes.PyDLL(None)
"""Calls keep the interpreter's lock: to get it back can take longer than to compare a few bytes."""
_libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class _SharedLoop(ABC):
    """Rows of numbers that threads work through together.

    Args:
        row_N3: Two addresses and a length in bytes each.
    """

    def __init__(self, row_N3: npt.NDArray[np.uintp]) -> None:
        self._row_N3 = np.ascontiguousarray(row_N3)
        self._num_taken = np.zeros(1, dtype=np.int64)
        self._compiled = _loops
        self._left = enumerate([] if self._compiled is not None else self._row_N3.tolist())
        """For the library: what no thread has taken."""

    def run(self, helper: Executor | None = None) -> None:
        """Returns when all rows are done. A helper joins, unless it begins too late."""
        helped = None if helper is None else helper.submit(self._take_all)
        try:
            self._take_all()
        finally:
            if helped is not None and not helped.cancel():
                helped.result()

    @abstractmethod
    def _take_all(self) -> None:
        """Works through rows until all are taken."""


class SharedCopy(_SharedLoop):
    """Copies memory.

    Args:
        ranges: Target address, source address and length in bytes of each, or as an array (N, 3); they do not overlap.
    """

    def __init__(self, ranges: Sequence[tuple[int, int, int]] | npt.NDArray[np.uintp]) -> None:
        _, piece_P3 = cut(np.array(ranges, dtype=np.uintp).reshape(-1, 3), PIECE_BYTES)
        super().__init__(piece_P3)

    @override
    def _take_all(self) -> None:
        if self._compiled is not None:
            self._compiled[0](self._row_N3, self._num_taken.ctypes.data)
            return
        for _, row in self._left:
            ctypes.memmove(*row)


class SharedComparison(_SharedLoop):
    """Compares memory ranges with their copies: short ones in full, long ones at both ends and in a word every
    `STRIDE_BYTES`.

    Args:
        row_N3: Two addresses and a length in bytes each.
    """

    def __init__(self, row_N3: npt.NDArray[np.uintp]) -> None:
        super().__init__(row_N3)
        self._differs_N = np.zeros(len(row_N3), dtype=np.uint8)

    @property
    def differing(self) -> list[int]:
        """Numbers of the ranges in which a difference was found."""
        return [int(number) for number in np.flatnonzero(self._differs_N)]

    @override
    def _take_all(self) -> None:
        if self._compiled is not None:
            self._compiled[1](self._row_N3, self._num_taken.ctypes.data, self._differs_N.ctypes.data)
            return
        for number, row in self._left:
            self._differs_N[number] = _differs(*row)


def cut(row_N3: npt.NDArray[np.uintp], piece_bytes: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uintp]]:
    """Cuts rows of two addresses and a length into pieces; returns the number of each piece's row, and the pieces."""
    count_N = -(-row_N3[:, 2].astype(np.int64) // piece_bytes)
    number_P = np.repeat(np.arange(len(row_N3)), count_N)
    place_P = np.arange(len(number_P)) - np.repeat(np.cumsum(count_N) - count_N, count_N)
    offset_P = (place_P * piece_bytes).astype(np.uintp)
    first_P, second_P, length_P = row_N3[number_P].T
    width_P = np.minimum(length_P - offset_P, np.uintp(piece_bytes))
    return number_P, np.stack([first_P + offset_P, second_P + offset_P, width_P], axis=1)


def _differs(first: int, second: int, num_bytes: int) -> bool:
    """Whether two ranges differ, in the places that are compared."""
    if num_bytes <= STRIDE_BYTES:
        return bool(_libc.memcmp(first, second, num_bytes))
    last = num_bytes - END_BYTES
    if any(_libc.memcmp(first + place, second + place, END_BYTES) for place in (0, last)):
        return True
    num_words, step = num_bytes // _WORD_BYTES, STRIDE_BYTES // _WORD_BYTES
    arrays = [np.ctypeslib.as_array((ctypes.c_uint64 * num_words).from_address(each)) for each in (first, second)]
    return not np.array_equal(arrays[0][::step], arrays[1][::step])


def copy_bytes(target: int, source: int, num_bytes: int) -> None:
    """Copies memory from one address to another; the two ranges must not overlap."""
    if num_bytes < LEAST_BYTES:
        ctypes.memmove(target, source, num_bytes)
    else:
        SharedCopy([(target, source, num_bytes)]).run()


def prepare() -> None:
    """Compiles the loops; once a process, in a background thread."""
    global _loops, _is_prepared
    with _lock:
        if _is_prepared:
            return
        _is_prepared = True
        try:
            _loops = _compile()
        except Exception as error:  # noqa: BLE001 - whatever a compiler may raise: the C library can do it
            logger.info("snapshots are copied by the C library: %s", error)


def _compile() -> tuple[_Loop, _Loop]:
    """Returns the loops that copy and that compare."""
    import numba
    from llvmlite import ir
    from numba.core import cgutils
    from numba.extending import intrinsic

    word, line = ir.IntType(64), ir.VectorType(ir.IntType(64), 8)
    address = numba.types.uintp

    @intrinsic
    def take(typing_context: Any, counter: Any) -> Any:
        """Adds 1 to a counter that threads share, and returns what it was."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.atomic_rmw("add", builder.inttoptr(arguments[0], word.as_pointer()), word(1), "monotonic")

        return address(address), generate

    @intrinsic
    def word_at(typing_context: Any, place: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.load(builder.inttoptr(arguments[0], word.as_pointer()), align=1)

        return numba.types.uint64(address), generate

    @intrinsic
    def byte_at(typing_context: Any, place: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.load(builder.inttoptr(arguments[0], cgutils.voidptr_t))

        return numba.types.uint8(address), generate

    @intrinsic
    def mark(typing_context: Any, place: Any) -> Any:
        """Sets the byte at an address to 1."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            builder.store(ir.IntType(8)(1), builder.inttoptr(arguments[0], cgutils.voidptr_t))
            return context.get_dummy_value()

        return numba.types.void(address), generate

    @intrinsic
    def move(typing_context: Any, target: Any, source: Any, num_bytes: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            to, of, length = arguments
            to, of = (builder.inttoptr(each, cgutils.voidptr_t) for each in (to, of))
            cgutils.raw_memcpy(builder, to, of, length, 1)  # type: ignore[no-untyped-call]
            return context.get_dummy_value()

        return numba.types.void(address, address, address), generate

    @intrinsic
    def stream_blocks(typing_context: Any, target: Any, source: Any, num_bytes: Any) -> Any:
        """Copies a multiple of a block to a target aligned to a line: a line of each page, then the next."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            to, of, length = arguments
            entry = builder.block
            block, lines = builder.append_basic_block("block"), builder.append_basic_block("lines")
            end, done = builder.append_basic_block("end"), builder.append_basic_block("done")
            builder.cbranch(builder.icmp_unsigned("==", length, word(0)), done, block)
            builder.position_at_end(block)
            position = builder.phi(word)
            position.add_incoming(word(0), entry)
            builder.branch(lines)
            builder.position_at_end(lines)
            offset = builder.phi(word)
            offset.add_incoming(word(0), block)
            for page in range(0, _BLOCK, _PAGE):
                here = builder.add(builder.add(position, offset), word(page))
                value = builder.load(builder.inttoptr(builder.add(of, here), line.as_pointer()), align=1)
                stored = builder.store(value, builder.inttoptr(builder.add(to, here), line.as_pointer()), align=_LINE)
                stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
            next_line = builder.add(offset, word(_LINE))
            offset.add_incoming(next_line, lines)
            builder.cbranch(builder.icmp_unsigned("<", next_line, word(_PAGE)), lines, end)
            builder.position_at_end(end)
            after = builder.add(position, word(_BLOCK))
            position.add_incoming(after, end)
            builder.cbranch(builder.icmp_unsigned("<", after, length), block, done)
            builder.position_at_end(done)
            builder.fence("seq_cst")  # streaming stores are unordered without a fence
            return context.get_dummy_value()

        return numba.types.void(address, address, address), generate

    @numba.njit("void(uintp[:, ::1], uintp)", nogil=True)
    def copy(row_N3: Any, num_taken: Any) -> None:
        number: Any = take(num_taken)  # type: ignore[call-arg]
        while number < len(row_N3):
            target, source, num_bytes = row_N3[number]
            head, body = num_bytes, address(0)
            if num_bytes >= LEAST_BYTES:
                head = (_LINE - target % _LINE) % _LINE
                body = (num_bytes - head) // _BLOCK * _BLOCK
            # The ends first: this thread may be interrupted, and a writer that the copy had overtaken could overtake it
            # in turn. So no bytes are copied after the body that could be newer than the body.
            move(target, source, head)
            move(target + head + body, source + head + body, num_bytes - head - body)
            stream_blocks(target + head, source + head, body)
            number = take(num_taken)

    @numba.njit("boolean(uintp, uintp, uintp)", nogil=True)
    def differ(first: Any, second: Any, num_bytes: Any) -> bool:
        whole = num_bytes // _WORD_BYTES * _WORD_BYTES
        for place in range(0, whole, _WORD_BYTES):
            if word_at(first + address(place)) != word_at(second + address(place)):  # type: ignore[call-arg]
                return True
        for place in range(whole, num_bytes):
            if byte_at(first + address(place)) != byte_at(second + address(place)):  # type: ignore[call-arg]
                return True
        return False

    @numba.njit("void(uintp[:, ::1], uintp, uintp)", nogil=True)
    def compare(row_N3: Any, num_taken: Any, differs: Any) -> None:
        number: Any = take(num_taken)  # type: ignore[call-arg]
        while number < len(row_N3):
            first, second, num_bytes = row_N3[number]
            if num_bytes <= STRIDE_BYTES:
                is_different = differ(first, second, num_bytes)
            else:
                last = num_bytes - address(END_BYTES)
                is_different = differ(first, second, END_BYTES) or differ(first + last, second + last, END_BYTES)
                for place in range(0, num_bytes - _WORD_BYTES + 1, STRIDE_BYTES):
                    is_different |= word_at(first + address(place)) != word_at(second + address(place))
            if is_different:
                mark(differs + number)
            number = take(num_taken)

    return copy, compare
