"""Amounts as people write them, and as they like to read them."""

from __future__ import annotations

import re

from offload.errors import ConfigError

__all__ = ["as_gib", "parse_bytes"]

UNITS = {"": 1, "b": 1}
UNITS |= {prefix: 1000**power for power, prefix in enumerate(("k", "m", "g", "t"), start=1)}
UNITS |= {f"{prefix}b": 1000**power for power, prefix in enumerate(("k", "m", "g", "t"), start=1)}
UNITS |= {f"{prefix}ib": 1024**power for power, prefix in enumerate(("k", "m", "g", "t"), start=1)}

PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """``80GiB``, ``24 GB``, ``1.5t`` or plain bytes, as a number of bytes.

    Raises:
        ConfigError: not an amount.
    """
    match = PATTERN.fullmatch(text)
    if match is None or match[2].lower() not in UNITS:
        raise ConfigError(f"{text!r} is no amount of memory; write for example 80GiB, 24GB or 4096")
    return int(float(match[1]) * UNITS[match[2].lower()])


def as_gib(num_bytes: int | None) -> str:
    """With one decimal below 100 GiB, two below 1."""
    if num_bytes is None:
        return "-"
    value = num_bytes / 2**30
    return f"{value:.2f}" if value < 1 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
