"""What ranks, relays and the hub's actor say to each other: plain values and bytes only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from foreshock.pipeline.events import Event, Frames, decode, encode

VERSION = 1
"""Of this exchange. Where it differs, a rank does not watch, and says so."""

Item = bytes | tuple[str, dict[str, Any], bytes]
"""A frame as `SignalFrame.to_bytes` writes it, or any other event as `events.encode` does."""


@dataclass(slots=True)
class Batch:
    """Numbered events of one or several sources ("<attempt>/<rank>") of one attempt."""

    attempt: int
    items: dict[str, list[tuple[int, Item]]]
    facts: dict[str, Any] | None = None
    leaving: tuple[int, ...] = ()
    """Ranks that have nothing more to say after this."""
    version: int = VERSION


@dataclass(slots=True)
class Reply:
    """How far each source is taken, and what the hub wants now."""

    acked: dict[str, int] = field(default_factory=dict)
    command: dict[str, Any] | None = None
    acting: bool = False
    kept: list[str] = field(default_factory=list)
    failure: str | None = None
    stale: bool = False
    """Another attempt has begun: nothing of this one counts any more."""
    version: int = VERSION


def pack(event: Event) -> Item:
    """The item of a rank's event; its frame events hold one frame."""
    if isinstance(event, Frames):
        (frame,) = event.frames
        return frame.to_bytes()
    return encode(event)


def unpack(item: tuple[str, dict[str, Any], bytes]) -> Event:
    return decode(*item)
