"""Copies memory past the caches: what goes into a snapshot buffer is not read again soon, and should push nothing out.

An ordinary store first fetches the line that it overwrites, so a copy moves every byte three times. The C library
avoids that with streaming stores, but only for single copies larger than the cache; a state is hundreds of tensors of a
few megabytes. So the loop is our own, in LLVM's words, compiled by numba in a background thread: non-temporal stores of
64 bytes, on whatever processor has them. A short probe compares it with the C library's, and the faster one is used;
until then, and where numba is missing or cannot compile, that is the C library's. Either lets go of the interpreter.

Price: two seconds of one core, once a process. Measured: decision 0008.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any, Final

_LINE: Final = 64
_BLOCK: Final = 4 * _LINE
"""Bytes a turn of the loop."""
LEAST_BYTES: Final = 2**18
"""Below, caches help and a call costs more than it saves: what is shorter is in them when it has been copied."""
_PROBE_BYTES: Final = 8 * 2**20
_PROBE_ROUNDS: Final = 5

logger = logging.getLogger("shade.checkpoint")
_lock = threading.Lock()
_stream: Callable[[int, int, int], None] | None = None
_is_prepared = False


def copy_bytes(target: int, source: int, num_bytes: int) -> None:
    """Copies memory; the two do not overlap.

    The ends first: between two calls this thread may have to wait for the interpreter, and a writer that had been
    overtaken would go by. So nothing follows the body that could be newer than it.

    Args:
        target: Address.
        source: Address.
        num_bytes: How many.
    """
    stream = _stream
    if stream is None or num_bytes < LEAST_BYTES:
        ctypes.memmove(target, source, num_bytes)
        return
    head = -target % _LINE
    body = (num_bytes - head) // _BLOCK * _BLOCK
    ctypes.memmove(target, source, head)
    ctypes.memmove(target + head + body, source + head + body, num_bytes - head - body)
    stream(target + head, source + head, body)


def prepare() -> None:
    """Compiles the loop and decides whether to use it; once a process, in a thread that has time."""
    global _stream, _is_prepared
    with _lock:
        if _is_prepared:
            return
        _is_prepared = True
        try:
            stream = _compile()
        except Exception as error:  # noqa: BLE001 - whatever a compiler may raise: there is another way
            logger.info("snapshots are copied by the C library: %s", error)
            return
        _stream = stream if _is_faster(stream) else None


def _is_faster(stream: Callable[[int, int, int], None]) -> bool:
    """Whether it beats the C library on a tensor's worth of bytes, in the median."""
    maps = [mmap.mmap(-1, _PROBE_BYTES) for _ in range(2)]
    target, source = ((ctypes.c_char * _PROBE_BYTES).from_buffer(each) for each in maps)
    addresses = ctypes.addressof(target), ctypes.addressof(source)
    ways: tuple[Callable[..., Any], ...] = (stream, ctypes.memmove)
    took: tuple[list[float], ...] = ([], [])
    for _ in range(_PROBE_ROUNDS):
        for copy, seconds in zip(ways, took, strict=True):
            begun = time.perf_counter()
            copy(*addresses, _PROBE_BYTES)
            seconds.append(time.perf_counter() - begun)
    ours, theirs = map(statistics.median, took)
    return ours < theirs


def _compile() -> Callable[[int, int, int], None]:
    """The loop: target (aligned to a line), source, bytes (a multiple of the block)."""
    import numba
    from llvmlite import ir
    from numba.extending import intrinsic

    @intrinsic
    def stream_blocks(typing_context: Any, target: Any, source: Any, num_bytes: Any) -> Any:
        signature = numba.types.void(numba.types.uintp, numba.types.uintp, numba.types.uintp)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            to, of, length = arguments
            word, line = ir.IntType(64), ir.VectorType(ir.IntType(64), 8)
            entry = builder.block
            loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
            builder.cbranch(builder.icmp_unsigned("==", length, word(0)), done, loop)
            builder.position_at_end(loop)
            position = builder.phi(word)
            position.add_incoming(word(0), entry)
            for offset in range(0, _BLOCK, _LINE):
                here = builder.add(position, word(offset))
                value = builder.load(builder.inttoptr(builder.add(of, here), line.as_pointer()), align=1)
                stored = builder.store(value, builder.inttoptr(builder.add(to, here), line.as_pointer()), align=_LINE)
                stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))
            after = builder.add(position, word(_BLOCK))
            position.add_incoming(after, loop)
            builder.cbranch(builder.icmp_unsigned("<", after, length), loop, done)
            builder.position_at_end(done)
            builder.fence("seq_cst")  # streaming stores are in no order until told so
            return context.get_dummy_value()

        return signature, generate

    @numba.njit("void(uintp, uintp, uintp)", nogil=True)
    def stream(target: int, source: int, num_bytes: int) -> None:
        stream_blocks(target, source, num_bytes)  # type: ignore[call-arg]

    compiled: Callable[[int, int, int], None] = stream
    return compiled
