"""What is released: a wheel and an sdist that do the main job where there is no clone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import shade
from shade.report import load_run

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).resolve().parents[2]
PARTS = (
    "shade",
    "torch_shade.py",
    "examples",
    "scripts",
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    ".gitignore",
)
EXTRAS = {"server", "report", "s3", "http", "jpeg", "digits", "tune", "checkpoint", "all", "dev", "ecosystem"}


def call(*words: str | Path, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SHADE_", "PYTHON", "GIT_"))}
    return subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env=kept | more,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


def git(clone: Path, *words: str) -> str:
    who = ("-c", "user.name=t", "-c", "user.email=t@example.com")
    done = call("git", *who, *words, cwd=clone)
    assert done.returncode == 0, done.stderr
    return done.stdout


def release(clone: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return call(clone / "scripts" / "release", *words, cwd=clone, SHADE_VENV=sys.prefix)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of what a release needs."""
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    folder = tmp_path_factory.mktemp("clone")
    for part in PARTS:
        if (ROOT / part).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / part, folder / part, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / part, folder)
    project = folder / "pyproject.toml"
    project.write_text(project.read_text().replace("OWNER", "someone"))
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "all")
    return folder


@pytest.fixture(scope="module")
def dist(clone: Path) -> Path:
    """The folder with both, built as scripts/release builds them."""
    pytest.importorskip("build")
    done = call(sys.executable, "-m", "build", "--no-isolation", cwd=clone)
    assert done.returncode == 0, done.stdout + done.stderr
    return clone / "dist"


