"""Every exception that this library raises on purpose.

::

    OffloadError (Exception)
    ├── ConfigError (also ValueError)        an argument or an option is wrong
    ├── ParameterError (also ValueError)     a parameter cannot be offloaded as it is
    │   └── UnsupportedDtypeError (also TypeError)   its dtype, layout or device is not supported
    ├── GradientError (also RuntimeError)    a gradient is missing, unexpected or of the wrong kind
    │   ├── NoGradientError                  step() without any gradient
    │   └── UndeclaredBackwardError          one backward more than was declared
    ├── StateError (also RuntimeError)       the call does not fit the state the optimizer is in
    │   ├── ClosedError                      used after close()
    │   ├── MidStepError                     some chunks hold the new step, others the old one
    │   └── HyperparameterChangedError       lr, betas, ... changed between backward and step()
    ├── NonFiniteGradientError (also FloatingPointError)   nonfinite="raise" found an inf or a NaN
    ├── CheckpointError (also ValueError)    a state dict does not fit this optimizer, a file is no whole checkpoint
    │   └── CheckpointNotFoundError (also FileNotFoundError)   there is none at that path
    ├── MemoryBudgetError (also MemoryError) a budget or the machine does not hold what is needed
    │   └── PinningError                     the system refused to pin host memory
    ├── KernelError (also RuntimeError)      a kernel or its threading layer cannot run here
    ├── PeerError (also RuntimeError)        another rank failed, is gone, or did not come in time
    └── WorkerError (also RuntimeError)      the worker thread failed; ``__cause__`` is the reason
        └── DeadlineError (also TimeoutError)    a wait lasted longer than ``timeout_s``

A message names the parameter or option, shows the value, and says what to do.
The second base lets callers that know only the standard exceptions catch them.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "CheckpointNotFoundError",
    "ClosedError",
    "ConfigError",
    "DeadlineError",
    "GradientError",
    "HyperparameterChangedError",
    "KernelError",
    "MemoryBudgetError",
    "MidStepError",
    "NoGradientError",
    "NonFiniteGradientError",
    "OffloadError",
    "ParameterError",
    "PeerError",
    "PinningError",
    "StateError",
    "UndeclaredBackwardError",
    "UnsupportedDtypeError",
    "WorkerError",
]


class OffloadError(Exception):
    """Base of all errors raised by this library."""


class ConfigError(OffloadError, ValueError):
    """An argument or a configuration field has a value that cannot be used."""


class ParameterError(OffloadError, ValueError):
    """A parameter cannot be offloaded as it is."""


class UnsupportedDtypeError(ParameterError, TypeError):
    """A parameter or gradient has a dtype, layout or device that is not supported."""


class GradientError(OffloadError, RuntimeError):
    """A gradient is missing, unexpected or of the wrong kind."""


class NoGradientError(GradientError):
    """``step()`` was called and no gradient had arrived at all."""


class UndeclaredBackwardError(GradientError):
    """A parameter received one gradient more than the declared micro-batches allow."""


class StateError(OffloadError, RuntimeError):
    """The call does not fit the state that the optimizer is in."""


class ClosedError(StateError):
    """The optimizer was used after ``close()``, or after it refused further use."""


class MidStepError(StateError):
    """Some chunks already hold the new step: the call would see or make a mixture."""


class HyperparameterChangedError(StateError):
    """A group's hyperparameters changed after its first chunk of this step was updated."""


class NonFiniteGradientError(OffloadError, FloatingPointError):
    """``nonfinite="raise"`` found an inf or a NaN; nothing was changed."""


class CheckpointError(OffloadError, ValueError):
    """A state dict does not fit this optimizer, or a file or folder is no whole checkpoint."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path that was given."""


class MemoryBudgetError(OffloadError, MemoryError):
    """A budget, or the machine, does not hold what is needed."""


class PinningError(MemoryBudgetError):
    """The system refused to pin host memory."""


class KernelError(OffloadError, RuntimeError):
    """A kernel or its threading layer cannot run here."""


class PeerError(OffloadError, RuntimeError):
    """Another rank failed, is gone, or did not come to ``step()`` within ``OffloadConfig.timeout_s``."""


class WorkerError(OffloadError, RuntimeError):
    """The worker thread failed; ``__cause__`` holds the reason."""


class DeadlineError(WorkerError, TimeoutError):
    """A wait lasted longer than ``OffloadConfig.timeout_s``."""
