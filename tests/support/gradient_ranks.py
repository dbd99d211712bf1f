"""Real ranks for the tests of the gradient plane: starts processes over gloo and has them play stories.

Starting a process that imports torch and compiles loops takes seconds: start each number of ranks once a module.
"""

from __future__ import annotations

import hashlib
import json
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from shade.gradient._comm.transport import PendingGather, Transport

Story = Callable[[int, int], Any]


def _enter(rank: int, world_size: int, folder: str, stories: Sequence[Story]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    outcomes: dict[str, Any] = {}
    for story in stories:
        try:
            outcomes[story.__name__] = story(rank, world_size)
        except Exception:  # noqa: BLE001 - the test that reads the outcome shows it
            outcomes[story.__name__] = {"raised": traceback.format_exc()}
    outcomes["threads"] = [each.name for each in threading.enumerate() if each.name.startswith("shade")]
    Path(folder, f"{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


def play(stories: Sequence[Story], world_size: int, folder: Path) -> list[dict[str, Any]]:
    """Plays stories one after the other on that many ranks; what each rank returned, by story's name."""
    mp.spawn(_enter, args=(world_size, str(folder), stories), nprocs=world_size)
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world_size)]


def results_of(outcomes: Sequence[dict[str, Any]], story: Story) -> list[Any]:
    """What all ranks returned from one story; fails with the traceback if one raised."""
    found = [each[story.__name__] for each in outcomes]
    for each in found:
        assert not (isinstance(each, dict) and "raised" in each), each["raised"]
    return found


def digest(model: nn.Module) -> str:
    """Of every bit of the parameters."""
    total = hashlib.sha256()
    for parameter in model.parameters():
        total.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def damage(world: Transport, hurt: Callable[[list[Any]], None]) -> None:
    """From now on payloads that come in at this rank are damaged before they are decoded."""
    begin = world.begin_gather

    def begin_damaged(payload: Any, lengths: Any) -> PendingGather:
        arrive = begin(payload, lengths)

        def arrive_damaged() -> list[Any]:
            payloads = arrive()
            hurt(payloads)
            return payloads

        return arrive_damaged

    world.begin_gather = begin_damaged  # type: ignore[method-assign]


def network(seed: int = 0) -> nn.Sequential:
    """Two layers wide enough to be sparse, one always whole."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 5))


def batch(rank: int, step: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one rank and step, always the same."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(size, 32, generator=generator)
    return inputs, inputs[:, :5].argmax(1)


def loss_of(model: nn.Module, rank: int, step: int, size: int = 16) -> torch.Tensor:
    """Of one rank's batch."""
    inputs, labels = batch(rank, step, size)
    return nn.functional.cross_entropy(model(inputs), labels)


def distance(first: nn.Module, second: nn.Module) -> float:
    """Largest difference of two models' parameters."""
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)
