"""The source probe's rule: a standard score with a known null needs no baseline, from the first step on."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import cast

import numpy as np

from foreshock.detectors.fusion import halves, stands_out
from foreshock.detectors.history import History
from foreshock.detectors.latch import CRITICAL, Latches
from foreshock.detectors.onset import onset_interval
from foreshock.detectors.shiryaev import LAMBDAS, ShiryaevRobertsBank, accumulate
from foreshock.detectors.state import Stateful
from foreshock.detectors.streams import Stream, group_mean, index_by
from foreshock.detectors.types import Alarm, Interval, Severity
from foreshock.signals import Floats

CLIP, MARGIN, FORGET = 6.0, 0.25, 0.25
FRACTIONS = np.append(LAMBDAS, 2 * LAMBDAS[-1])
SPREAD, NULL_VARIANCE = np.array([1.0, 4.0, 16.0]), 1.25


class SourceDetector(Stateful):
    """Evidence that a kernel's errors have a mean, per (layer, rank), and whether that mean matters.

    Scores t are N(0, 1) for honest rounding of any size (the kernel's output against float64; the bias
    looked for is P2's). Two forms, half the evidence each: signed, e-Shiryaev-Roberts both ways on
    sum(t)/sqrt(heads) clipped at 6; and square, the likelihood ratio of a variance 1.25·(1 + c) against 1.25,
    averaged over heads, for a bias whose sign varies between slices. It alarms only if the bias since the
    evidence left zero (exponential mean, or root mean square less the honest part, in standard deviations of
    delta) reaches `material`; evidence below that is `seen`. `threshold` is h in nats. The alarm confirms.

    >>> from foreshock.signals import SignalKey
    >>> heads = [Stream(SignalKey("attention", "source_t", 0, h), h, -1) for h in range(4)]
    >>> probe, latches = SourceDetector(heads, threshold=12.4), Latches()
    >>> for step in range(0, 40, 4):
    ...     bad = step >= 20
    ...     probe.update(step, np.full(4, 6.0 * bad), np.full(4, 1.6e-3 * bad), latches)
    >>> [(a.step, a.layers, a.direction) for a in latches.opened]
    [(24, (0,), 'up')]
    """

    rule = "source"
    state = ("signed", "square", "age", "bias", "power", "history", "seen")

    def __init__(self, streams: Sequence[Stream], threshold: float, material: float = 3e-4) -> None:
        self.threshold, self.material = threshold, material
        self._owner, groups = index_by([(s.layer, s.rank) for s in streams])
        self.places = cast(list[tuple[int, int]], groups)
        self._streams, n = list(streams), len(groups)
        cap = threshold + CRITICAL + 1 + math.log(8 * max(n, 1) * FRACTIONS.size)
        self.signed = ShiryaevRobertsBank([("up", "down")] * n, MARGIN, FRACTIONS, cap)
        self.square = np.full((n, SPREAD.size), -np.inf)
        self.age, self.bias, self.power = np.zeros(n), np.zeros(n), np.zeros(n)
        self.history = History(n, k=2)
        self.seen = False
        self.latest = np.full(n, np.nan)

    def update(self, step: int, t: Floats, bias: Floats, latches: Latches) -> None:
        """Scores and biases (n,) of one step, NaN = not measured.

        Afterwards `latest` (rows,) holds what verification reads: min(|t|, 3·|bias|/material) with t's sign,
        so that |latest| <= 3 means insignificant or immaterial."""
        n, owner = len(self.places), self._owner
        if np.isnan(t).all():
            self.latest = np.full(n, np.nan)
            return
        heads = np.bincount(owner, weights=~np.isnan(t), minlength=n)
        score = group_mean(t, owner, n) * np.sqrt(heads)
        mean = group_mean(bias, owner, n)
        cut = np.minimum(np.abs(score), 3 * np.abs(mean) / self.material)
        self.latest = np.sign(score) * cut
        known = ~np.isnan(score)
        score, single = np.clip(score, -CLIP, CLIP), np.clip(t, -CLIP, CLIP)
        self.signed.update(score)
        ratio = 0.5 * (single[:, None] ** 2 / NULL_VARIANCE * SPREAD / (1 + SPREAD) - np.log1p(SPREAD))
        increment = np.column_stack([np.log(group_mean(np.exp(r), owner, n)) for r in ratio.T])
        self.square = accumulate(self.square, increment, self.signed.cap)
        signed, square, rows = self.statistics()
        # the honest part of bias² is its squared standard error, bias²/t²
        honest = np.divide(1.0, t**2, out=np.ones_like(t), where=t**2 > 1e-12)
        power = group_mean(bias**2 * (1 - honest), owner, n)
        self.age = np.where(known, self.age + 1, self.age)
        weight = np.where(known, np.maximum(1 / np.maximum(self.age, 1), FORGET), 0.0)
        self.bias = self.bias + weight * np.where(known, mean - self.bias, 0.0)
        self.power = self.power + weight * np.where(known, power - self.power, 0.0)
        self.age[rows <= 1.0] = 0  # the evidence is back at zero: the next sample starts the mean anew
        unsigned = np.clip(group_mean(single**2 - 1, owner, n) * np.sqrt(heads / 2), -CLIP, CLIP)
        measured = np.flatnonzero(known)
        self.history.append(measured, np.column_stack([score, unsigned])[measured], step)

        fused = float(np.logaddexp.reduce(rows) - math.log(n))
        strong = self.threshold / 2
        steady = (signed >= strong) & (np.abs(self.bias) >= self.material)
        varying = (square >= strong) & (np.sqrt(np.maximum(self.power, 0.0)) >= self.material)
        guilty = np.flatnonzero(stands_out(rows, self.threshold) & (steady | varying))
        self.seen = fused >= self.threshold and not guilty.size

        def make(severity: Severity) -> Alarm:
            places = [self.places[i] for i in guilty]
            lead = int(guilty[rows[guilty].argmax()])
            direction = self.signed.direction(lead) if steady[lead] else "both"
            dated = [
                self._onset(int(i), self.signed.direction(int(i)) if steady[i] else "both") for i in guilty
            ]
            return Alarm(
                signal=self._streams[0].signal,
                mechanism=self._streams[0].key.mechanism,
                step=step,
                direction=direction,
                statistic=fused,
                threshold=self.threshold,
                severity=severity,
                onset=Interval(min(d.early for d in dated), min(d.late for d in dated)),
                layers=tuple(sorted({layer for layer, _ in places})),
                heads=tuple(
                    sorted(
                        {
                            (s.layer, s.key.head)
                            for s, x in zip(self._streams, t, strict=True)
                            if s.key.head is not None and (s.layer, s.rank) in places and abs(x) >= 3
                        }
                    )
                ),
                ranks=tuple(sorted({rank for _, rank in places if rank >= 0})),
                confirms=True,
            )

        if latches.judge(self.rule, fused if guilty.size else 0.0, self.threshold, make):
            self.reset()

    def statistics(self) -> tuple[Floats, Floats, Floats]:
        """Signed, square and together, each (rows,) nats."""
        signed = self.signed.statistic()
        square = np.logaddexp.reduce(self.square, axis=1) - math.log(SPREAD.size)
        return signed, np.asarray(square), halves(signed, square)

    def _onset(self, row: int, direction: str) -> Interval:
        scores, steps = self.history.read(row)
        return onset_interval(scores[:, 1 if direction == "both" else 0], steps, direction)

    def reset(self, layers: Collection[int] | None = None) -> None:
        """Forget the evidence (of these layers)."""
        rows = np.array([layers is None or layer in layers for layer, _ in self.places], dtype=bool)
        self.signed.reset(rows)
        self.square[rows], self.age[rows] = -np.inf, 0
