"""All ranks or none on real processes: random schedules of delays, lost polls, refusals, kills and restarts.

    .venv/bin/python benchmarks/schedules.py                   500 schedules; writes evidence/schedules.json
    .venv/bin/python benchmarks/schedules.py --one 17          one schedule, with its story; fails on a violation

A schedule is one run of up to three attempts with 2 to 4 ranks over gloo, and a hub in this process that the ranks
poll. The seed fixes the plan (who is late, refuses, fails or dies, and where); the interleaving is the machine's.
Bounds are short, so that a rank can be later than them. A stopped run goes on where it was while the code is the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

HERE = Path(__file__).resolve().parent.parent
FILE = HERE / "evidence" / "schedules.json"
CODE = ("foreshock/remediation/commit.py", "foreshock/pipeline/agreement.py", "benchmarks/schedules.py")
BOUNDS = (0.5, 1.5)
SLACK = 1.0
"""Seconds over its bound from which a wait counts as a violation: the scheduler's share on a busy machine."""
STEPS = 60
COMMANDS = 4
"""At most, in an attempt."""
VIOLATIONS = (
    "ranks differ and none raised",
    "said to be applied, a rank did not",
    "said to have failed, a rank applied it",
    "applied at different steps",
    "applied twice",
    "applied after it was disabled",
    "applied after it expired",
    "closed as not applied, a rank applied it",
    "a wait over its bound",
    "a rank is stuck",
    "a rank crashed",
)


@dataclass
class Plan:
    """One rank's part in one attempt."""

    delays: dict[int, float]
    apply_delay: float
    kill: tuple[str, int] | None
    refuses: set[int]
    fails: set[int]
    lowered: range


def plan(seed: int) -> list[list[Plan]]:
    """The ranks' plans in each attempt. Numbers in `refuses` and `fails` count from the attempt's first command."""
    rng = random.Random(seed)
    attempts = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        world = rng.randint(2, 4)
        victim, late = rng.randrange(world), rng.randrange(world)
        kill = rng.choice(("before", "after", "apply")) if rng.random() < 0.3 else None
        all_fail, one_fails = rng.random() < 0.1, rng.random() < 0.1
        plans = []
        for rank in range(world):
            delays = {step: rng.uniform(0, 0.02) for step in range(1, STEPS + 1) if rng.random() < 0.1}
            if rank == late and rng.random() < 0.2:
                delays[rng.randrange(1, STEPS)] = rng.uniform(0.8, 3) * BOUNDS[0]
            slow = rank == late and rng.random() < 0.1
            start = rng.randrange(STEPS)
            mine = Plan(
                delays=delays,
                apply_delay=rng.uniform(0.8, 1.6) * BOUNDS[1] if slow else rng.uniform(0, 0.02),
                kill=None,
                refuses={number for number in range(1, COMMANDS + 1) if rng.random() < 0.1},
                fails={1} if all_fail or (one_fails and rank == late) else set(),
                lowered=range(start, start + 12) if rng.random() < 0.1 else range(0),
            )
            if kill and rank == victim:
                mine.kill = kill, 1 if kill == "apply" else rng.randrange(1, STEPS)
            plans.append(mine)
        attempts.append(plans)
    return attempts


# -- a rank -------------------------------------------------------------------------------------------------


def rank_process(rank: int, port: int, events: Connection, polls: Connection) -> None:
    """Runs attempts until its pipe closes. A rank that must not go on ends its process."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            key, first, mine, world = events.recv()
        except EOFError:
            return
        dist.init_process_group("gloo", store=dist.PrefixStore(key, store), rank=rank, world_size=world)
        if not attempt(first, mine, events, polls):
            return
        dist.destroy_process_group()


def attempt(first: int, mine: Plan, events: Connection, polls: Connection) -> bool:
    """One attempt's training loop; False if it must end. Events are sent before other ranks can know of them."""
    from foreshock.pipeline.agreement import Group
    from foreshock.remediation.commit import Unconfirmed

    def die(where: str, at: int) -> None:
        if mine.kill == (where, at):
            os.kill(os.getpid(), signal.SIGKILL)

    group = Group.open(1, 30.0, BOUNDS)
    at, over = [0], threading.Event()
    thread = threading.Thread(target=poll, args=(group, first, mine, at, over, polls), daemon=True)
    thread.start()
    longest = [0.0, 0.0]
    raised = None
    applies = 0
    for seq in range(1, STEPS + 1):
        time.sleep(mine.delays.get(seq, 0.001))
        die("before", seq)
        was = group.disabled
        began = time.perf_counter()
        number = group.decide(seq, seq not in mine.lowered)
        longest[0] = max(longest[0], time.perf_counter() - began)
        die("after", seq)
        if number is not None:
            applies += 1
            time.sleep(mine.apply_delay)
            die("apply", applies)
            ok = number - first + 1 not in mine.fails
            events.send(("applied", number, seq, ok, was))
            began = time.perf_counter()
            try:
                events.send(("confirmed", number, group.confirm(ok)))
            except Unconfirmed as error:
                raised = str(error)
            longest[1] = max(longest[1], time.perf_counter() - began)
            if raised:
                break
        at[0] = seq
    over.set()
    thread.join()
    state = "raised" if raised else "disabled" if group.disabled else ""
    began = time.perf_counter()
    group.close()
    longest[0] = max(longest[0], time.perf_counter() - began)
    events.send(("end", state, raised or group.disabled, longest))
    return raised is None


