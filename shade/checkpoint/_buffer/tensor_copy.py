"""Copies tensors into a buffer, and proves that they did not change meanwhile.

Nothing can forbid writing to a tensor between its capture and the end of its copy, so a write is detected:

1. PyTorch counts every in-place change of a tensor (``_version``), on any thread, when the operation has ended. Counts
   and addresses at the start, and the first and last item of a CPU tensor, are compared with those after the last copy.
2. A change through ``.data`` or a numpy view is not counted, nor is one that still runs. So CPU tensors are compared
   with their copies at the end, once no other thread can be in the middle of a write (`copy_and_compare`).

A torn tensor raises a `TornSnapshotError` that names it; the snapshot is refused, and training is not disturbed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from shade.checkpoint._buffer.copy_and_compare import (
    LEAST_BYTES,
    LONGEST_SECONDS,
    Comparison,
    SharedCopy,
    copy_bytes,
    wait_for_others,
)
from shade.checkpoint._buffer.stream_hash import StreamHash
from shade.checkpoint._capture.flatten import torch_dtype
from shade.checkpoint._capture.layout import bytes_of
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import TensorEntry
from shade.errors import ConfigError, TornSnapshotError

_SMALL_BYTES: Final = 2**18
"""State on the host, beside one on devices, is copied at once up to this size."""
_ROOM_FACTOR: Final = 1.5
"""A device has room for a clone if so many times its bytes are free: the next step needs memory, too."""

_WIDEST_ITEM: Final = 16
"""Bytes of the longest item of a tensor: complex128."""
_Part = tuple[str, int, int]
"""Part of a tensor: its name, the first byte, and the end."""


class Copying:
    """The copy of one rank's snapshot into a buffer, as a strategy steers it.

    Args:
        source: The live tensors, by name.
        entries: Where each tensor lies in the buffer.
        buffer: uint8, at least as long as the entries need.
        steady: Names of the tensors that only an optimizer's step changes.
        stream_hash: Learns which bytes are copied; None: the snapshot is not streamed.
        comparison: The comparison of the run's earlier saves; None: this is the first.
    """

    def __init__(
        self,
        source: Mapping[str, torch.Tensor],
        entries: Mapping[str, TensorEntry],
        buffer: torch.Tensor,
        steady: frozenset[str] = frozenset(),
        stream_hash: StreamHash | None = None,
        comparison: Comparison | None = None,
    ) -> None:
        self.steady = steady
        self._comparison = Comparison() if comparison is None else comparison
        self._stream_hash = stream_hash
        self._live = {name: source[name] for name in entries}
        self._source = {name: each if _is_plain(each) else each.detach() for name, each in self._live.items()}
        self._entries, self._buffer = entries, buffer
        self._fingerprints = Fingerprints(self._live)
        self._to_copy = dict.fromkeys(entries)
        self._taking = threading.Lock()
        self._begun: dict[str, int] = {}
        """Bytes copied of tensors that are copied in part."""
        self._pauses: dict[str, list[int]] = {}
        """By tensor, the offsets at which its copy was interrupted."""
        self._unchecked = dict.fromkeys(entries)
        devices = {tensor.device for tensor in self._source.values() if tensor.is_cuda}
        self._streams = {device: torch.cuda.Stream(device) for device in devices}  # type: ignore[no-untyped-call]
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))

    @property
    def is_of_devices(self) -> bool:
        """Whether a tensor lies on a device."""
        return bool(self._streams)

    @property
    def names(self) -> list[str]:
        """Tensors not copied yet, in the order of the buffer."""
        return list(self._to_copy)

    @property
    def num_bytes_left(self) -> int:
        """Bytes of tensors not copied yet; those copied in part count in full."""
        return sum(map(self._num_bytes, self._to_copy))

    def copy(self, name: str) -> None:
        """Copies one tensor, or the part that `advance` has left; from a device, only begins to."""
        begun = self._begun.pop(name, 0)
        del self._to_copy[name]
        self._copy(name, begun, self._num_bytes(name))

    def advance(self, num_bytes: int) -> int:
        """Copies about so many bytes in the order of the buffer, and returns how many; 0 when none are left.

        Any thread may call it. It may stop within a contiguous tensor, but not within an item.
        """
        taken = self._take(num_bytes)
        if self._stream_hash is None or not all(_is_plain(self._source[name]) for name, _, _ in taken):
            for part in taken:
                self._copy(*part)
        else:
            self._copy_by_chunks(taken, self._stream_hash)
        return sum(stop - start for _, start, stop in taken)

    def _take(self, num_bytes: int) -> list[_Part]:
        """Takes parts of tensors for the caller to copy; up to the end of a chunk, if that many bytes reach one."""
        taken: list[_Part] = []
        with self._taking:
            end: int | None = None
            while self._to_copy:
                name = next(iter(self._to_copy))
                begun, offset, length = self._begun.get(name, 0), self._entries[name].start, self._num_bytes(name)
                if end is None:
                    end = self._end(offset + begun, num_bytes)
                width = self._source[name].element_size()
                stop = begun + max(0, end - offset - begun) // width * width
                if stop >= length or (stop > begun and not self._source[name].is_contiguous()):
                    stop = length
                    self._begun.pop(name, None)
                    del self._to_copy[name]
                elif stop > begun:
                    self._begun[name] = stop
                else:
                    break
                taken.append((name, begun, stop))
        return taken

    def _end(self, start: int, num_bytes: int) -> int:
        """Returns where so many bytes from an offset end, or the last end of a chunk before."""
        end = start + num_bytes
        aligned = (
            0 if self._stream_hash is None else end // self._stream_hash.chunk_bytes * self._stream_hash.chunk_bytes
        )
        return aligned if aligned > start else end

    def _copy_by_chunks(self, taken: Sequence[_Part], stream_hash: StreamHash) -> None:
        """Copies parts of tensors, chunk by chunk."""
        offsets = {name: self._entries[name].start for name, _, _ in taken}
        pieces = [
            (first // stream_hash.chunk_bytes, (name, first - offsets[name], last - offsets[name]))
            for name, start, stop in taken
            for first, last in stream_hash.pieces(offsets[name] + start, offsets[name] + stop)
        ]
        for number, cut in itertools.groupby(pieces, key=lambda piece: piece[0]):
            self._copy_into_chunk(number, [part for _, part in cut], stream_hash)

    def _copy_into_chunk(self, number: int, parts: Sequence[_Part], stream_hash: StreamHash) -> None:
        """Copies parts of one chunk; hashes a chunk that is complete then from the tensors, which are in the cache."""
        # Hashing the tensor instead of its copy hides no change: had the tensor changed in between, the digest would be
        # of neither state, and every reader would find the snapshot damaged.
        is_rest = stream_hash.missing(number) == sum(stop - start for _, start, stop in parts)
        for part in parts:
            self._move(*part)
        if is_rest:
            stream_hash.hashed(number, digest_of(*self._chunk_parts(number, parts, stream_hash)))
        for name, start, stop in parts:
            stream_hash.add(self._entries[name].start + start, self._entries[name].start + stop)

    def _chunk_parts(self, number: int, parts: Sequence[_Part], stream_hash: StreamHash) -> Iterator[memoryview]:
        """Yields a chunk's bytes: long parts from their tensors, short or earlier ones from the buffer."""
        chunk, first, reached = stream_hash.chunks[number], number * stream_hash.chunk_bytes, 0
        for name, start, stop in parts:
            if stop - start < LEAST_BYTES:
                continue
            begin = self._entries[name].start + start - first
            yield chunk[reached:begin]
            yield memoryview(bytes_of(self._source[name])[start:stop].numpy().data)
            reached = begin + stop - start
        yield chunk[reached:]

    def _num_bytes(self, name: str) -> int:
        return self._entries[name].stop - self._entries[name].start

    def _copy(self, name: str, start: int, stop: int) -> None:
        """Copies bytes of one tensor; all bytes if it is not contiguous."""
        if self._stream_hash is None:
            self._move(name, start, stop)
            return
        tensor, offset = self._source[name], self._entries[name].start
        whole = offset + start, offset + stop
        for first, last in self._stream_hash.pieces(*whole) if tensor.is_contiguous() else [whole]:
            self._move(name, first - offset, last - offset)
            self._stream_hash.add(first, last, self._recorded(tensor))

    def _recorded(self, tensor: torch.Tensor) -> torch.cuda.Event | None:
        """Returns an event for the end of the copies begun so far from a tensor's device; None for a CPU tensor."""
        if not tensor.is_cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._streams[tensor.device])
        return event

    def _move(self, name: str, start: int, stop: int) -> None:
        entry, tensor = self._entries[name], self._source[name]
        if start == stop:
            return
        if _is_plain(tensor):
            copy_bytes(self._buffer.data_ptr() + entry.start + start, tensor.data_ptr() + start, stop - start)
            if stop < entry.stop - entry.start:
                self._pauses.setdefault(name, []).append(stop)
        elif tensor.is_cuda:
            # `stream` alone ends on the thread's device before, GPU 0, and makes a context there.
            with torch.cuda.device(tensor.device), torch.cuda.stream(self._streams[tensor.device]):
                if tensor.is_contiguous():
                    here = self._buffer[entry.start + start : entry.start + stop]
                    here.copy_(bytes_of(tensor)[start:stop], non_blocking=True)
                else:
                    self._view(name).copy_(tensor, non_blocking=True)
                tensor.record_stream(self._streams[tensor.device])
        else:
            self._view(name).copy_(tensor)

    def _share(self, names: Iterable[str]) -> SharedCopy:
        """Returns the copy of those tensors that lie on the host in one piece; they count as copied."""
        address, ranges = self._buffer.data_ptr(), []
        for name in names if self._stream_hash is None else ():
            tensor = self._source[name]
            if _is_plain(tensor):
                del self._to_copy[name]
                begun, entry = self._begun.pop(name, 0), self._entries[name]
                start = entry.start + begun
                ranges.append((address + start, tensor.data_ptr() + begun, entry.stop - start))
        return SharedCopy(ranges)

    def _view(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        flat = self._buffer[entry.start : entry.stop].view(torch_dtype(entry.dtype))
        return flat.view(entry.shape)

    def again(self) -> Copying:
        """Returns the same copy from the start, of the state as it is now, and not streamed."""
        return Copying(self._live, self._entries, self._buffer, self.steady, comparison=self._comparison)

    def set_aside(self) -> bool:
        """Clones on devices what is not copied yet, if they have room for it: then the state may change at once.

        A clone takes a hundredth of the time of the copy to the host, which can follow in the background. Small tensors
        on the host (an Adam's counts of steps) are settled.

        Returns:
            Whether everything was cloned; if false, nothing was.

        Raises:
            TornSnapshotError: See `settle`.
        """
        left = [name for name in self._to_copy if self._source[name].is_cuda]
        here = [name for name in self._to_copy if not self._source[name].is_cuda]
        if not left or sum(map(self._num_bytes, here)) > _SMALL_BYTES:
            return False
        needed_bytes = dict.fromkeys(self._streams, 0)
        for name in left:
            needed_bytes[self._source[name].device] += self._num_bytes(name)
        if any(_free_bytes(device) < _ROOM_FACTOR * needed for device, needed in needed_bytes.items()):
            return False
        self.settle(here)
        # A clone takes a hundredth of the time of the copy to the host, which can follow in the background.
        clones = {name: self._source[name].clone() for name in left}
        for device in needed_bytes:
            torch.cuda.current_stream(device).synchronize()
        changed = self._fingerprints.first_changed(left)
        if changed is not None:
            raise self._torn(changed)
        self._source |= clones
        self._live |= clones
        self._fingerprints = Fingerprints(self._live)  # no others are left to check
        return True

    def settle(self, names: Iterable[str], helper: Executor | None = None) -> None:
        """Copies tensors and checks them now; later changes to them do not concern this snapshot. A ``helper`` takes a
        part of both. Raises `TornSnapshotError` if one has changed since the start; the buffer's content is worth
        nothing."""
        names = list(names)
        left = [name for name in names if name in self._to_copy]
        self._share(left).run(helper)
        for name in left:
            if name in self._to_copy:
                self.copy(name)
        # Not the others: they wait for all that the training has queued.
        for device in {self._source[name].device for name in names} & self._streams.keys():
            self._streams[device].synchronize()
        # An operation that began before the copy and ends after it: the copy overtook it, so both are new up to there
        # and old from there on, and nothing is counted yet. Half a millisecond later it has written further, or has
        # ended.
        if names and not wait_for_others():  # also where `advance`, or another thread, has copied them all
            raise TornSnapshotError(
                "expected to see every other thread rest or run while a copy was checked, got one without a processor "
                f"for {LONGEST_SECONDS:g} s; nothing was saved: give the training fewer threads, or more cores"
            )
        changed = self._fingerprints.first_changed(names)
        if changed is not None:
            self._comparison.in_full |= not self._fingerprints.is_counted(changed)
        torn = changed or self._first_torn(names, helper)
        if torn is not None:
            raise self._torn(torn)
        for name in names:
            del self._unchecked[name]

    def finish(self, helper: Executor | None = None) -> None:
        """Settles all tensors that are not settled yet; see `settle`."""
        self.settle(self._unchecked, helper)

    def _first_torn(self, names: Iterable[str], helper: Executor | None) -> str | None:
        """Returns the first CPU tensor that differs from its copy, at the sampled bytes."""
        address = self._buffer.data_ptr()
        plain: dict[str, tuple[torch.Tensor, int]] = {}
        for name in names:
            tensor = self._source[name]
            if _is_plain(tensor):
                plain[name] = tensor, address + self._entries[name].start
            # On a device, comparing would cost a round trip a tensor; there the counts alone are used.
            elif tensor.is_cpu and not self._comparison.agrees_in_full(tensor, self._view(name)):
                return name
        return self._comparison.first_torn(plain, self._pauses, helper)

    def _torn(self, name: str) -> TornSnapshotError:
        return TornSnapshotError(
            f"expected {name!r} to stand still while it was copied, got a change; nothing was saved: call "
            "wait_copy_complete() before whatever writes to it (an attached optimizer does so by itself)"
        )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes lie on the host, one after the other."""
    return tensor.is_cpu and tensor.is_contiguous()


def _free_bytes(device: torch.device) -> int:
    """Returns how much can be allocated on a device, with the memory that PyTorch has reserved."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(free_bytes + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


class Fingerprints:
    """What changes whenever one of some tensors does; of uncounted changes, those of its first or last item.

    Args:
        tensors: By name.

    Raises:
        ConfigError: One does not count its changes.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        for name, tensor in self._tensors.items():
            if tensor.is_inference():
                cure = "clone() it outside of inference_mode before it is saved"
                raise ConfigError.of(f"{name!r} to count its changes", "a tensor made under torch.inference_mode", cure)
        self._number = {name: number for number, name in enumerate(self._tensors)}
        self._counts = _counts(self._tensors.values())
        self._end_N3 = np.array([_ends(each) for each in self._tensors.values()], dtype=np.uintp).reshape(-1, 3)
        self._items_N = self._read(range(len(self._tensors)))

    def first_changed(self, names: Sequence[str]) -> str | None:
        """Returns the first of some tensors that has changed since this object was made; None if none has."""
        numbers = [self._number[name] for name in names]
        counts = _counts(self._tensors[name] for name in names)
        for name, number, count in zip(names, numbers, counts, strict=True):
            if count != self._counts[number]:
                return name
        # Only now: the memory of a tensor that has moved may be gone.
        other = np.flatnonzero(self._read(numbers) != self._items_N[numbers])
        return names[other[0]] if len(other) else None

    def _read(self, numbers: Sequence[int]) -> npt.NDArray[np.void]:
        """Returns the first and the last item of some tensors."""
        item_N = np.zeros(len(numbers), dtype=np.dtype((np.void, 2 * _WIDEST_ITEM)))
        first_N, last_N, width_N = self._end_N3[numbers].T
        target_N = item_N.ctypes.data + 2 * _WIDEST_ITEM * np.arange(len(numbers), dtype=np.uintp)
        firsts = np.stack([target_N, first_N, width_N], axis=1)
        lasts = np.stack([target_N + np.uintp(_WIDEST_ITEM), last_N, width_N], axis=1)
        SharedCopy(np.concatenate([firsts, lasts])).run()
        return item_N

    def is_counted(self, name: str) -> bool:
        """Whether PyTorch has counted a change of a tensor, or its memory is another."""
        return _counts([self._tensors[name]]) != [self._counts[self._number[name]]]


def _counts(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Returns how often each tensor was changed, and its address."""
    return [(tensor._version, tensor.data_ptr()) for tensor in tensors]


def _ends(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Returns the addresses of the first and of the last item of a tensor on the host, and their width; else zeros."""
    if not tensor.is_cpu or not tensor.numel():
        return 0, 0, 0
    address, width = tensor.data_ptr(), tensor.itemsize
    if tensor.is_contiguous():
        return address, address + tensor.nbytes - width, width
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return address, address + width * sum((size - 1) * step for size, step in steps), width
