"""What `shade simulate` says of a cache that was not there is what a run with that cache reads."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shade.cli import main
from shade.policy.simulator import simulate
from shade.policy.trace import Trace
from shade.report.forecast import prolong
from tests.support.data_plane import Job, make_pictures, train
from tests.support.launching import make_images, rows, run

pytestmark = pytest.mark.multiprocess

N, BATCH, EPOCHS = 1000, 32, 6
SIZES = (0.1, 0.3, 0.5)
STEADY = slice(3, EPOCHS)
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_pictures(tmp_path_factory.mktemp("pictures"), N, mixed=True))


@pytest.mark.parametrize(
    ("mode", "policy", "keep"),
    [
        ("unbiased", "plan", None),
        pytest.param("uniform", "plan", None, marks=pytest.mark.slow),
        pytest.param("unbiased", "lru", 0.6, marks=pytest.mark.slow),
    ],
)
def test_one_epoch_foretells_the_reads_of_three_sizes(
    pictures: str, mode: str, policy: str, keep: float | None
) -> None:
    """The bar is 10 % of what real runs, through real servers, read from the origin."""
    # A slow origin: on a crowded machine the cache would else be found slower than a file in memory, and left alone.
    slow: dict[str, Any] = {"log": os.devnull, "seconds": 0.002}
    job = Job(pictures, "local://", 1, BATCH, mode=mode, policy=policy, keep=keep, fraction=0.2, **slow)
    recorded = train(job)
    scores = recorded.state["table"]["score_N"].numpy() if mode == "unbiased" else None
    trace = Trace(recorded.sizes, tuple(recorded.orders), BATCH, score_after=scores)
    steady, skip = prolong(trace, {"sampling": mode, "seed": 0, "keep": keep})
    ratios = []
    for fraction in SIZES:
        predicted = simulate(steady, policy, int(fraction * trace.data_set_bytes)).origin_reads[skip:].mean()
        outcome = train(replace(job, epochs=EPOCHS, fraction=fraction))
        measured = np.mean([ledger["origin_reads"] for ledger in outcome.ledgers[STEADY]])
        ratios.append(predicted / measured)
    assert ratios == pytest.approx([1.0] * len(SIZES), abs=0.1)


def test_a_long_trace_is_taken_as_it_is() -> None:
    orders = tuple(np.random.default_rng(e).permutation(N) for e in range(6))
    trace = Trace(np.full(N, 10), orders, BATCH)
    assert prolong(trace, {}) == (trace, 3)


def test_a_short_trace_without_scores_goes_on_in_full_epochs() -> None:
    trace = Trace(np.full(N, 10), (np.arange(N),), BATCH)
    steady, skip = prolong(trace, {"sampling": "unbiased"})
    assert (steady.num_epochs, skip) == (7, 2)
    assert all(len(order_K) == N for order_K in steady.orders)
    again, _ = prolong(trace, {"sampling": "unbiased"})
    assert all(np.array_equal(a, b) for a, b in zip(steady.orders, again.orders, strict=True))


def table(told: str) -> dict[str, tuple[float, float, float]]:
    """Scenario → hits, reads, seconds."""
    found = re.findall(r"^(\S.*?)  +([\d.]+)% +([\d,]+) +([\d.,]+) +[\d,]+  ", told, re.MULTILINE)
    return {name: (float(hits) / 100, float(reads.replace(",", "")), float(s)) for name, hits, reads, s in found}


@pytest.mark.slow
def test_the_command_answers_from_one_recorded_epoch(tmp_path: Path, capsys: Capture) -> None:
    make_images(tmp_path / "train", num_classes=4, per_class=60)
    words = ("bench_cifar10.py", tmp_path / "train", "--network", "cnn", "--batch_size", "16", "--workers", "2")
    told = run(*words, "--epochs", "1", "-wss", "0.2", "--out", "one", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    size = Trace.load(tmp_path / "one" / "trace.npz").data_set_bytes
    more = f"{int(0.3 * size)}"
    assert main(["simulate", str(tmp_path / "one"), "--add-cache", more, "--add-workers", "2"]) == 0
    answer = capsys.readouterr().out
    predicted = table(answer)
    assert len(predicted) == 4, answer
    assert "waits for" in answer
    names = list(predicted)
    assert names[0] == "as it is"
    assert names[-1] == "both"
    for fraction, name in ((0.2, names[0]), (0.5, names[1])):
        out = tmp_path / f"run-{fraction}"
        told = run(*words, "--epochs", "6", "-wss", str(fraction), "--out", out, cwd=tmp_path)
        assert told.returncode == 0, told.stderr
        measured = [row["origin_reads"] for row in rows(out) if 2 <= row["epoch"] < 5]  # the last is full again
        assert predicted[name][1] == pytest.approx(np.mean(measured), rel=0.1)
    assert predicted[names[1]][1] < predicted[names[0]][1]


@pytest.mark.slow
def test_without_a_wish_it_offers_a_choice_and_a_trace_alone_has_no_times(tmp_path: Path, capsys: Capture) -> None:
    make_images(tmp_path / "train")
    words = ("bench_cifar10.py", tmp_path / "train", "--network", "cnn", "--batch_size", "8", "--workers", "0")
    told = run(*words, "--epochs", "2", "-wss", "0.2", "--out", "out", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    assert main(["simulate", str(tmp_path / "out")]) == 0
    answer = capsys.readouterr().out
    assert next(iter(table(answer))) == "as it is"
    assert "twice the cache" in answer
    assert "all of it cached" in answer
    trace = str(tmp_path / "out" / "trace.npz")
    assert main(["simulate", trace]) == 0
    assert "waits for" not in capsys.readouterr().out
    assert main(["simulate", trace, "--add-workers", "2"]) == 2
    assert "a run directory" in capsys.readouterr().err


def test_a_run_that_cannot_be_scaled_says_why(tmp_path: Path, capsys: Capture) -> None:
    Trace(np.full(N, 10), (np.arange(N),), BATCH).save(tmp_path / "trace.npz")
    (tmp_path / "metrics.jsonl").write_text('{"kind":"epoch","epoch":0,"rank":0,"samples":240,"epoch_seconds":1.0}\n')
    assert main(["simulate", str(tmp_path)]) == 2
    assert "record a run with this version" in capsys.readouterr().err
