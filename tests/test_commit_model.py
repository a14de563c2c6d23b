"""The commit protocol, explored exhaustively: the real `Voter` under any hub, late votes, crashes and restarts.

The hub is not modelled: any command may be offered, prepared, refused or withdrawn on any rank at any time before it
votes or reads. That covers polls which are lost, late or repeated, and hubs that withdraw and number anew. A collective is
gloo's: it is complete when every rank has cast, also if some no longer wait for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from foreshock.remediation.commit import FAREWELL, LEFT, NOTHING, Unconfirmed, Vector, Voter

RUNNING, VOTING, APPLYING, CONFIRMING, ENDED, RAISED, CRASHED = range(7)
"""Between two votes; in a vote; a command decided; in its confirmation; over, in three ways."""

GONE = (RAISED, CRASHED)


class Applied(NamedTuple):
    number: int
    frame: int
    ok: bool
    confirmed: bool | None
    """What the rank learnt: applied on all, failed on all; None where it does not know."""


class Rank(NamedTuple):
    voter: tuple[Any, ...] = astuple(Voter())
    phase: int = RUNNING
    frame: int = 0
    casts: tuple[Vector, ...] = ()
    """What it cast, from the oldest collective on that some rank may still read."""
    applied: tuple[Applied, ...] = ()
    refused: tuple[int, ...] = ()


class World(NamedTuple):
    ranks: tuple[Rank, ...]
    fence: int = 0
    """Commands up to this number belong to attempts before."""
    faults: tuple[int, int, int] = (0, 0, 0)
    """Timeouts, crashes and skipped steps still to come in this attempt."""
    attempts: tuple[int, ...] = ()
    """World sizes of the attempts to come."""
    before: frozenset[int] = frozenset()
    """Numbers applied in attempts before."""


def expiry(number: int) -> int:
    return 5 if number % 2 else 99


@dataclass(frozen=True)
class Model:
    """`votes` an attempt, every second step, and `commands` numbers an attempt."""

    voter: type[Voter] = Voter
    votes: int = 3
    commands: int = 2
    fails: bool = True
    lowers: bool = False
    between: bool = False
    """Polls also while a vote is in flight."""

    def successors(self, world: World, faults: tuple[int, int, int]) -> Iterator[tuple[str, World]]:
        """Every next world. Names of faults begin with "!"."""
        if all(rank.phase >= ENDED for rank in world.ranks):
            if world.attempts:
                done = {a.number for rank in world.ranks for a in rank.applied}
                yield (
                    "restart",
                    World(
                        (Rank(),) * world.attempts[0],
                        world.fence + self.commands,
                        faults,
                        world.attempts[1:],
                        world.before | done,
                    ),
                )
            return
        lost, crashes, skips = world.faults
        for i, rank in enumerate(world.ranks):
            if rank.phase >= ENDED or rank in world.ranks[:i]:
                continue
            if crashes:
                yield "!crash", self._with(world, i, rank._replace(phase=CRASHED), (lost, crashes - 1, skips))
            if rank.phase == RUNNING:
                if skips:
                    skipped = rank._replace(frame=rank.frame + 2)
                    yield "!skip", self._with(world, i, skipped, (lost, crashes, skips - 1))
                for polled in self._polls(world.fence, rank):
                    for acting in (True, False) if self.lowers else (True,):
                        yield "cast", self._with(world, i, self._cast(polled, acting))
            elif rank.phase == APPLYING:
                for ok in (True, False) if self.fails else (True,):
                    yield "apply", self._with(world, i, self._apply(rank, ok))
            else:
                result = self._result(world, rank)
                for polled in (
                    self._polls(world.fence, rank) if self.between and rank.phase == VOTING else [rank]
                ):
                    if result is not None:
                        yield "read", self._with(world, i, self._read(polled, result))
                    if any(other.phase in GONE for other in world.ranks):
                        yield "error", self._with(world, i, self._lose(polled))
                    elif result is None and lost:
                        yield "!timeout", self._with(world, i, self._lose(polled), (lost - 1, crashes, skips))

    @cache  # noqa: B019
    def _polls(self, fence: int, rank: Rank) -> set[Rank]:
        """What a rank may have become through its thread: offers, refusals, withdrawals, preparations in any order."""
        if rank.voter[-1]:
            return {rank}
        seen, new = {rank}, [rank]
        while new:
            rank = new.pop()
            held = Voter(*rank.voter)
            todo: list[tuple[Any, tuple[int, ...]]] = [
                (lambda v, n=n: v.offer(n), ()) for n in range(fence + 1, fence + self.commands + 1)
            ]
            if held.offered > held.closed:
                todo.append((lambda v: v.withdraw(v.offered), (held.offered,) * (not held.ready)))
                todo.append((lambda v: v.prepared(v.offered, expiry(v.offered)), ()))
            for do, refused in todo:
                voter = self.voter(*rank.voter)
                do(voter)
                next_ = rank._replace(voter=astuple(voter), refused=(*rank.refused, *refused))
                if next_ not in seen:
                    seen.add(next_)
                    new.append(next_)
        return seen

    @cache  # noqa: B019
    def _cast(self, rank: Rank, acting: bool) -> Rank:
        """The step of a vote, or the end of the loop."""
        voter, frame = self.voter(*rank.voter), rank.frame + 2 - rank.frame % 2
        if frame > 2 * self.votes:
            casts = rank.casts if voter.disabled else self._said(rank, voter.leave("closed"))
            return rank._replace(voter=astuple(voter), phase=ENDED, casts=casts)
        if voter.disabled:
            return rank._replace(frame=frame)
        ballot = voter.ballot(frame, acting)
        return rank._replace(voter=astuple(voter), phase=VOTING, frame=frame, casts=(*rank.casts, ballot))

    @cache  # noqa: B019
    def _read(self, rank: Rank, result: Vector) -> Rank:
        voter = self.voter(*rank.voter)
        if rank.phase == VOTING:
            was, cast = voter.disabled, voter.cast
            number = voter.count(result)
            rank = rank._replace(voter=astuple(voter), frame=rank.frame + 1, phase=RUNNING)
            if number is None:
                return rank
            assert (was, voter.disabled) == (None, None), "applies although it takes no part"
            assert number == cast, "applies what it did not prepare"
            assert number not in rank.refused, "applies what it refused"
            entry = Applied(number, rank.frame, False, None)
            return rank._replace(phase=APPLYING, applied=(*rank.applied, entry))
        try:
            word = voter.confirmed(result)
        except Unconfirmed:
            return rank._replace(voter=astuple(voter), phase=RAISED)
        last = rank.applied[-1]._replace(confirmed=word)
        return rank._replace(voter=astuple(voter), phase=RUNNING, applied=(*rank.applied[:-1], last))

    @cache  # noqa: B019
    def _apply(self, rank: Rank, ok: bool) -> Rank:
        voter = self.voter(*rank.voter)
        casts = (*rank.casts, voter.confirmation(ok))
        last = rank.applied[-1]._replace(ok=ok)
        return rank._replace(phase=CONFIRMING, casts=casts, applied=(*rank.applied[:-1], last))

    @cache  # noqa: B019
    def _lose(self, rank: Rank) -> Rank:
        voter = self.voter(*rank.voter)
        if rank.phase == VOTING:
            casts = self._said(rank, voter.leave("timeout"))
            return rank._replace(voter=astuple(voter), phase=RUNNING, frame=rank.frame + 1, casts=casts)
        try:
            voter.unconfirmed("timeout")
        except Unconfirmed:
            return rank._replace(voter=astuple(voter), phase=RAISED)

    @staticmethod
    def _said(rank: Rank, word: Vector | None) -> tuple[Vector, ...]:
        return rank.casts if word is None else (*rank.casts, word)

    @staticmethod
    def _result(world: World, rank: Rank) -> Vector | None:
        at = len(rank.casts) - 1
        if any(len(other.casts) <= at for other in world.ranks):
            return None
        low = [min(column) for column in zip(*(other.casts[at] for other in world.ranks), strict=True)]
        return low[0], low[1], low[2], low[3]

    @staticmethod
    def _with(world: World, i: int, rank: Rank, faults: tuple[int, int, int] | None = None) -> World:
        ranks = [*world.ranks[:i], rank, *world.ranks[i + 1 :]]
        # What nobody can read any more is forgotten, and ranks are alike: both only make fewer states.
        reads = [
            len(r.casts) - (r.phase in (VOTING, CONFIRMING))
            for r in ranks
            if r.phase < ENDED and not r.voter[-1]
        ]
        past = min(reads, default=99)
        ranks = sorted((_forget(r, past) for r in ranks), key=_order)
        return world._replace(ranks=tuple(ranks), faults=world.faults if faults is None else faults)


def _order(rank: Rank) -> tuple[Any, ...]:
    return rank.phase, rank.frame, rank.voter[:-1], rank.casts


@cache
def _forget(rank: Rank, past: int) -> Rank:
    voter = Voter(*rank.voter)
    if rank.phase >= ENDED or voter.disabled:
        voter = Voter(disabled=voter.disabled and "left")
    if rank.phase == RUNNING:
        voter.cast = voter.frame = 0
    if not voter.ready:
        voter.expires = 0
    rank = rank._replace(voter=astuple(voter))
    return rank._replace(casts=rank.casts[past:])


def check(world: World) -> None:
    """What may never happen, in any state. Raises AssertionError."""
    over = all(rank.phase >= ENDED for rank in world.ranks)
    for rank in world.ranks:
        numbers = [a.number for a in rank.applied]
        assert len(numbers) == len(set(numbers)), "applied twice"
        assert world.before.isdisjoint(numbers), "applied in a later attempt"
        for a in rank.applied:
            assert a.frame <= expiry(a.number), "applied after it expired"
            assert not any(a.number in other.refused for other in world.ranks), (
                "applied though a rank refused it"
            )
            others = [b for other in world.ranks for b in other.applied if b.number == a.number]
            if a.confirmed:
                assert len(others) == len(world.ranks), "said to be applied, and a rank did not"
                assert all(b.ok and b.frame == a.frame for b in others), "applied at different steps"
            if a.confirmed is False:
                assert not any(b.ok for b in others), "said to have failed, and a rank applied it"
    if over:
        alive = [{a.number for a in rank.applied if a.ok} for rank in world.ranks if rank.phase != CRASHED]
        raised = any(rank.phase == RAISED for rank in world.ranks)
        assert raised or all(one == alive[0] for one in alive), "ranks differ and none raised"


def explore(
    model: Model, sizes: tuple[int, ...], faults: tuple[int, int, int], waits: bool = True
) -> Counter[str]:
    """All worlds within reach; counts them, and what came of them. Raises AssertionError at a violation.

    `waits`: also where only a timeout or a crash, or nothing at all, would end a wait.
    """
    start = World((Rank(),) * sizes[0], faults=faults, attempts=sizes[1:])
    seen, new, counts = {start}, [start], Counter[str]()
    while new:
        world = new.pop()
        check(world)
        counts["states"] += 1
        steps = list(model.successors(world, faults))
        over = all(rank.phase >= ENDED for rank in world.ranks)
        assert not waits or over or any(name[0] != "!" for name, _ in steps), "waits in vain"
        if over:
            kinds = {a.confirmed for rank in world.ranks for a in rank.applied}
            counts["applied"] += True in kinds
            counts["failed"] += False in kinds
            counts["raised"] += any(rank.phase == RAISED for rank in world.ranks)
            counts["ends"] += 1
        for _, after in steps:
            if after not in seen:
                seen.add(after)
                new.append(after)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "sizes", "faults", "least"),
    [
        (Model(between=True, lowers=True), (2,), (2, 1, 1), 50_000),
        (Model(), (3,), (0, 0, 0), 30_000),
        (Model(votes=2), (3,), (1, 0, 0), 60_000),
        (Model(votes=2), (3,), (0, 1, 0), 80_000),
        (Model(commands=1, votes=2), (3,), (2, 0, 1), 20_000),
        (Model(commands=1), (3,), (1, 1, 0), 30_000),
        (Model(commands=1, votes=1), (4,), (2, 1, 0), 15_000),
        (Model(commands=1, votes=1), (3, 2, 4), (1, 0, 0), 10_000),
    ],
)
def test_every_reachable_state_is_allowed(
    model: Model, sizes: tuple[int, ...], faults: tuple[int, int, int], least: int
) -> None:
    counts = explore(model, sizes, faults)
    print(counts)
    assert counts["states"] > least
    assert counts["applied"]
    assert counts["failed"]
    assert counts["raised"]


class MinAlone(Voter):
    def count(self, result):  # type: ignore[no-untyped-def]
        return Voter.count(self, (result[0], -result[0], result[2], result[3]))


class NoConfirmation(Voter):
    def confirmed(self, result):  # type: ignore[no-untyped-def]
        return True


class NoFrames(Voter):
    def count(self, result):  # type: ignore[no-untyped-def]
        return Voter.count(self, (result[0], result[1], 0, 0))

    def confirmed(self, result):  # type: ignore[no-untyped-def]
        return Voter.confirmed(self, (result[0], result[1], 0, 0))


class StaysSilently(Voter):
    """Goes on after a lost vote, as if nothing had happened; and a confirmation is (ok, -ok), without a frame."""

    def leave(self, reason):  # type: ignore[no-untyped-def]
        return None if reason == "timeout" else Voter.leave(self, reason)

    def confirmed(self, result):  # type: ignore[no-untyped-def]
        return Voter.confirmed(self, (result[0], result[1], 0, 0))


class LeavesSilently(Voter):
    def leave(self, reason):  # type: ignore[no-untyped-def]
        Voter.leave(self, reason)


class AppliesAgain(Voter):
    def count(self, result):  # type: ignore[no-untyped-def]
        before = self.closed, self.ready
        number = Voter.count(self, result)
        self.closed, self.ready = before
        return number


class IgnoresExpiry(Voter):
    def ballot(self, frame, acting):  # type: ignore[no-untyped-def]
        self.expires = 99
        return Voter.ballot(self, frame, acting)


@pytest.mark.parametrize(
    ("voter", "sizes", "faults", "message"),
    [
        (MinAlone, (2,), (0, 0, 0), "applies what it did not prepare"),
        (NoConfirmation, (2,), (1, 0, 0), "said to be applied, and a rank did not|different steps"),
        (NoFrames, (2,), (0, 0, 1), "different steps"),
        (StaysSilently, (2,), (1, 0, 0), "said to be applied, and a rank did not|different steps"),
        (LeavesSilently, (2,), (1, 0, 0), "waits in vain"),
        (AppliesAgain, (2,), (0, 0, 0), "applied twice"),
        (IgnoresExpiry, (2,), (0, 0, 0), "applied after it expired"),
    ],
)
def test_the_search_finds_what_a_weaker_protocol_does(
    voter: type[Voter], sizes: tuple[int, ...], faults: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        explore(Model(voter), sizes, faults, waits=voter is LeavesSilently)


def test_a_voter_in_words() -> None:
    voter = Voter()
    assert voter.offer(1)
    assert not voter.offer(1)
    assert voter.ballot(8, True) == (NOTHING, NOTHING, 8, -8)
    voter.prepared(1, expires=20)
    assert voter.ballot(16, False)[0] == NOTHING
    assert voter.ballot(16, True) == (1, -1, 16, -16)
    voter.withdraw(1)
    assert voter.wanted(1), "the vote in flight may still decide it"
    assert voter.count((1, -1, 16, -16)) == 1
    assert voter.confirmation(False) == (0, 0, 17, -17)
    assert voter.confirmed((0, 0, 17, -17)) is False
    assert not voter.offer(1)
    assert voter.offer(3)
    assert not voter.offer(2), "3 replaced it"
    voter.prepared(3, expires=24)
    assert voter.ballot(24, True)[0] == NOTHING, "it would be applied at 25"
    assert voter.count((LEFT, 3, 0, -24)) is None
    assert voter.disabled is not None
    assert not voter.offer(4)
    assert voter.leave("again") == FAREWELL
    with pytest.raises(Unconfirmed, match="on some ranks"):
        Voter(frame=16).confirmed((0, -1, 17, -17))


class Lab(RuleBasedStateMachine):
    """Larger worlds at random, with a hub that has one command in flight and keeps a record of what came of each."""

    model = Model(votes=12)

    @initialize(size=st.integers(2, 6))
    def start(self, size: int) -> None:
        self.issued = self.current = self.fence = 0
        self.record: dict[int, str] = {}
        self.before: frozenset[int] = frozenset()
        self._attempt(size)

    def _attempt(self, size: int) -> None:
        self.ranks = [Rank() for _ in range(size)]
        self.mail: list[list[int]] = [[0] for _ in range(size)]

    @property
    def world(self) -> World:
        return World(tuple(self.ranks), before=self.before)

    def _pick(self, data: st.DataObject, *phases: int) -> int | None:
        fit = [i for i, rank in enumerate(self.ranks) if rank.phase in phases]
        return data.draw(st.sampled_from(fit)) if fit else None

    @precondition(lambda self: not self.current)
    @rule()
    def issue(self) -> None:
        self.issued += 1
        self.current = self.issued

    @rule(data=st.data(), what=st.sampled_from(["poll", "deliver", "prepare", "prepare", "refuse"]))
    def background(self, data: st.DataObject, what: str) -> None:
        i = self._pick(data, RUNNING, VOTING, APPLYING, CONFIRMING)
        if i is None:
            return
        rank, voter = self.ranks[i], Voter(*self.ranks[i].voter)
        preparing = voter.offered > voter.closed and not voter.ready and not voter.disabled
        if what == "poll":
            self.mail[i].append(self.current)
        elif what == "deliver":
            number = data.draw(st.sampled_from(self.mail[i]))
            _ = voter.offer(number) if number else voter.withdraw(voter.offered)
        elif what == "prepare" and preparing:
            voter.prepared(voter.offered, expiry(voter.offered))
        elif what == "refuse" and preparing:
            rank = rank._replace(refused=(*rank.refused, voter.offered))
            voter.withdraw(voter.offered)
        self.ranks[i] = rank._replace(voter=astuple(voter))

    @rule(data=st.data(), times=st.integers(1, 8))
    def steps(self, data: st.DataObject, times: int) -> None:
        for _ in range(times):
            i = self._pick(data, RUNNING, VOTING, APPLYING, CONFIRMING)
            if i is None:
                return
            rank = self.ranks[i]
            if rank.phase == RUNNING:
                self.ranks[i] = self.model._cast(rank, True)
            elif rank.phase == APPLYING:
                self.ranks[i] = self.model._apply(rank, data.draw(st.integers(0, 9)) > 0)
            elif (result := self.model._result(self.world, rank)) is not None:
                self.ranks[i] = self.model._read(rank, result)

    @rule(data=st.data(), patience=st.integers(0, 9))
    def lose(self, data: st.DataObject, patience: int) -> None:
        i = self._pick(data, VOTING, CONFIRMING)
        if i is None:
            return
        gone = any(rank.phase in GONE for rank in self.ranks)
        if gone or (patience == 0 and self.model._result(self.world, self.ranks[i]) is None):
            self.ranks[i] = self.model._lose(self.ranks[i])

    @rule(data=st.data(), luck=st.integers(0, 19))
    def crash(self, data: st.DataObject, luck: int) -> None:
        i = self._pick(data, RUNNING, VOTING, APPLYING, CONFIRMING)
        if i is not None and luck == 0:
            self.ranks[i] = self.ranks[i]._replace(phase=CRASHED)

    @precondition(lambda self: self.current)
    @rule()
    def hub(self) -> None:
        """Closes the command in flight where the ranks' words allow it."""
        acks = [a.confirmed for rank in self.ranks for a in rank.applied if a.number == self.current]
        if len(acks) == len(self.ranks) and None not in acks:
            self.record[self.current] = "applied" if acks[0] else "failed"
        elif any(self.current in rank.refused for rank in self.ranks):
            self.record[self.current] = "refused"
        elif not acks and all(rank.frame > expiry(self.current) for rank in self.ranks):
            self.record[self.current] = "expired"
        else:
            return
        self.current = 0

    @precondition(lambda self: all(rank.phase >= ENDED for rank in self.ranks))
    @rule(size=st.integers(2, 6))
    def restart(self, size: int) -> None:
        self.before |= {a.number for rank in self.ranks for a in rank.applied}
        self.current = 0
        self._attempt(size)

    @invariant()
    def allowed(self) -> None:
        if not hasattr(self, "ranks"):
            return
        check(self.world)
        for rank in self.ranks:
            for a in rank.applied:
                said = self.record.get(a.number)
                assert said not in ("refused", "expired"), "closed as not applied, and a rank applied it"
                assert said != "applied" or a.confirmed


TestLab = Lab.TestCase
TestLab.settings = settings(
    max_examples=40, stateful_step_count=100, deadline=None, suppress_health_check=list(HealthCheck)
)
