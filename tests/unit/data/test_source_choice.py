"""torch's wrappers are looked through: the samples that they choose are read and cached as without them."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, random_split
from torchvision import transforms
from torchvision.datasets import ImageFolder

from shade import ShadeDataset, Shards
from shade.data._source.source import FileSource, ItemSource
from shade.errors import ConfigError

SIDE = 40


@pytest.fixture
def folder(tmp_path: Path) -> ImageFolder:
    for label in range(2):
        (tmp_path / str(label)).mkdir()
        for number in range(6):
            pixels = np.random.default_rng(6 * label + number).integers(0, 255, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((SIDE, SIDE)).save(tmp_path / str(label) / f"{number}.jpg")
    return ImageFolder(str(tmp_path))


def chosen(folder: ImageFolder) -> dict[str, Any]:
    first, _ = random_split(folder, [8, 4], torch.Generator().manual_seed(1))
    return {
        "random_split": first,
        "nested": Subset(Subset(folder, np.arange(11, 1, -1)), torch.tensor([3, 0, -1])),
        "joined": ConcatDataset([Subset(folder, [2, 9, 2]), folder, ImageFolder(folder.root)]),
        "a part of joined": Subset(ConcatDataset([folder, Subset(folder, [5])]), [12, 0, 12]),
    }


@pytest.mark.parametrize("name", ["random_split", "nested", "joined", "a part of joined"])
@pytest.mark.parametrize("form", ["encoded", "decoded"])
def test_files_in_wrappers_are_files(folder: ImageFolder, name: str, form: str) -> None:
    wrapped = chosen(folder)[name]
    dataset = ShadeDataset(wrapped, cache="memory://", form=form, working_set_fraction=1.0)
    for _ in range(2):
        for index, (image, target, number) in enumerate(dataset.__getitems__(range(len(wrapped)))):
            expected, label = wrapped[index]
            assert (image.tobytes(), target, number) == (expected.tobytes(), label, index)
    assert dataset.targets == [label for _, label in wrapped]
    dataset.close()


def test_a_split_caches_no_more_bytes_than_its_files_have(folder: ImageFolder) -> None:
    train, _ = random_split(folder, [8, 4])
    dataset = ShadeDataset(train, cache="memory://", working_set_fraction=1.0)
    dataset.__getitems__(range(8))
    assert isinstance(dataset.source, FileSource)
    assert dataset.cache is not None
    assert dataset.cache.residency.totals()["admitted_bytes"] <= sum(
        os.path.getsize(folder.samples[index][0]) + 512 for index in train.indices
    )
    dataset.__getitems__(range(8))
    assert dataset.cache.residency.totals()["cache_bytes"] == sum(
        os.path.getsize(folder.samples[index][0]) for index in train.indices
    )
    dataset.close()


def test_the_transform_inside_a_wrapper_runs_after_the_cache_and_may_be_assigned(folder: ImageFolder) -> None:
    folder.transform = transforms.ToTensor()
    part = Subset(folder, [7, 1])
    dataset = ShadeDataset(part, cache="memory://")
    assert torch.equal(dataset[0][0], part[0][0])
    folder.transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)])
    folder.target_transform = lambda target: target + 10
    assert torch.allclose(dataset[0][0], part[0][0])
    assert dataset[0][1] == 11
    dataset.close()


def test_sets_with_two_transforms_are_items(folder: ImageFolder) -> None:
    other = ImageFolder(folder.root, transform=transforms.CenterCrop(9))
    joined = ConcatDataset([folder, other])
    dataset = ShadeDataset(joined, cache=None)
    assert isinstance(dataset.source, ItemSource)
    assert [dataset[index][0].size for index in (0, 12)] == [(SIDE, SIDE), (9, 9)]
    alike = ConcatDataset([ImageFolder(folder.root, transforms.CenterCrop(9)), other])
    assert isinstance(ShadeDataset(alike, cache=None).source, FileSource)


def test_a_wrapper_that_does_more_than_choose_is_asked_itself(folder: ImageFolder) -> None:
    class Marked(Subset[Any]):
        def __getitem__(self, index: Any) -> Any:
            return ("mine", *super().__getitem__(index))

        def __getitems__(self, indices: list[int]) -> Any:
            return [*map(self.__getitem__, indices)]

    assert ShadeDataset(Marked(folder, [3, 4]), cache=None)[1][0] == "mine"


def test_labels_that_change_in_a_folder_are_those_of_the_next_batch(folder: ImageFolder) -> None:
    dataset = ShadeDataset(Subset(folder, [0, 11]), cache="memory://", working_set_fraction=1.0)
    assert dataset.targets == [0, 1]
    folder.samples[0] = (folder.samples[0][0], 5)
    assert [target for _, target, _ in dataset.__getitems__([0, 1])] == [5, 1]
    folder.samples = [(path, "a word") for path, _ in folder.samples]
    assert [target for _, target, _ in dataset.__getitems__([0, 1])] == ["a word"] * 2
    folder.samples = folder.samples[::-1]
    with pytest.raises(ValueError, match=r"files that the data set had.*wrap the data set again"):
        dataset.__getitems__([0, 1])
    dataset.close()


def test_shards_in_wrappers_are_read_as_shards(tmp_path: Path) -> None:
    both = []
    for number in range(2):
        with webdataset.TarWriter(str(tmp_path / f"{number}.tar")) as writer:
            for index in range(5):
                writer.write({"__key__": f"{number}{index}", "txt": f"{number} {index}", "cls": index})
        both.append(Shards(tmp_path / f"{number}.tar", ["txt", "cls"], index=tmp_path / "index"))
    joined = ConcatDataset([Subset(both[0], [4, 0]), both[1], Subset(both[0], [0])])
    dataset = ShadeDataset(joined, cache="memory://", working_set_fraction=1.0)
    assert not isinstance(dataset.source, ItemSource)
    for _ in range(2):
        found = dataset.__getitems__(range(len(joined)))
        assert found == [(*joined[index], index) for index in range(len(joined))]
    assert dataset.stats()["hits"] == len(joined)
    dataset.close()


class Table(Dataset[Any]):
    """Reads a batch in one request; some rows may be bad."""

    def __init__(self, bad: tuple[int, ...] = ()) -> None:
        self.bad, self.requests = bad, list[list[int]]()

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.requests.append(list(indices))
        if any(index in self.bad for index in indices):
            raise OSError("a bad row")
        return [(torch.full((3,), float(index)), index) for index in indices]


@pytest.mark.parametrize("cache", [None, "memory://"])
@pytest.mark.parametrize("wrap", [lambda table: table, lambda table: Subset(table, range(100))])
def test_a_batch_of_items_is_one_request(cache: str | None, wrap: Any) -> None:
    table = Table()
    plain = [*DataLoader(wrap(table), batch_size=20)]
    num_plain = len(table.requests)
    ours = [*DataLoader(ShadeDataset(wrap(table), cache=cache), batch_size=20)]
    assert len(table.requests) == 2 * num_plain == 10
    for (values, labels), (our_values, our_labels, _) in zip(plain, ours, strict=True):
        assert torch.equal(values, our_values)
        assert torch.equal(labels, our_labels)


def test_a_bad_row_of_a_request_is_replaced_alone() -> None:
    dataset = ShadeDataset(Table(bad=(5,)), cache="memory://", on_bad_sample="skip")
    assert [label for _, label, _ in dataset.__getitems__([4, 5, 7])] == [4, 6, 7]
    dataset.close()


def test_items_that_were_just_read_are_not_those_that_a_transform_changes() -> None:
    class Held(Table):
        def __init__(self) -> None:
            super().__init__()
            self.held = [torch.full((3,), float(index)) for index in range(100)]

        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [(self.held[index], index) for index in indices]

    data = Held()
    dataset = ShadeDataset(data, cache="memory://", transform=lambda value: value.mul_(2))
    assert [value.tolist() for value, *_ in dataset.__getitems__([3, 3])] == [[6.0] * 3] * 2
    assert data.held[3].tolist() == [3.0] * 3
    dataset.close()


def test_keys_that_are_no_numbers_work_without_a_cache_and_are_refused_with_one() -> None:
    class Sizes(Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, key: tuple[int, int]) -> Any:
            size, index = key
            return torch.full((size,), float(index)), index

    batches = [[(2, 0), (2, 1)], [(3, 2), (3, 3)]]
    plain = [*DataLoader(Sizes(), batch_sampler=batches)]
    ours = [*DataLoader(ShadeDataset(Sizes(), cache=None), batch_sampler=batches)]
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(plain, ours, strict=True))

    class Either(Sizes):
        def __getitem__(self, key: Any) -> Any:
            return super().__getitem__(key if isinstance(key, tuple) else (2, key))

    cached = ShadeDataset(Either(), cache="memory://")
    with pytest.raises(ValueError, match=r"got 'tuple \(2, 0\)'; pass ShadeDataset\(…, cache=None\)"):
        next(iter(DataLoader(cached, batch_sampler=batches)))
    cached.close()


def test_rows_of_a_mapped_file_are_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(40, dtype=np.float32).reshape(10, 4))

    class Rows(Dataset[Any]):
        rows = np.load(tmp_path / "x.npy", mmap_mode="c")

        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> Any:
            return self.rows[index], index

    plain = next(iter(DataLoader(Rows(), batch_size=4)))
    for cache in ("memory://", None):
        ours = next(iter(DataLoader(ShadeDataset(Rows(), cache=cache), batch_size=4)))
        assert torch.equal(ours[0], plain[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["whole", "items", "pairs"])
def test_tensordicts_are_as_without_a_cache_or_refused_by_name(kind: str) -> None:
    tensordict: Any = pytest.importorskip("tensordict")
    columns = {"x": torch.arange(120.0).view(40, 3), "nested": {"y": torch.arange(40)}}
    whole = tensordict.TensorDict(columns, batch_size=[40])
    rows = {"whole": whole, "items": [*whole], "pairs": [(row, number % 2) for number, row in enumerate(whole)]}[kind]

    def same(dataset: ShadeDataset) -> bool:
        found = [each[0] for batch in DataLoader(dataset, batch_size=8, collate_fn=list) for each in batch]
        return len(found) == 40 and bool((torch.stack(found) == whole).all())

    assert same(ShadeDataset(rows, cache=None))
    with pytest.raises(ConfigError, match=r"got 'tensordict\.\S+'; pass ShadeDataset\(…, encode=…, decode=…\)"):
        ShadeDataset(rows, cache="memory://")

    def encode(item: Any) -> bytes:
        torch.save((item[0].to_dict(), item[1]) if kind == "pairs" else item.to_dict(), buffer := io.BytesIO())
        return buffer.getvalue()

    def decode(content: bytes) -> Any:
        found = torch.load(io.BytesIO(content))
        parts = found if kind == "pairs" else (found,)
        return tensordict.TensorDict(parts[0], batch_size=[]), *parts[1:]

    dataset = ShadeDataset(rows, cache="memory://", working_set_fraction=1.0, encode=encode, decode=decode)
    assert same(dataset)
    assert same(dataset)
    dataset.close()


def test_a_dict_of_columns_is_refused_and_one_of_samples_is_read() -> None:
    with pytest.raises(ConfigError, match="such as \\['x'\\]"):
        ShadeDataset({"x": [1, 2]}, cache=None)
    assert ShadeDataset({0: 5, 1: 7}, cache=None)[1] == (7, 1)


def test_what_is_dearer_to_encode_than_to_read_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shade.data._source.source._has_said", False)
    caplog.set_level("INFO", logger="shade.data")

    def encode(item: Any) -> bytes:
        time.sleep(0.001)
        return bytes(item)

    for cache in (None, "memory://", "memory://"):
        ShadeDataset([b"a"] * 8, cache=cache, encode=encode if cache else None, decode=bytes if cache else None).close()
    assert caplog.text.count("to encode for the cache") == 1
