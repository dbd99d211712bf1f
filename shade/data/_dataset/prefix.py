"""Prefix: the steps whose result is cached, how they are cut from a chain of transforms, and their digest.

A chain is a Compose of torchvision's or a Sequential; anything else is one step. What is cut off runs after the cache,
in a chain of the same kind. Of a data set of image files `ShadeDataset` runs the transform itself, so it can be cut,
too; where it is not cut, it is part of the prefix, because it comes first.

Invariant: the steps before the cache and those after it are the user's, in the user's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torchvision import transforms as v1
from torchvision.transforms import v2

from shade.data._dataset.code_digest import CodeDigest, HeldGeneratorError, UnnameableError
from shade.data._transforms.recognise import recognise
from shade.errors import ConfigError

Step = Callable[[Any], Any]
_CHAINS = (v1.Compose, v2.Compose)
NAMEABLE = "a prefix with a stable name, made of its code, arguments, state and versions"
STABLE = "pass ShadeDataset(…, version=…), a word of yours for what cannot be named, and change it when that changes"


class Prefix:
    """Steps that each sample passes before the cache, in order."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)

    def __call__(self, sample: Any) -> Any:
        for step in self.steps:
            sample = step(sample)
        return sample

    def __str__(self) -> str:
        return ", ".join(map(_name_of, self.steps))

    def digest(self, version: str | None) -> CodeDigest:
        """Returns the digest of code and state; ``version`` stands for what has no stable name. Raises ConfigError for
        what must not be part of a prefix."""
        digest = CodeDigest(version)
        with naming():
            for step in self.steps:
                digest.add(step, _name_of(step))
        return digest


@contextmanager
def naming() -> Iterator[None]:
    """A context in which what a digest refuses becomes a ConfigError with its cure."""
    try:
        yield
    except HeldGeneratorError as error:
        raise random_prefix(str(error)) from error
    except UnnameableError as error:
        raise ConfigError.of(NAMEABLE, str(error), STABLE) from error


def random_prefix(what: str) -> ConfigError:
    """Returns the error for a prefix that does not always give the same result."""
    cure = "move what is random into transform=, which runs after the cache"
    return ConfigError.of("a prefix that always gives the same result", what, cure)


def _name_of(step: Any) -> str:
    """Returns what messages call a step: a function's name, or an object's class."""
    name = getattr(step, "__name__", None)
    return name if isinstance(name, str) else type(step).__name__


def _parts_of(transform: Any) -> list[Step]:
    """Returns the steps of torchvision's Compose or torch's Sequential; anything else is one step."""
    if type(transform) in _CHAINS:
        return list(transform.transforms)
    return list(transform) if type(transform) is torch.nn.Sequential else [transform]


def _cut(transform: Any, num_steps: int) -> tuple[list[Step], Step | None]:
    """Returns the first steps of a chain, and a chain of the others; None if there are no others. Raises ConfigError
    if the chain has fewer steps."""
    steps = [] if transform is None else _parts_of(transform)
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


class PrefixSplit(NamedTuple):
    """The steps that run before the cache, and those that run after it."""

    prefix: tuple[Step, ...] = ()
    """Before the cache, with the data set's own transform if `ShadeDataset` runs it; empty if there is no prefix."""
    rest: tuple[Step, ...] = ()
    """After the cache, what is left of the data set's own transform."""
    uncached: tuple[Step, ...] = ()
    """If there is no cache: after the data set's own transform."""
    transform: Step | None = None
    """After all that."""


def split(prefix: Step | None, prefix_steps: int | None, own: Step | None, transform: Step | None) -> PrefixSplit:
    """Returns which steps are cached. ``own`` is the data set's own transform, if `ShadeDataset` runs it: without
    ``transform`` it is what ``prefix_steps`` counts in.

    Raises ConfigError for a prefix that cannot be called, for both ways to say one, and for a wrong number of steps.
    """
    if prefix is not None and prefix_steps is not None:
        raise ConfigError.of("prefix= or prefix_steps=", "both", "leave one of them out")
    if prefix is None and prefix_steps is None:
        return PrefixSplit(transform=transform)
    if prefix is not None and not callable(prefix):
        raise ConfigError.of("a prefix that takes a sample and returns its result", prefix, "pass a function")
    if prefix_steps is not None and transform is None and own is not None:
        steps, rest = _cut(own, prefix_steps)
        return PrefixSplit(prefix=(*steps,), rest=() if rest is None else (rest,))
    steps, rest = ([prefix], transform) if prefix is not None else _cut(transform, prefix_steps or 0)
    return PrefixSplit((*steps,) if own is None else (own, *steps), (), (*steps,), rest)


def candidates(own: Step | None, transform: Step | None, *, may_fuse: bool) -> dict[str, PrefixSplit]:
    """Returns every way to cache the first steps of a data set's own transform and of the user's, by name, the shortest
    first; none for a chain that runs in one pass over pictures, if these ``may_fuse``."""
    if may_fuse and recognise([step for step in (own, transform) if step is not None]) is not None:
        return {}
    num_own = 0 if own is None else len(_parts_of(own))
    found = [split(None, num_steps, own, None)._replace(transform=transform) for num_steps in range(1, num_own)]
    if own is not None:
        found.append(PrefixSplit((own,), transform=transform))
    num_steps_of_users = 0 if transform is None else len(_parts_of(transform))
    found += [split(None, num_steps, own, transform) for num_steps in range(1, 1 + num_steps_of_users)]
    return {f"prefix of {number} step{'s' * (number > 1)}": each for number, each in enumerate(found, 1)}
