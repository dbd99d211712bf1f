"""Cached prefixes: the samples of plain PyTorch, no random prefix, and no hit for a changed one."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import pickle
import random
import re
import textwrap
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from shade import ShadeDataset, ShadeLoader, ShadeSampler
from shade.data._source.item_codec import element_bytes
from shade.errors import BadSampleError, ConfigError, DataError
from shade.store import open_store
from tests.support.data_plane import make_pictures, to_tensor
from tests.support.shards import make_items, open_shards, write_shards

N = 40
SAMPLES_N3 = torch.arange(3.0 * N).view(N, 3)
LABELS_N = torch.arange(N) % 7


def numbers() -> TensorDataset:
    return TensorDataset(SAMPLES_N3.clone(), LABELS_N.clone())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_pictures(tmp_path / "pictures", N)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cache is slow, so hits are certain."""
    monkeypatch.setattr("shade.cache.breaker.SLOW_SECONDS", 1e9)


def name_of(prefix: Callable[[Any], Any], dataset: Any = None, **options: Any) -> str:
    made = ShadeDataset(numbers() if dataset is None else dataset, "memory://", prefix=prefix, **options)
    try:
        assert made.cache is not None
        return made.cache.keys.namespace
    finally:
        made.close()


def plainly(value: Any) -> Any:
    """A value that `==` compares whole: type, dtype, shape and bytes of all that it holds."""
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, tuple(value.shape), element_bytes(value.as_subclass(torch.Tensor)).tobytes()
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value), value.dtype, value.shape, value.tobytes()
    if isinstance(value, Image.Image):
        return value.mode, value.size, value.tobytes()
    if isinstance(value, dict):
        return {key: plainly(part) for key, part in value.items()}
    return (type(value), [*map(plainly, value)]) if isinstance(value, (list, tuple)) else value


# ── the samples ─────────────────────────────────────────────────────────────────────────────────────────────────────


def half(image: Image.Image) -> Image.Image:
    return image.resize((5, 5))


def whole(sample: Any) -> Any:
    return sample


