"""What is attached is saved and loaded: shared or a rank's own, steady or not, all of it or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shade.checkpoint._capture.app_state import AppState, steppers
from shade.checkpoint._capture.module_state import renamed
from shade.data import ShadeSampler
from shade.errors import ConfigError, StateMismatchError
from tests.support.launching import same_state
from tests.support.states import assert_same


class Counter:
    """Something small; takes no negative counts."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        if self.count < 0:
            raise ValueError("a negative count")


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))


def contents(*, replicated: bool = True, **things: Any) -> AppState:
    made = AppState(replicated)
    made.attach(things)
    return made


def saved(source: AppState) -> tuple[Any, dict[str, torch.Tensor]]:
    captured = source.capture(0, 1)
    return captured.tree, {name: tensor.detach().clone() for name, tensor in captured.tensors.items()}


def stepped(optimizer_class: type[torch.optim.Optimizer], **options: Any) -> tuple[torch.nn.Module, Any]:
    module = model()
    optimizer = optimizer_class(module.parameters(), **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(torch.randn(8, 4)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return module, optimizer


def test_parameters_are_shared_and_steady_and_the_rest_is_each_ranks_own() -> None:
    captured = contents(model=model(), counter=Counter()).capture(1, 2)
    shared = {name for name in captured.tensors if "@" not in name}
    assert shared == captured.steady == {"model/0.weight", "model/0.bias", "model/1.weight", "model/1.bias"}
    own = {name for name in captured.tensors if name.startswith("model/1.running_mean")}
    assert own == {"model/1.running_mean@rank1"}


def test_a_second_name_of_a_buffer_is_a_buffers_and_one_of_a_parameter_a_parameters() -> None:
    net = model()
    net.again = torch.nn.Sequential(net[0], net[1])
    captured = contents(model=net).capture(1, 2)
    assert {name for name in captured.tensors if "@" not in name} == {
        *("model/0.weight", "model/0.bias", "model/1.weight", "model/1.bias")
    }
    assert captured.steady == {name for name in captured.tensors if "@" not in name}


def test_what_was_seen_to_change_is_copied_at_once_from_then_on() -> None:
    net = torch.nn.ModuleDict({"q": torch.nn.Linear(2, 2), "k": torch.nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(net["q"].parameters(), momentum=0.9)
    made = contents(model=net, optimizer=optimizer)
    names = {"model/q.weight", "model/q.bias", "model/k.weight", "model/k.bias"}
    assert made.capture(0, 1).steady == names
    made.note_torn()
    assert made.capture(0, 1).steady == {"model/q.weight", "model/q.bias"}
    assert {name for name in made.capture(1, 2).tensors if "@" not in name} == names  # shared as before
    made.note_torn()
    assert made.capture(0, 1).steady == frozenset()


def test_ranks_that_hold_different_parameters_share_nothing() -> None:
    captured = contents(replicated=False, model=model()).capture(1, 2)
    assert all(name.endswith("@rank1") for name in captured.tensors)
    assert any(name.startswith("model/0.weight") for name in captured.steady)


def test_what_has_no_state_or_a_name_twice_is_refused() -> None:
    made = contents(counter=Counter())
    with pytest.raises(ConfigError, match="'x' to have a state"):
        made.attach({"x": object()})
    with pytest.raises(ConfigError, match="a name that is not attached yet, got 'counter'"):
        made.attach({"counter": Counter()})


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9, "lr": 0.1}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {"momentum": 0.1, "centered": True}),
        (torch.optim.LBFGS, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.Adamax, {}),
        (torch.optim.Rprop, {}),
        (torch.optim.ASGD, {}),
    ],
)
def test_every_optimizer_comes_back_bit_for_bit(optimizer_class: Any, options: dict[str, Any]) -> None:
    module, optimizer = stepped(optimizer_class, **options)
    tree, tensors = saved(contents(model=module, optimizer=optimizer))
    torch.manual_seed(5)
    other, fresh = stepped(optimizer_class, **options)
    contents(model=other, optimizer=fresh).load(tree, tensors, ["model", "optimizer"])
    want, have = optimizer.state_dict(), fresh.state_dict()
    assert want["param_groups"] == have["param_groups"]
    for number, entries in want["state"].items():
        for key, value in entries.items():
            got = have["state"][number][key]
            for a, b in zip(value, got, strict=True) if isinstance(value, list) else [(value, got)]:
                assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, key


