"""Deals an epoch's global order to one rank (`RankShard`), iterates over its part, and saves the draw. `ShuffleWindow`
brings the order of shards into one in which blocks are read once. `SharedDraws` has the ranks of a machine hold a large
draw once.

The arithmetic is `shade.sampling.dealing`; the shard adds one sampler's numbers, and remembers what was dealt otherwise
than by position (`Locality`).

After a resume an epoch is never drawn again, because it came from scores of a moment that is gone. So its whole order
is saved, eight bytes a drawn sample, weights only where they apply, with a hash that refuses a damaged or mixed-up
order.

Legend: N data set · K drawn in an epoch · G global batch · B this rank's part of it.

A loader that keeps its own place (torchdata's ``StatefulDataLoader``) asks its sampler's iterator for the place, and
sets it when it resumes. The sampler cannot answer: it counts the steps whose losses were reported, and the batches of
the workers run ahead of those. So there are two numbers: `ShadeSampler.steps_done` is what training has done, for a
checkpoint of the training; ``num_taken`` is what the loader was given, for a loader that restores its batches itself.

The pass begins when its first index is asked for, because such loaders make more iterators than they use.

Invariant: an iterator that was set to n returns index n of this rank's epoch next, and then the rest up to the end.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
import secrets
import shutil
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.utils.data.dataloader import _BaseDataLoaderIter

from shade.errors import ConfigError
from shade.process import enter_folder, exclusive_lock, leave_folder, remove_unused, replacing
from shade.sampling.base import Draw, Purpose, Receipt, generator, parts, picked
from shade.sampling.dealing import num_steps, rank_positions, rank_slice
from shade.sampling.receipt import measure
from shade.sampling.window import windowed
from shade.types import Floats, Indices, Order

logger = logging.getLogger("shade.data")

DEALT_STEPS = 128
"""How many steps back the shard remembers what was dealt."""
_NAME_BYTES = 8
_MEMORY = "/dev/shm"
_DRAW_BYTES = 8
"""Bytes a sample of a draw, at most: its place in the order, and its weight."""


def ranks_of(num_replicas: int | None, rank: int | None, batch_size: int) -> tuple[int, int, bool]:
    """Returns how many ranks there are, this one's number, and whether torch.distributed connects them, which says what
    the caller does not. Raises ConfigError for a rank or a batch size out of range."""
    distributed = dist.is_available() and dist.is_initialized()
    num_replicas = num_replicas or (dist.get_world_size() if distributed else 1)
    rank = (dist.get_rank() if distributed else 0) if rank is None else rank
    if not 0 <= rank < num_replicas:
        cure = "ranks count from 0 (-nr 0 … n-1)"
        raise ConfigError.of(f"a rank below num_replicas={num_replicas}", rank, cure)
    if batch_size < 1:
        raise ConfigError.of("batch_size ≥ 1", batch_size, "pass the DataLoader's batch_size")
    return num_replicas, rank, distributed


def agreed_name(group: dist.ProcessGroup | None) -> str:
    """Returns a new random name, the same on every rank of a group (None: this rank is alone). Collective."""
    drawn = torch.tensor(list(secrets.token_bytes(_NAME_BYTES)))
    if group is not None:
        dist.broadcast(drawn, src=dist.get_global_rank(group, 0), group=group)
    return bytes(drawn.tolist()).hex()


class RankShard:
    """One rank's part of every global batch."""

    def __init__(self, rank: int, num_replicas: int, batch_size: int, drop_last: bool) -> None:
        self._rank, self._num_replicas, self._drop_last = rank, num_replicas, drop_last
        self._global_batch = batch_size * num_replicas
        self._dealt: dict[int, Indices] = {}

    def num_steps(self, num_drawn: int) -> int:
        """Returns the steps of an epoch that draws so many samples."""
        return num_steps(num_drawn, self._global_batch, drop_last=self._drop_last)

    def num_mine(self, num_drawn: int, first_step: int) -> int:
        """Returns how many samples this rank takes in an epoch from a step on."""
        return len(
            rank_positions(
                self._rank,
                num_drawn=num_drawn,
                global_batch=self._global_batch,
                world_size=self._num_replicas,
                drop_last=self._drop_last,
                cursor=min(first_step * self._global_batch, num_drawn),
            )
        )

    def epoch_order(self, drawn_K: Order) -> Order:
        """Returns the order that the ranks go through: the drawn one, with its last step cut off or padded."""
        stop = self._slice(self.num_steps(len(drawn_K)) - 1, self._num_replicas - 1, len(drawn_K)).stop
        return drawn_K[:stop] if stop <= len(drawn_K) else np.concatenate([drawn_K, drawn_K[: stop - len(drawn_K)]])

    def _slice(self, step: int, rank: int, num_drawn: int) -> range:
        return rank_slice(
            step, rank, num_drawn=num_drawn, global_batch=self._global_batch, world_size=self._num_replicas
        )

    def of(self, order_K: Order, num_drawn: int, step: int) -> tuple[Indices, slice]:
        """Returns one global batch of an `epoch_order`, and this rank's places in it by position."""
        start = step * self._global_batch
        mine = self._slice(step, self._rank, num_drawn)
        index_G = order_K[start : start + self._global_batch].astype(np.int64)
        return index_G, slice(mine.start - start, mine.stop - start)

    def begin(self) -> None:
        """Forgets what was dealt in the pass before."""
        self._dealt.clear()

    def remember(self, step: int, index_B: Indices) -> None:
        """Records what this rank was dealt at a step."""
        self._dealt[step] = index_B
        self._dealt.pop(step - DEALT_STEPS, None)

    def dealt(self, drawn_K: Order, steps: Iterable[int]) -> list[Indices]:
        """Returns this rank's samples of some steps: as they were dealt, or by position if they are still to come."""
        order_K = self.epoch_order(drawn_K)
        dealt = []
        for step in steps:
            index_G, mine = self.of(order_K, len(drawn_K), step)
            dealt.append(self._dealt.get(step, index_G[mine]))
        return dealt

    def place(self, index_B: Indices, num_done: int, drawn_K: Order, num_ahead: int) -> tuple[int, bool]:
        """Returns the step in which these samples were dealt, the nearest to ``num_done`` if there are several, and
        whether its last sample is among them.

        Raises ConfigError if they are not of one batch, or of none before step ``num_ahead``, which is still to come.
        """
        reported = set(index_B.tolist())
        for step in (num_done, num_done - 1, num_done + 1):
            dealt = self._dealt.get(step)
            if dealt is not None and reported.issubset(dealt.tolist()):
                return step, len(index_B) >= len(dealt) or dealt[-1] in reported
        steps = np.unique(np.flatnonzero(self.epoch_order(drawn_K) == index_B[0]) // self._global_batch)
        if not len(steps) or steps[0] >= num_ahead:
            raise ConfigError.of(
                "the indices that came with a batch of this epoch",
                f"sample {index_B[0]}, which was not {'handed out yet' if len(steps) else 'drawn'}",
                "report the last element of each sample of the ShadeDataset; a data set around it that reorders "
                "samples belongs inside, ShadeDataset(Reordered(data), cache=…)",
            )
        for step in steps[np.abs(steps - num_done).argsort(kind="stable")].tolist():
            (dealt,) = self.dealt(drawn_K, [step])
            if reported.issubset(dealt.tolist()):
                return step, len(index_B) >= len(dealt) or dealt[-1] in reported
            both = np.concatenate(self.dealt(drawn_K, [step, step + 1]))
            start = int(np.flatnonzero(both == index_B[0])[0])
            if np.array_equal(both[start : start + len(index_B)], index_B):
                raise ConfigError.of(
                    f"samples of one batch of {len(dealt)}",
                    "of two batches, which follow each other",
                    f"give loader and sampler one batch_size, {self._global_batch // self._num_replicas}",
                )
        raise ConfigError.of(
            "samples of one batch, as the sampler dealt it",
            f"samples {', '.join(map(str, index_B[:4].tolist()))} …, which are of several",
            "a data set around the ShadeDataset that reorders samples belongs inside, "
            "ShadeDataset(Reordered(data), cache=…)",
        )

    def weights(self, draw: Draw, num_samples: int) -> Floats | None:
        """Returns float32 (N,) weights by sample; None if all are 1.

        They correct for an unevenly shared last step, because DDP averages ranks and not samples.
        """
        order_K = draw.order_K
        last = self.num_steps(len(order_K)) - 1
        index_G, mine = self.of(self.epoch_order(order_K), len(order_K), last)
        balance = (mine.stop - mine.start) * self._num_replicas / len(index_G)
        if balance == 1.0:
            return draw.weight_N
        weight_N = np.ones(num_samples, np.float32) if draw.weight_N is None else draw.weight_N.copy()
        weight_N[index_G[mine]] *= balance
        return weight_N


class ReadAheadBlocks(Protocol):
    """A data set whose samples lie in blocks, which may be read before they are wanted: `shade.Shards`."""

    first_sample_D: Indices
    """(D,) the first sample of each block, ascending, from 0."""

    def plan_window(self, window: int, owner: str, count: Callable[[int, int], None] | None) -> None:
        """Makes room for an order in which the samples of a block are within ``window`` places. The ranks of a job have
        one ``owner``; ``count`` gets the requests and bytes that are read ahead. Raises ConfigError if there is no
        room."""
        ...

    def begin_pass(self, order_K: Order, start: int) -> None:
        """Takes the order of all ranks, and the place in it where a pass begins."""
        ...

    def reach(self, handed_out: int, used: int) -> None:
        """Says up to which place samples are handed out, and up to which they are used by every rank."""
        ...


_APART_STEPS = 2
"""More steps than ranks of a job are apart."""


class ShuffleWindow:
    """Brings an epoch into an order in which neighbours in a shard come near each other, and has their blocks read
    ahead. Collective.

    Args:
        dataset: A `ShadeDataset` of `Shards`, or `Shards`.
        window: Over how many places the samples of a block are spread.
        seed: The sampler's.
        global_batch: G.
        is_distributed: Whether torch.distributed connects the ranks of this job.
        count: Gets the requests and bytes that are read ahead.

    Raises:
        ConfigError: A window below 1, another data set, or no room for the window.
    """

    def __init__(
        self,
        dataset: Any,
        window: int,
        seed: int,
        global_batch: int,
        *,
        is_distributed: bool,
        count: Callable[[int, int], None] | None,
    ) -> None:
        if window < 1:
            raise ConfigError.of("shuffle_window ≥ 1, in samples", window, "10_000 is a usual size")
        source = getattr(dataset, "source", dataset)
        found: ReadAheadBlocks | None = source if hasattr(source, "plan_window") else getattr(source, "shards", None)
        if found is None:
            expected = "Shards with a shuffle_window, because their samples lie in blocks"
            raise ConfigError.of(expected, type(dataset).__name__, "leave shuffle_window out")
        self._blocks, self._window, self._seed, self._global_batch = found, window, seed, global_batch
        self._num_samples = len(dataset)
        group = dist.new_group(backend="gloo") if is_distributed else None
        assert group is None or isinstance(group, dist.ProcessGroup), "every rank of the world takes part"
        found.plan_window(min(window, self._num_samples), agreed_name(group), count)

    def ordered(self, draw: Draw) -> Draw:
        """Returns a draw in an order of its own samples; a window of the whole data set leaves it as it is."""
        if self._window >= self._num_samples:
            return draw
        random = generator(self._seed, draw.epoch, Purpose.WINDOW)
        order_K = windowed(draw.order_K, self._blocks.first_sample_D, self._window, random)
        return Draw(draw.epoch, order_K, draw.weight_N, draw.receipt)

    def begin(self, order_K: Order, step: int) -> None:
        """Begins a pass through an order at a step."""
        self._blocks.begin_pass(order_K, min(step * self._global_batch, len(order_K)))

    def reach(self, step: int, num_got: int) -> None:
        """Says that a step is handed out, and how many steps this rank's loop has got."""
        used = (num_got - _APART_STEPS) * self._global_batch
        self._blocks.reach((step + 1) * self._global_batch, used)


class SharedDraws:
    """The draws of a large set, which one rank of a machine makes and the others map: a machine holds each once.

    A draw is a folder in ``/dev/shm``. Its name says what the draw follows from beside the settings: the epoch, the
    scores, the residents and the history of validation. So no rank waits for a certain other one, which might never
    draw: the first rank that wants a draw makes it behind a lock. A rank that has dropped a draw removes the folder;
    what others have mapped stays, and a rank that finds none makes it again, the same. Collective.

    Args:
        num_samples: N.
    """

    def __init__(self, num_samples: int) -> None:
        stem = f"{_MEMORY}/shade-{os.getuid()}-draws-"
        for path in glob.glob(f"{glob.escape(stem)}*"):
            remove_unused(path)  # of jobs that were killed
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup), "every rank of the world takes part"
        self._folder = f"{stem}{agreed_name(group)}"
        self._is_usable = self._has_room(2 * _DRAW_BYTES * num_samples)
        if self._is_usable:
            enter_folder(self._folder)
            weakref.finalize(self, leave_folder, self._folder, os.getpid())

    @staticmethod
    def _has_room(wanted_bytes: int) -> bool:
        free_bytes = shutil.disk_usage(_MEMORY).free if os.path.isdir(_MEMORY) else 0
        if free_bytes < wanted_bytes:
            logger.warning(
                "expected %d MiB of shared memory for two epochs' draws, got %d MiB free in %s; each rank keeps "
                "draws of its own; in a container: --shm-size",
                wanted_bytes >> 20,
                free_bytes >> 20,
                _MEMORY,
            )
        return free_bytes >= wanted_bytes

    def of(self, epoch: int, causes: Iterable[object], make: Callable[[], Draw]) -> Draw:
        """Returns a draw, which this rank makes if no other one has.

        Args:
            epoch: The epoch that is drawn.
            causes: What the draw follows from, the same on every rank: arrays, numbers, None.
            make: Draws.

        Returns:
            The draw, its arrays read-only.
        """
        if not self._is_usable:
            return make()
        digest = xxhash.xxh3_64()
        for cause in causes:
            digest.update(b"|")
            digest.update(cause.view(np.uint8).data if isinstance(cause, np.ndarray) else repr(cause).encode())
        place = Path(self._folder, f"{epoch}-{digest.hexdigest()}")
        with exclusive_lock(f"{place}.lock"):
            with contextlib.suppress(FileNotFoundError):  # not drawn yet, or a rank that is ahead is removing it
                return self._mapped(epoch, place)
            draw = make()
            try:
                with replacing(place) as beside:
                    self._write(draw, beside)
                del draw
                return self._mapped(epoch, place)
            except OSError as error:
                logger.warning("%s takes no draw (%s); this rank keeps its own", place, error)
        return make()

    @staticmethod
    def _write(draw: Draw, folder: Path) -> None:
        folder.mkdir()
        np.save(folder / "order.npy", draw.order_K)
        if draw.weight_N is not None:
            np.save(folder / "weight.npy", draw.weight_N)
        described = {"has_weights": draw.weight_N is not None, "receipt": vars(draw.receipt)}
        (folder / "draw.json").write_text(json.dumps(described))

    @staticmethod
    def _mapped(epoch: int, folder: Path) -> Draw:
        described = json.loads((folder / "draw.json").read_text())
        order_K = np.asarray(np.load(folder / "order.npy", mmap_mode="r"))
        weight_N = np.asarray(np.load(folder / "weight.npy", mmap_mode="r")) if described["has_weights"] else None
        draw = Draw(epoch, order_K, weight_N, Receipt(**described["receipt"]))
        weakref.finalize(draw, _forget, folder, os.getpid()).atexit = False
        return draw


