"""One run of `bench_strategies`, in a process of its own: a model is trained and saved, or restored and compared.

A run has three parts. Warm-up: first steps, with two saves that are not measured (buffers are made, windows profiled).
Measured: pairs of `every` steps behind a save and as many without one, now these first, now those: what else the
machine does changes within seconds, and hits both alike. Of a method whose saves take long there are fewer. And one
more save, with a reference beside it that no method wrote, for the process that restores.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import torch
from strategy_models import batches, build, optimizer_of

WARM_UP_STEPS = 2
"""In each of its three parts; the first two begin with a save."""
ENOUGH_SECONDS = 30.0
"""No further pair is begun after so long."""
LEAST_PAIRS = 4
"""But for these."""


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


def train(name: str, given: Any, folder: Path) -> dict[str, Any]:
    """Trains and saves.

    Args:
        name: Of the method.
        given: With ``model``, ``size``, ``every``, ``saves``, ``data``, and ``reference``: the file for what is to come
            back.
        folder: To save in.

    Returns:
        Figures of the measured part.
    """
    from strategy_methods import METHODS, with_store

    kind = with_store(METHODS[name])
    training = Training(kind, given.model, given.size, given.data)
    is_saved = name != "none"
    idle = METHODS["none"](training.model, training.optimizer, folder)
    training.step(idle)
    method = kind(training.model, training.optimizer, folder)
    number, stalls = 0, []

    def steps(count: int, *, save: bool) -> float:
        """So many steps, behind a save if there is one, and until that is durable: seconds."""
        nonlocal number
        begun = time.perf_counter()
        if save:
            method.begin(number)
            stalls.append(time.perf_counter() - begun)
        for _ in range(count):
            waited = training.step(method)
            number += 1
            if save:
                stalls[-1] += waited
        if save:
            method.may_change()
            method.finish()
        return time.perf_counter() - begun

    for save in (True, True, False):
        steps(WARM_UP_STEPS, save=save and is_saved)
    for measured in (stalls, method.durable_seconds, getattr(method, "committed_seconds", [])):
        measured.clear()
    pairs: list[tuple[float, float]] = []
    written, begun = _written_bytes(), time.perf_counter()
    for place in range(given.saves):
        if place >= LEAST_PAIRS and time.perf_counter() - begun > ENOUGH_SECONDS:
            break
        seconds = {save: steps(given.every, save=save and is_saved) for save in (place % 2 == 0, place % 2 == 1)}
        pairs.append((seconds[True], seconds[False]))
    figures = {
        "pairs": pairs,
        "stalls": list(stalls),
        "durable": list(method.durable_seconds),
        "committed": list(getattr(method, "committed_seconds", [])),
        "written_bytes": (_written_bytes() - written) / max(1, len(stalls)),
        "state_bytes": state_bytes(training),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if is_saved:
        steps(0, save=True)
        torch.save(tensors_of(training), given.reference)
        if hasattr(method, "close"):
            method.close()
    return figures


def restore(name: str, given: Any, folder: Path) -> dict[str, Any]:
    """Restores what `train` saved last, in this other process, and compares it with the reference.

    Args:
        name: Of the method.
        given: As for `train`.
        folder: The same.

    Returns:
        Seconds, whether all is equal bit for bit, and the largest error, as a part of its tensor's largest number.
    """
    from strategy_methods import METHODS

    training = Training(METHODS[name], given.model, given.size, given.data, seed=1)
    begun = time.perf_counter()
    METHODS[name].restore(training.model, training.optimizer, folder)
    seconds = time.perf_counter() - begun
    expected = torch.load(given.reference, mmap=True, weights_only=True)
    found = tensors_of(training)
    if expected.keys() != found.keys():
        raise RuntimeError(f"restored other tensors: {sorted(expected.keys() ^ found.keys())[:5]}")
    differing = [key for key in expected if not torch.equal(expected[key], found[key])]
    error = max((_error(expected[key], found[key]) for key in differing), default=0.0)
    return {"recovery": seconds, "equal": not differing, "error": error}


def tensors_of(training: Training) -> dict[str, torch.Tensor]:
    """Everything that is to come back."""
    found = {f"model/{key}": _whole(tensor) for key, tensor in training.model.state_dict().items()}
    for number, entry in training.optimizer.state_dict()["state"].items():
        found |= {f"optimizer/{number}/{key}": _whole(value) for key, value in entry.items() if torch.is_tensor(value)}
    return found


def state_bytes(training: Training) -> int:
    """Of all tensors; those that are the same memory count once."""
    unique = {(tensor.data_ptr(), tensor.shape): tensor for tensor in tensors_of(training).values()}
    return sum(tensor.numel() * tensor.itemsize for tensor in unique.values())


def _error(expected: torch.Tensor, found: torch.Tensor) -> float:
    if expected.numel() == 0:
        return 0.0
    largest = float(expected.double().abs().max()) or 1.0
    return float((expected.double() - found.double()).abs().max()) / largest


def _written_bytes() -> int:
    """What this process has caused to be written to storage, as the kernel counts it; 0 where it does not tell."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    counts = {key: int(value) for key, _, value in (line.partition(":") for line in lines)}
    return counts["write_bytes"]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Of a sharded tensor all parts."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
