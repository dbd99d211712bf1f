"""A long measurement that was stopped goes on where it was, and one that was done starts anew; parts of it may have a
process of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).resolve().parents[2] / "benchmarks" / "measures.py"
spec = importlib.util.spec_from_file_location("measures_of_benchmarks", FILE)
assert spec is not None
assert spec.loader is not None
measures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(measures)


def never() -> dict[str, Any]:
    pytest.fail("measured twice")


def figure(value: float) -> Callable[[], dict[str, Any]]:
    return lambda: {"seconds": value}


def test_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    path = tmp_path / "out" / "some.jsonl"
    first = measures.Kept(path)
    assert first("a", figure(1.5)) == {"seconds": 1.5}
    with pytest.raises(ZeroDivisionError):
        first("b", lambda: {"seconds": 1 / 0})
    with path.open("a") as file:
        file.write('{"key": "b", "fou')
    second = measures.Kept(path)
    assert second("a", never) == {"seconds": 1.5}
    assert second("b", figure(2.5)) == {"seconds": 2.5}
    assert second("b", never) == {"seconds": 2.5}
    assert second.commits == measures.commit()
    assert measures.Kept(path)("b", never) == {"seconds": 2.5}
    second.done()
    assert measures.Kept(path)("a", figure(3.5)) == {"seconds": 3.5}


def test_without_a_file_nothing_is_kept_for_later() -> None:
    kept = measures.Kept(None)
    assert kept("a", figure(1.5)) == kept("a", never)
    kept.done()
    assert measures.Kept(None)("a", figure(2.5)) == {"seconds": 2.5}


def test_what_a_child_finds_comes_back_and_what_it_died_of_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    def find(word: str) -> dict[str, Any]:
        sys.stdout.write("said aside\n")
        if word == "raise":
            raise ValueError("why it failed")
        if word == "die":
            os._exit(7)
        return {"found": word, "process": os.getpid()}

    found = measures.in_child(find, "this")
    assert (found["found"], found["process"] == os.getpid()) == ("this", False)
    with pytest.raises(RuntimeError, match="ValueError: why it failed"):
        measures.in_child(find, "raise")
    with pytest.raises(RuntimeError, match="exit code 7\nsaid aside"):
        measures.in_child(find, "die")
    assert capfd.readouterr() == ("", "")


def test_a_child_goes_on_after_what_it_raised_and_holds_what_it_made() -> None:
    class Counter:
        def __init__(self, start: int) -> None:
            self.number = start

        def add(self, number: int) -> dict[str, Any]:
            if number < 0:
                raise ValueError("only more")
            self.number += number
            return {"number": self.number, "process": os.getpid()}

    with contextlib.closing(measures.Child(Counter, 5)) as child:
        first = child.call("add", 2)
        with pytest.raises(RuntimeError, match="ValueError: only more"):
            child.call("add", -1)
        assert child.call("add", 1) == {"number": 8, "process": first["process"]}
    assert first["process"] != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(first["process"], 0)
