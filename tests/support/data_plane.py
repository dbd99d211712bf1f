"""What the data-plane tests share: pictures of every kind, an origin that counts across processes, and a training loop.

`train` is the loop of a user, with losses that are a pure function of the sample, so that two runs that see the same
samples report the same scores. It runs here, or as the ranks of a gloo world in processes of their own (`train_ranks`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder

from shade import ShadeDataset, ShadeSampler
from shade.cache import admission, breaker
from shade.data._origin.origin import FileOrigin, FileOrRange
from shade.policy.simulator import SimulationResult, simulate
from shade.policy.trace import Trace

Hook = Callable[[int], None]
"""Called with the number of steps done, after each."""


class Reversed(Dataset[Any]):
    """A data set of the user's own around another: the last sample comes first."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[len(self) - 1 - index]


def make_pictures(root: Path, num_samples: int, *, side: int = 10, mixed: bool = False) -> Path:
    """An ImageFolder of two classes; all files of one size, or of very different ones."""
    rng = np.random.default_rng(num_samples)
    for number in range(num_samples):
        folder = root / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        edge = int(side * rng.lognormal(0.0, 0.6)) + 2 if mixed else side
        pixels = rng.integers(0, 256, (edge, edge, 3), dtype=np.uint8)
        # BMP is not compressed: the same size for the same number of pixels.
        Image.fromarray(pixels).save(folder / f"{number:05d}.bmp")
    return root


