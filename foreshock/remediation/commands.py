"""From a decision's words to a command's facts: which layers, which recovery point, which batches. Pure."""

from __future__ import annotations

from typing import Any

from foreshock.detectors.types import Diagnosis
from foreshock.remediation.points import PointLedger

EXPIRES = 64
"""Steps after which a rank refuses a command that it has not applied."""

NOT_BUILT = {
    "router_restore": "needs the router monitor, which this version does not have",
    "router_rescale": "needs the router monitor, which this version does not have",
    "router_reinit": "needs the router monitor, which this version does not have",
    "qk_clip": "needs the attention-logit mechanism, which this version does not have",
}


class Unavailable(Exception):
    """The action cannot be done here and now; the message says why."""


def resolve(
    name: str,
    arguments: dict[str, Any],
    diagnosis: Diagnosis,
    ledger: PointLedger,
    step: int,
    cannot: dict[str, str],
) -> dict[str, Any]:
    """The arguments with nothing left to look up, at trainer step `step`.

    `cannot` is what the attempt's ranks said they are unable to do. Raises Unavailable.
    """
    for reasons in (NOT_BUILT, cannot):
        if name in reasons:
            raise Unavailable(f"{name}: {reasons[name]}")
    onset = diagnosis.onset.early
    if name == "precision_upcast":
        everywhere = arguments["target"] == "all" or not diagnosis.layers
        return {"layers": None if everywhere else list(diagnosis.layers), "how": arguments["dtype"]}
    if name == "rollback":
        point = ledger.choose(onset, step, frozenset({str(diagnosis.mechanism)}))
        if point is None:
            raise Unavailable(
                f"rollback: no recovery point at or before step {onset} is vouched for by every monitor"
            )
        skip = [onset, step] if arguments["skip_data"] == "window" else None
        return {"point": point.id, "step": point.step, "skip": skip}
    if name == "skip_data":
        return {"from": onset, "to": step + 1}
    if name == "lr_scale":
        if arguments["target"] == "router":
            raise Unavailable("lr_scale: this version finds no router parameters")
        return {
            "target": arguments["target"],
            "layers": list(diagnosis.layers),
            "factor": arguments["factor"],
        }
    return dict(arguments)
