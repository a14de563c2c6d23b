"""One rank's watch over one attempt: measures, emits, takes recovery points, applies commands.

Training may not fail because of this file: every hook and every call into a probe is contained, and a part that
fails is given up, loudly, for the rest of the run. The one exception is `Unconfirmed`: where other ranks may have applied
what this one did not, a restart is better than split weights.
"""

from __future__ import annotations

import copy
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from foreshock.pipeline import logs
from foreshock.pipeline.attach import LINGER_SECONDS, POLL_SECONDS, Attached
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
from foreshock.pipeline.link import LocalLink
from foreshock.pipeline.mechanisms import installed
from foreshock.policies.models import Mode
from foreshock.remediation.commit import Unconfirmed
from foreshock.remediation.types import Command
from foreshock.signals import SignalFrame, SignalTable

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from foreshock.monitors.probe import Pending, Probe

log = logging.getLogger("foreshock")

POINTS_EVERY = 50
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


class Watch:
    """One rank's watch over one attempt. Make it with `foreshock.watch`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        states: Mapping[str, Any],
        attached: Attached,
        *,
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

        self.run, self.directory, self.place = attached.run, attached.directory, attached.place
        self._attached, self._link, self._agreement = attached, attached.link, attached.agreement
        self._attempt = attached.link.welcome.attempt
        self._next, self._seq, self._timeline = step, 0, 0
        self._sync, self._manual, self._settings, self._options = sync, manual, settings, dict(options)
        self._allow = attached.allow
        self._every = int(options.get("points_every", POINTS_EVERY)) if self._allow is Mode.ENFORCE else 0
        self.limits: list[str] = []
        self._symptoms = Symptoms(optimizer, scaler=states.get("scaler"))
        probes: list[Probe] = [self._symptoms]
        trainer = Trainer(model, optimizer, states)
        for mechanism in installed():
            found = mechanism.attach(model, sites, masters, rank=self.place.rank, world=self.place.world)
            probes += found.probes
            self.limits += found.limits
            trainer.interceptor = found.interceptor or trainer.interceptor
            trainer.layers = found.layers or trainer.layers
        trainer.probes = probes
        self._trainer, self._probes = trainer, probes
        self._spans = self._lay_out(probes)
        self._micro: list[Any] = []
        self._batches: dict[int, int] = {}
        self._held: dict[int, tuple[Command, dict[str, Any]]] = {}
        """Commands that are prepared here, by number: one, or two while a newer one takes its place."""
        self._left = False
        self._greeted = self.place.rank > 0
        self._stopped = False
        self._spent = [0.0, time.perf_counter()]
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: self._each("before_update")),
            optimizer.register_step_post_hook(lambda *_: self._each("after_update")),
        ]
        logs.context.update(run=self.run, attempt=self._attempt, rank=self.place.rank, step=step)
        self._points = self._open_points()
        self._live = Live(trainer, self._points, self._batches_before, self._no_points)
        self._link.on_command = self._heard
        linger, poll = (LINGER_SECONDS, POLL_SECONDS) if attached.remote else (0.0, None)
        self._emitter = Emitter(self._deliver, sync=sync, linger=linger, poll=poll)
        if fork is not None:
            self._start_from(fork)
        elif self.place.rank == 0 and attached.policy.failure is None:
            policy = PolicyLoaded(time.time(), attached.policy.text, attached.policy.source)
            self._emitter.put(lambda: policy)
        self._stand()
        if manual:
            self.limits.append(
                'data="manual": rollback and skip_data are unavailable, because the loop owns its iterator'
            )
        for limit in self.limits:
            log.warning("%s", limit)
        self._each("arm", self._next)

    @property
    def position(self) -> tuple[int, int, int]:
        """(attempt, timeline, next step): where in the run's history this rank is."""
        return self._attempt, self._timeline, self._next

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
            if self.place.rank == 0:  # all ranks run the same loop: once is enough
                event = Announcement(time.time(), str(text), self._next, max(0, int(steps)))
                self._greet(self._next)
                self._emitter.put(lambda: event)
        except Exception as error:
            self._give_up(f"watch.expect failed: {type(error).__name__}: {error}")

    def step(self, loss: Tensor | float | None = None, grad_norm: Tensor | float | None = None) -> Verdict:
        """Once per attempted optimizer step, after it, also where it was skipped.

        `grad_norm` is the norm before clipping, as `clip_grad_norm_` returns it; the optimizer only sees the
        clipped one. Returns what the loop must know. Raises `Unconfirmed` where the ranks' weights may differ, and
        nothing else.
        """
        began = time.perf_counter()
        seq = self._seq
        self._seq = seq + 1
        try:
            self._measure(loss, grad_norm, seq)
        except Exception as error:
            self._give_up(f"watch.step failed: {type(error).__name__}: {error}")
        try:
            verdict = self._act(seq)
        except Unconfirmed:
            raise
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
        self._agreement.close()  # first: its last word ends the others' wait
        try:
            if self._points is not None:
                self._points.close()
            facts = self._facts()
            self._emitter.put(lambda: self._link.publish(facts))
            self._emitter.close()
        except Exception as error:
            log.error("Foreshock could not close cleanly: %s", error)
        self._attached.close()
        self._each("detach")
        if self._trainer.interceptor is not None:
            self._trainer.interceptor.detach()
        self._live.close()

    def fork(self) -> Fork:
        """The watch's state between two steps. Only with sync=True, where nothing is in flight."""
        if not self._sync:
            raise ValueError("fork() needs watch(sync=True): otherwise frames are still on their way")
        if not isinstance(self._link, LocalLink):
            raise ValueError("fork() needs the hub in this process")
        return Fork(
            copy.deepcopy(self._link.shell.hub.state_dict()), {p.name: p.state_dict() for p in self._probes},
            self._points.directory if self._points else None, self._next, self._seq, self._timeline, dict(self._batches),
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- one step -----------------------------------------------------------------------------------------

    def _measure(self, loss: Any, grad_norm: Any, seq: int) -> None:
        """Collect what this step showed and send it on its way; the next step begins."""
        step, timeline, stamp = self._next, self._timeline, time.time()
        self._next = step + 1
        logs.context["step"] = step
        self._greet(step)
        if loss is None and self._micro:
            loss = sum(self._micro[1:], self._micro[0]) / len(self._micro)
        self._micro.clear()
        self._guard(self._symptoms, lambda: self._symptoms.observe(loss, grad_norm))
        pending = [(p, self._guard(p, partial(p.collect, step))) for p in list(self._probes)]
        self._emitter.put(lambda: self._frame(pending, step, seq, timeline, stamp), frame=True)
        if self._trainer.cursor is not None:
            self._batches[self._next] = self._trainer.cursor.batches
            self._batches.pop(self._next - REMEMBERED, None)
        if self._every and self._next % self._every == 0:
            self._take_point()
        if seq % 100 == 0:
            facts = self._facts()
            self._emitter.put(lambda: self._link.publish(facts))

    def _act(self, seq: int) -> Verdict:
        """Vote, apply what all ranks agreed on, and get ready for the next step. On every rank, whatever failed before."""
        number = self._agreement.decide(seq, self._link.acting)
        applied: tuple[str, ...] = ()
        rewound = False
        if number is not None:
            applied, rewound = self._apply(*self._held.pop(number))
        else:
            self._let_go(self._link.refusal)
        if self._agreement.disabled is not None and not self._left:
            self._left = True
            log.error("NOT ACTING for the rest of this attempt: %s", self._agreement.disabled)
            self._answer("", "disabled", {"reason": self._agreement.disabled})
        self._each("arm", self._next)
        return Verdict(self._next, self._stopped, rewound, applied)

    def _apply(self, command: Command, ready: dict[str, Any]) -> tuple[tuple[str, ...], bool]:
        """Apply it, learn whether every rank did, and tell the hub; what was done, and whether this was a rewind."""
        at, done, reason = self._next, None, ""
        try:
            if "pause" in dict(command.actions):
                self._take_point(wait=True)
            done = self._live.apply(command, ready, at)
        except Exception as error:
            log.exception("command %s could not be applied; nothing was changed", command.id)
            reason = f"{type(error).__name__}: {error}"
        if not self._agreement.confirm(done is not None) or done is None:
            self._answer(command.id, "failed", {"reason": reason})
            return (), False
        self._stopped |= done.stop
        if done.rewound_to is not None:
            self._next, self._timeline = done.rewound_to, self._timeline + 1
        else:
            self._each("reset")
        self._answer(command.id, "applied", done.detail, at)
        return tuple(done.detail), done.rewound_to is not None

    def _let_go(self, refusal: str | None) -> None:
        """Drop what can no longer be decided; refuse what nobody may apply any more."""
        for number, (command, _) in list(self._held.items()):
            if refusal is not None:
                self._agreement.withdraw(number)
            if not self._agreement.wanted(number):
                del self._held[number]
                if refusal is not None and self._agreement.disabled is None:
                    self._answer(command.id, "refused", {"reason": refusal})

    def _answer(self, command: str, result: str, detail: dict[str, Any], step: int | None = None) -> None:
        ack = Ack(time.time(), command, self.place.rank, result, self._next if step is None else step, detail)
        self._emitter.put(lambda: ack)

    def _heard(self, command: Command | None) -> None:
        """The hub's word, on the emitter's thread: load what a command needs, touch nothing."""
        from foreshock.remediation.live.recovery import PointBroken

        if command is None:
            for number in list(self._held):
                self._agreement.withdraw(number)
            return
        if command.attempt != self._attempt or not self._agreement.offer(command.number):
            return
        try:
            self._held[command.number] = (command, self._live.prepare(command))
        except Exception as error:
            self._agreement.withdraw(command.number)
            broken = isinstance(error, PointBroken)
            point = {"point": error.point} if isinstance(error, PointBroken) else {}
            self._answer(command.id, "point broken" if broken else "refused", {"reason": str(error), **point})
        else:
            self._agreement.prepared(command.number, command.expires)

    def _deliver(self, events: Sequence[tuple[int, Event]]) -> int:
        """Hand events to the hub; recovery points that it then does not keep leave the disk."""
        acked = self._link.deliver(events)
        told = {e.id for number, e in events if number <= acked and isinstance(e, RecoveryPoint)}
        if told and self._points is not None:
            self._points.prune(self._link.kept, told)
        return acked

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
            values, run=self.run, attempt=self._attempt, rank=self.place.rank, seq=seq, timeline=timeline, step=step,
            table=self._table.id,
        )  # fmt: skip
        return Frames(stamp, (frame,))

    # -- recovery points ----------------------------------------------------------------------------------

    def _open_points(self) -> Any:
        import torch
        from safetensors.torch import save

        from foreshock.remediation.live.recovery import RecoveryStore
        from foreshock.remediation.live.state import flatten, nonfinite

        self._no_points: str | None = None
        if not self._every:
            return None
        if self._link.failure is not None:
            self._no_points = "the run's record cannot be kept"
            return None
        try:
            tensors: dict[str, Tensor] = {}
            flatten(self._trainer.capture(), tensors)
            kinds = {t.dtype: torch.zeros(1, dtype=t.dtype) for t in tensors.values()}
            save({str(kind): one for kind, one in kinds.items()})
            size = sum(t.nbytes for t in tensors.values())
            log.info(
                "recovery points: %.1f MB each now for each of %d ranks, every %d steps, up to 15 kept",
                size / 1e6, self.place.world, self._every,
            )  # fmt: skip
            names = {f"model/{name}" for name, _ in self._trainer.model.named_buffers()}
            constants = {n: t for n, t in nonfinite(tensors).items() if n.split(":/", 1)[-1] in names}
            place = self.directory / "points"
            if self.place.world > 1:
                place = place / f"rank-{self.place.rank}"
            return RecoveryStore(place, self._point_saved, constants)
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
        event = RecoveryPoint(time.time(), self.place.rank, **asdict(saved))
        self._emitter.put(lambda: event)

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
        assert isinstance(self._link, LocalLink)
        shell = self._link.shell
        shell.seed({**copy.deepcopy(fork.hub), "run": self.run})
        self._next, self._seq, self._timeline, self._batches = (
            fork.step,
            fork.seq,
            fork.timeline,
            dict(fork.batches),
        )
        for probe in self._probes:
            probe.load_state_dict(fork.probes[probe.name])
        hub = shell.hub
        assert hub.hello is not None
        self._attempt, self._greeted = hub.hello.attempt, True
        if self._points is not None and fork.points is not None:
            shutil.copytree(fork.points, self._points.directory, dirs_exist_ok=True)
        if self._allow != hub.hello.allow:
            lowered = Human(time.time(), "mode", str(self._allow), "fork")
            self._emitter.put(lambda: lowered)

    def _greet(self, step: int) -> None:
        """Rank 0 says hello with the first step: only now is it known where the data comes from."""
        if self._greeted:
            return
        self._greeted = True
        unavailable = self._live.unavailable()
        if self._trainer.cursor is None and not self._manual:
            log.warning("the loop does not use watch.batches(loader): rollback and skip_data are unavailable")
        options = {**self._options, "points_every": self._every or None, "sync": self._sync}
        hello = Hello(
            time.time(), self._attempt, tuple(range(self.place.world)), self._table, str(self._allow), step, unavailable,
            {k: v for k, v in options.items() if v is not None}, self._attached.rows,
        )  # fmt: skip
        self._emitter.put(lambda: hello)

    def _stand(self) -> None:
        """Apply the run's standing interventions again, before the first step of this attempt or fork.

        Below enforce nothing is changed, so there they are only told.
        """
        for name, arguments in self._standing():
            if self._allow is not Mode.ENFORCE:
                self.limits.append(f'the standing {name} of this run is not applied: allow="{self._allow}"')
                continue
            try:
                self._live.stand(name, arguments)
                log.warning("standing intervention of this run applied again: %s", name)
            except Exception as error:
                self.limits.append(f"the standing {name} could not be applied again: {error}")
                log.exception("the standing %s could not be applied again", name)

    def _standing(self) -> Sequence[tuple[str, dict[str, Any]]]:
        """A fork's hub knows more than the run's directory did."""
        link = self._link
        return link.shell.hub.standing if isinstance(link, LocalLink) else link.welcome.standing

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
            "vote_seconds": self._agreement.vote_seconds,
            "step_share": round(self._spent[0] / wall, 4) if wall > 0 else None,
        }
