"""Train text under Hugging Face's Trainer: a map-style `datasets.Dataset` of token lists, padded when it is collated.

    pip install 'torch-shade[ecosystem]'
    python examples/transformers_trainer.py

`ShadeTrainer` overrides three methods: which loader trains (its batches must not be dealt out to ranks again, so it
does not pass through Accelerate), what the loss is, and `train`, which remembers the checkpoint to resume from. A
callback says the epoch, puts the sampler's state beside each checkpoint, and loads it on a resume, with any number of
workers.

What to know: the Trainer counts the steps of the first epoch and takes all to be as long. Epochs of ``unbiased`` become
shorter after the second, so a learning rate that falls over ``max_steps`` does not quite reach its end; ``keep=1.0``
keeps all of them alike. With ``gradient_accumulation_steps`` all epochs have to be alike, and to be divided by it.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.trainer_utils import get_last_checkpoint

from shade import ShadeDataset, ShadeSampler

BATCH, WORDS, SAMPLER_FILE = 8, 50, "sampler.pt"


def make_text(num_samples: int = 160) -> datasets.Dataset:
    """Sentences of 3 to 12 tokens, in two classes that prefer different words."""
    draw = random.Random(0)
    labels = [number % 2 for number in range(num_samples)]
    tokens = [[draw.randrange(1 + 20 * label, 30 + 20 * label) for _ in range(draw.randint(3, 12))] for label in labels]
    return datasets.Dataset.from_dict({"input_ids": tokens, "label": labels})


def collate(batch: list[Any]) -> dict[str, torch.Tensor]:
    """Pads. A data set of dicts comes from `ShadeDataset` as (dict, index): the indices go along."""
    indices = [each[1] for each in batch if isinstance(each, tuple)]
    rows = [each[0] if isinstance(each, tuple) else each for each in batch]
    tokens = [torch.tensor(row["input_ids"]) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    columns = {"input_ids": padded, "attention_mask": (padded > 0).long()}
    columns["labels"] = torch.tensor([row["label"] for row in rows])
    return columns | ({"indices": torch.tensor(indices)} if indices else {})


class BagOfWords(torch.nn.Module):
    """The mean of the words, and a line through it; any model for sequence classification takes its place."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.EmbeddingBag(WORDS + 1, 8, padding_idx=0)
        self.line = torch.nn.Linear(8, 2)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor | None = None
    ) -> SequenceClassifierOutput:
        """Logits, and the mean loss if there are labels."""
        logits = self.line(self.words(input_ids * attention_mask))
        return SequenceClassifierOutput(None if labels is None else F.cross_entropy(logits, labels), logits)


class ShadeTrainer(Trainer):
    """The Trainer, with a sampler that hears of the losses."""

    def __init__(self, *args: Any, sampler: ShadeSampler, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sampler = sampler
        self.loader = DataLoader(
            self.train_dataset,
            batch_size=sampler.batch_size,
            sampler=sampler,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
        )
        self.seen: list[list[int]] = []
        self.model_accepts_loss_kwargs = False  # the loss below is a mean: let the Trainer divide by accumulated steps
        self.args.ignore_data_skip = True  # the sampler goes to its place, and would be skipped ahead twice
        self.checkpoint: str | None = None
        self.add_callback(KeepPlace(self))

    def get_train_dataloader(self) -> DataLoader:
        """Ours as it is, not through ``accelerator.prepare``."""
        return self.loader

    def compute_loss(
        self, model: Any, inputs: dict[str, torch.Tensor], return_outputs: bool = False, **options: Any
    ) -> Any:
        """Weighs and reports in training; an evaluation has no indices."""
        indices = inputs.pop("indices", None)
        if indices is None:
            return super().compute_loss(model, inputs, return_outputs, **options)
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        losses_B = F.cross_entropy(outputs.logits, labels, reduction="none")
        self.sampler.report(indices, losses_B)
        self.seen.append(indices.tolist())
        loss = (losses_B * self.sampler.weights(indices)).mean()
        return (loss, outputs) if return_outputs else loss

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        """As the Trainer's; remembers the checkpoint for `KeepPlace`."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self.args.output_dir)
        self.checkpoint = resume_from_checkpoint or None
        return super().train(resume_from_checkpoint, **options)


class KeepPlace(TrainerCallback):
    """Says the epoch; saves where the sampler is beside each checkpoint, and goes there on a resume."""

    def __init__(self, trainer: ShadeTrainer) -> None:
        self.trainer, self.sampler = trainer, trainer.sampler

    def _epoch_is_over(self) -> bool:
        return self.sampler.steps_done >= self.sampler.num_steps

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """After the Trainer has asked for the length of a whole epoch."""
        if self.trainer.checkpoint is not None:
            self.sampler.load_state_dict(torch.load(Path(self.trainer.checkpoint) / SAMPLER_FILE, weights_only=True))

    def on_epoch_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """Before the epoch's first batch. After the last epoch, nothing is left, and the Trainer stops."""
        if self._epoch_is_over() and self.sampler.epoch + 1 < state.num_train_epochs:
            self.sampler.set_epoch(self.sampler.epoch + 1)

    def on_epoch_end(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """The Trainer counts epochs by the length of the first one, and after a resume has some left."""
        if self._epoch_is_over() and self.sampler.epoch + 1 >= state.num_train_epochs:
            control.should_training_stop = True

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """After the Trainer has written a checkpoint."""
        if state.is_world_process_zero:
            torch.save(
                self.sampler.state_dict(), Path(args.output_dir) / f"checkpoint-{state.global_step}" / SAMPLER_FILE
            )


def make_trainer(
    folder: Path, dataset: ShadeDataset, model: Any = None, eval_dataset: Any = None, **options: Any
) -> ShadeTrainer:
    """All that an example needs, and no more."""
    torch.manual_seed(0)
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        learning_rate=0.05,
        **(quiet | options),
    )
    sampler = ShadeSampler(dataset, batch_size=BATCH, seed=0)
    return ShadeTrainer(
        BagOfWords() if model is None else model,
        arguments,
        train_dataset=dataset,
        eval_dataset=eval_dataset,
        data_collator=collate,
        sampler=sampler,
    )


def resume(trainer: ShadeTrainer, checkpoint: Path) -> None:
    """Goes on with a checkpoint, in mid-epoch if that is where it was taken."""
    trainer.train(resume_from_checkpoint=str(checkpoint))


def main() -> None:
    """Trains four epochs of text."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = ShadeDataset(make_text(), cache="local://", working_set_fraction=0.5)
        trainer = make_trainer(Path(folder), dataset, num_train_epochs=4)
        loss = trainer.train().training_loss
        print(f"{len(trainer.seen)} steps, mean loss {loss:.3f}; {trainer.sampler.num_steps} in the last epoch")
        trainer.sampler.close()
        dataset.close()


if __name__ == "__main__":
    main()
