"""Plays one script of the data plane: on shade, and as plain PyTorch would run it; then compares all that came out."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import logging
import os
import random
import re
import signal
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from shade import ShadeDataset, ShadeLoader, ShadeSampler
from shade.errors import ShadeError, StoreUnavailableError
from shade.store import open_store
from shade.store._servers.server import LocalServer
from shade.testing import FaultyStore
from tests.differential.data_kinds import TRANSFORMS, WRAPPERS, Indexed, plain
from tests.differential.data_script import Script
from tests.differential.harness import Outcome, Verdict

TIMEOUT_SECONDS = 60
REFUSALS = {
    "a wrapper around a ShadeDataset": r"inside the ShadeDataset, so that both number|put what reorders them inside",
    "ShadeLoader on a wrapper": r"expected a ShadeDataset, got",
    "a sample of an unknown class": r"cannot encode index .* pass ShadeDataset\(…, encode=",
    "a list of parts": r"as a tuple, such as \(image, label\)",
    "a private store with workers": r"a store that DataLoader workers share",
    "a batch larger than the data set": r"batch_size × ranks of at most",
    "loader's batch is not the sampler's": r"give loader and sampler one batch_size",
    "ranks without torch.distributed": r"torch\.distributed to be initialised",
    "a transform before the cache": r"a transform that was there when",
    "decoded pictures of a wrapper": r"form='encoded' for a data set whose",
    "random items are kept": r"gives another item when it is read again",
}
"""Name → what its message contains. Any other refusal counts as a difference."""


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


class Kept(FaultyStore):
    """A store in memory that outlives the data sets that close it."""

    def close(self) -> None:
        """Stays open."""


def as_list(batch: list[Any]) -> list[Any]:
    """A collate function of the user's own."""
    return batch


@functools.cache
def server_url() -> str:
    """A server that all scripts of this process share, so that what one leaves behind the next one meets."""
    server = LocalServer()
    server.start()
    atexit.register(server.stop)
    return f"unix://{server.socket_path}"


