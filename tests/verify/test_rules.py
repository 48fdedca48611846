"""The verifier's rules: sound plans pass, each kind of fault is named at its place, closed forms equal brute force."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from hsap.api import compile
from hsap.compiler.pipeline import build
from hsap.ir.block import cut_blocks
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask
from hsap.ir.plan import Plan
from hsap.ir.precision import Precision, unit_bytes
from hsap.ir.problem import Problem, Topology, arena_capacity
from hsap.ir.program import Op, Role, Space
from hsap.ir.reshard import reshard
from hsap.ir.schedule import Schedule, Strategy
from hsap.ir.slice import canonical, dense, slices
from hsap.planners import PLANNERS
from hsap.planners.zigzag import zigzag_shards
from hsap.verify import verify
from hsap.verify.fingerprint import PairWeights, _random_sums, random_sums
from hsap.verify.memory import clash
from hsap.verify.resharded import scratch_bytes
from hsap.verify.stream import Stream
from tests.mutation.mutants import drop_one, in_order, of, with_buffer, with_column, with_program
from tests.mutation.oracle import failure
from tests.pairwise import pairwise

TOPOLOGIES = ("1x1", "1x4", "4x1", "2x2", "8x1", "3x2", "5x1")
HEADS = ((8, 8), (8, 2), (9, 3), (28, 4))


def small(topology: str = "4x1", lengths=(7, 2, 11), planner: str = "zigzag", heads=(4, 2), **more) -> Plan:
    problem = Problem(Layout.from_lengths(lengths), HeadShape(*heads, 8), Topology.parse(topology), **more)
    return compile(problem, planner)


def layouts(seed: int):
    """Odd layouts: nothing, one token, one document, one giant among dwarfs, many, at random."""
    random = np.random.default_rng(seed)
    return [(), (1,), (37,), (1, 1, 90, 1), tuple(random.integers(1, 30, random.integers(2, 12)).tolist())]


PLANS = (
    [*PLANNERS],
    TOPOLOGIES,
    HEADS,
    ("window:5", "full"),
    [lengths for seed in range(4) for lengths in layouts(seed)],
)


@pytest.mark.parametrize("planner", PLANNERS)
def test_every_planners_plans_are_sound(planner):
    """With each topology, head shape, mask and layout."""
    for row in pairwise(*map(len, PLANS)):
        name, topology, heads, mask, lengths = (choices[at] for choices, at in zip(PLANS, row))
        if name == planner:
            masks = ((Mask(), 2), (mask, 1))
            plan = small(topology, lengths, planner, heads, masks=masks, arena_multiple=1e6)
            report = verify(plan)
            assert report.ok, f"{topology} {heads} {lengths} {mask}\n{report}"


def test_a_stored_plan_is_sound_after_loading():
    plan = Plan.from_bytes(small("2x2").to_bytes())
    assert verify(plan).ok
    assert str(verify(plan)) == f"ok: {plan.num_instructions} instructions of 4 ranks"


def edited(plan: Plan, direction: int, change) -> list:
    programs = plan.programs[0][direction]
    return list(verify(with_program(plan, 0, direction, change(programs))).errors)


def rules(faults) -> set[str]:
    return {fault.rule for fault in faults}


def test_a_transfer_nobody_awaits_is_shown_in_the_grid():
    plan = small()
    programs = plan.programs[0][0]
    send = int(of(programs, Op.SEND)[3])
    rank = int(programs.rank[send])
    wrong = (int(programs.peer[send]) + 1) % 4
    wrong = wrong if wrong != rank else (wrong + 1) % 4
    report = verify(with_program(plan, 0, 0, with_column(programs, "peer", send, wrong)))
    fault = next(f for f in report.errors if f.rule == "progress.paired")
    assert "which never receives it" in fault.message or "which never sends it" in fault.message
    assert (fault.mask, fault.direction) == (0, "forward")
    assert "[S]" in str(report) or "[R]" in str(report)
    assert "step" in str(report)


def test_the_grid_marks_the_instruction():
    plan = small()
    programs = plan.programs[0][1]
    grad = int(of(programs, Op.ATTEND_GRAD)[-1])
    rank = int(programs.rank[grad])
    report = verify(with_program(plan, 0, 1, with_column(programs, "slices", (grad, 1), 1 << 20)))
    (fault,) = report.errors
    assert (fault.rule, fault.rank) == ("structure.attended", rank)
    assert fault.instruction == grad - programs.offsets[rank]
    (line,) = [line for line in str(report).splitlines() if "[G]" in line]
    assert line.split()[:2] == ["rank", str(rank)]
    header = next(line for line in str(report).splitlines() if line.split()[0] == "step")
    assert header.split()[1:][line.split()[2:].index("[G]")] == str(fault.instruction)


@pytest.mark.parametrize(
    ("rule", "direction", "change"),
    [
        ("progress.rounds_ascend", 0, lambda p: with_column(p, "round", slice(None), np.where(p.round >= 0, 5, -1))),
        ("progress.waited", 0, lambda p: with_column(p, "round", of(p, Op.WAIT)[0], 99)),
        ("progress.joined", 0, lambda p: with_column(p, "round", of(p, Op.LAUNCH)[0], 99)),
        ("structure.peers", 0, lambda p: with_column(p, "peer", of(p, Op.SEND)[0], 0)),
        ("structure.kinds", 0, lambda p: with_column(p, "role", of(p, Op.SEND)[0], Role.O)),
        ("structure.kinds", 1, lambda p: with_column(p, "buf", of(p, Op.ATTEND_GRAD)[0], p.buf[of(p, Op.COPY)[0]][0])),
        ("structure.moved_rows", 1, lambda p: with_column(p, "heads", (of(p, Op.SUM)[0], 0), 1)),
        ("structure.sizes", 0, lambda p: with_buffer(p, "num_bytes", 0, p.buffers.num_bytes[0] + 256)),
        ("structure.sizes", 0, lambda p: with_buffer(p, "offset", 2, 8)),
        ("structure.ends", 0, lambda p: with_buffer(p, "role", 0, Role.KV)),
        ("structure.held", 0, lambda p: with_buffer(p, "rows", (0, 1), p.buffers.rows[0, 1] + 1)),
        ("structure.enumerations", 1, lambda p: with_column(p, "op", 3, Op.ATTEND)),
        ("structure.operands", 1, lambda p: with_column(p, "buf", (0, 0), len(p.buffers) - 1)),
        ("memory.apart", 1, lambda p: with_buffer(p, "offset", np.flatnonzero(p.buffers.offset > 0), 0)),
    ],
)
def test_each_fault_has_its_rule(rule, direction, change):
    faults = edited(small(), direction, change)
    assert rule in rules(faults)
    assert all(fault.mask == 0 for fault in faults)


def test_a_block_that_nobody_computes_is_named():
    plan = small()
    programs = plan.programs[0][0]
    attends = of(programs, Op.ATTEND)
    index = programs.index.copy()
    first, stop = programs.slices[attends[2]]
    assert stop > first + 1
    index[first] = index[first + 1]
    (fault,) = verify(with_program(plan, 0, 0, replace(programs, index=index))).errors
    assert fault.rule == "dataflow.blocks" and f"slice {programs.index[first]}, " in fault.message
    assert "is attended by no rank" in fault.message
    twice = with_column(programs, "slices", attends[2], programs.slices[attends[1]])
    (fault,) = verify(with_program(plan, 0, 0, twice)).errors
    assert fault.rule == "structure.attended" and "another instruction's too" in fault.message


def test_a_kernel_attends_rows_of_its_own_buffers_only():
    plan = small("4x1", (30, 2, 11), "sap")
    programs = plan.programs[0][0]
    attends = of(programs, Op.ATTEND)
    random, seen = np.random.default_rng(0), set()
    for _ in range(200):
        index, (i, j) = programs.index.copy(), random.integers(len(programs.index), size=2)
        index[[i, j]] = index[[j, i]]
        mutant = with_program(plan, 0, 0, replace(programs, index=index))
        kernel = np.searchsorted(programs.slices[attends, 0], [i, j], side="right")
        faults = rules(verify(mutant).errors)
        assert faults in (set(), {"structure.attended"}) and (kernel[0] != kernel[1] or not faults)
        seen |= faults
    assert seen


@pytest.mark.parametrize("wrong", [-1, 1 << 20])
def test_an_index_beyond_the_slices_is_refused(wrong):
    plan = small()
    programs = plan.programs[0][0]
    for entry in (0, len(programs.index) - 1):
        index = programs.index.copy()
        index[entry] = wrong
        (fault,) = verify(with_program(plan, 0, 0, replace(programs, index=index))).errors
        assert fault.rule == "structure.attended" and "none of the" in fault.message


def gathered(planner: str = "allgather", topology: str = "4x1") -> Plan:
    """A plan whose ranks have rows of several others in one buffer, in an order of their own."""
    plan = small(topology, (40, 3, 31, 9), planner)
    assert len(plan.spans) > plan.rank_rows.max() and verify(plan).ok
    return plan


def test_spans_that_are_no_shard_s_are_refused():
    plan = gathered()
    for change in ([0, 1], [1, 0], [-1, 0], [0, -1]):
        spans = plan.spans.copy()
        spans[-1] += change
        assert rules(verify(replace(plan, spans=spans)).errors) == {"structure.placement"}


def test_rows_in_another_order_than_they_are_sent_in_are_refused():
    """Two spans of a tray change places: what arrives there isn't what was sent, though it is as large."""
    plan = gathered()
    found = 0
    for i in range(plan.rank_rows.max(), len(plan.spans) - 1):
        spans = plan.spans.copy()
        spans[[i, i + 1]] = spans[[i + 1, i]]
        faults = rules(verify(replace(plan, spans=spans)).errors)
        assert faults, i
        found += faults == {"progress.paired"}
    assert found


