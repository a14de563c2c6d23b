"""The lab's scenarios by name, and the training run that plays one.

End of the lab's road: demo, evidence and tests take a `Scenario` from `SCENARIOS`, build a `Training` and
drive it step by step, watched or not. Faults and the reasons for the controls: arXiv 2606.28116, 2510.04212.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from foreshock.lab.corpus import corpus
from foreshock.lab.data import ByteBatches
from foreshock.lab.flash import FlashAttention, KernelFault
from foreshock.lab.model import GPT, Attention


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


WARMUP = 100  # steps
UP7 = KernelFault("delta", 7, "up")

SCENARIOS = {
    s.name: s
    for s in (
        Scenario("clean"),
        Scenario("up7", UP7, expects="attention"),
        Scenario("up6", KernelFault("delta", 6, "up"), expects="attention"),
        Scenario("up7-layer1", UP7, layers=(1,), expects="attention"),
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

    Not torch's `LambdaLR`: that one wraps `optimizer.step` of the optimizer it was built for, so a deep copy
    of a run would train the original.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, scenario: Scenario, steps: int) -> None:
        self.optimizer, self.scenario, self.steps, self.last_step = optimizer, scenario, steps, -1
        self.base_lrs: list[float] = [group["lr"] for group in optimizer.param_groups]

    def factor(self, step: int) -> float:
        """What the base rates are multiplied by at `step`."""
        factor = min(1.0, (step + 1) / WARMUP)
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


@contextmanager
def _flushed_denormals() -> Iterator[None]:
    """Moments that decay to denormals slow a CPU step down; outside the step arithmetic stays IEEE."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


class Training:
    """One run of `steps` steps: `model`, `optimizer`, `schedule`, `batches`, and the layers' own `kernels`.

    Bitwise repeatable on one machine: it seeds torch's global generator and sets this process to one thread.
    `copy.deepcopy` forks it. `kernels` because an interception puts another callable in `attend`, and the
    fault has to stay in the kernel under it.

    `rank` of `world`: the same training, data-parallel over torch's default process group. Each rank takes its
    share of every batch of 8 and `model` is under DistributedDataParallel. Shares are powers of two, which
    scale bf16 and float32 exactly, so the averaged gradient is that of one process up to the order of sums.
    Raises ValueError unless `world` is 1, 2 or 4 and holds `rank`.
    """

    def __init__(self, scenario: Scenario, seed: int, steps: int, rank: int = 0, world: int = 1) -> None:
        if world not in (1, 2, 4) or not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world}: a batch of 8 is shared by 1, 2 or 4 ranks")
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.scenario, self.seed, self.steps, self.rank, self.world = scenario, seed, steps, rank, world
        self.model: nn.Module = GPT()
        self.kernels = [
            module.attend
            for module in self.model.modules()
            if isinstance(module, Attention) and isinstance(module.attend, FlashAttention)
        ]
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0, foreach=True
        )
        self.schedule = Schedule(self.optimizer, scenario, steps)
        self.batches = ByteBatches(corpus("code"), seed, steps, part=(rank, world))
        if world > 1:
            self.model = DistributedDataParallel(self.model)
        self.play(scenario)

    @_flushed_denormals()
    def fork(self, scenario: Scenario) -> Training:
        """A twin in the same state whose coming steps play `scenario`. World 1; not while the model is watched."""
        twin = copy.deepcopy(self)
        twin.play(scenario)
        return twin

    def play(self, scenario: Scenario) -> None:
        self.scenario = self.schedule.scenario = scenario
        self.batches.corrupt = scenario.burst if scenario.corrupt else range(0)
        self.batches.shift = (scenario.onset, corpus("prose")) if scenario.shift else None

    def train_step(self, batch: tuple[Tensor, Tensor], step: int) -> tuple[Tensor, Tensor]:
        """Forward, backward, clip to 1, update at `step`: loss (nats) and gradient norm, 0-d, detached.

        The loss is that of this rank's share, the gradient and its norm are those of the whole batch.
        """
        for layer, kernel in enumerate(self.kernels):
            hit = step >= self.scenario.onset and layer in (self.scenario.layers or (layer,))
            kernel.fault = self.scenario.fault if hit else None
            # dice of its own for every rank: shared ones would round the shares alike, and not average out
            noise = (self.seed * 100_003 + step) * self.world + self.rank
            kernel.dither = noise * len(self.kernels) + layer
        self.schedule.step(step)
        self.optimizer.zero_grad()
        loss: Tensor = self.model(*batch)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        return loss.detach(), norm.detach()
