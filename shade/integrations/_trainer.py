"""The Trainer of transformers: its state, and a Trainer with a `ShadeSampler`, which counts its epochs.

The Trainer takes all epochs to be as long as the first. Those of ``unbiased`` become shorter, so the sampler says when
one has ended, and which one is the last.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from typing_extensions import override

from shade.data import ShadeSampler
from shade.errors import ConfigError


def exported_state(trainer: Trainer) -> str:
    """Returns a trainer's state as it writes it itself: history, best metric, states of callbacks."""
    states: dict[str, Any] = {}
    for each in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(each, ExportableState):
            states.setdefault(type(each).__name__, []).append(each.state())
    states = {name: found[0] if len(found) == 1 else found for name, found in states.items()}
    return json.dumps(dataclasses.asdict(dataclasses.replace(trainer.state, stateful_callbacks=states)))


class ShadeTrainer(Trainer):  # type: ignore[misc]
    """A Trainer that reads a `ShadeDataset` by a `ShadeSampler`, reports the losses to it and weighs them.

    Args:
        *args: As for `transformers.Trainer`.
        sampler: The sampler; with ``mode="uniform"`` the loss is the Trainer's own.
        **options: As for `transformers.Trainer`. ``gradient_accumulation_steps`` has to divide the steps of an epoch.
    """

    def __init__(self, *args: Any, sampler: ShadeSampler, **options: Any) -> None:
        super().__init__(*args, **options)
        if sampler.num_steps % (accumulated := self.args.gradient_accumulation_steps):
            expected = f"gradient_accumulation_steps to divide the {sampler.num_steps} steps of an epoch"
            raise ConfigError.of(expected, accumulated, "choose another, or another batch_size")
        self.sampler, self._weighs = sampler, sampler.scores() is not None
        self.model_accepts_loss_kwargs &= not self._weighs  # so a mean is divided by the accumulated steps
        self.args.ignore_data_skip = True  # the sampler goes to its place, and would be skipped ahead twice
        self.add_callback(SampledEpochs(sampler))

    @override
    def get_train_dataloader(self) -> DataLoader[Any]:
        # Not through Accelerate, which would deal the batches of a rank out to the ranks again.
        names = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
        options = {name: getattr(self.args, f"dataloader_{name}") for name in names}
        options |= {"collate_fn": IndexedCollate(self.data_collator), "sampler": self.sampler}
        return DataLoader(self.train_dataset, self.sampler.batch_size, **options)

    @override
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any) -> Any:
        indices = inputs.pop("shade_indices", None)
        if indices is None or not self._weighs:
            result = super().compute_loss(model, inputs, return_outputs, **options)
            if indices is not None:  # the report says that the step is done; such a mode has no use for losses
                loss = result[0] if return_outputs else result
                self.sampler.report(indices, loss.detach().expand(len(indices)))
            return result
        outputs = model(**inputs)
        losses_B = self.sample_losses(outputs, inputs)
        self.sampler.report(indices, losses_B)
        loss = (losses_B * self.sampler.weights(indices)).mean()
        return (loss, outputs) if return_outputs else loss

    def sample_losses(self, outputs: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Returns each sample's loss, float (B,): the cross-entropy of classes. Override it for others."""
        labels = inputs["labels"]
        if labels.ndim != 1 or labels.is_floating_point():
            cure = 'override sample_losses, or ShadeSampler(…, mode="uniform")'
            raise ConfigError.of("labels int (B,)", f"{labels.dtype} {tuple(labels.shape)}", cure)
        return F.cross_entropy(outputs["logits"], labels, reduction="none")


class IndexedCollate:
    """Collates samples of a `ShadeDataset`, (sample, index) or (sample, target, index), and adds the indices."""

    def __init__(self, collate: Any) -> None:
        self._collate = collate

    def __call__(self, batch: list[Any]) -> Any:
        samples = [each[0] if len(each) == 2 else each[:-1] for each in batch]
        return {**self._collate(samples), "shade_indices": torch.tensor([each[-1] for each in batch])}


class SampledEpochs(TrainerCallback):  # type: ignore[misc]
    """Says the epoch to the sampler, which knows where it ends."""

    def __init__(self, sampler: ShadeSampler) -> None:
        self._sampler = sampler

    @override
    def on_epoch_begin(self, args: Any, state: Any, control: Any, is_end: bool = False, **_: Any) -> None:
        sampler = self._sampler
        if state.global_step and not sampler.epoch + sampler.steps_done:
            cure = "save with ShadeTrainerCallback(trainer, …), which restores the sampler, too"
            raise ConfigError.of(f"a sampler that resumes after step {state.global_step}", "one at its start", cure)
        if sampler.steps_done >= sampler.num_steps:
            is_last = sampler.epoch + 1 >= state.num_train_epochs
            control.should_training_stop |= is_end and is_last
            if not is_end and not is_last:
                sampler.set_epoch(sampler.epoch + 1)

    @override
    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.on_epoch_begin(args, state, control, is_end=True)
