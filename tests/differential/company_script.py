"""What a combined script is: two or three planes, a framework, an ending; the plainest are drawn first, to shrink."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from hypothesis import strategies as st

from tests.differential.company_data import KINDS
from tests.differential.company_writers import REFUSED, WRITERS, writers_of

FRAMEWORKS = {"trainer": "transformers", "lightning": "lightning"}
"""Loops that a framework runs, and checkpoints that it keeps: by name, the package."""
LOOPS = ("loop", "stateful", "shade loader", "ahead", "accelerate", *FRAMEWORKS)
ENDINGS = ("normal", "exception", "interrupt", "kill")
DIFFERING = ("seed", "batch size", "mode", "size", "every", "density", "learning rate")
BATCH = 4


@dataclass(frozen=True)
class Script:
    """A training of one or two ranks, in processes of their own, with what surrounds it."""

    loop: str = "loop"
    """Who asks for batches; ``ahead`` fetches one before it trains on the last, and reports no losses."""
    data: str = "tensors"
    writer: str = ""
    """The program that wrote the shards, if the data are such."""
    wrapper: str = "none"
    """torch's wrapper around the data set: ``none``, ``split`` (random_split), ``halves`` (ConcatDataset)."""
    window: bool = False
    """Whether shards are read in blocks, ahead, by a thread."""
    cache: str = "none"
    """``none``, ``memory``, ``local`` (a server that belongs to the script), ``server`` (one that all share)."""
    workers: int = 0
    context: str = "fork"
    persistent: bool = False
    in_order: bool = True
    cold: bool = False
    """Whether no loop is compiled yet on this machine."""
    optimizer: str = "sgd"
    wraps: bool = False
    """Whether the optimizer is inside one that passes everything on, as Accelerate's does."""
    hooks: str = "own"
    """Where the hook is that sees the weights of each step: the optimizer's ``own``, or ``global``."""
    model: str = "linear"
    edits: str = "none"
    """What the script does to gradients after backward: ``none``, ``clip``, ``drop`` (of every third step), ``new``."""
    holds: bool = True
    """Whether an engine's backward passes stand inside ``accumulate()``, where gradients are the script's to edit."""
    relabels: bool = False
    """Whether the script changes the labels of its data set after the first epoch."""
    ranks: int = 1
    exchange: str = "ddp"
    """How two ranks exchange gradients: ``ddp``, ``hook`` (sparse_hook, all elements), ``engine`` (all elements)."""
    meets: str = "first"
    """When the ranks meet: ``first``, ``late``: after the data set is made, ``last``: after all that needs them."""
    saves: str = ""
    """The strategy of a Checkpointer, or ``framework``; empty: nothing is saved."""
    every: int = 2
    alone: bool = False
    """Whether rank 0 also saves where the other does not."""
    persists: bool = True
    neighbour: bool = False
    """Whether another project with the same run id was killed on this machine before."""
    ending: str = "normal"
    step: int = 3
    """The step after which the first life ends, if not normally."""
    waits: bool = True
    """Whether the script waits for its last save before it ends so."""
    other_model: bool = False
    """Whether the second life's model refuses what was saved, in its last part."""
    closes: bool = True
    """Whether the script closes what it has made, where it gets that far."""
    epochs: int = 2
    differs: str = ""
    """An argument in which the second rank differs from the first."""

    @property
    def refusal(self) -> str:
        """When the script has to be refused, on all ranks: at the ``start``, ``later``, or never (empty)."""
        edits_moved = self.exchange == "engine" and not self.holds and self.edits in ("drop", "new")
        at_start = self.differs or not self.in_order or self.writer in REFUSED or self.meets == "last"
        return "start" if at_start else "later" if edits_moved or self.alone else ""

    @property
    def may_be_refused(self) -> bool:
        """Whether a refusal is right too: labels that have changed are found where they were cached."""
        return self.relabels and self.cache != "none"


