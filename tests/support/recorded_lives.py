"""Trains nothing on a stream that is being recorded, in real ranks that are killed at any moment; compares the ids.

``python -m tests.support.recorded_lives FOLDER KILLS SEED`` writes FOLDER/found.json. Each life forks 4, 3, 1 or 6
ranks in turn, which continue from the last saved state. Every rank appends what it got to a file.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch.utils.data import DataLoader

from shade import Recorded, RecordedSampler, ShadeDataset, ShadeLoader
from shade.data._recorded import recorder
from shade.data._recorded.recording import Recording
from shade.sampling import rank_slice
from tests.support.mixture_lives import fork, kill

RANKS = (4, 3, 1, 6)
GLOBAL_BATCH, ITEMS, EPOCHS = 12, 605, 6


class Stream:
    """Items that take a while."""

    def __init__(self, seconds: float, fast: int) -> None:
        self.place, self._seconds, self._fast = 0, seconds, fast

    def __iter__(self) -> Iterator[Any]:
        while self.place < ITEMS:
            if self.place >= self._fast:
                time.sleep(self._seconds)
            self.place += 1
            yield {"id": self.place - 1, "noise": torch.full((40,), float(self.place))}


class StreamWithState(Stream):
    """The same items, with a state; some lives make no use of it."""

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def opened(folder: Path, life: int, seconds: float) -> Recorded:
    """Returns the recording as a life opens it."""
    index = folder / "stream" / "index"
    num_recorded = index.stat().st_size // 16 if index.exists() else 0
    # Reading again what is recorded is as fast as a stream can be, else no life would get beyond it.
    return Recorded((StreamWithState if life % 3 else Stream)(seconds, num_recorded), folder / "stream")


def steps(data: Recorded, state: Any, num_workers: int, *, is_ours: bool) -> Iterator[Any]:
    """Yields (epoch, step, ids, sampler) of each step; the caller has seen it when it asks for the next one."""
    dataset = ShadeDataset(data, cache=None)
    batch_size = GLOBAL_BATCH // (dist.get_world_size() if dist.is_initialized() else 1)
    sampler = RecordedSampler(dataset, batch_size=batch_size, seed=5)
    if state is not None:
        sampler.load_state_dict(state)
    loader: Any = ShadeLoader if is_ours else DataLoader
    loader = loader(dataset, batch_size=batch_size, sampler=sampler, num_workers=num_workers)
    for epoch in range(sampler.epoch, EPOCHS):
        sampler.set_epoch(epoch)
        step = sampler.steps_done
        for items, indices in loader:
            assert items["id"].tolist() == indices.tolist()
            yield epoch, step, indices.tolist(), sampler
            sampler.weights(indices)
            sampler.report(indices, (indices * 7919 % 101) / 50.0)
            step += 1
            yield None, 0, [], sampler
    sampler.close()
    data.close()


def live(folder: Path, life: int, rank: int, world_size: int) -> None:
    """One rank of one life."""
    if world_size > 1:
        dist.init_process_group("gloo", f"file://{folder}/meet{life}", rank=rank, world_size=world_size)
    recorder._SEAL_SECONDS = 0.1
    saved = folder / "state"
    state = torch.load(saved, weights_only=False) if saved.exists() else None
    data = opened(folder, life, 0.002)
    with open(folder / f"got-{life}-{rank}", "a", buffering=1) as got:
        for epoch, step, ids, sampler in steps(data, state, 1 if world_size < 4 else 0, is_ours=life % 2 == 0):
            if epoch is not None:
                got.write(f"{epoch} {step} {rank} {world_size} {' '.join(map(str, ids))}\n")
                continue
            if world_size > 1:
                dist.barrier()  # as a step of training would wait
            time.sleep(0.005)
            state = sampler.state_dict()
            if rank == 0:
                torch.save(state, folder / "new")
                os.replace(folder / "new", saved)


def main(folder: Path, num_kills: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    chance, ranks = random.Random(seed), cycle(RANKS)
    killed = while_recorded = 0
    for life in range(num_kills):
        killed += kill(fork(live, folder, life, next(ranks)), folder, life, chance)
        while_recorded += not Recording(str(folder / "stream")).mark()["is_complete"]
    codes = [os.waitpid(pid, 0)[1] for pid in fork(live, folder, num_kills, next(ranks))]
    order: dict[int, list[int]] = defaultdict(list)
    for epoch, _, ids, _ in steps(opened(folder / "whole", 1, 0.0), None, 0, is_ours=False):
        order[epoch] += ids
    got: dict[tuple[int, int], set[int]] = defaultdict(set)
    for path in folder.glob("got-*"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # not torn by the kill
                epoch, step, rank, world_size, *ids = map(int, line.split())
                num_drawn = len(order[epoch])
                part = rank_slice(step, rank, num_drawn=num_drawn, global_batch=GLOBAL_BATCH, world_size=world_size)
                for position, number in zip(part, ids, strict=True):
                    got[epoch, position % num_drawn].add(number)
    places = [(epoch, position) for epoch in range(EPOCHS) for position in range(len(order[epoch]))]
    return {
        "killed": killed,
        "while_recorded": while_recorded,
        "finished": not any(codes),
        "expected": xxhash.xxh3_64_hexdigest(str([order[epoch][position] for epoch, position in places]).encode()),
        "got": xxhash.xxh3_64_hexdigest(str([min(got[place], default=-1) for place in places]).encode()),
        "differing": [place for place, ids in got.items() if len(ids) > 1 or place not in set(places)],
        "samples": len(places),
    }


if __name__ == "__main__":
    answer = main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    (Path(sys.argv[1]) / "found.json").write_text(json.dumps(answer))
