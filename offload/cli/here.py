"""Whether what is planned fits into the host memory of the machine that plans it, which need not be the one that trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from offload.cli.recommend import ModeRow
from offload.cli.units import as_gib
from offload.memory import cgroup_memory_left

__all__ = ["HostMemory", "host_memory", "remark"]


@dataclass(frozen=True)
class HostMemory:
    """Of one machine, in bytes; `free_bytes`: what may be taken now, within the control group."""

    total_bytes: int
    free_bytes: int

    def ranks_of(self, row: ModeRow) -> int | None:
        """How many ranks of the mode there is room for; None: they take nothing."""
        return self.free_bytes // row.host_bytes if row.host_bytes else None

    def holds(self, row: ModeRow, ranks: int) -> bool:
        """Whether there is room for so many ranks of the mode."""
        room = self.ranks_of(row)
        return room is None or room >= ranks


def host_memory() -> HostMemory:
    """Of this machine."""
    memory, left = psutil.virtual_memory(), cgroup_memory_left()
    return HostMemory(memory.total, memory.available if left is None else min(memory.available, left))


def remark(
    here: HostMemory, rows: Sequence[ModeRow], chosen: str | None, *, ranks: int, bounded: bool
) -> str:
    """What this machine has, and which modes fit into it.

    Args:
        chosen: the recommended mode.
        ranks: as if all of them ran here.
        bounded: whether a host budget was given, which is what modes are held against; they are not against `here`.
    """
    where = "here" if ranks == 1 else f"here with all {ranks} ranks"
    said = f"host memory of this machine: {as_gib(here.free_bytes)} GiB free of {as_gib(here.total_bytes)}; "
    cramped = [row for row in rows if not here.holds(row, ranks)]
    if not cramped:
        said += f"all modes fit {where}"
    else:
        said += f"{', '.join(row.mode for row in cramped)} would not fit {where}"
    for row in cramped:
        if row.mode == chosen:
            said += f", and {chosen} is recommended: {as_gib(row.host_bytes)} GiB a rank"
            said += f" ({here.ranks_of(row)} of {ranks} ranks would fit)" if ranks > 1 else ""
    if not bounded:
        said += ". No --host-budget was given, so the plan is for a machine with as much as a mode takes"
        if cramped:
            said += f"; --host-budget {as_gib(here.free_bytes // ranks)}GiB plans for this one"
    return said
