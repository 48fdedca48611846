"""Connect: have all connections of a bench's ranks made before anything is measured."""

from __future__ import annotations

import torch
import torch.distributed as dist


def connect() -> None:
    """Send a byte between all pairs of ranks, so that no connection is made while something is measured."""
    rank, size = dist.get_rank(), dist.get_world_size()
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    ops = []
    for peer in range(size):
        if peer != rank:
            ops += [
                dist.P2POp(dist.isend, torch.zeros(1, device=device), peer),
                dist.P2POp(dist.irecv, torch.zeros(1, device=device), peer),
            ]
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()
    dist.barrier()
