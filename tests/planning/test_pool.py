"""Processes that plan: the same plans as in the rank itself, and none that outlives its rank or is lost in silence.

One planner with a bug, one that never ends and one that ends its process stand in for real ones, in the workers alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

import hsap
from hsap.ir.mask import Mask
from hsap.planning import pool as pool_module
from hsap.planning.compiling import PlanningSetup, Shape, opened
from hsap.planning.exchange import PlanExchange
from hsap.planning.pool import PlanPool
from hsap.planning.steps import PlannedSteps
from tests.planning.test_planning import NUM_RANKS, setup, step

ROOT = Path(__file__).resolve().parents[2]
SHAPES = [Shape((9, 4, n), (2, 1)) for n in range(1, 7)]
STRANGE = (
    "import os, time; from hsap.planning.compiling import PlanningSetup; real = PlanningSetup.plan; "
    "acts = {(1,): lambda: 1 // 0, (2,): lambda: time.sleep(600), (3,): lambda: os._exit(7), "
    "(4,): lambda: os.kill(os.getpid(), 9)}; "
    "PlanningSetup.plan = lambda self, batch: (acts.get(batch.lengths, int)(), real(self, batch))[1]; "
)


@pytest.fixture
def strange(monkeypatch):
    """Workers in which some shapes make planning go wrong."""
    monkeypatch.setattr(pool_module, "_PROGRAM", pool_module._PROGRAM.replace("serve(int", STRANGE + "serve(int"))


def ended(pid: int, patience_s: float = 20.0) -> bool:
    """Tell whether a process is gone, or only its parent's to be waited for, within that time."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_the_setup_travels_as_data() -> None:
    """Masks of layers, of a user's own slices too, options and cluster: what plans the same must come out."""
    layout = hsap.Layout.from_lengths([6, 3])
    own = Mask.of(lambda n, _: [(0, n, 0, n, None, 0)][:0] or [(0, n, 0, 1)], layout)
    problem = hsap.Problem(layout, hsap.HeadShape(4, 2, 8, "bf16"), hsap.Topology(2, 2), (("window:4", 3), (own, 1)))
    given = PlanningSetup(problem, "sap", {"balance": "blocks"}, False)
    assert PlanningSetup.from_bytes(given.to_bytes()) == given
    shape = Shape((6, 3), (1, 1), ((), (1, 2)))
    assert Shape.from_bytes(shape.to_bytes()) == shape


def test_workers_make_the_plans_that_the_rank_would_make() -> None:
    here = replace(setup("auto", masks=(("window:4", 2), ("causal", 1))), options={"candidates": "ring|sap"})
    shapes = [*SHAPES, Shape((9, 4), (1, 1), ((3, 5), ())), Shape((), (0,))]
    with PlanPool(here, 2) as pool:
        pids = pool.pids
        made = [opened(one.result(timeout=120), 0) for one in [pool.submit(shape) for shape in shapes]]
        assert pool.pids == pids, "no worker had to be replaced"
    for shape, (plan, figures) in zip(shapes, made):
        want, figures_here = opened(here.outcome(shape), 0)
        assert plan.hash == want.hash and plan.choice == want.choice and figures == figures_here
    assert all(map(ended, pids))


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "lookahead"), [(1, 0), (2, 3)])
def test_plans_and_their_order_are_the_same_whatever_the_workers(workers: int, lookahead: int) -> None:
    def walk(rank: int, pool: PlanPool | None, store: dist.Store, lookahead: int) -> list:
        exchange = PlanExchange(store, "w", rank, NUM_RANKS, setup(), pool)
        steps = PlannedSteps(map(step, range(1, 6)), exchange, lookahead)
        try:
            return [(s.batch.step, [plan.hash for plan in s.plans], s.figures) for s in steps]
        finally:
            steps.close()

    def on_ranks(pool: PlanPool | None, lookahead: int) -> list:
        store = dist.HashStore()
        with ThreadPoolExecutor(NUM_RANKS) as threads:
            ranks = [threads.submit(walk, rank, pool, store, lookahead) for rank in range(NUM_RANKS)]
            return [rank.result(timeout=120) for rank in ranks]

    with PlanPool(setup(), workers) as pool:
        assert on_ranks(pool, lookahead) == on_ranks(None, 1)


@pytest.mark.slow
def test_what_goes_wrong_in_a_worker_is_told(strange, capfd) -> None:
    with PlanPool(setup(arena_multiple=0.01), 1) as pool, pytest.raises(ValueError, match="raise arena_multiple"):
        opened(pool.submit(SHAPES[0]).result(timeout=120), 0)
    with PlanPool(setup(), 1) as pool:
        bug, ends, killed, fine = (pool.submit(Shape((n,), (1,))) for n in (1, 3, 4, 5))
        with pytest.raises(RuntimeError, match=r"(?s)failed on rank 2:.*ZeroDivisionError: "):
            opened(bug.result(timeout=120), 2)
        with pytest.raises(RuntimeError, match=r"(?s)failed on rank 2:.*exit code 7, like the one before.*workers=0"):
            opened(ends.result(timeout=120), 2)
        with pytest.raises(RuntimeError, match="was ended by SIGKILL, like the one before"):
            opened(killed.result(timeout=120), 2)
        assert opened(fine.result(timeout=120), 2)[0].hash == setup().plan(Shape((5,), (1,))).hash
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("hsap: planning worker ")]
    assert len(told) == 2 and "ended with exit code 7; a new one" in told[0] and "by SIGKILL; a new one" in told[1]


