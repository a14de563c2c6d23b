"""Replay: fold a run's journal again and compare every audit record with what was written.

The hub is the same object, so an equal journal gives equal effects. A difference means another version, a
damaged journal or an edited log.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from foreshock.pipeline import codec
from foreshock.pipeline.events import Audit, Effect, Event, decode
from foreshock.pipeline.hub import Hub
from foreshock.pipeline.store import RunStore
from foreshock.remediation.audit import canonical


@dataclass(frozen=True, slots=True)
class Replay:
    """`events` folded, `records` compared; `difference` names the first record that differs, or None."""

    events: int
    records: int
    difference: str | None


def fold(store: RunStore) -> Iterator[tuple[int, Event, list[Effect], Hub]]:
    """Every journalled event with the effects that it has now, from the run's first state on."""
    hub = Hub("")
    start = store.first_snapshot()
    if start is not None:
        hub.load_state_dict(codec.loads(start))
    for number, kind, head, body in store.events(0):
        event = decode(kind, head, body)
        yield number, event, hub.handle(event), hub


def replay(store: RunStore) -> Replay:
    """Fold the whole journal and hold the result against the audit log, bit for bit."""
    written = store.audit()
    events = records = 0
    for number, event, effects, _ in fold(store):
        events += 1
        for effect in effects:
            if not isinstance(effect, Audit):
                continue
            records += 1
            record = next(written, None)
            if record is None:
                return Replay(
                    events, records, f"record {records} ({effect.kind}) is missing from the audit log"
                )
            now = (number, event.time, effect.kind, canonical(effect.payload))
            then = (record.event, record.time, record.kind, canonical(record.payload))
            if now != then:
                return Replay(
                    events,
                    records,
                    f"record {record.sequence}: {record.kind} was written, {effect.kind} is replayed",
                )
    extra = next(written, None)
    if extra is not None:
        return Replay(events, records, f"record {extra.sequence} ({extra.kind}) has no event behind it")
    return Replay(events, records, None)
