"""Going back with Ray Train's own checkpoints, for trainers that cannot be rewound in place.

The policy's last rung is `pause`: it stops every rank at one step. `train_fn` then leaves through `restart`, Ray starts
the next attempt (one of its `max_failures`), and `resume_point` picks the newest checkpoint from before the fault.

    config = RunConfig(checkpoint_config=checkpoint_config(every=500), failure_config=FailureConfig(max_failures=3), ...)

    resume = resume_point()                              # first thing in train_fn, on every rank
    ...                                                  # load resume.checkpoint, where there is one
    with foreshock.watch(model, optimizer, data="manual", step=resume.step) as watch:
        ...
        verdict = watch.step(loss)
        if verdict.stop: restart(watch)                  # raises RollbackRestart
        if verdict.step % 500 == 0: report({"loss": ...}, checkpoint, watch)     # instead of ray.train.report
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from foreshock.pipeline.settings import switched_off
from foreshock.pipeline.store import RunStore, StoreError
from foreshock.remediation.audit import AuditRecord
from foreshock.remediation.points import DELAY

if TYPE_CHECKING:
    from foreshock.pipeline.rank import Watch
    from foreshock.pipeline.watch import NullWatch

    Watched = Watch | NullWatch

_Choice = tuple[str | None, int | None, int | None]

log = logging.getLogger("foreshock")

HEALTH = "foreshock_health"
"""The metric by which Ray keeps checkpoints: 1 while nothing fires, 0 while something does."""
_NOTES = ("foreshock_attempt", "foreshock_timeline", "foreshock_step")
_FAILURES = "FORESHOCK_RAY_FAILURES"

Place = tuple[int, ...]
"""Attempt, timeline, step: a checkpoint at a place holds the state before that step runs."""


class RollbackRestart(RuntimeError):
    """Ends this attempt, so that the next one starts from before the fault. Uses up one of Ray's `max_failures`."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Where to start: without a checkpoint, from the beginning.

    `step` is the next one to run, None where the checkpoint was not reported through `report`. `before` is the onset
    behind which this goes back, None where Ray's latest checkpoint is taken. `failures` is "used/allowed" of Ray's
    max_failures (-1: any number), None where `ForeshockCallback` is not there to count them.
    """

    checkpoint: Any | None
    step: int | None
    before: int | None
    failures: str | None


def checkpoint_config(every: int) -> Any:
    """Ray's CheckpointConfig for a checkpoint every `every` steps: those from before a fault outlive its detection.

    While something fires, new ones do not push out older ones. What was reported between onset and alarm counts as
    healthy and cannot be taken back, so there is room for that twice: a fault may return once.
    """
    from ray.train import CheckpointConfig

    room = math.ceil(max(DELAY.values()) / every)
    return CheckpointConfig(num_to_keep=2 * room + 2, checkpoint_score_attribute=HEALTH)


def report(metrics: Mapping[str, Any], checkpoint: Any | None, watch: Watched, **options: Any) -> None:
    """`ray.train.report`, on every rank, with the checkpoint's place and health among its metrics."""
    import ray.train

    notes = dict(zip(_NOTES, watch.position, strict=True)) | {HEALTH: 1}
    directory = getattr(watch, "directory", None)  # none under FORESHOCK=off
    if checkpoint is not None and directory and ray.train.get_context().get_world_rank() == 0:
        try:
            with RunStore.open_readonly(directory) as store:
                status = json.loads(store.get_meta("status") or "{}")
            notes[HEALTH] = int(status.get("attempt") != watch.position[0] or not status.get("onsets"))
        except Exception as error:
            log.warning("the health of this checkpoint is unknown and counts as good: %s", error)
    ray.train.report({**metrics, **notes}, checkpoint, **options)


def restart(watch: Watched) -> NoReturn:
    """Raise `RollbackRestart`, on every rank: after a pause, instead of ending the run."""
    raise RollbackRestart(
        f"paused before step {watch.position[2]}: the next attempt goes back to before the fault, at the cost of one "
        f"of Ray's max_failures (used/allowed before: {os.environ.get(_FAILURES, 'unknown')})"
    )


