"""ShadeDataset: bad samples, bad arguments, probing, and nothing left behind."""

from __future__ import annotations

import gc
import os
import random
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from shade import ShadeDataset, ShadeLoader, ShadeSampler
from shade.errors import BadSampleError, ConfigError, DataError, StoreAuthError, StoreUnavailableError, UnknownNameError
from shade.store import open_store
from shade.testing import CountingDataset, FaultyStore
from tests.conftest import Place
from tests.support.data_plane import make_pictures, to_tensor

N = 30
NUMBERS = [torch.full((4,), float(index)) for index in range(N)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_pictures(tmp_path / "pictures", N)


# ── bad samples ─────────────────────────────────────────────────────────────────────────────────────────────────────


def spoil(folder: Path) -> tuple[ImageFolder, dict[str, int]]:
    """A scanned folder with a truncated file, a text and a deleted one in it."""
    wrapped = ImageFolder(str(folder))
    bad = {"truncated": 3, "text": 10, "deleted": N - 1}
    path = {kind: Path(wrapped.samples[index][0]) for kind, index in bad.items()}
    path["truncated"].write_bytes(path["truncated"].read_bytes()[:-40])
    path["text"].write_text("this is no picture")
    return wrapped, bad


@pytest.mark.multiprocess
@pytest.mark.parametrize("cache", [None, "local://"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_sample_stops_with_its_path(folder: Path, cache: str | None, workers: int) -> None:
    wrapped, bad = spoil(folder)
    dataset = ShadeDataset(wrapped, cache=cache, transform=to_tensor)
    os.unlink(wrapped.samples[bad["deleted"]][0])
    try:
        for index in bad.values():
            iterator = iter(DataLoader(dataset, sampler=[index], num_workers=workers))
            with pytest.raises(BadSampleError) as raised:
                next(iterator)
            assert next(iterator, None) is None  # ends the workers in good order
            assert wrapped.samples[index][0] in str(raised.value)
            assert "on_bad_sample='skip'" in str(raised.value)
    finally:
        dataset.close()


@pytest.mark.multiprocess
def test_a_bad_sample_is_replaced_by_the_next_good_one_everywhere(folder: Path) -> None:
    wrapped, bad = spoil(folder)
    good = ImageFolder(str(folder))
    streams = []
    for cache, workers in ((None, 0), ("local://", 0), ("local://", 2)):
        dataset = ShadeDataset(
            wrapped, cache=cache, working_set_fraction=1.0, transform=to_tensor, on_bad_sample="skip"
        )
        target = Path(wrapped.samples[bad["deleted"]][0])
        content = target.read_bytes()
        target.unlink()
        stream = []
        for _ in range(2):
            for pixels, target_B, index_B in DataLoader(dataset, batch_size=7, num_workers=workers):
                rows = zip(pixels.unbind(), target_B.tolist(), index_B.tolist(), strict=True)
                stream += [(index, target_, row.numpy().tobytes()) for row, target_, index in rows]
        target.write_bytes(content)
        os.utime(target, ns=(0, 0))
        streams.append(stream)
        if dataset.cache is not None:
            assert dataset.cache.residency.totals()["bad_samples"] == 2 * len(bad)
        dataset.close()
    assert streams[0] == streams[1] == streams[2]
    by_index = {index: (target, pixels) for index, target, pixels in streams[0]}
    assert sorted(by_index) == list(range(N))
    for index in bad.values():
        replacement = (index + 1) % N
        expected = to_tensor(good[replacement][0]).numpy().tobytes()
        assert by_index[index] == (wrapped.samples[replacement][1], expected)


def test_a_file_that_is_gone_before_the_start_is_a_bad_sample(folder: Path) -> None:
    wrapped = ImageFolder(str(folder))
    gone = wrapped.samples[3][0]
    os.unlink(gone)
    with pytest.raises(DataError, match=re.escape(gone)):
        ShadeDataset(wrapped, cache="memory://")
    dataset = ShadeDataset(wrapped, cache="memory://", working_set_fraction=1.0, on_bad_sample="skip")
    pictures = [dataset[index][0].tobytes() for index in range(N)]
    good = [wrapped[index][0].tobytes() if index != 3 else wrapped[4][0].tobytes() for index in range(N)]
    assert pictures == good
    dataset.close()
    for path, _ in wrapped.samples:
        Path(path).unlink(missing_ok=True)
    with pytest.raises(DataError, match="at least one file"):
        ShadeDataset(wrapped, cache="memory://", on_bad_sample="skip")


@pytest.mark.parametrize(
    "target_of",
    [
        lambda index: index + 0.75,
        lambda index: bool(index % 2),
        lambda index: f"class{index}",
        lambda index: None,
        lambda index: (1, 0, index),
        lambda index: torch.tensor(index * 0.5),
        lambda index: np.float32(index / 3),
        lambda index: 2**63 + index,
    ],
)
def test_targets_come_back_as_they_are(folder: Path, target_of: Callable[[int], Any]) -> None:
    wrapped = ImageFolder(str(folder))
    wrapped.samples = [(path, target_of(index)) for index, (path, _) in enumerate(wrapped.samples)]
    dataset = ShadeDataset(wrapped, cache="memory://")
    for index in range(N):
        target = dataset[index][1]
        assert type(target) is type(wrapped[index][1])
        assert target == wrapped[index][1]
    dataset.close()


def test_fractional_targets_are_collated_as_the_plain_loader_does(folder: Path) -> None:
    wrapped = ImageFolder(str(folder), transform=to_tensor)
    wrapped.samples = [(path, index + 0.75) for index, (path, _) in enumerate(wrapped.samples)]
    dataset = ShadeDataset(wrapped, cache="memory://")
    plain = next(iter(DataLoader(wrapped, batch_size=4)))[1]
    found = next(iter(ShadeLoader(dataset, batch_size=4, num_workers=0)))[1]
    assert found.dtype == plain.dtype
    assert torch.equal(found, plain)
    dataset.close()


def test_a_folder_with_a_length_of_its_own_keeps_it(folder: Path) -> None:
    class FirstHalf(ImageFolder):
        def __len__(self) -> int:
            return N // 2

    dataset = ShadeDataset(FirstHalf(str(folder)), cache="memory://")
    assert len(dataset) == N // 2
    dataset.close()


def test_a_transform_may_be_assigned_later(folder: Path) -> None:
    wrapped = ImageFolder(str(folder))
    dataset = ShadeDataset(wrapped, cache="memory://")
    assert dataset.transform is None
    loader = ShadeLoader(dataset, batch_size=N, num_workers=0)
    dataset.transform = to_tensor
    assert torch.equal(dataset[3][0], to_tensor(wrapped[3][0]))
    assert torch.equal(next(iter(loader))[0][3], to_tensor(wrapped[3][0]))
    assert dataset.classes == wrapped.classes  # type: ignore[attr-defined]
    assert dataset.class_to_idx == wrapped.class_to_idx  # type: ignore[attr-defined]
    assert dataset.targets == wrapped.targets
    assert not hasattr(ShadeDataset(NUMBERS, cache=None), "targets")
    dataset.close()


@pytest.mark.multiprocess
@pytest.mark.parametrize("view", [DataLoader, ShadeLoader])
@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_assigned_between_epochs_counts_from_the_next_one(folder: Path, view: Any, workers: int) -> None:
    fused = transforms.Compose([transforms.Resize((8, 8)), transforms.RandomHorizontalFlip(0.0), transforms.ToTensor()])
    wrapped = ImageFolder(str(folder), transform=fused)
    dataset = ShadeDataset(wrapped, cache="local://")
    loader = view(dataset, batch_size=N, num_workers=workers)

    def same() -> bool:
        found = next(iter(loader))[0]
        return torch.equal(found, torch.stack([wrapped[index][0] for index in range(N)]))

    assert same()
    fused.transforms[0].size = (5, 5)
    assert same()
    fused.transforms[1].p = 1.0
    assert same()
    wrapped.transform = to_tensor
    assert same()
    wrapped.transform, wrapped.target_transform = fused, lambda target: target + 5
    assert same()
    assert next(iter(loader))[1].tolist() == [wrapped[index][1] for index in range(N)]
    dataset.close()


def test_a_transform_assigned_where_it_would_be_cached_is_refused() -> None:
    class Pairs(Labelled):
        transform: Any = None

        def __getitem__(self, index: int) -> Any:
            label = super().__getitem__(index)
            return label if self.transform is None else self.transform(label)

    for wrapped in (Pairs(range(N)), Subset(Pairs(range(N)), range(N))):
        inner: Any = getattr(wrapped, "dataset", wrapped)
        dataset, uncached = ShadeDataset(wrapped, cache="memory://"), ShadeDataset(wrapped, cache=None)
        inner.transform = str
        assert uncached[3] == (str(Pairs(range(N))[3]), 3)
        with pytest.raises(ConfigError, match=r"assign it to the ShadeDataset"):
            dataset[3]
        inner.transform = None
        dataset.transform = str
        assert dataset[3] == (str(wrapped[3]), 3)
        dataset.close()


def test_wrapping_draws_no_random_numbers_of_the_script() -> None:
    class Noise(list[int]):
        def __getitem__(self, index: Any) -> Any:
            return torch.rand(2), random.random(), np.random.rand()

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    ShadeDataset(Noise(range(N)), cache=None)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), np.random.get_state()[2]) == before[1:]


def test_a_list_of_parts_is_refused_and_a_tuple_is_taken() -> None:
    pairs = [[image, 3] for image in NUMBERS]
    with pytest.raises(ConfigError, match=r"as a tuple.*got 'a list of Tensor, int'"):
        ShadeDataset(pairs, cache=None)
    images, targets, indices = next(iter(DataLoader(ShadeDataset([*map(tuple, pairs)], cache=None), batch_size=4)))
    assert (images.shape, targets.tolist(), indices.tolist()) == ((4, 4), [3] * 4, [0, 1, 2, 3])
    (image, target), index = ShadeDataset([(pair,) for pair in pairs], cache="memory://")[5]
    assert (image.tolist(), target, index) == (NUMBERS[5].tolist(), 3, 5)
    assert ShadeDataset([["a", "b"], [], [1, None]], cache="memory://")[2] == ([1, None], 2)


def test_replacements_are_counted_where_they_are_read() -> None:
    origin = CountingDataset(NUMBERS, bad=[4, 5])
    dataset = ShadeDataset(origin, cache="memory://", working_set_fraction=1.0, on_bad_sample="skip")
    for _ in range(2):
        values = [int(sample[0]) for sample, _ in dataset.__getitems__(list(range(N)))]
        assert values == [*range(4), 6, 6, *range(6, N)]
    totals = dataset.cache.residency.totals()
    assert totals["origin_reads"] == dataset.source.num_probes + sum(index not in (4, 5) for index in origin.reads)
    assert totals["bad_samples"] == 4
    dataset.close()


def test_when_all_are_bad_it_says_so() -> None:
    with pytest.raises(DataError, match="broken on purpose"):
        ShadeDataset(CountingDataset(NUMBERS, bad=range(N)), cache=None)
    dataset = ShadeDataset(CountingDataset([*NUMBERS] * 40, bad=range(2, 600)), cache=None, on_bad_sample="skip")
    with pytest.raises(BadSampleError, match="got none"):
        _ = dataset[100]


def test_a_bad_probe_is_no_reason_to_refuse_the_data_set() -> None:
    dataset = ShadeDataset(CountingDataset(NUMBERS, bad=[0]), cache=None, on_bad_sample="skip")
    assert int(dataset[0][0][0]) == 1


# ── the ledger ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_read_is_in_the_ledger_probes_included() -> None:
    origin = CountingDataset(NUMBERS)
    dataset = ShadeDataset(origin, cache="memory://")
    sampler = ShadeSampler(dataset, batch_size=5, mode="uniform")
    for epoch in range(4):
        sampler.set_epoch(epoch)
        list(DataLoader(dataset, batch_size=5, sampler=sampler))
    totals = dataset.cache.residency.totals()
    # All samples twice, in a process of their own.
    assert dataset.source.num_probes == 2 * N
    assert totals["origin_reads"] == 2 * N + len(origin.reads)
    payload = len(dataset.source.read_many([0], lambda reads, num_bytes: None)[0])
    assert totals["origin_bytes"] == totals["origin_reads"] * payload
    assert totals["hits"] == 3 * N // 5
    sampler.close()
    dataset.close()


# ── arguments ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"working_set_fraction": 0.0}, ConfigError),
        ({"working_set_fraction": 1.01}, ConfigError),
        ({"working_set_fraction": float("nan")}, ConfigError),
        ({"on_bad_sample": "ignore"}, ConfigError),
        ({"policy": "lur"}, UnknownNameError),
        ({"cache": "mongodb://host"}, UnknownNameError),
        ({"cache": "redis"}, ConfigError),
        ({"encode": lambda item: 1 / 0}, ConfigError),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", str(value)),
)
def test_impossible_arguments_are_refused(options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        ShadeDataset(TensorDataset(torch.zeros(8)), **({"cache": None} | options))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


class SizedStream(Stream):
    def __len__(self) -> int:
        return 5


class StreamWithSamples(SizedStream):
    """As those of MosaicML and LitData."""

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"number": range(5)[index]}


