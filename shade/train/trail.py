"""Writes the trail of a run: the exact loss of every step, with which `scripts/certify` compares a replay.

The trail has a line per step, ``{"step": 12, "loss": "0x1.3333340000000p+1"}``: the exact sum of rank 0's losses.
Losses stay on their device until a few dozen are written together, so no step waits for one. About 45 bytes per step.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch

TRAIL_FILE: Final = "trail.jsonl"
"""Name of the file in the run directory."""
_LOSSES_PER_WRITE: Final = 64


class Trail:
    """Writes the trail of losses.

    Args:
        path: File to append to: a resumed run repeats some steps, and the last line of a step counts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: list[tuple[int, torch.Tensor]] = []

    def record(self, step: int, loss: torch.Tensor) -> None:
        """Records the loss of a step of the run: a scalar on any device."""
        self._pending.append((step, loss))
        if len(self._pending) >= _LOSSES_PER_WRITE:
            self.flush()

    def flush(self) -> None:
        """Writes the pending losses; waits for the device."""
        if self._pending:
            losses = torch.stack([loss for _, loss in self._pending]).double().tolist()
            rows = [{"step": step, "loss": loss.hex()} for (step, _), loss in zip(self._pending, losses, strict=True)]
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(row)}\n" for row in rows)
            self._pending.clear()
