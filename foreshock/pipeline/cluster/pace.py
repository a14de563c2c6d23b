"""How far before the slowest rank the frames of the others are taken."""

from __future__ import annotations

import math
import time

from foreshock.pipeline.assembly import AHEAD

LATE_SECONDS = 15.0
"""So long the others wait for a rank: longer than it needs to give an answer up and to try again."""


class Pace:
    """`AHEAD` frames, until the slowest rank did not move for `LATE_SECONDS`; then as far as they like.

    After a hub or relay was away, ranks come back one by one, each with a backlog. The first backlog taken whole would
    close its steps without the others, whose own frames then came too late. What is not taken stays with its rank,
    which hands it in again.
    """

    def __init__(self) -> None:
        self._behind: float | None = None
        self._since = 0.0

    def limit(self, behind: float | None) -> float:
        """The number of the newest frame that may be taken now; `behind`: of the slowest rank's newest, if any."""
        if behind is None:
            return math.inf
        if behind != self._behind:
            self._behind, self._since = behind, time.monotonic()
        return math.inf if time.monotonic() - self._since > LATE_SECONDS else behind + AHEAD

    def nobody_waits(self) -> None:
        """All that was offered is taken."""
        if self._behind is not None and time.monotonic() - self._since <= LATE_SECONDS:
            self._since = time.monotonic()
