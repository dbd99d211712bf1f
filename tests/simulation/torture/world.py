"""Lets simulated processes run one at a time, counts what they do to disk and store, and makes one operation go wrong.

Each process (a rank, the flusher) is a thread that stops before each of its operations; when all have stopped, a seeded
dice says whose turn it is. So a run of W ranks is a list of operations, the same for the same seed, and "operation 17
fails" means something. What a process does between two operations touches nothing that outlives it.

A process that crashes raises `CrashedError` at its operation and at every later one, and nobody hears of it: those who
wait for it in a collective are told, as by a broken connection, once nobody else can go on. Invariant: at most one
thread is between two operations at any time.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
import torch
from typing_extensions import override

from shade.types import Indices

T = TypeVar("T")
_PATIENCE_SECONDS: Final = 60.0
"""A turn that does not come for so long never will: the torture itself is stuck."""


class CrashedError(SystemExit):
    """A simulated process ends here, as if killed: nothing that looks for an `Exception` sees it."""


@dataclass(frozen=True)
class Operation:
    """Something a process asked of disk or store."""

    number: int
    actor: str
    place: str
    """``disk``, ``store`` or ``shared memory``."""
    name: str
    target: str
    writes: bool
    """Whether it changes anything."""
    ways: frozenset[str] = frozenset()
    """In which it can go wrong beside a crash: ``part``, ``flip``, and kinds of errors."""

    def __str__(self) -> str:
        return f"operation {self.number}, {self.actor}: {self.place} {self.name} {self.target}"


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and at which operation."""

    at: int
    """Number of the operation; −1 for none."""
    kind: str
    """``crash``, ``flip``, ``stall``, a key of `Act.errors` (``… for good``: from here on), or a server's end."""
    moment: str = "before"
    """``before`` it has any effect, ``within`` it, or ``after`` it."""
    victims: str = "self"
    """Who crashes: ``self``, ``ranks``, ``all``."""

    def __str__(self) -> str:
        who = "" if self.kind != "crash" else f" of {'itself' if self.victims == 'self' else self.victims}"
        return f"{self.kind}{who} {self.moment}"


NOTHING: Final = Fault(-1, "none")


@dataclass
class Act:
    """One operation, with the ways in which it can go wrong."""

    place: str
    name: str
    target: str
    whole: Callable[[], Any]
    writes: bool = True
    part: Callable[[random.Random], None] | None = None
    """Does some of it."""
    spoilt: Callable[[random.Random], Any] | None = None
    """Does it, with one bit wrong."""
    errors: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    """By kind of fault: what is raised, or returned instead."""


