"""Runs one life of a combined script, as a user would, and notes each step; or trains its steps again, plainly."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from tests.differential.company_data import KINDS, WIDTH, collate, first, plain_batch
from tests.differential.company_script import BATCH, Script


class Linear(torch.nn.Module):
    """The plainest."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Embedding(Linear):
    """Adds rows of a table, of which a batch uses few."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.table((x[:, 0] * 7).long() % 8)


class Complex(Linear):
    """Has complex parameters and a buffer with its conjugate bit set."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = torch.nn.Parameter(torch.randn(2, 2, dtype=torch.complex64))
        self.register_buffer("turned", torch.randn(2, 2, dtype=torch.complex64).conj())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x).to(torch.complex64) @ self.mixing @ self.turned).real


class Tied(Linear):
    """Uses one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.outer = torch.nn.Linear(WIDTH, WIDTH)
        self.outer.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.outer(self.inner(x).relu()))


MODELS = {"linear": Linear, "embedding": Embedding, "complex": Complex, "tied": Tied}


def make_model(script: Script) -> torch.nn.Module:
    """The same one on every rank."""
    torch.manual_seed(1)
    return MODELS[script.model]()


def make_optimizer(script: Script, model: torch.nn.Module, *, plain: bool = False) -> torch.optim.Optimizer:
    """An optimizer of torch's own; for `GradientEngine` one of ours that does the same, unless asked for ``plain``."""
    parameters = model.parameters()
    if script.exchange == "engine" and not plain:
        from shade.gradient.optim import SparseSGD

        return SparseSGD(parameters, 0.1)
    if script.optimizer == "momentum":
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)
    if script.optimizer.endswith("adam"):
        fused = script.optimizer == "fused adam" and script.model != "complex"  # which torch refuses
        return torch.optim.Adam(parameters, 0.01, fused=fused)
    return torch.optim.SGD(parameters, 0.1)


def edit_gradients(script: Script, model: torch.nn.Module, step: int) -> None:
    """What scripts do between ``backward()`` and ``step()``."""
    if script.edits == "clip":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    if script.edits == "drop" and step % 3 == 2:
        for parameter in model.parameters():
            parameter.grad = None
    if script.edits == "new":
        for parameter in model.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad * 0.5


def digest(*tensors: torch.Tensor) -> str:
    """The bytes of tensors, in short."""
    joined = sha256()
    for tensor in tensors:
        joined.update(tensor.detach().resolve_conj().contiguous().view(torch.uint8).numpy().tobytes())
    return joined.hexdigest()[:16]


def weights_of(model: torch.nn.Module) -> dict[str, Any]:
    """The parameters and buffers, in short, and the first of them as they are."""
    tensors = list(model.state_dict().values())
    return {"weights": digest(*tensors), "values": tensors[-1].detach().abs().flatten().tolist()}


