"""Evidence -> alarms that open once, may turn critical, and close after enough samples in band."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from foreshock.detectors.types import Alarm, Severity

CRITICAL = math.log(10.0)


class Latches:
    """Open alarms by rule. `opened` and `closed` (alarm, reason) collect what happened since `drain`.

    Reasons: "in band", "action", "relearned", "rewound".
    """

    def __init__(self, calm: int = 50) -> None:
        self.calm = calm
        self.open: dict[str, Alarm] = {}
        self._quiet: dict[str, int] = {}
        self.opened: list[Alarm] = []
        self.closed: list[tuple[Alarm, str]] = []

    def judge(
        self,
        rule: str,
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
            self.close([rule], "in band")
            return True
        return False

    def close(self, rules: Collection[str], reason: str) -> None:
        for rule in [r for r in self.open if r in rules]:
            self.closed.append((self.open.pop(rule), reason))
            del self._quiet[rule]

    def drain(self) -> tuple[list[Alarm], list[tuple[Alarm, str]]]:
        events = self.opened, self.closed
        self.opened, self.closed = [], []
        return events

    def state_dict(self) -> dict[str, Any]:
        return {
            "open": {rule: [a.to_json(), self._quiet[rule]] for rule, a in self.open.items()},
            "closed": [[a.to_json(), reason] for a, reason in self.closed],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.open = {rule: Alarm.from_json(a) for rule, (a, _) in state["open"].items()}
        self._quiet = {rule: int(q) for rule, (_, q) in state["open"].items()}
        self.opened, self.closed = [], [(Alarm.from_json(a), reason) for a, reason in state["closed"]]
