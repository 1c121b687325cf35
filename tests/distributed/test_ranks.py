"""The harness itself: results come back, failures and deaths are told, nothing outlasts its deadline."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import RankError, Ranks


def add_ranks(base: int) -> tuple[int, int, torch.Tensor]:
    total = torch.tensor([base + dist.get_rank()])
    dist.all_reduce(total)
    return dist.get_world_size(), torch.get_num_threads(), total


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("a reason to be seen")
    threading.Event().wait()


def die_on(rank: int) -> str:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        threading.Event().wait()


@pytest.mark.parametrize("size", [4, 1, 2])
def test_each_call_has_a_group_of_its_size(ranks: Ranks, size: int) -> None:
    expected = (size, 1, torch.tensor([10 * size + sum(range(size))]))
    assert ranks.run(add_ranks, size, 10) == [expected] * size


def test_a_failure_is_shown_and_the_next_call_works(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*fail_on.*a reason to be seen.*still running"):
        ranks.run(fail_on, 2, 1)
    assert len(ranks.run(add_ranks, 2, 0)) == 2


def test_a_death_is_told_unless_it_was_expected(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="rank 0 died with exit code -9"):
        ranks.run(die_on, 2, 0)
    assert ranks.run(die_on, 2, 0, may_die=[0]) == [None, "alive"]


def test_nothing_outlasts_its_deadline(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"rank\(s\) \[0(, 1)?\] were not done within 0.5 s"):
        ranks.run(hang_on, 2, 0, deadline_s=0.5)
