"""What every probe is, and how its numbers leave the device.

First half of the road: a `Probe` measures inside the training step and hands a `Pending` to the emitter,
whose thread resolves it into the values of a `SignalFrame`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreshock.signals import SignalKey


class Pending(Protocol):
    """A measurement on its way to the host."""

    def resolve(self) -> NDArray[np.float64]:
        """The values in key order. May run later and on another thread; waits for its own copy only.

        NaN means not measured. What was measured as NaN or infinite is handed on as infinity, which
        `SignalFrame.build` records as nonfinite.
        """
        ...


class Probe(Protocol):
    """One monitor on one rank. No method synchronises the device or starts a collective."""

    name: str

    def keys(self) -> tuple[SignalKey, ...]:
        """The streams, in the order of the values. The same on every rank and for the probe's whole life."""
        ...

    def arm(self, step: int) -> None:
        """Before the forward pass of attempted step `step`: decides whether this step is sampled."""
        ...

    def before_update(self) -> None:
        """Optimizer step pre-hook. Does not fire in a step that the gradient scaler skips."""
        ...

    def after_update(self) -> None:
        """Optimizer step post-hook; called in every step that has one, sampled or not."""
        ...

    def collect(self, step: int) -> Pending | None:
        """At `watch.step`: what this step measured, or None."""
        ...

    def reset(self) -> None:
        """After an action, a rewind or a skipped step: windows are discarded."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Copies of the accumulators: tensors and plain JSON values only."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state_dict`, or starts anew where the state is of other streams."""
        ...

    def detach(self) -> None:
        """Removes every hook and forgets the model."""
        ...


class Copied:
    """Tensors leaving the device in one asynchronous copy, taken as they are now."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._shapes = [t.shape for t in tensors]
        self._event: torch.cuda.Event | None = None
        device = tensors[0].device
        flat = torch.cat([t.detach().reshape(-1).to(device, non_blocking=True) for t in tensors])
        if flat.is_cuda:
            self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
            self._host.copy_(flat, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(flat.device))
        else:
            self._host = flat.cpu()

    def tensors(self) -> list[Tensor]:
        """The copies on the CPU, in their common dtype. Waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        parts = torch.split(self._host, [s.numel() for s in self._shapes])
        return [p.view(s) for p, s in zip(parts, self._shapes, strict=True)]


class Scalars:
    """A `Pending` of host numbers, one-element tensors and None (not measured)."""

    def __init__(self, values: Sequence[float | Tensor | None]) -> None:
        self._host = [None if isinstance(v, Tensor) else v for v in values]
        self._where = [i for i, v in enumerate(values) if isinstance(v, Tensor)]
        tensors = [v for v in values if isinstance(v, Tensor)]
        self._copied = Copied(tensors) if tensors else None

    def resolve(self) -> NDArray[np.float64]:
        values: list[float | None] = list(self._host)
        if self._copied is not None:
            for i, t in zip(self._where, self._copied.tensors(), strict=True):
                values[i] = float(t)
        return np.array([np.nan if v is None else v if np.isfinite(v) else np.inf for v in values])
