"""A real run on two ranks: every output, the README's greps, the ledger, and the two ways to look at it afterwards."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from shade.cache.ledger import FIELDS
from shade.cli import main
from shade.policy.trace import Trace
from shade.trajectory import Trajectory
from tests.support.launching import ROOT, environment, make_images, rows, run

pytestmark = pytest.mark.multiprocess

EPOCHS, RANKS, BATCH = 3, 2, 4
ROW_FIELDS = {name for name in FIELDS if not name.endswith("_nanoseconds")} | {
    "kind", "epoch", "rank", "world_size", "num_samples", "busy_seconds", "epoch_seconds", "stall_seconds",
    "step_seconds", "cpus", "capacity_bytes", "resident_bytes", "loss", "train_accuracy", "val_loss", "val_accuracy",
    "learning_rate", "receipt", "time", "wait_p50_seconds", "wait_p99_seconds", "checkpoint", "gradient",
}  # fmt: skip
"""Every counter of the ledger, and what a rank measures besides."""


@dataclass
class Done:
    """A run that is over."""

    here: Path
    out: Path
    told: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The README's way: from a folder, by the launcher's name, with the script's name alone."""
    here = tmp_path_factory.mktemp("run")
    make_images(here / "train", per_class=12)
    make_images(here / "val", per_class=2)
    words = ("--val_paths", here / "val", "--epochs", str(EPOCHS), "--network", "cnn", "--batch_size", str(BATCH))
    more = ("-g", str(RANKS), "--workers", "1", "-wss", "0.4", "--cache_training_data", "--out", "out")
    told = run("bench_cifar10.py", here / "train", *words, *more, cwd=here)
    assert told.returncode == 0, told.stderr + (here / "out" / "output.log").read_text()[-3000:]
    return Done(here, here / "out", told)


def shell(command: str, cwd: Path) -> int:
    return int(subprocess.run(command, shell=True, cwd=cwd, capture_output=True, text=True, check=True).stdout)


@pytest.mark.multiprocess
def test_it_leaves_all_that_it_promises(done: Done) -> None:
    names = {path.name for path in done.out.iterdir()}
    files = {"train.log", "output.log", "metrics.jsonl", "epochs.csv", "report.txt", "report.png", "run.json"}
    folders = {"checkpoints", "losses", "tensorboard"}
    assert names == files | folders | {
        "trace.npz",
        "trail.jsonl",
        "report.html",
        "rank0.prom",
        "rank1.prom",
        "has-snapshots",
    }
    assert (done.out / "report.png").read_bytes().startswith(b"\x89PNG")
    assert list((done.out / "tensorboard").glob("events.out.tfevents.*"))
    assert (done.here / "train.log").resolve() == done.out / "train.log"


def test_tensorboard_has_what_people_look_for_first(done: Done) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(done.out / "tensorboard")).Reload()
    told = rows(done.out)
    for rank in range(RANKS):
        mine = [row for row in told if row["rank"] == rank]
        expected = {
            "hit_ratio": [row["hits"] / row["samples"] for row in mine],
            "origin_reads_per_sample": [row["origin_reads"] / 48 for row in mine],
            "stall_seconds/decode": [row["stall_seconds"]["decode"] for row in mine],
            "step_seconds": [row["step_seconds"] for row in mine],
        }
        for name, values in expected.items():
            assert [e.value for e in events.Scalars(f"rank{rank}/{name}")] == pytest.approx(values, rel=1e-5)


