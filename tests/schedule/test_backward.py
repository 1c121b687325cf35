"""Ends of backward passes, as real autograd shows them."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

from offload.schedule.backward import BackwardWatch

Step = Callable[[torch.Tensor], torch.Tensor]


class Watched:
    """Parameters whose hooks feed a watch; keeps what happened in order: a parameter's number, or ``"end"``.

    `told` says for each fire whether the watch took it for one after an interrupted pass.
    """

    def __init__(self, num_params: int = 4) -> None:
        self.params = [torch.nn.Parameter(torch.ones(2)) for _ in range(num_params)]
        self.events: list[int | str] = []
        self.told: list[bool] = []
        self.refuses = False
        self.watch = BackwardWatch(lambda: self.events.append("end"))
        for index, parameter in enumerate(self.params):
            self.attach(index, parameter)

    def attach(self, index: int, parameter: torch.Tensor) -> None:
        def fire(_: torch.Tensor) -> None:
            self.told.append(self.watch.follows_interruption())
            if self.refuses:
                raise RuntimeError("refused")
            self.watch.note_fire()
            self.events.append(index)

        parameter.register_post_accumulate_grad_hook(fire)

    def layer(self, *indices: int) -> Step:
        def forward(x: torch.Tensor) -> torch.Tensor:
            for index in indices:
                x = x * self.params[index]
            return x

        return forward

    def num_ends(self) -> int:
        return self.events.count("end")


def ones(*, requires_grad: bool = True) -> torch.Tensor:
    return torch.ones(2, requires_grad=requires_grad)


def checkpointed(layer: Step, *, use_reentrant: bool) -> Step:
    return lambda x: checkpoint(layer, x, use_reentrant=use_reentrant)


def run_in_thread(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(function).result(60)


class Failing(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("boom")


class BackwardInside(torch.autograd.Function):
    """Identity whose backward runs a whole other backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, inner: Callable[[], torch.Tensor]) -> torch.Tensor:
        ctx.inner = inner
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.enable_grad():
            ctx.inner().sum().backward()
        return gradient, None


def fail_in_backward(watched: Watched) -> None:
    """Parameter 1 gets its gradient, parameter 0 does not."""
    loss = watched.layer(1)(Failing.apply(watched.layer(0)(ones()))).sum()
    with pytest.raises(RuntimeError, match="boom"):
        loss.backward()


def test_one_end_after_each_pass() -> None:
    watched = Watched()
    for _ in range(3):
        watched.layer(0, 1, 2, 3)(ones()).sum().backward()
    assert watched.num_ends() == 3
    assert watched.events[4::5] == ["end"] * 3
    assert not any(watched.told)
    assert not watched.watch.interrupted


def test_a_retained_graph_is_two_passes() -> None:
    watched = Watched()
    loss = watched.layer(0)(ones()).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert watched.events == [0, "end", 0, "end"]


def test_a_pass_without_our_parameters_has_no_end() -> None:
    watched = Watched()
    (ones() * 2).sum().backward()
    assert watched.events == []


def test_autograd_grad_fires_nothing() -> None:
    watched = Watched()
    torch.autograd.grad(watched.layer(0)(ones()).sum(), watched.params[0])
    assert watched.events == []


@pytest.mark.parametrize("kinds", list(itertools.product([None, False, True], repeat=2)))
def test_checkpoints_do_not_end_a_pass_early(kinds: tuple[bool | None, bool | None]) -> None:
    """Two layers in any kind of checkpoint (None: in none) between two that are in none."""
    watched = Watched()
    middle = [
        watched.layer(i) if kind is None else checkpointed(watched.layer(i), use_reentrant=kind)
        for i, kind in zip((1, 2), kinds, strict=True)
    ]
    x = watched.layer(0)(ones())
    for layer in middle:
        x = layer(x)
    watched.layer(3)(x).sum().backward()
    assert watched.events == [3, 2, 1, 0, "end"]
    assert not any(watched.told)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("outer", "inner"), list(itertools.product([False, True], repeat=2)))
def test_nested_checkpoints_do_not_end_a_pass_early(outer: bool, inner: bool) -> None:
    watched = Watched()
    nested = checkpointed(watched.layer(2), use_reentrant=inner)
    block = checkpointed(lambda x: nested(watched.layer(1)(x)), use_reentrant=outer)
    watched.layer(3)(block(watched.layer(0)(ones()))).sum().backward()
    assert sorted(watched.events[:-1]) == [0, 1, 2, 3]
    assert watched.events[-1] == "end"
    assert not any(watched.told)


def test_the_end_may_stay_unseen_but_is_never_early() -> None:
    """All parameters inside a reentrant checkpoint: no fire is outside the nested task."""
    watched = Watched()
    checkpointed(watched.layer(0, 1), use_reentrant=True)(ones()).sum().backward()
    assert watched.events == [1, 0]
    assert not watched.watch.interrupted


def test_a_tied_weight_that_fires_twice_is_one_pass() -> None:
    """One use inside a reentrant checkpoint, one outside: two fires, one end."""
    watched = Watched()
    x = checkpointed(watched.layer(0), use_reentrant=True)(ones() * 1)
    watched.layer(0, 1)(x).sum().backward()
    assert watched.events.count(0) == 2
    assert watched.events[-1] == "end"
    assert watched.num_ends() == 1


