"""From a model's shape and a run's options to what the planner and the estimates take. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload.assembly import DIVIDED_NUMEL, HYBRID_CHUNK_NUMEL
from offload.cli.chunks import chunk_sizes, stages
from offload.cli.model_shape import ModelShape
from offload.config import OffloadConfig
from offload.errors import ConfigError
from offload.schedule.device_slots import NUM_SLOTS, stream_tile_numel
from offload.schedule.memory_estimate import Activations
from offload.schedule.mode_costs import ChunkSize, Placement, Workload
from offload.schedule.step_estimate import Arrival
from offload.transfer.ring import Ring

__all__ = [
    "DTYPE_BYTES",
    "Run",
    "activations_of",
    "arrivals_at",
    "arrivals_of",
    "flops_of",
    "forward_share_of",
    "last_forward_of",
    "workload_of",
]

DTYPE_BYTES = {"bf16": 2, "fp32": 4}

STATE_ARRAYS = 3
"""AdamW's: master and two moments."""

NUM_RINGS = 2

LOSS_CHUNK_BYTES = 1 << 30
"""Temporaries of a loss that never holds all logits: the bound that scripts/bench_step.py sets, and usual elsewhere."""

LOGIT_BYTES = 2 + 4 + 4 + 4
"""Of one logit where the loss holds all of them: BF16, its FP32 copy, its log-softmax, and the gradient of that."""


@dataclass(frozen=True)
class Run:
    """What is to be run. `ranks` share the parameters (FSDP); `tokens` are those of one rank's backward pass, in
    sequences of `sequence`. `chunked_loss`: whether the loss avoids holding all logits. `reduce_dtype`: of FSDP's
    reductions, as in its ``MixedPrecisionPolicy``; None: `dtype`."""

    shape: ModelShape
    tokens: int
    sequence: int
    ranks: int = 1
    dtype: str = "bf16"
    checkpointing: bool = True
    chunked_loss: bool = False
    accumulation_steps: int = 1
    holds_gradients: bool = False
    overlap_forward: bool = False
    reduce_dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "sequence", "ranks", "accumulation_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        if self.sequence > self.tokens:
            raise ConfigError(f"sequence={self.sequence} is longer than tokens={self.tokens}")
        for name, dtype in (("dtype", self.dtype), ("reduce_dtype", self.reduce_dtype or self.dtype)):
            if dtype not in DTYPE_BYTES:
                raise ConfigError(f"{name}={dtype!r} is unknown; choose one of {', '.join(DTYPE_BYTES)}")

    @property
    def width(self) -> int:
        """Bytes of a weight, a gradient or an activation."""
        return DTYPE_BYTES[self.dtype]


def workload_of(run: Run, config: OffloadConfig, *, backward_s: float | None = None) -> Workload:
    """What one rank keeps and moves, as `assembly` has it of real parameters on a GPU.

    Args:
        backward_s: seconds, where an estimate is to go by them; the optimizer does not know them when it is built.
    """
    numel, width = _local(run.shape.numel, run), run.width
    tile = config.tile_numel
    largest = _local(run.shape.embedding_numel, run)
    return Workload(
        numel=numel,
        state_arrays=STATE_ARRAYS,
        ring_bytes=NUM_RINGS * Ring.required_bytes(config.ring_slots, tile * width),
        holds_gradients=run.holds_gradients,
        gradient_bytes=width * numel,
        accumulates=run.accumulation_steps > 1,
        weight_bytes=width * numel,
        own_master_numel=numel if run.dtype == "fp32" else 0,
        backlog_bytes=(_backlog_tiles(run, config) + config.ring_slots) * tile * width,
        largest_gradient_bytes=largest * width,
        tile_bytes=4 * (STATE_ARRAYS - (run.dtype == "fp32")) * stream_tile_numel(tile, STATE_ARRAYS),
        num_slots=NUM_SLOTS,
        chunks=_chunks(run, tile, None),
        parts=_chunks(run, tile, HYBRID_CHUNK_NUMEL),
        part_numel=HYBRID_CHUNK_NUMEL,
        divide_numel=DIVIDED_NUMEL,
        speculates=run.holds_gradients,  # as clip="auto" does where host memory allows
        stream_tile_numel=stream_tile_numel(tile, STATE_ARRAYS),
        tile_numel=tile,
        stream_share=config.stream_share,
        rebalances=config.stream_share is None,
        can_mix=True,
        backward_s=backward_s,
        moments=config.moments,
    )