def test_the_losses_of_every_sample_are_kept(done: Done) -> None:
    trajectory = Trajectory.load(done.out / "losses")
    assert (trajectory.epochs, trajectory.num_samples) == (tuple(range(EPOCHS)), 48)
    first = next(trajectory.losses())
    assert np.isfinite(first).all(), "both ranks' losses, of a full epoch"
    told = rows(done.out)
    mean = sum(row["loss"] * row["samples"] for row in told[:RANKS]) / 48
    assert first.mean() == pytest.approx(mean, rel=0.01)
    assert trajectory.samples.targets == tuple(number // 12 for number in range(48))
    assert all(Path(name).is_file() for name in trajectory.samples.names)


def test_it_ends_with_the_report_and_says_where_it_is(done: Done) -> None:
    assert done.told.stdout == (done.out / "report.txt").read_text()
    begun, ended = done.told.stderr.splitlines()
    assert begun.startswith("runshade.py: 48 images in 4 classes, 8×8 pixels; validation: ")
    assert ended == f"runshade.py: report, picture and logs are in {done.out}"


@pytest.mark.multiprocess
def test_the_readmes_greps_count_what_the_ledger_counts(done: Done) -> None:
    told = rows(done.out)
    hits, misses = sum(row["hits"] for row in told), sum(row["misses"] for row in told)
    assert shell("cat train.log | grep hitting | wc -l", done.here) == hits > 0
    assert shell("cat train.log | grep miss | wc -l", done.here) == misses > 0
    assert shell("grep -c hitting train.log", done.here) == hits
    accesses = [line for line in (done.out / "train.log").read_text().splitlines() if not line.startswith("epoch ")]
    assert all(line.split()[0] in ("hitting", "miss") and line.split()[1].isdecimal() for line in accesses)
    assert len(accesses) == sum(row["samples"] for row in told)


def test_there_is_a_row_for_each_epoch_and_rank(done: Done) -> None:
    told = rows(done.out)
    assert [(row["epoch"], row["rank"]) for row in told] == [(e, r) for e in range(EPOCHS) for r in range(RANKS)]
    assert all(set(row) == ROW_FIELDS for row in told)
    assert all(row["world_size"] == RANKS and row["num_samples"] == 48 for row in told)
    assert all(row["hits"] + row["misses"] == row["samples"] for row in told)
    assert told[0]["val_accuracy"] == told[1]["val_accuracy"]


def test_ranks_take_equal_steps(done: Done) -> None:
    for epoch in range(EPOCHS):
        samples = [row["samples"] for row in rows(done.out) if row["epoch"] == epoch]
        steps = [-(-count // BATCH) for count in samples]
        assert len(set(steps)) == 1


def test_the_cache_keeps_to_its_capacity(done: Done) -> None:
    assert all(0 < row["resident_bytes"] <= row["capacity_bytes"] for row in rows(done.out))


def test_the_table_has_a_line_an_epoch(done: Done) -> None:
    with (done.out / "epochs.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [int(line["epoch"]) for line in table] == list(range(EPOCHS))
    assert int(table[0]["hits"]) == sum(row["hits"] for row in rows(done.out)[:RANKS])


def test_the_plan_is_kept(done: Done) -> None:
    plan = json.loads((done.out / "run.json").read_text())
    assert (plan["processes"], plan["batch_size"], plan["working_set_fraction"]) == (RANKS, BATCH, 0.4)


def test_the_trace_is_what_the_run_did(done: Done) -> None:
    trace = Trace.load(done.out / "trace.npz")
    drawn = [row["receipt"]["drawn"] for row in rows(done.out) if row["rank"] == 0]
    assert [len(order_K) for order_K in trace.orders] == drawn
    assert (trace.global_batch, trace.num_samples) == (RANKS * BATCH, 48)
    assert np.array_equal(np.sort(trace.orders[0]), np.arange(48))
    assert trace.score_of(1) is not None
    capacity = rows(done.out)[0]["capacity_bytes"]
    assert abs(capacity - 0.4 * trace.data_set_bytes) < 2, "the sizes are not those the cache counts"


def test_shade_simulate_gives_the_runs_own_hits_back(
    done: Done, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    capacity = rows(done.out)[0]["capacity_bytes"]
    words = ["simulate", str(done.out), "--capacity", f"{capacity}", "--policy", "plan,lru", "--skip-epochs", "0"]
    assert main([*words, "--plot", str(tmp_path / "c.png")]) == 0
    told = capsys.readouterr().out
    hits, samples = (sum(row[name] for row in rows(done.out)) for name in ("hits", "samples"))
    assert re.search(rf"^\| plan +\| {hits / samples:.1%},", told, re.MULTILINE)
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_shade_report_writes_the_same_report_again(done: Done, capsys: pytest.CaptureFixture[str]) -> None:
    before = (done.out / "report.txt").read_text()
    (done.out / "report.txt").unlink()
    assert main(["report", str(done.out)]) == 0
    assert capsys.readouterr().out == before == (done.out / "report.txt").read_text()


@pytest.mark.multiprocess
def test_a_reader_who_leaves_early_is_no_error(done: Done) -> None:
    program = "import sys; from shade.cli import main; sys.exit(main())"
    command = f"{sys.executable} -c '{program}' report {done.out} | head -1"
    told = subprocess.run(command, shell=True, env=environment(), cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stderr == ""


@pytest.mark.multiprocess
@pytest.mark.parametrize(("more", "is_kept"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)])
def test_what_a_step_frees_stays_with_the_rank_unless_the_user_says_otherwise(
    tmp_path: Path, more: dict[str, str], is_kept: bool
) -> None:
    script = tmp_path / "steps.py"
    script.write_text(
        "import resource, numpy as np\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for step in range(11):\n"
        "    if step == 1: before = faults()\n"
        "    gradients = [np.ones(5_000_000, np.float32) for _ in range(4)]\n"
        "    del gradients\n"
        "print('faults a step', (faults() - before) // 10)\n"
    )
    make_images(tmp_path / "train", num_classes=2, per_class=2)
    told = run(script, tmp_path / "train", "--batch_size", "4", "--out", "out", cwd=tmp_path, **more)
    assert told.returncode == 0, told.stderr
    line = next(line for line in (tmp_path / "out" / "output.log").read_text().splitlines() if "faults" in line)
    assert (int(line.split()[-1]) < 500) is is_kept, line
