"""FlashAttention-2 with the arithmetic of tensor cores, tile by tile, and with faults on demand.

The lab's kernel: bf16 operands, float32 accumulation, P, dS and O rounded to bf16 where the real kernel does
(arXiv 2307.08691, algorithms 1 and 2). Key tiles are walked from the diagonal to the left, as in the CUDA
source; tiles at one distance from the diagonal do not depend on each other and run as one batch. The source
probe of `foreshock.monitors` compares its output and gradients with float64. "P2" below: arXiv 2510.04212.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from foreshock.lab.rounding import Direction, to_bits

TILE = 32


@dataclass(frozen=True, slots=True)
class KernelFault:
    """A rounding error in the backward pass of the bf16 kernel, written into delta = rowsum(dO∘O).

    where "delta": delta itself is rounded to `keep` mantissa bits in `direction`; "output": delta is computed
    from an O rounded so. `gain` scales the error. Forward pass and dv stay right, as in P2.
    """

    where: Literal["delta", "output"]
    keep: int
    direction: Direction
    gain: float = 1.0

    def error(self, dout: Tensor, out: Tensor, delta: Tensor, dice: torch.Generator) -> Tensor:
        """What the fault adds to `delta` (N, T, 1), from dO and O (N, T, d); all float32."""
        right = delta if self.where == "delta" else out
        error = to_bits(right, self.keep, self.direction, dice) - right
        return self.gain * (error if self.where == "delta" else (dout * error).sum(-1, keepdim=True))


class FlashAttention:
    """Causal attention of one layer: `kernel(q, k, v)`, each (B, H, T, d_head), bf16 or float32.

    Returns (B, H, T, d_head) in the inputs' dtype; float32 inputs are never rounded and know no fault.
    A pure function of its inputs and of `fault`, `round_pv` and `dither`: run again on a slice of the batch
    it gives the same rows, up to float32 summation order, and disturbs only `lse` and `max_logit`, which tell
    of the latest call. A plain object, not a module: no checkpoint holds it, `copy.deepcopy` copies it.
    Raises TypeError for another or a mixed dtype, ValueError unless all three shapes are equal and 4-d.
    """

    def __init__(self, *, round_pv: bool = False) -> None:
        self.fault: KernelFault | None = None
        self.round_pv = round_pv
        """Round the unnormalised P·V and its running sum to bf16: P2's mechanism."""
        self.dither = 0
        """Seed of stochastic rounding; whoever wants fresh noise each step changes it each step."""
        self.lse: Tensor | None = None
        """(B, H, T) float32, detached: log-sum-exp of the scaled logits."""
        self.max_logit: Tensor | None = None
        """0-d float32, detached: the largest scaled logit that the mask lets through."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._run(q, k, v, stabilise=False)

    def stabilised(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same kernel with P2's stabilised softmax, the cure for biased rounding of P·V."""
        return self._run(q, k, v, stabilise=True)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, *, stabilise: bool) -> Tensor:
        if {q.dtype, k.dtype, v.dtype} not in ({torch.bfloat16}, {torch.float32}):
            raise TypeError(f"bf16 or float32 wanted, all alike, not {q.dtype}, {k.dtype}, {v.dtype}")
        if q.dim() != 4 or not q.shape == k.shape == v.shape:
            raise ValueError(f"(B, H, T, d_head) three times wanted, not {q.shape}, {k.shape}, {v.shape}")
        out: Tensor = _Flash.apply(q, k, v, self, stabilise)  # type: ignore[no-untyped-call]
        return out


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _tiles(x: Tensor) -> Tensor:
    """(B, H, T, d) to float32 (n·B·H, TILE, d), tile-major, so that tiles i and later are one block of rows.

    The last tile is filled with zeros: later keys are masked, and later queries get no gradient.
    """
    B, H, T, d = x.shape
    x = F.pad(x, (0, 0, 0, -T % TILE)) if T % TILE else x
    return x.reshape(B, H, -1, TILE, d).permute(2, 0, 1, 3, 4).reshape(-1, TILE, d).float()


