"""Paths that need a GPU: each is a function that tells in words what worked, and raises where something is wrong."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import networks
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from PIL import Image
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import ImageFolder

from gpu.gpt import gpt_of
from gpu.loading import make_jpegs
from gpu.machine import Machine
from gpu.ranks import on_ranks
from shade import Checkpointer, GradientEngine, LocalAdamW, ShadeDataset, ShadeLoader, ShadeSampler, SparseSGD
from shade.checkpoint.dcp import ShadeReader, ShadeWriter
from shade.gradient import COMPRESSORS, QUANTISERS
from shade.gradient._compress.compressor import Key
from shade.gradient._compress.device_error_feedback import DeviceErrorFeedback

Path_ = Callable[[Machine], str]


def expect(holds: bool, otherwise: str) -> None:
    """Fails the row with a sentence."""
    if not holds:
        raise AssertionError(otherwise)


@contextlib.contextmanager
def made_dataset(machine: Machine) -> Iterator[ShadeDataset]:
    """A data set over PNGs made for the occasion, in a folder that goes away."""
    generator, side = np.random.default_rng(0), machine.sized(64, 16)
    with tempfile.TemporaryDirectory(prefix="shade_gpu_") as folder:
        for index in range(machine.sized(512, 64)):
            path = Path(folder) / str(index % 4) / f"{index}.png"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(generator.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(path)
        source = ImageFolder(folder, transform=transforms.ToTensor())
        with ShadeDataset(source, cache="local://", working_set_fraction=0.2) as dataset:
            yield dataset


def batch_size(machine: Machine) -> int:
    """Samples a batch."""
    return machine.sized(64, 8)


def amp(name: str) -> Path_:
    """A row that trains a network in mixed precision until its loss has fallen."""

    def path(machine: Machine) -> str:
        torch.manual_seed(0)
        device, size = machine.device, batch_size(machine)
        network = networks.build(machine.sized(name, "cnn"), 10, 32).to(device)
        images, labels = torch.rand(size, 3, 32, 32, device=device), torch.randint(0, 10, (size,), device=device)
        optimizer = torch.optim.Adam(network.parameters(), 1e-3)
        scaler = torch.amp.GradScaler(device.type)
        losses = []
        for _ in range(machine.sized(12, 4)):
            with torch.autocast(device.type, dtype=machine.half):
                loss = F.cross_entropy(network(images), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.detach())
        first, last = float(losses[0]), float(losses[-1])
        expect(last < first, f"the loss went from {first:.3f} to {last:.3f} in {len(losses)} steps on one batch")
        return f"{machine.half}, {len(losses)} steps on one batch: loss {first:.2f} → {last:.2f}"

    return path


def report_without_sync(machine: Machine) -> str:
    """`ShadeSampler.weights` and `report` take what `ShadeLoader` put on the GPU without waiting for the GPU."""
    with made_dataset(machine) as dataset:
        sampler = ShadeSampler(dataset, batch_size=batch_size(machine), seed=0)
        loader = ShadeLoader(dataset, batch_size(machine), sampler=sampler, num_workers=2, device=machine.device)
        num_weighed = 0
        for epoch in range(3):  # weights differ from 1 from the third on
            sampler.set_epoch(epoch)
            for images, _, indices in loader:
                losses = images.flatten(1).mean(1)
                with machine.refusing_syncs():
                    weights = sampler.weights(indices)
                    sampler.report(indices, losses)
                num_weighed += int((weights != 1).sum())
        expect(num_weighed > 0, "no sample of the third epoch has a weight of its own")
    return f"{num_weighed} samples weighed, none of them by a synchronisation"


def pinned_loading(machine: Machine) -> str:
    """Batches come from the cache through workers into pinned memory, and from there to the GPU."""
    with made_dataset(machine) as dataset:
        sampler = ShadeSampler(dataset, batch_size=batch_size(machine), seed=0)
        loader = DataLoader(
            dataset, batch_size=batch_size(machine), sampler=sampler, num_workers=2, pin_memory=machine.is_gpu
        )
        begun, num_samples = time.perf_counter(), 0
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for images, labels, indices in loader:
                expect(images.is_pinned() or not machine.is_gpu, "a batch came back in pageable memory")
                on_device = images.to(machine.device, non_blocking=True)
                weights = sampler.weights(indices).to(machine.device, non_blocking=True)
                sampler.report(indices, on_device.flatten(1).mean(1) * labels.to(machine.device) + weights)
                num_samples += len(indices)
        machine.wait()
        seconds = time.perf_counter() - begun
        expect(num_samples > len(dataset), "two epochs were shorter than one data set")
    return f"{num_samples:,} samples in 2 epochs, {num_samples / seconds:,.0f} per second, workers' start included"


def shade_loader(decode_on: str) -> Path_:
    """A row that loads JPEGs through ShadeLoader onto the GPU, decoded by the host or by nvJPEG."""

    def path(machine: Machine) -> str:
        number, side = machine.sized(512, 32), machine.sized(64, 16)
        view = transforms.Compose(
            [transforms.RandomResizedCrop(side), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
        )
        with tempfile.TemporaryDirectory(prefix="shade_gpu_") as folder:
            make_jpegs(Path(folder), number, 4 * side)
            dataset = ShadeDataset(ImageFolder(folder, transform=view), cache="memory://", working_set_fraction=0.2)
            seen = {}
            for where in ("host", decode_on):
                loader = ShadeLoader(
                    dataset, batch_size(machine), num_workers=2, device=machine.device, decode_on=where
                )
                torch.manual_seed(0)
                begun = time.perf_counter()
                batches = [(images.cpu(), indices.cpu(), images.device) for images, _, indices in loader]
                seconds = time.perf_counter() - begun
                expect({place for _, _, place in batches} == {machine.device}, "a batch is not on the device")
                seen[where] = torch.cat([images for images, _, _ in batches])
                indices = torch.cat([each for _, each, _ in batches]).tolist()
                expect(indices == list(range(number)), "samples were lost or came in another order")
            dataset.close()
        levels = 255 * float((seen[decode_on] - seen["host"]).abs().mean())
        expect(levels < 2.0, f"decoded on the {decode_on}, pixels differ by {levels:.2f} levels of 255 on average")
        return f"{number / seconds:,.0f} samples per second, {levels:.2f} levels of 255 from the host's pixels"

    return path


def checkpoint(strategy: Any) -> Path_:
    """A row that saves a training from the GPU through pinned memory, goes on, and brings the saved moment back."""

    def path(machine: Machine) -> str:
        width, device = machine.sized(2048, 128), machine.device

        def begin() -> tuple[Any, Any]:
            torch.manual_seed(0)
            network = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8))).to(device)
            return network, torch.optim.Adam(network.parameters(), 1e-4)

        def train(network: Any, optimizer: Any, num_steps: int) -> list[float]:
            losses = []
            for _ in range(num_steps):
                loss = network(torch.randn(32, width, device=device)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            return losses

        run = f"gpu-check-{strategy}-{os.getpid()}"
        with tempfile.TemporaryDirectory(prefix="shade_gpu_") as folder:
            place: dict[str, Any] = {"persist_to": folder, "run": run, "every": "never"}
            network, optimizer = begin()
            with Checkpointer(strategy=strategy, **place) as checkpointer:
                checkpointer.attach(model=network, optimizer=optimizer)
                train(network, optimizer, 2)
                checkpointer.save()
                train(network, optimizer, 1)
                ticket = checkpointer.save()
                expected = train(network, optimizer, 3)
                checkpointer.wait_durable()
            network, optimizer = begin()
            with Checkpointer(**place) as checkpointer:
                checkpointer.attach(model=network, optimizer=optimizer)
                restored = checkpointer.restore_latest()
                expect(train(network, optimizer, 3) == expected, "the restored training went another way")
        size, blocked = f"{restored.num_bytes / 1e6:,.0f} MB", f"blocked {ticket.blocked_seconds:.3f} s"
        return f"{size}, {blocked}, restored in {restored.seconds:.2f} s, bit for bit"

    return path


def staged_dcp(machine: Machine) -> str:
    """`dcp.async_save` of tensors on the GPU through DCP's stager and our writer, and back on the GPU."""
    options = StagingOptions() if machine.is_gpu else StagingOptions(False, False, True, False)
    with tempfile.TemporaryDirectory(prefix="shade_gpu_") as folder:
        numel = machine.sized(1 << 22, 1 << 16)
        state = {f"layer.{number}": torch.randn(numel, device=machine.device) for number in range(8)}
        expected = {name: tensor.clone() for name, tensor in state.items()}
        stager = DefaultStager(options)
        with ShadeWriter(persist_to=folder, run="dcp") as writer, contextlib.closing(stager):
            begun = time.perf_counter()
            saved: Any = dcp.async_save(
                state, checkpoint_id="1", storage_writer=writer, async_stager=stager, no_dist=True
            )
            getattr(saved, "staging_completion", saved).result()
            staged_seconds = time.perf_counter() - begun
            for tensor in state.values():
                tensor.zero_()
            getattr(saved, "upload_completion", saved).result()
        with ShadeReader(persist_to=folder, run="dcp") as reader:
            dcp.load(state, checkpoint_id="1", storage_reader=reader, no_dist=True)
        expect(all(torch.equal(state[name], expected[name]) for name in state), "what was loaded is not what was saved")
    return f"{8 * numel * 4 / 1e6:,.0f} MB staged in {staged_seconds:.3f} s, loaded bit for bit"


