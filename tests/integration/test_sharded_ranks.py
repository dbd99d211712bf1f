"""Models that are split over ranks, saved by Checkpointer: read as one, by stages, and refused by name."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import re
import signal
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.nn import all_reduce
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Shard, distribute_tensor, init_device_mesh

from shade.checkpoint import Checkpointer, load_weights
from shade.cli import main
from shade.errors import CheckpointError, ShadeError
from tests.differential.checkpoint_processes import Say, in_processes
from tests.differential.sharded import Layout, Script, Training, compare
from tests.support.format_reader import read_snapshot

pytestmark = pytest.mark.multiprocess


def new_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))


def sharded(seed: int = 0) -> nn.Sequential:
    model, mesh = new_model(seed), init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model[1], model):
        fully_shard(part, mesh=mesh)
    return model


def trained(model: nn.Module, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.arange(6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def opened(folder: Path, **options: Any) -> Checkpointer:
    return Checkpointer(persist_to=folder / "volume", run="split", every="never", **options)


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """What PyTorch itself gathers."""
    return get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))


def on_ranks(num: int, act: Callable[[int, Say], None], folder: Path) -> list[Any]:
    folder.mkdir(exist_ok=True)
    warnings.simplefilter("ignore")
    return in_processes(num, act, folder / f"meeting-{num}-{act.__name__}")


def test_a_split_snapshot_is_read_as_one(tmp_path: Path) -> None:
    def save(rank: int, say: Say) -> None:
        model = sharded()
        optimizer = trained(model)
        with opened(tmp_path) as checkpointer:
            checkpointer.attach(model=model, optimizer=optimizer)
            checkpointer.save()
        state = whole(model, optimizer)
        if rank == 0:
            torch.save(state, tmp_path / "expected.pt")

    on_ranks(2, save, tmp_path)
    weights, moments = torch.load(tmp_path / "expected.pt", weights_only=True)
    # By a reader made from the document, by our library, and by the command line.
    _, (state, other), tensors = read_snapshot(tmp_path / "volume" / "split" / "step-0000000000")
    for name, expected in weights.items():
        if "2.running" not in name:  # each rank's own
            assert np.array_equal(state["model"][name], expected.numpy()), name
            assert np.array_equal(other["model"][name], expected.numpy()), name
    names = list(dict(new_model().named_parameters()))
    for number, entry in state["optimizer"]["state"].items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert np.array_equal(entry[key], moments["state"][names[number]][key].numpy()), (number, key)
    assert {"model/1.weight@rank0", "model/1.weight@rank1"} <= tensors.keys()
    model = new_model(seed=1)
    assert load_weights(model, persist_to=tmp_path / "volume", run="split").step == 0
    assert all(torch.equal(each, weights[name]) for name, each in model.named_parameters())
    places = ["--persist-to", str(tmp_path / "volume"), "--run", "split"]
    assert main(["checkpoint", "verify", "all", *places]) == 0
    words = ["checkpoint", "export", "0", "--to", str(tmp_path / "model.pt"), "--format", "torch", "--only", "model"]
    assert main([*words, *places]) == 0
    exported = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(torch.equal(exported[name], each) for name, each in model.named_parameters())


def test_the_weights_of_replicas_are_loaded_into_shards(tmp_path: Path) -> None:
    plain = new_model()
    optimizer = trained(plain)
    with opened(tmp_path) as checkpointer:
        checkpointer.attach(model=plain, optimizer=optimizer)
        checkpointer.save()
    expected = whole(plain, optimizer)

    def load(rank: int, say: Say) -> None:
        model = sharded(seed=1)
        load_weights(model, persist_to=tmp_path / "volume", run="split")
        loaded = whole(model, torch.optim.SGD(model.parameters()))[0]
        model = sharded(seed=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with opened(tmp_path) as checkpointer:
            checkpointer.attach(model=model, optimizer=optimizer)
            assert checkpointer.restore_latest()
        assert all(isinstance(each["exp_avg"], DTensor) for each in optimizer.state.values())
        found = whole(model, optimizer)
        if rank == 0:
            say([loaded, *found])

    (loaded, weights, moments), _ = on_ranks(2, load, tmp_path)
    for name, each in expected[0].items():
        assert torch.equal(loaded[name], each), name
        assert torch.equal(weights[name], each), name
    for name, entry in expected[1]["state"].items():
        assert all(torch.equal(moments["state"][name][key], each) for key, each in entry.items()), name


def stage(number: int, mesh: DeviceMesh, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """One stage of a pipeline, split over its ranks. Alike names and shapes: only the stage's name tells them apart."""
    torch.manual_seed(10 * seed + number)
    model = nn.Linear(6, 6)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def gathered(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [entry["momentum_buffer"] for entry in optimizer.state.values()]
    return [each.detach().full_tensor() for each in (*model.parameters(), *state)]


def test_stages_come_back_to_the_ranks_that_attach_them(tmp_path: Path) -> None:
    def save(rank: int, say: Say) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
        number = rank // 2
        model, optimizer = stage(number, mesh["data"], seed=0)
        with opened(tmp_path) as checkpointer:
            checkpointer.attach(**{f"stage{number}": model, f"optimizer{number}": optimizer})
            checkpointer.save()
        say(gathered(model, optimizer))

    def load_two(rank: int, say: Say) -> None:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stage", "data"))
        model, optimizer = stage(rank, mesh["data"], seed=1)
        with opened(tmp_path) as checkpointer:
            checkpointer.attach(**{f"stage{rank}": model, f"optimizer{rank}": optimizer})
            assert checkpointer.restore_latest()
        say(gathered(model, optimizer))

    def load_one(rank: int, say: Say) -> None:
        stages = [stage(number, init_device_mesh("cpu", (1,)), seed=2) for number in (0, 1)]
        with opened(tmp_path) as checkpointer:
            for number, (model, optimizer) in enumerate(stages):
                checkpointer.attach(**{f"stage{number}": model, f"optimizer{number}": optimizer})
            assert checkpointer.restore_latest()
        say([gathered(*each) for each in stages])

    first, same, second, _ = on_ranks(4, save, tmp_path)
    assert all(map(torch.equal, first, same))
    assert not torch.equal(first[0], second[0])
    assert all(map(torch.equal, (*first, *second), (each for said in on_ranks(2, load_two, tmp_path) for each in said)))
    ((one, other),) = on_ranks(1, load_one, tmp_path)
    assert all(map(torch.equal, (*first, *second), (*one, *other)))


def test_ranks_of_one_mesh_that_save_other_tensors_save_nothing(tmp_path: Path) -> None:
    def save(rank: int, say: Say) -> None:
        model, other = sharded(), sharded(seed=1)
        with contextlib.suppress(CheckpointError), opened(tmp_path) as checkpointer:
            checkpointer.attach(**({"model": model} if rank == 0 else {"model": model, "other": other}))
            say(str(checkpointer.save().committed.exception()))

    for refusal in on_ranks(2, save, tmp_path):
        assert re.search(r"the same DTensors on all ranks of the mesh.*build and train the same model", refusal)
    assert not list((tmp_path / "volume" / "split").glob("step-*"))


def _partial(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model[3].bias = nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Partial()]))
    return model


