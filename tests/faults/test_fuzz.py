"""Mutated bytes of everything that is read from outside: a reader returns, or raises one of our named errors.

`tests/support/readers.py` has the readers and their seeds. ``SHADE_FUZZ`` says how many inputs each gets, and
``SHADE_FUZZ_SEED`` with which seed; the soak takes 20,000. ``SHADE_FUZZ_SECONDS`` says for how long atheris fuzzes
each, guided by coverage, if it is there.

Memory is bounded by the input: of the first `TRACED` inputs of a reader, and of those that claim much, no read may take
more at once than the reader's share for each byte, and a MiB. A limit of the address space holds for all others.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import logging
import os
import random
import resource
import struct
import subprocess
import sys
import tarfile
import time
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shade.config import RunConfig
from shade.data import Shards
from shade.data._shards.index import ShardScan
from shade.data._shards.parquet_pages import check_statistics
from shade.data._source import item_codec
from shade.errors import ShadeError
from tests.golden import make
from tests.support import readers
from tests.support.readers import GOLDEN, READERS, SPARE_BYTES, mutated, outcome

NUM_INPUTS, SEED = int(os.environ.get("SHADE_FUZZ", "20000")), int(os.environ.get("SHADE_FUZZ_SEED", "0"))
SECONDS = int(os.environ.get("SHADE_FUZZ_SECONDS", "10"))
TRACED = 2000
MOST_GROWTH, MOST_CLAIMED = 100 << 20, 2 << 30
"""Bytes by which the process may grow over all inputs of a reader, and for one input in its address space."""
SHARDS = ("libarchive-pax.tar", "libarchive.zip", "streaming.mds", "polars.arrow", "polars.parquet")


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Lets an allocation fail that the address space has no `MOST_CLAIMED` for."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_CLAIMED, before[1]))
    logging.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as NumPy's of arrays that Python 2 saved
            yield
    finally:
        logging.disable(logging.NOTSET)
        resource.setrlimit(resource.RLIMIT_AS, before)


def checked(reader: readers.Reader, data: bytes) -> tuple[bool, int]:
    """Whether the reader takes these bytes, and how much it had allocated meanwhile: its share at most."""
    most, peak = reader.per_byte * len(data) + SPARE_BYTES, 0
    for _ in range(3):  # another thread may allocate meanwhile, but not each time
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        accepted = outcome(reader.read, data)
        peak = tracemalloc.get_traced_memory()[1] - before
        if peak <= most:
            return accepted, peak
    raise AssertionError(f"{peak:,} bytes for {len(data):,}")


def usable(name: str) -> readers.Reader:
    """A reader whose package is installed, and which has read its seed."""
    if package := readers.missing(name):
        pytest.skip(f"{package} is not installed")
    READERS[name].read(READERS[name].seed())
    return READERS[name]


@pytest.mark.slow
@pytest.mark.timeout(14400)
@pytest.mark.parametrize("name", READERS)
def test_fuzz_raises_named_errors_only_and_keeps_memory_bounded(name: str) -> None:
    reader = usable(name)
    seed, rng, accepted, largest = reader.seed(), random.Random(f"{SEED} {name}"), 0, 0
    began = time.monotonic()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    tracemalloc.start()
    try:
        with bounded():
            for number in range(NUM_INPUTS):
                data = reader.mutate(seed, rng)
                try:
                    if number < TRACED:
                        is_accepted, peak = checked(reader, data)
                        largest = max(largest, peak)
                    else:
                        tracemalloc.stop()
                        is_accepted = outcome(reader.read, data)
                except Exception as error:
                    shown = data if len(data) < 2000 else f"{len(data)} bytes"
                    raise AssertionError(
                        f"{name}: {type(error).__name__}: {error} on input {number}, {shown!r}"
                    ) from error
                accepted += is_accepted
    finally:
        tracemalloc.stop()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - grown
    seconds = time.monotonic() - began
    sys.stderr.write(
        f"\n| {name} | {NUM_INPUTS:,} | {seconds:.0f} | {accepted:,} | {largest / 1e3:,.0f} kB | {grown >> 20} MiB |\n"
    )
    assert grown < MOST_GROWTH


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(14400)
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
def test_fuzz_guided_by_coverage(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.support.programs.fuzz_guided", str(SECONDS), str(tmp_path)]
    folder = Path(__file__).resolve().parents[2]
    ended = subprocess.run(program, cwd=folder, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    lines = ended.stderr.splitlines()
    sys.stderr.write(
        "\n".join(line for line in lines if line.endswith("begins") or "number_of_executed" in line) + "\n"
    )
    assert ended.returncode == 0, "\n".join(lines[-60:])


# ── what claims much ────────────────────────────────────────────────────────────────────────────────────────────────


def _item(skeleton: Any) -> bytes:
    return item_codec.head_of(json.dumps(skeleton))


def _npy(shape: str, dtype: str) -> bytes:
    head = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head


def _index(num_pieces: int) -> bytes:
    """An index in which every array is a constant, for any number of pieces."""
    header = {"url": "a", "bytes": 1, "is": "", "pieces": num_pieces, "columns": ["a"]}
    text = json.dumps(header | {"arrays": [["uint8", 1]] * 4}).encode()
    return b"shade-shard-index" + struct.pack("<Q", len(text)) + text + bytes(4 + 8)


def _arrow_footer() -> bytes:
    """An Arrow file whose footer has two billion record batches: the length of their list is changed."""
    data = bytearray(READERS["Arrow file"].seed())
    (length,) = struct.unpack_from("<i", data, len(data) - 10)
    begin = len(data) - 10 - length
    at = data.index(struct.pack("<I", 2), begin)
    while at + 4 < len(data) - 10:
        struct.pack_into("<I", data, at, 2**31 - 1)
        at = data.find(struct.pack("<I", 2), at)
        if at < 0:
            break
    return bytes(data)


def _frame(num_bytes: int) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(level=1).compress(bytes(num_bytes))


def _tar(length: bytes, kind: bytes = b"V", content: bytes = b"") -> bytes:
    """A tar of one header that states a length."""
    info = tarfile.TarInfo("a.cls")
    header = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    header[124:136], header[156:157] = length.ljust(12, b"\0"), kind
    return bytes(header) + content.ljust(-(-len(content) // 512) * 512, b"\0") + bytes(1024)


_NEWER = b'{"format":"shade-checkpoint","version":3,"digest":"","run":"\\udcff"}'


def _misnamed() -> bytes:
    """The index of a disk tier with a table that SQLite cannot read, whose name is no text: it quotes that."""
    seed = READERS["index of a disk tier"].seed()
    return seed.replace(b"tableentry", b"table\x9dntry").replace(b"CREATE TABLE entry", b"CREATE TABLX entry")


def _npz(num_bytes: int) -> bytes:
    """A trace whose directory states other lengths of its members."""
    data = bytearray(READERS["trace of a run"].seed())
    at = data.index(b"PK\1\2")
    while at >= 0:
        struct.pack_into("<II", data, at + 20, num_bytes, num_bytes)
        at = data.find(b"PK\1\2", at + 4)
    return bytes(data)


CLAIMS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "a type that is no Python": ("batch of items", lambda: _item({"scalar": ",f4"})),
    "texts without a character": ("item in a sealed entry", lambda: _item({"array": ["<U0", [2**40]]})),
    "an array of a tebibyte": ("item in a sealed entry", lambda: _item({"array": ["<f8", [2**37]]})),
    "an image of 16 gigapixels": (
        "item in a sealed entry",
        lambda: _item({"image": ["RGB", [2**17, 2**17], 0, None, None]}),
    ),
    "an item of 100,000 lists": ("item in a sealed entry", lambda: item_codec.head_of('{"list":[' * 100_000)),
    "a batch of 100,000 lists": ("batch of items", lambda: item_codec.head_of('{"list":[' * 1500)),
    "npy of a tebibyte": ("npy in an archive", lambda: _npy(f"({2**37},)", "<f8")),
    "npy without characters": ("npy in an archive", lambda: _npy(f"({2**40},)", "|S0")),
    "losses of a tebibyte": ("losses of an epoch", lambda: _npy(f"({2**39},)", "<f2")),
    "a picture of 16 gigapixels": ("picture of MDS", lambda: struct.pack("<III", 2**17, 2**17, 3) + b"RGB"),
    "an index of 10¹² pieces": ("index of shards", lambda: _index(10**12)),
    "two billion record batches": ("Arrow file", _arrow_footer),
    "four billion samples": ("MDS", lambda: struct.pack("<II", 2**32 - 1, 16) + bytes(64)),
    "a page index of 10¹⁵ pages": ("page index of Parquet", lambda: b"\x19\xf7" + b"\xff" * 7 + b"\x07" + bytes(40)),
    "10¹² slots": ("CLUSTER SLOTS", lambda: json.dumps([[0, 10**12, ["h", 7, "id"]]]).encode()),
    "a frame of 2 GB": ("chunk zstd", lambda: _frame(1 << 20)[:6] + struct.pack("<I", 2**31 - 1) + bytes(9)),
    "a frame of many zeros": ("chunk topk-delta", lambda: _frame(64 << 20)),
    "an item of 2⁶³ bytes": ("rows of a recording", lambda: struct.pack("<QQQQ", 2**63, 0, 2**64 - 1, 0)),
    "a tar header of -512 bytes": ("tar", lambda: _tar(b"-00000001000")),
    "a pax record of no bytes": ("tar", lambda: _tar(b"10", b"x", b"0 a=b\n")),
    "a pax size below 0": ("tar", lambda: _tar(b"14", b"x", b"12 size=-512\n")[:-1024] + _tar(b"0")),
    "a newer manifest that cannot be written": ("manifest", lambda: _NEWER),
    "MDS of nested JSON": ("MDS", lambda: struct.pack("<II", 0, 50_008) + b"[" * 50_000),
    "object 10⁹ of a pickle": ("metadata of DCP", lambda: b"\x80\x02]r" + struct.pack("<I", 10**9) + b"."),
    "a name in SQLite that is no text": ("index of a disk tier", _misnamed),
    "a trace of a gigabyte": ("trace of a run", lambda: _npz(1 << 30)),
    "JSON of 100,000 arrays": ("record of another job", lambda: b"[" * 100_000),
}
NESTED = (
    *("record of another job", "mark of a data set in use", "record of `shade cache up`", "index of shards"),
    *("list of shards of a library", "manifest", "commit record", "table of slots", "run lock", "notice"),
    *("note of the storage beside a store", "index of safetensors", "telemetry", "state of a telemetry server"),
    *("profile of `shade tune`", "journal of `shade tune`", "line of a command"),
    *("run.json", "metrics.jsonl", "progress.json"),
)
CLAIMS |= {f"{name}, nested": (name, lambda: b'{"a":' * 50_000) for name in NESTED}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("claim", CLAIMS)
def test_what_is_claimed_and_not_there_takes_no_memory(claim: str) -> None:
    name, built = CLAIMS[claim]
    reader, data = usable(name), built()
    tracemalloc.start()
    try:
        with bounded():
            checked(reader, data)
    finally:
        tracemalloc.stop()


# ── whole files, through `Shards` ───────────────────────────────────────────────────────────────────────────────────


def read_shards(path: Path, index: Path) -> bool:
    """Whether all samples of a shard are read; raises what is no named error."""
    try:
        with Shards(path, index=index) as shards:
            for number in range(min(len(shards), 20)):
                shards[number]
    except ShadeError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SHARDS)
def test_fuzz_of_a_shard_and_its_index(name: str, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    seed, rng = (GOLDEN / "shards" / name).read_bytes(), random.Random(f"{SEED} {name}")
    path, index, num_inputs, accepted = tmp_path / f"x{Path(name).suffix}", tmp_path / "index", NUM_INPUTS // 40, 0
    path.write_bytes(seed)
    assert read_shards(path, index)
    (kept,) = index.glob("*.index")
    right = kept.read_bytes()
    with bounded():
        for number in range(num_inputs):
            try:
                # What other formats keep beside the places is trusted where the checksum is right.
                if path.suffix == ".tar":
                    kept.write_bytes(readers.index_repaired(READERS["index of shards"].mutate(right, rng)))
                    accepted += read_shards(path, index)
                    kept.write_bytes(right)
                other = tmp_path / f"{number}{path.suffix}"
                other.write_bytes(mutated(seed, rng))
                accepted += read_shards(other, tmp_path / "others")
                other.unlink()
            except Exception as error:
                raise AssertionError(f"{name}: {type(error).__name__}: {error} on input {number} of {SEED}") from error
    sys.stderr.write(f"\n{name}: {num_inputs:,} inputs, {accepted:,} accepted\n")
    assert accepted < 2 * num_inputs


def test_a_zip_without_files_has_no_samples(tmp_path: Path) -> None:
    zipfile.ZipFile(tmp_path / "a.zip", "w").close()
    with pytest.raises(ShadeError, match="at least one sample"):
        Shards(tmp_path / "a.zip", index=tmp_path)


def test_an_index_of_what_the_shard_does_not_hold_is_made_again(tmp_path: Path) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        info = tarfile.TarInfo("a.cls")
        info.size = 1
        archive.addfile(info, io.BytesIO(b"7"))
    (tmp_path / "a.tar").write_bytes(stream.getvalue())
    with Shards(tmp_path / "a.tar", "cls", index=tmp_path) as shards:
        (kept,) = tmp_path.glob("*.index")
        before, scan = ShardScan.from_bytes(kept.read_bytes())
        header = {"url": before.url, "bytes": before.num_bytes, "is": before.version}
        scan.length_P = np.array([2**40])
        kept.write_bytes(scan.to_bytes(header))
        assert shards[0] == 7
    with Shards(tmp_path / "a.tar", "cls", index=tmp_path) as shards:
        assert shards[0] == 7


def test_statistics_of_another_column_are_refused_before_pyarrow_sees_them() -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    def written(nullable: bool) -> tuple[bytes, Any]:
        stream = io.BytesIO()
        schema = arrow.schema([arrow.field("a", arrow.string(), nullable)])
        parquet.write_table(arrow.table({"a": ["x", "y"]}, schema), stream)
        data = stream.getvalue()
        return data[-8 - struct.unpack("<I", data[-8:-4])[0] :], parquet.read_metadata(stream).schema

    (footer, schema), (_, other) = written(True), written(False)
    check_statistics(footer, schema)
    with pytest.raises(ValueError, match="the column a"):
        check_statistics(footer, other)


@pytest.mark.parametrize(
    "name", [*sorted(make.STATES.keys() - {"engine"}), pytest.param("engine", marks=pytest.mark.slow)]
)
def test_a_state_of_something_else_is_refused(name: str) -> None:
    one = make.STATES[name]()
    target = one.engine if name == "engine" else one.target
    try:
        for state in ({}, {"settings": {}, "sampler": None, "num_workers": 0}):
            with pytest.raises(ShadeError, match="expected"):
                target.load_state_dict(state)
    finally:
        one.close()


def test_a_run_file_with_a_value_of_another_type_is_refused(tmp_path: Path) -> None:
    path = RunConfig(str(tmp_path), "script.py", ("data",)).save()
    path.write_text(path.read_text().replace('"epochs": 1', '"epochs": "1"'))
    with pytest.raises(ShadeError, match=r"run\.json"):
        RunConfig.load(path)
