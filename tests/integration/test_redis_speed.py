"""The hot path against the fastest loops one can write with redis-py and hiredis, side by side on one server."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable

import pytest
import redis

from shade.store import SampleKeys, open_store
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