@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        (torch.nn.Sequential(torch.nn.Linear(4, 3)), r"'model', got a snapshot that also has 1\.bias"),
        (torch.nn.Sequential(*model(), torch.nn.Linear(3, 3)), r"has no 2\.bias, 2\.weight"),
        (torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3)), r"'model/0\.weight' of shape \(3, 5\)"),
        (model().double(), r"'model/0\.weight' of shape \(3, 4\) torch\.float64, got \(3, 4\) torch\.float32"),
    ],
)
def test_a_model_that_does_not_fit_is_named_and_nothing_is_changed(other: torch.nn.Module, complaint: str) -> None:
    tree, tensors = saved(contents(model=model(), counter=Counter(7)))
    counter = Counter(1)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    generator = torch.get_rng_state()
    with pytest.raises(StateMismatchError, match=complaint):
        contents(model=other, counter=counter).load(tree, tensors, ["random", "counter", "model"])
    assert counter.count == 1
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.state_dict().items())


def test_the_scripts_own_hooks_see_no_step_of_a_restore() -> None:
    source = contents(**dict(zip(("model", "optimizer"), stepped(torch.optim.Adam), strict=True)))
    module, optimizer = stepped(torch.optim.Adam)
    made = contents(model=module, optimizer=optimizer)
    tree, tensors = saved(source)
    seen: list[Any] = []
    hooks = [
        register_optimizer_step_pre_hook(lambda *each: seen.append(each)),
        register_optimizer_step_post_hook(lambda *each: seen.append(each)),
    ]
    try:
        made.load(tree, tensors, ["model", "optimizer"])
        assert seen == []
        optimizer.step()
        assert len(seen) == 2
    finally:
        for hook in hooks:
            hook.remove()


class Accelerated(torch.optim.Optimizer):
    """As optimizers are wrapped by those who never call the constructor."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state)


def test_an_optimizer_in_a_wrapper_comes_back_and_the_inner_one_is_waited_for() -> None:
    module, optimizer = stepped(torch.optim.Adam)
    other, target = model(), torch.optim.Adam(model().parameters())
    tree, tensors = saved(contents(model=module, optimizer=Accelerated(optimizer)))
    contents(model=other, optimizer=Accelerated(target)).load(tree, tensors, ["model", "optimizer"])
    assert_same(target.state_dict(), optimizer.state_dict())
    assert steppers(Accelerated(target)) == steppers(target) == [target]


class Collected(torch.optim.SGD):
    """As ZeroRedundancyOptimizer is."""

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Collects the state on one rank."""


