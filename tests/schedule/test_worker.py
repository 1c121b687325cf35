"""The worker thread, made deterministic by gates: no test sleeps, none waits without a deadline."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import pytest

from offload.errors import ClosedError, ConfigError, DeadlineError, KernelError, WorkerError
from offload.schedule import worker as worker_module
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
    """Writes what happens to it into `log`; takes one of `slots` from issue to finish."""

    def __init__(
        self,
        name: str,
        log: list[str],
        *,
        slots: list[int] | None = None,
        on_issue: Callable[[], None] | None = None,
        on_finish: Callable[[], None] | None = None,
    ) -> None:
        self.name, self.log, self.slots = name, log, slots
        self.on_issue, self.on_finish = on_issue, on_finish
        self.dropped = threading.Event()
        self.drop_error: BaseException | None = None

    def issue(self) -> bool:
        if self.on_issue:
            self.on_issue()
        if self.slots is not None:
            if not self.slots[0]:
                return False
            self.slots[0] -= 1
        self.log.append(f"issue {self.name}")
        return True

    def finish(self) -> None:
        if self.on_finish:
            self.on_finish()
        if self.slots is not None:
            self.slots[0] += 1
        self.log.append(f"finish {self.name}")

    def drop(self, error: BaseException) -> None:
        self.drop_error = error
        self.dropped.set()


@pytest.fixture
def make_worker() -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def make(*, depth: int = 100, timeout_s: float = DEADLINE_S) -> Worker:
        workers.append(Worker("test-worker", depth=depth, timeout_s=timeout_s))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()
        assert not worker._thread.is_alive()


@pytest.fixture
def log() -> list[str]:
    return []


def submit_gate(worker: Worker, log: list[str]) -> Gate:
    """Stop the worker inside a job, so that what is submitted next is all in the queue at once."""
    gate = Gate()
    worker.submit(FakeJob("gate", log, on_finish=gate))
    assert gate.reached.wait(DEADLINE_S)
    return gate


def wait_failed(worker: Worker) -> None:
    worker._outcome.wait_failed(DEADLINE_S)
    assert worker.failed


# Order and lookahead


@pytest.mark.parametrize("slots", [1, 2, 3, 10])
def test_jobs_finish_in_order_and_are_issued_as_far_ahead_as_slots_allow(
    make_worker: Callable[..., Worker], log: list[str], slots: int
) -> None:
    worker, free, ahead = make_worker(), [slots], min(slots, 5)
    gate = submit_gate(worker, log)
    for name in range(5):
        worker.submit(FakeJob(str(name), log, slots=free))
    gate.open()
    worker.call(lambda: None)
    expected = ["issue gate", "finish gate", *(f"issue {name}" for name in range(ahead))]
    for name in range(5):
        expected += [f"finish {name}", *([f"issue {name + ahead}"] if name + ahead < 5 else [])]
    assert log == expected


def test_call_runs_on_the_thread_after_all_earlier_jobs(
    make_worker: Callable[..., Worker], log: list[str]
) -> None:
    worker = make_worker()
    for name in "ab":
        worker.submit(FakeJob(name, log))
    seen, thread = worker.call(lambda: (list(log), threading.current_thread().name))
    assert [line for line in seen if line.startswith("finish")] == ["finish a", "finish b"]
    assert thread == "test-worker"


def test_no_free_slot_with_nothing_in_flight_is_an_error(
    make_worker: Callable[..., Worker], log: list[str]
) -> None:
    """Otherwise the worker would spin for ever."""
    worker = make_worker()
    worker.submit(FakeJob("starved", log, slots=[0]))
    wait_failed(worker)
    with pytest.raises(WorkerError, match="no free slot"):
        worker.call(lambda: None)


# Back-pressure


def test_submit_blocks_while_the_queue_is_full(make_worker: Callable[..., Worker], log: list[str]) -> None:
    worker = make_worker(depth=2)
    gate = submit_gate(worker, log)
    for name in "ab":
        worker.submit(FakeJob(name, log))
    with ThreadPoolExecutor() as threads:
        third = threads.submit(worker.submit, FakeJob("c", log))
        with pytest.raises(FutureTimeout):
            third.result(SOON_S)
        gate.open()
        third.result(DEADLINE_S)
    worker.call(lambda: None)
    assert log[-1] == "finish c"


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_than_depth_jobs_wait(make_worker: Callable[..., Worker], log: list[str], depth: int) -> None:
    worker = make_worker(depth=depth, timeout_s=SOON_S)
    gate = submit_gate(worker, log)
    jobs = [FakeJob(str(name), log) for name in range(depth + 1)]
    for job in jobs:
        worker.submit(job)
    gate.open()
    assert [job.dropped.is_set() for job in jobs] == [False] * depth + [True]
    assert isinstance(jobs[-1].drop_error, DeadlineError)


# Errors


ERRORS = [
    ValueError("bad"),
    KernelError("bad"),
    TimeoutError("bad"),
    KeyboardInterrupt("bad"),
    SystemExit("bad"),
]


@pytest.mark.parametrize("half", ["on_issue", "on_finish"])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_jobs_error_is_raised_at_the_next_public_calls(
    make_worker: Callable[..., Worker], log: list[str], error: BaseException, half: str
) -> None:
    worker = make_worker()
    worker.submit(FakeJob("bad", log, **{half: Raiser(error)}))
    wait_failed(worker)
    for public in (worker.raise_error, lambda: worker.call(lambda: None), worker.raise_error):
        with pytest.raises(WorkerError, match=f"{type(error).__name__}: bad") as caught:
            public()
        assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_call_that_waits_behind_a_failing_job_gets_the_same_error(
    make_worker: Callable[..., Worker], log: list[str], error: BaseException
) -> None:
    worker = make_worker()
    gate = submit_gate(worker, log)
    worker.submit(FakeJob("bad", log, on_finish=Raiser(error)))
    with ThreadPoolExecutor() as threads:
        call = threads.submit(worker.call, log.clear)
        while worker._queue.qsize() < 2 and not call.done():
            pass
        gate.open()
        raised = call.exception(DEADLINE_S)
    assert type(raised) is WorkerError
    assert raised.__cause__ is error
    assert log


@pytest.mark.parametrize(
    "error", [e for e in ERRORS if not isinstance(e, KernelError)], ids=lambda e: type(e).__name__
)
def test_a_called_function_that_raises_stops_the_worker(
    make_worker: Callable[..., Worker], error: BaseException
) -> None:
    worker = make_worker()
    with pytest.raises(WorkerError) as caught:
        worker.call(Raiser(error))
    assert caught.value.__cause__ is error
    assert worker.failed


@pytest.mark.parametrize("error", [KernelError("ours"), ConfigError("ours"), DeadlineError("ours")])
def test_our_own_error_of_a_called_function_is_the_callers(
    make_worker: Callable[..., Worker], error: Exception
) -> None:
    """Nothing was half done: the worker goes on."""
    worker = make_worker()
    with pytest.raises(type(error)) as caught:
        worker.call(Raiser(error))
    assert caught.value is error
    assert worker.call(lambda: "on") == "on"


def test_after_an_error_jobs_are_dropped_with_it(make_worker: Callable[..., Worker], log: list[str]) -> None:
    """In flight, waiting for a slot, queued, or submitted later; none runs, and submit never blocks or raises."""
    worker, error, free = make_worker(depth=3), ValueError("bad"), [2]
    gate = submit_gate(worker, log)
    jobs = [
        FakeJob("bad", log, slots=free, on_finish=Raiser(error)),
        *(FakeJob(n, log, slots=free) for n in "ab"),
    ]
    for job in jobs:
        worker.submit(job)
    gate.open()
    wait_failed(worker)
    jobs += [FakeJob(str(n), log) for n in range(10)]
    for job in jobs[3:]:
        worker.submit(job)
    for job in jobs[1:]:
        assert job.dropped.wait(DEADLINE_S)
        assert job.drop_error is error
    assert [line for line in log if line.startswith("finish")] == ["finish gate"]


def test_the_first_error_stays(make_worker: Callable[..., Worker], log: list[str]) -> None:
    worker = make_worker(timeout_s=SOON_S)
    gate = submit_gate(worker, log)
    worker.submit(FakeJob("bad", log, on_finish=Raiser(ValueError("second"))))
    with pytest.raises(DeadlineError):
        worker.call(lambda: None)
    gate.open()
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


def test_no_deadline_at_all(make_worker: Callable[..., Worker]) -> None:
    assert make_worker(timeout_s=float("inf")).call(lambda: 1) == 1


# The worker's own thread


def test_call_from_the_workers_own_thread_runs_at_once(make_worker: Callable[..., Worker]) -> None:
    """As when the garbage collector finalizes an optimizer there; waiting for oneself would be a deadlock."""
    worker = make_worker()
    assert worker.call(lambda: worker.call(threading.current_thread)).name == "test-worker"


def test_close_from_the_workers_own_thread(make_worker: Callable[..., Worker]) -> None:
    worker = make_worker()
    worker.call(worker.close)
    worker._thread.join(DEADLINE_S)
    assert not worker._thread.is_alive()


# Close


def test_close_finishes_what_is_queued(make_worker: Callable[..., Worker], log: list[str]) -> None:
    worker = make_worker()
    gate = submit_gate(worker, log)
    for name in "ab":
        worker.submit(FakeJob(name, log))
    gate.open()
    worker.close()
    assert not worker._thread.is_alive()
    assert [line for line in log if line.startswith("finish")] == ["finish gate", "finish a", "finish b"]


def test_close_twice_and_use_after_close(make_worker: Callable[..., Worker], log: list[str]) -> None:
    worker = make_worker()
    worker.close()
    worker.close()
    job = FakeJob("late", log)
    worker.submit(job)
    assert isinstance(job.drop_error, ClosedError)
    with pytest.raises(ClosedError):
        worker.call(lambda: None)


def test_close_waits_for_room_in_a_full_queue(make_worker: Callable[..., Worker], log: list[str]) -> None:
    worker = make_worker(depth=1)
    gate = submit_gate(worker, log)
    worker.submit(FakeJob("a", log))
    with ThreadPoolExecutor() as threads:
        closing = threads.submit(worker.close)
        with pytest.raises(FutureTimeout):
            closing.result(SOON_S)
        gate.open()
        closing.result(DEADLINE_S)
    assert log[-1] == "finish a"


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
    gate.open()
    worker._queue.put(None, timeout=DEADLINE_S)
    worker._thread.join(DEADLINE_S)


@pytest.mark.parametrize("half", ["on_issue", "on_finish"])
def test_the_thread_ends_where_the_last_jobs_fail_during_close(
    make_worker: Callable[..., Worker], log: list[str], half: str
) -> None:
    """The end is read ahead of the failure; nobody asks for it a second time."""
    worker = make_worker()
    gate = submit_gate(worker, log)
    other: Any = {half: Raiser(ValueError("bad"))}
    jobs = [FakeJob("bad", log, **other), FakeJob("b", log)]
    for job in jobs:
        worker.submit(job)
    with ThreadPoolExecutor() as threads:
        closing = threads.submit(worker.close)
        while worker._queue.qsize() < 3 and not closing.done():
            pass
        gate.open()
        closing.result(worker_module.CLOSE_TIMEOUT_S / 2)
    assert not worker._thread.is_alive()
    assert jobs[1].dropped.is_set()


def test_close_after_a_failure(make_worker: Callable[..., Worker], log: list[str]) -> None:
    worker = make_worker()
    worker.submit(FakeJob("bad", log, on_issue=Raiser(ValueError("bad"))))
    wait_failed(worker)
    worker.close()
    assert not worker._thread.is_alive()
