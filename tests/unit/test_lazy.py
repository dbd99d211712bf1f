"""A numba that does not work is refused by name; without a folder for its builds it works all the same."""

from __future__ import annotations

import sys

import numba
import pytest
from numba.core import caching

from shade._lazy import compiled, load_numba
from shade.errors import ConfigError


def one() -> int:
    return 1


def test_a_missing_numba_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    for use in (load_numba, lambda: compiled(one)):
        with pytest.raises(ConfigError, match=r"expected a numba that works .*; pip install --upgrade 'numba>=0\.60'"):
            use()
    monkeypatch.undo()
    assert load_numba() is numba


def test_without_a_folder_for_the_build_the_loop_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    with pytest.raises(RuntimeError, match="no locator"):
        numba.njit(cache=True)(one)
    assert compiled(one)() == 1
