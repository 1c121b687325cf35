"""How steps are taken: what the user asked for, in the engine's terms, and the choice between speculating and waiting."""

from __future__ import annotations

from collections import deque

from offload.schedule.verdict import Verdict, judge

__all__ = ["Policy"]

WINDOW = 8
"""Steps that ``clip="auto"`` looks back on."""

MAX_ROLLED_BACK = 0.5
"""Share of them that were, or would have been, rolled back, up to which it speculates. A roll-back costs the update twice,
of which the first one hides behind backward; waiting costs it once, with nothing to hide behind. So speculating pays
while it succeeds about every other time."""


class Policy:
    """How steps are taken.

    Args:
        mode: its name, for reports.
        early: update inside backward.
        accumulation_steps: declared backward passes per step.
        max_grad_norm: limit of the global L2 norm, or None.
        nonfinite: ``"propagate"``, ``"skip"`` or ``"raise"``.
        clip: ``"speculate"``, ``"defer"`` or ``"auto"``, where the norm is needed before a step counts.
    """

    def __init__(
        self,
        *,
        mode: str,
        early: bool,
        accumulation_steps: int,
        max_grad_norm: float | None,
        nonfinite: str,
        clip: str = "defer",
    ) -> None:
        self.mode = mode
        self.accumulation_steps = accumulation_steps
        self.max_grad_norm = max_grad_norm
        self.nonfinite = nonfinite
        self.needs_norm_first = max_grad_norm is not None or nonfinite != "propagate"
        self.speculative = False
        self._inside_backward = early
        self._clip = clip
        self._rolled_back: deque[bool] = deque(maxlen=WINDOW)

    @property
    def early(self) -> bool:
        """Whether this step updates inside backward."""
        return self._inside_backward and (self.speculative or not self.needs_norm_first)

    def begin_step(self) -> None:
        """At a step's first gradient: choose."""
        wanted = self._clip == "speculate" or (self._clip == "auto" and self._pays())
        self.speculative = self._inside_backward and self.needs_norm_first and wanted

    def judge(self, norm: float, *, nonfinite: bool) -> Verdict:
        """What becomes of a step with this global norm; `nonfinite`: whether any gradient element is an inf or a NaN."""
        return judge(
            norm, nonfinite=nonfinite, max_norm=self.max_grad_norm, skip_nonfinite=self.nonfinite == "skip"
        )

    def note(self, *, roll_back: bool) -> None:
        """The verdict: whether early updates were, or would have been, rolled back."""
        self._rolled_back.append(roll_back)

    def _pays(self) -> bool:
        return sum(self._rolled_back) <= MAX_ROLLED_BACK * len(self._rolled_back)