class Life:
    """One process of a script, from its first line to its last."""

    def __init__(self, script: Script, folder: Path, life: int, rank: int, run: str, cache: str | None) -> None:
        self.run = run
        self.script, self.folder, self.life, self.rank, self.cache = script, folder, life, rank, cache
        self.exchange: Any = None
        # Open to the process's end, which may be a kill.
        self.log = open(folder / f"steps-{life}-{rank}", "w", buffering=1)  # noqa: SIM115

    def say(self, **values: Any) -> None:
        """Writes a line that outlives the process."""
        self.log.write(json.dumps(values) + "\n")

    def meet(self) -> None:
        """The ranks meet."""
        if self.script.ranks > 1:
            meeting = f"file://{self.folder}/meeting-{self.life}"
            dist.init_process_group("gloo", meeting, timedelta(seconds=20), self.script.ranks, self.rank)

    def differing(self, name: str, value: Any, other: Any) -> Any:
        """The value of an argument on this rank."""
        return other if self.script.differs == name and self.rank == 1 else value

    def train(self) -> None:
        """The user's script."""
        from shade import Checkpointer, ShadeDataset, ShadeSampler

        script = self.script
        if script.meets == "first":
            self.meet()
        inside = KINDS[script.data](self.folder.parent / "data")
        if self.differing("size", False, True):
            inside = torch.utils.data.Subset(inside, range(len(inside) - 1))
        dataset = ShadeDataset(inside, cache=self.cache, working_set_fraction=0.5, transform=first)
        if script.meets == "late":
            self.meet()
        batch = self.differing("batch size", BATCH, BATCH + 1)
        sampler = ShadeSampler(
            dataset,
            batch_size=batch,
            seed=self.differing("seed", 0, 1),
            mode=self.differing("mode", "uniform", "unbiased"),
        )
        loader = self.make_loader(dataset, sampler, batch)
        model = make_model(script)
        optimizer = make_optimizer(script, model)
        trained = model
        step: Any = optimizer.step
        if script.ranks > 1:
            trained, step = self.exchanged(model, optimizer)
        accelerator: Any = None
        if script.loop == "accelerate":
            from accelerate import Accelerator

            accelerator = Accelerator(cpu=True)
            optimizer = accelerator.prepare(optimizer)
            step = optimizer.step if script.exchange != "engine" else step
        checkpointer: Any = None
        first_epoch = steps = 0
        closing = contextlib.ExitStack()
        if script.saves:
            storage = self.folder / "storage" if script.persists else None
            checkpointer = Checkpointer(persist_to=storage, run=self.run, every=2, strategy=script.saves)
            if script.closes:
                closing.enter_context(checkpointer)
            keeper = {"sampler": sampler} if script.loop in ("loop", "accelerate") else {"loader": loader}
            checkpointer.attach(model=model, optimizer=optimizer, **keeper)
            first_epoch = checkpointer.restore_latest().epoch
            steps = checkpointer.step_count
        self.say(begins=steps)
        with closing:
            for epoch in range(first_epoch, script.epochs):
                sampler.set_epoch(epoch)
                for x_BW, label_B, index_B in loader:
                    loss_B = F.cross_entropy(trained(x_BW), label_B, reduction="none")
                    loss = (loss_B * sampler.weights(index_B)).mean()
                    loss.backward() if accelerator is None else accelerator.backward(loss)
                    sampler.report(index_B, loss_B.detach())
                    edit_gradients(script, model, steps)
                    self.say(epoch=epoch, indices=index_B.tolist(), read=digest(x_BW, label_B))
                    step()
                    optimizer.zero_grad()
                    steps += 1
                    if checkpointer is not None:
                        checkpointer.step()
                    if self.life == 0 and steps == script.step:
                        self.end(checkpointer)
            self.say(**weights_of(model))
            if script.closes:
                del loader
                sampler.close()
        if script.closes:
            dataset.close()
            if self.exchange is not None:
                self.exchange.close()
            if script.ranks > 1:
                dist.destroy_process_group()

    def end(self, checkpointer: Any) -> None:
        """The first life's end, if it is not to end in order."""
        ending = self.script.ending
        if ending == "normal":
            return
        if checkpointer is not None and self.script.step > 1:
            checkpointer.wait_durable() if self.script.persists else checkpointer.wait_committed()
            self.say(safe=True)
        if ending == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyboardInterrupt if ending == "interrupt" else RuntimeError("the script's own fault")

    def make_loader(self, dataset: Any, sampler: Any, batch: int) -> Any:
        """The loader of the script's loop."""
        from shade import ShadeLoader

        script = self.script
        options: dict[str, Any] = {"sampler": sampler, "num_workers": script.workers, "collate_fn": collate}
        if script.loop == "shade loader":
            return ShadeLoader(dataset, batch, **options)
        if script.workers:
            options |= {"multiprocessing_context": script.context, "persistent_workers": script.persistent}
        if script.loop == "stateful":
            from torchdata.stateful_dataloader import StatefulDataLoader

            return StatefulDataLoader(dataset, batch, **options)
        return DataLoader(dataset, batch, in_order=script.in_order, **options)

    def exchanged(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[torch.nn.Module, Any]:
        """What is called for a forward pass, and for a step, on two ranks."""
        from shade import GradientEngine, SparseState, sparse_hook

        whole: dict[str, Any] = {"compressor": "topk", "density": 1.0, "quantiser": "none"}
        if self.script.exchange == "engine":
            self.exchange = GradientEngine(model, optimizer, **whole)
            return model, self.exchange.step
        wrapped = DistributedDataParallel(model)
        if self.script.exchange == "hook":
            self.exchange = SparseState(model, **whole)
            wrapped.register_comm_hook(self.exchange, sparse_hook)
        return wrapped, optimizer.step


def steps_of(folder: Path, life: int, rank: int) -> list[dict[str, Any]]:
    """The lines that a life has said."""
    path = folder / f"steps-{life}-{rank}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train_plainly(script: Script, folder: Path, steps: list[list[list[int]]]) -> list[dict[str, Any]]:
    """Trains steps again with torch alone, all ranks in this process; returns what `Life` says of each.

    Args:
        script: The script.
        folder: Where its data lie.
        steps: By step, by rank, the samples.
    """
    dataset = KINDS[script.data](folder / "data")
    model = make_model(script)
    optimizer = make_optimizer(script, model, plain=True)
    said = []
    for step, ranks in enumerate(steps):
        total: dict[str, torch.Tensor] = {}
        read = []
        for indices in ranks:
            x_BW, label_B = plain_batch(dataset, indices)
            read.append(digest(x_BW, label_B))
            F.cross_entropy(model(x_BW), label_B, reduction="none").mean().backward()
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    part = parameter.grad / len(ranks)
                    total[name] = total[name] + part if name in total else part
            optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            parameter.grad = total.get(name)
        edit_gradients(script, model, step)
        optimizer.step()
        optimizer.zero_grad()
        said.append({"read": read, **weights_of(model)})
    return said
