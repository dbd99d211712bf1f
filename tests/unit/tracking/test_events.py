"""Events of a training reach every sink that listens, whole, and a sink that fails ends no training."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from shade import Checkpointer, GradientEngine, SparseSGD, tracking
from shade.errors import ConfigError
from shade.tracking.events import EXCHANGE_STEPS
from tests.support.collector import Collector


class Collected:
    """A sink that keeps all."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.is_closed = False

    def write(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)

    def close(self) -> None:
        self.is_closed = True


class Broken(Collected):
    def write(self, row: Mapping[str, Any]) -> None:
        super().write(row)
        raise OSError("the disk is full")


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    running = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", running.url)
    yield running
    running.close()


def train(folder: Path, run: str) -> None:
    """Saves twice, restores, and exchanges 50 gradients."""
    model = torch.nn.Linear(4, 2)
    with Checkpointer(persist_to=folder, run=run, every="never") as checkpointer:
        checkpointer.attach(model=model)
        checkpointer.step()
        checkpointer.save()
        checkpointer.wait_committed()
        checkpointer.restore_latest()
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), density=0.5) as engine:
        for _ in range(EXCHANGE_STEPS):
            engine.num_samples = 1
            model(torch.ones(1, 4)).sum().backward()
            engine.step()
        engine.finish()


@pytest.mark.multiprocess
def test_a_save_a_restore_and_exchanges_are_events(tmp_path: Path, run: str) -> None:
    sink = Collected()
    with tracking.listen(sink):
        train(tmp_path, run)
    assert sink.is_closed
    found = {row["kind"]: row for row in sink.rows}
    assert set(found) == {"save", "restore", "exchange"}
    assert (found["save"]["step"], found["save"]["tier"], found["save"]["rank"]) == (1, "storage", 0)
    assert found["save"]["state_bytes"] == found["restore"]["state_bytes"] > 0
    assert found["exchange"]["steps"] == EXCHANGE_STEPS
    assert found["exchange"]["seconds"] == found["exchange"]["exchange_seconds"] >= 0
    train(tmp_path, run)
    assert len(sink.rows) == 3


def test_a_sink_that_fails_gets_no_more_and_others_do(caplog: pytest.LogCaptureFixture) -> None:
    broken, sound = Broken(), Collected()
    with tracking.listen(broken, sound):
        for step in range(2):
            tracking.emit("save", 0.5, step=step)
    assert (len(broken.rows), len(sound.rows)) == (1, 2)
    assert "Broken failed and gets no further events" in caplog.text


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no tracker named 'mlfow' \(did you mean 'mlflow'\?\); known: otlp, mlflow"):
        tracking.listen("mlfow")


def test_otlp_gets_spans_and_metrics_after_its_conventions(collector: Collector) -> None:
    with tracking.listen("otlp"):
        tracking.emit("load", 2.0, epoch=0, hits=30, origin_bytes=1000, hit_ratio=0.3, stall_seconds={"cache": 0.5})
        tracking.emit("load", 1.0, epoch=1, hits=70, origin_bytes=500, hit_ratio=0.7, stall_seconds={"cache": 0.25})
        tracking.emit("save", 0.1, step=3, rank=1, error="CheckpointError")
    assert collector.services == {"shade"}
    load, _, save = collector.spans
    assert (load.name, load.end_time_unix_nano - load.start_time_unix_nano) == ("shade.load", 2_000_000_000)
    assert {each.key: each.value.double_value for each in load.attributes}["shade.load.hits"] == 30
    assert (save.status.code, save.name) == (2, "shade.save")
    assert {each.key: each.value.string_value for each in save.attributes}["error.type"] == "CheckpointError"
    metrics = collector.metrics
    assert [point.as_double for point in metrics["shade.load.hits"].sum.data_points] == [100]
    assert [point.as_double for point in metrics["shade.load.hit_ratio"].gauge.data_points] == [0.7]
    assert (metrics["shade.load.origin.size"].unit, metrics["shade.load.duration"].unit) == ("By", "s")
    assert [point.count for point in metrics["shade.load.duration"].histogram.data_points] == [2]
    assert metrics["shade.load.stall_seconds.cache"].sum.data_points[0].as_double == 0.75


@pytest.mark.multiprocess
def test_mlflow_gets_numbers_over_epochs_and_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path}/mlruns")
    with tracking.listen("mlflow"):
        run = mlflow.active_run().info.run_id
        tracking.emit("load", 2.0, epoch=1, hits=30)
        thread = threading.Thread(target=lambda: tracking.emit("save", 0.5, step=7, state_bytes=100, tier="storage"))
        thread.start()
        thread.join()
    assert mlflow.active_run() is None
    client = mlflow.MlflowClient()
    metrics = client.get_run(run).data.metrics
    assert metrics == {
        "rank0/load/hits": 30, "rank0/load/epoch": 1, "rank0/load/seconds": 2.0,
        "rank0/save/state_bytes": 100, "rank0/save/step": 7, "rank0/save/seconds": 0.5,
    }  # fmt: skip
    assert [each.step for each in client.get_metric_history(run, "rank0/save/seconds")] == [7]


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_run_of_wandb_or_trackio_gets_numbers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in (("WANDB_MODE", "offline"), ("WANDB_DIR", str(tmp_path)), ("TRACKIO_DIR", str(tmp_path))):
        monkeypatch.setenv(variable, value)
    module = pytest.importorskip(name)
    logged: list[dict[str, float]] = []
    made = module.init

    def init(**options: Any) -> Any:
        run = made(**options)
        log = run.log
        monkeypatch.setattr(run, "log", lambda numbers: (logged.append(numbers), log(numbers)))
        return run

    monkeypatch.setattr(module, "init", init)
    with tracking.listen(name):
        tracking.emit("save", 0.5, step=7, state_bytes=100)
    assert logged == [{"rank0/save/state_bytes": 100, "rank0/save/step": 7, "rank0/save/seconds": 0.5}]
    assert list(tmp_path.rglob("*.db")) or list(tmp_path.rglob("*.wandb"))


def test_tensorboard_gets_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    with tracking.listen("tensorboard"):
        tracking.emit("save", 0.5, step=7, state_bytes=100)
    read = EventAccumulator(str(tmp_path / "runs" / "tensorboard"))
    read.Reload()
    assert {"rank0/save/seconds", "rank0/save/state_bytes"} <= set(read.Tags()["scalars"])
    assert read.Scalars("rank0/save/seconds")[0].step == 7
