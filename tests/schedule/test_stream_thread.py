"""Where streamed tiles travel: order, hurry, and what an error ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from offload.errors import DeadlineError, StateError, WorkerError
from offload.schedule.stream_thread import StreamThread
from offload.schedule.worker import Worker
from offload.transfer.host import HostTransport

TIMEOUT_S = 60.0

WHERE = ["caller", "worker", "issuer"]


class Rig:
    """A thread of each kind, and how often it has recovered."""

    def __init__(self, where: str, **options: Any) -> None:
        self.worker = Worker("offload-test", depth=8, timeout_s=TIMEOUT_S)
        self.issuer = (
            Worker("offload-test-stream", depth=64, timeout_s=TIMEOUT_S) if where == "issuer" else None
        )
        self.recovered = 0
        self.thread = StreamThread(
            self.worker,
            self.issuer,
            on_gpu=where != "worker",
            recover=self.recover,
            **{"alone": True, "in_groups": False, **options},
        )

    def recover(self) -> None:
        self.recovered += 1

    def wait(self) -> None:
        """For all that was given so far."""
        for worker in (self.worker, self.issuer):
            if worker is not None and not worker.failed:
                worker.call(lambda: None, on_copier=True)


@contextmanager
def rig(where: str, **options: Any) -> Iterator[Rig]:
    made = Rig(where, **options)
    try:
        yield made
    finally:
        made.worker.close()
        made.thread.close()


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("where", WHERE)
def test_where_functions_run(where: str) -> None:
    with rig(where) as it:
        names: list[str] = []
        note = lambda: names.append(threading.current_thread().name)  # noqa: E731
        it.thread.run(note)
        it.thread.run_later(note)
        it.wait()
        assert it.thread.is_callers is (where == "caller")
        expected = {
            "caller": "MainThread",
            "worker": "offload-test-worker",
            "issuer": "offload-test-stream-worker",
        }
        assert names == [expected[where]] * 2


@pytest.mark.parametrize("where", WHERE)
def test_an_error_before_any_change_leaves_the_step_to_be_called_again(where: str) -> None:
    with rig(where) as it:
        for _ in range(2):
            with pytest.raises(StateError, match=r"the step did not begin \(OSError: no link\)") as caught:
                it.thread.run(partial(fail, OSError("no link")))
            assert isinstance(caught.value.__cause__, OSError)
        assert it.recovered == 2
        assert not it.worker.failed
        done: list[int] = []
        it.thread.run(lambda: done.append(1))
        assert done == [1]


def changed_by_a_trip(thread: StreamThread) -> None:
    thread.run(thread.note_change)


def changed_by_a_job(thread: StreamThread) -> None:
    thread.run_later(lambda: None)


@pytest.mark.parametrize("change", [changed_by_a_trip, changed_by_a_job])
@pytest.mark.parametrize("where", WHERE)
def test_an_error_after_a_change_ends_the_optimizer(
    where: str, change: Callable[[StreamThread], None]
) -> None:
    with rig(where) as it:
        change(it.thread)
        with pytest.raises(WorkerError, match=r"OSError: no link"):
            it.thread.run(partial(fail, OSError("no link")))
        with pytest.raises(WorkerError) as caught:
            it.worker.raise_error()
        assert isinstance(caught.value.__cause__, OSError)
        assert it.recovered == 0


@pytest.mark.parametrize("where", WHERE)
def test_so_does_any_error_where_others_step_too(where: str) -> None:
    with rig(where, alone=False) as it:
        with pytest.raises(WorkerError, match=r"OSError: no link"):
            it.thread.run(partial(fail, OSError("no link")))
        assert it.recovered == 0


def test_so_does_what_is_no_exception() -> None:
    with rig("caller") as it:
        with pytest.raises(KeyboardInterrupt):
            it.thread.run(partial(fail, KeyboardInterrupt()))
        assert it.worker.failed
        assert it.recovered == 0


@pytest.mark.parametrize("where", WHERE)
def test_after_a_step_has_ended_nothing_of_the_next_one_was_changed(where: str) -> None:
    with rig(where) as it:
        it.thread.note_change()
        it.thread.end_step()
        with pytest.raises(StateError):
            it.thread.run(partial(fail, OSError("no link")))
        it.thread.run_later(lambda: None, changes=False)
        with pytest.raises(StateError):
            it.thread.run(partial(fail, OSError("no link")))
        assert it.recovered == 2


@pytest.mark.parametrize("where", WHERE)
def test_a_hook_raises_nothing_and_the_next_call_does(where: str) -> None:
    with rig(where) as it:
        it.thread.run_later(partial(fail, OSError("no link")))
        after = it.worker.raise_error if where == "caller" else lambda: it.thread.run(lambda: None)
        for call in (after, it.worker.raise_error):
            with pytest.raises(WorkerError, match=r"OSError: no link"):
                call()


@pytest.mark.parametrize("where", WHERE)
def test_nothing_runs_any_more_once_the_optimizer_has_ended(where: str) -> None:
    with rig(where) as it:
        it.worker.fail(OSError("elsewhere"))
        ran: list[int] = []
        it.thread.run_later(lambda: ran.append(1))
        it.thread.guard(lambda: ran.append(2))
        if where != "worker":
            it.thread.run(lambda: ran.append(3))
        assert ran == []


def test_an_issuer_that_hangs_ends_the_optimizer_with_a_deadline() -> None:
    with rig("issuer") as it:
        assert it.issuer is not None
        over = threading.Event()
        it.issuer.timeout_s = 0.1
        try:
            with pytest.raises(DeadlineError):
                it.thread.run(lambda: over.wait(TIMEOUT_S) and None)
        finally:
            over.set()
        with pytest.raises(DeadlineError, match="did not finish"):
            it.worker.raise_error()


def test_an_issuer_that_fails_by_itself_ends_the_optimizer_with_the_same_reason() -> None:
    """Whether that shows in a call or in a job that it drops; a deadline stays one."""
    late = DeadlineError("took no job")
    late.__cause__ = TimeoutError()
    for error in (OSError("no memory"), late):
        for use in (StreamThread.run_later, StreamThread.run):
            with rig("issuer") as it:
                assert it.issuer is not None
                it.issuer.fail(error)
                assert not it.worker.failed
                if use is StreamThread.run:
                    with pytest.raises(WorkerError, match=str(error)):
                        it.thread.run(lambda: None)
                else:
                    it.thread.run_later(lambda: None)
                with pytest.raises(WorkerError, match=str(error)) as caught:
                    it.worker.raise_error()
                assert isinstance(caught.value, DeadlineError) is (error is late)
                assert isinstance(caught.value.__cause__, type(error))


@pytest.mark.parametrize("in_groups", [True, False])
def test_a_chunk_in_a_hurry_goes_before_others_that_wait(in_groups: bool) -> None:
    with rig("issuer", in_groups=in_groups) as it:
        order: list[Any] = []

        def step(*chunks: int | None) -> list[Any]:
            """The first job holds up all others; the one after it has been taken already."""
            begun, go = threading.Event(), threading.Event()
            it.thread.run_later(lambda: begun.set() or (go.wait(TIMEOUT_S) and None), chunk=0)
            assert begun.wait(TIMEOUT_S)
            for _ in range(2):  # as many as are taken ahead
                it.thread.run_later(lambda: None, chunk=0)
            for chunk in chunks:
                it.thread.run_later(partial(order.append, chunk), chunk=chunk)
            future = it.thread.ask_later(lambda: order.append("asked"), 5)
            go.set()
            it.wait()
            assert future.done()
            found = list(order)
            order.clear()
            return found

        it.thread.hurry(5)
        assert step(1, 2, 5, 5) == ([5, 5, "asked", 1, 2] if in_groups else [1, 2, 5, 5, "asked"])
        assert step(1, None, 5) == [1, None, 5, "asked"]  # nothing passes what is of many chunks
        it.thread.end_step()
        assert step(1, 5) == [1, 5, "asked"]


def test_a_chunk_in_a_hurry_whose_gradient_is_still_computed_holds_nobody_up() -> None:
    with rig("issuer", in_groups=True) as it:
        order: list[int] = []
        begun, go = threading.Event(), threading.Event()
        it.thread.hurry(5)
        it.thread.run_later(lambda: begun.set() or (go.wait(TIMEOUT_S) and None), chunk=0)
        assert begun.wait(TIMEOUT_S)
        for _ in range(2):  # as many as are taken ahead
            it.thread.run_later(lambda: None, chunk=0)
        it.thread.run_later(partial(order.append, 1), chunk=1)
        it.thread.run_later(partial(order.append, 5), chunk=5, ready=lambda: False)
        it.thread.run_later(partial(order.append, 2), chunk=2)
        go.set()
        it.wait()
        assert order == [1, 2, 5]


def test_what_is_asked_has_its_answer_or_its_error() -> None:
    with rig("issuer") as it:
        assert it.thread.ask_later(lambda: 7).result(TIMEOUT_S) == 7
        failed = it.thread.ask_later(partial(fail, StateError("not now")))
        assert isinstance(failed.exception(TIMEOUT_S), StateError)


class Attached(HostTransport):
    def __init__(self) -> None:
        super().__init__()
        self.threads: list[str] = []

    def attach_thread(self) -> None:
        self.threads.append(threading.current_thread().name)


@pytest.mark.parametrize("where", WHERE)
def test_only_an_issuers_threads_are_known_to_the_transport(where: str) -> None:
    with rig(where) as it:
        transport = Attached()
        it.thread.start(transport, None)
        both = ["offload-test-stream-worker", "offload-test-stream-copier"]
        assert transport.threads == (both if where == "issuer" else [])


@pytest.mark.parametrize("where", WHERE)
def test_closing_ends_the_issuer_and_no_other_thread(where: str) -> None:
    before = set(threading.enumerate())
    with rig(where) as it:
        it.thread.close()
        names = {thread.name for thread in set(threading.enumerate()) - before}
        assert names == {"offload-test-worker", "offload-test-copier"}
        assert it.thread.waited_s == 0.0
