"""Score feedback between real processes: every rank ends with the table one rank would have.

Starting a process that imports torch takes seconds, so each number of ranks is started once and plays all its stories.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, TensorDataset

from shade.errors import ShadeError
from shade.importance import ImportanceTable, ScoreMerger
from shade.sampling import PadsMode, UniformMode, num_steps, rank_slice

pytestmark = pytest.mark.multiprocess

N, G, EPOCHS = 1003, 24, 3
"""1003 = 41 × 24 + 19: the tail is 5, 5, 5 and 4 for four ranks."""
SCENARIOS = [("loss", torch.float32), ("loss", torch.float16), ("rank", torch.float16), ("grad-norm", torch.bfloat16)]


def true_loss() -> np.ndarray:
    return np.random.default_rng(0).lognormal(0.0, 1.0, N).astype(np.float32)


def losses_of(index_B: torch.Tensor, epoch: int, dtype: torch.dtype) -> torch.Tensor:
    """True losses with 2 % of noise that depends on sample and epoch only."""
    noise_N = np.random.default_rng(100 + epoch).normal(1.0, 0.02, N).astype(np.float32)
    return torch.from_numpy(true_loss() * noise_N)[index_B].to(dtype)


def orders() -> list[np.ndarray]:
    """Epochs without and with duplicates (within a global batch, and across ranks)."""
    epochs = [UniformMode(N, G, 5).draw(epoch, None) for epoch in range(EPOCHS)]
    return [draw.order_K.astype(np.int64) for draw in (*epochs, PadsMode(N, G, 5).draw(EPOCHS, None))]


def digest(table: ImportanceTable) -> str:
    content = table.score_N.tobytes() + table.seen_N.tobytes() + str(table.num_ignored).encode()
    return hashlib.sha256(content).hexdigest()


def train(rank: int, world_size: int, score: str, dtype: torch.dtype) -> ImportanceTable:
    """One rank's training loop, with collectives of the trainer's own going on beside the merger's."""
    table = ImportanceTable(N, score)
    with ScoreMerger(table, batch_size=G // world_size) as merger:
        for epoch, order_K in enumerate(orders()):
            for step in range(num_steps(N, G)):
                mine = rank_slice(step, rank, num_drawn=N, global_batch=G, world_size=world_size)
                index_B = torch.from_numpy(order_K[np.arange(mine.start, mine.stop)])
                loss_B = losses_of(index_B, epoch, dtype).requires_grad_()
                if step == 3:
                    loss_B = torch.where(index_B % 7 == 0, float("nan"), loss_B)
                merger.report(index_B, loss_B)
                if world_size > 1 and step % 10 == 0:
                    gradient = torch.full((1000,), float(rank))
                    dist.all_reduce(gradient)
                    assert gradient[0] == world_size * (world_size - 1) / 2
            merger.flush()
    return table


def reference(score: str, dtype: torch.dtype) -> ImportanceTable:
    """The same global batches applied to a table directly, no merger in sight."""
    table = ImportanceTable(N, score)
    for epoch, order_K in enumerate(orders()):
        for step in range(num_steps(N, G)):
            index_B = torch.from_numpy(order_K[step * G : (step + 1) * G])
            loss_B = losses_of(index_B, epoch, dtype).float()
            if step == 3:
                loss_B[index_B % 7 == 0] = float("nan")
            table.update(index_B.numpy(), loss_B.numpy())
    return table


Story = Callable[[int, int], Any]


def _enter(rank: int, world_size: int, folder: str, stories: list[Story]) -> None:
    """A process: joins the others, plays its part, writes down how it went."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    outcomes = {story.__name__: story(rank, world_size) for story in stories}
    outcomes["threads left"] = [thread.name for thread in threading.enumerate() if thread.name.startswith("shade")]
    Path(folder, f"{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


def play(stories: list[Story], world_size: int, folder: Path) -> list[Any]:
    """Runs stories on real ranks, one after another, and returns what each rank wrote down."""
    mp.spawn(_enter, args=(world_size, str(folder), stories), nprocs=world_size)
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world_size)]


def spearman(first_N: np.ndarray, second_N: np.ndarray) -> float:
    """Rank correlation; ties are too few to matter."""
    ranks = [np.argsort(np.argsort(values_N)) for values_N in (first_N, second_N)]
    return float(np.corrcoef(*ranks)[0, 1])


def story_of_training(rank: int, world_size: int) -> list[Any]:
    """Per scenario: digest, correlation with the truth, samples seen, reports ignored."""
    tables = [train(rank, world_size, score, dtype) for score, dtype in SCENARIOS]
    return [[digest(t), spearman(t.score_N, true_loss()), int(t.seen_N.sum()), t.num_ignored] for t in tables]


def story_of_large_indices(rank: int, world_size: int) -> list[float]:
    """float32 cannot tell 2**24 + 1 from 2**24, nor float16 100 003 from infinity."""
    table = ImportanceTable(2**24 + 10)
    with ScoreMerger(table, batch_size=3) as merger:
        base = [2**24, 100_002][rank]
        merger.report(torch.tensor([base + 1, base]), torch.tensor([rank + 1.5, rank + 1.0], dtype=torch.float16))
        merger.flush()
    return [float(table.score_N[i]) for i in (2**24, 2**24 + 1, 100_002, 100_003)] + [int(table.seen_N.sum())]


def story_of_a_wrong_index(rank: int, world_size: int) -> list[str]:
    outcome = []
    table = ImportanceTable(10)
    with ScoreMerger(table, batch_size=4) as merger:
        merger.report(torch.tensor([rank]), torch.ones(1))
        merger.report(torch.tensor([99 if rank == 1 else 5]), torch.ones(1))
        for use in (merger.flush, lambda: merger.report(torch.tensor([7]), torch.ones(1))):
            try:
                use()
                outcome.append("nothing raised")
            except ShadeError as error:
                outcome.append(str(error))
    return [*outcome, digest(table)]


def story_of_forked_workers(rank: int, world_size: int) -> list[Any]:
    """Workers fork while the merger's thread runs; both go on."""
    table = ImportanceTable(40)
    data = TensorDataset(torch.arange(40))
    with ScoreMerger(table, batch_size=4) as merger:
        merger.report(torch.tensor([39]), torch.tensor([9.0]))
        loader = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="fork")
        for step, (index_B,) in enumerate(loader):
            if step % 2 == rank:
                merger.report(index_B, index_B.float())
        merger.flush()
    return [digest(table), int(table.seen_N.sum())]


