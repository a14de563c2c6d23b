"""The attention experiment in one process, and on Ray Train with two and four workers: the same story, the same figures.

    python benchmarks/ranks.py            runs what is missing in evidence/ranks.json (idle, on two cores: about 15 minutes)
    python benchmarks/ranks.py --tables   prints the table of docs/measured.md

The seed is one of those that the one-process evidence reports; ranks share out the same global batch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
FILE = HERE / "evidence" / "ranks.json"
SEED, STEPS = 110, 1200
WORKERS = (1, 2, 4)
KEPT = (
    "seed", "onset", "diagnosis", "diagnosis_step", "layers", "onset_interval", "action", "applied_step", "verdict",
    "loss_clean", "loss_unprotected", "loss_protected", "first_alarm_by_grad_norm", "first_alarm_by_loss",
    "alarms_in_clean", "actions_in_clean", "audit_verified",
)  # fmt: skip


def run(workers: int) -> dict[str, Any]:
    """One experiment's facts, with the step at which each rank says that it applied the command."""
    from foreshock.lab.experiment import experiment, healed

    began = time.time()
    with tempfile.TemporaryDirectory(prefix="foreshock-ranks-") as place:
        if workers == 1:
            facts, runs = experiment("up7", SEED, STEPS, Path(place))
        else:
            from foreshock.lab.parallel import experiment as on_ray

            facts, runs = on_ray("up7", SEED, STEPS, Path(place), workers)
        applied = runs["protected"].first("command.applied") or {"acks": {}}
        row = {name: facts[name] for name in KEPT}
        row["applied_by_rank"] = {rank: ack["step"] for rank, ack in applied["acks"].items()}
        row["healed"] = healed(facts)
    return {"workers": workers, **row, "seconds": round(time.time() - began)}


def load() -> dict[str, Any]:
    return (
        json.loads(FILE.read_text())
        if FILE.exists()
        else {"command": "python benchmarks/ranks.py", "rows": []}
    )


HEAD = "| ranks | diagnosed | layers | onset dated to | applied before | verdict | excess untreated | excess treated | grad norm | loss |"


def table(found: dict[str, Any]) -> str:
    """The table of docs/measured.md, as Markdown."""
    lines = [HEAD, "|" + "---|" * (HEAD.count("|") - 1)]
    for r in found["rows"]:
        bare, treated = (f"{r[k] - r['loss_clean']:+.3f}" for k in ("loss_unprotected", "loss_protected"))
        cells = (
            r["workers"], r["diagnosis_step"], ", ".join(map(str, r["layers"])), "-".join(map(str, r["onset_interval"])),
            r["applied_step"], r["verdict"], bare, treated, r["first_alarm_by_grad_norm"], r["first_alarm_by_loss"],
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", action="store_true", help="print the table and stop")
    args = parser.parse_args()
    found = load()
    if args.tables:
        print(table(found))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=True
    )
    for workers in WORKERS:
        if any(row["workers"] == workers for row in found["rows"]):
            continue
        row = run(workers) | {"commit": head.stdout.strip()}
        found["rows"] = sorted([*found["rows"], row], key=lambda r: r["workers"])
        FILE.write_text(json.dumps(found, indent=1) + "\n")
        print(json.dumps(row), flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
