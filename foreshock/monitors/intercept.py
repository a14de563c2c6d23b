"""One interception of every attention call, shared by the source probe, the exposures and the upcast.

First stop of the road, and, through `upcast`, the hand that remediation uses on a live model. A site whose
module holds its attention callable gets that attribute shadowed; a site that calls PyTorch's
`scaled_dot_product_attention` runs its forward under a mode that sees that function only. Watching copies
slices and never changes a value: a watched run is bit-identical to an unwatched one.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from foreshock.monitors.sites import AttentionSite

log = logging.getLogger(__name__)
How = Literal["float32", "stabilised"]
Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q, k, v) -> out; q, out (B, H, T, d), k, v (B, KV, T, d)."""
_EXPOSURES = ("lse", "max_logit")
_ABSENT = object()


class Unavailable(RuntimeError):
    """An action cannot be done at this site; the message says why."""


@dataclass(frozen=True)
class AttentionCall:
    """How attention was asked for beside q, k, v: the arguments of `scaled_dot_product_attention`."""

    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


CAUSAL = AttentionCall(is_causal=True)


@dataclass(slots=True, eq=False)
class AttentionSlice:
    """What a kernel took and returned for the first S sequences of a batch, on R query rows.

    q, out, grad_q, grad_out (S, H, R, d); k, v (S, KV, T, d); `rows` (R,) the positions of the query rows.
    q, k, v are in the dtype that the kernel computes from. The gradients arrive during backward.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    rows: Tensor
    call: AttentionCall
    grad_q: Tensor | None = None
    grad_out: Tensor | None = None


def exact_attention(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """Attention through an exact float32 softmax, in the dtype that the call would have returned.

    Differentiable. Its products follow `torch.set_float32_matmul_precision`.
    """
    wide, mask = torch.promote_types(q.dtype, torch.float32), call.attn_mask
    if mask is not None and mask.is_floating_point():
        call = replace(call, attn_mask=mask.to(wide))
    with torch.autocast(q.device.type, enabled=False), sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(q.to(wide), k.to(wide), v.to(wide), **vars(call))
    return out.to(_autocast_dtype(q))


def sampled_rows(length: int, limit: int, device: torch.device | None = None) -> Tensor:
    """At most `limit` evenly spaced positions of a sequence, first and last included, int64 (R,)."""
    rows = torch.arange(min(length, limit), device=device)
    return rows if length <= limit else rows * (length - 1) // max(limit - 1, 1)


def _autocast_dtype(q: Tensor) -> torch.dtype:
    """The dtype in which `scaled_dot_product_attention` would compute for this q."""
    if q.dtype is not torch.float64 and torch.is_autocast_enabled(q.device.type):
        return torch.get_autocast_dtype(q.device.type)
    return q.dtype


def _bind(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return query, key, value, AttentionCall(*args, **kwargs)


class _Shadow:
    """Stands in for a callable: attributes are the original's, and so is a deep copy."""

    __slots__ = ("_foreshock",)

    def __init__(self, original: Any, serve: Callable[..., Tensor]) -> None:
        object.__setattr__(self, "_foreshock", (original, serve))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._foreshock[1](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_foreshock":
            raise AttributeError(name)
        return getattr(self._foreshock[0], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._foreshock[0], name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._foreshock[0], memo)

    @property
    def __wrapped__(self) -> Any:
        return self._foreshock[0]


def unwatched(kernel: Any) -> Any:
    """The callable behind an interception, or `kernel` itself."""
    return kernel.__wrapped__ if isinstance(kernel, _Shadow) else kernel


class _SdpaMode(TorchFunctionMode):
    """Sees `scaled_dot_product_attention`, passes everything else through."""

    def __init__(self, tap: _Tap) -> None:
        super().__init__()
        self.tap = tap

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        q, k, v, call = _bind(*args, **kwargs)
        return self.tap.attend(lambda *qkv: func(*qkv, **vars(call)), q, k, v, call)


class _Tap:
    """One site: its patch, what it has captured, and how its attention is computed now."""

    def __init__(self, site: AttentionSite) -> None:
        self.site = site
        self.name = site.call or "forward"
        self.previous = vars(site.module).get(self.name, _ABSENT)
        self.kernel = getattr(site.module, self.name)
        self.exposes = tuple(x for x in _EXPOSURES if site.call is not None and hasattr(self.kernel, x))
        self.sequences, self.row_limit = 0, 0
        self.exposing = True
        self.how: How | None = None
        self.captured: AttentionSlice | None = None
        self.exposed: dict[str, Tensor] = {}
        self.calls = 0
        self.failure: str | None = None
        self.limits: list[str] = []
        self.shadow = _Shadow(self.kernel, self.forward if site.call is None else self.call)
        # The instance dictionary goes before registered submodules: parameters and state_dict do not change.
        vars(site.module)[self.name] = self.shadow

    def remove(self) -> None:
        self.sequences, self.how, self.exposes = 0, None, ()
        own = vars(self.site.module)
        if own.get(self.name) is not self.shadow:
            return  # someone patched over us: our shadow now only passes calls on
        if self.previous is _ABSENT:
            del own[self.name]
        else:
            own[self.name] = self.previous

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.sequences and self.how is None:
            return self.kernel(*args, **kwargs)
        with _SdpaMode(self):
            return self.kernel(*args, **kwargs)

    def call(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        call = replace(CAUSAL, enable_gqa=k.shape[1] != q.shape[1])
        return self.attend(lambda *qkv: self.kernel(*qkv, *args, **kwargs), q, k, v, call)

    def attend(self, run: Kernel, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        watched = torch.is_grad_enabled() and q.requires_grad and self.failure is None
        sampled = watched and self.sequences > 0
        if sampled and (why := _unmeasurable(q, k, v, call)):
            sampled = False
            self.say(f"attention of layer {self.site.layer} is not measured by the source probe: {why}")
        if sampled:
            q = q.view_as(
                q
            )  # an alias of the kernel's own, so that its hook sees this kernel's gradient alone
        if self.how is None:
            out = run(q, k, v)
        elif self.how == "stabilised":
            out = self.kernel.stabilised(q, k, v)
        else:
            out = exact_attention(q, k, v, call)
        if watched and self.exposing and self.exposes:
            with self.contained():
                self.accumulate(q, k)
        if sampled:
            with self.contained():
                self.capture(q, k, v, out, call)
        return out

    def accumulate(self, q: Tensor, k: Tensor) -> None:
        with torch.no_grad():
            if self.how == "float32":  # the kernel did not run: its exposures are what it would have seen
                keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
                scores = q.float() @ keys.float().mT * q.shape[-1] ** -0.5
                scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
                now = {"lse": scores.logsumexp(-1), "max_logit": scores.amax()}
            else:
                now = {x: torch.as_tensor(getattr(self.kernel, x), device=q.device) for x in self.exposes}
            if "lse" in self.exposes:
                n = torch.arange(1, q.shape[2] + 1, device=q.device).log()
                now["lse"] = (now["lse"].detach().float() - n).mean((0, 2))
            if "max_logit" in self.exposes:
                now["max_logit"] = now["max_logit"].detach().float().amax()
            for name in self.exposes:
                join = torch.add if name == "lse" else torch.maximum
                before = self.exposed.get(name)
                self.exposed[name] = now[name] if before is None else join(before.to(q.device), now[name])
            self.calls += 1

    def capture(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, call: AttentionCall) -> None:
        """Copy the slice now and its gradients when they come.

        Checkpointing runs the forward again inside backward: each call has its own slice, and only one whose
        gradients both arrive is published.
        """
        n, rows = self.sequences, sampled_rows(q.shape[2], self.row_limit, q.device)
        dtype = _autocast_dtype(q) if self.site.call is None and self.how is None else q.dtype
        mask = call.attn_mask
        if mask is not None:
            mask = mask.detach()[:n] if mask.ndim == 4 else mask.detach()
            mask = mask.index_select(-2, rows) if mask.ndim > 1 and mask.shape[-2] > 1 else mask.clone()
        cut = AttentionSlice(
            q=q.detach()[:n].index_select(2, rows).to(dtype),
            k=k.detach()[:n].to(dtype, copy=True),
            v=v.detach()[:n].to(dtype, copy=True),
            out=out.detach()[:n].index_select(2, rows),
            rows=rows,
            call=replace(call, attn_mask=mask),
        )

        def keep(name: str) -> Callable[[Tensor], None]:
            def hook(grad: Tensor) -> None:
                with self.contained():
                    setattr(cut, name, grad.detach()[:n].index_select(2, rows))
                    if cut.grad_q is not None and cut.grad_out is not None:
                        self.captured = cut

            return hook

        q.register_hook(keep("grad_q"))  # type: ignore[no-untyped-call]
        out.register_hook(keep("grad_out"))  # type: ignore[no-untyped-call]

    @contextmanager
    def contained(self) -> Iterator[None]:
        """Watching may fail, training may not: the site is given up, once and loudly."""
        try:
            yield
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            self.say(f"attention of layer {self.site.layer} is no longer watched: {self.failure}")

    def say(self, limit: str) -> None:
        """Once: what is not watched here, and why."""
        if limit not in self.limits:
            self.limits.append(limit)
            log.warning("%s", limit)


def _unmeasurable(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> str | None:
    """Why float64 cannot say what the kernel should return; None where it can."""
    if call.dropout_p:
        return "dropout inside attention makes every call another function"
    plain = all(type(x) is Tensor and x.ndim == 4 for x in (q, k, v))
    if not plain or not (call.attn_mask is None or type(call.attn_mask) is Tensor):
        return "its tensors are not plain (batch, heads, tokens, width)"
    return None


class Interceptor:
    """Patches every site at once and stays until `detach`. Raises ValueError for two sites of one layer."""

    def __init__(self, sites: Iterable[AttentionSite]) -> None:
        sites = list(sites)
        if len({site.layer for site in sites}) != len(sites):
            raise ValueError("two attention sites have the same layer index")
        self._taps = {site.layer: _Tap(site) for site in sites}

    def arm(self, sequences: int = 2, rows: int = 128, layers: Collection[int] | None = None) -> None:
        """Capture slices of the coming calls: the batch's first `sequences`, at most `rows` query rows.

        Of these layers, by default of all.
        """
        for layer in self._taps if layers is None else layers:
            tap = self._taps[layer]
            tap.sequences, tap.row_limit, tap.captured = sequences, rows, None

    def take(self) -> dict[int, AttentionSlice]:
        """Disarm, and hand over the last slice of each layer whose gradients both arrived."""
        taken = {layer: tap.captured for layer, tap in self._taps.items() if tap.captured is not None}
        self.arm(0, 0)
        return taken

    def exposes(self, layer: int) -> tuple[str, ...]:
        """Which of "lse" and "max_logit" the layer's kernel shows."""
        return self._taps[layer].exposes

    def expose(self, layers: Collection[int]) -> None:
        """From now on keep the exposures of these layers only; at first all are kept."""
        for layer, tap in self._taps.items():
            tap.exposing = layer in layers

    def drain(self, layer: int) -> dict[str, Tensor]:
        """Exposures since the last drain: `lse` (H,) mean of LSE - log n, `max_logit` () maximum, or none."""
        tap = self._taps[layer]
        exposed, calls = tap.exposed, tap.calls
        tap.exposed, tap.calls = {}, 0
        return {name: x / calls if name == "lse" else x for name, x in exposed.items()}

    def exposures(self) -> dict[str, Tensor]:
        """What `drain` would average: sums and maxima by "layer.name", calls by "layer.calls"."""
        state: dict[str, Tensor] = {}
        for layer, tap in self._taps.items():
            state |= {f"{layer}.{name}": x.clone() for name, x in tap.exposed.items()}
            state[f"{layer}.calls"] = torch.tensor(tap.calls)
        return state

    def load_exposures(self, state: Mapping[str, Tensor]) -> None:
        """Replace the exposures by these; an empty mapping forgets them."""
        for layer, tap in self._taps.items():
            names = [x for x in _EXPOSURES if tap.exposing and f"{layer}.{x}" in state]
            tap.exposed = {x: state[f"{layer}.{x}"].clone() for x in names}
            tap.calls = int(state.get(f"{layer}.calls", 0))

    @property
    def failures(self) -> dict[int, str]:
        """Layers whose watching failed and was given up, with the reason."""
        return {layer: tap.failure for layer, tap in self._taps.items() if tap.failure is not None}

    @property
    def limits(self) -> list[str]:
        """What is not watched, by layer and with the reason."""
        return [limit for tap in self._taps.values() for limit in tap.limits]

    @property
    def upcasted(self) -> dict[int, str]:
        """Layers whose attention is replaced now, and how."""
        return {layer: tap.how for layer, tap in self._taps.items() if tap.how is not None}

    def check(self, layers: Sequence[int], how: How = "float32") -> None:
        """Raises `Unavailable` where `upcast` would."""
        for layer in layers:
            if layer not in self._taps:
                raise Unavailable(f"layer {layer} has no attention site")
            tap = self._taps[layer]
            if how == "stabilised" and (tap.site.call is None or not hasattr(tap.kernel, "stabilised")):
                raise Unavailable(f"the attention of layer {layer} has no stabilised form; use float32")

    def upcast(self, layers: Sequence[int], how: How = "float32") -> None:
        """From the next call on, compute these layers' attention in float32 or by its stabilised form.

        All layers or none: raises `Unavailable` before anything is changed.
        """
        self.check(layers, how)
        for layer in layers:
            self._taps[layer].how = how

    def restore(self, layers: Sequence[int] | None = None) -> None:
        """Undo `upcast` for these layers, by default for all."""
        for layer in self._taps if layers is None else layers:
            self._taps[layer].how = None

    def detach(self) -> None:
        """Put every attribute back as it was found, upcasts included. Safe to call twice."""
        for tap in self._taps.values():
            tap.remove()
