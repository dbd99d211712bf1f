"""The training that a generated checkpoint script describes: its objects, and one step of them, in plain PyTorch."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

NUM_SAMPLES, WIDTH, BATCH = 12, 8, 4
STEPS_AN_EPOCH = NUM_SAMPLES // BATCH


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
    num_ranks: int = 1
    seed: int = 0


# ── models ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.decode.weight = self.encode.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.decode(torch.tanh(self.encode(x))))


class Odd(nn.Module):
    """Parameters and buffers of odd shapes and layouts, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(2, WIDTH).t())
        self.strided = nn.Parameter(torch.randn(2, 4)[:, ::2])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.randn(1, 1, 1))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("shown", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.passes = 0

    def get_extra_state(self) -> Any:
        return {"passes": self.passes}

    def set_extra_state(self, state: Any) -> None:
        self.passes = state["passes"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.count += 1
            self.passes += 1
            self.seen[int(self.count) % 5] ^= True
            self.shown.mul_(1.01)
        return (x @ self.transposed) @ self.strided * self.scale * self.table[1] + self.one.sum() + self.empty.sum()


class Recurrent(nn.Module):
    """An LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x.view(-1, 4, 2))[0][:, -1])


class Words(nn.Module):
    """An embedding, of which a step uses some rows."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(16, 4, sparse=sparse), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words((x.real.abs() * 7).long() % 16).mean(1))


def _mlp(*inner: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 6), *inner, nn.Linear(6, 2))


def _conv() -> nn.Module:
    layers = (nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(36, 2)).to(memory_format=torch.channels_last)


def _frozen() -> nn.Module:
    model = _mlp(nn.ReLU())
    next(iter(model.children())).requires_grad_(False)
    return model


def _normed() -> nn.Module:
    wrap = nn.utils.parametrizations
    return nn.Sequential(wrap.weight_norm(nn.Linear(WIDTH, 6)), nn.Tanh(), wrap.spectral_norm(nn.Linear(6, 2)))


def _lazy() -> nn.Module:
    model = nn.Sequential(nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2))
    model(torch.zeros(2, WIDTH))
    return model


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, 2),
    "mlp": lambda: _mlp(nn.ReLU()),
    "dropout": lambda: _mlp(nn.Dropout(0.4)),
    "batchnorm": lambda: _mlp(nn.BatchNorm1d(6), nn.ReLU()),
    "conv": _conv,
    "tied": Tied,
    "frozen": _frozen,
    "normed": _normed,
    "lazy": _lazy,
    "odd": Odd,
    "recurrent": Recurrent,
    "embedding": Words,
    "sparse": lambda: Words(sparse=True),
    "compiled": lambda: torch.compile(_mlp(nn.ReLU()), backend="eager"),
    "ddp": lambda: nn.parallel.DistributedDataParallel(_mlp(nn.BatchNorm1d(6), nn.ReLU())),
}
PLAIN_DTYPES = ("float32", "float64", "bfloat16", "float16", "complex64", "complex128")
ANY_DTYPE = frozenset({"linear", "tied", "odd", "frozen_linear"})
"""Models of operations that every type has."""


# ── optimizers, schedulers ──────────────────────────────────────────────────────────────────────────────────────────


