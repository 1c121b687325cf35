"""What all optimizers of this library share: `OffloadOptimizer`, a real `torch.optim.Optimizer` over an engine.

State is built after ``super().__init__()``, which calls ``add_param_group`` before a subclass has any field.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from offload.assembly import EARLY_MODES, Options, assemble
from offload.checkpoint import export_state, read_state
from offload.distributed import local_shard
from offload.errors import CheckpointError, ClosedError, ConfigError, StateError
from offload.kernels.rule import KernelRule
from offload.layout import layer_namer
from offload.parameters import ParamRecord, make_record
from offload.prepare import Masters
from offload.report import StepReport
from offload.schedule.engine import Engine
from offload.schedule.forward_gates import ForwardGates
from offload.schedule.plan import Plan

__all__ = ["OffloadOptimizer", "Params"]

logger = logging.getLogger(__name__)

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
            model: whose forward waits for its weights, with ``options.overlap_forward``.
        """
        params = list(params)
        if not params:
            raise ConfigError(
                "params is empty: pass model.named_parameters(), model.parameters() or param groups"
            )
        self._engine: Engine | None = None
        self._rule, self._check_group = rule, check_group
        super().__init__(params, defaults)
        self._records: dict[torch.Tensor, ParamRecord] = {}
        self._next_key = 0  # of records: param groups may be rearranged by the user
        self._masters = masters
        records = [record for group in self.param_groups for record in self._make_records(group)]
        if not records:
            raise ConfigError("params has no parameter with requires_grad=True: there is nothing to optimize")
        self._gates: ForwardGates | None = None
        engine, self._plan = assemble(rule, records, self._given_masters(records), options)
        # Copied, so the caller may drop them; those of frozen parameters wait for the day when these are trained.
        self._masters = masters.without([record.param for record in records]) if masters is not None else None
        self._engine = engine
        self._finalizer = weakref.finalize(self, engine.close)
        self._publish(records)
        if model is not None:
            self._place_gates(model, options)

    def _place_gates(self, model: torch.nn.Module, options: Options) -> None:
        engine = self._open_engine()
        if self._plan.mode not in EARLY_MODES:
            logger.info("overlap_forward has nothing to overlap: mode %s updates in step()", self._plan.mode)
            return
        try:
            self._gates = ForwardGates(
                model,
                layer_of=layer_namer(options.config.chunk_by),
                flight=lambda: engine.flight,
                land=engine.land,
                switch_off=engine.stop_departing,
            )
            self._gates.attach(engine.chunks, engine.records)
        except BaseException:
            self.close()
            raise

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
            MidStepError: the last backward pass ended with an exception.
            HyperparameterChangedError: a group changed after a part of this step was applied in backward.
            NonFiniteGradientError: with ``nonfinite="raise"``; nothing was changed.
            WorkerError: the worker failed, now or in backward.
            ConfigError: called through a GradScaler.
        """
        engine = self._open_engine()
        if grad_scaler is not None:
            raise ConfigError(
                "GradScaler is not supported: it scales FP16 gradients, and this optimizer takes BF16 or "
                "FP32 ones, which need none; call loss.backward() and step() directly"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._adopt_unfrozen()
        engine.step()
        for parameter, record in self._records.items():
            self.state[parameter]["step"].fill_(record.num_steps)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients, also those that have left for the host.

        Raises:
            MidStepError: parts of the step were applied already; see `docs/troubleshooting.md`.
        """
        if self._engine is not None:
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
                self._attach(self._make_records(group))
        except BaseException:
            self.param_groups.pop()
            raise

    # What happened, what is planned -----------------------------------------------------------------------------

    @property
    def last_step(self) -> StepReport | None:
        """What the last step did; None before the first."""
        return self._open_engine().report

    @property
    def plan(self) -> Plan:
        """The chosen mode, its memory, and why; of a hybrid, with chunks where they are stepped by now."""
        return self._plan if self._engine is None else self._plan.as_stepped(self._engine.placements)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that are mapped for state, gradients and rings now."""
        return self._open_engine().host_bytes

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
        ``param.data`` or a detached alias (``param.data.copy_(...)``): call this after those.

        Returns:
            The names of the parameters whose masters were taken anew.
        """
        return self._open_engine().resync()

    # Checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """State in torch's format: CPU clones of ``step``, the moments, and ``master`` where the weight is BF16.

        Raises:
            MidStepError: between a backward that applied parts of a step and ``step()``.
        """
        engine = self._open_engine()
        engine.require_untouched("state_dict()")
        engine.synchronize()
        return export_state(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take state saved by this optimizer or by ``torch.optim.AdamW``; never passes through the device.

        Where a master is missing it is taken from the weight; for BF16 weights, whose lower bits are lost then, with
        a warning. Where masters are there, weights are written anew from them.

        Raises:
            CheckpointError: it does not fit; nothing was changed.
        """
        engine = self._open_engine()
        incoming = read_state(state_dict, self.param_groups, self._records, self._rule.state_names)
        groups = [self._checked_group(saved) for saved in state_dict["param_groups"]]
        engine.begin_loading()
        super().load_state_dict({**state_dict, "param_groups": groups, "state": {}})
        self._rebind_groups()
        for record in self._records.values():
            record.num_steps = incoming.steps[record.index]
            for name, view in engine.state(record).items():
                saved = incoming.tensors[record.index].get(name)
                if saved is not None:
                    local_shard(view).copy_(saved)
                elif name != "master":
                    local_shard(view).zero_()
        engine.take_masters([r for r in self._records.values() if "master" in incoming.tensors[r.index]])
        self._publish(self._records.values())

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
        """Remove hooks, end the worker, release memory; the weights stay as they are. Closing twice is fine."""
        self._engine = None
        if self._gates is not None:
            self._gates.remove()
        if hasattr(self, "_finalizer"):
            self._finalizer()
        self.state.clear()

    def __enter__(self) -> OffloadOptimizer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Inside -----------------------------------------------------------------------------------------------------

    def _open_engine(self) -> Engine:
        if self._engine is None:
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

    def _given_masters(self, records: Iterable[ParamRecord]) -> dict[int, torch.Tensor]:
        if self._masters is None:
            return {}
        return {
            record.index: master
            for record in records
            if (master := self._masters.of(record.param)) is not None
        }

    def _attach(self, records: list[ParamRecord]) -> None:
        engine = self._open_engine()
        engine.add(records, self._given_masters(records))
        if self._gates is not None and records:
            self._gates.attach(engine.chunks, engine.records)
        self._publish(records)

    def _adopt_unfrozen(self) -> None:
        """Parameters that were frozen when they came and have a gradient now."""
        for group in self.param_groups:
            fresh = [record for record in self._make_records(group) if record.param.grad is not None]
            if fresh:
                self._attach(fresh)

    def _publish(self, records: Iterable[ParamRecord]) -> None:
        """Make ``self.state`` name the current tensors."""
        engine = self._open_engine()
        for record in records:
            self._records[record.param] = record
            state = engine.state(record)
            if record.kind.weight == "fp32":
                del state["master"]
            step = torch.tensor(float(record.num_steps), dtype=torch.float32)
            self.state[record.param] = {"step": step, **state}

    def _checked_group(self, saved: dict[str, Any]) -> dict[str, Any]:
        """A loaded group, with defaults for what it lacks."""
        group = {key: saved.get(key, default) for key, default in self.defaults.items()}
        try:
            self._check_group(group)
        except (ConfigError, TypeError, ValueError) as error:
            raise CheckpointError(f"a param group of the state dict cannot be used: {error}") from error
        return {**saved, **group}

    def _rebind_groups(self) -> None:
        """Loading replaced the group dicts."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self._records:
                    self._records[parameter].group = group
