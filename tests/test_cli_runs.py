"""`foreshock status`, `runs`, `replay` and `incident` on a real run that waits for a person."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import foreshock
from foreshock.cli.main import app
from foreshock.lab.flash import KernelFault
from foreshock.pipeline.store import RunStore

ASKING = """
apiVersion: foreshock/v1
name: asking
mode: enforce
group_wait: 0 steps
policies:
  - name: attention
    match: {mechanism: attention}
    ladder: [{do: [{precision_upcast: {}}], approval: {expires: 500 steps}}]
"""


def cli(*arguments):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return result.exit_code, result.output


@pytest.fixture
def waiting(small, tmp_path, policy_file):
    """A run whose incident waits for approval; the training goes on when the test asks it to."""
    training = small()
    with foreshock.watch(
        training.model,
        training.optimizer,
        run_dir=tmp_path / "run",
        run="night",
        policy=policy_file(ASKING),
        allow="enforce",
        sync=True,
    ) as watch:
        watch._link.shell._polled = 0.0
        batches = watch.batches(training.loader)

        def steps(n):
            verdicts = []
            for _ in range(n):
                batch = next(batches)
                training.break_attention(KernelFault("delta", 6, "up", gain=3.0))
                verdicts.append(watch.step(training.train_step(batch)))
            return verdicts

        steps(20)
        yield tmp_path / "run", steps, watch


def test_a_person_approves_and_the_run_acts(waiting, monkeypatch):
    run, steps, _ = waiting
    monkeypatch.setattr("foreshock.pipeline.shell.POLL_SECONDS", 0.0)
    code, out = cli("incident", "list", run, "--json")
    assert code == 0
    assert [(i["id"], i["state"]) for i in json.loads(out)] == [("i1", "awaiting")]
    code, out = cli("incident", "show", run, "i1")
    assert code == 0
    assert "waits for: foreshock incident approve" in out
    assert cli("incident", "approve", run, "i1", "--by", "ada")[0] == 0
    applied = [name for verdict in steps(3) for name in verdict.applied]
    assert applied == ["precision_upcast"]
    with RunStore.open_readonly(run) as store:
        granted = [r.payload for r in store.audit() if r.kind == "approval.granted"]
    assert [(g["incident"], g["decision"], g["by"]) for g in granted] == [("i1", "i1.1", "ada")]


def test_a_person_rejects_and_nothing_is_done(waiting, monkeypatch):
    run, steps, _ = waiting
    monkeypatch.setattr("foreshock.pipeline.shell.POLL_SECONDS", 0.0)
    assert cli("incident", "reject", run, "i1", "--by", "ada")[0] == 0
    assert [v.applied for v in steps(5)] == [()] * 5
    code, out = cli("incident", "list", run, "--json")
    assert json.loads(out)[0]["state"] == "exhausted"
    code, out = cli("incident", "approve", run, "i1")
    assert code == 1
    assert "nothing waits for an answer" in out


def test_an_unknown_incident_is_told_with_what_there_is(waiting):
    code, out = cli("incident", "show", waiting[0], "i7")
    assert code == 1
    assert "it has: i1" in out


def test_status_says_what_is_watched_and_which_setting_won(waiting):
    code, out = cli("status", waiting[0], "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["state"] == "running"
    assert facts["mode"] == {"acting": "enforce", "code": "enforce", "person": "enforce", "policy": "enforce"}
    assert facts["settings"]["allow"] == {"value": "enforce", "source": "argument"}
    code, out = cli("status", waiting[0])
    assert code == 0
    assert "the lowest wins" in out


def test_runs_lists_and_replay_agrees(waiting):
    run, _, watch = waiting
    watch.close()
    code, out = cli("runs", run.parent, "--json")
    assert code == 0
    assert [(r["run"], r["state"]) for r in json.loads(out)] == [("night", "ended")]
    code, out = cli("replay", run, "--json")
    assert code == 0
    assert json.loads(out)["difference"] is None


def test_a_run_that_died_is_called_dead(tmp_path, small):
    training = small()
    watch = foreshock.watch(training.model, training.optimizer, run_dir=tmp_path / "run", run="x", sync=True)
    for batch in watch.batches(training.loader):
        watch.step(training.train_step(batch))
        break
    with RunStore(tmp_path / "run") as store:
        status = json.loads(store.get_meta("status"))
        child = subprocess.run(
            [sys.executable, "-c", "import os; print(os.getpid())"],
            capture_output=True,
            text=True,
            check=True,
        )
        store.set_meta("status", json.dumps({**status, "pid": int(child.stdout)}))
    assert json.loads(cli("status", tmp_path / "run", "--json")[1])["state"] == "died"
    watch.close()


def test_no_runs_is_a_sentence_not_an_error(tmp_path):
    code, out = cli("runs", tmp_path)
    assert code == 0
    assert "no runs under" in out


@pytest.mark.parametrize(
    "command",
    [[], ["demo"], ["policy"], ["audit"], ["incident"], ["status"], ["runs"], ["replay"], ["doctor"]],
)
def test_every_command_has_help(command):
    code, out = cli(*command, "--help")
    assert code == 0
    assert "Usage" in out


def test_the_version_is_printed():
    assert cli("--version") == (0, f"foreshock {foreshock.__version__}\n")


def test_importing_foreshock_is_light():
    code = "import sys, foreshock; print([m for m in ('torch', 'ray', 'river', 'scipy', 'numpy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out == "[]\n"


@pytest.fixture
def damaged(tmp_path):
    for name, content in (("text", b"not a database"), ("empty", b""), ("zeros", bytes(8192))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.db").write_bytes(content)
    return tmp_path


@pytest.mark.parametrize("name", ["text", "empty", "zeros"])
@pytest.mark.parametrize("command", [["status"], ["replay"], ["incident", "list"], ["audit", "show"]])
def test_a_damaged_run_is_one_readable_error(damaged, command, name):
    code, out = cli(*command, damaged / name)
    assert code in (1, 2)
    assert "Traceback" not in out
    assert len(out.strip().splitlines()) <= 8


def test_one_damaged_run_does_not_hide_the_others(damaged, small):
    training = small()
    with foreshock.watch(training.model, training.optimizer, run_dir=damaged / "good", sync=True) as watch:
        for batch, _ in zip(watch.batches(training.loader), range(2), strict=False):
            watch.step(training.train_step(batch))
    code, out = cli("runs", damaged, "--json")
    assert code == 0
    states = {r["run"]: r["state"] for r in json.loads(out.splitlines()[-1])}
    assert states["good"] == "ended"
    assert set(states.values()) == {"ended", "damaged"}


def test_brackets_in_names_are_printed_not_interpreted(tmp_path, small):
    training = small()
    with foreshock.watch(
        training.model, training.optimizer, run_dir=tmp_path / "r", run="exp[lr=3e-4][bold]", sync=True
    ) as watch:
        for batch, _ in zip(watch.batches(training.loader), range(2), strict=False):
            watch.step(training.train_step(batch))
    code, out = cli("status", tmp_path / "r")
    assert code == 0
    assert "exp[lr=3e-4][bold]" in out


def test_nobody_answers_for_a_run_that_has_ended(waiting):
    run, _, watch = waiting
    watch.close()
    code, out = cli("incident", "approve", run, "i1")
    assert code == 1
    assert "the run has ended" in out


def test_a_device_that_is_not_there_is_a_usage_error():
    code, out = cli("doctor", "--kernels", "--device", "foo")
    assert code == 2
    assert "--device foo" in out
