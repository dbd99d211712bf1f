"""Known faults of trainings in company, planted again in a script's processes, and the kind of script that shows each.

Each once stood in shade, and was mended: inside its context what mended it is away.
"""

from __future__ import annotations

import inspect
import operator
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from hypothesis.strategies import SearchStrategy
from numba.core.compiler_lock import global_compiler_lock
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shade import rank_group
from shade.checkpoint._buffer.shared_memory_tier import SharedMemoryTier
from shade.checkpoint._capture import app_state
from shade.checkpoint._capture.app_state import AppState
from shade.checkpoint._capture.flatten import _Flattener
from shade.checkpoint._restore import restore
from shade.checkpoint._save.save import Saver
from shade.checkpoint._session import checkpointer as checkpointing
from shade.checkpoint._strategies import overlap
from shade.checkpoint._strategies.overlap import Overlap, ThreadedCopy
from shade.checkpoint._tiers import identity
from shade.data._dataset.batch_reader import BatchReader
from shade.data._origin import url_origin
from shade.data._sampler import cache_planner
from shade.data._sampler import sampler as sampling
from shade.data._sampler.place import LoaderCount, Place, SamplerIterator
from shade.data._shards import archives, tables
from shade.data._shards.archives import LMDBFormat
from shade.data._shards.tables import ParquetFormat
from shade.data._source import item_codec, probe_worker, source
from shade.data._source.rows_in_memory import RowsInMemory
from shade.data._source.source import ItemSource
from shade.gradient._comm.transport import Transport
from shade.gradient._compress.compressor import Sparse
from shade.gradient._engine import comm_hook
from shade.gradient._engine import engine as engines
from shade.gradient._engine.comm_hook import ResidualStore, SparseState
from shade.gradient._engine.engine import GradientEngine
from shade.gradient._engine.gradient_hooks import GradientHooks
from shade.gradient._engine.replica import check_none_refuses
from shade.gradient._optim.base import SparseOptimizer
from shade.importance import merge
from shade.importance.merge import ScoreMerger
from shade.store._servers import server as servers
from tests.differential.company_script import scripts
from tests.differential.harness import together

replaced = patch.object
Plant = Callable[[], AbstractContextManager[Any]]


def nothing(*_: Any, **__: Any) -> None:
    """In place of what mended a fault."""


# ── forks, threads, the end of a process ────────────────────────────────────────────────────────────────────────────


class _TakenByFewer:
    """A lock that is taken where it surrounds a block, and not where a fork waits for it."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock

    @staticmethod
    def _is_block() -> bool:
        # Of the compiler's lock, whose `acquire` and `release` a block calls from these.
        caller = inspect.currentframe().f_back.f_back.f_back  # type: ignore[union-attr]
        return caller is not None and caller.f_code.co_name in ("__enter__", "__exit__")

    def acquire(self) -> None:
        if self._is_block():
            self._lock.acquire()

    def release(self) -> None:
        if self._is_block():
            self._lock.release()

    def _is_owned(self) -> bool:
        return bool(self._lock._is_owned())


class _Deaf(set[Any]):
    """A set that takes in nothing."""

    def add(self, _: Any) -> None:
        pass


def nobody_waits_at_exit() -> AbstractContextManager[Any]:
    """The interpreter ends while a daemon thread is inside torch."""
    return together(replaced(merge, "_started", _Deaf()), replaced(rank_group, "_inside", _Deaf()))


def servers_outlive() -> AbstractContextManager[Any]:
    """A private server ends neither with its store nor with its script."""
    unwatched = servers._WATCHDOG.replace("read -r _", "sleep 60")
    return together(replaced(servers, "_WATCHDOG", unwatched), replaced(servers, "_end", nothing))


# ── the user's objects ──────────────────────────────────────────────────────────────────────────────────────────────


def probed_by_script() -> AbstractContextManager[Any]:
    """Samples are probed in the script's process: what the data set opens then, forked workers share."""
    return replaced(source, "in_probe_worker", lambda work, dataset: work())


