"""How a snapshot comes to count: the same four steps in every tier, one rank's failure is every rank's.

The order is what keeps a half-written snapshot from ever being read, whichever process dies at whichever operation:

1. The ranks exchange their manifests' digests; now each can make the same commit record.
2. Rank 0 prepares a place: the record of what lay there goes first. A tier that does not have what the snapshot builds
   on is refused it, before anything, and again before the record is written.
3. Every rank puts its shard. Nobody who looks finds it.
4. The ranks vote. All in favour: the record is written, last. One against, or dead: there is no record, and the place
   is free again; what was committed before lies in another place and was not touched.

A snapshot that is sent while it is still being copied goes through 2 and 3 before 1: `announce` takes the place of the
first step, and the manifests are agreed on when all is there. What has no manifest is thrown away again.

A rank that dies between 1 and 4 leaves the others waiting in a collective, which ends with the group's timeout, as the
training's own collectives do. A rank 0 that dies after 4 has committed: the others may not know, who recovers does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from shade.checkpoint._commit.process_group import ProcessGroup
from shade.checkpoint._format.manifest import Commit, Manifest
from shade.checkpoint._pacing.schedule import Pace
from shade.checkpoint._tiers.tier import Shard, Tier
from shade.errors import CheckpointError, ShadeError
from shade.types import Bytes

logger = logging.getLogger("shade.checkpoint")
T = TypeVar("T")


@dataclass(frozen=True)
class Stored:
    """What became of one snapshot in one tier; the same on every rank."""

    place: str | None
    """Where it is committed; None where it is not."""
    reason: str | None = None
    """Why not: the first failing rank's message."""


@dataclass(frozen=True)
class Notes:
    """What is said of a save beside its content; rank 0's count."""

    sequence: int
    saved_at: float
    """Seconds since 1970."""
    metrics: dict[str, float]
    pace: Pace
    replica: str
    """Digest over samples of what all ranks should hold alike; empty where they need not."""


@dataclass(frozen=True)
class Agreed:
    """The same on every rank."""

    record: Commit
    shard_bytes: list[int]
    """Stored length of each rank's shard."""
    pace: Pace


def agree(
    group: ProcessGroup, manifest: Manifest | None, error: str | None, notes: Notes, base: str | None = None
) -> Agreed:
    """Step 1: every rank learns all manifests' digests, or that one rank has none.

    Args:
        group: The ranks.
        manifest: Of this rank's shard.
        error: Why there is none.
        notes: This rank's.
        base: Digest of the record of the snapshot that the shard builds on, the same on every rank; None for none.

    Returns:
        The commit record, and what else all ranks now know.

    Raises:
        CheckpointError: On every rank: one could not copy its state, or they do not save the same thing.
    """
    mine: dict[str, Any] = {"error": error}
    if manifest is not None:
        mine |= {
            "digest": manifest.digest,
            "run": manifest.run,
            "step": manifest.step,
            "num_bytes": manifest.num_bytes,
            "stored_bytes": manifest.stored_bytes,
            "version": manifest.version,
            "base": base,
            **asdict(notes),
        }
    told = group.gather(mine)
    _check_told(told)
    if len({each["base"] for each in told}) > 1:
        bases = [each["base"] for each in told]
        raise CheckpointError.of("every rank to build on the same snapshot", bases, "report it; they had agreed")
    different = [rank for rank, each in enumerate(told) if each["replica"] != told[0]["replica"]]
    if different:
        cure = "wrap the model in DistributedDataParallel, or pass replicated=False to save each rank's own"
        raise CheckpointError.of("the same parameters on every rank", f"others on ranks {different} than on 0", cure)
    first = told[0]
    record = Commit(
        run=first["run"],
        step=first["step"],
        sequence=first["sequence"],
        world_size=group.world_size,
        manifests=tuple(each["digest"] for each in told),
        num_bytes=sum(each["num_bytes"] for each in told),
        saved_at=first["saved_at"],
        metrics=first["metrics"],
        base=first["base"],
        version=max(each["version"] for each in told),
    )
    return Agreed(record, [each["stored_bytes"] for each in told], Pace(**first["pace"]))


def announce(group: ProcessGroup, manifest: Manifest | None, error: str | None) -> list[int]:
    """Before chunks are sent that nobody has a manifest of yet: every rank learns that all are about to.

    Args:
        group: The ranks.
        manifest: Of this rank's shard, without digests.
        error: Why there is none.

    Returns:
        Length of each rank's shard.

    Raises:
        CheckpointError: On every rank: one has nothing to send, or sends another step.
    """
    mine: dict[str, Any] = {"error": error}
    if manifest is not None:
        mine |= {"run": manifest.run, "step": manifest.step, "num_bytes": manifest.num_bytes}
    told = group.gather(mine)
    _check_told(told)
    return [each["num_bytes"] for each in told]


