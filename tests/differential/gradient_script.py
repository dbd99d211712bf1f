"""What a generated training script of the gradient plane may do, and which refusals it may meet.

A `Script` is plain where nothing is said; hypothesis draws a few departures from it, so what it shrinks to is the
plainest script that still differs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from hypothesis import strategies as st

REBUILDS = ("resume", "resume late")
CHANGES_PARAMETERS = ("unfreeze", "freeze", "add group", "new layer", "assign", "convert")
REBINDS = ("data", "vector", "memory format", "transposed")
EVENTS = (
    *REBINDS,
    *CHANGES_PARAMETERS,
    *REBUILDS,
    "in place",
    "load weights",
    "load optimizer",
    "learning rate",
    "eval",
    "peek",
)
SGD = ("sgd", "momentum", "nesterov", "decay", "dampened", "maximize")
ADAM = ("adam", "adamw", "adam decay")
OPTIMIZERS = (*SGD, *ADAM, "torch", "amsgrad", "local", "rmsprop")
"""`torch`: torch.optim.SGD; the last two only as what an engine refuses or what nothing plain equals."""


@dataclass(frozen=True, repr=False)
class Script:
    """One training script; each field says what it does that the plainest does not."""

    face: str = "engine"
    """`engine`, or `hook`: DDP with `sparse_hook`."""
    seed: int = 0
    ranks: int = 2
    steps: int = 3
    optimizer: str = "sgd"
    groups: int = 1
    scheduler: str = ""
    dtype: str = "float32"
    """`mixed`: the branches in bfloat16."""
    conv: bool = False
    norm: bool = False
    tied: bool = False
    unused: bool = False
    """A layer that is in no forward pass."""
    frozen: bool = False
    use: str = "both"
    """The use of two branches: `both`, `one`, in `turn` by step, or `apart` by step and rank."""
    own_start: bool = False
    """Each rank builds with a seed of its own."""
    passes: int = 1
    place: str = "last outside"
    """Where the backward passes stand: the last outside of `accumulate()` or `no_sync()`; all `inside`; all `outside`;
    the `first outside`; or the same graph `retained` and gone through again."""
    zero: str = ""
    """The script zeroes gradients: `none` or `zero` after each step, `before` each backward pass."""
    scaler: str = ""
    """`engine`: as documented; `script`: ``scaler.step`` is the script's."""
    infinite: tuple[int, ...] = ()
    """The step and the rank in which the loss is infinite."""
    clip: str = ""
    """`own`: the engine's; `norm` or `value`: torch's, between backward and step."""
    checkpoint: str = ""
    compile: bool = False
    penalty: bool = False
    """A gradient penalty: the loss holds a gradient."""
    sizes: str = ""
    """`weighed`: batches of unequal sizes, with num_samples; `unsaid`: without; `ends`: rank 1 runs out of data."""
    wrapped: bool = False
    """The engine is given a DDP-wrapped model."""
    ddp: tuple[str, ...] = ()
    """Flags of DDP under a hook."""
    staleness: int = 0
    local_size: int = 1
    density: float = 1.0
    compressor: str = "topk"
    quantiser: str = "none"
    bucket_bytes: int = 1 << 24
    check_every: int = 500
    events: tuple[tuple[int, str], ...] = ()
    """Before which steps what happens."""

    def __repr__(self) -> str:
        departures = [
            f"{each.name}={value!r}" for each in fields(self) if (value := getattr(self, each.name)) != each.default
        ]
        return f"Script({', '.join(departures)})"

    @property
    def is_exact(self) -> bool:
        """Whether the weights have to be plain PyTorch's."""
        return self.density == 1.0 and self.quantiser == "none" and self.optimizer != "local"

    @property
    def clips_own(self) -> bool:
        """Whether each rank clips its own gradient, before the exchange."""
        return self.face == "engine" and self.place == "inside" and self.clip in ("norm", "value")

    @property
    def happenings(self) -> set[str]:
        """The kinds of its events."""
        return {kind for _, kind in self.events}

    def samples(self, rank: int, step: int) -> int:
        """Samples in one rank's batch; 0: it has none."""
        if self.sizes == "ends" and rank == 1 and step >= 1:
            return 0
        return 4 + 3 * ((rank + step) % self.ranks) if self.sizes in ("weighed", "unsaid") else 4

    def shares(self, step: int) -> list[float]:
        """The weight of each rank's loss in the whole batch's."""
        held = [self.samples(rank, step) for rank in range(self.ranks)]
        if self.sizes == "unsaid":
            held = [1] * self.ranks
        if self.sizes == "ends" and self.face == "hook":  # join() divides by the initial world size
            return [bool(each) / self.ranks for each in held]
        return [each / sum(held) for each in held]


def has_books(script: Script) -> bool:
    """Whether what was sent can be told from outside: all ranks weigh the same, and nothing else touches gradients."""
    if script.is_exact:
        return False
    is_usual = script.place == "last outside" and script.local_size == 1 and script.clip == ""
    is_steady = script.sizes in ("", "unsaid") and script.optimizer != "local"
    return (
        is_usual and is_steady and not script.happenings & {"unfreeze", "assign", "convert", "new layer", "add group"}
    )


