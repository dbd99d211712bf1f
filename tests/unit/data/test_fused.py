"""Fused transforms: the user's chain bit for bit, the same draws, and nothing recognised that is not exactly known."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import InterpolationMode, v2

from shade import ShadeDataset
from shade.data._decode.pixels import Box, Pixels
from shade.data._transforms.fused import Fuser, fuser_of
from shade.data._transforms.kernels import pillow_order, render
from shade.data._transforms.recognise import recognise
from shade.errors import BadSampleError
from tests.support.data_plane import make_zoo

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def chains() -> dict[str, Callable[[Any], Any]]:
    """What people write."""
    return {
        "v1 train": v1.Compose(
            [v1.RandomResizedCrop(24), v1.RandomHorizontalFlip(), v1.ToTensor(), v1.Normalize(MEAN, STD)]
        ),
        "v1 train, nested": v1.Compose(
            [v1.Compose([v1.RandomResizedCrop((20, 31), (0.3, 1.0))]), v1.ToTensor(), v1.Normalize(MEAN, STD)]
        ),
        "v1 evaluation": v1.Compose([v1.Resize(32), v1.CenterCrop(24), v1.ToTensor(), v1.Normalize(MEAN, STD)]),
        "v1 fixed size": v1.Compose([v1.Resize((19, 40)), v1.RandomHorizontalFlip(0.7), v1.ToTensor()]),
        "v1 bytes": v1.Compose([v1.RandomResizedCrop(24), v1.PILToTensor()]),
        "v2 on images": v2.Compose(
            [
                v2.RandomResizedCrop(24),
                v2.RandomHorizontalFlip(),
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD),
            ]
        ),
        "v2 on tensors": v2.Compose(
            [
                v2.ToImage(),
                v2.RandomResizedCrop((24, 30), antialias=True),
                v2.RandomHorizontalFlip(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD),
            ]
        ),
        "v2 evaluation on tensors": v2.Compose(
            [v2.PILToTensor(), v2.Resize(40, antialias=True), v2.CenterCrop(24), v2.ToDtype(torch.float32, scale=True)]
        ),
        "v2 evaluation": v2.Compose(
            [v2.Resize([36]), v2.CenterCrop([24, 36]), v2.ToImage(), v2.ToDtype(torch.float64, scale=True)]
        ),
        "sequential": torch.nn.Sequential(v1.Resize((24, 24)), v1.RandomHorizontalFlip(), v2.PILToTensor()),
    }


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of every kind, and photographs that are larger and smaller than the crops."""
    root = make_zoo(tmp_path_factory.mktemp("zoo"))
    rng = np.random.default_rng(3)
    for number, (width, height) in enumerate([(64, 48), (48, 64), (101, 33), (25, 200), (24, 24), (8, 9), (333, 250)]):
        coarse = rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        pixels = np.asarray(image).astype(int) + rng.integers(-9, 9, (height, width, 3))
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        subsampling = ("4:2:0", "4:4:4", "4:2:2")[number % 3]
        image.save(root / "jpg" / f"photo{number}.jpg", quality=88, subsampling=subsampling)
    return root


def as_written(root: Path, chain: Callable[[Any], Any], seed: int) -> tuple[list[Any], torch.Tensor]:
    """torchvision's own samples, and where they leave the generator."""
    torch.manual_seed(seed)
    samples = [sample for sample, _ in ImageFolder(str(root), transform=chain)]
    return samples, torch.get_rng_state()


def check(samples: list[Any], expected: list[Any]) -> None:
    for found, wanted in zip(samples, expected, strict=True):
        assert type(found) is type(wanted)
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


def test_this_machine_computes_as_pillow_does() -> None:
    """Any size to any size."""
    order, rng = pillow_order(), np.random.default_rng(0)
    assert order is not None
    table, zeros = np.tile(np.arange(256, dtype=np.uint8), (3, 1)), np.zeros(2, np.int64)
    sizes = [tuple(int(number) for number in rng.integers(1, 120, 4)) for _ in range(400)]
    sizes += [(2 * number + 60, number + 40, 60, 40) for number in range(20)]
    for height, width, to_height, to_width in sizes:
        picture = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        out, box = np.empty((3, to_height, to_width), np.uint8), np.array([0.0, 0.0, height, width, height, width])
        columns_first, size = order(height, width, to_height, to_width), np.array([to_height, to_width])
        render(picture.reshape(-1), 3 * width, zeros, box, size, zeros, columns_first, False, table, out)
        expected = Image.fromarray(picture).resize((to_width, to_height), Image.Resampling.BILINEAR)
        assert np.array_equal(out.transpose(1, 2, 0), np.asarray(expected)), (height, width, to_height, to_width)


