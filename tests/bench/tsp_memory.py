"""TSP memory: what a rank holds whose weights are sharded with its tokens (TSP), or sharded alone (TP).

TSP is counted as `hsap.models.tsp` and DeepSpeed hold it, on the rank with the largest shard; n are its
parameters, about 1/D of all, and R = world / D ranks hold the same ones. Per parameter:

| | weights | gradients | fp32 masters | Adam moments |
|---|---|---|---|---|
| bf16, ZeRO 1 | 2 | 2, and their sum over micro-steps 4 | 4 / R | 8 / R |
| fp32, ZeRO 1 | 4 | 4 | 4 / R | 8 / R |
| fp32, ZeRO 0 | 4 | 4 | - | 8 |

A layer keeps, for each of a rank's rows, the inputs of its two blocks, and q, k, v, o and lse of attention (o and lse
with checkpointing=full). On their way are a bundle of each matrix's shard: this rank's own, the one in use and the one
that comes; and of its gradient in fp32 this rank's own, the one that goes and the one that comes.

TP is by this model alone, as Megatron-LM has it without its own sequence parallelism: nothing here runs it. Every rank
holds all rows of the residual stream, so that blocks' inputs and norms are whole, and heads and feed-forward are 1/D.
"""

from __future__ import annotations

from hsap.buckets import Buckets
from hsap.ir.heads import DTYPE_BYTES
from hsap.models.config import ModelConfig
from hsap.models.tsp.shards import WeightShards
from hsap.tune.activations import WIDE, last_norm_bytes
from hsap.tune.setting import Setting


def shard_params(model: ModelConfig, degree: int, index: int) -> dict[str, int]:
    """Parameters of a rank's shard: of a layer's attention and MLP, of all vocabulary matrices, norms, and in all."""
    shards = WeightShards(model, degree)
    q, kv = (count * model.head_dim for count in shards.heads[index][1::2])
    bias = q + 2 * kv if model.attention_bias != "none" else 0
    norms = 2 * model.hidden_dim + (2 * model.head_dim if model.qk_norm else 0)
    ffn, words = (borders[index + 1] - borders[index] for borders in (shards.ffn, shards.vocabulary))
    of = {
        "attention": model.hidden_dim * (2 * q + 2 * kv) + bias,
        "mlp": 3 * model.hidden_dim * ffn,
        "norms": norms + (model.hidden_dim if model.attention_bias == "all" else 0),
    }
    matrices = 1 if model.tied_embeddings else 2
    total = model.num_layers * sum(of.values()) + matrices * words * model.hidden_dim + model.hidden_dim
    return of | {"vocabulary": words * model.hidden_dim, "all": total}


def largest_shard(model: ModelConfig, degree: int) -> dict[str, int]:
    """`shard_params` of the rank that has most."""
    return max((shard_params(model, degree, index) for index in range(degree)), key=lambda of: of["all"])


def tsp_phases(
    model: ModelConfig, setting: Setting, degree: int, tokens: int, arena: float
) -> dict[str, dict[str, float]]:
    """Bytes by item in each phase of a step. tokens: of a micro-batch on that rank; setting: ZeRO 0 or 1."""
    e, wide, hidden = setting.element_bytes, WIDE, model.hidden_dim
    of, shards, owners = largest_shard(model, degree), WeightShards(model, degree), setting.world // degree
    params = of["all"]
    state = _state_bytes(params, setting, owners)
    saved, inputs = _saved_bytes(model, degree, setting)
    between = e * params if setting.accumulation > 1 else 0
    bucket = Buckets.of(model, degree).reduced if setting.zero_stage == 1 and e == WIDE else 0

    def phase(layers: float, working: float, gradients: float, buffer: float) -> dict[str, float]:
        items = state | {
            "activations": tokens * layers * inputs,
            "attention's saved tensors": tokens * layers * saved,
            "working set": working,
            "communication arena": arena,
        }
        items["gradients"] += gradients
        items["ZeRO's buffers"] += wide * buffer
        return items

    last = tokens * (last_norm_bytes(model, setting.dtype) + e * hidden)
    rows, words = min(tokens, model.loss_chunk_tokens), of["vocabulary"] // hidden
    loss = wide * tokens * hidden + _travelling(of["vocabulary"], e, 1) + rows * words * (2 * wide + e)
    # One block's backward: its rows, and the bundles on their way.
    ffn = shards.ffn[1]
    mlp = tokens * (8 * e * ffn + (3 * e + wide) * hidden) + _travelling(of["mlp"], e, 3)
    q, kv = (n * model.head_dim for n in max(run[1::2] for run in shards.heads))
    projections = tokens * ((3 * e + wide) * hidden + 3 * e * (q + 2 * kv)) + _travelling(of["attention"], e, 4)
    norm = tokens * (6 * wide + e) * hidden
    layers = model.num_layers
    at_update = 8 * params / owners if setting.zero_stage else wide * params
    if e < WIDE:
        # A part of the summed gradients is copied; the whole of them, where a rank alone has the shard, isn't.
        at_update = e * params + (4 * params / owners if owners > 1 else 0)
    kept_loss = wide * (tokens * hidden + of["vocabulary"])
    return {
        "loss": phase(layers, last + loss, between, 0),
        "backward of a layer": phase(layers, max(mlp, projections, norm) + e * of["vocabulary"], between, bucket),
        "backward of the loss": phase(layers, last + 2 * kept_loss, between, 0),
        "reduction": phase(0, e * tokens * hidden + 3 * wide * of["vocabulary"], e * params, bucket),
        "update": phase(0, 0, at_update, 0),
    }


