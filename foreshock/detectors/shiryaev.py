"""Bounded score -> evidence: the mixture e-Shiryaev-Roberts procedure, for all streams at once.

References
----------
.. [1] Shin, Ramdas, Rinaldo. "E-detectors: a nonparametric framework for sequential change detection." 2023.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from foreshock.detectors.state import Stateful
from foreshock.signals import Floats

LAMBDAS: Floats = np.array([0.05 * 2.0**j for j in range(6)])


def accumulate(evidence: Floats, increment: Floats, cap: float) -> Floats:
    """One step of log Shiryaev-Roberts, (n, J): M <- logaddexp(M, 0) + increment; NaN leaves M as it is.

    The cap lets an alarm close again in bounded time after a long fault.
    """
    moved = np.minimum(np.logaddexp(evidence, 0.0) + increment, cap)
    return np.where(np.isnan(increment), evidence, moved)


class ShiryaevRobertsBank(Stateful):
    """n streams of scores; statistic = log mean over betting fractions of exp M, in nats.

    Per fraction M <- logaddexp(M, 0) + lambda·z - |lambda|·margin - lambda²/2, with +lambda for side "up",
    -lambda for "down". Under unit-variance scores P(statistic >= h within T samples) <= T·exp(-h).

    >>> bank = ShiryaevRobertsBank([("up",), ("down",)], margin=0.25)
    >>> next(i for i in range(100) if bank.update(np.array([3.0, 3.0]))[0] >= np.log(1e4))
    3
    """

    state = ("evidence",)

    def __init__(
        self,
        sides: Sequence[tuple[str, ...]],
        margin: float | Floats,
        lambdas: Floats = LAMBDAS,
        cap: float = math.inf,
    ) -> None:
        self.fractions = np.concatenate([lambdas, -lambdas])
        bets = [[s in which for s in ("up", "down") for _ in lambdas] for which in sides]
        active = np.array(bets, dtype=bool).reshape(len(sides), self.fractions.size)
        with np.errstate(divide="ignore"):
            self._log_weight = np.log(active / np.maximum(active.sum(1, keepdims=True), 1))
        steps = np.broadcast_to(np.asarray(margin, dtype=np.float64), (len(sides),))
        self._price = np.abs(self.fractions) * steps[:, None] + self.fractions**2 / 2
        self.cap = cap
        self.evidence = np.full(active.shape, -np.inf)

    def update(self, z: Floats) -> Floats:
        """Take one score a stream, (n,), NaN = not measured; return the statistics (n,)."""
        self.evidence = accumulate(self.evidence, self.fractions * z[:, None] - self._price, self.cap)
        return self.statistic()

    def statistic(self) -> Floats:
        """(n,) nats; -inf before the first sample."""
        return np.asarray(np.logaddexp.reduce(self.evidence + self._log_weight, axis=1))

    def direction(self, row: int) -> str:
        """The side that holds most of the row's evidence."""
        return "up" if self.fractions[np.argmax(self.evidence[row] + self._log_weight[row])] > 0 else "down"

    def reset(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> None:
        """Forget the evidence of these rows (mask or indices)."""
        self.evidence[rows] = -np.inf


class ShiryaevRoberts(Stateful):
    """One stream of standard scores, with river's interface (`update`, `drift_detected`).

    For change in the mean of scores with unit variance; whiten first (`Residual`). Not for raw signals.
    `budget` is the mean number of samples between false alarms. After a drift the next update starts anew.
    Values that are not finite are ignored.

    >>> detector = ShiryaevRoberts(budget=1e4)
    >>> for i, x in enumerate([0.0] * 50 + [3.0] * 10):
    ...     detector.update(x)
    ...     if detector.drift_detected:
    ...         print(i)
    ...         break
    53
    """

    state = ("_bank", "drift_detected")

    def __init__(
        self,
        budget: float = 1e4,
        sides: tuple[str, ...] = ("up", "down"),
        margin: float = 0.25,
        clip: float = 3.0,
    ) -> None:
        self.threshold, self.clip, self.drift_detected = math.log(budget), clip, False
        self._bank = ShiryaevRobertsBank([sides], margin)

    @property
    def statistic(self) -> float:
        """Evidence in nats."""
        return float(self._bank.statistic()[0])

    def update(self, x: float) -> None:
        """Take one score."""
        if self.drift_detected:
            self._bank.reset(np.array([True]))
            self.drift_detected = False
        if math.isfinite(x):
            score = min(max(float(x), -self.clip), self.clip)
            self.drift_detected = bool(self._bank.update(np.array([score]))[0] >= self.threshold)
