"""What the caching allocator must be told about tensors that another stream than their own has read.

FSDP2 allocates reduced gradients on its reduce-scatter stream and, on a mesh with replicas, calls the hooks on its
all-reduce stream. Whoever enqueues work there and drops the gradient gives its memory back to the first stream, where the
next layer's reduction may take it before that work has run.
"""

from __future__ import annotations

import torch

__all__ = ["note_read"]


def note_read(tensor: torch.Tensor) -> None:
    """Work that reads `tensor` was enqueued on the current stream: its memory is not given away before that has run.

    For tensors that are dropped next; on the stream that allocated them, and without a GPU, nothing has to be done.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