def test_a_buffer_has_no_row_twice():
    plan = gathered()
    programs = plan.programs[0][0]
    b = programs.buffers
    behind = plan.rank_rows.max()
    for buffer in np.flatnonzero(b.rows[:, 0] >= behind).tolist():
        rows = [0, b.rows[buffer, 1]]  # the shards' own spans and then others of them again
        wrong = with_program(plan, 0, 0, with_buffer(programs, "rows", buffer, rows))
        assert rules(verify(wrong).errors) == {"structure.held"}


def test_a_message_that_lands_on_another_place_of_its_tray_is_refused():
    plan = gathered()
    programs = plan.programs[0][0]
    b = programs.buffers
    receives = of(programs, Op.RECV)
    found = 0
    for i in receives.tolist():
        first, stop = b.rows[programs.buf[i, 0]]
        length = programs.rows[i, 1] - programs.rows[i, 0]
        for start in range(first, stop - length + 1):
            if start != programs.rows[i, 0]:
                rows = [start, start + length]
                faults = rules(verify(with_program(plan, 0, 0, with_column(programs, "rows", i, rows))).errors)
                assert {"dataflow.moved_once", "progress.paired"} <= faults
                found += 1
    assert found


def test_reading_before_the_wait_is_out_of_time():
    plan = small()
    p = plan.programs[0][0]
    wait = int(of(p, Op.WAIT)[0])
    later = int(of(p, Op.ATTEND)[of(p, Op.ATTEND) > wait][0])
    order = np.insert(np.delete(np.arange(len(p)), wait), later, wait)
    faults = verify(with_program(plan, 0, 0, in_order(p, order))).errors
    assert rules(faults) == {"dataflow.in_time"}


