"""The scripts of the gradient plane train as they say: on loopback, on a testbed, and with every way to exchange.

Ranks are real processes over gloo. Where a machine cannot make a testbed, the tests that need one are skipped.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shade.store.local_cluster import free_ports
from tests.support.launching import make_images

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
    told = []
    try:
        told = [rank.communicate(timeout=GUARD_SECONDS) for rank in ranks]
    finally:
        for rank in ranks:
            rank.terminate()  # torchrun ends its workers
        for rank in ranks:
            rank.communicate(timeout=GUARD_SECONDS)
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), told[0][1][-3000:]
    assert all(not out for out, _ in told[1:])
    return [json.loads(line) for line in told[0][0].splitlines()]


def launch(script: Path, *flags: str, addresses: tuple[str, str] = ("127.0.0.1", "127.0.0.1"), bed: str = "") -> Rows:
    """Both ranks of a script, on loopback or on the two hosts of a testbed."""
    port = str(free_ports(1)[0])
    ranks = []
    for rank, address in enumerate(addresses):
        place = [sys.executable, str(TESTBED), "exec", "--name", bed, str(rank), "--"] if bed else []
        words = ["--master-ip-address", addresses[0], "--my-ip-address", address, "--world-size", "2"]
        command = [*place, str(script), *words, "--num-gpus", "0", "--rank", str(rank), *flags]
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


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs' folder, to import from."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


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
@pytest.mark.parametrize("method", ["none", "ddp-bf16", "powersgd4", "diloco", "hook", "engine"])
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
@pytest.mark.parametrize("flags", [(), ("--varying",)])
def test_a_quick_look_measures_writes_and_cleans_up(bed: str, tmp_path: Path, flags: tuple[str, ...]) -> None:
    command = [sys.executable, str(BENCHMARKS / "bench_gradient.py"), "--quick", *flags, "--out", str(tmp_path)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=2 * GUARD_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    name = "gradient_varying" if flags else "gradient"
    assert (tmp_path / f"{name}.png").stat().st_size > 1000
    result, text = json.loads((tmp_path / f"{name}.json").read_text()), (tmp_path / f"{name}.md").read_text()
    assert "controller" in text if flags else "shade, engine" in text
    assert text.strip() in done.stdout
    if not flags:
        assert [run["compute"] for run in result["runs"]].count("beside") == 3
        assert [(row["method"], row["seed"]) for row in result["finals"]] == [("ddp", 1), ("engine", 1)]
        by_method = {run["method"]: run for run in result["runs"] if run["compute"] == "here"}
        assert by_method["engine"]["step_bytes_sent"] < 0.1 * by_method["ddp"]["step_bytes_sent"]
        assert by_method["none"]["step_bytes_sent"] < 10_000
        assert by_method["ddp"]["step_seconds"] > by_method["engine"]["step_seconds"]
        assert "same steps of the long run: 0." in text
    left = subprocess.run([sys.executable, str(TESTBED), "status"], capture_output=True, text=True, check=True)
    assert "none named" in left.stdout


def test_help_teaches() -> None:
    for script, words in (
        (
            TEST_SCRIPT,
            ("--master-ip-address", "--my-ip-address", "--world-size", "--num-gpus", "--rank", "MASTER_PORT"),
        ),
        (TEST_SCRIPT_IMAGENET, ("--data FOLDER", "val/CLASS", "--world-size")),
    ):
        told = subprocess.run([str(script), "--help"], capture_output=True, text=True, timeout=60, check=True, cwd="/")
        for word in words:
            assert word in told.stdout


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
    words = [word for name, value in flags.items() if value is not None for word in (name, value)]
    told = subprocess.run([str(script), *words], capture_output=True, text=True, timeout=60, check=False, cwd="/")
    assert told.returncode == 2
    assert sentence in told.stderr
    assert told.stderr.startswith(f"{script.name}: ")
    assert told.stderr.count("\n") == 1


@pytest.mark.usefixtures("benchmarks")
def test_samples_are_drawn_from_seed_rank_and_step_alone() -> None:
    from gradient_tasks import GPT, Made, Patterns

    class Bare(Patterns):
        model = torch.nn.Identity()

    for kind in (Bare, GPT):
        task, again = (kind(0, torch.device("cpu")) for _ in range(2))
        assert isinstance(task, Made)
        drawn = [next(each.batches(rank, 2, 4)) for each, rank in ((task, 0), (again, 0), (task, 1))]
        assert torch.equal(drawn[0][0], drawn[1][0])
        assert not torch.equal(drawn[0][0], drawn[2][0])
        looked = [torch.cat([targets for _, targets in each.held_out(200)]) for each in (task, again, task)]
        assert torch.equal(looked[0], looked[1])
        assert torch.equal(looked[0], looked[2])
        assert len(looked[0]) == 200


@pytest.mark.usefixtures("benchmarks")
@pytest.mark.parametrize("seconds", [None, 0.25])
def test_what_is_played_takes_the_time_and_gives_the_gradients_of_the_real_model(seconds: float | None) -> None:
    from gradient_played import Played
    from gradient_tasks import GPT

    task = GPT(0, torch.device("cpu"))
    before = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    batches = task.batches(0, 2, 2)
    next(batches)
    inputs, targets = next(batches)
    task.loss(task.model(inputs), targets).backward()
    expected = {name: each.grad.clone() for name, each in task.model.named_parameters() if each.grad is not None}
    task.model.zero_grad()
    played = Played(task, 0, 2, 2, seconds)
    assert played.seconds == (seconds or played.seconds)
    came: list[str] = []
    for name, parameter in task.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
    busy, begun = time.thread_time(), time.perf_counter()
    played.loss(played.model(*next(played.batches(0, 2, 2))[:1]), torch.zeros(())).backward()
    busy, took = time.thread_time() - busy, time.perf_counter() - begun
    assert took >= played.seconds
    assert busy < took
    assert came == [name for name, _ in task.model.named_parameters()][::-1]
    assert all(torch.equal(expected[name], each.grad) for name, each in task.model.named_parameters())
    assert all(torch.equal(before[name], each) for name, each in task.model.state_dict().items())
    with pytest.raises(SystemExit, match="--eval-samples 0"):
        played.evaluate(8)


@pytest.mark.usefixtures("benchmarks")
def test_a_language_has_four_successors_of_known_probability() -> None:
    from gradient_tasks import GPT

    task = GPT(0, torch.device("cpu"))
    tokens, following = task.draw(200, task.generator(0, 0))
    is_likeliest = task.successors[tokens, 0] == following
    assert 0.67 < is_likeliest.float().mean() < 0.73
    assert (task.successors[tokens] == following[..., None]).any(-1).all()
    assert torch.equal(tokens[:, 1:], following[:, :-1])


@pytest.mark.usefixtures("benchmarks")
def test_the_report_says_whether_the_bars_are_met() -> None:
    from gradient_report import reached_after, rows_of, seconds_to, table, table_varying

    falling = [{"step": 10 * n, "seconds": 5.0 * n, "loss": 1.0 / n, "accuracy": 0.9 + 0.01 * n} for n in range(1, 5)]
    assert seconds_to(falling, target=0.5, step_seconds=2.0) == 40.0
    assert reached_after([*falling, {"seconds": 30.0, "loss": 0.6}], target=0.5) == math.inf  # it did not stay there
    setup = {"parameters": 1e6, "flops_per_step": 1e9}
    courses = {name: {"setup": setup, "steps": [2.0, 1.0], "evals": falling} for name in ("none", "ddp", "engine")}

    def result(engine_seconds: float, accuracy: float, finals: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        worse = [row | {"accuracy": accuracy} for row in falling]
        runs = [
            {"task": "gpt", "rate": "100mbit", "compute": "here", "method": method, "step_seconds": seconds}
            | {"losses": [2.0]}
            | {"step_bytes_sent": 1e6, "step_bytes_received": 1e6}
            for method, seconds in (("none", 0.1), ("ddp", 4.0), ("engine", engine_seconds))
        ]
        engine = courses["engine"] | {"evals": worse}
        return {"about": "", "courses": {"gpt": courses | {"engine": engine}}, "runs": runs, "finals": finals}

    for engine_seconds, accuracy, is_met in (
        (0.19, 0.94, True), (0.109, 0.94, True), (0.21, 0.94, False), (0.19, 0.934, False),
    ):  # fmt: skip
        told = result(engine_seconds, accuracy)
        assert rows_of(told)[-1]["meets"] is is_met
        assert ("(bars met)" in table(told)) is is_met
    assert "| 80 s | 1.0 | 120 s | 1.0 |" in table(result(0.2, 0.94))
    assert "| 4 s | 20.0 | 6 s | 20.0 |" in table(result(0.2, 0.94))
    late = [row | {"loss": row["loss"] + 0.1 * (row["step"] == 30)} for row in falling]
    told = result(0.2, 0.94)
    told["courses"]["gpt"]["engine"]["evals"] = late
    assert "| 4 s | 20.0 | – | – |" in table(told), "0.43 after 30 steps, and the last look is at other samples"
    finals = [{"task": "gpt", "seed": 1, "method": "ddp", "accuracy": 0.9}]
    finals.append(finals[0] | {"method": "engine", "accuracy": 0.912})
    told = result(0.19, 0.934, finals)
    assert rows_of(told)[-1]["meets"], "-0.6 and +1.2 points are +0.3"
    assert "| +0.30 (-0.60, +1.20) |" in table(told)

    ways = {"density 0.01": 10.0, "density 0.1": 20.0, "controller": 10.9}
    evals = {way: [{"seconds": seconds, "loss": 0.1}] for way, seconds in ways.items()}
    targets = {"gpt": {0.5: 0.3, 0.75: 0.2}}
    told = {"targets": targets, "runs": [{"task": "gpt", "way": way, "evals": evals[way]} for way in ways]}
    assert "| controller | 10.9 (bar met) | 0.92 | 10.9 (bar met) | 0.92 |" in table_varying(told)
    evals["controller"] = [{"seconds": 9.0, "loss": 0.25}, {"seconds": 11.1, "loss": 0.1}]
    told["runs"][-1]["evals"] = evals["controller"]
    assert "| controller | 9.0 (bar met) | 1.11 | 11.1 (**bar missed**) | 0.90 |" in table_varying(told)
