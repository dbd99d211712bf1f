"""Compares two states: types, order, every bit."""

from __future__ import annotations

import struct
from collections import deque
from typing import Any

import numpy as np
import torch

from shade.checkpoint._capture.layout import bytes_of


def assert_same(found: Any, expected: Any) -> None:
    """Equal in type, order and bits."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert bits(found) == bits(expected)
    elif isinstance(expected, np.ndarray | np.generic):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, dict):
        assert_same(list(found.keys()), list(expected.keys()))
        for key, value in expected.items():
            assert_same(found[key], value)
        assert getattr(found, "_metadata", None) == getattr(expected, "_metadata", None)
        assert getattr(found, "default_factory", None) is getattr(expected, "default_factory", None)
    elif isinstance(expected, list | tuple | deque) and not isinstance(expected, torch.Size):
        assert len(found) == len(expected)
        assert getattr(found, "maxlen", None) == getattr(expected, "maxlen", None)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, float):
        assert struct.pack(">d", found) == struct.pack(">d", expected)
    elif isinstance(expected, complex):
        assert_same([found.real, found.imag], [expected.real, expected.imag])
    else:
        assert found == expected


def bits(tensor: torch.Tensor) -> bytes:
    flat = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
    return bytes(bytes_of(flat).numpy().tobytes())
