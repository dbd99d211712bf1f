"""Lightning's checkpoints of a whole model: its first rank saves what Lightning has collected."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from shade.checkpoint import StateDictCheckpointer
from shade.integrations._lightning.snapshot_io import SnapshotIO, step_at


class WholeSnapshotIO(SnapshotIO):
    """Saves states whole, and loads the files of torch, too."""

    def __init__(self, checkpointer: StateDictCheckpointer) -> None:
        super().__init__(checkpointer)
        self._states = checkpointer

    @override
    def _save(self, checkpoint: dict[str, Any], step: int) -> None:
        self._states.save_state(checkpoint, step)

    @override
    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        if (step := step_at(path)) is None:
            return dict(super().load_checkpoint(path, map_location, weights_only))
        self._states.restore(step, only=["state"])
        return self._states.state_dict_state.take() or {}