def test_both_hold_every_file_and_the_examples(dist: Path) -> None:
    expected = {str(path.relative_to(ROOT)) for path in (ROOT / "shade").rglob("*.py")}
    expected |= {str(path.relative_to(ROOT)) for path in (ROOT / "shade" / "report" / "templates").iterdir()}
    expected |= {f"shade/{path.relative_to(ROOT)}" for path in (ROOT / "examples").glob("*.py")} | {
        "shade/py.typed",
        "torch_shade.py",
    }
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
        (scripts,) = [name for name in wheel.namelist() if name.endswith("/entry_points.txt")]
        assert "shade = torch_shade:main" in wheel.read(scripts).decode()
        (about,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
        metadata = Parser().parsestr(wheel.read(about).decode())
    assert held == expected
    assert (metadata["Name"], metadata["Version"]) == ("torch-shade", shade.__version__)
    assert set(metadata.get_all("Provides-Extra", [])) >= EXTRAS
    assert metadata["Author"] == "the shade authors"
    assert "pytorch" in metadata["Keywords"].split(",")
    assert "Operating System :: POSIX :: Linux" in metadata.get_all("Classifier", [])
    assert "Repository, https://github.com/someone/torch-shade" in metadata.get_all("Project-URL", [])
    links = re.findall(r"\]\(([^)\s]+)\)", metadata.get_payload())
    place = re.compile(
        rf"https://github.com/someone/torch-shade/(raw|blob)/v{re.escape(shade.__version__)}/([^#]+)(#.+)?"
    )
    files = [found[2] for link in links if (found := place.fullmatch(link))]
    assert len(files) == len(links) > 20, "expected absolute links only: the package index has no files beside the page"
    assert [file for file in files if not (ROOT / file).exists()] == []
    with tarfile.open(next(dist.glob("*.tar.gz"))) as sdist:
        files = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    assert files >= expected


LITTER = "echo >shade/new.py"
UNSAID = (
    "sed -i 's/^__version__ = .*/__version__ = \"9.9.9\"/' shade/__init__.py && git commit --quiet --all --message x"
)
UNDATED = "sed -i 's/^\\(## .*\\]\\) - .*/\\1/' CHANGELOG.md && git commit --quiet --all --message x"
HOMELESS = "sed -i s/someone/OWNER/ pyproject.toml && git commit --quiet --all --message x"
TAGGED = f"git tag v{shade.__version__}"


@pytest.mark.parametrize(
    ("change", "cure"),
    [
        (LITTER, "commit them, or remove them"),
        (UNSAID, "expected a section [9.9.9] in CHANGELOG.md"),
        (UNDATED, f"expected the date behind [{shade.__version__}]"),
        (HOMELESS, "set Repository under [project.urls]"),
        (TAGGED, "raise __version__"),
    ],
)
def test_a_release_that_cannot_be_is_refused_in_one_line(clone: Path, tmp_path: Path, change: str, cure: str) -> None:
    copy = tmp_path / "copy"
    git(clone, "clone", "--quiet", str(clone), str(copy))
    who = {f"GIT_{role}_{what}": "t@t" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    assert call("sh", "-c", change, cwd=copy, **who).returncode == 0
    done = release(copy)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert cure in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_release_tries_the_wheel_tags_the_commit_and_publishes_nothing(clone: Path, tmp_path: Path) -> None:
    for module in ("build", "twine", "cyclonedx_py", "mypy"):
        pytest.importorskip(module)
    copy = tmp_path / "copy"
    git(clone, "clone", "--quiet", str(clone), str(copy))
    done = release(copy, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "dry run: no tag" in done.stderr
    assert (git(copy, "tag"), git(copy, "status", "--porcelain")) == ("", "")
    version = shade.__version__
    made = {f"torch_shade-{version}-py3-none-any.whl", f"torch_shade-{version}.tar.gz", "sbom.cdx.json"}
    assert {path.name for path in (copy / "dist").iterdir()} == made
    bill = json.loads((copy / "dist" / "sbom.cdx.json").read_text())
    assert (bill["bomFormat"], bill["metadata"]["component"]["version"]) == ("CycloneDX", version)
    names = {each["name"].lower() for each in bill["components"]}
    assert {"torch", "redis", "numpy", "sympy"} <= names
    assert not {"pytest", "mypy", "cyclonedx-bom", "torch-shade"} & names, "of .venv, and not of the wheel"
    who = {f"GIT_{role}_{what}": "t@t" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    done = call(copy / "scripts" / "release", cwd=copy, SHADE_VENV=sys.prefix, **who)
    assert done.returncode == 0, done.stderr
    assert git(copy, "tag", "--points-at", "HEAD") == f"v{version}\n"
    assert "git push origin" in done.stderr


@pytest.mark.parametrize("broken", ["import gone", ""])
def test_the_command_says_so_where_another_shade_has_taken_the_packages_place(tmp_path: Path, broken: str) -> None:
    info = tmp_path / "shade-1.33.0.dist-info"
    for folder in (info, tmp_path / "shade"):
        folder.mkdir()
    (tmp_path / "shade" / "__init__.py").write_text(broken)
    (info / "METADATA").write_text("Name: shade\nVersion: 1.33.0\nSummary: Client library for OpenStack\n")
    (info / "RECORD").write_text("shade/__init__.py,,\n")
    program = "import sys, torch_shade; sys.exit(torch_shade.main())"
    done = call(sys.executable, "-c", program, "doctor", cwd=tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "got that of the distribution shade 1.33.0 (Client library for OpenStack)" in done.stderr


def test_the_module_is_the_command(tmp_path: Path) -> None:
    done = call(sys.executable, "-m", "shade", "--version", cwd=tmp_path, PYTHONPATH=str(ROOT))
    assert (done.returncode, done.stdout) == (0, f"shade {shade.__version__}\n")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_it_trains_and_reports_where_there_is_no_clone(dist: Path, tmp_path: Path, kind: str) -> None:
    home, here, place = tmp_path / "home", tmp_path / "here", tmp_path / "venv"
    for folder in (home, here):
        folder.mkdir()
    (file,) = dist.glob(kind)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    if file.suffix == ".gz":
        options = ("--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", tmp_path)
        assert call(*pip, "wheel", *options, file, cwd=here).returncode == 0
        (file,) = tmp_path.glob("*.whl")
    venv.create(place, with_pip=False, symlinks=True)
    python = place / "bin" / "python"
    done = call(*pip, "--python", python, "install", "--no-deps", "--no-index", file, cwd=here)
    assert done.returncode == 0, done.stderr
    # PyTorch and the other dependencies are those of this environment: behind the new one's own packages.
    (site,) = place.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")) + "\n")
    there = {"HOME": str(home), "PATH": f"{place / 'bin'}:{os.environ['PATH']}"}
    assert call(python, "-c", "import shade; print(shade.__file__)", cwd=here, **there).stdout.startswith(str(site))
    for words in (["shade", "doctor"], ["shade", "example", "bench_cifar10"], [python, "-m", "shade", "--version"]):
        done = call(*words, cwd=here, **there)
        assert done.returncode == 0, done.stdout + done.stderr
    done = call("shade", "run", cwd=here, **there)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in home.iterdir()} <= {".cache", ".config"}, "matplotlib's list of fonts"
    (out,) = (here / "runs").iterdir()
    files = {".cache", "runs", "train.log", "bench_cifar10.py", "networks.py"}
    assert {path.name for path in here.iterdir()} == files
    report = (out / "report.txt").read_text()
    compared = done.stdout.removeprefix(report).splitlines()
    assert [line.split("  ")[0] for line in compared if line[:1] > " "] == [
        *("samples a second", "seconds an epoch", "read from storage", "accuracy"),
        str(out / "comparison.png"),
    ]
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    accesses = (here / "train.log").read_text().splitlines()
    assert sum(line.startswith("hitting ") for line in accesses) > 1000
    # The emulated storage and shade count the same, but for the image whose size the script looks up.
    opens = int((out / "output.log").read_text().rpartition("slow storage: ")[2].split()[0])
    assert opens == (load_run(out).total("origin_reads") or 0) + 1
    assert (load_run(out).total("origin_bytes") or 0) < (load_run(out / "plain").total("origin_bytes") or 0)
    done = call("shade", "report", out, cwd=here, **there)
    assert done.stdout == report
