"""What all optimizers of this library share: `OffloadOptimizer`, a real `torch.optim.Optimizer` over an engine.

State is built after ``super().__init__()``, which calls ``add_param_group`` before a subclass has any field.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from offload.assembly import assemble
from offload.checkpoint import IncomingState, export_state, read_state, rounds_to
from offload.construction import Construction
from offload.distributed import local_shard
from offload.errors import CheckpointError, ClosedError, ConfigError, ParameterError, StateError
from offload.kernels.rule import KernelRule
from offload.layout import layer_namer
from offload.model_watch import ModelWatch
from offload.options import EARLY_MODES, Options
from offload.parameters import ParamRecord, make_record
from offload.prepare import Masters
from offload.report import StepReport
from offload.saved_groups import read_groups
from offload.schedule.base_step import hooks_set_aside
from offload.schedule.engine import Engine
from offload.schedule.forward_gates import ForwardGates
from offload.schedule.plan import Plan
from offload.state_entry import CopiedEntry, StateEntry
from offload.trace import VARIABLE, Trace

__all__ = ["OffloadOptimizer", "Params"]

logger = logging.getLogger(__name__)

Params = Iterable[Any]

SAVE_HOOKS = ("_optimizer_state_dict_post_hooks",)
LOAD_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


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
        self._model_watch: ModelWatch | None = None
        self._closing = threading.RLock()  # one thread at a time; another finds it done
        try:
            with torch.inference_mode(False), Construction() as self._construction:
                # Not in inference mode: state that is made inside could never be written outside.
                self._build(list(params), defaults, rule, check_group, masters, options)
            self._construction.log(sum(record.numel for record in self._records.values()))
            if model is not None:
                self._model_watch = ModelWatch(model, _weakly(weakref.WeakMethod(self._before_forward)))
                if options.overlap_forward:
                    self._place_gates(model, options)
        except BaseException:
            if hasattr(self, "_finalizer"):  # the engine is there
                self.close()
            raise

    def _build(
        self,
        params: list[Any],
        defaults: dict[str, Any],
        rule: KernelRule,
        check_group: Callable[[Mapping[str, Any]], None],
        masters: Masters | None,
        options: Options,
    ) -> None:
        if not params:
            raise ConfigError(
                "params is empty: pass model.named_parameters(), model.parameters() or param groups"
            )
        self._engine: Engine | None = None
        self._rule, self._check_group = rule, check_group
        torch.optim.Optimizer.__init__(self, params, defaults)
        self._records: dict[torch.Tensor, ParamRecord] = {}
        self._next_key = 0  # of records: param groups may be rearranged by the user
        self._masters = masters
        self._moved_to: set[torch.device] = set()
        records = [record for group in self.param_groups for record in self._make_records(group)]
        if not records:
            raise ConfigError("params has no parameter with requires_grad=True: there is nothing to optimize")
        self._gates: ForwardGates | None = None
        given = self._given_masters(records)
        if masters and not given:
            self._refuse_lost_masters(records)
        engine, self._plan = assemble(rule, records, given, options, self._construction)
        self._engine = engine
        self._finalizer = weakref.finalize(self, engine.close)
        engine.before_first = _weakly(weakref.WeakMethod(self._follow_groups))
        # Copied, so the caller may drop them; those of frozen parameters wait for the day when these are trained.
        self._masters = masters.without([record.param for record in records]) if masters is not None else None
        self._publish(records)

    def _place_gates(self, model: torch.nn.Module, options: Options) -> None:
        engine = self._open_engine()
        if self._plan.mode not in EARLY_MODES:
            logger.info("overlap_forward has nothing to overlap: mode %s updates in step()", self._plan.mode)
            return
        self._gates = ForwardGates(
            model,
            layer_of=layer_namer(options.config.chunk_by),
            flight=lambda: engine.flight,
            land=engine.land,
            switch_off=engine.stop_departing,
            alone=lambda: engine.alone,
        )
        self._gates.attach(engine.chunks, engine.records)

    # The training loop ------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: Any = None) -> Any:
        """Apply the gradients that came since the last step; return what `closure` returned.

        Blocks until state and weights are complete: after it any stream and any thread sees the new weights. With
        ``overlap_forward`` it returns before that, and the next forward waits for each layer's weights.

        Args:
            closure: evaluated first, with gradients enabled, as torch optimizers do.
            grad_scaler: refused; see Raises.

        Raises:
            NoGradientError: no gradient came.
            MidStepError: the last backward pass ended with an exception, or is still running in another thread.
            StateError: a param group was removed since backward.
            ParameterError: a parameter was replaced in the model (``model=`` was given).
            HyperparameterChangedError: a group changed after a part of this step was applied in backward.
            NonFiniteGradientError: with ``nonfinite="raise"``; nothing was changed.
            WorkerError: the worker failed, now or in backward.
            ConfigError: called through a GradScaler.
        """
        engine = self._open_engine()
        if grad_scaler is not None or getattr(self, "grad_scale", None) is not None:  # it sets either
            raise ConfigError(
                "GradScaler is not supported: it scales FP16 gradients, and this optimizer takes BF16 or "
                "FP32 ones, which need none; call loss.backward() and step() directly"
            )
        loss = None
        with torch.inference_mode(False):
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._follow_groups()
            if self._model_watch is not None:
                self._model_watch.require_same(self._members())
            self._adopt_unfrozen()
            engine.step()
            self._follow_moved(engine)
            for record in self._members():
                self.state[record.param]["step"].fill_(record.num_steps)
        return loss

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
                    self._attach(self._make_records(group))
        except BaseException:
            self.param_groups.pop()
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
        engine.begin_trace(Trace(path, device=local_shard(next(iter(self._records))).device))
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
        with hooks_set_aside(self, SAVE_HOOKS):
            state_dict = export_state(super().state_dict())
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = post_hook(self, state_dict) or state_dict
        return state_dict

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
        state_dict = self._prepared_by_hooks(state_dict)
        self._follow_groups()
        incoming = read_state(state_dict, self.param_groups, self._records, self._rule.state_names)
        groups = read_groups(state_dict["param_groups"], self.param_groups, self.defaults, self._check_group)
        engine.begin_loading()
        with hooks_set_aside(self, LOAD_HOOKS):
            super().load_state_dict({"state": {}, "param_groups": groups})
        self._follow_groups()  # loading replaced the dicts
        with torch.inference_mode(False):
            self._take_in(incoming)
            self._publish(self._members())
        self.state.update(incoming.waiting)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

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

    def _make_records(self, group: dict[str, Any]) -> list[ParamRecord]:
        """Records of the group's trainable parameters that have none yet; indices count frozen ones too."""
        names = group.get("param_names") or [None] * len(group["params"])
        indices = {
            p: index for index, p in enumerate(p for each in self.param_groups for p in each["params"])
        }
        records: list[ParamRecord] = []
        made: set[torch.Tensor] = set()
        for name, parameter in zip(names, group["params"], strict=True):
            if parameter.requires_grad and parameter not in self._records:
                if parameter in made:
                    raise ConfigError(
                        f"{name or f'parameter #{indices[parameter]}'} stands twice in one param group"
                    )
                records.append(make_record(self._next_key, name, parameter, group))
                self._next_key += 1
                made.add(parameter)
        return records

    def _refuse_lost_masters(self, records: Iterable[ParamRecord]) -> None:
        """Masters of none of the parameters: of others that come later, or of those that sharding has replaced."""
        if any(isinstance(record.param, DTensor) for record in records):
            raise ConfigError(
                "masters= holds values of none of these parameters: were they replaced after cast_compute_weights "
                "(fully_shard)? Pass model.named_parameters(), so that they are found by name"
            )
        logger.info(
            "masters= holds values of none of these parameters; their masters are taken from the weights"
        )

    def _given_masters(self, records: Iterable[ParamRecord]) -> dict[int, torch.Tensor]:
        if self._masters is None:
            return {}
        return {
            record.index: master
            for record in records
            if (master := self._masters.of(record.param, record.name)) is not None
        }

    def _attach(self, records: list[ParamRecord]) -> None:
        engine, masters = self._open_engine(), self._given_masters(records)
        waiting = [self.state.get(record.param) or {} for record in records]
        for record, state in zip(records, waiting, strict=True):
            if record.index in masters:
                _check_master(record, masters[record.index])
            record.num_steps = int(state.get("step", 0))  # the engine makes rows for this very step
        engine.add(records, masters)
        for record, state in zip(records, waiting, strict=True):
            self._take_waiting(record, state)
        if self._gates is not None and records:
            self._gates.attach(engine.chunks, engine.records)
        self._publish(records)

    def _take_waiting(self, record: ParamRecord, waiting: Mapping[str, torch.Tensor]) -> None:
        """Go on with the state that was loaded while the parameter was frozen; no master over changed weights."""
        engine = self._open_engine()
        if copied := [name for name in engine.views.copied_names if name in waiting]:
            engine.views.write_moments(record, {name: local_shard(waiting[name]) for name in copied})
        for name, view in engine.views.state(record).items():
            if name not in waiting:
                continue
            saved = local_shard(waiting[name])
            is_master = record.kind.weight == "bf16" and rounds_to(saved, local_shard(record.param))
            if name != "master" or is_master:
                local_shard(view).copy_(saved)

    def _adopt_unfrozen(self) -> None:
        """Parameters that were frozen when they came and have a gradient now."""
        for group in self.param_groups:
            fresh = [record for record in self._make_records(group) if record.param.grad is not None]
            if fresh:
                self._attach(fresh)

    def _publish(self, records: Iterable[ParamRecord]) -> None:
        """Make ``self.state`` name the current tensors."""
        for record in records:
            self._records[record.param] = record
            step = torch.tensor(float(record.num_steps), dtype=torch.float32)
            tensors = {"step": step, **self._state_of(record)}
            self.state[record.param] = self._entry(record, tensors)

    def _entry(self, record: ParamRecord, tensors: Mapping[str, torch.Tensor]) -> StateEntry:
        engine = self._open_engine()
        if not engine.views.copied_names:
            return StateEntry(tensors, record.name, self._moved_to)

        def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
            return engine.views.read_moments(record, names)

        return CopiedEntry(tensors, record.name, self._moved_to, copied=engine.views.copied_names, read=read)

    def _follow_moved(self, engine: Engine) -> None:
        """``self.state`` names current tensors also after a step that exchanged them."""
        moved = set(engine.take_moved())
        if not moved:
            return
        for parameter, record in self._records.items():
            if record.index in moved and record.active:  # another's state is published when it is back
                self.state[parameter].exchange(self._state_of(record))

    def _state_of(self, record: ParamRecord) -> dict[str, torch.Tensor]:
        """FP32 state as users see it: an FP32 weight is its own master."""
        state = self._open_engine().views.state(record)
        if record.kind.weight == "fp32":
            state = {name: tensor for name, tensor in state.items() if name != "master"}
        return state

    def _prepared_by_hooks(self, state_dict: Any) -> dict[str, Any]:
        """A shallow copy, as torch hands it to hooks, and what they made of it."""
        if not isinstance(state_dict, Mapping):
            raise CheckpointError(f"this is no optimizer state dict, but a {type(state_dict).__name__}")
        prepared = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            prepared = pre_hook(self, prepared) or prepared
        return prepared

    def _take_in(self, incoming: IncomingState) -> None:
        engine, members = self._open_engine(), self._members()
        for record in members:
            tensors = incoming.tensors[record.index]
            record.num_steps = incoming.steps[record.index]
            engine.views.write_moments(
                record, {name: tensors.get(name) for name in engine.views.copied_names}
            )
            for name, view in engine.views.state(record).items():
                if name in tensors:
                    local_shard(view).copy_(tensors[name])
                elif name != "master":
                    local_shard(view).zero_()
        engine.take_masters([record for record in members if "master" in incoming.tensors[record.index]])

    def _members(self) -> list[ParamRecord]:
        """Parameters that stand in a group."""
        return [record for record in self._records.values() if record.active]

    def _follow_groups(self) -> None:
        """Param groups belong to the user, who may remove, replace and rearrange them between steps.

        A parameter without a group is left alone, as torch does; its state is kept for the day when it is back.
        """
        groups = {parameter: group for group in self.param_groups for parameter in group["params"]}
        for parameter, record in self._records.items():
            group = groups.get(parameter)
            if group is None:
                record.active = False
                self.state.pop(parameter, None)
                continue
            record.group = group
            if not record.active:
                record.active = True
                self._publish([record])

    def _before_forward(self) -> None:
        if self._engine is not None and self._engine.flight is None:  # else the gates see to it
            self._engine.require_untouched("a forward of the model")


def _check_master(record: ParamRecord, master: torch.Tensor) -> None:
    """Ahead of the engine's own check, which comes when memory is allocated already."""
    weight = local_shard(record.param)
    if master.shape != weight.shape or not rounds_to(master, weight):
        raise ParameterError(
            f"masters= of {record.name}, {tuple(master.shape)}, do not round to the model's weights, "
            f"{tuple(weight.shape)}: the weights were changed after cast_compute_weights; cast again, or leave masters "
            "out to start from the weights"
        )


def _weakly(reference: weakref.WeakMethod[Callable[[], None]]) -> Callable[[], None]:
    """Calls the method while its optimizer is alive: hooks and engine must not be what keeps it so."""

    def call() -> None:
        method = reference()
        if method is not None:
            method()

    return call
