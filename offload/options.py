"""What a front asks of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from offload.config import OffloadConfig

__all__ = ["EARLY_MODES", "STREAM_MODES", "Options"]

EARLY_MODES = ("wavefront", "hybrid")
"""Chunks are stepped inside backward."""

STREAM_MODES = ("all-at-once", "chunked-sync", "chunked-stream")
"""State is on the host and is stepped on the device: placement STREAM."""


@dataclass(frozen=True)
class Options:
    """What a front asks for; see the constructors in `optimizer` for the meaning of each."""

    mode: str
    backend: str
    max_grad_norm: float | None
    nonfinite: str
    clip: str
    accumulation_steps: int
    flush_denormals: bool
    config: OffloadConfig
    overlap_forward: bool = False

    @property
    def needs_norm_first(self) -> bool:
        """Whether a step's norm must be known before anything is updated."""
        return self.max_grad_norm is not None or self.nonfinite != "propagate"

    @property
    def speculates(self) -> bool:
        """Whether a wavefront may update before the norm is known."""
        return self.needs_norm_first and self.clip != "defer"

    @property
    def backlog_tiles(self) -> int:
        """Tiles that may wait for the worker."""
        return self.config.num_backlog_tiles(overlaps_forward=self.overlap_forward)

    @property
    def rebalances(self) -> bool:
        """Whether a hybrid's steps correct its shares."""
        return self.config.stream_share is None

    @property
    def fused_sums(self) -> bool:
        """Whether updates take the squared sums on their way."""
        return not self.needs_norm_first
