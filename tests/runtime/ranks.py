"""Run a function on several gloo processes and collect what each returns."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.forks import preload

preload("tests.runtime.ranks", "hsap.runtime.executor")


def run_ranks(num_ranks: int, function: Callable, *args) -> list:
    """Call `function(rank, *args)` on every rank of a fresh gloo world; results by rank (anything torch can save)."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (num_ranks, folder, function, args), nprocs=num_ranks, start_method="forkserver")
        return [torch.load(os.path.join(folder, f"result-{r}.pt"), weights_only=True) for r in range(num_ranks)]


def _rank(rank: int, num_ranks: int, folder: str, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, "store"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=900))
    torch.save(function(rank, *args), os.path.join(folder, f"result-{rank}.pt"))
    dist.destroy_process_group()
