"""Small samples: which loader brings most of them a second into the training process, and at what processor time?

Question
    A sample of one to three kilobytes takes microseconds to read and to decode, so that what a loader does for every
    sample decides. How fast are ShadeLoader, a DataLoader over ShadeDataset, torch's DataLoader alone, and the loaders
    that others use?

Method
    Three kinds of samples, 10,000 of each, on a local disk:

    * *JPEG*: files of 32 × 32 pixels in class folders → random crop, flip, normalise: float32 (3, 32, 32), class;
    * *tensors*: uint8 (3, 32, 32) and a class, copied out of a mapped array; no transform;
    * *tokens*: int64 (256,), from a mapped array of uint16; no transform.

    Batches of 64, two workers each, no training step. shade keeps all samples in the memory of a private server, or a
    fifth of them, or none (``cache=None``); its sampler is in mode ``uniform``, and the loop makes the calls of a
    training loop (`set_epoch`, `weights`, `report`). Hugging Face datasets, LitData and MosaicML Streaming read copies
    that their own writers made; all of them may keep everything on the disk. A row whose package is missing says so.

    Each row is a process of its own that lives through the run. After an epoch to warm up, rounds are interleaved: an
    epoch of every row, then all again. Samples a second are medians over the rounds, with the lowest and the highest;
    processor time is that of the process and everything that it started, a private server included. Each batch is
    checked for its shape and dtype.

Command
    python benchmarks/bench_small_samples.py --out benchmarks/results      8 minutes on two idle cores
    python benchmarks/bench_small_samples.py --kinds tokens --rounds 3     some of it

    pip install litdata mosaicml-streaming datasets

Figures: benchmarks/results/small-samples.md. Decision 0042 has what follows from them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loader_epochs import cpu_seconds
from loader_methods import BATCH, WORKERS, decode, files, view
from measures import Child, publish
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder

SIDE, TOKENS, CLASSES = 32, 256, 10
PACKAGES = ("torch", "numpy", "numba", "datasets", "litdata", "mosaicml-streaming")
SHAPES = {
    "JPEG": ((3, SIDE, SIDE), torch.float32),
    "tensors": ((3, SIDE, SIDE), torch.uint8),
    "tokens": ((TOKENS,), torch.int64),
}
"""Of a sample, by kind."""


class Tensors(Dataset[Any]):
    """Pictures in a mapped array, and their classes."""

    def __init__(self, folder: Path) -> None:
        self.pictures_NCHW = np.load(folder / "pictures.npy", mmap_mode="r")
        self.targets = np.load(folder / "classes.npy").tolist()

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(self.pictures_NCHW[index].copy()), self.targets[index]


class Tokens(Dataset[Any]):
    """Chunks of a mapped array of tokens."""

    def __init__(self, folder: Path) -> None:
        self.tokens_NT = np.load(folder / "tokens.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.tokens_NT)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self.tokens_NT[index].astype(np.int64))


class Viewed:
    """A row of bytes → (transformed image, class)."""

    def __init__(self) -> None:
        self._view = view(SIDE)

    def __call__(self, row: dict[str, Any]) -> tuple[torch.Tensor, int]:
        return self._view(decode(row["sample"])), int(row["label"])


def make(folder: Path, kind: str, num_samples: int) -> None:
    """Writes the samples of a kind."""
    generator = np.random.default_rng(0)
    if kind == "tokens":
        np.save(folder / "tokens.npy", generator.integers(0, 50_000, (num_samples, TOKENS)).astype(np.uint16))
        return
    coarse = generator.integers(0, 256, (num_samples, 8, 8, 3), dtype=np.uint8)
    pictures = [np.asarray(Image.fromarray(each).resize((SIDE, SIDE))) for each in coarse]
    classes = generator.integers(0, CLASSES, num_samples)
    if kind == "tensors":
        np.save(folder / "pictures.npy", np.stack(pictures).transpose(0, 3, 1, 2))
        np.save(folder / "classes.npy", classes)
        return
    for number, (picture, label) in enumerate(zip(pictures, classes.tolist(), strict=True)):
        path = folder / "images" / f"class{label}" / f"{number:06d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path, quality=90)


def data_of(folder: Path, kind: str) -> Any:
    """Returns the data set of a kind, without transforms."""
    if kind == "JPEG":
        return ImageFolder(str(folder / "images"))
    return Tensors(folder) if kind == "tensors" else Tokens(folder)


def rows_of(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    """Yields what a converter writes, in random order."""
    if kind == "JPEG":
        listed = files(folder / "images")
        for path, label in random.Random(0).sample(listed, len(listed)):
            yield {"sample": Path(path).read_bytes(), "label": label}
        return
    data = data_of(folder, kind)
    for number in range(len(data)):
        item = data[number]
        yield {"sample": item.numpy()} if kind == "tokens" else {"sample": item[0].numpy(), "label": item[1]}


# ── the rows ────────────────────────────────────────────────────────────────────────────────────────────────────────


def plain(folder: Path, kind: str, scratch: Path) -> Iterator[Any]:
    """torch's DataLoader."""
    data = data_of(folder, kind)
    if kind == "JPEG":
        data.transform = view(SIDE)
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True)
    while True:
        yield from loader
        yield None


