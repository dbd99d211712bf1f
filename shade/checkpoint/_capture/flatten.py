"""Flattens a state tree into JSON and named tensors, and unflattens it again, exactly.

The *skeleton* is JSON: what JSON has stands for itself; all else is an object with one member, ``{"kind": content}``;
docs/format.md §6 lists the kinds. Tensors, arrays and long lists of plain numbers are taken out and named by their
path, ``optimizer/state/0/exp_avg``; nothing is copied. Two tensors that share memory are one tensor with one name.

A closed list of types goes in, and nothing else comes out: no pickle, nothing imported by a name from a file. A tensor
subclass that says what tensors it is made of goes in as these, and comes out where the process has loaded its class.
What comes back differs only in that tensors are dense, on the CPU, without gradient, and that a list held twice is two.

Invariants: ``unflatten(*flatten(state))`` equals the state: types, order of keys, every bit of every number;
`unflatten` returns, or it raises `CorruptCheckpointError`, whatever a file holds.
"""

from __future__ import annotations

import json
import math
import re
import struct
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
import xxhash

from shade.checkpoint._capture.sharding import Replicas, SavedDTensor, Sharding, is_dtensor, sharding_of
from shade.errors import ConfigError, CorruptCheckpointError, StateMismatchError

SPELLINGS: Final[Mapping[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""Names of tensor types in a safetensors file."""
_SPELLED: Final = {spelling: dtype for dtype, spelling in SPELLINGS.items()}
MAX_DEPTH: Final = 100
"""Greatest depth of containers within containers."""
MAX_KEY_DEPTH: Final = 10
"""Greatest depth of tuples within a key."""
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
"""Types that not every reader of safetensors knows, and the type that each is stored as: pairs, or plain bytes."""
ARRAYS: Final = frozenset(["<f8", "<f4", "<f2", "<i8", "<i4", "<i2", "|i1", "<u8", "<u4", "<u2", "|u1", "|b1", "<c8"])
"""Array types that a tensor has too; others are stored as bytes."""
RAW_ARRAY: Final = re.compile(r"[<>|][biufcmMSU][1-9][0-9]*(\[[0-9]*[A-Za-z]+\])?")
"""Array types that can be stored at all: no objects, no records."""
_SPECIAL: Final = re.compile(r"[%/@]")
_NUMBERS: Final = {int: ("q", torch.int64), float: ("d", torch.float64), bool: ("b", torch.bool)}
_CURE: Final = "give its state as dicts, lists, numbers, strings, arrays and tensors"
_HEX: Final = re.compile(r"([0-9a-f]{2})*")
_INTEGER: Final = re.compile(r"-?[0-9a-f]{1,1000000}")
_MAX_DEPTH: Final = MAX_DEPTH + MAX_KEY_DEPTH
_LISTABLE: Final = (torch.int64, torch.float64, torch.bool)


def flatten(
    state: Any,
    *,
    rank: int = 0,
    is_own: Callable[[str], bool] | None = None,
    tied: dict[str, torch.Tensor] | None = None,
    escapes: bool = True,
    is_plain: bool = False,
    same: Mapping[str, str] | None = None,
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Flattens a state tree.

    Args:
        state: Nested dicts (OrderedDict, defaultdict, Counter), lists, tuples, deques and sets of None, booleans,
            numbers, strings, bytes, numpy arrays and scalars, tensors, and torch's dtype, device and Size.
        rank: This rank.
        is_own: Whether the tensor at a path is this rank's own and not the same on every rank; by default none is.
        tied: Receives the tensors that are entered under another name already, by the name that they would have alone.
        escapes: Whether names keep to what a snapshot may have: see `escape`.
        is_plain: Whether each tensor is one of bytes alone: in no order of dimensions, and made of no others.
        same: Paths of DTensors that are others, with the paths of those: an empty part has no memory to know it by.

    Returns:
        The skeleton, ready for JSON, and the tensors by name: references, of types that `SPELLINGS` has. Of a DTensor,
        the part of this rank is among them if this rank is the one of its replicas that saves it.

    Raises:
        ConfigError: A part of it is of another type, or contains itself; the message names its path.
    """
    flattener = _Flattener(rank, is_own, same or {}, escapes=escapes, is_plain=is_plain)
    skeleton = flattener.flatten(state, "", 0)
    if tied is not None:
        tied.update({name: tensor for name, tensor in flattener.tied.items() if name not in flattener.tensors})
    return skeleton, flattener.tensors


def escape(key: str) -> str:
    """Returns a key as it stands in a tensor's name: ``%``, ``/`` and ``@`` percent-encoded."""
    if _SPECIAL.search(key):
        key = key.replace("%", "%25").replace("/", "%2F").replace("@", "%40")
    return key if key.isascii() else key.encode("utf-8", "backslashreplace").decode()


class _Flattener:
    """One pass over a state; see `flatten`."""

    def __init__(
        self,
        rank: int,
        is_own: Callable[[str], bool] | None,
        same: Mapping[str, str],
        *,
        escapes: bool,
        is_plain: bool,
    ) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.tied: dict[str, torch.Tensor] = {}
        self._rank, self._is_own, self._same, self._is_plain = rank, is_own, same, is_plain
        self._dtensors: dict[str, Any] = {}
        """Nodes of DTensors, by path."""
        self._replicas: Replicas | None = None
        self._saver: int | None = None
        """Rank that saves the part of a DTensor that is being flattened."""
        self._name = _segment if escapes else _encodable
        self._names: dict[tuple[Any, ...], str] = {}
        self._taken: set[str] = set()
        self._open: set[int] = set()
        self._containers: dict[type, Callable[[Any, str, int], Any]] = {
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

    def flatten(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        leaf = self._leaves.get(kind)
        if leaf is not None:
            return leaf(value, path)
        # A nested tensor's shape is none of numbers.
        is_wrapper = _is_wrapper(kind) and not (self._is_plain or value.is_nested)
        container = self._wrapper if is_wrapper else self._containers.get(kind)
        if container is None:
            is_split = issubclass(kind, torch.Tensor) and is_dtensor(value)
            return self._dtensor(value, path, depth) if is_split else _scalar(value, path)
        if id(value) in self._open:
            raise ConfigError.of(f"a state without cycles at {path!r}", kind.__name__, "take out what contains itself")
        if depth == MAX_DEPTH:
            raise ConfigError.of(f"at most {MAX_DEPTH} containers in each other at {path!r}", kind, "flatten the state")
        self._open.add(id(value))
        taken = container(value, path, depth + 1)
        self._open.discard(id(value))
        return taken

    # ── containers ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        return {"dict": self._pairs(value, path, depth)}

    def _pairs(self, value: Mapping[Any, Any], path: str, depth: int) -> list[Any]:
        """Returns keys and values, each as an array, so that a large table of numbers costs two tensors."""
        if len(value) >= INLINE:
            keys = self._numbers(list(value), f"{path}/%keys") or [_scalar(key, path) for key in value]
            numbers = self._numbers(list(value.values()), f"{path}/%values")
            if numbers is not None:
                return [keys, numbers]
        else:
            keys = [_scalar(key, path) for key in value]
        before = path and path + "/"
        return [keys, [self.flatten(each, before + self._name(key), depth) for key, each in value.items()]]

    def _ordered(self, value: OrderedDict[Any, Any], path: str, depth: int) -> Any:
        pairs = self._pairs(value, path, depth)
        attributes = vars(value)
        if not attributes:
            return {"OrderedDict": pairs}
        if set(attributes) != {"_metadata"}:  # where `torch.nn.Module.state_dict` keeps versions
            raise ConfigError.of(f"a plain OrderedDict at {path!r}", f"attributes {sorted(attributes)}", _CURE)
        return {"module_state": [*pairs, self.flatten(attributes["_metadata"], f"{path}/%metadata", depth)]}

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
        return [self.flatten(each, f"{before}{number}", depth) for number, each in enumerate(value)]

    def _numbers(self, value: Iterable[Any], path: str) -> Any:
        """Makes a tensor of a long list that holds nothing but int64, or float, or bool; else returns None."""
        kinds = set(map(type, value))
        code, dtype = _NUMBERS.get(kinds.pop(), ("", torch.bool)) if len(kinds) == 1 else ("", torch.bool)
        if not code:
            return None
        try:
            return {"numbers": self._put(torch.frombuffer(array(code, value), dtype=dtype), path)}
        except OverflowError:  # an int beyond 64 bits
            return None

    def _wrapper(self, value: Any, path: str, depth: int) -> Any:
        """Returns the parts that a tensor subclass is made of, its class, and what it needs beside them."""
        kind = type(value)
        if _wrapper_class(kind.__module__, kind.__qualname__) is not kind:
            raise ConfigError.of(f"the class of {path!r} to be known by its name", kind, "define it once, by that name")
        names, context = value.__tensor_flatten__()
        parts = [self.flatten(getattr(value, name), f"{path}/%{self._name(name)}", depth) for name in names]
        others = [names, parts, self.flatten(context, f"{path}/%context", depth)]
        return {"wrapper": [kind.__module__, kind.__qualname__, *others, list(value.shape), list(value.stride())]}

    def _dtensor(self, value: Any, path: str, depth: int) -> Any:
        """Returns how a DTensor is sharded, and its part as every rank names it: without the rank."""
        known = self._dtensors.get(self._same.get(path, path))
        if known is None:
            sharding, mine = sharding_of(value, path)
            self._replicas = self._replicas or Replicas()
            replica = self._replicas.take(sharding, value.itemsize)
            self._saver = sharding.rank_of(mine, replica)
            with torch.no_grad():
                part = self.flatten(value.to_local(), path, depth + 1)
            self._saver = None
            known = {"dtensor": [part, list(value.stride()), replica, *sharding.content]}
        self._dtensors[path] = known
        return known

    # ── leaves ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        order = None if self._is_plain else _order(value)
        node = self._dense(value, path)
        return node if order is None else {"ordered": [order, node]}

    def _dense(self, value: torch.Tensor, path: str) -> Any:
        if value.layout is not torch.strided or value.is_meta or value.is_quantized or value.is_nested:
            kind = "quantized" if value.is_quantized else "nested" if value.is_nested else value.layout
            cure = "save its dense form (to_dense(), dequantize()), and materialise meta tensors"
            raise ConfigError.of(f"a dense tensor with data at {path!r}", f"{kind} on {value.device}", cure)
        if value.is_conj() or value.is_neg() or value._is_zerotensor():  # whose memory does not say what they are
            value = value.resolve_conj().resolve_neg().clone()
        dtype = value.dtype
        if dtype in SPELLINGS:
            return {"tensor": self._put(value, path)}
        if dtype not in VIEWED:
            raise ConfigError.of(f"a tensor type that can be stored at {path!r}", dtype, "convert or view it")
        stored = torch.view_as_real(value.detach()) if dtype.is_complex else value.detach().view(torch.uint8)
        return {"viewed": [str(dtype).removeprefix("torch."), self._put(stored, path)]}

    def _put(self, tensor: torch.Tensor, path: str) -> str:
        """Enters a tensor and returns its name; the same memory, seen the same way, keeps the name that it has."""
        own = self._is_own is not None and self._is_own(path)
        saver = self._saver if self._saver is not None else self._rank if own else None
        address = 0 if self._saver is not None else tensor.data_ptr()
        same = (address, tensor.dtype, tensor.shape, tensor.stride(), tensor.device, own)
        if address and same in self._names:
            self.tied[path] = tensor
            return self._names[same]
        stem = path if path and path != "__metadata__" else "%"
        name = stem if saver is None else own_name(stem, saver)
        while name in self._taken:  # keys 1 and "1"
            stem += "%"
            name = stem if saver is None else own_name(stem, saver)
        self._taken.add(name)
        if saver is None or saver == self._rank:
            self.tensors[name] = tensor
        if address:
            self._names[same] = name
        return name if self._saver is None else stem

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


def _order(tensor: torch.Tensor) -> list[int] | None:
    """Returns a tensor's dimensions from the widest step in memory to the narrowest; None if they ascend."""
    # A product of the same matrix laid out otherwise may differ in its last bits.
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_contiguous() or 0 in tensor.stride():
        return None
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda number: -strides[number])
    return None if order == sorted(order) else order


def _is_wrapper(kind: type) -> bool:
    """Whether a class is a tensor that is made of tensors; DTensors and their like are parts of something larger."""
    is_tensor = issubclass(kind, torch.Tensor) and hasattr(kind, "__tensor_unflatten__")
    return is_tensor and not kind.__module__.startswith("torch.distributed")


def _wrapper_class(module: Any, name: Any) -> type[Any] | None:
    """Returns the class of that name among the tensor classes that this process has loaded."""
    left: list[type[Any]] = [torch.Tensor]
    while left:
        kind = left.pop()
        if (kind.__module__, kind.__qualname__) == (module, name) and _is_wrapper(kind):
            return kind
        left.extend(kind.__subclasses__())
    return None


def _raw(content: bytes | bytearray) -> torch.Tensor:
    """Returns a copy, as a tensor of bytes."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def _segment(key: Any) -> str:
    """Returns a key as a part of a tensor's name. Two keys may give the same part; the names will differ."""
    return escape(key if type(key) is str else str(key))


def _encodable(key: Any) -> str:
    return str(key).encode("utf-8", "backslashreplace").decode()


def _scalar(value: Any, path: str, depth: int = 0) -> Any:
    """Returns the skeleton of a value without parts, or of an immutable tuple of them: of all that a key can be."""
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
            "shard with fully_shard, or save through torch.distributed.checkpoint with shade.checkpoint.dcp"
            if sharded
            else "save plain tensors that it can be made of again"
        )
        return ConfigError(f"expected a plain tensor at {path!r}, got {got}; {cure}")
    return ConfigError(f"expected dicts, lists, numbers, strings, arrays or tensors at {path!r}, got {got}; {_CURE}")


def unflatten(skeleton: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Returns the state of a skeleton that `flatten` returned, perhaps through JSON. The state refers to the tensors,
    dense and on the CPU, and copies few; those that the skeleton does not name are ignored. Raises
    `CorruptCheckpointError` if it is no skeleton, or names a tensor that is missing or of another kind."""
    try:
        return _Unflattener(tensors).unflatten(skeleton, 0)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
        raise CorruptCheckpointError(f"expected the skeleton of a state, got one that fails: {error}") from error


class _Unflattener:
    """One pass over a skeleton; see `unflatten`."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._listed: set[str] = set()
        self._viewed: dict[tuple[str, str], torch.Tensor] = {}
        self._ordered: dict[str, torch.Tensor] = {}

    def unflatten(self, node: Any, depth: int) -> Any:
        kind = type(node)
        if kind is str or kind is int or kind is bool or node is None:
            return node
        if kind is float:
            return _expect(node, math.isfinite(node), "a finite number")
        _expect(depth, depth <= _MAX_DEPTH, f"at most {MAX_DEPTH} containers in each other")
        if kind is list:
            return [self.unflatten(each, depth + 1) for each in node]
        _expect(node, kind is dict and len(node) == 1, "an object with one member")
        (name, content), *_ = node.items()
        maker = _MAKERS.get(name)
        _expect(name, maker is not None, "a kind that docs/format.md lists")
        assert maker is not None
        return maker(self, content, depth + 1)

    # ── containers ──────────────────────────────────────────────────────────────────────────────────────────────────

    def items(self, content: Any, depth: int) -> list[Any]:
        if type(content) is not dict:
            return [self.unflatten(each, depth) for each in _list(content)]
        _expect(content, set(content) == {"numbers"}, "an array, or the name of one")
        name = content["numbers"]
        tensor = self.named(name)
        fits = tensor.dim() == 1 and tensor.dtype in _LISTABLE and name not in self._listed
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
        state._metadata = self.unflatten(metadata, depth)  # type: ignore[attr-defined]
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
        if (spelling, name) not in self._viewed:
            seen = torch.view_as_complex(tensor) if dtype.is_complex else tensor.view(dtype)
            # PyTorch writes a complex128 with instructions that need 16 bytes of alignment, and the process dies.
            self._viewed[spelling, name] = seen.clone() if seen.data_ptr() % seen.itemsize else seen
        return self._viewed[spelling, name]

    def ordered(self, content: Any, depth: int) -> torch.Tensor:
        order, node = _list(content, 2)
        key = repr(content)
        if key not in self._ordered:
            tensor = self.tensor(node, depth)
            _expect(order, sorted(_sizes(order)) == list(range(tensor.dim())), f"an order of {tensor.dim()} dimensions")
            made = torch.empty_permuted(tensor.shape, order, dtype=tensor.dtype)
            self._ordered[key] = made.copy_(tensor)
        return self._ordered[key]

    def wrapper(self, content: Any, depth: int) -> Any:
        module, name, names, nodes, context, shape, strides = _list(content, 7)
        _expect([module, name], type(module) is type(name) is str, "a module and a class")
        kind = _wrapper_class(module, name)
        if kind is None:
            raise StateMismatchError.of(
                f"the class {name} of {module}, which was saved", None, f"import {module} first"
            )
        parts = dict(zip(_list(names), [self.tensor(each, depth) for each in _list(nodes)], strict=True))
        outer = torch.Size(_sizes(shape)), tuple(_sizes(strides))
        try:
            return kind.__tensor_unflatten__(parts, self.unflatten(context, depth), *outer)
        except Exception as error:
            raise CorruptCheckpointError(f"expected a tensor that {name} takes, got one that fails: {error}") from error

    def dtensor(self, content: Any, depth: int) -> SavedDTensor:
        part, stride, replica, *others = _list(content, 7)
        sharding = Sharding.of_content(others)
        is_strided = len(_sizes(stride)) == len(sharding.shape)
        _expect(content, is_strided and _sizes([replica])[0] < sharding.num_replicas, "the sharding of a tensor")
        stems = tensors_in(part)

        def tensor_at(rank: int) -> torch.Tensor:
            named = {stem: self._tensors.get(own_name(stem, rank)) for stem in stems}
            there = {stem: tensor for stem, tensor in named.items() if tensor is not None}
            return _Unflattener(there).tensor(part, depth)

        return SavedDTensor(
            sharding, tuple(stride), replica, lambda rank: [own_name(stem, rank) for stem in stems], tensor_at
        )

    def tensor(self, node: Any, depth: int) -> torch.Tensor:
        made: torch.Tensor = self.unflatten(node, depth)
        _expect(made, isinstance(made, torch.Tensor), "a tensor")
        return made

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


def _scalar_of(content: Any) -> np.generic:
    spelling, digits = _list(content, 2)
    _expect(spelling, type(spelling) is str and RAW_ARRAY.fullmatch(spelling), "an array type")
    stored, dtype = _unhex(digits), np.dtype(spelling)
    _expect(digits, len(stored) == dtype.itemsize, f"{dtype.itemsize} bytes")
    scalar: np.generic = np.frombuffer(stored, dtype=dtype)[0]
    return scalar


def _float_of(content: Any) -> float:
    if type(content) is dict:
        _expect(content, set(content) == {"float"}, "a number")
        return _bits(content["float"])
    return float(_expect(content, type(content) is float and math.isfinite(content), "a number"))


def _bits(content: Any) -> float:
    (value,) = struct.unpack(">d", _expect(_unhex(content), type(content) is str and len(content) == 16, "8 bytes"))
    return float(value)


_MAKERS: Final[dict[str, Callable[[_Unflattener, Any, int], Any]]] = {
    "dict": _Unflattener.pairs,
    "OrderedDict": lambda unflattener, content, depth: OrderedDict(unflattener.pairs(content, depth)),
    "Counter": lambda unflattener, content, depth: Counter(unflattener.pairs(content, depth)),
    "defaultdict": _Unflattener.default,
    "module_state": _Unflattener.module_state,
    "tuple": lambda unflattener, content, depth: tuple(unflattener.items(content, depth)),
    "deque": _Unflattener.bounded,
    "set": lambda unflattener, content, depth: set(unflattener.items(content, depth)),
    "frozenset": lambda unflattener, content, depth: frozenset(unflattener.items(content, depth)),
    "numbers": lambda unflattener, content, depth: unflattener.items({"numbers": content}, depth),
    "tensor": lambda unflattener, content, depth: unflattener.named(content),
    "viewed": _Unflattener.viewed,
    "ordered": _Unflattener.ordered,
    "wrapper": _Unflattener.wrapper,
    "dtensor": _Unflattener.dtensor,
    "array": _Unflattener.array,
    "raw_array": _Unflattener.raw_array,
    "scalar": lambda unflattener, content, depth: _scalar_of(content),
    "bytes": _Unflattener.content,
    "bytearray": lambda unflattener, content, depth: bytearray(unflattener.content(content, depth)),
    "text": lambda unflattener, content, depth: _unhex(content).decode("utf-8", "surrogatepass"),
    "int": lambda unflattener, content, depth: int(_expect(content, _INTEGER.fullmatch(content), "hex digits"), 16),
    "float": lambda unflattener, content, depth: _bits(content),
    "complex": lambda unflattener, content, depth: complex(*map(_float_of, _list(content, 2))),
    "dtype": lambda unflattener, content, depth: DTYPES[content],
    "device": lambda unflattener, content, depth: torch.device(_expect(content, type(content) is str, "a device")),
    "size": lambda unflattener, content, depth: torch.Size(_sizes(content)),
}
"""The function that makes each kind of node; the only way from a name in a file to a type."""


def part_of(tree: Any, only: Collection[str] | None) -> Any:
    """Returns a tree of some of the attached objects, by name; None for all. Names that the tree lacks are ignored."""
    try:
        names, things = tree["dict"]
        kept = [(name, thing) for name, thing in zip(names, things, strict=True) if only is None or name in only]
    except (TypeError, KeyError, ValueError) as error:
        raise CorruptCheckpointError(
            f"expected a tree of attached objects, got one whose root fails: {error}"
        ) from error
    return {"dict": [[name for name, _ in kept], [thing for _, thing in kept]]}


def completed(tree: Any, others: Iterable[Any]) -> Any:
    """Returns a tree with the attached objects that it lacks, from the first of other trees that has each: a pipeline's
    stages, which few ranks have."""
    names, things = (list(each) for each in tree["dict"])
    for other in others:
        for name, thing in zip(*part_of(other, None)["dict"], strict=True):
            if name not in names:
                names.append(name)
                things.append(thing)
    return {"dict": [names, things]}


def tensors_in(tree: Any) -> set[str]:
    """Returns every string in a tree that may be a tensor's name: all tensors that it needs, and perhaps others."""
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


def parts_in(tree: Any, rank: int) -> set[str]:
    """Returns the names of the parts of DTensors in a tree that a rank has saved, if it has saved any of them."""
    return {own_name(stem, rank) for part, *_ in _dtensors_in(tree) for stem in tensors_in(part)}


def has_dtensors(tree: Any) -> bool:
    """Returns whether a tree has a DTensor."""
    return any(True for _ in _dtensors_in(tree))


def splits_in(tree: Any) -> dict[str, tuple[str, int]]:
    """Returns, by mesh, a digest of how the DTensors in a tree are split, and how many ranks the mesh has."""
    hashes: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for content in _dtensors_in(tree):
        mesh = json.dumps(content[4:6])
        # Not by the node of the part: an empty one lies in memory otherwise.
        said = json.dumps([sorted(tensors_in(content[0])), *content[1:]])
        hashes.setdefault(mesh, xxhash.xxh3_128()).update(said.encode())
        sizes[mesh] = math.prod(content[4])
    return {mesh: (found.hexdigest(), sizes[mesh]) for mesh, found in hashes.items()}


def _dtensors_in(tree: Any) -> Iterator[list[Any]]:
    """Yields what the nodes of DTensors hold."""
    if isinstance(tree, dict) and tree.keys() == {"dtensor"}:
        yield tree["dtensor"]
        return
    for node in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        if isinstance(node, dict | list):
            yield from _dtensors_in(node)


def viewed_in(tree: Any) -> list[tuple[str, str]]:
    """Returns type and name of each tensor in a tree that is stored as another type."""
    if isinstance(tree, dict) and tree.keys() == {"viewed"}:
        return [tuple(tree["viewed"])]
    nodes = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [each for node in nodes for each in viewed_in(node)]


def own_name(name: str, rank: int) -> str:
    """Returns the name of a rank's own tensor. No other name has an ``@`` in it."""
    return f"{name}@rank{rank}"


def torch_dtype(spelling: str) -> torch.dtype:
    """Returns the tensor type of a name in a safetensors file."""
    try:
        return _SPELLED[spelling]
    except (KeyError, TypeError):
        raise CorruptCheckpointError(f"expected one of {', '.join(_SPELLED)}, got dtype {spelling!r}") from None
