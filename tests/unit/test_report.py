"""What the report says is what the rows say, over ranks, resumed epochs and torn lines."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shade.errors import DataError
from shade.report import load_run, write_comparison, write_report
from shade.report.text import sparkline


def row(epoch: int, rank: int = 0, **fields: Any) -> dict[str, Any]:
    return {"kind": "epoch", "epoch": epoch, "rank": rank, "world_size": 2, **fields}


def write_run(folder: Path, rows: list[dict[str, Any]], plan: dict[str, Any] | None = None, tail: str = "") -> Path:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + tail)
    if plan is not None:
        (folder / "run.json").write_text(json.dumps(plan))
    return folder


def test_ranks_add_up(tmp_path: Path) -> None:
    one = row(0, 0, samples=300, hits=200, misses=100, origin_reads=100, epoch_seconds=2.0, loss=1.0,
              stall_seconds={"origin": 1.0, "wait": 0.5})  # fmt: skip
    two = row(0, 1, samples=100, hits=100, misses=0, origin_reads=0, epoch_seconds=4.0, loss=2.0,
              stall_seconds={"origin": 3.0, "wait": None})  # fmt: skip
    (epoch,) = load_run(write_run(tmp_path, [one, two])).epochs
    assert epoch.ranks == 2
    assert epoch.counts == {"samples": 400, "hits": 300, "misses": 100, "origin_reads": 100}
    assert epoch.hit_ratio == 0.75
    assert epoch.epoch_seconds == 4.0
    assert epoch.samples_per_second == 100.0
    assert epoch.loss == pytest.approx(1.25)
    assert epoch.stall_seconds == {"origin": 2.0, "wait": 0.25}


def test_the_parts_of_a_resumed_epoch_add_up_and_the_last_loss_stands(tmp_path: Path) -> None:
    parts = [
        row(3, 0, samples=10, hits=4, misses=6, epoch_seconds=1.0, loss=9.0, val_accuracy=0.5, resident_bytes=100),
        row(3, 1, samples=10, hits=4, misses=6, epoch_seconds=1.0, loss=9.0),
        row(3, 0, samples=30, hits=16, misses=14, epoch_seconds=2.0, loss=1.0, val_accuracy=0.8, resident_bytes=300),
        row(3, 1, samples=30, hits=16, misses=14, epoch_seconds=2.5, loss=3.0, val_accuracy=None, resident_bytes=300),
    ]
    (epoch,) = load_run(write_run(tmp_path, parts)).epochs
    assert (epoch.counts["samples"], epoch.counts["hits"], epoch.ranks) == (80, 40, 2)
    assert (epoch.epoch_seconds, epoch.loss, epoch.val_accuracy, epoch.resident_bytes) == (3.5, 2.0, 0.8, 300)


def test_torn_lines_and_other_kinds_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = [row(1, samples=5), {"kind": "note", "epoch": 7}, row(0, samples=5)]
    run = load_run(write_run(tmp_path, rows, tail='\n{"kind":"epoch","epo'))
    assert [e.epoch for e in run.epochs] == [0, 1]
    assert run.num_torn == 1
    assert "1 torn line(s)" in write_report(tmp_path)


def test_a_row_that_knows_nothing_is_dashes_and_not_zeros(tmp_path: Path) -> None:
    text = write_report(write_run(tmp_path, [row(0, loss=None, hits=None, stall_seconds=None, receipt=None)]))
    line = next(line for line in text.splitlines() if line.startswith("    0 "))
    assert set(line.split()[1:]) == {"-"}
    with (tmp_path / "epochs.csv").open() as file:
        (written,) = csv.DictReader(file)
    assert written["epoch"] == "0"
    assert written["hits"] == written["stall_origin_seconds"] == written["loss"] == ""
    with Image.open(tmp_path / "report.png") as picture:
        assert picture.size[0] > 1000


def full_run(folder: Path) -> Path:
    rows = [
        row(epoch, rank, num_samples=200, samples=100, hits=60 * (epoch > 0), misses=100 - 60 * (epoch > 0),
            origin_reads=100 - 60 * (epoch > 0), origin_bytes=2048, cache_bytes=1024, duplicates=3, corrupt=epoch,
            epoch_seconds=2.0, stall_seconds=dict.fromkeys(("origin", "cache", "decode", "transform", "wait"), 0.25),
            resident_bytes=900, capacity_bytes=1000, loss=2.0 - epoch, train_accuracy=0.5,
            val_accuracy=0.25 + epoch / 2, receipt={"drawn": 200, "weight_sum_z": -1.5, "effective_sample_size": 180.0})
        for epoch in range(2) for rank in range(2)
    ]  # fmt: skip
    plan = {
        "network": "cnn",
        "cache": {"url": "redis://user:secret@host:1/0"},
        "num_samples": 999,
        "none": None,
    }
    return write_run(folder, rows, plan)


def test_the_text_holds_the_figures_and_what_they_mean(tmp_path: Path) -> None:
    text = write_report(full_run(tmp_path))
    joined = " ".join(text.split())
    assert text == (tmp_path / "report.txt").read_text()
    table = [line.split() for line in text.splitlines() if line[:6] in ("    0 ", "    1 ")]
    assert table[0] == ["0", "2.0000", "50.0%", "25.0%", "200", "0.0%", "200", "1.000", "2.00", "100"]
    assert table[1][5:8] == ["60.0%", "80", "0.400"]
    assert table[2] == ["0", "-"] + ["0.25"] * 5 + ["-"]
    whole = [line.split() for line in text.splitlines() if line.startswith("  run ")]
    assert whole[0] == ["run", "1.0000", "50.0%", "75.0%", "400", "30.0%", "280", "0.700", "4.00", "100"]
    assert whole[1] == ["run", "-"] + ["0.50"] * 5 + ["-"]
    assert "280 origin reads: 30.0% fewer than one for each sample used." in text
    assert "reads all 200 samples every epoch makes 400: this run made 30.0% fewer." in joined
    assert "Hit ratio 30.0%: 120 hits, 280 misses." in text
    assert "8.0 KiB from the origin, 4.0 KiB from the cache" in text
    assert "900 B of 1,000 B (90.0%)" in text
    assert "largest |z| 1.50, sound; least effective sample size 90.0% of those drawn" in joined
    assert "2 entries came back from the store damaged" in joined
    assert "secret" not in text
    assert "cache.url" in text
    assert "redis://***@host:1/0" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("cache", "store_errors", "cause"),
    [
        (
            "redis+cluster://:***@h:7000,h:7001?sockets=/x",
            0,
            "a node of the cluster was gone, slow or full; `shade doctor --cache redis+cluster://h:7000,h:7001` says",
        ),
        ("local://", 0, "larger than estimated, and the private cache had no room; a larger -wss gives it more."),
        ("local://", 3, "the server did not answer."),
        ("redis://h:1", 0, "the server was full, or other jobs use the capacity; `shade doctor --cache redis://h:1`"),
        ("redis://h:1", 3, "the server did not answer; `shade doctor --cache redis://h:1` says more."),
    ],
)
def test_what_was_not_admitted_has_a_cause_that_can_be(
    cache: str, store_errors: int, cause: str, tmp_path: Path
) -> None:
    rows = [row(0, samples=9, declined=7, store_errors=store_errors)]
    text = write_report(write_run(tmp_path, rows, {"cache": cache}))
    assert f" 7 samples were not admitted: {cause}" in " ".join(text.split()).replace("they were ", "")


def test_a_broken_draw_is_called_broken(tmp_path: Path) -> None:
    text = write_report(write_run(tmp_path, [row(0, samples=1, receipt={"weight_sum_z": 5.0})]))
    assert "largest |z| 5.00, BROKEN" in text


def test_the_csv_has_a_line_per_epoch(tmp_path: Path) -> None:
    write_report(full_run(tmp_path))
    with (tmp_path / "epochs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["epoch"], r["samples"], r["hit_ratio"], r["origin_reads_per_n"]) for r in rows] == [
        ("0", "200", "0.0", "1.0"),
        ("1", "200", "0.6", "0.4"),
    ]
    assert rows[1]["receipt_effective_sample_size"] == "180.0"


@pytest.mark.parametrize("num_epochs", [1, 60])
def test_the_picture_is_drawn_for_short_and_long_runs(tmp_path: Path, num_epochs: int) -> None:
    write_run(tmp_path, [row(e, loss=1.0, hits=1, misses=1, origin_reads=1) for e in range(num_epochs)])
    assert "report.png" not in write_report(tmp_path)
    with Image.open(tmp_path / "report.png") as picture:
        colours = picture.convert("RGB").getcolors(1 << 24)
    assert colours is not None
    assert len(colours) > 50


@pytest.mark.multiprocess
def test_without_matplotlib_the_report_says_so(tmp_path: Path) -> None:
    full_run(tmp_path)
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from shade.report import write_report; text = write_report(sys.argv[1])\n"
        "assert 'No report.png: matplotlib is not installed' in text and 'Hit ratio 30.0%' in text\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    assert not (tmp_path / "report.png").exists()


@pytest.mark.parametrize(("content", "cure"), [(None, "name a run"), ("", "let the run finish an epoch")])
def test_no_run_is_one_line(tmp_path: Path, content: str | None, cure: str) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(DataError, match=cure):
        load_run(tmp_path)


def test_a_sparkline_spans_its_values_and_leaves_gaps() -> None:
    assert sparkline([0.0, 1.0, None, 0.5]) == "▁█ ▅"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([None]) == ""


def test_a_comparison_has_three_lines_side_by_side_and_a_picture(tmp_path: Path) -> None:
    figures = {"plain": (3.0, 2000, 0.975), "shade": (1.0, 1000, 0.98)}
    for name, (seconds, num_bytes, accuracy) in figures.items():
        (tmp_path / name).mkdir()
        fields = {"samples": 100, "epoch_seconds": seconds, "origin_bytes": num_bytes, "val_accuracy": accuracy}
        write_run(tmp_path / name, [row(e, **fields) for e in range(2)], {"workers": 16 if name == "plain" else 2})
    told = write_comparison(tmp_path / "plain", tmp_path / "shade").splitlines()
    assert [" ".join(line.split()) for line in told[1:7]] == [
        "plain DataLoader shade",
        "16 workers 2 workers",
        "samples a second 33 100 3.0 × as fast",
        "seconds an epoch 3.00 1.00",
        "read from storage 3.9 KiB 2.0 KiB 50.0% less",
        "accuracy 97.5% 98.0% +0.5 points",
    ]
    assert told[-1] == str(tmp_path / "shade" / "comparison.png")
    with Image.open(tmp_path / "shade" / "comparison.png") as picture:
        assert picture.width > 1000


def test_a_comparison_that_shade_loses_says_so(tmp_path: Path) -> None:
    for name, seconds in (("plain", 1.0), ("shade", 2.0)):
        (tmp_path / name).mkdir()
        write_run(tmp_path / name, [row(0, samples=9, epoch_seconds=seconds, origin_bytes=10, val_accuracy=0.9)])
    assert "2.0 × as slow" in write_comparison(tmp_path / "plain", tmp_path / "shade")
