"""A disk in memory that forgets what was not synced, in every way in which disks do.

What a program sees is the *live* state. What is on the medium is the *kept* one: a file's bytes as of its last sync, a
folder's names as of its last `Disk.sync_directory`. A power failure leaves the kept state and, of what came later, as
much as the disk had happened to write: nothing, everything, the names without the bytes, or some names and some
sectors in any order. `Disk.after_power_failure` makes each of these.
"""

from __future__ import annotations

import errno
import os
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from typing_extensions import override

from shade.storage.base import PARTIAL
from tests.simulation.torture.world import Act, World

SECTOR_BYTES: Final = 512
OUTCOMES: Final = ("kept", "lost", "names", "torn")
"""What becomes of the unsynced: all of it stays, none, the names without their bytes, or a random part."""
_ROOM_BYTES: Final = 2**40
_UNFINISHED: Final = re.compile(re.escape(PARTIAL) + "[0-9a-f]+")
"""These names are random; what is done shall be called the same each time."""


@dataclass
class _File:
    live: bytearray = field(default_factory=bytearray)
    kept: bytes = b""


@dataclass
class _Folder:
    live: dict[str, _Node] = field(default_factory=dict)
    kept: dict[str, _Node] = field(default_factory=dict)
    pending: list[tuple[str, _Node | None, str | None]] = field(default_factory=list)
    """Since the last sync: a name, what it means now (None: nothing), and the name that it had before."""

    def put(self, name: str, node: _Node | None, before: str | None = None) -> None:
        self.pending.append((name, node, before))
        _apply(self.live, (name, node, before))


_Node: TypeAlias = "_File | _Folder"


def _apply(names: dict[str, _Node], change: tuple[str, _Node | None, str | None]) -> None:
    name, node, before = change
    if before is not None:
        names.pop(before, None)
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


