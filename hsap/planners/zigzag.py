"""Zigzag ring attention: every document in 2N chunks, rank r holding chunks r and 2N - 1 - r.

Papers: "Striped Attention" (Brandon et al., 2023) found that mixing early and late tokens balances a causal ring; the
zigzag form per document is the one of Megatron-LM's and TransformerEngine's context parallelism and of
ring-flash-attention.
Cost: the ring's traffic, (N - 1) · L / N KV rows a rank whatever the mask needs; area even up to rounding.
Ours: documents are not padded to a multiple of 2N; what doesn't divide is dealt to chunks in turn, so that many short
documents don't pile up on one rank.
"""

from __future__ import annotations

import numpy as np

from hsap.ir.block import Shards
from hsap.ir.problem import Problem
from hsap.ir.schedule import Strategy
from hsap.planners.parts import same_both_ways
from hsap.planners.ring import around


def zigzag(problem: Problem) -> Strategy:
    """Plan zigzag shards whose KV goes once around."""
    num_ranks = problem.topology.inter_sp
    shards = zigzag_shards(problem.layout.document_spans, num_ranks)
    return same_both_ways(problem, shards, lambda blocks: around(blocks, shards, num_ranks))


def zigzag_shards(documents: np.ndarray, num_ranks: int) -> Shards:
    """Deal 2 · num_ranks chunks of every document so that rank r gets the r-th from both ends. documents: spans."""
    spans = zigzag_chunks(documents, num_ranks)
    return Shards.of([(r, spans[:, [r, -1 - r]].reshape(-1, 2)) for r in range(num_ranks)])


def zigzag_chunks(documents: np.ndarray, num_ranks: int) -> np.ndarray:
    """Cut every document into 2 · num_ranks chunks, equal ± 1 token: spans int64 [num_documents, chunks, 2]."""
    chunks = 2 * num_ranks
    base, rest = np.divmod(documents[:, 1] - documents[:, 0], chunks)
    dealt = np.cumsum(rest) - rest
    extra = (np.arange(chunks) - dealt[:, None]) % chunks < rest[:, None]
    stops = documents[:, :1] + np.cumsum(base[:, None] + extra, axis=1)
    starts = np.concatenate([documents[:, :1], stops[:, :-1]], axis=1)
    return np.stack([starts, stops], axis=2)
