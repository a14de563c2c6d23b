"""What the stream from the ranks to the hub costs, and how long a decision takes to reach them.

    make bench          prints Markdown tables and writes evidence/stream.json

Everything runs on one machine, so a hub never has its core for itself: where CPU seconds count (frames a core) they are
those of the hub's process, all its threads; where time counts, hub, ranks and Ray share the cores that the file states.
An empty Ray actor, called in the same minutes, says which part of the cost is Ray's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
from overhead import BLOCK, HERE, WARM, facts, quartiles, spread

from foreshock.pipeline.attach import LINGER_SECONDS, POLL_SECONDS
from foreshock.pipeline.cluster.actor import HubActor, launch
from foreshock.pipeline.cluster.relay import Node
from foreshock.pipeline.cluster.remote import RemoteLink
from foreshock.pipeline.cluster.wire import Batch, Reply, pack
from foreshock.pipeline.emitter import Emitter
from foreshock.pipeline.events import Event, Frames, Hello, PolicyLoaded
from foreshock.pipeline.link import Welcome
from foreshock.pipeline.settings import choose, policy_text
from foreshock.signals import Scope, SignalFrame, SignalKey, SignalTable

FILE = HERE / "evidence" / "stream.json"
NODE = 8
"""Ranks on a simulated node."""
FRAMES = 40_000
"""At most so many rank-frames in one cell of the throughput table."""
CALLS = 1_500
"""At most so many calls in one cell."""
COMMANDS = 20
ILL_FROM = 30


def percentiles(seconds: list[float], scale: float) -> dict[str, float]:
    p50, p99 = np.percentile(np.array(seconds) * scale, [50, 99])
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2), "max": round(max(seconds) * scale, 2)}


# -- simulated ranks --------------------------------------------------------------------------------------


class Crowd:
    """`world` ranks of a model of `layers` x `heads`, and what each measures at each step, as probes deal it out."""

    def __init__(self, world: int, layers: int, heads: int) -> None:
        self.world, self.layers, self.heads = world, layers, heads
        own, shared = ("source_t", "source_bias"), ("h1", "hqv", "coherence", "qk_norm")
        places = [(layer, head) for layer in range(layers) for head in range(heads)]
        keys = [SignalKey("symptom", n, scope=Scope.PER_RANK) for n in ("loss", "grad_norm", "lr", "update_norm")]  # fmt: skip
        keys += [SignalKey("attention", n, *at, scope=Scope.PER_RANK) for n in own for at in places]
        keys += [SignalKey("attention", n, *at) for n in shared for at in places]
        self.table = SignalTable(tuple(keys))
        self._rng = np.random.default_rng(0)

    def frame(self, rank: int, step: int) -> SignalFrame:
        values = np.full(len(self.table.values), np.nan)
        values[:4] = 2.0 + 0.1 * self._rng.normal(), 1.0 + 0.1 * self._rng.normal(), 1e-3, 0.1
        groups = -(-self.world // 4)
        if step % 4 == 0:
            grid = values[4:].reshape(6, self.layers, self.heads)
            mine = slice(rank * groups // self.world, None, groups)
            grid[0, mine] = self._rng.normal(size=grid[0, mine].shape)
            grid[1, mine] = 1e-5 * self._rng.normal(size=grid[1, mine].shape)
            grid[2:, rank :: self.world] = 1.0 + 0.01 * self._rng.normal(
                size=grid[2:, rank :: self.world].shape
            )
        place = {"run": "r", "attempt": 1, "timeline": 0, "table": self.table.id}
        return SignalFrame.build(values, rank=rank, seq=step, step=step, **place)

    def opening(self, rows: tuple[int, ...] = (), allow: str = "observe") -> Batch:
        text = policy_text(choose("policy", "default", "default"))
        hello = Hello(0.0, 1, tuple(range(self.world)), self.table, allow, rows=rows)
        return Batch(1, {"1/0": [(1, pack(PolicyLoaded(0.0, text.text, text.source))), (2, pack(hello))]})

    def calls(self, first: int, steps: int, relayed: bool) -> list[Batch]:
        """What the hub is called with for `steps` steps from `first` on: one call a rank, or one a node."""

        def items(rank: int) -> list[tuple[int, bytes]]:
            return [(step + 3, self.frame(rank, step).to_bytes()) for step in range(first, first + steps)]

        if not relayed:
            return [Batch(1, {f"1/{rank}": items(rank)}) for rank in range(self.world)]
        batches = []
        for leader in range(0, self.world, NODE):
            node = Node(1, range(leader, leader + NODE))
            for rank in range(leader, leader + NODE):
                node.take(f"1/{rank}", items(rank))
            batches.append(Batch(1, node.waiting()))
        return batches


# -- frames a second that one core of hub takes -----------------------------------------------------------


class Measured(HubActor):
    """The hub's actor, which also says how much CPU it has used."""

    folding = 0.0

    def _turn(self, batches: list[Batch]) -> None:
        began = time.thread_time()
        super()._turn(batches)
        self.folding += time.thread_time() - began

    async def spent(self) -> tuple[float, float, int, str | None]:
        assert self._shell is not None
        return time.process_time(), self.folding, self._shell.hub.clock, self._shell.failure


