"""Puts a state tree together again: the way back from `_capture.flatten`, for skeletons from anywhere.

A skeleton may come from a file that somebody has tampered with. So each kind is made by a function from the table at
the end of this file and by nothing else, every content is checked before it is used, depth is bounded, and a tensor
becomes a list at most once, so that a small file cannot ask for a large memory. Invariant: it returns, or it raises
`CorruptCheckpointError`.

Parts of a saved state: some of the attached things, and the tensors that those consist of.

The root of a snapshot's tree is a dict by the names that things were attached under. A part of it is such a tree again,
so that a model can be read without its optimizer, and nothing else of the snapshot is touched.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import numpy as np
import torch

from shade.checkpoint._capture.flatten import ARRAYS, DTYPES, FACTORIES, MAX_DEPTH, MAX_KEY_DEPTH, RAW_ARRAY, VIEWED
from shade.errors import CorruptCheckpointError

_HEX: Final = re.compile(r"([0-9a-f]{2})*")
_INTEGER: Final = re.compile(r"-?[0-9a-f]{1,1000000}")
_MAX_DEPTH: Final = MAX_DEPTH + MAX_KEY_DEPTH
_NUMBERS: Final = (torch.int64, torch.float64, torch.bool)


def unflatten(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Puts a state tree together.

    Args:
        skeleton: From `_capture.flatten.flatten`, perhaps through JSON.
        tensors: By name, contiguous and on the CPU; those that the skeleton does not name are left alone. The state
            refers to them and copies none.

    Returns:
        The state.

    Raises:
        CorruptCheckpointError: It is no skeleton, or names a tensor that is not there or is of another kind.
    """
    try:
        return _Giving(tensors).give(skeleton, 0)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
        raise CorruptCheckpointError(f"expected the skeleton of a state, got one that fails: {error}") from error


