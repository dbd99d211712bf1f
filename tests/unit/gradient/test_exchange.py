"""An exchange of one rank, and how a failure is told. What ranks do together is in tests/integration."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from shade.errors import ConfigError, PeerLostError
from shade.gradient._comm.transport import Transport


def test_alone_everything_comes_back() -> None:
    exchange = Transport()
    assert (exchange.rank, exchange.world_size, exchange.ranks) == (0, 1, (0,))
    words_N = np.arange(3, dtype=np.int64)
    gathered_WN = exchange.gather_words(words_N)
    words_N[0] = 9
    assert gathered_WN.tolist() == [[0, 1, 2]]
    payload = np.arange(5, dtype=np.uint8)
    assert [each.tolist() for each in exchange.gather_bytes(payload, [5])] == [[0, 1, 2, 3, 4]]
    assert [len(each) for each in exchange.gather_bytes(payload[:0], [0])] == [0]
    assert exchange.gather_messages({"a": [1]}) == [{"a": [1]}]
    tensor = torch.ones(4)
    exchange.broadcast(tensor)
    exchange.add(tensor)
    assert exchange.add_parts(tensor).tolist() == [1.0] * 4
    assert (exchange.bytes_sent, exchange.bytes_received) == (0, 0)
    exchange.close()
    exchange.close()


def test_a_failure_is_told_now_and_from_now_on() -> None:
    exchange = Transport(timeout_seconds=7, generation=3)

    def fail() -> None:
        raise RuntimeError("[pair.cc:545] Connection closed by peer. This is typically caused by a remote worker")

    for call in (fail, lambda: None):
        with pytest.raises(
            PeerLostError, match=r"generation 3 .* within 7 s, .*: Connection closed by peer; see"
        ) as told:
            exchange._run(call)
    assert told.value.__cause__ is None  # the second time nothing was tried


def test_a_timeout_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="timeout_seconds > 0"):
        Transport(timeout_seconds=0)


def test_time_under_way_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    exchange = Transport()

    def pass_time(seconds: float) -> None:
        clock[0] += seconds

    exchange._run(lambda: pass_time(1.0))
    pass_time(10.0)
    begun = clock[0]  # two at once; the second goes on for 2 s more, of which 1 s was spent with something else
    exchange._run(lambda: pass_time(3.0), begun)
    pass_time(1.0)
    exchange._run(lambda: pass_time(1.0), begun)
    assert exchange.seconds == pytest.approx(1 + 3 + 2)
