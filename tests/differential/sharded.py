"""Generated jobs of DTensors: saved over one mesh, ended, restored over another, and compared with plain PyTorch.

Gradients are drawn, not computed, and each optimizer treats every item by itself. So the bits of a parameter do not
depend on how it is split, and one process with whole tensors is the oracle for every mesh. What a rank should hold of
a tensor is what DTensor's own placements cut out of it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from shade.checkpoint import Checkpointer
from shade.checkpoint._buffer.shared_memory_folder import own_folder
from shade.checkpoint._buffer.stream_hash import StreamHash
from shade.checkpoint._capture import sharding
from shade.checkpoint._capture.sharding import Replicas, SavedDTensor, Sharding
from shade.checkpoint._restore import restore
from shade.errors import ShadeError
from tests.differential.checkpoint import Differs, _place, _quiet, _server
from tests.differential.checkpoint_checks import bits
from tests.differential.checkpoint_processes import ChildFailed, Say, in_processes
from tests.differential.harness import Outcome, Plane, Verdict

WIDTH = 6
SMALL_BYTES = 64


@dataclass(frozen=True)
class Layout:
    """How a model lies on ranks."""

    kind: str = "fsdp"
    """A key of `LAYOUTS`."""
    num_ranks: int = 2
    seed: int = 0
    """Decides the mesh and the placements of ``drawn``."""


@dataclass(frozen=True)
class Script:
    """A job: what it trains, over which meshes, how it saves and how it ends."""

    first: Layout = Layout()
    second: Layout = Layout()
    width: int = 8
    """Of the layers; what the ranks do not divide is split unevenly, and small ones leave ranks with nothing."""
    is_tied: bool = False
    is_frozen: bool = False
    dtype: str = "float32"
    optimizer: str = "adam"
    strategy: str = "overlap"
    codec: str = ""
    tier: str = "storage"
    end: str = "clean"
    num_steps: int = 2
    """Steps before the first job ends; each is saved."""
    has_small_chunks: bool = False
    """Whether a chunk is shorter than a tensor, so that a restore reads a few of a part's chunks."""
    saves_at_once: bool = False
    """Whether one save is waited for before the next step."""