class Wide(torch.optim.Optimizer):
    """Momentum that is kept in another type than the parameters."""

    def __init__(self, params: Any, lr: float = 0.05, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(params, {"lr": lr, "dtype": dtype})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state["moment"] = torch.zeros_like(param, dtype=group["dtype"])
                        state["steps"] = 0
                    state["steps"] += 1
                    state["moment"].mul_(0.9).add_(param.grad.to(group["dtype"]))
                    param.sub_((group["lr"] * state["moment"]).to(param.dtype))
        return loss


def _wide(params: Any) -> torch.optim.Optimizer:
    first = params[0]["params"][0]
    return Wide(params, dtype=torch.float32 if first.dtype is torch.bfloat16 else torch.float64)


_optim = torch.optim
OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: _optim.SGD(params, lr=0.05),
    "momentum": lambda params: _optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda params: _optim.Adam(params, lr=0.05),
    "adamw": lambda params: _optim.AdamW(params, lr=0.05, amsgrad=True, foreach=True),
    "fused": lambda params: _optim.AdamW(params, lr=0.05, fused=True),
    "single": lambda params: _optim.Adam(params, lr=torch.tensor(0.05), foreach=False),
    "adagrad": lambda params: _optim.Adagrad(params, lr=0.05),
    "rmsprop": lambda params: _optim.RMSprop(params, lr=0.05, centered=True, momentum=0.5),
    "adadelta": lambda params: _optim.Adadelta(params),
    "adamax": lambda params: _optim.Adamax(params),
    "nadam": lambda params: _optim.NAdam(params),
    "radam": lambda params: _optim.RAdam(params),
    "asgd": lambda params: _optim.ASGD(params),
    "rprop": lambda params: _optim.Rprop(params),
    "adafactor": lambda params: _optim.Adafactor(params),
    "lbfgs": lambda params: _optim.LBFGS(params[0]["params"], lr=0.1, max_iter=3, line_search_fn="strong_wolfe"),
    "sparse_adam": lambda params: _optim.SparseAdam(params),
    "wide": _wide,
}
ANY_OPTIMIZERS = ("sgd", "momentum", "adam", "wide")
"""Those that take every type of parameters."""

_lr = lr_scheduler
SCHEDULERS: Mapping[str, Callable[[torch.optim.Optimizer], Any]] = {
    "step": lambda optimizer: _lr.StepLR(optimizer, 2, 0.5),
    "cosine": lambda optimizer: _lr.CosineAnnealingLR(optimizer, 5),
    "restarts": lambda optimizer: _lr.CosineAnnealingWarmRestarts(optimizer, 2),
    "onecycle": lambda optimizer: _lr.OneCycleLR(optimizer, 0.1, total_steps=9, cycle_momentum=False),
    "cyclic": lambda optimizer: _lr.CyclicLR(optimizer, 0.01, 0.1, step_size_up=2, cycle_momentum=False),
    "plateau": lambda optimizer: _lr.ReduceLROnPlateau(optimizer, patience=0),
    "lambda": lambda optimizer: _lr.LambdaLR(optimizer, lambda step: 0.9**step),
    "sequential": lambda optimizer: _lr.SequentialLR(
        optimizer, [_lr.ConstantLR(optimizer, 0.5, 2), _lr.ExponentialLR(optimizer, 0.8)], [2]
    ),
    "chained": lambda optimizer: _lr.ChainedScheduler(
        [_lr.ConstantLR(optimizer, 0.5, 2), _lr.ExponentialLR(optimizer, 0.9)]
    ),
}


# ── the user's own objects ──────────────────────────────────────────────────────────────────────────────────────────


