"""The types that policies own: `Incident` (what is going on) and `Decision` (what to do about it).

Diagnoses come in from detectors, decisions go out to remediation. All times are `clock` values: attempted
steps of the run, which never go back, also where the trainer's step does.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from foreshock.detectors.types import Diagnosis, Interval

AGAIN = ("widened", "point broken", "expired")
"""Verdicts after which the same rung is tried again, with what is known now."""
APPLIED = ("recovered", "failed", "inconclusive", "paused", "widened")
"""Results of rungs that changed the training."""


class State(StrEnum):
    """The life of an incident.

    | state | left when | for |
    |---|---|---|
    | confirming | the policy's `for` has passed, or the diagnosis went away | waiting, resolved |
    | waiting | group_wait, cooldown, inhibition and rivals are over | awaiting, acting, noted, exhausted |
    | awaiting | a person answered or the approval expired | acting, waiting, exhausted |
    | acting | all ranks applied the command, or it failed or expired | verifying, waiting, paused |
    | verifying | the verdict is in | recovered, waiting (next rung), exhausted |
    | noted | the diagnosis went away (observe and dry_run end here) | resolved |
    """

    CONFIRMING = "confirming"
    WAITING = "waiting"
    AWAITING = "awaiting"
    ACTING = "acting"
    VERIFYING = "verifying"
    NOTED = "noted"
    RECOVERED = "recovered"
    RESOLVED = "resolved"
    PAUSED = "paused"
    EXHAUSTED = "exhausted"

    @property
    def open(self) -> bool:
        return self not in (State.RECOVERED, State.RESOLVED, State.PAUSED, State.EXHAUSTED)

    @property
    def busy(self) -> bool:
        """A command of this incident is in flight or being judged: no other incident may act."""
        return self in (State.ACTING, State.VERIFYING)


@dataclass(frozen=True, slots=True)
class Tried:
    """One rung that was tried or could not be."""

    rung: int
    actions: tuple[str, ...]
    result: str
    reason: str = ""


@dataclass(slots=True)
class Incident:
    """The diagnoses that one policy treats together, and what was tried."""

    id: str
    policy: str
    diagnosis: Diagnosis
    opened: int
    state: State = State.CONFIRMING
    since: int = 0
    """Clock at which the present state began."""
    rung: int = 0
    tried: list[Tried] = field(default_factory=list)
    reason: str = ""
    decision: Decision | None = None
    decisions: int = 0

    @property
    def acted(self) -> bool:
        """A command of this incident took effect."""
        return any(t.result in APPLIED for t in self.tried)

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "policy": self.policy,
            "state": str(self.state),
            "opened": self.opened,
            "since": self.since,
            "rung": self.rung,
            "reason": self.reason,
            "tried": [
                {"rung": t.rung, "actions": list(t.actions), "result": t.result, "reason": t.reason}
                for t in self.tried
            ],
            "diagnosis": self.diagnosis.to_json(),
            "decision": self.decision.to_json() if self.decision else None,
        }

    def hull(self, other: Diagnosis) -> Diagnosis:
        """The newer diagnosis, its onset widened to the earliest seen: a later estimate never drops evidence."""
        early = min(self.diagnosis.onset.early, other.onset.early)
        return replace(other, onset=Interval(early, max(early, other.onset.late)))


@dataclass(frozen=True, slots=True)
class Decision:
    """What the engine wants done: one rung of one policy for one incident.

    `approval` is "not needed", "pending", "approved", "rejected" or "expired"; `mode` is the mode under which it
    was made: only a decision of mode enforce becomes a command.
    """

    id: str
    incident: str
    policy: str
    rung: int
    actions: tuple[tuple[str, dict[str, Any]], ...]
    mode: str
    approval: str
    clock: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.actions)

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "incident": self.incident,
            "policy": self.policy,
            "rung": self.rung,
            "actions": [{name: arguments} for name, arguments in self.actions],
            "mode": self.mode,
            "approval": self.approval,
            "clock": self.clock,
        }
