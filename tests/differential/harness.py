"""Plays generated training scripts on shade and on plain PyTorch, and counts what came out of them."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

PROGRESS_SECONDS = 5.0


class Outcome(Enum):
    """What a script came to."""

    SAME = "the same as plain PyTorch"
    REFUSED = "refused by name before the first step"
    DIFFERENT = "neither"


@dataclass(frozen=True)
class Verdict:
    """The outcome of one script."""

    outcome: Outcome
    detail: str = ""
    """REFUSED: which refusal, as a few words that stay the same. DIFFERENT: what differs, with both values."""


@dataclass(frozen=True)
class Plane:
    """One part of shade with a generator of scripts for it."""

    name: str
    scripts: SearchStrategy[Any]
    """Draws scripts: frozen dataclasses, whose repr can be evaluated in `names`."""
    play: Callable[[Any], Verdict]
    """Runs a script on shade and on plain PyTorch and compares; raises nothing but what is a fault of the test."""
    faults: Mapping[str, Callable[[], AbstractContextManager[None]]]
    """Known faults by name: inside the context, shade has the fault again. The generator has to find it."""
    names: Mapping[str, Any]
    """What the repr of a script refers to."""
    kinds: Mapping[str, SearchStrategy[Any]] = field(default_factory=dict)
    """By fault, where not from `scripts`: scripts of the kind that can show it."""


@dataclass
class Tally:
    """What a number of scripts came to."""

    played: int = 0
    same: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    difference: str = ""
    """The smallest script that was found to differ, and how; empty if none differs."""

    def __str__(self) -> str:
        refusals = ", ".join(f"{count} {name}" for name, count in self.refused.most_common())
        lines = [f"{self.played} scripts: {self.same} the same, {self.refused.total()} refused by name"]
        return "\n".join([*lines, *filter(None, [refusals and f"refusals: {refusals}", self.difference])])


class ScriptDiffers(AssertionError):
    """A script came to something that is neither plain PyTorch's result nor a refusal."""


def search(
    plane: Plane,
    count: int,
    seed_number: int,
    report: Callable[[str], None] = lambda line: None,
    *,
    shrinks: bool = True,
) -> Tally:
    """Plays `count` scripts; stops at the first that differs and looks for the smallest that differs like it."""
    tally, shown = Tally(), time.monotonic()

    def played(script: Any) -> None:
        nonlocal shown
        if tally.difference and not shrinks:  # Hypothesis plays what it has found again, at the end
            raise ScriptDiffers(tally.difference)
        verdict = plane.play(script)
        if not tally.difference:
            tally.played += 1
            tally.same += verdict.outcome is Outcome.SAME
            tally.refused.update([verdict.detail] if verdict.outcome is Outcome.REFUSED else [])
        if time.monotonic() - shown > PROGRESS_SECONDS:
            shown = time.monotonic()
            report(
                f"{plane.name}: {tally.played} of {count}" + (", one differs: shrinking" if tally.difference else "")
            )
        if verdict.outcome is Outcome.DIFFERENT:
            tally.difference = f"{script!r}\n{verdict.detail}"
            raise ScriptDiffers(tally.difference)

    bounded = settings(
        max_examples=count,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink) if shrinks else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    try:
        seed(seed_number)(bounded(given(plane.scripts)(played)))()
    except ScriptDiffers as differs:
        tally.difference = str(differs)
    except Flaky:  # it differs in some plays only, as races do: `tally` has the one that was seen
        if not tally.difference:
            raise
    return tally


@contextlib.contextmanager
def together(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    """Several parts of one planted fault."""
    with contextlib.ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


def look_for(plane: Plane, fault: str, count: int, seed_number: int) -> Tally:
    """Plays up to `count` scripts with a fault that is planted again, to the first that shows it."""
    scripts = plane.kinds.get(fault, plane.scripts)
    with plane.faults[fault]():
        return search(replace(plane, scripts=scripts), count, seed_number, shrinks=False)


def found(plane: Plane, fault: str, count: int, seed_number: int) -> bool:
    """Whether `count` scripts show a fault that is planted again."""
    return bool(look_for(plane, fault, count, seed_number).difference)
