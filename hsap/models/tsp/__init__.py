"""Tensor and sequence parallelism folded on one axis (TSP): every rank holds 1/D of the tokens and of the weights.

`shards` says which part of which parameter a rank holds (its weight shard; here shards are these), `rounds` how they go
round and gradients go home; `attention`, `mlp` and `vocabulary` are the blocks, `decoder` puts them together, `traffic`
counts what they send. What moves tensors is given from outside (`hsap.runtime.weights`), and so is attention itself
(`hsap.runtime.sharded`).
"""
