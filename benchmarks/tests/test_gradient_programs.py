"""The programs of bench_gradient: what they draw, what they play, what their report says."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
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


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank, in this process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def stored(name: str) -> Any:
    """A stored task on random samples, so that no test needs the files."""
    from gradient_tasks import TASKS, Samples

    draw = torch.Generator().manual_seed(1)
    if name.startswith("glyphs"):
        inputs = torch.rand(103, 1, 16, 16, generator=draw)
        targets = torch.randint(52, (103,), generator=draw)
    else:
        inputs = torch.randint(256, (103, 64), generator=draw)
        targets = inputs.roll(-1, 1)
    torch.manual_seed(0)
    return TASKS[name](0, torch.device("cpu"), Samples(inputs, targets, inputs, targets))  # type: ignore[call-arg]


@pytest.mark.usefixtures("benchmarks")
@pytest.mark.parametrize("name", ["glyphs", "glyphs-wide", "text", "text-wide", "resnet18", "gpt", "vit"])
def test_every_parameter_of_a_table_learns(name: str) -> None:
    from gradient_tasks import TASKS, without_gradient

    is_stored = name.startswith(("glyphs", "text"))
    task = stored(name) if is_stored else TASKS[name](0, torch.device("cpu"))
    before = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    assert without_gradient(task, batch_size=4) <= 0.01
    assert all(torch.equal(before[name], each) for name, each in task.model.state_dict().items())


@pytest.mark.usefixtures("benchmarks")
def test_parameters_that_never_learn_are_found() -> None:
    from gradient_tasks import Patterns, without_gradient
    from torchvision import models

    task = Patterns(0, torch.device("cpu"))
    task.model = models.resnet18(weights=None, num_classes=10)
    assert without_gradient(task, num_steps=1, batch_size=2) > 0.6, "ImageNet's stem at 32 pixels"


def test_no_network_of_the_committed_table_has_more_than_a_hundredth_that_never_learns() -> None:
    lines = [json.loads(each) for each in (BENCHMARKS / "results" / "gradient.jsonl").read_text().splitlines()]
    assert {line["without_gradient"] <= 0.01 for line in lines} == {True}


@pytest.mark.usefixtures("benchmarks")
def test_ranks_have_parts_of_their_own_that_make_up_the_whole() -> None:
    task = stored("text")
    parts = [set(task.part(rank, 4).tolist()) for rank in range(4)]
    assert set.union(*parts) == set(range(103))
    assert sum(map(len, parts)) == 103
    batches = task.batches(1, 4, 8)
    epoch = torch.cat([next(batches)[0] for _ in range(3)])
    mine = {tuple(task.samples.train_x[row].tolist()) for row in parts[1]}
    assert len({tuple(row) for row in epoch.tolist()} & mine) == 24, "once each, of its own part"
    assert not torch.equal(epoch[:8], next(batches)[0]), "another order in the next epoch"
    with pytest.raises(SystemExit, match="at least 30 samples of a rank, got 26"):
        next(task.batches(0, 4, 30))


def settings(**given: Any) -> Any:
    from gradient_methods import Settings

    return Settings("sgd", 0.1, 10, 8, **given)


def drawn(model: torch.nn.Module, step: int) -> torch.Tensor:
    """A loss whose gradient does not depend on the weights."""
    draw = torch.Generator().manual_seed(step)
    parts = [(torch.randn(p.shape, generator=draw) * p).sum() for p in model.parameters()]
    return torch.stack(parts).sum()


@pytest.mark.usefixtures("benchmarks", "alone")
def test_powersgd_that_is_late_applies_each_gradient_once_and_one_step_late(monkeypatch: pytest.MonkeyPatch) -> None:
    import gradient_methods

    monkeypatch.setattr(gradient_methods, "POWERSGD_FROM_STEP", 100)  # the gradients themselves, until then
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    expected = [weight.clone().requires_grad_() for weight in weights]
    method = gradient_methods.LatePowerSGD(model, settings())
    plain = torch.optim.SGD(expected, lr=0.1, momentum=0.9)
    late: tuple[torch.Tensor, ...] = ()
    for step in range(4):
        plain.param_groups[0]["lr"] = method.scheduler.get_last_lr()[0]  # of the step in which it is applied
        if step:
            for parameter, gradient in zip(expected, late, strict=True):
                parameter.grad = gradient
            plain.step()
        late = torch.autograd.grad(drawn(model, step), list(model.parameters()))
        method.step(drawn(model, step))
        torch.testing.assert_close(list(model.parameters()), expected)
    before = model.weight.detach().clone()
    method.settle()
    assert not torch.equal(before, model.weight), "what was under way came home"
    after = model.weight.detach().clone()
    method.settle()
    assert torch.equal(after, model.weight), "once"


@pytest.mark.usefixtures("benchmarks", "alone")
def test_powersgd_that_is_late_keeps_what_it_did_not_send() -> None:
    import gradient_methods

    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64, bias=False)
    method = gradient_methods.LatePowerSGD(model, settings())
    for step in range(6):
        method.step(drawn(model, step))
    method.settle()
    sent, kept = method.sent.gradients()[0], method.state.error_dict[0].view(64, 64)
    assert torch.linalg.matrix_rank(sent) == gradient_methods.POWERSGD_RANK
    assert kept.norm() > sent.norm() > 0


@pytest.mark.usefixtures("benchmarks", "alone")
def test_diloco_steps_along_the_distance_after_every_h_steps() -> None:
    import gradient_methods

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8, bias=False)
    method = gradient_methods.DiLoCoBF16(model, settings(inner_steps=2, outer_lr=0.5))
    start = model.weight.detach().clone()
    method.step(drawn(model, 0))
    first = model.weight.detach().clone()
    method.step(drawn(model, 1))
    # Nesterov's first step is along (1 + momentum) times the gradient
    moved = start - model.weight.detach()
    rates = [0.1 * settings().lr_factor(step) for step in range(2)]
    gradient = (start - first) / rates[0]
    second = 0.9 * gradient + torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    inner = rates[0] * gradient + rates[1] * second
    torch.testing.assert_close(moved, 0.5 * 1.9 * inner, rtol=0.02, atol=1e-4)
    method.settle()
    torch.testing.assert_close(start - model.weight.detach(), moved)


def line(stage: str, ranks: int, row: str, **more: Any) -> dict[str, Any]:
    """A line of gradient.jsonl."""
    run = {"stage": stage, "task": "text", "ranks": ranks, "row": row, "rate": "unlimited", "number": 0}
    found = {"lr": 0.001, "outer_lr": 0.0, "parameters": 10_000_000, "without_gradient": 0.0, "commit": "0"}
    return run | found | more


def cost_line(row: str, num_bytes: float, own_seconds: float = 0.0) -> dict[str, Any]:
    figures = {"step_bytes_sent": num_bytes, "step_bytes_received": 0.5 * num_bytes, "step_seconds": 0.1}
    return line("bytes", 2, row, step_cpu_seconds=0.02 + own_seconds, **figures)


def quality_line(row: str, accuracy: float, seed: int = 0) -> dict[str, Any]:
    return line("quality", 2, row, accuracy=accuracy, loss=2.0, number=seed)


@pytest.mark.usefixtures("benchmarks")
def test_a_crossing_point_is_where_two_times_are_equal() -> None:
    from gradient_report import candidates, costs, ranges, right_choice

    lines = [cost_line("none", 0.0), cost_line("ddp", 40e6, 0.03), cost_line("engine", 1e6, 0.04)]
    of = costs(lines, "text", 2)
    assert (of["ddp"].own_seconds, of["engine"].own_seconds) == (0.0, pytest.approx(0.04)), "as on an accelerator"
    assert costs(lines, "text", 2, on_accelerator=False)["ddp"].own_seconds == pytest.approx(0.03)
    assert of["ddp"].step_seconds(0.1, 1e9) == pytest.approx(0.1 / 3 + 0.32)
    assert of["engine"].step_seconds(0.1, 1e9) == pytest.approx(0.1), "hidden"
    assert of["engine"].step_seconds(0.1, 1e8) == pytest.approx(0.04 + 0.08)
    may = {row: of[row] for row in ("ddp", "engine")}
    (low, to, first), (since, high, second) = ranges(may, 0.1)
    assert (first, second, low, to) == ("engine", "ddp", 1e6, since)
    # DDP takes 1.05 of the engine's 0.1 s where 0.1 / 3 + 8 * 40e6 / B = 0.105
    assert to == pytest.approx(8 * 40e6 / (0.105 - 0.1 / 3), rel=0.02)
    assert high >= 1e11
    assert right_choice(may, 0.1, 1e11) == "ddp", "the plainest of equals"

    lines += [quality_line("none", 0.40), quality_line("ddp", 0.45), quality_line("engine", 0.4401)]
    assert set(candidates(lines, "text", 2)) == {"ddp", "engine"}
    lines += [quality_line("ddp", 0.45, seed=1), quality_line("engine", 0.43, seed=1)]
    assert set(candidates(lines, "text", 2)) == {"ddp"}, "more than a point below, in the mean of the seeds"
    lines += [cost_line("powersgd late", 1.0), quality_line("powersgd late", 0.46)]
    assert "powersgd late" not in candidates(lines, "text", 2), "no library has it"


@pytest.mark.usefixtures("benchmarks")
def test_the_table_says_when_a_quality_says_nothing() -> None:
    from gradient_report import spell, table

    lines = [quality_line("none", 0.40), quality_line("ddp", 0.45), quality_line("engine", 0.43)]
    text = table(lines, 0.1)
    assert "says nothing" not in text
    assert "| no exchange | 40.00 %, 2.885 bits (-5.00) |" in text
    assert "| shade, engine, 3 %, one step late | **43.00 %, 2.885 bits (-2.00)** |" in text
    lines[0]["accuracy"] = 0.441
    assert "**With 2 ranks no exchange loses less than a point: the column says nothing.**" in table(lines, 0.1)
    lines += [quality_line(row, accuracy, seed=1) for row, accuracy in (("ddp", 0.45), ("engine", 0.44))]
    assert "(-1.50 ± 0.50)" in table(lines, 0.1)
    assert "needs a quiet machine" in table(lines, 0.1)
    lines += [cost_line("none", 0.0), cost_line("ddp", 40e6)]
    lines += [cost_line("ddp", 40e6) | {"stage": "time", "rate": "1gbit", "step_seconds": 0.353}]
    assert "| DDP, float32 | 0.353 (0.353 to 0.353), 1.00 |" in table(lines, 0.1)
    assert [spell(each) for each in (1e6, 4.26e6, 99.6e6, 996e6, 1.84e9, 1e11)] == [
        "1.0 Mbit/s", "4.3 Mbit/s", "100 Mbit/s", "1.0 Gbit/s", "1.8 Gbit/s", "100 Gbit/s",
    ]  # fmt: skip


@pytest.mark.usefixtures("benchmarks")
def test_a_stopped_measurement_continues_where_it_was() -> None:
    from bench_gradient import STAGES, WHOLE, flags_of, wanted

    with pytest.raises(SystemExit, match="run the stage tuning first"):
        next(wanted([], WHOLE, ["quality"]))
    lines: list[dict[str, Any]] = []
    runs = []
    for run in wanted(lines, WHOLE, STAGES):
        runs.append(run)
        lines.append(run._asdict() | {"accuracy": 0.9 - abs(run.lr - 0.1) - abs(run.outer_lr - 0.2), "loss": 1.0})
        assert flags_of(run, WHOLE)
    assert len(set(runs)) == len(runs)
    assert next(wanted(lines, WHOLE, STAGES), None) is None
    assert [run.stage for run in runs] == sorted((run.stage for run in runs), key=STAGES.index)
    trained = [run for run in runs if run.stage == "quality" and run.task == "glyphs"]
    assert {run.lr for run in trained} == {0.1}
    assert {run.outer_lr for run in trained if run.row.startswith("diloco")} == {0.2}
    assert {run.ranks for run in trained} == {2, 4, 8}
    half = lines[: len(lines) // 2]
    assert next(wanted(half, WHOLE, STAGES)) == runs[len(half)]
    flags = flags_of(trained[0]._replace(ranks=8), WHOLE)
    assert flags[flags.index("--batch-size") + 1] == "8"


@pytest.mark.usefixtures("benchmarks")
def test_the_report_of_a_varying_link_says_whether_the_bar_is_met() -> None:
    from bench_gradient_varying import reached_after, table

    falling = [{"seconds": 5.0 * n, "loss": 1.0 / n} for n in range(1, 5)]
    assert reached_after([*falling, {"seconds": 30.0, "loss": 0.6}], target=0.5) == math.inf  # it did not stay there
    ways = {"density 0.01": 10.0, "density 0.1": 20.0, "controller": 10.9}
    evals = {way: [{"seconds": seconds, "loss": 0.1}] for way, seconds in ways.items()}
    targets = {"gpt": {0.5: 0.3, 0.75: 0.2}}
    told = {"targets": targets, "runs": [{"task": "gpt", "way": way, "evals": evals[way]} for way in ways]}
    assert "| controller | 10.9 (bar met) | 0.92 | 10.9 (bar met) | 0.92 |" in table(told)
    evals["controller"] = [{"seconds": 9.0, "loss": 0.25}, {"seconds": 11.1, "loss": 0.1}]
    told["runs"][-1]["evals"] = evals["controller"]
    assert "| controller | 9.0 (bar met) | 1.11 | 11.1 (**bar missed**) | 0.90 |" in table(told)


@pytest.mark.usefixtures("benchmarks")
def test_the_table_of_local_updates_compares_within_a_round() -> None:
    from bench_local_updates import table

    shared = {"rate": "20mbit", "step_bytes_sent": 2000.0, "step_bytes_received": 1000.0}
    plain, other = {"row": "none", **shared}, {"row": "whole", **shared}
    lines = [{"round": number, "step_seconds": 0.1 * (1 + number)} | plain for number in range(3)]
    lines += [{"round": number, "step_seconds": 0.2 * (1 + number)} | other for number in range(3)]
    assert "| 20 Mbit/s | `LocalUpdates`, H = 30 | 0.400 | 2.00 | 2 |" in table(lines)
