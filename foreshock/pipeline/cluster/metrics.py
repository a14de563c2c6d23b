"""The hub in numbers for Ray's metrics endpoint (`ray[default]`); every name begins with `foreshock_`."""

from __future__ import annotations

from collections import Counter as Tally
from typing import Any

from foreshock.pipeline.hub import Hub
from foreshock.remediation.types import Command


class Metrics:
    """What the hub's actor reports after each turn: labels `run`, and `state` where incidents are counted."""

    def __init__(self, run: str) -> None:
        from ray.util.metrics import Counter, Gauge, Histogram

        own = {"run": run}

        def count(name: str, text: str) -> Any:
            metric = Counter(f"foreshock_{name}", description=text, tag_keys=("run",))
            metric.set_default_tags(own)
            return metric

        def gauge(name: str, text: str, *keys: str) -> Any:
            metric = Gauge(f"foreshock_{name}", description=text, tag_keys=("run", *keys))
            metric.set_default_tags(own)
            return metric

        self._frames = count("frames_total", "Frames taken in, of all ranks.")
        self._dropped = count("frames_dropped_total", "Frames that came late or are of another attempt.")
        self._gaps = count("frames_lost_total", "Frames that a rank numbered and that never came.")
        self._actions = count("commands_total", "Commands issued.")
        self._step = gauge("step", "The newest closed step.")
        self._lag = gauge(
            "lag_steps", "Steps between the newest frame of any rank and the newest closed step."
        )
        self._alarms = gauge("alarms_open", "Alarms that are open.")
        self._incidents = gauge("incidents", "Incidents by state.", "state")
        self._vote = gauge("vote_seconds", "The longest wait for a vote that a rank reported.")
        self._turn = Histogram(
            "foreshock_turn_seconds",
            description="Time to fold and commit what had arrived.",
            boundaries=[0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0],
            tag_keys=("run",),
        )
        self._turn.set_default_tags(own)
        self._before: Tally[str] = Tally()
        self._states: set[str] = set()

    def issued(self, command: Command) -> None:
        self._actions.inc()

    def voted(self, seconds: float) -> None:
        self._vote.set(seconds)

    def turn(self, hub: Hub, frames: int, seconds: float) -> None:
        """After a turn that took `seconds` and brought `frames` frames."""
        if frames:
            self._frames.inc(frames)
        assembler = hub.assembler
        for name, metric, now in (
            ("dropped", self._dropped, assembler.dropped),
            ("gaps", self._gaps, assembler.gaps),
        ):
            if now > self._before[name]:
                metric.inc(now - self._before[name])
            self._before[name] = now
        self._turn.observe(seconds)
        self._step.set(hub.step)
        self._lag.set(max(assembler.waiting, default=hub.step) - hub.step)
        if hub.detectors is not None:
            self._alarms.set(len(hub.detectors.latches.open))
        states = Tally(str(i.state) for i in hub.engine.incidents) if hub.engine else Tally()
        self._states |= set(states)
        for state in self._states:
            self._incidents.set(states[state], tags={"state": state})
