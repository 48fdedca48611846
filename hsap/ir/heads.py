"""Heads: the attention's head shape and how IntraSP shares it out."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from hsap.ir.check import MAX_HEAD_DIM, MAX_HEADS, Refused, instance, one_of, shown, whole

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of one element; the names are the ones used everywhere (configs, plans, command line)."""


class HeadRun(NamedTuple):
    """Query heads [q_first, q_first + q_count) that share KV heads [kv_first, kv_first + kv_count) evenly, in order."""

    q_first: int
    q_count: int
    kv_first: int
    kv_count: int

    @property
    def q(self) -> slice:
        """The query heads, to index a tensor with."""
        return slice(self.q_first, self.q_first + self.q_count)

    @property
    def kv(self) -> slice:
        """The KV heads, to index a tensor with."""
        return slice(self.kv_first, self.kv_first + self.kv_count)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Head counts of one attention layer: query heads, KV heads (a divisor), dimension of a head, dtype of q, k, v."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        for name, most in (("num_q_heads", MAX_HEADS), ("num_kv_heads", MAX_HEADS), ("head_dim", MAX_HEAD_DIM)):
            object.__setattr__(self, name, whole(f"heads: {name}", getattr(self, name), 1, most))
        if self.num_q_heads % self.num_kv_heads:
            raise Refused(
                f"heads: {self.num_q_heads} query heads can't share {self.num_kv_heads} KV heads evenly; the number of "
                "KV heads must divide the number of query heads"
            )
        one_of("heads: unknown dtype", self.dtype, DTYPE_BYTES)

    @classmethod
    def parse(cls, text: str, dtype: str = "bf16") -> HeadShape:
        """Read `query:kv:dim`, as in `8:2:128`."""
        instance("heads", text, str, "query:KV:dimension, as in 8:2:128")
        try:
            q, kv, dim = (int(part) for part in text.split(":"))
        except ValueError:
            raise Refused(f"heads: can't read {shown(text)}; write query:KV:dimension, as in 8:2:128") from None
        return cls(q, kv, dim, dtype)

    @property
    def all_heads(self) -> HeadRun:
        """Every head, as a run."""
        return HeadRun(0, self.num_q_heads, 0, self.num_kv_heads)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    def shares(self, intra_sp: int) -> tuple[HeadRun, ...]:
        """Share the heads over the ranks of an IntraSP group: one (global) range of query and of KV heads a rank.

        Any degree up to the number of query heads. KV heads that several ranks need are replicated. Where KV heads
        and ranks divide one another, shares follow the KV heads; else query heads are dealt out evenly.
        """
        intra_sp = whole("topology: intra_sp", intra_sp)
        if intra_sp > self.num_q_heads:
            raise Refused(
                f"topology: intra_sp={intra_sp} is more than the {self.num_q_heads} query heads; IntraSP gives every "
                f"rank at least one head, so the legal degrees are 1 to {self.num_q_heads}; put the other ranks "
                "into inter_sp"
            )
        if intra_sp > self.num_kv_heads and intra_sp % self.num_kv_heads == 0:
            per_kv = intra_sp // self.num_kv_heads
            borders = [
                kv * self.group + border for kv in range(self.num_kv_heads) for border in _even(self.group, per_kv)[:-1]
            ] + [self.num_q_heads]
        elif self.num_kv_heads % intra_sp == 0:
            borders = [kv * self.group for kv in _even(self.num_kv_heads, intra_sp)]
        else:
            borders = _even(self.num_q_heads, intra_sp)
        return tuple(self._share(a, b) for a, b in itertools.pairwise(borders))

    def _share(self, q_first: int, q_stop: int) -> HeadRun:
        kv_first = q_first // self.group
        return HeadRun(q_first, q_stop - q_first, kv_first, (q_stop - 1) // self.group + 1 - kv_first)

    def groups(self, share: HeadRun, num_groups: int) -> tuple[HeadRun, ...]:
        """Cut a share into head groups by KV heads, numbered within the share: what a block may be computed for."""
        borders = _even(share.kv_count, num_groups)
        out = []
        for a, b in itertools.pairwise(borders):
            lo = max((share.kv_first + a) * self.group, share.q_first)
            hi = min((share.kv_first + b) * self.group, share.q_first + share.q_count)
            out.append(HeadRun(lo - share.q_first, max(hi - lo, 0), a, b - a))
        return tuple(out)

    def runs(self, share: HeadRun, heads: HeadRun) -> tuple[HeadRun, ...]:
        """Cut heads of a share (numbered within it) into runs with equally many query heads per KV head.

        A kernel with grouped-query attention takes one run a call. A share that begins or ends inside a KV head's
        group has up to three.
        """
        runs: list[HeadRun] = []
        for kv in range(heads.kv_first, heads.kv_first + heads.kv_count):
            lo = max((share.kv_first + kv) * self.group - share.q_first, heads.q_first)
            hi = min((share.kv_first + kv + 1) * self.group - share.q_first, heads.q_first + heads.q_count)
            last = runs[-1] if runs else None
            if last and (hi - lo) * last.kv_count == last.q_count:
                runs[-1] = HeadRun(last.q_first, last.q_count + hi - lo, last.kv_first, last.kv_count + 1)
            else:
                runs.append(HeadRun(lo, hi - lo, kv, 1))
        return tuple(runs)


def _even(total: int, parts: int) -> list[int]:
    """Borders of `total` things dealt to `parts` in order; the first ones get one more where it doesn't divide."""
    return [i * (total // parts) + min(i, total % parts) for i in range(parts + 1)]
