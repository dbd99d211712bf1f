"""A state that was taken apart and put together is the same state: types, order, every bit."""

from __future__ import annotations

import enum
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shade.checkpoint._capture.flatten import INLINE, MAX_DEPTH, SPELLINGS, flatten, unflatten
from shade.errors import ConfigError, StateMismatchError
from tests.support.states import assert_same

DTYPES = [
    *SPELLINGS,
    torch.complex128,
    torch.complex32,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
NAN_WITH_PAYLOAD = struct.unpack(">d", bytes.fromhex("7ff800000000beef"))[0]


def round_trip(state: Any) -> Any:
    """Through text, and through tensors that are other memory than the state's."""
    skeleton, tensors = flatten(state)
    stored = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    return unflatten(json.loads(json.dumps(skeleton, sort_keys=True, allow_nan=False)), stored)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**63),
        2**63,
        -(2**63) - 1,
        10**5000,
        0.0,
        -0.0,
        1.0,
        5e-324,
        math.inf,
        -math.inf,
        math.nan,
        NAN_WITH_PAYLOAD,
        1e22,
        complex(-0.0, math.nan),
        "",
        "naïve ☃ \x00",
        "\udcff half a pair",
        b"",
        b"\x00\xff",
        bytes(range(256)) * 10,
        bytearray(b"ab"),
        bytearray(1000),
        (),
        (1, (2, (3,))),
        [],
        {},
        {1: "int", "1": "str", None: 0, False: 1, 2.5: 2, (1, "a"): 3, b"b": 4},
        {"z": 1, "a": 2},
        {"": {"": 1}},
        OrderedDict(b=1, a=2),
        Counter("abracadabra"),
        defaultdict(list, a=[1]),
        defaultdict(None, a=1),
        deque([1, 2], maxlen=5),
        deque(),
        {1, 2},
        pytest.param(frozenset("ab"), id="frozenset"),  # its repr differs between processes, which pytest-xdist refuses
        torch.float8_e4m3fn,
        torch.device("cuda:1"),
        torch.Size([2, 3]),
        np.float32(0.1),
        np.bool_(True),
        np.datetime64("2026-01-02T03:04:05"),
        np.str_("text"),
        np.zeros((0, 3), np.int64),
        np.array(3.5),
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.array(["a", "bcd"]),
        np.array([1 + 2j]),
        np.array(["2026-01-02"], dtype="M8[D]"),
        np.arange(10)[::-2],
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        [1] * 1000,
        [0.5] * 1000,
        [True] * 1000,
        [math.nan, -0.0, NAN_WITH_PAYLOAD] * 200,
        [1] * 999 + [1.0],
        [2**70] * 1000,
        tuple(range(1000)),
        deque(range(1000), maxlen=1000),
        {index: index / 7 for index in range(1000)},
        {index: [index] for index in range(1000)},
    ],
    ids=lambda value: repr(value)[:40] if not isinstance(value, int) else f"int{value % 997}",
)
def test_values_come_back_as_they_were(value: Any) -> None:
    if isinstance(value, np.ndarray) and not value.flags.c_contiguous:
        assert_same(round_trip(value), np.array(value, order="C"))
    else:
        assert_same(round_trip(value), value)
        assert_same(round_trip({"a": [value, {"b": value}]}), {"a": [value, {"b": value}]})


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0, 3), (4, 3)], ids=str)
def test_tensors_of_every_type_and_shape_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = torch.arange(num_bytes, dtype=torch.uint8) % (2 if dtype is torch.bool else 251)
    tensor = raw.view(dtype).reshape(shape) if num_bytes else torch.empty(shape, dtype=dtype)
    assert_same(round_trip({"tensor": tensor}), {"tensor": tensor})
    _, tensors = flatten(tensor)
    assert all(each.dtype in SPELLINGS for each in tensors.values())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).reshape(3, 4).t(),
        torch.arange(12.0)[::3],
        torch.arange(3.0).expand(2, 3),
        torch.arange(4).to(torch.complex64).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "strided", "expanded", "conjugate", "negated", "channels last"],
)
def test_views_come_back_dense_and_equal_and_their_dimensions_in_the_same_order(tensor: torch.Tensor) -> None:
    found = round_trip(tensor)
    assert_same(found, tensor)
    assert found.untyped_storage().nbytes() == found.nbytes
    if 0 not in tensor.stride():
        assert found.dim_order() == tensor.dim_order()