def tidy(script: Script) -> Script:
    """Takes out what says nothing beside the rest, or what nobody could run."""
    changed: dict[str, object] = {}
    if script.face == "hook":
        changed |= {"wrapped": False, "staleness": 0, "local_size": 1, "bucket_bytes": 1 << 24, "check_every": 500}
        if script.optimizer in ("torch", "amsgrad", "local"):
            changed["optimizer"] = "sgd"
        if script.clip == "own":
            changed["clip"] = "norm"
        if script.scaler:
            changed["scaler"] = "script"
        if not script.zero:
            changed["zero"] = "none"
        if script.place in ("inside", "first outside", "retained"):
            # DDP leaves such gradients to each rank; DDP alone, with which it is compared, neither weighs nor checks.
            changed |= {"infinite": (), "sizes": "" if script.sizes == "weighed" else script.sizes}
    else:
        changed["ddp"] = ()
    if script.local_size > 1:
        changed["local_size"] = script.ranks
    if script.passes == 1 and script.place in ("first outside", "outside"):
        changed["place"] = "last outside"
    if script.clips_own:  # what a scaler has scaled would be clipped so, and what is infinite, to zero
        changed |= {"scaler": "", "infinite": ()}
    kept = {step: kind for step, kind in sorted(script.events) if step < script.steps and kind in EVENTS}
    left_out = set() if script.conv else {"memory format"}
    if script.face == "hook":  # DDP itself leaves these to each rank alone
        left_out |= {"unfreeze", "new layer"}
        if script.density < 1 or script.quantiser != "none":  # residuals lie as DDP's bucket does, in the old layout
            left_out |= {"transposed", "memory format"}
    kept = {step: kind for step, kind in kept.items() if kind not in left_out}
    first = next((kind for kind in kept.values() if kind in (*CHANGES_PARAMETERS, *REBUILDS)), None)
    kept = {step: kind for step, kind in kept.items() if kind == first or kind not in (*CHANGES_PARAMETERS, *REBUILDS)}
    if script.compile:
        changed |= {"checkpoint": "", "penalty": False, "steps": min(script.steps, 3)}
    if script.place == "retained":
        changed |= {"checkpoint": "", "compile": False}
    if script.penalty and script.checkpoint:
        changed["checkpoint"] = "plain"
    if script.use not in ("both", "one") or script.happenings & {"freeze", "unfreeze"}:
        changed["ddp"] = tuple(each for each in script.ddp if each != "static_graph")
    if script.sizes == "ends" and script.face == "hook":
        changed |= {"scaler": "", "infinite": (), "norm": False, "passes": 1, "place": "last outside", "ddp": ()}
        changed |= {"use": "both", "unused": False, "compile": False, "tied": False, "frozen": False}
        kept = {}
    if changed.get("infinite", script.infinite) and script.infinite[1] >= script.ranks:
        changed["infinite"] = (script.infinite[0], 0)
    if script.face == "hook" and (script.unused or script.use != "both" or "freeze" in kept.values()):
        flags = changed.get("ddp", script.ddp)
        changed["ddp"] = tuple(sorted({"find_unused_parameters", *flags}))  # type: ignore[misc]
    return replace(script, **changed, events=tuple(kept.items()))  # type: ignore[arg-type]


