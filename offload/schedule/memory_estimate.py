"""How much device memory a training step takes at its worst moment, by mode. Pure; docs/performance.md has the formula.

`mode_costs` knows what the optimizer needs; here weights, gradients, activations and the loss are added, moment by
moment, because they do not reach their largest sizes at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.schedule.mode_costs import Needs, Placement, Workload

__all__ = ["Activations", "device_peak_bytes"]


@dataclass(frozen=True)
class Activations:
    """What forward and backward hold on this rank, beside weights and gradients. Bytes.

    `kept_bytes`: alive when forward ends, of all layers: checkpoints, or all that backward needs. `layer_bytes`: what the
    backward of one layer has in use beyond that, at most. `loss_bytes`: logits and their like. `head_gradient_bytes`:
    gradient of the output head, there from the loss on. `unsharded_bytes`: whole layers that a sharded model (FSDP) gathers
    for as long as they are in use, and their gradients.
    """

    kept_bytes: int
    layer_bytes: int
    loss_bytes: int
    head_gradient_bytes: int
    unsharded_bytes: int = 0


def device_peak_bytes(
    placement: Placement, needs: Needs, workload: Workload, activations: Activations
) -> int:
    """The largest sum of what is alive at a time, as ``torch.cuda.max_memory_allocated`` counts it.

    Args:
        placement: HOST for all modes in which gradients leave in backward, mixed ones too.
        needs: of the mode; what it has on the device is there always, but for streamed state, which is there in `step()`.
    """
    always = workload.weight_bytes + activations.unsharded_bytes
    always += 0 if placement is Placement.STREAM else needs.device
    loss = activations.kept_bytes + activations.loss_bytes + activations.head_gradient_bytes
    if placement is Placement.HOST:
        # Gradients leave as they come: what waits for the worker, the head's own among it, beside the first layers.
        first_layer = activations.kept_bytes + activations.layer_bytes + needs.gradients
        return always + max(loss, first_layer)
    first_layer = activations.kept_bytes + activations.layer_bytes + activations.head_gradient_bytes
    last_layer = activations.layer_bytes + needs.gradients
    step = needs.gradients + (needs.device if placement is Placement.STREAM else 0)
    return always + max(loss, first_layer, last_layer, step)
