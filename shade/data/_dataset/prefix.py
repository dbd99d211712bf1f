"""Prefix: the steps whose result is cached; `probe` names them and refuses them unless they always give one result.

The name is made of three things, because none of them sees everything: the digest of code, state and versions
(`code_digest`), the libraries and the user's own code that ran while samples passed, and the results themselves. So a
change that is in no code, such as another codec of the system, still gives a new name if it changes a probed result.

Each probed sample passes twice: in this thread, then in another one, in the other order and with other seeds. A draw
from a global generator counts even if the results are equal, because it may matter for the next sample. Code that ran
and refers to the time or a source of random numbers is refused without a difference: a clock of seconds shows none.

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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torchvision import transforms as v1
from torchvision.transforms import v2

from shade.data._dataset import item_codec
from shade.data._dataset.code_digest import (
    CodeDigest,
    HeldGeneratorError,
    UnnameableError,
    is_own,
    library_of,
)
from shade.data._transforms.randomness import generator_states, kept_generators, set_generators
from shade.data._transforms.recognise import recognise
from shade.errors import ConfigError, CorruptEntryError

Step = Callable[[Any], Any]
PROBES = 16
"""Samples that pass twice."""
_CHAINS = (v1.Compose, v2.Compose)
_SOURCES_IN_C = (os.urandom, getattr(os, "getrandom", os.urandom))
_OUTSIDE = "move what is random into transform=, which runs after the cache"
_STABLE = "pass ShadeDataset(…, version=…), a word of yours for what cannot be named, and change it when that changes"


class Prefix:
    """Steps that each sample passes before the cache, in order."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)

    def __call__(self, sample: Any) -> Any:
        for step in self.steps:
            sample = step(sample)
        return sample

    def __str__(self) -> str:
        return ", ".join(map(name_of_step, self.steps))


def name_of_step(step: Any) -> str:
    """Returns what messages call a step: a function's name, or an object's class."""
    name = getattr(step, "__name__", None)
    return name if isinstance(name, str) else type(step).__name__


def parts_of(transform: Any) -> list[Step]:
    """Returns the steps of torchvision's Compose or torch's Sequential; anything else is one step."""
    if type(transform) in _CHAINS:
        return list(transform.transforms)
    return list(transform) if type(transform) is torch.nn.Sequential else [transform]


def _cut(transform: Any, num_steps: int) -> tuple[list[Step], Step | None]:
    """Returns the first steps of a chain, and a chain of the others; None if there are no others. Raises ConfigError
    if the chain has fewer steps."""
    steps = [] if transform is None else parts_of(transform)
    if isinstance(num_steps, bool) or not isinstance(num_steps, int) or not 1 <= num_steps <= len(steps):
        what = f"prefix_steps from 1 to {len(steps)}, the steps of transform=" if steps else "a transform= to cut"
        got = num_steps if steps else f"prefix_steps={num_steps!r} without one"
        raise ConfigError.of(what, got, "pass transform=Compose([…]), or the step itself as prefix=")
    rest = steps[num_steps:]
    if not rest:
        return steps, None
    is_sequential = type(transform) is torch.nn.Sequential
    chain: Step = torch.nn.Sequential(*rest) if is_sequential else type(transform)(rest)  # type: ignore[call-overload]
    return steps[:num_steps], chain


class Split(NamedTuple):
    """What runs before the cache, and what after it."""

    prefix: tuple[Step, ...] = ()
    """Before the cache, with the data set's own transform if `ShadeDataset` runs it; empty if there is no prefix."""
    rest: tuple[Step, ...] = ()
    """After the cache, what is left of the data set's own transform."""
    uncached: tuple[Step, ...] = ()
    """If there is no cache: after the data set's own transform."""
    transform: Step | None = None
    """After all that."""


def split(prefix: Step | None, prefix_steps: int | None, own: Step | None, transform: Step | None) -> Split:
    """Returns which steps are cached. ``own`` is the data set's own transform, if `ShadeDataset` runs it: without
    ``transform`` it is what ``prefix_steps`` counts in.

    Raises ConfigError for a prefix that cannot be called, for both ways to say one, and for a wrong number of steps.
    """
    if prefix is not None and prefix_steps is not None:
        raise ConfigError.of("prefix= or prefix_steps=", "both", "leave one of them out")
    if prefix is None and prefix_steps is None:
        return Split(transform=transform)
    if prefix is not None and not callable(prefix):
        raise ConfigError.of("a prefix that takes a sample and returns its result", prefix, "pass a function")
    if prefix_steps is not None and transform is None and own is not None:
        steps, rest = _cut(own, prefix_steps)
        return Split(prefix=(*steps,), rest=() if rest is None else (rest,))
    steps, rest = ([prefix], transform) if prefix is not None else _cut(transform, prefix_steps or 0)
    return Split((*steps,) if own is None else (own, *steps), (), (*steps,), rest)


def candidates(own: Step | None, transform: Step | None) -> dict[str, Split]:
    """Returns every way to cache the first steps of a data set's own transform and of the user's, by name, the shortest
    first; none for a chain that runs in one pass."""
    if recognise([step for step in (own, transform) if step is not None]) is not None:
        return {}
    num_own = 0 if own is None else len(parts_of(own))
    found = [split(None, num_steps, own, None)._replace(transform=transform) for num_steps in range(1, num_own)]
    if own is not None:
        found.append(Split((own,), transform=transform))
    num_steps_of_users = 0 if transform is None else len(parts_of(transform))
    found += [split(None, num_steps, own, transform) for num_steps in range(1, 1 + num_steps_of_users)]
    return {f"prefix of {number} step{'s' * (number > 1)}": each for number, each in enumerate(found, 1)}


