"""Memory: what a rank holds while it trains, item by item, as `hsap.train.engine` configures DeepSpeed.

P parameters, W ranks of the job (ZeRO shares over all of them), bytes per parameter; in bf16:

| ZeRO | weights | gradients | fp32 masters | Adam moments | buffers |
|---|---|---|---|---|---|
| 0 | 2 | 2, and 4 for their fp32 copy at the step | 4 | 8 | - |
| 1 | 2 | 2 + 4 (accumulated in fp32) | 4 / W | 8 / W | - |
| 2 | 2 | 4 / W | 4 / W | 8 / W | a bucket of 5e8: 2, and 4 on the wire |
| 3 | 2 / W | 4 / W | 4 / W | 8 / W | the same bucket in fp32 twice, 1e9 gathered weights: 2 |

In fp32 weights and gradients take 4, masters are the weights themselves at ZeRO 0 and 4 / W above. Activations are what
`hsap.models.llama` saves for backward, counted tensor by tensor.
"""

from __future__ import annotations

from hsap.ir.heads import DTYPE_BYTES, HeadShape
from hsap.models.config import ModelConfig
from hsap.tune.setting import Setting

BUCKET = 500_000_000
"""Elements that DeepSpeed reduces at once (its default reduce_bucket_size; stages 2 and 3 allocate it whole)."""
LIVE = 1_000_000_000
"""Gathered parameters that ZeRO-3 keeps at most (its default stage3_max_live_parameters)."""


def state_bytes(model: ModelConfig, setting: Setting) -> dict[str, float]:
    """Bytes of a rank for weights, gradients and optimizer, and for DeepSpeed's buffers; see the module."""
    stage, half = setting.zero_stage, setting.element_bytes == 2
    params, shared = model.num_params, model.num_params / setting.world
    width = setting.element_bytes
    gradients = {0: width * params, 1: (6 if half else 4) * params, 2: 4 * shared, 3: 4 * shared}[stage]
    if stage:
        masters = 4 * shared
    else:
        masters = 4 * params if half else 0
    return {
        "weights": width * (shared if stage == 3 else params),
        "gradients": gradients,
        "fp32 master weights": masters,
        "Adam moments": 8 * (shared if stage else params),
        "ZeRO's buffers": _buffer_bytes(model, setting),
    }


def _buffer_bytes(model: ModelConfig, setting: Setting) -> float:
    params, half = model.num_params, setting.element_bytes == 2
    on_wire = 4 * min(params, BUCKET)
    if setting.zero_stage == 0:
        return 4 * params if half else 0
    if setting.zero_stage == 1:
        return on_wire if half else 4 * BUCKET + on_wire
    if setting.zero_stage == 2:
        return setting.element_bytes * BUCKET + (on_wire if half else 0)
    return 4 * BUCKET + on_wire + setting.element_bytes * min(params, LIVE)


def saved_bytes(model: ModelConfig, dtype: str, checkpointing: str, kept_copies: float = 1.0) -> tuple[float, float]:
    """Bytes per token that one layer saves for backward: (by attention, by all the rest).

    kept_copies: copies of KV heads that IntraSP keeps (1 where ranks share out the KV heads). Attention saves q, kv, o
    and lse. The rest, without checkpointing: both norms save their input and their scaled input in fp32 and the scale,
    products save their inputs (o is attention's), SiLU its own; with it, the layer's input alone.
    """
    e, wide = DTYPE_BYTES[dtype], 4
    attention = e * (2 * model.q_dim + 2 * model.kv_dim * kept_copies) + 4 * model.num_q_heads
    if checkpointing == "full":
        return e * model.q_dim + 4 * model.num_q_heads, e * model.hidden_dim
    if checkpointing == "selective":
        return attention, e * model.hidden_dim
    norms = 2 * (2 * wide * model.hidden_dim + e * model.hidden_dim + wide)
    if dtype == "fp32":
        # Widening is no copy there: what the norm multiplies by its weight is still a tensor of its own.
        norms = 2 * (2 * wide * model.hidden_dim + wide * model.hidden_dim + wide)
    return attention, norms + 4 * e * model.ffn_dim


def working_bytes(model: ModelConfig, dtype: str, checkpointing: str) -> float:
    """Bytes per token that backward of one layer needs beside what was saved: an estimate.

    Under checkpointing the layer's saved tensors, made again; in both cases gradients of the widest part: three of the
    feed-forward's width, and two of the hidden width in fp32.
    """
    made_again = saved_bytes(model, dtype, "none")[1] if checkpointing != "none" else 0
    return made_again + 3 * DTYPE_BYTES[dtype] * model.ffn_dim + 2 * 4 * model.hidden_dim


def loss_bytes(model: ModelConfig, dtype: str, tokens: int) -> float:
    """Bytes at the loss: gradients of hidden states and of the head in fp32, and one chunk of logits.

    A chunk exists as logits, as log-probabilities in fp32, and as their gradient in the logits' dtype.
    """
    e, rows = DTYPE_BYTES[dtype], min(tokens, model.loss_chunk_tokens)
    kept = 4 * (tokens * model.hidden_dim + model.vocab_size * model.hidden_dim)
    return kept + rows * model.vocab_size * (4 + 2 * e)


def rank_bytes(
    model: ModelConfig, setting: Setting, tokens: int, arena: float, reserve: float, kept_copies: float = 1.0
) -> dict[str, float]:
    """Bytes of the rank with the most tokens, by item; they add up to what it needs.

    tokens: of a micro-batch on that rank. arena: bytes of the communication buffer. reserve: left alone.
    """
    attention, rest = saved_bytes(model, setting.dtype, setting.checkpointing, kept_copies)
    ends = (2 * 4 + 2 * setting.element_bytes) * model.hidden_dim  # the last norm, and the embedding's output
    working = working_bytes(model, setting.dtype, setting.checkpointing) * tokens
    loss = loss_bytes(model, setting.dtype, tokens)
    return state_bytes(model, setting) | {
        "activations": tokens * (model.num_layers * rest + ends),
        "attention's saved tensors": tokens * model.num_layers * attention,
        # One layer's backward and the loss are not at the same time.
        "working set": max(working, loss),
        "communication arena": arena,
        "reserve": reserve,
    }


def kept_copies(model: ModelConfig, setting: Setting) -> float:
    """How many copies of each KV head IntraSP keeps in all, in the mean."""
    shares = HeadShape(model.num_q_heads, model.num_kv_heads, model.head_dim).shares(setting.topology.intra_sp)
    return max(share.kv_count for share in shares) * setting.topology.intra_sp / model.num_kv_heads
