"""The decision engine: diagnoses in, decisions out. A plain state machine (states: `State`), no clock of its own.

The hub calls `advance` once a closed step. `clock` counts attempted steps and never goes back, so budgets,
cooldowns and expiries survive a rewind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from foreshock.detectors.types import Diagnosis, Mechanism
from foreshock.policies.actions import ACTIONS
from foreshock.policies.models import Mode, Policy, PolicySet, Rung
from foreshock.policies.types import AGAIN, Decision, Incident, State, Tried
from foreshock.policies.units import ForSamples

MODULES = (Mechanism.ATTENTION, Mechanism.ROUTER)
"""Mechanisms with a module of their own act before symptoms."""

REMEMBERED = 50

WhyNot = Callable[[str, dict[str, Any], Incident], str | None]
"""Why an action cannot be done for an incident, or None where it can."""


@dataclass
class Ruling:
    """What one call decided: audit entries in order, decisions to issue as commands, texts for receivers."""

    audit: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    issue: list[Decision] = field(default_factory=list)
    notify: list[tuple[tuple[str, ...], str]] = field(default_factory=list)


@dataclass
class Spent:
    """The budget used so far in the run, and the clock at which each policy's last acting incident closed."""

    actions: int = 0
    rollbacks: int = 0
    last: dict[str, int] = field(default_factory=dict)


