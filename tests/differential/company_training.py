"""Runs one life of a combined script, as a user would, and notes each step; or trains its steps again, plainly."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from shade.errors import StateMismatchError
from tests.differential.company_data import Keys, collate, first, open_data, plain_batch, plain_data
from tests.differential.company_models import Passing, digest, edit_gradients, make_model, make_optimizer, weights_of
from tests.differential.company_processes import forget_loops
from tests.differential.company_script import BATCH, FRAMEWORKS, Script

WINDOW = 8
"""Places by which neighbours in a shard are moved, where it is read in blocks."""


class Life:
    """One process of a script, from its first line to its last."""

    def __init__(self, script: Script, folder: Path, life: int, rank: int, run: str, cache: str | None) -> None:
        self.run = run
        self.script, self.folder, self.life, self.rank, self.cache = script, folder, life, rank, cache
        self.data = folder.parent / "data"
        self.exchange: Any = None
        self.inside: Any = None
        # Open to the process's end, which may be a kill.
        self.log = open(folder / f"steps-{life}-{rank}", "w", buffering=1)  # noqa: SIM115

    def say(self, **values: Any) -> None:
        """Writes a line that outlives the process."""
        self.log.write(json.dumps(values) + "\n")

    def say_end(self, model: torch.nn.Module) -> None:
        """Writes what training has come to."""
        self.say(**weights_of(model))

    def meet(self) -> None:
        """The ranks meet."""
        if self.script.ranks > 1 and not dist.is_initialized():
            meeting = f"file://{self.folder}/meeting-{self.life}"
            dist.init_process_group("gloo", meeting, timedelta(seconds=60), self.script.ranks, self.rank)

    def differing(self, name: str, value: Any, other: Any) -> Any:
        """The value of an argument on this rank."""
        return other if self.script.differs == name and self.rank == 1 else value

    def make_dataset(self) -> Any:
        """The data set, in its cache."""
        from shade import ShadeDataset

        inside = self.inside = open_data(self.script, self.data, self.folder)
        if self.differing("size", False, True):
            inside = torch.utils.data.Subset(inside, range(len(inside) - 1))
        return ShadeDataset(inside, cache=self.cache, working_set_fraction=0.5, transform=first)

    def make_sampler(self, dataset: Any) -> Any:
        """The sampler."""
        from shade import ShadeSampler

        return ShadeSampler(
            dataset,
            batch_size=self.differing("batch size", BATCH, BATCH + 1),
            seed=self.differing("seed", 0, 1),
            mode=self.differing("mode", "uniform", "unbiased"),
            shuffle_window=WINDOW if self.script.window else None,
        )

    def see_weights(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Notes the weights after each step of an optimizer."""
        if self.script.hooks == "global":
            register_optimizer_step_post_hook(lambda *_: self.say(after=weights_of(model)))
        else:
            optimizer.register_step_post_hook(lambda *_: self.say(after=weights_of(model)))

    def train(self) -> None:
        """The user's script."""
        script = self.script
        if script.cold:
            forget_loops(self.folder)
        if script.ranks > 1:  # as torchrun says it
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # which Accelerate wants to see
            os.environ |= {"RANK": str(self.rank), "WORLD_SIZE": str(script.ranks), **where}
        if script.loop in FRAMEWORKS:
            from tests.differential import company_frameworks

            return company_frameworks.RUNS[script.loop](self)
        if script.meets == "first":
            self.meet()
        dataset = self.make_dataset()
        if script.meets == "late":
            self.meet()
        model = make_model(script)
        if script.other_model and self.life == 1:
            model.last.refuses = True  # type: ignore[union-attr]
        optimizer = make_optimizer(script, model, factor=self.differing("learning rate", 1.0, 2.0))
        self.see_weights(model, optimizer)
        checkpointer = self.make_checkpointer()
        trained, step = model, optimizer.step
        if script.ranks > 1:
            if script.exchange == "engine":
                trained, step = self.exchanged(model, optimizer)
            self.meet()
            if script.exchange != "engine":
                trained, step = self.exchanged(model, optimizer)
        sampler = self.make_sampler(dataset)
        loader = self.make_loader(dataset, sampler)
        accelerator: Any = None
        if script.loop == "accelerate":
            from accelerate import Accelerator

            accelerator = Accelerator(cpu=True)
            optimizer = accelerator.prepare(optimizer)
            step = optimizer.step
        elif script.wraps:
            optimizer = Passing(optimizer)
            step = optimizer.step
        first_epoch = steps = 0
        closing = contextlib.ExitStack()
        if checkpointer is not None:
            if script.closes:
                closing.enter_context(checkpointer)
            keeper = {"loader": loader} if script.loop in ("stateful", "shade loader") else {"sampler": sampler}
            checkpointer.attach(model=model, optimizer=optimizer, **keeper)
            before = weights_of(model)
            try:
                first_epoch = checkpointer.restore_latest().epoch
            except StateMismatchError:
                self.say(refused=before == weights_of(model))
                return closing.close()
            steps = checkpointer.step_count
        self.say(begins=steps)
        with closing:
            for epoch in range(first_epoch, script.epochs):
                sampler.set_epoch(epoch)
                if script.relabels:
                    self.inside.tensors[1][:] = labels_of(epoch)
                for x_BW, label_B, index_B in ahead(loader) if script.loop == "ahead" else loader:
                    with self.held():
                        loss_B = F.cross_entropy(trained(x_BW), label_B, reduction="none")
                        loss = (loss_B * sampler.weights(index_B)).mean()
                        loss.backward() if accelerator is None else accelerator.backward(loss)
                    if script.loop != "ahead":
                        sampler.report(index_B, loss_B.detach())
                    edit_gradients(script, model, steps)
                    self.say(epoch=epoch, indices=index_B.tolist(), read=digest(x_BW, label_B))
                    step()
                    optimizer.zero_grad()
                    steps += 1
                    if checkpointer is not None:
                        checkpointer.step()
                        if script.alone and self.rank == 0 and steps == 3:
                            checkpointer.save()
                    if self.life == 0 and steps == script.step:
                        self.end(checkpointer)
            self.say_end(model)
            if script.closes:
                del loader
                sampler.close()
        if script.closes:
            dataset.close()
            if self.exchange is not None:
                self.exchange.close()
            if script.ranks > 1:
                dist.destroy_process_group()

    def make_checkpointer(self) -> Any:
        """The checkpointer, after the ranks have met where its script lets them."""
        from shade import Checkpointer

        script = self.script
        if not script.saves:
            return None
        storage = self.folder / "storage" if script.persists else None
        every = self.differing("every", script.every, script.every + 1)
        return Checkpointer(persist_to=storage, run=self.run, every=every, strategy=script.saves)

    def held(self) -> Any:
        """What surrounds a forward and a backward pass."""
        edits = self.script.exchange == "engine" and self.script.holds and self.script.edits != "none"
        return self.exchange.accumulate() if edits else contextlib.nullcontext()

    def end(self, checkpointer: Any) -> None:
        """The first life's end, if it is not to end in order."""
        script = self.script
        if script.ending == "normal":
            return
        if checkpointer is not None and script.step >= script.every and script.waits:
            checkpointer.wait_durable() if script.persists else checkpointer.wait_committed()
            self.say(safe=True)
        if script.ending == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyboardInterrupt if script.ending == "interrupt" else RuntimeError("the script's own fault")

    def make_loader(self, dataset: Any, sampler: Any, collate_fn: Any = collate) -> Any:
        """The loader of the script's loop."""
        from shade import ShadeLoader

        script, batch = self.script, sampler.batch_size
        options: dict[str, Any] = {"sampler": sampler, "num_workers": script.workers, "collate_fn": collate_fn}
        if script.loop == "shade loader":
            return ShadeLoader(dataset, batch, **options)
        if script.workers:
            options |= {"multiprocessing_context": script.context, "persistent_workers": script.persistent}
        if script.loop == "stateful":
            from torchdata.stateful_dataloader import StatefulDataLoader

            return StatefulDataLoader(dataset, batch, **options)
        if script.data == "keyed":
            options["sampler"] = Keys(sampler)
        return DataLoader(dataset, batch, in_order=script.in_order, **options)

    def exchanged(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[torch.nn.Module, Any]:
        """What is called for a forward pass, and for a step, on two ranks."""
        from shade import GradientEngine, SparseState, sparse_hook

        density = self.differing("density", 1.0, 0.5)
        whole: dict[str, Any] = {"compressor": "topk", "density": density, "quantiser": "none"}
        if self.script.exchange == "engine":
            self.exchange = GradientEngine(model, optimizer, **whole)  # type: ignore[arg-type]
            return model, self.exchange.step
        wrapped = DistributedDataParallel(model, find_unused_parameters=self.script.model == "unused")
        if self.script.exchange == "hook":
            self.exchange = SparseState(model, **whole)
            wrapped.register_comm_hook(self.exchange, sparse_hook)
        return wrapped, optimizer.step


def ahead(loader: Any) -> Iterator[Any]:
    """Batches, each after the next one was fetched, as loops do that copy them to a device meanwhile."""
    waiting: Any = None
    for batch in loader:
        if waiting is not None:
            yield waiting
        waiting = batch
    if waiting is not None:
        yield waiting


def labels_of(epoch: int) -> torch.Tensor:
    """Labels of a script that changes them after its first epoch."""
    return (torch.arange(20) + (epoch > 0)) % 2


def steps_of(folder: Path, life: int, rank: int) -> list[dict[str, Any]]:
    """The lines that a life has said."""
    path = folder / f"steps-{life}-{rank}"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def train_plainly(script: Script, data: Path, steps: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Trains steps again with torch alone, all ranks in this process; returns what `Life` says of each.

    Args:
        script: The script.
        data: Where its data lie.
        steps: By step, by rank, the samples and the epoch.
    """
    dataset = plain_data(script, data)
    model = make_model(script)
    optimizer = make_optimizer(script, model, plain=True)
    said = []
    for step, ranks in enumerate(steps):
        total: dict[str, torch.Tensor] = {}
        read = []
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for line in ranks:
            if script.relabels:
                dataset.tensors[1][:] = labels_of(line["epoch"])
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
            x_BW, label_B = plain_batch(dataset, line["indices"])
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
