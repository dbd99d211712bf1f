"""Wraps a gloo group: the few collectives that gradients need, each of which ends within a timeout.

A dead rank breaks the connection and is noticed at once; a stopped one, or one behind a cut line, is noticed by its
silence: after ``timeout_seconds``, which must be longer than one rank ever works alone (evaluates, loads, compiles)
while the others wait in the next step. After the first failure the group is unusable. `_elastic.membership` makes
another transport over the survivors, with the next generation.

Cost of a group of its own: W² connections.

One thread at a time makes calls, in the same order on every rank. Transports too are made in the same order: PyTorch
distinguishes groups by how many a rank has made before.

Legend: W world · N fields.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from shade.errors import ConfigError, PeerLostError
from shade.rank_group import TIMEOUT_SECONDS, free_group, gather_single, inside_torch, new_gloo_group, reason_of
from shade.types import Indices

Octets = npt.NDArray[np.uint8]
PendingGather = Callable[[], list[Octets]]
"""A call that waits for a started gather and returns the payloads, by rank. Call it once."""
_T = TypeVar("_T")
# As `gather_single`.
_reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class FormedGroup(NamedTuple):
    """A gloo group for one transport, formed outside of torch.distributed's world."""

    group: dist.ProcessGroup | None
    """None: this rank is alone."""
    rank: int
    world_size: int


