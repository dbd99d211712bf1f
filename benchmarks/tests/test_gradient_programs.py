"""The programs of bench_gradient: what they draw, what they play, what their report says."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1]


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs' folder, to import from."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


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
