"""The training that a generated checkpoint script describes: its objects, and one step of them, in plain PyTorch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.differential.checkpoint_objects import MODELS, OPTIMIZERS, SCHEDULERS
from tests.differential.checkpoint_users import BATCH, USERS, Notes, make_feed


@dataclass(frozen=True)
class Script:
    """A training script: what it trains, how it saves, how it ends, and how it begins again."""

    model: str = "linear"
    dtype: str = "float32"
    optimizer: str = "sgd"
    num_groups: int = 1
    schedulers: tuple[str, ...] = ()
    has_scaler: bool = False
    ema: str = ""
    users: tuple[str, ...] = ()
    """Objects of the user's own, by kind."""
    loader: str = "cursor"
    num_workers: int = 0
    augments: str = ""
    """The generator that a sample's transform draws from."""
    touched: str = ""
    """What a step changes in place before anything else, while a save may be under way."""
    copies_late: bool = False
    """Whether what is copied in the background is copied when the training has gone on."""
    saver: str = ""
    """How DCP saves, if it does; else a Checkpointer saves."""
    strategy: str = "copy"
    tier: str = "storage"
    codec: str = ""
    keyframe_every: int = 3
    keep: str = "last=2"
    every: int = 1
    """Steps between two saves; 0: none but the one at a clean end."""
    waits: str = "committed"
    """What the script waits for after a save."""
    saves_twice: bool = False
    num_steps: int = 4
    end_step: int = 2
    """The step after which the first process ends."""
    end: str = "dropped"
    loses_machine: bool = False
    damage: str = ""
    """What happens to the newest snapshot in storage between the two processes."""
    restores: str = "latest"
    wrong: str = ""
    """What the second process builds otherwise than the first."""
    wrong_on_one: bool = False
    """Whether the last rank alone builds it otherwise."""
    num_ranks: int = 1
    seed: int = 0


class Training:
    """The objects of a script, in one process.

    Args:
        script: The script.
        seed: Of the weights and of the global generators.
        rank: This rank.
        wrong: What is built otherwise: a value of `Script.wrong`.
    """

    def __init__(self, script: Script, seed: int, rank: int = 0, wrong: str = "") -> None:
        self.script = script
        for sow in (torch.manual_seed, np.random.seed, random.seed):
            sow(seed + script.seed)
        other = "linear" if script.model == "recurrent" else "recurrent"
        made = MODELS[other if wrong == "model" else script.model]()
        if wrong == "shape":
            first = next(param for param in made.parameters() if param.dim())
            first.data = first.new_zeros((first.shape[0] + 1, *first.shape[1:]))
        dtype = getattr(torch, script.dtype)
        if wrong == "dtype":
            dtype = torch.float32 if dtype is torch.float64 else torch.float64
        self.model = made if dtype is torch.float32 else made.to(dtype)
        self._compute_dtype = dtype
        for sow in (torch.manual_seed, np.random.seed, random.seed):
            sow(100 + seed + script.seed + rank)
        self.optimizer = self._make_optimizer(wrong)
        self.schedulers = [SCHEDULERS[name](self.optimizer) for name in script.schedulers]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) if script.has_scaler else None
        self.ema = None
        if script.ema:
            average = get_ema_multi_avg_fn(0.7) if script.ema == "ema" else None
            self.ema = AveragedModel(self.model, multi_avg_fn=average, use_buffers=script.ema == "ema")
        self.users = {name: USERS[name]() for name in script.users}
        if "holder" in self.users:
            self.users["holder"].shown = next(self.model.parameters()).detach()
        self.feed = make_feed(script, rank, batch=BATCH // 2 if wrong == "batch" else BATCH)
        self._batches: Iterator[torch.Tensor] | None = None
        self.done = 0
        self.first_epoch = 0
        self.wrong_object = Notes() if wrong == "missing" else None

    def _make_optimizer(self, wrong: str) -> torch.optim.Optimizer:
        params = [param for param in self.model.parameters() if param.requires_grad]
        num_groups = self.script.num_groups + (wrong == "groups")
        groups = [
            {"params": params[first::num_groups]} | ({"lr": 0.01 * (first + 1)} if first else {})
            for first in range(num_groups)
        ]
        name = self.script.optimizer
        if wrong == "optimizer":
            name = "momentum" if name in ("adam", "adamw", "fused", "single", "nadam", "radam") else "adam"
        return OPTIMIZERS[name](groups)

    @property
    def attached(self) -> dict[str, Any]:
        """What a script attaches, by name."""
        named: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        named |= {f"scheduler{number}": each for number, each in enumerate(self.schedulers)}
        named |= {"scaler": self.scaler} if self.scaler is not None else {}
        named |= {"ema": self.ema} if self.ema is not None else {}
        named |= self.users | self.feed.attached
        return named | ({"missing": self.wrong_object} if self.wrong_object is not None else {})

    def step(self) -> str:
        """Makes one step; returns the bits of its loss."""
        self.touch()
        if self._batches is None:
            self._batches = self.feed.batches(self.first_epoch)
        x = next(self._batches).to(self._compute_dtype)
        x = x + sum(each.next() for each in self.users.values() if hasattr(each, "next"))
        loss = torch.zeros(())

        def closure() -> torch.Tensor:
            nonlocal loss
            self.optimizer.zero_grad()
            loss = (self.model(x) - 0.5).abs().square().mean()
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            return loss

        if self.script.optimizer == "lbfgs":
            self.optimizer.step(closure)
        else:
            closure()
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
        for each in self.schedulers:
            each.step(*([self._metric(loss)] if isinstance(each, lr_scheduler.ReduceLROnPlateau) else []))
        if self.ema is not None:
            self.ema.update_parameters(self.model)
        self.feed.report()
        self.done += 1
        return float(loss.detach()).hex()

    def _metric(self, loss: torch.Tensor) -> float:
        """What a plateau is judged by; the same on all ranks where DCP keeps one learning rate for them."""
        if not self.script.saver.startswith("dcp"):
            return loss.item()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item()

    @torch.no_grad()
    def touch(self) -> None:
        """Changes in place what the script says; a step begins with it."""
        params = list(self.model.parameters())
        if self.script.touched == "in place":
            for param in params:
                param.mul_(0.9)
        elif self.script.touched == "data":
            for param in params:
                param.data.mul_(0.9)
        elif self.script.touched == "numpy":
            for param in params:
                if param.dtype is not torch.bfloat16:
                    param.detach().numpy()[...] *= 0.5
        elif self.script.touched in ("layouts", "layouts numpy"):
            moments = [each for state in self.optimizer.state.values() for each in state.values()]
            for tensor in (*params, *moments):
                if isinstance(tensor, torch.Tensor) and not tensor.is_contiguous():
                    changed = tensor.data if self.script.touched == "layouts" else tensor.detach().numpy()
                    changed *= 0.5
        elif self.script.touched == "moments":
            for state in self.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim():
                        value.mul_(0.5)
        elif self.script.touched == "buffers":
            saved = self.model.state_dict()  # a buffer that is not persistent is in no snapshot of PyTorch's either
            for name, buffer in self.model.named_buffers():
                if name in saved and buffer.is_floating_point():
                    buffer.data.mul_(0.9)

    def close(self) -> None:
        """Frees what the loader holds."""
        del self._batches
        self.feed.close()
