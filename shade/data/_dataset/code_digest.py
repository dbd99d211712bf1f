"""CodeDigest: the name of a function, by all that decides its result: code, arguments, state, versions of libraries.

The user's own code is followed: bytecode and constants, defaults, closures, the globals that the bytecode loads,
methods of its classes, and attributes of objects down to the bytes of tensors. File names, line numbers and comments do
not count. What is installed (a folder with ``*.dist-info``) is named by its version. What has neither code nor a
version has no stable name.

Invariant: equal digests mean equal bytecode, equal state and equal versions of all that was reached.
"""

from __future__ import annotations

import collections
import dis
import enum
import functools
import glob
import importlib
import importlib.metadata
import logging
import os
import pathlib
import random
import re
import sys
import sysconfig
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from PIL import Image

from shade.data._source import item_codec

PYTHON = "python"
_ATOMS = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, slice)
_BY_REPR = (torch.dtype, torch.device, torch.layout, torch.memory_format, np.dtype, types.GenericAlias)
_BY_TYPE = (type(threading.Lock()), type(threading.RLock()), types.GetSetDescriptorType)
_DESCRIPTORS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator, torch.Generator)
_CLASS_KEYS = {
    *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__annotate__"),
    *("__annotations_cache__", "__annotate_func__", "__firstlineno__", "__static_attributes__", "__parameters__"),
    *("__orig_bases__", "__abstractmethods__", "__slotnames__", "_abc_impl"),
    *("__dataclass_fields__", "__dataclass_params__"),
}
_RANDOM_MODULES = ("random", "secrets", "uuid", "numpy.random", "torch.random", "torch.cuda.random", "torch.nn.init")
_RANDOM_METHODS = {
    *("uniform_", "normal_", "random_", "bernoulli_", "exponential_", "geometric_", "cauchy_", "log_normal_"),
    *("bernoulli", "multinomial"),
}
_RANDOM = {
    "builtins": ("id", "hash", "input"),
    "time": (
        *("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "ctime"),
        *("process_time_ns", "thread_time", "thread_time_ns", "localtime", "gmtime", "asctime", "strftime"),
    ),
    "datetime": ("now", "utcnow", "today"),
    "os": ("urandom", "getrandom", "getpid", "getppid", "times", "getloadavg"),
    "threading": ("get_ident", "get_native_id", "current_thread"),
    "multiprocessing": ("current_process",),
    "socket": ("gethostname",),
    "torch.utils.data": ("get_worker_info",),
    "torch": (
        *("rand", "randn", "randint", "randperm", "bernoulli", "normal", "multinomial", "poisson", "rand_like"),
        *("randn_like", "randint_like", "seed", "initial_seed", "dropout"),
    ),
    "torch.nn.functional": ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "gumbel_softmax"),
}


class UnnameableError(Exception):
    """Something has no stable name; the text says what, and why."""


class HeldGeneratorError(Exception):
    """A generator of random numbers is part of the state; the text says where."""


