"""Chaos: real training of two ranks in which the hub, a rank, the driver or all of Ray is killed, and what was left.

    python benchmarks/chaos.py [PATTERN]      runs what evidence/chaos.json does not have yet (about half an hour)

A row is green (`ok`) if training went as far as it should, the audit log verifies, its replay is equal, every frame of
an attempt that ended by itself was closed once and in order, and every command was applied once, on both ranks at one
step, or on none. `tests/test_chaos.py` runs some of the scenarios and holds the rows.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
FILE = HERE / "evidence" / "chaos.json"
sys.path.insert(0, str(HERE / "tests"))

from chaos_worker import HUB_POINTS, RANK_POINTS, WORLD, Doomed, Job  # noqa: E402

WORKER = HERE / "tests" / "chaos_worker.py"
SEEDS = (0, 1)
NEVER = 10**6
SURVIVE = 75.0
"""Seconds that ranks must live on without their Ray: Ray itself would end them after 60."""
PATIENCE = 240.0
"""Seconds after which a scenario that stands still has failed; a machine with nothing else to do needs under 20."""


STARTED: list[Ranks] = []
HEADS: dict[str, int] = {}
"""The process that holds a cluster of ours, by the cluster's address."""


class Failed(AssertionError):
    """The scenario did not come to its end; the message holds what the ranks said last."""


# -- processes ----------------------------------------------------------------------------------------------------


class Ranks:
    """The processes of one attempt. `slot` tells attempts and jobs apart in one directory."""

    def __init__(self, job: Job, slot: str = "1", driver: bool = False) -> None:
        self.job = replace(job, out=f"{job.directory}.{slot}")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = [[]] if driver else [[str(rank)] for rank in range(WORLD)]
        given = json.dumps(asdict(self.job))
        environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        self.processes: list[subprocess.Popen[bytes]] = []
        STARTED.append(self)
        for rank in ranks:
            with self._log("-".join([self.job.out, *rank])).open("wb") as log:
                command = [sys.executable, str(WORKER), "driver" if driver else "rank", given, *rank]
                self.processes.append(
                    subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
                )

    @staticmethod
    def _log(name: str) -> Path:
        return Path(f"{name}.log")

    @property
    def logs(self) -> str:
        return "\n".join(
            p.read_text() for p in sorted(Path(self.job.out).parent.glob(f"{Path(self.job.out).name}*.log"))
        )

    def facts(self, rank: int) -> list[dict[str, Any]]:
        file = Path(f"{self.job.out}-{rank}.jsonl")
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def last(self, rank: int, name: str) -> Any:
        return next((f[name] for f in reversed(self.facts(rank)) if name in f), None)

    def reach(self, step: int) -> None:
        """Wait until every rank has come to `step`."""
        self._until(lambda: all((self.last(r, "step") or 0) >= step for r in range(WORLD)), f"step {step}")

    def wait(self, what: Callable[[], bool], name: str) -> None:
        self._until(what, name)

    def end(self) -> list[int]:
        """Wait for the processes; how each ended."""
        self._until(lambda: all(p.poll() is not None for p in self.processes), "the end", done=True)
        return [p.returncode for p in self.processes]

    def kill(self) -> None:
        """The processes, and what of Ray they have started."""
        for process in self.processes:
            family = descendants(process.pid) if process.poll() is None else []
            for pid in (process.pid, *family):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()

    def _until(self, what: Callable[[], bool], name: str, done: bool = False) -> None:
        deadline = time.monotonic() + PATIENCE
        while not what():
            dead = not done and all(p.poll() is not None for p in self.processes)
            if dead or time.monotonic() > deadline:
                self.kill()
                raise Failed(f"{'ended before' if dead else 'never came to'} {name}: {self.logs[-4000:]}")
            time.sleep(0.05)


