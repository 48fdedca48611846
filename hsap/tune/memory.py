"""Memory: what a rank holds while it trains, item by item, as `hsap.train.engine` configures DeepSpeed.

P parameters, W ranks of the job (ZeRO shares over all of them), bytes per parameter; in bf16, and in brackets in fp32:

| ZeRO | weights | fp32 masters | Adam moments | gradients, at the end of backward | at the update |
|---|---|---|---|---|---|
| 0 | 2 (4) | 4 (-) | 8 | 2 (4) | 2 + 4 (4) |
| 1 | 2 (4) | 4 / W | 8 / W | 2 + 4, the sum of micro-steps (4) | 2 + 4 (8 / W) |
| 2 | 2 (4) | 4 / W | 8 / W | 4 / W | 4 / W (8 / W) |
| 3 | 2 / W (4 / W) | 4 / W | 8 / W | 4 / W, always there | 8 / W |

Gradients are reduced in buckets (`hsap.buckets`), copied as the stage has it; ZeRO 3 has two layers' weights gathered,
and the embedding's or the head's. Activations are in `hsap.tune.activations`. A step has its peak at the loss, where
backward begins, where it ends, or at the update: `phases` has all of them, `rank_bytes` the highest.
"""

from __future__ import annotations

from hsap.buckets import Buckets
from hsap.ir.heads import HeadShape
from hsap.models.config import ModelConfig
from hsap.tune import activations
from hsap.tune.setting import Setting


def state_bytes(model: ModelConfig, setting: Setting) -> dict[str, float]:
    """Bytes of a rank that are there in every phase: weights, optimizer, and buffers that are made once."""
    stage, half = setting.zero_stage, setting.element_bytes == 2
    params, shared = model.num_params, model.num_params / setting.world
    return {
        "weights": setting.element_bytes * (shared if stage == 3 else params),
        "gradients": {(1, True): 4 * params, (3, True): 4 * shared, (3, False): 4 * shared}.get((stage, half), 0),
        "fp32 master weights": 4 * shared if stage else (4 * params if half else 0),
        "Adam moments": 8 * (shared if stage else params),
        "ZeRO's buffers": 4 * Buckets.of(model).reduced if stage == 3 else 0,
    }


def _gradients(model: ModelConfig, setting: Setting) -> tuple[float, float, float]:
    """Bytes of gradients beside those that are always there: (between micro-steps, after the last, at the update)."""
    half, width = setting.element_bytes == 2, setting.element_bytes
    params, shared = model.num_params, model.num_params / setting.world
    if setting.zero_stage == 0:
        return width * params, width * params, (6 if half else 4) * params
    if setting.zero_stage == 1:
        return width * params, width * params, 2 * params + 4 * shared if half else 8 * shared
    if setting.zero_stage == 2:
        # In fp32 the first micro-step's have no place of their own before the first bucket is reduced.
        alone = not half and setting.accumulation == 1 and params <= Buckets.of(model).reduced
        return 4 * shared, 0 if alone else 4 * shared, (4 if half else 8) * shared
    return 0, 0, 4 * shared


def _reducing(model: ModelConfig, setting: Setting) -> tuple[float, float]:
    """Bytes of a bucket that isn't always there, and of its copies while it is reduced."""
    bucket, half = Buckets.of(model).reduced, setting.element_bytes == 2
    # What is larger than a bucket is reduced by itself.
    at_once = min(max(bucket, model.vocab_size * model.hidden_dim), model.num_params)
    if setting.zero_stage == 0:
        return 0, (6 if half else 4) * at_once
    if setting.zero_stage == 1 and half:
        # Sums of micro-steps lie in a row: they are copied only where norms and biases go with the matrices.
        return 0, 4 * model.num_params if model.num_params <= bucket else 0
    if setting.zero_stage == 1:
        return 4 * bucket, 0
    if setting.zero_stage == 2:
        return setting.element_bytes * bucket, (6 if half else 4) * at_once
    return 0, 8 * at_once


def phases(
    model: ModelConfig, setting: Setting, tokens: int, arena: float, reserve: float, kept_copies: float = 1.0
) -> dict[str, dict[str, float]]:
    """Bytes by item in each phase of a step, of the rank with the most tokens.

    tokens: of a micro-batch on that rank. arena: bytes of the communication buffer. reserve: left alone.
    """
    dtype, how, width = setting.dtype, setting.checkpointing, setting.element_bytes
    attention, rest = activations.saved_bytes(model, dtype, how, kept_copies)
    head = width * model.vocab_size * model.hidden_dim
    last = activations.last_norm_bytes(model, dtype)
    working = activations.working_bytes(model, dtype, how, tokens, kept_copies)
    between, after, update = _gradients(model, setting)
    between = between if setting.accumulation > 1 else 0
    bucket, copies = _reducing(model, setting)
    buckets = Buckets.of(model)
    gathered = width * min(buckets.live, model.num_params) if setting.zero_stage == 3 else 0
    state = state_bytes(model, setting)

    def phase(layers: float, extra: float, gradients: float, buffer: float) -> dict[str, float]:
        items = state | {
            "activations": tokens * layers * rest,
            "attention's saved tensors": tokens * layers * attention,
            "working set": extra,
            "communication arena": arena,
            "reserve": reserve,
        }
        items["gradients"] += gradients
        items["ZeRO's buffers"] += buffer
        return items

    layers = model.num_layers
    one = head if setting.zero_stage == 3 else 0
    out = {
        "loss": phase(layers, tokens * last + activations.loss_bytes(model, dtype, tokens), between, gathered),
        "backward of the loss": phase(
            layers, tokens * last + activations.loss_gradient_bytes(model, dtype, tokens), between, gathered
        ),
        "backward of a layer": phase(layers, working + head, between, gathered + bucket),
        "reduction": phase(0, 0, after, bucket + copies + one),
        "update": phase(0, 0, update, 0),
    }
    if setting.zero_stage > 1 and (left := layers - buckets.reduced / model.layer_params) > 0:
        stream = 2 * width * model.hidden_dim * tokens
        out["first reduction"] = phase(left, stream + head, between, gathered + bucket + copies)
    return out


def rank_bytes(
    model: ModelConfig, setting: Setting, tokens: int, arena: float, reserve: float, kept_copies: float = 1.0
) -> dict[str, float]:
    """Bytes by item in the phase that needs most, see `phases`; they add up to what the rank needs."""
    each = phases(model, setting, tokens, arena, reserve, kept_copies)
    return max(each.values(), key=lambda items: sum(items.values()))


def kept_copies(model: ModelConfig, setting: Setting) -> float:
    """How many copies of each KV head IntraSP keeps in all, in the mean."""
    shares = HeadShape(model.num_q_heads, model.num_kv_heads, model.head_dim).shares(setting.topology.intra_sp)
    return max(share.kv_count for share in shares) * setting.topology.intra_sp / model.num_kv_heads
