"""The hub: everything that decides, as one fold over events.

`Hub.handle(event) -> list[Effect]` has no clock, thread, disk, network, Ray or torch inside. The same events,
policy and versions give the same effects, bit for bit; every shell (in process, actor, replay, tests) runs this.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

from foreshock.detectors import Detectors, Report
from foreshock.detectors.types import Diagnosis, Mechanism
from foreshock.pipeline.assembly import Assembler
from foreshock.pipeline.events import (
    Ack,
    Announcement,
    Audit,
    Confirmation,
    Effect,
    Event,
    Frames,
    Hello,
    Human,
    Issue,
    Notify,
    PolicyLoaded,
    RecoveryPoint,
    Snapshot,
    Tick,
    decode,
    encode,
)
from foreshock.policies import Mode, PolicySet, loads
from foreshock.policies.engine import Engine, Ruling
from foreshock.policies.types import Decision, Incident
from foreshock.remediation.commands import EXPIRES, Unavailable, resolve
from foreshock.remediation.commit import CADENCE
from foreshock.remediation.points import Point, PointLedger
from foreshock.remediation.types import Command, Outcome
from foreshock.remediation.verification import Criteria, Verification
from foreshock.signals import ClosedStep, SignalTable

SNAPSHOT_EVERY = 500
WINDOW = 32
"""Steps over which the update spectrum averages; verification starts after three of them (DESIGN 7)."""
MAX_OUTLIERS_AUDITED = 200
MAX_ARRIVING = 8
SILENCE = 512
"""Steps after which a command that some rank has not answered disables acting for the attempt."""


class Hub:
    """One run's decider. Not thread-safe: its shell calls it from one place."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.policy_text = ("", "")
        self.engine: Engine | None = None
        self.detectors: Detectors | None = None
        self.hello: Hello | None = None
        self.assembler = Assembler()
        self.ledger = PointLedger()
        self.clock = 0
        self.step = 0
        self.human_mode: str | None = None
        self.command: Command | None = None
        self.commands = 0
        """How many were ever issued in the run: the next one's number is one more."""
        self.disabled: str | None = None
        """Why nothing may be applied any more in this attempt."""
        self.arriving: dict[str, dict[int, bool]] = {}
        """Recovery points of which some rank's part is still missing: id -> rank -> finite."""
        self.acks: dict[int, dict[str, Any]] = {}
        self.verification: Verification | None = None
        self.treated: tuple[int, ...] = ()
        """The layers for which the command under verification was made."""
        self.standing: list[tuple[str, dict[str, Any]]] = []
        """Interventions of the run, in order: every new attempt starts with them."""
        self.rewound: dict[str, Any] = {}
        """Detector state as it stood at each recovery point's step."""
        self.outliers = 0
        self.diagnosed: dict[str, tuple[str, tuple[int, ...], tuple[str, ...]]] = {}
        self._effects: list[Effect] = []

    def handle(self, event: Event) -> list[Effect]:
        """Fold one event in. Raises only on a defect; its shell then stops watching, training goes on."""
        self._effects = []
        handlers: dict[type, Callable[[Any], None]] = {
            PolicyLoaded: self._policy,
            Hello: self._hello,
            Frames: self._frames,
            Tick: self._tick,
            Ack: self._ack,
            RecoveryPoint: self._point,
            Confirmation: self._confirmation,
            Human: self._human,
            Announcement: self._announcement,
        }
        handlers[type(event)](event)
        effects, self._effects = self._effects, []
        return effects

    # -- attempts and policies ----------------------------------------------------------------------------

    def _policy(self, event: PolicyLoaded) -> None:
        policies = loads(event.text, event.source)
        self.policy_text = (event.text, event.source)
        before, self.engine = self.engine, Engine(policies, self._unavailable)
        self._audit(
            "policy.loaded", {"name": policies.name, "source": event.source, "mode": str(policies.mode)}
        )
        if before is not None:
            self._rule(self.engine.adopt(before, self.clock))

    def _hello(self, event: Hello) -> None:
        engine = self._engine()
        self.hello = event
        if event.attempt > 1:
            self.verification = None
            self._fence("a new attempt began")
            self._rule(engine.interrupt(self.clock, "a new attempt began"))
        self.step = event.step
        self.diagnosed = {}
        self.ledger, self.arriving, self.disabled = PointLedger(), {}, None
        self.rewound = {}
        self.assembler.start(event.attempt, event.sources, event.table.id, 0, event.step)
        self.detectors = self._new_detectors(event.table)
        engine.mode = self._mode()
        self._audit(
            "attempt.started",
            {
                "attempt": event.attempt,
                "ranks": list(event.ranks),
                "rows": list(event.sources),
                "step": event.step,
                "table": event.table.id,
                "mode": self.modes(),
                "unavailable": event.unavailable,
                "standing": [{name: arguments} for name, arguments in self.standing],
                "options": event.options,
            },
        )

    def _new_detectors(self, table: SignalTable) -> Detectors:
        options = self.hello.options if self.hello else {}
        budget = self.policies.false_alarms.apart
        return Detectors(
            table,
            budget_steps=budget,
            start=options.get("start"),
            sources=options.get("sources", True),
            world=len(self.hello.sources) if self.hello else 1,
        )

    def _mode(self) -> Mode:
        return Mode.lowest(*(Mode(m) for m in self.modes().values()))

    def modes(self) -> dict[str, str]:
        """Where the acting mode comes from; the lowest wins."""
        allow = self.hello.allow if self.hello else "observe"
        return {
            "code": allow,
            "person": self.human_mode or "enforce",
            "policy": str(self._engine().policies.mode),
            **({"attempt": "observe"} if self.disabled else {}),
        }

    # -- signals ------------------------------------------------------------------------------------------

    def _frames(self, event: Frames) -> None:
        for frame in event.frames:
            for closed in self.assembler.add(frame):
                self._closed(closed)

    def _closed(self, closed: ClosedStep) -> None:
        detectors, engine = self._detectors(), self._engine()
        self.clock += 1
        self.step = closed.step
        report = detectors.update(closed)
        self._report(report)
        self._remember(closed.step + 1)
        self.ledger.firing(_onsets(report))
        self._expire()
        if self.verification is not None:
            verdict = self._again_ill(report.diagnoses) or self.verification.update(
                self.clock, detectors.current(tuple(self.verification.reference))
            )
            if verdict is not None:
                self._judge(*verdict)
        self._rule(engine.advance(self.clock, report.diagnoses))
        if self.clock % SNAPSHOT_EVERY == 0:
            self._effects.append(Snapshot())

    def _report(self, report: Report) -> None:
        for alarm in report.opened:
            self._audit("alarm.opened", alarm.to_json())
        for alarm, reason in zip(report.closed, report.reasons, strict=True):
            self._audit("alarm.closed", {"signal": alarm.signal, "step": self.step, "reason": reason})
        for signal in report.seen:
            self._audit(
                "seen",
                {"signal": signal, "step": self.step, "reason": "significant, but too small to matter"},
            )
        for step, signal in report.outliers:
            self.outliers += 1
            if self.outliers <= MAX_OUTLIERS_AUDITED:
                self._audit("outlier", {"signal": signal, "step": step})
        for diagnosis in report.diagnoses:
            name, facts = (
                str(diagnosis.mechanism),
                (str(diagnosis.severity), diagnosis.layers, diagnosis.signals),
            )
            if self.diagnosed.get(name) != facts:
                self.diagnosed[name] = facts
                self._audit("diagnosis", diagnosis.to_json())
        for name in set(self.diagnosed) - {str(d.mechanism) for d in report.diagnoses}:
            del self.diagnosed[name]
            self._audit("diagnosis.ended", {"mechanism": name, "step": self.step})

    def _remember(self, step: int) -> None:
        every = self.hello.options.get("points_every") if self.hello else None
        if every and step % every == 0:
            self.rewound[str(step)] = self._detectors().snapshot()
            known = {str(p.step) for p in self.ledger.points}
            self.rewound = {k: v for k, v in self.rewound.items() if k in known or int(k) > step - 4 * every}

    # -- commands -----------------------------------------------------------------------------------------

    def _unavailable(self, name: str, arguments: dict[str, Any], incident: Incident) -> str | None:
        if name == "rollback" and self._engine().mode is not Mode.ENFORCE:
            # No points are taken below enforce, so only what would forbid it there counts.
            return self.hello.unavailable.get(name) if self.hello else None
        try:
            self._resolve(name, arguments, incident.diagnosis)
        except Unavailable as reason:
            return str(reason)
        return None

    def _resolve(self, name: str, arguments: dict[str, Any], diagnosis: Diagnosis) -> dict[str, Any]:
        cannot = self.hello.unavailable if self.hello else {}
        return resolve(name, arguments, diagnosis, self.ledger, self.step, cannot)

    def _rule(self, ruling: Ruling) -> None:
        for kind, payload in ruling.audit:
            self._audit(kind, {"step": self.step, **payload})
        for decision in ruling.issue:
            self._issue(decision)
        for receivers, text in ruling.notify:
            self._effects.append(Notify(receivers, text))

    def _issue(self, decision: Decision) -> None:
        incident = self._engine().get(decision.incident)
        assert incident is not None
        assert self.hello is not None
        try:
            actions = tuple(
                (name, self._resolve(name, arguments, incident.diagnosis))
                for name, arguments in decision.actions
            )
        except Unavailable as reason:  # a point was lost while a person thought about it
            self._rule(self._engine().judged(decision.incident, "unavailable", str(reason), self.clock))
            return
        seq = self._seq()
        self.commands += 1
        command = Command(
            decision.id, self.commands, self.hello.attempt, decision.incident, actions, seq, seq + EXPIRES
        )
        self.command, self.acks = command, {}
        self.ledger.pinned |= {arguments["point"] for name, arguments in actions if name == "rollback"}
        self._audit("command.issued", command.to_json())
        self._effects.append(Issue(command))

    def _ack(self, event: Ack) -> None:
        command = self.command
        if event.result == "disabled":
            self._disable(f"rank {event.rank}: {event.detail.get('reason', '')}")
            return
        if command is None or event.command != command.id:
            self._audit("ack.ignored", {"command": event.command, "rank": event.rank, "result": event.result})
            if event.result == "applied":
                self._disable(f"rank {event.rank} applied {event.command} after it was given up")
            return
        self.acks[event.rank] = {"result": event.result, "step": event.step, **event.detail}
        if event.result != "applied":
            self.command = None
            reason = str(event.detail.get("reason", ""))
            if event.result == "point broken":
                self.ledger.drop(str(event.detail["point"]))
            self._outcome(command, None, event.result, reason)
            self._rule(self._engine().judged(command.incident, event.result, reason, self.clock))
        elif self.hello is not None and set(self.acks) >= set(self.hello.ranks):
            self._applied(command, event.step)

    def _disable(self, reason: str) -> None:
        """A rank can no longer follow a command, so none may: for the rest of the attempt this only watches."""
        if self.disabled is not None:
            return
        self.disabled = reason
        self._engine().mode = self._mode()
        self._audit("acting.disabled", {"step": self.step, "reason": reason})
        self._effects.append(Notify((), f"NOT ACTING for the rest of this attempt: {reason}"))
        self._fence(f"acting was disabled: {reason}")

    def _applied(self, command: Command, step: int) -> None:
        self.command = None
        detectors, engine = self._detectors(), self._engine()
        incident = engine.get(command.incident)
        assert incident is not None
        actions = dict(command.actions)
        self._audit(
            "command.applied",
            {"command": command.id, "step": step, "acks": {str(r): a for r, a in self.acks.items()}},
        )
        for name in ("precision_upcast", "lr_scale"):
            if name in actions and (name, actions[name]) not in self.standing:
                self.standing.append((name, actions[name]))
        self.treated = incident.diagnosis.layers
        reference = self._reference(incident)
        if "rollback" in actions:
            point = actions["rollback"]["step"]
            self.assembler.rewind(self.assembler.timeline + 1, point)
            if str(point) in self.rewound:
                detectors.restore(self.rewound[str(point)], point)
            self.rewound = {k: v for k, v in self.rewound.items() if int(k) <= point}
            self.ledger.rewound(point)
            self.step = point
        detectors.after_action(self.step, incident.diagnosis.layers or None)
        self._rule(engine.applied(command.incident, self.clock, pause="pause" in actions))
        if "pause" not in actions:
            self.verification = Verification(
                command.id, command.incident, self._criteria(incident), reference, self.clock, step
            )
            self._audit(
                "verification.started",
                {
                    "command": command.id,
                    "signals": {k: [_number(a), _number(b)] for k, (a, b) in reference.items()},
                },
            )

    def _again_ill(self, diagnoses: tuple[Diagnosis, ...]) -> tuple[str, str] | None:
        """A verdict that need not wait: still not finite, or ill in layers that were not treated."""
        assert self.verification is not None
        incident = self._engine().get(self.verification.incident)
        for diagnosis in diagnoses:
            if incident is None or diagnosis.mechanism is not incident.diagnosis.mechanism:
                continue
            if diagnosis.mechanism is Mechanism.NUMERICS:
                return "failed", f"not finite again at step {diagnosis.step}"
            new = sorted(set(diagnosis.layers) - set(self.treated))
            if self.treated and new:
                return "widened", f"diagnosed in layer {', '.join(map(str, new))} too"
        return None

    def _reference(self, incident: Incident) -> dict[str, tuple[float, float]]:
        detectors = self._detectors()
        wanted = self._policy_of(incident).verify.signals
        names = (
            detectors.verification_keys(incident.diagnosis)
            if wanted == "diagnosed"
            else tuple(f"symptom.{s}" for s in wanted)
        )
        return dict(detectors.reference(names, incident.diagnosis.onset.early))

    def _criteria(self, incident: Incident) -> Criteria:
        v = self._policy_of(incident).verify
        delay = max(v.initial_delay, 3 * WINDOW)
        return Criteria(
            delay,
            v.interval,
            v.band,
            v.recovered.n,
            v.failed.k,
            v.failed.n,
            max(v.timeout, delay + v.interval),
        )

    def _policy_of(self, incident: Incident) -> Any:
        return next(p for p in self._engine().policies.policies if p.name == incident.policy)

    def _judge(self, verdict: str, reason: str) -> None:
        judged, self.verification = self.verification, None
        assert judged is not None
        self._audit(
            "outcome",
            Outcome(
                judged.command,
                judged.incident,
                judged.applied_step,
                verdict,
                reason,
                cost={"checks": float(len(judged.checks))},
            ).to_json(),
        )
        self._rule(self._engine().judged(judged.incident, verdict, reason, self.clock))

    def _outcome(self, command: Command, step: int | None, verdict: str, reason: str) -> None:
        self._audit(
            "outcome", Outcome(command.id, command.incident, step, verdict, reason, dict(self.acks)).to_json()
        )

    def _expire(self) -> None:
        """Give a command up, but only when no rank can still be about to apply it.

        A vote cast at `expires` is read one call later, and acks travel in order with the frames: so once every rank
        was heard of `CADENCE` steps later, no word of an application can still be on its way.
        """
        if self.command is None or self.hello is None:
            return
        seen, last = self.assembler.seen, self.command.expires + CADENCE
        if len(seen) == len(self.hello.sources) and min(seen.values()) > last:
            self._engine().refund(self.command.incident)
            self._fence(f"not applied within {EXPIRES} steps")
        elif max(seen.values(), default=0) > last + SILENCE:
            self._disable(f"no word on {self.command.id} from every rank in {SILENCE} steps")

    def _seq(self) -> int:
        """The newest frame number of any rank: the only count that a rank and the hub share."""
        return max(self.assembler.seen.values(), default=0)

    def _fence(self, reason: str) -> None:
        if self.command is not None:
            command, self.command = self.command, None
            self._outcome(command, None, "expired", reason)
            self._rule(self._engine().judged(command.incident, "expired", reason, self.clock))

    # -- the rest -----------------------------------------------------------------------------------------

    def _tick(self, event: Tick) -> None:
        """Nothing in the hub is measured in seconds yet; the tick only moves the journal's clock."""

    def _point(self, event: RecoveryPoint) -> None:
        parts = self.arriving.setdefault(event.id, {})
        parts[event.rank] = event.finite
        if self.hello is None or set(parts) < set(self.hello.ranks):
            return
        del self.arriving[event.id]
        finite = all(parts.values())
        if event.timeline == self.assembler.timeline and str(event.step) in self.rewound:
            self.ledger.add(Point(event.id, event.step, event.batches, self.clock, finite))
            self.ledger.prune(self.step)
        # A part that never comes leaves its point behind; ids are in the order of steps.
        self.arriving = dict(sorted(self.arriving.items())[-MAX_ARRIVING:])
        self._audit(
            "recovery_point",
            {
                "id": event.id,
                "step": event.step,
                "finite": finite,
                "bytes": event.bytes,
                "seconds": round(event.seconds, 4),
            },
        )

    @property
    def kept(self) -> set[str]:
        """The recovery points that must stay on disk, those on their way included."""
        return {p.id for p in self.ledger.points} | self.ledger.pinned | set(self.arriving)

    def _confirmation(self, event: Confirmation) -> None:
        self._audit(
            "confirmation", {"mechanism": event.mechanism, "confirms": event.confirms, "text": event.text}
        )

    def _human(self, event: Human) -> None:
        engine = self._engine()
        self._audit("human", {"verb": event.verb, "argument": event.argument, "who": event.who})
        if event.verb in ("approve", "reject"):
            self._rule(engine.answer(event.argument, event.verb == "approve", event.who, self.clock))
        elif event.verb == "mode" and event.argument in list(Mode):
            self.human_mode = event.argument
            engine.mode = self._mode()

    def _announcement(self, event: Announcement) -> None:
        self._detectors().announce(event.text, event.step, event.steps)
        self._audit("announcement", {"text": event.text, "step": event.step, "steps": event.steps})

    def _audit(self, kind: str, payload: dict[str, Any]) -> None:
        self._effects.append(Audit(kind, payload))

    def _engine(self) -> Engine:
        if self.engine is None:
            raise RuntimeError("no policy was loaded before this event")
        return self.engine

    def _detectors(self) -> Detectors:
        if self.detectors is None:
            raise RuntimeError("no attempt was started before this event")
        return self.detectors

    @property
    def policies(self) -> PolicySet:
        return self._engine().policies

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain values and numpy arrays."""
        engine, hello = self._engine(), self.hello
        return {
            "run": self.run,
            "policy": list(self.policy_text),
            "engine": engine.state_dict(),
            "hello": None if hello is None else encode(hello)[1],
            "detectors": self.detectors.state_dict() if self.detectors else None,
            "assembler": self.assembler.state_dict(),
            "ledger": self.ledger.state_dict(),
            "clock": self.clock,
            "step": self.step,
            "human_mode": self.human_mode,
            "command": None if self.command is None else self.command.to_json(),
            "commands": self.commands,
            "disabled": self.disabled,
            "arriving": {
                name: {str(r): f for r, f in parts.items()} for name, parts in self.arriving.items()
            },
            "acks": {str(r): a for r, a in self.acks.items()},
            "verification": self.verification.state_dict() if self.verification else None,
            "treated": list(self.treated),
            "standing": [list(item) for item in self.standing],
            "rewound": self.rewound,
            "outliers": self.outliers,
            "diagnosed": {
                k: [s, list(layers), list(signals)] for k, (s, layers, signals) in self.diagnosed.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.run = state["run"]
        self.policy_text = (state["policy"][0], state["policy"][1])
        self.engine = Engine(loads(*self.policy_text), self._unavailable)
        self.engine.load_state_dict(state["engine"])
        if state["hello"] is not None:
            self.hello = cast(Hello, decode("Hello", state["hello"], b""))
            self.detectors = self._new_detectors(self.hello.table)
            self.detectors.load_state_dict(state["detectors"])
        self.assembler.load_state_dict(state["assembler"])
        self.ledger.load_state_dict(state["ledger"])
        self.standing = [(name, arguments) for name, arguments in state["standing"]]
        for name in ("clock", "step", "human_mode", "rewound", "outliers", "commands", "disabled"):
            setattr(self, name, state[name])
        self.command = None if state["command"] is None else Command.from_json(state["command"])
        self.arriving = {
            name: {int(r): f for r, f in parts.items()} for name, parts in state["arriving"].items()
        }
        self.acks = {int(r): a for r, a in state["acks"].items()}
        self.treated = tuple(state["treated"])
        self.verification = Verification.from_state(state["verification"]) if state["verification"] else None
        self.diagnosed = {
            k: (s, tuple(layers), tuple(signals)) for k, (s, layers, signals) in state["diagnosed"].items()
        }


def _onsets(report: Report) -> dict[str, int]:
    """The earliest onset of everything that fires: of named diagnoses, and of open alarms of module mechanisms."""
    onsets: dict[str, int] = {}
    firing = [(str(d.mechanism), d.onset.early) for d in report.diagnoses]
    firing += [(a.mechanism, a.onset.early) for a in report.suspects if a.mechanism != "symptom"]
    for name, early in firing:
        onsets[name] = min(early, onsets.get(name, early))
    return onsets


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
