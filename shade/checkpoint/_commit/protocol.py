"""How a snapshot comes to count: the same four steps in every tier; one rank's failure is every rank's failure.

1. `agree`: the ranks exchange the digests of their manifests, so that each can make the same commit record.
2. `prepare`: rank 0 prepares a location and removes the record of what lay there before.
3. `put`: every rank writes its shard. No reader finds it yet.
4. `commit`: the ranks vote. If all succeeded, the record is written, last; else the location is freed.

A snapshot that is uploaded during its copy passes steps 2 and 3 first, after `announce`. Every function here is
collective, and raises the same `CheckpointError` on every rank. A rank that dies between 1 and 4 leaves the others
waiting until the group's timeout. If rank 0 dies after 4, the snapshot is committed: the next restore finds it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from shade.checkpoint._capture.flatten import splits_in
from shade.checkpoint._format.manifest import Commit, Manifest
from shade.checkpoint._format.retention import Keep
from shade.checkpoint._pacing.schedule import Pace
from shade.checkpoint._tiers.tier import Shard, Tier
from shade.errors import CheckpointError, ShadeError, StoreError
from shade.rank_group import RankGroup
from shade.types import Bytes

logger = logging.getLogger("shade.checkpoint")
T = TypeVar("T")

_NO_PACE = Pace()


def statement(
    manifest: Manifest,
    *,
    sequence: int,
    saved_at: float,
    metrics: Mapping[str, float] | None = None,
    replica: str = "",
    base: str | None = None,
) -> dict[str, Any]:
    """Returns what the other ranks have to know of a rank's shard.

    ``sequence`` is the number of the save in its run: the highest counts. ``saved_at`` is when the state was taken, in
    seconds since 1970: rank 0's counts, as do its ``metrics``. ``replica`` is a digest over samples of the state that
    all ranks should hold alike, empty where they need not; ``base`` that of the record of the snapshot that the shard
    builds on, the same on every rank.
    """
    return {
        "digest": manifest.digest,
        "run": manifest.run,
        "step": manifest.step,
        "num_bytes": manifest.num_bytes,
        "stored_bytes": manifest.stored_bytes,
        "version": manifest.version,
        "base": base,
        "sequence": sequence,
        "saved_at": saved_at,
        "metrics": dict(metrics or {}),
        "replica": replica,
        "splits": splits_in(manifest.tree),
    }


def agree(
    group: RankGroup, manifest: Manifest | None, error: str | None, *, pace: Pace = _NO_PACE, **said: Any
) -> tuple[Commit, list[int], Pace]:
    """Takes step 1: every rank learns the digests of all manifests, or that one rank has none and why (``error``).
    ``said`` is what `statement` takes. Returns the commit record, the stored length of each rank's shard, and rank 0's
    pace, the same on every rank. Raises a CheckpointError as `record_of`."""
    mine: dict[str, Any] = {"error": error}
    if manifest is not None:
        mine |= statement(manifest, **said) | {"pace": asdict(pace)}
    gathered = group.gather(mine)
    return record_of(gathered), [each["stored_bytes"] for each in gathered], Pace(**gathered[0]["pace"])


def record_of(gathered: Sequence[Mapping[str, Any]]) -> Commit:
    """Returns the commit record of a snapshot, from every rank's statement; raises a CheckpointError if one rank could
    not copy its state, or the ranks do not save the same thing."""
    _check_alike(gathered)
    if len({each["base"] for each in gathered}) > 1:
        bases = [each["base"] for each in gathered]
        raise CheckpointError.of("every rank to build on the same snapshot", bases, "report it; they had agreed")
    different = [rank for rank, each in enumerate(gathered) if each["replica"] != gathered[0]["replica"]]
    if different:
        cure = "wrap the model in DistributedDataParallel, or pass replicated=False to save each rank's own"
        raise CheckpointError.of("the same parameters on every rank", f"others on ranks {different} than on 0", cure)
    _check_splits([each["splits"] for each in gathered])
    first = gathered[0]
    return Commit(
        run=first["run"],
        step=first["step"],
        sequence=max(each["sequence"] for each in gathered),
        world_size=len(gathered),
        manifests=tuple(each["digest"] for each in gathered),
        num_bytes=sum(each["num_bytes"] for each in gathered),
        saved_at=first["saved_at"],
        metrics=first["metrics"],
        base=first["base"],
        version=max(each["version"] for each in gathered),
    )


def _check_splits(gathered: Sequence[Mapping[str, Sequence[Any]]]) -> None:
    """Raises unless all ranks of each mesh have split the same DTensors in the same way."""
    for mesh in {mesh for each in gathered for mesh in each}:
        said = {rank: each[mesh][0] for rank, each in enumerate(gathered) if mesh in each}
        if len(said) != next(each[mesh][1] for each in gathered if mesh in each) or len({*said.values()}) > 1:
            others = {rank: digest[:8] for rank, digest in said.items()}
            cure = "build and train the same model on all ranks of a mesh"
            raise CheckpointError.of(f"the same DTensors on all ranks of the mesh {mesh}", others, cure)


def announce(group: RankGroup, manifest: Manifest | None, error: str | None) -> list[int]:
    """Checks that every rank is about to upload the same step; returns the length of each rank's shard. The manifest
    has no digests yet; without one, ``error`` says why."""
    mine: dict[str, Any] = {"error": error}
    if manifest is not None:
        mine |= {"run": manifest.run, "step": manifest.step, "num_bytes": manifest.num_bytes}
    gathered = group.gather(mine)
    _check_alike(gathered)
    return [each["num_bytes"] for each in gathered]


def _check_alike(gathered: Sequence[Mapping[str, Any]]) -> None:
    """Raises unless all ranks have a shard of the same step."""
    for rank, each in enumerate(gathered):
        if each.get("error"):
            raise CheckpointError(f"rank {rank}: {each['error']}")
    steps = [(each["run"], each["step"]) for each in gathered]
    if len(set(steps)) > 1:
        raise CheckpointError.of("every rank to save the same step", steps, "call save() and step() on all ranks alike")


def prepare(tier: Tier, group: RankGroup, step: int, shard_bytes: Sequence[int]) -> str:
    """Takes step 2 in one tier; returns the place. ``shard_bytes`` are the stored lengths of all ranks' shards."""
    # Rank 0 shares its failure too: if it raised before `share`, the others would wait in it.
    place: str | None
    place, reason = group.share(_attempt(lambda: tier.prepare(step, shard_bytes)) if group.rank == 0 else None)
    if place is None:
        raise CheckpointError(reason)
    return place


