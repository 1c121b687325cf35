"""The worker's threads, made deterministic by gates: no test sleeps, none waits without a deadline."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any

import pytest

from offload.errors import ClosedError, ConfigError, DeadlineError, KernelError, WorkerError
from offload.schedule import worker as worker_module
from offload.schedule.backlog import Backlog
from offload.schedule.worker import Worker

DEADLINE_S = 20.0
SOON_S = 0.05


class Gate:
    """A place where the worker stops until it is let through."""

    def __init__(self) -> None:
        self.reached, self._open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self._open.wait(DEADLINE_S)

    def open(self) -> None:
        self._open.set()


class Raiser:
    """A function that raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self) -> None:
        raise self.error


class FakeJob:
    """Writes what happens to it into `log`; takes one of `slots` from issue to deliver."""

    def __init__(
        self,
        name: str,
        log: list[str],
        *,
        slots: list[int] | None = None,
        on_issue: Callable[[], None] | None = None,
        on_compute: Callable[[], None] | None = None,
        on_deliver: Callable[[], None] | None = None,
    ) -> None:
        self.name, self.log, self.slots = name, log, slots
        self.on_issue, self.on_compute, self.on_deliver = on_issue, on_compute, on_deliver
        self.issued, self.dropped = threading.Event(), threading.Event()
        self.drop_error: BaseException | None = None

    def issue(self) -> bool:
        if self.on_issue:
            self.on_issue()
        if self.slots is not None:
            if not self.slots[0]:
                return False
            self.slots[0] -= 1
        self.log.append(f"issue {self.name}")
        self.issued.set()
        return True

    def compute(self) -> None:
        if self.on_compute:
            self.on_compute()
        self.log.append(f"compute {self.name}")

    def deliver(self) -> None:
        if self.on_deliver:
            self.on_deliver()
        if self.slots is not None:
            self.slots[0] += 1
        self.log.append(f"deliver {self.name}")

    def drop(self, error: BaseException) -> None:
        self.drop_error = error
        self.dropped.set()


NAME = "worker-under-test"


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


@pytest.fixture
def make_worker() -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def make(*, depth: int = 100, timeout_s: float = DEADLINE_S) -> Worker:
        workers.append(Worker(NAME, depth=depth, timeout_s=timeout_s))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()
    assert threads() == []


@pytest.fixture
def log() -> list[str]:
    return []


def stages(log: list[str], stage: str) -> list[str]:
    """Names of the jobs that went through `stage`, in order."""
    return [line.split()[1] for line in log if line.startswith(stage)]


def submit_gate(worker: Worker, log: list[str]) -> Gate:
    """Stop the worker before it takes another job, so that what is submitted next is all in its queue at once."""
    gate = Gate()
    worker.submit(FakeJob("gate", log, on_issue=gate))
    assert gate.reached.wait(DEADLINE_S)
    return gate


def wait_failed(worker: Worker) -> None:
    behind = FakeJob("behind", [])
    worker.submit(behind)
    assert behind.dropped.wait(DEADLINE_S)
    assert worker.failed


def in_thread(pool: ThreadPoolExecutor, worker: Worker, function: Callable[[], Any]) -> Future[Any]:
    """Start ``worker.call(function)`` in another thread; returns when it has been queued."""
    submitted, submit = threading.Event(), worker.submit

    def submit_and_tell(job: Any) -> None:
        submit(job)
        submitted.set()

    worker.submit = submit_and_tell  # type: ignore[method-assign]
    future = pool.submit(worker.call, function)
    assert submitted.wait(DEADLINE_S)
    return future


# Order and lookahead


