"""State survives a restart bit for bit, and a rewind forgets exactly what came after it."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from test_detectors_diagnosis import ONSET, TABLE, columns, play, run_values, shift

from foreshock.detectors import Detectors


def plain(value):
    """The state as it comes back from disk: JSON for the plain part, arrays beside it."""
    if isinstance(value, dict):
        return {json.loads(json.dumps(k)): plain(v) for k, v in value.items()}
    if isinstance(value, np.ndarray):
        return np.frombuffer(value.tobytes(), dtype=value.dtype).reshape(value.shape).copy()
    return json.loads(json.dumps(value, allow_nan=False))


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    return a == b


def faulty(end=1700):
    x = run_values(seed=3, end=end)
    shift(x, "attention.h1", -0.03)
    shift(x, "attention.coherence", 0.06, at=ONSET + 40)
    x[900:930, columns("symptom.loss")] += 1.0
    x[950:951, columns("symptom.grad_norm")] = np.inf
    return x


@pytest.mark.parametrize("cut", [150, 740])
def test_after_a_round_trip_the_next_thousand_updates_are_identical(cut):
    x = faulty(cut + 1000)
    kept, _ = play(x[:cut])
    state = plain(kept.state_dict())
    loaded = Detectors(TABLE)
    loaded.load_state_dict(state)
    a, b = play(x, kept, start=cut)[1], play(x, loaded, start=cut)[1]
    assert a == b
    assert same(kept.state_dict(), loaded.state_dict())


def test_a_state_is_a_copy():
    x = faulty(500)
    detectors, _ = play(x[:400])
    state = detectors.state_dict()
    before = plain(state)
    play(x, detectors, start=400)
    assert same(plain(state), before)


def test_a_rewind_gives_the_reports_of_a_run_that_never_went_further():
    x = faulty(1000)
    detectors, _ = play(x[: ONSET - 50])
    snapshot = plain(detectors.snapshot())
    size = sum(v.nbytes for v in _arrays(snapshot))
    assert size < sum(v.nbytes for v in _arrays(detectors.state_dict())) / 2
    straight = play(x, detectors, start=ONSET - 50)[1]
    assert any(r.diagnoses for r in straight)
    detectors.restore(snapshot, ONSET - 51)
    again = play(x, detectors, start=ONSET - 50)[1]
    assert set(again[0].reasons) == {"rewound"}
    again[0] = dataclasses.replace(again[0], closed=(), reasons=())
    assert again == straight


def test_a_rewind_truncates_the_rings():
    detectors, _ = play(faulty(800))
    snapshot = detectors.snapshot()
    play(faulty(900), detectors, start=800)
    detectors.restore(snapshot, 799)
    assert detectors.bank.history.steps.max() < 800
    assert detectors.bank.references.steps.max() < 800
    assert detectors.source.history.steps.max() < 800


def _arrays(value):
    if isinstance(value, dict):
        return [a for v in value.values() for a in _arrays(v)]
    return [value] if isinstance(value, np.ndarray) else []
