"""Every tensor is saved once, by a rank that all agree on, without holes; its bytes find their way back."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shade.checkpoint._capture.flatten import SPELLINGS, own_name, torch_dtype
from shade.checkpoint._capture.layout import SMALL_BYTES, ShardLayout, TensorSpec, bytes_of, lay_out
from shade.checkpoint._format.digest import digest_of
from shade.checkpoint._format.manifest import ITEM_BYTES, ChunkEntry, Manifest
from shade.errors import ConfigError, CorruptCheckpointError, StateMismatchError

CHUNK = 64
specs = st.dictionaries(
    st.text("abc/.", min_size=1, max_size=6),
    st.builds(
        lambda dtype, shape: TensorSpec.of(torch.empty(shape, dtype=dtype)),
        st.sampled_from(list(SPELLINGS)),
        st.lists(st.integers(0, 5), max_size=3),
    ),
    max_size=30,
)


def manifest_of(made: ShardLayout, data: bytes, chunk_bytes: int = CHUNK) -> Manifest:
    """As a rank would write it."""
    chunks = [data[start:stop] for start, stop in made.chunk_spans(chunk_bytes)]
    entries = tuple(ChunkEntry(len(chunk), digest_of(chunk)) for chunk in chunks)
    return Manifest("run", 1, 0, 1, "none", made.num_bytes, made.entries, entries, None, chunk_bytes)


def pack(tensors: dict[str, torch.Tensor], made: ShardLayout) -> bytes:
    """The shard's data."""
    return b"".join(bytes(bytes_of(tensors[name].contiguous()).numpy().tobytes()) for name in made.entries)


def shared_bytes(layout: ShardLayout) -> int:
    """Replicated bytes that one rank saves."""
    return sum(entry.stop - entry.start for name, entry in layout.entries.items() if "@" not in name)


@settings(max_examples=200, deadline=None)
@given(specs, st.integers(1, 5), st.randoms())
def test_every_tensor_is_saved_once_without_holes(
    shared: dict[str, TensorSpec], world_size: int, order: random.Random
) -> None:
    layouts = []
    for rank in range(world_size):
        own = {own_name(name, rank): spec for name, spec in shared.items()}
        items = list({**shared, **own}.items())
        order.shuffle(items)
        layouts.append(lay_out(dict(items), rank, world_size))
    names = [name for each in layouts for name in each.entries]
    assert sorted(names) == sorted([*shared, *(own_name(name, rank) for name in shared for rank in range(world_size))])
    for rank, each in enumerate(layouts):
        end = 0
        for entry in each.entries.values():
            assert entry.start == end
            assert entry.start % ITEM_BYTES[entry.dtype] == 0
            end = entry.stop
        assert end == each.num_bytes
        assert [name for name in each.entries if "@" in name and not name.endswith(f"@rank{rank}")] == []
        spans = each.chunk_spans(7)
        assert [byte for start, stop in spans for byte in range(start, stop)] == list(range(end))
        assert {stop - start for start, stop in spans[:-1]} <= {7}
    loads = [shared_bytes(each) for each in layouts]
    assert sum(loads) == sum(spec.num_bytes for spec in shared.values())
    largest = max((spec.num_bytes for spec in shared.values()), default=0)
    assert max(loads) <= sum(loads) / world_size + largest


def test_a_model_is_shared_out_evenly() -> None:
    rng = random.Random(0)
    shared = {f"t{number}": TensorSpec("U8", (size := rng.randrange(1, 10**6),), size) for number in range(600)}
    loads = [shared_bytes(lay_out(shared, rank, 8)) for rank in range(8)]
    assert max(loads) < 1.01 * sum(loads) / 8


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["F64", "F32", "U8"]), st.sampled_from([1, 9, SMALL_BYTES, 2 * SMALL_BYTES])))
)
def test_small_tensors_of_a_width_lie_together(wanted: list[tuple[str, int]]) -> None:
    specs = {
        f"t{place * 7 % 101}.{place}": TensorSpec(dtype, (count,), count * ITEM_BYTES[dtype])
        for place, (dtype, count) in enumerate(wanted)
    }
    made = lay_out(specs, 0, 1).entries
    for width in ITEM_BYTES.values():
        group = [name for name in made if ITEM_BYTES[made[name].dtype] == width]
        small = [specs[name].num_bytes <= SMALL_BYTES for name in group]
        assert small == sorted(small)
        for part in (group[: small.count(False)], group[small.count(False) :]):
            assert part == sorted(part), "model and optimizer stay apart, so that one is read without the other"


def test_another_ranks_own_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rank 0.*a@rank1"):
        lay_out({"a@rank1": TensorSpec("U8", (1,), 1)}, 0, 2)


def test_the_table_of_types_is_its_own_inverse() -> None:
    assert {spelling: torch_dtype(spelling) for spelling in ITEM_BYTES} == {v: k for k, v in SPELLINGS.items()}
    assert all(ITEM_BYTES[spelling] == dtype.itemsize for dtype, spelling in SPELLINGS.items())
    for wrong in ("F33", "f32", None, []):
        with pytest.raises(CorruptCheckpointError, match="dtype"):
            torch_dtype(wrong)  # type: ignore[arg-type]


@settings(max_examples=100, deadline=None)
@given(specs, st.integers(1, 100), st.randoms())
def test_the_chunks_of_some_tensors_hold_all_their_bytes_and_none_is_idle(
    shared: dict[str, TensorSpec], chunk_bytes: int, order: random.Random
) -> None:
    made = lay_out(shared, 0, 1)
    manifest = manifest_of(made, bytes(made.num_bytes), chunk_bytes)
    wanted = [name for name in shared if order.random() < 0.5]
    needed = {byte for name in wanted for byte in range(made.entries[name].start, made.entries[name].stop)}
    numbers = manifest.chunks_of(wanted)
    assert numbers == sorted({byte // chunk_bytes for byte in needed})


def test_only_the_chunks_that_hold_something_are_named() -> None:
    tensors = {"a": torch.zeros(100, dtype=torch.uint8), "b": torch.zeros(28, dtype=torch.uint8), "e": torch.zeros(0)}
    made = lay_out({name: TensorSpec.of(tensor) for name, tensor in tensors.items()}, 0, 1)
    manifest = manifest_of(made, pack(tensors, made))
    assert manifest.chunks_of(["a"]) == [0, 1]
    assert manifest.chunks_of(["b"]) == [1]
    assert manifest.chunks_of(["e"]) == []
    assert manifest.chunks_of(["b", "a", "b"]) == [0, 1]
    with pytest.raises(StateMismatchError, match="'c'"):
        manifest.chunks_of(["c"])


def test_the_manifest_of_a_plan_is_read_in_the_order_of_its_bytes() -> None:
    tensors = {
        "z": torch.zeros(3, dtype=torch.float64),
        "a": torch.zeros(5, dtype=torch.uint8),
        "m": torch.zeros(2, dtype=torch.float16),
        **{name: torch.zeros(0, dtype=dtype) for name, dtype in (("e", torch.uint8), ("f", torch.float64))},
        "y": torch.zeros(0, 3),
    }
    made = lay_out({name: TensorSpec.of(tensor) for name, tensor in tensors.items()}, 0, 1)
    manifest = manifest_of(made, pack(tensors, made))
    again = Manifest.parse(manifest.to_bytes(), manifest.digest)
    assert list(again.tensors) == list(made.entries)
    assert again == dataclasses.replace(manifest)
