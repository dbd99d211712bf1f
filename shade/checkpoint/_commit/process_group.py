"""The ranks that save together: gather small messages, share rank 0's message, broadcast a tensor.

A group of our own, so that agreeing in a background thread never meets the training's collectives. All ranks call the
same methods in the same order. Messages are JSON: no bytes from a network are unpickled.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

import torch
import torch.distributed as dist
from typing_extensions import override


class ProcessGroup(Protocol):
    """The ranks that save together."""

    rank: int
    world_size: int

    def gather(self, message: Any) -> list[Any]:
        """Returns every rank's message, on every rank, by rank."""
        ...

    def share(self, message: Any) -> Any:
        """Returns rank 0's message, on every rank; the other ranks' messages are ignored."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Fills a CPU tensor, of the same shape on every rank, with that of rank ``source``."""
        ...

    def close(self) -> None:
        """Frees what the group holds. Safe to call twice."""
        ...


class SingleProcessGroup(ProcessGroup):
    """A run of one rank."""

    rank = 0
    world_size = 1

    @override
    def gather(self, message: Any) -> list[Any]:
        return [message]

    @override
    def share(self, message: Any) -> Any:
        return message

    @override
    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        pass

    @override
    def close(self) -> None:
        pass


class GlooGroup(ProcessGroup):
    """The ranks of torch.distributed, over a gloo group of our own. Making one is collective.

    Raises:
        RuntimeError: By any method: a rank is gone, or silent for longer than the group's timeout.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup), "every rank of the world takes part"
        self._group: dist.ProcessGroup | None = group

    @override
    def gather(self, message: Any) -> list[Any]:
        mine = torch.frombuffer(bytearray(json.dumps(message).encode() + b" "), dtype=torch.uint8)
        lengths_W1 = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(lengths_W1, torch.tensor([len(mine)]), group=self._group)
        longest = int(max(lengths_W1))
        padded = torch.full((longest,), ord(" "), dtype=torch.uint8)  # JSON ignores trailing spaces
        padded[: len(mine)] = mine
        found = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(found, padded, group=self._group)
        return [json.loads(each.numpy().tobytes()) for each in found]

    @override
    def share(self, message: Any) -> Any:
        return self.gather(message if self.rank == 0 else None)[0]

    @override
    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        dist.broadcast(tensor, src=source, group=self._group)

    @override
    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


def current_group() -> ProcessGroup:
    """Returns the ranks of torch.distributed where it is initialised with more than one, else this process alone."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return GlooGroup()
    return SingleProcessGroup()
