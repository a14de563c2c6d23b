"""The shell around the hub: journal, audit, snapshot, recovery, and carrying effects out.

The same in the training process and in the hub's actor. One event at a time. Its journal row, its audit records and any snapshot are one transaction, committed before
the first of its other effects is carried out. Events without effects are committed in batches: losing the last
few of them in a crash loses measurements, never a decision. What `deliver` has acknowledged is committed.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import foreshock
from foreshock.pipeline import codec
from foreshock.pipeline.events import (
    VERSION,
    Audit,
    Effect,
    Event,
    Frames,
    Hello,
    Human,
    Issue,
    Notify,
    Snapshot,
    decode,
    encode,
)
from foreshock.pipeline.hub import Hub
from foreshock.pipeline.store import RunStore, StoreError
from foreshock.policies.models import Mode
from foreshock.remediation.types import Command

if TYPE_CHECKING:
    from foreshock.pipeline.signal_files import SignalWriter

log = logging.getLogger("foreshock")

VERSIONS = f"{foreshock.__version__}/{VERSION}"
BATCH = 64
POLL_SECONDS = 1.0
COMMIT_SECONDS = 1.0


class Shell:
    """Runs one hub over one run directory. Calls may come from several threads; they are taken one by one.

    Never raises after construction. `failure` says why nothing is decided any more (a defect in the hub, or a
    disk that cannot be written): from then on no command is issued and notifications say that they are unaudited.
    """

    def __init__(self, directory: Path, run: str, issue: Callable[[Command], None]) -> None:
        self.directory = directory
        self.hub = Hub(run)
        self.failure: str | None = None
        self.unaudited = False
        self._facts: dict[str, Any] = {}
        self._issue = issue
        self._lock = threading.RLock()
        self._buffer: list[Event] = []
        self._polled = self._committed = 0.0
        self._store: RunStore | None = None
        self._signals: SignalWriter | None = None
        self.attempt = 0
        """The newest attempt that began."""
        self._nonce = ""
        self._delivered: dict[str, int] = {}
        self._fresh: dict[str, int] = {}
        """What of `_delivered` is not committed yet."""
        self._claim: IO[str] | None = None
        try:
            self._claim = _claim(directory)
            self._store = RunStore(directory)
            self._recover()
        except (StoreError, OSError) as error:
            self._lose_disk(error)
        except Exception as error:
            self._stop(f"the run in {directory} cannot be taken up again: {type(error).__name__}: {error}")

    @property
    def acting(self) -> bool:
        """Whether a command may be applied now: the hub works, its record too, and nobody lowered the mode."""
        return self.failure is None and self.hub.engine is not None and self.hub.engine.mode is Mode.ENFORCE

    def begin(self, nonce: str) -> int:
        """A new attempt of the run: its number. Asked again with the same `nonce`, the same number."""
        with self._lock:
            if nonce != self._nonce:
                self._nonce, self.attempt = nonce, self.attempt + 1
                self._delivered, self._fresh = {}, {}
                if self._store is not None and not self.unaudited:
                    try:
                        with self._store.transaction():
                            self._store.set_meta("attempt", json.dumps([self.attempt, nonce]))
                            self._store.forget_deliveries()
                    except StoreError as error:
                        self._lose_disk(error)
            return self.attempt

    def push(self, kind: str, payload: Mapping[str, Any]) -> int:
        """Leave a person's request in the inbox; its id. Raises StoreError."""
        if self._store is None:
            raise StoreError(self.failure or "the record is closed")
        return self._store.push(kind, payload)

    def seed(self, state: dict[str, Any]) -> None:
        """Start this run from another hub's state (a fork): it becomes snapshot 0."""
        self.hub.load_state_dict(state)
        if self._store is not None:
            self._store.save_snapshot(0, codec.dumps(state), VERSIONS)

    def submit(self, event: Event) -> None:
        """Journal, handle, record, carry out."""
        with self._lock:
            if self.failure is None or self.unaudited:
                self._submit(event)
            self._listen()

    def deliver(self, events: Iterable[tuple[Event, Mapping[str, int]]]) -> None:
        """Handle events in order, and commit them with how far each source now is: they may be acknowledged then.

        `delivered` says what was taken before; handing an event in twice is the caller's to avoid.
        """
        with self._lock:
            for event, sources in events:
                self._delivered.update(sources)
                self._fresh.update(sources)
                self.submit(event)
            self._listen()
            if self._buffer and not self.unaudited:
                try:
                    self._commit([], status="running" if self.failure is None else "failed")
                except StoreError as error:
                    self._lose_disk(error)

    @property
    def delivered(self) -> Mapping[str, int]:
        """How far each source's events are taken."""
        return self._delivered

    def close(self) -> None:
        with self._lock:
            if self._signals is not None:
                self._keep(self._signals.close)
            if self._store is not None:
                try:
                    self._commit([], status="ended")
                except StoreError as error:
                    self._lose_disk(error)
                self._store.close()
            if self._claim is not None:
                self._claim.close()

    def publish(self, status: dict[str, Any]) -> None:
        """What the rank side knows (limits, settings, coverage), shown by `foreshock status`."""
        with self._lock:
            self._facts = status
            if self._store is not None and not self.unaudited:
                try:
                    self._commit([], status="running")
                except StoreError as error:
                    self._lose_disk(error)

    # -----------------------------------------------------------------------------------------------------

    def _submit(self, event: Event) -> None:
        self._carry_out(self._handle(event))
        if isinstance(event, Hello):
            from foreshock.pipeline.signal_files import SignalWriter

            if self._signals is not None:
                self._keep(self._signals.close)
            self._signals = SignalWriter(self.directory, event.table)
        elif isinstance(event, Frames) and self._signals is not None:
            for frame in event.frames:
                if frame.table == self.hub.hello.table.id:  # type: ignore[union-attr]
                    self._keep(partial(self._signals.append, frame))

    def _keep(self, write: Callable[[], None]) -> None:
        """Signals at rest are for pictures: a full disk loses them, and nothing else."""
        try:
            write()
        except (OSError, ValueError) as error:
            if self._signals is not None:
                log.error("signals are not kept: %s", error)
            self._signals = None

    def _handle(self, event: Event) -> list[Effect]:
        """Fold the event in and commit what it caused; the effects that may now be carried out."""
        self._buffer.append(event)
        try:
            effects = self.hub.handle(event)
        except Exception as error:
            log.exception("the hub failed on %s", type(event).__name__)
            self._buffer.pop()  # the journal stays one that folds: a run can be taken up again
            self._stop(f"{type(error).__name__}: {error}")
            return []
        try:
            late = time.monotonic() - self._committed >= COMMIT_SECONDS
            if effects or late or len(self._buffer) >= BATCH:
                self._commit(effects, status="running")
        except StoreError as error:
            self._lose_disk(error)
        except BaseException as error:  # the hub has moved on and its record has not: nothing more may follow
            self._lose_disk(error)
            if not isinstance(error, Exception):
                raise
            return []
        return effects

    def _commit(self, effects: list[Effect], status: str) -> None:
        if self._store is None or self.unaudited:
            self._buffer.clear()
            return
        with self._store.transaction():
            number, stamp = 0, 0.0
            for event in self._buffer:
                number, stamp = self._store.append_event(*encode(event)), event.time
            for effect in effects:
                if isinstance(effect, Audit):
                    self._store.append_audit(number, stamp, effect.kind, effect.payload)
                elif isinstance(effect, Snapshot):
                    self._store.save_snapshot(number, codec.dumps(self.hub.state_dict()), VERSIONS)
            if self._fresh:
                self._store.set_deliveries(self._fresh)
            self._store.set_meta("status", json.dumps(self.status(status)))
        self._buffer.clear()
        self._fresh = {}
        self._committed = time.monotonic()

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Issue) and not self.unaudited:
                self._issue(effect.command)
            elif isinstance(effect, Notify):
                log.warning(
                    "%s%s", "UNAUDITED (the disk cannot be written): " if self.unaudited else "", effect.text
                )

    def _listen(self) -> None:
        """Look, not too often, whether a person left a request."""
        now = time.monotonic()
        if self._store is not None and self.failure is None and now - self._polled >= POLL_SECONDS:
            self._polled = now
            self._read_inbox()

    def _read_inbox(self) -> None:
        """Each request is taken and journalled in one transaction: answered once, and never lost."""
        assert self._store is not None
        try:
            while self._store.pending():
                effects: list[Effect] = []
                with self._store.transaction():
                    for item in self._store.take(limit=1):
                        who, argument = (
                            str(item.payload.get("who", "?")),
                            str(item.payload.get("argument", "")),
                        )
                        effects = self._handle(Human(item.time, item.kind, argument, who))
                self._carry_out(effects)
        except StoreError as error:
            self._lose_disk(error)

    def _recover(self) -> None:
        assert self._store is not None
        snapshot = self._store.latest_snapshot(VERSIONS)
        after = 0
        if snapshot is not None:
            after = snapshot[0]
            self.hub.load_state_dict(codec.loads(snapshot[1]))
        for _, kind, head, body in self._store.events(after):
            self.hub.handle(decode(kind, head, body))
        self._delivered = self._store.deliveries()
        begun = self.hub.hello.attempt if self.hub.hello else 0
        self.attempt, self._nonce = json.loads(self._store.get_meta("attempt") or f'[{begun}, ""]')
        if self.hub.hello is not None:
            from foreshock.pipeline.signal_files import SignalWriter

            self._signals = SignalWriter(self.directory, self.hub.hello.table)

    def _stop(self, reason: str) -> None:
        self.failure = reason
        log.error("NOT WATCHING: %s. Training goes on.", reason)
        try:
            self._commit([], status="failed")
        except StoreError as error:
            self._lose_disk(error)

    def _lose_disk(self, error: BaseException) -> None:
        self.unaudited = True
        self.failure = f"the record cannot be written, so nothing will be done: {error}"
        self._buffer.clear()
        log.error("NOT ACTING: %s. Training goes on.", self.failure)

    def status(self, state: str = "running") -> dict[str, Any]:
        """What `foreshock status` shows."""
        hub = self.hub
        engine = hub.engine
        return {
            "state": state,
            "run": hub.run,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "step": hub.step,
            "clock": hub.clock,
            "timeline": hub.assembler.timeline,
            "attempt": hub.hello.attempt if hub.hello else 0,
            "ranks": list(hub.hello.ranks) if hub.hello else [],
            "mode": {"acting": str(engine.mode), **hub.modes()} if engine and hub.hello else {},
            "failure": self.failure,
            "incidents": [i.to_json() for i in engine.incidents] if engine else [],
            "spent": {"actions": engine.spent.actions, "rollbacks": engine.spent.rollbacks} if engine else {},
            "unavailable": hub.hello.unavailable if hub.hello else {},
            "standing": [{name: arguments} for name, arguments in hub.standing],
            "frames": {"dropped": hub.assembler.dropped, "gaps": hub.assembler.gaps},
            "points": [p.step for p in hub.ledger.points],
            "onsets": dict(hub.ledger.onsets),
            "budget_held": hub.detectors.budget_held() if hub.detectors else None,
            **self._facts,
        }


def _claim(directory: Path) -> IO[str]:
    """One decider a run directory: held until it is closed or its process ends. Raises OSError where it is taken."""
    directory.mkdir(parents=True, exist_ok=True)
    file = (directory / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise OSError(f"another watch is running in {directory}") from None
    return file
