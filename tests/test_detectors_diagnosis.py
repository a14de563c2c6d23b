"""Every signature row on synthetic closed steps through the whole chain, and the controls beside them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from foreshock.detectors import Alarm, Detectors, Interval, Severity, diagnose
from foreshock.signals import Scope, SignalFrame, SignalKey, SignalTable, merge

LAYERS, HEADS, ONSET, END = 2, 4, 700, 1000
SPECTRUM = {"h1": (0.8, 0.01), "hqv": (0.0, 0.01), "coherence": (0.0, 0.02), "qk_norm": (5.0, 0.02)}


def table():
    keys = []
    for layer in range(LAYERS):
        for head in range(HEADS):
            keys += [SignalKey("attention", name, layer, head) for name in (*SPECTRUM, "delta3")]
            per_rank = ("lse", "source_t", "source_bias")
            keys += [SignalKey("attention", name, layer, head, scope=Scope.PER_RANK) for name in per_rank]
        keys += [SignalKey("attention", n, layer, scope=Scope.PER_RANK) for n in ("mismatch", "max_logit")]
        keys.append(SignalKey("symptom", "mlp_update", layer))
    symptoms = ("loss", "grad_norm", "lr", "update_skipped", "loss_scale")
    keys += [SignalKey("symptom", name, scope=Scope.PER_RANK) for name in symptoms]
    return SignalTable(tuple(keys))


TABLE = table()
COLUMN = {str(k): i for i, k in enumerate(TABLE.values)}
EVERY_STEP = [COLUMN[f"symptom.{n}"] for n in ("loss", "grad_norm", "lr", "update_skipped", "loss_scale")]


def columns(name):
    return [i for i, k in enumerate(TABLE.values) if f"{k.mechanism}.{k.name}" == name]


def run_values(seed=0, end=END):
    """(end, V) raw values of a healthy run; NaN where not measured."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(end, len(TABLE.values)))
    scales = {f"attention.{n}": v for n, v in SPECTRUM.items()}
    scales |= {
        "attention.lse": (1.0, 0.05),
        "attention.max_logit": (8.0, 0.3),
        "symptom.mlp_update": (1e-3, 2e-5),
    }
    scales |= {
        "symptom.loss": (2.5, 0.05),
        "symptom.grad_norm": (1.0, 0.1),
        "attention.mismatch": (0.0, 1e-4),
    }
    scales |= {"symptom.update_skipped": (0.0, 0.0), "symptom.loss_scale": (1.0, 0.0)}
    for name, (level, sd) in scales.items():
        x[:, columns(name)] = level + sd * x[:, columns(name)]
    x[:, columns("attention.source_bias")] = 1.5e-4 * x[:, columns("attention.source_t")]
    x[:, columns("symptom.lr")] = np.minimum(1.0, (np.arange(end)[:, None] + 1) / 100) * 2e-3
    sampled = [i for i in range(x.shape[1]) if i not in EVERY_STEP]
    x[np.ix_(np.arange(end) % 4 != 0, sampled)] = np.nan
    return x


def closed(x, step, rank=0):
    # a NaN is an absent value here; an infinity is measured
    return merge(
        [SignalFrame.build(x, run="r", attempt=0, rank=rank, seq=step, timeline=0, step=step, table=TABLE.id)]
    )


def play(x, detectors=None, start=0):
    detectors = detectors or Detectors(TABLE)
    return detectors, [detectors.update(closed(x[s], s)) for s in range(start, len(x))]


def outcome(reports):
    """Mechanism and confidence of the first diagnosis, and all mechanisms ever named."""
    first = next((d for r in reports for d in r.diagnoses), None)
    return first, {str(d.mechanism) for r in reports for d in r.diagnoses}


def shift(x, name, by, at=ONSET, layers=range(LAYERS)):
    chosen = [i for i in columns(name) if TABLE.values[i].layer is None or TABLE.values[i].layer in layers]
    x[at:, chosen] += by


def test_a_healthy_run_has_no_diagnosis_and_states_what_budget_it_holds():
    detectors, reports = play(run_values(end=1400))
    assert outcome(reports) == (None, set())
    assert detectors.start == 198  # twice the last step of the rise of the learning rate
    assert 0.0033 < detectors.budget_held() < 0.014
    early, _ = play(run_values(end=300))
    assert early.budget_held() is None