@contextmanager
def cluster() -> Iterator[str]:
    """A Ray of our own for the time being, in a process of its own; its address."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # before Ray is imported: it looks once
    code = (
        "import ray, time; ray.init(address='local', num_cpus=4, include_dashboard=False, log_to_driver=False,"
        "object_store_memory=80 * 1024**2); print(ray.get_runtime_context().gcs_address, flush=True); time.sleep(1e6)"
    )
    path = os.pathsep.join([str(WORKER.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    environment = {**os.environ, "PYTHONPATH": path}
    head = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert head.stdout is not None
    address = head.stdout.readline().strip()
    HEADS[address] = head.pid
    try:
        yield address
    finally:
        family = descendants(head.pid)
        head.terminate()
        with suppress(subprocess.TimeoutExpired):
            head.wait(20)
        for pid in (head.pid, *family):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        head.wait()


def descendants(pid: int, *names: str) -> list[int]:
    """The processes that `pid` has started, directly or not; those of one of `names`, if there are any."""
    listing = subprocess.run(
        ["ps", "-eo", "pid=,ppid=,comm="], capture_output=True, text=True, check=True
    ).stdout
    processes = [
        (int(p), int(parent), name)
        for p, parent, name in (line.split(None, 2) for line in listing.splitlines())
    ]
    family = {pid}
    while more := {p for p, parent, _ in processes if parent in family} - family:
        family |= more
    return [p for p, _, name in processes if p in family - {pid} and (not names or name.strip() in names)]


# -- what was left ------------------------------------------------------------------------------------------------


def record(directory: str) -> dict[str, Any]:
    """What the run's own files say: is the log whole, is its replay equal, which frames were closed, what was done."""
    from foreshock.pipeline.events import Hello
    from foreshock.pipeline.replay import fold, replay
    from foreshock.pipeline.store import RunStore

    with RunStore.open_readonly(Path(directory)) as store:
        verified, difference = store.verify(), replay(store).difference
        records = list(store.audit())
        clock, closed, runs = 0, dict[str, list[int]](), set[str]()
        for _, event, _, hub in fold(store):
            if isinstance(event, Hello):
                clock = hub.clock
            if hub.hello is not None:
                closed[str(hub.hello.attempt)] = [hub.clock - clock, hub.step + 1 - hub.hello.step]
            runs |= {f.run for f in getattr(event, "frames", ())}
    issued = [r.payload["number"] for r in records if r.kind == "command.issued"]
    applied = [r.payload for r in records if r.kind == "command.applied"]
    return {
        "verified": verified.ok,
        "replay": difference or "equal",
        "attempts": [r.payload["attempt"] for r in records if r.kind == "attempt.started"],
        "closed": closed,
        "lost": [hub.assembler.dropped, hub.assembler.gaps],
        "runs": sorted(runs),
        "issued": issued,
        "steps": [[a["step"] for a in p["acks"].values()] for p in applied],
        "outcomes": [r.payload["verdict"] for r in records if r.kind == "outcome"],
        "disabled": [r.payload["reason"] for r in records if r.kind == "acting.disabled"],
    }


def faults(left: dict[str, Any], attempts: list[Ranks], whole: bool = True) -> list[str]:
    """What is wrong with it. `whole`: the hub lived to hear the last attempt to its end."""
    wrong = []
    if not left["verified"] or left["replay"] != "equal":
        wrong.append("the record is not as written")
    if left["lost"] != [0, 0]:
        wrong.append(f"frames dropped and lost: {left['lost']}")
    wrong += [f"attempt {a}: {n} of {m} steps closed" for a, (n, m) in left["closed"].items() if n != m]
    if left["issued"] != list(range(1, len(left["issued"]) + 1)):
        wrong.append(f"commands are not counted through: {left['issued']}")
    said = []
    for ranks in attempts:
        mine = [[f["step"] for f in ranks.facts(r) if "applied" in f] for r in range(WORLD)]
        if mine[0] != mine[1]:
            wrong.append(f"applied at different steps: {mine}")
        said += mine[0]
    if any(len(set(steps)) != 1 or len(steps) != WORLD for steps in left["steps"]):
        wrong.append(f"acknowledged at different steps: {left['steps']}")
    if whole and [steps[0] - 1 for steps in left["steps"]] != said:
        wrong.append(f"applied at {said}, acknowledged at {left['steps']}")
    last = attempts[-1]
    done = [last.last(r, "done") for r in range(WORLD)]
    if None in done or len({last.last(r, "weights") for r in range(WORLD)}) != 1:
        wrong.append(f"the ranks did not end alike: {done}")
    elif whole and left["closed"][str(left["attempts"][-1])][0] != done[0]:
        wrong.append(f"{done[0]} steps were run, closed: {left['closed']}")
    return wrong


def row(left: dict[str, Any], attempts: list[Ranks], wrong: list[str], **more: Any) -> dict[str, Any]:
    return {"ok": not wrong, "wrong": wrong, "finished": attempts[-1].last(0, "done"), **left, **more}


# -- scenarios ----------------------------------------------------------------------------------------------------