def test_a_slice_table_that_misses_or_repeats_a_pair_is_rejected():
    plan = small(masks=((Mask("window", (4,)), 1),))
    table = plan.slices[0]
    for i, column in itertools.product(range(len(table)), range(6)):
        for step in (-1, 1):
            changed = table.copy()
            changed[i, column] += step
            report = verify(replace(plan, slices=(changed,)))
            assert rules(report.errors) & {"structure.slice_tables", "dataflow.pairs", "structure.attended"}


def test_the_same_area_with_other_pairs_is_rejected():
    plan = small("1x1", (6, 6), "ring")
    table = plan.slices[0].copy()
    table[1] = table[0]  # equal documents: the first one's pairs twice, none of the second's
    faults = verify(replace(plan, slices=(table,))).errors
    assert any("is there twice" in f.message for f in faults if f.rule == "dataflow.pairs")


def test_fingerprints_equal_sums_over_dense_masks():
    random = np.random.default_rng(5)
    for _ in range(60):
        n = int(random.integers(1, 40))
        rows = [sorted(random.integers(0, n + 1, 2)) + sorted(random.integers(0, n + 1, 2)) for _ in range(5)]
        bounds = [sorted(random.integers(-n, n + 1, 2)) for _ in range(5)]
        table = canonical(slices([(*r, *b) for r, b in zip(rows, bounds)]))
        weights = PairWeights(n, table)
        sums, known = weights.over(table)
        assert known.all()
        a, b = np.diff(weights.sum_a), np.diff(weights.sum_b)
        for row, got in zip(table, sums):
            expected = (dense(row[None], n).astype(np.uint64) * np.multiply.outer(a, b)).sum(dtype=np.uint64)
            assert got == expected


