"""How many CPU threads this rank may use, and on which CPUs its worker runs.

The library changes neither the process's affinity nor torch's thread count: the worker binds *itself* before
its OpenMP team starts, which inherits the binding. NumPy and torch elsewhere keep what they had.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path, PurePosixPath

import psutil
import torch

from offload.errors import ConfigError

__all__ = [
    "Budget",
    "allowed_cpus",
    "bind_current_thread",
    "cgroup_folders",
    "cgroup_quota",
    "configure_cpu_optimizer_threads",
    "cpus_of_node",
    "numa_node_of_gpu",
    "parse_cpu_list",
    "thread_budget",
]

logger = logging.getLogger(__name__)

_PROC = Path("/proc")
_SYS = Path("/sys")

#: From this many CPUs on, one is left to the thread that launches GPU kernels. A team that spins on every
#: core is descheduled for milliseconds by it; with fewer CPUs the lost one would cost more than that.
_LAUNCHER_FROM = 4

#: Environment variables that place OpenMP threads by themselves, whatever the worker's affinity is.
_PLACING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")


@dataclass(frozen=True)
class Budget:
    """What one rank may use."""

    #: Threads of the worker's team, at least 1.
    num_threads: int
    #: CPUs on which the team may run; other ranks may hold them too.
    cpus: frozenset[int]
    #: How it came about, in plain words.
    reason: str
    #: Whether this is more than the rank's share: then the ranks together use more than there is.
    oversubscribed: bool = False


def thread_budget(mask: set[int], peer_masks: Sequence[set[int]], quota: float | None) -> Budget:
    """Fair share of one rank: over the CPUs of its mask, the sum of 1 / (ranks whose mask holds that CPU).

    So shared, NUMA-bound and disjoint masks all come out right, and the floors of all ranks' shares never add
    up to more than there is. Pure.

    Args:
        mask: CPUs this rank may run on.
        peer_masks: The same of every *other* rank on this host.
        quota: CPUs' worth of time that the ranks' common cgroup has, None for no limit.
    """
    if not mask:
        raise ConfigError("the affinity mask is empty: a rank needs at least one CPU")
    num_ranks = 1 + len(peer_masks)
    share = sum((Fraction(1, 1 + sum(cpu in peer for peer in peer_masks)) for cpu in mask), Fraction(0))
    words = [
        f"{len(mask)} CPUs in the mask",
        f"{float(share):.4g} of them for this one of {num_ranks} local ranks",
    ]
    if quota is not None and Fraction(quota) / num_ranks < share:
        share = Fraction(quota) / num_ranks
        words.append(f"cut to {float(share):.4g} by the cgroup quota of {quota:g}")
    num_threads = math.floor(share)
    if num_threads >= _LAUNCHER_FROM:
        num_threads -= 1
        words.append("one left to the launching thread")
    if num_threads < 1:
        words.append("raised to the minimum of one")
    return Budget(max(num_threads, 1), frozenset(mask), ", ".join(words), oversubscribed=share < 1)


def allowed_cpus() -> set[int]:
    """CPUs that the calling thread may run on; all, where the system has no affinity masks."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def bind_current_thread(cpus: Collection[int]) -> bool:
    """Bind the calling thread alone, and the threads it starts later; whether that was done."""
    if not cpus or not hasattr(os, "sched_setaffinity"):
        return False
    try:
        os.sched_setaffinity(0, cpus)  # on Linux, 0 is the calling thread, not the process
    except OSError as error:
        logger.warning("could not bind a thread to CPUs %s: %s", sorted(cpus), error)
        return False
    return True


def cgroup_quota(*, proc: Path = _PROC, sys: Path = _SYS) -> float | None:
    """The tightest CPU quota, in CPUs, of this process's cgroup and all above it; None for no limit.

    Knows version 2 (``cpu.max``), version 1 (``cpu.cfs_quota_us``) and hosts that mix them. A folder that the
    container does not see is skipped: inside one, the own cgroup is mounted as the root.
    """
    limits = [_quota_of(folder) for folder in cgroup_folders("cpu", proc, sys / "fs/cgroup")]
    return min((limit for limit in limits if limit is not None), default=None)


