"""Where ``OFFLOAD_TEST_INTEGRATIONS`` is set, as in CI, a missing framework is a failure and not a reason to skip."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

LIBRARIES = ("transformers", "accelerate", "lightning")


def pytest_configure(config: pytest.Config) -> None:
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if os.environ.get("OFFLOAD_TEST_INTEGRATIONS") and missing:
        raise pytest.UsageError(f"OFFLOAD_TEST_INTEGRATIONS is set, but there is no {', '.join(missing)}")
