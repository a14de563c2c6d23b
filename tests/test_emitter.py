"""The emitter: in order, at least once, bounded, and never in the way of the step."""

from __future__ import annotations

import threading
import time

import pytest
from conftest import synthetic_table
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.pipeline import emitter as room
from foreshock.pipeline.emitter import JOBS, Emitter, Gone, Later
from foreshock.pipeline.events import Announcement, Frames
from foreshock.signals import SignalFrame

TABLE = synthetic_table()


@pytest.fixture(autouse=True, scope="module")
def impatient():
    before, room.RETRY = room.RETRY, (0.001, 0.01)
    yield
    room.RETRY = before


def frame(seq: int) -> Frames:
    place = {"run": "r", "attempt": 1, "rank": 0, "timeline": 0, "table": TABLE.id}
    return Frames(0.0, (SignalFrame.build([0.0] * len(TABLE.values), seq=seq, step=seq, **place),))


def say(text: str) -> Announcement:
    return Announcement(0.0, text, 0, 0)


class Hub:
    """Takes events, or refuses as `plan` says: a list of how far each delivery gets, "later" or "gone"."""

    def __init__(self, plan=()):
        self.plan, self.taken, self.calls = list(plan), [], 0
        self.done = 0

    def __call__(self, events):
        self.calls += 1
        word = self.plan.pop(0) if self.plan else None
        if word == "later":
            raise Later
        if word == "gone":
            raise Gone
        part = events if word is None else events[:word]
        for number, event in part:
            if number > self.done:
                self.taken.append((number, event))
                self.done = number
        return self.done


@pytest.mark.parametrize("sync", [True, False])
@given(plan=st.lists(st.one_of(st.just("later"), st.integers(0, 3)), max_size=4), count=st.integers(1, 8))
@settings(max_examples=25, deadline=None)
def test_every_event_arrives_once_and_in_order_however_often_the_hub_was_away(sync, plan, count):
    hub = Hub(plan)
    emitter = Emitter(hub, sync=sync)
    for i in range(count):
        emitter.put(lambda i=i: say(str(i)))
    emitter.close()
    assert [event.text for _, event in hub.taken] == [str(i) for i in range(count)]
    assert [number for number, _ in hub.taken] == list(range(1, count + 1))


def test_when_there_is_no_hub_any_more_nothing_is_kept():
    hub = Hub(["gone"])
    emitter = Emitter(hub, sync=False)
    for i in range(50):
        emitter.put(lambda i=i: say(str(i)))
    emitter.close()
    assert emitter.gone
    assert not emitter._events
    assert hub.calls == 1


def test_a_hub_that_is_away_costs_the_oldest_frames_and_no_decision():
    hub = Hub(["later"] * 10**6)
    emitter = Emitter(hub, sync=False, capacity=100)
    emitter.put(lambda: say("decision"))
    for i in range(400):
        emitter.put(lambda i=i: frame(i), frame=True)
        while len(emitter._jobs) > JOBS // 2:
            time.sleep(0.001)
    while emitter._jobs or emitter._busy:
        time.sleep(0.001)
    assert emitter.dropped == 301
    kept = [event for _, event in emitter._events]
    assert isinstance(kept[0], Announcement)
    assert [e.frames[0].seq for e in kept[1:]] == list(range(301, 400))
    hub.plan = []
    emitter.close()
    assert len(hub.taken) == 100


def test_work_that_hangs_bounds_the_queue_of_jobs():
    hold = threading.Event()
    emitter = Emitter(Hub(), sync=False)
    emitter.put(lambda: hold.wait(10) and None)
    for i in range(3 * JOBS):
        emitter.put(lambda i=i: frame(i), frame=True)
    assert len(emitter._jobs) <= JOBS
    assert emitter.dropped >= 2 * JOBS - 16
    hold.set()
    emitter.close()


@pytest.mark.parametrize("sync", [True, False])
def test_an_answer_put_during_a_delivery_goes_with_the_next_one(sync):
    taken = []

    def hub(events):
        for _, event in events:
            taken.append(event.text)
            if event.text == "command":
                emitter.put(lambda: say("answer"))
        return events[-1][0]

    emitter = Emitter(hub, sync=sync)
    emitter.put(lambda: say("command"))
    emitter.close()
    if not sync:
        assert taken == ["command", "answer"]
    else:
        emitter.put(lambda: say("next"))
        assert taken == ["command", "answer", "next"]


def test_a_measurement_that_fails_is_lost_alone(caplog):
    hub = Hub()
    emitter = Emitter(hub, sync=False)
    emitter.put(lambda: 1 / 0)
    emitter.put(lambda: say("after"))
    emitter.close()
    assert [event.text for _, event in hub.taken] == ["after"]
    assert "ZeroDivisionError" in emitter.failure


def test_without_events_an_empty_delivery_asks_for_commands():
    asked = threading.Event()

    def hub(events):
        if not events:
            asked.set()
        return 0

    emitter = Emitter(hub, sync=False, poll=0.01)
    assert asked.wait(10)
    emitter.close()
