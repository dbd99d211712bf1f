"""Lets the ranks of a job agree beside the training: the only maker of process groups in `shade`.

A `RankGroup` has connections of its own, so its messages never meet the training's collectives, nor another group's.
Each user has a group of its own where it talks on a thread of its own. Messages are JSON, numbers and plain tensors: no
bytes from a network are unpickled.

Every wait ends: with the answer, or after ``timeout_seconds`` with a `PeerLostError` that names what was waited for.
After the first failure every later call fails with the same message. A script that ends waits for threads that wait.

Price: W² connections, and about three threads and seven descriptors in each process, until `RankGroup.close`.

Making a group is collective: all its ranks make their groups in the same order. All ranks call the same methods in the
same order, one thread at a time. To close one is local, and breaks no rank that still reads the last answer.

Legend: W world · N fields.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from typing_extensions import override

from shade.errors import ConfigError, PeerLostError
from shade.types import Indices

TIMEOUT_SECONDS = 1800.0
"""Longest wait for a rank: it may write a snapshot to slow storage, or evaluate, while the others wait."""
CLOSE_SECONDS = 5.0
"""How long a close, or a script that ends, waits for a thread that meets other ranks: longer only if one is gone."""
# PyTorch 2.14 renamed it and warns about the old name, the only one that 2.8 has.
gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Gathers one tensor of each rank into one of all; see `torch.distributed.all_gather_into_tensor`."""


class RankGroup(Protocol):
    """Ranks that agree with each other. All methods but `close` are collective.

    Raises:
        PeerLostError: By any of them: a rank is gone, or silent for longer than the group's timeout.
    """

    rank: int
    """This rank's number in the group."""
    world_size: int

    def gather(self, message: Any) -> list[Any]:
        """Returns every rank's JSON message, on every rank, by rank."""
        ...

    def gather_fields(self, fields_N: Indices) -> Indices:
        """Gathers every rank's int64 (N,) on every rank; returns int64 (W, N), by rank."""
        ...

    def share(self, message: Any) -> Any:
        """Returns rank 0's message, on every rank; the other ranks' messages are ignored."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Fills a contiguous CPU tensor, of the same shape on every rank, with that of rank ``source``."""
        ...

    def close(self) -> None:
        """Frees what the group holds. Safe to call twice, and after the trainer has destroyed all groups."""
        ...


class SingleProcessGroup(RankGroup):
    """The group of one rank, which never waits."""

    rank = 0
    world_size = 1

    @override
    def gather(self, message: Any) -> list[Any]:
        return [message]

    @override
    def gather_fields(self, fields_N: Indices) -> Indices:
        return fields_N[None].copy()

    @override
    def share(self, message: Any) -> Any:
        return message

    @override
    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        pass

    @override
    def close(self) -> None:
        pass


