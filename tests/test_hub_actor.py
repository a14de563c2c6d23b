"""The hub as an actor, on real Ray: what it acknowledged is kept, whatever is killed, and runs do not meet."""

from __future__ import annotations

import os
import signal
import time

import pytest
from conftest import POLICY, synthetic_table

from foreshock.pipeline.cluster.remote import RemoteLink
from foreshock.pipeline.cluster.wire import Batch, pack
from foreshock.pipeline.emitter import Gone
from foreshock.pipeline.events import Frames, Hello, PolicyLoaded
from foreshock.pipeline.link import Welcome
from foreshock.pipeline.replay import fold, replay
from foreshock.pipeline.shell import Shell
from foreshock.pipeline.store import RunStore
from foreshock.signals import SignalFrame

TABLE = synthetic_table()


def frame(rank: int, step: int, attempt: int = 1) -> bytes:
    place = {"run": "r", "attempt": attempt, "rank": rank, "timeline": 0, "table": TABLE.id}
    return pack(Frames(0.0, (SignalFrame.build([0.1] * len(TABLE.values), seq=step, step=step, **place),)))


def greeting(ranks=(0, 1), attempt: int = 1) -> list:
    hello = Hello(0.0, attempt, ranks, TABLE, "enforce")
    return [(1, pack(PolicyLoaded(0.0, POLICY, "test.yaml"))), (2, pack(hello))]


@pytest.fixture
def launch(ray_session):
    import ray

    from foreshock.pipeline.cluster import actor

    started = []

    def start(directory, **options):
        handle = actor.launch(directory, "r", **options)
        started.append(handle)
        return handle

    yield start
    for handle in started:
        ray.kill(handle, no_restart=True)


def ask(call, timeout=30):
    import ray

    return ray.get(call, timeout=timeout)


def until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def frames_in(directory):
    with RunStore.open_readonly(directory) as store:
        assert store.verify().ok
        assert replay(store).difference is None
        return [(f.rank, f.step) for _, e, _, _ in fold(store) if isinstance(e, Frames) for f in e.frames]


def test_frames_wait_for_the_hello_and_count_once(launch, tmp_path):
    hub = launch(tmp_path)
    assert ask(hub.begin.remote("n1", 2))["attempt"] == 1
    early = Batch(1, {"1/1": [(1, frame(1, 0))]})
    assert ask(hub.deliver.remote(early)).acked == {"1/1": 0}
    assert ask(hub.deliver.remote(Batch(1, {"1/0": [*greeting(), (3, frame(0, 0))]}))).acked == {"1/0": 3}
    for _ in range(2):
        assert ask(hub.deliver.remote(early)).acked == {"1/1": 1}
    more = Batch(1, {"1/0": [(3, frame(0, 0)), (4, frame(0, 1))]})
    assert ask(hub.deliver.remote(more)).acked == {"1/0": 4}
    ask(hub.deliver.remote(Batch(1, {}, leaving=(0, 1))))
    assert frames_in(tmp_path) == [(0, 0), (1, 0), (0, 1)]


def test_a_hub_that_is_killed_between_deliveries_goes_on_where_it_was(launch, tmp_path):
    hub = launch(tmp_path)
    ask(hub.begin.remote("n1", 1))
    link = RemoteLink(hub, 0, Welcome(1))
    assert link.deliver([(1, PolicyLoaded(0.0, POLICY, "test.yaml"))]) == 1
    ask(hub.deliver.remote(Batch(1, {"1/0": greeting((0,))})))
    for step in range(12):
        number = step + 3
        batch = Batch(1, {"1/0": [(number, frame(0, step))]})
        if step in (4, 9):
            pid = ask(hub.status.remote())["pid"]
            os.kill(pid, signal.SIGKILL)

        def delivered(batch=batch, number=number):
            import ray

            try:
                return ask(hub.deliver.remote(batch), 10).acked["1/0"] == number
            except ray.exceptions.RayError:
                return False

        until(delivered)
    ask(hub.deliver.remote(Batch(1, {}, leaving=(0,))))
    assert frames_in(tmp_path) == [(0, step) for step in range(12)]


