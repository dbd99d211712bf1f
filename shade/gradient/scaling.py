"""Mixed precision: a step whose gradient overflowed on any rank is skipped on all, and all lower the scale together.

``torch.amp.GradScaler`` looks for infinities in ``p.grad``, each rank in its own. Here gradients leave ``p.grad``
during the backward pass, and every rank learns of every rank's overflow from the exchange. So the engine unscales
while it gathers (by the scale of that backward pass), and does what ``scaler.update()`` would do through the scaler's
public setters: back off after an overflow, grow after ``growth_interval`` good steps. The script keeps
``scaler.scale(loss)`` and leaves out ``unscale_``, ``step`` and ``update``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class ScaleKeeper:
    """Keeps the scale of a scaler; without a scaler, or with one that is disabled, a scale of 1.

    Args:
        scaler: The script's.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.num_good_steps = 0
        """Since the scale last changed."""

    @property
    def skips(self) -> bool:
        """Whether an overflow is a step to be skipped, and not an error."""
        return self._scaler is not None

    @property
    def unscale(self) -> float:
        """What gradients have to be multiplied with."""
        return 1.0 if self._scaler is None else 1.0 / self._scaler.get_scale()

    def stepped(self, is_good: bool) -> None:
        """Follows one step.

        Args:
            is_good: Whether it was finite on every rank.
        """
        if self._scaler is None:
            return
        self.num_good_steps = self.num_good_steps + 1 if is_good else 0
        scale = self._scaler.get_scale()
        if not is_good:
            self._scaler.update(scale * self._scaler.get_backoff_factor())
        elif self.num_good_steps == self._scaler.get_growth_interval():
            self._scaler.update(scale * self._scaler.get_growth_factor())
            self.num_good_steps = 0

    def standing(self) -> dict[str, Any]:
        """All that a rank which joins has to take over: `state_dict`, and the scale."""
        return {**self.state_dict(), "scale": None if self._scaler is None else self._scaler.get_scale()}

    def take(self, standing: Mapping[str, Any]) -> None:
        """Takes over another rank's `standing`."""
        self.load_state_dict(standing)
        if self._scaler is not None and standing["scale"] is not None:
            self._scaler.update(standing["scale"])

    def state_dict(self) -> dict[str, Any]:
        """What the scaler itself does not save for us."""
        return {"num_good_steps": self.num_good_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes `state_dict` back."""
        self.num_good_steps = int(state["num_good_steps"])
