"""The global state: parameters, momentum and versions per fragment. The only writer of either tensor.

Decides where the tensors live and when bytes of them may be shared. Knows nothing of rounds or learners; the actor
calls it, from one thread. A commit is whole or did not happen.

On the CPU the tensors handed in are the tensors used, without a copy: whoever initialises or restores a fragment
gives its tensors away. On a GPU they are uploaded once.

Source: v4 §Outer step, v4 §Scheduler (no two completions change one fragment at once), v4 §Final cut (always f32).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from syncer.merge.nesterov import Bounds, nesterov_step
from yeto_torch.wire import codec
from yeto_torch.wire.constants import WireDType
from yeto_torch.wire.errors import LocalError, RunError
from yeto_torch.wire.layout import WireLayout


@dataclass(slots=True)
class _Fragment:
    version: int
    params: Tensor
    momentum: Tensor
    bounds: Bounds = field(default_factory=Bounds)
    payload: tuple[WireDType, memoryview] | None = None  # bytes of this very version, shared by all groups
    wanted: WireDType | None = None  # what the last version was broadcast in


class GlobalState:
    """What the fleet has agreed on so far.

    Attributes:
        layout: the session's numeric layout.
        device: where parameters and momentum live and merges run.
        step: outer steps committed; whoever restores fragments sets it to the checkpoint's.
    """

    def __init__(self, layout: WireLayout, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self.step = 0
        self._fragments: list[_Fragment | None] = [None] * len(layout)
        self._final = False

    @property
    def versions(self) -> tuple[int, ...]:
        """Per fragment the step that last changed it; 0 where none has."""
        return tuple(0 if fragment is None else fragment.version for fragment in self._fragments)

    def initialized(self, fragment: int) -> bool:
        """Whether the fragment has parameters."""
        return self._fragments[fragment] is not None

    def initialize(self, fragment: int, values: Tensor) -> None:
        """Install first parameters: version 0, momentum 0.

        Args:
            values: [numel] f32 on the CPU, finite; owned by the state from now on.

        Raises:
            LocalError: the fragment has parameters already, or the tensor does not fit.
        """
        if self.initialized(fragment):
            raise LocalError(f"fragment {fragment} is initialised already")
        params = self._own(fragment, values)
        momentum = codec.empty(params.numel()).zero_().to(self.device)
        self._fragments[fragment] = _Fragment(0, params, momentum)

    def restore(self, fragment: int, version: int, params: Tensor, momentum: Tensor) -> None:
        """Install a checkpoint's fragment. Both [numel] f32 on the CPU, writable, owned by the state from now on.

        Raises:
            LocalError: a tensor does not fit.
        """
        self._fragments[fragment] = _Fragment(version, self._own(fragment, params), self._own(fragment, momentum))

    def params(self, fragment: int) -> Tensor:
        """[numel] f32 on ``device``: the live tensor, to be read only. The next commit changes it."""
        return self._get(fragment).params

    def momentum(self, fragment: int) -> Tensor:
        """[numel] f32 on ``device``: the live tensor, to be read only. The next commit changes it."""
        return self._get(fragment).momentum

    def commit(
        self,
        step: int,
        fragment: int,
        gradient: Tensor,
        lr: float,
        momentum_coefficient: float,
        norm: float | None = None,
    ) -> None:
        """Apply the outer step of round ``step`` to its fragment and move on to that step and version.

        Args:
            gradient: [numel] f32 on ``device``, the merged signed outer gradient.
            norm: its l2 norm, if known.

        Raises:
            RunError: the gradient, or the state after it, would not be finite. Nothing has changed then.
            LocalError: not the next step, or not the fragment of that step, or the final bytes are out already.
        """
        if self._final:
            raise LocalError(f"commit of step {step} after the final bytes were handed out")
        if step != self.step + 1 or fragment != (step - 1) % len(self.layout):
            raise LocalError(f"commit of step {step} on fragment {fragment} after step {self.step}")
        target = self._get(fragment)
        try:
            momentum, scratch = target.momentum, self._scratch(target)
            nesterov_step(target.params, momentum, gradient, lr, momentum_coefficient, target.bounds, norm, scratch)
        except RunError as error:
            raise RunError(f"step {step}, fragment {fragment}: {error}") from error
        target.payload = None
        if scratch is not None and target.wanted is not None:
            target.payload = (target.wanted, codec.encode(scratch, target.wanted).toreadonly())
        target.version = self.step = step

    def broadcast_bytes(self, fragment: int, dtype: WireDType) -> memoryview:
        """The fragment's current parameters in ``dtype.bulk``: read-only, never changed by a later commit.

        Encoded once per version; every group is sent the same bytes. One payload per fragment is kept, because a
        learner that joins is sent all of them. The next version's is made with its commit, while the parameters are
        at hand.
        """
        source, bulk = self._get(fragment), dtype.bulk
        source.wanted = bulk
        if source.payload is None or source.payload[0] is not bulk:
            source.payload = (bulk, self._encode(source.params, bulk).toreadonly())
        return source.payload[1]

    def final_bytes(self, fragment: int) -> memoryview:
        """The fragment's final parameters in f32, read-only. On the CPU a view of the live tensor.

        The state is final from this call on: a later commit raises LocalError.
        """
        self._final = True
        if self.device.type != "cpu":
            return self.broadcast_bytes(fragment, WireDType.F32)  # downloaded once, in the broadcast's place
        return codec.encode(self._get(fragment).params, WireDType.F32).toreadonly()

    def host(self, fragment: int) -> tuple[Tensor, Tensor]:
        """(parameters, momentum) as contiguous f32 CPU tensors, for a checkpoint.

        On the CPU these are the live tensors, not copies: use them up before the next commit. From a GPU they are
        downloaded.
        """
        source = self._get(fragment)
        return source.params.cpu(), source.momentum.cpu()

    def _scratch(self, fragment: _Fragment) -> Tensor | None:
        """For the next version's broadcast, if its dtype is known and it costs no download."""
        if fragment.wanted is None or self.device.type != "cpu":
            return None
        return codec.empty(fragment.params.numel(), codec.TORCH_DTYPE[fragment.wanted])

    def _encode(self, params: Tensor, dtype: WireDType) -> memoryview:
        if dtype is WireDType.F32 and params.device.type == "cpu":
            params = codec.empty(params.numel()).copy_(params)  # encode would lend out the live tensor
        return codec.encode(params, dtype)

    def _get(self, fragment: int) -> _Fragment:
        found = self._fragments[fragment]
        if found is None:
            raise LocalError(f"fragment {fragment} has no parameters yet")
        return found

    def _own(self, fragment: int, values: Tensor) -> Tensor:
        numel = self.layout.numels[fragment]
        if values.dtype is not torch.float32 or values.shape != (numel,):
            raise LocalError(f"fragment {fragment}: {values.dtype} of {tuple(values.shape)}, expected {numel} f32")
        return values.detach().contiguous().to(self.device)


def resolve_device(name: str) -> torch.device:
    """The device ``merge.device`` names: ``auto`` (CUDA where present), ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        ValueError: another word, or a GPU this machine does not have.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        name = "cuda" if gpus else "cpu"
    kind, colon, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (colon and (kind == "cpu" or not index.isdecimal())):
        raise ValueError(f"merge.device={name!r}: expected auto, cpu, cuda or cuda:N")
    if kind == "cuda" and int(index or 0) >= gpus:
        raise ValueError(f"merge.device={name!r}: this machine has {gpus} usable CUDA devices")
    return torch.device(kind, int(index or 0)) if kind == "cuda" else torch.device("cpu")
