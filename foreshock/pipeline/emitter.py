"""From the training loop to the hub: bounded queues and one daemon thread, or inline where `sync` is asked for.

The thread turns jobs into events at once, so that no device memory waits for a slow hub, and hands the events on in
numbered batches. What was not acknowledged is handed on again: at least once, in order.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from foreshock.pipeline.events import Event, Frames

log = logging.getLogger("foreshock")

Job = Callable[[], Event | None]
"""Makes its event when run: a frame's float64 work happens here, off the training thread."""
Deliver = Callable[[Sequence[tuple[int, Event]]], int]
"""Takes numbered events; the last number that need not be handed on again. Raises `Later` or `Gone`."""

JOBS = 256
BATCH = 256
RETRY = 0.2, 2.0
"""Seconds between tries: the first wait, doubled up to the last."""
SYNC_SECONDS = 30.0


class Later(Exception):
    """The hub cannot be reached now: hand the events on again."""


class Gone(Exception):
    """There is no hub any more, and none will come: nothing is handed on again."""


class Emitter:
    """Hands events to `deliver` in order, never blocking and never raising into the training step.

    Beyond `capacity` events the oldest frames are dropped, and counted; an event that carries a decision only where
    no frame is left. `linger` seconds lie between two deliveries, so that they carry several frames; after `poll`
    seconds without any an empty one is made, because its answer may bring a command.
    """

    def __init__(
        self,
        deliver: Deliver,
        *,
        sync: bool,
        capacity: int = 4096,
        linger: float = 0.0,
        poll: float | None = None,
    ) -> None:
        self._deliver, self._sync, self._capacity = deliver, sync, capacity
        self._linger, self._poll = linger, poll
        self._numbers = itertools.count(1)
        self._jobs: deque[tuple[bool, Job]] = deque()
        self._events: deque[tuple[int, Event]] = deque()
        self._wake = threading.Condition()
        self._closing = self._busy = self._delivering = False
        self._next = self._last = 0.0
        self._wait = RETRY[0]
        self.dropped = 0
        self.failure: str | None = None
        self.gone = False
        self._thread: threading.Thread | None = None
        if not sync:
            self._thread = threading.Thread(target=self._run, name="foreshock-emitter", daemon=True)
            self._thread.start()

    def put(self, job: Job, *, frame: bool = False) -> None:
        if self.gone:
            return
        if self._sync:
            self._resolve(job)
            self._flush(time.monotonic() + SYNC_SECONDS)
            return
        with self._wake:
            if len(self._jobs) >= JOBS:
                oldest = next((i for i, (is_frame, _) in enumerate(self._jobs) if is_frame), 0)
                del self._jobs[oldest]
                self.dropped += 1
            self._jobs.append((frame, job))
            self._wake.notify()

    def drain(self, timeout: float = 30.0) -> bool:
        """Wait until everything put so far was delivered; False after `timeout` seconds."""
        with self._wake:
            return self._wake.wait_for(lambda: not (self._jobs or self._events or self._busy), timeout)

    def close(self, timeout: float = 30.0) -> None:
        """Deliver what is queued, then stop. Gives up after `timeout` seconds."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._jobs or self._closing, self._idle())
                jobs = [self._jobs.popleft() for _ in range(min(len(self._jobs), 16))]
                if self._closing and not jobs and (self.gone or not self._events):
                    return
                self._busy = True
            for _, job in jobs:
                self._resolve(job)
            if time.monotonic() >= self._next and (self._events or self._due()):
                self._hand_on()
            with self._wake:
                self._busy = False
                self._wake.notify_all()

    def _idle(self) -> float | None:
        """Seconds that the thread may sleep if no job comes."""
        now = time.monotonic()
        if self._events:
            return max(0.0, self._next - now)
        return None if self._poll is None or self.gone else max(0.0, self._last + self._poll - now)

    def _due(self) -> bool:
        return self._poll is not None and not self.gone and time.monotonic() >= self._last + self._poll

    def _resolve(self, job: Job) -> None:
        try:
            event = job()
        except Exception as error:
            self._lost(error)
            return
        if event is None or self.gone:
            return
        with self._wake:
            self._events.append((next(self._numbers), event))
            if len(self._events) > self._capacity:
                oldest = next((i for i, (_, e) in enumerate(self._events) if isinstance(e, Frames)), 0)
                del self._events[oldest]
                self.dropped += 1

    def _hand_on(self) -> bool:
        """One delivery; False where it brought nothing on."""
        batch = list(itertools.islice(self._events, BATCH))
        self._delivering = True
        try:
            done = self._deliver(batch)
        except Later:
            self._next = time.monotonic() + self._wait
            self._wait = min(2 * self._wait, RETRY[1])
            self._last = time.monotonic()
            return False
        except Gone:
            self.gone, done = True, batch[-1][0] if batch else 0
            with self._wake:
                self._events.clear()
        except Exception as error:
            self._lost(error)
            done = batch[-1][0] if batch else 0
        finally:
            self._delivering = False
        with self._wake:
            while self._events and self._events[0][0] <= done:
                self._events.popleft()
        self._last = time.monotonic()
        brought = not batch or done >= batch[0][0]
        self._next = self._last + (self._linger if brought else max(self._linger, RETRY[0]))
        self._wait = RETRY[0]
        return brought

    def _flush(self, until: float) -> None:
        """Sync: hand on everything, waiting for a hub that is away, but not for ever.

        What is put while a delivery is under way (the answer to its command) goes with the next one.
        """
        while self._events and not self.gone and not self._delivering:
            if not self._hand_on():
                if time.monotonic() >= until:
                    return
                time.sleep(min(self._wait, 0.02))

    def _lost(self, error: Exception) -> None:
        if self.failure is None:
            log.exception("Foreshock lost a measurement; training goes on")
        self.failure = f"{type(error).__name__}: {error}"