class Lengthless(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("wrapped", "cure"),
    [
        (Stream(), r"Recorded\(stream, disk="),
        (SizedStream(), r"Recorded\(stream, disk="),
        (iter(range(3)), r"Recorded\(stream, disk="),
        (Lengthless(), "__len__"),
        ("/tmp", "ImageFolder"),
        (Path("/tmp"), "ImageFolder"),
        (None, "__len__"),
        (5, "__len__"),
        (DataLoader([1, 2]), r"loader\.dataset"),
        (TensorDataset, r"TensorDataset\("),
        ({"train": [1, 2], "test": [3]}, r"\['train'\]"),
    ],
)
def test_what_is_no_map_style_data_set_is_refused(wrapped: Any, cure: str) -> None:
    with pytest.raises(ConfigError, match=cure):
        ShadeDataset(wrapped, cache="memory://")


@pytest.mark.parametrize(
    "wrapped", [[1, 2, 3], (1, 2), np.arange(4), torch.arange(4), {0: "a", 1: "b"}, StreamWithSamples()]
)
def test_any_sequence_is_a_data_set(wrapped: Any) -> None:
    dataset = ShadeDataset(wrapped, cache="memory://")
    assert dataset[1] == (wrapped[1], 1)
    dataset.close()


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(DataError):
        ShadeDataset([], cache=None)


