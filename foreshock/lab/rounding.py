"""Directed rounding of float32: the smallest error a kernel can make, in a direction we choose.

Start of the lab's road: `KernelFault` in `foreshock.lab.flash` hands its delta or output through `to_bits`.
arXiv 2606.28116 injects its attention fault the same way, by manipulating the mantissa's bits.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Direction = Literal["up", "down", "zero", "away", "stochastic"]


def to_bits(x: Tensor, keep: int, direction: Direction, generator: torch.Generator | None = None) -> Tensor:
    """`x` with `keep` explicit mantissa bits left (bf16 keeps 7); float32, same shape.

    up: toward +infinity; down: toward -infinity; zero: toward 0; away: away from 0; stochastic: to either
    neighbour with the probability that makes the mean exact, drawn from `generator` (torch's global one
    if None). What is representable already stays, as do infinities and NaN; a value rounded beyond the
    largest float32 becomes infinite. Raises TypeError unless float32, ValueError for `keep` outside 0..23
    or an unknown direction.
    """
    if x.dtype is not torch.float32:
        raise TypeError(f"to_bits rounds float32, not {x.dtype}")
    if not 0 <= keep <= 23:
        raise ValueError(f"keep must lie in 0..23, not {keep}")
    ulp = 1 << (23 - keep)
    bits = x.contiguous().view(torch.int32)
    low = bits & (ulp - 1)
    toward = bits - low  # sign and magnitude: clearing low bits always moves toward zero
    match direction:
        case "zero":
            grow = low < 0
        case "away":
            grow = low > 0
        case "up":
            grow = (low > 0) & (bits > 0)
        case "down":
            grow = (low > 0) & (bits < 0)
        case "stochastic":
            dice = torch.randint(ulp, x.shape, generator=generator, dtype=torch.int32, device=x.device)
            grow = dice < low
        case _:
            raise ValueError(f"unknown direction {direction!r}")
    rounded = torch.where(grow, toward + ulp, toward).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)
