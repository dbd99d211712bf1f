"""`scripts/measure_structure` counts what its help says, on a tiny package in which every figure is known."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "measure_structure"
TESTS = {
    "tests/unit/parts/test_left.py": "import shade\n",
    "tests/unit/test_nothing.py": "import shade\n",
    "tests/unit/golden.json": "{}\n",
    "README.md": "`shade.parts.left` has a `Plan`, and `shade.parts.middle` was there once.\n",
}
FILES = {
    "__init__.py": '"""A package."""\n',
    "alone.py": '"""Nobody imports it, as we are told."""\n\nimport shade.parts.left\n',
    "parts/__init__.py": "from shade.parts.right import Plan\n",
    "parts/left.py": '''"""The left part."""

from shade.parts import right

# A comment of its own.
LIMIT = 3  # not one of its own line: it goes on


class Plan:
    """See `right.Plan`."""
    name: str

    def open(self):
        self._group = dist.new_group(self.name)
    class _Inner:
        """See to it that nothing goes
        on here."""
''',
    "parts/right.py": '''"""The right part."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shade.parts.left import Plan as Other


class Plan:
    """A plan."""


def late() -> None:
    """See `late`; it says more."""
    import shade.parts.left
    shade.parts.left.made._group

    raise ValueError(f"whom {shade} meant")
''',
    "_hidden/__init__.py": "",
    "_hidden/deep.py": '"""Deep."""\n\nclass _Inner:\n    """Another."""\n',
}


@pytest.fixture(scope="module")
def script() -> Any:
    """The script as a module."""
    loader = SourceFileLoader("measure_structure", str(SCRIPT))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[loader.name] = module  # dataclasses look their module up
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = writes
    return module


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A clone with a tiny package."""
    for name, text in {**{f"shade/{name}": text for name, text in FILES.items()}, **TESTS}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_every_figure(script: Any, root: Path) -> None:
    figures = script.measure(root, traced=False)
    lengths = sorted(len(text.splitlines()) for text in FILES.values())
    assert figures == {
        "largest folder, modules": "2 (shade/parts)",
        "folders above 12 modules": "0",
        "modules": "7",
        "lines": f"{sum(lengths)}",
        "median module, lines": f"{lengths[3]}",
        "largest class, lines": "9 (Plan)",
        "largest class, attributes": "2 (Plan)",
        "classes above 350 lines or 20 attributes": "0",
        "private doors": "1",
        "files with new_group": "1",
        "class names in two or more modules": "2",
        "class names in two or more folders": "1",
        "docstrings 'See `X`'": "2",
        "comments of a line of their own": "1",
        "docstring lines": "11",
        "docstrings over 20 lines": "0",
        "dead names": "1",
        "dialect words": "5",
        "public modules": "5",
        "import cycles": "0",
        "unit tests named after nothing": "1",
        "tests, files": "3",
        "tests, lines": "2",
    }


def test_names_behind_the_figures(script: Any, root: Path) -> None:
    modules = script.read(root)
    assert script.repeated_classes(modules, root) == ["Plan", "_Inner"]
    assert script.repeated_classes(modules, root, by_folder=True) == ["_Inner"]
    assert +script.dialect_words(modules) == {"nobody": 1, "told": 1, "goes on": 2, "whom": 1}


def test_cycle_and_wide_folder_are_found(script: Any, root: Path) -> None:
    right = root / "shade" / "parts" / "right.py"
    right.write_text(FILES["parts/right.py"].replace("if TYPE_CHECKING:", "if LIMIT:"))
    for number in range(11):
        (root / "shade" / "parts" / f"part{number}.py").write_text("")
    (root / "shade" / "alone.py").write_text("class C:\n" + "    x = 1\n" * 350)
    figures = script.measure(root, traced=False)
    assert script.import_cycles(script.read(root)) == [{"shade.parts.left", "shade.parts.right"}]
    assert figures["import cycles"] == "1"
    assert figures["folders above 12 modules"] == "1 (shade/parts 13)"
    assert figures["classes above 350 lines or 20 attributes"] == "1"
    assert figures["largest class, lines"] == "351 (C)"


def test_a_folder_without_the_package_is_refused(script: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected a clone with a folder shade/"):
        script.measure(tmp_path)


def test_markdown_has_both_columns(script: Any, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--no-trace", "--markdown", str(root), str(root)]) == 0
    assert "| dialect words | 5 | 5 |" in capsys.readouterr().out.splitlines()


MOST = {
    "lines": 65_915,
    "private doors": 0,
    "class names in two or more modules": 0,
    "docstrings 'See `X`'": 0,
    "dialect words": 9,
    "import cycles": 0,
    "dead names": 0,
    "docstring lines": 11_477,
    "docstrings over 20 lines": 13,
    "unit tests named after nothing": 1,
}
"""Figures of this package that may shrink and must not grow; lower one when the code has got better."""


def test_this_package_gets_no_worse(script: Any) -> None:
    figures = script.measure(SCRIPT.parent.parent, traced=False)
    grown = {name: figures[name] for name, most in MOST.items() if int(figures[name]) > most}
    assert grown == {}, f"expected at most {MOST}; scripts/measure_structure --details names what stands behind each"


@pytest.mark.multiprocess
def test_a_save_and_a_restore_pass_through_few_files(script: Any) -> None:
    files = script.trace(SCRIPT.parent.parent)
    # A heartbeat of the run lock falls into some saves.
    assert len([name for name in files["save"] if not name.endswith("run_lock.py")]) <= 24
    assert len(files["restore"]) <= 17
