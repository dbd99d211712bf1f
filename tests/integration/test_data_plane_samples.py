"""The samples that training sees are those of the wrapped data set, whoever fetches them and from wherever."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torchvision.datasets import ImageFolder

from shade import ShadeDataset
from tests.support.data_plane import CountingOrigin, Job, Outcome, make_pictures, make_zoo, train

URL = "local://"
pytestmark = [pytest.mark.multiprocess, pytest.mark.filterwarnings("ignore:This DataLoader will create")]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_zoo(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("pictures"), 120, mixed=True)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, (tuple, list)):
        return type(one) is type(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other)) and one.dtype == other.dtype
    if hasattr(one, "tobytes"):
        return bool(one.tobytes() == other.tobytes()) and getattr(one, "mode", None) == getattr(other, "mode", None)
    return bool(one == other)


def check_all(dataset: ShadeDataset, wrapped: Any, rounds: int = 3) -> None:
    """Every sample: cold, then warm, in batches and alone."""
    for attempt in range(rounds):
        batch = dataset.__getitems__(list(range(len(wrapped))))
        for index, (*item, found_index) in enumerate(batch):
            expected = wrapped[index]
            expected = list(expected) if isinstance(expected, tuple) else [expected]
            assert found_index == index
            assert same(item, expected), f"round {attempt}, sample {index}"
    assert same(dataset[1][0], batch[1][0])


def test_every_kind_of_file_decodes_as_torchvision_does(zoo: Path) -> None:
    wrapped = ImageFolder(str(zoo))
    dataset = ShadeDataset(wrapped, cache=URL, working_set_fraction=1.0)
    try:
        check_all(dataset, wrapped)
        totals = dataset.cache.residency.totals()
        assert totals["misses"] == totals["origin_reads"] == len(wrapped)
        assert totals["hits"] == 2 * len(wrapped) + 1
    finally:
        dataset.close()


def test_the_wrapped_transforms_run_after_the_cache(zoo: Path) -> None:
    calls = []

    def transform(image: Any) -> Any:
        calls.append(image.size)
        return np.asarray(image)

    wrapped = ImageFolder(str(zoo), transform=transform, target_transform=lambda target: -target)
    plain = ImageFolder(str(zoo))
    dataset = ShadeDataset(wrapped, cache=URL, working_set_fraction=1.0, transform=lambda array: array[::-1].copy())
    try:
        for _ in range(2):
            for index, (array, target, _) in enumerate(dataset.__getitems__(list(range(len(plain))))):
                assert np.array_equal(array, np.asarray(plain[index][0])[::-1])
                assert target == -plain[index][1]
        assert len(calls) == 2 * len(plain)
    finally:
        dataset.close()


class Annotated(ImageFolder):
    """A folder that returns more than pictures: what users derive."""

    def __getitem__(self, index: int) -> Any:
        image, target = super().__getitem__(index)
        return {"image": image, "name": f"sample {index}", "target": target, "box": np.array([index, 2.5])}


class Texts:
    """Neither tuples nor pictures."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> str:
        return "wörd " * index


