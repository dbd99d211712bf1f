"""Finds the newest snapshot that is whole, and brings it to every rank.

Ranks see different things: own memory is each machine's, and after a crash one may have what another lost. So they tell
each other what they see, and try from the newest down: a snapshot that turns out to be damaged beyond repair on any
rank is given up by all of them together, loudly, for the one before it.

A shard that every rank has in its machine's memory is read by each; any other is read by one rank, the first that has
it near, and broadcast, so that a shared link carries it once whatever the number of ranks. Only the chunks that hold
something wanted are read. Ranks may be more or fewer than they were: rank r takes what was rank (r mod W)'s own.

Gives what is attached the state of a snapshot: found, read, checked, loaded, and its memory given back.

Which snapshot it is, and that every rank takes the same, is `read_newest`'s; what fits and what does not is
`AppState`'.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from shade.checkpoint._capture.app_state import AppState
from shade.checkpoint._capture.flatten import part_of, tensors_in
from shade.checkpoint._commit.protocol import ProcessGroup
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import Bound, Commit, Manifest, TensorEntry
from shade.checkpoint._restore.arena import FILLING_THREADS, Arena, views
from shade.checkpoint._restore.reader import Reader, Rebuilt, Snapshot
from shade.errors import CheckpointError, CorruptCheckpointError, StorageError, StoreError

_BATCH: Final = 32
"""Chunks between two votes when one rank reads for all: 128 MiB."""
_PART: Final = 4
"""Chunks that a thread reads at once."""

logger = logging.getLogger("shade.checkpoint")


@dataclass(frozen=True)
class Restored:
    """What a run starts from."""

    step: int
    """Optimizer steps done; 0 where there was nothing to restore."""
    epoch: int
    """As the attached sampler counts, 0 without one."""
    tiers: tuple[str, ...] = ()
    """Where the bytes came from; empty where there was nothing."""
    seconds: float = 0.0
    num_bytes: int = 0
    bounds: Mapping[str, Bound] = field(default_factory=dict)
    """How far each tensor may be from what was to be saved; empty where all is bit for bit."""

    def __bool__(self) -> bool:
        return bool(self.tiers)


@dataclass
class ReadSnapshot:
    """A snapshot's content, on one rank."""

    record: Commit
    tiers: list[str]
    """Where its shards were read, by whichever rank; each once."""
    held_by: list[str]
    """Tiers that have it, as far as this rank sees."""
    tree: Any
    """This rank's."""
    tensors: dict[str, torch.Tensor]
    """All that were wanted, by name, of all shards."""
    newest_sequence: int
    """Of all snapshots that any rank sees, this one or another."""
    arenas: list[tuple[Arena, Manifest]]
    trees: list[Any] = field(default_factory=list)
    """All ranks', by rank."""
    bounds: dict[str, Bound] = field(default_factory=dict)
    """Of the tensors that are not exact, as measured when they were saved."""


def read_newest(
    reader: Reader,
    group: ProcessGroup,
    only: Collection[str] | None = None,
    step: int | None = None,
    is_passing: Callable[[str], bool] = lambda name: False,
) -> ReadSnapshot | None:
    """Reads the newest whole snapshot. Collective.

    Args:
        reader: This rank's tiers.
        group: The ranks.
        only: Attached things to read, the same on every rank; None for all.
        step: That one and no other; None for the newest.
        is_passing: Whether a tensor is copied onwards and then done with: it may lie in own memory, where the next save
            overwrites it.

    Returns:
        Its content; None where no tier has any snapshot, or none of that step.

    Raises:
        CorruptCheckpointError: There are some, and none is whole; the message has the reason for each.
        CheckpointError: Storage is silent, or another tier is, and no other has anything: there might be a newer one.
    """
    here = {snapshot.record.digest: snapshot for snapshot in reader.snapshots()}
    told = group.gather(
        {
            "records": [snapshot.record.to_bytes().decode() for snapshot in here.values()],
            "silent": reader.unreachable,
            "damaged": reader.damaged,
            "durable": [tier.name for tier in reader.tiers if tier.is_durable],
        }
    )
    silent = {name: why for each in told for name, why in each["silent"].items()}
    for name in told[0]["durable"]:
        if all(name in each["silent"] for each in told):
            raise _silence({name: silent[name]})
    records = {record.digest: record for each in told for record in map(_record, each["records"])}
    candidates = sorted(records.values(), key=lambda record: (record.sequence, record.step), reverse=True)
    candidates = [record for record in candidates if step is None or record.step == step]
    newest = max((record.sequence for record in records.values()), default=0)
    lost = sorted({place for each in told for place in each["damaged"]})
    rotten = [f"{place}: its record cannot be read" for place in lost]
    if rotten and group.rank == 0:
        logger.error("%s; going on with the other snapshots", "; ".join(rotten))
    reasons = []
    for record in candidates:
        attempt = _Attempt(reader, group, here.get(record.digest, Snapshot(record, ())), only, newest, is_passing)
        try:
            return attempt.run()
        except CorruptCheckpointError as error:
            reasons.append(str(error))
            if group.rank == 0 and record is not candidates[-1]:
                logger.error("%s; trying the one before", error)
    reasons += rotten
    if reasons:
        raise CorruptCheckpointError("no snapshot is whole: " + "; ".join(reasons))
    if silent:
        raise _silence(silent)
    return None


