"""Which value of a setting wins: argument, then environment, then policy, then default. Said by `status`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foreshock.policies import PolicyError, loads, source_text
from foreshock.policies.models import Mode

RUNS = "foreshock_runs"


@dataclass(frozen=True, slots=True)
class Setting:
    value: Any
    source: str


def choose(name: str, argument: Any, default: Any) -> Setting:
    """The value of one setting; its environment variable is FORESHOCK_<NAME>."""
    if argument is not None:
        return Setting(argument, "argument")
    variable = f"FORESHOCK_{name.upper()}"
    if os.environ.get(variable):
        return Setting(os.environ[variable], f"environment {variable}")
    return Setting(default, "default")


def switched_off() -> bool:
    return os.environ.get("FORESHOCK", "").lower() in ("off", "0", "false", "no")


def acting_mode(setting: Setting) -> Setting:
    """Checks `allow`. Raises ValueError with what is accepted."""
    try:
        return Setting(Mode(setting.value), setting.source)
    except ValueError:
        words = ", ".join(m.value for m in Mode)
        raise ValueError(f"allow={setting.value!r} ({setting.source}) is not one of {words}") from None


def run_directory(run_dir: Setting, name: str) -> Path:
    return Path(run_dir.value) if run_dir.value else Path(RUNS) / name


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy as it was found. `failure` says why it cannot be used."""

    text: str = ""
    source: str = ""
    failure: str | None = None


def policy_text(setting: Setting) -> Policy:
    """The text of the policy that `setting` names: a shipped one or a file.

    A trainer that starts its ranks elsewhere hands the text over in FORESHOCK_POLICY_TEXT, because the file may not be
    there; it counts where no argument names another policy.
    """
    given = os.environ.get("FORESHOCK_POLICY_TEXT")
    try:
        if given and setting.source != "argument":
            text, source = given, str(setting.value)
        else:
            text, source = source_text(str(setting.value))
        loads(text, source)
    except PolicyError as error:
        return Policy(failure=str(error))
    return Policy(text, source)
