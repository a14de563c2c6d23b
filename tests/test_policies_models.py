"""What the typed policy promises to the engine: plain values, frozen, the same after a trip through JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from foreshock.detectors.types import Mechanism, Severity
from foreshock.policies import (
    ACTIONS,
    SHIPPED,
    Action,
    Match,
    Mode,
    PolicySet,
    Verify,
    explain,
    loads,
    shipped,
    units,
)
from foreshock.policies.units import FalseAlarms, ForSamples, ForSteps, InARow, NOf


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (units.Steps, "8 steps", 8),
        (units.Steps, "1 step", 1),
        (units.Steps, "0 steps", 0),
        (units.PositiveSteps, "12 steps", 12),
        (units.Hold, "3 samples", ForSamples(3)),
        (units.Hold, "1 step", ForSteps(1)),
        (units.Sigma, "2.5 sigma", 2.5),
        (units.Row, "5 in a row", InARow(5)),
        (units.Share, "3 of 8", NOf(3, 8)),
        (units.AlarmBudget, "1 per 100000 steps", FalseAlarms(1, 100_000)),
    ],
)
def test_a_unit_parses_to_a_plain_value_and_is_written_back_as_it_was(
    kind: Any, text: str, value: object
) -> None:
    adapter = TypeAdapter(kind)
    assert adapter.validate_python(text) == value
    assert adapter.dump_python(value, mode="json") == text


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 10**9 - 1), st.integers(1, 10**9 - 1))
def test_units_survive_a_round_trip_for_every_number(a: int, b: int) -> None:
    k, n = sorted((a, b))
    kinds: list[tuple[Any, object]] = [
        (units.Steps, a),
        (units.Hold, ForSamples(a)),
        (units.Hold, ForSteps(b)),
        (units.Row, InARow(a)),
        (units.Share, NOf(k, n)),
        (units.AlarmBudget, FalseAlarms(a, b)),
    ]
    for kind, value in kinds:
        adapter = TypeAdapter(kind)
        assert adapter.validate_python(adapter.dump_python(value, mode="json")) == value


@pytest.mark.parametrize(
    "text", ["8", "8steps", " 8 steps", "8 Steps", "-8 steps", "8.5 steps", "٣ steps", "8 steps\n", 8]
)
def test_anything_but_the_written_form_of_steps_is_refused(text: object) -> None:
    with pytest.raises(ValidationError, match="is not a number of steps"):
        TypeAdapter(units.Steps).validate_python(text)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_policy_set_is_the_same_after_json_and_cannot_be_changed(name: str) -> None:
    policy_set = shipped(name)
    text = json.dumps(policy_set.to_json())
    assert PolicySet.model_validate(json.loads(text)) == policy_set
    assert loads(text) == policy_set
    with pytest.raises(ValidationError, match="frozen"):
        policy_set.mode = Mode.ENFORCE
    with pytest.raises(ValidationError, match="frozen"):
        policy_set.policies[0].ladder[0].do[0].rollback = None


def test_every_action_has_arguments_and_says_what_it_needs_costs_and_leaves() -> None:
    assert set(Action.model_fields) == set(ACTIONS)
    given = {"lr_scale": {"factor": 0.5}, "qk_clip": {"threshold": 100}}
    for name, spec in ACTIONS.items():
        action = Action.model_validate({name: given.get(name, {})})
        assert action.name == name
        assert type(action.arguments) is spec.model
        assert action.spec is spec
        assert Action.model_validate(action.to_json()) == action
        assert all(sentence.endswith(".") for sentence in (spec.cost, spec.undo))
    assert [name for name, spec in ACTIONS.items() if not spec.changes_training] == ["notify"]
    assert {name for name, spec in ACTIONS.items() if "rewind" in spec.needs} == {"rollback", "skip_data"}


def test_an_action_without_arguments_takes_its_defaults() -> None:
    assert Action.model_validate({"rollback": None}).to_json() == {
        "rollback": {"before": "onset", "skip_data": "none"}
    }
    assert Action.model_validate({"pause": {}}).to_json() == {"pause": {}}
    assert Action.model_validate({"notify": {}}).to_json() == {"notify": {}}


def test_lr_scale_takes_a_word_or_parameter_names() -> None:
    by_name = Action.model_validate({"lr_scale": {"target": ["head.weight"], "factor": 0.1}})
    assert by_name.to_json() == {"lr_scale": {"target": ["head.weight"], "factor": 0.1}}
    assert by_name.lr_scale is not None
    assert by_name.lr_scale.target == ("head.weight",)


def test_a_match_accepts_its_severity_and_above() -> None:
    any_severity = Match.model_validate({"mechanism": "data"})
    critical = Match.model_validate({"mechanism": ["data", "unknown"], "severity": "critical"})
    assert any_severity.mechanism == (Mechanism.DATA,)
    assert any_severity.accepts(Mechanism.DATA, Severity.WARNING)
    assert not any_severity.accepts(Mechanism.UNKNOWN, Severity.CRITICAL)
    assert critical.accepts(Mechanism.UNKNOWN, Severity.CRITICAL)
    assert not critical.accepts(Mechanism.DATA, Severity.WARNING)


def test_a_policy_without_verify_is_judged_by_the_default() -> None:
    assert shipped("default").policies[0].verify == Verify()
    assert Verify() == Verify.model_validate(
        {
            "signals": "diagnosed",
            "initial_delay": "96 steps",
            "interval": "8 steps",
            "band": "3 sigma",
            "recovered": "5 in a row",
            "failed": "3 of 8",
            "timeout": "400 steps",
        }
    )


def test_the_lowest_mode_wins() -> None:
    assert Mode.lowest(Mode.ENFORCE, Mode.OBSERVE, Mode.DRY_RUN) is Mode.OBSERVE
    assert Mode.lowest(Mode.ENFORCE, Mode.DRY_RUN) is Mode.DRY_RUN


def test_an_approval_that_passes_on_makes_the_rung_after_a_pause_reachable() -> None:
    base = shipped("unattended").to_json()
    pause = {"do": [{"pause": {}}], "approval": {"expires": "9 steps", "on_expiry": "next_rung"}}
    base["policies"][0]["ladder"] = [pause, {"do": [{"notify": {}}]}]
    assert len(PolicySet.model_validate(base).policies[0].ladder) == 2


def test_a_module_remedy_is_allowed_where_the_mechanism_may_be_its_own() -> None:
    base = shipped("unattended").to_json()
    base["policies"][0]["ladder"] = [{"do": [{"precision_upcast": {"target": "all"}}]}]
    assert PolicySet.model_validate(base).policies[0].match.mechanism == (Mechanism.NUMERICS,)
    base["policies"][3]["ladder"] = [{"do": [{"precision_upcast": {"target": "all"}}]}]
    with pytest.raises(ValidationError, match="repairs the attention"):
        PolicySet.model_validate(base)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_explanation_says_when_what_at_what_cost_and_within_which_limits(name: str) -> None:
    policy_set = shipped(name)
    text = explain(policy_set)
    assert f"mode {policy_set.mode}" in text
    assert text.count("When:") == len(policy_set.policies) == text.count("Limits:")
    assert text.count("Needs a person's yes") == sum(
        bool(r.approval) for p in policy_set.policies for r in p.ladder
    )
    for policy in policy_set.policies:
        assert f"{policy.name}: {policy.summary}" in text
        for rung in policy.ladder:
            for action in rung.do:
                assert action.spec.cost.rstrip(".") in text
                assert action.spec.undo.rstrip(".") in text
