"""One rank of a DeepSpeed job that saves and loads through our engine; see tests/integration/test_deepspeed.py.

``python deepspeed_rank.py FOLDER STAGE VERB [STORE]``, with torchrun's variables around; the verbs are below.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from shade.checkpoint.deepspeed import ShadeCheckpointEngine
from shade.errors import CheckpointError

WIDTH = 64


class Job:
    """A small model under ZeRO."""

    def __init__(self, folder: Path, stage: int, store: str | None, strategy: str = "mlc-base") -> None:
        torch.manual_seed(0)
        layers = (torch.nn.Linear(WIDTH, 128), torch.nn.ReLU(), torch.nn.Linear(128, WIDTH))
        model = torch.nn.Sequential(*layers)
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": stage > 0},
        }
        self.folder, self.dtype = folder, torch.bfloat16 if stage else torch.float32
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.saver = ShadeCheckpointEngine(store, persist_to=str(folder / "volume"), strategy=strategy)
        self.engine.checkpoint_engine = self.saver

    def train(self, first: int, last: int) -> list[float]:
        """Losses of some steps; the data of a step are the same whoever trains it."""
        losses = []
        for step in range(first, last):
            torch.manual_seed(100 * step + dist.get_rank())
            loss = self.engine(torch.randn(4, WIDTH, dtype=self.dtype)).float().pow(2).mean()
            self.engine.backward(loss)
            self.engine.step()
            losses.append(float(loss))
        return losses


def save(job: Job) -> Any:
    """Trains five steps, saves, trains on; the losses after the save are what a loaded job has to find."""
    job.train(0, 5)
    job.engine.save_checkpoint(str(job.folder / "run"), client_state={"words": ["a", ("b", None)], "epoch": 3})
    return job.train(5, 9)


def load(job: Job) -> Any:
    """Loads what ``latest`` names, and trains on."""
    path, client = job.engine.load_checkpoint(str(job.folder / "run"))
    assert path is not None
    assert client["words"] == ["a", ("b", None)]
    assert client["epoch"] == 3
    return job.train(job.engine.global_steps, job.engine.global_steps + 4)


def refuse(job: Job) -> Any:
    """Loads what is damaged: the message."""
    try:
        job.engine.load_checkpoint(str(job.folder / "run"))
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def main() -> None:
    """Runs the verb; rank r writes ``VERB-r.json``."""
    folder, stage, verb, *store = sys.argv[1:]
    deepspeed.init_distributed(dist_backend="gloo")
    job = Job(Path(folder), int(stage), store[0] if store else None)
    answer = {"save": save, "load": load, "refuse": refuse}[verb](job)
    (Path(folder) / f"{verb}-{dist.get_rank()}.json").write_text(json.dumps(answer))
    job.saver.cleanup()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
