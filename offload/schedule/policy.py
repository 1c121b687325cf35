"""How steps are taken: what the user asked for, in the engine's terms."""

from __future__ import annotations

__all__ = ["Policy"]


class Policy:
    """How steps are taken: what the user asked for, in the engine's terms.

    Args:
        mode: its name, for reports.
        early: update inside backward.
        accumulation_steps: declared backward passes per step.
        max_grad_norm: limit of the global L2 norm, or None.
        nonfinite: ``"propagate"``, ``"skip"`` or ``"raise"``.
    """

    def __init__(
        self, *, mode: str, early: bool, accumulation_steps: int, max_grad_norm: float | None, nonfinite: str
    ) -> None:
        self.mode = mode
        self.accumulation_steps = accumulation_steps
        self.max_grad_norm = max_grad_norm
        self.nonfinite = nonfinite
        self.needs_norm_first = max_grad_norm is not None or nonfinite != "propagate"
        self.early = early and not self.needs_norm_first
