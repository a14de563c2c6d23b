"""Streams grow with layers and heads, not with ranks; what is lost by that is the name of the rank."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from test_detectors_diagnosis import ONSET, TABLE, columns, run_values, shift
from test_detectors_state import plain, same

from foreshock.detectors import Detectors, Severity
from foreshock.detectors.chain import COHORT
from foreshock.detectors.gate import NonFiniteGate
from foreshock.detectors.latch import Latches
from foreshock.signals import ClosedStep, Scope, SignalKey, SignalTable

MANY = 16
NONE = np.zeros(0)


def closed(step, rows, ranks=None):
    """One step of raw values (R, V): NaN = not measured, infinite = measured and not finite."""
    rows = np.asarray(rows, dtype=np.float32)
    flags = np.isinf(rows)
    ranks = tuple(range(len(rows))) if ranks is None else ranks
    values = np.where(flags, np.float32(np.nan), rows)
    return ClosedStep(step, 0, ranks, values, flags.astype(np.uint8), NONE.astype(np.int64), NONE)


def play(detectors, x, ranks=1, start=0, bad=None):
    """All ranks say the same, or rank `bad` says `x` and the others what they said before the onset."""
    reports = []
    for step in range(start, len(x)):
        rows = np.repeat(x[step][None], ranks, axis=0)
        if bad is not None and step >= ONSET:
            rows[:] = x[step - 400]
            rows[bad] = x[step]
        reports.append(detectors.update(closed(step, rows)))
    return reports


def nameless(report):
    """Everything but who: the numbers of ranks."""
    alarms = {
        name: tuple(dataclasses.replace(a, ranks=()) for a in getattr(report, name))
        for name in ("opened", "closed", "suspects")
    }
    found = [
        dataclasses.replace(
            d, ranks=(), alarms=tuple(dataclasses.replace(a, ranks=()) for a in d.alarms)
        ).to_json()
        for d in report.diagnoses
    ]
    return alarms, found, report.outliers, report.seen, report.reasons


def sick(end=ONSET + 60):
    x = run_values(seed=3, end=end)
    rows = slice(ONSET, None)
    for name, size in (("attention.source_t", 8.0), ("attention.source_bias", 1.6e-3)):
        for column in columns(name):
            x[rows, column] += size
    shift(x, "attention.h1", -0.05)
    return x


def test_many_ranks_that_agree_are_judged_as_one():
    x = sick()
    one, many = Detectors(TABLE), Detectors(TABLE, world=MANY)
    alone, together = play(one, x), play(many, x, MANY)
    assert [nameless(r) for r in together] == [nameless(r) for r in alone]
    assert len(many.bank.streams_of) == len(one.bank.streams_of)
    assert len(many.source.places) == len(one.source.places)
    last = together[-1].diagnoses[0]
    assert (str(last.mechanism), last.confidence, last.ranks) == ("attention", "confirmed", ())
    assert alone[-1].diagnoses[0].ranks == (0,)


@pytest.mark.parametrize(("world", "named"), [(COHORT, (5,)), (COHORT + 1, ())])
def test_one_bad_rank_is_named_only_while_every_rank_has_streams(world, named):
    detectors, x = Detectors(TABLE, world=world), run_values(seed=3, end=ONSET + 40)
    x[ONSET:, columns("attention.source_t")] += 40.0
    x[ONSET:, columns("attention.source_bias")] = 8e-3
    found = play(detectors, x, world, bad=5)[-1].diagnoses[0]
    assert (str(found.mechanism), found.ranks) == ("attention", named)


@pytest.mark.parametrize(("world", "arrived", "streams"), [(MANY, 2, 1), (1, MANY, MANY)])
def test_what_was_expected_decides_not_what_arrived(world, arrived, streams):
    detectors = Detectors(TABLE, world=world)
    play(detectors, run_values(end=3), arrived)
    play(detectors, run_values(end=6), MANY, start=3)
    assert len(detectors.source._streams) == streams * len(columns("attention.source_t"))


def test_a_rank_that_is_missing_from_a_step_leaves_a_mean_of_the_others():
    detectors, x = Detectors(TABLE, world=MANY), run_values(end=9)
    play(detectors, x[:8], MANY)
    rows = np.tile(x[8], (MANY - 1, 1))
    rows[:, columns("symptom.loss")] = np.arange(MANY - 1)[:, None]
    detectors.update(closed(8, rows, tuple(r for r in range(MANY) if r != 3)))
    value, _ = detectors.current(["symptom.loss"])["symptom.loss"]
    assert value == (MANY - 2) / 2


def test_the_cohort_is_part_of_the_state():
    x = sick()
    kept = Detectors(TABLE, world=MANY)
    play(kept, x[: ONSET + 5], MANY)
    loaded = Detectors(TABLE)
    loaded.load_state_dict(plain(kept.state_dict()))
    a, b = (play(d, x, MANY, start=ONSET + 5) for d in (kept, loaded))
    assert a == b
    assert same(kept.state_dict(), loaded.state_dict())
    kept.restore(plain(loaded.snapshot()), len(x))
    assert kept.world == MANY


def test_the_gate_names_ranks_however_many_there_are():
    gate, latches = NonFiniteGate(TABLE), Latches()
    rows = np.ones((1000, len(TABLE.values)))
    rows[997, -1] = rows[12, 3] = rows[12, 9] = np.inf
    gate.update(closed(4, rows), latches)
    (alarm,) = latches.opened
    assert (alarm.ranks, alarm.statistic, alarm.severity) == ((12, 997), 3.0, Severity.CRITICAL)
    first, other = TABLE.values[3], TABLE.values[9]
    assert alarm.signal == f"{first.mechanism}.{first.name}"
    assert alarm.layers == tuple(sorted({first.layer, other.layer}))


def scores(layers, heads):
    names = ("source_t", "source_bias")
    places = [(layer, head) for layer in range(layers) for head in range(heads)]
    keys = [SignalKey("attention", n, *p, scope=Scope.PER_RANK) for n in names for p in places]
    return SignalTable(tuple(keys)), [f"attention.source_t[L{layer}]" for layer in range(layers)]


@pytest.mark.parametrize("shared", [0.0, 0.5, 1.0])
def test_the_mean_of_honest_scores_alarms_no_more_than_one_rank_may(shared):
    layers, heads, samples, budget = 400, 2, 200, 2000
    table, _ = scores(layers, heads)
    detectors, rng = Detectors(table, world=MANY), np.random.default_rng(0)
    crossed = np.zeros(layers, dtype=bool)  # every layer is a run of its own
    for i in range(samples):
        common, own = rng.normal(size=layers * heads), rng.normal(size=(MANY, layers * heads))
        t = math.sqrt(shared) * common + math.sqrt(1 - shared) * own
        detectors.update(closed(4 * i, np.hstack([t, 1e-4 * t])))
        crossed |= detectors.source.statistics()[2] >= math.log(budget)
    assert crossed.mean() <= samples / budget


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_worst_of_several_healthy_ranks_stays_in_the_band_of_a_verification(ranks):
    table, keys = scores(layers=2, heads=4)
    detectors, rng = Detectors(table, world=ranks), np.random.default_rng(ranks)
    for i in range(500):
        t = rng.normal(size=(ranks, 8))
        # the lab's honest bf16 kernel: the standard error of the bias is 1.3e-4 a head
        assert not detectors.update(closed(4 * i, np.hstack([t, 1.3e-4 * t]))).opened
        assert max(abs(value) for value, _ in detectors.current(keys).values()) <= 3
