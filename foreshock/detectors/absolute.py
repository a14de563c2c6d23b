"""Rules that need no baseline: a layer's mean beyond a fixed bound, several evaluations in a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from foreshock.detectors.latch import Latches
from foreshock.detectors.state import Stateful
from foreshock.detectors.streams import Stream, group_mean, index_by
from foreshock.detectors.types import Alarm, Interval, Severity
from foreshock.signals import Floats


@dataclass(frozen=True, slots=True)
class AbsoluteRule:
    """`signal` beyond `bound`, `samples` readings in a row, reading every `every`-th evaluation."""

    signal: str
    bound: float
    direction: str
    samples: int
    every: int = 1
    after: int = 0
    """Steps to wait at the start and after an action: the probe's window must be full."""
    settled: bool = False
    """Waits for the start of the baselines too: while the rate rises the signal moves by itself."""
    reach: int = 0
    """Steps by which the fault may lie before the alarm (measured delays)."""


HQV = AbsoluteRule("attention.hqv", -0.10, "down", samples=3, every=2, after=64, settled=True, reach=432)
MISMATCH = AbsoluteRule("attention.mismatch", 0.05, "up", samples=2, reach=8)

Dating = Callable[[str, Sequence[int], str, int], Interval | None]


class AbsoluteDetector(Stateful):
    """One rule on the head mean of every (layer, rank); its alarm confirms.

    The statistic is the mildest of the last readings in the worst layer, in the signal's own unit;
    critical at twice the bound. `first` is the first watched step. The onset is the history's, or where
    that does not reach back far enough the `reach` of the rule.

    >>> from foreshock.signals import SignalKey
    >>> rule = AbsoluteDetector(HQV, [Stream(SignalKey("attention", "hqv", 0, 0), 0, -1)], first=0)
    >>> latches = Latches()
    >>> for step in range(0, 400, 4):
    ...     rule.update(step, np.array([-0.2 if step >= 200 else -0.02]), latches, lambda *_: None)
    >>> [(a.step, a.layers, a.confirms) for a in latches.opened]
    [(220, (0,), True)]
    """

    state = ("recent", "seen", "armed")

    def __init__(self, rule: AbsoluteRule, streams: Sequence[Stream], first: int) -> None:
        self.rule, self.first, self.armed = rule, first, first + rule.after
        self._owner, groups = index_by([(s.layer, s.rank) for s in streams])
        self._places = cast(list[tuple[int, int]], groups)
        self.recent = np.full((len(groups), rule.samples), -np.inf)
        self.seen = np.zeros(len(groups), dtype=np.int64)

    @property
    def name(self) -> str:
        return f"absolute:{self.rule.signal}"

    def restart(self, step: int) -> None:
        """The windows of the probe are being filled again from `step` on."""
        self.recent[:], self.armed = -np.inf, step + self.rule.after

    def update(self, step: int, x: Floats, latches: Latches, dating: Dating) -> None:
        """One step of raw values (n,); `dating` asks the bank for an onset."""
        rule = self.rule
        if np.isnan(x).all():
            return
        mean = group_mean(x, self._owner, len(self.seen))
        known = ~np.isnan(mean)
        self.seen += known
        known &= self.seen % rule.every == 0
        if step < self.armed or not known.any():
            return
        sign = 1.0 if rule.direction == "up" else -1.0
        self.recent[known] = np.column_stack([self.recent[known, 1:], sign * mean[known]])
        mildest, bound = self.recent.min(1), abs(rule.bound)

        def make(severity: Severity) -> Alarm:
            places = [p for p, m in zip(self._places, mildest, strict=True) if m > bound]
            layers = tuple(sorted({layer for layer, _ in places}))
            onset = dating(rule.signal, layers, rule.direction, step - rule.reach)
            return Alarm(
                signal=rule.signal,
                mechanism=rule.signal.split(".")[0],
                step=step,
                direction=rule.direction,
                statistic=float(mildest.max()),
                threshold=bound,
                severity=severity,
                onset=onset or Interval(max(step - rule.reach, self.first), step),
                layers=layers,
                ranks=tuple(sorted({rank for _, rank in places if rank >= 0})),
                confirms=True,
            )

        beyond = np.nextafter(bound, np.inf)  # exactly on the bound is not beyond it
        latches.judge(self.name, float(mildest.max()), float(beyond), make, critical=2 * bound)
