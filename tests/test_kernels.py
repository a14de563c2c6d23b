"""PyTorch's own kernels under the natural trigger of arXiv 2510.04212, on the CPU at hand."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from foreshock.monitors import kernels
from foreshock.monitors.kernels import BIASED, HONEST, IMMATERIAL, WRONG, check_kernels


@pytest.fixture(scope="module")
def verdicts():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before = torch.get_rng_state()
    rows = check_kernels(dtypes=(torch.bfloat16,))
    assert torch.get_rng_state().equal(before)
    torch.set_num_threads(threads)
    return {(row.kernel, row.slices): row for row in rows}


def test_plain_slices_find_every_kernel_honest(verdicts):
    plain = [row for (_, kind), row in verdicts.items() if kind == "plain"]
    assert {"flash", "math", "float32 (the cure)"} <= {row.kernel for row in plain}
    for row in plain:
        assert row.verdict == HONEST, row
        assert abs(row.t) < 2
        assert row.mismatch < 5e-3


def test_flash_under_the_trigger_is_materially_biased(verdicts):
    row = verdicts["flash", "trigger"]
    assert row.verdict == BIASED
    assert -30 < row.t < -12
    assert 1e-3 < row.bias < 4e-3


@pytest.mark.parametrize("kernel", ["math", "float32 (the cure)"])
def test_float32_under_the_trigger_is_significant_but_immaterial(verdicts, kernel):
    row = verdicts[kernel, "trigger"]
    assert row.verdict == IMMATERIAL
    assert -25 < row.t < -12
    assert row.bias < 1e-5


def test_a_kernel_that_forgets_the_mask_or_returns_nan_is_reported_wrong(monkeypatch):
    def broken():
        yield "no mask", lambda q, k, v: F.scaled_dot_product_attention(q, k, v)
        yield "nan", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True) * torch.nan

    monkeypatch.setattr(kernels, "_kernels", broken)
    rows = check_kernels(dtypes=(torch.bfloat16,), slices=4, tokens=32)
    assert [(row.kernel, row.verdict) for row in rows if row.slices == "plain"] == [
        ("no mask", WRONG),
        ("nan", WRONG),
    ]


def test_only_a_missing_kernel_is_left_out(monkeypatch):
    def failing():
        def run(q, k, v):
            raise RuntimeError("out of memory")

        yield "full", run

    monkeypatch.setattr(kernels, "_kernels", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        check_kernels(slices=4)


@pytest.mark.parametrize("shape", [{"tokens": 16}, {"slices": 2}])
def test_too_small_a_check_is_refused(shape):
    with pytest.raises(ValueError, match="at least 32 tokens and 4 slices"):
        check_kernels(**shape)
