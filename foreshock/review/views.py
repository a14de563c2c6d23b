"""A run as a person looks at it: losses, signals and the record as plain arrays. First stop of the review.

Reads a run directory from outside, never writes to it, and hands `RunView` and `Marks` to words, figures and
report.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.remediation.audit import AuditRecord
from foreshock.signals import Floats

Steps = NDArray[np.int64]
MISSHAPEN = (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError)
"""What reading a payload raises where someone edited the record. It must still be shown."""


@dataclass(frozen=True, eq=False)
class RunView:
    """One run as it went. The view named "clean" is the one that others are compared with.

    `loss` float64 (N,) in nats by trainer step, NaN where there is none; `signals` by str(SignalKey), each
    (steps (M,) ascending, values (M,)); `directory` holds the run's store, None where there is none.
    """

    name: str
    label: str
    loss: Floats
    signals: dict[str, tuple[Steps, Floats]]
    audit: list[AuditRecord]
    directory: str | None = None

    def count(self, kind: str) -> int:
        return sum(record.kind == kind for record in self.audit)


@dataclass(frozen=True, slots=True)
class Marks:
    """Trainer steps: true onset where known, first alarm behind the diagnosis, first action, recovery."""

    onset: int | None
    alarm: int | None = None
    applied: int | None = None
    verified: int | None = None


@dataclass
class Story:
    """What the record tells: the diagnosis acted on, else the first; (step, actions) of each command."""

    diagnosis: dict[str, Any] = field(default_factory=dict)
    done: list[tuple[int, list[dict[str, Any]]]] = field(default_factory=list)
    wanted: list[dict[str, Any]] = field(default_factory=list)
    alarm: int | None = None
    incidents: int = 0
    outcome: str = "no verdict yet"
    verified: int | None = None


def story(view: RunView) -> Story:
    """The record as a story; an empty one where it is misshapen.

    The end of a verification is recorded in attempted steps. The trainer's step follows from the step of the
    action, or of the point that a rollback went back to.
    """
    try:
        return _story(view.audit)
    except MISSHAPEN:
        return Story()


def marks(view: RunView, onset: int | None = None) -> Marks:
    """Where to draw a line through the pictures of this run."""
    told = story(view)
    return Marks(onset, told.alarm, told.done[0][0] if told.done else None, told.verified)


def subject(views: Sequence[RunView]) -> RunView:
    """The run that the story is about: the last one acted on, else diagnosed, else the last."""
    told = [story(view) for view in views]
    return views[max(range(len(views)), key=lambda i: (bool(told[i].done), bool(told[i].diagnosis), i))]


def by_layer(view: RunView, signal: str) -> dict[int, tuple[Steps, Floats, Floats]]:
    """Per layer: steps, and over the heads measured at each of them the sum and the number of values."""
    heads: dict[int, list[tuple[Steps, Floats]]] = {}
    for name, series in view.signals.items():
        stem, _, place = name.partition("[L")
        layer = place.rstrip("]").partition(".")[0]
        if stem == signal and layer.isdecimal():
            heads.setdefault(int(layer), []).append(series)
    return {n: _pool(*map(np.concatenate, zip(*heads[n], strict=True))) for n in sorted(heads)}


def from_run(
    directory: Path, name: str, label: str, losses: Floats | None = None, before: Path | None = None
) -> RunView:
    """Read one run's directory. `losses` (N,) in nats by step; default: the signal `symptom.loss`.

    `before` is the run that this one was forked from, whose signals lead up to it. Where a step ran twice,
    the newest attempt and timeline count; values of several ranks are averaged.
    Raises foreshock.pipeline.store.StoreError where there is no readable record.
    """
    from foreshock.pipeline.store import RunStore

    with closing(RunStore.open_readonly(directory)) as store:
        audit = list(store.audit())
    signals = _signals([d for d in (before, directory) if d is not None])
    if losses is None:
        steps, values = signals.get("symptom.loss", (np.zeros(0, np.int64), np.zeros(0)))
        losses = np.full(int(steps.max(initial=-1)) + 1, np.nan)
        losses[steps] = values
    return RunView(name, label, np.asarray(losses, np.float64), signals, audit, str(directory))


def _story(audit: Sequence[AuditRecord]) -> Story:
    told, began, acted = Story(), 0, ""
    issued: dict[str, dict[str, Any]] = {}
    opened: dict[str, dict[str, Any]] = {}
    for record in audit:
        p = record.payload
        if record.kind == "diagnosis":
            told.diagnosis = told.diagnosis or p
        elif record.kind == "incident.opened":
            opened[p["incident"]] = dict(p["diagnosis"])
        elif record.kind == "decision":
            told.wanted = told.wanted or p["actions"]
        elif record.kind == "command.issued":
            issued[p["id"]] = p
        elif record.kind == "command.applied":
            command = issued[p["command"]]
            told.done.append((int(p["step"]), [dict(action) for action in command["actions"]]))
            acted = acted or command["incident"]
        elif record.kind == "outcome":
            told.outcome = str(p["verdict"])
        elif record.kind == "incident.state" and p["state"] == "verifying":
            began = int(p["clock"])
        elif record.kind == "incident.state" and p["state"] == "recovered" and told.verified is None:
            step, actions = told.done[-1]
            point = next((a["rollback"]["step"] - 1 for a in actions if "rollback" in a), step)
            told.verified = int(point) + int(p["clock"]) - began
    told.diagnosis, told.incidents = opened.get(acted) or told.diagnosis, len(opened)
    told.alarm = min((int(alarm["step"]) for alarm in told.diagnosis.get("alarms", ())), default=None)
    return told


def _pool(steps: Steps, values: Floats) -> tuple[Steps, Floats, Floats]:
    """Distinct steps, and at each of them the sum and the number of values."""
    distinct, where = np.unique(steps, return_inverse=True)
    total, number = np.bincount(where, values, distinct.size), np.bincount(where, minlength=distinct.size)
    return distinct, total.astype(np.float64), number.astype(np.float64)


def _signals(directories: Sequence[Path]) -> dict[str, tuple[Steps, Floats]]:
    import pyarrow as pa

    from foreshock.pipeline.signal_files import PLACE, read

    parts = [read(d) for d in directories if any((d / "signals").glob("part-*.parquet"))]
    if not parts:
        return {}
    table = pa.concat_tables(parts, promote_options="default")
    step, age = (table[name].to_numpy().astype(np.int64) for name in ("step", "timeline"))
    age += table["attempt"].to_numpy().astype(np.int64) << 32
    newest = np.zeros(int(step.max()) + 1, np.int64)
    np.maximum.at(newest, step, age)
    kept = age == newest[step]
    signals = {}
    for name in set(table.column_names) - {"run", *PLACE}:
        column = np.asarray(table[name].to_numpy(), np.float64)
        known = kept & ~np.isnan(column)
        steps, total, number = _pool(step[known], column[known])
        signals[name] = (steps, total / number)
    return signals
