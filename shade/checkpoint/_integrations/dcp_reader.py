"""ShadeReader: loads a snapshot with `torch.distributed.checkpoint` from cluster memory and durable storage.

DCP plans which rank needs which part of which saved piece, for any old and new world size. Each rank reads and verifies
the chunks that hold those bytes, from the nearest location that has them intact, through two windows of memory: one is
filled while the other is copied onwards. Nothing that was stored is unpickled.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, zip_longest
from types import TracebackType
from typing import Any, Final

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from shade.checkpoint._buffer.shared_memory_folder import check_run_name
from shade.checkpoint._capture.flatten import tensors_in, torch_dtype, unflatten
from shade.checkpoint._format.manifest import Manifest
from shade.checkpoint._integrations.dcp_shard import DCPParts, from_plain, is_dcp, parts_of, tensor_key
from shade.checkpoint._integrations.dcp_writer import names_step, step_of
from shade.checkpoint._restore.reader import Reader, Snapshot
from shade.checkpoint._restore.restore import Arena, fill, map_memory
from shade.checkpoint._session.open_tiers import open_to_read
from shade.errors import CheckpointError, ConfigError, CorruptCheckpointError, ShadeError, StateMismatchError

WINDOW_CHUNKS: Final = 16
"""Chunks in a window, unless one tensor needs more: 64 MiB."""


@dataclass(frozen=True)
class _ReadRequest:
    """One item of a plan, and what has to be read for it."""

    item: ReadItem
    node: Any
    """Skeleton of the tensor."""
    name: str
    """Tensor of the shard that it is made of."""
    dtype: torch.dtype
    """In which that is stored."""
    span: range
    """Bytes of the shard from the first wanted one to the last."""
    lengths: tuple[int, ...]
    """Shape of the wanted part, as it is stored."""
    strides: tuple[int, ...]
    """Stored items from one to the next in each dimension."""
    chunks: range
    """Chunks that hold the span."""
    is_shared: bool
    """Whether another rank reads the piece too."""


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
        self._snapshot: Snapshot | None = None
        self._manifests: dict[int, tuple[Manifest, DCPParts]] = {}
        self._ranks: dict[Any, int] = {}

    # ── called by DCP, in this order ────────────────────────────────────────────────────────────────────────────────

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a load; takes the step from ``checkpoint_id``, if it is given."""
        if checkpoint_id is not None:
            self.step = step_of(checkpoint_id)

    def read_metadata(self) -> Metadata:
        """Returns DCP's metadata of the snapshot. Raises CheckpointError if there is no such snapshot, or
        CorruptCheckpointError if its metadata is lost in every copy."""
        self._snapshot, manifest = self._choose()
        self._manifests = {}
        shard = _Shard(self._tiers(), self._snapshot, manifest)
        (plan,) = shard.values([parts_of(manifest.tree).plan])
        return from_plain(plan)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Stores which rank's shard holds each item."""
        self._ranks = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Adds the digest of the snapshot that this rank sees."""
        return replace(plan, storage_data=self._chosen().record.digest)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Checks that all ranks load the same snapshot, and adds which pieces more than one rank reads."""
        if len({plan.storage_data for plan in plans}) > 1:
            cure = "name one: checkpoint_id='120', or step=120; and see that all ranks reach the same locations"
            raise CheckpointError.of("the same newest snapshot on every rank", "different ones", cure)
        wanted = [{item.storage_index for item in plan.items} for plan in plans]
        readers = Counter(chain.from_iterable(wanted))
        return [
            replace(plan, storage_data={piece for piece in pieces if readers[piece] > 1})
            for plan, pieces in zip(plans, wanted, strict=True)
        ]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads this rank's items; done when it returns."""
        by_rank: dict[int, list[ReadItem]] = {}
        for item in plan.items:
            rank = self._ranks.get(item.storage_index)
            if rank is None:
                raise _missing_piece(item)
            by_rank.setdefault(rank, []).append(item)
        groups = []
        for rank, items in sorted(by_rank.items()):
            groups += self._groups(rank, items, planner, shared=plan.storage_data or ())
        _load(groups, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether the id names a step."""
        return names_step(checkpoint_id)

    # ── called by users ─────────────────────────────────────────────────────────────────────────────────────────────

    def steps(self) -> list[int]:
        """Returns the steps that DCP saved in this run, newest first; loading shows whether they are intact."""
        return [snapshot.record.step for snapshot, _ in self._found()]

    def close(self) -> None:
        """Closes connections. Safe to call twice."""
        self._resources.close()
        self._reader = self._snapshot = None
        self._manifests = {}

    def __enter__(self) -> ShadeReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # ── private ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _tiers(self) -> Reader:
        if self._reader is None:
            self._reader = open_to_read(self._store, self._persist_to, self._run, self._resources)
        return self._reader

    def _chosen(self) -> Snapshot:
        assert self._snapshot is not None, "DCP reads the metadata first"
        return self._snapshot

    def _found(self) -> Iterator[tuple[Snapshot, Manifest]]:
        """Yields snapshots that DCP saved, newest first, with the manifest of their last shard."""
        reader = self._tiers()
        for snapshot in reader.snapshots():
            if self.step is None or snapshot.record.step == self.step:
                manifest = reader.manifest(snapshot, snapshot.record.world_size - 1)
                if is_dcp(manifest.tree):
                    yield snapshot, manifest

    def _choose(self) -> tuple[Snapshot, Manifest]:
        for found in self._found():
            return found
        wanted = (
            "a snapshot saved through DCP" if self.step is None else f"a snapshot of step {self.step} saved through DCP"
        )
        silent = "; ".join(f"{name}: {why}" for name, why in self._tiers().unreachable.items())
        cure = "see shade checkpoint list; what Checkpointer saved, Checkpointer restores"
        raise CheckpointError.of(wanted, silent or f"none in run {self._run!r}", cure)

    def _groups(
        self, rank: int, items: Sequence[ReadItem], planner: LoadPlanner, shared: Collection[MetadataIndex]
    ) -> list[_Group]:
        """Delivers the objects of a rank's shard, and returns what has to be read for the tensors."""
        snapshot = self._chosen()
        if rank not in self._manifests:
            if not 0 <= rank < snapshot.record.world_size:
                raise CorruptCheckpointError(f"step {snapshot.record.step}: metadata names rank {rank}, which is none")
            manifest = self._tiers().manifest(snapshot, rank)
            self._manifests[rank] = manifest, parts_of(manifest.tree)
        manifest, parts = self._manifests[rank]
        shard = _Shard(self._tiers(), snapshot, manifest)
        objects = [item for item in items if item.type is LoadItemType.BYTE_IO]
        requests = [
            _read_request(
                manifest,
                item,
                _node(parts.tensors, tensor_key(item.storage_index), item),
                is_shared=item.storage_index in shared,
            )
            for item in items
            if item.type is not LoadItemType.BYTE_IO
        ]
        values = shard.values([_node(parts.objects, item.storage_index.fqn, item) for item in objects])
        for item, (value,) in zip(objects, values, strict=True):
            _deliver(planner, item, value)
        return _grouped(shard, sorted(requests, key=lambda request: request.chunks.start))


@dataclass(frozen=True, eq=False)
class _Shard:
    """One shard that is read."""

    reader: Reader
    snapshot: Snapshot
    manifest: Manifest

    def fill(self, buffers: Mapping[int, memoryview], shared: Collection[int]) -> None:
        """Reads chunks, by number, into the caller's memory; see `fill`."""
        fill(self.reader, self.snapshot, self.manifest, buffers, shared)

    def values(self, nodes: Sequence[Any]) -> list[Any]:
        """Reads what objects need, and returns them."""
        wanted = [tensors_in(node) for node in nodes]
        everything = set().union(*wanted)
        entries = {name: entry for name, entry in self.manifest.tensors.items() if name in everything}
        arena, numbers = Arena(self.manifest.num_bytes), self.manifest.chunks_of(entries)
        self.fill(arena.chunks(self.manifest, numbers), shared=numbers)
        tensors = arena.tensors(entries)
        # Clones: a view would keep the arena of the whole shard alive.
        return [
            unflatten(node, {name: tensors[name].clone() for name in names & tensors.keys()})
            for node, names in zip(nodes, wanted, strict=True)
        ]


@dataclass(frozen=True)
class _Group:
    """Requests that are read together: neighbours in a shard."""

    shard: _Shard
    requests: Sequence[_ReadRequest]

    @cached_property
    def numbers(self) -> list[int]:
        """Numbers of their chunks, ascending."""
        return sorted({number for request in self.requests for number in request.chunks})

    @cached_property
    def shared(self) -> set[int]:
        """Those of them that another rank reads too."""
        return {number for request in self.requests if request.is_shared for number in request.chunks}

    @property
    def num_bytes(self) -> int:
        """Length of a window that takes them, with what lies between."""
        return (self.numbers[-1] + 1 - self.numbers[0]) * self.shard.manifest.chunk_bytes if self.numbers else 0


class _Window:
    """Memory that takes one group after another.

    Args:
        num_bytes: Length of the longest group.
    """

    def __init__(self, num_bytes: int) -> None:
        self._map = map_memory(num_bytes)
        self._shard: _Shard | None = None
        self._start = 0
        self._chunks: dict[int, memoryview] = {}

    def read(self, group: _Group, before: _Window) -> None:
        """Reads a group; a chunk that the window before holds is copied from there."""
        manifest, here = group.shard.manifest, memoryview(self._map)
        self._shard, self._start = group.shard, group.numbers[0] * manifest.chunk_bytes if group.numbers else 0
        offsets = {number: number * manifest.chunk_bytes - self._start for number in group.numbers}
        self._chunks = {number: here[at : at + manifest.data_length(number)] for number, at in offsets.items()}
        held = before._chunks.keys() & self._chunks.keys() if before._shard is group.shard else set()
        for number in held:
            self._chunks[number][:] = before._chunks[number]
        unread = {number: chunk for number, chunk in self._chunks.items() if number not in held}
        group.shard.fill(unread, group.shared)

    def tensor(self, request: _ReadRequest) -> torch.Tensor:
        """Returns what was requested, in this memory."""
        offset = request.span.start - self._start
        count = len(request.span) // request.dtype.itemsize
        flat = (
            torch.frombuffer(self._map, dtype=request.dtype, count=count, offset=offset)
            if count
            else torch.empty(0, dtype=request.dtype)
        )
        made = unflatten(request.node, {request.name: flat.as_strided(request.lengths, request.strides)})
        if not isinstance(made, torch.Tensor):
            raise CorruptCheckpointError(
                f"expected a tensor in the tree of a DCP checkpoint, got {type(made).__name__}"
            )
        return made


def _load(groups: Sequence[_Group], planner: LoadPlanner) -> None:
    """Reads groups in turn, one while the one before is copied into the planner's tensors."""
    num_bytes = max((group.num_bytes for group in groups), default=0)
    window, other = _Window(num_bytes), _Window(num_bytes)
    with ThreadPoolExecutor(1, thread_name_prefix="shade-ahead") as ahead:
        coming = [ahead.submit(window.read, group, other) for group in groups[:1]]
        for group, following in zip_longest(groups, groups[1:]):
            coming.pop().result()
            if following is not None:
                coming.append(ahead.submit(other.read, following, window))
            for request in group.requests:
                _copy(window.tensor(request), request.item, planner)
            window, other = other, window


def _read_request(manifest: Manifest, item: ReadItem, node: Any, is_shared: bool) -> _ReadRequest:
    """Returns what an item needs: from the first byte of its part of the saved piece to the last."""
    named = tensors_in(node)
    names = [name for name in manifest.tensors if name in named]
    if len(names) != 1:
        raise CorruptCheckpointError(
            f"expected the piece {tensor_key(item.storage_index)!r} in one tensor, got {names}"
        )
    (name,) = names
    entry = manifest.tensors[name]
    # Complex numbers may be stored as pairs, in one dimension more.
    sizes, pair = entry.shape[: len(item.lengths)], entry.shape[len(item.lengths) :]
    if (
        len(sizes) != len(item.lengths)
        or len(pair) > 1
        or any(
            offset + length > size
            for offset, length, size in zip(item.storage_offsets, item.lengths, sizes, strict=True)
        )
    ):
        raise StateMismatchError.of(
            f"a part of {list(sizes)} of {item.storage_index.fqn!r}", list(item.lengths), "load as saved"
        )
    dtype, lengths = torch_dtype(entry.dtype), (*item.lengths, *pair)
    strides = [1]
    for size in reversed(entry.shape[1:]):
        strides.insert(0, strides[0] * size)
    first = sum(offset * stride for offset, stride in zip(item.storage_offsets, strides, strict=False))
    last = first + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=False))
    start = entry.start + first * dtype.itemsize
    # For a piece of columns this is everything between its first and last byte, other columns included.
    span = range(start, entry.start + (last + 1) * dtype.itemsize) if math.prod(lengths) else range(start, start)
    return _ReadRequest(
        item, node, name, dtype, span, lengths, tuple(strides[: len(lengths)]), _chunks(manifest, span), is_shared
    )


