"""report.html stands alone, says what the rows say, and shows a hostile run instead of running it."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shade.report import write_report
from shade.report.page import Scale, Series, bar_chart, line_chart, ticks
from shade.report.style import PALETTE, percent

VOID = {"meta", "img"}


class Page(HTMLParser):
    """Every tag, closed as it was opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


def write_run(folder: Path, num_epochs: int = 3, plan: dict[str, Any] | None = None, **more: Any) -> Path:
    rows = [
        {
            "kind": "epoch", "epoch": epoch, "rank": rank, "world_size": 2, "num_samples": 200, "samples": 100,
            "hits": 60 * (epoch > 0), "misses": 100 - 60 * (epoch > 0), "origin_reads": 100 - 60 * (epoch > 0),
            "epoch_seconds": 2.0, "step_seconds": 1.25, "loss": 2.0 / (1 + epoch), "train_accuracy": 0.5,
            "stall_seconds": {"origin": 0.3, "cache": 0.1, "decode": 0.2, "transform": 0.05, "wait": 0.1},
            "val_accuracy": 0.25 + epoch / 4, "resident_bytes": 900, "capacity_bytes": 1000, **more,
        }
        for epoch in range(num_epochs) for rank in range(2)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.json").write_text(json.dumps(plan or {"network": "cnn", "cache": "redis://u:secret@h:1/0"}))
    return folder


def page_of(folder: Path) -> Page:
    write_report(folder)
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert page.open == []
    return page


def test_it_needs_nothing_but_itself(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path))
    source = (tmp_path / "report.html").read_text()
    assert not re.search(r"https?:|@import|url\(|//[a-z]", source.replace("redis://", ""))
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not [attributes for _, attributes in page.tags if {"src", "href", "onload", "onclick"} & set(attributes)]
    assert "prefers-color-scheme: dark" in source


def test_it_says_what_the_rows_say(tmp_path: Path) -> None:
    gradient = {"gradient_bytes_sent": 4096, "gradient_steps": 10}
    page = page_of(write_run(tmp_path, gradient=gradient, checkpoint={"saves": 2, "blocked_seconds": 0.5}))
    for told in ("60.0%", "0.400", "37.5%", "75.0%", "24.0 KiB", "240 of 600 samples", "Hit ratio 40.0%: 240 hits"):
        assert told in page.text, told
    titles = re.findall(r"<title>([^<]*)</title>", (tmp_path / "report.html").read_text())[1:]
    assert "hit ratio, epoch 1: 60.0%" in titles
    assert "origin reads, epoch 2: 80" in titles
    assert "step, epoch 0: 1.25 s" in titles
    assert "decode, epoch 0: 0.2 s" in titles
    assert "waited for snapshots, epoch 1: 0.5 s" in titles
    assert "sent, epoch 1: 8.0 KiB" in titles
    assert "secret" not in page.text
    assert "redis://***@h:1/0" in page.text


BUSY = {"origin": 6.0, "cache": 0.5, "decode": 0.4, "transform": 0.1}


def test_results_come_first_and_settings_last(tmp_path: Path) -> None:
    write_run(tmp_path)
    page = page_of(tmp_path)
    order = ["validation accuracy", "plain loading", "Hit ratio", "Numbers", "Details", "Settings", "redis://***@h:1/0"]
    places = [page.text.index(word) for word in order]
    assert places == sorted(places)
    text = (tmp_path / "report.txt").read_text()
    places = [text.index(word) for word in ("Results", "plain loading", "Epochs", "Details", "How to", "Settings")]
    assert places == sorted(places)


