"""The generator of combined scripts: a training in company is as in plain PyTorch, or it is refused by name.

A script trains in one or two processes that may be ended at a step, and begins again. Afterwards torch alone trains
the same batches: samples, weights, exit statuses and what is left behind are compared.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import shutil
import signal
import tempfile
import uuid
from collections import Counter
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from shade.checkpoint import load_weights
from shade.checkpoint._buffer.shared_memory_folder import flusher_log, own_folder
from tests.differential.company_data import num_samples, write, write_for
from tests.differential.company_faults import KINDS, PLANTED
from tests.differential.company_models import make_model, weights_of
from tests.differential.company_processes import Nursery
from tests.differential.company_script import BATCH, Script, scripts
from tests.differential.company_training import Life, steps_of, train_plainly
from tests.differential.data_playing import server_url
from tests.differential.harness import Outcome, Plane, Verdict
from tests.support.web_server import WebServer

# Python ends with 1 after Ctrl-C if a thread compiles text meanwhile, as numba's compiler does.
STATUSES = {"normal": {0}, "exception": {1}, "interrupt": {-signal.SIGINT, 1}, "kill": {-signal.SIGKILL}}


class Differs(Exception):
    """What a script came to is neither plain PyTorch's nor a refusal."""


# ── what the processes do ───────────────────────────────────────────────────────────────────────────────────────────


def live(folder: Path, rank: int, *, script: str, life: int, run: str, cache: str | None, fault: str) -> None:
    """One life of a script; it ends as a script ends."""
    torch.set_num_threads(1)
    # Held, because a context that is collected ends.
    planted = PLANTED[fault]() if fault else contextlib.nullcontext()
    planted.__enter__()
    Life(eval(script, {"Script": Script}), folder, life, rank, run, cache).train()


# ── playing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def nursery() -> Nursery:
    """The process that all scripts of this process are forked from."""
    made = Nursery()
    atexit.register(made.close)
    return made


class Busy(dict[str, int]):
    """Failures of a server that is busy with one of its files, three times of five."""

    num_asked = 0

    def get(self, path: str, default: Any = 0) -> Any:
        if not path.endswith("/007.png"):
            return 0
        self.num_asked += 1
        return int(self.num_asked % 5 < 3)