@dataclass
class Probed:
    """What a prefix gave for the probed samples."""

    fingerprint: str
    """Of code, state, versions and results."""
    payloads: list[bytes]
    """The encoded items."""
    seconds: float
    """Median time of a sample in the prefix."""


@dataclass
class _Watched:
    """What ran and what was opened while samples passed in a thread."""

    codes: dict[types.CodeType, Any] = field(default_factory=dict)
    """Code that ran, and the name of its module."""
    modules: set[str] = field(default_factory=set)
    """Modules of functions in C that ran."""
    calls: set[str] = field(default_factory=set)
    """Sources of random numbers that were called."""
    opened: list[str] = field(default_factory=list)
    """Files that were opened."""

    def call(self, prefix: Prefix, sample: Any) -> Any:
        """Returns the prefix's result; records meanwhile. Finalizers of other objects do not run, so they do not
        count."""
        before, collects = sys.getprofile(), gc.isenabled()
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
    """Sees files being opened. The interpreter keeps an audit hook for ever; it is added at the first probe."""

    def __init__(self) -> None:
        self.watched_by: dict[int, _Watched] = {}
        """Who watches, by thread."""
        self._is_added = False

    def add(self) -> None:
        """Adds the hook, once."""
        if not self._is_added:
            sys.addaudithook(self._hook)
            self._is_added = True

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and (watched := self.watched_by.get(threading.get_ident())) is not None:
            path = arguments[0]
            if isinstance(path, (str, bytes, os.PathLike)):
                watched.opened.append(os.fsdecode(path))


_AUDIT = _Audit()


def probed_indices(num_samples: int) -> list[int]:
    """Returns the samples that `probe` tries."""
    return sorted({int(index) for index in np.linspace(0, num_samples - 1, min(PROBES, num_samples))})


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

    Raises:
        ConfigError: The prefix is random, depends on what has no name, or failed on all samples.
    """
    indices = probed_indices(num_samples)
    before, watched = _named(prefix, version), _Watched()
    _AUDIT.add()
    with kept_generators(), ThreadPoolExecutor(1, "shade-prefix-probe") as pool:
        set_generators(1)
        first = _Pass(prefix, read, encode, prefix)
        first.run(indices)
        if not first.payload_of:
            raise ConfigError.of(
                "a prefix that can process the samples", f"{type(first.error).__name__}: {first.error}", "mend it"
            ) from first.error
        set_generators(2)
        second = _Pass(prefix, read, encode, lambda sample: pool.submit(watched.call, prefix, sample).result())
        second.run(indices[::-1])
    name = str(prefix)
    for index in indices:
        if first.payload_of.get(index) != second.payload_of.get(index):
            failed = f" ({second.error})" if second.error is not None and first.error is None else ""
            raise _is_random(f"{name} gives another result for index {index} when it runs again{failed}")
    after = _named(prefix, version)
    if version is None and after.hexdigest() != before.hexdigest():
        raise ConfigError.of(
            "a prefix that stays as it is while it runs",
            f"{_first_difference(before, after)} changed",
            f"set up all that it holds before it is wrapped; {_STABLE}",
        )
    _check_watched(name, watched, before, first.paths, version)
    before.libraries |= {library for each in [*watched.modules, *watched.codes.values()] if (library := _library(each))}
    digest = xxhash.xxh3_128(_nameable(before.add_versions, before).encode())
    for index in indices:
        digest.update(first.payload_of.get(index, b"failed"))
    return Probed(digest.hexdigest(), list(first.payload_of.values()), float(np.median(first.seconds)))


def _named(prefix: Prefix, version: str | None) -> CodeDigest:
    digest = CodeDigest(version)
    for step in prefix.steps:
        _nameable(lambda step=step: digest.add(step, name_of_step(step)), digest)  # type: ignore[misc]
    return digest


def _nameable(add: Callable[[], None], digest: CodeDigest) -> str:
    """Adds to a digest, and returns it; raises ConfigError for what must not be part of a prefix."""
    try:
        add()
    except HeldGeneratorError as error:
        raise _is_random(str(error)) from error
    except UnnameableError as error:
        raise ConfigError.of(
            "a prefix with a stable name, made of its code, arguments, state and versions", str(error), _STABLE
        ) from error
    return digest.hexdigest()


def _library(module_name: Any) -> str | None:
    return library_of(module_name) if isinstance(module_name, str) else None


def _is_random(what: str) -> ConfigError:
    return ConfigError.of("a prefix that always gives the same result", what, _OUTSIDE)


def _first_difference(before: CodeDigest, after: CodeDigest) -> str:
    pairs = itertools.zip_longest(before.trail, after.trail)
    return next((new or old)[0] for old, new in pairs if old != new)


def _check_watched(name: str, watched: _Watched, digest: CodeDigest, paths: set[str], version: str | None) -> None:
    """Refuses what ran and is random, and what no name covers."""
    for source in watched.calls:
        raise _is_random(f"{name} calls {source}")
    for code, module in watched.codes.items():
        if code in digest.random_of:
            raise _is_random(f"{code.co_name} refers to {digest.random_of[code]}")
        if version is None and code not in digest.codes and is_own(code, module):
            raise ConfigError.of(
                "a prefix with a stable name, made of its code, arguments, state and versions",
                f"{name} runs {code.co_name}, which its code does not mention",
                _STABLE,
            )
    opened = [path for path in watched.opened if path not in paths]
    if opened and version is None:
        raise ConfigError.of(
            "a prefix that opens no file, because no name covers its content",
            f"{name} opens {opened[0]}",
            f"read it before and pass what it holds; or {_STABLE}",
        )


class _Pass:
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
                if states.get(name, state) != state:
                    raise _is_random(f"{self._name} draws from {name}")
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
