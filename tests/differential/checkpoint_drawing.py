"""Draws checkpoint scripts; each shrinks towards the plainest one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from shade.checkpoint._strategies import STRATEGIES
from tests.differential.checkpoint_objects import (
    ANY_DTYPE,
    ANY_OPTIMIZERS,
    MODELS,
    OPTIMIZERS,
    PLAIN_DTYPES,
    SCHEDULERS,
)
from tests.differential.checkpoint_training import Script
from tests.differential.checkpoint_users import USERS

IN_PROCESS = tuple(name for name in MODELS if name not in ("ddp", "compiled"))
LOADERS = ("cursor", "dataloader", "shade_loader", "shade_sampler", "shade_both")
WRONG = ("", "model", "shape", "dtype", "optimizer", "groups", "missing", "batch")
TOUCHED = ("", "in place", "data", "numpy", "moments", "buffers")
DAMAGE = ("data", "header", "appended", "record", "manifest")
UNSAVEABLE = frozenset({"strange", "generator"})
DENSE = tuple(name for name in OPTIMIZERS if name != "sparse_adam")


def _mostly(plain: Any, *others: Any) -> st.SearchStrategy[Any]:
    """Draws the plain value in half of the cases."""
    return st.one_of(st.just(plain), st.sampled_from((plain, *others)))


def _rarely(plain: Any, *others: Any) -> st.SearchStrategy[Any]:
    """Draws the plain value in seven of eight cases."""
    return st.one_of(*[st.just(plain)] * 7, st.sampled_from(others))


def _some(names: Sequence[str], most: int) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(st.sampled_from(names), max_size=most, unique=True).map(tuple)


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Draws a script that plain PyTorch can play."""
    script = Script(
        model=draw(st.one_of(*[st.sampled_from(IN_PROCESS)] * 39, st.sampled_from(("ddp", "compiled")))),
        optimizer=draw(st.sampled_from(DENSE)),
        num_groups=draw(st.sampled_from((1, 2))),
        schedulers=draw(_some(tuple(SCHEDULERS), 2)),
        has_scaler=draw(_mostly(False, True)),
        ema=draw(_mostly("", "ema", "swa")),
        users=draw(
            st.one_of(*[_some([name for name in USERS if name not in UNSAVEABLE], 3)] * 19, _some(tuple(USERS), 2))
        ),
        loader=draw(st.sampled_from(LOADERS)),
        augments=draw(st.sampled_from(("", "torch", "numpy", "python"))),
        touched=draw(_mostly(*TOUCHED)),
        copies_late=draw(_mostly(False, True)),
        strategy=draw(st.sampled_from([name for name in STRATEGIES if "excp" not in name])),
        tier=draw(st.sampled_from(("storage", "shared", "storage", "store"))),
        codec=draw(_mostly("", "zstd", "xor-zstd", "dedup")),
        keyframe_every=draw(st.sampled_from((3, 1, 2, 20))),
        keep=draw(st.sampled_from(("last=2", "last=1", "all", "last=1,every=2"))),
        every=draw(st.sampled_from((1, 2, 3, 0))),
        waits=draw(st.sampled_from(("committed", "nothing"))),
        saves_twice=draw(_mostly(False, True)),
        num_steps=draw(st.integers(4, 8)),
        end_step=draw(st.integers(2, 6)),
        end=draw(st.sampled_from(("dropped", "clean", "dropped", "killed"))),
        loses_machine=draw(st.booleans()),
        damage=draw(_rarely("", *DAMAGE)),
        restores=draw(_mostly("latest", "first")),
        wrong=draw(_mostly(*WRONG)),
        seed=draw(st.integers(0, 3)),
    )
    return playable(script, draw)


def playable(script: Script, draw: st.DrawFn) -> Script:
    """Returns the script without what plain PyTorch has no meaning for."""
    if script.model in ANY_DTYPE and script.optimizer in ANY_OPTIMIZERS:
        script = replace(script, dtype=draw(st.sampled_from(PLAIN_DTYPES)))
    if script.model == "sparse":
        script = replace(script, optimizer=draw(st.sampled_from(("sgd", "adagrad"))), num_groups=1)
    if script.optimizer == "lbfgs" and script.model in ("odd", "conv"):  # takes contiguous parameters only
        script = replace(script, model="mlp")
    if script.optimizer == "lbfgs":
        script = replace(script, has_scaler=False, num_groups=1)
    if script.dtype not in ("float32", "float64"):
        script = replace(script, has_scaler=False)
    if script.touched in ("numpy",) and script.dtype == "bfloat16":
        script = replace(script, touched="data")
    if script.users and not UNSAVEABLE.isdisjoint(script.users):
        script = replace(script, wrong="")
    if script.loader == "cursor" and script.wrong == "batch":  # its state does not say
        script = replace(script, wrong="")
    if script.model == "ddp":
        loader = draw(st.sampled_from(("cursor", "dataloader", "shade_sampler")))
        script = replace(script, num_ranks=draw(st.sampled_from((2, 1))), loader=loader)
    if script.tier != "storage":
        script = replace(script, damage="")
    if script.damage:
        script = replace(script, wrong="", restores="latest")
    return replace(script, end_step=min(script.end_step, script.num_steps - 1))


SCRIPTS = scripts()
