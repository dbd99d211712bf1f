"""A store that is silent when a job starts is asked again; one that is absent is refused at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest
from typing_extensions import override

from shade.errors import StoreTimeoutError, StoreUnavailableError
from shade.store import base
from shade.store.memory import MemoryStore
from shade.store.url import StoreURL


class Answering(MemoryStore):
    """Fails some times with an error, and answers then."""

    def __init__(self, failures: Iterable[StoreUnavailableError]) -> None:
        super().__init__(StoreURL.parse("memory://"), timeout_seconds=1)
        self.failures, self.num_pings = iter(failures), 0

    @override
    def ping(self) -> None:
        self.num_pings += 1
        for failure in self.failures:
            raise failure


def test_a_silent_server_is_asked_until_it_answers() -> None:
    store = Answering([StoreTimeoutError("silent")] * 3)
    store.wait_ready()
    assert store.num_pings == 4


def test_a_server_that_stays_silent_is_named_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "READY_SECONDS", 0.05)
    store = Answering(itertools.repeat(StoreTimeoutError("silent")))
    with pytest.raises(StoreTimeoutError, match="silent"):
        store.wait_ready()
    assert store.num_pings > 1


def test_an_absent_server_is_named_at_once() -> None:
    store = Answering([StoreUnavailableError("connection refused")])
    with pytest.raises(StoreUnavailableError, match="refused"):
        store.wait_ready()
    assert store.num_pings == 1
