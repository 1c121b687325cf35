"""How compiled kernels get their arguments: by address, so that nothing but these checks stands before memory."""

from __future__ import annotations

import errno
import logging
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.errors import TypingError

from offload.errors import KernelError
from offload.kernels import arguments, jit
from offload.kernels import team as team_module
from offload.kernels.accumulate import expand, fill_zero, round_weights
from offload.kernels.arithmetic import fma
from offload.kernels.backend import Variant
from offload.kernels.buffers import make_buffer, make_stage
from offload.kernels.denormals import restore_mode, set_flush
from offload.kernels.jit import Kernel, caching_in, inner, jit_disabled
from offload.kernels.numba_backend import NumbaBackend
from offload.kernels.quantized import pack_codes, unpack_codes
from offload.kernels.rule import ADAMW_RULES, SignSGDRule
from offload.kernels.shares import items, make_shares
from offload.kernels.team import ExecutorTeam, LayerTeam, find_layer, make_team

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


@Kernel
def add_products(worker, call):
    """``out = a * b + c`` by `fma`, whatever the types."""
    shares, a, b, c, out = call[0]
    for item in items(shares, worker):
        out[item] = fma(a[item], b[item], c[item])


@Kernel
def fail(worker, call):
    """A kernel that may raise, which none may."""
    shares, out = call[0]
    for item in items(shares, worker):
        if out[item] > 0.0:
            raise ValueError("lost: nobody sees this")


@Kernel
def halve_denormals(worker, call):
    """``out = source / 2`` under a mode given as a number."""
    shares, source, out, flush = call[0]
    for item in items(shares, worker):
        mode = set_flush(flush)
        out[item] = source[item] * np.float32(0.5)
        restore_mode(mode)


def run(kernel: Kernel, count: int, *operands: Any, num_threads: int = 1) -> None:
    team = make_team(num_threads)

    def work() -> None:
        team.start()
        kernel.compile(operands)
        team.run(kernel, count, operands)
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
        [3.0],
    ],
    ids=["dtype", "order", "dimensions", "byte order", "read-only", "unaligned", "None", "number", "list"],
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


@compiled
def test_a_call_keeps_all_that_it_points_to() -> None:
    """Shares belong to nobody else: freed, the next small array of any thread would be written in their place."""
    second, out, shares = np.zeros((3, 4)), np.zeros(1), make_shares(1, 1)
    weigh_rows.compile((second, out))
    alive = [weakref.ref(array) for array in (second, out, shares)]
    call = weigh_rows.bind(shares, (second, out))
    del second, out, shares
    assert all(reference() is not None for reference in alive)
    del call
    assert all(reference() is None for reference in alive)


class _FailingExecutor(ThreadPoolExecutor):
    """Runs the first of many, keeps the second back and then fails, as where no thread can be started."""

    def __init__(self) -> None:
        super().__init__(1)
        self.num_submitted = 0
        self.late: Any = None

    def submit(self, function: Any, /, *operands: Any, **options: Any) -> Any:
        self.num_submitted += 1
        if self.num_submitted == 1:
            return super().submit(function, *operands, **options)
        self.late = lambda: function(*operands, **options)
        raise RuntimeError("can't start new thread")


@compiled
def test_an_executor_that_fails_leaves_no_item_for_later() -> None:
    target, out = np.zeros(8, np.uint16), np.zeros(500)
    use_buffers.compile((target, out))
    team = ExecutorTeam(3)
    team._executor = executor = _FailingExecutor()
    with pytest.raises(RuntimeError, match="new thread"):
        team.run(use_buffers, out.size, (target, out))
    np.testing.assert_array_equal(out, np.arange(500.0) * 1024 + 4096)
    out[:] = -1.0
    executor.late()
    assert (out == -1.0).all()
    team.close()


