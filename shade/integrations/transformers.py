"""Hugging Face's Trainer: snapshots beside training, and a resume at any step.

The Trainer reads a folder before a callback hears of the start. So `restore` writes one; what is not in it is loaded in
place later. A step is counted when the next one begins: by then it was evaluated, which draws random numbers.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from typing_extensions import override

from shade.checkpoint import Checkpointer
from shade.data import ShadeSampler
from shade.errors import ConfigError
from shade.installation import install_hint

try:
    from transformers import Trainer, TrainerCallback

    from shade.integrations._resume_folder import check_saved, exported_state, write_folder
    from shade.integrations._trainer import ShadeTrainer
except ImportError as error:
    raise ConfigError.of("the transformers package", None, install_hint("ecosystem")) from error

__all__ = ["ShadeTrainer", "ShadeTrainerCallback"]


class ShadeTrainerCallback(TrainerCallback):  # type: ignore[misc]
    """Saves a Trainer's training into snapshots, and resumes it. It adds itself to the trainer; on every rank.

    Args:
        trainer: Any Trainer with a ``model=``, in one process or under DDP or FSDP2; others are refused.
        **options: As for `Checkpointer`. Each evaluation is followed by a save with its metrics.
    """

    def __init__(self, trainer: Trainer, **options: Any) -> None:
        check_saved(trainer)
        self.checkpointer, self._is_split = Checkpointer(**options), trainer.is_fsdp_enabled
        self.checkpointer.attach(trainer=self, **({} if self._is_split else {"model": trainer.model}))
        self._folder, self._metrics = Path(trainer.args.output_dir) / "shade-resume", dict[str, float]()
        self._trainer, self._state, self._step = trainer, "", 0
        trainer.add_callback(self)

    def restore(self) -> str | None:
        """Loads the newest snapshot; returns what ``train(resume_from_checkpoint=…)`` takes, None if there is none."""
        self._step = self.checkpointer.restore_latest(only=["trainer"] if self._is_split else ["model", "trainer"]).step
        if self._step and self._trainer.args.should_save:
            write_folder(self._folder, self._state, self._trainer.model)
        self._trainer.accelerator.wait_for_everyone()
        return str(self._folder) if self._step else None

    def state_dict(self) -> dict[str, str]:
        """Returns the Trainer's state as it writes it: history, best metric, states of callbacks."""
        return {"json": exported_state(self._trainer)}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Keeps a state for `restore`."""
        self._state = state["json"]

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self._step and state.global_step != self._step:
            raise ConfigError.of(f"a start at step {self._step}", state.global_step, "pass train() what restore() gave")
        sampler, scaler = getattr(given["train_dataloader"], "sampler", None), self._trainer.accelerator.scaler
        parts = {"optimizer": given["optimizer"], "scheduler": given["lr_scheduler"]}
        parts |= {"model": given["model"]} if self._is_split else {}
        parts |= {"scaler": scaler} if scaler else {}
        parts |= {"sampler": sampler} if isinstance(sampler, ShadeSampler) else {}
        self.checkpointer.attach(**parts)
        self.checkpointer.step_count = state.global_step
        if self._step:
            self.checkpointer.restore(self._step, only=list(parts))
            shutil.rmtree(self._folder, ignore_errors=True)  # all ranks have read it, before they wrapped the model

    @override
    def on_step_begin(self, args: Any, state: Any, control: Any, is_last: bool = False, **_: Any) -> None:
        if self._step and not is_last:
            self.checkpointer.restore(self._step, only=["random"])
            self._step = 0
        if state.global_step > self.checkpointer.step_count:
            metrics, self._metrics = self._metrics, {}
            self.checkpointer.step_count = state.global_step - 1
            if not self.checkpointer.step(metrics) and (metrics or is_last):
                self.checkpointer.save(metrics)

    @override
    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self._metrics = {name: each for name, each in given["metrics"].items() if isinstance(each, int | float)}

    @override
    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not args.load_best_model_at_end:  # else the last step would be saved with the best one's weights
            self.on_step_begin(args, state, control, is_last=True)
