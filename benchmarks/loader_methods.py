"""The loaders that `bench_loaders` compares, each the way its own documentation recommends it.

All do the same work: JPEG bytes to a float32 batch (B, 3, side, side), through a random resized crop, a random flip and
the same normalisation; batches of `BATCH`. torch's DataLoader is measured with a range of workers, since the best
number depends on the storage; others have as many workers or threads as their design asks for. A loader with a cache
gets the same number of bytes for it. What has to be converted first is converted by the loader's own writer and lies
behind the same slow mount as the images, or in the same bucket.

In a bucket (a root ``s3://…``, served by `object_server`) each reads the way its documentation has for S3; where a user
writes the reading, as with torch, SPDL, Grain and DALI's `external_source`, it is boto3's `get_object`. A method that
cannot read from a bucket says so in `files_only`.

A method is a class with `epoch`, and `convert` where it needs one. It lives in a process of its own
(`loader_epochs`), so that what one imports or leaves behind does not touch the others; what is imported by one method
alone is imported inside it. A missing package raises `ImportError`, which becomes a row that says so.

Legend: B batch · N data set.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader

BATCH, WORKERS = 64, 2
SHARES = (0.0, 0.2, 0.5, 1.0)
"""Shares of the data set in cache."""
MEAN, STD = [0.5] * 3, [0.25] * 3
NUM_SHARDS = 100
"""Of a converted copy: 20 % of a small data set must hold many; peers' defaults of 64 MB would not fit once."""
READ_THREADS, DECODE_THREADS = 32, 2
SCHEME = "s3://"


@dataclass(frozen=True)
class Setting:
    """One case, as a method sees it."""

    root: str
    """The mount or the bucket: ``images`` in ImageFolder layout, and a folder for each converted copy."""
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


def files(images: str | Path) -> list[tuple[str, int]]:
    """(path or URL, class) of every image."""
    if not is_object(str(images)):
        return ImageFolder(str(images)).samples
    found = [(address, address.split("/")[-2]) for address in objects(str(images))]
    numbers = {name: number for number, name in enumerate(sorted({name for _, name in found}))}
    return [(address, numbers[name]) for address, name in found]


def objects(folder: str) -> list[str]:
    """The URLs of all objects in a folder of a bucket."""
    bucket, _, prefix = folder.removeprefix(SCHEME).partition("/")
    pages = _client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/")
    return sorted(f"{SCHEME}{bucket}/{each['Key']}" for page in pages for each in page["Contents"])


def is_object(address: str) -> bool:
    """Returns whether an address is that of an object in a bucket."""
    return address.startswith(SCHEME)


def read(address: str) -> bytes:
    """Returns what is in a file or an object."""
    if not is_object(address):
        return Path(address).read_bytes()
    bucket, _, key = address.removeprefix(SCHEME).partition("/")
    content: bytes = _client().get_object(Bucket=bucket, Key=key)["Body"].read()
    return content


def _client() -> Any:
    """This process's S3 client, for all its threads."""
    with _lock:
        if os.getpid() not in _clients:
            import boto3
            from botocore.config import Config

            config = Config(max_pool_connections=2 * READ_THREADS)
            _clients[os.getpid()] = boto3.session.Session().client("s3", config=config)
        return _clients[os.getpid()]


_clients: dict[int, Any] = {}
_lock = threading.Lock()