def test_the_source_probe_alone_confirms_attention_in_its_layer_within_two_samples():
    x = run_values()
    shift(x, "attention.source_t", 6.0, layers=[1])
    shift(x, "attention.source_bias", 1.6e-3, layers=[1])
    detectors, reports = play(x)
    first, names = outcome(reports)
    assert names == {"attention"}
    assert (first.confidence, first.layers) == ("confirmed", (1,))
    assert ONSET <= first.step <= ONSET + 8
    assert ONSET - 40 <= first.onset.early <= ONSET
    key = "attention.source_t[L1]"
    assert detectors.verification_keys(first) == (key,)
    assert detectors.reference([key], first.onset.early) == {key: (0.0, 1.0)}
    assert {"data", "optimizer", "numerics", "router"} == {name for name, _ in first.ruled_out}
    last = reports[-1].diagnoses[0]
    assert last.since == first.step
    assert last.samples == (END - 1 - first.step) // 4 + 1
    json.dumps(last.to_json(), allow_nan=False)


def test_without_the_source_probe_two_spectrum_signals_agree_on_the_layer():
    x = run_values()
    for name, by in (("h1", -0.03), ("coherence", 0.06), ("source_t", 6.0), ("source_bias", 1.6e-3)):
        shift(x, f"attention.{name}", by, layers=[0])
    first, names = outcome(play(x, Detectors(TABLE, sources=False))[1])
    assert names == {"attention"}
    assert (first.confidence, first.layers) == ("agreeing", (0,))
    assert set(first.signals) == {"attention.h1", "attention.coherence"}
    assert first.onset.early <= ONSET


def test_one_spectrum_signal_is_a_suspect_and_no_diagnosis():
    x = run_values()
    shift(x, "attention.h1", -0.03)
    reports = play(x)[1]
    assert outcome(reports) == (None, set())
    assert [a.signal for a in reports[-1].suspects] == ["attention.h1"]


def test_the_absolute_rule_alone_confirms_attention():
    x = run_values(end=400)
    x[100:, columns("attention.hqv")] -= 0.2  # inside the prefix: no baseline can see it
    first, names = outcome(play(x)[1])
    assert names == {"attention"}
    assert first.confidence == "confirmed"
    assert first.onset.early <= 100


def test_a_wrong_mask_confirms_attention():
    x = run_values(end=200)
    shift(x, "attention.mismatch", 0.4, at=100)
    first, names = outcome(play(x)[1])
    assert (names, first.step, first.signals) == ({"attention"}, 104, ("attention.mismatch",))


def test_the_loss_at_or_before_attention_is_data():
    x = run_values()
    shift(x, "symptom.loss", 1.0)
    shift(x, "attention.h1", -0.03)
    shift(x, "attention.coherence", 0.06)
    first, names = outcome(play(x)[1])
    assert names == {"data"}
    assert first.signals == ("symptom.loss",)


def test_the_loss_alone_is_data_and_everything_is_learned_anew_when_it_is_over():
    x = run_values(end=1400)
    x[ONSET : ONSET + 30, columns("symptom.loss")] += 1.0
    detectors, reports = play(x)
    first, names = outcome(reports)
    assert names == {"data"}
    assert detectors.verification_keys(first) == ("symptom.loss",)
    over = next(i for i in range(first.step + 1, 1400) if not reports[i].diagnoses)
    again = play(x[: over + 1])[0]
    assert again.bank.residual.count.max() == 0


def test_the_update_before_attention_is_optimizer():
    x = run_values()
    shift(x, "symptom.mlp_update", 5e-3)
    shift(x, "attention.h1", -0.03, at=ONSET + 12)
    shift(x, "attention.coherence", 0.06, at=ONSET + 12)
    assert outcome(play(x)[1])[1] == {"optimizer"}


def test_of_update_and_loss_together_the_first_outlying_decides():
    x = run_values()
    shift(x, "symptom.mlp_update", 5e-3)
    shift(x, "symptom.loss", 1.0, at=ONSET + 2)
    last = play(x)[1][-1].diagnoses[0]
    assert str(last.mechanism) == "optimizer"
    assert "outlying" in dict(last.ruled_out)["data"]
    y = run_values()
    shift(y, "symptom.loss", 1.0)
    shift(y, "symptom.mlp_update", 5e-3)
    assert str(play(y)[1][-1].diagnoses[0].mechanism) == "data"