class World:
    """The processes, their turns and their fault.

    Args:
        seed: Of the dice.
        fault: What goes wrong.
    """

    def __init__(self, seed: int, fault: Fault = NOTHING) -> None:
        self.dice = random.Random(seed)
        self.fault = fault
        self.operations: list[Operation] = []
        self.struck: Operation | None = None
        """The operation that went wrong."""
        self.crashed: set[str] = set()
        self.on_strike: Callable[[str, Act], None] = lambda actor, act: None
        """Called when a fault strikes that changes more than the operation: a server that is lost, say."""
        self._persistent: Callable[[Act], Callable[[], Any] | None] | None = None
        self._condition = threading.Condition()
        self._states: dict[str, str] = {}
        self._stalled: str | None = None
        self._rounds: list[_Round] = []

    # ── turns ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, processes: Mapping[str, Callable[[], None]]) -> dict[str, BaseException | None]:
        """Runs processes to their ends.

        Args:
            processes: What each does, by name.

        Returns:
            What each ended with: None, a `CrashedError`, or another error.
        """
        self._states = dict.fromkeys(processes, "running")
        self._stalled = None
        ends: dict[str, BaseException | None] = {}

        def live(name: str, act: Callable[[], None]) -> None:
            try:
                self._pause(name)
                act()
                ends[name] = None
            except BaseException as error:  # noqa: BLE001 - how it ended is the caller's to judge
                ends[name] = error
            finally:
                with self._condition:
                    self._states[name] = "ended"
                    self._choose()

        threads = [threading.Thread(target=live, args=each, name=f"torture {each[0]}") for each in processes.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._states = {}
        return ends

    def _pause(self, actor: str) -> None:
        """Returns when it is this process's turn."""
        with self._condition:
            if self._states.get(actor) is None:
                return  # nobody is stepped: a tool, or a look at what is left
            self._states[actor] = "ready"
            self._choose()
            self._await(actor)

    def _await(self, actor: str) -> None:
        if not self._condition.wait_for(lambda: self._states[actor] == "running", _PATIENCE_SECONDS):
            raise AssertionError(f"{actor} waits for its turn forever: {self._states}")

    def _choose(self) -> None:
        """Gives the turn to one that is ready, if nobody has it; where all wait for each other, tells them so."""
        states = self._states
        if "running" in states.values():
            return
        ready = sorted(actor for actor, state in states.items() if state == "ready")
        if not ready:
            for group in self._rounds:
                group.broken = True
            ready = sorted(actor for actor, state in states.items() if state == "waiting")
        if len(ready) > 1 and self._stalled in ready:
            ready.remove(self._stalled)
        if ready:
            states[self.dice.choice(ready)] = "running"
        self._condition.notify_all()

    # ── operations ──────────────────────────────────────────────────────────────────────────────────────────────────

    def perform(self, actor: str, act: Act) -> Any:
        """Does something in the name of a process, when it is its turn.

        Args:
            actor: Whose.
            act: What.

        Returns:
            What the operation returns.

        Raises:
            CrashedError: The process is dead, or dies here.
        """
        self._pause(actor)
        if actor in self.crashed:
            raise CrashedError
        ways = frozenset({"part"} if act.part else ()) | ({"flip"} if act.spoilt else frozenset()) | act.errors.keys()
        operation = Operation(len(self.operations), actor, act.place, act.name, act.target, act.writes, ways)
        self.operations.append(operation)
        if operation.number != self.fault.at:
            later = self._persistent(act) if self._persistent is not None else None
            return act.whole() if later is None else later()
        self.struck = operation
        return self._strike(actor, act)

    def _strike(self, actor: str, act: Act) -> Any:
        fault = self.fault
        if fault.kind == "crash":
            victims = self._victims(actor)
            if actor in victims and fault.moment == "within" and act.part is not None:
                act.part(self.dice)
            elif actor in victims and fault.moment == "after":
                act.whole()
            self.crashed |= victims
            if actor in victims:
                raise CrashedError
            return act.whole()
        if fault.kind == "flip":
            return act.spoilt(self.dice) if act.spoilt is not None else act.whole()
        if fault.kind == "stall":
            self._stalled = actor
            self._pause(actor)
            return act.whole()
        kind = fault.kind.removesuffix(" for good")
        if kind != fault.kind:
            self._persistent = lambda other: other.errors.get(kind) if other.place == act.place else None
        self.on_strike(actor, act)
        wrong = act.errors.get(kind)
        if wrong is None:
            return act.whole()
        if fault.moment == "within" and act.part is not None:
            act.part(self.dice)
        elif fault.moment == "after":
            act.whole()
        return wrong()

    def _victims(self, actor: str) -> set[str]:
        if self.fault.victims == "self":
            return {actor}
        return {each for each in self._states if self.fault.victims == "all" or each.startswith("rank")}

    # ── collectives ─────────────────────────────────────────────────────────────────────────────────────────────────

    def groups(self, world_size: int) -> list[SteppedGroup]:
        """The ranks' ends of a new group.

        Args:
            world_size: Ranks; their processes are called ``rank 0`` and so on.

        Returns:
            By rank.
        """
        meeting = _Round(world_size)
        self._rounds = [meeting]
        return [SteppedGroup(self, meeting, rank) for rank in range(world_size)]

    def meet(self, meeting: _Round, rank: int, message: Any) -> list[Any]:
        """Waits until every rank has brought its message.

        Args:
            meeting: Of the group.
            rank: Whose message.
            message: JSON.

        Returns:
            All messages, by rank.

        Raises:
            RuntimeError: A rank is gone.
        """
        actor = f"rank {rank}"
        with self._condition:
            if meeting.broken:
                raise RuntimeError("connection closed by peer")
            meeting.brought[rank] = json.dumps(message)
            if len(meeting.brought) == meeting.world_size:
                meeting.taken = [json.loads(meeting.brought[each]) for each in range(meeting.world_size)]
                meeting.brought = {}
                meeting.number += 1
                for other in range(meeting.world_size):
                    if other != rank:
                        self._states[f"rank {other}"] = "ready"
                return list(meeting.taken)
            number = meeting.number
            self._states[actor] = "waiting"
            self._choose()
            self._await(actor)
            if meeting.number == number:
                raise RuntimeError("connection closed by peer")
            return list(meeting.taken)


@dataclass
class _Round:
    """A collective under way."""

    world_size: int
    brought: dict[int, str] = field(default_factory=dict)
    taken: list[Any] = field(default_factory=list)
    number: int = 0
    broken: bool = False


class SteppedGroup:
    """One rank's end: a `shade.rank_group.RankGroup`.

    Args:
        world: Whose turns it keeps.
        meeting: Shared by the ranks.
        rank: Whose.
    """

    def __init__(self, world: World, meeting: _Round, rank: int) -> None:
        self._world, self._meeting = world, meeting
        self.rank, self.world_size = rank, meeting.world_size

    @override
    def gather(self, message: Any) -> list[Any]:
        return self._world.meet(self._meeting, self.rank, message)

    @override
    def gather_fields(self, fields_N: Indices) -> Indices:
        return np.array(self.gather(fields_N.tolist()), dtype=np.int64)

    @override
    def share(self, message: Any) -> Any:
        return self.gather(message if self.rank == 0 else None)[0]

    @override
    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        told = self.gather(tensor.tolist() if self.rank == source else None)[source]
        tensor.copy_(torch.tensor(told, dtype=tensor.dtype))

    @override
    def close(self) -> None:
        pass
