"""Parameters against anchors: the only place that writes to a model parameter.

Decides how a delta is computed and how a global fragment enters the parameters. It must not know versions, rounds or
sockets. A fragment travels as its tensors one behind the other, each in logical (row-major) order, whatever its
strides; arithmetic is f32, whatever the parameter's dtype.

Plain parameters in the CPU's memory are read in one trip (``snapshot``); others whole tensor by whole tensor.

Everything is validated before the first parameter is touched: a bad fragment is never half-applied.

Of a sharded parameter (``shards``) whole values are read, by all its ranks together and one tensor after the other, and
each rank writes its own shard: whole values of one fragment exist at a time, and only in passing.

Source: v4 §Deltas and staleness (``delta``: under staleness it still is only the progress since that anchor),
v4 §Anchors (blending: ``adopt``),
v4 §Final cut (overwritten without blending, rounded to the parameter's dtype: ``install``); rulings §3.1 to §3.3, §5.2,
§5.3, §5.7, §5.10.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from yeto_torch.learner.effects import Write
from yeto_torch.learner.shards import is_sharded, own, own_part, whole
from yeto_torch.learner.snapshot import Snapshots
from yeto_torch.wire.buffers import Buffer, Spare
from yeto_torch.wire.codec import as_tensor, check_bounded, is_bounded
from yeto_torch.wire.constants import WireDType
from yeto_torch.wire.errors import NonFiniteError
from yeto_torch.wire.model_layout import Layout

_SPARE_ANSWERS = 2  # answers whose memory waits to be used again: as many as are on their way at once
Beside = Callable[[Tensor], Sequence[Tensor]]


class Exchange:
    """The parameters of one model, by fragment.

    Args:
        layout: names, for error messages, and order.
        parameters: those of each fragment in wire order (``fragments.bind``); any float dtype, device and strides.
        bulk: the dtype broadcasts travel in, f32 or bf16.
        merge_alpha: weight of the local value when a broadcast is blended in.
        beside: the points that are kept beside a parameter, of its shape; they make each of its moves with it.
        written: called behind every write.

    Attributes:
        parameters: as given.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: Sequence[Sequence[Tensor]],
        bulk: WireDType,
        merge_alpha: float,
        beside: Beside = lambda _: (),
        written: Callable[[], None] = lambda: None,
    ) -> None:
        self._layout, self.parameters, self._bulk, self._merge_alpha = layout, parameters, bulk, merge_alpha
        self._beside, self._written = beside, written
        self._numels = layout.wire.numels
        self._snapshots, self._spare = Snapshots(), Spare(_SPARE_ANSWERS)

    def values(self, fragment: int, dtype: WireDType = WireDType.F32) -> Tensor:
        """A copy of the parameters of ``fragment``: [numel] on the CPU; f32, or bf16 if it can be had in ``dtype``.

        Raises NonFiniteError naming the first tensor that is not finite, or beyond 2^100.
        """
        flat = self._in_one_trip(fragment, None, dtype)
        if flat is not None:
            return flat
        flat = torch.empty(self._numels[fragment], dtype=torch.float32)
        for parameter, part in self._parts(fragment, flat):
            part.copy_(whole(parameter))
        self._check(fragment, flat, "a starting value")
        return flat

    def delta(self, fragment: int, anchor: Buffer, dtype: WireDType = WireDType.F32) -> Tensor:
        """Local minus anchor: a [numel] tensor of its own, on the parameters' device if they share one.

        Under staleness it still is only the progress since that anchor.

        Args:
            fragment, anchor: which, and its last broadcast.
            dtype: in which it is going to travel. It is f32 all the same, but for bf16 where rounding costs no trip of
                its own.

        Raises NonFiniteError naming the first tensor that is not finite, or beyond 2^100.
        """
        return self.distance(fragment, self._view(fragment, anchor, self._bulk), dtype)

    def distance(self, fragment: int, base: Tensor, dtype: WireDType = WireDType.F32) -> Tensor:
        """As ``delta``, from an anchor that is a [numel] f32 or bf16 tensor on any device."""
        flat = self._in_one_trip(fragment, base, dtype)
        if flat is not None:
            return flat
        flat = torch.empty(self._numels[fragment], dtype=torch.float32, device=self.device(fragment))
        base = base.to(flat.device)
        for (parameter, part), (_, global_part) in zip(
            self._parts(fragment, flat), self._parts(fragment, base), strict=True
        ):
            local = whole(parameter)
            if local.dtype is base.dtype is torch.float32 and local.device == part.device:
                torch.sub(local, global_part, out=part)  # one pass over memory
            else:
                part.copy_(local).sub_(global_part)  # bf16 is widened on the way: exact
        self._check(fragment, flat, "a value, or its distance from the last broadcast,")
        return flat

    def adopt(self, fragment: int, data: Buffer, write: Write) -> None:
        """Bring a broadcast into the parameters. Raises PeerError, touching nothing, when it is not finite."""
        source = self._view(fragment, data, self._bulk)
        check_bounded(source)
        if write is not Write.KEEP:
            self.write(fragment, source, self._merge_alpha if write is Write.BLEND else 0.0)

    def install(self, fragments: Sequence[Buffer]) -> None:
        """Overwrite all parameters with the f32 cut. Raises PeerError, touching nothing, when it is not finite."""
        sources = [self._view(fragment, data, WireDType.F32) for fragment, data in enumerate(fragments)]
        for source in sources:
            check_bounded(source)
        for fragment, source in enumerate(sources):
            self.write(fragment, source, 0.0)

    def nonfinite(self, fragment: int) -> list[Tensor]:
        """The parameters of ``fragment`` that are not finite, or beyond 2^100; of shards, those of this rank."""
        return [p for p in self.parameters[fragment] if not is_bounded(own(p).float().flatten())]

    def gather(self, fragment: int) -> None:
        """Give this rank's shards to the rank that reads the whole values of ``fragment``."""
        for parameter in self.parameters[fragment]:
            if is_sharded(parameter):
                whole(parameter)

    @torch.no_grad()
    def write(self, fragment: int, source: Tensor, alpha: float) -> None:
        """``alpha * local + (1 - alpha) * source`` into the parameters, unchecked; ``source``: [numel] f32 or bf16."""
        source = source.to(self.device(fragment))  # one upload for the whole fragment
        for parameter, part in self._parts(fragment, source):
            local, part = own(parameter), own_part(parameter, part)
            points = [own(point) for point in self._beside(parameter)]
            before = local.clone() if points else local
            if alpha == 0.0:
                local.copy_(part)
            elif local.dtype in (torch.float32, torch.float64):
                local.mul_(alpha).add_(part.to(local.device), alpha=1.0 - alpha)
            else:
                blended = local.float().mul_(alpha).add_(part.to(local.device), alpha=1.0 - alpha)
                local.copy_(blended)
            for point in points:  # where the parameter was not finite, the point starts anew beside it
                point.copy_(torch.where(before.isfinite(), point + (local - before), local))
        self._written()

    def device(self, fragment: int) -> torch.device:
        """Where the parameters of ``fragment`` are; the CPU if they are in several places."""
        devices = {parameter.device for parameter in self.parameters[fragment]}
        return devices.pop() if len(devices) == 1 else torch.device("cpu")

    def _in_one_trip(self, fragment: int, base: Tensor | None, dtype: WireDType) -> Tensor | None:
        """What ``values`` and ``distance`` return; None where they must go another way, or have something to raise.

        Only plain parameters in the CPU's memory go this way: shards are gathered, and a GPU has its own.
        """
        parameters = self.parameters[fragment]
        if any(is_sharded(p) or p.device.type != "cpu" for p in parameters):
            return None
        out = self._room(self._numels[fragment], torch.bfloat16 if dtype is WireDType.BF16 else torch.float32)
        locals_ = (parameter.detach().reshape(-1) for parameter in parameters)  # one at a time: a strided one is copied
        return out if self._snapshots.take(locals_, None if base is None else base.cpu(), out) else None

    def _room(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised [numel]; its memory is lent again when nobody refers to it any more."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._spare.allocate(numel * dtype.itemsize), dtype=dtype)

    def _parts(self, fragment: int, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Each parameter with its window of ``flat``, in the parameter's shape."""
        at = 0
        for parameter in self.parameters[fragment]:
            yield parameter, flat[at : at + parameter.numel()].view(parameter.shape)
            at += parameter.numel()

    def _view(self, fragment: int, data: Buffer, dtype: WireDType) -> Tensor:
        return as_tensor(data, self._numels[fragment], dtype)

    def _check(self, fragment: int, flat: Tensor, what: str) -> None:
        if is_bounded(flat):
            return
        tensors = self._layout.fragments[fragment].tensors
        parts = torch.split(flat, [tensor.numel for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            if not is_bounded(part):
                bad = "above 2^100" if bool(part.isfinite().all()) else "not finite"
                raise NonFiniteError(f"parameter {tensor.name!r}: {what} is {bad}; nothing of it was sent")