def test_the_source_probe_is_believed_whatever_came_first():
    x = run_values()
    shift(x, "symptom.loss", 1.0, at=ONSET - 40)
    shift(x, "attention.source_t", 6.0)
    shift(x, "attention.source_bias", 1.6e-3)
    reports = play(x)[1]
    assert str(reports[-1].diagnoses[0].mechanism) == "attention"
    assert "confirmed" in dict(reports[-1].diagnoses[0].ruled_out)["data"]


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_a_value_that_is_not_finite_is_numerics_at_once(name):
    x = run_values(end=60)
    x[50, COLUMN[f"symptom.{name}"]] = np.inf
    reports = play(x)[1]
    first, names = outcome(reports)
    assert names == {"numerics"}
    assert (first.step, first.severity, first.onset) == (50, Severity.CRITICAL, Interval(49, 50))
    assert reports[50].opened[0].confirms


def test_a_gradient_norm_that_was_not_measured_in_a_skipped_step_is_no_alarm():
    x = run_values(end=60)
    x[50, COLUMN["symptom.grad_norm"]] = np.nan
    x[50, COLUMN["symptom.update_skipped"]] = 1.0
    assert outcome(play(x)[1]) == (None, set())


@pytest.mark.parametrize(
    ("name", "by"), [("symptom.grad_norm", 2.0), ("attention.qk_norm", 0.5), ("attention.max_logit", 8.0)]
)
def test_symptoms_alarm_but_never_decide(name, by):
    x = run_values()
    shift(x, name, by)
    reports = play(x)[1]
    assert name in {a.signal for r in reports for a in r.opened}
    assert outcome(reports) == (None, set())


def test_a_single_outlier_is_logged_and_nothing_more():
    x = run_values()
    x[ONSET, COLUMN["symptom.loss"]] += 5.0
    reports = play(x)[1]
    assert reports[ONSET].outliers == ((ONSET, "symptom.loss"),)
    assert outcome(reports) == (None, set())
    assert not any(r.opened for r in reports)


def test_an_announced_cause_is_not_a_fault_and_an_unannounced_one_is():
    x = run_values(end=1200)
    x[ONSET : ONSET + 50, columns("symptom.mlp_update")] *= 10
    x[ONSET + 12 : ONSET + 50, columns("attention.h1")] -= 0.05  # the window of the updates fills slowly
    x[ONSET + 12 : ONSET + 50, columns("attention.coherence")] += 0.1
    assert outcome(play(x)[1])[1] == {"optimizer"}
    detectors, _ = play(x[:ONSET])
    detectors.announce("schedule", ONSET, 60)
    assert outcome(play(x, detectors, start=ONSET)[1])[1] == set()
    with pytest.raises(ValueError, match="cannot last"):
        detectors.announce("schedule", ONSET, -1)


def test_the_source_probe_goes_on_during_an_announced_hold():
    x = run_values(end=120)
    x[100:, columns("attention.source_t")] += 6
    x[100:, columns("attention.source_bias")] = 1.6e-3
    detectors, _ = play(x[:90])
    detectors.announce("resume", 90, 500)
    assert outcome(play(x, detectors, start=90)[1])[1] == {"attention"}


def test_after_an_action_its_alarms_close_and_its_references_stay():
    x = run_values(end=1100)
    for name, by in (("h1", -0.03), ("coherence", 0.06)):
        x[ONSET:800, columns(f"attention.{name}")] += by
    detectors, reports = play(x[:800], Detectors(TABLE, sources=False))
    (diagnosis,) = reports[-1].diagnoses
    keys = detectors.verification_keys(diagnosis)
    assert len(keys) == 2 * LAYERS * HEADS
    reference = detectors.reference(keys, diagnosis.onset.early)
    assert abs(reference["attention.h1[L0.H2]"][0] - 0.8) < 0.01
    detectors.after_action(799, diagnosis.layers)
    after = play(x, detectors, start=800)[1]
    assert set(after[0].reasons) == {"action"}
    assert {a.signal for a in after[0].closed} >= set(diagnosis.signals)
    assert outcome(after) == (None, set())
    assert detectors.reference(keys, diagnosis.onset.early) == reference
    detectors.update(closed(np.where(np.isnan(x[-4]), np.nan, x[-4]), 1100))
    now = detectors.current(keys)
    assert set(now) == set(keys)
    assert all(abs(now[k][0] - level) <= 6 * sd for k, (level, sd) in reference.items())
    assert detectors.current(["attention.nothing[L0]"]) == {}


