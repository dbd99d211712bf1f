"""A numba that does not work is refused by name; without a folder for its builds, or beside a fork, it works."""

from __future__ import annotations

import subprocess
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


FORK_WHILE_COMPILING = """
import os, threading, time
import numpy as np
from shade._lazy import compiled, load_numba
from numba.core.compiler_lock import global_compiler_lock

@compiled
def double(x):
    return 2 * x

load_numba()
held = threading.Event()

def compile_for_a_while():
    with global_compiler_lock:
        held.set()
        time.sleep(0.5)

thread = threading.Thread(target=compile_for_a_while)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    os._exit(double(21) != 42)
thread.join()
assert double(4) == 8
_, status = os.waitpid(child, 0)
print("child", os.waitstatus_to_exitcode(status))
"""


@pytest.mark.multiprocess
def test_a_worker_that_is_forked_while_a_thread_compiles_can_compile() -> None:
    program = [sys.executable, "-W", "ignore", "-c", FORK_WHILE_COMPILING]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout.strip(), done.returncode) == ("child 0", 0), done.stderr
