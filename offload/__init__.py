"""Optimizer state and updates in host memory, while backward is still running.

    optimizer = offload.AdamW(model.named_parameters(), lr=3e-4, mode="wavefront")
    loss.backward(); optimizer.step(); optimizer.zero_grad()

The same bits as ``torch.optim.AdamW(fused=True)``, at a third to a sixth of the device memory.
"""

from offload.checkpoint_files import load_checkpoint, load_sharded, save_checkpoint, save_sharded
from offload.config import OffloadConfig
from offload.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ClosedError,
    ConfigError,
    DeadlineError,
    GradientError,
    HyperparameterChangedError,
    KernelError,
    MemoryBudgetError,
    MidStepError,
    NoGradientError,
    NonFiniteGradientError,
    OffloadError,
    ParameterError,
    PeerError,
    PinningError,
    StateError,
    UndeclaredBackwardError,
    UnsupportedDtypeError,
    WorkerError,
)
from offload.optimizer import AdamW, SignSGD
from offload.prepare import Masters, cast_compute_weights
from offload.report import StepReport
from offload.state_offload import CPUOffloadOptimizer
from offload.threads import configure_cpu_optimizer_threads

__all__ = [
    "AdamW",
    "CPUOffloadOptimizer",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ClosedError",
    "ConfigError",
    "DeadlineError",
    "GradientError",
    "HyperparameterChangedError",
    "KernelError",
    "Masters",
    "MemoryBudgetError",
    "MidStepError",
    "NoGradientError",
    "NonFiniteGradientError",
    "OffloadConfig",
    "OffloadError",
    "ParameterError",
    "PeerError",
    "PinningError",
    "SignSGD",
    "StateError",
    "StepReport",
    "UndeclaredBackwardError",
    "UnsupportedDtypeError",
    "WorkerError",
    "__version__",
    "cast_compute_weights",
    "configure_cpu_optimizer_threads",
    "load_checkpoint",
    "load_sharded",
    "save_checkpoint",
    "save_sharded",
]

__version__ = "0.1.0"