def test_two_jobs_on_one_cluster_do_not_meet(launch, tmp_path):
    hubs = [launch(tmp_path / name) for name in "ab"]
    assert len({ask(hub.status.remote())["pid"] for hub in hubs}) == 2
    for n, hub in enumerate(hubs):
        ask(hub.begin.remote(f"n{n}", 1))
        ask(hub.deliver.remote(Batch(1, {"1/0": [*greeting((0,)), (3, frame(0, n))]}, leaving=(0,))))
    assert [frames_in(tmp_path / name) for name in "ab"] == [[(0, 0)], [(0, 1)]]


def test_when_all_have_left_another_process_may_take_the_run_up_and_a_new_attempt_goes_on(launch, tmp_path):
    hub = launch(tmp_path)
    ask(hub.begin.remote("n1", 2))
    ask(hub.deliver.remote(Batch(1, {"1/0": [*greeting(), (3, frame(0, 0))]}, leaving=(0,))))
    held = Shell(tmp_path, "r", lambda command: None)
    assert "another watch" in held.failure
    held.close()
    ask(hub.deliver.remote(Batch(1, {"1/1": [(1, frame(1, 0))]}, leaving=(1,))))
    assert ask(hub.status.remote())["state"] == "ended"
    here = Shell(tmp_path, "r", lambda command: None)
    assert here.failure is None
    here.close()
    assert ask(hub.begin.remote("n2", 1))["attempt"] == 2
    assert ask(hub.begin.remote("n2", 1))["attempt"] == 2
    assert ask(hub.deliver.remote(Batch(1, {"1/0": [(4, frame(0, 1))]}))).stale
    again = Batch(2, {"2/0": [*greeting((0,), 2), (3, frame(0, 1, 2))]}, leaving=(0,))
    ask(hub.deliver.remote(again))
    assert frames_in(tmp_path) == [(0, 0), (1, 0), (0, 1)]


def test_a_rank_of_an_older_attempt_is_told_and_stops(launch, tmp_path, caplog):
    hub = launch(tmp_path)
    ask(hub.begin.remote("n1", 1))
    link = RemoteLink(hub, 0, Welcome(1))
    ask(hub.begin.remote("n2", 1))
    with pytest.raises(Gone, match="another attempt"):
        link.deliver([])
    assert not link.acting
    assert "NOT WATCHING" in caplog.text


def test_an_idle_hub_ends_and_the_next_watch_starts_another(launch, tmp_path):
    from foreshock.pipeline.cluster import actor

    first = launch(tmp_path, idle=0.5)
    pid = ask(first.status.remote())["pid"]

    def gone():
        try:
            actor.find(tmp_path)
        except ValueError:
            return True
        return False

    until(gone)
    second = launch(tmp_path)
    assert ask(second.status.remote())["pid"] != pid
    assert ask(second.begin.remote("n2", 1))["attempt"] == 1


def test_status_and_answers_reach_a_run_whose_directory_is_elsewhere(
    launch, tmp_path, ray_session, monkeypatch
):
    import typer

    from foreshock.cli import reach

    hub = launch(tmp_path)
    ask(hub.begin.remote("n1", 1))
    ask(hub.deliver.remote(Batch(1, {"1/0": greeting((0,))})))
    monkeypatch.setenv("RAY_ADDRESS", ray_session.address_info["gcs_address"])
    monkeypatch.setattr("ray.init", lambda **_: None)  # this process is connected already
    place = reach.reach("r")
    assert reach.read_status(place)["attempt"] == 1
    reach.push(place, "mode", {"argument": "observe", "who": "tester"})
    until(lambda: not ask(hub.deliver.remote(Batch(1, {"1/0": []}))).acting)
    with RunStore.open_readonly(tmp_path) as store:
        assert [r.payload["who"] for r in store.audit() if r.kind == "human"] == ["tester"]
    with pytest.raises(typer.BadParameter, match="hubs of the cluster"):
        reach.reach("another")
