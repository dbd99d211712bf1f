"""Clips of real videos, read by range: examples/video_clips.py with PyAV, on this machine and behind a web server."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from shade import ShadeDataset, ShadeSampler, Shards
from shade.data._origin.origin import FileOrigin
from shade.data._origin.url_origin import UrlOrigin
from shade.errors import BadSampleError, DataError
from tests.support.web_server import WebServer, serving

ROOT = Path(__file__).resolve().parents[2]
av: Any = pytest.importorskip("av", exc_type=ImportError)
sys.path.insert(0, str(ROOT / "examples"))
VideoClips: Any = importlib.import_module("video_clips").VideoClips
sys.path.remove(str(ROOT / "examples"))
COLUMNS = ["frames", "file", "first"]
CODECS = {
    "libx264": {"g": "12", "bf": "3"},
    "libx265": {"x265-params": "keyint=12:open-gop=0:log-level=none"},
    "libvpx-vp9": {"g": "12"},
    "mpeg4": {"g": "12"},
}


@pytest.fixture(autouse=True)
def cache_is_never_slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shade.cache.breaker.SLOW_SECONDS", 1e9)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_video(
    path: Path, codec: str = "libx264", num_frames: int = 75, side: int = 64, options: dict[str, str] | None = None,
    sound: bool = True, container_options: dict[str, str] | None = None,
) -> list[np.ndarray]:  # fmt: skip
    """Noise that moves, with sound; returns the frames of the whole video, decoded."""
    random = np.random.default_rng(num_frames)
    picture = random.integers(0, 256, (side, side, 3), dtype=np.uint8)
    with av.open(str(path), "w", options=container_options or {}) as container:
        video = container.add_stream(codec, rate=25, options=CODECS[codec] if options is None else options)
        video.width = video.height = side
        video.pix_fmt = "yuv420p"
        audio = container.add_stream("aac", rate=16000, layout="mono") if sound else None
        for number in range(num_frames):
            moved = np.roll(picture, 3 * number, axis=1) + random.integers(0, 9, picture.shape, dtype=np.uint8)
            container.mux(video.encode(av.VideoFrame.from_ndarray(moved, format="rgb24")))
            if audio is not None:
                wave = av.AudioFrame.from_ndarray(random.normal(size=(1, 640)).astype(np.float32), "fltp", "mono")
                wave.sample_rate = 16000
                container.mux(audio.encode(wave))
        for stream in (video, audio):
            container.mux([] if stream is None else stream.encode())
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


@pytest.mark.parametrize(("num_frames", "stride"), [(8, 8), (5, 3), (40, 20), (1, 1)])
@pytest.mark.parametrize(
    "codec", ["libx264", *(pytest.param(other, marks=pytest.mark.slow) for other in ("libx265", "libvpx-vp9"))]
)
def test_a_clip_has_the_frames_of_the_whole_video(codec: str, num_frames: int, stride: int, tmp_path: Path) -> None:
    whole = [write_video(tmp_path / f"{number}.mp4", codec, 50 + number) for number in range(2)]
    shards = Shards(tmp_path, COLUMNS, format=VideoClips(num_frames, stride))
    expected = [(number, first) for number in range(2) for first in range(0, 51 + number - num_frames, stride)]
    assert len(shards) == len(expected)
    dataset = ShadeDataset(shards, cache="memory://", working_set_fraction=1.0)
    for _ in range(2):  # from the video, and from the cache
        for (frames, file, first, _), (number, start) in zip(
            dataset.__getitems__(range(len(dataset))), expected, strict=True
        ):
            assert (os.path.basename(file), first) == (f"{number}.mp4", start)
            assert np.array_equal(frames, whole[number][start : start + num_frames])
    assert dataset.stats()["hit_ratio"] == 0.5
    dataset.close()


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of what is read of files and URLs."""
    lengths: list[int] = []
    for origin in (FileOrigin, UrlOrigin):
        read = origin._content

        def counted(self: Any, path: Any, read: Any = read) -> bytes:
            content: bytes = read(self, path)
            lengths.append(len(content))
            return content

        monkeypatch.setattr(origin, "_content", counted)
    return lengths


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WebServer]:
    (tmp_path / "site").mkdir()
    with serving(tmp_path / "site") as server:
        yield server


