"""Recorded: a map-style data set of a stream, which is recorded on the local disk while the first epoch trains on it.

Invariant: sample n is item n of the stream, and is on the disk before anyone learns that it is there.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset
from typing_extensions import override

from shade.cache.entry import FORMAT_ITEM
from shade.data._dataset.code_digest import CodeDigest, HeldGeneratorError, UnnameableError
from shade.data._recorded.recorder import Recorder, another_stream, encoded
from shade.data._recorded.recording import Recording
from shade.data._source import item_codec, item_columns
from shade.data._source.source import CountOrigin, SampleSource, checked_index
from shade.errors import BadSampleError, ConfigError
from shade.types import ClosedByWith

_POLL_SECONDS = 0.0005, 0.01
"""First and longest wait between two looks at what is recorded."""


class Recorded(Dataset[Any], SampleSource, ClosedByWith):
    """The items of a stream, recorded once: map-style as soon as the stream has ended.

    `RecordedSampler` deals them in the first epoch, while they are recorded. Any rank may record; all others, on this
    machine or on a shared file system, read what it has written.

    Args:
        source: An iterable (a streaming data set, a pipeline, a generator), or a function that returns one. It yields
            the same items each time, on every rank all of them.
        disk: The folder of the recording, on a disk with room for all items.

    Raises:
        ConfigError: No iterable.
        DataError: The folder holds a recording of another stream, or a damaged one.
    """

    cached_format = FORMAT_ITEM
    has_pictures = compares_hits = is_random = False
    has_encoded_items = True
    target_N = None
    num_probes = probe_bytes = 0

    def __init__(self, source: Iterable[Any] | Callable[[], Iterable[Any]], disk: str | os.PathLike[str]) -> None:
        if not (callable(source) or isinstance(source, Iterable)):
            raise ConfigError.of("an iterable, or a function that returns one", type(source).__name__, "pass a stream")
        if "://" in os.fspath(disk) or "?" in os.fspath(disk):
            raise ConfigError.of("a folder of a local disk", os.fspath(disk), "pass its path, without options")
        is_function = callable(source) and not isinstance(source, Iterable)
        made: Any = source if is_function else lambda: source
        self._source: Callable[[], Iterable[Any]] | None = made
        self._name = _name_of(source) if is_function else None
        self._recording = Recording(os.path.abspath(os.path.expanduser(disk)))
        self._recorder: Recorder | None = None
        self._has_ended = False
        weakref.finalize(self, self._recording.close).atexit = False
        if self.is_complete and (self._name is None or self._name != self._recording.mark()["name"]):
            items = list(itertools.islice(made(), 1))
            if encoded(items, 0) != self._recording.payloads(range(min(1, self._recording.count))):
                raise another_stream(self._recording.folder, 0)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_source": None, "_recorder": None}

    def __len__(self) -> int:
        if not self.is_complete:
            # By what has no length; loops and progress bars know that.
            raise TypeError(
                f"expected a complete recording, which has a length, got {self.num_readable} items so far; train the "
                "first epoch with RecordedSampler, without a cache, or call record() before"
            )
        return self._recording.count

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns the samples of a batch.

        Args:
            indices: Of recorded samples; negative ones count from the end of a complete recording.

        Returns:
            The items, in order.

        Raises:
            IndexError: There is no such sample, or not yet.
            BadSampleError: A sample is damaged.
        """
        count = len(self) if min(indices, default=0) < 0 else self.num_readable
        indices = [checked_index(index, count) for index in indices]
        payloads = self._recording.payloads(indices)
        items = item_columns.decoded_many(payloads)
        return list(map(self._item, indices, payloads)) if items is None else items

    def _item(self, index: int, payload: Any) -> Any:
        try:
            if isinstance(payload, Exception):
                raise payload
            return item_codec.decode(payload)
        except Exception as error:
            raise BadSampleError(
                f"expected {self.name_of(index)} to be readable, got {error}; "
                "remove the folder, so that the stream is recorded again, or pass on_bad_sample='skip'"
            ) from error

    def __repr__(self) -> str:
        """Returns how many items are recorded where."""
        state = "complete" if self.is_complete else "incomplete"
        return f"Recorded(num_samples={self.num_readable}, {state}, disk={self._recording.folder!r})"

    # ── recording ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_complete(self) -> bool:
        """Returns whether the stream has ended."""
        self._has_ended = self._has_ended or self._recording.mark()["is_complete"]
        return self._has_ended

    def reach(self, stop: int) -> int:
        """Waits until ``stop`` items are recorded, or all, and returns how many of them there are.

        Raises what the stream raises; StorageFullError if the disk is full, DataError if the stream does not repeat
        what is recorded, ConfigError for an item that cannot be kept.
        """
        recording, wait = self._recording, _POLL_SECONDS[0]
        while not self._has_ended:
            if recording.wanted < stop:
                recording.wanted = stop
            self._keep_recording()  # it reads ahead
            if recording.count >= stop:
                break
            if not self.is_complete:
                time.sleep(wait)
                wait = min(2 * wait, _POLL_SECONDS[1])
        return min(stop, recording.count)

    def record(self) -> int:
        """Records the rest of the stream without training on it; returns how many items there are."""
        return self.reach(sys.maxsize)

    def _keep_recording(self) -> None:
        """Raises what has ended the recorder, and starts one if none is at work on this folder."""
        recorder = self._recorder
        if recorder is not None and recorder.thread.is_alive():
            return
        self._recorder = None
        if recorder is not None and recorder.error is not None:
            raise recorder.error
        if self._source is not None and not self.is_complete and self._recording.try_to_lock():
            self._recorder = Recorder(self._source, self._name, self._recording)
            weakref.finalize(self, self._recorder.close)

    def digest_of(self, count: int) -> str:
        """Returns the digest of the first items, by which a saved place knows its recording."""
        return self._recording.digest_of(count)

    # ── as ShadeDataset reads it ────────────────────────────────────────────────────────────────────────────────────

    def sample_source(self) -> Recorded:
        """Returns the source that `ShadeDataset` reads."""
        return self

    @property
    @override
    def num_readable(self) -> int:
        return self._recording.count

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        """Returns a name of the content; raises ConfigError if it is not complete."""
        if not self.is_complete:
            got, cure = f"{self.num_readable} items so far", "pass ShadeDataset(…, cache=None) while it is recorded"
            raise ConfigError.of("a complete recording for a cache", got, f"{cure}, or call record() before")
        return self.digest_of(len(self))

    @property
    def payload_bytes_N(self) -> npt.NDArray[np.int64]:  # type: ignore[override]
        """Returns the sizes of all samples; raises TypeError if the recording is not complete."""
        end_N: npt.NDArray[np.int64] = self._recording.rows(len(self))["end"].astype(np.int64)
        size_N: npt.NDArray[np.int64] = end_N - np.concatenate([[0], end_N[:-1]])
        return size_N

    @override
    def read_many(self, indices: list[int], count: CountOrigin) -> list[Any]:
        payloads = self._recording.payloads(indices)
        read = [payload for payload in payloads if not isinstance(payload, Exception)]
        count(len(read), sum(map(len, read)))
        return payloads

    @override
    def decode(self, index: int, payload: Any) -> tuple[Any, ...]:
        item = self._item(index, payload)
        return item if isinstance(item, tuple) else (item,)

    @override
    def name_of(self, index: int) -> str:
        return f"item {index} of the recording in {self._recording.folder}"

    @override
    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()


def _name_of(source: Any) -> str | None:
    """Returns the name of a function's code; None if it has none, so that the first item is compared."""
    digest = CodeDigest()
    with suppress(UnnameableError, HeldGeneratorError):
        digest.add(source, "stream")
        return digest.hexdigest()
    return None
