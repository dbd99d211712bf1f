"""The documentation is whole: every public name, every link, every page in the navigation, no page behind the code."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shade
from tests.support.pages import ROOT
from tests.test_public_face import documented

DOCS = ROOT / "docs"
LEAST_PAGES = 35
SAME = {"init_ACUTE", "init_DASH", "init_dash", "destroy_ACUTE", "destroy_DASH", "destroy_dash"}
"""Other spellings of `init_acute` and `destroy_acute`; their section names them."""
STATUS = re.compile(
    r"# \d{4} · [^\n]+\n\nStatus: (accepted|superseded by \[(\d{4})\]\(\2-[\w-]+\.md\)|withdrawn)\.( [^\n]+)?\n\n"
)
ROW = re.compile(r"^\| \[(\d{4})\]\([\w.-]+\) \| .+ \| (\w+).* \|$", re.MULTILINE)


def generated() -> dict[str, Any]:
    """Returns the pages that docs/generate.py writes, by name."""
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.PAGES)


def messages() -> set[str]:
    """Returns the string constants of the package, the fixed parts of f-strings included."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "shade").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)


def test_every_public_name_is_in_the_reference() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    described = {name.rpartition(".")[2] for name in re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)}
    names = {name for public in documented().values() for name in public}
    assert names - described - SAME == {"__version__"}
    assert all(name in text for name in SAME)


def test_every_picture_is_shown_by_a_page_and_small() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md"))
    for picture in (DOCS / "images").iterdir():
        assert f"images/{picture.name})" in pages, picture.name
        assert picture.stat().st_size < 150_000, picture.name


def test_there_are_four_kinds_of_pages_and_enough_of_them() -> None:
    kinds = ("tutorials", "how-to", "reference", "explanation")
    counts = {kind: len(list((DOCS / kind).glob("*.md"))) for kind in kinds}
    assert all(counts.values()), counts
    assert sum(counts.values()) >= LEAST_PAGES, counts


@pytest.mark.parametrize("name", generated())
def test_a_generated_page_is_current(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert (DOCS / name).read_text(encoding="utf-8") == generated()[name](), "run scripts/docs refresh"


def test_the_first_page_and_llms_txt_lead_to_every_page_of_the_navigation() -> None:
    navigation = set(re.findall(r"^ +- ([\w/-]+)\.md$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)) - {"index"}
    mapped = re.findall(r"\]\(([\w/-]+)/\)", (DOCS / "llms.txt").read_text(encoding="utf-8"))
    assert set(mapped) == navigation
    assert len(mapped) == len(navigation)


def test_diagrams_have_a_dark_version() -> None:
    for name in ("overview", "epoch", "snapshot", "gradient"):
        drawing = (DOCS / "images" / f"{name}.svg").read_text()
        dark = re.findall(r'\[(fill|stroke)="(#\w+)"\]', drawing.partition("</style>")[0])
        used = re.findall(r' (fill|stroke)="(#\w+)"', drawing.partition("</style>")[2])
        assert set(dark) == set(used), name


def test_every_message_that_troubleshooting_quotes_exists() -> None:
    page = (DOCS / "how-to" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(quoted) >= 30
    known = messages()
    assert [text for text in quoted if not any(text in message for message in known)] == []


def test_the_readme_is_short_and_shows_code_early() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.encode()) <= 8192
    head = "\n".join(text.splitlines()[:30])
    code = re.search(r"```python\n(.*?)(```|\Z)", head, re.DOTALL)
    assert code is not None
    assert len([line for line in code[1].splitlines() if line.strip()]) >= 12
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert all(table.count("\n") <= 2 + 6 for table in tables)


def test_every_decision_has_a_status_that_the_index_shows() -> None:
    pages = {path.name[:4]: path.read_text(encoding="utf-8") for path in (DOCS / "decisions").glob("0*.md")}
    found = {number: match[1].split()[0] for number, page in pages.items() if (match := STATUS.match(page))}
    assert sorted(pages.keys() - found.keys()) == [], "expected the title, then `Status: accepted.` or why it is not"
    assert dict(ROW.findall((DOCS / "decisions" / "index.md").read_text(encoding="utf-8"))) == found


@pytest.mark.parametrize(
    ("page", "has_one"),
    [
        ("# 0001 · A\n\nStatus: accepted.\n\n## Context\n", True),
        ("# 0001 · A\n\nStatus: superseded by [0002](0002-b.md). Why.\n\n## Context\n", True),
        ("# 0001 · A\n\n## Context\n", False),
        ("# 0001 · A\n\nStatus: superseded by [0002](0003-c.md).\n\n## Context\n", False),
        ("# 0001 · A\n\nStatus: perhaps.\n\n## Context\n", False),
    ],
)
def test_a_status_is_found(page: str, *, has_one: bool) -> None:
    assert bool(STATUS.match(page)) is has_one


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_strict_build_passes_and_finds_what_is_planted(tmp_path: Path) -> None:
    for name in ("docs", "shade", "benchmarks", "examples", "scripts", "deploy", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml", ROOT / "redis.conf"):
        shutil.copy(path, tmp_path)
    sound = build(tmp_path, tmp_path / "site")
    assert sound.returncode == 0, sound.stdout + sound.stderr
    found = json.loads((tmp_path / "site/search/search_index.json").read_text())["docs"]
    boosts = {each["location"].partition("/")[0]: each.get("boost", 1) for each in found}
    assert boosts["decisions"] < boosts["how-to"] == boosts["reference"]
    defaults = (tmp_path / "site/reference/api-data/index.html").read_text()
    assert "WORKING_SET_FRACTION" not in re.sub(r"<[^>]+>", "", defaults), "a default shows as its value"
    assert f"torch-shade {shade.__version__}" in (tmp_path / "site/index.html").read_text()
    assert not re.search(r"(src|href)=\"https?://[^\"]+\.(js|css|woff2?)\"", (tmp_path / "site/index.html").read_text())
    glossary = (tmp_path / "docs" / "glossary.md").read_text()
    (tmp_path / "docs" / "how-to" / "lonely.md").write_text("# Lonely\n")
    (tmp_path / "docs" / "glossary.md").write_text(
        glossary + "\n[a](no-page.md) [b](format.md#no-anchor) [c](../no/file.py)\n"
    )
    found = build(tmp_path, tmp_path / "site")
    assert found.returncode != 0
    for text in ("no-page.md", "no-anchor", "no/file.py", "lonely.md"):
        assert text in found.stdout + found.stderr, text


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_the_notebook_runs_from_top_to_bottom_and_shows_what_it_says() -> None:
    for module in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(module)
    # A process of its own: the client keeps an event loop, and sockets to the kernel.
    program = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbformat.validate(notebook)
nbclient.NotebookClient(notebook, timeout=300).execute()
outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
print(*(output["text"] for output in outputs if output.get("name") == "stdout"))
"""
    notebook = ROOT / "examples" / "two_minutes.ipynb"
    cells = json.loads(notebook.read_text())["cells"]
    assert all(not cell.get("outputs") for cell in cells), "committed without outputs"
    command = [sys.executable, "-c", program, str(notebook)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    assert "800 hits, 400 misses" in done.stdout
    assert "every sample twice: True" in done.stdout