@pytest.mark.parametrize("is_remote", [False, True])
def test_of_a_long_video_its_header_is_read_once_and_then_clips_alone(
    is_remote: bool, server: WebServer, tmp_path: Path, bytes_read: list[int]
) -> None:
    path = tmp_path / "site" / "long.mp4"
    whole = write_video(path, num_frames=250, side=192, options={"g": "12", "qp": "12", "preset": "ultrafast"})
    record_bytes = path.stat().st_size
    assert record_bytes > 4 << 20
    place = f"{server.url}/long.mp4" if is_remote else path
    clips = VideoClips(num_frames=8, stride=8)
    Shards(place, COLUMNS, format=clips).close()
    assert sum(bytes_read) < 0.3 * record_bytes  # the header, and two groups of pictures

    bytes_read.clear()
    dataset = ShadeDataset(Shards(place, COLUMNS, format=clips), cache="memory://", working_set_fraction=1.0)
    probed = sum(bytes_read)
    bytes_read.clear()
    frames, _, first, index = dataset[17]
    assert (first, index) == (17 * 8, 17)
    assert np.array_equal(frames, whole[first : first + 8])
    assert 0 < sum(bytes_read) < 0.1 * record_bytes  # two groups of twelve of 250 frames
    assert dataset.stats()["origin_bytes"] - probed == sum(bytes_read)

    bytes_read.clear()
    order = np.random.default_rng(0).permutation(len(dataset)).tolist()
    dataset.__getitems__(order)
    bytes_read.clear()
    for frames, _, first, _ in dataset.__getitems__(order[::-1]):
        assert np.array_equal(frames, whole[first : first + 8])
    assert bytes_read == []
    assert dataset.cache is not None
    assert dataset.stats()["cache_bytes"] < 2.5 * record_bytes  # groups of pictures that two clips share, and twice one
    dataset.close()


@pytest.mark.parametrize("disk", [False, True])
def test_clips_continue_in_mid_epoch(disk: bool, tmp_path: Path) -> None:
    (tmp_path / "videos").mkdir()
    whole = [write_video(tmp_path / "videos" / f"{number}.mp4", num_frames=70 + number) for number in range(3)]

    def opened() -> tuple[ShadeDataset, ShadeSampler, Any]:
        near = f"{tmp_path}/disk?capacity=10MiB" if disk else None
        shards = Shards(tmp_path / "videos", COLUMNS, format=VideoClips(6, 4), disk=near)
        dataset = ShadeDataset(shards, cache="memory://", working_set_fraction=0.4)
        sampler = ShadeSampler(dataset, batch_size=4, mode="uniform", seed=1)
        return dataset, sampler, DataLoader(dataset, batch_size=4, sampler=sampler)

    def epoch(loader: Any, sampler: ShadeSampler, stop: int | None = None) -> list[int]:
        seen: list[int] = []
        for frames, files, firsts, indices in loader:
            for clip, file, first in zip(frames, files, firsts.tolist(), strict=True):
                assert np.array_equal(clip, whole[int(Path(file).stem)][first : first + 6])
            sampler.report(indices, torch.ones(len(indices)))
            seen += indices.tolist()
            if len(seen) == stop:
                break
        return seen

    dataset, sampler, loader = opened()
    expected = epoch(loader, sampler)
    assert sorted(expected) == list(range(len(dataset)))
    sampler.close()
    dataset.close()
    dataset, sampler, loader = opened()
    found = epoch(loader, sampler, stop=12)
    state = sampler.state_dict()
    sampler.close()
    dataset.close()
    dataset, sampler, loader = opened()
    sampler.load_state_dict(state)
    assert found + epoch(loader, sampler) == expected
    sampler.close()
    dataset.close()