@pytest.mark.parametrize("name", chains())
def test_a_recognised_chain_is_the_same_to_the_last_bit_and_draws_the_same(zoo: Path, name: str) -> None:
    chain = chains()[name]
    expected, state = as_written(zoo, chain, 11)
    dataset = ShadeDataset(ImageFolder(str(zoo)), cache=None, transform=chain)
    assert dataset.is_fused
    torch.manual_seed(11)
    batch = dataset.__getitems__(list(range(len(dataset))))
    assert torch.equal(torch.get_rng_state(), state)
    check([sample for sample, *_ in batch], expected)
    assert [target for _, target, _ in batch] == [target for _, target in ImageFolder(str(zoo)).samples]


def test_many_random_crops_of_one_photograph_are_the_same(zoo: Path) -> None:
    chain = chains()["v1 train"]
    path = zoo / "jpg" / "photo6.jpg"
    image = Image.open(path).convert("RGB")
    dataset = ShadeDataset(ImageFolder(str(zoo), transform=chain), cache=None)
    index = [sample for sample, _ in ImageFolder(str(zoo)).samples].index(str(path))
    torch.manual_seed(2)
    expected = [chain(image) for _ in range(300)]
    torch.manual_seed(2)
    check([sample for sample, *_ in dataset.__getitems__([index] * 300)], expected)


def test_the_wrapped_data_sets_own_transforms_come_first(zoo: Path) -> None:
    first, then = v1.RandomResizedCrop(24), v1.Compose([v1.ToTensor(), v1.Normalize(MEAN, STD)])
    dataset = ShadeDataset(ImageFolder(str(zoo), transform=first), cache=None, transform=then)
    assert dataset.is_fused
    expected, _ = as_written(zoo, v1.Compose([first, then]), 5)
    torch.manual_seed(5)
    check([sample for sample, *_ in dataset.__getitems__(list(range(len(dataset))))], expected)


class MyCrop(v1.RandomResizedCrop):
    """A subclass may do anything."""


@pytest.mark.parametrize(
    "chain",
    [
        [],
        [v1.ToTensor()],
        [v1.RandomResizedCrop(24)],
        [v1.RandomResizedCrop(24), v1.RandomHorizontalFlip()],
        [MyCrop(24), v1.ToTensor()],
        [v1.RandomResizedCrop(24, interpolation=InterpolationMode.BICUBIC), v1.ToTensor()],
        [v1.RandomResizedCrop(24), v1.ColorJitter(), v1.ToTensor()],
        [v1.RandomResizedCrop(24), v1.ToTensor(), v1.RandomErasing()],
        [v1.RandomResizedCrop(24), v1.ToTensor(), lambda tensor: tensor],
        [v1.ToTensor(), v1.RandomResizedCrop(24)],
        [v1.PILToTensor(), v1.RandomResizedCrop(24)],
        [v2.ToImage(), v2.RandomResizedCrop(24, antialias=False)],
        [v1.Resize(24), v1.ToTensor()],
        [v1.Resize(24), v1.CenterCrop(32), v1.ToTensor()],
        [v1.Resize(24, max_size=100), v1.CenterCrop(20), v1.ToTensor()],
        [v1.CenterCrop(20), v1.ToTensor()],
        [v1.RandomHorizontalFlip(), v1.RandomResizedCrop(24), v1.ToTensor()],
        [v1.RandomResizedCrop(24), v1.ToTensor(), v2.ToDtype(torch.bfloat16, scale=True)],
    ],
    ids=lambda chain: re.sub(r" at 0x\w+", "", str(chain)),
)
def test_what_is_not_exactly_known_is_not_recognised(chain: list[Any]) -> None:
    assert recognise(chain) is None
    assert fuser_of(chain, reduced=False) is None


def test_target_transforms_and_other_decoders_run_as_written(zoo: Path) -> None:
    chain = chains()["v1 train"]
    folder = ImageFolder(str(zoo))
    assert not ShadeDataset(folder, cache=None, transform=chain, target_transform=lambda target: target).is_fused
    assert not ShadeDataset(
        folder, cache=None, transform=chain, decode=lambda content: Image.new("RGB", (9, 9))
    ).is_fused
    assert not ShadeDataset(folder, cache=None).is_fused


def test_a_fuser_pickles() -> None:
    fuser = fuser_of([chains()["v1 train"]], reduced=True)
    assert fuser is not None
    copy: Fuser = pickle.loads(pickle.dumps(fuser))
    assert copy.reduced
    assert np.array_equal(copy.view.table_CV, fuser.view.table_CV)


# ── damaged files ───────────────────────────────────────────────────────────────────────────────────────────────────


def damage(path: Path) -> None:
    """Bytes in the middle of the entropy-coded data: libjpeg only warns, and Pillow keeps what it got."""
    content = bytearray(path.read_bytes())
    middle = len(content) * 2 // 3
    content[middle : middle + 6] = b"\xff\xd9\x00\x11\x22\x33"
    path.write_bytes(content)


