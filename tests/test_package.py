"""What the package shows to the outside: names, version, dependencies, and what an import costs."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import offload

ROOT = Path(__file__).parent.parent
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
CORE_DEPENDENCIES = {"torch", "numba", "llvmlite", "numpy", "psutil"}
EXTRAS = {"test", "dev", "cli", "plots", "hf", "lightning"}
OPTIONAL_MODULES = {
    "accelerate",
    "lightning",
    "matplotlib",
    "offload.cli",
    "offload.integrations",
    "pandas",
    "rich",
    "scipy",
    "transformers",
    "triton",
    "trl",
    "typer",
}


def test_all_is_sorted_and_complete() -> None:
    assert offload.__all__ == sorted(offload.__all__)
    public = {
        name
        for name, value in vars(offload).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name != "annotations"
    }
    assert public | {"__version__"} == set(offload.__all__)


@pytest.mark.parametrize("name", offload.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    assert f"| `{name}` |" in (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    assert inspect.getdoc(getattr(offload, name))


def test_documented_names_exist() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names, _, rest = text.partition("## On an optimizer")
    members, _, errors = rest.partition("## Errors")
    assert set(_first_column(names) + _first_column(errors)) == set(offload.__all__)
    missing = [name for name in _first_column(members) if not hasattr(offload.AdamW, name.partition("(")[0])]
    assert not missing


def test_modes_are_documented() -> None:
    from offload.config import MODES

    for file in ("README.md", "docs/architecture.md"):
        text = (ROOT / file).read_text(encoding="utf-8")
        assert all(f"| `{mode}`" in text for mode in MODES)


def test_version_is_that_of_the_project() -> None:
    declared = re.search(r'^version = "(.+)"$', PYPROJECT, re.MULTILINE)
    assert declared
    assert offload.__version__ == declared[1]


def test_dependencies_are_few() -> None:
    listed = re.search(r"^dependencies = \[(.*?)^\]", PYPROJECT, re.MULTILINE | re.DOTALL)
    assert listed
    assert set(re.findall(r'"([a-z0-9-]+)', listed[1])) == CORE_DEPENDENCIES
    extras = re.search(r"^\[project.optional-dependencies\]\n(.*?)^\[", PYPROJECT, re.MULTILINE | re.DOTALL)
    assert extras
    assert set(re.findall(r"^([a-z]+) = ", extras[1], re.MULTILINE)) == EXTRAS


def test_types_are_shipped() -> None:
    assert (ROOT / "offload" / "py.typed").exists()


def test_every_package_is_installed() -> None:
    """They are listed in pyproject.toml, since the scripts are one of them."""
    listed = re.search(r"^packages = \[(.*?)^\]", PYPROJECT, re.MULTILINE | re.DOTALL)
    assert listed
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "offload").rglob("*.py")}
    assert set(re.findall(r'"([a-z_.]+)"', listed[1])) == found | {"offload_scripts"}


def test_import_is_light() -> None:
    """No optional package, no kernel compiled, no thread started, no CUDA context, torch's settings untouched."""
    script = f"""
import sys, threading, torch
before = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), threading.active_count()
import numba  # asks for the version of scipy, where that is installed
brought_by_the_core = set(sys.modules)
import offload
after = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled(), threading.active_count()
assert before == after, (before, after)
heavy = {OPTIONAL_MODULES!r} & (set(sys.modules) - brought_by_the_core)
assert not heavy, heavy
assert not torch.cuda.is_initialized()
from numba.core.dispatcher import Dispatcher
compiled = [
    f"{{name}}.{{key}}"
    for name, module in list(sys.modules.items()) if name.startswith("offload.")
    for key, value in vars(module).items() if isinstance(value, Dispatcher) and value.signatures
]
assert not compiled, compiled
"""
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


def test_every_extra_module_of_the_scripts_is_declared() -> None:
    """Scripts import the core dependencies, the package and, inside functions, what the extras bring."""
    allowed = (
        sys.stdlib_module_names
        | CORE_DEPENDENCIES
        | {"offload", "transformers", "rich", "matplotlib", "torchao"}
    )
    own = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    for path in (ROOT / "scripts").glob("*.py"):
        pattern = r"^\s*(?:from|import) ([A-Za-z_]\w*)"
        imported = set(re.findall(pattern, path.read_text(encoding="utf-8"), re.MULTILINE))
        assert imported <= allowed | own, path.name


def _first_column(text: str) -> list[str]:
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)
