"""Processes: ranks of a bench, each a process with one thread of computation, none of which outlives the bench.

A rank can be put into a network namespace of its own, where gloo finds only that one's interfaces, and on cores of its
own: an emulated node. Ranks that a launcher started on several machines are joined instead.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hsap.children import end_with, ended_on_sigterm
from hsap.launched import Place
from hsap.runtime.groups import job_store

CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class Inside:
    """Where a rank lives. namespace: path of a network namespace; interface: the one that gloo listens on there.

    cores: those that it may run on (empty: all that the bench may).
    """

    namespace: str
    interface: str
    cores: tuple[int, ...] = ()


@contextmanager
def joined(place: Place, backend: str, timeout_s: float = 1800.0) -> Iterator[None]:
    """Be one of the ranks that a launcher started: the process group that its variables describe."""
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(place.local_rank)
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_ranks(
    num_ranks: int,
    function: Callable[..., Any],
    *args: Any,
    inside: Sequence[Inside] | None = None,
    timeout_s: float = 3600.0,
    backend: str = "gloo",
) -> list[Any]:
    """Call `function(rank, *args)` on every rank of a fresh world; the JSON values that it returns, by rank.

    inside: a place for each rank; None: all on this machine's loopback. RuntimeError: a rank failed, with what it said;
    TimeoutError. All ranks are gone when this returns or raises, and they are killed when this process is.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        arguments = (num_ranks, os.getpid(), folder, inside, backend, function, args)
        with ended_on_sigterm():
            context = mp.start_processes(_rank, arguments, nprocs=num_ranks, join=False, start_method="spawn")
            deadline = time.monotonic() + timeout_s
            try:
                while not context.join(timeout=min(5.0, max(deadline - time.monotonic(), 0.0))):
                    if time.monotonic() >= deadline:
                        raise TimeoutError(f"ranks of a bench: not done after {timeout_s:g} s")
            except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
                raise RuntimeError(f"ranks of a bench: {error}") from error
            finally:
                for process in context.processes:
                    if process.is_alive():
                        process.kill()
                    process.join()
        return [json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(num_ranks)]


def _rank(
    rank: int,
    num_ranks: int,
    parent: int,
    folder: str,
    inside: Sequence[Inside] | None,
    backend: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    end_with(parent)
    torch.set_num_threads(1)
    if backend == "gloo":
        os.environ["DS_ACCELERATOR"] = "cpu"  # so that DeepSpeed needn't look for one, and say so
    if inside is not None:
        if inside[rank].cores:
            os.sched_setaffinity(0, inside[rank].cores)
        enter(inside[rank].namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = inside[rank].interface
    if backend == "nccl":
        torch.cuda.set_device(rank)
    store = dist.FileStore(os.path.join(folder, "store"), num_ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=1800))
    result = json.dumps(function(rank, *args))
    (Path(folder) / f"{rank}.json").write_text(result, encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def enter(namespace: str) -> None:
    """Move this thread, and what it starts from now on, into a network namespace; OSError where that isn't allowed."""
    with open(namespace, "rb") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, f"can't enter {namespace}: {os.strerror(number)}")


def told_to_first(value: object, what: str) -> list[Any] | None:
    """Collect a JSON value from every rank: by rank on rank 0, None on the others. what: a name, used once."""
    store, rank = job_store(), dist.get_rank()
    store.set(f"{what}/{rank}", json.dumps(value))
    out = [json.loads(store.get(f"{what}/{r}")) for r in range(dist.get_world_size())] if rank == 0 else None
    dist.barrier()
    return out
