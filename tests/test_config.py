"""Bad options are refused at construction, by name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from offload.config import BACKENDS, CLIP_POLICIES, MODES, NONFINITE_POLICIES, OffloadConfig, check_choice
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


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        OffloadConfig().ring_slots = 3  # type: ignore[misc]


@pytest.mark.parametrize("choices", [MODES, BACKENDS, CLIP_POLICIES, NONFINITE_POLICIES])
def test_choices(choices: tuple[str, ...]) -> None:
    assert [check_choice("x", choice, choices) for choice in choices] == list(choices)
    with pytest.raises(ConfigError, match="x='nonsense' is unknown") as caught:
        check_choice("x", "nonsense", choices)
    assert all(repr(choice) in str(caught.value) for choice in choices)
