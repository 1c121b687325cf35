"""What must be set before torch is imported, and what a benchmark has to record about its machine.

The library itself never touches the environment; programs may. On a machine with many CPUs these scripts leave
OpenMP's waiting policy alone: with ``OMP_WAIT_POLICY=passive`` each of the hundreds of kernel launches of a step has to
wake the team first (0.18 ms apiece against ``active`` in one comparison on a 16-core host; not seen in every run). With
few CPUs they ask for it: teams that spin take the cores from each other as soon as anything else runs beside them.
"""

from __future__ import annotations

import os

FEW_CPUS = 4

if (os.cpu_count() or 1) <= FEW_CPUS:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import platform
from importlib import metadata
from typing import Any

import psutil
import torch

RECORDED_PREFIXES = ("OMP_", "GOMP_", "KMP_", "MKL_", "NUMBA_", "OFFLOAD_", "PYTORCH_", "CUDA_", "CUBLAS_")
RECORDED_PACKAGES = ("torch", "numba", "llvmlite", "numpy", "transformers", "triton")


def describe(device: torch.device) -> dict[str, Any]:
    """Everything about the machine and its software that changes a timing."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "allowed_cpus": _num_allowed_cpus(),
        "host_memory_bytes": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cuda": torch.version.cuda,
        "torch_threads": torch.get_num_threads(),
        "packages": {name: _version(name) for name in RECORDED_PACKAGES},
        "variables": {k: v for k, v in sorted(os.environ.items()) if k.startswith(RECORDED_PREFIXES)},
    }


def default_device() -> torch.device:
    """The first CUDA device where there is one (under torchrun: this rank's), else the CPU."""
    return (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def _num_allowed_cpus() -> int | None:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
