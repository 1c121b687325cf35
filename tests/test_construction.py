"""Where the time of a constructor goes, what runs at the same time in it, and what its errors leave behind."""

from __future__ import annotations

import gc
import logging
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

import offload
from offload import assembly, front
from offload.construction import COMPILE, DEVICE_KERNELS, MASTERS, OTHER, PIN, STAGES, TOUCH, Construction
from offload.kernels.jit import Kernel
from offload.kernels.norm import square_sums_of_tile
from offload.kernels.numba_backend import NumbaBackend
from offload.schedule.engine import Engine
from offload.schedule.forward_gates import ForwardGates
from offload.schedule.worker import Worker
from offload.transfer import helpers, slabs
from offload.transfer.host import LaneTransport
from offload.transfer.pinned import mapped_bytes, pinned_bytes
from tests.training import adamw, batches, make_decoder, master_of, train, use_lanes

TIMEOUT_S = 60.0
WAIT_S = 30.0
"""For what happens at once, unless it is waited for in vain."""
EARLY_MODES = ["wavefront", "hybrid"]


class FakeTime:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def construction(self) -> Construction:
        return Construction(now=lambda: self.now_s)


# The stages ---------------------------------------------------------------------------------------------------------


def test_stages_and_the_time_between_them_add_up() -> None:
    time = FakeTime()
    with time.construction() as construction:
        time.now_s += 1  # in none
        with construction.stage(COMPILE):
            time.now_s += 2
            with construction.stage(TOUCH):
                time.now_s += 4  # in both
        with construction.stage(PIN):
            time.now_s += 8
        time.now_s += 16
    time.now_s += 1000
    assert construction.total_s == 31
    assert construction.seconds == {COMPILE: 6, TOUCH: 4, PIN: 8, OTHER: 17}
    assert list(construction.seconds)[-1] == OTHER


def test_a_stage_of_two_threads_counts_once() -> None:
    time = FakeTime()
    with time.construction() as construction:
        first, second = construction.stage(PIN), construction.stage(PIN)
        first.__enter__()
        time.now_s += 1
        second.__enter__()
        time.now_s += 2
        first.__exit__(None, None, None)
        time.now_s += 4
        second.__exit__(None, None, None)
    assert construction.seconds == {PIN: 7, OTHER: 0}


def test_stages_outside_of_a_construction_are_not_timed() -> None:
    time = FakeTime()
    construction = time.construction()
    with construction.stage(TOUCH):
        time.now_s += 1
        with construction:  # what began before it is not its own
            time.now_s += 2
    with construction.stage(TOUCH):
        time.now_s += 4
    assert construction.seconds == {OTHER: 2}
    assert construction.total_s == 2


def test_a_failed_stage_has_ended() -> None:
    time = FakeTime()
    with pytest.raises(OSError, match="gone"), time.construction() as construction:  # noqa: PT012
        try:
            with construction.stage(TOUCH):
                time.now_s += 1
                raise OSError("gone")
        finally:
            time.now_s += 2
    assert construction.seconds == {TOUCH: 1, OTHER: 2}


# The log ------------------------------------------------------------------------------------------------------------


def test_what_is_under_way_is_told_apart_from_what_is_done(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "offload")
    time = FakeTime()
    with time.construction() as construction, construction.stage(COMPILE):
        with construction.stage(TOUCH):
            time.now_s += 4
        time.now_s += 6
        construction.say()
        with construction.stage(PIN):
            time.now_s += 10
            construction.say()
    construction.say()  # it was about to when the construction ended
    assert caplog.messages == [
        "the optimizer is being built, 10 s so far; under way: compile; so far: compile 10.0, touch 4.0, other 0.0",
        "the optimizer is being built, 20 s so far; under way: compile, pin; so far: compile 20.0, touch 4.0, "
        "pin 10.0, other 0.0",
    ]


