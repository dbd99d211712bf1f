"""The scripts of the gradient plane train as they say: on loopback, on a testbed, and with every way to exchange.

Ranks are real processes over gloo. Where a machine cannot make a testbed, the tests that need one are skipped.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shade.store._servers.local_cluster import free_ports
from tests.support.launching import make_images

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS, SCRIPTS = ROOT / "benchmarks", ROOT / "scripts"
TEST_SCRIPT, TEST_SCRIPT_IMAGENET, TESTBED = (
    SCRIPTS / name for name in ("test_script", "test_script_imagenet", "testbed")
)
GUARD_SECONDS = 140
NOT_HERE = 3
SMALL = ("--batch-size", "2", "--eval-samples", "8")
Rows = list[dict[str, Any]]


def environment(**more: str) -> dict[str, str]:
    """This interpreter, one thread a rank."""
    return os.environ | {"SHADE_VENV": sys.prefix, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | more


def finish(ranks: list[subprocess.Popen[str]]) -> Rows:
    """What rank 0 printed, once all have ended well."""
    outputs = []
    try:
        outputs = [rank.communicate(timeout=GUARD_SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.terminate()  # torchrun ends its workers
        for rank in ranks:
            rank.communicate(timeout=GUARD_SECONDS)
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), outputs[0][1][-3000:]
    assert all(not out for out, _ in outputs[1:])
    return [json.loads(line) for line in outputs[0][0].splitlines()]


def launch(script: Path, *flags: str, addresses: tuple[str, str] = ("127.0.0.1", "127.0.0.1"), bed: str = "") -> Rows:
    """Both ranks of a script, on loopback or on the two hosts of a testbed."""
    port = str(free_ports(1)[0])
    ranks = []
    for rank, address in enumerate(addresses):
        place = [sys.executable, str(TESTBED), "exec", "--name", bed, str(rank), "--"] if bed else []
        arguments = ["--master-ip-address", addresses[0], "--my-ip-address", address, "--world-size", "2"]
        command = [*place, str(script), *arguments, "--num-gpus", "0", "--rank", str(rank), *flags]
        pipe = subprocess.PIPE
        ranks.append(
            subprocess.Popen(command, env=environment(MASTER_PORT=port), stdout=pipe, stderr=pipe, text=True, cwd="/")
        )
    return finish(ranks)


def pick(rows: Rows, kind: str) -> Rows:
    return [row for row in rows if row["kind"] == kind]


def expect_training(rows: Rows, num_steps: int) -> None:
    """A line for each step, numbers that can be, and counters that only grow."""
    assert [row["kind"] for row in rows] == ["setup", *["step"] * num_steps, "eval", "end"]
    steps = pick(rows, "step")
    assert [row["step"] for row in steps] == list(range(1, num_steps + 1))
    assert all(math.isfinite(row["loss"]) for row in steps)
    for name in ("seconds", "bytes_sent", "bytes_received"):
        assert [row[name] for row in steps] == sorted(row[name] for row in steps)
    assert 0 <= rows[-2]["accuracy"] <= 1
    assert (rows[0]["world_size"], rows[-1]["steps"]) == (2, num_steps)


@pytest.fixture
def bed() -> Iterator[str]:
    """The name of a testbed of two hosts."""
    name = f"scripts{os.getpid()}"
    command = [sys.executable, str(TESTBED)]
    done = subprocess.run(
        [*command, "up", "--name", name, "--rate", "100mbit"], capture_output=True, text=True, check=False
    )
    if done.returncode == NOT_HERE:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    yield name
    subprocess.run([*command, "down", "--name", name], capture_output=True, check=True)


@pytest.mark.multiprocess
def test_two_ranks_train_with_the_engine_on_loopback() -> None:
    rows = launch(TEST_SCRIPT, "--steps", "3", *SMALL)
    expect_training(rows, num_steps=3)
    assert (rows[0]["method"], rows[0]["device"]) == ("engine", "cpu")
    dense_bytes = 4 * rows[0]["parameters"]
    assert 0 < rows[-1]["step_bytes_sent"] < 0.1 * dense_bytes  # both ranks' together: the interface is lo


@pytest.mark.slow
def test_two_hosts_train_over_a_slow_link(bed: str) -> None:
    rows = launch(TEST_SCRIPT, "--steps", "8", *SMALL, addresses=("10.77.0.1", "10.77.0.2"), bed=bed)
    expect_training(rows, num_steps=8)
    sent, received = (rows[-1][f"step_bytes_{name}"] for name in ("sent", "received"))
    assert 0.01 * 2 * rows[0]["parameters"] < sent < 0.05 * 4 * rows[0]["parameters"]
    assert 0.5 < sent / received < 2


@pytest.mark.slow
@pytest.mark.parametrize("has_folder", [True, False])
def test_imagenet_trains_on_a_folder_or_without(tmp_path: Path, has_folder: bool) -> None:
    for part in ("train", "val"):
        make_images(tmp_path / part, num_classes=3, per_class=4, size=40)
    flags = ["--data", str(tmp_path), "--epochs", "1"] if has_folder else ["--steps", "3"]
    rows = launch(TEST_SCRIPT_IMAGENET, "--network", "cnn", *flags, *SMALL)
    expect_training(rows, num_steps=3)
    assert rows[0]["task"] == "imagenet"


def six_steps(method: str) -> list[float]:
    """The losses of a small training that sends everything that it can send."""
    flags = ("--method", method, "--task", "gpt", "--steps", "6", "--inner-steps", "3", "--density", "1")
    rows = launch(TEST_SCRIPT, *flags, "--staleness", "0", "--quantiser", "none", "--lr", "0.0001", *SMALL)
    expect_training(rows, num_steps=6)
    return [row["loss"] for row in pick(rows, "step")]


@pytest.fixture(scope="module")
def plain() -> list[float]:
    """DDP's losses."""
    return six_steps("ddp")


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["none", "ddp-bf16", "powersgd4", "powersgd4-late", "diloco", "local-updates", "diloco-bf16", "hook", "engine"],
)
def test_all_methods_see_the_same_samples_with_the_same_weights(method: str, plain: list[float]) -> None:
    losses = six_steps(method)
    assert losses[0] == plain[0]
    if method in ("hook", "engine"):  # with density 1 they are the same algorithm as DDP
        assert losses == pytest.approx(plain, abs=1e-3)
    else:
        assert losses != plain


