"""What `train_gradient` trains: a network, data it can learn from, and the optimizer's settings that suit both.

Two tasks are stored: letters of typefaces and bytes of text that a training never sees (`tasks`). They are far from
their ceiling after one pass, so what an exchange loses shows in them. Each comes in two sizes of one architecture:
a narrow one, whose training takes half a minute of a core, for quality, and a wide one, for bytes and time.
Other data is made, but is not noise: every class has a pattern, every token its successors, and a sample is drawn from
(seed, split, rank, step), so that all methods see the same samples in the same order and none sees a sample twice.

=============  ==============================================  ============  =============  ==========================
name           network, random weights                         parameters    a sample       learns
=============  ==============================================  ============  =============  ==========================
glyphs         residual, 4 blocks, width 16, 3×3 stem          0.3 M         16 × 16        52 letters of new typefaces
glyphs-wide    the same, 8 blocks, width 64: ResNet-18         11.2 M        16 × 16        the same
text           decoder, 2 layers of width 96, tied             0.3 M         64 bytes       the next byte
text-wide      the same, 6 layers of width 384                 10.8 M        64 bytes       the same
resnet18       torchvision's, 3×3 stem, no first pooling       11.2 M        16 × 16        10 noisy patterns
gpt            6 layers of width 384, untied                   10.8 M        32 tokens      a Markov chain of 256 tokens
vit            6 layers of width 384, patches of 8             10.7 M        32 × 32        10 noisy patterns
imagenet       one of `networks`                               by network    224 × 224      an image folder, or patterns
=============  ==============================================  ============  =============  ==========================

Stems are those for small images: torchvision's own leaves one pixel to the last layers, eight ninths of whose
weights then have a gradient of exactly zero. `without_gradient` measures that share.

Legend: N samples · B batch · T tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from networks import build
from tasks import glyphs, text
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import models, transforms
from torchvision.datasets import ImageFolder
from torchvision.models.resnet import BasicBlock

DATA = Path(__file__).resolve().parent.parent / ".cache"
"""Where the stored tasks are prepared."""
CLASSES, PIXELS, TOKENS, VOCABULARY = 10, 32, 32, 256
HELD_OUT = -1


class Recipe(NamedTuple):
    """How the optimizer is set for a task."""

    optimizer: str
    """``sgd`` (momentum 0.9) or ``adamw``."""
    lr: float
    """Peak; warmed up over the first tenth of the steps, then a cosine to zero."""
    batch_size: int
    """Per rank."""


class Task(ABC):
    """A network and its data, on one device."""

    recipe: Recipe
    model: nn.Module

    def __init__(self, seed: int, device: torch.device) -> None:
        self.seed, self.device = seed, device

    @abstractmethod
    def batches(self, rank: int, world_size: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A rank's batches, without end, on the device."""

    @abstractmethod
    def held_out(self, num_samples: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches that are never trained on, the same each time."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy."""
        return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())

    def evaluate(self, num_samples: int) -> tuple[float, float]:
        """Held-out loss and accuracy, as a fraction, of the model as it is."""
        self.model.eval()
        total_loss, num_right, num_all = 0.0, 0, 0
        with torch.no_grad():
            for inputs, targets in self.held_out(num_samples):
                outputs = self.model(inputs)
                total_loss += float(self.loss(outputs, targets)) * targets.numel()
                num_right += int((outputs.argmax(-1) == targets).sum())
                num_all += targets.numel()
        self.model.train()
        return total_loss / num_all, num_right / num_all

    def generator(self, *place: int) -> torch.Generator:
        """Random numbers of their own for each place: a split or rank, and a step."""
        number = self.seed
        for part in place:
            number = (number * 1_000_003 + part + 2) % (1 << 63)
        return torch.Generator().manual_seed(number)


