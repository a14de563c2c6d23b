"""The tables of docs/measured.md come from the committed evidence, the claims hold in it, and one row is made again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import overhead  # noqa: E402

import evidence  # noqa: E402


@pytest.fixture(scope="module")
def rows():
    return evidence.load()


@pytest.fixture(scope="module")
def up7(rows):
    return [r for r in rows if r["scenario"] == "up7"]


def block(name: str) -> str:
    text = (ROOT / "docs" / "measured.md").read_text()
    return text.split(f"<!-- {name} -->\n")[1].split(f"\n<!-- /{name} -->")[0].strip()


def test_the_docs_show_the_committed_tables(rows):
    assert block("evidence") == evidence.tables(rows)
    assert block("overhead") == overhead.table(json.loads(overhead.FILE.read_text()))


def test_every_reported_run_is_there_with_its_commit(rows):
    wanted = {(name, seed) for job, seed in evidence.jobs() for name in evidence.scenarios(job)}
    assert {(r["scenario"], r["seed"]) for r in rows} == wanted
    assert all(r["commit"] and not r["commit"].endswith("+") for r in rows)
    assert all(r["audit_verified"] for r in rows)


def test_the_untreated_fault_does_harm_and_the_treated_one_does_not(up7):
    assert all(r["loss_unprotected"] - r["loss_clean"] >= 0.15 for r in up7)
    excess = [r["loss_protected"] - r["loss_clean"] for r in up7]
    assert sum(e <= 0.03 for e in excess) >= 9
    assert max(excess) <= 0.06


def test_the_source_probe_is_first(up7):
    for r in up7:
        assert r["diagnosis"] == "attention"
        assert r["alarm_signal"] == "attention.source_t"
        assert r["layers"] == [0, 1]
        assert r["diagnosis_step"] - r["onset"] <= 20
        others = [r[f"symptom_{name}"] for name in ("loss", "grad_norm", "qk_norm", "max_logit")]
        assert all(other is None or r["diagnosis_step"] < other for other in others)
        assert r["onset_interval"][0] <= r["onset"]


def test_the_update_spectrum_alone_is_before_loss_and_gradient_norm(up7):
    def before(r, symptom):
        return r["spectrum_diagnosis_step"] and (
            r[symptom] is None or r["spectrum_diagnosis_step"] < r[symptom]
        )

    assert sum(bool(before(r, "symptom_loss") and before(r, "symptom_grad_norm")) for r in up7) >= 9
    assert all(r["spectrum_before_onset"] == 0 for r in up7)
    assert all(r["spectrum_onset_interval"][0] <= r["onset"] for r in up7)


def test_no_clean_run_was_touched(up7):
    assert sum(r["actions_in_clean"] for r in up7) == 0


def test_a_fault_in_one_layer_names_that_layer_alone(rows):
    found = [r for r in rows if r["scenario"] == "up7-layer1"]
    assert [r["layers"] for r in found] == [[1]] * len(evidence.FEW)
    assert all(0 < r["diagnosis_step"] - r["onset"] <= 20 for r in found)


def test_no_control_is_called_attention_or_treated_for_it(rows):
    names = (*evidence.CONTROLS, "cosine")
    controls = [r for r in rows if r["scenario"] in names]
    assert len(controls) == len(names) * len(evidence.FEW)
    assert all("attention" not in r["diagnosis"] for r in controls)
    assert all("precision_upcast" not in r["action"] for r in controls)
    harmless = ("lr10-announced", "stochastic5", "zero5", "output4", "cosine")
    assert all(r["action"] == [] for r in controls if r["scenario"] in harmless)


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_the_demo_makes_one_row_again(up7, tmp_path):
    """The command of the README, a reported seed, the same story: steps to the step, losses to what machines differ by."""
    from foreshock.cli.main import app

    row = up7[0]
    result = CliRunner().invoke(
        app, ["demo", "attention", "--local", "--seed", str(row["seed"]), "--out", str(tmp_path), "--json"]
    )
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout.splitlines()[-1])
    for name in ("scenario", "seed", "onset", "diagnosis", "layers", "action", "verdict", "audit_verified"):
        assert facts[name] == row[name], name
    assert abs(facts["diagnosis_step"] - row["diagnosis_step"]) <= 8
    assert facts["loss_unprotected"] - facts["loss_clean"] >= 0.15
    assert facts["loss_protected"] - facts["loss_clean"] <= 0.06
    assert Path(facts["report"]).stat().st_size > 50_000
    assert Path(facts["picture"]).read_bytes()[:4] == b"\x89PNG"
