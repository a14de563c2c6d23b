"""Evidence -> alarms that open once, may turn critical, and close after enough samples in band."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from foreshock.detectors.types import Alarm, Severity

CRITICAL = math.log(10.0)


@dataclass(frozen=True, slots=True)
class Closed:
    """An alarm that ended, and why: "in band", "action" or "relearned"."""

    alarm: Alarm
    step: int
    reason: str


class Latches:
    """Open alarms by rule. `opened` and `closed` collect what happened since `drain`."""

    def __init__(self, calm: int = 50) -> None:
        self.calm = calm
        self.open: dict[str, Alarm] = {}
        self._quiet: dict[str, int] = {}
        self.opened: list[Alarm] = []
        self.closed: list[Closed] = []

    def judge(
        self,
        rule: str,
        step: int,
        statistic: float,
        threshold: float,
        make: Callable[[Severity], Alarm],
        critical: float | None = None,
    ) -> bool:
        """One sample of a rule; `make` builds the alarm when it is needed. True when the alarm closed now."""
        severity = Severity.WARNING
        if statistic >= (threshold + CRITICAL if critical is None else critical):
            severity = Severity.CRITICAL
        alarm = self.open.get(rule)
        if alarm is None:
            if statistic >= threshold:
                self.open[rule] = make(severity)
                self.opened.append(self.open[rule])
                self._quiet[rule] = 0
            return False
        if severity is Severity.CRITICAL and alarm.severity is Severity.WARNING:
            self.open[rule] = replace(make(severity), step=alarm.step, onset=alarm.onset)
        self._quiet[rule] = 0 if statistic >= threshold / 2 else self._quiet[rule] + 1
        if self._quiet[rule] >= self.calm:
            self.close([rule], step, "in band")
            return True
        return False

    def close(self, rules: Collection[str], step: int, reason: str) -> None:
        for rule in [r for r in self.open if r in rules]:
            self.closed.append(Closed(self.open.pop(rule), step, reason))
            del self._quiet[rule]

    def drain(self) -> tuple[tuple[Alarm, ...], tuple[Closed, ...]]:
        events = tuple(self.opened), tuple(self.closed)
        self.opened, self.closed = [], []
        return events

    def state_dict(self) -> dict[str, Any]:
        return {rule: [a.to_json(), self._quiet[rule]] for rule, a in self.open.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.open = {rule: Alarm.from_json(a) for rule, (a, _) in state.items()}
        self._quiet = {rule: int(q) for rule, (_, q) in state.items()}
        self.opened, self.closed = [], []
