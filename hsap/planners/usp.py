"""USP: Ulysses' all-to-all between neighbours, a zigzag ring between the groups of neighbours.

Paper: Fang, Zhao, "USP: A Unified Sequence Parallelism Approach for Long Context Generative AI" (2024), §3: ranks form
a mesh of Ulysses × ring; the all-to-all trades sequence for heads, and over what is left goes a ring.
Cost: with head degree h and R ranks, rings of R / h ranks with 1 / h of the heads: (R / h - 1) · L / R rows of KV a
rank, h times less than a ring of R; and q, kv and o once through the all-to-all. KV moves whether the mask needs it or
not. The zigzag is over the whole pack, as the hybrid layer knows no documents: a pack of one document is even in area,
on others it depends on where documents end.
Ours: blocks follow the documents' masks (the original would attend across documents); head degrees that don't divide
the heads; the zigzag's chunks are ± 1 token, not padded; KV gradients don't travel the ring, with a rounding at every
hop, but are merged inside a node and go straight home: the same bytes in all.
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


def usp(problem: Problem, heads: int | None = None) -> Strategy:
    """Plan head groups of neighbours around which the pack's zigzag KV goes in a ring."""
    topology = head_parallel("usp", problem, heads)
    shards = zigzag_shards(np.array([[0, problem.layout.num_tokens]]), topology.inter_sp)
    strategy = same_both_ways(problem, shards, lambda blocks: around(blocks, shards, topology.inter_sp))
    return replace(strategy, topology=topology, relay=True)
