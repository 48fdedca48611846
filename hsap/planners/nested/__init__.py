"""Nested: documents to nodes, then to ranks, then to tiles, with row intervals of a document nested in one another.

Ours; the flagship. What it rests on:
- A causal document's rows [a, b) need the keys of all rows before b. A bin that computes several of its row intervals
  needs keys up to the last of them only, less those it owns: **a prefix that sits with the same document's tail is
  free.** A suffix is rich in pairs, a prefix or a short document in tokens: mixing them fills both caps with few cuts.
- Bytes between nodes count once per node, as relays pass rows on inside: so nodes come first (`cost` counts what each
  node receives), then every node deals what it got to its ranks with the same code.
- Two, four or eight ranks may share rows, by head groups and, where there are fewer of these, by columns of keys too
  (2-D tiles, cheaper than rows where a suffix is short beside what it sees); q and o then travel within the tile.
What moves: KV of rows seen elsewhere, once to each node and on inside it; q and o of tiles. Forward bytes are what the
search counts; backward computes every block where forward does.
Steps: `peel` makes first placements, `search` improves the best of them, `repair` brings areas and tokens under their
caps exactly, `strategy` turns pieces into shards and blocks. Cost: a few thousand proposals a level.
Options: area_slack, token_slack: excess of the busiest rank over the mean that is allowed. Where a single row or token
is more than that, it can't hold. effort: proposals of the search, in hundreds: 10 is quick, 500 is thorough (a few
percent less between nodes). It is seeded, and never looks at the clock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hsap.ir.check import excess, whole
from hsap.ir.problem import Problem
from hsap.ir.program import Role
from hsap.ir.schedule import Strategy
from hsap.planners.nested.cost import AREA, BYTES, PAIRS, TOKENS, Documents, Rules
from hsap.planners.nested.documents import documents_of, exact_areas
from hsap.planners.nested.levels import (
    Table,
    inside,
    part_of_documents,
    rules_of,
    tabulate,
    whole_documents,
)
from hsap.planners.nested.search import improve, repair_from, solve
from hsap.planners.nested.strategy import strategy_of
from hsap.planners.nested.wide import spread
from hsap.planners.prices import wire_bytes

NODE_SLACKS = (0.97, 0.8)
"""Share of the slack that nodes may use: the next where a node could not be dealt to its ranks within their caps."""
CARE = 0.0005
"""What ranks' caps on area are lowered by, so that rounding rows doesn't exceed them."""
PEAK, NODE_PEAK = 24.0, 0.0
"""Weight of what the busiest rank, or node, receives beside what all receive together."""
NODE_STARTS, RANK_STARTS = 60, 12
"""First placements that are made, the best ones to be improved."""
NODE_PRICE, RANK_PRICE = (4.0, 64.0), (8.0, 200.0)
"""First and last price of exceeding a cap by all of it, in units."""
HEAT = ((0.0012, 0.00003), (0.001, 0.0003))
"""First and last heat of the search among nodes and among ranks, in units (`Rules.unit`)."""
MAX_EFFORT = 5_000
"""A hundred times the default: a large batch is searched for minutes then."""
NODES_AT_EFFORT, MOST_EFFORT = 2, 4
"""Number of nodes that the effort is meant for: for more of them the search makes more proposals, up to this factor."""
MOST_SHARES = 4
"""Among a node's ranks it makes as many times fewer proposals as there are nodes, but at most so many times."""
NUM_RETRIES, MOST_MISSES = (3, 8), 2
"""How often the node of the busiest rank is searched again (few nodes, many), and how often in a row in vain."""
RETRY_SHARE = 2
"""So many times fewer when a node is searched again."""
MOST_REPAIRS = 5
NUM_STEPS = (32, 256)
"""Even steps of the tables of documents that aren't causal: finer ones where what lies between them broke a cap."""


def nested(problem: Problem, area_slack: float = 0.05, token_slack: float = 0.05, effort: int = 50) -> Strategy:
    """Plan documents nested in nodes and ranks, balanced in area and in tokens."""
    slack = [
        excess("planner nested: area_slack", area_slack),
        excess("planner nested: token_slack", token_slack),
    ]
    effort = whole("planner nested: effort, in hundreds of proposals,", effort, 1, MAX_EFFORT)
    groups = head_groups(problem)
    for num_steps in NUM_STEPS:
        documents, starts, wide = documents_of(problem, num_steps)
        table, fits = place(problem, documents, starts, wide, groups, np.array(slack), 100 * effort)
        if fits or (documents.table < 0).all():
            break
    return strategy_of(problem, table, groups)


def head_groups(problem: Problem) -> int:
    """Head groups that ranks may share rows by: a power of two up to 8 that divides the KV heads of every column."""
    counts = [share.kv_count for share in problem.heads.shares(problem.topology.intra_sp)]
    return next(g for g in (8, 4, 2, 1) if all(count % g == 0 for count in counts))


