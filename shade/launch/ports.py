"""A port that is free on this machine at this moment: where the ranks of a run on one machine meet."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port that nobody uses now; somebody may a moment later."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
