"""Bootstraps a cluster with one node on each of several machines, by the same command on all of them.

Each machine starts its node. All nodes meet the *seed*, the node that the command names, which is on one of these
machines. When as many are there as were asked for, the seed's command assigns the slots, and every command returns when
its node sees the whole cluster. A machine that comes later names no number: its node joins the existing cluster and
takes its share of the slots, with the keys in them, while training continues.

A node that other machines can reach always needs a password: anyone who reaches an open port can read and replace the
training data. Bind address, announced address and unix socket follow from the address by which the seed is reached.

``redis-cli --cluster create`` cannot do this: it wants the addresses of all nodes at once, and nodes that have not met.

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

from shade.errors import ConfigError, StoreUnavailableError
from shade.store._servers import service
from shade.store._servers.local_cluster import agrees, assign_slots, check_shape, num_listed, read_slot_map
from shade.store._servers.resharding import take_share
from shade.store._servers.server import ask, ask_text
from shade.store.link import Endpoint
from shade.store.url import PASSWORD_VARIABLE, Address, StoreURL, format_address

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
        _until(lambda: agrees(us) and _is_believed(us), "its cluster knows this node again", deadline)
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
        raise ConfigError.of(f"a host named {host}", str(error), "correct --join") from None


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
    addresses = []
    for line in ask_text(node, "CLUSTER", "NODES").splitlines():
        _, place, flags, *_ = line.split()
        host, _, port = place.partition("@")[0].rpartition(":")
        if "handshake" not in flags and "noaddr" not in flags:
            addresses.append((host or node.host, int(port)))
    return addresses


def _is_believed(node: Endpoint) -> bool:
    """Returns whether every primary that answers takes the node for alive."""
    name = ask_text(node, "CLUSTER", "MYID")
    for host, port in read_slot_map(node).primaries:
        known = ""
        with contextlib.suppress(StoreUnavailableError):
            known = ask_text(replace(node, host=host, port=port), "CLUSTER", "NODES")
        if any(line.startswith(name) and "fail" in line.split()[2] for line in known.splitlines()):
            return False
    return True
