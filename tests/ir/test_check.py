"""The value classes refuse, on construction and in one paragraph, whatever a plan can't be made of."""

import json
import math

import numpy as np
import pytest

from hsap import clusters
from hsap.ir.check import MAX_HEAD_DIM, MAX_HEADS, MAX_TOKENS, number, whole, wholes
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask
from hsap.ir.problem import Cluster, Problem, Topology, problem_from_json, problem_to_json

NOT_WHOLE = (None, "3", 1.0, math.nan, True, np.float64(2), np.bool_(True), [1], 0, -1, 10**30, 10**5000)
NOT_NUMBER = (None, "3", math.nan, math.inf, -math.inf, True, 1j, [1.0], -1, -0.5, 10**400)


def problem(**change):
    given = {"layout": Layout((5, 6), (2,)), "heads": HeadShape(4, 2, 8), "topology": Topology(2, 1)}
    return Problem(**given | change)


WHOLE = {
    "num_q_heads": lambda v: HeadShape(v, 1, 8),
    "num_kv_heads": lambda v: HeadShape(4, v, 8),
    "head_dim": lambda v: HeadShape(4, 2, v),
    "inter_sp": lambda v: Topology(v, 1),
    "intra_sp": lambda v: Topology(1, v),
    "shares": lambda v: HeadShape(4, 2, 8).shares(v),
    "lengths": lambda v: Layout((v,), (1,)),
    "from_lengths": lambda v: Layout.from_lengths([v]),
    "window": lambda v: Mask("window", (v,)),
    "ranks_per_node": lambda v: Cluster(ranks_per_node=v),
    "tile_tokens": lambda v: Cluster(tile_tokens=v),
    "num_layers": lambda v: problem(masks=((Mask(), v),)),
}


