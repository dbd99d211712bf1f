"""Cached forms: the same samples, the forecast's arithmetic, and what it is checked against."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from shade import ShadeDataset, ShadeLoader, ShadeSampler
from shade.data._decode.cached_format import FormatCosts, forecast, pack_picture, packed_bytes, picture_of, shrunk
from shade.errors import BadSampleError, ConfigError
from tests.support.data_plane import CountingOrigin, to_tensor

FUSED = transforms.Compose([transforms.RandomResizedCrop(24), transforms.RandomHorizontalFlip(), transforms.ToTensor()])
N = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(N):
        coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        place = root / f"class{number % 2}"
        place.mkdir(exist_ok=True)
        image = coarse.resize((int(rng.integers(40, 90)), int(rng.integers(40, 90))), Image.Resampling.BICUBIC)
        image.save(place / f"{number:02d}.{'png' if number % 13 == 4 else 'jpg'}")
    return root


def epochs(dataset: ShadeDataset, count: int = 3, workers: int = 0) -> list[torch.Tensor]:
    sampler = ShadeSampler(dataset, batch_size=10, mode="uniform", seed=2)
    loader, seen = ShadeLoader(dataset, 10, sampler=sampler, num_workers=workers), []
    for epoch in range(count):
        sampler.set_epoch(epoch)
        seen += [batch[0].clone() for batch in loader]
    sampler.close()
    return seen


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("view", "workers"),
    [
        pytest.param(FUSED, 0, id="fused-0"),
        pytest.param(FUSED, 2, id="fused-2"),
        pytest.param(to_tensor, 0, id="written-0"),
        pytest.param(to_tensor, 2, id="written-2", marks=pytest.mark.slow),
    ],
)
def test_samples_are_the_same_in_every_cached_format(folder: Path, view: Any, workers: int) -> None:
    streams, hits = [], []
    for form in ("encoded", "decoded", "auto"):
        dataset = ShadeDataset(
            ImageFolder(str(folder)), cache="local://", working_set_fraction=0.9, transform=view, form=form
        )
        streams.append(epochs(dataset, workers=workers))
        hits.append(dataset.cache.residency.totals()["hits"])
        dataset.close()
    for stream in streams[1:]:
        assert all(torch.equal(one, other) for one, other in zip(streams[0], stream, strict=True))
    assert all(hits)
    assert hits[1] < hits[0], "pictures are larger than files, in the same room"


def test_decoded_hits_cost_no_decoding_and_the_capacity_is_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = ShadeDataset(ImageFolder(str(folder)), cache="memory://?capacity=4MiB", transform=FUSED, form="decoded")
    log = tmp_path / "reads"
    dataset.source._files._origin = CountingOrigin(str(log))  # type: ignore[attr-defined]
    probed = dataset.cache.residency.totals()
    assert probed["origin_reads"] > 0, "what the probe read is in the ledger"
    epochs(dataset, 1)
    cold, decodings = dataset.cache.residency.totals(), []
    dataset._reader.transforms.fuser.decode = lambda *call: decodings.append(call)  # type: ignore[union-attr]
    monkeypatch.setattr("shade.data._dataset.decoded_source.decoded", lambda *call: decodings.append(call))
    epochs(dataset, 1)
    warm = dataset.cache.residency.totals() - cold
    assert warm["hits"] == N
    assert not decodings
    assert CountingOrigin.total(log)[0] == N
    assert dataset.cache.store.stats().used_bytes <= 4 << 20
    dataset.close()


def test_another_form_or_side_never_finds_the_others_entries(folder: Path) -> None:
    prints = set()
    for options in ({}, {"form": "decoded"}, {"form": "decoded", "max_side": 50}, {"form": "decoded", "max_side": 40}):
        dataset = ShadeDataset(ImageFolder(str(folder)), cache="memory://", **options)
        prints.add(dataset.cache.keys.namespace)
        dataset.close()
    assert len(prints) == 4


def test_with_a_largest_side_every_sample_is_resized_cached_or_not(folder: Path) -> None:
    wrapped = ImageFolder(str(folder))
    dataset = ShadeDataset(wrapped, cache="memory://?capacity=100KiB", form="decoded", max_side=32)
    sampler = ShadeSampler(dataset, batch_size=10, mode="uniform")
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for index in sampler:
            image, target, _ = dataset[index]
            expected = shrunk(wrapped[index][0], 32)
            assert max(image.size) == 32
            assert np.array_equal(np.asarray(image), np.asarray(expected))
            assert target == wrapped[index][1]
    totals = dataset.cache.residency.totals()
    assert totals["hits"] > 0
    assert totals["misses"] > N
    sampler.close()
    dataset.close()


def test_a_bad_file_is_reported_in_every_cached_format(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "a"
    place.mkdir()
    for number, path in enumerate(sorted(folder.rglob("*.jpg"))[:8]):
        (place / f"{number}.jpg").write_bytes(path.read_bytes()[: -30 if number == 5 else None])
    for form in ("encoded", "decoded"):
        dataset = ShadeDataset(ImageFolder(str(tmp_path)), cache="memory://", transform=FUSED, form=form)
        with pytest.raises(BadSampleError, match=r"5\.jpg"):
            dataset.__getitems__(list(range(8)))
        dataset.close()


# ── payloads ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_packed_picture_comes_back_and_nothing_else_is_taken_for_one() -> None:
    picture = np.random.default_rng(0).integers(0, 256, (7, 5, 3), dtype=np.uint8)
    payload = pack_picture(picture)
    assert len(payload) == packed_bytes(7, 5)
    found = picture_of(memoryview(payload))
    assert found is not None
    assert np.array_equal(found, picture)
    for other in (payload[:-1], payload + b"x", b"", b"SHPX", b"\xff\xd8" + payload[2:]):
        assert picture_of(other) is None


# ── the forecast ────────────────────────────────────────────────────────────────────────────────────────────────────

MB = 1 << 20


@pytest.mark.parametrize(
    ("costs", "share", "expected"),
    [
        # decoding is the bottleneck and all fits decoded: decoded
        (FormatCosts(1e-5, 2e-3, 40_000, 360_000), 9.5, "decoded"),
        # the origin is the bottleneck: five times fewer hits cannot pay
        (FormatCosts(2e-2, 1e-3, 40_000, 360_000), 0.4, "encoded"),
        # decoding is the bottleneck and there is hardly any room: not worth the change
        (FormatCosts(1e-5, 2e-3, 40_000, 360_000), 0.2, "encoded"),
        # nothing costs anything
        (FormatCosts(0.0, 0.0, 40_000, 360_000), 0.5, "encoded"),
    ],
)
def test_the_cheaper_form_is_chosen(costs: FormatCosts, share: float, expected: str) -> None:
    found = forecast(costs, 1000, share * 1000 * costs.encoded_bytes, num_cores=2)
    assert found.cached_format == expected
    assert 0.0 <= found.hit_ratios["decoded"] <= found.hit_ratios["encoded"] <= 1.0


def test_the_forecasts_arithmetic_by_hand() -> None:
    found = forecast(FormatCosts(4e-3, 2e-3, 100.0, 400.0), 1000, 50_000.0, num_cores=2)
    assert found.hit_ratios == {"encoded": 0.5, "decoded": 0.125}
    assert found.seconds["encoded"] == pytest.approx(2e-3)
    assert found.seconds["decoded"] == pytest.approx(3.5e-3)
    assert found.gain == pytest.approx(2 / 3.5)
    row = found.check(
        "encoded", {"hits": 40, "misses": 60, "busy_seconds": {"origin": 0.3, "decode": 0.1, "cache": 0.02}}
    )
    assert row["predicted_hit_ratio"] == 0.5
    assert row["measured_hit_ratio"] == 0.4
    assert row["measured_seconds_per_sample"] == pytest.approx(3e-3)


def test_the_choice_is_logged_with_its_reasons(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shade.data"):
        dataset = ShadeDataset(ImageFolder(str(folder)), cache="memory://", form="auto", transform=FUSED)
    assert dataset.forecast is not None
    (line,) = [record.message for record in caplog.records if record.message.startswith("form=")]
    used = dataset.forecast.cached_format
    assert line.startswith(f"form='auto' chose '{used}': decoded is predicted to load ")
    assert "samples/s" in line
    assert "hits" in line
    assert f"form='{used}' (auto: decoded is predicted to load {dataset.forecast.gain:.2g} × as fast" in repr(dataset)
    stats = dataset.stats()
    assert stats["is_decoded"] == float(used == "decoded")
    assert stats["predicted_gain"] == dataset.forecast.gain
    epochs(dataset, 2)
    row = dataset.check_forecast(dataset.cache.residency.totals().as_dict())
    assert row["form"] in ("encoded", "decoded")
    assert row["measured_seconds_per_sample"] > 0
    dataset.close()


@pytest.mark.parametrize(
    ("wrapped", "options", "match"),
    [
        ("files", {"form": "raw"}, "'auto'"),
        ("items", {"form": "decoded"}, "not image files"),
        ("files", {"form": "decoded", "cache": None}, "a cache"),
        ("files", {"max_side": 100}, "max_side"),
        ("files", {"form": "decoded", "max_side": 0}, "max_side"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, wrapped: str, options: dict[str, Any], match: str) -> None:
    inner = ImageFolder(str(folder)) if wrapped == "files" else TensorDataset(torch.zeros(4, 2))
    with pytest.raises(ConfigError, match=match):
        ShadeDataset(inner, **{"cache": "memory://", **options})


def test_the_reason_says_what_decoded_would_gain_and_what_is_asked_for() -> None:
    slow = forecast(FormatCosts(1e-3, 1e-6, 1000, 10_000), 100, 50_000, num_cores=2)
    assert (slow.cached_format, slow.reason) == (
        "encoded", "decoded is predicted to load 0.53 × as fast as encoded, 1.1 × is asked for"
    )  # fmt: skip
    fast = forecast(FormatCosts(1e-6, 1e-3, 1000, 2_000), 100, 150_000, num_cores=2)
    assert fast.cached_format == "decoded"
    assert "asked for" not in fast.reason


def test_a_format_that_the_user_chose_has_no_reason(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shade.data"):
        dataset = ShadeDataset(ImageFolder(str(folder)), cache="memory://?capacity=4MiB", form="decoded")
    assert "form='decoded'," in repr(dataset)
    assert "auto" not in caplog.text
    assert dataset.stats()["is_decoded"] == 1.0
    dataset.close()


def test_auto_leaves_items_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shade.data"):
        dataset = ShadeDataset(TensorDataset(torch.zeros(4, 2)), cache="memory://", form="auto")
    assert "form='auto' chose 'encoded': no step of the transforms can be cached" in caplog.text
    assert "form='encoded' (auto: no step of the transforms can be cached)" in repr(dataset)
    assert dataset.forecast is None
    assert "is_decoded" not in dataset.stats()
    assert dataset.check_forecast({}) == {}
    dataset.close()