def _silence(silent: Mapping[str, str]) -> CheckpointError:
    return CheckpointError.of(
        "every tier to say what it holds before a run starts from nothing, or from something old",
        "; ".join(f"{name}: {why}" for name, why in silent.items()),
        "bring it back, or leave it out to start without it",
    )


def _record(text: str) -> Commit:
    return Commit.parse(text.encode())


class _Attempt:
    """One snapshot, on one rank."""

    def __init__(
        self,
        reader: Reader,
        group: ProcessGroup,
        snapshot: Snapshot,
        only: Collection[str] | None,
        newest_sequence: int,
        is_passing: Callable[[str], bool],
    ) -> None:
        self._reader, self._group, self._snapshot, self._only = reader, group, snapshot, only
        self._newest_sequence, self._is_passing = newest_sequence, is_passing
        self._tiers: dict[str, None] = {}

    def run(self) -> ReadSnapshot:
        record, group = self._snapshot.record, self._group
        near = group.gather([self._is_near(rank) for rank in range(record.world_size)])
        seeing = [rank for rank, sees in enumerate(group.gather(bool(self._snapshot.sources))) if sees]
        whole = ReadSnapshot(record, [], self._snapshot.tiers, None, {}, self._newest_sequence, [])
        for shard in range(record.world_size):
            having = [rank for rank in range(group.world_size) if near[rank][shard]]
            if len(having) == group.world_size:
                manifest, arena, passing = self._alone(shard)
            else:
                source = having[0] if having else seeing[shard % len(seeing)]
                manifest, arena = self._together(shard, source, is_near=bool(having))
                passing = {}
            if shard == group.rank % record.world_size:
                whole.tree = part_of(manifest.tree, self._only)
            wanted = self._entries(manifest)
            whole.tensors |= passing | arena.tensors({name: wanted[name] for name in wanted.keys() - passing.keys()})
            whole.arenas.append((arena, manifest))
            whole.trees.append(part_of(manifest.tree, self._only))
            told = manifest.bounds.items()  # of some: that they came out exact all the same
            whole.bounds |= {name: bound for name, bound in told if name in wanted and bound.max_abs > 0}
        if whole.bounds and group.rank == 0:
            logger.warning("step %d comes back with loss: %s", record.step, told_loss(whole.bounds))
        whole.tiers = list(dict.fromkeys(name for told in group.gather(list(self._tiers)) for name in told))
        return whole

    def _is_near(self, rank: int) -> bool:
        """Whether this machine's memory has a rank's shard; its chunks may still turn out to be damaged."""
        for source in self._snapshot.sources:
            if source.tier.every_rank_commits:
                content = source.tier.read_manifest(source.place, rank)
                if content is not None and digest_of(content) == self._snapshot.record.manifests[rank]:
                    return True
        return False

    def _alone(self, shard: int) -> tuple[Manifest, Arena, dict[str, torch.Tensor]]:
        """Read by every rank for itself; what one cannot read, all give up together. Third: tensors left in place."""
        manifest, arena, failure = None, None, None
        passing: dict[str, torch.Tensor] = {}
        try:
            manifest = self._reader.manifest(self._snapshot, shard)
            arena, wanted = Arena(manifest.num_bytes), self._entries(manifest)
            numbers = manifest.chunks_of(wanted)
            lying = self._reader.in_place(self._snapshot, manifest, numbers)
            if lying is None:
                fill_arena(self._reader, self._snapshot, manifest, arena, numbers)
            else:
                data = torch.frombuffer(lying, dtype=torch.uint8)
                passing = views(data, {name: entry for name, entry in wanted.items() if self._is_passing(name)})
                arena.copy_from(data, (wanted[name] for name in wanted.keys() - passing.keys()))
        except (CheckpointError, StoreError, StorageError) as error:
            failure = str(error)
        self._check(failure)
        assert manifest is not None
        assert arena is not None
        self._note(is_near=True)
        return manifest, arena, passing

    def _together(self, shard: int, source: int, *, is_near: bool) -> tuple[Manifest, Arena]:
        """Read by one rank, passed on in batches of chunks."""
        mine = self._group.rank == source
        manifest, content, failure = None, None, None
        try:
            if mine:
                manifest = self._reader.manifest(self._snapshot, shard)
                content = manifest.to_bytes().decode()
        except (CheckpointError, StoreError, StorageError) as error:
            failure = str(error)
        self._check(failure)
        content = self._group.gather(content)[source]
        manifest = Manifest.parse(content.encode(), self._snapshot.record.manifests[shard])
        arena = Arena(manifest.num_bytes)
        numbers = manifest.chunks_of(self._entries(manifest))
        for first in range(0, len(numbers), _BATCH):
            batch = numbers[first : first + _BATCH]
            try:
                if mine:
                    fill_arena(self._reader, self._snapshot, manifest, arena, batch)
            except (CheckpointError, StoreError, StorageError) as error:
                failure = str(error)
            self._check(failure)
            for number in batch:
                start = number * manifest.chunk_bytes
                self._group.broadcast(arena.tensor[start : start + manifest.chunk_bytes], source)
        if mine:
            self._note(is_near=is_near)
        return manifest, arena

    def _check(self, failure: str | None) -> None:
        reason = next(filter(None, self._group.gather(failure)), None)
        if reason is not None:
            raise CorruptCheckpointError(reason)

    def _entries(self, manifest: Manifest) -> dict[str, TensorEntry]:
        """The tensors of a shard that are to be read."""
        named = manifest.tensors if self._only is None else tensors_in(part_of(manifest.tree, self._only))
        return {name: entry for name, entry in manifest.tensors.items() if name in named}

    def _note(self, *, is_near: bool) -> None:
        near = [source for source in self._snapshot.sources if source.tier.every_rank_commits == is_near]
        self._tiers[(near or self._snapshot.sources)[0].tier.name] = None


