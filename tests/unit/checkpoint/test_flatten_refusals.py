"""A skeleton that nobody wrote makes nothing but an error."""

from __future__ import annotations

import json
import math
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shade.checkpoint._capture.flatten import flatten, unflatten
from shade.errors import CorruptCheckpointError
from tests.support.mutation import mutants

TENSORS = {
    "f": torch.zeros(4, 2),
    "d": torch.zeros(3, dtype=torch.float64),
    "h": torch.zeros(2, dtype=torch.bfloat16),
    "b": torch.zeros(16, dtype=torch.uint8),
}


@pytest.mark.parametrize(
    "skeleton",
    [
        math.nan,
        math.inf,
        {},
        {"dict": [[], []], "list": 1},
        {"object": 1},
        {"__class__": "os.system"},
        {"dict": {}},
        {"dict": [["a"], []]},
        {"dict": [["a", "a"], [1, 2]]},
        {"dict": [[["a"]], [1]]},
        {"dict": [["a"]]},
        {"dict": [{"numbers": "f"}, []]},
        {"set": [[1]]},
        {"tuple": 5},
        {"tuple": {"numbers": "gone"}},
        {"tuple": {"numbers": "d", "more": 1}},
        {"numbers": "f"},
        {"numbers": "h"},
        [{"numbers": "d"}, {"numbers": "d"}],
        {"numbers": 1},
        {"tensor": "gone"},
        {"tensor": None},
        {"tensor": ["d"]},
        {"array": "h"},
        {"viewed": ["complex128", "f"]},
        {"viewed": ["float32", "f"]},
        {"viewed": ["nonsense", "f"]},
        {"viewed": [["complex128"], "d"]},
        {"viewed": ["complex128", "d"]},
        {"ordered": [[0], {"tensor": "f"}]},
        {"ordered": [[0, 0], {"tensor": "f"}]},
        {"ordered": [[1, 0], 1]},
        {"ordered": [[1, 0], {"tensor": "d"}]},
        {"wrapper": [1, "Tensor", [], [], None, [], []]},
        {"wrapper": ["torch", "Tensor", [], []]},
        {"raw_array": ["<O", [2], "b"]},
        {"raw_array": ["O", [2], "b"]},
        {"raw_array": ["<f4,O", [2], "b"]},
        {"raw_array": [">f4", [5], "b"]},
        {"raw_array": [">f4", [-4], "b"]},
        {"raw_array": [">f4", [2**40, 2**40], "b"]},
        {"raw_array": [">f4", [0, 2**62, 2**62], "b"]},
        {"raw_array": [">f4", 4, "b"]},
        {"raw_array": ["<U99999999999", [0], "b"]},
        {"raw_array": [">f4", [4], "f"]},
        {"scalar": ["<f4", "00"]},
        {"scalar": ["<f4", "zz000000"]},
        {"scalar": ["|O8", "0" * 16]},
        {"scalar": ["<q4", "00000000"]},
        {"scalar": "x"},
        {"bytes": "0"},
        {"bytes": " 00"},
        {"bytes": {"tensor": "f"}},
        {"bytes": 5},
        {"text": "ff"},
        {"text": None},
        {"int": "0x10"},
        {"int": "1_0"},
        {"int": ""},
        {"int": 5},
        {"float": "00"},
        {"float": 1.0},
        {"complex": [1.0]},
        {"complex": [1, 2]},
        {"complex": [{"float": 1}, 2.0]},
        {"dtype": "Tensor"},
        {"dtype": {}},
        {"device": "nonsense"},
        {"device": "cuda:99999999999999999999"},
        {"device": 0},
        {"size": [-1]},
        {"size": [1.0]},
        {"size": [2**70]},
        {"deque": [-1, []]},
        {"deque": ["5", []]},
        {"deque": [2**80, []]},
        {"defaultdict": ["eval", [], []]},
        {"defaultdict": [["int"], [], []]},
        {"OrderedDict": [[], [], []]},
        {"module_state": [[], []]},
    ],
    ids=lambda skeleton: repr(skeleton)[:60],
)
def test_a_skeleton_that_nobody_wrote_is_refused(skeleton: Any) -> None:
    for node in (skeleton, [1, skeleton], {"dict": [["key"], [skeleton]]}):
        with pytest.raises(CorruptCheckpointError):
            unflatten(node, TENSORS)


def test_a_bottomless_skeleton_is_refused() -> None:
    for kind in (lambda inner: [inner], lambda inner: {"tuple": [inner]}, lambda inner: {"dict": [["a"], [inner]]}):
        node: Any = 1
        for _ in range(5000):
            node = kind(node)
        with pytest.raises(CorruptCheckpointError, match="containers"):
            unflatten(node, TENSORS)


def test_a_small_skeleton_cannot_ask_for_a_large_memory() -> None:
    long = torch.zeros(100_000, dtype=torch.float64)
    nodes = [{"numbers": "long"}] * 1000
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError, match="nothing else uses"):
            unflatten(nodes, {"long": long})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 * long.nbytes


def state() -> dict[str, Any]:
    return {
        "model": torch.nn.BatchNorm1d(3).state_dict(),
        "scores": [0.5] * 1000,
        "misc": [np.arange(3), np.array(["a", "b"]), np.float32(1), (1, 2.5, None), {1: b"x", "y": 2**80}],
        "more": {"z": torch.zeros(2, dtype=torch.complex128), "nan": math.nan, "blob": bytes(1000), "c": 1j},
    }


def test_complex_numbers_lie_where_pytorch_may_write_them() -> None:
    whole = torch.arange(4.0, dtype=torch.float64).to(torch.complex128)
    skeleton, tensors = flatten([whole, whole])
    memory = bytearray(72)
    starts = (torch.frombuffer(memory, dtype=torch.float64, count=8, offset=offset) for offset in (0, 8))
    odd = next(start for start in starts if start.data_ptr() % 16)  # aligned to 8 bytes, as in a shard
    (name,) = tensors
    found, again = unflatten(skeleton, {name: odd.view(4, 2).copy_(tensors[name])})
    assert torch.equal(found, whole)
    assert found.data_ptr() % found.itemsize == 0, "fill_() would end the process"
    assert found is again, "one tensor under two names stays one"
    found.fill_(1)


def test_mutants_make_a_state_or_an_error() -> None:
    skeleton, tensors = flatten(state())
    refused = 0
    for mutant in mutants({"root": json.loads(json.dumps(skeleton))}, random.Random(0), 5000):
        try:
            unflatten(mutant.get("root"), tensors)
        except CorruptCheckpointError:
            refused += 1
    assert refused > 2000


def test_tensors_of_another_kind_make_a_state_or_an_error() -> None:
    skeleton, tensors = flatten(state())
    rng = random.Random(0)
    others = [torch.zeros(2), torch.zeros(0, dtype=torch.int64), torch.tensor(1), torch.zeros(3, dtype=torch.uint8)]
    for _ in range(300):
        changed = {name: rng.choice([tensor, *others]) for name, tensor in tensors.items() if rng.random() < 0.95}
        try:
            unflatten(skeleton, changed)
        except CorruptCheckpointError:
            continue


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(list(TENSORS)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["dict", "tuple", "tensor", "numbers", "array", "raw_array", "viewed", "bytes", "int", "set"]
            ),
            inner,
            min_size=1,
            max_size=1,
        )
    ),
    max_leaves=15,
)


@settings(max_examples=500, deadline=None)
@given(json_values)
def test_any_json_makes_a_state_or_an_error(skeleton: Any) -> None:
    try:
        unflatten(skeleton, TENSORS)
    except CorruptCheckpointError:
        return
