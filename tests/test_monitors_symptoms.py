from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from foreshock.monitors.symptoms import Symptoms
from foreshock.signals import Scope, SignalFrame


def run(
    probe: Symptoms,
    optimizer: torch.optim.Optimizer,
    loss: object = 1.0,
    grad_norm: object = None,
    skip: bool = False,
) -> dict[str, float]:
    probe.arm(0)
    if not skip:
        probe.before_update()
        optimizer.step()
        probe.after_update()
    probe.observe(loss, grad_norm)
    keys, pending = probe.keys(), probe.collect(0)
    return dict(zip((k.name for k in keys), pending.resolve().tolist(), strict=True))


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0, 0.0])
    return torch.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.3}])


def test_every_symptom_is_each_ranks_own(optimizer: torch.optim.Optimizer) -> None:
    keys = Symptoms(optimizer).keys()
    assert [str(k) for k in keys] == [
        "symptom.loss", "symptom.grad_norm", "symptom.lr", "symptom.update_skipped",
    ]  # fmt: skip
    assert {k.scope for k in keys} == {Scope.PER_RANK}


def test_a_step_reports_loss_gradient_norm_and_the_largest_rate(optimizer: torch.optim.Optimizer) -> None:
    values = run(Symptoms(optimizer), optimizer, torch.tensor(2.5, requires_grad=True))
    assert values == {"loss": 2.5, "grad_norm": 5.0, "lr": 0.3, "update_skipped": 0.0}


def test_the_loops_own_norm_is_preferred_and_then_no_other_is_taken(optimizer: torch.optim.Optimizer) -> None:
    probe = Symptoms(optimizer)
    assert run(probe, optimizer, grad_norm=torch.tensor(9.0))["grad_norm"] == 9.0
    assert math.isnan(run(probe, optimizer)["grad_norm"])


def test_the_rate_is_the_one_of_the_update_not_the_schedulers_next(optimizer: torch.optim.Optimizer) -> None:
    probe = Symptoms(optimizer)
    probe.arm(0)
    probe.before_update()
    optimizer.param_groups[1]["lr"] = 0.05
    probe.observe(1.0)
    assert probe.collect(0).resolve()[2] == 0.3


def test_a_rate_that_is_a_tensor_is_read(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(group["lr"])
    assert run(Symptoms(optimizer), optimizer)["lr"] == pytest.approx(0.3)


def test_a_skipped_step_is_counted_and_its_gradient_is_not_measured(optimizer: torch.optim.Optimizer) -> None:
    values = run(Symptoms(optimizer), optimizer, 1.0, grad_norm=math.inf, skip=True)
    assert values["update_skipped"] == 1.0
    assert math.isnan(values["grad_norm"])
    assert values["lr"] == 0.3


def test_values_that_are_not_finite_reach_the_frame_as_such(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["params"][0].grad[0] = math.nan
    values = run(Symptoms(optimizer), optimizer, torch.tensor(math.nan))
    place = {"run": "r", "attempt": 0, "rank": 0, "seq": 0, "timeline": 0, "step": 0, "table": "t"}
    frame = SignalFrame.build(list(values.values()), **place)
    assert frame.nonfinite.tolist() == [1, 1, 0, 0]


def test_nothing_is_kept_from_one_step_to_the_next(optimizer: torch.optim.Optimizer) -> None:
    probe = Symptoms(optimizer)
    run(probe, optimizer, 2.0)
    probe.arm(1)
    assert np.isnan(probe.collect(1).resolve()[:2]).all()
    probe.observe(3.0)
    probe.reset()
    assert math.isnan(probe.collect(1).resolve()[0])
    probe.load_state_dict(probe.state_dict())


def test_the_loss_is_copied_when_the_step_ends(optimizer: torch.optim.Optimizer) -> None:
    probe, loss = Symptoms(optimizer), torch.tensor(2.0)
    probe.arm(0)
    probe.observe(loss)
    pending = probe.collect(0)
    loss.fill_(7.0)
    assert pending.resolve()[0] == 2.0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("overflow", [False, True])
def test_a_gradient_scaler_is_undone_and_its_skips_are_seen(fused: bool, overflow: bool) -> None:
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = torch.optim.Adam([weight], lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    probe = Symptoms(optimizer, scaler)
    optimizer.register_step_pre_hook(lambda *_: probe.before_update())
    optimizer.register_step_post_hook(lambda *_: probe.after_update())
    probe.arm(0)
    loss = weight.square().sum() / 2
    scaler.scale(loss).backward()
    if overflow:
        weight.grad[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    probe.observe(loss)
    loss_value, grad_norm, lr, scale, skipped = probe.collect(0).resolve()
    assert (loss_value, lr, skipped) == (12.5, 0.01, float(overflow))
    assert scale == (512.0 if overflow else 1024.0)
    assert math.isnan(grad_norm) if overflow else grad_norm == 5.0


def test_before_the_first_scaled_loss_the_initial_scale_is_reported(optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    assert run(Symptoms(optimizer, scaler), optimizer)["loss_scale"] == 256.0


def test_after_detach_nothing_is_measured(optimizer: torch.optim.Optimizer) -> None:
    probe = Symptoms(optimizer)
    probe.detach()
    probe.arm(0)
    probe.before_update()
    assert probe.collect(0) is None
