"""The Python standard library's own source text, and a small character transformer for it. Nothing is downloaded."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from yeto_torch.demos.task import LEARNERS

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
CONTEXT = 64
WIDTH, HEADS, LAYERS = 96, 4, 2
HELD_OUT_EVERY = 10  # of the modules
HELD_OUT_WINDOWS = 256


class Text:
    """The text task: predict the next character. The modules are dealt out to the learners in order of their names."""

    title = "characters of the Python standard library"
    batch = 16
    steps = 720
    fragments = 6
    lr = 2e-3

    def __init__(self, seed: int, learners: int = LEARNERS) -> None:
        self._seed = seed
        modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        if not modules:
            raise RuntimeError("this Python keeps no source text of its standard library")
        training = [module for number, module in enumerate(modules) if number % HELD_OUT_EVERY]
        self._parts = [_characters(training[learner::learners]) for learner in range(learners)]
        held_out = _characters(modules[::HELD_OUT_EVERY])
        starts = torch.linspace(0, len(held_out) - CONTEXT - 1, HELD_OUT_WINDOWS).long()
        self._held_out = _windows(held_out, starts)

    def model(self) -> nn.Module:
        torch.manual_seed(self._seed)
        return Transformer()

    def batches(self, learner: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        text = torch.cat(self._parts) if learner is None else self._parts[learner]
        stream = 0 if learner is None else 1 + learner
        generator = torch.Generator().manual_seed(1000 * self._seed + stream)
        while True:
            yield _windows(text, torch.randint(len(text) - CONTEXT, (self.batch,), generator=generator))

    def held_out(self) -> tuple[Tensor, Tensor]:
        return self._held_out


def _characters(modules: list[Path]) -> Tensor:
    """All modules' text as indices into ALPHABET, one after the other; other characters are dropped."""
    index = {ord(character): number for number, character in enumerate(ALPHABET)}
    text = "".join(module.read_text(encoding="utf-8", errors="ignore") for module in modules)
    return torch.tensor([index[code] for code in map(ord, text) if code in index])


def _windows(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """(n, CONTEXT) inputs and the characters one further, (n, CONTEXT)."""
    at = starts.unsqueeze(1) + torch.arange(CONTEXT)
    return text[at], text[at + 1]


class Block(nn.Module):
    """Causal self-attention and a perceptron, each behind a layer norm and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, length, WIDTH)
        x = x + self.project(attended)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Transformer(nn.Module):
    """A GPT of 240,000 parameters; the output layer is tied to the character embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), WIDTH)
        self.position_embed = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, len(ALPHABET), bias=False)
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
