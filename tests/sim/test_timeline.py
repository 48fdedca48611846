"""The timeline's figures, and what must hold of any plan's time."""

from dataclasses import replace

import numpy as np
import pytest

import hsap
from hsap import clusters
from hsap.ir.problem import Cluster
from hsap.ir.program import Op
from hsap.ir.schedule import DIRECTIONS
from hsap.ir.summary import summary

LENGTHS = (900, 40, 1, 300, 2000)


def compiled(planner="ring", lengths=LENGTHS, topology="4x2", masks=(("causal", 3), ("window:64", 1)), **cluster):
    problem = hsap.Problem(
        hsap.Layout.from_lengths(lengths),
        hsap.HeadShape(8, 2, 32),
        hsap.Topology.parse(topology),
        masks,
        Cluster(**({"ranks_per_node": 4} | cluster)),
    )
    return hsap.compile(problem, planner)


@pytest.mark.parametrize("planner", ["ring", "sap"])
def test_a_rank_s_time_adds_up(planner: str) -> None:
    plan = compiled(planner)
    timeline = hsap.simulate(plan)
    figures = summary(plan)
    for direction in DIRECTIONS:
        traces = timeline[direction]
        for trace in traces:
            np.testing.assert_allclose(trace.busy_s + trace.exposed_s + trace.idle_s, trace.makespan_s, rtol=1e-12)
            assert abs(trace.idle_s.min()) < 1e-12 * trace.makespan_s  # somebody is last
            assert trace.exposed_s.min() > -1e-12 * trace.makespan_s
            assert (trace.times.end >= trace.times.start + trace.seconds - 1e-15).all()
            waits = trace.programs.op == Op.WAIT
            assert (trace.times.end - trace.times.start)[~waits & (trace.programs.op != Op.ALL_TO_ALL)].sum() > 0
        want = (3 * traces[0].makespan_s + traces[1].makespan_s) / 4
        assert timeline.seconds(direction) == pytest.approx(want, rel=1e-12)
        mean = timeline.summary()[direction]
        for name in ("bytes_internode", "peak_buffer_bytes_per_rank"):
            assert mean[name] == figures[direction][name]
        assert mean["bytes_intranode"] + mean["bytes_internode"] == figures[direction]["bytes_total"]
        assert mean["predicted_s"] == timeline.seconds(direction)
        assert len(mean["busy_s_per_rank"]) == 8
    assert timeline.predicted_s == timeline.seconds("forward") + timeline.seconds("backward")
    assert len(timeline.summary()["per_mask"]) == 2


@pytest.mark.parametrize("planner", ["ring", "zigzag", "distflash", "sap"])
@pytest.mark.parametrize("better", [
    {"inter_bytes_per_s": 4e10}, {"intra_bytes_per_s": 1e12}, {"inter_latency_s": 0}, {"flops_per_s": 1e15},
    {"memory_bytes_per_s": 1e13}, {"kernel_overhead_s": 0},
], ids=str)  # fmt: skip
def test_a_better_cluster_is_never_slower(planner: str, better: dict) -> None:
    """Times are maxima of sums of costs, so this holds for every instruction of every plan."""
    plan = compiled(planner)
    before = hsap.simulate(plan)
    after = hsap.simulate(plan, replace(plan.problem.cluster, **better))
    for pair, other in zip(before.traces, after.traces):
        for old, new in zip(pair, other):
            assert (new.times.end <= old.times.end).all()
    assert after.predicted_s < before.predicted_s


def test_with_free_messages_and_equal_stages_the_busiest_rank_sets_the_time() -> None:
    """A ring with full attention: all blocks are alike, so nobody waits for anybody's work."""
    free = {"intra_bytes_per_s": 1e30, "inter_bytes_per_s": 1e30, "intra_latency_s": 0, "inter_latency_s": 0}
    plan = compiled("ring", (1024,), "4x1", (("full", 1),), **free)
    (trace,) = hsap.simulate(plan)["forward"]
    assert trace.makespan_s == pytest.approx(trace.busy_s.max(), rel=1e-9)
    assert trace.exposed_s.max() < 1e-9 * trace.makespan_s


def test_one_rank_is_the_sum_of_its_work() -> None:
    plan = compiled(topology="1x1")
    for trace in hsap.simulate(plan)["backward"]:
        assert trace.makespan_s == pytest.approx(trace.seconds.sum(), rel=1e-12)
        assert trace.intra_bytes == trace.inter_bytes == trace.exposed_s.sum() == 0


@pytest.mark.parametrize("lengths", [(), (1,), (2, 1)])
def test_nothing_and_nearly_nothing(lengths) -> None:
    timeline = hsap.simulate(compiled("sap", lengths))
    assert np.isfinite(timeline.predicted_s)
    assert len(timeline.chart().splitlines()) == 9


def test_a_cluster_by_name_or_value_or_the_problem_s_own() -> None:
    plan = compiled()
    assert hsap.simulate(plan).cluster is plan.problem.cluster
    preset = clusters.read("dgx-h100")
    assert hsap.simulate(plan, "dgx-h100").predicted_s == hsap.simulate(plan, preset).predicted_s
    assert hsap.simulate(plan, "dgx-h100").summary()["forward"]["bytes_internode"] == 0  # 8 ranks a node
    with pytest.raises(ValueError, match="unknown preset 'abacus'"):
        hsap.simulate(plan, "abacus")
    with pytest.raises(ValueError, match="spreads over 2 nodes"):
        hsap.simulate(plan, replace(plan.problem.cluster, num_nodes=1))
    with pytest.raises(ValueError, match="cluster is 8"):
        hsap.simulate(plan, 8)
    with pytest.raises(ValueError, match="simulate: plan"):
        hsap.simulate("plan")


def test_the_same_plan_takes_the_same_time() -> None:
    first, second = (hsap.simulate(compiled("sap")) for _ in range(2))
    assert first.summary() == second.summary()


def test_the_chart_shows_what_ranks_do() -> None:
    """Rank 0 of a causal ring is done first; it attends, then is done."""
    plan = compiled("ring", (4096,), "4x1", (("causal", 1),))
    timeline = hsap.simulate(plan)
    lines = timeline.chart("forward", 0, 40).splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["r0", "r1", "r2", "r3"]
    cells = [line.split(maxsplit=1)[1] for line in lines[:4]]
    assert all(len(row) == 40 for row in cells)
    for row, trace_busy in zip(cells, timeline["forward"][0].busy_s / timeline["forward"][0].makespan_s * 40):
        assert abs(row.count("█") + row.count("▒") - trace_busy) <= 4
    assert cells[0].endswith("—") and not cells[3].endswith("—")
    assert "forward, mask 0" in lines[4]
    for wrong in ({"direction": "sideways"}, {"mask": 1}, {"width": 0}):
        with pytest.raises(ValueError):
            timeline.chart(**wrong)
