"""What dies in the chaos scenarios: the ranks, the Ray Train driver, and a hub that kills itself at a named point.

    chaos_worker.py rank JOB RANK      one rank of two, over gloo, beside a Ray cluster or with one that it starts
    chaos_worker.py driver JOB         the same training under Ray Train

JOB is JSON, see `Job`. Each rank appends what happened to it to `<out>-<rank>.jsonl`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foreshock.pipeline import hub
from foreshock.pipeline.cluster.actor import IDLE_SECONDS, HubActor
from foreshock.pipeline.cluster.wire import Batch, Reply
from foreshock.pipeline.events import Issue
from foreshock.pipeline.shell import Shell
from foreshock.pipeline.store import RunStore

WORLD = 2
ONSET = 30
LIMIT = 600
"""Steps after which a fault that nobody healed is given up."""

HUB_POINTS = {
    "before journal": 25,
    "after journal": 25,
    "before snapshot": 3,
    "after snapshot": 3,
    "before audit commit": 10,
    "after audit commit": 4,
    "before issue": 1,
    "after issue": 1,
    "before ack": 8,
    "after ack": 8,
}
"""Where the hub dies, and how often it passes there at least in a run that is healed.

A hub that is short of processor time answers for many steps at once: the fewest passes are those of an answer.
"""

RANK_POINTS = ("before prepare", "between vote and apply", "in the middle of apply")

POLICY = """
apiVersion: foreshock/v1
name: chaos
mode: enforce
group_wait: 0 steps
budget: {actions: 50, rollbacks: 2}
policies: [{name: attention, match: {mechanism: attention}, ladder: [{do: [{precision_upcast: {}}]}]}]
"""


@dataclass
class Job:
    directory: str
    out: str
    run: str = "r"
    seed: int = 0
    steps: int = 100
    onset: int = ONSET
    after: int = 40
    """Steps that a healed run goes on."""
    address: str = ""
    """Of the Ray cluster; empty: the ranks start their own."""
    pace: float = 0.01
    """Seconds that a step waits beside its work, as if the model were larger."""
    slow: int = -1
    """The rank that is late now and then."""
    die: str = ""
    """One of `RANK_POINTS`: where rank 1 kills itself."""
    patience: int = 0
    """Seconds that a rank lives without its Ray; 0: as Foreshock sets it."""
    until_told: bool = False
    """Goes on until `<out>.stop` exists."""
    failures: int = 0
    """Ray Train's max_failures."""


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# -- the hub ------------------------------------------------------------------------------------------------------


class Doomed(HubActor):
    """A hub that is killed when it passes `point` for the `nth` time, `times` times in its life."""

    def __init__(
        self,
        directory: str,
        run: str,
        idle: float = IDLE_SECONDS,
        point: str = "",
        nth: int = 1,
        times: int = 1,
    ) -> None:
        hub.SNAPSHOT_EVERY = 20
        self._deaths = Path(f"{directory}.deaths")
        died = len(self._deaths.read_text()) if self._deaths.exists() else 0
        self._point, self._left = point if died < times else "", nth
        self._arm()
        super().__init__(directory, run, idle)

    def _arm(self) -> None:
        audited, committed = RunStore.append_audit, RunStore._write_anchor
        journalled, saved = RunStore.append_event, RunStore.save_snapshot
        carry_out = Shell._carry_out

        def around(name: str, work: Callable[..., Any], when: Callable[..., bool] = lambda *_: True) -> Any:
            def mortal(*args: Any, **kwargs: Any) -> Any:
                here = when(*args)
                if here:
                    self.passes(f"before {name}")
                result = work(*args, **kwargs)
                if here:
                    self.passes(f"after {name}")
                return result

            return mortal

        def audit(*args: Any, **kwargs: Any) -> Any:
            record = audited(*args, **kwargs)
            self.passes("before audit commit")
            return record

        def anchor(*args: Any, **kwargs: Any) -> None:
            self.passes("after audit commit")  # the database has it, the anchor not yet
            committed(*args, **kwargs)

        RunStore.append_event = around("journal", journalled)  # type: ignore[method-assign]
        RunStore.save_snapshot = around("snapshot", saved)  # type: ignore[method-assign]
        RunStore.append_audit, RunStore._write_anchor = audit, anchor  # type: ignore[method-assign]
        issues = lambda shell, effects: any(isinstance(e, Issue) for e in effects)  # noqa: E731
        Shell._carry_out = around("issue", carry_out, issues)  # type: ignore[method-assign]

    def passes(self, point: str) -> None:
        if point != self._point:
            return
        self._left -= 1
        if self._left == 0:
            with self._deaths.open("a") as file:
                file.write("x")
            kill()

    async def deliver(self, batch: Batch) -> Reply:
        reply = await super().deliver(batch)
        if reply.acked and any(batch.items.values()):
            self.passes("before ack")
            if self._point == "after ack":
                threading.Timer(0.05, self.passes, ["after ack"]).start()  # the answer is on its way by then
        return reply


# -- a rank -------------------------------------------------------------------------------------------------------


