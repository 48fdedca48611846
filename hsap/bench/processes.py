"""Processes: a function on several ranks of this machine, and what each returns."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=900)


def on_ranks(num_ranks: int, device: str, function: Callable, *args) -> list:
    """Call `function(rank, device, *args)` on fresh processes, one thread each; their JSON results by rank.

    device: cpu (gloo) or cuda (NCCL, rank r on GPU r). Function and arguments must be importable and picklable.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (num_ranks, device, folder, function, args), nprocs=num_ranks, start_method="spawn")
        return [json.loads(Path(folder, f"{rank}.json").read_text(encoding="utf-8")) for rank in range(num_ranks)]


def _rank(rank: int, num_ranks: int, device: str, folder: str, function: Callable, args: tuple) -> None:
    torch.set_num_threads(1)
    own = f"cuda:{rank}" if device == "cuda" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(Path(folder, "store")), num_ranks)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=TIMEOUT)
    result = json.dumps(function(rank, own, *args))
    Path(folder, f"{rank}.json").write_text(result, encoding="utf-8")
    dist.destroy_process_group()
