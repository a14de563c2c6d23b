"""A Ray connection for this rank: the one that the process already has, or a small Ray runtime beside the job.

A rank becomes a Ray driver, and Ray does not expect a driver to have another life. So (measured, Ray 2.60): a driver ends
its process 60 s after the GCS is gone, unless it is told to wait; its signal handler takes the place of the trainer's, so
that a SIGTERM no longer saves a checkpoint; Ray's processes die with the *thread* that started them; calls to a GCS that
hangs never return. Hence `_environment`, and one thread that owns the connection and for which nobody waits unbounded.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from foreshock.pipeline.place import Meeting, Place

log = logging.getLogger("foreshock")

CLOSE_SECONDS = 10.0
STORE_BYTES = 80 * 1024**2
"""Of Ray's object store, which the hub hardly uses and Ray would give a third of the memory; 75 MB is the least."""
PATIENT = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(10**9)}
AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
DIRECTORY = f"{os.environ.get('RAY_TMPDIR', '/tmp')}/foreshock-{os.getuid()}"
"""Apart from the user's own Ray, which takes an address noted in its directory for its own. Short: sockets live here."""
_JOIN = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG: end with the rank; it survives the exec
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.executable, [sys.executable, "-m", "ray.scripts.scripts", "start", *sys.argv[2:]])
"""


class NoRuntime(RuntimeError):
    """This rank has no connection to Ray, and why: it is not watched, and training goes on."""


class Runtime:
    """A connection to Ray at `address`. What this process started for it ends with `close`."""

    def __init__(self, place: Place, meeting: Meeting, timeout: float) -> None:
        self.address = ""
        self._place, self._meeting = place, meeting
        self._deadline = time.monotonic() + timeout
        self._owner: _Owner | None = None
        self._node: subprocess.Popen[bytes] | None = None
        self._guests = range(0)  # ranks that live on what this process started

    def lead(self) -> None:
        """Rank 0: finds or starts the runtime, and tells the others."""
        word: dict[str, Any] = {"node": self._place.node, "ours": False, "environment": {}}
        with self._told("runtime", word):
            if not _connected() and os.environ.get("RAY_ADDRESS"):
                self._init({}, address=os.environ["RAY_ADDRESS"])
            elif not _connected():
                if not any(os.environ.get(name) for name in AUTH):
                    # A token of the job's own: it needs no home directory, and it reaches the other nodes.
                    word["environment"] = dict(zip(AUTH, ("token", secrets.token_hex(32)), strict=False))
                word["ours"], self._guests = True, range(1, self._place.world)
                self._init(
                    word["environment"], address="local", num_cpus=0, num_gpus=0, include_dashboard=False,
                    object_store_memory=STORE_BYTES, _temp_dir=DIRECTORY,
                )  # fmt: skip
            self.address = word["address"] = _address()

    def follow(self) -> None:
        """Every other rank: connects to what rank 0 said; its node's first rank brings the node in before."""
        place, word, node = self._place, self._hear("runtime"), f"runtime/node/{self._place.node}"
        self.address, environment = word["address"], word["environment"]
        if _connected():
            if _address() != self.address:
                raise NoRuntime(
                    f"this process uses Ray at {_address()}, but rank 0 at {self.address}: use one"
                )
        elif word["ours"] and place.node != word["node"] and place.local_rank == 0:
            with self._told(node, {}):
                self._join(environment)
                self._init(environment, address=self.address)
        else:
            if word["ours"] and place.node != word["node"]:
                self._hear(node)
            self._init(environment, address=self.address)

    def close(self) -> None:
        """Leaves, after the ranks that live on what was started here. Bounded, and never raises."""
        self._deadline = time.monotonic() + CLOSE_SECONDS
        with suppress(Exception), self._told(f"runtime/left/{self._place.rank}", {}):
            with suppress(Exception):
                for rank in self._guests if self._owner is not None else ():
                    self._hear(f"runtime/left/{rank}")
            if self._owner is not None:
                self._owner.close()
                _read_settings()
            if self._node is not None:
                self._node.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._node.wait(CLOSE_SECONDS)
                self._node.kill()
        self._owner, self._node = None, None

    def _init(self, environment: dict[str, str], **options: Any) -> None:
        host, _, port = options["address"].rpartition(":")
        if port.isdigit():  # fails at once and says why, where Ray would wait
            socket.create_connection((host, int(port)), min(10.0, self._left())).close()
        with _environment({**PATIENT, **environment}):
            self._owner = _Owner(options)
            self._owner.start()
            while not self._owner.tried.wait(0.1):
                if self._node is not None and self._node.poll() is not None:
                    raise NoRuntime(
                        f"`ray start` ended with {self._node.returncode} on node {self._place.node}"
                    )
                if not self._left():
                    raise NoRuntime("Ray did not answer in time")
        if self._owner.failure is not None:
            raise self._owner.failure

    def _join(self, environment: dict[str, str]) -> None:
        """Never `ray stop` afterwards: that ends every Ray of this user on the machine."""
        command = [
            sys.executable, "-c", _JOIN, str(os.getpid()), "--address", self.address, "--num-cpus", "0", "--num-gpus",
            "0", "--object-store-memory", str(STORE_BYTES), "--temp-dir", DIRECTORY, "--block",
        ]  # fmt: skip
        quiet, variables = subprocess.DEVNULL, {**os.environ, **PATIENT, **environment}
        self._node = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, env=variables)
        first, ranks = self._place.rank, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        self._guests = range(first + 1, first + ranks)

    @contextmanager
    def _told(self, key: str, word: dict[str, Any]) -> Iterator[None]:
        """Says `word` after the block, and with it whether the block failed: nobody waits for a failed rank."""
        word["failure"] = "interrupted"
        try:
            yield
            word["failure"] = ""
        except Exception as error:
            word["failure"] = f"rank {self._place.rank}: {error}"
            raise
        finally:
            self._meeting.say(key, word)

    def _hear(self, key: str) -> dict[str, Any]:
        word = self._meeting.hear(key, self._left())
        if word["failure"]:
            raise NoRuntime(word["failure"])
        return word

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())


