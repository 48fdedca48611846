"""Groups: the process groups of a job, made once at start-up so that no communicator appears at the memory peak."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from hsap.ir.problem import Topology


@dataclass(frozen=True, slots=True)
class Mesh:
    """This process's place: world = dp × inter_sp × intra_sp, SP innermost.

    sp: communicator of its SP group, ranks in plan order.
    """

    topology: Topology
    sp: dist.ProcessGroup
    sp_rank: int
    dp_rank: int
    dp_size: int


def make_mesh(topology: Topology) -> Mesh:
    """Make the SP groups of the whole job; collective over the world. ValueError if the world size doesn't fit."""
    world, rank, size = dist.get_world_size(), dist.get_rank(), topology.num_ranks
    if world % size:
        raise ValueError(
            f"topology {topology} needs a multiple of {size} processes, the job has {world}; start dp × {size} of them"
        )
    mine = None
    for first in range(0, world, size):
        group = dist.new_group(list(range(first, first + size)))
        if first <= rank < first + size:
            mine = group
    return Mesh(topology, mine, rank % size, rank // size, world // size)


def make_shard_groups(degree: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Make the groups that shard weights, `degree` neighbouring ranks each, and those that hold one shard each.

    Gives this process's two: ranks in the order of their shards, and the ranks with its own shard. Collective over the
    world, whose size must be a multiple of the degree.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    assert world % degree == 0
    blocks = [list(range(first, first + degree)) for first in range(0, world, degree)]
    equals = [list(range(index, world, degree)) for index in range(degree)]
    mine = []
    for ranks_of in (blocks, equals):
        made = [(dist.new_group(ranks), ranks) for ranks in ranks_of]
        mine.append(next(group for group, ranks in made if rank in ranks))
    return mine[0], mine[1]
