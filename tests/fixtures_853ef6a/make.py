"""Writes the fixtures of this folder; meant to be run once, in a checkout of 853ef6a. See README.md.

python make.py FOLDER
"""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.datasets import ImageFolder

from shade import Checkpointer, GradientEngine, ShadeDataset, ShadeSampler, SparseSGD, open_store
from shade.checkpoint.dcp import ShadeWriter
from shade.cli import main as shade
from shade.store._servers.server import LocalServer

TESTS = Path(__file__).resolve().parents[1]
MODIFIED_NS = 1_600_000_000_000_000_000
"""Time of change of every image: it is part of the data set's fingerprint."""
LOSSY_WIDTH = 33
"""A codec with a loss leaves tensors of fewer than 1024 items exact."""


def training(width: int = 10) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 3))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    model(torch.randn(8, model[0].in_features, generator=generator)).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def copied(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return torch.load(in_memory(state), weights_only=True)


def in_memory(state: Any) -> Any:
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    return stream


def save_run(
    storage: Path, run: str, num_saves: int, store: str | None = None, width: int = 10, **more: Any
) -> dict[int, Any]:
    """Trains and saves; the state of each step."""
    model, optimizer = training(width)
    states = {}
    keep = {"keep": "last=9", "every": "never"}
    with Checkpointer(store, persist_to=str(storage), run=run, **keep, **more) as checkpointer:
        checkpointer.attach(model=model, optimizer=optimizer)
        for step in range(1, num_saves + 1):
            train(model, optimizer, step)
            checkpointer.step()
            checkpointer.save({"val_loss": 1 / step})
            states[step] = copied(model, optimizer)
            checkpointer.wait_durable(60)
    return states


def restored(storage: Path, run: str) -> Any:
    """What this commit restores."""
    model, optimizer = training(LOSSY_WIDTH)
    with Checkpointer(persist_to=str(storage), run=run, every="never") as checkpointer:
        checkpointer.attach(model=model, optimizer=optimizer)
        found = checkpointer.restore_latest()
        bounds = {name: [bound.max_abs, bound.relative] for name, bound in found.bounds.items()}
        return copied(model, optimizer) | {"step": found.step, "bounds": bounds}


def torchrun(*words: str) -> None:
    """Two ranks of this script."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    subprocess.run([sys.executable, *command, *words], check=True)


def rank_main(storage: str, out: str) -> None:
    """One of two data-parallel ranks."""
    dist.init_process_group("gloo")
    states = save_run(Path(storage), "ranks", 1)
    if dist.get_rank() == 0:
        torch.save(states, out)
    dist.destroy_process_group()


def dump(url: str) -> dict[str, str]:
    """Every key with its value."""
    with open_store(url) as store:
        keys = sorted(store.scan(""))
        values = store.get_many(keys)
        return {key: base64.b64encode(value).decode() for key, value in zip(keys, values, strict=True) if value}


def gradient_engine() -> tuple[nn.Module, SparseSGD, GradientEngine]:
    """A bucket of fewer than 4096 elements has no residual."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
    optimizer = SparseSGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, GradientEngine(model, optimizer, density=0.05, bucket_bytes=4000)


def push(model: nn.Module, engine: GradientEngine, step: int) -> None:
    """One step whose gradient is the same on every processor."""
    torch.manual_seed(100 + step)
    sum((parameter * torch.randn(parameter.shape)).sum() for parameter in model.parameters()).backward()
    engine.step()


def engine_main(storage: str, out: str) -> None:
    """One of two ranks: five steps, then a save."""
    dist.init_process_group("gloo")
    model, optimizer, engine = gradient_engine()
    with engine, Checkpointer(persist_to=storage, run="engine", every="never") as checkpointer:
        checkpointer.attach(model=model, optimizer=optimizer, engine=engine)
        for step in range(5):
            push(model, engine, step + 1000 * dist.get_rank())
            checkpointer.step()
        checkpointer.save()  # before finish(), which would send what the residuals hold
        checkpointer.wait_durable(60)
        state = {"engine": engine.state_dict(), **copied(model, optimizer)}
        torch.save(state, f"{out}/{dist.get_rank()}.pt")
    dist.destroy_process_group()


def make_engine(folder: Path, made: str) -> None:
    """Two ranks save; one continues."""
    torchrun("--engine", str(folder / "storage"), made)
    states = [torch.load(f"{made}/{rank}.pt", weights_only=False) for rank in range(2)]
    dist.init_process_group("gloo", init_method=f"file://{made}/rendezvous", rank=0, world_size=1)
    model, optimizer, engine = gradient_engine()
    with engine:
        model.load_state_dict(states[0]["model"])
        optimizer.load_state_dict(states[0]["optimizer"])
        engine.load_state_dicts([state["engine"] for state in states])
        for step in range(5, 8):
            push(model, engine, step)
        engine.finish()
    torch.save({"ranks": states, "later": model.state_dict()}, folder / "engine.pt")
    dist.destroy_process_group()


def make_sharded(folder: Path) -> dict[str, Any]:
    torch.manual_seed(3)
    state = {"model": {"weight": torch.randn(40, 10), "bias": torch.randn(10).to(torch.bfloat16)}, "epoch": 3}
    with ShadeWriter(persist_to=str(folder / "storage"), run="sharded") as writer:
        dcp.save(state, storage_writer=writer, checkpoint_id="7", no_dist=True)
        writer.wait_durable(60)
    return state


def make_images(root: Path, num_classes: int, per_class: int, size: int) -> Path:
    generator = np.random.default_rng(0)
    for number in range(num_classes):
        folder = root / f"class{number}"
        folder.mkdir(parents=True)
        for image in range(per_class):
            path = folder / f"{image:03}.png"
            Image.fromarray(generator.integers(0, 255, (size, size, 3)).astype(np.uint8)).save(path)
            os.utime(path, ns=(MODIFIED_NS, MODIFIED_NS))
    return root


def make_cache(folder: Path) -> None:
    images = make_images(folder / "images", 3, 4, 6)
    torch.manual_seed(4)
    items = TensorDataset(torch.randn(12, 5), torch.arange(12, dtype=torch.int32), torch.randn(12, 3).half())
    torch.save(items.tensors, folder / "items.pt")
    for form, dataset, more in (
        ("encoded", ImageFolder(str(images)), {}),
        ("decoded", ImageFolder(str(images)), {"form": "decoded"}),
        ("item", items, {}),
    ):
        with LocalServer() as server:
            url = server.url.reveal()
            wrapped = ShadeDataset(dataset, cache=url, working_set_fraction=1.0, **more)
            sampler = ShadeSampler(wrapped, batch_size=4, seed=0, mode="uniform", num_replicas=1, rank=0)
            loader = DataLoader(wrapped, batch_size=4, sampler=sampler, collate_fn=list)
            for epoch in range(2):
                sampler.set_epoch(epoch)
                for batch in loader:
                    index_B = torch.tensor([sample[-1] for sample in batch])
                    sampler.report(index_B, 1.0 + index_B % 5)
            (folder / f"{form}.json").write_text(json.dumps(dump(url), indent=1))
    dataset = ShadeDataset(ImageFolder(str(images)), cache="memory://", working_set_fraction=0.5)
    sampler = ShadeSampler(dataset, batch_size=2, seed=0, num_replicas=1, rank=0)
    loader = DataLoader(dataset, batch_size=2, sampler=sampler, collate_fn=list)
    rest: list[list[int]] = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        drawn: list[int] = []
        for number, batch in enumerate(loader):
            index_B = torch.tensor([sample[-1] for sample in batch])
            sampler.report(index_B, 1.0 + index_B % 5)
            drawn += index_B.tolist()
            if (epoch, number) == (2, 1):
                torch.save(sampler.state_dict(), folder / "sampler.pt")
                drawn = []
        if epoch >= 2:
            rest.append(drawn)
    (folder / "sampler.json").write_text(json.dumps(rest))


def launch(folder: Path, kill: int | None) -> dict[str, list[int]]:
    """A run of tests/integration/programs/stream.py; the samples by step."""
    folder.mkdir()
    more = {"STREAM_LOG": str(folder / "log"), "PYTHONPATH": str(TESTS.parent), "OMP_NUM_THREADS": "1"}
    more |= {} if kill is None else {"STREAM_KILL": str(kill)}
    (folder / "log").mkdir()
    program = TESTS / "integration" / "programs" / "stream.py"
    words = [sys.executable, TESTS.parent / "benchmarks" / "runshade.py", program, folder.parent / "images"]
    words += ["-g", "1", "--batch_size", "8", "--epochs", "4", "--workers", "0", "--out", folder / "out"]
    subprocess.run([str(word) for word in words], env=os.environ | more, cwd=folder, check=kill is None)
    lines = (folder / "log" / "rank0.jsonl").read_text().splitlines()
    return {str(row["step"]): row["ids"] for row in map(json.loads, lines)}


def make_run(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as made:
        here = Path(made)
        make_images(here / "images", 4, 12, 8)
        killed, whole = launch(here / "killed", 15), launch(here / "whole", None)
        shutil.copytree(here / "images", folder / "images")
        out = here / "killed" / "out"
        run_id = json.loads((out / "run.json").read_text())["run"]
        shutil.rmtree(f"/dev/shm/shade-{os.getuid()}/{run_id}")
        shutil.rmtree(out / "tensorboard")
        config = (out / "run.json").read_text().replace(str(out), "@RUN@").replace(str(here / "images"), "@IMAGES@")
        (out / "run.json").write_text(config.replace(str(TESTS / "integration/programs/stream.py"), "@PROGRAM@"))
        said = [line for line in (out / "output.log").read_text().splitlines(True) if line.startswith("rank 0:")]
        (out / "output.log").write_text("".join(said))
        shutil.copytree(out, folder / "out")
        (folder / "drawn.json").write_text(json.dumps({"killed": killed, "whole": whole}))
        shutil.copy(here / "whole" / "log" / "parameters.pt", folder / "parameters.pt")


def make_tune(folder: Path) -> None:
    program = "import json; print(json.dumps({'accuracy': 1 - abs({batch} - 64) / 100 - {density}}))"
    words = ["--command", f'python -c "{program}"', "--metric", "accuracy", "--batch", "32:128", "--batch-multiple"]
    shade(["tune", *words, "32", "--evaluations", "5", "--initial", "4", "--out", str(folder)])
    for path in folder.iterdir():
        if path.name not in ("evaluations.jsonl", "profile.json"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def main(folder: Path) -> None:
    storage = folder / "storage"
    expected: dict[str, Any] = {"plain": save_run(storage, "plain", 2)}
    expected["delta"] = save_run(storage, "delta", 4, codec="xor-zstd", keyframe_every=4)
    save_run(storage, "lossy", 2, width=LOSSY_WIDTH, codec="topk-delta", max_error=10.0)
    expected["lossy"] = restored(storage, "lossy")
    assert expected["lossy"]["bounds"], "nothing was stored with a loss"
    with tempfile.TemporaryDirectory() as made:
        torchrun("--rank", str(storage), f"{made}/ranks.pt")
        expected["ranks"] = torch.load(f"{made}/ranks.pt", weights_only=True)
        with LocalServer() as server:
            url = server.url.reveal()
            expected["memory"] = save_run(Path(made) / "storage", "memory", 2, url)
            (folder / "memory.json").write_text(json.dumps(dump(url), indent=1))
    expected["sharded"] = make_sharded(folder)
    with tempfile.TemporaryDirectory() as made:
        make_engine(folder, made)
    torch.save(expected, folder / "expected.pt")
    (folder / "exports").mkdir()
    for name, form in (("whole.safetensors", "safetensors"), ("whole.pt", "torch"), ("whole-dcp", "dcp")):
        to = str(folder / "exports" / name)
        words = ["--to", to, "--format", form, "--persist", str(storage), "--run", "plain"]
        assert shade(["checkpoint", "export", "2", *words]) == 0
    (folder / "cache").mkdir()
    make_cache(folder / "cache")
    make_run(folder / "run")
    make_tune(folder / "tune")


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        rank_main(*sys.argv[2:])
    elif sys.argv[1] == "--engine":
        engine_main(*sys.argv[2:])
    else:
        main(Path(sys.argv[1]))
