"""The loaders that `bench_loaders` compares, each the way its own documentation recommends it.

All do the same work: JPEG bytes to a float32 batch (B, 3, side, side), through a random resized crop, a random flip and
the same normalisation; batches of `BATCH`, two workers or as many threads as their design asks for. A loader with a
cache gets the same number of bytes for it. What has to be converted first is converted by the loader's own writer and
lies behind the same slow mount as the images.

A method is a class with `epoch`, and `convert` where it needs one. It lives in a process of its own
(`loader_epochs`), so that what one imports or leaves behind does not touch the others; what is imported by one method
alone is imported inside it. A missing package raises `ImportError`, which becomes a row that says so.

Legend: B batch · N data set.
"""

from __future__ import annotations

import io
import os
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

BATCH, WORKERS = 64, 2
MEAN, STD = [0.5] * 3, [0.25] * 3
NUM_SHARDS = 100
"""Of a converted copy: 20 % of a small data set must hold many; peers' defaults of 64 MB would not fit once."""
READ_THREADS, DECODE_THREADS = 32, 2


@dataclass(frozen=True)
class Setting:
    """One case, as a method sees it."""

    root: Path
    """The mount: ``images`` in ImageFolder layout, and a folder for each converted copy."""
    scratch: Path
    """A fresh folder on local disk, for a loader's own cache."""
    side: int
    """Of the cropped image, in pixels."""
    share: float
    """Cache, as a share of the data set; 1: all of it."""
    num_samples: int
    num_bytes: int
    """Of all images together."""

    @property
    def cache_bytes(self) -> int:
        """What a cache may occupy: the share, or amply all (a converted copy is a little larger than its images)."""
        return int(self.share * self.num_bytes) if self.share < 1 else 2 * self.num_bytes


def view(side: int) -> transforms.Compose:
    """The transform that torchvision users write."""
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(side),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )


def decode(content: bytes) -> Image.Image:
    """JPEG bytes → RGB image."""
    return Image.open(io.BytesIO(content)).convert("RGB")


def files(images: Path) -> list[tuple[str, int]]:
    """(path, class) of every image."""
    return ImageFolder(str(images)).samples


