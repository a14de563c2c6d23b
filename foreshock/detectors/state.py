"""What every detector here shares: a complete, bit-exact state as plain values and numpy arrays."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np


class Stateful:
    """Names its attributes in `state`: numpy arrays, JSON-plain values, or other `Stateful` objects."""

    state: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """Everything that `update` reads and writes, copied."""
        return {name: _copy(getattr(self, name)) for name in self.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse; names that are missing keep their present value (a snapshot leaves rings out)."""
        for name in self.state:
            part = getattr(self, name)
            if name in state and isinstance(part, Stateful):
                part.load_state_dict(state[name])
            elif name in state:
                setattr(self, name, _copy(state[name]))

    def adopt(self, old: Stateful) -> None:
        """Take over the rows of a smaller object whose streams come first here."""
        for name in self.state:
            mine, theirs = getattr(self, name), getattr(old, name)
            if isinstance(mine, Stateful):
                mine.adopt(theirs)
            elif isinstance(mine, np.ndarray) and mine.ndim:
                mine[: len(theirs)] = theirs
            else:
                setattr(self, name, theirs)


def _copy(value: Any) -> Any:
    if isinstance(value, Stateful):
        return value.state_dict()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return [_copy(v) for v in value] if isinstance(value, (list, tuple)) else value
