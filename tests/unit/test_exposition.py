"""A rank's Prometheus page: fresh, on disk, and with all of a machine's ranks behind one URL."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from shade.config import RunConfig
from shade.errors import ConfigError
from shade.gradient._engine.meter import COUNTS
from shade.telemetry import Histogram, join_pages, prometheus_text
from shade.train.exposition import GAUGES, MEANING, Exposition, page_name

ROOT = Path(__file__).resolve().parents[2]

ROW = {
    "gradient": {"gradient_bytes_sent": 100, "gradient_secret": 1},
    "checkpoint": {"saves": 2, "failed": 1, "blocked_seconds": 0.5},
    "loss": 1.5, "val_accuracy": None, "hit_ratio": 0.75,
}  # fmt: skip


def config(out: Path, **more: object) -> RunConfig:
    settings = {"processes": 2, "metrics_port": 0} | more
    return RunConfig(str(out), "script.py", ("data",), **settings)  # type: ignore[arg-type]


def scrape(url: str | None) -> dict[str, float]:
    """The page, read as a scraper reads it: each metric's lines together, under one header."""
    assert url is not None
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(families) == len(set(families)), "a second header"
    found: dict[str, float] = {}
    family = ""
    for line in text.splitlines():
        if line.startswith("# "):
            family = line.split()[2]
        else:
            match = re.fullmatch(r"([a-z_]+)(\{.*\})? (\S+)", line)
            assert match, line
            assert match[1].startswith(family), line
            found[match[1] + (match[2] or "")] = float(match[3])
    return found


def test_the_first_rank_serves_all_of_its_machine(tmp_path: Path) -> None:
    ranks = [Exposition(config(tmp_path), rank, rank) for rank in range(2)]
    waits = Histogram()
    waits.observe(0.25)
    for rank, exposition in enumerate(ranks):
        exposition.end_epoch(ROW)
        exposition.end_epoch(ROW)
        exposition.write({"hits": 10 + rank, "busy_seconds": 3, "stall_origin_seconds": 1.5}, {"epoch": 3}, waits)
    (tmp_path / page_name(7)).write_text(prometheus_text({"hits": 1}, MEANING, labels={"rank": 7}))
    found = scrape(ranks[0].url)
    assert ranks[1].url is None
    assert found['shade_hits_total{rank="0"}'] == 10
    assert found['shade_hits_total{rank="1"}'] == 11
    assert found['shade_stall_origin_seconds_total{rank="1"}'] == 1.5
    assert found['shade_gradient_bytes_sent_total{rank="0"}'] == 200
    assert found['shade_snapshots_total{rank="0"}'] == 4
    assert found['shade_snapshot_blocked_seconds_total{rank="0"}'] == 1.0
    assert found['shade_epoch{rank="1"}'] == 3
    assert found['shade_hit_ratio{rank="0"}'] == 0.75
    assert found['shade_wait_seconds_count{rank="1"}'] == 1
    assert not [name for name in found if "secret" in name or "busy" in name or "val_accuracy" in name]
    assert not [name for name in found if 'rank="7"' in name], "left by a run with more ranks"
    for exposition in ranks:
        exposition.close()
        exposition.close()


def test_the_url_is_of_this_machine_alone_and_ends_with_the_run(tmp_path: Path) -> None:
    exposition = Exposition(config(tmp_path), 0, 0)
    url = exposition.url
    assert url is not None
    assert url.startswith("http://127.0.0.1:")
    exposition.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=10)


def test_without_a_port_there_are_files_alone(tmp_path: Path) -> None:
    exposition = Exposition(config(tmp_path, metrics_port=None), 0, 0)
    assert exposition.is_due
    exposition.write({"hits": 1}, {}, Histogram())
    assert not exposition.is_due
    assert exposition.url is None
    assert 'shade_hits_total{rank="0"} 1' in (tmp_path / "rank0.prom").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.prom"]
    exposition.close()


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    first = Exposition(config(tmp_path), 0, 0)
    assert first.url is not None
    port = int(first.url.split(":")[2].split("/")[0])
    with pytest.raises(ConfigError, match=str(port)):
        Exposition(config(tmp_path, metrics_port=port), 0, 0)
    first.close()


def test_pages_join_by_metric() -> None:
    meaning = {"hits": "Hits.", "epoch": "Which."}
    pages = [prometheus_text({"hits": n}, meaning, labels={"rank": n}, gauges={"epoch": n}) for n in range(2)]
    assert join_pages(pages).splitlines() == [
        "# HELP shade_hits_total Hits.",
        "# TYPE shade_hits_total counter",
        'shade_hits_total{rank="0"} 0.0',
        'shade_hits_total{rank="1"} 1.0',
        "# HELP shade_epoch Which.",
        "# TYPE shade_epoch gauge",
        'shade_epoch{rank="0"} 0.0',
        'shade_epoch{rank="1"} 1.0',
    ]
    assert join_pages([]) == ""


def test_a_gauge_that_is_no_number_is_left_out() -> None:
    assert "epoch" not in prometheus_text({}, {"epoch": "Which."}, gauges={"epoch": float("nan")})


def test_the_dashboard_asks_for_metrics_that_a_page_has(tmp_path: Path) -> None:
    gradient = dict.fromkeys(COUNTS, 1.0)
    counts = dict.fromkeys({*MEANING, *gradient} - GAUGES - {"wait_seconds"}, 1.0)
    page = prometheus_text(counts, MEANING, {"wait_seconds": Histogram()}, {"rank": 0}, dict.fromkeys(GAUGES, 1.0))
    known = set(re.findall(r"^(shade_\w+)\{", page, re.MULTILINE)) | {"shade_wait_seconds_bucket"}
    panels = json.loads((ROOT / "deploy" / "grafana" / "shade.json").read_text())["panels"]
    asked = {
        name for panel in panels for target in panel["targets"] for name in re.findall(r"shade_\w+", target["expr"])
    }
    assert len(asked) > 15
    assert asked - known == set()
