"""Many streams of one signal -> one statistic, and which of them stand out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foreshock.signals import Floats


def mean_evidence(
    statistics: Floats, owner: NDArray[np.intp], owners: int, live: NDArray[np.bool_]
) -> Floats:
    """(owners,) log of the mean e-value over the live rows of each owner; a mean of e-values is one again.

    The statistics are capped far below overflow, so the exponential is taken directly.
    """
    held = np.bincount(owner[live], minlength=owners)
    total = np.bincount(owner[live], weights=np.exp(statistics[live]), minlength=owners)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(total / np.maximum(held, 1)))


def halves(a: Floats, b: Floats) -> Floats:
    """log(exp(a)/2 + exp(b)/2): what finds one head, and what finds all of them a little."""
    return np.asarray(np.logaddexp(a, b) - np.log(2.0))


def stands_out(statistics: Floats, threshold: float) -> NDArray[np.bool_]:
    """Rows with at least half the threshold and half the nats of the strongest row.

    Healthy rows rarely hold more than two or three nats, so a fault in one layer names that layer only,
    while layers that broke together stay within a factor of two.
    """
    return statistics >= max(threshold / 2, float(statistics.max(initial=-np.inf)) / 2)
