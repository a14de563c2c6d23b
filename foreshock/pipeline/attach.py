"""How a rank comes to its place, its line to the hub and the group in which all ranks agree.

Alone: the hub runs in this process. With several ranks, or where `hub="ray"` asks for it: rank 0 says what holds for
all, the group is opened (only in enforce), and every rank connects to the hub's actor. What fails leaves a rank that
does not watch, but keeps its place in the votes, because the others wait for it there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreshock.pipeline.agreement import Alone, Group
from foreshock.pipeline.emitter import Gone
from foreshock.pipeline.events import Event
from foreshock.pipeline.link import Link, LocalLink, OnCommand, Welcome
from foreshock.pipeline.place import Meeting, Place, here
from foreshock.pipeline.settings import Policy
from foreshock.policies.models import Mode

if TYPE_CHECKING:
    from foreshock.pipeline.cluster.runtime import Runtime

log = logging.getLogger("foreshock")

MEET_SECONDS = 60.0
CONNECT_SECONDS = 120.0
LINGER_SECONDS = 0.05
POLL_SECONDS = 0.5


class NoLink:
    """No hub: nothing is decided for this rank, and `failure` says why."""

    def __init__(self, reason: str) -> None:
        self.failure: str | None = reason
        self.acting, self.refusal, self.kept = False, str(reason), set[str]()
        self.welcome = Welcome(0)
        self.on_command: OnCommand = lambda command: None

    def deliver(self, events: Sequence[tuple[int, Event]]) -> int:
        raise Gone(str(self.failure))

    def publish(self, facts: dict[str, Any]) -> None:
        """Nobody would read it."""

    def close(self) -> None:
        """Nothing is open."""


@dataclass
class Attached:
    """One rank of one attempt. `rows` are the ranks whose frames reach the hub (`Hello.rows`)."""

    place: Place
    run: str
    directory: Path
    allow: Mode
    policy: Policy
    link: Link
    agreement: Alone
    rows: tuple[int, ...] = ()
    remote: bool = False
    """The hub is elsewhere: deliveries wait for each other and are asked for."""
    closers: list[Callable[[], None]] = field(default_factory=list)

    def close(self) -> None:
        """Never raises; bounded."""
        for close in (self.link.close, self.agreement.close, *self.closers):
            try:
                close()
            except Exception as error:
                log.error("Foreshock could not close cleanly: %s", error)


def attach(
    directory: Path, run: str, allow: Mode, policy: Policy, *, hub: str | None = None, resuming: bool = False
) -> Attached:
    """This rank's line. Raises ValueError where `hub="local"` is asked for by several ranks; nothing else."""
    place = here()
    if place.world > 1 and (hub == "local" or resuming):
        raise ValueError(f"{place.world} ranks need a hub that all of them reach: leave out hub= and fork=")
    if place.world == 1 and hub != "ray":
        attached = Attached(place, run, directory, allow, policy, LocalLink(directory, run), Alone())
    else:
        attached = _join(Attached(place, run, directory, allow, policy, NoLink("not attached"), Alone()))
    if policy.failure is not None:
        attached.link.failure = f"the policy cannot be used: {policy.failure}"
    if attached.link.failure is not None:
        log.error("NOT WATCHING: %s. Training goes on.", attached.link.failure)
    return attached


def _join(mine: Attached) -> Attached:
    place = mine.place
    try:
        meeting = Meeting(place, MEET_SECONDS)
        _terms(mine, meeting)
    except Exception as error:
        mine.link = NoLink(f"the ranks did not meet: {error}")
        return mine
    if mine.allow is Mode.ENFORCE and place.world > 1:
        try:
            mine.agreement = Group.open(meeting.nonce)
        except Exception as error:
            # By itself a rank would apply what the others do not.
            mine.agreement = Alone(f"the group in which ranks agree could not be opened: {error}")
    try:
        mine.link = _line(mine, meeting)
        mine.remote = True
    except Exception as error:
        mine.link = NoLink(f"no hub could be reached: {type(error).__name__}: {error}")
        if place.rank == 0:
            meeting.say("hub", {"failure": mine.link.failure})
    return mine


def _terms(mine: Attached, meeting: Meeting) -> None:
    """What rank 0 says holds for all."""
    if mine.place.rank == 0:
        meeting.say("terms", {"run": mine.run, "directory": str(mine.directory), "allow": str(mine.allow)})
    else:
        terms = meeting.hear("terms", MEET_SECONDS)
        if mine.allow is not Mode(terms["allow"]):
            log.warning('rank %d: allow="%s" of rank 0 counts', mine.place.rank, terms["allow"])
        mine.run, mine.directory, mine.allow = terms["run"], Path(terms["directory"]), Mode(terms["allow"])


def _line(mine: Attached, meeting: Meeting) -> Link:
    from foreshock.pipeline.cluster.actor import START_SECONDS, find, launch
    from foreshock.pipeline.cluster.relay import node_line
    from foreshock.pipeline.cluster.remote import RemoteLink
    from foreshock.pipeline.cluster.runtime import connect

    place = mine.place
    if place.rank == 0 and mine.policy.failure is not None:
        raise ValueError(f"the policy cannot be used: {mine.policy.failure}")
    runtime: Runtime = connect(place, meeting, CONNECT_SECONDS)
    mine.closers.append(runtime.close)
    import ray

    if place.rank == 0:
        hub = launch(mine.directory, mine.run)
        word = ray.get(hub.begin.remote(meeting.nonce, place.world), timeout=START_SECONDS)
        meeting.say("hub", word)
    else:
        word = meeting.hear("hub", CONNECT_SECONDS + START_SECONDS)
    if word.get("failure"):
        raise RuntimeError(word["failure"])
    welcome = Welcome(word["attempt"], tuple((name, arguments) for name, arguments in word["standing"]))
    actor, mine.rows = node_line(find(mine.directory), place, meeting, welcome.attempt)
    return RemoteLink(actor, place.rank, welcome)
