"""Recorder: the thread that reads a stream and appends its items to a recording.

It begins where the recording ends. A stream that has a ``state_dict`` is set to a state from before that end, any other
is read from its beginning; what it yields up to the end is compared with what is recorded.

Invariant: item n of the recording is item n of the stream, in however many processes it was recorded, or the stream is
refused.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

import xxhash

from shade.data._recorded.recording import Mark, Recording
from shade.data._source import item_codec, item_columns
from shade.errors import ConfigError, DataError, ShadeError

_AHEAD_BYTES: Final = 64 << 20
"""The recorder reads so far beyond what somebody has asked for."""
_SEAL_BYTES, _SEAL_SECONDS = 64 << 20, 10.0
_GROUP_BYTES, _GROUP_ITEMS, _GROUP_SECONDS = 1 << 20, 64, 0.05
"""Items are written together, where they come so fast and are so small."""
_COMPARED: Final = 16
"""Items before the end of the recording that a stream has to repeat when it was set to a state."""
_IDLE_SECONDS: Final = 0.002
_END_SECONDS = _FORK_SECONDS = 5.0
logger = logging.getLogger("shade.data")


class _ForkGate:
    """Keeps a fork from copying locks of a stream's libraries as its next item holds them."""

    def __init__(self) -> None:
        # A recorder's thread forks too, if its stream is a DataLoader with workers.
        self._lock, self._num_waiting = threading.RLock(), 0
        self._mine = threading.local()
        os.register_at_fork(before=self._close, after_in_parent=self._open, after_in_child=self._renew)

    def _close(self) -> None:
        self._num_waiting += 1
        # Not for ever: the item may wait for what is being forked.
        self._mine.is_held = self._lock.acquire(timeout=_FORK_SECONDS)

    def _open(self) -> None:
        self._num_waiting -= 1
        if self._mine.is_held:
            self._lock.release()

    def _renew(self) -> None:
        self._lock, self._num_waiting = threading.RLock(), 0

    def __enter__(self) -> None:
        while self._num_waiting:  # the lock alone would go back to the recorder's thread each time
            time.sleep(_IDLE_SECONDS)
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


_forks = _ForkGate()


class _StoppedError(Exception):
    """The recorder was closed while it compared."""