class Failing(torch.optim.SGD):
    """Has no state to give."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not yet")


@pytest.mark.parametrize(
    ("bad", "complaint"),
    [
        (lambda: Collected(model().parameters()), "Collected, which collects it on one"),
        (lambda: Failing(model().parameters()), "'bad' to give its state, got 'RuntimeError: not yet'"),
        (lambda: Accelerated(None), "'Accelerated, which has not called __init__'"),  # type: ignore[arg-type]
        (lambda: torch.nn.ParameterList([torch.nn.Parameter(torch.eye(2).to_sparse())]), "to_dense"),
    ],
)
def test_what_no_restore_would_take_is_refused_when_it_is_attached_and_nothing_is(bad: Any, complaint: str) -> None:
    made = contents(counter=Counter())
    with pytest.raises(ConfigError, match=complaint):
        made.attach({"model": model(), "bad": bad()})
    assert made.names == ["random", "counter"]


def test_an_optimizer_of_other_groups_or_shapes_is_named() -> None:
    module, optimizer = stepped(torch.optim.Adam)
    tree, tensors = saved(contents(optimizer=optimizer))
    two = torch.optim.Adam([{"params": list(module[0].parameters())}, {"params": list(module[1].parameters())}])
    with pytest.raises(StateMismatchError, match=r"'optimizer' with parameter groups of \[2, 2\], got \[4\]"):
        contents(optimizer=two).load(tree, tensors, ["optimizer"])
    wide = torch.optim.Adam([torch.zeros(9, requires_grad=True) for _ in range(4)])
    with pytest.raises(StateMismatchError, match=r"'optimizer/state/0/exp_avg' of shape \(9,\), got \(3, 4\)"):
        contents(optimizer=wide).load(tree, tensors, ["optimizer"])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (torch.optim.SGD, torch.optim.Adam),
        (torch.optim.Adam, torch.optim.SGD),
        (torch.optim.Adamax, torch.optim.Adam),
        (torch.optim.Adam, torch.optim.NAdam),
        (torch.optim.Adam, torch.optim.LBFGS),
        (torch.optim.RMSprop, torch.optim.Adadelta),
    ],
)
def test_the_state_of_another_optimizer_is_refused_and_nothing_is_changed(before: Any, after: Any) -> None:
    module, optimizer = stepped(before)
    tree, tensors = saved(contents(model=module, optimizer=optimizer, counter=Counter(5)))
    other, fresh = stepped(after)
    torch.nn.init.zeros_(other[0].weight)
    counter, groups, known = Counter(1), fresh.state_dict()["param_groups"], contents(model=other, optimizer=fresh)
    known.attach({"counter": counter})
    with pytest.raises(StateMismatchError, match=r"'optimizer'.*, got one .*; .* restore"):
        known.load(tree, tensors, ["model", "optimizer", "counter"])
    assert counter.count == 1
    assert not other[0].weight.any()
    assert fresh.state_dict()["param_groups"] == groups
    fresh.step(lambda: torch.zeros(()))


def test_a_state_that_is_no_optimizers_is_refused_by_name() -> None:
    tree, tensors = saved(contents(model=model(), optimizer=Counter(5)))
    module, optimizer = stepped(torch.optim.Adam)
    with pytest.raises(StateMismatchError, match="'optimizer' takes, got one that it refuses"):
        contents(model=module, optimizer=optimizer).load(tree, tensors, ["model", "optimizer"])


def test_a_module_that_refuses_last_leaves_all_as_it_was() -> None:
    class Picky(torch.nn.Linear):
        version = 1

        def get_extra_state(self) -> int:
            return self.version

        def set_extra_state(self, state: int) -> None:
            if state != self.version:
                raise ValueError(f"version {state}")

    first, second = Picky(2, 2), Picky(2, 2)
    optimizer = torch.optim.SGD(second.parameters(), lr=0.5)
    tree, tensors = saved(contents(model=first, optimizer=torch.optim.SGD(first.parameters(), lr=0.25)))
    second.version = 2
    weight = second.weight.clone()
    with pytest.raises(StateMismatchError, match="'model' takes, got one that it refuses"):
        contents(model=second, optimizer=optimizer).load(tree, tensors, ["model", "optimizer"])
    assert torch.equal(second.weight, weight)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_model_without_memory_is_refused() -> None:
    tree, tensors = saved(contents(model=model()))
    with pytest.raises(StateMismatchError, match=r"memory for 'model/0\.weight'"):
        contents(model=model().to("meta")).load(tree, tensors, ["model"])


@pytest.mark.parametrize(
    ("parameters", "moments"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.int64)],
)
def test_moments_of_another_type_come_back_in_it(parameters: torch.dtype, moments: torch.dtype) -> None:
    def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        module = torch.nn.Conv2d(2, 3, 2).to(parameters, memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(module.parameters())
        for param in module.parameters():
            moment = (torch.randn_like(param, dtype=torch.float32) * 1e9).to(moments)
            optimizer.state[param] = {"step": torch.tensor(3.0), "exp_avg": moment, "exp_avg_sq": moment.square()}
        return module, optimizer

    (module, optimizer), (other, fresh) = made(1), made(2)
    tree, tensors = saved(contents(model=module, optimizer=optimizer))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    contents(model=other, optimizer=fresh).load(tree, tensors, ["model", "optimizer"])
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            want, have = optimizer.state[one][key], fresh.state[two][key]
            assert (have.dtype, have.stride()) == (want.dtype, want.stride())
            assert torch.equal(have, want)


def test_what_refuses_its_state_leaves_all_as_it_was() -> None:
    tree, tensors = saved(contents(model=model(), first=Counter(5), second=Counter(-1)))
    other, first, second = model(), Counter(1), Counter(2)
    torch.nn.init.zeros_(other[0].weight)
    with pytest.raises(StateMismatchError, match=r"'second' takes, got one that it refuses \(ValueError: a negative"):
        contents(model=other, first=first, second=second).load(tree, tensors, ["model", "first", "second"])
    assert (first.count, second.count) == (1, 2)
    assert not other[0].weight.any()


def test_what_refuses_even_its_own_state_is_named_and_the_others_are_put_back() -> None:
    tree, tensors = saved(contents(first=Counter(5), second=Counter(-1)))
    first, second = Counter(1), Counter(-2)
    with pytest.raises(StateMismatchError, match=r"'second' takes, got one.*; 'second' does not take back"):
        contents(first=first, second=second).load(tree, tensors, ["first", "second"])
    assert first.count == 1


def test_what_another_rank_refuses_is_not_kept_here() -> None:
    source, target = model(), model()
    tree, tensors = saved(contents(model=source, counter=Counter(5)))
    torch.nn.init.zeros_(target[0].weight)
    counter, asked = Counter(1), list[Any]()

    def agree(failure: Exception | None) -> None:
        asked.append((failure, counter.count))
        if len(asked) == 2:
            raise StateMismatchError("rank 1: no")

    with pytest.raises(StateMismatchError, match="rank 1: no"):
        contents(model=target, counter=counter).load(tree, tensors, ["model", "counter"], agree=agree)
    assert asked == [(None, 1), (None, 5)]  # before anything is changed, and before the model is
    assert counter.count == 1
    assert not target[0].weight.any()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("has_begun", [False, True])
def test_a_stateful_loader_is_put_back_with_its_sampler(has_begun: bool) -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")

    def made(num_batches: int) -> Any:
        data = torch.utils.data.TensorDataset(torch.arange(12))
        loader = loaders.StatefulDataLoader(data, batch_size=2, sampler=ShadeSampler(data, batch_size=2))
        batches = iter(loader) if num_batches else None
        return loader, batches, [next(batches)[0].tolist() for _ in range(num_batches)]

    source, _, _ = made(3)
    tree, tensors = saved(contents(loader=source, counter=Counter(-1)))
    loader, batches, first = made(2 * has_begun)
    _, _, whole = made(6)
    with pytest.raises(StateMismatchError, match="a negative"):
        contents(loader=loader, counter=Counter(1)).load(tree, tensors, ["loader", "counter"])
    assert first + [each.tolist() for (each,) in batches or loader] == whole


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_a_loader_may_be_attached_twice_under_its_name_and_no_other_one() -> None:
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    one, other = (loaders.StatefulDataLoader([1, 2]) for _ in range(2))
    attached = contents(loader=one)
    attached.attach({"loader": one})
    with pytest.raises(ConfigError, match="a name that is not attached yet"):
        attached.attach({"loader": other})


class Holder:
    """Keeps the tensors that it is given."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def state_dict(self) -> dict[str, Any]:
        return dict(self.tensors)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensors = state


