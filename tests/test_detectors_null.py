"""The source rule: a known null, no prefix, and a floor below which it only tells."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foreshock.detectors import SourceDetector
from foreshock.detectors.latch import Latches
from foreshock.detectors.streams import Stream
from foreshock.signals import Scope, SignalKey

LAYERS, HEADS = 4, 4
H = math.log(1e5 * 10 / 4)


def probe(layers=LAYERS, ranks=(0,), threshold=H):
    places = [(layer, head) for layer in range(layers) for head in range(HEADS)]
    keys = [SignalKey("attention", "source_t", *place, scope=Scope.PER_RANK) for place in places]
    return SourceDetector([Stream(k, i, r) for r in ranks for i, k in enumerate(keys)], threshold)


def feed(detector, ts, biases, every=4):
    latches = Latches()
    for i, (t, b) in enumerate(zip(ts, biases, strict=True)):
        detector.update(i * every, t, b, latches)
    return latches


def honest(rng, samples, n):
    t = rng.normal(size=(samples, n))
    return t, t * 1.5e-4  # the bias of honest rounding is its score times its standard error


def test_false_alarms_stay_within_the_nominal_rate():
    rng, runs, samples, budget = np.random.default_rng(0), 1000, 200, 2000
    detector, latches = probe(layers=runs), Latches()  # every layer is a run of its own
    crossed = np.zeros(runs, dtype=bool)
    for step in range(samples):
        t = rng.normal(size=runs * HEADS)
        detector.update(step, t, t * 1e-4, latches)
        crossed |= detector.statistics()[2] >= math.log(budget)
    assert crossed.mean() <= samples / budget


def test_honest_rounding_of_any_size_is_silent():
    rng = np.random.default_rng(1)
    for size in (1.0, 1e-3, 1e3):
        t, bias = honest(rng, 400, LAYERS * HEADS)
        assert feed(probe(), t, bias * size).opened == []


@pytest.mark.parametrize("sign", [1, -1])
def test_a_biased_layer_is_named_at_its_second_sample_and_no_other(sign):
    t, bias = honest(np.random.default_rng(2), 60, LAYERS * HEADS)
    t[50:, 4:8] += 6.0 * sign  # 12 for the layer of four heads
    bias[50:, 4:8] = 1.6e-3 * sign
    (alarm,) = feed(probe(), t, bias).opened
    assert alarm.step in (200, 204)
    assert alarm.layers == (1,)
    assert alarm.direction == ("up" if sign > 0 else "down")
    assert alarm.confirms
    assert alarm.onset.early <= 200 <= alarm.onset.late + 4
    assert alarm.onset.early >= 200 - 40


def test_the_rule_guards_the_run_from_its_first_sample():
    n = LAYERS * HEADS
    (alarm,) = feed(probe(), np.full((3, n), 6.0), np.full((3, n), 1.6e-3)).opened
    assert alarm.step <= 4
    assert alarm.layers == (0, 1, 2, 3)


def test_one_rank_with_a_bad_kernel_is_named():
    t, bias = honest(np.random.default_rng(3), 30, 2 * LAYERS * HEADS)
    t[20:, -HEADS:] += 6.0
    bias[20:, -HEADS:] = 1.6e-3
    (alarm,) = feed(probe(ranks=(0, 1)), t, bias).opened
    assert (alarm.ranks, alarm.layers) == ((1,), (3,))


def test_significant_but_immaterial_evidence_is_seen_and_never_alarms():
    n = LAYERS * HEADS
    detector = probe()
    assert feed(detector, np.full((20, n), 9.0), np.full((20, n), 2.4e-7)).opened == []
    assert detector.seen
    assert np.abs(detector.latest).max() < 0.01  # and does not hold up a verification


def test_bias_whose_sign_varies_is_found_by_the_square():
    rng = np.random.default_rng(4)
    t, bias = honest(rng, 60, LAYERS * HEADS)
    signs = rng.choice([-1.0, 1.0], size=(20, HEADS))
    t[40:, :HEADS] = 6.0 * signs
    bias[40:, :HEADS] = 1.6e-3 * signs
    (alarm,) = feed(probe(), t, bias).opened
    assert 160 <= alarm.step <= 172
    assert alarm.layers == (0,)


def test_the_alarm_closes_after_the_cure():
    n = LAYERS * HEADS
    rng = np.random.default_rng(5)
    t, bias = honest(rng, 400, n)
    t[10:20] += 6.0
    bias[10:20] = 1.6e-3
    latches = feed(probe(), t, bias)
    assert len(latches.opened) == 1
    assert [reason for _, reason in latches.closed] == ["in band"]


def test_layers_that_were_not_sampled_keep_their_evidence():
    detector, n = probe(), LAYERS * HEADS
    t, bias = np.full((2, n), 6.0), np.full((2, n), 1.6e-3)
    feed(detector, t[:1], bias[:1])
    before = detector.signed.evidence.copy()
    feed(detector, np.full((1, n), math.nan), np.full((1, n), math.nan))
    assert (detector.signed.evidence == before).all()
    assert np.isnan(detector.latest).all()
