"""`foreshock demo attention`: a real small model breaks in its attention, is caught and is healed."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True)
LEFT_BEHIND = ("prefix", "clean", "unprotected", "protected", "ray", "report.html", "report.png")
"""What a demo leaves in its directory."""


@app.callback()
def _group() -> None:
    """Demonstrations on real small models."""


@app.command()
def attention(
    seed: Annotated[int, typer.Option(help="Seed of model and data.", min=0)] = 7,
    steps: Annotated[
        int, typer.Option(help="Steps of each run; the fault begins at step 500.", min=700)
    ] = 1200,
    out: Annotated[Path, typer.Option(help="Where runs, report.html and report.png go.")] = Path(
        "foreshock_demo"
    ),
    workers: Annotated[int, typer.Option(help="Ranks of the Ray Train job: 2 or 4.")] = 2,
    local: Annotated[bool, typer.Option("--local", help="One process, without Ray.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="The last line of standard output is one JSON object.")
    ] = False,
) -> None:
    """Biased low-precision attention, three runs: clean, unprotected, protected. Exit 0 only if it was healed."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from foreshock.lab.experiment import experiment, healed

    if workers not in (2, 4):
        raise typer.BadParameter(f"--workers {workers} is neither 2 nor 4")
    err = Console(file=sys.stderr)
    target = out / (f"attention-seed{seed}" if local else f"attention-seed{seed}-w{workers}")
    _clear(target)
    bars: dict[str, Any] = {}
    columns = (
        TextColumn("{task.description:12}"),
        BarColumn(),
        TextColumn("{task.completed:>5}/{task.total} loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True) as shown:

        def progress(run: str, step: int, end: int, loss: float) -> None:
            if run not in bars:
                bars[run] = shown.add_task(run, total=end, loss=loss)
            if step % 10 == 9:
                shown.update(bars[run], completed=step + 1, loss=loss)

        if local:
            facts, runs = experiment("up7", seed, steps, target, progress)
        else:
            facts, runs = _on_ray(seed, steps, target, workers, progress)
    report, picture = _report(target, facts, runs)
    ok = healed(facts)
    _table(err, facts, ok)
    err.print(
        f"report  {report}\npicture {picture}\nrecord  foreshock audit show {runs['protected'].directory}",
        soft_wrap=True,
    )
    if as_json:
        typer.echo(json.dumps({**facts, "healed": ok, "report": str(report), "picture": str(picture)}))
    if not ok:
        raise typer.Exit(1)


def _on_ray(seed: int, steps: int, target: Path, workers: int, progress: Any) -> tuple[Any, Any]:
    try:
        from foreshock.lab.parallel import RayFailed, experiment
    except ImportError as error:
        raise _without_ray(f"Ray Train cannot be used: {error}") from error
    try:
        return experiment("up7", seed, steps, target, workers, progress)
    except RayFailed as error:
        raise _without_ray(str(error)) from error


def _without_ray(reason: str) -> typer.Exit:
    typer.echo(f"{reason}\nforeshock demo attention --local runs without Ray.", err=True)
    return typer.Exit(1)


def _clear(target: Path) -> None:
    """Only what an earlier demo left is removed; anything else in the way is an error."""
    if target.exists():
        if any(child.name not in LEFT_BEHIND for child in target.iterdir()):
            raise typer.BadParameter(f"{target} holds files that are not a demo's; choose another --out")
        shutil.rmtree(target)
    target.mkdir(parents=True)


def _report(target: Path, facts: dict[str, Any], runs: dict[str, Any]) -> tuple[Path, Path]:
    import numpy as np

    from foreshock.review.report import write_report
    from foreshock.review.views import from_run

    views = []
    for name, label in (
        ("clean", "clean"),
        ("unprotected", "without Foreshock"),
        ("protected", "with Foreshock"),
    ):
        losses = np.full(max(runs[name].losses) + 1, np.nan)
        for step, loss in runs[name].losses.items():
            losses[step] = loss
        before = runs["prefix"].directory if "prefix" in runs else None
        views.append(from_run(runs[name].directory, name, label, losses, before=before))
    return write_report(target, "Foreshock: a fault in the attention", views, facts["onset"], facts)


def _table(err: Any, facts: dict[str, Any], ok: bool) -> None:
    from rich.table import Table

    table = Table(title="healed" if ok else "NOT healed", show_header=False)
    rows = {
        "fault begins": facts["onset"],
        "diagnosis": f"{facts['diagnosis']} in layers {facts['layers']} at step {facts['diagnosis_step']} ({facts['alarm_signal']})",
        "onset dated to": facts["onset_interval"],
        "action": f"{', '.join(facts['action']) or 'none'} before step {facts['applied_step']}: {facts['verdict']}",
        "update spectrum would alarm at": facts["spectrum_alarm_step"],
        "gradient norm / loss would alarm at": f"{facts['first_alarm_by_grad_norm']} / {facts['first_alarm_by_loss']}",
        "final loss clean": f"{facts['loss_clean']:.3f}",
        "final loss without Foreshock": f"{facts['loss_unprotected']:.3f}",
        "final loss with Foreshock": f"{facts['loss_protected']:.3f}",
        "alarms in the clean run": facts["alarms_in_clean"],
        "audit log": "verified" if facts["audit_verified"] else "BROKEN",
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    err.print(table)