def tsp_bytes(model: ModelConfig, setting: Setting, degree: int, tokens: int, arena: float) -> dict[str, float]:
    """Bytes by item in the phase that needs most; they add up to what the rank needs."""
    return max(tsp_phases(model, setting, degree, tokens, arena).values(), key=lambda items: sum(items.values()))


def tp_bytes(model: ModelConfig, setting: Setting, degree: int, tokens: int) -> dict[str, float]:
    """Bytes by item of a rank under tensor parallelism of that degree; tokens: all of a micro-batch.

    The same accounting as for TSP: of a layer its blocks' inputs are kept, whole on every rank, and attention's tensors
    of the rank's heads; the rest is made again. What the loss needs is not counted.
    """
    e, hidden = setting.element_bytes, model.hidden_dim
    saved, inputs = _saved_bytes(model, 1, setting)
    ffn = WeightShards(model, degree).ffn[1]
    params = largest_shard(model, degree)["all"]
    state = _state_bytes(params, setting, setting.world // degree)
    state["gradients"] += e * params
    return state | {
        "activations": tokens * model.num_layers * inputs,
        "attention's saved tensors": tokens * model.num_layers * saved / degree,
        "working set": tokens * max(8 * e * ffn + (3 * e + WIDE) * hidden, (6 * WIDE + e) * hidden),
        "communication arena": 0,
    }


def _state_bytes(params: int, setting: Setting, sharing: int) -> dict[str, float]:
    half, stage = setting.element_bytes < WIDE, setting.zero_stage
    assert stage in (0, 1)
    return {
        "weights": setting.element_bytes * params,
        "gradients": 4 * params if half else 0,
        "fp32 master weights": 4 * params / sharing if stage or half else 0,
        "Adam moments": 8 * params / (sharing if stage else 1),
        "ZeRO's buffers": 0,
    }


def _saved_bytes(model: ModelConfig, degree: int, setting: Setting) -> tuple[float, float]:
    """Bytes per row that a layer keeps: (by attention, for all shards' heads; blocks' inputs)."""
    e = DTYPE_BYTES[setting.dtype]
    lse = WIDE * model.num_q_heads
    kv_heads = sum(run.kv_count for run in WeightShards(model, degree).heads)  # each as often as it is projected
    made = 0 if setting.checkpointing == "full" else e * (model.q_dim + 2 * kv_heads * model.head_dim)
    return made + e * model.q_dim + lse, 2 * e * model.hidden_dim


def _travelling(params: int, e: int, parts: int) -> float:
    """Bytes of bundles on their way in a backward pass: three of weights, and of gradients as many.

    A bundle of one matrix is that matrix; of several it is a copy, and so is its gradient, which is made in parts, put
    together and widened.
    """
    own = 0 if parts == 1 else e
    made = WIDE if parts == 1 else e + (e if e < WIDE else 0) + WIDE
    return params * (own + 2 * e + made + 3 * WIDE)
