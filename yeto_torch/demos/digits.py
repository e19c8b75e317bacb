"""1,797 real images of handwritten digits, 8 x 8 pixels, and a small convolutional network for them.

The images ship with scikit-learn. 1,000 are trained on and 797 held out, the
same ones for every seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torchvision.transforms import v2

Split = Literal["even", "classes"]
HELD_OUT = 797  # 1,000 are left to train on
VIEWS = 4  # augmented copies of each training image
WIDTH = 16


class Digits:
    """The digits task.

    Args:
        seed: of the initial weights, the augmentation and the order of samples.
        split: ``even`` deals the training images out in turn; ``classes`` deals out the digits in order: of two
            learners, one has 0 to 4 and the other 5 to 9.
        learners: how many parts there are; at most 10 for ``classes``.
    """

    title = "handwritten digits"
    batch = 32
    steps = 600
    fragments = 4
    lr = 2e-3

    def __init__(self, seed: int, split: Split = "even", learners: int = 1) -> None:
        self._seed, self._split, self._learners = seed, split, learners
        digits = load_digits()
        images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)  # (1797, 1, 8, 8), 0 to 1
        labels = torch.tensor(digits.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        self._held_out = images[order[:HELD_OUT]], labels[order[:HELD_OUT]]
        self._train = images[order[HELD_OUT:]], labels[order[HELD_OUT:]]

    def model(self) -> nn.Module:
        """Three convolutions with group norm, 15,000 parameters; no buffers: parameters are all there is to share."""
        torch.manual_seed(self._seed)
        return nn.Sequential(
            *_block(1, WIDTH),
            *_block(WIDTH, 2 * WIDTH),
            nn.MaxPool2d(2),
            *_block(2 * WIDTH, 2 * WIDTH),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * WIDTH * 4, 10),
        )

    def batches(self, learner: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        images, labels = self._train
        mine = self._part(learner, labels)
        images, labels = images[mine], labels[mine]
        stream = 0 if learner is None else 1 + learner
        torch.manual_seed(1000 * self._seed + stream)  # torchvision draws from the global generator
        augment = v2.RandomAffine(degrees=10, translate=(0.1, 0.1), scale=(0.9, 1.1))
        views = torch.stack([torch.stack([augment(image) for image in images]) for _ in range(VIEWS)])
        generator = torch.Generator().manual_seed(1000 * self._seed + stream)

        def draw() -> Iterator[tuple[Tensor, Tensor]]:
            while True:
                which = torch.randint(len(labels), (self.batch,), generator=generator)
                view = torch.randint(VIEWS, (self.batch,), generator=generator)
                yield views[view, which], labels[which]

        return draw()  # the augmentation above is done by now, not at the first step

    def held_out(self) -> tuple[Tensor, Tensor]:
        return self._held_out

    def _part(self, learner: int | None, labels: Tensor) -> Tensor:
        """Which training images are ``learner``'s, as a mask."""
        if learner is None:
            return torch.ones_like(labels, dtype=torch.bool)
        if self._split == "classes":
            return labels * self._learners // 10 == learner
        return torch.arange(len(labels)) % self._learners == learner


def _block(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.ReLU()