def _chunks(run: Run, tile_numel: int, chunk_numel: int | None) -> tuple[ChunkSize, ...]:
    return chunk_sizes(
        run.shape, ranks=run.ranks, dtype=run.dtype, tile_numel=tile_numel, chunk_numel=chunk_numel
    )


def _backlog_tiles(run: Run, config: OffloadConfig) -> int:
    return config.num_backlog_tiles(overlaps_forward=run.overlap_forward)


def arrivals_of(run: Run) -> tuple[Arrival, ...]:
    """Gradients in the order of backward, timed by the arithmetic before them: head, layers from the last, embedding.

    A tied head is complete only with the embedding.
    """
    ends = _ends(run)
    return tuple(Arrival(numel, ends[name]) for name, numel, _ in _parts(run))


def arrivals_at(
    run: Run,
    chunks: Sequence[ChunkSize],
    placements: Sequence[Placement],
    divisions: Mapping[int, int] | None = None,
) -> tuple[Arrival, ...]:
    """The same of chunks that go where `placements` say. A chunk is complete with its first parameter's gradient.

    Args:
        divisions: as `Plan.divisions`: both parts of such a chunk come at the same time.
    """
    ends, stage = _ends(run), stages(run.shape)
    arrivals = []
    for index in sorted(range(len(chunks)), key=lambda index: -chunks[index].first_param):
        at, on_host = ends[stage[chunks[index].first_param]], (divisions or {}).get(index, 0)
        if on_host:
            arrivals.append(Arrival(on_host, at, Placement.HOST))
        arrivals.append(Arrival(chunks[index].numel - on_host, at, placements[index]))
    return tuple(sorted(arrivals, key=lambda each: each.at))


def _ends(run: Run) -> Mapping[str, float]:
    """By part, the share of backward after which its gradient is complete."""
    parts = _parts(run)
    total = sum(flops for _, _, flops in parts)
    done, ends = 0.0, {}
    for name, _, flops in parts:
        done += flops
        ends[name] = min(1.0, done / total)
    return ends


def flops_of(run: Run) -> tuple[float, float]:
    """Floating-point operations of forward, and of backward with what it recomputes."""
    forward = _layers_flops(run) + run.shape.head_flops(run.tokens)
    backward = 2.0 * forward + (_layers_flops(run) if run.checkpointing else 0.0)
    if run.chunked_loss:  # its gradients are taken in forward, chunk by chunk, while the logits are there
        moved = 2.0 * run.shape.head_flops(run.tokens)
        forward, backward = forward + moved, backward - moved
    return forward, backward


def last_forward_of(run: Run) -> float:
    """Share of forward from the last layer's on: that layer, and the head with what of its loss is in forward."""
    forward, _ = flops_of(run)
    layers = _layers_flops(run)
    last = run.shape.layer_flops(run.tokens, run.sequence, sparse=run.shape.num_sparse_layers > 0)
    return (forward - layers + last) / forward


def forward_share_of(run: Run) -> float:
    """Forward's share of the arithmetic, where it was not measured."""
    forward, backward = flops_of(run)
    return forward / (forward + backward)


