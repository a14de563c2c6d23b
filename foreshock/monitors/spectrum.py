"""The update spectrum of a head's QK bilinear form, from small Gram matrices.

Pure functions under the probe `UpdateSpectrum`. Over a window the increment of W_Q'W_K is Delta2 + Delta3,
Delta2 = dQ'K + Q'dK (first order) and Delta3 = dQ'dK (arXiv 2606.28116). Neither (d_model, d_model) matrix
is formed: the device multiplies seven (d_head, d_head) blocks a head (`gram_blocks`), the host takes their
float64 eigenvalues (`from_blocks`). Under GQA query head i reads key-value head i // (heads / kv_heads).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Blocks(NamedTuple):
    """Gram blocks, each (..., heads or kv_heads, d_head, d_head); `q_dq` is q @ dq'."""

    q_q: Tensor
    q_dq: Tensor
    dq_dq: Tensor
    k_k: Tensor
    k_dk: Tensor
    dk_dk: Tensor
    dv_dv: Tensor


class Spectra(NamedTuple):
    """What `from_blocks` returns: float64 on the CPU, each (..., heads).

    `h1` entropy of Delta2 over log(2 d_head); `h3` of Delta3, `hq` of dQ, `hv` of dV over log(d_head);
    the other five are Frobenius norms. An entropy is NaN where there is no update or anything is not finite.
    """

    h1: Tensor
    hq: Tensor
    hv: Tensor
    h3: Tensor
    q: Tensor
    k: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def gram_blocks(q: Tensor, k: Tensor, dq: Tensor, dk: Tensor, dv: Tensor) -> Blocks:
    """The device's half: seven products, no synchronisation, no autograd.

    q, dq (..., heads, d_head, d_model); k, dk, dv (..., kv_heads, d_head, d_model). Products are made in the
    inputs' precision, at least float32, with TF32 and autocast off: a reduced product is a false collapse.
    """
    with _full_precision(q.device):
        q, k, dq, dk, dv = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, k, dq, dk, dv))
        return Blocks(q @ q.mT, q @ dq.mT, dq @ dq.mT, k @ k.mT, k @ dk.mT, dk @ dk.mT, dv @ dv.mT)


def from_blocks(blocks: Blocks, alpha: float = 1.0) -> Spectra:
    """The host's half: entropies (p ~ sigma^alpha) and norms. Never raises on NaN, Inf or zero."""
    heads, d_head = blocks.q_q.shape[-3], blocks.q_q.shape[-1]
    b = _on_host(blocks, heads)
    dq, dk, dv = (_factor(x) for x in (b.dq_dq, b.dk_dk, b.dv_dv))
    return Spectra(
        entropy(_first_order(b), 2 * d_head, alpha),
        entropy(_norms_of_columns(dq), d_head, alpha),
        entropy(_norms_of_columns(dv), d_head, alpha),
        entropy(_product_singular_values(dq, dk), d_head, alpha),
        *(_norm(x) for x in (b.q_q, b.k_k, b.dq_dq, b.dk_dk, b.dv_dv)),
    )


def first_order_singular_values(q: Tensor, k: Tensor, dq: Tensor, dk: Tensor) -> Tensor:
    """Singular values of Delta2 = dq'k + q'dk: (..., 2 * d_head) float64 on the CPU, descending.

    All inputs (..., d_head, d_model); the third dimension from the end is heads and may be smaller for k, dk.
    Directions of a factor that its products cannot resolve (in float32 below 7e-4 of the largest) read as
    zero, so that rounding does not fill a rank-deficient update. NaN where an input is not finite.
    """
    return _first_order(_on_host(gram_blocks(q, k, dq, dk, dk[..., :0, :]), _heads(q)))


def second_order_singular_values(dq: Tensor, dk: Tensor) -> Tensor:
    """Singular values of Delta3 = dq'dk: (..., d_head) float64 on the CPU, descending. Shapes as above."""
    b = _on_host(gram_blocks(dq, dk, dq[..., :0, :], dk[..., :0, :], dk[..., :0, :]), _heads(dq))
    return _product_singular_values(_factor(b.q_q), _factor(b.k_k))


def update_entropy(dw: Tensor, alpha: float = 1.0) -> Tensor:
    """Entropy of one update's own spectrum over log(d_head): dw (..., d_head, d_model) -> (...) float64."""
    empty = dw[..., :0, :]
    gram = gram_blocks(dw, empty, empty, empty, empty).q_q.to("cpu")
    return entropy(_norms_of_columns(_factor(gram)), dw.shape[-2], alpha)


