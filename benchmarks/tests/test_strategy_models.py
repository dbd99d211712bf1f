"""The six models train on text and images in the published formats; their states are as large as they are costed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from shade.errors import ConfigError, DataError, UnknownNameError

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
MODELS = ["gpt2", "bert", "roberta", "bloom", "vit", "resnet"]
TEXT = "\n = Robert Boulter = \n \n Robert Boulter is an English film , television and theatre actor . " * 20
CONTEXT = "Architecturally, the school has a Catholic character. Atop the Main Building's gold dome is a golden statue."


@pytest.fixture(scope="module")
def data() -> Iterator[ModuleType]:
    yield from imported("strategy_data")


@pytest.fixture(scope="module")
def models() -> Iterator[ModuleType]:
    pytest.importorskip("transformers")
    yield from imported("strategy_models")


def imported(name: str) -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield __import__(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def wikitext(tmp_path: Path) -> Path:
    (tmp_path / "wiki.train.raw").write_text(TEXT)
    return tmp_path


@pytest.fixture
def squad(tmp_path: Path) -> Path:
    asked = {
        "id": "5733be284776f4190066117f",
        "question": "What sits on top of the Main Building?",
        "answers": [{"text": "a golden statue", "answer_start": CONTEXT.index("a golden statue")}],
    }
    article = {"title": "Notre_Dame", "paragraphs": [{"context": CONTEXT, "qas": [asked]}]}
    (tmp_path / "train-v1.1.json").write_text(json.dumps({"version": "1.1", "data": [article]}))
    return tmp_path


@pytest.fixture
def images(tmp_path: Path) -> Path:
    from PIL import Image

    for number, name in enumerate(("n01440764", "n01443537")):
        (tmp_path / name).mkdir()
        for each in range(4):
            Image.new("RGB", (40, 30), (90 * number, 30 * each, 7)).save(tmp_path / name / f"{each}.JPEG")
    return tmp_path


# ── data ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_wikitext_is_read_line_by_line(data: ModuleType, wikitext: Path) -> None:
    words = list(data.wikitext_words(wikitext))
    assert words[:5] == ["=", "Robert", "Boulter", "=", "[SEP]"]
    assert words[5:8] == ["Robert", "Boulter", "is"]
    assert list(data.wikitext_words(wikitext / "wiki.train.raw")) == words
    tokens = data.text_tokens(wikitext, 12, 0)
    assert len(tokens) == len(words)
    assert int(tokens.max()) < 12
    assert (tokens == data.UNKNOWN).any()  # more words than numbers
    assert tokens[4] == data.SEPARATOR


def test_what_is_no_wikitext(data: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="unpack WikiText"):
        list(data.wikitext_words(tmp_path))
    (tmp_path / "wiki.train.tokens").write_text("\n \n")
    with pytest.raises(DataError, match="expected words"):
        list(data.wikitext_words(tmp_path))
    with pytest.raises(DataError, match="a text of more than 32 words"):
        next(data.causal_batches(torch.arange(9), 2, 32, 0))


def test_masked_batches_hide_some_words_and_ask_for_those(data: ModuleType) -> None:
    tokens = data.text_tokens(None, 512, 0)
    hidden = asked = whole = 0
    batches = data.masked_batches(tokens, 8, 64, 512, seed=1)
    for _ in range(20):
        batch = next(batches)
        is_asked = batch["labels"] != data.IGNORED
        is_hidden = batch["input_ids"] == data.MASK
        assert is_asked[is_hidden].all()
        assert is_asked.any(1).all()
        hidden, asked, whole = hidden + int(is_hidden.sum()), asked + int(is_asked.sum()), whole + is_asked.numel()
    assert asked / whole == pytest.approx(0.15, abs=0.01)
    assert hidden / asked == pytest.approx(0.8, abs=0.03)


def test_squad_answers_are_found_in_their_windows(data: ModuleType, squad: Path) -> None:
    (question,) = data.squad_questions(squad)
    assert question.context[question.first : question.last + 1] == ["a", "golden", "statue"]
    vocabulary = data.Vocabulary([*question.question, *question.context], 512)
    length = 30
    windows = data.features(question, vocabulary, length, stride=5)
    assert len(windows) > 1  # the context is longer than one window
    with_answer = [window for window in windows if window.first]
    assert with_answer
    for window in with_answer:
        answer = [vocabulary.number(word) for word in ("a", "golden", "statue")]
        assert window.input_ids[window.first : window.last + 1] == answer
        assert window.token_type_ids[window.first] == 1
    assert all(len(window.input_ids) == len(window.token_type_ids) == length for window in windows)
    covered = {number for window in windows for number in window.input_ids}
    assert {vocabulary.number(word) for word in question.context} <= covered


@pytest.mark.parametrize("wrong", ["", "[]", '{"data": [{"paragraphs": [{"context": "x"}]}]}'])
def test_what_is_no_squad(data: ModuleType, tmp_path: Path, wrong: str) -> None:
    (tmp_path / "train-v1.1.json").write_text(wrong)
    with pytest.raises(DataError, match=r"a SQuAD v1\.1 file"):
        list(data.squad_questions(tmp_path))


def test_an_answer_that_is_elsewhere_is_said(data: ModuleType, squad: Path) -> None:
    path = squad / "train-v1.1.json"
    found = json.loads(path.read_text())
    found["data"][0]["paragraphs"][0]["qas"][0]["answers"][0]["answer_start"] += 1
    path.write_text(json.dumps(found))
    with pytest.raises(DataError, match="5733be284776f4190066117f"):
        list(data.squad_questions(path))


def test_images_come_with_their_class(data: ModuleType, images: Path) -> None:
    batch = next(data.image_batches(images, 3, 32, 10, 0, "pixel_values"))
    assert batch["pixel_values"].shape == (3, 3, 32, 32)
    assert set(batch["labels"].tolist()) <= {0, 1}
    with pytest.raises(DataError, match="at most 1 classes"):
        next(data.image_batches(images, 3, 32, 1, 0, "images"))
    with pytest.raises(DataError, match="name train/"):
        next(data.image_batches(images / "n01440764", 3, 32, 10, 0, "images"))


@pytest.mark.parametrize("name", MODELS)
def test_the_same_seed_gives_the_same_batches(models: ModuleType, name: str) -> None:
    first, second, other = (models.batches(name, "tiny", seed=seed) for seed in (3, 3, 4))
    for _ in range(3):
        here, there, elsewhere = next(first), next(second), next(other)
        assert all(torch.equal(here[key], there[key]) for key in here)
        assert any(not torch.equal(here[key], elsewhere[key]) for key in here)


# ── models ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", MODELS)
def test_a_tiny_model_trains_and_its_state_is_as_costed(models: ModuleType, name: str) -> None:
    torch.manual_seed(0)
    model = models.build(name, "tiny")
    optimizer = models.optimizer_of(name, model)
    stream = models.batches(name, "tiny")
    batch = next(stream)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    costed = models.cost(name, "tiny", 1e9, 1e8)
    unique: dict[Any, torch.Tensor] = {}
    for tensor in model.state_dict().values():
        unique[tensor.data_ptr(), tensor.shape] = tensor
    for entry in optimizer.state_dict()["state"].values():
        unique |= {(id(entry), key): value for key, value in entry.items() if torch.is_tensor(value)}
    assert costed.state_bytes == sum(tensor.numel() * tensor.itemsize for tensor in unique.values())
    assert costed.flush_seconds == pytest.approx(10 * costed.copy_seconds)


@pytest.mark.parametrize(
    ("name", "base", "large", "ten_billion"),
    [
        ("gpt2", 124.4, 774.0, 3300),
        ("bert", 108.9, 334.1, 3700),
        ("roberta", 124.7, 355.4, 3750),
        ("bloom", 123.7, 559.2, 4250),
        ("vit", 86.6, 304.3, 3630),
        ("resnet", 25.6, 60.2, 4950),
    ],
)
def test_sizes_in_millions(models: ModuleType, name: str, base: float, large: float, ten_billion: float) -> None:
    counted = [models.cost(name, size, 1e9, 1e9).num_parameters / 1e6 for size in ("base", "large", "10B")]
    assert counted[0] == pytest.approx(base, rel=0.005)
    assert counted[1] == pytest.approx(large, rel=0.005)
    assert counted[2] == pytest.approx(ten_billion, rel=0.02)


def test_what_there_is_not(models: ModuleType) -> None:
    with pytest.raises(UnknownNameError, match="no model named 'gpt3'; known: gpt2"):
        models.build("gpt3", "tiny")
    with pytest.raises(UnknownNameError, match="no size named 'huge'"):
        models.build("gpt2", "huge")
    with pytest.raises(ConfigError, match="10B is costed, not run"):
        models.build("gpt2", "10B")


def test_real_text_trains_too(models: ModuleType, wikitext: Path) -> None:
    for name in ("gpt2", "roberta", "bloom"):
        batch = next(models.batches(name, "tiny", wikitext))
        assert torch.isfinite(models.build(name, "tiny")(**batch).loss)


def test_real_questions_train_too(models: ModuleType, squad: Path) -> None:
    batch = next(models.batches("bert", "tiny", squad))
    assert torch.isfinite(models.build("bert", "tiny")(**batch).loss)


def test_real_images_train_too(models: ModuleType, images: Path) -> None:
    for name in ("vit", "resnet"):
        batch = next(models.batches(name, "tiny", images, batch_size=2))
        assert torch.isfinite(models.build(name, "tiny")(**batch).loss)
