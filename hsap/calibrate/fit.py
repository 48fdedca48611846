"""Fit: constants of a `Cluster` from microbenchmarks, by least squares of relative errors without negative constants.

The fitted terms are those of `hsap.sim.cost`, from its own functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hsap.calibrate.links import INTER, INTRA
from hsap.calibrate.measure import ROWS
from hsap.calibrate.readings import Kernel, Link, Network, Readings, Timed
from hsap.ir.cluster import Cluster
from hsap.ir.heads import HeadShape
from hsap.ir.precision import Precision, row_bytes
from hsap.ir.program import Op, Role, Space
from hsap.ir.slice import Q1
from hsap.sim.cost import Kernels
from hsap.sim.share import both_ways_s, crowding, of_each_way

DIAGONALS = (16, 32, 64, 128, 256, 512)
LARGE = 512 << 10
"""Bytes of messages whose rate is the link's."""
FULL_ROWS = 128
"""Rows from which on kernels may be at their best."""
_OPS = (Op.ATTEND, Op.ATTEND_GRAD)


@dataclass(frozen=True, slots=True)
class Residual:
    """Relative errors of a fit. what: the microbenchmark. errors: predicted / measured - 1 of each."""

    what: str
    errors: tuple[float, ...]

    def __str__(self) -> str:
        size = np.abs(self.errors)
        return f"{self.what:<24} {len(size):>3} {np.median(size):>8.1%} {size.max():>8.1%}"


