"""The five cells of `bench_importance`: what is learnt, by which model, and what an error is.

Every cell gives tensors in memory, a model that trains within half a minute on one core, and a loss per sample.

Legend: N samples · B batch · T bytes of a piece · C classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tasks import glyphs, text
from torch import Tensor, nn

TAIL = 100
"""The largest class has this many times the samples of the smallest."""
WRONG = 0.1
"""Share of wrong training labels in the noisy cell."""
_MODEL_PIECES, _MODEL_LENGTH = 6_000, 128
_ADAM_RATES = (1e-3, 3e-3, 1e-2)
_COUNTER_RATES = (1e-2, 3e-2, 1e-1)  # each vector of the byte counter is met rarely


@dataclass(frozen=True)
class Cell:
    """One task."""

    train_x: Tensor
    train_y: Tensor
    """int64; for the language model the inputs themselves."""
    val_x: Tensor
    val_y: Tensor
    make_model: Callable[[], nn.Module]
    optimiser: type[torch.optim.Optimizer]
    rates: tuple[float, float, float]
    """The learning rates tried for every way alike."""
    unit: str
    """The error's unit: ``%`` of the validation samples, or ``bits`` per byte."""

    def losses(self, model: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss of each sample, (B,), and its bound of the gradient's norm, (B,)."""
        return sample_losses(model(self.train_x[rows]), self.train_y[rows])

    @torch.no_grad()
    def error(self, model: nn.Module) -> float:
        """Returns the validation error: percent of samples, or bits a byte."""
        model.eval()
        total = 0.0
        for start in range(0, len(self.val_x), 512):
            logits, y = model(self.val_x[start : start + 512]), self.val_y[start : start + 512]
            if self.unit == "%":
                total += 100 * float((logits.argmax(1) != y).sum())
            else:
                total += float(sample_losses(logits, y)[0].sum()) / float(np.log(2))
        model.train()
        return total / len(self.val_x)


def sample_losses(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cross-entropy and the norm of its gradient with respect to the logits, for each sample: logits (B, C), or
    (B, T, C) for a language model, whose sample is the mean over T bytes."""
    losses = F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none").view(y.shape)
    with torch.no_grad():
        chosen = torch.exp(-losses)
        squares = torch.softmax(logits, -1).square().sum(-1) - 2 * chosen + 1
        norms = squares.clamp_min(0).sqrt()
    return (losses, norms) if losses.ndim == 1 else (losses.mean(1), norms.mean(1))


def load(name: str, folder: Path) -> Cell:
    """Prepares the data of a cell in a folder, if needed, and loads it."""
    return CELLS[name](folder)


def _glyphs(folder: Path) -> Cell:
    with np.load(glyphs.prepare(folder / "glyphs")) as stored:
        images = [torch.from_numpy(stored[part]).unsqueeze(1).float() / 255 for part in ("train_x", "val_x")]
        labels = [torch.from_numpy(stored[part]) for part in ("train_y", "val_y")]
    return Cell(images[0], labels[0], images[1], labels[1], _small_cnn, torch.optim.SGD, (0.03, 0.1, 0.3), "%")


def _glyphs_tail(folder: Path) -> Cell:
    whole = _glyphs(folder)
    kept = long_tail(whole.train_y)
    return replace(whole, train_x=whole.train_x[kept], train_y=whole.train_y[kept])


def _glyphs_noisy(folder: Path) -> Cell:
    whole = _glyphs(folder)
    return replace(whole, train_y=wrong_labels(whole.train_y))


def _text_tail(folder: Path) -> Cell:
    stored = text.load(folder / "text")
    pieces, y, held_out = (torch.from_numpy(part) for part in stored)
    train_x, train_y = pieces[~held_out], y[~held_out]
    kept = long_tail(train_y)
    val_x, val_y = pieces[held_out], y[held_out]
    return Cell(train_x[kept], train_y[kept], val_x, val_y, _byte_counter, torch.optim.Adam, _COUNTER_RATES, "%")


def _text_model(folder: Path) -> Cell:
    train, val = (torch.from_numpy(part) for part in text.model_parts(text.load(folder / "text")))
    spread = torch.linspace(0, len(train) - 1, _MODEL_PIECES).long()
    train, val = train[spread, :_MODEL_LENGTH].long(), val[:, :_MODEL_LENGTH].long()
    return Cell(train, train, val, val, _ByteModel, torch.optim.Adam, _ADAM_RATES, "bits")


CELLS: dict[str, Callable[[Path], Cell]] = {
    "glyphs": _glyphs,
    "glyphs, long tail": _glyphs_tail,
    "glyphs, wrong labels": _glyphs_noisy,
    "text, language model": _text_model,
    "text, classes, long tail": _text_tail,
}


def long_tail(y: Tensor) -> Tensor:
    """Returns the rows kept so that class c of C, in an order drawn once, has ``TAIL ** (-c / (C - 1))`` of its
    samples."""
    classes = int(y.max()) + 1
    draw = np.random.Generator(np.random.Philox(key=0))
    place_C = draw.permutation(classes)
    rows = []
    for label in range(classes):
        mine = torch.nonzero(y == label).flatten()
        share = TAIL ** (-float(place_C[label]) / (classes - 1))
        kept = max(1, round(share * len(mine)))
        rows.append(mine[torch.from_numpy(draw.permutation(len(mine))[:kept])])
    return torch.cat(rows).sort().values


def wrong_labels(y: Tensor) -> Tensor:
    """Returns labels of which a share, `WRONG`, is another class, drawn once."""
    draw = np.random.Generator(np.random.Philox(key=1))
    classes = int(y.max()) + 1
    rows = torch.from_numpy(draw.permutation(len(y))[: round(WRONG * len(y))])
    moved = y.clone()
    moved[rows] = (y[rows] + torch.from_numpy(draw.integers(1, classes, len(rows)))) % classes
    return moved


def _small_cnn() -> nn.Module:
    def block(inner: int, outer: int, side: int) -> list[nn.Module]:
        return [nn.Conv2d(inner, outer, side, 2, side // 2), nn.BatchNorm2d(outer), nn.ReLU()]

    return nn.Sequential(*block(1, 8, 5), *block(8, 16, 5), *block(16, 32, 3), nn.Flatten(), nn.Linear(32 * 16, 52))


class _ByteCounter(nn.Module):
    """Averages vectors of hashed pairs and triples of bytes, and classifies the average."""

    _BUCKETS, _WIDTH = 1 << 14, 32

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.vectors = nn.EmbeddingBag(self._BUCKETS, self._WIDTH, mode="mean")
        self.out = nn.Linear(self._WIDTH, classes)

    def forward(self, x_BT: Tensor) -> Tensor:
        x_BT = x_BT.long()
        pairs = x_BT[:, :-1] * 256 + x_BT[:, 1:]
        triples = pairs[:, :-1] * 256 + x_BT[:, 2:]
        hashed = torch.cat([pairs, triples + (1 << 24)], 1) * 2_654_435_761 % (1 << 32) >> 18
        out: Tensor = self.out(F.relu(self.vectors(hashed)))
        return out


def _byte_counter() -> nn.Module:
    return _ByteCounter(classes=len(text.names()))


class _ByteModel(nn.Module):
    """Three causal convolutions, dilated 1, 2 and 4, over embedded bytes: it predicts each byte from those before."""

    _WIDTH = 48

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(257, self._WIDTH)
        self.layers = nn.ModuleList(nn.Conv1d(self._WIDTH, self._WIDTH, 3, dilation=1 << i) for i in range(3))
        self.out = nn.Linear(self._WIDTH, 256)

    def forward(self, x_BT: Tensor) -> Tensor:
        before = F.pad(x_BT[:, :-1], (1, 0), value=256)
        hidden = self.embed(before).transpose(1, 2)
        for layer in self.layers:
            assert isinstance(layer, nn.Conv1d)
            hidden = hidden + F.relu(layer(F.pad(hidden, (2 * layer.dilation[0], 0))))
        out: Tensor = self.out(hidden.transpose(1, 2))
        return out