def doom(point: str) -> None:
    """This rank kills itself at `point`."""
    from foreshock.monitors.intercept import Interceptor
    from foreshock.pipeline.rank import Watch

    heard, apply, upcast = Watch._heard, Watch._apply, Interceptor.upcast

    def before_prepare(self: Any, command: Any) -> None:
        if command is not None:
            kill()
        heard(self, command)

    def before_apply(self: Any, *args: Any) -> Any:
        kill()
        return apply(self, *args)

    def one_layer(self: Any, layers: Any, how: Any = "float32") -> None:
        upcast(self, layers[:1], how)
        kill()

    if point == "before prepare":
        Watch._heard = before_prepare  # type: ignore[method-assign]
    elif point == "between vote and apply":
        Watch._apply = before_apply  # type: ignore[method-assign]
    elif point == "in the middle of apply":
        Interceptor.upcast = one_layer  # type: ignore[method-assign]


def train(job: Job) -> None:
    """Small under DDP, with a fault from step `onset`; ends some steps after it was healed, on all ranks alike."""
    import torch
    from conftest import Small
    from torch import distributed

    import foreshock
    from foreshock.lab.flash import KernelFault

    rank = distributed.get_rank()
    file = Path(f"{job.out}-{rank}.jsonl")

    def say(**facts: Any) -> None:
        with file.open("a") as lines:
            lines.write(json.dumps(facts) + "\n")

    if rank == 1:
        doom(job.die)
    dice = random.Random(f"{job.seed}/{rank}")
    small = Small(seed=job.seed, steps=10**6)
    small.loader.seed = 1000 * job.seed + rank
    policy = Path(f"{job.out}-{rank}.yaml")
    policy.write_text(POLICY)
    fault = KernelFault("delta", 6, "up", gain=3.0)
    start = (
        20 if job.onset < job.steps else job.onset
    )  # nothing is learned, so nothing is found, where nothing is wrong
    model = torch.nn.parallel.DistributedDataParallel(small.model)
    small.model = model
    with foreshock.watch(
        model, small.optimizer, run_dir=job.directory, run=job.run, policy=policy, allow="enforce", start=start,
        points_every=20, hub="ray",
    ) as watch:  # fmt: skip
        standing = list(watch._link.welcome.standing)  # type: ignore[union-attr]
        say(attempt=watch.position[0], standing=standing, failure=watch._link.failure)  # type: ignore[union-attr]
        step, end = 0, LIMIT if job.steps > job.onset and not standing else job.steps
        began = time.perf_counter()
        for batch in watch.batches(small.loader):
            small.break_attention(fault if step >= job.onset else None)
            time.sleep(job.pace)
            if rank == job.slow and dice.random() < 0.2:
                time.sleep(0.05 * dice.random())
            verdict = watch.step(small.train_step(batch))
            if verdict.applied:
                say(applied=list(verdict.applied), step=step)
                end = max(job.steps, step + job.after)
            step = verdict.step
            if step % 10 == 0:
                say(step=step, seconds=(time.perf_counter() - began) / 10)
                began = time.perf_counter()
            if step >= end or (job.until_told and step % 10 == 0 and told(f"{job.out}.stop")):
                break
    weights = sum(float(p.detach().double().sum()) for p in model.parameters())
    say(done=step, weights=weights)


def told(file: str) -> bool:
    """Whether `file` is there, on all ranks alike."""
    import torch
    from torch import distributed

    there = torch.tensor(int(Path(file).exists()))
    distributed.broadcast(there, 0)
    return bool(there)


def rank_main(job: Job, rank: int) -> None:
    from datetime import timedelta

    from torch import distributed

    if job.patience:
        from foreshock.pipeline.cluster import runtime

        runtime.PATIENT["RAY_gcs_rpc_server_reconnect_timeout_s"] = str(job.patience)
    if job.address:
        os.environ["RAY_ADDRESS"] = job.address
    distributed.init_process_group("gloo", rank=rank, world_size=WORLD, timeout=timedelta(seconds=120))
    train(job)
    distributed.destroy_process_group()


def driver_main(job: Job) -> None:
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    def loop(config: dict[str, Any]) -> None:
        sys.path.insert(0, config["tests"])
        import chaos_worker

        first = not Path(f"{config['job']['out']}-1.jsonl").exists()
        job = chaos_worker.Job(**config["job"])
        job.die = job.die if first else ""
        chaos_worker.train(job)

    ray.init(address=job.address, log_to_driver=False)
    TorchTrainer(
        loop,
        train_loop_config={"job": asdict(job), "tests": str(Path(__file__).parent)},
        scaling_config=ScalingConfig(num_workers=WORLD, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(
            name=Path(job.directory).name,
            storage_path=f"{job.directory}.train",
            failure_config=FailureConfig(max_failures=job.failures),
        ),
    ).fit()


if __name__ == "__main__":
    given = Job(**json.loads(sys.argv[2]))
    rank_main(given, int(sys.argv[3])) if sys.argv[1] == "rank" else driver_main(given)
