"""The first detector: a measured value that is not finite is an alarm at once, past every wait."""

from __future__ import annotations

import numpy as np

from foreshock.detectors.latch import Latches
from foreshock.detectors.types import Alarm, Interval, Severity
from foreshock.signals import ClosedStep, SignalTable


class NonFiniteGate:
    """One latched alarm while any flag of any signal is set; `statistic` is the number of flagged values.

    Its onset is the step before (where the value was still finite) to this one. A gradient norm in a step
    that the scaler skips is reported as not measured, so it does not come here.

    >>> import numpy as np
    >>> from foreshock.signals import SignalFrame, SignalKey, merge
    >>> table = SignalTable((SignalKey("symptom", "loss"),))
    >>> place = dict(run="r", attempt=0, rank=0, seq=0, timeline=0, table=table.id)
    >>> gate, latches = NonFiniteGate(table), Latches()
    >>> for step, x in enumerate([2.0, 1.9, np.inf]):
    ...     gate.update(merge([SignalFrame.build([x], step=step, **place)]), latches)
    >>> [(a.signal, a.step, a.onset.early) for a in latches.opened]
    [('symptom.loss', 2, 1)]
    """

    rule = "nonfinite"

    def __init__(self, table: SignalTable) -> None:
        self._keys = table.values

    def update(self, closed: ClosedStep, latches: Latches) -> None:
        """Look at the flags (R, V) of one step."""
        flagged = float(np.count_nonzero(closed.nonfinite))

        def make(severity: Severity) -> Alarm:
            flags = closed.nonfinite
            keys = [self._keys[j] for j in np.flatnonzero(flags.any(axis=0))]
            first = self._keys[int(flags.argmax()) % len(self._keys)]
            return Alarm(
                signal=f"{first.mechanism}.{first.name}",
                mechanism="numerics",
                step=closed.step,
                direction="nonfinite",
                statistic=flagged,
                threshold=1.0,
                severity=severity,
                onset=Interval(max(closed.step - 1, 0), closed.step),
                layers=tuple(sorted({k.layer for k in keys if k.layer is not None})),
                heads=tuple(
                    sorted({(k.layer, k.head) for k in keys if k.layer is not None and k.head is not None})
                ),
                ranks=tuple(closed.ranks[i] for i in np.flatnonzero(flags.any(axis=1))),
                confirms=True,
            )

        latches.judge(self.rule, flagged, 1.0, make, critical=1.0)
