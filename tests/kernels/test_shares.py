"""Work items reach some worker once, whoever is fast and whoever is held up."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.kernels.jit import Kernel, jit_disabled
from offload.kernels.shares import LINE, NEXT, STOP, items, make_shares
from offload.kernels.team import ExecutorTeam, LayerTeam, find_layer, run_in_c

DEADLINE_S = 30.0

compiled = pytest.mark.skipif(jit_disabled(), reason="without the JIT there is one worker")


@Kernel
def count_items(worker, call):
    """Count each item and note who took it."""
    shares, counts, takers = call[0]
    for item in items(shares, worker):
        counts[item] += 1
        takers[item] = worker


def run_workers(workers: Sequence[int], shares: np.ndarray, counts: np.ndarray, takers: np.ndarray) -> None:
    """Let threads without the GIL be these workers, of those that have shares."""
    call = count_items.bind(shares, (counts, takers))
    run = run_in_c(call.function)
    with ThreadPoolExecutor(len(workers)) as threads:
        for future in [threads.submit(run, worker, call.arguments) for worker in workers]:
            future.result(DEADLINE_S)


@given(count=st.integers(0, 2000), num_workers=st.integers(1, 70))
def test_shares_are_even_and_cover_all_items(count: int, num_workers: int) -> None:
    shares = make_shares(count, num_workers)
    assert shares.shape == (num_workers, LINE)
    assert shares[0, NEXT] == 0
    assert shares[-1, STOP] == count
    assert (shares[1:, NEXT] == shares[:-1, STOP]).all()
    sizes = shares[:, STOP] - shares[:, NEXT]
    assert sizes.max() - sizes.min() <= 1


@given(count=st.integers(0, 40), num_workers=st.integers(1, 9), worker=st.integers(0, 8))
def test_a_single_worker_takes_all_items_its_own_first(count: int, num_workers: int, worker: int) -> None:
    worker %= num_workers
    shares = make_shares(count, num_workers)
    own = list(range(shares[worker, NEXT], shares[worker, STOP]))
    function: Any = getattr(items, "py_func", items)
    taken = list(function(shares, worker))
    assert taken[: len(own)] == own
    assert sorted(taken) == list(range(count))


@compiled
@pytest.mark.parametrize("make", [ExecutorTeam, lambda n: LayerTeam(find_layer() or "omp", n)])
def test_each_item_is_taken_once(make: Any) -> None:
    """Many more workers than cores, and items of a few nanoseconds: all of them contend for the last ones."""
    counts, takers = np.zeros(20_011, np.int64), np.zeros(20_011, np.int64)
    team = make(8)

    def run() -> None:
        team.start()
        count_items.compile((counts, takers))
        for _ in range(200):
            team.run(count_items, counts.size, (counts, takers))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    team.close()
    assert (counts == 200).all()


@compiled
def test_the_share_of_a_worker_that_never_comes_is_done_by_the_others() -> None:
    """What a descheduled thread is to its team: with shares of its own alone, its items would be missing here."""
    counts, takers = np.zeros(100, np.int64), np.full(100, -1)
    count_items.compile((counts, takers))
    run_workers((0, 1, 3), make_shares(counts.size, 4), counts, takers)
    assert (counts == 1).all()
    assert set(takers[25:75]) <= {0, 1, 3}


@compiled
def test_taking_is_atomic() -> None:
    """Threads in the same share, without the GIL; a read and a write apart would give some items out twice."""
    counts, takers = np.zeros(400_000, np.int64), np.zeros(400_000, np.int64)
    count_items.compile((counts, takers))
    shares = make_shares(counts.size, 1)
    both = np.concatenate([shares, np.zeros_like(shares)])  # a second worker with nothing of its own
    run_workers((0, 1), both, counts, takers)
    assert (counts == 1).all()
    assert both[0, NEXT] == counts.size + 2  # each of the two was told once that nothing is left
