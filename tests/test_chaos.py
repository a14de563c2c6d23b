"""Real training while things are killed: some scenarios of `benchmarks/chaos.py` again, and its committed rows."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import POLICY, synthetic_table

from foreshock.pipeline.assembly import AHEAD
from foreshock.pipeline.cluster import actor, pace
from foreshock.pipeline.cluster.wire import Batch, pack
from foreshock.pipeline.events import Frames, Hello, PolicyLoaded
from foreshock.signals import SignalFrame

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import chaos
from chaos_worker import HUB_POINTS, RANK_POINTS

SEED = 7
"""Not one of the benchmark's."""
DICE = random.Random(SEED)
AGAIN = [f"hub dies {DICE.choice(sorted(HUB_POINTS))}", "hub gone for good"]
MORE = [f"rank dies {DICE.choice(RANK_POINTS)}", "two jobs at once"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*AGAIN, *(pytest.param(name, marks=pytest.mark.rig) for name in MORE)])
def test_training_ends_and_its_record_is_whole(ray_session, tmp_path, name):
    address = ray_session.address_info["gcs_address"]
    row = chaos.run(name, SEED, address, tmp_path / "place")
    assert row["ok"], row["wrong"]


def test_every_scenario_was_run_and_is_green():
    rows = {(r["scenario"], r["seed"]): r for r in chaos.load()}
    if not rows:
        pytest.skip("no rows are committed yet: python benchmarks/chaos.py")
    assert set(rows) == set(chaos.jobs())
    assert [(job, row["wrong"]) for job, row in rows.items() if not row["ok"]] == []


# -- a backlog that comes back rank by rank ------------------------------------------------------------------------

TABLE = synthetic_table()
BACKLOG = 200


def backlog(rank: int, upto: int = BACKLOG) -> Batch:
    """What a rank has to say after its hub was away for many steps."""
    greeting = [PolicyLoaded(0.0, POLICY, "test.yaml"), Hello(0.0, 1, (0, 1), TABLE, "enforce")]
    events = [] if rank else greeting
    for step in range(upto):
        place = {"run": "r", "attempt": 1, "rank": rank, "seq": step, "timeline": 0, "step": step}
        frame = SignalFrame.build([0.1] * len(TABLE.values), table=TABLE.id, **place)
        events.append(Frames(0.0, (frame,)))
    return Batch(1, {f"1/{rank}": [(n + 1, pack(event)) for n, event in enumerate(events)]})


@pytest.fixture
def hub(tmp_path):
    hub = actor.HubActor(str(tmp_path), "r")
    asyncio.run(hub.begin("n", 2))
    yield hub
    hub._close()


def hand_in(hub: actor.HubActor, *batches: Batch) -> dict[str, int]:
    async def call() -> dict[str, int]:
        replies = await asyncio.gather(*map(hub.deliver, batches))
        return {source: number for reply in replies for source, number in reply.acked.items()}

    return asyncio.run(call())


def test_the_first_rank_to_come_back_does_not_close_the_steps_of_the_other(hub):
    acked = hand_in(hub, backlog(0))
    assert acked["1/0"] <= 2 + AHEAD
    for rank in [1, 0] * BACKLOG:
        acked |= hand_in(hub, backlog(rank))
        if acked == {"1/0": BACKLOG + 2, "1/1": BACKLOG}:
            break
    assembler = hub._shell.hub.assembler
    assert (hub._shell.hub.clock, assembler.dropped, assembler.gaps) == (BACKLOG, 0, 0)


def test_backlogs_that_come_together_are_taken_at_once(hub):
    assert hand_in(hub, backlog(0), backlog(1)) == {"1/0": BACKLOG + 2, "1/1": BACKLOG}
    assembler = hub._shell.hub.assembler
    assert (hub._shell.hub.clock, assembler.dropped, assembler.gaps) == (BACKLOG, 0, 0)


def test_a_rank_that_does_not_come_is_waited_for_once(hub, monkeypatch):
    now = [time.monotonic()]
    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: now[0]))
    assert hand_in(hub, backlog(0))["1/0"] <= 2 + AHEAD
    now[0] += pace.LATE_SECONDS + 1
    for upto in (BACKLOG, BACKLOG + 50, BACKLOG + 100):
        assert hand_in(hub, backlog(0, upto)) == {"1/0": upto + 2}
        assert hub._shell.hub.step == upto - 1 - AHEAD


def test_a_hub_that_died_before_the_first_step_waits_for_its_ranks_when_it_is_back(tmp_path):
    first = actor.HubActor(str(tmp_path), "r")
    asyncio.run(first.begin("n", 2))
    first._shell.close()
    again = actor.HubActor(str(tmp_path), "r")
    assert hand_in(again, backlog(1, 3)) == {"1/1": 0}
    assert hand_in(again, backlog(0, 3), backlog(1, 3)) == {"1/0": 5, "1/1": 3}
    assert again._shell.hub.clock == 3
    asyncio.run(again.deliver(Batch(1, {}, leaving=(0,))))
    assert again._shell is not None
    asyncio.run(again.deliver(Batch(1, {}, leaving=(1,))))
    assert again._shell is None
