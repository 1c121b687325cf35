"""Cross-entropy of a linear head that never holds the logits of the whole sequence.

With a vocabulary of 152 k, the logits of 16 k tokens are 5 GB in BF16. As Liger's fused linear cross-entropy
does (Hsu et al. 2024, arXiv:2410.10989), loss and both gradients are computed chunk by chunk in forward, so
that only the gradients, not the logits, live until backward. Temporaries stay under ``MAX_TEMPORARY_BYTES``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MAX_TEMPORARY_BYTES = 1 << 30
_BYTES_PER_LOGIT = 2 + 4  # the logits, later their gradient, in BF16; softmax in FP32


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean of ``cross_entropy(hidden @ weight.T, targets)``, a scalar in FP32.

    ``hidden`` [tokens, width] and ``weight`` [vocabulary, width] share one dtype; ``targets`` [tokens] is
    int64. The result can be differentiated once.
    """
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, targets)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        needs_hidden, needs_weight, _ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        scale = 1.0 / targets.numel()
        for start, stop in _chunks(hidden.shape[0], weight.shape[0]):
            rows = hidden[start:stop]
            chunk_loss, grad_logits = _loss_and_grad_logits(rows, weight, targets[start:stop])
            loss += chunk_loss
            # `scale` enters in the products, in FP32: a gradient of 1/tokens would lose bits in BF16.
            if grad_hidden is not None:
                out = grad_hidden[start:stop]
                torch.addmm(out, grad_logits, weight, beta=0, alpha=scale, out=out)
            if grad_weight is not None:
                grad_weight.addmm_(grad_logits.t(), rows, alpha=scale)
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss * scale

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        # In place, since the head's gradient is large; autograd refuses a second backward for it.
        grad_hidden, grad_weight = (
            None if grad is None else grad.mul_(grad_outputs[0]) for grad in ctx.saved_tensors
        )
        return grad_hidden, grad_weight, None


def _loss_and_grad_logits(rows: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss of a chunk and the gradient of its logits, which takes the place of the logits.

    Softmax is written out, in FP32, because torch's own would hold one more FP32 copy of BF16 logits.
    """
    logits = rows @ weight.t()
    wide = logits - logits.amax(1, keepdim=True).float()
    at_target = wide.gather(1, targets.unsqueeze(1))
    exponentials = wide.exp_()
    total = exponentials.sum(1, keepdim=True)
    loss = (total.log() - at_target).sum()
    # At the target the gradient is p - 1: subtracted here, before anything is rounded to BF16.
    exponentials.scatter_(1, targets.unsqueeze(1), at_target.exp() - total)
    return loss, torch.mul(exponentials, total.reciprocal(), out=logits)


def _chunks(num_tokens: int, vocabulary: int) -> list[tuple[int, int]]:
    size = max(1, MAX_TEMPORARY_BYTES // (vocabulary * _BYTES_PER_LOGIT))
    if size >= 256:  # matrix products like round sizes
        size -= size % 256
    return [(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]