def test_a_backward_inside_a_backward_is_no_pass_of_its_own() -> None:
    watched = Watched()
    x = BackwardInside.apply(watched.layer(0)(ones()), lambda: watched.layer(1)(ones()))
    watched.layer(2)(x).sum().backward()
    assert watched.events == [2, 1, 0, "end"]
    assert not any(watched.told)


@pytest.mark.parametrize("file", ["train_function.py", "function.py"])
def test_a_users_own_apply_is_not_taken_for_autograds(file: str) -> None:
    """A loop that is called ``apply`` in a file of such a name, run inside another function's backward hook."""
    watched = Watched()
    scope: dict[str, Any] = {}
    exec(compile("def apply(f):\n    return f()", f"/home/user/{file}", "exec"), scope)
    inner = watched.layer(1)(ones()).sum()

    def on_outer(gradient: torch.Tensor) -> None:
        scope["apply"](inner.backward)

    x = ones()
    x.register_hook(on_outer)
    (x * 2).sum().backward()
    assert watched.events == [1, "end"]


# Interrupted passes


def test_an_exception_leaves_the_pass_interrupted() -> None:
    watched = Watched()
    fail_in_backward(watched)
    assert watched.events == [1]
    assert watched.watch.interrupted


def test_after_an_exception_the_next_pass_is_told() -> None:
    """At its first fire; where that one's gradient is taken all the same, a new pass has begun."""
    watched = Watched()
    fail_in_backward(watched)
    watched.layer(0, 2)(ones()).sum().backward()
    assert watched.told == [False, True, False]
    assert watched.events == [1, 2, 0, "end"]
    assert not watched.watch.interrupted


def test_a_refused_gradient_does_not_begin_a_pass() -> None:
    """A hook that raises instead of calling `note_fire`: every later pass is told as well."""
    watched = Watched()
    fail_in_backward(watched)
    watched.refuses = True
    for _ in range(2):
        with pytest.raises(RuntimeError, match="refused"):
            watched.layer(0)(ones()).sum().backward()
    assert watched.told == [False, True, True]
    assert watched.watch.interrupted


def test_reset_makes_a_fresh_start() -> None:
    watched = Watched()
    fail_in_backward(watched)
    watched.watch.reset()
    assert not watched.watch.interrupted
    watched.layer(0)(ones()).sum().backward()
    assert watched.events == [1, 0, "end"]
    assert not any(watched.told)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_an_exception_inside_a_checkpoint_interrupts(use_reentrant: bool) -> None:
    watched = Watched()
    block = checkpointed(lambda x: watched.layer(1)(Failing.apply(x)), use_reentrant=use_reentrant)
    with pytest.raises(RuntimeError, match="boom"):
        watched.layer(2)(block(watched.layer(0)(ones()))).sum().backward()
    assert watched.events == [2, 1]
    assert watched.watch.interrupted


def test_an_exception_before_any_fire_interrupts_nothing() -> None:
    watched = Watched()
    with pytest.raises(RuntimeError, match="boom"):
        Failing.apply(watched.layer(0)(ones())).sum().backward()
    assert not watched.watch.interrupted


# Threads, several watches, refused callbacks


def test_passes_may_come_from_different_threads() -> None:
    watched = Watched()
    for _ in range(2):
        run_in_thread(watched.layer(0, 1)(ones()).sum().backward)
        watched.layer(2)(ones()).sum().backward()
    assert watched.events == [1, 0, "end", 2, "end"] * 2
    assert not any(watched.told)


def test_reentrant_checkpoint_in_a_side_thread() -> None:
    watched = Watched()
    x = checkpointed(watched.layer(1), use_reentrant=True)(watched.layer(0)(ones()))
    run_in_thread(watched.layer(2)(x).sum().backward)
    assert watched.events == [2, 1, 0, "end"]


def test_an_interruption_in_a_side_thread_is_seen_here() -> None:
    watched = Watched()
    run_in_thread(lambda: fail_in_backward(watched))
    assert watched.watch.interrupted


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_two_watches_over_one_pass(use_reentrant: bool | None) -> None:
    first, second = Watched(2), Watched(2)
    inside = (
        second.layer(0)
        if use_reentrant is None
        else checkpointed(second.layer(0), use_reentrant=use_reentrant)
    )
    second.layer(1)(first.layer(1)(inside(first.layer(0)(ones())))).sum().backward()
    assert first.events == [1, 0, "end"]
    assert second.events == [1, 0, "end"]


def test_one_watch_interrupted_the_other_not() -> None:
    first, second = Watched(), Watched()
    fail_in_backward(first)
    second.layer(0)(ones()).sum().backward()
    assert first.watch.interrupted
    assert second.events == [0, "end"]


class Refusing:
    """Autograd's engine, but that it takes no callbacks, as under compiled autograd."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def queue_callback(self, _: Callable[[], None]) -> None:
        raise RuntimeError("no callbacks here")


def test_refused_callbacks_cost_the_hint_and_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watched = Watched()
    monkeypatch.setattr(Variable, "_execution_engine", Refusing(Variable._execution_engine))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            watched.layer(0, 1)(ones()).sum().backward()
    assert watched.events == [1, 0] * 3
    assert not any(watched.told)
    assert not watched.watch.interrupted
    assert caplog.text.count("no callbacks here") == 1


def test_watch_keeps_no_thread_alive() -> None:
    before = threading.active_count()
    Watched().layer(0)(ones()).sum().backward()
    assert threading.active_count() == before
