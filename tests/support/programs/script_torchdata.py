"""A script of torchdata, in which three lines are ours; `tests/integration/test_integrations.py` runs it."""

import os
import signal
import sys

import torch
from torch.utils.data import TensorDataset

from shade.integrations.torchdata import SampledDataLoader

torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 16), torch.arange(96) % 4)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
workers = int(os.environ.get("KILL", "0")) % 3
loader = SampledDataLoader(data, batch_size=8, sampler={"mode": "uniform"}, num_workers=workers)
begin, step, path = 0, 0, f"{sys.argv[1]}/state.pt"
if os.path.exists(path):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    loader.load_state_dict(state["loader"])
    begin, step = state["epoch"], state["step"]
for epoch in range(begin, 2):
    loader.set_epoch(epoch)
    for points, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(points), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        print(f"loss {step} {loss.item()!r}", flush=True)
        if step % 3 == 0:
            parts = {"model": model, "optimizer": optimizer, "loader": loader}
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save(state | {"epoch": epoch, "step": step}, f"{path}.new")
            os.replace(f"{path}.new", path)
        if f"{step}" == os.environ.get("KILL"):
            os.kill(os.getpid(), signal.SIGKILL)
print(f"weights 0 {[each.double().sum().item() for each in model.parameters()]}")
