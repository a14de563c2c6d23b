"""Batches of bytes whose content is a pure function of (seed, index), so that a rollback can rewind them.

Between `foreshock.lab.corpus` and the training loop. The data controls live here: garbage for a while, or
another text from some step on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(eq=False)
class ByteBatches:
    """An iterator over `steps` batches (x, y), both int64 (batch, context), y one byte ahead of x.

    Batch i depends on nothing but `seed`, i and the texts (uint8, one-dimensional). Indices in `corrupt` get
    uniformly random bytes; `shift` = (index, text): from that index on, another text. `part` = (rank, world):
    only that rank's share of every batch, the ranks' shares in order being the batch. It is its own iterator
    and does not start anew: `index` is that of the next batch, and loading a state moves a running loop.
    """

    text: Tensor
    seed: int
    steps: int
    batch: int = 8
    context: int = 64
    corrupt: range = range(0)
    shift: tuple[int, Tensor] | None = None
    index: int = 0
    part: tuple[int, int] = (0, 1)

    def at(self, index: int) -> tuple[Tensor, Tensor]:
        """Batch `index`, without moving."""
        generator = torch.Generator().manual_seed(self.seed * 100_003 + index)
        text = self.shift[1] if self.shift and index >= self.shift[0] else self.text
        starts = torch.randint(len(text) - self.context, (self.batch, 1), generator=generator)
        windows = text[starts + torch.arange(self.context + 1)].long()
        if index in self.corrupt:
            windows = torch.randint(256, windows.shape, generator=generator)
        rank, world = self.part
        share = self.batch // world
        windows = windows[rank * share : (rank + 1) * share]
        return windows[:, :-1], windows[:, 1:]

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        if self.index >= self.steps:
            raise StopIteration
        self.index += 1
        return self.at(self.index - 1)

    def state_dict(self) -> dict[str, int]:
        return {"index": self.index}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.index = state["index"]