def shade_row(share: float | None, *, threads: bool) -> Callable[[Path, str, Path], Iterator[Any]]:
    """Returns a row of ours: the cached share (None: no cache), with ShadeLoader or DataLoader."""

    def batches(folder: Path, kind: str, scratch: Path) -> Iterator[Any]:
        from shade import ShadeDataset, ShadeLoader, ShadeSampler

        data = ShadeDataset(
            data_of(folder, kind),
            cache=None if share is None else "local://",
            working_set_fraction=share or 1.0,
            transform=view(SIDE) if kind == "JPEG" else None,
        )
        sampler = ShadeSampler(data, batch_size=BATCH, mode="uniform")
        loader: Any = (
            ShadeLoader(data, BATCH, sampler=sampler, num_workers=WORKERS, persistent_workers=True)
            if threads
            else DataLoader(data, BATCH, sampler=sampler, num_workers=WORKERS, persistent_workers=True)
        )
        losses = torch.distributions.LogNormal(0.0, 1.0).sample((len(data),))
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            for batch in loader:
                indices = batch[-1]
                sampler.weights(indices)
                sampler.report(indices, losses[indices])
                yield batch
            epoch += 1
            yield None

    return batches


def litdata(folder: Path, kind: str, scratch: Path) -> Iterator[Any]:
    """LitData: optimised chunks and its own StreamingDataLoader."""
    from litdata import StreamingDataLoader, StreamingDataset, optimize

    rows = list(rows_of(folder, kind))
    if kind != "JPEG":
        rows = [row | {"sample": torch.from_numpy(row["sample"].copy())} for row in rows]
    optimize(fn=rows.__getitem__, inputs=list(range(len(rows))), output_dir=str(scratch / "lit"), chunk_bytes="4MB",
             num_workers=1)  # fmt: skip
    data = StreamingDataset(
        str(scratch / "lit"), shuffle=True, drop_last=False, transform=Viewed() if kind == "JPEG" else None
    )
    loader = StreamingDataLoader(data, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True)
    while True:
        yield from loader
        yield None


def mosaic(folder: Path, kind: str, scratch: Path) -> Iterator[Any]:
    """MosaicML Streaming: MDS shards."""
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    shape, dtype = SHAPES[kind]
    sample = "bytes" if kind == "JPEG" else f"ndarray:{str(dtype)[6:]}:{','.join(map(str, shape))}"
    columns = {"sample": sample} if kind == "tokens" else {"sample": sample, "label": "int"}
    with MDSWriter(out=str(scratch / "mds"), columns=columns, size_limit=4 << 20) as writer:
        for row in rows_of(folder, kind):
            writer.write(row)
    transform = Viewed()

    class Samples(StreamingDataset):
        def __getitem__(self, at: Any) -> Any:
            row = super().__getitem__(at)
            return transform(row) if kind == "JPEG" else row

    data = Samples(local=str(scratch / "mds"), shuffle=True, num_canonical_nodes=1, batch_size=BATCH)
    loader = DataLoader(data, BATCH, num_workers=WORKERS, persistent_workers=True)
    while True:
        yield from loader
        yield None


def hugging_face(folder: Path, kind: str, scratch: Path) -> Iterator[Any]:
    """Hugging Face datasets: Arrow files, mapped into memory, in torch's DataLoader."""
    import datasets

    shape, dtype = SHAPES[kind]
    name = str(dtype)[6:]
    sample: Any = datasets.Value("binary")
    if kind != "JPEG":
        sample = datasets.Array3D(shape, name) if len(shape) == 3 else datasets.Sequence(datasets.Value(name), TOKENS)
    features = {"sample": sample} | ({} if kind == "tokens" else {"label": datasets.Value("int64")})
    made = datasets.Dataset.from_generator(
        lambda: rows_of(folder, kind), features=datasets.Features(features), cache_dir=str(scratch / "hf")
    )
    viewed = Viewed()

    def transformed(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        images = [viewed({"sample": content, "label": 0})[0] for content in rows["sample"]]
        return {"sample": images, "label": rows["label"]}

    data = made.with_transform(transformed) if kind == "JPEG" else made.with_format("torch", dtype=dtype)
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=WORKERS, persistent_workers=True)
    while True:
        yield from loader
        yield None