class Disk:
    """The tree of folders."""

    def __init__(self) -> None:
        self.root = _Folder()

    def node(self, path: str) -> _Node | None:
        """What a path means, live."""
        node: _Node | None = self.root
        for part in filter(None, path.split("/")):
            node = node.live.get(part) if isinstance(node, _Folder) else None
        return node

    def folder(self, path: str) -> _Folder:
        """The folder of that path.

        Args:
            path: Absolute.

        Returns:
            The folder.

        Raises:
            FileNotFoundError: There is none.
            NotADirectoryError: It is a file.
        """
        node = self.node(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if isinstance(node, _File):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return node

    def file(self, path: str) -> _File:
        """The file of that path.

        Args:
            path: Absolute.

        Returns:
            The file.

        Raises:
            FileNotFoundError: There is none.
            IsADirectoryError: It is a folder.
        """
        node = self.node(path)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if isinstance(node, _Folder):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        return node

    def files(self) -> Iterator[tuple[str, bytearray]]:
        """Path and live content of every file."""
        left: list[tuple[str, _Folder]] = [("", self.root)]
        while left:
            path, folder = left.pop()
            for name, node in sorted(folder.live.items()):
                if isinstance(node, _Folder):
                    left.append((f"{path}/{name}", node))
                else:
                    yield f"{path}/{name}", node.live

    def after_power_failure(self, outcome: str, dice: random.Random) -> Disk:
        """What is there when the power is back; also a copy, with outcome ``kept``.

        Args:
            outcome: One of `OUTCOMES`.
            dice: For ``torn``.

        Returns:
            A disk of its own; everything on it is synced.
        """
        made = Disk()
        left = [(self.root, made.root)]
        while left:
            old, new = left.pop()
            for name, node in _names_after(old, outcome, dice).items():
                if isinstance(node, _Folder):
                    folder = new.live[name] = _Folder()
                    left.append((node, folder))
                else:
                    content = _bytes_after(node, outcome, dice)
                    new.live[name] = _File(bytearray(content), content)
            new.kept = dict(new.live)
        return made


def _names_after(folder: _Folder, outcome: str, dice: random.Random) -> dict[str, _Node]:
    if outcome in ("kept", "names"):
        return dict(folder.live)
    names = dict(folder.kept)
    if outcome == "torn":
        for change in folder.pending:
            if dice.random() < 0.5:
                _apply(names, change)
    return names


def _bytes_after(file: _File, outcome: str, dice: random.Random) -> bytes:
    if outcome == "kept":
        return bytes(file.live)
    if outcome in ("lost", "names") or file.live == file.kept:
        return file.kept
    length = dice.choice([len(file.live), dice.randint(0, len(file.live))])
    torn = bytearray(file.kept[:length].ljust(length, b"\0"))
    for start in range(0, length, SECTOR_BYTES):
        if dice.random() < 0.5:
            torn[start : start + SECTOR_BYTES] = file.live[start : min(start + SECTOR_BYTES, length)]
    return bytes(torn)


def flipped(content: bytes | bytearray | memoryview, dice: random.Random) -> bytearray:
    """A copy with one bit the other way; empty stays empty."""
    wrong = bytearray(content)
    if wrong:
        bit = dice.randrange(8 * len(wrong))
        wrong[bit // 8] ^= 1 << bit % 8
    return wrong


class DiskView:
    """The disk as one process uses it: `shade.storage.directory.FileOperations`.

    Args:
        world: Counts what is done, and makes it fail.
        disk: What it is done to.
        actor: The process.
    """

    def __init__(self, world: World, disk: Disk, actor: str) -> None:
        self.world, self.disk, self.actor = world, disk, actor

    def do(self, act: Act) -> object:
        """Performs an operation; every one can fail with ``EIO``, those that need room with ``ENOSPC``."""
        act.place, act.target = "disk", _UNFINISHED.sub(PARTIAL, act.target)

        def fails(number: int) -> object:
            raise OSError(number, os.strerror(number), act.target)

        act.errors = {"EIO": lambda: fails(errno.EIO)}
        if act.name in ("create", "write", "sync", "rename", "make_directory"):
            act.errors["ENOSPC"] = lambda: fails(errno.ENOSPC)
        return self.world.perform(self.actor, act)

    def _put(self, path: str, node: _Node | None, before: str | None = None) -> None:
        folder, _, name = path.rpartition("/")
        self.disk.folder(folder).put(name, node, before)

    @override
    def make_directory(self, path: str) -> bool:

        def whole() -> bool:
            if isinstance(self.disk.node(path), _Folder):
                return False
            self._put(path, _Folder())
            return True

        return bool(self.do(Act("", "make_directory", path, whole)))

    @override
    def create(self, path: str) -> OpenFile:

        def whole() -> _File:
            if self.disk.node(path) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            file = _File()
            self._put(path, file)
            return file

        file = self.do(Act("", "create", path, whole))
        assert isinstance(file, _File)
        return OpenFile(self, path, file)

    @override
    def rename(self, old: str, new: str) -> None:
        self.do(Act("", "rename", new, lambda: self._put(new, self.disk.file(old), old.rpartition("/")[2])))

    @override
    def sync_directory(self, path: str) -> None:

        def whole() -> None:
            folder = self.disk.folder(path)
            folder.kept, folder.pending = dict(folder.live), []

        self.do(Act("", "sync_directory", path, whole))

    @override
    def remove(self, path: str) -> bool:

        def whole() -> bool:
            there = isinstance(self.disk.node(path), _File)
            if there:
                self._put(path, None)
            return there

        return bool(self.do(Act("", "remove", path, whole)))

    @override
    def remove_directory(self, path: str) -> bool:

        def whole() -> bool:
            node = self.disk.node(path)
            empty = isinstance(node, _Folder) and not node.live
            if empty:
                self._put(path, None)
            return empty

        return bool(self.do(Act("", "remove_directory", path, whole)))

    @override
    def size_bytes(self, path: str) -> int | None:

        def whole() -> int | None:
            node = self.disk.node(path)
            return len(node.live) if isinstance(node, _File) else None

        found = self.do(Act("", "size_bytes", path, whole, writes=False))
        return found if isinstance(found, int) else None

    @override
    def read_into(self, path: str, start: int, buffer: memoryview) -> int:

        def give(content: bytes | bytearray) -> int:
            buffer[: len(content)] = content
            return len(content)

        def content() -> bytearray:
            return self.disk.file(path).live[start : start + len(buffer)]

        act = Act("", "read_into", path, lambda: give(content()), writes=False)
        act.spoilt = lambda dice: give(flipped(content(), dice))
        found = self.do(act)
        assert isinstance(found, int)
        return found

    @override
    def read_directly(self, path: str, start: int, buffer: memoryview) -> int:
        return self.read_into(path, start, buffer)

    @override
    def entries(self, path: str) -> list[tuple[str, bool]]:

        def whole() -> list[tuple[str, bool]]:
            node = self.disk.node(path)
            names = node.live if isinstance(node, _Folder) else {}
            return sorted((name, isinstance(each, _Folder)) for name, each in names.items())

        found = self.do(Act("", "entries", path, whole, writes=False))
        assert isinstance(found, list)
        return found

    @override
    def free_bytes(self, path: str) -> int:
        found = self.do(Act("", "free_bytes", path, lambda: _ROOM_BYTES, writes=False))
        assert isinstance(found, int)
        return found


class OpenFile:
    """A file that is being written: `shade.storage.directory.NewFile`.

    Args:
        view: Whose.
        path: Where it was made.
        file: What it is.
    """

    def __init__(self, view: DiskView, path: str, file: _File) -> None:
        self._view, self._path, self._file = view, path, file

    @override
    def write(self, part: memoryview) -> None:
        content = bytes(part)
        act = Act("", "write", self._path, lambda: self._file.live.extend(content))
        act.part = lambda dice: self._file.live.extend(content[: dice.randint(0, len(content))])
        act.spoilt = lambda dice: self._file.live.extend(flipped(content, dice))
        self._view.do(act)

    @override
    def sync(self) -> None:

        def whole() -> None:
            self._file.kept = bytes(self._file.live)

        self._view.do(Act("", "sync", self._path, whole))

    @override
    def close(self) -> None:
        pass
