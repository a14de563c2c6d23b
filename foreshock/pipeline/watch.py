"""`foreshock.watch`: the one call that a training loop makes; checks its arguments and attaches a rank."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from foreshock.pipeline.attach import attach
from foreshock.pipeline.logs import configure
from foreshock.pipeline.rank import Fork, Verdict, Watch
from foreshock.pipeline.settings import acting_mode, choose, policy_text, run_directory, switched_off

if TYPE_CHECKING:
    import torch
    from torch import nn

log = logging.getLogger("foreshock")

_COUNT = itertools.count(1)


class NullWatch:
    """What `watch` returns under FORESHOCK=off: same calls, nothing watched."""

    def __init__(self, step: int = 0) -> None:
        self._step = step

    @property
    def position(self) -> tuple[int, int, int]:
        return 0, 0, self._step

    def batches(self, loader: Any, epochs: int | None = 1) -> Iterator[Any]:
        epoch = 0
        while epochs is None or epoch < epochs:
            yield from loader
            epoch += 1

    def microstep(self, loss: Any) -> None:
        """Counted nowhere."""

    def expect(self, text: str, steps: int = 1) -> None:
        """Told to nobody."""

    def step(self, loss: Any = None, grad_norm: Any = None) -> Verdict:
        self._step += 1
        return Verdict(self._step)

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any] | None = None,
    *,
    policy: str | Path | None = None,
    allow: str | None = None,
    run: str | None = None,
    run_dir: str | Path | None = None,
    data: str | None = None,
    sites: Sequence[Any] | None = None,
    masters: Mapping[Any, Any] | None = None,
    step: int = 0,
    sync: bool = False,
    fork: Fork | None = None,
    hub: str | None = None,
    **options: Any,
) -> Watch | NullWatch:
    """Watch a training run from inside its loop. Use as a context manager.

    `state` names further objects with state_dict and load_state_dict that a rollback must restore (scheduler,
    scaler). `policy` is a shipped name or a YAML file; `allow` the mode that this code permits (observe, dry_run,
    enforce; default observe). `data="manual"` says that the loop owns its iterator, so rewinds are unavailable.
    `sites` names attention modules where discovery fails. `masters` maps bf16 parameters to the float32 copies that
    the optimizer keeps; without them their update spectrum cannot be measured. `step` is the first step to run.
    `sync=True` handles each frame before `step` returns. `run_dir` resumes that run. `hub`: where decisions are made,
    "local" (in this process, for one rank) or "ray" (an actor); by default an actor for several ranks. `fork` starts from another
    watch's `fork()`, for experiments; the trainer must be in the same state. `options`: `start` (step from which
    baselines are learned; default twice the warm-up), `sources` (False: without the source probe's rules),
    `points_every` (steps).

    With several ranks (torch.distributed is initialised) every rank calls it, in the same order; what rank 0 says of
    `run`, `run_dir`, `policy` and `allow` counts for all.

    Raises ValueError or TypeError for wrong arguments, and never after that.
    """
    if switched_off():
        log.warning("FORESHOCK=off: this run is not watched")
        return NullWatch(step)
    settings = {
        "allow": acting_mode(choose("allow", allow, "observe")),
        "policy": choose("policy", policy, "default"),
        "run_dir": choose("run_dir", run_dir, None),
        "run": choose("run", run, None),
        "hub": choose("hub", hub, None),
    }
    _check(model, optimizer, state or {}, data=data, sites=sites, options=options, settings=settings)
    name = settings["run"].value or time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}-{next(_COUNT)}"
    directory = run_directory(settings["run_dir"], name).absolute()
    if settings["run_dir"].value and not settings["run"].value:
        name = directory.name
    configure()
    attached = attach(
        directory, name, settings["allow"].value, policy_text(settings["policy"]), hub=settings["hub"].value, resuming=fork is not None,
    )  # fmt: skip
    try:
        return Watch(
            model, optimizer, state or {}, attached, settings=settings, manual=data == "manual", sites=sites,
            masters=masters, step=step, sync=sync, fork=fork, options=options,
        )  # fmt: skip
    except BaseException:
        attached.close()
        raise


def _check(
    model: Any,
    optimizer: Any,
    state: Mapping[str, Any],
    *,
    data: str | None,
    sites: Sequence[Any] | None,
    options: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> None:
    """Raises ValueError or TypeError for arguments that cannot be meant."""
    if data not in (None, "manual"):
        raise ValueError(
            f'data={data!r}: the only word is "manual"; leave it out to use watch.batches(loader)'
        )
    unknown = set(options) - {"start", "sources", "points_every"}
    for count in ("start", "points_every"):
        if not isinstance(options.get(count, 1), int):
            raise TypeError(f"{count}={options[count]!r} is not a number of steps")
    if unknown:
        raise TypeError(f"watch() got an unexpected keyword argument {sorted(unknown)[0]!r}")
    for name, thing in state.items():
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise TypeError(f"state[{name!r}] has no state_dict and load_state_dict")
    run, hub = settings["run"].value, settings["hub"].value
    if run is not None and (not run or Path(run).name != run):
        raise ValueError(f"run={run!r} is a name, not a path; run_dir= takes a path")
    if hub not in (None, "ray", "local"):
        raise ValueError(f"hub={hub!r} is not one of ray, local")
    if sites is not None and not sites:
        raise ValueError("sites=[] names no module; leave it out to let Foreshock look for them")
    for each in ("parameters", "named_modules"):
        if not hasattr(model, each):
            raise TypeError(f"the first argument must be a torch.nn.Module, not {type(model).__name__}")
    if not hasattr(optimizer, "register_step_pre_hook"):
        raise TypeError(f"the second argument must be a torch optimizer, not {type(optimizer).__name__}")
