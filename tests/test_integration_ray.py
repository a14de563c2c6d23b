"""The Ray Train callback: settings reach the workers, nothing it does ends a run, and a moved hook is noticed."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import foreshock.integrations.ray as integration
from foreshock.integrations import ray_points
from foreshock.integrations.ray import ForeshockCallback
from foreshock.pipeline.events import Ack, Audit, Hello, Issue, encode
from foreshock.pipeline.hub import Hub
from foreshock.pipeline.store import RunStore
from foreshock.policies import PolicyError

pytestmark = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:ray\.")  # Ray Data's own, on every fit

POLICY = """
apiVersion: foreshock/v1
name: mine
policies: [{name: attention, match: {mechanism: attention}, ladder: [{do: [{notify: {}}]}]}]
"""
HOOKS = {
    "ControllerCallback": {"after_controller_start": ["self", "train_run_context"]},
    "WorkerGroupCallback": {
        "after_worker_group_start": ["self", "worker_group"],
        "after_worker_group_poll_status": ["self", "worker_group_status"],
    },
    "WorkerCallback": {"after_init_train_context": ["self"]},
}
"""Where Ray 2.60 has the hooks that the callback overrides, and what it gives them."""


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in os.environ if n.startswith("FORESHOCK")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


# -- settings, without Ray ------------------------------------------------------------------------------------


def test_arguments_win_over_the_drivers_environment_which_wins_over_a_workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FORESHOCK_ALLOW", "dry_run")
    monkeypatch.setenv("FORESHOCK_POLICY", "unattended")
    given = ForeshockCallback(allow="enforce")._environment("exp", {"FORESHOCK_ALLOW": "observe"})
    assert given["FORESHOCK_ALLOW"] == "enforce"
    assert given["FORESHOCK_POLICY"] == "unattended"
    assert given["FORESHOCK_HUB"] == "ray"
    assert given["FORESHOCK_RUN"] == "exp"
    assert given["FORESHOCK_RUN_DIR"] == str(tmp_path / "foreshock_runs" / "exp")


def test_what_the_driver_leaves_open_stays_as_the_worker_has_it(tmp_path: Path) -> None:
    theirs = {"FORESHOCK_ALLOW": "dry_run", "FORESHOCK_RUN": "theirs", "FORESHOCK_RUN_DIR": "/data/theirs"}
    given = ForeshockCallback()._environment("exp", theirs)
    assert "FORESHOCK_ALLOW" not in given
    assert (given["FORESHOCK_RUN"], given["FORESHOCK_RUN_DIR"]) == ("theirs", "/data/theirs")
    mine = ForeshockCallback(run="mine")._environment("exp", theirs)
    assert (mine["FORESHOCK_RUN"], mine["FORESHOCK_RUN_DIR"]) == (
        "mine",
        str(tmp_path / "foreshock_runs/mine"),
    )


def test_a_policy_file_travels_as_text_and_a_shipped_name_clears_it(tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(POLICY)
    given = ForeshockCallback(policy="policy.yaml")._environment("exp", {})
    assert given["FORESHOCK_POLICY"] == "policy.yaml"
    assert given["FORESHOCK_POLICY_TEXT"] == POLICY
    shipped = ForeshockCallback(policy="default")._environment("exp", given)
    assert (shipped["FORESHOCK_POLICY"], shipped["FORESHOCK_POLICY_TEXT"]) == ("default", "")


def test_paths_are_made_absolute_and_a_run_name_holds_no_slash(tmp_path: Path) -> None:
    given = ForeshockCallback(run_dir="here")._environment("team/exp", {})
    assert given["FORESHOCK_RUN_DIR"] == str(tmp_path / "here")
    assert given["FORESHOCK_RUN"] == "team-exp"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"policy": "nowhere.yaml"}, PolicyError),
        ({"allow": "everything"}, ValueError),
        ({"run": "a/b"}, ValueError),
        ({"run": ""}, ValueError),
    ],
)
def test_wrong_arguments_raise_on_the_driver(arguments: dict[str, str], error: type[Exception]) -> None:
    with pytest.raises(error):
        ForeshockCallback(**arguments)


@pytest.mark.parametrize(("name", "value"), [("POLICY", "nowhere.yaml"), ("ALLOW", "everything")])
def test_a_wrong_environment_is_loud_and_the_run_is_not_watched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, value: str
) -> None:
    monkeypatch.setenv(f"FORESHOCK_{name}", value)
    given = ForeshockCallback()._environment("exp", {})
    assert given["FORESHOCK"] == "off"
    assert f"NOT WATCHING: environment FORESHOCK_{name}" in caplog.text


def test_switched_off_on_the_driver_is_off_on_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORESHOCK", "off")
    assert ForeshockCallback(policy="nowhere.yaml")._environment("exp", {})["FORESHOCK"] == "off"


def test_failures_are_counted_once_an_attempt_and_preemptions_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    callback = ForeshockCallback()
    failure_config = SimpleNamespace(max_failures=3)
    callback.after_controller_start(
        SimpleNamespace(run_config=SimpleNamespace(failure_config=failure_config))
    )
    for preempted in (False, True, False):
        callback.after_worker_group_start(None)
        status = SimpleNamespace(errors={1: ValueError("bad"), 0: OSError("disk")})
        status.has_preempted_worker = lambda preempted=preempted: preempted
        callback.after_worker_group_poll_status(status)
        callback.after_worker_group_poll_status(status)
    assert callback._environment("exp", {})["FORESHOCK_RAY_FAILURES"] == "2/3"
    assert caplog.text.count("attempt 3 of this Ray run failed on rank 0, 1 (first: OSError: disk)") == 1


# -- the contract with Ray ------------------------------------------------------------------------------------


def test_ray_still_has_the_hooks_where_the_callback_expects_them() -> None:
    path = "ray.train.v2._internal.execution.callback"
    assert integration.MOVED is None, (
        f"Ray moved its hooks: {integration.MOVED}. See foreshock/integrations/ray.py"
    )
    module = importlib.import_module(path)
    for base, hooks in HOOKS.items():
        for hook, parameters in hooks.items():
            found = getattr(getattr(module, base), hook, None)
            assert found is not None, f"Ray no longer calls {base}.{hook}; the callback needs it"
            now = list(inspect.signature(found).parameters)
            assert now == parameters, f"Ray now gives {base}.{hook} {now}, the callback expects {parameters}"


def test_every_hook_of_the_callback_is_one_of_rays_and_is_contained() -> None:
    from ray.train import UserCallback

    own = {n: f for n, f in vars(ForeshockCallback).items() if callable(f) and not n.startswith("_")}
    assert set(own) == {h for hooks in HOOKS.values() for h in hooks} | {"after_exception"}
    assert list(inspect.signature(UserCallback.after_exception).parameters) == [
        "self", "run_context", "worker_exceptions",
    ]  # fmt: skip
    for name, hook in own.items():
        assert hasattr(hook, "__wrapped__"), f"{name} is not contained: if it raises, the Ray run ends"


def test_ray_accepts_it_in_a_run_config_and_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.train import RunConfig
    from ray.train.v2._internal.callbacks.env_callback import _initialize_env_callbacks

    assert RunConfig(callbacks=[ForeshockCallback()]).callbacks
    monkeypatch.setenv("RAY_TRAIN_CALLBACKS", "foreshock.integrations.ray.ForeshockCallback")
    assert [type(c) for c in _initialize_env_callbacks()] == [ForeshockCallback]


def test_a_ray_without_the_hooks_degrades_loudly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ray.train import RunConfig, UserCallback
    from ray.train.v2._internal.execution import callback as hooks

    monkeypatch.delattr(hooks, "WorkerCallback")
    spec = importlib.util.spec_from_file_location("degraded", integration.__file__)
    assert spec is not None
    assert spec.loader is not None
    degraded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(degraded)
    callback = degraded.ForeshockCallback(allow="dry_run")
    assert isinstance(callback, UserCallback)
    assert RunConfig(callbacks=[callback]).callbacks
    assert "NOT HANDED OVER" in caplog.text
    assert "WorkerCallback" in caplog.text
    callback.after_exception(None, {0: ValueError("bad")})  # no context: contained, and said
    assert "after_exception failed" in caplog.text
    context = SimpleNamespace(run_config=SimpleNamespace(failure_config=SimpleNamespace(max_failures=-1)))
    callback.after_exception(context, {0: ValueError("bad")})
    assert "allowed: any number" in caplog.text


def test_the_driver_needs_no_torch() -> None:
    code = (
        "import sys, foreshock.integrations.ray as r; r.ForeshockCallback(); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# -- through real Ray Train -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    import ray

    if ray.is_initialized():
        yield
        return
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def told(directory: str, name: str) -> list[dict[str, str]]:
    """What the environment of each rank held."""
    return [json.loads((Path(directory) / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]


def fit(callback: Any, to: Path, storage: Path) -> Any:
    """A run of two workers that write down their environment; rank 1 fails once."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    def remember(config: dict[str, str]) -> None:  # inside: workers cannot import this file
        from ray.train import get_context

        rank = get_context().get_world_rank()
        found = {k: v for k, v in os.environ.items() if k.startswith("FORESHOCK")}
        name = "second" if (Path(config["to"]) / f"first-{rank}.json").exists() else "first"
        (Path(config["to"]) / f"{name}-{rank}.json").write_text(json.dumps(found))
        while rank == 1 and name == "first":
            time.sleep(0.05)
            if (Path(config["to"]) / "first-0.json").exists():
                raise ValueError("an ordinary failure")

    return DataParallelTrainer(
        remember,
        train_loop_config={"to": str(to)},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(
            name="exp",
            storage_path=str(storage),
            failure_config=FailureConfig(max_failures=1),
            callbacks=callback,
        ),
    ).fit()


