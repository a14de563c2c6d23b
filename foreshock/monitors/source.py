"""The bias score: an attention kernel's own output on a slice, against float64 from the same inputs.

First stop of the road. `source_probe` hands these functions slices of a run, `kernels` slices that it makes
itself; what they return becomes the signals `source_t`, `source_bias` and `mismatch`. Pure functions.

Why delta: low-precision FlashAttention fails through a biased delta = rowsum(dO * O) (arXiv 2510.04212), and
an error e of delta shows in the query gradient as dq - dq_ref = -e (P k) s, so it can be read back from dq.
Honest rounding has mean zero whatever its size: t is a standard score with a known null, without a baseline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict, Unpack

import torch
from torch import Tensor

MATERIAL_BIAS = 3e-4
"""|bias| below which a significant score is harmless: a fifth of what breaks training (1.6e-3)."""
WRONG_OUTPUT = 0.05
"""`mismatch` above which the kernel computes something else: honest bf16 has 3e-3, a wrong mask about 1."""

_REFERENCE_FLOOR = 1e-11
"""rms error, in std(delta), below which the reference's own float64 rounding is what one sees."""


@dataclass(frozen=True, slots=True)
class SourceScore:
    """Scores of one slice, one entry a query head, all (H,) on the CPU or the slice's device.

    `t` float64: sum(e) / sqrt(sum(e^2)), null mean 0 and deviation 1. `bias` float64: mean(e) / std(delta).
    `rms` float64: rms(e) / std(delta). `tokens` int64: how many tokens were used. `finite` bool: False where
    an input held NaN or Inf (the scores are then NaN); NaN with `finite` means that no token could be used.
    """

    t: Tensor
    bias: Tensor
    rms: Tensor
    tokens: Tensor
    finite: Tensor


class Reference:
    """Exact attention of a slice in float64, computed once and compared with what the kernel returned.

    Shapes: q (B, H, R, d); k, v (B, KV, T, d) with H a multiple of KV (grouped queries); any float dtype,
    which must be the one that the kernel itself computed from. `rows` (R,): the positions of q's rows, where
    they are a subset of the sequence. `mask` broadcasts to (B, H, R, T): bool (True = attend) or float (added
    to the scores); with `causal`, row i attends keys 0..i. `scale` defaults to d ** -0.5.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        causal: bool = True,
        mask: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> None:
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale
        self.rows = torch.arange(q.shape[-2], device=q.device) if rows is None else rows
        groups = q.shape[1] // k.shape[1]
        self.q = q.detach().double()
        self.k, self.v = (x.detach().double().repeat_interleave(groups, 1) for x in (k, v))
        scores = self.q @ self.k.mT * self.scale
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        if causal:
            allowed &= torch.arange(k.shape[-2], device=q.device) <= self.rows[:, None]
        if mask is not None and mask.dtype is torch.bool:
            allowed = allowed & mask
        elif mask is not None:
            allowed = allowed & (mask > torch.finfo(mask.dtype).min)
            scores = scores + mask.double().clamp_min(-1e300)
        self.keys = allowed.sum(-1)
        self.p = scores.masked_fill(~allowed, torch.finfo(torch.float64).min).softmax(-1)
        self.out = self.p @ self.v

    def delta_error(self, grad_out: Tensor, grad_q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Per token: the kernel's error e of delta, delta itself (float64) and which tokens count (bool).

        grad_out and grad_q (B, H, R, d), results (B, H, R). A token counts if its row attends two keys,
        its output received a gradient and |P k| is not about zero, so that e can be read from dq at all.
        """
        grad_out, grad_q = grad_out.detach().double(), grad_q.detach().double()
        delta = (grad_out * self.out).sum(-1)
        grad_ref = (self.p * (grad_out @ self.v.mT - delta[..., None])) @ self.k * self.scale
        lever = self.p @ self.k * self.scale
        size = lever.square().sum(-1)
        error = -((grad_q - grad_ref) * lever).sum(-1) / size
        largest = self.k.square().sum(-1).amax(-1, keepdim=True) * self.scale**2
        counts = (self.keys > 1) & (grad_out != 0).any(-1) & (size > 1e-12 * largest)
        return error, delta, counts

    def score(self, grad_out: Tensor, grad_q: Tensor, *, skip: int = 1) -> SourceScore:
        """The bias score per head; tokens at positions before `skip` are left out."""
        grad_out, grad_q = grad_out.detach().double(), grad_q.detach().double()
        error, delta, counts = self.delta_error(grad_out, grad_q)
        counts = counts & (self.rows >= skip)
        sums = [x.sum((0, 2, 3)) for x in (self.q, self.k, self.v, grad_out, grad_q)]
        finite = torch.stack(sums).isfinite().all(0)
        error, delta = error.where(counts, 0.0), delta.where(counts, 0.0)
        n = counts.sum((0, 2))
        mean, power = error.sum((0, 2)) / n, error.square().sum((0, 2))
        spread = (
            (delta - (delta.sum((0, 2)) / n)[:, None]).where(counts, 0.0).square().sum((0, 2)).div(n).sqrt()
        )
        rms = (power / n).sqrt() / spread
        t = torch.where(rms > _REFERENCE_FLOOR, mean * n / power.sqrt(), 0.0)
        known = finite & (n > 0) & (spread > 0)
        t, bias, rms = (x.where(known, torch.nan) for x in (t, mean / spread, rms))
        return SourceScore(t, bias, rms, n, finite)

    def mismatch(self, out: Tensor) -> Tensor:
        """rms(out - reference) / rms(reference) per head, float64 (H,); out (B, H, R, d)."""
        error = (out.detach().double() - self.out).square().mean((0, 2, 3))
        return (error / self.out.square().mean((0, 2, 3)).clamp_min(1e-300)).sqrt()


class Layout(TypedDict, total=False):
    """The keyword arguments of `Reference`."""

    scale: float | None
    causal: bool
    mask: Tensor | None
    rows: Tensor | None


def bias_score(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    grad_q: Tensor,
    *,
    skip: int = 1,
    **layout: Unpack[Layout],
) -> SourceScore:
    """Is the kernel's delta biased? See `Reference` for shapes and `SourceScore` for the answer.

    grad_out and grad_q (B, H, R, d) are the gradient that reached the kernel's output and the query gradient
    that it returned. Never raises on non-finite values.
    """
    return Reference(q, k, v, **layout).score(grad_out, grad_q, skip=skip)


def output_error(q: Tensor, k: Tensor, v: Tensor, out: Tensor, **layout: Unpack[Layout]) -> Tensor:
    """Relative error of the kernel's output per head, float64 (H,): what finds a wrong mask or scale.

    `bias_score` is no answer to that: the dq errors of a wrong kernel need not point along P k.
    """
    return Reference(q, k, v, **layout).mismatch(out)
