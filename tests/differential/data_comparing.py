"""Compares what a script saw on shade with what it saw on plain PyTorch."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image

from shade.errors import ShadeError
from tests.differential.data_script import Script
from tests.differential.harness import Outcome, Verdict

REFUSALS = {
    "a wrapper around a ShadeDataset": r"so that both number the samples|that reorders samples belongs inside",
    "ShadeLoader on a wrapper": r"expected a ShadeDataset, got",
    "a sample of an unknown class": r"cannot encode index .* pass ShadeDataset\(…, encode=",
    "a list of parts": r"as a tuple, such as \(image, label\)",
    "a private store with workers": r"a store that processes share",
    "a batch larger than the data set": r"batch_size × ranks of at most",
    "loader's batch is not the sampler's": r"give loader and sampler one batch_size",
    "ranks without torch.distributed": r"torch\.distributed to be initialised",
    "a transform before the cache": r"to keep the transform that was there when",
    "decoded pictures of a wrapper": r"form='encoded' for a data set whose",
    "ranks that leave batches out of their reports": r"report every batch on every rank",
    "a format set in place": r"to keep the format that it had when",
    "workers that draw other numbers": r"num_workers=\d+, as in the saved run",
    "random items are kept": r"gives another item when it is read again",
}
"""Name → what its message contains. Any other refusal counts as a difference."""
LATE = {
    "a wrapper around a ShadeDataset": 1000,
    "ranks that leave batches out of their reports": 1000,
    "a transform before the cache": 1000,
    "a format set in place": 1000,
    "workers that draw other numbers": 1000,
}
"""Name → so many batches may come before it, because it is about reports, or what is assigned in between."""


@dataclass
class Seen:
    """What one training loop saw."""

    passes: list[tuple[int, str, list[Any]]] = field(default_factory=list)
    """(epoch, name, batches) of each pass; a pass that was left early has a name of its own."""
    lengths: list[int] = field(default_factory=list)
    error: Exception | None = None
    warned: list[str] = field(default_factory=list)
    after: Any = None
    """Random numbers that the script draws when it is done."""

    @property
    def num_batches(self) -> int:
        """Batches that came before the end or the error."""
        return sum(len(batches) for _, _, batches in self.passes)


def indices_of(batch: Any, script: Script) -> list[int]:
    """The sample indices of a batch."""
    if script.batch is None:
        return [int(batch[-1])]
    return [int(sample[-1]) for sample in batch] if script.collate == "list" else batch[-1].tolist()


def difference(mine: Any, theirs: Any, where: str = "batch") -> str:
    """Says where shade's value is not plain PyTorch's; empty if it is. Classes, dtypes and shapes count."""
    if type(mine) is not type(theirs):
        return f"{where}: {type(mine).__name__} {mine!r:.80} in place of {type(theirs).__name__} {theirs!r:.80}"
    if isinstance(theirs, torch.Tensor | np.ndarray | np.generic):
        equal = mine.dtype == theirs.dtype and mine.shape == theirs.shape
        equal = equal and (torch.equal if isinstance(theirs, torch.Tensor) else np.array_equal)(mine, theirs)
        return "" if equal else f"{where}: {mine!r:.200} in place of {theirs!r:.200}"
    if isinstance(theirs, Image.Image):
        equal = mine.mode == theirs.mode and mine.size == theirs.size and mine.tobytes() == theirs.tobytes()
        return "" if equal else f"{where}: other pixels"
    if isinstance(theirs, dict):
        if list(mine) != list(theirs):
            return f"{where}: keys {list(mine)} in place of {list(theirs)}"
        return next(filter(None, (difference(mine[key], theirs[key], f"{where}[{key!r}]") for key in theirs)), "")
    if isinstance(theirs, list | tuple):
        if len(mine) != len(theirs):
            return f"{where}: {len(mine)} parts in place of {len(theirs)}"
        pairs = enumerate(zip(mine, theirs, strict=True))
        return next(filter(None, (difference(*pair, f"{where}[{number}]") for number, pair in pairs)), "")
    return "" if mine == theirs or mine != mine else f"{where}: {mine!r} in place of {theirs!r}"


def without_draws(value: Any) -> Any:
    """The value without what `Noise` drew."""
    if isinstance(value, dict):
        return {key: without_draws(part) for key, part in value.items() if key != "drawn"}
    return type(value)(map(without_draws, value)) if type(value) in (list, tuple) else value


def draws_of(value: Any) -> list[float]:
    """All that `Noise` drew."""
    if isinstance(value, dict):
        mine = value["drawn"].flatten().tolist() if "drawn" in value else []
        return mine + [each for key, part in value.items() if key != "drawn" for each in draws_of(part)]
    return [each for part in value for each in draws_of(part)] if type(value) in (list, tuple) else []


def without_view(batch: Any, script: Script) -> Any:
    """A batch of pictures without the pixels, which a random view has changed."""
    if script.collate == "list" and script.batch is not None:
        return [(image.shape, *rest) for image, *rest in batch]
    return [batch[0].shape, *batch[1:]]


def named_refusal(error: Exception) -> str:
    """The name of a refusal; empty if it has none."""
    if not isinstance(error, ShadeError):
        return ""
    return next((name for name, words in REFUSALS.items() if re.search(words, str(error))), "")


def is_random(script: Script) -> bool:
    """Whether samples are random."""
    return script.transform in ("noise", "fused noise") or script.kind == "noise inside"


def compared(script: Script, mine: Seen, theirs: Seen, *, exactly: bool) -> Verdict:
    """Compares what one rank saw on both sides; ``exactly``: random draws, too."""
    different = functools.partial(Verdict, Outcome.DIFFERENT)
    if mine.error is not None:
        name = named_refusal(mine.error)
        if name and mine.num_batches <= LATE.get(name, 0):
            return Verdict(Outcome.REFUSED, name)
        both = f"{type(mine.error).__name__}: {mine.error} after {mine.num_batches} batches; plain: {theirs.error!r}"
        if (
            isinstance(mine.error, ShadeError)
            or type(mine.error) is not type(theirs.error)
            or mine.num_batches != theirs.num_batches
        ):
            return different(both)
    elif theirs.error is not None:
        return different(f"plain PyTorch raises {theirs.error!r}, shade does not")
    if any("gives another item when it is read again" in words for words in mine.warned):
        return Verdict(Outcome.REFUSED, "random items are kept")
    if mine.lengths != theirs.lengths:
        return different(f"len(loader) {mine.lengths} in place of {theirs.lengths}")
    for (epoch, name, found), (_, _, expected) in zip(mine.passes, theirs.passes, strict=True):
        where = f"epoch {epoch}, {name}"
        indices = [[indices_of(batch, script) for batch in batches] for batches in (found, expected)]
        if indices[0] != indices[1]:
            return different(f"{where}: samples {indices[0]} in place of {indices[1]}")
        for number, pair in enumerate(zip(found, expected, strict=True)):
            if not exactly and script.transform == "fused noise":
                pair = tuple(without_view(batch, script) for batch in pair)
            elif not exactly:
                pair = tuple(map(without_draws, pair))
            if words := difference(*pair):
                return different(f"{where}, batch {number}: {words}")
    if exactly and not script.is_ours and script.resume is None and mine.after != theirs.after:
        return different(f"the script's next random numbers are {mine.after} in place of {theirs.after}")
    return Verdict(Outcome.SAME)


def miscounted(script: Script, ranks: list[Seen], num_samples: int) -> str:
    """Says what is wrong about how often samples come, by arithmetic alone; empty if nothing is."""
    seen: dict[int, list[int]] = {}
    for number, (epoch, name, _) in enumerate(ranks[0].passes):
        if name not in ("whole", "second", "inner"):
            continue
        parts = [[index for batch in rank.passes[number][2] for index in indices_of(batch, script)] for rank in ranks]
        indices = [index for part in parts for index in part]
        global_batch = (script.batch or 1) * script.world
        whole = num_samples - num_samples % global_batch if script.drop_last else num_samples
        distinct = len(set(indices))
        if script.sampler.startswith("uniform") or (script.sampler == "unbiased" and epoch == 0):
            if distinct != whole or not whole <= len(indices) < whole + script.world:
                return f"epoch {epoch}, {name}: {len(indices)} samples, {distinct} distinct, of {whole}: {indices}"
        elif script.sampler == "unbiased" and distinct != len(indices):
            return f"epoch {epoch}, {name}: a sample comes twice: {indices}"
        elif script.sampler == "pads" and len(indices) != whole:
            return f"epoch {epoch}, {name}: {len(indices)} samples of {whole}"
        if name == "whole" and seen.get(epoch - 1) == indices:
            return f"epochs {epoch - 1} and {epoch} have one order: {indices}"
        seen[epoch] = indices
    draws = [each for rank in ranks for _, _, batches in rank.passes for batch in batches for each in draws_of(batch)]
    if script.walk == "whole" and script.sampler != "pads" and script.world == 1 and len(set(draws)) != len(draws):
        return f"random transforms draw the same again: {len(set(draws))} of {len(draws)}"
    return ""
