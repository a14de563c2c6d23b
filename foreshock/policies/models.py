"""What a policy file says, as frozen types. The loader fills them; the engine reads them and nothing else.

A policy is a ladder: each rung is tried if the one before was unavailable or its verification failed. Words
are enumerated (`affected`, `onset`, `window`), so nothing in a file is ever evaluated.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import InitErrorDetails

from foreshock.detectors.types import Mechanism, Severity
from foreshock.policies import units
from foreshock.policies.actions import Action
from foreshock.policies.units import FalseAlarms, ForSamples, InARow, NOf, Strict, flaw, refuse

_PARSE, _DUMP, _SCHEMA = units.word_or_names("diagnosed", noun="signal names")
_ANYWHERE = frozenset({Mechanism.NUMERICS, Mechanism.UNKNOWN})
Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(strict=True, ge=0)]


class Mode(StrEnum):
    """How far a policy may go; the order is the trust ladder."""

    OBSERVE = "observe"
    DRY_RUN = "dry_run"
    ENFORCE = "enforce"

    @staticmethod
    def lowest(*modes: Mode) -> Mode:
        """The acting mode where several people have a say."""
        return min(modes, key=list(Mode).index)


def _one_or_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Match(Strict):
    """Which diagnoses a policy answers: any of the mechanisms, at `severity` or above (None: any)."""

    mechanism: Annotated[
        tuple[Mechanism, ...],
        Field(min_length=1, json_schema_extra=lambda schema: _also_single(schema)),
        BeforeValidator(_one_or_list),
    ]
    severity: Severity | None = None

    def accepts(self, mechanism: Mechanism, severity: Severity) -> bool:
        high_enough = self.severity in (None, Severity.WARNING) or severity is Severity.CRITICAL
        return mechanism in self.mechanism and high_enough


def _also_single(schema: dict[str, Any]) -> None:
    """In the JSON Schema a single word stands beside the list."""
    as_list = {key: schema.pop(key) for key in ("type", "items", "minItems")}
    schema["anyOf"] = [as_list["items"], as_list]


class Approval(Strict):
    """A person's yes before a rung acts, awaited for `expires` steps."""

    expires: units.PositiveSteps
    on_expiry: Literal["nothing", "next_rung", "act"] = "nothing"


class Rung(Strict):
    """Actions that are applied together, at one step, in this order."""

    do: Annotated[tuple[Action, ...], Field(min_length=1)]
    approval: Approval | None = None

    @property
    def changes_training(self) -> bool:
        return any(action.spec.changes_training for action in self.do)

    @model_validator(mode="after")
    def _approval_has_a_subject(self) -> Rung:
        if self.approval and not self.changes_training:
            problem, suggestion = "an approval on a rung that only notifies", "remove `approval`"
            refuse("Rung", [flaw(("approval", "[key]"), problem, suggestion)])
        return self


class Verify(Strict):
    """How success is judged, against the reference frozen when the alarm latched."""

    signals: Annotated[Literal["diagnosed"] | tuple[str, ...], _PARSE, _DUMP, _SCHEMA] = "diagnosed"
    initial_delay: units.Steps = 96
    """Steps; the engine never starts before three windows of the probe."""
    interval: units.PositiveSteps = 8
    band: units.Sigma = 3.0
    """Marginal standard deviations of the reference residual."""
    recovered: units.Row = InARow(5)
    failed: units.Share = NOf(3, 8)
    timeout: units.PositiveSteps = 400

    @model_validator(mode="after")
    def _time_enough(self) -> Verify:
        needed = max(1, (self.recovered.n - 1) * self.interval) + self.initial_delay
        if self.timeout < needed:
            problem = f"'{self.recovered}' cannot be counted between initial_delay and timeout"
            refuse("Verify", [flaw(("timeout",), problem, f"allow at least `{needed} steps`")])
        return self