@functools.cache
def root() -> Path:
    """Where the data of all kinds lie, and a folder for each script."""
    made = Path(tempfile.mkdtemp(prefix="company-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    (made / "data").mkdir()
    write(made / "data")
    for name, refuses in (("server", False), ("busy-server", True)):
        server = WebServer(made / "data" / "images")
        server.failures = Busy() if refuses else {}
        Thread(target=server.serve_forever, daemon=True).start()
        (made / "data" / name).write_text(server.url)
    return made


def memory_left(run: str) -> list[str]:
    """Returns the files that a run has in shared memory, with its flusher's log."""
    paths = (*own_folder(run).rglob("*"), flusher_log(run))
    return sorted(str(path) for path in paths if path.is_file())


class Play:
    """One script and what came of it."""

    fault = ""
    """A planted fault, by name."""

    def __init__(self, script: Script, run: str = "") -> None:
        self.script, self.data = script, root() / "data"
        self.folder = root() / uuid.uuid4().hex[:8]
        self.folder.mkdir()
        self.run = run or self.folder.name
        write_for(script, self.data)

    def live(self, script: Script, life: int) -> list[int | None]:
        """Runs one life on all ranks; what it leaves behind is a difference."""
        cache = {"none": None, "memory": "memory://", "local": "local://"}.get(script.cache, server_url())
        ended = nursery().run(
            script.ranks, self.folder, script=repr(script), life=life, run=self.run, cache=cache, fault=self.fault
        )
        statuses: list[int | None] = ended["statuses"]
        if None in statuses:
            raise Differs(f"life {life} hangs: statuses {statuses}\n{self.log(life)}")
        if ended["left"] and -signal.SIGKILL not in statuses:
            raise Differs(f"life {life} has left {ended['left']}; statuses {statuses}")
        return statuses

    def log(self, life: int) -> str:
        """The ends of what the ranks have written."""
        ends = []
        for rank in range(self.script.ranks):
            with contextlib.suppress(OSError):
                ends.append(f"[rank {rank}] {(self.folder / f'log-{life}-{rank}').read_text()[-3000:]}")
        return "\n".join(ends)

    def refusal(self, life: int) -> str:
        """The name of the error that every rank ended with, if each is one of shade's own; else an empty text. Where
        one rank alone saves, the other may find that it is gone."""
        names = []
        for rank in range(self.script.ranks):
            lines = (self.folder / f"log-{life}-{rank}").read_text().replace(f"[rank{rank}]: ", "").splitlines()
            named = [line.split(":")[0] for line in lines if line.startswith("shade.errors.")]
            names.append(named[-1] if named else "")
        is_named = any(names) if self.script.alone else all(names)
        return max(names) if is_named else ""

    def play(self) -> Verdict:
        """Runs the script to its end, and compares."""
        script = self.script
        if script.neighbour:
            other = Play(Script(saves="overlap", ending="kill", step=4), self.run)
            other.live(other.script, 0)
        statuses = self.live(script, 0)
        is_refused = set(statuses) == {1} and bool(self.refusal(0))
        if script.refusal:
            if is_refused and (script.refusal == "later" or not self.num_steps(0)):
                return Verdict(Outcome.REFUSED, self.refusal(0))
            raise Differs(f"it is not refused ({script.refusal}): statuses {statuses}\n{self.log(0)}")
        expected = STATUSES[script.ending] if script.step <= self.length() else {0}
        if script.may_be_refused and is_refused and expected != {1}:
            return Verdict(Outcome.REFUSED, self.refusal(0))
        if not set(statuses) <= expected:
            raise Differs(f"statuses {statuses}, and not {expected}\n{self.log(0)}")
        lives = 1
        if expected != {0} and script.saves:
            statuses, lives = self.live(script, 1), 2
            if script.may_be_refused and set(statuses) == {1} and self.refusal(1):
                return Verdict(Outcome.REFUSED, self.refusal(1))
            if set(statuses) != {0}:
                raise Differs(f"statuses of the second life: {statuses}\n{self.log(1)}")
        self.compare(lives, ended=expected == {0} or lives == 2)
        return Verdict(Outcome.SAME)

    def length(self) -> int:
        """Steps of a whole training."""
        return self.script.epochs * -(-num_samples(self.script) // self.script.ranks // BATCH)

    def num_steps(self, life: int) -> int:
        """Steps that a life has taken, on rank 0."""
        return sum("indices" in line for line in steps_of(self.folder, life, 0))

    def compare(self, lives: int, *, ended: bool) -> None:
        """Compares with plain PyTorch; raises `Differs`."""
        script, ranks = self.script, range(self.script.ranks)
        steps: list[list[dict[str, Any]]] = []
        after: list[list[dict[str, Any]]] = []
        for life in range(lives):
            said = [steps_of(self.folder, life, rank) for rank in ranks]
            if script.other_model and life == 1:
                return self.compare_refused(said)
            begins = self.check_begin(life, said)
            taken = [[line for line in lines if "indices" in line] for lines in said]
            seen = [[line["after"] for line in lines if "after" in line] for lines in said]
            if len({len(lines) for lines in taken + seen}) != 1:
                raise Differs(f"ranks take {[len(lines) for lines in taken]} steps, and see {[*map(len, seen)]}")
            steps = steps[:begins] + list(zip(*taken, strict=True))  # type: ignore[arg-type]
            after = after[:begins] + list(zip(*seen, strict=True))  # type: ignore[arg-type]
        plain = train_plainly(script, self.data, steps)
        for number, (mine, theirs) in enumerate(zip(steps, plain, strict=True)):
            if [line["read"] for line in mine] != theirs["read"]:
                raise Differs(f"step {number}: samples {[line['indices'] for line in mine]} are not the data set's")
        for number, (mine, theirs) in enumerate(zip(after, plain, strict=True)):
            for rank, weights in enumerate(mine):
                if not self.are_alike(weights, theirs) or weights["weights"] != mine[0]["weights"]:
                    raise Differs(f"after step {number} rank {rank} has other weights than plain PyTorch")
        for epoch in range(script.epochs if ended else 0):
            lines = [line for step in steps for line in step if line["epoch"] == epoch]
            counted = Counter(index for line in lines for index in line["indices"])
            if counted != Counter(range(num_samples(script))):
                raise Differs(f"epoch {epoch} has the samples {sorted(counted.elements())}")
        if ended:
            for rank in ranks:
                if not self.are_alike(steps_of(self.folder, lives - 1, rank)[-1], plain[-1]):
                    raise Differs(f"rank {rank} ends with other weights than plain PyTorch")
            self.compare_durable(plain)

    def check_begin(self, life: int, said: list[list[dict[str, Any]]]) -> int:
        """Returns the step after which a life begins, if it can be that one."""
        script, begins = self.script, next(line["begins"] for line in said[0] if "begins" in line)
        if life == 0 and begins != 0:
            raise Differs(f"a new training begins after step {begins}")
        is_safe = script.ending != "kill" or any("safe" in line for line in steps_of(self.folder, 0, 0))
        durable = script.step // script.every * script.every if is_safe else 0
        if life == 1 and not durable <= begins <= script.step:
            raise Differs(f"ended after step {script.step}, restored step {begins}\n{self.log(0)}")
        return int(begins)

    def compare_refused(self, said: list[list[dict[str, Any]]]) -> None:
        """A model that refuses what was saved stays as it was."""
        for rank, lines in enumerate(said):
            if lines != [{"refused": True}]:
                raise Differs(f"rank {rank}: a restore that is refused leaves {lines}\n{self.log(1)}")

    def compare_durable(self, plain: list[dict[str, Any]]) -> None:
        """What a script saved last is in its storage when it has ended, closed or not."""
        script = self.script
        # A ``with`` block saves the last steps, too.
        step = len(plain) if script.closes else len(plain) // script.every * script.every
        if script.saves in ("", "framework") or not script.persists or not step:
            return
        model = make_model(script)
        found = load_weights(model, persist_to=self.folder / "storage", run=self.run)
        if found.step != step or not self.are_alike(weights_of(model), plain[step - 1]):
            raise Differs(f"storage has step {found.step}, and not step {step} as plain PyTorch\n{self.log(0)}")

    def are_alike(self, mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
        """Whether weights are the same; the engine's own optimizer rounds a product otherwise than torch's, and rows of
        a sparse gradient have sums in no order."""
        is_rounded = self.script.exchange == "engine" or self.script.model == "sparse"
        close = is_rounded and np.allclose(mine["values"], theirs["values"], 1e-4, 1e-6)
        return bool(close) or mine["weights"] == theirs["weights"]


def play(script: Script) -> Verdict:
    """Runs a script, and what plain PyTorch makes of its batches."""
    played = Play(script)
    try:
        verdict = played.play()
        # What is in memory alone stays, for the next life, and so does what the neighbour has.
        if (
            script.closes
            and script.persists
            and not script.neighbour
            and verdict.outcome is Outcome.SAME
            and (left := memory_left(played.run))
        ):
            raise Differs(f"shared memory keeps {left}")
        return verdict
    except Differs as differs:
        return Verdict(Outcome.DIFFERENT, str(differs))
    finally:
        shutil.rmtree(played.folder, ignore_errors=True)
        shutil.rmtree(own_folder(played.run), ignore_errors=True)


FAULTS = {name: partial(patch.object, Play, "fault", name) for name in PLANTED}
PLANE = Plane("company", scripts(), play, FAULTS, {"Script": Script}, KINDS)
