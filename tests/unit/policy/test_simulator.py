"""Traces on disk, and what the simulator makes of them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from shade.cli.simulation import format_table, plot_curves
from shade.errors import ConfigError, DataError, UnknownNameError
from shade.policy.simulator import miss_ratio_curves, simulate
from shade.policy.trace import Trace, TraceRecorder


@pytest.fixture
def trace() -> Trace:
    """Two epochs of four samples of different sizes."""
    scores = (np.zeros(4, dtype=np.float32), np.arange(4, dtype=np.float32))
    return Trace(np.array([1, 10, 100, 1000]), (np.array([0, 1, 2, 3]), np.array([3, 0, 0])), 2, scores)


def test_a_trace_comes_back_as_it_was_saved(trace: Trace, tmp_path: Path) -> None:
    trace.save(tmp_path / "run.npz")
    loaded = Trace.load(tmp_path / "run.npz")
    assert loaded.global_batch == 2
    assert loaded.size_bytes_N.tolist() == [1, 10, 100, 1000]
    assert [order_K.tolist() for order_K in loaded.orders] == [[0, 1, 2, 3], [3, 0, 0]]
    assert all(order_K.dtype == np.int64 for order_K in loaded.orders)
    assert [score_N.tolist() for score_N in loaded.scores if score_N is not None] == [[0, 0, 0, 0], [0, 1, 2, 3]]


def test_a_run_that_stops_leaves_the_epochs_it_began(trace: Trace, tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "run.npz", trace.size_bytes_N, 2)
    recorder.begin_epoch(0, trace.orders[0])
    recorder.begin_epoch(1, trace.orders[1], np.ones(4, dtype=np.float32))
    recorder.begin_epoch(1, trace.orders[1][2:])
    loaded = Trace.load(tmp_path / "run.npz")
    assert [len(order_K) for order_K in loaded.orders] == [4, 3], "a resumed epoch is recorded once, whole"
    assert loaded.score_of(0) is None
    assert loaded.score_of(1) is not None


def test_a_file_that_is_no_trace_says_so(trace: Trace, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a trace file, got .*nowhere.npz.*no such file"):
        Trace.load(tmp_path / "nowhere.npz")
    (tmp_path / "text.npz").write_text("order_00000")
    np.savez(tmp_path / "other.npz", weights=np.ones(3))
    np.save(tmp_path / "array.npy", np.ones(3))
    trace.save(tmp_path / "cut.npz")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:-40])
    for name in ("text.npz", "other.npz", "array.npy", "cut.npz"):
        with pytest.raises(DataError, match=f"a whole trace .*{name}.*does not read"):
            Trace.load(tmp_path / name)


def test_indices_outside_the_data_set_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"0 … 2 in epoch 1, got \(1, 3\)"):
        Trace(np.ones(3, dtype=np.int64), (np.array([0]), np.array([1, 3])), 2)


def test_a_simulation_counts_reads_bytes_and_the_peak(trace: Trace) -> None:
    result = simulate(trace, "lru", 1001)
    assert result.accesses.tolist() == [4, 3]
    assert result.hits.tolist() == [0, 2], "3 is still there, 0 is read and then there; 1 and 2 made room for 3"
    assert result.origin_reads.tolist() == [4, 1]
    assert result.origin_bytes.tolist() == [1111, 1]
    assert result.peak_resident_bytes.tolist() == [1000, 1001]
    assert result.hit_ratio() == pytest.approx(2 / 7)
    assert result.hit_ratio(1) == pytest.approx(2 / 3)
    assert result.origin_reads_per_sample(1) == 0.25
    assert np.isnan(result.hit_ratio(2))
    assert np.isnan(result.origin_reads_per_sample(2))


def test_an_unknown_policy_is_named_with_the_known_ones(trace: Trace) -> None:
    with pytest.raises(UnknownNameError, match=r"no cache policy named 'lur'.*'lru'.*belady, belady-1, fifo"):
        simulate(trace, "lur", 10)


def test_curves_fall_as_the_cache_grows_and_render(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    trace = Trace(np.full(200, 10), tuple(rng.permutation(200) for _ in range(4)), 16)
    curves = miss_ratio_curves(trace, ["plan", "lru"], [0.0, 0.1, 0.5, 1.0])
    assert [result.miss_ratio(1) for result in curves.results["plan"]] == pytest.approx([1.0, 0.9, 0.5, 0.0])
    table = format_table(curves)
    assert [line.split()[1] for line in table.splitlines()[2:]] == ["plan", "lru"]
    assert "50.0%, 0.500" in table
    assert len({len(line) for line in table.splitlines()}) == 1

    plot_curves({"shuffled": curves, "again": curves}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_warm_up_must_leave_something(trace: Trace) -> None:
    with pytest.raises(ConfigError, match=r"0 ≤ skip_epochs < 2.*got 2"):
        miss_ratio_curves(trace, ["lru"], [0.5], skip_epochs=2)


def test_without_matplotlib_the_cure_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"pip install 'torch-shade\[report\]'"):
        plot_curves({}, tmp_path / "curves.png")
