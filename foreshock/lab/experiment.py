"""One experiment: the same run three times from one healthy prefix: clean, unprotected, protected.

All three are watched by the same chain with the same policy; the unprotected one is only observed, so its
record says when each signal would have spoken first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from foreshock.lab.scenarios import SCENARIOS, Scenario, Training
from foreshock.pipeline.rank import Fork, Watch
from foreshock.pipeline.store import RunStore
from foreshock.pipeline.watch import NullWatch, watch
from foreshock.remediation.audit import AuditRecord

Progress = Callable[[str, int, int, float], None]
"""Called as (run, step, steps, loss)."""
TAIL = 50
"""Steps over which the final loss is averaged, on the same batches in every run."""
SPECTRUM = ("attention.h1", "attention.hqv", "attention.coherence")
HEALED = 0.06
"""Nats above the clean run that still count as healed."""


@dataclass
class Played:
    """One run as it went: losses by trainer step (the last one where a step ran twice), and its record."""

    name: str
    directory: Path
    losses: dict[int, float]
    records: list[AuditRecord]
    verified: bool
    fork: Fork | None = None

    @classmethod
    def read(cls, name: str, directory: Path, losses: dict[int, float], fork: Fork | None = None) -> Played:
        """With the record that the run left in `directory`."""
        with RunStore.open_readonly(directory) as store:
            return cls(name, directory, losses, list(store.audit()), store.verify().ok, fork)

    @property
    def final(self) -> float:
        return float(np.mean([self.losses[s] for s in sorted(self.losses)[-TAIL:]]))

    def first(self, kind: str, **wanted: Any) -> dict[str, Any] | None:
        """The payload of the first record of `kind` whose fields are `wanted`."""
        for record in self.records:
            if record.kind == kind and all(record.payload.get(k) == v for k, v in wanted.items()):
                return record.payload
        return None

    def first_alarm(self, *signals: str, after: int = 0) -> int | None:
        steps = [
            r.payload["step"]
            for r in self.records
            if r.kind == "alarm.opened"
            and r.payload["signal"].startswith(signals)
            and r.payload["step"] >= after
        ]
        return min(steps, default=None)


def play(
    training: Training,
    directory: Path,
    name: str,
    *,
    allow: str = "enforce",
    policy: str = "unattended",
    fork: Fork | None = None,
    until: int | None = None,
    sync: bool = True,
    progress: Progress | None = None,
    **options: Any,
) -> Played:
    """Drive `training` to step `until` (default: its end) under a watch in `directory`/`name`."""
    target = directory / name
    with watch(
        training.model, training.optimizer, {"schedule": training.schedule}, policy=policy, allow=allow, run=name,
        run_dir=target, sync=sync, fork=fork, **options,
    ) as live:  # fmt: skip
        assert isinstance(live, Watch)
        losses = drive(training, live, name, fork.step if fork else 0, until or training.steps, progress)
        made = live.fork() if sync else None
    return Played.read(name, target, losses, made)


def drive(
    training: Training,
    live: Watch | NullWatch,
    name: str,
    step: int,
    end: int,
    progress: Progress | None = None,
) -> dict[int, float]:
    """The training loop from `step` to `end` under the watch `live`; the losses of `Played`."""
    losses: dict[int, float] = {}
    scenario = training.scenario
    for batch in live.batches(training.batches):
        if scenario.announced and step == scenario.onset:
            live.expect("learning-rate burst", steps=scenario.length)
        loss, norm = training.train_step(batch, step)
        losses[step] = float(loss)
        verdict = live.step(loss, norm)
        if progress is not None:
            progress(name, step, end, losses[step])
        step = verdict.step
        if verdict.stop or step >= end:
            break
    return losses


def prefix(
    scenario: Scenario, seed: int, steps: int, directory: Path, progress: Progress | None = None
) -> tuple[Training, Played]:
    """The healthy part that all runs of an experiment share: steps 0 to the onset, watched."""
    training = Training(replace(SCENARIOS["clean"], onset=scenario.onset), seed, steps)
    return training, play(training, directory, "prefix", until=scenario.onset, progress=progress)


def three(scenario: Scenario) -> Iterator[tuple[str, Scenario, str]]:
    """(name, what it plays, acting mode) of an experiment's runs."""
    yield "clean", replace(SCENARIOS["clean"], onset=scenario.onset), "enforce"
    yield "unprotected", scenario, "observe"
    yield "protected", scenario, "enforce"


