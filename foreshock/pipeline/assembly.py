"""Frames of many ranks become closed steps, in order."""

from __future__ import annotations

from typing import Any

from foreshock.signals import ClosedStep, SignalFrame, merge

AHEAD = 16
"""A step closes without a rank that has fallen this many steps behind another one."""


class Assembler:
    """Collects frames until a step closes: all live ranks delivered it, or one rank is `AHEAD` steps further.

    Idempotent on (attempt, rank, seq): a frame delivered twice counts once. Late and foreign frames are counted.
    """

    def __init__(self) -> None:
        self.attempt = 0
        self.timeline = 0
        self.ranks: tuple[int, ...] = ()
        self._members: frozenset[int] = frozenset()
        self.table = ""
        self.waiting: dict[int, dict[int, SignalFrame]] = {}
        self.early: list[SignalFrame] = []
        """Frames of the timeline after a rewind, from ranks that were quicker than the last word of its being applied."""
        self.seen: dict[int, int] = {}
        self.closed = -1
        self.dropped = 0
        self.gaps = 0

    def start(self, attempt: int, ranks: tuple[int, ...], table: str, timeline: int, step: int) -> None:
        self.attempt, self.ranks, self.table = attempt, ranks, table
        self._members = frozenset(ranks)
        self.seen, self.early = {}, []
        self.rewind(timeline, step)

    def rewind(self, timeline: int, step: int) -> None:
        """From now on only frames of `timeline` from `step` on count."""
        self.timeline, self.closed, self.waiting = timeline, step - 1, {}
        held, self.early = self.early, []
        for frame in held:  # the next frame closes what is complete
            if frame.timeline == timeline and frame.step > self.closed:
                self.waiting.setdefault(frame.step, {})[frame.rank] = frame

    def add(self, frame: SignalFrame) -> list[ClosedStep]:
        """The steps that this frame closes, oldest first."""
        if frame.attempt != self.attempt or frame.rank not in self._members or frame.table != self.table:
            self.dropped += 1
            return []
        last = self.seen.get(frame.rank, -1)
        if frame.seq <= last:
            return []
        if last >= 0:
            self.gaps += frame.seq - last - 1
        self.seen[frame.rank] = frame.seq
        if frame.timeline == self.timeline + 1 and len(self.early) < AHEAD * len(self.ranks):
            self.early.append(frame)
            return []
        if frame.timeline != self.timeline or frame.step <= self.closed:
            self.dropped += 1
            return []
        here = self.waiting.setdefault(frame.step, {})
        here[frame.rank] = frame
        if 1 < len(here) < len(self.ranks):
            return []  # only a full step or a new one can close anything
        return self._close()

    def _close(self) -> list[ClosedStep]:
        done: list[ClosedStep] = []
        newest = max(self.waiting, default=-1)
        for step in sorted(self.waiting):
            full = len(self.waiting[step]) == len(self.ranks)
            if not full and newest - step < AHEAD:
                break
            done.append(merge(self.waiting.pop(step).values()))
            self.closed = step
        return done

    def state_dict(self) -> dict[str, Any]:
        return {
            "attempt": self.attempt,
            "timeline": self.timeline,
            "ranks": list(self.ranks),
            "table": self.table,
            "seen": {str(k): v for k, v in self.seen.items()},
            "closed": self.closed,
            "dropped": self.dropped,
            "gaps": self.gaps,
            "early": [f.to_bytes().hex() for f in self.early],
            "waiting": [f.to_bytes().hex() for step in self.waiting.values() for f in step.values()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in ("attempt", "timeline", "table", "closed", "dropped", "gaps"):
            setattr(self, name, state[name])
        self.ranks = tuple(state["ranks"])
        self._members = frozenset(self.ranks)
        self.seen = {int(k): v for k, v in state["seen"].items()}
        self.early = [SignalFrame.from_bytes(bytes.fromhex(text)) for text in state["early"]]
        self.waiting = {}
        for text in state["waiting"]:
            frame = SignalFrame.from_bytes(bytes.fromhex(text))
            self.waiting.setdefault(frame.step, {})[frame.rank] = frame