def hooks_of_a_probe() -> AbstractContextManager[Any]:
    """What a step of an optimizer needs is found out by one that calls the script's hooks of all optimizers."""
    return replaced(app_state, "inspect", SimpleNamespace(unwrap=lambda function: function))


class _WithoutMaps:
    """numpy, where the rows of a memory-mapped file are no arrays."""

    memmap = object()

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def checked_as_numbers(self: BatchReader, indices: Any) -> list[int]:
    return [self.checked(operator.index(index)) for index in indices]


# ── the place in the stream ─────────────────────────────────────────────────────────────────────────────────────────


def out_of_order() -> AbstractContextManager[Any]:
    """Batches of workers that do not keep the order count as if they did."""
    count = LoaderCount.__init__

    def made(self: LoaderCount, iterator: _BaseDataLoaderIter) -> None:
        had = vars(iterator).get("_in_order", True)
        vars(iterator)["_in_order"] = True
        count(self, iterator)
        vars(iterator)["_in_order"] = had

    return replaced(LoaderCount, "__init__", made)


def over_only_if_sought(self: Place, num_steps: int, *, is_placed: bool) -> bool:
    return self.is_sought and not is_placed and self.first_step >= num_steps


def of_any_epoch() -> AbstractContextManager[Any]:
    """An iterator goes to a place, whichever epoch that was of."""
    load = SamplerIterator.load_state_dict

    def loaded(self: SamplerIterator, state: dict[str, Any]) -> None:
        load(self, state | {"epoch": self._sampler.place.epoch})

    return replaced(SamplerIterator, "load_state_dict", loaded)


# ── formats ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def parted_at_dots() -> AbstractContextManager[Any]:
    """The name of a column of a Parquet file ends at its first dot."""

    def chunks(group: Any, columns: Any) -> list[tuple[int, int]]:
        found = [group.column(number) for number in range(group.num_columns)]
        wanted = [each for each in found if columns is None or each.path_in_schema.split(".")[0] in columns]
        return sorted((each.data_page_offset, each.data_page_offset + each.total_compressed_size) for each in wanted)

    return replaced(ParquetFormat, "_chunks", staticmethod(chunks))


def members_read(*kinds: bytes) -> Plant:
    """Returns what makes members of a tar of these kinds be read like any other, or left out."""
    return lambda: replaced(
        archives, "_UNREAD", {kind: words for kind, words in archives._UNREAD.items() if kind not in kinds}
    )


# ── gradients ───────────────────────────────────────────────────────────────────────────────────────────────────────


def hooks_before_weights() -> AbstractContextManager[Any]:
    """The optimizer's hooks run before an engine moves the weights."""

    def applied(self: GradientEngine, work: Any) -> None:
        self._optimizer.step()
        for bucket_state, merged, used in zip(self._bucket_states, work.merged, work.used, strict=False):
            self._optimizer.apply(bucket_state.bucket, Sparse(merged.indices_K, merged.values_K, merged.size), used)
        self._applied = work.step, work.norm

    return replaced(GradientEngine, "_apply", applied)


def thread_ends_with_sparse() -> AbstractContextManager[Any]:
    """A sparse gradient ends the thread of DDP's hook, and the others wait."""

    def processed(self: SparseState, job: Any) -> None:
        average_D = self._average(job)
        job.buffer.copy_(torch.from_numpy(average_D))
        job.future.set_result(job.buffer)

    return replaced(SparseState, "_process", processed)


def one_number_each() -> AbstractContextManager[Any]:
    """A complex parameter has as many numbers as a real one."""
    make = ResidualStore.__init__

    def made(self: ResidualStore, *args: Any) -> None:
        make(self, *args)
        self._sizes = {name: parameter.numel() for parameter, name in self._names.items()}

    return replaced(ResidualStore, "__init__", made)


