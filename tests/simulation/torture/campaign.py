"""All scenarios there are: every setup, every episode, 1 to 3 ranks, every operation, every way in which it can fail.

Numbered in a fixed order, so that a seed and a number are all it takes to see one again. The list comes from running
each episode once without a fault and noting its operations; the seed decides how the processes' operations interleave,
and what tears and flips.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.simulation.torture.bench import Setup
from tests.simulation.torture.scenario import SETUPS, Stand, Verdict, episodes, play
from tests.simulation.torture.world import Fault, Operation

RANKS: Final = (1, 2, 3)
_SERVER_FAULTS: Final = ("server emptied", "server away", "server gone", "partition")


@dataclass(frozen=True)
class Scenario:
    """One episode with one fault."""

    number: int
    setup: Setup
    world_size: int
    episode: str
    fault: Fault
    operation: Operation
    """That goes wrong."""

    def __str__(self) -> str:
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        return f"{self.setup.name}, {ranks}, {self.episode}; {self.operation}: {self.fault}"


@dataclass
class Report:
    """What a campaign came to."""

    seed: int
    num_scenarios: int = 0
    num_operations: int = 0
    """Of all scenarios together."""
    num_struck: int = 0
    """Scenarios whose fault has struck; the others' operation was not reached, as an earlier one was slower."""
    failures: list[tuple[Scenario, list[str]]] = field(default_factory=list)


def faults(operation: Operation, num_ranks: int, *, has_flusher: bool) -> Iterator[Fault]:
    """Every way in which one operation can go wrong.

    Args:
        operation: Which.
        num_ranks: That save; 0 where only a flusher runs.
        has_flusher: Whether a flusher runs beside them.

    Yields:
        The faults.
    """
    at, ways = operation.number, operation.ways
    victims = ["self"]
    if num_ranks + has_flusher > 1:
        victims.append("all")
    if num_ranks and has_flusher:
        victims.append("ranks")
    moments = ["before"]
    if operation.writes:
        moments += ["within"] * ("part" in ways) + ["after"]
    for moment in moments:
        yield from (Fault(at, "crash", moment, who) for who in victims)
    if "flip" in ways:
        yield Fault(at, "flip")
    if num_ranks + has_flusher > 1:
        yield Fault(at, "stall")
    for kind in sorted(ways - {"part", "flip"}):
        yield from (Fault(at, kind, moment) for moment in moments)
        yield Fault(at, f"{kind} for good")
    if operation.place == "store":
        yield from (Fault(at, kind) for kind in _SERVER_FAULTS)


def scenarios(seed: int, ranks: Sequence[int] = RANKS) -> Iterator[tuple[Stand, Scenario]]:
    """Every scenario, in order, with what it starts from.

    Args:
        seed: See above.
        ranks: How many there are to be; the numbers do not depend on it.

    Yields:
        Stand and scenario.
    """
    number = 0
    for setup in SETUPS:
        for world_size in RANKS:
            stand = Stand(setup, world_size, seed)
            for episode in episodes(setup):
                for operation in play(stand, episode).operations:
                    num_ranks = world_size if episode != "flush" else 0
                    for fault in faults(operation, num_ranks, has_flusher="flush" in episode):
                        if world_size in ranks:
                            yield stand, Scenario(number, setup, world_size, episode, fault, operation)
                        number += 1


def run(
    chosen: Iterable[tuple[Stand, Scenario]], seed: int, told: Callable[[Scenario, Verdict], None] | None = None
) -> Report:
    """Goes through scenarios.

    Args:
        chosen: From `scenarios`.
        seed: Theirs.
        told: Called after each.

    Returns:
        What came of it.
    """
    report = Report(seed)
    with quiet():
        for stand, scenario in chosen:
            verdict = play(stand, scenario.episode, scenario.fault)
            report.num_scenarios += 1
            report.num_operations += len(verdict.operations)
            report.num_struck += verdict.struck is not None
            if verdict.objections:
                report.failures.append((scenario, verdict.objections))
            if told is not None:
                told(scenario, verdict)
    return report


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps the log of the code under torture to itself: it is full of what was done to it."""
    loggers = [logging.getLogger(name) for name in ("shade.checkpoint", "shade.checkpoint._tiers.storage")]
    levels = [each.level for each in loggers]
    try:
        for each in loggers:
            each.setLevel(logging.CRITICAL + 1)
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
