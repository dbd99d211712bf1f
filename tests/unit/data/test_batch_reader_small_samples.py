"""Small samples: what is made a batch at a time is what is made one by one, to the last bit."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder

from shade import ShadeDataset, ShadeLoader
from shade.data._dataset.batch_reader import CollatedBatch
from shade.data._decode.jpeg import size_of
from shade.data._source import item_codec, item_columns
from shade.data._transforms import fused
from shade.data._transforms.kernels import jpeg_sizes
from shade.data._transforms.recognise import TransformView, recognise
from shade.errors import BadSampleError


def view_of(*steps: Any) -> TransformView:
    view = recognise([v1.Compose([*steps, v1.ToTensor()])])
    assert view is not None
    return view


def encoded_jpeg(generator: np.random.Generator, height: int, width: int, **options: Any) -> bytes:
    file = io.BytesIO()
    pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(options.pop("mode", "RGB")).save(file, "JPEG", **options)
    return file.getvalue()


def same(one: Any, other: Any) -> bool:
    """Whether two batches are equal: types, keys, dtypes and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        is_alike = one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()
        return is_alike and item_codec.element_bytes(one).tobytes() == item_codec.element_bytes(other).tobytes()
    return bool(one == other)


# ── draws ───────────────────────────────────────────────────────────────────────────────────────────────────────────