@pytest.mark.slow
@pytest.mark.rig
def test_settings_reach_every_worker_of_every_attempt(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    (tmp_path / "policy.yaml").write_text(POLICY)
    fit([ForeshockCallback(policy="policy.yaml", allow="dry_run")], tmp_path, tmp_path / "storage")
    for attempt, failures in (("first", "0/1"), ("second", "1/1")):
        for found in told(str(tmp_path), attempt):
            assert found == {
                "FORESHOCK_ALLOW": "dry_run",
                "FORESHOCK_HUB": "ray",
                "FORESHOCK_POLICY": "policy.yaml",
                "FORESHOCK_POLICY_TEXT": POLICY,
                "FORESHOCK_RAY_FAILURES": failures,
                "FORESHOCK_RUN": "exp",
                "FORESHOCK_RUN_DIR": str(tmp_path / "foreshock_runs" / "exp"),
            }


@pytest.mark.slow
@pytest.mark.rig
def test_hooks_that_raise_end_nothing_and_the_run_is_not_watched(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    callback = ForeshockCallback(allow="dry_run")
    callback._settings = callback._attempt = callback._failures = None  # type: ignore[assignment]
    for hook in (
        lambda: callback.after_controller_start(None),
        lambda: callback.after_worker_group_start(None),
        lambda: callback.after_worker_group_poll_status(None),
    ):
        hook()
    assert len(callback._given_up) == 3, "every hook of the controller is broken here"
    fit([callback], tmp_path, tmp_path / "storage")
    assert told(str(tmp_path), "second") == [{"FORESHOCK": "off"}] * 2


SCRIPT = """
import json, os, ray, sys
from pathlib import Path
from ray.train import RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

def train(config):
    found = {k: v for k, v in os.environ.items() if k.startswith("FORESHOCK")}
    Path(config["to"], f"first-{ray.train.get_context().get_world_rank()}.json").write_text(json.dumps(found))

ray.init(address=sys.argv[2], log_to_driver=False)
os.environ["FORESHOCK_ALLOW"] = "dry_run"
os.environ["RAY_TRAIN_CALLBACKS"] = "foreshock.integrations.ray.ForeshockCallback"
DataParallelTrainer(
    train, train_loop_config={"to": sys.argv[1]},
    scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
    run_config=RunConfig(name="exp", storage_path=sys.argv[1] + "/storage"),
).fit()
"""


@pytest.mark.slow
def test_the_environment_alone_attaches_it(cluster: None, tmp_path: Path) -> None:
    """A program that does not name Foreshock. Its variables are set after Ray's start, so nothing is inherited."""
    import ray

    arguments = [str(tmp_path), ray.get_runtime_context().gcs_address]
    subprocess.run([sys.executable, "-c", SCRIPT, *arguments], check=True, cwd=tmp_path, timeout=250)
    for found in told(str(tmp_path), "first"):
        assert found["FORESHOCK_ALLOW"] == "dry_run"
        assert found["FORESHOCK_RUN_DIR"] == str(tmp_path / "foreshock_runs" / "exp")


# -- going back with Ray's own checkpoints --------------------------------------------------------------------

PAUSE = """
apiVersion: foreshock/v1
name: pause
mode: enforce
group_wait: 0 steps
policies: [{name: attention, match: {mechanism: attention}, ladder: [{do: [{pause: {}}]}]}]
"""


class Reached(Exception):
    """The event that the test waits for was handled."""


class Recorder:
    """A real hub, and every (event, effects) of it; stops the stream at the first command."""

    def __init__(self) -> None:
        self.hub, self.events = Hub("r"), list[tuple[Any, list[Any]]]()

    def handle(self, event: Any) -> list[Any]:
        effects = self.hub.handle(event)
        self.events.append((event, effects))
        if any(isinstance(effect, Issue) for effect in effects):
            raise Reached
        return effects


def played(stream: Any, after: list[Any] | None = None) -> list[tuple[Any, list[Any]]]:
    """A real hub's (event, effects) up to a pause for a fault at step 200, then of the events in `after`."""
    recorder = Recorder()
    with pytest.raises(Reached):
        stream(onset=200, policy=PAUSE).events(recorder)
    return recorder.events + [(event, recorder.hub.handle(event)) for event in after or []]


def audited(events: list[tuple[Any, list[Any]]]) -> list[Any]:
    return [
        SimpleNamespace(event=number, kind=effect.kind, payload=effect.payload)
        for number, (_, effects) in enumerate(events)
        for effect in effects
        if isinstance(effect, Audit)
    ]


def issued(events: list[tuple[Any, list[Any]]]) -> Any:
    return next(e.command for _, effects in events for e in effects if isinstance(e, Issue))


def test_a_pause_leaves_behind_what_was_taken_after_the_onset(stream: Any) -> None:
    command = issued(played(stream))
    applied = Ack(0.0, command.id, 0, "applied", 220, {})
    again = Hello(0.0, 2, (0,), stream().table, "enforce", 150)
    for after in (
        [applied],
        [],
        [again],
        [applied, again],
    ):  # acknowledged or not, before the restart or after
        (cut,) = ray_points.cuts(audited(played(stream, after)))
        assert cut[:2] == (2, 0)
        assert 150 <= cut[2] <= 200
        assert ray_points.kept((1, 0, 150), [cut])
        assert not ray_points.kept((1, 0, 250), [cut])
        assert ray_points.kept((2, 0, 250), [cut]), "the next attempt went back, so its checkpoints are good"


def test_a_pause_that_was_refused_leaves_nothing_behind(stream: Any) -> None:
    command = issued(played(stream))
    refused = Ack(0.0, command.id, 0, "refused", 220, {"reason": "the mode was lowered"})
    again = Hello(0.0, 2, (0,), stream().table, "enforce", 400)
    assert ray_points.cuts(audited(played(stream, [refused, again]))) == []


def test_a_rollback_in_place_leaves_behind_the_abandoned_future(stream: Any) -> None:
    events = stream(onset=120, steps=420, incurable=True).events(Hub("r"))
    (cut,) = ray_points.cuts(audited(events))[:1]
    assert cut[:2] == (1, 1)
    assert cut[2] <= 120
    assert not ray_points.kept((1, 0, cut[2] + 50), [cut])
    assert ray_points.kept((1, 1, cut[2] + 50), [cut])


def test_a_healthy_run_leaves_nothing_behind(stream: Any) -> None:
    assert ray_points.cuts(audited(stream().events(Hub("r")))) == []


def test_there_is_room_for_a_checkpoint_from_before_a_fault_that_returns_at_once() -> None:
    for every in (50, 450, 5000):
        config = ray_points.checkpoint_config(every)
        late = -(-450 // every)  # checkpoints between an onset and its alarm, at most
        assert config.num_to_keep >= 2 * late + 1
        assert config.checkpoint_score_attribute == ray_points.HEALTH


@pytest.mark.slow
@pytest.mark.rig
def test_a_restart_goes_back_to_the_newest_checkpoint_from_before_the_fault(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: Any
) -> None:
    """Two workers report a checkpoint every 50 steps; the fault begins at step 200, fires from 250, and pauses."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    monkeypatch.setenv("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
    command = issued(played(stream))
    with RunStore(tmp_path / "record") as store:
        for event, effects in played(stream, [Ack(0.0, command.id, 0, "applied", 301, {})]):
            with store.transaction():
                number = store.append_event(*encode(event))
                for effect in [e for e in effects if isinstance(e, Audit)]:
                    store.append_audit(number, event.time, effect.kind, effect.payload)
        store.set_meta("status", json.dumps({"attempt": 1, "onsets": {"attention": 200}}))

    def train(config: dict[str, str]) -> None:
        import shutil
        import tempfile

        import ray.train

        from foreshock.integrations import ray_points

        rank = ray.train.get_context().get_world_rank()
        run = Path(os.environ["FORESHOCK_RUN_DIR"])
        resume = ray_points.resume_point()
        attempt = 2 if resume.checkpoint else 1
        if resume.checkpoint:
            with resume.checkpoint.as_directory() as directory:
                loaded = Path(directory, "step").read_text()
            committed = ray.train.CheckpointConsistencyMode.COMMITTED
            all_kept = ray.train.get_all_reported_checkpoints(consistency_mode=committed)
            found = {
                "loaded": loaded,
                "step": resume.step,
                "before": resume.before,
                "failures": resume.failures,
                "kept": sorted(c.metrics["foreshock_step"] for c in all_kept),
            }
            Path(config["to"], f"resumed-{rank}.json").write_text(json.dumps(found))
        for step in range((resume.step or 0) + 50, 301 if attempt == 1 else 201, 50):
            watch = SimpleNamespace(position=(attempt, 0, step), directory=run)
            if rank == 0 and attempt == 1 and step == 250:
                shutil.copytree(config["to"] + "/record", run)
            with tempfile.TemporaryDirectory() as directory:
                Path(directory, "step").write_text(str(step))
                checkpoint = ray.train.Checkpoint.from_directory(directory) if rank == 0 else None
                ray_points.report({"loss": 1.0}, checkpoint, watch)
        if attempt == 1:
            ray_points.restart(watch)

    result = DataParallelTrainer(
        train,
        train_loop_config={"to": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(
            name="exp",
            storage_path=str(tmp_path / "storage"),
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=ray_points.checkpoint_config(every=450),
            callbacks=[ForeshockCallback()],
        ),
    ).fit()
    for found in told(str(tmp_path), "resumed"):
        assert found["loaded"] == "150"
        assert found["step"] == 150
        assert 150 <= found["before"] <= 200
        assert found["failures"] == "1/1"
        assert found["kept"] == [50, 100, 150, 200, 300], "those that fired gave way, except the latest"
    assert result.metrics["foreshock_step"] == 200
    assert result.metrics["foreshock_attempt"] == 2
