"""How a snapshot comes to count: the same four steps in every tier, one rank's failure is every rank's.

The order is what keeps a half-written snapshot from ever being read, whichever process dies at whichever operation:

1. The ranks exchange their manifests' digests; now each can make the same commit record.
2. Rank 0 prepares a place: the record of what lay there goes first.
3. Every rank puts its shard. Nobody who looks finds it.
4. The ranks vote. All in favour: the record is written, last. One against, or dead: there is no record, and the place
   is free again; what was committed before lies in another place and was not touched.

A rank that dies between 1 and 4 leaves the others waiting in a collective, which ends with the group's timeout, as
the training's own collectives do. A rank 0 that dies after 4 has committed: the others may not know, whoever recovers does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from shade.checkpoint.group import Group
from shade.checkpoint.manifest import Commit, Manifest
from shade.checkpoint.tier import Shard, Tier
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


def agree(group: Group, manifest: Manifest | None, error: str | None, *, sequence: int, saved_at: float,
          metrics: dict[str, float]) -> tuple[Commit, list[int]]:  # fmt: skip
    """Step 1: every rank learns all manifests' digests, or that one rank has none.

    Args:
        group: The ranks.
        manifest: Of this rank's shard.
        error: Why there is none.
        sequence: Of this save; rank 0's counts.
        saved_at: Rank 0's counts.
        metrics: Rank 0's count.

    Returns:
        The commit record, and each rank's stored bytes.

    Raises:
        CheckpointError: On every rank, where one could not copy its state; the message is that rank's.
    """
    mine = {"error": error}
    if manifest is not None:
        mine |= {
            "digest": manifest.digest,
            "run": manifest.run,
            "step": manifest.step,
            "num_bytes": manifest.num_bytes,
            "stored_bytes": manifest.stored_bytes,
            "sequence": sequence,
            "saved_at": saved_at,
            "metrics": metrics,
        }
    told = group.gather(mine)
    for rank, each in enumerate(told):
        if each["error"]:
            raise CheckpointError(f"rank {rank}: {each['error']}")
    if len({(each["run"], each["step"]) for each in told}) > 1:
        steps = [(each["run"], each["step"]) for each in told]
        raise CheckpointError.of("every rank to save the same step", steps, "call save() and step() on all ranks alike")
    record = Commit(
        run=told[0]["run"],
        step=told[0]["step"],
        sequence=told[0]["sequence"],
        world_size=group.world_size,
        manifests=tuple(each["digest"] for each in told),
        num_bytes=sum(each["num_bytes"] for each in told),
        saved_at=told[0]["saved_at"],
        metrics=told[0]["metrics"],
    )
    return record, [each["stored_bytes"] for each in told]


def store(
    tier: Tier,
    group: Group,
    record: Commit,
    shard_bytes: list[int],
    manifest: Manifest,
    chunks: Callable[[], Iterable[Bytes]],
) -> Stored:
    """Steps 2 to 4, in one tier. Collective.

    Args:
        tier: Where to.
        group: The ranks.
        record: As agreed.
        shard_bytes: As agreed.
        manifest: Of this rank.
        chunks: This rank's, in stored form; called once.

    Returns:
        Where it is committed, or why it is not. A tier that fails is no exception: there may be another.
    """
    place, reason = group.share(_attempt(lambda: tier.prepare(record.step, shard_bytes)) if group.rank == 0 else None)
    if place is None:
        return Stored(None, reason)
    _, failure = _attempt(lambda: tier.put(place, Shard(manifest, chunks())))
    reason = next(filter(None, group.gather(failure)), None)
    if reason is None:
        if tier.every_rank_commits or group.rank == 0:
            _, failure = _attempt(lambda: tier.commit(place, record))
        reason = next(filter(None, group.gather(failure)), None)
    if reason is None:
        return Stored(place)
    if tier.every_rank_commits or group.rank == 0:
        _, failure = _attempt(lambda: tier.discard(place))
        if failure:
            logger.warning("%s: could not tidy %s up: %s", tier.name, place, failure)
    return Stored(None, reason)


def _attempt(action: Callable[[], T]) -> tuple[T | None, str | None]:
    """The result, or the message of the deliberate error."""
    try:
        return action(), None
    except ShadeError as error:
        return None, " ".join(str(error).split()) or type(error).__name__