def _forget(folder: Path, process: int) -> None:
    if process == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)


class SavedDraws:
    """Draws in the form of a checkpoint, each made once, because a loader that keeps its place may ask at every step.

    All states that hold a tensor share it, so it must not be changed.
    """

    def __init__(self) -> None:
        self._made: list[tuple[Draw, dict[str, Any]]] = []

    def of(self, draw: Draw) -> dict[str, Any]:
        """Returns a draw as plain numbers and tensors, which `load_draw` takes."""
        for known, saved in self._made:
            if known is draw:
                return dict(saved)
        weight_K = None if draw.weight_N is None else torch.from_numpy(picked(draw.weight_N, draw.order_K))
        made = {
            "order": torch.from_numpy(draw.order_K.astype(np.int32)),
            "weight": weight_K,
            "hash": _digest(draw.order_K),
            "receipt": vars(draw.receipt).copy(),
        }
        self._made = [*self._made[-1:], (draw, made)]
        return dict(made)


def load_draw(epoch: int, saved: dict[str, Any], num_samples: int) -> Draw:
    """Restores a draw from `SavedDraws.of`; weights of samples that were not drawn are 1, and are never used.

    Raises ConfigError if the order does not match its hash.
    """
    order_K = saved["order"].numpy().astype(np.int32)
    if _digest(order_K) != saved["hash"]:
        raise ConfigError.of("an order that matches its hash", saved["hash"], "restore an older checkpoint")
    weight_N = None
    if saved["weight"] is not None:
        weight_N = np.ones(num_samples, dtype=np.float32)
        for part in parts(len(order_K)):
            weight_N[order_K[part]] = saved["weight"].numpy()[part]
    return Draw(epoch, order_K, weight_N, Receipt(**saved["receipt"]))