class GlooGroup(RankGroup):
    """Ranks of torch.distributed, over gloo. Making one is collective over them.

    Args:
        purpose: What the ranks agree on, for messages: "expected … for ``purpose``".
        ranks: The ranks, as torch.distributed numbers them; None: all.
        timeout_seconds: Longest wait for a rank, > 0.
    """

    def __init__(
        self, purpose: str, ranks: Sequence[int] | None = None, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self._purpose, self._timeout = purpose, timedelta(seconds=timeout_seconds)
        self._process = os.getpid()
        self._group: dist.ProcessGroup | None = None
        self._lost: str | None = None
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size() if ranks is None else len(ranks)
        self._wait("every rank to connect", lambda: self._connect(ranks))

    def _connect(self, ranks: Sequence[int] | None) -> dist.Work | None:
        self._group = new_gloo_group(ranks, self.timeout_seconds)
        self.rank, self.world_size = dist.get_rank(self._group), dist.get_world_size(self._group)
        # A rank that frees the group at once would break one that is still connecting.
        return dist.barrier(group=self._group, async_op=True)

    @override
    def gather(self, message: Any) -> list[Any]:
        mine = np.frombuffer(json.dumps(message).encode(), dtype=np.uint8)
        longest = int(self.gather_fields(np.array([len(mine)], dtype=np.int64)).max())
        # JSON ignores trailing spaces.
        padded = np.full(longest, ord(" "), dtype=np.uint8)
        padded[: len(mine)] = mine
        all_W = np.empty((self.world_size, longest), dtype=np.uint8)
        self._gather("every rank's message", all_W, padded)
        return [json.loads(each.tobytes()) for each in all_W]

    @override
    def gather_fields(self, fields_N: Indices) -> Indices:
        all_WN = np.empty((self.world_size, len(fields_N)), dtype=np.int64)
        self._gather("every rank's numbers", all_WN, fields_N)
        return all_WN

    def _gather(self, what: str, everything: np.ndarray, mine: np.ndarray) -> None:
        result, own = torch.from_numpy(everything.reshape(-1)), torch.from_numpy(mine)
        self._wait(what, lambda: gather_single(result, own, group=self._group, async_op=True))

    @override
    def share(self, message: Any) -> Any:
        return self.gather(message if self.rank == 0 else None)[0]

    @override
    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        what = f"what rank {source} sends"
        self._wait(what, lambda: dist.broadcast(tensor, group_src=source, group=self._group, async_op=True))

    def _wait(self, what: str, begin: Callable[[], Any]) -> None:
        if self._lost is None:
            try:
                with inside_torch():
                    begin().wait(self._timeout)
                return
            except (RuntimeError, ValueError) as error:
                # Later calls fail, too, because an answer that comes late must not be taken for the next one.
                self._lost = reason_of(error)
        # Not raised from the handler: the backend's traceback would keep the group alive, and the end of a rank's
        # connections is what shows the others that it has given up.
        raise PeerLostError(
            f"expected {what} within {self.timeout_seconds:g} s for {self._purpose}, "
            f"got on rank {self.rank} of {self.world_size}: {self._lost}; "
            "see the lost rank's log, then restart from the last checkpoint"
        )

    @override
    def close(self) -> None:
        # A forked child has no threads of gloo, for which freeing the group would wait.
        if self._process == os.getpid():
            group, self._group = self._group, None
            self._lost = self._lost or "the group is closed"
            if group is not None:
                free_group(group)


def current_group(purpose: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> RankGroup:
    """Returns a group of all ranks of torch.distributed where it connects more than one, else of this process alone.

    Collective; see `GlooGroup` for the arguments.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return GlooGroup(purpose, timeout_seconds=timeout_seconds)
    return SingleProcessGroup()


def check_met(purpose: str) -> None:
    """Raises ConfigError where a launcher has started several ranks and torch.distributed does not connect them yet."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and world_size != "1" and not (dist.is_available() and dist.is_initialized()):
        cure = "call init_process_group() before; a process that trains for itself unsets RANK"
        raise ConfigError.of(f"ranks that have met, for {purpose}", f"WORLD_SIZE={world_size} and no group", cure)


def agreed_name(group: RankGroup) -> str:
    """Returns a new random name, the same on every rank of a group. Collective."""
    return str(group.share(secrets.token_hex(8)))


def said_first(name: str, text: str) -> str:
    """Returns what a rank of torch.distributed said first under a name, perhaps this one now. Waits for no rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return text
    return str(shared_store("first").compare_set(name, "", text).decode())


def shared_store(purpose: str) -> c10d.Store:
    """Returns torch.distributed's own key-value store, with names of this purpose alone."""
    return c10d.PrefixStore(f"shade/{purpose}", c10d._get_default_store())


def check_alike(group: RankGroup, arguments: Mapping[str, Any]) -> None:
    """Raises ConfigError on all ranks if they were given different arguments, plain values by name. Collective."""
    said = group.gather(dict(arguments))
    for name in dict.fromkeys(name for each in said for name in each):
        other = next((rank for rank, each in enumerate(said) if each.get(name) != said[0].get(name)), None)
        if other is not None:
            got = {f"rank {rank}": said[rank].get(name) for rank in (0, other)}
            raise ConfigError.of(f"the same {name} on every rank", got, "start all ranks with the same arguments")


def ranks_of(num_replicas: int | None, rank: int | None, batch_size: int) -> tuple[int, int, bool]:
    """Returns how many ranks there are, this one's number, and whether torch.distributed connects them. Raises
    ConfigError for a rank or a batch size out of range."""
    distributed = dist.is_available() and dist.is_initialized()
    # torch.distributed says what the caller does not.
    num_replicas = num_replicas or (dist.get_world_size() if distributed else 1)
    if rank is None and num_replicas > 1 and not distributed:
        cure = "give both or none; the second argument is num_replicas, as in DistributedSampler, not a batch size"
        raise ConfigError.of(f"a rank beside num_replicas={num_replicas}", None, cure)
    rank = (dist.get_rank() if distributed else 0) if rank is None else rank
    if not 0 <= rank < num_replicas:
        cure = "ranks count from 0 (-nr 0 … n-1)"
        raise ConfigError.of(f"a rank below num_replicas={num_replicas}", rank, cure)
    if batch_size < 1:
        raise ConfigError.of("batch_size ≥ 1", batch_size, "pass the DataLoader's batch_size")
    return num_replicas, rank, distributed


# ── the end of a script that has closed nothing ──────────────────────────────────────────────────────────────────────

_inside: set[object] = set()
_ends = False


class ScriptEndedError(RuntimeError):
    """A thread would begin something that the script does not wait for."""


@contextlib.contextmanager
def inside_torch() -> Iterator[None]:
    """Surrounds a thread's work, which a script that ends waits for. Raises ScriptEndedError if it has ended."""
    # Before Python 3.14 a thread that takes the GIL again inside torch at exit is unwound by force: the process aborts.
    mine = object()
    _inside.add(mine)
    try:
        if _ends and threading.current_thread() is not threading.main_thread():
            raise ScriptEndedError("the script has ended")
        yield
    finally:
        _inside.discard(mine)


@atexit.register
def _wait_for_threads() -> None:
    global _ends
    _ends = True
    until = time.monotonic() + CLOSE_SECONDS
    while _inside and time.monotonic() < until:
        time.sleep(0.01)


# A child has none of the threads.
os.register_at_fork(after_in_child=_inside.clear)


# ── PyTorch's groups ──────────────────────────────────────────────────────────────────────────────────────────────────


def new_gloo_group(ranks: Sequence[int] | None, timeout_seconds: float) -> dist.ProcessGroup:
    """Makes a gloo group of these ranks, of which this is one; None: of all. Collective over them."""
    timeout = timedelta(seconds=timeout_seconds)
    if ranks is None:
        made = dist.new_group(backend="gloo", timeout=timeout)
    else:
        made = dist.new_group(list(ranks), backend="gloo", timeout=timeout, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup), "this rank takes part"
    return made


def free_group(group: dist.ProcessGroup) -> None:
    """Makes torch.distributed forget a group, which ends with the caller's last reference to it."""
    if dist.is_initialized():
        # The trainer may have destroyed all groups already, or the group was never known.
        with contextlib.suppress(ValueError):
            dist.destroy_process_group(group)


def reason_of(error: Exception) -> str:
    """Returns what failed in a collective, in the backend's words without its advice."""
    # PyTorch looks up the failing group, does not find one that it has not made, and raises that as a second error.
    first = error.__context__ or error
    text = str(first).partition(". This is typically")[0].rpartition("] ")[2] or str(first)
    return f"{type(first).__name__}: {text}"
