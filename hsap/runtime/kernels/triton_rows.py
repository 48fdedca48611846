"""Row operations around attention as Triton kernels: each reads what it needs once and writes what it makes once.

Torch does a merge in eight operations, each with its own launch and its own way through memory, and gathers and
scatters with two more; a merge of rows picked by an index tensor is one kernel here (HSAP names the fusion as future
work). The arithmetic is that of `merge`, `add_rows` and `hsap.runtime.kernels.delta`, which say what it means. Nothing
here is differentiated: a plan's backward works from the merged log-sum-exp, so a merge has no gradient of its own.

Every tensor's last dimension is contiguous, the others have any strides. One program does some (row, head) pairs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048
"""Elements of a row operation that one program holds: 16 a thread with four warps."""

EMPTY = tl.constexpr(float("-inf"))

VARIES = ["num_pairs", "lse_part_row", "lse_part_head"]
"""What differs from pack to pack. Triton compiles anew for numbers that 16 divides, and for 1; not for these."""


def merge(
    o_acc: Tensor,
    lse_acc: Tensor,
    o_part: Tensor,
    lse_part: Tensor,
    acc_rows: Tensor | None = None,
    part_rows: Tensor | None = None,
) -> None:
    """`hsap.runtime.kernels.merge.merge` in one launch."""
    num_rows = _count(o_acc, acc_rows)
    _launch(
        _merge,
        (num_rows, o_acc),
        (o_acc, lse_acc, o_part, lse_part, acc_rows, part_rows),
        (*o_acc.stride()[:2], *lse_acc.stride(), *o_part.stride()[:2], *lse_part.stride()),
        HAS_ACC_ROWS=acc_rows is not None,
        HAS_PART_ROWS=part_rows is not None,
    )


def add_rows(total: Tensor, part: Tensor, total_rows: Tensor | None = None, part_rows: Tensor | None = None) -> None:
    """`hsap.runtime.kernels.merge.add_rows` in one launch."""
    _launch(
        _add,
        (_count(total, total_rows), total),
        (total, part, total_rows, part_rows),
        (*total.stride()[:2], *part.stride()[:2]),
        HAS_TOTAL_ROWS=total_rows is not None,
        HAS_PART_ROWS=part_rows is not None,
    )


def row_delta(do: Tensor, o: Tensor, dtype: torch.dtype) -> Tensor:
    """`hsap.runtime.kernels.delta.row_delta` in one launch."""
    delta = torch.empty(do.shape[:2], dtype=dtype, device=do.device)
    strides = (*do.stride()[:2], *o.stride()[:2])
    _launch(_delta, (len(do), do), (do, o, delta), strides)
    return delta


def stand_in_output(do: Tensor, delta: Tensor) -> Tensor:
    """`hsap.runtime.kernels.delta.stand_in_output` in one launch."""
    out = torch.empty(do.shape, dtype=do.dtype, device=do.device)
    _launch(_stand_in, (len(do), do), (do, delta, out), (*do.stride()[:2], *delta.stride()))
    return out


def try_out(device: torch.device | str) -> None:
    """Compile and run one of the kernels on nothing of importance; an error says what this machine lacks."""
    rows, stats = torch.zeros(1, 1, 16, device=device), torch.zeros(1, 1, device=device)
    merge(rows, stats, rows.clone(), stats.clone())


def _count(rows: Tensor, index: Tensor | None) -> int:
    return len(rows) if index is None else len(index)


def _launch(
    kernel, size: tuple[int, Tensor], tensors: tuple[Any, ...], strides: tuple[int, ...], **flags: bool
) -> None:
    """Run a kernel over every (row, head) pair of tensors shaped like the one given; absent tensors are never read."""
    num_rows, like = size
    num_heads, head_dim = like.shape[1:]
    num_pairs = num_rows * num_heads
    if not num_pairs or not head_dim:
        return
    width = triton.next_power_of_2(head_dim)
    pairs = max(ELEMENTS // width, 1)
    given = [like if tensor is None else tensor for tensor in tensors]
    sizes = (num_pairs, num_heads, head_dim, *strides)
    with torch.cuda.device_of(like):  # Triton launches on the current device, whatever its tensors are on
        kernel[(triton.cdiv(num_pairs, pairs),)](*given, *sizes, **flags, PAIRS=pairs, WIDTH=width)


@triton.jit
def _place(num_pairs, num_heads, head_dim, PAIRS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows and heads of this program's pairs, whether there are such, and the columns that exist of each."""
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    column = tl.arange(0, WIDTH)[None, :]
    there = pair < num_pairs
    return pair // num_heads, pair % num_heads, there, column, there[:, None] & (column < head_dim)