@pytest.mark.parametrize("value", NOT_WHOLE, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("field", WHOLE)
def test_what_must_be_a_whole_number(field, value):
    with pytest.raises(ValueError, match="whole number") as refused:
        WHOLE[field](value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


@pytest.mark.parametrize("field", WHOLE)
@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_numpy_integers_become_ints(field, kind):
    assert WHOLE[field](kind(1)) == WHOLE[field](1)
    assert type(whole("n", kind(1))) is int and wholes("n", np.array([1, 2], kind)) == (1, 2)
    json.dumps(
        problem_to_json(problem(layout=Layout.from_lengths(np.array([2, 3], kind)), max_tokens_per_rank=kind(9)))
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"masks": (("chunked:1", 1),)}, "1 documents into as many as 16777217 slices"),
        ({"masks": ((["blockwise:2,1,1,0"], 1),)}, "slices, 2097152 are the limit"),
        ({"masks": tuple((f"chunked:{size}", 1) for size in range(10, 20))}, "slices"),
        ({"heads": HeadShape(MAX_HEADS, MAX_HEADS, MAX_HEAD_DIM, "fp64"), "topology": Topology(3, 1)}, "2.56 elements"),
        ({"masks": (("causal", 1 << 17),)}, "num_layers"),
    ],
)
def test_what_no_table_or_sum_could_hold(change, told):
    """A header of a few words is refused before anything is made of it."""
    with pytest.raises(ValueError, match=told) as refused:
        problem(layout=Layout((MAX_TOKENS,), (1,)), **change)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("value", NOT_NUMBER, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize(
    "field",
    [
        "intra_bytes_per_s",
        "inter_bytes_per_s",
        "flops_per_s",
        "intra_latency_s",
        "memory_bytes_per_s",
        "kernel_overhead_s",
        "slice_overhead_s",
        "attend_efficiency",
        "attend_grad_efficiency",
    ],
)
def test_what_must_be_a_finite_number(field, value):
    with pytest.raises(ValueError, match=f"{field} is"):
        Cluster(**{field: value})
    if value is not None:
        with pytest.raises(ValueError, match="arena_multiple"):
            problem(arena_multiple=value)


def test_numbers_become_floats():
    assert type(number("x", np.float32(0.5))) is float and number("x", 2) == 2.0
    assert problem(arena_multiple=2).arena_multiple == 2.0 and Cluster(intra_latency_s=0).intra_latency_s == 0
    with pytest.raises(ValueError, match="above 0"):
        problem(arena_multiple=0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: HeadShape(MAX_HEADS + 1, 1, 8), "num_q_heads is 32768"),
        (lambda: HeadShape(4, 2, 65537), "head_dim is 65537"),
        (lambda: HeadShape(4, 2, 8, "int4"), "unknown dtype 'int4'"),
        (lambda: HeadShape(4, 2, 8, ["bf16"]), "unknown dtype"),
        (lambda: HeadShape.parse(None), "8:2:128"),
        (lambda: Topology(4097, 1), "inter_sp is 4097"),
        (lambda: Topology(64, 65), "number of ranks of 64x65 is 4160"),
        (lambda: Topology.parse(None), "NxM"),
        (lambda: Topology.parse("9" * 20 + "x1"), "inter_sp"),
        (lambda: Layout.from_lengths(None), "list of whole numbers"),
        (lambda: Layout.from_lengths(5), "list of whole numbers"),
        (lambda: Layout.from_lengths("56"), "list of whole numbers"),
        (lambda: Layout.from_lengths([3, 0, 5]), r"lengths\[1\] is 0"),
        (lambda: Layout.from_lengths([MAX_TOKENS, 1]), "16777217 tokens together"),
        (lambda: Layout((5, 6), (1,)), "sequences add up to 1 documents, 2"),
        (lambda: Layout((5, 6), (3, -1)), r"sequences\[1\] is -1"),
        (lambda: Layout((5, 6), None), "sequences is None"),
        (lambda: Mask("window", None), "parameters of window is None"),
        (lambda: Mask("window", ()), "write window:w"),
        (lambda: Mask(["causal"]), "unknown name"),
        (lambda: Mask.parse(None), "window:4096"),
        (lambda: Mask.parse("window:x"), "must be integers"),
        (lambda: Cluster(first_rank=8), "first_rank, a place inside a node, is 8"),
        (lambda: Cluster(name=3), "cluster: name"),
        (lambda: Cluster(num_nodes=0), "num_nodes"),
        (lambda: clusters.read(["x"]), "unknown preset"),
        (lambda: problem(layout=(5, 6)), "give a Layout"),
        (lambda: problem(heads="8:2:8"), "give a HeadShape"),
        (lambda: problem(topology="4x1"), "give a Topology"),
        (lambda: problem(cluster="dgx"), "give a Cluster"),
        (lambda: problem(max_tokens_per_rank="9"), "max_tokens_per_rank"),
        (lambda: problem(max_tokens_per_rank=0), "max_tokens_per_rank"),
        (lambda: problem(wire_dtype=3), "unknown wire_dtype 3"),
        (lambda: problem(masks=((["causal", 3], 1),)), "mask is 3"),
        (lambda: problem(masks=((["causal"], 1),)), "1 masks for 2 documents"),
    ],
)
def test_other_values_are_refused_with_what_to_give(make, words):
    with pytest.raises(ValueError, match=words) as refused:
        make()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "masks", [None, (), "causal", Mask(), 3, ["causal"], [("causal",)], [("causal", 1, 2)], [(3, 1)], [(None, 1)], "ab"]
)
def test_masks_of_another_form_are_refused_with_the_form(masks):
    with pytest.raises(ValueError, match=r"give \(mask, num_layers\) pairs"):
        problem(masks=masks)


def test_masks_may_be_given_as_text_and_lists():
    want = problem(masks=((Mask(), 3), ((Mask("full"), Mask("window", (4,))), 1)))
    assert problem(masks=[["causal", 3], [["full", "window:4"], 1]]) == want
    assert problem_from_json(json.loads(json.dumps(problem_to_json(want)))) == want
