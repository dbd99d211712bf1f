"""Lightning's checkpoints of a model that `ModelParallelStrategy` splits: each rank saves its part into a snapshot.

That strategy asks no `CheckpointIO` for a save or a load, so its own calls are replaced.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from typing_extensions import override

from shade.checkpoint import Checkpointer
from shade.integrations._lightning.snapshot_io import SnapshotIO, step_at


class SplitSnapshotIO(SnapshotIO):
    """Saves on every rank, and loads in place, onto any other mesh, too; to its checkpointer nothing is attached."""

    def __init__(self, strategy: ModelParallelStrategy, checkpointer: Checkpointer) -> None:
        super().__init__(checkpointer)
        self._strategy = strategy
        self._rest, self._attached = dict[str, Any](), list[str]()
        strategy.save_checkpoint, strategy.load_checkpoint = self.save_checkpoint, self.load_checkpoint
        # What they return would be copied to the host, and is not needed: the model and its optimizers are attached.
        strategy.lightning_module_state_dict, strategy.optimizer_state = dict, lambda optimizer: {}

    def state_dict(self) -> dict[str, Any]:
        """Returns what Lightning saves beside the model and its optimizers."""
        return self._rest

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keeps a state for Lightning."""
        self._rest = state

    def _attach(self) -> None:
        # Not before: the strategy's setup makes them.
        if not self._attached:
            optimizers = {f"optimizer_{number}": each for number, each in enumerate(self._strategy.optimizers)}
            self._checkpointer.attach(model=self._strategy.lightning_module, trainer=self, **optimizers)
            self._attached = ["model", "trainer", *optimizers]

    def close(self) -> None:
        """Waits for the last save and its note, then closes the checkpointer."""
        self.teardown()
        self._checkpointer.close()

    @override
    def _save(self, checkpoint: dict[str, Any], step: int) -> None:
        self._attach()
        self._rest, self._checkpointer.step_count = checkpoint, step
        self._checkpointer.save()

    @override
    def _write_note(self, path: Any, step: int) -> None:
        if self._strategy.is_global_zero:
            super()._write_note(path, step)

    @override
    def load_checkpoint(self, path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = self._strategy.broadcast(path)
        if (step := step_at(path)) is None:
            return dict(ModelParallelStrategy.load_checkpoint(self._strategy, path, weights_only))
        self._attach()
        self._checkpointer.restore(step, only=self._attached)
        return self._rest
