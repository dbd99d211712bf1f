"""Random bits flip and files end early, in every tier and every kind of file and key: nothing wrong is ever loaded.

After each, a restore gives the newest snapshot bit for bit, or an older one and says so, or a CorruptCheckpointError.
Never something else, and never nothing, as if there had been no snapshot.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier
from shade.checkpoint._restore.reader import Reader
from shade.checkpoint._restore.restore import read_newest
from shade.checkpoint._tiers.memory import MemoryTier
from shade.checkpoint._tiers.storage import StorageTier
from shade.checkpoint._tiers.tier import Shard, Tier
from shade.errors import CorruptCheckpointError
from shade.rank_group import SingleProcessGroup
from shade.storage import open_volume
from shade.store import Store, open_store
from shade.store._servers.server import LocalServer
from tests.simulation.torture.ledger import RUN, Saved, saved

pytestmark = pytest.mark.multiprocess

NUM_RANKS = 2
SAVES = [saved(10, 1, NUM_RANKS), saved(20, 2, NUM_RANKS)]


@dataclass
class Patient:
    """A tier with two snapshots, and every piece of it that can rot."""

    open: Callable[[], Tier]
    pieces: Callable[[], list[str]]
    read: Callable[[str], bytes]
    write: Callable[[str, bytes], None]
    num_bytes: int | None = None
    """Of a piece: only its first bytes mean anything."""


class Loudness(logging.Handler):
    """Counts what is said."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.num_said = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.num_said += 1


def fill(tier: Tier, one: Saved) -> None:
    place = tier.prepare(one.record.step, [manifest.stored_bytes for manifest in one.manifests])
    for manifest, chunks in zip(one.manifests, one.chunks, strict=True):
        tier.put(place, Shard(manifest, chunks))
    tier.commit(place, one.record)


@pytest.fixture
def storage(tmp_path: Path) -> Patient:
    def open_tier() -> Tier:
        return StorageTier(open_volume(str(tmp_path)), RUN)

    for one in SAVES:
        fill(open_tier(), one)
    files = sorted(str(path) for path in tmp_path.rglob("*") if path.is_file())
    assert len(files) == 2 * (2 * NUM_RANKS + 1)
    return Patient(
        open_tier,
        lambda: files,
        lambda name: Path(name).read_bytes(),
        lambda name, new: Path(name).write_bytes(new) and None,
    )


@pytest.fixture
def shared_memory(tmp_path_factory: pytest.TempPathFactory) -> Patient:
    tmp_path = tmp_path_factory.mktemp("own")
    stages = [SharedMemoryTier(RUN, rank, num_buffers=2, folder=tmp_path) for rank in range(NUM_RANKS)]
    for one in SAVES:
        for stage, manifest, chunks in zip(stages, one.manifests, one.chunks, strict=True):
            place, buffer = stage.begin(manifest.num_bytes)
            buffer.numpy()[: manifest.num_bytes] = bytearray(b"".join(chunks))
            stage.put(place, Shard(manifest, ()))
        for stage in stages:
            stage.commit(stage.prepare(one.record.step, []), one.record)
    for stage in stages:
        stage.close()
    files = sorted(str(path) for path in stages[0].folder.iterdir())
    assert len(files) == 2 * 3 * NUM_RANKS
    return Patient(
        lambda: SharedMemoryTier(RUN, 0, folder=tmp_path),
        lambda: files,
        lambda name: Path(name).read_bytes(),
        lambda name, new: Path(name).write_bytes(new) and None,
        num_bytes=1600,
    )


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with LocalServer() as server, open_store(server.url, timeout_seconds=5.0) as opened:
        yield opened


@pytest.fixture
def memory(store: Store) -> Iterator[Patient]:
    tier = MemoryTier(store, RUN, num_slots=2)
    for one in SAVES:
        fill(tier, one)

    def write(name: str, new: bytes) -> None:
        store.set_many({name: new})

    def read(name: str) -> bytes:
        (found,) = store.get_many([name])
        assert found is not None
        return found

    keys = sorted(store.scan("shade:checkpoint:"))
    assert len(keys) > 12
    yield Patient(lambda: tier, lambda: keys, read, write)
    tier.close()
    store.delete_many(list(store.scan("shade:checkpoint:")))


