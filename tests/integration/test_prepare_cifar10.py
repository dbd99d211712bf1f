"""The archive becomes two image folders, exactly; what is damaged, hostile or half done is noticed."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import pickle
import struct
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import CIFAR10, ImageFolder

from shade.errors import DataError

pytestmark = pytest.mark.multiprocess

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "prepare_CIFAR10.py"
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
PER_BATCH = 20


class Python2Pickler(pickle._Pickler):
    """Writes protocol 2 as Python 2 did, as the official batches are: every string is bytes, numpy has its old name."""

    dispatch: ClassVar[dict[type, Any]] = dict(pickle._Pickler.dispatch)

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)

    def save_string(self, value: Any) -> None:
        raw = value.encode() if isinstance(value, str) else value
        self.write(pickle.BINSTRING + struct.pack("<i", len(raw)) + raw)
        self.memoize(value)

    def save_global(self, obj: Any, name: str | None = None) -> None:
        module = obj.__module__.replace("numpy._core", "numpy.core")
        self.write(pickle.GLOBAL + f"{module}\n{name or obj.__qualname__}\n".encode())
        self.memoize(obj)

    dispatch[bytes] = dispatch[str] = save_string
    dispatch[type] = dispatch[type(np.empty)] = dispatch[type(len)] = dispatch[type(hashlib.new)] = save_global


def python2_pickle(value: Any) -> bytes:
    file = io.BytesIO()
    Python2Pickler(file).dump(value)
    return file.getvalue()


@pytest.fixture(scope="module")
def cifar() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_CIFAR10", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["prepare_CIFAR10"] = module
    spec.loader.exec_module(module)
    return module


class Source:
    """A small archive in the official format, with its checksums."""

    def __init__(self, folder: Path, **replaced: bytes) -> None:
        self.folder = folder
        self.images: dict[str, list[tuple[np.ndarray[Any, Any], str]]] = {"train": [], "test": []}
        generator = np.random.default_rng(0)
        files = {}
        for number, name in enumerate([f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]):
            data = generator.integers(0, 256, (PER_BATCH, 3072), dtype=np.uint8)
            labels = generator.integers(0, 10, PER_BATCH).tolist()
            files[name] = python2_pickle({"data": data, "labels": labels, "batch_label": f"batch {number}"})
            split = self.images["test" if name == "test_batch" else "train"]
            for row, label in zip(data, labels, strict=True):
                split.append((row.reshape(3, 32, 32).transpose(1, 2, 0), CLASSES[label]))
        files["batches.meta"] = python2_pickle({"label_names": CLASSES, "num_vis": 3072})
        self.files = {**files, **replaced}
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w:gz") as tar:
            for name, data in self.files.items():
                entry = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
        folder.mkdir(parents=True, exist_ok=True)
        self.archive = folder / "cifar-10-python.tar.gz"
        self.archive.write_bytes(content.getvalue())
        self.md5 = {name: hashlib.md5(data).hexdigest() for name, data in self.files.items()}
        self.md5[self.archive.name] = hashlib.md5(content.getvalue()).hexdigest()

    def extract(self) -> None:
        """Replaces the archive by the folder it holds."""
        (self.folder / "cifar-10-batches-py").mkdir()
        for name, data in self.files.items():
            (self.folder / "cifar-10-batches-py" / name).write_bytes(data)
        self.archive.unlink()


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path / "source")


def arguments(source: Source, dest: Path, style: str = "-{}") -> list[str]:
    values = {"train_src": source.folder, "test_src": source.folder, "train_dest": dest / "a", "test_dest": dest / "b"}
    names = {name: name.replace("_", "-") if style == "--{}" else name for name in values}
    return [part for name, value in values.items() for part in (style.format(names[name]), str(value))]


def check_folder(folder: Path, images: list[tuple[np.ndarray[Any, Any], str]]) -> None:
    paths = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    wanted = {f"{name}/{number:05d}.png" for number, (_, name) in enumerate(images)}
    assert paths == wanted | {".cifar10.json"}
    for number, (pixels, name) in enumerate(images):
        with Image.open(folder / name / f"{number:05d}.png") as image:
            np.testing.assert_array_equal(np.asarray(image), pixels)
    assert len(ImageFolder(str(folder))) == len(images)


@pytest.mark.parametrize("style", ["-{}", "--{}"])
def test_an_archive_becomes_two_image_folders(
    cifar: ModuleType, source: Source, tmp_path: Path, style: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cifar.main(arguments(source, tmp_path, style), md5=source.md5) == 0
    check_folder(tmp_path / "a", source.images["train"])
    check_folder(tmp_path / "b", source.images["test"])
    assert "train: 100 of 100 images written" in capsys.readouterr().out


def test_an_extracted_folder_will_do(cifar: ModuleType, source: Source, tmp_path: Path) -> None:
    source.extract()
    assert cifar.main(arguments(source, tmp_path), md5=source.md5) == 0
    check_folder(tmp_path / "b", source.images["test"])


def test_a_complete_folder_is_left_alone_without_its_source(
    cifar: ModuleType, source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cifar.main(arguments(source, tmp_path), md5=source.md5) == 0
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.png")}
    source.archive.unlink()
    assert cifar.main(arguments(source, tmp_path), md5=source.md5) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.png")} == times
    assert "100 images already in" in capsys.readouterr().out


def test_a_half_written_folder_is_completed(
    cifar: ModuleType,
    source: Source,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace, written = cifar._replace, []

    def killed(path: Path, content: bytes) -> None:
        if len(written) == 37:
            path.with_name(f".{path.name}.1.tmp").write_bytes(content[: len(content) // 2])
            raise OSError(28, "No space left on device")
        written.append(path)
        replace(path, content)

    monkeypatch.setattr(cifar, "_replace", killed)
    assert cifar.main(arguments(source, tmp_path), md5=source.md5) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == "prepare_CIFAR10: [Errno 28] No space left on device"
    assert len(list(tmp_path.rglob("*.png"))) == 37
    monkeypatch.setattr(cifar, "_replace", replace)
    kept = written[5].stat().st_mtime_ns
    assert cifar.main(arguments(source, tmp_path), md5=source.md5) == 0
    assert "train: 63 of 100 images written" in capsys.readouterr().out
    assert written[5].stat().st_mtime_ns == kept
    check_folder(tmp_path / "a", source.images["train"])


def test_an_image_that_was_lost_is_written_again(cifar: ModuleType, source: Source, tmp_path: Path) -> None:
    assert cifar.main(arguments(source, tmp_path), md5=source.md5) == 0
    next((tmp_path / "a").glob("*/*.png")).unlink()
    assert cifar.main(arguments(source, tmp_path), md5=source.md5) == 0
    check_folder(tmp_path / "a", source.images["train"])


@pytest.mark.parametrize("extracted", [False, True])
def test_a_damaged_source_is_refused_before_it_is_read(
    cifar: ModuleType, source: Source, tmp_path: Path, extracted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if extracted:
        source.extract()
    path = source.folder / "cifar-10-batches-py" / "data_batch_1" if extracted else source.archive
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    assert cifar.main(arguments(source, tmp_path), md5=source.md5) == 2
    (line,) = [text for text in capsys.readouterr().err.splitlines() if text.startswith("prepare_CIFAR10: ")]
    assert f"expected {path.name} with MD5 {source.md5[path.name]}" in line
    assert "remove it and fetch it again" in line
    assert not list(tmp_path.rglob("*.png"))


class Bomb:
    """Unpickled by an ordinary unpickler, makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_a_batch_that_would_run_code_is_refused(
    cifar: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = Source(tmp_path / "source", data_batch_1=pickle.dumps({"data": Bomb(tmp_path / "boom")}, protocol=2))
    assert cifar.main(arguments(hostile, tmp_path), md5=hostile.md5) == 2
    assert "expected a pickle of numpy arrays" in capsys.readouterr().err
    assert not (tmp_path / "boom").exists()


def test_the_splits_cannot_be_mixed(
    cifar: ModuleType, source: Source, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = {"train_src": source.folder, "test_src": source.folder, "md5": source.md5}
    with pytest.raises(DataError, match="two different destinations"):
        cifar.prepare(train_dest=tmp_path / "a", test_dest=tmp_path / "a", **folders)
    cifar.prepare(train_dest=tmp_path / "a", test_dest=tmp_path / "b", **folders)
    with pytest.raises(DataError, match=r"an empty folder or a train one"):
        cifar.prepare(train_dest=tmp_path / "b", test_dest=tmp_path / "c", **folders)


def test_nothing_there_and_no_network_is_one_line(
    cifar: ModuleType,
    source: Source,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def offline(*_args: object, **_kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("torchvision.datasets.utils.download_url", offline)
    source.archive.unlink()
    assert cifar.main(arguments(source, tmp_path), md5=source.md5) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "expected cifar-10-python.tar.gz or cifar-10-batches-py" in line
    assert "fetch it on another machine and put it there" in line


def test_the_official_checksums_are_those_of_torchvision(cifar: ModuleType) -> None:
    theirs = {CIFAR10.filename: CIFAR10.tgz_md5, CIFAR10.meta["filename"]: CIFAR10.meta["md5"]}
    theirs.update(dict(CIFAR10.train_list + CIFAR10.test_list))
    assert theirs == cifar.OFFICIAL_MD5


def test_the_command_line_explains_itself() -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "--train-src" in result.stdout
