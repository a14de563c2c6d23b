"""What a policy file says, as frozen types. The loader fills them; the engine reads them and nothing else.

A policy is a ladder: each rung is tried if the one before was unavailable or its verification failed. Words are
enumerated (`affected`, `onset`, `window`), so nothing in a file is ever evaluated.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import InitErrorDetails

from foreshock.detectors.types import Mechanism, Severity
from foreshock.policies.actions import Action
from foreshock.policies.units import (
    AlarmBudget,
    EnvName,
    FalseAlarms,
    ForSamples,
    Hold,
    InARow,
    Name,
    NOf,
    PositiveSteps,
    Row,
    Share,
    Sigma,
    Steps,
    Strict,
    Where,
    flaw,
    nearest,
    refuse,
    word_or_names,
)

_DIAGNOSED, _SIGNALS = word_or_names("diagnosed", noun="signal names")
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

    expires: PositiveSteps
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
            problem = "an approval on a rung that only notifies"
            refuse("Rung", [flaw(("approval", "[key]"), problem, "remove `approval`, or add an action to `do`")])
        return self


class Verify(Strict):
    """How success is judged, against the reference frozen when the alarm latched."""

    signals: Annotated[Literal["diagnosed"] | tuple[str, ...], _DIAGNOSED, _SIGNALS] = "diagnosed"
    initial_delay: Steps = 96
    """Steps; the engine never starts before three windows of the probe."""
    interval: PositiveSteps = 8
    band: Sigma = 3.0
    """Marginal standard deviations of the reference residual."""
    recovered: Row = InARow(5)
    failed: Share = NOf(3, 8)
    timeout: PositiveSteps = 400

    @model_validator(mode="after")
    def _time_enough(self) -> Verify:
        needed = self.initial_delay + (self.recovered.n - 1) * self.interval
        if self.timeout <= self.initial_delay:
            problem = f"timeout ({self.timeout} steps) is not after initial_delay ({self.initial_delay} steps)"
        elif self.timeout < needed:
            problem = f"timeout ({self.timeout} steps) comes before '{self.recovered}' can be counted"
        else:
            return self
        refuse("Verify", [flaw(("timeout",), problem, f"allow at least `{max(needed, self.initial_delay + 1)} steps`")])
        return self


class Policy(Strict):
    """One kind of fault and the ladder against it."""

    name: Name
    summary: Text | None = None
    references: tuple[Text, ...] = ()
    false_positives: tuple[Text, ...] = ()
    match: Match
    for_: Hold = Field(default=ForSamples(1), alias="for")
    """How long a diagnosis must hold before the first rung."""
    group_by: tuple[Literal["mechanism"], ...] = ("mechanism",)
    inhibited_by: tuple[str, ...] = ()
    """Policies that hold this one back while they are confirming to verifying."""
    ladder: Annotated[tuple[Rung, ...], Field(min_length=1)]
    verify: Verify = Verify()
    cooldown: Steps = 0
    """Steps after an incident closes in which this policy does not act."""
    notify: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _ladder_can_be_climbed(self) -> Policy:
        flaws = []
        for i, rung in enumerate(self.ladder):
            passed_on = rung.approval is not None and rung.approval.on_expiry == "next_rung"
            last = i == len(self.ladder) - 1
            if last and passed_on:
                where = ("ladder", i, "approval", "on_expiry")
                flaws.append(flaw(where, "there is no next rung", "write `nothing` or `act`, or add a rung"))
            if not last and not passed_on and any(action.name == "pause" for action in rung.do):
                flaws.append(
                    flaw(("ladder", i + 1), "never reached: the rung before it pauses the run", "put `pause` last")
                )
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

    url_env: EnvName


class Budget(Strict):
    """What the whole run may spend."""

    actions: Count = 6
    rollbacks: Count = 2


class PolicySet(Strict):
    """One policy file."""

    api_version: Literal["foreshock/v1"] = Field(alias="apiVersion")
    name: Name
    mode: Mode = Mode.OBSERVE
    """Can only lower what `watch(allow=...)` permits."""
    false_alarms: AlarmBudget = FalseAlarms(1, 100_000)
    budget: Budget = Budget()
    group_wait: Steps = 8
    receivers: dict[Name, Receiver] = {}
    policies: Annotated[tuple[Policy, ...], Field(min_length=1)]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON in the words of the file; `PolicySet.model_validate` gives the same set back."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    @model_validator(mode="after")
    def _names_meet(self) -> PolicySet:
        flaws, taken = [], set[tuple[Mechanism, Severity]]()
        inhibitors = {policy.name: policy.inhibited_by for policy in self.policies}
        for i, policy in enumerate(self.policies):
            answers = {(m, s) for m in policy.match.mechanism for s in Severity if policy.match.accepts(m, s)}
            if answers <= taken:
                problem = f"'{policy.name}' never matches: the policies before it take all of its diagnoses"
                flaws.append(flaw(("policies", i, "match"), problem, "move it up, or narrow those before it"))
            taken |= answers
            if any(policy.name == other.name for other in self.policies[:i]):
                problem = f"a second policy named '{policy.name}'"
                flaws.append(flaw(("policies", i, "name"), problem, "give each policy a name of its own"))
            for j, name in enumerate(policy.notify):
                if name not in self.receivers:
                    flaws.append(_unknown("receiver", name, list(self.receivers), ("policies", i, "notify", j)))
            for j, name in enumerate(policy.inhibited_by):
                where = ("policies", i, "inhibited_by", j)
                if name not in inhibitors:
                    flaws.append(_unknown("policy", name, list(inhibitors), where))
                elif name == policy.name:
                    flaws.append(flaw(where, "a policy cannot inhibit itself", "remove its own name"))
        refuse("PolicySet", flaws or _cycle(inhibitors, self.policies))
        return self


def _unknown(noun: str, name: str, known: list[str], where: Where) -> InitErrorDetails:
    return flaw(where, f"unknown {noun} '{name}'", nearest(name, known))


def _cycle(inhibitors: dict[str, tuple[str, ...]], policies: tuple[Policy, ...]) -> list[InitErrorDetails]:
    """Policies that hold each other back would wait for ever: the first such ring, at the name that closes it."""

    def ring(path: tuple[str, ...]) -> tuple[str, ...] | None:
        for name in inhibitors[path[-1]]:
            if name == path[0]:
                return path
            if name not in path and (found := ring((*path, name))):
                return found
        return None

    for i, policy in enumerate(policies):
        if path := ring((policy.name,)):
            problem = f"policies inhibit each other: {' <- '.join((*path, path[0]))}"
            return [flaw(("policies", i, "inhibited_by"), problem, "break the ring: remove one of these names")]
    return []
