"""A format of a user's own: seconds of long recordings, cut by range."""

from __future__ import annotations

import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shade import ShadeDataset, Shards
from shade.data import ShardFile, ShardFormat, ShardScan
from shade.errors import ConfigError, DataError

RATE, SECONDS = 800, 7


@dataclass(frozen=True)
class Seconds(ShardFormat):
    """Every second of a WAV file; the bytes of a piece are the sample, so `payloads` stays as it is."""

    num_seconds: int = 1
    suffixes = ("wav",)

    def scan(self, file: ShardFile) -> ShardScan:
        with wave.open(file.as_file()) as record:  # type: ignore[arg-type]
            num_bytes, rate = 2 * record.getnframes(), record.getframerate()
        first, length = file.entry.num_bytes - num_bytes, 2 * rate * self.num_seconds
        starts = range(first, first + num_bytes - length + 1, length)
        return ShardScan.of(starts, [length] * len(starts), ["sound"])

    def row(self, scan: ShardScan, payload: Any, columns: Any) -> dict[str, Any]:
        return {"sound": np.frombuffer(payload, np.int16)}


@pytest.fixture(autouse=True)
def own_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shade.cache.breaker.SLOW_SECONDS", 1e9)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def waves(tmp_path: Path) -> np.ndarray:
    """Three recordings, as int16 (3, samples)."""
    written = np.random.default_rng(0).integers(-999, 999, (3, RATE * SECONDS + 50), dtype=np.int16)
    for number, samples in enumerate(written):
        with wave.open(str(tmp_path / f"{number}.wav"), "w") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes(samples.tobytes())
    return written


@pytest.mark.parametrize("disk", [False, True])
def test_a_range_of_a_record_is_a_sample_from_the_file_from_the_disk_and_from_the_cache(
    waves: np.ndarray, disk: bool, tmp_path: Path
) -> None:
    near = f"{tmp_path}/disk?capacity=10MiB" if disk else None
    shards = Shards(tmp_path, "sound", format=Seconds(2), disk=near)
    assert len(shards) == 3 * (SECONDS // 2)
    dataset = ShadeDataset(shards, cache="memory://", working_set_fraction=1.0)
    before = dataset.stats()["origin_bytes"]
    for _ in range(2):
        for index in range(len(shards)):
            sound, number = dataset[index]
            start = index % 3 * 2 * RATE
            assert number == index
            assert np.array_equal(sound, waves[index // 3, start : start + 2 * RATE])
    counts = dataset.stats()
    assert counts["hits"] >= len(shards)
    assert counts["origin_bytes"] - before <= len(shards) * 4 * RATE
    dataset.close()


def test_arguments_are_part_of_the_name(waves: np.ndarray, tmp_path: Path) -> None:
    one, two, again = (Shards(tmp_path, "sound", format=Seconds(number)) for number in (1, 2, 1))
    assert one.fingerprint == again.fingerprint != two.fingerprint
    assert (len(one), len(two), len(again)) == (21, 9, 21)
    assert len(list((tmp_path / "cache").rglob("*.index"))) == 6


def test_a_record_that_changes_is_refused_by_name(waves: np.ndarray, tmp_path: Path) -> None:
    shards = Shards(tmp_path, "sound", format=Seconds())
    (tmp_path / "1.wav").write_bytes((tmp_path / "0.wav").read_bytes() + b"more")
    with pytest.raises(DataError, match=r"1\.wav to be what it was"):
        shards[SECONDS]
    with pytest.raises(DataError, match=r"1\.wav to be what it was"):
        Shards(tmp_path, "sound", format=Seconds())


def test_a_format_whose_name_differs_in_each_process_is_refused_and_a_dataclass_is_the_cure(
    waves: np.ndarray, tmp_path: Path
) -> None:
    class Nameless(Seconds):
        __repr__ = object.__repr__

    with pytest.raises(ConfigError, match=r"a format whose repr says its arguments.*dataclass"):
        Shards(tmp_path, "sound", format=Nameless())
    assert len(Shards(tmp_path, "sound", format=Seconds())) == 3 * SECONDS
