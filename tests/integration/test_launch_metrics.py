"""While a run goes on: its Prometheus page behind a URL, and what `shade top` shows of it."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from shade.cli import main
from tests.support.collector import Collector
from tests.support.launching import make_images, run, start, wait_for

pytestmark = pytest.mark.multiprocess


@pytest.mark.slow
def test_a_run_is_scraped_and_looked_at_while_it_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_images(tmp_path / "train", per_class=12)
    words = ("bench_cifar10.py", tmp_path / "train", "--network", "cnn", "--batch_size", "4", "-g", "2")
    out = tmp_path / "out"
    more = ("--workers", "1", "--epochs", "100000", "-wss", "0.4", "--metrics-port", "0", "--checkpoint-every", "never")
    launcher = start(*words, *more, "--out", out, cwd=tmp_path)

    def url() -> str | None:
        assert launcher.poll() is None, launcher.communicate()
        log = out / "output.log"
        told = re.search(r"scrape (http://127\.0\.0\.1:\d+/metrics)", log.read_text()) if log.exists() else None
        return told[1] if told else None

    def page() -> str | None:
        with urllib.request.urlopen(found, timeout=10) as answer:
            text = str(answer.read().decode())
        known = re.search(r'shade_hits_total\{rank="0"\} [1-9]', text) and 'shade_hit_ratio{rank="1"}' in text
        return text if known else None

    try:
        found = wait_for(url)
        text = wait_for(page)
        for rank in range(2):
            assert f'shade_origin_reads_total{{rank="{rank}"}}' in text
            assert f'shade_stall_decode_seconds_total{{rank="{rank}"}}' in text
            assert re.search(rf'shade_step_seconds_total\{{rank="{rank}"\}} 0*\.?\d', text)
        assert text.count("# TYPE shade_hits_total counter") == 1
        wait_for((out / "progress.json").exists)
        now = json.loads((out / "progress.json").read_text())
        assert now["loss"] > 0
        assert now["origin_bytes_per_second"] >= 0
        assert main(["top", str(out)]) == 0
        told = capsys.readouterr().out
        assert re.search(r"^epoch \d+, step \d+ of \d+: .* samples/s, hits", told, re.MULTILINE)
        assert re.search(r"^read [\d,]+ from the origin in this epoch, rank 0 of 2; time: ", told, re.MULTILINE)
        assert all(cause in told for cause in ("step", "origin", "cache", "decode", "transform", "wait"))
        assert re.search(r"primary +[\d.]+ [kM]B", told)
    finally:
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGINT
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(found, timeout=10)


def test_a_port_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    make_images(tmp_path / "train", per_class=2)
    told = run("bench_cifar10.py", tmp_path / "train", "--metrics-port", "70000", cwd=tmp_path)
    assert (told.returncode, told.stdout, told.stderr.count("\n")) == (2, "", 1)
    assert "--metrics-port below 65536" in told.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_appears_whole_in_otlp_mlflow_and_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    mlflow = pytest.importorskip("mlflow")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    collector = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    try:
        launcher = start("--track", "otlp,mlflow", cwd=tmp_path)
        told = launcher.communicate(timeout=800)
    finally:
        collector.close()
    assert launcher.returncode == 0, told
    (out,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    epochs = {row["epoch"]: row for row in rows if row["kind"] == "epoch" and "epoch_seconds" in row}
    num_saves = sum(row["checkpoint"]["saves"] for row in rows if "checkpoint" in row)
    assert len(epochs) == 10

    spans = [span for span in collector.spans if span.name == "shade.load"]
    by_epoch = {int(values["shade.load.epoch"]): values for values in map(numbers_of, spans)}
    assert {epoch: by_epoch[epoch]["shade.load.hits"] for epoch in epochs} == {e: r["hits"] for e, r in epochs.items()}
    assert sum(span.name == "shade.save" for span in collector.spans) == num_saves
    (total,) = collector.metrics["shade.load.origin_reads"].sum.data_points
    assert total.as_double == sum(row["origin_reads"] for row in rows if row["kind"] == "epoch")

    client = mlflow.MlflowClient(f"file://{tmp_path}/mlruns")
    (tracked,) = client.search_runs(["0"])
    assert tracked.info.status == "FINISHED"
    reads = client.get_metric_history(tracked.info.run_id, "rank0/load/origin_reads")
    assert {each.step: each.value for each in reads if each.step in epochs} == {
        epoch: row["origin_reads"] for epoch, row in epochs.items()
    }
    assert len(client.get_metric_history(tracked.info.run_id, "rank0/save/seconds")) == num_saves

    board = accumulator.EventAccumulator(str(out / "tensorboard"))
    board.Reload()
    losses = {each.step: each.value for each in board.Scalars("rank0/loss")}
    assert losses == pytest.approx({epoch: row["loss"] for epoch, row in epochs.items()})
    assert len(board.Scalars("rank0/save/seconds")) == num_saves


def numbers_of(span: Any) -> dict[str, float]:
    """A span's numbers."""
    return {each.key: each.value.double_value for each in span.attributes}
