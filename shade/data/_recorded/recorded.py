"""Recorded: a map-style data set of a stream, which is recorded on the local disk while the first epoch trains on it.

Invariant: sample n is item n of the stream, and is on the disk before anyone learns that it is there.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from torch.utils.data import Dataset
from typing_extensions import override

from shade.cache.entry import FORMAT_ITEM
from shade.data._dataset.code_digest import CodeDigest, HeldGeneratorError, UnnameableError
from shade.data._recorded.recorder import Recorder, another_stream, encoded
from shade.data._recorded.recording import Recording
from shade.data._source import item_codec, item_columns
from shade.data._source.source import CountOrigin, GrowingSource, checked_index, not_counted
from shade.errors import BadSampleError, ConfigError

_POLL_SECONDS = 0.0005, 0.01
"""First and longest wait between two looks at what another process records."""
logger = logging.getLogger("shade.data")


class Recorded(Dataset[Any]):
    """The items of a stream, recorded once: map-style as soon as the stream has ended.

    `RecordedSampler` deals them in the first epoch, while they are recorded. Any rank may record; all others, on this
    machine or on a shared file system, read what it has written.

    Args:
        source: An iterable (a streaming data set, a pipeline, a generator), or a function that returns one. It yields
            the same items each time, on every rank all of them.
        disk: The folder of the recording, on a disk with room for all items.

    Raises:
        ConfigError: No iterable, or a stream that is split by rank.
        DataError: The folder holds a recording of another stream, or a damaged one.
    """

    def __init__(self, source: Iterable[Any] | Callable[[], Iterable[Any]], disk: str | os.PathLike[str]) -> None:
        if not (callable(source) or isinstance(source, Iterable)):
            raise ConfigError.of("an iterable, or a function that returns one", type(source).__name__, "pass a stream")
        if getattr(getattr(source, "_distributed", None), "world_size", 1) > 1:  # of Hugging Face
            raise ConfigError.of(
                "the whole stream on every rank",
                "one that split_dataset_by_node has split",
                "leave that out: RecordedSampler gives each rank its part of every batch",
            )
        folder = os.path.abspath(os.path.expanduser(disk))
        if "?" in folder or "://" in str(disk):
            raise ConfigError.of("a folder of a local disk", os.fspath(disk), "pass its path, without options")
        self._source: Any = source
        self._name = _name_of(source)
        self._recording = Recording(folder)
        self._recorder: Recorder | None = None
        weakref.finalize(self, self._recording.close).atexit = False
        if self._recording.is_complete:
            self._check_name()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_source": None, "_recorder": None}

    def _check_name(self) -> None:
        """Raises DataError if the complete recording is of another stream."""
        if self._name is not None and self._name == self._recording.mark().name:
            return
        nothing = object()
        first = next(iter(self._source() if callable(self._source) else self._source), nothing)
        digests = self._recording.rows(min(1, self._recording.count))["digest"]
        is_same = first is nothing if not len(digests) else first is not nothing
        if not is_same or (len(digests) and xxhash.xxh3_64_intdigest(encoded([first], 0)[0]) != int(digests[0])):
            raise another_stream(self._recording.folder, 0)

    # ── samples ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def __len__(self) -> int:
        if not self.is_complete:
            # By what has no length; loops and progress bars know that.
            raise TypeError(
                f"expected a complete recording, which has a length, got {self.num_recorded} items so far; train the "
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
        count = len(self) if min(indices, default=0) < 0 else self.num_recorded
        indices = [checked_index(index, count) for index in indices]
        payloads = self.read(indices)
        items = item_columns.decoded_many(payloads)
        return [self.item(*each) for each in zip(indices, payloads, strict=True)] if items is None else items

    def read(self, indices: Sequence[int]) -> list[Any]:
        """Returns encoded samples in order, with an exception in place of a damaged one."""
        return self._recording.payloads(indices)

    def item(self, index: int, payload: Any) -> Any:
        """Returns the sample that a payload of `read` holds; raises BadSampleError."""
        try:
            if isinstance(payload, Exception):
                raise payload
            return item_codec.decode(payload)
        except Exception as error:
            raise BadSampleError(
                f"expected {self.name_of(index)} to be readable, got {error}; "
                "remove the folder, so that the stream is recorded again, or pass on_bad_sample='skip'"
            ) from error

    def name_of(self, index: int) -> str:
        """Returns a sample's name in an error."""
        return f"item {index} of the recording in {self._recording.folder}"

    def __repr__(self) -> str:
        """Returns how many items are recorded where."""
        state = "complete" if self.is_complete else "incomplete"
        return f"Recorded(num_samples={self.num_recorded}, {state}, disk={self._recording.folder!r})"

    def sample_source(self) -> RecordedSource:
        """Returns the source that `ShadeDataset` reads."""
        return RecordedSource(self)

    # ── recording ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def num_recorded(self) -> int:
        """Returns how many items are recorded so far."""
        return self._recording.count

    @property
    def is_complete(self) -> bool:
        """Returns whether the stream has ended."""
        return self._recording.is_complete or self._recording.look()

    def reach(self, stop: int) -> int:
        """Waits until ``stop`` items are recorded, or all.

        Args:
            stop: How many items are wanted.

        Returns:
            How many of them there are: fewer only if the stream has ended.

        Raises:
            StorageFullError: The disk is full.
            DataError: The stream does not repeat what is recorded.
            ConfigError: An item that cannot be encoded.
            Exception: What the stream raised.
        """
        recording, wait = self._recording, _POLL_SECONDS[0]
        while not recording.is_complete:
            if recording.wanted < stop:
                recording.wanted = stop
            if recording.count >= stop:
                # The recorder reads ahead.
                self._keep_recording()
                return stop
            if not recording.look():
                self._keep_recording()
                time.sleep(wait)
                wait = min(2 * wait, _POLL_SECONDS[1])
        return min(stop, recording.count)

    def record(self) -> int:
        """Records the rest of the stream without training on it; returns how many items there are."""
        return self.reach(sys.maxsize)

    def _keep_recording(self) -> None:
        """Raises what has ended the recorder, and starts one if none is at work on this folder."""
        recorder = self._recorder
        if recorder is not None and recorder.is_running:
            return
        self._recorder = None
        if recorder is not None and recorder.error is not None:
            raise recorder.error
        if self._source is not None and self._recording.try_to_lock():
            self._recorder = Recorder(self._source, self._name, self._recording)
            weakref.finalize(self, self._recorder.close)

    def digest_of(self, count: int) -> str:
        """Returns the digest of the first items, by which a saved place knows its recording."""
        return self._recording.digest_of(count)

    @property
    def fingerprint(self) -> str:
        """Returns a name of the content; raises ConfigError if it is not complete."""
        if not self.is_complete:
            raise ConfigError.of(
                "a complete recording for a cache",
                f"{self.num_recorded} items so far",
                "pass ShadeDataset(…, cache=None) while it is recorded, or call record() before",
            )
        return self.digest_of(len(self))

    def payload_bytes(self) -> npt.NDArray[np.int64]:
        """Returns (N,) the bytes of each encoded sample."""
        return np.diff(self._recording.rows(len(self))["end"].astype(np.int64), prepend=0)

    def close(self) -> None:
        """Ends the recorder, if it is in this process; others go on. Safe to call twice."""
        if self._recorder is not None:
            self._recorder.close()


