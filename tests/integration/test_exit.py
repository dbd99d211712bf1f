"""A script that closes nothing ends with status 0, on every rank."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shade.checkpoint import load_weights
from shade.checkpoint._buffer.shared_memory_folder import own_folder

pytestmark = pytest.mark.multiprocess

LOOP = {
    "ShadeSampler": """
from shade import ShadeSampler
sampler = ShadeSampler(TensorDataset(torch.arange(64.0)), batch_size=8)
for batch in BatchSampler(sampler, 8, drop_last=False):
    wait()
    sampler.report(torch.tensor(batch), torch.ones(len(batch)))
""",
    "MixtureSampler": """
from shade.data import MixtureSampler, PackedDataset
data = PackedDataset({"a": [torch.arange(8)] * 12}, length=8)
sampler = MixtureSampler(data, weights={"a": 1.0}, batch_size=2, round_sequences=16)
for batch in BatchSampler(sampler, 2, drop_last=False):
    wait()
    sampler.report(torch.zeros(2, 8, dtype=torch.int64), torch.ones(2, 8))
""",
    "GradientEngine": """
from shade.gradient import GradientEngine
from shade.gradient.optim import SparseSGD
model = torch.nn.Linear(4000, 64)
engine = GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), staleness=1)
for _ in range(4):
    wait()
    model(torch.ones(2, 4000)).sum().backward()
    engine.step()
""",
    "SparseState": """
from shade.gradient import SparseState, sparse_hook
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4000, 64))
model.register_comm_hook(SparseState(model), sparse_hook)
for _ in range(4):
    wait()
    model(torch.ones(2, 4000)).sum().backward()
""",
    "LocalSGD": """
from shade.gradient import LocalSGD
model = torch.nn.Linear(400, 64)
outer = LocalSGD(model, every=1)
for _ in range(4):
    wait()
    outer.step()
""",
}
PREPARED = """
import time, torch, torch.distributed as dist
from torch.utils.data import BatchSampler, TensorDataset
dist.init_process_group("gloo")
def wait():  # rank 0 is at its end long before, so its thread is inside a collective
    time.sleep(0.3 * dist.get_rank())
"""


LAST_LINE = """
import sys, torch
from shade import Checkpointer
def train(folder, width):
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])
    checkpointer = Checkpointer(persist_to=folder, run=sys.argv[3], every="never")
    checkpointer.attach(model=model)
    checkpointer.step()
    checkpointer.save()
    return checkpointer
"""
ENDS = {
    "held": "kept = train(sys.argv[1], int(sys.argv[2]))",
    "dropped": "train(sys.argv[1], int(sys.argv[2]))",
    "raised": "kept = train(sys.argv[1], int(sys.argv[2]))\nraise RuntimeError('after the save')",
    "forked": "kept = train(sys.argv[1], int(sys.argv[2]))\nfrom multiprocessing import get_context\n"
    "child = get_context('fork').Process(target=int)\nchild.start()\nchild.join()\nassert child.exitcode == 0",
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("width", [8, 700])
def test_what_a_script_saves_in_its_last_line_is_in_storage(end: str, width: int, tmp_path: Path) -> None:
    run = f"exit-{tmp_path.name}"
    script = [sys.executable, "-W", "ignore", "-c", LAST_LINE + ENDS[end], str(tmp_path), str(width), run]
    done = subprocess.run(script, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode == 0) == (end != "raised"), done.stderr
    assert "after the save" in done.stderr or not done.stderr
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])
    assert load_weights(model, persist_to=tmp_path, run=run).step == 1
    assert own_folder(run).exists() == (end in ("raised", "dropped"))
    shutil.rmtree(own_folder(run), ignore_errors=True)


@pytest.mark.parametrize(
    "sampler", [pytest.param(name, marks=[pytest.mark.slow] if "Sampler" not in name else []) for name in LOOP]
)
def test_a_loop_on_two_ranks_that_closes_nothing(sampler: str, tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(f"{PREPARED}{LOOP[sampler]}print('trained', flush=True)\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(torchrun, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2
