"""Trace events: the format that Perfetto reads, and the plan's times in it."""

import json

import numpy as np
import pytest

import hsap
from hsap.ir.effects import flows
from hsap.ir.program import Op
from hsap.view import Scene, trace_events
from tests.view.plans import compiled


@pytest.fixture(scope="module")
def scene():
    return Scene.planned(hsap.simulate(compiled([700, 50], "4x1", "ring", cluster=hsap.Cluster(ranks_per_node=2))))


def test_boxes_flows_and_names(scene):
    events = json.loads(json.dumps(trace_events([scene])))["traceEvents"]
    by = {phase: [event for event in events if event["ph"] == phase] for phase in "MXsf"}
    assert len(events) == sum(map(len, by.values()))
    names = {event["args"]["name"] for event in by["M"] if event["name"] == "process_name"}
    assert names == {"ring, node 0", "ring, node 1"}
    for event in by["X"]:
        assert event["pid"] == event["tid"] // 2 // 2 and event["ts"] >= 0 and event["dur"] >= 0
    for rank in range(4):
        spent = sum(event["dur"] for event in by["X"] if event["tid"] == 2 * rank)
        expected = sum(course.spent_s[rank, :3].sum() for course in scene.courses[0])
        np.testing.assert_allclose(spent, expected * 1e6)


def test_every_message_is_one_flow_from_sender_to_receiver(scene):
    events = trace_events([scene])["traceEvents"]
    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert starts.keys() == ends.keys()
    programs = [course.programs for course in scene.courses[0]]
    assert len(starts) == sum(int((each.op == Op.SEND).sum()) for each in programs)
    moved = sorted((starts[i]["tid"] // 2, ends[i]["tid"] // 2) for i in starts)
    carried = [flows(scene.plan, each) for each in programs]
    assert moved == sorted((int(s), int(d)) for each in carried for s, d in zip(each.src, each.dst))
    assert all(starts[i]["ts"] <= ends[i]["ts"] for i in starts)


def test_two_plans_have_processes_and_flows_of_their_own(scene):
    one, two = (trace_events([scene] * n)["traceEvents"] for n in (1, 2))
    assert len(two) == 2 * len(one)
    assert {e["pid"] for e in two} == {0, 1, 2, 3}
    flow_ids = [e["id"] for e in two if e["ph"] == "s"]
    assert len(set(flow_ids)) == len(flow_ids)