def on_one_rank(machine: Machine) -> contextlib.AbstractContextManager[None]:
    """A process group of this process alone."""

    @contextlib.contextmanager
    def group() -> Iterator[None]:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()

    return group()


def sparse_choice(machine: Machine) -> str:
    """A gradient on the GPU is chosen from there: what is sent and what is kept make up what came in."""
    size, device, said = machine.sized(1 << 24, 1 << 18), machine.device, []
    for name in ("threshold-v16", "threshold-v", "topk"):
        feedback = DeviceErrorFeedback(size, COMPRESSORS.get(name)(), QUANTISERS.get("bf16")(), device)
        fed_D, sent_D = torch.zeros(size, dtype=torch.float64, device=device), np.zeros(size)
        for step in range(5):
            gradient_D = torch.randn(size, device=device)
            begun = time.perf_counter()
            chosen = feedback.compress(gradient_D, 0.01, Key(0, step, 0))
            seconds = time.perf_counter() - begun
            fed_D += gradient_D
            sent_D[chosen.indices_K] += chosen.values_K
        lost_D = fed_D.cpu().numpy() - sent_D - feedback.residual_D.cpu().numpy()
        expect(float(np.abs(lost_D).max()) < 1e-3, f"{name} lost {np.abs(lost_D).max():.2g} of a gradient")
        said.append(f"{name} {1000 * seconds:.1f} ms")
    return f"{size / 1e6:.1f} M elements, 1 %: {', '.join(said)}"


