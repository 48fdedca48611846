"""Measured timelines: what a run wrote is read back as it was, and what it didn't write is named."""

import json

import numpy as np
import pytest

import hsap
from hsap.ir.program import Op
from hsap.view import Course, Scene, read_run, render
from tests.mutation.mutants import with_column, with_program
from tests.view.plans import compiled, write_run


@pytest.fixture
def plan():
    return compiled([300, 40, 160], "4x1", masks="causal+window:30")


def test_times_come_back(tmp_path, plan):
    timeline = write_run(tmp_path, plan)
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "plan_wait_s": 0.25}\n{"step"')
    run = read_run(tmp_path)
    assert (run.step, run.layer, run.plan_wait_s, run.plan) == (3, 0, 0.25, plan)
    for measured, planned in zip(run.courses, timeline.traces):
        for course, trace in zip(measured, planned):
            expected = Course.planned(trace)
            for name in ("start", "end", "comm_start", "comm_end"):
                np.testing.assert_allclose(getattr(course, name), 2 * getattr(expected, name), atol=1e-9)
            np.testing.assert_allclose(course.makespan_s, 2 * trace.makespan_s, atol=1e-9)
            np.testing.assert_allclose(course.spent_s.sum(axis=1), course.makespan_s)
    assert "measured in step 3, layer 0; the step waited 250 ms for its plan" in render([Scene.measured(run)])


def test_messages_that_nobody_timed_lie_between_launch_and_wait(tmp_path, plan):
    write_run(tmp_path, plan, messages=False)
    course = read_run(tmp_path).courses[0][0]
    programs = course.programs
    moved = (programs.op == Op.SEND) | (programs.op == Op.RECV)
    assert moved.any() and (np.isnan(course.comm_start) == ~moved).all()
    for i in np.flatnonzero(programs.op == Op.RECV):
        same = (programs.rank == programs.rank[i]) & (programs.round == programs.round[i])
        assert course.comm_end[i] >= course.comm_start[i]
        assert course.comm_end[i] == max(course.end[same & (programs.op == Op.WAIT)][0], course.comm_start[i])


def test_hosts_have_clocks_of_their_own(tmp_path, plan):
    write_run(tmp_path, plan, host=lambda rank: f"h{rank // 2}")
    lines = []
    for rank in (2, 3):
        path = tmp_path / f"timeline-rank{rank}.jsonl"
        lines = [json.loads(text) for text in path.read_text().splitlines()]
        for line in lines:
            for name in ("start_s", "end_s", "comm_start_s", "comm_end_s"):
                line[name] = [None if t is None else t + 77.0 for t in line[name]]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    course = read_run(tmp_path).courses[0][0]
    expected = Course.planned(hsap.simulate(plan).traces[0][0])
    np.testing.assert_allclose(course.end, 2 * expected.end, atol=1e-9)


def test_step_and_layer_are_chosen_and_the_last_step_s_first_layer_else(tmp_path, plan):
    for step, layer, factor in ((3, 1, 1.0), (9, 2, 2.0), (9, 1, 3.0)):
        write_run(tmp_path, plan, step=step, layer=layer, factor=factor)
    first_s = hsap.simulate(plan).traces[0][0].makespan_s
    for asked, found in (((), (9, 1, 3.0)), ((3,), (3, 1, 1.0)), ((9, 2), (9, 2, 2.0))):
        run = read_run(tmp_path, *asked)
        assert (run.step, run.layer) == found[:2]
        assert run.courses[0][0].makespan_s == pytest.approx(found[2] * first_s, rel=1e-3)
    with pytest.raises(ValueError, match=r"step 4 of group 0 was not measured; there is \[3, 9\]"):
        read_run(tmp_path, 4)
    with pytest.raises(ValueError, match="group 5 was not measured; there is \\[0\\]"):
        read_run(tmp_path, group=5)


def edited(change):
    def edit(folder):
        path = folder / "timeline-rank1.jsonl"
        first, *rest = path.read_text().splitlines()
        line = json.loads(first)
        change(line)
        path.write_text("\n".join([json.dumps(line), *rest]))

    return edit


def plan_of(folder):
    return next(folder.glob("plan-*.plan"))


def with_an_unsound_plan(column, value):
    """Put a plan in the run's place that has a column edited, and a hash that fits it."""

    def edit(folder):
        path = plan_of(folder)
        plan = hsap.Plan.load(path)
        programs = plan.programs[0][0]
        where = int(np.flatnonzero(programs.op == Op.SEND)[0])
        wrong = with_program(plan, 0, 0, with_column(programs, column, where, value))
        wrong.save(folder / f"plan-{wrong.hash[:16]}.plan")
        path.unlink()
        for lines in folder.glob("timeline-*"):
            lines.write_text(lines.read_text().replace(plan.hash, wrong.hash))

    return edit


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda f: [p.unlink() for p in f.glob("timeline-*")], "no timeline-rank"),
        (lambda f: (f / "timeline-rank1.jsonl").unlink(), r"not on ranks \[1\]"),
        (lambda f: plan_of(f).unlink(), "not there, but"),
        (lambda f: plan_of(f).write_bytes(compiled([9], "2x1").to_bytes()), "its content hash is"),
        (lambda f: (f / "timeline-rank1.jsonl").write_text('{"plan": "a'), "rank1.jsonl, line 1: not JSON"),
        (lambda f: (f / "timeline-rank1.jsonl").write_text("3"), "expected an object"),
        (with_an_unsound_plan("buf", 1 << 20), "not a sound plan, structure.operands: mask 0 forward, rank"),
        (with_an_unsound_plan("op", 77), "not a sound plan, structure.enumerations"),
        (with_an_unsound_plan("peer", 99), "not a sound plan, structure.peers"),
        (edited(lambda line: line.update(plan="../../etc")), "ran different plans"),
        (edited(lambda line: line.pop("step")), "step is None"),
        (edited(lambda line: line.update(rank=True)), "rank is True"),
        (edited(lambda line: line.update(direction="up")), "needs direction"),
        (edited(lambda line: line["start_s"].pop()), "start_s must be a list of"),
        (edited(lambda line: line.pop("end_s")), "end_s must be a list of"),
        (edited(lambda line: line["start_s"].__setitem__(0, "x")), "no number of seconds"),
        (edited(lambda line: line["start_s"].__setitem__(0, float("nan"))), "has a time beyond"),
        (edited(lambda line: line["end_s"].__setitem__(0, 0.0)), "ends before it starts"),
    ],
)
def test_what_can_t_be_read_is_named(tmp_path, plan, spoil, told):
    write_run(tmp_path, plan)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=told):
        read_run(tmp_path)


def test_a_plan_s_hash_is_no_path(tmp_path, plan):
    write_run(tmp_path, plan)
    for path in tmp_path.glob("timeline-*"):
        path.write_text(path.read_text().replace(plan.hash, "../" + plan.hash))
    with pytest.raises(ValueError, match="is no content hash"):
        read_run(tmp_path)
