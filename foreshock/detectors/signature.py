"""What each mechanism looks like, as data: the first signature that matches the open alarms wins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreshock.detectors.types import Alarm, Mechanism

SOURCE = ("attention.source_t", "attention.mismatch")
SPECTRUM = ("attention.h1", "attention.hqv", "attention.coherence", "attention.lse")
ATTENTION = SOURCE + SPECTRUM
LOSS, UPDATE = "symptom.loss", "symptom.mlp_update"
DECIDING = (*ATTENTION, LOSS, UPDATE)


@dataclass(frozen=True, slots=True)
class Signature:
    """`count` different signals of `signals` alarmed, all within `within` steps.

    `confirming`: only alarms that prove their mechanism alone. `before`: not after the first alarm of these
    signals, which must exist (slack 0). `alone`: no other deciding signal is in alarm.
    """

    mechanism: Mechanism
    signals: tuple[str, ...]
    count: int = 1
    within: int | None = None
    confirming: bool = False
    before: tuple[str, ...] = ()
    alone: bool = False

    def match(self, alarms: Sequence[Alarm]) -> tuple[Alarm, ...]:
        """The alarms behind the match; empty where there is none. `alarms` are the open ones that decide."""
        mine = [a for a in alarms if a.signal in self.signals and (a.confirms or not self.confirming)]
        if self.within is not None:
            mine = max(
                ([b for b in mine if 0 <= b.step - a.step <= self.within] for a in mine),
                key=_kinds,
                default=[],
            )
        if _kinds(mine) < self.count or (self.alone and _kinds(alarms) > self.count):
            return ()
        if self.before:
            others = [a.step for a in alarms if a.signal in self.before]
            if not others or min(a.step for a in mine) > min(others):
                return ()
        return tuple(mine)


def _kinds(alarms: Sequence[Alarm]) -> int:
    return len({a.signal for a in alarms})


SIGNATURES = (
    Signature(Mechanism.ATTENTION, SOURCE, confirming=True),
    Signature(Mechanism.DATA, (LOSS,), before=ATTENTION),
    Signature(Mechanism.OPTIMIZER, (UPDATE,), before=ATTENTION),
    Signature(Mechanism.ATTENTION, ("attention.hqv",), confirming=True),
    Signature(Mechanism.ATTENTION, SPECTRUM, count=2, within=300),
    Signature(Mechanism.DATA, (LOSS,), alone=True),
    Signature(Mechanism.OPTIMIZER, (UPDATE,), alone=True),
    Signature(Mechanism.UNKNOWN, DECIDING, count=2),
)
"""Data or a learning rate moves attention signals too, but cannot move a score with a known null: the source
probe decides whatever came first. Gradient norm, QK norm and max logit never decide."""
