"""A script of Accelerate, in which three lines are ours; `tests/integration/test_integrations.py` runs it."""

import os
import signal
import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from shade.integrations.accelerate import AccelerateLoader


def steps():
    """Returns the optimizer steps done."""
    return int(next((each["step"] for each in optimizer.state.values()), 0))


accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
torch.manual_seed(0)
data = TensorDataset(torch.randn(192, 16), torch.arange(192) % 4)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(), torch.nn.Tanh(), torch.nn.Linear(32, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
loader = DataLoader(data, batch_size=8, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
loader = AccelerateLoader(accelerator, loader, objects, persist_to=f"{sys.argv[1]}/snapshots", every=3)
for epoch in range(loader.epoch, 2):
    for points, labels in loader:
        if f"{steps()}" == os.environ.get("KILL"):
            os.kill(os.getpid(), signal.SIGKILL)
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(points), labels)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.is_main_process:
            print(f"loss {steps()} {loss.item()!r}", flush=True)
    if accelerator.is_main_process:
        print(f"eval_loss {steps()} {epoch} {scheduler.get_last_lr()}", flush=True)
whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
if accelerator.is_main_process:
    print(f"weights 0 {[each.double().sum().item() for each in whole]}")
accelerator.end_training()
