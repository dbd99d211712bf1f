"""What each checkpoint codec makes of a training's state: bytes, seconds, error; and whether the cost model is right.

Question
    How small are keyframes and differences, how fast are they packed and built again, how far is what comes back? Does
    ``compress="if-faster"`` choose what is faster? Is the k-means on bins as good as scikit-learn's, and how much
    faster?

Method
    A GPT-2 of 11 M parameters with AdamW (130 MB of state, random weights, random tokens), saved every ``--every``
    steps, ``--saves`` times. For each codec the same states are packed by `shade.checkpoint._save.packing.Packer`,
    stored in a folder and read back by `shade.checkpoint._restore.restore`.

    keyframe, delta   stored bytes over the state's.
    pack, build       MB of state a second, of the writer's thread and of a restore, keyframes apart from deltas.
    off               greatest relative error of a weight, and of a moment, over all saves.

    Cost model: a volume that takes so many MB/s on top of what it does; ``always``, ``never`` (codec none) and
    ``if-faster`` take turns; wins if it is within 5 % of the faster of the two.

Command
    python benchmarks/bench_codecs.py --out benchmarks/results     (on an idle machine, six minutes; --saves 4: a look)

Reading
    Figures: benchmarks/results/codecs.md, docs/decisions/0028-compression.md.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measures import publish

from shade.checkpoint._capture.flatten import flatten
from shade.checkpoint._capture.layout import TensorSpec, bytes_of, lay_out
from shade.checkpoint._codecs.base import CODECS
from shade.checkpoint._codecs.excp import cluster
from shade.checkpoint._commit.protocol import agree, store
from shade.checkpoint._restore.reader import Reader
from shade.checkpoint._restore.restore import read_newest
from shade.checkpoint._save.packing import Packer
from shade.checkpoint._tiers.storage import StorageTier
from shade.rank_group import SingleProcessGroup
from shade.storage import open_volume

KEYFRAME_EVERY = 4


def states(saves: int, every: int) -> Iterator[tuple[Any, dict[str, torch.Tensor]]]:
    """A training's state, again and again."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=320, n_head=8, vocab_size=20_000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(saves):
        for _ in range(every):
            tokens = torch.randint(0, 20_000, (2, 64))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        yield flatten({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


class Slow:
    """Seconds that a volume of so many bytes a second takes for a write."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second

    def __call__(self, num_bytes: int) -> float:
        return num_bytes / self._rate


def run(
    codec: str,
    saved: list[tuple[Any, dict[str, torch.Tensor]]],
    folder: Path,
    rate: float | None = None,
    compress: str = "always",
) -> dict[str, list[float]]:
    """Packs, stores, reads back; what it took, in lists by name."""
    tier = StorageTier(open_volume(str(folder)), "run")
    slow = None if rate is None else Slow(rate)
    packer = Packer("run", 0, 1, codec, keyframe_every=KEYFRAME_EVERY, compress=compress, time_write=slow)
    found: dict[str, list[float]] = {name: [] for name in ("keyframe", "delta", "pack_keyframe", "pack_delta")}
    found |= {name: [] for name in ("build_keyframe", "build_delta", "off_weight", "off_moment", "save")}
    for number, (tree, tensors) in enumerate(saved):
        layout = lay_out({name: TensorSpec.of(tensor) for name, tensor in tensors.items()}, 0, 1)
        buffer = torch.cat([bytes_of(tensors[name].contiguous()) for name in layout.entries])
        wanted = buffer.clone()
        begun = time.perf_counter()
        packed = packer.pack(number, buffer, layout.num_bytes, layout.entries, tree)
        seconds = time.perf_counter() - begun
        record, shard_bytes, _ = agree(
            SingleProcessGroup(), packed.manifest, None, sequence=number + 1, saved_at=0.0, base=packed.base
        )
        assert (
            store(tier, SingleProcessGroup(), record, shard_bytes, packed.manifest, lambda chunks=packed.chunks: chunks)
            is not None
        )
        packer.committed(packed, record.digest, buffer)
        kind = "keyframe" if packed.base is None else "delta"
        found[kind].append(packed.manifest.stored_bytes / layout.num_bytes)
        found[f"pack_{kind}"].append(layout.num_bytes / 1e6 / seconds)
        found["save"].append(seconds + (0.0 if slow is None else slow(packed.manifest.stored_bytes)))
        if slow is not None:
            continue
        begun = time.perf_counter()
        back = read_newest(Reader([tier]), SingleProcessGroup())
        assert back is not None
        found[f"build_{kind}"].append(layout.num_bytes / 1e6 / (time.perf_counter() - begun))
        for name, bound in back.bounds.items():
            off = back.tensors[name].double() - wanted[layout.entries[name].start : layout.entries[name].stop].view(
                torch.float32
            ).view(back.tensors[name].shape)
            assert float(off.abs().max()) <= bound.max_abs
            found["off_moment" if "/state/" in name else "off_weight"].append(bound.relative)
    tier.close()
    shutil.rmtree(folder)
    return found


def codecs(saved: list[Any], folder: Path) -> list[str]:
    """The table of codecs."""
    lines = ["| codec | keyframe | delta | pack both (MB/s) | build both (MB/s) | off: weights, moments |"]
    lines.append("|---|---|---|---|---|---|")
    for name in CODECS:
        found = run(name, saved, folder)

        def middle(key: str, found: dict[str, list[float]] = found) -> str:
            return f"{statistics.median(found[key]):,.0f}" if found[key] else "–"

        sizes = [f"{100 * statistics.mean(found[key]):.1f} %" if found[key] else "–" for key in ("keyframe", "delta")]
        off = [f"{max(found[key]):.1e}" if found[key] else "exact" for key in ("off_weight", "off_moment")]
        rates = [f"{middle(f'{what}_keyframe')}, {middle(f'{what}_delta')}" for what in ("pack", "build")]
        lines.append(f"| {name} | {' | '.join(sizes)} | {' | '.join(rates)} | {', '.join(off)} |")
    return lines


def model(saved: list[Any], folder: Path) -> list[str]:
    """The table of the cost model."""
    lines = ["| codec | writes at | as it is | always | if-faster | chosen rightly |", "|---|---|---|---|---|---|"]
    for name in ("zstd", "xor-zstd", "topk-delta", "int8-delta"):
        for rate in (2e7, 2e8, 2e9, 2e10):
            took = {}
            for kind, codec, compress in (
                ("none", "none", "always"),
                ("always", name, "always"),
                ("if-faster", name, "if-faster"),
            ):
                seconds = run(codec, saved, folder, rate, compress)["save"]
                took[kind] = statistics.mean(seconds[KEYFRAME_EVERY:])  # the first saves measure
            right = took["if-faster"] <= 1.05 * min(took["none"], took["always"])
            cells = " | ".join(f"{took[kind]:.3f} s" for kind in ("none", "always", "if-faster"))
            lines.append(f"| {name} | {rate / 1e6:,.0f} MB/s | {cells} | {'yes' if right else 'no'} |")
    return lines


def kmeans() -> list[str]:
    """Ours and scikit-learn's, on a million numbers like weights' changes."""
    rng = np.random.default_rng(0)
    values = (rng.normal(0, 1, 2**20) * rng.gamma(2, 1, 2**20)).astype(np.float32)
    lines = ["| k-means, 15 clusters of 1 M numbers | seconds | mean squared error |", "|---|---|---|"]
    ways: dict[str, Any] = {"on bins": lambda: cluster(values, 15)}
    try:
        from sklearn.cluster import KMeans

        def theirs() -> Any:
            made = KMeans(15, n_init=1, random_state=0).fit(values[:, None])
            return made.cluster_centers_[:, 0], made.labels_

        ways["scikit-learn"] = theirs
    except ImportError:
        sys.stderr.write("scikit-learn is not installed\n")
    for name, way in ways.items():
        begun = time.perf_counter()
        centres, labels = way()
        seconds = time.perf_counter() - begun
        error = float(np.square(values.astype(np.float64) - centres[labels]).mean())
        lines.append(f"| {name} | {seconds:.3f} | {error:.5f} |")
    return lines


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=12)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--no-model", action="store_true", help="leave the cost model out")
    parser.add_argument("--out", type=Path, help="folder for codecs.md")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-codecs-"))
    try:
        saved = [
            (tree, {name: each.clone() for name, each in tensors.items()})
            for tree, tensors in states(given.saves, given.every)
        ]
        lines = [f"{given.saves} saves, {given.every} steps apart", ""]
        lines += [*codecs(saved, folder / "run"), "", *kmeans()]
        if not given.no_model:
            lines += ["", *model(saved, folder / "run")]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    publish("codecs", "What codecs save and cost", lines, given.out)


if __name__ == "__main__":
    main()
