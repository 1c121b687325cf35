"""What ``offload doctor`` finds: a value, its text, and advice where something is off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Finding"]


@dataclass(frozen=True)
class Finding:
    """One fact about this machine.

    `value` is for JSON, `text` for people. `advice` is None where all is well; else it says what to do, in one sentence.
    """

    section: str
    name: str
    value: Any
    text: str
    advice: str | None = None