def _of_fsdp_1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def _in_parts_of_its_own(model: nn.Module) -> nn.Module:
    mesh, rank = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank()
    local = torch.ones(1 + rank)  # of three, the first rank should have two
    made = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size([3]), stride=(1,))
    model[3].bias = nn.Parameter(made)
    return model


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (_partial, r"'model/3.bias' to be sharded or replicated, got Partial.*redistribute"),
        (_in_parts_of_its_own, r"a part of 'model/3.bias' of shape \(\d,\).*which the ranks divide"),
        (_of_fsdp_1, "fully_shard"),
    ],
)
def test_what_cannot_be_split_anew_is_refused(
    wrap: Callable[[nn.Module], nn.Module], said: str, tmp_path: Path
) -> None:
    def attach(rank: int, say: Say) -> None:
        model = wrap(new_model())
        with opened(tmp_path) as checkpointer:
            try:
                checkpointer.attach(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            except ShadeError as error:
                say(str(error))

    for refusal in on_ranks(2, attach, tmp_path):
        assert re.search(said, refusal or "nothing")


class Experts(nn.Module):
    """Experts that each rank of a mesh has some of; their outputs are summed over it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_EDD = nn.Parameter(torch.randn(4, 6, 6) / 3)
        self.bias_ED = nn.Parameter(torch.zeros(4, 6))

    def forward(self, x_TD: torch.Tensor, gate_TE: torch.Tensor) -> torch.Tensor:
        weight, bias, mesh = self.weight_EDD, self.bias_ED, None
        if isinstance(weight, DTensor) and isinstance(bias, DTensor):
            mesh, weight, bias = weight.device_mesh, weight.to_local(), bias.to_local()
            first = mesh.get_local_rank() * len(weight)
            gate_TE = gate_TE[:, first : first + len(weight)]
        y_TED = (torch.einsum("td,edh->teh", x_TD, weight) + bias).tanh()
        y_TD = torch.einsum("teh,te->th", y_TED, gate_TE)
        return y_TD if mesh is None else all_reduce(y_TD, group=mesh.get_group())


class MixtureOfExperts(nn.Module):
    """A router, experts, and what is dense around them."""

    def __init__(self, seed: int, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.dense, self.router, self.experts = nn.Linear(6, 6), nn.Linear(6, 4, bias=False), Experts()
        if mesh is not None:  # as torchtitan does it: experts over "ep", shards of them and of all else over the others
            for name, each in [*self.experts.named_parameters()]:
                split = nn.Parameter(distribute_tensor(each, mesh["ep"], [Shard(0)]))
                self.experts.register_parameter(name, split)
            fully_shard(self.experts, mesh=mesh["dp"])
            fully_shard(self, mesh=init_device_mesh("cpu", (mesh.size(),)))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        x_TD = self.dense(x_TD).tanh()
        return x_TD + self.experts(x_TD, self.router(x_TD).softmax(-1))


def losses_of(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(torch.arange(18.0).reshape(3, 6).sin() * (step + 1)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def restore(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with opened(folder) as checkpointer:
        checkpointer.attach(model=model, optimizer=optimizer)
        assert checkpointer.restore_latest()


def resumed_alike(folder: Path, rank: int, made: Callable[[int], tuple[nn.Module, torch.optim.Optimizer]]) -> None:
    """Trains, saves and trains on; another model takes the snapshot, and has the same state and losses from there.
    PyTorch's own gathered state goes to ``expected.pt``."""
    model, optimizer = made(0)
    losses_of(model, optimizer, range(2))
    with opened(folder) as checkpointer:
        checkpointer.attach(model=model, optimizer=optimizer)
        checkpointer.save()
        checkpointer.wait_copy_complete()
        state = copy.deepcopy(whole(model, optimizer))
        rest = losses_of(model, optimizer, range(2, 4))
    model, optimizer = made(1)
    restore(folder, model, optimizer)
    compare_states(whole(model, optimizer), state)
    assert losses_of(model, optimizer, range(2, 4)) == rest
    if rank == 0:
        torch.save(state, folder / "expected.pt")


@pytest.mark.slow
def test_experts_over_a_mesh_of_their_own_come_back(tmp_path: Path) -> None:
    """On the same mesh with the losses of an undisturbed run, on others with what PyTorch gathers."""

    def made(seed: int, *sizes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "ep")) if sizes else None
        model = MixtureOfExperts(seed, mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)

    def save(rank: int, say: Say) -> None:
        resumed_alike(tmp_path, rank, lambda seed: made(seed, 2, 2))

    def load(rank: int, say: Say) -> None:
        for sizes in ((1, 2), (2, 1)):
            model, optimizer = made(2, *sizes)
            with opened(tmp_path) as checkpointer:
                checkpointer.attach(model=model, optimizer=optimizer)
                assert checkpointer.restore_latest()
            compare_states(whole(model, optimizer), expected if rank == 0 else ({}, {}))

    on_ranks(4, save, tmp_path)
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    on_ranks(2, load, tmp_path)
    model, optimizer = made(3)
    restore(tmp_path, model, optimizer)
    compare_states(whole(model, optimizer), expected)


