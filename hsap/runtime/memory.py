"""Memory: a rank's buffers as tensors, most of them views of the run's one arena.

Rows lead, so that a range of rows is contiguous and travels without a copy: q, o, do, dq are [T, H, D]; kv and dkv
[T, 2, H, D], keys then values. lse is [T, H]; do carries [T, 2, H], lse then delta.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from hsap.ir.plan import Plan
from hsap.ir.precision import Precision, aligned
from hsap.ir.program import KV_ROLES, Buffers, Programs, Role, Space
from hsap.ir.span import row_starts

TORCH_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


Made = TypeVar("Made")


class View(NamedTuple):
    """A buffer's rows and, where its role carries them, the statistics of each row. Heads are rows' last axis but one
    and the statistics' last. A named tuple, because some are made at every call and it takes a third of the time."""

    rows: Tensor
    stats: Tensor | None = None

    def part(self, first: int, count: int) -> View:
        """The same buffer, rows [first, first + count) only."""
        stats = None if self.stats is None else self.stats[first : first + count]
        return View(self.rows[first : first + count], stats)

    def heads(self, first: int, count: int) -> View:
        """The same rows, heads [first, first + count) only, numbered within the buffer."""
        stats = None if self.stats is None else self.stats.narrow(-1, first, count)
        return View(self.rows.narrow(-2, first, count), stats)

    def tensors(self) -> list[Tensor]:
        """What travels when these rows are sent."""
        return [t for t in (self.rows, self.stats) if t is not None and t.numel()]


class Arena:
    """The communication buffer of a run: as large as the largest plan needs, never shrunk, so memory doesn't jitter."""

    def __init__(self, device: torch.device | str) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, num_bytes: int) -> Tensor:
        """Give a buffer of at least that many bytes. Views of an earlier, smaller one must be made anew.

        ValueError: more than the device has. A sound plan of a few bytes may name any number of tokens and copies.
        """
        if num_bytes > self.bytes.numel():
            most = device_bytes(self.bytes.device)
            if num_bytes > most:
                raise ValueError(
                    f"the plan needs a communication buffer of {num_bytes} bytes on this rank, and {self.bytes.device} "
                    f"has {most} in all; compile it with a smaller arena_multiple, or for more ranks"
                )
            self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device=self.bytes.device)
        return self.bytes


def device_bytes(device: torch.device) -> int:
    """Memory of a device, or of this machine where tensors live on the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def row_shapes(
    role: int, num_rows: int, heads: Sequence[int], head_dim: int
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Shapes of a buffer's rows and statistics (None without)."""
    q_count, kv_count = int(heads[1]), int(heads[3])
    if role in KV_ROLES:
        return (num_rows, 2, kv_count, head_dim), None
    of_role: dict[Role, tuple[int, ...]] = {Role.O: (num_rows, q_count), Role.DO: (num_rows, 2, q_count)}
    stats = of_role.get(Role(role))
    return (num_rows, q_count, head_dim), stats


