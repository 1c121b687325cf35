"""What is said when a call does not fit the moment: what was applied already, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from offload.config import sample

__all__ = [
    "assigned_late",
    "cut_short",
    "dropped",
    "extra_backward",
    "left_out",
    "mixture",
    "no_gradient",
    "no_way_back",
    "nonfinite",
    "removed",
    "second_fire",
    "unfinished",
]


def unfinished(what: str, applied: Sequence[str]) -> str:
    """A backward pass did not end; `applied` are the chunks that were updated in it."""
    if not applied:
        return f"{what}; its gradients are incomplete: call zero_grad() to drop them, then run backward again"
    return (
        f"{what} after {sample(applied)} had been updated, so the state is part old, part new; load the last checkpoint "
        "of model and optimizer (load_state_dict) to go on"
    )


def extra_backward(parameter: str, declared: int, step: int, applied: Sequence[str]) -> str:
    """One backward pass more than was declared."""
    already = f" ({sample(applied)} already hold step {step})" if applied else ""
    return (
        f"{parameter} got a gradient of one backward pass more than the {declared} declared for step {step}{already}. "
        f"Call step() after {declared} backward pass(es), or declare more: accumulation_steps={declared + 1}, or "
        "`with opt.accumulate(): loss.backward()` for all but the last. The gradient was dropped; step() still applies "
        "what came before it"
    )


def second_fire(parameter: str, step: int, applied: Sequence[str]) -> str:
    """A second gradient in one backward pass, after the first was taken for the last."""
    return (
        f"{parameter} got two gradients in one backward pass, and the first of them was taken for the whole one, as in the "
        f"steps before, and applied to step {step} ({sample(applied) or 'its tile waits for others'}). That happens where a "
        "weight begins to be used both inside and outside of a checkpoint with use_reentrant=True: use "
        "use_reentrant=False, or let it be so from the first step on. To go on, load the last checkpoint of model and "
        "optimizer (load_state_dict)"
    )


def assigned_late(parameter: str) -> str:
    """A gradient that was assigned by hand after its parameter's update."""
    return (
        f"{parameter} has a gradient in .grad, but its update of this step was applied "
        "during backward; assign gradients before backward, or set .grad to None"
    )


def removed(names: Sequence[str]) -> str:
    """Param groups were removed while a step was under way."""
    return (
        f"the param group of {sample(names)} was removed between backward and step(), when its gradients had left for the "
        "optimizer already: put it back and call step(), or remove groups before backward"
    )


def left_out(chunks: str, *, handed_over: bool) -> str:
    """A forward that did not call the modules of `chunks`, whose update was still running.

    Args:
        handed_over: it is ``step()`` that raises, when gradients of that forward have come.
    """
    remedy = "run forward and backward again" if handed_over else "drop its result and run it again"
    dropped = "; nothing was changed on this rank, its gradients are dropped" if handed_over else ""
    return (
        f"overlap_forward: {'the last' if handed_over else 'this'} forward did not call the modules of {chunks}, whose "
        "update was still running. If it read their weights past the modules (torch.nn.functional, compiled code), they "
        f"may have been old: {remedy}{dropped}. The overlap is off from now on; if those modules are meant to be left out "
        "at times, build the optimizer with overlap_forward=False"
    )


def mixture(what: str, applied: Sequence[str]) -> str:
    """A call that would see two steps at once."""
    return (
        f"{what} between backward and step(): {sample(applied)} already hold the new step, others the old one; call "
        "step() first"
    )


def no_way_back(applied: Sequence[str]) -> str:
    """Gradients cannot be dropped any more."""
    return (
        f"zero_grad() after a backward whose gradients were partly applied: {sample(applied)} already hold the new step. "
        "Call step() first; to be able to drop a step, use max_grad_norm= or nonfinite='skip', with which a "
        "step can be rolled back"
    )


def no_gradient() -> str:
    """A step without anything to apply."""
    return (
        "step(): no gradient has arrived since the last step. Call loss.backward() first; if it ran, its graph does not "
        "reach this optimizer's parameters (were they replaced after the optimizer was built?)"
    )


def nonfinite(where: str) -> str:
    """An inf or a NaN, found before any change."""
    return (
        f"the gradient {where} holds an inf or a NaN (nonfinite='raise'); "
        "nothing was changed and the gradients were dropped"
    )


def cut_short(what: str, call: str) -> str:
    """A call after one that was interrupted while it changed state."""
    return (
        f"{what} after {call} was cut short by an exception (Ctrl-C, a deadline): state may be part old, part new. Load the "
        "last checkpoint of model and optimizer (load_state_dict) to go on"
    )


def dropped(parameter: str) -> str:
    """``param.grad`` was cleared behind the optimizer's back."""
    return (
        f"the gradient of {parameter} has left for the optimizer, and clearing .grad (model.zero_grad(), p.grad = None) "
        "does not drop it: call zero_grad() of the optimizer instead"
    )