def make_zoo(root: Path) -> Path:
    """One file of every kind that an image folder may hold."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (17, 23, 4), dtype=np.uint8)
    photo = Image.fromarray(pixels[..., :3])
    kinds: dict[str, tuple[Image.Image, dict[str, Any]]] = {
        "rgb.png": (photo, {}),
        "grey.png": (photo.convert("L"), {}),
        "grey-alpha.png": (photo.convert("LA"), {}),
        "palette.png": (photo.quantize(32), {}),
        "palette-transparent.png": (photo.quantize(16), {"transparency": 3}),
        "rgba.png": (Image.merge("RGBA", [*photo.split(), photo.convert("L")]), {}),
        "bits.png": (photo.convert("1"), {}),
        "sixteen.png": (Image.fromarray(rng.integers(0, 2**16, (9, 9), dtype=np.uint16)), {}),
        "rgb.jpg": (photo, {"quality": 30}),
        "grey.jpg": (photo.convert("L"), {}),
        "cmyk.jpg": (photo.convert("CMYK"), {}),
        "progressive.jpg": (photo, {"progressive": True, "subsampling": 0}),
        "rgb.bmp": (photo, {}),
        "rgb.webp": (photo, {"lossless": True}),
        "rgb.tiff": (photo, {}),
    }
    for name, (image, options) in kinds.items():
        folder = root / name.partition(".")[2]
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / name, **options)
    return root


def to_tensor(image: Image.Image) -> torch.Tensor:
    """All pixels, comparable."""
    return torch.from_numpy(np.asarray(image.resize((4, 4)), dtype=np.uint8).copy())


class CountingOrigin(FileOrigin):
    """Writes each read into a file that all processes share; may be slow."""

    def __init__(self, log: str, seconds: float = 0.0) -> None:
        super().__init__()
        self.log, self.seconds = log, seconds

    def __getstate__(self) -> dict[str, Any]:
        return {"log": self.log, "seconds": self.seconds}

    def _read_first(self, paths: Sequence[FileOrRange], sizes: Sequence[int]) -> list[bytes | OSError]:
        time.sleep(self.seconds)
        (content,) = super()._read_first(paths[:1], sizes[:1])
        self._mean_seconds = max(self._mean_seconds, self.seconds)  # what the wait would have taught it
        if not isinstance(content, OSError):
            descriptor = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(descriptor, b"%d %s\n" % (len(content), str(paths[0]).encode()))
            os.close(descriptor)
        return [content]

    @staticmethod
    def total(log: Path) -> tuple[int, int]:
        """Reads, and bytes."""
        sizes = [int(line.split()[0]) for line in log.read_text().splitlines()] if log.exists() else []
        return len(sizes), sum(sizes)


@dataclass(frozen=True)
class Job:
    """One training run."""

    root: str
    """An image folder; ``{rank}`` in it is filled in."""
    url: str | None
    epochs: int = 4
    batch_size: int = 16
    workers: int = 0
    context: str | None = None
    persistent: bool = False
    mode: str = "unbiased"
    keep: float | None = None
    fraction: float = 0.2
    policy: str | None = None
    drop_last: bool = False
    log: str | None = None
    """Where the origin counts; None: the plain origin."""
    seconds: float = 0.0
    """What one read of the origin takes."""
    stop_after: int | None = None
    """Steps."""
    seed: int = 0
    follow: str | None = None
    disk: str | None = None
    """A folder and its capacity; ``{rank}`` in it is filled in."""
    is_patient: bool = True
    """With a patience that does not ask what is worth while, for tests that count: on a crowded machine files in memory
    are faster than any cache, and a neighbour is late. False: as users have it."""


@dataclass
class Outcome:
    """What one rank saw."""

    steps: list[tuple[int, ...]] = field(default_factory=list)
    """(epoch, sample indices …) by step."""
    pixels: list[int] = field(default_factory=list)
    """A checksum by step."""
    ledgers: list[dict[str, Any]] = field(default_factory=list)
    """One an epoch."""
    totals: dict[str, Any] = field(default_factory=dict)
    orders: list[Any] = field(default_factory=list)
    sizes: Any = None
    capacity_bytes: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    """One an epoch."""

    def simulated(self, job: Job, policy: str, world_size: int = 1) -> SimulationResult:
        """The same trace, through a policy without a store."""
        trace = Trace(self.sizes, tuple(self.orders), job.batch_size * world_size)
        return simulate(trace, policy, self.capacity_bytes)


def loss_of(indices: torch.Tensor) -> torch.Tensor:
    """A pure function of the sample, with a heavy tail."""
    return (((indices * 2654435761) % 1000).float() / 1000) ** 4 * 8 + 0.05


def train(job: Job, rank: int = 0, world_size: int = 1, hook: Hook | None = None, state: Any = None) -> Outcome:
    """Trains; no model, but everything that the data plane sees of one."""
    outcome = Outcome()
    with contextlib.ExitStack() as stack:
        if job.is_patient:
            stack.enter_context(mock.patch.object(breaker, "SLOW_SECONDS", 5.0))
            stack.enter_context(mock.patch.object(admission, "LEAST_PATIENCE_SECONDS", admission.MOST_PATIENCE_SECONDS))
        dataset = ShadeDataset(
            ImageFolder(job.root.format(rank=rank)),
            cache=job.url,
            disk=None if job.disk is None else job.disk.format(rank=rank),
            working_set_fraction=job.fraction,
            policy=job.policy,
            transform=to_tensor,
        )
        stack.callback(dataset.close)
        if job.log is not None:
            dataset.source._origin = CountingOrigin(job.log, job.seconds)  # type: ignore[attr-defined]
        sampler = ShadeSampler(
            dataset,
            num_replicas=world_size,
            rank=rank,
            batch_size=job.batch_size,
            mode=job.mode,
            keep=job.keep,
            drop_last=job.drop_last,
            seed=job.seed,
            follow=job.follow,
        )
        stack.callback(sampler.close)
        if state is not None:
            sampler.load_state_dict(state)
        loader = DataLoader(
            dataset,
            batch_size=job.batch_size,
            sampler=sampler,
            num_workers=job.workers,
            multiprocessing_context=job.context,
            persistent_workers=job.persistent,
        )
        _loop(job, loader, sampler, dataset, outcome, hook)
        del loader
        outcome.state = sampler.state_dict()
        if dataset.cache is not None:
            outcome.totals = dataset.cache.residency.totals().as_dict()
    return outcome


def _loop(
    job: Job, loader: Any, sampler: ShadeSampler, dataset: ShadeDataset, outcome: Outcome, hook: Hook | None
) -> None:
    cache = dataset.cache
    if cache is not None:
        outcome.sizes, outcome.capacity_bytes = cache.size_bytes_N, cache.capacity_bytes
        before = cache.residency.totals()
    for epoch in range(sampler.epoch, job.epochs):
        sampler.set_epoch(epoch)
        begun = time.perf_counter()
        for pixels, targets, indices in loader:
            sampler.weights(indices)
            sampler.report(indices, loss_of(indices))
            outcome.steps.append((epoch, *indices.tolist()))
            outcome.pixels.append(zlib.crc32(pixels.numpy().tobytes() + targets.numpy().tobytes()))
            if hook is not None:
                hook(len(outcome.steps))
            if job.stop_after is not None and len(outcome.steps) >= job.stop_after:
                return
        outcome.seconds.append(time.perf_counter() - begun)
        outcome.orders.append(sampler.order_of(epoch).copy())
        if cache is not None:
            now = cache.residency.totals()
            outcome.ledgers.append((now - before).as_dict())
            before = now


def _rank(job: Job, rank: int, world_size: int, meeting: str, results: str, hook: Hook | None, state: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    try:
        outcome = train(job, rank, world_size, hook if rank == 0 else None, state)
        Path(f"{results}.{rank}").write_bytes(pickle.dumps(outcome))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def train_ranks(job: Job, world_size: int, folder: Path, hook: Hook | None = None, state: Any = None) -> list[Outcome]:
    """Trains as the ranks of a gloo world, each a forked process of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("fork")
    meeting, results = folder / "meeting", folder / "result"
    ranks = [
        context.Process(target=_rank, args=(job, rank, world_size, str(meeting), str(results), hook, state))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(240)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        if process.is_alive():
            process.kill()
            process.join()
    assert codes == [0] * world_size, codes
    return [pickle.loads(Path(f"{results}.{rank}").read_bytes()) for rank in range(world_size)]


def global_steps(ranks: list[Outcome]) -> list[tuple[int, ...]]:
    """The global batches of all ranks together, in rank order."""
    return [
        (parts[0][0], *(index for part in parts for index in part[1:]))
        for parts in zip(*(rank.steps for rank in ranks), strict=True)
    ]
