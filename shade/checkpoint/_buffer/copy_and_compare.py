"""Copies memory and detects torn reads: loops that several threads share, and a wait for writes that are under way.

*Loops.* All ranges of a state go into one table, and one compiled call without the interpreter's lock goes through it;
a second thread may join with the same call. Each takes the next row until none is left. Invariant: when all threads
have returned, each row was done once. `prepare` compiles both loops in a background thread; before that, and where
there is no compiler, the C library does the work, row by row.

*Waiting.* `wait_for_others` waits for each other thread until it has slept, since no thread sleeps in the middle of
writing memory, or has run for `REST_SECONDS`. Where the system cannot say (only Linux can), a fixed pause must do.

*Comparing.* PyTorch counts every in-place change but those through ``.data`` or a numpy view. To find these,
`Comparison` compares a word every 32 KiB and the words at which a copy or a writer may have stopped; after the first
difference in a state, every byte. Decisions 0008 and 0047 have the measurements.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
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
    piece_P = np.arange(len(number_P)) - np.repeat(np.cumsum(count_N) - count_N, count_N)
    offset_P = (piece_P * piece_bytes).astype(np.uintp)
    first_P, second_P, length_P = row_N3[number_P].T
    width_P = np.minimum(length_P - offset_P, np.uintp(piece_bytes))
    return number_P, np.stack([first_P + offset_P, second_P + offset_P, width_P], axis=1)


def _differs(first: int, second: int, num_bytes: int) -> bool:
    """Whether two ranges differ, at the sampled bytes."""
    if num_bytes <= STRIDE_BYTES:
        return bool(_libc.memcmp(first, second, num_bytes))
    last = num_bytes - END_BYTES
    if any(_libc.memcmp(first + offset, second + offset, END_BYTES) for offset in (0, last)):
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
    def word_at(typing_context: Any, offset: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.load(builder.inttoptr(arguments[0], word.as_pointer()), align=1)

        return numba.types.uint64(address), generate

    @intrinsic
    def byte_at(typing_context: Any, offset: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.load(builder.inttoptr(arguments[0], cgutils.voidptr_t))

        return numba.types.uint8(address), generate

    @intrinsic
    def mark(typing_context: Any, offset: Any) -> Any:
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
            # An ordinary store first fetches the line that it overwrites, so a copy would move every byte three times.
            # No probe decides about it: a probe on a busy machine errs, and did for a whole run.
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
        for offset in range(0, whole, _WORD_BYTES):
            if word_at(first + address(offset)) != word_at(second + address(offset)):  # type: ignore[call-arg]
                return True
        for offset in range(whole, num_bytes):
            if byte_at(first + address(offset)) != byte_at(second + address(offset)):  # type: ignore[call-arg]
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
                for offset in range(0, num_bytes - _WORD_BYTES + 1, STRIDE_BYTES):
                    is_different |= word_at(first + address(offset)) != word_at(second + address(offset))
            if is_different:
                mark(differs + number)
            number = take(num_taken)

    return copy, compare


# ── torn reads ──────────────────────────────────────────────────────────────────────────────────────────────────────

REST_SECONDS: Final = 0.0005
"""Enough CPU time to write 32 KiB at the pace of the slowest operation."""
LONGEST_SECONDS: Final = 5.0
"""Longest wait for a thread that gets no processor. A quarter of a second was seen once in a thousand saves, with four
threads to a core."""
_BURST_SECONDS: Final = 0.001
"""Longest time that a burst keeps the interpreter's lock: a thread that runs has run for `REST_SECONDS` by then."""
_GLANCE_MICROSECONDS: Final = 25
"""Sleep between two looks, in which another thread may use this processor; the system makes it three times as long."""
_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.0005, 0.004
"""First and longest pause between two bursts, for threads that wait for the interpreter's lock or this processor."""
_CLOSE_SECONDS: Final = 0.00025
"""Two moments closer than this leave a host no time to take a processor and give it back."""
_THREADS: Final = "/proc/self/task"
_STAT_BYTES: Final = 512
_MEMBARRIER: Final = {"x86_64": 324, "aarch64": 283}
"""Number of the system call, by architecture."""
_REGISTER, _PRIVATE_EXPEDITED = 1 << 4, 1 << 3
_libc.read.restype = ctypes.c_ssize_t


