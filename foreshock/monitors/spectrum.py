"""The update spectrum of a head's QK bilinear form, from small Gram matrices.

Pure functions under the `update_spectrum` probe. Over a window the increment of W_Q'W_K is Delta2 + Delta3 with
Delta2 = dQ'K + Q'dK (first order) and Delta3 = dQ'dK (arXiv 2606.28116). Neither (d_model, d_model) matrix is
ever formed: the device multiplies seven blocks of shape (d_head, d_head) a head (`gram_blocks`), the host takes
float64 eigenvalues of them (`from_blocks`). Under GQA k, dk, dv have fewer heads; query head i reads
key-value head i // (heads / kv_heads).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
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
    """The host's half: entropies (p proportional to sigma^alpha) and norms. Never raises on NaN, Inf or zero."""
    heads, d_head = blocks.q_q.shape[-3], blocks.q_q.shape[-1]
    b = Blocks(*(_per_head(x.to("cpu"), heads) for x in blocks))
    q, dq, k, dk, dv = (_norm(x) for x in (b.q_q, b.dq_dq, b.k_k, b.dk_dk, b.dv_dv))
    return Spectra(
        entropy(_first_order(b), 2 * d_head, alpha),
        entropy(_gram_singular_values(b.dq_dq), d_head, alpha),
        entropy(_gram_singular_values(b.dv_dv), d_head, alpha),
        entropy(_second_order(b.dq_dq, b.dk_dk), d_head, alpha),
        *(q, k, dq, dk, dv),
    )


def first_order_singular_values(q: Tensor, k: Tensor, dq: Tensor, dk: Tensor) -> Tensor:
    """Singular values of Delta2 = dq'k + q'dk: (..., 2 * d_head) float64 on the CPU, descending.

    All inputs (..., d_head, d_model); the third dimension from the end is heads and may be smaller for k, dk.
    Directions that the products cannot resolve (below about 1e-3 of a factor's largest in float32) read as
    zero, so that a rank-deficient update is not filled with rounding noise. NaN where an input is not finite.
    """
    b = gram_blocks(q, k, dq, dk, dk[..., :0, :])
    heads = q.shape[-3] if q.ndim > 2 else 1
    return _first_order(Blocks(*(_per_head(x.to("cpu"), heads) for x in b)))


def second_order_singular_values(dq: Tensor, dk: Tensor) -> Tensor:
    """Singular values of Delta3 = dq'dk: (..., d_head) float64 on the CPU, descending. Shapes as above."""
    heads = dq.shape[-3] if dq.ndim > 2 else 1
    b = gram_blocks(dq, dk, dq[..., :0, :], dk[..., :0, :], dk[..., :0, :])
    return _second_order(_per_head(b.q_q.to("cpu"), heads), _per_head(b.k_k.to("cpu"), heads))


def update_entropy(dw: Tensor, alpha: float = 1.0) -> Tensor:
    """Entropy of one update's own spectrum over log(d_head): dw (..., d_head, d_model) -> (...) float64."""
    empty = dw[..., :0, :]
    gram = gram_blocks(dw, empty, empty, empty, empty).q_q.to("cpu")
    return entropy(_gram_singular_values(gram), dw.shape[-2], alpha)


def entropy(s: Tensor, n: int | None = None, alpha: float = 1.0) -> Tensor:
    """-sum p log p / log n with p = s^alpha / sum s^alpha, over the last dimension (n defaults to its size).

    NaN where all s are zero (no spectrum) or one is not finite.
    """
    top = s.amax(-1, keepdim=True)
    p = (s.double() / top).pow(alpha)
    p = p / p.sum(-1, keepdim=True)
    return -torch.special.xlogy(p, p).sum(-1) / math.log(n or s.shape[-1])


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        backend: Any = torch.backends.cuda.matmul if device.type == "cuda" else torch.backends.mkldnn
        backend = getattr(backend, "matmul", backend)
        # Where a backend has its own flag, the global getter raises once a user has set one of them.
        if hasattr(backend, "fp32_precision"):
            before = backend.fp32_precision
            backend.fp32_precision = "ieee"
            try:
                yield
            finally:
                backend.fp32_precision = before
        else:
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("highest")
            try:
                yield
            finally:
                torch.set_float32_matmul_precision(before)


