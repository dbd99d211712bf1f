"""A stream is recorded once, is the same afterwards, and continues where its recording ends, or is refused by name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from shade import Recorded, RecordedSampler, ShadeDataset, ShadeLoader, ShadeSampler
from shade.errors import BadSampleError, ConfigError, DataError, StorageFullError

ITEMS = 50


def points(first: int = 0) -> Iterator[Any]:
    for number in range(first, ITEMS):
        yield torch.full((3,), float(number)), number


class Stream:
    """Items with a state, that counts its passes and those it yields; a ``lie`` is added to a state that is loaded."""

    def __init__(self, num_items: int = ITEMS, *, lie: int = 0, breaks_at: int | None = None) -> None:
        self.place, self._counts = 0, [0]  # a copy counts here too
        self._num_items, self._lie, self.breaks_at = num_items, lie, breaks_at

    def __iter__(self) -> Iterator[Any]:
        while self.place < self._num_items:
            if self.place == self.breaks_at:
                self.breaks_at = None
                raise ConnectionError("the line is down")
            self.place += 1
            self._counts[0] += 1
            yield {"id": self.place - 1}

    @property
    def num_yielded(self) -> int:
        return self._counts[0]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"] + self._lie * (state["place"] > 0)


def part_of(folder: Path, source: Any, count: int) -> None:
    """Records some items, as a job does that ends then."""
    data = Recorded(source, folder)
    assert data.reach(count) == count
    data.close()


@pytest.fixture
def slowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorders that read no further than somebody asks for, and write each item by itself."""
    monkeypatch.setattr("shade.data._recorded.recorder._AHEAD_BYTES", 0)
    monkeypatch.setattr("shade.data._recorded.recorder._GROUP_ITEMS", 1)


def ids_of(loader: Any) -> list[int]:
    return [number for *_, indices in loader for number in indices.tolist()]


# ── what is recorded ────────────────────────────────────────────────────────────────────────────────────────────────


def test_items_come_back_as_they_were(tmp_path: Path) -> None:
    picture = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    items = [{"text": "a", "tokens": np.arange(3), "n": None}, (b"raw", [1, 2.5]), torch.ones(2, dtype=torch.bfloat16)]
    data = Recorded([*items, picture], tmp_path)
    assert data.record() == 4
    assert str(data[0]) == str(items[0])
    assert data[1] == items[1]
    assert torch.equal(data[2], items[2])
    assert data[-1].tobytes() == picture.tobytes()
    assert repr(data) == f"Recorded(num_samples=4, complete, disk={str(tmp_path)!r})"


@pytest.mark.parametrize(
    "source",
    [points, lambda: list(points()), list(points()), points(), DataLoader(list(points()), batch_size=None)],
    ids=["function", "lambda", "list", "generator", "DataLoader"],
)
def test_first_epoch_is_the_stream_and_the_others_are_shuffled(source: Any, tmp_path: Path) -> None:
    dataset = ShadeDataset(Recorded(source, tmp_path), cache=None)
    sampler = RecordedSampler(dataset, batch_size=8, seed=1, mode="uniform")
    loader = ShadeLoader(dataset, batch_size=8, sampler=sampler, num_workers=0)
    assert "of" not in repr(loader).rpartition("batches=")[2]
    with pytest.raises(TypeError, match="got 0 items so far"):
        len(loader)
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        epochs.append(ids_of(loader))
    assert epochs[0] == list(range(ITEMS))
    assert all(sorted(ids) == epochs[0] != ids for ids in epochs[1:])
    # From here on it is a data set as any other: a second job takes the same epochs, and draws the later ones alike.
    later = ShadeSampler(dataset, batch_size=8, seed=1, mode="uniform")
    later.set_epoch(1)
    assert list(later) == epochs[1]
    sampler = RecordedSampler(dataset, batch_size=8, seed=1, mode="uniform")
    assert len(sampler) == ITEMS
    assert [list(sampler) for _ in range(2)] == epochs[:2]
    sampler.close()


