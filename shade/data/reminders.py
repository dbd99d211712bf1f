"""Reminders: tells, once each, of calls that a training loop owes its sampler and leaves out.

Three calls carry the method: `set_epoch` (or every epoch is the same), `report` (or nothing is important) and `weights`
(or the gradient is biased). A loop without them runs and looks healthy, so silence would be a trap. The reminder names
the very line to add; it comes when the second epoch begins, by when a complete loop has made all three.
"""

from __future__ import annotations

import warnings

LINES = {
    "set_epoch": ("sampler.set_epoch(epoch)", "at the top of every epoch; until then epochs are counted"),
    "report": ("sampler.report(indices, losses)", "after the losses are known; until then every epoch is full"),
    "weights": ("(losses * sampler.weights(indices)).mean().backward()", "or the gradient is biased"),
}
"""Call → the line to add, and where or why."""


class ForgottenCallWarning(UserWarning):
    """The training loop leaves out a call its sampling mode depends on; says which line to add, once."""


class Reminders:
    """Knows the calls of one training loop."""

    def __init__(self) -> None:
        self.made: set[str] = set()
        """Calls that the loop ever made; the sampler adds to it in the middle of a step, where a method call counts."""
        self._told: set[str] = set()

    def require(self, call: str) -> None:
        """Warns, the first time, if a call was never made.

        Args:
            call: One of `LINES`.
        """
        if call in self.made or call in self._told:
            return
        self._told.add(call)
        line, why = LINES[call]
        warnings.warn(
            f"the training loop never called sampler.{call}(); add the line `{line}` {why}",
            ForgottenCallWarning,
            stacklevel=4,
        )
