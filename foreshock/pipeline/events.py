"""What goes into the hub (`Event`) and what comes out (`Effect`), and how events are written to the journal.

Every event carries the time its shell stamped on it, because the hub has no clock. `encode` and `decode` are
exact inverses: a replayed event is the event.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from foreshock.remediation.types import Command
from foreshock.signals import SignalFrame, SignalTable

VERSION = 2
"""Of the journal's events. A journal of another version is not replayed."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A new attempt began. `allow` is the mode the code permits; `unavailable` names actions and why not.

    `rows` are the ranks whose frames arrive: all of them, or each node's first where relays merge a node's frames.
    """

    time: float
    attempt: int
    ranks: tuple[int, ...]
    table: SignalTable
    allow: str
    step: int = 0
    unavailable: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    rows: tuple[int, ...] = ()

    @property
    def sources(self) -> tuple[int, ...]:
        return self.rows or self.ranks


@dataclass(frozen=True, slots=True)
class Frames:
    time: float
    frames: tuple[SignalFrame, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    time: float


@dataclass(frozen=True, slots=True)
class Ack:
    """A rank's word on a command: applied (at `step`), failed, refused, or "point broken" (`detail` names it).

    "disabled" is not about `command`, which is empty: the rank applies nothing more in this attempt, and `detail`
    says why.
    """

    time: float
    command: str
    rank: int
    result: str
    step: int
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecoveryPoint:
    """A rank's part of a recovery point is durable on disk. The state before step `step` runs."""

    time: float
    rank: int
    id: str
    timeline: int
    step: int
    batches: int
    finite: bool
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Another experiment's word on a mechanism (`mechanism`, `confirms`, `text`): recorded beside the incident."""

    time: float
    mechanism: str
    confirms: bool
    text: str


@dataclass(frozen=True, slots=True)
class Human:
    """A person's command: approve, reject (argument: the decision), mode (argument: the mode)."""

    time: float
    verb: str
    argument: str
    who: str


@dataclass(frozen=True, slots=True)
class Announcement:
    """The trainer says that something is about to change on purpose, for `steps` steps."""

    time: float
    text: str
    step: int
    steps: int


@dataclass(frozen=True, slots=True)
class PolicyLoaded:
    """The policy's own text, so that a replay needs nothing else."""

    time: float
    text: str
    source: str


Event = Hello | Frames | Tick | Ack | RecoveryPoint | Confirmation | Human | Announcement | PolicyLoaded
_KINDS: dict[str, type] = {
    c.__name__: c
    for c in (Hello, Frames, Tick, Ack, RecoveryPoint, Confirmation, Human, Announcement, PolicyLoaded)
}


@dataclass(frozen=True, slots=True)
class Audit:
    """Write this record; it must be durable before any later effect of the same event is carried out."""

    kind: str
    payload: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Issue:
    command: Command


@dataclass(frozen=True, slots=True)
class Notify:
    receivers: tuple[str, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Save the hub's state now, so that recovery need not replay the whole journal."""


Effect = Audit | Issue | Notify | Snapshot


def encode(event: Event) -> tuple[str, dict[str, Any], bytes]:
    """(kind, JSON head, binary body) of an event."""
    kind = type(event).__name__
    head: dict[str, Any] = {name: getattr(event, name) for name in event.__slots__}
    body = b""
    if isinstance(event, Frames):
        parts = [f.to_bytes() for f in event.frames]
        head["frames"] = [len(p) for p in parts]
        body = b"".join(parts)
    elif isinstance(event, Hello):
        head["table"] = event.table.to_json()
        head["ranks"], head["rows"] = list(event.ranks), list(event.rows)
    return kind, head, body


def decode(kind: str, head: dict[str, Any], body: bytes) -> Event:
    """The inverse of `encode`. Raises ValueError for an unknown kind or a body that does not fit."""
    if kind not in _KINDS:
        raise ValueError(f"unknown journal event {kind!r}: written by a newer version")
    fields = dict(head)
    if kind == "Frames":
        cuts, at = [], 0
        for size in head["frames"]:
            cuts.append(body[at : at + size])
            at += size
        fields["frames"] = tuple(SignalFrame.from_bytes(part) for part in cuts)
    elif kind == "Hello":
        fields["table"] = SignalTable.from_json(head["table"])
        fields["ranks"], fields["rows"] = tuple(head["ranks"]), tuple(head["rows"])
    event: Event = _KINDS[kind](**fields)
    return event
