"""The Trainer of transformers with a `ShadeSampler`, whose place is in the Trainer's own checkpoints, too."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint
from typing_extensions import override

from shade.data import ShadeSampler
from shade.errors import ConfigError
from shade.integrations._sampled_epochs import SAMPLER_NAME, SampledEpochs, collate_indexed


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
        self._epochs = SampledEpochs(sampler)
        self.add_callback(self._epochs)

    @override
    def train(self, resume_from_checkpoint: str | bool | None = None, *given: Any, **options: Any) -> Any:
        own = get_last_checkpoint(self.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
        self._epochs.saved = Path(own) / SAMPLER_NAME if own else None
        return super().train(resume_from_checkpoint, *given, **options)

    @override
    def get_train_dataloader(self) -> DataLoader[Any]:
        # Not through Accelerate, which would deal the batches of a rank out to the ranks again.
        names = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
        options = {name: getattr(self.args, f"dataloader_{name}") for name in names}
        options |= {"collate_fn": partial(collate_indexed, collate=self.data_collator), "sampler": self.sampler}
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
