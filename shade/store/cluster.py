"""Keeps bytes in a Redis Cluster: each key on the node that owns its slot, all nodes asked at the same time.

A slot map says who owns what. It is learnt from any node, and learnt again when a node says MOVED, or fails, at most
once a second: while a cluster is being repaired its map changes often and asking costs a round trip.

A node that fails is left alone for a while: otherwise each batch would wait a timeout for it, and a dead third of the
cache would cost more than it ever saved. Its keys are misses meanwhile. When *every* node is being left alone all are
tried again, so that an outage of the whole is reported by those who see it and its end is noticed at once.

Stories a reader may ask about:

1. *Slot moves while we write.* The old owner says MOVED (or ASK, half-way); the command is repeated where it points, up
   to three times, then counts as unanswered.
2. *Primary dies, replica takes over.* Until the others agree (cluster-node-timeout) its keys are misses; the next map
   names the new primary.
3. *Primary dies, nobody takes over.* The others answer on: servers for a cache run with
   ``cluster-require-full-coverage no`` (see redis.conf).

Invariant: a key is only ever asked of the node that the cluster says owns it, so no stale copy is read after a move.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeAlias

from redis.crc import key_slot

from shade.errors import StoreAuthError, StoreError, StoreUnavailableError
from shade.store.base import STORES
from shade.store.keys import NUM_SLOTS, placement_tags
from shade.store.link import Endpoint
from shade.store.node import Node, exchange
from shade.store.remote import PROBE_KEY, Outcome, RemoteStore
from shade.store.url import StoreURL, format_address
from shade.store.wire import Command, Reply, ServerError

_MAX_HOPS: Final = 4
_NOT_SERVING: Final = ("CLUSTERDOWN", "LOADING", "MASTERDOWN")
_RETRY_SECONDS: Final = 2.0
"""How long a failed node is left alone: with a timeout of 0.25 s a dead node costs an eighth of the time at most."""
_RELEARN_SECONDS: Final = 1.0

Address: TypeAlias = "tuple[str, int]"


@dataclass(frozen=True)
class SlotMap:
    """Who owns which slot, as one node saw it."""

    owners: tuple[Address | None, ...]
    """By slot."""
    primaries: tuple[Address, ...]
    replicas: tuple[Address, ...]

    @classmethod
    def read(cls, reply: Reply, asked: Address) -> SlotMap:
        """Reads the reply to ``CLUSTER SLOTS``.

        Args:
            reply: ``[[first, last, primary, replica …] …]`` with a node as ``[host, port, id …]``.
            asked: Who said it: an empty host means "where you found me".

        Returns:
            The map.

        Raises:
            ValueError: It is something else.
        """
        owners: list[Address | None] = [None] * NUM_SLOTS
        primaries: dict[Address, None] = {}
        replicas: dict[Address, None] = {}
        if not isinstance(reply, list):
            raise ValueError(f"{reply!r}")
        for row in reply:
            match row:
                case [int(first), int(last), primary, *others]:
                    owner = _address(primary, asked)
                    owners[first : last + 1] = [owner] * (last + 1 - first)
                    primaries[owner] = None
                    replicas.update(dict.fromkeys(_address(other, asked) for other in others))
                case _:
                    raise ValueError(f"{row!r}")
        if len(owners) != NUM_SLOTS:
            raise ValueError("slots beyond the last")
        return cls(tuple(owners), tuple(primaries), tuple(replicas))


def _address(node: Reply, asked: Address) -> Address:
    match node:
        case [bytes() | None as host, int(port), *_]:
            return (host.decode() if host else asked[0], port)
    raise ValueError(f"{node!r}")


@STORES.register("redis+cluster")
class ClusterStore(RemoteStore):
    """A cluster."""

    clustered = True

    def __init__(self, url: StoreURL, timeout_seconds: float) -> None:
        super().__init__(url, timeout_seconds)
        self._nodes: dict[Address, Node] = {}
        self._retry_at: dict[Address, float] = {}
        self._map: SlotMap | None = None
        self._learnt_at = 0.0
        self._doubted = False

    def _node(self, address: Address) -> Node:
        node = self._nodes.get(address)
        if node is None:
            fresh = Node(Endpoint.of(self._url, *address), self._timeout_seconds)
            node = self._nodes.setdefault(address, fresh)  # atomic: two threads end up with the same one
        return node

    def _round(self, keys: Sequence[str], commands: Sequence[Command]) -> Sequence[Outcome]:
        slot_map = self._slot_map()
        silent: Outcome = StoreUnavailableError(f"no node of {self.url} serves this slot")
        outcomes: list[Outcome] = [silent] * len(commands)
        paused = self._paused(slot_map)
        work: dict[Address, list[tuple[int, bool]]] = {}
        for position, key in enumerate(keys):
            owner = slot_map.owners[key_slot(key.encode())]
            if owner is not None and owner not in paused:
                work.setdefault(owner, []).append((position, False))
        answered = False
        for _ in range(_MAX_HOPS):
            if not work:
                break
            again: dict[Address, list[tuple[int, bool]]] = {}
            for owner, places, replies in self._talk(work, commands):
                for (position, _), outcome in zip(places, replies, strict=True):
                    outcomes[position] = outcome
                    target = self._redirected(outcome, owner)
                    if target is not None:
                        assert isinstance(outcome, ServerError)
                        again.setdefault(target, []).append((position, outcome.code == "ASK"))
                    elif not isinstance(outcome, StoreUnavailableError):
                        answered |= not (isinstance(outcome, ServerError) and outcome.code in _NOT_SERVING)
            work = again
        for places in work.values():  # sent from one to another and back: a move that is not finished
            for position, _ in places:
                outcomes[position] = silent
        if commands and not answered:
            self._check_anybody_serves()
        return outcomes

    def _talk(
        self, work: dict[Address, list[tuple[int, bool]]], commands: Sequence[Command]
    ) -> list[tuple[Address, list[tuple[int, bool]], Sequence[Outcome]]]:
        """One round trip to each address; an asked-for slot in flight is announced with ASKING."""
        parts = []
        for address, places in work.items():
            batch: list[Command] = []
            for position, asking in places:
                batch.extend((("ASKING",), commands[position]) if asking else (commands[position],))
            parts.append((self._node(address), batch))
        told: list[tuple[Address, list[tuple[int, bool]], Sequence[Outcome]]] = []
        for (address, places), answer in zip(work.items(), exchange(parts), strict=True):
            if isinstance(answer, StoreUnavailableError):
                self._retry_at[address] = time.monotonic() + _RETRY_SECONDS
                told.append((address, places, [answer] * len(places)))
                continue
            self._retry_at.pop(address, None)
            kept = [asking for _, asking in places]
            replies = iter(answer)
            told.append((address, places, [next(islice(replies, skip, None)) for skip in kept]))
        return told

    def _redirected(self, outcome: Outcome, owner: Address) -> Address | None:
        """Where to ask instead, when the outcome says so; None otherwise."""
        if not isinstance(outcome, ServerError) or outcome.code not in ("MOVED", "ASK"):
            return None
        host, _, port = outcome.text.rpartition(" ")[2].rpartition(":")
        target = (host.strip("[]") or owner[0], int(port))
        self._doubted |= outcome.code == "MOVED"
        return target

    def _paused(self, slot_map: SlotMap) -> set[Address]:
        """The primaries to leave alone now; none when that would be all."""
        if not self._retry_at:
            return set()
        now = time.monotonic()
        paused = {address for address, retry_at in list(self._retry_at.items()) if now < retry_at}
        return set() if paused.issuperset(slot_map.primaries) else paused

    def _check_anybody_serves(self) -> None:
        """A batch went wholly unanswered: its nodes may be the dead ones of several, or all may be dead.

        Raises:
            StoreUnavailableError: Nobody is left.
        """
        slot_map = self._slot_map()
        now = time.monotonic()
        others = [address for address in slot_map.primaries if now >= self._retry_at.get(address, 0.0)]
        places: list[tuple[int, bool]] = [(0, False)]
        probe = ("GET", PROBE_KEY)  # any key: MOVED is a sign of life too, CLUSTERDOWN is none
        for _, _, (outcome,) in self._talk(dict.fromkeys(others, places), [probe]):
            if isinstance(outcome, StoreUnavailableError):
                continue
            if not isinstance(outcome, ServerError) or outcome.code == "MOVED":
                return
        raise StoreUnavailableError(
            f"no node of {self.url} answers in {self._timeout_seconds} s, or the cluster is down"
        )

    def _slot_map(self) -> SlotMap:
        """The map, learnt first or again where that is due.

        Returns:
            The newest there is.

        Raises:
            StoreUnavailableError: None yet, and no node can tell.
        """
        slot_map, now = self._map, time.monotonic()
        due = (self._doubted or self._retry_at) and now - self._learnt_at >= _RELEARN_SECONDS
        if slot_map is not None and not due:
            return slot_map
        self._learnt_at, self._doubted = now, False  # other threads go on with the map at hand
        try:
            slot_map = self._map = self._learn()
        except StoreUnavailableError:
            if slot_map is None:
                raise
        return slot_map

    def _learn(self) -> SlotMap:
        known = self._map.primaries + self._map.replicas if self._map else ()
        candidates = dict.fromkeys((*known, *self._url.addresses))
        now = time.monotonic()
        self._retry_at = {address: retry_at for address, retry_at in list(self._retry_at.items()) if now < retry_at}
        ready = [address for address in candidates if address not in self._retry_at]
        failure: StoreError | None = None
        for address in ready or candidates:
            try:
                (reply,) = self._node(address).ask(("CLUSTER", "SLOTS"))
                if isinstance(reply, ServerError):
                    raise reply.as_exception(format_address(*address))
                learnt = SlotMap.read(reply, address)
            except StoreAuthError:
                raise
            except StoreUnavailableError as error:
                self._retry_at[address] = time.monotonic() + _RETRY_SECONDS
                failure = error
                continue
            except ValueError as error:
                failure = StoreUnavailableError(f"{format_address(*address)} sent no map of slots: {error}")
                continue
            if learnt.primaries:
                return learnt
        raise StoreUnavailableError(f"no node of {self.url} knows who serves which slot: {failure}")

    def _primaries(self) -> Sequence[Node]:
        return [self._node(address) for address in self._slot_map().primaries]

    def _all_nodes(self) -> Sequence[Node]:
        slot_map = self._slot_map()
        return [self._node(address) for address in (*slot_map.primaries, *slot_map.replicas)]

    def placement(self) -> list[str]:
        """See `Store`; a primary whose slots hold none of the tags is left out."""
        self._check_open()
        owners = self._slot_map().owners
        chosen: dict[Address, str] = {}
        for tag in placement_tags():
            owner = owners[key_slot(tag.encode())]
            if owner is not None:
                chosen.setdefault(owner, tag)
        return list(chosen.values())

    def ping(self) -> None:
        """See `Store`: every node that the URL names and every primary, and that together they serve every slot.

        Raises:
            StoreUnavailableError: One of them does not answer, or a slot has no owner.
            StoreAuthError: One refused us.
        """
        self._check_open()
        slot_map = self._map = self._learn()
        addresses = list(dict.fromkeys((*self._url.addresses, *slot_map.primaries)))
        nodes = [self._node(address) for address in addresses]
        for node, answer in zip(nodes, exchange([(node, [("PING",)]) for node in nodes]), strict=True):
            if isinstance(answer, StoreUnavailableError):
                raise answer
            if isinstance(answer[0], ServerError):
                raise answer[0].as_exception(str(node))
        orphans = slot_map.owners.count(None)
        if orphans:
            raise StoreUnavailableError(f"{orphans} slots of {self.url} have no owner; repair it (CLUSTER INFO) first")

    def close(self) -> None:
        """See `Store`."""
        super().close()
        for node in list(self._nodes.values()):
            node.retire()
