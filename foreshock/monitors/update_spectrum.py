"""The update spectrum: has a fault been written into the attention weights?

Probe of mechanism attention. A biased backward pass leaves a low-dimensional component in the updates of W_Q
and W_K, so the spectrum of the first-order term of the QK product concentrates before the loss moves (arXiv
2606.28116). The device side is one mean of the weights and a few small products; eigenvalues are taken where
the `Pending` is resolved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foreshock.monitors.probe import Copied, Pending
from foreshock.monitors.sites import AttentionSite, Masters
from foreshock.monitors.spectrum import Blocks, from_blocks, gram_blocks
from foreshock.signals import SignalKey

SIGNALS = ("h1", "hqv", "delta3", "coherence", "qk_norm")
_PARTS = ("q", "k", "v")


@dataclass(eq=False)
class _Track:
    """One measured site: the mean of its weights (q, k, v) and of its squared step lengths (q, v)."""

    index: int
    site: AttentionSite
    honest: bool
    mean: tuple[Tensor, ...] = ()
    energy: tuple[Tensor, ...] = ()
    before: tuple[Tensor, ...] = ()


class UpdateSpectrum:
    """Per layer and head, at steps divisible by `every`, over an exponential mean of the updates.

    `h1`: entropy of Delta2's spectrum; `hqv`: H(dW_Q) - H(dW_V); `delta3`: entropy of Delta3's spectrum;
    `coherence`: coh_Q - coh_V with coh = |mean update| / sqrt(mean |update|^2); `qk_norm`:
    sqrt(|W_Q|^2 + |W_K|^2). Per layer also the symptom `mlp_update`, |dW|/|W| of one step of an MLP weight.

    The update mean E (rate `beta` a step) needs no buffer of its own: with M the mean of the weights, E is
    proportional to W - M. M is touched at evaluations only, at rate 1 - (1 - beta)^every; while short it is
    held so that E is the plain mean. Signals of E start after 1/beta steps. Site i is measured by rank
    i % `world`; others hold no buffer and report NaN. `masters` maps low-precision parameters to their
    float32 copies. Any update that spans a reset or a skipped step is discarded.
    """

    name = "update_spectrum"

    def __init__(
        self,
        sites: Sequence[AttentionSite],
        *,
        every: int = 4,
        beta: float = 1 / 32,
        rank: int = 0,
        world: int = 1,
        masters: Masters | None = None,
    ) -> None:
        self._every, self._beta, self._masters = every, beta, masters
        self._rate = 1 - (1 - beta) ** every
        self._heads = tuple(s.heads for s in sites)
        self._with_mlp = tuple(i for i, s in enumerate(sites) if s.mlp is not None)
        self._keys = (
            *(SignalKey("attention", n, s.layer, h) for n in SIGNALS for s in sites for h in range(s.heads)),
            *(SignalKey("symptom", "mlp_update", sites[i].layer) for i in self._with_mlp),
        )
        exact = [all(x.dtype.itemsize >= 4 for x in _weights(s, masters)) for s in sites]
        self.honest = all(exact)
        """False where a site's updates cannot be read from its weights; `limits` says which and why."""
        self.limits = [
            f"{s.name}: h1, hqv, delta3 and coherence are not measured, because differences of {s.q().dtype} "
            "weights lose it to rounding (entropy 10 % too low at |dW|/|W| = 1e-4, 41 % at 1e-6), which "
            "reads as a collapse; pass masters={parameter: its float32 copy} to measure them"
            for s, ok in zip(sites, exact, strict=True)
            if not ok
        ]
        self._tracks = [_Track(i, sites[i], exact[i]) for i in range(rank, len(sites), world)]
        self._armed = self._updated = False
        self._measured: Pending | None = None
        self._count = -1  # evaluations since the mean was based on the weights; -1 = not based yet

    def keys(self) -> tuple[SignalKey, ...]:
        return self._keys

    def arm(self, step: int) -> None:
        self._armed = bool(self._tracks) and step % self._every == 0
        self._updated, self._measured = False, None

    def before_update(self) -> None:
        for t in self._tracks if self._armed else ():
            q, _, v = _weights(t.site, self._masters)
            mlp = self._mlp(t)
            t.before = tuple(x.clone() for x in ((q, v) if mlp is None else (q, v, mlp)))

    @torch.no_grad()
    def after_update(self) -> None:
        self._updated = True
        if not self._armed or not self._tracks[0].before:
            return
        self._count += 1
        rate = self._mean_rate(self._count)
        payload = [x for t in self._tracks for x in self._evaluate(t, rate)]
        ready = self._count * self._every * self._beta >= 1
        self._measured = _Evaluation(
            Copied(payload),
            tuple((t.index, t.honest and ready) for t in self._tracks),
            self._heads,
            self._with_mlp,
            rate / self._every,
        )

    def collect(self, step: int) -> Pending | None:
        if not self._updated:
            self.reset()
        measured, self._measured = self._measured, None
        return measured

    def reset(self) -> None:
        self._count, self._measured, self._armed = -1, None, False
        for t in self._tracks:
            t.mean = t.energy = t.before = ()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"count": self._count}
        for t in self._tracks:
            state |= {f"{t.index}.mean.{n}": x.clone() for n, x in zip(_PARTS, t.mean, strict=False)}
            state |= {f"{t.index}.energy.{n}": x.clone() for n, x in zip("qv", t.energy, strict=False)}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reset()
        known = all(
            getattr(state.get(f"{t.index}.mean.{n}"), "shape", None) == w.shape
            for t in self._tracks
            for n, w in zip(_PARTS, _weights(t.site, None), strict=True)
        )
        if state["count"] < 0 or not known:
            return
        self._count = state["count"]
        for t in self._tracks:
            device = t.site.q_parameter.device
            t.mean = tuple(state[f"{t.index}.mean.{n}"].to(device, copy=True) for n in _PARTS)
            t.energy = tuple(state[f"{t.index}.energy.{n}"].to(device, copy=True) for n in "qv")

    def detach(self) -> None:
        self.reset()
        self._tracks, self._masters = [], None

    def _mean_rate(self, count: int) -> float:
        return max(self._rate, 1 / count) if count else 0.0

    def _evaluate(self, t: _Track, rate: float) -> list[Tensor]:
        w = _weights(t.site, self._masters)
        length2 = tuple((x - b).square().sum((-2, -1)) for x, b in zip((w[0], w[2]), t.before, strict=False))
        if not t.mean:
            t.mean = tuple(x.to(torch.promote_types(x.dtype, torch.float32), copy=True) for x in w)
            t.energy = length2
        d = [x - m for x, m in zip(w, t.mean, strict=True)]
        blocks = gram_blocks(w[0], w[1], *d)
        if rate:
            # With E_j = r_j (W_j - M_j-1), this touch makes E_j+1 = (1 - r_j+1) E_j + r_j+1 U_j+1 exactly.
            after = self._mean_rate(self._count + 1)
            for m, x in zip(t.mean, d, strict=True):
                m.add_(x, alpha=1 - rate * (1 - after) / after)
            for e, x in zip(t.energy, length2, strict=True):
                e.lerp_(x, rate)
        mlp = self._mlp(t)
        norm = partial(torch.linalg.vector_norm, dtype=torch.float32)
        step = () if mlp is None else (norm(mlp - t.before[2]), norm(t.before[2]))
        t.before = ()
        return [*blocks, *t.energy, *step]

    def _mlp(self, t: _Track) -> Tensor | None:
        weight = t.site.mlp
        return None if weight is None else (self._masters or {}).get(weight, weight).detach()


