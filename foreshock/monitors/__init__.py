"""What a rank measures: where attention is, and the probes that watch it. Needs torch.

The road's first room: probes hand `Pending` values, which the emitter turns into `SignalFrame`s.
"""

from __future__ import annotations

from foreshock.monitors.intercept import Interceptor
from foreshock.monitors.kernels import check_kernels
from foreshock.monitors.probe import Pending, Probe
from foreshock.monitors.sites import AttentionSite, SiteSpec, SitesUnknown, discover
from foreshock.monitors.source import bias_score
from foreshock.monitors.source_probe import SourceProbe
from foreshock.monitors.spectrum import (
    entropy,
    first_order_singular_values,
    from_blocks,
    gram_blocks,
    second_order_singular_values,
    update_entropy,
)
from foreshock.monitors.symptoms import Symptoms
from foreshock.monitors.update_spectrum import UpdateSpectrum

__all__ = [
    "AttentionSite",
    "Interceptor",
    "Pending",
    "Probe",
    "SiteSpec",
    "SitesUnknown",
    "SourceProbe",
    "Symptoms",
    "UpdateSpectrum",
    "bias_score",
    "check_kernels",
    "discover",
    "entropy",
    "first_order_singular_values",
    "from_blocks",
    "gram_blocks",
    "second_order_singular_values",
    "update_entropy",
]
