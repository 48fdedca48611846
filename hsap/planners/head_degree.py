"""Head degree: the shape of a group whose neighbours share a sequence's heads, for planners of the whole group."""

from __future__ import annotations

import math

from hsap.ir.check import Refused, whole
from hsap.ir.problem import Problem, Topology


def head_parallel(planner: str, problem: Problem, heads: int | None) -> Topology:
    """Shape the problem's ranks for head parallelism: `heads` neighbours share a sequence's heads.

    heads: None takes a given IntraSP as it is; at intra_sp = 1 as many as `own_heads` says. ValueError: heads that do
    not divide the ranks, or more than there are query heads.
    """
    num_ranks = problem.num_ranks
    if heads is not None:
        heads = whole(f"planner {planner}: heads, the ranks that share a sequence's heads,", heads)
        if num_ranks % heads or heads > problem.heads.num_q_heads:
            most = min(num_ranks, problem.heads.num_q_heads)
            legal = ", ".join(str(d) for d in range(1, most + 1) if num_ranks % d == 0)
            raise Refused(
                f"planner {planner}: heads={heads} of {problem.heads.num_q_heads} query heads on {num_ranks} ranks; it "
                f"must divide the ranks and leave each a head: choose of {legal}"
            )
    elif problem.topology.intra_sp > 1:
        heads = problem.topology.intra_sp
    else:
        heads = own_heads(problem)
    return Topology(num_ranks // heads, heads)


def own_heads(problem: Problem, *sizes: int) -> int:
    """Give the largest head degree that divides the KV heads, the ranks, a node and all `sizes` of groups.

    A share is then whole KV heads, and no all-to-all leaves its node, even of an SP group that starts inside one.
    """
    cluster = problem.cluster
    return math.gcd(problem.heads.num_kv_heads, problem.num_ranks, cluster.ranks_per_node, cluster.first_rank, *sizes)
