"""Overhead on the lab model: watched against unwatched steps, interleaved in one process.

    make bench          prints a Markdown table and writes evidence/overhead.json

A ratio is (time of all watched blocks) / (time of the unwatched blocks beside them), each block of `BLOCK` steps on the
same batches, the order of the two alternating. The first row compares two unwatched runs: what the machine's noise alone
gives. Wall time is what the training loop waits; CPU time counts all threads and waits for the work that the emitter
and the point writer still have in hand, so nothing is left for the other run to pay.
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
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

HERE = Path(__file__).resolve().parent.parent
FILE = HERE / "evidence" / "overhead.json"
BLOCK = 50
MODES: dict[str, dict[str, Any] | None] = {
    "unwatched": None,
    "observe": {"allow": "observe"},
    "observe, sync": {"allow": "observe", "sync": True},
    "enforce, a recovery point every 50 steps": {"allow": "enforce", "policy": "unattended"},
}


def measure(options: dict[str, Any] | None, blocks: int) -> tuple[float, float]:
    """Ratios (wall, CPU) over all blocks but the first two, which warm up."""
    import foreshock
    from foreshock.lab.scenarios import SCENARIOS, Training

    bare, watched = (Training(SCENARIOS["clean"], 0, BLOCK * blocks) for _ in range(2))
    spent = {"bare": [0.0, 0.0], "watched": [0.0, 0.0]}
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        watch = None
        if options is not None:
            state = {"schedule": watched.schedule}
            watch = stack.enter_context(
                foreshock.watch(watched.model, watched.optimizer, state, run_dir=place, **options)
            )
        sides = [
            ("bare", bare, iter(bare.batches), None),
            ("watched", watched, watch.batches(watched.batches) if watch else iter(watched.batches), watch),
        ]
        for block in range(blocks):
            for name, training, source, watching in sides if block % 2 else sides[::-1]:
                wall, cpu = time.perf_counter(), time.process_time()
                for step in range(block * BLOCK, (block + 1) * BLOCK):
                    loss, norm = training.train_step(next(source), step)
                    if watching is not None:
                        watching.step(loss, norm)
                wall = time.perf_counter() - wall
                if watching is not None:
                    watching.drain()
                if block >= 2:
                    spent[name][0] += wall
                    spent[name][1] += time.process_time() - cpu
    return spent["watched"][0] / spent["bare"][0], spent["watched"][1] / spent["bare"][1]


def table(rows: dict[str, Any]) -> str:
    out = ["| the lab model, 2 layers, d 128, 512 tokens a step | wall | CPU, all threads |", "|---|---|---|"]
    out += [f"| {name} | {row['wall']:.3f} | {row['cpu']:.3f} |" for name, row in rows["ratios"].items()]
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=16)
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
        rows["ratios"][name] = {"wall": round(wall, 4), "cpu": round(cpu, 4)}
        print(name, rows["ratios"][name], flush=True)
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
