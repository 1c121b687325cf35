"""The optimizers that users see: `AdamW` and `SignSGD`.

What is peculiar about them lies in `front.OffloadOptimizer`; what is peculiar about their arithmetic, in the kernels'
rules. Here are their hyperparameters, defaults and checks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch

from offload.checkpoint import REFUSED_FLAGS
from offload.config import (
    BACKENDS,
    CLIP_POLICIES,
    MODES,
    NONFINITE_POLICIES,
    OffloadConfig,
    check_choice,
    check_moments,
)
from offload.errors import ConfigError
from offload.front import OffloadOptimizer, Params
from offload.kernels.rule import ADAMW_RULES, SignSGDRule
from offload.options import EARLY_MODES, Options
from offload.prepare import Masters

__all__ = ["AdamW", "SignSGD"]

IGNORED_FLAGS = ("foreach", "fused")
"""Of torch's AdamW: which of its kernels to take."""


class AdamW(OffloadOptimizer):
    """AdamW (Loshchilov and Hutter, 2019) with FP32 masters and moments, in host memory where the mode says so.

    The same bits as ``torch.optim.AdamW(fused=True)`` on FP32 copies of the parameters, in every mode (docs/numerics.md).

    Args:
        params: what torch.optim takes: named parameters, parameters, or param groups. BF16 or FP32 leaves.
        lr: a number or a one-element tensor; read at every step.
        betas, eps, weight_decay, maximize: as ``torch.optim.AdamW``.
        masters: what `cast_compute_weights` returned, where the model was FP32; otherwise masters are the weights.
        mode: ``"resident"`` (state on the device), ``"all-at-once"``, ``"chunked-sync"``, ``"chunked-stream"`` (state on
            the host, stepped on the device at ``step()``), ``"wavefront"`` (state on the host, stepped there inside
            backward), ``"hybrid"`` (some layers so, the others streamed through the device meanwhile; ``backend="numba"``
            alone), or ``"auto"``: the planner chooses, see docs/planner.md.
        backend: ``"numba"``, or ``"torch"`` for fused ``torch.optim`` kernels on the host.
        max_grad_norm: global L2 norm to which gradients are clipped, exactly; None for no clipping.
        clip: how a wavefront clips, and treats non-finite gradients: ``"speculate"`` (updates run inside backward as if
            nothing had to be clipped, into a second set of state; when the norm is known they are committed, or rolled
            back and done again), ``"defer"`` (gradients stream to the host during backward, updates run when the
            norm is known), or ``"auto"`` (the first while roll-backs are rare, else the second). Chunks for which the
            host has no memory for a second set are deferred; `plan` says how much there is.
        nonfinite: a gradient with an inf or a NaN is applied (``"propagate"``, as torch), makes the whole step leave
            every bit as it was (``"skip"``), or raises before any change (``"raise"``).
        accumulation_steps: backward passes per step.
        flush_denormals: treat denormals as zero; False keeps them as torch does by default, up to 11 times slower.
        overlap_forward: ``step()`` returns while the last chunks are still being stepped, and each layer's forward waits for
            its own weights; the bits are the same. Needs `model`, whose modules get the hooks, and mode ``"wavefront"`` or
            ``"hybrid"`` to have an effect. Weights that are read past the modules' calls are not guarded: call
            `synchronize` first (docs/overlap-forward.md).
        model: the model that has all parameters of the optimizer. Its forward raises `MidStepError` between a backward that
            applied parts of a step and ``step()``, when weights are part old, part new. None: that is the caller's to avoid.
        config: see `OffloadConfig`.
        of_torch: further arguments of ``torch.optim.AdamW``: ``amsgrad``, ``capturable`` and ``differentiable`` are refused
            where they are true, ``fused`` and ``foreach`` choose between kernels that are not used here.

    Raises:
        ConfigError, ParameterError, MemoryBudgetError: with nothing left behind.
    """

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        masters: Masters | None = None,
        mode: str = "auto",
        backend: str = "numba",
        max_grad_norm: float | None = None,
        clip: str = "auto",
        nonfinite: str = "propagate",
        accumulation_steps: int = 1,
        flush_denormals: bool = True,
        overlap_forward: bool = False,
        model: torch.nn.Module | None = None,
        config: OffloadConfig | None = None,
        **of_torch: Any,
    ) -> None:
        options = _options(
            mode,
            backend,
            max_grad_norm,
            clip,
            nonfinite,
            accumulation_steps,
            flush_denormals,
            overlap_forward,
            model,
            config,
        )
        _check_flags(of_torch)
        if unknown := of_torch.keys() - {*REFUSED_FLAGS, *IGNORED_FLAGS}:
            raise TypeError(f"AdamW() got an unexpected keyword argument {min(unknown)!r}")
        check_moments(options.config, f"mode={mode!r}", mode in ("wavefront", "auto"))
        check_moments(options.config, f"backend={backend!r}", backend == "numba")
        defaults = _torch_defaults() | {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        super().__init__(
            params,
            defaults,
            rule=ADAMW_RULES[options.config.moments],
            check_group=_check_adamw,
            masters=masters,
            options=options,
            model=model,
        )


class SignSGD(OffloadOptimizer):
    """signSGD (Bernstein et al., 2018) with decoupled weight decay: ``p = p (1 - lr wd) - lr sign(g)``; no moments.

    Args: as for `AdamW`.
    """

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-4,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        masters: Masters | None = None,
        mode: str = "auto",
        backend: str = "numba",
        max_grad_norm: float | None = None,
        clip: str = "auto",
        nonfinite: str = "propagate",
        accumulation_steps: int = 1,
        flush_denormals: bool = True,
        overlap_forward: bool = False,
        model: torch.nn.Module | None = None,
        config: OffloadConfig | None = None,
    ) -> None:
        options = _options(
            mode,
            backend,
            max_grad_norm,
            clip,
            nonfinite,
            accumulation_steps,
            flush_denormals,
            overlap_forward,
            model,
            config,
        )
        check_moments(options.config, "SignSGD, which has no moments", good=False)
        defaults = {"lr": lr, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(
            params,
            defaults,
            rule=SignSGDRule,
            check_group=_check_common,
            masters=masters,
            options=options,
            model=model,
        )


def _options(
    mode: str,
    backend: str,
    max_grad_norm: Any,
    clip: str,
    nonfinite: str,
    accumulation_steps: int,
    flush_denormals: bool,
    overlap_forward: bool,
    model: torch.nn.Module | None,
    config: OffloadConfig | None,
) -> Options:
    check_choice("clip", clip, CLIP_POLICIES)
    if overlap_forward:
        _check_overlap(model, mode)
    if config is not None and not isinstance(config, OffloadConfig):
        raise ConfigError(f"config is a {type(config).__name__}: expected an offload.OffloadConfig, or None")
    if not isinstance(overlap_forward, bool):
        raise ConfigError(f"overlap_forward={overlap_forward!r}: expected True or False")
    if max_grad_norm is not None and (isinstance(max_grad_norm, str) or not max_grad_norm > 0.0):
        raise ConfigError(
            f"max_grad_norm={max_grad_norm!r}: expected a positive number, or None for no clipping"
        )
    if not isinstance(accumulation_steps, int) or accumulation_steps < 1:
        raise ConfigError(f"accumulation_steps={accumulation_steps!r}: expected an integer of at least 1")
    return Options(
        mode=check_choice("mode", mode, MODES),
        backend=check_choice("backend", backend, BACKENDS),
        max_grad_norm=None if max_grad_norm is None else float(max_grad_norm),
        nonfinite=check_choice("nonfinite", nonfinite, NONFINITE_POLICIES),
        clip=clip,
        accumulation_steps=accumulation_steps,
        flush_denormals=flush_denormals,
        config=config or OffloadConfig(),
        overlap_forward=overlap_forward,
    )


def _check_overlap(model: torch.nn.Module | None, mode: str) -> None:
    if model is None:
        raise ConfigError(
            "overlap_forward=True needs model=: the model whose forward is to wait for the weights that it uses"
        )
    if mode not in ("auto", *EARLY_MODES):
        raise ConfigError(
            f"overlap_forward=True with mode={mode!r}: this mode updates everything in step() and has nothing to overlap; "
            "choose wavefront, hybrid or auto"
        )


def _check_common(group: Mapping[str, Any]) -> None:
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ConfigError(f"lr is a tensor of {lr.numel()} elements; expected a number or one element")
    if not _is_number(lr, or_tensor=True):
        raise ConfigError(f"lr={lr!r} {_no_number(lr, ' or a tensor of one element')}")
    _require_number("weight_decay", group["weight_decay"])
    for name in ("lr", "weight_decay"):
        value = float(group[name])
        if not (value >= 0.0 and math.isfinite(value)):
            raise ConfigError(f"{name}={value!r}: expected a finite number, 0 or more")


def _check_adamw(group: Mapping[str, Any]) -> None:
    _check_common(group)
    betas = group["betas"]
    pair = list(betas) if isinstance(betas, Iterable) and not isinstance(betas, str) else []
    if len(pair) != 2:
        raise ConfigError(f"betas={betas!r}: expected two numbers in [0, 1), as (0.9, 0.999)")
    for beta in pair:
        if not _is_number(beta, or_tensor=True):
            raise ConfigError(f"betas={betas!r}: {beta!r} {_no_number(beta)}")
    if not all(0.0 <= float(beta) < 1.0 for beta in pair):
        raise ConfigError(f"betas={betas!r}: expected two numbers in [0, 1)")
    _require_number("eps", group["eps"])
    if not 0.0 <= group["eps"] < math.inf:
        raise ConfigError(f"eps={group['eps']!r}: expected a finite number, 0 or more")
    _check_flags(group)


def _require_number(name: str, value: Any) -> None:
    if not _is_number(value):
        raise ConfigError(f"{name}={value!r} {_no_number(value)}")


def _is_number(value: Any, *, or_tensor: bool = False) -> bool:
    """Also NumPy's; no bool, no text, which ``float()`` would take, and no meta tensor, which has no value."""
    if isinstance(value, torch.Tensor):
        is_real = not value.is_complex() and value.dtype != torch.bool
        return or_tensor and value.numel() == 1 and is_real and not value.is_meta
    return isinstance(value, Real) and not isinstance(value, bool)


def _no_number(value: Any, more: str = "") -> str:
    """What is wrong with `value`, and the remedy."""
    remedy = f"; text from a file or a command line is one after float({value!r})"
    return f"is a {type(value).__name__}: expected a number{more}{remedy if isinstance(value, str) else ''}"


def _check_flags(given: Mapping[str, Any]) -> None:
    for flag in REFUSED_FLAGS:
        if given.get(flag):
            raise ConfigError(f"{flag}=True is not supported; use torch.optim.AdamW for it")


def _torch_defaults() -> dict[str, Any]:
    """Exactly the keys that the running torch's AdamW has: others would break flattened DCP checkpoints."""
    return dict(torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).defaults)
