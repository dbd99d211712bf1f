"""ShadeWriter: saves with `torch.distributed.checkpoint` into cluster memory and durable storage.

The coordinator prepares a location in the first tier that has scratch. Every rank captures its part as one shard
(`_integrations.dcp_shard`), puts it there, and checks that it has not changed meanwhile. DCP gathers the outcomes; if
one rank fails, all do. Else the coordinator writes the commit record, and before that nothing is visible.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from multiprocessing import util
from types import TracebackType
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future
from typing_extensions import Self

from shade.checkpoint._buffer.shared_memory_folder import check_run_name
from shade.checkpoint._codecs.base import standalone_codec
from shade.checkpoint._commit.protocol import commit, discard, note_health, prepare, record_of, statement
from shade.checkpoint._format.manifest import Manifest
from shade.checkpoint._format.retention import Keep
from shade.checkpoint._integrations.dcp_shard import PackedState, capture
from shade.checkpoint._save.async_writer import CommitResult
from shade.checkpoint._session.open_tiers import Tiers, open_tiers
from shade.checkpoint._tiers.tier import Tier
from shade.errors import CheckpointError, ConfigError
from shade.rank_group import SingleProcessGroup

POLL_SECONDS: Final = 0.05
_STATEMENT: Final = MetadataIndex("shade/statement")
"""Index, in DCP's results, of what a rank says of its whole shard."""
_STEP: Final = re.compile(r"(?:step-)?(\d{1,18})")
_ALONE: Final = SingleProcessGroup()
"""The coordinator: DCP itself carries what ranks say to each other."""


def step_of(checkpoint_id: str | os.PathLike[str] | int) -> int:
    """Returns the step that a checkpoint_id of DCP names: a number, alone or after ``step-``, or as the last part of a
    path. Raises `ConfigError` if it names none."""
    found = _STEP.fullmatch(str(checkpoint_id).rstrip("/").rpartition("/")[2])
    if found is None:
        raise ConfigError.of("a checkpoint_id that is a step: '120' or 'step-120'", checkpoint_id, "pass the step")
    return int(found[1])


