"""`foreshock doctor` as a person and as a script meet it."""

from __future__ import annotations

import json
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

from foreshock.cli.doctor import doctor
from foreshock.monitors import kernels
from foreshock.monitors.kernels import BIASED, HONEST, IMMATERIAL, WRONG, KernelVerdict

app = typer.Typer()
app.command()(doctor)


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "160"})


def test_without_options_it_tells_the_environment():
    result = run()
    assert result.exit_code == 0
    assert f"python       {sys.version.split()[0]}" in result.stdout
    for name in ("torch", "ray", "river", "flash-attn", "cuda", "cpu"):
        assert f"\n{name} " in result.stdout


def test_json_is_one_object_with_the_biased_kernel_and_exit_status_one():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    result = run("--kernels", "--json", "--device", "cpu", "--slices", "6")
    torch.set_num_threads(threads)
    report = json.loads(result.stdout)
    found = {(r["kernel"], r["dtype"], r["slices"]): r["verdict"] for r in report["kernels"]}
    assert found["flash", "bfloat16", "trigger"] == BIASED
    assert found["math", "bfloat16", "trigger"] == IMMATERIAL
    assert found["flash", "bfloat16", "plain"] == HONEST
    assert report["healthy"] is False
    assert report["environment"]["torch"]
    assert result.exit_code == 1


@pytest.mark.parametrize(("verdict", "code"), [(HONEST, 0), (IMMATERIAL, 0), (BIASED, 1), (WRONG, 1)])
def test_the_exit_status_and_the_table_follow_the_verdict(monkeypatch, verdict, code):
    nan = float("nan") if verdict == WRONG else -19.6
    row = KernelVerdict("flash", "bfloat16", "trigger", nan, -26.6, -8.7, 2e-3, 2e-3, 70.0, verdict)
    monkeypatch.setattr(kernels, "check_kernels", lambda **shape: [row])
    result = run("--kernels")
    assert result.exit_code == code
    assert verdict in result.stdout
    assert "[-26.6, -8.7]" in result.stdout
    parsed = json.loads(run("--kernels", "--json").stdout)["kernels"][0]
    assert parsed["t"] == (None if verdict == WRONG else -19.6)


def test_help_says_what_the_exit_status_means():
    assert "Exit status 0" in run("--help").stdout
