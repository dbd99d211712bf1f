"""Certifies a resume: restores a snapshot in a fresh process, continues with the run's own script, and compares bits.

The replay is a run of its own in a folder of its own. It gets the one snapshot, takes as many steps as lie between it
and the next, and touches nothing of the original run, which may still be running. It reads the data itself and not
through the cache: samples do not depend on that (with ``--sampling pads`` they do, beyond the end of the epoch).

Bits are the same only on the same kind of machine, with the same number of ranks, threads and versions, and with
deterministic operations: on a GPU that needs ``torch.use_deterministic_algorithms``. A failed certificate names what
was lost: a private random generator, a buffer that is in no ``state_dict``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shade.checkpoint._buffer.shared_memory_folder import own_folder
from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier
from shade.checkpoint._commit.protocol import SingleProcessGroup
from shade.checkpoint._interchange.certify import TRAIL_FILE, copy_snapshot, differences, read_trail
from shade.checkpoint._restore.reader import Reader, Snapshot
from shade.checkpoint._restore.restore import ReadSnapshot, read_newest
from shade.checkpoint._tiers.memory import MemoryTier
from shade.checkpoint._tiers.storage import StorageTier
from shade.checkpoint._tiers.tier import Tier
from shade.config import ACCESS_LOG, CACHE_URL, CHECKPOINT_URL, RUN_FILE, RunConfig
from shade.errors import CheckpointError, ConfigError, StorageError, StoreError
from shade.launch.ranks import Ranks, free_port, watch
from shade.storage import open_volume
from shade.store import open_store

STEPS = 10
"""Steps to replay if neither a later snapshot nor the caller says how many."""


@dataclass(frozen=True)
class Certificate:
    """The result of a replay."""

    step: int
    """Step that was restored."""
    last_step: int
    """Step that was reached."""
    num_losses: int
    """Losses compared with the trail."""
    parted_at: int | None
    """First step with another loss; None: there is none."""
    losses: tuple[str, str] | None
    """Losses of the run and of the replay at that step."""
    num_tensors: int
    """Tensors compared with the run's snapshot of the last step; 0: it has none."""
    different: tuple[str, ...]
    """Names of tensors that differ, in order, and paths of other state."""

    @property
    def is_good(self) -> bool:
        """Returns whether the replay matches the run bit for bit."""
        return self.parted_at is None and not self.different

    def __str__(self) -> str:
        lines = [f"step {self.step} restored in a fresh process, steps to {self.last_step} taken again"]
        if self.parted_at is not None and self.losses is not None:
            was, now = (f"{float.fromhex(loss):.9g} ({loss})" for loss in self.losses)
            lines.append(f"step {self.parted_at} has another loss: {was} then, {now} now")
        elif self.num_losses:
            lines.append(f"the losses of {self.num_losses} steps are the same, bit for bit")
        if self.different:
            others = f", and {len(self.different) - 1} more" if len(self.different) > 1 else ""
            lines.append(f"the first that differs at step {self.last_step}: {self.different[0]}{others}")
        elif self.num_tensors:
            lines.append(
                f"{self.num_tensors} tensors of the snapshot of step {self.last_step} are the same, bit for bit"
            )
        lines.append("certified" if self.is_good else "not certified: something is not restored, or not deterministic")
        return "\n".join(lines) + "\n"


def certify(out: Path, step: int, num_steps: int | None = None) -> Certificate:
    """Replays a run from a snapshot.

    Args:
        out: The run directory.
        step: Step of the snapshot.
        num_steps: Steps to replay; None: to the next snapshot, or `STEPS`.

    Returns:
        The certificate.

    Raises:
        ConfigError: No run, no such snapshot, or nothing to compare with.
        CheckpointError: The replay failed, or the snapshot is damaged.
    """
    config = RunConfig.load(out / "run.json")
    if config.nodes > 1:
        raise ConfigError.of("a run of one machine", f"one of {config.nodes}", "certify it on a single one")
    trail = read_trail(out / TRAIL_FILE)
    with _reader(config) as reader, tempfile.TemporaryDirectory(prefix="shade-certify-") as folder:
        held = reader.snapshots()
        start = next((snapshot for snapshot in held if snapshot.record.step == step), None)
        if start is None:
            steps = sorted({snapshot.record.step for snapshot in held})
            raise ConfigError.of(f"a snapshot of step {step}", f"steps {steps}", "choose one of those")
        last_step = _last_step(start, held, trail, num_steps)
        replay = _replay_of(config, start, last_step, Path(folder) / "run")
        storage = StorageTier(open_volume(str(replay.persist_to)), replay.run)
        copy_snapshot(reader, start, storage)
        _run(replay, Path(folder) / "output.log")
        replayed = read_trail(Path(replay.out) / TRAIL_FILE)
        both = [each for each in range(step + 1, last_step + 1) if each in trail and each in replayed]
        parted_at = next((each for each in both if trail[each] != replayed[each]), None)
        num_tensors, different = _compare(reader, Reader([storage]), last_step)
    losses = None if parted_at is None else (trail[parted_at], replayed[parted_at])
    return Certificate(step, last_step, len(both), parted_at, losses, num_tensors, different)


