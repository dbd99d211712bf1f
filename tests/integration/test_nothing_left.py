"""What talks to other ranks leaves no process group, no descriptor and no thread behind once it is closed.

Each case makes, uses and closes its objects on two ranks, once to warm up and then ten times. Starting ranks takes
seconds, so one pair of them plays all cases, one after the other.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import ToTensor

from shade import Checkpointer, ShadeDataset, ShadeLoader, ShadeSampler
from shade.checkpoint import StateDictCheckpointer
from shade.data import MixtureSampler, PackedDataset
from shade.data._sampler import sampler as sampler_module
from shade.gradient import (
    DiLoCo,
    ElasticEngine,
    GradientEngine,
    LocalSGD,
    LocalUpdates,
    Membership,
    SparseState,
    sparse_hook,
)
from shade.gradient._elastic.rendezvous import serve
from shade.gradient.optim import SparseSGD
from shade.importance import ImportanceTable, ScoreMerger
from shade.rank_group import agreed_name, current_group
from shade.store._servers.server import LocalServer
from tests.support.data_plane import make_pictures
from tests.support.gradient_ranks import loss_of, network, play
from tests.support.shards import make_items, open_shards, write_shards

pytestmark = [pytest.mark.multiprocess, pytest.mark.redis]

RANKS, ROUNDS, BATCH = 2, 10, 4
STORE = "TEST_NOTHING_LEFT_STORE"
FOLDER = "TEST_NOTHING_LEFT_FOLDER"
Case = Callable[[int, int], None]


def groups_descriptors_threads() -> list[int]:
    groups = dist.distributed_c10d._world.pg_map
    return [len(groups), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))]


def settled(expected: list[int] | None = None) -> list[int]:
    """Returns the counts once they are as expected, or, in want of that, the same for a while: a thread that was joined
    is gone from the kernel's list a moment later."""
    deadline, same, last = time.monotonic() + 5, 0, groups_descriptors_threads()
    while last != expected and same < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
        now = groups_descriptors_threads()
        same, last = same + 1 if now == last else 0, now
    return last


def numbers() -> TensorDataset:
    return TensorDataset(torch.arange(64.0).view(64, 1))


def train_data(dataset: Any, **settings: Any) -> None:
    """Takes one epoch from a sampler, with a report for each batch."""
    sampler = ShadeSampler(dataset, batch_size=BATCH, seed=0, **settings)
    for part in torch.tensor(list(sampler)).split(BATCH):
        sampler.report(part, torch.ones(len(part)))
    sampler.state_dict()
    sampler.close()


# ── one round of each case ──────────────────────────────────────────────────────────────────────────────────────────


def rank_group(rank: int, world_size: int) -> None:
    group = current_group("a test")
    assert len(agreed_name(group)) == 16
    group.close()


def sampler(rank: int, world_size: int) -> None:
    train_data(numbers())


def sampler_with_a_cache(rank: int, world_size: int) -> None:
    with contextlib.closing(ShadeDataset(numbers(), "memory://")) as dataset:
        train_data(dataset)


def sampler_with_a_shared_cache(rank: int, world_size: int) -> None:
    with contextlib.closing(ShadeDataset(numbers(), os.environ[STORE], version="1")) as dataset:
        train_data(dataset)


def sampler_with_two_caches(rank: int, world_size: int) -> None:
    disk = f"{os.environ[FOLDER]}/disk?capacity=1MiB"
    with contextlib.closing(ShadeDataset(numbers(), "memory://", disk=disk, version="1")) as dataset:
        train_data(dataset)


def sampler_with_a_window(rank: int, world_size: int) -> None:
    shards = open_shards(sorted(Path(os.environ[FOLDER], "shards").iterdir()))
    train_data(shards, mode="uniform", shuffle_window=20)
    shards.close()


def sampler_with_shared_draws(rank: int, world_size: int) -> None:
    with mock.patch.object(sampler_module, "is_large", return_value=True):
        train_data(numbers())


def chosen_format(rank: int, world_size: int) -> None:
    pictures = ImageFolder(f"{os.environ[FOLDER]}/pictures")
    ShadeDataset(pictures, "memory://", form="auto").close()


def score_merger(rank: int, world_size: int) -> None:
    with ScoreMerger(ImportanceTable(10), batch_size=2) as merger:
        merger.report(torch.tensor([rank]), torch.ones(1))
        merger.flush()


def score_merger_of_a_group(rank: int, world_size: int) -> None:
    with ScoreMerger(ImportanceTable(10), batch_size=2, group=dist.group.WORLD) as merger:
        merger.report(torch.tensor([rank]), torch.ones(1))
        merger.flush()


def mixture(rank: int, world_size: int) -> None:
    documents = [np.arange(9), np.arange(5), np.arange(7)]
    dataset = PackedDataset({"a": documents, "b": documents}, length=8)
    sampler = MixtureSampler(dataset, weights={"a": 1, "b": 2}, batch_size=2, round_sequences=8, adapt=1.0)
    list(sampler)
    sampler.report(torch.zeros(2, 8, dtype=torch.int64), torch.ones(2, 8))
    sampler.state_dict()
    sampler.close()


