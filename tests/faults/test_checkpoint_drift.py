"""A run saves with loss a hundred times, and never is farther off than it says, nor off at all after a keyframe.

The story: errors that are added up. A difference of a difference of a difference is only as good as the first of them;
were one taken from the state instead of from what a reader has, or added in another order, a run would drift away from
its snapshots and nobody would see it before the day of the restore.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shade.checkpoint._capture.flatten import flatten
from shade.checkpoint._capture.layout import TensorSpec, bytes_of, lay_out
from shade.checkpoint._commit.protocol import agree, store
from shade.checkpoint._format.retention import Keep
from shade.checkpoint._restore.reader import Reader
from shade.checkpoint._restore.restore import ReadSnapshot, read_newest
from shade.checkpoint._save.packing import Packer
from shade.checkpoint._tiers.storage import StorageTier
from shade.rank_group import SingleProcessGroup
from shade.storage.base import open_volume
from tests.simulation.torture.bench import retire

pytestmark = pytest.mark.multiprocess

CODECS = ["topk-delta", "int8-delta", "excp", "xor-zstd", "dedup"]
NUM_ITEMS = 4000


class Cycle:
    """One run: its state, its folder, its packer."""

    def __init__(self, folder: Path, codec: str, keyframe_every: int, keep: str = "last=2") -> None:
        self.tier, self.keep = StorageTier(open_volume(str(folder)), "run"), Keep.parse(keep)
        self.packer = Packer("run", 0, 1, codec, keyframe_every=keyframe_every)
        self.tensors = {"model/weight": torch.zeros(NUM_ITEMS), "model/bias": torch.zeros(7)}
        self.sequence = 0

    def save(self) -> bool:
        """Whether it is a keyframe."""
        self.sequence += 1
        tree, tensors = flatten({"model": {name.removeprefix("model/"): each for name, each in self.tensors.items()}})
        layout = lay_out({name: TensorSpec.of(tensor) for name, tensor in tensors.items()}, 0, 1)
        buffer = torch.cat([bytes_of(tensors[name]) for name in layout.entries])
        packed = self.packer.pack(self.sequence, buffer, layout.num_bytes, layout.entries, tree)
        group, at = SingleProcessGroup(), float(self.sequence)
        record, shard_bytes, _ = agree(
            group, packed.manifest, None, sequence=self.sequence, saved_at=at, base=packed.base
        )
        store(self.tier, group, record, shard_bytes, packed.manifest, lambda: packed.chunks)
        self.packer.committed(packed, record.digest, buffer)
        retire(self.tier, self.keep)
        return packed.base is None

    def restored(self) -> ReadSnapshot:
        """As a process that comes after has it."""
        found = read_newest(Reader([self.tier]), SingleProcessGroup())
        assert found is not None
        assert found.record.sequence == self.sequence
        return found

    def check(self) -> float:
        """How far the weights are off; no farther than told."""
        found = self.restored()
        assert torch.equal(found.tensors["model/bias"], self.tensors["model/bias"]), "what is small is exact"
        off = (found.tensors["model/weight"].double() - self.tensors["model/weight"].double()).abs()
        if not off.any():
            return 0.0
        bound = found.bounds["model/weight"]
        relative = float(off.norm() / self.tensors["model/weight"].double().norm())
        assert float(off.max()) <= bound.max_abs
        assert relative <= bound.relative * (1 + 1e-12)
        return relative


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("num_cycles", [24, pytest.param(100, marks=pytest.mark.slow)])
def test_a_hundred_cycles_never_drift(codec: str, num_cycles: int, tmp_path: Path) -> None:
    run = Cycle(tmp_path, codec, keyframe_every=8)
    generator = torch.Generator().manual_seed(0)
    run.tensors["model/weight"] += torch.randn(NUM_ITEMS, generator=generator)
    num_keyframes = num_off = 0
    for _ in range(num_cycles):
        run.tensors["model/weight"] += 1e-3 * torch.randn(NUM_ITEMS, generator=generator)
        run.tensors["model/bias"] += 1
        is_keyframe = run.save()
        off = run.check()
        num_keyframes += is_keyframe
        num_off += off > 0
        if is_keyframe:
            assert off == 0.0
            assert run.restored().bounds == {}
    assert num_keyframes == -(-num_cycles // 8)
    assert (num_off == num_cycles - num_keyframes) is (codec in ("topk-delta", "int8-delta", "excp"))
    assert len(run.tier.held()) <= 9, "a chain, and one before it"


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["topk-delta", "int8-delta", "excp"])
def test_ten_thousand_restores_keep_within_their_bounds(codec: str, tmp_path: Path) -> None:
    run = Cycle(tmp_path, codec, keyframe_every=8)
    dice = np.random.default_rng(1)
    for number in range(200):
        size = 10.0 ** dice.integers(-6, 3)
        run.tensors["model/weight"] += torch.from_numpy(dice.normal(0, size, NUM_ITEMS).astype(np.float32))
        run.save()
        for _ in range(200 if number % 4 == 3 else 1):
            run.check()


SIZES = st.sampled_from([0.0, 1e-30, 1e-6, 1e-3, 1.0, 1e6, 3e38])
STEPS = st.lists(st.tuples(SIZES, st.integers(0, 2**32 - 1), st.booleans()), min_size=1, max_size=8)


@pytest.mark.parametrize("codec", CODECS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS, st.integers(1, 5))
def test_whatever_the_state_does_the_bound_holds(
    codec: str, tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[float, int, bool]], keyframe_every: int
) -> None:
    run = Cycle(tmp_path_factory.mktemp("run"), codec, keyframe_every)
    for size, seed, restarts in steps:
        noise = np.random.default_rng(seed).uniform(-1, 1, NUM_ITEMS).astype(np.float32)
        with np.errstate(over="ignore"):
            run.tensors["model/weight"] += torch.from_numpy(noise * np.float32(size))
        if not torch.isfinite(run.tensors["model/weight"]).all():
            assert run.save() in (True, False)
            found = run.restored().tensors["model/weight"]
            assert bytes(bytes_of(found).numpy()) == bytes(bytes_of(run.tensors["model/weight"]).numpy()), "exact"
            run.tensors["model/weight"] = torch.zeros(NUM_ITEMS)
            continue
        if run.save():
            assert run.check() == 0.0
        else:
            run.check()
        if restarts:  # a process that comes after goes on from what it has, and its first snapshot stands alone
            run.tensors["model/weight"] = run.restored().tensors["model/weight"].clone()
            run.packer.forget()
