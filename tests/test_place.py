"""Where a rank is, and that ranks of one attempt meet each other and nobody of an attempt before."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from foreshock.pipeline import place
from foreshock.pipeline.place import Meeting, Place, here


@pytest.fixture
def store(monkeypatch):
    """One store for the threads of this process that play ranks, each in its first watch."""
    shared = dist.HashStore()
    shared.set_timeout(timedelta(seconds=5))
    monkeypatch.setattr(place, "_default_store", lambda: shared)
    monkeypatch.setattr(place, "_watches", itertools.repeat(0))
    return shared


def meet(world: int, timeout: float = 20.0) -> list[Meeting]:
    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(lambda rank: Meeting(Place(rank, world), timeout), range(world)))


def test_alone_a_process_hears_itself_and_needs_no_store():
    meeting = Meeting(Place())
    meeting.say("hub", {"attempt": 3})
    assert meeting.hear("hub") == {"attempt": 3}
    with pytest.raises(TimeoutError, match="no rank said 'other'"):
        meeting.hear("other", timeout=0)
    assert here() == Place(0, 1, 0, 0)


def test_all_ranks_get_the_nonce_of_rank_0_and_hear_its_words(store):
    meetings = meet(5)
    assert len({m.nonce for m in meetings}) == 1
    meetings[0].say("hub", {"attempt": 1})
    meetings[3].say("node", {"ok": True})
    assert all(m.hear("hub") == {"attempt": 1} and m.hear("node") == {"ok": True} for m in meetings)


def _asked(world):
    for rank in range(1, world):
        with pytest.raises(TimeoutError, match=r"rank 0 did not call foreshock\.watch"):
            Meeting(Place(rank, world), 0)


def _answered(world):
    _asked(world)
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] did not call"):
        Meeting(Place(0, world), 0.05)


def _partly(world):
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(Meeting, Place(0, world), 1.0)
        pool.submit(Meeting, Place(1, world), 5.0).result()
        with pytest.raises(TimeoutError, match=r"ranks \[2\] did not call"):
            first.result()


def _met(world):
    for meeting in meet(world):
        meeting.say("hub", {"attempt": 1})


@pytest.mark.parametrize("died", [_asked, _answered, _partly, _met])
def test_nothing_of_a_dead_attempt_is_heard_in_the_next(store, died):
    """torchrun's store outlives a restart with all that was said in it; however far the attempt before had come."""
    died(3)
    meetings = meet(3)
    assert len({m.nonce for m in meetings}) == 1
    with pytest.raises(TimeoutError):
        meetings[2].hear("hub", timeout=0.05)
    meetings[0].say("hub", {"attempt": 2})
    assert [m.hear("hub") for m in meetings] == [{"attempt": 2}] * 3


def test_a_rank_that_comes_late_is_waited_for(store):
    late = threading.Timer(0.5, lambda: found.append(Meeting(Place(1, 2)).nonce))
    found: list[str] = []
    late.start()
    assert Meeting(Place(0, 2)).nonce == (late.join() or found[0])


def test_without_a_group_there_is_no_store_and_the_reason_is_said():
    with pytest.raises(RuntimeError, match="no store to meet over"):
        Meeting(Place(1, 2))


SCRIPT = """
import json, os, sys
import torch.distributed as dist
from foreshock.pipeline.place import Meeting, here

dist.init_process_group("gloo", init_method=sys.argv[1], rank=int(os.environ["RANK"]), world_size=2)
first, second = Meeting(here()), Meeting(here())
(first if here().rank == 0 else second).say("word", {"from": here().rank})
seen = [m.hear("word", 20)["from"] for m in (first, second)]
print(json.dumps({"place": [here().rank, here().world, here().local_rank, here().node], "nonces": [first.nonce, second.nonce], "seen": seen}))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_processes_meet_twice_over_the_store_of_their_process_group(tmp_path):
    """The contract with torch: the private call that gives the default store, and what the store can do."""
    variables = [
        {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"},
        {"RANK": "1", "LOCAL_RANK": "0", "GROUP_RANK": "1"},
    ]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, f"file://{tmp_path}/store"],
            env={**os.environ, **each}, stdout=subprocess.PIPE, text=True,
        )
        for each in variables
    ]  # fmt: skip
    out = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
    assert [o["place"] for o in out] == [[0, 2, 0, 0], [1, 2, 0, 1]]
    assert out[0]["nonces"] == out[1]["nonces"]
    assert len(set(out[0]["nonces"])) == 2
    assert [o["seen"] for o in out] == [[0, 1], [0, 1]]