def put(tier: Tier, group: RankGroup, place: str, manifest: Manifest, chunks: Callable[[], Iterable[Bytes]]) -> None:
    """Takes step 3 in one tier, and the vote on it. ``chunks`` is called once: this rank's chunks in stored form."""
    _, failure = _attempt(lambda: tier.put(place, Shard(manifest, chunks())))
    _vote(tier, group, place, failure)


def commit(tier: Tier, group: RankGroup, place: str, record: Commit) -> None:
    """Takes step 4 in one tier; if the record cannot be written, the place is free again."""

    def write() -> None:
        # `store` has checked it before the shards were put; the base may have been removed since.
        check_base(tier, record)
        tier.commit(place, record)

    failure = None
    if tier.every_rank_commits or group.rank == 0:
        _, failure = _attempt(write)
    _vote(tier, group, place, failure)


def _vote(tier: Tier, group: RankGroup, place: str, failure: str | None) -> None:
    reason = next(filter(None, group.gather(failure)), None)
    if reason is not None:
        discard(tier, group, place)
        raise CheckpointError(reason)


def discard(tier: Tier, group: RankGroup, place: str) -> None:
    """Discards what was put and does not count; a tier that fails here tidies up later."""
    if tier.every_rank_commits or group.rank == 0:
        _, failure = _attempt(lambda: tier.discard(place))
        if failure:
            logger.warning("%s: could not tidy %s up: %s", tier.name, place, failure)