def test_a_slow_construction_says_so_again_and_again_while_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    said = [threading.Event() for _ in range(2)]

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "under way: touch" in record.getMessage():
                said[said[0].is_set()].set()

    listener, logger = Listener(), logging.getLogger("offload.construction")
    caplog.set_level(logging.INFO, "offload")
    logger.addHandler(listener)
    before = threading.active_count()
    try:
        with Construction(slow_s=0.01) as construction, construction.stage(TOUCH):
            assert all(event.wait(TIMEOUT_S) for event in said)
    finally:
        logger.removeHandler(listener)
    assert threading.active_count() == before


@pytest.mark.parametrize("mode", ["wavefront", "hybrid", "chunked-stream", "resident"])
@pytest.mark.parametrize("given", [False, True])
def test_an_optimizer_tells_where_its_time_went(
    mode: str, given: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "offload")
    model = make_decoder()
    masters = offload.cast_compute_weights(model) if given else None
    with adamw(model, mode=mode, masters=masters) as optimizer:
        built = optimizer.construction
        total = built.pop("total")
        train(model, optimizer, batches(2))
        assert {"total": total, **built} == optimizer.construction  # steps are not part of it
    assert {TOUCH, MASTERS, OTHER} <= built.keys() <= {*STAGES, OTHER}
    assert all(0 <= seconds <= total for seconds in built.values())
    assert max(built.values()) <= total <= sum(built.values()) * (1 + 1e-9)
    lines = [message for message in caplog.messages if message.startswith("built in")]
    assert len(lines) == 1
    assert all(f"{name} " in lines[0] for name in built)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["wavefront", "hybrid", "chunked-stream"])
def test_on_a_gpu_what_copies_end_in_is_pinned_and_masters_are_the_weights(mode: str) -> None:
    model = make_decoder(device="cuda")
    offload.cast_compute_weights(model)
    config = {"stream_share": 0.5} if mode == "hybrid" else {}
    before = pinned_bytes()
    with adamw(model, mode=mode, config=config) as optimizer:
        expected = {TOUCH, PIN, MASTERS, OTHER}
        expected |= set() if mode == "wavefront" else {DEVICE_KERNELS}
        assert expected <= optimizer.construction.keys()
        assert pinned_bytes() > before
        for name, parameter in model.named_parameters():
            state = optimizer.state[parameter]
            assert torch.equal(master_of(optimizer, parameter).cpu(), parameter.detach().float().cpu()), name
            assert not any(state[moment].any() for moment in ("exp_avg", "exp_avg_sq")), name
        train(model, optimizer, batches(2, device="cuda"))
    assert pinned_bytes() == before


