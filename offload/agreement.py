"""What the ranks that train one sharded model tell each other: one collective per step.

Each rank brings what it knows of the step (`Share`); all see the same `Agreement`, bit for bit, because the parts are
gathered and then added in the order of ranks by each of them. A rank that fails before that says so instead, and the
others raise; one that is gone is noticed by the collective's deadline.

Which ranks: all of the mesh from which the parameters' meshes were sliced. Plain tensors among sharded ones are
replicas, the same on all of these ranks, unless they are named as local (``OffloadConfig.rank_local``). An optimizer that
has plain tensors only tells nobody anything, as in torch: under DistributedDataParallel all ranks see the same gradients.
"""

from __future__ import annotations

import datetime as dt
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from offload.config import sample
from offload.distributed import mesh_ranks, root_mesh
from offload.errors import GradientError, OffloadError, ParameterError, PeerError

__all__ = ["Agreement", "Part", "Ranks", "Share"]

logger = logging.getLogger(__name__)

all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Equal tensors of all ranks into one. torch 2.13 has it under the first name, and warns of the second."""

LONGEST_S = 1e9
"""Of a wait: thirty years, which clocks in nanoseconds hold."""


class Part(Enum):
    """Whose part of a global sum a parameter's local sum is."""

    OWN = "this rank's: nobody else counts it"
    REPLICA = "everybody's: counted once, and compared"
    OTHERS = "counted by the rank that is first among the replicas of this shard"


class Share(NamedTuple):
    """What one rank brings to a step. Sums are of squared gradient elements, float64."""

    square_sum: float = 0.0
    replica_sum: float = 0.0
    nonfinite: bool = False
    touched: bool = False
    """Whether any gradient came."""
    failed: bool = False


class Agreement(NamedTuple):
    """What all ranks know of a step."""

    square_sum: float
    """Of all gradients of all ranks, each element once."""
    nonfinite_ranks: tuple[int, ...]
    """Ranks (of this agreement, from 0) that have an inf or a NaN in a gradient."""
    touched: bool
    """Whether any gradient came on any rank."""


