"""`CPUOffloadOptimizer`: any torch optimizer with its state in host memory, stepped on the device a chunk at a time.

It owns no arithmetic and no param groups. The optimizer that it is given keeps both, and its ``step`` does the work; see
`schedule.base_step` for how, and `schedule.state_stream` for how state moves.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from offload import assembly, state_dict_hooks
from offload.checkpoint import check_form
from offload.config import OffloadConfig, check_choice, check_moments
from offload.errors import CheckpointError, ClosedError, MidStepError
from offload.schedule.base_rules import (
    STATE_MODES,
    check_base,
    check_devices,
    common_device,
    is_rehearsal,
    reset_step_counts,
)
from offload.schedule.base_step import BaseStep
from offload.schedule.optimizer_proxy import OptimizerProxy
from offload.schedule.state_buffer import DeviceBuffer
from offload.schedule.state_chunks import CHUNK_BYTES, StateChunk, plan_chunks
from offload.schedule.state_export import attach_saved, clone_state_dict, expect_loaded
from offload.schedule.state_memory import HostMemory
from offload.schedule.state_stream import StateReport, StateStream
from offload.transfer.host import HostTransport
from offload.transfer.transport import Transport

__all__ = ["CPUOffloadOptimizer"]


class CPUOffloadOptimizer(OptimizerProxy):
    """`base` with its state in host memory, pinned where there is a GPU. Its bits are those of `base` alone.

    Use it in the place of `base`: groups, state, hooks, schedulers, closures and state dicts are the base's. `base` itself
    must not be stepped any more.

    Args:
        base: a ``torch.optim.Optimizer``; give it ``named_parameters()``, so that chunks are layers.
        mode: ``"chunked-stream"`` moves the next chunk in and the previous one out while one is stepped,
            ``"chunked-sync"`` does one after the other, without streams; ``"all-at-once"`` moves everything in, steps, and
            moves everything out: for optimizers whose update looks across parameters.
        config: ``chunk_by``, ``tile_numel`` (copies are of 4 times as many bytes), the three budgets and ``timeout_s`` are
            used. A ``device_budget`` makes chunks so small that two of them, of an FP32 AdamW, fit into it, as far as
            whole parameters allow.

    Raises:
        ConfigError: `base` or `mode` cannot be used.
        ParameterError: parameters lie on several devices, or on none.
    """

    def __init__(
        self, base: torch.optim.Optimizer, mode: str = "chunked-stream", config: OffloadConfig | None = None
    ) -> None:
        check_choice("mode", mode, STATE_MODES)
        check_base(base, mode)
        config = config or OffloadConfig()
        check_moments(config, "CPUOffloadOptimizer, which keeps state as its base does", good=False)
        if mode != "all-at-once":  # which has one chunk
            config.check_names(base.param_groups)
        super().__init__(base)
        self.mode = mode
        self._config = config
        self._device = common_device(base.param_groups)
        self._memory = HostMemory(self._device, self._config)
        ahead = mode == "chunked-stream"
        self._transport: Transport = (
            assembly.make_transport(self._device, self._config) if ahead else HostTransport(self._device)
        )
        self._buffer = DeviceBuffer(self._transport, two_ended=ahead, piece_bytes=4 * self._config.tile_numel)
        self._stream = StateStream(self._buffer, self._memory, ahead=ahead, keep_buffer=mode != "all-at-once")
        self._finalizer = weakref.finalize(self, _close, self._transport, self._memory)
        self._chunks: list[StateChunk] = []
        self._refusal: str | None = None
        self._rehearsed = False
        self._report: StateReport | None = None
        self._num_steps = 0
        self._follow_groups()

    # The training loop ------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Step the base, chunk by chunk; return what `closure` returned. On return all state is on the host.

        The base's own step hooks run once, before the first chunk and after the last one.

        Args:
            closure: evaluated once, before the first chunk, with gradients enabled.
            kwargs: handed to the base's ``step``.

        Raises:
            MidStepError: the base or a copy failed when some parameters had been stepped already. Load a state dict to go
                on. Any other error left weights and state as they were.
        """
        self._require_usable("step()")
        base = self.base_optimizer
        args: tuple[Any, ...] = (base,) if closure is None else (base, closure)
        for pre_hook in base._optimizer_step_pre_hooks.values():
            args, kwargs = pre_hook(base, args, kwargs) or (args, kwargs)
        closure = args[1] if len(args) > 1 else kwargs.pop("closure", None)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        started = time.perf_counter()
        self._step_chunks(kwargs)
        base._opt_called = True  # type: ignore[attr-defined]  # what schedulers built on the base look at
        self._note(time.perf_counter() - started)
        for post_hook in base._optimizer_step_post_hooks.values():
            post_hook(base, args, kwargs)
        return loss

    def _step_chunks(self, kwargs: dict[str, Any]) -> None:
        self._follow_groups()
        fresh = self._rehearsed or not self.state
        rehearse = fresh and is_rehearsal(self.param_groups)
        if self._rehearsed and not rehearse:
            self._forget_state()
        running = self._running = BaseStep(self.base_optimizer, kwargs, rehearse=rehearse)
        try:
            with running:
                self._stream.step(self._chunks, running)
                if not rehearse:
                    running.commit()
        except BaseException as error:
            if self._stream.progress.untouched:
                raise
            self._refusal = self._describe(error)
            if isinstance(error, Exception):
                raise MidStepError(self._refusal) from error
            raise
        finally:
            self._running = None
        self._rehearsed = rehearse
        if rehearse:
            reset_step_counts(self.state.values())

    def _forget_state(self) -> None:
        self._rehearsed = False
        for chunk in self._chunks:
            chunk.release()
            for param in chunk.params:
                self.state.pop(param, None)

    def _describe(self, error: BaseException) -> str:
        progress = self._stream.progress
        return (
            f"{type(self.base_optimizer).__name__} failed at chunk {progress.current!r} ({type(error).__name__}: {error}), "
            f"{len(progress.stepped)} of {len(self._chunks)} chunks were stepped: weights and state are part old, part new, "
            "and not to be used. Load a checkpoint into the model and, with load_state_dict, into this optimizer"
        )

    def _note(self, seconds: float) -> None:
        self._num_steps += 1
        moved = self._buffer.bytes_in, self._buffer.bytes_out
        self._report = StateReport(self._num_steps, self.mode, len(self._chunks), *moved, seconds)

    # What happened, and what it takes ---------------------------------------------------------------------------

    @property
    def last_step(self) -> StateReport | None:
        """Chunks, bytes moved and seconds of the last step; None before the first."""
        return self._report

    @property
    def chunks(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """Parameters by chunk, in the order in which they are stepped."""
        self._follow_groups()
        return {chunk.name: chunk.params for chunk in self._chunks}

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that are mapped for state."""
        return self._memory.num_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that are held between steps."""
        return self._buffer.num_bytes

    # Checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The base's state dict with clones on the host: complete, and nothing changes it later.

        Raises:
            MidStepError: the last step failed half-way.
        """
        self._require_usable("state_dict()")
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = clone_state_dict(self.base_optimizer.state_dict())
        return state_dict_hooks.after_saving(state_dict, self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state dict of this optimizer or of the base alone, saved on any device. Dtypes stay, nothing moves to the
        device; after a step that failed half-way, the optimizer can be used again.

        Raises:
            CheckpointError: it does not fit; nothing was changed.
        """
        self._require_open()
        base = self.base_optimizer
        state_dict = state_dict_hooks.before_loading(state_dict, self, base)
        check_form(state_dict)
        self._follow_groups()
        with state_dict_hooks.set_aside_for_loading(base):
            try:
                base.load_state_dict({**state_dict, "state": {}})
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(
                    f"the state dict does not fit this {type(base).__name__}: {error}"
                ) from error
        self._refusal = "loading a state dict failed half-way; load one again"
        base.state.update(attach_saved(state_dict, self.param_groups))
        base.__setstate__(
            {"state": base.state, "param_groups": base.param_groups}
        )  # brings old formats up to date
        for chunk in self._chunks:
            expect_loaded(chunk, base.state, self.param_groups)
        self._stream.take_in(self._chunks, base.state)
        self._refusal, self._rehearsed = None, False
        state_dict_hooks.after_loading(base, self)

    def __repr__(self) -> str:
        return f"CPUOffloadOptimizer ({self.mode}) of {self.base_optimizer!r}"

    # Life -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back host and device memory. The base's state stays readable, on the host. Closing twice is fine."""
        if self._finalizer.alive:
            self._stream.release(self._chunks)
            self._chunks.clear()
            self._finalizer()

    def __enter__(self) -> CPUOffloadOptimizer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Inside -----------------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise ClosedError("this CPUOffloadOptimizer was closed; build a new one")

    def _require_usable(self, what: str) -> None:
        self._require_open()
        if self._refusal is not None:
            raise MidStepError(f"{what} refused: {self._refusal}")

    def _follow_groups(self) -> None:
        """Plan chunks anew where the groups have other parameters than before; what has state keeps it."""
        base = self.base_optimizer
        params = list(dict.fromkeys(chain.from_iterable(group["params"] for group in base.param_groups)))
        check_devices(params, self._device)
        old = {tuple(map(id, chunk.params)): chunk for chunk in self._chunks}
        if {id(param) for param in params} == {identity for identities in old for identity in identities}:
            return
        plan = plan_chunks(
            base.param_groups,
            whole=self.mode == "all-at-once",
            chunk_by=self._config.chunk_by,
            max_bytes=_chunk_bytes(self._config.device_budget),
        )
        paths = {param: found for chunk in self._chunks for param, found in chunk.paths.items()}
        self._chunks = []
        for name, members in plan:
            chunk = old.pop(tuple(map(id, members)), None) or StateChunk(name, members, self._device)
            chunk.paths = {param: paths[param] for param in members if param in paths}
            self._chunks.append(chunk)
        self._stream.take_in(self._chunks, base.state)
        for replaced in old.values():
            replaced.release()


def _chunk_bytes(device_budget: int | None) -> int:
    """Two chunks on the device, each with AdamW's two moments of the parameter's size."""
    return CHUNK_BYTES if device_budget is None else max(min(CHUNK_BYTES, device_budget // 4), 1)


def _close(transport: Transport, memory: HostMemory) -> None:
    transport.close()
    memory.close()