def unused_decay() -> AbstractContextManager[Any]:
    """Parameters that no rank uses take a step like the others."""
    apply = SparseOptimizer.apply
    return replaced(SparseOptimizer, "apply", lambda self, bucket, sparse, used=None: apply(self, bucket, sparse))


# ── checkpoints ─────────────────────────────────────────────────────────────────────────────────────────────────────


def torn_copies() -> AbstractContextManager[Any]:
    """No step waits for the copy of a save, which takes long."""
    finish = overlap._finish

    class Slow:
        def __init__(self, copying: Any) -> None:
            self._copying = copying

        def __getattr__(self, name: str) -> Any:
            time.sleep(0.3 * (name == "finish"))
            return getattr(self._copying, name)

    return together(
        replaced(overlap, "_finish", lambda copying, copied: finish(Slow(copying), copied)),
        replaced(Overlap, "begin", ThreadedCopy.begin),
        replaced(Saver, "wait_copy_complete", nothing),
        replaced(Saver, "is_copying", lambda self, optimizer: False),
    )


def without_conjugate_bit() -> AbstractContextManager[Any]:
    """A tensor's memory is saved without the bit that says how to read it."""
    dense = _Flattener._dense
    return replaced(
        _Flattener,
        "_dense",
        lambda self, value, path: dense(self, value.conj() if value.is_conj() else value, path),
    )


def half_loaded() -> AbstractContextManager[Any]:
    """There is no way back for a module whose last part refuses a state."""
    return together(*(replaced(module, "way_back_of", lambda _: nothing) for module in (app_state, restore)))


def epoch_of_a_model() -> AbstractContextManager[Any]:
    """The first object with an epoch says it, be it a model."""
    counts = property(
        lambda self: next((each.epoch for each in self._objects.values() if isinstance(_epoch(each), int)), None)
    )
    return replaced(AppState, "epoch", counts)


def _epoch(target: Any) -> Any:
    return getattr(target, "epoch", None)


def optimizers_as_they_are() -> AbstractContextManager[Any]:
    """An optimizer that wraps another has to have what its constructor makes."""
    return together(*(replaced(module, "steppers", lambda each: [each]) for module in (app_state, checkpointing)))


def closed_has_no_state() -> AbstractContextManager[Any]:
    """A sampler that is closed before its checkpointer has no state."""
    return replaced(ScoreMerger, "close", lambda self: setattr(self, "_pid", None))


# ── all of them ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Fault(NamedTuple):
    """A fault, and scripts of its kind."""

    plant: Plant
    scripts: SearchStrategy[Any]


SAVES = ("overlap", "copy", "asymmetric")
_ENDS = {"saves": SAVES, "ending": ("exception", "interrupt"), "waits": True, "neighbour": False, "ranks": 1}
"""A training that saves, ends and goes on."""
_SIMPLE = {"differs": "", "alone": False, "meets": "first", "other_model": False, "in_order": True, "context": "fork"}
_SIMPLE |= {"relabels": False}
_RANKS = _SIMPLE | {"ranks": 2, "saves": "", "data": "tensors", "holds": True, "workers": 0}
_CACHED = {"cache": ("server", "local"), "workers": (1, 2)}


def _kind(*parts: dict[str, Any], **fixed: Any) -> SearchStrategy[Any]:
    joined: dict[str, Any] = {}
    for part in (*parts, fixed):
        joined |= part
    return scripts(**joined)


