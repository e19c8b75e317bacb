"""An evaluation before a write to the shards of FSDP2, seen by the next one; its argument is the rendezvous file."""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from yeto_torch.config import LearnerOptions
from yeto_torch.fragments import bind, layout_of
from yeto_torch.learner.exchange import Exchange
from yeto_torch.learner.shards import resharding
from yeto_torch.wire.constants import WireDType


def outputs(reshards: bool) -> tuple[float, float]:
    """The largest output before and after all parameters were overwritten with zeros."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    mesh = init_device_mesh("cpu", (1,))
    for part in (model[0], model):
        fully_shard(part, mesh=mesh)
    parameters = dict(model.named_parameters())
    layout = layout_of(parameters, LearnerOptions(fragments=1))
    written = [resharding(model)] if reshards else []
    exchange = Exchange(layout, bind(layout, parameters), WireDType.F32, 0.0, lambda _: (), *written)
    with torch.no_grad():
        before = model(torch.ones(1, 4)).abs().max().item()
        exchange.write(0, torch.zeros(layout.wire.numels[0]), 0.0)
        return before, model(torch.ones(1, 4)).abs().max().item()


if __name__ == "__main__":
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
    for reshards in (True, False):
        print(reshards, *(value > 0 for value in outputs(reshards)))
