"""Ray beside a job: it comes up for every rank, changes nothing else in the process, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

import pytest

from foreshock.pipeline.cluster import runtime
from foreshock.pipeline.cluster.runtime import NoRuntime, connect
from foreshock.pipeline.place import Meeting, Place

PRELUDE = """
import glob, json, os, signal, sys, time
import torch.distributed as dist
from foreshock.pipeline.cluster import runtime
from foreshock.pipeline.place import Meeting, here

received = []
signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo", init_method=os.environ.get("STORE", "env://"), rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
place, meeting = here(), Meeting(here())
environment, hook = dict(os.environ), sys.excepthook
connection = runtime.connect(place, meeting, 120)
import ray

assert dict(os.environ) == environment
assert sys.excepthook is hook

class Hub:
    def pid(self):
        return os.getpid()

def hub():
    if place.rank == 0:
        actor = ray.remote(Hub).options(name="hub", lifetime="detached", num_cpus=0).remote()
        meeting.say("hub", {"pid": ray.get(actor.pid.remote())})
    word = meeting.hear("hub", 120)
    actor = ray.get_actor("hub", namespace="foreshock")
    assert ray.get(actor.pid.remote()) == word["pid"]
    return actor

def gcs():
    children = [int(pid) for path in glob.glob("/proc/self/task/*/children") for pid in open(path).read().split()]
    return next(pid for pid in children if open(f"/proc/{pid}/comm").read().strip() == "gcs_server")

def report(**facts):
    print("FACTS", json.dumps({"rank": place.rank, **facts}), flush=True)
"""


class Job:
    """Processes of one job with a Ray directory of its own, by which whatever they left is found."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="fs-", dir="/tmp"))  # short, because sockets live there
        self.started: list[subprocess.Popen[str]] = []

    def start(self, command: list[str], script: str | Path, **variables: str) -> subprocess.Popen[str]:
        path = self.directory / "script.py" if isinstance(script, str) else script
        if isinstance(script, str):
            path.write_text(PRELUDE + script)
        variables = {
            "RAY_TMPDIR": str(self.directory),
            "HOME": "/proc/nowhere",
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        started = subprocess.Popen(
            [sys.executable, *command, str(path)], env={**os.environ, **variables}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=self.directory,
        )  # fmt: skip
        self.started.append(started)
        return started

    def output(self, started: subprocess.Popen[str]) -> str:
        text = started.communicate(timeout=240)[0]
        assert started.returncode == 0, text
        return text

    def facts(self, *started: subprocess.Popen[str]) -> dict[int, dict]:
        """What the ranks reported, in rank order."""
        lines = [line for each in started for line in self.output(each).splitlines()]
        found = [json.loads(line.split(" ", 1)[1]) for line in lines if line.startswith("FACTS")]
        return {each["rank"]: each for each in sorted(found, key=lambda f: f["rank"])}

    def processes(self) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if f"{self.directory}/foreshock" in path.read_text(errors="replace"):
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return found

    def gone(self, seconds: float = 30.0) -> bool:
        deadline = time.monotonic() + seconds
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.2)
        return not self.processes()


@pytest.fixture
def job():
    job = Job()
    yield job
    for started in job.started:
        started.kill()
        started.communicate()
    for pid in job.processes():
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(job.directory, ignore_errors=True)


def test_an_address_that_nobody_serves_ends_every_rank_with_the_reason(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    meeting = Meeting(Place())
    with pytest.raises(NoRuntime, match=r"ConnectionRefusedError.*Ray at this node"):
        connect(Place(0, 2), meeting)
    with pytest.raises(NoRuntime, match=r"rank 0: .*refused"):
        connect(Place(1, 2, 1), meeting)


def test_ranks_that_use_different_ray_clusters_are_not_joined(monkeypatch):
    monkeypatch.setattr(runtime, "_connected", lambda: True)
    monkeypatch.setattr(runtime, "_address", lambda: "10.0.0.1:6379")
    meeting = Meeting(Place())
    assert connect(Place(0, 3), meeting).address == "10.0.0.1:6379"
    assert connect(Place(1, 3, 1), meeting).address == "10.0.0.1:6379"
    monkeypatch.setattr(runtime, "_address", lambda: "10.0.0.2:6379")
    with pytest.raises(NoRuntime, match=r"10\.0\.0\.2:6379, but rank 0 at 10\.0\.0\.1:6379"):
        connect(Place(2, 3, 2), meeting)


def test_a_rank_waits_no_longer_than_told():
    with pytest.raises(NoRuntime, match="no rank said 'runtime'"):
        connect(Place(1, 2, 1), Meeting(Place()), timeout=0)


def test_a_node_that_cannot_join_tells_its_other_ranks(monkeypatch):
    meeting = Meeting(Place())
    word = {"node": 0, "ours": True, "environment": {}, "address": "127.0.0.1:9", "failure": ""}
    meeting.say("runtime", word)
    monkeypatch.setattr(runtime, "_JOIN", "raise SystemExit(3)")
    with pytest.raises(NoRuntime, match="refused"):
        connect(Place(2, 4, 0, 1), meeting)
    with pytest.raises(NoRuntime, match=r"rank 2: .*refused"):
        connect(Place(3, 4, 1, 1), meeting)


@pytest.mark.slow
def test_torchrun_gets_a_ray_of_its_own_and_keeps_its_handler_environment_and_home(job):
    """Without a home directory to keep a token in."""
    script = """
hub()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.5)
connection.close()
connection.close()
report(address=connection.address, received=received, connected=ray.is_initialized())
dist.destroy_process_group()
"""
    facts = job.facts(
        job.start(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], script)
    )
    assert facts[0]["address"] == facts[1]["address"]
    assert [(f["received"], f["connected"]) for f in facts.values()] == [([signal.SIGTERM], False)] * 2
    assert job.gone()