def hub_dies(address: str, place: Path, seed: int, point: str, times: int = 1) -> dict[str, Any]:
    """The hub is killed at `point`, in a passage drawn by `seed`, and started again by Ray."""
    nth = random.Random(f"{point}/{seed}").randint(1, HUB_POINTS[point])
    job = Job(str(place / "run"), "", seed=seed, address=address)
    with hub(address, job, Doomed, point=point, nth=nth, times=times):
        ranks = Ranks(job)
        codes = ranks.end()
    left = record(job.directory)
    wrong = faults(left, [ranks])
    deaths = Path(f"{job.directory}.deaths")
    died = len(deaths.read_text()) if deaths.exists() else 0
    # The steps are short: a command may be past its 64 steps when the hub is back. Nobody applies it; it is given again.
    if codes != [0] * WORLD or died != times or len(left["steps"]) != 1:
        wrong.append(
            f"exit {codes}, the hub died {died} times, applied {left['steps']}: {ranks.logs[-2000:]}"
        )
    return row(left, [ranks], wrong, nth=nth, died=died)


def healed(directory: str) -> bool:
    """Whether the record says that a command was applied on all ranks; the run may go on meanwhile."""
    from foreshock.pipeline.store import RunStore

    if not (Path(directory) / "audit.anchor").exists():
        return False
    with RunStore.open_readonly(Path(directory)) as store:
        return any(record.kind == "command.applied" for record in store.audit())


@contextmanager
def hub(address: str, job: Job, kind: type | None = None, **options: Any) -> Iterator[Any]:
    """The run's hub, started before its ranks come; it ends with the block."""
    import ray

    from foreshock.pipeline.cluster.actor import HubActor, launch

    if not ray.is_initialized():
        ray.init(address=address, log_to_driver=False)
    actor = launch(Path(job.directory), job.run, kind or HubActor, **options)
    try:
        yield actor
    finally:
        ray.kill(actor, no_restart=True)


def hub_gone(address: str, place: Path, seed: int) -> dict[str, Any]:
    """The hub is killed for good in mid-run. `pace`: seconds a step after it, against before."""
    import ray

    job = Job(str(place / "run"), "", seed=seed, address=address, steps=300, onset=NEVER)
    with hub(address, job) as actor:
        ranks = Ranks(job)
        ranks.reach(100)
        ray.kill(actor, no_restart=True)
        at = ranks.last(0, "step")
        codes = ranks.end()
    left = record(job.directory)
    wrong = faults(left, [ranks], whole=False)
    if codes != [0] * WORLD or ranks.logs.count("NOT WATCHING") != WORLD:
        wrong.append(f"exit {codes}, or nothing was said: {ranks.logs[-2000:]}")
    seconds = [[f["seconds"] for f in ranks.facts(0) if "seconds" in f and (f["step"] > at + 20) is late
             and f["step"] > 20] for late in (False, True)]  # fmt: skip
    return row(
        left, [ranks], wrong, pace=round(statistics.median(seconds[1]) / statistics.median(seconds[0]), 2)
    )


def fenced(left: dict[str, Any], attempts: list[Ranks], codes: list[int]) -> list[str]:
    """What is wrong after an attempt in which rank 1 died with a command pending, and another one."""
    wrong = faults(left, attempts)
    if left["attempts"] != [1, 2] or codes != [0] * len(codes):
        wrong.append(f"attempts {left['attempts']}, exit {codes}: {attempts[-1].logs[-2000:]}")
    if "expired" not in left["outcomes"] or len(left["steps"]) != 1 or any(map(applications, attempts[:-1])):
        wrong.append(f"the pending command was not fenced: {left['outcomes']}, applied {left['steps']}")
    return wrong


def applications(ranks: Ranks) -> int:
    return sum("applied" in fact for rank in range(WORLD) for fact in ranks.facts(rank))


def rank_dies(address: str, place: Path, seed: int, point: str) -> dict[str, Any]:
    """Rank 1 kills itself at `point` of a command; the job is started again."""
    job = Job(str(place / "run"), "", seed=seed, address=address)
    with hub(address, job):
        first = Ranks(replace(job, die=point), "1")
        ended = first.end()
        second = Ranks(job, "2")
        codes = second.end()
    left = record(job.directory)
    wrong = fenced(left, [first, second], codes)
    if ended[1] != -signal.SIGKILL or ended[0] == 0:
        wrong.append(f"the first attempt ended with {ended}: {first.logs[-2000:]}")
    if point != "before prepare" and "Unconfirmed" not in first.logs:
        wrong.append(f"rank 0 went on with what rank 1 may not have: {first.logs[-2000:]}")
    return row(left, [first, second], wrong)


def worker_dies(address: str, place: Path, seed: int, point: str) -> dict[str, Any]:
    """The same under Ray Train, which starts the workers again by itself."""
    job = Job(str(place / "run"), "", seed=seed, address=address, die=point, failures=1)
    with hub(address, job):
        ranks = Ranks(job, driver=True)
        codes = ranks.end()
    left = record(job.directory)
    return row(left, [ranks], fenced(left, [ranks], codes))


