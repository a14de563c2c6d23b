"""Did it help? Judges an applied command against the baseline as it stood before the fault (DESIGN 7)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

Reference = Mapping[str, tuple[float, float]]
"""Signal name -> (level, standard deviation)."""


@dataclass(frozen=True, slots=True)
class Criteria:
    """A policy's `verify`, in steps and counts."""

    initial_delay: int
    interval: int
    band: float
    recovered: int
    failed: int
    failed_of: int
    timeout: int


@dataclass
class Verification:
    """One judgement in progress. `reference` is fixed at the start; an adaptive one would absorb the fault."""

    command: str
    incident: str
    criteria: Criteria
    reference: dict[str, tuple[float, float]]
    started: int
    applied_step: int
    """The clock and the trainer's step at which the command was applied."""
    checks: list[bool] = field(default_factory=list)
    worst: str = ""
    due: int = 0
    """The clock of the next check; where nothing was measured then, the next time that something is."""

    def update(self, clock: int, current: Reference) -> tuple[str, str] | None:
        """Look at the newest values; (verdict, reason) when the judgement is in, else None.

        `current` maps signal names to (value, ignored). A check waits for a step
        in which a signal is measured: the two cadences need not have a phase in common.
        """
        waited = clock - self.started
        c = self.criteria
        if waited >= c.timeout:
            return "inconclusive", f"no verdict after {c.timeout} steps" + (
                f"; last outside: {self.worst}" if self.worst else ""
            )
        if waited < c.initial_delay or clock < self.due:
            return None
        scores = {
            name: abs(current[name][0] - level) / max(deviation, 1e-12)
            for name, (level, deviation) in self.reference.items()
            if name in current and math.isfinite(current[name][0])
        }
        if not scores:
            return None
        self.due = clock + c.interval
        name, score = max(scores.items(), key=lambda item: item[1])
        self.checks.append(score <= c.band)
        if score > c.band:
            self.worst = f"{name} at {score:.1f} sigma"
        if len(self.checks) >= c.recovered and all(self.checks[-c.recovered :]):
            return "recovered", f"{len(scores)} signals within {c.band:g} sigma, {c.recovered} in a row"
        recent = deque(self.checks, maxlen=c.failed_of)
        if recent.count(False) >= c.failed:
            return "failed", f"outside the band in {c.failed} of {len(recent)} checks: {self.worst}"
        return None

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Verification:
        reference = {name: (float(a), float(b)) for name, (a, b) in state["reference"].items()}
        return cls(**{**state, "criteria": Criteria(**state["criteria"]), "reference": reference})
