"""Ends, with its script, what the script has not closed: the last save is committed then, or the log says why not.

A script that saves in its last line ends while the save is on its way, and its threads end with it. So the interpreter
is asked to wait, as it does for the pools of `concurrent.futures`, before it takes away what threads need.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable

logger = logging.getLogger("shade.checkpoint")
_endings: set[weakref.WeakMethod[Callable[[bool], None]]] = set()
_process: int | None = None


def end_at_exit(ending: Callable[[bool], None]) -> None:
    """Calls a method when this process ends, if its object exists then, with whether an exception has ended it."""
    global _process
    if _process != os.getpid():
        _process = os.getpid()
        # A forked child ends nothing of its parent's.
        _endings.clear()
        # Not `atexit`, which comes when no pool takes work any more.
        threading._register_atexit(_end_all)  # type: ignore[attr-defined]
    _endings.add(weakref.WeakMethod(ending, _endings.discard))


def _end_all() -> None:
    if _process != os.getpid():
        return
    has_failed = hasattr(sys, "last_value")
    for ending in filter(None, [each() for each in _endings]):
        try:
            ending(has_failed)
        except Exception as error:  # noqa: BLE001  # the others are ended all the same
            logger.error("%s has failed at exit: %s", ending, error)
