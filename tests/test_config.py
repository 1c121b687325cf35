"""Bad options are refused at construction, by name."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle
from typing import Any

import pytest

from offload.config import (
    BACKENDS,
    CLIP_POLICIES,
    MODES,
    NONFINITE_POLICIES,
    OffloadConfig,
    check_choice,
    sample,
)
from offload.errors import ConfigError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tile_numel", 0),
        ("tile_numel", -1024),
        ("tile_numel", 1023),
        ("tile_numel", 1536),
        ("ring_slots", 1),
        ("ring_slots", -2),
        ("backlog_tiles", 0),
        ("host_budget", -1),
        ("device_budget", -1),
        ("pinned_budget", -1),
        ("timeout_s", 0),
        ("timeout_s", -1.0),
        ("timeout_s", math.nan),
        ("threads", 0),
        ("moments", "bf8"),
        ("chunk_by", "("),
        ("kernel_cache_dir", 3),
    ],
)
def test_a_bad_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"config\.{field}=") as caught:
        OffloadConfig(**{field: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tile_numel": 1024, "ring_slots": 2, "backlog_tiles": 1, "threads": 1, "timeout_s": 1e-3},
        {"host_budget": 0, "device_budget": 0, "pinned_budget": 0},
        {"chunk_by": r"layer\d+"},
        {"chunk_by": str.upper},
    ],
)
def test_limits_are_allowed(fields: dict[str, Any]) -> None:
    config = OffloadConfig(**fields)
    assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("field", "remedy"),
    [
        ("device_budgt", r"did you mean device_budget\?"),
        ("ringslots", r"did you mean ring_slots\?"),
        ("x", "there are tile_numel, ring_slots, "),
    ],
)
def test_a_field_that_there_is_none_of_is_refused_with_the_nearest(field: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"OffloadConfig has no field '{field}' \(given 7\): {remedy}"):
        OffloadConfig(**{field: 7})
    with pytest.raises(ConfigError, match=remedy):
        dataclasses.replace(OffloadConfig(), **{field: 7})


def test_a_config_is_a_dataclass_like_any_other() -> None:
    signature = inspect.signature(OffloadConfig)
    assert list(signature.parameters) == [field.name for field in dataclasses.fields(OffloadConfig)]
    config = OffloadConfig(1024, threads=3)
    assert (config.tile_numel, config.threads) == (1024, 3)
    assert pickle.loads(pickle.dumps(config)) == copy.copy(config) == config


def test_a_sample_of_names_is_from_all_over() -> None:
    assert sample(["a", "b"]) == "a, b"
    assert sample([f"{i}" for i in range(40)]) == "0, 10, 20, 30 and 36 more"
    assert sample([]) == ""


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        OffloadConfig().ring_slots = 3  # type: ignore[misc]


@pytest.mark.parametrize("choices", [MODES, BACKENDS, CLIP_POLICIES, NONFINITE_POLICIES])
def test_choices(choices: tuple[str, ...]) -> None:
    assert [check_choice("x", choice, choices) for choice in choices] == list(choices)
    with pytest.raises(ConfigError, match="x='nonsense' is unknown") as caught:
        check_choice("x", "nonsense", choices)
    assert all(repr(choice) in str(caught.value) for choice in choices)