class Made(Task):
    """A task whose samples are drawn."""

    def batches(self, rank: int, world_size: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        step = 0
        while True:
            yield self.draw(batch_size, self.generator(rank, step))
            step += 1

    def held_out(self, num_samples: int) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(0, num_samples, 128):
            yield self.draw(min(128, num_samples - number), self.generator(HELD_OUT, number))

    @abstractmethod
    def draw(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """A batch."""


class Patterns(Made):
    """Images: the class's smooth pattern, somewhat shifted, somewhat stronger or weaker, under noise."""

    most_shift, noise, pixels = 3, 2.0, PIXELS

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__(seed, device)
        coarse = torch.randn(CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(1234))
        smooth = F.interpolate(coarse, size=self.pixels, mode="bicubic", align_corners=False)
        self.patterns = smooth / smooth.std(dim=(1, 2, 3), keepdim=True)

    def draw(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        labels_B = torch.randint(CLASSES, (batch_size,), generator=generator)
        shifts = torch.randint(-self.most_shift, self.most_shift + 1, (2, batch_size, 1), generator=generator)
        rows, columns = ((torch.arange(self.pixels) + shift) % self.pixels for shift in shifts)
        images = self.patterns[labels_B[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
        strength = 0.5 + torch.rand(batch_size, 1, 1, 1, generator=generator)
        noise = torch.randn(images.shape, generator=generator)
        return (images * strength + self.noise * noise).to(self.device), labels_B.to(self.device)


class ResNet18(Patterns):
    """A convolutional network; most of its bytes are in its last layers."""

    recipe = Recipe("sgd", 0.05, 8)
    most_shift, pixels = 2, 16

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__(seed, device)
        self.model = build("resnet18", CLASSES, self.pixels).to(device)


class ViT(Patterns):
    """A vision transformer: 16 patches and the class token."""

    recipe = Recipe("adamw", 5e-4, 8)
    most_shift, noise = 2, 2.0

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__(seed, device)
        size = {"hidden_dim": 384, "num_layers": 6, "num_heads": 6, "mlp_dim": 4 * 384}
        self.model = models.VisionTransformer(PIXELS, 8, num_classes=CLASSES, **size).to(device)
        nn.init.trunc_normal_(self.model.heads.head.weight, std=0.02)  # torchvision's zeros let nothing learn at first


class Block(nn.Module):
    """Attention to what came before, then a perceptron, each on its normalised input and added to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.query_key_value(self.before_attention(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(-2))
        return x + self.perceptron(self.before_perceptron(x))


class Transformer(nn.Module):
    """A decoder as in GPT-2: learned positions, normalisation before.

    Args:
        width: Of a token's vector.
        layers: Blocks.
        heads: Of each block's attention.
        tokens: T, most in a sequence.
        tied: The output layer's weights are those of the embedding; else it has its own.
    """

    def __init__(self, width: int, layers: int, heads: int, tokens: int = TOKENS, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(tokens, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.normalise, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed(tokens_BT) + self.positions(torch.arange(tokens_BT.shape[1], device=tokens_BT.device))
        return self.head(self.normalise(self.blocks(x)))


class GPT(Made):
    """A language model of a language whose every token has four successors, of probability 0.7, 0.15, 0.1 and 0.05.

    No model predicts more than 70 % of its tokens, nor with less than 0.91 nats.
    """

    recipe = Recipe("adamw", 1e-3, 4)

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__(seed, device)
        orders = [torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(number)) for number in range(4)]
        self.successors = torch.stack(orders, dim=1)
        self.probabilities = torch.tensor([0.7, 0.15, 0.1, 0.05])
        self.model = Transformer(384, 6, 6).to(device)

    def draw(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        choices = torch.multinomial(self.probabilities, batch_size * TOKENS, replacement=True, generator=generator)
        tokens = [torch.randint(VOCABULARY, (batch_size,), generator=generator)]
        for choice_B in choices.view(TOKENS, batch_size):
            tokens.append(self.successors[tokens[-1], choice_B])
        tokens_BT = torch.stack(tokens, dim=1).to(self.device)
        return tokens_BT[:, :-1], tokens_BT[:, 1:]


class Large(Patterns):
    """What stands in for a folder where there is none."""

    recipe = Recipe("sgd", 0.1, 32)
    most_shift, pixels = 20, 224

    def __init__(self, seed: int, device: torch.device, network: str) -> None:
        super().__init__(seed, device)
        self.model = build(network, CLASSES, self.pixels).to(device)


class Folder(Task):
    """Images in ``train/CLASS`` and ``val/CLASS``, cropped to 224 pixels, as ImageNet is."""

    recipe = Recipe("sgd", 0.1, 32)

    def __init__(self, seed: int, device: torch.device, folder: Path, network: str, num_workers: int) -> None:
        super().__init__(seed, device)
        normal = [transforms.ToTensor(), transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])]
        vary = transforms.Compose([transforms.RandomResizedCrop(224), transforms.RandomHorizontalFlip(), *normal])
        plain = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), *normal])
        self.train, self.val = ImageFolder(folder / "train", vary), ImageFolder(folder / "val", plain)
        self.num_workers = num_workers
        self.model = build(network, len(self.train.classes), 224).to(device)

    def steps_per_epoch(self, world_size: int, batch_size: int) -> int:
        """Full batches of every rank."""
        return len(self.train) // world_size // batch_size

    def batches(self, rank: int, world_size: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        sampler: DistributedSampler[int] = DistributedSampler(self.train, world_size, rank, seed=self.seed)
        loader = DataLoader(self.train, batch_size, sampler=sampler, num_workers=self.num_workers, drop_last=True)
        if not len(loader):
            raise SystemExit(f"expected at least {batch_size * world_size} images to train on, got {len(self.train)}")
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            for images, labels_B in loader:
                yield images.to(self.device), labels_B.to(self.device)
            epoch += 1

    def held_out(self, num_samples: int) -> Iterator[tuple[Tensor, Tensor]]:
        chosen = torch.randperm(len(self.val), generator=self.generator(HELD_OUT))[:num_samples].tolist()
        for images, labels_B in DataLoader(Subset(self.val, chosen), 64, num_workers=self.num_workers):
            yield images.to(self.device), labels_B.to(self.device)


class Samples(NamedTuple):
    """A stored task's data: inputs (N, …) and targets, of training and held out."""

    train_x: Tensor
    train_y: Tensor
    held_x: Tensor
    held_y: Tensor


class Stored(Task):
    """A task whose samples lie in memory, split over the ranks: each has its own part, in a new order each epoch.

    Args:
        seed: Of the order of the samples.
        device: Of the model and the batches.
        samples: The data; None: loaded from `DATA`, where it is prepared if it is not there.
    """

    load: staticmethod[[], Samples]
    """Loads the task's data."""

    def __init__(self, seed: int, device: torch.device, samples: Samples | None = None) -> None:
        super().__init__(seed, device)
        self.samples = samples or self.load()

    def part(self, rank: int, world_size: int) -> Tensor:
        """Returns the rows of a rank, drawn once and for all seeds."""
        everyone = torch.Generator().manual_seed(0)
        return torch.randperm(len(self.samples.train_x), generator=everyone)[rank::world_size]

    def batches(self, rank: int, world_size: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        part, epoch = self.part(rank, world_size), 0
        if len(part) < batch_size:
            raise SystemExit(f"expected at least {batch_size} samples of a rank, got {len(part)}")
        while True:
            order = part[torch.randperm(len(part), generator=self.generator(rank, epoch))]
            for first in range(0, len(order) - batch_size + 1, batch_size):
                rows = order[first : first + batch_size]
                yield self.samples.train_x[rows].to(self.device), self.samples.train_y[rows].to(self.device)
            epoch += 1

    def held_out(self, num_samples: int) -> Iterator[tuple[Tensor, Tensor]]:
        everyone = torch.Generator().manual_seed(0)
        rows = torch.randperm(len(self.samples.held_x), generator=everyone)[:num_samples]
        for some in rows.split(256):
            yield self.samples.held_x[some].to(self.device), self.samples.held_y[some].to(self.device)


@cache
def load_glyphs() -> Samples:
    """Loads the letters, each mean of 2 × 2 pixels one: inputs (N, 1, 16, 16) between 0 and 1, targets (N,)."""
    with np.load(glyphs.prepare(DATA / "glyphs")) as stored:
        pixels = [stored[name].reshape(-1, 16, 2, 16, 2) for name in ("train_x", "val_x")]
        means = [each.mean((2, 4), dtype=np.float32) / np.float32(255) for each in pixels]
        inputs = [torch.from_numpy(each).unsqueeze(1) for each in means]
        return Samples(inputs[0], torch.from_numpy(stored["train_y"]), inputs[1], torch.from_numpy(stored["val_y"]))


@cache
def load_text() -> Samples:
    """Loads sequences of 65 bytes: inputs (N, 64), and targets (N, 64), the bytes that follow; split by package."""
    parts = [part[:, : 3 * 65].reshape(-1, 65) for part in text.model_parts(text.load(DATA / "text"))]
    train, held = (torch.from_numpy(part.astype(np.int64)) for part in parts)
    return Samples(train[:, :-1], train[:, 1:], held[:, :-1], held[:, 1:])


class Letters(nn.Sequential):
    """A residual network with the stem for small images: ResNet-18's four stages, of any width and depth.

    Args:
        width: Channels of the first stage; each next one has twice as many.
        blocks: Of each stage.
    """

    def __init__(self, width: int, blocks: int) -> None:
        layers: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        inputs = width
        for stage in range(4):
            outputs = width << stage
            for number in range(blocks):
                stride = 2 if stage and not number else 1
                shortcut = None
                if stride > 1:
                    convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
                    shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))
                layers.append(BasicBlock(inputs, outputs, stride, shortcut))
                inputs = outputs
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, len(glyphs.LETTERS)))


class Glyphs(Stored):
    """Which letter is it? Typefaces are split between training and validation."""

    recipe = Recipe("sgd", 0.1, 32)
    load = staticmethod(load_glyphs)
    width, blocks = 16, 1

    def __init__(self, seed: int, device: torch.device, samples: Samples | None = None) -> None:
        super().__init__(seed, device, samples)
        self.model = Letters(self.width, self.blocks).to(device)


class WideGlyphs(Glyphs):
    """ResNet-18."""

    recipe = Recipe("sgd", 0.1, 4)
    width, blocks = 64, 2


class Text(Stored):
    """Which byte is next? Packages are split between training and validation."""

    recipe = Recipe("adamw", 2e-3, 16)
    load = staticmethod(load_text)
    width, layers, heads = 96, 2, 4

    def __init__(self, seed: int, device: torch.device, samples: Samples | None = None) -> None:
        super().__init__(seed, device, samples)
        self.model = Transformer(self.width, self.layers, self.heads, 64, tied=True).to(device)


class WideText(Text):
    """GPT of 10.8 M parameters."""

    recipe = Recipe("adamw", 1e-3, 4)
    width, layers, heads = 384, 6, 6


TASKS: dict[str, type[Made | Stored]] = {
    "resnet18": ResNet18,
    "gpt": GPT,
    "vit": ViT,
    "glyphs": Glyphs,
    "glyphs-wide": WideGlyphs,
    "text": Text,
    "text-wide": WideText,
}
"""The tasks that need no folder."""


def without_gradient(task: Task, num_steps: int = 3, batch_size: int | None = None) -> float:
    """Measures how much of a network never learns.

    Args:
        task: Its model is as before afterwards.
        num_steps: Batches that are looked at.
        batch_size: Of them; None: the task's.

    Returns:
        The share of the parameters whose gradient is exactly zero in each of the batches, as a fraction.
    """
    state = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    parameters = list(task.model.parameters())
    has_any = [torch.zeros_like(parameter, dtype=torch.bool) for parameter in parameters]
    for inputs, targets in islice(task.batches(0, 1, batch_size or task.recipe.batch_size), num_steps):
        task.loss(task.model(inputs), targets).backward()
        for parameter, seen in zip(parameters, has_any, strict=True):
            if parameter.grad is not None:
                seen |= parameter.grad != 0
        task.model.zero_grad()
    task.model.load_state_dict(state)
    return 1 - sum(int(seen.sum()) for seen in has_any) / sum(parameter.numel() for parameter in parameters)
