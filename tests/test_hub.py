"""The hub as a fold: what it decides on a synthetic stream, and that the fold is exact."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.pipeline import codec
from foreshock.pipeline.assembly import AHEAD, Assembler
from foreshock.pipeline.events import (
    Ack,
    Audit,
    Confirmation,
    Frames,
    Human,
    Issue,
    RecoveryPoint,
    decode,
    encode,
)
from foreshock.pipeline.hub import Hub
from foreshock.remediation.audit import canonical
from foreshock.signals import SignalFrame


def records(out, kind=None):
    return [
        e.payload for _, effects in out for e in effects if isinstance(e, Audit) and kind in (None, e.kind)
    ]


def issued(out):
    return [e.command for _, effects in out for e in effects if isinstance(e, Issue)]


def test_a_source_fault_is_diagnosed_treated_and_verified(stream):
    out = stream(onset=200).events(Hub("r"))
    diagnosis = records(out, "diagnosis")[0]
    assert (diagnosis["mechanism"], diagnosis["layers"], diagnosis["confidence"]) == (
        "attention",
        [1],
        "confirmed",
    )
    assert diagnosis["step"] <= 208
    assert diagnosis["onset"][0] <= 200
    assert [dict(c.actions) for c in issued(out)] == [{"precision_upcast": {"layers": [1], "how": "float32"}}]
    assert records(out, "outcome")[0]["verdict"] == "recovered"


def test_a_healthy_stream_is_left_alone(stream):
    out = stream(onset=None, steps=600).events(Hub("r"))
    assert issued(out) == []
    assert records(out, "diagnosis") == []


def test_what_the_upcast_does_not_cure_is_rolled_back_to_a_point_before_the_onset(stream):
    out = stream(onset=200, incurable=True, steps=700).events(Hub("r"))
    commands = issued(out)
    assert [[name for name, _ in c.actions] for c in commands[:2]] == [["precision_upcast"], ["rollback"]]
    point = dict(commands[1].actions)["rollback"]
    onset = records(out, "diagnosis")[0]["onset"][0]
    assert point["step"] <= onset
    assert point["step"] == max(s for s in range(0, onset + 1, 50))
    assert records(out, "outcome")[0]["verdict"] == "failed"


def test_a_layer_that_falls_ill_during_verification_is_treated_by_the_same_rung(stream):
    out = stream(onset=200, then=(260, 0)).events(Hub("r"))
    upcasts = [dict(c.actions)["precision_upcast"]["layers"] for c in issued(out)]
    assert upcasts == [[1], [0]]
    assert [p["verdict"] for p in records(out, "outcome")] == ["widened", "recovered"]


def test_a_nan_that_goes_on_after_the_treatment_climbs_the_ladder(stream):
    policy = """
apiVersion: foreshock/v1
name: nan
mode: enforce
policies:
  - {name: nan, match: {mechanism: numerics}, ladder: [{do: [{lr_scale: {factor: 0.5}}]}, {do: [{pause: {}}]}]}
