"""Generated training scripts that are ended at some step, restored in a new process and continued.

The oracle is the same training in plain PyTorch, undisturbed. Its losses and its state at every step are those that the
restored training has to have, bit for bit; or the restore is refused by name and changes nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import io
import logging
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from shade.checkpoint import Checkpointer
from shade.checkpoint._buffer.shared_memory_folder import own_folder
from shade.checkpoint._buffer.tensor_copy import Copying
from shade.cli import main as command
from shade.errors import CheckpointError, CorruptCheckpointError, ShadeError
from shade.store._servers.local_cluster import LocalCluster
from shade.store._servers.server import LocalServer
from tests.differential.checkpoint_checks import changed_together, compared, difference, shared, sizes, state_of
from tests.differential.checkpoint_drawing import SCRIPTS
from tests.differential.checkpoint_faults import FAULTS
from tests.differential.checkpoint_processes import Say, in_processes
from tests.differential.checkpoint_sharded import restore, steps_in, train_and_save
from tests.differential.checkpoint_training import Script, Training
from tests.differential.harness import Outcome, Plane, Verdict

SLACK_BYTES = 2048
"""`torch.save` may differ by so much: names of storages, alignment."""


LATE_SECONDS = 0.005


class Differs(Exception):
    """The script came to something that is neither plain PyTorch's result nor a refusal."""


@dataclass
class Undisturbed:
    """What plain PyTorch comes to."""

    losses: list[str] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    """By the number of steps done."""
    shared: list[set[tuple[str, str]]] = field(default_factory=list)
    sizes: list[dict[str, int]] = field(default_factory=list)


@dataclass
class First:
    """What the first process has seen before it ended."""

    losses: list[str] = field(default_factory=list)
    committed: int = 0
    """The newest step that was committed for certain."""
    refusal: str = ""


def play(script: Script) -> Verdict:
    """Plays a script: undisturbed, then ended and restored; compares."""
    with _place() as place, _quiet(), _copying_late() if script.copies_late else contextlib.nullcontext():
        try:
            return _play(script, place)
        except Differs as differs:
            return Verdict(Outcome.DIFFERENT, str(differs))


def _play(script: Script, place: Path) -> Verdict:
    plain = _each(script, place / "plain", lambda rank, say: say(undisturbed(script, rank)))
    run = f"differential-{secrets.token_hex(6)}"
    _store(script)  # before a fork
    storage = place / "storage"
    try:
        firsts = _each(script, place / "first", lambda rank, say: first_process(script, storage, run, rank, say))
        for first, expected in zip(firsts, plain, strict=True):
            if first.refusal:
                return Verdict(Outcome.REFUSED, first.refusal)
            _expect_same("loss of the first process", first.losses, expected.losses[: len(first.losses)])
        if script.loses_machine:
            shutil.rmtree(own_folder(run), ignore_errors=True)
        if script.damage:
            damage(script, storage, run)
        verdicts = _each(
            script,
            place / "second",
            lambda rank, say: say(second_process(script, storage, run, rank, plain[rank], firsts[rank])),
        )
        return max(verdicts, key=lambda verdict: verdict.outcome is Outcome.REFUSED)
    finally:
        shutil.rmtree(own_folder(run), ignore_errors=True)


def _each(script: Script, meeting: Path, act: Callable[[int, Say], None]) -> list[Any]:
    """Returns what an action gives on each rank: in this process where the script allows that."""
    is_distributed = script.num_ranks > 1 or script.model == "ddp"
    if is_distributed or (script.end == "killed" and meeting.name == "first"):
        return in_processes(script.num_ranks, act, meeting if is_distributed else None)
    given: list[Any] = []
    act(0, given.append)
    return given[-1:]


def undisturbed(script: Script, rank: int) -> Undisturbed:
    """Trains without a checkpoint."""
    training, found = Training(script, seed=0, rank=rank), Undisturbed()
    for _ in range(script.num_steps):
        _remember(found, training)
        found.losses.append(training.step())
    _remember(found, training)
    training.close()
    return found


def _remember(found: Undisturbed, training: Training) -> None:
    found.states.append(state_of(training))
    if training.script.model == "fsdp2":  # whose parts are no tensors of PyTorch's own
        return
    found.shared.append(shared(training))
    found.sizes.append(sizes(training))


def _expect_same(what: str, found: Any, expected: Any) -> None:
    if differs := difference(found, expected):
        raise Differs(f"{what}: {differs}")


def begin(script: Script, place: Path, run: str, training: Training) -> Checkpointer:
    """Makes the checkpointer of a script, and attaches its objects."""
    options: dict[str, Any] = {"every": script.every or 1000, "keep": script.keep, "strategy": script.strategy}
    if script.codec:
        options |= {"codec": script.codec, "keyframe_every": script.keyframe_every}
    made = _open(script, place, run, **options)
    try:
        made.attach(**training.attached)
    except ShadeError:
        drop(made)
        raise
    return made


def _open(script: Script, place: Path, run: str, **options: Any) -> Checkpointer:
    return Checkpointer(**_places(script, place, run), **options)