def resume_point(run_dir: str | Path | None = None) -> Resume:
    """The checkpoint to start from, the same on every rank: call it on all of them, first thing in `train_fn`.

    It is Ray's latest, except after a pause: then it is the newest one taken at or before the onset of the fault
    while nothing fired. Where there is none, that is logged and the latest is taken, as without Foreshock. `run_dir`
    defaults to what `ForeshockCallback` handed over; rank 0 reads the record there.
    """
    import ray.train
    from ray.train.collective import broadcast_from_rank_zero

    latest = ray.train.get_checkpoint()
    choice: _Choice = None, None if latest else 0, None
    if latest and ray.train.get_context().get_world_rank() == 0:
        try:
            choice = _choose(latest, run_dir or os.environ.get("FORESHOCK_RUN_DIR", ""))
        except Exception as error:
            log.error("NOT ROLLED BACK, if that was asked for: %s: %s", type(error).__name__, error)
    path, step, before = broadcast_from_rank_zero(choice)
    checkpoint = ray.train.Checkpoint(path, latest.filesystem) if path else latest
    resume = Resume(checkpoint, step, before, os.environ.get(_FAILURES))
    log.warning("starting from %s", resume)
    return resume


def _choose(latest: Any, run_dir: str | Path) -> _Choice:
    """The path of the checkpoint (None: `latest`), its step (None: unknown), the step behind which it goes back."""
    import ray.train

    committed = ray.train.CheckpointConsistencyMode.COMMITTED
    reported = ray.train.get_all_reported_checkpoints(consistency_mode=committed, timeout_s=30)
    noted = {c.checkpoint.path: c.metrics for c in reported if all(note in c.metrics for note in _NOTES)}
    places: dict[str, Place] = {p: tuple(int(m[note]) for note in _NOTES) for p, m in noted.items()}
    if latest.path not in places:
        return None, None, None
    newest, past = places[latest.path], list[Place]()
    if newest[0] and not switched_off():  # a watched attempt, so there is a record
        try:
            with RunStore.open_readonly(Path(run_dir)) as store:
                past = cuts(store.audit())
        except StoreError as error:
            log.error("NOT ROLLED BACK, if that was asked for: %s", error)
    behind = [cut for cut in past if not kept(newest, [cut])]
    if not behind:
        return None, newest[2], None
    before = min(cut[2] for cut in behind)
    usable = [p for p, place in places.items() if kept(place, past) and noted[p].get(HEALTH, 1)]
    if not usable:
        log.error("NOT ROLLED BACK: no checkpoint from before step %d is left; the latest is taken", before)
        return None, newest[2], None
    path = max(usable, key=places.__getitem__)
    return path, places[path][2], before


def kept(place: Place, cuts: Iterable[Place]) -> bool:
    """Whether a checkpoint of that place may be gone on from. A cut (attempt, timeline, step) leaves behind what was
    taken before that attempt and timeline, of later steps."""
    return not any(place[:2] < cut[:2] and place[2] > cut[2] for cut in cuts)


def cuts(records: Iterable[AuditRecord]) -> list[Place]:
    """What the record says of earlier checkpoints: a pause cuts at its fault's onset, a rollback in place at its point.

    A pause counts once it is issued, unless its attempt went on without it: ranks that stop may not live to
    acknowledge it, and then it is given up by the very event that begins the next attempt.
    """
    attempt = timeline = 0
    incidents, onsets, points = dict[str, str](), dict[str, int](), dict[str, int]()
    pauses, rewinds = dict[str, Place](), list[Place]()
    given_up: tuple[int, dict[str, Place]] = 0, {}
    for record in records:
        said = record.payload
        match record.kind:
            case "attempt.started":
                attempt, timeline = said["attempt"], 0
                if given_up[0] == record.event:
                    pauses |= given_up[1]
            case "incident.opened":
                incidents[said["diagnosis"]["mechanism"]] = said["incident"]
                onsets[said["incident"]] = said["diagnosis"]["onset"][0]
            case "diagnosis" if incident := incidents.get(said["mechanism"]):
                onsets[incident] = min(onsets[incident], said["onset"][0])
            case "command.issued":
                for action in said["actions"]:
                    if "pause" in action:
                        pauses[said["id"]] = attempt + 1, 0, onsets[said["incident"]]
                    if "rollback" in action:
                        points[said["id"]] = action["rollback"]["step"]
            case "outcome" if said["command"] in pauses:
                given_up = record.event, {said["command"]: pauses.pop(said["command"])}
            case "command.applied" if said["command"] in points:
                timeline += 1
                rewinds.append((attempt, timeline, points[said["command"]]))
    return [*pauses.values(), *rewinds]
