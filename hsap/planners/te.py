"""TransformerEngine's context parallelism with heads: every document zigzag over the groups, all-to-all inside them.

Source: NVIDIA TransformerEngine, `attn_forward_func_with_cp` with cp_comm_type="a2a+p2p" on THD batches (Megatron
Core's hierarchical context parallelism); no paper. Its ring is Ring Attention's, its all-to-all Ulysses'.
Cost: as `usp`: with head degree h and R ranks (R / h - 1) · L / R rows of KV a rank, needed or not, and q, kv and o
through the all-to-all. But even in area on any pack, for each document is dealt to all groups.
Ours: TE pads every document to a multiple of 2 · cp tokens and wants packs prepared for it, here what doesn't divide
is dealt to chunks in turn; its head counts must divide, here any do; it skips halves of ring steps, here blocks
without a visible pair don't exist; KV gradients don't travel the ring, with a rounding at every hop, but are merged
inside a node and go straight home: the same bytes in all.
Options: heads, the head degree; by default the KV heads as far as node and ranks allow, or the IntraSP that is given.
"""

from __future__ import annotations

from dataclasses import replace

from hsap.ir.problem import Problem
from hsap.ir.schedule import Strategy
from hsap.planners.head_degree import head_parallel
from hsap.planners.zigzag import zigzag


def te(problem: Problem, heads: int | None = None) -> Strategy:
    """Plan head groups of neighbours around which every document's zigzag KV goes in a ring."""
    topology = head_parallel("te", problem, heads)
    return replace(zigzag(replace(problem, topology=topology)), topology=topology, relay=True)
