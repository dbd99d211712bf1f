"""Shared memory in huge pages, which no setting of the system has to allow: a snapshot on its way costs half as much.

A buffer of small pages makes everything dearer that goes through it. The disk is given its 4 KiB pieces one by one (six
times the processor time of a write that bypasses the page cache), and copying and hashing wait for the processor's page
tables. File systems in memory give huge pages only where they were mounted so, which is nowhere the default. But
``MADV_COLLAPSE`` (Linux 6.1) puts small pages together on demand, whatever the settings say. It wants a mapping that is
aligned as the file is, so one is laid over an address that is. Where the system cannot do it, pages stay small.

Price: it is one more copy, once, behind the back of the first saves. Measured: decision 0008.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable
from typing import Final

import torch

HUGE_BYTES: Final = 2 * 2**20
"""A huge page of x86-64 and of most others; where they are larger, pages stay small."""
_POPULATE_WRITE: Final = 23
"""``MADV_POPULATE_WRITE``, Linux 5.14; Python has no name for it yet."""
_COLLAPSE: Final = 25
"""``MADV_COLLAPSE``, Linux 6.1; nor for that."""
_PIECE_BYTES: Final = 16 * HUGE_BYTES
"""At a time: a tenth of a second where the system has to clear space first."""
_MAP_FIXED: Final = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
"""Without the interpreter's lock: touching 1 GiB takes a second, and training goes on meanwhile."""
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p


def map_aligned(descriptor: int, num_bytes: int) -> torch.Tensor:
    """Maps a file, shared, where its pages can become huge ones.

    Args:
        descriptor: Of the file.
        num_bytes: Its length, a multiple of `HUGE_BYTES`.

    Returns:
        uint8 (num_bytes,); the mapping lives as long as the tensor and its views.

    Raises:
        OSError: It cannot be mapped.
    """
    # Longer by a huge page, to have an aligned address in it; and it takes what is laid over it away when it goes.
    reserved = mmap.mmap(-1, num_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(reserved, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_BYTES
    address = whole.data_ptr() + start
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(address, num_bytes, access, flags, descriptor, 0) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return whole[start : start + num_bytes]


def make_resident(memory: torch.Tensor) -> None:
    """Touches every page, so that a copy meets no page fault; huge ones where the system gives them by itself.

    Args:
        memory: uint8 (n,), on the CPU; its content stays.
    """
    _libc.madvise(memory.data_ptr(), memory.nbytes, mmap.MADV_HUGEPAGE)
    if _libc.madvise(memory.data_ptr(), memory.nbytes, _POPULATE_WRITE) != 0:
        memory[:: mmap.PAGESIZE].add_(0)


def make_huge(memory: torch.Tensor, goes_on: Callable[[], bool] = lambda: True) -> bool:
    """Puts small pages together, while whoever uses the memory goes on doing so.

    Args:
        memory: Of `map_aligned`; its content stays.
        goes_on: Asked before each piece: whether it is still worth the trouble.

    Returns:
        True: there is nothing left to do. False: a page that is just being written to a disk stays as it is, so that
        another try may find more.
    """
    is_done = True
    for start in range(0, memory.nbytes, _PIECE_BYTES):
        length = min(_PIECE_BYTES, memory.nbytes - start)
        if not goes_on():
            return True
        if _libc.madvise(memory.data_ptr() + start, length, _COLLAPSE) != 0:
            why = ctypes.get_errno()
            if why == errno.EINVAL:
                return True  # no such word here, or no huge pages
            is_done = is_done and why != errno.EAGAIN
    return is_done