def gradient_engine(dtype: str, is_adam: bool = False) -> Path_:
    """A row that trains a network on the GPU through the gradient engine until its loss has fallen."""

    def path(machine: Machine) -> str:
        kind = {"device": machine.device, "dtype": getattr(torch, dtype)}
        inputs, width, number = machine.sized((512, 1024, 256), (64, 128, 32))
        with on_one_rank(machine):
            torch.manual_seed(0)
            network = torch.nn.Sequential(
                torch.nn.Linear(inputs, width), torch.nn.ReLU(), torch.nn.Linear(width, 10)
            ).to(**kind)
            images = torch.randn(number, inputs, **kind)
            labels = torch.randint(0, 10, (number,), device=machine.device)
            losses: list[float] = []
            parameters = network.parameters()
            optimizer = LocalAdamW(parameters) if is_adam else SparseSGD(parameters, lr=0.05, momentum=0.9)
            with GradientEngine(network, optimizer, density=0.1, staleness=1) as engine:
                stays = [type(each.feedback).__name__ for each in engine._bucket_states]
                expect(
                    not machine.is_gpu or "DeviceErrorFeedback" in stays, f"no gradient is chosen on the GPU: {stays}"
                )
                for _ in range(30):
                    loss = F.cross_entropy(network(images).float(), labels)
                    loss.backward()
                    engine.step()
                    losses.append(float(loss.detach()))
                engine.finish()
            expect(losses[-1] < 0.8 * losses[0], f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f} in 30 steps")
        return f"30 steps, a tenth of each gradient: loss {losses[0]:.2f} → {losses[-1]:.2f}"

    return path


def fsdp2(machine: Machine) -> str:
    """A model sharded by FSDP2 is saved, and comes back with equal bits on every rank."""
    with tempfile.TemporaryDirectory(prefix="shade_gpu_") as folder:
        told = on_ranks(_save_sharded, machine, folder)
    return f"{told['bytes'] / 1e6:,.1f} MB on rank 0 of {machine.num_ranks}, restored in {told['seconds']:.2f} s"


