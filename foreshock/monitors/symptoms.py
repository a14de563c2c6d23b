"""Symptoms: what everybody watches (loss, gradient norm, rate, loss scale), as the baseline to beat.

A probe of the whole model; its values are each rank's own. `watch.step` hands the loss in through `observe`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils import get_total_norm

from foreshock.monitors.probe import Pending, Scalars
from foreshock.signals import Scope, SignalKey


class Symptoms:
    """Loss, gradient norm, learning rate, loss scale and skipped updates, at every attempted step.

    `scaler` is a `torch.amp.GradScaler` or None. A fused optimizer steps also where the scaler found Inf and
    undoes the scale itself; both are read from the attributes that the scaler leaves on it.
    """

    name = "symptoms"

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any = None) -> None:
        self._optimizer: torch.optim.Optimizer | None = optimizer
        self._scaler = scaler
        names = (
            "loss",
            "grad_norm",
            "lr",
            *(("loss_scale",) if scaler is not None else ()),
            "update_skipped",
        )
        self._keys = tuple(SignalKey("symptom", n, scope=Scope.PER_RANK) for n in names)
        self._norm_is_given = False
        self._clear()

    def _clear(self) -> None:
        self._loss: float | Tensor | None = None
        self._grad_norm: float | Tensor | None = None
        self._lr: float | Tensor | None = None
        self._skipped: float | Tensor = 1.0

    def keys(self) -> tuple[SignalKey, ...]:
        return self._keys

    def arm(self, step: int) -> None:
        self._clear()

    def observe(self, loss: float | Tensor | None, grad_norm: float | Tensor | None = None) -> None:
        """Takes this step's loss and, where the loop has it, the gradient norm before clipping.

        Without `grad_norm` the norm is taken in the optimizer's pre-hook, thus after any clipping. Tensors
        stay on their device; one with several elements counts as its mean.
        """
        self._loss = loss.detach().mean() if isinstance(loss, Tensor) else loss
        if grad_norm is not None:
            self._norm_is_given = True
            self._grad_norm = grad_norm.detach().mean() if isinstance(grad_norm, Tensor) else grad_norm

    @torch.no_grad()
    def before_update(self) -> None:
        if self._optimizer is None:
            return
        self._lr = _rate(self._optimizer)
        found_inf = getattr(self._optimizer, "found_inf", None)
        self._skipped = 0.0 if found_inf is None else (found_inf != 0).float().mean()
        if not self._norm_is_given:
            groups = self._optimizer.param_groups
            grads = [p.grad for g in groups for p in g["params"] if p.grad is not None]
            scale = getattr(self._optimizer, "grad_scale", None)
            norm = get_total_norm(grads)
            self._grad_norm = norm if scale is None else norm / scale.to(norm.device)

    def after_update(self) -> None:
        pass

    def collect(self, step: int) -> Pending | None:
        if self._optimizer is None:
            return None
        lr = _rate(self._optimizer) if self._lr is None else self._lr
        scale = () if self._scaler is None else (_scale(self._scaler),)
        return _Values((self._loss, self._grad_norm, lr, *scale, self._skipped))

    def reset(self) -> None:
        self._clear()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._clear()

    def detach(self) -> None:
        self._optimizer = self._scaler = None
        self._clear()


class _Values(Scalars):
    def resolve(self) -> NDArray[np.float64]:
        values = super().resolve()
        # Gradients of a skipped step overflowed by design: counted by `update_skipped`, not diagnosed.
        values[1] = np.nan if values[-1] else values[1]
        return values


def _rate(optimizer: torch.optim.Optimizer) -> float | Tensor:
    rates = [g["lr"] for g in optimizer.param_groups]
    tensors = [r for r in rates if isinstance(r, Tensor)]
    return torch.stack(tensors).amax() if tensors else float(max(rates))


def _scale(scaler: Any) -> float | Tensor:
    # get_scale() waits for the device; the scale is None until the first scaled loss.
    scale = getattr(scaler, "_scale", None)
    return scale if isinstance(scale, Tensor) else float(scaler.get_scale())