"""
    out = stream(nan_from=100, steps=300, policy=policy).events(Hub("r"))
    assert [[name for name, _ in c.actions] for c in issued(out)] == [["lr_scale"], ["pause"]]
    assert records(out, "outcome")[0]["verdict"] == "failed"
    assert len(records(out, "incident.opened")) == 1


def test_a_point_of_an_abandoned_timeline_is_not_known(stream):
    hub = Hub("r")
    stream(onset=200, incurable=True, steps=420).events(hub)
    assert hub.assembler.timeline > 0
    known = [p.step for p in hub.ledger.points]
    hub.handle(RecoveryPoint(1.0, 0, "late", 0, hub.step, hub.step, True, 1, 0.0))
    assert [p.step for p in hub.ledger.points] == known


def test_lowering_the_mode_stops_what_has_not_been_decided(stream):
    hub = Hub("r")
    out = stream(onset=200, steps=190).events(hub)
    hub.handle(Human(1.0, "mode", "observe", "ada"))
    rest = stream(onset=200).events(Hub("r"))[len(out) :]
    assert not [
        e
        for event, _ in rest
        if not isinstance(event, Ack)
        for e in hub.handle(event)
        if isinstance(e, Issue)
    ]


@pytest.mark.parametrize("mode", ["observe", "dry_run"])
def test_what_the_code_does_not_allow_is_never_issued(stream, mode):
    out = stream(onset=200, allow=mode).events(Hub("r"))
    assert issued(out) == []
    assert records(out, "diagnosis")


def test_two_ranks_are_one_diagnosis(stream):
    out = stream(onset=200, ranks=(0, 1)).events(Hub("r"))
    assert len(issued(out)) == 1
    assert len(records(out, "command.applied")) == 1


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 430), st.booleans())
def test_a_snapshot_anywhere_continues_to_the_same_effects(cut, incurable):
    """Bit for bit: the effects after a state round trip through bytes are those of the uninterrupted hub."""
    from conftest import Stream

    out = Stream(onset=200, incurable=incurable, steps=400, seed=cut).events(Hub("r"))
    hub = Hub("r")
    for event, _ in out[: cut + 2]:
        hub.handle(event)
    twin = Hub("other")
    twin.load_state_dict(codec.loads(codec.dumps(hub.state_dict())))
    for event, effects in out[cut + 2 :]:
        again = twin.handle(decode(*encode(event)))
        assert [repr(e) for e in again] == [repr(e) for e in effects]


def test_every_event_survives_the_journal_encoding(stream):
    out = stream(onset=200).events(Hub("r"))
    extra = [Confirmation(1.0, "attention", True, "rerun on another node")]
    for event in [e for e, _ in out] + extra:
        kind, head, body = encode(event)
        assert encode(decode(kind, json.loads(json.dumps(head)), body)) == (kind, head, body)


def test_every_audit_payload_is_canonical_json(stream):
    out = stream(onset=200, incurable=True, steps=700).events(Hub("r"))
    assert all(canonical(payload) for payload in records(out))


def frame(rank, seq, step, timeline=0, attempt=1):
    return SignalFrame.build(
        [float(step)], run="r", attempt=attempt, rank=rank, seq=seq, timeline=timeline, step=step, table="t"
    )


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 4), st.integers(1, 30), st.randoms(use_true_random=False))
def test_steps_close_once_in_order_whatever_the_arrival(ranks, steps, random):
    """Each rank's own frames come in order, ranks interleave at will, and every frame may come twice."""
    assembler = Assembler()
    assembler.start(1, tuple(range(ranks)), "t", 0, 0)
    queues = {r: [frame(r, s, s) for s in range(steps)] for r in range(ranks)}
    closed = []
    while any(queues.values()):
        rank = random.choice([r for r, q in queues.items() if q])
        item = queues[rank].pop(0)
        closed += assembler.add(item)
        if random.random() < 0.3:
            closed += assembler.add(item)
    seen = [c.step for c in closed]
    assert seen == sorted(set(seen))
    assert len(seen) >= steps - AHEAD
    assert all(np.array_equal(c.values[:, 0], np.full(len(c.ranks), c.step)) for c in closed)


def test_a_silent_rank_does_not_hold_the_others():
    assembler = Assembler()
    assembler.start(1, (0, 1), "t", 0, 0)
    closed = [c.step for s in range(AHEAD + 5) for c in assembler.add(frame(0, s, s))]
    assert closed == list(range(5))


def test_frames_of_an_older_attempt_or_timeline_are_dropped():
    assembler = Assembler()
    assembler.start(2, (0,), "t", 0, 0)
    assert assembler.add(frame(0, 0, 0, attempt=1)) == []
    assembler.rewind(1, 5)
    assert assembler.add(frame(0, 1, 6, attempt=2)) == []
    assert [c.step for c in assembler.add(frame(0, 2, 5, timeline=1, attempt=2))] == [5]
    assert assembler.dropped == 2


def test_a_frames_event_is_journalled_bit_for_bit():
    values = np.array([np.nan, np.inf, 1e-45, -0.0])
    event = Frames(
        1.5, (SignalFrame.build(values, run="r", attempt=1, rank=0, seq=0, timeline=0, step=0, table="t"),)
    )
    assert decode(*encode(event)).frames[0] == event.frames[0]


def test_the_stated_budget_counts_its_alarms(stream):
    hub = Hub("r")
    stream(
        steps=1, policy=stream.policy.replace("group_wait", "false_alarms: 4 per 100000 steps\ngroup_wait")
    ).events(hub)
    assert hub.detectors.budget_steps == 25_000
