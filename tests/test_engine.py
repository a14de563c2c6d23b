"""The decision engine, driven by hand-made diagnoses."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.detectors.types import Diagnosis, Interval, Mechanism, Severity
from foreshock.policies import Mode, loads
from foreshock.policies.engine import Engine
from foreshock.policies.types import State

POLICY = """
apiVersion: foreshock/v1
name: test
mode: enforce
budget: {actions: 3, rollbacks: 1}
group_wait: 4 steps
policies:
  - name: non-finite
    match: {mechanism: numerics}
    ladder: [{do: [{rollback: {}}]}, {do: [{pause: {}}]}]
  - name: attention
    match: {mechanism: attention}
    for: 3 samples
    ladder:
      - do: [{precision_upcast: {}}]
      - do: [{rollback: {}}]
        approval: {expires: 10 steps}
    cooldown: 100 steps
  - name: divergence
    match: {mechanism: data, severity: critical}
    inhibited_by: [attention]
    for: 2 steps
    ladder: [{do: [{rollback: {skip_data: window}}]}, {do: [{notify: {}}]}]
"""


def diagnosis(mechanism=Mechanism.ATTENTION, step=500, samples=3, severity=Severity.CRITICAL, early=484):
    return Diagnosis(
        mechanism, step, severity, Interval(early, step), (0,), (), (), "confirmed", (), (), step, samples
    )


def engine(mode=Mode.ENFORCE, unavailable=lambda *_: None, text=POLICY):
    made = Engine(loads(text), unavailable)
    made.mode = mode
    return made


def drive(made, diagnoses, clocks):
    """Advance over `clocks`; every decision issued, as (clock, names)."""
    issued = []
    for clock in clocks:
        issued += [(clock, d.names) for d in made.advance(clock, diagnoses).issue]
    return issued


def test_acts_only_after_for_and_group_wait():
    made = engine()
    assert drive(made, [diagnosis(samples=2)], range(10)) == []
    assert drive(made, [diagnosis(samples=3)], range(10, 30)) == [(14, ("precision_upcast",))]
    assert made.incidents[0].state is State.ACTING


def test_numerics_does_not_wait_for_its_group():
    assert drive(engine(), [diagnosis(Mechanism.NUMERICS)], range(5)) == [(0, ("rollback",))]


def test_a_fault_that_goes_away_before_acting_is_left_alone():
    made = engine()
    drive(made, [diagnosis()], range(2))
    drive(made, [], range(2, 20))
    assert made.incidents[0].state is State.RESOLVED
    assert made.spent.actions == 0


@pytest.mark.parametrize("mode", [Mode.OBSERVE, Mode.DRY_RUN])
def test_below_enforce_nothing_is_issued_and_the_intent_is_on_record(mode):
    made = engine(mode)
    assert drive(made, [diagnosis()], range(30)) == []
    assert made.incidents[0].state is State.NOTED
    assert made.incidents[0].decision.mode == mode


def test_failed_verification_climbs_to_the_next_rung_which_waits_for_approval():
    made = engine()
    drive(made, [diagnosis()], range(10))
    made.applied("i1", 10)
    made.judged("i1", "failed", "outside", 110)
    assert drive(made, [diagnosis()], range(111, 115)) == []
    assert made.incidents[0].state is State.AWAITING
    assert made.answer("i1.2", True, "ada", 115).issue == []
    assert drive(made, [], range(116, 120)) == [(116, ("rollback",))]


def test_an_answer_given_twice_does_not_reach_the_next_rung():
    asking = POLICY.replace(
        "      - do: [{precision_upcast: {}}]\n",
        "      - {do: [{precision_upcast: {}}], approval: {expires: 50 steps}}\n",
    )
    made = engine(text=asking)
    drive(made, [diagnosis()], range(10))
    made.answer("i1.1", True, "ada", 10)
    drive(made, [diagnosis()], range(11, 12))
    made.applied("i1", 12)
    made.judged("i1", "failed", "outside", 110)
    drive(made, [diagnosis()], range(111, 113))
    assert made.incidents[0].state is State.AWAITING
    made.answer("i1.1", True, "ada", 113)
    assert made.incidents[0].state is State.AWAITING


def test_an_approval_goes_through_the_gate_like_everything_else():
    """A person who lowered the mode, or a rival in flight, is not overruled by an approval."""
    asking = POLICY.replace(
        "      - do: [{precision_upcast: {}}]\n",
        "      - {do: [{precision_upcast: {}}], approval: {expires: 50 steps}}\n",
    )
    made = engine(text=asking)
    drive(made, [diagnosis()], range(10))
    assert made.incidents[0].state is State.AWAITING
    made.answer("i1.1", True, "ada", 10)
    made.mode = Mode.OBSERVE
    assert drive(made, [diagnosis()], range(11, 20)) == []
    made = engine(text=asking)
    drive(made, [diagnosis()], range(10))
    assert drive(made, [diagnosis(), diagnosis(Mechanism.NUMERICS)], range(10, 12)) == [(10, ("rollback",))]
    made.answer("i1.1", True, "ada", 12)
    assert drive(made, [diagnosis()], range(12, 20)) == []
    made.applied("i2", 20)
    made.judged("i2", "recovered", "finite", 21)
    assert drive(made, [diagnosis()], range(22, 30)) == [(22, ("precision_upcast",))]


def test_what_ended_unhealed_is_not_opened_again_until_it_was_gone():
    made = engine(unavailable=lambda *_: "no")
    drive(made, [diagnosis(Mechanism.NUMERICS)], range(300))
    assert [i.state for i in made.incidents] == [State.EXHAUSTED]
    drive(made, [], range(300, 302))
    drive(made, [diagnosis(Mechanism.NUMERICS)], range(302, 310))
    assert [i.id for i in made.incidents] == ["i1", "i2"]


def test_a_noted_incident_ends_with_its_diagnosis_whatever_was_unavailable():
    made = engine(Mode.DRY_RUN, unavailable=lambda name, *_: "no" if name == "rollback" else None)
    drive(made, [diagnosis(Mechanism.NUMERICS)], range(5))
    assert made.incidents[0].state is State.NOTED
    drive(made, [], range(5, 7))
    assert made.incidents[0].state is State.RESOLVED


def test_a_new_policy_set_takes_over_and_ends_what_it_no_longer_names():
    made = engine()
    drive(made, [diagnosis(), diagnosis(Mechanism.NUMERICS)], range(2))
    fewer = Engine(
        loads(
            POLICY.replace("mechanism: numerics", "mechanism: router").replace(
                "name: non-finite", "name: other"
            )
        ),
        lambda *_: None,
    )
    ruling = fewer.adopt(made, 3)
    assert [payload["state"] for kind, payload in ruling.audit if kind == "incident.state"] == ["resolved"]
    assert [i.policy for i in fewer.incidents] == ["attention"]
    assert fewer.opened == 2


def test_what_cannot_be_judged_is_no_ground_for_something_dearer():
    made = engine()
    drive(made, [diagnosis()], range(10))
    made.applied("i1", 10)
    made.judged("i1", "inconclusive", "nothing was measured", 410)
    assert drive(made, [], range(411, 440)) == []
    assert made.incidents[0].state is State.EXHAUSTED


def test_an_approval_expires_into_nothing():
    made = engine()
    drive(made, [diagnosis()], range(10))
    made.applied("i1", 10)
    made.judged("i1", "failed", "outside", 110)
    assert drive(made, [diagnosis()], range(111, 140)) == []
    assert made.incidents[0].state is State.EXHAUSTED
    assert made.answer("i1.2", True, "too late", 141).issue == []


def test_rejection_ends_the_incident():
    made = engine()
    drive(made, [diagnosis()], range(10))
    made.applied("i1", 10)
    made.judged("i1", "failed", "outside", 110)
    drive(made, [diagnosis()], range(111, 113))
    made.answer("i1.2", False, "ada", 113)
    assert made.incidents[0].state is State.EXHAUSTED
    assert "ada" in made.incidents[0].reason


def test_an_unavailable_rung_is_skipped_with_its_reason():
    made = engine(unavailable=lambda name, *_: "no site" if name == "precision_upcast" else None)
    drive(made, [diagnosis()], range(10))
    incident = made.incidents[0]
    assert [(t.result, t.reason) for t in incident.tried] == [("unavailable", "no site")]
    assert incident.state is State.AWAITING


def test_one_command_in_flight_and_modules_go_before_symptoms():
    made = engine()
    both = [diagnosis(Mechanism.DATA), diagnosis()]
    issued = drive(made, both, range(40))
    assert issued == [(4, ("precision_upcast",))]
    made.applied("i2", 40)
    assert drive(made, both, range(41, 60)) == []
    made.judged("i2", "recovered", "in band", 60)
    assert drive(made, [diagnosis(Mechanism.DATA)], range(61, 70)) == [(61, ("rollback",))]


def test_the_budget_holds_and_pausing_is_free():
    made = engine(text=POLICY.replace("actions: 3, rollbacks: 1", "actions: 0, rollbacks: 0"))
    assert drive(made, [diagnosis(Mechanism.NUMERICS)], range(5)) == [(0, ("pause",))]
    made.applied("i1", 5, pause=True)
    assert made.incidents[0].state is State.PAUSED


def test_cooldown_holds_back_the_next_incident_of_the_same_policy():
    made = engine()
    drive(made, [diagnosis()], range(10))
    made.applied("i1", 10)
    made.judged("i1", "recovered", "in band", 50)
    assert drive(made, [diagnosis(step=60)], range(60, 150)) == []
    assert drive(made, [diagnosis(step=60)], range(150, 160)) == [(150, ("precision_upcast",))]


def test_the_onset_of_an_incident_only_widens():
    made = engine()
    made.advance(0, [diagnosis(early=484)])
    made.advance(1, [diagnosis(early=496)])
    assert made.incidents[0].diagnosis.onset.early == 484


def test_a_policy_asks_for_severity():
    made = engine()
    made.advance(0, [diagnosis(Mechanism.DATA, severity=Severity.WARNING)])
    assert made.incidents == []


events = st.lists(
    st.tuples(
        st.sampled_from(["advance", "applied", "judged", "approve", "reject"]),
        st.sets(st.sampled_from([Mechanism.ATTENTION, Mechanism.DATA, Mechanism.NUMERICS])),
        st.sampled_from(["recovered", "failed", "inconclusive", "expired"]),
        st.integers(0, 3),
    ),
    max_size=120,
)


@settings(deadline=None, max_examples=80)
@given(events)
def test_invariants_hold_under_any_history(history):
    """Never two commands in flight, never over budget, no decision twice, and state survives a round trip."""
    made, seen = engine(), []
    for clock, (what, mechanisms, verdict, which) in enumerate(history):
        incident = made.incidents[which].id if which < len(made.incidents) else "i99"
        if what == "advance":
            ruling = made.advance(clock, [diagnosis(m, samples=clock) for m in sorted(mechanisms)])
        elif what == "applied":
            ruling = made.applied(incident, clock)
        elif what == "judged":
            ruling = made.judged(incident, verdict, "because", clock)
        else:
            ruling = made.answer(f"{incident}.{1 + clock % 2}", what == "approve", "ada", clock)
        seen += [d.id for d in ruling.issue]
        assert sum(i.state.busy for i in made.incidents) <= 1
        assert made.spent.rollbacks <= 1
        assert len(seen) == len(set(seen))
    twin = engine()
    twin.load_state_dict(made.state_dict())
    assert twin.state_dict() == made.state_dict()
    assert [i.to_json() for i in twin.incidents] == [i.to_json() for i in made.incidents]


def test_interrupt_fences_what_is_open():
    made = engine()
    drive(made, [diagnosis()], range(10))
    made.interrupt(11, "a new attempt began")
    assert not made.incidents[0].state.open