def test_another_length_is_another_index_and_hits_nothing(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4")
    cache = f"disk://{tmp_path}/cache?capacity=10MiB"
    hits = []
    for clips in (VideoClips(8), VideoClips(8), VideoClips(9), VideoClips(8, version=2)):
        shards = Shards(tmp_path, COLUMNS, format=clips, index=tmp_path / "index")
        dataset = ShadeDataset(shards, cache=cache, working_set_fraction=1.0)
        frames, *_ = dataset[2]
        assert len(frames) == clips.num_frames
        hits.append(dataset.stats()["hits"])
        dataset.close()
    assert hits == [0, 1, 0, 0]
    assert len(list((tmp_path / "index").glob("*.index"))) == 3


@pytest.mark.parametrize("codec", ["mpeg4", "libx265"])
def test_open_groups_of_pictures_are_refused_by_name_and_closed_ones_are_the_cure(codec: str, tmp_path: Path) -> None:
    is_x265 = codec == "libx265"
    options = {"x265-params": "keyint=12:open-gop=1:log-level=none"} if is_x265 else {"g": "12", "bf": "2"}
    write_video(tmp_path / "a.mp4", codec, options=options)
    with pytest.raises(DataError, match=r"each group of pictures in .*a\.mp4 to stand alone.*closed groups"):
        Shards(tmp_path, COLUMNS, format=VideoClips())
    cured = {"x265-params": "keyint=12:open-gop=0:log-level=none"} if is_x265 else {"g": "12", "bf": "0"}
    write_video(tmp_path / "a.mp4", codec, options=cured)
    assert len(Shards(tmp_path, COLUMNS, format=VideoClips())) == 9


def test_a_video_without_an_index_is_refused_by_name_and_mp4_is_the_cure(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mkv", sound=False)
    with pytest.raises(DataError, match=r"an index of all frames in .*a\.mkv.*as mp4"):
        Shards(tmp_path / "a.mkv", COLUMNS, format=VideoClips())
    write_video(tmp_path / "a.mp4", sound=False)
    assert len(Shards(tmp_path / "a.mp4", COLUMNS, format=VideoClips())) == 9


@pytest.mark.parametrize("part", [0.0, 0.2, 0.5, 0.98])
@pytest.mark.parametrize("header_first", [False, True])
def test_a_truncated_video_is_refused_by_name(header_first: bool, part: float, tmp_path: Path) -> None:
    options = {"movflags": "faststart"} if header_first else {}
    write_video(tmp_path / "a.mp4", container_options=options)
    content = (tmp_path / "a.mp4").read_bytes()
    (tmp_path / "a.mp4").write_bytes(content[: int(part * len(content))])
    with pytest.raises(DataError, match=r"a\.mp4 to be a whole video.*copy it again"):
        Shards(tmp_path / "a.mp4", COLUMNS, format=VideoClips())


def test_a_video_that_changes_in_mid_run_is_refused_by_name(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4")
    dataset = ShadeDataset(Shards(tmp_path, COLUMNS, format=VideoClips()), cache=None)
    write_video(tmp_path / "a.mp4", num_frames=60)
    with pytest.raises(DataError, match=r"a\.mp4 to be what it was"):
        dataset[1]
    dataset.close()


def test_a_damaged_clip_is_a_bad_sample(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", sound=False)
    shards = Shards(tmp_path, COLUMNS, format=VideoClips())
    status = os.stat(tmp_path / "a.mp4")
    span = shards._index.scans[0].span(4)
    content = bytearray((tmp_path / "a.mp4").read_bytes())
    content[span[0] : span[1]] = bytes(span[1] - span[0])
    (tmp_path / "a.mp4").write_bytes(content)
    os.utime(tmp_path / "a.mp4", ns=(status.st_atime_ns, status.st_mtime_ns))  # which the index cannot see
    with pytest.raises(BadSampleError, match=r"sample 4 of .*a\.mp4"):
        shards[4]
