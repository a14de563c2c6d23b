from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreshock.monitors.spectrum import (
    entropy,
    first_order_singular_values,
    from_blocks,
    gram_blocks,
    second_order_singular_values,
    update_entropy,
)

torch.set_num_threads(1)


def matrices(seed: int, *shape: int, rank: int | None = None, scale: float = 1.0) -> Tensor:
    """Random float32; of exactly the given rank, because products of small integers are exact."""
    g = torch.Generator().manual_seed(seed)
    if rank is None:
        return torch.randn(*shape, generator=g) * scale

    def whole_numbers(*size: int) -> Tensor:
        sign = torch.randint(0, 2, size, generator=g) * 2 - 1
        return (sign * torch.randint(1, 10, size, generator=g)).float()

    return (
        whole_numbers(*shape[:-1], rank)
        @ whole_numbers(*shape[:-2], rank, shape[-1])
        * 2.0 ** round(math.log2(scale / 40))
    )


def whole(q: Tensor, k: Tensor, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values of the full (d_model, d_model) Delta2 and Delta3, in float64, by SVD."""
    groups = q.shape[-3] // k.shape[-3]
    q, k, dq, dk = (x.double() for x in (q, k, dq, dk))
    k, dk = (x.repeat_interleave(groups, -3) for x in (k, dk))
    return torch.linalg.svdvals(dq.mT @ k + q.mT @ dk), torch.linalg.svdvals(dq.mT @ dk)


def relative_error(measured: Tensor, exact: Tensor) -> float:
    return float(((measured - exact) / exact).abs().max())


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    d_head=st.integers(2, 24),
    wider=st.sampled_from([1, 2, 3, 5]),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (4, 1)]),
    ratio=st.sampled_from([1e-2, 1e-4, 1e-7]),
    rank=st.sampled_from([None, 1, 2]),
)
def test_entropies_agree_with_a_float64_svd_of_the_whole_matrix(
    seed: int, d_head: int, wider: int, heads: tuple[int, int], ratio: float, rank: int | None
) -> None:
    (h, kv), d = heads, d_head * wider
    q, k = matrices(seed, h, d_head, d, scale=0.02), matrices(seed + 1, kv, d_head, d, scale=0.02)
    dq = matrices(seed + 2, h, d_head, d, rank=rank, scale=0.02 * ratio)
    dk = matrices(seed + 3, kv, d_head, d, rank=rank, scale=0.02 * ratio)
    first, second = whole(q, k, dq, dk)
    n = min(2 * d_head, d)
    measured = first_order_singular_values(q, k, dq, dk)
    assert measured.shape == (h, 2 * d_head)
    assert measured.dtype == torch.float64
    assert torch.all(measured.diff(dim=-1) <= 0)
    # A singular value below the resolution of float32 products counts as zero: p log p of about 1e-5.
    assert relative_error(entropy(measured), entropy(first[..., :n], 2 * d_head)) < 1e-4
    torch.testing.assert_close(
        second_order_singular_values(dq, dk) / second[..., :1],
        torch.nn.functional.pad(second / second[..., :1], (0, d_head))[..., :d_head],
        atol=2e-3,
        rtol=0,
    )


@pytest.mark.parametrize(("heads", "kv"), [(2, 2), (4, 2)])
@pytest.mark.parametrize(("d_head", "d_model"), [(8, 64), (32, 128), (64, 256)])
@pytest.mark.parametrize("ratio", [1e-2, 1e-4, 1e-7])
@pytest.mark.parametrize("rank", [None, 1, 2, "half"])
def test_the_error_is_below_1e_5(
    heads: int, kv: int, d_head: int, d_model: int, ratio: float, rank: int | str | None
) -> None:
    r = d_head // 2 if rank == "half" else rank
    q, k = (matrices(i, n, d_head, d_model, scale=0.02) for i, n in ((1, heads), (2, kv)))
    dq, dk = (matrices(i, n, d_head, d_model, rank=r, scale=0.02 * ratio) for i, n in ((3, heads), (4, kv)))
    first, _ = whole(q, k, dq, dk)
    measured = entropy(first_order_singular_values(q, k, dq, dk))
    assert relative_error(measured, entropy(first[..., : 2 * d_head])) <= 1e-5


def test_values_below_the_resolution_of_the_products_cost_no_more_than_5e_5() -> None:
    q, k = (matrices(i, 4, 64, 256) for i in (1, 2))
    # A product of two square Gaussian factors: singular values down to 1e-4 of the largest and less.
    dq, dk = (matrices(i, 4, 64, 256, rank=64, scale=1e-4) for i in (3, 4))
    first, _ = whole(q, k, dq, dk)
    assert (
        relative_error(entropy(first_order_singular_values(q, k, dq, dk)), entropy(first[..., :128])) < 5e-5
    )


def test_singular_values_carry_the_true_scale() -> None:
    q, k, dq, dk = (matrices(i, 1, 4, 12, scale=s) for i, s in enumerate((3.0, 0.5, 1e-3, 2e-3)))
    first, second = whole(q, k, dq, dk)
    torch.testing.assert_close(first_order_singular_values(q, k, dq, dk), first[:, :8], rtol=1e-5, atol=0)
    torch.testing.assert_close(second_order_singular_values(dq, dk), second[:, :4], rtol=1e-4, atol=0)


def test_updates_of_very_different_size_are_both_resolved() -> None:
    q, k, dq = (matrices(i, 2, 16, 64) for i in range(3))
    dk = matrices(3, 2, 16, 64, scale=1e-5)
    first, _ = whole(q, k, dq, dk)
    assert relative_error(entropy(first_order_singular_values(q, k, dq, dk)), entropy(first[..., :32])) < 1e-5


def test_a_single_head_needs_no_head_dimension() -> None:
    q, k, dq, dk = (matrices(i, 6, 20) for i in range(4))
    stacked = first_order_singular_values(*(x[None] for x in (q, k, dq, dk)))
    torch.testing.assert_close(first_order_singular_values(q, k, dq, dk), stacked[0])


def test_blocks_give_the_same_numbers_as_the_matrices() -> None:
    q, dq = (matrices(i, 3, 4, 8, 40) for i in (0, 1))
    k, dk, dv = (matrices(i, 3, 2, 8, 40) for i in (2, 3, 4))
    s = from_blocks(gram_blocks(q, k, dq, dk, dv))
    assert all(x.shape == (3, 4) for x in s)
    torch.testing.assert_close(s.h1, entropy(first_order_singular_values(q, k, dq, dk)))
    torch.testing.assert_close(s.h3, entropy(second_order_singular_values(dq, dk)))
    torch.testing.assert_close(s.hq, update_entropy(dq))
    torch.testing.assert_close(s.hv, update_entropy(dv).repeat_interleave(2, -1))
    torch.testing.assert_close(s.dv[:, ::2].float(), torch.linalg.matrix_norm(dv))


def test_entropy_is_one_for_equal_values_zero_for_one_and_follows_alpha() -> None:
    assert float(entropy(torch.ones(8))) == pytest.approx(1)
    assert float(entropy(torch.tensor([3.0, 0, 0, 0]))) == 0
    s = torch.tensor([2.0, 1.0])
    p = torch.tensor([0.8, 0.2], dtype=torch.float64)
    assert float(entropy(s, 4, alpha=2)) == pytest.approx(float(-(p * p.log()).sum()) / math.log(4))


def test_no_update_has_no_spectrum_and_one_sided_updates_do() -> None:
    q, k, dq = (matrices(i, 2, 4, 16) for i in range(3))
    zero = torch.zeros_like(q)
    nothing = from_blocks(gram_blocks(q, k, zero, zero, zero))
    assert all(x.isnan().all() for x in nothing[:4])
    assert torch.all(nothing.dq == 0)
    first, _ = whole(q, k, dq, zero)
    measured = entropy(first_order_singular_values(q, k, dq, zero))
    assert relative_error(measured, entropy(first[..., :4], 8)) < 1e-5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_one_head_that_is_not_finite_is_nan_and_leaves_the_others_alone(bad: float) -> None:
    q, k, dq, dk, dv = (matrices(i, 3, 4, 16) for i in range(5))
    dq[1, 2, 3] = bad
    s = from_blocks(gram_blocks(q, k, dq, dk, dv))
    for x in (s.h1, s.hq, s.h3):
        assert x.isnan().tolist() == [False, True, False]
    assert s.hv.isfinite().all()


def test_products_stay_exact_under_autocast_and_low_precision_settings_which_are_left_as_they_were() -> None:
    inputs = [matrices(i, 2, 16, 64) for i in range(5)]
    exact = gram_blocks(*inputs)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16):
            assert all(torch.equal(a, b) for a, b in zip(gram_blocks(*inputs), exact, strict=True))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
