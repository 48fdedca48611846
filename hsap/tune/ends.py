"""Ends: what stands before and behind a column's stages: IntraSP's all-to-alls, or the last copy of the results."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsap.ir.block import Shards
from hsap.ir.precision import Precision, row_bytes
from hsap.ir.problem import Cluster, Problem
from hsap.ir.program import Role, Space
from hsap.ir.reshard import scratch_bytes
from hsap.ir.schedule import INPUTS, OUTPUTS


def rank_tokens(problem: Problem, shards: Shards) -> np.ndarray:
    """Tokens of each rank, an InterSP shard split evenly over its intra ranks: int64 [inter_sp, intra_sp]."""
    inter, intra = problem.topology.inter_sp, problem.topology.intra_sp
    total = np.bincount(shards.home, shards.tokens, inter).astype(np.int64)
    return np.diff(total[:, None] * np.arange(intra + 1) // intra)


def moved_s(cluster: Cluster, num_bytes: np.ndarray) -> np.ndarray:
    """Seconds of kernels that move bytes in a rank's own memory; what has none isn't started."""
    return np.where(num_bytes > 0, cluster.kernel_overhead_s + num_bytes / cluster.memory_bytes_per_s, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Ends:
    """Prices of both ends. tokens: int64 [inter_sp, intra_sp], of each rank."""

    problem: Problem
    tokens: np.ndarray

    @classmethod
    def of(cls, problem: Problem, shards: Shards) -> Ends:
        """Look at a placement."""
        return cls(problem, rank_tokens(problem, shards))

    def enter_s(self, direction: str) -> np.ndarray:
        """Seconds until the column's inputs are there: float64 [inter_sp]."""
        roles = [role for role in INPUTS[direction] if direction == "forward" or role == Role.DO]
        return self._sum(roles if self.problem.topology.intra_sp > 1 else [], True)

    def leave_s(self, direction: str) -> np.ndarray:
        """Seconds from the column's accumulated results to the callers': float64 [inter_sp]."""
        if self.problem.topology.intra_sp > 1:
            return self._sum(OUTPUTS[direction], False)
        cluster, total = self.problem.cluster, np.zeros(len(self.tokens))
        for role in OUTPUTS[direction]:
            row = self._row(role, Space.ARENA, True) + self._row(role, Space.OUTPUT, False)
            total += moved_s(cluster, self.tokens[:, 0] * row[0])
        return total

    def _sum(self, roles, to_column: bool) -> np.ndarray:
        """Seconds of all-to-alls one after another; each takes a group as long as its slowest rank."""
        total = np.zeros(len(self.tokens))
        for role in roles:
            total += (self._reorder_s(role, to_column) + self._exchange_s(role, to_column)).max(axis=1)
        return total

    def _row(self, role: Role, space: Space, acc: bool, heads=None) -> np.ndarray:
        shape = self.problem.heads
        heads = shape.shares(self.problem.topology.intra_sp) if heads is None else [heads]
        precision = Precision.of(shape.dtype, self.problem.wire_dtype)
        return sum(row_bytes(precision, role, space, acc, np.array(heads), shape.head_dim))

    def _reorder_s(self, role: Role, to_column: bool) -> np.ndarray:
        """Seconds of packing and unpacking: float64 [inter_sp, intra_sp]."""
        shape, cluster, column = self.problem.heads, self.problem.cluster, self.tokens.sum(axis=1, keepdims=True)
        own_space = Space.INPUT if to_column else Space.OUTPUT
        num_bytes = self.tokens * self._row(role, own_space, False, shape.all_heads)
        num_bytes = num_bytes + column * self._row(role, Space.KEPT if to_column else Space.ARENA, not to_column)
        precision = Precision.of(shape.dtype, self.problem.wire_dtype)
        num_bytes = num_bytes + 2 * scratch_bytes(role, to_column, shape, precision, self.tokens)
        return moved_s(cluster, num_bytes)

    def _exchange_s(self, role: Role, to_column: bool) -> np.ndarray:
        """Seconds of the exchange of every rank, its ports one after another: float64 [inter_sp, intra_sp]."""
        problem, cluster, intra = self.problem, self.problem.cluster, self.problem.topology.intra_sp
        row = self._row(role, Space.ARENA, False)
        # [inter, source, destination]: own rows with the peer's heads, or the peer's rows with own heads.
        sent = self.tokens[:, :, None] * row if to_column else self.tokens[:, None, :] * row[:, None]
        sent = np.where(np.eye(intra, dtype=bool), 0, sent)
        nodes = problem.node_of.reshape(-1, intra)
        crosses = nodes[:, :, None] != nodes[:, None, :]
        seconds = np.zeros(self.tokens.shape)
        for mine, rate, latency in (
            (~crosses, cluster.intra_bytes_per_s, cluster.intra_latency_s),
            (crosses, cluster.inter_bytes_per_s, cluster.inter_latency_s),
        ):
            carried = np.where(mine, sent, 0)
            port = np.maximum(carried.sum(axis=2), carried.sum(axis=1)) / rate
            seconds = np.maximum(seconds, np.where(port > 0, port + latency, 0))
        return seconds
