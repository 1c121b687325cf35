"""The launcher passes what it is given, from any thread; the driver is a stand-in that reads the argument list."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from offload.driver import NO_CONTEXT
from offload.errors import KernelError
from offload.kernels.launch import Launcher


class Driver:
    """Records calls; `meet` lets two threads be inside at once."""

    def __init__(self, codes: list[int] | None = None, meet: threading.Barrier | None = None) -> None:
        self.calls: list[dict[str, Any]] = []
        self._codes, self._meet = codes or [], meet

    def __call__(self, function: int, *rest: Any) -> int:
        *sizes, shared, stream, pointers, extra = rest
        if self._meet is not None:
            self._meet.wait(10)  # both threads have filled their lists
        values = [ctypes.c_void_p.from_address(place).value for place in pointers]
        self.calls.append(
            {
                "function": function,
                "sizes": sizes,
                "stream": stream,
                "values": values,
                "rest": (shared, extra),
            }
        )
        return self._codes.pop(0) if self._codes else 0


def test_grid_block_stream_and_addresses_arrive() -> None:
    driver = Driver()
    launcher = Launcher(7, 3, 256, launch=driver)
    launcher((5, 4), 99, [11, 22, 33])
    launcher((1, 4), 98, [44, 55, 66])
    assert driver.calls[0] == {
        "function": 7, "sizes": [5, 4, 1, 256, 1, 1], "stream": 99, "values": [11, 22, 33], "rest": (0, None)
    }  # fmt: skip
    assert driver.calls[1]["values"] == [44, 55, 66]


def test_threads_do_not_share_an_argument_list() -> None:
    driver = Driver(meet=threading.Barrier(2))
    launcher = Launcher(7, 2, 256, launch=driver)
    threads = [threading.Thread(target=launcher, args=((1, 1), 0, [n, n])) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(call["values"] for call in driver.calls) == [[1, 1], [2, 2]]


def test_a_thread_without_a_context_gets_one() -> None:
    bound: list[bool] = []
    driver = Driver([NO_CONTEXT, 0])
    Launcher(7, 1, 256, launch=driver)((1, 1), 0, [1], lambda: bound.append(True))
    assert bound == [True]
    assert len(driver.calls) == 2


@pytest.mark.parametrize("code", [1, NO_CONTEXT])
def test_a_refusal_is_an_error(code: int) -> None:
    with pytest.raises(KernelError, match=f"error {code}"):
        Launcher(7, 1, 256, launch=Driver([code, code]))((1, 1), 0, [1], lambda: None)


def test_a_wrong_number_of_addresses_is_refused() -> None:
    with pytest.raises(ValueError, match="size"):
        Launcher(7, 2, 256, launch=Driver())((1, 1), 0, [1])
