"""Who trains together: one generation after the other, each agreed on by those who are in it, at a third place.

A generation is a list of processes, in the order of their ranks, written once and never changed; with it go the last
words of those who are gone. To form the next one (a rank was lost, one wants in, one leaves) every process takes a
*seat*, with what others have to know of it; whoever first sees that nobody is missing writes the list. Nobody is
missing when each member of the generation before has taken a seat, or has been silent for `dead_seconds`, or has been
waited for for `patience_seconds`. The list is written by compare-and-set: however many write it, all read the same.

Story of a rank that is slow. 1. Rank 2 stands still. 2. The others form generation 5 without it. 3. It wakes, finds its
group broken, and asks for a seat in generation 5: the list is written, and it is not on it. So it takes a seat in
generation 6, where the others see it wait, and at the next step they form generation 6 with it.

Story of a line that is cut. Only the side that reaches the meeting place can write a list, so there are never two
trainings; the other side waits, comes back as in the story above, or says after `give_up_seconds` that it cannot.

A generation's groups are gloo groups of our own: PyTorch's world, if there is one, has no part in them and cannot lose
a member.

Invariant: two processes that hold a generation of one number hold the same list.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shade.errors import ConfigError, GradientError, PeerLostError
from shade.gradient._comm.transport import TIMEOUT_SECONDS, FormedGroup, Transport
from shade.gradient._elastic.rendezvous import Rendezvous

PATIENCE_SECONDS, DEAD_SECONDS, GIVE_UP_SECONDS = 30.0, 5.0, 600.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Member:
    """One process of a generation."""

    id: str
    rank_before: int | None
    """In the generation before; None: it was not in it."""
    status: Mapping[str, Any]
    """What it said when it took its seat."""


@dataclass(frozen=True)
class Generation:
    """Those who train together, until somebody comes or goes."""

    number: int
    members: tuple[Member, ...]
    """By rank."""
    rank: int
    """This process's."""
    gone: tuple[Mapping[str, Any], ...] = ()
    """The last words of those of the generation before who are not in this one; empty: it left in good order."""

    @property
    def world_size(self) -> int:
        """Ranks."""
        return len(self.members)