def test_what_an_object_keeps_lies_in_no_memory_that_is_reused() -> None:
    module = model()
    captured = contents(model=module, teacher=Holder(weight=module[0].weight.detach())).capture(0, 1)
    lent = {name: tensor.detach().clone() for name, tensor in captured.tensors.items()}
    teacher = Holder()
    target = contents(model=model(), teacher=teacher)
    target.load(captured.tree, lent, ["model", "teacher"])
    for name in target.forgettable(captured.tree, 0):
        lent[name].zero_()
    assert torch.equal(teacher.tensors["weight"], module[0].weight)


def test_what_an_object_keeps_lies_where_pytorch_would_have_allocated_it() -> None:
    """A dot product's last bits depend on it, and so do LBFGS's steps."""
    _, optimizer = stepped(torch.optim.LBFGS)
    captured = contents(optimizer=optimizer, holder=Holder(a=torch.rand(7), b=torch.rand(7))).capture(0, 1)
    odd = {
        name: torch.frombuffer(bytearray(tensor.nbytes + 68), dtype=torch.uint8)[4 : 4 + tensor.nbytes]
        for name, tensor in captured.tensors.items()
    }
    shard = {name: odd[name].view(each.dtype).view(each.shape).copy_(each) for name, each in captured.tensors.items()}
    (restored_model, restored), holder = stepped(torch.optim.LBFGS), Holder()
    del restored_model
    contents(optimizer=restored, holder=holder).load(captured.tree, shard, ["optimizer", "holder"])
    (state,) = restored.state.values()
    kept = [*holder.tensors.values(), *(each for each in state.values() if isinstance(each, torch.Tensor))]
    assert len(kept) > 3
    assert all(tensor.data_ptr() % 64 == 0 for tensor in kept)