def _check_told(told: list[dict[str, Any]]) -> None:
    """Whether all ranks have a shard, and of the same step."""
    for rank, each in enumerate(told):
        if each["error"]:
            raise CheckpointError(f"rank {rank}: {each['error']}")
    steps = [(each["run"], each["step"]) for each in told]
    if len(set(steps)) > 1:
        raise CheckpointError.of("every rank to save the same step", steps, "call save() and step() on all ranks alike")


def prepare(tier: Tier, group: ProcessGroup, step: int, shard_bytes: Sequence[int]) -> Stored:
    """Step 2, in one tier. Collective.

    Args:
        tier: Where to.
        group: The ranks.
        step: Of the snapshot.
        shard_bytes: Stored length of each rank's shard.

    Returns:
        The place, or why there is none. A tier that fails is no exception, here and below: there may be another.
    """
    place, reason = group.share(_attempt(lambda: tier.prepare(step, shard_bytes)) if group.rank == 0 else None)
    return Stored(place, reason)


def put(
    tier: Tier, group: ProcessGroup, place: str, manifest: Manifest, chunks: Callable[[], Iterable[Bytes]]
) -> Stored:
    """Step 3, and the vote, in one tier. Collective.

    Args:
        tier: Where to.
        group: The ranks.
        place: By `prepare`.
        manifest: Of this rank.
        chunks: This rank's, in stored form; called once.

    Returns:
        The place; or why the place is free again.
    """
    _, failure = _attempt(lambda: tier.put(place, Shard(manifest, chunks())))
    reason = next(filter(None, group.gather(failure)), None)
    if reason is None:
        return Stored(place)
    discard(tier, group, place)
    return Stored(None, reason)


def commit(tier: Tier, group: ProcessGroup, place: str, record: Commit) -> Stored:
    """Step 4, in one tier. Collective.

    Args:
        tier: Where to.
        group: The ranks.
        place: By `put`, on every rank.
        record: By `agree`.

    Returns:
        The place, where it is committed; or why it is free again.
    """

    def write() -> None:
        check_base(tier, record)
        tier.commit(place, record)

    failure = None
    if tier.every_rank_commits or group.rank == 0:
        _, failure = _attempt(write)
    reason = next(filter(None, group.gather(failure)), None)
    if reason is None:
        return Stored(place)
    discard(tier, group, place)
    return Stored(None, reason)


def discard(tier: Tier, group: ProcessGroup, place: str) -> None:
    """Throws away what was put and does not count. On every rank; a tier that refuses tidies up later.

    Args:
        tier: Where.
        group: The ranks.
        place: By `prepare`.
    """
    if tier.every_rank_commits or group.rank == 0:
        _, failure = _attempt(lambda: tier.discard(place))
        if failure:
            logger.warning("%s: could not tidy %s up: %s", tier.name, place, failure)


def store(
    tier: Tier, group: ProcessGroup, agreed: Agreed, manifest: Manifest, chunks: Callable[[], Iterable[Bytes]]
) -> Stored:
    """Steps 2 to 4, in one tier. Collective.

    Args:
        tier: Where to.
        group: The ranks.
        agreed: By `agree`.
        manifest: Of this rank.
        chunks: This rank's, in stored form; called once.

    Returns:
        Where it is committed, or why it is not.
    """
    if agreed.record.base is not None:
        refused = group.share(_attempt(lambda: check_base(tier, agreed.record))[1] if group.rank == 0 else None)
        if refused is not None:
            return Stored(None, refused)
    stored = prepare(tier, group, agreed.record.step, agreed.shard_bytes)
    if stored.place is not None:
        stored = put(tier, group, stored.place, manifest, chunks)
    if stored.place is not None:
        stored = commit(tier, group, stored.place, agreed.record)
    return stored


def check_base(tier: Tier, record: Commit) -> None:
    """Refuses a snapshot to a tier that does not have what it builds on; own memory needs nothing but itself.

    Args:
        tier: Where it shall go.
        record: Of the snapshot.

    Raises:
        CheckpointError: The base is not there.
    """
    if record.base is None or tier.holds_plain:
        return
    if record.base not in {held.digest for held in tier.held().values()}:
        raise CheckpointError.of(
            f"the snapshot that step {record.step} builds on to be in {tier.name}",
            "it is not there any more",
            "save one that stands alone",
        )


def _attempt(action: Callable[[], T]) -> tuple[T | None, str | None]:
    """The result, or the message of the error; of any, as the other ranks wait for this one's vote."""
    try:
        return action(), None
    except ShadeError as error:
        return None, " ".join(str(error).split()) or type(error).__name__
    except Exception as error:
        logger.exception("a tier failed as none should")
        return None, f"{type(error).__name__}: {' '.join(str(error).split())}"