def _drawn(draw: Any, fixed: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}

    def one(name: str, *values: Any) -> Any:
        # What stands first is what a difference shrinks to.
        wanted = fixed.get(name, values)
        options[name] = draw(st.sampled_from(wanted)) if isinstance(wanted, tuple) else wanted
        return options[name]

    installed = [name for name, package in (FRAMEWORKS | {"accelerate": "accelerate"}).items() if find_spec(package)]
    one("loop", *["loop"] * 4, *["stateful"] * 2, *["shade loader"] * 2, *["ahead"] * 2, *installed)
    kinds = [*KINDS, *filter(writers_of, WRITERS)] + ["tensors"] * 4
    data = one("data", *kinds)
    one("writer", *writers_of(data)) if data in WRITERS else None
    one("wrapper", "none", "none", "split", "halves")
    one("window", False, True)
    one("cache", "none", "memory", "server", "server", "server", "local")
    workers = one("workers", 0, 1, 2, 2)
    one("context", *["fork"] * 30, "spawn", "forkserver") if workers else None
    one("persistent", False, True) if workers else None
    one("in_order", *[True] * 5, False) if workers > 1 else None
    one("cold", *[False] * 60, True)
    one("optimizer", "sgd", "momentum", "adam", "fused adam")
    one("wraps", False, False, False, True)
    one("hooks", "own", "global")
    one("model", *["linear"] * 2, "embedding", "sparse", "complex", "tied", "unused", "counting")
    one("edits", "none", "none", "clip", "drop", "new")
    one("relabels", *[False] * 9, True)
    if one("ranks", 1, 1, 2) == 2:
        one("exchange", "ddp", "ddp", "hook", "engine")
        one("holds", True, True, True, False)
        one("meets", *["first"] * 6, *["late"] * 3, "last")
        one("differs", *[""] * 40, *DIFFERING)
        one("alone", *[False] * 15, True)
    one("saves", "", "overlap", "copy", "asymmetric")
    one("every", 2, 1)
    one("persists", True, True, False)
    one("neighbour", False, False, False, True)
    one("ending", "normal", *ENDINGS)
    one("step", *range(1, 13))
    one("waits", True, False)
    one("other_model", *[False] * 9, True)
    one("closes", True, False)
    one("epochs", 2, 1, 3)
    return options


@st.composite
def scripts(draw: Any, **fixed: Any) -> Script:
    """Draws scripts; ``fixed`` has the values, or a tuple of them, that options are to have if they are drawn."""
    return made_possible(Script(**_drawn(draw, fixed)))


def made_possible(script: Script) -> Script:
    """Takes back what the rest of a script leaves no sense in."""
    for rule in (_of_frameworks, _of_refusals, _of_data, _of_exchange, _of_saves):
        script = replace(script, **rule(script))
    return script


def _of_frameworks(script: Script) -> dict[str, Any]:
    if script.loop not in FRAMEWORKS:
        return {"saves": ""} if script.saves == "framework" else {}
    return {
        "saves": script.saves and "framework",
        "persists": True,
        "neighbour": False,
        "other_model": False,
        "alone": False,
        "ranks": 1,
        "exchange": "ddp",
        "meets": "first",
        "differs": "",
        "in_order": True,
        "cold": False,
        "wraps": False,
        "hooks": "own",
        "edits": "none",
        "relabels": False,
        "data": "tensors" if script.data == "keyed" else script.data,
        # The Trainer keeps weights in safetensors, which takes neither.
        "model": "linear" if script.model in ("tied", "complex") else script.model,
    }


