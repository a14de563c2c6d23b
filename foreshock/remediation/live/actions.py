"""Actions on a live model: prepared in the background, applied between two steps, on this rank.

Nothing here decides; a `Command` arrives with every argument resolved. Preparing may fail (and then nothing has
changed); applying works on objects that preparing has already checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from foreshock.monitors.intercept import Interceptor
from foreshock.monitors.probe import Probe
from foreshock.remediation.live.data import DataCursor
from foreshock.remediation.live.recovery import RecoveryStore
from foreshock.remediation.live.state import flatten, rng_state, set_rng_state, unflatten
from foreshock.remediation.types import Command


class NotPossible(Exception):
    """The command cannot be applied by this rank; nothing was changed."""


@dataclass
class Trainer:
    """The live objects of one rank that actions may touch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    states: Mapping[str, Any] = field(default_factory=dict)
    """Named objects with state_dict and load_state_dict: scheduler, scaler, whatever the user hands in."""
    cursor: DataCursor | None = None
    interceptor: Interceptor | None = None
    probes: Sequence[Probe] = ()
    layers: tuple[int, ...] = ()

    def capture(self) -> dict[str, Any]:
        """Everything that a bit-exact continuation needs, as storable state (not copied)."""
        saved = self.model.state_dict()
        return {
            "model": saved,
            "buffers": {name: b for name, b in self.model.named_buffers() if name not in saved},
            "optimizer": self.optimizer.state_dict(),
            "states": {name: thing.state_dict() for name, thing in self.states.items()},
            "rng": rng_state(),
            "data": self.cursor.position() if self.cursor else None,
            "probes": {p.name: p.state_dict() for p in self.probes},
        }

    def restore(self, state: dict[str, Any], skip: tuple[int, int] | None = None) -> None:
        """Put `state` back in place, all of it or nothing: where a part refuses, what was there is put back.

        What can refuse goes first; the random generators come last, because the data's rewind may draw from them.
        Raises whatever the refusing part raised.
        """
        tensors: dict[str, Tensor] = {}
        before = unflatten(flatten({**self.capture(), "data": None}, tensors), tensors)
        back = self.cursor.hold() if self.cursor else None
        try:
            if self.cursor is not None and state["data"] is not None:
                self.cursor.rewind(state["data"], skip)
            self._put(state)
        except Exception:
            if back is not None:
                back()
            self._put(before)
            raise

    def _put(self, state: dict[str, Any]) -> None:
        for name, thing in self.states.items():
            thing.load_state_dict(state["states"][name])
        self.model.load_state_dict(state["model"])
        buffers = dict(self.model.named_buffers())
        with torch.no_grad():
            for name, value in state["buffers"].items():
                buffers[name].copy_(value)
        self._put_optimizer(state["optimizer"])
        for probe in self.probes:
            if probe.name in state["probes"]:
                probe.load_state_dict(state["probes"][probe.name])
        set_rng_state(state["rng"])

    def _put_optimizer(self, state: dict[str, Any]) -> None:
        """torch casts loaded moments to their parameter's dtype; where they were kept wider, they come back wide."""
        self.optimizer.load_state_dict(state)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for index, saved in state["state"].items():
            now = self.optimizer.state[parameters[index]]
            for name, value in saved.items():
                if isinstance(value, Tensor) and now[name].dtype is not value.dtype:
                    now[name] = value.to(now[name].device, copy=True)


