"""Holds the public names against docs/public-api.md, and shows that a type checker sees them."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import get_args

import pytest

from shade import types
from shade.checkpoint._strategies import STRATEGIES
from shade.data._decode.cached_format import CACHED_FORMATS
from shade.errors import ConfigError
from shade.policy import POLICIES
from shade.sampling import MODES

ROOT = Path(__file__).resolve().parent.parent
LAZY = ["shade", "shade.cache", "shade.checkpoint", "shade.data", "shade.gradient"]
"""Packages that load a public name on first use."""
ADAPTED = ("accelerate", "lightning", "ray", "torchdata", "transformers")
NEEDS = {
    "shade.checkpoint.deepspeed": "deepspeed",
    **{f"shade.integrations.{name}": name for name in ADAPTED},
}
"""Packages without which a module cannot be imported."""


def documented() -> dict[str, set[str]]:
    """The public names of each module, as the page lists them."""
    names = defaultdict(set)
    for row in (ROOT / "docs" / "public-api.md").read_text().splitlines():
        cells = [re.findall(r"`([\w.]+)`", cell) for cell in row.split("|")[1:3]]
        if len(cells) == 2 and cells[0]:
            for module in cells[0]:
                names[module] |= set(cells[1])
    return names


@pytest.mark.parametrize("module", sorted(documented()))
def test_what_is_exported_is_documented(module: str) -> None:
    if module in NEEDS:
        pytest.importorskip(NEEDS[module], exc_type=ImportError)
    loaded = importlib.import_module(module)
    assert set(loaded.__all__) == documented()[module]
    for name in loaded.__all__:
        assert hasattr(loaded, name), f"{module}.{name}"


def test_no_public_package_is_left_out_of_the_page() -> None:
    for module in LAZY:
        if module != "shade.cache" or "shade.cache" in documented():
            assert module in documented()


@pytest.mark.parametrize("package", LAZY)
def test_a_type_checker_and_the_interpreter_see_the_same_names(package: str) -> None:
    path = ROOT / package.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    (split,) = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.If)]
    typed = {alias.name: node.module for node in split.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    (call,) = [node for node in ast.walk(split.orelse[0]) if isinstance(node, ast.Call)]
    homes = ast.literal_eval(call.args[1])
    assert {name: module for module, names in homes.items() for name in names} == typed
    loaded = importlib.import_module(package)
    assert set(loaded.__all__) - {"__version__"} == set(typed)
    assert set(dir(loaded)) >= set(typed)


CONSUMER = """
from torch.utils.data import TensorDataset
from shade import {name}
from shade.checkpoint import Checkpointer
from shade.data import ShadeDataset

dataset = ShadeDataset(TensorDataset(), {argument}=0.2)
checkpointer = Checkpointer(persist_to="snapshots", every="30s")
reveal_type(checkpointer.step())
"""


def complaints(tmp_path: Path, **words: str) -> str:
    """What mypy says of a user's script."""
    script = tmp_path / "consumer.py"
    script.write_text(CONSUMER.format(**{"name": "GradientEngine", "argument": "working_set_fraction"} | words))
    # As `scripts/check` does, so that one fills the cache for the other.
    command = [sys.executable, "-m", "mypy", str(script)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    return result.stdout + result.stderr


@pytest.mark.multiprocess
def test_a_type_checker_catches_a_users_typo(tmp_path: Path) -> None:
    sound = complaints(tmp_path)
    assert 'Revealed type is "bool"' in sound
    assert "Success" in sound, sound
    assert 'has no attribute "GradientEngin"' in complaints(tmp_path, name="GradientEngin")
    assert 'Unexpected keyword argument "working_set_fractoin"' in complaints(tmp_path, argument="working_set_fractoin")


def test_the_names_that_an_editor_completes_are_the_registered_ones() -> None:
    assert set(get_args(types.ModeName)) == set(MODES)
    assert set(get_args(types.PolicyName)) == set(POLICIES)
    assert set(get_args(types.StrategyName)) == set(STRATEGIES)
    assert get_args(types.FormName) == CACHED_FORMATS


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "shade" / "py.typed").is_file()


@pytest.mark.parametrize("module", [module for module in NEEDS if module.startswith("shade.integrations")])
def test_an_adapter_without_its_framework_says_what_to_install(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        if name.startswith(("shade.integrations.", f"{NEEDS[module]}.")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, NEEDS[module], None)
    with pytest.raises(
        ConfigError, match=rf"expected the {NEEDS[module]}.* package, got None; pip install '.*ecosystem"
    ):
        importlib.import_module(module)


def test_only_its_own_module_names_a_framework() -> None:
    """So that `import shade` and `import shade.integrations` load none."""
    for path in sorted((ROOT / "shade").rglob("*.py")):
        if ROOT / "shade" / "integrations" not in path.parents or path.name == "__init__.py":
            tree = ast.parse(path.read_text())
            named = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
            named |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
            found = {
                name for name in named if name.partition(".")[0] in ADAPTED or name.startswith("shade.integrations")
            }
            assert not found, path