def _of_refusals(script: Script) -> dict[str, Any]:
    """What is refused needs no ending, and is refused for one reason."""
    changes: dict[str, Any] = {}
    if script.loop in ("shade loader", "stateful") or script.workers < 2:
        changes["in_order"] = True
    if script.ranks == 1:
        changes |= {"differs": "", "alone": False, "meets": "first", "exchange": "ddp"}
    elif script.differs == "density" and script.exchange == "ddp":
        changes["exchange"] = "hook"
    elif script.differs == "learning rate":
        changes |= {"exchange": "engine", "model": "linear"}
    if script.meets == "last":
        changes["model"] = "linear"
    if not script.saves and script.exchange != "engine" and script.meets == "last":
        changes["meets"] = "late"  # nothing is wrong then, but that each rank draws all samples
    script = replace(script, **changes)
    if script.differs:
        changes |= {"data": "tensors", "writer": "", "window": False, "in_order": True, "meets": "first"}
        changes["saves"] = "overlap" if script.differs == "every" else ""
        changes["wrapper"] = "none"
    if script.meets == "last":
        changes |= {"data": "tensors", "writer": "", "window": False, "in_order": True, "wrapper": "none"}
    script = replace(script, **changes)
    if script.alone:
        changes |= {"saves": "overlap", "every": 2, "persists": True, "edits": "none"}
    if script.refusal:
        changes |= {"ending": "normal", "neighbour": False, "other_model": False, "relabels": False, "cold": False}
    return changes


def _of_data(script: Script) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if script.data not in WRITERS:
        changes |= {"writer": "", "window": False}
    elif script.window:
        changes |= {"wrapper": "none"}
    if script.cache == "memory" and (script.workers or script.ranks > 1):
        changes["cache"] = "server"  # refused by name, which the data plane asks
    if script.data == "keyed":
        changes |= {"cache": "none", "wrapper": "none"}
        changes |= {"loop": "loop"} if script.loop in ("shade loader", "stateful") else {}
    if script.data == "open file":
        changes |= {"workers": 0, "persistent": False, "context": "fork", "in_order": True}
        changes |= {"loop": "loop"} if script.loop == "shade loader" else {}
    if script.data == "only many items" and script.loop == "shade loader":
        changes["loop"] = "loop"
    if script.data == "only many items" and script.wrapper == "halves":
        changes["wrapper"] = "none"  # ConcatDataset asks for one at a time
    if script.loop == "shade loader":
        changes |= {"context": "fork", "persistent": False}  # its workers are threads
    # Workers that stay have a data set of their own, and so have labels that two ranks see.
    if script.data != "tensors" or script.workers or script.ranks > 1 or script.wrapper != "none":
        changes["relabels"] = False
    return changes


def _of_exchange(script: Script) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if script.model == "sparse":  # torch's other optimizers refuse it, and so does its clipping
        changes |= {"optimizer": "sgd"} | ({"edits": "none"} if script.edits == "clip" else {})
        # DDP of torch 2.14 divides the dense gradients beside a sparse one twice, over gloo.
        changes |= {"exchange": "hook"} if script.ranks > 1 else {}
    elif script.exchange == "engine":
        changes |= {"optimizer": "sgd", "wraps": False}
        changes |= {"edits": "none"} if script.edits == "clip" else {}
        changes |= {"loop": "loop"} if script.loop == "accelerate" else {}
        changes |= {"model": "linear"} if script.model == "complex" else {}
    if changes.get("exchange", script.exchange) != "engine":
        changes["holds"] = True
    if script.loop == "accelerate":
        changes["wraps"] = False
    return changes


def _of_saves(script: Script) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    if not script.saves:
        changes |= {"persists": True, "neighbour": False, "other_model": False, "alone": False}
    if not script.persists:
        changes["neighbour"] = False  # nothing but the run's name says whose snapshots in memory are
    if script.loop == "ahead":
        # Until then it looks like a loop that accumulates, which is said; two ranks have epochs of two or three steps.
        changes["every"] = 2 if script.ranks == 1 else 3
    if script.other_model:
        changes |= {"ending": "exception", "waits": True, "model": "picky", "exchange": "ddp", "edits": "none"}
        # Ended after a save.
        changes |= {"step": max(2, changes.get("every", script.every), script.step % 5), "holds": True}
    return changes
