"""The workflows of public CI run what is here: scripts that exist, words that a shell reads, the Pythons that we name.

`scripts/check` holds them against GitHub's schema; nothing but a run there shows that the actions do what is hoped.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import shade

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = {path.name: yaml.safe_load(path.read_text()) for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}
TRUSTED = ("actions/", "pypa/gh-action-pypi-publish@release/v1")


def jobs() -> list[tuple[str, dict[str, Any]]]:
    return [(f"{file}: {name}", job) for file, flow in WORKFLOWS.items() for name, job in flow["jobs"].items()]


def commands() -> list[tuple[str, str]]:
    """Each step's command, its expressions filled in by every part of the job's matrix or by a word."""
    found = []
    for name, job in jobs():
        parts = job.get("strategy", {}).get("matrix", {}).get("part", ["x"])
        for step in job["steps"]:
            for part in parts if "run" in step else ():
                text = step["run"].replace("${{ matrix.part }}", part)
                found.append((name, re.sub(r"\$\{\{.*?\}\}", "x", text)))
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize(("name", "command"), commands())
def test_a_command_is_one_that_a_shell_reads_and_its_files_exist(name: str, command: str) -> None:
    done = subprocess.run(["bash", "-n"], input=command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{name}: {done.stderr}"
    for word in re.findall(r"(?<![\w$/])(?:scripts|tests|benchmarks|shade)/[\w/.]+", command):
        assert (ROOT / word).exists(), f"{name}: {word}"
    for script in re.findall(r"(?<![\w$/])scripts/\w+", command):
        assert os.access(ROOT / script, os.X_OK), f"{name}: {script}"


@pytest.mark.parametrize(("name", "job"), jobs())
def test_a_job_is_bounded_and_uses_versions_of_actions_that_are_named(name: str, job: dict[str, Any]) -> None:
    assert 0 < job["timeout-minutes"] <= 360, name
    for step in job["steps"]:
        action = step.get("uses", "actions/x@v1")
        assert action.startswith(TRUSTED), f"{name}: {action}"
        assert re.fullmatch(r"[\w/-]+@(release/)?v\d+", action), f"{name}: {action}"


def test_only_the_jobs_that_need_it_may_write() -> None:
    assert all(flow["permissions"] == {"contents": "read"} for flow in WORKFLOWS.values())
    writing = {name: job["permissions"] for name, job in jobs() if "permissions" in job}
    assert writing == {
        "docs.yml: deploy": {"pages": "write", "id-token": "write"},
        "release.yml: build": {"contents": "read", "id-token": "write", "attestations": "write"},
        "release.yml: publish": {"id-token": "write"},
        "release.yml: announce": {"contents": "write"},
    }


def test_the_pythons_are_those_of_the_classifiers_and_the_torch_the_oldest_that_is_asked_for() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    matrix = WORKFLOWS["tests.yml"]["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert WORKFLOWS["tests.yml"]["jobs"]["install"]["strategy"]["matrix"]["python"] == [
        matrix["python"][0],
        matrix["python"][-1],
    ]
    (oldest,) = re.findall(r'"torch>=([\d.]+)"', project)
    assert oldest in {each["torch"] for each in matrix["include"]}
    assert f'requires-python = ">={matrix["python"][0]}"' in project


def test_every_folder_of_tests_is_in_the_soak() -> None:
    parts = " ".join(WORKFLOWS["nightly.yml"]["jobs"]["soak"]["strategy"]["matrix"]["part"]).split()
    folders = {
        f"tests/{path.parent.relative_to(ROOT / 'tests').parts[0]}" for path in (ROOT / "tests").rglob("*/test_*.py")
    }
    assert {*folders, "benchmarks/tests"} == set(parts)


def test_the_version_and_its_date_are_the_same_everywhere() -> None:
    (dated,) = re.findall(
        rf"^## \[{re.escape(shade.__version__)}\] - (\d{{4}}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], cited["date-released"]) == (shade.__version__, dated)
    assert f"| {shade.__version__.rpartition('.')[0]} | yes |" in (ROOT / "SECURITY.md").read_text()
