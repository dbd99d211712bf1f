"""Draws checkpoint scripts; each shrinks towards the plainest one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
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
from tests.differential.checkpoint_sharded import SAVERS
from tests.differential.checkpoint_training import Script
from tests.differential.checkpoint_users import USERS

DEAR = ("ddp", "ddp", "fsdp2", "compiled")
"""Models that need processes of their own, or seconds."""
IN_PROCESS = tuple(name for name in MODELS if name not in DEAR)
LOADERS = ("cursor", "dataloader", "shade_loader", "shade_sampler", "shade_both", "stateful", "stateful_shade")
WRONG = ("", "model", "shape", "dtype", "optimizer", "groups", "missing", "batch")
TOUCHED = ("", "in place", "data", "numpy", "moments", "buffers", "layouts", "layouts numpy")
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
        model=draw(st.one_of(*[st.sampled_from(IN_PROCESS)] * 19, st.sampled_from(DEAR))),
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
        tier=draw(st.sampled_from(("storage", "shared", "storage", "store", "storage", "shared", "store", "cluster"))),
        codec=draw(_mostly("", "zstd", "xor-zstd", "xor-zstd", "dedup")),
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
    script = _together(script, draw)
    if script.touched.startswith("layouts"):  # in the background, and nothing else is changed that would be noticed
        model = draw(st.sampled_from(("conv", "odd")))
        script = replace(script, model=model, copies_late=True, waits="nothing", every=script.every or 1)
        script = replace(script, wrong="", damage="", end="dropped")
    if script.optimizer == "adafactor" and script.model == "odd":  # divides by the size of an empty parameter
        script = replace(script, model="conv")
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
    if "numpy" in script.touched and script.dtype == "bfloat16":
        script = replace(script, touched="layouts" if script.touched.startswith("layouts") else "data")
    if script.users and not UNSAVEABLE.isdisjoint(script.users):
        script = replace(script, wrong="")
    if script.loader in ("cursor", "stateful") and script.wrong == "batch":  # their state does not say
        script = replace(script, wrong="")
    if script.model == "ddp":
        loader = draw(st.sampled_from(("cursor", "dataloader", "shade_sampler")))
        script = replace(script, num_ranks=draw(st.sampled_from((2, 1))), loader=loader)
        script = replace(script, wrong_on_one=script.num_ranks == 2 and draw(st.booleans()))
        if script.wrong_on_one:  # another model would keep the ranks from meeting
            script = replace(script, wrong=draw(st.sampled_from([each for each in WRONG if each not in ("", "model")])))
        if script.loader == "cursor" and script.wrong == "batch":
            script = replace(script, wrong="groups")
    if script.model == "fsdp2":
        script = _sharded(script, draw)
    if script.damage:
        script = replace(script, tier="storage", wrong="", restores="latest")
    return replace(script, end_step=min(script.end_step, script.num_steps - 1))


def _together(script: Script, draw: st.DrawFn) -> Script:
    """Returns the script, in half of the cases with what faults need at once that chance seldom draws."""
    if script.codec == "xor-zstd" and draw(st.booleans()):  # deltas in storage alone, more than are kept
        keep, keyframe_every = draw(st.sampled_from(("last=1", "last=2"))), draw(st.sampled_from((20, 3)))
        script = replace(script, tier="storage", keep=keep, keyframe_every=keyframe_every, every=1, loses_machine=True)
        script = replace(script, num_steps=max(script.num_steps, 6), end_step=max(script.end_step, 5))
    if "holder" in script.users and script.model not in DEAR and draw(st.booleans()):  # memory by whole pages
        script = replace(script, model="large")
    return script


def _sharded(script: Script, draw: st.DrawFn) -> Script:
    """Returns what a sharded model takes: through DCP, without strategies of ours and their like."""
    plain = {each.name: each.default for each in fields(Script)}
    kept = ("model", "num_groups", "keep", "every", "waits", "num_steps", "end_step", "end", "restores", "seed")
    drawn = {name: getattr(script, name) for name in kept} | {
        "optimizer": draw(st.sampled_from(("sgd", "momentum", "adam", "adamw"))),
        "schedulers": script.schedulers[:1],
        "users": tuple(name for name in script.users if name in ("noise", "tensors")),
        "saver": draw(st.sampled_from((*SAVERS, *SAVERS, ""))),
        "codec": draw(st.sampled_from(("", "zstd"))),
        "tier": draw(st.sampled_from(("storage", "storage", "store"))),
        "num_ranks": 2,
    }
    if not drawn["saver"]:
        ours = ("tier", "strategy", "codec", "keyframe_every", "copies_late", "saves_twice", "loses_machine")
        drawn |= {name: getattr(script, name) for name in ours}
    return replace(script, **(plain | drawn))


SCRIPTS = scripts()