def damage(content: bytes, dice: random.Random, num_bytes: int | None) -> bytes:
    """One to three bits the other way, or the end missing."""
    if dice.random() < 0.2 or not content:
        return content[: dice.randrange(max(1, len(content)))]
    wrong = bytearray(content)
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        bit = dice.randrange(8 * min(len(wrong), num_bytes or len(wrong)))
        wrong[bit // 8] ^= 1 << bit % 8
    return bytes(wrong)


def suffer(patient: Patient, num_times: int, seed: int) -> Counter[str]:
    """Damages one piece at a time, restores, and mends it again; what came of it, by kind."""
    dice, outcomes = random.Random(seed), Counter[str]()
    loudness = Loudness()
    logger = logging.getLogger("shade.checkpoint")
    logger.addHandler(loudness)
    logger.propagate = False
    right = {one.record.digest: one.tensors for one in SAVES}
    pieces = patient.pieces()
    try:
        for _ in range(num_times):
            name = dice.choice(pieces)
            content = patient.read(name)
            wrong = damage(content, dice, patient.num_bytes)
            patient.write(name, wrong)
            said = loudness.num_said
            try:
                found = read_newest(Reader([patient.open()]), SingleProcessGroup())
            except CorruptCheckpointError:
                outcomes["refused"] += 1
            else:
                assert found is not None, f"{name}: as if there had never been a snapshot"
                tensors = {key: tensor.numpy().tobytes() for key, tensor in found.tensors.items()}
                assert tensors == right[found.record.digest], f"{name}: loaded something wrong, silently"
                if found.record.sequence == 2:
                    outcomes["newest"] += 1
                else:
                    outcomes["older"] += 1
                    assert loudness.num_said > said, f"{name}: went back to an older one without a word"
            patient.write(name, content)
        found = read_newest(Reader([patient.open()]), SingleProcessGroup())
        assert found is not None
        assert found.record.sequence == 2
    finally:
        logger.propagate = True
        logger.removeHandler(loudness)
    return outcomes


NUM_TIMES = [170, pytest.param(3400, marks=pytest.mark.slow)]


@pytest.mark.parametrize("num_times", NUM_TIMES)
@pytest.mark.parametrize("tier", ["shared_memory", "memory", "storage"])
def test_nothing_wrong_is_ever_loaded(tier: str, num_times: int, request: pytest.FixtureRequest) -> None:
    outcomes = suffer(request.getfixturevalue(tier), num_times, seed=num_times)
    assert sum(outcomes.values()) == num_times
    assert outcomes["newest"] > num_times / 10, "damage to the older one, or to what does not matter"
    assert outcomes["older"] > num_times / 10


def test_what_one_tier_has_lost_comes_from_another(shared_memory: Patient, storage: Patient) -> None:
    dice = random.Random(0)
    for _ in range(60):
        name = dice.choice(shared_memory.pieces())
        content = shared_memory.read(name)
        shared_memory.write(name, damage(content, dice, shared_memory.num_bytes))
        found = read_newest(Reader([shared_memory.open(), storage.open()]), SingleProcessGroup())
        assert found is not None
        assert found.record.sequence == 2
        assert {key: tensor.numpy().tobytes() for key, tensor in found.tensors.items()} == SAVES[1].tensors
        shared_memory.write(name, content)


@pytest.mark.parametrize("tier", ["shared_memory", "memory", "storage"])
def test_with_every_record_rotten_it_does_not_start_from_nothing(tier: str, request: pytest.FixtureRequest) -> None:
    patient: Patient = request.getfixturevalue(tier)
    records = [name for name in patient.pieces() if "commit" in name]
    assert records
    for name in records:
        patient.write(name, patient.read(name)[:-2])
    with pytest.raises(CorruptCheckpointError, match="its record cannot be read"):
        read_newest(Reader([patient.open()]), SingleProcessGroup())
