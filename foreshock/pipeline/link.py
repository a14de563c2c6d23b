"""A rank's line to its hub: what it may ask and hear, wherever the hub runs. Here, the hub in this very process."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from foreshock.pipeline.events import Event
from foreshock.pipeline.shell import Shell
from foreshock.remediation.types import Command

OnCommand = Callable[[Command | None], None]
"""Told the command in flight, as often as it is heard of; None where there is none."""


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a run tells an attempt at its start: its number, and the interventions that stand."""

    attempt: int
    standing: tuple[tuple[str, dict[str, Any]], ...] = ()


class Link(Protocol):
    """One rank's line to the run's hub."""

    failure: str | None
    """Why nothing is decided any more, as far as this rank knows."""
    welcome: Welcome
    on_command: OnCommand
    """Whom to tell; set by the rank before its first delivery."""

    @property
    def acting(self) -> bool:
        """Whether a command may be applied now, as last heard."""
        ...

    @property
    def refusal(self) -> str | None:
        """Why a command is refused rather than kept waiting: the hub itself said that nobody acts."""
        ...

    @property
    def kept(self) -> set[str]:
        """The recovery points that must stay on disk, as last heard."""
        ...

    def deliver(self, events: Sequence[tuple[int, Event]]) -> int:
        """Hand over numbered events; the last number that need not come again. Raises `emitter.Later` or `Gone`."""
        ...

    def publish(self, facts: dict[str, Any]) -> None:
        """What the rank side knows (limits, settings, coverage), shown by `foreshock status`."""
        ...

    def close(self) -> None:
        """The rank has nothing more to say. Never raises."""
        ...


class LocalLink:
    """The hub in this process: every event is handled before `deliver` returns."""

    def __init__(self, directory: Path, run: str) -> None:
        self.on_command: OnCommand = lambda command: None
        self.shell = Shell(directory, run, lambda command: self.on_command(command))
        attempt = self.shell.begin(secrets.token_hex(8))
        self.welcome = Welcome(attempt, tuple(self.shell.hub.standing))

    @property
    def failure(self) -> str | None:
        return self.shell.failure

    @failure.setter
    def failure(self, reason: str | None) -> None:
        self.shell.failure = reason

    @property
    def acting(self) -> bool:
        return self.shell.acting

    @property
    def refusal(self) -> str | None:
        return None if self.acting else "the mode was lowered, or the hub has failed"

    @property
    def kept(self) -> set[str]:
        return self.shell.hub.kept

    def deliver(self, events: Sequence[tuple[int, Event]]) -> int:
        for _, event in events:
            self.shell.submit(event)
        return events[-1][0] if events else 0

    def publish(self, facts: dict[str, Any]) -> None:
        self.shell.publish(facts)

    def close(self) -> None:
        self.shell.close()