@pytest.mark.slow
def test_the_controller_steers(bed: str) -> None:
    """On a link that could carry far more, it does not stay where it began."""
    flags = ("--controller", "--density", "0.001", "--steps", "25", *SMALL)
    rows = launch(TEST_SCRIPT, *flags, addresses=("10.77.0.1", "10.77.0.2"), bed=bed)
    densities = [row["density"] for row in pick(rows, "step")]
    assert densities[0] == 0.001
    assert densities[-1] > 0.002, densities


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gradient", "gradient_varying"])
def test_a_quick_look_measures_writes_and_cleans_up(bed: str, tmp_path: Path, name: str) -> None:
    command = [sys.executable, str(BENCHMARKS / f"bench_{name}.py"), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=2 * GUARD_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / f"{name}.png").stat().st_size > 1000
    text = (tmp_path / f"{name}.md").read_text()
    assert ("shade, engine" if name == "gradient" else "controller") in text
    assert text.strip() in done.stdout
    if name == "gradient":
        lines = [json.loads(line) for line in (tmp_path / "gradient.jsonl").read_text().splitlines()]
        assert all(line["without_gradient"] <= 0.01 for line in lines)
        by_row = {line["row"]: line for line in lines if line["stage"] == "time"}
        assert by_row["engine"]["step_bytes_sent"] < 0.1 * by_row["ddp"]["step_bytes_sent"]
        assert by_row["none"]["step_bytes_sent"] < 10_000
        assert by_row["ddp"]["step_seconds"] > by_row["engine"]["step_seconds"]
        assert {line["stage"] for line in lines} == {"tuning", "quality", "bytes", "time"}
    left = subprocess.run([sys.executable, str(TESTBED), "status"], capture_output=True, text=True, check=True)
    assert "none named" in left.stdout


@pytest.mark.multiprocess
def test_help_teaches() -> None:
    for script, arguments in (
        (
            TEST_SCRIPT,
            ("--master-ip-address", "--my-ip-address", "--world-size", "--num-gpus", "--rank", "MASTER_PORT"),
        ),
        (TEST_SCRIPT_IMAGENET, ("--data FOLDER", "val/CLASS", "--world-size")),
    ):
        outputs = subprocess.run(
            [str(script), "--help"], capture_output=True, text=True, timeout=60, check=True, cwd="/"
        )
        for argument in arguments:
            assert argument in outputs.stdout


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"--rank": "2"}, "expected 0 <= --rank < --world-size 2, got 2"),
        ({"--rank": "-1"}, "expected a number ≥ 0, got '-1'"),
        ({"--my-ip-address": "localhost"}, "such as 192.168.0.1, got 'localhost'"),
        ({"--num-gpus": "all"}, "expected a number ≥ 0, got 'all'"),
        ({"--world-size": None}, "required: --world-size"),
    ],
)
@pytest.mark.parametrize("script", [TEST_SCRIPT, TEST_SCRIPT_IMAGENET])
def test_a_mistake_is_one_line_with_its_cure(script: Path, changed: dict[str, str | None], sentence: str) -> None:
    flags = {"--master-ip-address": "127.0.0.1", "--my-ip-address": "127.0.0.1", "--world-size": "2"}
    flags |= {"--num-gpus": "1", "--rank": "0"} | changed
    arguments = [argument for name, value in flags.items() if value is not None for argument in (name, value)]
    outputs = subprocess.run(
        [str(script), *arguments], capture_output=True, text=True, timeout=60, check=False, cwd="/"
    )
    assert outputs.returncode == 2
    assert sentence in outputs.stderr
    assert outputs.stderr.startswith(f"{script.name}: ")
    assert outputs.stderr.count("\n") == 1