def poll(group: Any, first: int, mine: Plan, at: list[int], over: threading.Event, polls: Connection) -> None:
    """A rank's thread: asks the hub, prepares, refuses."""
    held = 0
    refusal = None
    while not over.is_set():
        polls.send((at[0], refusal))
        refusal = None
        for number, expires, delay in polls.recv():
            time.sleep(delay)
            if not number:
                group.withdraw(held)
            elif group.offer(number):
                held = number
                if number - first + 1 in mine.refuses:
                    group.withdraw(number)
                    refusal = number
                else:
                    group.prepared(number, expires)
        over.wait(0.002)


# -- the hub and the judge ------------------------------------------------------------------------------------


@dataclass
class Hub:
    """One attempt's: at most one command in flight, closed by acknowledgements, a refusal or its expiry."""

    rng: random.Random
    world: int
    first: int
    current: int = 0
    sent: list[tuple[int, int]] = field(default_factory=list)
    withdrawn: bool = False
    steps: dict[int, int] = field(default_factory=dict)
    acks: dict[int, dict[int, bool]] = field(default_factory=dict)
    refusals: set[int] = field(default_factory=set)
    record: dict[int, str] = field(default_factory=dict)

    def answer(self, rank: int, step: int, refusal: int | None) -> list[tuple[int, int, float]]:
        """What reaches the rank: (number, expires, delay); or nothing, or twice, or something older too."""
        self.steps[rank] = step
        if refusal is not None:
            self.refusals.add(refusal)
        self._close()
        if not self.current and len(self.record) < COMMANDS and self.rng.random() < 0.3:
            self.current, self.withdrawn = self.first + len(self.record), False
            self.sent.append((self.current, max(self.steps.values()) + self.rng.randint(8, 40)))
        self.withdrawn |= self.rng.random() < 0.003
        messages = [self.sent[-1] if self.current and not self.withdrawn else (0, 0)]
        if self.sent and self.rng.random() < 0.1:
            messages.append(self.rng.choice(self.sent))
        if self.rng.random() < 0.2:
            messages *= 2
        if self.rng.random() < 0.2:
            messages = []
        return [(*message, self.rng.uniform(0, 0.006)) for message in messages]

    def _close(self) -> None:
        if not self.current:
            return
        acks = self.acks.get(self.current, {})
        if len(acks) == self.world:
            self.record[self.current] = "applied" if all(acks.values()) else "failed"
        elif self.current in self.refusals:
            self.record[self.current] = "refused"
        elif not acks and len(self.steps) == self.world and min(self.steps.values()) > self.sent[-1][1]:
            self.record[self.current] = "expired"
        else:
            return
        self.current = 0


class Cluster:
    """Rank processes that live through many schedules; the dead are replaced."""

    def __init__(self) -> None:
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed", "foreshock.pipeline.agreement"])
        self.ranks: list[tuple[Any, Connection, Connection]] = []

    def ready(self, world: int) -> None:
        for rank in range(max(world, len(self.ranks))):
            if rank == len(self.ranks):
                self.ranks.append(self._start(rank))
            elif not self.ranks[rank][0].is_alive():
                self.ranks[rank] = self._start(rank)

    def _start(self, rank: int) -> tuple[Any, Connection, Connection]:
        (events, their_events), (polls, their_polls) = self._context.Pipe(), self._context.Pipe()
        process = self._context.Process(
            target=rank_process, args=(rank, self._store.port, their_events, their_polls), daemon=True
        )
        process.start()
        their_events.close()
        their_polls.close()
        return process, events, polls

    def close(self) -> None:
        for process, *_ in self.ranks:
            process.kill()


