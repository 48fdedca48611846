"""Ranks: what each process of the attention bench does, and the single process that they are measured against."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hsap.ir.plan import Plan
from hsap.ir.span import positions
from hsap.runtime.executor import Session
from hsap.runtime.groups import connect
from hsap.runtime.kernels import select_kernel
from tests.bench.attention.cases import RING, ULYSSES, Case
from tests.bench.attention.parts import watch
from tests.bench.attention.peers import ContextParallel, Ulysses, VarlenAttention

INPUTS, RESULTS = ("q", "k", "v", "do"), ("o", "dq", "dk", "dv")
ALONE, BUSY, ALONE_AFTER = "alone", "busy", "alone after"
WARM = ("ring", "usp")
"""Planners whose plans of a small pack run before anything is measured: together they have every instruction."""
Run = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


def write_inputs(case: Case, folder: Path, seed: int = 0) -> None:
    """Write random q, k, v and do [T, H, D] as files that all ranks map."""
    random = np.random.default_rng(seed)
    for name in INPUTS:
        count = case.heads.num_kv_heads if name in ("k", "v") else case.heads.num_q_heads
        shape = (case.num_tokens, count, case.heads.head_dim)
        np.save(folder / f"{name}.npy", random.standard_normal(shape, np.float32))


def together(rank: int, case: Case, folder: str, methods: Sequence[str]) -> dict[str, dict]:
    """Every method over the same pack, one after the other. A method with a plan FOLDER/NAME.plan is the executor's.

    Before them ALONE, on rank 0 while the others sleep, and BUSY, on as many ranks as there are cores: the whole pack
    by one process's kernel. After them ALONE_AFTER: a shared machine isn't equally fast all the time.
    """
    connect()
    dist.barrier()
    session = Session(dtype=torch.float32)
    told = {ALONE: _whole(case, folder, [0]), BUSY: _whole(case, folder, range(len(os.sched_getaffinity(0))))}
    plans = {
        name: Plan.load(path).vouched()  # this bench's own
        for name in (*(f"warm-{warm}" for warm in WARM), *methods)
        if (path := plan_path(folder, name)).exists()
    }
    # As in training: one arena for all plans of a run, touched before the first of them.
    session.arena.reserve(max((int(plan.arena_bytes()[rank]) for plan in plans.values()), default=0)).zero_()
    small = case.small(dist.get_world_size())
    for name in (*(name for name in plans if name.startswith("warm-")), *(m for m in methods if m in (ULYSSES, RING))):
        run, rows, _ = _prepared(rank, small, name, session, plans)
        run(*_rows(small, folder, rows))
    told |= {name: _method(rank, case, folder, name, session, plans) for name in methods}
    return told | {ALONE_AFTER: _whole(case, folder, [0])}


def _whole(case: Case, folder: str, on: Sequence[int]) -> dict | None:
    """The whole pack by one process, on each of some ranks; rank 0 keeps what it computes."""
    figures, rank = None, dist.get_rank()
    dist.barrier()
    if rank in on:
        _alone(case.small(1), *_rows(case.small(1), folder, slice(None)))
        results, figures = _alone(case, *_rows(case, folder, slice(None)))
        if rank == 0:
            for name, result in zip(RESULTS, results):
                np.save(Path(folder) / f"{name}.npy", result.numpy())
    dist.barrier()
    return figures


def _alone(case: Case, *inputs: Tensor) -> tuple[tuple[Tensor, ...], dict]:
    kernel = select_kernel("auto", "cpu", torch.float32, head_dim=case.heads.head_dim)
    attention = VarlenAttention(kernel, case.problem(1).slices(0), case.heads.num_q_heads)

    def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        o = attention(q, k, v)
        return (o.detach(), *torch.autograd.grad(o, (q, k, v), do))

    return _measured(run, inputs, case.layers)


def _rows(case: Case, folder: str, rows) -> tuple[Tensor, ...]:
    """Rows of q, k, v and do of a case, copied into memory."""
    mapped = (np.load(Path(folder) / f"{name}.npy", mmap_mode="r")[: case.num_tokens] for name in INPUTS)
    return tuple(torch.from_numpy(np.array(tensor[rows])) for tensor in mapped)


def plan_path(folder: str | Path, method: str) -> Path:
    return Path(folder) / f"{method.replace(':', '-')}.plan"


def _method(rank: int, case: Case, folder: str, name: str, session: Session, plans: dict[str, Plan]) -> dict:
    run, rows, spent = _prepared(rank, case, name, session, plans)
    inputs = _rows(case, folder, rows)
    refusal = ContextParallel.refusal() if name == RING else None
    dist.barrier()
    results, figures = _measured(run, inputs, case.layers)
    dist.barrier()
    figures |= {"parts_s": dict(spent), "refusal": refusal}
    return figures | {"max_error": _max_error(results, rows, folder)}


def _prepared(
    rank: int, case: Case, name: str, session: Session, plans: dict[str, Plan]
) -> tuple[Run, np.ndarray, dict[str, float]]:
    """(the method, the rows of this rank, seconds by kind of step as they are spent)."""
    size = dist.get_world_size()
    if name in plans:
        executor = session.load(plans[name])
        return _executed(executor), positions(plans[name].rank_spans(rank)), watch(executor._machine)
    if name == ULYSSES:
        kernel = session.kernel(case.heads.head_dim)
        run = Ulysses(VarlenAttention(kernel, case.problem(1).slices(0), case.heads.num_q_heads // size)).run
        return run, np.array_split(np.arange(case.num_tokens), size)[rank], {}
    assert name == RING
    chunks = np.array_split(np.arange(case.num_tokens), 2 * size)
    return ContextParallel().run, np.concatenate([chunks[rank], chunks[2 * size - 1 - rank]]), {}


def _executed(executor) -> Run:
    def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
        kept = executor.forward(q, k, v)
        return (kept.o, *executor.backward(do, kept))

    return run


def _measured(run: Run, inputs: tuple[Tensor, ...], layers: int) -> tuple[tuple[Tensor, ...], dict]:
    """Run forward and backward `layers` times: the last results; wall times by the machine's one monotonic clock.

    cpu_s: of the whole process, gloo's and the system's part included; main_s: of this thread alone.
    """
    began, cpu, main = time.monotonic(), time.process_time(), time.thread_time()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(layers):
        results = run(*inputs)
    return results, {
        "began": began,
        "cpu_s": time.process_time() - cpu,
        "main_s": time.thread_time() - main,
        "ended": time.monotonic(),
        "page_faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults,
    }


def _max_error(results: tuple[Tensor, ...], rows: np.ndarray, folder: str) -> float:
    """Largest difference to the single process's results, relative to the largest value of each tensor."""
    worst = 0.0
    for name, result in zip(RESULTS, results):
        whole = np.load(Path(folder) / f"{name}.npy", mmap_mode="r")
        largest = float(np.abs(whole[:: max(len(whole) // 4096, 1)]).max())
        if len(rows):
            worst = max(worst, float(np.abs(result.numpy() - whole[rows]).max()) / largest)
    return worst