class Noise:
    """Generators of the user's own, which the training draws from."""

    def __init__(self) -> None:
        self.torch, self.numpy, self.python = torch.Generator(), np.random.default_rng(5), random.Random(6)
        self.torch.manual_seed(4)

    def next(self) -> float:
        drawn = torch.rand((), generator=self.torch).item() + self.numpy.random() + self.python.gauss(0, 1)
        return 0.01 * float(drawn)

    def state_dict(self) -> dict[str, Any]:
        numpy = self.numpy.bit_generator.state
        return {"torch": self.torch.get_state(), "numpy": numpy, "python": self.python.getstate()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.torch.set_state(state["torch"])
        self.numpy.bit_generator.state = state["numpy"]
        self.python.setstate(state["python"])


class Notes:
    """Plain values of many kinds; the state is the object's own memory, which every step changes in place."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "step": 0,
            "name": "ä/@%\n",
            "none": None,
            "nested": {"": [], 1: (1, ("a", None)), (2, "b"): {"deep": [{}]}},
            "seen": set(),
            "big": 2**80,
            "best": float("inf"),
            "queue": deque([1.0], maxlen=3),
            "bytes": b"\x00\xff",
            "history": [],
        }

    def next(self) -> float:
        state = self.state
        state["step"] += 1
        state["seen"].add(state["step"] % 4)
        state["nested"][""].append(state["step"])
        state["queue"].append(float(state["step"]))
        state["history"] += [state["step"]] * 150  # long lists are stored as tensors
        state["big"] += 1
        state["best"] = 1.0 / state["step"]
        return 0.001 * len(state["nested"][""]) + 0.001 * len(state["seen"])

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Arrays(Notes):
    """NumPy arrays of several types and layouts, changed in place."""

    def __init__(self) -> None:
        self.state = {
            "table": np.arange(12, dtype=np.float64).reshape(3, 4),
            "columns": np.arange(12, dtype=np.float32).reshape(3, 4).T,
            "part": np.arange(10)[::3],
            "scalar": np.float32(0.1),
            "zero": np.array(3),
            "empty": np.zeros((0, 2)),
            "bool": np.zeros(3, dtype=bool),
            "complex": np.ones(2, dtype=np.complex128),
            "text": np.array(["ab", "c"]),
            "half": np.ones(2, dtype=np.float16),
            "big": np.arange(3, dtype=">i4"),
        }

    def next(self) -> float:
        for name in ("table", "columns", "part", "zero", "complex", "half", "big"):
            self.state[name] += 1
        self.state["bool"][int(self.state["zero"]) % 3] ^= True
        self.state["scalar"] = np.float32(self.state["scalar"] * 1.1)
        return float(self.state["columns"].sum() + self.state["part"][1] + self.state["scalar"]) * 1e-4


class Tensors(Notes):
    """Tensors of several types and layouts, two of them the same and one a part of another."""

    def __init__(self) -> None:
        whole = torch.arange(12.0).view(3, 4)
        self.state = {
            "whole": whole,
            "again": whole,
            "columns": torch.arange(6, dtype=torch.int32).view(2, 3).t(),
            "part": torch.arange(100.0)[40:44],
            "zero": torch.tensor(0.5, dtype=torch.float64),
            "empty": torch.empty(0, 2, dtype=torch.bfloat16),
            "bool": torch.zeros(3, dtype=torch.bool),
            "complex": torch.ones(2, dtype=torch.complex128),
            "bytes": torch.arange(5, dtype=torch.uint8),
            "list": [torch.ones(1), (torch.zeros(2, dtype=torch.float16),)],
        }

    def next(self) -> float:
        for name in ("whole", "columns", "part", "zero", "complex", "bytes"):
            self.state[name] += 1
        self.state["list"][1][0].add_(0.5)
        self.state["bool"][int(self.state["zero"]) % 3] ^= True
        return float(self.state["whole"].sum() + self.state["columns"].sum() + self.state["part"][2]) * 1e-4


class Holder:
    """Shows a tensor of the model's, as a teacher does, and keeps what it is given."""

    def __init__(self) -> None:
        self.shown: Any = None
        self.given: Any = None

    def next(self) -> float:
        return 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"weight": self.shown}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["weight"]


class Strange(Notes):
    """Holds what no snapshot can hold."""

    def __init__(self) -> None:
        self.state = {"step": 0, "thing": object()}

    def next(self) -> float:
        return 0.0


USERS: Mapping[str, Callable[[], Any]] = {
    "noise": Noise,
    "notes": Notes,
    "arrays": Arrays,
    "tensors": Tensors,
    "holder": Holder,
    "strange": Strange,
    "generator": torch.Generator,
}


# ── data ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Samples(torch.utils.data.Dataset[Any]):
    """Random numbers, perhaps with noise of one of the global generators."""

    def __init__(self, augments: str) -> None:
        self.data = torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(3))
        self._augments = augments

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        drawn = {
            "": lambda: 0.0,
            "torch": lambda: float(torch.rand(())),
            "numpy": np.random.rand,
            "python": random.random,
        }[self._augments]()
        return self.data[index] + 0.1 * drawn, 0


