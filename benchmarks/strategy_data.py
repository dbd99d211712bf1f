"""Reads WikiText, SQuAD v1.1 and ImageFolder data as batches for the six models; makes some up where there is none.

Files are read as published: ``wiki.train.raw`` or ``wiki.train.tokens``, ``train-v1.1.json``, a folder a class.
Nothing is downloaded, and so no tokenizer: words are numbered by how often they occur, as WikiText's authors do, with
what is left over as ``[UNK]``. What a checkpoint costs does not depend on what the words are; that the parameters move
as they do in training does matter to deltas, and a vocabulary in use is what moves them.

What is made up has the same shapes, drawn from a seeded generator. Invariant: the same seed gives the same batches.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from shade.errors import DataError

PAD, UNKNOWN, BEGIN, SEPARATOR, MASK = range(5)
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
IGNORED = -100
"""Label of a place that no loss is taken of."""
MASKED_FRACTION = 0.15
MAX_QUESTION = 64
"""Words of a question; as the scripts for SQuAD have it."""
DOC_STRIDE = 128
"""Words between the windows of a context that is longer than one."""
_WORD = re.compile(r"\w+|[^\w\s]")

Batch = dict[str, torch.Tensor]


class Vocabulary:
    """Words and their numbers: specials first, then the most frequent.

    Args:
        words: All of them, as often as they occur.
        size: Numbers there are, specials included.
    """

    def __init__(self, words: Iterable[str], size: int) -> None:
        common = [word for word, _ in Counter(words).most_common(size)]
        kept = [word for word in common if word not in SPECIALS][: size - len(SPECIALS)]
        self._numbers = {word: number for number, word in enumerate([*SPECIALS, *kept])}

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, word: str) -> int:
        """Of a word; `UNKNOWN` for one that is not known."""
        return self._numbers.get(word, UNKNOWN)


# ── WikiText ────────────────────────────────────────────────────────────────────────────────────────────────────────


def wikitext_words(path: Path) -> Iterator[str]:
    """Words of a WikiText file, in order.

    Args:
        path: ``wiki.train.raw`` or ``.tokens``, or the folder that one is in.

    Yields:
        Words; ``[SEP]`` where a line ends. Blank lines are left out, headings (`` = Title = ``) are lines as others.

    Raises:
        DataError: There is no such file, or no word in it.
    """
    found = path
    if path.is_dir():
        files = [path / f"wiki.train.{ending}" for ending in ("raw", "tokens")]
        found = next((file for file in files if file.exists()), files[0])
    if not found.is_file():
        raise DataError.of("wiki.train.raw or wiki.train.tokens", str(path), "unpack WikiText, and name its folder")
    is_empty = True
    with found.open(encoding="utf-8") as lines:
        for line in lines:
            words = line.split()
            if words:
                is_empty = False
                yield from words
                yield SPECIALS[SEPARATOR]
    if is_empty:
        raise DataError.of("words", f"{found} without any", "unpack it again")


def text_tokens(path: Path | None, vocabulary_size: int, seed: int) -> torch.Tensor:
    """A text as numbers, int64: of a WikiText file, or made up, where some words are frequent and most are rare."""
    if path is None:
        frequency_V = 1 / torch.arange(1, vocabulary_size - len(SPECIALS) + 1, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)
        return torch.multinomial(frequency_V, 2**16, replacement=True, generator=generator) + len(SPECIALS)
    words = list(wikitext_words(path))
    vocabulary = Vocabulary(words, vocabulary_size)
    return torch.tensor([vocabulary.number(word) for word in words])


def causal_batches(tokens: torch.Tensor, batch_size: int, length: int, seed: int) -> Iterator[Batch]:
    """Pieces of a text, for a model that says the next word at each place."""
    for pieces_BL in _pieces(tokens, batch_size, length, torch.Generator().manual_seed(seed)):
        yield {"input_ids": pieces_BL, "labels": pieces_BL}


def masked_batches(
    tokens: torch.Tensor, batch_size: int, length: int, vocabulary_size: int, seed: int
) -> Iterator[Batch]:
    """Pieces of a text with words hidden: of 15 %, eight in ten are `MASK`, one in ten is another word, one is left."""
    generator = torch.Generator().manual_seed(seed)
    for pieces_BL in _pieces(tokens, batch_size, length, generator):
        chance_BL = torch.rand(pieces_BL.shape, generator=generator)
        chosen_BL = chance_BL < MASKED_FRACTION
        others_BL = torch.randint(len(SPECIALS), vocabulary_size, pieces_BL.shape, generator=generator)
        shown_BL = torch.where(chance_BL < 0.8 * MASKED_FRACTION, MASK, pieces_BL)
        shown_BL = torch.where(chosen_BL & (chance_BL >= 0.9 * MASKED_FRACTION), others_BL, shown_BL)
        chosen_BL[:, 0] |= ~chosen_BL.any(1)  # a loss of nothing is no number
        yield {"input_ids": shown_BL, "labels": torch.where(chosen_BL, pieces_BL, IGNORED)}


def _pieces(tokens: torch.Tensor, batch_size: int, length: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    if len(tokens) <= length:
        raise DataError.of(f"a text of more than {length} words", len(tokens), "name a longer one")
    while True:
        starts_B = torch.randint(len(tokens) - length, (batch_size, 1), generator=generator)
        yield tokens[starts_B + torch.arange(length)]


# ── SQuAD ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Question(NamedTuple):
    """One of SQuAD's, with the words of its context and the answer's first and last among them."""

    identity: str
    question: list[str]
    context: list[str]
    first: int
    last: int


def squad_questions(path: Path) -> Iterator[Question]:
    """The questions of a SQuAD v1.1 file.

    Args:
        path: ``train-v1.1.json``, or the folder that it is in.

    Yields:
        Questions, with the first of their answers.

    Raises:
        DataError: It is no such file, or an answer is not where it is said to be.
    """
    found = path / "train-v1.1.json" if path.is_dir() else path
    try:
        articles = json.loads(found.read_text(encoding="utf-8"))["data"]
        for paragraph in (each for article in articles for each in article["paragraphs"]):
            context = str(paragraph["context"])
            words = [(match[0], match.start(), match.end()) for match in _WORD.finditer(context)]
            for asked in paragraph["qas"]:
                yield _question(asked, context, words)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError.of("a SQuAD v1.1 file", f"{found}: {error!r}", "name train-v1.1.json as published") from error


def _question(asked: dict[str, Any], context: str, words: list[tuple[str, int, int]]) -> Question:
    answer, begin = str(asked["answers"][0]["text"]), int(asked["answers"][0]["answer_start"])
    end = begin + len(answer)
    if context[begin:end] != answer:
        raise DataError.of(f"the answer {answer!r} of {asked['id']}", context[begin:end], "download the file again")
    inside = [place for place, (_, start, stop) in enumerate(words) if stop > begin and start < end]
    return Question(
        str(asked["id"]), _WORD.findall(asked["question"]), [word for word, _, _ in words], inside[0], inside[-1]
    )


class Feature(NamedTuple):
    """A window of a context behind its question, as numbers, with the answer's places: 0, 0 where it has none."""

    input_ids: list[int]
    token_type_ids: list[int]
    first: int
    last: int