class RateScale:
    """Scales the learning rate, or the update of named parameters, around every optimizer step.

    Standing beside a scheduler that overwrites `lr` each step, it multiplies for the step only and puts the
    trainer's own rate back, so schedulers and checkpoints never see it.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, factor: float, parameters: Sequence[Tensor] | None
    ) -> None:
        self.factor = factor
        self.parameters = parameters
        self._optimizer = optimizer
        self._kept: list[Any] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def _before(self, *_: Any) -> None:
        if self.parameters is None:
            self._kept = [group["lr"] for group in self._optimizer.param_groups]
            for group in self._optimizer.param_groups:
                group["lr"] = group["lr"] * self.factor
        else:
            self._kept = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def _after(self, *_: Any) -> None:
        if self.parameters is None:
            for group, rate in zip(self._optimizer.param_groups, self._kept, strict=True):
                group["lr"] = rate
        else:
            for parameter, before in zip(self.parameters, self._kept, strict=True):
                parameter.copy_(torch.lerp(before, parameter.detach(), self.factor))
        self._kept = []

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


@dataclass
class Applied:
    """What applying did: per action, plain facts for the audit log, and what the loop must know."""

    detail: dict[str, Any] = field(default_factory=dict)
    rewound_to: int | None = None
    stop: bool = False


class Live:
    """This rank's hands. `batches_at(step)` is the number of batches drawn before step `step` ran.

    `no_points` says why recovery points cannot be taken although they should be.
    """

    def __init__(
        self,
        trainer: Trainer,
        points: RecoveryStore | None,
        batches_at: Callable[[int], int],
        no_points: str | None = None,
    ) -> None:
        self.trainer = trainer
        self.points = points
        self._batches_at = batches_at
        self._no_points = no_points
        self._scales: list[RateScale] = []

    def unavailable(self) -> dict[str, str]:
        """Actions that this rank cannot do, with the reason."""
        out: dict[str, str] = {}
        cursor = self.trainer.cursor
        if self.trainer.interceptor is None:
            out["precision_upcast"] = "no attention site was found whose kernel can be replaced"
        if cursor is None:
            out["skip_data"] = (
                'the training data cannot be rewound: the loop owns its iterator (data="manual")'
            )
        elif cursor.why_not is not None:
            out["skip_data"] = cursor.why_not
        why = out.get("skip_data") or self._no_points
        if why is not None:
            out["rollback"] = why
        return out

    def prepare(self, command: Command) -> dict[str, Any]:
        """Load and check what the command needs; touches nothing of the run. Raises NotPossible or PointBroken."""
        ready: dict[str, Any] = {}
        for name, arguments in command.actions:
            if name in (cannot := self.unavailable()):
                raise NotPossible(f"{name}: {cannot[name]}")
            if name == "rollback":
                if self.points is None:
                    raise NotPossible("rollback: no recovery points are taken")
                ready["state"] = self.points.load(arguments["point"])
                drawn, cursor = ready["state"]["data"], self.trainer.cursor
                if drawn is not None and cursor is not None and drawn["call"] != cursor.call:
                    raise NotPossible(
                        "rollback: the point lies in an earlier watch.batches(); use batches(loader, epochs=N)"
                    )
            elif name == "lr_scale":
                self._scaled(arguments)
            elif name == "precision_upcast" and self.trainer.interceptor is not None:
                self.trainer.interceptor.check(self._layers(arguments), arguments["how"])
        return ready

    def apply(self, command: Command, ready: dict[str, Any], step: int) -> Applied:
        """Apply every action of the command between two steps; `step` is the next step to run."""
        done = Applied()
        order = sorted(
            command.actions, key=lambda a: a[0] != "rollback"
        )  # a rewind first, or it would undo the rest
        for name, arguments in order:
            if name == "rollback":
                skip = arguments["skip"]
                window = None if skip is None else (self._batches_at(skip[0]), self._batches_at(step))
                self.trainer.restore(ready["state"], window)
                done.rewound_to = arguments["step"]
                done.detail[name] = {
                    "to": arguments["step"],
                    "steps_undone": step - arguments["step"],
                    "skipped": window,
                }
            elif name == "skip_data":
                assert self.trainer.cursor is not None
                count = max(1, self._batches_at(arguments["to"]) - self._batches_at(arguments["from"]))
                self.trainer.cursor.skip(count)
                done.detail[name] = {"batches": count}
            elif name == "pause":
                done.stop = True
                done.detail[name] = {}
            else:
                done.detail[name] = self.stand(name, arguments)
        return done

    def stand(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Begin a standing intervention, or begin it again at the start of an attempt; what it came to."""
        if name == "precision_upcast":
            interceptor = self.trainer.interceptor
            if interceptor is None:
                raise NotPossible(
                    "precision_upcast: no attention site was found whose kernel can be replaced"
                )
            layers = self._layers(arguments)
            interceptor.upcast(layers, arguments["how"])
            return {"layers": layers, "how": arguments["how"]}
        if name == "lr_scale":
            self._scales.append(
                RateScale(self.trainer.optimizer, arguments["factor"], self._scaled(arguments))
            )
            return {"factor": arguments["factor"], "target": arguments["target"]}
        raise NotPossible(f"{name}: this version cannot do it")

    def _layers(self, arguments: dict[str, Any]) -> list[int]:
        return list(self.trainer.layers if arguments["layers"] is None else arguments["layers"])

    def undo(self, name: str) -> None:
        """Take a standing intervention away: kernels and rates are the trainer's own again."""
        if name == "precision_upcast" and self.trainer.interceptor is not None:
            self.trainer.interceptor.restore()
        elif name == "lr_scale":
            for scale in self._scales:
                scale.remove()
            self._scales = []

    def close(self) -> None:
        self.undo("lr_scale")

    def _scaled(self, arguments: dict[str, Any]) -> list[Tensor] | None:
        """The parameters an lr_scale is for; None = all of them, through the learning rate itself."""
        target = arguments["target"]
        if target == "model":
            return None
        named = dict(self.trainer.model.named_parameters())
        if target == "affected":
            wanted = {str(layer) for layer in arguments["layers"]}
            chosen = [p for name, p in named.items() if wanted & set(name.split("."))]
        else:
            missing = [name for name in target if name not in named]
            if missing:
                raise NotPossible(f"lr_scale: the model has no parameter {missing[0]!r}")
            chosen = [named[name] for name in target]
        if not chosen:
            raise NotPossible("lr_scale: no parameter belongs to its target")
        return list(chosen)