def story_of_a_subgroup(rank: int, world_size: int) -> list[float]:
    """Ranks 0 and 1 train together; the others do something else and are not asked."""
    pair = dist.new_group([0, 1])
    if rank > 1:
        return []
    table = ImportanceTable(10)
    with ScoreMerger(table, batch_size=2, group=pair) as merger:
        merger.report(torch.tensor([rank]), torch.tensor([rank + 1.0]))
        merger.flush()
    scores: list[float] = table.score_N[:3].tolist()
    return scores


STORIES: dict[int, list[Story]] = {
    1: [story_of_training],
    2: [story_of_training, story_of_large_indices, story_of_a_wrong_index, story_of_forked_workers],
    4: [story_of_training, story_of_a_subgroup],
}
FOUR = pytest.param(4, marks=pytest.mark.slow)  # four interpreters on a small machine: a dozen seconds


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What every rank wrote down, for the number of ranks asked for."""
    return play(STORIES[request.param], request.param, tmp_path_factory.mktemp("ranks"))


def told(ranks: list[Any], story: Story) -> list[Any]:
    """What the ranks say of one story."""
    return [outcomes[story.__name__] for outcomes in ranks]


@pytest.mark.parametrize("ranks", [1, 2, FOUR], indirect=True)
@pytest.mark.filterwarnings("ignore:report.. got a loss")
def test_tables_are_equal_on_all_ranks_and_to_one_rank(ranks: list[Any]) -> None:
    outcomes = told(ranks, story_of_training)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    for (score, dtype), (found, correlation, num_seen, num_ignored) in zip(SCENARIOS, outcomes[0], strict=True):
        assert found == digest(reference(score, dtype)), (score, dtype)
        assert num_seen == N
        assert num_ignored > 0
        if score != "rank":  # SHADE's rank within a batch is a noisier thing by design
            assert correlation >= 0.99, (score, dtype)


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_large_indices_arrive_unchanged(ranks: list[Any]) -> None:
    for outcome in told(ranks, story_of_large_indices):
        assert outcome == [1.0, 1.5, 2.0, 2.5, 4]


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_an_error_is_raised_on_all_ranks_and_stays(ranks: list[Any]) -> None:
    first, second = told(ranks, story_of_a_wrong_index)
    assert first == second
    assert "99" in first[0]
    assert "99" in first[1]
    table = ImportanceTable(10)
    table.update(np.array([0, 1]), np.ones(2, dtype=np.float32))
    assert first[2] == digest(table)  # what came before the error is there


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_forked_workers_do_no_harm(ranks: list[Any]) -> None:
    first, second = told(ranks, story_of_forked_workers)
    assert first == second
    assert first[1] == 40


@pytest.mark.parametrize("ranks", [FOUR], indirect=True)
def test_a_group_merges_among_its_own(ranks: list[Any]) -> None:
    assert told(ranks, story_of_a_subgroup) == [[1.0, 2.0, 0.0], [1.0, 2.0, 0.0], [], []]


@pytest.mark.parametrize("ranks", [1, 2, FOUR], indirect=True)
def test_no_thread_is_left(ranks: list[Any]) -> None:
    assert [outcomes["threads left"] for outcomes in ranks] == [[]] * len(ranks)


def _leave_or_stay(rank: int, folder: str) -> None:
    """Rank 1 dies between two steps; rank 0 must hear of it."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    merger = ScoreMerger(ImportanceTable(10), batch_size=4)
    merger.report(torch.tensor([rank]), torch.ones(1))
    merger.flush()
    if rank == 1:
        os._exit(0)
    merger.report(torch.tensor([5]), torch.ones(1))
    try:
        merger.flush()
    except ShadeError as error:
        Path(folder, "heard").write_text(str(error))
    merger.close()


def test_a_rank_that_dies_is_an_error_not_a_hang(tmp_path: Path) -> None:
    mp.spawn(_leave_or_stay, args=(str(tmp_path),), nprocs=2)
    assert "merging scores failed" in (tmp_path / "heard").read_text()
