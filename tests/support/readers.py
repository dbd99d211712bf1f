"""Everything that reads bytes from outside, as functions of bytes; what `tests/faults/test_fuzz.py` mutates for them.

A reader returns, or raises one of our named errors. It is called where its door is: with the same arguments, and behind
what the door's caller makes of the errors of a format or a library. A file is written in memory, again and again.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import os
import random
import shutil
import struct
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from shade.cache import coordinated_read, sharing
from shade.cache.entry import FORMAT_ITEM, FORMAT_PICTURE, HEADER_BYTES, seal, unseal
from shade.cache.job_registry import JobRecord
from shade.checkpoint._capture.flatten import unflatten
from shade.checkpoint._codecs.base import CODECS, standalone_codec
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import Commit, Manifest
from shade.checkpoint._interchange.export import load_state, save_state
from shade.checkpoint._preemption.notice import seconds_in
from shade.checkpoint._tiers import identity
from shade.checkpoint._tiers.run_lock import LockRecord
from shade.checkpoint._tiers.slot_table import SlotTable
from shade.cli import top
from shade.config import RunConfig
from shade.control import client
from shade.control import message as telemetry
from shade.control.profile import Profile
from shade.control.study import CommandObjective, read_journal
from shade.data._decode.cached_format import picture_of
from shade.data._decode.jpeg import decode_rgb
from shade.data._origin.origin import ByteRange, Origin
from shade.data._origin.url_origin import Entry
from shade.data._recorded.recording import Recording
from shade.data._shards import archives, blocks, parquet_pages, tables
from shade.data._shards.index import FORMATS, RangeParts, ShardFile, ShardScan, UnlikeIndexError, _listed_by_its_library
from shade.data._source import item_codec, item_columns
from shade.errors import BadSampleError, DataError, ShadeError
from shade.gradient._comm import message
from shade.gradient._kernels.build import prepare
from shade.policy.trace import Trace
from shade.report import load_run, text
from shade.store import StoreURL, open_store
from shade.store._servers import data_sets, local_cluster, service
from shade.store.cluster import SlotMap
from shade.store.link import Endpoint
from shade.store.wire import ServerError
from shade.trajectory import Trajectory
from tests.golden import make

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
WORDS = (
    *(b"", b"\0", b"\xff", b"-1", b"1e999", b"[[[[", b"{}", b"null", b'"', b"\xc3", b"9" * 30, b"A" * 300),
    *(b"\0" * 64, b"-00000001000", b"[" * 3000),
)
NUMBERS = tuple(
    number.to_bytes(8, "little")[:width]
    for number in (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
    for width in (2, 4, 8)
)
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**30, 10**400, 1e308, float("nan"), float("inf"), 0.5),
    *("", "x", "-1", "\udcff", "a" * 100, [], {}, [[]], [1, "x"], {"a": 1}, [None] * 4),
)


def mutated(seed: bytes, rng: random.Random) -> bytes:
    """One to four changes: a bit, a byte, a part cut out or doubled, a word put in; of JSON perhaps a value."""
    if seed[:1] in b"[{" and rng.randrange(2):
        with contextlib.suppress(ValueError, RecursionError):
            return json.dumps(_changed(json.loads(seed), rng)).encode("utf-8", "surrogatepass")
    data, random_part = bytearray(seed), rng.random  # the methods for whole numbers take as long as a cheap reader
    for _ in range(1 + int(4 * random_part())):
        at, kind = int(random_part() * (len(data) + 1)), int(6 * random_part())
        end = at + (1, 4, 16, 4096)[int(4 * random_part())]
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << int(8 * random_part())
        elif kind == 1 and data:
            data[at % len(data)] = int(256 * random_part())
        elif kind == 2:
            del data[at:end]
        elif kind == 3:
            data[at:at] = data[at:end]
        elif kind == 4:
            data[at : at + (end - at) % 16] = WORDS[int(len(WORDS) * random_part())]
        else:
            number = NUMBERS[int(len(NUMBERS) * random_part())]
            data[at : at + len(number)] = number
    return bytes(data)


def headed(data: bytes, rng: random.Random, at: int = 0, form: str = "<I", step: int = item_codec.ALIGN) -> bytes:
    """What `mutated` makes of bytes, or in half of all cases of a length and the JSON behind it, which begin ``at``."""
    if rng.randrange(2):
        return mutated(data, rng)
    begin = at + struct.calcsize(form)
    (length,) = struct.unpack_from(form, data, at)
    head = mutated(data[begin : begin + length], rng)
    rest = data[begin + length + -(begin + length) % step :]
    return b"".join((data[:at], struct.pack(form, len(head)), head, bytes(-(begin + len(head)) % step), rest))


def _changed(value: Any, rng: random.Random) -> Any:
    """A JSON value with one of its parts, at any depth, replaced, removed or doubled."""
    if isinstance(value, (dict, list)) and value and rng.randrange(8):
        key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if rng.randrange(6):
            value[key] = _changed(value[key], rng)
        elif isinstance(value, list) and rng.randrange(2):
            value.insert(key, value[key])
        else:
            del value[key]
        return value
    return rng.choice(VALUES)


class Scratch:
    """Files in memory, each written again for the next input."""

    def __init__(self) -> None:
        shared = "/dev/shm" if os.path.isdir("/dev/shm") else None
        self.folder = Path(tempfile.mkdtemp(prefix="shade-fuzz-", dir=shared))
        self._owner, self._open = os.getpid(), dict[str, int]()
        atexit.register(self._remove)

    def path(self, name: str, data: bytes) -> Path:
        path = self.folder / name
        if name not in self._open:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open[name] = os.open(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(self._open[name], len(data))
        os.pwrite(self._open[name], data, 0)
        return path

    def _remove(self) -> None:
        if os.getpid() == self._owner:
            shutil.rmtree(self.folder, ignore_errors=True)


SCRATCH = Scratch()


@contextlib.contextmanager
def reading(**contents: bytes) -> Iterator[Path]:
    """A folder whose files, named with ``_`` for a dot, are read from memory: a system call may take longer than all
    else."""
    before = Path.read_bytes

    def read_bytes(self: Path) -> bytes:
        content = contents.get(self.name.replace(".", "_"))
        if content is not None:
            return content
        return before(self) if self.exists() else _absent(self)

    with _in_place_of(Path, "read_bytes", read_bytes):
        yield SCRATCH.folder


def _absent(path: Path) -> bytes:
    raise FileNotFoundError(2, "no such file", str(path))


class _Memory(Origin):
    """Ranges of one file in memory, with the errors of `FileOrigin`."""

    content = b""

    def _content(self, path: Any) -> bytes:
        if path.start < 0 or path.stop < path.start:
            raise OSError(22, "invalid argument", path.path)
        if path.stop > len(self.content):
            raise OSError(f"{path.path} ends before byte {path.stop}")
        return self.content[path.start : path.stop]


@dataclass(frozen=True)
class Reader:
    """How one kind of bytes is read, and what is mutated for it."""

    read: Callable[[bytes], Any]
    seed: Callable[[], bytes]
    mutate: Callable[[bytes, random.Random], bytes] = mutated
    per_byte: int = 64
    """Memory that it may take for each byte of its input, beside `SPARE_BYTES`."""


SPARE_BYTES = 1 << 20
READERS: dict[str, Reader] = {}


def reader(name: str, seed: Callable[[], bytes], **more: Any) -> Callable[[Callable[[bytes], Any]], Any]:
    """Enters a function into `READERS`."""

    def enter(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
        READERS[name] = Reader(read, functools.cache(seed), **more)
        return read

    return enter


@contextlib.contextmanager
def _in_place_of(module: Any, name: str, other: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, other)
    try:
        yield
    finally:
        setattr(module, name, before)


def stored(name: str) -> Callable[[], bytes]:
    return lambda: (GOLDEN / name).read_bytes()


# ── cache and store ─────────────────────────────────────────────────────────────────────────────────────────────────


@reader("cache entry", lambda: seal(3, stored("entry.item")()[HEADER_BYTES:], FORMAT_ITEM))
def entry(data: bytes) -> None:
    unseal(3, data, FORMAT_ITEM)


@reader("picture in a sealed entry", lambda: stored("entry.picture")()[HEADER_BYTES:])
def picture(data: bytes) -> bool:
    return picture_of(unseal(3, seal(3, data, FORMAT_PICTURE), FORMAT_PICTURE)) is not None


@reader("item in a sealed entry", lambda: stored("entry.item")()[HEADER_BYTES:], mutate=headed)
def item(data: bytes) -> None:
    item_codec.decode(unseal(3, seal(3, data, FORMAT_ITEM), FORMAT_ITEM))


@reader(
    "batch of items",
    lambda: item_codec.encode({"x": torch.arange(6.0), "y": 3, "z": np.float32(1), "w": "a"}),
    mutate=headed,
)
def batch(data: bytes) -> None:
    items = item_columns.decoded_many([data, data]) or [item_codec.decode(data)] * 2
    try:
        item_columns.collated([data, data], [0, 1])
    except Exception as error:  # of an item that was encoded so, such as one with a number of 70 bits
        try:
            default_collate([each if isinstance(each, tuple) else (each,) for each in items])
        except Exception:  # noqa: BLE001 - whatever it is
            return
        raise AssertionError("default_collate takes it") from error


@reader(
    "record of another job", lambda: JobRecord("a1", "machine", 7, "12", 1, 3, False, 9, 9, 1, 5, (1, 2)).to_bytes()
)
def job(data: bytes) -> bool:
    record = JobRecord.parse(data)
    if record is not None:
        assert (record.epoch, record.num_fetched, record.claim_bytes, record.home, len(record.owner)) >= (0, 0, 0, 0, 0)
        assert isinstance(record.has_ended, bool)
    return record is not None


@reader("order of another job", lambda: sharing._packed(np.arange(64, dtype=np.int32)))
def order(data: bytes) -> bool:
    return sharing.unpacked_order(data, 64) is not None


@reader("draw of another job", lambda: coordinated_read._packed(np.arange(16, dtype=np.int32), np.ones(64, np.float32)))
def draw(data: bytes) -> bool:
    return coordinated_read._unpacked(data, 64) is not None


@reader("mark of a data set in use", lambda: json.dumps(["machine", 12, "34", "name", 1.5e9]).encode())
def mark(data: bytes) -> None:
    at, is_used = data_sets._parsed(data)
    assert isinstance(at, float)
    assert is_used in (True, False)


@reader("store URL", lambda: b"redis+cluster://user:p%40ss@10.0.0.1:7000,[::1]:7001?capacity=8GiB")
def url(data: bytes) -> None:
    str(StoreURL.parse(data.decode("utf-8", "replace")))


@reader("CLUSTER SLOTS", lambda: json.dumps([[0, 9, ["h", 7, "id"], ["i", 8]], [10, 16383, [None, 9, "id"]]]).encode())
def slots(data: bytes) -> bool:
    def reply(value: Any) -> Any:
        if isinstance(value, list):
            return [reply(each) for each in value]
        return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value

    try:
        found = reply(json.loads(data))
        SlotMap.read(found, ("h", 7))
    except (ValueError, RecursionError):  # `read_slot_map` makes a StoreError of it
        return False
    return True


@reader("CLUSTER NODES", lambda: b"a1 10.0.0.1:7@17 myself,master - 0 0 1 connected 0-99\nb2 :8@18 slave a1 0 0 1 up\n")
def nodes(data: bytes) -> None:
    answer = data.decode(errors="replace")
    ServerError(answer).as_exception("here")
    with _in_place_of(local_cluster, "ask_text", lambda *_: answer):
        local_cluster.read_members(Endpoint(host="here", port=1))


@reader("record of `shade cache up`", lambda: json.dumps({"url": "redis://:a@127.0.0.1:1", "servers": []}).encode())
def servers(data: bytes) -> None:
    with reading(**{service._STATE.replace(".", "_"): data}) as folder:
        service._read(folder)


@reader("index of a disk tier", lambda: _disk_index(), per_byte=1 << 20)
def disk(data: bytes) -> None:
    folder = SCRATCH.folder / f"disk-{random.getrandbits(40):x}"
    folder.mkdir()
    try:
        (folder / "1-0.index").write_bytes(data)
        (folder / "1-0.entries").write_bytes(bytes(1024))
        with contextlib.closing(open_store(f"disk://{folder}?capacity=1MiB")) as store:
            store.get_many(["a", "b"])
            store.set_many({"c": b"d" * 200})
    finally:
        shutil.rmtree(folder)


def _disk_index() -> bytes:
    folder = SCRATCH.folder / "disk"
    with contextlib.closing(open_store(f"disk://{folder}?capacity=1MiB")) as store:
        store.set_many({"a": b"1" * 600, "b": b"2"})
    return (folder / "1-0.index").read_bytes()


# ── shards ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_ORIGIN = _Memory(num_threads=1)


def shard(suffix: str, data: bytes) -> None:
    """What `Shards` does of one file: finds the pieces, reads some, and decodes the first rows and the last."""
    path, _ORIGIN.content = f"/shard.{suffix}", data
    form = FORMATS.get(suffix)()
    try:
        scan = form.scan(ShardFile(_ORIGIN, Entry(path, len(data), "")))
        scan.check(len(data))
    except (OSError, UnlikeIndexError) as error:  # as `ShardIndex` does
        raise DataError(str(error)) from error
    _, scan = ShardScan.from_bytes(scan.to_bytes({"url": path, "bytes": len(data), "is": ""}))
    for piece in [*range(min(3, len(scan.start_P)))]:
        ranges = blocks.coalesced(form.row_ranges(scan, piece, None, None), 0)
        contents = _ORIGIN.read_many([ByteRange(path, *each) for each in ranges], [b - a for a, b in ranges])
        parts = RangeParts([(a, each) for (a, _), each in zip(ranges, contents, strict=True) if type(each) is bytes])
        if any(isinstance(each, OSError) for each in contents):
            continue
        try:
            payloads = form.payloads(scan, piece, parts, None, None)
        except UnlikeIndexError:
            continue
        for row in {0, 1, len(payloads) - 1} & {*range(len(payloads))}:
            _sample(form, scan, payloads[row])


def _sample(form: Any, scan: ShardScan, payload: bytes) -> None:
    try:
        for name, value in form.row(scan, payload, None).items():
            decode = form.decoder(name)
            if decode is not None:
                decode(value)
    except Exception as error:  # as `Shards.item` does
        raise BadSampleError(str(error)) from error


def tar_repaired(data: bytes) -> bytes:
    """The tar with each header's checksum right, at every block that looks like one."""
    made = bytearray(data)
    for at in range(0, len(made) - 511, 512):
        if made[at] and made[at + 257 : at + 262] == b"ustar":
            made[at + 148 : at + 156] = b" " * 8
            made[at + 148 : at + 156] = b"%06o\0 " % sum(made[at : at + 512])
    return bytes(made)


