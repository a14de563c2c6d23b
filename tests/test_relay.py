"""The relay's book: whatever order ranks come in, one frame a step goes up, and nothing is acknowledged too early."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.pipeline.assembly import AHEAD
from foreshock.pipeline.cluster import pace
from foreshock.pipeline.cluster.relay import Node
from foreshock.pipeline.cluster.wire import pack
from foreshock.pipeline.events import Ack, Frames
from foreshock.signals import Scope, SignalFrame, SignalKey, SignalTable

TABLE = SignalTable(
    (SignalKey("attention", "h1", 0, 0), SignalKey("symptom", "loss", scope=Scope.PER_RANK)),
    (SignalKey("router", "tokens", scope=Scope.SUMMED),),
)
RANKS = (4, 5, 6)


def frame(rank: int, step: int, timeline: int = 0) -> bytes:
    return pack(
        Frames(
            0.0,
            (
                SignalFrame.build(
                    [0.5 if rank == 5 else float("nan"), float(rank)], counts=[10**15 + rank], run="r", attempt=1,
                    rank=rank, seq=step, timeline=timeline, step=step, table=TABLE.id,
                ),
            ),
        )
    )  # fmt: skip


def ack(rank: int, step: int):
    return pack(Ack(0.0, "i1.1", rank, "applied", step))


def up(node: Node, upto: dict[str, int] | None = None) -> list[tuple[str, int, object]]:
    """What waits for the hub, which takes all of it (or as far as `upto`)."""
    items = node.waiting()
    node.acknowledged({s: (rows[-1][0] if upto is None else upto.get(s, 0)) for s, rows in items.items()})
    return [(source, number, item) for source, rows in items.items() for number, item in rows]


@given(order=st.permutations([(rank, step) for rank in RANKS for step in range(4)]))
@settings(max_examples=60)
def test_one_frame_a_step_in_order_whoever_comes_first(order):
    node, counters = Node(1, RANKS), dict.fromkeys(RANKS, 0)
    steps = {rank: [s for r, s in order if r == rank] for rank in RANKS}
    for rank in RANKS:
        steps[rank].sort()
    sent = []
    for rank, _ in order:
        counters[rank] += 1
        node.take(f"1/{rank}", [(counters[rank], frame(rank, counters[rank] - 1))])
        sent += up(node)
    frames = [SignalFrame.from_bytes(item) for _, _, item in sent]
    assert [f.step for f in frames] == [0, 1, 2, 3]
    assert [number for _, number, _ in sent] == [1, 2, 3, 4]
    for f in frames:
        assert f.rank == 4
        assert f.values.tolist() == [0.5, 5.0]
        assert f.counts.tolist() == [3 * 10**15 + 15]
    assert all(rank.acked == 4 for rank in node.ranks.values())


def test_a_frame_is_acknowledged_only_with_the_step_that_it_became_part_of():
    node = Node(1, RANKS)
    node.take("1/4", [(1, frame(4, 0)), (2, ack(4, 0)), (3, frame(4, 1))])
    assert [source for source, _, _ in up(node)] == ["1/4"]
    assert node.ranks["1/4"].acked == 0
    for rank in (5, 6):
        node.take(f"1/{rank}", [(1, frame(rank, 0))])
    assert [source for source, _, _ in up(node, upto={})] == ["1/node-4"]
    assert node.ranks["1/4"].acked == 0
    up(node)
    assert node.ranks["1/4"].acked == 2
    assert node.ranks["1/5"].acked == 1


def test_what_is_handed_in_again_counts_once():
    node = Node(1, (4, 5))
    for _ in range(3):
        node.take("1/4", [(1, frame(4, 0)), (2, ack(4, 0))])
    node.take("1/5", [(1, frame(5, 0))])
    assert sorted(source for source, _, _ in up(node)) == ["1/4", "1/node-4"]
    assert up(node) == []


def backlog(rank: int, start: int, stop: int) -> list[tuple[int, bytes]]:
    return [(step + 1, frame(rank, step)) for step in range(start, stop)]


def test_a_rank_that_fell_behind_is_waited_for_once_then_it_does_not_hold_the_others(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: now[0]))
    node = Node(1, (4, 5))
    node.take("1/4", backlog(4, 0, AHEAD + 3))
    assert node.ranks["1/4"].taken == AHEAD
    assert up(node) == []
    now[0] += pace.LATE_SECONDS + 1
    node.take("1/4", backlog(4, 0, AHEAD + 3))
    frames = [SignalFrame.from_bytes(item) for _, _, item in up(node)]
    assert [(f.rank, f.step) for f in frames] == [(4, 0), (4, 1), (4, 2)]
    node.take("1/5", [(1, frame(5, 0))])
    up(node)
    assert node.ranks["1/5"].acked == 1, "too late to count, and not asked for again"


def test_after_the_relay_was_away_the_first_to_come_back_does_not_close_the_steps_of_the_other():
    node, first, stop = Node(1, (4, 5)), 500, 700
    sent = []
    while any(rank.taken < stop for rank in node.ranks.values()):
        for rank in (4, 4, 5):
            node.take(f"1/{rank}", backlog(rank, first, stop))
        sent += [SignalFrame.from_bytes(item) for _, _, item in up(node)]
    assert [f.step for f in sent] == list(range(first, stop))
    assert {f.counts.tolist()[0] for f in sent} == {2 * 10**15 + 9}, "both ranks are in each"


def test_a_rank_that_has_left_is_not_waited_for():
    node = Node(1, (4, 5))
    node.left(5)
    node.take("1/4", backlog(4, 0, AHEAD + 8))
    assert len(up(node)) == 8


def test_after_a_rewind_the_old_timeline_is_sent_as_far_as_it_came():
    node = Node(1, (4, 5))
    node.take("1/4", [(1, frame(4, 7)), (2, frame(4, 3, timeline=1))])
    node.take("1/5", [(1, frame(5, 3, timeline=1))])
    frames = [SignalFrame.from_bytes(item) for _, _, item in up(node)]
    assert [(f.timeline, f.step) for f in frames] == [(0, 7), (1, 3)]
