"""What ``offload doctor`` looks at without measuring: software, CPU, threads, NUMA, memory. Works on any system."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import llvmlite.binding
import psutil
import torch

import offload
from offload.cli.findings import Finding
from offload.cli.units import as_gib
from offload.errors import OffloadError
from offload.kernels.jit import jit_disabled
from offload.kernels.team import available_layers, kernel_thread_limit
from offload.memory import cgroup_memory_left
from offload.threads import Budget, allowed_cpus, cgroup_quota, cpus_of_node
from offload.transfer.mapping import HUGE_PAGE_BYTES
from offload.transfer.pinned import allocate

__all__ = ["cpu_findings", "memory_findings", "software_findings", "thread_findings"]

FEATURES = ("avx2", "fma", "avx512f", "avx512bf16", "amx-bf16", "neon", "sve")
PLACING_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
PROBE_BYTES = 16 * HUGE_PAGE_BYTES
"""A slab that is mapped and touched to see what pages it gets."""


def software_findings() -> Iterator[Finding]:
    """Versions, and settings that make kernels slow."""
    section = "software"
    yield Finding(section, "offload", offload.__version__, offload.__version__)
    yield Finding(section, "python", platform.python_version(), platform.python_version())
    for package in ("torch", "numba", "llvmlite", "numpy"):
        version = importlib.metadata.version(package)
        yield Finding(section, package, version, version)
    yield Finding(
        section,
        "jit",
        not jit_disabled(),
        "off" if jit_disabled() else "on",
        "NUMBA_DISABLE_JIT is set: kernels are plain Python, thousands of times slower; unset it"
        if jit_disabled()
        else None,
    )


def cpu_findings() -> Iterator[Finding]:
    """The CPU, and what the compiler is told of it."""
    section = "cpu"
    host = llvmlite.binding.get_host_cpu_name()
    yield Finding(section, "cpu", _cpu_name(), f"{_cpu_name()} ({platform.machine()}, LLVM calls it {host})")
    features = [name for name in FEATURES if llvmlite.binding.get_host_cpu_features().get(name)]
    narrow = platform.machine() in ("x86_64", "AMD64") and "avx2" not in features
    yield Finding(
        section,
        "features",
        features,
        ", ".join(features) or "none of those that matter",
        "no AVX2: the update runs on narrow vectors, and slowly" if narrow else None,
    )
    told = os.environ.get("NUMBA_CPU_NAME") or None
    if told is not None:
        advice = f"NUMBA_CPU_NAME={told} hides this CPU's own features from the compiler; unset it for speed"
        yield Finding(section, "compiled for", told, told, advice if told != host else None)


def thread_findings(budget: Budget) -> Iterator[Finding]:
    """Who may run where, and why."""
    section = "threads"
    layers = available_layers()
    yield Finding(
        section,
        "threading layers",
        list(layers),
        ", ".join(layers) or "none that is safe; an executor of Python threads stands in",
        None
        if layers
        else "install the system's libgomp (the package libgomp1) or `pip install tbb`: launches then cost microseconds",
    )
    yield Finding(
        section,
        "budget",
        budget.num_threads,
        f"{budget.num_threads}: {budget.reason}",
        _budget_advice(budget),
    )
    limit = kernel_thread_limit()
    yield Finding(
        section,
        "numba's limit",
        limit,
        str(limit),
        f"NUMBA_NUM_THREADS={limit} caps the budget of {budget.num_threads}: raise or unset it"
        if limit < budget.num_threads
        else None,
    )
    quota = cgroup_quota()
    yield Finding(section, "CPU quota", quota, "none" if quota is None else f"{quota:g} CPUs")
    for name in PLACING_VARIABLES:
        if name in os.environ:
            advice = f"{name} places threads by itself and overrides the worker's binding: unset it"
            yield Finding(section, name, os.environ[name], os.environ[name], advice)
    yield from _numa_findings()


def _budget_advice(budget: Budget) -> str | None:
    if budget.oversubscribed:
        return "ranks together use more threads than there are CPUs: start fewer ranks, or allow more CPUs"
    if budget.num_threads < 4:
        return (
            f"{budget.num_threads} thread{'s' * (budget.num_threads > 1)} update well below a billion parameters a "
            "second: fine to try things, too few to hide an update behind backward"
        )
    return None


def _numa_findings() -> Iterator[Finding]:
    nodes = {
        int(folder.name.removeprefix("node")): sorted(cpus_of_node(int(folder.name.removeprefix("node"))))
        for folder in sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    }
    allowed = allowed_cpus()
    text = "; ".join(
        f"node {node}: {len(cpus)} CPUs, {len(allowed.intersection(cpus))} allowed"
        for node, cpus in nodes.items()
    )
    yield Finding("threads", "NUMA", nodes, text or "the system does not say")


def memory_findings() -> Iterator[Finding]:
    """Host memory, huge pages and what may be locked."""
    section = "memory"
    memory = psutil.virtual_memory()
    yield Finding(section, "total", memory.total, f"{as_gib(memory.total)} GiB")
    yield Finding(section, "available", memory.available, f"{as_gib(memory.available)} GiB")
    left = cgroup_memory_left()
    capped = left is not None and left < memory.available
    yield Finding(
        section,
        "left to the cgroup",
        left,
        "no limit" if left is None else f"{as_gib(left)} GiB",
        f"the container may take {as_gib(left)} GiB, the machine has {as_gib(memory.available)}: raise its limit if state "
        "does not fit (12 bytes per parameter)"
        if capped
        else None,
    )
    yield _huge_page_finding()
    yield _lock_finding()


def _huge_page_finding() -> Finding:
    setting = _chosen(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    share = _huge_share()
    text = f"{setting or 'the system does not say'}" + ("" if share is None else f", {share:.0%} of a probe")
    advice = None
    if share is not None and share < 0.5:
        advice = (
            "state does not get huge pages: touching and pinning it takes many times longer; as root, "
            "`echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`"
        )
    return Finding("memory", "huge pages", {"setting": setting, "share_of_probe": share}, text, advice)


def _huge_share() -> float | None:
    try:
        slab = allocate(PROBE_BYTES, name="huge page probe", pin=False, fallback_pageable=True)
    except OffloadError:
        return None
    try:
        huge = slab.huge_bytes()
        return None if huge is None else huge / PROBE_BYTES
    finally:
        slab.close()


def _lock_finding() -> Finding:
    try:
        import resource
    except ImportError:
        return Finding("memory", "lockable", None, "the system does not say")
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = None if soft == resource.RLIM_INFINITY else soft
    small = limit is not None and limit < 2**30 and torch.cuda.is_available()
    return Finding(
        "memory",
        "lockable",
        limit,
        "unlimited" if limit is None else f"{limit / 2**20:,.0f} MiB (ulimit -l)",
        "if pinning is refused, raise `ulimit -l` (in containers --ulimit memlock=-1)" if small else None,
    )


def _chosen(path: Path) -> str | None:
    """The word in brackets, as sysfs marks the choice among several."""
    try:
        words = path.read_text(encoding="ascii").split()
    except OSError:
        return None
    return next((word.strip("[]") for word in words if word.startswith("[")), None)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())
