"""What the doctor says of GPUs: on one, and with the parts that can be stood in for."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import offload
from offload.cli import gpu_checks
from offload.rates import Rates

RATES = Rates(4e9, 112e9, 54e9, 54e9, 48e9, 3.3e12)


class FakeNVML(ModuleType):
    """The few functions that are asked, for one GPU."""

    class NVMLError(Exception):
        """As the real module has it."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__("pynvml")
        self.fails, self.calls = fails, list[str]()

    def nvmlInit(self) -> None:  # noqa: N802
        self.calls.append("init")

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.calls.append("shutdown")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if self.fails:
            raise self.NVMLError("hidden")
        return uuid

    def __getattr__(self, name: str) -> Any:
        numbers = {
            "CurrPcieLinkGeneration": 4,
            "MaxPcieLinkGeneration": 5,
            "CurrPcieLinkWidth": 8,
            "MaxPcieLinkWidth": 16,
        }
        number = numbers[name.removeprefix("nvmlDeviceGet")]
        return lambda handle: number if handle == "GPU-1234" else None


def test_the_link_is_that_of_the_gpu_that_torch_names(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeNVML()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="1234"))
    assert gpu_checks.pcie_link(0) == {"generation": 4, "max_generation": 5, "width": 8, "max_width": 16}
    assert fake.calls == ["init", "shutdown"]


def test_without_nvml_or_its_knowledge_there_is_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="1234"))
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    assert gpu_checks.pcie_link(0) is None
    fake = FakeNVML(fails=True)
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert gpu_checks.pcie_link(0) is None
    assert fake.calls == ["init", "shutdown"]


@pytest.mark.parametrize(
    ("name", "value", "advised"),
    [
        ("host to device", 54e9, False),
        ("host to device", 6e9, True),
        ("device to host", 6e9, True),
        ("each way, both busy", 48e9, False),
        ("each way, both busy", 27e9, True),
        ("device memory", 1e9, False),
    ],
)
def test_slow_links_are_remarked_on(name: str, value: float, advised: bool) -> None:
    assert (gpu_checks._link_advice(name, value, RATES) is not None) == advised


def test_no_gpu_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (finding,) = gpu_checks.gpu_findings(offload.configure_cpu_optimizer_threads())
    assert finding.value == 0
    assert finding.advice is None


@pytest.mark.gpu
def test_findings_on_a_gpu() -> None:
    findings = {
        finding.name: finding
        for finding in gpu_checks.gpu_findings(offload.configure_cpu_optimizer_threads())
    }
    assert findings["GPUs"].value == torch.cuda.device_count()
    assert findings["GPU 0"].value["bytes"] > 0
    assert 0 < findings["pinning"].value < 10
    for name in ("host to device", "device to host", "each way, both busy"):
        assert 1e8 < findings[name].value < 1e12
    assert findings["device memory"].value > findings["host to device"].value


@pytest.mark.gpu
def test_plan_measures_this_machine() -> None:
    pytest.importorskip("typer", reason="the command line's extra is not installed")
    pytest.importorskip("rich", reason="the command line's extra is not installed")
    import json

    from typer.testing import CliRunner

    from offload.cli.app import app

    model = ["--layers", "4", "--hidden", "256", "--vocab", "512", "--resident-step", "0.5"]
    result = CliRunner().invoke(app, ["plan", *model, "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    made = json.loads(result.output)
    assert made["budgets"]["device"] == torch.cuda.mem_get_info()[1]
    assert all(row["step_s"] > 0 for row in made["modes"])
    assert made["rates"]["to_device_bytes"] > 1e8
