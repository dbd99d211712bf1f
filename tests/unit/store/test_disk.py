"""The store on a disk: kills, flips, a full disk and other formats cost entries, and no wrong byte comes back."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shade.errors import ConfigError, StoreAuthError, StoreFullError, StoreUnavailableError
from shade.process import file_system_of
from shade.store import Store, StoreURL, disk_files, open_store
from shade.store import disk as disk_module
from shade.store.disk import DiskStore


def value(key: str, size: int) -> bytes:
    """Bytes that belong to this key alone."""
    return random.Random(key).randbytes(size)


def entries(num: int, size: int = 3000) -> dict[str, bytes]:
    return {f"shade:unit:{{a}}{number}": value(f"{number}", size + 37 * number) for number in range(num)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with open_store(f"disk://{folder}?capacity=4MB") as opened:
        yield opened


def again(store: Store) -> Store:
    """Another opener of the same folder, as the next job is."""
    return open_store(store.url)


def opened_in(folder: Path) -> list[str]:
    """Files of a folder that this process has open, deleted ones too."""
    at = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [os.readlink(path) for path in at if os.path.exists(path) and str(folder) in os.readlink(path)]


def on_disk(folder: Path) -> int:
    """Bytes that the file system gave out, without SQLite's log."""
    files = [path for path in folder.iterdir() if not path.name.endswith(("-wal", "-shm"))]
    return sum(path.stat().st_blocks * 512 for path in files)


def test_the_next_job_finds_everything(store: Store) -> None:
    items = entries(100)
    assert all(store.set_many(items))
    store.close()
    with again(store) as later:
        assert later.get_many(list(items)) == list(items.values())
        assert sorted(later.scan("shade:unit:")) == sorted(items)
        assert later.stats().num_keys == 100