def test_names_that_nobody_knows() -> None:
    tree, tensors = saved(contents(counter=Counter()))
    with pytest.raises(ConfigError, match=r"names of what is attached \(random, counter\), got \['modell'\]"):
        contents(counter=Counter()).load(tree, tensors, ["modell"])
    with pytest.raises(StateMismatchError, match="expected a state for late, got counter, random"):
        contents(counter=Counter(), late=Counter()).load(tree, tensors, ["late"])


def test_the_epoch_is_that_of_whatever_counts_epochs() -> None:
    sampler = Counter()
    assert contents(sampler=sampler).epoch is None
    sampler.epoch = 4  # type: ignore[attr-defined]
    assert contents(counter=Counter(), sampler=sampler).epoch == 4
    scheduled = model()
    scheduled.epoch = 7  # type: ignore[assignment]  # for a weight in its loss
    assert contents(model=scheduled, sampler=sampler).epoch == 4
    assert contents(model=scheduled).epoch is None


def test_unlike_models_have_unlike_digests() -> None:
    same = [contents(model=model()).capture(rank, 2).replica(2, 1) for rank in range(2)]
    assert same[0] == same[1] != ""
    other = model()
    with torch.no_grad():
        other[1].bias[0] += 1
    assert contents(model=other).capture(1, 2).replica(2, 1) != same[0]


def test_models_that_differ_in_few_rows_have_unlike_digests_in_some_save() -> None:
    """An embedding whose first row is padding, of ranks that met other words."""
    words = [torch.nn.Embedding.from_pretrained(torch.zeros(1000, 32)) for _ in range(2)]
    words[1].weight[500, 3] = 1
    captured = [contents(model=each).capture(0, 2) for each in words]
    unlike = [number for number in range(500) if captured[0].replica(2, number) != captured[1].replica(2, number)]
    assert len(unlike) == 2  # of 250 words to a sample


# ── wrappers ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Wrapped(torch.nn.Module):
    """A wrapper of somebody's own."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.module = inner


def compiled(inner: torch.nn.Module) -> Any:
    return torch.compile(inner, backend="eager")


def distributed(inner: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(inner)


WRAPPINGS: dict[str, Callable[[], Any]] = {
    "plain": model,
    "compiled": lambda: compiled(model()),
    "distributed": lambda: distributed(model()),
    "distributed, compiled": lambda: compiled(distributed(model())),
    "compiled, distributed": lambda: distributed(compiled(model())),
    "data parallel": lambda: torch.nn.DataParallel(model()),
    "a compiled layer": lambda: torch.nn.Sequential(compiled(model()[0]), model()[1]),
    "one of its own": lambda: Wrapped(model()),
}


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("before", WRAPPINGS)
def test_a_model_is_the_same_in_every_wrapper(before: str) -> None:
    source = WRAPPINGS[before]()
    for tensor in source.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape))
    values = [value.clone() for value in source.state_dict().values()]
    tree, tensors = saved(contents(model=source))
    for after, make in WRAPPINGS.items():
        target = make()
        contents(model=target).load(tree, tensors, ["model"])
        assert same_state(dict(enumerate(values)), dict(enumerate(target.state_dict().values()))), after
    if before not in ("a compiled layer", "one of its own"):
        assert tensors.keys() >= {f"model/{name}" for name in model().state_dict()}


def test_versions_of_modules_come_with_the_names() -> None:
    own = WRAPPINGS["a compiled layer"]().state_dict()
    for wrapped in (own, Wrapped(model()).state_dict()):
        found = renamed(model().state_dict(), wrapped)
        assert list(found) == list(model().state_dict())
        assert found._metadata == model().state_dict()._metadata  # type: ignore[attr-defined]
    assert renamed(own, own) is own


def test_names_of_which_it_is_not_certain_stay_and_are_refused_by_name() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.weight = torch.nn.Linear(4, 3, bias=False), torch.nn.Parameter(torch.zeros(3, 4))

    tree, tensors = saved(contents(model=Two()))
    target = torch.nn.Linear(4, 3, bias=False)
    before = target.weight.detach().clone()
    with pytest.raises(StateMismatchError, match=r"also has module\.weight"):
        contents(model=target).load(tree, tensors, ["model"])
    assert torch.equal(target.weight, before)
