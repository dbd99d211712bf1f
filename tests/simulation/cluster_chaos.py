"""Hurts a private cluster in every way that clusters are hurt, by a schedule that a seed decides.

Faults that a network or a machine brings (`kill`, `pause`, `slow`, `hold`, `refuse`, `fill`) last for a number of
steps and are then undone; those that change what is stored (`corrupt`, `flush`, `foreign`) are not undone, as nobody
would; `reshard` begins to move slots and is finished later; `failover` hands a primary's place to its replica.
Several may be under way at once, on the same node too. `Chaos.settle` ends all of them and waits until the nodes
agree again.

A fault that struck is proved, not assumed: each tells what it affected, and one that could not strike (the node was
dead already) is not counted. `tests.simulation.chaos_training` checks what must hold meanwhile.

Invariant: the schedule is a function of its seed and shape; after `settle` every slot has a primary that serves.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from typing_extensions import override

from shade.errors import StoreError, StoreUnavailableError
from shade.process import die_with_parent
from shade.store._servers.cluster_bootstrap import Move
from shade.store._servers.local_cluster import LocalCluster, agrees
from shade.store._servers.server import LocalServer
from shade.store.keys import NUM_SLOTS
from shade.store.node import Node
from shade.store.url import StoreURL
from shade.store.wire import Reply, ServerError

LASTING: Final = ("kill", "pause", "slow", "hold", "refuse", "fill", "reshard")
"""Faults that are undone."""
SUDDEN: Final = ("corrupt", "flush", "foreign", "failover")
_NODE_TIMEOUT_MILLISECONDS: Final = 500
_SETTLE_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.05
_MOST_CORRUPTED: Final = 30
_MOST_SLOTS_MOVED: Final = 2000
_ANSWER_SECONDS: Final = 0.5


class RelayedCluster(LocalCluster):
    """A cluster on this machine whose nodes are reached through a door each, see `relay`."""

    _relay: subprocess.Popen[str] | None = None
    _doors: Sequence[int] = ()

    @override
    def settings_of(self, port: int) -> Mapping[str, str]:
        if self._relay is None:
            self._open_doors()
        door = self._doors[self.ports.index(port)]
        ours = {"cluster-announce-port": str(door), "cluster-node-timeout": str(_NODE_TIMEOUT_MILLISECONDS)}
        return ours | dict(super().settings_of(port))

    def _open_doors(self) -> None:
        us = os.getpid()
        relay = Path(__file__).with_name("relay.py")
        self._relay = subprocess.Popen(
            [sys.executable, "-I", str(relay), *map(str, self.ports)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: die_with_parent(us, signal.SIGKILL),
        )
        self._doors = [int(word) for word in self._told().split()]

    def _told(self) -> str:
        assert self._relay is not None
        assert self._relay.stdout is not None
        return self._relay.stdout.readline()

    def door(self, node: int, verb: str, *words: object) -> int:
        """Tells a node's door what to do; how much it has affected since it was last mended."""
        assert self._relay is not None
        assert self._relay.stdin is not None
        self._relay.stdin.write(" ".join(map(str, (verb, node, *words))) + "\n")
        self._relay.stdin.flush()
        return int(self._told())

    @property
    def url(self) -> StoreURL:
        """All nodes, by their doors."""
        return StoreURL("redis+cluster", tuple(("127.0.0.1", door) for door in self._doors), password=self._password)

    @override
    def stop(self) -> None:
        super().stop()
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.kill()
            relay.communicate()


@dataclass(frozen=True)
class Act:
    """One fault of a schedule."""

    step: int
    """The step after which it strikes."""
    kind: str
    node: int
    """In the order in which the cluster lists its servers."""
    lasts: int
    """Steps until it is undone."""

    def __str__(self) -> str:
        lasting = f" for {self.lasts} steps" if self.kind in LASTING else ""
        return f"step {self.step}: {self.kind} node {self.node}{lasting}"


def schedule(
    seed: int, steps: range, num_nodes: int, *, has_replicas: bool, kinds: Sequence[str] = LASTING + SUDDEN
) -> tuple[Act, ...]:
    """Draws a schedule.

    Args:
        seed: Decides everything.
        steps: In which faults may strike; all are undone by its end.
        num_nodes: Of the cluster, replicas included.
        has_replicas: Without any there is no failover.
        kinds: To choose from.

    Returns:
        2 to 7 faults, in the order in which they strike.
    """
    rng = random.Random(seed)
    possible = [kind for kind in kinds if kind != "failover" or has_replicas]
    acts = []
    for _ in range(rng.randint(2, 7)):
        step = rng.randrange(steps.start, steps.stop)
        lasts = rng.choice((1, 3, 10, 30))
        acts.append(Act(step, rng.choice(possible), rng.randrange(num_nodes), min(lasts, steps.stop - step)))
    return tuple(sorted(acts, key=lambda act: act.step))