def _places(script: Script, place: Path, run: str) -> dict[str, Any]:
    return {"store": _store(script), "persist_to": place if script.tier == "storage" else None, "run": run}


def _store(script: Script) -> str | None:
    if script.tier == "cluster":
        return _cluster().url.reveal()
    return f"unix://{_server().socket_path}" if script.tier == "store" else None


@functools.cache
def _cluster() -> LocalCluster:
    """The cluster of all scripts, which ends with this process."""
    cluster, owner = LocalCluster(), os.getpid()
    cluster.start()
    atexit.register(lambda: cluster.stop() if os.getpid() == owner else None)
    return cluster


@functools.cache
def _server() -> LocalServer:
    """The memory server of all scripts, which ends with this process."""
    server = LocalServer()
    server.start()
    owner = os.getpid()
    atexit.register(lambda: server.stop() if os.getpid() == owner else None)
    return server


def drop(checkpointer: Checkpointer) -> None:
    """Ends a checkpointer as a process that dies ends it, as far as that can be had without one."""
    checkpointer.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


def first_process(script: Script, place: Path, run: str, rank: int, say: Say) -> None:
    """Trains until the script ends it."""
    training, first = Training(script, seed=0, rank=rank), First()
    if script.saver:

        def passed(loss: str, committed: int) -> None:
            first.losses.append(loss)
            first.committed = committed
            say(first)

        train_and_save(script, _places(script, place, run), training, passed)
        return
    try:
        checkpointer = begin(script, place, run, training)
    except ShadeError as error:
        say(First(refusal=refusal_of(error)))
        return
    try:
        while training.done < script.end_step and not first.refusal:
            first.losses.append(training.step())
            try:
                _save(script, checkpointer, first, training.done)
            except ShadeError as error:
                if training.done > 1:
                    raise
                first.refusal = refusal_of(error)
            say(first)
        if script.end != "clean":  # it is ended in the middle of a step
            training.touch()
        if script.end == "killed" and not first.refusal:
            os.kill(os.getpid(), signal.SIGKILL)
    finally:
        if script.end == "clean" and not first.refusal:
            with contextlib.suppress(*[CheckpointError] * bool(script.touched)):  # of a save that a touch has torn
                checkpointer.__exit__(None, None, None)
            if script.tier != "shared":
                first.committed = training.done
        else:
            drop(checkpointer)
        training.close()
    say(first)


def _save(script: Script, checkpointer: Checkpointer, first: First, step: int) -> None:
    """Counts a step; after a save, saves again and waits as the script does."""
    if checkpointer.step():
        if script.saves_twice:
            checkpointer.save()
        if script.waits != "nothing":
            checkpointer.wait_copy_complete()
        if script.waits == "committed":
            checkpointer.wait_committed()
            first.committed = step


def second_process(script: Script, place: Path, run: str, rank: int, plain: Undisturbed, first: First) -> Verdict:
    """Builds everything again, restores, checks what came back and trains to the end."""
    if script.saver:
        return _second_sharded(script, _places(script, place, run), rank, plain, first)
    is_lost = script.loses_machine and script.tier == "shared"
    probe = _open(script, place, run, every="never")
    steps = sorted({snapshot.record.step for snapshot in probe.list()})
    drop(probe)
    if first.committed and not is_lost and not script.damage and first.committed not in steps:
        raise Differs(f"step {first.committed} was committed; the tiers have {steps}")
    wrong = script.wrong if steps else ""
    is_built_otherwise = not script.wrong_on_one or rank == script.num_ranks - 1
    training = Training(script, seed=1 if steps else 0, rank=rank, wrong=wrong if is_built_otherwise else "")
    checkpointer = begin(script, place, run, training)
    try:
        before = state_of(training)
        try:
            restored = checkpointer.restore(steps[0]) if script.restores == "first" and steps else None
            restored = restored if restored is not None else checkpointer.restore_latest()
        except ShadeError as error:
            if script.damage and isinstance(error, CorruptCheckpointError):
                _expect_same(f"state after a refused restore ({error})", state_of(training), before)
                return Verdict(Outcome.REFUSED, "a damaged snapshot")
            if not wrong:
                raise Differs(f"restore of steps {steps}: {type(error).__name__}: {error}") from error
            _expect_same(f"state after a refused restore ({error})", state_of(training), before)
            if NAMED[wrong] not in str(error):
                raise Differs(f"another {wrong}: the refusal does not say {NAMED[wrong]!r}: {error}") from error
            return Verdict(Outcome.REFUSED, f"another {wrong}")
        if wrong:
            raise Differs(f"another {wrong}: restored step {restored.step} without a word")
        expected = steps[0] if script.restores == "first" and steps else max(steps, default=0)
        if restored.step != expected and not (script.damage and restored.step in steps):
            raise Differs(f"restored step {restored.step}; the tiers have {steps}")
        training.done, training.first_epoch = restored.step, restored.epoch
        if steps:
            _check_restored(training, plain, restored.step)
        held = getattr(training.users.get("holder"), "given", None)
        given = copy.deepcopy(held)
        while training.done < script.num_steps:
            what = f"loss of step {training.done + 1} after a restore of step {restored.step}"
            _expect_same(what, training.step(), plain.losses[training.done - 1])
            checkpointer.step()
        _expect_same("state at the end", compared(state_of(training)), compared(plain.states[-1]))
        _expect_same("what an object was given", held, given)
        if given is not None:
            _expect_same("what an object was given", given, plain.states[restored.step]["holder"]["weight"])
    finally:
        drop(checkpointer)
        training.close()
    return Verdict(Outcome.SAME)