class Records:
    """Items that only the user can encode."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return frozenset({index, index + 1}), index % 3


def encode_record(item: Any) -> bytes:
    return struct.pack("<qqq", *sorted(item[0]), item[1])


def decode_record(payload: Any) -> Any:
    low, high, target = struct.unpack("<qqq", payload)
    return frozenset({low, high}), target


def test_a_folder_with_a_getitem_of_its_own_keeps_it(zoo: Path) -> None:
    wrapped = Annotated(str(zoo))
    dataset = ShadeDataset(wrapped, cache=URL, working_set_fraction=1.0)
    try:
        check_all(dataset, wrapped)
    finally:
        dataset.close()


@pytest.mark.parametrize("kind", ["tensors", "texts"])
def test_items_through_the_codec(kind: str) -> None:
    numbers = torch.arange(600, dtype=torch.float64).reshape(60, 10)
    wrapped: Any = TensorDataset(numbers, torch.arange(60)) if kind == "tensors" else Texts()
    dataset = ShadeDataset(wrapped, cache=URL, working_set_fraction=1.0)
    try:
        check_all(dataset, wrapped)
        assert dataset.cache.residency.totals()["hits"] > 0
    finally:
        dataset.close()


def test_items_through_the_users_own_codec() -> None:
    wrapped = Records()
    dataset = ShadeDataset(wrapped, cache=URL, working_set_fraction=1.0, encode=encode_record, decode=decode_record)
    try:
        check_all(dataset, wrapped)
        assert dataset.cache.residency.totals()["hits"] >= 2 * len(wrapped)
    finally:
        dataset.close()


def test_files_through_the_users_own_decoder(tmp_path: Path) -> None:
    for number in range(12):
        folder = tmp_path / f"c{number % 2}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.txt").write_text(f"text {number}")
    wrapped = ImageFolder.__mro__[1](str(tmp_path), lambda path: Path(path).read_text(), extensions=(".txt",))
    dataset = ShadeDataset(wrapped, cache=URL, working_set_fraction=1.0, decode=lambda payload: bytes(payload).decode())
    try:
        check_all(dataset, wrapped)
        totals = dataset.cache.residency.totals()
        assert totals["origin_bytes"] == sum(path.stat().st_size for path in tmp_path.rglob("*.txt"))
    finally:
        dataset.close()


# ── one stream, whoever fetches ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def reference(pictures: Path) -> Outcome:
    """No cache, no workers."""
    return train(Job(str(pictures), None))


@pytest.mark.parametrize(
    "setting",
    [
        {"workers": 0},
        {"workers": 1, "context": "fork"},
        {"workers": 4, "context": "fork"},
        {"workers": 2, "context": "fork", "persistent": True},
        {"workers": 1, "context": "spawn", "persistent": True},
        pytest.param({"workers": 1, "context": "forkserver", "persistent": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_all_loaders_give_the_same_stream(
    pictures: Path, reference: Outcome, setting: dict[str, Any], tmp_path: Path
) -> None:
    log = tmp_path / "reads"
    job = replace(Job(str(pictures), URL), log=str(log), **setting)
    outcome = train(job)
    assert outcome.steps == reference.steps
    assert outcome.pixels == reference.pixels
    reads, num_bytes = CountingOrigin.total(log)
    assert (reads, num_bytes) == (outcome.totals["origin_reads"], outcome.totals["origin_bytes"])
    assert outcome.totals["hits"] > 0
    assert outcome.totals["samples"] == sum(len(step) - 1 for step in outcome.steps)


def test_a_memory_store_is_not_shared_with_workers_and_says_so() -> None:
    dataset = ShadeDataset(TensorDataset(torch.zeros(1, 2)), cache="memory://")
    with pytest.raises(ValueError, match="num_workers=0"):
        list(DataLoader(dataset, num_workers=1))
    dataset.close()


def test_a_loader_without_our_sampler_profits_too(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shade.cache.breaker.SLOW_SECONDS", 60.0)  # a busy machine is no reason to close the cache
    wrapped = ImageFolder(str(pictures))
    dataset = ShadeDataset(wrapped, cache=URL, working_set_fraction=0.5)
    dataset.source._origin = CountingOrigin(str(tmp_path / "reads"))  # type: ignore[attr-defined]
    loader = DataLoader(dataset, batch_size=8, num_workers=2, collate_fn=list)
    for _ in range(3):
        assert [index for batch in loader for *_, index in batch] == list(range(len(wrapped)))
    totals = dataset.cache.residency.totals()
    assert totals["hits"] > 0.8 * 2 * 0.5 * len(wrapped)
    assert CountingOrigin.total(tmp_path / "reads") == (totals["origin_reads"], totals["origin_bytes"])
    del loader
    dataset.close()


def test_the_access_log_agrees_with_the_ledger(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHADE_ACCESS_LOG", str(tmp_path / "train.log"))
    outcome = train(Job(str(pictures), URL, workers=2))
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert sum("hitting" in line for line in lines) == outcome.totals["hits"] > 0
    assert sum("miss" in line for line in lines) == outcome.totals["misses"]
    assert sorted(int(line.split()[1]) for line in lines) == sorted(i for step in outcome.steps for i in step[1:])
