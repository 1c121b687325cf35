"""What the optimizer knows of each parameter: `ParamRecord`, checked at construction.

State and transfers treat a parameter as a flat range in *memory order*: the 1-D view of its storage, whatever its
strides (transposed weights, channels-last convolutions). So the parameter must be dense: no gaps, no overlap.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from offload.distributed import awaited, local_shard, peek_shard, shard_like
from offload.errors import GradientError, ParameterError, UnsupportedDtypeError
from offload.layout import Kind, ParamSpec
from offload.sources import Source, make_source
from offload.streams import note_read

__all__ = ["DTYPE_NAMES", "ParamRecord", "flat_view", "make_record", "require_in_modules"]

DTYPE_NAMES: Mapping[torch.dtype, str] = {torch.bfloat16: "bf16", torch.float32: "fp32"}
"""Dtypes of weights and gradients that the kernels read and write."""


@dataclass(eq=False)
class ParamRecord:
    """A trainable parameter, its dtype kind, and the version of its weight that the master agrees with."""

    index: int
    name: str
    has_name: bool
    param: torch.Tensor
    group: dict[str, Any]
    kind: Kind
    source: Source
    num_steps: int = 0
    form: tuple[Any, ...] = ()
    active: bool = True
    """Whether it stands in a param group. One whose group was removed keeps its state, and is left alone."""
    seen: tuple[int, int, int] = (0, 0, 0)

    @property
    def numel(self) -> int:
        """Elements of the local shard."""
        return peek_shard(self.param).numel()

    @property
    def spec(self) -> ParamSpec:
        """The parameter as the layout sees it."""
        return ParamSpec(self.index, self.name if self.has_name else None, self.numel, self.kind)

    def weight(self) -> torch.Tensor:
        """The compute weight as a 1-D view in memory order. Writes to it leave the parameter's version alone: `note_write`.

        Raises:
            ParameterError: it is not what it was when the optimizer was built.
        """
        self.require_form()
        return flat_view(peek_shard(self.param).data, self.name)

    def require_form(self) -> None:
        """Raise where the weight was converted, resized or freed: its state no longer fits.

        Raises:
            ParameterError: with what it was and what it is.
        """
        form = _form(peek_shard(self.param))
        if form != self.form:
            raise ParameterError(
                f"{self.name} was {_describe(self.form)} when the optimizer was built and is {_describe(form)} now; "
                "its state no longer fits. Convert or resize the model first, then build the optimizer"
            )

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """A view of the flat range `flat` with the parameter's shape, strides and sharding."""
        return shard_like(self.param, self.local(flat))

    def local(self, flat: torch.Tensor) -> torch.Tensor:
        """A view of the flat range `flat` with the shape and strides of the parameter's local shard."""
        shard = local_shard(self.param)
        return flat.as_strided(shard.shape, shard.stride())

    def flat_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """`gradient` as a 1-D tensor in the parameter's memory order; copied only where its strides differ.

        Raises:
            GradientError: its dtype, layout, device or shape is not what the parameter's weight calls for.
        """
        local, weight = awaited(peek_shard(gradient)), peek_shard(self.param)
        self._check_gradient(local, weight)
        if local.stride() != weight.stride() or not _is_dense(local):
            copy = torch.empty_strided(weight.shape, weight.stride(), dtype=local.dtype, device=local.device)
            copy.copy_(local.detach())
            note_read(local)
            local = copy
        return flat_view(local.detach() if local.requires_grad else local, self.name)

    def note_weight(self) -> None:
        """Remember the weight as it is now: masters agree with it."""
        self.seen = self._fingerprint()

    def note_write(self) -> None:
        """We are about to write the weight, or a part of it: autograd is told; and so are we, unless somebody else has
        written since.
        """
        is_ours = not self.weight_changed()
        torch.autograd.graph.increment_version(self.param)
        if is_ours:
            self.note_weight()

    def weight_changed(self) -> bool:
        """Whether the weight was written or replaced since `note_weight`, as far as torch shows it."""
        return self.seen != self._fingerprint()

    def _fingerprint(self) -> tuple[int, int, int]:
        local = peek_shard(self.param)  # of a DTensor, which has a version of its own
        return self.param._version, local._version, local.data_ptr()

    def _check_gradient(self, gradient: torch.Tensor, weight: torch.Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise GradientError(
                f"{self.name}: its gradient is {gradient.layout}; sparse gradients are not supported "
                "(build the embedding with sparse=False)"
            )
        if DTYPE_NAMES.get(gradient.dtype) != self.kind.grad:
            raise GradientError(
                f"{self.name}: its gradient is {gradient.dtype}, expected {self.kind.grad} as for "
                f"its {weight.dtype} weight"
            )
        if gradient.device != weight.device or gradient.shape != weight.shape:
            raise GradientError(
                f"{self.name}: its gradient is {tuple(gradient.shape)} on {gradient.device}, its "
                f"weight {tuple(weight.shape)} on {weight.device}; was the parameter replaced after "
                "the optimizer was built? Build the optimizer after fully_shard or prepare()"
            )


def make_record(index: int, name: str | None, param: torch.Tensor, group: dict[str, Any]) -> ParamRecord:
    """Check `param` and describe it.

    Args:
        index: its position among all parameters of the optimizer.
        name: its qualified name, or None where the user gave none; messages then say ``parameter #index``.
        param: a BF16 or FP32 leaf, on a device with memory.
        group: its param group.

    Raises:
        UnsupportedDtypeError: FP16, FP64, complex, sparse or meta.
        ParameterError: not dense in memory.
    """
    label = name if name is not None else f"parameter #{index}"
    if is_lazy(param):
        raise UnsupportedDtypeError(
            f"{label} is lazy and has no data yet; run the model once before the optimizer is built"
        )
    local = local_shard(param)
    if local.layout is not torch.strided:
        raise UnsupportedDtypeError(
            f"{label} is {local.layout}; only dense parameters are supported (use to_dense())"
        )
    if local.device.type == "meta":
        raise UnsupportedDtypeError(
            f"{label} is on the meta device and has no data; materialize the model "
            "(to_empty() and an initialization) before the optimizer is built"
        )
    if local.dtype not in DTYPE_NAMES:
        raise UnsupportedDtypeError(
            f"{label} is {local.dtype}; supported are torch.bfloat16 and torch.float32 (convert "
            "the model, or use offload.cast_compute_weights on an FP32 model)"
        )
    if local.is_inference():
        raise ParameterError(
            f"{label} was made under torch.inference_mode() and can never be trained; make the model outside of it, or "
            "clone its parameters there"
        )
    if not _is_dense(local):
        raise ParameterError(
            f"{label} has shape {tuple(local.shape)} and strides {local.stride()}, which leave gaps or "
            "overlap in memory; make it a parameter of its own with param.data = param.data.clone()"
        )
    weight = DTYPE_NAMES[local.dtype]
    gradient = DTYPE_NAMES.get(getattr(param, "grad_dtype", None) or local.dtype)
    if gradient is None:
        raise UnsupportedDtypeError(
            f"{label} has grad_dtype {param.grad_dtype}; supported are torch.bfloat16 and torch.float32"
        )
    return ParamRecord(
        index,
        label,
        name is not None,
        param,
        group,
        Kind(gradient, weight),
        make_source(param, label),
        form=_form(local),
    )


def require_in_modules(records: Sequence[ParamRecord]) -> None:
    """For parameters that got no gradient in the first step: raise where no module holds them any more.

    ``fully_shard`` and other wrappers replace the parameters of a module; an optimizer built before them would hold
    tensors that nobody trains. Only named parameters are known to have come from a module.

    Raises:
        ParameterError: naming the first of them.
    """
    named = {id(record.param): record for record in records if record.has_name}
    if not named:
        return
    for holder in gc.get_referrers(*(record.param for record in named.values())):
        if isinstance(holder, dict):  # the _parameters of a module, or a dict of the user's
            for value in holder.values():
                named.pop(id(value), None)
    if named:
        first = next(iter(named.values()))
        raise ParameterError(
            f"{len(named)} parameter(s) got no gradient and are in no module any more ({first.name} ...): they were "
            "replaced after the optimizer was built. Build the optimizer after fully_shard, replicate or prepare()"
        )


def flat_view(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A dense tensor's memory as a 1-D view.

    Raises:
        ParameterError: the tensor is not dense (any more).
    """
    if tensor.is_contiguous():
        return tensor.view(-1)
    if not _is_dense(tensor):
        raise ParameterError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}: not dense in memory"
        )
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _form(local: torch.Tensor) -> tuple[Any, ...]:
    """What the order of elements in memory depends on, and what copies rely on."""
    return tuple(local.shape), local.stride(), local.dtype, local.device


def _describe(form: tuple[Any, ...]) -> str:
    shape, stride, dtype, device = form
    return f"{dtype} {shape} with strides {stride} on {device}"


def _is_dense(tensor: torch.Tensor) -> bool:
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(
        (st, sz) for st, sz in zip(tensor.stride(), tensor.shape, strict=True) if sz > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True
