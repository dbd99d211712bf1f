"""Agrees on who trains together: one generation after the other, through a server that outlives its members.

A generation is a list of processes in rank order, written once and never changed, with the last statuses of missing
members. To form the next one (a rank was lost, joins or leaves) every process takes a *seat* with its own status. The
first one that sees that no member is missing writes the list. A member of the previous generation is not missing if it
has taken a seat, or has been silent for `dead_seconds`, or has been waited for for `patience_seconds`.

A slow rank: 1. Rank 2 hangs. 2. The others form generation 5 without it. 3. It wakes, finds its group broken, and
takes a seat in generation 5: the list is written without it. So it takes a seat in generation 6. The others see it
wait, and form generation 6 with it at their next step.

A cut line: only the side that reaches the rendezvous server can write a list, so there are never two trainings. The
other side waits, and rejoins like a slow rank, or raises after `give_up_seconds`.

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
from shade.gradient._comm.transport import FormedGroup, Transport
from shade.gradient._elastic.rendezvous import Rendezvous

TIMEOUT_SECONDS = 60.0
"""Longest silence of a rank: longer than a usual outage or pause, since the others continue without it afterwards."""
PATIENCE_SECONDS, DEAD_SECONDS, GIVE_UP_SECONDS = 30.0, 5.0, 600.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Member:
    """One process of a generation."""

    id: str
    rank_before: int | None
    """In the previous generation; None: it was not a member."""
    status: Mapping[str, Any]
    """What it published with its seat."""


@dataclass(frozen=True)
class Generation:
    """The processes that train together, until the next change."""

    number: int
    members: tuple[Member, ...]
    """By rank."""
    rank: int
    """This process's."""
    gone: tuple[Mapping[str, Any], ...] = ()
    """Last statuses of the previous generation's members that are missing in this one; empty: the member left on
    purpose.
    """

    @property
    def world_size(self) -> int:
        """Ranks."""
        return len(self.members)