def seed_all(seed: int) -> None:
    """Seeds every global generator."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


class Run:
    """One side of a script. ``ours``: through shade; ``reference``: shade in its plainest way, without a cache."""

    def __init__(
        self,
        script: Script,
        rank: int,
        store: Any,
        *,
        ours: bool,
        changed: tuple[int, ...] = (),
        server: LocalServer | None = None,
    ) -> None:
        self.script, self.rank, self.store, self.ours, self.changed = script, rank, store, ours, changed
        self.server = server
        self.seen = Seen()
        self.closing = contextlib.ExitStack()

    def play(self) -> Seen:
        """Runs the script; keeps what it raised."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            logging.getLogger("shade").setLevel(logging.CRITICAL)  # a dead store is said, which is not the question here
            seed_all(self.script.seed)
            try:
                with self.closing:
                    self._train()
            except Exception as error:  # noqa: BLE001 - that is what is compared
                self.seen.error = error
            self.seen.after = torch.rand(2).tolist(), random.random(), np.random.rand()
        self.seen.warned = [str(each.message) for each in caught]
        return self.seen

    # ── what the script builds ──────────────────────────────────────────────────────────────────────────────────────

    def _build(self) -> None:
        script = self.script
        self.inner = inside = plain(script.kind, script.size, self.changed)
        for name in script.inside:
            inside = WRAPPERS[name](inside)
        transform = TRANSFORMS[script.transform]()
        if script.place == "own":
            self.inner.transform = transform
            transform = None
        if self.ours:
            self.data: Any = ShadeDataset(
                inside,
                cache=self.store,
                working_set_fraction=script.fraction,
                transform=transform,
                form=script.form,
                on_bad_sample=script.on_bad_sample,
            )
            self.closing.callback(self.data.close)
        else:
            self.data = Indexed(inside, transform)
        outer = WRAPPERS[script.around](self.data) if script.around else self.data
        self.sampler, options = self._sampling(outer)
        self.loader = self._loading(outer, options)

    def _sampling(self, data: Any) -> tuple[Any, dict[str, Any]]:
        script, generator = self.script, torch.Generator().manual_seed(self.script.seed)
        batch, sampler = {"batch_size": script.batch, "drop_last": script.drop_last}, None
        if script.sampler == "order":
            return None, batch
        if script.sampler == "shuffle":
            return None, {**batch, "shuffle": True, "generator": generator}
        if script.sampler == "distributed":
            sampler = DistributedSampler(
                data, num_replicas=script.world, rank=self.rank, seed=script.seed, drop_last=script.drop_last
            )
        elif script.is_ours:
            sampler = ShadeSampler(
                data,
                num_replicas=script.world,
                rank=self.rank,
                seed=script.seed,
                drop_last=script.drop_last,
                batch_size=script.batch or 1,
                mode=script.sampler.split()[0],
            )
            self.closing.callback(sampler.close)
        else:
            sampler = RandomSampler(data, replacement=script.sampler == "replacement", generator=generator)
        if script.sampler.endswith("batches"):
            return sampler, {"batch_sampler": BatchSampler(sampler, script.batch or 1, script.drop_last)}
        return sampler, {**batch, "sampler": sampler}

    def _loading(self, data: Any, options: dict[str, Any]) -> Any:
        script = self.script
        view: Any = StatefulDataLoader if script.loader == "StatefulDataLoader" else DataLoader
        options |= {"num_workers": script.workers, "pin_memory": script.pin and torch.cuda.is_available()}
        if script.workers:
            options |= {"multiprocessing_context": script.context, "timeout": TIMEOUT_SECONDS}
            options |= {"prefetch_factor": script.prefetch, "persistent_workers": script.persistent}
        if script.loader == "ShadeLoader" and self.ours:
            view = ShadeLoader
        if script.collate == "list" and script.batch is not None:
            options["collate_fn"] = as_list
        return view(data, **options)

    # ── the training loop ───────────────────────────────────────────────────────────────────────────────────────────

    def _train(self) -> None:
        script = self.script
        self._build()
        for epoch in range(script.epochs):
            if script.sets_epoch and hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(epoch)
            self.seen.lengths.append(len(self.loader))
            if epoch == script.epochs - 1 and script.resume is not None:
                self._resume(epoch)
            elif epoch == 0 and script.walk != "whole":
                self._stroll()
            else:
                self._pass(epoch, "whole")
            if epoch == 0 and script.assigned:
                other = TRANSFORMS[f"other {script.transform}"]()
                (self.inner if script.place == "own" else self.data).transform = other

    def _stroll(self) -> None:
        """The first epoch, in another way than once from beginning to end."""
        walk = self.script.walk
        if walk == "break":
            self._pass(0, "break", limit=2)
        elif walk == "peek":
            kept = iter(self.loader)
            self._take(self._begin(0, "peek"), next(kept))
            self._pass(0, "whole")
            del kept
        elif walk == "nested":
            batches = self._begin(0, "whole")
            for number, batch in enumerate(self.loader):
                self._take(batches, batch, number)
                if number == 1:
                    self._pass(0, "inner", reports=False)
        else:
            first, second = self._begin(0, "whole"), self._begin(0, "second")
            for number, (batch, other) in enumerate(zip(self.loader, self.loader, strict=True)):
                self._take(first, batch, number)
                self._take(second, other)

    def _begin(self, epoch: int, name: str) -> list[Any]:
        self.seen.passes.append((epoch, name, []))
        return self.seen.passes[-1][2]

    def _pass(self, epoch: int, name: str, limit: int | None = None, *, reports: bool = True) -> None:
        batches = self._begin(epoch, name)
        for number, batch in enumerate(self.loader):
            self._take(batches, batch, number if reports else None)
            if number + 1 == limit:
                break

    def _resume(self, epoch: int) -> None:
        """The last epoch, in two runs."""
        script, batches = self.script, self._begin(epoch, "whole")
        assert script.resume is not None
        if not self.ours:
            for number, batch in enumerate(self.loader):
                self._take(batches, batch, number)
            return
        iterator = iter(self.loader)
        for number, batch in zip(range(script.resume), iterator, strict=False):
            self._take(batches, batch, number)
        keeper = self.sampler if script.loader == "DataLoader" else self.loader
        state = copy.deepcopy(keeper.state_dict())
        del iterator
        self.closing.close()
        self._build()
        (self.sampler if script.loader == "DataLoader" else self.loader).load_state_dict(state)
        if script.sets_epoch and self.sampler is not None:
            self.sampler.set_epoch(epoch)
        for number, batch in enumerate(self.loader, script.resume):
            self._take(batches, batch, number)

    def _take(self, batches: list[Any], batch: Any, number: int | None = None) -> None:
        """One step; ``number`` is None in a pass without reports."""
        script = self.script
        if script.keeps_batches or script.collate == "list" or script.batch is None:
            batches.append(batch)
        else:
            batches.append(copy.deepcopy(batch))
        if self.server is not None and self.seen.num_batches == 2:
            os.kill(self.server.process_id, signal.SIGKILL)
            self.server = None
        if number is not None and script.is_ours:
            self._report(number, indices_of(batches[-1], script))
        if batches[-1] is not batch:
            for leaf in torch.utils._pytree.tree_leaves(batch):
                if isinstance(leaf, torch.Tensor) and not leaf.is_inference():
                    leaf.zero_()

    def _report(self, number: int, indices: list[int]) -> None:
        index_B = torch.tensor(indices)
        loss_B = (index_B * 37 % 11).float() + 0.1
        self.sampler.weights(index_B)
        reports, half = self.script.reports, len(indices) // 2
        if reports == "halves" and half:
            self.sampler.report(index_B[:half], loss_B[:half])
            self.sampler.report(index_B[half:], loss_B[half:])
        elif reports in ("once", "twice", "halves") or (reports == "every other" and number % 2):
            self.sampler.report(index_B, loss_B)
        if reports == "twice":
            self.sampler.report(index_B, loss_B * 2)


