"""Takes a state tree apart into JSON and named tensors, and puts it together again, exactly.

The *skeleton* is JSON: what JSON has (null, booleans, strings, numbers, arrays for lists) stands for itself, all else
is an object with one member, ``{"kind": content}``; docs/format.md lists the kinds. Tensors, arrays and long lists of
plain numbers are taken out and named by their path, ``optimizer/state/0/exp_avg``. They are references: nothing is
copied that a snapshot would not copy anyway. Two tensors that are the same memory are one tensor with one name, and are
one again. 600 tensors take 2 ms.

A closed list of types goes in, and nothing else comes out: no pickle, no class looked up by a name from a file. The
price is that an object of your own has to say itself in plain types. What comes back differs from what went in only in
that tensors are contiguous, on the CPU, without gradient, and that lists held in two places are two lists.

Invariant: ``assemble(*dismantle(state))`` equals the state: types, order of keys, every bit of every number.
"""

from __future__ import annotations

import math
import re
import struct
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from shade.checkpoint._capture.layout import SPELLINGS, own_name
from shade.errors import ConfigError

MAX_DEPTH: Final = 100
"""Containers within containers."""
MAX_KEY_DEPTH: Final = 10
"""Tuples within tuples that are a key."""
INLINE: Final = 256
"""Lists of fewer numbers, and strings of fewer bytes, stay in the skeleton."""
FACTORIES: Final[Mapping[str, Any]] = {
    kind.__name__: kind for kind in (int, float, bool, str, bytes, list, tuple, dict, set)
} | {"null": None}
"""Default factories that a defaultdict may come back with."""
DTYPES: Final[Mapping[str, torch.dtype]] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
VIEWED: Final[Mapping[torch.dtype, torch.dtype]] = {
    torch.complex128: torch.float64,
    torch.complex32: torch.float16,
    torch.float8_e4m3fnuz: torch.uint8,
    torch.float8_e5m2fnuz: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}
"""Types that not every reader of safetensors knows, and what they are stored as: pairs, or plain bytes."""
ARRAYS: Final = frozenset(["<f8", "<f4", "<f2", "<i8", "<i4", "<i2", "|i1", "<u8", "<u4", "<u2", "|u1", "|b1", "<c8"])
"""Array types that a tensor has too; others are stored as bytes."""
RAW_ARRAY: Final = re.compile(r"[<>|][biufcmMSU][1-9][0-9]*(\[[0-9]*[A-Za-z]+\])?")
"""Array types that can be stored at all: no objects, no records."""
_SPECIAL: Final = re.compile(r"[%/@]")
_NUMBERS: Final = {int: ("q", torch.int64), float: ("d", torch.float64), bool: ("b", torch.bool)}
_CURE: Final = "give its state as dicts, lists, numbers, strings, arrays and tensors"


