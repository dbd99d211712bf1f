"""The hot path against the fastest loops one can write with redis-py and hiredis, side by side on one server."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable

import pytest
import redis
import torch

from shade import Checkpointer
from shade.checkpoint._buffer.shared_memory_folder import own_folder, own_records
from shade.store import SampleKeys, open_store
from shade.store._servers.local_cluster import free_ports
from shade.store._servers.server import LocalServer

pytestmark = pytest.mark.multiprocess


@pytest.mark.slow
def test_a_batch_costs_no_more_than_bare_redis_py() -> None:
    """64 × 100 KB over a unix socket; rounds interleaved, the best of each compared, which noise only raises."""
    names = SampleKeys("speed").many(range(64))
    with LocalServer() as server, open_store(server.url) as store:
        bare = redis.Redis(unix_socket_path=server.socket_path, protocol=2)
        store.set_many({name: os.urandom(100_000) for name in names})

        def pipelined() -> list[bytes]:
            pipe = bare.pipeline(transaction=False)
            for name in names:
                pipe.get(name)
            return list(pipe.execute())

        ways: dict[str, Callable[[], list[bytes | None]]] = {
            "store": lambda: store.get_many(names),
            "mget": lambda: list(bare.mget(names)),
            "pipeline": pipelined,
        }
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(100):
            for way in random.sample(list(ways), len(ways)):
                begin = time.perf_counter()
                ways[way]()
                best[way] = min(best[way], time.perf_counter() - begin)
        bare.close()
    assert best["store"] <= 1.05 * min(best["mget"], best["pipeline"]), best


@pytest.mark.parametrize("by", ["unix", "TCP"])
def test_a_save_copies_nothing_into_a_unix_socket(by: str, run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    kept: list[int] = []
    sendfile = os.sendfile

    def watched(*words: int) -> int:
        sent.append(sendfile(*words))
        return sent[-1]

    monkeypatch.setattr(os, "sendfile", watched)
    (port,) = free_ports(1)
    with LocalServer(settings={"port": str(port)}) as server:
        url = server.url.reveal() if by == "unix" else f"redis://127.0.0.1:{port}"
        model, other = torch.nn.Linear(1500, 1501), torch.nn.Linear(1500, 1501)  # two chunks and a bit
        with Checkpointer(url, run=run, every="never") as saving:
            saving.attach(model=model)
            for _ in range(3):  # each buffer more than once
                saving.step()
                with torch.no_grad():
                    model.weight.add_(1)
                saving.save()
                saving.wait_committed()
                (folder,) = own_folder(run).iterdir()
                kept.append(max(held.num_bytes for held in own_records(folder, run).values()))
        assert min(kept) > 4 * 1500 * 1501
        assert sum(sent) == (sum(kept) if by == "unix" else 0)
        shutil.rmtree(own_folder(run), ignore_errors=True)
        with Checkpointer(url, run=run, every="never") as restoring:
            restoring.attach(model=other)
            assert restoring.restore_latest().tiers == ("cluster memory",)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
