"""A command's number is read; anything else is a failure in one line, and no process of it is left running."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from shade.control.study import CommandObjective, EvaluationError, Point
from shade.errors import ConfigError

pytestmark = pytest.mark.multiprocess

POINT = Point(64, 0.0125)


def program(source: str) -> str:
    """A command that runs a line of Python with batch and density as arguments."""
    return f'"{sys.executable}" -c "{source}" {{batch}} {{density}}'


def test_the_last_line_that_names_the_metric_counts(tmp_path: Path) -> None:
    source = (
        "import json, sys; b, d = sys.argv[1:]; print('epoch', b); "
        "[print(json.dumps({'accuracy': k * int(b) + float(d), 'x': 1})) for k in (1, 2)]; print('[1]'); print('{}')"
    )
    objective = CommandObjective(program(source), tmp_path, metric="accuracy")
    assert objective(POINT) == 128.0125
    assert "epoch 64" in (tmp_path / "batch-64-density-0.0125.log").read_text()


def test_a_progress_bar_before_the_number_is_none_of_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys\n"
        "def bar():\n"
        "    sys.stderr.write('\\r 50%|##  | 5/10, loss=1.5')\n"
        "    sys.stderr.flush()\n"
        "for line in ('{\"accuracy\": 0.5}\\r', '{\"other\": 1}', '5 {\"accuracy\": 7}'):\n"
        "    bar()\n"
        "    print(line, flush=True) if line[0] == '{' else print('\\n' + line, flush=True)\n"
        "bar()\n"
    )
    command = f'"{sys.executable}" "{script}" {{batch}} {{density}}'
    assert CommandObjective(command, tmp_path, metric="accuracy")(POINT) == 0.5


def test_a_regular_expression_finds_it_in_errors_too(tmp_path: Path) -> None:
    source = "import sys; print('loss=3.5', flush=True); print('loss=2.5e-1 done', file=sys.stderr)"
    assert CommandObjective(program(source), tmp_path, pattern=r"loss=([-+.\de]+)")(POINT) == 0.25


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("print('hello'); raise SystemExit(3)", "exit code 3; its last line: hello"),
        ("raise SystemExit(3)", "exit code 3; it printed nothing"),
        ("import os; os.kill(os.getpid(), 9)", "killed by signal 9"),
        ("print('fine')", "it printed no 'accuracy'; its last line: fine"),
        ("print('{\\'accuracy\\': 1}')", "it printed no 'accuracy'"),
        ("import json; print(json.dumps(dict(accuracy='x')))", "it printed no 'accuracy'"),
        (
            "import sys; sys.stdout.buffer.write(bytes(range(256)) * 999 + b'[' * 99999)",
            "it printed no 'accuracy'",
        ),
    ],
)
def test_what_is_no_number_is_a_failure(source: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(EvaluationError) as failed:
        CommandObjective(program(source), tmp_path, metric="accuracy")(POINT)
    assert str(failed.value).startswith(message)
    assert len(str(failed.value)) < 300


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="no-such-program: No such file"):
        CommandObjective("no-such-program {batch} {density}", tmp_path, metric="accuracy")(POINT)


def test_a_command_that_takes_too_long_is_killed_with_its_children(tmp_path: Path) -> None:
    script = tmp_path / "slow.py"
    script.write_text(
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child.pid))\n"
        "print('started', flush=True); time.sleep(600)\n"
    )
    objective = CommandObjective(
        f'"{sys.executable}" "{script}" {{batch}} {{density}}', tmp_path, metric="accuracy", timeout_seconds=1.5
    )
    with pytest.raises(EvaluationError, match=r"more than 1.5 s; its last line: started"):
        objective(POINT)
    assert is_gone(int((tmp_path / "child").read_text()))


def test_a_command_ends_with_the_process_that_runs_it(tmp_path: Path) -> None:
    """After SIGKILL the tuner cannot clean up; the kernel does."""
    pid_file = tmp_path / "pid"
    source = (
        "from shade.control.study import CommandObjective, Point\n"
        f"command = {sys.executable!r} + ' ' + {str(tmp_path / 'command.py')!r} + ' {{batch}} {{density}}'\n"
        f"CommandObjective(command, {str(tmp_path)!r}, metric='x')(Point(1, 0.1))\n"
    )
    (tmp_path / "command.py").write_text(
        f"import os, time; open({str(pid_file)!r} + '.part', 'w').write(str(os.getpid()))\n"
        f"os.replace({str(pid_file)!r} + '.part', {str(pid_file)!r}); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", source]) as tuner:
        for _ in range(2000):
            if pid_file.exists():
                break
            time.sleep(0.01)
        tuner.kill()
    assert is_gone(int(pid_file.read_text()))


def is_gone(pid: int) -> bool:
    for _ in range(1000):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    "wrong",
    [{"command": ""}, {"command": "train {batch}"}, {"command": "train '{batch} {density}"}, {"metric": None},
     {"pattern": "x (.*)"}, {"metric": None, "pattern": "x"}, {"metric": None, "pattern": "(x"},
     {"timeout_seconds": 0.0}],
)  # fmt: skip
def test_wrong_arguments(wrong: dict[str, Any], tmp_path: Path) -> None:
    given: dict[str, Any] = {"command": "train {batch} {density}", "folder": tmp_path, "metric": "accuracy", **wrong}
    with pytest.raises(ConfigError, match="expected"):
        CommandObjective(given.pop("command"), given.pop("folder"), **given)
