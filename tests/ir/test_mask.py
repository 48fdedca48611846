"""Masks against their definitions: which keys a query sees, pair by pair, without slices."""

import itertools
import json
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsap.api import compile
from hsap.ir import slice as sl
from hsap.ir.families import MASKS
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.mask import Mask, SliceMask, distinct_masks, mask_slices, most_slices, parse_layers, parse_masks
from hsap.ir.plan import Plan
from hsap.ir.problem import Problem, Topology, problem_from_json, problem_to_json
from hsap.ir.reader import parse
from hsap.verify import verify

MANY = 50


def shared_question(n, q, k, answers, share):
    answer = n * share // 100
    question = n - answers * answer
    if k < question:
        return k <= q
    return k <= q and (k - question) // answer == (q - question) // answer


def blockwise(n, q, k, block, window, sink, test):
    num_blocks = -(-n // block)
    own, its = q // block, k // block
    return k <= q and (its < sink or own - its < window or own >= num_blocks - test)


SEES = {
    "causal": lambda n, q, k: k <= q,
    "full": lambda n, q, k: True,
    "window": lambda n, q, k, w: k <= q and k > q - w,
    "lambda": lambda n, q, k, sink, w: k <= q and (k < sink or k > q - w),
    "blockwise": blockwise,
    "shared_question": shared_question,
    "prefix": lambda n, q, k, p: k <= q or (q < p and k < p),
    "chunked": lambda n, q, k, c: k <= q and k // c == q // c,
}
"""Whether query q of a document of n tokens sees key k."""

NUMBER = st.one_of(st.integers(1, 9), st.integers(1, MANY + 5), st.just(1 << 40))
FROM_0 = st.one_of(st.integers(0, 5), NUMBER)


@st.composite
def masks(draw):
    name = draw(st.sampled_from(sorted(MASKS)))
    if name == "shared_question":
        answers = draw(st.integers(1, 100))
        return Mask(name, (answers, draw(st.integers(1, 100 // answers))))
    return Mask(name, [draw(NUMBER if least else FROM_0) for least in MASKS[name].least.values()])


def defined(mask, n):
    sees = [[SEES[mask.name](n, q, k, *mask.parameters) for k in range(n)] for q in range(n)]
    return np.array(sees, dtype=np.int64).reshape(n, n)


def test_every_family_has_a_definition():
    assert SEES.keys() == MASKS.keys()


@settings(max_examples=300, deadline=None)
@given(masks(), st.one_of(st.integers(1, 4), st.integers(1, MANY)))
def test_slices_show_what_the_definition_says_once(mask, n):
    table = mask.slices(n)
    assert np.array_equal(sl.dense(table, n), defined(mask, n))
    assert np.array_equal(sl.canonical(table), table)
    assert len(table) <= most_slices(Layout.from_lengths([n]), mask) <= max(len(table), 1) + 101


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(masks(), st.integers(1, 20)), min_size=1, max_size=4))
def test_documents_of_a_pack_have_masks_of_their_own(documents):
    layout = Layout.from_lengths([n for _, n in documents])
    want = np.zeros((layout.num_tokens,) * 2, dtype=np.int64)
    for (mask, n), start in zip(documents, layout.cu_seqlens):
        want[start : start + n, start : start + n] = defined(mask, n)
    masks = tuple(mask for mask, _ in documents)
    table = mask_slices(layout, masks)
    assert np.array_equal(sl.dense(table, layout.num_tokens), want) and len(table) <= most_slices(layout, masks)
    assert len(mask_slices(layout, masks[0])) <= most_slices(layout, masks[0])


@pytest.mark.parametrize(
    ("mask", "num_slices"),
    [
        ("lambda:64,4096", 2),
        ("blockwise:256,2,1,1", 512 - 3 - 1 + 3),
        ("shared_question:4,20", 5),
        ("prefix:1000", 2),
        ("chunked:1024", 128),
        ("window:4096", 1),
    ],
)
def test_long_documents_have_few_slices_soon(mask, num_slices):
    mask = Mask.parse(mask)
    assert len(mask.slices(131_072)) == num_slices
    best = min(_seconds(lambda: mask.slices(131_072)) for _ in range(7))
    assert best < 2e-3


def _seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        ("window:0", "w of window is 0"),
        ("lambda:4", "write lambda:sink,w"),
        ("blockwise:2,0,1,1", "window of blockwise is 0"),
        ("blockwise:2", "write blockwise:block,window,sink,test"),
        ("shared_question:6,20", "at most 100"),
        ("chunked:-1", "whole number"),
        ("prefix", "write prefix:p"),
        (f"window:{1 << 41}", "whole number"),
    ],
)
def test_parameters_that_make_no_mask(mask, words):
    with pytest.raises(ValueError, match=words):
        Mask.parse(mask)


def test_masks_of_layers_from_one_line():
    window, causal = Mask("window", (1024,)), Mask()
    assert parse_masks("window:1024*5+causal*1") == ((window, 5), (causal, 1))
    assert parse_masks("causal") == ((causal, 1),)
    assert parse_masks(" window:1024 * 2 + causal + window:1024") == ((window, 3), (causal, 1))
    assert parse_layers("window:1024*2+causal+window:1024") == (window, window, causal, window)
    assert distinct_masks((window, window, causal, window))[1] == (0, 0, 1, 0)
    assert parse_masks("lambda:64,4096*3")[0] == (Mask("lambda", (64, 4096)), 3)


@pytest.mark.parametrize(
    "text", ["", "causal+", "causal*", "causal*x", "causal*0", "causal*-1", "causal*99999999", None]
)
def test_lines_that_name_no_masks(text):
    with pytest.raises(ValueError, match="mask"):
        parse_masks(text)


def dilated(length, parts):
    """Each part causal by itself, and the last token sees the first of every part but its own."""
    edges = np.cumsum([0, *parts]).tolist()
    own = [(a, b, a, b, -sl.UNBOUNDED, 0) for a, b in itertools.pairwise(edges) if a < b]
    return own + [(length - 1, length, a, a + 1) for a, b in itertools.pairwise(edges) if a < b < length]


def test_a_function_of_lengths_and_composition_becomes_slices():
    layout = Layout.from_lengths([7, 1, 7])
    made = Mask.of(dilated, layout, [(3, 4), (1,), (2, 0, 5)])
    assert [mask.name for mask in made] == ["dilated"] * 3
    want = np.zeros((15, 15), dtype=np.int64)
    for a, b in ((0, 3), (3, 7), (7, 8), (8, 10), (10, 15)):
        want[a:b, a:b] = np.tri(b - a)
    want[6, 0] = want[14, 8] = 1
    assert np.array_equal(sl.dense(mask_slices(layout, made), 15), want)
    assert Mask.of(dilated, layout)[0] == Mask.of(dilated, layout)[2] != made[0]
    assert len({*Mask.of(dilated, layout)}) == 2


def test_plans_keep_masks_of_slices():
    layout = Layout.from_lengths([9, 4, 21])
    own = Mask.of(dilated, layout, [(3, 6), (4,), (10, 1, 10)], name="my own; mask")
    masks = ((own, 2), ((Mask("full"), own[1], Mask("window", (3,))), 1), (Mask(), 1))
    problem = Problem(layout, HeadShape(4, 2, 8), Topology(2, 2), masks)
    assert problem_from_json(json.loads(json.dumps(problem_to_json(problem)))) == problem
    plan = compile(problem)
    assert verify(plan).ok
    assert Plan.from_bytes(plan.to_bytes()) == plan == parse(plan.text())
    assert parse(plan.text()).problem == problem
    renamed = Mask.of(dilated, layout, [(3, 6), (4,), (10, 1, 10)], name="other")
    assert compile(Problem(layout, HeadShape(4, 2, 8), Topology(2, 2), ((renamed, 2), *masks[1:]))).hash != plan.hash


def gives(rows):
    return lambda length, parts: rows


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([(0, 2, 0, 2), (3, 4, 0, 5), (1, 2, 1, 3)], r"document 0, of 5 tokens: .*slices 0 and 2"),
        ([(0, 0, 0, 5), (0, 5, 0, 5, -9, 0), (4, 5, 4, 5)], r"slices 1 and 2"),
        ([(0, 1, 0, 1), (0, 6, 0, 5)], r"slice 1, \(0, 6, 0, 5, .* leaves the document's \[0, 5\)"),
        ([(-1, 1, 0, 1)], r"slice 0, .* leaves"),
        ([(0, 1, 0)], "slice 0 has 3 numbers"),
        ([(0, 1, 0, 1.5)], r"slice 0\[3\] is 1.5"),
        ([(0, 1, 0, 1, -(1 << 60))], "whole number"),
        (np.array([[0, 1, 0, 1, -(1 << 60), 0]]), "whole number"),
        (None, "slices are None"),
        ("0,1,0,1", "slices are '0,1,0,1'"),
        (3, "slices are 3"),
    ],
)
def test_slices_that_make_no_mask(rows, words):
    with pytest.raises(ValueError, match=words) as refused:
        Mask.of(gives(rows), Layout.from_lengths([5]))
    assert "\n" not in str(refused.value)


