"""Train on clips of long videos: the bytes of the wanted frames are read, and not the whole video.

    pip install torch-shade av
    python examples/video_clips.py

`VideoClips` is a format of `Shards`: a sample is a number of frames. A video can be decoded from a key frame on, so the
range of a clip begins with the last key frame before its first frame, and ends before the first key frame after its
last one. Where the frames lie is in the header of the file, which is read once and kept; nothing is converted.

What is cached are the bytes of a clip, so they stay small; decoding comes after the cache. What to know: mp4 and mov
have such a header, others are refused by name. So are videos with open groups of pictures, in which frames before a key
frame need it: x264 writes closed ones, x265 with ``open-gop=0``.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
from torch.utils.data import DataLoader

from shade import ShadeDataset, ShadeSampler, Shards
from shade.data import RangeParts, ShardFile, ShardFormat, ShardScan
from shade.errors import DataError

COLOURS = ("color_primaries", "color_range", "color_trc", "colorspace")


class Video:
    """The header of a video: its codec, and where each frame lies, in the order of decoding."""

    def __init__(self, extra: bytes) -> None:
        about, _, table = extra.partition(b"\n")
        self.about = json.loads(about)
        self.starts, self.sizes, is_key = np.frombuffer(table, np.int64).reshape(3, -1)
        self.keys = np.flatnonzero(is_key)

    @staticmethod
    def header(file: ShardFile) -> bytes:
        """Reads the header of a file."""
        name = file.entry.url
        try:
            with av.open(file.as_file()) as container:
                video, codec = container.streams.video[0], container.streams.video[0].codec_context
                entries = [(entry.pos, entry.size, entry.is_keyframe) for entry in video.index_entries]
                is_cut = any(entry.is_discard for entry in video.index_entries)
                about = {"file": name, "codec": codec.name, "extra": (codec.extradata or b"").hex()}
                about |= {colour: int(getattr(codec, colour)) for colour in COLOURS}
                num_frames = video.frames
        except av.FFmpegError as error:
            raise DataError.of(f"{name} to be a whole video", str(error), "copy it again") from error
        if not entries or len(entries) != num_frames or not entries[0][2] or is_cut:
            cure = "write it anew as mp4: ffmpeg -i video -c:v libx264 video.mp4"
            raise DataError.of(f"an index of all frames in {name}", f"{len(entries)} of them", cure)
        table = np.array(entries, np.int64)
        if table[:, :2].sum(1).max() > file.entry.num_bytes:
            raise DataError.of(f"{name} to be a whole video", f"{file.entry.num_bytes} bytes", "copy it again")
        return json.dumps(about).encode() + b"\n" + table.T.tobytes()

    def groups(self, first: int, stop: int) -> tuple[int, int]:
        """Returns the frames (begin, end) of the groups of pictures that hold the frames ``first`` … ``stop``."""
        before, after = np.searchsorted(self.keys, first, "right") - 1, np.searchsorted(self.keys, stop)
        return int(self.keys[before]), int(self.keys[after]) if after < len(self.keys) else len(self.starts)

    def span(self, begin: int, end: int) -> tuple[int, int]:
        """Returns the bytes in which frames lie; in between, there may be sound."""
        return int(self.starts[begin:end].min()), int((self.starts + self.sizes)[begin:end].max())

    def packets(self, begin: int, end: int, content: memoryview) -> list[bytes]:
        """Cuts frames from the content of their `span`."""
        at, size = self.starts[begin:end] - self.starts[begin:end].min(), self.sizes[begin:end]
        return [bytes(content[start : start + length]) for start, length in zip(at, size, strict=True)]

    def decode(self, packets: Sequence[bytes]) -> list[Any]:
        """Decodes whole groups of pictures."""
        codec = av.CodecContext.create(self.about["codec"], "r")
        codec.thread_count, codec.extradata = 1, bytes.fromhex(self.about["extra"]) or None
        for name in COLOURS:
            setattr(codec, name, self.about[name])
        frames = [frame for packet in packets for frame in codec.decode(av.Packet(packet))] + codec.decode(None)
        if len(frames) != len(packets):
            got = f"{len(frames)} of {len(packets)} frames"
            cure = "encode it with closed groups of pictures (x265: open-gop=0)"
            raise DataError.of(f"each group of pictures in {self.about['file']} to stand alone", got, cure)
        return frames


@dataclass(frozen=True)
class VideoClips(ShardFormat):
    """Clips of ``num_frames`` frames, one every ``stride`` frames. Columns: ``frames`` (uint8, T × H × W × 3), ``file``
    and ``first``, the number of the first frame in its file."""

    num_frames: int = 8
    stride: int = 8
    version: int = 1
    suffixes = ("mp4", "mov")

    def scan(self, file: ShardFile) -> ShardScan:
        """Finds the clips of one video, and decodes two groups of pictures to see whether they stand alone."""
        header = Video.header(file)
        video = Video(header)
        begin, end = video.groups(0, int(video.keys[min(1, len(video.keys) - 1)]) + 1)
        video.decode(video.packets(begin, end, memoryview(file.range(*video.span(begin, end)))))
        if len(video.keys) > 1:
            begin = int(video.keys[1])
            video.decode(video.packets(begin, end, memoryview(file.range(*video.span(begin, end)))))
        firsts = range(0, len(video.starts) - self.num_frames + 1, self.stride)
        spans = [video.span(*video.groups(first, first + self.num_frames)) for first in firsts]
        starts, lengths = [start for start, _ in spans], [stop - start for start, stop in spans]
        return ShardScan.of(starts, lengths, ["frames", "file", "first"], header)

    def payloads(self, scan: ShardScan, piece: int, parts: RangeParts, columns: Any, rows: Any) -> list[bytes]:
        """Returns what is cached of a clip: its number, and the frames of its groups of pictures without the sound."""
        video, first = scan.parsed("video", Video), piece * self.stride
        packets = video.packets(*video.groups(first, first + self.num_frames), parts.range(*scan.span(piece)))
        return [b"".join([piece.to_bytes(8, "little"), *packets])]

    def row(self, scan: ShardScan, payload: Any, columns: Any) -> dict[str, Any]:
        """Decodes a clip."""
        video, first = scan.parsed("video", Video), int.from_bytes(payload[:8], "little") * self.stride
        begin, end = video.groups(first, first + self.num_frames)
        stops = 8 + np.cumsum(video.sizes[begin:end])
        cut = zip(stops - video.sizes[begin:end], stops, strict=True)
        frames = video.decode([bytes(payload[start:stop]) for start, stop in cut])
        clip = frames[first - begin : first - begin + self.num_frames]
        pixels = np.stack([frame.to_ndarray(format="rgb24") for frame in clip])
        return {"frames": pixels, "file": video.about["file"], "first": first}


def write_video(path: Path, num_frames: int = 120, seed: int = 0) -> None:
    """Stands for a long video: a picture that moves, with a key frame every twelve frames."""
    picture = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    with av.open(path, "w") as container:
        video = container.add_stream("libx264", rate=25, options={"g": "12"})
        video.width, video.height, video.pix_fmt = 64, 64, "yuv420p"
        for number in range(num_frames):
            frame = av.VideoFrame.from_ndarray(np.roll(picture, number, axis=1), format="rgb24")
            container.mux(video.encode(frame))
        container.mux(video.encode())


def main() -> None:
    """Reads the clips of four videos twice, and compares one with the whole video."""
    with tempfile.TemporaryDirectory() as folder:
        for number in range(4):
            write_video(Path(folder, f"{number}.mp4"), seed=number)
        shards = Shards(folder, ["frames", "file", "first"], format=VideoClips(num_frames=8, stride=4), index=folder)
        dataset = ShadeDataset(shards, cache="local://", working_set_fraction=1.0)
        sampler = ShadeSampler(dataset, batch_size=8, mode="uniform")
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for batch in DataLoader(dataset, batch_size=8, sampler=sampler):
                frames, files, firsts, _ = batch
        with av.open(files[0]) as container:
            whole = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        same = np.array_equal(frames[0].numpy(), whole[int(firsts[0]) : int(firsts[0]) + 8])
        print(f"{len(dataset)} clips, {tuple(frames.shape)} a batch; the frames are those of the whole video: {same}")
        print(f"share of the clips from the cache: {dataset.stats()['hit_ratio']:.0%}")
        sampler.close()
        dataset.close()


if __name__ == "__main__":
    main()
