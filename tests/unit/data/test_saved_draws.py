"""Large draws that the ranks of a machine share: the same bits, one copy, and nothing left behind."""

from __future__ import annotations

import gc
import glob
import logging
import multiprocessing
import os
import pickle
import signal
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
import xxhash

from shade import ShadeSampler
from shade.data._sampler import sampler, saved_draws
from shade.process import enter_folder, leave_folder, remove_unused
from shade.rank_group import SingleProcessGroup
from shade.sampling import MODES, Scores
from shade.sampling.base import Draw

RANKS, BATCH = 4, 16
SECONDS = 240


class Numbers:
    """A data set of which only the length is asked."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples


def folders() -> list[str]:
    return glob.glob(f"/dev/shm/shade-{os.getuid()}-draws-*")


def run_ranks(work: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """Calls ``work(rank, *arguments)`` on the ranks of a gloo world, each a forked process; returns their results."""

    def rank_main(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
        (folder / f"result{rank}").write_bytes(pickle.dumps(work(rank, *arguments)))
        dist.barrier()
        dist.destroy_process_group()

    ranks = [multiprocessing.get_context("fork").Process(target=rank_main, args=(rank,)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in ranks] == [0] * RANKS
    return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(RANKS)]


def stream(rank: int, num_samples: int, mode: str, resumes: bool) -> tuple[list[Any], int]:
    """Takes three epochs, with losses that follow from the sample; returns what was drawn, and by how many calls."""
    num_drawn = 0
    mine = ShadeSampler(Numbers(num_samples), batch_size=BATCH, mode=mode, seed=3)
    draw = mine._draws.mode.draw

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal num_drawn
        num_drawn += 1
        return draw(*arguments, **options)

    mine._draws.mode.draw = counted  # type: ignore[method-assign]
    found = []
    for epoch in range(3):
        mine.set_epoch(epoch)
        indices = torch.tensor(list(mine))
        for part in indices.split(BATCH):
            mine.report(part, (part % 7).float() + 0.1)
        order_K, weight_N = mine.order_of(epoch), mine.weights(indices)
        found.append((order_K.copy(), weight_N, mine.receipt, indices))
        if resumes and epoch == 1:
            state = mine.state_dict()
            mine.close()
            mine = ShadeSampler(Numbers(num_samples), batch_size=BATCH, mode=mode, seed=3)
            mine.load_state_dict(state)
    dist.barrier()
    mine.close()
    return found, num_drawn


@pytest.mark.multiprocess
@pytest.mark.filterwarnings("ignore:epoch . has")
@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize("mode", ["unbiased", "uniform"])
def test_ranks_get_the_draws_that_each_would_make(
    tmp_path: Path, mode: str, resumes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "shared").mkdir()
    own = run_ranks(stream, tmp_path / "own", 2000, mode, resumes)
    monkeypatch.setattr(sampler, "is_large", lambda _: True)
    shared = run_ranks(stream, tmp_path / "shared", 2000, mode, resumes)
    for (mine, _), (theirs, _) in zip(own, shared, strict=True):
        for (order_K, weight_B, receipt, indices), (order, weight, other, dealt) in zip(mine, theirs, strict=True):
            assert np.array_equal(order_K, order)
            assert torch.equal(weight_B, weight)
            assert str(receipt) == str(other)
            assert torch.equal(indices, dealt)
    assert [num_drawn for _, num_drawn in own] == [4 - resumes] * RANKS
    assert sum(num_drawn for _, num_drawn in shared) < RANKS * 2, "one rank draws for all"
    assert folders() == []


def held_bytes(rank: int, num_samples: int) -> tuple[int, list[str]]:
    """Returns by how much a rank's share of the memory grows with two epochs' draws, and the hashes of both."""
    mine = ShadeSampler(Numbers(num_samples), batch_size=BATCH, mode="uniform", seed=3)
    dist.barrier()
    before = psutil.Process().memory_full_info().pss
    next(iter(mine))
    orders = [mine.order_of(epoch) for epoch in range(2)]
    hashes = [xxhash.xxh3_64_hexdigest(order_K) for order_K in orders]  # reads all of it
    dist.barrier()
    grown = psutil.Process().memory_full_info().pss - before
    dist.barrier()
    mine.close()
    return grown, hashes


@pytest.mark.slow
@pytest.mark.multiprocess
def test_four_ranks_hold_each_large_draw_once(tmp_path: Path) -> None:
    num_samples = 20 << 20
    mode = MODES.get("uniform")(num_samples, RANKS * BATCH, 3)
    draws = [mode.draw(epoch, None) for epoch in range(2)]  # which compiles the loops before the fork
    hashes = [xxhash.xxh3_64_hexdigest(draw.order_K) for draw in draws]
    del draws
    ranks = run_ranks(held_bytes, tmp_path, num_samples)
    two_epochs = 2 * 4 * num_samples
    assert two_epochs < sum(grown for grown, _ in ranks) < 2 * two_epochs  # and a byte a sample for flags of the scores
    assert [found for _, found in ranks] == [hashes] * RANKS
    assert folders() == []


def test_too_little_shared_memory_is_named_and_each_rank_draws(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saved_draws, "_MEMORY", "/nowhere")
    with caplog.at_level(logging.WARNING, logger="shade.data"):
        shared = saved_draws.SharedDraws(1 << 20, SingleProcessGroup())
    assert "expected 16 MiB of shared memory" in caplog.text
    assert "--shm-size" in caplog.text
    made = object()
    assert shared.of(0, (), lambda: made) is made  # type: ignore[arg-type, return-value]


def test_a_draw_that_another_rank_is_removing_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_draws, "_MEMORY", str(tmp_path))
    num_made = 0

    def make() -> Draw:
        nonlocal num_made
        num_made += 1
        scores = Scores(np.arange(1000, dtype=np.float32), np.ones(1000, dtype=bool))
        return MODES.get("unbiased")(1000, 10, 3).draw(2, scores)

    shared = saved_draws.SharedDraws(1000, SingleProcessGroup())
    first, second = shared.of(2, (7,), make), shared.of(2, (7,), make)
    assert num_made == 1
    (weights,) = tmp_path.glob("*/2-*/weight.npy")
    weights.unlink()  # the first file that goes
    third = shared.of(2, (7,), make)
    assert num_made > 1
    for draw in (first, second, third):
        assert draw.weight_N is not None
        assert np.array_equal(draw.weight_N, make().weight_N)
        assert np.array_equal(draw.order_K, make().order_K)


def test_a_draw_that_is_there_takes_no_copy_of_the_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_draws, "_MEMORY", str(tmp_path))
    num_samples = 1 << 20
    mine = ShadeSampler(Numbers(num_samples), batch_size=BATCH, mode="unbiased", seed=3)
    mine._draws.table.update(np.arange(num_samples), np.ones(num_samples, dtype=np.float32))
    mine._draws._shared = saved_draws.SharedDraws(num_samples, SingleProcessGroup())
    first = mine._draws._own(1)
    tracemalloc.start()
    second = mine._draws._own(1)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.array_equal(first.order_K, second.order_K)
    assert peak_bytes < num_samples // 4
    mine.close()


# ── folders that processes share ────────────────────────────────────────────────────────────────────────────────────


def use(folder: str) -> None:
    enter_folder(folder)
    Path(folder, "content").write_text("x" * 100)
    time.sleep(SECONDS)


@pytest.mark.multiprocess
def test_a_killed_process_leaves_a_folder_that_the_next_removes(tmp_path: Path) -> None:
    folder = str(tmp_path / "shared")
    process = multiprocessing.get_context("fork").Process(target=use, args=(folder,))
    process.start()
    deadline = time.monotonic() + SECONDS
    while not Path(folder, "content").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    remove_unused(folder)
    assert Path(folder, "content").exists(), "it is in use"
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert Path(folder, "content").exists()
    remove_unused(folder)
    assert not Path(folder).exists()


def test_a_folder_stays_until_all_that_entered_have_left(tmp_path: Path) -> None:
    folder = str(tmp_path / "shared")
    enter_folder(folder)
    enter_folder(folder)
    leave_folder(folder, os.getpid())
    remove_unused(folder)
    leave_folder(folder, os.getpid() + 1)  # a child, which did not enter
    assert Path(folder).exists()
    leave_folder(folder, os.getpid())
    gc.collect()
    assert not Path(folder).exists()
