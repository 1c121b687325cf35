"""``offload bench``: the benchmark scripts."""

from __future__ import annotations

import typer

from offload.cli.scripts import run_script

__all__ = ["BENCHMARKS", "bench"]

BENCHMARKS = {
    "kernel": "the update kernel against torch's fused pipeline and the host's bandwidth",
    "step": "whole training steps of a Qwen3-shaped decoder in several modes",
    "memory": "extra device memory of a step with state on the host",
    "pipeline": "the wavefront's pipeline without a model",
    "turns": "how long copies of other streams wait while streamed state crosses a GPU's link",
    "peers": "a step beside what one would use instead: fused AdamW, torchao, FSDP2",
}


def bench(context: typer.Context) -> None:
    """Run a benchmark: kernel, step, memory, pipeline, turns or peers. What follows its name goes to the script.

    ``offload bench step --help`` shows the options of one.
    """
    name, *arguments = context.args or ["--help"]
    if name in ("--help", "-h"):
        typer.echo("Usage: offload bench NAME [OPTIONS of the benchmark]\n")
        for known, what in BENCHMARKS.items():
            typer.echo(f"  {known:<10}{what}")
        raise typer.Exit
    if name not in BENCHMARKS:
        typer.echo(
            f"offload: no benchmark is called {name!r}; choose one of {', '.join(BENCHMARKS)}", err=True
        )
        raise typer.Exit(2)
    raise typer.Exit(run_script(f"bench_{name}.py", arguments))
