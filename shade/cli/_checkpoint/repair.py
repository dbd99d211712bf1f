"""Implements ``shade checkpoint verify``, ``repair``, ``scrub`` and ``certify``.

The first three read every byte of every copy. A snapshot may be replaced while it is read: a slot is claimed again, or
retention removes a folder. So damage counts only if the same record is still in that place afterwards. ``certify``
replays steps from a snapshot and compares them bit for bit.

The replay of ``certify`` is a run of its own in a folder of its own. It gets the one snapshot, takes as many steps as
lie between it and the next, and touches nothing of the original run, which may still be running. It reads the data
itself and not through the cache: samples do not depend on that (with ``--sampling pads`` they do, beyond the end of
the epoch).

Bits are the same only on the same kind of machine, with the same number of ranks, threads and versions, and with
deterministic operations: on a GPU that needs ``torch.use_deterministic_algorithms``. A failed certificate names what
was lost: a private random generator, a buffer that is in no ``state_dict``.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shade.checkpoint._buffer.shared_memory_folder import own_folder
from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier
from shade.checkpoint._commit.protocol import SingleProcessGroup
from shade.checkpoint._interchange.certify import TRAIL_FILE, copy_snapshot, differences, read_trail
from shade.checkpoint._restore.reader import Reader, Snapshot
from shade.checkpoint._restore.restore import ReadSnapshot, read_newest
from shade.checkpoint._tiers.memory import MemoryTier
from shade.checkpoint._tiers.storage import StorageTier
from shade.checkpoint._tiers.tier import Tier
from shade.cli._checkpoint.common import Places, Verb, add_places, opened
from shade.cli.tables import table
from shade.config import ACCESS_LOG, CACHE_URL, CHECKPOINT_URL, RUN_FILE, RunConfig
from shade.errors import CheckpointError, ConfigError, CorruptCheckpointError, StorageError, StoreError
from shade.launch.ranks import Ranks, free_port, watch
from shade.storage import open_volume
from shade.store import open_store

if TYPE_CHECKING:
    from shade.checkpoint._restore.reader import Damage, Snapshot

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
    """Opens every place that may hold snapshots of the run."""
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


_VERIFY_EXAMPLES: Final = """\
examples:
  shade checkpoint verify --persist /mnt/ckpt               the newest
  shade checkpoint verify all --persist /mnt/ckpt --store redis://10.0.0.1:6379
  shade checkpoint verify 1200 --persist /mnt/ckpt --json

Reads every byte of every copy and compares it with what was committed; changes nothing.
exit code: 0 all intact; 1 damage, or no snapshot; 2 the command could not be carried out
"""
_REPAIR_EXAMPLES: Final = """\
examples:
  shade checkpoint repair 1200 --persist /mnt/ckpt --store redis://10.0.0.1:6379

What is damaged or missing in one copy is written again from another copy or another place.
exit code: 0 all intact now; 1 something is lost in every copy, or there is no snapshot
"""
_SCRUB_EXAMPLES: Final = """\
examples:
  shade checkpoint scrub --persist /mnt/ckpt --store redis://10.0.0.1:6379
  0 3 * * * shade checkpoint scrub --persist /mnt/ckpt      every night, from cron

Verifies and repairs every snapshot, newest first.
exit code: 0 all intact now; 1 something is lost in every copy
"""
_CERTIFY_EXAMPLES: Final = """\
examples:
  shade checkpoint certify 1200 runs/20260101-120000
  shade checkpoint certify 1200 runs/20260101-120000 --steps 50

