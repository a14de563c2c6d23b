"""Which signals are watched and how: one frozen row a signal. Read by every detector below."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class SignalSpec:
    """How one signal (mechanism.name) is turned into evidence."""

    signal: str
    sides: tuple[str, ...]
    """"up", "down" or both: the directions that are a fault."""
    cadence: int = 4
    """Steps between two samples."""
    tau: float = 300.0
    """Time constant of the running level, in steps."""
    prefix: int = 72
    """Samples from which level, AR(1) and scale are learned."""
    margin: float = 0.25
    """Shift in sigma that is not yet a change; never below 2/sqrt(prefix)."""
    clip: float = 3.0
    slope: bool = False
    """Follow a slope too."""
    role: Literal["decides", "symptom"] = "decides"
    """A symptom raises alarms but never decides a diagnosis. A signal without a spec is only recorded."""
    kind: Literal["residual", "null"] = "residual"
    """"null": a standard score with a known null, which needs no prefix."""
    phi_max: float = 0.98

    def __post_init__(self) -> None:
        if not self.sides or set(self.sides) - {"up", "down"}:
            raise ValueError(f"{self.signal}: sides must be up, down or both")
        object.__setattr__(self, "margin", max(self.margin, 2.0 / math.sqrt(self.prefix)))

    def threshold(self, budget_steps: float, signals: int) -> float:
        """h in nats, so that `signals` fused signals together alarm at most once in `budget_steps` steps."""
        return math.log(budget_steps * signals / self.cadence)


BOTH = ("up", "down")
ATTENTION = (
    SignalSpec("attention.h1", ("down",)),
    SignalSpec("attention.hqv", ("down",)),
    SignalSpec("attention.coherence", ("up",)),
    SignalSpec("attention.lse", BOTH),  # wandered on 3 of 20 clean runs: needs a second signal beside it
    SignalSpec("attention.qk_norm", ("up",), slope=True, role="symptom"),
    SignalSpec("attention.max_logit", ("up",), role="symptom"),
    SignalSpec("attention.source_t", BOTH, kind="null"),
)
SYMPTOMS = (
    SignalSpec("symptom.loss", ("up",), cadence=1, prefix=288),
    SignalSpec("symptom.grad_norm", ("up",), cadence=1, prefix=288, role="symptom"),
    SignalSpec("symptom.mlp_update", BOTH),
)
DEFAULT = ATTENTION + SYMPTOMS
