"""Any trainer state as tensors (safetensors) and a JSON skeleton, and back, bit for bit. Never pickle."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


class NotStorable(TypeError):
    """The state holds something that is neither a tensor nor plain data; the message says where."""


def flatten(value: Any, tensors: dict[str, Tensor], path: str = "") -> Any:
    """The JSON skeleton of `value`; its tensors go into `tensors` as CPU clones, named by their path.

    Takes dicts (any plain keys), lists, tuples, tensors, numpy arrays, numbers, strings, bytes and None.
    Raises NotStorable for anything else.
    """
    if isinstance(value, Tensor):
        name = f"{len(tensors)}:{path}"
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(value, np.ndarray):
        wide = value.astype(np.int64) if value.dtype.kind == "u" else value
        return {"array": value.dtype.str, "of": flatten(torch.from_numpy(wide.copy()), tensors, path)}
    if isinstance(value, dict):
        return {"dict": [[flatten(k, tensors), flatten(v, tensors, f"{path}/{k}")] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [flatten(v, tensors, f"{path}/{i}") for i, v in enumerate(value)]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, np.generic):
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise NotStorable(
        f"{path or 'the state'} is a {type(value).__name__}, which cannot be stored without pickle"
    )


def unflatten(skeleton: Any, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `flatten`."""
    if not isinstance(skeleton, dict):
        return skeleton
    if "tensor" in skeleton:
        return tensors[skeleton["tensor"]]
    if "array" in skeleton:
        return unflatten(skeleton["of"], tensors).numpy().astype(skeleton["array"])
    if "dict" in skeleton:
        return {unflatten(k, tensors): unflatten(v, tensors) for k, v in skeleton["dict"]}
    if "bytes" in skeleton:
        return bytes.fromhex(skeleton["bytes"])
    if "tuple" in skeleton:
        return tuple(unflatten(v, tensors) for v in skeleton["tuple"])
    return [unflatten(v, tensors) for v in skeleton["list"]]


def nonfinite(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that hold a NaN or an infinity."""
    kinds = {n: t for n, t in tensors.items() if t.is_floating_point() or t.is_complex()}
    return {name: t for name, t in kinds.items() if not bool(torch.isfinite(t).all())}


def rng_state() -> dict[str, Any]:
    """Every random generator a training step may draw from: Python, numpy, torch, each CUDA device."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