Restores the snapshot in a fresh process, repeats the steps up to the next snapshot with the run's own script, and
compares the loss of each step with the run's trail and every tensor with the next snapshot. The run is not changed.
exit code: 0 equal bit for bit; 1 not, with the first step and tensor that differ; 2 it could not be tried
"""
_MOST_SHOWN: Final = 8
"""Longest list of chunk numbers."""


@dataclass
class _Finding:
    """The result for one snapshot."""

    step: int
    damages: list[Damage] = field(default_factory=list)
    """One per place."""
    lost: str | None = None
    """What is lost in every copy."""
    mended: int = 0
    """Number of chunks written again."""

    @property
    def is_sound(self) -> bool:
        return self.lost is None and not any(self.damages)


def _examine(places: Places, snapshot: Snapshot) -> _Finding:
    """Reads everything; ignores damage in places that another snapshot has taken meanwhile."""
    from shade.checkpoint._flush.progress import ProgressBar
    from shade.checkpoint._restore.reader import check_decodable

    record, bar = snapshot.record, ProgressBar()
    finding = _Finding(record.step)
    copies = sum(source.tier.num_copies for source in snapshot.sources)
    bar.begin(f"step {record.step}", record.num_bytes * copies)
    try:
        finding.damages = places.reader.examine(snapshot, bar.advance)
        check_decodable(places.reader, snapshot)
    except CorruptCheckpointError as error:
        finding.lost = str(error)
    finally:
        bar.end()
    if finding.is_sound:
        return finding
    there = {(each.tier.name, each.place) for now in places.snapshots() if now.record == record for each in now.sources}
    finding.damages = [each for each in finding.damages if (each.source.tier.name, each.source.place) in there]
    if not there:
        finding.lost = None
    return finding


def _repair(places: Places, snapshot: Snapshot, finding: _Finding) -> _Finding:
    """Repairs what an examination found, and examines the snapshot again."""
    if finding.is_sound or finding.lost is not None:
        return finding
    lost = None
    mended = 0
    try:
        mended = places.reader.repair(snapshot, finding.damages)
    except (CorruptCheckpointError, StoreError, StorageError) as error:
        lost = str(error)
    after = _examine(places, snapshot)
    after.mended = mended
    after.lost = after.lost or (lost if any(after.damages) else None)
    return after


def _report(findings: list[_Finding], *, as_json: bool) -> int:
    if as_json:
        facts = [
            {
                "step": each.step,
                "sound": each.is_sound,
                "mended_chunks": each.mended,
                "lost": each.lost,
                "places": [
                    {
                        "place": str(damage.source.place),
                        "tier": damage.source.tier.name,
                        "manifests": sorted(damage.manifests),
                        "chunks": {str(rank): sorted(numbers) for rank, numbers in sorted(damage.chunks.items())},
                    }
                    for damage in each.damages
                ],
            }
            for each in findings
        ]
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
    else:
        rows = [("step", "lies in", "found")]
        for each in findings:
            rows += [(f"{each.step}", str(damage.source), _words(damage, each.mended)) for damage in each.damages]
            if each.lost is not None:
                rows.append((f"{each.step}", "", " ".join(each.lost.split())))
        sys.stdout.write(table(rows, "><<"))
        bad = sum(not each.is_sound for each in findings)
        sys.stdout.write(f"\n{len(findings)} snapshot{'s' * (len(findings) != 1)}, {bad} damaged\n")
    return 0 if all(each.is_sound for each in findings) else 1


def _words(damage: Damage, mended: int) -> str:
    if not damage:
        return f"sound, {mended} chunk{'s' * (mended != 1)} of the snapshot mended" if mended else "sound"
    parts = [f"manifest of rank {rank}" for rank in sorted(damage.manifests)]
    for rank, numbers in sorted(damage.chunks.items()):
        shown = ", ".join(map(str, sorted(numbers)[:_MOST_SHOWN])) + " …" * (len(numbers) > _MOST_SHOWN)
        parts.append(f"{len(numbers)} chunk{'s' * (len(numbers) != 1)} of rank {rank} ({shown})")
    return f"damaged: {', '.join(parts)}"


def _chosen(places: Places, which: str) -> list[Snapshot]:
    found = places.snapshots()
    if which == "all" or not found:
        return found
    if which == "newest":
        return found[:1]
    snapshot = places.of_step(int(which))
    return [] if snapshot is None else [snapshot]


def _which(text: str) -> str:
    if text not in ("all", "newest") and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a step, all or newest, got {text!r}")
    return text


def _verify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("which", type=_which, nargs="?", default="newest", metavar="STEP|all", help="(the newest)")
    add_places(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _repair_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("which", type=_which, metavar="STEP", help="a step of shade checkpoint list, newest or all")
    add_places(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _scrub_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(which="all")
    add_places(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _answer(given: argparse.Namespace, *, repairing: bool) -> int:
    with opened(given) as places:
        findings = []
        for snapshot in _chosen(places, given.which):
            finding = _examine(places, snapshot)
            findings.append(_repair(places, snapshot, finding) if repairing else finding)
        if not findings:
            sys.stderr.write(f"no snapshot of run {places.run} to read\n")
            return 1
        return max(_report(findings, as_json=given.json), 1 if places.is_partial else 0)


VERIFY: Final = Verb(
    "verify",
    "check every byte of every copy",
    "Checks snapshots against what was committed.",
    _VERIFY_EXAMPLES,
    _verify_arguments,
    lambda given: _answer(given, repairing=False),
)
REPAIR: Final = Verb(
    "repair",
    "repair damaged copies from intact ones",
    "Repairs a snapshot.",
    _REPAIR_EXAMPLES,
    _repair_arguments,
    lambda given: _answer(given, repairing=True),
)
SCRUB: Final = Verb(
    "scrub",
    "verify and repair everything",
    "Verifies and repairs every snapshot.",
    _SCRUB_EXAMPLES,
    _scrub_arguments,
    lambda given: _answer(given, repairing=True),
)


def _certify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("step", type=int, metavar="STEP", help="step of the snapshot")
    parser.add_argument("out", type=Path, metavar="RUN", help="the run directory")
    parser.add_argument("--steps", type=int, metavar="K", help="steps to repeat (to the next snapshot, else 10)")


def _certify(given: argparse.Namespace) -> int:
    from shade.launch.ranks import Ended, signals_as_exceptions

    try:
        with signals_as_exceptions():
            certificate = certify(given.out.resolve(), given.step, given.steps)
    except Ended as ended:
        return 128 + ended.number
    sys.stdout.write(str(certificate))
    return 0 if certificate.is_good else 1


CERTIFY: Final = Verb(
    "certify",
    "replay steps from a snapshot and compare bit for bit",
    "Proves that a run resumed from a snapshot equals the run without an interruption, bit for bit.",
    _CERTIFY_EXAMPLES,
    _certify_arguments,
    _certify,
)
