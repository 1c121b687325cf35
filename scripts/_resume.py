"""Save a run with ``torch.distributed.checkpoint``, build everything anew, load, and see that it goes on as it would have.

What is compared is the loss of the next step, which shows the weights, and that after it, which shows masters and moments.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _ranks import World
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import offload

TOLERANCE = 1e-3
"""Relative, of losses where kernels are not deterministic."""


class Saved(NamedTuple):
    """A checkpoint, and the losses of this rank that followed it."""

    folder: Path
    save_s: float
    losses: list[float]


def save_and_go_on(
    folder: Path, model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor], world: World
) -> Saved:
    """Save to the new folder `folder`, then train one more step. On all ranks.

    Raises:
        offload.CheckpointError: it could not be written, or is there already.
    """
    optimizer.synchronize()
    world.barrier()
    started = time.perf_counter()
    offload.save_sharded(_state(model, optimizer), folder)
    return Saved(folder, time.perf_counter() - started, _next_losses(model, optimizer, batch))


def load_and_compare(
    saved: Saved, model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor], world: World, *, exact: bool
) -> dict[str, Any]:
    """Load into a model and an optimizer that are new, train one step, compare. On all ranks, which agree on the result.

    Args:
        exact: whether losses must have the same bits.
    """
    started = time.perf_counter()
    state = _state(model, optimizer)
    offload.load_sharded(state, saved.folder)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    del state
    load_s = time.perf_counter() - started
    losses = _next_losses(model, optimizer, batch)
    difference = max(abs(a - b) for a, b in zip(losses, saved.losses, strict=True))
    worst = max(world.gather(difference))
    return {
        "folder": str(saved.folder),
        "bytes": sum(file.stat().st_size for file in saved.folder.rglob("*") if file.is_file()),
        "save_s": saved.save_s,
        "load_s": load_s,
        "losses": saved.losses,
        "resumed_losses": losses,
        "max_loss_difference": worst,
        "bit_equal": worst == 0.0,
        "equal": worst == 0.0 if exact else worst <= TOLERANCE * abs(saved.losses[0]),
    }


def describe(mode: str, check: dict[str, Any]) -> str:
    """The result in one line."""
    how = "the same bits" if check["bit_equal"] else f"differences up to {check['max_loss_difference']:.2g}"
    return (
        f"{mode}: saved {check['bytes'] / 1e9:.2f} GB in {check['save_s']:.1f} s, loaded in {check['load_s']:.1f} s; "
        f"losses of the next step and after it: {how}{'' if check['equal'] else ', which is too much'}"
    )


def _state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def _next_losses(model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor]) -> list[float]:
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        after = model(*batch)
    return [loss.item(), after.item()]