@functools.cache
def library_of(module_name: str) -> str | None:
    """Returns the library that a module belongs to: `PYTHON`, or its top-level name if it is installed; None if it is
    the user's own."""
    top = module_name.partition(".")[0]
    module = sys.modules.get(top)
    folders = list(getattr(module, "__path__", []))
    file = getattr(module, "__file__", None) or (os.path.join(folders[0], "__init__.py") if folders else None)
    if file is None:
        return PYTHON if top in sys.stdlib_module_names else None
    root = os.path.dirname(os.path.dirname(file) if folders else file)
    if top in sys.stdlib_module_names:
        places = [os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
        if os.path.realpath(root) in [*places, *(os.path.join(place, "lib-dynload") for place in places)]:
            return PYTHON
    return top if glob.glob(os.path.join(glob.escape(root), "*.dist-info")) else None


def is_own(code: types.CodeType, module_name: Any) -> bool:
    """Returns whether code, run with the globals of that module, is the user's own and of no library."""
    name = module_name if isinstance(module_name, str) else "__main__"
    return not code.co_filename.startswith("<frozen") and library_of(name) is None


def version_of(library: str) -> str | None:
    """Returns the version of a library; None if nothing says it."""
    if library == PYTHON:
        return f"{sys.implementation.cache_tag} {sys.version}"
    version = getattr(sys.modules.get(library), "__version__", None)
    if isinstance(version, str):
        return version
    names = importlib.metadata.packages_distributions().get(library, [])
    return " ".join(importlib.metadata.version(name) for name in names) or None


class CodeDigest:
    """Digests values, one after the other, with `add`.

    A ``version`` stands for what has no stable name; without it such a thing raises UnnameableError. A generator of
    random numbers in the state raises HeldGeneratorError.
    """

    def __init__(self, version: str | None = None) -> None:
        self._version = version
        self._digest = xxhash.xxh3_128(repr(version).encode())
        self._numbers: dict[int, int] = {}
        self._held: list[Any] = []
        self._names: set[str] = set()
        self.trail: list[tuple[str, int]] = []
        """(place, digest up to there) of each part: the first difference of two trails says what changed."""
        self.libraries: set[str] = {PYTHON}
        """Libraries of all that was reached."""
        self.codes: set[types.CodeType] = set()
        """The user's own code that was reached."""
        self.random_of: dict[types.CodeType, str] = {}
        """For code that refers to something which gives other values at other times: its name."""

    def hexdigest(self) -> str:
        """Returns the digest of all that was added, without the libraries' versions."""
        return self._digest.hexdigest()

    def add(self, value: Any, place: str) -> None:
        """Adds a value, which messages call ``place``."""
        try:
            self._add(value, place)
        except RecursionError:
            self._unnameable(place, "too many objects in each other")

    def add_versions(self) -> None:
        """Adds the versions of ``libraries``, and what torch's arithmetic depends on besides."""
        for library in sorted(self.libraries):
            version = version_of(library)
            if version is None:
                self._unnameable(library, "a library of unknown version")
            self._emit(library, f"version {version}")
        if "torch" in self.libraries:
            self._emit("torch", f"{torch.get_default_dtype()} {torch.backends.cpu.get_cpu_capability()}")

    def _emit(self, place: str, text: str, content: Any = b"") -> None:
        head = text.encode(errors="surrogatepass")
        self._digest.update(f"{len(head)} {len(content)} ".encode())
        self._digest.update(head)
        self._digest.update(content)
        self.trail.append((place, self._digest.intdigest()))

    def _unnameable(self, place: str, why: str) -> None:
        if self._version is None:
            raise UnnameableError(f"{place}: {why}")
        self._emit(place, "")

    def _add(self, value: Any, place: str) -> None:
        if isinstance(value, _GENERATORS) or isinstance(getattr(value, "__self__", None), _GENERATORS):
            raise HeldGeneratorError(f"{place} holds a generator of random numbers")
        for kinds, text_of in _BY_TEXT:
            if isinstance(value, kinds):
                return self._emit(place, f"{type(value).__name__} {text_of(value)}")
        if isinstance(value, types.ModuleType):
            return self._add_module(value, place)
        if self._add_by_name(value, place):
            return None
        # Equal tuples of constants may be one object or several.
        if type(value) is not tuple:
            if id(value) in self._numbers:
                return self._emit(place, f"again {self._numbers[id(value)]}")
            self._numbers[id(value)] = len(self._numbers)
            # An id may be used again once its object is gone.
            self._held.append(value)
        for kinds, add in _BY_KIND:
            if isinstance(value, kinds):
                return add(self, value, place)
        for kinds, parts_of in _BY_PARTS:
            if isinstance(value, kinds):
                self._emit(place, type(value).__name__)
                return self._add(parts_of(value), place)
        if hasattr(value, "__next__"):
            return self._unnameable(place, f"the iterator {type(value).__qualname__}, which changes as it is read")
        return self._add_object(value, place)

    def _add_by_name(self, value: Any, place: str) -> bool:
        """Adds what a library has under a name of its own, such as a class, a function or a ufunc; returns whether."""
        if isinstance(value, _DESCRIPTORS):
            self._emit(place, f"method {value.__name__}")
            self._add(value.__objclass__, place)
            return True
        module = "numpy" if isinstance(value, np.ufunc) else getattr(value, "__module__", None)
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
        if not isinstance(module, str) or not isinstance(name, str):
            return False
        library = library_of(module)
        if library is None:
            return False
        found: Any = sys.modules.get(module)
        for part in (name if isinstance(value, types.FunctionType) else name.rpartition(".")[2]).split("."):
            found = getattr(found, part, None)
        if found is not value and not isinstance(value, (np.ufunc, type)):
            return False
        self.libraries.add(library)
        self._emit(place, f"{module}.{name}")
        return True

    def _add_module(self, module: types.ModuleType, place: str) -> None:
        library = library_of(module.__name__)
        if library is not None:
            self.libraries.add(library)
            return self._emit(place, module.__name__)
        if not self._names:
            return self._unnameable(place, f"the module {module.__name__}")
        self._emit(place, "module")
        for name in sorted(self._names & vars(module).keys()):
            self._add(vars(module)[name], f"{place}.{name}")
        return None

    def _add_tensor(self, value: torch.Tensor, place: str) -> None:
        if not item_codec.is_dense(value) or value.is_quantized or value.is_meta:
            return self._unnameable(place, "a tensor that is not dense")
        device = torch.cuda.get_device_name(value.device) if value.is_cuda else value.device.type
        head = f"{type(value).__name__} {value.dtype} {tuple(value.shape)} {device}"
        return self._emit(place, head, item_codec.element_bytes(value).data)

    def _add_image(self, value: Image.Image, place: str) -> None:
        self._emit(place, "image", item_codec.encode(value))

    def _add_array(self, value: Any, place: str) -> None:
        if value.dtype.hasobject:
            self._emit(place, f"array {value.shape}")
            return self._add(value.tolist(), place)
        flat = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return self._emit(place, f"array {value.dtype.descr} {value.shape}", flat.data)

    def _add_class(self, kind: type, place: str) -> None:
        self._emit(place, f"class {kind.__name__}")
        for base in kind.__mro__:
            library = library_of(base.__module__)
            if library is not None:
                self.libraries.add(library)
                self._emit(place, f"{base.__module__}.{base.__qualname__}")
                continue
            for name, value in sorted(vars(base).items()):
                if name not in _CLASS_KEYS and not isinstance(value, types.MemberDescriptorType):
                    self._emit(place, name)
                    self._add(value, f"{place}.{name}")

    def _add_function(self, function: types.FunctionType, place: str) -> None:
        if is_own(function.__code__, function.__globals__.get("__name__")):
            self._add_code(function.__code__, function.__globals__, place)
            self._add((function.__defaults__, function.__kwdefaults__), f"{place}'s defaults")
        else:
            self._add_library_code(function, place)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with self._named(function.__code__):
                try:
                    content = cell.cell_contents
                except ValueError:
                    self._emit(place, f"{name} is empty")
                    continue
                self._add(content, f"{place}.{name}")
        if vars(function):
            self._add({key: value for key, value in vars(function).items() if key != "__wrapped__"}, place)

    def _add_library_code(self, function: types.FunctionType, place: str) -> None:
        """Adds a function of a library that has no name of its own, such as the inner one of a decorator."""
        module = str(function.__globals__.get("__name__"))
        self.libraries.add(library_of(module) or PYTHON)
        self._emit(place, f"{module} {function.__code__.co_name}")

    def _named(self, code: types.CodeType) -> Any:
        # The user's own modules count by the names that code mentions.
        return _Names(self, set(_words_of(code)))

    def _add_code(self, code: types.CodeType, names: dict[str, Any], place: str) -> None:
        self.codes.add(code)
        shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
        symbols = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        self._emit(place, f"{shape} {symbols}", code.co_code + getattr(code, "co_exceptiontable", b""))
        for const in code.co_consts:
            if isinstance(const, types.CodeType):
                self._add_code(const, names, place)
            else:
                self._add(const, place)
        with self._named(code):
            for name, value in _references(code, names):
                # By code object, because a module's `__init__` may draw its weights while its `forward` draws nothing.
                if (reason := _random_name(name, value)) is not None:
                    self.random_of.setdefault(code, reason)
                    self._emit(place, reason)
                elif value is os.environ:
                    self._unnameable(place, "it refers to os.environ")
                elif value is not _METHOD:
                    self._emit(place, name)
                    self._add(value, f"{place}.{name}")

    def _add_container(self, value: Any, place: str) -> None:
        kind = type(value)
        self._emit(place, f"{kind.__name__} {len(value)}")
        if isinstance(value, dict):
            for key, part in value.items():
                self._add(key, f"a key of {place}")
                self._add(part, f"{place}.{key}" if isinstance(key, str) else place)
        elif isinstance(value, (set, frozenset)):
            # The order of a set differs between processes, so its parts are digested apart and sorted.
            self._emit(place, " ".join(sorted(self._apart(part, place) for part in value)))
        else:
            for part in value:
                self._add(part, place)
        if kind.__module__ not in ("builtins", "collections") or isinstance(value, collections.defaultdict):
            self._add(kind, place)
            self._add(getattr(value, "default_factory", None), place)
            self._add(getattr(value, "__dict__", {}), place)

    def _apart(self, value: Any, place: str) -> str:
        other = CodeDigest(self._version)
        other._names = self._names
        other.add(value, place)
        self.libraries |= other.libraries
        self.codes |= other.codes
        self.random_of |= other.random_of
        return other.hexdigest()

    def _add_object(self, value: Any, place: str) -> None:
        """Adds an object by its class and attributes; by what it pickles, if its class says how."""
        kind = type(value)
        self._add(kind, place)
        has_own_way = any(
            getattr(kind, name, None) is not getattr(object, name, None)
            for name in ("__reduce_ex__", "__reduce__", "__getstate__")
        )
        try:
            # Refuses what has a state in C and does not pickle.
            reduced = value.__reduce_ex__(2)
        except Exception:  # noqa: BLE001 - the object's own code
            return self._unnameable(place, f"{kind.__module__}.{kind.__qualname__} has a state that does not pickle")
        if has_own_way and isinstance(reduced, str):
            self._emit(place, reduced)
        elif has_own_way:
            for part in reduced[:5]:
                self._add(part if isinstance(part, (dict, tuple)) or not hasattr(part, "__next__") else [*part], place)
        if not has_own_way or library_of(kind.__module__) is None:
            for name, part in _attributes(value).items():
                self._emit(f"{place}.{name}", name)
                self._add(part, f"{place}.{name}")
        return None


def _words_of(code: types.CodeType) -> Iterator[str]:
    """Yields the names and the strings of code, and of code in it."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, str):
            yield const
        elif isinstance(const, types.CodeType):
            yield from _words_of(const)


class _Names:
    def __init__(self, digest: CodeDigest, names: set[str]) -> None:
        self._digest, self._names = digest, names

    def __enter__(self) -> None:
        self._before, self._digest._names = self._digest._names, self._names

    def __exit__(self, *raised: object) -> None:
        self._digest._names = self._before


def _attributes(value: Any) -> dict[str, Any]:
    """Returns an object's attributes, those in slots too."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            is_private = name.startswith("__") and not name.endswith("__")
            mangled = f"_{kind.__name__.lstrip('_')}{name}" if is_private else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, mangled):
                found[mangled] = getattr(value, mangled)
    return found


