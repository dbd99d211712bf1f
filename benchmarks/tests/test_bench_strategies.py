"""The benchmark of strategies on tiny models: one run prints a row, a table goes on where it was interrupted."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "benchmarks" / "bench_strategies.py"
pytest.importorskip("transformers")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(BENCH), "--size", "tiny", "--every", "2", "--saves", "2", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=850, check=False)


def test_one_run_prints_a_row() -> None:
    done = bench("--method", "asymmetric", "--model", "gpt2")
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if "asymmetric** |" in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1] == "1"
    assert cells[-1] == "bit"
    assert all(cells[2:-1])


def test_what_there_is_not_is_said() -> None:
    assert "no method named 'asym'; known: none, " in bench("--method", "asym", "--model", "gpt2").stderr
    assert "no model named 'gpt3'" in bench("--method", "copy", "--model", "gpt3").stderr


def test_a_table_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    words = ("--model", "resnet", "--methods", "copy", "torch.save", "--rounds", "1", "--out", str(tmp_path))
    first = bench(*words)
    assert first.returncode == 0, first.stderr
    rows = tmp_path / "strategies.jsonl"
    lines = rows.read_text().splitlines()
    assert {json.loads(line)["method"] for line in lines} == {"none", "copy", "torch.save"}
    rows.write_text("\n".join(lines[:2]) + '\n{"method": "tor')  # cut off in the middle of the third
    again = bench(*words)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("left\n") == 1
    kept = rows.read_text().splitlines()
    assert kept[:2] == lines[:2]
    assert len(kept) == 4
    text = (tmp_path / "strategies.md").read_text()
    assert "| torch.save | 1 |" in text.replace("**", "")
    assert json.loads((tmp_path / "strategies.json").read_text())["models"]["resnet"]
    assert (tmp_path / "strategies.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("method", ["torch.save-thread", "dcp-async", "dcp-async-overlapped", "torchsnapshot-package"])
def test_what_is_not_ours_restores_too(method: str) -> None:
    if method == "torchsnapshot-package":
        pytest.importorskip("torchsnapshot")
    done = bench("--method", method, "--model", "bert")
    assert done.returncode == 0, done.stderr
    assert "| bit |" in done.stdout


def test_a_sharded_model_runs_through_the_table(tmp_path: Path) -> None:
    done = bench("--model", "roberta", "--methods", "fsdp2", "--rounds", "1")
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if "fsdp2" in line and "|" in line]
    assert row.rstrip().endswith("| bit |")


def test_a_model_is_sharded_over_several_ranks(tmp_path: Path) -> None:
    words = ("--model", "resnet", "--ranks", "2", "3", "--rounds", "1", "--out", str(tmp_path))
    done = bench(*words)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "strategies-ranks.jsonl").read_text().splitlines()]
    methods = ["fsdp2", "fsdp2-dcp", "fsdp2-dcp-overlapped", "fsdp2-writer"]
    if importlib.util.find_spec("torch_checkpointing") is not None:
        methods.insert(3, "fsdp2-torch-checkpointing")
    assert sorted((row["ranks"], row["method"]) for row in rows) == [(n, name) for n in (2, 3) for name in methods]
    for row in rows:
        assert row["equal"]
        assert len(row["stalls"]) == len(row["durable"]) == 2
        assert row["read_bytes"] > row["state_bytes"] / 2
    text = (tmp_path / "strategies-ranks.md").read_text()
    assert "## 2 ranks, resnet, tiny" in text
    assert "## 3 ranks, resnet, tiny" in text
    assert (
        "known: fsdp2, fsdp2-writer, fsdp2-dcp"
        in bench("--ranks", "2", "--methods", "copy", "--model", "resnet").stderr
    )


@pytest.mark.parametrize(
    ("script", "model"),
    [
        ("llm/gpt2/run_clm_no_trainer_ds_gpt2_layer_10B_asym.sh", "gpt2"),
        ("llm/bert/run_squad_ds_z3_bert_10B_asym.sh", "bert"),
        ("llm/roberta/run_mlm_no_trainer_roberta_ds_asym.sh", "roberta"),
        ("llm/bloom/run_clm_no_trainer_bloom_ds_asym.sh", "bloom"),
        ("cv/resnet152/main_ds_lib_asymcheck.sh", "resnet"),
        ("cv/vit/run_imagenet_no_trainer_ds_lib_asymcheck.sh", "vit"),
    ],
)
def test_each_model_has_a_script(script: str, model: str) -> None:
    venv = Path(sys.executable).parent.parent
    environment = os.environ | {"SHADE_VENV": str(venv), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    path = ROOT / "benchmarks" / "examples" / script
    costed = subprocess.run(
        [str(path), "--size", "10B"], capture_output=True, text=True, env=environment, timeout=850, check=False
    )
    assert costed.returncode == 0, costed.stderr
    assert f"| {model} | " in costed.stdout
    words = [str(path), "--every", "2", "--saves", "1"]
    done = subprocess.run(
        words, capture_output=True, text=True, env=environment | {"SIZE": "tiny"}, timeout=850, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"## {model}, tiny" in done.stdout
