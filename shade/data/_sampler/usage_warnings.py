"""Warns of calls that a training loop owes its sampler: it runs without them, and looks healthy."""

from __future__ import annotations

import warnings

LINES = {
    "set_epoch": ("sampler.set_epoch(epoch)", "at the top of every epoch; until then epochs are counted"),
    "report": ("sampler.report(indices, losses)", "after the losses are known; until then every epoch is full"),
    "weights": ("(losses * sampler.weights(indices)).mean().backward()", "or the gradient is biased"),
}
"""Call → the line to add, and where or why."""


class ForgottenCallWarning(UserWarning):
    """The training loop leaves out a call that its sampling mode depends on; the message names the line to add."""


class UsageWarnings:
    """Records which calls one training loop makes."""

    def __init__(self) -> None:
        self.made: set[str] = set()
        """Calls that the loop ever made. The sampler adds to it in the middle of a step, where a method call would
        cost."""
        self._warned: set[str] = set()

    def warn_of_part(self, num_reported: int, batch_size: int) -> None:
        """Warns of a report of a part of a batch."""
        self._warn_once(
            "part",
            f"report() got {num_reported} samples of a batch of {batch_size}. If the loader's batch_size is not "
            "the sampler's, give both the same: a run that resumes inside a batch takes all of it again. If the "
            "batch is reported in parts, leave it so",
        )

    def warn_of_place(self, step: int) -> None:
        """Warns of a state whose place is unknown: nothing was reported, and no DataLoader asks for the indices."""
        self._warn_once(
            "place",
            f"the state says step {step}, because no loss was reported and the sampler does not know what took its "
            "indices; add the line `sampler.report(indices, losses)`, or load batches with DataLoader, "
            "StatefulDataLoader or ShadeLoader",
        )

    def warn_of_length(self, epoch: int, num_steps: int, num_full: int) -> None:
        """Warns of an epoch that is shorter than the first, whose length the loop asked for."""
        if num_steps < num_full and "len" in self.made and "total_steps" not in self.made:
            self._warn_once(
                "length",
                f"epoch {epoch} has {num_steps} steps, a full epoch {num_full}. A schedule that counts epochs × "
                "len(loader) steps does not reach its end; give it sampler.total_steps(epochs)",
            )

    def require(self, call: str) -> None:
        """Warns if one of the calls of `LINES` was never made."""
        if call not in self.made:
            line, why = LINES[call]
            message = f"the training loop never called sampler.{call}(); add the line `{line}` {why}"
            self._warn_once(call, message, ForgottenCallWarning)

    def _warn_once(self, name: str, message: str, category: type[UserWarning] = UserWarning) -> None:
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(message, category, stacklevel=5)
