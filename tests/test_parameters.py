"""Parameters and gradients of any dense strides are flat ranges; what is not is refused by name, with the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import GradientError, ParameterError, UnsupportedDtypeError
from offload.parameters import ParamRecord, flat_view, make_record

SHAPE = (2, 3, 4, 5)


def arange(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "contiguous": lambda: arange(*SHAPE),
    "transposed": lambda: arange(5, 3, 4, 2).transpose(0, 3),
    "channels-last": lambda: arange(*SHAPE).contiguous(memory_format=torch.channels_last),
    "reversed": lambda: arange(*SHAPE[::-1]).permute(3, 2, 1, 0),
    "slice of a larger one": lambda: arange(7, *SHAPE)[3],
    "transposed slice": lambda: arange(7, 5, 3, 4, 2)[3].transpose(0, 3),
}
SMALL = {
    "0-dim": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 3),
    "empty, transposed": lambda: torch.empty(3, 0, 2).transpose(0, 2),
    "sizes of 1": lambda: arange(1, 4, 1).transpose(0, 2),
    "size 1 with any stride": lambda: torch.as_strided(arange(4), (1, 4), (77, 1)),
    "transposed, size 1 with any stride": lambda: torch.as_strided(arange(12), (1, 4, 3), (77, 1, 4)),
    "column": lambda: arange(1, 4).t(),
}


def record_of(
    values: torch.Tensor, dtype: torch.dtype = torch.float32, name: str | None = "layer.weight"
) -> ParamRecord:
    data = torch.empty_strided(values.shape, values.stride(), dtype=dtype).copy_(values)
    return make_record(0, name, torch.nn.Parameter(data), {})


@pytest.mark.parametrize("make", [*LAYOUTS.values(), *SMALL.values()], ids=[*LAYOUTS, *SMALL])
def test_weight_is_a_flat_view_and_shaped_is_its_inverse(make: Callable[[], torch.Tensor]) -> None:
    parameter = torch.nn.Parameter(make())
    record = make_record(0, "w", parameter, {})
    flat = record.weight()
    assert flat.shape == (record.numel,) == (parameter.numel(),)
    assert flat.data_ptr() == parameter.data_ptr()
    state = torch.zeros(100 + record.numel)[100:]
    state.copy_(flat)
    shaped = record.shaped(state)
    assert shaped.data_ptr() == state.data_ptr()
    assert shaped.stride() == parameter.stride()
    assert torch.equal(shaped, parameter)


@pytest.mark.parametrize("gradient", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("weight", LAYOUTS.values(), ids=LAYOUTS)
def test_a_gradient_of_other_strides_meets_its_weight_elementwise(
    weight: Callable[[], torch.Tensor], gradient: Callable[[], torch.Tensor]
) -> None:
    record, values = record_of(weight()), gradient()
    before = values.clone()
    flat = record.flat_gradient(values)
    assert torch.equal(record.shaped(flat), values)
    assert torch.equal(values, before)
    assert (flat.data_ptr() == values.data_ptr()) == (values.stride() == record.param.stride())


@given(st.permutations(range(4)), st.permutations(range(4)), st.tuples(*[st.integers(0, 3)] * 4))
def test_any_permutation_of_any_shape(weight: list[int], gradient: list[int], sizes: tuple[int, ...]) -> None:
    def permuted(order: list[int]) -> torch.Tensor:
        inverse = [order.index(axis) for axis in range(4)]
        return arange(*(sizes[axis] for axis in order)).permute(inverse)

    record, values = record_of(permuted(weight)), permuted(gradient)
    assert record.param.shape == values.shape == sizes
    assert torch.equal(record.shaped(record.flat_gradient(values)), values)


@pytest.mark.parametrize(
    "gradient",
    [torch.ones(()).expand(4, 3), arange(3).expand(4, 3), arange(4, 6)[:, ::2], arange(8, 3)[::2]],
    ids=["scalar expanded", "row expanded", "every second column", "every second row"],
)
def test_a_gradient_with_gaps_or_overlap_is_copied(gradient: torch.Tensor) -> None:
    for weight in (arange(4, 3), arange(3, 4).t()):
        record = record_of(weight)
        assert torch.equal(record.shaped(record.flat_gradient(gradient)), gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kinds(dtype: torch.dtype) -> None:
    record = record_of(arange(2, 3), dtype)
    name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    assert (record.kind.grad, record.kind.weight) == (name, name)
    assert (record.spec.index, record.spec.name, record.spec.numel) == (0, "layer.weight", 6)


# Refused parameters


def parameter(**options: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(2, 3, **options))


@pytest.mark.parametrize("name", ["layer.weight", None])
@pytest.mark.parametrize(
    ("refused", "error", "remedy"),
    [
        (parameter(dtype=torch.float16), UnsupportedDtypeError, "torch.float16.*cast_compute_weights"),
        (parameter(dtype=torch.float64), UnsupportedDtypeError, "torch.float64.*cast_compute_weights"),
        (parameter(dtype=torch.complex64), UnsupportedDtypeError, "torch.complex64.*convert"),
        (parameter(device="meta"), UnsupportedDtypeError, "meta device.*to_empty"),
        (
            torch.nn.Parameter(torch.eye(2).to_sparse(), requires_grad=False),
            UnsupportedDtypeError,
            "sparse.*to_dense",
        ),
        (torch.nn.Parameter(arange(4, 6)[:, ::2]), ParameterError, r"gaps.*clone\(\)"),
        (torch.nn.Parameter(torch.ones(()).expand(2, 3)), ParameterError, r"overlap.*clone\(\)"),
        (torch.nn.Parameter(arange(9).as_strided((2, 3), (1, 1))), ParameterError, r"overlap.*clone\(\)"),
    ],
    ids=["fp16", "fp64", "complex", "meta", "sparse", "gapped", "expanded", "overlapping"],
)
def test_refusals_name_the_parameter_and_the_remedy(
    refused: torch.nn.Parameter, error: type[Exception], remedy: str, name: str | None
) -> None:
    with pytest.raises(error, match=remedy) as caught:
        make_record(7, name, refused, {})
    assert (name or "parameter #7") in str(caught.value)


# Refused gradients


@pytest.mark.parametrize(
    ("gradient", "words"),
    [
        (torch.zeros(2, 3, dtype=torch.float16), "torch.float16, expected bf16"),
        (torch.zeros(2, 3), "torch.float32, expected bf16"),
        (torch.zeros(2, 3, dtype=torch.complex64), "torch.complex64"),
        (torch.zeros(2, 3, dtype=torch.bfloat16).to_sparse(), "sparse=False"),
        (torch.zeros(3, 2, dtype=torch.bfloat16), r"\(3, 2\).*\(2, 3\).*replaced"),
        (torch.zeros(6, dtype=torch.bfloat16), r"\(6,\)"),
        (torch.zeros(2, 3, dtype=torch.bfloat16, device="meta"), "meta"),
    ],
)
def test_a_wrong_gradient_is_refused_by_name(gradient: torch.Tensor, words: str) -> None:
    with pytest.raises(GradientError, match=f"layer.weight: .*{words}"):
        record_of(torch.ones(2, 3), torch.bfloat16).flat_gradient(gradient)


def test_flat_view_refuses_gaps() -> None:
    with pytest.raises(ParameterError, match=r"layer\.weight"):
        flat_view(arange(4, 6)[:, ::2], "layer.weight")


# Changed weights


def replace_data(p: torch.Tensor) -> None:
    p.data = torch.zeros_like(p)


def copy_in_place(p: torch.Tensor) -> None:
    with torch.no_grad():
        p.copy_(torch.zeros_like(p))


def increment_version(p: torch.Tensor) -> None:
    torch.autograd.graph.increment_version(p)


@pytest.mark.parametrize(
    ("write", "seen"),
    [(replace_data, True), (copy_in_place, True), (increment_version, True), (lambda p: p.sum(), False)],
    ids=["data replaced", "copy_", "version", "read only"],
)
def test_written_weights_are_seen(write: Callable[[torch.Tensor], Any], seen: bool) -> None:
    record = record_of(arange(2, 3))
    record.note_weight()
    write(record.param)
    assert record.weight_changed() == seen
    record.note_weight()
    assert not record.weight_changed()


def test_a_new_record_has_seen_nothing() -> None:
    assert record_of(arange(2, 3)).weight_changed()
