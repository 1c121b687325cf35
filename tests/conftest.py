"""Without a CUDA device, tests marked ``gpu`` are left out. With ``CI`` set, examples of hypothesis are not random."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

settings.register_profile("ci", derandomize=True, print_blob=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        config.hook.pytest_deselected(items=on_gpu)
        items[:] = [item for item in items if item not in on_gpu]


def pytest_report_header() -> str:
    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else "none, tests marked gpu are left out"
    )
    return f"torch {torch.__version__}, CUDA device: {device}"