def shard_bytes(images: Path) -> int:
    """How large a shard shall be."""
    return max(1 << 14, sum(path.stat().st_size for path in images.rglob("*.jpg")) // NUM_SHARDS)


def count(batches: Iterable[Any], side: int) -> int:
    """Takes every batch, as a training step would, and looks whether it is what was asked for."""
    num_samples = 0
    for batch in batches:
        images = batch[0] if isinstance(batch, (list, tuple)) else batch["image"]
        if images.shape[1:] != (3, side, side) or images.dtype != torch.float32:
            raise ValueError(f"expected float32 (B, 3, {side}, {side}), got {images.dtype} {tuple(images.shape)}")
        num_samples += len(images)
    if not num_samples:
        raise ValueError("expected samples, got none: the messages above say why")
    return num_samples


class Method:
    """What all have in common.

    Args:
        setting: The case.
    """

    convert: Callable[[Path, Path], None] | None = None
    """(images, empty folder) → the converted copy; None: reads the images as they are."""
    folder = "images"
    """Of the converted copy, under the mount."""
    has_share = False
    """Whether it can be told how much to keep; if not, all shares are the same to it."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.data = setting.root / self.folder

    def epoch(self, number: int) -> int:
        """Loads one epoch; returns the number of samples."""
        raise TypeError(f"{type(self).__name__} loads nothing; epoch {number}")

    def close(self) -> None:
        """Frees what has to be freed."""


# ── torch ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Torch(Method):
    """torch's DataLoader over ImageFolder, as everybody has it."""

    workers = WORKERS

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        data = ImageFolder(str(self.data), transform=view(setting.side))
        self.loader = self.make(data)

    def make(self, data: ImageFolder) -> Iterable[Any]:
        """The loader."""
        return DataLoader(data, BATCH, shuffle=True, num_workers=self.workers, persistent_workers=self.workers > 0)

    def epoch(self, number: int) -> int:
        """See `Method`."""
        return count(self.loader, self.setting.side)


class Torch0(Torch):
    """In the training process."""

    workers = 0


class Torch4(Torch):
    """Twice as many workers as cores."""

    workers = 4


class Stateful(Torch):
    """torchdata's StatefulDataLoader: the same, resumable."""

    def make(self, data: ImageFolder) -> Iterable[Any]:
        """See `Torch`."""
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(data, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True)


# ── ours ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Ours(Method):
    """ShadeDataset and ShadeSampler in torch's DataLoader."""

    has_share = True
    mode = "uniform"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        from shade import ShadeDataset, ShadeSampler

        self.dataset = ShadeDataset(
            ImageFolder(str(self.data)),
            cache="local://",
            working_set_fraction=setting.share,
            transform=view(setting.side),
        )
        self.sampler = ShadeSampler(self.dataset, batch_size=BATCH, mode=self.mode)
        self.losses = torch.distributions.LogNormal(0.0, 1.0).sample((len(self.dataset),))
        self.loader = self.make()

    def make(self) -> Iterable[Any]:
        """The loader."""
        return DataLoader(self.dataset, BATCH, sampler=self.sampler, num_workers=WORKERS, persistent_workers=True)

    def batches(self, number: int) -> Iterator[Any]:
        """One epoch, with the calls of a training loop."""
        self.sampler.set_epoch(number)
        for batch in self.loader:
            indices = batch[2]
            self.sampler.weights(indices)
            self.sampler.report(indices, self.losses[indices])
            yield batch

    def epoch(self, number: int) -> int:
        """See `Method`."""
        return count(self.batches(number), self.setting.side)

    def close(self) -> None:
        """Ends workers or threads, then the private server."""
        del self.loader
        self.sampler.close()
        self.dataset.close()


class OursUnbiased(Ours):
    """The same, drawing 70 % of the samples an epoch."""

    mode = "unbiased"


class OursThreads(Ours):
    """ShadeLoader in the DataLoader's place."""

    def make(self) -> Iterable[Any]:
        """See `Ours`."""
        from shade import ShadeLoader

        return ShadeLoader(self.dataset, batch_size=BATCH, sampler=self.sampler, num_workers=WORKERS)


class OursThreadsUnbiased(OursThreads):
    """The same, drawing 70 % of the samples an epoch."""

    mode = "unbiased"


# ── peers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Mosaic(Method):
    """MosaicML Streaming: MDS shards, a local cache with a limit, shuffled within blocks that fit into it."""

    has_share = True
    folder = "mds"

    @staticmethod
    def convert(images: Path, out: Path) -> None:
        """Writes shards."""
        from streaming import MDSWriter

        columns = {"image": "bytes", "label": "int"}
        with MDSWriter(out=str(out), columns=columns, size_limit=shard_bytes(images)) as writer:
            for path, label in shuffled(files(images)):
                writer.write({"image": Path(path).read_bytes(), "label": label})

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        from streaming import StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()
        transform = view(setting.side)

        class Images(StreamingDataset):
            def __getitem__(self, at: Any) -> Any:
                item = super().__getitem__(at)
                return transform(decode(item["image"])), item["label"]

        block = setting.num_samples if setting.share == 1 else int(setting.share * setting.num_samples) // 2
        data = Images(
            remote=str(self.data),
            local=str(setting.scratch / "mds"),
            shuffle=True,
            shuffle_block_size=block,
            num_canonical_nodes=1,
            batch_size=BATCH,
            cache_limit=None if setting.share == 1 else setting.cache_bytes,
            predownload=2 * BATCH,
        )
        self.loader = DataLoader(data, BATCH, num_workers=WORKERS, persistent_workers=True)

    def epoch(self, number: int) -> int:
        """See `Method`."""
        return count(self.loader, self.setting.side)


class Lit(Method):
    """LitData: optimised chunks, ``local:`` for network drives, a cache with a limit, its own StreamingDataLoader."""

    has_share = True
    folder = "lit"

    @staticmethod
    def convert(images: Path, out: Path) -> None:
        """Writes chunks."""
        from litdata import optimize

        optimize(
            fn=_lit_sample,
            inputs=shuffled(files(images)),
            output_dir=str(out),
            chunk_bytes=shard_bytes(images),
            num_workers=1,
        )

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        from litdata import StreamingDataLoader, StreamingDataset

        data = StreamingDataset(
            f"local:{self.data}",
            cache_dir=str(setting.scratch / "lit"),
            shuffle=True,
            drop_last=False,
            max_cache_size=setting.cache_bytes,
            transform=_Viewed(setting.side),
        )
        self.loader = StreamingDataLoader(data, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True)

    def epoch(self, number: int) -> int:
        """See `Method`."""
        return count(self.loader, self.setting.side)


def _lit_sample(item: tuple[str, int]) -> dict[str, Any]:
    path, label = item
    return {"image": Path(path).read_bytes(), "label": label}


class _Viewed:
    """A row → (transformed image, class)."""

    def __init__(self, side: int) -> None:
        self._transform = view(side)

    def __call__(self, row: dict[str, Any]) -> tuple[torch.Tensor, int]:
        return self._transform(decode(row["image"])), row["label"]


class WebData(Method):
    """WebDataset: tar shards in random order, a shuffle buffer of a thousand samples, a local cache of shards."""

    has_share = True
    folder = "wds"

    @staticmethod
    def convert(images: Path, out: Path) -> None:
        """Writes tars."""
        import webdataset

        with webdataset.ShardWriter(str(out / "%05d.tar"), maxsize=shard_bytes(images), verbose=0) as writer:
            for number, (path, label) in enumerate(shuffled(files(images))):
                writer.write({"__key__": f"{number:06d}", "jpg": Path(path).read_bytes(), "cls": label})

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        import webdataset

        shards = sorted(str(path) for path in self.data.glob("*.tar"))
        # Local paths are never cached; a pipe is, which is how its documentation reads network drives.
        data = (
            webdataset.WebDataset(
                [f"pipe:cat {path}" for path in shards],
                shardshuffle=len(shards),
                cache_dir=str(setting.scratch),
                cache_size=setting.cache_bytes,
            )
            .shuffle(1000)
            .to_tuple("jpg", "cls")
            .map_tuple(_Decoded(setting.side), int)
            .batched(BATCH)
        )
        self.loader = webdataset.WebLoader(data, batch_size=None, num_workers=WORKERS, persistent_workers=True)

    def epoch(self, number: int) -> int:
        """See `Method`."""
        return count(self.loader, self.setting.side)


class _Decoded:
    """Bytes → transformed image."""

    def __init__(self, side: int) -> None:
        self._transform = view(side)

    def __call__(self, content: bytes) -> torch.Tensor:
        return self._transform(decode(content))


class Spdl(Method):
    """SPDL: a thread pipeline; many threads read, two decode with FFmpeg, which crops, scales and flips as it goes.

    Where FFmpeg's libraries are not installed (they are not in its wheel) the two threads decode as all others do.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        import spdl.io
        import spdl.pipeline

        self.samples = files(self.data)
        self._io, self._pipeline = spdl.io, spdl.pipeline
        self._mean = torch.tensor(MEAN).view(1, 3, 1, 1)
        self._std = torch.tensor(STD).view(1, 3, 1, 1)
        self._view = view(setting.side)
        try:
            spdl.io.demux_image(Path(self.samples[0][0]).read_bytes())
        except RuntimeError:
            self._stages = self._decode_without, self._collate_without
        else:
            self._stages = self._decode, self._collate

    def _read(self, sample: tuple[str, int]) -> tuple[bytes, int]:
        return Path(sample[0]).read_bytes(), sample[1]

    def _decode(self, sample: tuple[bytes, int]) -> tuple[Any, int]:
        content, label = sample
        with Image.open(io.BytesIO(content)) as header:  # reads the header alone
            size = torch.empty(0, header.height, header.width)
        top, left, height, width = transforms.RandomResizedCrop.get_params(size, (0.08, 1.0), (3 / 4, 4 / 3))
        side, flip = self.setting.side, ",hflip" if random.random() < 0.5 else ""
        words = f"crop={width}:{height}:{left}:{top},scale={side}:{side}{flip},format=pix_fmts=rgb24"
        return self._io.decode_packets(self._io.demux_image(content), filter_desc=words), label

    def _decode_without(self, sample: tuple[bytes, int]) -> tuple[Any, int]:
        return self._view(decode(sample[0])), sample[1]

    def _collate_without(self, samples: list[tuple[Any, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = zip(*samples, strict=True)
        return torch.stack(images), torch.tensor(labels)

    def _collate(self, samples: list[tuple[Any, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        frames, labels = zip(*samples, strict=True)
        images = self._io.to_torch(self._io.convert_frames(list(frames)))
        images = images.permute(0, 3, 1, 2).to(torch.float32).div_(255).sub_(self._mean).div_(self._std)
        return images, torch.tensor(labels)

    def epoch(self, number: int) -> int:
        """See `Method`."""
        decode_one, collate = self._stages
        pipeline = (
            self._pipeline.PipelineBuilder()
            .add_source(shuffled(self.samples, number))
            .pipe(self._read, concurrency=READ_THREADS)
            .pipe(decode_one, concurrency=DECODE_THREADS)
            .aggregate(BATCH)
            .pipe(collate)
            .add_sink(3)
            .build(num_threads=READ_THREADS + DECODE_THREADS + 1)
        )
        with pipeline.auto_stop():
            return count(pipeline.get_iterator(timeout=600), self.setting.side)


class Ffcv(Method):
    """FFCV: one file, compiled pipelines; its own cache where not all fits, the page cache where it does."""

    has_share = True
    folder = "ffcv"

    @staticmethod
    def convert(images: Path, out: Path) -> None:
        """Writes the file."""
        from ffcv.fields import IntField, RGBImageField
        from ffcv.writer import DatasetWriter

        fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=85), "label": IntField()}
        DatasetWriter(str(out / "images.beton"), fields, num_workers=1).from_indexed_dataset(ImageFolder(str(images)))

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        import numpy as np
        from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
        from ffcv.loader import Loader, OrderOption
        from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor, ToTorchImage

        scale = 255 * np.ones(3)
        normalize = NormalizeImage(scale * np.array(MEAN), scale * np.array(STD), np.float32)
        image = [RandomResizedCropRGBImageDecoder((setting.side,) * 2), RandomHorizontalFlip(), normalize, ToTensor()]
        self.loader = Loader(
            str(self.data / "images.beton"),
            batch_size=BATCH,
            num_workers=WORKERS,
            order=OrderOption.RANDOM if setting.share == 1 else OrderOption.QUASI_RANDOM,
            os_cache=setting.share == 1,
            pipelines={"image": [*image, ToTorchImage(channels_last=False)], "label": [IntDecoder(), ToTensor()]},
        )

    def epoch(self, number: int) -> int:
        """See `Method`."""
        return count(self.loader, self.setting.side)


class HuggingFace(Method):
    """Hugging Face datasets: Arrow files, mapped into memory, in torch's DataLoader.

    There is no limit to set: what was read once stays in the kernel's page cache as long as the mapping does.
    """

    folder = "hf"

    @staticmethod
    def convert(images: Path, out: Path) -> None:
        """Writes Arrow files."""
        import datasets

        def rows() -> Iterator[dict[str, Any]]:
            for path, label in files(images):
                yield {"image": {"bytes": Path(path).read_bytes(), "path": None}, "label": label}

        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
        os.environ["HF_DATASETS_OFFLINE"] = "1"
        datasets.Dataset.from_generator(rows, features=features, cache_dir=str(out / "scratch")).save_to_disk(str(out))

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        import datasets

        data = datasets.load_from_disk(str(self.data)).with_transform(_Transformed(setting.side))
        self.loader = DataLoader(data, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True)

    def epoch(self, number: int) -> int:
        """See `Method`."""
        return count(self.loader, self.setting.side)


class _Transformed:
    """A batch of rows, its images transformed."""

    def __init__(self, side: int) -> None:
        self._transform = view(side)

    def __call__(self, rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        images = [self._transform(image.convert("RGB")) for image in rows["image"]]
        return {"image": images, "label": rows["label"]}


def shuffled(samples: list[tuple[str, int]], seed: int = 0) -> list[tuple[str, int]]:
    """In random order: a folder is sorted by class, and who shuffles within blocks counts on the writer."""
    return random.Random(seed).sample(samples, len(samples))


METHODS: dict[str, tuple[str, type[Method]]] = {
    "torch": ("torch DataLoader, 2 workers", Torch),
    "torch0": ("torch DataLoader, 0 workers", Torch0),
    "torch4": ("torch DataLoader, 4 workers", Torch4),
    "stateful": ("StatefulDataLoader", Stateful),
    "mosaic": ("MosaicML Streaming", Mosaic),
    "litdata": ("LitData", Lit),
    "webdataset": ("WebDataset", WebData),
    "spdl": ("SPDL", Spdl),
    "ffcv": ("FFCV", Ffcv),
    "huggingface": ("HF datasets", HuggingFace),
    "shade": ("**shade**, DataLoader, uniform", Ours),
    "shade-unbiased": ("**shade**, DataLoader, unbiased", OursUnbiased),
    "shadeloader": ("**ShadeLoader**, uniform", OursThreads),
    "shadeloader-unbiased": ("**ShadeLoader**, unbiased", OursThreadsUnbiased),
}
"""Name → (name in the table, class). The first is what the others are compared with."""