def test_an_item_that_cannot_be_encoded_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="encode="):
        ShadeDataset([object()] * 5, cache="memory://")
    items = [object() for _ in range(5)]
    assert ShadeDataset(items, cache=None)[3] == (items[3], 3)


class Boxes:
    """Pictures with 0 to 3 objects each; a column of a single row is contiguous with a stride of 5."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        rows = torch.arange(5.0 * (index % 4)).view(index % 4, 5) + index
        return {"boxes": rows[:, :4], "labels": rows[:, 4], "id": index}


@pytest.mark.parametrize("on_bad_sample", ["stop", "skip"])
def test_a_sample_with_one_object_is_no_bad_sample(on_bad_sample: str) -> None:
    dataset = ShadeDataset(Boxes(), cache="memory://", working_set_fraction=1.0, on_bad_sample=on_bad_sample)
    for _ in range(2):
        for index in range(N):
            item, _ = dataset[index]
            assert item["id"] == index
            assert torch.equal(item["labels"], Boxes()[index]["labels"])
    dataset.close()


def test_an_encoder_that_fails_later_is_not_skipped() -> None:
    """31 of 100 probed items can be encoded; the one that cannot must not be replaced by its neighbour."""
    items = [torch.tensor(index) if index != 50 else {1, 2} for index in range(100)]
    dataset = ShadeDataset(items, cache="memory://", on_bad_sample="skip")
    with pytest.raises(ConfigError, match=r"index 50 of list.*got 'set'.*encode="):
        dataset[50]
    dataset.close()


def test_an_index_outside_is_an_index_error() -> None:
    dataset = ShadeDataset(TensorDataset(torch.arange(8)), cache=None)
    assert int(dataset[-1][0]) == 7
    for index in (8, -9):
        with pytest.raises(IndexError):
            _ = dataset[index]


def quickly(action: Callable[[], Any], expected: type[Exception]) -> str:
    begun = time.monotonic()
    with pytest.raises(expected) as raised:
        action()
    assert time.monotonic() - begun < 20 * 0.25, "some timeouts, not a wait"
    return str(raised.value)


@pytest.mark.multiprocess
@pytest.mark.parametrize("scheme", ["redis", "unix", "rediss", "redis+cluster"])
def test_a_wrong_password_raises_at_construction(get_place: Callable[[str], Place], scheme: str) -> None:
    place = get_place(scheme)
    message = quickly(
        lambda: ShadeDataset(TensorDataset(torch.zeros(8)), cache=place.wrong_password_url), StoreAuthError
    )
    assert "wr0ng" not in message


def test_a_named_server_that_does_not_answer_raises_at_construction(tmp_path: Path) -> None:
    for url in ("redis://127.0.0.1:1", f"unix://{quote(str(tmp_path))}/none.sock", "redis+cluster://127.0.0.1:1"):
        quickly(lambda url=url: ShadeDataset(TensorDataset(torch.zeros(8)), cache=url), StoreUnavailableError)


@pytest.mark.multiprocess
def test_a_failed_construction_leaves_no_server_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    before = child_processes()
    monkeypatch.setattr("shade.data._dataset.dataset.SampleCache", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ShadeDataset(TensorDataset(torch.zeros(8)), cache="local://")
    assert child_processes() <= before


def test_transforms_that_would_be_frozen_warn(folder: Path) -> None:
    class Mirrored(Subset[Any]):
        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(len(self) - 1 - index)

        def __getitems__(self, indices: list[int]) -> Any:
            return [*map(self.__getitem__, indices)]

    with_transform = ImageFolder(str(folder), transform=lambda image: np.asarray(image))
    with pytest.warns(UserWarning, match="Mirrored applies its own transform"):
        ShadeDataset(Mirrored(with_transform, [1, 2]), cache="memory://")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ShadeDataset(Subset(with_transform, [1, 2]), cache="memory://")
        ShadeDataset(Mirrored(with_transform, [1, 2]), cache=None)
        ShadeDataset(Subset(with_transform, [1, 2]), cache=None)
        ShadeDataset(with_transform, cache=None)
        ShadeDataset(Subset(ImageFolder(str(folder)), [1, 2]), cache=None)


def test_other_data_never_shares_a_namespace(folder: Path) -> None:
    def namespace() -> str:
        return ShadeDataset(ImageFolder(str(folder)), cache=None).source.fingerprint

    first = namespace()
    assert namespace() == first
    victim = next(folder.rglob("*.bmp"))
    os.utime(victim, ns=(1, 1))
    touched = namespace()
    victim.rename(victim.with_name("zzz.bmp"))
    assert len({first, touched, namespace()}) == 3
    one, other = (ShadeDataset(TensorDataset(torch.full((8,), value)), cache=None) for value in (1.0, 2.0))
    assert one.source.fingerprint != other.source.fingerprint


class Labelled:
    """A data set of one's own, with labels in some kind of container."""

    def __init__(self, labels: Any) -> None:
        self.labels = labels

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return int(self.labels[index])


