"""Starts Redis nodes on loopback ports and forms a cluster of them.

Each node starts alone. That all agree takes two seconds, most of them Redis' own pause before a fresh primary accepts
writes. The settings are those for a cache (reasons in redis.conf).
"""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from shade.errors import ConfigError, StoreError, StoreUnavailableError
from shade.store._servers.server import LOOPBACK, LocalServer, ask, ask_text, quoted
from shade.store.cluster import ClusterMember, SlotMap
from shade.store.keys import NUM_SLOTS
from shade.store.link import Endpoint
from shade.store.url import Address, StoreURL, format_address

_FIRST_PORT, _LAST_PORT, _BUS_OFFSET = 10_000, 20_000, 10_000  # no node listens where another has its bus
"""A node's bus listens 10 000 above its port; both stay below 32 768, where outgoing connections take theirs."""
_AGREE_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.05
_NODE_TIMEOUT_MILLISECONDS: Final = 2000


def check_shape(nodes: int, replicas: int) -> None:
    """Raises ConfigError for fewer than 3 primaries (no majority could decide on a failure) or a negative number."""
    if nodes < 3:
        raise ConfigError.of("at least 3 primaries in a cluster", nodes, "use one server, or 3 nodes")
    if replicas < 0:
        raise ConfigError.of("0 or more replicas for each primary", replicas, "use 0: a cache can read its origin")


def free_ports(count: int) -> list[int]:
    """Finds ports of this machine that are free now, there and 10 000 above."""
    ports: list[int] = []
    while len(ports) < count:
        port = random.randrange(_FIRST_PORT, _LAST_PORT)
        if port not in ports and all(map(_is_free, (port, port + _BUS_OFFSET))):
            ports.append(port)
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def node_settings(folder: Path, port: int, password: str | None) -> dict[str, str]:
    """Returns the settings that make a server a node of a cluster of caches; ``folder`` holds its file about the
    cluster, and replicas show ``password`` to their primary."""
    return {
        "port": str(port),
        "cluster-enabled": "yes",
        "cluster-config-file": quoted(str(folder / f"nodes-{port}.conf")),
        # A replica's copy passes through it: two in one folder must not share it.
        "dbfilename": f"dump-{port}.rdb",
        "cluster-node-timeout": str(_NODE_TIMEOUT_MILLISECONDS),
        "cluster-require-full-coverage": "no",
        "cluster-replica-validity-factor": "0",
        "cluster-allow-reads-when-down": "yes",
        "repl-diskless-sync": "yes",
        "repl-diskless-sync-delay": "0",
        # Redis 7 hides a replica from clients until the first of these has reached it.
        "repl-ping-replica-period": "1",
        "masterauth": quoted(password),
    }


def form_cluster(nodes: Sequence[Endpoint], num_primaries: int) -> None:
    """Forms a cluster of running nodes that know nothing of each other; as `assign_slots`."""
    # Distinct epochs, set before the nodes meet: else they would hold an election about them.
    for epoch, node in enumerate(nodes, start=1):
        ask(node, "CLUSTER", "SET-CONFIG-EPOCH", epoch)
    for node in nodes[1:]:
        ask(node, "CLUSTER", "MEET", nodes[0].host, nodes[0].port)
    assign_slots(nodes, num_primaries)


