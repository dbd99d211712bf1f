"""What the tests of the launcher share: a tiny data set, a real launcher, and the processes of a run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image

from shade.checkpoint._buffer.shared_memory_folder import own_folder, own_records
from shade.checkpoint._format.manifest import Commit
from shade.checkpoint._tiers.storage import StorageTier
from shade.config import RunConfig
from shade.errors import ConfigError
from shade.launch.preflight import memory_folder
from shade.storage import open_volume

ROOT = Path(__file__).resolve().parents[2]
RUNSHADE = ROOT / "benchmarks" / "runshade.py"
STREAM = Path(__file__).parent / "programs" / "stream.py"
PATIENCE_SECONDS = 120.0


def make_images(root: Path, num_classes: int = 4, per_class: int = 12, size: int = 8) -> Path:
    """An image folder of small random images, each class with a colour of its own."""
    generator = np.random.default_rng(0)
    for number in range(num_classes):
        folder = root / f"class{number}"
        folder.mkdir(parents=True)
        for image in range(per_class):
            pixels = generator.integers(0, 160, (size, size, 3)) + np.array([number * 30, 90 - number * 30, 20])
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{image:03}.png")
    return root


def truncate(path: Path) -> Path:
    """Cuts an image in two."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    return path


def environment(**more: str) -> dict[str, str]:
    """Of a launcher: this package, one thread a rank, no cache named by accident."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SHADE_")}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def start(*words: str | Path, cwd: Path, **more: str) -> subprocess.Popen[str]:
    """A launcher in the background, its output piped."""
    return subprocess.Popen(
        [sys.executable, str(RUNSHADE), *map(str, words)],
        cwd=cwd,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*words: str | Path, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """A launcher from start to end; one that does not end is ended, and what it has said is in the error."""
    process = start(*words, cwd=cwd, **more)
    try:
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # which ends its ranks, too
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        raise AssertionError(f"not ended within {PATIENCE_SECONDS} s: {process.args}\n{out}\n{err}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait_for(what: Callable[[], Any], seconds: float = PATIENCE_SECONDS) -> Any:
    """Polls until something is true, and returns it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s: {what}")


def rows(out: Path, *, end: bool = False) -> list[dict[str, Any]]:
    """metrics.jsonl: the rows of epochs, or those of the run's end."""
    told = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in told if (row["kind"] == "end") == end]


def stream_of(log: Path, ranks: int) -> dict[int, list[int]]:
    """Step → the samples of all ranks, in rank order; of a step taken twice the last time counts."""
    steps: dict[int, list[int]] = {}
    taken = []
    for rank in range(ranks):
        lines = (log / f"rank{rank}.jsonl").read_text().splitlines()
        taken.append({row["step"]: row["ids"] for row in map(json.loads, lines)})
    for step in sorted(set.union(*(set(each) for each in taken))):
        steps[step] = [index for each in taken for index in each.get(step, [])]
    return steps


def snapshots(out: Path) -> list[Commit]:
    """What a run can be resumed from, newest first: in shared memory and in the run directory."""
    config = RunConfig.load(out / "run.json")
    assert config.storage is not None
    with open_volume(config.storage) as volume:
        memory = memory_folder(config, None)
        near = {} if memory is None else own_records(memory, config.run)
        held = [*near.values(), *StorageTier(volume, config.run).held().values()]
    return sorted(held, key=lambda record: record.sequence, reverse=True)


def saved_step(out: Path) -> int:
    """Steps in the newest snapshot; 0 without one."""
    return max((record.step for record in snapshots(out)[:1]), default=0)


def forget(out: Path) -> None:
    """Takes away what a killed run left in shared memory for a restart that will not come."""
    with contextlib.suppress(ConfigError):
        shutil.rmtree(own_folder(RunConfig.load(out / "run.json").run), ignore_errors=True)


class Family:
    """Every process under a launcher, remembered while it still has one."""

    def __init__(self, launcher: subprocess.Popen[str]) -> None:
        self.members: list[psutil.Process] = psutil.Process(launcher.pid).children(recursive=True)

    def named(self, word: str) -> list[psutil.Process]:
        """Those with a word in their command line."""
        return [member for member in self.members if word in " ".join(member.cmdline())]

    def running(self) -> list[psutil.Process]:
        """Those that still do, or could do, anything."""
        return [m for m in self.members if m.is_running() and m.status() != psutil.STATUS_ZOMBIE]


def same_state(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