class Membership:
    """One process's membership in a training. Close it at the end.

    Args:
        address: ``host:port`` of the rendezvous server, see `shade.gradient.rendezvous`.
        num_members: Processes that the first generation waits for; later there may be fewer, or more.
        min_members: The fewest that train together; fewer wait for others.
        run: Name of the training, the same on all members, unique at one server.
        timeout_seconds: Longest silence of a rank in an exchange, > 0: the time to notice a loss.
        patience_seconds: How long a new generation waits for a live member: longer than the longest time between two
            steps. A later member has to join anew.
        dead_seconds: The silence after which a member counts as dead.
        give_up_seconds: How long to wait for others in all.

    Raises:
        ConfigError: An argument is out of range.
    """

    def __init__(
        self,
        address: str,
        num_members: int,
        *,
        min_members: int = 1,
        run: str = "run",
        timeout_seconds: float = TIMEOUT_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        dead_seconds: float = DEAD_SECONDS,
        give_up_seconds: float = GIVE_UP_SECONDS,
    ) -> None:
        if not 1 <= min_members <= num_members:
            cure = "count this process too"
            raise ConfigError.of("1 ≤ min_members ≤ num_members", (min_members, num_members), cure)
        if not 0 < dead_seconds <= patience_seconds <= give_up_seconds:
            got = (dead_seconds, patience_seconds, give_up_seconds)
            cure = f"{DEAD_SECONDS:g}, {PATIENCE_SECONDS:g} and {GIVE_UP_SECONDS:g} are the defaults"
            raise ConfigError.of("0 < dead_seconds ≤ patience_seconds ≤ give_up_seconds", got, cure)
        self.timeout_seconds = timeout_seconds
        self._num_members, self._min_members = num_members, min_members
        self._patience_seconds, self._dead_seconds = patience_seconds, dead_seconds
        self._give_up_seconds = give_up_seconds
        self._rendezvous = Rendezvous(address, run)
        self._generation: Generation | None = None

    @property
    def generation(self) -> Generation:
        """The generation that this process is, or last was, a member of; `ConfigError` before the first."""
        if self._generation is None:
            raise ConfigError.of("a generation", None, "call form() first")
        return self._generation

    @property
    def is_join_requested(self) -> bool:
        """Whether a process waits for the next generation."""
        return self._rendezvous.is_join_requested

    def publish(self, **status: Any) -> None:
        """Publishes the status that the others read if this process is lost; JSON-plain."""
        self._rendezvous.publish(**status)

    def form(self, status: Mapping[str, Any]) -> Generation:
        """Takes a seat in the next generation and waits until it has formed. Collective.

        Args:
            status: What the others need to know of this process; JSON-plain.

        Returns:
            A generation that this process is a member of.

        Raises:
            GradientError: None formed in time, or the rendezvous server does not answer.
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
        """Makes a group of the generation. Collective; each member connects for the same purposes in the same order.

        A purpose is unique in a generation. A rank that is lost meanwhile raises `PeerLostError`.
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
                f"{self.timeout_seconds:g} s, got on rank {generation.rank}: {reason}; a rank was lost meanwhile"
            ) from None
        return Transport(FormedGroup(group, generation.rank, generation.world_size), **settings)

    def close(self) -> None:
        """Announces the end, so that the others do not wait for this process. Safe to call twice."""
        self._rendezvous.close()

    def _ask(self, question: Any, deadline: float) -> Any:
        return self._rendezvous.ask(question, max(1.0, deadline - time.monotonic()))

    def _group(self, generation: Generation, purpose: str) -> dist.ProcessGroup:
        # torch.distributed's world must not know the group: it cannot lose a member.
        client = self._rendezvous.client(self.timeout_seconds)
        store = dist.PrefixStore(f"{generation.number}/{purpose}", client)  # type: ignore[attr-defined]
        rank, size = generation.rank, generation.world_size
        backend = dist.ProcessGroupGloo(store, rank, size, timeout=timedelta(seconds=self.timeout_seconds))
        group = dist.ProcessGroup(store, rank, size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        return group

    def _wait_for_members(self, number: int, status: Mapping[str, Any], deadline: float) -> Generation | None:
        """Takes a seat and waits for the list; returns None if it was written without this process."""
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
                    f"expected {self._num_members} processes at {self._rendezvous.address}, or a running training that "
                    f"admits this one, got neither within {self._give_up_seconds:.0f} s; start the others"
                )
            time.sleep(_POLL_SECONDS)
        members = tuple(Member(each["id"], each["before"], each["standing"]) for each in found["members"])
        ids = [member.id for member in members]
        if self._rendezvous.id not in ids:
            return None
        return Generation(number, members, ids.index(self._rendezvous.id), tuple(found["gone"]))

    def _poll(self, store: Any, number: int, members_before: list[str], is_late: bool) -> dict[str, Any] | None:
        """Returns the list, and writes it if no member is missing. Runs on the rendezvous thread."""
        written = f"{number}/members"
        if not store.check([written]):
            seated = _seated(store, number)
            old = [each for each in members_before if each in seated]
            waited_for = [each for each in members_before if each not in seated]
            missing = [each for each in waited_for if self._rendezvous.silence_seconds(each) <= self._dead_seconds]
            is_complete = not missing if old else not missing and len(seated) >= self._num_members
            if (not is_complete and not (old and is_late)) or len(seated) < self._min_members:
                return None
            new = [each for each in seated if each not in members_before]
            # As the writer has received them, for all: another member may not yet know that a process left on purpose.
            gone = [self._rendezvous.last_status(each) for each in members_before if each not in seated]
            generation = {"members": [seated[each] for each in (*old, *new)], "gone": gone}
            # An empty expected value writes only if the key does not exist: the first writer wins.
            store.compare_set(written, "", json.dumps(generation))
        found: dict[str, Any] = json.loads(store.get(written))
        return found


def _first_unwritten(store: Any, number: int) -> int:
    while store.check([f"{number}/members"]):
        number += 1
    return number


def _take_seat(store: Any, number: int, status: str) -> list[str]:
    """Takes a seat; returns the ids of the previous generation, by rank."""
    members: list[str] = []
    if number:
        members = [each["id"] for each in json.loads(store.get(f"{number - 1}/members"))["members"]]
    seat = store.add(f"{number}/seats", 1) - 1
    store.set(f"{number}/seat/{seat}", status)
    return members


def _seated(store: Any, number: int) -> dict[str, Any]:
    """Returns the processes in order of their seats; one that took two seats counts once."""
    found = {}
    for seat in range(store.add(f"{number}/seats", 0)):
        # Without the key the process has not written its seat yet, or never will.
        if store.check([f"{number}/seat/{seat}"]):
            status = json.loads(store.get(f"{number}/seat/{seat}"))
            found[status["id"]] = status
    return found
