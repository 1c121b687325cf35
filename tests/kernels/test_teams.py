"""The thread team: same bits on every layer and size, and no change to the rest of the program."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offload.errors import ClosedError
from offload.kernels.jit import cache_folder, jit_disabled
from offload.kernels.numba_backend import NumbaBackend
from offload.kernels.rule import AdamWRule
from offload.kernels.team import ExecutorTeam, LayerTeam
from offload.kernels.torch_backend import TorchBackend
from tests.kernels import workload
from tests.kernels.conftest import ADAMW_VARIANTS, FULL, InWorker

PROBE = ("-m", "tests.kernels.workload")
ROOT = Path(__file__).resolve().parents[2]
HIDE_LAYERS = "import sys; sys.modules['numba.np.ufunc.{}pool'] = None; "
IMPORT_PROBE = "from tests.kernels import workload as w; "
RUN_PROBE = IMPORT_PROBE + "print(*w.in_thread(w.probe))"
RUN_SMALL_PROBE = IMPORT_PROBE + "print(*w.in_thread(w.small_probe))"


def run_python(*arguments: str, **environment: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def run_probe(**environment: str) -> list[str]:
    return run_python(*PROBE, **environment).split()


@pytest.fixture(scope="module")
def reference() -> str:
    return workload.in_thread(workload.probe)[1]


def test_python_without_the_jit_has_the_same_bits(reference: str) -> None:
    assert run_probe(NUMBA_DISABLE_JIT="1") == ["python", reference]


def test_a_generic_cpu_has_the_same_bits(reference: str) -> None:
    assert run_probe(NUMBA_CPU_NAME="generic")[1] == reference


@pytest.mark.skipif(jit_disabled(), reason="NUMBA_DISABLE_JIT: there are no layers")
def test_without_libgomp_and_tbb_an_executor_takes_over(reference: str) -> None:
    program = HIDE_LAYERS.format("omp") + HIDE_LAYERS.format("tbb") + RUN_PROBE
    assert run_python("-c", program).split() == ["executor", reference]


@pytest.mark.skipif(jit_disabled(), reason="NUMBA_DISABLE_JIT: there are no layers")
@pytest.mark.skipif(importlib.util.find_spec("tbb") is None, reason="the tbb package is not installed")
def test_tbb_where_libgomp_is_missing() -> None:
    assert run_python("-c", HIDE_LAYERS.format("omp") + RUN_SMALL_PROBE).split()[0] == "tbb"


@pytest.mark.skipif(jit_disabled(), reason="NUMBA_DISABLE_JIT: there are no layers")
def test_a_program_on_workqueue_is_left_alone() -> None:
    launch = "import numba; numba.config.THREADING_LAYER = 'workqueue'; numba.set_num_threads(1); "
    assert run_python("-c", launch + RUN_SMALL_PROBE).split()[0] == "executor"


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("layer", ["omp", None])
def test_any_number_of_threads_gives_the_same_bits(
    start_backend: Any, monkeypatch: pytest.MonkeyPatch, num_threads: int, layer: str | None
) -> None:
    if jit_disabled():
        pytest.skip("NUMBA_DISABLE_JIT: there are no teams")
    sizes = [200_000, 17]
    tile = workload.make_tile(np.random.default_rng(0), sizes, FULL)
    other = workload.copy_tile(tile)
    team = ExecutorTeam(num_threads) if layer is None else LayerTeam(layer, num_threads)
    monkeypatch.setattr("offload.kernels.numba_backend.make_team", lambda _: team)
    backend = InWorker(NumbaBackend(AdamWRule, num_threads=num_threads, variants=[FULL]))
    monkeypatch.undo()
    for mine, updater in ((tile, start_backend()), (other, backend)):
        updater.update(mine, workload.make_rows(AdamWRule, workload.GROUP, 1, 2), np.ones(2, np.uint8))
    backend.stop()
    assert workload.same_tiles(tile, other)


def test_only_the_workers_thread_count_changes() -> None:
    program = (
        "import sys, torch; before = torch.get_num_threads(); " + RUN_SMALL_PROBE + "; import numba; "
        "print(torch.get_num_threads() == before, numba.get_num_threads() == numba.config.NUMBA_NUM_THREADS)"
    )
    lines = run_python("-c", program).splitlines()
    assert lines[-1] == "True True"


def test_the_torch_backend_keeps_its_threads_to_itself() -> None:
    before = torch.get_num_threads()
    seen = []

    def work() -> None:
        backend = TorchBackend(AdamWRule, num_threads=before + 1)
        backend.start()
        seen.append(torch.get_num_threads())
        child = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        child.start()
        child.join()

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert seen == [before + 1, before]
    assert torch.get_num_threads() == before


def test_denormals_are_flushed_in_no_other_code(start_backend: Any) -> None:
    def halve_least() -> float:
        return float(np.float32(1.1754944e-38) * np.float32(0.5))

    backend = start_backend()
    tile = workload.make_tile(np.random.default_rng(0), [5000], FULL)
    backend.update(tile, workload.make_rows(AdamWRule, workload.GROUP, 1, 1), np.ones(1, np.uint8))
    assert backend._executor.submit(halve_least).result() > 0.0
    assert halve_least() > 0.0


@pytest.mark.parametrize("flush", [True, False])
def test_flushing_is_the_flags_choice_whatever_the_threads_mode(start_backend: Any, flush: bool) -> None:
    backend = start_backend(flush=flush)
    backend._executor.submit(torch.set_flush_denormal, not flush).result()
    try:
        tile = workload.make_tile(np.random.default_rng(0), [5000], FULL, special=False)
        tile.grad[:], tile.acc[:], tile.moments[0][:] = 0, 0.0, 1e-39
        backend.update(tile, workload.make_rows(AdamWRule, workload.GROUP, 1, 1), np.ones(1, np.uint8))
    finally:
        backend._executor.submit(torch.set_flush_denormal, False).result()
    assert bool((tile.moments[0][:5000] == 0.0).all()) is flush


def test_use_before_start_and_after_close_is_refused() -> None:
    backend = NumbaBackend(AdamWRule, num_threads=1)
    with pytest.raises(ClosedError, match="start"):
        backend.fill_zero(np.zeros(4, np.float32))
    backend.close()
    backend.close()


@pytest.mark.skipif(jit_disabled(), reason="NUMBA_DISABLE_JIT: nothing is cached")
def test_kernels_are_cached_in_a_folder_of_their_sources(tmp_path: Path) -> None:
    cold = run_python(*PROBE, str(tmp_path))
    (folder,) = tmp_path.iterdir()
    compiled = {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.nbc")}
    for name in ("update_tile", "square_sums_of_tile", "launch"):
        assert any(name in file for file in compiled), name
    assert run_python(*PROBE, str(tmp_path)) == cold
    assert {path.name: path.stat().st_mtime_ns for path in folder.rglob("*.nbc")} == compiled


@pytest.mark.skipif(jit_disabled(), reason="NUMBA_DISABLE_JIT: nothing is cached")
def test_what_is_compiled_when_first_used_is_cached_too(tmp_path: Path) -> None:
    program = (
        "import sys, numpy as np; from offload.kernels.numba_backend import NumbaBackend; "
        "from offload.kernels.rule import AdamWRule; "
        "backend = NumbaBackend(AdamWRule, num_threads=1, variants=(), cache_dir=sys.argv[1]); "
        "backend.start(); backend.fill_zero(np.zeros(8)); backend.close()"
    )
    run_python("-c", program, str(tmp_path))
    assert any("fill_zero" in path.name for path in tmp_path.rglob("*.nbc"))


def test_a_folder_that_cannot_be_written_is_logged_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, logger="offload"):
        assert cache_folder(tmp_path / "file" / "below") is None
    assert "not cached" in caplog.text


def test_importing_needs_no_home_and_writes_nothing(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path / "missing"), "NUMBA_CACHE_DIR": "/proc/none"}
    run_python("-B", "-c", "import offload.kernels.numba_backend", **environment)
    assert not list(tmp_path.iterdir())


def test_the_example_variants_are_distinct() -> None:
    assert len(set(ADAMW_VARIANTS)) == len(ADAMW_VARIANTS)
