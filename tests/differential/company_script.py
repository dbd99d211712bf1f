"""What a combined script is: two or three planes, a framework, an ending; the plainest are drawn first, to shrink."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from hypothesis import strategies as st

from tests.differential.company_data import KINDS

LOOPS = ("loop", "stateful", "shade loader", "accelerate")
ENDINGS = ("normal", "exception", "interrupt", "kill")
DIFFERING = ("seed", "batch size", "mode", "size")
BATCH = 4


@dataclass(frozen=True)
class Script:
    """A training of one or two ranks, in processes of their own, with what surrounds it."""

    loop: str = "loop"
    data: str = "tensors"
    cache: str = "none"
    """``none``, ``memory``, ``local`` (a server that belongs to the script), ``server`` (one that all share)."""
    workers: int = 0
    context: str = "fork"
    persistent: bool = False
    in_order: bool = True
    optimizer: str = "sgd"
    model: str = "linear"
    edits: str = "none"
    """What the script does to gradients after backward: ``none``, ``clip``, ``drop`` (of every third step), ``new``."""
    ranks: int = 1
    exchange: str = "ddp"
    """How two ranks exchange gradients: ``ddp``, ``hook`` (sparse_hook, all elements), ``engine`` (all elements)."""
    meets: str = "first"
    """When the ranks meet: ``first``, or ``late``: after the data set is made."""
    saves: str = ""
    """The strategy of a Checkpointer that saves every second step; empty: there is none."""
    persists: bool = True
    neighbour: bool = False
    """Whether another project with the same run id was killed on this machine before."""
    ending: str = "normal"
    step: int = 3
    """The step after which the first life ends, if not normally."""
    closes: bool = True
    """Whether the script closes what it has made, where it gets that far."""
    epochs: int = 2
    differs: str = ""
    """An argument in which the second rank differs from the first."""

    @property
    def is_refused(self) -> bool:
        """Whether the ranks must be refused, all of them."""
        return bool(self.differs)


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Draws a script."""

    def one(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    loops = [loop for loop in LOOPS if loop != "accelerate" or find_spec("accelerate")]
    options: dict[str, Any] = {"loop": one(*loops), "data": one(*KINDS)}
    options["cache"] = one("none", "memory", "server", "server", "server", "local")
    options["workers"] = one(0, 1, 2, 2)
    options["context"] = one(*["fork"] * 30, "spawn", "forkserver") if options["workers"] else "fork"
    options["persistent"] = bool(options["workers"]) and one(False, True)
    options["in_order"] = options["workers"] < 2 or one(True, True, False)
    options["optimizer"] = one("sgd", "momentum", "adam", "fused adam")
    options["model"] = one("linear", "embedding", "complex", "tied")
    options["edits"] = one("none", "none", "clip", "drop", "new")
    options["ranks"] = one(1, 1, 2)
    if options["ranks"] == 2:
        options["exchange"] = one("ddp", "ddp", "hook", "engine")
        options["meets"] = one("first", "first", "late")
        options["differs"] = one(*[""] * 5, *DIFFERING)
    options["saves"] = one("", "overlap", "copy", "asymmetric")
    options["persists"] = one(True, True, False)
    options["neighbour"] = one(False, False, True)
    options["ending"] = one("normal", *ENDINGS)
    options["step"] = draw(st.integers(1, 12))
    options["closes"] = one(True, False)
    options["epochs"] = one(2, 1, 3)
    return made_possible(Script(**options))


def made_possible(script: Script) -> Script:
    """Takes back what the rest of a script leaves no sense in."""
    changes: dict[str, Any] = {}
    if script.cache == "memory" and (script.workers or script.ranks > 1):
        changes["cache"] = "server"  # refused by name, which the data plane asks
    if script.cache == "local" and script.ranks > 1:
        changes["cache"] = "server"
    if not script.saves:
        changes |= {"persists": True, "neighbour": False}
    if not script.persists:
        changes["neighbour"] = False  # nothing but the run's name says whose snapshots in memory are
    if script.loop == "shade loader":
        changes |= {"context": "fork", "persistent": False, "in_order": True}  # its workers are threads
    if script.loop == "stateful":
        changes["in_order"] = True
    if script.differs:
        changes |= {"ending": "normal", "saves": "", "neighbour": False, "data": "tensors"}
    if script.exchange == "engine":
        changes |= {"optimizer": "sgd", "edits": "none"}
        changes |= {"loop": "loop"} if script.loop == "accelerate" else {}
    if script.exchange != "ddp" and script.model == "complex":
        changes["model"] = "linear"
    return replace(script, **changes)
