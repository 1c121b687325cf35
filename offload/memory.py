"""How much host memory this process may still take, as far as its control group says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from offload.threads import cgroup_folders

__all__ = ["cgroup_memory_left"]

UNLIMITED = 1 << 60
"""Version 1 says "no limit" with a number near 2**63."""


def cgroup_memory_left(*, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> int | None:
    """Bytes until the tightest limit of the cgroup and all above it is reached; None for no limit."""
    return min(_left(proc, sys), default=None)


def _left(proc: Path, sys: Path) -> Iterator[int]:
    for folder in cgroup_folders("memory", proc, sys / "fs/cgroup"):
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _number(folder / limit_name), _number(folder / usage_name)
            if limit is not None and usage is not None and limit < UNLIMITED:
                yield min(limit, max(limit - usage, 0) + _page_cache(folder))


def _page_cache(folder: Path) -> int:
    """Bytes of cached file pages, which are counted as used and given up as soon as memory is asked for."""
    try:
        lines = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    counts = dict(line.split() for line in lines if len(line.split()) == 2)
    prefix = (
        "total_" if "total_active_file" in counts else ""
    )  # version 1 has both, the total includes children
    return sum(int(counts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
