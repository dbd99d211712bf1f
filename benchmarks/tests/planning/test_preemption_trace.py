"""A trace is read as it was meant, and what is none is said by line."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from replay import Failure, PreemptionTrace

from shade.errors import ConfigError, DataError

TEXT = """\
# a spot machine in March
time_seconds,kind,down_seconds

1830.5,machine,120
4000, process ,0
4000,cluster,
86400,end,
"""


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "spot.csv"
    path.write_text(TEXT)
    trace = PreemptionTrace.load(path)
    assert trace.failures == (Failure(1830.5, "machine", 120.0), Failure(4000.0, "process"), Failure(4000.0, "cluster"))
    assert trace.length_seconds == 86400.0
    assert trace.mtbf_seconds == 28800.0


def test_times_alone_are_a_trace() -> None:
    trace = PreemptionTrace.parse(["time_seconds", "10", "30"])
    assert trace.failures == (Failure(10.0), Failure(30.0))
    assert trace.length_seconds == 30.0


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (["seconds,kind", "1,machine"], "columns time_seconds, kind, down_seconds"),
        (["time_seconds,kind", "1,fire"], "line 2"),
        (["time_seconds", "5", "4"], "times in order"),
        (["time_seconds", "-1"], "seconds ≥ 0"),
        (["time_seconds", "nan"], "seconds ≥ 0"),
        (["time_seconds,kind", "5,end", "6,machine"], "nothing after end"),
        (["time_seconds"], "a trace that lasts"),
        ([], "a trace that lasts"),
    ],
)
def test_what_is_no_trace(lines: list[str], told: str) -> None:
    with pytest.raises(DataError, match=told):
        PreemptionTrace.parse(lines)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="name a readable file"):
        PreemptionTrace.load(tmp_path / "none.csv")


def test_one_made_up_comes_back_bit_for_bit_and_fails_as_often_as_asked() -> None:
    trace = PreemptionTrace.synthetic(3600.0, 3600.0 * 10_000, seed=3, down_seconds=60.0)
    assert PreemptionTrace.parse(trace.to_csv().splitlines()) == trace
    assert trace == PreemptionTrace.synthetic(3600.0, 3600.0 * 10_000, seed=3, down_seconds=60.0)
    assert trace != PreemptionTrace.synthetic(3600.0, 3600.0 * 10_000, seed=4, down_seconds=60.0)
    assert abs(len(trace.failures) - 10_000) < 4 * math.sqrt(10_000)
    with pytest.raises(ConfigError, match="give both in seconds"):
        PreemptionTrace.synthetic(0.0, 1.0)