@triton.jit(do_not_specialize=VARIES)
def _merge(
    o_acc,
    lse_acc,
    o_part,
    lse_part,
    acc_rows,
    part_rows,
    num_pairs,
    num_heads,
    head_dim,
    acc_row,
    acc_head,
    lse_acc_row,
    lse_acc_head,
    part_row,
    part_head,
    lse_part_row,
    lse_part_head,
    HAS_ACC_ROWS: tl.constexpr,
    HAS_PART_ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row, head, there, column, inside = _place(num_pairs, num_heads, head_dim, PAIRS, WIDTH)
    ours, theirs = row, row
    if HAS_ACC_ROWS:
        ours = tl.load(acc_rows + row, there, other=0).to(tl.int64)
    if HAS_PART_ROWS:
        theirs = tl.load(part_rows + row, there, other=0).to(tl.int64)
    at_lse = lse_acc + ours * lse_acc_row + head * lse_acc_head
    old = tl.load(at_lse, there, other=EMPTY).to(tl.float64)
    new = tl.load(lse_part + theirs * lse_part_row + head * lse_part_head, there, other=EMPTY).to(tl.float64)
    # An empty part weighs nothing, also beside an empty accumulator, from which it differs by NaN.
    weight = tl.where(new == EMPTY, 0.0, 1.0 / (1.0 + tl.exp(old - new)))
    high, low = tl.maximum(old, new), tl.minimum(old, new)
    both = tl.where(low == EMPTY, high, high + tl.log(1.0 + tl.exp(low - high)))
    # There are fewer pairs than threads, so that several read each lse; none is written before all have read it.
    tl.debug_barrier()
    tl.store(at_lse, both.to(lse_acc.dtype.element_ty), there)
    at_o = o_acc + (ours * acc_row + head * acc_head)[:, None] + column
    o = tl.load(at_o, inside, other=0.0)
    part = tl.load(o_part + (theirs * part_row + head * part_head)[:, None] + column, inside, other=0.0).to(o.dtype)
    share = weight.to(o.dtype)[:, None]
    step = part - o
    # From the nearer end, as torch's lerp does: a weight of exactly 1 then gives exactly the part.
    tl.store(at_o, tl.where(share < 0.5, o + share * step, part - step * (1.0 - share)), inside)


@triton.jit(do_not_specialize=VARIES[:1])
def _add(
    total,
    part,
    total_rows,
    part_rows,
    num_pairs,
    num_heads,
    head_dim,
    total_row,
    total_head,
    part_row,
    part_head,
    HAS_TOTAL_ROWS: tl.constexpr,
    HAS_PART_ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row, head, there, column, inside = _place(num_pairs, num_heads, head_dim, PAIRS, WIDTH)
    ours, theirs = row, row
    if HAS_TOTAL_ROWS:
        ours = tl.load(total_rows + row, there, other=0).to(tl.int64)
    if HAS_PART_ROWS:
        theirs = tl.load(part_rows + row, there, other=0).to(tl.int64)
    at_total = total + (ours * total_row + head * total_head)[:, None] + column
    old = tl.load(at_total, inside, other=0.0)
    new = tl.load(part + (theirs * part_row + head * part_head)[:, None] + column, inside, other=0.0)
    tl.store(at_total, old + new.to(old.dtype), inside)


@triton.jit(do_not_specialize=VARIES[:1])
def _delta(
    do,
    o,
    delta,
    num_pairs,
    num_heads,
    head_dim,
    do_row,
    do_head,
    o_row,
    o_head,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row, head, there, column, inside = _place(num_pairs, num_heads, head_dim, PAIRS, WIDTH)
    wide = delta.dtype.element_ty
    ours = tl.load(do + (row * do_row + head * do_head)[:, None] + column, inside, other=0.0).to(wide)
    theirs = tl.load(o + (row * o_row + head * o_head)[:, None] + column, inside, other=0.0).to(wide)
    tl.store(delta + row * num_heads + head, tl.sum(ours * theirs, 1), there)


@triton.jit(do_not_specialize=VARIES[:1])
def _stand_in(
    do,
    delta,
    out,
    num_pairs,
    num_heads,
    head_dim,
    do_row,
    do_head,
    delta_row,
    delta_head,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row, head, there, column, inside = _place(num_pairs, num_heads, head_dim, PAIRS, WIDTH)
    sum_ = tl.load(delta + row * delta_row + head * delta_head, there, other=0.0)
    rows = tl.load(do + (row * do_row + head * do_head)[:, None] + column, inside, other=0.0).to(sum_.dtype)
    largest = tl.max(tl.abs(rows), 1)
    largest = tl.where(largest == 0.0, 1.0, largest)
    rows = rows / largest[:, None]
    norm = tl.sum(rows * rows, 1)
    norm = tl.where(norm == 0.0, 1.0, norm)
    rows = rows * (sum_ / largest / norm)[:, None]
    at_out = out + ((row * num_heads + head) * head_dim)[:, None] + column
    tl.store(at_out, rows.to(out.dtype.element_ty), inside)
