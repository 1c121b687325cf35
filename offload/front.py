"""What all optimizers of this library share: `OffloadOptimizer`, a real `torch.optim.Optimizer` over an engine.

State is built after ``super().__init__()``, which calls ``add_param_group`` before there is an engine.

Here is the order of events between the user, torch's base class and the engine. ``state`` and ``param_groups`` belong to
torch and to the user, who may replace both; so what works on them (`param_registry`, `published_state`) is handed the
present ones at each call.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from offload import state_dict_hooks
from offload.assembly import assemble
from offload.checkpoint import export_state, read_state
from offload.construction import Construction
from offload.distributed import local_shard
from offload.errors import ClosedError, ConfigError, StateError
from offload.given_masters import GivenMasters
from offload.kernels.rule import KernelRule
from offload.model_watch import ModelWatch
from offload.options import Options
from offload.overlap import make_gates
from offload.param_registry import ParamRegistry
from offload.parameters import ParamRecord
from offload.prepare import Masters
from offload.published_state import EntryMaker, follow_step
from offload.report import StepReport
from offload.restored_state import add_with_state, restore
from offload.saved_groups import read_groups
from offload.schedule.engine import Engine
from offload.schedule.forward_gates import ForwardGates
from offload.schedule.plan import Plan
from offload.trace import VARIABLE, Trace
from offload.weak_calls import weakly

__all__ = ["OffloadOptimizer", "Params"]

Params = Iterable[Any]


class OffloadOptimizer(torch.optim.Optimizer):
    """Parameters, engine, steps and checkpoints; a subclass adds a rule and its hyperparameters."""

    _step_supports_amp_scaling = True  # GradScaler then hands itself to step(), which refuses it clearly

    def __init__(
        self,
        params: Params,
        defaults: dict[str, Any],
        *,
        rule: KernelRule,
        check_group: Callable[[Mapping[str, Any]], None],
        masters: Masters | None,
        options: Options,
        model: torch.nn.Module | None = None,
    ) -> None:
        """Build state and engine.

        Args:
            params, defaults: as ``torch.optim.Optimizer`` takes them.
            rule: the update.
            check_group: raises `ConfigError` where a hyperparameter of a param group is out of range.
            masters: FP32 values of cast parameters.
            options: mode, backend and so on.
            model: its forward raises while weights of a half-done step are there, and waits for its weights with
                ``options.overlap_forward``; None: nobody looks.
        """
        self._engine: Engine | None = None
        self._model_watch: ModelWatch | None = None
        self._gates: ForwardGates | None = None
        self._rule, self._check_group = rule, check_group
        self._registry, self._masters, self._entries = ParamRegistry(), GivenMasters(masters), EntryMaker()
        self._closing = threading.RLock()  # one thread at a time; another finds it done
        try:
            with torch.inference_mode(False), Construction() as self._construction:
                # Not in inference mode: state that is made inside could never be written outside.
                self._build(_listed(params), defaults, options)
            self._construction.log(sum(record.numel for record in self._registry.by_param.values()))
            if model is not None:
                self._model_watch = ModelWatch(model, weakly(self._before_forward))
                if options.overlap_forward:
                    self._gates = make_gates(model, self._open_engine(), self._plan.mode, options)
                    self._attach_gates()
        except BaseException:
            if hasattr(self, "_finalizer"):  # the engine is there
                self.close()
            raise

    def _build(self, params: list[Any], defaults: dict[str, Any], options: Options) -> None:
        if not params:
            raise ConfigError(
                "params is empty: pass model.named_parameters(), model.parameters() or param groups"
            )
        torch.optim.Optimizer.__init__(self, params, defaults)
        groups = self.param_groups
        records = [record for group in groups for record in self._registry.make_records(group, groups)]
        if not records:
            raise ConfigError("params has no parameter with requires_grad=True: there is nothing to optimize")
        options.config.check_names(groups)
        given = self._masters.of_first(records)
        engine, self._plan = assemble(self._rule, records, given, options, self._construction)
        self._engine = engine
        self._finalizer = weakref.finalize(self, engine.close)
        engine.before_first = weakly(self._follow_groups)
        self._masters.let_go(records)
        self._publish(records)

    # The training loop ------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: Any = None) -> Any:
        """Apply the gradients that came since the last step; return what `closure` returned.

        Among ranks an error is told to the others, which raise `PeerError`; one of `closure` only if it came after the
        step's backward passes (docs/many-gpus.md).

        Blocks until state and weights are complete: after it any stream and any thread sees the new weights. With
        ``overlap_forward`` it returns before that, and the next forward waits for each layer's weights.

        Args:
            closure: evaluated first, with gradients enabled, as torch optimizers do.
            grad_scaler: refused; see Raises.

        Raises:
            NoGradientError: no gradient came.
            MidStepError: the last backward pass ended with an exception, or is still running in another thread.
            StateError: a param group was removed since backward; among ranks with ``overlap_forward``, the forward left
                modules out whose update was still running: nothing was changed, gradients are dropped.
            ParameterError: a parameter was replaced in the model (``model=`` was given).
            HyperparameterChangedError: a group changed after a part of this step was applied in backward.
            NonFiniteGradientError: with ``nonfinite="raise"``; nothing was changed.
            WorkerError: the worker failed, now or in backward.
            ConfigError: called through a GradScaler.
        """
        engine = self._open_engine()
        loss = None
        with torch.inference_mode(False):
            with engine.announced(has_backward=closure is not None):
                self._require_no_scaler(grad_scaler)
                if closure is not None:
                    with torch.enable_grad():
                        loss = closure()
            with engine.announced():
                self._follow_groups()
                if self._model_watch is not None:
                    self._model_watch.require_same(self._registry.members)
                for unfrozen in self._registry.make_unfrozen(self.param_groups):
                    self._attach(unfrozen)
                engine.step()
                follow_step(self.state, self._registry.members, self._open_engine())
        return loss

    def _require_no_scaler(self, grad_scaler: Any) -> None:
        if grad_scaler is not None or getattr(self, "grad_scale", None) is not None:  # it sets either
            raise ConfigError(
                "GradScaler is not supported: it scales FP16 gradients, and this optimizer takes BF16 or "
                "FP32 ones, which need none; call loss.backward() and step() directly"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, also those that have left for the host.

        Raises:
            MidStepError: parts of the step were applied already; see `docs/troubleshooting.md`.
        """
        if self._engine is not None and not self.closed:
            self._engine.discard()
        super().zero_grad(set_to_none)

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backward passes inside are not the last of their step; wins over ``accumulation_steps``."""
        engine = self._open_engine()
        before = engine.in_accumulate
        engine.enter_accumulate(True)
        try:
            yield
        finally:
            engine.enter_accumulate(before)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, also in mid-training; its parameters start at their own step 1.

        Raises:
            ConfigError: a hyperparameter is out of range.
            ParameterError: a parameter cannot be offloaded. The optimizer stays as it was.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
            if self._engine is not None:
                self._follow_groups()  # one of them may be back
                with torch.inference_mode(False):
                    self._attach(self._registry.make_records(group, self.param_groups))
        except BaseException:
            self.param_groups.pop()
            if self._engine is not None:
                self._follow_groups()  # none of its parameters is trained
            raise

    # What happened, what is planned -----------------------------------------------------------------------------

    @property
    def last_step(self) -> StepReport | None:
        """What the last step did; None before the first.

        Among ranks, with ``overlap_forward`` and neither clipping nor a check for non-finite gradients, of the step before
        from the second step on: ranks agree on a norm in the ``step()`` after. Its ``step`` tells which.
        """
        return self._open_engine().report

    @property
    def max_grad_norm(self) -> float | None:
        """Global L2 norm to which gradients are clipped; None: they are not."""
        return self._open_engine().policy.max_grad_norm

    @property
    def accumulation_steps(self) -> int:
        """Declared backward passes per step."""
        return self._open_engine().policy.accumulation_steps

    @property
    def plan(self) -> Plan:
        """The chosen mode, its memory, and why; of a hybrid, with chunks where they are stepped by now."""
        return self._plan if self._engine is None else self._plan.as_stepped(self._engine.views.placements)

    @property
    def construction(self) -> dict[str, float]:
        """Seconds that the constructor took: ``"total"``, and by stage. Stages overlap; ``"other"`` is when none ran."""
        return {"total": self._construction.total_s, **self._construction.seconds}

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that are mapped for state, gradients and rings now."""
        return self._open_engine().views.host_bytes

    def synchronize(self) -> None:
        """Block until everything submitted so far is done.

        Raises:
            WorkerError: the worker failed.
        """
        self._open_engine().synchronize()

    def resync(self) -> list[str]:
        """Take masters anew from compute weights that they do not round to; moments stay.

        Weights that were written behind the optimizer's back are noticed by themselves at the next backward where
        torch shows the write (``load_state_dict``, ``copy_``, a replaced ``.data``). It does not show writes through
        ``param.data`` or a detached alias (``param.data.copy_(...)``): call this after those. A write that falls between the
        early update of a weight and the end of its step (between backward and ``step()``, or in flight with
        ``overlap_forward``) races with ours for the weight; the master follows whichever came last.

        Returns:
            The names of the parameters whose masters were taken anew.
        """
        return self._open_engine().resync()

    @contextmanager
    def profile(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Write what happens inside the block to `path`, as a Chrome trace for ui.perfetto.dev.

        A step that goes on after ``step()`` is completed at the beginning and at the end of the block. The file is
        written when the block is left, also by an exception, and is whole or absent. Among several ranks each writes its
        own: ``trace-rank1.json``. See docs/performance.md.

        Raises:
            ConfigError: there is nothing that could be written to at `path`; before the block is entered.
            StateError: another trace of this optimizer is being taken.
        """
        engine = self._open_engine()
        if engine.trace is not None:
            raise StateError(
                f"this optimizer is being traced already, to {engine.trace.path}: end that profile() first, or unset "
                f"{VARIABLE} in the environment"
            )
        engine.land()
        engine.begin_trace(Trace(path, device=local_shard(next(iter(self._registry.by_param))).device))
        try:
            yield
            if not self.closed:
                engine.synchronize()
        finally:
            engine.end_trace()

    # Checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State in torch's format: CPU clones of ``step``, the moments, and ``master`` where the weight is BF16.

        Nothing changes it later, so that it can be written in another thread. Hooks see the clones.

        Raises:
            MidStepError: between a backward that applied parts of a step and ``step()``.
        """
        engine = self._open_engine()
        engine.require_untouched("state_dict()")
        engine.synchronize()
        with state_dict_hooks.set_aside_for_saving(self):
            state_dict = export_state(super().state_dict())
        return state_dict_hooks.after_saving(state_dict, self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take state saved by this optimizer or by ``torch.optim.AdamW``; never passes through the device.

        Where a master is missing it is taken from the weight; for BF16 weights, whose lower bits are lost then, with
        a warning. Where masters are there, weights are written anew from them. Sharded parameters take full tensors
        and those that are sharded as they are. State of parameters that are frozen now is kept for the day when they
        are trained. Of param groups ``fused``, ``foreach`` and unknown keys are left out.

        Raises:
            CheckpointError: it does not fit; nothing was changed.
        """
        engine = self._open_engine()
        state_dict = state_dict_hooks.before_loading(state_dict, self)
        self._follow_groups()
        incoming = read_state(state_dict, self.param_groups, self._registry.by_param, self._rule.state_names)
        groups = read_groups(state_dict["param_groups"], self.param_groups, self.defaults, self._check_group)
        engine.begin_loading()
        with state_dict_hooks.set_aside_for_loading(self):
            super().load_state_dict({"state": {}, "param_groups": groups})
        self._follow_groups()  # loading replaced the dicts
        with torch.inference_mode(False):
            restore(engine, self._registry.members, incoming)
            self._publish(self._registry.members)
        self.state.update(incoming.waiting)
        state_dict_hooks.after_loading(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refused: hooks, threads and pinned memory cannot be copied."""
        raise StateError(
            f"{type(self).__name__} cannot be copied or pickled: it owns hooks, a thread and host memory. Save "
            "state_dict() and load it into a new optimizer"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refused, as copying is."""
        self.__deepcopy__({})

    # Life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove hooks, end the worker, release memory; the weights stay as they are. Closing twice is fine.

        Interrupted (Ctrl-C while a step that is under way ends) it is done when called again, or with the optimizer's end.
        """
        self._engine = None
        if self._model_watch is not None:
            self._model_watch.close()
        if self._gates is not None:
            self._gates.remove()
        with self._closing:
            if hasattr(self, "_finalizer") and (alive := self._finalizer.peek()):
                close_engine = alive[1]  # not through the finalizer, which then would never do it again
                close_engine()
                self._finalizer.detach()
        self.state.clear()

    @property
    def closed(self) -> bool:
        """Whether `close` was called, also through a wrapper that shares this optimizer's attributes."""
        return hasattr(self, "_finalizer") and not self._finalizer.alive

    def __enter__(self) -> OffloadOptimizer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Inside -----------------------------------------------------------------------------------------------------

    def _open_engine(self) -> Engine:
        if self._engine is None or self.closed:
            raise ClosedError(f"this {type(self).__name__} was closed; build a new one")
        return self._engine

    def _attach(self, records: list[ParamRecord]) -> None:
        """Train `records` from now on, with the masters that were given and the state that was loaded for them."""
        engine, masters = self._open_engine(), self._masters.of_later(records)
        if self._gates is not None:
            self._gates.require_members(records)
        try:
            add_with_state(
                engine, records, masters, [self.state.get(record.param) or {} for record in records]
            )
            if records:
                self._attach_gates()
            self._publish(records)
        except BaseException:
            # What the engine has by now it keeps; another record would be a second one of the same parameter.
            known = [record for record in records if record.index in engine.records]
            self._registry.set_aside(known)
            if known:
                self._attach_gates()  # its chunks are under way in each step
            raise

    def _attach_gates(self) -> None:
        if self._gates is not None:
            engine = self._open_engine()
            self._gates.attach(engine.chunks, engine.records)

    def _publish(self, records: Iterable[ParamRecord]) -> None:
        """Make ``self.state`` name the current tensors."""
        for record in records:
            self._registry.add(record)
            self.state[record.param] = self._entries.make(record, self._open_engine().views)

    def _follow_groups(self) -> None:
        """What the user did to param groups since the last look; see `ParamRegistry.follow`."""
        outside, back = self._registry.follow(self.param_groups)
        for record in outside:
            self.state.pop(record.param, None)
        self._publish(back)

    def _before_forward(self) -> None:
        engine = self._engine
        if engine is None or engine.flight is not None:  # the gates see to it
            return
        if engine.failed and not engine.alone and torch.is_grad_enabled():
            return  # the others would wait for this rank's shards: step() tells them, and raises
        engine.require_untouched("a forward of the model")


def _listed(params: Params) -> list[Any]:
    """Of a module torch would say that one of the params is a layer, or that it is not iterable."""
    if isinstance(params, torch.nn.Module | torch.Tensor):
        raise ConfigError(
            f"params is a {type(params).__name__}: pass model.named_parameters(), model.parameters() or param groups"
        )
    return list(params)