class Fingerprinted:
    """Names its content, as data sets of Hugging Face do."""

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return index


def with_label(kind: str, label: int) -> Any:
    """A data set of which one item that no probe reads has the label."""
    labels = [index % 10 for index in range(1000)]
    labels[5] = label
    makers: dict[str, Callable[[], Any]] = {
        "tensor": lambda: TensorDataset(torch.tensor(labels)),
        "view": lambda: TensorDataset(torch.tensor([labels, labels]).t()[:, 1]),
        "list": lambda: Labelled(labels),
        "array": lambda: Labelled(np.array(labels)),
        "objects": lambda: Labelled(np.array([*labels[:-1], torch.tensor(3)], dtype=object)),
        "dict": lambda: Labelled(dict(enumerate(labels))),
        "tensors": lambda: Labelled([torch.tensor(label) for label in labels]),
        "wrapped": lambda: Subset(ConcatDataset([Labelled(labels[:500] * 2), Labelled(labels)]), range(1000)),
        "fingerprint": lambda: Fingerprinted(str(label)),
        "wrapped fingerprint": lambda: Subset(Fingerprinted(str(label)), range(1000)),
    }
    return makers[kind]()


def namespace_of(dataset: Any, **options: Any) -> str:
    opened = ShadeDataset(dataset, cache=None, **options)
    opened.close()
    return opened.source.fingerprint


