"""A script of Ray Train, in which three lines are ours; `tests/integration/test_integrations.py` runs it."""

import os
import signal
import sys
from pathlib import Path

import ray
import torch
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.utils.data import DataLoader, TensorDataset

from shade.integrations.ray import RayLoader


def say(config, line):
    """Keeps a line of the first worker for the script, which prints it."""
    if get_context().get_world_rank() == 0:
        with Path(config["folder"], "said").open("a") as said:
            said.write(line)


def train(config):
    """One worker."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(96, 16), torch.arange(96) % 4)
    layers = torch.nn.Linear(16, 32), torch.nn.Dropout(), torch.nn.Tanh(), torch.nn.Linear(32, 4)
    model = prepare_model(torch.nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = prepare_data_loader(DataLoader(data, batch_size=8, shuffle=True))
    objects = {"model": model, "optimizer": optimizer}
    loader = RayLoader(loader, objects, persist_to=f"{config['folder']}/snapshots", every=3)
    for _ in range(loader.epoch, 2):
        for points, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(points), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps = int(next(iter(optimizer.state.values()))["step"])
            say(config, f"loss {steps} {loss.item()!r}\n")
            if f"{steps}" == config["kill"]:
                os.kill(os.getpid(), signal.SIGKILL)
    say(config, f"weights 0 {[each.double().sum().item() for each in model.parameters()]}\n")


folder = Path(sys.argv[1]).resolve()
settings = {"folder": str(folder), "kill": os.environ.get("KILL", "")}
ray.init(num_cpus=3, include_dashboard=False, logging_level="error", log_to_driver=False)
running = RunConfig(name="ray", storage_path=str(folder))
workers = ScalingConfig(num_workers=int(os.environ["RANKS"]))
trainer = TorchTrainer(train, train_loop_config=settings, run_config=running, scaling_config=workers)
try:
    trainer.fit()
finally:
    print((folder / "said").read_text(), flush=True)
    (folder / "said").unlink()
