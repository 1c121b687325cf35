"""The tree drawn in the docstring is the real one."""

from __future__ import annotations

import builtins
import inspect
import re

import pytest

import offload
from offload import errors

CLASSES = {
    name: cls
    for name, cls in vars(errors).items()
    if inspect.isclass(cls) and cls.__module__ == errors.__name__
}
LINE = re.compile(r"^    (?P<tree>[│├└─ ]*)(?P<name>\w+Error)\b(?: +\((?:also )?(?P<other>\w+)\))?")


def drawn_bases() -> dict[str, tuple[str, ...]]:
    """Name → names of its bases, as drawn: the parent is the last name with a shorter indent."""
    bases, path = {}, []
    for match in filter(None, map(LINE.match, (errors.__doc__ or "").splitlines())):
        depth = len(match["tree"]) // 4
        path[depth:] = [match["name"]]
        bases[match["name"]] = tuple(filter(None, (path[depth - 1] if depth else None, match["other"])))
    return bases


def test_docstring_draws_the_real_tree() -> None:
    real = {name: tuple(base.__name__ for base in cls.__bases__) for name, cls in CLASSES.items()}
    assert drawn_bases() == real


@pytest.mark.parametrize("module", [errors, offload])
def test_all_is_sorted_complete_and_importable(module: object) -> None:
    names = module.__all__  # type: ignore[attr-defined]
    assert names == sorted(names)
    assert len(set(names)) == len(names)
    assert all(hasattr(module, name) for name in names)
    assert set(CLASSES) <= set(names)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_each_error_is_documented_and_also_a_standard_one(name: str) -> None:
    cls = CLASSES[name]
    assert cls.__doc__
    assert str(cls("words")) == "words"
    standard = [base for base in cls.__mro__ if base.__module__ == builtins.__name__]
    assert name == "OffloadError" or any(base not in (Exception, BaseException, object) for base in standard)
