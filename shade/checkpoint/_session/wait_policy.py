"""How far a save must have come before training goes on: what a strategy's terms say, kept.

Usually it is enough that the state is copied, and an optimizer's step is what waits for it. Some strategies promise
more: that a save is in storage before `save` returns, or before the next step. A save that fails is no reason to stand
still, as the courier has told of it; nor is one that its flusher does not bring to storage for ten minutes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from typing import Final

from shade.checkpoint._save.async_writer import SaveHandle
from shade.checkpoint._save.save import Saver
from shade.checkpoint._session.open_tiers import Tiers
from shade.checkpoint._strategies.base import Moment, Terms
from shade.errors import CheckpointError

PATIENCE_SECONDS: Final = 600.0
"""For durability, after the commit."""

logger = logging.getLogger("shade.checkpoint")


class WaitPolicy:
    """Makes the training thread wait.

    Args:
        saver: Whose saves are waited for.
        tiers: Know what is durable.
        terms: Say how long.
    """

    def __init__(self, saver: Saver, tiers: Tiers, terms: Terms) -> None:
        self._saver, self._tiers = saver, tiers
        after_copy: Mapping[Moment, Callable[[SaveHandle], None]] = {
            "begun": _at_once,
            "copied": _at_once,
            "committed": _until_committed,
            "durable": _until_committed if tiers.storage is None else self._until_durable,
        }
        self._after_save, self._before_step = after_copy[terms.save_waits_for], after_copy[terms.step_waits_for]
        self._is_save_copied = terms.save_waits_for != "begun"
        self._passed: SaveHandle | None = None
        """The save that needs not be waited for again."""

    def after_save(self) -> None:
        """Before `save` returns."""
        if self._is_save_copied:
            self._saver.before_step()
        self._wait(self._after_save)

    def before_step(self) -> None:
        """Before an optimizer steps, and so changes what may not have been copied."""
        self._saver.before_step()
        if self._saver.latest is not self._passed:
            self._wait(self._before_step)
            self._passed = self._saver.latest

    def _wait(self, until: Callable[[SaveHandle], None]) -> None:
        ticket = self._saver.latest
        if ticket is not None:
            with ticket.blocking():
                until(ticket)

    def _until_durable(self, ticket: SaveHandle) -> None:
        _until_committed(ticket)
        if ticket.landed.exception() is not None:
            return
        try:
            self._tiers.wait_durable(ticket.landed.result(), ticket.step, PATIENCE_SECONDS)
        except CheckpointError as error:
            logger.warning("training goes on before step %d is durable: %s", ticket.step, error)


def _at_once(_: SaveHandle) -> None:
    """What is copied is enough."""


def _until_committed(ticket: SaveHandle) -> None:
    wait([ticket.landed])
