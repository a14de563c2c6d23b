"""Killed at any point, started again on the same directory: nothing is lost, nothing is doubled."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from foreshock.pipeline.replay import replay
from foreshock.pipeline.store import RunStore

HARNESS = Path(__file__).with_name("crash_harness.py")

TRAINING = """
import sys
sys.path.insert(0, sys.argv[2])
import foreshock
from conftest import Small
from foreshock.lab.flash import KernelFault
small = Small(steps=100000)
print("ready", flush=True)
with foreshock.watch(small.model, small.optimizer, run_dir=sys.argv[1], run="r", policy="unattended", allow="enforce", start=20, points_every=20) as watch:
    step = 0
    for batch in watch.batches(small.loader):
        small.break_attention(KernelFault("delta", 6, "up", gain=3.0) if step >= 30 else None)
        step = watch.step(small.train_step(batch)).step
        if step >= int(sys.argv[3]):
            break
print("done", flush=True)
"""

FULL_DISK = TRAINING.replace(
    "        if step >= int(sys.argv[3]):",
    """        if step == 10:
            import resource, signal
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        if step >= int(sys.argv[3]):""",
)


@pytest.mark.slow
def test_when_the_disk_takes_no_more_training_ends_normally_and_nothing_is_done(tmp_path):
    """The operating system refuses every further byte (a file-size limit), in the middle of the run."""
    run = tmp_path / "run"
    command = [sys.executable, "-c", FULL_DISK, str(run), str(HARNESS.parent), "80"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert child.returncode == 0, child.stderr
    assert child.stdout.endswith("done\n")
    assert "NOT ACTING" in child.stderr
    with RunStore.open_readonly(run) as store:
        assert store.verify().ok
        assert [r for r in store.audit() if r.kind == "command.issued"] == []


@pytest.mark.slow
def test_killed_at_any_point_of_the_shell_the_record_is_whole(tmp_path):
    kills = 16
    result = subprocess.run(
        [sys.executable, str(HARNESS), str(tmp_path), str(kills), "1"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(rows) == kills, result.stderr
    assert sum(9 in row["codes"] for row in rows) > kills / 2
    for row in rows:
        assert row["codes"][-1] == 0
        assert row["ok"], row
        assert row["difference"] is None, row
        assert len(row["issued"]) == len(set(row["issued"])), row
        assert row["issued"]


@pytest.mark.slow
def test_a_training_killed_at_random_moments_keeps_a_record_that_verifies_and_replays(tmp_path):
    run, rng = tmp_path / "run", random.Random(4)
    command = [sys.executable, "-c", TRAINING, str(run), str(HARNESS.parent)]
    for _ in range(3):
        child = subprocess.Popen(
            [*command, "100000"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        anchor = run / "audit.anchor"
        before = anchor.stat().st_mtime if anchor.exists() else 0.0
        assert child.stdout.readline() == "ready\n"
        while not anchor.exists() or anchor.stat().st_mtime == before:
            assert child.poll() is None
            time.sleep(0.01)
        time.sleep(2.5 * rng.random())
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    last = subprocess.run([*command, "60"], capture_output=True, text=True, timeout=120, check=False)
    assert last.stdout.endswith("done\n"), last.stderr
    with RunStore.open_readonly(run) as store:
        assert store.verify().ok
        result = replay(store)
        records = list(store.audit())
    assert result.difference is None
    attempts = [
        r.payload["attempt"] for r in records if r.kind == "attempt.started"
    ]  # one killed at once leaves none
    assert attempts == list(range(1, len(attempts) + 1))
    assert len(attempts) >= 2
    issued = [r.payload["id"] for r in records if r.kind == "command.issued"]
    assert len(issued) == len(set(issued))
