"""Where gradients come from: `Source`, one per parameter, between whoever makes the gradient and the engine.

A gradient is complete when nobody writes to it any more, and that moment depends on who made it:

- autograd alone (`HookSource`): when it has been accumulated into ``param.grad``.
- FSDP2 (`ShardedSource`): when FSDP has reduced it, put the local shard into ``param.grad`` and called the hooks.
- DistributedDataParallel, and loops that reduce by hand: later than any hook. `WatchedSource` finds out in the first
  step, whose gradients it leaves where they are: if one was written to after its hook, gradients are taken at
  ``step()`` from then on.

Where a gradient has left, a sentinel stands (`sentinel`), so whoever reads or reduces it too late raises.
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from offload.distributed import local_gradient, shard_like
from offload.sentinel import GoneGradient, MailboxGradient

__all__ = ["HookSource", "ShardedSource", "Source", "WatchedSource", "make_source"]

logger = logging.getLogger(__name__)


class Source(Protocol):
    """One parameter's gradients: `before` and `take` in its hooks, `standing` at ``step()``, `clear` when it is over."""

    @property
    def stays(self) -> bool:
        """Whether the gradient of a hook was left in ``param.grad``, to be taken at ``step()``."""

    @property
    def filled(self) -> bool:
        """Whether a gradient stands in ``param.grad``."""

    @property
    def dropped(self) -> bool:
        """Whether somebody removed from ``param.grad`` what this source had left there."""

    def before(self, gradient: torch.Tensor, *, more: bool) -> None:
        """Autograd is about to add `gradient` to ``param.grad``; `more`: it is one of several micro-batches."""

    def take(self) -> torch.Tensor | None:
        """In the hook: the local gradient, if there is one and it does not stay."""

    def standing(self) -> list[torch.Tensor]:
        """At ``step()``: local gradients that still stand in ``param.grad``, one per micro-batch where known."""

    def clear(self) -> None:
        """Forget what was left in ``param.grad``, and remove it."""


def make_source(param: torch.Tensor, name: str) -> Source:
    """The source for `param`, called `name` in messages."""
    return ShardedSource(param, name) if isinstance(param, DTensor) else WatchedSource(param, name)


class HookSource:
    """Takes the gradient in the hook and leaves a sentinel."""

    stays = False

    def __init__(self, param: torch.Tensor, name: str) -> None:
        self._param, self._name = param, name
        self._gone: torch.Tensor | None = None  # a GoneGradient, or a shard made of one
        self._placed = False

    @property
    def filled(self) -> bool:
        """See `Source.filled`."""
        return self._param.grad is not None and self._param.grad is not self._gone

    @property
    def dropped(self) -> bool:
        """See `Source.dropped`."""
        return self._placed and self._param.grad is not self._gone

    def before(self, gradient: torch.Tensor, *, more: bool) -> None:
        """See `Source.before`: autograd must not add to the sentinel."""
        self.clear()

    def take(self) -> torch.Tensor | None:
        """See `Source.take`. What autograd added to the sentinel is a gradient too."""
        gradient = self._param.grad
        if gradient is None:
            return None
        if isinstance(gradient, GoneGradient) and gradient is self._gone:
            incoming, gradient.incoming = gradient.incoming, None
            return incoming
        if self._gone is None:
            self._gone = self._sentinel(gradient)
        self._param.grad = self._gone
        self._placed = True
        return gradient

    def standing(self) -> list[torch.Tensor]:
        """See `Source.standing`: assigned by hand, or made while no hook was there."""
        gradient = self.take()
        return [] if gradient is None else [gradient]

    def clear(self) -> None:
        """See `Source.clear`."""
        if self._placed and self._param.grad is self._gone:
            self._param.grad = None
            self._placed = False

    def _sentinel(self, gradient: torch.Tensor) -> torch.Tensor:
        return GoneGradient(gradient, self._name)


class ShardedSource(HookSource):
    """Of a DTensor parameter. FSDP calls no hook before it adds a further micro-batch to ``param.grad``, so the sentinel
    itself takes in what is added to it.
    """

    _mailbox: MailboxGradient

    def take(self) -> torch.Tensor | None:
        """See `Source.take`; the rank's own part."""
        if self._param.grad is not None and self._param.grad is self._gone:
            return self._mailbox.collect()
        gradient = super().take()
        return None if gradient is None else local_gradient(gradient, self._param)

    def _sentinel(self, gradient: torch.Tensor) -> torch.Tensor:
        self._mailbox = MailboxGradient(local_gradient(gradient, self._param), self._name)
        return shard_like(self._param, self._mailbox)


class When(Enum):
    """When gradients of a `WatchedSource` are complete."""

    UNKNOWN = "not known before the first step has ended: they stay in param.grad"
    IN_HOOK = "in the hook"
    AT_STEP = "at step(): somebody writes to them after the hook"


class WatchedSource:
    """Of a plain tensor: a `HookSource`, unless somebody else writes to the gradient after the hook."""

    def __init__(self, param: torch.Tensor, name: str) -> None:
        self._param, self._name = param, name
        self._hook = HookSource(param, name)
        self._when = When.UNKNOWN
        self._seen: tuple[int, int] | None = None  # the gradient as its last hook left it
        self._parts: list[
            torch.Tensor
        ] = []  # micro-batches of a step whose gradients are not known to be complete

    @property
    def stays(self) -> bool:
        """See `Source.stays`."""
        return self._seen is not None

    @property
    def filled(self) -> bool:
        """See `Source.filled`."""
        return self._hook.filled

    @property
    def dropped(self) -> bool:
        """See `Source.dropped`."""
        return self._hook.dropped or (self.stays and self._param.grad is None)

    def before(self, gradient: torch.Tensor, *, more: bool) -> None:
        """See `Source.before`."""
        if self._when is When.UNKNOWN and not dist.is_initialized():
            self._when = When.IN_HOOK
        if self._when is When.UNKNOWN and more:
            self._parts.append(gradient.detach().clone())  # autograd may add the next one to it
        self._hook.before(gradient, more=more)

    def take(self) -> torch.Tensor | None:
        """See `Source.take`."""
        if self._when is When.IN_HOOK:
            return self._hook.take()
        if self._param.grad is not None:
            self._seen = _fingerprint(self._param.grad)
        return None

    def standing(self) -> list[torch.Tensor]:
        """See `Source.standing`."""
        gradient = self._param.grad
        if self._when is When.IN_HOOK or gradient is None:
            return self._hook.standing()
        if self._when is When.UNKNOWN and self._seen is not None:
            self._when = When.IN_HOOK if _fingerprint(gradient) == self._seen else When.AT_STEP
            if self._when is When.AT_STEP:
                logger.info(
                    "%s: its gradient is written to after autograd's hooks (DistributedDataParallel?); it is taken at "
                    "step()",
                    self._name,
                )
        parts = self._parts if self._when is When.IN_HOOK and self._parts else [gradient]
        self.clear()
        return parts

    def clear(self) -> None:
        """See `Source.clear`."""
        self._hook.clear()
        if self.stays:
            self._param.grad = None
        self._seen, self._parts = None, []


def _fingerprint(gradient: torch.Tensor) -> tuple[int, int]:
    return gradient._version, gradient.data_ptr()
