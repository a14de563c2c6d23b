"""Which recovery points exist, which are healthy, which may be used, which may be deleted. Pure; files are elsewhere.

A point at step s holds the state before step s runs. It is poisoned by any fault whose onset lies before s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

DELAY = {"attention": 450}
"""Steps until a mechanism's monitors would have seen a fault that was there when the point was taken (SCIENCE
measured the update spectrum's slowest detection at 432 steps)."""
KEEP_ONE_OLDER_THAN = 640


@dataclass(frozen=True, slots=True)
class Point:
    """One recovery point: its step, the batches drawn by then, and its directory's name."""

    id: str
    step: int
    batches: int
    clock: int
    finite: bool = True
    ill: bool = False
    """Something was once dated to before this point: that never fades."""


class PointLedger:
    """The points of one run's current timeline, oldest first."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.pinned: set[str] = set()
        self.onsets: dict[str, int] = {}
        """The earliest onset of each mechanism that is firing now."""

    def add(self, point: Point) -> None:
        self.points = [p for p in self.points if p.step < point.step and p.id != point.id] + [point]
        self.firing(self.onsets)

    def firing(self, onsets: dict[str, int]) -> None:
        """Tell the ledger which mechanisms fire now, and from which step on: points behind that are poisoned."""
        self.onsets = dict(onsets)
        if onsets:
            first = min(onsets.values())
            self.points = [replace(p, ill=p.ill or first < p.step) for p in self.points]

    def drop(self, name: str) -> None:
        """The point cannot be read: it is no longer there to be chosen."""
        self.points = [p for p in self.points if p.id != name]

    def healthy(self, point: Point, step: int, dated: frozenset[str] = frozenset()) -> bool:
        """Nothing was dated to before the point, until each mechanism's own detection delay after it.

        Mechanisms in `dated` need no delay: what they found is dated already.
        """
        waited = all(step >= point.step + delay for name, delay in DELAY.items() if name not in dated)
        return point.finite and waited and not point.ill

    def choose(self, before: int, step: int, dated: frozenset[str]) -> Point | None:
        """The newest point at or before step `before` that may be restored at `step`.

        `dated` names the mechanisms whose onset `before` already bounds. None where there is no such point.
        """
        usable = [p for p in self.points if p.step <= before and self.healthy(p, step, dated)]
        return usable[-1] if usable else None

    def rewound(self, step: int) -> None:
        """Points of the abandoned future are gone."""
        self.points = [p for p in self.points if p.step <= step]

    def keep(self, step: int) -> Sequence[Point]:
        """The points that must stay on disk: all recent ones, the newest one that is older, and pinned ones."""
        recent = [p for p in self.points if p.step > step - KEEP_ONE_OLDER_THAN]
        older = [p for p in self.points if p.step <= step - KEEP_ONE_OLDER_THAN]
        return [*(p for p in older[:-1] if p.id in self.pinned), *older[-1:], *recent]

    def prune(self, step: int) -> None:
        self.points = list(self.keep(step))

    def state_dict(self) -> dict[str, Any]:
        return {
            "points": [asdict(p) for p in self.points],
            "pinned": sorted(self.pinned),
            "onsets": self.onsets,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.points = [Point(**p) for p in state["points"]]
        self.pinned = set(state["pinned"])
        self.onsets = dict(state["onsets"])