@pytest.mark.parametrize(
    "kind",
    ["tensor", "view", "list", "array", "objects", "dict", "tensors", "wrapped", "fingerprint", "wrapped fingerprint"],
)
def test_a_corrected_label_changes_the_namespace(kind: str) -> None:
    assert namespace_of(with_label(kind, 5)) == namespace_of(with_label(kind, 5))
    assert namespace_of(with_label(kind, 5)) != namespace_of(with_label(kind, 77))


@pytest.mark.parametrize("kind", ["subset", "own getitem", "paths", "names", "one file", "memmap"])
def test_a_replaced_file_changes_the_namespace(folder: Path, kind: str) -> None:
    victim = sorted(folder.rglob("*.bmp"))[7]

    class Own(ImageFolder):
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> Any:
            return 1

    class Files(Labelled):
        def __init__(self, **attributes: Any) -> None:
            vars(self).update(attributes)

        def __getitem__(self, index: int) -> Any:
            return index

    makers: dict[str, Callable[[], Any]] = {
        "subset": lambda: Subset(ImageFolder(str(folder)), list(range(20)) * 2),
        "own getitem": lambda: Own(str(folder)),
        "paths": lambda: Files(files=sorted(folder.rglob("*.bmp"))),
        "names": lambda: Files(root=victim.parent, rows=[(1, path.name) for path in sorted(victim.parent.iterdir())]),
        "one file": lambda: Files(file=str(victim)),
        "memmap": lambda: Files(pixels=np.memmap(victim, mode="r")[2:]),
    }
    before = namespace_of(makers[kind]())
    assert namespace_of(makers[kind]()) == before
    os.utime(victim, ns=(1, 1))
    assert namespace_of(makers[kind]()) != before


