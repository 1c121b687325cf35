"""The mixture of experts that the scripts measure, against a loop over tokens."""

from __future__ import annotations

from typing import Any

import _experts
import pytest
import torch
import torch.nn.functional as F
from _experts import SparseMLP, grouped_linear, has_grouped_product, looped_linear, sort_routes
from _models import Decoder, Head, LanguageModel, build_model, num_parameters
from _shapes import SHAPES
from torch import Tensor

import offload

HIDDEN, EXPERTS, CHOSEN, WIDTH = 32, 6, 2, 16


def make_block(dtype: torch.dtype = torch.float32, device: str = "cpu") -> SparseMLP:
    torch.manual_seed(0)
    block = SparseMLP(HIDDEN, EXPERTS, CHOSEN, WIDTH)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        block.router[2] = 0
        block.router[2, 0] = -100  # with a first feature above one it gets no token
    return block.to(device, dtype)


def naive(block: SparseMLP, x: Tensor) -> Tensor:
    """Qwen3's definition, for one token and expert at a time."""
    outputs = []
    for token in x.flatten(0, -2):
        probabilities = (block.router @ token).float().softmax(0)
        best, experts = probabilities.topk(block.experts_per_token)
        shares = best / best.sum()
        parts = [
            share.to(x.dtype)
            * (block.down_proj[e] @ (F.silu(block.gate_proj[e] @ token) * (block.up_proj[e] @ token)))
            for share, e in zip(shares, experts, strict=True)
        ]
        outputs.append(sum(parts))
    return torch.stack(outputs).view_as(x)


