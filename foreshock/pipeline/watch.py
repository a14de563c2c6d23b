"""`foreshock.watch`: the training loop's side. Measures, emits, takes recovery points, applies commands.

Training may not fail because of this file: every hook and every call into a probe is contained, and a part that
fails is given up, loudly, for the rest of the run.
"""

from __future__ import annotations

import copy
import itertools
import logging
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from foreshock.pipeline.emitter import Emitter
from foreshock.pipeline.events import (
    Ack,
    Announcement,
    Event,
    Frames,
    Hello,
    Human,
    PolicyLoaded,
    RecoveryPoint,
)
from foreshock.pipeline.local import LocalShell
from foreshock.pipeline.mechanisms import installed
from foreshock.pipeline.settings import acting_mode, choose, run_directory, switched_off
from foreshock.policies import PolicyError, loads, source_text
from foreshock.policies.models import Mode
from foreshock.remediation.types import Command
from foreshock.signals import SignalFrame, SignalTable

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from foreshock.monitors.probe import Pending, Probe

log = logging.getLogger("foreshock")

POINTS_EVERY = 50
_COUNT = itertools.count(1)
REMEMBERED = 4096
"""Steps for which the number of batches drawn is remembered, so that a window of data can be named."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the loop must know after a step. `step` is the next step to run, also after a rewind."""

    step: int
    stop: bool = False
    rewound: bool = False
    applied: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fork:
    """A watched run's state between two steps, from which other runs can start as if they had been it."""

    hub: dict[str, Any]
    probes: dict[str, Any]
    points: Path | None
    step: int
    seq: int
    timeline: int
    batches: dict[int, int]


class NullWatch:
    """What `watch` returns under FORESHOCK=off: same calls, nothing watched."""

    def __init__(self, step: int = 0) -> None:
        self._step = step

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
    **options: Any,
) -> Watch | NullWatch:
    """Watch a training run from inside its loop. Use as a context manager.

    `state` names further objects with state_dict and load_state_dict that a rollback must restore (scheduler,
    scaler). `policy` is a shipped name or a YAML file; `allow` the mode that this code permits (observe, dry_run,
    enforce; default observe). `data="manual"` says that the loop owns its iterator, so rewinds are unavailable.
    `sites` names attention modules where discovery fails. `masters` maps bf16 parameters to the float32 copies that
    the optimizer keeps; without them their update spectrum cannot be measured. `step` is the first step to run.
    `sync=True` handles each frame before `step` returns. `run_dir` resumes that run. `fork` starts from another
    watch's `fork()`, for experiments; the trainer must be in the same state. `options`: `start` (step from which
    baselines are learned; default twice the warm-up), `sources` (False: without the source probe's rules),
    `points_every` (steps).

    Raises ValueError or TypeError for wrong arguments, and never after that.
    """
    if switched_off():
        log.warning("FORESHOCK=off: this run is not watched")
        return NullWatch(step)
    settings = {
        "allow": acting_mode(choose("allow", allow, "observe")),
        "policy": choose("policy", policy, "default"),
        "run_dir": choose("run_dir", run_dir, None),
    }
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
    for name, thing in (state or {}).items():
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise TypeError(f"state[{name!r}] has no state_dict and load_state_dict")
    if run is not None and (not run or Path(run).name != run):
        raise ValueError(f"run={run!r} is a name, not a path; run_dir= takes a path")
    if sites is not None and not sites:
        raise ValueError("sites=[] names no module; leave it out to let Foreshock look for them")
    for each in ("parameters", "named_modules"):
        if not hasattr(model, each):
            raise TypeError(f"the first argument must be a torch.nn.Module, not {type(model).__name__}")
    if not hasattr(optimizer, "register_step_pre_hook"):
        raise TypeError(f"the second argument must be a torch optimizer, not {type(optimizer).__name__}")
    name = run or time.strftime("%Y%m%d-%H%M%S") + f"-{os.getpid()}-{next(_COUNT)}"
    directory = run_directory(settings["run_dir"], name)
    return Watch(
        model, optimizer, state or {}, directory=directory, run=name if run_dir is None or run else directory.name,
        settings=settings, manual=data == "manual", sites=sites, masters=masters, step=step, sync=sync, fork=fork, options=options,
    )  # fmt: skip


