"""Moves slots of a cluster from one node to another, with the keys in them, while clients read and write.

The steps are Redis' own: the target imports the slot (IMPORTING), the source migrates it (MIGRATING: it ASKs the target
for keys that are gone), the keys follow, then both learn the new owner; the other nodes hear it from them. Each step is
sent for hundreds of slots at once, which takes 1 s where ``redis-cli --cluster rebalance`` takes 14 (decision 0025).
`begin`, `carry` and `finish` are separate, so that an interrupted move can continue or be abandoned, and tests can see
how clients cope with a cluster half-way.

A cache can lose keys: they can be read again from the origin. So a slot that cannot be moved completely is given back
with what is left in it. Invariant: every slot has an owner at every moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from shade.errors import StoreError, StoreUnavailableError
from shade.store._servers.local_cluster import read_slot_map
from shade.store.link import Endpoint
from shade.store.node import Node
from shade.store.wire import Command, Reply, ServerError

_ANSWER_SECONDS: Final = 10.0
_SLOTS_AT_ONCE: Final = 512
_KEYS_AT_ONCE: Final = 16
"""Both servers stand still while a batch of keys travels: 16 of 100 KB take some milliseconds."""
_MIGRATE_MILLISECONDS: Final = 5000


class Move:
    """Slots that move from one node to another.

    Every method raises StoreUnavailableError if a node refuses or does not answer; what has moved stays moved.

    Args:
        source: The node that owns them.
        target: The node that is to own them.
        slots: Their numbers.
    """

    def __init__(self, source: Endpoint, target: Endpoint, slots: Sequence[int]) -> None:
        self.slots = tuple(slots)
        self._source, self._target = Node(source, _ANSWER_SECONDS), Node(target, _ANSWER_SECONDS)
        self._source_id, self._target_id = "", ""

    def begin(self) -> None:
        """Marks the slots as moving: from now on the source refers clients to the target for missing keys."""
        (source_id,), (target_id,) = (_ask(node, [("CLUSTER", "MYID")]) for node in (self._source, self._target))
        assert isinstance(source_id, bytes)
        assert isinstance(target_id, bytes)
        self._source_id, self._target_id = source_id.decode(), target_id.decode()
        # The target first: a client that the source sends there must find it importing.
        self._set(self._target, "IMPORTING", self._source_id)
        self._set(self._source, "MIGRATING", self._target_id)

    def carry(self, slots: Iterable[int] | None = None) -> int:
        """Migrates the keys of some slots, by default of all, and returns how many."""
        target = self._target.endpoint
        login: Command = ()
        if target.password is not None:
            login = ("AUTH2", target.username, target.password) if target.username else ("AUTH", target.password)
        place = (target.host, target.port, "", 0, _MIGRATE_MILLISECONDS)
        migrate: Command = ("MIGRATE", *place, "REPLACE", *login, "KEYS")
        num_carried = 0
        for part in _parts(self.slots if slots is None else tuple(slots)):
            counts = _ask(self._source, [("CLUSTER", "COUNTKEYSINSLOT", slot) for slot in part])
            for slot, count in zip(part, counts, strict=True):
                while count:
                    (keys,) = _ask(self._source, [("CLUSTER", "GETKEYSINSLOT", slot, _KEYS_AT_ONCE)])
                    assert isinstance(keys, list)
                    if not keys:
                        break
                    _ask(self._source, [(*migrate, *(key for key in keys if isinstance(key, bytes)))])
                    num_carried += len(keys)
        return num_carried

    def finish(self) -> None:
        """Makes the target the owner; the source refuses while it still has keys."""
        # The target first again: between the two commands both claim the slot, and none would refuse it.
        self._set(self._target, "NODE", self._target_id)
        self._set(self._source, "NODE", self._target_id)

    def abandon(self) -> None:
        """Leaves the slots with the source; keys that have migrated stay, unreachable, with the target."""
        for node in (self._source, self._target):
            self._set(node, "STABLE")

    def close(self) -> None:
        """Closes the connections."""
        self._source.retire()
        self._target.retire()

    def _set(self, node: Node, *words: str) -> None:
        for part in _parts(self.slots):
            _ask(node, [("CLUSTER", "SETSLOT", slot, *words) for slot in part])


def take_share(newcomer: Endpoint, num_primaries: int) -> int:
    """Moves to a node without slots its share of them, from the nodes that have more than theirs.

    Args:
        newcomer: A node that has just joined the cluster.
        num_primaries: Nodes that are to have slots, this one included.

    Returns:
        The number of slots that moved.

    Raises:
        StoreUnavailableError: As `Move`.
    """
    owners = read_slot_map(newcomer).owners
    share = len(owners) // num_primaries
    num_moved = 0
    for address in sorted({owner for owner in owners if owner is not None and owner != (newcomer.host, newcomer.port)}):
        held = [slot for slot, owner in enumerate(owners) if owner == address]
        # One more than the share stays: slots rarely divide evenly.
        surplus = held[share + 1 :]
        if not surplus:
            continue
        move = Move(replace(newcomer, host=address[0], port=address[1]), newcomer, surplus)
        try:
            move.begin()
            move.carry()
            move.finish()
        finally:
            move.close()
        num_moved += len(surplus)
    return num_moved


def _parts(slots: Sequence[int]) -> Iterable[Sequence[int]]:
    return (slots[start : start + _SLOTS_AT_ONCE] for start in range(0, len(slots), _SLOTS_AT_ONCE))


def _ask(node: Node, commands: Sequence[Command]) -> list[Reply]:
    replies = node.ask(*commands)
    for reply in replies:
        if isinstance(reply, ServerError):
            error: StoreError = reply.as_exception(str(node))
            raise error if isinstance(error, StoreUnavailableError) else StoreUnavailableError(str(error))
    return replies