def assign_slots(nodes: Sequence[Endpoint], num_primaries: int) -> None:
    """Assigns slots and roles to nodes that are meeting, and waits until they agree. The first ``num_primaries``, at
    least 3, share the slots; the others follow them in turn. Raises `StoreUnavailableError` if they do not agree within
    a minute."""
    primaries, replicas = nodes[:num_primaries], nodes[num_primaries:]
    bounds = [NUM_SLOTS * part // num_primaries for part in range(num_primaries + 1)]
    for node, first, end in zip(primaries, bounds, bounds[1:], strict=False):
        ask(node, "CLUSTER", "ADDSLOTS", *range(first, end))
    deadline = time.monotonic() + _AGREE_SECONDS
    _wait(lambda: all(_fact(node, "cluster_known_nodes") == str(len(nodes)) for node in nodes), "meet", deadline)
    for position, node in enumerate(replicas):
        ask(node, "CLUSTER", "REPLICATE", ask_text(primaries[position % num_primaries], "CLUSTER", "MYID"))
    _wait(lambda: all(agrees(node) for node in nodes), "agree on the slots", deadline)
    _wait(lambda: all(_follows(node) for node in replicas), "copy their primaries", deadline)
    _wait(lambda: all(num_listed(node) == len(nodes) for node in nodes), "list each other", deadline)


def _fact(node: Endpoint, name: str) -> str:
    lines = (line.partition(":") for line in ask_text(node, "CLUSTER", "INFO").splitlines())
    return {key: value for key, _, value in lines}.get(name, "")


def read_members(node: Endpoint) -> list[ClusterMember]:
    """Asks a node for all nodes of its cluster that it has heard of; raises StoreError if it lists none."""
    try:
        return ClusterMember.read_all(ask_text(node, "CLUSTER", "NODES"), node.host)
    except ValueError as error:
        raise StoreError(f"expected a list of nodes from {node}, got {error}; check that it is a cluster") from None


def promote_replicas(living: Sequence[Endpoint], dead: Set[Address]) -> None:
    """Makes a replica of each dead primary the owner of its slots, and returns when all living nodes know. Raises
    StoreUnavailableError if a minute later some node still takes a dead one for an owner.

    Call it before the dead ones are started again: a primary that returns empty would empty its replicas too. No
    election is needed, because the caller knows that the primary is dead.
    """

    def have_taken_over() -> bool:
        heirs = list(_heirs_by_node(living, dead))
        for address in heirs[0] if heirs else ():
            with contextlib.suppress(StoreError):  # it is a primary already, and the first has not heard
                ask(replace(living[0], host=address[0], port=address[1]), "CLUSTER", "FAILOVER", "TAKEOVER")
        return not any(heirs)

    _wait(have_taken_over, f"learn who took over from {sorted(dead)}", time.monotonic() + _AGREE_SECONDS)


def _heirs_by_node(living: Sequence[Endpoint], dead: Set[Address]) -> Iterator[list[Address]]:
    for node in living:
        with contextlib.suppress(StoreUnavailableError):
            yield _heirs(read_members(node), dead)


def _heirs(members: Sequence[ClusterMember], dead: Set[Address]) -> list[Address]:
    """Returns a living replica of each dead primary that has one and still owns slots."""
    lost = [member.name for member in members if member.address in dead and member.has_slots]
    heirs = {each.primary: each.address for each in members if each.address not in dead and "fail" not in each.flags}
    return [heirs[name] for name in lost if name in heirs]


def is_believed(node: Endpoint) -> bool:
    """Returns whether every primary that answers takes the node for alive."""
    name = ask_text(node, "CLUSTER", "MYID")
    for host, port in read_slot_map(node).primaries:
        with contextlib.suppress(StoreUnavailableError):
            known = read_members(replace(node, host=host, port=port))
            if any(each.name == name and each.flags & {"fail", "fail?"} for each in known):
                return False
    return True


def agrees(node: Endpoint) -> bool:
    """Returns whether a node takes its cluster for complete."""
    return _fact(node, "cluster_state") == "ok" and _fact(node, "cluster_slots_assigned") == str(NUM_SLOTS)


def _follows(node: Endpoint) -> bool:
    info = ask_text(node, "INFO", "replication")
    return "role:slave" in info and "master_link_status:up" in info


def read_slot_map(node: Endpoint) -> SlotMap:
    """Asks a node for its slot map; raises StoreError if the reply is none."""
    try:
        return SlotMap.read(ask(node, "CLUSTER", "SLOTS"), (node.host, node.port))
    except ValueError as error:
        raise StoreError(f"expected a map of slots from {node}, got {error}; check that it is a cluster") from None


def num_listed(node: Endpoint) -> int:
    """Returns how many nodes it announces to clients."""
    slot_map = read_slot_map(node)
    return len({*slot_map.primaries, *slot_map.replicas})


def _wait(reached: Callable[[], bool], what: str, deadline: float) -> None:
    while not reached():
        if time.monotonic() > deadline:
            raise StoreUnavailableError(f"the nodes of the cluster did not {what} within {_AGREE_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)


ClusterT = TypeVar("ClusterT", bound="LocalCluster")


class LocalCluster:
    """A cluster on this machine that ends with its owner, as `LocalServer` does.

    Args:
        nodes: Primaries, ≥ 3.
        replicas: Replicas of each primary.
        memory_bytes: ``maxmemory`` of each node; 0 for no limit.
        password: Required of clients; None for none.
        settings: Further lines of each node's configuration.
        binary: As for `LocalServer`.
    """

    def __init__(
        self,
        nodes: int = 3,
        replicas: int = 0,
        *,
        memory_bytes: int = 0,
        password: str | None = None,
        settings: Mapping[str, str] | None = None,
        binary: str | None = None,
    ) -> None:
        check_shape(nodes, replicas)
        self._num_primaries = nodes
        self._num_nodes = nodes * (1 + replicas)
        self._memory_bytes = memory_bytes
        self._password = password
        self._settings = dict(settings or {})
        self._binary = binary
        self._folder: Path | None = None
        self.ports: list[int] = []
        self.servers: list[LocalServer] = []
        """In the order of ``ports``: the primaries, then their replicas in turn."""

    def start(self) -> None:
        """Starts the nodes and returns when they are a cluster; raises as `LocalServer.start` and `assign_slots` do."""
        self._folder = folder = Path(tempfile.mkdtemp(prefix="shade-cluster-", dir="/tmp"))
        self.ports = free_ports(self._num_nodes)
        try:
            for port in self.ports:
                server = LocalServer(
                    self._memory_bytes,
                    directory=folder,
                    password=self._password,
                    settings=node_settings(folder, port, self._password) | dict(self.settings_of(port)),
                    name=format_address(LOOPBACK, port),
                    binary=self._binary,
                )
                self.servers.append(server)
                server.start()
            form_cluster([self.endpoint(port) for port in self.ports], self._num_primaries)
        except BaseException:
            self.stop()
            raise

    def settings_of(self, port: int) -> Mapping[str, str]:
        """Hook: returns one node's further lines of configuration."""
        del port
        return self._settings

    def endpoint(self, port: int) -> Endpoint:
        """Returns one node, over TCP as clients see it."""
        return Endpoint(host=LOOPBACK, port=port, password=self._password)

    @property
    def url(self) -> StoreURL:
        """Returns the URL of all nodes."""
        addresses = tuple((LOOPBACK, port) for port in self.ports)
        return StoreURL("redis+cluster", addresses, password=self._password)

    @property
    def sockets(self) -> str:
        """Returns the directory of the nodes' unix sockets."""
        return str(self._folder)

    @property
    def near_url(self) -> StoreURL:
        """Returns the URL of all nodes, over their unix sockets."""
        return replace(self.url, options=(("sockets", self.sockets),))

    def stop(self) -> None:
        """Ends all nodes and removes what they wrote. Safe to call twice."""
        for server in self.servers:
            server.stop()
        self.servers = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self: ClusterT) -> ClusterT:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