def _tar() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in (("a.cls", b"3"), ("a.txt", b"one"), ("é.cls", b"4"), ("é.json", b"[1]")):
            info = tarfile.TarInfo(name)
            info.size, info.pax_headers = len(content), {"size": str(len(content))} if name == "é.json" else {}
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()[: 512 * 15]


@reader("tar", _tar)
def tar(data: bytes) -> None:
    shard("tar", tar_repaired(data))


def _zip() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, kind in (("a.cls", zipfile.ZIP_STORED), ("a.txt", zipfile.ZIP_DEFLATED), ("b.cls", 0)):
            archive.writestr(name, "3" * 9, compress_type=kind)
    return stream.getvalue()


@reader("zip", _zip, per_byte=1100)
def zipped(data: bytes) -> None:
    shard("zip", data)


@reader("MDS", stored("shards/streaming.mds"))
def mds(data: bytes) -> None:
    shard("mds", data)


def _arrow(kind: str) -> bytes:
    import pyarrow as pa

    table = pa.table({"a": [1, 2, 3], "b": ["x", None, "z"], "c": [[1], [], [2, 3]]})
    sink = io.BytesIO()
    with getattr(pa.ipc, f"new_{kind}")(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return sink.getvalue()


@reader("Arrow file", lambda: _arrow("file"))
def arrow(data: bytes) -> None:
    shard("arrow", data)


@reader("Arrow stream", lambda: _arrow("stream"))
def arrow_stream(data: bytes) -> None:
    shard("arrow", data)


def _parquet() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.table({"a": [1, 2, 3], "b": ["x", None, "z"]}), sink, row_group_size=2, store_schema=False)
    return sink.getvalue()


