"""Trains nothing on a packed mixture, in real ranks that are killed at any moment, and compares the streams.

In every other life, documents of two sources come from a cache on disk that outlives the ranks, and ShadeLoader loads.

``python -m tests.support.mixture_lives FOLDER KILLS SEED`` writes FOLDER/found.json. Each life forks 4, 3, 1 or 6 ranks
in turn, which continue from the last saved state. Every rank appends what it got to a file: position and hash.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch.utils.data import DataLoader

from shade import ShadeDataset, ShadeLoader
from shade.data import MixtureSampler, PackedDataset

RANKS = (4, 3, 1, 6)
GLOBAL_BATCH, ROUND = 12, 120
WEIGHTS = {"web": 0.6, "code": 0.3, "books": 0.1}


def data(cache: str | None = None) -> PackedDataset:
    sources: dict[str, Any] = {}
    for number, (name, mean, count) in enumerate((("web", 30, 600), ("code", 90, 60), ("books", 700, 4))):
        source = np.random.default_rng(number)
        ends = np.cumsum(source.geometric(1 / mean, count))
        tokens = source.integers(0, 50_000, ends[-1]).astype(np.uint16)
        sources[name] = (tokens, np.concatenate([[0], ends]))
        if cache is not None and name != "web":
            documents = [torch.from_numpy(each.astype(np.int32)) for each in np.split(tokens, ends[:-1])]
            sources[name] = ShadeDataset(documents, cache, working_set_fraction=0.5, version=name)
    return PackedDataset(sources, length=128)


def sampler_of(dataset: PackedDataset, world_size: int) -> MixtureSampler:
    return MixtureSampler(
        dataset,
        weights=WEIGHTS,
        batch_size=GLOBAL_BATCH // world_size,
        round_sequences=ROUND,
        seed=3,
        adapt=1.5,
        floor=0.3,
    )


def losses_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """One loss a label: a function of the tokens, and larger where it is code."""
    return (batch["tokens"] * 7919 % 101) / 50 + (batch["sources"] == 1) * (batch["tokens"] % 5)


def steps(sampler: MixtureSampler, dataset: PackedDataset, num_workers: int, loader: Any = DataLoader) -> Any:
    """Yields (step of the run, this rank's batch) for ever; the caller reports."""
    step = sampler.round * sampler.num_steps + sampler.steps_done
    while True:
        for batch in loader(dataset, batch_size=sampler.batch_size, sampler=sampler, num_workers=num_workers):
            yield step, batch
            step += 1


def live(folder: Path, life: int, rank: int, world_size: int, last_step: int | None) -> None:
    """One rank of one life."""
    if world_size > 1:
        dist.init_process_group("gloo", f"file://{folder}/meet{life}", rank=rank, world_size=world_size)
    is_ours, saved = life % 2 == 0, folder / "state.json"
    dataset = data(f"disk://{folder}/cache?capacity=4MiB" if is_ours else None)
    sampler = sampler_of(dataset, world_size)
    if saved.exists():
        sampler.load_state_dict(json.loads(saved.read_text()))
    with open(folder / f"got-{life}-{rank}", "a", buffering=1) as got:
        for step, batch in steps(sampler, dataset, 1 if world_size < 4 else 0, ShadeLoader if is_ours else DataLoader):
            if step == last_step:
                break
            for place, tokens in enumerate(batch["tokens"]):
                position = step * GLOBAL_BATCH + rank * sampler.batch_size + place
                got.write(f"{position} {xxhash.xxh3_64_hexdigest(tokens.numpy().tobytes())}\n")
            sampler.report(batch["sources"], losses_of(batch))
            state = sampler.state_dict()
            if rank == 0:
                (folder / "new").write_text(json.dumps(state))
                os.replace(folder / "new", saved)
    if is_ours:
        (folder / f"hits-{life}-{rank}").write_text(str(dataset.stats()["hits"]))
    sampler.close()


def fork(live: Callable[..., None], folder: Path, life: int, world_size: int, *others: Any) -> list[int]:
    """Starts the ranks of a life, and returns their process ids."""
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if not pid:
            code = 1
            os.setpgid(0, 0)  # its workers are found by it when it is dead
            try:
                live(folder, life, rank, world_size, *others)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    return pids


def kill(pids: list[int], folder: Path, life: int, chance: random.Random) -> bool:
    """Kills all ranks at a random moment of their work, and returns whether the first was alive until then: others may
    end when they miss it."""
    deadline = time.monotonic() + 30
    while not any(path.stat().st_size for path in folder.glob(f"got-{life}-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(chance.random() * 0.5)
    chance.shuffle(pids)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        time.sleep(chance.choice((0, 0, 0.02)))
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    for pid in pids:  # a worker whose rank died before the worker looked for its parent would wait for ever
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    return codes[0] == -signal.SIGKILL


def expected(num_steps: int) -> tuple[list[str], list[Any]]:
    """The hashes of an uninterrupted run on one rank, and its receipts."""
    dataset, found = data(), []
    sampler = sampler_of(dataset, 1)
    for step, batch in steps(sampler, dataset, 0):
        if step == num_steps:
            return found, sampler.receipts
        found += [xxhash.xxh3_64_hexdigest(tokens.numpy().tobytes()) for tokens in batch["tokens"]]
        sampler.report(batch["sources"], losses_of(batch))
    raise AssertionError


def main(folder: Path, num_kills: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    chance, ranks, middles = random.Random(seed), cycle(RANKS), 0
    lives = [next(ranks) for _ in range(num_kills)]
    killed = 0
    for life, world_size in enumerate(lives):
        killed += kill(fork(live, folder, life, world_size, None), folder, life, chance)
        if (folder / "state.json").exists():
            middles += 0 < json.loads((folder / "state.json").read_text())["steps_done"] < ROUND // GLOBAL_BATCH
    state = json.loads((folder / "state.json").read_text())
    last_step = (state["round"] + 2) * ROUND // GLOBAL_BATCH
    codes = [os.waitpid(pid, 0)[1] for pid in fork(live, folder, num_kills, next(ranks), last_step)]
    got: dict[int, set[str]] = defaultdict(set)
    for path in folder.glob("got-*"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # not torn by the kill
                got[int(line.split()[0])].add(line.split()[1])
    hashes, receipts = expected(last_step)
    return {
        "killed": killed,
        "middles": middles,
        "finished": not any(codes),
        "stream": "".join(hashes[place] for place in range(len(hashes)))
        == "".join(",".join(got[place]) for place in range(len(hashes))),
        "sequences": len(hashes),
        "beyond": max(got) >= len(hashes),
        "shares": [list(receipt.wanted.values()) for receipt in receipts],
        "filled": min(receipt.filled for receipt in receipts),
        "hits": sum(float(path.read_text()) for path in folder.glob("hits-*")),
    }


if __name__ == "__main__":
    answer = main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    (Path(sys.argv[1]) / "found.json").write_text(json.dumps(answer))
