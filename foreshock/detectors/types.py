"""The types that detectors own: `Alarm` and `Diagnosis`, what policies read.

Both are frozen and turn into plain JSON with `to_json`, because they are written into the audit log.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """warning: the statistic crossed its threshold h. critical: it crossed h + ln 10."""

    WARNING = "warning"
    CRITICAL = "critical"


class Mechanism(StrEnum):
    """Where a fault is written: two modules, and four that need none."""

    ATTENTION = "attention"
    ROUTER = "router"
    OPTIMIZER = "optimizer"
    DATA = "data"
    NUMERICS = "numerics"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Interval:
    """Steps between which the change began, both ends included."""

    early: int
    late: int


@dataclass(frozen=True, slots=True)
class Alarm:
    """One fused signal that left its band. Latched: it opens once and closes after enough samples in band.

    `signal` is mechanism.name; `layers`, `heads`, `ranks` are where its streams stand out (heads as
    (layer, head)); `statistic` and `threshold` are in nats of evidence, for an absolute rule in the signal's
    own unit, for non-finite values their number.
    """

    signal: str
    mechanism: str
    step: int
    direction: str
    statistic: float
    threshold: float
    severity: Severity
    onset: Interval
    layers: tuple[int, ...] = ()
    heads: tuple[tuple[int, int], ...] = ()
    ranks: tuple[int, ...] = ()
    confirms: bool = False
    """True where this signal alone proves its mechanism: absolute rule, source probe, non-finite value."""

    def to_json(self) -> dict[str, Any]:
        return {
            "signal": self.signal,
            "mechanism": self.mechanism,
            "step": self.step,
            "direction": self.direction,
            "statistic": self.statistic,
            "threshold": self.threshold,
            "severity": str(self.severity),
            "onset": [self.onset.early, self.onset.late],
            "layers": list(self.layers),
            "heads": [list(h) for h in self.heads],
            "ranks": list(self.ranks),
            "confirms": self.confirms,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Alarm:
        """The inverse of `to_json`."""
        return cls(
            **{
                **data,
                "severity": Severity(data["severity"]),
                "onset": Interval(*data["onset"]),
                "layers": tuple(data["layers"]),
                "heads": tuple((a, b) for a, b in data["heads"]),
                "ranks": tuple(data["ranks"]),
            }
        )


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A named mechanism with the alarms behind it.

    `samples` counts the evaluations for which it has held (a policy's `for: n samples`); `ruled_out` says
    for each other mechanism why not. `confidence` is "confirmed" or "agreeing".
    """

    mechanism: Mechanism
    step: int
    severity: Severity
    onset: Interval
    layers: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]
    confidence: str
    alarms: tuple[Alarm, ...]
    ruled_out: tuple[tuple[str, str], ...] = ()
    since: int = 0
    """The step at which this diagnosis was first made."""
    samples: int = 1

    @property
    def signals(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(a.signal for a in self.alarms))

    def to_json(self) -> dict[str, Any]:
        return {
            "mechanism": str(self.mechanism),
            "step": self.step,
            "severity": str(self.severity),
            "onset": [self.onset.early, self.onset.late],
            "layers": list(self.layers),
            "heads": [list(h) for h in self.heads],
            "ranks": list(self.ranks),
            "confidence": self.confidence,
            "alarms": [a.to_json() for a in self.alarms],
            "ruled_out": [list(r) for r in self.ruled_out],
            "since": self.since,
            "samples": self.samples,
        }
