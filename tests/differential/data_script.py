"""What a generated script of the data plane is, and how scripts are drawn: the plainest first, so that they shrink."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from tests.differential.data_kinds import FOLDERS, KINDS, WRAPPERS

OURS = ("uniform", "unbiased", "pads")
SAMPLERS = ("order", "shuffle", "random", "replacement", "distributed", "batches", *OURS, "uniform in batches")


@dataclass(frozen=True)
class Script:
    """One training script; every field's default is what most scripts do."""

    kind: str = "tensors"
    size: int = 12
    inside: tuple[str, ...] = ()
    """Wrappers inside the ShadeDataset, the innermost first."""
    around: str = ""
    """A wrapper around it."""
    transform: str = "none"
    place: str = "shade"
    """Whose the transform is: ``shade`` (the ShadeDataset's) or ``own`` (the wrapped data set's)."""
    assigned: bool = False
    """Whether another transform is assigned after the first epoch."""
    prefixed: bool = False
    """Whether a first step that is not random is cached."""
    loader: str = "DataLoader"
    workers: int = 0
    context: str = "fork"
    sampler: str = "order"
    batch: int | None = 4
    drop_last: bool = False
    collate: str = "default"
    prefetch: int | None = None
    persistent: bool = False
    pin: bool = False
    epochs: int = 2
    sets_epoch: bool = True
    walk: str = "whole"
    """``whole``, or in the first epoch: ``break``, ``peek`` (a kept look at one batch), ``nested``, ``zip``."""
    keeps_batches: bool = False
    """Whether batches are held until the end; else their tensors are overwritten at once."""
    reports: str = "once"
    """Reports of each batch: ``none``, ``once``, ``twice``, ``every other``, ``halves``."""
    resume: int | None = None
    """After so many batches of the last epoch all is made anew and loaded."""
    resume_workers: int | None = None
    """Workers from then on; None: as before."""
    looks: int = 0
    """Looks at one batch between loading and the rest of the epoch."""
    formatted: bool = False
    """Whether another format is set in place after the first epoch, of a Hugging Face data set."""
    store: str = "memory"
    """``none``, ``memory``, ``dying`` (fails from a call on), ``local``, ``server``, ``cluster``, ``killed`` (a
    server), ``killed node`` (of a cluster)."""
    fraction: float = 1.0
    form: str = "encoded"
    on_bad_sample: str = "stop"
    changed: tuple[int, ...] = ()
    """Items that are corrected between two runs over one store."""
    world: int = 1
    seed: int = 0

    @property
    def is_ours(self) -> bool:
        """Whether a ShadeSampler draws."""
        return self.sampler in OURS or self.sampler == "uniform in batches"

    @property
    def starts_processes(self) -> bool:
        """Whether workers or servers are needed."""
        starts_workers = self.workers > 0 or bool(self.resume_workers)
        return starts_workers or self.store in ("local", "server", "cluster", "killed", "killed node")


REFUSED_KINDS = ("pair as list", "namedtuple", "dataclass")
RAGGED = ("hugging face", "detection", "tokens", "audio", "no target", "nested", "odd")
"""Cannot be collated by default: sizes differ, or there is a None or bytes or a numpy array of the other byte order."""