def shard_bytes(images: Path) -> int:
    """How large a shard shall be."""
    return max(1 << 14, sum(path.stat().st_size for path in images.rglob("*.jpg")) // NUM_SHARDS)


def no_step(images: torch.Tensor) -> None:
    """Does nothing with a batch."""


step: Callable[[torch.Tensor], None] = no_step
"""What is done with each batch; `bench_beside_training` puts a training here."""


def count(batches: Iterable[Any], side: int) -> int:
    """Takes every batch, as a training step would, and looks whether it is what was asked for."""
    num_samples = 0
    for batch in batches:
        images = batch[0] if isinstance(batch, (list, tuple)) else batch["image"]
        if images.shape[1:] != (3, side, side) or images.dtype != torch.float32:
            raise ValueError(f"expected float32 (B, 3, {side}, {side}), got {images.dtype} {tuple(images.shape)}")
        num_samples += len(images)
        step(images)
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
    shares: tuple[float, ...] | None = None
    """The shares of the data set that it is measured with in cache; None: it has no cache, or one without a limit, and
    all shares are the same to it."""
    files_only = ""
    """Why it cannot read from a bucket."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.data = f"{setting.root}/{self.folder}"

    def epoch(self, number: int) -> int:
        """Loads one epoch; returns the number of samples."""
        raise TypeError(f"{type(self).__name__} loads nothing; epoch {number}")

    def close(self) -> None:
        """Frees what has to be freed."""


# ── torch ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Torch(Method):
    """torch's DataLoader over ImageFolder, as everybody has it."""

    workers = WORKERS
    prefetch = 2
    """Batches that each worker makes ahead; torch's own default."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.loader = DataLoader(
            self.data_set(),
            BATCH,
            shuffle=True,
            num_workers=self.workers,
            prefetch_factor=self.prefetch,
            persistent_workers=True,
        )

    def data_set(self) -> Dataset[Any]:
        """Returns the images with their transform."""
        return self.images(view(self.setting.side), default_loader)

    def images(self, transform: Callable[[Any], Any], loader: Callable[[str], Any]) -> Dataset[Any]:
        """Returns the images of the folder or the bucket, opened and transformed."""
        if is_object(self.data):
            loader = _opened if loader is default_loader else loader
            return Objects(files(self.data), transform, loader)
        return ImageFolder(self.data, transform=transform, loader=loader)

    def epoch(self, number: int) -> int:
        """See `Method`."""
        return count(self.loader, self.setting.side)


class Objects(Dataset[Any]):
    """The data set that a user of boto3 writes.

    Args:
        samples: (URL, class) of each.
        transform: Applied to the image.
        loader: URL → image.
    """

    def __init__(
        self, samples: list[tuple[str, int]], transform: Callable[[Any], Any], loader: Callable[[str], Any]
    ) -> None:
        self._samples, self._transform, self._loader = samples, transform, loader

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        address, label = self._samples[index]
        return self._transform(self._loader(address)), label


def _opened(address: str) -> Image.Image:
    return decode(read(address))


def torch_with(num_workers: int, prefetch_factor: int = 2, base: type[Torch] = Torch) -> type[Torch]:
    """Returns a DataLoader with other settings."""
    name = f"{base.__name__}{num_workers}by{prefetch_factor}"
    return type(name, (base,), {"workers": num_workers, "prefetch": prefetch_factor})


class TorchSimple(Torch):
    """The same with simplejpeg, the decoder that ShadeLoader uses."""

    def data_set(self) -> Dataset[Any]:
        """See `Torch`."""
        return self.images(view(self.setting.side), _simple_image)


class TorchTensors(Torch):
    """The same with torchvision's own decoder and its transforms v2, on tensors."""

    def data_set(self) -> Dataset[Any]:
        """See `Torch`."""
        from torchvision.transforms import v2

        steps = v2.Compose(
            [
                v2.RandomResizedCrop(self.setting.side, antialias=True),
                v2.RandomHorizontalFlip(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD),
            ]
        )
        return self.images(steps, _tensor)


def _tensor(address: str) -> torch.Tensor:
    from torchvision.io import ImageReadMode, decode_image

    content = torch.frombuffer(bytearray(read(address)), dtype=torch.uint8) if is_object(address) else address
    return decode_image(content, mode=ImageReadMode.RGB)


def _simple_image(address: str) -> Image.Image:
    return simple(read(address))


def simple(content: bytes) -> Image.Image:
    """JPEG bytes → RGB image, by simplejpeg."""
    import simplejpeg

    return Image.fromarray(simplejpeg.decode_jpeg(content, "RGB"))


# ── ours ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Ours(Method):
    """ShadeDataset and ShadeSampler in torch's DataLoader."""

    shares: tuple[float, ...] | None = (0.2,)
    mode = "uniform"
    cached_format = "encoded"
    workers = WORKERS

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        from shade import RemoteImageFolder, ShadeDataset, ShadeSampler

        self.dataset = ShadeDataset(
            RemoteImageFolder(self.data) if is_object(self.data) else ImageFolder(self.data),
            cache="local://" if setting.share else None,
            working_set_fraction=setting.share or 1.0,
            form=self.cached_format if setting.share else "encoded",
            transform=view(setting.side),
        )
        self.sampler = ShadeSampler(self.dataset, batch_size=BATCH, mode=self.mode)
        self.losses = torch.distributions.LogNormal(0.0, 1.0).sample((len(self.dataset),))
        self.loader = self.make()

    def make(self) -> Iterable[Any]:
        """The loader."""
        return DataLoader(self.dataset, BATCH, sampler=self.sampler, num_workers=self.workers, persistent_workers=True)

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


class Ours16(Ours):
    """The same with 16 workers."""

    workers = 16


class OursThreads(Ours):
    """ShadeLoader in the DataLoader's place."""

    shares = SHARES

    def make(self) -> Iterable[Any]:
        """See `Ours`."""
        from shade import ShadeLoader

        return ShadeLoader(self.dataset, batch_size=BATCH, sampler=self.sampler, num_workers=WORKERS)


class OursThreadsUnbiased(OursThreads):
    """The same, drawing 70 % of the samples an epoch."""

    shares = (0.2,)
    mode = "unbiased"


class OursThreadsPillow(OursThreads):
    """ShadeLoader with torchvision's decoder, Pillow, in place of the one that it finds."""

    shares = (0.0,)

    def __init__(self, setting: Setting) -> None:
        from shade.data._decode import jpeg

        sys.modules["simplejpeg"] = None  # type: ignore[assignment]
        jpeg.open_turbo = lambda: None
        super().__init__(setting)


# ── peers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Mosaic(Method):
    """MosaicML Streaming: MDS shards, a local cache with a limit, shuffled within blocks that fit into it."""

    shares = SHARES[1:]
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
            remote=self.data,
            local=str(setting.scratch / "mds"),
            shuffle=True,
            shuffle_block_size=block,
            num_canonical_nodes=1,
            batch_size=BATCH,
            cache_limit=None if setting.share == 1 else setting.cache_bytes,
            predownload=2 * BATCH,
        )
        for stream in data.streams:  # else forked workers share the connection that the index came by, and mix answers
            stream._downloader.clean_up()
        self.loader = DataLoader(data, BATCH, num_workers=WORKERS, persistent_workers=True)

    def epoch(self, number: int) -> int:
        """See `Method`."""
        return count(self.loader, self.setting.side)