class Watch:
    """One rank's watch over one attempt. Make it with `foreshock.watch`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        states: Mapping[str, Any],
        *,
        directory: Path,
        run: str,
        settings: Mapping[str, Any],
        manual: bool,
        sites: Sequence[Any] | None,
        masters: Mapping[Any, Any] | None,
        step: int,
        sync: bool,
        fork: Fork | None,
        options: Mapping[str, Any],
    ) -> None:
        from foreshock.monitors.symptoms import Symptoms
        from foreshock.remediation.live.actions import Live, Trainer

        self.run, self.directory = run, directory
        self._next, self._seq, self._timeline = step, 0, 0
        self._sync, self._manual, self._settings, self._options = sync, manual, settings, dict(options)
        self._allow: Mode = settings["allow"].value
        self._every = int(options.get("points_every", POINTS_EVERY)) if self._allow is Mode.ENFORCE else 0
        self.limits: list[str] = []
        self._symptoms = Symptoms(optimizer, scaler=states.get("scaler"))
        probes: list[Probe] = [self._symptoms]
        trainer = Trainer(model, optimizer, states)
        for mechanism in installed():
            attached = mechanism.attach(model, sites, masters)
            probes += attached.probes
            self.limits += attached.limits
            trainer.interceptor = attached.interceptor or trainer.interceptor
            trainer.layers = attached.layers or trainer.layers
        trainer.probes = probes
        self._trainer, self._probes = trainer, probes
        self._spans = self._lay_out(probes)
        self._micro: list[Any] = []
        self._batches: dict[int, int] = {}
        self._ready: deque[tuple[Command, dict[str, Any], tuple[str, dict[str, Any]] | None]] = deque()
        self._greeted = False
        self._stopped = False
        self._spent = [0.0, time.perf_counter()]
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._each("before_update")),
            optimizer.register_step_post_hook(lambda *_: self._each("after_update")),
        ]
        self._shell = LocalShell(directory, run, self._prepare)
        self._attempt = self._shell.attempt
        self._points = self._open_points()
        self._live = Live(trainer, self._points, self._batches_before, self._no_points)
        self._emitter = Emitter(self._shell.submit, sync=sync)
        if fork is None:
            self._load_policy()
        else:
            self._start_from(fork)
        self._stand()
        self._open_signals()
        if manual:
            self.limits.append(
                'data="manual": rollback and skip_data are unavailable, because the loop owns its iterator'
            )
        for limit in self.limits:
            log.warning("%s", limit)
        self._each("arm", self._next)

    # -- what the loop calls ------------------------------------------------------------------------------

    def batches(self, loader: Any, epochs: int | None = 1) -> Iterator[Any]:
        """Iterate over `loader` for `epochs` passes (None = without end), so that a rollback can rewind it."""
        from foreshock.remediation.live.data import DataCursor

        if self._manual:
            raise ValueError(
                'watch(data="manual") was told that the loop owns its iterator; leave it out to use batches()'
            )
        before = self._trainer.cursor
        cursor = DataCursor(loader, epochs, call=before.call + 1 if before else 1)
        cursor.batches = before.batches if before else self._batches.get(self._next, 0)
        self._batches.setdefault(self._next, cursor.batches)
        if before is not None and before.call == 1 and self._every:
            log.warning(
                "a second watch.batches(): a rollback cannot cross into the first; use batches(loader, epochs=N)"
            )
        self._trainer.cursor = cursor
        yield from cursor

    def microstep(self, loss: Tensor | float) -> None:
        """Once per micro-batch under gradient accumulation, before `step()` without a loss."""
        self._micro.append(loss.detach() if hasattr(loss, "detach") else loss)

    def expect(self, text: str, steps: int = 1) -> None:
        """Announce a change made on purpose (learning rate, data mix, sequence length) for the coming steps."""
        try:
            event = Announcement(time.time(), str(text), self._next, max(0, int(steps)))
            self._greet()
            self._emitter.put(lambda: event)
        except Exception as error:
            self._give_up(f"watch.expect failed: {type(error).__name__}: {error}")

    def step(self, loss: Tensor | float | None = None, grad_norm: Tensor | float | None = None) -> Verdict:
        """Once per attempted optimizer step, after it, also where it was skipped.

        `grad_norm` is the norm before clipping, as `clip_grad_norm_` returns it; the optimizer only sees the
        clipped one. Returns what the loop must know; never raises.
        """
        began = time.perf_counter()
        try:
            verdict = self._step(loss, grad_norm)
        except Exception as error:
            self._give_up(f"watch.step failed: {type(error).__name__}: {error}")
            verdict = Verdict(self._next, self._stopped)
        self._spent[0] += time.perf_counter() - began
        return verdict

    def drain(self, timeout: float = 30.0) -> bool:
        """Wait until everything measured so far was handled; False after `timeout` seconds. Not for a training loop."""
        if self._points is not None:
            self._points.flush()
        return self._emitter.drain(timeout)

    def close(self) -> None:
        """Deliver what is queued and put the model back as it was: no hook, no wrapper stays."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        try:
            if self._points is not None:
                self._points.close()
            self._emitter.close()
            self._shell.publish(self._facts())
            self._shell.close()
            self._signals.close()
        except Exception as error:
            log.error("Foreshock could not close cleanly: %s", error)
        self._each("detach")
        if self._trainer.interceptor is not None:
            self._trainer.interceptor.detach()
        self._live.close()

    def fork(self) -> Fork:
        """The watch's state between two steps. Only with sync=True, where nothing is in flight."""
        if not self._sync:
            raise ValueError("fork() needs watch(sync=True): otherwise frames are still on their way")
        return Fork(
            copy.deepcopy(self._shell.hub.state_dict()), {p.name: p.state_dict() for p in self._probes},
            self._points.directory if self._points else None, self._next, self._seq, self._timeline, dict(self._batches),
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- one step -----------------------------------------------------------------------------------------

    def _step(self, loss: Any, grad_norm: Any) -> Verdict:
        self._greet()
        if loss is None and self._micro:
            loss = sum(self._micro[1:], self._micro[0]) / len(self._micro)
        self._micro.clear()
        self._guard(self._symptoms, lambda: self._symptoms.observe(loss, grad_norm))
        step, seq, timeline, stamp = self._next, self._seq, self._timeline, time.time()
        pending = [(p, self._guard(p, partial(p.collect, step))) for p in list(self._probes)]
        self._emitter.put(lambda: self._frame(pending, step, seq, timeline, stamp), frame=True)
        self._next, self._seq = step + 1, seq + 1
        if self._trainer.cursor is not None:
            self._batches[self._next] = self._trainer.cursor.batches
            self._batches.pop(self._next - REMEMBERED, None)
        if self._every and self._next % self._every == 0:
            self._take_point()
        verdict = self._apply_ready()
        self._each("arm", self._next)
        if seq % 100 == 0:
            facts = self._facts()
            self._emitter.put(lambda: self._shell.publish(facts))
        return verdict

    def _frame(
        self, pending: list[tuple[Probe, Pending | None]], step: int, seq: int, timeline: int, stamp: float
    ) -> Event:
        values = np.full(len(self._table.values), np.nan)
        for probe, later in pending:
            if later is not None:
                got = self._guard(probe, later.resolve)
                if got is not None:
                    values[self._spans[probe.name]] = got
        frame = SignalFrame.build(
            values, run=self.run, attempt=self._attempt, rank=0, seq=seq, timeline=timeline, step=step,
            table=self._table.id,
        )  # fmt: skip
        return Frames(stamp, (frame,))

    def _apply_ready(self) -> Verdict:
        applied: tuple[str, ...] = ()
        rewound = False
        while self._ready:
            command, ready, refusal = self._ready.popleft()
            at, done = self._next, None
            if refusal is None:
                refusal = self._refusal(command)
            if refusal is None:
                try:
                    if "pause" in dict(command.actions):
                        self._take_point(wait=True)
                    done = self._live.apply(command, ready, self._next)
                except Exception as error:
                    log.exception("command %s could not be applied; nothing was changed", command.id)
                    refusal = "failed", {"reason": f"{type(error).__name__}: {error}"}
            if done is not None:
                applied = (*applied, *done.detail)
                self._stopped |= done.stop
                if done.rewound_to is not None:
                    self._next, rewound = done.rewound_to, True
                    self._timeline += 1
                else:
                    self._each("reset")
            result, detail = refusal if refusal else ("applied", done.detail if done else {})
            ack = Ack(time.time(), command.id, 0, result, at, detail)
            self._emitter.put(lambda ack=ack: ack)  # type: ignore[misc]
        return Verdict(self._next, self._stopped, rewound, applied)

    def _refusal(self, command: Command) -> tuple[str, dict[str, Any]] | None:
        """Why a prepared command may not be applied now: it is stale, or nobody may act any more."""
        if command.attempt != self._attempt or self._seq > command.expires:
            return "refused", {"reason": "the command belongs to another attempt or has expired"}
        if not self._shell.acting:
            return "refused", {"reason": "the mode was lowered, or the hub has failed"}
        return None

    def _prepare(self, command: Command) -> None:
        """Called by the shell when a command is issued: load what it needs, touch nothing."""
        from foreshock.remediation.live.recovery import PointBroken

        ready: dict[str, Any] = {}
        refusal: tuple[str, dict[str, Any]] | None = None
        try:
            ready = self._live.prepare(command)
        except PointBroken as error:
            refusal = "point broken", {"reason": str(error), "point": error.point}
        except Exception as error:
            refusal = "refused", {"reason": str(error)}
        self._ready.append((command, ready, refusal))

    # -- recovery points ----------------------------------------------------------------------------------

    def _open_points(self) -> Any:
        import torch
        from safetensors.torch import save

        from foreshock.remediation.live.recovery import RecoveryStore
        from foreshock.remediation.live.state import flatten, nonfinite

        self._no_points: str | None = None
        if not self._every:
            return None
        if self._shell.failure is not None:
            self._no_points = "the run's record cannot be kept"
            return None
        try:
            tensors: dict[str, Tensor] = {}
            flatten(self._trainer.capture(), tensors)
            kinds = {t.dtype: torch.zeros(1, dtype=t.dtype) for t in tensors.values()}
            save({str(kind): one for kind, one in kinds.items()})
            size = sum(t.nbytes for t in tensors.values())
            log.info(
                "recovery points: %.1f MB each now, every %d steps, up to 15 kept", size / 1e6, self._every
            )
            names = {f"model/{name}" for name, _ in self._trainer.model.named_buffers()}
            constants = {n: t for n, t in nonfinite(tensors).items() if n.split(":/", 1)[-1] in names}
            return RecoveryStore(self.directory / "points", self._point_saved, constants)
        except Exception as error:
            self._no_points = f"the trainer's state cannot be stored: {error}"
            self.limits.append(f"rollback is unavailable: {self._no_points}")
            return None

    def _take_point(self, *, wait: bool = False) -> None:
        """A recovery point of now; `wait` for the one that a pause leaves, which is the user's and never pruned."""
        if self._points is None:
            return
        name = f"{'pause-' if wait else ''}a{self._attempt}-t{self._timeline}-s{self._next:08d}"
        batches = self._trainer.cursor.batches if self._trainer.cursor else 0
        try:
            state = self._trainer.capture()
            self._points.save(name, self._timeline, self._next, batches, state, wait=wait or self._sync)
        except Exception as error:
            log.error("recovery point at step %d failed: %s", self._next, error)

    def _point_saved(self, saved: Any) -> None:
        event = RecoveryPoint(time.time(), **asdict(saved))
        self._emitter.put(lambda: event)
        self._emitter.put(lambda: self._prune(saved.id))

    def _prune(self, told: str) -> None:
        """The hub knows the point `told`; what neither it nor a command needs leaves the disk."""
        ledger = self._shell.hub.ledger
        self._points.prune({p.id for p in ledger.points} | ledger.pinned, told)

    def _batches_before(self, step: int) -> int:
        return self._batches.get(step, min(self._batches.values(), default=0))

    # -- small hands --------------------------------------------------------------------------------------

    def _lay_out(self, probes: Sequence[Probe]) -> dict[str, slice]:
        keys: list[Any] = []
        spans = {}
        for probe in probes:
            spans[probe.name] = slice(len(keys), len(keys) + len(probe.keys()))
            keys += probe.keys()
        self._table = SignalTable(tuple(keys))
        return spans

    def _start_from(self, fork: Fork) -> None:
        self._shell.seed({**copy.deepcopy(fork.hub), "run": self.run})
        self._next, self._seq, self._timeline, self._batches = (
            fork.step,
            fork.seq,
            fork.timeline,
            dict(fork.batches),
        )
        for probe in self._probes:
            probe.load_state_dict(fork.probes[probe.name])
        hub = self._shell.hub
        assert hub.hello is not None
        self._attempt, self._greeted = hub.hello.attempt, True
        if self._points is not None and fork.points is not None:
            shutil.copytree(fork.points, self._points.directory, dirs_exist_ok=True)
        if self._allow != hub.hello.allow:
            lowered = Human(time.time(), "mode", str(self._allow), "fork")
            self._emitter.put(lambda: lowered)

    def _load_policy(self) -> None:
        setting = self._settings["policy"]
        try:
            text, source = source_text(str(setting.value))
            loads(text, source)
        except PolicyError as error:
            log.error("NOT WATCHING: the policy cannot be used.\n%s", error)
            self._shell.failure = f"the policy cannot be used: {error}"
            return
        event = PolicyLoaded(time.time(), text, source)
        self._emitter.put(lambda: event)

    def _open_signals(self) -> None:
        from foreshock.pipeline.signal_files import SignalWriter

        self._signals = SignalWriter(self.directory, self._table)

        def write(event: Frames) -> None:
            try:
                for frame in event.frames:
                    self._signals.append(frame)
            except OSError as error:
                log.error("signals are not kept: %s", error)
                self._shell.writers.clear()

        self._shell.writers.append(write)

    def _greet(self) -> None:
        """Say hello with the first step: only now is it known where the data comes from."""
        if self._greeted:
            return
        self._greeted = True
        unavailable = self._live.unavailable()
        if self._trainer.cursor is None and not self._manual:
            log.warning("the loop does not use watch.batches(loader): rollback and skip_data are unavailable")
        options = {**self._options, "points_every": self._every or None, "sync": self._sync}
        hello = Hello(
            time.time(), self._attempt, (0,), self._table, str(self._allow), self._next, unavailable,
            {k: v for k, v in options.items() if v is not None},
        )  # fmt: skip
        self._emitter.put(lambda: hello)

    def _stand(self) -> None:
        """Apply the run's standing interventions again, before the first step of this attempt or fork.

        Below enforce nothing is changed, so there they are only told.
        """
        for name, arguments in self._shell.hub.standing:
            if self._allow is not Mode.ENFORCE:
                self.limits.append(f'the standing {name} of this run is not applied: allow="{self._allow}"')
                continue
            try:
                self._live.stand(name, arguments)
                log.warning("standing intervention of this run applied again: %s", name)
            except Exception as error:
                self.limits.append(f"the standing {name} could not be applied again: {error}")
                log.exception("the standing %s could not be applied again", name)

    def _each(self, method: str, *arguments: Any) -> None:
        for probe in list(self._probes):
            self._guard(probe, lambda p=probe: getattr(p, method)(*arguments))  # type: ignore[misc]

    def _guard(self, probe: Probe, call: Callable[[], Any]) -> Any:
        """Run a probe's method; a probe that raises is given up for the rest of the run."""
        if probe not in self._probes:
            return None
        try:
            return call()
        except Exception as error:
            self._probes.remove(probe)
            self.limits.append(f"{probe.name} is no longer watched: {type(error).__name__}: {error}")
            log.exception("probe %s failed and is given up; training goes on", probe.name)
            return None

    def _give_up(self, reason: str) -> None:
        if reason not in self.limits:
            self.limits.append(reason)
            log.exception("NOT WATCHING: %s. Training goes on.", reason)

    def _facts(self) -> dict[str, Any]:
        wall = time.perf_counter() - self._spent[1]
        interceptor = self._trainer.interceptor
        return {
            "limits": [*self.limits, *(interceptor.limits if interceptor else ())],
            "watched": {probe.name: len(probe.keys()) for probe in self._probes},
            "settings": {k: {"value": str(s.value), "source": s.source} for k, s in self._settings.items()},
            "dropped": self._emitter.dropped,
            "lost": self._emitter.failure,
            "step_share": round(self._spent[0] / wall, 4) if wall > 0 else None,
        }