class Ranks:
    """The ranks that share an optimizer's parameters; none but this one where no parameter is sharded.

    Args:
        timeout_s: deadline of the collective, in seconds.
        is_local: of a plain parameter's name: whether it is another one on each rank.
        rank_local: the option that says so, for messages.
    """

    def __init__(
        self,
        timeout_s: float,
        is_local: Callable[[str], bool] = lambda name: False,
        rank_local: object = None,
    ) -> None:
        self._timeout_s = timeout_s
        self._is_local, self._rank_local = is_local, rank_local
        self._replicas: dict[str, None] = {}
        self._members: frozenset[int] = frozenset()
        self._group: Any = None
        self._mesh: DeviceMesh | None = None
        self._is_grouped = True
        self._device = torch.device("cpu")
        self._in_step = self._told = False

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return len(self._members) <= 1

    def add(self, params: Sequence[torch.Tensor]) -> None:
        """Parameters have come. Local: a group of the members is made when they first exchange something.

        Raises:
            ParameterError: a parameter is a partial sum.
        """
        members = self._members.union(*(mesh_ranks(param) for param in params))
        for param in params:
            if isinstance(param, DTensor):
                if any(placement.is_partial() for placement in param.placements):
                    raise ParameterError(f"a parameter with placements {param.placements} is not whole")
                self._device = _device_of(param)
                self._mesh = root_mesh(param)
        if members != self._members:
            self._members, self._is_grouped = members, False

    def part_of(self, param: torch.Tensor, name: str) -> Part:
        """How the sum over the local shard of `param` counts."""
        if isinstance(param, DTensor):
            coordinate = param.device_mesh.get_coordinate()
            placements = enumerate(param.placements)
            first = coordinate is not None and not any(
                placement.is_replicate() and coordinate[dim] for dim, placement in placements
            )
            return Part.OWN if first else Part.OTHERS
        if not self._members or self._is_local(name):
            return Part.OWN
        self._replicas[name] = None
        return Part.REPLICA

    @contextmanager
    def step(self, tells: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Around each step: an error that comes before `combine` is told to the others, who wait there.

        Within another one it is a part of that.

        Args:
            tells: asked when there is an error: whether the others wait there.
        """
        if self._in_step:
            yield
            return
        self._in_step, self._told = True, False
        try:
            yield
        except Exception:
            if not self._told and tells():
                self._tell_failure()
            raise
        finally:
            self._in_step = False

    def combine(self, share: Share) -> Agreement:
        """Bring `share` and see what all brought. To be called once in each `step`, on all ranks.

        Raises:
            PeerError: another rank failed, or did not come within the deadline.
            GradientError: the replicas of plain parameters have different gradients.
        """
        shares = self._gather(share)
        failed = [rank for rank, each in enumerate(shares) if each.failed]
        if failed:
            raise PeerError(
                f"the optimizer failed on rank(s) {failed}: see the error there; this rank cannot go on"
            )
        self._compare_replicas(shares)
        square_sum = 0.0
        for each in shares:
            square_sum += each.square_sum
        return Agreement(
            square_sum + shares[0].replica_sum,
            tuple(rank for rank, each in enumerate(shares) if each.nonfinite),
            any(each.touched for each in shares),
        )

    def _compare_replicas(self, shares: Sequence[Share]) -> None:
        sums = [each.replica_sum for each in shares]
        if len({each for each in sums if not math.isnan(each)}) > 1:
            raise GradientError(
                f"gradients of parameters outside of FSDP ({sample(list(self._replicas))}) differ between ranks (their "
                f"squared sums are {sums}): they were not reduced. Put them under fully_shard or replicate, or reduce their "
                "gradients after backward and before step(); parameters that are meant to differ are named by "
                f"OffloadConfig(rank_local=...), which is {self._rank_local!r}"
            )

    def _tell_failure(self) -> None:
        try:
            self._gather(Share(failed=True))
        except OffloadError as error:
            logger.warning("the failure of this rank could not be told to the others: %s", error)

    def _gather(self, share: Share) -> list[Share]:
        self._told = True
        if self.alone:
            return [share]
        mine = torch.tensor([float(value) for value in share], dtype=torch.float64, device=self._device)
        rows = torch.empty(len(self._members) * len(mine), dtype=torch.float64, device=self._device)
        try:
            if not self._is_grouped:
                self._group, self._is_grouped = _group_of(self._members, self._mesh, self._timeout_s), True
            work = all_gather(rows, mine, group=self._group, async_op=True)
            work.wait(_duration(self._timeout_s))
            gathered = rows.view(-1, len(mine)).tolist()
        except (RuntimeError, ValueError) as error:
            raise PeerError(
                f"another rank is gone or did not reach step() within {self._timeout_s} s (config.timeout_s); step() must "
                f"be called on all ranks of the mesh: {error}"
            ) from error
        return [
            Share(square_sum, replica_sum, bool(nonfinite), bool(touched), bool(failed))
            for square_sum, replica_sum, nonfinite, touched, failed in gathered
        ]


def _device_of(param: DTensor) -> torch.device:
    """Of the mesh, not of the shard: the mesh's group may know its device only."""
    kind = param.device_mesh.device_type
    return (
        torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())
    )


def _group_of(members: frozenset[int], mesh: DeviceMesh | None, timeout_s: float) -> Any:
    """A process group of these ranks, which all call this; None is the default group.

    That of a 1-D mesh of just these ranks is there already. Where NCCL's default group is bound to a device, a new one is
    split from it, which all its ranks would have to call.
    """
    if len(members) == dist.get_world_size():
        return None
    group = None if mesh is None or mesh.ndim > 1 else _group_of_mesh(mesh)
    # Asked, because torch may give an equal mesh of an earlier process group, whose names mean others by now.
    if group is not None and frozenset(dist.get_process_group_ranks(group)) == members:
        return group
    # Its own watch, which ends the process with NCCL, is to come after our waits, which raise.
    timeout = _duration(2 * timeout_s)
    return dist.new_group(sorted(members), timeout=timeout, use_local_synchronization=True)


def _group_of_mesh(mesh: DeviceMesh) -> Any:
    try:
        return mesh.get_group()
    except (KeyError, RuntimeError, ValueError):  # its name means nothing any more
        return None


def _duration(seconds: float) -> dt.timedelta:
    """`LONGEST_S` at most."""
    return dt.timedelta(seconds=min(seconds, LONGEST_S))
