"""What the review shows of a run: the story in words and marks, the page, the pictures."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreshock.pipeline.signal_files import SignalWriter
from foreshock.pipeline.store import RunStore
from foreshock.remediation.audit import GENESIS, AuditRecord, seal
from foreshock.review import figures
from foreshock.review.report import write_report
from foreshock.review.views import Marks, RunView, by_layer, from_run, marks, subject
from foreshock.review.words import SENTENCES, excess, final, say, verdict
from foreshock.signals import SignalFrame, SignalKey, SignalTable

ALARM = {
    "signal": "attention.source_t", "mechanism": "attention", "step": 84, "direction": "up", "statistic": 14.2,
    "threshold": 12.4, "severity": "warning", "onset": [72, 80], "layers": [0, 1], "heads": [], "ranks": [0],
    "confirms": True,
}  # fmt: skip
DIAGNOSIS = {
    "mechanism": "attention", "step": 84, "severity": "warning", "onset": [72, 80], "layers": [0, 1], "heads": [],
    "ranks": [0], "confidence": "confirmed", "alarms": [ALARM], "ruled_out": [], "since": 84, "samples": 1,
}  # fmt: skip
MODE = {"code": "enforce", "person": "enforce", "policy": "enforce"}
UPCAST = [{"precision_upcast": {"layers": [0, 1], "how": "float32"}}]
ROLLBACK = [{"rollback": {"point": "p50", "step": 50, "skip": None}}]


def chain(*facts):
    records, previous = [], GENESIS
    for n, (kind, payload) in enumerate(facts, start=1):
        records.append(seal(n, n, 1.8e9 + n, kind, payload, previous))
        previous = records[-1].hash
    return records


def state(name, clock, reason=""):
    return "incident.state", {"incident": "i1", "state": name, "clock": clock, "reason": reason}


def healing(actions=UPCAST, end="recovered"):
    """The record of a run that fell ill at 80, was treated after step 88 (clock 89) and judged at clock 121."""
    points = [
        ("recovery_point", {"id": f"p{s}", "step": s, "finite": True, "bytes": 3_400_000, "seconds": 0.03})
        for s in (20, 40, 60)
    ]
    return chain(
        ("policy.loaded", {"name": "unattended", "source": "unattended.yaml", "mode": "enforce"}),
        ("attempt.started", {"attempt": 1, "ranks": [0], "step": 0, "mode": MODE}),
        *points,
        ("alarm.opened", ALARM),
        ("diagnosis", DIAGNOSIS),
        ("incident.opened", {"incident": "i1", "policy": "attention-low-precision", "diagnosis": DIAGNOSIS}),
        ("decision", {"id": "i1.1", "actions": actions, "mode": "enforce", "approval": "not needed"}),
        ("command.issued", {"id": "i1.1", "attempt": 1, "incident": "i1", "actions": actions}),
        (
            "command.applied",
            {"command": "i1.1", "step": 88, "acks": {"0": {"result": "applied", "step": 88}}},
        ),
        state("verifying", 89),
        ("outcome", {"command": "i1.1", "incident": "i1", "verdict": end, "reason": "5 in a row"}),
        state(end, 121, "5 in a row"),
    )


def view(name="protected", label="with Foreshock", audit=(), ill=False, n=160):
    rng = np.random.default_rng(0)
    steps = np.arange(0, n, 4)
    bad = (steps >= 80) * ill
    signals = {"symptom.grad_norm": (np.arange(n), np.exp(0.1 * rng.standard_normal(n)))}
    for layer in range(2):
        for head in range(4):
            noise = rng.standard_normal((3, steps.size))
            place = f"[L{layer}.H{head}]"
            signals[f"attention.source_t{place}"] = (steps, noise[0] + 5 * bad)
            signals[f"attention.h1{place}"] = (steps, 0.6 + 0.01 * noise[1] - 0.2 * bad)
            signals[f"attention.hqv{place}"] = (steps, -0.02 + 0.01 * noise[2] - 0.2 * bad)
    loss = 2 + 3 * np.exp(-np.arange(n) / 30) + 0.5 * ill * (np.arange(n) >= 100)
    return RunView(name, label, loss, signals, list(audit))


@pytest.fixture(scope="module")
def three():
    return [
        view("clean", "clean"),
        view("unprotected", "without Foreshock", ill=True),
        view(audit=healing()),
    ]


@pytest.fixture(scope="module")
def page(three, tmp_path_factory):
    html, png = write_report(tmp_path_factory.mktemp("out"), "A fault", three, 80, {"seed": 7, "loss": 1 / 3})
    return html.read_text(encoding="utf-8"), png.read_bytes()


class Strict(HTMLParser):
    """Every element closed in order; collects tags, attributes and text."""

    VOID = ("meta", "br", "hr", "img", "link", "input")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_marks_are_read_from_the_record():
    assert marks(view(audit=healing()), 80) == Marks(80, 84, 88, 88 + (121 - 89))


def test_after_a_rollback_recovery_is_dated_on_the_rewound_line():
    # clock 90 is step 50 again, so clock 121 is step 81
    assert marks(view(audit=healing(ROLLBACK))).verified == 81


def test_a_failed_verification_is_no_recovery():
    failed = view(audit=healing(end="failed"))
    assert marks(failed).verified is None
    assert "recovery not verified (failed)" in verdict([failed], 80)


def test_the_verdict_says_illness_diagnosis_action_recovery_and_cost(three):
    assert verdict(three, 80) == (
        "The attention of layers 0 and 1 fell ill at step 80; diagnosed at 84; attention upcast to float32 at 88; "
        "recovered at 120; final loss 0.000 above the clean run; untreated 0.500 above."
    )


def test_without_a_known_onset_the_estimate_is_said_to_be_one():
    assert "between steps 72 and 80, as estimated" in verdict([view(audit=healing())], None)


def test_a_dry_run_says_what_it_would_have_done():
    decision = {"id": "i1.1", "actions": UPCAST, "mode": "dry_run", "approval": "not needed"}
    dry = view(audit=chain(("diagnosis", DIAGNOSIS), ("decision", decision)))
    assert "nothing was done (it would have been: attention upcast to float32)" in verdict([dry], None)


def test_a_calm_run_says_so():
    assert verdict([view()], None) == "No diagnosis in 160 steps; no alarm."


def test_the_story_is_told_of_the_run_that_was_acted_on(three):
    assert subject(three).name == "protected"
    assert subject(three[::-1]).name == "protected"


def test_excess_compares_the_same_steps_only():
    clean, short = view("clean"), view("other")
    short = replace(short, loss=short.loss[:100] + 0.25)
    assert excess(short, [clean, short]) == pytest.approx(0.25)
    assert excess(clean, [clean, short]) is None
    assert final(clean) == pytest.approx(clean.loss[-50:].mean())


def test_every_kind_of_record_has_its_sentence():
    known = {r.kind: say(r) for r in healing()}
    assert known["recovery_point"] == "Recovery point before step 60: 3,400,000 bytes, 0.03 s, finite: True."
    assert known["command.issued"] == "Command i1.1 went to all ranks: attention upcast to float32."
    assert all(text != kind and text.endswith(".") for kind, text in known.items())
    others = {
        "alarm.closed": {"signal": "attention.h1", "step": 3, "reason": "action"},
        "seen": {"signal": "attention.source_t", "step": 3, "reason": "too small to matter"},
        "diagnosis.ended": {"mechanism": "attention", "step": 3},
        "incident.tried": {
            "incident": "i1",
            "rung": 0,
            "actions": ["pause"],
            "result": "failed",
            "reason": "no",
        },
        "approval.granted": {"incident": "i1", "decision": "i1.1", "by": "kim"},
        "approval.rejected": {"incident": "i1", "decision": "i1.1", "by": "kim"},
        "approval.expired": {"incident": "i1", "decision": "i1.1", "on_expiry": "nothing"},
        "approval.ignored": {"decision": "i1.1", "by": "kim", "reason": "late"},
        "verification.started": {"command": "i1.1", "signals": {"attention.h1": [0.6, 0.01]}},
        "announcement": {"text": "new data", "step": 3, "steps": 50},
        "human": {"verb": "mode", "argument": "observe", "who": "kim"},
        "outlier": {"signal": "symptom.loss", "step": 3},
        "confirmation": {"mechanism": "attention", "confirms": True, "text": "swap"},
        "ack.ignored": {"command": "i1.1", "rank": 0, "result": "applied"},
    }
    said = {r.kind: say(r) for r in chain(*others.items())}
    assert said["incident.tried"] == "Incident i1, rung 1 (training asked to stop): failed: no."
    assert all(text != kind and text.endswith(".") for kind, text in said.items())
    assert SENTENCES.keys() == known.keys() | said.keys()
    assert say(chain(("new.kind", {}))[0]) == "new.kind"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = sorted({f for r in healing() for f in r.payload})


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(SENTENCES)), st.dictionaries(st.sampled_from(FIELDS), json_values))
    )
)
def test_a_record_of_any_shape_is_still_told(facts):
    audit = [AuditRecord(n, n, 0.0, kind, payload, "", "") for n, (kind, payload) in enumerate(facts)]
    assert all(say(record) for record in audit)
    odd = view(audit=audit)
    assert verdict([odd], None).endswith(".")
    assert marks(odd, 3).onset == 3


def test_the_page_stands_alone(page):
    html, _ = page
    parsed = Strict(html)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base", "form"} & set(parsed.tags)
    for name, value in parsed.attributes:
        assert not name.startswith("on")
        if name in ("href", "xlink:href", "src", "action", "data"):
            assert value.startswith("#")
    assert "@import" not in html
    assert set(re.findall(r"url\(([^)])", html)) <= {"#"}
    assert set(re.findall(r"https?://[^\"<\s]*", html)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert "default-src 'none'" in html


def test_the_page_shows_marks_runs_facts_and_record(page, three):
    parsed = Strict(page[0])
    for wanted in (
        "onset 80", "alarm 84", "action 88", "recovered 120", "without Foreshock", "+0.500", "0.333333",
        "3 recovery points.", "14 records are as they were written", verdict(three, 80),
    ):  # fmt: skip
        assert wanted in parsed.text
    assert parsed.tags.count("svg") == 2
    ids = [value for name, value in parsed.attributes if name == "id"]
    assert ids
    assert len(ids) == len(set(ids))
    assert sum(name == "aria-label" and "fell ill" in value for name, value in parsed.attributes) == 2


def test_hostile_text_stays_text(tmp_path):
    evil = '"><script>alert(1)</script><img src=x onerror=1>$\\frac$ {0} \u202e\ud800'
    audit = chain(
        *((r.kind, {**r.payload, "reason": evil, "name": evil}) for r in healing()), (evil, {evil: evil})
    )
    hostile = replace(view(label=evil, audit=audit), name=evil)
    html, _ = write_report(tmp_path, evil, [hostile], None, {evil: [evil]})
    parsed = Strict(html.read_text(encoding="utf-8"))
    assert not {"script", "img"} & set(parsed.tags)
    assert not any(name == "onerror" for name, _ in parsed.attributes)
    assert "<script>alert(1)</script>" in parsed.text


def test_a_broken_chain_is_said_at_the_top(tmp_path):
    audit = healing()
    audit[4] = replace(audit[4], payload={**audit[4].payload, "bytes": 1})
    html, _ = write_report(tmp_path, "Edited", [view(audit=audit)], None, {})
    text = Strict(html.read_text(encoding="utf-8")).text
    assert text.index("The record is broken") < text.index("Runs")
    assert "record 5" in text


def test_the_picture_is_a_png_1600_pixels_wide(page):
    assert page[1][:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">I", page[1][16:20])[0] == 1600


def test_the_same_run_gives_the_same_bytes(three, tmp_path):
    first, second = (write_report(tmp_path / name, "T", three, 80, {}) for name in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_colours_of_the_svg_can_go_dark(three):
    drawn = figures.svg(figures.losses(three, 80))
    assert drawn.startswith("<svg")
    assert set(re.findall(r"(?<!, )#[0-9a-f]{6}", drawn)) == set()
    assert {"var(--blue, #0969da)", "var(--ink, #1f2328)"} <= set(re.findall(r"var\([^)]*\)", drawn))


@pytest.mark.parametrize(
    ("loss", "signals"),
    [
        (np.zeros(0), {}),
        (np.full(5, np.nan), {"attention.h1[L0.H0]": (np.zeros(0, np.int64), np.zeros(0))}),
        (
            np.array([1.0, np.inf, 2.0]),
            {"symptom.grad_norm": (np.arange(3), np.array([0.0, np.inf, np.nan]))},
        ),
    ],
    ids=["nothing", "only NaN", "infinite"],
)
def test_one_run_with_hardly_anything_still_gives_a_page(tmp_path, loss, signals):
    html, png = write_report(tmp_path, "Bare", [RunView("r", "r", loss, signals, [])], None, {})
    assert "no alarm" in Strict(html.read_text(encoding="utf-8")).text
    assert png.stat().st_size > 1000


def test_labels_of_marks_never_share_a_row_where_they_would_touch(three):
    flags = figures._flags(three, 80, 160 / 6)
    assert [(step, row) for step, _, row in flags] == [(120, 0), (88, 0), (84, 1), (80, 2)]


def test_smoothing_looks_back_only_and_passes_over_gaps():
    x = np.zeros(30)
    x[12], x[5] = 10.0, np.nan
    smoothed = figures.smooth(x)
    assert smoothed[:5] == pytest.approx(np.zeros(5))
    assert np.isnan(smoothed[5])
    assert smoothed[12] == pytest.approx(10 / 9)
    assert smoothed[21] == pytest.approx(1.0)
    assert smoothed[22:] == pytest.approx(np.zeros(8))


def test_by_layer_sums_the_heads_that_were_measured():
    signals = {
        "attention.h1[L0.H0]": (np.array([0, 4]), np.array([1.0, 2.0])),
        "attention.h1[L0.H1]": (np.array([4]), np.array([3.0])),
        "attention.h1[L10.H0]": (np.array([0]), np.array([7.0])),
        "attention.h10[L0.H0]": (np.array([0]), np.array([9.0])),
    }
    layers = by_layer(RunView("r", "r", np.zeros(0), signals, []), "attention.h1")
    assert {n: [a.tolist() for a in layer] for n, layer in layers.items()} == {
        0: [[0, 4], [1.0, 5.0], [1.0, 2.0]],
        10: [[0], [7.0], [1.0]],
    }


KEYS = (SignalKey("symptom", "loss"), SignalKey("attention", "h1", 0, 1))


def write_run(directory: Path, rows) -> Path:
    table = SignalTable(KEYS)
    with_store = RunStore(directory)
    with with_store.transaction():
        event = with_store.append_event("Hello", {})
        with_store.append_audit(event, 1.8e9, "human", {"verb": "mode", "argument": "observe", "who": "kim"})
    with_store.close()
    writer = SignalWriter(directory, table)
    for seq, (timeline, step, values) in enumerate(rows):
        place = {"run": "r", "attempt": 1, "rank": 0, "seq": seq, "timeline": timeline, "step": step}
        writer.append(SignalFrame.build(values, table=table.id, **place))
    writer.close()
    return directory


def test_a_run_is_read_back_and_after_a_rewind_the_newest_timeline_counts(tmp_path):
    nan = np.nan
    rows = [(0, 0, [5, nan]), (0, 1, [4, 0.5]), (0, 2, [9, 0.1]), (1, 1, [3, nan]), (1, 2, [2, 0.4])]
    run = from_run(write_run(tmp_path / "run", rows), "r", "r")
    assert run.loss.tolist() == [5, 3, 2]
    steps, values = run.signals["attention.h1[L0.H1]"]
    assert (steps.tolist(), values.tolist()) == ([2], [pytest.approx(0.4)])
    html, _ = write_report(tmp_path, "Read", [run], None, {})
    assert "the anchor at 1 holds" in html.read_text(encoding="utf-8")


def test_a_fork_shows_what_led_up_to_it(tmp_path):
    before = write_run(tmp_path / "before", [(0, 0, [5, 0.6]), (0, 1, [4, 0.5])])
    fork = write_run(tmp_path / "fork", [(0, 2, [3, 0.4])])
    assert from_run(fork, "r", "r", before=before).signals["symptom.loss"][0].tolist() == [0, 1, 2]
    assert from_run(fork, "r", "r", np.array([1.0])).loss.tolist() == [1.0]
