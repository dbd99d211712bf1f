"""The gradient plane: scripts trained with the engine or under the hook, by real ranks, and by one plain process.

A script that sends everything has to end with the weights of one process that trains plain PyTorch on the whole batch.
The allowed difference is float rounding: both take the same steps with sums in another order, so each step may add a
few roundings of a weight (the machine epsilon of its type, at the scale of the largest weight and movement of its
tensor). A type wider than float32 counts as float32, in which gradients are exchanged. A script that sends less has to
conserve each parameter's mass: the mean over the ranks of what left them, gradients less residuals, is what arrived.
In both cases all ranks hold the same bits after every step, and all come to an end.

A script that is refused has to meet a refusal out of a written list, that fits what it does, with weights still those
of plain PyTorch. Where DDP without a hook fails in the same way, or comes to the same weights, the hook may too.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import multiprocessing
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch

from tests.differential.gradient_faults import FAULTS
from tests.differential.gradient_ranks import SILENCE_SECONDS, serve
from tests.differential.gradient_script import DDP_REFUSES, PYTORCH_REFUSES, Script, has_books, refusal_of, scripts
from tests.differential.gradient_training import Network, Training, Weights
from tests.differential.harness import Outcome, Plane, Verdict

ROUNDINGS, NARROW_ROUNDINGS = 32, 5
"""So many roundings a step may a weight be off: of float32, and of bfloat16 (2.5 is the most that was seen)."""
WATCH_SECONDS = 3 * SILENCE_SECONDS
COMPILE_SECONDS = 120.0
START_SECONDS = 120.0
LOST = ("PeerLostError", "RuntimeError", "GradientError", "DistBackendError", "ConnectionError")
"""What the other ranks meet when one has raised and left."""

Trace = dict[str, Any]


class Ranks:
    """Processes that stay alive over many scripts."""

    def __init__(self) -> None:
        self._processes: list[tuple[Any, Any]] = []
        self._starting: list[Any] = []
        self._folder = tempfile.TemporaryDirectory(prefix="shade-gradient-plane-")
        self._numbers = itertools.count()
        self._group = (0, "")
        self.fault = ""

    def begin(self, script: Script, face: str) -> None:
        """Sends a script to the ranks, which train it."""
        while len(self._processes) < script.ranks:
            context = multiprocessing.get_context("spawn")
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(len(self._processes), there), daemon=True)
            process.start()
            there.close()
            self._processes.append((process, here))
            self._starting.append(here)
        while self._starting:
            assert self._starting[-1].poll(START_SECONDS), "a rank's process does not start"
            self._starting.pop().recv()
        if self._group[0] != script.ranks:
            self._group = (script.ranks, f"{self._folder.name}/{next(self._numbers)}")
        for _, connection in self._processes[: script.ranks]:
            connection.send((script, face, self.fault, self._group))

    def end(self, script: Script) -> list[Trace] | None:
        """What each rank came to; None if one hangs or died. Ranks that failed meet anew."""
        until = time.monotonic() + (COMPILE_SECONDS if script.compile else WATCH_SECONDS)
        found: list[Trace] = []
        for _, connection in self._processes[: script.ranks]:
            try:
                if not connection.poll(max(0.0, until - time.monotonic())):
                    break
                found.append(connection.recv())
            except (EOFError, OSError):
                break
        if len(found) < script.ranks:
            self.close()
            return None
        if any(each["error"] for each in found):
            self._group = (0, "")
        return found

    def close(self) -> None:
        """Ends the processes; the next script starts others."""
        for process, connection in self._processes:
            connection.close()
            process.kill()
            process.join()
        self._processes, self._group = [], (0, "")


RANKS = Ranks()
atexit.register(RANKS.close)


def play(script: Script) -> Verdict:
    """Trains a script on ranks and in one plain process, and compares."""
    RANKS.begin(script, script.face)
    plain, plain_error = Training(script), ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            plain.run()
        except Exception as error:  # noqa: BLE001 - then the ranks have to fail in the same way
            plain_error = f"{type(error).__name__}: {error}"
    traces = RANKS.end(script)
    if traces is None:
        return _lost(script)
    verdict = judge(script, traces, plain, plain_error)
    if verdict.outcome is Outcome.DIFFERENT and script.face == "hook":
        RANKS.begin(script, "ddp")
        alone = RANKS.end(script)
        if alone is not None:
            verdict = like_ddp(script, traces, alone) or verdict
    return verdict


def _lost(script: Script) -> Verdict:
    """A rank that hangs or dies does so a second time, or the machine was busy."""
    RANKS.begin(script, script.face)
    if RANKS.end(script) is None:
        return Verdict(Outcome.DIFFERENT, f"a rank died, or hung for {WATCH_SECONDS:.0f} s")
    return play(script)


def judge(script: Script, traces: Sequence[Trace], plain: Training, plain_error: str) -> Verdict:
    """Decides what a script came to."""
    if any(trace["error"] for trace in traces):
        return _judge_errors(script, traces, plain, plain_error)
    if plain_error:
        return Verdict(Outcome.DIFFERENT, f"plain PyTorch refuses it: {plain_error}")
    differences = [*apart(traces), *unlike(script, traces, plain.snapshots[-1])]
    if script.scaler and script.is_exact and not script.staleness:
        scales = {trace["scales"][-1] for trace in traces}
        differences += [] if scales == {plain.scaler.get_scale()} else [f"scales {scales}, {plain.scaler.get_scale()}"]
    if has_books(script):
        differences += lost_mass(script, traces)
    if any(trace["repairs"] for trace in traces):
        differences.append("the check found replicas that differ")
    if differences:
        return Verdict(Outcome.DIFFERENT, "; ".join(differences))
    return Verdict(Outcome.SAME)


def _judge_errors(script: Script, traces: Sequence[Trace], plain: Training, plain_error: str) -> Verdict:
    errors = [trace["error"] for trace in traces]
    shown = " | ".join(f"rank {rank}, step {traces[rank]['steps']}: {error}" for rank, error in enumerate(errors))
    if plain_error and all(error == plain_error for error in errors):
        return Verdict(Outcome.REFUSED, PYTORCH_REFUSES)
    names = [refusal_of(script, trace["error"]) if trace["is_named"] else "" for trace in traces]
    if not any(names):
        return Verdict(Outcome.DIFFERENT, f"{shown}\n{traces[0].get('traceback', '')}")
    for error, name in zip(errors, names, strict=True):
        if not name and not error.startswith(LOST):
            return Verdict(Outcome.DIFFERENT, f"not refused on all ranks: {shown}")
    begun = [trace for trace, name in zip(traces, names, strict=True) if trace["has_begun"] and name]
    differences = apart(begun)
    for trace in begun:
        before = plain.snapshots[trace["steps"]]  # buffers have seen the forward pass of the refused step
        trained = {name for name, _ in plain.model.named_parameters()}
        differences += unlike(script, [trace], {name: each for name, each in before.items() if name in trained})
    if differences:
        return Verdict(Outcome.DIFFERENT, f"refused too late: {'; '.join(differences)}: {shown}")
    return Verdict(Outcome.REFUSED, next(filter(None, names)))


def like_ddp(script: Script, traces: Sequence[Trace], alone: Sequence[Trace]) -> Verdict | None:
    """SAME or REFUSED if DDP without a hook comes to the same on every rank, else None."""
    kinds = [[trace["error"].partition(":")[0] for trace in each] for each in (traces, alone)]
    if any(kinds[1]):
        return Verdict(Outcome.REFUSED, DDP_REFUSES) if kinds[0] == kinds[1] else None
    if any(kinds[0]):
        return None
    if not script.is_exact:  # where DDP leaves gradients to each rank alone, so does the hook
        return Verdict(Outcome.SAME) if apart(alone) else None
    differences = itertools.chain(
        *(unlike(script, [trace], other["weights"]) for trace, other in zip(traces, alone, strict=True))
    )
    return None if any(differences) else Verdict(Outcome.SAME)


# ── comparisons ─────────────────────────────────────────────────────────────────────────────────────────────────────


def apart(traces: Sequence[Trace]) -> list[str]:
    """Where ranks hold other bits than the first."""
    for step in range(min((len(trace["digests"]) for trace in traces), default=0)):
        if len({trace["digests"][step] for trace in traces}) > 1:
            return [f"replicas differ after step {step}"]
    return []


def unlike(script: Script, traces: Sequence[Trace], expected: Weights) -> list[str]:
    """Tensors that are further from plain PyTorch's than rounding takes them."""
    if not script.is_exact:
        return []
    start = {name: each.detach().double().numpy() for name, each in Network(script, script.seed).state_dict().items()}
    differences = []
    for rank, trace in enumerate(traces):
        for name, wanted in expected.items():
            if script.face == "hook" and name.startswith("norm.") and "running" in name and rank:
                continue  # DDP sends rank 0's before every forward
            found = trace["weights"].get(name)
            if found is None or found.shape != wanted.shape:
                differences.append(f"{name} is missing")
                continue
            before = start.get(name, wanted)
            scale = max(np.abs(wanted).max(), np.abs(wanted - before).max(), 1e-3)
            roundings = NARROW_ROUNDINGS if is_narrow(script) else ROUNDINGS
            allowed = roundings * (script.steps + 1) * epsilon(script) * scale
            is_broken = ~np.isfinite(wanted)
            if (is_broken != ~np.isfinite(found)).any():
                differences.append(f"{name} of rank {rank} is not finite, or should not be")
            elif not is_broken.any() and (distance := np.abs(found - wanted).max()) > allowed:
                moved = np.abs(wanted - before).max()
                differences.append(
                    f"{name} of rank {rank} is off by {distance:.3g}, allowed {allowed:.3g} ({moved=:.3g})"
                )
    return differences[:3]


