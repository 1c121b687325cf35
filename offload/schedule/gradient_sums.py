"""The norm of a step's gradients: squared sums by block, added by parameter here and by rank there.

Owns the order in which they are added, which the norm's bits depend on, and the step's one exchange with the other
ranks. What follows from the norm is decided elsewhere (`verdict`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from offload.agreement import Agreement, Part, Ranks, Share
from offload.errors import NoGradientError
from offload.kernels.norm import add_blocks
from offload.layout import ALIGN, Chunk, Span
from offload.parameters import ParamRecord
from offload.schedule import messages
from offload.schedule.stepper import Stepper
from offload.schedule.verdict import total_norm

__all__ = ["Finding", "GradientSums"]


@dataclass(frozen=True)
class Finding:
    """What all ranks know of a step's gradients.

    Args:
        norm: global L2 norm, float64.
        nonfinite: where an inf or a NaN is, in words; None: nowhere.
    """

    norm: float
    nonfinite: str | None


class GradientSums:
    """Of the gradients that one stepper holds or has applied.

    Args:
        chunks, records: of all parameters; others may come.
    """

    def __init__(
        self, stepper: Stepper, ranks: Ranks, chunks: Sequence[Chunk], records: Mapping[int, ParamRecord]
    ) -> None:
        self._stepper, self._ranks = stepper, ranks
        self._chunks, self._records = chunks, records

    def spans(self, has_gradient: Callable[[int], object]) -> list[tuple[Chunk, Span]]:
        """The parts of all parameters (by index) that have one, in the optimizer's order of parameters."""
        spans = [(chunk, span) for chunk in self._chunks for span in chunk.spans if has_gradient(span.param)]
        return sorted(spans, key=lambda item: item[1].param)

    @property
    def alone(self) -> bool:
        """Whether this rank's sums are all there are."""
        return self._ranks.alone

    def norm(self, share: Share) -> float:
        """The norm of all ranks' gradients, where it decides nothing.

        Raises:
            NoGradientError, PeerError, GradientError: as `find`.
        """
        return total_norm([self._agree(share).square_sum])

    def find(self, spans: Sequence[tuple[Chunk, Span]], *, touched: bool) -> Finding:
        """The norm of all ranks' gradients, and whether any of them is not finite.

        Args:
            touched: whether any gradient came on this rank.

        Raises:
            NoGradientError: none came on any rank.
            PeerError: another rank failed, or did not come.
            GradientError: replicas have different gradients.
        """
        culprit = self._first_nonfinite(spans)
        agreed = self._agree(self.share(spans, nonfinite=culprit is not None, touched=touched))
        where = f"of {culprit.name}" if culprit else f"on rank(s) {list(agreed.nonfinite_ranks)}"
        return Finding(total_norm([agreed.square_sum]), where if agreed.nonfinite_ranks else None)

    def share(
        self, spans: Iterable[tuple[Chunk, Span]], *, nonfinite: bool = False, touched: bool = False
    ) -> Share:
        """What this rank brings of a step that the stepper has not forgotten yet."""
        sums = dict.fromkeys(Part, 0.0)
        for chunk, span in spans:
            record = self._records[span.param]
            first, last = _block_range(span)
            part = self._ranks.part_of(record.param, record.name)
            sums[part] += add_blocks(self._stepper.block_sums(chunk.index).sums, first, last)
        return Share(sums[Part.OWN], sums[Part.REPLICA], nonfinite=nonfinite, touched=touched)

    def _agree(self, share: Share) -> Agreement:
        agreed = self._ranks.combine(share)
        if not agreed.touched:
            raise NoGradientError(messages.no_gradient())
        return agreed

    def _first_nonfinite(self, spans: Iterable[tuple[Chunk, Span]]) -> ParamRecord | None:
        for chunk, span in spans:
            first, last = _block_range(span)
            if self._stepper.block_sums(chunk.index).nonfinite[first:last].any():
                return self._records[span.param]
        return None


def _block_range(span: Span) -> tuple[int, int]:
    return span.start // ALIGN, -(-(span.start + span.numel) // ALIGN)
