"""What must hold of everything that a scenario leaves, whatever went wrong in it.

1. A restore gives a snapshot that was offered, bit for bit, and none older than what was promised.
2. Every snapshot that a tier holds is whole in that tier, unless bits were flipped: a record speaks the truth.
3. What is clean in memory is durable, or something newer is.
4. The run goes on: the next save lands, is flushed, and is restored.

Where bits were flipped, what had a single copy may be lost. Then that is said; and nothing wrong is ever given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier
from shade.checkpoint._restore.reader import Reader, ShardDecoder
from shade.checkpoint._restore.restore import read_newest
from shade.checkpoint._tiers.tier import Tier
from shade.errors import CheckpointError, CorruptCheckpointError, ShadeError
from shade.rank_group import SingleProcessGroup
from tests.simulation.torture.bench import Bench, Setup, State
from tests.simulation.torture.ledger import Ledger, saved
from tests.simulation.torture.world import World

_MAX_FLUSHES: Final = 10


def judge(setup: Setup, state: State, *, is_damaged: bool = False, goes_on: bool = True) -> list[str]:
    """Everything that is wrong with what is left.

    Args:
        setup: Of the run.
        state: What is left; used up.
        is_damaged: Whether bits were flipped: then what is lost may be lost, if it is said.
        goes_on: Whether to try a further save.

    Returns:
        Sentences; empty where all is right.
    """
    objections: list[str] = []
    floor = -1 if is_damaged else state.ledger.floor(memory_is_there=state.survives)
    with Bench(setup, state, World(0)) as bench:
        reader = Reader(bench.tiers("look"))
        objections += _restore(reader, state.ledger, floor, is_damaged=is_damaged)
        if not is_damaged:
            objections += [each for tier in reader.tiers for each in _wholeness(tier)]
            objections += _cleanliness(bench)
    is_memory_closed = bool(state.servers.away) and not setup.has_storage
    if goes_on and not is_memory_closed:
        objections += _going_on(setup, state, is_damaged=is_damaged)
    return objections


def _restore(reader: Reader, ledger: Ledger, floor: int, *, is_damaged: bool) -> list[str]:
    try:
        found = read_newest(reader, SingleProcessGroup())
    except CorruptCheckpointError as error:
        return [] if is_damaged else [f"nothing could be restored: {error}"]
    except CheckpointError as error:
        return [f"nothing could be restored: {error}"]
    if found is None:
        if is_damaged and ledger.durable:
            return ["found no snapshot at all, and did not say that one is damaged"]
        return [f"found nothing, although save {floor} had been promised"] if floor >= 0 else []
    tensors = {name: tensor.numpy().tobytes() for name, tensor in found.tensors.items()}
    objection = ledger.objection(found.record, tensors, floor)
    return [] if objection is None else [objection]


def _wholeness(tier: Tier) -> Iterator[str]:
    """Each tier alone must have all of every snapshot, and all that it builds on."""
    reader = Reader([tier])
    for snapshot in reader.snapshots():
        ranks: Iterable[int] = range(snapshot.record.world_size)
        if isinstance(tier, SharedMemoryTier):
            ranks = _own(tier, snapshot.sources[0].location, ranks)
        try:
            for rank in ranks:
                manifest = reader.manifest(snapshot, rank)
                ShardDecoder(reader, snapshot, manifest).chunks(range(len(manifest.chunks)))
        except CorruptCheckpointError as error:
            yield f"a record without its snapshot: {error}"


def _own(stage: SharedMemoryTier, place: str, ranks: Iterable[int]) -> list[int]:
    """In shared memory each rank's record speaks of its own shard alone: the ranks that have one."""
    return [rank for rank in ranks if (stage.folder / f"rank-{rank}.{place}.commit").exists()]


def _cleanliness(bench: Bench) -> list[str]:
    """What memory calls clean is durable, or something newer is."""
    memory, storage = bench.memory("look"), bench.storage("look")
    if memory is None or storage is None:
        return []
    durable = storage.held().values()
    newest = max((record.sequence for record in durable), default=-1)
    return [
        f"save {record.sequence} is clean in memory, and storage has nothing newer than {newest}"
        for place, record in memory.held().items()
        if not memory.is_dirty(place) and record.sequence > newest
    ]


def _going_on(setup: Setup, state: State, *, is_damaged: bool) -> list[str]:
    """A run of one rank comes after, and saves."""
    one = state.ledger.add(saved(40, 100, 1))
    with Bench(setup, state, World(0)) as bench:
        try:
            if not is_damaged:
                _drain(bench)
            bench.save(one, SingleProcessGroup(), "after")
            if not is_damaged:
                _drain(bench)
        except (ShadeError, RuntimeError) as error:
            return [] if is_damaged and isinstance(error, ShadeError) else [f"could not go on: {error}"]
        return [
            f"after going on: {each}"
            for each in _restore(Reader(bench.tiers("look")), state.ledger, 100, is_damaged=False)
        ]


def _drain(bench: Bench) -> None:
    if bench.setup.num_servers and bench.setup.has_storage and not bench.state.servers.away:
        for _ in range(_MAX_FLUSHES):
            if not bench.flush("flusher"):
                return
        raise RuntimeError("a flusher that never comes to an end")