class RecordedSource(GrowingSource):
    """`Recorded` as `ShadeDataset` reads it."""

    cached_format = FORMAT_ITEM
    has_pictures = compares_hits = is_random = False
    has_encoded_items = True
    target_N = None
    num_probes = probe_bytes = 0

    def __init__(self, recorded: Recorded) -> None:
        self.recorded = recorded
        self._payload_bytes_N: npt.NDArray[np.int64] | None = None

    @property
    @override
    def num_readable(self) -> int:
        return self.recorded.num_recorded

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        """Returns the recording's."""
        return self.recorded.fingerprint

    @property
    def payload_bytes_N(self) -> npt.NDArray[np.int64]:  # type: ignore[override]
        """Returns the sizes of all samples; raises TypeError if the recording is not complete."""
        if self._payload_bytes_N is None:
            self._payload_bytes_N = self.recorded.payload_bytes()
        return self._payload_bytes_N

    @override
    def read_many(self, indices: list[int], count: CountOrigin) -> list[Any]:
        payloads = self.recorded.read(indices)
        read = [payload for payload in payloads if not isinstance(payload, Exception)]
        count(len(read), sum(map(len, read)))
        return payloads

    @override
    def decode(self, index: int, payload: Any) -> tuple[Any, ...]:
        item = self.recorded.item(index, payload)
        return item if isinstance(item, tuple) else (item,)

    @override
    def rest_of(self, index: int) -> tuple[Any, ...]:
        raise IndexError(f"expected no question about {self.name_of(index)} before it is decoded")

    @override
    def name_of(self, index: int) -> str:
        return self.recorded.name_of(index)

    @override
    def close(self) -> None:
        self.recorded.close()


def _name_of(source: Any) -> str | None:
    """Returns the name of a function's code; None of what has none, whose first item is compared then."""
    if not callable(source):
        return None
    digest = CodeDigest()
    try:
        digest.add(source, "stream")
    except (UnnameableError, HeldGeneratorError):
        return None
    return digest.hexdigest()