def is_narrow(script: Script) -> bool:
    """Whether some of its weights are bfloat16 at some time."""
    return script.dtype in ("bfloat16", "mixed") or "convert" in script.happenings


def epsilon(script: Script) -> float:
    """The machine epsilon of its narrowest type; float32's for float64, whose gradients are exchanged in float32."""
    return float(torch.finfo(torch.bfloat16 if is_narrow(script) else torch.float32).eps)


def lost_mass(script: Script, traces: Sequence[Trace]) -> list[str]:
    """Parameters of which something was lost, or sent twice."""
    differences = []
    for name in traces[0]["mass"].keys() | traces[-1]["mass"].keys():
        books = [trace["mass"][name] for trace in traces if name in trace["mass"]]
        left = sum(each[0] for each in books) / script.ranks
        scale = max(largest for *_, largest in books)
        allowed = ROUNDINGS * script.steps * epsilon(script) * scale
        for _, arrived, _ in books:
            if not (off := np.abs(left - arrived).max()) <= allowed:
                differences.append(f"{name}: {off:.3g} of {scale:.3g} is lost, allowed {allowed:.3g}")
                break
    return differences[:3]


@contextlib.contextmanager
def with_fault(name: str) -> Iterator[None]:
    """A known fault in the ranks."""
    RANKS.fault = name
    try:
        yield
    finally:
        RANKS.fault = ""


def _contexts() -> dict[str, Any]:
    def make(name: str) -> AbstractContextManager[None]:
        return with_fault(name)

    return {name: partial(make, name) for name in FAULTS}


PLANE = Plane("gradient", scripts(), play, _contexts(), {"Script": Script})
