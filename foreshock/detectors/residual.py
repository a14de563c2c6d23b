"""Raw signal -> bounded score: a running level, AR(1) whitening and a scale learned on a healthy prefix."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foreshock.detectors.state import Stateful
from foreshock.signals import Floats

OUTLIER = 8 * 0.6745
"""A single innovation beyond 8 median absolute deviations, in sigma: logged, never by itself an alarm."""


class Residual(Stateful):
    """n streams, vectorised: r = x - level, e = r - phi·r_previous, z = clip(e/sd, ±clip).

    Arguments are (n,) or scalars: `prefix` samples to learn from, `tau` in samples, `slope` where a slope is
    followed too. phi and sd (times 1 + 2/sqrt(prefix), because it is an estimate) come from the prefix, the
    level runs on. An outlier moves the level no further than 8 MAD would. NaN leaves a stream as it was.

    Attributes: `fitted` (n,) bool; `level`, `marginal` (n,) the running level and the residual's marginal
    standard deviation, NaN before the fit; `raw` (n,) e/sd of the last update, not clipped;
    `fresh` the rows fitted in the last update, whose scores over the prefix are `buffer[row, :prefix]`.

    >>> residual = Residual(1, prefix=50, tau=75)
    >>> wave = np.sin(np.arange(60.0) * 2)
    >>> scores = [float(residual.update(np.array([x]))[0]) for x in wave]
    >>> int(np.isnan(scores).sum()), float(residual.update(np.array([99.0]))[0])
    (50, 3.0)
    """

    state = ("count", "level", "trend", "last", "phi", "sd", "marginal", "buffer")

    def __init__(
        self,
        n: int,
        prefix: ArrayLike,
        tau: ArrayLike,
        slope: ArrayLike = False,
        phi_max: ArrayLike = 0.98,
        clip: ArrayLike = 3.0,
    ) -> None:
        self.prefix: NDArray[np.intp] = np.broadcast_to(np.asarray(prefix, dtype=np.intp), (n,))
        self._slope: NDArray[np.bool_] = np.broadcast_to(np.asarray(slope, dtype=bool), (n,))
        self._gain, self._phi_max, self._clip = (
            np.broadcast_to(np.asarray(a, dtype=np.float64), (n,))
            for a in (1 / np.asarray(tau, dtype=np.float64), phi_max, clip)
        )
        self._trend_gain = np.where(self._slope, self._gain**2 / 4, 0.0)  # critically damped
        self.count = np.zeros(n, dtype=np.intp)
        self.level, self.phi, self.sd, self.marginal = (np.full(n, np.nan) for _ in range(4))
        self.trend, self.last = np.zeros(n), np.zeros(n)
        self.buffer = np.full((n, int(self.prefix.max(initial=0))), np.nan)
        self.raw = np.full(n, np.nan)
        self.fresh: NDArray[np.intp] = np.zeros(0, dtype=np.intp)

    @property
    def fitted(self) -> NDArray[np.bool_]:
        return self.count >= self.prefix

    def restart(self, rows: NDArray[np.bool_]) -> None:
        """Learn these rows anew."""
        self.count[rows], self.trend[rows], self.last[rows] = 0, 0.0, 0.0
        for array in (self.level, self.phi, self.sd, self.marginal, self.buffer):
            array[rows] = np.nan

    def update(self, x: Floats) -> Floats:
        """Take one sample a stream, (n,) float64; return z (n,), NaN while learning or not measured."""
        known, fitted = np.isfinite(x), self.fitted
        live = known & fitted
        carried = self.phi * self.last
        self.raw = np.where(
            live, (np.where(live, x, 0.0) - self.level - self.trend - carried) / self.sd, np.nan
        )
        moved = carried + np.clip(self.raw, -OUTLIER, OUTLIER) * self.sd
        self.last = np.where(live, moved, self.last)
        shift = np.where(live, moved, 0.0)
        self.level = self.level + np.where(live, self.trend, 0.0) + self._gain * shift
        self.trend = self.trend + self._trend_gain * shift
        self.fresh = self.fresh[:0]
        learning = np.flatnonzero(known & ~fitted)
        if learning.size:
            self.buffer[learning, self.count[learning]] = x[learning]
            self.count[learning] += 1
            self.fresh = learning[self.fitted[learning]]
            for n in np.unique(self.prefix[self.fresh]):
                self._fit(self.fresh[self.prefix[self.fresh] == n], int(n))
        return np.asarray(np.clip(self.raw, -self._clip, self._clip))

    def _fit(self, rows: NDArray[np.intp], n: int) -> None:
        x, burn = self.buffer[rows, :n], n // 8
        r, level = np.zeros_like(x), x[:, 0].copy()
        for t in range(1, n):
            r[:, t] = x[:, t] - level
            level += r[:, t] * np.maximum(1 / (t + 1), self._gain[rows])
        sloped, clock = self._slope[rows], np.arange(n) - (n - 1) / 2
        trend = np.where(sloped, x @ clock / (clock @ clock), 0.0)
        line = x.mean(1, keepdims=True) + trend[:, None] * clock
        r = np.where(sloped[:, None], x - line, r)
        level = np.where(sloped, line[:, -1], level)
        # about zero, not about the mean: where the level lags behind a drift, the lag is part of the memory
        past, now = r[:, burn:-1], r[:, burn + 1 :]
        phi = (past * now).sum(1) / np.maximum((past**2).sum(1), 1e-300)
        phi = np.clip(phi, 0.0, self._phi_max[rows])
        e = r[:, 1:] - phi[:, None] * r[:, :-1]
        reach = OUTLIER * 1.4826 * np.median(np.abs(e[:, burn:]), axis=1, keepdims=True)
        bounded = np.clip(e[:, burn:], -reach, reach)
        floor = 1e-6 * np.abs(level) + 1e-12  # float32 carries no more
        sd = np.maximum(np.sqrt((bounded**2).mean(1)), floor) * (1 + 2 / np.sqrt(n))
        self.level[rows], self.trend[rows], self.last[rows] = level, trend, r[:, -1]
        self.phi[rows], self.sd[rows] = phi, sd
        self.marginal[rows] = np.maximum(np.sqrt((r[:, burn:] ** 2).mean(1)), floor)
        self.buffer[rows, 0] = 0.0
        self.buffer[rows, 1:n] = np.clip(e / sd[:, None], -self._clip[rows, None], self._clip[rows, None])
