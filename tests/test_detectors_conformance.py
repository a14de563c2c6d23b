"""Every detector of one stream, ours and river's, holds the same contract."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from river.drift import ADWIN, PageHinkley

from foreshock.detectors import (
    Residual,
    RiverDetector,
    ShiryaevRoberts,
    ShiryaevRobertsBank,
    SignalSpec,
    onset_interval,
)

MAKERS = {
    "ours, both sides": lambda: ShiryaevRoberts(budget=1e5),
    "ours, up": lambda: ShiryaevRoberts(budget=1e5, sides=("up",)),
    "river ADWIN": lambda: RiverDetector(lambda: ADWIN(delta=1e-4)),
    "river PageHinkley": lambda: RiverDetector(lambda: PageHinkley(delta=0.25, threshold=25.0)),
}


@pytest.fixture(params=MAKERS, ids=str)
def make(request):
    return MAKERS[request.param]


def firings(detector, xs):
    fired = []
    for i, x in enumerate(xs):
        detector.update(float(x))
        if detector.drift_detected:
            fired.append(i)
    return fired


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_no_alarm_on_two_thousand_standard_scores(make, seed):
    assert firings(make(), np.random.default_rng(seed).normal(size=2000)) == []


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_shift_of_three_sigma_is_found(make, seed):
    xs = np.random.default_rng(seed).normal(size=600)
    xs[300:] += 3
    fired = firings(make(), xs)
    assert fired
    assert 300 <= fired[0] < 400


def test_values_that_are_not_finite_change_nothing(make):
    xs = np.random.default_rng(3).normal(size=600)
    xs[300:] += 3
    holes = [v for x in xs for v in (x, math.nan, math.inf, -math.inf)]
    clean, holed = firings(make(), xs), firings(make(), holes)
    assert [i // 4 for i in holed] == clean


def test_the_same_scores_give_the_same_alarms(make):
    xs = np.random.default_rng(4).normal(size=600) + np.r_[np.zeros(300), np.full(300, 2.0)]
    assert firings(make(), xs) == firings(make(), xs)


def test_our_state_round_trip_is_exact():
    xs = np.random.default_rng(5).normal(size=400)
    a, b = ShiryaevRoberts(), ShiryaevRoberts()
    firings(a, xs[:200])
    b.load_state_dict(a.state_dict())
    for x in xs[200:]:
        a.update(x)
        b.update(x)
        assert a.statistic == b.statistic


def test_our_detector_starts_anew_after_a_drift():
    detector = ShiryaevRoberts(budget=1e4)
    fired = firings(detector, [3.0] * 20)
    assert fired[0] == 3
    assert fired[1] == 2 * fired[0] + 1


def scalar_statistic(xs, sides, margin):
    """The recursion written out for one stream, one betting fraction at a time."""
    bets = [
        s * 0.05 * 2**j
        for s in ([1] if "up" in sides else []) + ([-1] if "down" in sides else [])
        for j in range(6)
    ]
    evidence = [-math.inf] * len(bets)
    for x in xs:
        if not math.isnan(x):
            evidence = [
                max(m, 0.0) + math.log1p(math.exp(-abs(m))) + bet * x - abs(bet) * margin - bet * bet / 2
                for m, bet in zip(evidence, bets, strict=True)
            ]
    return math.log(sum(map(math.exp, evidence)) / len(bets))


scores = st.lists(st.one_of(st.floats(-3, 3), st.just(math.nan)), min_size=20, max_size=20)


@settings(deadline=None, max_examples=30)
@given(rows=st.lists(scores, min_size=1, max_size=5), margin=st.floats(0, 1))
def test_the_vectorised_bank_equals_the_scalar_recursion(rows, margin):
    sides = [[("up",), ("down",), ("up", "down")][i % 3] for i in range(len(rows))]
    xs = np.array([[0.0, *row] for row in rows])
    bank = ShiryaevRobertsBank(sides, margin)
    for column in xs.T:
        statistic = bank.update(column)
    expected = [scalar_statistic(x, s, margin) for x, s in zip(xs, sides, strict=True)]
    np.testing.assert_allclose(statistic, expected, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**31), slope=st.booleans())
def test_vectorised_residuals_equal_single_ones(seed, slope):
    x = np.random.default_rng(seed).normal(size=(120, 4)).cumsum(0)
    x[np.random.default_rng(seed + 1).random(x.shape) < 0.1] = np.nan
    together = Residual(4, prefix=50, tau=75, slope=slope)
    alone = [Residual(1, prefix=50, tau=75, slope=slope) for _ in range(4)]
    for row in x:
        z = together.update(row)
        each = [float(r.update(row[i : i + 1])[0]) for i, r in enumerate(alone)]
        np.testing.assert_allclose(z, each, rtol=1e-12, atol=1e-12)


def test_whitening_leaves_white_scores_of_unit_size():
    noise = np.random.default_rng(6).normal(size=4000)
    x = np.zeros(4000)
    for t in range(1, 4000):
        x[t] = 0.9 * x[t - 1] + noise[t]
    residual = Residual(1, prefix=300, tau=1000)
    z = np.array([residual.update(x[t : t + 1])[0] for t in range(4000)])[300:]
    assert abs(np.corrcoef(z[1:], z[:-1])[0, 1]) < 0.06
    assert 0.8 < z.std() < 1.05
    assert abs(float(residual.marginal[0]) / (1 / math.sqrt(1 - 0.81)) - 1) < 0.3


def test_a_constant_signal_has_a_floored_scale_and_never_alarms():
    residual = Residual(1, prefix=50, tau=75)
    z = [residual.update(np.array([0.1]))[0] for _ in range(200)]
    assert np.nanmax(np.abs(z)) == 0.0


def test_one_outlier_moves_the_level_no_further_than_its_bound():
    residual = Residual(1, prefix=50, tau=75)
    for x in np.random.default_rng(7).normal(size=200):
        residual.update(np.array([x]))
    before = residual.level.copy()
    residual.update(np.array([1e6]))
    assert abs(residual.level - before)[0] < 0.2
    assert abs(residual.raw[0]) > 1e5


def test_a_specification_refuses_unknown_sides_and_widens_the_margin_of_a_short_prefix():
    with pytest.raises(ValueError, match="sides"):
        SignalSpec("attention.h1", ("sideways",))
    assert SignalSpec("attention.h1", ("down",), prefix=25).margin == pytest.approx(0.4)


def test_an_onset_needs_samples():
    with pytest.raises(ValueError, match="no samples"):
        onset_interval(np.zeros(0), np.zeros(0, dtype=np.int64))