def _second_sharded(script: Script, places: dict[str, Any], rank: int, plain: Undisturbed, first: First) -> Verdict:
    steps = steps_in(places)
    if first.committed and first.committed not in steps:
        raise Differs(f"step {first.committed} was committed; the tiers have {steps}")
    training = Training(script, seed=1 if steps else 0, rank=rank)
    if steps:
        restore(places, training, steps[0 if script.restores == "first" else -1])
        _expect_same("state after a load", compared(state_of(training)), compared(plain.states[training.done]))
    while training.done < script.num_steps:
        _expect_same(f"loss of step {training.done + 1}", training.step(), plain.losses[training.done - 1])
    _expect_same("state at the end", compared(state_of(training)), compared(plain.states[-1]))
    training.close()
    return Verdict(Outcome.SAME)


def damage(script: Script, place: Path, run: str) -> None:
    """Damages the newest snapshot in storage; `shade checkpoint verify` has to see it."""
    newest = max((record.parent for record in (place / run).glob("step-*/commit.json")), default=None)
    if newest is None:
        return
    (shard,) = (path for path in newest.glob("rank-0.*") if path.suffix != ".json")
    path = {"record": newest / "commit.json", "manifest": newest / "rank-0.json"}.get(script.damage, shard)
    content = bytearray(path.read_bytes())
    if script.damage in ("data", "header"):
        content[-1 if script.damage == "data" else 12] ^= 1
    path.write_bytes(
        content + b"{}" if script.damage == "appended" else content[: len(content) * (path.suffix != ".json")]
    )
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        code = command(["checkpoint", "verify", "all", "--persist-to", str(place), "--run", run])
    if code != 1:
        raise Differs(f"verify after damage to {path.name}: exit code {code} {said.getvalue()}")


def _check_restored(training: Training, plain: Undisturbed, step: int) -> None:
    _expect_same(f"state after a restore of step {step}", compared(state_of(training)), compared(plain.states[step]))
    if training.script.model == "fsdp2":  # whose parts are no tensors of PyTorch's own
        return
    found, expected = shared(training), plain.shared[step]
    within = {pair for pair in expected if pair[0].split("/")[1] == pair[1].split("/")[1]}  # others load by themselves
    if found - expected or within - found:
        raise Differs(f"share memory after a restore: {sorted(found - expected)}; no longer: {sorted(within - found)}")
    if wrong := changed_together(training) - expected:
        raise Differs(f"a write to one changes the other after a restore: {sorted(wrong)}")
    _expect_same("state after every tensor was written to", compared(state_of(training)), compared(plain.states[step]))
    for name, size in sizes(training).items():
        if size > plain.sizes[step][name] + SLACK_BYTES:
            raise Differs(f"torch.save of {name} after a restore: {size} bytes instead of {plain.sizes[step][name]}")


NAMED: Mapping[str, str] = {
    "model": "'model'",
    "shape": "of shape",
    "dtype": "torch.float",
    "optimizer": "optimizer'",
    "groups": "parameter groups",
    "missing": "missing",
    "batch": "batch",
}
"""What the second process builds otherwise, and a part of the refusal that says so."""

REFUSALS: Mapping[str, str] = {
    "to have a state": "an attached object without a state",
    "expected dicts, lists, numbers": "a value that no snapshot can hold",
}
"""Words of a refusal, and what it refuses. Any other refusal is a difference."""


def refusal_of(error: ShadeError) -> str:
    """Returns what was refused; raises `Differs` for a refusal that nothing is known of."""
    for words, name in REFUSALS.items():
        if words in str(error):
            return name
    raise Differs(f"refused: {type(error).__name__}: {error}")


@contextlib.contextmanager
def _place() -> Iterator[Path]:
    """A folder in memory, for storage that is as fast as it can be."""
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="shade-differential-", dir=parent) as folder:
        yield Path(folder)


@contextlib.contextmanager
def _copying_late() -> Iterator[None]:
    """What is copied in the background is copied after the training has gone on."""
    finish = Copying.finish

    def late(self: Copying, helper: Any = None) -> None:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(LATE_SECONDS)
        finish(self, helper)

    with patch.object(Copying, "finish", late):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """One thread, and no warnings: scripts make many on purpose."""
    logger, num_threads = logging.getLogger("shade.checkpoint"), torch.get_num_threads()
    level, grad = logger.level, torch.is_grad_enabled()
    logger.setLevel(logging.CRITICAL + 1)
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        torch.set_num_threads(num_threads)
        torch.set_grad_enabled(grad)


PLANE = Plane("checkpoint", SCRIPTS, play, FAULTS, {"Script": Script})
