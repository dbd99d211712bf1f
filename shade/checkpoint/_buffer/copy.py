"""Copies tensors into a buffer, and proves that they stood still meanwhile.

A snapshot is right only if nobody writes to a tensor between the moment it is taken and the moment its copy is done.
Nothing can forbid writing, so it is looked for, in two ways that cost next to nothing:

1. PyTorch counts every in-place change of a tensor (``_version``), on any thread, when the operation has ended. The
   counts and addresses noted at the start are compared when the last tensor has been copied.
2. A change through ``.data`` or a numpy view is not counted, nor is one that is still under way. So CPU tensors are
   compared with their copies, at the end too: in places, and in full once that has found somebody out
   (`_buffer.torn_read`). Whoever writes to all of a tensor is seen; a single element changed behind PyTorch's
   back only if it lies in one of those places. (On a device that would cost a round trip a tensor; there the counts
   alone must do.)

Story: an operation began before the copy and ends after it. The copy overtook it, so it is new up to there and old from
there on; and so is the tensor, where nobody has counted anything yet. Half a millisecond later the operation has
written another place, or has ended, and is found either way. So that is waited for before the comparison, and for
threads that the system has interrupted as long as it takes (`_buffer.torn_read`).

What is found is a `TornSnapshotError` naming the tensor; the snapshot is refused, training is not disturbed.

Contiguous CPU tensors are moved by `_buffer.streaming_copy`, without holding the interpreter; all others by
`torch.Tensor.copy_`, devices into pinned memory on a stream of their own.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Final

import torch

from shade.checkpoint._buffer.stream_hash import StreamHash
from shade.checkpoint._buffer.streaming_copy import LEAST_BYTES, copy_bytes
from shade.checkpoint._buffer.torn_read import LONGEST_SECONDS, Comparison, wait_for_others
from shade.checkpoint._capture.layout import bytes_of, torch_dtype
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import TensorEntry
from shade.errors import ConfigError, TornSnapshotError

_SMALL_BYTES: Final = 2**18
"""What lies on the host beside a state on devices is copied at once if it is no more than this."""
_ROOM_FACTOR: Final = 1.5
"""A device has room for a clone of a state if so many times its bytes are free: the next step needs some, too."""


_Part = tuple[str, int, int]
"""Of a tensor: its name, the first byte, and one past the last."""


class Copying:
    """One snapshot of one rank on its way into a buffer.

    Args:
        source: The live tensors, by name.
        entries: Where each goes.
        buffer: uint8, at least as long as the entries need.
        steady: Names that nothing but an optimizer's step changes.
        arrivals: Is told of what has come; None: nobody waits for parts of it.
        comparison: Of the saves before it; None: it is the first.
    """

    def __init__(
        self,
        source: Mapping[str, torch.Tensor],
        entries: Mapping[str, TensorEntry],
        buffer: torch.Tensor,
        steady: frozenset[str] = frozenset(),
        arrivals: StreamHash | None = None,
        comparison: Comparison | None = None,
    ) -> None:
        self.steady = steady
        self._comparison = Comparison() if comparison is None else comparison
        self._arrivals = arrivals
        self._source = {name: source[name].detach() for name in entries}
        self._live = {name: source[name] for name in entries}
        self._entries, self._buffer = entries, buffer
        self._noted = {name: _note(name, tensor) for name, tensor in self._live.items()}
        self._left = dict.fromkeys(entries)
        self._taking = threading.Lock()
        self._begun: dict[str, int] = {}
        """Bytes copied of tensors that are copied in part."""
        self._pauses: dict[str, list[int]] = {}
        """Of each tensor, how far its copy had come when it was interrupted."""
        self._unchecked = dict.fromkeys(entries)
        devices = {tensor.device for tensor in self._source.values() if tensor.is_cuda}
        self._streams = {device: torch.cuda.Stream(device) for device in devices}  # type: ignore[no-untyped-call]
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))

    @property
    def is_of_devices(self) -> bool:
        """Whether some of it lies on a device."""
        return bool(self._streams)

    @property
    def names(self) -> list[str]:
        """Tensors not copied yet, in the order of the buffer."""
        return list(self._left)

    @property
    def num_bytes_left(self) -> int:
        """Of tensors not copied yet; those copied in part count in full."""
        return sum(map(self._num_bytes, self._left))

    def copy(self, name: str) -> None:
        """Copies one tensor, or what `advance` has left of it; on a device, begins to."""
        begun = self._begun.pop(name, 0)
        del self._left[name]
        self._copy(name, begun, self._num_bytes(name))

    def advance(self, num_bytes: int) -> int:
        """Copies the next bytes in the order of the buffer, to the middle of a tensor if need be. By any thread.

        Args:
            num_bytes: How many; a tensor that is not contiguous is not divided.

        Returns:
            How many it were; 0 when nothing is left, or less than an item was asked for.
        """
        taken = self._take(num_bytes)
        if self._arrivals is None or not all(_is_plain(self._source[name]) for name, _, _ in taken):
            for part in taken:
                self._copy(*part)
        else:
            self._bring(taken, self._arrivals)
        return sum(stop - start for _, start, stop in taken)

    def _take(self, num_bytes: int) -> list[_Part]:
        """Parts of tensors that are the caller's to copy; up to the end of a chunk, if one is within reach."""
        taken: list[_Part] = []
        with self._taking:
            end: int | None = None
            while self._left:
                name = next(iter(self._left))
                begun, offset, length = self._begun.get(name, 0), self._entries[name].start, self._num_bytes(name)
                if end is None:
                    end = self._end(offset + begun, num_bytes)
                width = self._source[name].element_size()
                stop = begun + max(0, end - offset - begun) // width * width
                if stop >= length or (stop > begun and not self._source[name].is_contiguous()):
                    stop = length
                    self._begun.pop(name, None)
                    del self._left[name]
                elif stop > begun:
                    self._begun[name] = stop
                else:
                    break
                taken.append((name, begun, stop))
        return taken

    def _end(self, start: int, num_bytes: int) -> int:
        """Where so many bytes from a place in the buffer end, or a little before: at the end of a chunk."""
        end = start + num_bytes
        aligned = 0 if self._arrivals is None else end // self._arrivals.chunk_bytes * self._arrivals.chunk_bytes
        return aligned if aligned > start else end

    def _bring(self, taken: Sequence[_Part], arrivals: StreamHash) -> None:
        """Copies parts of tensors, chunk by chunk."""
        offsets = {name: self._entries[name].start for name, _, _ in taken}
        pieces = [
            (first // arrivals.chunk_bytes, (name, first - offsets[name], last - offsets[name]))
            for name, start, stop in taken
            for first, last in arrivals.pieces(offsets[name] + start, offsets[name] + stop)
        ]
        for number, cut in itertools.groupby(pieces, key=lambda piece: piece[0]):
            self._bring_to(number, [part for _, part in cut], arrivals)

    def _bring_to(self, number: int, parts: Sequence[_Part], arrivals: StreamHash) -> None:
        """Copies parts of one chunk. Where that completes it, it is hashed from where it came: that is in the cache.

        Story: had a tensor changed between its copy and its hash, the digest would be of neither state, and whoever
        reads the snapshot would find it damaged. So this hides nothing from anybody.
        """
        is_rest = arrivals.missing(number) == sum(stop - start for _, start, stop in parts)
        for part in parts:
            self._move(*part)
        if is_rest:
            arrivals.hashed(number, digest_of(*self._contents(number, parts, arrivals)))
        for name, start, stop in parts:
            arrivals.add(self._entries[name].start + start, self._entries[name].start + stop)

    def _contents(self, number: int, parts: Sequence[_Part], arrivals: StreamHash) -> Iterator[memoryview]:
        """All of a chunk: from their tensors what is long, from the buffer what is short or was copied before."""
        chunk, first, reached = arrivals.chunks[number], number * arrivals.chunk_bytes, 0
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
        """Copies bytes of one tensor; of one that is not contiguous, all of them."""
        if self._arrivals is None:
            self._move(name, start, stop)
            return
        tensor, offset = self._source[name], self._entries[name].start
        whole = offset + start, offset + stop
        for first, last in self._arrivals.pieces(*whole) if tensor.is_contiguous() else [whole]:
            self._move(name, first - offset, last - offset)
            self._arrivals.add(first, last, self._recorded(tensor))

    def _recorded(self, tensor: torch.Tensor) -> torch.cuda.Event | None:
        """What happens when the copies from a tensor's device that were begun so far are done; None on a CPU."""
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
            with torch.cuda.stream(self._streams[tensor.device]):
                if tensor.is_contiguous():
                    here = self._buffer[entry.start + start : entry.start + stop]
                    here.copy_(bytes_of(tensor)[start:stop], non_blocking=True)
                else:
                    self._view(name).copy_(tensor, non_blocking=True)
                tensor.record_stream(self._streams[tensor.device])
        else:
            self._view(name).copy_(tensor)

    def _copy_all(self, names: Iterable[str]) -> None:
        for name in names:
            self.copy(name)

    def _halves(self, names: Iterable[str]) -> tuple[list[str], list[str]]:
        """Two lists of about as many bytes: the largest first, each to the one that has less."""
        halves: tuple[list[str], list[str]] = ([], [])
        lengths = [0, 0]
        for name in sorted(names, key=lambda name: self._entries[name].start - self._entries[name].stop):
            less = int(lengths[1] < lengths[0])
            halves[less].append(name)
            lengths[less] += self._entries[name].stop - self._entries[name].start
        return halves

    def _view(self, name: str) -> torch.Tensor:
        entry = self._entries[name]
        flat = self._buffer[entry.start : entry.stop].view(torch_dtype(entry.dtype))
        return flat.view(entry.shape)

    def again(self) -> Copying:
        """The same from the start, from the state as it is now; nobody is told of what comes."""
        return Copying(self._live, self._entries, self._buffer, self.steady, comparison=self._comparison)

    def set_aside(self) -> bool:
        """Clones what is left, if it lies on devices that have room for it twice: then the state may change at once.

        A clone takes a hundredth of the time of the way to the host, which can follow at leisure. What little lies on
        the host (an Adam's counts of steps) is settled.

        Returns:
            Whether it was done; false: nothing was.

        Raises:
            TornSnapshotError: See `settle`.
        """
        left = [name for name in self._left if self._source[name].is_cuda]
        here = [name for name in self._left if not self._source[name].is_cuda]
        if not left or sum(map(self._num_bytes, here)) > _SMALL_BYTES:
            return False
        needed_bytes = dict.fromkeys(self._streams, 0)
        for name in left:
            needed_bytes[self._source[name].device] += self._num_bytes(name)
        if any(_free_bytes(device) < _ROOM_FACTOR * needed for device, needed in needed_bytes.items()):
            return False
        self.settle(here)
        clones = {name: self._source[name].clone() for name in left}
        for device in needed_bytes:
            torch.cuda.current_stream(device).synchronize()
        for name in left:
            if _note(name, self._live[name]) != self._noted[name]:
                raise self._torn(name)
        self._source |= clones
        self._live |= clones
        self._noted |= {name: _note(name, clone) for name, clone in clones.items()}
        return True

    def settle(self, names: Iterable[str], helper: Executor | None = None) -> None:
        """Copies tensors and checks them now; what becomes of them afterwards is no concern of this snapshot.

        Args:
            names: Which.
            helper: A second thread, which copies half of the bytes; None: this one copies all.

        Raises:
            TornSnapshotError: One has changed since the start; the buffer's content is worth nothing.
        """
        names = list(names)
        left = [name for name in names if name in self._left]
        mine, theirs = (left, []) if helper is None else self._halves(left)
        helped = None if helper is None else helper.submit(self._copy_all, theirs)
        self._copy_all(mine)
        if helped is not None:
            helped.result()
        for stream in self._streams.values():
            stream.synchronize()
        if names and not wait_for_others():  # whoever copied them: another thread, or `advance`
            raise TornSnapshotError(
                "expected to see every other thread rest or run while a copy was checked, got one without a processor "
                f"for {LONGEST_SECONDS:g} s; nothing was saved: give the training fewer threads, or more cores"
            )
        for name in names:
            tensor = self._live[name]
            if _note(name, tensor) != self._noted[name]:
                raise self._torn(name)
        for name in names:
            tensor = self._source[name]
            if _is_plain(tensor) and not self._agrees(name, tensor):
                raise self._torn(name)
            del self._unchecked[name]

    def finish(self, helper: Executor | None = None) -> None:
        """Settles all that is left.

        Args:
            helper: See `settle`.

        Raises:
            TornSnapshotError: See `settle`.
        """
        self.settle(self._unchecked, helper)

    def _agrees(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor is its copy, as far as it is compared."""
        return self._comparison.agrees(tensor, self._buffer, self._entries[name].start, self._pauses.get(name, ()))

    def _torn(self, name: str) -> TornSnapshotError:
        return TornSnapshotError(
            f"expected {name!r} to stand still while it was copied, got a change; nothing was saved: call "
            "wait_copy_complete() before whatever writes to it (an attached optimizer does so by itself)"
        )


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its bytes lie here, one after the other."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def _free_bytes(device: torch.device) -> int:
    """What can be allocated on a device: what nobody has, and what PyTorch keeps for later."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(free_bytes + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _note(name: str, tensor: torch.Tensor) -> tuple[int, int]:
    """What changes when the tensor does."""
    if tensor.is_inference():
        cure = "clone() it outside of inference_mode before it is saved"
        raise ConfigError.of(f"{name!r} to count its changes", "a tensor made under torch.inference_mode", cure)
    return tensor._version, tensor.data_ptr()