@compiled
def test_an_interrupted_call_returns_when_its_workers_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives when the caller's own share is done; whoever catches it may touch the arrays."""
    target, out, done = np.zeros(8, np.uint16), np.zeros(500), []
    begun, waited_for = threading.Event(), threading.Event()
    work, wait = team_module._work, team_module.wait

    def interrupted(call: Any, worker: int) -> None:
        if worker == 0:
            assert begun.wait(DEADLINE_S)
            raise KeyboardInterrupt
        begun.set()
        assert waited_for.wait(DEADLINE_S)  # an item that takes until the caller waits
        work(call, worker)
        done.append(worker)

    use_buffers.compile((target, out))
    monkeypatch.setattr(team_module, "_work", interrupted)
    monkeypatch.setattr(team_module, "wait", lambda futures: (waited_for.set(), wait(futures)))
    team = ExecutorTeam(2)
    team.start()
    with pytest.raises(KeyboardInterrupt):
        team.run(use_buffers, out.size, (target, out))
    seen = list(done)
    waited_for.set()
    team.close()
    assert seen == [1]


@compiled
@pytest.mark.parametrize("number", [0.5, np.float32(0.5), np.zeros(1)[0]])
def test_a_fraction_is_no_whole_number(number: Any) -> None:
    """It would arrive as 0."""
    out = np.zeros(1)
    with pytest.raises(KernelError, match="whole"):
        weigh_rows.compile((number, out))


@compiled
@pytest.mark.parametrize("fields", ["reversed", "fewer", "others"])
def test_another_layout_of_arrays_is_refused(monkeypatch: pytest.MonkeyPatch, fields: str) -> None:
    """As where a newer Numba has changed its arrays: compiled code would take a size for an address."""
    known = arguments.ARRAY_FIELDS
    changed = {"reversed": known[::-1], "fewer": known[:-1], "others": (*known[:-1], "flags")}[fields]
    monkeypatch.setattr(arguments, "ARRAY_FIELDS", changed)
    with pytest.raises(KernelError, match=r"another way.*torch"):
        Kernel(weigh_rows.python).compile((np.zeros((3, 4)), np.zeros(1)))


@compiled
def test_words_of_another_size_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "WORD_BYTES", 4)
    with pytest.raises(KernelError, match="another way"):
        Kernel(weigh_rows.python).compile((np.zeros((3, 4)), np.zeros(1)))


@compiled
def test_two_threads_compile_a_function_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second function would take the place of one that the first thread may be running."""
    kernel, operands = Kernel(weigh_rows.python), (np.zeros((3, 4)), np.zeros(1))
    both, made = threading.Barrier(2, timeout=DEADLINE_S), []
    make = kernel._make
    monkeypatch.setattr(kernel, "_make", lambda *given: made.append(make(*given)) or made[-1])

    def work() -> None:
        both.wait()
        kernel.compile(operands)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert len(made) == 1


@compiled
def test_caches_of_the_program_are_left_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling takes seconds; another thread that makes a function with a cache meanwhile must get its own folder."""
    seen = []
    compile_c = jit.CFunc.compile
    monkeypatch.setattr(numba.config, "CACHE_DIR", "the program's")
    monkeypatch.setattr(
        jit.CFunc, "compile", lambda self: (seen.append(numba.config.CACHE_DIR), compile_c(self))
    )
    Kernel(weigh_rows.python).compile((np.zeros((3, 4)), np.zeros(1)), cache=tmp_path)
    assert seen == ["the program's"]
    assert list(tmp_path.rglob("*.nbc"))