class Recorder:
    """Records a stream in a thread, until `close`, the stream's end or an error. The recording is locked by the caller.

    Args:
        source: The stream, or a function that returns it.
        name: The name of its code.
        recording: Where to.
    """

    def __init__(self, source: Any, name: str | None, recording: Recording) -> None:
        self._source, self._name, self._recording = source, name, recording
        self._stream: Any = None
        self._stopped, self._sealed = threading.Event(), time.monotonic()
        self.error: BaseException | None = None
        """What ended it, if it is neither `close` nor the stream's end."""
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="shade-recorder", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Returns whether it records in this process."""
        return self._process == os.getpid() and self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread, after the item that it waits for. Safe to call twice."""
        self._stopped.set()
        if self._process == os.getpid() and self._thread is not threading.current_thread():
            self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        try:
            self._record()
        except _StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 - it is raised where somebody waits for an item
            self.error = error
        finally:
            self._stream = None
            self._recording.unlock()

    def _record(self) -> None:
        recording = self._recording
        recording.wanted = 0  # who waits asks again
        self._mark = recording.cut()
        if self._mark.is_complete:
            return
        count = recording.count
        if not count:
            self._seal(0, is_complete=False)
        items = self._continued(count)
        group: list[Any] = []
        begun, limit, has_ended = time.monotonic(), 1, False
        while not has_ended and not self._stopped.is_set():
            used = recording.wanted
            if not group and used <= count and recording.num_bytes(count) - recording.num_bytes(used) >= _AHEAD_BYTES:
                self._stopped.wait(_IDLE_SECONDS)
                continue
            with _forks:
                try:
                    group.append(next(items))
                except StopIteration:
                    has_ended = True
                num_new, now = len(group), time.monotonic()
                is_due = num_new >= limit or now - begun > _GROUP_SECONDS or count < recording.wanted <= count + num_new
                if has_ended or is_due:
                    payloads = encoded(group, count)
                    recording.append(count, payloads)
                    count, group, begun = count + num_new, [], now
                    mean_bytes = sum(map(len, payloads)) / max(1, num_new)
                    limit = max(1, min(_GROUP_ITEMS, int(_GROUP_BYTES / max(1.0, mean_bytes))))
            is_far = recording.num_bytes(count) - recording.num_bytes(self._mark.count) >= _SEAL_BYTES
            if not group and not has_ended and (is_far or now - self._sealed > _SEAL_SECONDS):
                self._seal(count, is_complete=False)
        if group:
            recording.append(count, encoded(group, count))
        self._seal(count + len(group), is_complete=has_ended)

    def _seal(self, count: int, *, is_complete: bool) -> None:
        states = self._mark.states
        if self._stream is not None and not is_complete and (not states or count - states[-1][0] >= _COMPARED):
            with suppress(Exception), _forks:
                # A state that cannot be encoded is none.
                state = self._stream.state_dict()
                item_codec.encode(state)
                states = [*states[-1:], (count, state)]
        self._mark = Mark(count, self._name, [] if is_complete else states, is_complete)
        self._recording.seal(self._mark)
        self._sealed = time.monotonic()

    # ── where the recording ends ────────────────────────────────────────────────────────────────────────────────────

    def _continued(self, count: int) -> Iterator[Any]:
        """Returns the items of the stream behind the first ``count``, which it has to repeat in part or whole."""
        initial: Any = None
        for number, state in reversed(self._mark.states):
            if count - number < _COMPARED:
                continue
            stream = self._new_stream()
            if not hasattr(stream, "load_state_dict"):
                break
            initial = initial or stream.state_dict()
            stream.load_state_dict(state)
            items = iter(stream)
            different = self._first_difference(items, number, count)
            if different is None:
                logger.info("the stream continues at item %d by its own state_dict", count)
                return items
            logger.warning(
                "the stream's state_dict of item %d does not bring back item %d: the stream is read from its beginning",
                *(number, different),
            )
        if count:
            logger.info("the stream is read again up to item %d, where the recording ends", count)
        stream = self._new_stream()
        if initial is not None and stream is self._source:
            stream.load_state_dict(initial)
        items = iter(stream)
        different = self._first_difference(items, 0, count)
        if different is not None:
            raise another_stream(self._recording.folder, different)
        return items

    def _new_stream(self) -> Any:
        self._stream = self._source() if callable(self._source) else self._source
        return self._stream

    def _first_difference(self, items: Iterator[Any], start: int, stop: int) -> int | None:
        """Returns the first of some recorded items that the stream does not yield; None if it yields them all."""
        digests = self._recording.rows(stop)["digest"]
        for number in range(start, stop):
            if self._stopped.is_set():
                raise _StoppedError
            with _forks:
                missing = object()
                item = next(items, missing)
                if item is missing or xxhash.xxh3_64_intdigest(encoded([item], number)[0]) != int(digests[number]):
                    return number
        return None


def another_stream(folder: str, number: int) -> DataError:
    """Returns the error of a stream that does not repeat an item of the recording."""
    return DataError.of(
        f"a stream that repeats item {number} of the recording in {folder}",
        "another item, or its end",
        "pass the stream that was recorded, with seeds for what it draws; or name another folder for another stream",
    )


def encoded(items: list[Any], first: int) -> list[bytes]:
    """Returns the bytes of items; raises ConfigError for one that cannot be kept, by its number in the stream."""
    with suppress(Exception):
        return item_columns.encode_many(items)
    payloads = []
    for number, item in enumerate(items, first):
        try:
            payloads.append(item_codec.encode(item))
        except ShadeError as error:
            expected, _, got = str(error).rpartition("; ")[0].partition(", got ")
            raise ConfigError(
                f"{expected} in item {number} of the stream, got {got}; map the stream to these before it is recorded"
            ) from error
    return payloads
