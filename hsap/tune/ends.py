"""Ends: what stands before and behind a column's stages: the ranks' own tensors, IntraSP's all-to-alls, or a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hsap.ir.block import Shards
from hsap.ir.heads import HeadRun
from hsap.ir.precision import Precision, row_bytes
from hsap.ir.problem import Problem
from hsap.ir.program import Op, Role, Space
from hsap.ir.reshard import exchanged_bytes, scratch_bytes
from hsap.ir.schedule import INPUTS, OUTPUTS
from hsap.sim.cost import moving_seconds, opening_row_seconds
from hsap.sim.share import both_ways_s, crowding


def rank_tokens(problem: Problem, shards: Shards) -> np.ndarray:
    """Tokens of each rank, an InterSP shard split evenly over its intra ranks: int64 [inter_sp, intra_sp]."""
    total = np.bincount(shards.home, shards.tokens, problem.topology.inter_sp).astype(np.int64)
    return split(total, problem.topology.intra_sp)


def split(tokens: np.ndarray, intra: int) -> np.ndarray:
    """Tokens of each of `intra` ranks that share so many: int64 [n, intra]."""
    return np.diff(tokens[:, None] * np.arange(intra + 1) // intra)


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
        shape, cluster = self.problem.heads, self.problem.cluster
        heads = np.array([shape.all_heads])
        opening = opening_row_seconds(cluster, self._precision, direction == "backward", heads, shape.head_dim)
        opening_s = self.tokens * opening * self._crowding[0]
        if self.problem.topology.intra_sp == 1:
            return opening_s[:, 0]
        return self._sum(
            [role for role in INPUTS[direction] if direction == "forward" or role == Role.DO], True, opening_s
        )

    def leave_s(self, direction: str) -> np.ndarray:
        """Seconds from the column's accumulated results to the callers': float64 [inter_sp]."""
        if self.problem.topology.intra_sp > 1:
            return self._sum(OUTPUTS[direction], False, 0.0)
        cluster, total = self.problem.cluster, np.zeros(len(self.tokens))
        for role in OUTPUTS[direction]:
            row = self._row(role, Space.ARENA, True) + self._row(role, Space.OUTPUT, False)
            total += moving_seconds(cluster, Op.COPY, self.tokens[:, 0] * row[0])
        return total * self._crowding[0]

    def _sum(self, roles: Sequence[Role], to_column: bool, before_s: np.ndarray | float) -> np.ndarray:
        """Seconds of all-to-alls one after another; each takes a group as long as its slowest rank."""
        total = np.zeros(len(self.tokens))
        for role in roles:
            total += (before_s + self._reorder_s(role, to_column) + self._exchange_s(role, to_column)).max(axis=1)
            before_s = 0.0
        return total

    @property
    def _crowding(self) -> tuple[float, float]:
        return crowding(self.problem.cluster, int(np.bincount(self.problem.node_of).max()))

    @property
    def _precision(self) -> Precision:
        return Precision.of(self.problem.heads.dtype, self.problem.wire_dtype)

    def _row(self, role: Role, space: Space, acc: bool, heads: HeadRun | None = None) -> np.ndarray:
        shape = self.problem.heads
        shares = shape.shares(self.problem.topology.intra_sp) if heads is None else (heads,)
        elements, statistics = row_bytes(self._precision, role, space, acc, np.array(shares), shape.head_dim)
        return elements + statistics

    def _reorder_s(self, role: Role, to_column: bool) -> np.ndarray:
        """Seconds of packing and unpacking: float64 [inter_sp, intra_sp]."""
        shape, cluster, column = self.problem.heads, self.problem.cluster, self.tokens.sum(axis=1, keepdims=True)
        own_space = Space.INPUT if to_column else Space.OUTPUT
        num_bytes = self.tokens * self._row(role, own_space, False, shape.all_heads)
        num_bytes = num_bytes + column * self._row(role, Space.KEPT if to_column else Space.ARENA, not to_column)
        num_bytes = num_bytes + 2 * scratch_bytes(role, to_column, shape, self._precision, self.tokens)
        return moving_seconds(cluster, Op.ALL_TO_ALL, num_bytes) * self._crowding[0]

    def _exchange_s(self, role: Role, to_column: bool) -> np.ndarray:
        """Seconds of the exchange of every rank, its ports one after another: float64 [inter_sp, intra_sp]."""
        problem, cluster, intra = self.problem, self.problem.cluster, self.problem.topology.intra_sp
        sent = exchanged_bytes(role, to_column, problem.heads, self._precision, self.tokens)
        nodes = problem.node_of.reshape(-1, intra)
        crosses = nodes[:, :, None] != nodes[:, None, :]
        ranks = np.arange(problem.num_ranks).reshape(-1, intra)
        cards = cluster.nic_of(problem.num_ranks).reshape(-1, intra)
        seconds = cluster.message_overhead_s * ((sent > 0).sum(axis=2) + (sent > 0).sum(axis=1))
        longest = np.zeros(self.tokens.shape)
        for mine, port, leaves in ((~crosses, ranks, False), (crosses, cards, True)):
            rate, latency_s = cluster.link(leaves)
            carried = np.where(mine, sent, 0)
            out, into = (np.bincount(port.ravel(), carried.sum(axis=axis).ravel())[port] / rate for axis in (2, 1))
            through = both_ways_s(cluster, np.maximum(out, into), np.minimum(out, into))
            through *= self._crowding[1]
            longest = np.maximum(longest, np.where(through > 0, through + latency_s, 0))
        return seconds + longest