def _digest(order_K: Order) -> str:
    """Returns the hash of an order, as 64-bit numbers."""
    digest = xxhash.xxh3_64()
    for part in parts(len(order_K)):
        digest.update(order_K[part].astype(np.int64).tobytes())
    return digest.hexdigest()


def draw_from(epoch: int, order_K: Order, weight_N: Floats | None, *, num_samples: int) -> Draw:
    """Makes a draw from another job's order and weights (None: all 1); without targets its receipt has no classes."""
    known_N = np.ones(num_samples, dtype=np.float32) if weight_N is None else weight_N
    return Draw(epoch, order_K, weight_N, measure(order_K, known_N))


LOOK_AHEAD_STEPS = 64
"""Later steps that `check_order` compares a batch with."""


class IteratedSampler(Protocol):
    """What an iterator calls on its sampler; `ShadeSampler` is one."""

    batch_size: int
    """Batch of one rank. A place is saved with it, so that other ranks can find it."""

    @property
    def num_steps(self) -> int:
        """Returns the steps of a whole pass."""
        ...

    def _begin_pass(self, *, is_placed: bool) -> tuple[int, Iterator[Any]]:
        """Begins the pass, which ``is_placed`` if the iterator was set to a place; returns how many indices were taken
        before it, and the rest."""
        ...

    def _seek(self, step: int, *, is_between: bool) -> None:
        """Sets where the next pass begins; ``is_between`` says that a batch ends there."""
        ...


