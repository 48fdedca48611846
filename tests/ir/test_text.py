"""The text form: exact round trips, the paper's listings, and what malformed text gets."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsap.api import compile
from hsap.ir.heads import HeadShape
from hsap.ir.layout import Layout
from hsap.ir.listing import Line
from hsap.ir.mask import Mask
from hsap.ir.plan import Plan
from hsap.ir.problem import Cluster, Problem, Topology
from hsap.ir.program import NONE, Op, Role
from hsap.ir.reader import parse

HEADS = HeadShape(4, 2, 8, "bf16")

RANK_0 = """
Rank 0
0: create $recv-op $q %3
1: copy-q $local $comp
2: copy-kv $local $comp
3: copy-kv $comp $comm
4: create $send-op $kv %1
5: compute
6: copy-o $comp $local
7: copy-q $comm $comp
8: create $recv-op $q %2
9: create $send-op $kv %2
10: compute
11: copy-o $comp $ comm
12: create $send-op $o %3
13: copy-q $comm $comp
14: create $send-op $kv %3
15: compute
16: copy-o $comp $comm
17: create $send-op $o %2
"""

RANK_3 = """
Rank 3
0: create $recv-op $ kv %2
1: copy-q $local $comp
2: copy-kv $local $comp
3: copy-kv $comp $comm
4: create $send-op $kv %4
5: compute
6: copy-o $comp $local
7: copy-kv $comm $comp
8: create $recv-op $q %5
9: compute
10: create $recv-op $o %0
11: copy-o $comp $local
12: copy-o $comm $lcoal
13: copy-q $comm $comp
14: compute
15: create $recv-op $o %1
16: copy-o $comm $local
17: copy-o $comp $comm
18: create $send-op $o %5
"""


def small(lengths=(7, 5, 3), topology="2x1", planner="ring", heads=HEADS, **more):
    return compile(Problem(Layout.from_lengths(lengths), heads, Topology.parse(topology), **more), planner)


TINY = small([3, 2], "2x1", "zigzag").text()


def assert_same(read: Plan, plan: Plan):
    assert read.hash == plan.hash
    assert read.to_bytes() == plan.to_bytes()


@given(
    lengths=st.lists(st.integers(1, 40), max_size=5),
    topology=st.sampled_from(["1x1", "2x1", "3x1", "4x1", "1x2", "2x2", "2x3", "1x4"]),
    planner=st.sampled_from(["ring", "zigzag"]),
    heads=st.sampled_from([HeadShape(4, 2, 8), HeadShape(9, 3, 4, "fp32"), HeadShape(28, 4, 2, "fp64")]),
    window=st.integers(1, 9),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_round_trip(lengths, topology, planner, heads, window, seed):
    per_document = tuple(Mask(["causal", "full"][(seed + i) % 2]) for i in range(len(lengths)))
    masks = [(Mask("window", (window,)), 5), (per_document, 1), (Mask(), 2)][: 1 + seed % 3]
    problem = Problem(Layout.from_lengths(lengths), heads, Topology.parse(topology), masks)
    plan = compile(problem, planner)
    assert_same(parse(plan.text()), plan)


def test_round_trip_of_every_part_of_a_problem():
    plan = small(
        (3, 4, 1),
        "2x2",
        cluster=Cluster("a; #b ; \n", 3, 1, 1e9 / 3, 0.1),
        max_tokens_per_rank=8,
        arena_multiple=17.25,
        wire_dtype="fp32",
    )
    plan = replace(plan, options={"note": "x ; y\nz", "balance": [1, None, 2.5]})
    assert_same(parse(plan.text()), plan)


def test_round_trip_of_packs_and_of_one_giant_document():
    problem = Problem(Layout((3, 4, 1), (0, 2, 1)), HeadShape(2, 1, 4), Topology(2, 1))
    plan = compile(problem, "zigzag")
    assert_same(parse(plan.text()), plan)
    assert_same(parse(small([1 << 24], "3x1").text()), small([1 << 24], "3x1"))


def test_round_trip_of_columns_that_no_compiler_makes():
    """Mutated plans must print as they are, or nobody could look at what a verifier refuses."""
    plan = small()
    draw = np.random.default_rng(0)
    programs = plan.programs[0][0]
    for name in ("role", "peer", "round", "buf", "rows", "slices", "heads", "stage", "index"):
        column = getattr(programs, name)
        top = {"role": 6, "heads": 100}.get(name, 1 << 20)
        mutant = replace(programs, **{name: draw.integers(-1, top, column.shape).astype(column.dtype)})
        mutated = replace(plan, programs=((mutant, plan.programs[0][1]),))
        assert_same(parse(mutated.text()), mutated)


def test_spaces_comments_and_blank_lines_don_t_matter():
    plan = small()
    lines = [line.partition("  ;")[0].replace(" ", "\t ") for line in plan.text().split("\n")]
    assert_same(parse("\n; a word\n".join(f"   {line} " for line in lines)), plan)


def test_the_paper_s_spelling_is_what_is_printed():
    lines = [line.partition("  ;")[0] for line in small([12]).text().split("\n")]
    start = lines.index("stream rank 0")
    stream = [line for line in lines[start : lines.index("stream rank 1")] if line.startswith("#")]
    assert stream == [
        "#0 create $send-op $kv %1 round 2 b1 rows 0:1",
        "#1 create $recv-op $kv %1 round 2 b3 rows 1:2",
        "#2 launch round 2",
        "#3 compute b0 b1 -> b2 slices 0:1",
        "#4 wait round 2",
        "#5 copy-o $comp $local b2 -> b4 rows 0:1",
    ]


def edited(pattern, replacement):
    text = small().text()
    assert pattern in text
    return text.replace(pattern, replacement, 1)


@pytest.mark.parametrize(
    ("pattern", "replacement", "words"),
    [
        ("options {}", 'options {}\nchoice {"sap": NaN}', "line 5: expected a JSON object"),
        ("hsap-plan-text 1", "hsap-plan-text " + "2" * 5000, "line 1: expected '1', found '22"),
        ('topology "2x1"', 'topology "2x1\\n' + "1" * 5000 + '"', "expected NxM"),
        ("problem lengths [7, 5, 3]", 'problem heads {"' + "a\\nb" * 900 + '": 1}', "lacks or mistypes"),
        ("hsap-plan-text 1", "hsap-plan-text 2", "line 1: expected '1', found '2'"),
        ('planner "ring"', "planner ring", "line 3: expected a JSON string"),
        ('planner "ring"', "planner 3", "line 3: expected a JSON string, found '3'"),
        ("options {}", "options " + "[" * 10000, "JSON"),
        ('topology "2x1"', 'topology "3x1"', "3 columns and 3 ranks"),
        ('topology "2x1"', 'topology "4000x1"', "more ranks than the text has lines"),
        ('topology "2x1"', 'topology "none"', "topology=none: expected NxM"),
        ("problem lengths [7, 5, 3]", 'problem lengths ["7"]', "lengths[0] is"),
        ("problem lengths [7, 5, 3]", "problem lengths [7.5, 5, 3]", "lengths[0] is 7.5"),
        ("problem lengths [7, 5, 3]", "problem length [7, 5, 3]", "lacks or mistypes 'lengths'"),
        ("problem lengths", "problem colour 3\nproblem lengths", "unknown parts or values"),
        ("shard 1 home", "shard 2 home", "expected 1, the number of the next shard, found '2'"),
        ("[0,7)", "[0,7]", "expected a span, as in [0,100)"),
        ("[0,7)", "[0,99999999999999999999)", "expected a span"),
        ("lo -6", "lo -9999999999999999999", "within 64 bits"),
        ("direction backward", "direction sideways", "expected 'backward', found 'sideways'"),
        ("stream rank 1", "stream rank 2", "the number of the next rank"),
        ("#1 ", "#7 ", "expected #1, the number of the next instruction, found '#7'"),
        ("create $send-op", "create $lend-op", "expected $send-op or $recv-op, found '$lend-op'"),
        ("$send-op $kv", "$send-op $vk", "expected a role"),
        ("$send-op $kv %1", "$send-op $kv 1", "expected a peer"),
        ("launch round 2", "launch round two", "expected a round, found 'two'"),
        ("launch round 2", "launch round 2 round 2", "expected the end of the line, found 'round'"),
        ("launch round 2", "launch round 4294967296", "within 32 bits"),
        ("copy-o $comp $local", "copy-o $comm $local", "goes from $comp to $local, not $comm to $local"),
        ("copy-o $comp", "copy-x $comp", "expected an instruction"),
        ("compute b0 b1", "compute b0 b0 b0 b0 b1", "at most 5"),
        ("stage 0\n#", "#", "expected a line with the stage"),
        ("input rows", "inbox rows", "expected a space: input, output, kept or arena"),
        ("kv0:2 bytes", "kv0:99999 bytes", "within 16 bits"),
    ],
)
def test_malformed_text_names_line_and_expectation(pattern, replacement, words):
    with pytest.raises(ValueError) as error:
        parse(edited(pattern, replacement))
    assert words in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 500


def test_errors_name_the_line_of_the_file():
    text = edited("launch round 2", "lunch round 2")
    number = 1 + text.split("\n").index(next(line for line in text.split("\n") if "lunch" in line))
    with pytest.raises(ValueError, match=f"line {number}: .*found 'lunch'"):
        parse(text)


def test_text_cut_short_at_any_line_is_refused():
    lines = [line for line in small([3], "1x1").text().split("\n") if line.strip()]
    for count in range(1, len(lines)):
        cut = "\n".join(lines[:count])
        try:
            read = parse(cut)
        except ValueError:
            continue
        # What was cut can only be the end of the last stream, which is a plan too: a verifier's case.
        assert lines[count].startswith(("#", "stage", "b")) and read != small([3], "1x1")


JUNK = [
    "",
    "-",
    "->",
    "b",
    "b0",
    "b-9",
    "#",
    "#0",
    "$",
    "$q",
    "$none",
    "%",
    "%-1",
    "-1:-1",
    "9999999999999999999999",
    "0",
]
JUNK += ["heads", "rows", "stage", "stream", "create", "copy-", "copy", "[]", "{}", "null", "[[[", '"1x1"', ";", "Rank"]


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_text_is_refused_or_read_and_nothing_else(data):
    words = TINY.split(" ")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(words) - 1))
        words[at] = data.draw(st.sampled_from([*JUNK, words[at] + "\n", words[at][:-1], words[at] + "0"]))
    damaged = " ".join(words)
    try:
        plan = parse(damaged)
    except ValueError as error:
        assert re.match(r"line \d+: ", str(error))
    else:
        assert_same(parse(plan.text()), plan)


def test_more_text_than_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr("hsap.ir.reader.MAX_CHARACTERS", 100)
    with pytest.raises(ValueError, match="the limit is 100"):
        parse(small().text())


def test_the_paper_s_listings():
    listing = parse(RANK_0 + "… …\n" + RANK_3 + "… …\n")
    streams = dict(listing.streams)
    assert {rank: len(lines) for rank, lines in streams.items()} == {0: 18, 3: 19}
    assert streams[0][0] == Line(0, Op.RECV, Role.Q, 3, ())
    assert streams[0][11] == Line(11, Op.COPY, Role.O, NONE, ("comp", "comm"))
    assert streams[3][0] == Line(0, Op.RECV, Role.KV, 2, ())
    assert sum(line.op == Op.ATTEND for line in streams[3]) == 3


@pytest.mark.parametrize("words", ["0:0", "3:1", "0:2000000000", "0 x", "0:1:2", "0 " * 40, "0:5", "4:12"])
def test_an_index_that_no_kernels_need_is_refused(words):
    """Of 4 slices and 4 query heads: 16 entries at most, no empty ranges, and none of more slices than there are."""
    text = small([3, 2], "2x1", "zigzag").text()
    with pytest.raises(ValueError, match=r"line [0-9]+: expected"):
        parse(re.sub("index 0 .*", f"index 0 {words}", text, count=1))


def test_a_short_text_asks_for_no_long_index(monkeypatch):
    """Ranges spell out slices times query heads, which a header may have any number of."""
    monkeypatch.setattr("hsap.ir.reader.MAX_INDEX", 1000)
    plan = small([3, 2], "2x1", "zigzag", HeadShape(30_000, 1, 1))
    asked = re.sub("index 0 .*", "index 0 " + "0:4 " * 251, plan.text(), count=1)
    with pytest.raises(ValueError, match="expected one slice or some of 4, and 1000 entries of the index at most"):
        parse(asked)
    assert_same(parse(plan.text()), plan)


def test_text_takes_the_shares_of_heads_once(monkeypatch):
    """Every rank of an IntraSP group has a line for its share: with all shares made anew for each that is quadratic."""
    plan, calls = small([64], "1x32", heads=HeadShape(32, 32, 1)), []
    of_all = HeadShape.shares
    monkeypatch.setattr(HeadShape, "shares", lambda heads, intra_sp: calls.append(intra_sp) or of_all(heads, intra_sp))
    assert_same(parse(plan.text()), plan)
    assert len(calls) < 8
