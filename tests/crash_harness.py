"""Run as a script: kills the shell at many points of its life and reports what was left. No torch, one thread.

usage: crash_harness.py DIRECTORY KILLS SEED. Prints one JSON line a kill point.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from conftest import Stream

from foreshock.pipeline.replay import replay
from foreshock.pipeline.shell import Shell
from foreshock.pipeline.store import RunStore

POINTS = (
    (RunStore, "append_event"),
    (RunStore, "append_audit"),
    (RunStore, "save_snapshot"),
    (RunStore, "set_meta"),
    (RunStore, "_write_anchor"),
    (Shell, "_carry_out"),
    (Shell, "_commit"),
)


def arm(countdown: int, after: bool) -> None:
    """Die without a word at the `countdown`-th passage of any point, before or after its work."""
    left = [countdown]

    def wrap(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def mortal(self, *args, **kwargs):
            left[0] -= 1
            if left[0] == 0 and not after:
                os._exit(9)
            result = original(self, *args, **kwargs)
            if left[0] == 0 and after:
                os._exit(9)
            return result

        setattr(owner, name, mortal)

    for owner, name in POINTS:
        wrap(owner, name)


class Driver:
    """Lets a `Stream` drive a shell as if it were a hub."""

    def __init__(self, shell: Shell) -> None:
        self.shell, self.issued = shell, []
        shell._issue = self.issued.append

    def handle(self, event):
        from foreshock.pipeline.events import Hello, Issue

        if isinstance(event, Hello):
            event = Hello(
                **{**{n: getattr(event, n) for n in event.__slots__}, "attempt": self.shell.attempt}
            )
        self.issued.clear()
        self.shell.submit(event)
        return [Issue(c) for c in self.issued]


def play(directory: Path) -> None:
    from foreshock.pipeline import events

    shell = Shell(directory, "r", lambda command: None)
    attempt = shell.attempt
    stream = Stream(onset=120, steps=260, incurable=True)
    original = events.SignalFrame.build.__func__

    def build(cls, values, **place):
        return original(cls, values, **{**place, "attempt": attempt})

    events.SignalFrame.build = classmethod(build)
    stream.events(Driver(shell))
    shell.close()


def child(directory: Path, countdown: int, after: bool) -> int:
    pid = os.fork()
    if pid == 0:
        if countdown:
            arm(countdown, after)
        play(directory)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    root, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    for i in range(kills):
        directory = root / str(i)
        countdown, after = rng.randrange(1, 120), rng.random() < 0.5
        codes = [
            child(directory, countdown, after),
            child(directory, rng.randrange(1, 120), not after),
            child(directory, 0, False),
        ]
        with RunStore.open_readonly(directory) as store:
            records = list(store.audit())
            verdict, again = store.verify(), replay(store)
        issued = [r.payload["id"] for r in records if r.kind == "command.issued"]
        print(json.dumps({"codes": codes, "ok": verdict.ok, "reason": verdict.reason, "difference": again.difference,
                          "issued": issued, "attempts": sum(r.kind == "attempt.started" for r in records)}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