def driver_dies(address: str, place: Path, seed: int) -> dict[str, Any]:
    """The Ray Train driver is killed, then the hub that outlived it; a new driver takes the run up."""
    import ray

    job = Job(str(place / "run"), "", seed=seed, address=address)
    with hub(address, job) as actor:
        first = Ranks(replace(job, onset=NEVER, steps=NEVER), "1", driver=True)
        first.reach(60)
        first.kill()
        os.kill(ray.get(actor.status.remote())["pid"], signal.SIGKILL)
        second = Ranks(job, "2", driver=True)
        codes = second.end()
    left = record(job.directory)
    wrong = faults(left, [first, second])
    if left["attempts"] != [1, 2] or codes != [0] or len(left["steps"]) != 1:
        wrong.append(
            f"attempts {left['attempts']}, exit {codes}, applied {left['steps']}: {second.logs[-2000:]}"
        )
    return row(left, [first, second], wrong)


def ray_dies(_: str, place: Path, seed: int) -> dict[str, Any]:
    """Every process of a Ray with a Ray Train job on it is killed; job and Ray are started again."""
    job = Job(str(place / "run"), "", seed=seed)
    with cluster() as address:
        first = Ranks(replace(job, address=address, steps=NEVER), "1", driver=True)
        first.wait(lambda: healed(job.directory), "the record of an application")
        family = descendants(HEADS[address])
        for process in family:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        first.kill()
    before = record(job.directory)
    with cluster() as address:
        second = Ranks(replace(job, address=address), "2", driver=True)
        codes = second.end()
    left = record(job.directory)
    wrong = [*faults(left, [first, second]), *([] if before["verified"] else ["the record was broken"])]
    standing = [second.last(rank, "standing") for rank in range(WORLD)]
    if left["attempts"] != [1, 2] or codes != [0] or left["issued"] != [1] or not all(standing):
        wrong.append(f"attempts {left['attempts']}, exit {codes}, standing {standing}: {second.logs[-2000:]}")
    return row(left, [first, second], wrong)


def ray_gone(
    _: str, place: Path, seed: int, *names: str, seconds: float, patience: int = 0
) -> dict[str, Any]:
    """Ranks that started a Ray beside them, as under torchrun; `names` of its processes are killed (none: all), for good.

    With a `patience` of few seconds Ray ends the ranks, as it does with a process that has not told it to wait.
    """
    job = Job(str(place / "run"), "", seed=seed, steps=NEVER, onset=NEVER, patience=patience, until_told=True)
    ranks = Ranks(job)
    ranks.reach(60)
    for process in descendants(ranks.processes[0].pid, *names):
        os.kill(process, signal.SIGKILL)
    at, killed = ranks.last(0, "step"), time.monotonic()
    while time.monotonic() - killed < seconds and all(p.poll() is None for p in ranks.processes):
        time.sleep(0.1)
    more = {"lived": round(time.monotonic() - killed, 1), "steps_after": ranks.last(0, "step") - at}
    Path(f"{ranks.job.out}.stop").touch()
    told, codes = time.monotonic(), ranks.end()
    more["leaving"] = round(time.monotonic() - told, 1)
    left = record(job.directory)
    if patience:
        wrong = [] if 0 not in codes and left["verified"] else ["they were not ended"]
    else:
        wrong = faults(left, [ranks], whole=bool(names))
        if not names and ranks.logs.count("NOT WATCHING") != WORLD:
            wrong.append("nothing was said")
    if not patience and (codes != [0] * WORLD or more["steps_after"] < 100):
        wrong.append("training did not go on")
    return row(left, [ranks], [f"{w}: exit {codes}: {ranks.logs[-2000:]}" for w in wrong], exit=codes, **more)


def late_rank(address: str, place: Path, seed: int) -> dict[str, Any]:
    """Rank 1 is up to 50 ms late in one of five steps."""
    job = Job(str(place / "run"), "", seed=seed, address=address, slow=1)
    with hub(address, job):
        ranks = Ranks(job)
        codes = ranks.end()
    left = record(job.directory)
    wrong = faults(left, [ranks])
    if codes != [0] * WORLD or len(left["steps"]) != 1:
        wrong.append(f"exit {codes}, applied {left['steps']}: {ranks.logs[-2000:]}")
    return row(left, [ranks], wrong)