def compare_states(found: Any, expected: Any) -> None:
    """PyTorch gives the gathered state to rank 0 alone."""
    for one, other in zip(found, expected, strict=True):
        for key in other:
            if isinstance(other[key], dict):
                compare_states([one[key]], [other[key]])
            else:
                is_tensor = isinstance(other[key], torch.Tensor)
                same = torch.equal(one[key], other[key]) if is_tensor else one[key] == other[key]
                assert same, key


@pytest.mark.slow  # importing PEFT takes seconds
@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_of_peft_come_back_with_what_they_adapt(ranks: int, tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        parts = {"dense": nn.Linear(6, 6), "act": nn.Tanh(), "more": nn.Linear(6, 6), "head": nn.Linear(6, 2)}
        settings = peft.LoraConfig(r=2, target_modules=["dense", "more"], modules_to_save=["head"])
        model = peft.get_peft_model(nn.Sequential(OrderedDict(parts)), settings)
        model.add_adapter("second", peft.LoraConfig(r=3, target_modules=["dense"]))
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            fully_shard(model.base_model.model.dense, mesh=mesh)
            fully_shard(model, mesh=mesh)
        trained = [each for each in model.parameters() if each.requires_grad]
        return model, torch.optim.AdamW(trained, lr=0.1)

    def train(rank: int, say: Say) -> None:
        resumed_alike(tmp_path, rank, made)

    if ranks == 1:
        train(0, print)
    else:
        on_ranks(ranks, train, tmp_path)
    expected = torch.load(tmp_path / "expected.pt", weights_only=True)
    assert any("lora_A.second" in name for name in expected[0])
    model, optimizer = made(2)
    restore(tmp_path, model, optimizer)
    compare_states(whole(model, optimizer), expected)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_kills_lose_nothing_that_was_durable(tmp_path: Path) -> None:
    script, draw = Script(optimizer="adam", width=64), random.Random(0)
    noted = tmp_path / "durable"
    noted.write_text("0\n")

    def live(rank: int, say: Say) -> None:
        checkpointer = Checkpointer(persist_to=tmp_path / "volume", run="killed", every="never")
        training = Training(script, Layout("fsdp", 2), seed=1 if checkpointer.list() else 0)
        checkpointer.attach(model=training.model, optimizer=training.optimizer)
        restored, oracle = checkpointer.restore_latest(), Training(script, None, seed=0)
        assert restored.step >= int(noted.read_text().split()[-1])
        for _ in range(restored.step):
            oracle.step()
        training.done = restored.step
        compare(training, oracle.state())
        say(restored.step)
        threading.Timer(delays[rank], lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        with contextlib.suppress(RuntimeError, ShadeError):  # of the rank whose other is killed first
            while True:
                training.step()
                checkpointer.step()
                checkpointer.save()
                if training.done % 3 == 0:
                    checkpointer.wait_durable()
                    with noted.open("a") as file:
                        file.write(f"{training.done}\n")
        threading.Event().wait()

    for life in range(50):
        delay = draw.uniform(0.2, 1.5)
        delays = [delay, delay + draw.uniform(0, 0.02)]
        shown = on_ranks(2, live, tmp_path / f"life-{life}")
        assert shown[0] == shown[1]
    assert int(noted.read_text().split()[-1]) >= 3
