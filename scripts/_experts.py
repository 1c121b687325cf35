"""A mixture of gated MLPs: each token goes through a few of many, chosen by a router.

The experts' weights are stacked, [experts, out, in], one parameter per projection, so that FSDP2 shards them by experts and
an optimizer sees three large parameters per layer. Tokens are sorted by expert; each projection is then one grouped matrix
product. On a GPU nothing here waits for the device but the fallback, which has to know how many tokens each expert got.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROW_BYTES = 16
"""Rows of what the grouped product reads must start on multiples of it."""


class SparseMLP(nn.Module):
    """Router and experts, with the weights of a token's experts normalized to a sum of one, as Qwen3 has it.

    The router's weight is stored as all others are (BF16); the softmax over the chosen logits is FP32. There is no loss
    that balances the experts' loads.
    """

    def __init__(
        self, hidden: int, num_experts: int, experts_per_token: int, expert_intermediate: int
    ) -> None:
        super().__init__()
        self.experts_per_token = experts_per_token
        self.router = nn.Parameter(torch.empty(num_experts, hidden))
        self.gate_proj = nn.Parameter(torch.empty(num_experts, expert_intermediate, hidden))
        self.up_proj = nn.Parameter(torch.empty(num_experts, expert_intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, expert_intermediate))

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to the same shape and dtype."""
        tokens = x.flatten(0, -2)
        logits = F.linear(tokens, self.router.to(x.dtype))
        chosen, experts = logits.topk(self.experts_per_token, dim=-1)
        # The softmax over all, divided by the sum of the chosen ones, is the softmax over these.
        shares = chosen.float().softmax(-1).to(x.dtype)
        routes = sort_routes(experts, self.router.shape[0])
        rows: Tensor = _Spread.apply(tokens, routes)
        gates, ups = (grouped_linear(rows, w, routes.ends) for w in (self.gate_proj, self.up_proj))
        inner = F.silu(gates) * ups
        # Shares enter before the last product, which is linear: there a row is narrower.
        inner = inner * shares.flatten().index_select(0, routes.order).unsqueeze(1)
        out: Tensor = _Collect.apply(grouped_linear(inner, self.down_proj, routes.ends), routes)
        return out.view_as(x)


# Routes -----------------------------------------------------------------------------------------------------


class Routes(NamedTuple):
    """Pairs of token and expert, sorted by expert; a pair's number is ``token * experts_per_token + choice``.

    `order`: pair numbers, sorted, int64 [pairs]. `places`: where each pair went, the inverse, int64 [tokens,
    experts_per_token]. `ends`: where each expert's pairs end, int32 [experts].
    """

    order: Tensor
    places: Tensor
    ends: Tensor

    @property
    def tokens(self) -> Tensor:
        """The token of each sorted pair."""
        return self.order // self.places.shape[1]


def sort_routes(experts: Tensor, num_experts: int) -> Routes:
    """`experts`: of each token, the numbers of its experts, int64 [tokens, experts_per_token]."""
    by_expert, order = experts.flatten().sort(stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    numbers = torch.arange(num_experts, device=order.device)
    # Counting with bincount would wait for the device.
    ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)
    return Routes(order, places.view_as(experts), ends)


class _Spread(torch.autograd.Function):
    """[tokens, width] to [pairs, width]: each token's row once for each of its experts.

    Its gradient is a sum over a token's pairs, in their order. Autograd's own, for a gather, adds atomically: not
    deterministic, and slow in BF16.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, routes: Routes) -> Tensor:
        ctx.save_for_backward(routes.places)
        return tokens.index_select(0, routes.tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _sum_of_pairs(gradients[0], ctx.saved_tensors[0]), None


class _Collect(torch.autograd.Function):
    """[pairs, width] to [tokens, width]: the sum over a token's experts; the transpose of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, pairs: Tensor, routes: Routes) -> Tensor:
        ctx.save_for_backward(routes.tokens)
        return _sum_of_pairs(pairs, routes.places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].index_select(0, ctx.saved_tensors[0]), None


def _sum_of_pairs(pairs: Tensor, places: Tensor) -> Tensor:
    return pairs.index_select(0, places.flatten()).view(*places.shape, -1).sum(1)


# Products ---------------------------------------------------------------------------------------------------


def grouped_linear(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows ``[ends[i - 1], ends[i])`` times ``weights[i].T``, in the rows' dtype: [pairs, in] to [pairs, out].

    Args:
        rows: [pairs, in]; the last group ends at their end.
        weights: [groups, out, in].
        ends: int32 [groups], not falling; a group may be empty.
    """
    weights = weights.to(rows.dtype)
    aligned = all(size * rows.element_size() % ROW_BYTES == 0 for size in weights.shape[1:])
    if aligned and has_grouped_product(rows.device, rows.dtype):
        return torch._grouped_mm(rows, weights.transpose(-2, -1), offs=ends)
    return looped_linear(rows, weights, ends)


def looped_linear(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """`grouped_linear` as one product per group. Waits for the device, to know the groups' sizes."""
    bounds = [0, *ends.tolist()]
    sizes = [stop - start for start, stop in pairwise(bounds)]
    # unbind: the gradients of all groups are stacked once; that of an index would be a whole tensor of zeros per group.
    groups = zip(rows.split(sizes), weights.unbind(0), strict=True)
    return torch.cat([group @ weight.t() for group, weight in groups])


@cache
def has_grouped_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``torch._grouped_mm`` gives on this device what a loop gives, an empty group's gradient of zeros included.

    Releases and devices differ in that. Tried once, without autograd: this may be called inside a checkpointed layer.
    """
    if not hasattr(torch, "_grouped_mm"):
        return False
    num_groups, size = 4, 32
    with torch.no_grad():
        values = torch.arange(size * size, device=device).remainder(7).view(size, size) - 3
        rows = values.to(dtype)
        weights = torch.stack([rows + i for i in range(num_groups)])
        ends = torch.tensor([5, 5, 18, size], dtype=torch.int32, device=device)
        torch.full(
            (num_groups, size, size), torch.nan, dtype=dtype, device=device
        )  # what a lazy kernel would return
        try:
            product = torch._grouped_mm(rows, weights.transpose(-2, -1), offs=ends)
            gradient = torch._grouped_mm(rows.t(), rows, offs=ends)  # as that of the weights is computed
        except (RuntimeError, NotImplementedError):
            return False
        parts = rows.split([5, 0, 13, size - 18])
        expected = torch.stack([part.t() @ part for part in parts])
        # Small whole numbers: exact in every order of summation, but for what the result's own rounding leaves.
        return torch.allclose(
            product, looped_linear(rows, weights, ends), rtol=1e-2, atol=0.5
        ) and torch.allclose(gradient, expected, rtol=1e-2, atol=0.5)