class Memory:
    """The buffers of one rank, mask and direction. `views[b]` is the buffer at `offsets[rank] + b`.

    Arena buffers are views that last as long as the plan; inputs, results and kept tensors are put in at every call.
    precision: dtypes; where they are not the plan's own, buffers get memory of their own instead of the plan's places.
    """

    def __init__(
        self,
        plan: Plan,
        programs: Programs,
        rank: int,
        precision: Precision,
        arena: Tensor | None,
        device: torch.device | str,
    ) -> None:
        buffers = programs.buffers
        self.first, stop = int(buffers.offsets[rank]), int(buffers.offsets[rank + 1])
        self.device, self.precision, self.head_dim = device, precision, plan.problem.heads.head_dim
        starts = row_starts(plan.spans)
        lo, hi = np.maximum(buffers.rows[self.first : stop].T, 0)
        self.num_rows = (starts[hi] - starts[lo]).tolist()
        self.roles, heads = buffers.role[self.first : stop].tolist(), buffers.heads[self.first : stop]
        self.num_heads = np.where(np.isin(self.roles, KV_ROLES), heads[:, 3], heads[:, 1]).tolist()
        self.views: list[Any] = [None] * (stop - self.first)  # `View`s, and None for what is put in at every call
        self.outside: dict[tuple[int, int], list[int]] = {}
        for b in range(self.first, stop):
            space, role = int(buffers.space[b]), int(buffers.role[b])
            if space == Space.ARENA:
                self.views[b - self.first] = self._in_arena(buffers, b, arena)
            else:
                self.outside.setdefault((space, role), []).append(b - self.first)

    def index(self, space: Space, role: Role) -> int:
        """Place in `views` of the one buffer outside the arena with this space and role."""
        return self.outside[space, role][0]

    def has(self, space: Space, role: Role) -> bool:
        return (space, role) in self.outside

    def bind(self, place: int, make: Callable[[View], Made]) -> Callable[[list[View]], Made]:
        """What `make` makes of the buffer at a place: made now if it stays where it is, else anew for every call."""
        fixed = self.views[place]
        if fixed is None:
            return lambda views: make(views[place])
        made = make(fixed)
        return lambda _: made

    def cut(
        self, place: int, rows: tuple[int, int] | None = None, heads: tuple[int, int] | None = None
    ) -> Callable[[list[View]], View]:
        """Bind some of a buffer's rows and heads, (first, count) each; None: all. What is whole isn't cut."""
        if rows in (None, (0, self.num_rows[place])) and heads in (None, (0, self.num_heads[place])):
            return itemgetter(place)
        row, head = (slice(None) if run is None else slice(run[0], sum(run)) for run in (rows, heads))
        pair = (row, slice(None), head)  # keys and values, or lse and delta
        of_rows = pair if self.roles[place] in KV_ROLES else (row, head)
        of_stats = pair if self.roles[place] == Role.DO else (row, head)
        return self.bind(
            place, lambda view: View(view.rows[of_rows], None if view.stats is None else view.stats[of_stats])
        )

    def allocate(self, buffers: Buffers, index: int) -> View:
        """Make a fresh tensor for a buffer outside the arena and put it in."""
        b = self.first + index
        rows, stats = row_shapes(int(buffers.role[b]), self.num_rows[index], buffers.heads[b], self.head_dim)
        dtype, stat = self._dtypes(buffers, b)
        view = View(
            torch.empty(rows, dtype=dtype, device=self.device),
            None if stats is None else torch.empty(stats, dtype=stat, device=self.device),
        )
        self.views[index] = view
        return view

    def release(self) -> None:
        """Let go of the tensors that were put in for one call.

        An output kept here would never be freed: its autograd node refers to the executor, which refers to it.
        """
        for places in self.outside.values():
            for place in places:
                self.views[place] = None

    def _dtypes(self, buffers: Buffers, b: int) -> tuple[torch.dtype, torch.dtype]:
        acc = bool(buffers.acc[b])
        name = self.precision.dtype_of(int(buffers.role[b]), int(buffers.space[b]), acc)
        return TORCH_DTYPES[name], TORCH_DTYPES[self.precision.stat_dtype_of(acc)]

    def _in_arena(self, buffers: Buffers, b: int, arena: Tensor | None) -> View:
        if buffers.role[b] == Role.NONE:
            size, offset = int(buffers.num_bytes[b]), int(buffers.offset[b])
            return View(torch.empty(0, dtype=torch.uint8) if arena is None else arena[offset : offset + size])
        dtype, stat = self._dtypes(buffers, b)
        shape, stats = row_shapes(int(buffers.role[b]), self.num_rows[b - self.first], buffers.heads[b], self.head_dim)
        if arena is None:
            rows = torch.empty(shape, dtype=dtype, device=self.device)
            return View(rows, None if stats is None else torch.empty(stats, dtype=stat, device=self.device))
        rows, end = view_at(arena, int(buffers.offset[b]), dtype, shape)
        return View(rows, None if stats is None else view_at(arena, aligned(end), stat, stats)[0])


def view_at(raw: Tensor, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[Tensor, int]:
    """See bytes of `raw` from `offset` as a tensor: (view, offset after it)."""
    size = int(np.prod(shape)) * dtype.itemsize
    return raw[offset : offset + size].view(dtype).view(shape), offset + size
