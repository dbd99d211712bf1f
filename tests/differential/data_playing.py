"""Plays one script of the data plane: on shade, and as plain PyTorch would run it."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import logging
import os
import random
import signal
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from shade import ShadeDataset, ShadeLoader, ShadeSampler
from shade.errors import StoreUnavailableError
from shade.store import open_store
from shade.store._servers.local_cluster import LocalCluster
from shade.store._servers.server import LocalServer
from shade.testing import FaultyStore
from tests.differential.data_comparing import Seen, compared, indices_of, is_random, miscounted
from tests.differential.data_kinds import TRANSFORMS, WRAPPERS, Indexed, plain, prefixed
from tests.differential.data_script import Script
from tests.differential.harness import Outcome, Verdict

TIMEOUT_SECONDS = 60


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


@functools.cache
def cluster_url() -> str:
    """A cluster of three nodes that all scripts of this process share."""
    cluster = LocalCluster(3)
    cluster.start()
    atexit.register(cluster.stop)
    return str(cluster.url)


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
        self.server, self.workers = server, script.workers
        self.seen = Seen()
        self.closing = contextlib.ExitStack()

    def play(self) -> Seen:
        """Runs the script; keeps what it raised."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            logger = logging.getLogger("shade")
            level = logger.level
            logger.setLevel(logging.CRITICAL)  # a dead store is logged, which is not the question here
            seed_all(self.script.seed)
            try:
                with self.closing:
                    self._train()
            except Exception as error:  # noqa: BLE001 - that is what is compared
                self.seen.error = error
            finally:
                logger.setLevel(level)
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
        prefix = prefixed if script.prefixed else None
        if self.ours:
            self.data: Any = ShadeDataset(
                inside,
                cache=self.store,
                working_set_fraction=script.fraction,
                transform=transform,
                prefix=prefix,
                form=script.form,
                on_bad_sample=script.on_bad_sample,
            )
            self.closing.callback(self.data.close)
        else:
            self.data = Indexed(inside, transform, prefix)
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
        options |= {"num_workers": self.workers, "pin_memory": script.pin and torch.cuda.is_available()}
        if self.workers:
            options |= {"multiprocessing_context": script.context, "timeout": TIMEOUT_SECONDS}
            options |= {"prefetch_factor": script.prefetch, "persistent_workers": script.persistent}
        if script.loader == "ShadeLoader":
            view = ShadeLoader if self.ours else view
            # Its order does not depend on whether workers stay; DataLoader's does.
            options |= {} if self.ours else {"persistent_workers": False}
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
            if epoch == 0 and script.formatted:
                self.inner.set_format("numpy")

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
        for number, batch in zip(range(min(script.resume, len(self.loader))), iterator, strict=False):
            self._take(batches, batch, number)
        keeper = self.sampler if script.loader == "DataLoader" else self.loader
        state = copy.deepcopy(keeper.state_dict())
        del iterator
        self.closing.close()
        if script.resume_workers is not None:
            self.workers = script.resume_workers
        self._build()
        (self.sampler if script.loader == "DataLoader" else self.loader).load_state_dict(state)
        if script.sets_epoch and hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        if script.resume + 1 < self.seen.lengths[-1]:  # a look at all that is left leaves nothing
            for _ in range(script.looks):
                next(iter(self.loader))
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
    elif script.store == "killed node":
        with LocalCluster(3) as cluster:
            yield str(cluster.url), cluster.servers[1]
    elif script.store in ("server", "cluster"):
        yield (server_url() if script.store == "server" else cluster_url()), None
    else:
        yield {"none": None, "memory": "memory://", "local": "local://"}[script.store], None


def play(script: Script) -> Verdict:
    """Runs a script on both sides, every rank by itself."""
    ranks, changed = range(script.world), script.changed
    theirs = [Run(script, rank, None, ours=False, changed=changed).play() for rank in ranks]
    with store_of(script) as (store, server):
        if changed:
            Run(replace(script, epochs=1, walk="whole"), 0, store, ours=True).play()
        mine = [Run(script, rank, store, ours=True, changed=changed, server=server).play() for rank in ranks]
    # Under a ShadeSampler random transforms follow its seed and epoch; otherwise the process's generators, as anywhere.
    with_workers = script.loader == "ShadeLoader" and script.workers > 0
    exactly = not is_random(script) or not (script.is_ours or with_workers)
    for rank in ranks:
        verdict = compared(script, mine[rank], theirs[rank], exactly=exactly)
        if verdict.outcome is not Outcome.SAME:
            return verdict
    if is_random(script) and (script.is_ours or script.resume is not None) and mine[0].error is None:
        plainest = replace(script, resume=None)
        if script.is_ours:
            plainest = replace(plainest, loader="DataLoader", workers=0, store="none", form="encoded")
        reference = Run(plainest, 0, None, ours=True, changed=changed).play()
        verdict = compared(script, mine[0], reference, exactly=True)
        if verdict.outcome is not Outcome.SAME:
            return verdict
    if script.is_ours and script.around == "shifted" and script.reports != "none" and mine[0].error is None:
        return Verdict(Outcome.DIFFERENT, "reports of a wrapper that reorders are taken")
    if script.is_ours and mine[0].error is None:
        data: Any = plain(script.kind, script.size)
        for name in (*script.inside, *filter(None, [script.around])):
            data = WRAPPERS[name](data)
        if words := miscounted(script, mine, len(data)):
            return Verdict(Outcome.DIFFERENT, words)
    return Verdict(Outcome.SAME)
