"""How compiled kernels get their arguments: by address, so that nothing but these checks stands before memory."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from offload.errors import KernelError
from offload.kernels.accumulate import expand
from offload.kernels.buffers import make_buffer, make_stage
from offload.kernels.jit import Kernel, inner, jit_disabled
from offload.kernels.shares import items, make_shares
from offload.kernels.team import make_team

DEADLINE_S = 30.0


@inner
def present(array):
    return array.sum() * array.shape[0]


@Kernel
def weigh_rows(worker, call):
    """``out[0] = the sum of second times its rows``: shape and strides have arrived."""
    shares, second, out = call[0]
    for _ in items(shares, worker):
        out[0] = present(second)


@Kernel
def use_buffers(worker, call):
    """Scratch of two loops at a time; the sum of what was put into it."""
    shares, target, out = call[0]
    for item in items(shares, worker):
        buffer, stage = make_buffer(), make_stage(target)
        for i in range(buffer.size):
            buffer[i] = item
        for i in range(stage.size):
            stage[i] = 1
        out[item] = buffer.sum() + stage.size


def run(kernel: Kernel, count: int, *arguments: Any, num_threads: int = 1) -> None:
    team = make_team(num_threads)

    def work() -> None:
        team.start()
        kernel.compile(arguments)
        team.run(kernel, count, arguments)
        team.close()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_arrays_of_two_dimensions_arrive_whole() -> None:
    second, out = np.arange(12.0).reshape(3, 4), np.zeros(1)
    run(weigh_rows, 1, second, out)
    assert out[0] == second.sum() * 3


def test_scratch_is_each_items_own() -> None:
    out = np.zeros(500)
    run(use_buffers, out.size, np.zeros(8, np.uint16), out, num_threads=2)
    np.testing.assert_array_equal(out, np.arange(500.0) * 1024 + 4096)


compiled = pytest.mark.skipif(jit_disabled(), reason="NUMBA_DISABLE_JIT: nothing is compiled")


@compiled
@pytest.mark.parametrize(
    "second",
    [
        np.zeros((4, 3), np.float32),
        np.zeros((3, 4)).T,
        np.zeros(12),
        np.zeros((3, 4), ">f8"),
        np.frombuffer(bytes(96)).reshape(3, 4),
        np.frombuffer(bytearray(97), np.uint8)[1:].view(np.float64).reshape(3, 4),
        None,
        3,
    ],
    ids=["dtype", "order", "dimensions", "byte order", "read-only", "unaligned", "None", "number"],
)
def test_what_does_not_fit_is_refused(second: Any) -> None:
    out = np.zeros(1)
    weigh_rows.compile((np.zeros((3, 4)), out))
    with pytest.raises(KernelError, match=r"weigh_rows was not compiled for these arguments: .*contiguous"):
        weigh_rows.bind(make_shares(1, 1), (second, out))


@compiled
def test_what_could_never_fit_is_not_compiled() -> None:
    """Were it, a later call with another array that cannot be used would run on it."""
    with pytest.raises(KernelError, match="contiguous"):
        weigh_rows.compile((np.zeros((3, 4)).T, np.zeros(1)))


@compiled
def test_an_empty_array_has_no_address_and_is_fine() -> None:
    out = np.ones(1)
    run(weigh_rows, 1, np.zeros((0, 4)), out)
    assert out[0] == 0.0


@pytest.mark.skipif(jit_disabled(), reason="nothing is compiled")
def test_a_call_keeps_its_arrays() -> None:
    """The shares are made for the call alone: freed, their memory would be the next call's, of another thread too."""
    weight, master = np.zeros(1024, np.float32), np.zeros(1024, np.float32)
    shares = make_shares(1, 1)
    expand.compile((weight, master))
    alive = weakref.ref(shares)
    call = expand.bind(shares, (weight, master))
    del shares
    gc.collect()
    assert alive() is not None
    del call
    assert alive() is None
