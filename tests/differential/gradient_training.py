"""Trains what a script of the gradient plane says, on plain PyTorch, in one process; ranks build on it."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint

from shade.gradient import optim as ours
from tests.differential.gradient_script import Script

Weights = dict[str, np.ndarray]

WIDTH = 64
CLIP_NORM, CLIP_VALUE = 0.2, 0.01
KEPT = 0.5
"""Events that change weights by hand leave so much of them: the change is larger than bfloat16 rounds."""


class Network(nn.Module):
    """A stem, two branches and a head; the wide layers are sent sparsely."""

    def __init__(self, script: Script, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self._script = script
        self.stem = nn.Conv2d(16, 16, 3, padding=1) if script.conv else nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if script.norm else nn.Identity()
        self.branches = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        if script.tied:
            self.branches[1].weight = self.branches[0].weight
        self.extra = nn.Linear(WIDTH, WIDTH) if script.happenings & {"unfreeze", "add group"} or script.frozen else None
        if self.extra is not None and (script.frozen or "unfreeze" in script.happenings):
            self.extra.requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH) if script.unused else None
        self.head = nn.Linear(WIDTH, 5)
        dtypes = {"bfloat16": torch.bfloat16, "float64": torch.float64}
        self.to(dtypes.get(script.dtype, torch.float32))
        if script.dtype == "mixed":
            self.branches.to(torch.bfloat16)

    def forward(self, inputs: Tensor, used: tuple[int, ...]) -> Tensor:
        """The logits; goes through those branches."""
        hidden = inputs.to(self.stem.weight.dtype)
        hidden = self.stem(hidden.view(-1, 16, 2, 2)).flatten(1) if self._script.conv else self.stem(hidden)
        hidden = self.norm(torch.tanh(hidden))
        for number in used:
            branch = self.branches[number]
            narrow = hidden.to(branch.weight.dtype)
            if self._script.checkpoint and self.training:
                out = checkpoint(branch, narrow, use_reentrant=self._script.checkpoint == "reentrant")
            else:
                out = branch(narrow)
            hidden = hidden + torch.tanh(out).to(hidden.dtype)
        for module in (self.extra, getattr(self, "added", None)):
            if module is not None:
                hidden = hidden + torch.tanh(module(hidden))
        return self.head(hidden.to(self.head.weight.dtype))


class Training:
    """One process's training; this class itself is plain PyTorch on the batches of all ranks."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.step = 0
        self.snapshots: list[Weights] = []
        """The weights before each step, after its events; at the end, before and after what is late was applied."""
        self.scaler = self.make_scaler()
        self.late: list[Tensor | None] | None = None
        self.buffers: list[dict[str, Tensor]] = []

    # ── the loop ────────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self) -> None:
        """Trains to the end."""
        self.build(self.script.seed)
        with self.around():
            for number in range(self.script.steps):
                self.step = number
                for step, kind in self.script.events:
                    if step == self.step:
                        self.happen(kind)
                self.snapshots.append(weights_of(self.model))
                if self.script.zero == "before":
                    self.model.zero_grad()
                if self.is_over():
                    break
                self.backward()
                self.update()
                if self.scheduler is not None:
                    self.scheduler.step()
                if self.script.zero in ("none", "zero"):
                    self.model.zero_grad(set_to_none=self.script.zero == "none")
        self.step = self.script.steps
        self.snapshots.append(weights_of(self.model))
        self.finish()
        self.snapshots.append(weights_of(self.model))

    def build(self, seed: int) -> None:
        """Makes model, optimizer and scheduler."""
        self.model = Network(self.script, seed)
        self.optimizer = self.make_optimizer()
        self.scheduler = self.make_scheduler()
        self.buffers = [copy.deepcopy(dict(self.model.named_buffers())) for _ in range(self.script.ranks)]

    def around(self) -> AbstractContextManager[Any]:
        """The context of the loop."""
        return contextlib.nullcontext()

    def is_over(self) -> bool:
        """Whether this process has no more data."""
        return False

    def backward(self) -> None:
        """All backward passes of a step: of every rank's batch, weighed as in the whole batch."""
        if self.script.clips_own:
            return self._clip_each()
        for number in range(self.script.passes):
            for rank, share in enumerate(self.script.shares(self.step)):
                if share:
                    with self._buffers_of(rank):
                        loss = self.loss(self.model, rank, number) * share
                    self.go_back(loss if self.script.staleness else self.scaler.scale(loss), number)

    def _clip_each(self) -> None:
        sums: dict[nn.Parameter, Tensor] = {}
        for rank, share in enumerate(self.script.shares(self.step)):
            self.model.zero_grad()
            for number in range(self.script.passes if share else 0):
                with self._buffers_of(rank):
                    loss = self.loss(self.model, rank, number)
                self.go_back(loss, number)
            self.clip(list(self.model.parameters()))
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    sums[parameter] = share * parameter.grad + sums.get(parameter, 0.0)
        for parameter, total in sums.items():
            parameter.grad = total

    def update(self) -> None:
        """Takes the step that is due."""
        if not self.script.staleness:
            self.take_step()
            return
        due, self.late = self.late, [parameter.grad for parameter in self.in_optimizer()]
        self.model.zero_grad()
        self._settle(due)

    def take_step(self) -> None:
        """Clips, unscales and steps as a script does."""
        if self.script.clip and not self.script.clips_own:
            self.scaler.unscale_(self.optimizer)
            self.clip(self.in_optimizer())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.script.face == "engine":
            self.model.zero_grad()

    def finish(self) -> None:
        """Applies what is late, and brings buffers together as documented."""
        due, self.late = self.late, None
        self._settle(due)
        if self.script.face == "hook":
            self.model.load_state_dict(self.buffers[0], strict=False)
            return
        means = {
            name: torch.stack([each[name] for each in self.buffers]).double().mean(0)
            if first.is_floating_point()
            else first
            for name, first in self.buffers[0].items()
        }
        for each in self.buffers:
            for name, mean in means.items():
                each[name].copy_(mean)
        self.model.load_state_dict(self.buffers[0], strict=False)

    def _settle(self, due: list[Tensor | None] | None) -> None:
        if due is None or not all(each is None or bool(each.isfinite().all()) for each in due):
            return
        for parameter, gradient in zip(self.in_optimizer(), due, strict=False):
            parameter.grad = gradient
        if self.script.clip and not self.script.clips_own:
            self.clip(self.in_optimizer())
        self.optimizer.step()
        self.model.zero_grad()

    # ── its parts ───────────────────────────────────────────────────────────────────────────────────────────────────

    def loss(self, model: nn.Module, rank: int, number: int) -> Tensor:
        """The loss of one rank's batch in one pass."""
        script = self.script
        generator = torch.Generator().manual_seed(10_000 * script.seed + 1000 * self.step + 10 * number + rank)
        inputs = torch.randn(script.samples(rank, self.step), WIDTH, generator=generator)
        labels = inputs[:, :5].argmax(1)
        inputs.requires_grad_(script.penalty)
        logits = model(inputs, self.used(rank))
        loss = F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), labels)
        if script.penalty:
            (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
            loss = loss + slope.square().sum()
        if script.infinite == (self.step, rank) and number == 0:
            loss = loss * float("inf")
        return loss / script.passes

    def used(self, rank: int) -> tuple[int, ...]:
        """The branches that a rank uses."""
        use = self.script.use
        if use == "both":
            return (0, 1)
        return (0,) if use == "one" else ((self.step + (rank if use == "apart" else 0)) % 2,)

    def go_back(self, loss: Tensor, number: int) -> None:
        """One backward pass, or two over the same graph."""
        if self.script.place == "retained" and number == self.script.passes - 1:
            loss.backward(retain_graph=True)
        loss.backward()

    def is_inside(self, number: int) -> bool:
        """Whether a backward pass stands inside `accumulate()` or `no_sync()`."""
        last = self.script.passes - 1
        places = {"inside": True, "outside": False, "first outside": number > 0}
        return places.get(self.script.place, number < last)

    def clip(self, parameters: list[nn.Parameter]) -> None:
        """Clips by hand."""
        if self.script.clip == "value":
            clip_grad_value_(parameters, CLIP_VALUE)
        else:
            clip_grad_norm_(parameters, CLIP_NORM)

    def in_optimizer(self) -> list[nn.Parameter]:
        """The optimizer's parameters."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def make_scaler(self) -> Any:
        """A scaler that changes its scale often."""
        settings = {"init_scale": 2.0**10, "growth_interval": 2}
        return torch.amp.GradScaler("cpu", enabled=bool(self.script.scaler), **settings)

    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups: of one to three settings."""
        named = [pair for pair in self.model.named_parameters() if not self._is_late(pair[0])]
        settings = self.settings()
        if self.script.groups == 1:
            return [{"params": [parameter for _, parameter in named]}]
        slow = {"lr": 0.3 * settings["lr"], "weight_decay": 0.0}
        if settings.get("momentum"):
            slow["momentum"] = 0.5
        kinds: dict[str, list[nn.Parameter]] = {"wide": [], "thin": [], "head": []}
        for name, parameter in named:
            is_head = self.script.groups == 3 and name.startswith("head")
            kinds["head" if is_head else "wide" if parameter.ndim > 1 else "thin"].append(parameter)
        groups = [{"params": kinds["thin"], **slow}, {"params": kinds["wide"]}]
        return groups + ([{"params": kinds["head"], "lr": 2 * settings["lr"]}] if kinds["head"] else [])

    def _is_late(self, name: str) -> bool:
        return name.startswith("extra") and "add group" in self.script.happenings

    def settings(self) -> dict[str, Any]:
        """The optimizer's."""
        momentum = {"lr": 0.1, "momentum": 0.9}
        adam = {"lr": 0.01, "eps": 1e-4}
        return {
            "momentum": momentum,
            "nesterov": {**momentum, "nesterov": True, "weight_decay": 0.01},
            "decay": {**momentum, "weight_decay": 0.1},
            "dampened": {**momentum, "dampening": 0.5},
            "maximize": {"lr": 0.1, "maximize": True},
            "adam": adam,
            "adamw": {**adam, "weight_decay": 0.1},
            "adam decay": {**adam, "weight_decay": 0.1},
            "amsgrad": {**adam, "amsgrad": True},
            "local": adam,
            "rmsprop": {"lr": 0.01, "eps": 1e-2},
        }.get(self.script.optimizer, {"lr": 0.1})

    def make_optimizer(self) -> Any:
        """The one of torch.optim."""
        kinds: dict[str, Any] = dict.fromkeys(("adam", "adam decay", "amsgrad"), torch.optim.Adam)
        kinds |= {"adamw": torch.optim.AdamW, "rmsprop": torch.optim.RMSprop, "local": torch.optim.AdamW}
        return kinds.get(self.script.optimizer, torch.optim.SGD)(self.groups(), **self.settings())

    def make_scheduler(self) -> Any:
        """The one that the script names, over its optimizer."""
        plans = torch.optim.lr_scheduler
        optimizer = self.optimizer
        match self.script.scheduler:
            case "step":
                return plans.StepLR(optimizer, 1, 0.5)
            case "warm up":
                return plans.LambdaLR(optimizer, lambda step: step / 3)
            case "one cycle":
                group = optimizer.param_groups[0]
                return plans.OneCycleLR(
                    optimizer, 0.2, total_steps=8, cycle_momentum="betas" in group or bool(group.get("momentum"))
                )
            case "cosine":
                return plans.CosineAnnealingLR(optimizer, 4)
        return None

    @contextlib.contextmanager
    def _buffers_of(self, rank: int) -> Iterator[None]:
        if self.script.norm:
            self.model.load_state_dict(self.buffers[rank], strict=False)
        yield
        if self.script.norm:
            self.buffers[rank] = copy.deepcopy(dict(self.model.named_buffers()))

    # ── what happens between two steps ──────────────────────────────────────────────────────────────────────────────

    def happen(self, kind: str) -> None:
        """Does what an event is called."""
        getattr(self, f"happens_{kind.replace(' ', '_')}")()

    def happens_data(self) -> None:
        for parameter in self.model.parameters():
            parameter.data = parameter.data * KEPT

    def happens_vector(self) -> None:
        parameters = list(self.model.parameters())
        vector_to_parameters(parameters_to_vector(parameters).detach() * KEPT, parameters)

    def happens_memory_format(self) -> None:
        self.model.to(memory_format=torch.channels_last)

    def happens_transposed(self) -> None:
        for parameter in self.model.parameters():
            if parameter.ndim == 2:
                parameter.data = parameter.data.t().contiguous().t()

    def happens_assign(self) -> None:
        state = {name: each.clone() for name, each in self.model.state_dict().items()}
        self.model.load_state_dict(state, assign=True)

    def happens_convert(self) -> None:
        self.model.to(torch.float32 if self.script.dtype != "float32" else torch.bfloat16)

    def happens_in_place(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(KEPT)

    def happens_load_weights(self) -> None:
        trained = {name for name, _ in self.model.named_parameters()}
        state = {name: each * KEPT if name in trained else each for name, each in self.model.state_dict().items()}
        self.model.load_state_dict(state)

    def happens_load_optimizer(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def happens_learning_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5

    def happens_unfreeze(self) -> None:
        assert self.model.extra is not None
        self.model.extra.requires_grad_(True)

    def happens_freeze(self) -> None:
        self.model.branches[0].requires_grad_(False)

    def happens_add_group(self) -> None:
        assert self.model.extra is not None
        self.optimizer.add_param_group({"params": list(self.model.extra.parameters())})

    def happens_new_layer(self) -> None:
        torch.manual_seed(self.script.seed)
        self.model.added = nn.Linear(WIDTH, WIDTH).to(self.model.head.weight.dtype)
        self.optimizer.add_param_group({"params": list(self.model.added.parameters())})

    def happens_eval(self) -> None:
        self.finish()
        self.happens_peek()

    def happens_peek(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(torch.ones(3, WIDTH), (0, 1))
        self.model.train()

    def happens_resume(self) -> None:
        if self.script.face == "engine":  # a new engine begins with rank 0's buffers
            self.buffers = [copy.deepcopy(self.buffers[0]) for _ in self.buffers]

    def happens_resume_late(self) -> None:
        """Plain PyTorch has nothing to lose."""


def weights_of(model: nn.Module) -> Weights:
    """Parameters and buffers as float64."""
    return {name: each.detach().double().numpy().copy() for name, each in model.state_dict().items()}


def saved_and_read(state: Any) -> Any:
    """A state after its way through a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


SPARSE: dict[str, Any] = {
    **dict.fromkeys(("adam", "adam decay", "amsgrad"), ours.SparseAdam),
    "adamw": ours.SparseAdamW,
    "local": ours.LocalAdamW,
    "torch": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
}
