"""Writes of weights by others, between the early update of one of their tiles and the late one of another."""

from __future__ import annotations

import torch
from torch import nn

import offload


def test_a_late_tile_does_not_hide_what_was_written_over_an_early_one() -> None:
    """The second tile of ``a`` waits for ``b``, which gets no gradient: `note_write` comes again after the foreign one."""
    a, b = (nn.Parameter(torch.ones(numel, dtype=torch.bfloat16)) for numel in (3072, 1024))
    config = offload.OffloadConfig(tile_numel=2048, threads=1)
    model = nn.Module()
    model.b, model.a = b, a
    with offload.AdamW(
        model.named_parameters(), lr=1e-2, mode="wavefront", backend="torch", config=config
    ) as optimizer:
        (a.float().pow(2).sum() + b.float().pow(2).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        a.float().pow(2).sum().backward()
        optimizer._engine._stepper.finish()  # the early update has been written
        with torch.no_grad():
            a.mul_(1.5)
        optimizer.step()
        assert (optimizer.last_step.early_tiles, optimizer.last_step.late_tiles) == (1, 1)
        assert optimizer.resync() == []