def test_a_card_is_of_the_whole_run(tmp_path: Path) -> None:
    """The last epoch of this run is untypical: it reads all samples from the origin."""
    write_run(tmp_path, plan={"cache": "local://"})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for row in rows[-2:]:
        row |= {"hits": 0, "misses": 100, "origin_reads": 100, "epoch_seconds": 8.0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page_of(tmp_path)
    source = (tmp_path / "report.html").read_text()
    cards = dict(re.findall(r'<div class="tile"><span>([^<]*)</span><b>([^<]*)</b>', source))
    assert cards["hit ratio"] == "20.0%"
    assert cards["origin reads/N"] == "0.800"
    assert cards["samples/s"] == "50"
    assert cards["time"] == "12.0 s"
    (run,) = re.findall(r'<tr class="run">(.*)</tr>', source)
    assert re.findall(r"<td>([^<]*)</td>", run)[:10] == [
        "run", "0.6667", "50.0%", "75.0%", "600", "20.0%", "480", "0.800", "50", "12.00"
    ]  # fmt: skip


def test_it_compares_with_plain_loading_and_says_that_this_is_predicted(tmp_path: Path) -> None:
    """120 of 200 samples come from the cache; loading takes 7 s of two ranks with a worker, and decides."""
    more = {"busy_seconds": BUSY, "cache_reads": 60, "origin_reads": 40, "misses": 40, "hits": 60, "origin_bytes": 4096}
    write_run(tmp_path, plan={"workers": 1, "cache": "local://"}, **more, epoch_seconds=8.0)
    page = page_of(tmp_path)
    assert "predicted, not measured" in page.text
    source = (tmp_path / "report.html").read_text()
    compared = re.findall(r'<tr><td class="text">(.*?)</td><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>', source)
    assert compared == [
        ("samples an epoch", "200", "200", "0.0% fewer"),
        ("origin reads an epoch", "80", "200", "60.0% fewer"),
        ("read from storage an epoch", "8.0 KiB", "20.0 KiB", "60.0% less"),
        # 8.0 s were 7.0 s of loading and 1.0 s of something else; now 15.5 s of loading.
        ("seconds an epoch", "8.00", "16.50", ""),
        ("samples a second", "25", "12", "2.1 × as fast"),
    ]
    assert "2.1 ×" in dict(re.findall(r"<span>([^<]*)</span><b>([^<]*)</b>", source))["speed"]
    assert source.count('class="rule"') == 3
    text = (tmp_path / "report.txt").read_text()
    assert "Compared with plain loading (predicted, not measured)" in text
    assert "with 1 worker a rank and no cache" in " ".join(text.split())


def test_where_plain_loading_was_measured_beside_the_run_that_is_shown(tmp_path: Path) -> None:
    more = {"busy_seconds": BUSY, "cache_reads": 60, "origin_reads": 40, "misses": 40, "hits": 60, "origin_bytes": 4096}
    write_run(tmp_path, plan={"workers": 1, "cache": "local://"}, **more, epoch_seconds=8.0)
    (tmp_path / "plain").mkdir()
    write_run(tmp_path / "plain", plan={"workers": 16, "cache": "none"}, origin_reads=100, epoch_seconds=40.0)
    page = page_of(tmp_path)
    source = (tmp_path / "report.html").read_text()
    assert "predicted" not in page.text
    assert "5.0 ×" in dict(re.findall(r"<span>([^<]*)</span><b>([^<]*)</b>", source))["speed"]
    assert "as plain loading (measured)" in source
    assert "plain loading, 5 samples/s (measured)" in page.text
    text = " ".join((tmp_path / "report.txt").read_text().split())
    assert "Compared with plain loading (measured, beside this run)" in text
    assert "samples a second 25 5 5.0 × as fast" in text
    assert "with 16 workers, the number that read fastest" in text


@pytest.mark.parametrize(("plan", "more"), [({"cache": "none"}, {}), ({}, {"origin_reads": 0})])
def test_without_a_cache_or_a_read_nothing_is_compared(
    tmp_path: Path, plan: dict[str, Any], more: dict[str, int]
) -> None:
    page = page_of(write_run(tmp_path, plan={"network": "cnn"} | plan, busy_seconds=BUSY, **more))
    assert "predicted" not in page.text


def test_one_colour_has_one_meaning() -> None:
    for shades in zip(*PALETTE.values(), strict=True):
        assert len(set(shades)) == len(PALETTE)


def test_a_colour_and_its_meaning_keep_together_in_every_figure(tmp_path: Path) -> None:
    gradient = {"gradient_bytes_sent": 4096, "gradient_steps": 10}
    checkpoint = {"saves": 2, "blocked_seconds": 0.5}
    page_of(write_run(tmp_path, gradient=gradient, checkpoint=checkpoint, busy_seconds=BUSY, val_loss=1.0))
    source = (tmp_path / "report.html").read_text()
    pairs = set(re.findall(r'<i class="(\w+)"></i>([^<]*)</span>', source))
    assert len(pairs) == len({name for _, name in pairs})
    assert {colour for colour, _ in pairs} == set(PALETTE)


def test_what_is_not_known_has_no_panel_and_no_zero(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "epoch", "epoch": 0, "rank": 0}) + "\n")
    page = page_of(tmp_path)
    assert "Gradients sent" not in page.text
    assert "Snapshots" not in page.text
    assert "nothing of this in the run" in page.text
    assert set(re.findall(r"<td>([^<]*)</td>", (tmp_path / "report.html").read_text())) == {"0", "run", "–"}


