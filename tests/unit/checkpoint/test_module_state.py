"""What PyTorch's own load_state_dict takes is taken, and what is refused leaves a module as it was."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shade.checkpoint._capture.app_state import AppState
from shade.checkpoint._capture.module_state import own_ways, way_back_of
from shade.checkpoint._restore.restore import load_module
from shade.errors import StateMismatchError
from tests.support.launching import same_state


class Queue(torch.nn.Module):
    """Has a buffer whose shape is that of the last batch, and takes one of any shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self.register_buffer("out", torch.zeros(4, 1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.out = batch.detach().clone()
        return self.layer(batch)

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        self.out = torch.empty_like(state[prefix + "out"])
        super()._load_from_state_dict(state, prefix, *others)


class Old(torch.nn.Module):
    """A layer under its old name."""

    def __init__(self) -> None:
        super().__init__()
        self.old = torch.nn.Linear(3, 3)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.old(batch)


class Renamed(torch.nn.Module):
    """The same layer under a new name; takes the old one, by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.new = torch.nn.Linear(3, 3)
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: Any, state: dict[str, Any], prefix: str, *others: Any) -> None:
        for key in [key for key in state if key.startswith(f"{prefix}old.")]:
            state[key.replace("old.", "new.")] = state.pop(key)


class Scaled(torch.nn.Linear):
    """Writes a name that it does not take, as quantised layers do."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = torch.ones(1)


class Nervous(torch.nn.Module):
    """Refuses what it gets when its layer has been loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(3, 3), ["nothing"]
        self.register_buffer("count", torch.zeros(1), persistent=False)

        def refuse(module: Any, keys: Any) -> None:
            self.seen.append("a state")
            self.count, self.more = torch.ones(1), True
            raise RuntimeError("not this one")

        self.register_load_state_dict_post_hook(refuse)


def quantised() -> torch.nn.Module:
    """With fake quantisation by channel, whose buffers take their shapes from the first batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and used all the same
        import torch.ao.quantization as quantization

        model = torch.nn.Sequential(quantization.QuantStub(), torch.nn.Linear(3, 8), quantization.DeQuantStub())
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
        return quantization.prepare_qat(model.train())  # type: ignore[no-any-return]


def trained(model: torch.nn.Module) -> torch.nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(torch.randn(7, 3))
    return model


def contents(model: torch.nn.Module) -> AppState:
    made = AppState(replicated=True)
    made.attach({"model": model})
    return made


def restore(source: torch.nn.Module, into: torch.nn.Module) -> None:
    captured = contents(source).capture(0, 1)
    stored = {name: tensor.detach().clone() for name, tensor in captured.tensors.items()}
    contents(into).load(captured.tree, stored, ["model"])


def load(source: torch.nn.Module, into: torch.nn.Module) -> None:
    load_module("model", into, source.state_dict())


@pytest.mark.parametrize("take", [restore, load])
@pytest.mark.parametrize(
    ("made", "loaded"), [(quantised, quantised), (Queue, Queue), (Old, Renamed)], ids=["QAT", "queue", "renamed"]
)
@pytest.mark.parametrize("is_inside", [False, True])
def test_what_a_module_takes_in_its_own_way_is_left_to_it(
    take: Callable[..., None], made: Any, loaded: Any, is_inside: bool
) -> None:
    source, target, oracle = trained(made()), loaded(), loaded()
    if is_inside:
        source, target, oracle = (torch.nn.Sequential(torch.nn.Linear(2, 3), each) for each in (source, target, oracle))
    take(source, target)
    oracle.load_state_dict(source.state_dict())
    assert same_state(target.state_dict(), oracle.state_dict())


def test_the_rest_of_such_a_module_is_checked_beforehand() -> None:
    target = torch.nn.Sequential(torch.nn.Linear(2, 4), Queue())
    assert own_ways(target) == ("1.",)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    for take in (restore, load):
        with pytest.raises(StateMismatchError, match=r"'model/0.weight' of shape \(4, 2\)"):
            take(torch.nn.Sequential(torch.nn.Linear(2, 3), Queue()), target)
        assert same_state(target.state_dict(), before)


@pytest.mark.parametrize("take", [restore, load])
def test_a_module_that_does_not_take_what_it_writes_is_named_and_stays_as_it_was(
    take: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    source, target = Scaled(3, 3), Scaled(3, 3)
    before = target.weight.detach().clone()
    with caplog.at_level(logging.WARNING, "shade.checkpoint"), pytest.raises(StateMismatchError, match="scale"):
        take(source, target)
    assert torch.equal(target.weight, before)
    assert take is load or "'model' writes or lacks scale, which its load_state_dict does not take" in caplog.text
    assert load_module("model", target, source.state_dict(), strict=False) == ([], ["scale"])
    assert torch.equal(target.weight, source.weight)


@pytest.mark.parametrize("take", [restore, load])
def test_a_module_that_refuses_late_stays_as_it_was(take: Callable[..., None]) -> None:
    target = Nervous()
    layer, before = target.layer.weight, {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(StateMismatchError, match=r"'model' takes, got one that it refuses .*not this one"):
        take(Nervous(), target)
    assert target.layer.weight is layer
    assert same_state(target.state_dict(), before)
    assert (target.seen, float(target.count), hasattr(target, "more")) == (["nothing"], 0.0, False)


def test_the_way_back_gives_each_tensor_its_bits_and_its_shape() -> None:
    model = Queue()
    weight, out = model.layer.weight, model.out
    before = weight.detach().clone()
    put_back = way_back_of(model)
    trained(model)
    with torch.no_grad():
        weight.zero_()
        out.resize_(9).fill_(3)
    model.layer.weight = torch.nn.Parameter(torch.zeros(1))
    put_back()
    assert model.layer.weight is weight
    assert torch.equal(weight, before)
    assert model.out is out
    assert torch.equal(out, torch.zeros(4, 1))


def test_the_first_batch_may_come_later() -> None:
    """Nothing is known yet of what a save would hold."""
    contents(torch.nn.LazyLinear(3))
    contents(torch.nn.Linear(3, 3, device="meta"))
