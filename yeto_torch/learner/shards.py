"""How a parameter lies on this rank: all of it, or a shard of a DTensor (FSDP2, tensor parallelism, HSDP).

Decides which part of a whole tensor is this rank's, and which parameters can be exchanged at all. It must not know
fragments, the fleet or who asks. A plain parameter is its own whole; nothing here then costs more than a look.

``whole`` is a collective of the parameter's mesh: every rank calls it, for the same parameters in the same order.

Source: torch.distributed.tensor; a dimension is cut as ``torch.chunk`` cuts it, mesh dimension by mesh dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

_SAY_GROUP = (
    "the ranks of one learner must be named: "
    "YetoOuterOptimizer(optimizer, model.named_parameters(), process_group=dist.group.WORLD)"
)
_FSDP1 = (
    "the model is wrapped in FullyShardedDataParallel, whose flattened parameters have no shape of their own; "
    "use FSDP2 (torch.distributed.fsdp.fully_shard) or DistributedDataParallel"
)
_DDP_PREFIX = "module."


def is_sharded(parameter: Tensor) -> TypeGuard[DTensor]:
    """Is it a DTensor? (Known by what it has: importing its class would cost every user a second.)"""
    return hasattr(parameter, "device_mesh") and hasattr(parameter, "placements")


def whole(parameter: Tensor) -> Tensor:
    """All values of ``parameter``, detached: a plain one itself, a DTensor gathered from its mesh (collective)."""
    value = parameter.detach()
    return value.full_tensor() if is_sharded(value) else value


def own(parameter: Tensor) -> Tensor:
    """The values of ``parameter`` that this rank holds, detached; to write into them is to write into the parameter."""
    value = parameter.detach()
    return value.to_local() if is_sharded(value) else value


def own_part(parameter: Tensor, full: Tensor) -> Tensor:
    """The part of ``full`` (of the parameter's whole shape) that ``own(parameter)`` stands for; a view."""
    if not is_sharded(parameter):
        return full
    from torch.distributed.tensor import Shard

    mesh = parameter.device_mesh
    for size, place, placement in zip(mesh.shape, mesh.get_coordinate() or (), parameter.placements, strict=True):
        if isinstance(placement, Shard):
            pieces = full.chunk(size, placement.dim)
            full = pieces[place] if place < len(pieces) else full.narrow(placement.dim, 0, 0)
    return full


def resharding(named_parameters: object) -> Callable[[], None]:
    """What to call where shards were written: FSDP2 may still hold the whole values of an earlier forward pass.

    It drops them, for all modules of ``named_parameters``, if that is a module.
    """
    modules = named_parameters.modules() if isinstance(named_parameters, nn.Module) else ()
    sharding = [module for module in modules if hasattr(module, "reshard") and hasattr(module, "unshard")]

    def reshard() -> None:
        for module in sharding:
            cast("FSDPModule", module).reshard()

    return reshard


def check_wrapping(named_parameters: object, names: Iterable[str], group: object) -> None:
    """Refuse a model whose wrapper and ``process_group`` do not fit; ``names`` have the wrappers' segments.

    Raises ValueError: FSDP1; a DDP model of several ranks without a group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    names = list(names)
    modules = list(named_parameters.modules()) if isinstance(named_parameters, nn.Module) else []
    if any(type(m).__name__ == "FullyShardedDataParallel" for m in modules) or any(
        part in ("_fsdp_wrapped_module", "_flat_param") for name in names for part in name.split(".")
    ):
        raise ValueError(f"named_parameters: {_FSDP1}")
    is_ddp = bool(names) and all(name.startswith(_DDP_PREFIX) for name in names)
    is_ddp = is_ddp or any(isinstance(module, nn.parallel.DistributedDataParallel) for module in modules)
    if group is None and is_ddp and dist.get_world_size() > 1:
        raise ValueError(f"process_group: not given, but the model is wrapped in DistributedDataParallel; {_SAY_GROUP}")


def check_shards(parameters: Mapping[str, Tensor], ranks: Sequence[int] | None) -> None:
    """Refuse a DTensor that cannot be exchanged.

    ``ranks`` of the learner are numbers of the world; None without a process group. Raises ValueError naming the
    parameter: no group; a mesh of other ranks; a placement that is neither Shard nor Replicate.
    """
    for name, parameter in parameters.items():
        if is_sharded(parameter):
            _check_shard(name, parameter, ranks)


def _check_shard(name: str, parameter: DTensor, ranks: Sequence[int] | None) -> None:
    if ranks is None:
        raise ValueError(f"process_group: not given, but parameter {name!r} is a DTensor; {_SAY_GROUP}")
    holders = sorted(parameter.device_mesh.mesh.flatten().tolist())
    if holders != sorted(ranks):
        raise ValueError(
            f"parameter {name!r} lies on ranks {holders}, process_group holds ranks {sorted(ranks)}: they must be the "
            "same (all ranks of one learner hold the whole model together)"
        )
    strange = next((p for p in parameter.placements if type(p).__name__ not in ("Shard", "Replicate")), None)
    with torch.no_grad():
        fits = (
            strange is None
            and own_part(parameter, torch.empty(parameter.shape, device="meta")).shape == own(parameter).shape
        )
    if not fits:
        raise ValueError(
            f"parameter {name!r} has placements {tuple(parameter.placements)}: only Shard and Replicate are "
            "supported, each mesh dimension cutting what the one before it left"
        )
