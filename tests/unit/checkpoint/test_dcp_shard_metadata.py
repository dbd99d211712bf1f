"""DCP's metadata as plain types: what goes in comes back, and what is none is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shade.checkpoint._capture.flatten import flatten, unflatten
from shade.checkpoint._integrations.dcp_shard import from_plain, to_plain
from shade.errors import ConfigError, CorruptCheckpointError


def metadata() -> Metadata:
    pieces = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([4, 3])) for row in (0, 4)]
    whole = TensorProperties(dtype=torch.bfloat16, memory_format=torch.channels_last, pin_memory=True)
    return Metadata(
        state_dict_metadata={
            "layer.weight": TensorStorageMetadata(
                TensorProperties.create_from_tensor(torch.zeros(4, 3).t()), torch.Size([8, 3]), pieces
            ),
            "step": TensorStorageMetadata(
                whole, torch.Size([]), [ChunkStorageMetadata(torch.Size([]), torch.Size([]))]
            ),
            "ключ/with@%.signs": BytesStorageMetadata(),
        },
        planner_data={"layer.weight": ("layer", "weight"), "list.3": ("list", 3)},
        storage_data={
            MetadataIndex("layer.weight", torch.Size([0, 0]), 0): 0,
            MetadataIndex("layer.weight", torch.Size([4, 0]), 1): 1,
            MetadataIndex("step", torch.Size([])): 1,
            MetadataIndex("ключ/with@%.signs"): 0,
        },
        storage_meta=StorageMeta(checkpoint_id="12", save_id="a", modules=["m"]),
    )


def through_json(content: Any) -> Any:
    tree, tensors = flatten(content)
    return unflatten(json.loads(json.dumps(tree)), tensors)


def test_it_comes_back_as_it_was_through_json() -> None:
    before = metadata()
    after = from_plain(through_json(to_plain(before)))
    assert after == before
    assert list(after.state_dict_metadata) == list(before.state_dict_metadata)
    hints = {index: index.index for index in after.storage_data}
    assert hints[MetadataIndex("layer.weight", torch.Size([4, 0]))] == 1
    assert type(after.state_dict_metadata["layer.weight"].size) is torch.Size


def test_a_planner_that_adds_nothing_and_a_writer_without_meta() -> None:
    before = Metadata({}, storage_data={})
    assert from_plain(through_json(to_plain(before))) == before


def test_many_pieces_of_one_tensor_stay_in_the_json() -> None:
    before = metadata()
    entry = before.state_dict_metadata["layer.weight"]
    entry.chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([1, 3])) for row in range(700)]
    assert from_plain(through_json(to_plain(before))) == before


def test_an_unknown_kind_of_entry_is_refused_by_name() -> None:
    before = metadata()
    before.state_dict_metadata["odd"] = object()
    with pytest.raises(ConfigError, match="'odd'"):
        to_plain(before)


@pytest.mark.parametrize(
    "harm",
    [
        lambda content: content.pop("entries"),
        lambda content: content["entries"]["step"].update(dtype="os.system"),
        lambda content: content["entries"]["step"].update(layout="no"),
        lambda content: content["entries"]["step"].update(size=[-1, "x"]),
        lambda content: content["entries"]["step"].update(chunks=[[1]]),
        lambda content: content["entries"].update(step=7),
        lambda content: content["storage_data"].append(["x"]),
        lambda content: content.update(storage_meta={"run": "rm"}),
    ],
)
def test_damaged_plain_types_are_refused(harm: Callable[[Any], Any]) -> None:
    content = copy.deepcopy(to_plain(metadata()))
    harm(content)
    with pytest.raises(CorruptCheckpointError):
        from_plain(content)


def test_not_even_a_dict() -> None:
    with pytest.raises(CorruptCheckpointError):
        from_plain([1, 2])
