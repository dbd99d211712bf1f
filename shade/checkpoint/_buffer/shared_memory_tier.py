"""The shared-memory tier: the buffers that a rank's state is copied into, where a snapshot lies first.

The buffers are files in the machine's shared memory, mapped and touched beforehand. They outlive the process: a crashed
process finds its state where it left it. They do not outlive the machine; the other tiers do. One buffer costs the
state's size once, and holds no snapshot while it is copied into; a second one closes that gap.

Files of rank R, buffer B: ``rank-R.B.data``; ``rank-R.B.json``, its manifest; ``rank-R.B.commit``, the record: removed
before the buffer is touched, written after all ranks have voted; ``rank-R.elsewhere``, the sequence of the newest
snapshot that another tier has as well. Invariant: the snapshot of a record in this tier was
whole when the record was written. Decision 0008 has the measurements of huge pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, Final

import torch
from typing_extensions import override

from shade.checkpoint._buffer.shared_memory_folder import ABOUT, claimed, own_folder, own_records, remove_folder
from shade.checkpoint._codecs.base import standalone_codec
from shade.checkpoint._format.manifest import Commit, Manifest
from shade.checkpoint._tiers.tier import Shard, Tier
from shade.errors import ConfigError, RunInUseError, StorageError, StorageFullError
from shade.process import register_file_memory, replacing, unregister_file_memory
from shade.types import Bytes

_PAUSES_SECONDS: Final = (1, 2, 4, 8, 16, 32)
"""Pauses between attempts to make a buffer's pages huge: pages that are being written to a disk stay small."""


class _SnapshotBuffer:
    """One mapped file, with every page in memory and writable.

    Args:
        path: Path of the file, which is made, or made larger.
        num_bytes: Least length.
        may_be_private: Whether private memory, which ends with the process, is used if shared memory is too small.

    Raises:
        StorageFullError: Shared memory is too small, and private memory is not allowed.
    """

    def __init__(self, path: Path, num_bytes: int, *, may_be_private: bool) -> None:
        self.num_bytes = _whole_pages(num_bytes)
        self.why_private: str | None = None
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._release_file = weakref.finalize(self, _release_file, descriptor)
        self._release_file.atexit = False  # a daemon thread may be sending from it
        try:
            if os.fstat(descriptor).st_size < self.num_bytes:
                os.posix_fallocate(descriptor, 0, self.num_bytes)  # now, and not as a SIGBUS in mid-copy
            os.ftruncate(descriptor, self.num_bytes)
            self.tensor = map_aligned(descriptor, self.num_bytes)
            # The file stays open, so that a Redis server's unix socket takes a chunk from its pages without a copy.
            register_file_memory(descriptor, self.tensor.data_ptr(), self.num_bytes)
        except OSError as error:
            self._release_file()
            os.unlink(path)
            free = shutil.disk_usage(path.parent).free
            self.why_private = (
                f"expected {self.num_bytes:,} bytes of shared memory in {path.parent}, got {free:,} free "
                f"({error.strerror}); free some, or mount it larger (docker run --shm-size)"
            )
            if not may_be_private:
                raise StorageFullError(self.why_private) from error
            self.tensor = torch.frombuffer(mmap.mmap(-1, self.num_bytes), dtype=torch.uint8)
        # A copy then meets no page fault, which is nine times faster than into fresh pages.
        make_resident(self.tensor)
        self._pinned = torch.cuda.is_initialized() and self._register()  # type: ignore[no-untyped-call]
        self._closed = threading.Event()
        self._growing = threading.Thread(target=self._make_huge, name="shade-huge-pages", daemon=True)
        if not self._pinned:  # else they are huge already, where that can be
            self._growing.start()

    def _make_huge(self) -> None:
        """Makes the pages huge, in a background thread; the buffer may be used meanwhile."""
        # With pages of 4 KiB a disk takes the buffer in small pieces, at six times the CPU time, and copying waits for
        # page tables. No system's default gives huge pages to a file in memory, but MADV_COLLAPSE puts them together
        # later.
        for pause_seconds in _PAUSES_SECONDS:
            if make_huge(self.tensor, lambda: not self._closed.is_set()) or self._closed.wait(pause_seconds):
                return

    def _register(self) -> bool:
        """Pins the pages, so that a device can copy into them by itself."""
        make_huge(self.tensor)  # pinned pages cannot become so
        used = [each for each in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(each)]
        if not used:
            return False
        register = torch.cuda.cudart().cudaHostRegister  # type: ignore[no-untyped-call]
        # In a thread of its own: the next kernel of the same thread would raise its failure. On a GPU that is used: a
        # thread begins on GPU 0, and would make a context there.
        with ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(used[0],)) as apart:
            return int(apart.submit(register, self.tensor.data_ptr(), self.num_bytes, 0).result()) == 0

    def close(self) -> None:
        """Frees the buffer; views that still exist keep the mapping."""
        self._release_file()
        self._closed.set()
        if self._growing.is_alive():
            self._growing.join()
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())  # type: ignore[no-untyped-call]
            self._pinned = False
        self.tensor = torch.empty(0, dtype=torch.uint8)