class Engine:
    """One run's policies at work.

    `unavailable(name, arguments, incident)` is asked before every rung. Nothing here raises on a bad
    diagnosis; a policy set that loaded is one that runs.
    """

    def __init__(self, policies: PolicySet, unavailable: WhyNot) -> None:
        self.policies = policies
        self.unavailable = unavailable
        self.mode = Mode.OBSERVE
        self.incidents: list[Incident] = []
        """Open ones, and the last `REMEMBERED` closed ones."""
        self.opened = 0
        self.settled: set[tuple[str, str]] = set()
        """(policy, mechanism) whose incident ended unhealed: no new one until the diagnosis was gone once."""
        self.spent = Spent()
        self._ruling = Ruling()

    # -- what the hub calls -------------------------------------------------------------------------------

    def advance(self, clock: int, diagnoses: Sequence[Diagnosis]) -> Ruling:
        """Take in the diagnoses that hold at this clock and rule on every open incident."""
        self.settled &= {(p.name, str(d.mechanism)) for d in diagnoses if (p := self._policy_for(d))}
        self._match(clock, diagnoses)
        for incident in self._open():
            self._age(incident, clock, diagnoses)
        for incident in self._in_order():
            if incident.state is State.WAITING and not self._held(incident, clock):
                self._decide(incident, clock)
        return self._flush()

    def answer(self, decision_id: str, approve: bool, who: str, clock: int) -> Ruling:
        """A person's word on one pending decision: said twice, it does not reach the next rung.

        An approved rung goes back through the same gate as any other: mode, budget, rivals, availability.
        """
        waiting = [i for i in self._open() if i.state is State.AWAITING]
        incident = next((i for i in waiting if i.decision is not None and i.decision.id == decision_id), None)
        if incident is None or incident.decision is None:
            why = "this decision does not wait for an answer"
            self._say("approval.ignored", {"decision": decision_id, "by": who, "reason": why})
            return self._flush()
        kind = "approval.granted" if approve else "approval.rejected"
        self._say(kind, {"incident": incident.id, "decision": decision_id, "by": who})
        if approve:
            incident.decision = replace(incident.decision, approval="approved")
            self._move(incident, State.WAITING, clock, f"approved by {who}")
        else:
            self._close(incident, State.EXHAUSTED, clock, f"rejected by {who}")
        return self._flush()

    def applied(self, incident_id: str, clock: int, *, pause: bool = False) -> Ruling:
        """All ranks applied the incident's command; verification begins (a pause ends the incident)."""
        incident = self.get(incident_id)
        if incident and incident.state is State.ACTING:
            if pause:
                self._tried(incident, "paused")
                self._close(incident, State.PAUSED, clock, "training was asked to stop")
            else:
                self._move(incident, State.VERIFYING, clock)
        return self._flush()

    def judged(self, incident_id: str, verdict: str, reason: str, clock: int) -> Ruling:
        """The end of a rung. recovered and inconclusive end the incident: what cannot be judged is no ground for
        something dearer. A verdict of `AGAIN` tries the same rung again. Any other (failed, or a command that
        never took effect) goes on to the next rung."""
        incident = self.get(incident_id)
        if incident and incident.state.busy:
            self._tried(incident, verdict, reason)
            if verdict == "recovered":
                self._close(incident, State.RECOVERED, clock, reason)
            elif verdict == "inconclusive":
                self._close(incident, State.EXHAUSTED, clock, reason)
            elif verdict in AGAIN:
                incident.decision = None
                self._move(incident, State.WAITING, clock, reason)
            else:
                self._next_rung(incident, clock, reason)
        return self._flush()

    def refund(self, incident_id: str) -> None:
        """No rank applied the incident's command, so it does not count against the budget of the run.

        Not for one that an attempt died with: a remedy that ends the job each time must come to its end.
        """
        incident = self.get(incident_id)
        if incident and incident.decision and incident.state is State.ACTING:
            self.spent.actions -= 1
            self.spent.rollbacks -= incident.decision.names.count("rollback")

    def interrupt(self, clock: int, reason: str) -> Ruling:
        """A new attempt began: what was in flight is fenced, what was only watched starts again."""
        for incident in self._open():
            self._close(incident, State.RESOLVED, clock, reason)
        return self._flush()

    def adopt(self, before: Engine, clock: int) -> Ruling:
        """Take over the state of the engine of the policy set before this one; what it no longer names ends."""
        self.load_state_dict(before.state_dict())
        names = {p.name for p in self.policies.policies}
        for incident in [i for i in self._open() if i.policy not in names]:
            self.incidents.remove(incident)
            self._say(
                "incident.state",
                {
                    "incident": incident.id,
                    "state": "resolved",
                    "clock": clock,
                    "reason": "its policy was taken out",
                },
            )
        return self._flush()

    def get(self, incident_id: str) -> Incident | None:
        return next((i for i in self.incidents if i.id == incident_id), None)

    # -- matching -----------------------------------------------------------------------------------------

    def _match(self, clock: int, diagnoses: Sequence[Diagnosis]) -> None:
        for diagnosis in diagnoses:
            policy = self._policy_for(diagnosis)
            if policy is None:
                continue
            mine = [
                i
                for i in self._open()
                if i.policy == policy.name and i.diagnosis.mechanism is diagnosis.mechanism
            ]
            if mine:
                mine[0].diagnosis = mine[0].hull(diagnosis)
            elif (policy.name, str(diagnosis.mechanism)) not in self.settled:
                self.opened += 1
                incident = Incident(f"i{self.opened}", policy.name, diagnosis, opened=clock, since=clock)
                self.incidents.append(incident)
                self._say(
                    "incident.opened",
                    {"incident": incident.id, "policy": policy.name, "diagnosis": diagnosis.to_json()},
                )
        closed = [i for i in self.incidents if not i.state.open]
        self.incidents = [i for i in self.incidents if i.state.open or i in closed[-REMEMBERED:]]

    def _policy_for(self, diagnosis: Diagnosis) -> Policy | None:
        for policy in self.policies.policies:
            if policy.match.accepts(diagnosis.mechanism, diagnosis.severity):
                return policy
        return None

    def _age(self, incident: Incident, clock: int, diagnoses: Sequence[Diagnosis]) -> None:
        policy = self._policy(incident)
        held = any(d.mechanism is incident.diagnosis.mechanism for d in diagnoses)
        waiting = incident.state in (State.CONFIRMING, State.WAITING, State.AWAITING) and not incident.acted
        if not held and (waiting or incident.state is State.NOTED):
            self._close(incident, State.RESOLVED, clock, "the diagnosis went away by itself")
        elif incident.state is State.CONFIRMING:
            needed = policy.for_
            passed = (
                incident.diagnosis.samples >= needed.n
                if isinstance(needed, ForSamples)
                else clock - incident.opened >= needed.n
            )
            if passed:
                self._move(incident, State.WAITING, clock)
        elif incident.state is State.AWAITING:
            approval = self._rung(incident).approval
            if approval is not None and clock - incident.since >= approval.expires:
                self._expire(incident, approval.on_expiry, clock)

    def _expire(self, incident: Incident, on_expiry: str, clock: int) -> None:
        assert incident.decision is not None
        self._say(
            "approval.expired",
            {"incident": incident.id, "decision": incident.decision.id, "on_expiry": on_expiry},
        )
        if on_expiry == "act":
            incident.decision = replace(incident.decision, approval="expired")
            self._move(incident, State.WAITING, clock, "the approval expired")
        elif on_expiry == "next_rung":
            self._tried(incident, "expired", "the approval expired")
            self._next_rung(incident, clock, "the approval expired")
        else:
            self._close(incident, State.EXHAUSTED, clock, "the approval expired")

    # -- deciding -----------------------------------------------------------------------------------------

    def _in_order(self) -> list[Incident]:
        names = [p.name for p in self.policies.policies]
        return sorted(
            self._open(), key=lambda i: (i.diagnosis.mechanism not in MODULES, names.index(i.policy))
        )

    def _held(self, incident: Incident, clock: int) -> bool:
        """Whether a ready incident still has to wait: for its group, for an inhibitor, a rival or its cooldown."""
        policy = self._policy(incident)
        first = not incident.tried and incident.decision is None
        wait = 0 if incident.diagnosis.mechanism is Mechanism.NUMERICS else self.policies.group_wait
        if first and self.mode is not Mode.OBSERVE and clock - incident.since < wait:
            return True
        active = (State.CONFIRMING, State.WAITING, State.AWAITING, State.ACTING, State.VERIFYING)
        others = [i for i in self._open() if i is not incident]
        if any(i.policy in policy.inhibited_by and i.state in active for i in others):
            return True
        last = self.spent.last.get(policy.name)
        cooling = first and last is not None and clock - last < policy.cooldown
        return cooling or any(i.state.busy for i in others)

    def _decide(self, incident: Incident, clock: int) -> None:
        policy = self._policy(incident)
        while incident.rung < len(policy.ladder):
            rung = policy.ladder[incident.rung]
            actions = tuple((a.name, a.arguments.model_dump(mode="json")) for a in rung.do)
            reasons = [r for name, arguments in actions if (r := self._why_not(name, arguments, incident))]
            if not reasons:
                break
            self._tried(incident, "unavailable", "; ".join(reasons), names=tuple(n for n, _ in actions))
            incident.rung += 1
        else:
            self._close(incident, State.EXHAUSTED, clock, "no rung of the ladder is left")
            return
        acting = any(ACTIONS[name].changes_training for name, _ in actions)
        said = (
            incident.decision.approval
            if incident.decision and incident.decision.rung == incident.rung
            else ""
        )
        answered = said in ("approved", "expired")
        ask = rung.approval is not None and self.mode is Mode.ENFORCE and not answered
        incident.decisions += not answered
        decision = Decision(
            id=f"{incident.id}.{incident.decisions}",
            incident=incident.id,
            policy=policy.name,
            rung=incident.rung,
            actions=actions,
            mode=str(self.mode),
            approval="pending" if ask else said if answered else "not needed",
            clock=clock,
        )
        incident.decision = decision
        if self.mode is not Mode.ENFORCE:
            self._say("decision", decision.to_json())
            would = f"would do {', '.join(decision.names)}" if self.mode is Mode.DRY_RUN else "observed"
            self._move(incident, State.NOTED, clock, f"mode {self.mode}: {would}")
            self._tell(policy, incident, f"{would}; mode {self.mode} changes nothing")
        elif not acting:
            self._say("decision", decision.to_json())
            texts = [str(a["message"]) for _, a in actions if a.get("message")]
            self._tell(policy, incident, "; ".join(texts) or "notification asked for by the policy")
            self._tried(incident, "notified")
            self._next_rung(incident, clock, "notified")
        elif ask:
            self._say("decision", decision.to_json())
            self._move(incident, State.AWAITING, clock)
            self._tell(policy, incident, f"approve with: foreshock incident approve RUN {incident.id}")
        else:
            self._act(incident, decision, clock)

    def _why_not(self, name: str, arguments: dict[str, Any], incident: Incident) -> str | None:
        budget = self.policies.budget
        if (
            self.mode is Mode.ENFORCE and ACTIONS[name].changes_training and name != "pause"
        ):  # the last resort is free
            if self.spent.actions >= budget.actions:
                return f"the run's budget of {budget.actions} actions is spent"
            if name == "rollback" and self.spent.rollbacks >= budget.rollbacks:
                return f"the run's budget of {budget.rollbacks} rollbacks is spent"
        return self.unavailable(name, arguments, incident)

    def _act(self, incident: Incident, decision: Decision, clock: int) -> None:
        self.spent.actions += 1
        self.spent.rollbacks += decision.names.count("rollback")
        incident.decision = decision
        self._say("decision", decision.to_json())
        self._move(incident, State.ACTING, clock)
        self._ruling.issue.append(decision)
        self._tell(self._policy(incident), incident, f"doing {', '.join(decision.names)}")

    def _next_rung(self, incident: Incident, clock: int, reason: str) -> None:
        incident.rung += 1
        if incident.rung < len(self._policy(incident).ladder):
            self._move(incident, State.WAITING, clock, reason)
        else:
            self._close(incident, State.EXHAUSTED, clock, f"{reason}; no rung of the ladder is left")

    # -- small hands --------------------------------------------------------------------------------------

    def _open(self) -> list[Incident]:
        return [i for i in self.incidents if i.state.open]

    def _policy(self, incident: Incident) -> Policy:
        return next(p for p in self.policies.policies if p.name == incident.policy)

    def _rung(self, incident: Incident) -> Rung:
        return self._policy(incident).ladder[incident.rung]

    def _tried(
        self, incident: Incident, result: str, reason: str = "", names: tuple[str, ...] | None = None
    ) -> None:
        if names is None:
            names = incident.decision.names if incident.decision else ()
        incident.tried.append(Tried(incident.rung, names, result, reason))
        self._say(
            "incident.tried", {"incident": incident.id, **asdict(incident.tried[-1]), "actions": list(names)}
        )

    def _move(self, incident: Incident, state: State, clock: int, reason: str = "") -> None:
        incident.state, incident.since, incident.reason = state, clock, reason
        self._say(
            "incident.state", {"incident": incident.id, "state": str(state), "clock": clock, "reason": reason}
        )

    def _close(self, incident: Incident, state: State, clock: int, reason: str) -> None:
        self._move(incident, state, clock, reason)
        if incident.acted:
            self.spent.last[incident.policy] = clock
        if state in (State.EXHAUSTED, State.PAUSED):
            self.settled.add((incident.policy, str(incident.diagnosis.mechanism)))
        self._tell(self._policy(incident), incident, f"{state}: {reason}")

    def _tell(self, policy: Policy, incident: Incident, text: str) -> None:
        where = (
            f" in layer {', '.join(map(str, incident.diagnosis.layers))}" if incident.diagnosis.layers else ""
        )
        line = f"{incident.id} {policy.name}: {incident.diagnosis.mechanism}{where} at step {incident.diagnosis.step}: {text}"
        self._ruling.notify.append((tuple(policy.notify), line))

    def _say(self, kind: str, payload: dict[str, Any]) -> None:
        self._ruling.audit.append((kind, payload))

    def _flush(self) -> Ruling:
        out, self._ruling = self._ruling, Ruling()
        return out

    # -- state --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "mode": str(self.mode),
            "incidents": _INCIDENTS.dump_python(self.incidents, mode="json"),
            "opened": self.opened,
            "settled": sorted(list(pair) for pair in self.settled),
            "spent": asdict(self.spent),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mode = Mode(state["mode"])
        self.incidents = _INCIDENTS.validate_python(state["incidents"])
        self.opened = state["opened"]
        self.settled = {(policy, mechanism) for policy, mechanism in state["settled"]}
        self.spent = Spent(**state["spent"])


_INCIDENTS = TypeAdapter(list[Incident])