Log = list[list[tuple[Any, ...]]]
"""The events of each rank."""


def run(cluster: Cluster, seed: int, story: bool = False) -> tuple[Counter[str], Counter[str], list[float]]:
    """One schedule: what came of it, its violations, and the longest waits (vote, confirmation) in seconds."""
    rng = random.Random(-seed - 1)
    counts, bad, longest = Counter({"schedules": 1}), Counter[str](), [0.0, 0.0]
    first, before = 1, set[int]()
    for turn, plans in enumerate(plan(seed)):
        hub = Hub(rng, len(plans), first)
        log = play(cluster, f"{seed}-{turn}-{time.monotonic_ns()}", hub, plans, bad)
        judge(log, hub, before, counts, bad, longest)
        first += COMMANDS
        if story:
            print(f"attempt {turn}: {len(plans)} ranks; hub {hub.record}")
            for rank, told in enumerate(log):
                print(f"  rank {rank} (kill {plans[rank].kill}): {told}")
    return counts, bad, longest


def play(cluster: Cluster, key: str, hub: Hub, plans: list[Plan], bad: Counter[str]) -> Log:
    """Runs an attempt to its end, being its hub. A rank that died has no event "end"."""
    cluster.ready(len(plans))
    ranks = cluster.ranks[: len(plans)]
    for (_, events, _), mine in zip(ranks, plans, strict=True):
        events.send((key, hub.first, mine, len(plans)))
    log: Log = [[] for _ in ranks]
    open_ = {events: rank for rank, (_, events, _) in enumerate(ranks)}
    asking = {polls: rank for rank, (_, _, polls) in enumerate(ranks)}
    deadline = time.monotonic() + 60

    def hear(events: Connection) -> None:
        rank = open_[events]
        try:
            while events.poll():
                told = events.recv()
                log[rank].append(told)
                if told[0] == "confirmed":
                    hub.acks.setdefault(told[1], {})[rank] = told[2]
                if told[0] == "end":
                    raise EOFError
        except (EOFError, ConnectionResetError):
            del open_[events]

    while open_:
        if time.monotonic() > deadline:
            bad["a rank is stuck"] += 1
            cluster.close()
            break
        for pipe in wait([*open_, *asking], timeout=1):
            if pipe in open_:
                hear(pipe)
            elif pipe in asking:
                rank = asking[pipe]
                try:
                    step, refusal = pipe.recv()
                    # What a rank did before it asked is heard before its question.
                    if ranks[rank][1] in open_:
                        hear(ranks[rank][1])
                    pipe.send(hub.answer(rank, step, refusal))
                except (EOFError, ConnectionResetError, BrokenPipeError):
                    del asking[pipe]
    for (process, *_), told, mine in zip(ranks, log, plans, strict=True):
        if not told or told[-1][0] != "end" or told[-1][1] == "raised":
            process.join(30)
            killed = mine.kill is not None and process.exitcode == -signal.SIGKILL
            bad["a rank crashed"] += not killed and process.exitcode != 0
    return log


def judge(
    log: Log, hub: Hub, before: set[int], counts: Counter[str], bad: Counter[str], longest: list[float]
) -> None:
    """Counts what came of an attempt, and every violation in it."""
    applied = [{told[1]: told for told in each if told[0] == "applied"} for each in log]
    ends = [each[-1] if each and each[-1][0] == "end" else None for each in log]
    expires = dict(hub.sent)
    for each in log:
        numbers = [told[1] for told in each if told[0] == "applied"]
        bad["applied twice"] += len(numbers) != len(set(numbers)) or not before.isdisjoint(numbers)
        for told in each:
            if told[0] == "applied":
                bad["applied after it was disabled"] += told[4] is not None
                bad["applied after it expired"] += told[2] > expires[told[1]]
                closed = hub.record.get(told[1]) in ("refused", "expired")
                bad["closed as not applied, a rank applied it"] += closed
            if told[0] == "confirmed":
                on = [mine[told[1]] for mine in applied if told[1] in mine]
                good = [one for one in on if one[3]]
                bad["said to be applied, a rank did not"] += told[2] and len(good) < len(log)
                bad["said to have failed, a rank applied it"] += not told[2] and bool(good)
                bad["applied at different steps"] += len({one[2] for one in on}) > 1
    living = [mine for mine, end in zip(applied, ends, strict=True) if end]
    kept = [{number for number, told in mine.items() if told[3]} for mine in living]
    raised = sum(end is not None and end[1] == "raised" for end in ends)
    bad["ranks differ and none raised"] += not raised and any(one != kept[0] for one in kept)
    for end in ends:
        if end is not None:
            longest[:] = [max(pair) for pair in zip(longest, end[3], strict=True)]
            bad["a wait over its bound"] += any(t > b + SLACK for t, b in zip(end[3], BOUNDS, strict=True))
    before.update(*applied)
    counts["attempts"] += 1
    counts["commands"] += len(hub.sent)
    for number, _ in hub.sent:
        counts[f"commands {hub.record.get(number, 'open at the end of the attempt')}"] += 1
    counts["ranks"] += hub.world
    counts["ranks killed"] += ends.count(None)
    counts["ranks that raised Unconfirmed"] += raised
    counts["ranks that stopped voting"] += sum(end is not None and end[1] == "disabled" for end in ends)
    counts["attempts in which a rank raised"] += raised > 0
    counts["attempts in which a rank was killed"] += None in ends


