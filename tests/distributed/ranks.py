"""Runs a function on several ranks at once, each in a process of its own, under one deadline.

    def scenario(mode):                      # module-level: it is found by name in the other process
        ...                                  # torch.distributed is initialized here
        return dist.get_rank()

    def test_it(ranks):                      # the fixture of this folder's conftest
        assert ranks.run(scenario, 4, "wavefront") == [0, 1, 2, 3]

The processes stay for the next test, so that torch is imported and kernels are compiled once; every call gets a fresh
process group of the size it asks for. After a failure, a death or a missed deadline all of them are killed, and the
next call starts new ones: they are forked from a server that has imported torch and run nothing, which takes moments.
"""

from __future__ import annotations

import datetime as dt
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["RankError", "Ranks"]

PRELOADED = ["torch", "torch.distributed.fsdp", "torch.distributed.tensor", "offload"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
GRACE_S = 3.0
"""After one rank failed, others that failed too may tell so."""


class RankError(AssertionError):
    """A rank raised, died, or was not done by the deadline; the message holds its traceback."""


class _Task(NamedTuple):
    module: str
    function: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    rank: int
    size: int
    backend: str
    store: str
    timeout_s: float


class _Rank(NamedTuple):
    process: Any
    connection: Connection


class Ranks:
    """A few processes, of which each call takes as many as it needs. Close it at the end."""

    def __init__(self) -> None:
        self._ranks: list[_Rank] = []

    def run(
        self,
        function: Callable[..., Any],
        size: int,
        *arguments: Any,
        deadline_s: float = 150.0,
        timeout_s: float = 30.0,
        backend: str = "gloo",
        may_die: Collection[int] = (),
        **options: Any,
    ) -> list[Any]:
        """Call ``function(*arguments, **options)`` on ranks 0 to ``size - 1``; their results, in order of ranks.

        Args:
            function: module-level. It, its arguments and its results are pickled.
            deadline_s: seconds after which all ranks are killed and the call fails.
            timeout_s: of the process group's collectives.
            may_die: ranks that kill themselves; their result is None.

        Raises:
            RankError: see there.
        """
        with tempfile.TemporaryDirectory() as folder:
            self._start(size)
            store = str(Path(folder) / "store")
            for rank, (_, connection) in enumerate(self._ranks[:size]):
                task = _Task(
                    function.__module__, function.__qualname__, arguments, options, rank, size, backend, store,
                    timeout_s,
                )  # fmt: skip
                connection.send_bytes(pickle.dumps(task))
            try:
                results = self._collect(size, time.monotonic() + deadline_s, deadline_s, may_die)
            except BaseException:
                self.close()
                raise
        if may_die:
            self.close()
        return results

    def close(self) -> None:
        """Kill all processes. They hold nothing that is worth an orderly end."""
        ranks, self._ranks = self._ranks, []
        for process, connection in ranks:
            process.kill()
            connection.close()
        for process, _ in ranks:
            process.join()

    def _start(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        before = {name: os.environ.get(name) for name in ENVIRONMENT}
        os.environ.update(ENVIRONMENT)  # read by the server when it is started, and inherited from it
        try:
            while len(self._ranks) < size:
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, sys.path), daemon=True)
                process.start()
                theirs.close()
                self._ranks.append(_Rank(process, ours))
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def _collect(self, size: int, deadline: float, deadline_s: float, may_die: Collection[int]) -> list[Any]:
        results: list[Any] = [None] * size
        failures: dict[int, str] = {}
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._ranks[:size])}
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                try:
                    good, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    self._ranks[rank].process.join()
                    code = self._ranks[rank].process.exitcode
                    good, value = rank in may_die, f"died with exit code {code}\n"
                    value = None if good else value
                if good:
                    results[rank] = value
                else:
                    failures[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if failures or waiting:
            raise RankError(_describe(failures, sorted(waiting.values()), deadline_s))
        return results


def _describe(failures: dict[int, str], waiting: Sequence[int], deadline_s: float) -> str:
    parts = [f"rank {rank} {text}" for rank, text in sorted(failures.items())]
    if waiting and failures:
        parts.append(f"rank(s) {list(waiting)} were still running and were killed")
    elif waiting:
        parts.append(f"rank(s) {list(waiting)} were not done within {deadline_s} s and were killed")
    return "\n".join(parts)


def _serve(connection: Connection, path: list[str]) -> None:
    """In a rank's process: run tasks until the other end is closed."""
    sys.path[:] = path
    faulthandler.enable()  # a crash in native code then shows where it was called from
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            task: _Task = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = pickle.dumps((True, _run(task)))
        except BaseException:  # noqa: BLE001 - told to the parent, which fails the test
            answer = pickle.dumps((False, f"failed:\n{traceback.format_exc()}"))
        connection.send_bytes(answer)


def _run(task: _Task) -> Any:
    import torch
    import torch.distributed as dist

    function = importlib.import_module(task.module)
    for name in task.function.split("."):
        function = getattr(function, name)
    device = None
    if task.backend == "nccl":
        device = torch.device("cuda", task.rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        task.backend,
        init_method=f"file://{task.store}",
        rank=task.rank,
        world_size=task.size,
        timeout=dt.timedelta(seconds=task.timeout_s),
        device_id=device,
    )
    try:
        if device is not None:
            # torch 2.11 crashed in split_group (of init_device_mesh) where the group had not been used before.
            dist.all_reduce(torch.zeros(1, device=device))
        return function(*task.arguments, **task.options)  # type: ignore[operator]
    finally:
        dist.destroy_process_group()
