"""Chunks whose state lives in pinned host memory and is stepped on the device: placement STREAM.

Gradients stay on the device. At ``step()`` tiles of state travel through a few device buffers (`conveyor`), where they
are stepped by the kernel whose bits are the host's; compute weights are written in place. The update is elementwise, so
the buffers need not hold a layer, and their size does not depend on the model's.

On a GPU everything is enqueued by the calling thread. Without one, the device buffers are plain memory, the host
kernels compute, and the same code runs on the worker's thread, the only one that may run them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from offload.errors import ParameterError
from offload.kernels.device import TileTensors
from offload.kernels.rule import Rule
from offload.layout import ALIGN, Chunk, Piece
from offload.parameters import ParamRecord
from offload.report import StageClock
from offload.schedule.conveyor import Conveyor, PieceView, Slots, SlotView, Trip
from offload.schedule.device_gradients import DeviceGradients
from offload.schedule.stepper import BlockSums, Rows
from offload.schedule.stream_state import StreamState, StreamTile, fill_zero
from offload.schedule.updater import Updater
from offload.schedule.weights import check_given_master, load_weight, store_weight
from offload.schedule.worker import Call, Worker
from offload.transfer.transport import Ready, Transport

__all__ = ["BUFFER_BYTES", "NUM_SLOTS", "StreamStepper", "stream_tile_numel"]

logger = logging.getLogger(__name__)

NUM_SLOTS = 4
"""Device buffers of chunked-stream: one tile coming in, one worked on, one leaving, and one to spare, so that a copy
engine never waits for a kernel."""

BUFFER_BYTES = 192 * 2**20
"""Of device memory that these buffers may take together."""

Gradient = tuple[torch.Tensor, torch.Tensor | None]
"""What a kernel reads: the last gradient, and the FP32 sum of those before it."""


def stream_tile_numel(tile_numel: int, num_arrays: int) -> int:
    """Elements of the tiles in which state of `num_arrays` FP32 arrays travels, where `tile_numel` is the most."""
    fits = BUFFER_BYTES // (NUM_SLOTS * 4 * max(num_arrays, 1)) // ALIGN * ALIGN
    return min(tile_numel, fits)
