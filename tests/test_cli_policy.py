"""`foreshock policy` as a person and as a script meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foreshock.cli.policy import app
from foreshock.policies import SHIPPED, shipped
from foreshock.policies.schema import json_schema

run = CliRunner()


@pytest.mark.parametrize("name", SHIPPED)
def test_check_accepts_what_is_shipped(name: str) -> None:
    result = run.invoke(app, ["check", name])
    assert result.exit_code == 0
    assert "sound" in result.stdout
    assert "attention-low-precision" in result.stdout


def test_check_shows_each_problem_at_its_place_on_stderr(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("apiVersion: foreshock/v1\nname: test\nmode: dryrun\npolicies: []\n")
    result = run.invoke(app, ["check", str(path)])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert f"{path}:3:7: 'dryrun' is not one of observe, dry_run, enforce\n  help: did you" in result.stderr
    assert f"{path}:4:11: an empty list" in result.stderr


def test_json_is_one_object_either_way(tmp_path: Path) -> None:
    sound = run.invoke(app, ["check", "default", "--json"])
    assert json.loads(sound.stdout)["ok"] is True
    for command in ("check", "explain"):
        broken = run.invoke(app, [command, str(tmp_path / "none.yaml"), "--json"])
        assert broken.exit_code == 1
        assert broken.stderr == ""
        (problem,) = json.loads(broken.stdout)["problems"]
        assert set(problem) == {"file", "line", "column", "message", "suggestion"}


def test_explain_is_plain_english_and_its_json_holds_the_policy() -> None:
    result = run.invoke(app, ["explain", "unattended"])
    assert result.exit_code == 0
    assert "First:   precision_upcast(target affected, dtype float32)" in result.stdout
    as_json = json.loads(run.invoke(app, ["explain", "unattended", "--json"]).stdout)
    assert as_json["policy_set"] == shipped("unattended").to_json()
    assert as_json["explanation"] == result.stdout


def test_schema_prints_the_json_schema() -> None:
    assert json.loads(run.invoke(app, ["schema"]).stdout) == json_schema()


@pytest.mark.parametrize("arguments", [["check"], ["nothing"], ["check", "default", "--yaml"]])
def test_wrong_usage_exits_with_two(arguments: list[str]) -> None:
    assert run.invoke(app, arguments).exit_code == 2
