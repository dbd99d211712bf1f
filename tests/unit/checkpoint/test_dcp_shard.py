"""One rank's part as a shard: the right bytes from wherever they lie, and a change of any of them is seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shade.checkpoint._capture.flatten import flatten
from shade.checkpoint._format.manifest import CHUNK_BYTES, Manifest
from shade.checkpoint._integrations.dcp_shard import PackedState, capture, is_dcp, state_of
from shade.errors import CheckpointError, ConfigError, CorruptCheckpointError, TornSnapshotError


class Room:
    """Memory for what has to be put together; remembers how much was asked for."""

    num_bytes = 0

    def __call__(self, num_bytes: int) -> torch.Tensor:
        self.num_bytes = num_bytes
        return torch.empty(num_bytes + 5, dtype=torch.uint8)


def captured(
    state: dict[str, Any], planner: DefaultSavePlanner | None = None, codec: str = "none"
) -> tuple[Manifest, dict[str, torch.Tensor]]:
    planner = planner or DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    plan = planner.create_local_plan()
    return capture(
        planner, plan, {item.index.fqn for item in plan.items}, Manifest("run", 3, 1, 3, codec, 0, {}, (), None), 1
    )


def pack(tensors: dict[str, torch.Tensor], codec: str = "none") -> tuple[PackedState, Room]:
    room = Room()
    return PackedState(*captured({**tensors, "lr": 0.1, "many": (1.5,) * 300}, codec=codec), room), room


def data_of(packed: PackedState) -> bytes:
    return b"".join(bytes(chunk) for chunk in packed.shard.chunks)


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_the_bytes_are_those_of_the_tensors() -> None:
    tensors = {
        "b": torch.randn(1_500_000),
        "a": torch.randn(30, 40).t(),
        "c": torch.tensor(7),
        "d": torch.empty(0),
        "e": torch.randn(1_100_000).to(torch.bfloat16),
    }
    packed, _ = pack(tensors)
    data, manifest = data_of(packed), packed.manifest
    assert Manifest.parse(manifest.to_bytes(), manifest.digest) == manifest
    assert len(manifest.chunks) > 1
    nodes, paths = state_of(manifest.tree)
    assert paths["a"] == ("a",)
    for key, tensor in tensors.items():
        entry = manifest.tensors[nodes[key]["tensor"]]
        expected = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert data[entry.start : entry.stop] == expected
        assert entry.shape == tuple(tensor.shape)
    packed.check()


def test_what_lies_side_by_side_is_not_copied_and_what_does_not_is_put_together() -> None:
    block = torch.randn(3 * 10**6)
    together, room = pack({f"{place}": block[place * 10**6 : (place + 1) * 10**6] for place in range(3)})
    assert room.num_bytes == CHUNK_BYTES, "the chunk in which the long list of numbers ends and the block begins"
    apart, room = pack({f"{place}": block[place * 10**6 : (place + 1) * 10**6].clone() for place in range(3)})
    assert room.num_bytes > CHUNK_BYTES
    assert data_of(apart) == data_of(together)


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("place", [0, 1_200_000, 2_999_999])
def test_one_element_changed_behind_pytorchs_back_is_seen(place: int, codec: str) -> None:
    tensors = {"a": torch.randn(1_200_000), "b": torch.randn(1_800_000)}
    packed, _ = pack(tensors, codec)
    packed.check()
    name, place = ("a", place) if place < 1_200_000 else ("b", place - 1_200_000)
    tensors[name].numpy()[place] += 1
    with pytest.raises(TornSnapshotError, match=rf"state/{name}"):
        packed.check()


def test_a_change_through_pytorch_names_its_tensor_alone() -> None:
    tensors = {"a": torch.zeros(10), "b": torch.zeros(10)}
    packed, _ = pack(tensors)
    tensors["b"].zero_()  # the same bytes; still somebody wrote
    with pytest.raises(TornSnapshotError, match=r"'state/b@rank1'"):
        packed.check()


def test_a_tensor_that_does_not_count_its_changes_is_refused_by_name() -> None:
    with torch.inference_mode():
        silent = torch.zeros(3)
    with pytest.raises(ConfigError, match=r"'state/a@rank1' to count its changes.*clone\(\) it outside"):
        pack({"a": silent})


def test_tied_tensors_are_stored_once(mesh: Any) -> None:
    tied = torch.randn(1000)
    packed, _ = pack({"a": tied, "b": tied})
    nodes, _ = state_of(packed.manifest.tree)
    assert nodes["a"] == nodes["b"]
    assert packed.manifest.num_bytes == 4000 + 300 * 8
    split, empty = (distribute_tensor(torch.randn(size, 2), mesh, [Shard(0)]) for size in (5, 0))
    others = {"other": distribute_tensor(torch.randn(0, 2), mesh, [Shard(0)])}
    others["e"] = DTensor.from_local(split.to_local(), mesh, [Replicate()])  # the same memory, seen otherwise
    manifest, _ = captured({"a": split, "b": split.detach(), "c": empty, "d": empty.detach()} | others)
    nodes, _ = state_of(manifest.tree)
    assert nodes["a"] == nodes["b"] != nodes["e"]
    assert nodes["c"] == nodes["d"] != nodes["other"]


def test_a_planner_may_convert_whole_tensors_and_no_others(mesh: Any) -> None:
    class Converting(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            return super().resolve_data(write_item).bfloat16()

    manifest, _ = captured({"whole": torch.zeros(3)}, Converting())
    assert manifest.tensors["state/whole@rank1"].dtype == "BF16"
    with pytest.raises(ConfigError, match=r"'layer.split' as it is.*Converting"):
        captured({"layer": {"split": distribute_tensor(torch.zeros(4), mesh, [Shard(0)])}}, Converting())


def test_a_planner_leaves_out_what_it_does_not_plan(mesh: Any) -> None:
    class Adapters(DefaultSavePlanner):
        def create_local_plan(self) -> SavePlan:
            plan = super().create_local_plan()
            return SavePlan([item for item in plan.items if "lora" in item.index.fqn])

    state = {name: distribute_tensor(torch.zeros(4), mesh, [Shard(0)]) for name in ("base", "lora")}
    assert list(state_of(captured(state | {"step": 3}, Adapters())[0].tree)[0]) == ["lora"]


def test_a_dtensor_within_an_object_is_refused_by_name(mesh: Any) -> None:
    with pytest.raises(ConfigError, match="within the object 'pair', got 'tuple'"):
        captured({"pair": (distribute_tensor(torch.zeros(4), mesh, [Shard(0)]), 1)})


def test_what_is_no_dtensor_and_no_whole_tensor_is_refused_by_name() -> None:
    class Part(torch.Tensor):
        def __create_write_items__(self, name: str, value: Any) -> list[WriteItem]:
            return [WriteItem(MetadataIndex(name, torch.Size([0])), WriteItemType.SHARD)]

    with pytest.raises(ConfigError, match=r"whole tensor at 'a.part', got 'Part'; shard with fully_shard"):
        captured({"a": {"part": torch.zeros(3).as_subclass(Part)}})
    planner: Any = object()
    with pytest.raises(ConfigError, match="derive it from DefaultSavePlanner"):
        capture(planner, SavePlan([]), (), Manifest("run", 3, 1, 3, "none", 0, {}, (), None), 1)


def test_other_trees_are_told_apart_and_other_layouts_refused() -> None:
    tree, _ = flatten({"model": {"dcp": 1}, "random": {}})
    assert not is_dcp(tree)
    for other in (None, [], {"dict": [["dcp"]]}, "dcp"):
        with pytest.raises(CorruptCheckpointError):
            state_of(other)
    before, _ = flatten({"dcp": 1, "tensors": {}, "objects": {}})
    assert is_dcp(before)
    with pytest.raises(CheckpointError, match="layout 2, got 'layout 1'; load it with the shade that saved it"):
        state_of(before)