def test_a_version_is_the_users_word_for_the_content() -> None:
    first = namespace_of(with_label("list", 5), version="1")
    assert namespace_of(with_label("list", 77), version="1") == first
    assert namespace_of(with_label("list", 5), version="2") != first


def test_a_rank_is_no_content() -> None:
    one, other = Labelled(list(range(1000))), Labelled(list(range(1000)))
    one.rank, other.rank = 0, 1  # type: ignore[attr-defined]
    assert namespace_of(one) == namespace_of(other)


class Generated:
    """Makes its items; nothing outside them says what they are."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return index if index % 37 == 0 else index + self.offset


@pytest.mark.parametrize("loader", [DataLoader, ShadeLoader])
def test_a_hit_that_differs_from_the_origin_is_refused(monkeypatch: pytest.MonkeyPatch, loader: Any) -> None:
    monkeypatch.setattr("shade.data._source.source._PROBES", 2)  # 0 and 999, both of which stay as they were
    store = open_store("memory://")
    for offset in (0, 0, 5):
        dataset = ShadeDataset(Generated(offset), cache=store, working_set_fraction=1.0)
        batches = iter(loader(dataset, batch_size=100, num_workers=0))
        if offset:
            with pytest.raises(DataError, match="version="):
                list(batches)
        else:
            assert sum(len(batch[0]) for batch in batches) == 1000
    cured = ShadeDataset(Generated(5), cache=store, working_set_fraction=1.0, version="offset 5")
    assert [cured[index][0] for index in (1, 2)] == [6, 7]
    store.close()


def test_few_hits_are_compared_with_the_origin() -> None:
    wrapped = CountingDataset([torch.full((4,), float(index)) for index in range(100)])
    dataset = ShadeDataset(wrapped, cache="memory://", working_set_fraction=1.0)
    for _ in range(1 + 4096 // 100):
        for start in range(0, 100, 50):
            dataset.__getitems__(range(start, start + 50))
    assert dataset.cache is not None
    totals = dataset.cache.residency.totals()
    assert totals["hits"] == 4000
    # Misses, hits 1 to 1024 by powers of two, hits 2048 and 3072; before, probes in a process of their own.
    assert len(wrapped.reads) == 100 + 11 + 2
    assert totals["origin_reads"] == 32 + 16 + len(wrapped.reads)
    dataset.close()


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, range(40))], ids=["itself", "subset"])
def test_a_format_set_after_wrapping_is_refused_and_wrapping_again_takes_it(wrap: Any) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"a": list(range(40))})
    data = ShadeDataset(wrap(table), cache="memory://")
    assert type(data[3][0]["a"]) is int
    table.set_format("torch")
    with pytest.raises(ConfigError, match=r"keep the format.*ShadeDataset\(data, cache=…\)"):
        data[3]
    data.close()
    again = ShadeDataset(wrap(table), cache="memory://")
    assert isinstance(again[3][0]["a"], torch.Tensor)
    again.close()
    bare = ShadeDataset(wrap(table), cache=None)
    table.reset_format()
    assert type(bare[3][0]["a"]) is int, "without a cache there is nothing to be stale"
    bare.close()


@pytest.mark.parametrize("attribute", ["transform", "augment"])
def test_random_items_warn(attribute: str) -> None:
    class Crops(Labelled):
        def __init__(self) -> None:
            setattr(self, attribute, lambda: int(torch.randint(1000, ())))

        def __getitem__(self, index: int) -> int:
            return 1000 * index + int(getattr(self, attribute)())

    with pytest.warns(UserWarning, match=r"same.*transform="):
        dataset = ShadeDataset(Crops(), cache="memory://", working_set_fraction=1.0)
    for _ in range(3):
        assert [sample // 1000 for sample, _ in dataset.__getitems__(range(100))] == list(range(100))
    dataset.close()


def test_a_moved_data_set_keeps_its_namespace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ShadeDataset(ImageFolder(str(folder)), cache=None).source
    moved = folder.rename(folder.with_name("elsewhere"))
    monkeypatch.chdir(moved.parent)
    second = ShadeDataset(ImageFolder("./elsewhere"), cache=None).source
    assert second.fingerprint == first.fingerprint
    assert all(os.path.exists(second.name_of(index)) for index in range(N))


# ── nothing left behind ─────────────────────────────────────────────────────────────────────────────────────────────


def child_processes() -> set[int]:
    """Process ids of this process's descendants, those that nobody has waited for among them."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def possessions() -> tuple[int, int, set[int], set[str]]:
    """Open files, threads, child processes, and segments of shared memory."""
    gc.collect()
    segments = [entry.name for entry in os.scandir("/dev/shm") if entry.is_file()]
    children = child_processes()
    ours = {os.getpid(), *children}
    shared = {name for name in segments if name.startswith(("torch", "shade", "psm")) and not is_of_another(name, ours)}
    return psutil.Process().num_fds(), threading.active_count(), children, shared


