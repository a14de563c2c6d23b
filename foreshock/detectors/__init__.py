"""Second floor of the road: closed steps -> residuals -> alarms -> diagnoses. No torch, Ray, I/O.

`Detectors` is the one object that a hub holds; the rest are its parts, usable alone.
"""

from __future__ import annotations

from foreshock.detectors.absolute import HQV, MISMATCH, AbsoluteDetector, AbsoluteRule
from foreshock.detectors.bank import Bank
from foreshock.detectors.chain import Detectors, Report
from foreshock.detectors.diagnosis import diagnose
from foreshock.detectors.gate import NonFiniteGate
from foreshock.detectors.null import SourceDetector
from foreshock.detectors.onset import onset_interval
from foreshock.detectors.residual import Residual
from foreshock.detectors.river_adapter import RiverDetector
from foreshock.detectors.shiryaev import ShiryaevRoberts, ShiryaevRobertsBank
from foreshock.detectors.signature import SIGNATURES, Signature
from foreshock.detectors.spec import ATTENTION, DEFAULT, SYMPTOMS, SignalSpec
from foreshock.detectors.types import Alarm, Diagnosis, Interval, Mechanism, Severity

__all__ = [
    "ATTENTION",
    "DEFAULT",
    "HQV",
    "MISMATCH",
    "SIGNATURES",
    "SYMPTOMS",
    "AbsoluteDetector",
    "AbsoluteRule",
    "Alarm",
    "Bank",
    "Detectors",
    "Diagnosis",
    "Interval",
    "Mechanism",
    "NonFiniteGate",
    "Report",
    "Residual",
    "RiverDetector",
    "Severity",
    "ShiryaevRoberts",
    "ShiryaevRobertsBank",
    "SignalSpec",
    "Signature",
    "SourceDetector",
    "diagnose",
    "onset_interval",
]
