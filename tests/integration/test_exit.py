"""A script that closes nothing ends as plain PyTorch's would, on every rank, and leaves nothing; its children, too.

It forks and spawns while everything of ours is alive that holds a lock, a socket or a thread.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from shade.checkpoint import load_weights
from shade.checkpoint._buffer.shared_memory_folder import own_folder
from tests.support import exits
from tests.support.data_plane import make_pictures
from tests.support.launching import make_images
from tests.support.shards import make_items, write_shards
from tests.support.web_server import serving

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
    "LocalUpdates": """
from shade.gradient import LocalUpdates
model = torch.nn.Linear(400, 64)
outer = LocalUpdates(model, every=2, delay=1)
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


@pytest.mark.parametrize(
    "end", ["dropped", "raised", *(pytest.param(each, marks=pytest.mark.slow) for each in ("held", "forked"))]
)
@pytest.mark.parametrize("width", [8, pytest.param(700, marks=pytest.mark.slow)])
def test_what_a_script_saves_in_its_last_line_is_in_storage(end: str, width: int, tmp_path: Path) -> None:
    run = f"exit-{tmp_path.name}"
    script = [sys.executable, "-W", "ignore", "-c", LAST_LINE + ENDS[end], str(tmp_path), str(width), run]
    done = subprocess.run(script, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode == 0) == (end != "raised"), done.stderr
    assert "after the save" in done.stderr or not done.stderr
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])
    assert load_weights(model, persist_to=tmp_path, run=run).step == 1
    if end != "dropped":  # which may have been collected before
        assert own_folder(run).exists() == (end == "raised")
    shutil.rmtree(own_folder(run), ignore_errors=True)


