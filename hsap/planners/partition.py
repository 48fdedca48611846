"""Partition: a hypergraph into balanced parts of least connectivity, by Mt-KaHyPar. For `dcp`.

Solver: Gottesbüren, Heuer, Maas, Sanders, Schlag, "Scalable High-Quality Hypergraph Partitioning" (2024); its
deterministic preset, on one thread, from a fixed seed. It balances one weight, so the dimensions are added up.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from typing import Any

import numpy as np

from hsap.ir.check import Refused
from hsap.planners.hypergraph import Hypergraph

SEED = 7
AREA_SHARE = 0.9
"""Part of the one weight that stands for computation, the rest for tokens: these are easier to move afterwards."""
RESOLUTION = 1 << 24
"""Sum of the one weight over all vertices."""
SETTINGS = """
preset-type=deterministic
deterministic=true
mode=direct
num-vcycles=0
maxnet-removal-factor=0.01
smallest-maxnet-threshold=50000
maxnet-ignore=1000
s-use-localized-random-shuffle=false
p-enable-community-detection=true
p-louvain-edge-weight-function=hybrid
p-max-louvain-pass-iterations=5
p-louvain-min-vertex-move-fraction=0.01
p-vertex-degree-sampling-threshold=200000
p-num-sub-rounds=16
c-type=deterministic_multilevel_coarsener
c-min-shrink-factor=1.01
c-max-shrink-factor=2.5
c-s=1
c-t=160
c-num-sub-rounds=3
c-resolve-swaps=true
i-mode=rb
i-runs=2
i-use-adaptive-ip-runs=false
i-perform-refinement-on-best-partitions=false
i-fm-refinement-rounds=3
i-r-lp-type=do_nothing
i-r-jet-type=deterministic
i-r-fm-type=do_nothing
i-r-flow-algo=do_nothing
r-rebalancer-type=deterministic
r-lp-type=do_nothing
r-jet-type=deterministic
r-fm-type=do_nothing
r-flow-algo=do_nothing
"""
"""The deterministic preset, spelled out, but for i-runs (20 there): on graphs as small as a batch's, nearly all of the
time goes into first partitions that are thrown away."""


def partition(graph: Hypergraph, sizes: np.ndarray, epsilon: float) -> np.ndarray:
    """Partition by one combined weight: int64 [num_vertices], the part of each vertex.

    sizes: what each part should weigh, up to a factor; none may exceed it by more than epsilon.
    """
    num_parts = len(sizes)
    if num_parts == 1 or not len(graph.num_bytes):
        return np.zeros(len(graph), np.int64)
    module, solver, context = _solver()
    module.set_seed(SEED)
    context.set_partitioning_parameters(num_parts, epsilon, module.Objective.KM1)
    context.logging = False
    weight = one_weight(graph)
    limits = np.ceil(int(weight.sum()) * (1 + epsilon) * sizes / sizes.sum()).astype(np.int64)
    context.set_individual_target_block_weights(limits.tolist())
    pins, offsets = graph.pins.tolist(), graph.offsets.tolist()
    edges = [pins[a:b] for a, b in itertools.pairwise(offsets)]
    made = solver.create_hypergraph(context, len(graph), len(edges), edges, weight.tolist(), graph.num_bytes.tolist())
    return np.array(made.partition(context).get_partition(), dtype=np.int64)


def one_weight(graph: Hypergraph) -> np.ndarray:
    """Add up tokens and computation, each as a share of its sum: int64 [num_vertices]."""
    totals = graph.weight.sum(axis=0)
    steps = np.full(len(totals), AREA_SHARE / max(int(totals[1:].sum()), 1))
    steps[0] = (1 - AREA_SHARE) / max(int(totals[0]), 1)
    return np.rint(graph.weight @ (steps * RESOLUTION)).astype(np.int64)


@functools.cache
def _solver() -> tuple[Any, Any, Any]:
    """Load the solver once: (module, solver, context with its settings)."""
    try:
        import mtkahypar
    except ImportError as error:
        raise Refused(
            "planner dcp: hypergraphs are partitioned by Mt-KaHyPar, and the module mtkahypar can't be imported "
            f"({error}); install it with pip install 'hsap[dcp]', or choose another planner"
        ) from error
    solver = mtkahypar.initialize(1, False)
    with tempfile.NamedTemporaryFile("w", suffix=".ini") as file:
        file.write(SETTINGS)
        file.flush()
        return mtkahypar, solver, solver.context_from_file(file.name)