VIEWS = {
    "random crop": (v1.RandomResizedCrop(32),),
    "random crop, flip": (v1.RandomResizedCrop((24, 32)), v1.RandomHorizontalFlip(0.3)),
    "a crop that seldom fits": (v1.RandomResizedCrop(8, (0.9, 1.0), (1.4, 2.5)), v1.RandomHorizontalFlip()),
    "centre, flip": (v1.Resize(40), v1.CenterCrop(32), v1.RandomHorizontalFlip(0.1)),
    "centre": (v1.Resize((40, 36)),),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("drawn_before", [0, 1, 623, 624, 1000])
def test_a_batch_of_draws_is_the_draws_one_by_one(name: str, drawn_before: int) -> None:
    view = view_of(*VIEWS[name])
    sizes = np.random.default_rng(drawn_before).integers(1, 120, (500, 2))
    one, other = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    for generator in (one, other):
        torch.rand(drawn_before, generator=generator)
    expected = [view.draw(height, width, one).numbers for height, width in sizes.tolist()]
    found = np.concatenate([view.draw_many(part, other) for part in np.array_split(sizes, 7)])
    assert np.array_equal(found, expected)
    assert torch.equal(one.get_state(), other.get_state())
    assert view._draws_alike, "this test would compare one way with itself"


def test_where_the_compiled_draws_differ_they_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    view = view_of(*VIEWS["random crop, flip"])
    natively = TransformView._draw_natively

    def off_by_one(self: TransformView, size_B2: Any, generator: torch.Generator) -> Any:
        found = natively(self, size_B2, generator)
        found[-1, 0] += 1
        return found

    monkeypatch.setattr(TransformView, "_draw_natively", off_by_one)
    sizes = np.full((9, 2), 50)
    found = view.draw_many(sizes, torch.Generator().manual_seed(2))
    generator = torch.Generator().manual_seed(2)
    assert found.tolist() == [list(view.draw(50, 50, generator).numbers) for _ in range(9)]
    assert view._draws_alike is False


# ── headers and pixels ──────────────────────────────────────────────────────────────────────────────────────────────


def test_the_sizes_of_a_batch_are_those_of_each_file() -> None:
    generator = np.random.default_rng(0)
    whole = [encoded_jpeg(generator, *generator.integers(1, 60, 2), quality=80) for _ in range(20)]
    whole += [encoded_jpeg(generator, 17, 23, progressive=True), encoded_jpeg(generator, 9, 5, mode="L")]
    whole += [encoded_jpeg(generator, 17, 23, mode="CMYK"), encoded_jpeg(generator, 8, 8, comment=b"\xff\xc0 etc")]
    files = [*whole, b"", b"\xff\xd8\xff", b"text that is no picture" * 9, whole[0][:-1], whole[1] + b"\0"]
    for number in range(3000):  # damaged anywhere in the header
        content = bytearray(whole[number % len(whole)])
        for at in generator.integers(0, min(len(content), 700), 1 + number % 4):
            content[at] = generator.choice([0, 1, 0xC0, 0xC4, 0xC9, 0xD0, 0xFF, generator.integers(0, 256)])
        files.append(bytes(content))
    expected = [size_of(content) or (0, 0) for content in files]
    found = jpeg_sizes(np.frombuffer(b"".join(files), dtype=np.uint8), np.cumsum([len(each) for each in files]))
    assert found.tolist() == [list(size) for size in expected]
    assert 200 < sum(size == (0, 0) for size in expected) < len(files) - 200


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small pictures of several kinds, one of them large enough for the other way."""
    folder, generator = tmp_path_factory.mktemp("small"), np.random.default_rng(1)
    for number in range(40):
        path = folder / f"class{number % 3}" / f"{number:02}.jpg"
        path.parent.mkdir(exist_ok=True)
        height, width = generator.integers(3, 60, 2).tolist()
        if number % 8 == 7:
            Image.fromarray(generator.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path, "PNG")
        else:
            path.write_bytes(encoded_jpeg(generator, height, width, subsampling=number % 3, quality=70))
    return folder


@pytest.mark.parametrize("form", ["encoded", "decoded"])
@pytest.mark.parametrize("steps", [VIEWS["random crop, flip"], VIEWS["centre, flip"]], ids=["crop", "centre"])
def test_small_pictures_are_what_torchvision_makes_of_them(pictures: Path, steps: Any, form: str) -> None:
    view = v1.Compose([*steps, v1.ToTensor(), v1.Normalize([0.4] * 3, [0.3] * 3)])
    plain = ImageFolder(str(pictures), transform=view)
    with_cache = ShadeDataset(ImageFolder(str(pictures)), "memory://", transform=view, form=form)
    for dataset in (with_cache, with_cache, ShadeDataset(ImageFolder(str(pictures)), None, transform=view)):
        assert dataset.is_fused
        torch.manual_seed(3)
        expected = [(*plain[index], index) for index in range(len(plain))]
        torch.manual_seed(3)
        found = dataset.__getitems__(range(len(plain)))
        assert same([list(each) for each in found], [list(each) for each in expected])
    with_cache.close()


def test_a_batch_with_one_large_picture_takes_the_other_way(pictures: Path, tmp_path: Path) -> None:
    large = tmp_path / "class0" / "large.jpg"
    large.parent.mkdir()
    large.write_bytes(encoded_jpeg(np.random.default_rng(2), 300, 200))
    data = ImageFolder(str(pictures))
    data.samples = [*data.samples, (str(large), 0)]
    view = v1.Compose([v1.RandomResizedCrop(16), v1.ToTensor()])
    dataset = ShadeDataset(data, None, transform=view)
    ways = [
        dataset._reader.fuse(part, dataset._reader.fetch(part), torch.Generator().manual_seed(1)).is_small
        for part in (list(range(8)), [*range(7), 40])
    ]
    assert ways == [True, False]
    torch.manual_seed(0)
    expected = [view(Image.open(path).convert("RGB")) for path, _ in data.samples]
    torch.manual_seed(0)
    assert all(map(torch.equal, [each[0] for each in dataset.__getitems__(range(41))], expected))


def test_a_small_file_that_the_library_refuses_is_drawn_again_with_what_takes_its_place(pictures: Path) -> None:
    data = ImageFolder(str(pictures))
    view = v1.Compose([v1.RandomResizedCrop(16), v1.ToTensor()])
    dataset, refused = ShadeDataset(data, None, transform=view), []
    fuser = dataset._reader.transforms.fuser
    assert fuser is not None
    decode = fuser.decode

    def refuse(content: Any, box: Any, reduction: int) -> Any:
        if len(refused) < 2:
            refused.append(content)
            raise ValueError("refused")
        return decode(content, box, reduction)

    fuser.decode = refuse
    torch.manual_seed(0)
    expected = [view(Image.open(path).convert("RGB")) for path, _ in data.samples]
    torch.manual_seed(0)
    assert all(map(torch.equal, [each[0] for each in dataset.__getitems__(range(40))], expected))
    assert len(refused) == 2


def test_a_bad_small_picture_leaves_the_generator_behind_those_before_it(pictures: Path) -> None:
    data = ImageFolder(str(pictures))
    view = v1.Compose([v1.RandomResizedCrop(16), v1.ToTensor()])
    dataset = ShadeDataset(data, None, transform=view)
    payloads = dataset._reader.fetch(range(6))
    payloads[4] = OSError("gone")
    generator = torch.Generator().manual_seed(1)
    with pytest.raises(BadSampleError):
        dataset._reader.fuse(range(6), payloads, generator)
    other = torch.Generator().manual_seed(1)
    dataset._reader.fuse(range(4), payloads[:4], other)
    assert torch.equal(generator.get_state(), other.get_state())


def test_files_that_are_large_are_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    small = encoded_jpeg(np.random.default_rng(0), 20, 30)
    assert fused._sizes_of([small, OSError("gone")]).tolist() == [[20, 30], [0, 0]]
    monkeypatch.setattr(fused, "_SMALL_FILE_BYTES", 10)
    assert fused._sizes_of([small, small]).tolist() == [[0, 0], [0, 0]]
    assert fused._sizes_of([]).tolist() == []


# ── items ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Items(Dataset[Any]):
    """Items of one kind, which the data set's number names."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        generator = np.random.default_rng(index)
        picture = torch.from_numpy(generator.integers(0, 256, (3, 4, 5), dtype=np.uint8))
        tokens = generator.integers(0, 50_000, 7)
        if self.kind == "ragged":
            return picture[:, : 1 + index % 2], index
        if self.kind == "keys":
            return {"a": tokens, "b": index} if index % 2 else {"b": index, "a": tokens}
        return {
            "class": lambda: (picture, index % 13 * 9),
            "tensor": lambda: picture.to(torch.bfloat16),
            "tokens": lambda: {"input_ids": torch.from_numpy(tokens), "text": f"t{index}", "weight": index / 7},
            "arrays": lambda: (
                tokens.astype(np.float32),
                np.int64(index),
                np.float32(index),
                index % 2 == 0,
                "é" * index,
            ),
            "nested": lambda: (picture > 9, [tokens, {"x": 1.5, "y": [index, 2]}], {}),
            "string": lambda: f"text {index}",
            "masked": lambda: (picture, None),
            "bytes": lambda: (picture, b"12345"),
            "empty": lambda: (picture[:0], index),
            "foreign": lambda: (tokens.astype(">i8"), index),
            "names": lambda: (tokens.astype("U"), index),
            "mixed": lambda: (picture, index if index % 2 else float(index)),
        }[self.kind]()


COLLATED = ["class", "tensor", "tokens", "arrays", "nested", "string", "mixed"]
OTHERS = ["masked", "bytes", "empty", "foreign", "names", "ragged", "keys"]


@pytest.mark.parametrize("kind", COLLATED + OTHERS)
def test_a_batch_of_items_is_what_default_collate_makes_of_them(kind: str) -> None:
    data = Items(kind)
    items = [data[index] for index in range(len(data))]
    payloads = [item_codec.encode(item) for item in items]
    payloads[3] = memoryview(b"header" + payloads[3])[6:]  # type: ignore[call-overload]
    decoded = [item_codec.decode(payload) for payload in payloads]
    samples = [(*item, i) if isinstance(item, tuple) else (item, i) for i, item in enumerate(decoded)]
    for _ in range(2):
        found = item_columns.collated(payloads, range(len(data)))
        assert (found is not None) == (kind in COLLATED)
        if found is not None:
            assert same(found, default_collate(samples))
            assert same(pickle.loads(pickle.dumps(CollatedBatch(found))), default_collate(samples))


def test_what_is_damaged_is_left_to_the_decoder() -> None:
    good = item_codec.encode((torch.arange(6), 3))
    for bad in (b"", b"abc", good[:-8], good + bytes(8), good[:4] + b"[" + good[5:], OSError("gone")):
        assert item_columns.collated([good, bad], [0, 1]) is None
    assert item_columns.collated([good, good], [0, 1]) is not None


def test_values_that_never_come_again_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_columns, "_MOST_LAYOUTS", 50)
    for number in range(400):
        payloads = [item_codec.encode((torch.ones(2), number + part / 3)) for part in range(3)]
        found = item_columns.collated(payloads, range(3))
        assert found is not None
        assert found[1].tolist() == [number + part / 3 for part in range(3)]
        assert len(item_columns._layouts) <= 50 + 3


