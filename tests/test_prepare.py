"""FP32 model → BF16 weights and FP32 masters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload import AdamW, cast_compute_weights
from offload.errors import ConfigError, UnsupportedDtypeError
from offload.parameters import make_record


class Model(torch.nn.Module):
    """A tie, a norm, a router, buffers, a BF16 and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.router = torch.nn.Linear(4, 2)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.old = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)


def dtypes(model: torch.nn.Module) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "keep_fp32", [r"router|norm", r"^(router|norm)\.", lambda name: name.split(".")[0] in {"router", "norm"}]
)
def test_cast_keeps_values_names_and_what_it_was_told_to(keep_fp32: object) -> None:
    model = Model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    masters = cast_compute_weights(model, keep_fp32=keep_fp32)  # type: ignore[arg-type]
    assert set(masters) == {"embed.weight", "frozen"}
    assert len(masters) == 2
    for name, parameter in model.named_parameters():
        if name in masters:
            assert masters[name].dtype is torch.float32
            assert torch.equal(masters[name], before[name])
            assert torch.equal(parameter, before[name].bfloat16())
            assert masters.of(parameter) is masters[name]
        else:
            assert parameter.dtype is before[name].dtype
            assert torch.equal(parameter, before[name])
            assert masters.of(parameter) is None


def test_everything_is_cast_without_keep() -> None:
    model = Model()
    cast_compute_weights(model)
    assert set(dtypes(model).values()) == {torch.bfloat16}


def test_objects_ties_and_buffers_stay() -> None:
    model = Model()
    objects = {name: id(parameter) for name, parameter in model.named_parameters()}
    cast_compute_weights(model)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == objects
    assert model.head.weight is model.embed.weight
    assert not model.frozen.requires_grad
    assert {name: buffer.dtype for name, buffer in model.named_buffers()} == {
        "norm.running_mean": torch.float32,
        "norm.running_var": torch.float32,
        "norm.num_batches_tracked": torch.int64,
    }


def test_a_tied_weight_has_one_master() -> None:
    model = Model()
    masters = cast_compute_weights(model)
    assert "head.weight" not in masters
    assert masters.of(model.head.weight) is masters["embed.weight"]


def test_masters_share_no_memory_with_the_weights() -> None:
    model = Model()
    data = model.embed.weight.data
    masters = cast_compute_weights(model)
    data.zero_()
    model.embed.weight.data.zero_()
    assert masters["embed.weight"].abs().sum() > 0


def test_strides_are_kept() -> None:
    conv = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    strides = conv.weight.stride()
    masters = cast_compute_weights(conv)
    assert conv.weight.stride() == masters["weight"].stride() == strides


def test_cast_parameters_train_in_bf16() -> None:
    """The model runs, gradients come in BF16, and the optimizer's record of the parameter is BF16 too."""
    model = torch.nn.Linear(4, 2)
    model(torch.ones(1, 4)).sum().backward()
    model.zero_grad()
    cast_compute_weights(model)
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.grad is not None
    assert model.weight.grad.dtype is torch.bfloat16
    assert make_record(0, "w", model.weight, {}).kind.grad == "bf16"


def test_float32_casts_nothing() -> None:
    model = Model()
    before = dtypes(model)
    assert len(cast_compute_weights(model, torch.float32)) == 0
    assert dtypes(model) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int8])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=str(dtype)):
        cast_compute_weights(Model(), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bad_expression_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"keep_fp32='\('"):
        cast_compute_weights(Model(), dtype, keep_fp32="(")


@pytest.mark.parametrize("keep_fp32", [["router", "norm"], {"norm"}, 1])
def test_what_is_neither_expression_nor_predicate_is_refused(keep_fp32: Any) -> None:
    model = Model()
    before = dtypes(model)
    with pytest.raises(ConfigError, match=r"keep_fp32=.* is a (list|set|int): expected a regular expression"):
        cast_compute_weights(model, keep_fp32=keep_fp32)
    assert dtypes(model) == before


@pytest.mark.parametrize("pattern", ["ruoter", "^norm$", r"\.old", "running_mean"])
def test_an_expression_that_keeps_nothing_is_refused(pattern: str) -> None:
    """All of the model was cast, and nothing said so."""
    model = Model()
    before = dtypes(model)
    with pytest.raises(
        ConfigError,
        match=r"keep_fp32=.* matches none of the 6 names \(frozen, embed\.weight, norm\.bias, router\.weight and 2 more\)",
    ) as raised:
        cast_compute_weights(model, keep_fp32=pattern)
    assert repr(pattern) in str(raised.value)
    assert dtypes(model) == before


def test_nothing_of_a_bf16_model_can_be_kept() -> None:
    model = torch.nn.Linear(4, 2).bfloat16()
    with pytest.raises(ConfigError, match=r"keep_fp32='weight': no parameter of the model is FP32"):
        cast_compute_weights(model, keep_fp32="weight")
    assert len(cast_compute_weights(model)) == 0


def test_a_predicate_may_keep_nothing() -> None:
    assert len(cast_compute_weights(Model(), keep_fp32=lambda name: False)) == 6


@pytest.mark.parametrize("keep_fp32", [None, lambda name: 1 // (name != "router.weight") > 1])
def test_a_failure_leaves_the_model_as_it_was(keep_fp32: object) -> None:
    """A meta parameter, or a predicate that raises, after others that could be cast."""
    model = Model()
    if keep_fp32 is None:
        model.router.to("meta")
    before = dtypes(model)
    with pytest.raises((UnsupportedDtypeError, ZeroDivisionError)):
        cast_compute_weights(model, keep_fp32=keep_fp32)  # type: ignore[arg-type]
    assert dtypes(model) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_model_of_another_dtype_is_refused(dtype: torch.dtype) -> None:
    """It was left as it is, and nothing said so before the optimizer refused it, if it did."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).to(dtype))
    with pytest.raises(UnsupportedDtypeError, match=rf"^1\.weight is {dtype}, as 2 of 4 .* model\.float\(\)"):
        cast_compute_weights(model)
    assert model[0].weight.dtype is torch.float32
    model[1].requires_grad_(False)
    assert set(cast_compute_weights(model)) == {"0.weight", "0.bias"}
    assert model[1].weight.dtype is dtype


def test_a_meta_parameter_is_named() -> None:
    with pytest.raises(UnsupportedDtypeError, match="weight is on the meta device"):
        cast_compute_weights(torch.nn.Linear(2, 2, device="meta"))


@pytest.mark.parametrize("passes_masters", [True, False])
def test_masters_that_were_forgotten_are_warned_of(
    passes_masters: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = torch.nn.Linear(8, 8)
    masters = cast_compute_weights(model)
    with AdamW(
        model.named_parameters(),
        masters=masters if passes_masters else None,
        backend="torch",
        mode="wavefront",
    ):
        pass
    assert ("masters= was left out, though cast_compute_weights has cast 2" in caplog.text) != passes_masters


def test_a_model_that_was_bf16_from_the_start_needs_no_masters(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Linear(8, 8).bfloat16()
    cast_compute_weights(model)  # casts nothing
    with AdamW(model.named_parameters(), backend="torch", mode="wavefront"):
        pass
    assert "masters=" not in caplog.text
