"""The record in plain words: one sentence a record, and one for the whole run. Second stop of the review.

Reads payloads as `foreshock.pipeline.hub` and `foreshock.policies.engine` write them. What it returns is
plain text from an untrusted record: who shows it, escapes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from foreshock.remediation.audit import AuditRecord
from foreshock.review.views import MISSHAPEN, RunView, Story, story, subject
from foreshock.signals import Floats

TAIL = 50
"""Steps over which a final loss is averaged."""

SENTENCES = {
    "attempt.started": "Attempt {attempt} began at step {step}; acting mode by {mode}",
    "policy.loaded": "Policy {name} was loaded from {source}, mode {mode}",
    "alarm.opened": "Signal {signal} left its band ({direction}){layers}: {statistic} against the threshold "
    "{threshold}, {severity}; the change began between steps {onset}",
    "alarm.closed": "The alarm of {signal} is over{reason}",
    "seen": "{signal} is not right{reason}",
    "diagnosis": "Diagnosis, {confidence}: {mechanism}{layers}, {severity}; it began between steps {onset}; "
    "behind it {alarms}",
    "diagnosis.ended": "The diagnosis {mechanism} no longer holds",
    "incident.opened": "Incident {incident} was opened under policy {policy}",
    "incident.state": "Incident {incident} is now {state}{reason}",
    "incident.tried": "Incident {incident}, rung {rung} ({actions}): {result}{reason}",
    "decision": "Decision {id} in mode {mode} (only enforce acts), approval {approval}: {actions}",
    "approval.granted": "{by} approved {decision}",
    "approval.rejected": "{by} rejected {decision}",
    "approval.expired": "Nobody answered for {decision} in time; on expiry: {on_expiry}",
    "approval.ignored": "An answer by {by} for {decision} was ignored{reason}",
    "command.issued": "Command {id} went to all ranks: {actions}",
    "command.applied": "All ranks applied command {command} at step {step}",
    "outcome": "Outcome of command {command}: {verdict}{reason}",
    "verification.started": "Verification of command {command} began, against the signals before the fault",
    "recovery_point": "Recovery point before step {step}: {bytes:,} bytes, {seconds:.2f} s, finite: {finite}",
    "announcement": "The trainer announced for {steps} steps from step {step}: {text}",
    "human": "{who} said: {verb} {argument}",
    "outlier": "One outlying value of {signal}; logged, nothing more",
    "confirmation": "Another experiment on {mechanism}, confirms: {confirms}; {text}",
    "ack.ignored": "Rank {rank} answered {result} to {command}, which was no longer in flight",
}


def say(record: AuditRecord) -> str:
    """One sentence for one record; its kind where that is unknown, or the payload not what it should be."""
    try:
        p = record.payload
        shown = {name: _SHOWN[name](p[name]) for name in _SHOWN.keys() & p.keys()}
        return " ".join(SENTENCES[record.kind].format_map({**p, **shown}).split()) + "."
    except MISSHAPEN:
        return str(record.kind)


def verdict(views: Sequence[RunView], onset: int | None) -> str:
    """What happened, in one sentence: illness, diagnosis, action, recovery, and what it cost."""
    view = subject(views)
    try:
        parts = _course(view, story(view), onset)
    except MISSHAPEN:
        parts = ["The record is misshapen"]
    if (own := excess(view, views)) is not None:
        parts.append(f"final loss {_gap(own)} the clean run")
    others = [(v, gap) for v in views if v is not view and (gap := excess(v, views)) is not None]
    parts += [f"{'untreated' if v.name == 'unprotected' else v.label} {_gap(gap)}" for v, gap in others]
    return "; ".join(parts) + "."


def final(view: RunView) -> float:
    """Mean loss in nats over the last `TAIL` steps that have one; NaN where none has."""
    known = view.loss[np.isfinite(view.loss)][-TAIL:]
    return float(known.mean()) if known.size else float("nan")


def above(view: RunView, views: Sequence[RunView]) -> Floats | None:
    """Loss above the clean run in nats, by step as far as both go; None without a clean run or for itself."""
    clean = next((v for v in views if v.name == "clean"), view)
    n = min(view.loss.size, clean.loss.size)
    a, b = view.loss[:n], clean.loss[:n]
    both = np.isfinite(a) & np.isfinite(b)
    return None if clean is view else np.subtract(a, b, out=np.full(n, np.nan), where=both)


def excess(view: RunView, views: Sequence[RunView]) -> float | None:
    """Mean of `above` over its last `TAIL` steps; None where there is nothing to compare."""
    gap = above(view, views)
    known = gap[np.isfinite(gap)][-TAIL:] if gap is not None else np.zeros(0)
    return float(known.mean()) if known.size else None


def _course(view: RunView, told: Story, onset: int | None) -> list[str]:
    found = told.diagnosis
    if not found:
        n = view.count("alarm.opened")
        return [
            f"No diagnosis in {np.isfinite(view.loss).sum():,} steps",
            f"alarms: {n}" if n else "no alarm",
        ]
    mechanism = str(found["mechanism"])
    who = "Something without a known mechanism" if mechanism == "unknown" else f"The {mechanism}"
    ill = "fell ill" if mechanism in ("attention", "router") else "went wrong"
    when = f"at step {onset}" if onset is not None else f"between steps {_span(found['onset'])}, as estimated"
    place = _layers(found["layers"]).replace(" in ", " of ")
    parts = [f"{who}{place} {ill} {when}", f"diagnosed at {found['step']}"]
    parts += [f"{_actions(actions)} at {step}" for step, actions in told.done]
    if told.verified is not None:
        parts.append(f"recovered at {told.verified}")
    elif told.done:
        parts.append(f"recovery not verified ({told.outcome})")
    else:
        parts.append(
            "nothing was done" + (f" (it would have been: {_actions(told.wanted)})" if told.wanted else "")
        )
    return parts + ([f"{told.incidents} incidents in all"] if told.incidents > 1 else [])


def _gap(nats: float) -> str:
    return f"{abs(nats):.3f} {'above' if nats >= 0 else 'below'}"


def _layers(layers: list[int]) -> str:
    names = [str(layer) for layer in layers]
    listed = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return f" in layer{'s' * (len(names) > 1)} {listed}" if names else ""


def _span(interval: list[int]) -> str:
    return f"{interval[0]} and {interval[1]}"


def _actions(actions: list[Any]) -> str:
    pairs = (pair for a in actions for pair in (a.items() if isinstance(a, dict) else [(a, {})]))
    return " and ".join(_action(name, given) for name, given in pairs)


def _action(name: str, given: dict[str, Any]) -> str:
    how = {"float32": "upcast to float32", "stabilised": "given the stabilised softmax"}
    back = f"step {given['step']}" if "step" in given else "before the onset"
    known = {
        "precision_upcast": f"attention {how.get(given.get('how', given.get('dtype', '')), 'upcast')}",
        "rollback": f"rolled back to {back}",
        "skip_data": f"{given.get('batches', 'some')} batches skipped",
        "lr_scale": f"learning rate scaled by {given.get('factor', 'a factor')}",
        "pause": "training asked to stop",
        "notify": "people told",
    }
    return known.get(name) or name.replace("_", " ")


def _short(x: Any) -> str:
    return f"{x:.3g}" if isinstance(x, float) else str(x)


_SHOWN: dict[str, Callable[[Any], Any]] = {
    "layers": _layers,
    "onset": _span,
    "actions": _actions,
    "statistic": _short,
    "threshold": _short,
    "reason": lambda reason: f": {reason}" if reason else "",
    "alarms": lambda alarms: ", ".join(dict.fromkeys(alarm["signal"] for alarm in alarms)),
    "mode": lambda mode: ", ".join(f"{k} {v}" for k, v in mode.items()) if isinstance(mode, dict) else mode,
    "rung": lambda rung: rung + 1,
}
"""How a payload's field reads in a sentence, where not as it stands."""