DEPARTURES: list[tuple[str, object]] = [
    *(("optimizer", each) for each in ("momentum", "nesterov", "decay", "adam", "adamw", "dampened", "maximize")),
    *(("optimizer", each) for each in ("adam decay", "rmsprop", "local", "amsgrad", "torch")),
    *(("groups", each) for each in (2, 3)),
    *(("scheduler", each) for each in ("step", "warm up", "one cycle", "cosine")),
    *(("dtype", each) for each in ("bfloat16", "mixed", "float64")),
    *((name, True) for name in ("conv", "norm", "tied", "unused", "frozen", "own_start", "penalty", "wrapped")),
    *(("place", each) for each in ("inside", "retained")),
    *(("zero", each) for each in ("none", "zero", "before")),
    *(("scaler", each) for each in ("engine", "engine", "engine", "engine", "script")),
    *(("infinite", each) for each in ((0, 0), (1, 1), (1, 0))),
    *(("clip", each) for each in ("own", "norm", "value")),
    *(("checkpoint", each) for each in ("reentrant", "plain")),
    *(("sizes", each) for each in ("weighed", "unsaid", "ends")),
    *(("ddp", (each,)) for each in ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")),
    ("ddp", ("find_unused_parameters", "gradient_as_bucket_view")),
    ("staleness", 1),
    ("staleness", 1),
    ("local_size", 2),
    *(("compressor", each) for each in ("threshold-v", "threshold-v16", "random-k")),
    *(("quantiser", each) for each in ("bf16", "int8")),
    ("bucket_bytes", 20_000),
    ("check_every", 1),
]
_BOOKS: dict[str, object] = {"face": "hook", "density": 0.3, "passes": 1, "clip": "", "sizes": "", "events": ()}
"""A script under the hook that `has_books`."""
TOGETHER: list[dict[str, object]] = [
    *[{}] * 5,
    {"face": "engine", "passes": 2, "place": "inside", "scaler": "script", "clip": ""},
    {"face": "engine", "scaler": "engine", "place": "inside"},
    {"face": "engine", "scaler": "engine", "infinite": (1, 0), "steps": 4},
    {"face": "engine", "wrapped": True},
    {"face": "engine", "staleness": 1, "check_every": 1},
    {"face": "engine", "passes": 2, "place": "inside", "clip": "norm"},
    *({"face": "engine", "dtype": "bfloat16", "events": ((1, each),)} for each in ("in place", "load weights")),
    *({"face": face, "density": 0.3, "steps": 4, "events": ((2, "resume"),)} for face in ("engine", "hook")),
    *({"face": "hook", "use": use, "density": 0.3, "steps": 4} for use in ("turn", "apart")),
    {"face": "engine", "norm": True, "density": 1.0, "quantiser": "none"},
    {
        "face": "engine",
        "optimizer": "momentum",
        "density": 1.0,
        "quantiser": "none",
        "steps": 4,
        "events": ((2, "freeze"),),
    },
    _BOOKS | {"quantiser": "int8", "compressor": "random-k", "use": "turn", "steps": 4},
]
"""What is drawn together, with little beside it: independent draws rarely meet, and these have hidden faults in one
another."""


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Draws scripts with few departures from the plainest."""
    together = draw(st.sampled_from(TOGETHER))
    most = 2 if together else 7
    departures = draw(st.lists(st.sampled_from(DEPARTURES), max_size=most, unique_by=lambda each: each[0]))
    events = draw(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(EVENTS)), max_size=2))
    passes = draw(st.sampled_from([1, 1, 2, 3]))
    places = ["last outside"] * 3 + ["inside"] * 2 + ["first outside", "outside"]
    script = Script(
        face=draw(st.sampled_from(["engine", "hook", "engine"])),
        ranks=draw(st.sampled_from([2, 2, 2, 2, 2, 3])),
        steps=draw(st.integers(2, 4)),
        use=draw(st.sampled_from(["both"] * 4 + ["turn", "apart", "one"])),
        passes=passes,
        place=draw(st.sampled_from(places)) if passes > 1 else "last outside",
        density=draw(st.sampled_from([1.0] * 5 + [0.3, 0.05])),
        seed=draw(st.integers(0, 3)),
        compile=draw(st.integers(0, 60)) == 60,
        events=tuple(events),
    )
    return tidy(replace(script, **{**dict(departures), **together}))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Refusal:
    """A refusal by name, and which scripts may meet it."""

    name: str
    message: str
    """A regular expression found in the error's text."""
    may: Callable[[Script], bool]


def _happens(*kinds: str) -> Callable[[Script], bool]:
    return lambda script: bool(script.happenings & set(kinds))


REFUSALS = (
    Refusal("an engine over DDP", "got 'DistributedDataParallel'", lambda script: script.wrapped),
    Refusal(
        "an optimizer that is not ours",
        r"expected an optimizer of shade\.gradient\.optim",
        lambda script: script.optimizer in ("torch", "rmsprop"),
    ),
    Refusal("amsgrad", "expected amsgrad=False", lambda script: script.optimizer == "amsgrad"),
    Refusal(
        "a second backward pass",
        "expected one backward pass per step",
        # Each reentrant checkpoint goes back by itself, so a weight that two of them share gets two gradients.
        lambda s: s.place in ("outside", "first outside", "retained") or (s.tied and s.checkpoint == "reentrant"),
    ),
    Refusal(
        "gradients touched between backward and step",
        "expected gradients to be left to the engine",
        lambda script: script.clip in ("norm", "value") or script.scaler == "script" or script.zero != "",
    ),
    Refusal(
        "trained parameters that the engine does not know",
        "expected gradients of the parameters that were trainable",
        _happens("unfreeze", "add group", "new layer"),
    ),
    Refusal(
        "parameters replaced", "expected the parameters that the engine was made with", _happens("assign", "new layer")
    ),
    Refusal(
        "parameters converted",
        r"as at the start: torch\.",
        lambda script: "convert" in script.happenings or ("vector" in script.happenings and script.dtype == "mixed"),
    ),
    Refusal(
        "a gradient that is not finite",
        "expected finite gradients in step",
        lambda script: bool(script.infinite),
    ),
    Refusal(
        "a clip_norm with Adam's directions", "expected clip_norm None with Adam's", lambda s: s.optimizer == "local"
    ),
)


PYTORCH_REFUSES, DDP_REFUSES = "PyTorch refuses it too", "DDP refuses it too"


def refusal_of(script: Script, message: str) -> str:
    """The name of the refusal that a script has met; empty if it is not one that it may meet."""
    found = [each for each in REFUSALS if re.search(each.message, message)]
    return next((each.name for each in found if each.may(script)), "")
