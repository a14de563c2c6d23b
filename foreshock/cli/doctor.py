"""`foreshock doctor`: what this machine is, and whether its attention kernels are honest.

Beside the road: asked before a run. Prints a table, or one JSON object with `--json`.
"""

from __future__ import annotations

import json
import math
import platform
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from foreshock.monitors.kernels import KernelVerdict

_PACKAGES = ("torch", "ray", "river", "numpy", "flash-attn")


def doctor(
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Measure PyTorch's attention kernels against float64.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    device: Annotated[str, typer.Option(help="Where to run the kernels; the GPU if there is one.")] = "auto",
    heads: Annotated[int, typer.Option(min=1)] = 4,
    head_dim: Annotated[int, typer.Option(min=8, help="Width of a head.")] = 64,
    tokens: Annotated[int, typer.Option(min=32, help="Length of a sequence.")] = 128,
    slices: Annotated[int, typer.Option(min=4, help="Slices a kernel, dtype and kind.")] = 20,
) -> None:
    """Look at this machine; with --kernels, at its attention kernels too.

    Each kernel runs on plain slices and on slices with the trigger of arXiv 2510.04212: a row maximum shared
    by several keys, and values of one sign. Exit status 0: all honest, or biased too little to matter. 1: one
    is materially biased under the trigger, or returns a wrong output. A biased kernel does harm only where a
    run meets the trigger.
    """
    from foreshock.monitors import kernels as room

    facts, rows = _environment(), list[room.KernelVerdict]()
    if kernels:
        import torch

        where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        try:
            torch.empty(0, device=where)
        except (RuntimeError, AssertionError) as error:
            raise typer.BadParameter(f"--device {device}: {str(error).splitlines()[0]}") from None
        rows = room.check_kernels(device=where, heads=heads, head_dim=head_dim, tokens=tokens, slices=slices)
    healthy = not any(row.verdict in (room.BIASED, room.WRONG) for row in rows)
    if as_json:
        report: dict[str, Any] = {"environment": facts}
        if kernels:
            report |= {"kernels": [_json_safe(asdict(row)) for row in rows], "healthy": healthy}
        typer.echo(json.dumps(report, allow_nan=False))
    else:
        _print(facts, rows)
    if not healthy:
        raise typer.Exit(1)


def _json_safe(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN: what a wrong kernel makes unmeasurable is null."""
    return {k: None if isinstance(x, float) and not math.isfinite(x) else x for k, x in row.items()}


def _environment() -> dict[str, str | None]:
    import torch

    facts: dict[str, str | None] = {"python": platform.python_version(), "machine": platform.machine()}
    for name in _PACKAGES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = None
    facts["cuda"] = torch.version.cuda
    facts["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    facts["cpu"] = torch.backends.cpu.get_cpu_capability()
    return facts


def _print(facts: dict[str, str | None], rows: list[KernelVerdict]) -> None:
    from rich.console import Console
    from rich.table import Table

    from foreshock.monitors import kernels as room

    console = Console()
    for name, fact in facts.items():
        console.print(f"{name:12} {fact or 'none'}", highlight=False)
    if not rows:
        return
    table = Table("kernel", "dtype", "slices", "t [range]", "bias / sd(delta)", "output error", "verdict")
    colour = {room.HONEST: "green", room.IMMATERIAL: "yellow"}
    for row in rows:
        spread = f"{row.t:.1f} \\[{row.t_min:.1f}, {row.t_max:.1f}]"
        verdict = f"[{colour.get(row.verdict, 'bold red')}]{row.verdict}[/]"
        sizes = f"{row.bias:.1e}", f"{row.mismatch:.1e}"
        table.add_row(row.kernel, row.dtype, row.slices, spread, *sizes, verdict)
    console.print(table)