class _Giving:
    """One walk over a skeleton; see `unflatten`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._listed: set[str] = set()

    def give(self, node: Any, depth: int) -> Any:
        kind = type(node)
        if kind is str or kind is int or kind is bool or node is None:
            return node
        if kind is float:
            return _expect(node, math.isfinite(node), "a finite number")
        _expect(depth, depth <= _MAX_DEPTH, f"at most {MAX_DEPTH} containers in each other")
        if kind is list:
            return [self.give(each, depth + 1) for each in node]
        _expect(node, kind is dict and len(node) == 1, "an object with one member")
        (name, content), *_ = node.items()
        giver = _GIVERS.get(name)
        _expect(name, giver is not None, "a kind that docs/format.md lists")
        assert giver is not None
        return giver(self, content, depth + 1)

    # ── containers ──────────────────────────────────────────────────────────────────────────────────────────────────

    def items(self, content: Any, depth: int) -> list[Any]:
        if type(content) is not dict:
            return [self.give(each, depth) for each in _list(content)]
        _expect(content, set(content) == {"numbers"}, "an array, or the name of one")
        name = content["numbers"]
        tensor = self.named(name)
        fits = tensor.dim() == 1 and tensor.dtype in _NUMBERS and name not in self._listed
        _expect(name, fits, "a tensor of plain numbers that nothing else uses")
        self._listed.add(name)
        numbers: list[Any] = tensor.tolist()
        return numbers

    def pairs(self, content: Any, depth: int) -> dict[Any, Any]:
        keys, values = _list(content, 2)
        names = self.items(keys, depth)
        paired = dict(zip(names, self.items(values, depth), strict=True))
        _expect(len(names), len(paired) == len(names), "no key twice")
        return paired

    def module_state(self, content: Any, depth: int) -> OrderedDict[Any, Any]:
        keys, values, metadata = _list(content, 3)
        state = OrderedDict(self.pairs([keys, values], depth))
        state._metadata = self.give(metadata, depth)  # type: ignore[attr-defined]
        return state

    def default(self, content: Any, depth: int) -> defaultdict[Any, Any]:
        factory, keys, values = _list(content, 3)
        return defaultdict(FACTORIES[factory], self.pairs([keys, values], depth))

    def bounded(self, content: Any, depth: int) -> deque[Any]:
        length, items = _list(content, 2)
        _expect(length, length is None or type(length) is int, "a length or null")
        return deque(self.items(items, depth), length)

    # ── leaves ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def named(self, name: Any) -> torch.Tensor:
        _expect(name, type(name) is str, "a tensor's name")
        try:
            return self._tensors[name]
        except KeyError:
            raise CorruptCheckpointError(f"expected a tensor {name!r}, got none of that name") from None

    def viewed(self, content: Any, depth: int) -> torch.Tensor:
        spelling, name = _list(content, 2)
        dtype, tensor = DTYPES[spelling], self.named(name)
        _expect(spelling, VIEWED.get(dtype) is tensor.dtype, f"a type that is stored as {tensor.dtype}")
        return torch.view_as_complex(tensor) if dtype.is_complex else tensor.view(dtype)

    def array(self, content: Any, depth: int) -> np.ndarray[Any, Any]:
        made: np.ndarray[Any, Any] = self.named(content).numpy()
        _expect(content, made.dtype.str in ARRAYS, "a tensor that an array can be made of")
        return made

    def raw_array(self, content: Any, depth: int) -> np.ndarray[Any, Any]:
        spelling, shape, name = _list(content, 3)
        _expect(spelling, type(spelling) is str and RAW_ARRAY.fullmatch(spelling), "an array type")
        shape = _sizes(shape)
        dtype, data = np.dtype(spelling), self.raw(name)
        _expect(shape, math.prod(shape) * dtype.itemsize == data.numel(), f"a shape of {data.numel()} bytes")
        return (
            np.frombuffer(data.numpy().tobytes(), dtype=dtype).reshape(shape).copy()
            if data.numel()
            else np.empty(shape, dtype=dtype)
        )

    def raw(self, name: Any) -> torch.Tensor:
        tensor = self.named(name)
        _expect(name, tensor.dtype is torch.uint8 and tensor.dim() == 1, "a tensor of bytes")
        return tensor

    def content(self, content: Any, depth: int) -> bytes:
        if type(content) is str:
            return _unhex(content)
        _expect(content, type(content) is dict and set(content) == {"tensor"}, "hex digits, or a tensor")
        return bytes(self.raw(content["tensor"]).numpy().tobytes())


def _expect(found: Any, right: object, expected: str) -> Any:
    if not right:
        shown = repr(found)
        shown = shown if len(shown) <= 80 else shown[:80] + " …"
        raise CorruptCheckpointError(f"expected {expected} in the skeleton of a state, got {shown}")
    return found


def _list(content: Any, length: int | None = None) -> list[Any]:
    wanted = "an array" if length is None else f"an array of {length}"
    made: list[Any] = _expect(content, type(content) is list and length in (None, len(content)), wanted)
    return made


def _sizes(content: Any) -> list[int]:
    return [_expect(each, type(each) is int and 0 <= each < 2**63, "a size") for each in _list(content)]


def _unhex(content: Any) -> bytes:
    return bytes.fromhex(_expect(content, type(content) is str and _HEX.fullmatch(content), "hex digits"))


def _scalar(content: Any) -> np.generic:
    spelling, digits = _list(content, 2)
    _expect(spelling, type(spelling) is str and RAW_ARRAY.fullmatch(spelling), "an array type")
    stored, dtype = _unhex(digits), np.dtype(spelling)
    _expect(digits, len(stored) == dtype.itemsize, f"{dtype.itemsize} bytes")
    scalar: np.generic = np.frombuffer(stored, dtype=dtype)[0]
    return scalar


def _float(content: Any) -> float:
    if type(content) is dict:
        _expect(content, set(content) == {"float"}, "a number")
        return _bits(content["float"])
    return float(_expect(content, type(content) is float and math.isfinite(content), "a number"))


def _bits(content: Any) -> float:
    (value,) = struct.unpack(">d", _expect(_unhex(content), type(content) is str and len(content) == 16, "8 bytes"))
    return float(value)


_GIVERS: Final[dict[str, Callable[[_Giving, Any, int], Any]]] = {
    "dict": _Giving.pairs,
    "OrderedDict": lambda giving, content, depth: OrderedDict(giving.pairs(content, depth)),
    "Counter": lambda giving, content, depth: Counter(giving.pairs(content, depth)),
    "defaultdict": _Giving.default,
    "module_state": _Giving.module_state,
    "tuple": lambda giving, content, depth: tuple(giving.items(content, depth)),
    "deque": _Giving.bounded,
    "set": lambda giving, content, depth: set(giving.items(content, depth)),
    "frozenset": lambda giving, content, depth: frozenset(giving.items(content, depth)),
    "numbers": lambda giving, content, depth: giving.items({"numbers": content}, depth),
    "tensor": lambda giving, content, depth: giving.named(content),
    "viewed": _Giving.viewed,
    "array": _Giving.array,
    "raw_array": _Giving.raw_array,
    "scalar": lambda giving, content, depth: _scalar(content),
    "bytes": _Giving.content,
    "bytearray": lambda giving, content, depth: bytearray(giving.content(content, depth)),
    "text": lambda giving, content, depth: _unhex(content).decode("utf-8", "surrogatepass"),
    "int": lambda giving, content, depth: int(_expect(content, _INTEGER.fullmatch(content), "hex digits"), 16),
    "float": lambda giving, content, depth: _bits(content),
    "complex": lambda giving, content, depth: complex(*map(_float, _list(content, 2))),
    "dtype": lambda giving, content, depth: DTYPES[content],
    "device": lambda giving, content, depth: torch.device(_expect(content, type(content) is str, "a device")),
    "size": lambda giving, content, depth: torch.Size(_sizes(content)),
}
"""Each kind of node, and what makes it; the only way from a name in a file to a type."""


def part_of(tree: Any, only: Collection[str] | None) -> Any:
    """A tree with some of its things.

    Args:
        tree: Of a manifest.
        only: Their names; None for all of them.

    Returns:
        The tree; things that it does not have are not in it.

    Raises:
        CorruptCheckpointError: Its root is no dict.
    """
    try:
        names, things = tree["dict"]
        kept = [(name, thing) for name, thing in zip(names, things, strict=True) if only is None or name in only]
    except (TypeError, KeyError, ValueError) as error:
        raise CorruptCheckpointError(
            f"expected a tree of attached things, got one whose root fails: {error}"
        ) from error
    return {"dict": [[name for name, _ in kept], [thing for _, thing in kept]]}


def tensors_in(tree: Any) -> set[str]:
    """Every string in a tree that may be a tensor's name: all that it needs, and perhaps words that are none."""
    found: set[str] = set()
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, str):
            found.add(node)
        elif isinstance(node, list):
            left.extend(node)
        elif isinstance(node, dict):
            left.extend(node.values())
    return found