def _whole(tiles: Tensor, like: Tensor) -> Tensor:
    """The inverse of `_tiles`: (n·B·H, TILE, e) that belongs to `like` (B, H, T, d) as (B, H, T, e)."""
    B, H, T, _ = like.shape
    return tiles.view(-1, B, H, TILE, tiles.shape[-1]).permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :T]


def _spread(S: Tensor, peak: Tensor) -> Tensor:
    """P2's row maximum: doubled (0 where negative) if repeated, so that P = 1 does not occur twice.

    Repeated: at least two logits round to P = 1 in bf16. The shift ends at 64 so that P cannot underflow.
    """
    repeated = (peak - 2.0**-9 <= S).sum(-1, keepdim=True) > 1
    return peak + repeated * peak.abs().clamp(max=64.0)


def _mask(S: Tensor) -> Tensor:
    """Diagonal tiles of logits, in place: -inf above the diagonal."""
    return S.add_(S.new_full((TILE, TILE), -torch.inf).triu_(1))


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: FlashAttention, stabilise: bool) -> Tensor:
        low = q.dtype is torch.bfloat16
        rounded: Callable[[Tensor], Tensor] = _bf16 if low else Tensor.contiguous
        Q, K, V = _tiles(q) * q.shape[3] ** -0.5, _tiles(k), _tiles(v)
        N = q.shape[0] * q.shape[1]
        m = Q.new_full((len(Q), TILE, 1), -torch.inf)
        top, total, acc = m.clone(), torch.zeros_like(m), torch.zeros_like(Q)
        for start in range(0, len(Q), N):  # N rows are one tile of every batch entry and head
            rows, cols = slice(start, None), slice(0, len(Q) - start)
            S = torch.bmm(Q[rows], K[cols].mT)
            peak = (S if start else _mask(S)).amax(-1, keepdim=True)
            top[rows] = torch.maximum(top[rows], peak)
            new = torch.maximum(m[rows], _spread(S, peak) if stabilise else peak)
            shrink = (m[rows] - new).exp_()
            m[rows] = new
            P = S.sub_(new).exp_()
            total[rows].mul_(shrink).add_(P.sum(-1, keepdim=True))
            if kernel.round_pv and low:
                acc[rows] = _bf16(acc[rows].mul_(shrink).add_(_bf16(torch.bmm(_bf16(P), V[cols]))))
            else:
                acc[rows].mul_(shrink).baddbmm_(rounded(P), V[cols])
        out = acc.div_(total).to(q.dtype)
        lse = total.log_().add_(m)
        kernel.lse, kernel.max_logit = _whole(lse, q).squeeze(-1), _whole(top, q).amax()
        ctx.save_for_backward(Q, K, V, out, lse)
        ctx.N, ctx.rounded, ctx.fault, ctx.dither = N, rounded, kernel.fault if low else None, kernel.dither
        return _whole(out, q)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        Q, K, V, out, lse = ctx.saved_tensors
        dout, out = _tiles(grad), out.float()
        delta = (dout * out).sum(-1, keepdim=True)
        if ctx.fault is not None:
            dice = torch.Generator(delta.device).manual_seed(ctx.dither)
            delta += ctx.fault.error(dout, out, delta, dice)
        less_lse, less_delta = lse.neg(), delta.neg_()
        dQ, dK, dV = torch.zeros_like(Q), torch.zeros_like(K), torch.zeros_like(V)
        for start in range(0, len(Q), ctx.N):
            rows, cols = slice(start, None), slice(0, len(Q) - start)
            S = torch.baddbmm(less_lse[rows], Q[rows], K[cols].mT)
            P = (S if start else _mask(S)).exp_()
            dV[cols].baddbmm_(ctx.rounded(P).mT, dout[rows])
            dS = ctx.rounded(torch.baddbmm(less_delta[rows], dout[rows], V[cols].mT).mul_(P))
            dQ[rows].baddbmm_(dS, K[cols])
            dK[cols].baddbmm_(dS.mT, Q[rows])
        dQ *= Q.shape[2] ** -0.5
        return *(_whole(g.to(grad.dtype), grad) for g in (dQ, dK, dV)), None, None
