"""The source probe: on sampled steps, is each layer's attention kernel still right, and still unbiased?

First stop of the road. Takes slices from the `Interceptor` during a step, hands on the signals `source_t`,
`source_bias` and `mismatch`, with the exposures `lse` and `max_logit` where the kernel shows them. On the
training thread it only copies; the float64 work is in `Pending.resolve`, which another thread may run.
The shadow form runs a kernel once more on a slice, where the call itself cannot be watched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreshock.monitors.intercept import (
    CAUSAL,
    AttentionCall,
    AttentionSlice,
    Interceptor,
    Kernel,
    unwatched,
)
from foreshock.monitors.sites import AttentionSite
from foreshock.monitors.source import Reference, SourceScore
from foreshock.signals import Scope, SignalKey

PER_HEAD = ("source_t", "source_bias", "lse")


class SourceProbe:
    """Evaluates at steps divisible by `every`, on the first `sequences` of the batch and `rows` query rows.

    At most `copies` of `world` data-parallel ranks measure a layer: consecutive ranks form groups of that size
    at most, and the groups take the layers in turn. The other layers are NaN on this `rank` and cost nothing.

    Keys, a site after the other: `source_t`, `source_bias` and `lse` per query head, `mismatch` (the worst
    head's) and `max_logit` per layer; `lse` and `max_logit` over all calls since the last
    evaluation, where the kernel exposes them. Values: NaN = not measured, infinite = measured and not finite.
    """

    name = "source"

    def __init__(
        self,
        interceptor: Interceptor,
        sites: Iterable[AttentionSite],
        every: int = 4,
        sequences: int = 2,
        rows: int = 128,
        rank: int = 0,
        world: int = 1,
        copies: int = 4,
    ) -> None:
        self.interceptor, self.every, self.sequences, self.rows = interceptor, every, sequences, rows
        sites = list(sites)
        groups = -(-world // copies)
        self._layers = [site.layer for site in sites[rank * groups // world :: groups]]
        interceptor.expose(self._layers)
        self._keys: list[SignalKey] = []
        for site in sites:
            for name in ("source_t", "source_bias", "mismatch", *interceptor.exposes(site.layer)):
                heads = range(site.heads) if name in PER_HEAD else (None,)
                unit = "nat" if name == "lse" else "1"
                self._keys += [
                    SignalKey("attention", name, site.layer, h, unit, Scope.PER_RANK) for h in heads
                ]

    def keys(self) -> tuple[SignalKey, ...]:
        return tuple(self._keys)

    def arm(self, step: int) -> None:
        """Before the forward of `step`. Under gradient accumulation the last micro-batch is measured."""
        if step % self.every == 0:
            self.interceptor.arm(self.sequences, self.rows, self._layers)

    def before_update(self) -> None:
        """The slices are complete when backward is; weights are not read."""

    def after_update(self) -> None:
        """See `before_update`."""

    def collect(self, step: int) -> SourcePending | None:
        """The slices of an evaluation step on their way to the host, without waiting for them."""
        if step % self.every:
            return None
        slices = self.interceptor.take()
        exposed = {layer: self.interceptor.drain(layer) for layer in self._layers}
        return SourcePending(self.keys(), slices, exposed)

    def reset(self) -> None:
        """Forget what is under way: the next values speak only of steps after this call."""
        self.interceptor.take()
        self.interceptor.load_exposures({})

    def state_dict(self) -> dict[str, Tensor]:
        """The exposures accumulated since the last evaluation."""
        return self.interceptor.exposures()

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.interceptor.load_exposures(state)

    def detach(self) -> None:
        """Stop sampling; the interceptor, which may hold an upcast, is its owner's to detach."""
        self.reset()


class SourcePending:
    """Slices of one step; `resolve` waits for the copies alone and does the float64 work."""

    def __init__(
        self,
        keys: tuple[SignalKey, ...],
        slices: dict[int, AttentionSlice],
        exposed: dict[int, dict[str, Tensor]],
    ) -> None:
        self.keys = keys
        cuda = any(cut.q.is_cuda for cut in slices.values())
        self.slices = {layer: _to_host(cut) for layer, cut in slices.items()}
        self.exposed = {i: {n: _host(x) for n, x in values.items()} for i, values in exposed.items()}
        self.ready = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
        if self.ready is not None:
            self.ready.record()

    def resolve(self) -> NDArray[np.float64]:
        """Values in key order, float64 (V,)."""
        if self.ready is not None:
            self.ready.synchronize()
        found: dict[tuple[int | None, str], NDArray[np.float64]] = {}
        for layer, cut in self.slices.items():
            score, mismatch = score_slice(cut)
            flag = ~score.finite
            found[layer, "source_t"] = score.t.masked_fill(flag, torch.inf).numpy()
            found[layer, "source_bias"] = score.bias.masked_fill(flag, torch.inf).numpy()
            found[layer, "mismatch"] = mismatch.nan_to_num(torch.inf, torch.inf).amax().numpy()
        for layer, exposed in self.exposed.items():
            for name, x in exposed.items():
                found[layer, name] = x.double().nan_to_num(torch.inf, torch.inf, -torch.inf).numpy()
        out = np.full(len(self.keys), np.nan)
        for i, key in enumerate(self.keys):
            if (values := found.get((key.layer, key.name))) is not None:
                out[i] = values if key.head is None else values[key.head]
        return out


def _host(x: Tensor) -> Tensor:
    return x.to("cpu", non_blocking=True)


def _to_host(cut: AttentionSlice) -> AttentionSlice:
    tensors = {n: _host(x) for n in AttentionSlice.__slots__ if isinstance(x := getattr(cut, n), Tensor)}
    mask = cut.call.attn_mask
    return replace(cut, call=replace(cut.call, attn_mask=None if mask is None else _host(mask)), **tensors)


def score_slice(cut: AttentionSlice, skip: int = 1) -> tuple[SourceScore, Tensor]:
    """The bias score of a complete slice and its `mismatch` per head, float64 (H,).

    Raises ValueError for a slice whose gradients have not arrived.
    """
    if cut.grad_out is None or cut.grad_q is None:
        raise ValueError("the gradients of this slice have not arrived")
    call = cut.call
    reference = Reference(
        cut.q, cut.k, cut.v, scale=call.scale, causal=call.is_causal, mask=call.attn_mask, rows=cut.rows
    )
    return reference.score(cut.grad_out, cut.grad_q, skip=skip), reference.mismatch(cut.out)


def shadow_slice(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, call: AttentionCall = CAUSAL
) -> AttentionSlice:
    """Run `kernel` on copies, outside every graph and with the random state put back: the run is not touched.

    q, grad_out (B, H, T, d); k, v (B, KV, T, d). `call` says what the kernel computes; it is not passed on.
    """
    with torch.random.fork_rng([q.device] if q.is_cuda else []), torch.enable_grad():
        q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
        out = unwatched(kernel)(q, k, v)
        (grad_q,) = torch.autograd.grad(out, q, grad_out.detach())
    rows = torch.arange(q.shape[2], device=q.device)
    return AttentionSlice(
        q.detach(), k.detach(), v.detach(), out.detach(), rows, call, grad_q, grad_out.detach()
    )


def shadow_score(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, call: AttentionCall = CAUSAL
) -> SourceScore:
    """The bias score of `kernel` on this slice, by shadow execution; see `shadow_slice`."""
    return score_slice(shadow_slice(kernel, q, k, v, grad_out, call))[0]
