"""Plans made by one rank reach all, in order and ahead of time; what goes wrong on one rank is told to all."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch.distributed as dist

import hsap
from hsap.data.batch import MicroBatch
from hsap.data.loader import StepBatch
from hsap.planning.compiling import PlanningSetup, Shape
from hsap.planning.exchange import PlanExchange, planning_turns
from hsap.planning.steps import PlannedSteps

NUM_RANKS = 3


def setup(planner: str = "ring", **problem) -> PlanningSetup:
    heads, topology = hsap.HeadShape(4, 2, 8, "fp32"), hsap.Topology(NUM_RANKS, 1)
    return PlanningSetup(hsap.Problem(hsap.Layout.from_lengths([]), heads, topology, **problem), planner, {}, True)


def step(number: int, num_micro: int = 2) -> StepBatch:
    empty = np.zeros(0, np.int32)
    micro = tuple(
        MicroBatch(empty, empty, empty, (5 + number, 3 + i), (2,), ("a", "b"), 0, 0.0) for i in range(num_micro)
    )
    return StepBatch(number, 0, micro, 0, "", 0, 0.0, 1, {})


def on_all_ranks(function, make=setup, steps=range(1, 8), lookahead=2) -> list:
    """Let a thread for each rank walk the planned steps; `function(rank, planned steps)` gives its result."""
    store = dist.HashStore()

    def rank_of(rank: int):
        planned = PlannedSteps(map(step, steps), PlanExchange(store, "test", rank, NUM_RANKS, make()), lookahead)
        try:
            return function(rank, planned)
        finally:
            planned.close()

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        return [future.result(timeout=600) for future in [pool.submit(rank_of, rank) for rank in range(NUM_RANKS)]]


@pytest.mark.parametrize("lookahead", [0, 1, 5])
def test_all_ranks_get_the_same_plans_in_order(lookahead: int) -> None:
    def walk(rank: int, planned: PlannedSteps) -> list:
        return [(s.batch.step, [plan.hash for plan in s.plans], s.figures.area) for s in planned]

    results = on_all_ranks(walk, lookahead=lookahead)
    assert [number for number, _, _ in results[0]] == list(range(1, 8))
    want = setup()
    for rank, rows in enumerate(results):
        for number, hashes, area in rows:
            assert hashes == [want.plan(micro).hash for micro in step(number).micro_batches]
            pairs = sum(n * (n + 1) // 2 for micro in step(number).micro_batches for n in micro.lengths)
            assert area == (pairs if rank == 0 else 0)


def test_with_auto_only_the_publisher_of_a_plan_chooses() -> None:
    """Each rank would choose another planner by itself; all run what the rank chose whose turn it was, and know why."""
    only, store = ("ring", "zigzag", "sap"), dist.HashStore()

    def walk(rank: int) -> list:
        mine = replace(setup("auto"), options={"candidates": only[rank]})
        planned = PlannedSteps(map(step, range(1, 8)), PlanExchange(store, "test", rank, NUM_RANKS, mine), 1)
        return [(plan.hash, plan.planner, plan.choice) for s in planned for plan in s.plans]

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        results = [future.result(timeout=600) for future in [pool.submit(walk, rank) for rank in range(NUM_RANKS)]]
    assert results[0] == results[1] == results[2] and len(results[0]) == 14
    for number, (_, planner, choice) in enumerate(results[0], start=2):
        assert planner == only[number % NUM_RANKS] and list(choice) == [planner] and choice[planner] > 0


def test_a_plan_that_is_refused_ends_every_rank_with_the_reason() -> None:
    def walk(rank: int, planned: PlannedSteps) -> str:
        with pytest.raises(ValueError, match="raise arena_multiple") as error:
            list(planned)
        return str(error.value)

    assert len(set(on_all_ranks(walk, lambda: setup(arena_multiple=0.01)))) == 1


@dataclass(frozen=True)
class Broken(PlanningSetup):
    def plan(self, batch: Shape):
        if batch.lengths == (8, 4):
            raise ZeroDivisionError("a bug in a planner")
        return super().plan(batch)


def test_a_bug_on_one_rank_reaches_all_with_its_traceback() -> None:
    good = setup()

    def walk(rank: int, planned: PlannedSteps) -> str:
        with pytest.raises(RuntimeError, match="planning failed on rank 1") as error:
            list(planned)
        return str(error.value)

    texts = on_all_ranks(walk, lambda: Broken(good.problem, good.planner, good.options, True))
    assert len(set(texts)) == 1 and "in plan" in texts[0] and "ZeroDivisionError: a bug" in texts[0]


def test_ranks_of_different_nodes_take_turns() -> None:
    """Whatever the nodes, every rank has its turn, and neighbours in order sit on as many nodes as there are."""
    assert planning_turns(np.array([0, 0, 0, 0, 1, 1, 1, 1])) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert planning_turns(np.array([3, 3, 4, 4, 4, 5])) == [0, 2, 5, 1, 3, 4]
    assert planning_turns(np.zeros(3, int)) == [0, 1, 2] and planning_turns(np.array([0])) == [0]


@dataclass(frozen=True)
class Counted(PlanningSetup):
    made: list = field(default_factory=list)

    def plan(self, batch: Shape):
        self.made.append(batch)
        return super().plan(batch)


def test_micro_batches_of_one_shape_share_a_plan() -> None:
    """Packs of one long document are all alike: one plan for them, on every rank, while it is remembered."""
    good, made = setup(), []
    alike = replace(step(1), micro_batches=step(1).micro_batches[:1] * 2)

    def walk(rank: int) -> list:
        mine = Counted(good.problem, good.planner, good.options, True, made)
        batches = (replace(alike, step=number) for number in range(1, 6))
        with contextlib.closing(PlannedSteps(batches, PlanExchange(store, "a", rank, NUM_RANKS, mine), 1)) as planned:
            return [([plan.hash for plan in s.plans], s.figures.area, together.wait(timeout=600))[:2] for s in planned]

    store, together = dist.HashStore(), threading.Barrier(NUM_RANKS)
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        results = [future.result(timeout=600) for future in [pool.submit(walk, rank) for rank in range(NUM_RANKS)]]
    shape = Shape.of(alike.micro_batches[0])
    assert made == [shape]
    assert all([hashes for hashes, _ in result] == [[good.plan(shape).hash] * 2] * 5 for result in results)
    area = sum(n * (n + 1) // 2 for n in shape.lengths)
    assert [area for _, area in results[0]] == [2 * area] * 5, "figures count a plan as often as it is used"


def test_closing_ends_a_wait_for_a_plan_that_never_comes() -> None:
    """The other ranks are gone: without an end to the wait, a run that fails would hang while it cleans up."""
    exchange = PlanExchange(dist.HashStore(), "alone", 0, NUM_RANKS, setup())
    planned = PlannedSteps(map(step, range(1, 4)), exchange, 1)
    done = threading.Thread(target=planned.close, daemon=True)
    done.start()
    done.join(timeout=20)
    assert not done.is_alive()


def test_used_plans_leave_the_store() -> None:
    store = dist.HashStore()

    def walk(rank: int) -> None:
        planned = PlannedSteps(map(step, range(1, 30)), PlanExchange(store, "s", rank, NUM_RANKS, setup()), 1)
        for _ in planned:
            together.wait(timeout=600)
        planned.close()

    together = threading.Barrier(NUM_RANKS)
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        for future in [pool.submit(walk, rank) for rank in range(NUM_RANKS)]:
            future.result(timeout=600)
    assert store.num_keys() <= 2 * 6
