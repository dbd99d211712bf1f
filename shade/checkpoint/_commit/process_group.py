"""How the ranks of a run agree: small messages gathered, one rank's word shared. Nothing else of them is known here.

A group of its own, so that agreeing in a background thread never meets the training's collectives. All ranks call the
same methods in the same order. Messages are JSON: nothing that came over a network is unpickled.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

import torch
import torch.distributed as dist


class ProcessGroup(Protocol):
    """The ranks that save together."""

    rank: int
    world_size: int

    def gather(self, message: Any) -> list[Any]:
        """Every rank's message, on every rank, by rank."""
        ...

    def share(self, message: Any) -> Any:
        """Rank 0's message, on every rank; what the others pass is ignored."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Fills a CPU tensor, of the same shape on every rank, with that of rank ``source``."""
        ...

    def close(self) -> None:
        """Frees what it holds."""
        ...


class SingleProcessGroup:
    """A run of one rank."""

    rank = 0
    world_size = 1

    def gather(self, message: Any) -> list[Any]:
        """See `ProcessGroup`."""
        return [message]

    def share(self, message: Any) -> Any:
        """See `ProcessGroup`."""
        return message

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """See `ProcessGroup`."""

    def close(self) -> None:
        """See `ProcessGroup`."""


class GlooGroup:
    """The ranks of torch.distributed, over a gloo group of our own. Collective to make.

    Raises:
        RuntimeError: By any method: a rank is gone, or silent for longer than the group's timeout.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup), "every rank of the world takes part"
        self._group: dist.ProcessGroup | None = group

    def gather(self, message: Any) -> list[Any]:
        """See `ProcessGroup`."""
        mine = torch.frombuffer(bytearray(json.dumps(message).encode() + b" "), dtype=torch.uint8)
        lengths_W1 = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(lengths_W1, torch.tensor([len(mine)]), group=self._group)
        longest = int(max(lengths_W1))
        padded = torch.full((longest,), ord(" "), dtype=torch.uint8)
        padded[: len(mine)] = mine
        found = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(found, padded, group=self._group)
        return [json.loads(each.numpy().tobytes()) for each in found]

    def share(self, message: Any) -> Any:
        """See `ProcessGroup`."""
        return self.gather(message if self.rank == 0 else None)[0]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """See `ProcessGroup`."""
        dist.broadcast(tensor, src=source, group=self._group)

    def close(self) -> None:
        """See `ProcessGroup`."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def current_group() -> ProcessGroup:
    """The ranks of torch.distributed where it is initialised with more than one, else this process alone."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return GlooGroup()
    return SingleProcessGroup()
