"""Which library is asked, with which types; and what its codes mean. The calls themselves are in the GPU tests."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from offload import driver as driver_module
from offload.driver import Driver, check, driver
from offload.errors import KernelError


class Library:
    """Stands in for an opened library: any name is a function of its own."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.functions: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return self.functions.setdefault(name, lambda *arguments: 0)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, Library]:
    libraries: dict[str, Library] = {}

    def opener(kind: str) -> Any:
        return lambda name: libraries.setdefault(kind, Library(name))

    monkeypatch.setattr(ctypes, "PyDLL", opener("keeping"))
    monkeypatch.setattr(ctypes, "CDLL", opener("giving"))
    return libraries


def test_only_copies_that_may_wait_give_the_lock_away(opened: dict[str, Library]) -> None:
    made = Driver("some.so")
    keeping, giving = opened["keeping"], opened["giving"]
    assert {keeping.name, giving.name} == {"some.so"}
    assert set(giving.functions.values()) == {made.slow_copy}
    fast = {made.copy, made.record, made.hold_back, made.query, made.launch}
    assert set(keeping.functions.values()) == fast


def test_addresses_are_wide_and_codes_are_integers(opened: dict[str, Library]) -> None:
    made: Any = Driver("some.so")
    assert made.copy.argtypes == made.slow_copy.argtypes
    assert [ctypes.sizeof(each) for each in made.copy.argtypes] == [8, 8, 8, 8]
    assert [ctypes.sizeof(each) for each in made.hold_back.argtypes] == [8, 8, 4]
    assert len(made.launch.argtypes) == 11
    assert made.query.restype is ctypes.c_int


def test_a_code_is_raised_with_what_was_asked() -> None:
    check(0, "a copy")
    with pytest.raises(RuntimeError, match="a copy: error 700"):
        check(700, "a copy")


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Driver:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver_module, "Driver", missing)
    driver.cache_clear()
    with pytest.raises(KernelError, match="cannot be opened"):
        driver()
    driver.cache_clear()