@reader("Parquet", _parquet, per_byte=4096)
def parquet(data: bytes) -> None:
    shard("parquet", data)


@functools.cache
def _paged() -> tuple[bytes, Any, int, int]:
    """A Parquet file with page indexes, its metadata, and where they lie in it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    rows = pa.table({"a": [*range(64)], "b": [str(n) for n in range(64)]})
    pq.write_table(rows, sink, write_page_index=True, write_batch_size=8, data_page_size=64, use_dictionary=["b"])
    whole = sink.getvalue()
    (length,) = struct.unpack("<I", whole[-8:-4])
    chunk = parquet_pages._fields(whole[-8 - length :], 0)[0][4][0][1][0]
    return whole, pq.read_metadata(io.BytesIO(whole)), chunk[4], len(whole) - 8 - length


@reader("page index of Parquet", lambda: _paged()[0][_paged()[2] : _paged()[3]])
def page_index(data: bytes) -> bool:
    whole, metadata, start, stop = _paged()
    whole = whole[:start] + data[: stop - start].ljust(stop - start, b"\0") + whole[stop:]
    try:
        pages = parquet_pages.page_table(whole[stop:], metadata.schema, lambda at, end: whole[at:end])
    except parquet_pages.DAMAGED:
        return False
    for found in parquet_pages.pages_of(pages):
        if found is not None:
            parts = RangeParts([(at, whole[at:end]) for at, end in sorted(found.ranges([3, 60], 4)) if 0 <= at < end])
            found.content(parts, 4, np.ones(64, np.bool_))
    return True


def _lmdb() -> bytes:
    import lmdb

    path = SCRATCH.folder / "seed.lmdb"
    with lmdb.open(str(path), subdir=False, map_size=1 << 20) as env, env.begin(write=True) as transaction:
        for number in range(3):
            transaction.put(b"%d" % number, b"value" * number)
    return path.read_bytes()


def index_repaired(data: bytes) -> bytes:
    import xxhash

    return data[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(data[:-8]))


def _index() -> bytes:
    scan = ShardScan.of([0, 512, 2048], [512, 1536, 512], ["__key__", "cls"], b"more", proofs=[5, 6, 2**31])
    return scan.to_bytes({"url": "/a.tar", "bytes": 4096, "is": "mtime=1"})


@reader("index of shards", _index, mutate=functools.partial(headed, at=17, form="<Q", step=1))
def shard_index(data: bytes) -> bool:
    try:
        _, scan = ShardScan.from_bytes(index_repaired(data))
    except ValueError:  # `ShardIndex` makes it again
        return False
    rows = int(scan.rows_P.sum())
    assert 0 <= rows < 2**63
    np.cumsum(scan.rows_P, dtype=np.int64)
    for piece in range(min(3, len(scan.start_P))):
        assert 0 <= scan.span(piece)[0] <= scan.span(piece)[1]
    return True


def _member() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.arange(12.0).reshape(3, 4))
    return stream.getvalue()


@reader("npy in an archive", _member)
def npy(data: bytes) -> None:
    try:
        archives.DECODERS["npy"](data)
    except Exception as error:  # as `Shards.item` does
        raise BadSampleError(str(error)) from error


@reader("picture of MDS", lambda: struct.pack("<III", 4, 2, 3) + b"RGB" + bytes(24))
def raw_picture(data: bytes) -> None:
    try:
        tables._ENCODINGS["pil"](data)
    except Exception as error:  # as `Shards.item` does
        raise BadSampleError(str(error)) from error


def _jpeg() -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.new("RGB", (24, 16), (9, 99, 200)).save(stream, "JPEG")
    return stream.getvalue()


@reader("JPEG", _jpeg, per_byte=1 << 20)
def jpeg(data: bytes) -> None:
    from PIL import Image

    try:
        # A picture takes memory for the pixels that it states, up to twice this limit of Pillow's.
        with _in_place_of(Image, "MAX_IMAGE_PIXELS", 4 << 20):
            decode_rgb(data)
    except Exception as error:  # as `Shards.item` does
        raise BadSampleError(str(error)) from error


@reader("list of shards of a library", lambda: json.dumps({"_data_files": [{"filename": "a.arrow"}]}).encode())
def library_list(data: bytes) -> None:
    for content in ({"state_json": data}, {"index_json": data.replace(b"_data_files", b"shards")}):
        with reading(**content) as folder:
            for each in _listed_by_its_library(str(folder)):
                assert os.path.isabs(each)


@reader("mark of a recording", lambda: item_codec.encode(_MARK), mutate=headed)
def recording_mark(data: bytes) -> None:
    import xxhash

    with reading(mark=data + struct.pack("<Q", xxhash.xxh3_64_intdigest(data))):
        _recording("mark").mark()


@reader("rows of a recording", lambda: struct.pack("<QQQQ", 5, 7, 9, 8))
def recording_rows(data: bytes) -> None:
    SCRATCH.path("rows/index", data)
    SCRATCH.path("rows/items", b"0123456789")
    found = _recording("rows")
    found._rows = found._rows[:0]
    found.payloads([0, 1])


_MARK = {"version": 1, "count": 3, "name": "a", "states": [], "is_complete": True}


@functools.cache
def _recording(name: str) -> Recording:
    return Recording(str(SCRATCH.folder / name))


# ── checkpoints ─────────────────────────────────────────────────────────────────────────────────────────────────────


@reader("manifest", stored("snapshot/rank-0.json"), per_byte=128)
def manifest(data: bytes) -> None:
    Manifest.parse(data, digest_of(data))


@reader("commit record", stored("snapshot/commit.json"))
def commit(data: bytes) -> None:
    with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
        body = {name: value for name, value in json.loads(data).items() if name != "digest"}
        data = canonical({**body, "digest": digest_of(canonical(body))})
    Commit.parse(data)


def canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


@reader("table of slots", lambda: stored("table.json")()[32:])
def slot_table(data: bytes) -> bool:
    found = SlotTable.parse(digest_of(data).encode() + data)
    if found is not None:
        for slot in found.slots.values():
            assert slot.location
            slot.layout.copy_tags(0, 3)
    return found is not None


@reader("run lock", lambda: json.dumps(vars(LockRecord("a", "m", "h", 7, "12", 1.0, 3))).encode())
def lock(data: bytes) -> bool:
    found = LockRecord.parse(data)
    assert found is None or found.beat_seconds > 0
    return found is not None


@reader("note of the storage beside a store", lambda: b'["job-12", "/runs"]')
def binding(data: bytes) -> None:
    identity.bind(_Memory([data, None]), "job-13", "/runs/b", is_named=True)  # type: ignore[arg-type]


class _Memory:
    """Cluster memory that holds a note, and a snapshot of some run."""

    run = "r"

    def __init__(self, contents: list[bytes | None]) -> None:
        self.store: Any = self
        self.url, self._contents = "memory://", contents

    def get_many(self, keys: list[str]) -> list[bytes | None]:
        return self._contents

    def set_many(self, items: dict[str, bytes]) -> None:
        """Keeps nothing."""

    def held(self) -> dict[str, Commit]:
        return {"slot": _commit()}


@functools.cache
def _commit() -> Commit:
    return Commit.parse(stored("snapshot/commit.json")())


@functools.cache
def _tensors() -> dict[str, torch.Tensor]:
    found = Manifest.parse(stored("snapshot/rank-0.json")(), digest_of(stored("snapshot/rank-0.json")()))
    kinds = {"F32": torch.float32, "F64": torch.float64, "F16": torch.float16, "U8": torch.uint8}
    return {name: torch.zeros(each.shape, dtype=kinds[each.dtype]) for name, each in found.tensors.items()}


@reader("skeleton of a state", lambda: json.dumps(json.loads(stored("snapshot/rank-0.json")())["tree"]).encode())
def skeleton(data: bytes) -> None:
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return
    unflatten(tree, _tensors())


def _decoder(name: str) -> Callable[[bytes], Any]:
    _, base, piece = make.chunks()
    if name == "zstd":
        return lambda data: standalone_codec("zstd").decode(data, 4800, 4)
    codec: Any = CODECS.get(name)()
    return lambda data: codec.decode(data, base.data, piece)


for _name in ("zstd", *make.DELTAS):
    # A frame of a thousand bytes may state the chunk's length, which the manifest has.
    READERS[f"chunk {_name}"] = Reader(_decoder(_name), stored(f"chunk.{_name}"), per_byte=64)


def _reframed(name: str) -> tuple[Callable[[bytes], Any], Callable[[], bytes]]:
    """A delta's reader behind zstandard, which refuses nearly every mutant, and what its frame holds."""
    import zstandard

    inner = zstandard.ZstdDecompressor().decompress(stored(f"chunk.{name}")())
    read = _decoder(name)
    return lambda data: read(zstandard.ZstdCompressor(level=1).compress(data)), lambda: inner