class _NotingLock:
    """A lock that tells when a second thread wants it."""

    def __init__(self, wanted: threading.Event) -> None:
        self._lock, self._wanted, self._num_asked = threading.Lock(), wanted, 0

    def __enter__(self) -> None:
        self._num_asked += 1
        if self._num_asked == 2:
            self._wanted.set()
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def test_two_threads_that_name_a_folder_leave_the_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second to enter saw the first one's folder as the program's, and left it behind."""
    before, come, left = numba.config.CACHE_DIR, threading.Event(), threading.Event()
    monkeypatch.setattr(jit, "_cache_lock", _NotingLock(come))

    def enter_second() -> None:
        with caching_in(tmp_path / "second"):
            come.set()
            left.wait(DEADLINE_S)

    thread = threading.Thread(target=enter_second)
    with caching_in(tmp_path / "first"):
        thread.start()
        assert come.wait(DEADLINE_S)  # to the lock, or inside where there is none
    left.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()
    assert before == numba.config.CACHE_DIR


@compiled
def test_functions_of_other_types_share_no_index(tmp_path: Path) -> None:
    """Numba numbers them in an index without a lock: two processes at a time may give two functions one number."""
    kernel = Kernel(weigh_rows.python)
    kernel.compile((np.zeros((3, 4)), np.zeros(1)), cache=tmp_path)
    kernel.compile((np.zeros((3, 4), np.float32), np.zeros(1)), cache=tmp_path)
    assert [path.suffix for path in tmp_path.rglob("*.nb?")].count(".nbi") == 2


@compiled
def test_a_full_disk_is_logged_and_nothing_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fill_up(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", fill_up)
    kernel, operands = Kernel(weigh_rows.python), (np.ones((3, 4)), np.zeros(1))
    with caplog.at_level(logging.WARNING, logger="offload"):
        kernel.compile(operands, cache=tmp_path)
    assert "weigh_rows is not cached" in caplog.text
    run(kernel, 1, *operands)
    assert operands[1][0] == 36.0


@compiled
def test_a_launcher_that_cannot_be_cached_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fill_up(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    layer = find_layer()
    if layer is None:
        pytest.skip("no layer, no launcher")
    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", fill_up)
    monkeypatch.setattr(team_module, "launch", jit.parallel(team_module.launch.py_func))
    with caplog.at_level(logging.WARNING, logger="offload"), ThreadPoolExecutor(1) as worker:
        worker.submit(LayerTeam(layer, 1).start, tmp_path).result(DEADLINE_S)
    assert "launcher is not cached" in caplog.text
    assert team_module.LAUNCH_TYPES in team_module.launch.overloads


@compiled
def test_what_came_from_a_cache_runs_and_has_no_assembly(tmp_path: Path) -> None:
    operands = (np.ones((3, 4)), np.zeros(1))
    for has_assembly in (True, False):
        kernel = Kernel(weigh_rows.python)
        kernel.compile(operands, cache=tmp_path)
        assert bool(kernel.assembly()) is has_assembly
        operands[1][:] = 0.0
        run(kernel, 1, *operands)
        assert operands[1][0] == 36.0


@pytest.mark.parametrize("flush", [False, True, 0, 1, 2, 256])
def test_any_number_but_zero_flushes(flush: int) -> None:
    source, out = np.full(4, 1.5e-38, np.float32), np.full(4, 7.0, np.float32)
    run(halve_denormals, 4, source, out, flush)
    np.testing.assert_array_equal(out == 0.0, bool(flush))


@compiled
@pytest.mark.parametrize("place", range(3))
def test_instructions_take_no_float64(place: int) -> None:
    """Numba would round it to float32 first, which the Python body does not: other bits with the JIT off."""
    single, double = np.zeros(4, np.float32), np.zeros(4)
    operands = [single, single, single]
    add_products.compile((*operands, single))
    operands[place] = double
    with pytest.raises(TypingError, match=r"fma takes float32: .* float64"):
        add_products.compile((*operands, single))


def all_kernels() -> Iterator[tuple[Kernel, tuple[Any, ...]]]:
    for rule in (*ADAMW_RULES.values(), SignSGDRule):
        for variant in (Variant(), Variant(grad="fp32", weight="fp32", acc=True, sums=True, new_state=True)):
            yield from NumbaBackend(rule, num_threads=1)._hot_calls(variant)
    single, bits, codes = np.zeros(4, np.float32), np.zeros(4, np.uint16), np.zeros(4, np.uint8)
    yield from ((fill_zero, (array,)) for array in (single, bits, codes))
    yield from [(round_weights, (single, bits)), (expand, (bits, single))]
    yield from [(unpack_codes, (codes, single, True, single)), (pack_codes, (single, True, codes, single))]


def may_raise(kernel: Kernel, operands: tuple[Any, ...]) -> bool:
    """Whether an exception is left in the code: its arguments lie beside it, pickled."""
    fresh = Kernel(kernel.python)
    fresh.compile(operands)
    (compiled_one,) = fresh._compiled.values()
    return "picklebuf" in compiled_one.inspect_llvm() or "pickledata" in compiled_one.inspect_llvm()


@compiled
@pytest.mark.slow
def test_no_kernel_can_raise() -> None:
    """Numba prints the exception of a C function and goes on: half a step would be taken for a whole one."""
    assert may_raise(fail, (np.zeros(4),))
    assert [kernel.name for kernel, operands in all_kernels() if may_raise(kernel, operands)] == []