def names_step(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Returns whether `step_of` finds a step."""
    return _STEP.fullmatch(str(checkpoint_id).rstrip("/").rpartition("/")[2]) is not None


@dataclass(frozen=True)
class _Assignment:
    """Sent by the coordinator to a rank."""

    location: str
    tier: str
    draft: Manifest
    sequence: int
    saved_at: float


class ShadeWriter(StorageWriter):
    """A StorageWriter for `dcp.save` and `dcp.async_save`. Opens nothing before the first save.

    Args:
        store: URL of the cluster whose memory takes snapshots; a flusher moves them to storage.
        persist_to: Path or URL of durable storage. At least one of both.
        run: Id of the run; one live process each.
        step: Optimizer steps done; ``checkpoint_id`` of `dcp.save` overrides it. May be set between saves.
        keep: Retention rules of the storage: see `_format.retention.Keep`.
        slots: Snapshots that the cluster's memory holds, ≥ 2.
        replicas: Further copies of every chunk on other nodes of the cluster.
        parity: (k, r): r parity chunks for every k chunks on other nodes, instead of copies.
        codec: Codec of the chunks: see `_codecs.base.CODECS`.

    Raises:
        ConfigError: An argument is invalid. The first save finds out what does not answer.
    """

    def __init__(
        self,
        store: str | None = None,
        *,
        persist_to: str | os.PathLike[str] | None = None,
        run: str = "run",
        step: int | None = None,
        keep: str = "last=2",
        slots: int = 2,
        replicas: int = 0,
        parity: tuple[int, int] | None = None,
        codec: str = "none",
    ) -> None:
        super().__init__()
        self._address = Address(store, persist_to, run, keep, slots, replicas, parity, codec)
        self.step = step
        self._opened: OpenTiers | None = None
        self._target: tuple[Tier, str] | None = None
        self._planned: Collection[str] = ()

    # ── what DCP calls, in this order ───────────────────────────────────────────────────────────────────────────────

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a save; takes the step from ``checkpoint_id``, if it is given."""
        if checkpoint_id is not None:
            self.step = step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Opens the tiers, unless this process has them open."""
        if not kwargs.get("use_collectives", True):
            raise ConfigError.of("a save that ranks agree on", "use_collectives=False", "leave it out")
        if self.step is None:
            raise ConfigError.of("a step", None, "dcp.save(..., checkpoint_id='120'), or ShadeWriter(step=120)")
        self._opened = opened(self._address, is_coordinator)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Keeps which names this rank has, and returns the plan unchanged."""
        self._planned = {item.index.fqn for item in plan.items}
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Prepares a location on the coordinator, and adds it to each rank's plan."""
        held, step = self._held(), self._step()
        sequence, saved_at = held.next_sequence(), time.time()
        self._target = tier, location = _prepare(held, step, [*map(_estimate, plans)])
        blank = Manifest(self._address.run, step, 0, len(plans), self._address.codec, 0, {}, (), None)
        return [
            replace(plan, storage_data=_Assignment(location, tier.name, replace(blank, rank=rank), sequence, saved_at))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Captures, packs and puts this rank's shard; done when it returns."""
        held, to = self._held(), plan.storage_data
        if not isinstance(to, _Assignment) or to.sequence <= held.written:
            cure = "use a planner without enable_plan_caching"
            # DCP's plan cache returns an old plan with its location, which another snapshot may have by now.
            raise ConfigError.of("a plan that was made for this save", "one of a save before", cure)
        held.written = to.sequence
        packed = PackedState(*capture(planner, plan, self._planned, to.draft, _rank()), held.scratch)
        next(tier for tier in held.writable if tier.name == to.tier).put(to.location, packed.shard)
        # Nothing guards the state during the put; a tensor that changed meanwhile fails the save on all ranks.
        packed.check()
        said = statement(packed.manifest, sequence=to.sequence, saved_at=to.saved_at)
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(_STATEMENT, packed.manifest.stored_bytes, said)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the record, on the coordinator: now the snapshot exists."""
        held = self._held()
        assert self._target is not None, "DCP finishes on the rank that prepared"
        (tier, location), self._target = self._target, None
        try:
            record = record_of(_statements(results, held.sequence))
        except CheckpointError:
            discard(tier, _ALONE, location)
            raise
        commit(tier, _ALONE, location, record)
        held.tiers.after_commit(CommitResult(tier, location))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether the id names a step."""
        return names_step(checkpoint_id)

    def wait_durable(self, timeout_seconds: float | None = None) -> None:
        """Returns when the step saved last is in storage, on any rank. Raises ConfigError if there is no storage, or
        CheckpointError if the step is not there in time."""
        step, storage = self._step(), (self._opened or opened(self._address, is_coordinator=False)).tiers.storage
        if storage is None:
            raise ConfigError.of("storage to be durable in", None, "pass persist_to=")
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not any(record.step == step for record in storage.held().values()):
            if deadline is not None and time.monotonic() > deadline:
                raise CheckpointError.of(
                    f"step {step} to be durable within {timeout_seconds} s",
                    "in cluster memory at most",
                    "see whether its flusher runs (shade checkpoint list)",
                )
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Closes what this process has open for the run, also for its other writers. Safe to call twice."""
        self._opened = None
        release(self._address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        # The arguments alone: another process opens its own connections.
        return {**vars(self), "_opened": None, "_target": None}

    def _held(self) -> OpenTiers:
        assert self._opened is not None, "DCP sets the writer up first"
        return self._opened

    def _step(self) -> int:
        if self.step is None:
            raise ConfigError.of("a step", None, "save first")
        return self.step


def _prepare(held: OpenTiers, step: int, shard_bytes: Sequence[int]) -> tuple[Tier, str]:
    """Prepares a location in the first tier that has scratch."""
    reasons = []
    for tier in held.writable:
        is_last = tier is held.writable[-1]
        try:
            location = prepare(tier, _ALONE, step, shard_bytes)
        except CheckpointError as error:
            note_health(tier, _ALONE, held.failing, error, is_last=is_last)
            reasons.append(f"{tier.name}: {error}")
        else:
            note_health(tier, _ALONE, held.failing, None, is_last=is_last)
            return tier, location
    raise CheckpointError("; ".join(reasons))


def _estimate(plan: SavePlan) -> int:
    """Returns about what a rank will store: its tensors before any codec; objects are small."""
    found = (item.tensor_data for item in plan.items)
    return sum(data.properties.dtype.itemsize * data.chunk.sizes.numel() for data in found if data is not None)


def _statements(results: Sequence[Sequence[WriteResult]], sequence: int) -> list[dict[str, Any]]:
    """Returns what every rank says of this save, in order; raises CheckpointError if one says nothing."""
    found = [result.storage_data for each in results for result in each if result.index == _STATEMENT]
    got = [said["sequence"] for said in found]
    if got != [sequence] * len(results):
        raise CheckpointError.of("a shard of this save from every rank", got, "save with one writer on all ranks alike")
    return found


@dataclass(frozen=True)
class Address:
    """The arguments that say where a run's snapshots go, as `Checkpointer` has them; ConfigError if one is invalid."""

    store: str | None
    persist_to: str | os.PathLike[str] | None
    run: str
    keep: str
    slots: int
    replicas: int
    parity: tuple[int, int] | None
    codec: str

    def __post_init__(self) -> None:
        check_run_name(self.run)
        Keep.parse(self.keep)
        standalone_codec(self.codec)
        if self.store is None and self.persist_to is None:
            raise ConfigError.of("a location for snapshots", "neither store nor persist_to", "name at least one")


class OpenTiers:
    """The open tiers of an address, in this process; the coordinator's holds the run lock, commits and removes."""

    def __init__(self, address: Address, is_coordinator: bool) -> None:
        alone = SingleProcessGroup()  # ranks open their tiers without communication
        alone.rank = 0 if is_coordinator else max(1, _rank())
        options = {name: getattr(address, name) for name in ("keep", "slots", "replicas", "parity")}
        self.tiers: Tiers = open_tiers(address.run, alone, address.store, address.persist_to, **options, buffers=1)
        self.writable = [tier for tier in (self.tiers.memory, self.tiers.storage) if tier is not None]
        self.sequence = 0
        """Sequence of the latest save; on the coordinator."""
        self.written = 0
        """Sequence of the save that this process wrote last."""
        self.failing: set[str] = set()
        """Names of tiers whose failure was logged."""
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def scratch(self, num_bytes: int) -> torch.Tensor:
        """Returns memory that stays warm between saves."""
        if len(self._scratch) < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch

    def next_sequence(self) -> int:
        """Returns the sequence of the next save; on the coordinator."""
        if not self.sequence:
            self.sequence = self.tiers.reader.newest_sequence()
        self.sequence += 1
        return self.sequence

    def close(self) -> None:
        """Closes the tiers."""
        # Shared memory is not used here: what lies there may be a Checkpointer's.
        self.tiers.close(keep_buffers=True)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


# By process, not by writer: each save may bring a new writer, and run lock and flusher outlast them.
_opened: Final[dict[tuple[int, Address, bool], OpenTiers]] = {}
_lock: Final = threading.Lock()


def opened(address: Address, is_coordinator: bool) -> OpenTiers:
    """Returns the tiers of an address, the same for equal arguments; opens them if they are not open. Raises
    `ConfigError` if a store or storage does not answer or cannot be written, and `RunInUseError` if another live
    process saves under this id."""
    key = (os.getpid(), address, is_coordinator)
    with _lock:
        if key not in _opened:
            if not any(pid == os.getpid() for pid, _, _ in _opened):
                util.Finalize(None, _release_all, exitpriority=10)
            _opened[key] = OpenTiers(address, is_coordinator)
        return _opened[key]


def release(address: Address) -> None:
    """Closes what this process has open of an address, if anything."""
    with _lock:
        for key in [key for key in _opened if key[:2] == (os.getpid(), address)]:
            _opened.pop(key).close()


def _release_all(*_: Any) -> None:
    for address in {address for _, address, _ in _opened}:
        release(address)
