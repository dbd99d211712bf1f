"""A transport of one rank, and how it reports failures. Collectives of several ranks are in tests/integration."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shade.errors import ConfigError, PeerLostError
from shade.gradient._comm.transport import Transport


def test_alone_everything_comes_back() -> None:
    transport = Transport()
    assert (transport.rank, transport.world_size, transport.ranks) == (0, 1, (0,))
    fields_N = np.arange(3, dtype=np.int64)
    gathered_WN = transport.gather_fields(fields_N)
    fields_N[0] = 9
    assert gathered_WN.tolist() == [[0, 1, 2]]
    payload = np.arange(5, dtype=np.uint8)
    assert [each.tolist() for each in transport.gather_bytes(payload, [5])] == [[0, 1, 2, 3, 4]]
    assert [len(each) for each in transport.gather_bytes(payload[:0], [0])] == [0]
    assert transport.gather_messages({"a": [1]}) == [{"a": [1]}]
    tensor = torch.ones(4)
    transport.broadcast(tensor)
    transport.add(tensor)
    assert transport.add_parts(tensor).tolist() == [1.0] * 4
    assert (transport.bytes_sent, transport.bytes_received) == (0, 0)
    transport.close()
    transport.close()


def test_every_call_after_a_failure_raises_it_again() -> None:
    transport = Transport(timeout_seconds=7, generation=3)

    def fail() -> None:
        raise RuntimeError("[pair.cc:545] Connection closed by peer. This is typically caused by a remote worker")

    for call in (fail, lambda: None):
        with pytest.raises(
            PeerLostError, match=r"generation 3 .* within 7 s, .*: Connection closed by peer; see"
        ) as caught:
            transport._run(call)
    assert caught.value.__cause__ is None  # the second call fails without an attempt


def test_a_timeout_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="timeout_seconds > 0"):
        Transport(timeout_seconds=0)


def test_time_under_way_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    transport = Transport()

    def pass_time(seconds: float) -> None:
        clock[0] += seconds

    transport._run(lambda: pass_time(1.0))
    pass_time(10.0)
    begun = clock[0]  # two at once; the second takes 2 s more, of which 1 s was spent elsewhere
    transport._run(lambda: pass_time(3.0), begun)
    pass_time(1.0)
    transport._run(lambda: pass_time(1.0), begun)
    assert transport.seconds == pytest.approx(1 + 3 + 2)


def test_a_rank_does_not_train_alone_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Transport()
    assert alone.gather_fields(np.array([7])).tolist() == [[7]]
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"the 2 ranks of this job to be connected.*init_process_group\(\) before"):
        alone.gather_fields(np.array([7]))
    monkeypatch.undo()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"the 2 ranks of this job to be connected"):
        Transport()
