"""Train text under Hugging Face's Trainer: a map-style `datasets.Dataset` of token lists, padded when it is collated.

    pip install 'torch-shade[ecosystem]'
    python examples/transformers_trainer.py
    torchrun --nproc-per-node 2 examples/transformers_trainer.py redis://127.0.0.1:6379

Three lines are ours. `ShadeTrainer` is a Trainer that reads through the cache, by a sampler that hears of the losses.
`ShadeTrainerCallback` saves snapshots while training continues; `train` continues from the newest one, at any step. The
callback works with any other Trainer, too.

What to know: the Trainer counts the steps of the first epoch and takes all to be as long. Epochs of ``unbiased`` become
shorter after the second, so a learning rate that falls over ``max_steps`` does not quite reach its end; ``keep=1.0``
and ``mode="uniform"`` keep all of them alike. ``gradient_accumulation_steps`` have to divide the steps of an epoch.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.nn.functional as F
from transformers import TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput

from shade import ShadeDataset, ShadeSampler
from shade.integrations.transformers import ShadeTrainer, ShadeTrainerCallback

BATCH, WORDS = 8, 50


def make_text(num_samples: int = 160) -> datasets.Dataset:
    """Sentences of 3 to 12 tokens, in two classes that prefer different words."""
    draw = random.Random(0)
    labels = [number % 2 for number in range(num_samples)]
    tokens = [[draw.randrange(1 + 20 * label, 30 + 20 * label) for _ in range(draw.randint(3, 12))] for label in labels]
    return datasets.Dataset.from_dict({"input_ids": tokens, "label": labels})


def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Pads."""
    tokens = [torch.tensor(row["input_ids"]) for row in rows]
    padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    labels = torch.tensor([row["label"] for row in rows])
    return {"input_ids": padded, "attention_mask": (padded > 0).long(), "labels": labels}


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


def make_trainer(
    folder: Path, dataset: ShadeDataset, model: Any = None, eval_dataset: Any = None, **options: Any
) -> ShadeTrainer:
    """All that an example needs, and no more."""
    torch.manual_seed(0)
    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, learning_rate=0.05, **(quiet | options))
    return ShadeTrainer(
        BagOfWords() if model is None else model,
        arguments,
        train_dataset=dataset,
        eval_dataset=eval_dataset,
        data_collator=collate,
        sampler=ShadeSampler(dataset, batch_size=BATCH, seed=0),
    )


def main(cache: str = "local://", folder: str = "runs/text") -> None:
    """Trains four epochs of text; begins where the folder's snapshots end."""
    dataset = ShadeDataset(make_text(), cache=cache, working_set_fraction=0.5)
    trainer = make_trainer(Path(folder), dataset, num_train_epochs=4)
    saver = ShadeTrainerCallback(trainer, persist_to=f"{folder}/snapshots", every=10)
    trained = trainer.train(resume_from_checkpoint=saver.restore())
    steps, loss = trained.global_step, trained.training_loss
    print(f"{steps} steps, mean loss {loss:.3f}; {trainer.sampler.num_steps} in the last epoch")
    saver.checkpointer.close()
    trainer.sampler.close()
    dataset.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
