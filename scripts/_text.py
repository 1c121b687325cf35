"""Real text as bytes: a file, a folder of files, or the source of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

MAX_BYTES = 64 << 20
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "idlelib"}


def load_text(path: Path | None, *, max_bytes: int = MAX_BYTES) -> Tensor:
    """At most ``max_bytes`` of text as a uint8 tensor. Files of a folder are joined in sorted order."""
    if path is not None and path.is_file():
        return _tensor(path.read_bytes()[:max_bytes])
    folder = path or Path(sysconfig.get_paths()["stdlib"])
    pattern = "*" if path else "*.py"
    pieces, room = [], max_bytes
    for file in sorted(folder.rglob(pattern)):
        if room <= 0:
            break
        if file.is_file() and not SKIPPED_FOLDERS.intersection(file.parts):
            pieces.append(file.read_bytes()[:room])
            room -= len(pieces[-1])
    return _tensor(b"".join(pieces))


def sample_batch(text: Tensor, batch: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows: ids and, shifted by one, targets, each int64 [batch, length]."""
    starts = torch.randint(text.numel() - length, (batch, 1), generator=generator)
    windows = text[starts + torch.arange(length + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _tensor(data: bytes) -> Tensor:
    if not data:
        raise SystemExit("no text found: name a file or a folder of text with --data")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
