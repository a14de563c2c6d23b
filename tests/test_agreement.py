"""All ranks or none, over real processes and gloo: late, refusing, failing and killed ranks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from foreshock.pipeline.agreement import Alone, Group
from foreshock.remediation.commit import Unconfirmed

RANKS = 3
PATIENT, SHORT = (60.0, 60.0), (1.0, 60.0)
"""Bounds in seconds, for a vote and for a confirmation: the machine may be slow, and a late rank is later than SHORT."""
Report = tuple[list[tuple[int, int, bool]], str | None]
"""(seq, number, applied on all) of every decision, and what ended it: `disabled`, "Unconfirmed" or None."""


def drive(
    group: Group, last: int, before: Callable[[int], None], apply: Callable[[], bool], first: int = 1
) -> Report:
    """Steps `first` to `last`; `before` runs ahead of each, `apply` where a command is decided."""
    done = []
    for seq in range(first, last + 1):
        before(seq)
        number = group.decide(seq, acting=True)
        if number is not None:
            try:
                done.append((seq, number, group.confirm(apply())))
            except Unconfirmed:
                return done, "Unconfirmed"
        if group.disabled is not None:
            return done, group.disabled
    return done, None


def ready(group: Group, number: int, expires: int = 99) -> None:
    assert group.offer(number)
    group.prepared(number, expires)


def prepared_one_by_one(group: Group, rank: int) -> Report:
    return drive(group, 30, lambda seq: ready(group, 1) if seq == 3 + 4 * rank else None, lambda: True)


def refused_then_another(group: Group, rank: int) -> Report:
    def before(seq: int) -> None:
        if seq == 1:
            ready(group, 1)
            if rank == 2:
                group.withdraw(1)
        if seq == 12:
            ready(group, 2)

    return drive(group, 30, before, lambda: True)


def withdrawn_by_some(group: Group, rank: int) -> Report:
    def before(seq: int) -> None:
        if seq == 1:
            ready(group, 1)
        if seq == 7 and rank != 0:
            ready(group, 2)

    return drive(group, 30, before, lambda: True)


def expired(group: Group, rank: int) -> Report:
    return drive(group, 30, lambda seq: ready(group, 1, expires=8) if seq == 1 else None, lambda: True)


def failed_everywhere(group: Group, rank: int) -> Report:
    return drive(group, 30, lambda seq: ready(group, 1) if seq == 1 else None, lambda: False)


def failed_on_one(group: Group, rank: int) -> Report:
    return drive(group, 30, lambda seq: ready(group, 1) if seq == 1 else None, lambda: rank != 1)


def late_and_all_prepared(group: Group, rank: int) -> Report:
    def before(seq: int) -> None:
        if seq == 1:
            ready(group, 1)
        if seq == 8 and rank == 0:
            time.sleep(5 * SHORT[0])

    return drive(group, 30, before, lambda: True)


def late_and_nothing_prepared(group: Group, rank: int) -> Report:
    def before(seq: int) -> None:
        if seq == 8 and rank == 0:
            time.sleep(5 * SHORT[0])

    return drive(group, 30, before, lambda: True)


def ends_early(group: Group, rank: int) -> Report:
    if rank == 0:
        return drive(group, 10, lambda seq: None, lambda: True)
    return drive(group, 30, lambda seq: None, lambda: True)


def not_in_step(group: Group, rank: int) -> Report:
    ready(group, 1)
    return drive(group, 30, lambda seq: None, lambda: True, first=8 if rank else 16)


def killed_after_its_vote(group: Group, rank: int) -> Report:
    def before(seq: int) -> None:
        if seq == 1:
            ready(group, 1)
        if seq == 9 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    return drive(group, 30, before, lambda: True)


def killed_in_apply(group: Group, rank: int) -> Report:
    def apply() -> bool:
        if rank == 1:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return True

    return drive(group, 30, lambda seq: ready(group, 1) if seq == 1 else None, apply)


def rank_process(
    rank: int, place: str, scenarios: list[Callable[[Group, int], Report]], out: Connection
) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=RANKS)
    for number, scenario in enumerate(scenarios):
        group = Group.open(number, 60.0, SHORT if scenario.__name__.startswith("late") else PATIENT)
        out.send(scenario(group, rank))
        group.close()
        group.close()


def play(place: Path, *scenarios: Callable[[Group, int], Report]) -> dict[str, list[Any]]:
    """The reports of each scenario, in rank order; None from a rank that died before."""
    spawn = multiprocessing.get_context("spawn")
    pipes = [spawn.Pipe(duplex=False) for _ in range(RANKS)]
    ranks = [
        spawn.Process(target=rank_process, args=(rank, str(place), list(scenarios), pipes[rank][1]))
        for rank in range(RANKS)
    ]
    reports: list[list[Any]] = []
    try:
        for process, (_, ours) in zip(ranks, pipes, strict=True):
            process.start()
            ours.close()
        for hear, _ in pipes:
            told: list[Any] = []
            try:
                while len(told) < len(scenarios):
                    assert hear.poll(200), "a rank neither returned nor raised"
                    told.append(hear.recv())
            except EOFError:
                told += [None] * (len(scenarios) - len(told))
            reports.append(told)
        for process in ranks:
            process.join(60)
        assert sorted(process.exitcode for process in ranks) in ([0, 0, 0], [-9, 0, 0])  # type: ignore[type-var]
    finally:
        for process in ranks:
            process.kill()
    return {s.__name__: list(told) for s, told in zip(scenarios, zip(*reports, strict=True), strict=True)}


@pytest.mark.slow
def test_living_ranks(tmp_path: Path) -> None:
    told = play(
        tmp_path, prepared_one_by_one, refused_then_another, withdrawn_by_some, expired, failed_everywhere,
        failed_on_one, late_and_all_prepared, late_and_nothing_prepared, ends_early, not_in_step,
    )  # fmt: skip
    assert told["prepared_one_by_one"] == [([(17, 1, True)], None)] * 3
    assert told["refused_then_another"] == [([(17, 2, True)], None)] * 3
    assert told["withdrawn_by_some"] == [([], None)] * 3
    assert told["expired"] == [([], None)] * 3
    assert told["failed_everywhere"] == [([(9, 1, False)], None)] * 3
    assert told["failed_on_one"] == [([], "Unconfirmed")] * 3
    late, *punctual = told["late_and_all_prepared"]
    assert late == ([], "Unconfirmed"), "it applied what the others could not wait for, so it must not go on"
    assert all(done == [] and "a vote was lost" in why for done, why in punctual)
    late, *punctual = told["late_and_nothing_prepared"]
    assert all("a vote was lost" in why for _, why in punctual)
    assert late == ([], "another rank takes no further part")
    assert told["ends_early"] == [([], None)] + [([], "another rank takes no further part")] * 2
    assert all(done == [] and "not at the same step" in why for done, why in told["not_in_step"])


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [killed_after_its_vote, killed_in_apply])
def test_a_killed_rank(tmp_path: Path, scenario: Callable[[Group, int], Report]) -> None:
    told = play(tmp_path, scenario)[scenario.__name__]
    assert told[1] is None
    for done, why in (told[0], told[2]):
        assert done == []
        assert why is not None
        assert why == "Unconfirmed" or (scenario is killed_after_its_vote and "a vote was lost" in why)


def absent_process(rank: int, place: str) -> None:
    """Rank 0 never votes and stays; 1 closes its group and 2 just ends, each with an operation that nobody joins."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=RANKS)
    group = Group.open(0, 60.0, SHORT)
    if rank == 0:
        while not Path(place, "go").exists():
            time.sleep(0.05)
        os._exit(0)
    assert "a vote was lost" in str(drive(group, 30, lambda seq: None, lambda: True)[1])
    if rank == 1:
        group.close()


@pytest.mark.slow
def test_an_absent_rank_does_not_hold_the_others_at_their_exit(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    ranks = [spawn.Process(target=absent_process, args=(rank, str(tmp_path))) for rank in range(RANKS)]
    try:
        for process in ranks:
            process.start()
        for process in ranks[1:]:
            process.join(120)
        assert [process.exitcode for process in ranks] == [None, 0, 0]
        (tmp_path / "go").touch()
        ranks[0].join(60)
    finally:
        for process in ranks:
            process.kill()


def test_alone() -> None:
    alone = Alone()
    assert alone.offer(1)
    assert alone.decide(3, acting=True) is None
    alone.prepared(1, expires=99)
    assert alone.decide(4, acting=False) is None
    assert alone.wanted(1)
    assert alone.decide(5, acting=True) == 1
    assert alone.confirm(True)
    assert alone.decide(6, acting=True) is None
    assert not alone.offer(1)
    assert not alone.wanted(1)
    alone.close()


def test_a_rank_without_its_group_decides_nothing() -> None:
    alone = Alone("no group")
    assert not alone.offer(1)
    alone.prepared(1, expires=99)
    assert alone.decide(5, acting=True) is None
    assert alone.disabled == "no group"