def test_ranks_may_come_and_go():
    x = run_values(end=500)
    detectors = Detectors(TABLE)
    place = {"run": "r", "attempt": 0, "seq": 0, "timeline": 0, "table": TABLE.id}
    for step in range(500):
        ranks = [0] if step < 100 else [0, 1] if step < 400 else [1]
        y = x[step].copy()
        if step >= 450:
            y[columns("attention.source_t")] = 6.0
            y[columns("attention.source_bias")] = 1.6e-3
        frames = [SignalFrame.build(y, rank=r, step=step, **place) for r in ranks]
        report = detectors.update(merge(frames))
    value, _ = detectors.current(["symptom.loss"])["symptom.loss"]
    assert value == pytest.approx(x[-1, COLUMN["symptom.loss"]])
    assert report.diagnoses[0].ranks == (1,)


def alarm(signal, step, confirms=False):
    evidence = (13.0, 12.0, Severity.WARNING, Interval(step - 9, step))
    return Alarm(signal, signal.split(".")[0], step, "up", *evidence, confirms=confirms)


@pytest.mark.parametrize(
    ("alarms", "expected"),
    [
        ([("attention.h1", 100), ("attention.hqv", 400)], "attention"),
        ([("attention.h1", 100), ("attention.hqv", 401)], "unknown"),
        ([("attention.h1", 100), ("symptom.loss", 200)], "unknown"),
        ([("attention.h1", 100), ("symptom.loss", 100)], "data"),
        ([("attention.h1", 100), ("attention.lse", 110), ("symptom.loss", 120)], "attention"),
        ([("attention.h1", 100), ("symptom.mlp_update", 100)], "optimizer"),
        ([("symptom.mlp_update", 100)], "optimizer"),
        ([("attention.lse", 100)], None),
        ([("symptom.grad_norm", 100), ("attention.qk_norm", 100), ("attention.max_logit", 90)], None),
    ],
)
def test_the_table_of_signatures(alarms, expected):
    found = diagnose([alarm(*a) for a in alarms], 500)
    assert [str(d.mechanism) for d in found] == ([expected] if expected else [])


def test_the_absolute_rule_yields_to_an_earlier_loss():
    found = diagnose([alarm("symptom.loss", 100), alarm("attention.hqv", 200, confirms=True)], 300)
    assert [str(d.mechanism) for d in found] == ["data"]


def test_the_onset_of_a_diagnosis_is_the_hull_that_is_never_late():
    (found,) = diagnose([alarm("attention.h1", 100), alarm("attention.hqv", 150)], 500)
    assert found.onset == Interval(91, 100)
    assert math.isfinite(found.alarms[0].statistic)


def test_the_absolute_rule_waits_until_the_warm_up_is_over():
    """Early training moves hqv by itself: in the first round of evidence it cost one clean run an action at step 148."""
    x = run_values(end=400)
    early = slice(100, 180)
    x[early, columns("attention.hqv")] = np.where(np.isnan(x[early, columns("attention.hqv")]), np.nan, -0.2)
    detectors, reports = play(x)
    assert detectors.start == 198
    assert not any(r.opened for r in reports)
    x[300:, columns("attention.hqv")] = np.where(np.isnan(x[300:, columns("attention.hqv")]), np.nan, -0.2)
    _, reports = play(x)
    assert [a.signal for r in reports for a in r.opened] == ["attention.hqv"]


def test_without_a_baseline_the_absolute_bound_is_the_reference():
    detectors, _ = play(run_values(end=260))
    reference = detectors.reference(["attention.hqv[L0.H0]", "attention.h1[L0.H0]"], 250)
    assert reference == {"attention.hqv[L0.H0]": (0.0, pytest.approx(0.1 / 3))}
