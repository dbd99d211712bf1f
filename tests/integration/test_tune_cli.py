"""``shade tune`` with a real command: it survives failures, draws a profile, and resumes after a kill."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shade.cli import main
from shade.control.profile import Profile
from tests.support.launching import ROOT, environment

pytestmark = pytest.mark.multiprocess

Capture = pytest.CaptureFixture[str]
TRAINING = """\
import json, math, sys
batch, density = int(sys.argv[1]), float(sys.argv[2])
if batch > 700:
    sys.exit("out of memory")
worse = math.log(batch / 128) ** 2 / 40 + math.log(density / 0.02) ** 2 / 80
for epoch in range(3):
    print(json.dumps({"epoch": epoch, "accuracy": 0.9 - worse - 0.1 / (1 + epoch)}))
"""


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A study of eight evaluations."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAINING)
    command = f'"{sys.executable}" train.py {{batch}} {{density}}'
    return ["tune", "--command", command, "--metric", "accuracy", "--evaluations", "8", "--initial", "5"]


def evaluations(folder: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()[1:]]
    return [{**row["evaluation"], "seconds": 0} for row in rows]


def test_a_profile_and_a_picture_come_of_it(words: list[str], tmp_path: Path, capsys: Capture) -> None:
    assert main(words) == 0
    told = capsys.readouterr().out
    profile = Profile.load(tmp_path / "tune" / "profile.json")
    assert len(profile.evaluations) == 8
    assert {"out of memory" in str(each["failure"]) for each in profile.evaluations} == {True, False}
    assert "failed" in told
    best = max(float(each["quality"] or 0) for each in profile.evaluations)
    assert f"best measured: {best:.6g}" in told
    assert (tmp_path / "tune" / "profile.png").read_bytes().startswith(b"\x89PNG")
    before = evaluations(tmp_path / "tune")
    assert main(words) == 0  # nothing is left to do
    assert evaluations(tmp_path / "tune") == before
    assert main([*words, "--seed", "1"]) == 2
    assert "this very study" in capsys.readouterr().err


def test_killed_in_the_middle_it_goes_on_to_the_same_points(words: list[str], tmp_path: Path) -> None:
    assert main([*words, "--out", "whole"]) == 0
    journal = tmp_path / "killed" / "evaluations.jsonl"
    command = [sys.executable, "-m", "shade.cli", *words, "--out", "killed"]
    command[1:3] = ["-c", "import sys; from shade.cli import main; sys.exit(main())"]
    with subprocess.Popen(command, env=environment(), cwd=tmp_path, stderr=subprocess.PIPE) as tuning:
        for _ in range(6000):
            if journal.exists() and journal.read_bytes().count(b"\n") >= 4:
                break
            time.sleep(0.005)
        tuning.send_signal(signal.SIGKILL)
    assert tuning.returncode == -signal.SIGKILL
    assert 3 <= len(evaluations(tmp_path / "killed")) < 8
    assert main([*words, "--out", "killed"]) == 0
    assert evaluations(tmp_path / "killed") == evaluations(tmp_path / "whole")


def test_when_nothing_succeeds_the_exit_code_says_so(words: list[str], tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('broken')")
    assert main([*words, "--evaluations", "2"]) == 1
    told = capsys.readouterr()
    assert told.out.count("broken") == 2
    assert "none of 2 evaluations succeeded" in told.err


def test_a_command_that_fails_from_the_start_is_not_repeated(words: list[str], tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('broken')")
    words += ["--evaluations", "4", "--initial", "4"]
    assert main(words) == 1
    told = capsys.readouterr()
    assert told.out.count("broken") == 3
    assert "broken" in told.err
    assert "correct the command" in told.err
    (tmp_path / "train.py").write_text(TRAINING)
    assert main(words) == 0
    assert len(evaluations(tmp_path / "tune")) == 4


@pytest.mark.parametrize(
    "more", [["--batch", "x"], ["--density", "0.1:0.01"], ["--evaluations", "0"], ["--timeout", "-1"],
             ["--metric-regex", "(x)"], ["--command", "train"], ["--batch-multiple", "0"]]
)  # fmt: skip
def test_what_cannot_be_is_one_line(more: list[str], words: list[str], tmp_path: Path, capsys: Capture) -> None:
    assert main([*words, *more]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert not (tmp_path / "tune").exists()


def test_its_help_teaches_and_loads_nothing_heavy(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "--help"])
    told = capsys.readouterr().out
    assert "examples:" in told
    assert max(map(len, told.splitlines())) <= 120
    program = "import sys, shade.cli.tune; print({'torch', 'optuna', 'sklearn', 'numpy'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
