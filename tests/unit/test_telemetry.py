"""Percentiles bound the truth, and a row is a line whatever happens around it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families as read_page

from shade.errors import ConfigError
from shade.telemetry import Histogram, JsonlSink, TensorBoardSink, jsonable, prometheus_text


@given(st.lists(st.floats(2e-6, 1e8), min_size=1, max_size=200), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_at_most_twice_the_true_one(values: list[float], fraction: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    true = sorted(values)[max(math.ceil(fraction * len(values)), 1) - 1]
    assert true <= histogram.quantile(fraction) < 2 * true or histogram.quantile(fraction) == histogram.largest
    assert histogram.quantile(fraction) <= max(values)
    assert histogram.count == len(values)
    assert histogram.total == pytest.approx(sum(values))


@given(st.lists(st.floats(1e-7, 1e9)), st.lists(st.floats(1e-7, 1e9)))
def test_histograms_of_two_ranks_are_the_histogram_of_both(one: list[float], two: list[float]) -> None:
    halves, whole = [Histogram(), Histogram()], Histogram()
    for histogram, values in zip(halves, (one, two), strict=True):
        for value in values:
            histogram.observe(value)
            whole.observe(value)
    halves[0].merge(halves[1])
    np.testing.assert_array_equal(halves[0].bucket_counts, whole.bucket_counts)
    assert (halves[0].largest, halves[0].p50, halves[0].p99) == (whole.largest, whole.p50, whole.p99)


def test_a_histogram_takes_the_extremes_and_refuses_what_is_no_number() -> None:
    histogram = Histogram()
    assert histogram.p50 == 0.0
    for value in (0.0, -1.0, 1e-12, 2.0**27, 1e30):
        histogram.observe(value)
    assert histogram.bucket_counts[0] == 3
    assert histogram.bucket_counts[-1] == 2
    assert histogram.p99 == 1e30
    with pytest.raises(ValueError, match="expected a finite value, got nan"):
        histogram.observe(float("nan"))
    assert histogram.count == 5


def test_rows_are_plain_json(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "run" / "metrics.jsonl")
    sink.write(
        {"hits": np.int64(3), "loss": np.float32(0.5), "z": float("nan"), "n": [np.inf], "p": tmp_path, "b": True}
    )
    sink.close()
    sink.close()
    rows = [json.loads(line) for line in sink.path.read_text().splitlines()]
    assert rows == [{"hits": 3, "loss": 0.5, "z": None, "n": [None], "p": str(tmp_path), "b": True}]
    assert jsonable({1: {"a": np.arange(2)}}) == {"1": {"a": [0, 1]}}


def test_a_torn_line_spoils_no_other(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"epoch":0}\n{"epo')
    sink = JsonlSink(path)
    sink.write({"epoch": 1})
    sink.close()
    assert path.read_text().splitlines() == ['{"epoch":0}', '{"epo', '{"epoch":1}']


def test_a_row_that_the_disk_refuses_is_counted_and_raises_nothing(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.close()
    sink.write({"epoch": 0})
    assert sink.lost_rows == 1
    if os.path.exists("/dev/full"):
        full = JsonlSink("/dev/full")
        full.write({"epoch": 0})
        full.close()
        assert full.lost_rows == 1


@pytest.mark.multiprocess
def test_processes_share_a_file_without_mixing_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    program = (
        "import sys; from shade.telemetry import JsonlSink\n"
        "sink = JsonlSink(sys.argv[1])\n"
        "for i in range(300): sink.write({'rank': int(sys.argv[2]), 'i': i, 'pad': 'x' * (97 * i % 5000)})\n"
        "sink.close()"
    )
    writers = [subprocess.Popen([sys.executable, "-c", program, str(path), str(rank)]) for rank in range(3)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0, 0]
    rows = [json.loads(line) for line in path.read_text().splitlines() if line]
    for rank in range(3):
        assert [row["i"] for row in rows if row["rank"] == rank] == list(range(300))


def test_prometheus_text_carries_the_sentences_and_the_buckets() -> None:
    counts, meaning, histogram = {"hits": 7}, {"hits": "Samples not read from the origin."}, Histogram()
    for value in (0.5, 0.75, 3.0, 1e30):
        histogram.observe(value)
    page = prometheus_text(counts, meaning, {"batch_seconds": histogram}, {"rank": 0, "run": 'a"b'})
    lines = page.splitlines()
    assert page.endswith("\n")
    assert "# HELP shade_hits_total Samples not read from the origin." in lines
    found = {(each.name, each.labels.get("le")): each for family in read_page(page) for each in family.samples}
    labels = {"rank": "0", "run": 'a"b'}
    assert (found["shade_hits_total", None].labels, found["shade_hits_total", None].value) == (labels, 7)
    assert [each.value for (name, _), each in found.items() if name == "shade_batch_seconds_bucket"] == [1, 2, 3, 4]
    assert found["shade_batch_seconds_bucket", "+Inf"].labels == {**labels, "le": "+Inf"}
    assert (found["shade_batch_seconds_count", None].value, found["shade_batch_seconds_sum", None].value) == (4, 1e30)
    assert "shade_hits_total 7" in prometheus_text(counts, meaning)


def test_a_page_says_what_was_counted_and_what_it_means() -> None:
    histogram = Histogram()
    for value in (0.5, 0.75, 3e-6):
        histogram.observe(value)
    page = prometheus_text(
        {"hits": 7, "busy_seconds": 0.25}, {"hits": "A \\ sentence.", "busy_seconds": "Time.", "epoch": "Which."},
        {"wait_seconds": histogram}, {"rank": 3}, {"epoch": 1234567},
    )  # fmt: skip
    expected_page = """\
# HELP shade_hits_total A \\\\ sentence.
# TYPE shade_hits_total counter
shade_hits_total{rank="3"} 7
# HELP shade_busy_seconds_total Time.
# TYPE shade_busy_seconds_total counter
shade_busy_seconds_total{rank="3"} 0.25
# HELP shade_epoch Which.
# TYPE shade_epoch gauge
shade_epoch{rank="3"} 1234567
# TYPE shade_wait_seconds histogram
shade_wait_seconds_bucket{rank="3",le="3.8147e-06"} 1
shade_wait_seconds_bucket{rank="3",le="0.5"} 2
shade_wait_seconds_bucket{rank="3",le="1"} 3
shade_wait_seconds_bucket{rank="3",le="+Inf"} 3
shade_wait_seconds_sum{rank="3"} 1.250003
shade_wait_seconds_count{rank="3"} 3
"""
    before, now = list(read_page(expected_page)), list(read_page(page))
    assert [(each.name, each.type, each.documentation) for each in now] == [
        (each.name, each.type, each.documentation) for each in before
    ]
    for ours, theirs in zip(now, before, strict=True):
        values, wanted = (
            {(s.name, *sorted(s.labels.items())): s.value for s in each.samples} for each in (ours, theirs)
        )
        assert values == wanted


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    for epoch in range(2):
        sink.write({"epoch": epoch, "rank": 1, "kind": "epoch", "hits": 5 * epoch, "stall_seconds": {"origin": 0.5}})
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(events.Tags()["scalars"]) == ["rank1/hits", "rank1/stall_seconds/origin"]
    assert [(e.step, e.value) for e in events.Scalars("rank1/hits")] == [(0, 0.0), (1, 5.0)]


def test_without_tensorboard_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"pip install 'torch-shade\[report\]'"):
        TensorBoardSink(tmp_path)
