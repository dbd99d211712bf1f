"""What `bench_strategies` asks of its processes: one trains a model and saves it by one method after another, others
restore what was saved.

A method's turn has three parts. Warm-up, for each of its buffers: two steps without a save (what is profiled begins
with the end of the first), and one behind a save that is not measured (the buffer is made). Measured: pairs of `every`
steps behind a save and as many without one, now these first, now those: what else the machine does changes within
seconds, and hits both alike. Of a method whose saves take long there are fewer. And where it is to be restored one more
save, with a reference beside it that no method wrote: digests of all tensors, or the tensors themselves where not every
bit comes back.
"""

from __future__ import annotations

import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measures import Children, in_children, read_bytes, touch_free_memory, written_bytes
from strategy_methods import METHODS, with_store
from strategy_models import batches, build, optimizer_of

from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._strategies import STRATEGIES

FIRST_STEPS = 5
"""Of a training, before its first turn."""
ENOUGH_SECONDS = 6.0
"""No further pair is begun after so long."""
FREE_BYTES = 4 * 2**30
"""Free memory that is touched before a restore, by all ranks together."""
PATIENCE_SECONDS = 300
"""A rank that waits for another one so long gives up."""


class Training:
    """A model that trains and is saved.

    Args:
        kind: Of method; one that wants the model sharded shards it.
        model: In `strategy_models.MODELS`.
        size: In `strategy_models.SIZES`.
        data: Real text or images, or None.
        seed: Of weights and data.
    """

    def __init__(self, kind: Any, model: str, size: str, data: Path | None, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = build(model, size)
        if hasattr(kind, "prepare"):
            kind.prepare(self.model)
        self.optimizer = optimizer_of(model, self.model)
        self._batches = batches(model, size, data, seed=seed)

    def step(self, method: Any) -> float:
        """One step.

        Args:
            method: That may have a copy to finish before the state changes.

        Returns:
            Seconds waited for that.
        """
        self.model(**next(self._batches)).loss.backward()
        begun = time.perf_counter()
        method.may_change()
        waited = time.perf_counter() - begun
        self.optimizer.step()
        self.optimizer.zero_grad()
        return waited


class Turns:
    """A training that methods take turns in.

    Args:
        given: With ``model``, ``size``, ``every``, ``saves`` and ``data``.
        kind: Of method; one that wants the model sharded shards it.
    """

    def __init__(self, given: Any, kind: Any) -> None:
        self.given = given
        self.training = Training(kind, given.model, given.size, given.data)
        nothing = METHODS["none"](self.training.model, self.training.optimizer, Path())
        for _ in range(FIRST_STEPS):
            self.training.step(nothing)

    def take(self, name: str, folder: Path, reference: Path | None, number: int = 0) -> dict[str, Any]:
        """A method's turn.

        Args:
            name: Of the method.
            folder: To save in.
            reference: The file for what is to come back of one more save; None: there is none.
            number: Of the turn: in even ones the first pair begins without a save, in odd ones with it.

        Returns:
            Figures of the measured part.
        """
        method = with_store(METHODS[name])(self.training.model, self.training.optimizer, folder)
        try:
            return self._measure(method, name != "none", reference, number)
        finally:
            if hasattr(method, "close"):
                method.close()

    def _measure(self, method: Any, is_saved: bool, reference: Path | None, number: int) -> dict[str, Any]:
        turn = Turn(self.training, method, is_saved)
        for _ in range(getattr(method, "num_buffers", 1)):
            turn.steps(2, save=False)
            turn.steps(1, save=True)
        turn.forget()
        pairs: list[tuple[float, float]] = []
        written, begun = written_bytes(method.folder), time.perf_counter()
        for place in range(self.given.saves):
            if place and agreed(time.perf_counter() - begun > ENOUGH_SECONDS):
                break
            halves = (True, False) if (place + number) % 2 else (False, True)
            seconds = {save: turn.steps(self.given.every, save=save) for save in halves}
            pairs.append((seconds[True], seconds[False]))
        written = written_bytes(method.folder) - written
        if is_saved and reference is not None:
            turn.steps(0, save=True)
            found: dict[str, Any] = tensors_of(self.training)
            found = {key: digest(each) for key, each in found.items()} if is_exact(method) else found
            if not dist.is_initialized() or dist.get_rank() == 0:
                torch.save(found, reference)
        return {
            "pairs": pairs,
            "stalls": turn.stalls[: len(pairs)],
            "durable": method.durable_seconds[: len(pairs)],
            "committed": getattr(method, "committed_seconds", [])[: len(pairs)],
            "written_bytes": written / len(pairs),
            "state_bytes": state_bytes(self.training),
        }


class Turn:
    """Steps of a training, behind saves by one method and without.

    Args:
        training: That goes on.
        method: That saves.
        is_saved: Whether there are saves; otherwise all is as if there were.
    """

    def __init__(self, training: Training, method: Any, is_saved: bool) -> None:
        self._training, self._method, self._is_saved = training, method, is_saved
        self._number = 0
        self.stalls: list[float] = []
        """Of each save: in the call, and before the optimizer's steps behind it."""

    def steps(self, count: int, *, save: bool) -> float:
        """So many steps, behind a save if there is one, and until that is durable.

        Args:
            count: Of steps.
            save: Whether to.

        Returns:
            Seconds.
        """
        begun, is_saved = time.perf_counter(), save and self._is_saved
        if is_saved:
            self._method.begin(self._number)
            self.stalls.append(time.perf_counter() - begun)
        for _ in range(count):
            waited = self._training.step(self._method)
            self._number += 1
            if is_saved:
                self.stalls[-1] += waited
        if is_saved:
            self._method.may_change()
            self._method.finish()
        return time.perf_counter() - begun

    def forget(self) -> None:
        """What was measured until now does not count."""
        self.stalls.clear()
        self._method.durable_seconds.clear()
        getattr(self._method, "committed_seconds", []).clear()


class Ranks:
    """The processes that take one training's turns: one, or the ranks among which the model is sharded.

    Args:
        given: As for `Turns`, and ``ranks``.
        kind: Of method.
    """

    def __init__(self, given: Any, kind: Any) -> None:
        self._meeting = tempfile.TemporaryDirectory()
        words = (given.ranks, Path(self._meeting.name) / "store", given, kind)
        self._children = Children(given.ranks, _turns_of_rank, *words)

    def take(self, *words: Any) -> dict[str, Any]:
        """Takes a method's turn on all ranks, as `Turns.take` does on one."""
        return together(self._children.call("take", *words))

    def close(self) -> None:
        """Ends the processes."""
        self._children.close()
        self._meeting.cleanup()


def restore_on_ranks(name: str, given: Any, folder: Path, reference: Path) -> dict[str, Any]:
    """Restores as `restore` does, in as many new processes as ``given.ranks`` says."""
    with tempfile.TemporaryDirectory() as meeting:
        words = (given.ranks, Path(meeting) / "store", name, given, folder, reference)
        return together(in_children(given.ranks, _restore_of_rank, *words))


def together(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Makes one row of all ranks' figures: of seconds the longest, since a step ends with the slowest rank; of bytes
    the sum."""
    found = dict(ranks[0])
    for name in found.keys() & {"stalls", "durable", "committed"}:
        found[name] = [max(each) for each in zip(*(rank[name] for rank in ranks), strict=True)]
    for name in found.keys() & {"written_bytes", "state_bytes", "read_bytes"}:
        found[name] = sum(rank[name] for rank in ranks)
    for name, worst in (("recovery", max), ("equal", min), ("error", max)):
        if name in found:
            found[name] = worst(rank[name] for rank in ranks)
    return found


def agreed(is_so: bool) -> bool:
    """Returns what rank 0 says: clocks differ, and all ranks must do the same."""
    if not dist.is_initialized():
        return is_so
    said = torch.tensor(int(is_so))
    dist.broadcast(said, 0)
    return bool(said)


def _turns_of_rank(rank: int, num_ranks: int, meeting: Path, given: Any, kind: Any) -> Turns:
    _join(rank, num_ranks, meeting)
    return Turns(given, kind)


def _restore_of_rank(rank: int, num_ranks: int, meeting: Path, *words: Any) -> dict[str, Any]:
    _join(rank, num_ranks, meeting)
    return restore(*words)


def _join(rank: int, num_ranks: int, meeting: Path) -> None:
    """Makes this process one of several ranks, which share the cores; a single one stays as it is."""
    if num_ranks == 1:
        return
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    store = dist.FileStore(str(meeting), num_ranks)
    patience = timedelta(seconds=PATIENCE_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=patience)


def restore(name: str, given: Any, folder: Path, reference: Path) -> dict[str, Any]:
    """Restores what a turn saved last, in this other process, and compares it with the reference.

    Args:
        name: Of the method.
        given: As for `Turns`.
        folder: The same as for its turn.
        reference: The same.

    Returns:
        Seconds, bytes read, whether all is equal bit for bit, and of what need not be the largest error, as a part of
        its tensor's largest number.
    """
    training = Training(METHODS[name], given.model, given.size, given.data, seed=1)
    if dist.is_initialized():
        touch_free_memory(FREE_BYTES // dist.get_world_size())
        dist.barrier()
    else:
        touch_free_memory(FREE_BYTES)
    read, begun = read_bytes(), time.perf_counter()
    METHODS[name].restore(training.model, training.optimizer, folder)
    figures = {"recovery": time.perf_counter() - begun, "read_bytes": read_bytes() - read}
    expected = torch.load(reference, mmap=True, weights_only=True)
    found = tensors_of(training)
    if expected.keys() != found.keys():
        raise RuntimeError(f"restored other tensors: {sorted(expected.keys() ^ found.keys())[:5]}")
    if is_exact(METHODS[name]):
        return figures | {"equal": expected == {key: digest(each) for key, each in found.items()}}
    error = max(_error(expected[key], found[key]) for key in expected)
    return figures | {"equal": error == 0, "error": error}


def is_exact(method: Any) -> bool:
    """Whether it promises that every bit comes back."""
    return not hasattr(method, "strategy") or STRATEGIES.get(method.strategy).config.is_exact


def digest(tensor: torch.Tensor) -> str:
    """Of what is in it."""
    return digest_of(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def tensors_of(training: Training) -> dict[str, torch.Tensor]:
    """Everything that is to come back, of a sharded tensor all parts."""
    return {key: t.full_tensor() if hasattr(t, "full_tensor") else t for key, t in _tensors_here(training).items()}


def state_bytes(training: Training) -> int:
    """Of all tensors' parts in this process; those that are the same memory count once."""
    here = [t.to_local() if hasattr(t, "to_local") else t for t in _tensors_here(training).values()]
    unique = {(tensor.data_ptr(), tensor.shape): tensor for tensor in here}
    return sum(tensor.numel() * tensor.itemsize for tensor in unique.values())


def _tensors_here(training: Training) -> dict[str, torch.Tensor]:
    found = {f"model/{key}": tensor for key, tensor in training.model.state_dict().items()}
    for number, entry in training.optimizer.state_dict()["state"].items():
        found |= {f"optimizer/{number}/{key}": value for key, value in entry.items() if torch.is_tensor(value)}
    return found


def _error(expected: torch.Tensor, found: torch.Tensor) -> float:
    if expected.numel() == 0:
        return 0.0
    largest = float(expected.double().abs().max()) or 1.0
    return float((expected.double() - found.double()).abs().max()) / largest