KINDS: dict[str, Callable[[Image.Image], Any]] = {
    "picture": half,
    "tensor": to_tensor,
    "half precision": lambda image: to_tensor(image).to(torch.bfloat16),
    "array": lambda image: np.asarray(image).astype(">f4"),
    "tv_tensor": v2.ToImage(),
    "tokens": lambda image: [*image.tobytes()[:5]],
    "text": lambda image: f"{image.size}é",
    "dict": lambda image: {"latent": to_tensor(image)[:1], "size": image.size, 3: (np.float16(2), None)},
    "tuple": lambda image: (half(image), [to_tensor(image), {"flag": True}], b"\x00\xff"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_those_of_plain_pytorch_cold_and_warm(kind: str, folder: Path) -> None:
    wrapped = ImageFolder(str(folder), target_transform=lambda label: label + 0.5)
    dataset = ShadeDataset(
        wrapped, "memory://", working_set_fraction=1.0, prefix=KINDS[kind], target_transform=lambda label: [label]
    )
    for _ in range(2):
        for index in range(N):
            image, label = wrapped[index]
            assert plainly(dataset[index]) == plainly((KINDS[kind](image), [label], index))
    assert dataset.stats()["hits"] == N
    dataset.close()


class Records(Dataset[Any]):
    """Items of a kind that no codec knows, with a label that comes as it is."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return Path(f"{index}.txt") if index == 3 else (Path(f"{index}.txt"), {"id": index})


def test_items_need_not_be_encodable_and_keep_what_comes_with_them() -> None:
    wrapped = Records()
    dataset = ShadeDataset(wrapped, "memory://", working_set_fraction=1.0, prefix=lambda path: path.stem)
    for _ in range(2):
        assert dataset[3] == ("3", 3)
        assert dataset[4] == ("4", {"id": 4}, 4)
    assert dataset.stats()["hits"] == 2
    dataset.close()


def one(**options: Any) -> Any:
    return options


@pytest.mark.parametrize("cache", [None, "memory://"])
@pytest.mark.parametrize("compose", [transforms.Compose, v2.Compose, lambda steps: nn.Sequential(*steps)])
def test_the_first_steps_of_a_chain_are_cached_wherever_it_is(cache: str | None, compose: Any, folder: Path) -> None:
    chain = compose([transforms.Resize((6, 7)), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), Noise()])
    expected = ImageFolder(str(folder), transform=chain)
    for own, options in (
        (None, one(transform=chain, prefix_steps=2)),
        (chain, one(prefix_steps=3)),
        (transforms.Resize((6, 7)), one(transform=compose([*parts(chain)][1:]), prefix_steps=1)),
        (None, one(prefix=compose([*parts(chain)][:3]), transform=Noise())),
    ):
        dataset = ShadeDataset(ImageFolder(str(folder), own), cache, working_set_fraction=1.0, **options)
        for _ in range(2):
            torch.manual_seed(4)
            got = [dataset[index] for index in range(N)]
            torch.manual_seed(4)
            assert plainly(got) == plainly([(*expected[index], index) for index in range(N)])
        if cache is not None:
            assert dataset.stats()["hits"] == N
        dataset.close()


class Noise(nn.Module):
    """A random step."""

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        return sample + torch.rand(())


def parts(chain: Any) -> Any:
    return chain if isinstance(chain, nn.Sequential) else chain.transforms


@pytest.mark.multiprocess
@pytest.mark.redis
@pytest.mark.parametrize("loader", [DataLoader, ShadeLoader])
@pytest.mark.parametrize(
    ("workers", "context"), [(0, None), (2, "fork"), pytest.param(2, "spawn", marks=pytest.mark.slow)]
)
def test_loaders_with_any_number_of_workers(loader: Any, workers: int, context: str | None, folder: Path) -> None:
    wrapped = ImageFolder(str(folder))
    dataset = ShadeDataset(wrapped, "local://", working_set_fraction=1.0, prefix=half, transform=to_tensor)
    sampler = ShadeSampler(dataset, batch_size=10, mode="uniform", seed=1)
    batches = loader(dataset, 10, sampler=sampler, num_workers=workers, multiprocessing_context=context)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen = []
        for pictures, labels, indices in batches:
            for picture, label, index in zip(pictures, labels, indices.tolist(), strict=True):
                assert torch.equal(picture, to_tensor(half(wrapped[index][0])))
                assert label == wrapped[index][1]
                seen.append(index)
        assert sorted(seen) == list(range(N))
    assert dataset.stats()["hits"] >= N
    sampler.close()
    dataset.close()


def slow(sample: torch.Tensor) -> torch.Tensor:
    time.sleep(0.005)
    return sample * 2


def test_a_prefix_of_5_ms_costs_nothing_in_the_second_epoch() -> None:
    wrapped = TensorDataset(torch.arange(400.0).view(400, 1), torch.arange(400))
    dataset = ShadeDataset(wrapped, "memory://", working_set_fraction=1.0, prefix=slow)
    seconds = []
    for _ in range(2):
        begun = time.perf_counter()
        for first in range(0, 400, 20):
            dataset.__getitems__(list(range(first, first + 20)))
        seconds.append(time.perf_counter() - begun)
    assert dataset.stats()["hits"] == 400
    assert seconds[0] >= 8 * seconds[1], seconds
    dataset.close()


# ── random prefixes ─────────────────────────────────────────────────────────────────────────────────────────────────

RNG = np.random.default_rng(3)
COUNT = 0
SEEN: list[int] = []


def counts(sample: torch.Tensor) -> torch.Tensor:
    global COUNT
    COUNT += 1
    return sample + (COUNT > 1000)


def remembers(sample: torch.Tensor) -> torch.Tensor:
    SEEN.append(1)
    return sample * 2


class CountsCalls:
    """A counter in an attribute, whose effect comes late."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return sample + self.num_calls // 100


def counter() -> Callable[[Any], Any]:
    numbers = itertools.count()
    return lambda sample: sample + next(numbers) // 100


def imports(sample: torch.Tensor) -> torch.Tensor:
    from secrets import randbelow as below

    return sample + below(2) // 2


RANDOM: dict[str, Callable[[Any], Any]] = {
    "torch": lambda sample: sample + torch.rand(()),
    "numpy": lambda sample: sample + np.random.rand(),
    "python": lambda sample: sample + random.random(),
    "drawn and not used": lambda sample: sample + 0 * torch.rand(()),
    "rarely": lambda sample: sample + random.random() if sample[0] < -1 else sample,
    "a private generator": lambda sample: sample + RNG.random(),
    "default_rng": lambda sample: sample + (np.random.default_rng().random() > 2),
    "urandom": lambda sample: sample + os.urandom(1)[0] // 256,
    "urandom in a library": lambda sample: sample + functools.reduce(lambda a, b: b, [uuid.uuid4().int % 1]),
    "time": lambda sample: sample + int(time.time()) // 10**12,
    "thread": lambda sample: sample + threading.get_ident(),
    "process": lambda sample: sample + os.getpid(),
    "hash": lambda sample: sample + hash("a") % 7,
    "identity": lambda sample: sample + id(sample) % 7,
    "a global counter": counts,
    "a global list": remembers,
    "an attribute that counts": CountsCalls(),
    "an iterator": counter(),
    "in place": lambda sample: sample.mul_(2),
    "in place, once": lambda sample: sample.clamp_(max=5),
    "imported inside": imports,
    "dropout": nn.Dropout(0.5),
    "a random transform": transforms.RandomHorizontalFlip(0.0),
    "a method that draws": lambda sample: sample.clone().normal_() if sample[0] < -1 else sample,
}


@pytest.mark.parametrize("kind", RANDOM)
def test_a_random_prefix_is_refused(kind: str) -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[union-attr,index]
    with pytest.raises(ConfigError, match=r"expected a prefix (that|with a stable name)") as raised:
        ShadeDataset(numbers(), "memory://", prefix=RANDOM[kind])
    assert torch.equal(states[0], torch.get_rng_state()), "the script's random numbers are its own"
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tobytes())  # type: ignore[union-attr,index]
    assert "; " in str(raised.value), "it says what helps"


@pytest.mark.parametrize("kind", ["torch", "python", "a private generator", "time", "urandom", "in place"])
def test_a_version_permits_no_random_prefix(kind: str) -> None:
    with pytest.raises(ConfigError, match="expected a prefix that"):
        ShadeDataset(numbers(), "memory://", prefix=RANDOM[kind], version="1")


class Random(Dataset[Any]):
    """Items that are random themselves."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        return torch.rand(3), index


def test_random_items_are_refused_and_a_random_transform_before_the_prefix(folder: Path) -> None:
    with pytest.raises(ConfigError, match="items are the same when they are read again"):
        ShadeDataset(Random(), "memory://", prefix=whole)
    wrapped = ImageFolder(str(folder), transforms.RandomCrop(8))
    with pytest.raises(ConfigError, match="RandomCrop, half draws from torch's generator"):
        ShadeDataset(wrapped, "memory://", prefix=half)
    dataset = ShadeDataset(ImageFolder(str(folder)), "memory://", prefix=half, transform=transforms.RandomCrop(4))
    dataset.close()


def test_a_change_in_place_of_a_fresh_item_is_no_fault(folder: Path) -> None:
    wrapped = ImageFolder(str(folder), transforms.ToTensor())
    dataset = ShadeDataset(wrapped, "memory://", prefix=transforms.Normalize(0.5, 0.5, inplace=True))
    assert torch.equal(dataset[1][0], (wrapped[1][0] - 0.5) / 0.5)
    dataset.close()


def test_random_results_that_no_probe_shows_are_found_later() -> None:
    """A hit is computed again now and then."""
    box = Hidden()
    dataset = ShadeDataset(numbers(), "memory://", working_set_fraction=1.0, prefix=box)
    dataset.__getitems__(list(range(N)))
    Hidden.table["value"] = 1.0
    with pytest.raises(DataError, match="to be what it was when it was cached"):
        dataset.__getitems__(list(range(N)))
    Hidden.table["value"] = 0.0
    dataset.close()


class Hidden:
    """What it adds changes after the probe."""

    table = {"value": 0.0}  # noqa: RUF012

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        return sample + self.table["value"]


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def module_of(source: str) -> ModuleType:
    """A module of the user's with this source."""
    module = ModuleType("users")
    exec(compile(textwrap.dedent(source), "/home/user/users.py", "exec"), vars(module))
    return module


SOURCE = """
    import torch

    SCALE = {"by": 2.0}

    def helper(sample, power=1):
        return sample ** power

    class Step:
        LEAST = -5.0

        def __init__(self, by):
            self.by = by

        def clipped(self, sample):
            return torch.clip(sample, min=self.LEAST)

        def __call__(self, sample):
            return self.clipped(helper(sample)) * self.by * SCALE["by"] + sum(part * 0 for part in [1])

    prefix = Step(3.0)
"""
CHANGES = {
    "a global": ('"by": 2.0', '"by": 2.5'),
    "a helper": ("sample ** power", "sample ** power + 0"),
    "a default": ("power=1", "power=1.0"),
    "a class attribute": ("LEAST = -5.0", "LEAST = -6.0"),
    "a method": ("min=self.LEAST", "min=self.LEAST + 0"),
    "an attribute": ("Step(3.0)", "Step(4.0)"),
    "an expression inside": ("part * 0 for", "part * 0.0 for"),
    "a function of a library": ("torch.clip(", "torch.clamp("),
}
NO_CHANGES = {
    "nothing": ("import torch", "import torch"),
    "a comment and lines": ("import torch\n", "import torch\n\n    # a comment\n\n"),
    "what is not used": ("class Step:", "UNUSED = 1\n\n    class Step:"),
}


@pytest.mark.parametrize("change", [*CHANGES, *NO_CHANGES])
def test_a_changed_prefix_never_hits_a_server_that_outlives_the_run(change: str) -> None:
    old, new = (CHANGES | NO_CHANGES)[change]
    assert old in SOURCE
    store = open_store("memory://?capacity=1MiB")
    hits = []
    for source in (SOURCE, SOURCE.replace(old, new)):
        dataset = ShadeDataset(numbers(), store, working_set_fraction=1.0, prefix=module_of(source).prefix)
        expected = [module_of(source).prefix(sample) for sample in SAMPLES_N3]
        for index, (sample, *_) in enumerate(dataset.__getitems__(list(range(N)))):
            assert torch.equal(sample, expected[index])
        hits.append(dataset.stats()["hits"])
        dataset._reader.close()
    assert hits == [0, 0 if change in CHANGES else N]
    store.close()


class Outer:
    """Holds what it was made with."""

    def __init__(self, *held: Any) -> None:
        self.held = held

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        return sample


def closed_over(value: Any) -> Callable[[Any], Any]:
    def prefix(sample: Any) -> Any:
        return sample if value is not None else 0

    return prefix


def linear(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 2), nn.ReLU()).eval().requires_grad_(False)


