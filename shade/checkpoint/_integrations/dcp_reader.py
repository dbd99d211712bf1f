"""ShadeReader: loads a snapshot with `torch.distributed.checkpoint` from cluster memory and durable storage.

DCP plans which region of each tensor a rank needs, as if it had been saved whole; the trees say which shards have it.
Each rank reads and verifies the chunks that hold those bytes, from the nearest location that has them intact: one
group while the one before is copied onwards. Nothing that was stored is unpickled.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from types import TracebackType
from typing import Any, Final

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future
from typing_extensions import Self

from shade.checkpoint._buffer.shared_memory_folder import check_run_name
from shade.checkpoint._capture.flatten import tensors_in, unflatten
from shade.checkpoint._capture.sharding import SavedDTensor
from shade.checkpoint._format.manifest import Manifest
from shade.checkpoint._integrations.dcp_shard import is_dcp, state_of
from shade.checkpoint._integrations.dcp_writer import names_step, step_of
from shade.checkpoint._restore.reader import ChunkReads, Reader, Snapshot
from shade.checkpoint._restore.restore import Arena, Needed, spans_of
from shade.checkpoint._session.open_tiers import open_to_read
from shade.errors import CheckpointError, ConfigError, CorruptCheckpointError, ShadeError, StateMismatchError

WINDOW_CHUNKS: Final = 16
"""Chunks that are read at a time, unless one tensor needs more: 64 MiB."""

Chunk = tuple[int, int]
"""Shard and number."""


class ShadeReader(StorageReader):
    """A StorageReader for `dcp.load`. Opens nothing before it is used; closed by `close` or garbage collection.

    Args:
        store: URL of the cluster whose memory holds snapshots.
        persist_to: Path or URL of durable storage; only read. At least one of both.
        run: Id of the run that saved them.
        step: Step to load; ``checkpoint_id`` of `dcp.load` overrides it. None: the newest.

    Raises:
        ConfigError: An argument is invalid.
    """

    def __init__(
        self,
        store: str | None = None,
        *,
        persist_to: str | os.PathLike[str] | None = None,
        run: str = "run",
        step: int | None = None,
    ) -> None:
        super().__init__()
        check_run_name(run)
        if store is None and persist_to is None:
            raise ConfigError.of("a location where snapshots are", "neither store nor persist_to", "name at least one")
        self._store, self._persist_to, self._run = store, persist_to, run
        self.step = step
        self._resources = contextlib.ExitStack()
        # Nothing closes a reader that `dcp.load` was given in the call.
        weakref.finalize(self, self._resources.close)
        self._reader: Reader | None = None
        self._saved: _SavedState | None = None

    # ── called by DCP, in this order ────────────────────────────────────────────────────────────────────────────────

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a load; takes the step from ``checkpoint_id``, if it is given."""
        if checkpoint_id is not None:
            self.step = step_of(checkpoint_id)

    def read_metadata(self) -> Metadata:
        """Returns DCP's metadata of the snapshot. To look into it raises CheckpointError if there is none, or
        CorruptCheckpointError if a rank's tree is lost in every copy."""
        try:
            self._saved = _SavedState(self._tiers(), *self._choose())
        except ShadeError as error:
            return _NoMetadata(error)
        return self._saved.metadata()

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: `read_metadata` has found all out."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Adds the digest of the snapshot that this rank sees."""
        return replace(plan, storage_data=self._chosen().snapshot.record.digest)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Checks that all ranks load the same snapshot, and adds which regions more than one rank reads."""
        if len({plan.storage_data for plan in plans}) > 1:
            cure = "name one: checkpoint_id='120', or step=120; and see that all ranks reach the same locations"
            raise CheckpointError.of("the same newest snapshot on every rank", "different ones", cure)
        wanted = [{_region_key(item) for item in plan.items} for plan in plans]
        readers = Counter(chain.from_iterable(wanted))
        return [
            replace(plan, storage_data={region for region in regions if readers[region] > 1})
            for plan, regions in zip(plans, wanted, strict=True)
        ]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads this rank's items; done when it returns."""
        saved, shared = self._chosen(), plan.storage_data or ()
        objects = [item for item in plan.items if item.type is LoadItemType.BYTE_IO]
        for item, value in zip(objects, saved.objects(objects), strict=True):
            _deliver(planner, item, value)
        tensors = [saved.planned(item) for item in plan.items if item.type is not LoadItemType.BYTE_IO]
        _load(saved, tensors, planner, {at for job in tensors if _region_key(job.item) in shared for at in job.chunks})
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether the id names a step."""
        return names_step(checkpoint_id)

    def steps(self) -> list[int]:
        """Returns the steps that DCP saved in this run, newest first; loading shows whether they are intact."""
        return [snapshot.record.step for snapshot, _ in self._found()]

    def close(self) -> None:
        """Closes connections. Safe to call twice."""
        self._resources.close()
        self._reader = self._saved = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _tiers(self) -> Reader:
        if self._reader is None:
            self._reader = open_to_read(self._store, self._persist_to, self._run, self._resources)
        return self._reader

    def _chosen(self) -> _SavedState:
        assert self._saved is not None, "DCP reads the metadata first"
        return self._saved

    def _found(self) -> Iterator[tuple[Snapshot, Manifest]]:
        """Yields snapshots that DCP saved, newest first, with their first manifest."""
        for snapshot in self._tiers().snapshots():
            if self.step in (None, snapshot.record.step):
                manifest = self._tiers().manifest(snapshot, 0)
                if is_dcp(manifest.tree):
                    yield snapshot, manifest

    def _choose(self) -> tuple[Snapshot, Manifest]:
        for found in self._found():
            return found
        which = "" if self.step is None else f" of step {self.step}"
        silent = "; ".join(f"{name}: {why}" for name, why in self._tiers().unreachable.items())
        cure = "see shade checkpoint list; what Checkpointer saved, Checkpointer restores"
        wanted = f"a snapshot{which} saved through DCP"
        raise CheckpointError.of(wanted, silent or f"none in run {self._run!r}", cure)


class _NoMetadata(Metadata):
    """Says to the planner why there is none."""

    # PyTorch 2.10 drops the error of `read_metadata`: "metadata is None". Newer versions quote it.

    def __init__(self, reason: ShadeError) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise self._reason


@dataclass(frozen=True)
class _PlannedRead:
    """An item of a plan, the region of the whole tensor that it needs, and the chunks that have it."""

    item: ReadItem
    region: tuple[range, ...]
    chunks: frozenset[Chunk]


class _SavedState:
    """A snapshot's state, as the trees of all ranks describe it, in memory that is filled as it is needed. Of a name
    that several ranks have, the first counts."""

    def __init__(self, reader: Reader, snapshot: Snapshot, manifest: Manifest) -> None:
        self.reader, self.snapshot = reader, snapshot
        others = range(1, snapshot.record.world_size)
        self._manifests = [manifest, *(reader.manifest(snapshot, rank) for rank in others)]
        self._arenas = [Arena(manifest.num_bytes) for manifest in self._manifests]
        self._shards = {name: shard for shard, manifest in enumerate(self._manifests) for name in manifest.tensors}
        self._tensors: dict[str, torch.Tensor] = {}
        self._nodes: dict[str, Any] = {}
        self._paths: dict[str, Any] = {}
        self._split: dict[str, SavedDTensor] = {}
        """Those that were asked for, which know where their parts lie."""
        for manifest, arena in zip(self._manifests, self._arenas, strict=True):
            nodes, paths = state_of(manifest.tree)
            self._nodes, self._paths = nodes | self._nodes, paths | self._paths
            self._tensors |= arena.tensors(manifest.tensors)

    def metadata(self) -> Metadata:
        """Returns DCP's metadata, with each tensor as one piece."""
        names = dict.fromkeys([*self._paths, *self._nodes])
        entries = {name: self._entry(name) for name in names if name in self._nodes}
        return Metadata(entries, planner_data=self._paths or None)

    def objects(self, items: Sequence[ReadItem]) -> list[Any]:
        """Reads the objects that items name."""
        nodes = [self._node(item.storage_index.fqn) for item in items]
        chunks = self._chunks(dict.fromkeys(tensors_in(nodes)))
        self.read(chunks, shared=chunks)
        # Clones: a view would keep the memory of a whole shard alive.
        return [
            unflatten(node, {name: self._tensors[name].clone() for name in tensors_in(node) & self._tensors.keys()})[0]
            for node in nodes
        ]

    def planned(self, item: ReadItem) -> _PlannedRead:
        """Returns what an item needs."""
        name, value = item.storage_index.fqn, self._value(item.storage_index.fqn)
        ends = map(sum, zip(item.storage_offsets, item.lengths, strict=True))
        region = tuple(map(range, item.storage_offsets, ends))
        if len(region) != len(value.shape) or any(map(lambda index, size: index.stop > size, region, value.shape)):
            raise StateMismatchError.of(f"a part of {list(value.shape)} of {name!r}", list(region), "load as saved")
        if not math.prod(item.lengths):
            needed: Needed = {}
        elif isinstance(value, SavedDTensor):
            needed = dict(value.needed(region))
        else:
            needed = dict.fromkeys(tensors_in(self._node(name)), region[0] if region else None)
        return _PlannedRead(item, region, self._chunks(needed))

    def deliver(self, job: _PlannedRead, planner: LoadPlanner) -> None:
        """Copies what was read into the planner's tensor."""
        item, target = job.item, planner.resolve_tensor(job.item).detach()
        if target.shape != item.lengths:
            expected, got = f"{item.dest_index.fqn!r} to take {list(item.lengths)}", list(target.shape)
            raise StateMismatchError.of(expected, got, "build the state as it was saved")
        # Made anew: numbers that lie where their type may not be written were copied, and before they were read.
        value = self._value(item.storage_index.fqn)
        if isinstance(value, SavedDTensor):
            value.copy_to(target, job.region)
        else:
            target.copy_(value[tuple(slice(index.start, index.stop) for index in job.region)])
        planner.commit_tensor(item, target)

    def read(self, chunks: Collection[Chunk], shared: Collection[Chunk]) -> None:
        """Reads verified chunks; those that another rank reads too, through the page cache."""
        with ChunkReads(self.reader, self.snapshot) as reads:
            for shard in sorted({shard for shard, _ in chunks}):
                numbers = sorted(number for at, number in chunks if at == shard)
                through = {number for at, number in shared if at == shard}
                manifest = self._manifests[shard]
                reads.begin(manifest, self._arenas[shard].chunks(manifest, numbers), through)
            reads.finish_all()

    def release(self, chunks: Iterable[Chunk]) -> None:
        """Gives memory of chunks back; their content is lost."""
        for shard, number in chunks:
            start = number * self._manifests[shard].chunk_bytes
            self._arenas[shard].release_pages(start, start + self._manifests[shard].data_length(number))

    def _chunks(self, needed: Needed) -> frozenset[Chunk]:
        chunks: set[Chunk] = set()
        for shard in {self._shards[name] for name in needed.keys() & self._shards.keys()}:
            spans = spans_of(self._manifests[shard], needed)
            chunks |= {(shard, number) for number in self._manifests[shard].chunks_between(spans.values())}
        return frozenset(chunks)

    def _node(self, name: str) -> Any:
        if name not in self._nodes:
            raise CorruptCheckpointError(f"expected {name!r} in the trees of the ranks, got none there")
        return self._nodes[name]

    def _value(self, name: str) -> torch.Tensor | SavedDTensor:
        value = self._split.get(name) or unflatten(self._node(name), self._tensors)
        if isinstance(value, SavedDTensor):
            self._split[name] = value
        if not isinstance(value, torch.Tensor | SavedDTensor):
            raise CorruptCheckpointError(f"expected a tensor at {name!r}, got {type(value).__name__}")
        return value

    def _entry(self, name: str) -> Any:
        if "tuple" in self._nodes[name]:
            return BytesStorageMetadata()
        value = self._value(name)
        pieces = [ChunkStorageMetadata(torch.Size([0] * len(value.shape)), value.shape)]
        return TensorStorageMetadata(TensorProperties(value.dtype), value.shape, pieces)


