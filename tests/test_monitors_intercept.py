"""Watching attention changes nothing, sees everything, and can be undone."""

from __future__ import annotations

import copy
import inspect
import logging
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from foreshock.lab.flash import FlashAttention, KernelFault
from foreshock.monitors.intercept import CAUSAL, Interceptor, Unavailable, sampled_rows
from foreshock.monitors.source import MATERIAL_BIAS, WRONG_OUTPUT, Reference
from foreshock.monitors.source_probe import SourceProbe, score_slice, shadow_score

HEADS, DIM, T = 4, 16, 24
CAUSAL_MASK = torch.ones(T, T, dtype=torch.bool).tril()


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Attention(nn.Module):
    """Grouped queries where kv < HEADS; `options` goes to scaled_dot_product_attention."""

    def __init__(self, kv: int = HEADS, dtype: torch.dtype = torch.bfloat16, **options):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, h * DIM, bias=False) for h in (HEADS, kv, kv))
        self.o = nn.Linear(HEADS * DIM, 32, bias=False)
        self.dtype, self.options = dtype, options or {"is_causal": True}

    def forward(self, x):
        q, k, v = (
            p(x).to(self.dtype).unflatten(-1, (-1, DIM)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        return self.o(self.kernel(q, k, v).transpose(1, 2).flatten(2).to(self.o.weight.dtype))

    def kernel(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **self.options)


class Called(Attention):
    """The attention callable is an attribute."""

    def __init__(self, attend=None):
        super().__init__()
        self.attend = attend or FlashAttention()

    def kernel(self, q, k, v):
        return self.attend(q, k, v)


class Model(nn.Module):
    def __init__(self, make, layers: int = 2, checkpointing: bool | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(make() for _ in range(layers))
        self.reentrant = checkpointing

    def forward(self, x):
        for block in self.blocks:
            y = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
            x = x + y
        return x

    def sites(self):
        return [
            SimpleNamespace(
                layer=i, module=b, heads=HEADS, kv_heads=HEADS, head_dim=DIM,
                call="attend" if hasattr(b, "attend") else None,
            )
            for i, b in enumerate(self.blocks)
        ]  # fmt: skip


def batch(step: int = 0) -> torch.Tensor:
    return torch.randn(3, T, 32, generator=torch.Generator().manual_seed(step), requires_grad=True)


def train(model, steps=4, before=lambda step: None, after=lambda step: None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        before(step)
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        after(step)
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


KINDS = {
    "callable": Called,
    "sdpa": Attention,
    "sdpa gqa": lambda: Attention(kv=2, is_causal=True, enable_gqa=True),
    "sdpa mask": lambda: Attention(attn_mask=CAUSAL_MASK, scale=0.3),
    "sdpa float mask": lambda: Attention(
        dtype=torch.float32, attn_mask=torch.randn(3, 1, T, T).masked_fill(~CAUSAL_MASK, -torch.inf)
    ),
    "sdpa submodule": lambda: Called(Submodule()),
}  # fmt: skip


class Submodule(nn.Module):
    """A kernel that is a module of its own."""

    fault = None

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_watched_run_is_bit_identical_and_its_slices_are_the_kernels_own(kind, checkpointing):
    bare = train(Model(KINDS[kind], checkpointing=checkpointing))
    model = Model(KINDS[kind], checkpointing=checkpointing)
    interceptor, seen = Interceptor(model.sites()), []
    watched = train(
        model, before=lambda step: interceptor.arm(2), after=lambda step: seen.append(interceptor.take())
    )
    assert bare[0] == watched[0]
    assert all(a.equal(b) for a, b in zip(bare[1], watched[1], strict=True))
    assert interceptor.failures == {}
    for slices in seen:
        assert set(slices) == {0, 1}
        for cut in slices.values():
            score, mismatch = score_slice(cut)
            assert mismatch.max() < 6e-3
            assert score.rms.max() < 0.05
            assert score.t.abs().max() < 5


@pytest.mark.parametrize("checkpointing", [False, True])
def test_checkpointing_yields_the_slices_of_the_run_without_it(checkpointing):
    def one(how):
        model = Model(Attention, checkpointing=how)
        interceptor = Interceptor(model.sites())
        interceptor.arm(2)
        model(batch()).square().mean().backward()
        return interceptor.take()

    plain, checked = one(None), one(checkpointing)
    for layer in plain:
        for part in ("q", "k", "v", "out", "grad_q", "grad_out"):
            # reentrant checkpoints add the residual stream's gradients in another order
            wide = [getattr(cuts[layer], part).double() for cuts in (plain, checked)]
            torch.testing.assert_close(
                *wide, rtol=2**-6 if checkpointing else 0, atol=1e-6 if checkpointing else 0
            )


def test_only_the_first_sequences_and_evenly_spaced_rows_are_kept():
    model = Model(Attention)
    interceptor = Interceptor(model.sites())
    interceptor.arm(sequences=1, rows=7)
    model(batch()).square().mean().backward()
    cut = interceptor.take()[1]
    assert cut.rows.tolist() == [0, 3, 7, 11, 15, 19, 23]
    assert cut.q.shape == cut.grad_q.shape == cut.out.shape == cut.grad_out.shape == (1, HEADS, 7, DIM)
    assert cut.k.shape == cut.v.shape == (1, HEADS, T, DIM)
    assert score_slice(cut)[0].tokens.eq(6).all()
    assert sampled_rows(5, 7).tolist() == [0, 1, 2, 3, 4]
    big = sampled_rows(100_000, 128)
    assert (big[0], big[-1], len(big.unique())) == (0, 99_999, 128)


@pytest.mark.parametrize("make", [Called, Attention], ids=["callable", "sdpa"])
def test_without_gradients_or_unarmed_nothing_is_kept(make):
    model = Model(make)
    interceptor = Interceptor(model.sites())
    interceptor.arm(2)
    with torch.no_grad():
        model(batch())
    assert interceptor.take() == {}
    assert interceptor.drain(0) == {}
    model(batch()).sum().backward()
    assert interceptor.take() == {}


def test_dropout_is_not_measured():
    model = Model(lambda: Attention(is_causal=True, dropout_p=0.5))
    interceptor = Interceptor(model.sites())
    interceptor.arm(2)
    model(batch()).sum().backward()
    assert interceptor.take() == {}
    assert interceptor.failures == {}


def test_under_autocast_the_slice_is_what_the_kernel_computed_from():
    model = Model(lambda: Attention(dtype=torch.float32))
    interceptor = Interceptor(model.sites())
    interceptor.arm(2)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(batch()).square().mean()
    loss.backward()
    cut = interceptor.take()[0]
    assert cut.q.dtype is cut.k.dtype is cut.out.dtype is torch.bfloat16
    assert score_slice(cut)[1].max() < 6e-3
    interceptor.upcast([0, 1])
    interceptor.arm(2)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(batch()).square().mean()
    loss.backward()
    cut = interceptor.take()[0]
    assert cut.out.dtype is torch.bfloat16
    assert score_slice(cut)[1].max() < 3e-3


def test_attributes_of_the_kernel_are_read_and_written_through():
    model = Model(Called)
    kernel = model.blocks[0].attend
    interceptor = Interceptor(model.sites())
    fault = KernelFault("delta", 7, "up")
    model.blocks[0].attend.fault = fault
    assert kernel.fault is fault
    assert model.blocks[0].attend.lse is None
    model(batch())
    assert model.blocks[0].attend.lse is kernel.lse
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.blocks[0].attend.nothing
    interceptor.detach()
    assert model.blocks[0].attend is kernel


@pytest.mark.parametrize("kind", KINDS)
def test_detach_leaves_the_modules_as_they_were_found(kind):
    model = Model(KINDS[kind])
    before = [dict(vars(b)) for b in model.blocks]
    names, state = [n for n, _ in model.named_modules()], list(model.state_dict())
    interceptor = Interceptor(model.sites())
    assert [n for n, _ in model.named_modules()] == names
    assert list(model.state_dict()) == state
    interceptor.upcast([0])
    interceptor.detach()
    interceptor.detach()
    assert [dict(vars(b)) for b in model.blocks] == before
    assert interceptor.upcasted == {}


def test_a_patch_made_over_ours_survives_detach_and_ours_is_inert():
    model = Model(Attention)
    interceptor = Interceptor(model.sites())
    module = model.blocks[0]
    ours = module.forward
    module.forward = lambda x: ours(x) * 2
    theirs = module.forward
    interceptor.upcast([0])
    interceptor.arm(2)
    interceptor.detach()
    assert module.forward is theirs
    assert module(batch()).equal(type(module).forward(module, batch()) * 2)


def test_a_deep_copy_is_unwatched_and_the_signature_is_kept():
    for make in (Called, Attention):
        model = Model(make)
        signature = inspect.signature(model.blocks[0].forward)
        interceptor = Interceptor(model.sites())
        assert inspect.signature(model.blocks[0].forward) == signature
        twin = copy.deepcopy(model)
        interceptor.arm(2)
        twin(batch()).square().mean().backward()
        assert interceptor.take() == {}
        assert twin(batch()).equal(model(batch()))
        assert twin.blocks[0].q.weight.grad is not None
        assert model.blocks[0].q.weight.grad is None


@pytest.mark.parametrize("kind", KINDS)
def test_upcast_is_the_exact_answer_in_the_incoming_dtype_and_restore_undoes_it(kind):
    model = Model(KINDS[kind])
    plain = model(batch())
    interceptor = Interceptor(model.sites())
    interceptor.upcast([1])
    assert interceptor.upcasted == {1: "float32"}
    interceptor.arm(2)
    out = model(batch())
    out.square().mean().backward()
    cut = interceptor.take()[1]
    call = cut.call
    exact = Reference(cut.q, cut.k, cut.v, scale=call.scale, causal=call.is_causal, mask=call.attn_mask).out
    assert cut.out.dtype is model.blocks[1].dtype
    if cut.out.dtype is torch.bfloat16:  # float32 inside, so that only the last rounding is left
        assert cut.out.eq(exact.bfloat16()).double().mean() > 0.999
    torch.testing.assert_close(cut.out.double(), exact, rtol=2**-8, atol=1e-6)
    interceptor.restore([1])
    assert interceptor.upcasted == {}
    assert model(batch()).equal(plain)


def test_a_biased_kernel_is_seen_and_the_upcast_is_seen_to_cure_it():
    model = Model(Called)
    interceptor = Interceptor(model.sites())
    model.blocks[1].attend.fault = KernelFault("delta", 6, "up")

    def biases():
        interceptor.arm(3)
        model(batch()).square().mean().backward()
        return {layer: score_slice(cut)[0].bias.mean() for layer, cut in interceptor.take().items()}

    ill = biases()
    assert ill[1] > 10 * MATERIAL_BIAS
    assert abs(ill[0]) < ill[1] / 5
    interceptor.upcast([1])
    assert abs(biases()[1]) < ill[1] / 5
    interceptor.upcast([1], "stabilised")
    assert interceptor.upcasted == {1: "stabilised"}
    assert biases()[1] > 10 * MATERIAL_BIAS  # the stabilised softmax cures rounding of P v, not of delta


def test_upcast_is_all_or_nothing_and_says_why_it_cannot():
    model = Model(Attention)
    interceptor = Interceptor(model.sites())
    with pytest.raises(Unavailable, match="layer 9 has no attention site"):
        interceptor.upcast([0, 9])
    with pytest.raises(Unavailable, match="no stabilised form"):
        interceptor.upcast([0, 1], "stabilised")
    assert interceptor.upcasted == {}
    with pytest.raises(ValueError, match="same layer"):
        Interceptor([*model.sites(), model.sites()[0]])


def test_exposures_are_the_kernels_own_and_go_on_through_the_upcast():
    model = Model(Called, layers=1)
    interceptor = Interceptor(model.sites())
    kernel = model.blocks[0].attend
    n = torch.arange(1, T + 1).log()
    wanted, tops = [], []
    for step in range(3):
        model(batch(step)).sum().backward()
        wanted.append((kernel.lse - n).mean((0, 2)))
        tops.append(kernel.max_logit)
    state = interceptor.exposures()
    seen = interceptor.drain(0)
    torch.testing.assert_close(seen["lse"], torch.stack(wanted).mean(0))
    assert seen["max_logit"] == max(tops)
    assert interceptor.drain(0) == {}
    interceptor.load_exposures(state)
    assert interceptor.drain(0)["lse"].equal(seen["lse"])
    interceptor.upcast([0])
    model(batch(2)).sum().backward()
    upcast = interceptor.drain(0)
    torch.testing.assert_close(upcast["lse"], wanted[2], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(upcast["max_logit"], tops[2], rtol=1e-4, atol=1e-5)


def test_a_failure_of_the_watching_is_loud_and_training_goes_on(caplog):
    class Odd(FlashAttention):
        @property
        def lse(self):
            return "not a tensor"

        @lse.setter
        def lse(self, value):
            pass

    bare = train(Model(lambda: Called(Odd())))
    model = Model(lambda: Called(Odd()))
    interceptor = Interceptor(model.sites())
    with caplog.at_level(logging.WARNING):
        assert train(model, before=lambda s: interceptor.arm(2))[0] == bare[0]
    assert set(interceptor.failures) == {0, 1}
    assert len(caplog.records) == 2


def probe_of(model, **options):
    interceptor = Interceptor(model.sites())
    return SourceProbe(interceptor, model.sites(), **options)


def test_the_probe_measures_every_fourth_step_and_finds_the_layer():
    model = Model(Called)
    probe = probe_of(model, sequences=3)
    names = list(map(str, probe.keys()))
    assert len(names) == len(set(names)) == 2 * (3 * HEADS + 2)
    keys = probe.keys()
    assert {k.scope for k in keys} == {"per_rank"}
    model.blocks[1].attend.fault = KernelFault("delta", 6, "up")
    values = {}

    def after(step):
        pending = probe.collect(step)
        if pending is not None:
            thread = threading.Thread(target=lambda: values.update({step: pending.resolve()}))
            thread.start()
            thread.join()

    train(model, steps=9, before=probe.arm, after=after)
    assert sorted(values) == [0, 4, 8]
    for got in values.values():
        assert np.isfinite(got).all()
        by = dict(zip(names, got, strict=True))
        ill, well = ([by[f"attention.source_t[L{i}.H{h}]"] for h in range(HEADS)] for i in (1, 0))
        assert sum(ill) / 2 > 8 > 5 > abs(sum(well)) / 2
        assert np.mean([by[f"attention.source_bias[L1.H{h}]"] for h in range(HEADS)]) > MATERIAL_BIAS
        assert by["attention.mismatch[L0]"] < 6e-3


def test_the_captured_and_the_shadow_form_agree():
    model = Model(Called, layers=1)
    interceptor = Interceptor(model.sites())
    model.blocks[0].attend.fault = KernelFault("delta", 6, "up")
    interceptor.arm(3)
    model(batch()).square().mean().backward()
    cut = interceptor.take()[0]
    interceptor.arm(3)
    shadow = shadow_score(model.blocks[0].attend, cut.q, cut.k, cut.v, cut.grad_out, CAUSAL)
    assert interceptor.take() == {}
    torch.testing.assert_close(shadow.bias, score_slice(cut)[0].bias, rtol=0.05, atol=1e-6)


def test_the_probe_tells_unmeasured_from_not_finite_and_from_wrong():
    class Broken(FlashAttention):
        def __call__(self, q, k, v):
            return super().__call__(q, k, v) * self.factor

    model = Model(lambda: Called(Broken()))
    probe = probe_of(model)
    names = list(map(str, probe.keys()))

    def values(factor):
        for block in model.blocks:
            block.attend.factor = factor
        probe.arm(0)
        model(batch()).square().mean().backward()
        return dict(zip(names, probe.collect(0).resolve(), strict=True))

    assert values(1.5)["attention.mismatch[L1]"] > WRONG_OUTPUT
    nothing = dict(zip(names, probe.collect(4).resolve(), strict=True))
    assert all(np.isnan(x) for x in nothing.values())
    assert probe.collect(5) is None
    broken = values(torch.nan)
    assert broken["attention.source_t[L1.H0]"] == np.inf
    assert broken["attention.mismatch[L0]"] == np.inf
    probe.arm(0)
    probe.reset()
    model(batch()).square().mean().backward()
    assert np.isnan(probe.collect(0).resolve()[0])


def test_the_probe_without_exposures_has_no_keys_for_them():
    keys = probe_of(Model(Attention)).keys()
    assert {k.name for k in keys} == {"source_t", "source_bias", "mismatch"}


def test_a_rewound_probe_repeats_its_values():
    model = Model(Called, layers=1)
    probe = probe_of(model)

    def steps(first, last):
        for step in range(first, last):
            probe.arm(step)
            model(batch(step)).square().mean().backward()
            pending = probe.collect(step)
        return pending.resolve()

    steps(0, 1)
    probe.arm(1)
    model(batch(1)).square().mean().backward()
    state = probe.state_dict()
    one = steps(2, 5)
    probe.reset()
    probe.load_state_dict(state)
    np.testing.assert_array_equal(one, steps(2, 5))
    probe.reset()
    assert not np.array_equal(one, steps(2, 5))


class _Plain:
    """An interceptor as far as the deal is concerned."""

    def exposes(self, layer):
        return ()

    def expose(self, layers):
        self.layers = list(layers)


@given(world=st.integers(1, 40), copies=st.integers(1, 6), layers=st.integers(1, 12))
def test_every_layer_is_measured_by_consecutive_ranks_and_at_most_by_copies(world, copies, layers):
    sites = [SimpleNamespace(layer=i, heads=1) for i in range(layers)]
    dealt = []
    for rank in range(world):
        plain = _Plain()
        SourceProbe(plain, sites, rank=rank, world=world, copies=copies)
        dealt.append(plain.layers)
    for layer in range(layers):
        measuring = [rank for rank, mine in enumerate(dealt) if layer in mine]
        assert 1 <= len(measuring) <= copies
        assert len(measuring) == world or world > copies
        assert measuring == list(range(measuring[0], measuring[-1] + 1))


def test_a_dealt_layer_costs_and_says_nothing_and_the_ranks_together_say_what_one_would():
    def values(rank, world):
        model = Model(Called, layers=3)
        probe = probe_of(model, rank=rank, world=world, copies=1)
        probe.arm(0)
        model(batch()).square().mean().backward()
        assert set(probe.state_dict()) >= {f"{i}.lse" for i in range(rank, 3, world)}
        assert len([n for n in probe.state_dict() if n.endswith(".lse")]) == len(range(rank, 3, world))
        pending = probe.collect(0)
        assert sorted(pending.slices) == list(range(rank, 3, world))
        return probe.keys(), pending.resolve()

    keys, whole = values(0, 1)
    assert np.isfinite(whole).all()
    parts = [values(rank, 2) for rank in range(2)]
    assert all(theirs == keys for theirs, _ in parts)
    for rank, (_, part) in enumerate(parts):
        mine = np.array([key.layer % 2 == rank for key in keys])
        np.testing.assert_array_equal(part, np.where(mine, whole, np.nan))


def test_a_state_of_other_layers_leaves_no_stale_exposures():
    model = Model(Called)
    state = probe_of(model).state_dict() | {"0.lse": torch.ones(HEADS), "0.calls": torch.tensor(1)}
    probe = probe_of(model, rank=1, world=2, copies=1)
    probe.load_state_dict(state)
    assert "0.lse" not in probe.state_dict()
