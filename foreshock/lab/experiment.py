"""One experiment: the same run three times from one healthy prefix: clean, unprotected, protected.

All three are watched by the same chain with the same policy; the unprotected one is only observed, so its
record says when each signal would have spoken first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from foreshock.lab.scenarios import SCENARIOS, Scenario, Training
from foreshock.pipeline.store import RunStore
from foreshock.pipeline.watch import Fork, Watch, watch
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
    step, end = (fork.step if fork else 0), until or training.steps
    losses: dict[int, float] = {}
    target = directory / name
    with watch(
        training.model, training.optimizer, {"schedule": training.schedule}, policy=policy, allow=allow, run=name,
        run_dir=target, sync=sync, fork=fork, **options,
    ) as live:  # fmt: skip
        assert isinstance(live, Watch)
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
        made = live.fork() if sync else None
    with RunStore.open_readonly(target) as store:
        return Played(name, target, losses, list(store.audit()), store.verify().ok, made)


def prefix(
    scenario: Scenario, seed: int, steps: int, directory: Path, progress: Progress | None = None
) -> tuple[Training, Played]:
    """The healthy part that all runs of an experiment share: steps 0 to the onset, watched."""
    training = Training(replace(SCENARIOS["clean"], onset=scenario.onset), seed, steps)
    return training, play(training, directory, "prefix", until=scenario.onset, progress=progress)


def outcome(scenario: Scenario, seed: int, runs: Mapping[str, Played]) -> dict[str, Any]:
    """The facts of one experiment as plain JSON. `runs`: prefix, clean, unprotected, protected."""
    clean, bare, guarded = runs["clean"], runs["unprotected"], runs["protected"]
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
        "alarms_in_clean": sum(
            r.kind == "alarm.opened" for run in ("prefix", "clean") for r in runs[run].records
        ),
        "diagnoses_in_clean": sum(
            r.kind == "diagnosis" for run in ("prefix", "clean") for r in runs[run].records
        ),
        "actions_in_clean": sum(
            r.kind == "command.issued" for run in ("prefix", "clean") for r in runs[run].records
        ),
        "budget_stated": budget(runs["prefix"].directory),
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
    calm = replace(SCENARIOS["clean"], onset=onset)
    for run, what, allow in (
        ("clean", calm, "enforce"),
        ("unprotected", scenario, "observe"),
        ("protected", scenario, "enforce"),
    ):
        runs[run] = play(
            training.fork(what), directory, run, allow=allow, fork=healthy.fork, progress=progress
        )
        runs[run].losses = {**healthy.losses, **runs[run].losses}
    return outcome(scenario, seed, runs), runs
