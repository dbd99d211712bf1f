"""What ShadeLoader's own threads cost beside SPDL's pipeline engine, with the same work inside.

Question
    A kept library is to be preferred where it does not lose by more than a tenth. Does building the loader on SPDL's
    `PipelineBuilder` lose, against the 150 lines of `shade.data._loader.pipeline`?

Method
    The same fetch and the same rendering (`shade.data._loader.batch_parts.FusedParts`) over JPEGs of 400 × 300 pixels
    on local disk, without a cache, batches of 64, RandomResizedCrop 224, flip, normalise; two workers. Three engines:
    ours; SPDL with one stage for fetching and one that renders a batch a thread; SPDL with parts of a batch as items,
    as ours cuts them (the source yields parts, a last stage puts batches together). SPDL's output is in input order.
    Rounds interleave the engines; an epoch each to warm up; medians and the spread over the rounds. An engine with no
    work at all in it (empty batches) shows what a batch costs in hand-over alone.

    The machine has to be idle: both engines use every core.

Command
    python benchmarks/bench_loader_engine.py [--images 2000] [--rounds 5]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from measures import publish
from PIL import Image
from torchvision import transforms
from torchvision.datasets import ImageFolder

from shade import ShadeDataset
from shade.data._loader.batch_parts import BatchBuffers, FusedParts
from shade.data._loader.pipeline import LoaderPipeline

BATCH, WORKERS, DEPTH, FETCHERS = 64, 2, 4, 2


def make_images(folder: Path, num_images: int) -> None:
    """Writes JPEGs of smooth noise, in ten classes."""
    generator = np.random.default_rng(0)
    for number in range(num_images):
        coarse = Image.fromarray(generator.integers(0, 256, (38, 50, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((400, 300), Image.Resampling.BICUBIC)).astype(int)
        pixels = (smooth + generator.integers(-12, 12, smooth.shape)).clip(0, 255).astype(np.uint8)
        path = folder / f"class{number % 10}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path, quality=85)


class Work:
    """What an engine does with a batch: everything, or nothing."""

    def __init__(self, folder: Path, *, empty: bool) -> None:
        view = transforms.Compose(
            [
                transforms.RandomResizedCrop(224),
                transforms.RandomHorizontalFlip(),
                transforms.ToTensor(),
                transforms.Normalize([0.5] * 3, [0.25] * 3),
            ]
        )
        self.reader = ShadeDataset(ImageFolder(str(folder)), cache=None, transform=view)._reader
        self.empty, self.buffers = empty, BatchBuffers(DEPTH + 2, pinned=False)
        count = len(self.reader) // BATCH
        order = np.random.default_rng(1).permutation(len(self.reader)).tolist()
        self.batches = [order[BATCH * number : BATCH * (number + 1)] for number in range(count)]
        self.batches *= 20 if empty else 1
        self.fetchers = [self.reader.for_worker(number) for number in range(FETCHERS)]
        self.workers = [self.reader.for_worker(FETCHERS + number) for number in range(WORKERS)]

    def begin(self, fetcher: int, indices: Any) -> Any:
        """A batch's parts."""
        if self.empty:
            return Empty()
        return FusedParts(self.workers, self.fetchers[fetcher], indices, self.buffers, 1, collated=True)


class Empty:
    """Eight parts of nothing."""

    num_parts = 8

    def run(self, part: int, worker: int) -> None:
        """Nothing."""

    def finish(self) -> int:
        """Nothing."""
        return 0


def ours(work: Work) -> Iterator[Any]:
    """shade.data._loader.pipeline."""
    pipeline = LoaderPipeline(work.begin, FETCHERS, WORKERS)
    order = iter(work.batches)
    jobs = [pipeline.submit(indices) for _, indices in zip(range(DEPTH), order, strict=False)]
    while jobs:
        yield pipeline.wait(jobs.pop(0), None)
        indices = next(order, None)
        if indices is not None:
            jobs.append(pipeline.submit(indices))
    pipeline.close()


def spdl_batches(work: Work) -> Iterator[Any]:
    """SPDL; a batch is rendered by one thread."""
    from spdl.pipeline import PipelineBuilder

    def render(parts: Any) -> Any:
        for part in range(parts.num_parts):
            parts.run(part, 0)
        return parts.finish()

    builder = PipelineBuilder().add_source(work.batches)
    builder = builder.pipe(lambda indices: work.begin(0, indices), concurrency=FETCHERS, output_order="input")
    builder = builder.pipe(render, concurrency=WORKERS, output_order="input").add_sink(1)
    pipeline = builder.build(num_threads=FETCHERS + WORKERS)
    with pipeline.auto_stop():
        yield from pipeline.get_iterator()


def spdl_parts(work: Work) -> Iterator[Any]:
    """SPDL; threads share each batch."""
    from spdl.pipeline import PipelineBuilder

    def run(item: tuple[Any, int]) -> tuple[Any, int]:
        item[0].run(item[1], 0)
        return item

    def cut(indices: Any) -> list[tuple[Any, int]]:
        parts = work.begin(0, indices)
        return [(parts, part) for part in range(parts.num_parts)]

    builder = PipelineBuilder().add_source(work.batches)
    builder = builder.pipe(cut, concurrency=FETCHERS, output_order="input").disaggregate()
    builder = builder.pipe(run, concurrency=WORKERS, output_order="input").add_sink(8)
    pipeline = builder.build(num_threads=FETCHERS + WORKERS)
    with pipeline.auto_stop():
        for parts, part in pipeline.get_iterator():
            if part == parts.num_parts - 1:
                yield parts.finish()


ENGINES: dict[str, Callable[[Work], Iterator[Any]]] = {
    "ours": ours,
    "SPDL, a batch a thread": spdl_batches,
    "SPDL, threads share a batch": spdl_parts,
}


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for loader-engine.md")
    args = parser.parse_args()
    engines = ENGINES
    if find_spec("spdl") is None:
        print("SPDL is not installed (`pip install spdl`): only our engine is measured")
        engines = {"ours": ours}
    with tempfile.TemporaryDirectory() as folder:
        make_images(Path(folder), args.images)
        lines = ["| work | engine | ms a batch, median | lowest – highest |", "|---|---|---|---|"]
        for empty in (False, True):
            work = Work(Path(folder), empty=empty)
            seen: dict[str, list[float]] = {name: [] for name in engines}
            for number in range(args.rounds + 1):
                for name, engine in engines.items():
                    began = time.perf_counter()
                    count = sum(1 for _ in engine(work))
                    assert count == len(work.batches), f"{name} lost batches"
                    if number:
                        seen[name].append(1000 * (time.perf_counter() - began) / count)
            for name, times in seen.items():
                middle, spread = statistics.median(times), f"{min(times):.2f} – {max(times):.2f}"
                lines.append(f"| {'nothing' if empty else 'everything'} | {name} | {middle:.2f} | {spread} |")
    publish("loader-engine", "Three engines for the same work", lines, args.out)


if __name__ == "__main__":
    main()
