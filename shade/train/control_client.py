"""Reports one rank's steps to rank 0, whose controller decides how much is sent."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from contextlib import closing
from typing import Any

from shade.control.client import TelemetryClient
from shade.control.controller import Controller
from shade.control.server import TOKEN_VARIABLE, TelemetryServer, is_loopback, token_given
from shade.gradient._engine.engine import GradientEngine
from shade.rank_group import current_group

logger = logging.getLogger("shade.train")


class ControlClient:
    """Reports one rank's steps, and on rank 0 decides. Collective to make.

    Args:
        engine: The engine whose steps are reported; on rank 0 it gets the decisions.
        make: Makes the controller for a number of ranks; called on rank 0.
        host: Name or address of rank 0's machine, as the other ranks reach it.
    """

    def __init__(self, engine: GradientEngine, make: Callable[[int], Controller], host: str) -> None:
        self._engine = engine
        self._controller: Controller | None = None
        self._server: TelemetryServer | None = None
        self._client: TelemetryClient | None = None
        with closing(current_group("the address of rank 0's telemetry")) as group:
            shared: Any = None
            if group.rank == 0:
                # Beyond this machine a token is required. To watch such a run with `shade top`, a user sets one.
                given = token_given(None)
                token = given or (None if is_loopback(host) else secrets.token_hex(16))
                self._server, self._controller = TelemetryServer(host, token=token), make(group.world_size)
                hint = "" if given == token else f", with a {TOKEN_VARIABLE} of your own"
                logger.info("telemetry at %s (shade top %s%s)", self._server.url, self._server.url, hint)
                shared = [self._server.url, token]
            url, token = group.share(shared)
        if self._server is None:
            self._client = TelemetryClient(url, token=token)

    def steer(self) -> None:
        """Reports the step that ended; on rank 0, takes in the reports of all ranks and decides."""
        report = self._engine.report()
        if report is None:
            return
        if self._client is not None:
            self._client.report(report)
        if self._server is None or self._controller is None:
            return
        self._server.hear(report)
        for each in self._server.drain():
            self._controller.observe(each)
        decision = self._controller.decide(self._engine.step_count)
        if decision is not None:
            self._server.hear(decision)
            self._engine.propose(decision)
            logger.info("from step %d: %s", decision.effective_step, decision.reason)

    def state_dict(self) -> dict[str, Any]:
        """Returns the controller's state; empty on other ranks than 0."""
        return {} if self._controller is None else self._controller.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the controller's state, where there is a controller."""
        if self._controller is not None and state:
            self._controller.load_state_dict(state)

    def close(self) -> None:
        """Closes client and server. Safe to call twice."""
        for end in (self._client, self._server):
            if end is not None:
                end.close()
        self._client = self._server = None