FAULTS: dict[str, Fault] = {
    "nobody waits at exit for threads": Fault(
        nobody_waits_at_exit, _kind(_RANKS, closes=False, ending="normal", loop="loop", workers=(0, 2))
    ),
    "what is open at exit is not saved": Fault(
        lambda: replaced(checkpointing, "end_at_exit", nothing),
        _kind(_SIMPLE, _ENDS, ending=("normal", "exception"), waits=False, closes=False, every=1, persists=True),
    ),
    "a fork beside fsspec's sockets": Fault(
        lambda: replaced(url_origin, "keep_fsspec_from_forks", nothing),
        _kind(_SIMPLE, data="remote images", loop="loop", workers=(1, 2), persistent=False, epochs=(2, 3)),
    ),
    "a private server outlives its script": Fault(servers_outlive, _kind(_SIMPLE, cache="local", ranks=1)),
    "samples are probed by the script": Fault(
        probed_by_script, _kind(_SIMPLE, _CACHED, data="lazy zip", loop=("loop", "stateful"), ranks=1)
    ),
    "a probe moves the script's files": Fault(
        lambda: replaced(probe_worker, "_part_from_parent", nothing), _kind(_SIMPLE, data="open file", ranks=1)
    ),
    "a probe calls the script's hooks": Fault(
        hooks_of_a_probe, _kind(_SIMPLE, _ENDS, hooks="global", optimizer=("momentum", "adam"), step=3, loop="loop")
    ),
    "labels that change are stale": Fault(
        lambda: replaced(RowsInMemory, "changed_among", lambda self, indices: set()),
        _kind(
            _SIMPLE,
            relabels=True,
            data="tensors",
            wrapper="none",
            cache=("server", "local", "memory"),
            workers=0,
            ranks=1,
            epochs=(2, 3),
            ending="normal",
        ),
    ),
    "items are read one by one": Fault(
        lambda: replaced(ItemSource, "_items", lambda self, indices: [self._item(index) for index in indices]),
        _kind(_SIMPLE, data="only many items", ranks=1),
    ),
    "rows of a mapped file are no arrays": Fault(
        lambda: replaced(item_codec, "np", _WithoutMaps()), _kind(_SIMPLE, _CACHED, data="mapped", ranks=1)
    ),
    "samples have numbers alone": Fault(
        lambda: replaced(BatchReader, "checked_many", checked_as_numbers), _kind(_SIMPLE, data="keyed", ranks=1)
    ),
    "batches out of order count": Fault(
        out_of_order, _kind(_SIMPLE, in_order=False, workers=2, loop="loop", ranks=1, data="tensors")
    ),
    "nothing is over that is not sought": Fault(
        lambda: replaced(Place, "is_over", over_only_if_sought),
        _kind(_SIMPLE, _ENDS, loop="stateful", step=(5, 10), every=1, epochs=(2, 3), data="tensors", wrapper="none"),
    ),
    "a place is of any epoch": Fault(
        of_any_epoch,
        _kind(_SIMPLE, _ENDS, loop="stateful", step=(5, 10), every=1, epochs=(2, 3), data="tensors", wrapper="none"),
    ),
    "batches that were fetched count as trained": Fault(
        lambda: replaced(Place, "count_step", nothing), _kind(_SIMPLE, _ENDS, loop="ahead", step=(2, 3, 4))
    ),
    "a closed sampler has no state": Fault(
        closed_has_no_state, _kind(_SIMPLE, _ENDS, ending="normal", closes=True, loop=("loop", "stateful"))
    ),
    "names of columns end at a dot": Fault(parted_at_dots, _kind(_SIMPLE, data="parquet", ranks=1)),
    "dictionaries of an Arrow file are left out": Fault(
        lambda: replaced(tables, "_DICTIONARY_MESSAGE", -1), _kind(_SIMPLE, data="arrow", ranks=1, saves="")
    ),
    "links in a tar are left out": Fault(members_read(b"1", b"2"), _kind(_SIMPLE, data="tar", ranks=1, saves="")),
    "sparse members of a tar are read": Fault(members_read(b"S"), _kind(_SIMPLE, data="tar", ranks=1, saves="")),
    "named databases are samples": Fault(
        lambda: replaced(LMDBFormat, "_check_is_main", staticmethod(nothing)), _kind(_SIMPLE, data="lmdb", ranks=1)
    ),
    "a busy server has bad samples": Fault(
        lambda: replaced(url_origin, "_BUSY", ()), _kind(_SIMPLE, data="images of a busy server", ranks=1, saves="")
    ),
    "samplers of ranks differ": Fault(
        lambda: together(*(replaced(module, "check_alike", nothing) for module in (sampling, cache_planner))),
        _kind(_RANKS, differs=("seed", "batch size", "mode")),
    ),
    "checkpointers of ranks differ": Fault(
        lambda: replaced(checkpointing, "check_alike", nothing), _kind(_RANKS, differs="every")
    ),
    "hooks of ranks differ": Fault(
        lambda: replaced(comm_hook, "check_same_setup", lambda world, *_: check_none_refuses(world, _[-1])),
        _kind(_RANKS, differs="density", exchange="hook"),
    ),
    "optimizers of ranks differ": Fault(
        lambda: replaced(engines, "_optimizer_settings", lambda optimizer: {}), _kind(_RANKS, differs="learning rate")
    ),
    "a rank that has not met trains alone": Fault(
        lambda: replaced(Transport, "_check_alone", staticmethod(nothing)),
        _kind(_RANKS, exchange="engine", meets="last"),
    ),
    "a checkpointer before the ranks meet": Fault(
        lambda: replaced(checkpointing, "check_met", nothing), _kind(_RANKS, saves=SAVES, meets="last")
    ),
    "a save on one rank is waited for": Fault(
        lambda: replaced(Saver, "check_calls", nothing), _kind(_RANKS, alone=True, saves="overlap")
    ),
    "gradients taken back are trained": Fault(
        lambda: replaced(GradientHooks, "check_none_taken_back", nothing),
        _kind(_RANKS, exchange="engine", holds=False, edits="drop"),
    ),
    "step hooks run before the weights move": Fault(hooks_before_weights, _kind(_RANKS, exchange="engine")),
    "a sparse gradient ends the hook's thread": Fault(
        thread_ends_with_sparse, _kind(_RANKS, exchange="hook", model="sparse")
    ),
    "complex parameters have one number each": Fault(one_number_each, _kind(_RANKS, exchange="hook", model="complex")),
    "unused parameters decay": Fault(unused_decay, _kind(_RANKS, exchange="engine", model="unused")),
    "wrapped optimizers are not looked into": Fault(
        optimizers_as_they_are, _kind(_SIMPLE, _ENDS, wraps=True, loop="loop")
    ),
    "no step waits for a copy": Fault(
        torn_copies, _kind(_SIMPLE, _ENDS, saves="overlap", optimizer=("fused adam", "sgd"), model="linear", every=2)
    ),
    "the conjugate bit is lost": Fault(without_conjugate_bit, _kind(_SIMPLE, _ENDS, model="complex", step=(2, 3, 4))),
    "a refused model is loaded in part": Fault(half_loaded, _kind(_SIMPLE, _ENDS, other_model=True)),
    "the epoch is a model's": Fault(epoch_of_a_model, _kind(_SIMPLE, _ENDS)),
    "memory is kept after close": Fault(
        lambda: replaced(SharedMemoryTier, "vacate", SharedMemoryTier.close),
        _kind(_SIMPLE, _ENDS, closes=True, persists=True),
    ),
    "snapshots belong to a name": Fault(
        lambda: replaced(identity, "of_storage", lambda *_, **__: "alone"),
        _kind(_SIMPLE, saves=SAVES, persists=True, neighbour=True, ranks=1),
    ),
    "a fork while a thread compiles": Fault(
        lambda: replaced(global_compiler_lock, "_lock", _TakenByFewer(global_compiler_lock._lock)),
        _kind(_RANKS, cold=True, loop="loop", exchange=("hook", "engine"), workers=(1, 2), persistent=False),
    ),
}
PLANTED: dict[str, Plant] = {name: fault.plant for name, fault in FAULTS.items()}
"""By name, what plants each in a process."""
KINDS: dict[str, SearchStrategy[Any]] = {name: fault.scripts for name, fault in FAULTS.items()}
"""By name, scripts that may show each."""
