"""`scripts/prose` finds unidiomatic words and long sentences, and the texts of this repository have no more of them."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "prose"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = spec_from_loader("prose", SourceFileLoader("prose", str(SCRIPT)))
    assert spec is not None
    module = module_from_spec(spec)
    assert spec.loader is not None
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    spec.loader.exec_module(module)
    sys.dont_write_bytecode = writes
    return module


def test_planted_words_and_sentences_are_found(script: Any, tmp_path: Path) -> None:
    (tmp_path / "docs" / "decisions").mkdir(parents=True)
    (tmp_path / "shade").mkdir()
    long = "word " * 31
    (tmp_path / "README.md").write_text(f"# It goes\non\n\n```sh\nshall\n```\n`whom` {long}end.\n")
    (tmp_path / "docs" / "decisions" / "1.md").write_text("Nobody knew.\n\n" + long)
    module = '"""Nobody reads it."""\nraise ValueError(f"expected {1}, as we were told")\n'
    (tmp_path / "shade" / "a.py").write_text(module)
    found = script.look(tmp_path)
    assert [len(found[part]) for part in ("documentation", "decisions", "messages")] == [2, 1, 1]
    assert "'goes on'" in found["documentation"][0]
    assert "'told'" in found["messages"][0]


def test_the_texts_here_get_no_worse(script: Any) -> None:
    found = script.look(SCRIPT.parent.parent)
    worse = {part: lines for part, lines in found.items() if len(lines) > script.MOST[part]}
    assert worse == {}
