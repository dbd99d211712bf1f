"""Train text under Hugging Face's Trainer: a map-style `datasets.Dataset` of token lists, padded when it is collated.

    pip install 'torch-shade[ecosystem]'
    python examples/transformers_trainer.py

`ShadeTrainer` overrides two methods: which loader trains (its batches must not be dealt out to ranks again, so it does
not pass through Accelerate), and what the loss is. A callback says the epoch and puts the loader's state beside each
checkpoint. Two arguments matter: ``remove_unused_columns=False``, or the Trainer drops the sample indices, and, to
resume, ``ignore_data_skip=True``: the loader goes to its place by itself, and would be skipped ahead twice.

The Trainer counts the steps of the first epoch and takes all to be as long. Epochs of ``unbiased`` become shorter
after the second, so a learning rate that falls over ``max_steps`` does not quite reach its end; ``keep=1.0`` keeps all
of them alike.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.nn.functional as F
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from shade import ShadeDataset, ShadeSampler

BATCH, WORDS, LOADER_FILE = 8, 50, "loader.pt"


def make_text(num_samples: int = 160) -> datasets.Dataset:
    """Sentences of 3 to 12 tokens, in two classes that prefer different words."""
    draw = random.Random(0)
    labels = [number % 2 for number in range(num_samples)]
    tokens = [[draw.randrange(1 + 20 * label, 30 + 20 * label) for _ in range(draw.randint(3, 12))] for label in labels]
    return datasets.Dataset.from_dict({"input_ids": tokens, "label": labels})


def collate(batch: list[tuple[dict[str, Any], int]]) -> dict[str, torch.Tensor]:
    """Pads; the indices go along. A data set of dicts comes back as (dict, index)."""
    rows, indices = zip(*batch, strict=True)
    tokens = [torch.tensor(row["input_ids"]) for row in rows]
    return {
        "input_ids": torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True),
        "labels": torch.tensor([row["label"] for row in rows]),
        "indices": torch.tensor(indices),
    }


class BagOfWords(torch.nn.Module):
    """The mean of the words, and a line through it."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.EmbeddingBag(WORDS + 1, 8, padding_idx=0)
        self.line = torch.nn.Linear(8, 2)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.line(self.words(input_ids))


class ShadeTrainer(Trainer):
    """The Trainer, with a sampler that hears of the losses."""

    def __init__(self, *args: Any, sampler: ShadeSampler, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sampler = sampler
        self.loader = StatefulDataLoader(
            self.train_dataset,
            batch_size=sampler.batch_size,
            sampler=sampler,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
        )
        self.seen: list[list[int]] = []
        self.model_accepts_loss_kwargs = False  # the loss below is a mean: let the Trainer divide by accumulated steps
        self.add_callback(KeepPlace(self))

    def get_train_dataloader(self) -> StatefulDataLoader:
        """Ours as it is, not through ``accelerator.prepare``."""
        return self.loader

    def compute_loss(self, model: Any, inputs: dict[str, torch.Tensor], **_: Any) -> torch.Tensor:
        """Weighs and reports."""
        indices, labels = inputs.pop("indices"), inputs.pop("labels")
        losses_B = F.cross_entropy(model(**inputs), labels, reduction="none")
        self.sampler.report(indices, losses_B)
        self.seen.append(indices.tolist())
        return (losses_B * self.sampler.weights(indices)).mean()


class KeepPlace(TrainerCallback):
    """Says the epoch; saves where the loader is beside each checkpoint, and goes there on a resume."""

    def __init__(self, trainer: ShadeTrainer) -> None:
        self.trainer = trainer

    def on_epoch_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """Before the epoch's first batch."""
        self.trainer.sampler.set_epoch(int(state.epoch or 0))

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """After the Trainer has written a checkpoint."""
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        torch.save(self.trainer.loader.state_dict(), folder / LOADER_FILE)


def make_trainer(folder: Path, dataset: ShadeDataset, **options: Any) -> ShadeTrainer:
    """All that an example needs, and no more."""
    torch.manual_seed(0)
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        remove_unused_columns=False,
        ignore_data_skip=True,
        learning_rate=0.05,
        **(quiet | options),
    )
    sampler = ShadeSampler(dataset, batch_size=BATCH, seed=0)
    return ShadeTrainer(BagOfWords(), arguments, train_dataset=dataset, data_collator=collate, sampler=sampler)


def resume(trainer: ShadeTrainer, checkpoint: Path) -> None:
    """Goes on with a checkpoint, in mid-epoch if that is where it was taken."""
    trainer.loader.load_state_dict(torch.load(checkpoint / LOADER_FILE, weights_only=True))
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
