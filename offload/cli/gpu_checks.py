"""What ``offload doctor`` says of GPUs: memory, NUMA node, PCIe link, and what crosses it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from offload import rates
from offload.cli.findings import Finding
from offload.cli.units import as_gib
from offload.errors import PinningError
from offload.streams import QUEUES, queue_advice
from offload.threads import Budget, allowed_cpus, cpus_of_node, numa_node_of_gpu
from offload.transfer.pinned import Slab

__all__ = ["gpu_findings", "pcie_link"]

PIN_BYTES = 1 << 30
SLOW_PIN_S = 0.2
"""Per GiB: 0.03 s is usual on huge pages, 0.06 to 0.2 on small ones."""


def gpu_findings(budget: Budget, *, measure: bool = True) -> Iterator[Finding]:
    """All GPUs that torch sees; rates of the current one."""
    section = "gpu"
    if not torch.cuda.is_available():
        yield Finding(section, "GPUs", 0, "none that torch sees: parameters on the CPU take the same path")
        return
    yield Finding(section, "GPUs", torch.cuda.device_count(), str(torch.cuda.device_count()))
    yield Finding(section, QUEUES, os.environ.get(QUEUES), os.environ.get(QUEUES, "not set"), queue_advice())
    for index in range(torch.cuda.device_count()):
        yield from _device_findings(index)
    if measure:
        device = torch.device("cuda", torch.cuda.current_device())
        yield _pin_finding(device)
        yield from _link_findings(device, budget)


def _device_findings(index: int) -> Iterator[Finding]:
    properties = torch.cuda.get_device_properties(index)
    major, minor = properties.major, properties.minor
    yield Finding(
        "gpu",
        f"GPU {index}",
        {"name": properties.name, "bytes": properties.total_memory, "capability": [major, minor]},
        f"{properties.name}, {as_gib(properties.total_memory)} GiB, sm_{major}{minor}",
    )
    node = numa_node_of_gpu(index)
    near = set() if node is None else cpus_of_node(node)
    far = bool(near) and not near & allowed_cpus()
    yield Finding(
        "gpu",
        f"GPU {index}, NUMA node",
        node,
        "the system does not say"
        if node is None
        else f"{node} ({len(near & allowed_cpus())} of its CPUs allowed)",
        f"no CPU near GPU {index} is allowed: gradients cross to the other socket; bind the process to node {node}"
        if far
        else None,
    )
    link = pcie_link(index)
    if link is not None:
        narrow = link["width"] < link["max_width"]
        yield Finding(
            "gpu",
            f"GPU {index}, PCIe",
            link,
            f"generation {link['generation']} of {link['max_generation']}, {link['width']} of {link['max_width']} lanes",
            f"GPU {index} uses {link['width']} of {link['max_width']} lanes: look at its slot or riser"
            if narrow
            else None,
        )


def pcie_link(index: int) -> dict[str, int] | None:
    """Generation and lanes, now and at most, from NVML; None where ``nvidia-ml-py`` is not installed or does not know.

    The generation may be low while the GPU is idle; lanes are not.
    """
    try:
        import pynvml
    except ImportError:
        return None
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
            return {
                "generation": nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
                "max_generation": nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
                "width": nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
                "max_width": nvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
            }
        finally:
            nvml.nvmlShutdown()
    except (nvml.NVMLError, AttributeError):  # virtual machines hide it; older torch has no uuid
        return None


def _pin_finding(device: torch.device) -> Finding:
    seconds = _pin_seconds(device)
    if seconds is None:
        return Finding(
            "gpu",
            "pinning",
            None,
            "refused",
            "raise `ulimit -l` (in containers --ulimit memlock=-1), or pin less",
        )
    slow = f"pinning takes {seconds:.2f} s per GiB: see huge pages above" if seconds > SLOW_PIN_S else None
    return Finding("gpu", "pinning", seconds, f"{seconds:.3f} s per GiB", slow)


def _pin_seconds(device: torch.device) -> float | None:
    slab = Slab(PIN_BYTES, name="pinning measurement", pin=True)
    try:
        slab.array(np.uint8).fill(0)
        start = time.perf_counter()
        slab.register(device)
        return (time.perf_counter() - start) * 2**30 / PIN_BYTES
    except PinningError:
        return None
    finally:
        slab.close()


def _link_findings(device: torch.device, budget: Budget) -> Iterator[Finding]:
    measured = rates.measured(device, budget.num_threads)
    for name, value in (
        ("host to device", measured.to_device_bytes),
        ("device to host", measured.to_host_bytes),
        ("each way, both busy", measured.duplex_bytes),
        ("device memory", measured.device_bytes),
    ):
        yield Finding("gpu", name, value, f"{value / 1e9:.1f} GB/s", _link_advice(name, value, measured))


def _link_advice(name: str, value: float, measured: rates.Rates) -> str | None:
    if name == "each way, both busy" and value < 0.6 * measured.to_host_bytes:
        return "the two directions slow each other down: gradients and weights share the link in a wavefront"
    if name in ("host to device", "device to host") and value < 10e9:
        return (
            f"{name} is slow ({value / 1e9:.1f} GB/s): pinning was refused, or the link is narrow or shared"
        )
    return None
