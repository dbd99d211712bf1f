"""Train under Ray Train: a worker that is killed, and a machine that ends, cost a few steps and no sample.

    pip install torch-shade 'ray[train]'
    python examples/ray_train.py
    python examples/ray_train.py redis://10.0.0.1:6379 2

`RayLoader` saves the state to continue from, every few steps and while training continues. Ray starts the workers again
after a failure, and `RayLoader` brings them to the newest snapshot, in the middle of an epoch. What its ``report``
uploads is for those who use the result: the weights after each epoch.

What to know: Ray runs the function in a thread, where Python does not deliver signals, so SIGTERM cannot be watched.
Watch a file, or the address at which the cloud announces a preemption. Leave the loader out of ``prepare_data_loader``:
the sampler has divided the batches among the ranks, and Ray has nothing to add.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.nn.functional as F
from ray.train.torch import TorchTrainer, prepare_model
from torch.utils.data import DataLoader, TensorDataset

from shade import ShadeDataset, ShadeSampler
from shade.integrations.ray import RayLoader

BATCH = 8


def make_data(num_samples: int = 200) -> TensorDataset:
    """Points in four classes, and some noise."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(num_samples) % 4
    points = F.one_hot(labels, 16).float() * 2 + torch.randn(num_samples, 16, generator=generator)
    return TensorDataset(points, labels)


def train(config: dict[str, Any]) -> None:
    """One worker's training."""
    Path(config["notice"]).unlink(missing_ok=True)  # in the demonstration, the next machine is the same one
    dataset = ShadeDataset(make_data(), cache=config["cache"], working_set_fraction=0.5)
    sampler = ShadeSampler(dataset, batch_size=BATCH, seed=0)
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 4)
    replica = prepare_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler)
    objects = {"model": model, "optimizer": optimizer}
    loader = RayLoader(loader, objects, persist_to=config["snapshots"], run=config["run"], every=10)
    loader.checkpointer.watch(config["notice"])
    print(f"continues after step {loader.checkpointer.step_count}", flush=True)
    for _ in range(loader.epoch, config["epochs"]):
        for points, labels, indices in loader:
            losses_B = F.cross_entropy(replica(points), labels, reduction="none")
            (losses_B * sampler.weights(indices)).mean().backward()
            sampler.report(indices, losses_B)
            optimizer.step()
            optimizer.zero_grad()
            fail_once(config, loader.checkpointer.step_count + 1)
        loader.report({"loss": losses_B.mean().item()})
    loader.checkpointer.close()
    sampler.close()
    dataset.close()


def fail_once(config: dict[str, Any], step: int) -> None:
    """For the demonstration: kills the first worker after one step, and gives a notice after another."""
    for name, at in (("kill", config["kill_at"]), ("notice", config["notice_at"])):
        mark = Path(config["snapshots"]).parent / f"{name}-was-given"
        if step == at and ray.train.get_context().get_world_rank() == 0 and not mark.exists():
            mark.touch()
            if name == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            Path(config["notice"]).write_text("30")


def run(
    folder: Path, cache: str = "local://", num_workers: int = 1, *, kill_at: int = 0, notice_at: int = 0
) -> ray.train.Result:
    """Trains; Ray starts the workers again up to three times."""
    folder.mkdir(parents=True)
    config = {
        "cache": cache,
        "snapshots": str(folder / "snapshots"),
        "notice": str(folder / "notice"),
        "run": f"{folder.parent.name}-{folder.name}",
        "epochs": 3,
        "kill_at": kill_at,
        "notice_at": notice_at,
    }
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ray.train.ScalingConfig(num_workers=num_workers),
        run_config=ray.train.RunConfig(
            storage_path=str(folder), name="ray", failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    )
    return trainer.fit()


def main() -> None:
    """Trains undisturbed, and again with a kill and a preemption notice; compares the weights."""
    words = sys.argv[1:]
    options: dict[str, Any] = {"cache": words[0], "num_workers": int(words[1])} if words else {}
    with tempfile.TemporaryDirectory() as place:
        weights = []
        for name, failures in (("undisturbed", {}), ("disturbed", {"kill_at": 33, "notice_at": 60})):
            result = run(Path(place) / name, **options, **failures)
            with result.checkpoint.as_directory() as folder:
                weights.append(torch.load(Path(folder) / "model.pt", weights_only=True)["weight"])
    print(f"the same weights after a kill and a preemption: {torch.equal(*weights)}")


if __name__ == "__main__":
    main()