def loader(rank: int, world_size: int) -> None:
    pictures = ImageFolder(f"{os.environ[FOLDER]}/pictures")
    with contextlib.closing(ShadeDataset(pictures, os.environ[STORE], transform=ToTensor())) as dataset:
        sampler = ShadeSampler(dataset, batch_size=BATCH, seed=0)
        for _, _, indices in ShadeLoader(dataset, batch_size=BATCH, sampler=sampler, num_workers=0):
            sampler.report(indices, torch.ones(len(indices)))
        sampler.close()


def checkpointer(rank: int, world_size: int, **settings: Any) -> None:
    with Checkpointer(run="left", persist_to=f"{os.environ[FOLDER]}/snapshots", every=1, **settings) as checkpointer:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        checkpointer.attach(model=model)
        checkpointer.restore_latest()
        for _ in range(2):
            checkpointer.step()
        checkpointer.wait_committed()


def checkpointer_of_two_saves(rank: int, world_size: int) -> None:
    checkpointer(rank, world_size, in_flight=2, buffers=3)


def checkpointer_in_memory(rank: int, world_size: int) -> None:
    checkpointer(rank, world_size, store=os.environ[STORE])


def checkpointer_of_a_state(rank: int, world_size: int) -> None:
    with StateDictCheckpointer(run="state", persist_to=f"{os.environ[FOLDER]}/states") as checkpointer:
        checkpointer.save_state({"model": {"weight": torch.ones(4)}}, 1)


def engine(rank: int, world_size: int, **settings: Any) -> None:
    model = network()
    with GradientEngine(model, SparseSGD(model.parameters(), lr=0.1), timeout_seconds=30, **settings) as engine:
        for step in range(2):
            loss_of(model, rank, step).backward()
            engine.step()
        engine.finish()


def engine_with_staleness(rank: int, world_size: int) -> None:
    engine(rank, world_size, staleness=1)


def engine_of_nodes(rank: int, world_size: int) -> None:
    engine(rank, world_size, local_size=2)


def engine_of_a_group(rank: int, world_size: int) -> None:
    engine(rank, world_size, group=dist.group.WORLD)


def hook(rank: int, world_size: int) -> None:
    model = network()
    state = SparseState(model, timeout_seconds=30)
    replica = nn.parallel.DistributedDataParallel(model)
    replica.register_comm_hook(state, sparse_hook)
    loss_of(replica, rank, 0).backward()
    state.close()


def local_sgd(rank: int, world_size: int) -> None:
    with LocalSGD(network(), every=1, timeout_seconds=30) as outer:
        outer.step()


def diloco(rank: int, world_size: int) -> None:
    with DiLoCo(network(), every=1, timeout_seconds=30) as outer:
        outer.step()


def local_updates(rank: int, world_size: int) -> None:
    with LocalUpdates(network(), every=2, fragments=2, delay=1, timeout_seconds=30) as outer:
        for _ in range(4):
            outer.step()


def elastic_engine(rank: int, world_size: int) -> None:
    group = current_group("the rendezvous")
    server = serve(host="127.0.0.1") if rank == 0 else None
    port = group.share(None if server is None else server.port)
    model = network()
    membership = Membership(f"127.0.0.1:{port}", world_size, timeout_seconds=30)
    with ElasticEngine(model, SparseSGD(model.parameters(), lr=0.1), membership) as engine:
        loss_of(model, rank, 0).backward()
        engine.step()
    group.gather(None)
    group.close()


CASES: list[Case] = [
    *(rank_group, sampler, sampler_with_a_cache, sampler_with_a_shared_cache, sampler_with_two_caches),
    *(sampler_with_a_window, sampler_with_shared_draws, chosen_format, score_merger, score_merger_of_a_group),
    *(mixture, loader, checkpointer, checkpointer_of_two_saves, checkpointer_in_memory, checkpointer_of_a_state),
    *(engine, engine_with_staleness, engine_of_nodes, engine_of_a_group, hook, local_sgd, diloco, local_updates),
    elastic_engine,
]


# ── what ten rounds leave ───────────────────────────────────────────────────────────────────────────────────────────


def story(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for case in CASES:
        try:
            case(rank, world_size)
            before = settled()
            for _ in range(ROUNDS):
                case(rank, world_size)
            found[case.__name__] = [before, settled(before)]
        except Exception:  # noqa: BLE001 - the test that reads the outcome shows it
            found[case.__name__] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("left")
    write_shards(folder / "shards", "tar", make_items(64))
    make_pictures(folder / "pictures", 12)
    with LocalServer() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv(STORE, f"unix://{server.socket_path}")
        patch.setenv(FOLDER, str(folder))
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield [each["story"] for each in play([story], RANKS, folder)]


@pytest.mark.parametrize("case", CASES, ids=[case.__name__ for case in CASES])
def test_ten_rounds_leave_no_group_descriptor_or_thread(counted: list[dict[str, Any]], case: Case) -> None:
    for rank in counted:
        assert not isinstance(rank[case.__name__], str), rank[case.__name__]
        before, after = rank[case.__name__]
        assert after == before
