"""The six models that checkpointing is compared on, in four sizes, and how each is trained. Random weights throughout.

=======  ==========================  ==================  ======================  =======================
model    trained to                  tiny (tests)        base                    large
=======  ==========================  ==================  ======================  =======================
gpt2     say the next word           2 layers of 64      124 M, as published     774 M, as published
bert     find answers (SQuAD)        2 layers of 64      109 M, as published     334 M, as published
roberta  say the hidden word         2 layers of 64      125 M, as published     356 M, as published
bloom    say the next word           2 layers of 64      124 M, 12 layers        559 M, as published
vit      name what is on an image    2 layers of 64      86 M, as published      304 M, as published
resnet   name what is on an image    4 small blocks      26 M, ResNet-50         60 M, ResNet-152
=======  ==========================  ==================  ======================  =======================

``10B`` is what AsymCheck's scripts call so: 46 or 64 layers, some 3.3 to 4 billion parameters, whose state has ten
billion numbers. (No BLOOM is published as small as `base`, no ResNet as large as `10B`.) It is built on the meta
device, which takes no memory, and costed:

    python benchmarks/strategy_models.py --size 10B --copy-rate 10 --disk-rate 1        (GB/s)

Transformers train with AdamW, 12 bytes of state a parameter; ResNets with SGD and momentum, 8, as in their scripts.
Dropout is off, so that two runs do the same work. Invariant: a size's state is what `cost` says, to the byte.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from strategy_data import (
    PAD,
    Batch,
    causal_batches,
    image_batches,
    masked_batches,
    question_batches,
    text_tokens,
)
from torch import nn
from torchvision.models import resnet

from shade.errors import ConfigError, UnknownNameError

SIZES = ("tiny", "base", "large", "10B")
LEARNING_RATE, DECAY, MOMENTUM = 5e-5, 0.01, 0.9


class Form(NamedTuple):
    """Of a transformer."""

    hidden: int
    layers: int
    heads: int
    vocabulary: int = 0
    """Words; pixels of an image's side for ViT."""
    length: int = 64
    """Words in a sample; pixels of a patch's side for ViT."""
    batch: int = 1


FORMS: dict[str, dict[str, Form]] = {
    "gpt2": {
        "tiny": Form(64, 2, 2, 512, 32, 4),
        "base": Form(768, 12, 12, 50257),
        "large": Form(1280, 36, 20, 50257),
        "10B": Form(2048, 64, 32, 50257, 512, 2),
    },
    "bert": {
        "tiny": Form(64, 2, 2, 512, 32, 4),
        "base": Form(768, 12, 12, 30522, 96),
        "large": Form(1024, 24, 16, 30522, 96),
        "10B": Form(2560, 46, 40, 30522, 384),
    },
    "roberta": {
        "tiny": Form(64, 2, 2, 512, 32, 4),
        "base": Form(768, 12, 12, 50265),
        "large": Form(1024, 24, 16, 50265),
        "10B": Form(2560, 46, 40, 50265, 512, 2),
    },
    "bloom": {
        "tiny": Form(64, 2, 2, 512, 32, 4),
        "base": Form(768, 12, 12, 50257),
        "large": Form(1024, 24, 16, 250880),
        "10B": Form(2560, 46, 32, 250880, 512, 2),
    },
    "vit": {
        "tiny": Form(64, 2, 2, 32, 8, 4),
        "base": Form(768, 12, 12, 224, 16),
        "large": Form(1024, 24, 16, 224, 16),
        "10B": Form(2560, 46, 40, 224, 16, 32),
    },
}
RESNETS: dict[str, tuple[type[Any], list[int], int, int, int]] = {
    "tiny": (resnet.BasicBlock, [1, 1, 1, 1], 64, 32, 4),
    "base": (resnet.Bottleneck, [3, 4, 6, 3], 64, 224, 2),
    "large": (resnet.Bottleneck, [3, 8, 36, 3], 64, 224, 2),
    "10B": (resnet.Bottleneck, [3, 8, 36, 3], 800, 224, 32),
}
"""Block, blocks in each stage, width of a group, pixels, batch."""
CLASSES = 1000
TINY_CLASSES = 10


def _gpt2(form: Form) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=form.vocabulary,
            n_positions=max(1024, form.length),
            n_embd=form.hidden,
            n_layer=form.layers,
            n_head=form.heads,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def _bert_options(form: Form, positions: int) -> dict[str, Any]:
    return {
        "vocab_size": form.vocabulary,
        "hidden_size": form.hidden,
        "num_hidden_layers": form.layers,
        "num_attention_heads": form.heads,
        "intermediate_size": 4 * form.hidden,
        "max_position_embeddings": positions,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": PAD,
    }


def _bert(form: Form) -> nn.Module:
    from transformers import BertConfig, BertForQuestionAnswering

    return BertForQuestionAnswering(BertConfig(**_bert_options(form, 512)))


def _roberta(form: Form) -> nn.Module:
    from transformers import RobertaConfig, RobertaForMaskedLM

    options = {"bos_token_id": None, "eos_token_id": None, "type_vocab_size": 1}
    return RobertaForMaskedLM(RobertaConfig(**_bert_options(form, 514), **options))


def _bloom(form: Form) -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    return BloomForCausalLM(
        BloomConfig(
            vocab_size=form.vocabulary,
            hidden_size=form.hidden,
            n_layer=form.layers,
            n_head=form.heads,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )


def _vit(form: Form) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=form.hidden,
            num_hidden_layers=form.layers,
            num_attention_heads=form.heads,
            intermediate_size=4 * form.hidden,
            image_size=form.vocabulary,
            patch_size=form.length,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=TINY_CLASSES if form.vocabulary < 64 else CLASSES,
        )
    )


