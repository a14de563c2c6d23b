"""The bias score against kernels whose error is known."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from foreshock.lab.flash import FlashAttention, KernelFault
from foreshock.monitors.kernels import make_slices
from foreshock.monitors.source import (
    MATERIAL_BIAS,
    WRONG_OUTPUT,
    Reference,
    bias_score,
    output_error,
)
from foreshock.monitors.source_probe import score_slice, shadow_score, shadow_slice

SHAPE = (2, 4, 48, 16)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draws(count: int, dtype: torch.dtype = torch.bfloat16, trigger: bool = False, shape=SHAPE, seed: int = 0):
    return [tuple(x.to(dtype) for x in draw) for draw in make_slices(shape, trigger, count, seed)]


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, allowed: Tensor
) -> tuple[Tensor, Tensor]:
    """Plain attention and P k s, written independently of the reference under test."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * scale
    p = torch.softmax(scores.masked_fill(~allowed, float("-inf")), -1)
    return p @ v, (p @ k).detach() * scale


def exact(q, k, v, grad, *, scale=None, allowed=None):
    """Output, dq and P k s in float64, the gradient by autograd."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril() if allowed is None else allowed
    q = q.double().requires_grad_()
    out, lever = softmax_attention(q, k.double(), v.double(), scale, allowed)
    return out.detach(), torch.autograd.grad(out, q, grad.double())[0], lever


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("kernel", [flash, FlashAttention()], ids=["pytorch", "lab"])
def test_an_honest_bf16_kernel_scores_as_a_standard_normal(kernel):
    t = torch.cat([shadow_score(kernel, *draw).t for draw in draws(60)])
    assert t.numel() == 240
    assert abs(t.mean()) < 4 / 240**0.5
    assert 0.85 < t.std() < 1.15
    assert t.abs().max() < 4.5


@pytest.mark.parametrize("degrees", [3, 30])
def test_unbiased_noise_scores_as_a_standard_normal_whatever_its_tails(degrees):
    noise = torch.distributions.StudentT(degrees)
    torch.manual_seed(1)
    scores = []
    for q, k, v, grad in draws(60):
        _, dq, lever = exact(q, k, v, grad)
        scores.append(bias_score(q, k, v, grad, dq - 0.01 * noise.sample(SHAPE[:3])[..., None] * lever).t)
    t = torch.cat(scores)
    assert abs(t.mean()) < 4 / 240**0.5
    assert 0.85 < t.std() < 1.15


def test_a_float64_kernel_scores_nothing():
    (draw,) = draws(1)
    q, k, v, grad = draw
    _, dq, _ = exact(*draw)
    score = bias_score(q, k, v, grad, dq)
    assert score.rms.max() < 1e-11
    assert score.t.eq(0).all()
    assert score.finite.all()


@settings(deadline=None, max_examples=15)
@given(
    error=st.floats(1e-5, 1e-1) | st.floats(-1e-1, -1e-5),
    kv_heads=st.sampled_from([1, 2, 4]),
    scale=st.sampled_from([None, 0.7]),
    seed=st.integers(0, 9),
)
def test_an_injected_bias_is_recovered_in_size_and_sign(error, kv_heads, scale, seed):
    q, k, v, grad = draws(1, seed=seed)[0]
    k, v = k[:, :kv_heads], v[:, :kv_heads]
    out, dq, lever = exact(q, k, v, grad, scale=scale)
    score = bias_score(q, k, v, grad, dq - error * lever, scale=scale)
    delta = (grad.double() * out).sum(-1)[..., 1:]
    wanted = error / delta.transpose(0, 1).flatten(1).std(-1, correction=0)
    torch.testing.assert_close(score.bias, wanted, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(score.rms, wanted.abs(), rtol=1e-6, atol=1e-12)
    n = SHAPE[0] * (SHAPE[2] - 1)
    assert score.tokens.eq(n).all()
    torch.testing.assert_close(score.t, torch.full((4,), n**0.5 * (1 if error > 0 else -1)).double())


@pytest.mark.parametrize(("direction", "sign"), [("up", 1), ("down", -1)])
def test_a_kernel_that_rounds_delta_one_way_is_found_in_one_slice_and_is_material(direction, sign):
    kernel = FlashAttention()
    kernel.fault = KernelFault("delta", 7, direction)
    score = shadow_score(kernel, *draws(1, shape=(4, 4, 64, 32))[0])
    assert (score.t * sign > 5).all()
    assert (score.bias * sign > MATERIAL_BIAS).all()


@pytest.mark.parametrize("direction", ["stochastic", "zero"])
def test_larger_but_unbiased_rounding_is_not_taken_for_a_bias(direction):
    kernel = FlashAttention()
    kernel.fault = KernelFault("delta", 5, direction)
    scores = [shadow_score(kernel, *draw) for draw in draws(10)]
    together = torch.cat([s.t for s in scores])
    assert torch.cat([s.rms for s in scores]).mean() > 5e-3
    assert together.square().mean() < 2
    assert abs(together.sum()) / together.numel() ** 0.5 < 4


def test_the_natural_trigger_is_found_in_a_kernel_that_rounds_pv_and_gone_with_the_stabilised_softmax():
    kernel = FlashAttention(round_pv=True)
    cases = draws(8, trigger=True, shape=(2, 4, 64, 32), seed=5)
    ill = torch.stack([score_slice(shadow_slice(kernel, *c), skip=8)[0].t for c in cases])
    cured = torch.stack([score_slice(shadow_slice(kernel.stabilised, *c), skip=8)[0].t for c in cases])
    assert ill.square().mean() > 10
    assert cured.square().mean() < 3


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", range(5))
def test_a_non_finite_value_is_flagged_in_its_head_alone(place, poison):
    q, k, v, grad = draws(1)[0]
    _, dq, lever = exact(q, k, v, grad)
    tensors = [q, k, v, grad, dq - 1e-3 * lever]
    tensors[place] = tensors[place].clone()
    tensors[place][1, 2, 3, 4] = poison
    score = bias_score(*tensors)
    assert score.finite.tolist() == [True, True, False, True]
    assert score.t.isnan().tolist() == [False, False, True, False]
    assert score.bias.isnan().tolist() == [False, False, True, False]


def test_output_error_tells_wrong_masks_and_scales_from_rounding():
    q, k, v, _ = draws(1)[0]
    causal = torch.ones(48, 48, dtype=torch.bool).tril()
    assert output_error(q, k, v, flash(q, k, v)).max() < 5e-3
    wrong = {
        "not causal": F.scaled_dot_product_attention(q, k, v),
        "sees one token ahead": F.scaled_dot_product_attention(q, k, v, causal | causal.roll(-1, 0)),
        "window of eight": F.scaled_dot_product_attention(q, k, v, causal & ~causal.tril(-8)),
        "another scale": F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.5),
    }
    for name, out in wrong.items():
        assert output_error(q, k, v, out).min() > WRONG_OUTPUT, name
    out = flash(q, k, v).clone()
    out[0, 1, 5, 3] = float("nan")
    assert output_error(q, k, v, out).isnan().tolist() == [False, True, False, False]


def test_bool_and_additive_masks_mean_the_same_and_rows_with_one_key_or_none_are_left_out():
    q, k, v, grad = draws(1)[0]
    allowed = torch.ones(48, 48, dtype=torch.bool).tril() & (torch.rand(48, 48) > 0.3)
    allowed |= torch.eye(48, dtype=torch.bool)
    allowed[7] = False
    allowed[9] = torch.arange(48) == 4
    sensible = allowed.clone()
    sensible[7, 0] = True
    _, dq, lever = exact(q, k, v, grad, allowed=sensible)
    dq = dq - 1e-3 * lever
    additive = torch.zeros(48, 48).masked_fill(~allowed, float("-inf"))
    smallest = torch.zeros(48, 48).masked_fill(~allowed, torch.finfo(torch.float32).min)
    one = bias_score(q, k, v, grad, dq, causal=False, mask=allowed)
    assert one.tokens.eq(2 * int((allowed.sum(-1)[1:] > 1).sum())).all()
    for mask in (additive, smallest):
        other = bias_score(q, k, v, grad, dq, causal=False, mask=mask)
        torch.testing.assert_close(one.bias, other.bias)
        assert one.tokens.equal(other.tokens)
    biased = bias_score(q, k, v, grad, dq, causal=True, mask=allowed)
    torch.testing.assert_close(one.bias, biased.bias)


def test_padding_without_gradient_does_not_dilute_the_score():
    q, k, v, grad = draws(1)[0]
    grad = grad.clone()
    grad[:, :, 30:] = 0
    _, dq, lever = exact(q, k, v, grad)
    dq = dq - 1e-3 * lever * (grad != 0).any(-1, keepdim=True)
    padded, short = bias_score(q, k, v, grad, dq), bias_score(*(x[:, :, :30] for x in (q, k, v, grad, dq)))
    assert padded.tokens.equal(short.tokens)
    torch.testing.assert_close(padded.bias, short.bias)
    none = bias_score(q, k, v, torch.zeros_like(grad), torch.zeros_like(dq))
    assert none.t.isnan().all()
    assert none.finite.all()


def test_chosen_rows_have_the_errors_that_they_have_in_the_whole_sequence():
    q, k, v, grad = draws(1)[0]
    _, dq, lever = exact(q, k, v, grad)
    dq = dq - 1e-3 * torch.randn(SHAPE[:3])[..., None] * lever
    rows = torch.tensor([0, 3, 17, 40, 47])
    whole = Reference(q, k, v).delta_error(grad, dq)
    part = Reference(q[:, :, rows], k, v, rows=rows).delta_error(grad[:, :, rows], dq[:, :, rows])
    assert part[2].equal(whole[2][..., rows])
    for a, b in zip(whole[:2], part[:2], strict=True):
        torch.testing.assert_close(a[..., rows][..., 1:], b[..., 1:], rtol=1e-9, atol=1e-12)


def test_grouped_queries_equal_repeated_keys():
    q, k, v, grad = draws(1)[0]
    k, v = k[:, :2], v[:, :2]
    _, dq, lever = exact(q, k, v, grad)
    dq = dq - 1e-3 * lever
    repeated = [x.repeat_interleave(2, 1) for x in (k, v)]
    assert bias_score(q, k, v, grad, dq).t.equal(bias_score(q, *repeated, grad, dq).t)


def test_the_score_does_not_depend_on_the_scale_of_the_loss():
    q, k, v, grad = draws(1, dtype=torch.float32)[0]
    _, dq, lever = exact(q, k, v, grad)
    dq = dq - 1e-3 * torch.rand(SHAPE[:3])[..., None] * lever
    one, other = bias_score(q, k, v, grad, dq), bias_score(q, k, v, grad * 2**16, dq * 2**16)
    torch.testing.assert_close(one.t, other.t)
    torch.testing.assert_close(one.bias, other.bias)


def test_a_shadow_run_draws_no_random_number_and_leaves_no_gradient():
    weight = torch.ones((), requires_grad=True)

    def noisy(q, k, v):
        return flash(q, k, v) * weight * (1 + 0 * torch.rand(()))

    before = torch.get_rng_state()
    q, k, v, grad = draws(1)[0]
    with torch.no_grad():
        score = shadow_score(noisy, q, k, v, grad)
    assert score.finite.all()
    assert torch.get_rng_state().equal(before)
    assert weight.grad is None
    assert not q.requires_grad
