"""What the steppers of one engine are made of."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from offload.config import OffloadConfig
from offload.construction import DEVICE_KERNELS
from offload.kernels.backend import Backend, Variant
from offload.kernels.numba_backend import NumbaBackend
from offload.kernels.rule import KernelRule
from offload.kernels.torch_backend import TorchBackend
from offload.layout import Kind
from offload.options import Options
from offload.parameters import ParamRecord
from offload.report import StageClock
from offload.schedule.plan import Plan
from offload.schedule.updater import DeviceUpdater, Updater, make_device_updater
from offload.schedule.worker import Worker
from offload.threads import Budget, bind_current_thread
from offload.transfer.slabs import SlabMaker
from offload.undo import Undo

__all__ = ["Parts", "make_backend", "make_hybrid_updater", "make_slab_maker", "make_updater"]


@dataclass(frozen=True)
class Parts:
    """What an engine's steppers are made of, and share. Nobody keeps it: they take from it what they need.

    Whoever makes a part of an engine that is to be closed adds it to `undo`.

    Threads for kernels on the host are no part of it, because an engine that steps on the device alone has none.
    """

    made: Plan
    device: torch.device
    rule: KernelRule
    records: Sequence[ParamRecord]
    options: Options
    worker: Worker
    clock: StageClock
    undo: Undo
    given: Collection[int] = ()
    """Indices of the parameters whose masters are given."""

    @property
    def config(self) -> OffloadConfig:
        """Of the options."""
        return self.options.config

    @property
    def on_gpu(self) -> bool:
        """Whether parameters are on a GPU."""
        return self.device.type == "cuda"

    @property
    def kinds(self) -> set[Kind]:
        """Of all parameters."""
        return {record.kind for record in self.records}

    def weights(self, *, given: bool) -> set[str]:
        """Dtypes of the weights whose masters are given, or are not."""
        return {record.kind.weight for record in self.records if (record.index in self.given) is given}

    @property
    def speculates(self) -> bool:
        """Whether the plan has a second set of state."""
        return self.made.shadow_bytes > 0


def make_backend(parts: Parts, budget: Budget, kinds: Collection[Kind] = ()) -> Backend:
    """The host's kernels. What steps over `kinds` will call is compiled when they start, the rest when first used."""
    rule, options = parts.rule, parts.options
    if options.backend == "torch":
        return TorchBackend(rule, num_threads=budget.num_threads, flush_denormals=options.flush_denormals)
    return NumbaBackend(
        rule,
        num_threads=budget.num_threads,
        flush_denormals=options.flush_denormals,
        variants=_variants(kinds, options, speculates=parts.speculates),
        cache_dir=options.config.kernel_cache_dir,
        measures=options.needs_norm_first,
        loads=parts.weights(given=False) if kinds else (),
        checks=parts.weights(given=True) if kinds else (),
        stage=parts.clock.construction.stage,
    )


def make_slab_maker(parts: Parts, budget: Budget) -> SlabMaker:
    """Memory of the host, touched by as many threads as the kernels have, on the same CPUs."""
    return SlabMaker(
        num_threads=budget.num_threads,
        bind=partial(bind_current_thread, budget.cpus),
        device=parts.device if parts.on_gpu else None,
        timeout_s=parts.config.timeout_s,
        stage=parts.clock.construction.stage,
    )


def make_updater(parts: Parts, *, own_masters: bool = False) -> Updater:
    """The device's kernels, or torch's where there are none.

    Args:
        own_masters: FP32 weights are masters themselves, and no separate weight is written.
    """
    variants = _variants(parts.kinds, parts.options)
    if own_masters:
        variants = _with_own_masters(variants)
    with parts.clock.construction.stage(DEVICE_KERNELS):
        return make_device_updater(
            parts.device, parts.rule, flush_denormals=parts.options.flush_denormals, variants=variants
        )


def make_hybrid_updater(parts: Parts) -> Updater:
    """The device's kernels, started. Streamed FP32 weights are their own masters, those of device chunks are not.

    Raises:
        KernelError: there are none here, and torch's have other bits than the host's.
    """
    variants = _variants(parts.kinds, parts.options)
    updater = DeviceUpdater(
        parts.device,
        parts.rule,
        flush_denormals=parts.options.flush_denormals,
        variants=list(dict.fromkeys([*variants, *_with_own_masters(variants)])),
    )
    with parts.clock.construction.stage(DEVICE_KERNELS):
        updater.start()
    return updater


def _with_own_masters(variants: Sequence[Variant]) -> list[Variant]:
    return [replace(variant, weight=None) if variant.weight == "fp32" else variant for variant in variants]


def _variants(kinds: Collection[Kind], options: Options, *, speculates: bool = False) -> list[Variant]:
    """What steps will call, as far as it can be foreseen."""
    return [
        Variant(
            grad=kind.grad,  # type: ignore[arg-type]
            weight=kind.weight,  # type: ignore[arg-type]
            sums=options.fused_sums or speculates,
            acc=acc,
            new_state=new_state,
        )
        for kind in sorted(kinds)
        for acc in ([False, True] if options.accumulation_steps > 1 else [False])
        for new_state in ([False, True] if speculates else [False])
    ]
