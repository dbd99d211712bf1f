"""ShadeLoader: DataLoader's batches, order and augmentation, whoever makes them; its end, its errors, its resume."""

from __future__ import annotations

import contextlib
import copy
import gc
import inspect
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, TensorDataset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from shade import ShadeDataset, ShadeLoader, ShadeSampler
from shade.errors import BadSampleError, ConfigError, DataError, StoreClosedError
from tests.support.data_plane import CountingOrigin, loss_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.filterwarnings("ignore:This DataLoader will create")]
N = 70
FUSED = transforms.Compose(
    [
        transforms.RandomResizedCrop(32),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize([0.5] * 3, [0.25] * 3),
    ]
)
WRITTEN = transforms.Compose([FUSED, transforms.RandomErasing(0.5)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs as JPEG, and a few of other kinds."""
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(N):
        coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        image = coarse.resize((int(rng.integers(30, 90)), int(rng.integers(30, 90))), Image.Resampling.BICUBIC)
        place = root / f"class{number % 3}"
        place.mkdir(exist_ok=True)
        image.save(place / (f"{number:03d}.png" if number % 11 == 5 else f"{number:03d}.jpg"))
    return root


def ours() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith(("shade-fetch", "shade-work", "shade-origin"))]


def loaders_own() -> list[threading.Thread]:
    """Without those that read files, which are the data set's: it has some where its storage answers slowly."""
    return [thread for thread in ours() if not thread.name.startswith("shade-origin")]


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    gc.collect()
    assert not ours()


@dataclass
class Epochs:
    """What a training loop saw."""

    batches: list[tuple[list[int], list[int], torch.Tensor]]
    totals: dict[str, Any]
    state: dict[str, Any] | None = None


@contextlib.contextmanager
def data(folder: Path, view: Any = FUSED, cache: Any = "local://", **options: Any) -> Iterator[ShadeDataset]:
    dataset = ShadeDataset(ImageFolder(str(folder)), cache=cache, working_set_fraction=0.4, transform=view, **options)
    try:
        yield dataset
    finally:
        dataset.close()


def run(
    loader: Any, sampler: ShadeSampler, epochs: range, stop_after: int | None = None, *, follow: bool = False
) -> Epochs:
    """The loop of a user."""
    seen: list[tuple[list[int], list[int], torch.Tensor]] = []
    dataset = loader.dataset
    for epoch in epochs:
        sampler.set_epoch(epoch)
        if follow:
            dataset.generators.follow(sampler.seed, epoch)
        for images, targets, indices in loader:
            sampler.weights(indices)
            sampler.report(indices, loss_of(indices))
            seen.append((indices.tolist(), targets.tolist(), images.clone()))
            if stop_after is not None and len(seen) == stop_after:
                return Epochs(seen, {}, loader.state_dict())
    return Epochs(seen, {} if dataset.cache is None else dataset.cache.residency.totals().as_dict())


def same(one: Epochs, other: Epochs) -> None:
    assert [batch[:2] for batch in one.batches] == [batch[:2] for batch in other.batches]
    for (*_, mine), (*_, theirs) in zip(one.batches, other.batches, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[str, Epochs]:
    """DataLoader in the training process, three epochs, without a cache; each transform as written."""
    found = {}
    for name, view in (("fused", transforms.Compose([FUSED, transforms.Lambda(lambda t: t)])), ("written", WRITTEN)):
        with data(folder, view, cache=None) as dataset:
            assert not dataset.is_fused
            sampler = ShadeSampler(dataset, batch_size=16, seed=5)
            found[name] = run(DataLoader(dataset, 16, sampler=sampler), sampler, range(3), follow=True)
            sampler.close()
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize("workers", [0, 1, 2, 5])
@pytest.mark.parametrize("cache", [None, "local://", "memory://?capacity=60KiB"])
def test_the_batches_are_dataloaders(
    folder: Path, references: dict[str, Epochs], workers: int, cache: str | None
) -> None:
    with data(folder, cache=cache) as dataset:
        sampler = ShadeSampler(dataset, batch_size=16, seed=5)
        loader = ShadeLoader(dataset, 16, sampler=sampler, num_workers=workers)
        assert loader.in_threads == (workers > 0)
        outcome = run(loader, sampler, range(3))
        same(outcome, references["fused"])
        if cache is not None:
            assert outcome.totals["hits"] > 0
            assert outcome.totals["samples"] == sum(len(batch[0]) for batch in outcome.batches)
        sampler.close()


@pytest.mark.multiprocess
@pytest.mark.parametrize("workers", [0, 2])
def test_transforms_that_are_not_known_run_as_dataloader_runs_them(
    folder: Path, references: dict[str, Epochs], workers: int
) -> None:
    with data(folder, WRITTEN) as dataset:
        sampler = ShadeSampler(dataset, batch_size=16, seed=5)
        loader = ShadeLoader(dataset, 16, sampler=sampler, num_workers=workers)
        assert not loader.in_threads
        same(run(loader, sampler, range(3)), references["written"])
        sampler.close()
        del loader


@pytest.mark.multiprocess
def test_fused_batches_are_the_same_in_dataloaders_workers(folder: Path, references: dict[str, Epochs]) -> None:
    with data(folder) as dataset:
        sampler = ShadeSampler(dataset, batch_size=16, seed=5)
        loader = DataLoader(dataset, 16, sampler=sampler, num_workers=2)
        same(run(loader, sampler, range(3), follow=True), references["fused"])
        sampler.close()


@pytest.mark.multiprocess
def test_the_ledger_counts_what_the_origin_counts(folder: Path, tmp_path: Path) -> None:
    with data(folder) as dataset:
        dataset.source._origin = CountingOrigin(str(tmp_path / "reads"), 0.001)  # type: ignore[attr-defined]
        sampler = ShadeSampler(dataset, batch_size=16, mode="uniform")
        outcome = run(ShadeLoader(dataset, 16, sampler=sampler, num_workers=2), sampler, range(4))
        reads = CountingOrigin.total(tmp_path / "reads")
        assert reads == (outcome.totals["origin_reads"], outcome.totals["origin_bytes"])
        assert outcome.totals["hits"] > 0.2 * 3 * N
        assert outcome.totals["surprises"] == outcome.totals["store_errors"] == 0
        assert all(outcome.totals["busy_seconds"][cause] > 0 for cause in ("origin", "decode", "transform"))
        sampler.close()


@pytest.mark.multiprocess
@pytest.mark.parametrize("workers", [0, 2])
def test_shuffle_gives_the_order_that_dataloader_gives(folder: Path, workers: int) -> None:
    with data(folder, cache=None) as dataset:
        orders = []
        for kind in (DataLoader, ShadeLoader):
            torch.manual_seed(8)
            loader = kind(dataset, 9, shuffle=True, num_workers=workers, drop_last=True)
            orders.append([indices.tolist() for _ in range(2) for *_, indices in loader])
        assert orders[0] == orders[1]
        assert len(loader) == N // 9


def test_without_a_seeded_sampler_the_augmentation_follows_torchs_seed(folder: Path) -> None:
    with data(folder, cache=None) as dataset:
        streams = []
        for seed, workers in ((1, 1), (1, 4), (2, 4)):
            torch.manual_seed(seed)
            streams.append(torch.cat([batch[0] for batch in ShadeLoader(dataset, 16, num_workers=workers)]))
        assert torch.equal(streams[0], streams[1])
        assert not torch.equal(streams[1], streams[2])


def test_training_may_draw_while_batches_are_made(folder: Path) -> None:
    """The process's generators are training's alone."""
    with data(folder, cache=None) as dataset:
        drawn = []
        for pause in (0.0, 0.01):
            torch.manual_seed(3)
            for _ in ShadeLoader(dataset, 8, num_workers=2):
                drawn.append(torch.rand(3))
                time.sleep(pause)
        half = len(drawn) // 2
        assert all(torch.equal(one, other) for one, other in zip(drawn[:half], drawn[half:], strict=True))


def test_a_collate_function_of_ones_own(folder: Path) -> None:
    def collate(samples: list[Any]) -> Any:
        assert threading.current_thread() is threading.main_thread()
        return torch.stack([sample for sample, *_ in samples]).sum(), [index for *_, index in samples]

    with data(folder, cache=None) as dataset:
        torch.manual_seed(0)
        mine = list(ShadeLoader(dataset, 16, num_workers=2, collate_fn=collate))
        assert [indices for _, indices in mine] == [list(range(n, min(n + 16, N))) for n in range(0, N, 16)]
        torch.manual_seed(0)
        whole = [batch[0].sum() for batch in ShadeLoader(dataset, 16, num_workers=2)]
        assert torch.allclose(torch.stack([total for total, _ in mine]), torch.stack(whole))


def test_rendered_by_torch_pixels_differ_by_a_level_or_two_and_nothing_else_does(folder: Path) -> None:
    """What a GPU would do, here."""
    with data(folder, cache=None) as dataset:
        streams = []
        for where in ("host", "device"):
            torch.manual_seed(1)
            streams.append(list(ShadeLoader(dataset, 16, num_workers=2, device="cpu", decode_on=where)))
        for (mine, *rest), (theirs, *others) in zip(*streams, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(rest, others, strict=True))
            levels = (mine - theirs).abs() * 0.25 * 255
            assert levels.max() < 2.01
            assert levels.mean() < 0.5
            assert mine.dtype == theirs.dtype
        with pytest.raises(ConfigError, match="recognised"):
            ShadeLoader(dataset, 16, num_workers=0, device="cpu", decode_on="device")
        with pytest.raises(ConfigError, match="'host' or 'device'"):
            ShadeLoader(dataset, 16, decode_on="gpu")


@pytest.mark.multiprocess
def test_a_data_set_without_transforms_gives_pictures(folder: Path) -> None:
    with data(folder, None) as dataset:
        loader = ShadeLoader(dataset, 8, num_workers=2, collate_fn=list)
        assert loader.in_threads
        plain = ImageFolder(str(folder))
        for sample, target, index in (item for batch in loader for item in batch):
            assert np.array_equal(np.asarray(sample), np.asarray(plain[index][0]))
            assert target == plain[index][1]


def test_batches_are_not_overwritten_while_somebody_holds_them(folder: Path, references: dict[str, Epochs]) -> None:
    with data(folder, cache=None) as dataset:
        sampler = ShadeSampler(dataset, batch_size=16, seed=5)
        loader, kept = ShadeLoader(dataset, 16, sampler=sampler, num_workers=2), []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for batch in loader:
                sampler.weights(batch[2])
                sampler.report(batch[2], loss_of(batch[2]))
                kept.append(batch[0])
        for mine, (*_, theirs) in zip(kept, references["fused"].batches, strict=True):
            assert torch.equal(mine, theirs)
        sampler.close()


# ── resume ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.multiprocess
@pytest.mark.parametrize("stop_after", [1, 4, 7])
@pytest.mark.parametrize("workers", [(2, 0), (0, 2), (1, 3)], ids=str)
def test_a_resumed_run_goes_on_with_the_next_batch(
    folder: Path, references: dict[str, Epochs], stop_after: int, workers: tuple[int, int]
) -> None:
    whole = references["fused"]
    with data(folder) as dataset:
        sampler = ShadeSampler(dataset, batch_size=16, seed=5)
        loader = ShadeLoader(dataset, 16, sampler=sampler, num_workers=workers[0])
        begun = run(loader, sampler, range(3), stop_after)
        sampler.close()
        del loader
    with data(folder) as dataset:
        sampler = ShadeSampler(dataset, batch_size=16, seed=5)
        loader = ShadeLoader(dataset, 16, sampler=sampler, num_workers=workers[1])
        assert begun.state is not None
        loader.load_state_dict(begun.state)
        rest = run(loader, sampler, range(sampler.epoch, 3))
        sampler.close()
        del loader
    same(Epochs(begun.batches + rest.batches, {}), whole)


@pytest.mark.multiprocess
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("view", [FUSED, WRITTEN], ids=["fused", "written"])
def test_any_sampler_resumes(folder: Path, workers: int, view: Any) -> None:
    def order(loader: ShadeLoader, count: int | None = None) -> list[list[int]]:
        batches = []
        for *_, indices in loader:
            batches.append(indices.tolist())
            if len(batches) == count:
                break
        return batches

    with data(folder, view, cache=None) as dataset:
        torch.manual_seed(6)
        loader = ShadeLoader(dataset, 8, sampler=RandomSampler(dataset), num_workers=workers)
        first = order(loader)
        begun = order(loader, 4)
        state = loader.state_dict()
        torch.manual_seed(99)
        fresh = ShadeLoader(dataset, 8, sampler=RandomSampler(dataset), num_workers=workers)
        fresh.load_state_dict(state)
        assert fresh.state_dict()["batches"] == 4, "nothing was got since"
        rest = order(fresh)
        assert len(begun + rest) == len(first)
        assert sorted(index for batch in begun + rest for index in batch) == list(range(N))
        assert begun + rest != first
        assert fresh.state_dict()["batches"] == 0
        assert len(order(fresh)) == len(first), "and the next epoch is whole"


SHUFFLING = {
    "shuffle": lambda data, generator: {"batch_size": 10, "shuffle": True, "generator": generator},
    "replacement": lambda data, generator: {
        "batch_size": 10,
        "sampler": RandomSampler(data, replacement=True, generator=generator),
    },
    "batches": lambda data, generator: {
        "batch_sampler": BatchSampler(RandomSampler(data, generator=generator), 10, drop_last=False)
    },
    "no batches": lambda data, generator: {"batch_size": None, "sampler": RandomSampler(data, generator=generator)},
}


@pytest.mark.parametrize("kind", SHUFFLING)
@pytest.mark.parametrize("place", ["between epochs", "begun", "in an epoch"])
def test_a_generator_of_ones_own_is_in_the_loaders_state(kind: str, place: str) -> None:
    data = ShadeDataset(TensorDataset(torch.arange(float(N))), cache=None)

    def made() -> ShadeLoader:
        return ShadeLoader(data, num_workers=0, **SHUFFLING[kind](data, torch.Generator().manual_seed(5)))

    def rest(loader: ShadeLoader, iterator: Any, epochs: int) -> list[list[int]]:
        passes = [iterator] * (iterator is not None) + [loader] * epochs
        return [[int(index) for *_, batch in each for index in torch.as_tensor(batch).view(-1)] for each in passes]

    undisturbed, stopped, resumed = made(), made(), made()
    iterators = []
    for loader in (undisturbed, stopped):
        assert len(rest(loader, None, 1)[0]) == N
        iterators.append(None if place == "between epochs" else iter(loader))
        if place == "in an epoch":
            assert [next(iterators[-1]) for _ in range(3)]
    resumed.load_state_dict(stopped.state_dict())
    expected = rest(undisturbed, iterators[0], 2)
    assert rest(resumed, None, len(expected)) == expected


class Drawing(Sampler[int]):
    """Draws its order with a function of the script's."""

    def __init__(self, permuted: Any) -> None:
        self._permuted = permuted

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        return iter(self._permuted())


@pytest.mark.parametrize(
    "permuted", [lambda: random.sample(range(N), N), lambda: np.random.permutation(N).tolist()], ids=["python", "numpy"]
)
def test_a_sampler_that_draws_from_python_or_numpy_resumes(permuted: Any) -> None:
    data = ShadeDataset(TensorDataset(torch.arange(float(N))), cache=None)
    random.seed(5)
    np.random.seed(5)
    stopped = ShadeLoader(data, batch_size=10, sampler=Drawing(permuted))
    list(stopped)
    iterator = iter(stopped)
    list(itertools.islice(iterator, 3))
    state = copy.deepcopy(stopped.state_dict())
    expected = [indices.tolist() for _, indices in iterator]
    random.seed(99)
    np.random.seed(99)
    resumed = ShadeLoader(data, batch_size=10, sampler=Drawing(permuted))
    resumed.load_state_dict(state)
    assert [indices.tolist() for _, indices in resumed] == expected
    after = random.random(), np.random.rand()
    random.seed(99)
    np.random.seed(99)
    assert (random.random(), np.random.rand()) == after, "the process's generators are the script's"


def test_a_batch_sampler_around_a_shade_sampler_has_its_batch_size() -> None:
    data = ShadeDataset(TensorDataset(torch.arange(float(N))), cache=None)
    with contextlib.closing(ShadeSampler(data, batch_size=10, mode="uniform")) as sampler:
        for options in ({"batch_sampler": BatchSampler(sampler, 5, drop_last=False)}, {"batch_size": None}):
            options |= {} if "batch_sampler" in options else {"sampler": sampler}
            with pytest.raises(ConfigError, match="one batch_size"):
                ShadeLoader(data, num_workers=0, **options)
        loader = ShadeLoader(data, num_workers=0, batch_sampler=BatchSampler(sampler, 10, drop_last=False))
        sampler.set_epoch(0)
        whole = [indices.tolist() for *_, indices in loader]
        next(iterator := iter(loader))
        state = loader.state_dict()
        del iterator
        loader.load_state_dict(state)
        assert [indices.tolist() for *_, indices in loader] == whole[1:]


def test_a_state_of_another_kind_is_refused(folder: Path) -> None:
    with data(folder, cache=None) as dataset:
        sampler = ShadeSampler(dataset, batch_size=8)
        with_ours = ShadeLoader(dataset, 8, sampler=sampler, num_workers=0)
        plain = ShadeLoader(dataset, 8, num_workers=0)
        with pytest.raises(ConfigError, match="same kind of sampler"):
            with_ours.load_state_dict(plain.state_dict())
        with pytest.raises(ConfigError, match="same kind of sampler"):
            plain.load_state_dict(with_ours.state_dict())
        sampler.close()


# ── errors ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_a_bad_sample_comes_out_at_its_batch_with_its_path(folder: Path, tmp_path: Path, workers: int) -> None:
    for number in range(40):
        place = tmp_path / "a"
        place.mkdir(exist_ok=True)
        source = folder / "class0" / "000.jpg"
        (place / f"{number:02d}.jpg").write_bytes(source.read_bytes()[: -20 if number == 21 else None])
    with data(tmp_path, cache=None) as dataset:
        iterator = iter(ShadeLoader(dataset, 8, num_workers=workers))
        good = [next(iterator)[2].tolist() for _ in range(2)]
        assert good == [list(range(8)), list(range(8, 16))]
        with pytest.raises(BadSampleError, match=r"21\.jpg"):
            next(iterator)
        assert [batch[2].tolist() for batch in iterator] == [list(range(24, 32)), list(range(32, 40))]


@pytest.mark.multiprocess
def test_an_unreadable_file_comes_out_with_its_path(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "a"
    place.mkdir()
    for number in range(6):
        (place / f"{number}.jpg").write_bytes((folder / "class0" / "000.jpg").read_bytes())
    with data(tmp_path) as dataset:
        os.unlink(place / "4.jpg")
        with pytest.raises(BadSampleError, match=r"4\.jpg"):
            list(ShadeLoader(dataset, 3, num_workers=2))


def test_a_transform_that_raises_names_the_sample(folder: Path) -> None:
    def transform(image: Any) -> Any:
        raise KeyError("by design")

    with data(folder, transform, cache=None) as dataset, pytest.raises(KeyError, match="by design") as told:
        list(ShadeLoader(dataset, 3, num_workers=0))
    if sys.version_info >= (3, 11):
        assert any(".jpg" in note for note in told.value.__notes__)


@pytest.mark.multiprocess
def test_a_batch_that_does_not_come_in_time_is_told(folder: Path, tmp_path: Path) -> None:
    with data(folder) as dataset:
        dataset.source._origin = CountingOrigin(str(tmp_path / "reads"), 0.3)  # type: ignore[attr-defined]
        iterator = iter(ShadeLoader(dataset, 8, num_workers=1, timeout=0.05))
        with pytest.raises(DataError, match=r"timeout=0\.05"):
            next(iterator)


def test_only_our_data_sets() -> None:
    with pytest.raises(ConfigError, match="wrap it"):
        ShadeLoader(TensorDataset(torch.zeros(3)), 2)  # type: ignore[arg-type]


# ── the end ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.multiprocess
def test_leaving_an_epoch_ends_its_threads(folder: Path) -> None:
    with data(folder) as dataset:
        loader = ShadeLoader(dataset, 4, num_workers=2)
        for number, _ in enumerate(loader):
            assert loaders_own()
            if number == 2:
                break
        gc.collect()
        assert not loaders_own()
        assert sum(len(batch[2]) for batch in loader) == N, "and the next epoch is whole"
        assert not loaders_own()


def test_dropping_loader_and_iterator_ends_everything(folder: Path) -> None:
    with data(folder) as dataset:
        loader = ShadeLoader(dataset, 4, num_workers=2)
        iterator = iter(loader)
        next(iterator)
        gone = weakref.ref(loader)
        del loader, iterator
        gc.collect()
        assert not loaders_own()
        assert gone() is None


@pytest.mark.parametrize("view", [FUSED, WRITTEN])
def test_a_loader_that_is_let_go_ends_at_once(folder: Path, view: Any) -> None:
    """Not when the garbage collector comes by: DataLoader's worker processes would be waited for in vain, 5 s each."""
    with data(folder, view) as dataset:
        gc.collect()
        gc.disable()
        try:
            loader = ShadeLoader(dataset, 4, num_workers=2)
            iterator = iter(loader)
            next(iterator)
            workers = [process for process in multiprocessing.active_children() if process.is_alive()]
            assert bool(workers) == (not loader.in_threads)
            gone = weakref.ref(loader)
            del loader, iterator
            assert gone() is None
            assert all(process.exitcode == 0 for process in workers), "not killed: they have heard of the end"
        finally:
            gc.enable()


def test_two_loaders_side_by_side(folder: Path) -> None:
    with data(folder) as one, data(folder, cache=None) as other:
        pairs = zip(ShadeLoader(one, 8, num_workers=2), ShadeLoader(other, 8, num_workers=1), strict=True)
        assert all(torch.equal(mine[2], theirs[2]) for mine, theirs in pairs)


@pytest.mark.parametrize(
    "how", ["interrupt", *(pytest.param(how, marks=pytest.mark.slow) for how in ("exit", "exception"))]
)
def test_a_process_ends_in_the_middle_of_an_epoch(folder: Path, how: str) -> None:
    program = f"""
        import sys, time
        from torchvision import transforms
        from torchvision.datasets import ImageFolder
        from shade import ShadeDataset, ShadeLoader
        view = transforms.Compose([transforms.RandomResizedCrop(32), transforms.ToTensor()])
        dataset = ShadeDataset(ImageFolder({str(folder)!r}), cache="local://", transform=view)
        print(dataset.cache.store.server.process_id, flush=True)
        iterator = iter(ShadeLoader(dataset, 4, num_workers=2))
        next(iterator)
        print("ready", flush=True)
        if {how!r} == "exception":
            raise RuntimeError("by design")
        while {how!r} == "interrupt":
            next(iterator, None)
            time.sleep(0.01)
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    server = int(process.stdout.readline())
    assert process.stdout.readline() == "ready\n"
    if how == "interrupt":
        process.send_signal(signal.SIGINT)
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == {"interrupt": -signal.SIGINT, "exit": 0, "exception": 1}[how], complaints
    assert "Fatal" not in complaints
    deadline = time.monotonic() + 20
    while psutil.pid_exists(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(server)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_passes_of_one_loader_that_are_under_way_at_once_are_whole(kind: str, folder: Path) -> None:
    files = ImageFolder(str(folder), transform=transforms.Compose([transforms.Resize((8, 8)), transforms.ToTensor()]))
    data = ShadeDataset(files if kind == "threads" else TensorDataset(torch.arange(float(N))), cache="local://")
    loader = ShadeLoader(data, batch_size=10, shuffle=True, num_workers=2)
    assert loader.in_threads == (kind == "threads")

    def drawn(batches: Any) -> list[int]:
        return [index for batch in batches for index in batch[-1].tolist()]

    first, second = iter(loader), iter(loader)
    mine = drawn([next(first)])
    other = drawn([next(second)])
    third = drawn(loader)
    both = [mine + drawn(first), other + drawn(second), third, drawn(loader)]
    assert [sorted(each) for each in both] == [list(range(N))] * 4
    data.close()


def test_a_look_at_a_batch_in_mid_epoch_leaves_the_state_as_it_was() -> None:
    data = ShadeDataset(TensorDataset(torch.arange(float(N))), cache=None)
    for sampler in (None, ShadeSampler(data, batch_size=10, mode="uniform")):
        options: dict[str, Any] = {"shuffle": True} if sampler is None else {"sampler": sampler}
        loader = ShadeLoader(data, batch_size=10, num_workers=0, **options)
        if sampler is not None:
            sampler.set_epoch(0)
        seen: list[int] = []
        for number, batch in enumerate(loader):
            seen += batch[-1].tolist()
            if number == 3:
                next(iter(loader))
                break
            if number == 1:
                next(iter(loader))
        loader.load_state_dict(loader.state_dict())
        assert sorted(seen + [index for batch in loader for index in batch[-1].tolist()]) == list(range(N))
        if sampler is not None:
            sampler.close()


def test_the_shuffled_order_does_not_depend_on_workers() -> None:
    data = ShadeDataset(TensorDataset(torch.arange(float(N))), cache=None)

    def orders(view: Any, **options: Any) -> list[list[int]]:
        loader = view(data, batch_size=10, shuffle=True, generator=torch.Generator().manual_seed(5), **options)
        return [[index for batch in loader for index in batch[-1].tolist()] for _ in range(3)]

    expected = orders(DataLoader, num_workers=0)
    for options in ({"num_workers": 0}, {"num_workers": 1}, {"num_workers": 2, "persistent_workers": False}):
        assert orders(ShadeLoader, **options) == expected


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("is_sampled", [False, True])
def test_the_rest_of_an_epoch_draws_nothing_that_the_whole_epoch_has_drawn(workers: int, is_sampled: bool) -> None:
    data = ShadeDataset(TensorDataset(torch.arange(float(N))), cache=None)

    def make() -> ShadeLoader:
        sampler = ShadeSampler(data, batch_size=10, mode="uniform") if is_sampled else None
        return ShadeLoader(data, batch_size=10, shuffle=not is_sampled or None, sampler=sampler, num_workers=workers)

    def begin(loader: ShadeLoader, epoch: int) -> Iterator[list[int]]:
        if is_sampled:
            loader.sampler.set_epoch(epoch)
        return (batch[-1].tolist() for batch in loader)

    torch.manual_seed(3)
    whole, resumed = make(), make()
    for number, _ in enumerate(begin(whole, 0)):
        if number == 2:
            state, generator = whole.state_dict(), torch.get_rng_state()
    expected = list(begin(whole, 1)), torch.rand(3).tolist()
    assert whole.epoch == (1 if is_sampled else None)
    resumed.load_state_dict(state)
    torch.set_rng_state(generator)
    assert resumed.epoch == (0 if is_sampled else None)
    assert len(list(begin(resumed, 0))) == 4
    assert (list(begin(resumed, 1)), torch.rand(3).tolist()) == expected
    for loader in (whole, resumed):
        if is_sampled:
            loader.sampler.close()


class Noisy:
    """A transform of a user's own that draws."""

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return value + torch.rand(()) + random.random() + np.random.rand()


def noisy_loader(workers: int, *, epoch: bool = False, **options: Any) -> ShadeLoader:
    data = ShadeDataset(TensorDataset(torch.arange(float(N))), cache=None, transform=Noisy())
    sampler = ShadeSampler(data, batch_size=10, mode="uniform") if epoch else None
    order = {"sampler": sampler} if epoch else {"shuffle": True, "generator": torch.Generator().manual_seed(5)}
    return ShadeLoader(data, batch_size=10, num_workers=workers, **order, **options)


@pytest.mark.multiprocess
@pytest.mark.parametrize("looks", [0, 1])
@pytest.mark.parametrize("workers", [(1, 1), (2, 1), (1, 2)], ids=str)
def test_workers_of_a_resumed_run_draw_the_same_random_numbers(workers: tuple[int, int], looks: int) -> None:
    whole = [[each.tolist() for each in batch] for batch in noisy_loader(workers[0])]
    iterator = iter(stopped := noisy_loader(workers[0]))
    for _ in range(2):
        next(iterator)
    resumed = noisy_loader(workers[1])
    resumed.load_state_dict(stopped.state_dict())
    torch.manual_seed(99)
    for _ in range(looks):
        next(iter(resumed))
        assert resumed.state_dict()["batches"] == 2
    assert [[each.tolist() for each in batch] for batch in resumed] == whole[2:]
    assert len(list(resumed)) == len(whole)


@pytest.mark.multiprocess
def test_random_numbers_that_workers_would_draw_otherwise_are_refused_and_the_cures_work() -> None:
    stopped = noisy_loader(0)
    next(iterator := iter(stopped))
    with pytest.raises(ConfigError, match=r"num_workers=0, as in the saved run.*ShadeSampler"):
        noisy_loader(1).load_state_dict(stopped.state_dict())
    noisy_loader(0).load_state_dict(stopped.state_dict())
    del iterator
    whole = [batch[0].tolist() for batch in noisy_loader(0, epoch=True)]
    stopped, resumed = noisy_loader(0, epoch=True), noisy_loader(1, epoch=True)
    next(iterator := iter(stopped))
    resumed.load_state_dict(stopped.state_dict())
    del iterator
    assert [batch[0].tolist() for batch in resumed] == whole[1:]


def test_the_place_in_batches_of_another_size_is_refused() -> None:
    data = ShadeDataset(TensorDataset(torch.arange(float(N))), cache=None)
    loader = ShadeLoader(data, batch_size=10, shuffle=True, num_workers=0)
    next(iter(loader))
    with pytest.raises(ConfigError, match="batch_size=10, as in the saved run, got 5"):
        ShadeLoader(data, batch_size=5, shuffle=True, num_workers=0).load_state_dict(loader.state_dict())


def test_the_loader_takes_all_arguments_of_dataloader() -> None:
    theirs, mine = (inspect.signature(view.__init__).parameters for view in (DataLoader, ShadeLoader))
    assert set(theirs) <= set(mine)
    data = ShadeDataset(TensorDataset(torch.arange(float(N))), cache=None)
    with pytest.raises(ValueError, match="persistent_workers"):
        ShadeLoader(data, num_workers=0, persistent_workers=True)
    loader = ShadeLoader(data, batch_size=10, num_workers=1, persistent_workers=False, in_order=False)
    assert [index for batch in loader for index in batch[-1].tolist()] == list(range(N))
    with (
        contextlib.closing(ShadeSampler(data, batch_size=8)) as sampler,
        pytest.raises(ConfigError, match="one batch_size"),
    ):
        ShadeLoader(data, batch_size=10, sampler=sampler, num_workers=0)


def test_the_users_worker_init_fn_is_called(folder: Path) -> None:
    called = torch.zeros(2).share_memory_()  # type: ignore[no-untyped-call]

    def mark(worker: int) -> None:
        called[worker] = 1

    with data(folder) as dataset:
        loader = ShadeLoader(dataset, 16, num_workers=2, worker_init_fn=mark)
        assert not loader.in_threads
        assert len(list(loader)) == len(loader)
    assert called.tolist() == [1, 1]


def test_with_ends_a_pass_under_way_its_threads_and_the_server(folder: Path) -> None:
    with (
        ShadeDataset(ImageFolder(folder), cache="memory://", transform=FUSED) as dataset,
        ShadeSampler(dataset, batch_size=4, mode="uniform") as sampler,
        ShadeLoader(dataset, batch_size=4, sampler=sampler, num_workers=2) as loader,
    ):
        batches = iter(loader)
        next(batches)
        assert loaders_own()
    assert loaders_own() == []
    assert list(batches) == []
    assert dataset.cache is not None
    with pytest.raises(StoreClosedError):
        dataset.cache.store.get_many(["x"])
