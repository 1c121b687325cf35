"""What CUDA's streams need beyond what torch does for them by itself.

**Memory.** FSDP2 allocates reduced gradients on its reduce-scatter stream and, on a mesh with replicas, calls the hooks on
its all-reduce stream. Whoever enqueues work there and drops the gradient gives its memory back to the first stream, where
the next layer's reduction may take it before that work has run (`note_read`).

**Queues.** A process has `CUDA_DEVICE_MAX_CONNECTIONS` hardware queues for all of its streams, 8 unless told otherwise.
Streams that share one run in the order of launches, and a copy that waits for a gradient keeps kernels waiting that do
not. Launchers for Megatron set it to 1 on purpose, which serializes what this library and FSDP2 overlap
(pytorch/torchtitan#1147, verl-project/verl#6976): see `queue_advice`.
"""

from __future__ import annotations

import os

import torch

__all__ = ["QUEUES", "note_read", "queue_advice"]

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
USUAL_QUEUES = 8


def note_read(tensor: torch.Tensor) -> None:
    """Work that reads `tensor` was enqueued on the current stream: its memory is not given away before that has run.

    For tensors that are dropped next; on the stream that allocated them, and without a GPU, nothing has to be done.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def queue_advice() -> str | None:
    """What to do about too few queues; None where the environment does not ask for fewer than usual."""
    value = os.environ.get(QUEUES, "")
    if not value.isdecimal() or int(value) >= USUAL_QUEUES:
        return None
    return (
        f"{QUEUES}={value}: streams share so few hardware queues that copies and kernels wait for each other; unset it, "
        "or set it to 16 or 32, before the process first uses CUDA"
    )
