"""Pipeline: from a problem and a planner's strategy to a plan, pass by pass.

    cut, place (planner) → order → relay → prefetch → widen → lay → lower → expand → buffers

Each pass is a pure function in the file of its name (buffers: `place_buffers`). Whoever wants to know how long passes
take, or what they make, gives `build` a `Watch`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from hsap.compiler.buffers import place_buffers
from hsap.compiler.expand import expand, place_rows
from hsap.compiler.lay import lay
from hsap.compiler.lower import lower
from hsap.compiler.order import order, without_overlap
from hsap.compiler.prefetch import prefetch
from hsap.compiler.relay import relay
from hsap.compiler.trays import SpanTable
from hsap.compiler.widen import Wide, widen
from hsap.ir.check import Refused
from hsap.ir.plan import Plan
from hsap.ir.problem import Problem, arena_capacity
from hsap.ir.program import Programs
from hsap.ir.schedule import DIRECTIONS, Schedule, Strategy
from hsap.ir.span import row_starts

Watch = Callable[[str, float, Any], None]
"""Is told of every pass that has run: its function's name, its CPU seconds, and what it made."""


def build(
    problem: Problem, strategy: Strategy, planner: str, options: dict[str, Any], watch: Watch | None = None
) -> Plan:
    """Compile a strategy; ValueError where a rank gets more tokens or needs more memory than the problem allows.

    watch: is told of place_rows, and of the passes of each mask and direction in turn.
    """
    run = _plainly if watch is None else partial(watched, watch)
    asked, own = problem, strategy.topology
    if own is not None:
        assert own.num_ranks == problem.num_ranks, f"planner {planner} must use all ranks"
        problem = replace(problem, topology=own)
    _check_placement(problem, strategy, planner)
    spans, *rows = run(place_rows, problem, strategy.shards)
    table = SpanTable.of(strategy.shards, spans)
    programs, charts, slices = [], [], []
    for forward, backward in zip(strategy.forward, strategy.backward):
        assert np.array_equal(forward.blocks.slices, backward.blocks.slices), "both directions cut blocks alike"
        done: list[tuple[Programs, Wide]] = []
        for schedule, direction in zip((forward, backward), DIRECTIONS):
            compiled, wide, table = _compile(run, problem, strategy, schedule, direction, table, rows)
            done.append((compiled, wide))
        programs.append((done[0][0], done[1][0]))
        charts.append((_chart(done[0][1]), _chart(done[1][1])))
        slices.append(forward.blocks.slices)
    made = (tuple(slices), tuple(programs), tuple(charts), None if own == asked.topology else own)
    plan = Plan(asked, planner, options, strategy.shards, table.spans, rows[0], rows[1], *made)
    _check_arena(plan)
    return plan


def _plainly(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def watched(watch: Watch, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a pass, or what comes before or after all of them, and tell the watch."""
    # CPU time: a pass is one thread, and what else the machine does counts less.
    start = time.process_time()
    made = function(*arguments)
    watch(function.__name__, time.process_time() - start, made)
    return made


def _compile(
    run: Callable[..., Any],
    problem: Problem,
    strategy: Strategy,
    schedule: Schedule,
    direction: str,
    table: SpanTable,
    rows: Sequence[np.ndarray],
) -> tuple[Programs, Wide, SpanTable]:
    """Run the passes on one mask and direction; the last ones again with less under way if the arena is too small.

    Where nothing fits it is what needs least, which the complaint names.
    """
    least, best = 0, None
    for wide in routes(problem, strategy, schedule, direction, run):
        laid = run(lay, table, wide, direction, problem.topology.inter_sp)
        draft = run(lower, laid, problem.topology.intra_sp > 1)
        programs = run(place_buffers, run(expand, problem, draft, *rows, direction))
        if problem.arena_multiple is None:
            return programs, wide, draft.table
        _, rank_rows = rows
        starts = row_starts(table.spans)
        tokens_per_rank = int((starts[rank_rows[:, 1]] - starts[rank_rows[:, 0]]).max())
        needed = int(programs.arena_bytes().max())
        if best is None or needed < least:
            least, best = needed, (programs, wide, draft.table)
        if least <= arena_capacity(problem, tokens_per_rank):
            break
    assert best is not None, "a schedule has a route"
    return best


def routes(
    problem: Problem, strategy: Strategy, schedule: Schedule, direction: str, run: Callable[..., Any] = _plainly
) -> Iterator[Wide]:
    """Give what travels when for one mask and direction: as the strategy wants it, then with ever less under way.

    problem: of the shape that the strategy is for. Later ones are made when they are asked for. run: calls a pass.
    """
    transfers = run(order, strategy.shards, schedule, direction)
    if strategy.relay:
        nodes = problem.node_of[:: problem.topology.intra_sp]
        transfers = run(relay, strategy.shards, schedule, transfers, problem.heads, nodes)
    joined, shape = partial(run, widen, strategy.shards), (problem.topology.inter_sp, strategy.num_groups)
    if strategy.ahead:
        yield joined(schedule, run(prefetch, transfers, strategy.ahead), *shape)
    yield joined(schedule, transfers, *shape)
    yield joined(*run(without_overlap, schedule, transfers), *shape)


def _chart(wide: Wide) -> np.ndarray:
    """Give a row for each block and head group, whatever is computed together."""
    entries = wide.entries
    first, count = np.array(wide.runs.runs, np.int64).reshape(-1, 2)[entries.run].T
    entry = np.repeat(np.arange(len(count)), count)
    group = first[entry] + np.arange(len(entry)) - (np.cumsum(count) - count)[entry]
    blocks, index = entries.blocks, entries.block[entry]
    columns = (blocks.q[index], blocks.kv[index], group, entries.rank[entry], entries.stage[entry])
    return np.stack((*columns, blocks.area[index]), axis=1).astype(np.int64).reshape(-1, 6)


def _check_placement(problem: Problem, strategy: Strategy, planner: str) -> None:
    spans = strategy.shards.spans[np.argsort(strategy.shards.spans[:, 0], kind="stable")]
    borders = np.concatenate([[0], spans[:, 1]])
    covered = np.array_equal(spans[:, 0], borders[:-1]) and borders[-1] == problem.layout.num_tokens
    assert covered, f"planner {planner} does not place every token once"
    assert (np.diff(strategy.shards.home) >= 0).all(), f"planner {planner} must order shards by home rank"
    limit = problem.max_tokens_per_rank
    if limit is not None:
        tokens = np.zeros(problem.topology.inter_sp, np.int64)
        np.add.at(tokens, strategy.shards.home, strategy.shards.tokens)
        most = -(-int(tokens.max(initial=0)) // problem.topology.intra_sp)
        if most > limit:
            raise Refused(
                f"planner {planner} gives a rank {most} tokens, max_tokens_per_rank={limit}; raise the limit, "
                "use shorter packs or more ranks"
            )


def _check_arena(plan: Plan) -> None:
    problem = plan.problem
    if problem.arena_multiple is None:
        return
    capacity = arena_capacity(problem, int(plan.tokens_per_rank.max(initial=0)))
    needed = plan.arena_bytes()
    if needed.max(initial=0) > capacity:
        rank = int(needed.argmax())
        raise Refused(
            f"planner {plan.planner}: rank {rank} needs {needed[rank]} bytes of communication buffer, the arena has "
            f"{capacity} (arena_multiple={problem.arena_multiple}); raise arena_multiple, use more ranks or another "
            "planner"
        )