for _name in make.DELTAS[1:]:
    READERS[f"content of chunk {_name}"] = Reader(*_reframed(_name))


@reader("notice", lambda: b'{"time": "2026-11-28T12:00:00Z", "seconds": 3}')
def notice(data: bytes) -> bool:
    try:
        found = seconds_in(data.decode(errors="replace"), 30.0)
    except ValueError:  # the watcher warns, and asks on
        return False
    assert found is None or found >= 0
    return True


@reader("safetensors of others", stored("export.safetensors"))
def safetensors(data: bytes) -> None:
    load_state(SCRATCH.path("import.safetensors", data), "safetensors")


_WEIGHT_MAP = {"weight_map": {"a": "one.safetensors"}, "metadata": {"shade": "{}"}}


@reader("index of safetensors", lambda: json.dumps(_WEIGHT_MAP).encode())
def safetensors_index(data: bytes) -> None:
    SCRATCH.path("import/one.safetensors", stored("export.safetensors")())
    load_state(SCRATCH.path("import/one.safetensors.index.json", data), "safetensors")


@reader("torch file of others", stored("export.pt"), per_byte=1 << 12)
def torch_file(data: bytes) -> None:
    load_state(SCRATCH.path("import.pt", data), "torch")


def _dcp() -> bytes:
    folder = SCRATCH.folder / "dcp"
    save_state({"weight": torch.arange(4.0), "step": 3}, folder, "dcp")
    return (folder / ".metadata").read_bytes()