def _chunks(manifest: Manifest, span: range) -> range:
    return range(span.start // manifest.chunk_bytes, -(-span.stop // manifest.chunk_bytes)) if span else range(0)


def _grouped(shard: _Shard, requests: Sequence[_ReadRequest]) -> list[_Group]:
    """Groups ascending requests that need about `WINDOW_CHUNKS` together, at least one each."""
    groups: list[list[_ReadRequest]] = []
    for request in requests:
        if not groups or request.chunks.stop - groups[-1][0].chunks.start > WINDOW_CHUNKS:
            groups.append([])
        groups[-1].append(request)
    return [_Group(shard, group) for group in groups]


def _copy(saved: torch.Tensor, item: ReadItem, planner: LoadPlanner) -> None:
    """Copies the requested part of a saved piece into the planner's tensor."""
    target = planner.resolve_tensor(item).detach()
    if target.shape != saved.shape:
        raise StateMismatchError.of(
            f"{item.dest_index.fqn!r} to take {list(saved.shape)}",
            list(target.shape),
            "build the state as it was saved",
        )
    target.copy_(saved)
    planner.commit_tensor(item, target)


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


def _node(nodes: Mapping[str, Any], name: str, item: ReadItem) -> Any:
    """Returns the skeleton of what an item needs; raises CorruptCheckpointError if the shard lacks it."""
    node = nodes.get(name)
    if node is None:
        raise _missing_piece(item)
    return node


def _missing_piece(item: ReadItem) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"expected {tensor_key(item.storage_index)!r} in the shard that has it, got none there"
    )


def is_sharded(reader: Reader, snapshot: Snapshot) -> bool:
    """Returns whether a snapshot was saved through DCP; raises CorruptCheckpointError if its last manifest is lost."""
    return is_dcp(reader.manifest(snapshot, snapshot.record.world_size - 1).tree)


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