def test_compositions_that_don_t_fit():
    layout = Layout.from_lengths([5, 6])
    for composition, words in (
        ([(5,)], "1 entries for 2 documents"),
        ([(5,), (2, 3)], "adds up to 5 tokens, document 1"),
    ):
        with pytest.raises(ValueError, match=words):
            Mask.of(dilated, layout, composition)
    own = Mask.of(dilated, layout)
    with pytest.raises(ValueError, match="document 0 has 6 tokens, its mask dilated is for 5"):
        Problem(Layout.from_lengths([6, 6]), HeadShape(4, 2, 8), Topology(2, 1), ((own, 1),))
    for broken in ({"name": "x"}, {"name": "x", "num_tokens": 5, "slices": [[0, 9, 0, 5]]}):
        with pytest.raises(ValueError, match="mask"):
            Problem(layout, HeadShape(4, 2, 8), Topology(2, 1), [[["causal", broken], 1]])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 8)] * 4, st.integers(-9, 9), st.integers(-9, 9)), max_size=6))
def test_overlaps_are_found(rows):
    table = sl.canonical(sl.slices([(min(a, b), max(a, b), min(c, d), max(c, d), e, f) for a, b, c, d, e, f in rows]))
    pair = sl.overlap(table)
    assert (pair is None) == (sl.dense(table, 8).max(initial=0) <= 1)
    if pair:
        assert pair[0] < pair[1] and sl.dense(table[list(pair)], 8).max() == 2


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 8)] * 4, st.integers(-9, 9), st.integers(-9, 9)), max_size=6))
def test_overlaps_are_found_by_the_sweep_too(rows):
    """Of slices in the order given, those that add no pair twice are kept, but for one that may."""
    table = sl.slices([])
    for a, b, c, d, e, f in rows:
        more = np.concatenate([table, sl.slices([(min(a, b), max(a, b), min(c, d), max(c, d), e, f)])])
        more = sl.canonical(more)
        overlaps = sl.dense(more, 8).max(initial=0) > 1
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("hsap.ir.slice.MOST_COMPARED", -1)
            pair = sl.overlap(more)
        assert (pair is not None) == overlaps
        if overlaps:
            assert pair[0] < pair[1] and sl.dense(more[list(pair)], 8).max() == 2
        else:
            table = more


