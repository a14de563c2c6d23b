"""The `foreshock` command: everything a person does with a run, over everything below.

Exit codes: 0 done, 1 the answer is no (broken log, not healed, problems found), 2 wrong usage.
"""

from __future__ import annotations

from typing import Annotated

import typer

from foreshock import __version__
from foreshock.cli import audit, demo, doctor, incident, policy, runs

app = typer.Typer(
    help="Finds a fault inside a training run before the loss shows it, repairs the run, keeps the record.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(demo.app, name="demo", help="A real small model breaks, is caught and is healed.")
app.add_typer(policy.app, name="policy", help="Check, explain and describe policy files.")
app.add_typer(audit.app, name="audit", help="Show, verify and export the record of a run.")
app.add_typer(incident.app, name="incident", help="What is wrong, what was tried; approve or reject.")
app.command()(runs.status)
app.command(name="runs")(runs.list_runs)
app.command()(runs.replay)
app.command()(doctor.doctor)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"foreshock {__version__}")
        raise typer.Exit


def main() -> None:
    app()
