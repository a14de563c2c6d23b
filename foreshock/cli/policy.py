"""`foreshock policy`: check a policy before a run believes it, read it in plain English, print its schema.

Exit codes: 0 sound, 1 problems found (on stderr, or in the one object of `--json`), 2 wrong usage.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from foreshock.policies import PolicyError, PolicySet, explain, resolve
from foreshock.policies.schema import dumps

app = typer.Typer(no_args_is_help=True, help="Check, explain and describe policies.")
_File = Annotated[str, typer.Argument(metavar="FILE|NAME", help="A policy file, `default` or `unattended`.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def _resolve(file: str, as_json: bool) -> PolicySet:
    try:
        return resolve(file)
    except PolicyError as error:
        if as_json:
            _print({"ok": False, "file": file, "problems": [asdict(problem) for problem in error.problems]})
        else:
            typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def _print(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, ensure_ascii=True))


@app.command()
def check(file: _File, as_json: _Json = False) -> None:
    """Say whether a policy is sound; every problem with its line, column and a way out."""
    policy_set = _resolve(file, as_json)
    names = [policy.name for policy in policy_set.policies]
    if as_json:
        found = {"name": policy_set.name, "mode": policy_set.mode, "policies": names}
        _print({"ok": True, "file": file, **found})
    else:
        typer.echo(f"{file}: sound. {policy_set.name}, mode {policy_set.mode}: {', '.join(names)}")


@app.command(name="explain")
def explain_command(file: _File, as_json: _Json = False) -> None:
    """Say in plain English when a policy acts, what it tries, what that costs and how success is judged."""
    policy_set = _resolve(file, as_json)
    text = explain(policy_set)
    if as_json:
        _print({"ok": True, "file": file, "explanation": text, "policy_set": policy_set.to_json()})
    else:
        typer.echo(text, nl=False)


@app.command()
def schema() -> None:
    """Print the JSON Schema (draft-07) of policy files."""
    typer.echo(dumps(), nl=False)
