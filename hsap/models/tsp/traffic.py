"""What a micro-step of the sharded decoder sends beside attention's plans, counted from the model's shape alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from hsap.models.config import ModelConfig
from hsap.models.llama import EMBEDDING, shapes
from hsap.models.tsp.decoder import MLP_WEIGHTS, attention_names
from hsap.models.tsp.shards import WeightShards


def weight_traffic(
    config: ModelConfig, degree: int, index: int, weight_bytes: int, grad_bytes: int, train: bool = True
) -> Counter[str]:
    """Bytes that the rank with that index sends in one micro-step, by the kinds of `WeightTransport.sent_bytes`.

    train: forward and backward; else forward without gradients. weight_bytes: of an element as the model holds it;
    grad_bytes: of one in a gradient on its way (4, or 8 for float64). With A, M and V elements in a rank's attention,
    MLP and vocabulary shard (all alike) and L layers, a rank of D sends (D - 1) · (L · (2 A + 2 M) + 3 V) weights and
    (D - 1) · (L · (A + M) + 2 V) gradients, whatever the number of tokens; beside these, the sums of replicated
    parameters' gradients, which are small. Keys and values are the plans' to count, each layer's once for every shard.
    """
    whole = {name: tuple(tensor.shape) for name, tensor in shapes(config).items()}
    shards = WeightShards(config, degree)

    def elements(name: str, shard: int) -> int:
        return math.prod(shards.part(name, whole[name], shard % degree).shape)

    def bundle(names: Iterable[str], shard: int) -> int:
        return sum(elements(f"model.layers.0.{name}", shard) for name in names)

    names = attention_names(config)
    attention = [bundle(names, shard) for shard in range(degree)]
    mlp = [bundle(MLP_WEIGHTS, shard) for shard in range(degree)]
    vocabulary = [elements(EMBEDDING, shard) for shard in range(degree)]
    layers, after = config.num_layers, (index + 1) % degree
    passes = 2 if train else 1

    sent: Counter[str] = Counter()
    sent["broadcast"] = passes * layers * (degree - 1) * attention[index] * weight_bytes
    # Whatever a rank holds it sends on, but for the last, which is the next rank's own.
    around = passes * layers * (sum(mlp) - mlp[after]) + (1 + passes) * (sum(vocabulary) - vocabulary[after])
    sent["weights"] = around * weight_bytes
    if train:
        sent["reduce"] = layers * (sum(attention) - attention[index]) * grad_bytes
        home = layers * (sum(mlp) - mlp[index]) + 2 * (sum(vocabulary) - vocabulary[index])
        sent["gradients"] = home * grad_bytes
        key = "model.layers.0.self_attn.k_proj.weight"
        others = len(shards.part(key, whole[key], index).holders) - 1
        shared = 2 * layers * bundle([n for n in names if n.startswith("self_attn.k")], index)
        sent["replicas"] = others * shared * grad_bytes
        parts = (shards.part(name, shape, index) for name, shape in whole.items())
        replicated = sum(math.prod(part.shape) for part in parts if part.axis is None)
        sent["sum"] = 2 * (degree - 1) * replicated * grad_bytes // degree
    return sent
