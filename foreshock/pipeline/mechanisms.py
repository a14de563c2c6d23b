"""Joins what a mechanism consists of by one name: its probes, its signature, its shipped policy.

Installed packages add mechanisms through the entry point group `foreshock.mechanisms`; each names a function
that returns a `Mechanism`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn

    from foreshock.monitors.intercept import Interceptor
    from foreshock.monitors.probe import Probe

log = logging.getLogger("foreshock")
GROUP = "foreshock.mechanisms"
FEW = 4
"""Ranks up to which each measures every layer's kernel."""


@dataclass
class Attached:
    """What a mechanism hung on one rank's model. `limits` are sentences about what is not watched."""

    probes: list[Probe] = field(default_factory=list)
    interceptor: Interceptor | None = None
    layers: tuple[int, ...] = ()
    limits: list[str] = field(default_factory=list)


class Attach(Protocol):
    """Discovers and hooks on the model of data-parallel rank `rank` of `world`, which deal the work.

    Every mechanism accepts both keywords; its keys are the same on every rank.
    """

    def __call__(
        self,
        model: nn.Module,
        sites: Sequence[Any] | None,
        masters: Mapping[Any, Any] | None,
        *,
        rank: int = 0,
        world: int = 1,
    ) -> Attached: ...


@dataclass(frozen=True)
class Mechanism:
    """`attach` hangs its probes on one rank; `policy` is the shipped policy's name."""

    name: str
    policy: str
    attach: Attach


def attention() -> Mechanism:
    return Mechanism("attention", "attention-low-precision", _attach_attention)


def installed() -> list[Mechanism]:
    """Every mechanism of every installed package, by name. This package's own is there without installation."""
    found: dict[str, Mechanism] = {"attention": attention()}
    for entry in entry_points(group=GROUP):
        if entry.name not in found:
            try:
                found[entry.name] = entry.load()()
            except Exception:
                log.exception("mechanism %s of %s cannot be used", entry.name, entry.value)
    return [found[name] for name in sorted(found)]


def _attach_attention(
    model: nn.Module,
    sites: Sequence[Any] | None,
    masters: Mapping[Any, Any] | None,
    *,
    rank: int = 0,
    world: int = 1,
) -> Attached:
    from foreshock.monitors.intercept import Interceptor
    from foreshock.monitors.sites import SitesUnknown, discover
    from foreshock.monitors.source_probe import SourceProbe
    from foreshock.monitors.update_spectrum import UpdateSpectrum

    try:
        found = discover(model, sites)
    except SitesUnknown as unknown:
        if sites is not None:
            raise  # the user's own argument is wrong; a model that we do not know is not the user's fault
        return Attached(limits=[f"attention is not watched: {unknown}"])
    interceptor = Interceptor(found)
    spectrum = UpdateSpectrum(found, rank=rank, world=world, masters=masters)
    # Beyond a few ranks their scores are averaged (`Detectors`), and a mean dilutes one bad rank: then one measures.
    source = SourceProbe(interceptor, found, rank=rank, world=world, copies=FEW if world <= FEW else 1)
    return Attached(
        probes=[source, spectrum],
        interceptor=interceptor,
        layers=tuple(site.layer for site in found),
        limits=list(spectrum.limits),
    )