class _Owner(threading.Thread):
    """Connects, stays as long as the connection, and leaves."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(name="foreshock-ray", daemon=True)
        self._options = options
        self.tried, self._leave = threading.Event(), threading.Event()
        self.failure: Exception | None = None

    def run(self) -> None:
        import ray

        try:
            ray.init(namespace="foreshock", log_to_driver=False, configure_logging=False, **self._options)
        except Exception as error:
            self.failure = error
            return
        finally:
            self.tried.set()
        self._leave.wait()
        with suppress(Exception):
            ray.shutdown()

    def close(self) -> None:
        import ray

        self._leave.set()
        self.join(CLOSE_SECONDS)
        if self.is_alive() and self._options["address"] == "local":
            with suppress(Exception):  # the head hangs, and it is ours: without it the others get away too
                ray._private.worker._global_node.all_processes["gcs_server"][0].process.kill()
        self.join(2 * CLOSE_SECONDS)
        if self.is_alive():
            log.warning("Ray at %s hangs and could not be left", self._options["address"])
            atexit.unregister(ray.shutdown)  # it would hang as well, and the end of the process with it


def connect(place: Place, meeting: Meeting, timeout: float = 60.0) -> Runtime:
    """This rank's connection, within `timeout` seconds. Raises NoRuntime, and then leaves nothing open."""
    runtime = Runtime(place, meeting, timeout)
    try:
        runtime.lead() if place.rank == 0 else runtime.follow()
        return runtime
    except Exception as error:
        runtime.close()
        if isinstance(error, NoRuntime):
            raise
        raise NoRuntime(
            f"{type(error).__name__}: {error} (Ray at {runtime.address or 'this node'})"
        ) from error


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Ray starts under `changes`, without its warnings; what it changes in this process is put back afterwards."""
    before, hook, on_term = dict(os.environ), sys.excepthook, signal.getsignal(signal.SIGTERM)
    os.environ.update(changes)
    _read_settings()
    ray_log = logging.getLogger("ray")
    level = ray_log.level
    ray_log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
        sys.excepthook = hook
        ray_log.setLevel(level)
        if on_term is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_term)


def _read_settings() -> None:
    """Ray takes them from the environment once, when it is imported: make it look again."""
    with suppress(Exception):
        raylet: Any = importlib.import_module("ray._raylet")
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


def _connected() -> bool:
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


def _address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)