def scaled(sample: torch.Tensor, by: float) -> torch.Tensor:
    return sample * by


@pytest.mark.parametrize(
    ("make", "one", "other"),
    [
        (closed_over, 1, 2),
        (closed_over, "1", 1),
        (closed_over, {1: 2, 3: 4}, {1: 2, 3: 5}),
        (closed_over, {"a", "b"}, {"a", "c"}),
        (closed_over, torch.zeros(2), torch.zeros(3)),
        (closed_over, torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (closed_over, np.arange(3), np.arange(3)[::-1]),
        (closed_over, half, whole),
        (closed_over, half, Outer),
        (closed_over, np.float32, np.float64),
        (Outer, transforms.Resize(4), transforms.Resize(5)),
        (Outer, Image.new("L", (2, 2)), Image.new("L", (2, 2), 1)),
        (lambda value: functools.partial(scaled, by=value), 1.0, 1),
        (lambda value: Outer(functools.partial(scaled, by=value)).held[0], 2.0, 3.0),
        (linear, 0, 1),
        (lambda value: torch.no_grad()(closed_over(value)), 1, 2),
        (lambda value: Outer(value).__call__, 1, 2),
    ],
)
def test_a_name_follows_what_a_prefix_holds(make: Any, one: Any, other: Any) -> None:
    assert name_of(make(one)) == name_of(make(one)), "the same thing made again"
    assert name_of(make(one)) != name_of(make(other))


def test_a_name_follows_the_versions_of_libraries_and_pythons(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def named() -> str:
        return name_of(transforms.Resize(4), ImageFolder(str(folder)))

    names = [named(), named()]
    import PIL

    for library in (torchvision, PIL):  # the second runs, and nothing mentions it
        with monkeypatch.context() as patch:
            patch.setattr(library, "__version__", "0.0.1")
            names.append(named())
    with monkeypatch.context() as patch:
        patch.setattr("shade.data._dataset.code_digest.sys.version", "3.99")
        names.append(named())
    assert names[0] == names[1]
    assert len(set(names)) == 4
    pytest.importorskip("sklearn")
    with monkeypatch.context() as patch:
        patch.setattr("sklearn.__version__", "0.0.1")
        assert named() == names[0], "it is not used"


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_name_is_the_same_in_another_process(tmp_path: Path) -> None:
    import subprocess
    import sys

    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch
            from torch.utils.data import TensorDataset
            from torchvision.transforms import v2
            from shade import ShadeDataset

            NAMES = {"left", "right", "up", "down"}

            class Encoder(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.body = torch.nn.Linear(3, 2)

                @torch.no_grad()
                def forward(self, sample):
                    return self.body(sample) * len(NAMES)

            torch.manual_seed(0)
            wrapped = TensorDataset(torch.arange(30.0).view(10, 3))
            dataset = ShadeDataset(wrapped, "memory://", prefix=Encoder())
            print(dataset.source.fingerprint)
            """
        )
    )
    names = {
        subprocess.run(
            [sys.executable, str(script)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(names) == 1


# ── what has no stable name, and bad input ──────────────────────────────────────────────────────────────────────────


class Opens:
    """Reads a file at every call."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        return sample + float(self.path.read_text())


class Lazy:
    """Loads what it needs at the first call."""

    weight: float | None = None

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        self.weight = self.weight or 2.0
        return sample * self.weight


def by_another_way(sample: torch.Tensor) -> torch.Tensor:
    return getattr(SELF["module"], "".join(["sca", "led"]))(sample, 2.0)


SELF: dict[str, Any] = {}


def test_what_has_no_stable_name_is_refused_and_a_version_is_the_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mean"
    path.write_text("1.5")
    monkeypatch.setenv("SCALE", "2")
    with open(path) as opened:
        for prefix, what in (
            (Opens(path), "opens no file"),
            (Lazy(), "Lazy.weight"),
            (closed_over(opened), "closed_over.*TextIOWrapper|prefix.value: the iterator"),
            (closed_over(memoryview(b"x")), "prefix.value: builtins.memoryview has a state that does not pickle"),
            (lambda sample: sample * float(os.environ["SCALE"]), "refers to os.environ"),
        ):
            with pytest.raises(ConfigError, match=what) as raised:
                name_of(prefix)
            assert "version=" in str(raised.value)
            assert name_of(prefix, version="1") != name_of(prefix, version="2")


def test_code_that_ran_and_is_in_no_name_is_refused() -> None:
    def made() -> Callable[[Any], Any]:
        space: dict[str, Any] = {}
        exec("def inner(sample):\n    return sample * 2", space)
        registry = Registry()
        registry.table.append(space["inner"])
        return registry

    with pytest.raises(ConfigError, match="runs inner, which its code does not mention") as raised:
        name_of(made())
    assert "version=" in str(raised.value)
    name_of(made(), version="1")


class Registry:
    """Runs a function that pickling leaves out."""

    def __init__(self) -> None:
        self.table = Table()

    def __call__(self, sample: torch.Tensor) -> torch.Tensor:
        return self.table[0](sample)  # type: ignore[no-any-return]


class Table(list[Any]):
    """A list that hides what is in it."""

    def __iter__(self) -> Any:
        return iter(())


def test_results_that_a_cache_cannot_keep_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs a gradient.*torch\.no_grad\(\)"):
        name_of(nn.Linear(3, 2))
    name_of(torch.no_grad()(nn.Linear(3, 2)))
    with pytest.raises(ConfigError, match=r"cannot encode index 0.*encode="):
        name_of(lambda sample: Outer(sample))
    name_of(lambda sample: {"x": sample}, encode=lambda item: item[0]["x"].numpy().tobytes(), decode=bytes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (one(prefix=half, prefix_steps=1), "expected prefix= or prefix_steps=, got 'both'"),
        (one(prefix="half"), "expected a prefix that takes a sample"),
        (one(prefix_steps=1), "got 'prefix_steps=1 without one'; pass transform=Compose"),
        (one(prefix_steps=0, transform=transforms.Compose([half])), "expected prefix_steps from 1 to 1"),
        (one(prefix_steps=2, transform=half), "expected prefix_steps from 1 to 1, the steps of transform=, got 2"),
        (one(prefix_steps=True, transform=half), "got True"),
        (one(prefix=half, form="decoded"), "expected form='encoded' or 'auto' with a prefix, got 'decoded'"),
        (one(prefix=lambda image: 1 / 0), "expected a prefix that can process the samples, got 'ZeroDivisionError"),
    ],
)
def test_bad_arguments_are_refused_by_name(options: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        ShadeDataset(ImageFolder(str(folder)), "memory://", **options)
    assert message in str(raised.value)


def fails_at_0(image: Image.Image) -> torch.Tensor:
    sample = to_tensor(image)
    if sample[0, 0, 0] > 130:
        raise ValueError("too bright")
    return sample


def test_errors_of_a_prefix_and_bad_samples_come_as_without_a_cache(folder: Path) -> None:
    wrapped = ImageFolder(str(folder))
    bright = [index for index in range(N) if to_tensor(wrapped[index][0])[0, 0, 0] > 130]
    dark = [index for index in range(N) if index not in bright]
    assert bright
    bad = dark[5]
    Path(wrapped.samples[bad][0]).write_text("no picture")
    dataset = ShadeDataset(wrapped, "memory://", working_set_fraction=1.0, prefix=fails_at_0)
    for _ in range(2):
        with pytest.raises(ValueError, match="too bright"):
            dataset[bright[0]]
        with pytest.raises(BadSampleError, match=Path(wrapped.samples[bad][0]).name):
            dataset[bad]
        assert torch.equal(dataset[dark[0]][0], to_tensor(wrapped[dark[0]][0]))
    dataset.close()
    dataset = ShadeDataset(wrapped, "memory://", prefix=half, on_bad_sample="skip", transform=to_tensor)
    assert torch.equal(dataset[bad][0], to_tensor(half(wrapped[bad + 1][0])))
    dataset.close()


def test_the_wrapped_transform_must_stay_once_its_results_are_cached(folder: Path) -> None:
    wrapped = ImageFolder(str(folder), transforms.Resize(6))
    dataset = ShadeDataset(wrapped, "memory://", prefix=to_tensor)
    dataset[0]
    dataset.transform = transforms.CenterCrop(4)
    assert dataset[0][0].shape[1:] == (4, 4)
    wrapped.transform = transforms.Resize(7)
    with pytest.raises(ConfigError, match="keep the transform that was there when it was wrapped"):
        dataset[0]
    dataset.close()


# ── the choice ──────────────────────────────────────────────────────────────────────────────────────────────────────


def slow_half(image: Image.Image) -> Image.Image:
    time.sleep(0.005)
    return half(image)


def blown_up(image: Image.Image) -> torch.Tensor:
    return torch.zeros(200_000)


def first_value(sample: torch.Tensor) -> torch.Tensor:
    return sample[:1].clone()


@pytest.mark.parametrize(
    ("own", "steps", "chosen"),
    [
        (None, [slow_half, to_tensor, Noise()], "prefix of [12] steps?"),
        (slow_half, [to_tensor], "prefix of [12] steps?"),
        (None, [blown_up, first_value, Noise()], "encoded|decoded|prefix of 2 steps"),
        (None, [transforms.RandomCrop(8), to_tensor], "encoded|decoded"),
        (None, [to_tensor, Noise(), slow], "encoded|decoded|prefix of 1 step"),
    ],
)
def test_auto_chooses_among_the_steps_before_the_first_random_one(
    own: Any, steps: list[Any], chosen: str, folder: Path
) -> None:
    transform = transforms.Compose(steps)
    made = {
        form: ShadeDataset(
            ImageFolder(str(folder), own), "memory://", working_set_fraction=1.0, transform=transform, form=form
        )
        for form in ("encoded", "auto")
    }
    seen: dict[str, list[Any]] = {form: [] for form in made}
    for form, dataset in made.items():
        torch.manual_seed(1)
        for _ in range(2):
            seen[form] += dataset.__getitems__(list(range(N)))
    assert plainly(seen["encoded"]) == plainly(seen["auto"])
    assert re.fullmatch(chosen, made["auto"]._cached_format)
    forecast = made["auto"].forecast
    assert forecast is not None
    assert made["auto"]._cached_format in repr(made["auto"])
    assert "prefix of 3 steps" not in forecast.seconds, "what is random is not cached"
    for dataset in made.values():
        dataset.close()


@pytest.mark.parametrize(("prefix", "chosen"), [(slow_half, "prefix"), (blown_up, "encoded|decoded")])
def test_auto_decides_whether_a_prefix_is_cached(prefix: Any, chosen: str, folder: Path) -> None:
    wrapped = ImageFolder(str(folder))
    dataset = ShadeDataset(wrapped, "memory://", working_set_fraction=1.0, prefix=prefix, form="auto")
    assert re.fullmatch(chosen, dataset._cached_format)
    for _ in range(2):
        for index in range(N):
            assert plainly(dataset[index]) == plainly((prefix(wrapped[index][0]), wrapped[index][1], index))
    assert dataset.check_forecast(dataset.cache.residency.totals().as_dict())["form"] == dataset._cached_format  # type: ignore[union-attr]
    dataset.close()


def test_auto_leaves_a_chain_whole_that_runs_in_one_pass(folder: Path) -> None:
    view = transforms.Compose([transforms.Resize((8, 8)), transforms.ToTensor()])
    dataset = ShadeDataset(ImageFolder(str(folder)), "memory://", transform=view, form="auto")
    assert dataset.is_fused
    assert dataset.forecast is not None
    assert set(dataset.forecast.seconds) == {"encoded", "decoded"}
    dataset.close()


class Pictures(Dataset[Any]):
    """A user's own data set, without files."""

    def __init__(self) -> None:
        self.num_reads = 0

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        self.num_reads += 1
        return Image.new("RGB", (10, 8), (index, 2 * index, 7)), index % 3


class Files(Dataset[Any]):
    """Files of a user's own format."""

    def __init__(self, folder: Path) -> None:
        self.samples = [(str(folder / f"{number}.raw"), number % 3) for number in range(N)]
        for number, (path, _) in enumerate(self.samples):
            Path(path).write_bytes(b"%d of many" % number)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        path, number = self.samples[index]
        return Path(path).read_bytes(), number


def unpacked(content: bytes) -> torch.Tensor:
    time.sleep(0.005)
    return torch.frombuffer(bytearray(content[:8].ljust(8)), dtype=torch.uint8)


def doubled(sample: torch.Tensor) -> torch.Tensor:
    time.sleep(0.005)
    return sample.mul_(2)


def shards_in(folder: Path) -> Any:
    return open_shards(write_shards(folder / "shards", "tar", make_items(N)), index=folder / "index")


OTHERS: dict[str, tuple[Callable[[Path], Any], dict[str, Any], list[Any]]] = {
    "items": (lambda _: Pictures(), {}, [slow_half, to_tensor, Noise()]),
    "items that are views": (lambda _: numbers(), {}, [doubled, Noise()]),
    "items of a codec": (
        lambda _: Pictures(),
        {"encode": pickle.dumps, "decode": pickle.loads},
        [slow_half, to_tensor, Noise()],
    ),
    "shards": (shards_in, {}, [unpacked, Noise()]),
    "files of a format": (Files, {"decode": bytes}, [unpacked, Noise()]),
}
"""How to make data sets without image files, the options that they need, and steps, of which the first is slow."""


@pytest.mark.parametrize(
    ("kind", "way"),
    [*((kind, "steps") for kind in OTHERS), *itertools.product(["items", "shards"], ["prefix", "prefix_steps"])],
)
def test_auto_caches_a_step_of_any_data_set(kind: str, way: str, tmp_path: Path) -> None:
    make, options, steps = OTHERS[kind]
    whole_chain = transforms.Compose(steps)
    by_form = {"encoded": {"transform": whole_chain}, "auto": {"transform": whole_chain}}
    if way == "prefix":
        by_form["auto"] = {"prefix": steps[0], "transform": transforms.Compose(steps[1:])}
    elif way == "prefix_steps":
        by_form["auto"] = {"transform": whole_chain, "prefix_steps": 1}
    seen: dict[str, list[Any]] = {}
    for form, more in by_form.items():
        (folder := tmp_path / form).mkdir()
        wrapped = make(folder)
        dataset = ShadeDataset(wrapped, "memory://?capacity=1MiB", form=form, **options, **more)
        torch.manual_seed(1)
        seen[form] = [sample for _ in range(2) for sample in dataset.__getitems__(list(range(0, N, 4)))]
        stats = dataset.stats()
        assert stats["hits"] == stats["misses"] == N // 4
        if isinstance(wrapped, Pictures):
            # Probes are read in a process of their own.
            assert N // 4 <= wrapped.num_reads < stats["origin_reads"]
        dataset.close()
    assert plainly(seen["encoded"]) == plainly(seen["auto"])
    chosen = "prefix of [12] steps?" if way == "steps" else "prefix"
    assert re.fullmatch(chosen, dataset._cached_format)
    assert re.search(
        rf"form='{chosen}' \(auto: {chosen} is predicted to load [\d.e+]+ × as fast as encoded", repr(dataset)
    )


@pytest.mark.parametrize("kind", OTHERS)
def test_auto_leaves_samples_as_they_are_where_no_step_can_be_cached(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, options, steps = OTHERS[kind]
    for number, transform in enumerate((None, transforms.Compose([random_step, *steps[:1]]))):
        (folder := tmp_path / str(number)).mkdir()
        with caplog.at_level(logging.INFO, "shade.data"):
            dataset = ShadeDataset(make(folder), "memory://", transform=transform, form="auto", **options)
        assert "form='encoded' (auto: no step of the transforms can be cached)" in repr(dataset)
        assert dataset.forecast is None
        dataset.close()
    assert "form='auto' leaves out 'prefix of 1 step' and what is longer: expected a prefix that" in caplog.text
    assert "draws from Python's generator" in caplog.text


def random_step(sample: Any) -> Any:
    random.random()
    return sample


def test_auto_leaves_large_results_of_items_out() -> None:
    view = transforms.Compose([blown_up, Noise()])
    dataset = ShadeDataset(Pictures(), "memory://", transform=view, form="auto")
    assert dataset._cached_format == "encoded"
    assert dataset.forecast is not None
    assert dataset.forecast.hit_ratios["prefix of 1 step"] < 0.1
    dataset.close()


def test_auto_caches_no_step_of_random_items(caplog: pytest.LogCaptureFixture) -> None:
    class Random(Pictures):
        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            return super().__getitem__(int(torch.randint(N, ())))

    state = torch.get_rng_state()
    with caplog.at_level(logging.INFO, "shade.data"), pytest.warns(UserWarning, match="gives another item"):
        dataset = ShadeDataset(Random(), "memory://", transform=transforms.Compose([slow_half, Noise()]), form="auto")
    assert torch.equal(state, torch.get_rng_state()), "the script's random numbers are its own"
    assert dataset._cached_format == "encoded"
    assert "another item when it is read again" in caplog.text
    dataset.close()


def test_auto_counts_the_disk_as_room(tmp_path: Path) -> None:
    view = transforms.Compose([slow_half, Noise()])
    hits = []
    for disk in (None, f"{tmp_path}/tier?capacity=50MB"):
        dataset = ShadeDataset(Pictures(), "memory://", disk=disk, transform=view, form="auto")
        assert dataset.forecast is not None
        hits.append(dataset.forecast.hit_ratios["encoded"])
        dataset.close()
    assert hits == [pytest.approx(0.2, abs=0.05), 1.0]
