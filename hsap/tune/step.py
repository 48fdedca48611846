"""Step: seconds of one optimizer step, from attention's prices and the model's shape.

Assumed: the rank with the most tokens sets the pace between attentions; ranks meet at every attention, SP groups at
every micro-step under ZeRO 2 and 3 and at the step's end otherwise; ZeRO's traffic is not hidden (`overlap_comm` is
off, see `hsap.train.engine`); plans are ready when needed. Matrix products run at `MATMUL_EFFICIENCY`, everything else
of a layer moves bytes of memory as PyTorch does it operation by operation; kernels are queued ahead, so that launching
counts only where it takes longer than the work.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsap.buckets import Buckets
from hsap.ir.heads import DTYPE_BYTES
from hsap.ir.problem import Cluster
from hsap.models.config import ModelConfig
from hsap.sim.share import crowding
from hsap.tune.collectives import gather_s, reduce_s
from hsap.tune.setting import MATMUL_EFFICIENCY, Setting

LAYER_KERNELS = 60
"""Kernels of a layer's forward outside attention, of which backward has twice as many."""
STEP_BYTES = 60
"""Bytes that the norm in float64, clipping, AdamW in one kernel and the new weights move per parameter."""


Column = float | np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class MicroSteps:
    """Micro-batches as columns: float64 [num_groups, n], those of each SP group a row, or a number for just one.

    attention_s: (forward, backward) of a layer; tokens: of the fullest rank.
    """

    attention_s: tuple[Column, Column]
    tokens: Column

    @classmethod
    def alike(cls, attention_s: tuple[float, float], tokens: int, num_groups: int = 1, count: int = 1) -> MicroSteps:
        """Equal micro-batches, `count` of each group."""
        forward, backward, tokens = (np.full((num_groups, count), each) for each in (*attention_s, tokens))
        return cls((forward, backward), tokens)


def layer_s(model: ModelConfig, dtype: str, cluster: Cluster, tokens: Column) -> Column:
    """Seconds of one layer's forward without attention, of `tokens` rows. Backward takes twice that."""
    e = DTYPE_BYTES[dtype]
    flops = 2 * model.layer_matmul_params * tokens
    # Norms go over the hidden width some ten times in fp32, rotation a dozen times over q and k; then two residuals and
    # the feed-forward's gate. On fp32 inputs nothing is widened first, and that is all the difference.
    norms = 2 * (8 * 4 + 2 * e) * model.hidden_dim + 2 * 3 * e * model.hidden_dim
    rope = (11 * 4 + 2 * e) * (model.q_dim + model.kv_dim)
    gate = 5 * e * model.ffn_dim
    num_bytes = (norms + rope + gate) * tokens
    work = flops / (cluster.flops_per_s * MATMUL_EFFICIENCY) + num_bytes / cluster.memory_bytes_per_s
    return np.maximum(work, LAYER_KERNELS * cluster.kernel_overhead_s)


def ends_s(model: ModelConfig, dtype: str, cluster: Cluster, tokens: Column) -> Column:
    """Seconds of embedding, last norm, head and loss, forward and backward; the head makes its gradients in forward."""
    e, chunks = DTYPE_BYTES[dtype], -(-tokens // model.loss_chunk_tokens)
    head = model.vocab_size * model.hidden_dim
    flops = 6 * head * tokens
    logits = (2 * e + 6 * 4) * model.vocab_size * tokens
    around = (8 * 4 + 6 * e) * model.hidden_dim * tokens + (2 * e + 8) * head * chunks + 2 * e * head
    work = flops / (cluster.flops_per_s * MATMUL_EFFICIENCY) + (logits + around) / cluster.memory_bytes_per_s
    return np.maximum(work, 10 * (chunks + 2) * cluster.kernel_overhead_s)


def micro_s(model: ModelConfig, setting: Setting, cluster: Cluster, micro: MicroSteps) -> Column:
    """Seconds of each micro-batch, forward and backward, without ZeRO's traffic."""
    passes = 3 if setting.checkpointing == "none" else 4
    around = passes * model.num_layers * layer_s(model, setting.dtype, cluster, micro.tokens)
    around += ends_s(model, setting.dtype, cluster, micro.tokens)
    return model.num_layers * sum(micro.attention_s) + around * _crowd(setting, cluster)


def traffic_s(model: ModelConfig, setting: Setting, cluster: Cluster) -> tuple[float, float]:
    """Seconds of ZeRO's traffic: (in each micro-step, once a step).

    ZeRO 0 and 1 reduce gradients once a step, 2 and 3 in every micro-step; all in fp32. Stage 2 all-reduces them, as
    DeepSpeed does by default, stage 3 reduce-scatters. Stages 1 and 2 gather new weights once, 3 gathers them for every
    forward and backward.
    """
    world, params = setting.world, model.num_params
    hops = -(-params // Buckets.of(model).reduced)
    reduce = reduce_s(4 * params / hops, cluster, world) * hops
    weights = gather_s(setting.element_bytes * params, cluster, world)
    if setting.zero_stage < 2:
        return 0.0, reduce + (weights if setting.zero_stage else 0.0)
    if setting.zero_stage == 2:
        return reduce, weights
    each = gather_s(setting.element_bytes * model.layer_matmul_params, cluster, world) * model.num_layers
    ends = gather_s(setting.element_bytes * model.vocab_size * model.hidden_dim, cluster, world)
    return 2 * each + 2 * ends + gather_s(4 * params / hops, cluster, world) * hops, 0.0


def optimizer_s(model: ModelConfig, setting: Setting, cluster: Cluster) -> float:
    """Seconds of clipping and AdamW over the parameters that a rank updates."""
    params = model.num_params / (setting.world if setting.zero_stage else 1)
    return STEP_BYTES * params / cluster.memory_bytes_per_s * _crowd(setting, cluster)


def _crowd(setting: Setting, cluster: Cluster) -> float:
    return crowding(cluster, min(cluster.ranks_per_node, setting.world))[0]


def step_s(model: ModelConfig, setting: Setting, cluster: Cluster, micro: MicroSteps) -> float:
    """Seconds of one step of these micro-batches."""
    times = np.atleast_2d(micro_s(model, setting, cluster, micro))
    # Groups meet in every micro-step, or at the step's end.
    busy = times.max(axis=0).sum() if setting.zero_stage >= 2 else times.sum(axis=1).max()
    each, once = traffic_s(model, setting, cluster)
    return float(busy + each * times.shape[1] + once + optimizer_s(model, setting, cluster))
