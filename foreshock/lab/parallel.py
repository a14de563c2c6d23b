"""An experiment as a data-parallel job: clean, unprotected and protected run on Ray Train, every rank watched.

Beside `foreshock.lab.experiment`, with the same facts at the end. Nothing is forked here: each run starts from
step 0, and up to the onset the three are the same training.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer
from torch import distributed

import foreshock
from foreshock.integrations.ray import ForeshockCallback
from foreshock.lab.experiment import Played, Progress, drive, outcome, three
from foreshock.lab.scenarios import SCENARIOS, Scenario, Training

POLL = 0.2
"""Seconds between two looks at a run's progress."""


class RayFailed(RuntimeError):
    """Ray did not start, or a run on it failed; the message says what and why."""


@dataclass(frozen=True)
class Job:
    """What every worker of one run is told. `directory` is the run's, absolute; `options` go to `watch`."""

    run: str
    scenario: Scenario
    seed: int
    steps: int
    directory: Path
    options: Mapping[str, Any] = field(default_factory=dict)


def experiment(
    name: str,
    seed: int,
    steps: int,
    directory: Path,
    workers: int,
    progress: Progress | None = None,
    onset: int = 500,
    **options: Any,
) -> tuple[dict[str, Any], dict[str, Played]]:
    """Run the three runs of scenario `name` on `workers` (2 or 4) ranks under `directory`; (facts, runs).

    Uses the Ray that this process is connected to, otherwise one that it starts on this machine for the time
    being. `progress` is called from another thread. Raises RayFailed.
    """
    scenario, directory = replace(SCENARIOS[name], onset=onset), directory.resolve()
    runs: dict[str, Played] = {}
    with _ray(workers):
        for run, what, allow in three(scenario):
            job = Job(run, what, seed, steps, directory / run, options)
            runs[run] = fit(job, workers, allow, progress)
    return outcome(scenario, seed, runs) | {"workers": workers}, runs


def fit(job: Job, workers: int, allow: str, progress: Progress | None = None) -> Played:
    """One run on Ray Train, and how it went. Ray must be initialised. Raises RayFailed."""
    job.directory.mkdir(parents=True, exist_ok=True)
    callback = ForeshockCallback(policy="unattended", allow=allow, run=job.run, run_dir=job.directory)
    trainer = TorchTrainer(
        train,
        train_loop_config={"job": job},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5}),
        run_config=ray.train.RunConfig(
            name=job.run,
            storage_path=str(job.directory.parent / "ray"),
            callbacks=[callback],
            # workers that cannot be placed are asked for again, by default for ever
            failure_config=ray.train.FailureConfig(controller_failure_limit=4),
        ),
    )
    interrupt = signal.getsignal(signal.SIGINT)
    try:
        with _followed(job, progress):
            trainer.fit()
    except ray.train.TrainingFailedError as error:
        raise RayFailed(f"the {job.run} run failed on Ray Train: {error}") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt)  # fit leaves a handler of its own behind
    losses = json.loads((job.directory / "losses.json").read_text())
    return Played.read(job.run, job.directory, {int(step): loss for step, loss in losses.items()})


def train(config: Mapping[str, Job]) -> None:
    """One rank of a run, in a worker of Ray Train. Where and how it is watched stands in its environment."""
    job = config["job"]
    rank, world = distributed.get_rank(), distributed.get_world_size()
    training = Training(job.scenario, job.seed, job.steps, rank, world)

    def tell(_: str, step: int, end: int, loss: float) -> None:
        if step % 10 == 9:
            _write(job.directory / "progress.json", [step, end, loss])

    states = {"schedule": training.schedule}
    with foreshock.watch(training.model, training.optimizer, states, **job.options) as live:
        losses = drive(training, live, job.run, 0, job.steps, tell if rank == 0 else None)
    mean = torch.tensor(list(losses.values()), dtype=torch.float64) / world
    distributed.all_reduce(mean)  # the ranks ran the same steps in the same order, also after a rewind
    if rank == 0:
        _write(job.directory / "losses.json", dict(zip(losses, mean.tolist(), strict=True)))


def _write(file: Path, what: Any) -> None:
    """Whole or not at all: somebody reads it meanwhile."""
    part = file.with_suffix(".part")
    part.write_text(json.dumps(what))
    part.replace(file)


@contextmanager
def _ray(workers: int) -> Iterator[None]:
    if ray.is_initialized():
        yield
        return
    try:
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, workers),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
        )
    except Exception as error:
        raise RayFailed(f"Ray did not start: {type(error).__name__}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _followed(job: Job, progress: Progress | None) -> Iterator[None]:
    """Hands on what rank 0 writes down, until the block ends."""
    if progress is None:
        yield
        return
    file, ended = job.directory / "progress.json", threading.Event()

    def follow() -> None:
        last = None
        while not ended.wait(POLL):
            if file.exists() and (now := json.loads(file.read_text())) != last:
                last = now
                progress(job.run, *now)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