def test_a_foreign_diagonal_is_unknown():
    weights = PairWeights(9, canonical(slices([(0, 9, 0, 9, -99, 0)])))
    assert not weights.over(canonical(slices([(0, 9, 0, 9, -99, 2)])))[1].any()
    assert weights.over(canonical(slices([(2, 5, 0, 2, -99, 99)])))[1].all()


def test_weights_differ_from_run_to_run():
    assert random_sums(8)[0] == 0
    assert not np.array_equal(random_sums(8), random_sums(8))


def test_weights_are_those_of_the_generator_s_authors():
    """The first outputs of xoshiro256++ for the state (1, 2, 3, 4), as its authors' C code gives them."""
    sums = np.zeros(5, np.uint64)
    _random_sums(np.array([1, 2, 3, 4], np.uint64), sums)
    assert np.diff(sums).tolist() == [41943041, 58720359, 3588806011781223, 3591011842654386]


@pytest.mark.parametrize(("topology", "heads"), [("1x3", (9, 3)), ("2x4", (8, 2)), ("2x2", (28, 4)), ("1x5", (9, 3))])
def test_scratch_in_closed_form_equals_the_reshard_table(topology, heads):
    plan = small(topology, (13, 6, 20), "ring", heads)
    stream = Stream.both(plan, 0)[0]
    tokens, intra = plan.tokens_per_rank, plan.topology.intra_sp
    unit = unit_bytes(plan.precision, plan.problem.heads.head_dim)
    for role, outward in itertools.product((Role.Q, Role.KV, Role.O, Role.DO, Role.DQ, Role.DKV), (True, False)):
        rank = np.arange(plan.num_ranks)
        every = np.full(len(rank), role), np.full(len(rank), outward)
        got = scratch_bytes(rank, *every, tokens, stream.shares, unit)
        for r in rank.tolist():
            group = tokens[r - r % intra : r - r % intra + intra].tolist()
            shape = reshard(role, outward, plan.problem.heads, Precision.of("bf16"), group, r % intra)
            assert got[r] == shape.scratch_bytes


def test_sweeping_finds_an_overlap_just_where_comparing_all_pairs_does():
    random = np.random.default_rng(3)
    found = 0
    for _ in range(400):
        n = int(random.integers(1, 9))
        begins = np.sort(random.integers(0, 12, n))
        lasts, low = begins + random.integers(0, 5, n), random.integers(0, 20, n)
        high = low + random.integers(1, 6, n)
        pairs = itertools.combinations(range(n), 2)
        clashes = {
            (i, j)
            for i, j in pairs
            if begins[j] <= lasts[i] and begins[i] <= lasts[j] and low[i] < high[j] and low[j] < high[i]
        }
        swept = clash(begins, lasts, low, high, np.empty_like(begins))
        assert swept in clashes if clashes else swept == (-1, -1)
        found += bool(clashes)
    assert 40 < found < 360


def test_a_plan_beyond_the_arena_is_rejected():
    plan = small("4x1", (200, 31))
    need, tokens = int(plan.arena_bytes().max()), int(plan.tokens_per_rank.max())
    unit = arena_capacity(replace(plan.problem, arena_multiple=1.0), tokens)
    for multiple, ok in ((need / unit * 1.01, True), (need / unit * 0.9, False), (1e-9, False)):
        report = verify(replace(plan, problem=replace(plan.problem, arena_multiple=multiple)))
        assert report.ok == ok
        assert rules(report.errors) == (set() if ok else {"memory.fits"})


@pytest.mark.parametrize("topology", ["4x1", "2x2", "1x4"])
def test_an_arena_out_of_proportion_is_rejected_without_a_limit_too(topology):
    plan = small(topology, (200, 31))
    for direction in (0, 1):
        programs = plan.programs[0][direction]
        for buffer in np.flatnonzero(programs.buffers.offset >= 0):
            for offset in (1 << 61, 1 << 40):
                wrong = with_program(plan, 0, direction, with_buffer(programs, "offset", buffer, offset))
                assert "memory.fits" in rules(verify(wrong).errors)


