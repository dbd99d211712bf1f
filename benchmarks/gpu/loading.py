"""How much longer a step of training is with `ShadeLoader` than with batches that lie on the device already.

A ResNet-50 trains on JPEGs of 256 × 256 that all fit into the cache; crop, flip and normalisation are the usual ones.
An epoch's first steps, in which workers start, are not counted; the others outnumber the batches that a loader has made
ahead. ``uniform`` changes no training. The other row weighs each sample and reports its loss. NVIDIA's DALI decodes on
the GPU, and is measured where it is installed.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import networks
import numpy as np
import torch
from PIL import Image
from torch.nn.functional import cross_entropy
from torchvision import models, transforms
from torchvision.datasets import ImageFolder

from gpu.machine import Machine
from gpu.table import Row, interleaved, rounds, row
from shade import ShadeDataset, ShadeLoader, ShadeSampler

WARM_STEPS = 2
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def make_jpegs(folder: Path, number: int, side: int) -> None:
    """Makes coarse noise in four classes."""

    def make(index: int) -> None:
        path = folder / str(index % 4) / f"{index}.jpg"
        noise = np.random.default_rng(index).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((side, side), Image.Resampling.BICUBIC).save(path, quality=85)

    for name in range(4):
        (folder / str(name)).mkdir()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(make, range(number)))


def dali_batches(folder: Path, batch_size: int, side: int, machine: Machine) -> Iterator[tuple[Any, Any]]:
    """Batches of DALI's pipeline, as its guide for ResNet-50 has it."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIClassificationIterator

    place, decoder = ("gpu", "mixed") if machine.is_gpu else ("cpu", "cpu")

    @pipeline_def(batch_size=batch_size, num_threads=os.cpu_count(), device_id=0 if machine.is_gpu else None, seed=0)
    def pipeline() -> Any:
        files, labels = fn.readers.file(file_root=str(folder), random_shuffle=True, name="Reader")
        images = fn.decoders.image_random_crop(files, device=decoder, output_type=types.RGB)
        images = fn.resize(images, device=place, resize_x=side, resize_y=side)
        return fn.crop_mirror_normalize(
            images,
            device=place,
            dtype=types.FLOAT,
            output_layout="CHW",
            mean=[255 * each for each in MEAN],
            std=[255 * each for each in DEVIATION],
            mirror=fn.random.coin_flip(),
        ), labels

    for (batch,) in DALIClassificationIterator(pipeline(), reader_name="Reader"):
        yield batch["data"], batch["label"].flatten().long().to(machine.device)


def loading(machine: Machine) -> list[Row]:
    """The rows."""
    batch_size, side, stored = machine.sized(64, 8), machine.sized(224, 32), machine.sized(256, 40)
    num_steps = machine.sized(100, 4)
    torch.manual_seed(0)
    network = (models.resnet50() if machine.is_gpu else networks.build("cnn", 4, side)).to(machine.device)
    optimizer = torch.optim.SGD(network.parameters(), 0.01, momentum=0.9)
    view = transforms.Compose(
        [
            transforms.RandomResizedCrop(side),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, DEVIATION),
        ]
    )

    def step(images: torch.Tensor, labels: torch.Tensor, weigh: Callable[[], Any] = lambda: 1) -> torch.Tensor:
        weights = weigh()
        with torch.autocast(machine.device.type, dtype=torch.bfloat16):
            losses = cross_entropy(network(images), labels, reduction="none")
        (losses * weights).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return losses.detach()

    def timed(batches: Iterable[Any], train: Callable[..., Any]) -> float:
        begun, number = 0.0, 0
        for number, batch in enumerate(batches, start=1):
            train(*batch)
            if number == WARM_STEPS:
                machine.wait()
                begun = time.perf_counter()
        machine.wait()
        return (time.perf_counter() - begun) / (number - WARM_STEPS)

    with tempfile.TemporaryDirectory(prefix="shade_gpu_") as name:
        folder = Path(name)
        make_jpegs(folder, batch_size * num_steps, stored)
        epochs = itertools.count()

        def epoch_of(sampler: ShadeSampler, loader: ShadeLoader, train: Callable[..., Any]) -> float:
            sampler.set_epoch(next(epochs))
            return timed(loader, train)

        ways: dict[str, Callable[[], float]] = {}
        data, here = [], []
        for mode in ("uniform", "unbiased"):
            dataset = ShadeDataset(ImageFolder(name, transform=view), cache="memory://", working_set_fraction=1.0)
            sampler = ShadeSampler(dataset, batch_size=batch_size, mode=mode, seed=0, drop_last=True)
            loader = ShadeLoader(dataset, batch_size, sampler=sampler, device=machine.device)
            data.append(dataset)
            here = here or [(images, labels) for images, labels, _ in itertools.islice(loader, 4)]

            def plain(images: Any, labels: Any, indices: Any) -> None:
                step(images, labels)

            def weighed(images: Any, labels: Any, indices: Any, sampler: ShadeSampler = sampler) -> None:
                sampler.report(indices, step(images, labels, lambda: sampler.weights(indices)))

            train = plain if mode == "uniform" else weighed
            ways[mode] = lambda sampler=sampler, loader=loader, train=train: epoch_of(sampler, loader, train)
        resident = list(itertools.islice(itertools.cycle(here), num_steps))
        ways["resident"] = lambda: timed(resident, step)
        dali = "not installed"
        if importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali"):
            ways["dali"] = lambda: timed(dali_batches(folder, batch_size, side, machine), step)
            try:
                dali = f"{1e3 * ways['dali']():.3g} ms"
            except Exception as error:  # noqa: BLE001 - a rival that fails is a row, and our figures stay
                dali = f"failed: {type(error).__name__}: {error}".splitlines()[0].replace("|", "/")
                del ways["dali"]
        # From the third epoch on samples are weighed, so the first two are no rounds.
        for way in ("unbiased", "unbiased"):
            ways[way]()
        found = interleaved(ways, rounds(4, machine.sized(45.0, 2.0)))
        for each in data:
            each.close()
    what, there = f"step of {batch_size} images, ShadeLoader", "batches on the device already"
    return [
        row(f"{what}, uniform", found["uniform"], there, found["resident"], 1.02),
        row(f"{what}, weighed and reported", found["unbiased"], there, found["resident"], 1.02),
        row("step with DALI's pipeline", found["dali"], there, found["resident"])
        if "dali" in found
        else Row("step with DALI's pipeline", dali),
    ]
