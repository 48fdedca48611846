"""Groups: the process groups of a job, made and connected at start-up so that no buffer appears at the memory peak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
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


def make_mesh(topology: Topology, max_ctas: int | None = None) -> Mesh:
    """Make the SP groups of the whole job; collective over the world. ValueError if the world size doesn't fit.

    max_ctas: see `nccl_options`.
    """
    world, rank, size = dist.get_world_size(), dist.get_rank(), topology.num_ranks
    if world % size:
        raise ValueError(
            f"topology {topology} needs a multiple of {size} processes, the job has {world}; start dp × {size} of them"
        )
    mine: Any = None
    for first in range(0, world, size):
        options = nccl_options(max_ctas) if dist.get_backend() == "nccl" else None
        group = dist.new_group(list(range(first, first + size)), pg_options=options)
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


def nccl_options(max_ctas: int | None = None) -> Any:
    """Options for `dist.new_group` of a communicator that attention has for itself, beside NCCL's other ones.

    Its stream is of high priority, so that a transfer doesn't queue behind the very kernels that it is to run under.
    max_ctas: thread blocks, and so streaming multiprocessors, that it may take from them; None: as NCCL decides.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return options


def connect(group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> None:
    """Send a byte between all pairs of a group, so that every connection and its buffers are there from now on.

    Collective over the group. On NCCL a group's first batch of messages must be one that every rank takes part in.
    """
    group = group if group is not None else dist.group.WORLD
    rank, ops = dist.get_rank(group), []
    for place, peer in enumerate(dist.get_process_group_ranks(group)):
        if place != rank:
            for kind in (dist.isend, dist.irecv):
                ops.append(dist.P2POp(kind, torch.zeros(1, dtype=torch.uint8, device=device), peer, group))
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()


def job_store() -> Any:
    """Give a connection of its own to the store at which the job's processes met; a waiting `get` holds up no other."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()