def test_a_worker_that_is_killed_is_replaced_and_nothing_is_lost(capfd) -> None:
    with PlanPool(setup(), 1) as pool:
        for shape in SHAPES[:2]:
            pid = pool.pids[0]
            os.kill(pid, signal.SIGKILL)
            assert opened(pool.submit(shape).result(timeout=120), 0)[0].hash == setup().plan(shape).hash
            assert pool.pids != [pid]
            assert f"hsap: planning worker {pid} was ended by SIGKILL" in capfd.readouterr().err


def test_closing_ends_workers_in_the_middle_of_a_plan(strange) -> None:
    pool = PlanPool(setup(), 1)
    stuck, queued = pool.submit(Shape((2,), (1,))), pool.submit(SHAPES[0])
    time.sleep(0.3)
    begin = time.monotonic()
    pool.close()
    assert time.monotonic() - begin < 5 and ended(pool.pids[0], 1)
    for future in (stuck, queued):
        with pytest.raises(RuntimeError, match="planning ends"):
            future.result(timeout=1)


def test_who_asks_a_closed_pool_is_told(strange) -> None:
    pool = PlanPool(setup(), 1)
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="planning ends"):
        pool.submit(SHAPES[0]).result(timeout=5)


@pytest.mark.slow
def test_a_worker_that_lives_without_its_pipe_is_replaced(monkeypatch, capfd) -> None:
    monkeypatch.setattr(pool_module, "_GRACE_S", 0.2)
    deaf = pool_module._PROGRAM.replace("serve(int(sys.argv[1]))", "import os, time; os.close(int(sys.argv[1])); ")
    monkeypatch.setattr(pool_module, "_PROGRAM", f"{deaf}time.sleep(600)")
    with PlanPool(setup(), 1) as pool:
        pid = pool.pids[0]
        monkeypatch.undo()
        monkeypatch.setattr(pool_module, "_GRACE_S", 0.2)
        future = pool.submit(SHAPES[0])
        assert opened(future.result(timeout=60), 0)[0].hash == setup().plan(SHAPES[0]).hash and ended(pid, 1)
    assert f"planning worker {pid} could no longer be talked to; a new one" in capfd.readouterr().err


def test_an_exchange_that_is_closed_waits_for_no_worker(strange) -> None:
    batch = step(1, 1)
    stuck = replace(batch, micro_batches=(replace(batch.micro_batches[0], lengths=(2,), sequences=(1,)),))
    with PlanPool(setup(), 1) as pool:
        exchange = PlanExchange(dist.HashStore(), "c", 1, NUM_RANKS, setup(), pool)
        planned = PlannedSteps(iter([stuck]), exchange, 1)
        time.sleep(0.2)
        begin = time.monotonic()
        planned.close()
        assert time.monotonic() - begin < 5 and exchange.rank == exchange._planner_of(1), "it waited for its own"


RANK = """
import os, sys, time
from tests.planning import test_pool as t
t.pool_module._PROGRAM = t.pool_module._PROGRAM.replace("serve(int", t.STRANGE + "serve(int")
pool = t.PlanPool(t.setup(), 2)
t.opened(pool.submit(t.SHAPES[0]).result(), 0)
pool.submit(t.Shape((2,), (1,)))
time.sleep(0.2)
print(*pool.pids, flush=True)
{end}
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["time.sleep(600)", "os._exit(3)", "sys.exit(0)"])
def test_workers_end_with_their_rank_however_it_ends(end: str) -> None:
    """One worker is idle, the other in the middle of a plan that never ends; the first rank is killed with SIGKILL."""
    command = [sys.executable, "-c", RANK.format(end=end)]
    rank = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    pids = list(map(int, rank.stdout.readline().split()))
    assert len(pids) == 2
    if "sleep" in end:
        assert not any(ended(pid, 0.1) for pid in pids)
        rank.kill()
    assert rank.wait(timeout=20) is not None
    rank.stdout.close()
    assert all(map(ended, pids))


@pytest.mark.slow
def test_signals_for_the_whole_job_leave_workers_to_their_rank() -> None:
    with PlanPool(setup(), 1) as pool:
        opened(pool.submit(SHAPES[0]).result(timeout=120), 0)
        pids = pool.pids
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pids[0], number)
        assert opened(pool.submit(SHAPES[1]).result(timeout=120), 0) and pool.pids == pids


def test_workers_load_no_torch() -> None:
    code = "import sys, hsap.planning.worker; print([m for m in ('torch', 'deepspeed', 'hydra') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
