"""The early end of an onset interval is not after the true onset."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.detectors import onset_interval


def simulate(rng, kind, size, direction, onset=200, h=9.0):
    """Standard scores with a change at `onset`, cut where a CUSUM would raise the alarm."""
    z = rng.normal(size=1000)
    after = np.arange(800)
    z[onset:] += size if kind == "step" else size * (after + 1)
    z = np.clip(z, -3, 3)
    s = 0.0
    for t in range(onset, 1000):
        s = max(0.0, s + z[t] - 0.25)
        if s > h:
            break
    return (z if direction == "up" else -z)[: t + 1]


CHANGES = [
    ("step", 0.5, 2.0),
    ("step", 1.0, 2.0),
    ("step", 3.0, 2.0),
    ("ramp", 0.1, 2.0),
    ("ramp", 0.3, 2.0),
    ("ramp", 0.03, 4.0),
    ("ramp", 0.01, 4.0),
]


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize(("kind", "size", "drop"), CHANGES)
def test_the_early_end_is_not_late_in_95_percent_of_changes(kind, size, drop, direction):
    rng = np.random.default_rng(1)
    early = []
    for _ in range(300):
        z = simulate(rng, kind, size, direction)
        early.append(onset_interval(z, np.arange(z.size) * 4, direction, drop).early)
    assert np.mean(np.array(early) <= 200 * 4) >= 0.95


@pytest.mark.parametrize(("size", "samples"), [(1.0, 40), (3.0, 10)])
def test_the_early_end_is_not_far_before_a_clear_step(size, samples):
    rng = np.random.default_rng(1)
    found = [onset_interval(simulate(rng, "step", size, "up"), np.arange(1000)) for _ in range(100)]
    assert np.median([f.early for f in found]) >= 200 - samples


@settings(deadline=None, max_examples=50)
@given(z=st.lists(st.floats(-3, 3), min_size=1, max_size=60), direction=st.sampled_from(["up", "down"]))
def test_the_interval_is_ordered_and_ends_within_the_history(z, direction):
    steps = np.arange(len(z)) * 4 + 1000
    interval = onset_interval(np.array(z), steps, direction)
    assert 1000 - 16 <= interval.early <= interval.late <= steps[-1]


def test_a_sharp_step_is_dated_to_its_sample():
    z = np.r_[np.zeros(100), np.full(5, 3.0)]
    interval = onset_interval(z, np.arange(105))
    assert interval.late == 100
    assert 94 <= interval.early <= 96