def nonnegative(terms: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Solve least squares with no coefficient below 0 (Lawson and Hanson): float64 [k]. terms: [n, k]; wanted: [n]."""
    scale = np.maximum(np.linalg.norm(terms, axis=0), 1e-300)
    a, out, free = terms / scale, np.zeros(terms.shape[1]), np.zeros(terms.shape[1], bool)
    for _ in range(10 * len(out)):
        slope = a.T @ (wanted - a @ out)
        if free.all() or slope[~free].max() <= 1e-12 * np.linalg.norm(wanted):
            break
        free[np.flatnonzero(~free)[slope[~free].argmax()]] = True
        while free.any():
            found = np.zeros(len(out))
            found[free] = np.linalg.lstsq(a[:, free], wanted, rcond=None)[0]
            if (found[free] > 0).all():
                out = found
                break
            # Go towards the solution until the first coefficient is 0, and leave that one out.
            low = free & (found <= 0)
            step = (out[low] / np.maximum(out[low] - found[low], 1e-300)).min()
            out = out + step * (found - out)
            free &= out > 1e-15
            out[~free] = 0.0
    return out / scale


def fit_kernels(found: Readings, heads: HeadShape, base: Cluster) -> tuple[Cluster, list[Residual]]:
    """Fit overheads, rates and folds of attention, and rates of memory. found: means over ranks."""
    samples = [[kernel for kernel in found.kernels if kernel.direction == direction] for direction in range(2)]
    cluster = replace(base, flops_per_s=found.flops_per_s, rows_efficiency=_rows_efficiency(samples, heads, base))
    best = min(
        (_fit_attention(samples, heads, replace(cluster, diagonal_tokens=d)) for d in DIAGONALS),
        key=lambda fitted: fitted[0],
    )
    _, cluster, residuals = best
    num_bytes = np.array([_moved(one.what, one.rows, heads) for one in found.memory])
    seconds, kinds = np.array([one.seconds for one in found.memory]), np.array([one.what for one in found.memory])
    # The overhead of an instruction is what attention found.
    rates = []
    for what, names in (("copies and sums", ("copy", "sum")), ("merges", "merge"), ("reordering", "exchange")):
        these = np.isin(kinds, names)
        rest = np.maximum(1 - cluster.kernel_overhead_s / seconds[these], 0.1)
        slow = nonnegative((num_bytes / seconds)[these, None], rest)[0]
        rates.append(1 / slow)
        residuals.append(_residual(what, cluster.kernel_overhead_s + num_bytes[these] * slow, seconds[these]))
    names = ("memory_bytes_per_s", "merge_bytes_per_s", "exchange_bytes_per_s")
    return replace(cluster, **dict(zip(names, rates))), residuals


def _rows_efficiency(samples: Sequence[list[Kernel]], heads: HeadShape, base: Cluster) -> tuple[tuple[int, float], ...]:
    """Part of the rate by rows, from the rectangles: a rate for each number of rows, the mean of both directions."""
    slow = []
    for op, of_op in zip(_OPS, samples):
        rectangles = [kernel for kernel in of_op if kernel.kind == "rectangle"]
        seconds = np.array([kernel.seconds for kernel in rectangles])
        tables = [np.array(kernel.slices) for kernel in rectangles]
        terms = [_terms(op, table, heads, base) for table in tables]
        by_rows = [[work * (table[0, Q1] == rows) for rows in ROWS] for table, (_, _, _, work) in zip(tables, terms)]
        table = np.concatenate([np.array(terms)[:, :3], by_rows], axis=1) / seconds[:, None]
        slow.append(nonnegative(table, np.ones(len(seconds)))[3:])
    rate = 1 / np.sqrt(np.maximum(slow[0], 1e-18) * np.maximum(slow[1], 1e-18))
    # Of few rows the rate is what noise in the overheads leaves; the peak is that of many.
    peak = rate[np.array(ROWS) >= FULL_ROWS].max()
    return tuple(zip(ROWS, np.clip(rate / peak, 0.01, 1.0).tolist()))


def _terms(op: Op, table: np.ndarray, heads: HeadShape, cluster: Cluster) -> np.ndarray:
    """What the simulator takes the time of one kernel for: float64 [4], see `Kernels.terms`."""
    lone = np.zeros(1, np.int64)
    work = Kernels.of(table, np.zeros(len(table), np.int64), 1, cluster)
    every = np.array([heads.all_heads])
    return work.terms(lone, op, every, heads.head_dim, Precision.of(heads.dtype), cluster)[0]


def _moved(what: str, rows: int, heads: HeadShape) -> float:
    """Bytes of a Copy of q, of a Sum into dq, of a Merge into o, and of an exchange of half of q's heads."""
    run, precision = np.array([0, heads.num_q_heads, 0, heads.num_kv_heads]), Precision.of(heads.dtype)
    role = {"copy": Role.Q, "sum": Role.DQ, "merge": Role.O, "exchange": Role.Q}[what]
    part, acc = (float(sum(row_bytes(precision, role, Space.INPUT, a, run, heads.head_dim))) for a in (False, True))
    return rows * {"copy": 2 * part, "exchange": 3 * part}.get(what, part + 2 * acc)


def _fit_attention(
    samples: Sequence[list[Kernel]], heads: HeadShape, cluster: Cluster
) -> tuple[float, Cluster, list[Residual]]:
    """Fit both directions at once: (mean squared relative error, cluster, residuals).

    Coefficients: a kernel, a piece forward, a piece backward, a byte merged, a byte of gradients, an operation forward,
    an operation backward.
    """
    rows, seconds, names = [], [], []
    for direction, (op, of_op) in enumerate(zip(_OPS, samples)):
        for kernel in of_op:
            row = np.zeros(7)
            row[[0, 1 + direction, 3 + direction, 5 + direction]] = _terms(op, np.array(kernel.slices), heads, cluster)
            rows.append(row)
            seconds.append(kernel.seconds)
            names.append(f"{('attend', 'attend grad')[direction]} {kernel.kind}")
    seconds, table = np.array(seconds), np.array(rows)
    found = nonnegative(table / seconds[:, None], np.ones(len(seconds)))
    predicted = table @ found
    residuals = [
        _residual(name, predicted[np.array(names) == name], seconds[np.array(names) == name])
        for name in dict.fromkeys(names)
    ]
    rate = 1 / np.maximum(found[3:], 1e-18)
    flops_per_s = max(cluster.flops_per_s, *rate[2:].tolist())
    fitted = replace(
        cluster,
        flops_per_s=flops_per_s,
        kernel_overhead_s=found[0],
        slice_overhead_s=found[1],
        grad_slice_overhead_s=found[2],
        attend_bytes_per_s=rate[0],
        attend_grad_bytes_per_s=rate[1],
        attend_efficiency=rate[2] / flops_per_s,
        attend_grad_efficiency=rate[3] / flops_per_s,
    )
    return float(np.square(predicted / seconds - 1).mean()), fitted, residuals


WHERE = {INTRA: "inside a node", INTER: "between nodes"}


def fit_links(network: Network, num_ranks: int, ranks_per_node: int, base: Cluster) -> tuple[Cluster, list[Residual]]:
    """Fit overhead, rates, latencies, duplex and network cards of messages; exchanges of all are only compared.

    network: means over the ranks that took part. A kind of link that wasn't measured is taken to be like the other. A
    cluster has one duplex and one comm_cores for both kinds: the network's where it was measured, because what takes
    long crosses it, and the rate inside nodes is fitted beside these.
    """
    links = {kind: link for kind, link in ((INTER, network.inter), (INTRA, network.intra)) if link is not None}
    first = next(iter(links))
    message = float(np.mean([_slope(link.launches) for link in links.values()]))
    cluster = replace(base, message_overhead_s=message, comm_cores=links[first].message_cores)
    found: dict[str, tuple[float, float, float]] = {}
    residuals: list[Any] = []
    for kind, link in links.items():
        found[kind], more = _fit_link(link, kind, cluster)
        residuals = more + residuals
    (intra_rate, intra_s, _), (inter_rate, inter_s, duplex) = (found.get(k, found[first]) for k in (INTRA, INTER))
    cluster = replace(
        cluster,
        intra_bytes_per_s=intra_rate,
        inter_bytes_per_s=inter_rate,
        intra_latency_s=intra_s,
        inter_latency_s=inter_s,
        duplex=duplex,
    )
    if network.counterparts is not None:
        cluster = replace(cluster, num_nics=_cards(*network.counterparts, ranks_per_node, cluster))
    if num_ranks > 2:
        num_bytes, seconds = np.array(network.everybody).T
        predicted = _everybody_s(num_bytes, num_ranks, min(ranks_per_node, num_ranks), cluster)
        residuals.append(_residual("all to all, not fitted", predicted, seconds))
    return cluster, residuals


def _slope(timed: Timed) -> float:
    """Seconds of one more."""
    counts, seconds = np.array(timed).T
    return float(nonnegative(np.stack([np.ones(len(counts)), counts], axis=1), seconds)[1])


def _fit_link(link: Link, kind: str, cluster: Cluster) -> tuple[tuple[float, float, float], list[Residual]]:
    """Fit one kind of link: ((rate, latency, duplex), residuals)."""
    rates, intercepts, residuals = [], [], []
    for name, timed, halves in (("hops", link.hops, 1), ("exchanges", link.exchanges, 2)):
        num_bytes, seconds = np.array(timed).T
        start, slow = _start_and_slope(num_bytes, seconds)
        rates.append(1 / slow)
        intercepts.append(max(start - halves * cluster.message_overhead_s, 0.0))
        residuals.append(_residual(f"{name} {WHERE[kind]}", start + num_bytes * slow, seconds))
    # A message has two ends, and ranks that exchange have four; between nodes each host has half of them. What want of
    # cores explains isn't the link's.
    ranks = 1.0 if kind == INTRA else 0.5
    one_way, exchange = (crowding(cluster, times * ranks)[1] for times in (1, 2))
    rate = rates[0] * one_way
    # The rate of an exchange over the link's own is `of_each_way(duplex)`.
    duplex = float(np.clip(rates[1] * exchange / (rate * of_each_way(1.0)), 1.0, 2.0))
    return (rate, float(np.mean(intercepts)), duplex), residuals


def _start_and_slope(num_bytes: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """Seconds of a message before its bytes flow, and of each byte.

    The slope is that of the large ones, which decide: what lies on the way (sockets, caches, shapers) takes the first
    part of a message faster than the link goes, so that a line through all of them would promise too high a rate. What
    the smallest one takes is then the start.
    """
    large = num_bytes >= LARGE
    terms = np.stack([np.ones(np.count_nonzero(large)), num_bytes[large]], axis=1) / seconds[large, None]
    slow = max(float(np.linalg.lstsq(terms, np.ones(len(terms)), rcond=None)[0][1]), 1e-15)
    least = num_bytes.argmin()
    return max(float(seconds[least] - num_bytes[least] * slow), 0.0), slow


def _cards(alone_s: float, together_s: float, ranks_per_node: int, cluster: Cluster) -> int | None:
    """Network cards of a node, by how many times one rank's rate all its ranks together reach; None: one each.

    A number that divides the ranks, the nearest by ratio: real machines' do.
    """
    alone, together = (crowding(cluster, ranks)[1] for ranks in (1, ranks_per_node))
    reached = ranks_per_node * (alone_s / alone) / (together_s / together)
    divisors = [count for count in range(1, ranks_per_node + 1) if ranks_per_node % count == 0]
    nearest = min(divisors, key=lambda count: abs(np.log(count / reached)))
    return None if nearest == ranks_per_node else nearest


def _everybody_s(num_bytes: np.ndarray, num_ranks: int, ranks_per_node: int, cluster: Cluster) -> np.ndarray:
    """Seconds in which each rank sends each other one a message, whose ports inside and out work side by side."""
    inside = ranks_per_node - 1
    outside = num_ranks - 1 - inside
    a_card = ranks_per_node / (cluster.num_nics or ranks_per_node)
    alone_s = num_bytes * max(inside / cluster.intra_bytes_per_s, outside * a_card / cluster.inter_bytes_per_s)
    flowing_s = both_ways_s(cluster, alone_s, alone_s) * crowding(cluster, ranks_per_node)[1]
    latency_s = cluster.inter_latency_s if outside else cluster.intra_latency_s
    return 2 * (num_ranks - 1) * cluster.message_overhead_s + latency_s + flowing_s


def _residual(what: str, predicted: np.ndarray, seconds: np.ndarray) -> Residual:
    return Residual(what, tuple((predicted / seconds - 1).tolist()))
