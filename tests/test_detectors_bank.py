"""The bank: fusion finds one head and all heads, names the right layers, keeps its budget, and is fast."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from foreshock.detectors import Bank, SignalSpec
from foreshock.detectors.fusion import halves, mean_evidence, stands_out
from foreshock.detectors.latch import Latches
from foreshock.detectors.streams import Stream
from foreshock.signals import SignalKey

H1 = SignalSpec("attention.h1", ("down",), cadence=1, tau=100)
LAYERS, HEADS = 3, 4


def bank(budget=1e4, layers=LAYERS, heads=HEADS, spec=H1):
    keys = [SignalKey("attention", "h1", n, h) for n in range(layers) for h in range(heads)]
    return Bank([spec], [Stream(k, i, -1) for i, k in enumerate(keys)], budget, 1)


def feed(detector, xs, latches=None, start=0):
    latches = latches or Latches()
    for i, x in enumerate(xs):
        detector.update(start + i, x, latches)
    return latches


def healthy(seed, samples, n=LAYERS * HEADS):
    return 0.8 + 0.01 * np.random.default_rng(seed).normal(size=(samples, n))


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_fault_in_one_layer_names_that_layer_only(layer):
    xs = healthy(0, 400)
    xs[250:, layer * HEADS : (layer + 1) * HEADS] -= 0.03
    (alarm,) = feed(bank(), xs).opened
    assert alarm.layers == (layer,)
    assert 250 <= alarm.step <= 265
    assert alarm.direction == "down"
    assert alarm.onset.early <= 250 <= alarm.step
    assert {n for n, _ in alarm.heads} <= {layer}


def test_a_fault_in_one_head_names_that_head():
    xs = healthy(1, 400)
    xs[250:, 5] -= 0.04
    (alarm,) = feed(bank(), xs).opened
    assert (alarm.layers, alarm.heads) == ((1,), ((1, 1),))


def test_the_wrong_direction_is_no_alarm():
    xs = healthy(2, 400)
    xs[250:] += 0.03
    assert feed(bank(), xs).opened == []


def test_all_heads_a_little_are_found_faster_than_one_head_a_little():
    delays = {}
    for name, rows in (("one", slice(0, 1)), ("all", slice(None))):
        xs = healthy(3, 1500)
        xs[250:, rows] -= 0.008
        opened = feed(bank(), xs).opened
        delays[name] = opened[0].step - 250 if opened else math.inf
    assert delays["all"] < 40
    assert delays["all"] < delays["one"]


def test_false_alarms_on_clean_noise_stay_within_the_budget():
    steps, runs = 600, 40
    keys = [SignalKey("attention", f"s{r}", 0, h) for r in range(runs) for h in range(2)]
    specs = [SignalSpec(f"attention.s{r}", ("up", "down"), cadence=1, prefix=100) for r in range(runs)]
    many = Bank(specs, [Stream(k, i, -1) for i, k in enumerate(keys)], 2000, 1)
    opened = len(feed(many, healthy(9, steps, 2 * runs)).opened)
    assert opened <= runs * steps / 2000


def test_an_alarm_turns_critical_and_closes_after_fifty_samples_in_band():
    xs = healthy(4, 900)
    xs[250:300] -= 0.04
    detector, latches = bank(), Latches()
    feed(detector, xs[:300], latches)
    assert [str(a.severity) for a in latches.open.values()] == ["critical"]
    feed(detector, xs[300:], latches, start=300)
    assert len(latches.opened) == 1
    assert [reason for _, reason in latches.closed] == ["in band"]
    assert (detector.streams.statistic() < detector.thresholds[0]).all()


def test_the_reference_is_the_baseline_before_the_fault_not_after():
    xs = healthy(5, 600)
    xs[300:] -= 0.05
    detector = bank()
    feed(detector, xs)
    level, sd = detector.reference([0], at_step=296)
    assert abs(level - 0.8) < 0.006
    assert 0.005 < sd < 0.02
    assert detector.reference([0], at_step=599)[0] < 0.78
    assert detector.reference([0], at_step=0) is not None


def test_the_scale_of_a_layer_does_not_shrink_below_independent_heads():
    detector = bank()
    feed(detector, healthy(6, 100))
    assert (detector.scale >= HEADS**-0.5).all()
    assert (detector.scale < 1).all()


def test_fusion_is_a_mean_of_e_values():
    statistics = np.log(np.array([1.0, 3.0, 8.0]))
    live = np.array([True, True, True])
    fused = mean_evidence(statistics, np.array([0, 0, 1]), 2, live)
    np.testing.assert_allclose(np.exp(fused), [2.0, 8.0])
    np.testing.assert_allclose(np.exp(halves(np.log([2.0]), np.log([4.0]))), [3.0])
    dead = mean_evidence(statistics, np.array([0, 0, 1]), 2, np.array([False, False, True]))
    assert dead[0] == -math.inf


def test_only_rows_near_the_strongest_stand_out():
    assert stands_out(np.array([24.0, 3.0, 13.0, 11.0]), 12.0).tolist() == [True, False, True, False]


def test_one_update_of_a_hundred_streams_is_quick():
    detector, latches, xs = bank(layers=25), Latches(), healthy(7, 400, 100)
    feed(detector, xs[:200], latches)
    spent = []
    for i, x in enumerate(xs[200:]):
        begin = time.process_time()
        detector.update(200 + i, x, latches)
        spent.append(time.process_time() - begin)
    assert np.median(spent) < 5e-3  # wide: catches a Python loop over streams, not a busy machine