def indices_of(batch: Any, script: Script) -> list[int]:
    """The sample indices of a batch."""
    if script.batch is None:
        return [int(batch[-1])]
    return [int(sample[-1]) for sample in batch] if script.collate == "list" else batch[-1].tolist()


# ── comparing ───────────────────────────────────────────────────────────────────────────────────────────────────────


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
        is_late = mine.num_batches > (1 if name == "a wrapper around a ShadeDataset" else 0)
        if name and (not is_late or name == "a transform before the cache"):
            return Verdict(Outcome.REFUSED, name)
        both = f"{type(mine.error).__name__}: {mine.error} after {mine.num_batches} batches; plain: {theirs.error!r}"
        if type(mine.error) is not type(theirs.error) or mine.num_batches != theirs.num_batches:
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


@contextlib.contextmanager
def store_of(script: Script) -> Iterator[Any]:
    """What the data set gets as its cache, and the server behind it if the script kills that."""
    if script.store == "memory" and script.changed:
        yield Kept(open_store("memory://")), None
    elif script.store == "dying":
        store = Kept(open_store("memory://"))
        gone = StoreUnavailableError("gone")
        yield store.fail_from("get_many", 2, gone).fail_from("set_many", 3, gone).fail_from("increment", 9, gone), None
    elif script.store == "killed":
        server = LocalServer()
        server.start()
        try:
            yield f"unix://{server.socket_path}", server
        finally:
            server.stop()
    else:
        url = {"none": None, "memory": "memory://", "local": "local://"}
        yield (server_url() if script.store == "server" else url[script.store]), None


def play(script: Script) -> Verdict:
    """Runs a script on both sides, every rank by itself."""
    ranks, changed = range(script.world), script.changed
    theirs = [Run(script, rank, None, ours=False, changed=changed).play() for rank in ranks]
    with store_of(script) as (store, server):
        if changed:
            Run(replace(script, epochs=1, walk="whole"), 0, store, ours=True).play()
        mine = [Run(script, rank, store, ours=True, changed=changed, server=server).play() for rank in ranks]
    # Under a ShadeSampler random transforms follow its seed and epoch; otherwise the process's generators, as anywhere.
    fused_in_threads = script.transform == "fused noise" and script.loader == "ShadeLoader" and script.workers > 0
    exactly = not is_random(script) or not (script.is_ours or fused_in_threads)
    for rank in ranks:
        verdict = compared(script, mine[rank], theirs[rank], exactly=exactly)
        if verdict.outcome is not Outcome.SAME:
            return verdict
    if is_random(script) and script.is_ours and mine[0].error is None:
        plainest = replace(script, loader="DataLoader", workers=0, store="none")
        reference = Run(plainest, 0, None, ours=True, changed=changed).play()
        verdict = compared(script, mine[0], reference, exactly=True)
        if verdict.outcome is not Outcome.SAME:
            return verdict
    if script.is_ours and mine[0].error is None:
        data: Any = plain(script.kind, script.size)
        for name in (*script.inside, *filter(None, [script.around])):
            data = WRAPPERS[name](data)
        if words := miscounted(script, mine, len(data)):
            return Verdict(Outcome.DIFFERENT, words)
    return Verdict(Outcome.SAME)