class Transport:
    """The ranks of a group, or this process alone where torch.distributed is not initialised. The constructor is
    collective.

    Args:
        group: Its ranks take part, or the group was formed for this transport; None: all ranks.
        ranks: The ranks, instead of a group; the same on each of them.
        timeout_seconds: The longest silence of a peer, > 0.
        generation: Of the membership; grows by one when a group is formed anew.

    Raises:
        ConfigError: The timeout is not > 0, this rank is not in the group, or the ranks have not met.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | FormedGroup | None = None,
        *,
        ranks: Sequence[int] | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        generation: int = 0,
    ) -> None:
        if timeout_seconds <= 0:
            raise ConfigError.of("timeout_seconds > 0", timeout_seconds, f"{TIMEOUT_SECONDS:.0f} is the default")
        self.timeout_seconds = timeout_seconds
        self.generation = generation
        self.bytes_sent = 0
        """Over this rank's link: in a ring each rank passes on all but one of the messages."""
        self.bytes_received = 0
        self.seconds = 0.0
        """Time in collectives, waiting for slower ranks included."""
        self._counted_until = 0.0
        self._under_way: dict[int, dist.Work] = {}
        self._numbers = itertools.count()
        self._lost: str | None = None
        self._group: dist.ProcessGroup | None = None
        self._has_met = True
        self.rank, self.world_size = 0, 1
        self.ranks: tuple[int, ...] = (0,)
        """The members, as torch.distributed numbers them."""
        if isinstance(group, FormedGroup):
            self._group, self.rank, self.world_size = group
            self.ranks = tuple(range(self.world_size))
        elif dist.is_available() and dist.is_initialized():
            if ranks is None and group is not None:
                ranks = dist.get_process_group_ranks(group)
            if ranks is not None and dist.get_rank() not in ranks:
                raise ConfigError.of("a group that this rank is in", list(ranks), "make it on its members only")
            self._group = new_gloo_group(ranks, timeout_seconds)
            self.rank, self.world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
            self.ranks = tuple(dist.get_process_group_ranks(self._group))
            # A rank that frees the group at once would break one that is still connecting.
            self._run(lambda: dist.barrier(group=self._group))
        else:
            self._has_met = False
            self._check_alone(int(os.environ.get("WORLD_SIZE", "1")))

    def gather_fields(self, fields_N: Indices) -> Indices:
        """Gathers every rank's int64 (N,) on every rank; returns int64 (W, N), by rank."""
        if self.world_size == 1:
            if not self._has_met and dist.is_available() and dist.is_initialized():
                self._check_alone(dist.get_world_size())
            return fields_N[None].copy()
        all_WN = np.empty((self.world_size, len(fields_N)), dtype=np.int64)
        self._run(self._begin_gather(torch.from_numpy(all_WN.reshape(-1)), torch.from_numpy(fields_N)))
        return all_WN

    def gather_bytes(self, payload: Octets, lengths_W: Sequence[int]) -> list[Octets]:
        """Gathers every rank's payload on every rank; see `begin_gather`."""
        return self.begin_gather(payload, lengths_W)()

    def begin_gather(self, payload: Octets, lengths_W: Sequence[int]) -> PendingGather:
        """Starts to gather every rank's payload on every rank; all are padded to the longest on the way.

        Several gathers may start before the first one is waited for, so that the link never rests. They must be waited
        for in the order of their start, and before any other collective.

        Args:
            payload: This rank's.
            lengths_W: Of all ranks' payloads, from an earlier exchange of fields.

        Returns:
            The call that waits for the payloads; it raises as this method does.

        Raises:
            PeerLostError: A rank is gone or silent.
        """
        longest = max(lengths_W)
        if self.world_size == 1 or longest == 0:
            payloads = [payload] if self.world_size == 1 else [payload[:0]] * self.world_size
            return lambda: payloads
        padded = np.zeros(longest, dtype=np.uint8)
        padded[: len(payload)] = payload
        all_W = np.empty((self.world_size, longest), dtype=np.uint8)
        begun = time.perf_counter()
        wait = self._begin_gather(torch.from_numpy(all_W.reshape(-1)), torch.from_numpy(padded))

        def arrive() -> list[Octets]:
            self._run(wait, begun)
            return [row[:length] for row, length in zip(all_W, lengths_W, strict=True)]

        return arrive

    def gather_messages(self, message: Any) -> list[Any]:
        """Gathers every rank's JSON message on every rank, in rank order. For setup, not for every step."""
        mine = np.frombuffer(json.dumps(message).encode(), dtype=np.uint8)
        lengths_W = self.gather_fields(np.array([len(mine)], dtype=np.int64))[:, 0].tolist()
        return [json.loads(each.tobytes()) for each in self.gather_bytes(mine, lengths_W)]

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Fills a contiguous CPU tensor, of one shape and type on all ranks, with that of rank ``source``."""
        if self.world_size > 1:
            self._count(tensor.nbytes if self.rank == source else 0, tensor.nbytes if self.rank != source else 0)
            self._run(lambda: dist.broadcast(tensor, group=self._group, group_src=source))

    def add(self, tensor: Tensor) -> None:
        """Replaces a contiguous CPU tensor by the sum over all ranks, the same bits on each."""
        if self.world_size > 1:
            share = 2 * tensor.nbytes * (self.world_size - 1) // self.world_size
            self._count(share, share)
            self._run(lambda: dist.all_reduce(tensor, group=self._group))

    def add_parts(self, tensor: Tensor) -> Tensor:
        """Sums float32 (W · n,) on the CPU over all ranks; returns this rank's (n,) of the sum."""
        if self.world_size == 1:
            return tensor
        part = torch.empty(tensor.numel() // self.world_size, dtype=tensor.dtype)
        share = part.nbytes * (self.world_size - 1)
        self._count(share, share)
        self._run(lambda: _reduce_scatter_single(part, tensor, group=self._group))
        return part

    def close(self) -> None:
        """Frees the group. Later calls fail; safe to call twice."""
        group, self._group = self._group, None
        if group is not None:
            self._lost = self._lost or "the transport is closed"
            free_group(group)

    @staticmethod
    def _check_alone(num_ranks: int) -> None:
        # Else each rank would train by itself, and say nothing.
        if num_ranks > 1:
            cure = "call torch.distributed.init_process_group() before what exchanges gradients is made"
            raise ConfigError.of(f"the {num_ranks} ranks of this job to be connected", "a rank by itself", cure)

    def _begin_gather(self, everything: Tensor, mine: Tensor) -> Callable[[], object]:
        """Starts a gather and returns its end, which does not hold the group (see `_run`)."""
        share = mine.nbytes * (self.world_size - 1)
        self._count(share, share)
        work = self._run(lambda: gather_single(everything, mine, group=self._group, async_op=True))
        assert work is not None  # this rank is in the group
        number = next(self._numbers)
        self._under_way[number] = work
        return lambda: self._under_way.pop(number).wait()

    def _count(self, sent: int, received: int) -> None:
        self.bytes_sent += sent
        self.bytes_received += received

    def _run(self, collective: Callable[[], _T], begun: float | None = None) -> _T:
        """Runs a collective; any failure of the backend becomes `PeerLostError`, for this and all later calls.

        Time counts from ``begun`` if the collective started earlier.
        """
        if self._lost is not None:
            raise self._error()
        started = time.perf_counter() if begun is None else begun
        try:
            with inside_torch():
                return collective()
        except (RuntimeError, ValueError) as error:
            # Quoted, not chained: its traceback would keep the group alive, and the end of a rank's connections is what
            # shows the others that it has given up.
            self._lost = reason_of(error)
            self._under_way.clear()
        finally:
            ended = time.perf_counter()
            # Overlapping time counts once.
            self.seconds += ended - max(started, self._counted_until)
            self._counted_until = ended
        raise self._error()

    def _error(self) -> PeerLostError:
        return PeerLostError(
            f"expected all {self.world_size} ranks of generation {self.generation} to answer within "
            f"{self.timeout_seconds:g} s, got on rank {self.rank}: {self._lost}; "
            "see the lost rank's log, then restart from the last checkpoint or form the group anew; if none is lost, "
            "but one does something else for so long (evaluates, loads, compiles), pass a larger timeout_seconds"
        )
