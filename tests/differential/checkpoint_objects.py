"""Models, optimizers and schedulers of generated checkpoint scripts, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import lr_scheduler

WIDTH = 8

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


def _sharded() -> nn.Module:
    model, mesh = _mlp(nn.ReLU()), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model):
        fully_shard(layer, mesh=mesh)
    return model


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, 2),
    "mlp": lambda: _mlp(nn.ReLU()),
    "large": lambda: nn.Sequential(nn.Linear(WIDTH, 512), nn.Linear(512, 2)),  # whose first weight has pages of its own
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
    "fsdp2": _sharded,
}
PLAIN_DTYPES = ("float32", "float64", "bfloat16", "float16", "complex64", "complex128")
ANY_DTYPE = frozenset({"linear", "tied", "odd"})
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
    "lbfgs": lambda params: _optim.LBFGS(params[0]["params"], lr=0.1, max_iter=3),
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