@pytest.mark.parametrize("doubled", [False, True])
def test_many_diagonals_side_by_side_are_compared_soon(doubled):
    """Any two of them have rows and keys in common, so that comparing all pairs takes minutes."""
    n = 20_000
    rows = [(0, n, 0, 2 * n, i, i) for i in range(n)]
    rows += [(n, 2 * n, 0, 2 * n, -i - 1, -i - 1) for i in range(n)]
    if doubled:
        rows.append((n - 1, n, n, n + 1))
    start = time.perf_counter()
    if doubled:
        with pytest.raises(ValueError, match="slices 1 and 40000"):
            SliceMask("diagonals", 2 * n, np.array([row if len(row) == 6 else (*row, -9 * n, 9 * n) for row in rows]))
    else:
        SliceMask("diagonals", 2 * n, np.array(rows))
    assert time.perf_counter() - start < 20


def test_slice_masks_are_values():
    mask = SliceMask("mine", 5, [(0, 5, 0, 5, -1, 0)])
    given = np.array([[0, 5, 0, 5, -1, 0]])
    same = SliceMask("mine", 5, given)
    given[:] = 0
    assert mask == same and hash(mask) == hash(same) and str(mask) == "mine (1 slices)"
    with pytest.raises(ValueError, match="read-only"):
        mask.table[0, 0] = 1
    assert mask.slices(5) is mask.table
    with pytest.raises(ValueError, match="of a document of 5 tokens, this one has 6"):
        mask.slices(6)