def _release_file(descriptor: int) -> None:
    unregister_file_memory(descriptor)
    os.close(descriptor)


class SharedMemoryTier(Tier):
    """One rank's buffers, and those of the other ranks of this machine.

    Args:
        run: The run id.
        rank: The rank whose buffers are written.
        identity: Name of run and storage together (`_tiers.identity`): snapshots under another one are not seen.
        num_buffers: Number of buffers, ≥ 1.
        has_others: Whether snapshots also go to other tiers: then too little shared memory is no failure.
        folder: Parent of the run's folder; by default the machine's shared memory.

    Raises:
        ConfigError: The folder cannot be made, or belongs to another user.
    """

    name: ClassVar[str] = "shared memory"
    every_rank_commits: ClassVar[bool] = True
    holds_plain: ClassVar[bool] = True

    def __init__(
        self,
        run: str,
        rank: int,
        *,
        identity: str = "alone",
        num_buffers: int = 1,
        has_others: bool = False,
        folder: Path | None = None,
    ) -> None:
        self.run, self.rank, self._has_others = run, rank, has_others
        self.folder = own_folder(run, folder) / identity
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            cure = "make it writable, or remove what is in its place"
            raise ConfigError.of("a folder for snapshot buffers", f"{self.folder}: {error.strerror}", cure) from error
        if self.folder.stat().st_uid != os.getuid():
            raise ConfigError.of("a folder of our own", str(self.folder), "another user's lies there; remove it")
        self._buffers: list[_SnapshotBuffer | None] = [None] * num_buffers
        self._next = 0
        self._lock = threading.Lock()
        self._claimed: int | None = None
        self._process = os.getpid()
        self._open: dict[Path, memoryview] = {}
        left = self.held()  # read before any rank of this machine can begin a save, so all take the same turn
        if left:
            self.spare(max(left, key=lambda location: left[location].sequence))

    def claim(self, about: str = "") -> None:
        """Claims this rank's buffers for this object until `close`; a process that dies loses its claim.

        Two trainings without storage and with one run id meet only here: without the claim, each would hash and store
        what the other writes into the same memory.

        Args:
            about: Whose they are, for users.

        Raises:
            RunInUseError: They are claimed, by a live process or by this one.
        """
        path = self._path(self.rank, "claim", "lock")
        expected = "a run id of one's own on this machine"
        if (self._process, path) in claimed:
            cure = "this process has another Checkpointer of that run: close() it first, or choose another id"
            raise RunInUseError.of(expected, self.run, cure)
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise RunInUseError.of(
                expected,
                self.run,
                f"another process keeps rank {self.rank}'s snapshots in {self.folder}: choose another id, or end it; "
                "if it is a rank of this job, call init_process_group before; load_weights reads beside it",
            ) from None
        self._claimed = lock
        claimed.add((self._process, path))
        (self.folder / ABOUT).write_text(about)

    def _path(self, rank: int, location: str, kind: str) -> Path:
        return self.folder / f"rank-{rank}.{location}.{kind}"

    # ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, num_bytes: int) -> tuple[str, torch.Tensor]:
        """Takes the next buffer, uint8 (≥ num_bytes,), to be copied into; the snapshot in it ceases to exist. Returns
        the location, the same on every rank, and the buffer. Raises `StorageFullError` if there is not enough shared
        memory."""
        number, location = self._next, str(self._next)
        self.discard(location)
        buffer = self._reserved(number, num_bytes)
        self.skip()
        return location, buffer.tensor

    def skip(self) -> None:
        """Skips a buffer, for a save that this rank cannot begin and other ranks may have begun."""
        self._next = (self._next + 1) % len(self._buffers)

    def spare(self, location: str) -> None:
        """Takes the other buffers first, so that the snapshot at a location stays as long as it can."""
        self._next = (int(location) + 1) % len(self._buffers)

    def reserve(self, num_bytes: int) -> None:
        """Makes the buffers before they are needed; one with a snapshot of another length stays until its turn."""
        for number in range(len(self._buffers)):
            data = self._path(self.rank, str(number), "data")
            is_held = data.exists() and data.with_suffix(".commit").exists()
            if not is_held or data.stat().st_size == _whole_pages(num_bytes):
                self._reserved(number, num_bytes)

    def _reserved(self, number: int, num_bytes: int) -> _SnapshotBuffer:
        with self._lock:
            buffer = self._buffers[number]
            if buffer is None or buffer.num_bytes < num_bytes:
                if buffer is not None:
                    buffer.close()
                self._buffers[number] = None
                path = self._path(self.rank, str(number), "data")
                buffer = self._buffers[number] = _SnapshotBuffer(path, num_bytes, may_be_private=self._has_others)
            return buffer

    @override
    def prepare(self, step: int, shard_bytes: Sequence[int]) -> str:
        # The location begun last: the data is in it already.
        return str((self._next - 1) % len(self._buffers))

    @override
    def put(self, location: str, shard: Shard) -> None:
        # Only the manifest: the chunks lie in the buffer already, unless it is private and ends with this process.
        buffer = self._buffers[int(location)]
        if buffer is not None and buffer.why_private is not None:
            raise StorageFullError(buffer.why_private)
        self._write(self._path(self.rank, location, "json"), shard.manifest.to_bytes())

    @override
    def commit(self, location: str, record: Commit) -> None:
        self._write(self._path(self.rank, location, "commit"), record.to_bytes())

    def _write(self, path: Path, content: bytes) -> None:
        try:
            with replacing(path) as beside:
                beside.write_bytes(content)
        except OSError as error:
            raise StorageError(f"could not write {path}: {error.strerror}") from error

    # ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @override
    def held(self, known: Mapping[str, Commit] | None = None) -> Mapping[str, Commit]:
        damaged: list[str] = []
        found = own_records(self.folder, self.run, damaged)
        self.damaged = damaged
        return found

    @override
    def read_manifest(self, location: str, rank: int, copy: int = 0) -> bytes | None:
        try:
            return self._path(rank, location, "json").read_bytes()
        except OSError:
            return None

    @override
    def read_chunks(
        self, location: str, manifest: Manifest, numbers: Sequence[int], copy: int = 0
    ) -> list[Bytes | None]:
        data = self._data(location, manifest)
        codec = standalone_codec(manifest.codec if manifest.version == 1 else "none")
        item_bytes = manifest.item_bytes
        is_own = self._is_own(manifest)
        found: list[Bytes | None] = []
        for number in numbers:
            start = number * manifest.chunk_bytes
            stop = min(start + manifest.chunk_bytes, manifest.num_bytes)
            # What another process may write to is copied before it is verified, not after.
            piece = data[start:stop] if is_own else memoryview(bytes(data[start:stop]))
            found.append(None if stop > len(data) else codec.encode(piece, item_bytes))
        return found

    def _is_own(self, manifest: Manifest) -> bool:
        """Whether no other process writes to the buffer that a shard lies in."""
        return manifest.rank == self.rank and self._claimed is not None

    @override
    def in_place(self, location: str, manifest: Manifest) -> memoryview | None:
        # This rank's own only: another rank of this machine may begin a save as soon as it has its state.
        if not self._is_own(manifest) or (manifest.version == 1 and manifest.codec != "none"):
            return None
        data = self._data(location, manifest)
        return data[: manifest.num_bytes] if len(data) >= manifest.num_bytes else None

    def _data(self, location: str, manifest: Manifest) -> memoryview:
        """Returns the buffer of one rank of this machine; empty if it left none."""
        own = (
            self._buffers[int(location)] if manifest.rank == self.rank and int(location) < len(self._buffers) else None
        )
        if own is not None:
            return memoryview(own.tensor.numpy().data)
        path = self._path(manifest.rank, location, "data")
        if path not in self._open:
            try:
                with path.open("rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError):
                return memoryview(b"")
            self._open[path] = memoryview(mapped)
        return self._open[path]

    @override
    def repair(self, location: str, manifest: Manifest, damaged: Mapping[int, Bytes]) -> None:
        pass  # the next snapshot overwrites what is damaged

    # ── ending ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @override
    def discard(self, location: str) -> None:
        # Record and manifest go; the buffer stays for the next snapshot.
        for kind in ("commit", "json"):
            self._path(self.rank, location, kind).unlink(missing_ok=True)

    def close(self) -> None:
        """Frees the buffers; their files stay, for a process that restarts."""
        for buffer in filter(None, self._buffers):
            buffer.close()
        self._buffers = [None] * len(self._buffers)
        self._open.clear()
        if self._claimed is not None:
            os.close(self._claimed)
            self._claimed = None
            claimed.discard((self._process, self._path(self.rank, "claim", "lock")))

    def vacate(self) -> None:
        """Removes this rank's files, and the folder with the last rank's: there is no snapshot in it."""
        self.close()
        for path in self.folder.glob(f"*rank-{self.rank}.*"):
            path.unlink(missing_ok=True)
        if not any(self.folder.glob("rank-*")):
            (self.folder / ABOUT).unlink(missing_ok=True)
            remove_folder(self.folder, is_empty=True)

    def remove(self) -> None:
        """Removes all of the run's buffers on this machine."""
        self.close()
        remove_folder(self.folder)

    def note_elsewhere(self, sequence: int) -> None:
        """Notes that another tier has the snapshot of a save as well, so that this copy may go."""
        with contextlib.suppress(FileNotFoundError):  # what was freed by hand needs no note
            (self.folder / f"rank-{self.rank}.elsewhere").write_text(str(sequence))


HUGE_BYTES: Final = 2 * 2**20
"""Length of a huge page on x86-64 and most other processors; where they are longer, pages stay small."""


def _whole_pages(num_bytes: int) -> int:
    return max(1, -(-num_bytes // HUGE_BYTES)) * HUGE_BYTES


_POPULATE_WRITE: Final = 23
"""``MADV_POPULATE_WRITE``, Linux 5.14; Python has no name for it yet."""
_COLLAPSE: Final = 25
"""``MADV_COLLAPSE``, Linux 6.1; Python has no name for it either."""
_PIECE_BYTES: Final = 16 * HUGE_BYTES
"""Bytes made huge by one call: a tenth of a second where the system has to clear space first."""
_MAP_FIXED: Final = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
"""Calls release the interpreter's lock: touching 1 GiB takes a second, and training continues meanwhile."""
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p


def map_aligned(descriptor: int, num_bytes: int) -> torch.Tensor:
    """Maps a file, shared, at an address where its pages can become huge; the mapping lives as long as the tensor and
    its views. ``num_bytes`` is a multiple of `HUGE_BYTES`. Raises `OSError` if it cannot be mapped."""
    # A huge page longer, so that it contains an aligned address. When it is unmapped, so is the file's mapping in it.
    reserved = mmap.mmap(-1, num_bytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(reserved, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_BYTES
    address = whole.data_ptr() + start
    access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(address, num_bytes, access, flags, descriptor, 0) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return whole[start : start + num_bytes]


def make_resident(memory: torch.Tensor) -> None:
    """Touches every page of uint8 (n,) on the CPU, so that a copy meets no page fault; the content stays."""
    _libc.madvise(memory.data_ptr(), memory.nbytes, mmap.MADV_HUGEPAGE)
    if _libc.madvise(memory.data_ptr(), memory.nbytes, _POPULATE_WRITE) != 0:
        memory[:: mmap.PAGESIZE].add_(0)


def make_huge(memory: torch.Tensor, goes_on: Callable[[], bool] = lambda: True) -> bool:
    """Puts small pages together, while other threads use the memory; ends when ``goes_on`` returns False.

    Returns whether nothing is left to do; False if a page was being written to a disk, so that another call may do
    more.
    """
    is_done = True
    for start in range(0, memory.nbytes, _PIECE_BYTES):
        length = min(_PIECE_BYTES, memory.nbytes - start)
        if not goes_on():
            return True
        if _libc.madvise(memory.data_ptr() + start, length, _COLLAPSE) != 0:
            why = ctypes.get_errno()
            if why == errno.EINVAL:
                return True  # the system does not know the call, or has no huge pages
            is_done = is_done and why != errno.EAGAIN
    return is_done
