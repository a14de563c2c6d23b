"""The record in plain words: one sentence a record, and one for the whole run. Second stop of the review.

Reads payloads as `foreshock.pipeline.hub` and `foreshock.policies.engine` write them. What it returns is plain
text from an untrusted record: whoever shows it, escapes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from foreshock.remediation.audit import AuditRecord
from foreshock.review.views import RunView, commands, diagnosis, dig, many, marks, number, subject
from foreshock.signals import Floats

TAIL = 50
"""Steps over which a final loss is averaged."""


def say(record: AuditRecord) -> str:
    """One sentence for one record; the kind itself where it is unknown or its payload is not what it should be."""
    try:
        text = " ".join(_SAY[record.kind](record.payload).split())
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
        return record.kind
    return text[0].upper() + text[1:] + "."


def verdict(views: Sequence[RunView], onset: int | None) -> str:
    """What happened, in one sentence: illness, diagnosis, action, recovery, cost."""
    view = subject(views)
    found, seen = diagnosis(view), marks(view, onset)
    if not found:
        alarms = len(view.payloads("alarm.opened"))
        head = f"No diagnosis in {int(np.isfinite(view.loss).sum()):,} steps; " + (
            f"{_count(alarms, 'alarm')}, none of which became one" if alarms else "no alarm"
        )
        return "; ".join([head, *_ends(views, view)]) + "."
    mechanism = str(found.get("mechanism"))
    who = f"The {mechanism}" if mechanism in _NAMED else "Something that matches no known mechanism"
    ill = "fell ill" if mechanism in ("attention", "router") else "went wrong"
    when = f"at step {onset}" if onset is not None else f"between steps {_span(found.get('onset'))} (estimated)"
    parts = [f"{who}{_layers(found.get('layers'), ' of ')} {ill} {when}", f"diagnosed at {found.get('step')}"]
    parts += [f"{_actions(c.get('actions'))} at {step}" for step, c in commands(view)]
    if seen.verified is not None:
        parts.append(f"recovered at {seen.verified}")
    elif seen.applied is not None:
        parts.append(f"not verified as recovered ({dig(view.payloads('outcome'), -1, 'verdict') or 'no verdict yet'})")
    else:
        wanted = dig(view.payloads("decision"), 0, "actions")
        parts.append(f"nothing was done (the policy would have: {_actions(wanted)})" if wanted else "nothing was done")
    return "; ".join([*parts, *_ends(views, view)]) + "."


def final(view: RunView) -> float:
    """Mean loss in nats over the last `TAIL` steps that have one; NaN where none has."""
    known = view.loss[np.isfinite(view.loss)][-TAIL:]
    return float(known.mean()) if known.size else float("nan")


def above(view: RunView, other: RunView) -> Floats:
    """Loss above another run's in nats, step by step (N,), as far as both go."""
    n = min(view.loss.size, other.loss.size)
    both = np.isfinite(view.loss[:n]) & np.isfinite(other.loss[:n])
    return np.where(both, np.where(both, view.loss[:n], 0) - np.where(both, other.loss[:n], 0), np.nan)


def excess(view: RunView, views: Sequence[RunView]) -> float | None:
    """Final loss above the clean run over the same steps; None without a clean run or for itself."""
    clean = next((v for v in views if v.name == "clean"), view)
    gap = above(view, clean)
    gap = gap[np.isfinite(gap)][-TAIL:]
    return float(gap.mean()) if clean is not view and gap.size else None


def _ends(views: Sequence[RunView], view: RunView) -> Iterable[str]:
    if (own := excess(view, views)) is not None:
        yield f"final loss {_gap(own)} the clean run"
    for other in views:
        if other is not view and (gap := excess(other, views)) is not None:
            yield f"{'untreated' if other.name == 'unprotected' else other.label} {_gap(gap)}"


def _gap(nats: float) -> str:
    return f"{abs(nats):.3f} {'above' if nats >= 0 else 'below'}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" + "s" * (n != 1)


def _layers(layers: Any, before: str = " in ") -> str:
    names = [str(x) for x in layers or ()]
    if not names:
        return ""
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"{before}layer{'s' * (len(names) > 1)} {listed}"


def _span(interval: Any) -> str:
    return f"{dig(interval, 0)} and {dig(interval, 1)}"


def _actions(actions: Any) -> str:
    return " and ".join(_action(name, args or {}) for a in actions or () for name, args in a.items()) or "nothing"


