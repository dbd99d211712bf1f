"""Crashes a training at every file event of its storage, by a program that is not ours, and judges what comes back.

The program is ckpt-chaos (PyPI): it records what a command does to files, kills a fresh copy at each event, begins it
again and compares. A snapshot that has all the files of its undisturbed twin counts as complete; to resume from an
older one is a failure, as are an error, and other weights at the end. `outside_training` is the command; it adds one
judgement: nothing that was called durable is lost.

ckpt-chaos tears, and takes back what was not synced of, only files that ``open``, ``torch.save`` or safetensors write.
Ours come from ``os.open``; with ``--opens`` the same files come from ``open``. Folders' entries it never takes back, as
`disk` does.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from shade.checkpoint._buffer.shared_memory_folder import own_folder
from shade.errors import ConfigError
from tests.simulation.torture.outside_training import run_of
from tests.simulation.torture.warm_start import ADDRESS

ROOT: Final = Path(__file__).parents[3]
TRAINING: Final = [sys.executable, "-S", "-m", "tests.simulation.torture.warm_start"]
ELSEWHERE: Final = ("--elsewhere",)


@dataclass(frozen=True)
class Scene:
    """One way in which trainings end, and what they find afterwards."""

    name: str
    modes: str = "before"
    """ckpt-chaos's: killed ``before`` an event, with its file ``torn``, with all ``unsynced`` files taken back; SIGTERM
    (``term``)."""
    options: tuple[str, ...] = ()
    """Of the training."""
    resumes: tuple[str, ...] = ELSEWHERE
    """Of the training that is begun again, too."""
    keeps_all: bool = True
    """ckpt-chaos tells complete snapshots by those that the undisturbed run has left."""
    ranks: int = 1
    victim: int = 0
    """The rank that is killed; the other has three seconds more."""


SCENES: Final = (
    Scene("the process is killed", resumes=()),
    Scene("the machine is lost"),
    Scene("the machine is lost, one snapshot is kept", options=("--keep", "last=1"), keeps_all=False),
    Scene("files are torn, what is not synced is gone", "torn,unsynced", options=("--opens",)),
    Scene("SIGTERM, three seconds before the machine is lost", "term", options=("--watches",)),
    Scene("two ranks with FSDP2, rank 0's machine is lost", ranks=2),
    Scene("two ranks with FSDP2, rank 1's machine is lost", ranks=2, victim=1),
)


@dataclass
class Found:
    """What came of a scene."""

    scene: Scene
    num_points: int = 0
    """Crash points tried."""
    num_struck: int = 0
    """Those at which a training ended."""
    verdicts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        verdicts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(self.verdicts.items()))
        return f"{self.scene.name}: {self.num_points} crash points, {self.num_struck} struck: {verdicts}"


@contextlib.contextmanager
def trainings_server(boot: Path) -> Iterator[dict[str, str]]:
    """Starts what `TRAINING` asks; yields the environment that says where it is."""
    with tempfile.TemporaryDirectory(prefix="shade-outside-") as folder:
        address = Path(folder) / "server"
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), ADDRESS: str(address)}
        command = [sys.executable, "-m", "tests.simulation.torture.outside_training", str(address), str(boot)]
        server = subprocess.Popen(command, env=environment, cwd=ROOT)
        try:
            while not address.exists():
                if server.poll() is not None:
                    raise ConfigError.of("a server of trainings", f"exit code {server.returncode}", "see its output")
                time.sleep(0.05)
            yield environment
        finally:
            server.kill()
            server.wait()


def play(scene: Scene, folder: Path, *, points: int, jobs: int = 1, options: Iterable[str] = ()) -> Found:
    """Lets ckpt-chaos try a scene.

    Args:
        scene: One of `SCENES`.
        folder: A new one, for what the trainings write.
        points: Crash points at most, over all its modes.
        jobs: How many are tried at a time.
        options: Of the training, beside the scene's.

    Returns:
        Its verdicts.

    Raises:
        ConfigError: ckpt-chaos is not installed, or the undisturbed training failed.
    """
    try:
        from ckpt_chaos.byo import BOOT
        from ckpt_chaos.runner import rejudge
    except ImportError:
        raise ConfigError.of("ckpt-chaos", "none", "pip install ckpt-chaos") from None
    training = [*TRAINING, "{out}", *scene.options, *options]
    wanted: dict[str, Any] = {
        "--work": folder,
        "--modes": scene.modes,
        "--max-points": points,
        "--jobs": jobs,
        "--timeout": 120,
        "--grace": 3,
        "--ranks": scene.ranks,
        "--crash-rank": scene.victim,
        "--result-file": "{out}/final.pt",
        "--step-regex": r"resumed from step (\d+)",
        "--resume-cmd": shlex.join([*training, *scene.resumes]),
    }
    if scene.keeps_all:
        wanted["--checkpoint-glob"] = "{out}/checkpoints/*/step-*"
    command = [sys.executable, "-m", "ckpt_chaos", "run", "--ckpt-ignore-size"]
    command += [str(each) for pair in wanted.items() for each in pair]
    found = Found(scene)
    with trainings_server(BOOT / "sitecustomize.py") as environment:
        # Without it 0.1.8 kills no rank but 0: --crash-rank says only which rank is told when to end.
        environment["CKPT_CHAOS_CRASH_RANK"] = str(scene.victim)
        ran = subprocess.run(
            [*command, "--", *training], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
        )
    try:
        for row in rejudge(folder):
            is_undisturbed = row.label.startswith("no crash")
            found.num_points += not is_undisturbed
            found.num_struck += row.crashed and not is_undisturbed
            found.verdicts[row.verdict] += not is_undisturbed
            if row.verdict != "PASS":
                found.failures.append(f"{scene.name}: {row.label}: {row.verdict}: {row.outcome}")
    finally:
        for out in folder.glob("*/out"):
            shutil.rmtree(own_folder(run_of(out)), ignore_errors=True)
    if not found.num_struck:
        raise ConfigError.of("a training that can be crashed", ran.stdout[-2000:] + ran.stderr[-2000:], "see there")
    return found


def play_all(
    folder: Path, *, points: int, jobs: int, only: str = "", told: Callable[[Found], None] = lambda found: None
) -> list[Found]:
    """Plays all scenes, or those whose name has a word.

    Args:
        folder: A new one.
        points: Crash points of each mode of a scene at most.
        jobs: How many are tried at a time.
        only: The word.
        told: Called after each.

    Returns:
        What came of each.
    """
    everything = []
    for number, scene in enumerate(SCENES):
        if only in scene.name:
            found = play(scene, folder / str(number), points=points * len(scene.modes.split(",")), jobs=jobs)
            told(found)
            everything.append(found)
    return everything