def test_a_hostile_run_is_shown_and_not_run(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    write_run(tmp_path, plan={"network": evil, evil: [evil, '"><img src=x onerror=alert(1)>']})
    (tmp_path / "quality.csv").write_text(
        f"index,sample,target,suspicion,confidence,usual_confidence\n1,{evil},{evil},1,0,1\n"
    )
    page = page_of(tmp_path)
    assert "script" not in {tag for tag, _ in page.tags}
    assert not [attributes for _, attributes in page.tags if "onerror" in attributes]
    assert evil in page.text


def test_the_samples_worth_a_look_are_in_it(tmp_path: Path) -> None:
    write_run(tmp_path)
    head = "index,sample,target,suspicion,confidence,usual_confidence\n"
    (tmp_path / "quality.csv").write_text(head + "7,/data/7.png,3,0.98,0.01,0.95\n")
    (tmp_path / "quality.png").write_bytes(b"\x89PNG picture")
    page = page_of(tmp_path)
    assert "/data/7.png" in page.text
    (source,) = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert str(source).startswith("data:image/png;base64,")
    (tmp_path / "quality.csv").write_text("something else\n")
    assert "Samples worth a look" not in page_of(tmp_path).text


@pytest.mark.parametrize("num_epochs", [1, 200])
def test_short_and_long_runs_fit(tmp_path: Path, num_epochs: int) -> None:
    page = page_of(write_run(tmp_path, num_epochs))
    for tag, attributes in page.tags:
        if tag == "rect":
            assert 0 <= float(str(attributes["x"])) <= 560
            assert 0 <= float(str(attributes["y"])) <= 230
    assert len((tmp_path / "report.html").read_bytes()) < 1_000_000


@pytest.mark.multiprocess
def test_it_is_written_without_matplotlib_and_torch(tmp_path: Path) -> None:
    write_run(tmp_path)
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from shade.report import write_report; write_report(sys.argv[1])\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=60)
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (0.0, 0.0), (3.0, 3.0), (-2.0, 5.0), (1e-9, 2e-9), (0.0, 123456.0), (0.93, 0.97)]
)
def test_ticks_are_round_and_span_the_axis(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 8
    assert found[0] <= low + 1e-12
    assert found[-1] >= high - 1e-12
    steps = {round((b - a) / (found[1] - found[0]), 6) for a, b in itertools.pairwise(found)}
    assert steps == {1.0}


def test_a_gap_parts_a_line_and_bars_stack() -> None:
    svg = line_chart([0, 1, 2, 3], [Series("x", "run", [1.0, None, 2.0, 3.0])], Scale("x, m", str, str))
    assert svg.count("<polyline") == 2
    assert svg.count("<circle") == 3
    assert ">x, m</text>" in svg
    assert ">epoch</text>" in svg
    bars = bar_chart([0], [Series("a", "step", [1.0]), Series("b", "origin", [3.0])], Scale("x", str, str))
    (a_y, a_height), (b_y, b_height) = (
        (float(y), float(h)) for y, h in re.findall(r'<rect[^>]* y="([\d.]+)"[^>]* height="([\d.]+)"', bars)
    )
    assert b_y + b_height == pytest.approx(a_y, abs=0.2)
    assert b_height == pytest.approx(3 * a_height, abs=0.3)


@pytest.mark.parametrize(
    ("share", "told"), [(0.0, "0.0%"), (0.0004, "<0.1%"), (0.0005, "0.1%"), (0.6, "60.0%"), (1.0, "100.0%")]
)
def test_a_percentage_has_one_form(share: float, told: str) -> None:
    assert percent(share) == told