@dataclass(frozen=True, eq=False)
class _Evaluation:
    """One evaluation in flight. It shares no state with the probe, so another thread may resolve it."""

    copied: Copied
    tracks: tuple[tuple[int, bool], ...]
    heads: tuple[int, ...]
    with_mlp: tuple[int, ...]
    rate: float
    """Turns |W - M| into the length of the mean update of one step."""

    def resolve(self) -> NDArray[np.float64]:
        columns = np.cumsum([0, *self.heads])
        values = np.full((len(SIGNALS), columns[-1]), np.nan)
        mlp = dict.fromkeys(self.with_mlp, np.nan)
        tensors = iter(self.copied.tensors())
        for i, ready in self.tracks:
            s = from_blocks(Blocks(*(next(tensors) for _ in Blocks._fields)))
            energy_q, energy_v = (next(tensors).double() for _ in "qv")
            energy_v = energy_v.repeat_interleave(len(energy_q) // len(energy_v))
            coherence = self.rate * (s.dq / energy_q.sqrt() - s.dv / energy_v.sqrt())
            spectral = torch.stack([s.h1, s.hq - s.hv, s.h3, coherence])
            # An update of zero has no spectrum (NaN); weights that are not finite were measured as such.
            broken = ~torch.stack(s[4:]).isfinite().all(0)
            here = values[:, columns[i] : columns[i + 1]]
            if ready:
                here[:-1] = torch.where(broken, torch.inf, spectral).numpy()
            here[-1] = torch.where(broken, torch.inf, torch.hypot(s.q, s.k)).numpy()
            if i in mlp:
                step, norm = (float(next(tensors)) for _ in range(2))
                finite = np.isfinite([step, norm]).all()
                mlp[i] = np.inf if not finite else step / norm if norm else np.nan
        return np.concatenate([values.ravel(), list(mlp.values())])


def _weights(site: AttentionSite, masters: Masters | None) -> tuple[Tensor, Tensor, Tensor]:
    return site.q(masters), site.k(masters), site.v(masters)