def outcome(scenario: Scenario, seed: int, runs: Mapping[str, Played]) -> dict[str, Any]:
    """The facts of one experiment as plain JSON. `runs`: clean, unprotected, protected, and prefix if they had one."""
    clean, bare, guarded = runs["clean"], runs["unprotected"], runs["protected"]
    healthy = [runs[name] for name in ("prefix", "clean") if name in runs]
    calm = [record.kind for run in healthy for record in run.records]
    onset = scenario.onset
    diagnosis = guarded.first("diagnosis", mechanism="attention") or {}
    applied = guarded.first("command.applied") or {}
    issued = guarded.first("command.issued") or {}
    verdict = guarded.first("outcome") or {}
    alarms = diagnosis.get("alarms") or [{}]
    return {
        "scenario": scenario.name,
        "seed": seed,
        "onset": onset,
        "alarm_step": alarms[0].get("step"),
        "alarm_signal": alarms[0].get("signal"),
        "spectrum_alarm_step": bare.first_alarm(*SPECTRUM, after=onset),
        "onset_interval": diagnosis.get("onset"),
        "diagnosis": diagnosis.get("mechanism"),
        "diagnosis_step": diagnosis.get("step"),
        "layers": diagnosis.get("layers"),
        "action": [name for action in issued.get("actions", []) for name in action],
        "applied_step": applied.get("step"),
        "verdict": verdict.get("verdict"),
        "loss_clean": clean.final,
        "loss_unprotected": bare.final,
        "loss_protected": guarded.final,
        "first_alarm_by_loss": bare.first_alarm("symptom.loss", after=onset),
        "first_alarm_by_grad_norm": bare.first_alarm("symptom.grad_norm", after=onset),
        "first_alarm_by_lse": bare.first_alarm("attention.lse", after=onset),
        "first_alarm_by_qk_norm": bare.first_alarm("attention.qk_norm", after=onset),
        "first_alarm_by_max_logit": bare.first_alarm("attention.max_logit", after=onset),
        "alarms_in_clean": calm.count("alarm.opened"),
        "diagnoses_in_clean": calm.count("diagnosis"),
        "actions_in_clean": calm.count("command.issued"),
        "budget_stated": budget(healthy[0].directory),
        "audit_verified": all(run.verified for run in runs.values()),
    }


def healed(facts: Mapping[str, Any]) -> bool:
    """Whether the protected run was diagnosed, recovered and ended where the clean one did."""
    close = facts["loss_protected"] - facts["loss_clean"] <= HEALED
    return bool(
        close
        and facts["diagnosis"] == "attention"
        and facts["verdict"] == "recovered"
        and facts["audit_verified"]
    )


def budget(directory: Path) -> dict[str, Any] | None:
    """What the run's detectors could honestly state at the end of `directory`; None below 50 samples."""
    with RunStore.open_readonly(directory) as store:
        held = json.loads(store.get_meta("status") or "{}").get("budget_held")
    return None if held is None else {"p_false_alarm_in_1000_samples_a_stream": held, "provisional": True}


def experiment(
    name: str, seed: int, steps: int, directory: Path, progress: Progress | None = None, onset: int = 500
) -> tuple[dict[str, Any], dict[str, Played]]:
    """Run the three runs of scenario `name` under `directory`; (facts, runs)."""
    scenario = replace(SCENARIOS[name], onset=onset)
    training, healthy = prefix(scenario, seed, steps, directory, progress)
    runs = {"prefix": healthy}
    for run, what, allow in three(scenario):
        runs[run] = play(
            training.fork(what), directory, run, allow=allow, fork=healthy.fork, progress=progress
        )
        runs[run].losses = {**healthy.losses, **runs[run].losses}
    return outcome(scenario, seed, runs), runs