_CALLERS = 8
"""Calls between the loader's iterator and the sampler, at most."""


class LoaderCount:
    """Counts the batches that a loop gets from a DataLoader's iterator, whose workers ask for more than that.

    DataLoader does not say who asks a sampler for indices, so its iterator is looked for among the callers.
    """

    def __init__(self, iterator: _BaseDataLoaderIter) -> None:
        self._attributes = vars(iterator)  # and not the iterator, which ends when the loop drops it
        self._num_before = iterator._num_yielded
        self.is_over = False
        """Whether the loop has dropped the pass."""
        # Workers that stay have one iterator for all passes, and a new order in each.
        self._ends = [weakref.ref(iterator, self._end)]
        with contextlib.suppress(TypeError):  # an itertools object
            self._ends.append(weakref.ref(iterator._sampler_iter, self._end))

    @classmethod
    def of_caller(cls) -> LoaderCount | None:
        """Returns the count of the DataLoader's iterator that is asking; None if none is."""
        frame = sys._getframe(1)
        for _ in range(_CALLERS):
            found = frame.f_locals.get("self")
            if isinstance(found, _BaseDataLoaderIter):
                return cls(found)
            if frame.f_back is None:
                break
            frame = frame.f_back
        return None

    def _end(self, _: Any) -> None:
        self.is_over, self._attributes = True, {"_num_yielded": self._attributes["_num_yielded"]}

    def __call__(self) -> int:
        return int(self._attributes["_num_yielded"]) - self._num_before