@reader("metadata of DCP", _dcp, per_byte=1 << 12)
def dcp(data: bytes) -> None:
    SCRATCH.path("dcp/.metadata", data)
    load_state(SCRATCH.folder / "dcp", "dcp")


_DEEPSPEED_NOTE = {
    "shade.deepspeed": 1,
    "run": "run",
    "step": 3,
    "tag": "global_step3",
    "rank": 0,
    "file": "a.pt",
    "id": "7f",
}


@reader("note of DeepSpeed", lambda: json.dumps(_DEEPSPEED_NOTE).encode())
def deepspeed_note(data: bytes) -> None:
    from shade.checkpoint.deepspeed import _note_at

    _note_at(SCRATCH.path("deepspeed", data), "run")


@reader("note of Lightning", lambda: b'{"shade.lightning": 12}')
def lightning_note(data: bytes) -> bool:
    from shade.integrations._lightning.snapshot_io import step_at

    return step_at(SCRATCH.path("lightning", data)) is not None


# ── gradients and control ───────────────────────────────────────────────────────────────────────────────────────────


@reader("gradient message", stored("message.bin"))
def gradient_message(data: bytes) -> None:
    if len(data) >= message.HEADER_BYTES:
        right = bytearray(data)
        size = message._FIELDS.size
        # And of half of them the lengths: nearly no other mutant comes past those.
        first, content = struct.unpack_from("<Q", right, size - 16)[0], len(right) - message.HEADER_BYTES
        if right[-1] % 2:
            struct.pack_into("<QQ", right, size - 16, min(first, content), content - min(first, content))
        checksum = message._CHECKSUM.pack(message._digest(np.frombuffer(bytes(right), np.uint8)))
        right[size : size + len(checksum)] = checksum
        data = bytes(right)
    message.unpack(data)