def row_costs(problem: Problem, groups: int) -> tuple[float, float, float]:
    """Bytes of one head group's row of kv, q and o on the network."""
    share = problem.heads.shares(problem.topology.intra_sp)[0]
    kv, q, o = (float(wire_bytes(problem, role, share)) / groups for role in (Role.KV, Role.Q, Role.O))
    return kv, q, o


def place(
    problem: Problem,
    documents: Documents,
    starts: np.ndarray,
    wide: np.ndarray,
    groups: int,
    slack: np.ndarray,
    proposals: int,
) -> tuple[Table, bool]:
    """Deal documents to nodes and what each gets to its ranks; say too whether all caps hold."""
    if not len(documents.length):
        return Table(np.zeros((0, 3), np.int64), np.zeros((0, 7), np.int64)), True
    costs = row_costs(problem, groups)
    num_ranks = problem.topology.inter_sp
    nodes = problem.node_of[:: problem.topology.intra_sp]
    first_rank = np.flatnonzero(np.diff(nodes, prepend=-1))
    size = np.diff(first_rank, append=num_ranks)
    pairs = pairs_of_documents(documents)
    mean = np.array([pairs.sum(), documents.length.sum()], np.float64) / num_ranks
    intra = problem.topology.intra_sp
    tokens = intra * np.floor(mean[1] / intra * (1 + slack[1]))
    # One pair or token can't be divided, and where there is none a cap still isn't zero.
    least = np.array([1, np.ceil(mean[1])])
    caps = np.maximum([mean[0] * (1 + slack[0] - CARE), tokens], least)
    row = 2 * (pairs / documents.length).max() if len(pairs) else 0.0
    for node_slack in NODE_SLACKS if len(size) > 1 else (1.0,):
        pieces, counts = whole_documents(documents.length, groups)
        if len(size) > 1:
            more = min(max(len(size) / NODES_AT_EFFORT, 1.0), MOST_EFFORT)
            # A node's ranks need room to be cut between whole rows.
            loose = np.minimum(mean * (1 + slack * node_slack), caps - [row, 0])
            loose = np.minimum(np.maximum(loose, np.maximum(mean * (1 + slack / 2), least)), caps)
            rules = rules_of(costs, groups, loose[:, None] * size, NODE_PEAK)
            most = min(2, groups)
            pieces, counts, _, _ = search_level(
                pieces, counts, documents, rules, int(more * proposals), NODE_STARTS, NODE_PRICE, most, 1
            )
        parts = [
            _Part.of(pieces, counts, documents, starts, x, first_rank[x], size[x], groups) for x in range(len(size))
        ]
        parts = [part for part in parts if len(part.starts)]
        dealt = _deal(parts, costs, caps, proposals, len(size))
        tables, fit = zip(*(_exactly(problem, *pair, wide) for pair in zip(parts, dealt)))
        fits = all(fit)
        if fits:
            break
    return Table(*(np.concatenate(parts) for parts in zip(*tables))), fits


@dataclass(frozen=True, slots=True)
class _Part:
    """What a node has to deal to its ranks: a template (see `inside`) of its documents, and where its ranks begin."""

    template: np.ndarray
    counts: np.ndarray
    documents: Documents
    starts: np.ndarray
    node: int
    first_rank: int
    size: int
    groups: int

    @staticmethod
    def of(
        pieces: np.ndarray,
        counts: np.ndarray,
        documents: Documents,
        starts: np.ndarray,
        node: int,
        first_rank: int,
        size: int,
        groups: int,
    ) -> _Part:
        template, sizes, which = inside(pieces, counts, node, groups)
        mine = part_of_documents(documents, which)
        return _Part(template, sizes, mine, starts[which], node, int(first_rank), int(size), groups)


@dataclass(frozen=True, slots=True)
class _Dealt:
    """A placement of a node's part on its ranks, and the rules that it was judged by."""

    pieces: np.ndarray
    counts: np.ndarray
    load: np.ndarray
    energy: float
    rules: Rules

    @property
    def fits(self) -> bool:
        return bool((self.load[AREA : TOKENS + 1] <= self.rules.caps * (1 + 1e-9)).all())

    @property
    def rank(self) -> tuple[bool, float]:
        """What is lower is better. Caps come first; where a single row or token is more than a cap, nothing fits."""
        return not self.fits, self.energy

    @property
    def pace(self) -> tuple[bool, float]:
        """How much this node holds up the others: by what its busiest rank receives."""
        return not self.fits, self.load[BYTES].max()