def wait_for_others() -> bool:
    """Returns when each other thread of this process has slept, ended, or run for `REST_SECONDS` since the call.

    Returns False after `LONGEST_SECONDS`: one thread has not, and may be in the middle of a write.
    """
    if sys.platform != "linux":
        time.sleep(REST_SECONDS)
        return True
    # A change during the copy shows when its writer continues, or ends. A thread interrupted in the middle of an
    # operation does neither, for tens of milliseconds on a busy machine.
    deadline = time.monotonic() + LONGEST_SECONDS
    seen = _SeenThreads()
    # Twice: a sleeping thread may have been woken by one that had begun to write, and was interrupted between the two,
    # as the threads of one PyTorch operation are. So the sleepers are looked at again when all others have run.
    return all(seen.wait(deadline) for _ in range(2))


class _SeenThreads:
    """How long each other thread was seen to run."""

    def __init__(self) -> None:
        self._me = threading.get_native_id()
        self._run_ns: dict[int, int] = {}
        """By thread, how long it has certainly run."""

    def wait(self, deadline: float) -> bool:
        """Waits until each thread that exists now has run for long enough, or sleeps; False if the deadline passes."""
        others = [int(name) for name in os.listdir(_THREADS) if int(name) != self._me]
        left, pause_seconds = [each for each in self._look(others) if _may_be_writing(each)], _PAUSE_SECONDS
        while left:
            self._burst(left)
            # Now, not after the pause: a thread that got the interpreter's lock in the pause would be seen releasing
            # it.
            left = [each for each in self._look(left) if _may_be_writing(each)]
            if left and time.monotonic() > deadline:
                return False
            if left:
                time.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
        return True

    def _look(self, threads: list[int]) -> list[int]:
        """Returns the threads that have not run for long enough."""
        return [each for each in threads if self._run_ns.get(each, 0) < REST_SECONDS * 1e9]

    def _burst(self, threads: list[int]) -> None:
        """Adds up how long threads run, for a moment."""
        begun_ns = looked_ns = time.monotonic_ns()
        _touch_processors()
        clocks_ns = {thread: processor_ns(thread) for thread in threads}
        while looked_ns - begun_ns < _BURST_SECONDS * 1e9 and self._look(threads):
            # By ctypes, which keeps the interpreter's lock: to get it back each time could take 5 ms.
            _libc.usleep(_GLANCE_MICROSECONDS)
            before_ns, looked_ns = looked_ns, time.monotonic_ns()
            _touch_processors()
            # A host may take a virtual processor away while the clock of the thread on it continues: three torn
            # snapshots in a thousand were committed for that. So time counts only between two close moments at which
            # all were seen to run.
            counts = time.monotonic_ns() - before_ns < _CLOSE_SECONDS * 1e9
            for thread, clock_ns in clocks_ns.items():
                clocks_ns[thread] = processor_ns(thread)
                if counts:
                    self._run_ns[thread] = self._run_ns.get(thread, 0) + clocks_ns[thread] - clock_ns


def _may_be_writing(thread: int) -> bool:
    """Whether a thread runs, wants to, or waits for a page of memory that it has touched."""
    state = _proc_file(thread, "stat").rpartition(b")")[2][1:2]
    return state == b"R" or (state == b"D" and _proc_file(thread, "syscall").startswith(b"-1"))


def processor_ns(thread: int) -> int:
    """Returns the CPU time of a thread of this process, by its native id; 0 if the thread has ended, or not on Linux.

    Linux keeps a clock for each thread, numbered as pthread_getcpuclockid(3) does it; reading it takes a microsecond.
    """
    if sys.platform != "linux":
        return 0
    try:
        return time.clock_gettime_ns(~thread << 3 | 6)
    except OSError:
        return 0


def _proc_file(thread: int, what: str) -> bytes:
    """Returns a file of a thread in /proc; nothing if the thread has ended, or the file cannot be read."""
    descriptor = _libc.open(f"{_THREADS}/{thread}/{what}".encode(), os.O_RDONLY | os.O_CLOEXEC)
    if descriptor < 0:
        return b""
    content = ctypes.create_string_buffer(_STAT_BYTES)
    length = _libc.read(descriptor, content, _STAT_BYTES)
    _libc.close(descriptor)
    return content.raw[: max(length, 0)]


def _touch_processors() -> None:
    """Returns when each processor that runs a thread of this process has executed something since the call.

    Returns at once where the system lacks the call (Linux before 4.14) or forbids it (a sandbox): clocks are then
    believed as they are.
    """
    number = _MEMBARRIER.get(platform.machine())
    if number is not None and _libc.syscall(number, _PRIVATE_EXPEDITED, 0, 0) != 0:
        _libc.syscall(number, _REGISTER, 0, 0)  # once a process; a child made by fork begins anew
        _libc.syscall(number, _PRIVATE_EXPEDITED, 0, 0)


