"""Lightning: `OffloadMixin` for a ``LightningModule``, `OffloadMonitor` for the trainer's callbacks::

    class Model(OffloadMixin, lightning.LightningModule):
        def configure_optimizers(self):
            return self.offload_adamw(lr=3e-4, mode="wavefront")

Works with automatic and with manual optimization.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

import offload
from offload.integrations._common import OFFLOAD_OPTIMIZERS, require_same_clipping, unwrap

__all__ = ["OffloadMixin", "OffloadMonitor"]

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule as _Base
else:
    _Base = object


class OffloadMixin(_Base):
    """Goes before ``LightningModule`` among the bases."""

    def offload_adamw(self, params: Any = None, **options: Any) -> offload.AdamW:
        """An optimizer for ``configure_optimizers``: clipping and accumulation are the trainer's.

        Args:
            params: as `offload.AdamW` takes them; None: all parameters of the module, by name.
            options: the other arguments of `offload.AdamW`. In manual optimization, where the trainer neither clips nor
                accumulates, also ``max_grad_norm`` and ``accumulation_steps``.

        Raises:
            offload.ConfigError: the trainer is set to what offload cannot do, or an option contradicts it.
        """
        trainer = self.trainer
        if trainer.world_size > 1:
            raise offload.ConfigError(
                f"the trainer runs {trainer.world_size} processes; offload supports one under Lightning (devices=1)"
            )
        if str(trainer.precision).startswith("16"):
            raise offload.ConfigError(
                f"precision={trainer.precision!r} makes FP16 gradients, and offload takes BF16 or FP32 ones; use "
                "'bf16-true', 'bf16-mixed' or '32-true'"
            )
        if self.automatic_optimization:
            for name, owner in (
                ("max_grad_norm", "gradient_clip_val"),
                ("accumulation_steps", "accumulate_grad_batches"),
            ):
                if name in options:
                    raise offload.ConfigError(f"{name} comes from the trainer's {owner}; set it there")
            _require_norm(trainer.gradient_clip_algorithm)
            options["max_grad_norm"] = trainer.gradient_clip_val or None
            options["accumulation_steps"] = trainer.accumulate_grad_batches
        optimizer = offload.AdamW(self.named_parameters() if params is None else params, **options)
        logger.info(
            "Lightning's own clipping is off: the optimizer clips to max_grad_norm=%s itself, exactly",
            optimizer.max_grad_norm,
        )
        return optimizer

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Any = None,
    ) -> None:
        """Nothing, where the optimizer is ours and clips to the same norm; Lightning's own clipping for all others.

        Raises:
            offload.ConfigError: it does not.
        """
        if not isinstance(optimizer, OFFLOAD_OPTIMIZERS):
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        _require_norm(gradient_clip_algorithm)
        require_same_clipping(optimizer, gradient_clip_val, "the trainer's gradient_clip_val")

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None, **kwargs: Any
    ) -> None:
        """As Lightning's, where ``training_step`` returned None too: that batch is skipped."""
        returned: list[Any] = []

        def closure() -> Any:
            returned.append(optimizer_closure())
            return returned[-1]

        try:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure and closure, **kwargs)
        except offload.NoGradientError:
            if returned != [None]:
                raise
            logger.info("batch %d: training_step returned None, nothing to step", batch_idx)


class OffloadMonitor(Callback):
    """Logs `StepReport.as_dict` after every batch whose step was taken: the gradient norm, bytes moved, seconds by stage.

    Args:
        prefix: of the names.
    """

    def __init__(self, prefix: str = "offload/") -> None:
        self._prefix = prefix
        self._logged: dict[int, int] = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called by the trainer."""
        for index, optimizer in enumerate(map(unwrap, trainer.optimizers)):
            report = optimizer.last_step if optimizer is not None else None
            if report is not None and self._logged.get(index) != report.step:
                self._logged[index] = report.step
                prefix = f"{self._prefix}{index}/" if len(trainer.optimizers) > 1 else self._prefix
                pl_module.log_dict(report.as_dict(prefix), on_step=True, on_epoch=False, batch_size=1)


def _require_norm(algorithm: Any) -> None:
    name = getattr(algorithm, "value", algorithm)
    if name not in (None, "norm"):
        raise offload.ConfigError(
            f"gradient_clip_algorithm={name!r}: gradients of an offload optimizer leave in backward, and it clips their "
            "norm; use gradient_clip_algorithm='norm'"
        )