def _load(saved: _SavedState, jobs: list[_PlannedRead], planner: LoadPlanner, shared: Collection[Chunk]) -> None:
    """Reads what neighbours need, one group while the one before is copied into the planner's tensors."""
    jobs.sort(key=lambda job: min(job.chunks, default=(-1, -1)))
    groups: list[list[_PlannedRead]] = []
    together: set[Chunk] = set()
    for job in jobs:
        together |= job.chunks
        if not groups or len(together) > WINDOW_CHUNKS:
            groups.append([])
            together = set(job.chunks)
        groups[-1].append(job)
    needed = [{chunk for job in group for chunk in job.chunks} for group in groups]
    last = {chunk: number for number, chunks in enumerate(needed) for chunk in chunks}
    first = {chunk: number for number in reversed(range(len(needed))) for chunk in needed[number]}
    unread = [{chunk for chunk in chunks if first[chunk] == number} for number, chunks in enumerate(needed)]
    with ThreadPoolExecutor(1, thread_name_prefix="shade-ahead") as ahead:
        coming = [ahead.submit(saved.read, chunks, shared) for chunks in unread[:1]]
        for number, group in enumerate(groups):
            coming.pop().result()
            coming += [ahead.submit(saved.read, chunks, shared) for chunks in unread[number + 1 : number + 2]]
            for job in group:
                saved.deliver(job, planner)
            saved.release(chunk for chunk in needed[number] if last[chunk] == number)


