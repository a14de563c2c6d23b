"""A policy set in plain English, for the person who has to agree to it before it may act."""

from __future__ import annotations

from collections.abc import Iterator

from foreshock.detectors.types import Severity
from foreshock.policies.actions import Action
from foreshock.policies.models import Mode, Policy, PolicySet
from foreshock.policies.units import plural

_MODES = {
    Mode.OBSERVE: "it watches and records, and changes nothing",
    Mode.DRY_RUN: "it says what it would have done, and changes nothing",
    Mode.ENFORCE: "it acts, as far as watch(allow=...) permits",
}
_EXPIRY = {"nothing": "nothing is done", "next_rung": "the next rung is tried", "act": "it acts all the same"}


def explain(policy_set: PolicySet) -> str:
    """Per policy: when it matches, what it tries and the cost, how success is judged, which limits hold."""
    return "\n".join(_lines(policy_set)) + "\n"


def _lines(policy_set: PolicySet) -> Iterator[str]:
    actions = plural(policy_set.budget.actions, "action")
    rollbacks = plural(policy_set.budget.rollbacks, "rollback")
    yield f"{policy_set.name}: mode {policy_set.mode}, {_MODES[policy_set.mode]}."
    yield f"Budget: {policy_set.false_alarms} in false alarms; {actions} a run, {rollbacks} among them."
    yield f"It waits {plural(policy_set.group_wait, 'step')} for related diagnoses; a NaN does not wait."
    for i, policy in enumerate(policy_set.policies, 1):
        yield f"\n{i}. {policy.name}" + (f": {policy.summary}" if policy.summary else "")
        yield from (f"   {label:<9}{text}." for label, text in _policy(policy))


def _policy(policy: Policy) -> Iterator[tuple[str, str]]:
    severity = " of severity critical" if policy.match.severity == Severity.CRITICAL else ""
    yield (
        "When:",
        f"a diagnosis of {' or '.join(policy.match.mechanism)}{severity} has held for {policy.for_}",
    )
    if policy.inhibited_by:
        yield "", f"It waits while {' or '.join(policy.inhibited_by)} is at work"
    if policy.false_positives:
        yield "", f"False positives: {', '.join(policy.false_positives)}"
    for i, rung in enumerate(policy.ladder):
        yield "Then:" if i else "First:", " + ".join(_action(action) for action in rung.do)
        for action in rung.do:
            yield "", f"{action.name} touches {action.spec.touches}"
            yield "", f"  Cost: {action.spec.cost.rstrip('.')}"
            yield "", f"  Undo: {action.spec.undo.rstrip('.')}"
        if rung.approval:
            expires = plural(rung.approval.expires, "step")
            yield "", f"Needs a person's yes; after {expires} without one {_EXPIRY[rung.approval.on_expiry]}"
    if any(rung.changes_training for rung in policy.ladder):
        verify, signals = policy.verify, policy.verify.signals
        judged = "the diagnosed signals" if signals == "diagnosed" else ", ".join(signals)
        start, every = plural(verify.initial_delay, "step"), plural(verify.interval, "step")
        yield (
            "Success:",
            f"{judged} within {verify.band:g} sigma of the healthy reference, {verify.recovered}",
        )
        yield "", f"Looked at every {every}, from {start} after the action"
        yield (
            "",
            f"Out of it in {verify.failed}: the next rung. No answer in {plural(verify.timeout, 'step')}: it ends there",
        )
    rest = f"rests {plural(policy.cooldown, 'step')}" if policy.cooldown else "does not rest"
    yield "Limits:", f"after an action it {rest}; the budget of the run holds"
    if policy.notify:
        yield "Tells:", f"{', '.join(policy.notify)} (in this version: lines of the log)"
    if policy.references:
        yield "Why:", ", ".join(policy.references)


def _action(action: Action) -> str:
    arguments = action.arguments.model_dump(mode="json", exclude_none=True)
    return f"{action.name}({', '.join(f'{key} {value}' for key, value in arguments.items())})"
