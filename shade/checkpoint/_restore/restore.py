"""Finds the newest intact snapshot, reads it on every rank, and loads it into what is attached.

Ranks see different snapshots, so they exchange their lists and try from the newest down; one that is damaged beyond
repair on any rank is given up by all. A shard that every rank has in the memory of its machine is read by each, any
other by one rank, which broadcasts it. Parts of DTensors are read by the ranks that need them, if they reach them. The
world size may change: rank r restores the tree of the old rank r mod W.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import mmap
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from shade.checkpoint._buffer.copy_and_compare import copy_bytes
from shade.checkpoint._capture.app_state import AppState, refused
from shade.checkpoint._capture.flatten import completed, part_of, parts_in, tensors_in, torch_dtype
from shade.checkpoint._capture.module_state import (
    check_module,
    loads_all_plainly,
    own_ways,
    plain_name,
    renamed,
    unwrapped,
    way_back_of,
)
from shade.checkpoint._capture.sharding import SavedDTensor, fitted, placed
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import Bound, Commit, Manifest, TensorEntry
from shade.checkpoint._restore.reader import UNREAD_SAVES, ChunkReads, Reader, Snapshot, SnapshotSource
from shade.errors import CheckpointError, CorruptCheckpointError, StateMismatchError, StorageError, StoreError
from shade.rank_group import RankGroup, SingleProcessGroup
from shade.tracking.events import emit, listeners

_BATCH: Final = 32
"""Chunks between two votes when one rank reads for all: 128 MiB."""
_THREADS: Final = 4
"""Threads that copy: page faults are faster in parallel."""
_PIECE_BYTES: Final = 16 * 2**20
"""Bytes that a thread copies at a time."""
_TRIES: Final = 10
"""How many snapshots that another process removes during the read are given up for a newer one."""

Needed = Mapping[str, range | None]
"""Tensors that a rank needs, by name, and the rows of each; None: all."""

logger = logging.getLogger("shade.checkpoint")


def map_memory(num_bytes: int) -> mmap.mmap:
    """Returns new memory, in huge pages where the kernel has them; pages that are never written cost nothing."""
    mapped = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return mapped


class Arena:
    """Memory for one shard's data; its tensors keep it alive.

    Args:
        num_bytes: Length of the data.
    """

    def __init__(self, num_bytes: int) -> None:
        self._map = map_memory(num_bytes)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)[:num_bytes]

    def copy_from(self, data: torch.Tensor, entries: Iterable[TensorEntry]) -> None:
        """Copies tensors from a whole shard's data (uint8) to their place."""
        target, source = self.tensor.data_ptr(), data.data_ptr()

        def take(piece: range) -> None:
            copy_bytes(target + piece.start, source + piece.start, len(piece))

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="shade-restore") as pool:
            list(pool.map(take, _pieces(entries)))

    def chunks(self, manifest: Manifest, numbers: Iterable[int]) -> dict[int, memoryview]:
        """Returns the memory of chunks, to be written, by number."""
        here, length = memoryview(self._map), manifest.chunk_bytes
        return {number: here[number * length : number * length + manifest.data_length(number)] for number in numbers}

    def tensors(self, entries: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
        """Returns tensors in this memory, by name; each has a storage of its own."""
        return tensors_at(self._map, entries)

    def release_pages(self, start: int, stop: int) -> None:
        """Releases the whole pages within a range; their content is lost."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)


def _pieces(entries: Iterable[TensorEntry]) -> list[range]:
    """Joins neighbours, with the layout's gaps, and splits them into ranges that one thread copies at a time."""
    joined: list[range] = []
    for entry in sorted(entries, key=lambda entry: entry.start):
        if joined and entry.start - joined[-1].stop < mmap.PAGESIZE:
            joined[-1] = range(joined[-1].start, entry.stop)
        else:
            joined.append(range(entry.start, entry.stop))
    return [whole[first : first + _PIECE_BYTES] for whole in joined for first in range(0, len(whole), _PIECE_BYTES)]


def tensors_at(data: mmap.mmap | memoryview, entries: Mapping[str, TensorEntry]) -> dict[str, torch.Tensor]:
    """Returns tensors, by name, in the memory of a whole shard; each has a storage of its own."""
    found = {}
    for name, entry in entries.items():
        dtype, count = torch_dtype(entry.dtype), math.prod(entry.shape)
        flat = (
            torch.frombuffer(data, dtype=dtype, count=count, offset=entry.start)
            if count
            else torch.empty(0, dtype=dtype)
        )
        found[name] = flat.view(entry.shape)
    return found


@dataclass(frozen=True)
class Restored:
    """The result of a restore."""

    step: int
    """Optimizer steps done; 0 if there was no snapshot."""
    known_epoch: int | None
    """Epoch of the attached sampler; None if nothing that is attached counts epochs."""
    tiers: tuple[str, ...] = ()
    """Names of the tiers that were read; empty if there was no snapshot."""
    seconds: float = 0.0
    num_bytes: int = 0
    bounds: Mapping[str, Bound] = field(default_factory=dict)
    """Error bound of each tensor that is not exact; empty if all are."""
    missing_keys: tuple[str, ...] = ()
    """With ``strict=False``: names in the module that were not loaded."""
    unexpected_keys: tuple[str, ...] = ()
    """With ``strict=False``: names in the snapshot that were not used."""

    @property
    def epoch(self) -> int:
        """Epoch to continue with: that of the attached sampler; 0 if nothing attached counts epochs, which is said if
        steps of a loop over epochs would be done again."""
        if self.known_epoch is None and self.step:
            logger.warning(
                "step %d is restored, and nothing attached counts epochs: a loop that begins with epoch 0 trains them "
                "again; attach a ShadeSampler, or an object with an epoch, a state_dict and a load_state_dict",
                self.step,
            )
        return self.known_epoch or 0

    def __bool__(self) -> bool:
        return bool(self.tiers)


@dataclass
class ReadSnapshot:
    """The content of a snapshot, on one rank."""

    record: Commit
    tiers: list[str]
    """Tiers from which any rank read a shard; each once."""
    sources: Sequence[SnapshotSource]
    """Places that hold it, as this rank sees them."""
    tree: Any
    """The tree of this rank."""
    tensors: dict[str, torch.Tensor]
    """The wanted tensors of all shards, by name."""
    newest_sequence: int
    """No snapshot that any rank sees, or cannot read, has a higher sequence."""
    arenas: list[tuple[Arena, Manifest]]
    trees: list[Any] = field(default_factory=list)
    """The trees of all ranks, by rank."""
    bounds: dict[str, Bound] = field(default_factory=dict)
    """Error bounds of the tensors that are not exact, as measured when they were saved."""


def read_newest(
    reader: Reader,
    group: RankGroup,
    only: Collection[str] | None = None,
    step: int | None = None,
    borrowable: Callable[[Any, int], Set[str]] = lambda tree, rank: frozenset(),
    needed: Callable[[Any, Mapping[str, torch.Tensor], Collection[str] | None], Needed] | None = None,
) -> ReadSnapshot | None:
    """Reads the newest intact snapshot. Collective.

    Args:
        reader: The tiers of this rank.
        group: The ranks.
        only: Names of attached objects to read, the same on every rank; None for all.
        step: Reads only this step; None for the newest.
        borrowable: Returns the names of a rank's tensors, which its tree is given for, that are copied onwards and then
            not used: they may lie in shared memory, which the next save overwrites.
        needed: Returns which parts of DTensors this rank needs, given its tree, all tensors by name, of which those
            parts have not been read yet, and ``only``; None: all of them.

    Returns:
        Its content; None if no tier has a snapshot, or none of that step.

    Raises:
        CorruptCheckpointError: No snapshot is intact; the message has the reason for each.
        CheckpointError: Storage does not answer; or another tier does not and no tier has a snapshot. A newer one may
            exist there.
    """
    here = {snapshot.record.digest: snapshot for snapshot in reader.snapshots()}
    reports = group.gather(
        {
            "records": [snapshot.record.to_bytes().decode() for snapshot in here.values()],
            "silent": reader.unreachable,
            "damaged": reader.damaged,
            "durable": [tier.name for tier in reader.tiers if tier.is_durable],
        }
    )
    unreachable = {name: why for report in reports for name, why in report["silent"].items()}
    for name in reports[0]["durable"]:
        if all(name in report["silent"] for report in reports):
            raise _tiers_unreachable({name: unreachable[name]})
    records = {record.digest: record for report in reports for record in map(_record, report["records"])}
    candidates = sorted(records.values(), key=lambda record: (record.sequence, record.step), reverse=True)
    candidates = [record for record in candidates if step is None or record.step == step]
    newest = max((record.sequence for record in records.values()), default=0)
    newest += UNREAD_SAVES * any(report["damaged"] or report["silent"] for report in reports)
    lost = sorted({location for report in reports for location in report["damaged"]})
    unreadable = [f"{location}: its record cannot be read" for location in lost]
    if unreadable and group.rank == 0:
        logger.error("%s; continuing with the other snapshots", "; ".join(unreadable))
    reasons = []
    for record in candidates:
        snapshot = here.get(record.digest, Snapshot(record, ()))
        attempt = _Attempt(reader, group, snapshot, only, newest, borrowable, needed)
        try:
            return attempt.run()
        except _CeasedError as error:
            if group.rank == 0:
                logger.warning("%s; it is passed over", error)
        except CorruptCheckpointError as error:
            reasons.append(str(error))
            if group.rank == 0 and record is not candidates[-1]:
                logger.error("%s; trying the one before", error)
    reasons += unreadable
    if reasons:
        raise CorruptCheckpointError("no snapshot is intact: " + "; ".join(reasons))
    if unreachable:
        raise _tiers_unreachable(unreachable)
    return None


def _tiers_unreachable(unreachable: Mapping[str, str]) -> CheckpointError:
    return CheckpointError.of(
        "every tier to answer before a run starts from nothing or from an old snapshot",
        "; ".join(f"{name}: {why}" for name, why in unreachable.items()),
        "bring it back, use the shade that wrote it, or leave it out to start without it",
    )


def _record(text: str) -> Commit:
    return Commit.parse(text.encode())


class _CeasedError(CheckpointError):
    """A snapshot that shared memory alone had, and that a later save had begun to replace when it was ended."""


class _Shard(NamedTuple):
    """A shard, this rank's memory for it, and the tensors of it that every rank wants."""

    manifest: Manifest
    arena: Arena
    wanted: dict[str, TensorEntry]


@dataclass(frozen=True)
class _Place:
    """Where a shard comes from."""

    source: int
    """The rank that reads its manifest, and sends what the others do not read themselves."""
    num_near: int
    """Ranks whose machine's memory has it."""


class _Attempt:
    """One attempt to read one snapshot, on one rank."""

    def __init__(
        self,
        reader: Reader,
        group: RankGroup,
        snapshot: Snapshot,
        only: Collection[str] | None,
        newest_sequence: int,
        borrowable: Callable[[Any, int], Set[str]],
        needed: Callable[[Any, Mapping[str, torch.Tensor], Collection[str] | None], Needed] | None,
    ) -> None:
        self._reader, self._group, self._snapshot, self._only = reader, group, snapshot, only
        self._newest_sequence, self._borrowable, self._needed = newest_sequence, borrowable, needed
        self._tiers: dict[str, None] = {}

    def run(self) -> ReadSnapshot:
        record, group = self._snapshot.record, self._group
        near = group.gather([self._is_near(rank) for rank in range(record.world_size)])
        kept = group.gather([not source.tier.every_rank_commits for source in self._snapshot.sources])
        ranks_with_source = [rank for rank, sources in enumerate(kept) if sources]
        if not any(map(any, kept)) and not all(any(ranks) for ranks in zip(*near, strict=True)):
            # A rank that begins a save gives its part up; its processes were not all killed at the same moment.
            got = "a part of it: a save that was cut off had begun to replace it, or a machine is gone"
            raise _CeasedError(f"expected all of step {record.step}, which shared memory alone had, got {got}")
        places = []
        for shard in range(record.world_size):
            ranks_near = [rank for rank in range(group.world_size) if near[rank][shard]]
            source = ranks_near[0] if ranks_near else ranks_with_source[shard % len(ranks_with_source)]
            places.append(_Place(source, len(ranks_near)))
        with ChunkReads(self._reader, self._snapshot) as self._reads:
            return self._read(places)

    def _read(self, places: Sequence[_Place]) -> ReadSnapshot:
        record, group = self._snapshot.record, self._group
        result = ReadSnapshot(record, [], self._snapshot.sources, None, {}, self._newest_sequence, [])
        shards = self._open(places)
        result.arenas = [(shard.arena, shard.manifest) for shard in shards]
        result.trees = [part_of(shard.manifest.tree, self._only) for shard in shards]
        result.tree = completed(result.trees[group.rank % record.world_size], result.trees)
        for arena, manifest in result.arenas:
            named = self._entries(manifest, with_parts=True)
            result.tensors |= arena.tensors(named)
            items = manifest.bounds.items()  # a bound of 0: the lossy codec was exact after all
            result.bounds |= {name: bound for name, bound in items if name in named and bound.max_abs > 0}
        needed = self._needed(result.tree, result.tensors, self._only) if self._needed is not None else {}
        spans = [spans_of(shard.manifest, needed) for shard in shards]
        for (manifest, arena, _), here, place in zip(shards, spans, places, strict=True):
            if here and not place.num_near:
                self._reads.begin(manifest, arena.chunks(manifest, manifest.chunks_between(here.values())))
        for shard, place in zip(shards, places, strict=True):
            if place.num_near == group.world_size:
                result.tensors |= self._read_on_every_rank(*shard)
            else:
                self._send(shard.manifest, shard.arena, shard.manifest.chunks_of(shard.wanted), place)
        if self._needed is not None:
            self._read_parts(result, spans, places)
        if result.bounds and group.rank == 0:
            logger.warning("step %d comes back with loss: %s", record.step, describe_loss(result.bounds))
        result.tiers = list(dict.fromkeys(name for names in group.gather(list(self._tiers)) for name in names))
        return result

    def _open(self, places: Sequence[_Place]) -> list[_Shard]:
        """Returns the shards, each manifest read by one rank; begins to read what it will send."""
        digests, group = self._snapshot.record.manifests, self._group
        opened: dict[int, _Shard] = {}
        failure = None
        try:
            for number, place in enumerate(places):
                if place.source == group.rank:
                    shard = opened[number] = self._shard(self._reader.manifest(self._snapshot, number))
                    if place.num_near < group.world_size:
                        numbers = shard.manifest.chunks_of(shard.wanted)
                        self._reads.begin(shard.manifest, shard.arena.chunks(shard.manifest, numbers))
        except (CheckpointError, StoreError, StorageError) as error:
            failure = str(error)
        self._check(failure)
        contents = group.gather({str(number): each.manifest.to_bytes().decode() for number, each in opened.items()})
        for number, place in enumerate(places):
            if number not in opened:
                content = contents[place.source][str(number)].encode()
                opened[number] = self._shard(Manifest.parse(content, digests[number]))
        return [opened[number] for number in range(len(places))]

    def _shard(self, manifest: Manifest) -> _Shard:
        return _Shard(manifest, Arena(manifest.num_bytes), self._entries(manifest))

    def _read_parts(self, result: ReadSnapshot, spans: Sequence[Mapping[str, range]], places: Sequence[_Place]) -> None:
        """Reads the parts of DTensors that this rank needs; what it does not reach, the first rank that does sends."""
        missing: dict[str, list[int]] = {}
        for shard, (arena, manifest) in enumerate(result.arenas):
            here = spans[shard]
            if not here:
                continue
            numbers = manifest.chunks_between(here.values())
            try:
                borrowed = self._read_here(manifest, arena, {name: manifest.tensors[name] for name in here}, numbers)
                result.tensors |= borrowed or {}
                self._note(is_near=borrowed is not None)
            except (CheckpointError, StoreError, StorageError):
                missing[str(shard)] = numbers
        for shard, numbers in _all_of(self._group.gather(missing)).items():
            arena, manifest = result.arenas[shard]
            self._send(manifest, arena, numbers, places[shard])

    def _is_near(self, rank: int) -> bool:
        """Returns whether this machine's memory has a rank's shard; its chunks may still be damaged."""
        for source in self._snapshot.sources:
            if source.tier.every_rank_commits:
                content = source.tier.read_manifest(source.location, rank)
                if content is not None and digest_of(content) == self._snapshot.record.manifests[rank]:
                    return True
        return False

    def _read_on_every_rank(
        self, manifest: Manifest, arena: Arena, wanted: Mapping[str, TensorEntry]
    ) -> dict[str, torch.Tensor]:
        """Reads a shard on every rank; if one fails, all do. Returns the tensors that are views in place."""
        borrowed, failure = None, None
        try:
            borrowed = self._read_here(manifest, arena, wanted, manifest.chunks_of(wanted))
        except (CheckpointError, StoreError, StorageError) as error:
            failure = str(error)
        self._check(failure)
        self._note(is_near=True)
        return borrowed or {}

    def _read_here(
        self, manifest: Manifest, arena: Arena, wanted: Mapping[str, TensorEntry], numbers: Sequence[int]
    ) -> dict[str, torch.Tensor] | None:
        """Reads chunks of a shard; returns wanted tensors that are views of memory; None if it lies elsewhere."""
        mapped = self._reader.in_place(self._snapshot, manifest, numbers)
        if mapped is None:
            self._reads.begin(manifest, arena.chunks(manifest, numbers))
            self._reads.finish(manifest, numbers)
            return None
        borrowable = self._borrowable(manifest.tree, manifest.rank)
        borrowed = tensors_at(mapped, {name: entry for name, entry in wanted.items() if name in borrowable})
        data = torch.frombuffer(mapped, dtype=torch.uint8)
        arena.copy_from(data, (wanted[name] for name in wanted.keys() - borrowed.keys()))
        return borrowed

    def _send(self, manifest: Manifest, arena: Arena, numbers: Sequence[int], place: _Place) -> None:
        """Reads chunks on one rank, and broadcasts them in batches, while it reads the next ones."""
        mine = self._group.rank == place.source
        if mine:
            self._reads.begin(manifest, arena.chunks(manifest, numbers))
        for first in range(0, len(numbers), _BATCH):
            batch, failure = numbers[first : first + _BATCH], None
            try:
                if mine:
                    self._reads.finish(manifest, batch)
            except (CheckpointError, StoreError, StorageError) as error:
                failure = str(error)
            self._check(failure)
            for number in batch:
                start = number * manifest.chunk_bytes
                self._group.broadcast(arena.tensor[start : start + manifest.chunk_bytes], place.source)
        if mine:
            self._note(is_near=place.num_near > 0)

    def _check(self, failure: str | None) -> None:
        reason = next(filter(None, self._group.gather(failure)), None)
        if reason is not None:
            raise CorruptCheckpointError(reason)

    def _entries(self, manifest: Manifest, *, with_parts: bool = False) -> dict[str, TensorEntry]:
        """Returns the tensors of a shard that every rank wants, and perhaps those that `_read_parts` reads."""
        tree = part_of(manifest.tree, self._only)
        parts = parts_in(tree, manifest.rank)
        named = manifest.tensors if self._only is None else tensors_in(tree) | parts
        left_out = set() if with_parts or self._needed is None else parts
        return {name: entry for name, entry in manifest.tensors.items() if name in named and name not in left_out}

    def _note(self, *, is_near: bool) -> None:
        near = [source for source in self._snapshot.sources if source.tier.every_rank_commits == is_near]
        self._tiers[(near or self._snapshot.sources)[0].tier.name] = None


def spans_of(manifest: Manifest, needed: Needed) -> dict[str, range]:
    """Returns the bytes of a shard that are needed, by tensor."""
    spans: dict[str, range] = {}
    for name in needed.keys() & manifest.tensors.keys():
        entry, rows = manifest.tensors[name], needed[name]
        if entry.start < entry.stop:
            row = 0 if rows is None else (entry.stop - entry.start) // entry.shape[0]
            whole = range(entry.start, entry.stop)
            spans[name] = whole if rows is None else whole[rows.start * row : rows.stop * row]
    return spans


def _all_of(missing: Sequence[Mapping[str, Sequence[int]]]) -> dict[int, list[int]]:
    """Returns the chunks that some rank misses, by shard."""
    shards = sorted({int(shard) for each in missing for shard in each})
    return {shard: sorted({number for each in missing for number in each.get(str(shard), ())}) for shard in shards}


def describe_loss(bounds: Mapping[str, Bound]) -> str:
    """Returns a sentence about error bounds: the number of tensors and the worst of them."""
    worst = max(bounds, key=lambda name: bounds[name].relative)
    most = max(bounds, key=lambda name: bounds[name].max_abs)
    return (
        f"{len(bounds)} tensors are not exactly what was saved: they differ by up to {bounds[worst].relative:.2g} of "
        f"their norm ({worst}) and {bounds[most].max_abs:.2g} in an item ({most}); all others are exact"
    )


def read_newest_alone(
    reader: Reader, only: Collection[str] | None = None, step: int | None = None
) -> ReadSnapshot | None:
    """Reads as `read_newest`, in a process that saves nothing, while another one may save and remove snapshots."""

    def listed() -> list[str]:
        return [snapshot.record.digest for snapshot in reader.snapshots()]

    for is_last in [*[False] * _TRIES, True]:
        before, found = listed(), None
        try:
            found = read_newest(reader, SingleProcessGroup(), only, step)
        except CorruptCheckpointError:
            # A snapshot that was removed before it was read looks damaged: those that have come meanwhile are tried.
            if is_last or before == listed():
                raise
            continue
        if is_last or step is not None or found is None or found.record.digest == before[0] or before == listed():
            break
    return found


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Postpones Python's garbage collection: a full one visits all that PyTorch has imported, which takes longer than
    to plan a restore, and what planning makes is free without it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_no_collection()
def restore_app_state(
    reader: Reader, group: RankGroup, contents: AppState, step: int | None, only: Sequence[str] | None
) -> tuple[Restored, ReadSnapshot | None]:
    """Loads a snapshot (None: the newest intact one) into what is attached, or ``only`` into these of it, and
    releases the memory that it was read into. Collective. Returns the result, and the snapshot; None if there is
    none. Raises CheckpointError as `read_newest` and `AppState.load` do; nothing was changed."""
    begun = time.monotonic()
    found = read_newest(reader, group, only, step, contents.forgettable, contents.needed)
    if found is None:
        return Restored(0, 0), None
    record = found.record
    names = contents.names if only is None else list(only)
    if only is None:
        attached = {name for names in group.gather(contents.names) for name in names}
        if left := contents.left_out(found.tree, attached):
            logger.warning(
                "step %d also holds %s, which nothing attached takes: it is not restored, and the next save is without "
                "it; attach() it before you restore",
                *(record.step, ", ".join(left)),
            )
    if group.rank >= record.world_size and "random" in names:
        # A new rank keeps the generators that it was seeded with.
        names.remove("random")
    contents.load(found.tree, found.tensors, names, found.trees, lambda failure: _agree(group, failure))
    for arena, manifest in found.arenas:
        forgettable = contents.forgettable(manifest.tree, manifest.rank)
        for name, entry in manifest.tensors.items():
            if name in forgettable:
                arena.release_pages(entry.start, entry.stop)
    seconds = time.monotonic() - begun
    logger.info(
        "restored step %d from %s: %.1f MB in %.2f s",
        *(record.step, ", ".join(found.tiers), record.num_bytes / 1e6, seconds),
    )
    tiers = tuple(found.tiers)
    if listeners:
        emit("restore", seconds, rank=group.rank, step=record.step, state_bytes=record.num_bytes, tier=", ".join(tiers))
    return Restored(record.step, contents.epoch, tiers, seconds, record.num_bytes, found.bounds), found


def _agree(group: RankGroup, failure: Exception | None) -> None:
    """Raises what went wrong on another rank, unless something went wrong here. Collective."""
    failures = group.gather(None if failure is None else " ".join(str(failure).split()))
    rank = next((rank for rank, each in enumerate(failures) if each is not None), None)
    if failure is None and rank is not None:
        raise StateMismatchError(f"rank {rank}: {failures[rank]}; so no rank has changed anything")


def load_module(
    name: str, module: torch.nn.Module, saved: Any, *, strict: bool = True, prefix: str = ""
) -> tuple[list[str], list[str]]:
    """Loads a saved state into a module, cast to its floating-point types, as `torch.nn.Module.load_state_dict` does.

    Args:
        name: What to call the module in a message.
        module: The module.
        saved: The saved state.
        strict: Whether everything has to fit. Otherwise what does not, in name or shape, stays as it is.
        prefix: Takes the saved names that begin with it, without it.

    Returns:
        Names in the module that were not loaded, and saved names that were not used.

    Raises:
        StateMismatchError: It does not fit, or nothing of it does; nothing was changed.
    """
    if not isinstance(saved, Mapping):
        raise StateMismatchError.of(f"the state of a module for {name!r}", type(saved).__name__, "pass another name")
    target, saved = unwrapped(module), _beginning_with(saved, prefix)
    own, fits, ways = target.state_dict(), OrderedDict[str, Any](), own_ways(target)
    saved = renamed(own, saved)
    for key, value in saved.items():
        mine = own.get(key)
        if isinstance(value, SavedDTensor):
            value = value.whole()
        if all(isinstance(each, torch.Tensor) and each.is_floating_point() for each in (mine, value)):
            value = value.to(mine.dtype)
        is_alike = key in own and getattr(mine, "shape", None) == getattr(value, "shape", None)
        if is_alike:
            value = fitted(value, mine, key, placed)
        if strict or is_alike or ways is None or key.startswith(ways):
            fits[key] = value
    if not fits and own:
        check_module(name, own, saved, ways)
    whole = fits if strict else fits | {key: own[key] for key in own.keys() - fits.keys()}
    check_module(name, own, whole, ways)
    fits._metadata = getattr(saved, "_metadata", {})  # type: ignore[attr-defined]
    # Parts that load themselves may refuse what they get, after others have been loaded.
    put_back = None if loads_all_plainly(target) else way_back_of(target)
    try:
        found = target.load_state_dict(fits, strict=strict)
    except Exception as error:
        if put_back is not None:
            put_back()
        raise refused(name, error) from error
    if strict or not isinstance(found, tuple):
        return [], []
    missing, unexpected = found
    return sorted(missing), sorted({*unexpected, *(saved.keys() - fits.keys())})


def _beginning_with(saved: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    """Returns the part of a module's state that belongs to one of its modules."""
    if not prefix:
        return saved
    prefix = f"{prefix.rstrip('.')}."

    def taken(by_name: Mapping[str, Any]) -> OrderedDict[str, Any]:
        return OrderedDict((each[len(prefix) :], by_name[each]) for each in by_name if each.startswith(prefix))

    part = taken(saved) or taken({plain_name(each): value for each, value in saved.items()})
    if not part:
        known = sorted({plain_name(each).partition(".")[0] for each in saved})
        raise StateMismatchError.of(f"names that begin with {prefix!r}", f"those of {', '.join(known)}", "see prefix=")
    versions = getattr(saved, "_metadata", {})
    part._metadata = {  # type: ignore[attr-defined]
        f"{path}."[len(prefix) :].rstrip("."): each for path, each in versions.items() if f"{path}.".startswith(prefix)
    }
    return part
