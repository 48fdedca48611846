"""Packs: document lengths that benches run on, those of the planning bench made smaller where a CPU must keep up."""

from __future__ import annotations

from collections.abc import Sequence

from tests.bench.planning.cases import WORKLOADS

KINDS = ("ldc", "fineweb", "single")
WHOLE_TOKENS = 131072


def pack(kind: str, num_tokens: int = WHOLE_TOKENS, batch: int = 0) -> tuple[int, ...]:
    """Give document lengths like those of a kind's packs of 131,072 tokens, scaled to `num_tokens` in all.

    The pack's documents keep their shares of it, so that it is as ragged as the whole one.
    """
    batches = WORKLOADS[f"{kind}@{WHOLE_TOKENS}"]
    return scaled(batches[batch % len(batches)], num_tokens)


def scaled(lengths: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Scale lengths to a sum; documents that come to nothing are left out."""
    whole, edge, out = sum(lengths), 0, []
    for length in lengths:
        edge += length
        out.append(edge * num_tokens // whole - sum(out))
    return tuple(length for length in out if length)
