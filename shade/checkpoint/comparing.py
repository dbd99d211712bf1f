"""Compares tensors with their copies: in places, and in full once somebody was caught changing them uncounted.

PyTorch counts every in-place change of a tensor, but those through ``.data`` or a numpy view. Comparing all bytes would
find these too, at the price of another copy; so a few places must do, chosen where a copy that is old in one part and
new in the next can hide (what is no longer than the distance between two of them is compared in full). A writer fills a
tensor from front to back while somebody copies it:

* The copy overtakes it and stays ahead: all is old from there on. One word every 32 KiB, and both ends, show that.
* The copy overtakes it and pauses, to be overtaken in turn: what is old ends where the pause was, and so a word is
  compared before each.
* Several threads fill a part each: what is old ends where a part does, and a word is compared there, too.

What is left is a copy that was interrupted within 32 KiB of overtaking a writer. It takes one that writes uncounted,
and all the time, to meet that: so whoever was found out once, anywhere in a state, is not trusted again.

Measured: decision 0008.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

_PLACES: Final = 4
_PLACE_BYTES: Final = 64
"""Compared in each tensor, its ends included."""
_SMALL_BYTES: Final = 2**18
"""Of a tensor below this the two ends are compared."""
_STRIDE_BYTES: Final = 32 * 2**10
"""Between further places, of a word each, in tensors that are longer."""
_WORD_BYTES: Final = 8
_GRAIN: Final = 2**15
"""ATen gives a thread at least so many elements (at::internal::GRAIN_SIZE)."""
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Comparison:
    """What one run's tensors are compared by, save after save."""

    def __init__(self) -> None:
        self.in_full = False
        """Whether every byte is: something has differed before."""

    def agrees(self, tensor: torch.Tensor, buffer: torch.Tensor, start: int, pauses: Iterable[int] = ()) -> bool:
        """Compares a tensor with its copy, bit for bit, where it is looked at.

        Args:
            tensor: Contiguous, on the CPU.
            buffer: uint8, contiguous; holds the copy.
            start: Where in it.
            pauses: Offsets in bytes, in the tensor, at which copying was interrupted.

        Returns:
            Whether they are the same.
        """
        live, copied, length = tensor.data_ptr(), buffer.data_ptr() + start, tensor.nbytes
        if self.in_full or length <= _STRIDE_BYTES:
            same = bool(_memcmp(live, copied, length) == 0)
        else:
            words = _same_words(tensor, buffer.numpy()[start : start + length])
            places = _places(length) + _words_before([*pauses, *_ends_of_parts(tensor, torch.get_num_threads())])
            same = words and all(_memcmp(live + offset, copied + offset, width) == 0 for offset, width in places)
        self.in_full |= not same
        return same


def _same_words(tensor: torch.Tensor, copied: npt.NDArray[np.uint8]) -> bool:
    """Whether those at regular distances are."""
    whole, step = len(copied) // _WORD_BYTES * _WORD_BYTES, _STRIDE_BYTES // _WORD_BYTES
    here = tensor.view(-1).view(torch.uint8).numpy()[:whole].view(np.uint64)[::step]
    return np.array_equal(here, copied[:whole].view(np.uint64)[::step])


def _places(length: int) -> list[tuple[int, int]]:
    """Offset and width of both ends, and of what lies evenly between them."""
    width = min(_PLACE_BYTES, length)
    last = (_PLACES if length > _SMALL_BYTES else 2) - 1
    return [((length - width) * place // last, width) for place in range(last + 1)]


def _words_before(ends: list[int]) -> list[tuple[int, int]]:
    """Offset and width of the last word before each."""
    return [(max(0, end - _WORD_BYTES), min(_WORD_BYTES, end)) for end in ends]


def _ends_of_parts(tensor: torch.Tensor, num_threads: int) -> range:
    """Offsets in bytes at which ATen divides a contiguous tensor among threads."""
    num_elements, item_bytes = tensor.numel(), tensor.itemsize
    if num_elements <= _GRAIN:
        return range(0)
    part = -(-num_elements // min(num_threads, -(-num_elements // _GRAIN)))
    return range(part * item_bytes, num_elements * item_bytes, part * item_bytes)
