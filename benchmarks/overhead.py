"""Overhead on the lab model: watched against unwatched steps, interleaved in the same processes.

    make bench          prints a Markdown table and writes evidence/overhead.json

Trainings that differ only in how they are watched run the same batches in blocks of `BLOCK` steps, in turn. A block's
ratio is its time over that of the unwatched block of the same round; a row gives the median over rounds and the middle
half of them. The first row compares two unwatched runs: what the machine's noise alone gives. Wall time is what the
training loop waits; CPU time (all rounds together) counts all threads of the ranks' processes and waits for the work that
the emitter and the point writer still have in hand, so nothing is left for the other run to pay.

With several ranks, each is a process under DistributedDataParallel over gloo, and the hub is an actor of the Ray that
Foreshock starts beside them: its CPU is not in the CPU column, but where there are fewer cores than ranks and hub, the
wall column pays for it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

HERE = Path(__file__).resolve().parent.parent
FILE = HERE / "evidence" / "overhead.json"
BLOCK = 50
WARM = 2
"""Rounds that warm up and are not counted."""
Options = dict[str, Any] | None
UNATTENDED = {"allow": "enforce", "policy": "unattended"}
ALONE: dict[str, Options] = {
    "unwatched": None,
    "observe": {"allow": "observe"},
    "observe, sync": {"allow": "observe", "sync": True},
    "dry_run": {"allow": "dry_run", "policy": "unattended"},
    "enforce": UNATTENDED,
}
REMOTE: dict[str, Options] = {
    name: {**(options or {}), "hub": "ray"} for name, options in ALONE.items() if name not in ("unwatched", "observe, sync")
}  # fmt: skip


def quartiles(ratios: list[float]) -> list[float]:
    """First quartile, median, third quartile."""
    return [round(q, 4) for q in statistics.quantiles(ratios, n=4, method="inclusive")]


def measure(modes: Mapping[str, Options], blocks: int, rank: int = 0, world: int = 1) -> dict[str, Any]:
    """Every mode against an unwatched run of the same process, `blocks` rounds; rows by mode."""
    import foreshock
    from foreshock.lab.scenarios import SCENARIOS, Training

    runs = {"": None, **modes}
    wall: dict[str, list[float]] = {name: [] for name in runs}
    cpu = dict.fromkeys(runs, 0.0)
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        sides = []
        for name, options in runs.items():
            training = Training(SCENARIOS["clean"], 0, BLOCK * blocks, rank, world)
            watch = None
            if options is not None:
                directory = Path(place) / name.replace(", ", "-")
                watch = foreshock.watch(
                    training.model,
                    training.optimizer,
                    {"schedule": training.schedule},
                    run_dir=directory,
                    **options,
                )
                stack.enter_context(watch)
            source = watch.batches(training.batches) if watch else iter(training.batches)
            sides.append((name, training, source, watch))
        for block in range(blocks):
            for name, training, source, watch in sides[block % len(sides) :] + sides[: block % len(sides)]:
                if world > 1:
                    _together()
                began, used = time.perf_counter(), time.process_time()
                for step in range(block * BLOCK, (block + 1) * BLOCK):
                    loss, norm = training.train_step(next(source), step)
                    if watch is not None:
                        watch.step(loss, norm)
                wall[name].append(time.perf_counter() - began)
                if watch is not None and not watch.drain():
                    raise RuntimeError(f"{name}: the hub did not take what was measured")
                if block >= WARM:
                    cpu[name] += time.process_time() - used
    cpu = _summed(cpu) if world > 1 else cpu
    rows = {}
    for name in modes:
        pairs = zip(wall[name][WARM:], wall[""][WARM:], strict=True)
        low, middle, high = quartiles([watched / bare for watched, bare in pairs])
        rows[name] = {"wall": middle, "half": [low, high], "cpu": round(cpu[name] / cpu[""], 4)}
    return {"rows": rows, "step_ms": round(1e3 * statistics.median(wall[""][WARM:]) / BLOCK, 2)}


def _together() -> None:
    from torch import distributed

    distributed.barrier()


def _summed(spent: dict[str, float]) -> dict[str, float]:
    import torch
    from torch import distributed

    total = torch.tensor(list(spent.values()), dtype=torch.float64)
    distributed.all_reduce(total)
    return dict(zip(spent, total.tolist(), strict=True))


def spread(world: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`work(*arguments, rank, world)` in `world` processes over gloo; what each returned (JSON), by rank."""
    from torch import multiprocessing

    with socket.socket() as free, tempfile.TemporaryDirectory() as place:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        multiprocessing.spawn(_one_rank, (world, port, place, work, arguments), nprocs=world)
        return [json.loads((Path(place) / str(rank)).read_text()) for rank in range(world)]


def _one_rank(
    rank: int, world: int, port: int, place: str, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    (Path(place) / str(rank)).write_text(json.dumps(work(*arguments, rank, world)))
    distributed.destroy_process_group()


def facts(command: str) -> dict[str, Any]:
    """Where and from what a measurement was made; a commit with a + had changes beside it."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=HERE, capture_output=True, text=True, check=True
        ).stdout.strip()

    commit = git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "foreshock") else "")
    return {
        "command": command,
        "commit": commit,
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 1),
    }


def table(rows: dict[str, Any]) -> str:
    """As Markdown; what is committed was measured before quartiles were kept, until `make bench` is run anew."""
    if not all("half" in row for row in rows["ratios"].values()):
        lines = [f"| {name} | {row['wall']:.3f} | {row['cpu']:.3f} |" for name, row in rows["ratios"].items()]
        head = "| the lab model, 2 layers, d 128, 512 tokens a step | wall | CPU, all threads |"
        return "\n".join([head, "|---|---|---|", *lines])
    out = [
        "| the lab model, 2 layers, d 128, 512 tokens a step | wall, median | middle half | CPU, ranks |",
        "|---|---|---|---|",
    ]
    for name, row in rows["ratios"].items():
        low, high = row["half"]
        out.append(f"| {name} | {row['wall']:.3f} | {low:.3f} to {high:.3f} | {row['cpu']:.3f} |")
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=12, help=f"rounds, of which {WARM} warm up")
    parser.add_argument("--table", action="store_true", help="print the committed table and stop")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(FILE.read_text())))
        return
    rows = {**facts("make bench"), "blocks": args.blocks, "ratios": {}, "unwatched_step_ms": {}}
    alone = {f"1 rank, {name}": options for name, options in ALONE.items()}
    several = {
        world: {f"{world} ranks, {name}": options for name, options in REMOTE.items()} for world in (2, 4)
    }
    for world, modes in {1: alone, **several}.items():
        found = spread(world, measure, modes, args.blocks)[0]
        rows["ratios"] |= found["rows"]
        rows["unwatched_step_ms"][str(world)] = found["step_ms"]
        print(json.dumps(found), flush=True)
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