@contextlib.contextmanager
def _reader(config: RunConfig) -> Iterator[Reader]:
    """Opens every location that may hold snapshots of the run."""
    with contextlib.ExitStack() as resources:
        tiers: list[Tier] = []
        if own_folder(config.run).is_dir():
            tiers.append(SharedMemoryTier(config.run, 0))
        if config.checkpoint_url is not None:
            url = config.checkpoint_url.replace(":***@", "@").replace("//@", "//")
            tiers.append(MemoryTier(resources.enter_context(open_store(url)), config.run))
        if config.persist_to is not None:
            tiers.append(StorageTier(open_volume(config.persist_to), config.run))
        for tier in tiers:
            resources.callback(tier.close)
        yield Reader(tiers)


def _last_step(start: Snapshot, held: list[Snapshot], trail: dict[int, str], num_steps: int | None) -> int:
    step, ranks = start.record.step, start.record.world_size
    later = [each.record.step for each in held if each.record.step > step and each.record.world_size == ranks]
    known = sorted({*later, *(each for each in trail if each > step)})
    if not known:
        cure = "choose an earlier snapshot (--checkpoint-keep keeps more of them)"
        raise ConfigError.of(f"steps after {step} to compare with", "none in trail or snapshots", cure)
    if num_steps is not None:
        return min(step + num_steps, known[-1])
    return min(later) if later else min(step + STEPS, known[-1])


def _replay_of(config: RunConfig, start: Snapshot, last_step: int, out: Path) -> RunConfig:
    ranks = start.record.world_size
    out.mkdir()
    return dataclasses.replace(
        config,
        out=str(out),
        run=f"certify-{secrets.token_hex(6)}",
        processes=ranks,
        batch_size=config.batch_size * config.processes // ranks,
        # The original run may still hold its own port.
        master_port=free_port(),
        cache="none",
        disk=None,
        steps=last_step,
        resume=True,
        checkpoint=None,
        persist=None,
        checkpoint_every="never",
        checkpoint_keep="all",
    )


def _run(replay: RunConfig, log: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in (ACCESS_LOG, CHECKPOINT_URL)}
    environment |= {RUN_FILE: str(replay.save()), CACHE_URL: "none"}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // replay.processes)))
    with Ranks(replay, environment, log) as ranks:
        if watch(ranks.poll, replay) != 0:
            failures = [path.read_text().strip() for path in Path(replay.out).glob("failure-*.txt")]
            raise CheckpointError(f"the replay failed: {next(filter(None, failures), ranks.why())}")


def _compare(run: Reader, replay: Reader, step: int) -> tuple[int, tuple[str, ...]]:
    """Counts the tensors in the run's newest snapshot of a step, and names what differs in the replay's.

    The replay may have two of that step, from before and after the end of its epoch: the more similar one counts.
    """
    theirs = _read(run, step)
    if theirs is None:
        return 0, ()
    found = []
    for snapshot in replay.snapshots():
        if snapshot.record.step == step:
            mine = _read(_Only(replay, snapshot), step)
            found.append(tuple(differences(theirs, mine)) if mine is not None else ("the snapshot",))
    return len(theirs.tensors), min(found, key=len, default=("the snapshot",))


class _Only(Reader):
    """Restricts a reader to one snapshot."""

    def __init__(self, reader: Reader, snapshot: Snapshot) -> None:
        super().__init__(reader.tiers)
        self._snapshot = snapshot

    def snapshots(self) -> list[Snapshot]:
        return [self._snapshot]


def _read(reader: Reader, step: int) -> ReadSnapshot | None:
    with contextlib.suppress(StorageError, StoreError):
        return read_newest(reader, SingleProcessGroup(), step=step)
    return None
