"""Keeps bytes in a Redis Cluster: each key on the node that owns its slot, all nodes asked at the same time.

Any node sends the slot map, which says who owns what. A node that fails, or is much slower than the others, is left out
for a while (`NodeHealth`); its keys are misses meanwhile. With ``?sockets=/run/shade`` a node on this machine is
reached over its unix socket, if that directory holds one named after its address (``10.0.0.1:7000.sock``): the same URL
serves all machines, and each has its own node nearby.

Invariant: a key is only ever asked of the node that the cluster says owns it, so no stale copy is read after a move.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final

from redis.crc import key_slot
from typing_extensions import override

from shade.errors import ConfigError, StoreAuthError, StoreError, StoreTimeoutError, StoreUnavailableError
from shade.store.base import STORES
from shade.store.keys import NUM_SLOTS, placement_tags
from shade.store.link import Endpoint, socket_path
from shade.store.node import Node, NodeHealth, exchange
from shade.store.redis_commands import PROBE_KEY, Outcome, RemoteStore
from shade.store.url import Address, StoreURL, format_address
from shade.store.wire import Command, Reply, ServerError

logger = logging.getLogger("shade.store")

_MAX_REDIRECTIONS: Final = 3
_REDIRECTIONS: Final = ("MOVED", "ASK")
_ASKING: Final[tuple[Command, ...]] = (("ASKING",),)
_NOT_SERVING: Final = ("CLUSTERDOWN", "LOADING", "MASTERDOWN")
_RELEARN_SECONDS: Final = 1.0


@dataclass(frozen=True)
class SlotMap:
    """The owner of each slot, as one node saw it."""

    owners: tuple[Address | None, ...]
    """By slot."""
    primaries: tuple[Address, ...]
    replicas: tuple[Address, ...]

    @classmethod
    def read(cls, reply: Reply, asked: Address) -> SlotMap:
        """Parses the reply to ``CLUSTER SLOTS``: ``[[first, last, primary, replica …] …]`` with a node as ``[host,
        port, id …]``. An empty host means the node that was asked. Raises ValueError for another form."""
        owners: list[Address | None] = [None] * NUM_SLOTS
        primaries: dict[Address, None] = {}
        replicas: dict[Address, None] = {}
        if not isinstance(reply, list):
            raise ValueError(f"{reply!r}")
        for row in reply:
            match row:
                case [int(first), int(last), primary, *others] if 0 <= first <= last < NUM_SLOTS:
                    owner = _address(primary, asked)
                    owners[first : last + 1] = [owner] * (last + 1 - first)
                    primaries[owner] = None
                    replicas.update(dict.fromkeys(_address(other, asked) for other in others))
                case _:
                    raise ValueError(f"{row!r}")
        return cls(tuple(owners), tuple(primaries), tuple(replicas))


@dataclass(frozen=True)
class ClusterMember:
    """One node of a cluster, as another node describes it."""

    name: str
    address: Address
    flags: frozenset[str]
    """``master`` or ``slave``; ``fail``, ``handshake``, ``noaddr`` …"""
    primary: str
    """Name of the node that it follows; ``-`` if it is a primary."""
    has_slots: bool

    @classmethod
    def read_all(cls, text: str, asked_host: str) -> list[ClusterMember]:
        """Parses the reply to ``CLUSTER NODES``, a line a node; an empty host means the node that was asked."""
        members = []
        for line in text.splitlines():
            name, endpoint, flags, primary, _, _, _, _, *slots = line.split()
            host, _, port = endpoint.partition("@")[0].rpartition(":")
            address = host or asked_host, int(port)
            members.append(cls(name, address, frozenset(flags.split(",")), primary, bool(slots)))
        return members


def _address(node: Reply, asked: Address) -> Address:
    match node:
        case [bytes() | None as host, int(port), *_]:
            return (host.decode() if host else asked[0], port)
    raise ValueError(f"{node!r}")


@STORES.register("redis+cluster")
@STORES.register("rediss+cluster")
class ClusterStore(RemoteStore):
    """A Redis Cluster."""

    clustered = True

    def __init__(self, url: StoreURL, timeout_seconds: float) -> None:
        super().__init__(url, timeout_seconds)
        self._nodes: dict[Address, Node] = {}
        self._health = NodeHealth()
        self._map: SlotMap | None = None
        self._learnt_at = 0.0
        self._doubted = False

    def _node(self, address: Address) -> Node:
        node = self._nodes.get(address)
        if node is None:
            sockets, nearby = self._url.option("sockets"), None
            if sockets is not None:
                nearby = replace(Endpoint.of(self._url), path=socket_path(sockets, *address), encrypted=False)
            fresh = Node(Endpoint.of(self._url, *address), self._timeout_seconds, nearby)
            node = self._nodes.setdefault(address, fresh)  # atomic: two threads end up with the same one
        return node

    def _round(self, keys: Sequence[str], commands: Sequence[Command], patient: bool = False) -> Sequence[Outcome]:
        slot_map = self._slot_map()
        owners, resting = slot_map.owners, self._resting(slot_map, patient)
        # One exception object for all keys without a server: raising it is the rare case.
        silent: Outcome = StoreUnavailableError(f"no node of {self.url} serves this slot")
        outcomes: list[Outcome] = [silent] * len(commands)
        work: dict[Address, list[int]] = {}
        for position, key in enumerate(keys):
            owner = owners[key_slot(key.encode())]
            if owner in work:
                work[owner].append(position)
            elif owner is not None and owner not in resting:
                work[owner] = [position]
        served, work, asking = self._ask(work, frozenset(), commands, outcomes)
        # Redirected commands go out again, all nodes together, so a moving slot costs round trips and no errors.
        for _ in range(_MAX_REDIRECTIONS):
            if not work:
                break
            also_served, work, asking = self._ask(work, asking, commands, outcomes)
            served |= also_served
        for positions in work.values():  # sent from one to another and back: a move that is not finished
            for position in positions:
                outcomes[position] = silent
        if commands and not served:
            self._check_another_serves()
        return outcomes

    def _ask(
        self, work: Mapping[Address, list[int]], asking: Set[int], commands: Sequence[Command], outcomes: list[Outcome]
    ) -> tuple[bool, dict[Address, list[int]], set[int]]:
        """Makes one round trip to each address.

        Args:
            work: Positions in ``commands`` by address.
            asking: Positions whose slot is moving to the address: announced with ASKING.
            commands: Each as words.
            outcomes: By position; filled in.

        Returns:
            Whether any node served a command; and the redirected commands: work and asking of the next round trip.
        """
        parts = []
        for address, positions in work.items():
            batch = [commands[position] for position in positions]
            if asking:
                batch = [
                    word
                    for position in positions
                    for word in (*(_ASKING if position in asking else ()), commands[position])
                ]
            parts.append((self._node(address), batch))
        served = False
        elsewhere: dict[Address, list[int]] = {}
        moving: set[int] = set()
        seconds: dict[Address, float] = {}
        for (address, positions), (node, batch), answer in zip(work.items(), parts, exchange(parts), strict=True):
            if isinstance(answer, StoreUnavailableError):
                self._health.failed(address)
                for position in positions:
                    outcomes[position] = answer
                continue
            seconds[address] = node.took_seconds
            if len(batch) > len(positions):
                # The replies to ASKING are dropped, so that positions match commands again.
                answer = [reply for reply, words in zip(answer, batch, strict=True) if words is not _ASKING[0]]
            for position, outcome in zip(positions, answer, strict=True):
                outcomes[position] = outcome
                if type(outcome) is ServerError:
                    if outcome.code in _REDIRECTIONS:
                        elsewhere.setdefault(self._target(outcome, address), []).append(position)
                        if outcome.code == "ASK":
                            moving.add(position)
                        continue
                    # The node is alive but serves nothing: it does not count as service.
                    if outcome.code in _NOT_SERVING:
                        continue
                served = True
        self._health.answered(seconds)
        return served, elsewhere, moving

    def _target(self, redirection: ServerError, asked: Address) -> Address:
        """Returns the address that a redirection names."""
        self._doubted |= redirection.code == "MOVED"
        host, _, port = redirection.text.rpartition(" ")[2].rpartition(":")
        return host.strip("[]") or asked[0], int(port)

    def _resting(self, slot_map: SlotMap, patient: bool) -> frozenset[Address]:
        """Returns the primaries to leave out now; none if that would be all."""
        resting = self._health.silent() if patient else self._health.resting()
        return frozenset() if resting.issuperset(slot_map.primaries) else resting

    def _check_another_serves(self) -> None:
        """Raises StoreUnavailableError if no other node answers either, after a batch that went wholly unanswered."""
        others = [address for address in self._slot_map().primaries if address not in self._health.silent()]
        probe = ("GET", PROBE_KEY)  # any key: MOVED is a sign of life too, CLUSTERDOWN is none
        for address, answer in zip(others, exchange([(self._node(each), [probe]) for each in others]), strict=True):
            if isinstance(answer, StoreUnavailableError):
                self._health.failed(address)
            elif not isinstance(answer[0], ServerError) or answer[0].code == "MOVED":
                return
        raise StoreUnavailableError(
            f"no node of {self.url} answers in {self._timeout_seconds} s, or the cluster is down"
        )

    def _slot_map(self) -> SlotMap:
        """Returns the newest slot map, read again if that is due; raises StoreUnavailableError if no node can send the
        first."""
        slot_map, now = self._map, time.monotonic()
        # No timer: without a MOVED or a failed node the map cannot be wrong.
        due = (self._doubted or self._health.resting()) and now - self._learnt_at >= _RELEARN_SECONDS
        if slot_map is not None and not due:
            return slot_map
        self._learnt_at, self._doubted = now, False  # other threads use the old map meanwhile
        try:
            slot_map = self._map = self._learn()
            self._doubted |= None in slot_map.owners  # a cluster in the making, or under repair
        except StoreUnavailableError:
            if slot_map is None:
                raise
        return slot_map

    def _learn(self) -> SlotMap:
        known = self._map.primaries + self._map.replicas if self._map else ()
        candidates = dict.fromkeys((*known, *self._url.addresses))
        resting = self._health.resting()
        ready = [address for address in candidates if address not in resting]
        if not ready:  # with a known map one try is enough: each is waited for, one after the other
            ready = list(candidates)[: 1 if self._map else None]
        failure: StoreError | None = None
        for address in ready:
            try:
                (reply,) = self._node(address).ask(("CLUSTER", "SLOTS"))
                if isinstance(reply, ServerError):
                    raise reply.as_exception(format_address(*address))
                learnt = SlotMap.read(reply, address)
            except (StoreAuthError, ConfigError):
                raise
            except StoreUnavailableError as error:
                self._health.failed(address)
                failure = error
                continue
            except ValueError as error:
                failure = StoreUnavailableError(f"{format_address(*address)} sent no map of slots: {error}")
                continue
            if learnt.primaries:
                return learnt
        cure = "; a URL that names several nodes survives the loss of one" if len(self._url.addresses) == 1 else ""
        kind = StoreTimeoutError if isinstance(failure, StoreTimeoutError) else StoreUnavailableError
        raise kind(f"no node of {self.url} knows who serves which slot: {failure}{cure}")

    @override
    def _can_be_asked_for(self, key: str, holder: Node) -> bool:
        """An abandoned move leaves keys with a node that does not own their slot; so does a move in progress, for a
        moment, and then the owner knows where they are."""
        owner = self._slot_map().owners[key_slot(key.encode())]
        if owner is not None and self._node(owner) is holder:
            return True
        (length,) = self._round([key], [(b"STRLEN", key)])
        return isinstance(length, int) and length > 0

    def _primaries(self) -> Sequence[Node]:
        return [self._node(address) for address in self._slot_map().primaries]

    def _all_nodes(self) -> Sequence[Node]:
        slot_map = self._slot_map()
        return [self._node(address) for address in (*slot_map.primaries, *slot_map.replicas)]

    @override
    def placement(self) -> list[str]:
        """Leaves out a primary whose slots hold none of the tags."""
        self._check_open()
        owners = self._slot_map().owners
        chosen: dict[Address, str] = {}
        for tag in placement_tags():
            owner = owners[key_slot(tag.encode())]
            if owner is not None:
                chosen.setdefault(owner, tag)
        return list(chosen.values())

    @override
    def homes(self, keys: Sequence[str]) -> list[str]:
        """Returns an empty address for a slot without an owner."""
        self._check_open()
        owners = self._slot_map().owners
        found = (owners[key_slot(key.encode())] for key in keys)
        return ["" if owner is None else format_address(*owner) for owner in found]

    @override
    def ping(self) -> None:
        """Checks that every address in the URL is a member, that most primaries answer, and that every slot has an
        owner. A member that is down is a cache with a hole, or has been replaced by its replica, and no reason not to
        start; an address without a member is a mistake."""
        self._check_open()
        try:
            slot_map = self._map = self._learn()
        except StoreUnavailableError:
            self._node(self._url.addresses[0]).endpoint.check_scheme(self._timeout_seconds)
            raise
        addresses = list(dict.fromkeys((*self._url.addresses, *slot_map.primaries)))
        nodes = [self._node(address) for address in addresses]
        num_silent = 0
        for address, answer in zip(addresses, exchange([(node, [("PING",)]) for node in nodes]), strict=True):
            if isinstance(answer, StoreUnavailableError):
                num_silent += address in slot_map.primaries
                if 2 * num_silent >= len(slot_map.primaries) or not self._is_member(address, slot_map):
                    raise answer
                state = "its share of the keys is missing" if address in slot_map.primaries else "others have its keys"
                cure = "`shade cache up` on its machine starts it again"
                logger.warning("%s of %s does not answer: %s; %s", format_address(*address), self.url, state, cure)
            elif isinstance(answer[0], ServerError):
                raise answer[0].as_exception(format_address(*address))
        orphans = slot_map.owners.count(None)
        if orphans:
            raise StoreUnavailableError(f"{orphans} slots of {self.url} have no owner; repair it (CLUSTER INFO) first")

    def _is_member(self, address: Address, slot_map: SlotMap) -> bool:
        """Returns whether a node that does not answer belongs to the cluster, or may do so for all that we can learn:
        the slot map leaves out a primary that was replaced."""
        with contextlib.suppress(OSError):
            own = {(str(found[4][0]), address[1]) for found in socket.getaddrinfo(address[0], None)}
            if not own.isdisjoint((*slot_map.primaries, *slot_map.replicas)):
                return True
            for witness in slot_map.primaries:
                with contextlib.suppress(StoreUnavailableError):
                    (reply,) = self._node(witness).ask(("CLUSTER", "NODES"))
                    if not isinstance(reply, bytes):
                        return True  # this user may not ask
                    return not own.isdisjoint(
                        each.address for each in ClusterMember.read_all(reply.decode(), witness[0])
                    )
        return False

    @override
    def close(self) -> None:
        super().close()
        for node in list(self._nodes.values()):
            node.retire()
