"""Predictions follow from the rates and the config; background work costs the training little."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from measure import CodecCost, Costs
from predict import predict

from shade.checkpoint._strategies.base import StrategyConfig
from shade.errors import ConfigError

COSTS = Costs(
    state_bytes=1_000_000_000,
    step_seconds=1.0,
    pass_seconds=0.8,
    copy_rate=2e9,  # 0.5 s
    burst_rate=4e9,  # 0.25 s
    hash_rate=10e9,  # 0.1 s
    copy_drag=0.2,
    work_drag=0.1,
    write_rate=1e9,  # 1 s
    commit_seconds=0.02,
)


def test_stop_and_copy() -> None:
    found = predict(COSTS, StrategyConfig(save_waits_for="copied"))
    assert found.stall_seconds == pytest.approx(0.25)
    assert found.drag_seconds == pytest.approx(0.1 * (0.1 + 1.0))
    assert found.kept_seconds == pytest.approx(0.35)
    assert found.committed_seconds is None
    assert found.durable_seconds == found.safe_seconds == pytest.approx(1.37)
    assert found.recover_storage_seconds == found.recover_seconds == pytest.approx(1.1)
    assert found.recover_own_seconds == pytest.approx(0.6)


def test_a_background_copy_is_hidden_by_the_pass_and_drags() -> None:
    found = predict(COSTS, StrategyConfig())
    assert found.stall_seconds == 0.0
    assert found.drag_seconds == pytest.approx(0.2 * 0.6 + 0.1 * 1.1)
    short = predict(dataclasses.replace(COSTS, pass_seconds=0.2), StrategyConfig())
    assert short.stall_seconds == pytest.approx(0.5 * 1.2 - 0.2)
    assert short.drag_seconds < found.drag_seconds


def test_a_wait_does_not_drag() -> None:
    found = predict(COSTS, StrategyConfig(save_waits_for="durable"))
    assert found.stall_seconds == pytest.approx(0.25 + 0.1 + 1.0 + 0.02)
    assert found.drag_seconds == 0.0
    later = predict(COSTS, StrategyConfig(step_waits_for="durable"))
    assert later.stall_seconds == pytest.approx(0.6 + 0.1 + 1.0 + 0.02 - 0.8)


def test_streamed_chunks_take_as_long_as_the_slowest_part() -> None:
    assert predict(COSTS, StrategyConfig(streams=True)).safe_seconds == pytest.approx(1.02)
    assert predict(COSTS, StrategyConfig()).safe_seconds == pytest.approx(0.6 + 0.1 + 1.0 + 0.02)


def test_with_a_codec_chunks_are_streamed_to_storage_and_not_to_cluster_memory() -> None:
    costs = dataclasses.replace(COSTS, codecs={"zstd": CodecCost(ratio=2.0, encode_rate=0.5e9)})
    config = StrategyConfig(streams=True, codec="zstd")
    assert predict(costs, config).safe_seconds == pytest.approx(2.0 + 0.05 + 0.02), "encoding is the slowest part"
    found = predict(dataclasses.replace(costs, send_rate=0.5e9), config)
    assert found.safe_seconds == pytest.approx(0.6 + 2.0 + 0.05 + 1.0 + 0.02)


def test_with_a_cluster_memory_comes_first() -> None:
    found = predict(dataclasses.replace(COSTS, send_rate=0.5e9, fetch_rate=2e9), StrategyConfig())
    assert found.committed_seconds == found.safe_seconds == pytest.approx(0.6 + 0.1 + 2.0 + 0.02)
    assert found.durable_seconds == pytest.approx(found.safe_seconds + 1.0 + 0.02)
    assert found.recover_seconds == found.recover_cluster_seconds == pytest.approx(0.5 + 0.1)


def test_shared_memory_alone() -> None:
    found = predict(dataclasses.replace(COSTS, write_rate=None), StrategyConfig())
    assert found.safe_seconds == found.kept_seconds == pytest.approx(0.7)
    assert found.recover_seconds == found.recover_own_seconds
    assert found.durable_seconds is None


def test_a_codec_costs_time_and_saves_bytes() -> None:
    slow = dataclasses.replace(COSTS, write_rate=0.1e9, codecs={"zstd": CodecCost(1e9, 2.0)})
    plain, packed = predict(slow, StrategyConfig()), predict(slow, StrategyConfig(codec="zstd"))
    assert packed.stored_bytes == plain.stored_bytes / 2
    assert plain.safe_seconds == pytest.approx(0.6 + 0.1 + 10.0 + 0.02)
    assert packed.safe_seconds == pytest.approx(0.6 + 1.0 + 0.05 + 5.0 + 0.02)
    with pytest.raises(ConfigError, match="codec 'zstd' to be measured"):
        predict(COSTS, StrategyConfig(codec="zstd"))


def test_costs_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    costs = dataclasses.replace(COSTS, codecs={"zstd": CodecCost(1e9, 2.0)})
    costs.save(path)
    assert Costs.load(path) == costs
    for text in ("", "[]", "{}", '{"state_bytes": 1}', '{"state_bytes": 1, "codecs": 3}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="a file of measured costs"):
            Costs.load(path)


@pytest.mark.parametrize(("field", "value"), [("step_seconds", 0.0), ("copy_rate", -1.0), ("pass_seconds", 2.0)])
def test_refuses_impossible_costs(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        dataclasses.replace(COSTS, **{field: value})
