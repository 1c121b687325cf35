#!/usr/bin/env python
"""Measure the host AdamW kernel against torch's fused pipeline and against the host's memory bandwidth.

    python scripts/bench_kernel.py [--numel N] [--threads T] [--repeats R] [--json FILE]

All contenders work on the same huge-page-advised arrays with the same number of threads, interleaved in one run; figures
are medians. The pipeline is what a BF16 model needs from torch: gradient BF16 to FP32, fused FP32 AdamW, weight FP32 to
BF16, into preallocated tensors. The native kernel is the same update in C++ (native_adamw.cpp), compiled for this machine
where there is a compiler, which the library itself never asks for. The bandwidth is the better of two triads
``a = b + s * c`` (2 reads, 1 write), with ordinary and with non-temporal stores. The update moves 28 bytes per parameter.
"""

from __future__ import annotations

import os

# Read once, by libgomp, before torch is imported: a team that spins while idle would disturb the next contender.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import json
import mmap
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numba
import numpy as np
import torch
from _native import load_native

from offload.kernels.backend import TileArrays, Variant
from offload.kernels.blocks import BLOCK, LINE, make_blocks
from offload.kernels.buffers import make_stage
from offload.kernels.jit import Kernel, inner
from offload.kernels.numba_backend import NumbaBackend
from offload.kernels.rule import AdamWRule
from offload.kernels.shares import items
from offload.kernels.stream import drain, fence

GROUP: dict[str, Any] = {
    "lr": 1e-3,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "maximize": False,
}
UPDATE_BYTES = 28  # read: gradient 2, master 4, moments 8; written: master 4, moments 8, weight 2
TRIAD_BYTES = 12
STEP = 10
HUGE_PAGE = 2 << 20
DENORMAL_BITS = 0x000AE398  # 1e-39, a denormal float32
VARIANTS = {
    "bf16 -> bf16": Variant(),
    "bf16 -> bf16, norm": Variant(sums=True),
    "bf16 -> bf16, accumulator": Variant(acc=True),
    "bf16 -> bf16, accumulator, norm": Variant(acc=True, sums=True),
    "bf16 -> bf16, old state kept": Variant(new_state=True),
    "fp32 -> fp32": Variant(grad="fp32", weight="fp32"),
    "fp32, master is the weight": Variant(grad="fp32", weight=None),
}


def huge_array(numel: int, dtype: Any) -> np.ndarray:
    """An untouched array on a private anonymous mapping, aligned to and advised for huge pages."""
    num_bytes = numel * np.dtype(dtype).itemsize
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return np.empty(numel, dtype)
    mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, np.uint8)
    offset = -whole.ctypes.data % HUGE_PAGE
    return whole[offset : offset + num_bytes].view(dtype)


@inner
def triad_span(a, b, c):
    for i in range(a.size):
        a[i] = b[i] + np.float32(3.0) * c[i]


@inner
def triad_streamed_block(block, a, b, c):
    stage = make_stage(a)
    for first in range(block * BLOCK, min(block * BLOCK + BLOCK, a.size), LINE):
        last = min(first + LINE, a.size)
        triad_span(stage[: last - first], b[first:last], c[first:last])
        drain(stage, a, first, last)
    fence()


@Kernel
def triad(worker, call):
    shares, a, b, c = call[0]
    for block in items(shares, worker):
        start, stop = block * BLOCK, min(block * BLOCK + BLOCK, a.size)
        triad_span(a[start:stop], b[start:stop], c[start:stop])


@Kernel
def triad_streamed(worker, call):
    shares, a, b, c = call[0]
    for block in items(shares, worker):
        triad_streamed_block(block, a, b, c)


