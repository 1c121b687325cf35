"""Hugging Face ``Trainer``: ``OffloadTrainer`` in its place, or ``OffloadTrainerMixin`` before any subclass of it::

    class OffloadSFTTrainer(OffloadTrainerMixin, trl.SFTTrainer): ...

The optimizer is made from ``TrainingArguments`` as Trainer makes its own; ``offload_options`` has what only we know.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

import offload
from offload.integrations._common import OffloadOptimizer, require_same_clipping, unwrap
from offload.integrations.accelerate import require_plain_training, take_over

__all__ = ["OffloadTrainer", "OffloadTrainerMixin"]

logger = logging.getLogger(__name__)

ARGUMENTS = {
    "lr": "learning_rate",
    "betas": "adam_beta1 and adam_beta2",
    "eps": "adam_epsilon",
    "weight_decay": "weight_decay",
    "max_grad_norm": "max_grad_norm",
    "accumulation_steps": "gradient_accumulation_steps",
}
"""Options of the optimizer that TrainingArguments already has a word for."""

ADAMW_NAMES = ("adamw_torch", "adamw_torch_fused")
"""Values of ``TrainingArguments.optim`` that mean AdamW as we compute it."""

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class OffloadTrainerMixin(_Base):
    """Goes before ``Trainer`` or a subclass of it among the bases.

    Args:
        offload_options: keyword arguments of `offload.AdamW` that TrainingArguments has no word for: ``mode``,
            ``masters``, ``nonfinite``, ``config`` and so on.

    The rest are Trainer's own arguments. An offload optimizer given through ``optimizers=`` is used as it is, once its
    clipping was found to be that of ``args.max_grad_norm``.

    Raises:
        offload.ConfigError: the arguments ask for what offload cannot do (FP16, several processes, another optimizer).
    """

    def __init__(self, *args: Any, offload_options: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._offload_options = dict(offload_options or {})
        for name in self._offload_options.keys() & ARGUMENTS.keys():
            raise offload.ConfigError(
                f"offload_options[{name!r}] would contradict TrainingArguments; set {ARGUMENTS[name]} there"
            )
        self._resumes = False
        self._steps: _StepCount | None = None
        self.optimizer: Any = None
        super().__init__(*args, **kwargs)

    # Called by Trainer ------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Trainer's accelerator, taken over: it clips nothing itself, and tells micro-batches apart."""
        super().create_accelerator_and_postprocess()
        take_over(self.accelerator)

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """`offload.AdamW` from the arguments, with weight decay on those parameters on which Trainer has it."""
        if self.optimizer is None:
            self.optimizer = self._make_optimizer(self.model if model is None else model)
        ours = unwrap(self.optimizer)
        if ours is not None:
            require_same_clipping(ours, self.args.max_grad_norm, "TrainingArguments.max_grad_norm")
            logger.info(
                "Trainer's own clipping is off: %s clips to max_grad_norm=%s itself, exactly; plan: %s",
                type(ours).__name__,
                ours.max_grad_norm,
                ours.plan,
            )
            if self._steps is None or self._steps.optimizer is not ours:
                self._steps = _StepCount(ours)
        super().create_optimizer(*(() if model is None else (model,)))  # finds it there
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; with a checkpoint, masters come from it."""
        self._resumes = bool(resume_from_checkpoint)
        if resume_from_checkpoint:
            self._warn_of_lost_state(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Training logs also say the gradient norm before clipping, and what `StepReport.as_dict` has.

        A line stands under the number of Trainer's step. Among ranks, with ``overlap_forward`` and neither clipping nor
        checks, the report is of the step before (`offload.AdamW.last_step`): its norm is called ``grad_norm_before`` then,
        and ``offload/step`` is its number.
        """
        ours = unwrap(self.optimizer)
        if "loss" in logs and ours is not None and not ours.closed and ours.last_step is not None:
            report = ours.last_step
            is_late = self._steps is not None and report.step < self._steps.number
            name = "grad_norm_before" if is_late else "grad_norm"
            logs = {**logs, name: report.grad_norm, **report.as_dict()}
        super().log(logs, *args, **kwargs)

    # Inside -----------------------------------------------------------------------------------------------------

    def _make_optimizer(self, model: torch.nn.Module) -> OffloadOptimizer:
        self._require_adamw()
        args, options = self.args, dict(self._offload_options)
        if self._resumes and options.pop("masters", None) is not None:
            logger.info("masters of offload_options are left out: those of the checkpoint are newer")
        return offload.AdamW(
            self._groups(model),
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            max_grad_norm=args.max_grad_norm or None,
            accumulation_steps=args.gradient_accumulation_steps,
            **options,
        )

    def _groups(self, model: torch.nn.Module) -> list[dict[str, Any]]:
        """With and without decay, by name, as Trainer divides them."""
        decayed = set(self.get_decay_parameter_names(model))
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        groups = [
            {
                "params": [(n, p) for n, p in named if (n in decayed) is decays],
                "weight_decay": self.args.weight_decay if decays else 0.0,
            }
            for decays in (True, False)
        ]
        return [group for group in groups if group["params"]]

    def _require_adamw(self) -> None:
        name = getattr(self.args.optim, "value", self.args.optim)
        if name not in ADAMW_NAMES or self.args.optim_args or self.args.optim_target_modules:
            raise offload.ConfigError(
                f"optim={name!r} (optim_args={self.args.optim_args!r}, optim_target_modules="
                f"{self.args.optim_target_modules!r}): OffloadTrainer makes offload.AdamW; use optim="
                f"{ADAMW_NAMES[0]!r} without them, or pass an optimizer, offload.CPUOffloadOptimizer(...) for example, "
                "through optimizers="
            )
        require_plain_training(self.accelerator)

    def _warn_of_lost_state(self, checkpoint: str | bool) -> None:
        folder = checkpoint if isinstance(checkpoint, str) else get_last_checkpoint(self.args.output_dir)
        if folder is not None and not (Path(folder) / "optimizer.pt").exists():
            logger.warning(
                "%s has no optimizer.pt (save_only_model=True?): moments start at zero, masters at the saved weights, "
                "whose lower bits are lost where they are BF16",
                folder,
            )


class _StepCount:
    """How many steps an optimizer has taken, as `StepReport.step` counts them."""

    def __init__(self, optimizer: OffloadOptimizer) -> None:
        self.optimizer = optimizer
        self.number = 0 if optimizer.last_step is None else optimizer.last_step.step
        optimizer.register_step_post_hook(lambda *_: self._note())

    def _note(self) -> None:
        self.number += 1


class OffloadTrainer(OffloadTrainerMixin, Trainer):
    """Trainer with its optimizer's state in host memory; see `OffloadTrainerMixin` for what is added."""
