"""The ACUTE example as a user starts it: alone, and with memory node, flusher, two trainers and a kill on the way."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from tests.support.launching import ROOT, make_images

pytestmark = pytest.mark.multiprocess

EXAMPLE = ROOT / "benchmarks" / "training_example.py"
SCRIPT = ROOT / "benchmarks" / "execute_example.sh"
LIMIT_SECONDS = 240


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_images(tmp_path_factory.mktemp("images"))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    given = {name: value for name, value in os.environ.items() if name not in ("SHADE_CHECKPOINT", "SHADE_PERSIST_TO")}
    return given | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SHADE_VENV": sys.prefix, "TMPDIR": str(tmp_path)}


@pytest.fixture
def name(tmp_path: Path) -> str:
    return f"example-{tmp_path.parent.name}-{tmp_path.name}"[-90:].lstrip("-_.")


def losses(text: str) -> dict[int, str]:
    """By epoch, every digit."""
    return {int(epoch): loss for epoch, loss in re.findall(r"^epoch (\d+): loss (\S+) in", text, re.MULTILINE)}


def example(environment: dict[str, str], folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *words]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
    )


@pytest.mark.slow
@pytest.mark.multiprocess
def test_every_flag_of_the_original_and_back_again(
    environment: dict[str, str], images: Path, tmp_path: Path, name: str
) -> None:
    flags = ["2", "1", "127.0.0.1", "1234", "--batch_size", "8", "--data", str(images), "--starting_epoch", "1"]
    flags += ["--remote_buffer_size", "2", "--shard_size", "8", "--model_name", name, "--file_save_in_dictionary"]
    flags += ["True", "--file_name_include_datetime", "False", "--file_date", "False", "--file_dictionary", "False"]
    begun = example(environment, tmp_path, *flags)
    assert begun.returncode == 0, begun.stderr
    assert sorted(losses(begun.stdout)) == [1, 2]
    (newest, *_) = sorted((tmp_path / "checkpoints" / name).glob("step-*"), reverse=True)
    assert json.loads((newest / "commit.json").read_text())["step"] == 2
    assert "state/model/0.weight" in load_file(newest / "rank-0.safetensors")
    on = example(environment, tmp_path, "3", *flags[1:], "--snapshot_path", str(newest))
    assert on.returncode == 0, on.stderr
    assert sorted(losses(on.stdout)) == [3]


@pytest.mark.multiprocess
def test_a_word_that_is_no_boolean_is_refused(environment: dict[str, str], tmp_path: Path) -> None:
    refused = example(environment, tmp_path, "2", "1", "127.0.0.1", "1234", "--file_date", "Flase")
    assert refused.returncode == 2
    assert "expected True or False, got 'Flase'" in refused.stderr


def execute(environment: dict[str, str], folder: Path, images: Path, *words: str) -> str:
    """Runs the script; nothing that it started is left."""
    flags = ["--batch_size", "8", "--data", str(images)]
    ran = subprocess.run(
        ["sh", str(SCRIPT), "--out", str(folder), *words, *flags],
        env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert [command for command in commands if str(folder) in command] == []
    return (folder / "train.log").read_text() + ran.stdout


@pytest.mark.slow
def test_a_trainer_that_is_killed_goes_on_and_loses_nothing(
    environment: dict[str, str], images: Path, tmp_path: Path, name: str
) -> None:
    whole = execute(environment, tmp_path / "whole", images, "--epochs", "4", "--name", f"{name}-w")
    killed = execute(environment, tmp_path / "killed", images, "--epochs", "4", "--name", name, "--kill-after", "2")
    assert sorted(losses(whole)) == [1, 2, 3, 4]
    assert losses(killed) == losses(whole)
    assert "going on from the latest snapshot" in killed
    assert re.search(r"^ +4 .* 2 +durable +storage", killed, re.MULTILINE)
