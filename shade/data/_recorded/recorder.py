"""Recorder: the thread that reads a stream and appends its items to a recording.

It begins where the recording ends. A stream with a ``state_dict`` is set to a state from before that end, any other is
read from its beginning; what it yields up to the end is compared with what is recorded.

Invariant: item n of the recording is item n of the stream, in however many processes it was recorded, or the stream is
refused.
"""

from __future__ import annotations

import copy
import itertools
import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final

import xxhash

from shade.data._recorded.recording import Recording
from shade.data._source import item_codec, item_columns
from shade.errors import ConfigError, DataError, ShadeError

_AHEAD_BYTES: Final = 64 << 20
"""The recorder reads so far beyond what is asked for: a stream may have no end."""
_SEAL_BYTES, _SEAL_SECONDS = 64 << 20, 10.0
_GROUP_ITEMS, _GROUP_SECONDS = 64, 0.05
"""Items that come so fast are written together."""
_COMPARED: Final = 16
"""Items before the end of the recording that a stream repeats when it is set to a state."""
_IDLE_SECONDS, _END_SECONDS = 0.002, 5.0
logger = logging.getLogger("shade.data")
_making, _forks = threading.RLock(), list[bool]()
"""Held while a stream makes an item, so that a child has no copies of its locks; and the forks that wait for that."""


def _wait() -> None:
    _forks.append(False)
    _forks[-1] = _making.acquire(timeout=_END_SECONDS)  # not for ever: the item may wait for what is being forked


def _release() -> None:
    if _forks.pop():
        _making.release()


os.register_at_fork(before=_wait, after_in_parent=_release, after_in_child=_release)


class _StoppedError(Exception):
    """The recorder was closed."""


class Recorder:
    """Records a stream until `close`, the stream's end or an error. The caller has locked the recording.

    ``source`` returns the stream; ``name`` is the name of its code.
    """

    def __init__(self, source: Callable[[], Any], name: str | None, recording: Recording) -> None:
        self._source, self._name, self._recording = source, name, recording
        self._stream: Any = None
        self._states: list[tuple[int, Any]] = []
        self._stopped, self._sealed = threading.Event(), (time.monotonic(), 0)
        self.error: BaseException | None = None
        """The error that ended it."""
        self.thread = threading.Thread(target=self._run, name="shade-recorder", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Ends the thread, after the item that it waits for. Safe to call twice."""
        self._stopped.set()
        if self.thread is not threading.current_thread():
            self.thread.join(_END_SECONDS)

    def _run(self) -> None:
        try:
            with suppress(_StoppedError):
                self._record()
        except BaseException as error:  # noqa: BLE001 - it is raised in who waits for an item
            self.error = error
        finally:
            self._stream = None
            self._recording.unlock()

    def _record(self) -> None:
        recording = self._recording
        recording.wanted = 0  # who waits asks again
        mark = recording.cut()
        if mark["is_complete"]:
            return
        count, self._states = recording.count, mark["states"]
        if not count:
            self._seal(0)
        items = self._continued(count)
        while not self._stopped.is_set():
            used = recording.wanted
            if used <= count and recording.num_bytes(count) - recording.num_bytes(used) >= _AHEAD_BYTES:
                self._stopped.wait(_IDLE_SECONDS)
                continue
            group = self._take(items, used - count if used > count else _GROUP_ITEMS)
            recording.append(count, encoded(group, count))
            count += len(group)
            if not group:
                return self._seal(count, is_complete=True)
            seconds, num_bytes = time.monotonic() - self._sealed[0], recording.num_bytes(count) - self._sealed[1]
            if seconds > _SEAL_SECONDS or num_bytes >= _SEAL_BYTES:
                self._seal(count)
        self._seal(count)

    def _take(self, items: Iterator[Any], most: int) -> list[Any]:
        """Returns the items that come next within a short time, one at least; none at the stream's end."""
        while _forks:  # the lock alone would come back to this thread each time
            time.sleep(_IDLE_SECONDS)
        group, until = list[Any](), time.monotonic() + _GROUP_SECONDS
        with _making:
            for item in items:
                group.append(item)
                if len(group) >= min(most, _GROUP_ITEMS) or time.monotonic() > until:
                    break
        return group

    def _seal(self, count: int, *, is_complete: bool = False) -> None:
        if self._stream is not None and (not self._states or count - self._states[-1][0] >= _COMPARED):
            with suppress(Exception):  # a state that cannot be encoded is none
                state = self._stream.state_dict()
                item_codec.encode(state)
                self._states = [*self._states[-1:], (count, state)]
        states = [] if is_complete else self._states
        mark = {"count": count, "name": self._name, "states": states, "is_complete": is_complete}
        self._recording.seal(mark)
        self._sealed = time.monotonic(), self._recording.num_bytes(count)

    # ── where the recording ends ────────────────────────────────────────────────────────────────────────────────────

    def _continued(self, count: int) -> Iterator[Any]:
        """Returns the items of the stream behind the first ``count``, which it has to repeat, the last at least."""
        for number, state in reversed(self._states):
            if count - number >= _COMPARED:
                items = self._opened(state)
                different = self._first_difference(items, number, count)
                if different is None:
                    return items
                logger.warning("the stream's state_dict of item %d does not bring back item %d", number, different)
        if count:
            logger.info("the stream is read again up to item %d, where the recording ends", count)
        items = self._opened(None)
        different = self._first_difference(items, 0, count)
        if different is not None:
            raise another_stream(self._recording.folder, different)
        return items

    def _opened(self, state: Any) -> Iterator[Any]:
        """Returns the items of the stream from a state on; None: from its beginning."""
        stream = self._source()
        if getattr(getattr(stream, "_distributed", None), "world_size", 1) > 1:  # of Hugging Face
            cure = "leave split_dataset_by_node out: RecordedSampler gives each rank its part of every batch"
            raise ConfigError.of("the whole stream on every rank", "one that is split by rank", cure)
        if state is not None:
            if not hasattr(stream, "load_state_dict"):
                return iter(())
            stream = copy.copy(stream)  # another pass may have to begin at the beginning
            stream.load_state_dict(state)
        self._stream = stream
        return iter(stream)

    def _first_difference(self, items: Iterator[Any], start: int, stop: int) -> int | None:
        """Returns the first of some recorded items that the stream does not yield; None if it yields them all."""
        while start < stop:
            group = self._take(items, stop - start)
            digests = [xxhash.xxh3_64_intdigest(payload) for payload in encoded(group, start)]
            recorded = self._recording.rows(stop)["digest"][start : start + len(group)].tolist()
            if not group or digests != recorded:
                return start + sum(1 for _ in itertools.takewhile(bool, map(operator.eq, digests, recorded)))
            if self._stopped.is_set():
                raise _StoppedError
            start += len(group)
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
            got = str(error).rpartition("; ")[0].replace(", got ", f" in item {number} of the stream, got ")
            raise ConfigError(f"{got}; map the stream to these before it is recorded") from error
    return payloads
