"""Bootstraps a cluster with one node on each of several machines, by the same command on all of them.

Each machine starts its node, and all nodes meet the *seed*, which the command names. When as many are there as were
asked for, the seed's command assigns the slots, and every command returns when its node sees the whole cluster. A
machine that comes later takes its share of the slots, with the keys in them, while training continues.

Slots move by Redis' own steps: the target imports the slot, the source migrates it, the keys follow, then both learn
the new owner. `begin`, `carry` and `finish` are separate, so that an interrupted move can continue or be abandoned.
Invariant: every slot has an owner at every moment. Decision 0025 has ``redis-cli --cluster`` beside it.

References:
    Redis cluster specification, "Cluster topology" and "Nodes handshake".
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from shade.errors import ConfigError, StoreError, StoreUnavailableError
from shade.store._servers import service
from shade.store._servers.local_cluster import (
    agrees,
    assign_slots,
    check_shape,
    is_believed,
    num_listed,
    read_members,
    read_slot_map,
)
from shade.store._servers.server import ask
from shade.store.link import Endpoint
from shade.store.node import Node
from shade.store.url import PASSWORD_VARIABLE, Address, StoreURL, format_address
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
        towards = (target.host, target.port, "", 0, _MIGRATE_MILLISECONDS)
        migrate: Command = ("MIGRATE", *towards, "REPLACE", *login, "KEYS")
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
            # Each step for hundreds of slots at once: 1 s where `redis-cli --cluster rebalance` takes 14.
            _ask(node, [("CLUSTER", "SETSLOT", slot, *words) for slot in part])


def take_share(newcomer: Endpoint, num_primaries: int) -> int:
    """Moves to a node that has just joined its share of the slots, from the nodes that have more than theirs; returns
    how many moved. ``num_primaries`` are to have slots, this one included. Raises as `Move`."""
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
            # A cache can lose keys, which are read again from the origin; so a move that fails half-way loses no
            # sample.
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


_MEET_SECONDS: Final = 600.0
"""How long the first machine waits until the last one is switched on."""
_POLL_SECONDS: Final = 0.1
_MOST_EPOCH: Final = 2**31


def join_cluster(
    directory: Path,
    seed: Address,
    *,
    nodes: int | None = None,
    replicas: int = 0,
    memory_bytes: int = 0,
    password: str | None = None,
    port: int | None = None,
    wait_seconds: float = _MEET_SECONDS,
) -> StoreURL:
    """Starts a node on this machine and makes it part of a cluster.

    Args:
        directory: As for `service.up`.
        seed: The address of the node that all meet; if it is one of this machine's, this node is the seed.
        nodes: Primaries of the new cluster, ≥ 3; None: it exists, and this node joins it.
        replicas: Replicas of each primary.
        memory_bytes: ``maxmemory`` of this node; 0 for no limit.
        password: The same on all machines.
        port: Port of this node; None: the seed's.
        wait_seconds: How long to wait for the other machines.

    Returns:
        The address of the whole cluster.

    Raises:
        ConfigError: No password, an impossible shape, servers recorded in the directory already, or no binary.
        StoreUnavailableError: The node does not start, or the others do not come; it was ended again.
    """
    if nodes is not None:
        check_shape(nodes, replicas)
    # Anyone who reaches an open port can read and replace the training data.
    if not password:
        cure = f"set {PASSWORD_VARIABLE} to the same word on all machines"
        raise ConfigError.of("a password for a server that other machines can reach", None, cure)
    us = Endpoint(host=own_address(seed[0]), port=port or seed[1], password=password)
    returns = service.start_node(directory, us, memory_bytes)
    try:
        _join(us, Endpoint(host=seed[0], port=seed[1], password=password), nodes, replicas, returns, wait_seconds)
        sockets = (("sockets", str(directory.resolve())),)
        addresses = tuple(sorted(read_slot_map(us).primaries))
        url = StoreURL("redis+cluster", addresses, password=password, options=sockets)
        service.remember(directory, url)
    except BaseException:
        service.down(directory)
        raise
    return url


def _join(us: Endpoint, seed: Endpoint, nodes: int | None, replicas: int, returns: bool, wait_seconds: float) -> None:
    """Makes this machine's running node part of a cluster, in whichever of four ways applies to it."""
    deadline = time.monotonic() + wait_seconds
    is_seed = (us.host, us.port) == (_resolved(seed.host), seed.port)
    if returns:  # after a reboot: the node knows its cluster, and the cluster knows the node
        _until(lambda: agrees(us) and is_believed(us), "its cluster knows this node again", deadline)
        return
    if nodes is None and is_seed:
        cure = "pass --nodes to make a new cluster, or --join the address of a node on another machine"
        raise ConfigError.of("a cluster to join", format_address(seed.host, seed.port), cure)
    # A random epoch: equal ones of two primaries would cost an election.
    ask(us, "CLUSTER", "SET-CONFIG-EPOCH", random.randrange(1, _MOST_EPOCH))
    if not is_seed:
        _until(lambda: _meets(us, seed), f"a node answers at {seed}", deadline)
    if nodes is None:
        _until(lambda: agrees(us), "this node has received the cluster's slot map", deadline)
        take_share(us, 1 + len(read_slot_map(us).primaries))
        return
    count = nodes * (1 + replicas)
    if is_seed:
        _until(lambda: len(_met(us)) >= count, f"{count} nodes have met", deadline)
        others = sorted(set(_met(us)) - {(us.host, us.port)})
        assign_slots([us, *(replace(us, host=host, port=port) for host, port in others)], nodes)
    else:
        _until(lambda: agrees(us) and num_listed(us) >= count, "the seed has assigned the slots", deadline)


def own_address(towards: str) -> str:
    """Returns the address of this machine by which another host reaches it, or that host itself if it is ours; raises
    ConfigError if the host is unknown or unreachable."""
    target = _resolved(towards)
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    # Bind address, announced address and socket follow from the address by which the seed is reached.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))  # sends nothing: asks the routing table
        except OSError as error:
            cure = "check the address and this machine's network"
            raise ConfigError.of(f"a route to {towards}", error.strerror, cure) from None
        return str(probe.getsockname()[0])


def _resolved(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError.of(f"a host named {host}", str(error), "correct it (--join, -master_address)") from None


def _until(reached: Callable[[], bool], what: str, deadline: float) -> None:
    while True:
        try:
            if reached():
                return
            reason = ""
        except StoreUnavailableError as error:
            reason = f": {error}"
        if time.monotonic() > deadline:
            raise StoreUnavailableError(f"gave up waiting until {what}{reason}")
        time.sleep(_POLL_SECONDS)


def _meets(us: Endpoint, seed: Endpoint) -> bool:
    ask(seed, "PING")
    ask(us, "CLUSTER", "MEET", _resolved(seed.host), seed.port)
    return True


def _met(node: Endpoint) -> list[Address]:
    """Returns the addresses of all nodes that a node knows and that have answered it."""
    return [member.address for member in read_members(node) if not member.flags & {"handshake", "noaddr"}]