_BY_TEXT: list[tuple[Any, Callable[[Any], Any]]] = [
    (enum.Enum, lambda value: f"{type(value).__qualname__}.{value.name}"),
    (_ATOMS, repr),
    (_BY_REPR, repr),
    (_BY_TYPE, lambda value: ""),
    (re.Pattern, lambda value: f"{value.pattern!r} {value.flags}"),
    (pathlib.PurePath, str),
    (logging.Logger, lambda value: value.name),
]
"""Kinds of values that are named by a text, in this order."""
_BY_KIND: list[tuple[Any, Callable[[CodeDigest, Any, str], None]]] = [
    (torch.Tensor, CodeDigest._add_tensor),
    ((np.ndarray, np.generic), CodeDigest._add_array),
    (Image.Image, CodeDigest._add_image),
    (type, CodeDigest._add_class),
    (types.FunctionType, CodeDigest._add_function),
    (_CONTAINERS, CodeDigest._add_container),
]
_BY_PARTS: list[tuple[Any, Callable[[Any], Any]]] = [
    (types.MethodType, lambda value: (value.__self__, value.__func__)),
    (types.BuiltinFunctionType, lambda value: (value.__name__, _owner_of(value))),
    (functools.partial, lambda value: (value.func, value.args, value.keywords, vars(value))),
    (property, lambda value: (value.fget, value.fset, value.fdel)),
    ((classmethod, staticmethod), lambda value: value.__func__),
    (functools._lru_cache_wrapper, lambda value: value.__wrapped__),
    (types.MappingProxyType, dict),
]
"""Kinds of values that are named by their parts."""