def _region_key(item: ReadItem) -> tuple[Any, ...]:
    return item.storage_index.fqn, item.storage_offsets, item.lengths


def _deliver(planner: LoadPlanner, item: ReadItem, value: Any) -> None:
    """Puts an object where the planner would put it."""
    # DefaultLoadPlanner.load_bytes would unpickle it; only a planner with a method of its own gets bytes.
    if not isinstance(planner, DefaultLoadPlanner) or type(planner).load_bytes is not DefaultLoadPlanner.load_bytes:
        made = io.BytesIO()
        torch.save(value, made)
        made.seek(0)
        planner.load_bytes(item, made)
    elif planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[item.dest_index.fqn], value)
    else:
        planner.state_dict[item.dest_index.fqn] = value


def is_sharded(reader: Reader, snapshot: Snapshot) -> bool:
    """Returns whether a snapshot was saved through DCP; raises CorruptCheckpointError if its first manifest is lost."""
    return is_dcp(reader.manifest(snapshot, 0).tree)


def gather_state(reader: ShadeReader) -> dict[str, Any]:
    """Reads all shards of a snapshot as one state, in memory for all of it. Raises CheckpointError if there is no such
    snapshot, or CorruptCheckpointError if something in it is lost in every copy."""
    metadata = reader.read_metadata()
    wanted: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else entry
        for name, entry in metadata.state_dict_metadata.items()
    }
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            load(wanted, storage_reader=reader, planner=planner, no_dist=True)
    except CheckpointException as error:
        ((reason, _),) = error.failures.values()
        if isinstance(reason, ShadeError):
            raise reason from error
        raise CorruptCheckpointError(f"DCP cannot read it: {reason}") from error
    return unflatten_state_dict(wanted, metadata.planner_data) if metadata.planner_data else wanted