READERS["telemetry"] = Reader(telemetry.read, lambda: stored("telemetry.jsonl")().splitlines()[0])


@reader("state of a telemetry server", lambda: json.dumps(_STATE).encode())
def server_state(data: bytes) -> None:
    with _in_place_of(client, "_request", lambda *_: data):
        top.of_server(client.fetch_state("http://127.0.0.1:1"))


_STATE = {
    "ranks": [{"rank": 0, "step": 3, "density": 0.1, "bytes_sent": 5, "silent_seconds": 0.5}],
    "decision": {"effective_step": 3, "reason": "x"},
    "num_decisions": 1,
}


@reader("profile of `shade tune`", stored("profile.json"))
def profile(data: bytes) -> None:
    with reading(profile_json=data) as folder:
        found = Profile.load(folder / "profile.json")
    found.curve(found.best_batch())
    found.floor(40)


@reader("journal of `shade tune`", stored("evaluations.jsonl"))
def journal(data: bytes) -> None:
    with reading(journal=data) as folder:
        for each in read_journal(folder / "journal", make.STUDY):
            float(each.seconds)


@functools.cache
def _objective() -> CommandObjective:
    return CommandObjective("a {batch} {density}", SCRATCH.folder, metric="loss")


@reader("line of a command", lambda: b'50%|##  | {"loss": 0.5, "step": 3}')
def command_line(data: bytes) -> bool:
    return _objective()._number(data.decode(errors="replace")) is not None