def _action(name: str, args: dict[str, Any]) -> str:
    how = args.get("how", args.get("dtype"))
    known = {
        "precision_upcast": f"attention upcast to {how}" if how == "float32" else f"attention switched to {how} softmax",
        "rollback": f"rolled back to step {args['step']}" if "step" in args else "roll back to before the onset",
        "skip_data": f"skipped {args['batches']} batches" if "batches" in args else "skip the window's batches",
        "lr_scale": f"learning rate scaled by {args.get('factor')}",
        "pause": "training asked to stop",
        "notify": "a person told",
    }
    return known.get(name, name.replace("_", " "))


def _why(p: dict[str, Any]) -> str:
    return f": {p['reason']}" if p.get("reason") else ""


def _alarm(p: dict[str, Any]) -> str:
    return (
        f"{p['signal']} left its band ({p['direction']}){_layers(p['layers'])}: {p['statistic']:.3g} against a "
        f"threshold of {p['threshold']:.3g}, {p['severity']}; the change began between {_span(p['onset'])}"
    )


def _diagnosis(p: dict[str, Any]) -> str:
    behind = ", ".join(dict.fromkeys(a["signal"] for a in p["alarms"]))
    return (
        f"diagnosis, {p['confidence']}: {p['mechanism']}{_layers(p['layers'])}, {p['severity']}; "
        f"began between {_span(p['onset'])}; behind it {behind}"
    )


def _decision(p: dict[str, Any]) -> str:
    if p["mode"] != "enforce":
        return f"in mode {p['mode']} nothing is done; it would have been: {_actions(p['actions'])}"
    return f"decided under policy {p['policy']}, rung {p['rung'] + 1}: {_actions(p['actions'])}; approval {p['approval']}"


def _point(p: dict[str, Any]) -> str:
    saved = f"saved, {p['bytes'] / 1e6:.1f} MB in {p['seconds']:.2f} s" if p["finite"] else "not kept: it is not finite"
    return f"recovery point before step {p['step']} {saved}"


_SAY: dict[str, Callable[[dict[str, Any]], str]] = {
    "attempt.started": lambda p: (
        f"attempt {p['attempt']} began at step {p['step']} on {_count(len(p['ranks']), 'rank')}; acting mode by "
        + ", ".join(f"{who}: {mode}" for who, mode in p["mode"].items())
    ),
    "policy.loaded": lambda p: f"policy {p['name']} was loaded from {p['source']}, mode {p['mode']}",
    "alarm.opened": _alarm,
    "alarm.closed": lambda p: f"{p['signal']} is back in its band",
    "diagnosis": _diagnosis,
    "diagnosis.ended": lambda p: f"the diagnosis {p['mechanism']} no longer holds",
    "incident.opened": lambda p: f"incident {p['incident']} was opened under policy {p['policy']}",
    "incident.state": lambda p: f"incident {p['incident']} is {p['state']}{_why(p)}",
    "incident.tried": lambda p: (
        f"incident {p['incident']}, rung {p['rung'] + 1} ({', '.join(p['actions'])}): {p['result']}{_why(p)}"
    ),
    "decision": _decision,
    "approval.granted": lambda p: f"{p['by']} approved {p['decision']}",
    "approval.rejected": lambda p: f"{p['by']} rejected {p['decision']}",
    "approval.expired": lambda p: f"nobody answered for {p['decision']} in time; on expiry: {p['on_expiry']}",
    "approval.ignored": lambda p: f"an answer by {p['by']} for {p['incident']} was ignored{_why(p)}",
    "command.issued": lambda p: f"command {p['id']} went to all ranks: {_actions(p['actions'])}",
    "command.applied": lambda p: f"{_count(len(p['acks']), 'rank')} applied command {p['command']} at step {p['step']}",
    "outcome": lambda p: f"outcome of {p['command']}: {p['verdict']}{_why(p)}",
    "verification.started": lambda p: (
        f"verification of {p['command']} began: {_count(len(p['signals']), 'signal')} against how they stood before the fault"
    ),
    "recovery_point": _point,
    "announcement": lambda p: f"the trainer announced for {p['steps']} steps from step {p['step']}: {p['text']}",
    "human": lambda p: f"{p['who']} said: {p['verb']} {p['argument']}",
    "outlier": lambda p: f"one outlying value of {p['signal']}; logged, nothing more",
    "confirmation": lambda p: (
        f"another experiment {'confirms' if p['confirms'] else 'contradicts'} {p['mechanism']}: {p['text']}"
    ),
    "ack.ignored": lambda p: f"rank {p['rank']} answered {p['command']} ({p['result']}), which was no longer in flight",
}
