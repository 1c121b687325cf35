"""Did the compiler vectorize? A loop that silently became scalar is the commonest regression, and costs a factor of 4."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping

__all__ = ["VECTOR_INSTRUCTIONS", "count_instructions"]

#: What the update loop must contain, by machine: one regular expression per instruction of the formula.
VECTOR_INSTRUCTIONS: Mapping[str, Mapping[str, str]] = {
    "x86_64": {
        "sqrt": r"\bvsqrtps\b.*%[yz]mm",
        "divide": r"\bvdivps\b.*%[yz]mm",
        "fma": r"\bvfn?m(?:add|sub)\w*ps\b.*%[yz]mm",
        "stream": r"\bvmovnt(?:ps|dq|pd)\b",
    },
    "aarch64": {
        "sqrt": r"\bfsqrt\b\s+v\d+\.4s",
        "divide": r"\bfdiv\b\s+v\d+\.4s",
        "fma": r"\bfml[as]\b\s+v\d+\.4s",
        "stream": r"\bstnp\b",
    },
}


def count_instructions(assembly: str, machine: str | None = None) -> dict[str, int]:
    """How often each of `VECTOR_INSTRUCTIONS` occurs; an empty dict on a machine that is not listed."""
    patterns = VECTOR_INSTRUCTIONS.get(machine or platform.machine(), {})
    return {name: len(re.findall(pattern, assembly)) for name, pattern in patterns.items()}
