"""What an epoch would take: nothing changed is nothing changed, and what cannot help does not."""

from __future__ import annotations

import dataclasses

import pytest

from shade.errors import ConfigError
from shade.report.forecast import MeasuredEpoch, forecast

SLOW_STORAGE = MeasuredEpoch(
    num_samples=1000,
    origin_reads=800,
    cache_reads=200,
    seconds=52.0,
    step_seconds=10.0,
    busy_seconds={"origin": 80.0, "cache": 2.0, "decode": 10.0, "transform": 8.0},
    num_ranks=1,
    num_workers=2,
    num_cpus=8,
)
"""Loading takes 100 s of two workers: 50 s; 2 s are unexplained."""


def test_nothing_changed_is_the_measurement() -> None:
    for measured in (SLOW_STORAGE, dataclasses.replace(SLOW_STORAGE, seconds=30.0)):
        same = forecast(measured, num_samples=1000, origin_reads=800, num_workers=2)
        assert same.seconds == pytest.approx(measured.seconds)
        assert same.samples_per_second == pytest.approx(1000 / measured.seconds)


def test_half_the_reads_save_half_the_origin() -> None:
    after = forecast(SLOW_STORAGE, num_samples=1000, origin_reads=400, num_workers=2)
    assert after.seconds == pytest.approx((40 + 6 + 18) / 2 + 2)
    assert after.bottleneck == "origin (62.5%)"
    assert after.advice.startswith("Origin: fewer reads help most")


def test_workers_share_the_loading_until_the_step_is_slower() -> None:
    four = forecast(SLOW_STORAGE, num_samples=1000, origin_reads=800, num_workers=4)
    assert four.seconds == pytest.approx(25 + 2)
    many = forecast(SLOW_STORAGE, num_samples=1000, origin_reads=800, num_workers=32)
    assert many.seconds == pytest.approx(10 + 2)
    assert many.bottleneck == "the step"
    assert "neither more cache nor more workers" in many.advice


def test_decoding_stops_at_the_cpus() -> None:
    busy = {"origin": 1.0, "cache": 1.0, "decode": 60.0, "transform": 38.0}
    measured = dataclasses.replace(SLOW_STORAGE, busy_seconds=busy, num_cpus=2, step_seconds=1.0)
    more = forecast(measured, num_samples=1000, origin_reads=800, num_workers=16)
    assert more.seconds == pytest.approx(98 / 2 + 2, rel=0.01)
    assert more.bottleneck == "decode (60.0%)"
    assert "all CPUs are busy" in more.advice
    fewer_reads = forecast(measured, num_samples=1000, origin_reads=0, num_workers=2)
    assert fewer_reads.seconds > 0.95 * measured.seconds, "the cache is not what it waits for"


def test_without_workers_loading_and_stepping_take_turns() -> None:
    alone = dataclasses.replace(SLOW_STORAGE, num_workers=0, seconds=110.0)
    same = forecast(alone, num_samples=1000, origin_reads=800, num_workers=0)
    assert same.seconds == pytest.approx(110.0)
    assert same.bottleneck == "loading and step in turns"
    assert "take turns" in same.advice
    assert forecast(alone, num_samples=1000, origin_reads=800, num_workers=1).seconds == pytest.approx(100.0)


def test_a_shorter_epoch_is_shorter_in_all_its_parts() -> None:
    after = forecast(SLOW_STORAGE, num_samples=500, origin_reads=400, num_workers=2)
    assert after.seconds == pytest.approx(25 + 2)
    assert after.step_seconds == pytest.approx(5.0)


def test_more_ranks_are_more_workers() -> None:
    two = dataclasses.replace(SLOW_STORAGE, num_ranks=2, num_workers=1)
    assert forecast(two, num_samples=1000, origin_reads=800, num_workers=1).load_seconds == pytest.approx(50.0)


def test_what_was_not_measured_is_not_guessed() -> None:
    cold = dataclasses.replace(SLOW_STORAGE, cache_reads=0, origin_reads=1000)
    assert forecast(cold, num_samples=1000, origin_reads=0, num_workers=2).load_seconds == pytest.approx((2 + 18) / 2)


def test_without_a_cache_its_time_is_saved_and_every_sample_is_read() -> None:
    plain = forecast(SLOW_STORAGE, num_samples=1000, origin_reads=1000, num_workers=2, cached=False)
    assert plain.seconds == pytest.approx((100 + 18) / 2 + 2)
    assert plain.shares["cache"] == 0.0


@pytest.mark.parametrize(("change", "workers"), [({}, -1), ({"num_samples": 0.0}, 2), ({"seconds": 0.0}, 2)])
def test_what_cannot_be_is_refused(change: dict[str, float], workers: int) -> None:
    measured = dataclasses.replace(SLOW_STORAGE, **change)
    with pytest.raises(ConfigError):
        forecast(measured, num_samples=1, origin_reads=1, num_workers=workers)
