"""One rank of a job under ``strategy="auto"``; see tests/integration/test_auto_ranks.py.

``python auto_rank.py FOLDER``, with torchrun's variables around. Rank r writes who took each of its saves, and whether
all came back, to ``rank-r.json``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shade import Checkpointer
from shade.checkpoint._strategies.auto import Auto

STEPS, MOST_STEPS = 200, 4000
"""As many as the first, and more where nobody else has had a turn yet: that depends on the pace of the disk."""


def main() -> None:
    """Trains, saves, and restores what was saved last."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inner = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    model = DistributedDataParallel(inner)
    optimizer = torch.optim.Adam(model.parameters())
    flown: list[tuple[int, str]] = []
    place = {"persist_to": str(folder / "volume"), "run": f"auto-{os.getppid()}"}
    with Checkpointer(**place, strategy="auto", every="90% mtbf 5s") as checkpointer:
        checkpointer.attach(model=model, optimizer=optimizer)
        auto = checkpointer._strategy
        assert isinstance(auto, Auto)
        for step in range(MOST_STEPS):
            torch.manual_seed(1000 * step + dist.get_rank())
            model(torch.randn(4, 64)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if checkpointer.step():
                flown.append((step, auto.chosen))
            if step >= STEPS and len({name for _, name in flown}) > 1:
                break
        checkpointer.save()
        checkpointer.wait_durable()
        saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert checkpointer.restore_latest()
        is_equal = all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    (folder / f"rank-{dist.get_rank()}.json").write_text(json.dumps({"flown": flown, "equal": is_equal}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
