"""Plans give the answer of float64 mathematics, whatever the layout, planner, topology, heads and mask."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hsap
from hsap.planners import PLANNERS
from hsap.runtime.kernels import select_kernel
from tests.runtime.oracle import attention, rmse, tensors

HEADS = [(8, 8), (8, 2), (9, 3), (28, 4)]
TOPOLOGIES = ["1x1", "2x1", "3x1", "8x1", "16x1", "5x1", "1x2", "1x8", "2x2", "4x2", "2x4", "3x3", "2x7", "4x4"]
MASKS = [
    *("causal", "full", "window:1", "window:7", "window:40", "lambda:3,5", "lambda:0,9", "blockwise:4,2,1,1"),
    *("blockwise:16,1,0,0", "shared_question:4,20", "shared_question:2,50", "prefix:17", "chunked:10"),
]
AWKWARD = {
    "one token": [1],
    "one-token documents": [1] * 23,
    "fewer tokens than ranks": [2, 1],
    "one giant document": [301],
    "a giant among dwarfs": [1, 2, 250, 1, 1, 3],
    "odd sizes": [7, 13, 29, 31, 3, 1, 17],
    "many": [1 + (i * 37) % 11 for i in range(60)],
}


def check(lengths: list[int], heads: tuple[int, int], topology: str, planner: str, mask: str = "causal", cuts=()):
    """Compare a plan's results with attention by its definition. cuts: documents before each border of a sequence."""
    shape = hsap.HeadShape(*heads, 4, "fp64")
    parsed = hsap.Topology.parse(topology)
    if parsed.intra_sp > shape.num_q_heads:
        return
    borders = [0, *sorted(min(at, len(lengths)) for at in cuts), len(lengths)]
    layout = hsap.Layout.from_lengths(lengths, np.diff(borders).tolist())
    problem = hsap.Problem(layout, shape, parsed, ((hsap.Mask.parse(mask), 1),))
    plan = hsap.compile(problem, planner)
    report = hsap.verify(plan)
    assert report.ok, report
    q, k, v, grad_o = tensors(problem, torch.float64, seed=len(lengths))
    for got, want in zip(hsap.reference(plan, q, k, v, grad_o=grad_o), attention(problem, q, k, v, grad_o)):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_layouts(name: str, planner: str) -> None:
    turn = list(AWKWARD).index(name) + list(PLANNERS).index(planner)
    for i, topology in enumerate(("3x1", "2x2", "8x1")):
        if i != turn % 3:  # two of three: many planners make many pairs
            check(AWKWARD[name], (8, 2), topology, planner, cuts=(2, 2, 5)[: turn % 4])


def every_shape(heads: tuple[int, int], planner: str, topologies: list[str]) -> None:
    for topology in topologies:
        check([34, 20, 10, 3, 1, 10, 7], heads, topology, planner, cuts=(3, 4))


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("heads", HEADS)
def test_every_topology_and_every_head_shape(heads: tuple[int, int], planner: str) -> None:
    """A planner meets each topology once, with the head shapes in turn; the slow test has all pairs."""
    turn = HEADS.index(heads) + list(PLANNERS).index(planner)
    every_shape(heads, planner, TOPOLOGIES[turn % len(HEADS) :: len(HEADS)])


@pytest.mark.slow
@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("heads", HEADS)
def test_every_topology_with_every_head_shape(heads: tuple[int, int], planner: str) -> None:
    every_shape(heads, planner, TOPOLOGIES)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.one_of(st.integers(1, 12), st.integers(1, 120)), min_size=1, max_size=40),
    st.sampled_from(HEADS),
    st.sampled_from(TOPOLOGIES),
    st.sampled_from(sorted(PLANNERS)),
    st.sampled_from(MASKS),
    st.lists(st.integers(0, 40), max_size=5),
)
def test_random_layouts(lengths, heads, topology, planner, mask, cuts) -> None:
    check(lengths, heads, topology, planner, mask, cuts)


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(mask: str, planner: str) -> None:
    check([41, 1, 22], (4, 2), "4x2", planner, mask)


