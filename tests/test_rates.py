"""Rates: measured once, kept, and replaced on request."""

from __future__ import annotations

import time

import pytest
import torch

from offload import rates
from offload.rates import Rates

GIVEN = Rates(
    kernel_numel=1e9,
    host_bytes=28e9,
    to_device_bytes=1e10,
    to_host_bytes=1e10,
    duplex_bytes=1e10,
    device_bytes=1e12,
)
DEVICE = torch.device("cuda", 7)


def test_given_rates_are_used_until_they_are_taken_back() -> None:
    assert rates.known(DEVICE) is None
    rates.override(DEVICE, GIVEN)
    try:
        assert rates.known(DEVICE) is GIVEN
        assert rates.measured(DEVICE, 4) is GIVEN
    finally:
        rates.override(DEVICE, None)
    assert rates.known(DEVICE) is None


@pytest.mark.parametrize("num_threads", [1, 3])
def test_host_memory_is_measured_by_threads_of_its_own(num_threads: int) -> None:
    before = torch.get_num_threads()
    assert 1e8 < rates.measure_host_bytes(num_threads, numel=2**21) < 1e13
    assert torch.get_num_threads() == before


@pytest.mark.gpu
def test_measuring_takes_less_than_a_second_and_happens_once() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    rates.override(device, None)
    torch.zeros(1, device=device)
    start = time.perf_counter()
    first = rates.measured(device, 8)
    assert time.perf_counter() - start < 1.0
    assert rates.measured(device, 8) is first
    assert first.duplex_bytes <= 1.1 * min(first.to_device_bytes, first.to_host_bytes)
    assert first.device_bytes > first.duplex_bytes