@pytest.mark.parametrize("slots", [1, 2, 3, 10])
def test_jobs_go_in_order_and_are_issued_as_far_ahead_as_slots_allow(
    make_worker: Callable[..., Worker], log: list[str], slots: int
) -> None:
    worker, gate, free = make_worker(), Gate(), [slots]
    jobs = [FakeJob(str(n), log, slots=free, on_compute=None if n else gate) for n in range(6)]
    for job in jobs:
        worker.submit(job)
    assert gate.reached.wait(DEADLINE_S)
    ahead = min(slots, len(jobs))
    assert jobs[ahead - 1].issued.wait(DEADLINE_S)
    assert log == [f"issue {n}" for n in range(ahead)]
    gate.open()
    worker.call(lambda: None, on_copier=True)
    for stage in ("issue", "compute", "deliver"):
        assert stages(log, stage) == [job.name for job in jobs]


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_stages_of_one_job_follow_each_other(
    make_worker: Callable[..., Worker], log: list[str], slots: int
) -> None:
    worker, free = make_worker(), [slots]
    for n in range(20):
        worker.submit(FakeJob(str(n), log, slots=free))
    worker.call(lambda: None, on_copier=True)
    for n in range(20):
        where = [log.index(f"{stage} {n}") for stage in ("issue", "compute", "deliver")]
        assert where == sorted(where)
    assert free == [slots]


@pytest.mark.parametrize(("on_copier", "done"), [(False, "compute"), (True, "deliver")])
def test_call_runs_after_all_earlier_jobs(
    make_worker: Callable[..., Worker], log: list[str], on_copier: bool, done: str
) -> None:
    worker = make_worker()
    for name in "ab":
        worker.submit(FakeJob(name, log))
    seen, thread = worker.call(lambda: (list(log), threading.current_thread()), on_copier=on_copier)
    assert stages(seen, done) == ["a", "b"]
    assert thread.name.startswith(NAME)