def _per_head(x: Tensor, heads: int) -> Tensor:
    if x.ndim < 3 or x.shape[-3] == heads:
        return x
    return x.repeat_interleave(heads // x.shape[-3], dim=-3)


def _norm(gram: Tensor) -> Tensor:
    return gram.diagonal(dim1=-2, dim2=-1).double().sum(-1).sqrt()


def _inverse(x: Tensor) -> Tensor:
    return torch.where(x > 0, 1 / x, 0.0)[..., None, None]


def _factor(gram: Tensor, resolution: float) -> tuple[Tensor, Tensor]:
    """F with F F' = gram, and its singular values (ascending). Directions that the products did not resolve
    are zero: their eigenvalues are rounding noise, whose square roots would fill a collapsed spectrum."""
    w, u = torch.linalg.eigh(torch.where(gram.isfinite(), gram, 0.0))
    root = torch.where(w > resolution * w[..., -1:], w, 0.0).sqrt()
    return u * root[..., None, :], root


def _resolution(gram: Tensor) -> float:
    return 8 * torch.finfo(gram.dtype).eps


def _masked(s: Tensor, *grams: Tensor) -> Tensor:
    good = torch.stack([g.isfinite().all(-1).all(-1) for g in grams]).all(0)
    return torch.where(good[..., None], s, torch.nan)


def _gram_singular_values(gram: Tensor) -> Tensor:
    return _masked(_factor(gram.double(), _resolution(gram))[1].flip(-1), gram)


def _product_singular_values(left: Tensor, right: Tensor) -> Tensor:
    """Singular values of A'B, descending, from factors of A A' and B B'."""
    m = left.mT @ right
    w = torch.linalg.eigvalsh(m @ m.mT).flip(-1)
    return torch.where(w > 64 * torch.finfo(w.dtype).eps * w[..., :1], w, 0.0).sqrt()


def _second_order(dq_dq: Tensor, dk_dk: Tensor) -> Tensor:
    left, right = (_factor(g.double(), _resolution(g))[0] for g in (dq_dq, dk_dk))
    return _masked(_product_singular_values(left, right), dq_dq, dk_dk)


def _first_order(b: Blocks) -> Tensor:
    """Delta2 = [dQ; Q]'[K; dK]: unit blocks on both sides, their weights between the two factors, so that a
    small update is resolved as well as the weights it is stacked with."""
    nq, nk, ndq, ndk = (_norm(x) for x in (b.q_q, b.k_k, b.dq_dq, b.dk_dk))
    weight = torch.stack([ndq * nk, nq * ndk], -1)
    scale = weight.amax(-1, keepdim=True)
    left = _factor(_stacked(b.dq_dq, b.q_dq.mT, b.q_q, ndq, nq), _resolution(b.q_q))[0]
    right = _factor(_stacked(b.k_k, b.k_dk, b.dk_dk, nk, ndk), _resolution(b.k_k))[0]
    balance = (weight * _inverse(scale)[..., 0]).repeat_interleave(b.q_q.shape[-1], dim=-1)
    return _masked(scale * _product_singular_values(left * balance[..., None], right), *b[:6])


def _stacked(x_x: Tensor, x_y: Tensor, y_y: Tensor, nx: Tensor, ny: Tensor) -> Tensor:
    ix, iy = _inverse(nx), _inverse(ny)
    x_y = x_y.double() * ix * iy
    top = torch.cat([x_x.double() * ix * ix, x_y], -1)
    return torch.cat([top, torch.cat([x_y.mT, y_y.double() * iy * iy], -1)], -2)