class Chaos:
    """Brings a schedule about.

    Args:
        cluster: Running.
        acts: The schedule.
        prefix: Of the keys that may be corrupted.
        foreign: What another job keeps in the same servers: keys and values to be found after a `foreign`.
        seed: Decides which keys, how slow, how many slots.
    """

    def __init__(
        self, cluster: RelayedCluster, acts: Sequence[Act], prefix: str, foreign: Mapping[str, bytes], seed: int
    ) -> None:
        self._cluster, self._prefix, self._others = cluster, prefix, foreign
        self._rng = random.Random(f"chaos {seed}")
        self._due = {act.step: [each for each in acts if each.step == act.step] for act in acts}
        self._undo: dict[int, list[Callable[[], None]]] = {}
        self._moves: list[Move] = []
        self.struck: Counter[str] = Counter()
        """How often each kind struck."""
        self.felt: Counter[str] = Counter()
        """What the doors affected by it: pieces held or delayed, connections reset."""

    def step(self, number: int) -> None:
        """A training step is done: what is due happens.

        Args:
            number: Of the step, from 1.
        """
        for undo in self._undo.pop(number, []):
            undo()
        for act in self._due.get(number, []):
            healed_by = self._strike(act)
            if healed_by is not None:
                self.struck[act.kind] += 1
                self._undo.setdefault(act.step + act.lasts, []).append(healed_by)

    def settle(self) -> None:
        """Undoes what is still in force and waits until the cluster is whole.

        Raises:
            StoreUnavailableError: It is not within a minute.
        """
        deadline = time.monotonic() + _SETTLE_SECONDS
        for server in self._cluster.servers:
            self._wake(server)
            self._empty(server)
        for number in sorted(self._undo):
            for undo in self._undo.pop(number):
                undo()
        for move in self._moves:
            with contextlib.suppress(StoreError):  # done, or begun by a node that is a replica now
                move.abandon()
            move.close()
        while not self._is_whole():
            if time.monotonic() > deadline:
                raise StoreUnavailableError(f"the cluster was not whole {_SETTLE_SECONDS:.0f} s after the last fault")
            time.sleep(_POLL_SECONDS)

    def _is_whole(self) -> bool:
        with contextlib.suppress(StoreError):
            return all(agrees(server.endpoint()) for server in self._cluster.servers)
        return False

    def _strike(self, act: Act) -> Callable[[], None] | None:
        server = self._cluster.servers[act.node]
        strike: Callable[[int, LocalServer], Callable[[], None] | None] = getattr(self, f"_{act.kind}")
        with contextlib.suppress(StoreError):  # dead, stopped, busy: then it cannot be hurt in this way
            return strike(act.node, server)
        return None

    # ── faults that last; each returns what undoes it, or None where it could not strike ────────────────────────────

    def _kill(self, node: int, server: LocalServer) -> Callable[[], None] | None:
        if not server.process_id:
            return None
        server.stop()
        return lambda: self._wake(server)

    def _wake(self, server: LocalServer) -> None:
        """Whatever was done to its process, it runs."""
        if server.process_id:
            server.signal(signal.SIGCONT)
        else:
            server.start()

    def _pause(self, node: int, server: LocalServer) -> Callable[[], None] | None:
        if not server.process_id:
            return None
        server.signal(signal.SIGSTOP)
        return lambda: self._continue(server)

    def _continue(self, server: LocalServer) -> None:
        if server.process_id:
            server.signal(signal.SIGCONT)

    def _slow(self, node: int, server: LocalServer) -> Callable[[], None] | None:
        return self._through_door(node, "delay", round(self._rng.uniform(0.02, 0.4), 3))

    def _hold(self, node: int, server: LocalServer) -> Callable[[], None] | None:
        return self._through_door(node, "hold")

    def _refuse(self, node: int, server: LocalServer) -> Callable[[], None] | None:
        return self._through_door(node, "refuse")

    def _through_door(self, node: int, verb: str, *words: object) -> Callable[[], None]:
        self._cluster.door(node, verb, *words)
        return lambda: self.felt.update({verb: self._cluster.door(node, "mend")})

    def _fill(self, node: int, server: LocalServer) -> Callable[[], None] | None:
        self._ask(server, "CONFIG", "SET", "maxmemory", 1)
        return lambda: self._empty(server)

    def _empty(self, server: LocalServer) -> None:
        with contextlib.suppress(StoreError):  # dead: then it starts without a limit
            self._ask(server, "CONFIG", "SET", "maxmemory", 0)

    def _reshard(self, node: int, server: LocalServer) -> Callable[[], None] | None:
        owned = self._slots_of(server)
        others = [each for each in self._primaries() if each is not server]
        if not owned or not others:
            return None
        target = self._rng.choice(others)
        places = [
            self._cluster.endpoint(self._cluster.ports[self._cluster.servers.index(each)]) for each in (server, target)
        ]
        slots = self._rng.sample(owned, min(len(owned), self._rng.randint(1, _MOST_SLOTS_MOVED)))
        move = Move(places[0], places[1], slots)
        self._moves.append(move)
        try:
            move.begin()
            move.carry(slots[: len(slots) // 2])
        except StoreError:
            self._give_up(move)
            raise
        return lambda: self._finish(move)

    def _finish(self, move: Move) -> None:
        try:
            move.carry()
            move.finish()
        except StoreError:
            self._give_up(move)
        else:
            move.close()

    def _give_up(self, move: Move) -> None:
        with contextlib.suppress(StoreError):
            move.abandon()
        move.close()

    # ── faults that stay ────────────────────────────────────────────────────────────────────────────────────────────

    def _corrupt(self, node: int, server: LocalServer) -> Callable[[], None] | None:
        keys = [key for key in self._keys(server) if b"{" in key]
        chosen = self._rng.sample(sorted(keys), min(len(keys), _MOST_CORRUPTED))
        if not chosen:
            return None
        values = [self._ask(server, "GET", key) for key in chosen]
        for key, value in zip(chosen, values, strict=True):
            if isinstance(value, bytes):
                self._ask(server, "SET", key, self._damaged(value, values))
        return _nothing

    def _damaged(self, value: bytes, others: Sequence[Reply]) -> bytes:
        place = self._rng.randrange(max(1, len(value)))
        flipped = bytearray(value or b"\0")
        flipped[place] ^= 1 << self._rng.randrange(8)
        another = self._rng.choice(others)
        wrong = (bytes(flipped), value[:place], value + b"\0", b"", another if isinstance(another, bytes) else b"")
        return self._rng.choice(wrong)

    def _flush(self, node: int, server: LocalServer) -> Callable[[], None] | None:
        if server not in self._primaries() or not self._ask(server, "DBSIZE"):
            return None
        self._ask(server, "FLUSHALL")
        return _nothing

    def _foreign(self, node: int, server: LocalServer) -> Callable[[], None] | None:
        if self._flush(node, server) is None:
            return None
        talk = Node(server.endpoint(), _ANSWER_SECONDS)
        try:
            talk.ask(*(("SET", key, value) for key, value in self._others.items()))  # what is not its own it refuses
        finally:
            talk.retire()
        return _nothing

    def _failover(self, node: int, server: LocalServer) -> Callable[[], None] | None:
        if server in self._primaries():
            return None
        self._ask(server, "CLUSTER", "FAILOVER", self._rng.choice(("FORCE", "TAKEOVER")))
        return _nothing

    # ── looking ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _primaries(self) -> list[LocalServer]:
        found = []
        for server in self._cluster.servers:
            with contextlib.suppress(StoreError):
                role = self._ask(server, "ROLE")
                if isinstance(role, list) and role[0] == b"master" and self._slots_of(server):
                    found.append(server)
        return found

    def _slots_of(self, server: LocalServer) -> list[int]:
        """What a node itself believes to own, as the line of its own in CLUSTER NODES has it."""
        told = self._ask(server, "CLUSTER", "NODES")
        assert isinstance(told, bytes)
        (words,) = [line.split() for line in told.decode().splitlines() if "myself" in line]
        if "master" not in words[2]:
            return []
        ranges = [word.partition("-")[::2] for word in words[8:] if not word.startswith("[")]
        return [
            slot for first, last in ranges for slot in range(int(first), int(last or first) + 1) if slot < NUM_SLOTS
        ]

    def _keys(self, server: LocalServer) -> list[bytes]:
        reply = self._ask(server, "KEYS", f"{self._prefix}*") if server in self._primaries() else []
        return [key for key in reply if isinstance(key, bytes)] if isinstance(reply, list) else []

    def _ask(self, server: LocalServer, *words: str | int | bytes) -> Reply:
        """One command, past the door."""
        if not server.process_id:
            raise StoreUnavailableError("killed")
        talk = Node(server.endpoint(), _ANSWER_SECONDS)
        try:
            (reply,) = talk.ask(words)
        finally:
            talk.retire()
        if isinstance(reply, ServerError):
            raise reply.as_exception(str(talk))
        return reply


def _nothing() -> None:
    """What is done about damage to data."""
