"""Scenes: what the page is given is what the plan says, and no word of it can break the page."""

import base64
import gzip
import hashlib
import json
import re
from dataclasses import replace

import numpy as np
import pytest

import hsap
from hsap.ir.effects import partners
from hsap.ir.program import Op
from hsap.sim.spent import PARTS
from hsap.view import Course, Scene, render
from hsap.view.columns import ALIGNMENT, Columns
from hsap.view.page import SCRIPTS, STATIC, STYLES
from hsap.view.scene import SHAPES
from tests.view.plans import compiled

PLANS = {
    "readme": lambda: compiled(balance="blocks"),
    "two layers of ranks": lambda: compiled(topology="2x4"),
    "whole group": lambda: compiled(planner="usp", topology="8x1"),
    "masks": lambda: compiled([90, 1, 40], "3x1", "magi", "window:7+full"),
    "more ranks than tokens": lambda: compiled([1, 2], "5x1", "ring"),
    "one rank": lambda: compiled([9], "1x1"),
    "nodes": lambda: compiled([700], "6x1", "zigzag", cluster=hsap.Cluster(ranks_per_node=2)),
}


@pytest.fixture(params=PLANS, scope="module")
def plan(request):
    return PLANS[request.param]()


def unpack(value: dict) -> dict[str, np.ndarray]:
    """Read columns as the page does, without its code."""
    raw, at, out = gzip.decompress(base64.b64decode(value["data"])), 0, {}
    for name, code, length, rising in value["columns"]:
        dtype = np.dtype({"b": "<i1", "h": "<i2", "i": "<i4", "d": "<f8"}[code])
        values = np.frombuffer(raw, dtype, length, at)
        out[name] = np.cumsum(values, dtype=np.int64) if rising else values
        at += -(-values.nbytes // ALIGNMENT) * ALIGNMENT
    assert at == len(raw)
    return out


@pytest.mark.parametrize("values", [[], [0], [-1, 5, 127], [128, -129], [1 << 20, 3], [1 << 40, 7], [1 << 30, -5, 2]])
@pytest.mark.parametrize("rising", [False, True])
def test_columns_come_back_as_they_were(values, rising):
    columns = Columns()
    columns.add("a", values, rising)
    columns.add("b", [1, 2, 3], rising)
    found = unpack(columns.packed())
    assert found["a"].tolist() == values and found["b"].tolist() == [1, 2, 3]


def test_partners_are_the_other_halves(plan):
    for programs in (programs for pair in plan.programs for programs in pair):
        found = partners(programs).tolist()
        # An oracle that walks: between two ranks, the nth send of a round meets the nth receive.
        queues: dict[tuple, list[int]] = {}
        for i, rank in enumerate(programs.rank.tolist()):
            if programs.op[i] == Op.SEND:
                queues.setdefault((rank, int(programs.peer[i]), int(programs.round[i])), []).append(i)
        expected = [-1] * len(programs)
        for i, rank in enumerate(programs.rank.tolist()):
            if programs.op[i] == Op.RECV:
                send = queues[int(programs.peer[i]), rank, int(programs.round[i])].pop(0)
                expected[i], expected[send] = send, i
        assert found == expected


@pytest.mark.parametrize(
    "cluster",
    [None, hsap.Cluster.preset("dgx-a100"), hsap.Cluster(cores=2.0, comm_cores=0.5, duplex=1.2)],
    ids=["own", "dgx-a100", "few cores"],
)
def test_where_the_time_goes_adds_up(plan, cluster):
    for trace in (trace for pair in hsap.simulate(plan, cluster).traces for trace in pair):
        course = Course.planned(trace)
        assert course.spent_s.shape == (plan.num_ranks, len(PARTS))
        np.testing.assert_allclose(course.spent_s.sum(axis=1), trace.makespan_s)
        # An oracle that walks: what lies between the times of a rank's instructions.
        expected, now = np.zeros((plan.num_ranks, 3)), np.zeros(plan.num_ranks)
        times = (getattr(trace.times, name).tolist() for name in ("start", "worked", "end"))
        for rank, op, start, worked, end in zip(trace.programs.rank.tolist(), trace.programs.op.tolist(), *times):
            assert start == now[rank], "the simulator's streams have no gaps"
            expected[rank, 0 if op in (Op.ATTEND, Op.ATTEND_GRAD) else 1] += worked - start
            expected[rank, 2] += end - worked
            now[rank] = end
        np.testing.assert_allclose(course.spent_s[:, :3], expected, atol=1e-12)
        attention, other, exposed, gaps, done = course.spent_s.T
        assert gaps.max() < 1e-12
        np.testing.assert_allclose(done, trace.makespan_s - now, atol=1e-12)
        np.testing.assert_allclose(attention + other, trace.busy_s, atol=1e-12)
        np.testing.assert_allclose(exposed, trace.exposed_s, atol=1e-12)
        np.testing.assert_allclose(done, trace.idle_s, atol=1e-12)


def test_a_scene_says_what_the_plan_says(plan):
    timeline = hsap.simulate(plan)
    value = Scene.planned(timeline).to_json()
    found = unpack(value)
    assert found["borders"].tolist() == plan.problem.layout.cu_seqlens.tolist()
    for mask, pair in enumerate(timeline.traces):
        blocks = list(zip(found[f"{mask}.block.q"], found[f"{mask}.block.kv"]))
        for s, (q0, _, k0, *_) in enumerate(plan.slices[mask].tolist()):
            q, kv = blocks[found[f"{mask}.slice.block"][s]]
            for shard, position in ((q, q0), (kv, k0)):
                spans = plan.shards.spans[plan.shards.offsets[shard] : plan.shards.offsets[shard + 1]]
                assert any(a <= position < b for a, b in spans.tolist())
        for direction, trace in enumerate(pair):
            name, told = f"{mask}.{direction}", value["masks"][mask]["directions"][direction]
            np.testing.assert_array_equal(found[f"{name}.op"], trace.programs.op)
            np.testing.assert_allclose(
                found[f"{name}.end"] * told["tick_s"], trace.times.end, atol=told["makespan_s"] * 1e-7
            )
            links = np.zeros((plan.num_ranks, plan.num_ranks))
            links[found[f"{name}.link.src"], found[f"{name}.link.dst"]] = found[f"{name}.link.bytes"]
            assert links.sum() == trace.intra_bytes + trace.inter_bytes and not links.diagonal().any()
            assert found[f"{name}.bytes"].sum() == links.sum()
            begin, end = found[f"{name}.held.begin"], found[f"{name}.held.end"]
            held = trace.programs.buffers
            at = [range(a, b + 1) for a, b in zip(begin, end)]
            for i in range(len(trace.programs)):
                for b in trace.programs.buf[i].tolist():
                    assert b < 0 or i in at[b], f"instruction {i} touches buffer {b} outside its life"
            assert len(at) == len(held)


def test_patterns_are_the_paper_s_and_else_the_kind():
    value = Scene.planned(hsap.simulate(compiled(balance="blocks"))).to_json()
    found = unpack(value)
    names = {(q, kv): SHAPES[shape] for q, kv, shape in zip(*(found[f"0.block.{c}"] for c in ("q", "kv", "shape")))}
    assert (names[0, 0], names[1, 0], names[3, 0], names[4, 3], names[5, 3]) == ("A1", "A2", "A3", "A4", "A5")
    value = Scene.planned(hsap.simulate(compiled([64], "2x1", "ring", "window:9"))).to_json()
    assert SHAPES[unpack(value)["0.block.shape"][0]] == "band"


def test_a_page_needs_no_network_and_allows_none():
    page = render([Scene.planned(hsap.simulate(compiled()))])
    assert not re.search(r"https?://|\bsrc=|<link|@import|\bimport\b.*\bfrom\b|fetch\(", page)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    script = re.search(r"<script>(.*)</script>", page, re.S)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert len(page) < 160_000, "the README's example is a small page"


@pytest.mark.parametrize(
    "word", ["</script><script>alert(1)</script>", "<!--", "{{data}}", "\u2028 & <b>", "<img src=x>"]
)
def test_no_word_breaks_the_page(word):
    plan = replace(compiled([5, 6], "2x1", "ring"), planner=word, options={word: word})
    page = render([Scene.planned(hsap.simulate(plan), note_title(word))])
    assert page.count("</script>") == 2 and page.count("<script") == 2
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    scene = data["scenes"][0]
    assert scene["planner"] == word and scene["options"] == {word: word} and scene["title"] == note_title(word)


def note_title(word: str) -> str:
    return f"plan of {word}"


def test_plans_of_different_batches_are_not_compared():
    scenes = [Scene.planned(hsap.simulate(compiled(lengths, "2x1", "ring"))) for lengths in ([5, 6], [6, 5])]
    with pytest.raises(ValueError, match="different batches"):
        render(scenes)
    for wrong in ([], scenes * 2):
        with pytest.raises(ValueError, match="a page shows one, or two"):
            render(wrong)


def test_scripts_are_short_and_write_text_only():
    files = sorted(path.name for path in STATIC.iterdir())
    assert files == sorted([f"{n}.js" for n in SCRIPTS] + [f"{n}.css" for n in STYLES] + ["page.html"])
    for path in STATIC.iterdir():
        source = path.read_text(encoding="utf-8")
        assert source.count("\n") <= 400, f"{path} is longer than 400 lines"
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", source), (
            path
        )


def test_scripts_import_what_stands_before_them_and_what_is_exported():
    exported = {}
    for name in SCRIPTS:
        source = (STATIC / f"{name}.js").read_text(encoding="utf-8")
        for words, origin in re.findall(r'^import \{([^}]*)\} from "\./(\w+)\.js";$', source, re.M):
            for word in words.split(","):
                assert word.strip() in exported[origin], f"{name}.js imports {word} from {origin}.js"
                body = re.sub(r"^import .*$", "", source, flags=re.M)
                assert re.search(rf"\b{word.strip()}\b", body), f"{name}.js has no use for {word}"
        exported[name] = re.findall(r"^export (?:async )?(?:function|class|const) (\w+)", source, re.M)
