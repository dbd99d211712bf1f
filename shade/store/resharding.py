"""Moves slots of a cluster from one node to another, with the keys in them, while clients go on reading and writing.

Redis' own way, slot by slot: the target expects the slot (IMPORTING), the source lets it go (MIGRATING: keys that are
gone are ASKed of the target), the keys follow, then both are told whose it is; the others hear it from them. `begin`,
`carry` and `finish` are apart, so that whoever is interrupted between them can go on or give up (`abandon`), and tests
can see what clients make of a cluster half-way.

What a cache could do without: keys that are left behind can be read again from the origin. So a slot that cannot be
carried to its end is given back with what is still in it. Invariant: every slot has an owner at every moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from shade.errors import StoreError, StoreUnavailableError
from shade.store.cluster import SlotMap
from shade.store.link import Endpoint
from shade.store.node import Node
from shade.store.wire import Command, Reply, ServerError

_ANSWER_SECONDS: Final = 10.0
_SLOTS_AT_ONCE: Final = 512
_KEYS_AT_ONCE: Final = 16
"""Both servers stand still while a batch of keys travels: 16 of 100 KB take some milliseconds."""
_MIGRATE_MILLISECONDS: Final = 5000


class Move:
    """Slots on their way from one node to another.

    Args:
        source: The node that owns them.
        target: The node that shall.
        slots: Which.
    """

    def __init__(self, source: Endpoint, target: Endpoint, slots: Sequence[int]) -> None:
        self.slots = tuple(slots)
        self._source, self._target = Node(source, _ANSWER_SECONDS), Node(target, _ANSWER_SECONDS)
        self._source_id, self._target_id = "", ""

    def begin(self) -> None:
        """From now on what is not at the source is asked of the target.

        Raises:
            StoreUnavailableError: One of the two refuses, or does not answer.
        """
        (source_id,), (target_id,) = (_ask(node, [("CLUSTER", "MYID")]) for node in (self._source, self._target))
        assert isinstance(source_id, bytes)
        assert isinstance(target_id, bytes)
        self._source_id, self._target_id = source_id.decode(), target_id.decode()
        self._set(self._target, "IMPORTING", self._source_id)
        self._set(self._source, "MIGRATING", self._target_id)

    def carry(self, slots: Iterable[int] | None = None) -> int:
        """Brings the keys over.

        Args:
            slots: Of these only; None: of all.

        Returns:
            How many went.

        Raises:
            StoreUnavailableError: One of the two refuses, or does not answer; what went has gone.
        """
        place = self._target.endpoint
        login = _login(place)
        num_carried = 0
        for part in _parts(self.slots if slots is None else tuple(slots), _SLOTS_AT_ONCE):
            counts = _ask(self._source, [("CLUSTER", "COUNTKEYSINSLOT", slot) for slot in part])
            for slot, count in zip(part, counts, strict=True):
                while count:
                    (keys,) = _ask(self._source, [("CLUSTER", "GETKEYSINSLOT", slot, _KEYS_AT_ONCE)])
                    assert isinstance(keys, list)
                    if not keys:
                        break
                    words: list[str | int] = [place.host, place.port, "", 0, _MIGRATE_MILLISECONDS, "REPLACE", *login]
                    names = [key for key in keys if isinstance(key, bytes)]
                    _ask(self._source, [("MIGRATE", *words, "KEYS", *names)])
                    num_carried += len(keys)
        return num_carried

    def finish(self) -> None:
        """Makes the target the owner of what has been carried.

        Raises:
            StoreUnavailableError: One of the two refuses (keys are left at the source), or does not answer.
        """
        self._set(self._target, "NODE", self._target_id)
        self._set(self._source, "NODE", self._target_id)

    def abandon(self) -> None:
        """Leaves the slots with the source, and what went already with the target, where nobody is told of it."""
        for node in (self._source, self._target):
            self._set(node, "STABLE")

    def close(self) -> None:
        """Closes the connections."""
        self._source.retire()
        self._target.retire()

    def _set(self, node: Node, *words: str) -> None:
        for part in _parts(self.slots, _SLOTS_AT_ONCE):
            _ask(node, [("CLUSTER", "SETSLOT", slot, *words) for slot in part])


def take_share(newcomer: Endpoint, num_primaries: int) -> int:
    """Gives a node that has just joined its share of the slots, from those that have most.

    Args:
        newcomer: A node of the cluster without slots.
        num_primaries: Nodes that shall have slots, this one included.

    Returns:
        Slots that moved.

    Raises:
        StoreUnavailableError: A node refuses or does not answer; what was moved has moved.
    """
    node = Node(newcomer, _ANSWER_SECONDS)
    try:
        (reply,) = _ask(node, [("CLUSTER", "SLOTS")])
    finally:
        node.retire()
    owners = SlotMap.read(reply, (newcomer.host, newcomer.port)).owners
    share = len(owners) // num_primaries
    num_moved = 0
    for address in sorted({owner for owner in owners if owner is not None and owner != (newcomer.host, newcomer.port)}):
        held = [slot for slot, owner in enumerate(owners) if owner == address]
        surplus = held[share + 1 :]
        move = Move(_at(newcomer, address), newcomer, surplus)
        try:
            if surplus:
                move.begin()
                move.carry()
                move.finish()
        finally:
            move.close()
        num_moved += len(surplus)
    return num_moved


def _at(like: Endpoint, address: tuple[str, int]) -> Endpoint:
    """Another node, entered the same way."""
    return replace(like, host=address[0], port=address[1])


def _login(place: Endpoint) -> tuple[str, ...]:
    if place.password is None:
        return ()
    return ("AUTH2", place.username, place.password) if place.username else ("AUTH", place.password)


def _parts(slots: Sequence[int], size: int) -> Iterable[Sequence[int]]:
    return (slots[start : start + size] for start in range(0, len(slots), size))


def _ask(node: Node, commands: Sequence[Command]) -> list[Reply]:
    replies = node.ask(*commands)
    for reply in replies:
        if isinstance(reply, ServerError):
            error: StoreError = reply.as_exception(str(node))
            raise error if isinstance(error, StoreUnavailableError) else StoreUnavailableError(str(error))
    return replies