# ── runs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@reader("run.json", lambda: json.dumps(vars(RunConfig("/runs/a", "s.py", ("data",), run="a"))).encode())
def run_file(data: bytes) -> None:
    with reading(run_json=data) as folder:
        RunConfig.load(folder / "run.json")


_ROWS = (
    {
        **{"kind": "epoch", "epoch": 0, "rank": 0, "samples": 10, "epoch_seconds": 1.5, "hits": 5, "misses": 5},
        **{"loss": 0.5, "val_accuracy": 0.5, "stall_seconds": {"origin": 0.1}, "checkpoint": {"saves": 1}},
        **{"num_samples": 10, "resident_bytes": 5, "capacity_bytes": 9, "busy_seconds": {"decode": 0.2}},
        **{"receipt": {"mean": 1.0}, "step_seconds": 0.3, "cpus": 2, "gradient": {"gradient_steps": 3}},
    },
    {"kind": "epoch", "epoch": 1, "rank": 0, "samples": 10, "loss": 0.4, "form": "encoded"},
)


@reader("metrics.jsonl", lambda: json.dumps(_ROWS[0]).encode(), per_byte=1024)
def metrics(data: bytes) -> None:
    rows = data.replace(b"\n", b" ") + b"\n" + json.dumps(_ROWS[1]).encode() + b"\n"
    with reading(metrics_jsonl=rows, run_json=b'{"workers": 2}') as folder:
        text.render(load_run(folder))


