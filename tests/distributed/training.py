"""Models over several ranks, and their training beside a reference that knows nothing of ranks.

The reference is the one of `tests.training`, on whole tensors: it is fed the gradients as FSDP reduced them, gathered
from all shards, so a wrong shard, a lost one or one counted twice shows in some bit.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import offload
from tests.training import (
    Recorder,
    Reference,
    assert_same_bits,
    batches,
    hyper_by_name,
    loss_of,
    make_decoder,
    memory_order,
    two_groups,
)

MODES = ["resident", "all-at-once", "chunked-sync", "chunked-stream", "wavefront"]

Prepare = Callable[[nn.Module, int], None]
"""Called with the model before each forward, and with the micro-batch that comes (0 is the first)."""


def sharded_decoder(
    mesh: DeviceMesh | None = None,
    *,
    device: str = "cpu",
    fp32: bool = False,
    sizes: dict[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """BF16 with FP32 norms, under FSDP2: each layer a group of its own, and each norm, as its dtype differs.

    Shards are uneven (97 rows, 125 columns), and of ``scale``, which has one element, all but one are empty.
    """
    model = make_decoder(layers=2, **sizes or {}).to(device)
    for layer in model.layers:
        layer.scale = nn.Parameter(torch.ones(1, device=device))
    if not fp32:
        offload.cast_compute_weights(model, keep_fp32="norm")
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            fully_shard(module, mesh=mesh, **options)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def mesh_of(shape: tuple[int, ...], *names: str, device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, shape, mesh_dim_names=names)


def optimizer_over(model: nn.Module, mode: str, /, **options: Any) -> offload.AdamW:
    """With small tiles, one kernel thread, and torch's kernels, which need no compilation."""
    config = {"tile_numel": 1024, "threads": 1, "timeout_s": 30.0, **options.pop("config", {})}
    arguments = {"backend": "torch", "lr": 1e-3, **options}
    if options.get("overlap_forward"):
        arguments["model"] = model
    return offload.AdamW(two_groups(model), mode=mode, config=offload.OffloadConfig(**config), **arguments)


def whole(tensor: Tensor) -> Tensor:
    """Gathered from all shards over the mesh's device, where state on the host has to go first; a collective."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.cpu().clone()
    local = tensor.to_local().to(tensor.device_mesh.device_type)
    return DTensor(local, tensor._spec, requires_grad=False).full_tensor().cpu()


def whole_gradients(recorder: Recorder) -> dict[str, list[Tensor]]:
    return {name: [whole(part) for part in parts] for name, parts in sorted(recorder.take().items())}


def norm_of(gradients: dict[str, list[Tensor]]) -> float:
    """Global L2 norm of whole gradients, each micro-batch added in FP32."""
    totals = [functools.reduce(torch.add, [part.float() for part in parts]) for parts in gradients.values()]
    return float(torch.stack([(total.double() ** 2).sum() for total in totals]).sum().sqrt())


def train_beside_reference(
    model: nn.Module,
    optimizer: Any,
    recorder: Recorder,
    *,
    steps: int = 3,
    micro_batches: int = 1,
    prepare: Prepare = lambda model, part: None,
    parts_per_step: int | None = None,
    data: list[Tensor] | None = None,
) -> list[Any]:
    """Train, the reference along with it, and compare every bit; what `last_step` was after each step.

    ``parts_per_step``: gradients per parameter and step; FSDP reduces only once where it skips a sync.
    """
    device = next(model.parameters()).device
    reference = Reference({name: whole(p).float() for name, p in model.named_parameters()})
    reports, norms = [], {}
    for step, ids in enumerate(data or batches(steps)):
        for part in range(micro_batches):
            prepare(model, part)
            mine = ids.roll((step + part + dist.get_rank()) % ids.shape[1], 1).to(device)
            loss_of(model, mine).backward()
        gradients = whole_gradients(recorder)
        assert {len(parts) for parts in gradients.values()} == {parts_per_step or micro_batches}
        optimizer.step()
        report = optimizer.last_step
        norms[step + 1] = norm_of(gradients)
        expected = norms[report.step]
        assert abs(report.grad_norm - expected) <= 1e-12 * expected
        if not report.skipped:
            reference.step(gradients, hyper_by_name(optimizer, model), report.clip_coefficient)
        optimizer.zero_grad()
        reports.append(report)
    assert_whole_state(model, optimizer, reference)
    return reports


def assert_whole_state(model: nn.Module, optimizer: Any, reference: Reference) -> None:
    optimizer.synchronize()
    for name, parameter in model.named_parameters():
        weight = whole(parameter)
        state = {key: whole(value) for key, value in optimizer.state[parameter].items() if key != "step"}
        state.setdefault("master", weight)
        for key, expected in reference.state(name).items():
            assert_same_bits(memory_order(state[key]), expected, f"{name}: {key}")
        assert torch.equal(weight, state["master"].to(weight.dtype)), f"{name}: weight is not its master"


def state_bits(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """All weights and state, whole, to be compared between modes and ranks."""
    optimizer.synchronize()
    found = {name: whole(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state[parameter].items():
            found[f"{name}: {key}"] = whole(value)
    return found


def local_bits(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """The same of this rank alone; no collective."""
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in [("weight", parameter), *optimizer.state[parameter].items()]:
            value = value.detach()
            local = value.to_local() if isinstance(value, DTensor) else value
            found[f"{name}: {key}"] = local.cpu().clone()
    return found


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), f"{name} differs"


@contextlib.contextmanager
def poisoned(model: nn.Module, name: str, rank: int) -> Iterator[None]:
    """Within it, a NaN stands in this rank's shard of the reduced gradient of ``name``, and in no other."""
    parameter = dict(model.named_parameters())[name]

    def poison(parameter: Tensor) -> None:
        if dist.get_rank() == rank:
            parameter.grad._local_tensor.view(-1)[-1] = torch.nan

    hooks = parameter._post_accumulate_grad_hooks
    later = list(hooks.items())
    handle = parameter.register_post_accumulate_grad_hook(poison)
    for key, hook in later:  # ours must run before the optimizer's
        del hooks[key]
        hooks[key] = hook
    try:
        yield
    finally:
        handle.remove()