class Empty:
    """Ray's share: an actor of the same kind that does nothing with what it is called with."""

    async def deliver(self, batch: Batch) -> Reply:
        return Reply(acked=dict.fromkeys(batch.items, 2**62))

    async def spent(self) -> float:
        return time.process_time()


WAYS = {
    "direct": (1, False),
    "batched, 10 steps a call": (10, False),
    "relayed": (1, True),
    "relayed, 10 steps a call": (10, True),
}


def throughput(world: int, way: str, layers: int, heads: int) -> dict[str, Any]:
    """One cell. The first call of every source warms up."""
    import ray

    at_once, relayed = WAYS[way]
    crowd = Crowd(world, layers, heads)
    sources = -(-world // NODE) if relayed else world
    rounds = max(1, min(FRAMES // (world * at_once), CALLS // sources, 50))
    with tempfile.TemporaryDirectory() as place:
        hub = launch(Path(place), "r", Measured)
        empty = ray.remote(Empty).options(num_cpus=0, max_concurrency=10_000).remote()
        ray.get(hub.begin.remote("bench", world))
        rows = tuple(range(0, world, NODE)) if relayed else ()
        ray.get(hub.deliver.remote(crowd.opening(rows)))
        before, floor = (0.0, 0.0), 0.0
        for turn in range(rounds + 1):
            batches = crowd.calls(turn * at_once, at_once, relayed)
            if turn == 1:
                before, floor = ray.get(hub.spent.remote())[:2], ray.get(empty.spent.remote())
            ray.get([hub.deliver.remote(batch) for batch in batches])
            ray.get([empty.deliver.remote(batch) for batch in batches])
        cpu, folding, closed, failure = ray.get(hub.spent.remote())
        floor = ray.get(empty.spent.remote()) - floor
        ray.get(hub.end.remote())
        ray.kill(empty)
    if failure is not None or closed != (rounds + 1) * at_once:
        raise RuntimeError(f"the hub closed {closed} steps: {failure}")
    cpu, folding = cpu - before[0], folding - before[1]
    frames, calls = world * at_once * rounds, sources * rounds
    return {
        "ranks": world, "way": way, "values": len(crowd.table.values), "frames": frames, "calls": calls,
        "frames_a_core": round(frames / cpu), "cpu_us_a_frame": round(1e6 * cpu / frames, 1),
        "cpu_us_a_call": round(1e6 * cpu / calls), "of_it_folding": round(folding / cpu, 3),
        "empty_us_a_call": round(1e6 * floor / calls),
    }  # fmt: skip


# -- what a step pays to emit -----------------------------------------------------------------------------


class Slow:
    """A hub that takes its time, or never answers."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def deliver(self, batch: Batch) -> Reply:
        await asyncio.sleep(self._seconds)
        return Reply(acked={s: items[-1][0] if items else 0 for s, items in batch.items.items()})


HUBS = ("alive", "slow", "silent", "gone")


@contextmanager
def hub_actor(state: str, crowd: Crowd) -> Iterator[Any]:
    """The handle of a hub that is alive, slow (0.5 s a call), silent (never answers) or gone (killed)."""
    import ray

    with tempfile.TemporaryDirectory() as place:
        if state == "alive":
            hub = launch(Path(place), "r")
            ray.get(hub.begin.remote("bench", crowd.world))
            ray.get(hub.deliver.remote(crowd.opening()))
        else:
            seconds = 0.5 if state == "slow" else 1e6
            hub = ray.remote(Slow).options(num_cpus=0, max_concurrency=100).remote(seconds)
            ray.get(hub.__ray_ready__.remote())
        if state == "gone":
            ray.kill(hub)
        try:
            yield hub
        finally:
            if state == "alive":
                ray.get(hub.end.remote())
            elif state != "gone":
                ray.kill(hub)


def emit(state: str, steps: int) -> dict[str, Any]:
    """Seconds of `Emitter.put` for a frame's job as the training thread sees it, beside an empty call."""
    crowd = Crowd(1, 2, 2)
    with hub_actor(state, crowd) as hub:
        link = RemoteLink(hub, 0, Welcome(1))

        def deliver(events: Any) -> int:
            return link.deliver([(number + 2, event) for number, event in events]) - 2

        emitter = Emitter(deliver, sync=False, linger=LINGER_SECONDS, poll=POLL_SECONDS)

        def frame(step: int) -> Callable[[], Event]:
            return lambda: Frames(time.time(), (crowd.frame(0, step),))

        empty, put = [], []
        for step in range(steps):
            time.sleep(0.002)
            job = frame(step)
            began = time.perf_counter()
            nothing(job, frame=True)
            middle = time.perf_counter()
            emitter.put(job, frame=True)
            put.append(time.perf_counter() - middle)
            empty.append(middle - began)
        emitter.close(timeout=1.0)
    return {"empty_us": percentiles(empty, 1e6), "put_us": percentiles(put, 1e6), "dropped": emitter.dropped}


def nothing(job: Callable[[], Event], *, frame: bool) -> None:
    """The empty call."""


# -- from a decision to its effect ------------------------------------------------------------------------

POLICY = f"""
apiVersion: foreshock/v1
name: bench
mode: enforce
budget: {{actions: 1000}}
policies:
  - name: again
    match: {{mechanism: numerics}}
    ladder: [{", ".join(["{do: [{lr_scale: {factor: 0.999}}]}"] * COMMANDS)}]
"""


def decide(directory: str, rank: int, world: int) -> dict[str, Any]:
    """One rank of a run whose loss is reported as infinite from `ILL_FROM` on, so that each command fails and the next
    follows: when each command was prepared and applied here."""
    import foreshock
    from foreshock.lab.scenarios import SCENARIOS, Training

    training = Training(SCENARIOS["clean"], 0, 4000, rank, world)
    policy = Path(directory) / f"policy-{rank}.yaml"
    policy.write_text(POLICY)
    prepared: dict[int, float] = {}
    applied: list[float] = []
    times = []
    state = {"scheduler": training.schedule}
    with foreshock.watch(
        training.model, training.optimizer, state, run_dir=Path(directory) / "run", run="r", policy=policy,
        allow="enforce",
    ) as watch:  # fmt: skip
        inform = watch._agreement.prepared

        def note(number: int, expires: int) -> None:
            inform(number, expires)
            prepared[number] = time.time()

        watch._agreement.prepared = note
        for step, batch in enumerate(watch.batches(training.batches)):
            began = time.perf_counter()
            loss, norm = training.train_step(batch, step)
            if watch.step(math.inf if step >= ILL_FROM else loss, norm).applied:
                applied.append(time.time())
            times.append(time.perf_counter() - began)
            if len(applied) == COMMANDS or step >= ILL_FROM + 100 * COMMANDS:
                break
        watch.drain()
    return {"prepared": prepared, "applied": applied, "step": statistics.median(times)}


def latency(world: int) -> dict[str, Any]:
    """From the arrival of the frame that caused a command to the last rank's readiness and application."""
    from foreshock.pipeline.store import RunStore

    with tempfile.TemporaryDirectory() as place:
        ranks = spread(world, decide, place)
        with RunStore.open_readonly(Path(place) / "run") as store:
            audit = list(store.audit())
    issued = {r.payload["number"]: r for r in audit if r.kind == "command.issued"}
    steps = [r.payload["step"] for r in audit if r.kind == "command.applied"]
    taken = sorted(issued)[: min(len(r["applied"]) for r in ranks)]
    ready = [max(r["prepared"][str(n)] for r in ranks) - issued[n].time for n in taken]
    done = [max(r["applied"][i] for r in ranks) - issued[n].time for i, n in enumerate(taken)]
    waited = [at - issued[n].payload["issued"] for at, n in zip(steps, taken, strict=False)]
    return {
        "ranks": world, "commands": len(taken), "step_ms": round(1e3 * ranks[0]["step"], 1),
        "prepared_ms": percentiles(ready, 1e3), "applied_ms": percentiles(done, 1e3),
        "steps_to_applied": [min(waited), round(statistics.median(waited), 1), max(waited)],
    }  # fmt: skip


# -- a dead hub -------------------------------------------------------------------------------------------


def without_hub(rounds: int) -> dict[str, Any]:
    """Steps of the lab model whose hub is alive, silent or gone from the first step on, in blocks beside those of a watch
    that measures and emits nothing."""
    import ray
    from scipy.stats import wilcoxon

    import foreshock
    from foreshock.lab.scenarios import SCENARIOS, Training

    states = ("none", "alive", "silent", "gone")
    times: dict[str, list[list[float]]] = {state: [] for state in states}
    used: dict[str, list[float]] = {state: [] for state in states}
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        sides = []
        for state in states:
            training = Training(SCENARIOS["clean"], 0, BLOCK * rounds)
            watch = stack.enter_context(
                foreshock.watch(
                    training.model,
                    training.optimizer,
                    {"scheduler": training.schedule},
                    run_dir=Path(place) / state,
                    hub="ray",
                )
            )
            if state == "none":
                watch._emitter.put = lambda job, frame=False: None
            elif state == "silent":
                watch._link._actor = stack.enter_context(hub_actor("silent", Crowd(1, 2, 2)))
            elif state == "gone":
                ray.kill(watch._link._actor)
            sides.append((state, training, watch.batches(training.batches), watch))
        for turn in range(rounds):
            for state, training, source, watch in sides[turn % 4 :] + sides[: turn % 4]:
                block, thread = [], time.thread_time()
                for step in range(turn * BLOCK, (turn + 1) * BLOCK):
                    began = time.perf_counter()
                    loss, norm = training.train_step(next(source), step)
                    watch.step(loss, norm)
                    block.append(time.perf_counter() - began)
                times[state].append(block)
                used[state].append(time.thread_time() - thread)
                if state == "alive":
                    watch.drain()
        for _, _, _, watch in sides:
            watch._emitter.close(timeout=0.5)
    base = [statistics.median(block) for block in times["none"][WARM:]]
    rows = {}
    for state in states:
        blocks = times[state][WARM:]
        ratios = [statistics.median(block) / b for block, b in zip(blocks, base, strict=True)]
        rows[state] = {"step_ms": percentiles([t for block in blocks for t in block], 1e3)}
        if state != "none":
            low, middle, high = quartiles(ratios)
            p = float(wilcoxon([math.log(r) for r in ratios]).pvalue)
            thread = quartiles([a / b for a, b in zip(used[state][WARM:], used["none"][WARM:], strict=True)])
            rows[state] |= {"ratio": middle, "half": [low, high], "p": round(p, 4), "thread": thread[1]}
    return rows


# -- tables -----------------------------------------------------------------------------------------------


def _markdown(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def throughput_table(rows: Any) -> str:
    head = [
        "ranks",
        "way to the hub",
        "values",
        "rank-frames a CPU second of hub",
        "us a call",
        "an empty Ray actor's",
    ]
    cells = [
        [
            r["ranks"],
            r["way"],
            r["values"],
            f"{r['frames_a_core']:,}",
            r["cpu_us_a_call"],
            r["empty_us_a_call"],
        ]
        for r in rows
    ]
    return _markdown(head, cells)


def emit_table(rows: Any) -> str:
    head = ["the hub is", "put, p50 us", "p99", "an empty call, p50 us", "p99"]
    cells = [
        [state, r["put_us"]["p50"], r["put_us"]["p99"], r["empty_us"]["p50"], r["empty_us"]["p99"]]
        for state, r in rows.items()
    ]
    return _markdown(head, cells)


def latency_table(rows: Any) -> str:
    head = [
        "ranks",
        "step, ms",
        "prepared on all, p50 ms",
        "max",
        "applied on all, p50 ms",
        "max",
        "steps to applied",
    ]
    cells = [
        [
            r["ranks"], r["step_ms"], r["prepared_ms"]["p50"], r["prepared_ms"]["max"], r["applied_ms"]["p50"],
            r["applied_ms"]["max"], "{} to {}, median {}".format(*(r["steps_to_applied"][i] for i in (0, 2, 1))),
        ]
        for r in rows
    ]  # fmt: skip
    return _markdown(head, cells)


def hub_table(rows: Any) -> str:
    head = [
        "the hub is", "step, p50 ms", "p99", "over no emitting", "middle half", "p (Wilcoxon)", "CPU of its thread",
    ]  # fmt: skip
    cells = []
    for state, r in rows.items():
        rest = (
            [r["ratio"], "{} to {}".format(*r["half"]), max(r["p"], 0.001), r["thread"]]
            if "ratio" in r
            else [1, "", "", 1]
        )
        cells.append([state, r["step_ms"]["p50"], r["step_ms"]["p99"], *rest])
    return _markdown(head, cells)


TABLES = {"emit": emit_table, "throughput": throughput_table, "hub": hub_table, "latency": latency_table}


# -- parts ------------------------------------------------------------------------------------------------


@contextmanager
def our_ray() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, namespace="foreshock")
    try:
        yield
    finally:
        ray.shutdown()


@our_ray()
def emits() -> dict[str, Any]:
    return {state: emit(state, 2000) for state in HUBS}


@our_ray()
def cells() -> list[dict[str, Any]]:
    small, large = (
        [(world, way, 2, 2) for world in (64, 1024, 10_000) for way in WAYS],
        [(world, way, 10, 16) for world in (1024, 10_000) for way in WAYS if world == 1024 or WAYS[way][1]],
    )
    return [throughput(*cell) for cell in (*small, *large)]


@our_ray()
def hubs() -> dict[str, Any]:
    return without_hub(14)


def latencies() -> list[dict[str, Any]]:
    return [latency(world) for world in (2, 4)]


PARTS: dict[str, Callable[[], Any]] = {"emit": emits, "throughput": cells, "hub": hubs, "latency": latencies}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", choices=PARTS, help="print a committed table and stop")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to measure, by comma")
    args = parser.parse_args()
    if args.table:
        print(TABLES[args.table](json.loads(FILE.read_text())[args.table]["rows"]))
        return
    for part in args.only.split(","):
        rows = json.loads(FILE.read_text()) if FILE.exists() else {}
        began = time.monotonic()
        rows[part] = facts("make bench") | {"rows": PARTS[part]()}
        rows[part]["seconds"] = round(time.monotonic() - began)
        FILE.write_text(json.dumps(rows, indent=1) + "\n")
        print(TABLES[part](rows[part]["rows"]), flush=True)


if __name__ == "__main__":
    main()
