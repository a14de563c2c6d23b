"""Open alarms -> named mechanisms, with the reason why the others are ruled out."""

from __future__ import annotations

from collections.abc import Sequence

from foreshock.detectors.signature import ATTENTION, DECIDING, LOSS, SIGNATURES, UPDATE
from foreshock.detectors.types import Alarm, Diagnosis, Interval, Mechanism, Severity

RIVALS = 16
"""Steps within which loss and update alarms count as simultaneous."""


def diagnose(
    alarms: Sequence[Alarm], step: int, outliers: Sequence[tuple[int, str]] = ()
) -> tuple[Diagnosis, ...]:
    """At most two at once: numerics from its own alarm, and the first signature that matches the rest.

    `outliers` are (step, signal) of recent innovations beyond 8 MAD: they tell loss and update apart.
    """
    found = []
    numerics = tuple(a for a in alarms if a.mechanism == "numerics")
    if numerics:
        found.append(_build(Mechanism.NUMERICS, numerics, numerics, step, ()))
    deciding = [a for a in alarms if a.signal in DECIDING and a.mechanism != "numerics"]
    judged, rival = _without_rival(deciding, outliers)
    for signature in SIGNATURES:
        behind = signature.match(judged)
        if behind:
            if signature.mechanism is Mechanism.ATTENTION:
                behind = tuple(a for a in judged if a.signal in ATTENTION)
            found.append(_build(signature.mechanism, behind, deciding, step, rival))
            break
    return tuple(found)


def _without_rival(
    alarms: Sequence[Alarm], outliers: Sequence[tuple[int, str]]
) -> tuple[list[Alarm], tuple[tuple[str, str], ...]]:
    """Of loss and update only the cause is kept: the earlier, or of simultaneous ones the first outlying."""
    first = {name: min((a.step for a in alarms if a.signal == name), default=None) for name in (LOSS, UPDATE)}
    loss, update = first[LOSS], first[UPDATE]
    if loss is None or update is None:
        return list(alarms), ()
    data = loss <= update
    reason = f"loss alarmed at {loss}, the update at {update}"
    if abs(loss - update) <= RIVALS:
        window = [
            o for o in outliers if min(loss, update) - RIVALS <= o[0] <= max(loss, update) and o[1] in first
        ]
        began = min((s for s, _ in window), default=None)
        if began is not None:
            data = (began, LOSS) in window
            reason = f"{LOSS if data else UPDATE} was outlying at {began}, before the other"
    lost = (Mechanism.OPTIMIZER, UPDATE) if data else (Mechanism.DATA, LOSS)
    return [a for a in alarms if a.signal != lost[1]], ((str(lost[0]), reason),)


def _build(
    mechanism: Mechanism,
    alarms: tuple[Alarm, ...],
    deciding: Sequence[Alarm],
    step: int,
    ruled_out: tuple[tuple[str, str], ...],
) -> Diagnosis:
    confirming = [a for a in alarms if a.confirms]
    naming = confirming or alarms
    early = min(a.onset.early for a in alarms)
    reasons = dict(ruled_out)
    for other in (
        Mechanism.ATTENTION,
        Mechanism.ROUTER,
        Mechanism.OPTIMIZER,
        Mechanism.DATA,
        Mechanism.NUMERICS,
    ):
        if other is not mechanism and str(other) not in reasons:
            reasons[str(other)] = _reason(other, mechanism, deciding, bool(confirming))
    return Diagnosis(
        mechanism=mechanism,
        step=step,
        severity=Severity.CRITICAL
        if any(a.severity is Severity.CRITICAL for a in alarms)
        else Severity.WARNING,
        onset=Interval(early, max(early, min(a.onset.late for a in alarms))),
        layers=tuple(sorted({x for a in naming for x in a.layers})),
        heads=tuple(sorted({x for a in naming for x in a.heads})),
        ranks=tuple(sorted({x for a in naming for x in a.ranks})),
        confidence="confirmed" if confirming else "agreeing",
        alarms=alarms,
        ruled_out=tuple(sorted(reasons.items())),
    )


_SIGNALS = {Mechanism.ATTENTION: ATTENTION, Mechanism.OPTIMIZER: (UPDATE,), Mechanism.DATA: (LOSS,)}


def _reason(other: Mechanism, mechanism: Mechanism, deciding: Sequence[Alarm], confirmed: bool) -> str:
    if other is Mechanism.NUMERICS:
        return "every measured value is finite"
    theirs = [a for a in deciding if a.signal in _SIGNALS.get(other, ())]
    if not theirs:
        return "none of its signals is in alarm"
    said = ", ".join(f"{a.signal} at {a.step}" for a in theirs)
    if confirmed:
        return f"{said}, but {mechanism} is confirmed by a rule of its own"
    return f"{said}, too late or alone"
