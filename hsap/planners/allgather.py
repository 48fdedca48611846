"""All-gather: KV of all ranks is gathered first, then every rank attends its own queries in one go.

Paper: "The Llama 3 Herd of Models" (2024), §3.3.2, context parallelism: the sequence is cut into 2N chunks, rank r
holds chunks r and 2N - 1 - r, and K and V are all-gathered before attention: simple for any mask, and with grouped KV
heads small beside the computation, so that its exposed latency is accepted.
Cost: one exchange under which nothing is computed, of at most (N - 1) · L / N KV rows a rank; queries never move. The
chunks balance one causal document; documents in a pack leave areas as uneven as they fall.
Ours: only the KV that a rank's queries see is sent to it, straight from its home, and nothing is padded.
Options: chunks=pack (the paper's) cuts the packed sequence; chunks=document cuts every document into 2N chunks, which
is even in area and gathers nearly everything.
"""

from __future__ import annotations

import numpy as np

from hsap.ir.check import one_of
from hsap.ir.problem import Problem
from hsap.ir.schedule import Schedule, Strategy
from hsap.planners.parts import query_home, same_both_ways, split_by_need
from hsap.planners.zigzag import zigzag_shards


def allgather(problem: Problem, chunks: str = "pack") -> Strategy:
    """Plan zigzag shards that gather the KV they see before they compute."""
    one_of("planner allgather: unknown chunks", chunks, ("pack", "document"))
    documents = problem.layout.document_spans
    if chunks == "pack" and len(documents):
        documents = np.array([[0, problem.layout.num_tokens]])
    shards = split_by_need(problem, zigzag_shards(documents, problem.topology.inter_sp), query_home)
    # Stage 1 for all, also for what needs no gathering: transfers of stage 0 come before every block.
    return same_both_ways(
        problem,
        shards,
        lambda blocks: Schedule.of(blocks, shards.home[blocks.q], np.ones(len(blocks), np.int64)),
    )
