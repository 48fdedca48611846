"""LoongTrain: heads × context, and two rings: KV goes around inside a node before it goes on to the next node.

Paper: Gu et al., "LoongTrain: Efficient Training of Long-Sequence LLMs with Head-Context Parallelism" (2024), §4:
2D-Attention (all-to-all over heads, ring over context), Double-Ring-Attention, and head-first placement (neighbours
share a sequence's heads, so that the all-to-all has the fast links).
Cost: as `te` in bytes a rank, (R / h - 1) · L / R rows of KV with head degree h, needed or not. A single ring's KV
comes back into the node that it began in, this one's never does: a row crosses once to each other node.
Ours: each document is zigzag for itself (the paper has one sequence); the inner ring is the largest number of
neighbours that cuts the context ranks evenly and lies in one node, which may be less than a node; KV gradients don't
travel the rings, with a rounding at every hop, but are merged inside a node and go straight home: the same bytes,
between nodes too.
Options: heads, the head degree; by default the KV heads as far as node and ranks allow, or the IntraSP that is given.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hsap.ir.problem import Problem
from hsap.ir.schedule import Strategy
from hsap.planners.head_degree import head_parallel
from hsap.planners.parts import same_both_ways
from hsap.planners.ring import around
from hsap.planners.zigzag import zigzag_shards


def loongtrain(problem: Problem, heads: int | None = None) -> Strategy:
    """Plan head groups of neighbours around which KV goes in two nested rings."""
    topology = head_parallel("loongtrain", problem, heads)
    num_ranks = topology.inter_sp
    inner = inner_ring(problem.node_of[:: topology.intra_sp])
    shards = zigzag_shards(problem.layout.document_spans, num_ranks)
    strategy = same_both_ways(problem, shards, lambda blocks: around(blocks, shards, num_ranks, inner))
    return replace(strategy, topology=topology, relay=True)


def inner_ring(node_of: np.ndarray) -> int:
    """Give the largest number of neighbours that cuts the ranks evenly and never across a node border."""
    num_ranks = len(node_of)
    for size in range(num_ranks, 1, -1):
        if num_ranks % size == 0 and (np.diff(node_of.reshape(-1, size)) == 0).all():
            return size
    return 1
