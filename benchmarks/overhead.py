"""Overhead on the lab model: watched against unwatched steps, interleaved in one process.

    make bench          prints a Markdown table and writes evidence/overhead.json

A ratio is the median over blocks of (time of a watched block) / (time of the unwatched block next to it), both of
`BLOCK` steps on the same batches. The first row compares two unwatched runs: what the machine's noise alone gives.
CPU time counts all threads, so the work that the emitter does beside the step is in it; wall time is what the
training loop waits.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

HERE = Path(__file__).resolve().parent.parent
FILE = HERE / "evidence" / "overhead.json"
BLOCK = 20
MODES: dict[str, dict[str, Any] | None] = {
    "unwatched": None,
    "observe": {"allow": "observe"},
    "observe, sync": {"allow": "observe", "sync": True},
    "enforce, a recovery point every 50 steps": {"allow": "enforce", "policy": "unattended"},
}


def measure(options: dict[str, Any] | None, blocks: int) -> tuple[list[float], list[float]]:
    """Ratios (wall, CPU) of every block but the first, which warms up."""
    import foreshock
    from foreshock.lab.scenarios import SCENARIOS, Training

    bare, watched = (Training(SCENARIOS["clean"], 0, BLOCK * blocks) for _ in range(2))
    wall: list[float] = []
    cpu: list[float] = []
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        watch = None
        if options is not None:
            watch = stack.enter_context(
                foreshock.watch(
                    watched.model, watched.optimizer, {"schedule": watched.schedule}, run_dir=place, **options
                )
            )
        batches = watch.batches(watched.batches) if watch else iter(watched.batches)
        plain = iter(bare.batches)
        for block in range(blocks):
            spent = []
            for training, source, watching in ((bare, plain, None), (watched, batches, watch)):
                began = time.perf_counter(), time.process_time()
                for step in range(block * BLOCK, (block + 1) * BLOCK):
                    loss, norm = training.train_step(next(source), step)
                    if watching is not None:
                        watching.step(loss, norm)
                spent.append((time.perf_counter() - began[0], time.process_time() - began[1]))
            if block:
                wall.append(spent[1][0] / spent[0][0])
                cpu.append(spent[1][1] / spent[0][1])
    return wall, cpu


def table(rows: dict[str, Any]) -> str:
    out = ["| the lab model, 2 layers, d 128, 512 tokens a step | wall | CPU, all threads |", "|---|---|---|"]
    out += [f"| {name} | {row['wall']:.3f} | {row['cpu']:.3f} |" for name, row in rows["ratios"].items()]
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=31)
    parser.add_argument("--table", action="store_true", help="print the committed table and stop")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(FILE.read_text())))
        return
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=True
    )
    rows: dict[str, Any] = {
        "command": "make bench",
        "commit": commit.stdout.strip(),
        "blocks": args.blocks,
        "ratios": {},
    }
    for name, options in MODES.items():
        wall, cpu = measure(options, args.blocks)
        rows["ratios"][name] = {"wall": round(median(wall), 4), "cpu": round(median(cpu), 4)}
        print(name, rows["ratios"][name], flush=True)
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
