"""The machines of a simulated run: what outlives its processes, the tiers opened on it, and what processes do.

The protocol, the tiers and the flusher are the real ones; under them lie a virtual disk, virtual servers and a folder
in real shared memory.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier
from shade.checkpoint._commit.protocol import agree, announce, commit, prepare, put, retire, store
from shade.checkpoint._flush.flusher import Flusher
from shade.checkpoint._format.retention import Keep
from shade.checkpoint._tiers.memory import MemoryTier
from shade.checkpoint._tiers.storage import StorageTier
from shade.checkpoint._tiers.tier import Tier
from shade.errors import CheckpointError
from shade.rank_group import RankGroup
from shade.storage.directory import DirectoryVolume
from tests.simulation.torture.disk import Disk, DiskView
from tests.simulation.torture.ledger import RUN, Ledger, Saved
from tests.simulation.torture.servers import Servers, ServersView
from tests.simulation.torture.watched import Watched
from tests.simulation.torture.world import Act, World

KEEP: Final = Keep.parse("last=1")


@dataclass(frozen=True)
class Setup:
    """What a run keeps its snapshots in."""

    name: str
    num_servers: int = 0
    replicas: int = 0
    parity: tuple[int, int] | None = None
    has_storage: bool = True
    has_own: bool = False
    streams: bool = False
    """Whether chunks are put before the ranks have agreed on what they are."""
    num_slots: int = 2
    in_deltas: bool = False
    """Whether each snapshot builds on the one before."""


@dataclass
class State:
    """What outlives processes."""

    disk: Disk
    servers: Servers
    ledger: Ledger
    folder: Path | None = None
    """Shared memory; None where the machine is gone."""
    survives: bool = True
    """Whether what was committed in memory has to be there."""

    def after(self, outcome: str, dice: random.Random, *, keeps_memory: bool) -> State:
        """What a failure leaves.

        Args:
            outcome: Of the disk.
            dice: For it.
            keeps_memory: Whether servers and shared memory stay.

        Returns:
            A state of its own.
        """
        servers = self.servers.copy() if keeps_memory else Servers(len(self.servers.contents))
        folder = self.folder if keeps_memory else None
        disk = self.disk.after_power_failure(outcome, dice)
        return State(disk, servers, self.ledger.copy(), folder, keeps_memory and self.survives)


class Bench:
    """Opens tiers for processes, and closes them all in the end.

    Args:
        setup: Which tiers.
        state: What they keep their things in.
        world: Who counts.
    """

    def __init__(self, setup: Setup, state: State, world: World) -> None:
        self.setup, self.state, self.world = setup, state, world
        self.views: dict[str, ServersView] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def storage(self, actor: str) -> StorageTier | None:
        """A process's way to storage."""
        if not self.setup.has_storage:
            return None
        return StorageTier(DirectoryVolume("/disk", DiskView(self.world, self.state.disk, actor)), RUN)

    def memory(self, actor: str) -> MemoryTier | None:
        """A process's way to the servers."""
        if not self.setup.num_servers:
            return None
        view = self.views[actor] = ServersView(self.world, self.state.servers, actor)
        tier = MemoryTier(
            view,
            RUN,
            num_slots=self.setup.num_slots,
            replicas=self.setup.replicas,
            parity=self.setup.parity,
            flushed=self.setup.has_storage,
            num_threads=1,
        )
        self._open.callback(tier.close)
        return tier

    def own(self, rank: int) -> SharedMemoryTier | None:
        """A rank's shared memory."""
        if not self.setup.has_own or self.state.folder is None:
            return None
        stage = SharedMemoryTier(RUN, rank, folder=self.state.folder)
        self._open.callback(stage.close)
        return stage

    def tiers(self, actor: str) -> list[Tier]:
        """All of them, nearest first."""
        found = (self.own(0), self.memory(actor), self.storage(actor))
        return [tier for tier in found if tier is not None]

    # ── what processes do ───────────────────────────────────────────────────────────────────────────────────────────

    def save(self, one: Saved, group: RankGroup, actor: str) -> None:
        """A rank's part in a save, as `shade.checkpoint._save.async_writer` does it.

        Args:
            one: The snapshot.
            group: The ranks.
            actor: Whose operations these are.

        Raises:
            CheckpointError: It is nowhere.
        """
        ledger, rank = self.state.ledger, group.rank
        stage, memory, storage = self.own(rank), self.memory(actor), self.storage(actor)
        ways = [Watched(tier, ledger) for tier in (memory, storage) if tier is not None]
        manifest, chunks = one.manifests[rank], one.chunks[rank]
        own_place = None if stage is None else self._copy(stage, actor, one.data[rank])
        early = self._put_early(ways[0], group, one) if self.setup.streams else None
        record, shard_bytes, _ = agree(
            group,
            manifest,
            None,
            sequence=one.record.sequence,
            saved_at=one.record.saved_at,
            base=one.record.base,
        )
        if stage is not None and own_place is not None:
            watched = Watched(stage, ledger, self.world, actor)
            with contextlib.suppress(CheckpointError):
                put(watched, group, own_place, manifest, lambda: ())
                commit(watched, group, own_place, record)
        for tier in ways:
            try:
                if not self.setup.streams or tier is not ways[0]:
                    store(tier, group, record, shard_bytes, manifest, lambda: chunks)
                elif early is not None:
                    commit(tier, group, early, record)
                else:
                    continue
            except CheckpointError:
                continue
            (ledger.durable if tier.inner is storage else ledger.committed).add(one.record.digest)
            if storage is not None and tier.inner is storage and rank == 0:
                retire(storage, KEEP)
            return
        if one.alone is None:
            raise CheckpointError(f"save {one.record.sequence} landed nowhere")
        self.save(one.alone, group, actor)

    def _put_early(self, tier: Tier, group: RankGroup, one: Saved) -> str | None:
        """Uploads a shard while it is copied; returns its place, or None if the tier refused."""
        manifest, chunks = one.manifests[group.rank], one.chunks[group.rank]
        shard_bytes = announce(group, manifest, None)
        try:
            place = prepare(tier, group, manifest.step, shard_bytes)
            put(tier, group, place, manifest, lambda: chunks)
        except CheckpointError:
            return None
        return place

    def _copy(self, stage: SharedMemoryTier, actor: str, data: bytes) -> str:
        half = len(data) // 2
        begin = Act(stage.name, "begin", "", lambda: stage.begin(len(data)))
        place: str
        place, buffer = self.world.perform(actor, begin)
        view = memoryview(buffer.numpy())
        for first, last in ((0, half), (half, len(data))):

            def copy(first: int = first, last: int = last) -> None:
                view[first:last] = data[first:last]

            self.world.perform(actor, Act(stage.name, "copy", f"{first}–{last}", copy))
        return place

    def flush(self, actor: str) -> bool:
        """A flusher's one turn; whether it has made something durable."""
        memory, storage = self.memory(actor), self.storage(actor)
        assert memory is not None
        assert storage is not None
        flushed = Flusher(memory, Watched(storage, self.state.ledger), KEEP, ahead_fetches=0).flush_one()
        if flushed is not None:
            self.state.ledger.durable.add(flushed.record.digest)
        return flushed is not None