def digest() -> str:
    return hashlib.sha256(b"".join((HERE / name).read_bytes() for name in CODE)).hexdigest()[:16]


def write(done: int, counts: Counter[str], bad: Counter[str], longest: list[float], seconds: float) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    facts = {
        "command": "python benchmarks/schedules.py",
        "commit": head.stdout.strip(),
        "code": digest(),
        "seeds": [0, done - 1],
        "steps an attempt": STEPS,
        "bounds in seconds": {"vote": BOUNDS[0], "confirmation": BOUNDS[1]},
        "longest wait in seconds": {"vote": round(longest[0], 3), "confirmation": round(longest[1], 3)},
        "counts": dict(sorted(counts.items())),
        "violations": {kind: bad[kind] for kind in VIOLATIONS},
        "seconds": round(seconds),
    }
    FILE.write_text(json.dumps(facts, indent=1) + "\n")


def table(facts: dict[str, Any]) -> str:
    """The table of docs/measured.md, as Markdown."""
    n, bad = facts["counts"], facts["violations"]
    wait, bound = facts["longest wait in seconds"], facts["bounds in seconds"]
    rows = {
        "schedules / attempts / ranks": f"{n['schedules']} / {n['attempts']} / {n['ranks']}",
        "commands": n["commands"],
        "applied on all ranks / failed on all": f"{n['commands applied']} / {n['commands failed']}",
        "refused / expired / open at the attempt's end": f"{n['commands refused']} / {n['commands expired']} / "
        f"{n['commands open at the end of the attempt']}",
        "ranks killed": n["ranks killed"],
        "ranks that stopped voting / that raised `Unconfirmed`": f"{n['ranks that stopped voting']} / "
        f"{n['ranks that raised Unconfirmed']}",
        f"violations, of {len(bad)} kinds": sum(bad.values()),
        "longest wait for a vote / a confirmation, seconds": f"{wait['vote']} / {wait['confirmation']} "
        f"(bounds {bound['vote']} / {bound['confirmation']})",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--schedules", type=int, default=500)
    arguments.add_argument("--one", type=int, metavar="SEED")
    asked = arguments.parse_args()
    counts, bad, longest, seconds, done = Counter[str](), Counter[str](), [0.0, 0.0], 0.0, 0
    if asked.one is None and FILE.exists() and (facts := json.loads(FILE.read_text()))["code"] == digest():
        counts, bad = Counter(facts["counts"]), Counter(facts["violations"])
        longest, seconds = list(facts["longest wait in seconds"].values()), facts["seconds"]
        done = facts["seeds"][1] + 1
    cluster = Cluster()
    began = time.monotonic() - seconds
    try:
        for seed in range(done, asked.schedules) if asked.one is None else [asked.one]:
            more, worse, waits = run(cluster, seed, story=asked.one is not None)
            counts, bad = counts + more, bad + worse
            longest = [max(pair) for pair in zip(longest, waits, strict=True)]
            if +worse:
                print(f"seed {seed}: {dict(+worse)}")
            if asked.one is None and (seed % 25 == 24 or seed == asked.schedules - 1):
                write(seed + 1, counts, bad, longest, time.monotonic() - began)
                print(f"{seed + 1} schedules, {bad.total()} violations", flush=True)
    finally:
        cluster.close()
    return bad.total() > 0


if __name__ == "__main__":
    sys.exit(main())
