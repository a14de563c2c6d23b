"""Text that every Python carries, as bytes: the lab downloads nothing.

Hands tensors to `foreshock.lab.data`. The text is that of the interpreter at hand, so losses differ a little
between Python versions; runs under one interpreter see the same bytes.
"""

from __future__ import annotations

import sysconfig
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

LIMIT = 4_000_000  # bytes of code kept


@cache
def corpus(name: Literal["code", "prose"]) -> Tensor:
    """uint8 (bytes,). "code": standard-library sources, 4 MB; "prose": the language reference, 0.5 MB.

    Cached, so not to be written to. Raises RuntimeError where this Python was stripped of that text.
    """
    if name == "code":
        # _sysconfigdata*.py tells where this Python was built: not the same text on two machines
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("[!_]*.py"))
        text = b"".join(file.read_bytes() for file in files)[:LIMIT]
    else:
        from pydoc_data.topics import topics

        text = "\n".join(topics[topic] for topic in sorted(topics)).encode()
    if len(text) < 200_000:
        raise RuntimeError(f"this Python carries {len(text)} bytes of {name}: install its library sources")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