ROWS: dict[str, Callable[[Path, str, Path], Iterator[Any]]] = {
    "ShadeLoader, all cached": shade_row(1.0, threads=True),
    "ShadeLoader, 20 % cached": shade_row(0.2, threads=True),
    "ShadeLoader, no cache": shade_row(None, threads=True),
    "ShadeDataset in a DataLoader, all cached": shade_row(1.0, threads=False),
    "ShadeDataset in a DataLoader, 20 % cached": shade_row(0.2, threads=False),
    "ShadeDataset in a DataLoader, no cache": shade_row(None, threads=False),
    "torch DataLoader": plain,
    "Hugging Face datasets": hugging_face,
    "LitData": litdata,
    "MosaicML Streaming": mosaic,
}


class Row:
    """One row, in a process of its own."""

    def __init__(self, name: str, folder: Path, kind: str, scratch: Path) -> None:
        torch.set_num_threads(1)
        scratch.mkdir(parents=True)
        self._kind, self._batches = kind, ROWS[name](folder, kind, scratch)

    def epoch(self) -> dict[str, Any]:
        """Loads an epoch; returns its samples, seconds, and seconds of processor time."""
        shape, dtype = SHAPES[self._kind]
        num_samples, begun, cpu = 0, time.perf_counter(), cpu_seconds()
        for batch in self._batches:
            if batch is None:
                break
            samples = batch if isinstance(batch, torch.Tensor) else None
            if samples is None:
                samples = batch["sample"] if isinstance(batch, dict) else batch[0]
            if samples.shape[1:] != shape or samples.dtype != dtype:
                raise ValueError(f"expected {dtype} (B, {shape}), got {samples.dtype} {tuple(samples.shape)}")
            num_samples += len(samples)
        seconds = time.perf_counter() - begun
        return {"samples": num_samples, "seconds": seconds, "cpu": cpu_seconds() - cpu}


def measure(kind: str, names: list[str], rounds: int, num_samples: int) -> list[str]:
    """Measures all rows of a kind; returns the lines of its table."""
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        make(folder, kind, num_samples)
        children, missing, seen = {}, {}, {name: list[dict[str, Any]]() for name in names}
        for number, name in enumerate(names):
            children[name] = Child(Row, name, folder, kind, folder / f"row{number}")
            try:
                children[name].call("epoch")
            except RuntimeError as error:
                missing[name] = str(error).splitlines()[-1]
                children.pop(name).close()
        for _ in range(rounds):
            for name, child in children.items():
                seen[name].append(child.call("epoch"))
        for child in reversed(list(children.values())):  # a child holds the pipes of those before it
            child.close()
    lines = [
        f"## {kind}, {num_samples:,} samples",
        "",
        "| loader | samples/s, median | lowest – highest | CPU µs a sample |",
    ]
    lines.append("|---|---|---|---|")
    for name, epochs in seen.items():
        if name in missing:
            lines.append(f"| {name} | – | {missing[name]} | |")
            continue
        rates = [each["samples"] / each["seconds"] for each in epochs]
        cpu = statistics.median(1e6 * each["cpu"] / each["samples"] for each in epochs)
        spread = f"{min(rates):,.0f} – {max(rates):,.0f}"
        lines.append(f"| {name} | {statistics.median(rates):,.0f} | {spread} | {cpu:.0f} |")
    return [*lines, ""]


def main() -> None:
    """Measures and prints a table a kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--rows", nargs="+", default=[""], help="rows whose names contain one of these words")
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for small-samples.md")
    args = parser.parse_args()
    os.environ["HF_DATASETS_OFFLINE"] = "1"
    names = [name for name in ROWS if any(word in name for word in args.rows)]
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} –")
    lines = [", ".join(versions) + f"; {args.rounds} rounds", ""]
    for kind in args.kinds:
        lines += measure(kind, names, args.rounds, args.samples)
    publish("small-samples", "Small samples", lines, args.out)


if __name__ == "__main__":
    main()
