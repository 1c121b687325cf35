"""The sentinel in ``param.grad``: it moves with its module, and raises when it is read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from offload.errors import GradientError
from offload.sentinel import GoneGradient


def test_a_module_can_be_moved_while_gradients_are_gone() -> None:
    """Lightning's clean-up after an error does; the sentinel's own error would hide the first one."""
    module = torch.nn.Linear(4, 4)
    module.weight.grad = gone = GoneGradient(module.weight.detach(), "weight")
    for move in (module.cpu, lambda: module.to("cpu"), lambda: module.to(torch.bfloat16)):
        move()
        assert module.weight.grad is gone
    assert module.weight.dtype is torch.bfloat16


@pytest.mark.parametrize(
    "read",
    [
        lambda gone: gone.cpu().norm(),
        lambda gone: gone.to("cpu") + 1,
        lambda gone: gone.cpu().tolist(),
        lambda gone: gone.cpu().numpy(),
        lambda gone: torch.zeros(2).to(gone),
        lambda gone: gone.float(),
        lambda gone: torch.nn.utils.get_total_norm([gone]),
    ],
)
def test_what_was_moved_raises_all_the_same(read: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(GradientError, match=r"layer\.weight"):
        read(GoneGradient(torch.zeros(4), "layer.weight"))