def test_second_job_does_not_read_the_stream(tmp_path: Path) -> None:
    assert Recorded(points, tmp_path).record() == ITEMS
    shutil.copytree(tmp_path, tmp_path / "copy")
    stream = Stream()
    with pytest.raises(DataError, match="repeats item 0 of the recording"):
        Recorded(stream, tmp_path)  # its first item is compared
    assert stream.num_yielded == 1
    again = Recorded(points, tmp_path / "copy")
    assert len(again) == ITEMS
    assert again._recorder is None
    assert [number for _, number in again.__getitems__([3, 49, 0])] == [3, 49, 0]


def test_a_cache_takes_a_complete_recording_alone(tmp_path: Path) -> None:
    data = Recorded(points, tmp_path)
    with pytest.raises(ConfigError, match="complete recording for a cache, got '0 items so far'"):
        ShadeDataset(data, "memory://")
    with pytest.raises(TypeError, match="call record"):
        ShadeSampler(ShadeDataset(data, cache=None), batch_size=8)
    data.record()
    dataset = ShadeDataset(data, "memory://", working_set_fraction=1.0)
    sampler = ShadeSampler(dataset, batch_size=8, mode="uniform")
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for values, labels, indices in DataLoader(dataset, batch_size=8, sampler=sampler):
            assert torch.equal(values[:, 0], indices.float())
            assert torch.equal(labels, indices)
    assert dataset.stats()["hits"] == ITEMS
    sampler.close()
    dataset.close()


def test_an_item_that_cannot_be_kept_is_refused_by_its_number(tmp_path: Path) -> None:
    data = Recorded([{"n": 1}, {"n": {1, 2}}], tmp_path)
    with pytest.raises(ConfigError, match=r"in item 1 of the stream, got 'set'; map the stream to these"):
        data.record()
    assert data.num_readable == 0 or data[0] == {"n": 1}


@pytest.mark.parametrize("source", [5, None])
def test_what_is_no_stream_is_refused(source: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="an iterable, or a function"):
        Recorded(source, tmp_path)


def test_a_mistake_of_later_epochs_is_found_before_the_first_one(tmp_path: Path) -> None:
    data = Recorded(points, tmp_path)
    with pytest.raises(ConfigError, match="mode"):
        RecordedSampler(data, batch_size=8, mode="unbised")
    with pytest.raises(ConfigError, match="use ShadeSampler"):
        RecordedSampler(list(range(9)), batch_size=8)


# ── where it continues ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("slowed")
@pytest.mark.parametrize("source", [points, Stream], ids=["generator", "state"])
def test_recording_continues_where_it_ended(source: Callable[[], Any], tmp_path: Path) -> None:
    for count in (20, 40, ITEMS):
        part_of(tmp_path, source(), count)
    streams = [Stream(), Stream()]
    data = Recorded(streams[0] if source is Stream else source, tmp_path)
    assert data.record() == ITEMS
    expected = [{"id": number} for number in range(ITEMS)] if source is Stream else list(range(ITEMS))
    assert [item if source is Stream else item[1] for item in data.__getitems__(range(ITEMS))] == expected


