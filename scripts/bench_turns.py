"""How long copies of other streams wait while streamed state crosses the link, with and without turns.

    python scripts/bench_turns.py --json turns.json

A burst of state is issued as `CudaTransport` issues it, in copies of 32 MiB; four milliseconds later another stream asks for
a copy in the same direction: of 4 KiB, as ``loss.item()`` does, of 2 MiB, as FSDP2's kernels get their pointers, and 160 MiB
in pieces of 8, as weights and gradients of other chunks. See Note [Turns] in `offload.transfer.cuda`.
"""

from __future__ import annotations

import _environment  # isort: skip  (sets variables that torch reads when it is loaded)

import argparse
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from _measure import format_table, write_json

from offload.transfer.cuda import TURN_BYTES, CudaTransport
from offload.transfer.pinned import allocate
from offload.transfer.transport import Copy

MIB = 2**20
BURST_BYTES = 1536 * MIB
BEGIN_S = 0.004
OTHERS = {"4 KiB": [4096], "2 MiB": [2 * MIB], "20 x 8 MiB": [8 * MIB] * 20}


class Buffers:
    """Both sides of the burst, and of the copies that come in between."""

    def __init__(self, device: torch.device) -> None:
        self.slab = allocate(BURST_BYTES + 256 * MIB, name="turns", pin=True, fallback_pageable=False)
        host = self.slab.tensor(torch.uint8)
        card = torch.zeros(host.numel(), dtype=torch.uint8, device=device)
        self.burst = list(zip(host[:BURST_BYTES].split(TURN_BYTES), card.split(TURN_BYTES), strict=False))
        self.other = host[BURST_BYTES:], card[BURST_BYTES:]


def measure(
    buffers: Buffers, device: torch.device, direction: str, sizes: list[int], *, turns: bool, repeats: int
) -> dict[str, Any]:
    """Medians in seconds: until the others' copies have ended, and until all has."""
    transport = CudaTransport(device)
    if turns:
        transport.take_turns()
    stream = torch.cuda.Stream(device)
    waited, ended = [], []
    for _ in range(repeats + 1):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        transfers = [issue(transport, direction, *pair) for pair in buffers.burst]
        while time.perf_counter() - start < BEGIN_S:
            pass
        asked = time.perf_counter()
        others(stream, direction, buffers.other, sizes).synchronize()
        waited.append(time.perf_counter() - asked)
        for transfer in transfers:
            transport.wait(transfer)
        ended.append(time.perf_counter() - start)
    transport.close()
    return {
        "direction": direction,
        "turns": turns,
        "bytes": sum(sizes),
        "others_s": statistics.median(waited[1:]),
        "all_s": statistics.median(ended[1:]),
    }


def issue(transport: CudaTransport, direction: str, host: torch.Tensor, card: torch.Tensor) -> Any:
    """One copy of the burst."""
    if direction == "in":
        return transport.issue_to_device([Copy(card, host)], [])
    return transport.issue_to_host([Copy(host, card)], [])


def others(
    stream: torch.cuda.Stream, direction: str, pair: tuple[torch.Tensor, torch.Tensor], sizes: list[int]
) -> torch.cuda.Event:
    """The copies of somebody else, and their end."""
    host, card = pair
    with torch.cuda.stream(stream):
        for start, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
            target, source = (card, host) if direction == "in" else (host, card)
            target[start : start + size].copy_(source[start : start + size], non_blocking=True)
        end = torch.cuda.Event()
        end.record(stream)
    return end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench_turns.py: this measures a GPU's link, and there is no GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    buffers = Buffers(device)
    rows = [
        {
            "others": label,
            **measure(buffers, device, direction, sizes, turns=turns, repeats=args.repeats),
        }
        for direction in ("in", "out")
        for label, sizes in OTHERS.items()
        for turns in (False, True)
    ]
    print(format_table(HEADERS, [table_row(row) for row in rows]))
    result = {"script": "bench_turns", "rows": rows, "environment": _environment.describe(device)}
    write_json(args.json, result)


HEADERS = ("direction", "others", "turns", "others done after ms", "all done after ms")


def table_row(row: dict[str, Any]) -> list[str]:
    """Of the printed table."""
    return [
        row["direction"],
        row["others"],
        "yes" if row["turns"] else "no",
        f"{1e3 * row['others_s']:.2f}",
        f"{1e3 * row['all_s']:.1f}",
    ]


if __name__ == "__main__":
    main()