def test_a_tensor_that_stands_for_zeros_comes_back_as_zeros() -> None:
    assert torch.equal(round_trip(torch._efficientzerotensor((2, 3))), torch.zeros(2, 3))


def test_a_tensor_of_another_order_that_is_held_twice_is_one() -> None:
    turned = torch.rand(3, 4).t()
    found = round_trip([turned, turned])
    assert found[0] is found[1]


class Low(torch.Tensor):
    """The form of what low-bit optimizers keep; it can do nothing but be taken apart."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> Low:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)  # type: ignore[attr-defined]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, signed: bool) -> None:
        self.codes, self.scale, self.signed = codes, scale, signed

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], (self.signed,)

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], context: Any, size: Any, stride: Any) -> Low:
        return cls(parts["codes"], parts["scale"], *context)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(func))


def test_a_tensor_that_is_made_of_tensors_is_made_again_of_them() -> None:
    low = Low(torch.arange(6, dtype=torch.int8).reshape(2, 3), torch.rand(1), signed=True)
    _, tensors = flatten({"m": low})
    assert sorted(tensors) == ["m/%codes", "m/%scale"]
    found = round_trip({"m": low})["m"]
    assert (type(found), found.shape, found.dtype, found.signed) == (Low, (2, 3), torch.float32, True)
    assert torch.equal(found.codes, low.codes)
    assert torch.equal(found.scale, low.scale)


def test_the_class_of_such_a_tensor_is_neither_imported_nor_taken_from_elsewhere() -> None:
    low = Low(torch.zeros(2, dtype=torch.int8), torch.ones(1), signed=False)
    tree, tensors = flatten(low)
    module, name, *others = tree["wrapper"]
    for elsewhere, other in ((module, "High"), ("torchao.optim", name), ("builtins", "eval"), ("torch", "Tensor")):
        with pytest.raises(StateMismatchError, match=f"import {elsewhere} first"):
            unflatten({"wrapper": [elsewhere, other, *others]}, tensors)


def test_tensors_are_references_and_named_by_their_path() -> None:
    weight, moment = torch.rand(3), torch.rand(3)
    array = np.zeros(3)
    _, tensors = flatten({"model": {"h.0/w%@": weight}, "optimizer": {"state": {0: {"m": [moment, array]}}}})
    assert list(tensors) == ["model/h.0%2Fw%25%40", "optimizer/state/0/m/0", "optimizer/state/0/m/1"]
    assert tensors["model/h.0%2Fw%25%40"].data_ptr() == weight.data_ptr()
    assert tensors["optimizer/state/0/m/1"].data_ptr() == array.ctypes.data


def test_tied_tensors_are_stored_once_and_are_one_again() -> None:
    module = torch.nn.ModuleDict({"wte": torch.nn.Embedding(4, 3), "head": torch.nn.Linear(3, 4, bias=False)})
    module["head"].weight = module["wte"].weight
    state = module.state_dict()
    skeleton, tensors = flatten(state)
    assert list(tensors) == ["wte.weight"]
    found = unflatten(skeleton, tensors)
    assert found["head.weight"].data_ptr() == found["wte.weight"].data_ptr()


def test_views_that_differ_and_empty_tensors_are_not_tied() -> None:
    whole = torch.arange(4.0)
    state = {"whole": whole, "half": whole[:2], "square": whole.view(2, 2), "a": torch.empty(0), "b": torch.empty(0)}
    _, tensors = flatten(state)
    assert len(tensors) == 5
    assert_same(round_trip(state), state)


def test_keys_that_look_alike_get_names_of_their_own() -> None:
    state = {1: torch.zeros(1), "1": torch.ones(1), "__metadata__": torch.full((1,), 2.0), "": torch.full((1,), 3.0)}
    _, tensors = flatten(state)
    assert len(tensors) == 4
    assert not tensors.keys() & {"__metadata__", ""}
    assert_same(round_trip(state), state)
    assert_same(round_trip(torch.ones(2)), torch.ones(2))


def test_a_ranks_own_tensors_carry_its_number() -> None:
    shared, own = torch.zeros(2), torch.ones(2)
    state = {"model": shared, "random": {"torch": own, "again": own, "shared": shared}}
    skeleton, tensors = flatten(state, rank=3, is_own=lambda path: path.startswith("random/"))
    assert list(tensors) == ["model", "random/torch@rank3", "random/shared@rank3"]
    assert_same(unflatten(skeleton, tensors), state)


def test_a_modules_metadata_comes_back() -> None:
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2)).state_dict()
    assert state._metadata["0"]["version"] == 2  # type: ignore[attr-defined]
    assert_same(round_trip(state), state)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS])
def test_an_optimizer_goes_on_from_its_state(optimizer: Any) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        module = torch.nn.Linear(3, 2)
        return module, optimizer(module.parameters(), lr=0.1)

    def train(module: torch.nn.Module, steps: int, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(steps):

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = module(torch.ones(4, 3)).square().sum()
                loss.backward()
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]

    module, original = build()
    train(module, 3, original)
    saved = round_trip({"model": module.state_dict(), "optimizer": original.state_dict()})
    train(module, 2, original)
    other, resumed = build()
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(other, 2, resumed)
    assert_same(other.state_dict(), module.state_dict())
    assert_same(resumed.state_dict(), original.state_dict())


def test_schedulers_and_scalers_pass() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for scheduler in (
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    ):
        state = scheduler.state_dict()
        assert_same(round_trip(state), state)
    scaler = torch.amp.GradScaler("cpu").state_dict()  # type: ignore[attr-defined]
    assert_same(round_trip(scaler), scaler)


def test_long_lists_of_numbers_leave_the_skeleton_and_short_ones_stay() -> None:
    scores = [0.5] * 100_000
    skeleton, tensors = flatten({"scores": scores, "params": list(range(INLINE - 1))})
    assert len(json.dumps(skeleton)) < 2000
    assert list(tensors) == ["scores"]
    assert tensors["scores"].dtype is torch.float64


class Colour(enum.IntEnum):
    """Something that only looks like a number."""

    RED = 1


Pair = namedtuple("Pair", "a b")


class Named(dict[str, int]):
    """Something that only looks like a dict."""


class Tagged(torch.Tensor):
    """Something that only looks like a tensor."""


def odd_ordered() -> OrderedDict[str, int]:
    made: OrderedDict[str, int] = OrderedDict(a=1)
    made.extra = 1  # type: ignore[attr-defined]
    return made


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (object(), "builtins.object"),
        (len, "builtin_function_or_method"),
        (Colour.RED, "Colour"),
        (Pair(1, 2), "Pair"),
        (Named(), "Named"),
        (torch.ones(2).as_subclass(Tagged), "Tagged"),  # type: ignore[no-untyped-call]
        (torch.ones(2).to_sparse(), "to_dense"),
        (torch.ones(2, device="meta"), "meta"),
        (np.array([object()]), "dtype('O')"),
        (np.zeros(2, dtype="i4,f8"), "array"),
        (np.zeros(2, dtype="i4,f8")[0], "void"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (defaultdict(lambda: 1), "default factory"),
        (odd_ordered(), "extra"),
        ({object(): 1}, "builtins.object"),
        ({1, (2, frozenset())}, "frozenset"),
        (torch.Generator(), "Generator"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_saved_is_named_by_its_path(value: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        flatten({"model": {"parts": [1, value]}})
    assert "'model/parts/1" in str(caught.value)
    assert said in str(caught.value)


def test_types_without_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="bits8"):
        flatten({"a": torch.empty(2, dtype=torch.bits8)})


def test_sharded_tensors_are_sent_to_dcp() -> None:
    sharded = type("DTensor", (torch.Tensor,), {"__module__": "torch.distributed.tensor"})
    with pytest.raises(ConfigError, match=r"shade\.checkpoint\.dcp"):
        flatten({"w": torch.ones(2).as_subclass(sharded)})


def test_cycles_and_bottomless_nests_are_refused() -> None:
    loop: list[Any] = []
    loop.append({"again": loop})
    with pytest.raises(ConfigError, match="cycle"):
        flatten(loop)
    shared = [1]
    assert_same(round_trip([shared, shared]), [[1], [1]])
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = (deep,)
    assert_same(round_trip(deep), deep)
    with pytest.raises(ConfigError, match="containers"):
        flatten([deep])
    key: Any = 1
    for _ in range(500):
        key = (key,)
    with pytest.raises(ConfigError, match="tuple"):
        flatten({key: 1})


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=[]))
    | st.binary()
)
keys = scalars.filter(lambda key: key == key) | st.tuples(st.text(), st.integers())
trees = st.recursive(
    scalars | st.builds(lambda values: torch.tensor(values, dtype=torch.float64), st.lists(st.floats(), max_size=3)),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.tuples(inner, inner)
        | st.builds(deque, st.lists(inner, max_size=3))
    ),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(trees)
def test_any_tree_comes_back(tree: Any) -> None:
    assert_same(round_trip(tree), tree)
