"""``offload doctor``: what this machine gives, and what is off."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from offload.cli.findings import Finding
from offload.cli.gpu_checks import gpu_findings
from offload.cli.host_checks import cpu_findings, memory_findings, software_findings, thread_findings
from offload.cli.speed_checks import speed_findings
from offload.threads import configure_cpu_optimizer_threads

__all__ = ["doctor", "examine"]


def doctor(
    measure: Annotated[bool, typer.Option(help="Measure bandwidth, kernel and link; a few seconds.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What this machine gives the optimizer, and advice for each thing that is off."""
    findings = list(examine(measure=measure))
    if as_json:
        typer.echo(json.dumps(_as_dict(findings), indent=1))
    else:
        _print(findings)


def examine(*, measure: bool = True) -> Iterator[Finding]:
    """All findings, by section. `measure`: also those that take seconds."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None
    budget = configure_cpu_optimizer_threads(device=device)
    yield from software_findings()
    yield from cpu_findings()
    yield from thread_findings(budget)
    yield from memory_findings()
    if measure:
        yield from speed_findings(budget)
    yield from gpu_findings(budget, measure=measure)


def _as_dict(findings: Sequence[Finding]) -> dict[str, Any]:
    sections: dict[str, dict[str, Any]] = {}
    for finding in findings:
        sections.setdefault(finding.section, {})[finding.name] = {
            "value": finding.value,
            "text": finding.text,
        }
    advice = [
        {"section": finding.section, "name": finding.name, "advice": finding.advice}
        for finding in findings
        if finding.advice
    ]
    return {"sections": sections, "advice": advice}


def _print(findings: Sequence[Finding]) -> None:
    console = Console()
    table = Table(show_header=False, box=None, pad_edge=False)
    previous = ""
    for finding in findings:
        table.add_row(
            finding.section if finding.section != previous else "",
            finding.name,
            ("! " if finding.advice else "") + finding.text,
        )
        previous = finding.section
    console.print(table, highlight=False)
    advice = [finding for finding in findings if finding.advice]
    console.print()
    if not advice:
        console.print("Nothing is off.")
    for finding in advice:
        console.print(
            f"! {finding.section}, {finding.name}: {finding.advice}", highlight=False, soft_wrap=True
        )
