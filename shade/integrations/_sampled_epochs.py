"""Epochs of a `ShadeSampler` under the Trainer of transformers, which takes all to be as long as the first: the sampler
says when one has ended, and which one is the last."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from typing_extensions import override

from shade.data import ShadeSampler
from shade.errors import ConfigError

SAMPLER_NAME = "sampler.pt"


def collate_indexed(batch: list[Any], collate: Callable[[list[Any]], Any]) -> Any:
    """Collates samples of a `ShadeDataset`, (sample, index) or (sample, target, index), and adds the indices."""
    samples = [each[0] if len(each) == 2 else each[:-1] for each in batch]
    return {**collate(samples), "shade_indices": torch.tensor([each[-1] for each in batch])}


class SampledEpochs(TrainerCallback):  # type: ignore[misc]
    """Says the epoch to the sampler, which knows where it ends, and puts its place into the Trainer's checkpoints."""

    def __init__(self, sampler: ShadeSampler) -> None:
        self._sampler = sampler
        self.saved: Path | None = None

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.saved is not None and self.saved.exists():  # not before: the steps of a whole epoch were counted
            self._sampler.load_state_dict(torch.load(self.saved, weights_only=True))

    @override
    def on_epoch_begin(self, args: Any, state: Any, control: Any, is_end: bool = False, **_: Any) -> None:
        sampler = self._sampler
        if state.global_step and not sampler.epoch + sampler.steps_done:
            cure = f"resume from a checkpoint with {SAMPLER_NAME}, or from a snapshot of ShadeTrainerCallback"
            raise ConfigError.of(f"a sampler that resumes after step {state.global_step}", "one at its start", cure)
        if sampler.steps_done >= sampler.num_steps:
            is_last = sampler.epoch + 1 >= state.num_train_epochs
            control.should_training_stop |= is_end and is_last
            if not is_end and not is_last:
                sampler.set_epoch(sampler.epoch + 1)

    @override
    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.on_epoch_begin(args, state, control, is_end=True)

    @override
    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        if args.should_save and folder.is_dir():  # a trial of a search has another, and is not resumed
            torch.save(self._sampler.state_dict(), folder / SAMPLER_NAME)
