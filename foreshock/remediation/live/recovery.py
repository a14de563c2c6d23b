"""Recovery points on disk: taken at a step boundary, written in the background, whole or not at all.

A point is a directory of `tensors.safetensors`, `state.json` and `point.json` (which holds the checksums of the
other two). It appears by one rename after everything in it is synced.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreshock.remediation.durable import sync
from foreshock.remediation.live.state import flatten, nonfinite, unflatten

log = logging.getLogger("foreshock")
VERSION = 1


class PointBroken(Exception):
    """A recovery point is missing, incomplete or does not match its checksums; `point` is its id."""

    def __init__(self, point: str, reason: str) -> None:
        super().__init__(f"recovery point {point}: {reason}")
        self.point = point


@dataclass(frozen=True, slots=True)
class Saved:
    """What the writer reports. `finite` False means that nothing was written."""

    id: str
    timeline: int
    step: int
    batches: int
    finite: bool
    bytes: int
    seconds: float


class RecoveryStore:
    """One directory of recovery points, written by one background thread.

    `on_saved` is called from that thread. At most two points are in flight; a third is skipped rather than
    letting a slow disk fill the memory or hold the step. `constants` are tensors that are not finite by design
    (a mask of -inf), by their name in `flatten`: while they stay as they are, they do not make a point unfit.
    """

    def __init__(
        self,
        directory: Path,
        on_saved: Callable[[Saved], None],
        constants: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.directory, self.constants = directory, constants or {}
        self._on_saved = on_saved
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="foreshock-recovery")
        self._flying: list[Future[None]] = []
        self._untold: set[str] = set()
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob(".part-*"):
            shutil.rmtree(left, ignore_errors=True)

    def save(
        self, name: str, timeline: int, step: int, batches: int, state: dict[str, Any], *, wait: bool = False
    ) -> bool:
        """Copy `state` now, write it later. False where the point was skipped because two are in flight.

        Raises NotStorable where the state cannot be stored.
        """
        self._flying = [f for f in self._flying if not f.done()]
        if len(self._flying) >= 2 and not wait:
            return False
        tensors: dict[str, Any] = {}
        skeleton = flatten(state, tensors)
        future = self._writer.submit(self._write, name, (timeline, step, batches), skeleton, tensors)
        self._flying.append(future)
        if wait:
            future.result()
        return True

    def _write(self, name: str, place: tuple[int, int, int], skeleton: Any, tensors: dict[str, Any]) -> None:
        from safetensors.torch import save_file

        began = time.perf_counter()
        part = self.directory / f".part-{name}"
        try:
            broken = nonfinite(tensors)
            if any(
                n not in self.constants or not torch.equal(t, self.constants[n]) for n, t in broken.items()
            ):
                self._on_saved(Saved(name, *place, False, 0, time.perf_counter() - began))
                return
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            save_file(tensors, part / "tensors.safetensors")
            (part / "state.json").write_text(json.dumps(skeleton))
            sums = {f: _sha256(part / f) for f in ("tensors.safetensors", "state.json")}
            about = {"version": VERSION, "id": name, "step": place[1], "batches": place[2], "sha256": sums}
            (part / "point.json").write_text(json.dumps(about, indent=1))
            for file in part.iterdir():
                sync(file)
            size = sum(f.stat().st_size for f in part.iterdir())
            target = self.directory / name
            self._untold.add(name)
            shutil.rmtree(target, ignore_errors=True)
            part.rename(target)
            sync(self.directory)
            self._on_saved(Saved(name, *place, True, size, time.perf_counter() - began))
        except Exception as error:
            shutil.rmtree(part, ignore_errors=True)
            log.error("recovery point %s could not be written: %s", name, error)

    def load(self, name: str) -> dict[str, Any]:
        """The state of a point, checked against its checksums. Raises PointBroken."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        place = self.directory / name
        try:
            about = json.loads((place / "point.json").read_text())
            if about["version"] != VERSION:
                raise PointBroken(name, "written by another version")
            for file, expected in about["sha256"].items():
                if _sha256(place / file) != expected:
                    raise PointBroken(name, f"{file} does not match its checksum")
            skeleton = json.loads((place / "state.json").read_text())
            state: dict[str, Any] = unflatten(skeleton, load_file(place / "tensors.safetensors"))
            return state
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise PointBroken(name, f"cannot be read: {error}") from error

    def prune(self, keep: set[str], told: set[str]) -> None:
        """Delete every point that is neither in `keep`, nor a pause's, nor unknown to the hub, which now knows `told`."""
        self._untold -= told
        for place in self.directory.iterdir():
            if (
                place.is_dir()
                and not place.name.startswith((".", "pause-"))
                and place.name not in keep | self._untold
            ):
                shutil.rmtree(place, ignore_errors=True)

    def flush(self) -> None:
        for future in self._flying:
            future.result()

    def close(self) -> None:
        self._writer.shutdown(wait=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
