"""A policy set in plain English, for the person who has to agree to it before it may act."""

from __future__ import annotations

from collections.abc import Iterator

from foreshock.policies.actions import Action
from foreshock.policies.models import Mode, Policy, PolicySet, Rung, Verify

_MODES = {
    Mode.OBSERVE: "it watches and records, and changes nothing",
    Mode.DRY_RUN: "it says what it would have done, and changes nothing",
    Mode.ENFORCE: "it acts, as far as watch(allow=...) permits",
}
_EXPIRY = {"nothing": "nothing is done", "next_rung": "the next rung is tried", "act": "it acts all the same"}


def explain(policy_set: PolicySet) -> str:
    """When each policy matches, what it tries in order, what that costs, how success is judged, what limits hold."""
    return "\n".join(_lines(policy_set)) + "\n"


def _lines(policy_set: PolicySet) -> Iterator[str]:
    budget = policy_set.budget
    yield f"{policy_set.name}: mode {policy_set.mode}, {_MODES[policy_set.mode]}."
    yield f"Thresholds keep false alarms at {policy_set.false_alarms}, all signals together."
    yield f"A run may spend {_count(budget.actions, 'action')}, {_count(budget.rollbacks, 'rollback')} among them."
    yield (
        f"Before the first action it waits {_count(policy_set.group_wait, 'step')} for diagnoses that belong "
        "together; non-finite numbers do not wait. One command is in flight at a time."
    )
    for i, policy in enumerate(policy_set.policies, 1):
        yield ""
        yield f"{i}. {policy.name}" + (f": {policy.summary}" if policy.summary else "")
        yield from ("   " + line for line in _policy(policy))


def _policy(policy: Policy) -> Iterator[str]:
    severity = f" of severity {policy.match.severity} or above" if policy.match.severity else ""
    yield f"When:    a diagnosis of {' or '.join(policy.match.mechanism)}{severity} has held for {policy.for_}."
    if policy.inhibited_by:
        yield f"         It waits while {' or '.join(policy.inhibited_by)} is at work."
    if policy.false_positives:
        yield f"         Can be mistaken: {', '.join(policy.false_positives)}."
    for i, rung in enumerate(policy.ladder, 1):
        yield from _rung(i, rung)
    if any(rung.changes_training for rung in policy.ladder):
        yield from _verify(policy.verify)
    yield (
        f"Limits:  after an action it rests {_count(policy.cooldown, 'step')}; the run's budget holds."
        if policy.cooldown
        else "Limits:  no rest between actions; the run's budget holds."
    )
    if policy.notify:
        yield f"Tells:   {', '.join(policy.notify)}."
    if policy.references:
        yield f"Why:     {', '.join(policy.references)}."


def _rung(number: int, rung: Rung) -> Iterator[str]:
    yield f"{'First' if number == 1 else 'Then'}:".ljust(9) + " + ".join(_action(action) for action in rung.do)
    for action in rung.do:
        yield f"         {action.name} touches {action.spec.touches}. {action.spec.cost} {action.spec.undo}"
    if rung.approval:
        expires = _count(rung.approval.expires, "step")
        yield f"         Needs a person's approval; after {expires} without one {_EXPIRY[rung.approval.on_expiry]}."


def _action(action: Action) -> str:
    arguments = action.arguments.model_dump(mode="json", exclude_none=True)
    return f"{action.name}({', '.join(f'{key} {value}' for key, value in arguments.items())})"


def _verify(verify: Verify) -> Iterator[str]:
    signals = "the diagnosed signals" if verify.signals == "diagnosed" else ", ".join(verify.signals)
    yield (
        f"Success: {signals} within {verify.band:g} sigma of the reference, {verify.recovered}, looked at every "
        f"{_count(verify.interval, 'step')} from {_count(verify.initial_delay, 'step')} after the action."
    )
    yield (
        f"         Out of it in {verify.failed}, or no answer in {_count(verify.timeout, 'step')}: the next rung."
    )


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'s' * (n != 1)}"
