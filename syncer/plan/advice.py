"""Which settings to take: the smallest H at which the network, the syncer and the learners are not held up.

What was given stays as it is; what is open is searched: wire dtype and fragments by the H they allow, then H, then the
quorum by the goodput under failures. Each choice comes with a sentence why. It must not know how a forecast is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from syncer.plan.forecast import Forecast, forecast
from syncer.plan.situation import SCHEDULE, Settings, Situation
from yeto_torch.wire.constants import WireDType

# From the default on: less traffic where nothing is known of the loss. Who has the line for it can ask for less.
INTERVALS = (24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
MERGED_SHARE, LINK_USE, SYNCER_USE = 0.9, 0.5, 0.5
LONG_INTERVAL = 64  # above it a smaller wire dtype is worth its noise
_FRAGMENTS = (8, 16, 32)
_WORTH = 0.75  # another choice must bring H down to this share


@dataclass(frozen=True, slots=True)
class Wishes:
    """What was given; None is open."""

    wire_dtype: WireDType | None = None
    fragments: int | None = None
    interval: float | None = None
    quorum: int | None = None
    pipeline: int = SCHEDULE.pipeline


@dataclass(frozen=True, slots=True)
class Advice:
    """Settings, what they come to (failures included), and why each was chosen."""

    settings: Settings
    forecast: Forecast
    reasons: tuple[str, ...]


def plan(situation: Situation, wishes: Wishes, seed: int = 0) -> Advice:
    """The recommended settings and their forecast."""
    everyone = situation.learners
    reasons: list[str] = []
    settings = Settings(
        wishes.wire_dtype or WireDType.BF16,
        wishes.fragments or _FRAGMENTS[0],
        wishes.interval or 0.0,
        wishes.quorum or everyone,
        wishes.pipeline,
    )
    if wishes.interval is None:
        settings = _with_interval(replace(situation, mtbf_s=None), settings, wishes, reasons)
    quorums = (everyone // 2 + 1, everyone) if wishes.quorum is None else (wishes.quorum,)
    return _with_quorum(situation, settings, dict.fromkeys(quorums), reasons, seed)


def shortfalls(found: Forecast) -> list[str]:
    """What holds the fleet up under these settings, in words; empty if nothing does."""
    out = []
    if found.link_use > LINK_USE:
        out.append(f"a learner's link is {found.link_use:.0%} busy")
    if found.syncer_link_use > LINK_USE:
        out.append(f"the syncer's link is {found.syncer_link_use:.0%} busy")
    if found.syncer_use > SYNCER_USE:
        out.append(f"the syncer computes {found.syncer_use:.0%} of the time")
    if found.merged_share < MERGED_SHARE:
        out.append(f"{1 - found.merged_share:.0%} of the local steps are overwritten before they are merged")
    return out


def _with_interval(situation: Situation, settings: Settings, wishes: Wishes, reasons: list[str]) -> Settings:
    def shortest(candidate: Settings) -> Settings:
        return _shortest(candidate, lambda s: not shortfalls(forecast(situation, s)))

    best = shortest(settings)
    if wishes.fragments is None:
        for fragments in _FRAGMENTS[1:]:
            other = shortest(replace(settings, fragments=fragments))
            if other.interval <= _WORTH * best.interval:
                reasons.append(
                    f"fragments={fragments}: smaller messages allow H = {other.interval:g}, not {best.interval:g}"
                )
                best = other
    if wishes.wire_dtype is None and best.interval > LONG_INTERVAL:
        other = shortest(replace(best, wire_dtype=WireDType.Q4))
        if other.interval <= _WORTH * best.interval:
            reasons.append(f"wire_dtype=q4: bf16 would need H = {best.interval:g}, q4 needs {other.interval:g}")
            best = other
    reasons.append(_why(situation, best))
    return best


def _why(situation: Situation, settings: Settings) -> str:
    head = f"sync_interval_steps={settings.interval:g}: "
    below = [h for h in INTERVALS if h < settings.interval]
    if not below:
        return head + "nothing is held up even so; a longer interval would only save bytes"
    found = shortfalls(forecast(situation, replace(settings, interval=float(below[-1]))))
    still = shortfalls(forecast(situation, settings))
    if still:
        return head + "even the longest interval searched is held up: " + ", ".join(still)
    return head + f"at {below[-1]} " + (", ".join(found) or "it is about to be held up")


def _shortest(settings: Settings, holds: Callable[[Settings], bool]) -> Settings:
    """The first interval that holds, by halving: a longer interval asks less of everything."""
    low, high = 0, len(INTERVALS) - 1
    while low < high:
        middle = (low + high) // 2
        if holds(replace(settings, interval=float(INTERVALS[middle]))):
            high = middle
        else:
            low = middle + 1
    return replace(settings, interval=float(INTERVALS[low]))


def _with_quorum(
    situation: Situation, settings: Settings, quorums: Iterable[int], reasons: list[str], seed: int
) -> Advice:
    """The smallest quorum whose goodput is as good as any: who waits for fewer is held up by fewer."""
    found = {q: forecast(situation, replace(settings, quorum=q), seed) for q in quorums}
    best = max(found, key=lambda q: (round(found[q].goodput, 2), -q))
    if len(found) > 1:
        told = " and ".join(f"{f.goodput:.1%} with {q}" for q, f in found.items())
        reasons.append(f"quorum={best}: goodput is {told}; a learner that hangs holds up whoever waits for all")
    return Advice(replace(settings, quorum=best), found[best], tuple(reasons))