@pytest.mark.parametrize(
    "sampler", [pytest.param(name, marks=[pytest.mark.slow] if name != "ShadeSampler" else []) for name in LOOP]
)
def test_a_loop_on_two_ranks_that_closes_nothing(sampler: str, tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(f"{PREPARED}{LOOP[sampler]}print('trained', flush=True)\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(torchrun, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained") == 2


COMPUTING = """
from shade.gradient._comm.sparse_all_reduce import SparseAllReduce
from shade.gradient._engine.comm_hook import SparseState
def longer(method):
    def run(*arguments):
        result = method(*arguments)
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            torch.ones(100).add(1)
        return result
    return run
SparseAllReduce.exchange, SparseState._process = longer(SparseAllReduce.exchange), longer(SparseState._process)
"""


@pytest.mark.parametrize(
    "loop", ["GradientEngine", "SparseState", pytest.param("LocalUpdates", marks=pytest.mark.slow)]
)
def test_a_script_ends_while_its_thread_computes(loop: str) -> None:
    """Before Python 3.14 a thread that takes the GIL again inside torch is unwound by force: the process aborts."""
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    script = [sys.executable, "-c", PREPARED + COMPUTING + LOOP[loop]]
    done = subprocess.run(script, env=os.environ | rank, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


ALIVE = """
import gc, multiprocessing, os, signal, sys, time
import torch
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import Compose, RandomResizedCrop, ToTensor
from shade import Checkpointer, ShadeDataset, ShadeLoader, ShadeSampler, Shards

def nothing():
    gc.collect()

def epoch_of(dataset, sampler, number, **settings):
    sampler.set_epoch(number)
    count = 0
    for *_, index in DataLoader(dataset, batch_size=20, sampler=sampler, collate_fn=columns, **settings):
        sampler.report(index, torch.ones(len(index)))
        count += len(index)
    assert count == 600, count

def columns(batch):
    return [torch.tensor([sample[-1] for sample in batch])]

def ended(child):
    child.join(60)
    assert child.exitcode == 0, (child, child.exitcode)

def main(url, folder, methods, ending):
    shards = ShadeDataset(Shards(url, ["bin", "cls"], index=folder + "/index"), "local://")
    sampler = ShadeSampler(shards, batch_size=20, mode="uniform", shuffle_window=200)
    pictures = ShadeDataset(ImageFolder(folder + "/pictures"), "local://")
    pictures.transform = Compose([RandomResizedCrop(8), ToTensor()])
    other = ShadeSampler(pictures, batch_size=4, mode="uniform")
    loader = ShadeLoader(pictures, batch_size=4, sampler=other, num_workers=2)
    assert loader.in_threads
    batches = iter(loader)
    model = torch.nn.Linear(64, 64)
    checkpointer = Checkpointer(persist_to=folder + "/snapshots", run="exit", every=1)
    checkpointer.attach(model=model, sampler=sampler)
    checkpointer.restore_latest()
    epoch_of(shards, sampler, 0)
    checkpointer.step()
    next(batches)
    for number, method in enumerate(methods, 1):
        context = multiprocessing.get_context(method)
        child = context.Process(target=nothing)
        child.start()
        next(batches)
        ended(child)
        epoch_of(shards, sampler, number, num_workers=1, multiprocessing_context=method)
        checkpointer.step()
    child = os.fork()
    if child == 0:
        del batches, loader, sampler, other  # as the end of a function does
        gc.collect()
        sys.exit(0)  # not os._exit: what was registered for the end runs in the child, too
    until = time.monotonic() + 60
    while (status := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
        time.sleep(0.01)
    assert status == (child, 0), status
    next(batches)
    print("done", flush=True)
    if ending == "raise":
        raise ValueError("of the script's own")
    if ending == "exit":
        sys.exit(3)
    if ending in ("SIGINT", "SIGTERM", "SIGKILL"):
        os.kill(os.getpid(), getattr(signal, ending))
        time.sleep(60)

if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3].split(","), sys.argv[4])
"""
STATUS = {"end": 0, "raise": 1, "exit": 3, "SIGINT": -signal.SIGINT, "SIGTERM": -signal.SIGTERM, "SIGKILL": -9}


def processes_of(session: int) -> list[str]:
    """The living processes of a session, by what they run."""
    found = []
    for each in Path("/proc").iterdir():
        try:
            state, _, _, of = (each / "stat").read_text().rpartition(")")[2].split()[:4]
            if state != "Z" and int(of) == session:
                found.append((each / "cmdline").read_text().replace("\0", " "))
        except (OSError, ValueError):
            continue
    return found


@pytest.mark.redis
@pytest.mark.parametrize(
    ("ending", "methods"),
    [
        ("end", "fork,forkserver,spawn"),
        *(pytest.param(each, "fork", marks=pytest.mark.slow) for each in ("raise", "exit")),
        *(pytest.param(each, "fork", marks=pytest.mark.slow) for each in ("SIGINT", "SIGTERM", "SIGKILL")),
    ],
)
def test_children_and_the_end_of_a_script_with_all_of_it_alive(ending: str, methods: str, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp", reason="fsspec needs it for http://")
    script, shards = tmp_path / "script.py", tmp_path / "site"
    script.write_text(ALIVE)
    write_shards(shards, "tar", make_items(600), 200)
    make_pictures(tmp_path / "pictures", 120)
    with serving(tmp_path) as server:
        command = [sys.executable, str(script), f"{server.url}/site/{{000..002}}.tar", str(tmp_path), methods, ending]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        before = set(os.listdir("/dev/shm"))
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        ) as child:
            said, errors = child.communicate(timeout=240)
        assert child.returncode == STATUS[ending], errors
        assert said == "done\n", errors
    until = time.monotonic() + 20
    while (left := processes_of(child.pid)) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == []
    if ending not in ("SIGTERM", "SIGKILL"):
        mine = [each for each in set(os.listdir("/dev/shm")) - before if f"-{child.pid}" in each or "window" in each]
        assert mine == []


LAUNCHED = ["-c", "import sys; from shade.cli import main; sys.exit(main())", "run"]
FLAGS = ["--epochs", "2", "--network", "cnn", "--batch_size", "4", "--workers", "1", "--out", "out"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["bench_cifar10", "quickstart"])
def test_a_launched_example_ends_and_leaves_nothing(name: str, ranks: int, tmp_path: Path) -> None:
    script = exits.ROOT / "examples" / f"{name}.py"
    assert not exits.without_closing(script.read_text())[1]  # a session is entered, or there is none
    images = make_images(tmp_path / "train")
    command = [sys.executable, *LAUNCHED, script, images, *FLAGS, "-g", str(ranks)]
    exits.ending_of(command, tmp_path).check()


# ── what other tests find by it ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("true", ""),
        ("echo said; exit 3", "status 3\nsaid"),
        ("kill -KILL $$", "status 137"),
        ("sleep 30 & echo", r"left \['process sleep 30 '\]"),
        ("setsid sleep 30 & echo", r"left \['process sleep 30 '\]"),
        ("mkdir /dev/shm/a; touch /dev/shm/a/b", r"left \['/dev/shm/a/b'\]"),
        ("touch $TMPDIR/a", r"left \['\$TMPDIR/a'\]"),
        ("exec sleep 30", "hung"),
    ],
)
def test_how_a_script_ends_and_what_it_leaves_is_seen(
    command: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exits, "LEAVING_SECONDS", 0.2)
    if complaint == "hung":
        monkeypatch.setattr(exits, "LONGEST_SECONDS", 0.2)
    ended = exits.ending_of(["sh", "-c", command], tmp_path)
    with pytest.raises(AssertionError, match=complaint) if complaint else contextlib.nullcontext():
        ended.check()


def test_a_script_that_closes_nothing_is_made_of_one_that_closes() -> None:
    script = """
with Checkpointer(run="a") as kept, open("x") as file:
    kept.step()
    with torch.no_grad(), GradientEngine(model):
        sampler.close()
for each in (first, second):
    each.close()
file.close(1)
"""
    made, changes = exits.without_closing(script)
    assert made.splitlines() == [
        *("kept = Checkpointer(run='a')", "with open('x') as file:", "    kept.step()", "    GradientEngine(model)"),
        *("    with torch.no_grad():", "        pass", "for each in (first, second):", "    pass", "file.close(1)"),
    ]
    assert [line.partition("(")[0] for line in changes] == [
        "sampler.close",
        "with torch.no_grad",
        "with Checkpointer",
        "each.close",
    ]
    assert exits.without_closing(made) == (made, [])