def activations_of(run: Run) -> Activations:
    """Memory of forward and backward on one rank; see docs/performance.md for what is counted."""
    shape, per_token = run.shape, run.tokens * run.width
    sparse = shape.num_sparse_layers > 0
    saved = per_token * _saved_width(shape, sparse)
    kept = shape.num_layers * (per_token * shape.hidden if run.checkpointing else saved)
    # Backward of the MLP has two gradients of its width beside what forward saved; recomputation saves it first. That of the
    # sum over a token's experts has two of what these give, one before and one after it is weighted.
    gradients = 2 * per_token * max(shape.active_width(sparse), _routed_width(shape, sparse))
    logits = LOSS_CHUNK_BYTES if run.chunked_loss else run.tokens * shape.vocabulary * LOGIT_BYTES
    return Activations(
        kept_bytes=kept,
        layer_bytes=gradients + (saved if run.checkpointing else 0),
        loss_bytes=min(logits, run.tokens * shape.vocabulary * LOGIT_BYTES),
        head_gradient_bytes=(shape.embedding_numel if shape.tied else _local(shape.embedding_numel, run))
        * run.width,
        unsharded_bytes=_unsharded_bytes(run),
    )


def _saved_width(shape: ModelShape, sparse: bool) -> int:
    """Elements per token that the backward of one layer needs."""
    norms = 2 * 2 * shape.hidden  # of both norms, input and output
    projections = shape.attention_width + 2 * shape.kv_width
    rotated = (1 + shape.qk_norm) * (
        shape.attention_width + shape.kv_width
    )  # queries and keys: normalized, rotated
    attention = 3 * shape.attention_width  # its output; keys and values repeated for the groups
    residuals = 3 * shape.hidden  # outputs of both halves, and the sum between them
    mlp = 4 * shape.active_width(sparse)  # gate, up, activated gate, product
    routed = 2 * _routed_width(shape, sparse)  # what the experts get and what they give
    return norms + projections + rotated + attention + residuals + mlp + routed


def _routed_width(shape: ModelShape, sparse: bool) -> int:
    """Elements of a token's copies, one for each of its experts."""
    return shape.experts_per_token * shape.hidden if sparse else 0


def _unsharded_bytes(run: Run) -> int:
    """What FSDP2 has of whole layers (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, in backward).

    The weights of the layer in use; the gathered buffer of the next one; this one's gradients; and, until the next layer's
    gradients are complete, the buffer from which those of the layer before were reduced, in the dtype of reductions. The
    group that holds the head is not resharded after forward.
    """
    if run.ranks == 1:
        return 0
    shape = run.shape
    layer = max(shape.layer_numel(sparse=sparse) for sparse in {shape.num_sparse_layers > 0, False})
    reduced = DTYPE_BYTES[run.reduce_dtype or run.dtype]
    return (3 * run.width + reduced) * layer + run.width * shape.embedding_numel


def _parts(run: Run) -> list[tuple[str, int, float]]:
    """Name, elements on this rank and backward's operations of what follows each other in backward."""
    shape = run.shape
    head = 0.0 if run.chunked_loss else 2.0 * shape.head_flops(run.tokens)
    sparse, passes = shape.num_sparse_layers, 3.0 if run.checkpointing else 2.0
    parts = [("head", 0 if shape.tied else _local(shape.embedding_numel, run), head)]
    for index in reversed(range(shape.num_layers)):
        kind = index >= shape.num_layers - sparse
        flops = passes * shape.layer_flops(run.tokens, run.sequence, sparse=kind)
        parts.append((f"layers.{index}", _local(shape.layer_numel(sparse=kind), run), flops))
    parts.append(("embedding", _local(shape.embedding_numel + shape.hidden, run), 0.0))
    return parts


def _layers_flops(run: Run) -> float:
    shape = run.shape
    sparse = shape.num_sparse_layers
    one, other = (shape.layer_flops(run.tokens, run.sequence, sparse=kind) for kind in (True, False))
    return sparse * one + (shape.num_layers - sparse) * other


def _local(numel: int, run: Run) -> int:
    return -(-numel // run.ranks)
