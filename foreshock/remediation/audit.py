"""The hash chain under the audit log: last stop of the road, where every decision is put on record.

Takes what the hub wants remembered, seals it into an `AuditRecord` that names its predecessor's hash, and
says of a sequence of records whether it is still what was written. Pure: rows and files are the store's.

Without signatures the chain and its anchor find accidents and edits. An owner of the machine who rewrites
both, or forges a record of the journal's very last event, is not found.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

GENESIS = "0" * 64
"""The `previous` of the first record, whose sequence is 1."""

EXACT = 2**53 - 1
"""Largest integer that RFC 8785 writes: its numbers are float64."""


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One sealed fact. `time` in seconds since the epoch; `previous` and `hash` are 64 hex digits.

    `event` is the number of the journal event that caused it: records of one event are committed together.
    """

    sequence: int
    event: int
    time: float
    kind: str
    payload: dict[str, Any]
    previous: str
    hash: str


@dataclass(frozen=True, slots=True)
class Anchor:
    """The newest committed record, kept outside the database and written after each commit."""

    sequence: int = 0
    hash: str = GENESIS


@dataclass(frozen=True, slots=True)
class Verdict:
    """`records` held before the first bad one; `first_bad` is its sequence, None where all hold."""

    ok: bool
    records: int
    first_bad: int | None
    reason: str


def plain(value: Any) -> Any:
    """`value` as JSON that RFC 8785 can write; idempotent, and the same after a trip through text.

    NaN, infinities, integers beyond 2^53 and keys become strings; enums, arrays, sets and tuples become what
    they hold. Raises TypeError for anything else.

    >>> plain({"loss": float("nan"), 3: (1, 2**60)})
    {'loss': 'nan', '3': [1, '1152921504606846976']}
    """
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int):
        return int(value) if abs(value) <= EXACT else str(int(value))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=canonical)
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    raise TypeError(f"{type(value).__name__} has no JSON form for the audit log")


def canonical(value: Any) -> bytes:
    """RFC 8785 bytes of a plain value. Raises ValueError for what is not plain."""
    import rfc8785

    return rfc8785.dumps(value)


def parse(text: str) -> dict[str, Any]:
    """The object behind stored canonical JSON. Raises ValueError where `text` is not its exact form."""
    # RFC 8785 writes the float 1e17 as digits; no integer that large was ever sealed.
    value = json.loads(text, parse_int=lambda n: i if abs(i := int(n)) <= EXACT else float(n))
    if not isinstance(value, dict) or canonical(value).decode() != text:
        raise ValueError("not the canonical JSON of an object")
    return value


def seal(
    sequence: int, event: int, time: float, kind: str, payload: Mapping[str, Any], previous: str
) -> AuditRecord:
    """The next record: its hash is SHA-256 over the RFC 8785 JSON of everything but the hash."""
    record = AuditRecord(sequence, event, float(time), kind, plain(payload), previous, "")
    return replace(record, hash=_digest(record))


def verify(
    records: Iterable[AuditRecord], anchor: Anchor | None = None, newest_event: int | None = None
) -> Verdict:
    """Walks the chain in stored order and names the first record that is not as it was written.

    The chain must reach the anchor and match it, and may go on by one commit: a crash between commit and
    anchor. Records beyond it share one event, later than the anchored one and, where `newest_event` (the
    journal's last number) is given, equal to it, since no next event is journalled before the anchor is.
    """

    def broken(bad: int, reason: str) -> Verdict:
        return Verdict(False, bad - 1, bad, f"record {bad} {reason}")

    last = AuditRecord(0, 0, 0.0, "", {}, "", GENESIS)
    anchored_event, ahead = 0, newest_event
    walk = iter(records)
    for n, record in enumerate(walk, start=1):
        if record.sequence != n:
            return broken(n, f"is missing: record {record.sequence} stands in its place")
        if _digest(record) != record.hash:
            if record.previous == last.previous and _digest(replace(record, sequence=n - 1)) == record.hash:
                return broken(n - 1, "was inserted: the next one was written to follow the one before")
            return broken(n, "was altered or moved: it does not match its hash")
        if record.previous != last.hash:
            # Both match their own hash; the one that the rest of the chain was built on is the true one.
            after = next(walk, None)
            if n > 1 and record.hash == (after.previous if after else anchor and anchor.hash):
                return broken(n - 1, "was rewritten: the record after it was sealed on another one")
            return broken(n, "does not follow the record before it")
        if anchor and n == anchor.sequence:
            anchored_event = record.event
            if record.hash != anchor.hash:
                return broken(n, "is not the anchored one: it or an earlier one was rewritten")
        if anchor and n > anchor.sequence:
            ahead = record.event if ahead is None else ahead
            if record.event != ahead or record.event <= anchored_event:
                return broken(
                    n, f"was inserted: beyond the anchor at {anchor.sequence}, not of one last commit"
                )
        last = record
    n = last.sequence
    if anchor and n < anchor.sequence:
        return broken(n + 1, f"is missing: the tail was truncated, the anchor is at {anchor.sequence}")
    held = f"the anchor at {anchor.sequence} holds" if anchor else "no anchor was given"
    return Verdict(True, n, None, f"{n} records are as they were written; {held}")


def _digest(record: AuditRecord) -> str:
    sealed = {name: getattr(record, name) for name in AuditRecord.__slots__ if name != "hash"}
    try:
        return hashlib.sha256(canonical(sealed)).hexdigest()
    except (ValueError, RecursionError):
        return "not canonical"
