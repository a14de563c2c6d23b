from __future__ import annotations

import copy
import gc
import json
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from foreshock.monitors.sites import discover
from foreshock.monitors.spectrum import entropy, first_order_singular_values, update_entropy
from foreshock.monitors.update_spectrum import UpdateSpectrum
from foreshock.signals import Scope, SignalFrame, combine, measured_mean, merge

torch.set_num_threads(1)
D, HEADS, HEAD_DIM = 24, 4, 6


class Attention(nn.Module):
    def __init__(self, kv: int) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(D, kv * HEAD_DIM, bias=False) for _ in range(2))
        self.heads, self.head_dim, self.kv = HEADS, HEAD_DIM, kv

    def forward(self, x: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            y = y.unflatten(-1, (-1, HEAD_DIM)).transpose(-3, -2)
            return y.repeat_interleave(HEADS // y.shape[-3], -3)

        q, k, v = (split(p(x)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(((q @ k.mT).softmax(-1) @ v).transpose(-3, -2).flatten(-2))


class Block(nn.Module):
    def __init__(self, kv: int) -> None:
        super().__init__()
        self.attn = Attention(kv)
        self.mlp = nn.ModuleDict(
            {"up": nn.Linear(D, 2 * D, bias=False), "down": nn.Linear(2 * D, D, bias=False)}
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp["down"](torch.relu(self.mlp["up"](x)))


def build(kv: int = HEADS, layers: int = 2, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(kv) for _ in range(layers))).to(dtype)


class Run:
    """A training run with the hooks in the places where a watch puts them."""

    def __init__(self, model: nn.Module, probe: UpdateSpectrum | None, lr: float = 1e-3) -> None:
        self.model, self.probe, self.step_index = model, probe, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        if probe is not None:
            self.optimizer.register_step_pre_hook(lambda *_: probe.before_update())
            self.optimizer.register_step_post_hook(lambda *_: probe.after_update())

    def step(self, skip: bool = False) -> np.ndarray | None:
        step, self.step_index = self.step_index, self.step_index + 1
        if self.probe:
            self.probe.arm(step)
        x = torch.randn(4, 5, D, generator=torch.Generator().manual_seed(step))
        self.optimizer.zero_grad()
        self.model(x.to(next(self.model.parameters()).dtype)).square().mean().backward()
        if not skip:
            self.optimizer.step()
        pending = self.probe.collect(step) if self.probe else None
        return None if pending is None else pending.resolve()

    def steps(self, n: int) -> list[np.ndarray]:
        return [v for v in (self.step() for _ in range(n)) if v is not None]


def named(probe: UpdateSpectrum, values: np.ndarray, name: str, layer: int = 0) -> np.ndarray:
    return np.array(
        [v for k, v in zip(probe.keys(), values, strict=True) if (k.name, k.layer) == (name, layer)]
    )


def snapshot(site: Any) -> list[Tensor]:
    return [x.double().clone() for x in (site.q(), site.k(), site.v())]


def test_keys_are_per_layer_and_head_with_one_mlp_symptom_per_layer() -> None:
    probe = UpdateSpectrum(discover(build()))
    keys = probe.keys()
    assert len(keys) == len(set(keys)) == 5 * 2 * HEADS + 2
    assert {k.name for k in keys if k.mechanism == "attention"} == {
        "h1",
        "hqv",
        "delta3",
        "coherence",
        "qk_norm",
    }
    assert [(k.name, k.layer, k.head) for k in keys if k.mechanism == "symptom"] == [
        ("mlp_update", 0, None),
        ("mlp_update", 1, None),
    ]
    assert {k.scope for k in keys} == {Scope.REPLICATED}


@pytest.mark.parametrize("kv", [HEADS, 2])
def test_values_equal_those_of_the_exponential_mean_of_the_updates_kept_in_float64(kv: int) -> None:
    model = build(kv)
    sites = discover(model)
    probe = UpdateSpectrum(sites)
    run = Run(model, probe)
    rate, every = 1 - (31 / 32) ** 4, 4
    run.step()
    base, mean, energy, before_mlp = snapshot(sites[1]), None, None, None
    for j in range(1, 20):
        for _ in range(every - 1):
            assert run.step() is None
        last = snapshot(sites[1])
        before_mlp = sites[1].mlp.detach().double().clone()
        values = run.step()
        w = snapshot(sites[1])
        block = [a - b for a, b in zip(w, base, strict=True)]
        length2 = [(a - b).square().sum((-2, -1)) for a, b in zip(w, last, strict=True)]
        r, base = max(rate, 1 / j), w
        mean = [r * b if mean is None else (1 - r) * m + r * b for m, b in zip(mean or w, block, strict=True)]
        energy = [
            x if energy is None else (1 - r) * e + r * x for e, x in zip(energy or w, length2, strict=True)
        ]
        got = {
            n: named(probe, values, n, 1)
            for n in ("h1", "hqv", "delta3", "coherence", "qk_norm", "mlp_update")
        }
        mlp_step = (sites[1].mlp.detach().double() - before_mlp).norm() / before_mlp.norm()
        np.testing.assert_allclose(got["mlp_update"], [float(mlp_step)], rtol=1e-4)
        if j < 8:
            assert np.isnan([got[n] for n in ("h1", "hqv", "delta3", "coherence")]).all()
            continue
        groups = HEADS // kv
        q, k, _ = w
        h1 = entropy(first_order_singular_values(q, k, mean[0], mean[1]))
        hqv = update_entropy(mean[0]) - update_entropy(mean[2]).repeat_interleave(groups)
        coh = [m.flatten(-2).norm(dim=-1) / every / e.sqrt() for m, e in zip(mean, energy, strict=True)]
        norm = (q.square().sum((-2, -1)) + k.square().sum((-2, -1)).repeat_interleave(groups)).sqrt()
        np.testing.assert_allclose(got["h1"], h1, rtol=1e-5)
        np.testing.assert_allclose(got["hqv"], hqv, atol=2e-5)
        np.testing.assert_allclose(got["coherence"], coh[0] - coh[2].repeat_interleave(groups), atol=2e-5)
        np.testing.assert_allclose(got["qk_norm"], norm, rtol=1e-6)
        assert ((got["delta3"] > 0) & (got["delta3"] < 1)).all()


def driven(directions: Any, steps: int = 200) -> tuple[UpdateSpectrum, np.ndarray]:
    """Weights moved by hand: `directions(step)` gives (for q, for v) the sign of a fixed update."""
    model = build(layers=1)
    probe, attn, g = UpdateSpectrum(discover(model)), model[0].attn, torch.Generator().manual_seed(1)
    uq, uv = (torch.randn(D, D, generator=g) * 1e-3 for _ in range(2))
    values = None
    for step in range(steps):
        probe.arm(step)
        probe.before_update()
        sq, sv = directions(step)
        with torch.no_grad():
            attn.q_proj.weight.add_(uq, alpha=sq)
            attn.v_proj.weight.add_(uv, alpha=sv)
        probe.after_update()
        pending = probe.collect(step)
        values = values if pending is None else pending.resolve()
    return probe, values


def test_coherence_tells_constant_updates_from_updates_of_random_sign() -> None:
    signs = torch.randint(0, 2, (200,), generator=torch.Generator().manual_seed(3)).mul(2).sub(1).tolist()
    probe, values = driven(lambda t: (1, signs[t]))
    steady = named(probe, values, "coherence")
    assert ((steady > 0.6) & (steady <= 1.0)).all()  # coh_Q = 1, coh_V about 0.13
    probe, values = driven(lambda t: (1, 1))
    np.testing.assert_allclose(named(probe, values, "coherence"), 0, atol=1e-4)


def test_a_head_without_updates_is_not_measured_and_one_with_nan_is_measured_as_not_finite() -> None:
    model = build(layers=1)
    model[0].attn.v_proj.weight.requires_grad_(False)
    probe = UpdateSpectrum(discover(model))
    run = Run(model, probe)
    values = run.steps(41)[-1]
    assert np.isnan(named(probe, values, "hqv")).all()
    assert np.isfinite(named(probe, values, "h1")).all()
    with torch.no_grad():
        model[0].attn.q_proj.weight[HEAD_DIM] = torch.nan
    values = run.steps(4)[-1]
    assert np.isposinf(named(probe, values, "qk_norm")).all()  # one step later NaN is everywhere in the layer
    assert np.isposinf(named(probe, values, "mlp_update")).all()


def test_watching_leaves_weights_gradients_and_random_state_bit_identical() -> None:
    results = []
    for watched in (False, True):
        model = build()
        torch.manual_seed(7)
        Run(model, UpdateSpectrum(discover(model)) if watched else None).steps(45)
        state = [*model.parameters(), *(p.grad for p in model.parameters()), torch.get_rng_state()]
        results.append([x.detach().clone() for x in state])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_only_steps_divisible_by_every_are_measured_and_signals_start_after_32_steps() -> None:
    model = build()
    probe = UpdateSpectrum(discover(model))
    run = Run(model, probe)
    measured = {step: v for step in range(37) if (v := run.step()) is not None}
    assert list(measured) == list(range(0, 37, 4))
    ready = [step for step, v in measured.items() if np.isfinite(named(probe, v, "h1")).all()]
    assert ready == [32, 36]
    assert all(np.isfinite(named(probe, v, "qk_norm")).all() for v in measured.values())


@pytest.mark.parametrize("at", [40, 42])
def test_a_skipped_step_discards_the_window_wherever_it_falls(at: int) -> None:
    model = build()
    probe = UpdateSpectrum(discover(model))
    run = Run(model, probe)
    run.steps(at)
    assert run.step(skip=True) is None
    finite = [np.isfinite(named(probe, v, "h1")).all() for v in run.steps(45)]
    assert finite.index(True) == 8
    assert all(finite[8:])


def test_state_round_trip_continues_identically() -> None:
    model = build(kv=2)
    probe = UpdateSpectrum(discover(model))
    run = Run(model, probe)
    run.steps(50)
    state = probe.state_dict()
    plain = {k: v for k, v in state.items() if not isinstance(v, Tensor)}
    assert json.loads(json.dumps(plain)) == plain
    assert all(v.is_contiguous() for v in state.values() if isinstance(v, Tensor))
    kept = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
    twin_model = build(kv=2)
    twin_model.load_state_dict(model.state_dict())
    twin = UpdateSpectrum(discover(twin_model))
    twin.load_state_dict(state)
    twin_run = Run(twin_model, twin)
    twin_run.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    twin_run.step_index = run.step_index
    for a, b in zip(run.steps(20), twin_run.steps(20), strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(torch.equal(v, kept[k]) for k, v in state.items() if isinstance(v, Tensor)), (
        "a copy, not a view"
    )


def test_a_state_of_other_layers_starts_anew() -> None:
    model = build()
    probe = UpdateSpectrum(discover(model), rank=0, world=2)
    Run(model, probe).steps(40)
    other = UpdateSpectrum(discover(model), rank=1, world=2)
    other.load_state_dict(probe.state_dict())
    assert other.state_dict() == {"count": -1}


def test_layers_are_dealt_over_ranks_with_the_same_keys_everywhere() -> None:
    model = build()
    sites = discover(model)
    alone = UpdateSpectrum(sites)
    dealt = [UpdateSpectrum(sites, rank=r, world=3) for r in range(3)]
    assert all(p.keys() == alone.keys() for p in dealt)
    run = Run(model, alone)
    for p in dealt:
        run.optimizer.register_step_pre_hook(lambda *_, p=p: p.before_update())
        run.optimizer.register_step_post_hook(lambda *_, p=p: p.after_update())
    for step in range(41):
        for p in dealt:
            p.arm(step)
        whole = run.step()
        parts = [p.collect(step) for p in dealt]
    assert parts[2] is None
    first, second = (p.resolve() for p in parts[:2])
    assert np.isnan(named(alone, first, "h1", 1)).all()
    np.testing.assert_array_equal(np.where(np.isnan(first), second, first), whole)

    def frame(rank: int, values: np.ndarray) -> SignalFrame:
        return SignalFrame.build(values, run="r", attempt=1, rank=rank, seq=0, timeline=0, step=40, table="t")

    relayed = combine([frame(1, second), frame(0, first)])
    assert relayed == frame(0, whole)
    merged = measured_mean(merge([frame(0, first), frame(1, second)]).values)
    assert merged.astype(np.float32).tobytes() == relayed.values.tobytes()


def test_bf16_weights_are_refused_with_the_reason_and_measured_through_masters() -> None:
    model = build(dtype=torch.bfloat16)
    sites = discover(model)
    probe = UpdateSpectrum(sites)
    assert not probe.honest
    assert len(probe.limits) == 2
    assert "masters=" in probe.limits[0]
    values = Run(model, probe).steps(41)[-1]
    for name in ("h1", "hqv", "delta3", "coherence"):
        assert np.isnan(named(probe, values, name)).all()
    assert np.isfinite(named(probe, values, "qk_norm")).all()

    exact = build()
    masters = dict(zip(model.parameters(), exact.parameters(), strict=True))
    through, direct = UpdateSpectrum(sites, masters=masters), UpdateSpectrum(discover(exact))
    assert through.honest
    assert through.limits == []
    run = Run(exact, direct)
    run.optimizer.register_step_pre_hook(lambda *_: through.before_update())
    run.optimizer.register_step_post_hook(lambda *_: through.after_update())
    for step in range(37):
        through.arm(step)
        values, pending = run.step(), through.collect(step)
    np.testing.assert_array_equal(pending.resolve(), values)


def test_a_pending_value_does_not_change_when_training_goes_on() -> None:
    model = build()
    probe = UpdateSpectrum(discover(model))
    run = Run(model, probe)
    run.steps(36)
    probe.arm(36)
    run.optimizer.step()
    pending = probe.collect(36)
    now = pending.resolve()
    run.step_index = 37
    run.steps(8)
    np.testing.assert_array_equal(pending.resolve(), now)


def test_after_detach_the_model_is_free_and_the_probe_measures_nothing() -> None:
    model = build()
    probe = UpdateSpectrum(discover(model), masters={next(model.parameters()): torch.zeros(D, D)})
    alive = weakref.ref(model[0].attn)
    probe.detach()
    del model
    gc.collect()
    assert alive() is None
    probe.arm(0)
    probe.before_update()
    probe.after_update()
    assert probe.collect(0) is None
    assert len(probe.keys()) == 5 * 2 * HEADS + 2