class Membership:
    """One process's place among those who train together. Close it at the end.

    Args:
        address: ``host:port`` of the meeting place, see `_elastic.rendezvous`.
        num_members: Processes that the first generation waits for; later there may be fewer, or more.
        run: Name of the training, the same on all of them, another for each training at one place.
        timeout_seconds: Longest silence of a rank in an exchange, > 0: how soon a loss is noticed.
        patience_seconds: How long one that lives is waited for when a generation forms: longer than the longest time
            between two steps. Later it has to join anew.
        dead_seconds: After how long a silence it counts as dead.
        give_up_seconds: How long to wait for others in all.

    Raises:
        ConfigError: One of these cannot be.
    """

    def __init__(
        self,
        address: str,
        num_members: int,
        *,
        run: str = "run",
        timeout_seconds: float = TIMEOUT_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        dead_seconds: float = DEAD_SECONDS,
        give_up_seconds: float = GIVE_UP_SECONDS,
    ) -> None:
        if num_members < 1:
            raise ConfigError.of("num_members ≥ 1", num_members, "count this process, too")
        if not 0 < dead_seconds <= patience_seconds <= give_up_seconds:
            got = (dead_seconds, patience_seconds, give_up_seconds)
            cure = f"{DEAD_SECONDS:g}, {PATIENCE_SECONDS:g} and {GIVE_UP_SECONDS:g} are the defaults"
            raise ConfigError.of("0 < dead_seconds ≤ patience_seconds ≤ give_up_seconds", got, cure)
        self.timeout_seconds = timeout_seconds
        self._num_members = num_members
        self._patience_seconds, self._dead_seconds = patience_seconds, dead_seconds
        self._give_up_seconds = give_up_seconds
        self._rendezvous = Rendezvous(address, run)
        self._generation: Generation | None = None

    @property
    def generation(self) -> Generation:
        """The one that this process is, or was last, in.

        Raises:
            ConfigError: There was none yet.
        """
        if self._generation is None:
            raise ConfigError.of("a generation", None, "call form() first")
        return self._generation

    @property
    def is_join_requested(self) -> bool:
        """Whether somebody waits for the next generation."""
        return self._rendezvous.is_join_requested

    def publish(self, **status: Any) -> None:
        """What the others shall read if this process is never heard of again.

        Args:
            **words: JSON-plain.
        """
        self._rendezvous.publish(**status)

    def form(self, status: Mapping[str, Any]) -> Generation:
        """Takes a seat in the next generation and waits until it is there. All members together.

        Args:
            standing: What the others have to know of this process; JSON-plain.

        Returns:
            A generation with this process in it.

        Raises:
            GradientError: There was none in time, or the meeting place is silent.
        """
        deadline = time.monotonic() + self._give_up_seconds
        number = -1 if self._generation is None else self._generation.number
        while True:
            number = self._ask(lambda store, after=number + 1: _first_unwritten(store, after), deadline)
            generation = self._wait_for_members(number, status, deadline)
            if generation is not None:
                self._generation = generation
                self._rendezvous.follow(f"{number + 1}/seats", [member.id for member in generation.members])
                return generation

    def connect(self, purpose: str) -> Transport:
        """A group of the generation. Collective; each member the same purposes in the same order.

        Args:
            purpose: Each once in a generation.

        Returns:
            The exchange.

        Raises:
            PeerLostError: Somebody was lost meanwhile.
        """
        generation = self.generation
        settings: dict[str, Any] = {"timeout_seconds": self.timeout_seconds, "generation": generation.number}
        if generation.world_size == 1:
            return Transport(FormedGroup(None, 0, 1), **settings)
        try:
            group = self._group(generation, purpose)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise PeerLostError(
                f"expected all {generation.world_size} ranks of generation {generation.number} to connect within "
                f"{self.timeout_seconds:g} s, got on rank {generation.rank}: {reason}; one was lost while they met"
            ) from None
        return Transport(FormedGroup(group, generation.rank, generation.world_size), **settings)

    def close(self) -> None:
        """Says good-bye, so that nobody waits for this process. Safe to call twice."""
        self._rendezvous.close()

    # ── how ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _ask(self, question: Any, deadline: float) -> Any:
        return self._rendezvous.ask(question, max(1.0, deadline - time.monotonic()))

    def _group(self, generation: Generation, purpose: str) -> dist.ProcessGroup:
        """A gloo group that torch.distributed's world does not know."""
        client = self._rendezvous.client(self.timeout_seconds)
        store = dist.PrefixStore(f"{generation.number}/{purpose}", client)  # type: ignore[attr-defined]
        rank, size = generation.rank, generation.world_size
        backend = dist.ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=self.timeout_seconds))
        group = dist.ProcessGroup(store, rank, size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        return group

    def _wait_for_members(self, number: int, status: Mapping[str, Any], deadline: float) -> Generation | None:
        """Waits in a seat for the list; None if it was written without this process."""
        before = self._generation
        is_member = before is not None and before.number == number - 1
        status = {
            "id": self._rendezvous.id,
            "before": before.rank if is_member and before else None,
            "standing": status,
        }
        members_before = self._ask(lambda store: _take_seat(store, number, json.dumps(status)), deadline)
        if not is_member:
            self._rendezvous.follow("", members_before)
        since = time.monotonic()
        while True:
            is_late = time.monotonic() - since > self._patience_seconds
            found = self._ask(lambda store, late=is_late: self._poll(store, number, members_before, late), deadline)
            if found is not None:
                break
            if time.monotonic() > deadline:
                raise GradientError(
                    f"expected {self._num_members} processes to meet at {self._rendezvous.address}, or one of a training "
                    f"there to let this one in, got nobody within {self._give_up_seconds:.0f} s; start the others"
                )
            time.sleep(_POLL_SECONDS)
        members = tuple(Member(each["id"], each["before"], each["standing"]) for each in found["members"])
        ids = [member.id for member in members]
        if self._rendezvous.id not in ids:
            return None
        return Generation(number, members, ids.index(self._rendezvous.id), tuple(found["gone"]))

    def _poll(self, store: Any, number: int, members_before: list[str], is_late: bool) -> dict[str, Any] | None:
        """The list; written by this process if nobody is missing. On the meeting's thread.

        The last words of those who are gone stand in it, as the writer has heard them: another may not yet have heard
        that somebody said good-bye.
        """
        written = f"{number}/members"
        if not store.check([written]):
            seated = _seated(store, number)
            old = [each for each in members_before if each in seated]
            missing = [each for each in members_before if each not in seated and not self._is_dead(each)]
            is_complete = not missing if old else not missing and len(seated) >= self._num_members
            if not is_complete and not (old and is_late):
                return None
            new = [each for each in seated if each not in members_before]
            gone = [self._rendezvous.last_status(each) for each in members_before if each not in seated]
            generation = {"members": [seated[each] for each in (*old, *new)], "gone": gone}
            store.compare_set(written, "", json.dumps(generation))
        found: dict[str, Any] = json.loads(store.get(written))
        return found

    def _is_dead(self, other: str) -> bool:
        return self._rendezvous.silence_seconds(other) > self._dead_seconds


def _first_unwritten(store: Any, number: int) -> int:
    """The first generation from a number on that is not written."""
    while store.check([f"{number}/members"]):
        number += 1
    return number


def _take_seat(store: Any, number: int, status: str) -> list[str]:
    """Sits down; the ids of the generation before, by rank."""
    members: list[str] = []
    if number:
        members = [each["id"] for each in json.loads(store.get(f"{number - 1}/members"))["members"]]
    seat = store.add(f"{number}/seats", 1) - 1
    store.set(f"{number}/seat/{seat}", status)
    return members


def _seated(store: Any, number: int) -> dict[str, Any]:
    """Who sits, in the order of their seats; one that asked twice sits once."""
    found = {}
    for seat in range(store.add(f"{number}/seats", 0)):
        if store.check([f"{number}/seat/{seat}"]):  # else it is about to say who it is, or never will
            status = json.loads(store.get(f"{number}/seat/{seat}"))
            found[status["id"]] = status
    return found