def test_a_file_that_libjpeg_objects_to_is_what_pillow_makes_of_it(zoo: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.jpg").write_bytes((zoo / "jpg" / "photo6.jpg").read_bytes())
    damage(folder / "2.jpg")
    chain = chains()["v1 train"]
    dataset = ShadeDataset(ImageFolder(str(tmp_path)), cache=None, transform=chain)
    try:
        expected, state = as_written(tmp_path, chain, 1)
    except OSError:
        with pytest.raises(BadSampleError, match=r"2\.jpg"):
            dataset.__getitems__(list(range(5)))
        return
    torch.manual_seed(1)
    check([sample for sample, *_ in dataset.__getitems__(list(range(5)))], expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("kind", ["truncated", "text", "damaged"])
def test_a_bad_sample_is_replaced_as_the_chain_as_written_replaces_it(zoo: Path, tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.jpg").write_bytes((zoo / "jpg" / f"photo{number}.jpg").read_bytes())
    bad = folder / "3.jpg"
    scanned = ImageFolder(str(tmp_path))
    if kind == "truncated":
        bad.write_bytes(bad.read_bytes()[:-300])
    elif kind == "text":
        bad.write_text("no picture")
    else:
        damage(bad)
    streams = []
    for written in (chains()["v1 train"], v1.Compose([chains()["v1 train"], v1.Lambda(lambda tensor: tensor)])):
        dataset = ShadeDataset(scanned, cache=None, transform=written, on_bad_sample="skip")
        torch.manual_seed(4)
        streams.append([(index, target, sample) for sample, target, index in dataset.__getitems__(list(range(6)))])
    assert dataset.is_fused is False
    for fused, plain in zip(*streams, strict=True):
        assert fused[:2] == plain[:2]
        assert torch.equal(fused[2], plain[2])


def test_a_bad_sample_stops_with_its_path_when_fused(zoo: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    content = (zoo / "jpg" / "photo0.jpg").read_bytes()
    (folder / "good.jpg").write_bytes(content)
    (folder / "short.jpg").write_bytes(content[:-100])
    dataset = ShadeDataset(ImageFolder(str(tmp_path)), cache=None, transform=chains()["v1 train"])
    with pytest.raises(BadSampleError, match=r"short\.jpg"):
        dataset.__getitems__([0, 1])


# ── the kernel ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_byte_behind_the_source_is_read() -> None:
    """The last pixels of a source without spare bytes behind it, against one with many."""
    order = pillow_order()
    assert order is not None
    rng = np.random.default_rng(1)
    table = np.tile(np.arange(256, dtype=np.uint8), (3, 1))
    for height, width, side in ((5, 7, 9), (40, 40, 8), (3, 3, 3), (1, 1, 4), (2, 500, 6)):
        picture = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        box, resized = np.array([0.0, 0.0, height, width, height, width]), np.array([side, side])
        results = []
        for spare in (0, 64):
            source = np.concatenate([picture.reshape(-1), np.full(spare, 255, np.uint8)])
            out = np.empty((3, side, side), np.uint8)
            zeros = np.zeros(2, np.int64)
            render(source, 3 * width, zeros, box, resized, zeros, order(height, width, side, side), False, table, out)
            results.append(out)
        image = Image.fromarray(picture).resize((side, side), Image.Resampling.BILINEAR)
        assert np.array_equal(results[0].transpose(1, 2, 0), np.asarray(image))
        assert np.array_equal(results[0], results[1])


# ── reduced decoding ────────────────────────────────────────────────────────────────────────────────────────────────


def test_reduced_decoding_changes_large_pictures_by_little_and_small_ones_not_at_all(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    folder = tmp_path / "a"
    folder.mkdir()
    for name, (width, height) in {"large": (803, 601), "small": (90, 70)}.items():
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        coarse.resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{name}.jpg", quality=92)
    chain = v1.Compose([v1.Resize(80), v1.CenterCrop(64), v1.PILToTensor()])
    folder_set = ImageFolder(str(tmp_path))
    exact = ShadeDataset(folder_set, cache=None, transform=chain)
    reduced = ShadeDataset(folder_set, cache=None, transform=chain, reduced_decode=True)
    (large, *_), (small, *_) = exact.__getitems__([0, 1])
    (large_reduced, *_), (small_reduced, *_) = reduced.__getitems__([0, 1])
    assert torch.equal(small, small_reduced)
    difference = (large.int() - large_reduced.int()).abs()
    assert difference.max() > 0, "it was not reduced at all"
    assert difference.float().mean() < 1.0
    assert difference.max() <= 12


def test_pixels_cut_what_was_asked_for() -> None:
    picture = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
    pixels = Pixels.of(picture)
    assert np.array_equal(pixels.cut(Box(1, 2, 3, 4)), picture[1:4, 2:6])