@pytest.mark.usefixtures("slowed")
def test_a_state_saves_reading_again_if_it_brings_back_the_same_items(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shade.data._recorded.recorder._SEAL_SECONDS", 0.0)
    part_of(tmp_path, Stream(), 40)
    shutil.copytree(tmp_path, tmp_path / "copy")
    honest, liar = Stream(), Stream(lie=1)
    data = Recorded(honest, tmp_path)
    assert data.record() == ITEMS
    assert 16 <= honest.num_yielded - (ITEMS - 40) < 40, "it was set to a state some items before the end"
    with caplog.at_level("INFO", "shade.data"):
        other = Recorded(liar, tmp_path / "copy")
        assert other.record() == ITEMS
    assert other.digest_of(ITEMS) == data.digest_of(ITEMS)
    assert "does not bring back item" in caplog.text
    assert "is read again up to item 40" in caplog.text


@pytest.mark.usefixtures("slowed")
def test_a_stream_that_does_not_repeat_itself_is_refused(tmp_path: Path) -> None:
    part_of(tmp_path, points, 20)
    for other in (lambda: points(1), lambda: [next(points())]):
        data = Recorded(other, tmp_path)
        with pytest.raises(DataError, match=r"a stream that repeats item [01] of the recording"):
            data.record()
    assert Recorded(points, tmp_path).record() == ITEMS


def test_what_the_stream_raises_comes_to_training_and_the_next_call_goes_on(tmp_path: Path) -> None:
    stream = Stream(breaks_at=30)
    data = Recorded(stream, tmp_path)
    with pytest.raises(ConnectionError, match="the line is down"):
        data.record()
    stream.place = 0  # as a stream that is iterated anew
    assert data.record() == ITEMS
    assert [item["id"] for item in data.__getitems__(range(ITEMS))] == list(range(ITEMS))


def test_one_process_records_and_the_others_read(tmp_path: Path) -> None:
    first, second = Stream(), Stream()
    recorder, reader = Recorded(first, tmp_path), Recorded(second, tmp_path)
    recorder.reach(1)
    assert reader.record() == ITEMS
    assert recorder.record() == ITEMS
    assert (first.num_yielded, second.num_yielded) in ((ITEMS, 0), (ITEMS, ITEMS))


@pytest.mark.usefixtures("slowed")
def test_a_place_belongs_to_its_recording(tmp_path: Path) -> None:
    sampler = RecordedSampler(Recorded(points, tmp_path / "a"), batch_size=10)
    places = iter(DataLoader(sampler._recorded, batch_size=10, sampler=sampler))
    next(places), next(places)
    state = sampler.state_dict()
    assert (state["epoch"], state["steps_done"], state["recorded"]["count"]) == (0, 2, 20)
    # A machine without a recording makes it up to the place; one of another stream is refused.
    other = RecordedSampler(Recorded(points, tmp_path / "b"), batch_size=5, num_replicas=2, rank=1, mode="uniform")
    with pytest.raises(ConfigError, match="mode='unbiased'"):
        other.load_state_dict(state)
    lost = RecordedSampler(Recorded(points, tmp_path / "c"), batch_size=10)
    lost.load_state_dict(state)
    assert list(lost) == list(range(20, ITEMS))
    wrong = RecordedSampler(Recorded(lambda: points(1), tmp_path / "d"), batch_size=10)
    with pytest.raises(DataError, match="that training was at item 20 of"):
        wrong.load_state_dict(state)


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_ranks_share_each_batch_of_the_stream(world_size: int, tmp_path: Path) -> None:
    data = Recorded(points, tmp_path)
    ranks = [
        RecordedSampler(data, world_size, rank, batch_size=12 // world_size, mode="uniform")
        for rank in range(world_size)
    ]
    taken = [list(sampler) for sampler in ranks]
    each = 12 // world_size
    for step in range(ITEMS // 12):
        got = [number for mine in taken for number in mine[step * each : (step + 1) * each]]
        assert got == list(range(12 * step, 12 * step + 12))
    # The tail of two items: nobody misses the step, and the weights of the ranks' means add up.
    tails = [mine[ITEMS // 12 * each :] for mine in taken]
    assert {number for tail in tails for number in tail} >= {48, 49}
    assert all(tails)
    total = sum(float(s.weights(torch.tensor(t)).mean()) for s, t in zip(ranks, tails, strict=True))
    assert total == pytest.approx(world_size)


# ── faults ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def cut_items(folder: Path) -> None:
    os.truncate(folder / "items", (folder / "items").stat().st_size - 10)


def zero_items(folder: Path) -> None:
    with open(folder / "items", "r+b") as items:
        items.seek(-100, os.SEEK_END)
        items.write(bytes(100))


def tear_row(folder: Path) -> None:
    with open(folder / "index", "ab") as index:
        index.write(b"\1\2\3")


def zero_rows(folder: Path) -> None:
    with open(folder / "index", "ab") as index:
        index.write(bytes(160))


@pytest.mark.usefixtures("slowed")
@pytest.mark.parametrize("damage", [cut_items, zero_items, tear_row, zero_rows])
def test_a_tail_that_a_power_cut_tore_is_recorded_again(damage: Callable[[Path], None], tmp_path: Path) -> None:
    part_of(tmp_path, points, 20)
    mark = (tmp_path / "mark").read_bytes()
    part_of(tmp_path, points, 40)
    (tmp_path / "mark").write_bytes(mark)
    damage(tmp_path)
    data = Recorded(points, tmp_path)
    assert data.record() == ITEMS
    assert [number for _, number in data.__getitems__(range(ITEMS))] == list(range(ITEMS))


@pytest.mark.usefixtures("slowed")
def test_damage_before_the_mark_is_named(tmp_path: Path) -> None:
    part_of(tmp_path, points, 20)
    shutil.copytree(tmp_path, tmp_path / "copy")
    os.truncate(tmp_path / "index", 160)
    with pytest.raises(DataError, match=r"20 items in the recording in .*, got 10; remove the folder"):
        Recorded(points, tmp_path).record()
    (tmp_path / "copy" / "mark").write_bytes(b"torn")
    with pytest.raises(DataError, match="a mark of version 1 in the recording"):
        Recorded(points, tmp_path / "copy")


def test_a_damaged_item_is_named(tmp_path: Path) -> None:
    assert Recorded(points, tmp_path).record() == ITEMS
    zero_items(tmp_path)
    data = Recorded(points, tmp_path)
    with pytest.raises(BadSampleError, match=r"expected item 49 of the recording .* other bytes"):
        data[49]
    dataset = ShadeDataset(data, cache=None, on_bad_sample="skip")
    assert dataset.__getitems__([49])[0][1] == 0  # another sample takes its place
    assert data[0][1] == 0


def test_a_full_disk_is_named_and_the_recording_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, room = os.pwrite, 3000

    def full(descriptor: int, content: Any, place: int) -> int:
        if place + len(content) > room and len(content) != 8:
            if place >= room:
                raise OSError(28, "No space left on device")
            return write(descriptor, content[: room - place], place)
        return write(descriptor, content, place)

    data = Recorded(points, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(StorageFullError, match=r"room for the recording in .*No space left .* after \d+ items"):
            data.record()
        assert 0 <= data.num_readable < ITEMS
        assert [number for _, number in data.__getitems__(range(data.num_readable))] == list(range(data.num_readable))
    assert data.record() == ITEMS
    assert [number for _, number in data.__getitems__(range(ITEMS))] == list(range(ITEMS))


# ── streams of others ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("slowed")
@pytest.mark.filterwarnings("ignore")
def test_a_shuffled_stream_of_hugging_face_loses_and_doubles_nothing(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    distributed = pytest.importorskip("datasets.distributed")

    def stream() -> Any:
        rows = datasets.Dataset.from_dict({"id": list(range(200))}).to_iterable_dataset(num_shards=2)
        return rows.shuffle(seed=3, buffer_size=40)

    expected = [row["id"] for row in stream()]
    # Its own resume does, which is why a state is compared before it is believed.
    half = iter(shuffled := stream())
    first = [next(half)["id"] for _ in range(100)]
    resumed = stream()
    resumed.load_state_dict(shuffled.state_dict())
    assert first + [row["id"] for row in resumed] != expected
    for source, folder in ((stream, tmp_path / "function"), (stream(), tmp_path / "object")):
        part_of(folder, source, 100)
        data = Recorded(source, folder)
        assert data.record() == 200
        assert [row["id"] for row in data.__getitems__(range(200))] == expected
    split = distributed.split_dataset_by_node(stream(), rank=0, world_size=2)
    with pytest.raises(ConfigError, match="the whole stream on every rank"):
        Recorded(lambda: split, tmp_path / "split").record()


@pytest.mark.usefixtures("slowed")
@pytest.mark.filterwarnings("ignore")  # it leaves the tar open where its iteration ends early
def test_a_pipeline_of_webdataset_is_recorded(tmp_path: Path) -> None:
    wds = pytest.importorskip("webdataset")
    with wds.TarWriter(str(tmp_path / "a.tar")) as tar:
        for number in range(ITEMS):
            tar.write({"__key__": f"{number:04d}", "cls": number, "txt": f"sample {number}"})

    def stream() -> Any:
        return wds.WebDataset(str(tmp_path / "a.tar"), shardshuffle=False).decode().to_tuple("txt", "cls")

    part_of(tmp_path / "recorded", stream, 20)
    dataset = ShadeDataset(Recorded(stream, tmp_path / "recorded"), cache=None)
    sampler = RecordedSampler(dataset, batch_size=8)
    got = []
    for texts, labels, _ in DataLoader(dataset, batch_size=8, sampler=sampler):
        got += zip(texts, labels.tolist(), strict=True)
    assert got == [(f"sample {number}", number) for number in range(ITEMS)]
