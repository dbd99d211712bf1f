"""A GPT of GPT-2's shape, with random weights: 124 M parameters, or as small as one likes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear

from gpu.machine import Machine


class GPT(nn.Module):
    """Says the next word; the head is the embedding of words, as in GPT-2."""

    def __init__(self, vocabulary: int = 50257, width: int = 768, layers: int = 12, length: int = 1024) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 64, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, words_BT: torch.Tensor) -> torch.Tensor:
        """Returns the mean loss of every next word."""
        length = words_BT.shape[1] - 1
        mask_TT = nn.Transformer.generate_square_subsequent_mask(length, device=words_BT.device)
        state_BTC = self.words(words_BT[:, :-1]) + self.places.weight[:length]
        for block in self.blocks:
            state_BTC = block(state_BTC, src_mask=mask_TT, is_causal=True)
        logits_BTV = linear(self.norm(state_BTC), self.words.weight)
        return cross_entropy(logits_BTV.flatten(0, 1), words_BT[:, 1:].flatten())


def gpt_of(machine: Machine) -> GPT:
    """Returns GPT-2's size on a GPU, and a small one for the stand-in."""
    return (GPT() if machine.is_gpu else GPT(512, 64, 2, 32)).to(machine.device)
