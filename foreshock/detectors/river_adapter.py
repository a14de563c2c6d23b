"""A river drift detector as a second opinion on one stream of whitened scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol


class Drift(Protocol):
    """river's drift-detector interface."""

    @property
    def drift_detected(self) -> bool: ...

    def update(self, x: float) -> object: ...


class RiverDetector:
    """Guards any river detector: one NaN or infinity silences ADWIN and PageHinkley for good.

    `factory` builds the detector. Values that are not finite are counted in `nonfinite` and not passed on.
    River's detectors have no plain state, so this one has no `state_dict`: it learns anew after a restart,
    and nothing is decided by it.

    >>> from river.drift import PageHinkley
    >>> detector = RiverDetector(PageHinkley)
    >>> for i, x in enumerate([0.0] * 50 + [float("nan")] + [3.0] * 50):
    ...     detector.update(x)
    ...     if detector.drift_detected:
    ...         print(i)
    ...         break
    71
    """

    def __init__(self, factory: Callable[[], Drift]) -> None:
        self._factory = factory
        self.reset()

    def reset(self) -> None:
        self._inner, self.nonfinite, self.drift_detected = self._factory(), 0, False

    def update(self, x: float) -> None:
        """Take one score."""
        if math.isfinite(x):
            self._inner.update(float(x))
            self.drift_detected = bool(self._inner.drift_detected)
        else:
            self.nonfinite += 1
            self.drift_detected = False
