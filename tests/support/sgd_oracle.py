"""The outer step beside ``torch.optim.SGD(nesterov=True)``; importable in a child process with another torch kernel."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from syncer.merge.nesterov import nesterov_step


def compare_with_sgd(coefficients: Iterable[tuple[float, float]], *, steps: int = 20, numel: int = 1003) -> None:
    """Assert equal bits after every one of ``steps`` random steps, for each (learning rate, momentum)."""
    for lr, mu in coefficients:
        rng = torch.Generator().manual_seed(7)
        parameter = torch.nn.Parameter(torch.randn(numel, generator=rng))
        params, momentum = parameter.detach().clone(), torch.zeros(numel)
        sgd = torch.optim.SGD([parameter], lr=lr, momentum=mu, nesterov=mu > 0)
        for step in range(steps):
            parameter.grad = torch.randn(numel, generator=rng)
            nesterov_step(params, momentum, parameter.grad, lr, mu)
            sgd.step()
            assert torch.equal(params, parameter.detach()), f"lr {lr}, mu {mu}: other bits at step {step}"
