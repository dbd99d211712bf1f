"""What `bench_importance` compares is what it says: weights, norms, tails, wrong labels, learning rates, resumption."""

from __future__ import annotations

import hashlib
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import bench_importance as bench
import importance_tasks as cells
from importance_ways import KEPT, WHOLE_RUN, Setting, Way
from tasks import glyphs, packages

N, BATCH, EPOCHS = 640, 32, 8
AT = Setting(N, BATCH, seed=3, epochs=EPOCHS, keep=0.5)


def losses_of(rows: np.ndarray) -> np.ndarray:
    """A tenth of the samples has a loss a hundred times that of the others."""
    return np.where(rows % 10 == 0, 1.0, 0.01).astype(np.float32)


def walk(way: Way) -> list[tuple[np.ndarray, np.ndarray]]:
    """Rows and weights of every epoch."""
    walked = []
    for epoch in range(EPOCHS):
        order, weight = way.epoch(epoch)
        walked.append((order, np.ones(len(order), np.float32) if weight is None else weight[order]))
        for rows in np.split(order, range(BATCH, len(order), BATCH)):
            way.report(rows.astype(np.int64), losses_of(rows), losses_of(rows))
    return walked


UNBIASED = ["random", "loss", "gradient norm", "loss, proportional", "gradient norm, proportional", "change of loss"]


@pytest.mark.parametrize("name", UNBIASED)
def test_weights_make_up_for_what_is_left_out(name: str) -> None:
    sums = []
    for seed in range(40):
        rows, weights = walk(KEPT[name](AT._replace(seed=seed)))[4]
        assert len(rows) == N // 2
        sums.append((weights * losses_of(rows)).sum())
    true = losses_of(np.arange(N)).sum()
    assert abs(np.mean(sums) - true) < 4 * np.std(sums) / np.sqrt(len(sums)) + 0.01 * true


@pytest.mark.parametrize("name", ["loss", "gradient norm", "loss, no weights"])
def test_a_high_loss_is_drawn_more_often_and_at_random_it_is_not(name: str) -> None:
    def share(way: Way) -> float:
        rows, _ = walk(way)[4]
        return float((rows % 10 == 0).mean())

    assert share(KEPT[name](AT)) > 0.15
    assert share(KEPT["random"](AT)) == pytest.approx(0.1, abs=0.04)


def test_annealed_weights_flatten_at_first_and_are_whole_at_the_end() -> None:
    late = AT._replace(epochs=100)  # the full epochs at the end are far away
    whole, annealed = KEPT["loss"](late), KEPT["loss, weights annealed"](late)
    (_, exact), (_, flat) = walk(whole)[3], walk(annealed)[3]
    assert np.ptp(flat) < np.ptp(exact)
    assert flat.sum() == pytest.approx(exact.sum(), rel=1e-4)


def test_infobatch_leaves_out_half_of_what_is_well_known_and_ends_in_full() -> None:
    walked = walk(WHOLE_RUN["InfoBatch"](AT))
    assert [len(rows) for rows, _ in walked][:1] == [N]
    assert all(0.45 * N < len(rows) < 0.65 * N for rows, _ in walked[1:7])
    assert len(walked[7][0]) == N
    assert set(walked[3][1]) == {1.0, 2.0}


def test_pads_repeats() -> None:
    rows, _ = walk(WHOLE_RUN["pads -rep 3"](AT))[4]
    assert len(rows) == N
    assert len(set(rows)) < 0.8 * N


@pytest.mark.parametrize("shape", [(5, 7), (5, 3, 7)])
def test_the_norm_is_that_of_the_gradient(shape: tuple[int, ...]) -> None:
    logits = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    y = torch.randint(0, 7, shape[:-1])
    losses, norms = cells.sample_losses(logits, y)
    assert losses.shape == norms.shape == (5,)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    steps = gradient.norm(dim=-1) * (1 if len(shape) == 2 else shape[1])
    torch.testing.assert_close(norms, steps if len(shape) == 2 else steps.mean(1))


def test_a_long_tail_spans_a_hundred_to_one() -> None:
    y = torch.arange(10).repeat(1000)
    counts = torch.bincount(y[cells.long_tail(y)]).sort().values
    assert counts[0] == 10
    assert counts[-1] == 1000
    ratios = counts[1:] / counts[:-1]
    assert ratios.min() > 1.5
    assert ratios.max() < 1.8