@st.composite
def scripts(draw: st.DrawFn, *, processes: bool = True) -> Script:
    """Draws a script; without ``processes`` one that starts none."""

    def one(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    def rarely(plain: Any, *others: Any) -> Any:
        return one(plain, *([plain] * (2 * len(others))), *others)

    workers = one(*[0] * 14, 1, 3) if processes else 0
    # Most of what threads and processes do otherwise than one process concerns pictures and shuffling.
    kind = one(
        *[kind for kind in KINDS if kind not in REFUSED_KINDS] * 3, *REFUSED_KINDS, *FOLDERS * 12 * bool(workers)
    )
    has_transform_of_its_own = kind in FOLDERS or kind not in ("tensors", "hugging face")
    changed = rarely((), (3,), (7, 8), (20, 41))
    options: dict[str, Any] = {"kind": kind, "changed": changed}
    options["size"] = 44 if changed else one(12, 9, 14, 44)
    options["inside"] = rarely((), *[(name,) for name in WRAPPERS], ("subset", "concat"), ("shifted", "split"))
    options["around"] = rarely("", *WRAPPERS)
    options["transform"] = one("none", "mark", "noise", *(("fused", "fused noise") if kind in FOLDERS else ()))
    if kind in FOLDERS and options["transform"] == "none":
        options["transform"] = one("mark", "none")
    options["place"] = one("shade", "own") if has_transform_of_its_own and not options["inside"] else "shade"
    options["assigned"] = options["transform"] in ("mark", "fused") and one(False, True)
    options["loader"] = one("DataLoader", "DataLoader", "StatefulDataLoader", *["ShadeLoader"] * (5 if workers else 2))
    if workers:
        options["workers"] = workers
        options["context"] = one(*["fork"] * 15, "spawn", "forkserver")
        options["prefetch"], options["persistent"] = one(None, 1, 4), one(False, True)
    sampler = options["sampler"] = one(*SAMPLERS, *OURS, *["shuffle"] * 5 * bool(workers))
    options["batch"] = one(4, 3, 1, 5, *((None,) if sampler in ("order", "random") else ()))
    options["drop_last"] = options["batch"] is not None and one(False, True)
    options["collate"] = (
        "list"
        if kind in RAGGED or (options["transform"] == "none" and kind in FOLDERS)
        else one("default", "default", "list")
    )
    options["pin"] = one(False, False, True)
    options["epochs"], options["sets_epoch"] = one(2, 1, 3, 4), one(True, True, True, False)
    options["walk"] = one("whole", "whole", "break", "peek", "nested", "zip")
    options["keeps_batches"] = one(False, True)
    options["reports"] = one("once", "once", "none", "twice", "every other", "halves")
    options["store"] = one("memory", "memory", "none", "dying")
    if processes and (workers or one(True, False, False)):
        options["store"] = one(*["server"] * 6, *["cluster"] * 4, "none", "none", "memory", "local", "killed")
        if options["store"] == "killed":
            options["store"] = one(*["killed"] * 5, "killed node")
    if options["place"] == "own" and options["transform"] == "noise" and kind not in FOLDERS:
        options["store"] = one("none", options["store"])  # with a cache it is refused
    options["fraction"] = one(1.0, 0.5, 0.1)
    if kind in FOLDERS and options["store"] != "none":
        options["form"] = one("encoded", "encoded", "decoded")
    options["on_bad_sample"] = one("stop", "skip")
    if sampler in ("distributed", "uniform"):
        options["world"] = one(1, 1, 2, 3)
    options["resume"] = one(None, None, 0, 1, 2)
    options["looks"] = one(0, 0, 1, 2)
    options["resume_workers"] = one(None, None, 0, 1) if processes else None
    options["formatted"] = kind == "hugging face" and one(False, True)
    options["seed"] = draw(st.integers(0, 3))
    return made_possible(Script(**options))


def prefixed(script: Script) -> Script:
    """Adds a first step that is cached, if the script can have one."""
    can = script.place == "shade" and script.transform in ("none", "mark", "noise") and script.form == "encoded"
    return replace(script, prefixed=can and script.kind not in (*REFUSED_KINDS, "noise inside"))


def made_possible(script: Script) -> Script:
    """Takes back what the rest of a script leaves no sense in."""
    changes: dict[str, Any] = {}
    if script.size > 14 and (script.batch or 1) < 3:
        changes["batch"] = 5
    keeps_place = script.loader != "DataLoader" and script.batch is not None
    if script.kind == "noise inside" and script.transform == "noise":
        changes["transform"] = "mark"  # which of two places draws first is nobody's promise
    if script.resume is not None:
        can_resume = script.loader == "ShadeLoader" or script.is_ours
        if script.is_ours and not script.sets_epoch and script.resume == 0:
            changes["resume"] = 1  # between two epochs nothing says which of them the script is in
        if script.loader == "DataLoader" and script.reports == "every other":
            changes["resume"] = 2  # a batch that was not reported would come again
            if script.size < 4 * (script.batch or 1) * script.world:
                changes["reports"] = "once"
        if script.sampler == "uniform in batches" and not script.sets_epoch and script.loader == "StatefulDataLoader":
            can_resume = False  # which keeps the epoch of no sampler inside a BatchSampler
        draws = script.transform in ("noise", "fused noise") or script.kind == "noise inside"
        # Without a ShadeSampler or workers, what is random follows generators that the script would have to restore.
        draws &= not (script.is_ours or (script.loader == "ShadeLoader" and script.workers > 0 and keeps_place))
        draws |= script.kind == "noise inside"
        # Without a cache the data set applies its own transform, as anywhere.
        draws |= script.transform == "noise" and script.place == "own" and script.store == "none"
        # Passes that overlap share the sampler's epoch: what the outer one draws depends on how far the inner one is.
        draws |= script.transform in ("noise", "fused noise") and script.walk in ("nested", "zip", "peek")
        if not can_resume or script.around or script.changed or draws:
            changes["resume"] = None
    if script.store == "killed":
        changes["resume"] = None  # a run does not begin without its server
    if changes.get("resume", script.resume) is None:
        changes |= {"resume_workers": None, "looks": 0}
    elif script.sampler in ("unbiased", "pads") and not script.sets_epoch:
        changes["looks"] = 0  # nothing says how many batches are left
    if script.loader == "StatefulDataLoader" or (script.resume_workers and script.store in ("memory", "dying")):
        changes["resume_workers"] = None
    if script.changed and (script.store not in ("memory", "server") or (script.workers and script.store == "memory")):
        changes["changed"] = ()
    if script.store.startswith("killed"):
        changes["world"] = 1  # ranks are played one after the other, and a rank does not begin without a server
    overlaps = script.walk in ("nested", "zip", "peek")
    if script.is_ours and overlaps and script.loader != "ShadeLoader":
        changes["persistent"] = False  # DataLoader's own passes end each other where workers stay
    if script.formatted and (script.resume is not None or script.persistent or script.epochs == 1):
        changes["formatted"] = False
    if script.assigned and (script.resume is not None or script.persistent or script.epochs == 1):
        changes["assigned"] = False
    return replace(script, **changes)
