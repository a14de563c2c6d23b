"""Shared by all tests: a synthetic stream for the pure core, and a small real training for the live one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreshock.pipeline.events import Ack, Frames, Hello, Issue, PolicyLoaded, RecoveryPoint
from foreshock.signals import Scope, SignalFrame, SignalKey, SignalTable

POLICY = """
apiVersion: foreshock/v1
name: test
mode: enforce
group_wait: 0 steps
policies:
  - name: attention
    match: {mechanism: attention}
    ladder: [{do: [{precision_upcast: {}}]}, {do: [{rollback: {}}]}]
    verify: {signals: diagnosed, initial_delay: 96 steps, interval: 8 steps, band: 4 sigma, recovered: 3 in a row, failed: 3 of 8, timeout: 300 steps}
"""


def synthetic_table() -> SignalTable:
    """Two layers of two heads under the source probe, and the symptoms of one rank."""
    keys = [
        SignalKey("attention", name, layer, head, scope=Scope.PER_RANK)
        for name in ("source_t", "source_bias")
        for layer in (0, 1)
        for head in (0, 1)
    ]
    keys += [SignalKey("symptom", name, scope=Scope.PER_RANK) for name in ("loss", "grad_norm", "lr")]
    return SignalTable(tuple(keys))


@dataclass
class Stream:
    """Events as a shell would journal them: a healthy run in which the source score of `layer` jumps at `onset`.

    With `then`, another layer follows at that step. It answers commands at once, and an upcast heals the layers
    that it names (unless `incurable`).
    """

    onset: int | None = None
    layer: int = 1
    then: tuple[int, int] | None = None
    nan_from: int | None = None
    steps: int = 400
    seed: int = 0
    ranks: tuple[int, ...] = (0,)
    policy: str = POLICY
    allow: str = "enforce"
    incurable: bool = False
    points_every: int = 50
    table: SignalTable = field(default_factory=synthetic_table)

    def events(self, hub: Any) -> list[tuple[Any, list[Any]]]:
        """Drive `hub` through the run; every (event, effects) in order."""
        out: list[tuple[Any, list[Any]]] = []
        rng = np.random.default_rng(self.seed)
        ill = [] if self.onset is None else [(self.onset, self.layer)]
        ill += [self.then] if self.then else []
        healed: set[int] = set()
        clock = 0.0
        step, timeline, seq = 0, 0, 0

        def feed(event: Any) -> list[Any]:
            effects = hub.handle(event)
            out.append((event, effects))
            return effects

        feed(PolicyLoaded(clock, self.policy, "test.yaml"))
        feed(Hello(clock, 1, self.ranks, self.table, self.allow, 0, {}, {"points_every": self.points_every}))
        while step < self.steps and seq < 3 * self.steps:
            clock += 1.0
            frames = []
            for rank in self.ranks:
                t = rng.normal(size=4)
                bias = np.full(4, 1e-5)
                for onset, layer in ill:
                    if step >= onset and layer not in healed:
                        t[2 * layer : 2 * layer + 2] += 9.0
                        bias[2 * layer : 2 * layer + 2] = 2e-3
                if step % 4:
                    t[:] = bias[:] = np.nan
                loss = 2.0 + 0.1 * rng.normal()
                if self.nan_from is not None and step >= self.nan_from:
                    loss = np.inf
                values = [*t, *bias, loss, 1.0 + 0.1 * rng.normal(), 1e-3]
                frames.append(
                    SignalFrame.build(
                        values,
                        run="r",
                        attempt=1,
                        rank=rank,
                        seq=seq,
                        timeline=timeline,
                        step=step,
                        table=self.table.id,
                    )
                )
            effects = feed(Frames(clock, tuple(frames)))
            step, seq = step + 1, seq + 1
            if self.points_every and step % self.points_every == 0:
                name = f"t{timeline}-s{step}"
                for rank in self.ranks:
                    part = RecoveryPoint(clock, rank, name, timeline, step, step, True, 1000, 0.01)
                    effects = [*effects, *feed(part)]
            for command in [e.command for e in effects if isinstance(e, Issue)]:
                if not self.incurable:
                    healed |= set(dict(command.actions).get("precision_upcast", {}).get("layers", []))
                for rank in self.ranks:
                    feed(Ack(clock, command.id, rank, "applied", step, {}))
                rewind = dict(command.actions).get("rollback")
                if rewind:
                    step, timeline = rewind["step"], timeline + 1
        return out


@pytest.fixture
def stream() -> type[Stream]:
    return Stream


class Small:
    """A real byte GPT that is small enough for a unit test: about 5 ms a step."""

    def __init__(self, seed: int = 0, loader: str = "bytes", steps: int = 400, dropout: float = 0.0) -> None:
        import torch

        from foreshock.lab.corpus import corpus
        from foreshock.lab.data import ByteBatches
        from foreshock.lab.model import GPT

        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.model = GPT(d_model=32, heads=2, layers=2, context=32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3)
        self.dropout = torch.nn.Dropout(dropout)
        if loader == "bytes":
            self.loader: Any = ByteBatches(corpus("code"), seed, steps, batch=4, context=32)
        else:
            data = corpus("code")[: 33 * 80].long().view(-1, 33)
            self.loader = torch.utils.data.DataLoader(
                torch.utils.data.TensorDataset(data), batch_size=4, shuffle=True
            )
        self.epochs = 1 if loader == "bytes" else None
        self.kernels = [block.attention.attend for block in self.model.blocks]

    def break_attention(self, fault: Any) -> None:
        for kernel in self.kernels:
            kernel.fault = fault

    def train_step(self, batch: Any) -> Any:
        import torch

        x, y = batch if len(batch) == 2 else (batch[0][:, :-1], batch[0][:, 1:])
        loss = self.model(x, y)
        loss = (
            loss + 0.0 * self.dropout(loss.detach().expand(8)).sum()
        )  # draws from the generator, changes nothing
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach()


@pytest.fixture
def small() -> type[Small]:
    return Small


@pytest.fixture
def policy_file(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "policy.yaml"
        path.write_text(text)
        return path

    return write


@pytest.fixture(scope="session")
def ray_session() -> Any:
    """One small Ray for all tests of a run; `local` so that it never meets another cluster of the machine."""
    import os

    import ray

    os.environ["RAY_AUTH_MODE"] = "disabled"
    # Ray's own processes unpickle actors that tests define.
    paths = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "benchmarks")]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    if not os.access(os.path.expanduser("~"), os.W_OK):
        pytest.skip("Ray needs a HOME that it can write to")
    context = ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield context
    ray.shutdown()