@pytest.mark.slow
@pytest.mark.rig
def test_a_second_node_joins_and_leaves_with_its_ranks(job):
    """Two agents on one machine are two nodes: the second one's first rank brings a raylet of its own."""
    script = """
hub()
deadline = time.monotonic() + 60
while sum(node["Alive"] for node in ray.nodes()) < 2 and time.monotonic() < deadline:
    time.sleep(0.2)
meeting.say(f"counted/{place.rank}", {})
for rank in range(place.world):
    meeting.hear(f"counted/{rank}", 60)
nodes = sum(node["Alive"] for node in ray.nodes())
connection.close()
report(node=place.node, nodes=nodes)
dist.destroy_process_group()
"""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    agent = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    agent += ["--master-addr", "127.0.0.1", "--master-port", port, "--node-rank"]
    facts = job.facts(*(job.start([*agent, node], script) for node in "01"))
    assert [(f["node"], f["nodes"]) for f in facts.values()] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert job.gone()


@pytest.mark.slow
@pytest.mark.rig
def test_a_rank_0_that_is_killed_takes_ray_along_and_the_other_rank_lives_to_close(job):
    script = """
actor = hub()
if place.rank == 0:
    meeting.hear("ready", 60)
    os.kill(os.getpid(), signal.SIGKILL)
meeting.say("ready", {})
deadline, failure = time.monotonic() + 60, None
while failure is None and time.monotonic() < deadline:
    try:
        ray.get(actor.pid.remote(), timeout=2)
    except Exception as error:
        failure = type(error).__name__
    time.sleep(0.2)
connection.close()
report(failure=failure)
os._exit(0)  # the process group would wait for rank 0
"""
    variables = {"WORLD_SIZE": "2", "STORE": f"file://{job.directory}/store"}
    first, second = (
        job.start([], script, RANK=str(rank), LOCAL_RANK=str(rank), **variables) for rank in (0, 1)
    )
    assert job.facts(second)[1]["failure"] is not None
    assert first.wait(30) == -signal.SIGKILL
    assert job.gone()


@pytest.mark.slow
@pytest.mark.rig
@pytest.mark.parametrize("blow", ["SIGKILL", "SIGSTOP"])
def test_a_gcs_that_dies_or_hangs_ends_neither_the_process_nor_its_end(job, blow):
    """Ray ends a driver this many seconds after its GCS; here the trainer's environment even asks for two."""
    script = f"""
actor = hub()
runtime.CLOSE_SECONDS = 2.0
os.kill(gcs(), signal.{blow})
time.sleep(8)
connection.close()
report(connected=ray.is_initialized())
"""
    facts = job.facts(job.start([], script, RAY_gcs_rpc_server_reconnect_timeout_s="2"))
    assert facts == {0: {"rank": 0, "connected": False}}
    assert job.gone()


@pytest.mark.slow
def test_the_example_trains_and_leaves_a_record_of_both_ranks(job):
    example = Path(__file__).parents[1] / "examples" / "torchrun.py"
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    text = job.output(job.start(agent, example, STEPS="50"))
    assert "step 50: loss" in text
    assert "NOT WATCHING" not in text
    (run,) = (job.directory / "foreshock_runs").iterdir()
    with closing(sqlite3.connect(run / "run.db")) as database:
        delivered = dict(database.execute("SELECT source, number FROM delivery"))
    assert set(delivered) == {"1/0", "1/1"}
    assert min(delivered.values()) >= 50
    assert job.gone()
