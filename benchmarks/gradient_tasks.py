"""What `train_gradient` trains: a network, data it can learn from, and the optimizer's settings that suit both.

Most data is made, but is not noise: every class has a pattern, every token its successors, and a sample is drawn from
(seed, split, rank, step), so that all methods see the same samples in the same order and none sees a sample twice.

=============  ==============================================  ============  =============  ==========================
name           network, random weights                         parameters    a sample       learns
=============  ==============================================  ============  =============  ==========================
resnet18       torchvision's, as published (stem of stride 2)  11.2 M        32 × 32        10 noisy patterns
gpt            6 layers of width 384, untied                   10.8 M        32 tokens      a Markov chain of 256 tokens
vit            6 layers of width 384, patches of 8             10.7 M        32 × 32        10 noisy patterns
imagenet       one of `networks`                               by network    224 × 224      an image folder, or patterns
=============  ==============================================  ============  =============  ==========================

Sizes are chosen for one slow core per rank: a step computes for about a tenth of a second, and exchanges as many bytes
as networks of that kind do. A real accelerator computes more in that time, on more samples, for the same bytes; what
counts for a slow link is seconds of compute against bytes, and `train_gradient` tells both, and the FLOPs.

Legend: B batch · T tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from networks import build
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import models, transforms
from torchvision.datasets import ImageFolder

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

    recipe = Recipe("sgd", 0.05, 16)

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__(seed, device)
        self.model = models.resnet18(weights=None, num_classes=CLASSES).to(device)


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
    """A decoder as in GPT-2: learned positions, normalisation before, its own output layer."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(TOKENS, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.normalise, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

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


TASKS: dict[str, type[Made]] = {"resnet18": ResNet18, "gpt": GPT, "vit": ViT}
"""The tasks that need no files."""
