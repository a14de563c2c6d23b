"""Rings of the recent past: scores for dating an onset, references for verifying a cure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock.detectors.state import Stateful
from foreshock.signals import Floats


class History(Stateful):
    """The last `size` samples of n rows with their step numbers; float32 (n, size, k), NaN = no score."""

    state = ("values", "steps", "position")

    def __init__(self, n: int, k: int = 1, size: int = 1024) -> None:
        self.values = np.full((n, size, k), np.nan, dtype=np.float32)
        self.steps = np.full((n, size), -1, dtype=np.int64)
        self.position = np.zeros(n, dtype=np.int64)

    def append(self, rows: NDArray[np.intp], values: Floats, step: int) -> None:
        """One sample (len(rows), k) for these rows."""
        at = self.position[rows] % self.steps.shape[1]
        self.values[rows, at], self.steps[rows, at] = values, step
        self.position[rows] += 1

    def backfill(self, row: int, values: Floats) -> None:
        """Write (m, k) over the last m samples of a row, whose steps are known already."""
        at = (self.position[row] - np.arange(len(values), 0, -1)) % self.steps.shape[1]
        self.values[row, at] = values

    def read(self, row: int) -> tuple[Floats, NDArray[np.int64]]:
        """(m, k) scores and (m,) steps, oldest first, without gaps."""
        order = (self.position[row] + np.arange(self.steps.shape[1])) % self.steps.shape[1]
        order = order[(self.steps[row, order] >= 0) & np.isfinite(self.values[row, order]).all(1)]
        return self.values[row, order].astype(np.float64), self.steps[row, order]

    def truncate(self, step: int) -> None:
        """Forget everything after `step`: the run was rewound to it."""
        late = self.steps > step
        self.position -= late.sum(1)
        self.steps[late] = -1