def store(
    tier: Tier,
    group: RankGroup,
    record: Commit,
    shard_bytes: Sequence[int],
    manifest: Manifest,
    chunks: Callable[[], Iterable[Bytes]],
) -> str:
    """Takes steps 2 to 4 in one tier, with the record and lengths that `agree` gave; returns the location."""
    # Before `prepare`, which removes the record of an older snapshot: a tier that will refuse this one keeps it.
    if record.base is not None:
        refusal = group.share(_attempt(lambda: check_base(tier, record))[1] if group.rank == 0 else None)
        if refusal is not None:
            raise CheckpointError(refusal)
    place = prepare(tier, group, record.step, shard_bytes)
    put(tier, group, place, manifest, chunks)
    commit(tier, group, place, record)
    return place


def check_base(tier: Tier, record: Commit) -> None:
    """Raises if a tier lacks the base of a snapshot."""
    # Shared memory holds plain data, which needs no base.
    if record.base is None or tier.holds_plain:
        return
    if record.base not in {held.digest for held in tier.held().values()}:
        raise CheckpointError.of(
            f"the snapshot that step {record.step} builds on to be in {tier.name}",
            "it is not there any more",
            "save one that stands alone",
        )


def retire(
    tier: Tier,
    keep: Keep,
    pending: Callable[[], Iterable[Commit]] = tuple,
    known: dict[str, Commit] | None = None,
) -> None:
    """Removes from a tier the snapshots that no rule keeps.

    Args:
        tier: The tier.
        keep: The rules.
        pending: Returns the snapshots that may still be moved here: their bases stay too. A StoreError of it counts as
            a record that cannot be read.
        known: What the last call found, for a caller that alone writes to the tier; brought up to date.

    Raises:
        StorageError: The tier failed; what is left is removed next time.
    """
    if keep.all:
        return
    held = tier.held() if known is None else tier.held(known)
    if known is not None:
        known.clear()
        known.update(held)
    places = {record.digest: (place, record) for place, record in held.items()}
    records = [record for _, record in places.values()]
    unreadable, others = [*tier.damaged], list[Commit]()
    if any(record.version > 1 for record in records):
        try:
            others += pending()
        except StoreError as error:
            unreadable.append(str(error))
    stay = 0
    for record in keep.discardable(records, others):
        # An unreadable record may be readable later, and may build on any snapshot of version 2, on none of version 1.
        if unreadable and record.version > 1:
            stay += 1
        else:
            place, _ = places[record.digest]
            if known is not None:
                del known[place]
            tier.discard(place)
    if stay:
        logger.warning(
            "%d old snapshots stay in %s: what cannot be read may build on them: %s; if that lasts, see "
            "shade checkpoint verify, and remove the folders that it names",
            *(stay, tier.name, "; ".join(unreadable)),
        )


def note_health(tier: Tier, group: RankGroup, failing: set[str], failure: object, *, is_last: bool) -> None:
    """Logs on rank 0 when a tier begins to fail, and when it works again; ``failing`` are those that failed last."""
    is_news = (failure is not None) != (tier.name in failing)
    (failing.discard if failure is None else failing.add)(tier.name)
    if is_news and group.rank == 0:
        if failure is None:
            logger.warning("%s works again", tier.name)
        else:
            logger.warning("%s fails%s: %s", tier.name, "" if is_last else "; saves go to storage", failure)


def _attempt(action: Callable[[], T]) -> tuple[T | None, str | None]:
    """Returns the result, or any error's message."""
    try:
        return action(), None
    except ShadeError as error:
        return None, " ".join(str(error).split()) or type(error).__name__
    # Whatever it is, the other ranks wait for this one's vote.
    except Exception as error:
        logger.exception("a tier failed as none should")
        return None, f"{type(error).__name__}: {' '.join(str(error).split())}"