class ResNet(resnet.ResNet):
    """torchvision's, which gives its loss as the transformers do."""

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> Any:
        """Images (B, 3, H, W) and labels (B,): the loss, under the name that transformers give it."""
        return argparse.Namespace(loss=F.cross_entropy(super().forward(images), labels))


_BUILDERS: dict[str, Callable[[Form], nn.Module]] = {
    "gpt2": _gpt2,
    "bert": _bert,
    "roberta": _roberta,
    "bloom": _bloom,
    "vit": _vit,
}
MODELS = (*_BUILDERS, "resnet")
"""In the order of the table."""


def check(name: str, size: str) -> None:
    """Raises UnknownNameError if there is no such model or size."""
    for noun, each, known in (("model", name, MODELS), ("size", size, SIZES)):
        if each not in known:
            raise UnknownNameError(f"no {noun} named {each!r}; known: {', '.join(known)}")


def build(name: str, size: str, *, on_meta: bool = False) -> nn.Module:
    """Builds a model with random weights, drawn from torch's global generator.

    Args:
        name: One of `MODELS`.
        size: One of `SIZES`.
        on_meta: Without memory for its weights.

    Returns:
        The model, in training mode; called with a batch it returns something with a ``loss``.

    Raises:
        UnknownNameError: No such model or size.
        ConfigError: ``10B`` otherwise than on meta: 50 GB and a step of many minutes.
    """
    check(name, size)
    if size == "10B" and not on_meta:
        raise ConfigError.of("tiny, base or large", size, "10B is costed, not run: benchmarks/strategy_models.py")
    with torch.device("meta" if on_meta else "cpu"):
        if name == "resnet":
            block, stages, width, _, _ = RESNETS[size]
            return ResNet(block, stages, TINY_CLASSES if size == "tiny" else CLASSES, width_per_group=width).train()
        import transformers

        transformers.logging.set_verbosity_error()
        return _BUILDERS[name](FORMS[name][size]).train()


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW; SGD with momentum for ResNets."""
    if name == "resnet":
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=MOMENTUM)
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=DECAY)


def batches(
    name: str, size: str, data: Path | None = None, *, batch_size: int | None = None, seed: int = 0
) -> Iterator[Batch]:
    """Batches for a model, for ever.

    Args:
        name: Of it.
        size: Of it.
        data: WikiText for gpt2, bloom and roberta, SQuAD for bert, an ImageFolder for vit and resnet; None: made up.
        batch_size: Another than the size's own.
        seed: Of what is drawn.

    Returns:
        What the model is called with.

    Raises:
        DataError: The data are not what they should be.
    """
    check(name, size)
    if name == "resnet":
        _, _, _, pixels, batch = RESNETS[size]
        classes = TINY_CLASSES if size == "tiny" else CLASSES
        return image_batches(data, batch_size or batch, pixels, classes, seed, "images")
    form = FORMS[name][size]
    batch = batch_size or form.batch
    if name == "vit":
        classes = TINY_CLASSES if form.vocabulary < 64 else CLASSES
        return image_batches(data, batch, form.vocabulary, classes, seed, "pixel_values")
    if name == "bert":
        return question_batches(data, batch, form.length, form.vocabulary, seed)
    tokens = text_tokens(data, form.vocabulary, seed)
    if name == "roberta":
        return masked_batches(tokens, batch, form.length, form.vocabulary, seed)
    return causal_batches(tokens, batch, form.length, seed)


@dataclass(frozen=True)
class Cost:
    """What a model's snapshot takes."""

    num_parameters: int
    state_bytes: int
    """Parameters, buffers that are saved, moments."""
    copy_seconds: float
    flush_seconds: float


def cost(name: str, size: str, copy_rate: float, disk_rate: float) -> Cost:
    """Costs a model without making it.

    Args:
        name: Of it.
        size: Of it.
        copy_rate: Bytes a second into warm memory.
        disk_rate: Bytes a second to durable storage.

    Returns:
        Its cost.
    """
    model = build(name, size, on_meta=True)
    parameters = list(model.parameters())
    saved = model.state_dict()
    num_bytes = sum(_bytes(tensor) for tensor in parameters)
    num_bytes += sum(_bytes(buffer) for key, buffer in model.named_buffers() if key in saved)
    moments = 1 if name == "resnet" else 2
    num_bytes += sum(_bytes(parameter) * moments for parameter in parameters)
    if name != "resnet":
        num_bytes += 4 * len(parameters)  # Adam counts its steps at each parameter
    return Cost(
        sum(parameter.numel() for parameter in parameters), num_bytes, num_bytes / copy_rate, num_bytes / disk_rate
    )


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def main() -> None:
    """Command line: what the models of a size cost."""
    parser = argparse.ArgumentParser(description="What a snapshot of each model takes; see the top of the file.")
    parser.add_argument("--size", choices=SIZES, default="10B")
    parser.add_argument("--model", choices=MODELS, action="append", dest="models", help="may be repeated (all six)")
    parser.add_argument("--copy-rate", type=float, default=10.0, metavar="GB/s", help="into warm memory (10)")
    parser.add_argument("--disk-rate", type=float, default=1.0, metavar="GB/s", help="to durable storage (1)")
    given = parser.parse_args()
    print("| model | parameters | state | copy | flush |\n|---|---|---|---|---|")
    for name in given.models or MODELS:
        costs = cost(name, given.size, given.copy_rate * 1e9, given.disk_rate * 1e9)
        print(
            f"| {name} | {costs.num_parameters / 1e6:,.1f} M | {costs.state_bytes / 1e9:.2f} GB | "
            f"{costs.copy_seconds:.2f} s | {costs.flush_seconds:.1f} s |"
        )


if __name__ == "__main__":
    main()