def _deal(
    parts: list[_Part], costs: tuple[float, float, float], caps: np.ndarray, proposals: int, num_nodes: int
) -> list[_Dealt]:
    """Search among the ranks of every node; the rank that receives most sets the pace: its node gets more tries."""
    share = min(num_nodes, MOST_SHARES)
    best = [_search(part, costs, caps, proposals // share, 0) for part in parts]
    misses = 0
    for attempt in range(1, min(max(num_nodes, NUM_RETRIES[0]), NUM_RETRIES[1]) + 1):
        at = max(range(len(parts)), key=lambda x: best[x].pace)
        if attempt % 2:
            found = _search(parts[at], costs, caps, proposals // RETRY_SHARE, attempt)
        else:
            found = _search_on(parts[at], best[at], proposals // RETRY_SHARE, attempt)
        better = found.rank < best[at].rank
        best[at] = found if better else best[at]
        misses = 0 if better else misses + 1
        if misses == MOST_MISSES:
            break
    return best


def _search(part: _Part, costs: tuple[float, float, float], caps: np.ndarray, proposals: int, attempt: int) -> _Dealt:
    """Deal a node's part anew."""
    rules = rules_of(costs, part.groups, np.repeat(caps[:, None], part.size, axis=1), PEAK)
    args = rules, proposals, RANK_STARTS, RANK_PRICE, 8, _seed(part, attempt)
    pieces, counts, load, energy = search_level(part.template, part.counts, part.documents, *args)
    return _Dealt(pieces, counts, load, energy, rules._replace(unit=max(rules.unit, float(load[BYTES].mean()))))


def _search_on(part: _Part, dealt: _Dealt, proposals: int, attempt: int) -> _Dealt:
    """Search on from a placement of a node's part."""
    pieces, counts, load = dealt.pieces.copy(), dealt.counts.copy(), dealt.load.copy()
    heat = (HEAT[1][0] * dealt.rules.unit, HEAT[1][1] * dealt.rules.unit)
    args = dealt.rules, proposals, heat, RANK_PRICE[1], 8, _seed(part, attempt)
    energy = improve(pieces, counts, part.documents, load, *args)
    return _Dealt(pieces, counts, load, energy, dealt.rules)


def _seed(part: _Part, attempt: int) -> int:
    return 2 + part.node + 1000 * attempt


def _exactly(problem: Problem, part: _Part, dealt: _Dealt, wide: np.ndarray) -> tuple[Table, bool]:
    """Tabulate a node's ranks, and say whether caps hold; repair first what interpolated areas hid."""
    pieces, counts, caps = dealt.pieces.copy(), dealt.counts.copy(), dealt.rules.caps[0]
    fits = dealt.fits
    for repairs in range(MOST_REPAIRS + 1):
        table = Table(*tabulate(pieces, counts, part.starts, part.documents.length, part.groups, part.first_rank))
        table = spread(table, wide)
        if (part.documents.table < 0).all():
            break
        exact = exact_areas(problem, table.cells, part.groups)[part.first_rank : part.first_rank + part.size]
        fits = bool((exact <= caps).all())
        if fits or repairs == MOST_REPAIRS:
            break
        repair_from(pieces, counts, part.documents, dealt.rules, exact)
    return table, fits


def pairs_of_documents(documents: Documents) -> np.ndarray:
    """Pairs of each document: float64 [n]."""
    causal = documents.length * (documents.length + 1) / 2
    return np.where(
        documents.table < 0, causal, documents.curves[documents.table, PAIRS, -1] if len(documents.curves) else 0
    )


def search_level(
    template: np.ndarray,
    counts: np.ndarray,
    documents: Documents,
    rules: Rules,
    proposals: int,
    starts: int,
    price: tuple[float, float],
    max_order: int,
    seed: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Solve one level: (pieces, counts, load, energy)."""
    num_bins = rules.caps.shape[1]
    places = 2 * template.shape[1] + 6 * num_bins + 16
    heat = HEAT[max_order > 2]
    drawn = wishes(starts, max_order, seed)
    return solve(template, counts, documents, rules, drawn, proposals, heat, price, max_order, places, seed)


def wishes(starts: int, max_order: int, seed: int) -> np.ndarray:
    """Draw the parameters of first placements, see `peel`: float64 [starts, 6]."""
    r = np.random.default_rng(seed)
    out = np.stack([
        r.uniform(-0.5, 1, starts), r.uniform(-0.5, 1, starts), r.choice([0, 0.3, 0.6, 1], starts),
        r.choice([0, 0, 0.25, 0.5, 1], starts), r.choice([o for o in (1, 2, 4, 8) if o <= max_order], starts),
        r.uniform(0.55, 1.0, starts),
    ], axis=1)  # fmt: skip
    out[:2, :4] = (0.5, 0.5, 0, 0), (0.9, 0.9, 0, 0)
    return out[:starts]
