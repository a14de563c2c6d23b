"""Residual, evidence, fusion and history of all learned signals in one object: raw streams -> alarms."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from foreshock.detectors.fusion import halves, mean_evidence, stands_out
from foreshock.detectors.history import History
from foreshock.detectors.latch import CRITICAL, Latches
from foreshock.detectors.onset import onset_interval
from foreshock.detectors.residual import OUTLIER, Residual
from foreshock.detectors.shiryaev import LAMBDAS, ShiryaevRobertsBank
from foreshock.detectors.spec import SignalSpec
from foreshock.detectors.state import Stateful
from foreshock.detectors.streams import Stream, group_mean, index_by
from foreshock.detectors.types import Alarm, Interval, Severity
from foreshock.signals import Floats

SNAPSHOT_EVERY, SNAPSHOTS = 8, 128


class Bank(Stateful):
    """All streams of all residual signals, vectorised; a layer is the set of a signal's streams in it.

    Per signal: half the mean e-value over its streams, half the mean over layers of the e-value of the
    layer's mean score (in units of its spread over the prefix), against h = ln(budget · signals / cadence).
    `budget_steps` is the mean number of steps between false alarms of all `signals` signals together.

    >>> from foreshock.detectors.latch import Latches
    >>> from foreshock.signals import SignalKey
    >>> spec = SignalSpec("symptom.loss", ("up",), cadence=1, prefix=100)
    >>> bank, latches = Bank([spec], [Stream(SignalKey("symptom", "loss"), 0, -1)], 1e4, 1), Latches()
    >>> noise = np.random.default_rng(0).normal(size=400)
    >>> for step, x in enumerate(noise + 5.0 * (np.arange(400) >= 300)):
    ...     bank.update(step, np.array([x]), latches)
    >>> [(a.signal, a.step, a.onset) for a in latches.opened]
    [('symptom.loss', 304, Interval(early=295, late=300))]
    """

    state = ("residual", "streams", "layers", "scale", "history", "references")

    def __init__(
        self, specs: Sequence[SignalSpec], streams: Sequence[Stream], budget_steps: float, signals: int
    ) -> None:
        by_name = {s.signal: s for s in specs}
        self.streams_of = list(streams)
        self._signal_of, names = index_by([s.signal for s in streams])
        self.specs = [by_name[str(name)] for name in names]
        self._layer_of, self._layers = index_by(
            [(int(i), s.layer) for i, s in zip(self._signal_of, streams, strict=True)]
        )
        self._layer_signal = np.array([label[0] for label in self._layers], dtype=np.intp)  # type: ignore[index]
        self.layer_number = np.array([label[1] for label in self._layers], dtype=np.intp)  # type: ignore[index]
        self.thresholds = [s.threshold(budget_steps, signals) for s in self.specs]
        each = [self.specs[i] for i in self._signal_of]
        self.residual = Residual(
            len(each),
            [s.prefix for s in each],
            [s.tau / s.cadence for s in each],
            [s.slope for s in each],
            [s.phi_max for s in each],
            [s.clip for s in each],
        )
        cap = (
            max(self.thresholds, default=0.0)
            + CRITICAL
            + 1
            + float(np.log(4 * LAMBDAS.size * max(len(each), 1)))
        )
        of_layer = [self.specs[i] for i in self._layer_signal]
        self.streams = ShiryaevRobertsBank(
            [s.sides for s in each], np.array([s.margin for s in each]), cap=cap
        )
        self.layers = ShiryaevRobertsBank(
            [s.sides for s in of_layer], np.array([s.margin for s in of_layer]), cap=cap
        )
        self._clip = np.array([s.clip for s in of_layer])
        self.scale = np.ones(len(of_layer))
        self.history = History(len(of_layer))
        self.references = History(len(each), k=2, size=SNAPSHOTS)
        self.outliers: tuple[int, ...] = ()
        self._everyone = np.arange(len(each))

    def update(self, step: int, x: Floats, latches: Latches) -> None:
        """One step of raw values (n,), NaN = not measured; alarms go to `latches` under the signal's name.

        `outliers` then holds the streams whose innovation was beyond 8 MAD."""
        z = self.residual.update(x)
        if self.residual.fresh.size:
            self._prefix_done()
        count = len(self.scale)
        score = np.clip(group_mean(z, self._layer_of, count) / self.scale, -self._clip, self._clip)
        per_stream, per_layer = self.streams.update(z), self.layers.update(score)
        sampled = np.flatnonzero(np.bincount(self._layer_of[np.isfinite(x)], minlength=count))
        self.history.append(sampled, score[sampled, None], step)
        if step % SNAPSHOT_EVERY == 0:
            self.references.append(
                self._everyone, np.column_stack([self.residual.level, self.residual.marginal]), step
            )
        self.outliers = tuple(int(i) for i in np.flatnonzero(np.abs(self.residual.raw) > OUTLIER))
        signals = len(self.specs)
        fused = halves(
            mean_evidence(per_stream, self._signal_of, signals, self.residual.fitted),
            mean_evidence(per_layer, self._layer_signal, signals, per_layer > -np.inf),
        )
        scored = np.bincount(self._layer_signal[~np.isnan(score)], minlength=signals)
        for i in np.flatnonzero(scored):

            def make(severity: Severity, i: int = int(i)) -> Alarm:
                return self._alarm(i, step, float(fused[i]), severity, per_stream, per_layer)

            if latches.judge(self.specs[i].signal, float(fused[i]), self.thresholds[i], make):
                self.reset({self.specs[i].signal})

    def _prefix_done(self) -> None:
        """The layers' spread and history over the prefix, where all streams of a layer learned together."""
        fresh = self.residual.fresh
        for layer in np.unique(self._layer_of[fresh]):
            rows = np.flatnonzero(self._layer_of == layer)
            n = self.residual.prefix[rows[0]]
            if np.isin(rows, fresh).all():
                mean = self.residual.buffer[rows, :n].mean(0)
                spread = max(float(np.sqrt((mean**2).mean())) * (1 + 2 / np.sqrt(n)), len(rows) ** -0.5)
                self.scale[layer] = min(spread, 1.0)
                self.history.backfill(int(layer), (mean / self.scale[layer])[:, None])

    def _alarm(
        self, i: int, step: int, fused: float, severity: Severity, per_stream: Floats, per_layer: Floats
    ) -> Alarm:
        rows, layers = np.flatnonzero(self._signal_of == i), np.flatnonzero(self._layer_signal == i)
        best = np.array(
            [max(per_layer[g], per_stream[rows[self._layer_of[rows] == g]].max()) for g in layers]
        )
        hot = layers[stands_out(best, self.thresholds[i])]
        layers = hot if hot.size else layers[[int(best.argmax())]]
        top = layers[int(per_layer[layers].argmax())]
        direction = self.layers.direction(int(top))
        single = rows[stands_out(per_stream[rows], self.thresholds[i])]
        found = [self.streams_of[r] for r in single if self._layer_of[r] in layers]
        dated = [
            onset_interval(z[:, 0], at, direction)
            for z, at in (self.history.read(int(g)) for g in layers)
            if at.size
        ]
        dated = dated or [Interval(step, step)]
        return Alarm(
            signal=self.specs[i].signal,
            mechanism=self.specs[i].signal.split(".")[0],
            step=step,
            direction=direction,
            statistic=fused,
            threshold=self.thresholds[i],
            severity=severity,
            onset=Interval(min(d.early for d in dated), min(d.late for d in dated)),
            layers=tuple(sorted(int(self.layer_number[g]) for g in layers if self.layer_number[g] >= 0)),
            heads=tuple(sorted({(s.layer, s.key.head) for s in found if s.key.head is not None})),
            ranks=tuple(sorted({s.rank for s in found if s.rank >= 0})),
        )

    def onset(self, signal: str, layers: Collection[int], direction: str, since: int) -> Interval | None:
        """The interval that a signal's history gives, or None where it does not reach back to `since`."""
        found = [
            onset_interval(z[:, 0], steps, direction)
            for g, number in enumerate(self.layer_number)
            if self.specs[self._layer_signal[g]].signal == signal and int(number) in layers
            for z, steps in [self.history.read(g)]
            if steps.size and steps[0] <= since
        ]
        return Interval(min(d.early for d in found), min(d.late for d in found)) if found else None

    def mask(self, signals: Collection[str]) -> NDArray[np.bool_]:
        """(n,) streams of these signals."""
        return np.array([s.signal in signals for s in self.specs], dtype=bool)[self._signal_of]

    def reset(self, signals: Collection[str], layers: Collection[int] | None = None) -> None:
        """Forget the evidence of these signals (in these layers), not what was learned."""
        wanted = np.array([s.signal in signals for s in self.specs], dtype=bool)[self._layer_signal]
        if layers is not None:
            wanted &= np.isin(self.layer_number, list(layers))
        self.layers.reset(wanted)
        self.streams.reset(wanted[self._layer_of])

    def restart(self) -> None:
        """Learn every baseline anew; the references of the past are kept for verification."""
        everything = {s.signal for s in self.specs}
        self.reset(everything)
        self.residual.restart(self.mask(everything))
        self.scale[:] = 1.0

    def reference(self, rows: Sequence[int], at_step: int) -> tuple[float, float] | None:
        """Mean level and marginal sd of these streams at the last snapshot up to `at_step`, or at the first
        one known after it; None while nothing was learned."""
        found = []
        for row in rows:
            past, steps = self.references.read(row)
            if steps.size:
                found.append(past[max(int(np.searchsorted(steps, at_step, side="right")) - 1, 0)])
        if not found:
            return None
        level, sd = np.mean(found, axis=0)
        return float(level), float(sd)
