"""Events of a training: rows of numbers and words, each with its ``kind``.

There are four: ``load`` (the data of an epoch), ``save`` and ``restore`` (of a snapshot) and ``exchange`` (gradients of
`EXCHANGE_STEPS` steps). All go through `emit` to what `listen` was given. Without a listener an event costs an ``if``.
A sink that fails is left out from then on: no training ends for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, Final, Protocol

from shade.telemetry import jsonable
from shade.tracking.sinks import sink_named
from shade.types import ClosedByWith

logger = logging.getLogger("shade.tracking")

EXCHANGE_STEPS: Final = 50
"""Optimizer steps whose exchanges are one event."""
_lock = threading.Lock()


class Sink(Protocol):
    """Takes events; called by several threads, one at a time."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Takes one event: ``kind``, ``rank``, ``time`` (its end, seconds since 1970), ``seconds``, ``epoch`` or
        ``step``, and numbers, which may be nested."""

    def close(self) -> None:
        """Sends what is left."""


listeners: Final[list[Sink]] = []
"""What gets events."""


def emit(kind: str, seconds: float, **fields: Any) -> None:
    """Sends an event that has just ended to all listeners.

    Args:
        kind: ``load``, ``save``, ``restore``, ``exchange``, or a word of yours.
        seconds: How long it took.
        **fields: ``rank``, ``epoch`` or ``step``, and numbers; ``error`` for the kind of a failure.
    """
    if not listeners:
        return
    row = jsonable({"rank": 0, "time": time.time(), **fields, "kind": kind, "seconds": seconds})
    with _lock:
        for sink in tuple(listeners):
            try:
                sink.write(row)
            except Exception:  # of whatever another library raises
                logger.warning("%s failed and gets no further events", type(sink).__name__, exc_info=True)
                listeners.remove(sink)


class Listening(ClosedByWith):
    """Sinks that get events until this is closed; `listen` makes it."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks
        listeners.extend(sinks)

    def close(self) -> None:
        """Closes the sinks. Safe to call twice."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            with _lock:
                if sink in listeners:
                    listeners.remove(sink)
            try:
                sink.close()
            except Exception:  # as in emit
                logger.warning("%s did not close", type(sink).__name__, exc_info=True)


def listen(*sinks: str | Sink) -> Listening:
    """Sends this process's events to sinks, until what it returns is closed or its ``with`` ends.

    Args:
        *sinks: ``"otlp"``, ``"mlflow"``, ``"wandb"``, ``"trackio"``, ``"tensorboard"``, or sinks of your own.

    Returns:
        A context manager.

    Raises:
        ConfigError: A name is unknown, or its package is not installed.
    """
    return Listening([sink_named(each) if isinstance(each, str) else each for each in sinks])