def _save_sharded(machine: Machine, folder: str) -> dict[str, float]:
    def begin() -> tuple[Any, Any]:
        torch.manual_seed(0)
        network = gpt_of(machine)
        mesh = init_device_mesh(machine.device.type, (dist.get_world_size(),))
        for part in (*network.blocks, network):
            fully_shard(part, mesh=mesh)
        return network, torch.optim.AdamW(network.parameters(), 1e-4)

    def train(network: Any, optimizer: Any) -> None:
        generator = torch.Generator().manual_seed(dist.get_rank())
        network(torch.randint(0, 512, (2, 32), generator=generator).to(machine.device)).backward()
        optimizer.step()
        optimizer.zero_grad()

    def here(network: Any, optimizer: Any) -> list[torch.Tensor]:
        found = [*network.parameters(), *(value for of in optimizer.state.values() for value in of.values())]
        return [(each.to_local() if isinstance(each, DTensor) else each).detach().clone() for each in found]

    place: dict[str, Any] = {"persist_to": folder, "run": "fsdp2", "every": "never"}
    network, optimizer = begin()
    with Checkpointer(**place) as checkpointer:
        checkpointer.attach(model=network, optimizer=optimizer)
        train(network, optimizer)
        expected = here(network, optimizer)
        checkpointer.save()
        train(network, optimizer)
        checkpointer.wait_durable()
    network, optimizer = begin()
    with Checkpointer(**place) as checkpointer:
        checkpointer.attach(model=network, optimizer=optimizer)
        restored = checkpointer.restore_latest()
        found = here(network, optimizer)
    same = len(found) == len(expected) and all(map(torch.equal, found, expected))
    expect(same, f"rank {dist.get_rank()} has other bits than were saved")
    return {"bytes": restored.num_bytes, "seconds": restored.seconds}


def compiled(machine: Machine) -> str:
    """A compiled model trains with sampler and Checkpointer, and its snapshot loads into a plain one."""
    # Inductor's kernels for the host need a compiler of C, on a GPU as well.
    backend = "inductor" if machine.is_gpu and (shutil.which("cc") or shutil.which("gcc")) else "aot_eager"
    size = batch_size(machine)

    def begin() -> Any:
        torch.manual_seed(0)
        return networks.build("cnn", 4, 64).to(machine.device)

    with made_dataset(machine) as dataset, tempfile.TemporaryDirectory(prefix="shade_gpu_") as folder:
        plain, place = begin(), {"persist_to": folder, "run": "compiled", "every": "never"}
        network, optimizer = torch.compile(plain, backend=backend), torch.optim.Adam(plain.parameters(), 1e-3)
        sampler = ShadeSampler(dataset, batch_size=size, seed=0)
        loader = ShadeLoader(dataset, size, sampler=sampler, num_workers=2, device=machine.device)
        with Checkpointer(**place) as checkpointer:
            checkpointer.attach(model=network, optimizer=optimizer, sampler=sampler)
            for epoch in range(2):
                sampler.set_epoch(epoch)
                for images, labels, indices in loader:
                    weights = sampler.weights(indices)
                    losses = F.cross_entropy(network(images), labels, reduction="none")
                    (losses * weights).mean().backward()
                    sampler.report(indices, losses)
                    optimizer.step()
                    optimizer.zero_grad()
                    checkpointer.step()
            checkpointer.save()
            checkpointer.wait_durable()
        trained = [each.detach().clone() for each in plain.parameters()]
        other = begin()
        with Checkpointer(**place) as checkpointer:
            checkpointer.attach(model=other, optimizer=torch.optim.Adam(other.parameters(), 1e-3))
            step = checkpointer.restore_latest().step
        expect(all(map(torch.equal, other.parameters(), trained)), "the plain model has other weights")
    return f"backend {backend}, {step} steps, loaded into a plain model"


PATHS: dict[str, Path_] = {
    "AMP step, resnet18": amp("resnet18"),
    "AMP step, densenet161": amp("densenet161"),
    "weights() and report() on the device": report_without_sync,
    "pinned-memory loading": pinned_loading,
    "ShadeLoader, host": shade_loader("host"),
    "ShadeLoader, nvJPEG": shade_loader("device"),
    "checkpoint, copy": checkpoint("copy"),
    "checkpoint, overlap": checkpoint("overlap"),
    "checkpoint, asymmetric": checkpoint("asymmetric"),
    "checkpoint, cloned on the device": checkpoint("checkfreq"),
    "checkpoint, streamed": checkpoint("datastates"),
    "checkpoint, streamed by layers": checkpoint("deepfreeze"),
    "checkpoint, two in flight": checkpoint("pccheck"),
    "DCP through our plug-ins": staged_dcp,
    "FSDP2 save and restore": fsdp2,
    "torch.compile": compiled,
    "sparse choice on the GPU": sparse_choice,
    "gradient engine, float32": gradient_engine("float32"),
    "gradient engine, bfloat16": gradient_engine("bfloat16"),
    "gradient engine, Adam's directions": gradient_engine("float32", is_adam=True),
}
