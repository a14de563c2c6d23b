"""Policies: what may be done about a diagnosis, written by the user, checked before it is believed.

Diagnoses come in from detectors; decisions go out to remediation. No torch, no Ray.
"""

from __future__ import annotations

from foreshock.policies.actions import ACTIONS, Action, ActionSpec
from foreshock.policies.explain import explain
from foreshock.policies.loader import (
    SHIPPED,
    PolicyError,
    Problem,
    load,
    loads,
    resolve,
    shipped,
    source_text,
)
from foreshock.policies.models import Approval, Budget, Match, Mode, Policy, PolicySet, Rung, Verify
from foreshock.policies.schema import json_schema

__all__ = [
    "ACTIONS",
    "SHIPPED",
    "Action",
    "ActionSpec",
    "Approval",
    "Budget",
    "Match",
    "Mode",
    "Policy",
    "PolicyError",
    "PolicySet",
    "Problem",
    "Rung",
    "Verify",
    "explain",
    "json_schema",
    "load",
    "loads",
    "resolve",
    "shipped",
    "source_text",
]