class Lit(Method):
    """LitData: optimised chunks, ``local:`` for network drives, a cache with a limit, its own StreamingDataLoader."""

    shares = SHARES[1:]
    folder = "lit"
    decoder = staticmethod(decode)

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
        from litdata.streaming import downloader

        # What it reads objects with refuses a server without TLS, and there is no option for that.
        getattr(downloader, "_OBSTORE_CLIENT_OPTIONS", {})["allow_http"] = "true"
        data = StreamingDataset(
            self.data if is_object(self.data) else f"local:{self.data}",
            cache_dir=str(setting.scratch / "lit"),
            shuffle=True,
            drop_last=False,
            max_cache_size=setting.cache_bytes,
            transform=_Viewed(setting.side, self.decoder),
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

    def __init__(self, side: int, decoder: Callable[[bytes], Image.Image]) -> None:
        self._transform, self._decode = view(side), decoder

    def __call__(self, row: dict[str, Any]) -> tuple[torch.Tensor, int]:
        return self._transform(self._decode(row["image"])), row["label"]


class LitSimple(Lit):
    """The same with simplejpeg, the decoder that ShadeLoader uses."""

    shares = (0.2,)
    decoder = staticmethod(simple)


class WebData(Method):
    """WebDataset: tar shards in random order, a shuffle buffer of a thousand samples, a local cache of shards."""

    shares = SHARES
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

        # Local paths are never cached; a pipe is, which is how its documentation reads network drives.
        shards = [f"pipe:{command}" for command in self._commands()]
        data = (
            webdataset.WebDataset(
                shards,
                shardshuffle=len(shards),
                cache_dir=str(setting.scratch) if setting.share else None,
                cache_size=setting.cache_bytes,
            )
            .shuffle(1000)
            .to_tuple("jpg", "cls")
            .map_tuple(_Decoded(setting.side), int)
            .batched(BATCH)
        )
        self.loader = webdataset.WebLoader(data, batch_size=None, num_workers=WORKERS, persistent_workers=True)

    def _commands(self) -> list[str]:
        """Returns the command that reads each shard."""
        if not is_object(self.data):
            return [f"cat {path}" for path in sorted(Path(self.data).glob("*.tar"))]
        server = os.environ["AWS_ENDPOINT_URL"]
        return [f"curl -fs {server}/{shard.removeprefix(SCHEME)}" for shard in objects(self.data)]

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
            spdl.io.demux_image(read(self.samples[0][0]))
        except RuntimeError:
            self._stages = self._decode_without, self._collate_without
        else:
            self._stages = self._decode, self._collate

    def _read(self, sample: tuple[str, int]) -> tuple[bytes, int]:
        return read(sample[0]), sample[1]

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


class Grain(Method):
    """Grain: a global shuffle, its default of 16 threads that read, two processes that decode and collate."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        import grain

        self.num_batches = -(-len(files(self.data)) // BATCH)
        data = grain.MapDataset.source(files(self.data)).seed(0).shuffle().repeat().map(_Opened(setting.side))
        batches = data.to_iter_dataset(grain.ReadOptions(num_threads=16, prefetch_buffer_size=500))
        batches = batches.batch(BATCH, batch_fn=_stacked)
        # One iterator for all epochs: otherwise each of them starts the processes again.
        self.batches = iter(batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=WORKERS)))

    def epoch(self, number: int) -> int:
        """See `Method`."""
        return count(itertools.islice(self.batches, self.num_batches), self.setting.side)

    def close(self) -> None:
        """Ends the processes."""
        with contextlib.suppress(FileNotFoundError):  # Grain 0.2.18 may remove a segment of shared memory twice
            self.batches.close()


class _Opened:
    """(path, class) → (transformed image, class)."""

    def __init__(self, side: int) -> None:
        self._transform = view(side)

    def __call__(self, sample: tuple[str, int]) -> tuple[Any, int]:
        return self._transform(_opened(sample[0])).numpy(), sample[1]


def _stacked(samples: list[tuple[Any, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    import numpy as np

    images, labels = zip(*samples, strict=True)
    return torch.from_numpy(np.stack(images)), torch.tensor(labels)


class Dali(Method):
    """DALI on the CPU: its own reader of files, decoding of the crop alone, two threads."""

    files_only = "its reader waits for each file; the row below reads objects"

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

        self.samples = files(self.data)
        pipeline = self.pipeline()
        pipeline.build()
        self.loader = DALIGenericIterator(
            [pipeline],
            ["image", "label"],
            size=-(-len(self.samples) // BATCH) * BATCH,
            last_batch_policy=LastBatchPolicy.FILL,
            auto_reset=True,
        )

    def contents(self) -> Any:
        """The operator that reads: encoded images and classes."""
        from nvidia.dali import fn

        return fn.readers.file(
            files=[path for path, _ in self.samples],
            labels=[label for _, label in self.samples],
            shuffle_after_epoch=True,
            pad_last_batch=True,
            prefetch_queue_depth=4,
            name="Reader",
        )

    def pipeline(self) -> Any:
        """From files to batches."""
        from nvidia.dali import fn, pipeline_def, types

        side = self.setting.side

        @pipeline_def(batch_size=BATCH, num_threads=DECODE_THREADS, device_id=None, **self.words())
        def steps() -> Any:
            content, label = self.contents()
            image = fn.decoders.image_random_crop(content, device="cpu", random_area=(0.08, 1.0))
            image = fn.resize(image, resize_x=side, resize_y=side)
            image = fn.crop_mirror_normalize(
                image,
                dtype=types.FLOAT,
                output_layout="CHW",
                mean=[255 * each for each in MEAN],
                std=[255 * each for each in STD],
                mirror=fn.random.coin_flip(),
            )
            return image, label

        return steps()

    def words(self) -> dict[str, Any]:
        """Further arguments of the pipeline."""
        return {}

    def epoch(self, number: int) -> int:
        """See `Method`."""
        count((batch[0] for batch in self.loader), self.setting.side)
        return len(self.samples)


class DaliParallel(Dali):
    """DALI with `external_source`, whose 16 processes read at the same time; its own reader reads file after file."""

    files_only = ""

    def words(self) -> dict[str, Any]:
        """See `Dali`."""
        return {"py_num_workers": 16, "py_start_method": "fork"}

    def contents(self) -> Any:
        """See `Dali`."""
        from nvidia.dali import fn

        source = _Contents(self.samples)
        return fn.external_source(source, num_outputs=2, batch=False, parallel=True, prefetch_queue_depth=4)


class _Contents:
    """DALI's sample → (the file's bytes, class), in another order each epoch."""

    def __init__(self, samples: list[tuple[str, int]]) -> None:
        self._samples = samples
        self._order: list[tuple[str, int]] = []
        self._epoch = -1

    def __call__(self, info: Any) -> tuple[Any, Any]:
        import numpy as np

        if info.iteration >= -(-len(self._samples) // BATCH):
            raise StopIteration
        if info.epoch_idx != self._epoch:
            self._order, self._epoch = shuffled(self._samples, info.epoch_idx), info.epoch_idx
        path, label = self._order[info.idx_in_epoch % len(self._order)]
        return np.frombuffer(read(path), dtype=np.uint8), np.array([label])


class Ffcv(Method):
    """FFCV: one file, compiled pipelines; its own cache where not all fits, the page cache where it does."""

    shares = (SHARES[1], 1.0)
    folder = "ffcv"
    files_only = "reads one local file"

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
            f"{self.data}/images.beton",
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
    files_only = "load_from_disk copies the whole bucket to the local disk first"

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

        data = datasets.load_from_disk(self.data).with_transform(_Transformed(setting.side))
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
    **{f"torch-{n}": (f"torch DataLoader, {n} workers", torch_with(n)) for n in (2, 4, 8, 16, 32)},
    **{f"torch-{n}-deep": (f"torch DataLoader, {n} workers, prefetch 8", torch_with(n, 8)) for n in (2, 16)},
    **{f"torch-{n}-simplejpeg": (f"torch, {n} workers, simplejpeg", torch_with(n, 2, TorchSimple)) for n in (2, 16)},
    **{f"torch-{n}-v2": (f"torch, {n} workers, tensors and v2", torch_with(n, 2, TorchTensors)) for n in (2, 16)},
    "mosaic": ("MosaicML Streaming", Mosaic),
    "litdata": ("LitData", Lit),
    "litdata-simplejpeg": ("LitData, simplejpeg", LitSimple),
    "webdataset": ("WebDataset", WebData),
    "spdl": ("SPDL", Spdl),
    "grain": ("Grain", Grain),
    "dali": ("DALI on the CPU", Dali),
    "dali-external": ("DALI on the CPU, external_source", DaliParallel),
    "ffcv": ("FFCV", Ffcv),
    "huggingface": ("HF datasets", HuggingFace),
    "shade": ("**shade**, DataLoader, 2 workers", Ours),
    "shade-16": ("**shade**, DataLoader, 16 workers", Ours16),
    "shadeloader": ("**ShadeLoader**", OursThreads),
    "shadeloader-pillow": ("**ShadeLoader**, Pillow", OursThreadsPillow),
    "shadeloader-unbiased": ("**ShadeLoader**, `unbiased`", OursThreadsUnbiased),
}
"""Name → (name in the table, class)."""