@pytest.mark.parametrize("size", [200, 3000, 40_000])
def test_the_bytes_on_the_disk_are_those_accounted(store: Store, folder: Path, size: int) -> None:
    items = {f"shade:unit:{{k1x}}{number}": os.urandom(size) for number in range(2_000_000 // max(size, 700))}
    assert all(store.set_many(items))
    used = store.stats().used_bytes
    assert used == sum(store.stored_bytes(len(key), size) for key in items)
    store.close()  # SQLite writes its log into the index
    assert on_disk(folder) <= used + 2**16


def test_capacity_holds_through_random_sizes_and_removals(store: Store, folder: Path) -> None:
    rng, held = random.Random(7), dict[str, bytes]()
    refused = 0
    for step in range(600):
        key = f"shade:unit:{rng.randrange(150)}"
        if rng.random() < 0.3 and key in held:
            assert store.delete_many([key]) == [len(held.pop(key))]
            continue
        content = value(f"{step}", int(rng.lognormvariate(10.5, 1)))
        (written,) = store.set_many({key: content})
        refused += not written
        if written:
            held[key] = content
        used = sum(store.stored_bytes(len(name), len(content)) for name, content in held.items())
        assert store.stats().used_bytes == used <= 4_000_000
        # refused although there was room: never
        old = store.stored_bytes(len(key), len(held[key])) if key in held else 0
        assert written or used - old + store.stored_bytes(len(key), len(content)) > 4_000_000
    assert refused > 10
    assert store.get_many(list(held)) == list(held.values())
    assert (folder / "1-0.entries").stat().st_size <= 4_000_000
    store.delete_many(list(held))
    assert (folder / "1-0.entries").stat().st_size == 0


def test_a_value_in_several_pieces(store: Store) -> None:
    assert all(store.set_many({f"shade:{number}": b"x" * 100_000 for number in range(39)}))
    store.delete_many([f"shade:{number}" for number in range(0, 39, 3)])
    large = value("large", 1_000_000)
    assert store.set_many({"shade:large": large}) == [True]
    assert store.get_many(["shade:large", "shade:1"]) == [large, b"x" * 100_000]


# ── damage ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_flipped_bits_cost_entries_and_never_a_wrong_byte(store: Store, folder: Path) -> None:
    items = entries(60)
    store.set_many(items)
    rng, path = random.Random(3), folder / "1-0.entries"
    content = bytearray(path.read_bytes())
    for _ in range(20):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    with path.open("r+b") as file:
        file.write(content)
    found = store.get_many(list(items))
    assert all(got in (None, right) for got, right in zip(found, items.values(), strict=True))
    lost = [key for key, got in zip(items, found, strict=True) if got is None]
    assert 0 < len(lost) <= 20
    assert store.stats().num_keys == 60 - len(lost)  # damaged ones are gone, and may be written again
    assert store.add_many({key: items[key] for key in lost}) == [True] * len(lost)
    assert store.get_many(list(items)) == list(items.values())


def test_a_store_that_nobody_closes_leaves_no_file_open(folder: Path) -> None:
    store = open_store(f"disk://{folder}?capacity=4MB")
    assert all(store.set_many(entries(20)))
    store.enter("shade:unit", 1000)
    assert opened_in(folder)
    del store
    gc.collect()
    assert opened_in(folder) == []


def test_swapped_entries_are_missing(store: Store, folder: Path) -> None:
    store.set_many({"shade:a": b"A" * 1000, "shade:b": b"B" * 1000, "shade:c": b"C" * 1000})
    store.close()
    with sqlite3.connect(folder / "1-0.index") as base:
        rows = dict(base.execute("select key, places from entry"))
        base.execute("update entry set places = ? where key = 'shade:a'", (rows["shade:b"],))
        base.execute("update entry set key = 'shade:x' where key = 'shade:c'")
    base.close()
    with again(store) as later:
        assert later.get_many(["shade:a", "shade:b", "shade:x"]) == [None, b"B" * 1000, None]


def test_an_index_without_its_first_page_begins_anew_while_a_process_has_it_open(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_files, "_LOCK_SECONDS", 0.1)  # for which SQLite waits here
    assert all(store.set_many(entries(20)))
    (index,) = folder.glob("*.index")
    os.truncate(index, 0)
    with again(store) as other:
        assert other.get_many(list(entries(20))) == [None] * 20
        assert all(other.set_many(entries(10)))
        assert store.get_many(list(entries(10))) == list(entries(10).values()), "and the first process follows"


def test_a_job_begins_while_another_writes(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = entries(20)
    assert all(store.set_many(items))
    monkeypatch.setattr(disk_files, "_LOCK_SECONDS", 0.1)
    (index,) = folder.glob("*.index")
    with contextlib.closing(sqlite3.connect(index, isolation_level=None)) as base, again(store) as other:
        base.execute("begin immediate")
        other.ping()
        assert other.get_many(list(items)) == list(items.values())
        with pytest.raises(StoreUnavailableError, match="database is locked"):
            other.set_many({"shade:more": b"m"})
        base.execute("rollback")
        assert other.set_many({"shade:more": b"m"}) == [True]


@pytest.mark.parametrize("seed", range(12))
def test_a_damaged_index_begins_anew(store: Store, folder: Path, seed: int) -> None:
    items = entries(200)
    store.set_many(items)
    store.close()
    path, rng = folder / "1-0.index", random.Random(seed)
    content = bytearray(path.read_bytes())
    if seed % 3 == 0:
        content = content[: rng.randrange(len(content))]
    else:
        for _ in range(40 if seed % 3 == 1 else 1):
            start = rng.randrange(len(content))
            content[start : start + 64] = rng.randbytes(len(content[start : start + 64]))
    path.write_bytes(content)
    with again(store) as later:
        for _ in range(3):  # the round that finds the damage fails, and those after it work
            try:
                found = later.get_many(list(items))
                written = later.set_many(items)
            except StoreUnavailableError:
                continue
            assert all(got in (None, right) for got, right in zip(found, items.values(), strict=True))
            if all(written):
                break
        found = later.get_many(list(items))
        assert all(got in (None, right) for got, right in zip(found, items.values(), strict=True))
        assert found.count(None) < len(found)


def test_a_damaged_gap_begins_a_new_index(store: Store, folder: Path) -> None:
    items = entries(3) | {f"shade:{name}": b"x" * 1000 for name in "abc"}
    store.set_many(items)
    store.delete_many(["shade:b"])
    with contextlib.closing(sqlite3.connect(folder / "1-0.index", isolation_level=None)) as base:
        assert base.execute("update gap set length = 'long'").rowcount == 1
    with pytest.raises(StoreUnavailableError, match="begins anew"):
        store.delete_many(["shade:a"])
    assert store.set_many(items) == [True] * len(items)
    assert store.get_many(list(items)) == list(items.values())


def test_processes_with_the_old_files_open_move_to_the_new_ones(store: Store, folder: Path) -> None:
    store.set_many({"shade:a": b"old" * 100})
    with again(store) as other:
        assert other.get_many(["shade:a"]) == [b"old" * 100]
        assert isinstance(other, DiskStore)
        disk_files.replace_damaged(str(folder), 0)
        assert other.get_many(["shade:a"]) == [None]
        assert other.set_many({"shade:a": b"new" * 100}) == [True]
    assert store.get_many(["shade:a"]) == [b"new" * 100]
    assert {path.name.partition(".")[0] for path in folder.iterdir()} == {"1", "1-1", "lock"}


def test_replaced_files_are_closed_with_the_store(store: Store, folder: Path) -> None:
    for generation in range(3):
        store.set_many({"shade:a": b"a" * 1000})
        disk_files.replace_damaged(str(folder), generation)
    store.set_many({"shade:a": b"a" * 1000})
    assert opened_in(folder)
    store.close()
    assert opened_in(folder) == []


def test_a_deleted_folder_is_made_again(store: Store, folder: Path) -> None:
    store.set_many({"shade:a": b"a" * 1000})
    shutil.rmtree(folder)
    assert store.get_many(["shade:a"]) == [None]
    assert store.set_many({"shade:a": b"b" * 1000}) == [True]
    assert store.get_many(["shade:a"]) == [b"b" * 1000]


WRITER = """
import random, sys
from shade.store import open_store
store, name = open_store(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
number = 0
while True:
    number += 1
    keys = [f"shade:{name}:{random.randrange(60)}" for _ in range(8)]
    if random.random() < 0.3:
        store.delete_many(keys)
    else:
        store.set_many({key: random.Random(key).randbytes(1 + sum(key.encode()) * 7 % 50000) for key in keys})
"""


def kill_writers(folder: Path, rounds: int) -> int:
    """Kills two writers in mid-write, round after round; returns how many entries were checked in all."""
    url, checked = f"disk://{folder}?capacity=2MB", 0
    for number in range(rounds):
        writers = [
            subprocess.Popen([sys.executable, "-c", WRITER, url, name], stdout=subprocess.PIPE) for name in ("a", "b")
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
        time.sleep(random.Random(number).uniform(0.05, 0.4))
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
        with open_store(url) as store:
            keys = sorted(store.scan("shade:"))
            for key, got in zip(keys, store.get_many(keys), strict=True):
                # An entry that was being replaced may be gone, and is not another's.
                assert got in (None, random.Random(key).randbytes(1 + sum(key.encode()) * 7 % 50000))
                checked += got is not None
            left = [key for key, got in zip(keys, store.get_many(keys), strict=True) if got is not None]
            sizes = [store.stored_bytes(len(key), 1 + sum(key.encode()) * 7 % 50000) for key in left]
            assert store.stats().used_bytes == sum(sizes) <= 2_000_000
    return checked


@pytest.mark.multiprocess
def test_killed_writers_leave_no_wrong_byte(folder: Path) -> None:
    assert kill_writers(folder, 4) > 20


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.timeout(1800)  # a hundred processes are started
def test_writers_killed_fifty_times_leave_no_wrong_byte(folder: Path) -> None:
    assert kill_writers(folder, 50) > 250


# ── refusals ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_full_disk_refuses_and_still_reads(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    items = entries(10)
    store.set_many(items)
    real, num_written = os.pwrite, 0

    def pwrite(descriptor: int, part: Any, offset: int) -> int:
        nonlocal num_written
        num_written += 1
        if num_written > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, part[:1000], offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    assert store.set_many({"shade:more": b"m" * 50_000}) == [False]
    assert isinstance(store.refusals({"shade:more": b"m" * 50_000})[0], StoreFullError)
    assert num_written > 3
    assert store.get_many([*items, "shade:more"]) == [*items.values(), None]
    monkeypatch.undo()
    assert store.set_many({"shade:more": b"m" * 50_000}) == [True]
    assert store.stats().num_keys == 11


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
def test_a_broken_disk_is_unavailable_by_name(store: Store, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    items = entries(10)
    store.set_many(items)

    def fail(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(StoreUnavailableError, match=f"does not work: .*{os.strerror(number)}"):
        store.set_many({"shade:more": b"m" * 50_000})
    assert store.get_many(list(items)) == list(items.values())
    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(StoreUnavailableError, match=os.strerror(number)):
        store.get_many(list(items))
    monkeypatch.undo()
    assert store.get_many(list(items)) == list(items.values())


def test_a_folder_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with open_store(f"disk://{tmp_path}/file/tier?capacity=4MB") as store, pytest.raises(StoreUnavailableError) as told:
        store.ping()
    assert f"{tmp_path}/file/tier" in str(told.value)


def test_files_of_another_user_are_refused(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.set_many({"shade:a": b"a"})
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with again(store) as other, pytest.raises(StoreAuthError, match=f"belongs to user id {me}; name a folder of your"):
        other.ping()


def test_a_capacity_is_asked_for(folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"write disk://{folder}.capacity=500GiB"):
        open_store(f"disk://{folder}")
    open_store(f"disk://{folder}?capacity=500GiB").close()
    for text in ("disk://?capacity=1GB", "disk://host/folder?capacity=1GB", "disk:///?capacity=1GB"):
        with pytest.raises(ConfigError, match="an absolute path of a folder"):
            StoreURL.parse(text)


MOUNTS = r"""
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:40 / /srv rw - nfs4 server:/srv rw
31 30 254:1 / /srv/me/nvme rw - xfs /dev/nvme0n1 rw
32 22 0:41 / /mnt/a\040b rw - fuse.sshfs host: rw
33 22 0:42 / /data rw shared:1 - lustre mds@tcp:/fs rw
34 22 0:43 / /ntfs rw - fuseblk /dev/sdb rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "refused"),
    [
        ("/tmp/tier", "ext4", False),
        ("/srv/me/tier", "nfs4", True),
        ("/srv/me/nvme/tier", "xfs", False),
        ("/srv2", "ext4", False),
        ("/mnt/a b/tier", "fuse.sshfs", True),
        ("/data", "lustre", True),
        ("/ntfs/tier", "fuseblk", False),
    ],
)
def test_network_mounts_are_refused_by_name(
    path: str, kind: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "mounts"
    table.write_text(MOUNTS.strip())
    assert file_system_of(path, str(table)) == kind
    monkeypatch.setattr(disk_module, "file_system_of", lambda _: kind)
    with open_store(f"disk://{tmp_path}/tier?capacity=4MB") as store:
        if not refused:
            store.ping()
            return
        with pytest.raises(ConfigError, match=f"on {kind}'; name a folder of a disk in this machine"):
            store.ping()


def test_another_format_uses_other_files(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.set_many({"shade:a": b"old" * 100})
    monkeypatch.setattr(disk_files, "FORMAT", 2)
    with again(store) as newer:
        assert newer.get_many(["shade:a"]) == [None]
        newer.set_many({"shade:a": b"new" * 100})
        monkeypatch.setattr(disk_files, "FORMAT", 1)
        assert store.get_many(["shade:a"]) == [b"old" * 100]  # both at once, and neither reads the other's
        assert newer.get_many(["shade:a"]) == [b"new" * 100]
    store.close()
    monkeypatch.setattr(disk_files, "FORMAT", 2)
    with again(store) as newer:
        assert newer.get_many(["shade:a"]) == [b"new" * 100]
        assert not [path.name for path in folder.iterdir() if path.name.startswith("1")]
