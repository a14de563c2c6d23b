"""A hub that is dead from the first step costs a rank nothing that grows: queues, memory and calls to it are bounded."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import foreshock
from foreshock.pipeline import emitter
from foreshock.pipeline.cluster import remote

STEPS = 50_000
FULL = 25_000
"""Steps after which every queue is full."""
SLACK = 10_000_000
"""Bytes: 400 a step, where a frame that is kept takes twice that."""


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def dead(ray_session, tmp_path, monkeypatch):
    """A watch whose hub was stopped ("silent": it never answers) or killed ("gone") before the first step."""
    import ray

    monkeypatch.setattr(remote, "ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(remote, "LEAVE_SECONDS", 0.05)
    monkeypatch.setattr(emitter, "RETRY", (0.02, 0.1))
    opened = []

    def watch(state):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        live = foreshock.watch(model, optimizer, run_dir=tmp_path, run="r", data="manual", hub="ray")
        hub = live._link._actor
        pid = ray.get(hub.status.remote())["pid"]
        opened.append((live, hub, pid))
        if state == "silent":
            os.kill(pid, signal.SIGSTOP)
        else:
            ray.kill(hub, no_restart=True)
        return live

    yield watch
    for live, hub, pid in opened:
        ray.kill(hub, no_restart=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        live.close()


def until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["silent", "gone"])
def test_queues_and_memory_stay_bounded(dead, state):
    live = dead(state)
    queue = live._emitter
    memory = {}
    for step in range(STEPS):
        assert live.step(1.0, 1.0).step == step + 1
        if step % 500 == 0:
            assert len(queue._jobs) <= emitter.JOBS
            assert len(queue._events) <= queue._capacity
        if step in (FULL, STEPS - 1):
            memory[step] = resident()
    assert memory[STEPS - 1] - memory[FULL] < SLACK
    assert queue.failure is None
    if state == "gone":
        assert queue.gone
        assert not queue._jobs
        assert not queue._events
        assert live._link.failure == "the hub is gone"
        return
    until(lambda: not queue._jobs)
    until(lambda: queue.dropped + len(queue._events) == STEPS + 2)  # every frame, the policy and the hello
    assert queue.dropped >= STEPS - queue._capacity
    assert live._facts()["dropped"] == queue.dropped


@pytest.mark.slow
def test_a_rank_has_at_most_one_call_at_a_silent_hub(dead, monkeypatch):
    """An unanswered call stays in the rank's process, with its frames, until the hub is dead."""
    import ray

    live = dead("silent")
    actor, calls, asked = live._link._actor, [], []

    class Counted:
        def remote(self, batch):
            calls.append(actor.deliver.remote(batch))
            return calls[-1]

    ask = live._link._ask
    monkeypatch.setattr(live._link, "_actor", type("Actor", (), {"deliver": Counted()}))
    monkeypatch.setattr(live._link, "_ask", lambda *given: (asked.append(given), ask(*given))[1])
    while len(asked) < 4:
        live.step(1.0, 1.0)
        time.sleep(0.001)
    assert sum(not ray.wait([call], timeout=0)[0] for call in calls) <= 1
