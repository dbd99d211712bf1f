"""The benchmark of loaders: what is repeated is what the rules compare, and a bucket is read as a folder is."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCAL, BUCKET = "local disk", "bucket, 30 ms, 50 MB/s"


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("aiohttp")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_loaders

    return bench_loaders


def rows_of(rates: dict[tuple[str, float | None], float]) -> list[dict[str, Any]]:
    """Lines of round 0 on the local disk, by samples/s."""
    counts = {"samples": 1000, "num_samples": 1000, "num_bytes": 10, "bytes": 10, "opens": 1000, "cpu_seconds": 1.0}
    return [
        {"round": 0, "storage": LOCAL, "share": share, "method": name, "epoch": epoch, "seconds": 1000 / rate} | counts
        for (name, share), rate in rates.items()
        for epoch in (0, 1)
    ]


def test_later_rounds_repeat_what_the_rules_compare(programs: ModuleType) -> None:
    args = argparse.Namespace(methods=list(programs.METHODS), shares=list(programs.SHARES))
    everything = programs.planned(0, LOCAL, [], args)
    assert ("torch-2-v2", None) in everything
    assert ("shade", 0.2) in everything
    assert ("shade", 1.0) not in everything
    rates = dict.fromkeys(everything, 100.0) | {
        ("torch-16", None): 500.0, ("torch-8", None): 460.0, ("torch-4", None): 440.0, ("dali", None): 450.0,
        ("litdata", 1.0): 900.0, ("webdataset", 1.0): 700.0, ("huggingface", None): 950.0, ("shadeloader", 0.2): 50.0,
    }  # fmt: skip
    again = programs.planned(1, LOCAL, rows_of(rates), args)
    ours = {("shadeloader", share) for share in programs.SHARES} | {("shadeloader-pillow", 0.0)}
    fast = {("torch-16", None), ("torch-8", None), ("dali", None), ("litdata", 1.0), ("huggingface", None)}
    assert set(again) == ours | fast


def test_two_workers_and_a_bucket_are_left_out_where_nothing_can_come_of_it(programs: ModuleType) -> None:
    args = argparse.Namespace(methods=list(programs.METHODS), shares=list(programs.SHARES))
    names = {name for name, _ in programs.planned(0, BUCKET, [], args)}
    assert {"torch-8", "torch-32", "torch-16-v2", "shadeloader"} <= names
    assert not {"torch-2", "torch-4", "torch-2-deep"} & names
    assert programs.METHODS["huggingface"][1].files_only


@pytest.mark.multiprocess
def test_the_object_server_is_late_and_counts(programs: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "large").write_bytes(bytes(range(256)) * 4000)
    (tmp_path / "a" / "small").write_bytes(b"content")
    with programs.object_server(tmp_path, 50.0, 10.0) as url:

        def get(path: str, **headers: str) -> bytes:
            with urllib.request.urlopen(urllib.request.Request(f"{url}/{path}", headers=headers)) as answer:
                content: bytes = answer.read()
            return content

        begun = time.perf_counter()
        assert get("any/a/small") == b"content"
        assert time.perf_counter() - begun >= 0.05
        assert get("any/a/small", Range="bytes=2-4") == b"nte"
        begun = time.perf_counter()
        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(get, ["any/a/large"] * 2))
        assert time.perf_counter() - begun >= 0.05 + 2 * len(both[0]) / 10e6, "all answers share the line"
        assert both[0] == both[1] == (tmp_path / "a" / "large").read_bytes()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get("any/a/missing")
        counts = json.loads(get(".stats"))
        assert counts["num_opens"] == 4
        assert counts["read_bytes"] == 7 + 3 + 2 * len(both[0])
        listed = get("any?list-type=2&prefix=a/&delimiter=/").decode()
        assert listed.count("<Contents>") == 2
        assert "<Key>a/small</Key>" in listed
        assert "<Prefix>a/</Prefix></CommonPrefixes>" in get("any?list-type=2&prefix=&delimiter=/").decode()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_loaders_read_from_a_bucket(programs: ModuleType, tmp_path: Path) -> None:
    for package in ("boto3", "s3fs", "webdataset", "simplejpeg"):
        pytest.importorskip(package)
    words = ["--images", "192", "--rounds", "1", "--shares", "0", "1", "--storage", BUCKET, "--data", str(tmp_path)]
    words += ["--methods", "torch-8", "torch-16-v2", "webdataset", "huggingface", "shadeloader"]
    command = [sys.executable, str(ROOT / "benchmarks" / "bench_loaders.py"), *words, "--out", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=550, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "loaders.jsonl").read_text().splitlines()]
    later = {(row["method"], row["share"]): row for row in rows if row.get("epoch") == 1}
    assert {row["method"]: row["why"] for row in rows if "why" in row}.keys() == {"huggingface"}, done.stderr
    assert all(row["samples"] == 192 for row in later.values())
    assert later["torch-8", None]["opens"] == later["shadeloader", 0.0]["opens"] == 192
    assert later["shadeloader", 1.0]["opens"] == 0
    assert later["webdataset", 0.0]["bytes"] > later["webdataset", 1.0]["bytes"]
