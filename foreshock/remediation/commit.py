"""One rank's side of all ranks or none: what it votes, how a result is read, what a rank does that cannot know. Pure.

Every rank of an attempt owns one `Voter`. The hub offers numbered commands; a rank prepares one in the background. At
every `CADENCE`-th step each rank casts a vector into an element-wise MIN over all ranks, and reads the result in its next
step. If all said the same number, all apply it in that step, and a second MIN confirms it. A vector is

    (word, -word, frame, -frame)

so that its MIN holds the least and the greatest of each. MIN of the word alone is not enough: 2, 1, 2 has MIN 1.
`frame` shows that the ranks are at the same step, and tells a vote from a confirmation (frame + 1, never a voting step).

A rank that waited in vain for a vote does not know how it ended: what it contributed stays, and a late rank may
read "all" from it. So it leaves: it never votes or applies again in this attempt, and its last word, `LEFT`, meets
what the others cast next. A vote that meets it disables acting without a wait; a confirmation that meets it raises
`Unconfirmed`, because a rank that applied what another did not must not go on training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

CADENCE = 8
"""Votes are cast at the steps whose frame number is a multiple of this. At least 2: each is read one step later."""

NOTHING = 0
"""The word of a rank that has nothing to apply. Commands are numbered from 1."""

LEFT = -1
"""The last word of a rank that takes no further part."""

FAREWELL = (LEFT, -LEFT, 0, 0)

Vector = tuple[int, int, int, int]


class Unconfirmed(RuntimeError):
    """A command was applied here, and not known to be applied on every rank: the attempt must end."""


@dataclass(slots=True)
class Voter:
    """One rank in one attempt. Commands of another attempt must not be offered to it.

    `disabled` says why this rank takes no further part; None while it does. The state is these few fields, so a
    copy is a snapshot.
    """

    offered: int = 0
    """Highest number offered."""
    closed: int = 0
    """Numbers up to this one are over: applied, failed, withdrawn or replaced by a higher one."""
    ready: int = NOTHING
    """The number that is prepared."""
    expires: int = 0
    """The last frame at which `ready` may be applied."""
    cast: int = NOTHING
    """The word of the last vote: what it may decide, or has decided."""
    frame: int = 0
    """The frame of the last vote."""
    disabled: str | None = None

    def offer(self, number: int) -> bool:
        """True: prepare it. False: known, over, or this rank takes no part. A higher number replaces lower ones."""
        if self.disabled is not None or number <= max(self.offered, self.closed):
            return False
        self.withdraw(number - 1)
        self.offered = number
        return True

    def prepared(self, number: int, expires: int) -> None:
        """What `number` needs is at hand. It is applied at frame `expires` at the latest. Ignored if it is over."""
        if number == self.offered and number > self.closed:
            self.ready, self.expires = number, expires

    def withdraw(self, number: int) -> None:
        """`number` and all before it are over: refused here or withdrawn by the hub. A vote in flight stands."""
        self.closed = max(self.closed, number)
        if self.ready <= self.closed:
            self.ready = NOTHING

    def wanted(self, number: int) -> bool:
        """Whether `number` may still be applied; if not, what was prepared for it can be dropped.

        True also for a number that is being applied, until the next ballot.
        """
        return self.disabled is None and (number > self.closed or number == self.cast)

    def ballot(self, frame: int, acting: bool) -> Vector:
        """This rank's vote at `frame`: for nothing without `acting` (a lower mode, or monitoring failed)."""
        if self.ready and frame >= self.expires:
            self.withdraw(self.ready)
        self.cast = self.ready if acting else NOTHING
        self.frame = frame
        return self.cast, -self.cast, frame, -frame

    def count(self, result: Sequence[int]) -> int | None:
        """The number that all ranks apply in this step, from the vote's MIN. It is over then: at most once."""
        low, high, first, last = result[0], -result[1], result[2], -result[3]
        if low == LEFT:
            self.disabled = "another rank takes no further part"
        elif first != last:
            self.disabled = f"the ranks are not at the same step: frames {first} to {last}"
        if self.disabled is not None or not low == high > NOTHING:
            return None
        self.withdraw(low)
        return low

    def leave(self, reason: str) -> Vector:
        """Take no further part in this attempt. Returns the last word, to be cast and not waited for."""
        self.cast = self.ready = NOTHING
        self.disabled = self.disabled or reason
        return FAREWELL

    def confirmation(self, ok: bool) -> Vector:
        """What to cast after applying. `ok=False`: it failed here, and what was there before is restored."""
        frame = self.frame + 1
        return int(ok), -int(ok), frame, -frame

    def confirmed(self, result: Sequence[int]) -> bool:
        """True: applied on all ranks. False: failed on all, nothing changed. Else raises Unconfirmed."""
        low, high, first, last = result[0], -result[1], result[2], -result[3]
        if low == LEFT or first != last:
            self.unconfirmed("another rank did not take part")
        if low != high:
            self.unconfirmed("it was applied on some ranks and failed on others")
        return bool(low)

    def unconfirmed(self, reason: str) -> NoReturn:
        """Raises Unconfirmed: also where the confirmation was lost."""
        self.leave(f"a command could not be confirmed: {reason}")
        raise Unconfirmed(f"a command could not be confirmed, so the ranks' weights may differ: {reason}")
