"""One episode of a run with one fault in it.

A scenario starts from a run in good order (two snapshots saved and, where there is storage, durable), goes through one
episode with its fault, and is then judged several times over: by what is left if only the processes died, if the disk
lost its power (see `tests.simulation.torture.disk`), and if the whole memory went with it.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch

from shade.checkpoint._buffer.shared_memory_folder import shared_memory
from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier
from shade.checkpoint._tiers.tier import Shard
from shade.errors import ShadeError
from tests.simulation.torture.bench import Bench, Setup, State
from tests.simulation.torture.delta import built_on
from tests.simulation.torture.disk import Disk
from tests.simulation.torture.judgement import judge
from tests.simulation.torture.ledger import RUN, Ledger, Saved, saved
from tests.simulation.torture.servers import Servers
from tests.simulation.torture.world import NOTHING, CrashedError, Fault, Operation, World

SETUPS: Final = (
    Setup("storage", has_own=True),
    Setup("memory", 2, replicas=1, has_storage=False),
    Setup("memory and storage", 2, replicas=1),
    Setup("parity and storage", 3, parity=(2, 1)),
    Setup("storage, streamed", has_own=True, streams=True),
    Setup("memory and storage, streamed", 2, replicas=1, streams=True),
    Setup("storage, in deltas", has_own=True, in_deltas=True),
    Setup("memory and storage, in deltas", 2, replicas=1, num_slots=4, in_deltas=True),
)
EPISODES: Final = ("first save", "next save", "same step again", "flush", "save while flushing")


def episodes(setup: Setup) -> tuple[str, ...]:
    """The episodes that a setup can have."""
    if setup.num_servers and setup.has_storage:
        return EPISODES
    return EPISODES[:3]


@dataclass
class Verdict:
    """What one scenario came to."""

    operations: list[Operation]
    struck: Operation | None
    objections: list[str] = field(default_factory=list)


class Stand:
    """Prepares the state that episodes of one setup start from; makes folders for shared memory.

    Args:
        setup: Which.
        world_size: Ranks.
        seed: Of every dice.
    """

    def __init__(self, setup: Setup, world_size: int, seed: int) -> None:
        self.setup, self.world_size, self.seed = setup, world_size, seed
        self._states: dict[str, State] = {}

    @contextlib.contextmanager
    def state(self, episode: str) -> Iterator[State]:
        """A fresh state before an episode."""
        if episode not in self._states:
            self._states[episode] = self._prepared(episode)
        base = self._states[episode]
        folder = Path(tempfile.mkdtemp(prefix="shade-torture-", dir=shared_memory())) if self.setup.has_own else None
        try:
            disk = base.disk.after_power_failure("kept", random.Random(0))
            if folder is not None and episode != "first save":
                self._remember(folder, self.content(20, 2))
            yield State(disk, base.servers.copy(), base.ledger.copy(), folder)
        finally:
            if folder is not None:
                shutil.rmtree(folder)

    def _remember(self, folder: Path, one: Saved) -> None:
        """Puts a snapshot into shared memory, as the save before has left it."""
        for rank, manifest in enumerate(one.manifests):
            stage = SharedMemoryTier(RUN, rank, folder=folder)
            place, buffer = stage.begin(manifest.num_bytes)
            buffer[: manifest.num_bytes] = torch.frombuffer(bytearray(one.data[rank]), dtype=torch.uint8)
            stage.put(place, Shard(manifest, ()))
            stage.commit(place, one.record)
            stage.close()

    def _prepared(self, episode: str) -> State:
        state = State(Disk(), Servers(self.setup.num_servers), Ledger())
        if episode == "first save":
            return state
        for sequence, step in ((1, 10), (2, 20)):
            world = World(self.seed)
            with Bench(self.setup, state, world) as bench:
                ends = world.run(self.ranks(bench, self.content(step, sequence)))
                assert not any(ends.values()), f"a run without a fault failed: {ends}"
                is_last = sequence == 2 and episode in ("flush", "save while flushing")
                if self.setup.num_servers and self.setup.has_storage and not is_last:
                    bench.flush("flusher")
        return state

    def content(self, step: int, sequence: int) -> Saved:
        """A save of the run: the first at step 10, the second at step 20, the third at any."""
        if not self.setup.in_deltas:
            return saved(step, sequence, self.world_size)
        before = None if sequence == 1 else self.content(10 * (sequence - 1), sequence - 1)
        return built_on(before, step, sequence, self.world_size)

    def ranks(self, bench: Bench, one: Saved) -> dict[str, Callable[[], None]]:
        """The processes that save one snapshot."""
        bench.state.ledger.add(one)
        groups = bench.world.groups(self.world_size)

        def process(rank: int) -> Callable[[], None]:
            return lambda: bench.save(one, groups[rank], f"rank {rank}")

        return {f"rank {rank}": process(rank) for rank in range(self.world_size)}

    def processes(self, episode: str, bench: Bench) -> dict[str, Callable[[], None]]:
        """Who does what in an episode."""
        found: dict[str, Callable[[], None]] = {}
        if episode != "flush":
            step, sequence = {"first save": (10, 1), "same step again": (20, 3)}.get(episode, (30, 3))
            found |= self.ranks(bench, self.content(step, sequence))
        if "flush" in episode:

            def flusher() -> None:
                bench.flush("flusher")

            found["flusher"] = flusher
        return found


def play(stand: Stand, episode: str, fault: Fault = NOTHING) -> Verdict:
    """Goes through one scenario.

    Args:
        stand: Where it starts from.
        episode: What is done.
        fault: What goes wrong.

    Returns:
        What was done, and every objection.
    """
    world = World(stand.seed, fault)
    with stand.state(episode) as state:
        with Bench(stand.setup, state, world) as bench:
            world.on_strike = lambda actor, act: _strike(world, bench, actor)
            ends = world.run(stand.processes(episode, bench))
        verdict = Verdict(world.operations, world.struck)
        for actor, end in ends.items():
            expected: tuple[type[BaseException], ...] = (CrashedError, ShadeError)
            expected += (RuntimeError,) if world.crashed else ()
            if end is not None and (fault is NOTHING or not isinstance(end, expected)):
                verdict.objections.append(f"{actor} ended with {type(end).__name__}: {end}")
        if not fault.kind.startswith("server gone"):
            state.servers.away.clear()
        dice = random.Random(stand.seed)
        outcomes = [("lost", False), ("kept", True)]  # that last: it goes on in the one folder there is
        if fault.kind == "crash" and fault.victims != "ranks":
            outcomes = [("names", False), ("torn", False), ("torn", True), *outcomes]
        for outcome, keeps_memory in outcomes:
            left = state.after(outcome, dice, keeps_memory=keeps_memory)
            where = f"unsynced bytes {outcome}, memory {'there' if keeps_memory else 'gone'}"
            objections = judge(stand.setup, left, is_damaged=fault.kind == "flip", goes_on=outcome in ("kept", "lost"))
            verdict.objections += [f"{where}: {each}" for each in objections]
    return verdict


def _strike(world: World, bench: Bench, actor: str) -> None:
    """What a fault does beyond its operation."""
    kind, servers = world.fault.kind, bench.state.servers
    if kind in ("server emptied", "server gone"):
        number = world.dice.randrange(len(servers.contents))
        servers.contents[number].clear()
        if kind == "server gone":
            servers.away.add(number)
    elif kind == "server away":
        servers.away.add(world.dice.randrange(len(servers.contents)))
    elif kind == "partition" and actor in bench.views:
        bench.views[actor].cut_off.add(world.dice.randrange(len(servers.contents)))
