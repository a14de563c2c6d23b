"""Are the attention kernels of this machine honest? The source probe, before any run.

Off the road, asked by `foreshock doctor --kernels`: PyTorch's own kernels on made slices, plain ones and ones
with the natural trigger of arXiv 2510.04212 (a row maximum shared by several keys, and one-signed values),
and the float32 cure beside them. The bias's sign may vary by slice and head, so squares are the evidence.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from foreshock.monitors.intercept import CAUSAL, Kernel, exact_attention
from foreshock.monitors.source import MATERIAL_BIAS, WRONG_OUTPUT
from foreshock.monitors.source_probe import score_slice, shadow_slice

HONEST, IMMATERIAL, BIASED, WRONG = (
    "honest",
    "significant but immaterial",
    "MATERIALLY BIASED",
    "WRONG OUTPUT",
)
SIGNIFICANT = 6.0
"""Evidence, as a normal score, from which a bias is taken for real."""
_REPEATED = 6
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True, slots=True)
class KernelVerdict:
    """One kernel on one kind of slices.

    `t` is the median over slices of the score over all heads (null: deviation 1), `t_min` and `t_max` the
    range; `bias` the mean size of a slice's bias, in standard deviations of delta; `mismatch` the largest
    relative error of the output; `evidence` the normal score of all squared head scores together.
    """

    kernel: str
    dtype: str
    slices: str
    t: float
    t_min: float
    t_max: float
    bias: float
    mismatch: float
    evidence: float
    verdict: str


def check_kernels(
    *,
    device: torch.device | str = "cpu",
    dtypes: Sequence[torch.dtype] = (torch.bfloat16, torch.float16),
    batch: int = 2,
    heads: int = 4,
    tokens: int = 128,
    head_dim: int = 64,
    slices: int = 20,
    seed: int = 11,
) -> list[KernelVerdict]:
    """A verdict for every kernel that runs here, dtype and kind of slice; unsupported ones are left out.

    Deterministic for a seed, global random state untouched. Raises ValueError below 32 tokens or 4
    slices, where a bias and its absence look alike.
    """
    if tokens < 32 or slices < 4:
        raise ValueError("at least 32 tokens and 4 slices are needed to tell a bias from its absence")
    shape = (batch, heads, tokens, head_dim)
    found = []
    for dtype in dtypes:
        for name, kernel in _kernels():
            for kind in ("plain", "trigger"):
                draws = make_slices(shape, kind == "trigger", slices, seed)
                try:
                    scores = [_score(kernel, *(x.to(device, dtype) for x in draw)) for draw in draws]
                except RuntimeError as error:
                    if any(
                        x in str(error)
                        for x in ("No available kernel", "No viable backend", "not implemented")
                    ):
                        break
                    raise
                found.append(_judge(name, str(dtype).removeprefix("torch."), kind, scores))
    return found


def make_slices(
    shape: tuple[int, int, int, int], trigger: bool, count: int, seed: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """q, k, v and the output's gradient, each float32 of `shape` (B, H, T, d), `count` times.

    With `trigger`, six identical keys share every row's maximum, far above the rest, and v has one sign.
    """
    made = torch.Generator().manual_seed(seed)
    for _ in range(count):
        q, k, v, grad = (torch.randn(shape, generator=made) for _ in range(4))
        k = k * 0.3
        if trigger:
            u = torch.randn((*shape[:2], 1, shape[3]), generator=made)
            q, v, grad = q * 0.5 + 3 * u, -(v.abs() + 0.5), grad + 1
            k[..., :_REPEATED, :] = 1.2 * u
        yield q, k, v, grad


def _kernels() -> Iterator[tuple[str, Kernel]]:
    for name, backend in _BACKENDS.items():

        def run(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend), warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # PyTorch warns once a reason for every kernel that it cannot use
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        yield name, run
    yield "float32 (the cure)", lambda q, k, v: exact_attention(q, k, v, CAUSAL)


def _score(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Rows among the repeated keys attend them almost alone: their P k is one key, and they say nothing.
    score, mismatch = score_slice(shadow_slice(kernel, q, k, v, grad), skip=_REPEATED + 2)
    return score.t.cpu(), score.bias.cpu(), mismatch.cpu()


def _judge(kernel: str, dtype: str, kind: str, scores: list[tuple[Tensor, Tensor, Tensor]]) -> KernelVerdict:
    t, bias, mismatch = (torch.stack(x) for x in zip(*scores, strict=True))
    together = t.sum(1) / math.sqrt(t.shape[1])
    size, error = float(bias.mean(1).abs().mean()), float(mismatch.max())
    evidence = _normal_score(float(t.square().sum()), t.numel())
    if not (math.isfinite(evidence) and error < WRONG_OUTPUT):
        verdict = WRONG
    elif evidence < SIGNIFICANT:
        verdict = HONEST
    else:
        verdict = BIASED if size >= MATERIAL_BIAS else IMMATERIAL
    low, middle, high = (float(x) for x in (together.min(), together.median(), together.max()))
    return KernelVerdict(kernel, dtype, kind, middle, low, high, size, error, evidence, verdict)


def _normal_score(chi_square: float, freedom: int) -> float:
    """The normal score with about the same tail as this chi-square value (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    return float(((chi_square / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))
