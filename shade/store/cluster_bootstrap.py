"""One node of a cluster on each of several machines: the same command on all of them, and they find each other.

Life of it: each machine starts its node → all meet the one that the command names (the *founder*, which is on one of
these machines) → when as many are there as were asked for, the founder's command deals out the slots → every command
returns when its node sees the whole cluster. A machine that comes later names no number: its node joins what is there
and takes its share of the slots, with the keys in them, while training goes on.

A node that other machines can reach wants a password, always: whoever reaches an open port can read and replace what
the training reads. Bind, announced address and unix socket follow from the address by which the founder is reached.

References:
    Redis cluster specification, "Cluster topology" and "Nodes handshake".
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from shade.errors import ConfigError, StoreError, StoreUnavailableError
from shade.store import service
from shade.store.cluster import SlotMap
from shade.store.link import Endpoint
from shade.store.local_cluster import agrees, check_shape, found
from shade.store.patience import Address
from shade.store.resharding import take_share
from shade.store.server import ask
from shade.store.url import PASSWORD_VARIABLE, StoreURL, format_address
from shade.store.wire import Reply

_MEET_SECONDS: Final = 600.0
"""How long the first machine waits for the last one to be switched on."""
_POLL_SECONDS: Final = 0.1
_MOST_EPOCH: Final = 2**31


def join(
    directory: Path,
    founder: Address,
    *,
    nodes: int | None = None,
    replicas: int = 0,
    memory_bytes: int = 0,
    password: str | None = None,
    port: int | None = None,
    patience_seconds: float = _MEET_SECONDS,
) -> StoreURL:
    """Starts a node on this machine and makes it part of a cluster.

    Args:
        directory: As for `service.up`.
        founder: The address of the node that all meet; where it is one of this machine's, this node is the founder.
        nodes: Primaries of the cluster to be, ≥ 3; None: it exists, and this node joins it.
        replicas: Of each primary.
        memory_bytes: ``maxmemory`` of this node; 0 for no limit.
        password: The same on all machines.
        port: Of this node; None: the founder's.
        patience_seconds: How long to wait for the other machines.

    Returns:
        The address of the whole cluster.

    Raises:
        ConfigError: No password, a shape that is no cluster, servers recorded in the directory already, no binary.
        StoreUnavailableError: The node does not start, or the others do not come; it was ended again.
    """
    if nodes is not None:
        check_shape(nodes, replicas)
    if not password:
        cure = f"set {PASSWORD_VARIABLE} to the same word on all machines"
        raise ConfigError.of("a password for a server that other machines can reach", None, cure)
    here = own_address(founder[0])
    us = Endpoint(host=here, port=port or founder[1], password=password)
    first = Endpoint(host=founder[0], port=founder[1], password=password)
    returns = service.start_node(directory, us, memory_bytes)
    try:
        deadline = time.monotonic() + patience_seconds
        is_founder = (us.host, us.port) == (_resolved(founder[0]), founder[1])
        if nodes is None and is_founder and not returns:
            cure = "pass --nodes to make a new cluster, or --join the address of a node on another machine"
            raise ConfigError.of("a cluster to join", format_address(*founder), cure)
        if not returns:
            ask(us, "CLUSTER", "SET-CONFIG-EPOCH", random.randrange(1, _MOST_EPOCH))
        if not (is_founder or returns):
            _until(lambda: _meets(us, first), f"a node answers at {first}", deadline)
        if returns:
            _until(lambda: agrees(us) and _is_believed(us), "its cluster knows this node again", deadline)
        elif nodes is None:
            _until(lambda: agrees(us), "the cluster has told this node of itself", deadline)
            take_share(us, 1 + len(_map(us).primaries))
        elif is_founder:
            count = nodes * (1 + replicas)
            _until(lambda: len(_everybody(us)) >= count, f"{count} nodes have met", deadline)
            others = sorted(set(_everybody(us)) - {(us.host, us.port)})
            found([us, *(Endpoint(host=host, port=port, password=password) for host, port in others)], nodes)
        else:
            count = nodes * (1 + replicas)
            _until(lambda: agrees(us) and _num_listed(us) >= count, "the founder has dealt out the slots", deadline)
        addresses = tuple(sorted(_map(us).primaries))
        sockets = (("sockets", str(directory.resolve())),)
        url = StoreURL("redis+cluster", addresses, password=password, options=sockets)
        service.remember(directory, url)
    except BaseException:
        service.down(directory)
        raise
    return url


def own_address(towards: str) -> str:
    """The address of this machine by which another one is reached; that one itself where it is ours.

    Args:
        towards: Host name or address.

    Returns:
        An address.

    Raises:
        ConfigError: No such host, or no way there.
    """
    target = _resolved(towards)
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, 9))  # sends nothing: asks the routing table
        except OSError as error:
            cure = "check the address and this machine's network"
            raise ConfigError.of("a host that can be reached", f"{towards}: {error.strerror}", cure) from None
        return str(probe.getsockname()[0])


def _resolved(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError.of("the name or address of a host", f"{host}: {error}", "correct --join") from None


def _until(reached: Callable[[], bool], what: str, deadline: float) -> None:
    while True:
        try:
            if reached():
                return
            told = ""
        except StoreUnavailableError as error:
            told = f": {error}"
        if time.monotonic() > deadline:
            raise StoreUnavailableError(f"gave up waiting until {what}{told}")
        time.sleep(_POLL_SECONDS)


def _meets(us: Endpoint, first: Endpoint) -> bool:
    ask(first, "PING")
    ask(us, "CLUSTER", "MEET", _resolved(first.host), first.port)
    return True


def _everybody(node: Endpoint) -> list[Address]:
    """The addresses of all nodes that it knows and that have answered it."""
    told = ask(node, "CLUSTER", "NODES")
    assert isinstance(told, bytes)
    addresses = []
    for line in told.decode().splitlines():
        _, place, flags, *_ = line.split()
        host, _, port = place.partition("@")[0].rpartition(":")
        if "handshake" not in flags and "noaddr" not in flags:
            addresses.append((host or node.host, int(port)))
    return addresses


def _is_believed(node: Endpoint) -> bool:
    """Whether every primary that answers takes it for one that lives."""
    name = ask(node, "CLUSTER", "MYID")
    assert isinstance(name, bytes)
    for host, port in _map(node).primaries:
        told: Reply = b""
        with contextlib.suppress(StoreUnavailableError):
            told = ask(replace(node, host=host, port=port), "CLUSTER", "NODES")
        assert isinstance(told, bytes)
        if any(line.startswith(name) and b"fail" in line.split()[2] for line in told.splitlines()):
            return False
    return True


def _map(node: Endpoint) -> SlotMap:
    try:
        return SlotMap.read(ask(node, "CLUSTER", "SLOTS"), (node.host, node.port))
    except ValueError as error:
        raise StoreError(f"{node} sent no map of slots: {error}") from None


def _num_listed(node: Endpoint) -> int:
    slot_map = _map(node)
    return len({*slot_map.primaries, *slot_map.replicas})
