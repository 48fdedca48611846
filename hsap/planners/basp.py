"""BASP: the sequences of a micro-step on disjoint groups of ranks; nothing ever leaves a group.

Paper: "Batch-Aware Sequence Parallelism", of which only the abstract is public: partition the GPUs into disjoint
sequence-parallel groups according to the micro-batch size, so that the all-to-all has smaller groups.
Cost: no transfer between the groups of the b sequences, and none at all where every rank has sequences to itself;
inside a group of n ranks as `te` on n ranks, less the rows of KV that aren't needed.
Ours, as the rest isn't known: R ranks and b sequences with tokens in them give groups of R / b where that divides,
else in proportion to the sequences' area, one rank at least. Of more sequences than ranks the largest go to single
ranks, as many to each, and the others share all ranks as above. Inside a group every document is zigzag, a rank's
early and late chunks apart, and KV goes straight from home to who needs it. The head degree is the KV heads as far as
they divide every group, the ranks and a node; an IntraSP that is given is kept, and groups are of whole InterSP ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from hsap.ir.block import Blocks, Shards
from hsap.ir.problem import Problem, Topology
from hsap.ir.schedule import Schedule, Strategy
from hsap.planners.head_degree import own_heads
from hsap.planners.parts import mean_areas, same_both_ways
from hsap.planners.zigzag import zigzag_chunks


class Group(NamedTuple):
    """Neighbours [first, first + size) that share a sequence."""

    sequence: int
    first: int
    size: int


def basp(problem: Problem) -> Strategy:
    """Plan every sequence on a group of its own."""
    layout, intra = problem.layout, problem.topology.intra_sp
    borders = layout.cu_seqlens[np.cumsum([0, *layout.sequences])]
    groups = share_out(np.diff(borders), _areas(problem, borders), problem.topology.inter_sp)
    if intra == 1:
        intra = own_heads(problem, *(group.size for group in groups))
        groups = [Group(sequence, first // intra, size // intra) for sequence, first, size in groups]
    topology = Topology(problem.num_ranks // intra, intra)
    documents = np.split(layout.document_spans, np.cumsum(layout.sequences)[:-1])
    shards = _shards([(group, documents[group.sequence]) for group in groups])
    size = np.ones(topology.inter_sp, np.int64)
    for group in groups:
        size[group.first : group.first + group.size] = np.maximum(group.size, size[group.first])

    def schedule(blocks: Blocks) -> Schedule:
        rank = shards.home[blocks.q]
        return Schedule.of(blocks, rank, (rank - shards.home[blocks.kv]) % size[rank])

    return replace(same_both_ways(problem, shards, schedule), topology=topology, relay=True)


def share_out(tokens: np.ndarray, areas: np.ndarray, num_ranks: int) -> list[Group]:
    """Give every sequence that has tokens its group. tokens, areas: int64 [num_sequences]."""
    there = np.flatnonzero(tokens)
    by_area = there[np.argsort(-areas[there], kind="stable")]
    alone = len(by_area) // num_ranks * num_ranks
    groups = []
    for place, sequence in enumerate(by_area[:alone].tolist()):
        turn, rank = divmod(place, num_ranks)
        # Back and forth, so that who has the largest of one turn has the smallest of the next.
        groups.append(Group(sequence, num_ranks - 1 - rank if turn % 2 else rank, 1))
    rest = np.sort(by_area[alone:])
    sizes = _sizes(areas[rest], num_ranks)
    firsts = np.cumsum(sizes) - sizes
    return groups + [Group(*each) for each in zip(rest.tolist(), firsts.tolist(), sizes.tolist())]


def _sizes(areas: np.ndarray, num_ranks: int) -> np.ndarray:
    """Deal ranks to fewer sequences: evenly, or where that doesn't go each next one to who has most area a rank."""
    if len(areas) and num_ranks % len(areas) == 0:
        return np.full(len(areas), num_ranks // len(areas))
    sizes = np.ones(len(areas), np.int64)
    for _ in range(num_ranks - len(areas) if len(areas) else 0):
        sizes[np.argmax(areas / sizes)] += 1
    return sizes


def _areas(problem: Problem, borders: np.ndarray) -> np.ndarray:
    """Visible pairs of each sequence, the mean over layers: float64 [num_sequences]."""
    areas, there = np.zeros(len(borders) - 1), np.flatnonzero(np.diff(borders))
    areas[there] = mean_areas(problem, np.stack([borders[there], borders[there + 1]], axis=1))
    return areas


def _shards(groups: list[tuple[Group, np.ndarray]]) -> Shards:
    """Lay each group's documents, given as spans, on its ranks: whole on a single one, else zigzag, two shards each."""
    parts = []
    for (_, first, size), documents in groups:
        if size == 1:
            parts.append((first, documents))
            continue
        chunks = zigzag_chunks(documents, size)
        for rank in range(size):
            parts += [(first + rank, chunks[:, rank]), (first + rank, chunks[:, -1 - rank])]
    return Shards.of(sorted(parts, key=lambda part: part[0]))
