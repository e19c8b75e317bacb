"""On a GPU: merge and outer step against the CPU, what crosses the bus per round, and what an answer costs training.

Transfers are counted, not timed: one upload per answer and one download per commit are the fewest there can be, since
answers come and broadcasts go through the host's sockets. The last figure compares the difference to the anchor, made
on the training stream, with the least that must happen there: a copy of the parameters, made on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness import Figure, Size, Target, alternate, both, not_measured, ratios, seconds
from benchmarks.merge import Round
from benchmarks.model import Matrices, millions
from benchmarks.stage import Launch, launch
from syncer.merge.intake import decode_gradient
from syncer.merge.merge import merge_fragment
from syncer.state import GlobalState
from yeto_torch.fragments import bind, build_layout
from yeto_torch.learner.exchange import Exchange
from yeto_torch.wire.codec import encode
from yeto_torch.wire.constants import MergeMode, WireDType
from yeto_torch.wire.layout import WireFragment, WireLayout

MEMBERS = 2


def measure(size: Size, _start: Launch = launch) -> Iterator[Figure]:
    if not torch.cuda.is_available():
        yield not_measured("merge, outer step, transfers and answers on a GPU", "the CPU", "no CUDA here")
        return
    numel = size.of(25_000_000, 4_000_000, 48_000)
    yield _merge(size, numel)
    yield from _transfers(numel)
    yield _answer(size, numel)


def _merge(size: Size, numel: int) -> Figure:
    rounds = [Round(numel, MEMBERS, device) for device in ("cuda", "cpu")]
    ours, theirs = alternate(size.runs, *(seconds(_synced(lambda r=r: r.step("rda", False))) for r in rounds))
    name = f"merge + outer step, rda, K = {MEMBERS}, {millions(numel)}, on the GPU"
    return Figure(name, "the CPU, one thread", "x", None, ratios(ours, theirs), both(ours, theirs))


def _transfers(numel: int) -> Iterator[Figure]:
    """Copies over the bus of at least a fragment's bytes in one round, per answer and per commit."""
    fragment = WireFragment(MergeMode.RDA, (numel,))
    device = torch.device("cuda", torch.cuda.current_device())
    state = GlobalState(WireLayout((fragment,)), device)
    state.initialize(0, torch.zeros(numel))
    answers = [bytes(encode(torch.full((numel,), 1e-3), WireDType.F32)) for _ in range(MEMBERS)]

    def one_round() -> None:
        gradients = [decode_gradient(answer, numel, WireDType.F32, device) for answer in answers]
        merged = merge_fragment(fragment, gradients, [1.0] * MEMBERS, state.momentum(0), correction=True)[0]
        state.commit(state.step + 1, 0, merged, 0.7, 0.5)
        state.broadcast_bytes(0, WireDType.F32)

    with Crossings() as crossings:
        one_round()
    whole = [(source, target) for source, target, nbytes in crossings.seen if nbytes >= numel]  # less is a reduction's
    for way, per, what in (
        (("cpu", "cuda"), MEMBERS, "uploads per answer"),
        (("cuda", "cpu"), 1, "downloads per commit"),
    ):
        count = whole.count(way)
        yield Figure(f"{what}, {millions(numel)}", "one", "x", Target(1, 1), (count / per,), f"{count} in a round")


class Crossings(TorchDispatchMode):
    """While inside, notes every copy between devices as (from, to, bytes)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = args[0] if func is torch.ops.aten._to_copy.default else args[1]
            if source.device.type != out.device.type:
                self.seen.append((source.device.type, out.device.type, source.nbytes))
        return out


def _answer(size: Size, numel: int) -> Figure:
    model = Matrices(numel).cuda()
    layout = build_layout([(name, tuple(p.shape)) for name, p in model.named_parameters()], fragments=1)
    parameters = bind(layout, dict(model.named_parameters()))
    exchange = Exchange(layout, parameters, WireDType.BF16, 0.0)
    anchor = encode(exchange.values(0), WireDType.BF16)
    side = torch.cuda.Stream()

    @torch.no_grad()
    def clone() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for parameter in parameters[0]:
                parameter.clone()
        torch.cuda.current_stream().wait_stream(side)

    ours, theirs = alternate(size.runs, seconds(_synced(lambda: exchange.delta(0, anchor))), seconds(_synced(clone)))
    name = f"an answer's difference to the anchor, {millions(numel)}, on the GPU"
    return Figure(name, "a clone on a side stream", "x", None, ratios(ours, theirs), both(ours, theirs))


def _synced(work: Callable[[], object]) -> Callable[[], None]:
    """``work`` until the GPU has done it."""

    def whole() -> None:
        work()
        torch.cuda.synchronize()

    return whole
