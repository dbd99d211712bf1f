"""One rank's part as a shard: the right bytes from wherever they lie, and a change of any of them is seen."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from shade.checkpoint._capture.flatten import flatten
from shade.checkpoint._format.manifest import CHUNK_BYTES, Manifest
from shade.checkpoint._integrations.dcp_shard import Identity, PackedState, is_dcp, parts_of, shard_content, tensor_key
from shade.errors import CorruptCheckpointError, TornSnapshotError

WHO = Identity("run", 3, 1, 3)


class Room:
    """Memory for what has to be put together; remembers how much was asked for."""

    num_bytes = 0

    def __call__(self, num_bytes: int) -> torch.Tensor:
        self.num_bytes = num_bytes
        return torch.empty(num_bytes + 5, dtype=torch.uint8)


def pack(tensors: dict[str, torch.Tensor], codec: str = "none") -> tuple[PackedState, Room]:
    room = Room()
    return PackedState(WHO, shard_content(tensors, {"lr": 0.1, "many": [1.5] * 300}), codec, room), room


def data_of(packed: PackedState) -> bytes:
    return b"".join(bytes(chunk) for chunk in packed.shard.chunks)


def test_the_bytes_are_those_of_the_tensors() -> None:
    tensors = {
        "b[0]": torch.randn(1_500_000),
        "a[0,0]": torch.randn(30, 40).t(),
        "c[]": torch.tensor(7),
        "d[0]": torch.empty(0),
        "e[0]": torch.randn(1_100_000).to(torch.bfloat16),
    }
    packed, _ = pack(tensors)
    data, manifest = data_of(packed), packed.manifest
    assert Manifest.parse(manifest.to_bytes(), manifest.digest) == manifest
    assert len(manifest.chunks) > 1
    parts = parts_of(manifest.tree)
    for key, tensor in tensors.items():
        entry = manifest.tensors[parts.tensors[key]["tensor"]]
        expected = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        assert data[entry.start : entry.stop] == expected
        assert entry.shape == tuple(tensor.shape)
    packed.check()


def test_what_lies_side_by_side_is_not_copied_and_what_does_not_is_put_together() -> None:
    block = torch.randn(3 * 10**6)
    together, room = pack({f"{place}[0]": block[place * 10**6 : (place + 1) * 10**6] for place in range(3)})
    assert room.num_bytes == CHUNK_BYTES, "the chunk in which the long list of numbers ends and the block begins"
    apart, room = pack({f"{place}[0]": block[place * 10**6 : (place + 1) * 10**6].clone() for place in range(3)})
    assert room.num_bytes > CHUNK_BYTES
    assert data_of(apart) == data_of(together)


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("place", [0, 1_200_000, 2_999_999])
def test_one_element_changed_behind_pytorchs_back_is_seen(place: int, codec: str) -> None:
    tensors = {"a[0]": torch.randn(1_200_000), "b[0]": torch.randn(1_800_000)}
    packed, _ = pack(tensors, codec)
    packed.check()
    name, place = ("a[0]", place) if place < 1_200_000 else ("b[0]", place - 1_200_000)
    tensors[name].numpy()[place] += 1
    with pytest.raises(TornSnapshotError, match=rf"tensors/{name[0]}"):
        packed.check()


def test_a_change_through_pytorch_names_its_tensor_alone() -> None:
    tensors = {"a[0]": torch.zeros(10), "b[0]": torch.zeros(10)}
    packed, _ = pack(tensors)
    tensors["b[0]"].zero_()  # the same bytes; still somebody wrote
    with pytest.raises(TornSnapshotError, match=r"'tensors/b\[0\]'"):
        packed.check()


def test_pieces_have_names_that_cannot_meet() -> None:
    names = {
        tensor_key(MetadataIndex("a", torch.Size([0]))),
        tensor_key(MetadataIndex("a[0]", torch.Size([0]))),
        tensor_key(MetadataIndex("a", torch.Size([0, 0]))),
        tensor_key(MetadataIndex("a", torch.Size([]))),
    }
    assert len(names) == 4


def test_tied_tensors_are_stored_once() -> None:
    tied = torch.randn(1000)
    packed, _ = pack({"a[0]": tied, "b[0]": tied})
    parts = parts_of(packed.manifest.tree)
    assert parts.tensors["a[0]"] == parts.tensors["b[0]"]
    assert packed.manifest.num_bytes == 4000 + 300 * 8


def test_other_trees_are_told_apart() -> None:
    tree, _ = flatten({"model": {"dcp": 1}, "random": {}})
    assert not is_dcp(tree)
    for other in (tree, None, [], {"dict": [[], []]}, {"dict": [["dcp"]]}, "dcp"):
        with pytest.raises(CorruptCheckpointError):
            parts_of(other)
