"""What the doctor makes of machines that these tests do not run on."""

from __future__ import annotations

import importlib
import resource
import socket
from pathlib import Path

import pytest

import shade
from shade.cli import doctor
from shade.cli.doctor import Finding, broken
from shade.errors import ConfigError, StoreError


@pytest.mark.parametrize("found", ["2.8.0", "2.10.1+cu132", "2.9.0a0+git", "3.0"])
def test_a_version_that_will_do(found: str) -> None:
    assert doctor.version("torch", found).verdict == "ok"


@pytest.mark.parametrize("found", ["2.7.1", "1.13.1+cpu"])
def test_a_version_that_is_too_old_names_the_command(found: str) -> None:
    assert doctor.version("torch", found) == Finding("torch", "fail", found, "pip install 'torch>=2.8'")


def test_an_old_python() -> None:
    assert doctor.python((3, 9)).verdict == "fail"
    assert doctor.python((3, 10)).verdict == "ok"


@pytest.mark.parametrize("room", [doctor.SHARED_MEMORY, doctor.MEMORY, doctor.DISK])
def test_too_little_room_fails_and_little_warns(room: doctor.Room) -> None:
    verdicts = [room.judge(size).verdict for size in (room.least_bytes - 1, room.least_bytes, room.good_bytes)]
    assert verdicts == ["fail", "warn", "ok"]
    assert room.judge(0).cure


def test_dockers_shared_memory_is_a_warning_with_the_flag() -> None:
    finding = doctor.SHARED_MEMORY.judge(64 * doctor.MIB)
    assert (finding.verdict, "--shm-size" in finding.cure) == ("warn", True)


@pytest.mark.parametrize(
    ("limit", "verdict"), [(64, "fail"), (256, "warn"), (1024, "ok"), (resource.RLIM_INFINITY, "ok")]
)
def test_the_limit_of_open_files(limit: int, verdict: str) -> None:
    assert doctor.open_files(limit).verdict == verdict


def test_a_taken_port_warns() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        number = taken.getsockname()[1]
        taken.listen()
        assert doctor.port(number).verdict == "warn"
    assert doctor.port(0).verdict == "ok"


def test_a_folder_that_is_not_ours_fails(tmp_path: Path) -> None:
    assert doctor.writing(tmp_path).verdict == "ok"
    assert list(tmp_path.iterdir()) == []
    assert doctor.writing(tmp_path / "gone").verdict == "fail"


def test_no_server_on_this_machine_warns_with_both_cures(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise ConfigError("no")

    monkeypatch.setattr(doctor, "find_server_binary", none)
    finding = doctor.server()
    assert finding.verdict == "warn"
    assert "apt-get" in finding.cure
    assert "torch-shade[server]" in finding.cure


def test_gpus_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda index: "H")
    assert doctor.devices().found == "2 × H"


def test_memory_is_known_here() -> None:
    found = doctor.available_memory_bytes()
    assert found is None or found > 0


def test_a_row_reads_well() -> None:
    assert str(Finding("disk", "ok", "1 GiB")) == "ok    disk                 1 GiB"
    assert str(Finding("disk", "fail", "0", "buy one")).splitlines()[1].strip() == "→ buy one"


def test_an_error_of_ours_becomes_a_row() -> None:
    assert broken("x", ConfigError.of("a", "b", "do c")) == Finding("x", "fail", "expected a, got 'b'", "do c")
    assert broken("x", StoreError("gone")) == Finding("x", "fail", "gone", "see above")


@pytest.fixture
def openstack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path where OpenStack's client is installed, as pip writes it."""
    info = tmp_path / "shade-1.33.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: shade\nVersion: 1.33.0\nSummary: Client library for OpenStack\n")
    (info / "RECORD").write_text("shade-1.33.0.dist-info/METADATA,,\nshade/__init__.py,,\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_this_package_alone_is_fine() -> None:
    assert (doctor.this_package().verdict, doctor.this_package().found.split()[0]) == ("ok", shade.__version__)


def test_another_distribution_of_the_name_fails_with_both_commands(openstack: Path) -> None:
    finding = doctor.this_package()
    assert finding.verdict == "fail"
    assert "shade 1.33.0 too (Client library for OpenStack)" in finding.found
    assert finding.cure == "pip uninstall -y shade, then pip install --force-reinstall --no-deps torch-shade"


def test_the_first_import_says_so_too(openstack: Path) -> None:
    with pytest.warns(UserWarning, match="expected torch-shade alone to install a package shade"):
        importlib.reload(shade)


def test_this_clone_under_its_old_name_is_no_other_distribution(openstack: Path) -> None:
    (openstack / "shade-1.33.0.dist-info" / "RECORD").write_text("__editable__.shade-0.1.0.pth,,\n")
    assert doctor.this_package().verdict == "ok"
