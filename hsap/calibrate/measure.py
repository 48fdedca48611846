"""Measure: microbenchmarks of attention kernels, of memory and of links, several turns each.

Kernels are called as the executor calls them, on slices of a few plain shapes: rectangles, causal squares, bands, and
many small pieces, even and ragged. On a CPU their time is the thread's own processor time, so that other work on the
machine doesn't count, and on a GPU that between two events; the median turn counts. Links: see `hsap.calibrate.links`.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hsap.calibrate.links import measure_links
from hsap.calibrate.readings import Kernel, Memory, Readings
from hsap.ir.heads import HeadRun, HeadShape
from hsap.ir.precision import Precision
from hsap.ir.slice import canonical, slices
from hsap.runtime.kernels import Work, select_kernel
from hsap.runtime.kernels.merge import merge
from hsap.runtime.memory import TORCH_DTYPES

ROWS = (8, 32, 128, 256, 512, 1024, 2048)
COLS = (16, 128, 1024)
FAR = 1 << 40
MEMORY_ROWS = (64, 512, 2048)
TURNED_OVER = 48 << 20
"""Bytes of which each call touches others: what a plan moves was seldom just touched."""


def shapes() -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """What attention is measured on: (kind, slices in rows)."""
    for rows in ROWS:
        for cols in COLS:
            yield "rectangle", [(0, rows, 0, cols, -FAR, FAR)]
    for rows in (32, 128, 512, 1024, 2048):
        yield "causal", [(0, rows, 0, rows, -FAR, 0)]
    for rows, width in ((512, 64), (1024, 200), (2048, 400)):
        yield "band", [(0, rows, 0, rows, 1 - width, 0)]
    for side, count in ((8, 64), (32, 32), (100, 12)):
        yield "pieces", [(i * side, (i + 1) * side, i * side, (i + 1) * side, -FAR, 0) for i in range(count)]
    for most in (60, 250, 700):
        ends = np.cumsum(np.random.default_rng(most).integers(1, most, 9)).tolist()
        yield "ragged", [(start, end, start, end, -FAR, 0) for start, end in itertools.pairwise(ends)]


def measure(rank: int, device: str, heads: HeadShape, turns: int, ranks_per_node: int) -> dict[str, Any]:
    """Measure everything on one rank of several, all at the same time; `Readings` as JSON values."""
    own = (_matmul(device, heads, turns), _kernels(device, heads, turns), _memory(device, heads, turns))
    network = measure_links(rank, device, turns, ranks_per_node) if dist.get_world_size() > 1 else None
    return Readings(*own, network).to_json()


def _seconds(device: str, turns: int, call: Callable[[], object]) -> float:
    """Seconds of the median of several calls, after one that doesn't count."""
    call()
    seconds = []
    for _ in range(turns):
        if device == "cpu":
            start = time.thread_time()
            call()
            seconds.append(time.thread_time() - start)
        else:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
    return float(np.median(seconds))


def _matmul(device: str, heads: HeadShape, turns: int) -> float:
    n = 512 if device == "cpu" else 8192
    a, b = (torch.randn(n, n, device=device).to(TORCH_DTYPES[heads.dtype]) for _ in range(2))
    return 2 * n**3 / _seconds(device, max(turns, 3), lambda: a @ b)


def _kernels(device: str, heads: HeadShape, turns: int) -> tuple[Kernel, ...]:
    dtype = TORCH_DTYPES[heads.dtype]
    kernel = select_kernel("auto", device, dtype, head_dim=heads.head_dim)
    acc = TORCH_DTYPES[Precision.of(heads.dtype).acc]
    run = (HeadRun(0, heads.num_q_heads, 0, heads.num_kv_heads),)
    out = []
    for kind, rows in shapes():
        table = canonical(slices(rows))
        num_q, num_k = int(table[:, 1].max()), int(table[:, 3].max())
        prepared, scale = kernel.prepare(Work(table, run), device), heads.head_dim**-0.5
        q_shape, kv_shape = (num_q, heads.num_q_heads, heads.head_dim), (num_k, 2, heads.num_kv_heads, heads.head_dim)
        q, do = (torch.randn(q_shape, device=device).to(dtype) for _ in range(2))
        kv = torch.randn(kv_shape, device=device).to(dtype)
        o, dq = (torch.zeros(q_shape, dtype=acc, device=device) for _ in range(2))
        dkv = torch.zeros(kv_shape, dtype=acc, device=device)
        lse = torch.zeros(q_shape[:2], dtype=torch.float64, device=device)
        high, delta = (torch.full(q_shape[:2], value, device=device) for value in (8.0, 0.1))
        forward = lambda: kernel.attend(prepared, q, kv, o, lse, scale)  # noqa: B023, E731
        backward = lambda: kernel.attend_grad(prepared, q, kv, do, high, delta, dq, dkv, scale)  # noqa: B023, E731
        for direction, call in enumerate((forward, backward)):
            out.append(Kernel(kind, direction, tuple(map(tuple, table.tolist())), _seconds(device, turns, call)))
    return tuple(out)


def _memory(device: str, heads: HeadShape, turns: int) -> tuple[Memory, ...]:
    """Copy of inputs, Sum into and Merge into accumulators, and an AllToAll's reordering of one of two ranks.

    The last packs half of the heads into scratch, and puts them and the others into a fresh tensor.
    """
    dtype, acc = TORCH_DTYPES[heads.dtype], TORCH_DTYPES[Precision.of(heads.dtype).acc]
    out = []
    for rows in MEMORY_ROWS:
        shape = (rows, heads.num_q_heads, heads.head_dim)
        sets = []
        # 16 bytes an element, of inputs and an accumulator.
        for _ in range(min(max(1, TURNED_OVER // (rows * heads.num_q_heads * heads.head_dim * 16)), turns)):
            part, copy = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
            lse, other = (
                torch.zeros(shape[:2], dtype=torch.float64, device=device),
                torch.ones(shape[:2], device=device),
            )
            sets.append((part, copy, part.to(acc), lse, other))
        for what, call in (
            ("copy", lambda part, copy, total, lse, other: copy.copy_(part)),
            ("sum", lambda part, copy, total, lse, other: total.add_(part)),
            ("merge", lambda part, copy, total, lse, other: merge(total, lse, part, other)),
            ("exchange", lambda part, copy, total, lse, other: _reordered(part, copy.view(-1))),
        ):
            turn = itertools.cycle(sets)
            out.append(Memory(what, rows, _seconds(device, turns, lambda: call(*next(turn)))))  # noqa: B023
    return tuple(out)


def _reordered(source: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """What an AllToAll does besides sending: pack, unpack, and keep the rest."""
    half = source.shape[1] // 2
    scratch = scratch[: source[:, :half].numel()].view(source[:, :half].shape)
    scratch.copy_(source[:, :half])
    target = torch.empty_like(source)
    target[:, :half].copy_(scratch)
    target[:, half:].copy_(source[:, half:])
    return target


def num_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
