"""Models as the ranks of a learner hold them, their losses, and their whole values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from yeto_torch.fragments import clean_name
from yeto_torch.wire.model_layout import Layout


class Toy(nn.Module):
    """``toy`` with a forward of its own, as wrappers need it."""

    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.embed, self.hidden, self.out = parts["embed"], parts["hidden"], parts["out"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(torch.tanh(self.embed(x)))))


def wrapped(parts: nn.ModuleDict, how: str) -> nn.Module:
    model = Toy(parts)
    if how == "plain":
        return model
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if how == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    size = dist.get_world_size()
    shape = {"fsdp": (size,), "hsdp": (2, size // 2)}[how]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    for layer in (model.embed, model.hidden, model.out):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def loss(model: nn.Module, seed: int, rank: int, step: int, how: str) -> torch.Tensor:
    """Of one batch; the ranks of a plain model see the same one, so that they stay equal."""
    generator = torch.Generator().manual_seed(100_000 * seed + 1000 * (0 if how == "plain" else rank) + step)
    x = torch.randn(8, 6, generator=generator)
    return ((model(x) - x[:, :3].sin()) ** 2).mean()


def whole_values(model: nn.Module, layout: Layout) -> list[np.ndarray]:
    """A copy of the parameters of every fragment: [numel] f32; of a sharded model on every rank together."""
    named: dict[str, Any] = {clean_name(name): p.detach() for name, p in model.named_parameters()}
    whole = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in named.items()}
    return [
        np.concatenate([whole[t.name].float().numpy().ravel() for t in fragment.tensors])
        for fragment in layout.fragments
    ]


def local_values(model: nn.Module) -> list[np.ndarray]:
    """What this rank itself holds."""
    held: list[Any] = [parameter.detach() for parameter in model.parameters()]
    return [(p.to_local() if hasattr(p, "to_local") else p).float().numpy().ravel() for p in held]