def test_a_tenth_of_the_labels_is_another_class() -> None:
    y = torch.arange(10).repeat(100)
    wrong = cells.wrong_labels(y) != y
    assert int(wrong.sum()) == 100
    assert torch.equal(cells.wrong_labels(y), cells.wrong_labels(y))


def test_a_shorter_training_takes_as_many_steps() -> None:
    way = KEPT["loss"](AT)
    assert bench.steps_of(AT) == sum(len(rows) // BATCH for rows, _ in walk(way))


def test_the_rate_is_chosen_on_seeds_that_are_not_judged_and_a_stopped_run_goes_on() -> None:
    results: bench.Results = {}
    first = list(bench.wanted(results))
    assert {training.seed for training in first} == set(bench.TUNING_SEEDS)
    for training in first:
        results[training] = bench.Result(abs(training.rate - 1) + 1.0, 1, 1.0)
    second = list(bench.wanted(results))
    assert {training.seed for training in second} == set(bench.SEEDS)
    assert {training.rate for training in second} == {1}
    assert len(first) + len(second) == bench.num_wanted()
    results[second[0]] = bench.Result(1.0, 1, 1.0)
    assert list(bench.wanted(results)) == second[1:]


def test_a_diverged_rate_is_not_chosen() -> None:
    nan = float("nan")
    errors = {0: nan, 1: 5.0, 2: 4.0}
    seeds = bench.TUNING_SEEDS
    results = {bench.Training("c", "w", 1.0, r, s): bench.Result(e, 1, 1.0) for r, e in errors.items() for s in seeds}
    assert bench.best_rate(results, "c", "w", 1.0) == 2


def test_the_report_marks_what_is_better_than_random_by_two_standard_errors() -> None:
    results = {}
    for cell, seed in itertools.product(cells.CELLS, bench.SEEDS):
        errors = {
            ("uniform", 1.0): 7.0,
            ("random", 0.5): 8.0 + 0.1 * seed,
            ("loss", 0.5): 7.5 + 0.1 * seed + 0.01 * (seed % 2),
            ("change of loss", 0.5): 7.85 + 0.1 * seed + 0.3 * (seed % 2),
        }
        for (way, keep), error in errors.items():
            results[bench.Training(cell, way, keep, 0, seed)] = bench.Result(error, 16 if keep == 1 else 11, 1.0)
    results[bench.Training("glyphs", "loss", 0.7, 0, 0)] = bench.Result(1.0, 13, 1.0)
    table = bench.report(results)
    assert "**7.955 (-0.495 ± 0.002)**" in table
    assert "8.450 (+0.000" in table
    assert "| uniform | 1 | 8.0 N | 7.000" in table
    assert "keep 0.7 is not finished, and not shown" in table
    assert "| loss | 1.1364 | +0.0000 ± 0.0000 |" in table


def test_a_package_with_other_bytes_is_refused_and_the_cure_works(tmp_path: Path) -> None:
    wanted = packages.Package("fonts-x", "1.0", hashlib.sha256(b"right").hexdigest())
    file = tmp_path / "fonts-x_1.0_all.deb"
    file.write_bytes(b"wrong")
    with pytest.raises(packages.PackageError, match=r"expected SHA-256 .*, got .*; delete it"):
        packages.fetch([wanted], tmp_path)
    file.write_bytes(b"right")
    packages.fetch([wanted], tmp_path)


def test_without_an_index_the_message_says_where_to_put_the_packages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(packages.PackageError, match=f"put fonts-x and the others into {tmp_path}"):
        packages.fetch([packages.Package("fonts-x", "1.0", "")], tmp_path)


def test_a_font_is_distorted_the_same_way_each_time() -> None:
    pixels = np.zeros((52, 32, 32), np.uint8)
    pixels[:, 8:24, 14:18] = 255
    once, again, other = (glyphs.distort(pixels, seed) for seed in ("a", "a", "b"))
    assert np.array_equal(once, again)
    assert not np.array_equal(once, other)
    assert len({image.tobytes() for image in once}) == 52
    kept = once.reshape(52, -1).sum(1) / pixels.reshape(52, -1).sum(1)
    assert ((kept > 0.9) & (kept < 1.1)).all()
