"""Training with tensor and sequence parallelism folded on one axis (`parallel=tsp`).

`planning` makes a plan for each distinct share of the heads; `sharding` the model's shards, and tells DeepSpeed which
ranks hold the same ones.
"""