def place_of_node(sampler: IteratedSampler) -> dict[str, Any]:
    """Returns the place in a sampler's state if a node of torchdata asks for it; empty if anything else asks.

    A node reads ahead of training, and keeps the state with what was made of the indices that it has. Training has done
    less. ``inside_batch`` is there if some indices of a batch are missing.
    """
    node = sys._getframe(2).f_locals.get("self")
    iterator = getattr(node, "_it", None) if type(node).__module__ == "torchdata.nodes.adapters" else None
    if not isinstance(iterator, SamplerIterator) or iterator._num_taken is None:
        return {}
    step = -(-iterator._num_taken // sampler.batch_size)
    is_between = iterator._num_taken % sampler.batch_size == 0 or step == sampler.num_steps
    return {"steps_done": step} if is_between else {"steps_done": step, "inside_batch": True}


def check_place(state: dict[str, Any]) -> None:
    """Raises ConfigError for a sampler's state that was taken inside a batch."""
    if state.get("inside_batch"):
        raise ConfigError.of(
            "a place between two batches",
            f"one inside the batch before step {state['steps_done']}",
            "give loader and sampler one batch_size",
        )


class SamplerIterator(Iterator[Any]):
    """An iterator over this rank's indices; the sampler does the work."""

    def __init__(self, sampler: IteratedSampler) -> None:
        self._sampler = sampler
        self._rest: Iterator[Any] | None = None
        self._num_taken: int | None = None
        self._is_placed = False

    def __next__(self) -> Any:
        if self._rest is None:
            self._num_taken, self._rest = self._sampler._begin_pass(is_placed=self._is_placed)
        index = next(self._rest)
        assert self._num_taken is not None, "it has begun"
        self._num_taken += 1
        return index

    def state_dict(self) -> dict[str, Any]:
        """Returns how many indices of this rank's epoch were taken; None before the pass has begun."""
        return {"num_taken": self._num_taken, "batch_size": self._sampler.batch_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to the place of a `state_dict`. Load the sampler's state, which holds the epoch, before.

        Raises ConfigError if the place lies inside a batch.
        """
        num_taken, batch_size = state["num_taken"], state["batch_size"]
        if num_taken is not None:
            self._sampler._seek(-(-num_taken // batch_size), is_between=num_taken % batch_size == 0)
            self._num_taken, self._is_placed = num_taken, True


def check_order(first: int, step: int, dealt: Sequence[Indices]) -> None:
    """Checks that the batch that is reported is the one that was handed out at this step.

    It is not if something between the sampler and the loop deals the batches out to ranks a second time: this rank
    would then train on every W-th of its own batches, and no rank would train on the rest of the data.

    Args:
        first: First sample index of the reported batch.
        step: The step of this report.
        dealt: This rank's samples of that step and of the steps after it.

    Raises:
        ConfigError: It is this rank's batch of a later step.
    """
    for later, index_B in enumerate(dealt, step):
        if first in index_B:
            if later == step:
                return
            raise ConfigError.of(
                f"the losses of the batch that was handed out at step {step} of the epoch",
                f"those of step {later}'s",
                "report every batch on every rank; if you do, something shards a second time what the sampler dealt to "
                "ranks: leave the loader out of accelerator.prepare(…), or switch off whatever else shards it",
            )
