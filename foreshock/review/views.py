"""A run as a person looks at it: losses, signals and the record as plain arrays. First stop of the review.

Reads a run directory from outside, never writes to it, and hands `RunView` and `Marks` to words, figures
and report. The record is shown even where someone edited it, so nothing here trusts a payload's shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foreshock.remediation.audit import AuditRecord
from foreshock.signals import Floats

Series = tuple[NDArray[np.int64], Floats]
"""Steps, ascending, and the values measured at them."""


@dataclass(frozen=True, eq=False)
class RunView:
    """One run as it went. The view named "clean" is what the others are compared with.

    `loss` float64 (N,) in nats by trainer step, NaN where there is none; `signals` by str(SignalKey);
    `directory` is where the run's store lies, None where there is none to verify.
    """

    name: str
    label: str
    loss: Floats
    signals: dict[str, Series]
    audit: list[AuditRecord]
    directory: str | None = None

    def payloads(self, kind: str) -> list[dict[str, Any]]:
        """What was recorded under `kind`, in order."""
        return [record.payload for record in self.audit if record.kind == kind]


@dataclass(frozen=True, slots=True)
class Marks:
    """Trainer steps of the story: true onset where known, first alarm, first action, verified recovery."""

    onset: int | None = None
    alarm: int | None = None
    applied: int | None = None
    verified: int | None = None


def dig(value: Any, *path: str | int) -> Any:
    """What lies at `path` in a payload, None where nothing does."""
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def many(value: Any, *path: str | int) -> list[Any]:
    """The list at `path`, empty where there is none."""
    found = dig(value, *path)
    return found if isinstance(found, list) else []


def number(value: Any, *path: str | int) -> int | None:
    """The whole number at `path`, or None."""
    found = dig(value, *path)
    return int(found) if isinstance(found, (int, float)) and abs(found) < 2**53 else None


def commands(view: RunView) -> list[tuple[int | None, dict[str, Any]]]:
    """(step, command as issued) of each one that all ranks applied, in order."""
    issued = {str(c.get("id")): c for c in view.payloads("command.issued")}
    return [(number(p, "step"), issued.get(str(p.get("command")), {})) for p in view.payloads("command.applied")]


def diagnosis(view: RunView) -> dict[str, Any]:
    """The diagnosis that was acted on, else the first one; {} where there is none."""
    incident = dig(commands(view), 0, 1, "incident")
    acted = [p.get("diagnosis") for p in view.payloads("incident.opened") if p.get("incident") == incident]
    found = dig(acted, 0) or dig(view.payloads("diagnosis"), 0)
    return found if isinstance(found, dict) else {}


def subject(views: Sequence[RunView]) -> RunView:
    """The run that the story is about: the last one acted on, else diagnosed, else the last."""
    return max(enumerate(views), key=lambda v: (bool(commands(v[1])), bool(diagnosis(v[1])), v[0]))[1]


def marks(view: RunView, onset: int | None = None) -> Marks:
    """Alarm: the first one behind `diagnosis(view)`. Applied: the first action.

    Verified: where an incident was closed as recovered. The record counts that in attempted steps; the
    trainer's step follows from the step of the last action, or of the point that a rollback went back to.
    """
    alarms = [s for a in many(diagnosis(view), "alarms") if (s := number(a, "step")) is not None]
    done = commands(view)
    verified = began = None
    nth = -1
    for record in view.audit:
        clock, state = number(record.payload, "clock"), record.payload.get("state")
        nth += record.kind == "command.applied"
        if record.kind == "incident.state" and state == "verifying":
            began = clock
        elif record.kind == "incident.state" and state == "recovered" and began is not None and nth >= 0:
            back = [s for a in many(done[nth][1], "actions") if (s := number(a, "rollback", "step")) is not None]
            here = back[0] - 1 if back else done[nth][0]
            verified = None if here is None or clock is None else here + clock - began
            break
    return Marks(onset, min(alarms, default=None), done[0][0] if done else None, verified)


def by_layer(view: RunView, signal: str) -> dict[int, tuple[NDArray[np.int64], Floats, Floats]]:
    """Per layer: steps, and over the heads measured at each of them the sum and the number of values."""
    heads: dict[int, list[Series]] = {}
    for name, series in view.signals.items():
        stem, _, place = name.partition("[L")
        layer = place.rstrip("]").partition(".")[0]
        if stem == signal and layer.isdecimal():
            heads.setdefault(int(layer), []).append(series)
    return {
        layer: _at_steps(np.concatenate([s for s, _ in parts]), np.concatenate([v for _, v in parts]))
        for layer, parts in sorted(heads.items())
    }


def from_run(
    directory: Path, name: str, label: str, losses: Floats | None = None, before: Path | None = None
) -> RunView:
    """Read one run's directory. `losses` (N,) in nats by step; default: the signal `symptom.loss`.

    `before` is the run that this one was forked from, whose signals lead up to it. Where a step ran twice, the
    newest attempt and timeline count; values of several ranks are averaged. Raises
    foreshock.pipeline.store.StoreError where there is no readable record.
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


def _at_steps(steps: NDArray[np.int64], values: Floats) -> tuple[NDArray[np.int64], Floats, Floats]:
    unique, where = np.unique(steps, return_inverse=True)
    n = unique.size
    return unique, np.bincount(where, values, n), np.bincount(where, minlength=n).astype(np.float64)


def _signals(directories: Sequence[Path]) -> dict[str, Series]:
    import pyarrow as pa

    from foreshock.pipeline.signal_files import PLACE, read

    parts = [read(d) for d in directories if any((d / "signals").glob("part-*.parquet"))]
    if not parts:
        return {}
    table = pa.concat_tables(parts, promote_options="default")
    step, timeline, attempt = (table[name].to_numpy().astype(np.int64) for name in ("step", "timeline", "attempt"))
    age = attempt << 32 | timeline
    order = np.lexsort((age, step))
    last = np.flatnonzero(np.diff(step[order], append=-1))
    rows = order[age[order] == np.repeat(age[order][last], np.diff(last, prepend=-1))]
    signals = {}
    for name in set(table.column_names) - {"run", *PLACE}:
        column = np.asarray(table[name].to_numpy(), np.float64)[rows]
        known = ~np.isnan(column)
        steps, total, n = _at_steps(step[rows][known], column[known])
        signals[name] = (steps, total / n)
    return signals