class Cursor:
    """The user's own place in the data: an epoch's order comes from a generator of its own."""

    def __init__(self, data: Samples, batch: int, rank: int = 0, num_ranks: int = 1) -> None:
        self._data, self._batch, self._rank, self._num_ranks = data, batch, rank, num_ranks
        self.position, self.generator = 0, torch.Generator().manual_seed(7)
        self.order = torch.randperm(NUM_SAMPLES, generator=self.generator)

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            if self.position >= NUM_SAMPLES:
                self.position, self.order = 0, torch.randperm(NUM_SAMPLES, generator=self.generator)
            chosen = self.order[self.position : self.position + self._batch]
            self.position += self._batch
            yield torch.stack([self._data[int(index)][0] for index in chosen[self._rank :: self._num_ranks]])

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "order": self.order, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.order = state["position"], state["order"]
        self.generator.set_state(state["generator"])


@dataclass
class Feed:
    """Batches without end, and what is attached so that they continue."""

    batches: Callable[[int], Iterator[torch.Tensor]]
    """Takes the epoch to begin with."""
    attached: dict[str, Any] = field(default_factory=dict)
    report: Callable[[], None] = lambda: None
    """Called after each step."""
    close: Callable[[], None] = lambda: None


def make_feed(script: Script, rank: int, *, batch: int = BATCH) -> Feed:
    """Returns the batches of a script."""
    data, workers = Samples(script.augments), script.num_workers
    if script.loader == "cursor":
        cursor = Cursor(data, batch, rank, script.num_ranks)
        return Feed(lambda epoch: iter(cursor), {"cursor": cursor})
    if script.loader == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = StatefulDataLoader(data, batch, shuffle=True, num_workers=workers)
        return Feed(lambda epoch: _epochs(loader), {"loader": loader})
    from shade.data import ShadeDataset, ShadeLoader, ShadeSampler

    wrapped = ShadeDataset(data, cache=None)
    if script.loader == "shade_loader":
        own = ShadeLoader(wrapped, batch, shuffle=True, num_workers=workers)
        return Feed(lambda epoch: _epochs(own), {"loader": own})
    is_loaders = script.loader == "shade_both"  # the loader is attached, and keeps the sampler's place
    sampler = ShadeSampler(wrapped, batch_size=batch, mode="uniform")
    made = torch.utils.data.DataLoader if script.loader == "dataloader" else ShadeLoader
    sampled = made(wrapped, batch, sampler=sampler, num_workers=workers)
    last = torch.zeros(0)

    def epochs(epoch: int) -> Iterator[torch.Tensor]:
        nonlocal last
        while True:
            sampler.set_epoch(epoch)
            for x, _, indices in sampled:
                last = indices
                yield x
            epoch += 1

    attached = {"loader": sampled} if is_loaders else {"sampler": sampler}
    return Feed(epochs, attached, lambda: sampler.report(last, torch.ones(len(last))), sampler.close)


def _epochs(loader: Any) -> Iterator[torch.Tensor]:
    while True:
        for x, *_ in loader:
            yield x


# ── the training ────────────────────────────────────────────────────────────────────────────────────────────────────


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
        self._touch()
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
            each.step(*([loss.item()] if isinstance(each, lr_scheduler.ReduceLROnPlateau) else []))
        if self.ema is not None:
            self.ema.update_parameters(self.model)
        self.feed.report()
        self.done += 1
        return float(loss.detach()).hex()

    @torch.no_grad()
    def _touch(self) -> None:
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
        elif self.script.touched == "moments":
            for state in self.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim():
                        value.mul_(0.5)
        elif self.script.touched == "buffers":
            for buffer in self.model.buffers():
                if buffer.is_floating_point():
                    buffer.data.mul_(0.9)

    def close(self) -> None:
        """Frees what the loader holds."""
        del self._batches
        self.feed.close()
