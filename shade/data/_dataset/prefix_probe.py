"""`probe` names a `Prefix`, and refuses it unless it always gives the same result.

The name is made of three things: the digest of code, state and versions (`code_digest`), the libraries and the user's
own code that ran while samples passed, and the results themselves. Each probed sample passes twice: in this thread,
then in another one, in the other order and with other seeds.

Invariant: after `probe` the user's global generators are as they were.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash

from shade.data._dataset.code_digest import CodeDigest, is_own, library_of
from shade.data._dataset.prefix import NAMEABLE, STABLE, Prefix, naming, random_prefix
from shade.data._source import item_codec
from shade.data._transforms.randomness import generator_states, kept_generators, set_generators
from shade.errors import ConfigError, CorruptEntryError

PROBES = 16
"""Samples that pass twice."""
_SOURCES_IN_C = (os.urandom, getattr(os, "getrandom", os.urandom))


@dataclass
class Probed:
    """The results of a prefix for the probed samples."""

    fingerprint: str
    """Digest of code, state, versions and results."""
    payloads: list[bytes]
    """The encoded items."""
    seconds: float
    """Median time of a sample in the prefix."""


@dataclass
class _Watched:
    """Records code that ran, and files that were opened, while samples passed in a thread."""

    codes: dict[types.CodeType, Any] = field(default_factory=dict)
    """Code that ran, and the name of its module."""
    modules: set[str] = field(default_factory=set)
    """Modules of functions in C that ran."""
    calls: set[str] = field(default_factory=set)
    """Sources of random numbers that were called."""
    opened: list[str] = field(default_factory=list)
    """Files that were opened."""

    def call(self, prefix: Prefix, sample: Any) -> Any:
        """Returns the prefix's result; records meanwhile."""
        before, collects = sys.getprofile(), gc.isenabled()
        # Finalizers of other objects must not run, because they would count.
        gc.disable()
        _AUDIT.watched_by[threading.get_ident()] = self
        try:
            sys.setprofile(self._profile)
            return prefix(sample)
        finally:
            sys.setprofile(before)
            del _AUDIT.watched_by[threading.get_ident()]
            if collects:
                gc.enable()

    def _profile(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is not Prefix.__call__.__code__:
            self.codes.setdefault(frame.f_code, frame.f_globals.get("__name__"))
        elif event == "c_call":
            module = getattr(argument, "__module__", None)
            if isinstance(module, str):
                self.modules.add(module)
            if argument in _SOURCES_IN_C:
                self.calls.add(f"os.{argument.__name__}")


class _Audit:
    """Sees files being opened."""

    def __init__(self) -> None:
        self.watched_by: dict[int, _Watched] = {}
        """The watcher of each thread."""
        self._is_added = False

    def add(self) -> None:
        # Only at the first probe: the interpreter keeps an audit hook for ever.
        if not self._is_added:
            sys.addaudithook(self._hook)
            self._is_added = True

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and (watched := self.watched_by.get(threading.get_ident())) is not None:
            path = arguments[0]
            if isinstance(path, (str, bytes, os.PathLike)):
                watched.opened.append(os.fsdecode(path))


_AUDIT = _Audit()


def probed_indices(num_samples: int, num_probes: int = PROBES) -> list[int]:
    """Returns evenly spaced samples; as many as `probe` tries."""
    return sorted({int(index) for index in np.linspace(0, num_samples - 1, min(num_probes, num_samples))})


def probe(
    prefix: Prefix,
    read: Callable[[int], tuple[Any, ...]],
    encode: Callable[[int, tuple[Any, ...]], bytes],
    num_samples: int,
    version: str | None,
) -> Probed:
    """Names a prefix, and refuses it unless it always gives the same result.

    Args:
        prefix: The steps.
        read: Index → item, a tuple whose first part passes the prefix; raises for a sample that cannot be read.
        encode: (index, item) → bytes.
        num_samples: N, of which `PROBES` evenly spaced ones are tried.
        version: The user's word for what has no stable name.

    Returns:
        The prefix's name, the results and what they took.

    Raises:
        ConfigError: The prefix is random, depends on what has no name, or failed on all samples.
    """
    indices = probed_indices(num_samples)
    before, watched = prefix.digest(version), _Watched()
    _AUDIT.add()
    with kept_generators(), ThreadPoolExecutor(1, "shade-prefix-probe") as pool:
        set_generators(1)
        first = _ProbePass(prefix, read, encode, prefix)
        first.run(indices)
        if not first.payload_of:
            raise ConfigError.of(
                "a prefix that can process the samples", f"{type(first.error).__name__}: {first.error}", "mend it"
            ) from first.error
        set_generators(2)
        second = _ProbePass(prefix, read, encode, lambda sample: pool.submit(watched.call, prefix, sample).result())
        second.run(indices[::-1])
    name = str(prefix)
    for index in indices:
        if first.payload_of.get(index) != second.payload_of.get(index):
            failed = f" ({second.error})" if second.error is not None and first.error is None else ""
            raise random_prefix(f"{name} gives another result for index {index} when it runs again{failed}")
    after = prefix.digest(version)
    if version is None and after.hexdigest() != before.hexdigest():
        raise ConfigError.of(
            "a prefix that stays as it is while it runs",
            f"{_first_difference(before, after)} changed",
            f"set up all that it holds before it is wrapped; {STABLE}",
        )
    _check_watched(name, watched, before, first.paths, version)
    before.libraries |= {library for each in [*watched.modules, *watched.codes.values()] if (library := _library(each))}
    with naming():
        before.add_versions()
    # A change that is in no code, such as another codec of the system, gives a new name if it changes a probed result.
    digest = xxhash.xxh3_128(before.hexdigest().encode())
    for index in indices:
        digest.update(first.payload_of.get(index, b"failed"))
    return Probed(digest.hexdigest(), list(first.payload_of.values()), float(np.median(first.seconds)))


def _library(module_name: Any) -> str | None:
    return library_of(module_name) if isinstance(module_name, str) else None


def _first_difference(before: CodeDigest, after: CodeDigest) -> str:
    pairs = itertools.zip_longest(before.trail, after.trail)
    return next((new or old)[0] for old, new in pairs if old != new)


def _check_watched(name: str, watched: _Watched, digest: CodeDigest, paths: set[str], version: str | None) -> None:
    """Refuses what ran and is random, and what no name covers."""
    for source in watched.calls:
        raise random_prefix(f"{name} calls {source}")
    for code, module in watched.codes.items():
        # Refused without a difference between the results: a clock of seconds shows none.
        if code in digest.random_of:
            raise random_prefix(f"{code.co_name} refers to {digest.random_of[code]}")
        if version is None and code not in digest.codes and is_own(code, module):
            raise ConfigError.of(
                NAMEABLE,
                f"{name} runs {code.co_name}, which its code does not mention",
                STABLE,
            )
    opened = [path for path in watched.opened if path not in paths]
    if opened and version is None:
        raise ConfigError.of(
            "a prefix that opens no file, because no name covers its content",
            f"{name} opens {opened[0]}",
            f"read it before and pass what it holds; or {STABLE}",
        )


class _ProbePass:
    """One pass of the probed samples through ``call``; items are read in the caller's thread."""

    def __init__(
        self,
        prefix: Prefix,
        read: Callable[[int], tuple[Any, ...]],
        encode: Callable[[int, tuple[Any, ...]], bytes],
        call: Callable[[Any], Any],
    ) -> None:
        self._name, self._read, self._encode, self._call = str(prefix), read, encode, call
        self.payload_of: dict[int, bytes] = {}
        """Encoded items of the samples that could be read and passed."""
        self.seconds: list[float] = []
        self.paths: set[str] = set()
        """Paths that samples consist of: the data set's name covers these files."""
        self.error: Exception | None = None

    def run(self, indices: list[int]) -> None:
        """Passes the samples; raises ConfigError for one that may not pass."""
        for index in indices:
            try:
                item = self._read(index)
                original = _content(item)
                self.paths |= {str(part) for part in item if isinstance(part, (str, os.PathLike))}
                states, begun = generator_states(), time.perf_counter()
                result = self._call(item[0])
            except Exception as error:  # noqa: BLE001 - the user's code; such a sample decides when its turn comes
                self.error = error
                continue
            self.seconds.append(time.perf_counter() - begun)
            for name, state in generator_states().items():
                # This counts even if the results are equal, because it may matter for the next sample.
                if states.get(name, state) != state:
                    raise random_prefix(f"{self._name} draws from {name}")
            self._check_input(index, item, original)
            self._check_result(result)
            self.payload_of[index] = self._encode(index, (result, *item[1:]))

    def _check_input(self, index: int, item: tuple[Any, ...], original: bytes | None) -> None:
        if original is None or (again := _content(self._read(index))) == original:
            return
        if _content(item) == again:
            raise ConfigError.of(
                "a prefix that leaves the data set's items as they are",
                f"{self._name} changes its input in place",
                "let it change a copy, such as sample.clone()",
            )
        raise ConfigError.of(
            "a data set whose items are the same when they are read again",
            f"another item under index {index}",
            "move what is random in it into transform=, which runs after the cache",
        )

    def _check_result(self, result: Any) -> None:
        for tensor in _tensors(result):
            if tensor.requires_grad:
                what, cure = "needs a gradient, which a cache cannot keep", "run it under torch.no_grad()"
            elif tensor.device.type != "cpu":
                what, cure = f"is on {tensor.device}", "end it with .cpu(), and copy batches to the device"
            else:
                continue
            raise ConfigError.of(
                "a prefix whose result is data in the CPU's memory", f"{self._name}, whose result {what}", cure
            )


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _content(item: Any) -> bytes | None:
    """Returns an item's content; None if it is of a kind that no codec knows."""
    try:
        return item_codec.encode(item)
    except (ConfigError, CorruptEntryError):
        return None
