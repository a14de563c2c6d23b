"""The lab's scenarios by name, and the training run that plays one.

End of the lab's road: demo, evidence and tests take a `Scenario` from `SCENARIOS`, build a `Training` and
drive it step by step, watched or not. Faults and the reasons for the controls: arXiv 2606.28116, 2510.04212.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from foreshock.lab.corpus import corpus
from foreshock.lab.data import ByteBatches
from foreshock.lab.flash import FlashAttention, KernelFault
from foreshock.lab.model import GPT


@dataclass(frozen=True, slots=True)
class Scenario:
    """What goes wrong from step `onset` on, that step included, and what Foreshock should call it.

    `layers`: those with the fault, None = all. `length`: steps of a burst (learning rate x `lr_factor`,
    corrupt batches); a kernel fault and a data shift stay. `announced`: the loop tells the watch of it.
    `expects`: the mechanism to be diagnosed, "none" for a control that no remedy may follow.
    """

    name: str
    fault: KernelFault | None = None
    layers: tuple[int, ...] | None = None
    lr_factor: float = 1.0
    corrupt: bool = False
    shift: bool = False
    cosine: bool = False
    announced: bool = False
    onset: int = 500
    length: int = 50
    expects: str = "none"

    @property
    def burst(self) -> range:
        return range(self.onset, self.onset + self.length)


_UP7 = KernelFault("delta", 7, "up")

SCENARIOS = {
    s.name: s
    for s in (
        Scenario("clean"),
        Scenario("up7", _UP7, expects="attention"),
        Scenario("up6", KernelFault("delta", 6, "up"), expects="attention"),
        Scenario("up7-layer1", _UP7, layers=(1,), expects="attention"),
        Scenario("stochastic5", KernelFault("delta", 5, "stochastic")),
        Scenario("zero5", KernelFault("delta", 5, "zero")),
        Scenario("output4", KernelFault("output", 4, "zero")),
        Scenario("lr10", lr_factor=10.0, expects="optimizer"),
        Scenario("lr10-announced", lr_factor=10.0, announced=True),
        Scenario("corrupt", corrupt=True, expects="data"),
        Scenario("shift", shift=True, expects="data"),
        Scenario("cosine", cosine=True),
    )
}


class Schedule:
    """Learning rate as a pure function of the step: linear warm-up, then constant or cosine to a tenth.

    Not torch's `LambdaLR`: that one replaces `optimizer.step` by a closure over the optimizer it was built
    for, so a deep copy of a run would train the original.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scenario: Scenario, steps: int, warmup: int = 100
    ) -> None:
        self.optimizer, self.scenario, self.steps, self.warmup = optimizer, scenario, steps, warmup
        self.base_lrs: list[float] = [group["lr"] for group in optimizer.param_groups]
        self.last_step = -1

    def factor(self, step: int) -> float:
        """What the base rates are multiplied by at `step`."""
        factor = min(1.0, (step + 1) / self.warmup)
        if self.scenario.cosine:
            factor *= 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / self.steps))
        return factor * (self.scenario.lr_factor if step in self.scenario.burst else 1.0)

    def step(self, step: int) -> None:
        """Set the optimizer's rates for `step`."""
        self.last_step = step
        for group, base in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = base * self.factor(step)

    def state_dict(self) -> dict[str, Any]:
        return {"base_lrs": self.base_lrs, "last_step": self.last_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base_lrs, self.last_step = list(state["base_lrs"]), state["last_step"]


class Training:
    """One run of `steps` steps: `model`, `optimizer`, `schedule`, `batches`, and the layers' own `kernels`.

    Bitwise repeatable on one machine: it seeds torch's global generator, and sets this process to one thread
    and flushed denormals. `copy.deepcopy` forks it. The kernels are kept here because an interception puts
    another callable in `attend`, and the fault has to stay in the kernel under it.
    """

    def __init__(self, scenario: Scenario, seed: int, steps: int) -> None:
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        torch.manual_seed(seed)
        self.scenario, self.seed, self.steps = scenario, seed, steps
        self.model = GPT()
        self.kernels: list[FlashAttention] = [
            m for b in self.model.blocks if isinstance(m := b.attention.attend, FlashAttention)
        ]
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0, foreach=True
        )
        self.schedule = Schedule(self.optimizer, scenario, steps)
        self.batches = ByteBatches(
            corpus("code"),
            seed=seed,
            steps=steps,
            corrupt=scenario.burst if scenario.corrupt else range(0),
            other=corpus("prose") if scenario.shift else None,
            shift_at=scenario.onset,
        )

    def train_step(self, batch: tuple[Tensor, Tensor], step: int) -> tuple[Tensor, Tensor]:
        """Forward, backward, clip to 1, update at `step`. Returns loss (nats) and gradient norm, 0-d, detached."""
        self._arm(step)
        self.schedule.step(step)
        self.optimizer.zero_grad()
        loss: Tensor = self.model(*batch)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        return loss.detach(), norm.detach()

    def _arm(self, step: int) -> None:
        faulty = self.scenario.fault if step >= self.scenario.onset else None
        for layer, kernel in enumerate(self.kernels):
            hit = self.scenario.layers is None or layer in self.scenario.layers
            kernel.fault = faulty if hit else None
            kernel.dither = (self.seed * 100_003 + step) * len(self.kernels) + layer
