"""The types that remediation owns: `Command` (what every rank does at one step) and `Outcome` (what came of it)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Command:
    """Actions that all ranks of one attempt apply together at one step, or none does.

    `actions` hold arguments with nothing left to look up: layers, a recovery point's id, numbers. `issued` and
    `expires` are frame numbers (`seq`): the one count that ranks and hub share. `number` counts the commands of a
    run from 1: what ranks vote on.
    """

    id: str
    number: int
    attempt: int
    incident: str
    actions: tuple[tuple[str, dict[str, Any]], ...]
    issued: int
    expires: int

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "actions": [{name: arguments} for name, arguments in self.actions]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Command:
        return cls(**{**data, "actions": tuple(next(iter(action.items())) for action in data["actions"])})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a command. `verdict`: recovered, failed, inconclusive, widened (more layers fell
    ill), refused, expired, or point broken.

    `acks` maps each rank to what it reported; `cost` counts checks; what each rank did is in `acks`.
    """

    command: str
    incident: str
    applied_step: int | None
    verdict: str
    reason: str = ""
    acks: dict[int, dict[str, Any]] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "acks": {str(rank): ack for rank, ack in self.acks.items()}}
