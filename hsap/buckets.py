"""Buckets: how much DeepSpeed may hold at once beside a rank's state, from the model's own size.

Its defaults (5e8 elements to reduce, 1e9 gathered weights) are a large model's: they are allocated whole, or keep all
of a smaller model gathered. `hsap.train.engine` sets these figures, and `hsap.tune.memory` counts with them.

Gradients of a layer are reduced at once, or 4 Mi elements where a layer is smaller; one that is larger than that (an
embedding) is reduced by itself, which DeepSpeed does without its buffer. Under ZeRO 3 the weights of the layer that is
computed are gathered, and those of the next one are fetched ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

from hsap.models.config import ModelConfig

LEAST_REDUCED, MOST_REDUCED = 1 << 22, 500_000_000
"""Elements: 16 MiB in fp32, below which messages get short; and DeepSpeed's default."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """Elements that DeepSpeed reduces at once, fetches ahead, keeps gathered at most, and never shards."""

    reduced: int
    prefetched: int
    live: int
    kept_whole: int

    @classmethod
    def of(cls, model: ModelConfig, degree: int = 1) -> Buckets:
        """Buckets that fit a model, of which TSP gives each rank one part of `degree`."""
        largest, layer = model.vocab_size * model.hidden_dim // degree, model.layer_params // degree
        reduced = min(max(layer, LEAST_REDUCED), model.num_params // degree, MOST_REDUCED)
        return cls(reduced, layer, 2 * layer + largest, max(model.hidden_dim, model.q_dim))

    def settings(self) -> dict[str, int]:
        """Give DeepSpeed's keys of `zero_optimization`; its all-gather bucket is used nowhere by now."""
        return {
            "reduce_bucket_size": self.reduced,
            "stage3_prefetch_bucket_size": self.prefetched,
            "stage3_max_live_parameters": self.live,
            # How soon weights must be needed again to stay: those of the last layer are, at the turn to backward.
            "stage3_max_reuse_distance": self.prefetched,
            # Norms and biases, which aren't worth a message.
            "stage3_param_persistence_threshold": self.kept_whole,
        }
