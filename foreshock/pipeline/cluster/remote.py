"""A rank's line to the hub's actor. Every wait is bounded; what cannot be said now is said again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from foreshock.pipeline.cluster.wire import VERSION, Batch, Reply, pack
from foreshock.pipeline.emitter import Gone, Later
from foreshock.pipeline.events import Event
from foreshock.pipeline.link import OnCommand, Welcome
from foreshock.remediation.types import Command

log = logging.getLogger("foreshock")

ANSWER_SECONDS = 10.0
LEAVE_SECONDS = 5.0


class RemoteLink:
    """The line of rank `rank` to `actor`: the hub's, or its node's relay, which take the same batches."""

    def __init__(self, actor: Any, rank: int, welcome: Welcome) -> None:
        self.welcome = welcome
        self.failure: str | None = None
        self.on_command: OnCommand = lambda command: None
        self.acting, self.kept = False, set[str]()
        self.refusal: str | None = None
        self._actor, self._rank = actor, rank
        self._source = f"{welcome.attempt}/{rank}"
        self._facts: dict[str, Any] | None = None
        self._away = False
        self._asked: Any = None
        """The call that was not answered yet. There is never a second one: each that waits costs memory, here and there."""

    def deliver(self, events: Sequence[tuple[int, Event]]) -> int:
        items = {self._source: [(number, pack(event)) for number, event in events]}
        facts, self._facts = self._facts, None
        reply = self._ask(Batch(self.welcome.attempt, items, facts), ANSWER_SECONDS)
        self.failure, self.acting, self.kept = reply.failure, reply.acting, set(reply.kept)
        self.refusal = None if reply.acting else reply.failure or "the mode was lowered"
        self.on_command(None if reply.command is None else Command.from_json(reply.command))
        return reply.acked.get(self._source, 0)

    def publish(self, facts: dict[str, Any]) -> None:
        if self._rank == 0:
            self._facts = facts

    def close(self) -> None:
        try:
            last = Batch(self.welcome.attempt, {self._source: []}, self._facts, leaving=(self._rank,))
            if self._asked is not None:
                self._ask(last, LEAVE_SECONDS)  # the answer to what was asked before
            self._ask(last, LEAVE_SECONDS)
        except (Later, Gone) as reason:
            log.warning("the hub did not hear that rank %d has left: %s", self._rank, reason)

    def _ask(self, batch: Batch, seconds: float) -> Reply:
        """The hub's answer: to `batch`, or to the batch before it if that is still open. Both acknowledge truly."""
        import ray
        from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError

        try:
            if self._asked is None:
                self._asked = self._actor.deliver.remote(batch)
            reply: Reply = ray.get(self._asked, timeout=seconds)
            self._asked = None
        except GetTimeoutError as error:
            self._say_away(error)
            raise Later(str(error)) from error
        except ActorDiedError as error:
            self._say_away(error)
            self.failure, self.acting = "the hub is gone", False
            raise Gone(str(error)) from error
        except RayActorError as error:
            self._asked = None
            self._say_away(error)
            raise Later(str(error)) from error
        except Exception as error:  # whatever Ray itself raises when it is shut down or broken
            self._asked = None
            self._say_away(error)
            raise (Later if ray.is_initialized() else Gone)(str(error)) from error
        if reply.stale or reply.version != VERSION:
            why = "another attempt of this run has begun" if reply.stale else "the hub speaks another version"
            self.failure, self.acting = why, False
            log.error("NOT WATCHING: %s. Training goes on.", why)
            raise Gone(why)
        if self._away:
            self._away = False
            log.warning("the hub answers again")
        return reply

    def _say_away(self, error: Exception) -> None:
        """Until it answers again nothing is applied, and nothing refused: a hub that restarts finds its command waiting."""
        self.acting = False
        if not self._away:
            self._away = True
            log.error(
                "NOT WATCHING: the hub does not answer (%s). Training goes on.", str(error).splitlines()[0]
            )