def told_loss(bounds: Mapping[str, Bound]) -> str:
    """What bounds come to, for people.

    Args:
        bounds: By tensor; at least one.

    Returns:
        The number of tensors, and the worst of them.
    """
    worst = max(bounds, key=lambda name: bounds[name].relative)
    most = max(bounds, key=lambda name: bounds[name].max_abs)
    return (
        f"{len(bounds)} tensors are not what was to be saved, by up to {bounds[worst].relative:.2g} of their length "
        f"({worst}) and {bounds[most].max_abs:.2g} in an item ({most}); all others are exact"
    )


def fill_arena(reader: Reader, snapshot: Snapshot, manifest: Manifest, arena: Arena, numbers: Sequence[int]) -> None:
    """Reads verified chunks, decoded, to where they belong; without a codec straight from the tier.

    Args:
        reader: The tiers.
        snapshot: Which.
        manifest: Of the shard.
        arena: For that shard.
        numbers: Which chunks.

    Raises:
        CorruptCheckpointError: A chunk is right in no place.
    """
    parts = [numbers[first : first + _PART] for first in range(0, len(numbers), _PART)]
    shard = Rebuilt(reader, snapshot, manifest)

    def fill(part: Sequence[int]) -> None:
        if manifest.codec == "none":
            reader.fill(snapshot, manifest, part, [arena.chunk(manifest, number) for number in part])
            return
        for number, data in shard.chunks(part).items():
            arena.chunk(manifest, number)[:] = data

    with ThreadPoolExecutor(FILLING_THREADS, thread_name_prefix="shade-restore") as pool:
        list(pool.map(fill, parts))


def restore_app_state(
    reader: Reader, group: ProcessGroup, contents: AppState, step: int | None, only: Sequence[str] | None
) -> tuple[Restored, ReadSnapshot | None]:
    """Loads a snapshot. Collective.

    Args:
        reader: Of the tiers.
        group: The ranks.
        contents: What is attached.
        step: Of the snapshot; None: the newest that is whole.
        only: Names of what to load; None: everything.

    Returns:
        What was loaded; and the snapshot, None where there is none.

    Raises:
        CheckpointError: As `read_newest`, and as `AppState.load`; nothing was changed.
    """
    begun = time.monotonic()
    found = read_newest(reader, group, only, step, contents.forgettable)
    if found is None:
        return Restored(0, 0), None
    record = found.record
    names = contents.names if only is None else list(only)
    if group.rank >= record.world_size and "random" in names:
        names.remove("random")  # nobody's before: a rank that is new keeps the generators that it was seeded with
    contents.load(found.tree, found.tensors, names, found.trees)
    for arena, manifest in found.arenas:
        for name, entry in manifest.tensors.items():
            if contents.forgettable(name):
                arena.forget(entry.start, entry.stop)
    seconds = time.monotonic() - begun
    logger.info(
        "restored step %d from %s: %.1f MB in %.2f s",
        *(record.step, ", ".join(found.tiers), record.num_bytes / 1e6, seconds),
    )
    tiers = tuple(found.tiers)
    return Restored(record.step, contents.epoch, tiers, seconds, record.num_bytes, found.bounds), found
