"""Foreshock: finds a fault inside a training run before the loss shows it, repairs the run, keeps the record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "watch"]

if TYPE_CHECKING:
    from foreshock.pipeline.watch import watch


def __getattr__(name: str) -> Any:
    # Lazily: `import foreshock` must stay cheap and load none of torch, ray, river.
    if name == "watch":
        from foreshock.pipeline.watch import watch

        return watch
    raise AttributeError(f"module 'foreshock' has no attribute {name!r}")
