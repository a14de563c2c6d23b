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
from foreshock.remediation.live.recovery import PointBroken, RecoveryStore
from foreshock.remediation.live.state import rng_state, set_rng_state
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
        """Everything that a bit-exact continuation needs, as storable state."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "states": {name: thing.state_dict() for name, thing in self.states.items()},
            "rng": rng_state(),
            "data": self.cursor.position() if self.cursor else None,
            "probes": {p.name: p.state_dict() for p in self.probes},
        }

    def restore(self, state: dict[str, Any], skip: tuple[int, int] | None = None) -> None:
        """Put `state` back in place. The random generators come last: the data rewind may draw from them."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name, thing in self.states.items():
            thing.load_state_dict(state["states"][name])
        for probe in self.probes:
            if probe.name in state["probes"]:
                probe.load_state_dict(state["probes"][probe.name])
        if self.cursor is not None and state["data"] is not None:
            self.cursor.rewind(state["data"], skip)
        set_rng_state(state["rng"])


class RateScale:
    """Scales the learning rate, or the update of named parameters, around every optimizer step.

    Standing beside a scheduler that overwrites `lr` each step, it multiplies for the step only and puts the
    trainer's own rate back, so schedulers and checkpoints never see it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: float, parameters: Sequence[Tensor] | None) -> None:
        self.factor = factor
        self.parameters = parameters
        self._optimizer = optimizer
        self._kept: list[Any] = []
        self._hooks = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]

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
    """This rank's hands. `batches_at(step)` is the number of batches drawn before step `step` ran."""

    def __init__(self, trainer: Trainer, points: RecoveryStore | None, batches_at: Callable[[int], int]) -> None:
        self.trainer = trainer
        self.points = points
        self._batches_at = batches_at
        self._scales: dict[str, RateScale] = {}

    def unavailable(self) -> dict[str, str]:
        """Actions that this rank cannot do, with the reason."""
        out: dict[str, str] = {}
        trainer = self.trainer
        if trainer.interceptor is None:
            out["precision_upcast"] = "no attention site was found whose kernel can be replaced"
        why = None
        if trainer.cursor is None:
            why = "the training data cannot be rewound: the loop owns its iterator (data=\"manual\")"
        elif trainer.cursor.why_not is not None:
            why = trainer.cursor.why_not
        if why is not None:
            out["skip_data"] = out["rollback"] = why
        if self.points is None and "rollback" not in out:
            out["rollback"] = "recovery points are taken only with allow=\"enforce\""
        return out

    def prepare(self, command: Command) -> dict[str, Any]:
        """Load and check what the command needs; touches nothing of the run. Raises NotPossible."""
        ready: dict[str, Any] = {}
        for name, arguments in command.actions:
            if name in (cannot := self.unavailable()):
                raise NotPossible(f"{name}: {cannot[name]}")
            if name == "rollback":
                assert self.points is not None
                try:
                    ready["state"] = self.points.load(arguments["point"])
                except PointBroken as error:
                    raise NotPossible(str(error)) from error
            elif name == "lr_scale":
                self._scaled(arguments)
        return ready

    def apply(self, command: Command, ready: dict[str, Any], step: int) -> Applied:
        """Apply every action of the command between two steps; `step` is the next step to run."""
        done = Applied()
        order = sorted(command.actions, key=lambda a: a[0] != "rollback")  # a rewind first, or it would undo the rest
        for name, arguments in order:
            if name == "rollback":
                skip = arguments["skip"]
                window = None if skip is None else (self._batches_at(skip[0]), self._batches_at(step))
                self.trainer.restore(ready["state"], window)
                done.rewound_to = arguments["step"]
                done.detail[name] = {"to": arguments["step"], "steps_undone": step - arguments["step"], "skipped": window}
            elif name == "precision_upcast":
                done.detail[name] = {"layers": self._upcast(arguments), "how": arguments["how"]}
            elif name == "skip_data":
                assert self.trainer.cursor is not None
                self.trainer.cursor.skip(arguments["batches"])
                done.detail[name] = {"batches": arguments["batches"]}
            elif name == "lr_scale":
                self._scale(arguments)
                done.detail[name] = {"factor": arguments["factor"], "target": arguments["target"]}
            elif name == "pause":
                done.stop = True
                done.detail[name] = {}
            else:
                raise NotPossible(f"{name}: this version cannot do it")
        for probe in self.trainer.probes:
            if done.rewound_to is None:
                probe.reset()
        return done

    def stand(self, name: str, arguments: dict[str, Any]) -> None:
        """Reapply a standing intervention at the start of an attempt."""
        if name == "precision_upcast":
            self._upcast(arguments)
        elif name == "lr_scale":
            self._scale(arguments)

    def undo(self, name: str) -> None:
        """Take a standing intervention away: kernels and rates are the trainer's own again."""
        if name == "precision_upcast" and self.trainer.interceptor is not None:
            self.trainer.interceptor.restore()
        elif name == "lr_scale":
            for scale in self._scales.values():
                scale.remove()
            self._scales.clear()

    def close(self) -> None:
        self.undo("lr_scale")

    def _upcast(self, arguments: dict[str, Any]) -> list[int]:
        interceptor = self.trainer.interceptor
        assert interceptor is not None
        layers = list(self.trainer.layers) if arguments["layers"] is None else list(arguments["layers"])
        interceptor.upcast(layers, arguments["how"])
        return layers

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

    def _scale(self, arguments: dict[str, Any]) -> None:
        key = str(arguments["target"])
        parameters = self._scaled(arguments)
        before = self._scales.pop(key, None)
        if before is not None:
            before.remove()
        factor = arguments["factor"] * (before.factor if before else 1.0)
        self._scales[key] = RateScale(self.trainer.optimizer, factor, parameters)