_GRAIN: Final = 2**15
"""Least number of elements that ATen gives to a thread (at::internal::GRAIN_SIZE)."""
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Comparison:
    """How the tensors of one run are compared with their copies, save after save."""

    def __init__(self) -> None:
        self.in_full = False
        """Whether every byte is compared: a tensor has differed before."""

    def first_torn(
        self,
        copies: Mapping[str, tuple[torch.Tensor, int]],
        pauses: Mapping[str, Sequence[int]],
        helper: Executor | None = None,
    ) -> str | None:
        """Compares contiguous CPU tensors with their copies, bit for bit, at the sampled bytes.

        Args:
            copies: Tensors and the addresses of their copies, by name.
            pauses: Offsets in bytes at which the copy of a tensor was interrupted, by name.
            helper: Compares a part of them.

        Returns:
            The name of the first tensor that differs; None if all agree.
        """
        range_N3 = np.array(
            [(each.data_ptr(), copied, each.nbytes) for each, copied in copies.values()], dtype=np.uintp
        ).reshape(-1, 3)
        if self.in_full:
            number_P, range_P3 = cut(range_N3, STRIDE_BYTES)
        else:
            words = [
                (number, end)
                for number, (name, (tensor, _)) in enumerate(copies.items())
                # A copy that is overtaken in a pause is old up to there; of several writers each ends at the end of
                # its part.
                for end in (*pauses.get(name, ()), *_ends_of_parts(tensor, torch.get_num_threads()))
            ]
            number_P, range_P3 = self._with_words(range_N3, np.array(words, dtype=np.int64).reshape(-1, 2))
        compared = SharedComparison(range_P3)
        compared.run(helper)
        names = list(copies)
        torn = [names[number_P[row]] for row in compared.differing]
        # Within 32 KiB a copy can hide from the samples, if its writer writes all the time. Such a writer shows
        # elsewhere.
        self.in_full |= bool(torn)
        return min(torn, key=names.index, default=None)

    def _with_words(
        self, range_N3: npt.NDArray[np.uintp], end_W2: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uintp]]:
        """Returns the ranges, and the words before some offsets in them and before each end of a piece; with the number
        of the range that each belongs to."""
        number_P, piece_P3 = cut(range_N3, PIECE_BYTES)
        last_N = range_N3[number_P, 0] + range_N3[number_P, 2]
        is_inner_P = piece_P3[:, 0] + piece_P3[:, 2] < last_N
        piece_end_P = (piece_P3[:, 0] + piece_P3[:, 2] - range_N3[number_P, 0]).astype(np.int64)
        number_W = np.concatenate([end_W2[:, 0], number_P[is_inner_P]])
        end_W = np.concatenate([end_W2[:, 1], piece_end_P[is_inner_P]])
        begin_W = np.maximum(0, end_W - _WORD_BYTES).astype(np.uintp)
        width_W = np.minimum(end_W, _WORD_BYTES).astype(np.uintp)
        word_W3 = np.stack([range_N3[number_W, 0] + begin_W, range_N3[number_W, 1] + begin_W, width_W], axis=1)
        return np.concatenate([np.arange(len(range_N3)), number_W]), np.concatenate([range_N3, word_W3])

    def agrees_in_full(self, tensor: torch.Tensor, copied: torch.Tensor) -> bool:
        """Whether a CPU tensor of any layout equals its copy, bit for bit."""
        # Of another layout, a copy and a writer go through it in different orders, so samples would show nothing.
        same = torch.equal(_bits(tensor), _bits(copied))
        self.in_full |= not same
        return same


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a CPU tensor's bits as integers, so that NaN equals itself and -0 does not equal 0."""
    return tensor.detach().resolve_neg().view(_INTEGERS[tensor.itemsize])


def _ends_of_parts(tensor: torch.Tensor, num_threads: int) -> range:
    """Returns the offsets in bytes at which ATen divides a contiguous tensor among threads."""
    num_elements, item_bytes = tensor.numel(), tensor.itemsize
    if num_elements <= _GRAIN:
        return range(0)
    part = -(-num_elements // min(num_threads, -(-num_elements // _GRAIN)))
    return range(part * item_bytes, num_elements * item_bytes, part * item_bytes)
