"""The merger with one rank: same table as direct updates, private copies, nothing left behind."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from shade.errors import ConfigError, ShadeError
from shade.importance import ImportanceTable, ScoreMerger

N, B = 500, 16


def batches(count: int, dtype: torch.dtype = torch.float32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randint(0, N, (B,), generator=generator), torch.rand(B, generator=generator).to(dtype))
        for _ in range(count)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("count", [1, 31, 32, 33, 100])
def test_table_is_that_of_direct_updates(dtype: torch.dtype, count: int) -> None:
    direct, merged = ImportanceTable(N), ImportanceTable(N)
    with ScoreMerger(merged, batch_size=B) as merger:
        for index_B, loss_B in batches(count, dtype):
            direct.update(index_B.numpy(), loss_B.to(torch.float32).numpy())
            merger.report(index_B, loss_B)
        merger.flush()
        assert merged.score_N.tobytes() == direct.score_N.tobytes()
        assert merged.seen_N.tobytes() == direct.seen_N.tobytes()


def test_report_copies_and_needs_no_detach() -> None:
    table = ImportanceTable(N)
    with ScoreMerger(table, batch_size=B) as merger:
        index_B, loss_B = torch.arange(3), torch.ones(3, requires_grad=True) * 2
        merger.report(index_B, loss_B)
        loss_B.sum().backward()
        with torch.no_grad():
            loss_B.mul_(100)
        index_B.add_(7)
        merger.flush()
    np.testing.assert_array_equal(np.flatnonzero(table.seen_N), [0, 1, 2])
    np.testing.assert_array_equal(table.score_N[:3], [2, 2, 2])


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64])
def test_other_integers_are_taken(dtype: torch.dtype) -> None:
    table = ImportanceTable(N)
    with ScoreMerger(table, batch_size=B) as merger:
        merger.report(torch.tensor([200], dtype=dtype), torch.tensor([1.5]))
        merger.flush()
    assert table.score_N[200] == 1.5


def test_strided_and_empty_reports() -> None:
    table = ImportanceTable(N)
    with ScoreMerger(table, batch_size=B) as merger:
        merger.report(torch.arange(20)[::2], torch.arange(20.0)[1::2])
        merger.report(torch.empty(0, dtype=torch.int64), torch.empty(0))
        merger.flush()
    np.testing.assert_array_equal(table.score_N[[0, 2, 18]], [1, 3, 19])
    assert table.seen_N.sum() == 10


@pytest.mark.parametrize(
    ("index_B", "loss_B"),
    [
        (torch.arange(4), torch.ones(3)),
        (torch.arange(4), torch.tensor(1.0)),
        (torch.arange(4)[None], torch.ones(4)[None]),
        (torch.arange(B + 1), torch.ones(B + 1)),
        (torch.arange(4.0), torch.ones(4)),
    ],
)
def test_wrong_reports_are_refused_at_once(index_B: torch.Tensor, loss_B: torch.Tensor) -> None:
    with ScoreMerger(ImportanceTable(N), batch_size=B) as merger, pytest.raises(ConfigError):
        merger.report(index_B, loss_B)


def test_wrong_index_surfaces_by_the_flush() -> None:
    with ScoreMerger(ImportanceTable(N), batch_size=B) as merger:
        merger.report(torch.tensor([N]), torch.ones(1))
        with pytest.raises(ShadeError, match=str(N)):
            merger.flush()


def test_batch_size_is_checked() -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        ScoreMerger(ImportanceTable(N), batch_size=0)


def test_one_rank_on_the_cpu_has_no_thread() -> None:
    before = set(threading.enumerate())
    with ScoreMerger(ImportanceTable(N), batch_size=B) as merger:
        for batch in batches(40):
            merger.report(*batch)
        merger.flush()
        assert set(threading.enumerate()) == before


def test_closed_merger_refuses_and_closes_twice() -> None:
    merger = ScoreMerger(ImportanceTable(N), batch_size=B)
    merger.report(torch.tensor([3]), torch.ones(1))
    merger.close()
    merger.close()
    assert merger.table.seen_N[3]  # what was reported before is not lost
    for use in (lambda: merger.report(torch.tensor([1]), torch.ones(1)), merger.flush):
        with pytest.raises(ShadeError, match="closed"):
            use()


def test_copies_keep_the_table_and_refuse_to_report() -> None:
    with ScoreMerger(ImportanceTable(N), batch_size=B) as merger:
        merger.report(torch.tensor([3]), torch.ones(1))
        merger.flush()
        for twin in (pickle.loads(pickle.dumps(merger)), copy.deepcopy(merger)):
            assert twin.table.seen_N[3]
            with pytest.raises(ShadeError, match="another process"):
                twin.report(torch.tensor([1]), torch.ones(1))
            twin.close()


class _Squares(Dataset[int]):
    """Holds a merger, as a data set that holds a sampler does."""

    def __init__(self, merger: ScoreMerger) -> None:
        self.merger = merger

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        try:
            self.merger.flush()
        except ShadeError:
            return index * index  # a worker is refused, as it should be
        return -1


@pytest.mark.multiprocess
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes_are_refused_and_do_no_harm(method: str) -> None:
    with ScoreMerger(ImportanceTable(N), batch_size=B) as merger:
        merger.report(torch.tensor([3]), torch.ones(1))
        loader = DataLoader(
            _Squares(merger), num_workers=1, multiprocessing_context=multiprocessing.get_context(method), batch_size=20
        )
        assert next(iter(loader)).tolist() == [i * i for i in range(20)]
        merger.flush()
        assert merger.table.seen_N[3]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_tensors_are_taken_without_a_synchronisation() -> None:
    table, direct = ImportanceTable(N), ImportanceTable(N)
    with ScoreMerger(table, batch_size=B) as merger:
        merger.report(*batches(1)[0])  # on the CPU first: order is kept
        direct.update(*(t.numpy() for t in batches(1)[0]))
        merger.report(torch.zeros(1, dtype=torch.int64, device="cuda"), torch.ones(1, device="cuda"))
        direct.update(np.zeros(1, dtype=np.int64), np.ones(1, dtype=np.float32))
        device_batches = [(index_B.cuda(), loss_B.cuda()) for index_B, loss_B in batches(50, torch.float16)]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for index_B, loss_B in device_batches:
                merger.report(index_B, loss_B)
                loss_B.zero_()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        merger.flush()
    for index_B, loss_B in batches(50, torch.float16):
        direct.update(index_B.numpy(), loss_B.float().numpy())
    assert table.score_N.tobytes() == direct.score_N.tobytes()
