"""State dicts: exports are copies, bad ones are refused and change nothing."""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import offload
from offload.checkpoint import export_state, read_state
from offload.errors import CheckpointError
from offload.parameters import ParamRecord, make_record

MOMENTS = ("exp_avg", "exp_avg_sq")
SHAPES = [(4, 3), (2,), ()]
StateDict = dict[str, Any]


def records_of(dtype: torch.dtype = torch.bfloat16) -> dict[torch.Tensor, ParamRecord]:
    parameters = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]
    return {p: make_record(i, f"p{i}", p, {}) for i, p in enumerate(parameters)}


def saved(dtype: torch.dtype = torch.float32, *, step: Any = 5, master: bool = True) -> StateDict:
    """A state dict of parameters of `SHAPES`."""
    names = (*MOMENTS, *(["master"] if master else []))
    state = {
        i: {"step": step} | {name: torch.rand(shape).to(dtype) for name in names}
        for i, shape in enumerate(SHAPES)
    }
    return {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": [2]}]}


def groups_of(records: dict[torch.Tensor, ParamRecord]) -> list[dict[str, Any]]:
    """As in `saved`."""
    first, second, third = records
    return [{"params": [first, second]}, {"params": [third]}]


def read(state_dict: Any, records: dict[torch.Tensor, ParamRecord] | None = None) -> Any:
    records = records or records_of()
    return read_state(state_dict, groups_of(records), records, MOMENTS)


# Export


def test_export_is_a_copy_of_its_own() -> None:
    """Views of a slab come out as tensors that neither change with it nor hold it; also hyperparameters."""
    slab, lr = torch.arange(1000.0), torch.tensor(0.1)
    view = slab[10:16].as_strided((2, 3), (1, 2), 10)
    exported = export_state(
        {
            "state": {0: {"step": 3, "exp_avg": view}},
            "param_groups": [{"lr": lr, "betas": (0.9, 0.99), "params": [0]}],
        }
    )
    expected = view.clone()
    slab.zero_()
    lr.fill_(7.0)
    tensor = exported["state"][0]["exp_avg"]
    assert torch.equal(tensor, expected)
    assert tensor.untyped_storage().nbytes() == 4 * 6
    assert exported["state"][0]["step"] == 3
    assert exported["param_groups"] == [{"lr": torch.tensor(0.1), "betas": (0.9, 0.99), "params": [0]}]


def test_export_changes_nothing_of_the_original() -> None:
    original = saved()
    keys = {key: id(value) for key, value in original["state"][0].items()}
    export_state(original)["state"][0].clear()
    assert {key: id(value) for key, value in original["state"][0].items()} == keys


# What is taken in


@pytest.mark.parametrize("step", [7, 7.0, torch.tensor(7.0), torch.tensor([7])])
def test_steps_of_any_form(step: Any) -> None:
    assert read(saved(step=step)).steps == {0: 7, 1: 7, 2: 7}


def test_tensors_are_taken_by_position() -> None:
    """Saved ids are labels; the order of the groups counts."""
    state_dict = saved()
    renamed = {
        "state": {10 + i: entry for i, entry in state_dict["state"].items()},
        "param_groups": [{"params": [10, 11]}, {"params": [12]}],
    }
    incoming = read(renamed)
    for i in range(3):
        assert set(incoming.tensors[i]) == {"master", *MOMENTS}
        assert all(torch.equal(t, state_dict["state"][i][n]) for n, t in incoming.tensors[i].items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_moments_of_other_floating_dtypes_are_taken(dtype: torch.dtype) -> None:
    assert read(saved(dtype)).tensors[0]["exp_avg"].dtype is dtype


def test_state_saved_before_the_first_step_is_empty() -> None:
    incoming = read({"state": {}, "param_groups": [{"params": [0, 1]}, {"params": [2]}]})
    assert incoming.steps == {0: 0, 1: 0, 2: 0}
    assert incoming.tensors == {0: {}, 1: {}, 2: {}}


def test_frozen_parameters_are_passed_over() -> None:
    records = records_of()
    _frozen, *rest = records
    incoming = read_state(saved(), groups_of(records), {p: records[p] for p in rest}, MOMENTS)
    assert set(incoming.tensors) == set(incoming.steps) == {1, 2}


@pytest.mark.parametrize(
    ("dtype", "master", "warns"),
    [(torch.bfloat16, False, True), (torch.bfloat16, True, False), (torch.float32, False, False)],
)
def test_missing_masters_are_warned_of(
    caplog: pytest.LogCaptureFixture, dtype: torch.dtype, master: bool, warns: bool
) -> None:
    """Only where bits are lost: an FP32 weight is its own master."""
    with caplog.at_level(logging.WARNING):
        read(saved(master=master), records_of(dtype))
    assert ("no FP32 masters for 3 BF16 parameter(s) (p0, p1, p2" in caplog.text) == warns


def test_state_of_nobody_is_told_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    state_dict = saved()
    state_dict["state"]["elsewhere.weight"] = state_dict["state"][0]
    with caplog.at_level(logging.WARNING):
        incoming = read(state_dict)
    assert "state for 1 parameter(s) that are in none of its groups (elsewhere.weight" in caplog.text
    assert set(incoming.tensors) == {0, 1, 2}


@pytest.mark.parametrize(
    ("names", "warns"), [("abc", False), ("acb", True), ("xyz", False), (None, False)], ids=str
)
def test_another_order_of_the_same_names_is_told(
    caplog: pytest.LogCaptureFixture, names: str | None, warns: bool
) -> None:
    records = records_of()
    groups = groups_of(records)
    for group, own in zip(groups, ("ab", "c"), strict=True):
        group["param_names"] = list(own)
    state_dict = saved()
    if names is not None:
        for group, theirs in zip(state_dict["param_groups"], (names[:2], names[2:]), strict=True):
            group["param_names"] = list(theirs)
    with caplog.at_level(logging.WARNING):
        read_state(state_dict, groups, records, MOMENTS)
    assert ("in another order" in caplog.text) == warns


def test_state_of_frozen_parameters_waits_as_a_copy() -> None:
    records = records_of()
    frozen, *rest = records
    state_dict = saved()
    incoming = read_state(state_dict, groups_of(records), {p: records[p] for p in rest}, MOMENTS)
    assert incoming.waiting.keys() == {frozen}
    entry = incoming.waiting[frozen]
    assert entry.keys() == {"step", "master", *MOMENTS}
    assert entry["step"] == 5
    assert torch.equal(entry["exp_avg"], state_dict["state"][0]["exp_avg"])
    assert entry["exp_avg"].data_ptr() != state_dict["state"][0]["exp_avg"].data_ptr()


def test_what_does_not_fit_a_frozen_parameter_is_refused_by_name() -> None:
    records = records_of()
    _frozen, *rest = records
    groups = groups_of(records)
    groups[0]["param_names"] = ["layer.weight", "layer.bias"]
    state_dict = saved()
    state_dict["state"][0]["exp_avg"] = torch.zeros(7)
    with pytest.raises(CheckpointError, match=r"layer\.weight: exp_avg has shape \(7,\)"):
        read_state(state_dict, groups, {p: records[p] for p in rest}, MOMENTS)


# What is refused


def entry(key: str, value: Any, param: int = 1) -> Callable[[StateDict], Any]:
    return lambda d: d["state"][param].__setitem__(key, value)


def without(key: str, param: int = 1) -> Callable[[StateDict], Any]:
    return lambda d: d["state"][param].pop(key)


BAD: dict[str, tuple[Callable[[StateDict], Any], str]] = {
    "no state": (lambda d: d.pop("state"), "no optimizer state dict"),
    "no groups": (lambda d: d.pop("param_groups"), "no optimizer state dict"),
    "state is a list": (lambda d: d.__setitem__("state", []), "no optimizer state dict"),
    "groups are None": (lambda d: d.__setitem__("param_groups", None), "no optimizer state dict"),
    "a group is a list": (lambda d: d.__setitem__("param_groups", [[0, 1, 2]]), "no optimizer state dict"),
    "a group has no params": (lambda d: d["param_groups"][0].pop("params"), "no optimizer state dict"),
    "an entry is None": (lambda d: d["state"].__setitem__(1, None), "no optimizer state dict"),
    "fewer parameters": (lambda d: d["param_groups"][0]["params"].pop(), r"groups of \[1, 1\].*of \[2, 1\]"),
    "more parameters": (
        lambda d: d["param_groups"][0]["params"].append(9),
        r"groups of \[3, 1\].*of \[2, 1\]",
    ),
    "amsgrad": (lambda d: d["param_groups"][0].__setitem__("amsgrad", True), "amsgrad=True"),
    "capturable": (lambda d: d["param_groups"][0].__setitem__("capturable", True), "capturable=True"),
    "differentiable": (
        lambda d: d["param_groups"][0].__setitem__("differentiable", True),
        "differentiable=True",
    ),
    "shape": (entry("exp_avg", torch.zeros(3)), r"exp_avg has shape \(3,\), expected \(2,\)"),
    "master's shape": (entry("master", torch.zeros(2, 1)), r"master has shape \(2, 1\)"),
    "no tensor": (entry("exp_avg", 1.0), "exp_avg is a float"),
    "integers": (entry("exp_avg_sq", torch.zeros(2, dtype=torch.int32)), "exp_avg_sq is torch.int32"),
    "complex": (entry("exp_avg", torch.zeros(2, dtype=torch.complex64)), "exp_avg is torch.complex64"),
    "meta": (entry("exp_avg", torch.zeros(2, device="meta")), "exp_avg is .* on meta"),
    "sparse": (entry("exp_avg", torch.zeros(2).to_sparse()), "exp_avg is .*sparse"),
    "a moment is missing": (without("exp_avg_sq"), "no exp_avg_sq"),
    "step is missing": (without("step"), "no step"),
    "another kind of optimizer": (
        lambda d: d["state"].__setitem__(1, {"momentum_buffer": torch.zeros(2)}),
        "momentum_buffer.*another kind",
    ),
    "step is negative": (entry("step", -1), "step is -1"),
    "step is NaN": (entry("step", torch.tensor(float("nan"))), r"step is tensor\(nan\)"),
    "step is infinite": (entry("step", float("inf")), "step is inf"),
    "step has two elements": (entry("step", torch.ones(2)), r"step is tensor\(\[1., 1.\]\)"),
    "step is text": (entry("step", "seven"), "step is 'seven'"),
    "step is None": (entry("step", None), "step is None"),
}


@pytest.mark.parametrize(("spoil", "words"), BAD.values(), ids=BAD)
def test_a_bad_state_dict_is_refused(spoil: Callable[[StateDict], Any], words: str) -> None:
    state_dict = saved()
    read(state_dict)
    spoil(state_dict)
    with pytest.raises(CheckpointError, match=words):
        read(state_dict)


@pytest.mark.parametrize("nonsense", [None, [], 3])
def test_no_mapping_at_all_is_refused(nonsense: Any) -> None:
    with pytest.raises(CheckpointError, match="no optimizer state dict"):
        read(nonsense)


@pytest.mark.parametrize("name", ["exp_avg", "master"])
def test_a_refusal_names_the_parameter(name: str) -> None:
    state_dict = saved()
    state_dict["state"][2][name] = torch.zeros(5)
    with pytest.raises(CheckpointError, match=r"p2: "):
        read(state_dict)


# Through the optimizer


@pytest.fixture
def trained() -> Iterator[tuple[list[torch.nn.Parameter], offload.AdamW]]:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in SHAPES]
    config = offload.OffloadConfig(tile_numel=1024, ring_slots=2, threads=1)
    groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
    with offload.AdamW(groups, lr=0.1, mode="wavefront", backend="torch", config=config) as optimizer:
        train(parameters, optimizer)
        yield parameters, optimizer


def train(parameters: list[torch.nn.Parameter], optimizer: offload.AdamW) -> None:
    backward(parameters)
    optimizer.step()
    optimizer.zero_grad()


def backward(parameters: list[torch.nn.Parameter]) -> None:
    sum((p * p).sum() for p in parameters).backward()  # type: ignore[union-attr]


def same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return bool(first == second)


@pytest.mark.parametrize("spoil", [spoil for spoil, _ in BAD.values()], ids=BAD)
def test_a_refused_state_dict_changes_nothing(
    trained: tuple[list[torch.nn.Parameter], offload.AdamW], spoil: Callable[[StateDict], Any]
) -> None:
    parameters, optimizer = trained
    before, weights = optimizer.state_dict(), [p.detach().clone() for p in parameters]
    other = copy.deepcopy(before)
    for saved_entry in other["state"].values():
        saved_entry["exp_avg"] += 1
    other["param_groups"][0]["lr"] = 0.5
    spoil(other)
    with pytest.raises(CheckpointError):
        optimizer.load_state_dict(other)
    assert same(optimizer.state_dict(), before)
    assert all(map(torch.equal, weights, parameters))
    train(parameters, optimizer)


def test_exported_state_stays_as_it_was(trained: tuple[list[torch.nn.Parameter], offload.AdamW]) -> None:
    parameters, optimizer = trained
    exported = optimizer.state_dict()
    kept = copy.deepcopy(exported)
    train(parameters, optimizer)
    assert same(exported, kept)
    assert not same(optimizer.state_dict(), kept)


def test_a_file_holds_the_state_and_not_its_slab(
    trained: tuple[list[torch.nn.Parameter], offload.AdamW],
) -> None:
    _, optimizer = trained
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    assert file.tell() < 20_000
    file.seek(0)
    assert same(torch.load(file, weights_only=True), optimizer.state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_moments_of_other_dtypes_are_converted(
    trained: tuple[list[torch.nn.Parameter], offload.AdamW], dtype: torch.dtype
) -> None:
    _, optimizer = trained
    other = optimizer.state_dict()
    for saved_entry in other["state"].values():
        saved_entry["exp_avg"] = saved_entry["exp_avg"].to(dtype)
    optimizer.load_state_dict(other)
    loaded = optimizer.state_dict()
    for index, saved_entry in other["state"].items():
        assert loaded["state"][index]["exp_avg"].dtype is torch.float32
        assert torch.equal(loaded["state"][index]["exp_avg"], saved_entry["exp_avg"].float())


def test_a_missing_master_is_taken_from_the_weight(
    trained: tuple[list[torch.nn.Parameter], offload.AdamW], caplog: pytest.LogCaptureFixture
) -> None:
    parameters, optimizer = trained
    other = optimizer.state_dict()
    masters = [saved_entry.pop("master") for saved_entry in other["state"].values()]
    with caplog.at_level(logging.WARNING):
        optimizer.load_state_dict(other)
    assert "no FP32 masters for 3 BF16 parameter(s)" in caplog.text
    for parameter, master in zip(parameters, masters, strict=True):
        assert torch.equal(optimizer.state[parameter]["master"], parameter.float())
        assert torch.equal(parameter, master.bfloat16())