def cgroup_folders(controller: str, proc: Path, mount: Path) -> Iterator[Path]:
    """Folders of this process's cgroup and all above it that can hold limits of ``controller``."""
    for line in (_read(proc / "self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            roots = [mount, mount / "unified"]
        elif controller in controllers.split(","):
            roots = [mount / controllers, mount / controller]
        else:
            continue
        own = PurePosixPath(path.lstrip("/"))
        if ".." in own.parts:  # above the namespace's root: only the root itself is visible
            own = PurePosixPath()
        yield from (root / part for root in roots for part in (own, *own.parents))


def _quota_of(folder: Path) -> float | None:
    if (text := _read(folder / "cpu.max")) is not None:
        quota, period = text.split()
        return None if quota == "max" else int(quota) / int(period)
    quota_us, period_us = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    if quota_us is None or period_us is None or int(quota_us) <= 0:
        return None
    return int(quota_us) / int(period_us)


def numa_node_of_gpu(device: torch.device | int, *, sys: Path = _SYS) -> int | None:
    """NUMA node that the GPU hangs on; None where the system does not say."""
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    domain, bus, slot = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    if domain is None or bus is None or slot is None:  # a torch that does not show them
        return None
    return _numa_node_of_pci(f"{domain:04x}:{bus:02x}:{slot:02x}.0", sys)


def _numa_node_of_pci(address: str, sys: Path) -> int | None:
    text = _read(sys / "bus/pci/devices" / address / "numa_node")
    return int(text) if text is not None and int(text) >= 0 else None  # -1: the firmware does not say


def cpus_of_node(node: int, *, sys: Path = _SYS) -> set[int]:
    """CPUs of a NUMA node, online ones; empty where the system does not say."""
    return parse_cpu_list(_read(sys / f"devices/system/node/node{node}/cpulist") or "")


def parse_cpu_list(text: str) -> set[int]:
    """The kernel's notation, ``0-3,8,10-11``, as a set."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def configure_cpu_optimizer_threads(
    *,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    num_threads: int | None = None,
    numa_bind: bool = True,
    device: torch.device | None = None,
    peer_masks: Sequence[set[int]] | None = None,
    proc: Path = _PROC,
    sys: Path = _SYS,
) -> Budget:
    """Decide this rank's threads and CPUs, log the decision in one line, change nothing.

    What other ranks may run on is, in this order: ``peer_masks``; the affinity of the processes that the
    launcher started beside this one, if they are as many as there are ranks; the same as this rank. Where all
    ranks share a mask and there is a visible GPU for each, rank i is taken to use GPU i and its NUMA node.

    Args:
        local_rank: Rank on this host; ``LOCAL_RANK`` if None, 0 without that.
        local_world_size: Ranks on this host; ``LOCAL_WORLD_SIZE`` if None, 1 without that.
        num_threads: Use just this many threads.
        numa_bind: Keep to the CPUs of the GPU's NUMA node.
        device: This rank's GPU, for ``numa_bind``; None or a CPU: no NUMA node is preferred.
        peer_masks: Affinity masks of the other local ranks, NUMA binding included, where known.
        proc: Root of procfs, for tests.
        sys: Root of sysfs, for tests.
    """
    rank = _from_environment("LOCAL_RANK", 0) if local_rank is None else local_rank
    num_ranks = _from_environment("LOCAL_WORLD_SIZE", 1) if local_world_size is None else local_world_size
    if not 0 <= rank < num_ranks:
        raise ConfigError(
            f"local rank {rank} of {num_ranks} is impossible: check LOCAL_RANK and LOCAL_WORLD_SIZE"
        )
    if num_threads is not None and num_threads < 1:
        raise ConfigError(f"num_threads={num_threads} must be at least 1, or None to have it chosen")
    process_mask = allowed_cpus()
    gpu = device if numa_bind and device is not None and device.type == "cuda" else None
    mask = _near_gpu(process_mask, gpu, sys)
    if peer_masks is None:
        peer_masks = _guess_peer_masks(process_mask, mask, gpu, rank, num_ranks, sys)
    budget = thread_budget(mask, peer_masks, cgroup_quota(proc=proc, sys=sys))
    if num_threads is not None:
        budget = Budget(
            num_threads,
            budget.cpus,
            f"asked for; the fair share is {budget.num_threads}: {budget.reason}",
            oversubscribed=num_threads > budget.num_threads,
        )
    _log(budget, rank)
    return budget


def _near_gpu(mask: set[int], gpu: torch.device | int | None, sys: Path) -> set[int]:
    """``mask`` without the CPUs that are far from ``gpu``; all of it if none is known to be near."""
    node = None if gpu is None else numa_node_of_gpu(gpu, sys=sys)
    return mask if node is None else (mask & cpus_of_node(node, sys=sys)) or mask


def _guess_peer_masks(
    process_mask: set[int], mask: set[int], gpu: torch.device | None, rank: int, num_ranks: int, sys: Path
) -> list[set[int]]:
    """Masks of the other local ranks. A wrong guess must err towards too many claims on a CPU."""
    masks = _sibling_masks(num_ranks) or [process_mask] * (num_ranks - 1)
    if any(peer != process_mask for peer in masks):
        return masks  # the launcher binds; which rank has which mask is unknown, so none is narrowed
    if gpu is None:
        return masks
    index = torch.cuda.current_device() if gpu.index is None else gpu.index
    if index == rank and torch.cuda.device_count() >= num_ranks:
        return [_near_gpu(process_mask, peer, sys) for peer in range(num_ranks) if peer != rank]
    # One visible GPU per rank: the peers' nodes are unknown. All might be bound to ours.
    return [mask] * (num_ranks - 1)


def _sibling_masks(num_ranks: int) -> list[set[int]] | None:
    """Masks of the launcher's other children, if they are exactly the other ranks; else None."""
    if num_ranks == 1 or not hasattr(os, "sched_getaffinity"):
        return None
    try:
        siblings = [
            child.pid for child in psutil.Process(os.getppid()).children() if child.pid != os.getpid()
        ]
        return [os.sched_getaffinity(pid) for pid in siblings] if len(siblings) == num_ranks - 1 else None
    except (psutil.Error, OSError):
        return None


def _log(budget: Budget, rank: int) -> None:
    logger.info("rank %d: %d CPU optimizer threads: %s", rank, budget.num_threads, budget.reason)
    if budget.oversubscribed:
        logger.warning(
            "rank %d: %d threads are more than its share of the CPUs (%s): start fewer ranks or allow more",
            rank,
            budget.num_threads,
            budget.reason,
        )
    for name in _PLACING_VARIABLES:
        if name in os.environ:
            logger.warning(
                "%s=%s overrides where the optimizer's threads run: unset it", name, os.environ[name]
            )


def _from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError as error:
        raise ConfigError(
            f"{name}={text!r} in the environment is not a number: correct or unset it"
        ) from error


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None