class Block(nn.Module):
    """Two layers and a norm, with a buffer that each rank has for itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH), nn.LayerNorm(WIDTH)
        self.register_buffer("seen", torch.zeros(2))


class Net(nn.Module):
    """Blocks between an embedding and a head; with what is hard to split: three dimensions, one item, and none."""

    def __init__(self, width: int, is_tied: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(5, WIDTH), nn.Linear(WIDTH, 5, bias=False)
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.deep = nn.Parameter(torch.randn(3, width, 2))
        self.one = nn.Parameter(torch.randn(1))
        if is_tied:
            self.head.weight = self.words.weight


def build(script: Script, layout: Layout | None, seed: int) -> nn.Module:
    """Returns the model, laid out; whole if there is no layout."""
    torch.manual_seed(seed)
    model = Net(script.width, script.is_tied).to(getattr(torch, script.dtype))
    if script.is_frozen:
        model.words.weight.requires_grad_(False)
    if layout is not None:
        LAYOUTS[layout.kind](model, layout)
    return model


# ── layouts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _fully(model: Any, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _tensors_parallel(model: Any, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _tp_fsdp(model: Any, layout: Layout) -> None:
    mesh = init_device_mesh("cpu", (layout.num_ranks // 2, 2), mesh_dim_names=("data", "tensor"))
    _tensors_parallel(model, mesh["tensor"])
    _fully(model, mesh["data"])


def _drawn(model: nn.Module, layout: Layout) -> None:
    """Splits each parameter in some way of its own, over some mesh."""
    draw = torch.Generator().manual_seed(layout.seed)

    def pick(count: int) -> int:
        return int(torch.randint(count, (), generator=draw))

    ranks = torch.randperm(layout.num_ranks, generator=draw) if pick(2) else torch.arange(layout.num_ranks)
    mesh = DeviceMesh("cpu", ranks.view(2, -1) if layout.num_ranks == 4 and pick(2) else ranks)
    known: dict[nn.Parameter, nn.Parameter] = {}
    for part in model.modules():
        for name, param in list(part._parameters.items()):
            if param is None:
                continue
            if param not in known:
                placements = [_pick_placement(param.dim(), pick) for _ in range(mesh.ndim)]
                local = cut(param.detach(), mesh, placements).contiguous()
                made = DTensor.from_local(
                    local, mesh, placements, run_check=False, shape=param.shape, stride=param.stride()
                )
                known[param] = nn.Parameter(made, requires_grad=param.requires_grad)
            part._parameters[name] = known[param]


def _pick_placement(num_dims: int, pick: Callable[[int], int]) -> Any:
    choice = pick(5)
    if choice == 0 or not num_dims:
        return Replicate()
    return _StridedShard(pick(num_dims), split_factor=2 + pick(2)) if choice == 1 else Shard(pick(num_dims))


LAYOUTS: Mapping[str, Callable[[Any, Layout], None]] = {
    "plain": lambda model, layout: None,
    "fsdp": lambda model, layout: _fully(model, init_device_mesh("cpu", (layout.num_ranks,))),
    "hsdp": lambda model, layout: _fully(
        model, init_device_mesh("cpu", (2, layout.num_ranks // 2), mesh_dim_names=("replicas", "shards"))
    ),
    "tp": lambda model, layout: _tensors_parallel(model, init_device_mesh("cpu", (layout.num_ranks,))),
    "tp+fsdp": _tp_fsdp,
    "drawn": _drawn,
}


def cut(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Any]) -> torch.Tensor:
    """Returns what this rank holds of a tensor, as DTensor's own placements cut it."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for dim, (placement, place) in enumerate(zip(placements, coordinate, strict=True)):
        if not placement.is_replicate():
            whole = placement._split_tensor(whole, mesh.size(dim), with_padding=False)[0][place]
    return whole


