"""Own memory: the buffers that a rank's state is copied into, and the first tier that a snapshot lies in.

The buffers are files in the machine's shared memory, mapped and touched beforehand, so that a copy meets no page fault
(nine times faster here than into fresh pages), and so that they outlive the process: one that crashed finds its state
where it left it and is back in the time of a memcpy. They do not outlive the machine; the other tiers are for that.

One buffer costs the state's size once. While it is copied into, own memory holds nothing, and a crash in that moment
falls back on the tier that the last snapshot had reached before. A second buffer closes that gap for the same again.

Files of rank R, buffer B: ``rank-R.B.data``; ``rank-R.B.json``, its manifest; ``rank-R.B.commit``, the record: removed
before the buffer is touched, written after all ranks have voted. Any rank's record will do: whoever reads another's
shard checks it against the record, as everywhere. Invariant: what a record in here names was whole when it was written.

Shared memory in huge pages, which no setting of the system has to allow: a snapshot on its way costs half as much.

A buffer of small pages makes everything dearer that goes through it. The disk is given its 4 KiB pieces one by one (six
times the processor time of a write that bypasses the page cache), and copying and hashing wait for the processor's page
tables. File systems in memory give huge pages only where they were mounted so, which is nowhere the default. But
``MADV_COLLAPSE`` (Linux 6.1) puts small pages together on demand, whatever the settings say. It wants a mapping that is
aligned as the file is, so one is laid over an address that is. Where the system cannot do it, pages stay small.

Price: it is one more copy, once, behind the back of the first saves. Measured: decision 0008.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final

import torch

from shade.checkpoint._buffer.shared_memory_folder import own_folder, own_records
from shade.checkpoint._codecs.base import standing_alone
from shade.checkpoint._format.manifest import Commit, Manifest
from shade.checkpoint._tiers.tier import Shard, Tier
from shade.errors import ConfigError, RunInUseError, StorageError, StorageFullError
from shade.types import Bytes

_PAUSES_SECONDS: Final = (1, 2, 4, 8, 16, 32)
"""Between tries to make a buffer's pages huge: some are being written to a disk each time."""