def features(question: Question, vocabulary: Vocabulary, length: int, stride: int = DOC_STRIDE) -> list[Feature]:
    """The windows of a question: ``[CLS] question [SEP] part of the context [SEP]``, padded.

    Args:
        question: One.
        vocabulary: Of the data set.
        length: Of a window.
        stride: Words of the context from one window to the next.

    Returns:
        At least one window; every word of the context is in one.
    """
    asked = [vocabulary.number(word) for word in question.question[: min(MAX_QUESTION, length // 2)]]
    context = [vocabulary.number(word) for word in question.context]
    before = len(asked) + 2
    room = length - before - 1
    found = []
    for begin in range(0, max(1, len(context)), min(stride, room)):
        part = context[begin : begin + room]
        numbers = [BEGIN, *asked, SEPARATOR, *part, SEPARATOR]
        types = [0] * before + [1] * (len(part) + 1)
        padding = length - len(numbers)
        first, last = question.first - begin, question.last - begin
        is_inside = first >= 0 and last < len(part)
        places = (before + first, before + last) if is_inside else (0, 0)
        found.append(Feature(numbers + [PAD] * padding, types + [0] * padding, *places))
        if begin + room >= len(context):
            break
    return found


def question_batches(
    path: Path | None, batch_size: int, length: int, vocabulary_size: int, seed: int
) -> Iterator[Batch]:
    """Windows with questions, for a model that says where the answer begins and ends."""
    generator = torch.Generator().manual_seed(seed)
    if path is None:
        while True:
            words_BL = torch.randint(len(SPECIALS), vocabulary_size, (batch_size, length), generator=generator)
            places_2B = torch.randint(1, length, (2, batch_size), generator=generator).sort(0).values
            types_BL = (torch.arange(length) > length // 4).long().expand(batch_size, length)
            shown_BL = torch.ones_like(words_BL)
            yield _question_batch(words_BL, types_BL, shown_BL, *places_2B)
    questions = list(squad_questions(path))
    words = (word for each in questions for word in (*each.question, *each.context))
    vocabulary = Vocabulary(words, vocabulary_size)
    windows = [window for question in questions for window in features(question, vocabulary, length)]
    while True:
        chosen = [windows[place] for place in torch.randint(len(windows), (batch_size,), generator=generator).tolist()]
        words_BL = torch.tensor([window.input_ids for window in chosen])
        types_BL = torch.tensor([window.token_type_ids for window in chosen])
        firsts_B, lasts_B = (torch.tensor([window[column] for window in chosen]) for column in (2, 3))
        yield _question_batch(words_BL, types_BL, (words_BL != PAD).long(), firsts_B, lasts_B)


def _question_batch(
    words_BL: torch.Tensor,
    types_BL: torch.Tensor,
    shown_BL: torch.Tensor,
    firsts_B: torch.Tensor,
    lasts_B: torch.Tensor,
) -> Batch:
    return {
        "input_ids": words_BL,
        "token_type_ids": types_BL,
        "attention_mask": shown_BL,
        "start_positions": firsts_B,
        "end_positions": lasts_B,
    }


# ── ImageNet ────────────────────────────────────────────────────────────────────────────────────────────────────────


def image_batches(
    path: Path | None, batch_size: int, image_size: int, num_classes: int, seed: int, name: str
) -> Iterator[Batch]:
    """Images and their classes.

    Args:
        path: In ImageFolder layout, as ImageNet's ``train``; None: made up.
        batch_size: B.
        image_size: Height and width in pixels.
        num_classes: Of the model's head.
        seed: Of the order, or of what is made up.
        name: That the model gives its images: ``pixel_values``.

    Yields:
        Float images (B, 3, image_size, image_size), and int64 labels (B,).

    Raises:
        DataError: It is no such folder, or has more classes than the model.
    """
    generator = torch.Generator().manual_seed(seed)
    if path is None:
        while True:
            images = torch.randn(batch_size, 3, image_size, image_size, generator=generator)
            yield {name: images, "labels": torch.randint(num_classes, (batch_size,), generator=generator)}
    folder = _image_folder(path, image_size)
    if len(folder.classes) > num_classes:
        raise DataError.of(f"at most {num_classes} classes", len(folder.classes), "name a folder with fewer")
    while True:
        for places in torch.randperm(len(folder), generator=generator).split(batch_size):
            if len(places) == min(batch_size, len(folder)):
                images, labels = zip(*(folder[place] for place in places.tolist()), strict=True)
                yield {name: torch.stack(images), "labels": torch.tensor(labels)}


def _image_folder(path: Path, image_size: int) -> Any:
    from torchvision import datasets, transforms

    steps: list[Callable[[Any], Any]] = [
        transforms.Resize(image_size),
        transforms.CenterCrop(image_size),
        transforms.ToTensor(),
        transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]
    try:
        return datasets.ImageFolder(str(path), transforms.Compose(steps))
    except (OSError, RuntimeError) as error:
        raise DataError.of("a folder with a folder of images a class", f"{path}: {error}", "name train/") from error
