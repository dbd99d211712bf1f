"""Every rank and `shade top` import control: it must import nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import shade.control

pytestmark = pytest.mark.multiprocess


def test_no_module_of_control_loads_torch_or_what_only_tuning_needs() -> None:
    folder = Path(str(shade.control.__file__)).parent
    names = [f"shade.control.{path.stem}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]
    assert "shade.control.controller" in names
    program = (
        f"import sys, importlib; [importlib.import_module(name) for name in {names}]\n"
        "print({'torch', 'optuna', 'sklearn', 'scipy', 'matplotlib', 'redis', 'numba'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