@reader("progress.json", lambda: json.dumps(_PROGRESS).encode())
def progress(data: bytes) -> None:
    with reading(progress_json=data) as folder:
        top.of_run(folder)


_PROGRESS = {
    **{"epoch": 0, "step": 1, "num_steps": 2, "samples_per_second": 3.5, "hit_ratio": 0.5, "waiting_fraction": 0.1},
    **{"stall_seconds": {"origin": 0.1}, "step_seconds": 1, "origin_reads": 3, "cache": "local://"},
    "if_ended_now": {"checkpoint_process_tier": "disk", "checkpoint_process_lost_steps": 3},
}


@reader("losses of an epoch", stored("losses/00000.npy"))
def losses(data: bytes) -> None:
    SCRATCH.path("losses/00000.npy", b"")
    with reading(**{"00000_npy": data}):
        for _ in Trajectory.load(SCRATCH.folder / "losses").losses():
            pass


@reader("names of the samples", stored("losses/samples.json.gz"), per_byte=1 << 14)
def sample_names(data: bytes) -> None:
    SCRATCH.path("names/00000.npy", stored("losses/00000.npy")())
    Trajectory.load(SCRATCH.path("names/samples.json.gz", data).parent)


@reader("trace of a run", stored("trace.npz"), per_byte=1100)
def trace(data: bytes) -> None:
    Trace.load(SCRATCH.path("trace.npz", zip_repaired(data)))


def zip_repaired(data: bytes) -> bytes:
    """A zip whose stored members have the CRC that its directory says, as far as both are there."""
    import zlib

    made = bytearray(data)
    with contextlib.suppress(Exception):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
        directory = data.index(b"PK\1\2")
        for info in infos:
            if info.compress_type == zipfile.ZIP_STORED:
                head = info.header_offset
                begin = head + 30 + int.from_bytes(data[head + 26 : head + 28], "little")
                begin += int.from_bytes(data[head + 28 : head + 30], "little")
                crc = zlib.crc32(data[begin : begin + info.file_size]).to_bytes(4, "little")
                made[head + 14 : head + 18] = made[directory + 16 : directory + 20] = crc
            directory = data.find(b"PK\1\2", directory + 46)
    return bytes(made)


# ── states ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@functools.cache
def _stateful(name: str) -> Any:
    prepare()  # else an engine's thread compiles while memory is measured
    return make.STATES[name]()


def _state_seed(name: str) -> Callable[[], bytes]:
    def seed() -> bytes:
        state = torch.load(GOLDEN / f"{name}.pt", weights_only=False)
        return item_codec.encode(_plain(state["engine"] if name == "engine" else state))

    return seed


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def _state_reader(name: str) -> Callable[[bytes], Any]:
    def read(data: bytes) -> None:
        target = _stateful(name)
        target = target.engine if name == "engine" else target.target
        target.load_state_dict(item_codec.decode(data))

    return read


for _name in make.STATES:
    _article = "an" if _name == "engine" else "a"
    READERS[f"state of {_article} {_name}"] = Reader(_state_reader(_name), functools.cache(_state_seed(_name)), headed)


def outcome(read: Callable[[bytes], Any], data: bytes) -> bool:
    """Whether the reader takes these bytes, and returns anything but False; raises what is no named error."""
    try:
        return read(data) is not False
    except ShadeError:
        return False


def missing(name: str) -> str | None:
    """The package that a reader's seed needs and that is not installed."""
    needs: dict[str, Iterable[str]] = {
        "pyarrow": ("Arrow file", "Arrow stream", "Parquet", "page index of Parquet"),
        "zstandard": [each for each in READERS if "chunk" in each],
        "safetensors": ("safetensors of others", "index of safetensors"),
        "deepspeed": ["note of DeepSpeed"],
        "lightning": ["note of Lightning"],
    }
    import importlib.util

    return next((p for p, names in needs.items() if name in names and importlib.util.find_spec(p) is None), None)