class Arrays:
    """One parameter's state, shared by all contenders, and their scratch."""

    def __init__(self, numel: int, backend: NumbaBackend) -> None:
        def zeros(dtype: Any, length: int = numel) -> np.ndarray:
            array = huge_array(length, dtype)
            backend.fill_zero(array)  # first touched by the team that will use it
            return array

        self.numel = numel
        self.master, self.exp_avg, self.exp_avg_sq = zeros(np.float32), zeros(np.float32), zeros(np.float32)
        self.grad_bits, self.weight_bits = zeros(np.uint16), zeros(np.uint16)
        self.grad, self.acc = zeros(np.float32), zeros(np.float32)
        self.weight = zeros(np.float32)
        self.new_state = (zeros(np.float32), zeros(np.float32), zeros(np.float32))
        self.sums, self.nonfinite = zeros(np.float64, numel // 1024), zeros(np.uint8, numel // 1024)
        self.blocks = make_blocks([(0, numel, 0)])
        self.fill()

    def fill(self) -> None:
        """An ordinary state of training."""
        pattern = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
        for start in range(0, self.numel, pattern.size):
            values = pattern[: self.numel - start]
            chosen = slice(start, start + values.size)
            self.master[chosen], self.grad[chosen] = values, values * 1e-3
            self.exp_avg[chosen], self.exp_avg_sq[chosen] = values * 1e-3, values * values * 1e-6
        self.grad_bits[:] = self.grad.view(np.uint32) >> 16

    def fill_denormal(self) -> None:
        """A row that has had no gradient for long. By bits: this thread flushes denormals, also where it writes them."""
        self.grad_bits[:] = 0
        for moment in (self.exp_avg, self.exp_avg_sq):
            moment.view(np.uint32)[:] = DENORMAL_BITS

    def tile(self, variant: Variant) -> TileArrays:
        weights = {"bf16": self.weight_bits, "fp32": self.weight, None: None}
        return TileArrays(
            grad=self.grad_bits if variant.grad == "bf16" else self.grad,
            acc=self.acc if variant.acc else None,
            master=self.master,
            moments=(self.exp_avg, self.exp_avg_sq),
            weight=weights[variant.weight],
            sums=self.sums if variant.sums else None,
            nonfinite=self.nonfinite if variant.sums else None,
            blocks=self.blocks,
            new_state=self.new_state if variant.new_state else None,
        )


def make_fused_pipeline(arrays: Arrays) -> Callable[[], None]:
    """BF16 gradient to FP32, torch's fused AdamW, FP32 master to BF16 weight; nothing allocated per call."""
    grad_bf16, weight_bf16 = (
        torch.from_numpy(bits).view(torch.bfloat16) for bits in (arrays.grad_bits, arrays.weight_bits)
    )
    grad, master = torch.from_numpy(arrays.grad), torch.from_numpy(arrays.master)
    exp_avg, exp_avg_sq = torch.from_numpy(arrays.exp_avg), torch.from_numpy(arrays.exp_avg_sq)
    step = torch.tensor(float(STEP))
    (beta1, beta2), eps = GROUP["betas"], GROUP["eps"]

    def run() -> None:
        grad.copy_(grad_bf16)
        torch._fused_adamw_(
            [master],
            [grad],
            [exp_avg],
            [exp_avg_sq],
            [],
            [step],
            lr=GROUP["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=GROUP["weight_decay"],
            eps=eps,
            amsgrad=False,
            maximize=False,
        )
        weight_bf16.copy_(master)

    return run


def interleave(
    contenders: dict[str, Callable[[], None]], repeats: int, prepare: Callable[[], None] | None = None
) -> dict[str, float]:
    """The median seconds of each contender; every round runs all of them. ``prepare`` comes before each, untimed."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for round_index in range(repeats + 1):
        for name, run in contenders.items():
            if prepare is not None:
                prepare()
            begin = time.perf_counter()
            run()
            if round_index:  # the first round warms up
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure_compilation(threads: int) -> float:
    """Seconds to compile what an optimizer with a norm needs, in a process that has compiled nothing."""
    backend = NumbaBackend(AdamWRule, num_threads=threads, variants=[Variant(sums=True)], loads=["bf16"])
    begin = time.perf_counter()
    backend.start()
    seconds = time.perf_counter() - begin
    backend.close()
    return seconds


def measure(numel: int, threads: int, repeats: int) -> dict[str, Any]:
    torch.set_flush_denormal(True)
    torch.set_num_threads(threads)
    compile_s = measure_compilation(threads)
    backends = {
        flush: NumbaBackend(
            AdamWRule, num_threads=threads, flush_denormals=flush, variants=tuple(VARIANTS.values())
        )
        for flush in (True, False)
    }
    for backend in backends.values():
        backend.start()
    team = backends[True].team
    arrays = Arrays(numel, backends[True])
    rows, select = np.array([AdamWRule.row(GROUP, STEP)], np.float32), np.ones(1, np.uint8)

    def update(variant: Variant, flush: bool = True) -> Callable[[], None]:
        tile = arrays.tile(variant)
        return lambda: backends[flush].update(tile, rows, select)

    def run_triad(kernel: Kernel) -> Callable[[], None]:
        operands = (arrays.exp_avg, arrays.master, arrays.grad)
        kernel.compile(operands)
        return lambda: team.run(kernel, -(-numel // BLOCK), operands)

    contenders = {"update": update(Variant())}
    native, native_words = load_native()
    if native is not None:
        state = (arrays.master, arrays.exp_avg, arrays.exp_avg_sq)
        contenders["native"] = lambda: native(threads, rows[0], arrays.grad_bits, *state, arrays.weight_bits)
    update(Variant())()
    seconds = interleave(
        {
            **contenders,
            "fused pipeline": make_fused_pipeline(arrays),
            "triad": run_triad(triad),
            "triad, streamed": run_triad(triad_streamed),
        },
        repeats,
        arrays.fill if numel <= 1 << 20 else None,
    )
    arrays.fill()
    by_variant = interleave({name: update(variant) for name, variant in VARIANTS.items()}, repeats)
    denormal = interleave(
        {f"flush={flush}": update(Variant(), flush) for flush in (True, False)},
        max(3, repeats // 3),
        arrays.fill_denormal,
    )
    made = report(numel, seconds, by_variant, denormal)
    more = {"compile_s": compile_s, "native_kernel": native_words, "environment": environment(team)}
    return made | more


def report(
    numel: int, seconds: dict[str, float], by_variant: dict[str, float], denormal: dict[str, float]
) -> dict[str, Any]:
    bandwidth = numel * TRIAD_BYTES / min(seconds["triad"], seconds["triad, streamed"])
    return {
        "numel": numel,
        "speedup_vs_fused_pipeline": seconds["fused pipeline"] / seconds["update"],
        "share_of_bandwidth": numel * UPDATE_BYTES / seconds["update"] / bandwidth,
        "update_gparam_per_s": numel / seconds["update"] / 1e9,
        "native_gparam_per_s": numel / seconds["native"] / 1e9 if "native" in seconds else None,
        "speedup_vs_native": seconds["native"] / seconds["update"] if "native" in seconds else None,
        "fused_pipeline_gparam_per_s": numel / seconds["fused pipeline"] / 1e9,
        "bandwidth_2r1w_gb_per_s": bandwidth / 1e9,
        "triad_gb_per_s": numel * TRIAD_BYTES / seconds["triad"] / 1e9,
        "triad_streamed_gb_per_s": numel * TRIAD_BYTES / seconds["triad, streamed"] / 1e9,
        "gparam_per_s_by_variant": {name: numel / value / 1e9 for name, value in by_variant.items()},
        "denormal_gparam_per_s": {name: numel / value / 1e9 for name, value in denormal.items()},
    }


def environment(team: Any) -> dict[str, Any]:
    names = [name for name in os.environ if name.startswith(("OMP_", "GOMP_", "NUMBA_", "MKL_", "KMP_"))]
    return {
        "threads": team.num_threads,
        "layer": team.name,
        "torch_threads": torch.get_num_threads(),
        "cpus_allowed": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "machine": platform.machine(),
        "cpu": numba.config.CPU_NAME or _cpu_model(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "numba": numba.__version__,
        "variables": {name: os.environ[name] for name in sorted(names)},
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return platform.processor()
    models = (
        line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
    )
    return next(models, platform.processor())


def print_table(result: dict[str, Any]) -> None:
    env = result["environment"]
    print(f"{result['numel']:,} parameters, {env['threads']} threads ({env['layer']}), {env['cpu']}")
    print(f"\n{'contender':<36}{'Gparam/s':>10}{'GB/s':>10}")
    update = result["update_gparam_per_s"]
    print(f"{'update, in place':<36}{update:>10.3f}{update * UPDATE_BYTES:>10.1f}")
    native = result["native_gparam_per_s"]
    if native is None:
        print(f"{'native C++':<36}{'-':>10}  {result['native_kernel']}")
    else:
        print(f"{'native C++':<36}{native:>10.3f}{native * UPDATE_BYTES:>10.1f}  {result['native_kernel']}")
    print(f"{'fused torch pipeline':<36}{result['fused_pipeline_gparam_per_s']:>10.3f}")
    print(f"{'2 reads 1 write, ordinary stores':<36}{'':>10}{result['triad_gb_per_s']:>10.1f}")
    print(f"{'2 reads 1 write, streamed':<36}{'':>10}{result['triad_streamed_gb_per_s']:>10.1f}")
    print(f"\n{'speedup over the fused pipeline':<36}{result['speedup_vs_fused_pipeline']:>10.2f}")
    if native is not None:
        print(f"{'speedup over the native kernel':<36}{result['speedup_vs_native']:>10.2f}")
    print(f"{'share of the 2R1W bandwidth':<36}{result['share_of_bandwidth']:>10.2f}")
    print(f"{'seconds to compile, update and norm':<36}{result['compile_s']:>10.2f}")
    for title, key in (("variant", "gparam_per_s_by_variant"), ("denormal moments", "denormal_gparam_per_s")):
        print(f"\n{title:<36}{'Gparam/s':>10}")
        for name, value in result[key].items():
            print(f"{name:<36}{value:>10.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--numel", type=int, default=1 << 26, help="parameters (rounded to 1024)")
    parser.add_argument("--threads", type=int, default=cpus)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()

    result: dict[str, Any] = {}
    numel = max(1024, options.numel // 1024 * 1024)

    # A thread of its own: its OpenMP teams are fresh and inherit its settings.
    worker = threading.Thread(target=lambda: result.update(measure(numel, options.threads, options.repeats)))
    worker.start()
    worker.join()
    if not result:
        raise SystemExit(1)  # the thread has printed its exception
    print_table(result)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