def flatten(
    state: Any, *, rank: int = 0, is_own: Callable[[str], bool] | None = None
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Takes a state tree apart.

    Args:
        state: Nested dicts (OrderedDict, defaultdict, Counter), lists, tuples, deques and sets of None, booleans,
            numbers, strings, bytes, numpy arrays and scalars, tensors, and torch's dtype, device and Size.
        rank: This rank.
        is_own: Of a tensor's path, whether it is this rank's own and not the same on every rank; False if not given.

    Returns:
        The skeleton, ready for JSON, and the tensors by name: references, of types that `SPELLINGS` has.

    Raises:
        ConfigError: Something in it is of another type, or contains itself; the message names its path.
    """
    taking = _Taking(rank, is_own)
    return taking.take(state, "", 0), taking.tensors


def escape(key: str) -> str:
    """A key as it stands in a tensor's name: ``%``, ``/`` and ``@`` percent-encoded."""
    if _SPECIAL.search(key):
        key = key.replace("%", "%25").replace("/", "%2F").replace("@", "%40")
    return key if key.isascii() else key.encode("utf-8", "backslashreplace").decode()


class _Taking:
    """One walk over a state; see `flatten`."""

    def __init__(self, rank: int, is_own: Callable[[str], bool] | None) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._rank, self._is_own = rank, is_own
        self._names: dict[tuple[Any, ...], str] = {}
        self._open: set[int] = set()
        self._takers: dict[type, Callable[[Any, str, int], Any]] = {
            dict: self._dict,
            OrderedDict: self._ordered,
            Counter: lambda value, path, depth: {"Counter": self._pairs(value, path, depth)},
            defaultdict: self._default,
            list: lambda value, path, depth: self._items(value, path, depth),
            tuple: lambda value, path, depth: {"tuple": self._items(value, path, depth)},
            deque: lambda value, path, depth: {"deque": [value.maxlen, self._items(value, path, depth)]},
            set: lambda value, path, depth: {"set": [_scalar(each, path) for each in value]},
            frozenset: lambda value, path, depth: {"frozenset": [_scalar(each, path) for each in value]},
        }
        self._leaves: dict[type, Callable[[Any, str], Any]] = {
            torch.Tensor: self._tensor,
            torch.nn.Parameter: self._tensor,
            np.ndarray: self._array,
            bytes: lambda value, path: {"bytes": self._bytes(value, path)},
            bytearray: lambda value, path: {"bytearray": self._bytes(value, path)},
        }

    def take(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        leaf = self._leaves.get(kind)
        if leaf is not None:
            return leaf(value, path)
        taker = self._takers.get(kind)
        if taker is None:
            return _scalar(value, path)
        if id(value) in self._open:
            raise ConfigError.of(f"a state without cycles at {path!r}", kind.__name__, "take out what contains itself")
        if depth == MAX_DEPTH:
            raise ConfigError.of(f"at most {MAX_DEPTH} containers in each other at {path!r}", kind, "flatten the state")
        self._open.add(id(value))
        taken = taker(value, path, depth + 1)
        self._open.discard(id(value))
        return taken

    # ── containers ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        return {"dict": self._pairs(value, path, depth)}

    def _pairs(self, value: Mapping[Any, Any], path: str, depth: int) -> list[Any]:
        """Keys and values, each as an array, so that a large table of numbers costs two tensors."""
        if len(value) >= INLINE:
            keys = self._numbers(list(value), f"{path}/%keys") or [_scalar(key, path) for key in value]
            numbers = self._numbers(list(value.values()), f"{path}/%values")
            if numbers is not None:
                return [keys, numbers]
        else:
            keys = [_scalar(key, path) for key in value]
        before = path and path + "/"
        return [keys, [self.take(each, before + _segment(key), depth) for key, each in value.items()]]

    def _ordered(self, value: OrderedDict[Any, Any], path: str, depth: int) -> Any:
        pairs = self._pairs(value, path, depth)
        attributes = vars(value)
        if not attributes:
            return {"OrderedDict": pairs}
        if set(attributes) != {"_metadata"}:  # what `torch.nn.Module.state_dict` notes of versions
            raise ConfigError.of(f"a plain OrderedDict at {path!r}", f"attributes {sorted(attributes)}", _CURE)
        return {"module_state": [*pairs, self.take(attributes["_metadata"], f"{path}/%metadata", depth)]}

    def _default(self, value: defaultdict[Any, Any], path: str, depth: int) -> Any:
        factory = next((name for name, kind in FACTORIES.items() if kind is value.default_factory), None)
        if factory is None:
            raise ConfigError.of(
                f"a default factory of {', '.join(FACTORIES)} at {path!r}", value.default_factory, "save dict(it)"
            )
        return {"defaultdict": [factory, *self._pairs(value, path, depth)]}

    def _items(self, value: Sequence[Any], path: str, depth: int) -> Any:
        numbers = self._numbers(value, path) if len(value) >= INLINE else None
        if numbers is not None:
            return numbers
        before = path and path + "/"
        return [self.take(each, f"{before}{place}", depth) for place, each in enumerate(value)]

    def _numbers(self, value: Iterable[Any], path: str) -> Any:
        """Takes a long list out if it holds nothing but int64, or float, or bool."""
        kinds = set(map(type, value))
        code, dtype = _NUMBERS.get(kinds.pop(), ("", torch.bool)) if len(kinds) == 1 else ("", torch.bool)
        if not code:
            return None
        try:
            return {"numbers": self._put(torch.frombuffer(array(code, value), dtype=dtype), path)}
        except OverflowError:  # an int beyond 64 bits
            return None

    # ── leaves ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        if value.layout is not torch.strided or value.is_meta or value.is_quantized or value.is_nested:
            kind = "quantized" if value.is_quantized else "nested" if value.is_nested else value.layout
            cure = "save its dense form (to_dense(), dequantize()), and materialise meta tensors"
            raise ConfigError.of(f"a dense tensor with data at {path!r}", f"{kind} on {value.device}", cure)
        if value.is_conj() or value.is_neg():
            value = value.resolve_conj().resolve_neg()
        dtype = value.dtype
        if dtype in SPELLINGS:
            return {"tensor": self._put(value, path)}
        if dtype not in VIEWED:
            raise ConfigError.of(f"a tensor type that can be stored at {path!r}", dtype, "convert or view it")
        stored = torch.view_as_real(value.detach()) if dtype.is_complex else value.detach().view(torch.uint8)
        return {"viewed": [str(dtype).removeprefix("torch."), self._put(stored, path)]}

    def _put(self, tensor: torch.Tensor, path: str) -> str:
        """Enters a tensor; the same memory, seen the same way, gets the name that it has already."""
        own = self._is_own is not None and self._is_own(path)
        address = tensor.data_ptr()
        same = (address, tensor.dtype, tensor.shape, tensor.stride(), tensor.device, own)
        if address and same in self._names:
            return self._names[same]
        stem = path if path and path != "__metadata__" else "%"
        name = own_name(stem, self._rank) if own else stem
        while name in self.tensors:  # keys 1 and "1"
            stem += "%"
            name = own_name(stem, self._rank) if own else stem
        self.tensors[name] = tensor
        if address:
            self._names[same] = name
        return name

    def _array(self, value: np.ndarray[Any, Any], path: str) -> Any:
        spelling = value.dtype.str
        if spelling in ARRAYS:
            if not (value.flags.c_contiguous and value.flags.writeable and value.flags.aligned):
                value = np.array(value, order="C")
            return {"array": self._put(torch.from_numpy(value), path)}
        if not RAW_ARRAY.fullmatch(spelling):
            raise ConfigError.of(f"an array of numbers, dates or strings at {path!r}", value.dtype, _CURE)
        return {"raw_array": [spelling, list(value.shape), self._put(_raw(value.tobytes()), path)]}

    def _bytes(self, value: bytes | bytearray, path: str) -> Any:
        return value.hex() if len(value) < INLINE else {"tensor": self._put(_raw(value), path)}


def _raw(content: bytes | bytearray) -> torch.Tensor:
    """A copy, as a tensor of bytes."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _segment(key: Any) -> str:
    """A key as a part of a tensor's name. Two keys may give the same; the names will differ."""
    return escape(key if type(key) is str else str(key))


def _scalar(value: Any, path: str, depth: int = 0) -> Any:
    """What has no parts, or is made of such and cannot change: whatever a key can be."""
    if value is None or value is True or value is False:
        return value
    encoder = _SCALARS.get(type(value))
    if encoder is not None:
        return encoder(value)
    if type(value) is tuple and depth < MAX_KEY_DEPTH:
        return {"tuple": [_scalar(each, path, depth + 1) for each in value]}
    if isinstance(value, np.generic) and RAW_ARRAY.fullmatch(value.dtype.str):
        return {"scalar": [value.dtype.str, value.tobytes().hex()]}
    raise _unknown(value, path)


def _text(value: str) -> Any:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # half a surrogate pair, as in undecodable file names
            return {"text": value.encode("utf-8", "surrogatepass").hex()}
    return value


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}


_SCALARS: Final[dict[type, Callable[[Any], Any]]] = {
    str: _text,
    int: lambda value: value if -(2**63) <= value < 2**63 else {"int": f"{value:x}"},
    float: _float,
    complex: lambda value: {"complex": [_float(value.real), _float(value.imag)]},
    bytes: lambda value: {"bytes": value.hex()},
    torch.dtype: lambda value: {"dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"device": str(value)},
    torch.Size: lambda value: {"size": list(value)},
}


def _unknown(value: Any, path: str) -> ConfigError:
    kind = type(value)
    got = f"{kind.__module__}.{kind.__qualname__}"
    if isinstance(value, torch.Tensor):
        sharded = kind.__module__.startswith("torch.distributed")
        cure = (
            "save sharded state through torch.distributed.checkpoint with shade.checkpoint.dcp"
            if sharded
            else "save tensor.as_subclass(torch.Tensor), or the plain tensors that it is made of"
        )
        return ConfigError(f"expected a plain tensor at {path!r}, got {got}; {cure}")
    return ConfigError(f"expected dicts, lists, numbers, strings, arrays or tensors at {path!r}, got {got}; {_CURE}")
