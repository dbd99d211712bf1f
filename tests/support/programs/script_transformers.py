"""A script of the Trainer, in which three lines are ours; `tests/integration/test_integrations.py` runs it."""

import os
import random
import signal
import sys

import datasets
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

from shade.integrations.transformers import ShadeTrainerCallback


class Say(TrainerCallback):
    """Prints every loss, and dies where it is told to."""

    def on_log(self, args, state, control, logs, **_):
        """After the step, and after the evaluation."""
        for name in ("loss", "eval_loss"):
            if name in logs and state.is_world_process_zero:
                print(f"{name} {state.global_step} {logs[name]!r}", flush=True)
        if f"{state.global_step}" == os.environ.get("KILL") and "loss" in logs:
            os.kill(os.getpid(), signal.SIGKILL)


draw = random.Random(0)
labels = [number % 2 for number in range(96)]
tokens = [[draw.randrange(1 + 20 * label, 30 + 20 * label) for _ in range(8)] for label in labels]
text = datasets.Dataset.from_dict({"input_ids": tokens, "labels": labels})
torch.manual_seed(0)
shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
model = BertForSequenceClassification(BertConfig(vocab_size=60, **shape))  # which drops a tenth of its activations
options = {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "no", "logging_steps": 1, "report_to": []}
args = TrainingArguments(output_dir=sys.argv[1], use_cpu=True, num_train_epochs=2, disable_tqdm=True, **options)
trainer = Trainer(model, args, train_dataset=text, eval_dataset=text, callbacks=[Say()])
saver = ShadeTrainerCallback(trainer, persist_to=f"{sys.argv[1]}/snapshots", every=3)
trainer.train(resume_from_checkpoint=saver.restore())
whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in trainer.model.parameters()]
if trainer.is_world_process_zero():
    print(f"weights 0 {[each.double().sum().item() for each in whole]}")
