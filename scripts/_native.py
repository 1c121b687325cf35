"""The update kernel in C++ (native_adamw.cpp), compiled for this machine where there is a compiler."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).with_name("native_adamw.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
         "-shared", "-fPIC")  # fmt: skip
TIMEOUT_S = 120.0

Update = Callable[[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]


def load_native() -> tuple[Update | None, str]:
    """The kernel and the command that made it, or None and why there is none.

    It is called with threads, a row of hyperparameters (`AdamWRule.row`, float32[8]), gradient and weight (uint16[n], BF16
    bits; the weight 64-byte aligned), master and both moments (float32[n], in place): gradient, master, moments, weight.
    """
    if platform.machine() != "x86_64":
        return None, f"the C++ kernel is written for x86-64, this is {platform.machine()}"
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        return None, "no C++ compiler is found"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "native_adamw.so"
        command = [compiler, *FLAGS, str(SOURCE), "-o", str(library)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return None, f"{compiler}: {error}"
        if done.returncode:
            return None, f"{compiler} failed: {done.stderr.strip()[-300:]}"
        try:
            function = ctypes.CDLL(str(library)).native_adamw  # stays mapped when the file is gone
        except OSError as error:
            return None, f"the compiled kernel cannot be loaded: {error}"
    function.restype = None
    function.argtypes = [ctypes.c_int64, ctypes.c_int, *[ctypes.c_void_p] * 6]

    def update(threads: int, row: np.ndarray, *arrays: np.ndarray) -> None:
        function(arrays[0].size, threads, row.ctypes.data, *(array.ctypes.data for array in arrays))

    return update, f"{Path(compiler).name} {' '.join(FLAGS[1:4])}"