def _owner_of(function: types.BuiltinFunctionType) -> Any:
    """Returns the object of a method in C; for a function in C, what has no stable name."""
    owner = function.__self__
    return iter(()) if owner is None or isinstance(owner, types.ModuleType) else owner


_METHOD = object()
"""Stands for the value of an attribute whose object is not known before the code runs."""


def _references(code: types.CodeType, names: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, value) of the globals, and of the modules' attributes, that code loads or imports."""
    found: Any = None
    dotted, is_whole, imported = "", False, dict[str, tuple[str, Any]]()
    taken: tuple[str, Any] | None = None
    for step in dis.get_instructions(code):
        name, operation = step.argval, step.opname
        if operation in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(found, (types.ModuleType, type)):
            dotted, found = f"{dotted}.{name}", getattr(found, name, None)
            yield dotted, found
        elif operation in ("LOAD_ATTR", "LOAD_METHOD"):
            found = None
            yield name, _METHOD
        elif operation in ("LOAD_GLOBAL", "LOAD_NAME"):
            dotted, found = name, names.get(name, _builtin(names, name))
            yield dotted, found
        elif operation == "IMPORT_NAME":
            dotted, found = name, _imported(name, names, is_whole=is_whole)
            yield dotted, found
        elif operation == "IMPORT_FROM":
            taken = f"{dotted}.{name}", getattr(found, name, None)
            yield taken
        elif operation.startswith("STORE_") and isinstance(name, str):
            imported[name], taken = taken or (dotted, found), None
        elif operation.startswith(("LOAD_FAST", "LOAD_DEREF")) and name in imported:
            dotted, found = imported[name]
        elif operation not in ("CACHE", "EXTENDED_ARG", "PUSH_NULL"):
            found = None
        is_whole = operation == "LOAD_CONST" and name is None