def two_jobs(address: str, place: Path, seed: int) -> dict[str, Any]:
    """Two jobs at once on one cluster; one has a fault, the other has none."""
    ill = Job(str(place / "ill"), "", run="ill", seed=seed, address=address)
    well = replace(ill, directory=str(place / "well"), run="well", onset=NEVER)
    with hub(address, ill), hub(address, well):
        both = [Ranks(ill), Ranks(well)]
        codes = [ranks.end() for ranks in both]
    left, other = record(ill.directory), record(well.directory)
    wrong = faults(left, both[:1]) + faults(other, both[1:])
    if codes != [[0] * WORLD] * 2 or (left["runs"], other["runs"]) != (["ill"], ["well"]):
        wrong.append(f"exit {codes}, runs {left['runs']} and {other['runs']}: {both[0].logs[-1000:]}")
    if len(left["steps"]) != 1 or other["issued"]:
        wrong.append(f"applied {left['steps']}, and in the other job {other['issued']}")
    return row(left, both[:1], wrong, other={k: other[k] for k in ("verified", "replay", "issued", "closed")})


Scenario = Callable[[str, Path, int], dict[str, Any]]

SCENARIOS: dict[str, Scenario] = {
    **{f"hub dies {point}": partial(hub_dies, point=point) for point in HUB_POINTS},
    "hub dies three times": partial(hub_dies, point="after journal", times=3),
    "hub gone for good": hub_gone,
    **{f"rank dies {point}": partial(rank_dies, point=point) for point in RANK_POINTS},
    **{f"Ray Train worker dies {point}": partial(worker_dies, point=point) for point in RANK_POINTS},
    "driver dies, then the hub": driver_dies,
    "all of Ray dies under Ray Train": ray_dies,
    "all of Ray dies beside the ranks": lambda a, p, s: ray_gone(a, p, s, seconds=SURVIVE),
    "GCS and raylet die beside the ranks": lambda a, p, s: ray_gone(
        a, p, s, "gcs_server", "raylet", seconds=15
    ),
    "GCS and raylet die beside ranks that do not wait": lambda a, p, s: ray_gone(
        a, p, s, "gcs_server", "raylet", seconds=30, patience=5
    ),
    "one rank is late now and then": late_rank,
    "two jobs at once": two_jobs,
}


def run(name: str, seed: int, address: str, place: Path) -> dict[str, Any]:
    """One row, whatever happens."""
    began = time.monotonic()
    place.mkdir(parents=True)
    try:
        found = SCENARIOS[name](address, place, seed)
    except Exception as error:
        found = {"ok": False, "wrong": [f"{type(error).__name__}: {error}"]}
    while STARTED:
        STARTED.pop().kill()
    return {"scenario": name, "seed": seed, **found, "seconds": round(time.monotonic() - began, 1)}


def jobs() -> list[tuple[str, int]]:
    return [(name, seed) for name in SCENARIOS for seed in SEEDS]


def load() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(FILE.read_text())["rows"] if FILE.exists() else []
    return rows


def save(rows: list[dict[str, Any]]) -> None:
    order = {job: n for n, job in enumerate(jobs())}
    rows = sorted(rows, key=lambda r: order[r["scenario"], r["seed"]])
    facts = {"command": "python benchmarks/chaos.py", "cores": os.cpu_count(), "seeds": list(SEEDS)}
    lines = ",\n".join(json.dumps(row) for row in rows)
    FILE.write_text(json.dumps(facts)[:-1] + f', "rows": [\n{lines}\n]}}\n')


def commit() -> str:
    """The commit these files are of; with a plus where they differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=HERE, capture_output=True, text=True, check=True
        ).stdout.strip()

    changed = git("status", "--porcelain", "--", "foreshock", "tests/chaos_worker.py", "benchmarks/chaos.py")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pattern", nargs="?", default="*", help="scenarios to run, such as 'hub*'")
    parser.add_argument("--again", action="store_true", help="also those that are there already")
    asked = parser.parse_args()
    rows = load()
    have = {(r["scenario"], r["seed"]) for r in rows if r["ok"] and not asked.again}
    wanted = [job for job in jobs() if fnmatch.fnmatch(job[0], asked.pattern) and job not in have]
    with cluster() as address, tempfile.TemporaryDirectory(prefix="foreshock-chaos-") as place:
        for number, (name, seed) in enumerate(wanted):
            row = run(name, seed, address, Path(place) / str(number)) | {"commit": commit()}
            rows = [r for r in rows if (r["scenario"], r["seed"]) != (name, seed)] + [row]
            save(rows)
            print(f"{'ok  ' if row['ok'] else 'FAIL'} {row['seconds']:6.1f} s  {name} ({seed})", flush=True)
            for line in row["wrong"]:
                print("     ", line, flush=True)


if __name__ == "__main__":
    main()
