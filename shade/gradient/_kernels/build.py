"""Builds the compiled loops, or refuses by name where numba cannot.

numba compiles the loops of a module at first use, a second or two, and keeps the build on disk where it can write to a
folder. The loops give the same bits on every processor (`tests/support/kernel_oracle.py` has each of them in numpy), so
ranks on different machines hold the same weights.
"""

from __future__ import annotations

import importlib
import os
import threading
from typing import Any

from shade.errors import ConfigError

_lock = threading.Lock()
_built: dict[str, Any] = {}


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


# A thread of the parent may have held it, between two loops.
os.register_at_fork(after_in_child=_renew_lock)


def build(loops: str) -> Any:
    """Returns a module of this package after each of its loops has run once.

    A thread that needs it waits for another one that builds it; later calls return at once.

    Args:
        loops: The module's name, without that of the package. Its ``probe()`` runs the loops.

    Returns:
        The module.

    Raises:
        ConfigError: numba cannot be imported, or cannot compile the loops.
    """
    if loops not in _built:
        with _lock:
            if loops not in _built:
                _built[loops] = _build(f"shade.gradient._kernels.{loops}")
    return _built[loops]


def _build(name: str) -> Any:
    try:
        module = importlib.import_module(name)
        module.probe()
    except ConfigError:
        raise
    except Exception as error:  # a compiler may raise anything
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        cure = "check `python -c 'import numba'`, and install another version of numba"
        raise ConfigError.of(f"numba to compile {name}", reason, cure) from error
    return module


def prepare() -> Any:
    """Returns the passes over a bucket, `_kernels.loops`; called in a thread that has time, it shortens later waits."""
    return build("loops")