class Policy(Strict):
    """One kind of fault and the ladder against it."""

    name: units.Name
    summary: Text | None = None
    references: tuple[Text, ...] = ()
    false_positives: tuple[Text, ...] = ()
    match: Match
    for_: units.Hold = Field(default=ForSamples(1), alias="for")
    """How long a diagnosis must hold before the first rung."""
    group_by: tuple[Literal["mechanism"], ...] = ("mechanism",)
    inhibited_by: tuple[str, ...] = ()
    """Policies that hold this one back while they are confirming to verifying."""
    ladder: Annotated[tuple[Rung, ...], Field(min_length=1)]
    verify: Verify = Verify()
    cooldown: units.Steps = 0
    """Steps after an incident closes in which this policy does not act."""
    notify: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _ladder_can_be_climbed(self) -> Policy:
        flaws: list[InitErrorDetails] = []
        for i, rung in enumerate(self.ladder):
            passed_on = rung.approval is not None and rung.approval.on_expiry == "next_rung"
            last = i == len(self.ladder) - 1
            if last and passed_on:
                where: units.Where = ("ladder", i, "approval", "on_expiry")
                flaws.append(flaw(where, "there is no next rung", "write `nothing` or `act`, or add a rung"))
            if not last and not passed_on and any(action.name == "pause" for action in rung.do):
                problem = "never reached: the rung before it pauses the run"
                flaws.append(flaw(("ladder", i + 1), problem, "put `pause` last"))
            for j, action in enumerate(rung.do):
                module = action.spec.module
                if module and not {module, *_ANYWHERE} & set(self.match.mechanism):
                    problem = f"{action.name} repairs the {module}, which this policy never matches"
                    where = ("ladder", i, "do", j, action.name, "[key]")
                    flaws.append(flaw(where, problem, f"add `{module}` to `match: mechanism`, or remove it"))
        refuse("Policy", flaws)
        return self


class Receiver(Strict):
    """Where notifications go: an environment variable holds the URL, so that no file holds a secret."""

    url_env: units.EnvName


class Budget(Strict):
    """What the whole run may spend."""

    actions: Count = 6
    rollbacks: Count = 2


class PolicySet(Strict):
    """One policy file."""

    api_version: Literal["foreshock/v1"] = Field(alias="apiVersion")
    name: units.Name
    mode: Mode = Mode.OBSERVE
    """Can only lower what `watch(allow=...)` permits."""
    false_alarms: units.AlarmBudget = FalseAlarms(1, 100_000)
    budget: Budget = Budget()
    group_wait: units.Steps = 8
    receivers: dict[units.Name, Receiver] = Field(default_factory=dict)
    policies: Annotated[tuple[Policy, ...], Field(min_length=1)]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON in the words of the file; `PolicySet.model_validate` gives the same set back."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    @model_validator(mode="after")
    def _names_meet(self) -> PolicySet:
        flaws: list[InitErrorDetails] = []
        seen: set[str] = set()
        taken: set[tuple[Mechanism, Severity]] = set()
        inhibitors = {policy.name: policy.inhibited_by for policy in self.policies}

        def unknown(noun: str, name: str, known: Iterable[str], *where: str | int) -> None:
            problem = f"unknown {noun} '{name}'"
            flaws.append(flaw(("policies", *where), problem, units.nearest(name, list(known))))

        for i, policy in enumerate(self.policies):
            answers = {(m, s) for m in policy.match.mechanism for s in Severity if policy.match.accepts(m, s)}
            if policy.name in seen:
                problem = f"a second policy named '{policy.name}'"
                flaws.append(flaw(("policies", i, "name"), problem, "give each policy a name of its own"))
            elif answers <= taken:
                problem = f"'{policy.name}' never matches: the policies before it take all of its diagnoses"
                flaws.append(flaw(("policies", i, "match"), problem, "move it up, or narrow those before it"))
            seen.add(policy.name)
            taken |= answers
            for j, name in enumerate(policy.notify):
                if name not in self.receivers:
                    unknown("receiver", name, self.receivers, i, "notify", j)
            for j, name in enumerate(policy.inhibited_by):
                if name not in inhibitors:
                    unknown("policy", name, inhibitors, i, "inhibited_by", j)
        if not flaws:
            try:
                TopologicalSorter(inhibitors).prepare()
            except CycleError as ring:
                first = min(i for i, policy in enumerate(self.policies) if policy.name in ring.args[1])
                problem = f"policies hold each other back: {' by '.join(reversed(ring.args[1]))}"
                where = ("policies", first, "inhibited_by")
                flaws.append(flaw(where, problem, "they would wait for ever: remove one of the names"))
        refuse("PolicySet", flaws)
        return self
