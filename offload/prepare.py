"""From an FP32 model to BF16 compute weights and FP32 masters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from offload.config import require_match
from offload.distributed import shard_of
from offload.errors import ConfigError, ParameterError, UnsupportedDtypeError

__all__ = ["Masters", "cast_compute_weights", "was_cast"]

CASTABLE = (torch.float32, torch.bfloat16)
"""Dtypes of parameters: the first is cast, the second is what it is cast to, and left."""


_cast: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameters, none of which it keeps alive


def was_cast(parameter: torch.Tensor) -> bool:
    """Whether `cast_compute_weights` cast this very parameter, so that there are FP32 values of it somewhere."""
    return parameter in _cast


class Masters(Mapping[str, torch.Tensor]):
    """FP32 values of cast parameters on the CPU, by qualified name; hand it to the optimizer as ``masters=``."""

    def __init__(self) -> None:
        self._by_name: dict[str, torch.Tensor] = {}
        self._by_parameter: dict[torch.Tensor, torch.Tensor] = {}

    def add(self, name: str, parameter: torch.Tensor, master: torch.Tensor) -> None:
        """Keep `master` for `parameter`."""
        self._by_name[name] = self._by_parameter[parameter] = master

    def of(self, parameter: torch.Tensor, name: str | None = None) -> torch.Tensor | None:
        """The FP32 values of this rank's part of `parameter`, or None where it was not cast.

        ``fully_shard`` after the cast has replaced the parameters that were cast; then `name` tells which it was.
        """
        master = self._by_parameter.get(parameter)
        if master is None and name in self._by_name:
            master = shard_of(self._by_name[name], parameter)
        return master

    def without(self, parameters: Iterable[torch.Tensor]) -> Masters:
        """The masters of all other parameters."""
        dropped = set(parameters)
        names = {id(master): name for name, master in self._by_name.items()}
        rest = Masters()
        for parameter, master in self._by_parameter.items():
            if parameter not in dropped:
                rest.add(names[id(master)], parameter, master)
        return rest

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)


def cast_compute_weights(
    model: torch.nn.Module,
    dtype: torch.dtype = torch.bfloat16,
    *,
    keep_fp32: str | Callable[[str], bool] | None = None,
) -> Masters:
    """Cast the FP32 parameters of `model` in place and return their FP32 values.

    Parameters stay the same objects, so ties and references stay; buffers and parameters of other dtypes are not
    touched. The masters lie in (pageable) host memory; the optimizer copies them, so they can be dropped afterwards.

    Args:
        model: any module; its FP32 parameters may lie on a GPU.
        dtype: of the compute weights: ``torch.bfloat16``, or ``torch.float32`` to cast nothing.
        keep_fp32: names to be left FP32 (routers, norms): a regular expression that is searched for, or a predicate. Tied
            weights go by the first of their names.

    Raises:
        ConfigError: `dtype` is neither; `keep_fp32` is no regular expression or predicate, or matches no FP32 parameter.
        UnsupportedDtypeError: a parameter is on the meta device, or one that is to be trained is neither FP32 nor BF16.
        ParameterError: a parameter is sharded already.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(f"dtype={dtype}: compute weights are torch.bfloat16 or torch.float32")
    keep = _predicate(keep_fp32)
    masters = Masters()
    if dtype is torch.float32:
        return masters
    _require_castable(model)
    fp32 = {name: p for name, p in model.named_parameters() if p.dtype is torch.float32}
    _require_kept(keep_fp32, list(fp32))
    chosen = {name: p for name, p in fp32.items() if not keep(name)}
    for name, parameter in chosen.items():
        if isinstance(parameter, DTensor):
            raise ParameterError(
                f"{name} is sharded already, and FSDP keeps a reference to its shard: cast the model before fully_shard; "
                "the masters are found by name then (pass model.named_parameters() to the optimizer)"
            )
        if parameter.device.type == "meta":
            raise UnsupportedDtypeError(
                f"{name} is on the meta device: materialize the model before casting it"
            )
    for name, parameter in chosen.items():
        masters.add(name, parameter, parameter.detach().to("cpu", copy=True))
        parameter.data = parameter.data.to(dtype)
        _cast[parameter] = True
    return masters


def _require_castable(model: torch.nn.Module) -> None:
    """An FP16 model would be left as it is, without a word. Frozen parameters may have any dtype."""
    trained = {name: p.dtype for name, p in model.named_parameters() if p.requires_grad}
    other = {name: dtype for name, dtype in trained.items() if dtype not in CASTABLE}
    if other:
        name, dtype = next(iter(other.items()))
        raise UnsupportedDtypeError(
            f"{name} is {dtype}, as {len(other)} of {len(trained)} trained parameters are neither torch.float32 nor "
            "torch.bfloat16: there are no FP32 values of it to keep. Load the model in FP32 (dtype=torch.float32), or "
            "convert it with model.float() first"
        )


def _require_kept(keep_fp32: object, fp32: list[str]) -> None:
    """`fp32`: names of the model's FP32 parameters."""
    if isinstance(keep_fp32, str) and not fp32:
        raise ConfigError(
            f"keep_fp32={keep_fp32!r}: no parameter of the model is FP32, so none can stay so; load the model in FP32 "
            "(dtype=torch.float32), or leave keep_fp32 out"
        )
    require_match("keep_fp32", keep_fp32, fp32, "leave it out where no FP32 parameter is to stay as it is")


def _predicate(keep_fp32: str | Callable[[str], bool] | None) -> Callable[[str], bool]:
    if keep_fp32 is None:
        return lambda name: False
    if callable(keep_fp32):
        return keep_fp32
    if not isinstance(keep_fp32, str):
        raise ConfigError(
            f"keep_fp32={keep_fp32!r} is a {type(keep_fp32).__name__}: expected a regular expression, such as "
            "r'router|norm', a function of a name, or None"
        )
    try:
        pattern = re.compile(keep_fp32)
    except re.error as error:
        raise ConfigError(f"keep_fp32={keep_fp32!r} is no regular expression: {error}") from None
    return lambda name: pattern.search(name) is not None