@pytest.mark.parametrize("planner", PLANNERS)
def test_masks_of_a_user_s_own_and_of_each_document(planner: str) -> None:
    def pairs(length: int, parts: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Causal in the first part; the second sees only every other third of the first. Some rows see nothing."""
        first = parts[0]
        return [
            (0, first, 0, first, -length, 0),
            (first, length, 0, first // 3),
            (first, length, 2 * first // 3, first),
        ]

    layout = hsap.Layout.from_lengths([40, 5, 33])
    own = hsap.Mask.of(pairs, layout, [(25, 15), (2, 3), (1, 32)])
    masks = ((own, 2), ((hsap.Mask("full"), own[1], hsap.Mask.parse("window:6")), 1))
    problem = hsap.Problem(layout, hsap.HeadShape(4, 2, 4, "fp64"), hsap.Topology(3, 2), masks)
    plan = hsap.compile(problem, planner)
    assert hsap.verify(plan).ok
    q, k, v, grad_o = tensors(problem, torch.float64)
    for mask in range(2):
        got = hsap.reference(plan, q, k, v, grad_o=grad_o, mask=mask)
        for g, w in zip(got, attention(problem, q, k, v, grad_o, mask)):
            torch.testing.assert_close(g, w, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("planner", PLANNERS)
def test_long_ragged_packs(planner: str) -> None:
    generator = np.random.default_rng(5)
    for num_documents, most, topology in ((300, 12, "16x1"), (9, 700, "4x4"), (2, 2000, "8x2")):
        check(generator.integers(1, most, num_documents).tolist(), (4, 2), topology, planner)


def test_several_masks_share_a_placement() -> None:
    shape = hsap.HeadShape(4, 2, 4, "fp64")
    masks = ((hsap.Mask.parse("window:9"), 5), (hsap.Mask(), 1))
    problem = hsap.Problem(hsap.Layout.from_lengths([50, 3, 41, 18]), shape, hsap.Topology(4, 2), masks)
    q, k, v, grad_o = tensors(problem, torch.float64)
    for planner in PLANNERS:
        plan = hsap.compile(problem, planner)
        assert hsap.verify(plan).ok
        for mask in range(2):
            got = hsap.reference(plan, q, k, v, grad_o=grad_o, mask=mask)
            for g, w in zip(got, attention(problem, q, k, v, grad_o, mask)):
                torch.testing.assert_close(g, w, rtol=0, atol=1e-10)


def test_an_empty_pack_has_a_plan() -> None:
    problem = hsap.Problem(hsap.Layout.from_lengths([]), hsap.HeadShape(4, 2, 4, "fp32"), hsap.Topology(2, 2))
    for planner in PLANNERS:
        plan = hsap.compile(problem, planner)
        assert hsap.verify(plan).ok
        q, k, v, grad_o = tensors(problem, torch.float32)
        results = hsap.reference(plan, q, k, v, grad_o=grad_o)
        assert [tuple(t.shape) for t in results] == [(0, 4, 4), (4, 0), (0, 4, 4), (0, 2, 4), (0, 2, 4)]


@pytest.mark.parametrize(
    "dtype,output,bar", [("fp32", "native", 1.1), ("bf16", "native", 1.2), ("bf16", "float32", 1.1)]
)
def test_split_attention_is_as_exact_as_one_device(dtype: str, output: str, bar: float) -> None:
    """DESIGN's bars on the error against float64, over that of the same kernel on one device; float32 on the wire."""
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    layout = hsap.Layout.from_lengths([400, 150, 3, 247])
    shape = hsap.HeadShape(4, 2, 32, dtype)
    one = hsap.Problem(layout, shape, hsap.Topology(1, 1))
    inputs = tensors(one, torch_dtype)
    want = attention(one, *inputs)
    kernel = select_kernel("auto", "cpu", torch_dtype, output=output)

    def errors(planner: str, topology: hsap.Topology) -> list[float]:
        plan = hsap.compile(hsap.Problem(layout, shape, topology, wire_dtype="fp32"), planner)
        return [rmse(g, w) for g, w in zip(hsap.reference(plan, *inputs[:3], inputs[3], kernel=kernel), want)]

    alone = errors("ring", hsap.Topology(1, 1))
    for planner in PLANNERS:
        for name, s, a in zip(("o", "lse", "dq", "dk", "dv"), errors(planner, hsap.Topology(8, 1)), alone):
            if name != "lse":
                assert s <= bar * a, f"{planner} {name}: {s / a:.3f}"


def test_a_plan_of_64_ranks_runs_in_one_process() -> None:
    check([700, 90, 800, 410], (8, 2), "64x1", "sap")


def test_wrong_shapes_are_refused() -> None:
    problem = hsap.Problem(hsap.Layout.from_lengths([5]), hsap.HeadShape(4, 2, 4, "fp32"), hsap.Topology(2, 1))
    plan = hsap.compile(problem, "ring")
    q, k, v, _ = tensors(problem, torch.float32)
    with pytest.raises(ValueError, match=r"k has shape \[5, 4, 4\], the plan wants \[5, 2, 4\]"):
        hsap.reference(plan, q, q, v)
    with pytest.raises(ValueError, match=r"intra_sp=8 is more than the 4 query heads; .* 1, 2, 3, 4"):
        hsap.Problem(problem.layout, problem.heads, hsap.Topology(1, 8))


def small():
    problem = hsap.Problem(hsap.Layout.from_lengths([5, 9, 2]), hsap.HeadShape(4, 2, 4, "fp64"), hsap.Topology(2, 1))
    return hsap.compile(problem), tensors(problem, torch.float64)


def test_nothing_is_recorded_for_autograd() -> None:
    plan, inputs = small()
    want = hsap.reference(plan, *inputs)
    got = hsap.reference(plan, *(x.clone().requires_grad_() for x in inputs))
    assert not any(x.requires_grad for x in got)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({0: lambda x: x.float()}, "k is torch.float64"),
        ({1: lambda x: x.half()}, "k is torch.float16"),
        ({2: lambda x: x.to("meta")}, "v is torch.float64 on meta"),
        ({3: lambda x: x.float()}, "grad_o is torch.float32"),
        (dict.fromkeys(range(4), lambda x: x.long()), "q is torch.int64"),
        (dict.fromkeys(range(4), lambda x: x.to(torch.complex64)), "q is torch.complex64"),
        ({0: lambda x: x.numpy()}, "q is array"),
        ({1: lambda x: None}, "k is None"),
        ({3: lambda x: 1.0}, r"grad_o is 1\.0"),
        ({2: lambda x: x[:-1]}, "v has shape"),
    ],
)
def test_tensors_that_don_t_fit_are_refused(change, words) -> None:
    plan, inputs = small()
    with pytest.raises(ValueError, match=f"reference: {words}"):
        hsap.reference(plan, *(change.get(i, lambda x: x)(x) for i, x in enumerate(inputs)))


@pytest.mark.parametrize("mask", [1, -1, 10**20, 0.0, "0", None, True])
def test_masks_that_the_plan_lacks_are_refused(mask) -> None:
    plan, inputs = small()
    with pytest.raises(ValueError, match="mask, an index"):
        hsap.reference(plan, *inputs, mask=mask)
    with pytest.raises(ValueError, match="reference: plan"):
        hsap.reference(plan.problem, *inputs)
