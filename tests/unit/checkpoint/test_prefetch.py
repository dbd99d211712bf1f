"""A source that is read ahead: how far, how it ends, and what is left of its thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from shade.checkpoint._pacing.prefetch import Prefetch
from shade.errors import StoreUnavailableError


def test_a_source_is_read_ahead_but_not_further() -> None:
    read: list[int] = []
    reached = threading.Semaphore(0)

    def source() -> Iterator[int]:
        for number in range(100):
            read.append(number)
            reached.release()
            yield number

    with Prefetch(source(), 3) as items:
        for _ in range(4):  # three wait, one is in hand
            assert reached.acquire(timeout=10)
        assert not reached.acquire(timeout=0.3)
        assert next(items) == 0
        assert reached.acquire(timeout=10)
        assert list(items) == list(range(1, 100))


def test_what_ends_the_source_ends_the_reader() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise StoreUnavailableError("gone")

    with Prefetch(source(), 3) as items:
        assert next(items) == 1
        with pytest.raises(StoreUnavailableError, match="gone"):
            next(items)


def test_a_reader_that_leaves_ends_the_thread() -> None:
    before = threading.active_count()
    with contextlib.suppress(KeyError), Prefetch(iter(range(10**9)), 2) as items:
        next(items)
        raise KeyError
    assert threading.active_count() == before
