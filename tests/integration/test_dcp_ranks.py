"""Sharded jobs of real processes: FSDP2 and Adam on gloo ranks, saved through our writer, loaded by more or fewer."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shade.checkpoint._tiers.run_lock import ENDED, spread_keys
from shade.checkpoint.dcp import ShadeReader
from shade.cli import main
from shade.store import open_store

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "support" / "programs" / "dcp_rank.py"
PATIENCE_SECONDS = 200.0


def run(folder: Path, world_size: int, verb: str, store: str | None = None) -> list[int]:
    """Runs all ranks of a job to their end; their exit codes."""
    (folder / f"meeting-{verb}-{world_size}").unlink(missing_ok=True)
    words = [str(folder), "{rank}", str(world_size), verb, *([store] if store else [])]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}
    ranks = []
    for rank in range(world_size):
        with (folder / f"{verb}-{world_size}-{rank}.log").open("w") as log:
            command = [sys.executable, str(PROGRAM), *(word.format(rank=rank) for word in words)]
            ranks.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
    try:
        return [rank.wait(PATIENCE_SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()


def told(folder: Path) -> str:
    """What the ranks said: for a failure's message."""
    return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in sorted(folder.glob("*.log")))


def assert_same(one: Any, other: Any, path: str = "") -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    else:
        assert one == other, path


def state(folder: Path, name: str) -> Any:
    return torch.load(folder / name, weights_only=True)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_ranks_one_rank_two_ranks(tmp_path: Path) -> None:
    for world_size, verb in ((2, "save"), (1, "load"), (2, "load")):
        assert run(tmp_path, world_size, verb) == [0] * world_size, told(tmp_path)
    assert_same(state(tmp_path, "saved.pt"), state(tmp_path, "loaded-3.pt"))
    assert_same(state(tmp_path, "saved.pt"), state(tmp_path, "loaded-13.pt"))
    places = ["--persist-to", str(tmp_path / "volume")]
    assert main(["checkpoint", "export", "23", "--to", str(tmp_path / "model.pt"), "--format", "torch", *places]) == 0
    assert_same(state(tmp_path, "saved.pt")["model"], state(tmp_path, "model.pt")["model"])


@pytest.mark.slow
def test_every_kind_of_tensor_comes_back_on_other_ranks_as_dcp_loads_it(tmp_path: Path) -> None:
    for world_size, verb in ((2, "kinds"), (1, "other_kinds"), (3, "other_kinds")):
        assert run(tmp_path, world_size, verb) == [0] * world_size, told(tmp_path)


@pytest.mark.slow
def test_behind_the_training_by_thread_and_by_process(tmp_path: Path) -> None:
    assert run(tmp_path, 2, "stage") == [0, 0], told(tmp_path)
    assert run(tmp_path, 2, "load") == [0, 0], told(tmp_path)
    assert_same(state(tmp_path, "saved.pt"), state(tmp_path, "loaded-2.pt"))


@pytest.mark.slow
def test_a_rank_that_dies_before_the_end_leaves_the_step_before(tmp_path: Path) -> None:
    assert run(tmp_path, 2, "crash") == [7, 9], told(tmp_path)
    assert list((tmp_path / "volume").rglob("step-0000000004/rank-1.json")), "it had written its part"
    with ShadeReader(persist_to=str(tmp_path / "volume"), run="job") as reader:
        assert reader.steps() == [3]
    assert run(tmp_path, 2, "load") == [0, 0], told(tmp_path)
    assert_same(state(tmp_path, "saved.pt"), state(tmp_path, "loaded-3.pt"))


@pytest.mark.slow
def test_a_torn_copy_on_one_rank_is_told_to_all(tmp_path: Path) -> None:
    assert run(tmp_path, 2, "torn") == [0, 0], told(tmp_path)
    for rank in range(2):
        assert "0.weight" in (tmp_path / f"told-{rank}").read_text()
    with ShadeReader(persist_to=str(tmp_path / "volume"), run="job") as reader:
        assert reader.steps() == []


@pytest.mark.slow
def test_memory_then_storage_and_each_mends_the_other(tmp_path: Path, get_place: Callable[[str], Any]) -> None:
    url = get_place("unix").url
    assert run(tmp_path, 2, "save", url) == [0, 0], told(tmp_path)
    for path in (tmp_path / "volume").rglob("rank-*.safetensors"):
        content = bytearray(path.read_bytes())
        content[-5] ^= 4
        path.write_bytes(content)
    assert run(tmp_path, 1, "load", url) == [0], told(tmp_path)
    assert_same(state(tmp_path, "saved.pt"), state(tmp_path, "loaded-3.pt"))
    with open_store(url) as store:
        deadline = time.monotonic() + 30
        while not any(store.get_many(spread_keys("job", ENDED))):
            assert time.monotonic() < deadline, "the run has not said that it has ended"
            time.sleep(0.05)


PLAIN = """
import sys
sys.modules["shade"] = None
import torch, safetensors.torch
import torch.distributed.checkpoint as dcp
from pathlib import Path
folder, (step,) = Path(sys.argv[1]), Path(sys.argv[1], "volume").glob("job/step-*")
files = sorted(step.glob("rank-*.safetensors"))
assert len(files) == 2, files
found = {}
for file in files:
    held = safetensors.torch.load_file(file)
    assert not found.keys() & held.keys()
    found |= held
model = torch.load(folder / "model.pt", weights_only=True)
# with several ranks, buffers are each rank's own, and have its name
expected = {name if name in found else name + "@rank0": tensor for name, tensor in model.items()}
assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
loaded = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(str(step)), no_dist=True)
assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
whole = {name: torch.zeros_like(tensor) for name, tensor in found.items()}
dcp.load(whole, storage_reader=dcp.HuggingFaceStorageReader(str(step)), no_dist=True)
assert all(torch.equal(whole[name], tensor) for name, tensor in found.items())
try:
    import shade
except ImportError:
    print("without us", len(found))
"""


@pytest.mark.multiprocess
def test_what_checkpointer_saved_is_read_without_this_package(tmp_path: Path) -> None:
    assert run(tmp_path, 2, "checkpointer") == [0, 0], told(tmp_path)
    made = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PLAIN, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith("without us")