def test_kernels_and_copies_have_a_thread_each(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker()
    names = [
        worker.call(threading.current_thread, on_copier=on_copier).name for on_copier in (False, True, False)
    ]
    assert names[0] == names[2] != names[1]


def test_copies_are_issued_while_a_kernel_runs(make_worker: Callable[..., Worker], log: list[str]) -> None:
    worker, gate = make_worker(), Gate()
    worker.submit(FakeJob("kernel", log, on_compute=gate))
    assert gate.reached.wait(DEADLINE_S)
    later = FakeJob("later", log)
    worker.submit(later)
    assert later.issued.wait(DEADLINE_S)
    gate.open()


def test_no_free_slot_with_nothing_in_flight_is_an_error(
    make_worker: Callable[..., Worker], log: list[str]
) -> None:
    """Otherwise the worker would wait for ever."""
    worker, starved = make_worker(), FakeJob("starved", log, slots=[0])
    worker.submit(starved)
    assert starved.dropped.wait(DEADLINE_S)
    with pytest.raises(WorkerError, match="no free slot"):
        worker.call(lambda: None)


# Back-pressure


def test_submit_blocks_while_the_queue_is_full(make_worker: Callable[..., Worker], log: list[str]) -> None:
    worker = make_worker(depth=2)
    gate = submit_gate(worker, log)
    for name in "ab":
        worker.submit(FakeJob(name, log))
    with ThreadPoolExecutor() as pool:
        third = pool.submit(worker.submit, FakeJob("c", log))
        with pytest.raises(FutureTimeout):
            third.result(SOON_S)
        gate.open()
        third.result(DEADLINE_S)
    worker.call(lambda: None, on_copier=True)
    assert stages(log, "deliver") == ["gate", "a", "b", "c"]


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_than_depth_jobs_wait(make_worker: Callable[..., Worker], log: list[str], depth: int) -> None:
    worker = make_worker(depth=depth, timeout_s=SOON_S)
    gate = submit_gate(worker, log)
    jobs = [FakeJob(str(name), log) for name in range(depth + 1)]
    for job in jobs:
        worker.submit(job)
    dropped = [job.dropped.is_set() for job in jobs]
    gate.open()
    assert dropped == [False] * depth + [True]
    assert isinstance(jobs[-1].drop_error, DeadlineError)


# Errors


ERRORS = [
    ValueError("bad"),
    KernelError("bad"),
    TimeoutError("bad"),
    KeyboardInterrupt("bad"),
    SystemExit("bad"),
]
STAGES = ["on_issue", "on_compute", "on_deliver"]


def type_name(value: object) -> str:
    return value if isinstance(value, str) else type(value).__name__


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("error", ERRORS, ids=type_name)
def test_a_jobs_error_is_raised_at_the_next_public_calls(
    make_worker: Callable[..., Worker], log: list[str], error: BaseException, stage: str
) -> None:
    worker = make_worker()
    bad = FakeJob("bad", log, **{stage: Raiser(error)})  # type: ignore[arg-type]
    worker.submit(bad)
    assert bad.dropped.wait(DEADLINE_S)
    assert bad.drop_error is error
    for public in (worker.raise_error, lambda: worker.call(lambda: None), worker.raise_error):
        with pytest.raises(WorkerError, match=f"{type(error).__name__}: bad") as caught:
            public()
        assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", ERRORS, ids=type_name)
def test_a_call_that_waits_behind_a_failing_job_gets_the_same_error(
    make_worker: Callable[..., Worker], log: list[str], error: BaseException
) -> None:
    worker, ran = make_worker(), threading.Event()
    gate = submit_gate(worker, log)
    worker.submit(FakeJob("bad", log, on_compute=Raiser(error)))
    with ThreadPoolExecutor() as pool:
        call = in_thread(pool, worker, ran.set)
        gate.open()
        raised = call.exception(DEADLINE_S)
    assert type(raised) is WorkerError
    assert raised.__cause__ is error
    assert not ran.is_set()


@pytest.mark.parametrize("on_copier", [False, True])
@pytest.mark.parametrize("error", [e for e in ERRORS if not isinstance(e, KernelError)], ids=type_name)
def test_a_called_function_that_raises_stops_the_worker(
    make_worker: Callable[..., Worker], error: BaseException, on_copier: bool
) -> None:
    worker = make_worker()
    with pytest.raises(WorkerError) as caught:
        worker.call(Raiser(error), on_copier=on_copier)
    assert caught.value.__cause__ is error
    assert worker.failed


@pytest.mark.parametrize("on_copier", [False, True])
@pytest.mark.parametrize(
    "error", [KernelError("ours"), ConfigError("ours"), DeadlineError("ours")], ids=type_name
)
def test_our_own_error_of_a_called_function_is_the_callers(
    make_worker: Callable[..., Worker], error: Exception, on_copier: bool
) -> None:
    """Nothing was half done: the worker goes on."""
    worker = make_worker()
    with pytest.raises(type(error)) as caught:
        worker.call(Raiser(error), on_copier=on_copier)
    assert caught.value is error
    assert worker.call(lambda: "on") == "on"


def test_after_an_error_jobs_are_dropped_with_it(make_worker: Callable[..., Worker], log: list[str]) -> None:
    """In flight, waiting for a slot, queued, or submitted later; none runs, and submit never blocks or raises."""
    worker, error, free = make_worker(depth=4), ValueError("bad"), [2]
    gate = submit_gate(worker, log)
    jobs = [FakeJob("bad", log, slots=free, on_compute=Raiser(error))]
    jobs += [FakeJob(name, log, slots=free) for name in "abc"]
    for job in jobs:
        worker.submit(job)
    gate.open()
    assert jobs[0].dropped.wait(DEADLINE_S)
    jobs += [FakeJob(str(n), log) for n in range(10)]
    for job in jobs[4:]:
        worker.submit(job)
    for job in jobs:
        assert job.dropped.wait(DEADLINE_S)
        assert job.drop_error is error
    assert stages(log, "compute") == ["gate"]


def test_after_an_error_nobody_waits_for_a_device_that_is_behind() -> None:
    """What would tell that it has come so far is dropped with all other jobs."""
    worker, log = Worker("test", depth=8, timeout_s=DEADLINE_S, run_ahead=1), list[str]()
    gate = Gate()
    submit = partial(worker.submit, group=0, ready=lambda: False)
    try:
        submit(FakeJob("held", log, on_compute=gate))
        assert gate.reached.wait(DEADLINE_S)
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(submit, FakeJob("late", log))
            with pytest.raises(FutureTimeout):
                late.result(SOON_S)
            worker.fail(KernelError("somebody else's"))
            late.result(DEADLINE_S / 4)
    finally:
        gate.open()
        worker.close()


def test_the_first_error_stays(make_worker: Callable[..., Worker], log: list[str]) -> None:
    worker, gate = make_worker(timeout_s=SOON_S), Gate()

    def fail_late() -> None:
        gate()
        raise ValueError("second")

    bad = FakeJob("bad", log, on_compute=fail_late)
    worker.submit(bad)
    assert gate.reached.wait(DEADLINE_S)
    with pytest.raises(DeadlineError):
        worker.call(lambda: None)
    gate.open()
    assert bad.dropped.wait(DEADLINE_S)
    with pytest.raises(DeadlineError):
        worker.raise_error()


# Deadlines


def test_call_keeps_the_deadline(make_worker: Callable[..., Worker], log: list[str]) -> None:
    worker = make_worker(timeout_s=SOON_S)
    gate = submit_gate(worker, log)
    with pytest.raises(DeadlineError, match=rf"within {SOON_S} s \(config.timeout_s\)"):
        worker.call(lambda: None)
    with pytest.raises(DeadlineError):
        worker.raise_error()
    late = FakeJob("late", log)
    worker.submit(late)
    assert isinstance(late.drop_error, DeadlineError)
    gate.open()


def test_no_deadline_at_all(make_worker: Callable[..., Worker], log: list[str]) -> None:
    """Also where submit has to wait."""
    worker = make_worker(depth=1, timeout_s=float("inf"))
    for n in range(20):
        worker.submit(FakeJob(str(n), log))
    assert worker.call(lambda: 1) == 1


# The worker's own threads


@pytest.mark.parametrize("on_copier", [False, True])
def test_call_from_an_own_thread_runs_at_once(make_worker: Callable[..., Worker], on_copier: bool) -> None:
    """As when the garbage collector finalizes an optimizer there; waiting for oneself would be a deadlock."""
    worker = make_worker()
    name = worker.call(lambda: worker.call(threading.current_thread), on_copier=on_copier).name
    assert name.startswith(NAME)


@pytest.mark.parametrize("on_copier", [False, True])
def test_close_from_an_own_thread_waits_for_nobody(
    make_worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, on_copier: bool
) -> None:
    monkeypatch.setattr(worker_module, "CLOSE_TIMEOUT_S", DEADLINE_S)
    worker = make_worker()
    worker.call(worker.close, on_copier=on_copier)
    for thread in threads():
        thread.join(DEADLINE_S / 2)
    assert threads() == []


# Close


def test_close_finishes_what_is_queued(make_worker: Callable[..., Worker], log: list[str]) -> None:
    worker, free = make_worker(), [1]
    gate = submit_gate(worker, log)
    for name in "abc":
        worker.submit(FakeJob(name, log, slots=free))
    gate.open()
    worker.close()
    assert threads() == []
    assert stages(log, "deliver") == ["gate", "a", "b", "c"]


def test_close_again_and_use_after_close(
    make_worker: Callable[..., Worker], log: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    worker = make_worker(depth=1)
    for _ in range(3):
        worker.close()
    assert caplog.text == ""
    job = FakeJob("late", log)
    worker.submit(job)
    assert isinstance(job.drop_error, ClosedError)
    with pytest.raises(ClosedError):
        worker.call(lambda: None)


def test_close_finishes_a_full_queue_too(make_worker: Callable[..., Worker], log: list[str]) -> None:
    worker = make_worker(depth=1)
    gate = submit_gate(worker, log)
    worker.submit(FakeJob("a", log))
    with ThreadPoolExecutor() as pool:
        closing = pool.submit(worker.close)
        with pytest.raises(FutureTimeout):
            closing.result(SOON_S)
        gate.open()
        closing.result(DEADLINE_S)
    assert stages(log, "deliver") == ["gate", "a"]


def test_close_leaves_a_hanging_worker_behind(
    make_worker: Callable[..., Worker],
    log: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = make_worker(depth=1)
    gate = submit_gate(worker, log)
    worker.submit(FakeJob("a", log))
    monkeypatch.setattr(worker_module, "CLOSE_TIMEOUT_S", SOON_S)
    with caplog.at_level(logging.WARNING):
        worker.close()
    assert "left behind" in caplog.text
    gate.open()  # it finds its end when it goes on
    for thread in threads():
        thread.join(DEADLINE_S)


def test_a_job_that_comes_while_another_thread_closes_is_dropped(
    make_worker: Callable[..., Worker], log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saw an open worker, and its item would lie behind the end."""
    worker, gate, put = make_worker(), Gate(), Backlog.put

    def slow_put(*arguments: Any, **more: Any) -> bool:
        gate()
        return put(*arguments, **more)

    monkeypatch.setattr(Backlog, "put", slow_put)
    job = FakeJob("late", log)
    with ThreadPoolExecutor() as pool:
        submitting = pool.submit(worker.submit, job)
        calling = pool.submit(worker.call, lambda: None)
        assert gate.reached.wait(DEADLINE_S)
        worker.close()
        gate.open()
        submitting.result(DEADLINE_S)
        assert isinstance(calling.exception(DEADLINE_S / 2), ClosedError)
    assert isinstance(job.drop_error, ClosedError)
    assert not worker.failed
    assert worker._inbox.waiting() == []


def test_who_waits_for_room_when_another_thread_closes_is_refused(
    make_worker: Callable[..., Worker], log: list[str]
) -> None:
    worker = make_worker(depth=1)
    gate = submit_gate(worker, log)
    worker.submit(FakeJob("a", log))
    jobs = [FakeJob(name, log) for name in "bc"]
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(worker.submit, job) for job in jobs]
        with pytest.raises(FutureTimeout):
            waiting[0].result(SOON_S)
        closing = pool.submit(worker.close)
        for each in waiting:  # at once, not when there is room
            each.result(DEADLINE_S / 2)
        gate.open()
        closing.result(DEADLINE_S)
    assert [type(job.drop_error) for job in jobs] == [ClosedError] * 2
    assert stages(log, "deliver") == ["gate", "a"]


@pytest.mark.parametrize("stage", STAGES)
def test_the_threads_end_where_a_job_fails_during_close(
    make_worker: Callable[..., Worker], log: list[str], stage: str
) -> None:
    worker, gate = make_worker(), Gate()

    def fail_late() -> None:
        gate()
        raise ValueError("bad")

    jobs = [FakeJob("bad", log, **{stage: fail_late}), FakeJob("b", log)]  # type: ignore[arg-type]
    for job in jobs:
        worker.submit(job)
    assert gate.reached.wait(DEADLINE_S)
    with ThreadPoolExecutor() as pool:
        closing = pool.submit(worker.close)
        gate.open()
        closing.result(worker_module.CLOSE_TIMEOUT_S / 2)
    assert threads() == []
    assert jobs[0].dropped.is_set()


def test_close_after_a_failure(make_worker: Callable[..., Worker], log: list[str]) -> None:
    worker = make_worker()
    worker.submit(FakeJob("bad", log, on_issue=Raiser(ValueError("bad"))))
    wait_failed(worker)
    worker.close()
    assert threads() == []


def test_a_forgotten_worker_is_collected() -> None:
    """Its threads hold no reference to it."""
    worker = Worker(NAME, depth=1, timeout_s=DEADLINE_S)
    reference, inbox = weakref.ref(worker), worker._inbox
    del worker
    gc.collect()
    assert reference() is None
    inbox.end(worker_module._END, DEADLINE_S)
    for thread in threads():
        thread.join(DEADLINE_S)