def _builtin(names: dict[str, Any], name: str) -> Any:
    builtins = names.get("__builtins__", {})
    return (vars(builtins) if isinstance(builtins, types.ModuleType) else builtins).get(name, f"no {name}")


def _imported(name: str, names: dict[str, Any], *, is_whole: bool) -> Any:
    """Returns the module that an import statement would give; None if it cannot be imported."""
    try:
        if not name and names.get("__package__"):
            return importlib.import_module(names["__package__"])
        module = importlib.import_module(name)
    except Exception:  # noqa: BLE001 - the module's own code
        return None
    return sys.modules[name.partition(".")[0]] if is_whole else module


def _random_name(dotted: str, value: Any) -> str | None:
    """Returns the name of what gives other values at other times; None for anything else."""
    name = dotted.rpartition(".")[2]
    if value is _METHOD:
        return f"Tensor.{name}" if name in _RANDOM_METHODS else None
    if isinstance(value, types.ModuleType):
        return None
    owner = getattr(value, "__self__", None)
    if isinstance(owner, _GENERATORS):
        return dotted if "." in dotted else f"{type(owner).__module__}.{name}"
    if any(getattr(value, "__module__", None) == module for module in _RANDOM_MODULES) and callable(value):
        return dotted if "." in dotted else f"{value.__module__}.{name}"
    for module, others in _RANDOM.items():
        if any(value is each for other in others for each in _values(module, other)) and value is not None:
            return name if module == "builtins" else f"{module}.{name}"
    if name in _RANDOM["datetime"] and getattr(owner, "__module__", None) == "datetime":
        return dotted
    return None


def _values(module: str, name: str) -> list[Callable[..., Any]]:
    found = getattr(sys.modules.get(module), name, None)
    return [] if found is None else [found]