def test_scratch_that_nothing_touches_doesn_t_enlarge_the_arena():
    plan = small("2x1", (200, 31))
    programs = plan.programs[0][0]
    b = programs.buffers
    scratch = {"role": Role.NONE, "space": Space.ARENA, "acc": 0, "rows": -1, "heads": 0, "num_bytes": 1 << 50}
    more = {}
    for name, value in (scratch | {"offset": 0}).items():
        column = getattr(b, name)
        more[name] = np.concatenate([column, np.full_like(column[:1], value)])
    borders = b.offsets.copy()
    borders[-1] += 1
    wrong = replace(programs, buffers=replace(b, offsets=borders, **more))
    assert rules(verify(with_program(plan, 0, 0, wrong)).errors) == {"memory.fits"}


@pytest.mark.parametrize("what", [None, 3, "plan", b"", small().problem])
def test_what_is_no_plan_is_refused(what):
    with pytest.raises(ValueError, match="verify: plan"):
        verify(what)
    (fault,) = verify(replace(small(), problem=None)).errors
    assert fault.rule == "structure.problem"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"layout": Layout((1 << 24,), (1,))}, "shards"),
        ({"topology": Topology(1 << 12, 1)}, "column_rows"),
        ({"max_tokens_per_rank": 2}, "max_tokens_per_rank"),
        ({"masks": ((Mask(), 1), (Mask(), 1))}, "2 masks"),
    ],
)
def test_a_hostile_problem_is_refused_before_anything_is_allocated(change, word):
    plan = small()
    report = verify(replace(plan, problem=replace(plan.problem, **change)))
    fault = report.errors[0]
    assert word in fault.message
    assert fault.rank is None
    assert fault.rule in str(report)


@pytest.mark.parametrize(("topology", "heads", "groups"), [("3x1", (8, 4), 2), ("3x2", (9, 3), 2), ("2x2", (28, 4), 3)])
def test_blocks_scattered_by_head_groups_are_sound(topology, heads, groups):
    problem = Problem(Layout.from_lengths((9, 14, 2)), HeadShape(*heads, 1, "fp64"), Topology.parse(topology))
    num_ranks, random = problem.topology.inter_sp, np.random.default_rng(groups)
    shards = zigzag_shards(problem.layout.document_spans, num_ranks)
    blocks = cut_blocks(shards, problem.slices(0))
    block = np.repeat(np.arange(len(blocks)), groups)
    group = np.tile(np.arange(groups), len(blocks))
    schedules = [
        Schedule(blocks, block, group, random.integers(0, num_ranks, len(block)), random.integers(0, 3, len(block)))
        for _ in range(2)
    ]
    plan = build(problem, Strategy(shards, (schedules[0],), (schedules[1],), groups), "scattered", {})
    assert verify(plan).ok, str(verify(plan))
    assert failure(plan) is None
    for direction in (0, 1):
        programs = plan.programs[0][direction]
        attends = of(programs, Op.ATTEND, Op.ATTEND_GRAD)
        # With more groups than KV heads some blocks are empty, and may go.
        attend = int(attends[programs.heads[attends, 1] > 0][0])
        assert not verify(drop_one(plan, 0, direction, attend)).ok


@pytest.mark.parametrize("own", [Topology(3, 2), Topology(1, 4), "4x1", Topology(2, 2)])
def test_a_shape_that_the_ranks_can_t_run_at_is_refused(own):
    """Of 4 ranks with 2 query heads: six, one with a head too few, no shape, and one that the columns aren't of."""
    fault = verify(replace(small(heads=(2, 2)), own_topology=own)).errors[0]
    assert fault.rule == ("structure.columns" if own == Topology(2, 2) else "structure.problem")


def test_what_people_are_shown_must_be_possible():
    """Pages and figures count stages and index by a chart's ranks: a stranger's must not make them endless."""
    plan = small("2x2")
    for column, value in itertools.product(range(6), (-1, 1 << 40)):
        chart = plan.chart[0][1].copy()
        chart[0, column] = value
        report = verify(replace(plan, chart=((plan.chart[0][0], chart),)))
        assert [fault.rule for fault in report.errors] == ["structure.charts"]
    for charts in ((), ((plan.chart[0][0],),), ((plan.chart[0][0], plan.chart[0][1][:, :5]),)):
        assert [fault.rule for fault in verify(replace(plan, chart=charts)).errors] == ["structure.columns"]
    late = with_column(plan.programs[0][0], "stage", 0, 1 << 30)
    assert "stages of instructions" in str(verify(with_program(plan, 0, 0, late)))
