"""Places: which device, group and machines are this process's in a loop that made its own groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from hsap.ir.cluster import Cluster
from hsap.ir.problem import Topology
from hsap.runtime.groups import Mesh


def own_device() -> torch.device:
    """This process's CUDA device, or the CPU where there is none or ranks talk by gloo."""
    if torch.cuda.is_available() and dist.get_backend() != "gloo":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def given_mesh(
    topology: Topology, group: dist.ProcessGroup, average_over: dist.ProcessGroup | None, device: torch.device
) -> Mesh:
    """This process's place in an SP group that the loop made; which of the groups it is follows from their ranks."""
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) != topology.num_ranks:
        raise ValueError(
            f"sequence parallel: topology {topology} has {topology.num_ranks} ranks, the group that was given "
            f"{len(ranks)}; give a topology that fits, or another group"
        )
    firsts = torch.zeros(dist.get_world_size(average_over), dtype=torch.int64, device=device)
    mine = torch.tensor([ranks[0]], dtype=torch.int64, device=device)
    dist.all_gather(list(firsts.split(1)), mine, group=average_over)
    members = Counter(firsts.tolist())
    if set(members.values()) != {len(ranks)}:
        raise ValueError(
            f"sequence parallel: gradients are averaged over {len(firsts)} ranks, which aren't whole SP groups of "
            f"{len(ranks)}; give average_over= the ranks that hold the same weights (with tensor parallelism, those of "
            "equal tensor index; with pipeline parallelism, those of one stage)"
        )
    return Mesh(topology, group, dist.get_rank(group), sorted(members).index(ranks[0]), len(members))


def seen_by(cluster: Cluster, ranks: Sequence[int]) -> Cluster:
    """Give the machines as an SP group sees them, of whose nodes it has every n-th rank where others stand between."""
    strides = {after - before for before, after in pairwise(ranks)} or {1}
    stride = min(strides)
    per_node = cluster.ranks_per_node
    if len(strides) > 1 or stride < 1 or (per_node % stride and per_node > stride):
        raise ValueError(
            f"sequence parallel: the SP group's ranks {list(ranks)[:8]} don't stand at equal distances that fit into "
            f"nodes of {per_node} ranks, so that planning can't know its nodes; order the job's ranks so that they do"
        )
    return cluster.starting_at(ranks[0] // stride, max(per_node // stride, 1))
