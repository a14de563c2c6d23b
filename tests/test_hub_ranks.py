"""The hub with several ranks: one word of all of them, or none, and what happens while some words are missing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import Stream
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.pipeline.assembly import Assembler
from foreshock.pipeline.events import Ack, Audit, Frames, Issue, RecoveryPoint
from foreshock.pipeline.hub import SILENCE, Hub
from foreshock.remediation.commands import EXPIRES
from foreshock.remediation.commit import CADENCE
from foreshock.signals import SignalFrame

RANKS = (0, 1)


def kinds(effects):
    return [e.kind for e in effects if isinstance(e, Audit)]


class Waiting(Hub):
    """A hub that does not hear the acknowledgements which `Stream` gives by itself."""

    def handle(self, event):
        return [] if isinstance(event, Ack) else super().handle(event)

    def hear(self, rank, result="applied", command="i1.1", **detail):
        return super().handle(Ack(0.0, command, rank, result, self.step, detail))


@pytest.fixture
def commanded():
    """A hub whose first command has just been issued, and a way to go on with healthy frames."""
    hub, driver = Waiting("r"), Stream(onset=200, ranks=RANKS, steps=240)
    events = driver.events(Waiting("r"))
    for event, _ in events:
        if any(isinstance(e, Issue) for e in hub.handle(event)):
            break
    table, seq = driver.table, [hub.assembler.seen[0]]

    def go(steps, ranks=RANKS):
        out = []
        for _ in range(steps):
            seq[0] += 1
            place = {
                "run": "r",
                "attempt": 1,
                "seq": seq[0],
                "timeline": 0,
                "step": seq[0],
                "table": table.id,
            }
            values = [0.0] * 4 + [1e-5] * 4 + [2.0, 1.0, 1e-3]
            frames = tuple(SignalFrame.build(values, rank=rank, **place) for rank in ranks)
            out += hub.handle(Frames(0.0, frames))
        return out

    assert hub.command is not None
    return hub, go


def test_a_command_is_applied_when_every_rank_has_said_so(commanded):
    hub, go = commanded
    assert kinds(hub.hear(0)) == []
    go(3)
    assert hub.standing == []
    assert "command.applied" in kinds(hub.hear(1))
    assert hub.standing == [("precision_upcast", {"layers": [1], "how": "float32"})]


def test_one_refusal_withdraws_it_and_the_next_has_a_higher_number(commanded):
    hub, _go = commanded
    first = hub.command
    assert "outcome" in kinds(hub.hear(1, "refused", reason="no"))
    assert hub.command is None or hub.command.number > first.number
    assert kinds(hub.hear(0, "refused")) == ["ack.ignored"]
    assert hub.disabled is None


def test_it_expires_only_after_every_rank_was_heard_of_beyond_its_expiry(commanded):
    hub, go = commanded
    go(EXPIRES + CADENCE + 1, ranks=(0,))
    assert hub.command is not None, "rank 1 may be about to apply it"
    out = go(20)
    assert hub.command is None or hub.command.number > 1
    assert "outcome" in kinds(out)
    assert hub.engine.spent.actions == (hub.command is not None), "nothing was done, so nothing is spent"


def test_a_command_that_an_attempt_died_with_counts_against_the_budget(commanded):
    hub, _go = commanded
    hub.handle(replace(hub.hello, attempt=2))
    assert hub.command is None
    assert hub.engine.spent.actions == 1


def test_a_rank_that_never_answers_ends_all_acting_in_this_attempt(commanded):
    hub, go = commanded
    out = go(EXPIRES + CADENCE + SILENCE + 2, ranks=(0,))
    assert "acting.disabled" in kinds(out)
    assert hub.modes()["attempt"] == "observe"
    assert hub.command is None


def test_a_lost_vote_is_audited_and_nothing_more_is_issued(commanded):
    hub, go = commanded
    assert "acting.disabled" in kinds(hub.hear(1, "disabled", command="", reason="a vote was lost"))
    assert hub.command is None
    assert hub.engine.mode == "observe"
    assert not [e for e in go(300) if isinstance(e, Issue)]
    assert kinds(hub.hear(0, "disabled", command="", reason="too")) == []


def test_an_application_after_it_was_given_up_is_noticed(commanded):
    hub, _go = commanded
    hub.hear(1, "refused", reason="no")
    assert "acting.disabled" in kinds(hub.hear(0, "applied"))


def test_a_recovery_point_is_known_when_every_rank_has_its_part_and_finite_only_if_all_are():
    hub = Hub("r")
    Stream(ranks=RANKS, steps=151).events(hub)
    assert [p.step for p in hub.ledger.points] == [50, 100, 150]
    hub.rewound["151"] = {}

    def part(rank, name, finite=True):
        return kinds(hub.handle(RecoveryPoint(0.0, rank, name, 0, 151, 151, finite, 1, 0.0)))

    assert part(0, "p") == []
    assert "p" in hub.kept
    assert part(1, "p", finite=False) == ["recovery_point"]
    assert not hub.ledger.points[-1].finite


def frame(rank, seq, step, timeline=0):
    place = {
        "run": "r",
        "attempt": 1,
        "rank": rank,
        "seq": seq,
        "timeline": timeline,
        "step": step,
        "table": "t",
    }
    return SignalFrame.build([float(seq)], **place)


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 4), st.randoms(use_true_random=False))
def test_no_step_after_a_rewind_is_lost_whichever_rank_is_first(ranks, random):
    """Every rank goes back from step 30 to 20; the hub learns of it at some point between the first and the last."""
    assembler = Assembler()
    assembler.start(1, tuple(range(ranks)), "t", 0, 0)
    sequence = [(s, s, 0) for s in range(30)] + [(30 + i, 20 + i, 1) for i in range(12)]
    queues = {r: [frame(r, *at) for at in sequence] for r in range(ranks)}
    closed, rewound = [], False
    while any(queues.values()):
        rank = random.choice([r for r, q in queues.items() if q])
        item = queues[rank].pop(0)
        closed += [c.step for c in assembler.add(item)]
        if not rewound and all(len(q) <= 12 for q in queues.values()):
            assembler.rewind(1, 20)  # the last rank said that it has applied it
            rewound = True
            closed.append("rewound")
    at = closed.index("rewound")
    assert closed[at + 1 :] == list(range(20, 32))
    assert np.all(np.array(closed[:at]) < 30)


def test_the_hub_s_state_with_several_ranks_survives_a_snapshot():
    out, hub = Stream(onset=200, ranks=RANKS, incurable=True, steps=420).events(Hub("r")), Hub("r")
    twin = Hub("r")
    for n, (event, effects) in enumerate(out):
        if n and n % 97 == 0:
            twin = Hub("r")
            twin.load_state_dict(hub.state_dict())
            hub = twin
        assert hub.handle(event) == effects
