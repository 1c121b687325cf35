"""What stands in ``param.grad`` once the gradient has left for the host.

A ``None`` there would be taken for "no gradient": ``torch.nn.utils.clip_grad_norm_`` would return 0 and clip nothing,
without a word. So a tensor without storage takes its place until ``step()``, with the parameter's shape and dtype, and
whatever reads it raises.

One caller is served: autograd. A hook clears the sentinel before a gradient is accumulated, but where two threads run
backward at a time, the other one's may have come between; then the new gradient is kept here, for the hook that follows.
"""

from __future__ import annotations

from typing import Any

import torch

from offload.errors import GradientError

__all__ = ["GoneGradient", "MailboxGradient"]

ADDITIONS = ("add_", "__iadd__")

NO_TASK = -1
"""What torch calls the running graph task where none is."""

HARMLESS = (
    "size",
    "dim",
    "numel",
    "nelement",
    "stride",
    "is_floating_point",
    "is_complex",
    "__len__",
    "__hash__",
    "_has_compatible_shallow_copy_type",
)

MOVES = ("cpu", "cuda", "to")
"""``module.cpu()`` and ``module.to(...)`` move gradients too, a framework's clean-up after an error for one: they get the
same sentinel back, which goes on raising when it is read."""


class GoneGradient(torch.Tensor):
    """A gradient that is not here any more. Any operation on it raises `GradientError`."""

    parameter_name: str
    incoming: torch.Tensor | None

    @staticmethod
    def __new__(cls, like: torch.Tensor, name: str) -> GoneGradient:
        """A stand-in for the gradient of the parameter `like`, called `name` in messages."""
        sentinel: GoneGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        sentinel.parameter_name = name
        sentinel.incoming = None
        return sentinel

    def __init__(self, like: torch.Tensor, name: str) -> None:
        """All is done in ``__new__``, as torch wants it of tensors without storage."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"GoneGradient({self.parameter_name!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Properties and sizes may be asked for; what would look for memory that is not there may not."""
        if func.__name__ in ("__get__", "__set__", *HARMLESS):
            return super().__torch_function__(func, types, args, kwargs or {})
        if func.__name__ in MOVES and isinstance(args[0], cls):
            return args[0]
        return cls.__torch_dispatch__(func, types, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickling reads."""
        return self.__torch_dispatch__("pickle", (), (self,))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        in_backward = torch._C._current_graph_task_id() != NO_TASK
        if (
            func is torch.ops.aten.add_.Tensor and in_backward and isinstance(args[0], cls)
        ):  # Python's come as methods
            args[0].incoming = args[1].clone()  # autograd may go on to use its own
            return args[0]
        flat, _ = torch.utils._pytree.tree_flatten((args, kwargs or {}))
        name = next(value.parameter_name for value in flat if isinstance(value, cls))
        raise GradientError(
            f"{func} reads the gradient of {name}, which has left for the optimizer during backward. To clip gradients "
            "use max_grad_norm= of the optimizer (exact, in every mode); their norm is in optimizer.last_step.grad_norm. "
            "To look at gradients, register a hook on the parameter before the optimizer is built. To reduce them between "
            "ranks, wrap the model (DistributedDataParallel, fully_shard) before the optimizer's first step. Of two "
            "optimizers over one parameter only one can have its gradient: give each parameter to one of them"
        )


class MailboxGradient(GoneGradient):
    """A sentinel that keeps what is added to it, for whoever adds to ``param.grad`` without asking hooks first.

    Until that is collected, which the optimizer's hook does, it can be read: hooks before that one see the gradient.
    """

    _letter: torch.Tensor | None = None

    def collect(self) -> torch.Tensor | None:
        """What was added since the last call, not copied."""
        letter, self._letter = self._letter, None
        return letter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """An addition is kept; a second one before the first was collected is one that nobody asked for."""
        if func.__name__ in ADDITIONS and len(args) == 2 and isinstance(args[0], cls) and not kwargs:
            mailbox, addend = args
            if mailbox._letter is None and isinstance(addend, torch.Tensor):
                mailbox._letter = addend.detach()
                return mailbox
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        def read(value: Any) -> Any:
            return value._letter if isinstance(value, cls) and value._letter is not None else value

        opened, options = torch.utils._pytree.tree_map(read, (args, kwargs or {}))
        if any(isinstance(value, cls) for value in torch.utils._pytree.tree_leaves((opened, options))):
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*opened, **options)