def like(whole: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Returns a whole tensor, laid out as another."""
    if not isinstance(own, DTensor):
        return whole
    local = cut(whole, own.device_mesh, own.placements).contiguous()
    return DTensor.from_local(
        local, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
    )


# ── training ────────────────────────────────────────────────────────────────────────────────────────────────────────

OPTIMIZERS: Mapping[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.125, foreach=False),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.5, foreach=False),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, foreach=False),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.1), amsgrad=True, foreach=False),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.5, centered=True, foreach=False),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, foreach=False),
}


class Training:
    """The objects of a job, in one process.

    Args:
        script: The script.
        layout: How the model lies; None: whole, as in the oracle.
        seed: Of the weights.
    """

    def __init__(self, script: Script, layout: Layout | None, seed: int) -> None:
        self.model = build(script, layout, seed)
        self.optimizer = OPTIMIZERS[script.optimizer]([each for each in self.model.parameters() if each.requires_grad])
        self.done = 0

    @torch.no_grad()
    def step(self) -> None:
        """One step, by gradients that are drawn."""
        draw = torch.Generator().manual_seed(self.done)
        for param in self.model.parameters():
            if param.requires_grad:
                param.grad = like(torch.randint(-8, 9, param.shape, generator=draw).to(param.dtype) / 8, param)
        self.optimizer.step()
        self.done += 1

    def state(self) -> dict[str, torch.Tensor]:
        """Returns every tensor that is saved, by name."""
        named = {f"model/{key}": each for key, each in self.model.state_dict().items()}
        for number, entry in self.optimizer.state_dict()["state"].items():
            named |= {f"optimizer/{number}/{key}": each for key, each in entry.items() if torch.is_tensor(each)}
        return named


def compare(training: Training, expected: Mapping[str, torch.Tensor]) -> None:
    """Raises `Differs` unless this rank has its part of what is expected, bit for bit."""
    found = training.state()
    if found.keys() != expected.keys():
        raise Differs(f"step {training.done}: {sorted(found.keys() ^ expected.keys())} is there, or is not")
    for name, tensor in found.items():
        whole = expected[name]
        mine = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        own = cut(whole, tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else whole
        if tensor.shape != whole.shape or (mine.dtype, mine.shape) != (own.dtype, own.shape):
            raise Differs(f"step {training.done}: {name} is {tuple(mine.shape)} {mine.dtype}, not {tuple(own.shape)}")
        if bits(mine.contiguous()) != bits(own.contiguous()):
            raise Differs(f"step {training.done}: {name} is {mine.flatten()[:4]}, not {own.flatten()[:4]}")


# ── a script ────────────────────────────────────────────────────────────────────────────────────────────────────────


def play(script: Script) -> Verdict:
    """Plays a script: whole in one process, then in a first and a second job of ranks."""
    with _place() as place, _quiet(), _small_chunks() if script.has_small_chunks else contextlib.nullcontext():
        run = f"differential-{secrets.token_hex(6)}"
        try:
            return _play(script, place, run)
        except (Differs, ChildFailed, ShadeError, RuntimeError) as differs:  # or a rank whose other has failed
            return Verdict(Outcome.DIFFERENT, f"{type(differs).__name__}: {differs}")
        finally:
            shutil.rmtree(own_folder(run), ignore_errors=True)


@contextlib.contextmanager
def _small_chunks() -> Iterator[None]:
    with (
        patch("shade.checkpoint._save.packing.CHUNK_BYTES", SMALL_BYTES),
        patch.object(StreamHash.__init__, "__defaults__", (SMALL_BYTES,)),
    ):
        yield


def _play(script: Script, place: Path, run: str) -> Verdict:
    _server()  # before a fork
    plain, states = Training(script, None, 0), []
    for _ in range(script.num_steps + 3):
        states.append({name: each.clone() for name, each in plain.state().items()})
        plain.step()

    def opened() -> Checkpointer:
        store = f"unix://{_server().socket_path}" if script.tier in ("store", "both") else None
        storage = place / "storage" if script.tier in ("storage", "both") else None
        options: dict[str, Any] = {"codec": script.codec} if script.codec else {}
        return Checkpointer(store, persist_to=storage, run=run, every="never", strategy=script.strategy, **options)

    def first(rank: int, say: Say) -> None:
        training, checkpointer = Training(script, script.first, 0), opened()
        try:
            checkpointer.attach(model=training.model, optimizer=training.optimizer)
            say(0)
            while training.done < script.num_steps:
                training.step()
                checkpointer.step()
                try:
                    checkpointer.save()
                except ShadeError as error:
                    say(str(error))
                    return
                if script.saves_at_once:
                    checkpointer.wait_committed()
                    say(training.done)
            training.step()  # which may tear what is still being copied
            if script.end == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            checkpointer.close()
            say(script.num_steps)
        except ShadeError as error:
            say(str(error))

    def second(rank: int, say: Say) -> None:
        training, checkpointer = Training(script, script.second, 1), opened()
        with checkpointer:
            checkpointer.attach(model=training.model, optimizer=training.optimizer)
            restored = checkpointer.restore_latest()
            if restored:
                training.done = restored.step
                compare(training, states[restored.step])
            else:
                training = Training(script, script.second, 0)
            while training.done < len(states) - 1:
                training.step()
            compare(training, states[-1])
        say(restored.step)

    said = in_processes(script.first.num_ranks, first, place / "first")
    if refusals := [each for each in said if isinstance(each, str)]:
        return Verdict(Outcome.REFUSED, refusal_of(refusals[0]))
    steps = in_processes(script.second.num_ranks, second, place / "second")
    if len({*steps}) != 1 or steps[0] < max(said):
        raise Differs(f"restored steps {steps}; {said} were committed")
    return Verdict(Outcome.SAME)


REFUSALS: Mapping[str, str] = {"which the ranks divide": "sizes that the ranks do not divide"}
"""Words of a refusal, and what it refuses."""


def refusal_of(said: str) -> str:
    """Returns what was refused; raises `Differs` for a refusal that nothing is known of."""
    for words, name in REFUSALS.items():
        if words in said:
            return name
    raise Differs(f"refused: {said}")


# ── drawing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _layouts() -> st.SearchStrategy[Layout]:
    on_any = st.builds(Layout, st.sampled_from(("fsdp", "drawn", "plain")), st.sampled_from((1, 2, 3, 4)), SEEDS)
    on_four = st.builds(Layout, st.sampled_from(("hsdp", "tp+fsdp", "drawn")), st.just(4), SEEDS)
    return st.one_of(on_any, on_any, on_four, st.builds(Layout, st.just("tp"), st.sampled_from((2, 4)), SEEDS))


@st.composite
def _scripts(draw: st.DrawFn) -> Script:
    first, second = draw(_layouts()), draw(_layouts())
    if draw(st.integers(0, 3)) == 0:
        second = first
    kinds = {first.kind, second.kind}
    # PyTorch itself splits by tensor parallelism, and then again, what divides evenly.
    width = draw(st.sampled_from((8, 8, 16) if kinds & {"tp", "tp+fsdp"} else (8, 7, 3, 1)))
    # Of two bytes, a vector is rounded otherwise than a single item, unless products are exact.
    dtype = draw(st.sampled_from(("float32", "float32", "bfloat16")))
    optimizers = ("sgd", "momentum") if dtype == "bfloat16" else sorted(OPTIMIZERS)
    tier = draw(st.sampled_from(("storage", "storage", "store", "both", "shared")))
    return Script(
        first=first,
        second=second,
        width=width,
        is_tied=draw(st.booleans()),
        is_frozen=draw(st.booleans()),
        dtype=dtype,
        optimizer=draw(st.sampled_from(optimizers)),
        strategy=draw(st.sampled_from(("overlap", "overlap", "copy", "asymmetric", "gemini"))),
        codec=draw(st.sampled_from(("", "", "zstd", "xor-zstd"))),
        tier=tier,
        has_small_chunks=tier == "storage" and draw(st.booleans()),
        end=draw(st.sampled_from(("clean", "killed"))),
        num_steps=draw(st.integers(1, 3)),
        saves_at_once=draw(st.booleans()),
    )


SEEDS = st.integers(0, 10**6)


# ── faults ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _without_factor(region: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: Sharding, part: Sequence[int]) -> Any:
        plain = [None if each is None else (each[0], 1) for each in self.placements]
        return region(Sharding(self.shape, self.mesh_shape, self.ranks, tuple(plain)), part)

    return wrong


def _one_row_less(needed: Callable[..., Any]) -> Callable[..., Any]:
    def wrong(self: SavedDTensor, region: Any) -> Iterator[Any]:
        for name, rows in needed(self, region):
            yield name, rows if rows is None or len(rows) < 2 else rows[1:]

    return wrong


@contextlib.contextmanager
def _sorted_ranks() -> Iterator[None]:
    """The ranks of a mesh are taken to ascend."""
    live = sharding.sharding_of

    def wrong(tensor: Any, path: str) -> Any:
        made, part = live(tensor, path)
        return Sharding(made.shape, made.mesh_shape, tuple(sorted(made.ranks)), made.placements), part

    with patch.object(sharding, "sharding_of", wrong), patch("shade.checkpoint._capture.flatten.sharding_of", wrong):
        yield


FAULTS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "split factors are ignored": lambda: patch.object(Sharding, "region", _without_factor(Sharding.region)),
    "a row of a part is not read": lambda: patch.object(SavedDTensor, "needed", _one_row_less(SavedDTensor.needed)),
    "ranks choose replicas by themselves": lambda: patch.object(
        Replicas, "take", lambda self, sharding, item_bytes: dist.get_rank() % sharding.num_replicas
    ),
    "ranks of a mesh ascend": _sorted_ranks,
    "parts of other ranks are not read": lambda: patch.object(restore, "spans_of", lambda *_: {}),
}
"""Faults that this part could have; each is found by a few scripts."""

PLANE = Plane("sharded", _scripts(), play, FAULTS, {"Script": Script, "Layout": Layout})