# At the same time ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", EARLY_MODES)
def test_memory_is_made_ready_while_kernels_are_compiled(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, the kernels would wait in vain for the memory."""
    missing = {"master", "streamed master"} if mode == "hybrid" else {"master"}
    made = threading.Event()
    start, make_all = NumbaBackend.start, slabs.SlabMaker.make_all
    in_time: list[bool] = []

    def slow_start(backend: NumbaBackend) -> None:
        in_time.append(made.wait(WAIT_S))
        start(backend)

    def noting(maker: slabs.SlabMaker, wanted: Any) -> Any:
        slabs = make_all(maker, wanted)
        missing.difference_update(each.name for each in wanted)
        if not missing:
            made.set()
        return slabs

    monkeypatch.setattr(NumbaBackend, "start", slow_start)
    monkeypatch.setattr(slabs.SlabMaker, "make_all", noting)
    model = make_decoder()
    offload.cast_compute_weights(model)
    with adamw(model, mode=mode):
        assert in_time == [True]


@pytest.mark.parametrize(
    ("options", "is_compiled"),
    [
        ({}, False),
        ({"max_grad_norm": 1.0}, True),
        ({"nonfinite": "skip"}, True),
        ({"max_grad_norm": 1.0, "clip": "defer"}, True),
    ],
)
def test_sums_alone_are_compiled_only_where_a_norm_comes_first(
    options: dict[str, Any], is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    is_there = Kernel.is_compiled

    def noting(kernel: Kernel, *arguments: Any, **more: Any) -> bool:
        asked.append(kernel.name)
        return is_there(kernel, *arguments, **more)

    monkeypatch.setattr(Kernel, "is_compiled", noting)
    model = make_decoder()
    with adamw(model, **options) as optimizer:
        train(model, optimizer, batches(3))
    assert (square_sums_of_tile.name in asked) is is_compiled


# Errors -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def nothing_stays() -> Any:
    gc.collect()
    before = mapped_bytes(), threading.active_count()
    yield
    gc.collect()
    assert (mapped_bytes(), threading.active_count()) == before


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize("mode", [*EARLY_MODES, "resident"])
@pytest.mark.parametrize(
    ("error", "raised"),
    [(offload.KernelError("no layer"), offload.KernelError), (OSError("no"), offload.WorkerError)],
)
def test_kernels_that_do_not_compile_are_the_constructors_error(
    mode: str, error: Exception, raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(backend: NumbaBackend) -> None:
        raise error

    monkeypatch.setattr(NumbaBackend, "start", fail)
    config = {"stream_share": 1.0} if mode == "hybrid" else {}  # no chunk is the host's own
    with pytest.raises(raised) as caught:
        adamw(make_decoder(), mode=mode, config=config)
    assert error in (caught.value, caught.value.__cause__)
    caught = None  # type: ignore[assignment]  # its frames hold the optimizer's parts
    error.__traceback__ = None


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize("mode", EARLY_MODES)
@pytest.mark.parametrize("number", [1, 3, 5])
def test_memory_that_cannot_be_had_while_kernels_compile_leaves_nothing(
    mode: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error is raised when the compilation, which nobody can interrupt, has ended."""
    failed, compiled = threading.Event(), threading.Event()
    start, touch = NumbaBackend.start, slabs._touch
    touched: list[int] = []

    def slow_start(backend: NumbaBackend) -> None:
        assert failed.wait(TIMEOUT_S)
        start(backend)
        compiled.set()

    def failing(data: Any) -> None:
        touched.append(data.size)
        if len(touched) == number:
            failed.set()
            raise offload.MemoryBudgetError("no more")
        touch(data)

    monkeypatch.setattr(NumbaBackend, "start", slow_start)
    monkeypatch.setattr(slabs, "_touch", failing)
    model = make_decoder()
    offload.cast_compute_weights(model)
    with pytest.raises(offload.MemoryBudgetError, match="no more"):
        adamw(model, mode=mode)
    assert compiled.is_set()


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize("is_late", [False, True])
def test_after_an_error_no_more_memory_is_touched(is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of eight parts for two threads the first fails, or nothing ends in time, while others are under way."""
    monkeypatch.setattr(slabs, "PART_BYTES", 4096)
    monkeypatch.setattr(slabs, "PARTS_PER_THREAD", 4)
    monkeypatch.setattr(helpers, "END_S", 0.05)
    under_way, go_on = threading.Barrier(2), threading.Event()
    touched: list[int] = []
    before = mapped_bytes()
    num_bytes = 8 * 4096

    def touch(data: Any) -> None:
        touched.append(data.ctypes.data)
        under_way.wait(WAIT_S)
        if len(touched) <= 2 and data.ctypes.data == min(touched) and not is_late:
            raise offload.MemoryBudgetError("no more")
        assert go_on.wait(WAIT_S)
        data[:] = 1  # into memory that is still there

    monkeypatch.setattr(slabs, "_touch", touch)
    maker = slabs.SlabMaker(num_threads=2, timeout_s=0.05 if is_late else WAIT_S)
    with pytest.raises(offload.DeadlineError if is_late else offload.MemoryBudgetError):
        maker.make(num_bytes, "eight parts")
    assert mapped_bytes() == before + num_bytes  # somebody is at work on it
    under_way.abort()
    go_on.set()
    for thread in threading.enumerate():
        if thread.name == "offload-touch":
            thread.join(WAIT_S)
    assert len(touched) <= 3  # one may be taken just before the error is seen
    assert our_threads() == []


class PartError(Exception):
    """Raised where a test wants it."""


def fail_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int = 1) -> list[PartError]:
    """Let the `number`-th call of ``owner.name`` from now on raise what is listed then."""
    raised: list[PartError] = []
    real, calls = getattr(owner, name), iter(range(1, 1000))

    def fake(*arguments: Any, **more: Any) -> Any:
        if next(calls) == number:
            raised.append(PartError(name))
            raise raised[-1]
        return real(*arguments, **more)

    monkeypatch.setattr(owner, name, fake)
    return raised


@pytest.mark.parametrize(("numel", "is_rated"), [(10_000_000, True), (9_999_999, False), (0, False)])
def test_only_of_large_models_seconds_per_billion_are_told(
    caplog: pytest.LogCaptureFixture, numel: int, is_rated: bool
) -> None:
    caplog.set_level(logging.INFO, "offload")
    with Construction() as built:
        pass
    built.log(numel)
    [line] = [message for message in caplog.messages if message.startswith("built in")]
    assert ("per billion" in line) is is_rated


OTHERS: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def note_what_other_tests_left() -> None:
    """Those of other files leave lanes, for one, which are no matter of construction."""
    gc.collect()
    OTHERS.clear()
    OTHERS.update(threading.enumerate())


def our_threads() -> list[str]:
    """Names of the library's threads that this test has started and that still run."""
    alive = set(threading.enumerate()) - OTHERS
    return [thread.name for thread in alive if thread.name.startswith("offload-")]


def refuse(build: Callable[[], object], raised: list[PartError], *, has_views: bool = False) -> None:
    """`build` raises what was raised inside, and when it does so nothing is left: garbage is not collected before.

    `has_views`: but for those that keep memory mapped, which go with the error's frames.
    """
    before = mapped_bytes()
    gc.disable()
    try:
        with pytest.raises(PartError) as caught:
            build()
        assert raised == [caught.value]
        assert our_threads() == []
        if has_views:
            traceback.clear_frames(caught.value.__traceback__)
            gc.collect()
        assert mapped_bytes() == before
    finally:
        gc.enable()


PARTS = [
    ("Parts", 1),
    ("make_transport", 1),
    ("make_slab_maker", 1),
    ("make_backend", 1),
    ("HostStepper", 1),
    ("_make_room", 1),
    ("Ranks", 1),
    ("Engine", 1),
]
HYBRID_PARTS = [
    *PARTS,
    ("make_transport", 2),
    ("make_slab_maker", 2),
    ("FixedSlots", 1),
    ("StreamStepper", 1),
    ("DeviceStepper", 1),
    ("HybridStepper", 1),
]


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize(
    ("mode", "part", "number"),
    [("wavefront", *part) for part in PARTS] + [("hybrid", *part) for part in HYBRID_PARTS],
)
def test_what_was_built_before_a_part_that_fails_is_closed(
    mode: str, part: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_lanes(monkeypatch)
    raised = fail_at(monkeypatch, assembly, part, number)
    model = make_decoder()
    offload.cast_compute_weights(model)
    refuse(lambda: adamw(model, mode=mode, overlap_forward=True, model=model), raised)


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize("part", ["make_slab_maker", "slots", "StreamStepper", "Engine"])
@pytest.mark.parametrize("mode", ["all-at-once", "chunked-sync", "chunked-stream"])
def test_so_it_is_where_state_is_streamed_alone(
    mode: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if part == "slots":
        part = "FreshSlots" if mode == "all-at-once" else "FixedSlots"
    use_lanes(monkeypatch)
    refuse(lambda: adamw(make_decoder(), mode=mode), fail_at(monkeypatch, assembly, part))


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize("mode", EARLY_MODES)
@pytest.mark.parametrize(
    ("owner", "name"),
    [(Engine, "add"), (front.OffloadOptimizer, "_publish"), (front, "ModelWatch"), (ForwardGates, "attach")],
)
def test_an_engine_that_nobody_will_have_is_closed(
    mode: str, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_lanes(monkeypatch)
    raised = fail_at(monkeypatch, owner, name)
    model = make_decoder()
    offload.cast_compute_weights(model)
    refuse(lambda: adamw(model, mode=mode, overlap_forward=True, model=model), raised, has_views=True)


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize("part", ["StreamStepper", "DeviceStepper", "HybridStepper"])
def test_the_thread_of_streamed_chunks_ends_too(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU there is none, so one is made where it would be."""
    make = assembly._make_hybrid_stream
    seen: list[str] = []

    def with_issuer(parts: Any, budget: Any, updater: Any, issuer: Worker | None) -> Any:
        issuer = assembly._make_issuer(parts)
        seen.extend(our_threads())
        return make(parts, budget, updater, issuer)

    monkeypatch.setattr(assembly, "_make_hybrid_stream", with_issuer)
    raised = fail_at(monkeypatch, assembly, part)
    refuse(lambda: adamw(make_decoder(), mode="hybrid"), raised)
    assert "offload-stream-copier" in seen


@pytest.mark.usefixtures("nothing_stays")
def test_an_error_of_closing_hides_neither_the_reason_nor_the_rest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_lanes(monkeypatch)
    close = LaneTransport.close

    def failing(transport: LaneTransport) -> None:
        close(transport)
        raise OSError("no end")

    monkeypatch.setattr(LaneTransport, "close", failing)
    raised = fail_at(monkeypatch, assembly, "DeviceStepper")
    refuse(lambda: adamw(make_decoder(), mode="hybrid"), raised)
    assert any("LaneTransport" in message and "DeviceStepper" in message for message in caplog.messages)


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize("number", [1, 2])
def test_a_thread_that_cannot_be_had_leaves_none_of_its_worker(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threading.enumerate()
    fail_at(monkeypatch, threading.Thread, "start", number)
    with pytest.raises(PartError):
        Worker("offload-alone", depth=1, timeout_s=TIMEOUT_S)
    for thread in threading.enumerate():
        if thread not in before:
            thread.join(TIMEOUT_S)
    assert our_threads() == []


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize("call", ["__init__", "__enter__"])
def test_an_interrupt_before_anything_can_be_undone_leaves_nothing(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised = fail_at(monkeypatch, assembly.Undo, call)
    refuse(lambda: adamw(make_decoder()), raised)


def end_helpers(number: int) -> None:
    with helpers.Helpers("offload-alone", 2) as threads:
        for _ in range(number):
            threads.submit(lambda: None)


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize(
    ("build", "number"),
    [
        (lambda _: Worker("offload-alone", depth=1, timeout_s=TIMEOUT_S), 1),
        (lambda _: Worker("offload-alone", depth=1, timeout_s=TIMEOUT_S), 2),
        (end_helpers, 1),
        (end_helpers, 2),
        (lambda _: Construction().__enter__(), 1),
    ],
)
def test_an_interrupt_while_a_thread_starts_leaves_none_of_them(
    build: Callable[[int], object], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting one waits until it runs, and there Ctrl-C comes through: it runs, and `start` has raised."""
    start, begun = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        begun.append(thread)
        if len(begun) == number:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build(number)
    for thread in begun:
        thread.join(WAIT_S)
    assert our_threads() == []


@pytest.mark.gpu
@pytest.mark.parametrize(
    "part", ["make_hybrid_updater", "StreamStepper", "DeviceStepper", "HybridStepper", "Engine"]
)
def test_on_a_gpu_nothing_stays_pinned_either(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_decoder(device="cuda")
    offload.cast_compute_weights(model)
    before = pinned_bytes()
    refuse(lambda: adamw(model, mode="hybrid"), fail_at(monkeypatch, assembly, part))
    assert pinned_bytes() == before
