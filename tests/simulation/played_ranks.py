"""Ranks as threads of one process, whose collectives and memberships are played in memory: a fault strikes at an exact
call, and a training with it takes milliseconds.

A `Fault` strikes a rank at one of its collective calls:

=========  ============================================================================================
before     it dies and has sent nothing
after      it dies and has sent: the others get its part, and miss it in the next call
torn       it dies in the middle: every second of the others gets its part
silent     it stands still until the others have formed a generation without it
damaged    a byte of a payload that it receives is another one
lies       it sends other bytes than it has announced
=========  ============================================================================================

What is real: all of `LocalUpdates` and below, except `Transport` and `Membership`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shade.errors import GradientError, PeerLostError
from shade.gradient._comm.transport import PendingGather
from shade.gradient._elastic.membership import Generation, Member

KINDS = ("before", "after", "torn", "silent", "damaged", "lies")
_PATIENCE_SECONDS = 60.0


class Killed(Exception):
    """This rank is not there any more."""


@dataclass(frozen=True)
class Fault:
    """What happens to a rank at one of its calls, counted over all its groups."""

    name: str
    call: int
    kind: str


class PlayedRanks:
    """All threads of one training, and what they know of each other.

    Args:
        names: The members of the first generation.
        faults: At most one a call.
        min_members: Fewer wait.
    """

    def __init__(self, names: Sequence[str], faults: Sequence[Fault] = (), min_members: int = 1) -> None:
        self.changed = threading.Condition()
        self.first, self.min_members = tuple(names), min_members
        self.generations: list[list[str]] = []
        self.seats: dict[int, dict[str, Mapping[str, Any]]] = {}
        self.written: dict[int, tuple[Member, ...]] = {}
        self.gone: set[str] = set()
        self.silent: set[str] = set()
        self.returning: set[str] = set()
        """Have stood still, and have no seat yet."""
        self.groups: dict[int, PlayedGroup] = {}
        self.calls: dict[str, int] = {}
        self.struck: list[Fault] = []
        self._faults = {(each.name, each.call): each for each in faults}

    def wait_for(self, what: Callable[[], bool]) -> None:
        """Waits, with the lock held, until something is true."""
        assert self.changed.wait_for(what, _PATIENCE_SECONDS), "it hangs"

    def leave(self, name: str) -> None:
        """A rank is not there any more."""
        with self.changed:
            self.gone.add(name)
            self.returning.discard(name)
            for group in self.groups.values():
                group.missing.add(name)
            self.changed.notify_all()

    def strike(self, name: str) -> str:
        """Counts a call; returns the kind of its fault, or nothing."""
        self.calls[name] = self.calls.get(name, -1) + 1
        fault = self._faults.get((name, self.calls[name]))
        if fault is None:
            return ""
        self.struck.append(fault)
        return fault.kind

    def write(self, number: int) -> None:
        """Writes a generation if nobody is missing."""
        before = self.generations[number - 1] if number else self.first
        seated = self.seats[number]
        missing = [each for each in before if each not in seated and each not in self.gone | self.silent]
        is_early = len(seated) < self.min_members or not any(each in seated for each in before)
        if number in self.written or missing or is_early:
            return
        order = [*(each for each in before if each in seated), *(each for each in seated if each not in before)]
        ranks = {each: rank for rank, each in enumerate(before)} if number else {}
        self.written[number] = tuple(Member(each, ranks.get(each), seated[each]) for each in order)
        self.generations.append(order)
        self.groups[number] = PlayedGroup(self, order)
        self.changed.notify_all()


class PlayedGroup:
    """The calls of one generation."""

    def __init__(self, ranks: PlayedRanks, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.missing = set(ranks.gone)
        self.posted: dict[int, dict[str, Any]] = {}
        self.unlucky: dict[int, set[str]] = {}


class PlayedMembership:
    """In the place of a `Membership`."""

    timeout_seconds = 1.0

    def __init__(self, ranks: PlayedRanks, name: str) -> None:
        self.ranks, self.name = ranks, name
        self.generation: Any = None

    @property
    def is_join_requested(self) -> bool:
        with self.ranks.changed:
            return bool(self.ranks.seats.get(self.generation.number + 1))

    def publish(self, **status: Any) -> None:
        """Nobody reads it."""

    def form(self, status: Mapping[str, Any]) -> Generation:
        ranks = self.ranks
        with ranks.changed:
            while True:
                number = len(ranks.generations)
                before = ranks.generations[number - 1] if number else ranks.first
                if self.name not in before and set(before) <= ranks.gone:
                    raise GradientError("nobody is there")
                ranks.seats.setdefault(number, {})[self.name] = dict(status)
                ranks.returning.discard(self.name)

                def is_over(number: int = number, before: Sequence[str] = before) -> bool:
                    ranks.write(number)
                    return number in ranks.written or (self.name not in before and set(before) <= ranks.gone)

                ranks.changed.notify_all()
                ranks.wait_for(is_over)
                members = ranks.written.get(number, ())
                ids = [each.id for each in members]
                if self.name in ids:
                    self.generation = Generation(number, members, ids.index(self.name))
                    return self.generation
                ranks.seats.get(number, {}).pop(self.name, None)

    def connect(self, purpose: str) -> PlayedTransport:
        return PlayedTransport(self)

    def close(self) -> None:
        self.ranks.leave(self.name)


class PlayedTransport:
    """In the place of a `Transport`."""

    def __init__(self, membership: PlayedMembership) -> None:
        generation = membership.generation
        self._ranks, self._name = membership.ranks, membership.name
        self.generation, self.rank, self.world_size = generation.number, generation.rank, generation.world_size
        self._group = self._ranks.groups[generation.number]
        self._next, self._is_lost = 0, False
        self.bytes_sent = 0

    def gather_fields(self, fields_N: Any) -> Any:
        return np.stack(self._wait(self._post(fields_N.copy())))

    def gather_messages(self, message: Any) -> list[Any]:
        return self._wait(self._post(message))

    def begin_gather(self, payload: Any, lengths_W: Sequence[int]) -> PendingGather:
        call = self._post(payload.copy())

        def arrive() -> list[Any]:
            return [each[:length].copy() for each, length in zip(self._wait(call), lengths_W, strict=True)]

        return arrive

    def broadcast(self, tensor: Any, source: int = 0) -> None:
        tensor.copy_(self._wait(self._post(tensor.clone()))[source])

    def add(self, tensor: Any) -> None:
        tensor.copy_(torch.stack(self._wait(self._post(tensor.clone()))).sum(0))

    def close(self) -> None:
        with self._ranks.changed:
            self._group.missing.add(self._name)
            self._ranks.changed.notify_all()

    def _post(self, part: Any) -> tuple[int, str]:
        ranks, call = self._ranks, self._next
        with ranks.changed:
            if self._name in ranks.gone:
                raise Killed
            if self._is_lost:
                raise PeerLostError("the group is lost")
            self._next += 1
            kind = ranks.strike(self._name)
            if kind == "before":
                ranks.leave(self._name)
                raise Killed
            if kind == "silent":
                self._stand_still()
            if kind == "lies" and isinstance(part, np.ndarray) and part.dtype == np.uint8:
                part = part[:-3]
            if isinstance(part, np.ndarray) and part.dtype == np.uint8:
                self.bytes_sent += len(part)
            if kind == "torn":
                self._group.unlucky[call] = set(self._group.names[::2])
            self._group.posted.setdefault(call, {})[self._name] = part
            ranks.changed.notify_all()
            if kind in ("after", "torn"):
                ranks.leave(self._name)
                raise Killed
        return call, kind

    def _stand_still(self) -> None:
        ranks = self._ranks
        others = set(self._group.names) - {self._name} - ranks.gone
        if others:
            ranks.silent.add(self._name)
            self._group.missing.add(self._name)
            ranks.changed.notify_all()
            ranks.wait_for(lambda: len(ranks.generations) > self.generation + 1 or others <= ranks.gone)
            ranks.silent.discard(self._name)
            ranks.returning.add(self._name)
            self._is_lost = True
            raise PeerLostError("too late")

    def _wait(self, posted: tuple[int, str]) -> list[Any]:
        call, kind = posted
        ranks, group = self._ranks, self._group
        with ranks.changed:
            parts = group.posted[call]

            def is_over() -> bool:
                return all(each in parts or each in group.missing for each in group.names)

            ranks.wait_for(is_over)
            if len(parts) < len(group.names) or self._name in group.unlucky.get(call, ()):
                self._is_lost = True
                raise PeerLostError("a rank is gone")
            found = [parts[each] for each in group.names]
        if kind == "damaged" and isinstance(found[0], np.ndarray) and found[0].dtype == np.uint8:
            found = [each.copy() for each in found]
            if len(found[-1]):
                found[-1][len(found[-1]) // 2] ^= 1
        return found