@pytest.mark.parametrize("kind", COLLATED)
def test_items_that_are_cached_come_as_from_dataloader(kind: str) -> None:
    data = ShadeDataset(Items(kind), "memory://", working_set_fraction=0.6)
    expected = list(DataLoader(data, 5))
    for _ in range(2):
        assert same(list(ShadeLoader(data, 5, num_workers=0)), expected)
    assert data.stats()["hits"] > 0
    data.close()


def scaled(sample: torch.Tensor) -> torch.Tensor:
    return sample.float() / 255


@pytest.mark.multiprocess
@pytest.mark.parametrize("transform", [None, scaled])
@pytest.mark.parametrize("kind", ["class", "tensor"])
def test_items_come_out_of_workers_as_from_dataloader(
    kind: str, transform: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns below and above the size that travels in the message."""
    monkeypatch.setattr(item_columns, "INLINE_BYTES", 200)
    data = ShadeDataset(Items(kind), None, transform=transform)
    expected = list(DataLoader(data, 5))
    assert same(list(ShadeLoader(data, 5, num_workers=2)), expected)
    assert not same(list(ShadeLoader(data, 4, num_workers=0)), expected)


@pytest.mark.parametrize("kind", ["masked", "ragged"])
def test_what_cannot_be_collated_fails_as_in_dataloader(kind: str) -> None:
    data = ShadeDataset(Items(kind), None)
    messages = []
    for loader in (DataLoader(data, 4), ShadeLoader(data, 4, num_workers=0)):
        with pytest.raises((TypeError, RuntimeError)) as raised:
            next(iter(loader))
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_a_collate_function_of_ones_own_gets_samples() -> None:
    data = ShadeDataset(Items("class"), None)
    (first, *_) = ShadeLoader(data, 4, num_workers=0, collate_fn=list)
    assert [type(sample) for sample in first] == [tuple] * 4
    assert [sample[-1] for sample in first] == [0, 1, 2, 3]


def test_a_column_that_needs_more_than_its_bytes_is_left_to_torch() -> None:
    parts = [torch.ones(3, requires_grad=True), torch.ones(2, 3).T, torch.arange(3).to_sparse(), "text", torch.ones(0)]
    found = pickle.loads(pickle.dumps(CollatedBatch(parts)))
    assert found[0].requires_grad
    assert found[1].stride() == (1, 3)
    assert found[2].is_sparse
    assert found[3] == "text"
