"""Text as characters, and a small transformer that predicts the next one: of the demonstration and the experiments.

It must not know where a text comes from or how it is trained on.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
CONTEXT, HEADS = 64, 4


def indices(text: str) -> Tensor:
    """``text`` as indices into ALPHABET; other characters are dropped."""
    index = {character: number for number, character in enumerate(ALPHABET)}
    return torch.tensor([index[character] for character in text if character in index])


def windows(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """(n, CONTEXT) inputs and the characters one further, (n, CONTEXT)."""
    at = starts.unsqueeze(1) + torch.arange(CONTEXT)
    return text[at], text[at + 1]


class Block(nn.Module):
    """Causal self-attention and a perceptron, each behind a layer norm and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.project(attended)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Transformer(nn.Module):
    """A GPT without dropout, output and character embedding tied; ``width`` is a multiple of ``HEADS``."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), width)
        self.position_embed = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, len(ALPHABET), bias=False)
        for embedding in (self.embed, self.position_embed):
            nn.init.normal_(embedding.weight, std=0.02)
        self.lm_head.weight = self.embed.weight

    def forward(self, text: Tensor) -> Tensor:
        """(n, length) character indices -> (n, length, alphabet) logits."""
        x = self.embed(text) + self.position_embed(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits
