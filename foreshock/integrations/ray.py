"""Ray Train (V2): what a run needs to be watched, said once on the driver.

    RunConfig(callbacks=[ForeshockCallback(policy="policy.yaml")])

or, without touching code, `RAY_TRAIN_CALLBACKS=foreshock.integrations.ray.ForeshockCallback` in the driver's
environment. Either way `foreshock.watch(model, optimizer)` in `train_fn` finds its settings in the environment of
its worker process. Foreshock must be installed on every node; `ScalingConfig(num_workers=0)` runs no callbacks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from foreshock.pipeline.settings import RUNS, Setting, acting_mode, choose, switched_off
from foreshock.policies import SHIPPED, loads, source_text

log = logging.getLogger("foreshock")

MOVED: str | None = None
"""Why the hooks that Foreshock needs are not where Ray 2.60 has them; None where they are."""

try:
    from ray.train.v2._internal.execution.callback import (
        ControllerCallback,
        WorkerCallback,
        WorkerGroupCallback,
    )

    class _Hooks(ControllerCallback, WorkerGroupCallback, WorkerCallback):  # type: ignore[misc]
        """Every hook of Ray's that is used below. They are developer API, under a private path."""

except ImportError as error:
    from ray.train import UserCallback

    MOVED = str(error)

    class _Hooks(UserCallback):  # type: ignore[misc, no-redef]
        """What is public: told of exceptions, but cannot reach the workers."""


def _contained(hook: Callable[..., None]) -> Callable[..., None]:
    """An exception in a hook would end the Ray run, so none leaves one; each hook's first is logged."""

    @wraps(hook)
    def call(self: ForeshockCallback, *args: Any, **kwargs: Any) -> None:
        try:
            hook(self, *args, **kwargs)
        except Exception as error:
            name = hook.__name__
            if name not in self._given_up:
                self._given_up.add(name)
                log.exception("%s failed (%s: %s). Training goes on.", name, type(error).__name__, error)

    return call


class ForeshockCallback(_Hooks):
    """Hands settings to the workers of a Ray Train run and says which attempts failed.

    Arguments are `watch`'s, and win over the FORESHOCK_* variables of the driver, which win over those of a worker.
    A policy file is read and checked here: workers need not have it. `run` defaults to the name of the Ray run,
    `run_dir` to ./foreshock_runs/<run> where the driver runs; workers of other nodes must reach that path too.

    Raises ValueError (`PolicyError` for a policy) for a wrong argument. What is wrong in the environment is logged,
    and the run is then not watched.
    """

    def __init__(
        self,
        *,
        policy: str | Path | None = None,
        allow: str | None = None,
        run: str | None = None,
        run_dir: str | Path | None = None,
    ) -> None:
        self._given_up: set[str] = set()
        self._runs = Path(RUNS).resolve()
        self._attempt = self._failures = 0
        self._max_failures: int | None = None
        self._failed = False
        arguments = {"policy": policy, "allow": allow, "run": run, "run_dir": run_dir}
        self._settings = {"FORESHOCK": "off"} if switched_off() else _read(arguments)
        if MOVED is not None:
            log.error(
                "NOT HANDED OVER: this Ray has no hook to give settings to workers (%s). Training goes on. "
                "Pass them to foreshock.watch(...) in train_fn instead.",
                MOVED,
            )

    # -- in each worker, before train_fn ------------------------------------------------------------------

    @_contained
    def after_init_train_context(self) -> None:
        try:
            from ray.train import get_context

            os.environ.update(self._environment(get_context().get_experiment_name(), os.environ))
        except Exception:
            log.error("NOT WATCHING this worker: the run's settings did not reach it.")
            os.environ["FORESHOCK"] = "off"  # on settings of its own it would be a run of its own
            raise

    def _environment(self, experiment: str, present: Mapping[str, str]) -> dict[str, str]:
        """The variables to set in a worker of the Ray run `experiment` that has those in `present`."""
        own = self._settings
        run = own.get("FORESHOCK_RUN") or present.get("FORESHOCK_RUN") or experiment.replace("/", "-")
        place = None if "FORESHOCK_RUN" in own else present.get("FORESHOCK_RUN_DIR")
        settings = {
            "FORESHOCK_HUB": "ray",
            "FORESHOCK_RUN": run,
            "FORESHOCK_RUN_DIR": place or str(self._runs / run),
            **own,
        }
        if "FORESHOCK_POLICY" in own:
            settings.setdefault("FORESHOCK_POLICY_TEXT", "")  # whatever is there belongs to another policy
        limit = "" if self._max_failures is None else self._max_failures
        return {**settings, "FORESHOCK_RAY_FAILURES": f"{self._failures}/{limit}"}

    # -- in Ray's controller ------------------------------------------------------------------------------

    @_contained
    def after_controller_start(self, train_run_context: Any) -> None:
        self._max_failures = train_run_context.run_config.failure_config.max_failures

    @_contained
    def after_worker_group_start(self, worker_group: Any) -> None:
        self._attempt += 1
        self._failed = False

    @_contained
    def after_worker_group_poll_status(self, worker_group_status: Any) -> None:
        if worker_group_status.errors and not self._failed:
            self._failed = True  # polled again where Ray waits for the others
            preempted = getattr(worker_group_status, "has_preempted_worker", bool)()  # not in Ray 2.50
            self._failures += not preempted
            self._tell(worker_group_status.errors)

    @_contained
    def after_exception(self, run_context: Any, worker_exceptions: Mapping[int, Exception]) -> None:
        """Where this is all that Ray has (`MOVED`)."""
        self._attempt += 1
        self._failures += 1
        self._max_failures = run_context.run_config.failure_config.max_failures
        self._tell(worker_exceptions)

    def _tell(self, errors: Mapping[int, Exception]) -> None:
        error = errors[min(errors)]
        log.warning(
            "attempt %d of this Ray run failed on rank %s (first: %s: %s); failures so far: %d, allowed: %s",
            self._attempt, ", ".join(map(str, sorted(errors))), type(error).__name__, str(error)[:200], self._failures,
            "any number" if self._max_failures == -1 else self._max_failures,
        )  # fmt: skip


def _read(arguments: Mapping[str, Any]) -> dict[str, str]:
    """What the driver says, as variables for the workers. Raises ValueError where an argument is wrong."""
    found: dict[str, str] = {}
    for name, argument in arguments.items():
        setting = choose(name, argument, None)
        if setting.value is None:
            continue
        try:
            found |= _CHECKS[name](setting)
        except ValueError as error:
            if setting.source == "argument":
                raise
            log.error("NOT WATCHING: %s: %s. Training goes on.", setting.source, error)
            return {"FORESHOCK": "off"}
    return found


def _policy(setting: Setting) -> dict[str, str]:
    name = str(setting.value)
    text, source = source_text(name)
    loads(text, source)
    return {"FORESHOCK_POLICY": name} | ({} if name in SHIPPED else {"FORESHOCK_POLICY_TEXT": text})


def _run(setting: Setting) -> dict[str, str]:
    run = str(setting.value)
    if not run or Path(run).name != run:
        raise ValueError(f"run={run!r} is a name, not a path; run_dir= takes a path")
    return {"FORESHOCK_RUN": run}


_CHECKS: dict[str, Callable[[Setting], dict[str, str]]] = {
    "policy": _policy,
    "allow": lambda setting: {"FORESHOCK_ALLOW": acting_mode(setting).value.value},
    "run": _run,
    "run_dir": lambda setting: {"FORESHOCK_RUN_DIR": str(Path(setting.value).resolve())},
}