def entropy(s: Tensor, n: int | None = None, alpha: float = 1.0) -> Tensor:
    """-sum p log p / log n with p = s^alpha / sum s^alpha, over the last dimension (n defaults to its size).

    NaN where all s are zero (no spectrum) or one is not finite.
    """
    top = s.amax(-1, keepdim=True)
    p = (s.double() / top).pow(alpha)
    p = p / p.sum(-1, keepdim=True)
    total: Tensor = torch.special.xlogy(p, p).sum(-1)
    return -total / math.log(n or s.shape[-1])


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    matmul: Any = getattr(backend, "matmul", None)
    # Once a user has set one backend's own flag (torch 2.9), the global getter raises.
    own = hasattr(matmul, "fp32_precision")
    before = matmul.fp32_precision if own else torch.get_float32_matmul_precision()
    put = partial(setattr, matmul, "fp32_precision") if own else torch.set_float32_matmul_precision
    put("ieee" if own else "highest")
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            yield
    finally:
        put(before)


def _heads(x: Tensor) -> int:
    return x.shape[-3] if x.ndim > 2 else 1


def _on_host(blocks: Blocks, heads: int) -> Blocks:
    def expand(x: Tensor) -> Tensor:
        groups = heads // _heads(x)
        return x.to("cpu") if groups == 1 else x.to("cpu").repeat_interleave(groups, dim=-3)

    return Blocks(*(expand(x) for x in blocks))


def _norm(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=-2, dim2=-1).double().sum(-1).sqrt()


def _factor(gram: Tensor, resolution: float | None = None) -> Tensor:
    """F with F F' = gram, columns ordered by growing norm. NaN where the Gram is not finite.

    Directions that the products did not resolve are zero: their eigenvalues are rounding noise, whose square
    roots would fill a collapsed spectrum.
    """
    bad = ~gram.isfinite().all(-1).all(-1)[..., None, None]
    w, u = torch.linalg.eigh(torch.where(bad, 0.0, gram.double()))
    floor = (resolution or _resolution(gram)) * w[..., -1:]
    return torch.where(bad, torch.nan, u * torch.where(w > floor, w, 0.0).sqrt()[..., None, :])


def _resolution(gram: Tensor) -> float:
    return 4 * torch.finfo(gram.dtype).eps


def _norms_of_columns(factor: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(factor, dim=-2)
    return norms.flip(-1)


def _product_singular_values(left: Tensor, right: Tensor) -> Tensor:
    """Singular values of A'B, descending, from factors of A A' and B B'."""
    m = left.mT @ right
    bad = ~m.isfinite().all(-1).all(-1)[..., None]
    w = torch.linalg.eigvalsh(torch.where(bad[..., None], 0.0, m @ m.mT)).flip(-1)
    floor = 16 * torch.finfo(w.dtype).eps * w[..., :1]
    return torch.where(bad, torch.nan, torch.where(w > floor, w, 0.0).sqrt())


def _first_order(b: Blocks) -> Tensor:
    """Delta2 = [dQ; Q]'[K; dK]: blocks of unit norm on both sides, their weights between the two factors, so
    that a tiny update is resolved as well as the weights that it is stacked with."""
    nq, nk, ndq, ndk = (_norm(x) for x in (b.q_q, b.k_k, b.dq_dq, b.dk_dk))
    weight = torch.stack([ndq * nk, nq * ndk], -1)
    scale = weight.amax(-1, keepdim=True)
    left = _factor(_stacked(b.dq_dq, b.q_dq.mT, b.q_q, ndq, nq), _resolution(b.q_q))
    right = _factor(_stacked(b.k_k, b.k_dk, b.dk_dk, nk, ndk), _resolution(b.k_k))
    share = torch.where(scale == 0, 0.0, weight / scale).repeat_interleave(b.q_q.shape[-1], dim=-1)
    return scale * _product_singular_values(left * share[..., None], right)


def _stacked(x_x: Tensor, x_y: Tensor, y_y: Tensor, nx: Tensor, ny: Tensor) -> Tensor:
    ix, iy = (torch.where(n == 0, 0.0, 1 / n)[..., None, None] for n in (nx, ny))
    x_x, x_y, y_y = x_x.double() * ix * ix, x_y.double() * ix * iy, y_y.double() * iy * iy
    return torch.cat([torch.cat([x_x, x_y], -1), torch.cat([x_y.mT, y_y], -1)], -2)