class _SnapshotBuffer:
    """One mapped file, every page of it in memory and ours to write.

    Args:
        path: Of the file; made, or made larger.
        num_bytes: Least length.
        may_be_private: Where there is not that much shared memory, take memory that ends with the process.

    Raises:
        StorageFullError: There is not that much shared memory, and it must be shared.
    """

    def __init__(self, path: Path, num_bytes: int, *, may_be_private: bool) -> None:
        self.num_bytes = max(1, -(-num_bytes // HUGE_BYTES)) * HUGE_BYTES
        self.why_private: str | None = None
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if os.fstat(descriptor).st_size < self.num_bytes:
                os.posix_fallocate(descriptor, 0, self.num_bytes)  # now, and not as a SIGBUS in mid-copy
            os.ftruncate(descriptor, self.num_bytes)
            self.tensor = map_aligned(descriptor, self.num_bytes)
        except OSError as error:
            os.unlink(path)
            free = shutil.disk_usage(path.parent).free
            self.why_private = (
                f"expected {self.num_bytes:,} bytes of shared memory in {path.parent}, got {free:,} free "
                f"({error.strerror}); free some, or mount it larger (docker run --shm-size)"
            )
            if not may_be_private:
                raise StorageFullError(self.why_private) from error
            self.tensor = torch.frombuffer(mmap.mmap(-1, self.num_bytes), dtype=torch.uint8)
        finally:
            os.close(descriptor)
        make_resident(self.tensor)
        self._pinned = torch.cuda.is_available() and self._register()
        self._closed = threading.Event()
        self._growing = threading.Thread(target=self._make_huge, name="shade-huge-pages", daemon=True)
        if not self._pinned:  # else they are huge already, where that can be
            self._growing.start()

    def _make_huge(self) -> None:
        """In a thread that has time: the buffer may be used meanwhile."""
        for pause_seconds in _PAUSES_SECONDS:
            if make_huge(self.tensor, lambda: not self._closed.is_set()) or self._closed.wait(pause_seconds):
                return

    def _register(self) -> bool:
        """Pins the pages, so that a device copies into them by itself; huge ones, as they cannot become so later."""
        make_huge(self.tensor)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return int(runtime.cudaHostRegister(self.tensor.data_ptr(), self.num_bytes, 0)) == 0

    def close(self) -> None:
        """Lets go; views that are still about keep the mapping."""
        self._closed.set()
        if self._growing.is_alive():
            self._growing.join()
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())  # type: ignore[no-untyped-call]
            self._pinned = False
        self.tensor = torch.empty(0, dtype=torch.uint8)


class SharedMemoryTier(Tier):
    """One rank's buffers, and what the other ranks of this machine left beside them.

    Args:
        run: The run id.
        rank: Whose buffers are written.
        num_buffers: How many, ≥ 1.
        has_others: Whether snapshots go to other tiers, too: then a machine with too little shared memory does without
            own memory, and saves all the same.
        folder: Parent of the run's folder; by default the machine's shared memory.

    Raises:
        ConfigError: The folder cannot be made, or is somebody else's.
    """

    name: ClassVar[str] = "own memory"
    every_rank_commits: ClassVar[bool] = True
    holds_plain: ClassVar[bool] = True

    def __init__(
        self, run: str, rank: int, *, num_buffers: int = 1, has_others: bool = False, folder: Path | None = None
    ) -> None:
        self.run, self.rank, self._has_others = run, rank, has_others
        self.folder = own_folder(run, folder)
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
        self._open: dict[Path, memoryview] = {}

    def claim(self) -> None:
        """Makes this rank's buffers this process's, until `close`; a process that dies loses its claim.

        Two trainings that use one run id, each with storage of its own, meet nowhere else: and each would hash and
        store what the other writes into the very same memory.

        Raises:
            RunInUseError: A live process has them.
        """
        claimed = os.open(self._path(self.rank, "claim", "lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(claimed)
            raise RunInUseError.of(
                "a run id of one's own on this machine",
                self.run,
                f"another process keeps rank {self.rank}'s snapshots in {self.folder}: choose another id, or end it",
            ) from None
        self._claimed = claimed

    def _path(self, rank: int, place: str, kind: str) -> Path:
        return self.folder / f"rank-{rank}.{place}.{kind}"

    # ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, num_bytes: int) -> tuple[str, torch.Tensor]:
        """The next buffer, to be copied into; what lay in it ceases to exist.

        Args:
            num_bytes: Length of the shard's data.

        Returns:
            The place, the same on every rank, and the buffer: uint8 (≥ num_bytes,).

        Raises:
            StorageFullError: Not enough shared memory.
        """
        number, place = self._next, str(self._next)
        self.discard(place)
        buffer = self._reserved(number, num_bytes)
        self.skip()
        return place, buffer.tensor

    def skip(self) -> None:
        """Lets a turn pass: of a save that this rank cannot begin, and others may have."""
        self._next = (self._next + 1) % len(self._buffers)

    def reserve(self, num_bytes: int) -> None:
        """Makes the buffers before they are needed; what lies in them is lost if they are too small.

        Args:
            num_bytes: Length of the shard's data.

        Raises:
            StorageFullError: Not enough shared memory.
        """
        for number in range(len(self._buffers)):
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

    def prepare(self, step: int, shard_bytes: Sequence[int]) -> str:
        """The place begun last: the data is in it already."""
        return str((self._next - 1) % len(self._buffers))

    def put(self, place: str, shard: Shard) -> None:
        """Writes the manifest; the chunks are where they are, if in a buffer that does not end with this process."""
        buffer = self._buffers[int(place)]
        if buffer is not None and buffer.why_private is not None:
            raise StorageFullError(buffer.why_private)
        self._write(self._path(self.rank, place, "json"), shard.manifest.to_bytes())

    def commit(self, place: str, record: Commit) -> None:
        """See `Tier`."""
        self._write(self._path(self.rank, place, "commit"), record.to_bytes())

    def _write(self, path: Path, content: bytes) -> None:
        try:
            aside = path.with_suffix(".new")
            aside.write_bytes(content)
            aside.replace(path)
        except OSError as error:
            raise StorageError(f"could not write {path}: {error.strerror}") from error

    # ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def held(self) -> Mapping[str, Commit]:
        """See `Tier`; of two records for one place the newer counts."""
        damaged: list[str] = []
        found = own_records(self.folder, damaged)
        self.damaged = damaged
        return found

    def read_manifest(self, place: str, rank: int, copy: int = 0) -> bytes | None:
        """See `Tier`."""
        try:
            return self._path(rank, place, "json").read_bytes()
        except OSError:
            return None

    def read_chunks(self, place: str, manifest: Manifest, numbers: Sequence[int], copy: int = 0) -> list[Bytes | None]:
        """See `Tier`; without a codec these are views of the buffer, no copies."""
        data = self._data(place, manifest)
        codec = standing_alone(manifest.codec if manifest.version == 1 else "none")
        item_bytes = manifest.item_bytes
        found: list[Bytes | None] = []
        for number in numbers:
            start = number * manifest.chunk_bytes
            stop = min(start + manifest.chunk_bytes, manifest.num_bytes)
            found.append(None if stop > len(data) else codec.encode(data[start:stop], item_bytes))
        return found

    def in_place(self, place: str, manifest: Manifest) -> memoryview | None:
        """See `Tier`. This rank's own only: another rank of this machine may begin a save whenever it has its state."""
        if manifest.rank != self.rank or (manifest.version == 1 and manifest.codec != "none"):
            return None
        data = self._data(place, manifest)
        return data[: manifest.num_bytes] if len(data) >= manifest.num_bytes else None

    def _data(self, place: str, manifest: Manifest) -> memoryview:
        """The buffer of one rank of this machine; empty where it left none."""
        own = self._buffers[int(place)] if manifest.rank == self.rank and int(place) < len(self._buffers) else None
        if own is not None:
            return memoryview(own.tensor.numpy().data)
        path = self._path(manifest.rank, place, "data")
        if path not in self._open:
            try:
                with path.open("rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError):
                return memoryview(b"")
            self._open[path] = memoryview(mapped)
        return self._open[path]

    def repair(self, place: str, manifest: Manifest, damaged: Mapping[int, Bytes]) -> None:
        """Not here: what is damaged in own memory is overwritten by the next snapshot anyway."""

    # ── ending ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def discard(self, place: str) -> None:
        """Removes this rank's record and manifest; the buffer stays for the next snapshot."""
        for kind in ("commit", "json"):
            self._path(self.rank, place, kind).unlink(missing_ok=True)

    def close(self) -> None:
        """Lets go of the buffers; their files stay, for a process that comes after."""
        for buffer in filter(None, self._buffers):
            buffer.close()
        self._buffers = [None] * len(self._buffers)
        self._open.clear()
        if self._claimed is not None:
            os.close(self._claimed)
            self._claimed = None

    def vacate(self) -> None:
        """Takes this rank's files away, and the folder with the last of them: there is no snapshot in it."""
        self.close()
        for path in self.folder.glob(f"rank-{self.rank}.*"):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # another rank's are there still, or it is gone
            self.folder.rmdir()

    def remove(self) -> None:
        """Ends the run's own memory on this machine: nobody will come back for it."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)


HUGE_BYTES: Final = 2 * 2**20
"""A huge page of x86-64 and of most others; where they are larger, pages stay small."""
_POPULATE_WRITE: Final = 23
"""``MADV_POPULATE_WRITE``, Linux 5.14; Python has no name for it yet."""
_COLLAPSE: Final = 25
"""``MADV_COLLAPSE``, Linux 6.1; nor for that."""
_PIECE_BYTES: Final = 16 * HUGE_BYTES
"""At a time: a tenth of a second where the system has to clear space first."""
_MAP_FIXED: Final = 0x10
_libc = ctypes.CDLL(None, use_errno=True)
"""Without the interpreter's lock: touching 1 GiB takes a second, and training goes on meanwhile."""
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p


def map_aligned(descriptor: int, num_bytes: int) -> torch.Tensor:
    """Maps a file, shared, where its pages can become huge ones.

    Args:
        descriptor: Of the file.
        num_bytes: Its length, a multiple of `HUGE_BYTES`.

    Returns:
        uint8 (num_bytes,); the mapping lives as long as the tensor and its views.

    Raises:
        OSError: It cannot be mapped.
    """
    # Longer by a huge page, to have an aligned address in it; and it takes what is laid over it away when it goes.
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
    """Touches every page, so that a copy meets no page fault; huge ones where the system gives them by itself.

    Args:
        memory: uint8 (n,), on the CPU; its content stays.
    """
    _libc.madvise(memory.data_ptr(), memory.nbytes, mmap.MADV_HUGEPAGE)
    if _libc.madvise(memory.data_ptr(), memory.nbytes, _POPULATE_WRITE) != 0:
        memory[:: mmap.PAGESIZE].add_(0)


def make_huge(memory: torch.Tensor, goes_on: Callable[[], bool] = lambda: True) -> bool:
    """Puts small pages together, while whoever uses the memory goes on doing so.

    Args:
        memory: Of `map_aligned`; its content stays.
        goes_on: Asked before each piece: whether it is still worth the trouble.

    Returns:
        True: there is nothing left to do. False: a page that is just being written to a disk stays as it is, so that
        another try may find more.
    """
    is_done = True
    for start in range(0, memory.nbytes, _PIECE_BYTES):
        length = min(_PIECE_BYTES, memory.nbytes - start)
        if not goes_on():
            return True
        if _libc.madvise(memory.data_ptr() + start, length, _COLLAPSE) != 0:
            why = ctypes.get_errno()
            if why == errno.EINVAL:
                return True  # no such word here, or no huge pages
            is_done = is_done and why != errno.EAGAIN
    return is_done
