"""Known faults of the gradient plane, planted again in a rank's process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

FAULTS: dict[str, Callable[[], AbstractContextManager[None]]] = {}
