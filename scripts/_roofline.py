"""The step time that measured rates allow, and what a step spends above it. Pure; docs/roofline.md explains the terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offload.cli.model_shape import ModelShape
from offload.cli.workload import Run, last_forward_of
from offload.rates import UPDATE_BYTES

IN_STEP = ("resident", "offload-resident", "all-at-once", "chunked-sync", "chunked-stream")
"""Modes whose update begins when backward has ended."""

BESIDE_LINK = 0.78
"""Of the host kernels' rate that is left while the link is busy both ways: 3.1 of 4.0 Gparam/s measured."""

LINK_SHARE = 4 / (UPDATE_BYTES + 4)
"""Of host memory's traffic in a wavefront that is the link's: a gradient in, a weight out, beside the kernels' 28 bytes."""

CAUSES = {
    "step()": "waiting in step() for what backward did not hide",
    "hooks": "backward held up in gradient hooks",
    "backward": "backward slower than alone, for other reasons",
    "forward": "forward slower than alone",
}


@dataclass(frozen=True)
class Compute:
    """Seconds of one step without an optimizer: the baseline's.

    `turn_s`: of the last layer's forward, the head with its loss, and of backward what comes before the first layer's
    gradients: see `turn_shares`.
    """

    forward_s: float
    backward_s: float
    turn_s: float = 0.0


def turn_shares(shape: ModelShape, tokens: int, sequence: int) -> tuple[float, float]:
    """Of forward and of backward, by arithmetic, what lies between the last weights and the first gradient of a step.

    The last layer's forward needs its new weights. From there to the first gradient of that layer there are this forward,
    the head (whose loss takes its gradients in forward) and the recomputation of the layer: with nothing to be updated.
    """
    run = Run(shape, tokens, sequence, chunked_loss=True)
    return last_forward_of(run), 1.0 / (3.0 * shape.num_layers)


def roofline(
    mode: str,
    compute: Compute,
    update_s: float,
    *,
    num_chunks: int,
    num_tiles: int,
    overlaps_forward: bool = False,
) -> float:
    """Seconds that a step takes at least.

    With forward F, backward B, update U (at the measured rates, with everything that works at the same time), the
    latency of the first gradient ``L = B / num_chunks``, and the turn T (`Compute.turn_s`):

    - update at ``step()``:             ``F + B + U``
    - update inside backward:           ``F + max(B + U / num_tiles, L + U)``
    - the same, forward overlapped:     ``max(F + B, T + U)``

    The second line: nothing can be updated before the first chunk's gradients are there, and the last tile's update
    begins when backward has ended. The third: the next forward may begin at once, but from the last layer's forward,
    which needs the last weights, to the next first gradient there is nothing to update.
    """
    first = compute.backward_s / num_chunks
    if mode in IN_STEP:
        return compute.forward_s + compute.backward_s + update_s
    if overlaps_forward:
        return max(compute.forward_s + compute.backward_s, compute.turn_s + update_s)
    return compute.forward_s + max(compute.backward_s + update_s / num_tiles, first + update_s)


def exposed(run: Mapping[str, Any], compute: Compute) -> dict[str, float]:
    """Seconds of a run's step above compute alone, by cause (`CAUSES`); they add up to the difference."""
    hooks = run["stages"].get("timings.hook", 0.0)
    return {
        "step()": run["optimizer_s"],
        "hooks": hooks,
        "backward": run["backward_s"] - compute.backward_s - hooks,
        "forward": run["forward_s"] - compute.forward_s,
    }