@pytest.fixture(params=["grouped", "looped"])
def product(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to multiply; the first only where this torch has it for the CPU."""
    if request.param == "looped":
        monkeypatch.setattr(_experts, "has_grouped_product", lambda device, dtype: False)
    elif not has_grouped_product(torch.device("cpu"), torch.float32):
        pytest.skip("no grouped product on this CPU")
    return str(request.param)


@pytest.mark.usefixtures("product")
def test_a_block_is_a_loop_over_tokens() -> None:
    block = make_block()
    x = torch.randn(3, 11, HIDDEN)
    x[..., 0] = 1 + x[..., 0].abs()
    x.requires_grad_()
    direction = torch.randn_like(x)
    leaves = [x, *block.parameters()]
    out, expected = block(x), naive(block, x)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-6)
    gradients, wanted = (torch.autograd.grad((y * direction).sum(), leaves) for y in (out, expected))
    for name, gradient, want in zip(
        ["x", *(name for name, _ in block.named_parameters())], gradients, wanted, strict=True
    ):
        torch.testing.assert_close(
            gradient, want, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    chosen = F.linear(x, block.router).topk(CHOSEN).indices
    assert 2 not in chosen
    assert not gradients[2][2].any()
    assert gradients[2][chosen.unique()].flatten(1).any(1).all()


@pytest.mark.parametrize("num_tokens", [1, 7, 40])
def test_routes_are_the_pairs_sorted_by_expert(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    experts = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(num_tokens)])
    routes = sort_routes(experts, EXPERTS)
    pairs = experts.flatten()
    assert torch.equal(pairs[routes.order], pairs.sort().values)
    assert torch.equal(routes.order[routes.places.flatten()], torch.arange(len(pairs)))
    assert torch.equal(routes.tokens, routes.order // CHOSEN)
    assert routes.ends.dtype == torch.int32
    assert torch.equal(routes.ends.diff(prepend=torch.zeros(1)), pairs.bincount(minlength=EXPERTS).float())


@pytest.mark.usefixtures("product")
def test_rows_of_each_group_meet_its_weights() -> None:
    rows, weights = torch.randn(9, 8, requires_grad=True), torch.randn(4, 12, 8, requires_grad=True)
    ends = torch.tensor([0, 4, 4, 9], dtype=torch.int32)  # the first and the third group are empty
    expected = torch.cat([rows[:4] @ weights[1].t(), rows[4:] @ weights[3].t()])
    out = grouped_linear(rows, weights, ends)
    torch.testing.assert_close(out, expected)
    direction = torch.randn_like(out)
    gradients, wanted = (torch.autograd.grad(y, (rows, weights), direction) for y in (out, expected))
    torch.testing.assert_close(gradients, wanted)


def test_rows_that_are_not_aligned_are_multiplied_in_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_experts, "has_grouped_product", lambda device, dtype: pytest.fail("asked"))
    rows, weights, ends = torch.randn(5, 3), torch.randn(2, 7, 3), torch.tensor([2, 5], dtype=torch.int32)
    assert torch.equal(grouped_linear(rows, weights, ends), looped_linear(rows, weights, ends))


def refuses(*arguments: Any, **options: Any) -> Tensor:
    raise NotImplementedError("not on this device")


def leaves_empty_groups(rows: Tensor, other: Tensor, *, offs: Tensor) -> Tensor:
    """What some devices do: right but for the gradient of a group without rows."""
    if other.dim() == 3:
        return looped_linear(rows, other.transpose(-2, -1), offs)
    sizes = offs.diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist()
    parts = zip(rows.split(sizes, dim=1), other.split(sizes), strict=True)
    return torch.stack([a @ b if a.numel() else torch.full((len(a), b.shape[1]), 3e4) for a, b in parts])


@pytest.mark.parametrize("broken", [refuses, leaves_empty_groups])
def test_a_grouped_product_that_fails_or_errs_is_not_used(
    broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_grouped_mm", broken)
    has_grouped_product.cache_clear()
    try:
        assert not has_grouped_product(torch.device("cpu"), torch.float32)
    finally:
        has_grouped_product.cache_clear()


# The model --------------------------------------------------------------------------------------------------


def test_the_published_model_has_its_size() -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    with torch.device("meta"):
        model = LanguageModel(Decoder(shape, checkpointing=True), Head(shape))
    assert num_parameters(model) == shape.counted().numel == 30_532_122_624
    assert num_parameters(model.backbone.layers[0]) == shape.counted().layer_numel(sparse=True)


def test_recomputed_layers_route_as_before() -> None:
    """Checkpointing changes no bit; a second build of the same seed neither."""
    ids = torch.arange(24).view(2, 12)
    models = [
        build_model(SHAPES["tiny-moe"], torch.device("cpu"), dtype=torch.bfloat16, checkpointing=on)
        for on in (True, False)
    ]
    for model in models:
        model(ids, ids + 1).backward()
    for (name, one), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert one.dtype == torch.bfloat16, name  # the router's too
        assert torch.equal(one, other), name
        assert one.grad is not None, name
        assert other.grad is not None, name
        assert torch.equal(one.grad, other.grad), name


def test_experts_are_in_the_chunk_of_their_layer() -> None:
    model = build_model(SHAPES["tiny-moe"], torch.device("cpu"), dtype=torch.bfloat16)
    with offload.AdamW(model.named_parameters(), mode="wavefront", backend="torch") as optimizer:
        sizes = {chunk.name: chunk.numel for chunk in optimizer.plan.chunks}
    layer = model.backbone.layers[1]
    assert sizes["backbone.layers.1"] >= num_parameters(layer) > num_parameters(layer.mlp)
    assert sum(not name.startswith("misc") for name in sizes) == len(model.backbone.layers)


def test_experts_are_refused_by_the_other_implementation() -> None:
    with pytest.raises(SystemExit, match="plain"):
        build_model(
            SHAPES["tiny-moe"],
            torch.device("cpu"),
            dtype=torch.bfloat16,
            implementation="transformers",
        )


# On a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_block_on_the_device_is_that_of_the_host() -> None:
    block, reference = make_block(torch.bfloat16, "cuda"), make_block(torch.bfloat16).float()
    reference.load_state_dict({name: value.float().cpu() for name, value in block.state_dict().items()})
    x = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    # Logits that round to the same BF16 number, or to others, choose other experts: leave tokens out whose choice is close.
    logits = F.linear(x.float(), reference.router)
    best = logits.topk(CHOSEN + 1).values
    x = x[best[:, CHOSEN - 1] - best[:, CHOSEN] > 0.1]
    assert len(x) > 20
    one, other = x.cuda().requires_grad_(), x.float().requires_grad_()
    out, expected = block(one), reference(other)
    torch.testing.assert_close(out.float().cpu(), expected, rtol=0.05, atol=0.05)
    out.sum().backward()
    expected.sum().backward()
    assert one.grad is not None
    assert other.grad is not None
    torch.testing.assert_close(one.grad.float().cpu(), other.grad, rtol=0.05, atol=0.1)
    for name, parameter in block.named_parameters():
        wanted = reference.get_parameter(name).grad
        assert parameter.grad is not None
        assert wanted is not None
        scale = wanted.abs().max().item()
        torch.testing.assert_close(parameter.grad.float().cpu(), wanted, rtol=0.05, atol=0.03 * scale)


@pytest.mark.gpu
def test_forward_and_backward_never_wait_for_the_device() -> None:
    if not has_grouped_product(torch.device("cuda"), torch.bfloat16):
        pytest.skip("no grouped product on this device")
    block = make_block(torch.bfloat16, "cuda")
    x = torch.randn(128, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    block(x).sum().backward()  # libraries load, and the product is tried
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        block(x).square().sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_two_runs_on_the_device_have_the_same_bits() -> None:
    block = make_block(torch.bfloat16, "cuda")
    x = torch.randn(512, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    runs = []
    for _ in range(2):
        out = block(x)
        runs.append([out, *torch.autograd.grad(out.square().sum(), [x, *block.parameters()])])
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
