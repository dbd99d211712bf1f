"""Models and optimizers of combined scripts, and what scripts do to gradients."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import torch

from tests.differential.company_data import WIDTH
from tests.differential.company_script import Script


class Linear(torch.nn.Module):
    """The plainest; with an attribute that a data set's sampler has too."""

    epoch = 9

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Embedding(Linear):
    """Adds rows of a table, of which a batch uses few."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(8, 2, sparse=sparse)

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


class Unused(Linear):
    """Has a parameter that no batch uses, and that would decay if it took a step."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = torch.nn.Linear(WIDTH, WIDTH)


class Counting(Linear):
    """Each forward pass moves a buffer, which the next one multiplies with."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.scale = self.scale * 1.01
        return self.layer(x) * self.scale


class Refusing(torch.nn.Linear):
    """May refuse what it is given when it is loaded."""

    refuses = False

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        if self.refuses:
            raise ValueError("another vocabulary")
        super()._load_from_state_dict(*args, **options)


class Picky(Linear):
    """Its last part loads itself, after the others."""

    def __init__(self) -> None:
        super().__init__()
        self.last = Refusing(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(x))


MODELS = {
    "linear": Linear,
    "embedding": Embedding,
    "sparse": lambda: Embedding(sparse=True),
    "complex": Complex,
    "tied": Tied,
    "unused": Unused,
    "counting": Counting,
    "picky": Picky,
}


class Passing(torch.optim.Optimizer):
    """Passes everything on to an optimizer, and calls no constructor, as Accelerate's does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


def make_model(script: Script) -> torch.nn.Module:
    """The same one on every rank."""
    torch.manual_seed(1)
    return MODELS[script.model]()


def make_optimizer(
    script: Script, model: torch.nn.Module, *, plain: bool = False, factor: float = 1.0
) -> torch.optim.Optimizer:
    """An optimizer of torch's own; for `GradientEngine` one of ours that does the same, unless asked for ``plain``."""
    parameters, decay = model.parameters(), 0.1 * (script.model == "unused")
    if script.exchange == "engine" and not plain:
        from shade.gradient.optim import SparseSGD

        return SparseSGD(parameters, 0.1 * factor, weight_decay=decay)
    if script.optimizer == "momentum":
        return torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=decay)
    if script.optimizer.endswith("adam"):
        fused = script.optimizer == "fused adam" and script.model != "complex"  # which torch refuses
        return torch.optim.Adam(parameters, 0.01, fused=fused, weight_decay=decay)
    return torch.optim.SGD(parameters, 0.1, weight_decay=decay)


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
    """The parameters and buffers, in short, and as numbers."""
    tensors = [*model.state_dict().values()]
    return {"weights": digest(*tensors), "values": [*_values(tensors)]}


def _values(tensors: list[torch.Tensor]) -> Iterator[float]:
    for tensor in tensors:
        yield from (
            (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).detach().flatten().tolist()
        )