def is_of_another(segment: str, ours: set[int]) -> bool:
    """Whether a test that runs beside this one still uses a segment: torch names its process."""
    kind, _, rest = segment.partition("_")
    process = rest.partition("_")[0]
    return kind == "torch" and process.isdigit() and int(process) not in ours and psutil.pid_exists(int(process))


def live_once(folder: Path, workers: int, persistent: bool) -> None:
    dataset = ShadeDataset(ImageFolder(str(folder)), cache="local://", transform=to_tensor)
    dataset.source._origin._mean_seconds = 1.0  # type: ignore[attr-defined] - reads in threads
    sampler = ShadeSampler(dataset, batch_size=5, keep=0.7)
    loader = DataLoader(dataset, batch_size=5, sampler=sampler, num_workers=workers, persistent_workers=persistent)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for _, _, indices in loader:
            sampler.weights(indices)
            sampler.report(indices, torch.ones(len(indices)))
    del loader
    sampler.close()
    sampler.close()
    dataset.close()
    dataset.close()


@pytest.mark.multiprocess
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_nothing_is_left_behind(folder: Path, workers: int, persistent: bool) -> None:
    live_once(folder, workers, persistent)
    before_files, before_threads, before_children, before_shared = possessions()
    for _ in range(3):
        live_once(folder, workers, persistent)
    files, threads, children, shared = possessions()
    assert threads == before_threads
    assert shared <= before_shared  # what an earlier test left, or one beside this, may go in between
    assert children <= before_children
    assert files <= before_files


def test_a_store_handed_in_may_fail_on_command() -> None:
    origin = CountingDataset(NUMBERS)
    with open_store("memory://") as inner:
        store = FaultyStore(inner).fail_from("get_many", 1, StoreUnavailableError("gone"))
        dataset = ShadeDataset(origin, cache=store, working_set_fraction=1.0)
        for _ in range(3):
            assert [int(s[0]) for s, _ in dataset.__getitems__(list(range(N)))] == list(range(N))
        assert store.num_faults["get_many"] == 1
        assert dataset.cache.residency.totals()["store_errors"] == 1
